"""Tests of ddp_train.py, in the order of the program. A test's name is the promise.

    pytest test_ddp_train.py                       all that this machine can run
    pytest test_ddp_train.py -m "not processes"    the direct tests: some seconds

First the tests that call a piece directly. Then those that start ranks: most of them as
forks of this process, so that torch is not imported again; some by torchrun. It needs
torch, numpy and pytest. tests/ has more: the scripts, the page, the recipes, GPUs.
"""

import atexit
import contextlib
import errno
import fcntl
import importlib
import inspect
import itertools
import json
import math
import os
import pickle
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ddp_train
from ddp_train import StopSignal, World

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "ddp_train.py"
CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
processes = pytest.mark.processes
# A model so small that a step takes milliseconds.
TINY = "--device cpu --dim 16 --layers 1 --heads 2 --seq_len 32".split()
TINY += "--batch_size 4 --log_every 1".split()
DATA = bytes(range(256)) * 8  # 60 samples to train with, and 3 to evaluate


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def tiny(data, out):
    return [*TINY, "--data", data, "--out", out]


def parse(*words):
    return ddp_train.parse_args([str(word) for word in words])


def refuses(*texts):
    """The block must end with sys.exit() and one line that has all these texts."""
    pattern = ".*".join(re.escape(str(text)) for text in texts)
    return pytest.raises(SystemExit, match=f"(?s)^[^\n]*{pattern}[^\n]*$")


# ---- Model and data ------------------------------------------------------------------
def test_model_sees_no_later_byte():
    """Other bytes from a place on change what comes from there on, and only that."""
    model = ddp_train.build_model(parse(*TINY)).eval()
    x = torch.randint(256, (3, 8))
    for place in (1, 5, 7):
        other = torch.cat([x[:, :place], 255 - x[:, place:]], 1)
        changed = (model(x) - model(other)).detach().abs().amax((0, 2))
        assert changed[:place].max() < 1e-6
        assert changed[place:].min() > 1e-4


def test_sample_is_bytes_and_those_one_later(data):
    train_set, val_set, _ = ddp_train.load_data(parse(*TINY, "--data", data))
    assert (len(train_set), len(val_set)) == (60, 3)
    for i in range(63):
        x, y = train_set[i] if i < 60 else val_set[i - 60]
        assert bytes(x) == DATA[32 * i :][:32]
        assert bytes(y) == DATA[32 * i + 1 :][:32]


def test_held_out_bytes_are_not_trained(data):
    """What is to be predicted in an evaluation was never predicted in training."""
    data.write_bytes(bytes(32 * 60 + 1) + b"x" * 127)
    train_set, val_set, _ = ddp_train.load_data(parse(*TINY, "--data", data))
    for i in range(len(train_set)):
        assert max(train_set[i][1]) == 0
    for i in range(len(val_set)):
        assert bytes(val_set[i][1]) == b"x" * 32


@pytest.mark.parametrize("size, says", [(None, "No such file"), (0, "0 "), (64, "64 ")])
def test_missing_or_too_little_data_are_refused(data, size, says):
    data.unlink() if size is None else data.write_bytes(DATA[:size])
    with refuses(data, says) if size is not None else refuses("no data", says, data):
        ddp_train.load_data(parse(*TINY, "--data", data))


def test_two_samples_are_enough(data):
    data.write_bytes(DATA[:65])
    train_set, val_set, _ = ddp_train.load_data(parse(*TINY, "--data", data))
    assert (len(train_set), len(val_set)) == (1, 1)


def test_device_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses("--device cuda: torch finds no GPU"):
        ddp_train.choose_device("cuda", 1)


def test_dropout_is_that_of_the_option():
    torch.manual_seed(0)
    x = torch.randint(256, (1, 8))
    for share, same in ((0, True), (0.5, False)):
        model = ddp_train.build_model(parse(*TINY, "--dropout", share))
        assert torch.equal(model(x), model(x)) == same


def test_text_of_the_data_shows_one_other_byte(data):
    options = parse(*TINY, "--data", data)
    text = ddp_train.load_data(options)[2]
    assert ddp_train.load_data(options)[2] == text
    for other in (DATA[:-1] + b"!", DATA + b"\0"):
        data.write_bytes(other)
        assert ddp_train.load_data(options)[2] != text


# ---- Batches -------------------------------------------------------------------------
def order_of(n, rank=0, size=1, seed=0, epoch=0, start=0):
    sampler = ddp_train.ResumableSampler(range(n), size, rank, seed=seed)
    sampler.set_epoch(epoch, start)
    torch.manual_seed(rank)  # it must not matter
    order = list(sampler)
    assert len(order) == len(sampler)
    return order


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 7, 30])
def test_ranks_take_turns_in_one_order_from_any_start(n, size):
    for epoch, start in itertools.product((0, 3), range(n + 1)):
        order = order_of(n, epoch=epoch)
        assert sorted(order) == list(range(n))
        ranks = [order_of(n, rank, size, 0, epoch, start) for rank in range(size)]
        turns = list(itertools.chain(*zip(*ranks, strict=True)))
        assert turns == order[start : start + len(turns)]
        assert n - start - len(turns) < size


def test_each_seed_and_epoch_has_an_order_of_its_own():
    orders = set()
    for seed, epoch in itertools.product(range(3), range(5)):
        orders.add(tuple(order_of(30, seed=seed, epoch=epoch)))
    assert len(orders) == 15


def train_batches(rank, size, batch_size, start=0, n=60):
    world = World(rank, size, CPU)
    loader = ddp_train.train_loader(range(n), batch_size, world)
    loader.sampler.set_epoch(1, start)
    return [batch.tolist() for batch in loader]


def test_all_ranks_have_as_many_batches_and_all_are_full():
    for size, n in itertools.product((1, 2, 3), range(20, 30)):
        for rank in range(size):
            batches = train_batches(rank, size, 4, n=n)
            assert [len(batch) for batch in batches] == [4] * (n // size // 4)


def test_loader_leaves_the_random_numbers_of_the_model_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    loader = ddp_train.train_loader(range(9), 2, ALONE)
    next(iter(loader))
    assert torch.rand(1) == expected


def test_batches_of_an_evaluation_are_the_same_for_any_number_of_ranks():
    for size in (1, 2, 3, 7):
        ranks = []
        for rank in range(size):
            loader = ddp_train.eval_loader(range(9), 2, World(rank, size, CPU))
            ranks.append([batch.tolist() for batch in loader])
        turns = itertools.chain(*itertools.zip_longest(*ranks))
        batches = [batch for batch in turns if batch is not None]
        assert batches == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_seed_depends_on_each_number_and_on_their_order():
    seeds = set()
    for numbers in 2 * list(itertools.product((0, 1, 2, 2**31), repeat=3)):
        seeds.add(ddp_train.seed_of(*numbers))
    assert len(seeds) == 64


def test_batch_of_any_nesting_goes_to_the_device():
    x = torch.ones(2)
    batch = {"a": x, "b": [x, (x, "text")], "c": {"d": x, "e": 5}}
    moved = ddp_train.to_device(batch, torch.device("meta"))
    assert moved["b"][1][1] == "text" and moved["c"]["e"] == 5
    for tensor in (moved["a"], moved["b"][0], moved["b"][1][0], moved["c"]["d"]):
        assert tensor.is_meta


# ---- Evaluation and learning rate ----------------------------------------------------
def sum_and_count(model, batch):
    return {"mean": batch.double().sum(), "count": len(batch)}


def test_evaluation_changes_no_mode_for_good():
    """Inside: eval mode, no gradients, the given autocast. A frozen layer stays so."""

    def check(model, batch):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        return {"in_autocast": torch.is_autocast_enabled("cpu"), "count": 1}

    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(1).eval())
    with ddp_train.distributed("cpu") as world:
        loader = ddp_train.eval_loader(range(2), 2, world)
        autocast = torch.autocast("cpu", torch.bfloat16)
        for given, enabled in ((None, 0), (autocast, 1)):
            means = ddp_train.evaluate(model, check, loader, world, given)
            assert means == {"in_autocast": enabled}
    assert [module.training for module in model.modules()] == [True, True, False]


