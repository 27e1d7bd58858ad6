"""Tests of ddp_train.py: they start the real program, break it, and see what it left.

    pytest test_ddp_train.py                       everything that this machine can run
    pytest test_ddp_train.py -m "not processes"    the direct tests: some seconds

The order is that of the program. Whole runs come last: the same numbers on any number
of ranks, every way to start, stops and kills, ranks that fail. .ci/ has more tests.
"""

import contextlib
import ctypes
import fcntl
import io
import itertools
import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections import UserDict
from multiprocessing import Event
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
    get_worker_info,
)

import ddp_train
from ddp_train import Checkpoint, StopSignal, World

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "ddp_train.py"
DRIVER = HERE / "test_ddp_train.py"  # this file as a program: see driver()
PYTHON = sys.executable
LINUX = sys.platform == "linux"
# A model so small that a step takes milliseconds.
TINY = "--device cpu --dim 16 --layers 1 --heads 2 --seq-len 32".split()
TINY += "--batch-size 4 --log-every 1".split()
# No test waits longer than this many seconds for a process.
DEADLINE = int(os.environ.get("DEADLINE", 300))
UNCLEAN = "terminate called|Traceback|destroy_process_group|core dumped"


# ---- Start processes, and leave none -------------------------------------------------
STARTED = []  # the processes of the test that runs now


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory):
    """What all processes of the tests inherit."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("tmp"))
    for name in list(os.environ):
        if name.startswith(("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_")):
            del os.environ[name]
    os.environ["TMPDIR"] = tempfile.tempdir
    os.environ.pop("PYTHONUNBUFFERED", None)  # or what is in a buffer would be seen
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    search = [str(HERE), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in search if path)
    torch.set_num_threads(1)
    if LINUX:
        # A process whose parent has died becomes our child. So we find it, and only it.
        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


@pytest.fixture(autouse=True)
def end_what_is_left():
    """After each test: end what it started, and what that started."""
    yield
    for process in STARTED:
        kill(process)
    for pid in descendants(os.getpid()):
        send(pid, signal.SIGKILL)
    STARTED.clear()


def kill(process):
    """Kill a process, and all that it has started."""
    for pid in [*descendants(process.pid), process.pid]:
        send(pid, signal.SIGKILL)
    process.wait()


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended
        pass


def descendants(pid):
    """The numbers of all children of a process, and of their children (Linux)."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:  # the process has just ended
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def start(*command, env=None, cwd=None):
    """Start a command in a session of its own. Its output goes to process.log."""
    command = [str(word) for word in command]
    handle, path = tempfile.mkstemp(suffix=".log")
    with open(handle, "wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ddp_train.die_with_parent,
        )
    process.log = Path(path)
    settings = [f"{name}={value}" for name, value in (env or {}).items()]
    process.command = shlex.join([*settings, *command])
    STARTED.append(process)
    return process


def finish(process, code=0):
    """Wait for its end. Returns its output. code: the exit code that it must have."""
    try:
        process.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        fail(f"this still runs after {DEADLINE} s", process)
    if code is not None and process.returncode != code:
        fail(f"the exit code is {process.returncode}, not {code}", process)
    output = process.log.read_text(errors="replace")
    # Without what gloo (torch 2.9) and torchrun (if its store has gone) say themselves.
    output = re.sub(r"\[Gloo\] Rank .*\n|.*torch/distributed/elastic/.*\n", "", output)
    if code == 0 and re.search(UNCLEAN, output):
        fail("it is not a clean exit", process)
    return output


def finish_all(processes, code=0):
    return [finish(process, code) for process in processes]


def wait_for(process, pattern):
    """Wait until its output has a line like `pattern`. Returns the output so far."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        ended = process.poll() is not None
        output = process.log.read_text(errors="replace")
        if re.search(pattern, output):
            return output
        if ended:
            fail(f"it ended with {process.returncode}, without {pattern!r}", process)
        time.sleep(0.02)
    fail(f"no {pattern!r} within {DEADLINE} s", process)


def fail(reason, process):
    """Fail with the command, to paste, and with what every process has said."""
    pytest.fail(f"{reason}\n  {process.command}\n{report()}", pytrace=False)


def report():
    """The command, the exit code and the output of each process of this test."""
    lines = []
    for process in STARTED:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)  # it may have something to say, too
        lines.append(f"---- {process.command}: exit code {process.poll()}")
        lines.append(process.log.read_text(errors="replace")[-5000:])
    return "\n".join(lines)


def run(*command, code=0, env=None, cwd=None):
    """Start a command and wait for its end. Returns its output."""
    return finish(start(*command, env=env, cwd=cwd), code)


def torchrun(nproc, *command):
    """The command that starts a script in so many processes."""
    launcher = [PYTHON, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={nproc}", *command]


def start_ranks(world, *command, env=None, cwd=None):
    """Start ranks by hand, without a launcher: rank r gets RANK=r in its environment.

    A word of the command may be a list: then rank r gets its r-th entry.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(world):
        words = [word[rank] if isinstance(word, list) else word for word in command]
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        everything = {**address, **mine, **(env or {})}
        processes.append(start(PYTHON, *words, env=everything, cwd=cwd))
    return processes


def run_ranks(world, *command, code=0, env=None):
    """Start ranks by hand and wait for them. Returns the output of each."""
    if world == 1:
        return [run(PYTHON, *command, code=code, env=env)]
    return finish_all(start_ranks(world, *command, env=env), code)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- The program with a fault: `python test_ddp_train.py FAULT RANK STEP options` ----
# Something happens on one rank in one step: so no test has to hit the right moment.
def train_with_fault(fault, rank, step, *argv):
    """Run ddp_train.py; in step `step` of this start, on this rank (or "all"): a fault.

    fault: raise, hang, exit, nan, ctrl-c (three times), or a signal: TERM (to this
    rank), parent-TERM (to the process that started it, such as torchrun). busy-FAULT:
    and a loading process hangs. evaluate-FAULT: not in a step, but in an evaluation.
    """
    where = "train_step"
    if fault.startswith("evaluate-"):
        where = "evaluate"
    if fault.startswith("busy-"):
        busy = hang_in_loading_processes(after=4 * int(step))
    original = getattr(ddp_train, where)
    calls = 0

    def with_fault(*args):
        nonlocal calls
        calls += 1
        if calls != int(step) or rank not in ("all", os.environ.get("RANK", "0")):
            return original(*args)
        if fault.startswith("busy-"):
            busy.wait(DEADLINE)
        make_fault(fault.removeprefix("evaluate-").removeprefix("busy-"))
        result = original(*args)
        if fault == "nan":
            loss_sum, grad_norm = result
            return loss_sum * float("nan"), grad_norm
        return result

    setattr(ddp_train, where, with_fault)
    ddp_train.main(argv)


