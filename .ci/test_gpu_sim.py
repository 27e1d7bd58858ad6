"""Tests of what can be shown without a GPU: see gpu_sim.py and gpu.py."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from test_ddp_train import end_what_is_left, environment, run  # noqa: F401

PROGRAM = Path(__file__).with_name("gpu_sim.py")
SMALL = "--layers 1 --heads 2 --dim 16 --seq-len 32 --batch-size 4 --max-steps 12"
DUE = "--log-every 4 --eval-every 6 --save-every 8"
pytestmark = pytest.mark.processes
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.mark.skipif(VERSION < (2, 13), reason="only torch 2.13 registers a device so")
@pytest.mark.parametrize(
    "options",
    [
        "fp16 --accum 2",
        pytest.param("fp32", marks=pytest.mark.faults),  # of the long form
        pytest.param("bf16 --dropout 0.1", marks=pytest.mark.faults),
    ],
)
def test_train_on_a_pretended_gpu(options, tmp_path):
    """Twelve steps, two evaluations, two saves: what is copied, read and sent."""
    data = tmp_path / "bytes"
    data.write_bytes(bytes(range(256)) * 20)
    options = f"{SMALL} {DUE} --data {data} --precision {options}"
    output = run(sys.executable, PROGRAM, *options.split())
    assert "done: step 12" in output, output
    events = [json.loads(line) for line in output.splitlines() if line[0] == "{"]
    check_copies_to_the_device(events)
    check_waits(events)
    check_that_ranks_meet_before_they_wait(events)
    check_that_collectives_are_on_the_cpu(events)


def waits(events):
    """Those in which the CPU waits for the device."""
    return [event for event in events if event["device"] == "sim:0" and event["waits"]]


def check_copies_to_the_device(events):
    """Nothing but x and y is copied there, and the CPU does not wait for it."""
    copies = [event for event in events if event["what"] == "copy to sim:0"]
    assert {event["where"] for event in copies} == {"take"}
    assert {event["shape"][1] for event in copies} == {32}  # 32 bytes, x and y alike
    assert not any(event["waits"] for event in copies)


def check_waits(events):
    """Only the log, the evaluation and the save wait for the device."""
    assert {event["step"] for event in waits(events)} == {4, 6, 8, 12}
    places = {event["where"] for event in waits(events)}
    assert places <= {"all_reduce_sum", "train", "check_finite", "save"}
    assert {"all_reduce_sum", "train", "save"} <= places


def check_that_ranks_meet_before_they_wait(events):
    """A rank that is missing is noticed on the CPU, by gloo."""
    before = [event["where"] for event in events[: events.index(waits(events)[0])]]
    assert before[-1] == "barrier"
    for step in (4, 6, 8, 12):
        first = waits(event for event in events if event["step"] == step)[0]
        assert first["where"] == "all_reduce_sum"


def check_that_collectives_are_on_the_cpu(events):
    """Those that the program makes itself: the averaging of gradients is DDP's."""
    collectives = [event for event in events if event["what"].endswith("_")]
    assert {event["device"] for event in collectives} == {"cpu"}
    seen = {(event["what"], event["where"]) for event in collectives}
    assert seen == {
        ("broadcast_", "outside"),  # broadcast_object_list, called by gpu_sim.py
        ("allgather_", "all_gather"),
        ("allreduce_", "__call__"),  # the stop signal
        ("allreduce_", "all_reduce_sum"),
        ("allreduce_", "barrier"),
    }


def test_make_test_gpu_says_what_it_would_do():
    """DRY_RUN=1 lists each check. Without a GPU it says so, and nothing fails."""
    # Its pytest is none of those that run the tests side by side.
    env = {"DRY_RUN": "1", "PYTEST_XDIST_WORKER": ""}
    output = run(sys.executable, PROGRAM.with_name("gpu.py"), env=env)
    row = r"^\| (.+) \| (.+) \| needs (\d), at most (\d+) s \| (.+) \|$"
    rows = re.findall(row, output, re.MULTILINE)
    assert len(rows) >= 20, output
    if torch.cuda.device_count() == 0:
        assert {reason for _, reason, _, _, _ in rows} == {"no GPU"}