def test_learning_rate_warms_up_and_then_follows_a_cosine():
    args = parse("--lr", 2, "--warmup", 0.1, "--epochs", 4, "--max_steps", 1)
    rates = {0: 0, 0.05: 1, 0.1: 2, 0.325: 1 + math.sqrt(0.5), 0.55: 1, 1: 0}
    for progress, rate in rates.items():
        found = ddp_train.learning_rate(args, 4 * progress)
        assert found == pytest.approx(rate, abs=1e-12)
    args.warmup = 0
    assert ddp_train.learning_rate(args, 0) == 2


# ---- Processes -----------------------------------------------------------------------
@pytest.fixture
def handlers():
    """The handlers of the signals are set back after the test."""
    before = {number: signal.getsignal(number) for number in StopSignal.NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_exception_of_a_single_process_is_an_ordinary_one():
    for error in (ValueError("wrong"), SystemExit(75), SystemExit("wrong")):
        with pytest.raises(type(error)) as info:
            with ddp_train.distributed("cpu"):
                raise error
        assert info.value is error
        assert not torch.distributed.is_initialized()


def test_nohup_stays(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    StopSignal()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_rank_stops_when_torchrun_is_gone(handlers, monkeypatch):
    """Without torchrun the parent is a shell, which may end before the run."""
    with ddp_train.distributed("cpu"):
        stop = StopSignal()
        stop.parent = -1
        assert stop() == 0
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
        assert stop() == signal.SIGTERM


# ---- Checkpoint ----------------------------------------------------------------------
class Part:
    """Anything with state_dict() and load_state_dict()."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def checkpoint_of(folder, state, **must_match):
    part = Part(state=state, weights=torch.arange(5000.0))
    return ddp_train.Checkpoint(folder, {"part": part}, must_match, ALONE)


@pytest.fixture
def saved(out):
    """A folder with a checkpoint."""
    checkpoint_of(out, 5, seed=1).save(2, epoch=3)
    return out


def resume(checkpoint):
    with ddp_train.distributed("cpu"):
        return checkpoint.resume()


def test_checkpoint_has_all_parts_and_plain_values(saved):
    checkpoint = checkpoint_of(saved, 0, seed=1)
    values = resume(checkpoint)
    assert (values["step"], values["epoch"]) == (2, 3)
    assert checkpoint.parts["part"].state["state"] == 5
    assert checkpoint.parts["part"].state["weights"].sum() == 4999 * 2500


def test_new_folder_has_no_checkpoint(out):
    checkpoint = checkpoint_of(out / "new" / "folder", 0)
    assert resume(checkpoint) == {}
    assert checkpoint.parts["part"].state["state"] == 0


def test_folder_that_cannot_be_made_is_one_line(data):
    with refuses(f"the folder {data}/out: "):
        checkpoint_of(data / "out", 0)


def test_checkpoint_that_does_not_fit_is_refused(out):
    """Of a layer with another shape, or without a part that is new."""
    layer = {"layer": nn.Linear(2, 2)}
    ddp_train.Checkpoint(out, layer, {}, ALONE).save(2)
    other = {"layer": nn.Linear(2, 3)}
    more = {**layer, "new": nn.Linear(2, 2)}
    for parts, reason in ((other, "size mismatch"), (more, "'new'")):
        with refuses("cannot be loaded into this model: ", reason):
            resume(ddp_train.Checkpoint(out, parts, {}, ALONE))


def test_optimizer_that_does_not_fit_is_refused(out):
    x = torch.zeros(1)
    one_group = {"optimizer": torch.optim.Adam([x])}
    two_groups = {"optimizer": torch.optim.Adam([{"params": [x]}, {"params": []}])}
    ddp_train.Checkpoint(out, one_group, {}, ALONE).save(2)
    with refuses("cannot be loaded into this model: "):
        resume(ddp_train.Checkpoint(out, two_groups, {}, ALONE))


def test_bytes_are_on_the_disk_before_the_file_gets_its_name(saved, monkeypatch):
    events = []

    def fsync(descriptor):
        beside = saved / "checkpoint.tmp"
        events.append(("fsync", torch.load(beside)["step"]))

    def replace(source, target):
        events.append(("replace", source.name, target.name))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    checkpoint_of(saved, 0).save(7)
    assert events == [("fsync", 7), ("replace", "checkpoint.tmp", "checkpoint.pt")]


@pytest.mark.parametrize("limit", [0, 8000])
def test_full_disk_leaves_the_old_checkpoint(saved, limit):
    checkpoint = checkpoint_of(saved, 6)
    old_limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    try:
        with refuses("cannot save", "the old one is intact"):
            checkpoint.save(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old_limit, most))
    assert load(saved)["step"] == 2
    assert not (saved / "checkpoint.tmp").exists()


def damaged(content, rng):
    """A bit flipped (half of all), cut off, a hole, garbage; a third near the end."""
    near = rng.choice((len(content), len(content), 1000))
    place = len(content) - 1 - rng.randrange(near)
    with_flip = bytearray(content)
    with_flip[place] ^= 1 << rng.randrange(8)
    with_hole = content[:place] + b"\xff" * 512 + content[place + 512 :]
    others = [content[:place], with_hole, rng.randbytes(place % 3000)]
    return rng.choice([*others, with_flip, with_flip, with_flip])


def try_damaged_files(folder, count, seed):
    """Each is refused, or harmless, as a flip in the padding between records is."""
    rng = random.Random(seed)
    path = folder / "checkpoint.pt"
    whole = path.read_bytes()
    expected = flatten(load(folder))
    refused = 0
    for index in range(count):
        print(f"seed {seed}, file {index}")
        path.write_bytes(damaged(whole, rng))
        try:
            content = checkpoint_of(folder, 0).read()
        except SystemExit as error:
            assert str(error).startswith(f"{path} cannot be loaded: ")
            assert "\n" not in str(error)
            refused += 1
        else:
            assert flatten(content) == expected
    assert refused > 0.7 * count


def test_damaged_file_is_refused(saved):
    try_damaged_files(saved, count=30, seed=1)


@pytest.mark.parametrize("content", [{"model": 1}, {"step": 7}, [1], torch.zeros(2)])
def test_file_of_another_program_is_refused(out, content):
    """It would be overwritten otherwise."""
    checkpoint = checkpoint_of(out, 0)
    torch.save(content, out / "checkpoint.pt")
    with refuses("cannot be loaded: ", "another program"):
        checkpoint.read()


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_code_in_a_checkpoint_does_not_run(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = checkpoint_of(out, 0)
    torch.save({"step": 1, "part": Bomb()}, out / "checkpoint.pt")
    with refuses("cannot be loaded: "):
        checkpoint.read()
    assert not Path("exploded").exists()


def test_disk_without_locks_is_used_with_a_warning(saved, monkeypatch, capfd):
    """As some network disks of clusters are."""

    def lockf(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    assert resume(checkpoint_of(saved, 0, seed=1))["step"] == 2
    assert "cannot be locked: [Errno 37] No locks" in capfd.readouterr().err


def test_lock_of_a_run_that_has_just_ended_is_waited_for(saved, monkeypatch):
    answers = [BlockingIOError, BlockingIOError, None]

    def lockf(file, operation):
        assert operation == fcntl.LOCK_EX | fcntl.LOCK_NB
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(fcntl, "lockf", lockf)
    monkeypatch.setattr(time, "sleep", int)
    checkpoint_of(saved, 0)
    assert answers == []


# ---- Log and options -----------------------------------------------------------------
def test_log_writes_numbers_on_rank_0_alone(tmp_path, capfd):
    for rank in (0, 1):
        log = ddp_train.Log(tmp_path, World(rank, 2, CPU))
        log.write(7, loss=0.123456, lr=1e-3)
        log.say("the end")
    assert capfd.readouterr().out == "step 7  loss 0.12346  lr 0.001\nthe end\n"
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 7, "loss": 0.123456, "lr": 1e-3}


def test_training_goes_on_when_the_log_has_no_space(tmp_path, capfd):
    (tmp_path / "metrics.jsonl").mkdir()  # this cannot be opened either
    ddp_train.Log(tmp_path, ALONE).write(7, loss=0.5)
    assert "cannot write" in capfd.readouterr().out


MISTAKES = "--no_such 1, --batch_size 0, --batch_size x, --accum -1, --epochs 1.5, "
MISTAKES += "--max_steps 0, --lr 0, --lr nan, --lr inf, --dropout 1, --dropout nan, "
MISTAKES += "--warmup 1, --warmup -0.1, --grad_clip 0, --precision fp16, --device tpu, "
MISTAKES += (
    "--timeout 0, --workers -1, --eval_every 0, --save_every 0, --log_every 0, stray"
)


@pytest.mark.parametrize("mistake", MISTAKES.split(", "))
def test_mistake_in_an_option_is_one_line_and_exit_code_2(mistake, capfd):
    with pytest.raises(SystemExit) as error:
        parse(*mistake.split())
    assert error.value.code == 2
    assert mistake.split()[0] in capfd.readouterr().err.splitlines()[-1]


def test_option_has_the_name_of_its_variable():
    args = parse("--batch_size", 8, "--local-rank=1", "--warmup", 0, "--dropout", 0)
    assert (args.batch_size, args.local_rank, args.warmup) == (8, 1, 0)
    for name in vars(parse()):
        assert "-" not in name


# ---- Start processes, and leave none -------------------------------------------------
DEADLINE = 60  # seconds. No test waits longer for a process.
STARTED = []  # the processes of the test that runs now


class Process:
    """A process that a test has started: a command, or a rank that is a fork of this.

    It is in a session of its own. log: the file with all that it and its children say.
    """

    def __init__(self, pid, log, command):
        self.pid = pid
        self.log = log
        self.command = command
        self.code = None  # the exit code, or -N if signal N ended it
        STARTED.append(self)

    @property
    def text(self):
        said = self.log.read_text(errors="replace")
        return re.sub(r"\[Gloo\] Rank .*\n", "", said)  # gloo of torch 2.9 says this

    @property
    def value(self):
        """What the function of a forked rank has returned."""
        return pickle.loads(self.log.with_suffix(".value").read_bytes())

    @property
    def left(self):
        """The processes that it has started and that still live (Linux)."""
        mark = f"STARTED_BY={self.log}\0".encode()
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
        return pids

    def has_ended(self):
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def send(self, number):
        os.kill(self.pid, number)

    def wait_for(self, pattern):
        """Wait until it says something that matches. Returns the match."""
        for _ in ticks():
            ended = self.has_ended()  # asked before its last words are read
            match = re.search(pattern, self.text)
            if match:
                return match
            if ended:
                break
        fail(f"it did not say {pattern!r}: {self.command}")

    def end(self, code=0):
        """Wait until it ends with this exit code. Returns what it said."""
        for _ in ticks():
            if self.has_ended():
                break
        if self.code != code:  # None: it still runs
            fail(f"exit code {self.code}, not {code}: {self.command}")
        return self.text

    def leaves_none(self):
        """Wait until no process is left that it has started."""
        for _ in ticks():
            if not self.left:
                return
        fail(f"these are left: {self.left}: {self.command}")


def ticks():
    """Pauses of 20 ms, until the deadline."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        yield
        time.sleep(0.02)


def fail(reason):
    """Fail the test: with the commands to paste, and what each process has said."""
    for process in STARTED:
        process.has_ended()
        reason += f"\n\n---- {process.command}\n---- exit code {process.code}\n"
        reason += process.text[-6000:]
    pytest.fail(reason)


def end_all(processes, code=0):
    return [process.end(code) for process in processes]


def launch(*command, env=None, cwd=None):
    """Start a command, such as torchrun."""
    words = [str(word) for word in command]
    log = new_log()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            words,
            env={**os.environ, "STARTED_BY": str(log), **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            # If this process cannot end it, the kernel does. An alarm outlives exec().
            preexec_fn=lambda: signal.alarm(3 * DEADLINE),
        )
    process.returncode = 0  # Process waits for its end, not Popen
    settings = [f"{name}={value}" for name, value in (env or {}).items()]
    return Process(process.pid, log, shlex.join(settings + words))


def torchrun(size, *command):
    """The words of a command that starts a script in so many processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc_per_node={size}", *command]


def fork_ranks(size, function, env=None, what=None):
    """Start ranks that call function(), as forks of this process.

    So torch is not imported again, and `function` can break what it likes before it
    calls the program. size 1: it is not launched at all. env: for each rank a dict.
    """
    port = free_port()
    what = what or f"fork of {function}"
    ranks = []
    for rank in range(size):
        variables = {}
        if size > 1:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables |= env[rank] if env else {}
        log = new_log()
        pid = os.fork()
        if pid == 0:
            be_a_rank(function, variables, log)
        ranks.append(Process(pid, log, f"{what}  # rank {rank} of {size}"))
    return ranks


def be_a_rank(function, variables, log):
    """What a forked process does. It does not return."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(3 * DEADLINE)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", closefd=False)
        # A fork makes a pool of threads of its own. If two threads do, torch aborts.
        torch.set_num_threads(1)
        variables["STARTED_BY"] = log
        os.environ.update({name: str(value) for name, value in variables.items()})
        value = function()
        log.with_suffix(".value").write_bytes(pickle.dumps(value))
        code = 0
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def in_ranks(size, function):
    """Call function() in so many ranks. Returns what each rank has returned."""
    ranks = fork_ranks(size, function, what=f"fork:\n{inspect.getsource(function)}")
    end_all(ranks)
    return [rank.value for rank in ranks]


def main(*words):
    """What a rank runs: ddp_train.py with these options."""
    ddp_train.main([str(word) for word in words])


def start_training(size, *options, patch=None, env=None):
    """Start ranks of `ddp_train.py options`. patch(): called in each rank before."""
    words = [str(word) for word in options]

    def rank():
        if patch is not None:
            patch()
        main(*words)

    what = shlex.join(torchrun(size, "ddp_train.py", *words))
    if patch is not None:
        what += f"  # with a patch: {inspect.getsource(patch)}"
    return fork_ranks(size, rank, env, what)


def train(size, *options, code=0, patch=None):
    """Run ddp_train.py to its end in so many ranks. Returns what each of them said."""
    return end_all(start_training(size, *options, patch=patch), code)


def new_log():
    handle, path = tempfile.mkstemp(suffix=".log")
    os.close(handle)
    return Path(path)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory):
    """What all processes of the tests inherit."""
    # SIGTERM ends pytest as Ctrl-C does: the fixtures end what they have started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tempfile.tempdir = str(tmp_path_factory.mktemp("tmp"))
    for name in list(os.environ):
        if name.startswith(("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_")):
            del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = str(HERE)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    torch.set_num_threads(1)  # also because forks must not meet threads
    # The optimizer imports it, for a second: here once for all ranks that are forks.
    importlib.import_module("torch._dynamo")