def make_fault(fault):
    if fault == "raise":
        print("printed into a buffer")
        raise RuntimeError("boom: closed by peer")
    elif fault == "exit":
        sys.exit(0)
    elif fault == "hang":
        time.sleep(10 * DEADLINE)
    elif fault == "ctrl-c":
        send_signal("INT")
        send_signal("INT")
        ddp_train.say("two within a second")
        time.sleep(1.1)
        send_signal("INT")
        ddp_train.say("three")
    elif fault != "nan":
        send_signal(fault)


def send_signal(name):
    """Send a signal, and wait until this process has got it."""
    number = signal.Signals[f"SIG{name.removeprefix('parent-')}"]
    handler = signal.getsignal(number)
    arrived = []

    def note(*args):
        arrived.append(number)
        handler(*args)

    if number != signal.SIGKILL:
        signal.signal(number, note)
    target = os.getpid()
    if name.startswith("parent-"):
        target = os.getppid()
    os.kill(target, number)
    end = time.monotonic() + DEADLINE
    while not arrived and time.monotonic() < end:
        time.sleep(0.01)


def hang_in_loading_processes(after):
    """They hang after so many samples. Returns the event that this has happened."""
    busy = Event()
    original = TensorDataset.__getitem__
    samples = 0

    def getitem(dataset, index):
        nonlocal samples
        samples += 1
        if get_worker_info() is not None and samples > after:
            busy.set()
            time.sleep(10 * DEADLINE)
        return original(dataset, index)

    TensorDataset.__getitem__ = getitem
    return busy


# ---- The program, watched: `python test_ddp_train.py watch FOLDER options` -----------
def watch(folder, *argv):
    """Train, and write what this rank saw to FOLDER/seen.RANK: lists, with a step each.

    weights: their checksum; the first is before step 1. random: the state of the random
    numbers before the step. momentum: Adam's. reduced: the buckets DDP has averaged.
    read: the samples of the training set, in their order. threads: those that are left.
    """
    seen = {"read": [], "random": [], "momentum": [], "weights": [], "reduced": []}
    seen["threads"] = []
    original_step = ddp_train.train_step
    original_getitem = TensorDataset.__getitem__

    def reduce_bucket(state, bucket):
        seen["reduced"][-1].append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    def watched_step(ddp, batches, samples, optimizer, *others):
        if not seen["weights"]:
            seen["weights"].append(checksum(ddp.parameters()))
            if hasattr(ddp, "register_comm_hook"):
                ddp.register_comm_hook(None, reduce_bucket)
        seen["random"].append(zlib.crc32(torch.get_rng_state().numpy()))
        seen["reduced"].append([])
        result = original_step(ddp, batches, samples, optimizer, *others)
        seen["weights"].append(checksum(ddp.parameters()))
        states = optimizer.state.values()
        seen["momentum"].append(as_vector(state["exp_avg"] for state in states))
        return result

    def watched_getitem(dataset, index):
        if len(dataset) == 250:
            seen["read"].append(index)
        return original_getitem(dataset, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp_train, "train_step", watched_step)
        patch.setattr(TensorDataset, "__getitem__", watched_getitem)
        ddp_train.main([str(word) for word in argv])
    for task in Path("/proc/self/task").glob("*/comm"):
        seen["threads"].append(task.read_text())
    rank = os.environ.get("RANK", "0")
    torch.save(seen, Path(folder) / f"seen.{rank}")


