# ruff: noqa: F811 (fixtures are imported)
"""The long form of the fault injection: minutes. Each try prints how to repeat it.

KILLS=20 SEED=7 pytest -n 0 -s -m faults .ci/test_faults.py
"""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from test_ddp_train import (  # noqa: F401
    LINUX,
    PYTHON,
    SCRIPT,
    STARTED,
    TINY,
    UNCLEAN,
    assert_same,
    data,
    end_what_is_left,
    environment,
    finish,
    free_port,
    out,
    result,
    run,
    run_ranks,
    send,
    start,
    tiny,
    torchrun,
    wait_for,
)

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not LINUX, reason="it looks for processes in /proc"),
]
KILLS = int(os.environ.get("KILLS", 100))
SEED = int(os.environ.get("SEED", random.randrange(10**6)))
LONG = "--epochs 4 --dropout 0.1 --save-every 3 --eval-every 11 --workers 1".split()
VICTIMS = "first rank", "last rank", "loading process", "launcher", "all"


@pytest.fixture(scope="module")
def untouched(data, tmp_path_factory):
    """The folders of two runs that nobody stopped: of one rank, and of two."""
    folders = {}
    for world in (1, 2):
        folders[world] = tmp_path_factory.mktemp("untouched")
        options = *TINY, *LONG, "--data", data, "--out", folders[world]
        run_ranks(world, SCRIPT, *options)
    return folders


@pytest.mark.parametrize("signals", ["KILL", "TERM INT USR1"])
def test_signals_at_any_moment(tiny, out, untouched, signals):
    """To any process. The same command again, until the run is done: the same bits."""
    for seed in range(SEED, SEED + KILLS):
        rng = random.Random(seed)
        name = rng.choice(signals.split())
        victim = rng.choice(VICTIMS)
        world = rng.choice((1, 2))
        print(f"SEED={seed} KILLS=1: SIG{name}, {victim}, ranks: {world}", end="")
        command = [PYTHON, SCRIPT, *tiny, *LONG]
        if world == 2:
            command = torchrun(2, "--max-restarts=3", *command[1:])
        first = start(*command)
        wait_for_moment(first, rng)
        for pid in pids_of(victim, first.pid, world):
            send(pid, signal.Signals[f"SIG{name}"])
        said = finish(first, code=None)
        starts = 1 + said.count("going on from")
        while "done: step" not in said:
            starts += 1
            said = finish(start(*command), code=None)
            assert starts < 9, said
        print(f", starts: {starts}", flush=True)
        assert_ended_alike(out, untouched[world])
        shutil.rmtree(out)
        STARTED.clear()


def assert_ended_alike(out, untouched):
    """The same bits, and the same numbers in metrics.jsonl."""
    assert_same(result(out), result(untouched))


def wait_for_moment(process, rng):
    """A random step, or any moment of the first seconds."""
    if rng.random() < 0.8:
        wait_for(process, rf"step {rng.randint(1, 120)} |done")
    else:
        time.sleep(8 * rng.random())


def pids_of(victim, launcher, world):
    ranks = [launcher]
    if world == 2:
        ranks = children(launcher)
    loaders = [pid for rank in ranks for pid in children(rank)]
    if victim == "first rank":
        return ranks[:1]
    if victim == "last rank":
        return ranks[-1:]
    if victim == "loading process":
        return loaders[:1]
    if victim == "launcher":
        return [launcher]
    return [launcher, *ranks, *loaders]


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += task.read_text().split()
        except OSError:  # the process has just ended
            pass
    return sorted(int(child) for child in found)


def test_exits_are_clean(tiny, tmp_path):
    """20 of 20, with torchrun and by hand: no abort, no warning about the group."""
    for number in range(20):
        options = *tiny, "--max-steps", 5, "--out", tmp_path / str(number)
        if number % 2:
            said = run(*torchrun(2, SCRIPT, *options))
        else:
            said = "".join(run_ranks(2, SCRIPT, *options))
        assert not re.search(UNCLEAN, said), said


def test_start_may_take_longer_than_a_step(tiny):
    """Rank 1 is started 20 s late, though --timeout is 3."""
    home = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    home["MASTER_PORT"] = str(free_port())
    command = PYTHON, SCRIPT, *tiny, "--timeout", 3, "--max-steps", 5
    first = start(*command, env={**home, "RANK": "0"})
    time.sleep(20)
    run(*command, env={**home, "RANK": "1"})
    assert "done: step 5" in finish(first)