def alarm(number, frame):
    pytest.fail(f"it hangs: {traceback.format_stack(frame)[-1]}")


@pytest.fixture(autouse=True)
def end_what_is_left(request):
    """After each test: end what it has started, and what that has started."""
    signal.signal(signal.SIGALRM, alarm)
    signal.alarm(0 if "long" in request.keywords else 2 * DEADLINE)
    yield
    signal.alarm(0)
    for process in STARTED:
        # Ranks of torchrun have sessions of their own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in process.left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.has_ended()
    STARTED.clear()


# ---- Read what a run has left --------------------------------------------------------
def load(out):
    """checkpoint.pt of a run."""
    return torch.load(Path(out) / "checkpoint.pt", weights_only=True)


def metrics(out, name):
    """{step: value} of metrics.jsonl. Of a step that was repeated, the last value."""
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record[name] for record in records if name in record}


def assert_same_bits(a, b):
    """Compare the checkpoints of two runs: the state, and the place in the data."""
    a, b = flatten(load(a)), flatten(load(b))
    for name in a | b:
        if not name.startswith(("/time", "/settings", "/to_evaluate")):
            assert a.get(name) == b.get(name), f"{name} differs"


def assert_same_run(a, b):
    """The same bits, losses and evaluations. b may have more of these: at its start."""
    assert_same_bits(a, b)
    assert metrics(a, "loss") == metrics(b, "loss")
    assert metrics(a, "val_loss").items() <= metrics(b, "val_loss").items()


