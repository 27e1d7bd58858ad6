"""The long form, for whoever changes how runs stop, save or end: some 20 minutes.

    make test-long                                   or, to repeat one failure:
    KILLS=1 SEED=7 pytest -s -m long tests/test_long.py

KILLS (100): kills and stops at random moments. FILES (1000): damaged checkpoints.
EXITS (20): clean exits of each kind. ENTRIES (200): ranks that enter a second time.
"""

import os
import random
import re
import shutil
import signal
import sys
import time

import pytest

import harness
from harness import (
    DATA,
    HARD,
    SCRIPT,
    TINY,
    assert_same_run,
    end_all,
    enter_twice,
    fail,
    fork_ranks,
    free_port,
    launch,
    load,
    ticks,
    torchrun,
    try_damaged_files,
)

pytestmark = [pytest.mark.long, pytest.mark.processes]
KILLS = int(os.environ.get("KILLS", 100))
FILES = int(os.environ.get("FILES", 1000))
EXITS = int(os.environ.get("EXITS", 20))
ENTRIES = int(os.environ.get("ENTRIES", 200))
SEED = int(os.environ.get("SEED", random.randrange(10**6)))
# What a group that does not end as it should makes torch, gloo or Python say.
UNCLEAN = "Traceback|terminate called|Signal|core dumped|destroy_process_group|leaked"
LONG = [*HARD, "--epochs", 30, "--timeout", 20]


def run(size, *options):
    """Start a run in so many ranks: one is not launched at all."""
    if size == 1:
        return launch(sys.executable, SCRIPT, *options)
    return launch(*torchrun(size, SCRIPT, *options))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """{ranks: the folder of a run that nobody stopped}"""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "data").write_bytes(DATA)
    options = [*TINY, *LONG, "--data", folder / "data"]
    for size in (1, 2):
        run(size, *options, "--out", folder / str(size)).end()
    return {size: folder / str(size) for size in (1, 2)}


@pytest.mark.parametrize("names", ["KILL", "TERM INT HUP"])
def test_signals_at_random_moments(tiny, out, whole, names):
    """To a rank, torchrun or a loading process. Started again, it has the same bits."""
    for seed in range(SEED, SEED + KILLS):
        rng = random.Random(seed)
        number = signal.Signals["SIG" + rng.choice(names.split())]
        size = rng.choice((1, 2))
        options = [*tiny, *LONG, "--workers", rng.choice((0, 0, 0, 1))]
        first = run(size, *options)
        if rng.random() < 0.8:
            first.wait_for(rf"step {rng.randint(1, 200)} |done")
        time.sleep(rng.random() * rng.choice((0.01, 1)))
        print(f"SEED={seed} KILLS=1: {number.name}, ranks: {size}", end="", flush=True)
        try:
            os.kill(rng.choice(first.left), number)
        except (IndexError, ProcessLookupError):
            print(" (it had ended)", end="")
        wait_for_end(first)
        starts = 1
        while not (out / "checkpoint.pt").exists() or "done: step" not in first.text:
            first = run(size, *options)
            wait_for_end(first)
            starts += 1
            assert starts < 4, first.text
        print(f", starts: {starts}", flush=True)
        assert_same_run(whole[size], out)
        shutil.rmtree(out)


def wait_for_end(process):
    """With any exit code; and until no process is left."""
    for _ in ticks():
        if process.has_ended():
            return process.leaves_none()
    fail("it does not end")


def test_damaged_files(saved):
    try_damaged_files(saved, FILES, SEED)


@pytest.fixture(autouse=True)
def long_deadline(monkeypatch):
    """torch.compile takes a minute and more on busy cores."""
    monkeypatch.setattr(harness, "DEADLINE", 300)


KINDS = {"plain": "", "workers": "--workers 2", "compile": "--compile", "late": ""}


@pytest.mark.parametrize("kind", KINDS)
def test_exits_are_clean(tiny, tmp_path, kind):
    """Exit code 0, no abort, no complaint. late: one rank starts some seconds later."""
    for number in range(EXITS):
        folder = tmp_path / str(number)
        options = [*tiny, *KINDS[kind].split(), "--max_steps", 5, "--out", folder]
        if kind == "late":
            said = "".join(start_one_late(options))
        else:
            said = run(2, *options).end()
        assert not re.search(UNCLEAN, said), said
        assert load(folder)["step"] == 5
        print(f"{kind} {number}", flush=True)


def start_one_late(options):
    ranks = []
    home = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    home["MASTER_PORT"] = str(free_port())
    for rank in ("0", "1"):
        command = sys.executable, SCRIPT, *options
        ranks.append(launch(*command, env={**home, "RANK": rank}))
        time.sleep(5)
    return end_all(ranks)


def test_second_entry_never_hangs():
    """Beside busy processes. It is refused, but not to a process that was not launched.

    The address of the first group may still answer, at some moments.
    """
    for number in range(ENTRIES):
        if number % 25 == 0:  # an alarm ends them
            for _ in range(3):
                launch(sys.executable, "-c", "while True: pass")
        for text in end_all(fork_ranks(2, enter_twice), code=1):
            assert text.splitlines().count("entered") == 1
            assert "a rank can enter distributed() once: " in text
        (text,) = end_all(fork_ranks(1, enter_twice))
        assert text.splitlines() == ["entered", "entered"]
        print(f"entered twice: {number + 1}", flush=True)
