"""100 kills and 100 signals at random moments, in some half an hour.

COUNT=1 SEED=7 pytest -s -m long tests/test_long.py      repeats one failure
"""

import contextlib
import os
import random
import re
import shutil
import signal

import pytest

from harness import (
    DATA,
    SCRIPT,
    TINY,
    assert_same_run,
    launch,
    start_training,
    torchrun,
    train,
)

pytestmark = [pytest.mark.long, pytest.mark.processes]
COUNT = int(os.environ.get("COUNT", 100))
SEED = int(os.environ.get("SEED", random.randrange(10**6)))
LONG = "--batch_size 2 --accum 2 --epochs 20 --dropout 0.1 --save_every 3".split()
LONG += ["--timeout", "20"]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """A folder with runs that nobody stopped: 1 on one rank, 2 on two ranks."""
    folder = tmp_path_factory.mktemp("untouched")
    (folder / "data").write_bytes(DATA)
    options = [*TINY, *LONG, "--data", folder / "data", "--out"]
    for size in (1, 2):
        train(size, *options, folder / str(size))
    return folder


@pytest.mark.parametrize("names", ["KILL", "TERM INT HUP USR1 USR2"])
def test_at_random_moments(tiny, out, untouched, names):
    """To one process. The run is resumed until it is done, and has the same bits."""
    for seed in range(SEED, SEED + COUNT):
        rng = random.Random(seed)
        number = signal.Signals["SIG" + rng.choice(names.split())]
        size = rng.choice((1, 2))
        options = [*tiny, *LONG, "--workers", rng.choice((0, 0, 0, 1))]
        print(f"SEED={seed} {number.name}, ranks: {size}, {options[-1]}", end="")
        if rng.random() < 0.2:
            run = [launch(*torchrun(size, SCRIPT, *options))]
        else:
            run = start_training(size, *options)
        run[0].wait_for(rf"step {rng.randrange(150)} |done: ")
        victim = rng.choice(run)
        if victim.code is None:
            with contextlib.suppress(ProcessLookupError):  # a worker may have ended
                os.kill(rng.choice([victim.pid, *victim.left]), number)
        for _ in range(4):
            said = [process.wait() for process in run]
            for process in run:
                process.leaves_none()
            if re.search("done: |nothing left to train", said[0]):
                break
            run = start_training(size, *options)
        print(": it ends", flush=True)
        assert_same_run(untouched / str(size), out)
        shutil.rmtree(out)