def flatten(value, name=""):
    """{path of names: value} of nested dicts and lists. Tensors become their bytes."""
    if isinstance(value, torch.Tensor):
        return {name: value.numpy().tobytes()}
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        entries = {}
        for key, entry in value.items():
            entries |= flatten(entry, f"{name}/{key}")
        return entries
    return {name: value}


# ---- Break the program in an exact place ---------------------------------------------
def rank_of_this():
    return int(os.environ.get("RANK", 0))


def at_call(where, name, number, action, rank=0, after=False):
    """action(), before the call of where.name() with this number, or after it."""
    function = getattr(where, name)
    calls = itertools.count(1)

    def changed(*args, **options):
        is_now = next(calls) == number
        if is_now and not after:
            action()
        result = function(*args, **options)
        if is_now and after:
            action()
        return result

    if rank == rank_of_this():
        setattr(where, name, changed)


def before_step(number, action, rank=0):
    at_call(ddp_train, "train_step", number, action, rank)


def send_this(number):
    """A function that sends a signal to the process that calls it."""
    return lambda: os.kill(os.getpid(), number)


def boom():
    print("printed before")
    raise RuntimeError("boom")


def noise():
    """Training samples with some bytes lost, at random, as they are loaded."""
    read = ddp_train.ByteWindows.__getitem__

    def noisy(self, i):
        x, y = read(self, i)
        if torch.is_grad_enabled():
            x = x.where(torch.rand(len(x)) < 0.9, 0)
        return x, y

    ddp_train.ByteWindows.__getitem__ = noisy


# ---- The same numbers for any number of ranks ----------------------------------------
# Global batches of 8 in two epochs of 7 steps. 4 samples are left over in each.
EXACT = "--seed 7 --epochs 2 --grad_clip 1.2 --eval_every 5 --lr 0.001".split()
LAYOUTS = {
    "1 x 8": (1, "--batch_size 8"),
    "2 x 4": (2, "--batch_size 4"),
    "4 x 2": (4, "--batch_size 2"),
    "1 x 2 x accum 4": (1, "--batch_size 2 --accum 4"),
    "2 x 2 x accum 2": (2, "--batch_size 2 --accum 2"),
}


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def observe(*words):
    """Train. Returns what this rank has seen: samples, gradients, seeds, weights."""
    seen = types.SimpleNamespace(samples=[], gradients=[], seeds=[])
    read = ddp_train.ByteWindows.__getitem__
    take_step = torch.optim.AdamW.step
    seed = torch.manual_seed

    def note_sample(self, i):
        if torch.is_grad_enabled():
            seen.samples.append(i)
        return read(self, i)

    def note_gradient(optimizer, closure=None):
        [group] = optimizer.param_groups
        seen.gradients.append(flat(param.grad for param in group["params"]))
        seen.weights = flat(group["params"])
        return take_step(optimizer)

    def note_seed(number):
        seen.seeds.append(number)
        return seed(number)

    ddp_train.ByteWindows.__getitem__ = note_sample
    torch.optim.AdamW.step = note_gradient
    torch.manual_seed = note_seed
    main(*words)
    return seen


@pytest.fixture(scope="session")
def layouts(tmp_path_factory):
    """{name: (folder, what each rank has seen)}"""
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "data").write_bytes(DATA)
    runs = {}
    for name, (size, words) in LAYOUTS.items():
        options = [*TINY, *EXACT, *words.split(), "--data", folder / "data"]
        options += ["--out", folder / name]
        runs[name] = folder / name, in_ranks(size, lambda: observe(*options))  # noqa: B023
    return runs


def plain_loop(data):
    """The training of 1 x 8 as one writes it without this program."""
    args = parse(*TINY, *EXACT, "--batch_size", 8, "--data", data)
    torch.manual_seed(7)
    model = ddp_train.build_model(args)
    optimizer = torch.optim.AdamW(model.parameters())
    train_set, _, _ = ddp_train.load_data(args)
    gradients = []
    losses = []
    for step in range(14):
        epoch, place = divmod(step, 7)
        indices = order_of(60, seed=7, epoch=epoch)[8 * place : 8 * place + 8]
        x = torch.stack([train_set[i][0] for i in indices])
        y = torch.stack([train_set[i][1] for i in indices])
        middle = epoch + (8 * place + 4) / 60
        optimizer.param_groups[0]["lr"] = ddp_train.learning_rate(args, middle)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten().long())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.2)
        gradients.append(flat(param.grad for param in model.parameters()))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return gradients, losses, model.state_dict()


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    data = tmp_path_factory.mktemp("plain") / "data"
    data.write_bytes(DATA)
    [result] = in_ranks(1, lambda: plain_loop(data))
    return result


@processes
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_gradients_and_weights_are_those_of_a_plain_loop(layouts, plain, name):
    """The gradient is what the optimizer gets: averaged, then clipped."""
    folder, ranks = layouts[name]
    gradients, losses, weights = plain
    assert list(metrics(folder, "loss").values()) == pytest.approx(losses, rel=1e-6)
    assert len(metrics(folder, "loss")) == 14
    for rank in ranks:
        for found, expected in zip(rank.gradients, gradients, strict=True):
            assert (found - expected).norm() < 1e-5 * expected.norm()
        assert torch.equal(rank.weights, ranks[0].weights)
    for key, weight in load(folder)["model"].items():
        # The bias of the keys has no influence: its gradient is nothing but rounding.
        if not key.endswith("query_key_value.bias"):
            assert (weight - weights[key]).abs().max() < 1e-6


@processes
@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluations_rates_and_norms_are_the_same(layouts, name):
    folder, _ = layouts[name]
    expected, _ = layouts["1 x 8"]
    assert set(metrics(folder, "val_loss")) == {5, 7, 10, 14}
    for number in ("val_loss", "bits_per_byte", "lr", "grad_norm"):
        found = metrics(folder, number)
        assert found == pytest.approx(metrics(expected, number), rel=1e-5)
    norms = metrics(folder, "grad_norm").values()
    assert min(norms) < 1.2 < max(norms)  # some steps are clipped, and some are not