def as_vector(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def checksum(tensors):
    return zlib.crc32(as_vector(tensors).numpy())


def seen_by(folder, world):
    return [torch.load(Path(folder) / f"seen.{rank}") for rank in range(world)]


# ---- What a run is given, and what it leaves -----------------------------------------
@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """250 windows of 32 bytes to train on, and 13 held out: 3 and 4 divide neither."""
    path = tmp_path_factory.mktemp("data") / "data.txt"
    path.write_bytes((b"the quick brown fox jumps over the lazy dog; " * 200)[:8430])
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def tiny(data, out):
    """The options of most tests: 4 samples a step, 63 steps an epoch on one process."""
    return [*TINY, "--data", data, "--out", out]


def load(out, name="checkpoint.pt"):
    return torch.load(Path(out) / name, weights_only=True)


def metrics(out):
    """The records of metrics.jsonl, in their order. They must be strict JSON."""
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def logged(out, name="loss"):
    """{step: the last value of this name}"""
    return {record["step"]: record[name] for record in metrics(out) if name in record}


def assert_same(a, b):
    """Two states have the same keys, values and bits."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for value, other in zip(a, b, strict=True):
            assert_same(value, other)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    else:
        assert a == b


def assert_same_run(a, b):
    """Two runs ended with the same bits, and logged the same numbers."""
    assert_same(result(a), result(b))


def result(out):
    """The checkpoint without what is random in it, and {step: what was logged last}."""
    state = load(out)
    del state["args"], state["file_id"]
    steps = {}
    for record in metrics(out):
        record.pop("samples_per_s", None)
        steps.setdefault(record["step"], {}).update(record)
    return [state, steps]


# ---- In this process: what the direct tests share ------------------------------------
CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """What a run in this process may leave: its signal handlers, and a group."""
    # A run that fails in this process must fail the test, and not end pytest.
    monkeypatch.setattr(ddp_train, "end_at_once", failed_in_this_process)
    handlers = {number: signal.getsignal(number) for number in StopSignal.NUMBERS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if dist.is_initialized():
        dist.destroy_process_group()


def failed_in_this_process(world, error):
    pytest.fail(f"the run failed: {error!r}")


@contextlib.contextmanager
def refuses(*words):
    """What is inside ends by sys.exit() with one line, which has these words."""
    with pytest.raises(SystemExit) as caught:
        yield
    assert "\n" not in caught.value.code
    for word in words:
        assert word in caught.value.code


def train(*options, world=ALONE):
    """The run without its start and its end: here a mistake is a SystemExit."""
    args = ddp_train.parse_args([str(option) for option in options])
    ddp_train.train(args, world, StopSignal())


# ---- Model and data ------------------------------------------------------------------
def tiny_model():
    torch.manual_seed(1)
    return ddp_train.ByteTransformer(1, 2, 16, 8)


# ---- One step ------------------------------------------------------------------------
def windows(count):
    """A dataset of windows of 8 bytes, each with the same window one byte later."""
    some_bytes = (torch.arange(count * 8 + 1) * 37 % 251).to(torch.uint8)
    rows = some_bytes.unfold(0, 9, 8)
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def one_step(loader, samples, world=ALONE, clip=0, dtype=None, scale=0, model=None):
    """(gradient, loss_sum, grad_norm). At rate 1 SGD moves a weight by its gradient."""
    model = model or tiny_model()
    args = ddp_train.parse_args([f"--grad-clip={clip}"])
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", scale, enabled=scale > 0)
    autocast = torch.autocast("cpu", dtype, enabled=dtype is not None)
    batches = ddp_train.real_batches(loader, CPU)
    results = ddp_train.train_step(
        model, batches, samples, optimizer, scaler, autocast, args, world
    )
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    return before - after, *results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("start, samples", [(0, 7), (4, 3), (6, 1)])
def test_gradient_is_the_mean_over_all_samples_of_a_step(size, start, samples):
    """Of all ranks and micro-batches, also where these do not divide them. DDP makes
    the mean of the ranks' gradients: so does this test.
    """
    gradients = []
    loss_sums = []
    for rank in range(size):
        world = World(rank, size, CPU)
        loader = ddp_train.make_loader(windows(7), 2, world)
        loader.sampler.set_epoch(0, start)
        gradient, loss_sum, _ = one_step(loader, samples, world)
        gradients.append(gradient)
        loss_sums.append(loss_sum.item())
    order = list(ddp_train.ResumableSampler(windows(7), ALONE))
    model = tiny_model()
    loss = ddp_train.compute_loss(model, windows(7)[order[start:]])
    expected = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.cat([gradient.flatten() for gradient in expected])
    found = torch.stack(gradients).mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert sum(loss_sums) / samples == pytest.approx(loss.item())


@pytest.mark.parametrize("dtype, scale", [(torch.half, 2**16), (torch.bfloat16, 0)])
def test_gradient_is_clipped_after_it_was_unscaled(dtype, scale):
    """What is returned is the norm before the clipping. 0: there is no limit."""
    loader = ddp_train.make_loader(windows(4), 4, ALONE)
    norm = one_step(loader, 4)[0].norm().item()
    for clip, expected in ((0.1, 0.1), (100, norm), (0, norm)):
        gradient, _, its_norm = one_step(loader, 4, ALONE, clip, dtype, scale)
        assert gradient.norm().item() == pytest.approx(expected, rel=0.02)
        assert its_norm.item() == pytest.approx(norm, rel=0.02)


def test_only_the_last_backward_averages_and_none_is_in_autocast(monkeypatch):
    """In autocast a part that the model keeps in fp32 would get gradients in bf16."""
    seen = []

    @contextlib.contextmanager
    def note_local(ddp, more_to_come):
        seen.append(more_to_come)
        yield

    def note_pass(*args):
        seen.append(torch.is_autocast_enabled("cpu"))

    model = tiny_model()
    model.head.register_forward_hook(note_pass)
    model.head.register_full_backward_hook(note_pass)
    monkeypatch.setattr(ddp_train, "local_gradients", note_local)
    loader = ddp_train.make_loader(windows(5), 2, ALONE)
    one_step(loader, 5, dtype=torch.bfloat16, model=model)
    forward_and_backward = [True, False]
    assert seen == 2 * [True, *forward_and_backward] + [False, *forward_and_backward]


# ---- Evaluation and learning rate ----------------------------------------------------
def count_and_sum(model, batch):
    return {"count": torch.tensor(1.0 * len(batch[0])), "sum": batch[0].sum()}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 7, 101])
def test_evaluation_counts_each_sample_once(size, n):
    """In float64: 2**24 + 1 is no float32. Without a group each rank gets its share."""
    count = 0
    total = 0
    for rank in range(size):
        dataset = TensorDataset(torch.tensor([2.0**24, *range(1, n)]))
        loader = ddp_train.make_loader(dataset, 1, World(rank, size, CPU))
        means = ddp_train.evaluate(nn.Identity(), count_and_sum, loader, ALONE)
        count += means["count"] * n
        total += means["sum"] * n
    assert count == pytest.approx(n)
    assert round(total) == 2**24 + n * (n - 1) // 2


def test_evaluation_changes_no_mode_for_good():
    """Inside: eval mode, no gradients, the given autocast. A frozen layer stays so."""

    def check(model, batch):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        return {"in_autocast": torch.tensor(2.0 * torch.is_autocast_enabled("cpu"))}

    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(1).eval())
    loader = ddp_train.make_loader(windows(2), 2, ALONE)
    autocast = torch.autocast("cpu", torch.bfloat16)
    for given, enabled in ((None, 0), (autocast, 1)):
        means = ddp_train.evaluate(model, check, loader, ALONE, given)
        assert means == {"in_autocast": enabled}
    assert [module.training for module in model.modules()] == [True, True, False]


def test_learning_rate_warms_up_and_then_follows_a_cosine():
    args = ddp_train.parse_args(["--lr", "2", "--warmup", "0.1"])
    rates = {0: 0, 0.05: 1, 0.1: 2, 0.325: 1 + math.sqrt(0.5), 0.55: 1, 1: 0, 1.5: 0}
    for share, rate in rates.items():
        assert ddp_train.learning_rate(args, share) == pytest.approx(rate, abs=1e-12)
    args.warmup = 0
    assert ddp_train.learning_rate(args, 0) == 2


def test_learning_rate_depends_on_the_share_of_the_samples_alone(tiny, tmp_path):
    """Not on ranks, accumulation, --max-steps. Rank 0 of 4 runs here by itself."""
    more = [*tiny, "--lr", 1e-2, "--warmup", 0.1, "--batch-size"]
    train(*more, 8, "--out", tmp_path / "a")
    train(*more, 2, "--accum", 4, "--out", tmp_path / "b")
    train(*more, 2, "--out", tmp_path / "c", world=World(0, 4, CPU))
    train(*more, 8, "--max-steps", 5, "--out", tmp_path / "d")
    rates = logged(tmp_path / "a", "lr")
    assert rates[1] == pytest.approx(1e-2 * (4 / 250) / 0.1)  # the middle of the step
    for name, steps in (("b", 32), ("c", 32), ("d", 5)):
        found = logged(tmp_path / name, "lr")
        assert len(found) == steps
        assert found == pytest.approx({step: rates[step] for step in found})


# ---- Processes -----------------------------------------------------------------------
@pytest.mark.parametrize("number", StopSignal.NUMBERS)
def test_stop_signal_is_remembered(monkeypatch, number):
    """The first of several counts. Under torchrun the exit code is 0."""
    stop = StopSignal()
    assert stop() == 0
    stop.exit()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop() == number
    with pytest.raises(SystemExit, match=str(128 + number)):
        stop.exit()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    stop.exit()


def test_ranks_that_differ_are_named(monkeypatch):
    facts = {"--lr": 0.1}
    ddp_train.check_alike(facts)
    hosts = [("host a", facts), ("host b", facts), ("host c", facts)]
    monkeypatch.setattr(ddp_train, "all_gather", mock.Mock(return_value=hosts))
    ddp_train.check_alike(facts)
    for other, says in (
        ({"--lr": 0.5}, "--lr is 0.5 on rank 2 (host c), but 0.1 on rank 0 (host a)"),
        ({}, "--lr is None on rank 2"),
        ({"--lr": 0.1, "--x": 1}, "--x is 1 on rank 2 (host c), but None on rank 0"),
    ):
        hosts[2] = ("host c", other)
        with refuses(says):
            ddp_train.check_alike(facts)


def test_seed_of_a_step():
    """It differs by seed, step and rank, and is the same when it comes again."""
    draws = set()
    for numbers in 2 * list(itertools.product((0, 1, 2**31 - 1), repeat=3)):
        ddp_train.seed_step(*numbers, CPU)
        draws.add(torch.rand(()).item())
    assert len(draws) == 27


# ---- Batches -------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("n", [1, 2, 7, 13])
def test_sampler_gives_each_sample_once_from_any_start(n, size):
    """In the order of torch's own. The first ones come again to fill the last round."""
    torchs_own = DistributedSampler(range(n), 1, 0, seed=5)
    for epoch, start in itertools.product((0, 3), range(n + 1)):
        torchs_own.set_epoch(epoch)
        order = list(torchs_own)
        of_ranks = []
        for rank in range(size):
            world = World(rank, size, CPU)
            sampler = ddp_train.ResumableSampler(range(n), world, seed=5)
            sampler.set_epoch(epoch, start)
            torch.manual_seed(rank)  # it must not matter
            of_ranks.append(list(sampler))
            assert len(sampler) == len(of_ranks[rank]) == math.ceil((n - start) / size)
        rounds = list(itertools.chain(*zip(*of_ranks, strict=True)))
        assert rounds == (size * order)[start : start + len(rounds)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("n, start, batch_size", [(13, 0, 2), (13, 6, 3), (1, 0, 4)])
def test_real_batches_count_each_sample_once(n, start, batch_size, size):
    dataset = TensorDataset(torch.arange(n))
    order = list(ddp_train.ResumableSampler(dataset, ALONE))
    of_ranks = []
    for rank in range(size):
        loader = ddp_train.make_loader(dataset, batch_size, World(rank, size, CPU))
        loader.sampler.set_epoch(0, start)
        of_ranks.append(list(ddp_train.real_batches(loader, CPU)))
    place = start
    for step in zip(*of_ranks, strict=True):  # all ranks have equally many batches
        counted = []
        for [indices], real, _ in step:
            assert len(indices) == max(1, real)
            counted += indices[:real].tolist()
        assert [total for _, _, total in step] == size * [len(counted)]
        assert sorted(counted) == sorted(order[place : place + len(counted)])
        place += len(counted)
    assert place == n


def last_batch(collate, size=1):
    """(batch, real, total) of the last rank, which has a filler if there are two."""
    dataset = list(torch.arange(10).view(5, 2))
    sampler = ddp_train.ResumableSampler(dataset, World(size - 1, size, CPU))
    loader = DataLoader(dataset, 3, sampler=sampler, collate_fn=collate)
    return list(ddp_train.real_batches(loader, CPU))[-1]


@pytest.mark.parametrize("size", [1, 2])
def test_batches_of_any_nesting(size):
    """Dicts, as tokenizers give, lists, tuples; a bare tensor is one batch."""

    def nested(rows):
        x = torch.stack(rows)
        return {"a": x, "b": [x, (x[:, 0],)], "c": UserDict(x=x)}

    x, _, _ = last_batch(torch.stack, size)
    order = list(ddp_train.ResumableSampler(range(5), ALONE))
    expected = {1: order[3:], 2: order[1::2]}[size]
    assert x.tolist() == [[2 * index, 2 * index + 1] for index in expected]
    batch, _, _ = last_batch(nested, size)
    assert_same(batch, {"a": x, "b": [x, [x[:, 0]]], "c": {"x": x}})


def test_what_real_batches_refuse():
    def collate(rows):
        return [torch.stack(rows), {"value": values[-1]}]

    values = ["text", ["a", "b", "c"], None, torch.tensor(3.0), torch.ones(5, 2)]
    while values:
        with pytest.raises(TypeError, match="a batch of 3 samples has .*: it must be"):
            last_batch(collate)
        values.pop()
    sampler = ddp_train.ResumableSampler(range(9), ALONE)
    dropping = DataLoader(range(9), 2, sampler=sampler, drop_last=True)
    for loader in (DataLoader(range(9), 2), dropping):
        with pytest.raises(TypeError, match=r"sampler=ResumableSampler\(dataset, wor"):
            next(ddp_train.real_batches(loader, CPU))
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        ddp_train.ResumableSampler(iter([1, 2]), ALONE)


# ---- Checkpoint ----------------------------------------------------------------------
def make_parts(seed=2):
    """A network and an optimizer that has made a step."""
    torch.manual_seed(seed)
    model = nn.Linear(2, 300)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    adam.step()
    return {"generator": model, "optimizer_g": adam}


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoints of steps 1 and 2."""
    checkpoint = Checkpoint(tmp_path, make_parts(1), {"size": 3})
    for step in (1, 2):
        checkpoint.save(step=step, noise=torch.arange(3), best=[0.5, "text", None])
    return tmp_path


def test_checkpoint_has_any_parts_and_values(saved, capfd):
    parts = make_parts(seed=2)
    found = Checkpoint(saved, parts, {"size": 3}).resume()
    assert "going on from step 2" in capfd.readouterr().out
    values = {"step": 2, "noise": torch.arange(3), "best": [0.5, "text", None]}
    assert_same({name: found[name] for name in values}, values)
    assert not found.keys() & parts.keys()
    for name, part in make_parts(seed=1).items():
        assert_same(part.state_dict(), parts[name].state_dict())
    assert Checkpoint(saved / "a" / "new", {}).resume() == {}
    with pytest.raises(TypeError, match="multiple values.*'generator'"):
        Checkpoint(saved, make_parts()).save(step=3, generator=1)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("killed_at", ["", "fsync 1", "replace 1", "replace 2"])
def test_reader_finds_a_whole_checkpoint_at_any_moment(saved, monkeypatch, killed_at):
    """The new one is on the disk before it gets a name; the one before is kept. Where
    the save is killed, the next start goes on from step 2, and overwrites nothing.
    """
    moments = []

    def watch_os(name):
        original = getattr(os, name)

        def watched(*args):
            steps = sorted(load(saved, path)["step"] for path in saved.glob("c*.pt"))
            moments.append((name, steps))
            calls = [first for first, _ in moments].count(name)
            if killed_at == f"{name} {calls}":
                raise KeyboardInterrupt
            original(*args)

        monkeypatch.setattr(os, name, watched)

    checkpoint = Checkpoint(saved, make_parts())
    checkpoint.resume()
    watch_os("fsync")
    watch_os("replace")
    if killed_at:
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(step=3)
        monkeypatch.undo()
        checkpoint = Checkpoint(saved, make_parts())
        assert checkpoint.resume()["step"] == 2
    checkpoint.save(step=3)
    if not killed_at:
        assert moments == [("fsync", [1, 2]), ("replace", [1, 2]), ("replace", [2])]
    assert load(saved)["step"] == 3
    assert load(saved, "checkpoint.prev.pt")["step"] == 2
    assert not (saved / "checkpoint.tmp").exists()


def flip(content, pattern, bit):
    """Change one bit behind a pattern."""
    place = re.search(pattern, content, re.S).end()
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


def of_another_program():
    file = io.BytesIO()
    torch.save({"model": nn.Linear(1, 1).state_dict(), "epoch": 3}, file)
    return file.getvalue()


@pytest.mark.parametrize("damage", ["weight", "folder", "cut", "garbage", "other"])
def test_checkpoint_that_cannot_be_used(saved, capfd, damage):
    """The one before is taken, with a warning, and stays what it is. If there is none,
    nothing is overwritten: it may be of the user's.
    """
    path = saved / "checkpoint.pt"
    good = path.read_bytes()
    bad = {
        "weight": flip(good, rb"/data/0FB.{100}", 1),
        # An attribute, which no checksum protects, says that a weight is a folder.
        "folder": flip(good, rb"PK\x01\x02.{34}(?=.{8}[^/]*/data/0)", 16),
        "cut": good[:-1],
        "garbage": b"not a checkpoint",
        "other": of_another_program(),
    }[damage]
    path.write_bytes(bad)
    checkpoint = Checkpoint(saved, make_parts())
    assert checkpoint.resume()["step"] == 1
    assert f"warning: {path} is damaged or not a checkpoint" in capfd.readouterr().out
    for step, step_before in ((3, 1), (4, 3)):
        checkpoint.save(step=step)
        assert load(saved, "checkpoint.prev.pt")["step"] == step_before
    (saved / "checkpoint.prev.pt").write_bytes(bad)
    path.write_bytes(bad)
    for _ in range(2):
        with refuses(str(saved), "nothing to go on from, use another folder"):
            Checkpoint(saved, make_parts()).resume()
        assert path.read_bytes() == bad
        (saved / "checkpoint.prev.pt").unlink(missing_ok=True)


def test_what_could_not_be_loaded_again_is_not_saved(saved):
    """torch.load() refuses what is not plain: a Path, or a number of numpy."""
    checkpoint = Checkpoint(saved, make_parts())
    checkpoint.resume()
    with refuses("cannot save"):
        checkpoint.save(step=3, best=Path("a"))
    assert load(saved)["step"] == 2


class Bomb:
    """Whoever unpickles it runs code."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("save", [pickle.dump, torch.save])
def test_code_in_a_checkpoint_does_not_run(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    with open("checkpoint.pt", "wb") as file:
        save({"step": 9, "file_id": "", "facts": {}, "model": Bomb()}, file)
    with refuses("not a checkpoint"):
        Checkpoint(tmp_path, {}).resume()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "part, facts, says",
    [
        ({}, {"size": 4}, "has size 3, not 4: use another folder"),
        ({}, {"width": 1}, "has width None, not 1: use another folder"),
        ({"critic": nn.Linear(1, 1)}, {}, "has no 'critic': use another folder"),
        ({"generator": nn.Linear(4, 1)}, {}, "does not fit 'generator': "),
        ({"optimizer_g": torch.optim.SGD([torch.ones(1)])}, {}, "fit 'optimizer_g'"),
    ],
)
def test_checkpoint_that_does_not_fit(saved, part, facts, says):
    with refuses(str(saved), says):
        Checkpoint(saved, {**make_parts(), **part}, facts).resume()


# ==== WHOLE RUNS =====================================================================
processes = pytest.mark.processes
LONG = "--epochs 2 --dropout 0.1 --save-every 7 --eval-every 11".split()
STEPS = 64  # of two epochs with 8 samples a step


def made_once(tmp_path_factory, name, make):
    """A folder that make(folder) fills, once for all processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / name
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = base / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture
def untouched(tmp_path_factory, data):
    """untouched(world): the folder of a run with LONG that nobody stopped.

    Two ranks are started by hand, with a disk each, and write what they say to said.0
    and said.1.
    """

    def make_one(folder):
        train(*TINY, *LONG, "--data", data, "--out", folder)

    def make_two(folder):
        options = *TINY, *LONG, "--data", data, "--out", [folder, folder / "1"]
        for rank, said in enumerate(run_ranks(2, SCRIPT, *options, env=LOCAL_RANK_7)):
            (folder / f"said.{rank}").write_text(said)

    def get(world):
        make = {1: make_one, 2: make_two}[world]
        return made_once(tmp_path_factory, f"untouched-{world}", make)

    return get


LOCAL_RANK_7 = {"LOCAL_RANK": "7"}  # on the CPU it may be any
# "3x1x2": 3 ranks, batch size 1, 2 micro-batches: 42 steps an epoch.
SAME = {
    "1x8": (1, "--batch-size 8"),
    "2x4": (2, "--batch-size 4"),
    "4x2": (4, "--batch-size 2"),
    "1x2x4": (1, "--batch-size 2 --accum 4"),
    "3x1x2": (3, "--batch-size 1 --accum 2 --dropout 0.1 --save-every 7"),
}
LIKE_1X8 = "2x4", "4x2", "1x2x4"


@pytest.fixture
def same(tmp_path_factory, data):
    """The folder of the watched runs of SAME: two epochs of 250 samples."""

    def make(base):
        for name, (world, options) in SAME.items():
            folder = base / name
            options = *TINY, *options.split(), "--epochs", 2, "--data", data
            command = "watch", folder, *options, "--out", folder
            if world == 1:
                watch(*command[1:])
            elif name == "2x4":
                run(*torchrun(2, DRIVER, *command))
            else:
                run_ranks(world, DRIVER, *command)

    return made_once(tmp_path_factory, "same", make)


# ---- The same numbers on any number of ranks -----------------------------------------
@processes
@pytest.mark.parametrize("name", LIKE_1X8)
def test_same_losses(same, name):
    assert len(logged(same / name)) == STEPS
    assert logged(same / name) == pytest.approx(logged(same / "1x8"), rel=1e-4)
    norms = logged(same / name, "grad_norm")
    assert norms == pytest.approx(logged(same / "1x8", "grad_norm"), rel=1e-2)
    losses = logged(same / name)
    assert losses[STEPS] < losses[1]


@processes
@pytest.mark.parametrize("name", LIKE_1X8)
def test_same_learning_rates(same, name):
    rates = logged(same / name, "lr")
    assert rates == pytest.approx(logged(same / "1x8", "lr"))
    assert len(set(rates.values())) > STEPS / 2


@processes
@pytest.mark.parametrize("name", LIKE_1X8)
@pytest.mark.parametrize("step, limit", [(1, 1e-5), (32, 1e-3)])
def test_same_gradients(same, name, step, limit):
    """Step 32, the last of the epoch, has 2 samples for up to 4 ranks."""
    expected = gradient(seen_by(same / "1x8", 1)[0], step)
    for rank in seen_by(same / name, SAME[name][0]):
        difference = gradient(rank, step) - expected
        assert difference.norm() <= limit * expected.norm()


def gradient(seen, step):
    """What Adam got in this step, after clipping: its momentum is 0.9 old + 0.1 new."""
    new = seen["momentum"][step - 1]
    if step == 1:
        return 10 * new
    return 10 * (new - 0.9 * seen["momentum"][step - 2])


@processes
@pytest.mark.parametrize("name", LIKE_1X8)
def test_same_evaluation(same, name):
    """After each epoch, on 13 samples, which no number of ranks divides."""
    expected = logged(same / "1x8", "val_loss")
    assert list(expected) == [STEPS / 2, STEPS]
    assert logged(same / name, "val_loss") == pytest.approx(expected, rel=1e-4)


@processes
@pytest.mark.parametrize("name", ["2x4", "4x2", "3x1x2"])
def test_weights_are_equal_on_all_ranks(same, name):
    seen = seen_by(same / name, SAME[name][0])
    assert len(set(seen[0]["weights"])) > STEPS
    for rank in seen:
        assert rank["weights"] == seen[0]["weights"]


@processes
def test_each_sample_once_per_epoch(same):
    """250 samples on 3 ranks: the last round of an epoch has two fillers."""
    read = []
    by_rank = [rank["read"] for rank in seen_by(same / "3x1x2", 3)]
    for turn in zip(*by_rank, strict=True):
        read += turn
    first = read[:250]
    second = read[252:502]
    assert len(read) == 2 * 252
    assert sorted(first) == sorted(second) == list(range(250))
    assert first != second


@processes
@pytest.mark.parametrize("name", ["2x4", "3x1x2"])
def test_one_all_reduce_per_optimizer_step(same, name):
    """DDP averages each bucket of gradients once. 3x1x2 has two micro-batches."""
    for rank in seen_by(same / name, SAME[name][0]):
        for buckets in rank["reduced"]:
            assert buckets
            assert len(buckets) == len(set(buckets))


@processes
def test_random_numbers_differ_by_rank_and_step(same):
    """Those of dropout. The tests of stops show that a resume does not change them."""
    numbers = []
    for rank in seen_by(same / "3x1x2", 3):
        numbers += rank["random"]
    assert len(numbers) == len(set(numbers)) == 3 * 84


class NormedModel(nn.Sequential):
    """Batch norm over the 32 positions."""

    def __init__(self, args):
        super().__init__(nn.Embedding(256, 256), nn.BatchNorm1d(32))

    def forward(self, x):
        return super().forward(x.long())


@processes
def test_batch_norm_is_evaluated_as_it_is_saved(tiny, out):
    """Each rank has running means of its own. Those of rank 0 count."""
    run_ranks(2, DRIVER, "batch-norm", *tiny, "--max-steps", 20)
    args = ddp_train.parse_args([str(word) for word in tiny])
    model = NormedModel(args)
    model.load_state_dict(load(out)["model"])
    held_out = ddp_train.load_data(args)[1]
    with torch.no_grad():
        loss = ddp_train.compute_loss(model.eval(), held_out[:])
    assert logged(out, "val_loss") == {20: pytest.approx(loss.item(), rel=1e-6)}


# ---- Every way to start, to stop and to go on ----------------------------------------
def stopped_at(said, number, out):
    """The step at which the run says, once, that it has stopped. It must be saved."""
    found = re.findall(rf"stopped by signal {number}, saved at step (\d+)", said)
    assert len(found) == 1, said
    assert "done" not in said
    assert load(out)["step"] == int(found[0])
    return int(found[0])


@processes
def test_only_rank_0_speaks_and_saves(untouched):
    """Two ranks, started by hand, with a folder of their own each."""
    folder = untouched(2)
    said = (folder / "said.0").read_text()
    assert said.startswith("ranks: 2, nodes: 1, cpu, fp32\n")
    assert f"done: step {STEPS}" in said
    assert (folder / "said.1").read_text() == ""
    assert list((folder / "1").iterdir()) == []


@processes
def test_stop_under_torchrun_by_tcp_and_resume_by_file(tiny, out, untouched):
    """Ctrl-C at torchrun, in an evaluation. Then the same bits."""
    address = f"tcp://127.0.0.1:{free_port()}"
    options = *tiny, *LONG, "--init-method", address
    said = run(*torchrun(2, DRIVER, "evaluate-parent-INT", 1, 1, *options), code=None)
    assert stopped_at(said, 2, out) in (12, 13)  # the evaluation is after step 11
    run_ranks(2, SCRIPT, *tiny, *LONG, "--init-method", f"file://{out}/meet")
    assert_same_run(out, untouched(2))


@processes
def test_stop_of_two_nodes_and_resume_by_tcp(tiny, out, untouched):
    """Two torchruns, one is the old launcher. In its first step rank 0 gets SIGUSR1."""
    home = "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"
    home = *home, f"--master-port={free_port()}"
    new = PYTHON, "-m", "torch.distributed.run", "--node-rank=0", *home
    old = PYTHON, "-m", "torch.distributed.launch", "--node-rank=1", *home
    agents = [
        start(*new, DRIVER, "USR1", 0, 1, *tiny, *LONG),
        start(*old, SCRIPT, *tiny, *LONG),
    ]
    said = "".join(finish_all(agents))
    assert stopped_at(said, int(signal.SIGUSR1), out) == 2
    by_hand = *tiny, *LONG, "--init-method", f"tcp://127.0.0.1:{free_port()}"
    run_ranks(2, SCRIPT, *by_hand, env={"MASTER_ADDR": "", "MASTER_PORT": ""})
    assert_same_run(out, untouched(2))


@processes
def test_stop_of_spawned_ranks(tiny, out):
    """Loading processes get the signal, too, and go on until their rank has saved."""
    options = *tiny, "--workers", 1, "--epochs", 99, "--spawn", 2
    launcher = start(PYTHON, SCRIPT, *options)
    wait_for(launcher, "step 9 ")
    os.kill(launcher.pid, signal.SIGTERM)
    said = finish(launcher, code=None)
    assert stopped_at(said, 15, out) >= 9
    assert "DataLoader" not in said
    assert "error: rank" not in said


@processes
def test_stop_of_three_ranks(same, tiny, out):
    """By Ctrl-C at rank 2. DDP may add in another order after the resume: 1e-6."""
    options = *tiny, "--epochs", 2, *SAME["3x1x2"][1].split()
    said = run_ranks(3, DRIVER, "INT", 2, 20, *options, code=128 + 2)
    assert stopped_at(said[0], 2, out) == 21
    assert run_ranks(3, SCRIPT, *options)[1:] == ["", ""]
    assert logged(out) == pytest.approx(logged(same / "3x1x2"), rel=1e-6)
    expected = load(same / "3x1x2")["model"]
    for name, weight in load(out)["model"].items():
        # The bias of the keys has no influence: its gradient is nothing but rounding.
        if not name.endswith("query_key_value.bias"):
            difference = weight - expected[name]
            assert difference.norm() <= 1e-6 * expected[name].norm()


@processes
def test_second_ctrl_c_ends_at_once(tiny, out):
    """But not within a second: then it may be the first, passed on by torchrun."""
    said = run(PYTHON, DRIVER, "ctrl-c", 0, 5, *tiny, "--save-every", 3, code=130)
    assert said.endswith("two within a second\n")
    assert load(out)["step"] == 3


def into_nothing(*command):
    """The command of a shell, whose output goes to a process that has ended."""
    return "bash", "-c", 'set -o pipefail; "$@" 2>&1 | true', "bash", PYTHON, *command


@processes
def test_stop_when_the_reader_of_the_output_has_gone(tiny, out, untouched):
    """Ctrl-C at `... | tee log` ends tee, too. The run still saves."""
    run(*into_nothing(DRIVER, "TERM", 0, 20, *tiny, *LONG), code=128 + 15)
    assert load(out)["step"] == 20
    train(*tiny, *LONG)
    assert_same_run(out, untouched(1))


@processes
@pytest.mark.skipif(not LINUX, reason="only Linux kills them with their parent")
def test_kill_9_leaves_a_whole_log_and_no_process(tiny):
    """The rank has a loading process, which is busy. Its output goes to a file."""
    said = run(PYTHON, DRIVER, "busy-KILL", 0, 9, *tiny, "--workers", 1, code=-9)
    assert "step 8  loss" in said
    wait_until_none_is_left()


def wait_until_none_is_left():
    end = time.monotonic() + 30
    while any(is_alive(pid) for pid in descendants(os.getpid())):
        if time.monotonic() > end:
            left = [pid for pid in descendants(os.getpid()) if is_alive(pid)]
            fail(f"these processes are left after 30 s: {left}", STARTED[0])
        time.sleep(0.02)


def is_alive(pid):
    with contextlib.suppress(OSError):
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    return False


@processes
@pytest.mark.parametrize("fault, code", [("busy-TERM", 128 + 15), ("busy-raise", 1)])
def test_busy_loading_process_is_ended_too(tiny, fault, code):
    run(PYTHON, DRIVER, fault, 0, 9, *tiny, "--workers", 1, code=code)
    wait_until_none_is_left()


# ---- Ranks that fail -----------------------------------------------------------------
@processes
def test_rank_that_raises(tiny):
    """Its traceback; the other rank ends, too, long before --timeout, with one line."""
    said = run_ranks(2, DRIVER, "raise", 1, 5, *tiny, code=1)
    assert "error: rank 1: Traceback" in said[1]
    assert said[1].count("RuntimeError: boom") == 1
    assert said[1].count("printed into a buffer") == 1
    assert errors_of(said[0]) == [PEER_ENDED]


PEER_ENDED = "error: rank 0: another rank has ended; its own message says why"


def errors_of(said):
    """What a rank has said besides its log."""
    log = "ranks: ", "from step ", "step ", "going on "
    return [line for line in said.splitlines() if not line.startswith(log)]


@processes
def test_rank_that_is_killed(tiny):
    ranks = start_ranks(2, DRIVER, "KILL", 1, 5, *tiny)
    finish(ranks[1], code=-9)
    assert errors_of(finish(ranks[0], code=1)) == [PEER_ENDED]


@processes
@pytest.mark.skipif(not LINUX, reason="ranks die with torchrun on Linux only")
def test_ranks_die_with_torchrun(tiny):
    """Nobody could stop or restart them any more, and they would hold the folder."""
    said = run(*torchrun(2, DRIVER, "parent-KILL", 1, 20, *tiny), code=-9)
    wait_until_none_is_left()
    assert "step 19 " in said
    assert "done" not in said


@processes
def test_rank_that_hangs(tiny):
    """The other waits for --timeout, says so, and ends. torchrun then ends the one."""
    command = DRIVER, "hang", 1, 5, *tiny, "--timeout", 3
    said = run(*torchrun(2, *command), code=1)
    assert "step 4 " in said
    assert "error: rank 0: " in said
    assert re.search("[Tt]imed out waiting 3000ms", said)
    assert "error: rank 1: " not in said


@processes
def test_torchrun_restarts_ranks(tiny, out, untouched):
    """One is killed. The new ones go on, with the same bits; some steps come twice."""
    faulty = DRIVER, "KILL", 1, 40, *tiny, *LONG
    said = run(*torchrun(2, "--max-restarts=1", *faulty))
    assert "going on from step 35" in said
    assert_same_run(out, untouched(2))
    values = {}
    for record in metrics(out):
        if "loss" in record:
            values.setdefault(record["step"], []).append(record["loss"])
    assert len(values[39]) == 2
    assert values[39][0] == values[39][1]


@processes
def test_sys_exit_0_on_all_ranks_is_no_failure(tiny):
    for said in run_ranks(2, DRIVER, "exit", "all", 5, *tiny, code=0):
        assert errors_of(said) == []


@processes
def test_loss_that_is_not_finite_on_one_rank_stops_all(tiny, out):
    said = run_ranks(2, DRIVER, "nan", 1, 5, *tiny, "--save-every", 3, code=1)
    for rank in (0, 1):
        (line,) = errors_of(said[rank])
        assert line.startswith(f"error: rank {rank}: not finite at step 5, not saved")
    assert load(out)["step"] == 3


@processes
def test_bad_input_is_one_line_on_each_rank(tiny):
    said = run_ranks(2, SCRIPT, *tiny, "--data", "/no/such", code=1)
    for rank in (0, 1):
        (line,) = said[rank].splitlines()
        assert line.startswith(f"error: rank {rank}: --data /no/such: ")


@processes
def test_bad_input_on_one_rank_ends_all(tiny, data):
    said = run_ranks(2, SCRIPT, *tiny, "--data", [data, "/no/such"], code=1)
    (line,) = said[1].splitlines()
    assert line.startswith("error: rank 1: --data /no/such: ")
    assert errors_of(said[0]) == [PEER_ENDED]


@processes
def test_ranks_with_two_versions_of_the_program(tiny, tmp_path):
    """All name the other rank and its host."""
    other = tmp_path / "ddp_train.py"
    other.write_bytes(SCRIPT.read_bytes().replace(b"# ", b"#  ", 1))
    for said in run_ranks(2, [SCRIPT, other], *tiny, code=1):
        (line,) = said.splitlines()
        assert re.search(r"checksum of the program is \d+ on rank 1 \(\S+\), ", line)


# ---- Checkpoints across ranks --------------------------------------------------------
def weights_in(folder):
    return checksum(load(folder)["model"].values())


@processes
def test_nodes_take_the_newest_checkpoint_of_any(tiny, tmp_path):
    """Four disks: nothing, the newest, an older one, and one that would run code."""
    nothing, newest, older, evil = (tmp_path / name for name in "abcd")
    train(*tiny, "--out", newest, "--max-steps", 5)
    train(*tiny, "--out", older, "--max-steps", 3)
    evil.mkdir()
    torch.save({"step": 9, "file_id": Bomb(), "facts": {}}, evil / "checkpoint.pt")
    options = *tiny, "--out", [nothing, newest, older, evil], "--max-steps", 9
    expected = weights_in(newest)
    said = run_ranks(4, DRIVER, "watch", tmp_path, *options)
    assert "going on from step 5" in said[0]
    assert "warning: " in said[3]
    assert not Path("exploded").exists()
    seen = seen_by(tmp_path, 4)
    for rank in seen:
        assert rank["weights"][0] == expected
        assert rank["weights"] == seen[0]["weights"]
    assert len(seen[0]["weights"]) == 1 + 4
    assert load(nothing)["step"] == 9


@processes
def test_nodes_with_two_checkpoints_of_one_step_take_the_same(tiny, tmp_path):
    disks = [tmp_path / "a", tmp_path / "b"]
    train(*tiny, "--out", disks[0], "--max-steps", 5)
    train(*tiny, "--out", disks[1], "--max-steps", 5, "--lr", 0.01)
    either = [weights_in(disks[0]), weights_in(disks[1])]
    run_ranks(2, DRIVER, "watch", tmp_path, *tiny, "--out", disks, "--max-steps", 9)
    seen = seen_by(tmp_path, 2)
    assert either[0] != either[1]
    assert seen[0]["weights"][0] in either
    assert seen[0]["weights"] == seen[1]["weights"]


def driver(mode, *argv):
    if mode == "watch":
        watch(*argv)
    elif mode == "batch-norm":
        ddp_train.build_model = NormedModel
        ddp_train.main(argv)
    else:
        train_with_fault(mode, *argv)


if __name__ == "__main__":
    driver(*sys.argv[1:])