@processes
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_step_has_its_own_eight_samples(layouts, name):
    """The same for all layouts: in an epoch none comes twice, and 4 are left over."""
    _, ranks = layouts[name]
    share = 8 // len(ranks)
    for step in range(14):
        epoch, place = divmod(step, 7)
        read = []
        for rank in ranks:
            assert len(rank.samples) == 14 * share
            read += rank.samples[step * share :][:share]
        expected = order_of(60, seed=7, epoch=epoch)[8 * place : 8 * place + 8]
        assert sorted(read) == sorted(expected)


@processes
def test_random_numbers_differ_by_rank_and_step(layouts, tiny):
    """Nor are they those of the start, or of another --seed.

    torch.manual_seed() seeds the generators of GPUs, too.
    """
    _, ranks = layouts["4 x 2"]
    seeds = []
    for rank in ranks:
        assert len(rank.seeds) >= 15
        seeds += rank.seeds[-14:]
        assert rank.seeds[0] == 7
    assert len(set(seeds)) == 4 * 14
    [other] = in_ranks(1, lambda: observe(*tiny, "--max_steps", 14))
    assert not set(other.seeds) & set(seeds)


class CountingDDP(ddp_train.DistributedDataParallel):
    """It counts how often the gradients are averaged."""

    averages = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_comm_hook(None, self.count)

    @staticmethod
    def count(group, bucket):
        CountingDDP.averages += 1
        return allreduce_hook(group, bucket)


@processes
def test_gradients_are_averaged_once_per_optimizer_step(tiny):
    def count():
        ddp_train.DistributedDataParallel = CountingDDP
        options = [*tiny, "--batch_size", 2, "--accum", 3, "--max_steps", 4]
        main(*options)
        return CountingDDP.averages

    assert in_ranks(2, count) == [4, 4]


@processes
def test_each_sample_at_most_once_though_a_run_is_resumed_on_fewer_ranks(tiny):
    """On 4, 2 and 1 ranks, each in the middle of the epoch."""
    read = []
    for size, batch_size, last_step in ((4, 2, 3), (2, 3, 5), (1, 7, 99)):
        more = "--epochs", 1, "--batch_size", batch_size, "--max_steps", last_step
        options = [*tiny, *more]
        for rank in in_ranks(size, lambda: observe(*options)):  # noqa: B023
            read += rank.samples
    assert len(read) == len(set(read)) == 24 + 12 + 21


@processes
@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_is_the_same_on_any_number_of_ranks(size):
    """Also if there is one batch, and two ranks have none."""

    def evaluate():
        with ddp_train.distributed("cpu") as world:
            for n in (1, 9):
                loader = ddp_train.eval_loader([2**24, *range(1, n)], 2, world)
                yield ddp_train.evaluate(nn.Identity(), sum_and_count, loader, world)

    for one, nine in in_ranks(size, lambda: list(evaluate())):
        assert one == {"mean": 2**24}
        assert nine == {"mean": (2**24 + 36) / 9}


def batch_norm():
    """The model has batch normalization. A copy of what an evaluation evaluates."""
    build_model = ddp_train.build_model
    evaluate = ddp_train.evaluate

    def with_norm(args):
        model = build_model(args)
        model.norm = nn.Sequential(Swap(), nn.BatchNorm1d(args.dim), Swap())
        return model

    def keep_file(model, score, loader, world, autocast):
        out = Path(sys.argv[-1])
        if world.rank == 0:
            content = load(out)
            shutil.copy(out / "checkpoint.pt", out / f"{content['step']}.pt")
        return evaluate(model, score, loader, world, autocast)

    ddp_train.build_model = with_norm
    ddp_train.evaluate = keep_file


class Swap(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


@processes
@pytest.mark.parametrize("batch_size", [1, 4])  # with 4 rank 1 has none to evaluate
def test_batch_norm_is_evaluated_as_it_is_saved(
    tiny, out, data, monkeypatch, batch_size
):
    """In mid-run, at the end and after a resume. Each rank has means of its own."""
    monkeypatch.setattr(sys, "argv", ["", str(out)])
    options = [*tiny, "--batch_size", batch_size, "--eval_every", 3]
    train(2, *options, "--max_steps", 7, patch=batch_norm)
    train(2, *options, "--max_steps", 12, patch=batch_norm)
    args = parse(*TINY, "--data", data)
    _, val_set, _ = ddp_train.load_data(args)
    batch = torch.utils.data.default_collate([val_set[i] for i in range(3)])
    model = ddp_train.build_model(args)
    model.norm = nn.Sequential(Swap(), nn.BatchNorm1d(args.dim), Swap())
    losses = metrics(out, "val_loss")
    assert set(losses) == {3, 6, 7, 9, 12}
    for step, loss in losses.items():
        state = torch.load(out / f"{step}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        with torch.no_grad():
            expected = ddp_train.compute_loss(model.eval(), batch).item()
        assert loss == pytest.approx(expected, rel=1e-6)


# ---- A run ---------------------------------------------------------------------------
@processes
def test_run_learns_saves_and_is_finished(tiny, out):
    """The same command again trains nothing, and says which options are others."""
    (said,) = train(1, *tiny, "--epochs", 1, "--lr", 0.01)
    assert "ranks: 1, cpu, fp32\n" in said
    assert "an epoch: 60 samples, 4 a step, 0 left over\nfrom step 0 to 15\n" in said
    assert said.endswith(f"done: step 15, saved in {out}/checkpoint.pt\n")
    losses = metrics(out, "loss")
    assert list(losses) == list(range(1, 16))
    assert losses[15] < losses[1] - 0.3
    assert set(metrics(out, "val_loss")) == {15}
    bits = metrics(out, "val_loss")[15] / math.log(2)
    assert metrics(out, "bits_per_byte")[15] == pytest.approx(bits)
    before = (out / "checkpoint.pt").read_bytes()
    (said,) = train(1, *tiny, "--epochs", 1, "--lr", 0.02)
    assert "--lr is 0.02, in the checkpoint it was 0.01\n" in said
    assert "from step 15 to 15\n" in said
    assert "done: step 15" in said
    assert (out / "checkpoint.pt").read_bytes() == before
    assert metrics(out, "loss") == losses


@processes
def test_run_can_be_extended(tiny, out):
    """Fewer steps or epochs than are done end it."""
    options = [*tiny, "--log_every", 50]
    wanted = [("--max_steps", 4, 4), ("--max_steps", 3, 4), ("--max_steps", 6, 6)]
    wanted += [("--epochs", 1, 15), ("--epochs", 2, 30), ("--epochs", 1, 30)]
    for option, number, step in wanted:
        train(1, *options, option, number)
        assert load(out)["step"] == step


@processes
def test_only_rank_0_speaks_and_writes(tiny, out):

    def run():
        folder = [out, out / "1"][rank_of_this()]
        options = [*tiny, "--out", folder, "--max_steps", 2]
        main(*options)

    ranks = fork_ranks(2, run)
    said = end_all(ranks)
    assert "ranks: 2, cpu, fp32\nan epoch: 60 samples, 8 a step, 4 left" in said[0]
    assert said[1] == ""
    assert list((out / "1").iterdir()) == []


@processes
def test_loss_is_the_mean_over_all_steps_since_the_last_line(tiny, tmp_path):
    """A save comes with a line, an evaluation with a save."""
    rare = "--log_every 6 --save_every 4 --eval_every 9".split()
    train(2, *tiny, "--epochs", 1, "--out", tmp_path / "a", "--log_every", 1)
    train(2, *tiny, "--epochs", 1, "--out", tmp_path / "b", *rare, "--max_steps", 7)
    train(2, *tiny, "--epochs", 2, "--out", tmp_path / "b", *rare)
    losses = metrics(tmp_path / "a", "loss")
    found = metrics(tmp_path / "b", "loss")
    assert set(found) == {4, 6, 7, 8, 9, 12, 14}
    assert found[4] == pytest.approx(sum(losses[step] for step in (1, 2, 3, 4)) / 4)
    assert found[6] == pytest.approx((losses[5] + losses[6]) / 2)
    assert found[7] == pytest.approx(losses[7])


@processes
def test_speed_counts_the_samples_of_all_ranks_and_no_evaluation(tiny, out):
    def clock():
        """Each look at the clock takes a second, and an evaluation a thousand."""
        ticks = itertools.count()

        def evaluate(*args):
            for _ in range(1000):
                next(ticks)
            return {}

        ddp_train.evaluate = evaluate
        for step in range(1, 7):
            before_step(step, lambda: next(ticks), rank_of_this())
        time.perf_counter = lambda: next(ticks)

    options = [*tiny, "--log_every", 2, "--eval_every", 4, "--accum", 3]
    train(2, *options, "--max_steps", 6, "--epochs", 9, patch=clock)
    assert metrics(out, "samples_per_s") == {2: 16, 4: 16, 6: 16}
    assert metrics(out, "seconds_left") == {2: 6, 4: 3, 6: 0}


@processes
def test_bf16_computes_in_bf16_and_keeps_fp32_weights(tiny, out):
    def check():
        """backward() must be outside of autocast."""
        seen = set()
        forward = nn.Linear.forward

        def linear(self, x):
            y = forward(self, x)
            seen.add(y.dtype)
            return y

        nn.Linear.forward = linear
        main(*options)
        return seen

    options = [*tiny, "--precision", "bf16", "--max_steps", 3]
    assert in_ranks(2, check) == [{torch.bfloat16}] * 2
    for weight in load(out)["model"].values():
        assert weight.dtype == torch.float32


@processes
def test_compile_has_the_same_numbers_and_names(tiny, tmp_path):
    """The graphs run as they are. tests/test_long.py has the real compiler."""

    def compile_quickly():
        original = torch.compile
        torch.compile = lambda model: original(model, backend=with_eager)

    def with_eager(graph, inputs):
        print("compiled")
        return graph.forward

    options = [*tiny, "--accum", 2, "--max_steps", 2]
    train(2, *options, "--out", tmp_path / "a")
    options += ["--out", tmp_path / "b", "--compile"]
    for text in train(2, *options, patch=compile_quickly):
        assert "compiled" in text
    a, b = load(tmp_path / "a")["model"], load(tmp_path / "b")["model"]
    assert list(a) == list(b)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# ---- Stop and resume -----------------------------------------------------------------
HARD = "--epochs 2 --dropout 0.1 --save_every 3 --eval_every 5".split()


@pytest.fixture(scope="session")
def untouched(tmp_path_factory):
    """{ranks: the folder of a run that nobody stopped}"""
    folder = tmp_path_factory.mktemp("untouched")
    (folder / "data").write_bytes(DATA)
    folders = {}
    for size in (1, 2):
        folders[size] = folder / str(size)
        options = [*TINY, *HARD, "--data", folder / "data", "--out", folders[size]]
        train(size, *options, patch=noise)
    return folders


@processes
@pytest.mark.parametrize(
    "size, rank, step, number",
    [
        (1, 0, 4, "SIGTERM"),
        (2, 1, 5, "SIGINT"),
        (2, 0, 8, "SIGUSR1"),
        (2, 1, 7, "SIGHUP"),
    ],
)
def test_stopped_and_resumed_the_bits_are_the_same(
    tiny, out, untouched, size, rank, step, number
):
    """With dropout and noise. One rank stops all. 5 is a step of an evaluation."""
    number = signal.Signals[number]

    def stop():
        noise()
        before_step(step, send_this(number), rank)

    said = train(size, *tiny, *HARD, patch=stop, code=128 + number)[0]
    assert f"stopped by signal {number:d}, saved at step {step}\n" in said
    assert "done" not in said
    assert load(out)["step"] == step
    said = train(size, *tiny, *HARD, patch=noise)[0]
    assert f"from step {step} to " in said
    assert_same_run(untouched[size], out)


@processes
@pytest.mark.parametrize("size", [1, 2])
def test_signal_in_the_last_step_changes_nothing(tiny, out, size):
    """Nor does a step of all samples of the epoch."""
    options = [*tiny, "--batch_size", 60 // size, "--epochs", 3]

    def stop():
        before_step(3, send_this(signal.SIGTERM))

    assert "done: step 3" in train(size, *options, patch=stop)[0]
    assert set(metrics(out, "val_loss")) == {1, 2, 3}


@processes
def test_stopped_rank_of_torchrun_ends_with_0(tiny):
    def stop():
        os.environ["TORCHELASTIC_RUN_ID"] = "a run"
        before_step(3, send_this(signal.SIGTERM))

    assert "saved at step 3" in train(2, *tiny, patch=stop)[0]


KILLED = {
    "in a step": (ddp_train, "train_step", 5, 3),
    "in a save": (os, "fsync", 2, 3),
    "in an evaluation": (ddp_train, "evaluate", 1, 5),
}


@processes
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("place", KILLED)
def test_killed_and_resumed_the_bits_are_the_same(tiny, out, untouched, size, place):
    where, name, call, step = KILLED[place]
    victim = 0 if where is os else size - 1

    def kill():
        noise()
        at_call(where, name, call, send_this(signal.SIGKILL), victim)

    ranks = start_training(size, *tiny, *HARD, patch=kill)
    for rank in ranks:
        rank.end(-9 if rank is ranks[victim] else 1)
    said = train(size, *tiny, *HARD, patch=noise)[0]
    assert f"from step {step} to " in said
    assert_same_run(untouched[size], out)


@processes
def test_checkpoint_is_whole_at_any_moment(saved):
    def save():
        where, name = moment
        at_call(where, name, 1, send_this(signal.SIGKILL), after=after)
        checkpoint_of(saved, 6).save(3)

    old = load(saved)
    moments = [(torch, "save"), (os, "fsync"), (os, "replace")]
    for moment, after in itertools.product(moments, (False, True)):
        [rank] = fork_ranks(1, save)
        rank.end(-9)
        if moment == (os, "replace") and after:
            assert load(saved)["step"] == 3
        else:
            assert flatten(load(saved)) == flatten(old)


@processes
def test_lost_evaluation_is_made_though_no_step_is_left(tiny, out):
    """Stopped one step before the end, then resumed with twice the batch."""

    options = [*tiny, "--epochs", 1]
    train(
        1, *options, patch=lambda: before_step(14, send_this(signal.SIGTERM)), code=143
    )
    assert metrics(out, "val_loss") == {}
    (said,) = train(1, *options, "--batch_size", 8)
    assert "from step 14 to 14" in said
    assert set(metrics(out, "val_loss")) == {14}


@processes
def test_three_ranks_resume_up_to_rounding(tiny, tmp_path):
    options = [*tiny, "--batch_size", 3, "--epochs", 2]
    train(3, *options, "--out", tmp_path / "a")
    train(
        3,
        *options,
        "--out",
        tmp_path / "b",
        patch=lambda: before_step(3, send_this(signal.SIGTERM), rank=2),
        code=143,
    )
    train(3, *options, "--out", tmp_path / "b")
    expected = metrics(tmp_path / "a", "loss")
    assert metrics(tmp_path / "b", "loss") == pytest.approx(expected, rel=1e-6)


@processes
def test_nodes_take_the_checkpoint_with_the_most_steps(tiny, tmp_path):
    """Four disks: nothing, most steps but the older file, most steps, fewer steps.

    The evaluation at the start shows what the ranks have: three evaluate a sample each.
    """
    disks = [tmp_path / name for name in ("nothing", "older", "best", "fewer")]
    for disk, steps, rate in ((1, 5, 0.01), (2, 5, 0.02), (3, 3, 0.03)):
        train(1, *tiny, "--out", disks[disk], "--max_steps", steps, "--lr", rate)

    def run():
        options = [*tiny, "--out", disks[rank_of_this()], "--batch_size", 1]
        main(*options, "--max_steps", 3)

    end_all(fork_ranks(4, run))
    expected = metrics(disks[2], "val_loss")
    assert metrics(disks[0], "val_loss") == pytest.approx(expected, rel=1e-6)


# ---- Refused -------------------------------------------------------------------------
def refused(size, *options):
    """What each rank says when it refuses to train: one line."""
    lines = []
    for text in train(size, *options, code=1):
        (line,) = text.splitlines()
        lines.append(line)
    return lines


@processes
@pytest.mark.parametrize(
    "option", ["--seed 5", "--heads 4", "--dim 18", "--layers 2", "--data"]
)
def test_checkpoint_of_another_model_seed_or_data_is_refused(tiny, tmp_path, option):
    train(1, *tiny, "--max_steps", 1)
    words = option.split()
    if option == "--data":
        words.append(tmp_path / "other")
        words[-1].write_bytes(DATA[::-1])
    (line,) = refused(1, *tiny, *words)
    assert re.match(r"\S+ has (\S+|the data) .*: take another --out", line)


@processes
@pytest.mark.parametrize("size", [1, 2])
def test_bad_input_is_one_line_on_each_rank(tiny, size):
    for options, says in (
        (["--data", "/no/such"], "no data: "),
        (["--batch_size", 61], f"60 samples are less than one step of {61 * size}"),
        (["--heads", 3], "--dim 16 is not divisible by --heads 3"),
    ):
        for rank, line in enumerate(refused(size, *tiny, *options)):
            who = f"error: rank {rank}: " if size > 1 else ""
            assert line.startswith(f"{who}{says}")


@processes
def test_second_run_in_the_folder_is_refused_while_the_first_lives(tiny, out):
    def wait_less():
        lock = ddp_train.lock
        ddp_train.lock = lambda path: lock(path, wait=1)

    [first] = start_training(
        1, *tiny, patch=lambda: before_step(2, lambda: time.sleep(3 * DEADLINE))
    )
    first.wait_for("step 1 ")
    (line,) = train(1, *tiny, patch=wait_less, code=1)
    assert line == f"the folder {out} is in use by another run\n"
    first.send(signal.SIGKILL)
    first.end(-9)
    train(1, *tiny, "--max_steps", 1)


@processes
@pytest.mark.parametrize("name", ["--lr", "the data"])
def test_ranks_that_differ_are_named_on_all(tiny, tmp_path, name):
    def run():
        options = [*tiny, "--lr", [0.002, 0.5][rank_of_this()]]
        if name == "the data":
            other = tmp_path / str(rank_of_this())
            other.write_bytes([DATA, DATA[::-1]][rank_of_this()])
            options = [*tiny, "--data", other]
        main(*options)

    for rank, text in enumerate(end_all(fork_ranks(2, run), code=1)):
        (line,) = text.splitlines()
        assert line.startswith(f"error: rank {rank}: {name} is ")
        assert "on rank 1 (" in line and "on rank 0 (" in line


@processes
def test_ranks_compare_all_that_must_be_alike(tiny):
    def run():
        def compare(must_match):
            sys.exit(json.dumps(list(must_match)))

        ddp_train.check_alike = compare
        main(*tiny)

    [process] = fork_ranks(1, run)
    compared = set(json.loads(process.end(1)))
    must = set(vars(parse())) - {"data", "out", "device", "workers", "local_rank"}
    others = {"the data", "the device", "the program", "torch"}
    assert compared == others | {f"--{name}" for name in must}


@processes
def test_nan_on_one_rank_between_two_lines_is_not_saved(tiny, out):
    def nan_in_step_6():
        loss = ddp_train.compute_loss
        calls = itertools.count(1)

        def bad_loss(model, batch):
            is_bad = next(calls) == 6 and rank_of_this() == 1
            return loss(model, batch) * (math.nan if is_bad else 1)

        ddp_train.compute_loss = bad_loss

    check_not_finite(out, *tiny, patch=nan_in_step_6)


@processes
def test_infinite_gradient_between_two_lines_is_not_saved(tiny, out, data):
    """That of a byte that does not occur in the text: all losses are finite."""

    def infinite_in_step_6():
        build_model = ddp_train.build_model
        calls = itertools.count(1)

        def change(gradient):
            gradient = gradient.clone()
            if next(calls) == 6 and rank_of_this() == 1:
                gradient[255] = math.inf
            return gradient

        def build(args):
            model = build_model(args)
            model.embed.weight.register_hook(change)
            return model

        ddp_train.build_model = build

    data.write_bytes(bytes(range(128)) * 16)
    check_not_finite(out, *tiny, patch=infinite_in_step_6)


def check_not_finite(out, *options, patch):
    more = ["--log_every", 50, "--save_every", 4, "--epochs", 9]
    for rank, text in enumerate(train(2, *options, *more, patch=patch, code=1)):
        line = text.splitlines()[-1]
        assert line.startswith(f"error: rank {rank}: not finite by step ")
        assert "Traceback" not in text
    assert load(out)["step"] == 4


# ---- The ranks end together ----------------------------------------------------------
@processes
def test_rank_that_raises_ends_the_other(tiny):
    """It prints its traceback, and what it has printed before is not lost."""

    ranks = start_training(2, *tiny, patch=lambda: before_step(2, boom, rank=1))
    said = end_all(ranks, 1)
    # torchrun's summary has seconds.
    assert ranks[0].log.stat().st_mtime > ranks[1].log.stat().st_mtime + 1
    assert said[1].startswith("error: rank 1: Traceback")
    assert "\nRuntimeError: boom\n" in said[1]
    assert "printed before" in said[1]
    assert "error: rank 0: Traceback" in said[0]


@processes
def test_sys_exit_0_of_all_ranks_is_orderly(tiny):
    """An ordinary exit, also if gloo's threads get the GIL only from who waits."""

    def run():
        sys.setswitchinterval(DEADLINE)
        before_step(2, sys.exit, rank=rank_of_this())
        try:
            main(*tiny)
        except SystemExit:
            return "ended"

    assert in_ranks(2, run) == ["ended", "ended"]


@processes
def test_ranks_leave_the_block_together(tmp_path):
    def run():
        with ddp_train.distributed("cpu") as world:
            if world.rank == 1:
                time.sleep(0.5)
                (tmp_path / "last").touch()
        return (tmp_path / "last").exists()

    assert in_ranks(2, run) == [True, True]


@processes
def test_ddp_may_outlive_the_block():
    """The same. Its end is that of the group, and waits for gloo's threads.

    On one core these still work then. A wrong program hangs in 8 of 10 runs: so three.
    """

    def run():
        if hasattr(os, "sched_setaffinity"):  # not on macOS
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        sys.setswitchinterval(DEADLINE)
        with ddp_train.distributed("cpu") as world:
            ddp = ddp_train.DistributedDataParallel(nn.Linear(1, 1))
            ddp(torch.ones(1, 1)).sum().backward()
        return world.rank

    for _ in range(3):
        assert in_ranks(4, run) == [0, 1, 2, 3]


@processes
def test_sys_exit_0_of_one_rank_ends_the_other(tiny):
    ranks = start_training(2, *tiny, patch=lambda: before_step(2, sys.exit, rank=1))
    ranks[1].end()
    assert "error: rank 0: " in ranks[0].end(1)


@processes
def test_rank_that_hangs_is_waited_for_until_the_timeout(tiny):
    ranks = start_training(
        2,
        *tiny,
        "--timeout",
        3,
        patch=lambda: before_step(2, lambda: time.sleep(3 * DEADLINE), rank=1),
    )
    said = ranks[0].end(1)
    assert re.search("[Tt]imed out waiting 3000ms", said)
    assert not ranks[1].has_ended()


# ---- Loading processes ---------------------------------------------------------------
IMPORTED_BY = os.getpid()  # a fork does not import this again


class Draws:
    """A sample is a random number. Of two loading processes the first one is slower."""

    def __init__(self, folder):
        self.folder = folder
        self.count = 0

    def __len__(self):
        return 12

    def __getitem__(self, i):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self.count += 1
        info = torch.utils.data.get_worker_info()
        if info.num_workers == 2:
            second_batch = self.folder / "second batch"
            if info.id == 1 and self.count == 2:
                second_batch.touch()  # the first one has been handed over
            for _ in ticks():
                if info.id == 1 or second_batch.exists():
                    break
        assert blocked >= set(StopSignal.NUMBERS)
        assert os.getpid() == IMPORTED_BY
        return i, torch.rand(1).item()


@processes
def test_loading_processes_get_new_random_numbers_when_they_start(tiny):
    """Of two starts, the first of which ends in mid-epoch, on two ranks."""

    def seeds():
        seen = []
        begin = ddp_train.Loader.__iter__

        def note(loader):
            if loader.generator is not None:  # not in an evaluation
                seen.append(loader.generator.initial_seed())
            return begin(loader)

        ddp_train.Loader.__iter__ = note
        main(*tiny, "--max_steps", 4)
        main(*tiny, "--epochs", 2)
        return seen

    first, second = in_ranks(2, seeds)
    assert len(first) == len(second) == 3
    assert len({*first, *second}) == 6


@processes
def test_loading_processes_keep_order_draw_their_own_and_get_no_signal(tmp_path):
    numbers = []
    for rank, workers in ((0, 2), (1, 1)):
        loader = ddp_train.train_loader(
            Draws(tmp_path), 1, World(rank, 2, CPU), workers=workers
        )
        order = []
        for i, number in loader:
            order.append(i.item())
            numbers.append(number.item())
        assert order == order_of(12, rank, 2)
    assert len(set(numbers)) == 12
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(StopSignal.NUMBERS)


class Busy(ddp_train.ByteWindows):
    """A data set whose loading process hangs in its fifth batch."""

    def __getitem__(self, i):
        self.read = getattr(self, "read", 0) + 1
        if self.read > 16:
            time.sleep(3 * DEADLINE)
        return super().__getitem__(i)


@processes
def test_signal_to_all_processes_when_loading_ones_start_and_one_is_busy(tiny, out):
    """Those of the evaluation start after step 3. The run saves and leaves none."""

    def patch():
        ddp_train.ByteWindows = Busy
        send = lambda: os.killpg(os.getpgrp(), signal.SIGTERM)  # noqa: E731
        at_call(ddp_train.Loader, "__iter__", 2, send, after=True)

    options = [*tiny, "--workers", 1, "--eval_every", 3]
    [rank] = start_training(1, *options, patch=patch)
    said = rank.end(143)
    assert "stopped by signal 15, saved at step 4\n" in said
    assert "DataLoader" not in said
    assert set(metrics(out, "val_loss")) == {3}
    rank.leaves_none()


@processes
def test_rank_that_fails_leaves_no_busy_loading_process(tiny):
    def patch():
        ddp_train.ByteWindows = Busy
        before_step(4, boom, rank=1)

    ranks = start_training(2, *tiny, "--workers", 1, patch=patch)
    for rank in ranks:
        assert "error: rank" in rank.end(1)
        rank.leaves_none()
    first, later = [rank.log.stat().st_mtime for rank in reversed(ranks)]
    assert later > first + 1


# ---- Launchers -----------------------------------------------------------------------
THIS = Path(__file__).resolve()  # as a script it is the program with a patch


def raise_in_step_3():
    before_step(3, boom, rank=1)


def kill_torchrun_in_step_3():
    before_step(3, kill_parent, rank=1)


def kill_parent():
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    for _ in ticks():
        if os.getppid() != parent:
            break


def kill_once():
    """And in the end: print the threads that are left."""
    noise()
    atexit.register(print_threads)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        before_step(5, send_this(signal.SIGKILL), rank=1)


def print_threads():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print("threads:", *names)


@processes
def test_one_process_saves_though_nobody_reads_its_output(tiny, out, untouched):
    words = [sys.executable, THIS, "noise", *tiny, *HARD]
    command = shlex.join([str(word) for word in words])
    launch("bash", "-c", f"set -o pipefail; {command} | head -1").end()
    assert_same_run(untouched[1], out)


@processes
def test_torchrun_names_the_rank_that_failed_first(tiny):
    """It ends the other within seconds."""
    run = launch(*torchrun(2, THIS, "raise_in_step_3", *tiny))
    said = run.end(1)
    assert "step 2 " in said
    cause = said[said.index("Root Cause (first observed failure)") :]
    assert re.search(r"rank +: 1 ", cause)
    assert "RuntimeError: boom" in cause
    run.leaves_none()


@processes
def test_two_nodes_by_torchrun_and_by_the_old_launcher(tiny, tmp_path):
    """With a static rendezvous: the same bits as of ranks that are started by hand."""
    options = [*tiny, "--epochs", 1, "--batch_size", 8]
    train(2, *options, "--out", tmp_path / "by hand")
    address = ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    agents = []
    for rank, launcher in enumerate(("run", "launch")):
        command = [sys.executable, "-m", f"torch.distributed.{launcher}", *address]
        command += ["--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=1"]
        agents.append(launch(*command, SCRIPT, *options))
    said = end_all(agents)
    assert said[0].count("ranks: 2, cpu, fp32\n") == 1
    assert "ranks: " not in said[1]
    assert_same_run(tmp_path / "by hand", tmp_path / "out")


@processes
def test_torchrun_restarts_ranks(tiny, out, untouched):
    """With c10d. One is killed. The new ones go on, and end with the same bits. Threads
    of gloo that outlive their group may abort the exit: one of each rank is harmless.
    """
    command = torchrun(2, "--max-restarts=1", THIS, "kill_once", *tiny, *HARD)
    place = command.index("--standalone")
    endpoint = f"--rdzv_endpoint=127.0.0.1:{free_port()}"
    command[place : place + 1] = ["--rdzv_backend=c10d", endpoint]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    said = launch(*command, env=env).end()
    assert "from step 3 to 14\n" in said
    assert_same_run(untouched[2], out)
    assert said.count("threads:") == 2
    assert said.count("gloo") <= 2


@processes
def test_ranks_save_and_stop_when_torchrun_is_killed(tiny, out):
    run = launch(*torchrun(2, THIS, "kill_torchrun_in_step_3", *tiny))
    run.end(-9)
    run.leaves_none()
    assert "stopped by signal 15, saved at step 3\n" in run.text
    assert load(out)["step"] == 3


@processes
def test_sigterm_to_torchrun_saves_and_leaves_no_process(tiny, out):
    """torchrun sends it to the loading processes, too."""
    options = [*tiny, "--workers", 2, "--epochs", 99999, "--eval_every", 10**9]
    run = launch(*torchrun(1, SCRIPT, *options))
    run.wait_for("step 3 ")
    run.send(signal.SIGTERM)
    said = run.end(1)
    step = int(re.search(r"stopped by signal 15, saved at step (\d+)\n", said)[1])
    assert load(out)["step"] == step
    assert "DataLoader" not in said
    run.leaves_none()


if __name__ == "__main__":  # test_ddp_train.py PATCH OPTIONS
    globals()[sys.argv[1]]()
    ddp_train.main(sys.argv[2:])
