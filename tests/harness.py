"""What all tests share: it starts ranks, disturbs them, and reads what they have left.

    FAULT="train_step 3 SIGKILL 1" python tests/harness.py OPTIONS

is ddp_train.py with a fault: SIGKILL before the third train_step() of rank 1.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401  Optimizers import it: here once for all forks.

import ddp_train

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "ddp_train.py"
WITH_FAULT = Path(__file__).resolve()  # as a script it is the program with a fault
# The promises are tested on CPUs, also where there are GPUs. test_gpu.py uses these.
GPUS = torch.cuda.device_count()
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
CPU = torch.device("cpu")
processes = pytest.mark.processes  # the mark of tests that start some
# A model so small that a step takes milliseconds.
TINY = "--device cpu --dim 16 --layers 1 --heads 2 --seq_len 32".split()
TINY += "--batch_size 4 --log_every 1".split()
DATA = bytes(range(256)) * 8  # 60 samples to train with, and 3 to evaluate
# Seconds: no test waits longer for a process. Far above what a busy machine needs.
DEADLINE = int(os.environ.get("DEADLINE", 180))
TIME_LIMIT = "the time limit"  # how a test fails that has waited in vain
STARTED = []  # the processes of the test that runs now
PORTS = []  # sockets that keep its ports


# ---- Start processes, and leave none -------------------------------------------------
class Process:
    """A process that a test has started: a command, or a rank that is a fork of this.

    It is in a session of its own. log: the file with all that it and its children say.
    """

    def __init__(self, process, log, command):
        self.process = process  # of subprocess, or of multiprocessing
        self.pid = process.pid
        self.log = log
        self.command = command
        STARTED.append(self)

    @property
    def code(self):
        """The exit code, or -N if signal N ended it. None: it still runs."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll()
        return self.process.exitcode

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
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                environment = (folder / "environ").read_bytes()
                if f"STARTED_BY={self.log}\0".encode() in environment:
                    found.append(int(folder.name))
        return found

    def send(self, number):
        os.kill(self.pid, number)

    def wait_for(self, pattern):
        """Wait until it says something that matches. Returns the match."""
        for _ in ticks(f"it has not said {pattern!r}: {self.command}"):
            ended = self.code is not None  # asked before its last words are read
            match = re.search(pattern, self.text)
            if match:
                return match
            if ended:
                fail(f"it ended and has not said {pattern!r}: {self.command}")

    def wait(self):
        """Wait until it ends, with any exit code. Returns what it said."""
        for _ in ticks(f"it does not end: {self.command}"):
            if self.code is not None:
                return self.text

    def end(self, code=0):
        """Wait until it ends with this exit code. Returns what it said."""
        self.wait()
        if self.code != code:
            fail(f"exit code {self.code}, not {code}: {self.command}")
        return self.text

    def leaves_none(self):
        """Wait until no process is left that it has started."""
        for _ in ticks(f"a process is left: {self.command}"):
            if not self.left:
                return

    def kill(self):
        """End it, and all that it has started."""
        if self.code is None:  # else its number may belong to another process
            self.send(signal.SIGKILL)
        for pid in self.left:  # asked now: these numbers are still theirs
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def ticks(what="it is not done"):
    """Pauses of 20 ms. At the deadline the test fails."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        yield
        time.sleep(0.02)
    fail(f"{TIME_LIMIT} of {DEADLINE} s is over: {what}")


def fail(reason):
    """Fail the test: with the commands to paste, and what each process has said."""
    for process in STARTED:
        reason += f"\n\n---- {process.command}\n---- exit code {process.code}"
        reason += f", left: {process.left}\n{process.text[-6000:]}"
    pytest.fail(reason)


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
            preexec_fn=begin,
        )
    settings = [f"{name}={value}" for name, value in (env or {}).items()]
    return Process(process, log, shlex.join(settings + words))


def begin():
    """The first that a new process does."""
    # If this process cannot end it, the kernel does. An alarm outlives exec().
    signal.alarm(3 * DEADLINE)
    # Else they were ignored if pytest runs in the background, or under nohup.
    for number in (*ddp_train.STOP_SIGNALS, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)


def torchrun(size, *command):
    """The words of a command that starts a script in so many processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc_per_node={size}", *command]


def fork_ranks(size, function, env=None, what=""):
    """Start ranks that call function(), as forks of this process.

    So torch is not imported again, and `function` can change what it likes before it
    calls the program. size 1: it is not launched at all.
    """
    port = free_port()
    ranks = []
    for rank in range(size):
        variables = dict(env or {})
        if size > 1:
            variables |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        log = new_log()
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=be_a_rank, args=(function, variables, log))
        process.start()
        ranks.append(Process(process, log, f"{variables} {what or function}"))
    return ranks


def be_a_rank(function, variables, log):
    """What a forked process does."""
    os.setsid()
    begin()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # as it is in a real run
    # A fork makes a pool of threads of its own. If two threads do, torch aborts.
    torch.set_num_threads(1)
    variables["STARTED_BY"] = log  # the environment of what it starts
    os.environ.update({name: str(value) for name, value in variables.items()})
    apply_fault()
    log.with_suffix(".value").write_bytes(pickle.dumps(function()))


def in_ranks(size, function):
    """Call function() in so many ranks. Returns what each rank has returned."""
    ranks = fork_ranks(size, function)
    for rank in ranks:
        rank.end()
    return [rank.value for rank in ranks]


def main(*options):
    """What a rank runs: ddp_train.py with these options."""
    ddp_train.main([str(option) for option in options])


def start_training(size, *options, patch=None, fault=""):
    """Start ranks of `ddp_train.py options`. patch(): called in each rank before."""

    def rank():
        if patch is not None:
            patch()
        main(*options)

    what = shlex.join(["ddp_train.py", *map(str, options)])
    return fork_ranks(size, rank, {"FAULT": fault}, what)


def train(size, *options, code=0, patch=None, fault=""):
    """Run ddp_train.py to its end in so many ranks. Returns what each of them said."""
    ranks = start_training(size, *options, patch=patch, fault=fault)
    return [rank.end(code) for rank in ranks]


def new_log():
    handle, path = tempfile.mkstemp(suffix=".log")
    os.close(handle)
    return Path(path)


def free_port():
    """None of those from 32768 on: Linux gives them to connections of other tests.

    Until the test ends a socket keeps it from other tests: on Linux only those can
    have it that set SO_REUSEADDR before they bind it, as torch does.
    """
    for _ in ticks("no port is free"):
        port = random.SystemRandom().randrange(20000, 30000)
        keeper = socket.socket()
        with contextlib.suppress(OSError):
            keeper.bind(("", port))
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "linux":
                PORTS.append(keeper)
            return port


# ---- Disturb the program in an exact place -------------------------------------------
def boom():
    time.sleep(1 - time.time() % 1)  # torchrun's clock counts whole seconds
    raise RuntimeError("boom")


def hang():
    print(f"hangs: {os.getpid()}", flush=True)
    time.sleep(3 * DEADLINE)


ACTIONS = {"raise": boom, "hang": hang, "exit": sys.exit}


def apply_fault():
    """FAULT is "WHERE CALL ACTION RANK": before this call of WHERE, on this rank.

    WHERE is a name in ddp_train.py, such as train_step or os.replace. ACTION is the
    name of a signal, which the rank sends to itself, or one of ACTIONS. A rank that
    torchrun has started again has no fault.
    """
    where, call, action, rank = (os.environ.get("FAULT") or "- 0 - -").split()
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted or rank != os.environ.get("RANK", "0"):
        return
    module, _, name = where.rpartition(".")
    owner = getattr(ddp_train, module) if module else ddp_train
    function = getattr(owner, name)
    calls = itertools.count(1)

    def with_fault(*args, **options):
        if next(calls) == int(call):
            if action in ACTIONS:
                ACTIONS[action]()
            else:
                os.kill(os.getpid(), signal.Signals[action])
        return function(*args, **options)

    setattr(owner, name, with_fault)


# ---- Read what a run has left --------------------------------------------------------
def load(out):
    """checkpoint.pt of a run."""
    return torch.load(Path(out) / "checkpoint.pt", weights_only=True)


def metrics(out, name):
    """{step: value} of metrics.jsonl. Of a step that was repeated, the last value."""
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record[name] for record in records if name in record}


def assert_same_run(a, b):
    """The same bits, losses and evaluations."""
    found, expected = flatten(load(b)), flatten(load(a))
    for name in found | expected:
        if not name.startswith("/settings"):
            assert found.get(name) == expected.get(name), f"{name} differs"
    assert metrics(a, "loss") == metrics(b, "loss")
    assert metrics(a, "val_loss") == metrics(b, "val_loss")


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


# ---- Fixtures ------------------------------------------------------------------------
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
    os.environ["PYTHONPATH"] = str(Path(ddp_train.__file__).parent)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    torch.set_num_threads(1)  # also because forks must not meet threads


@pytest.fixture(autouse=True)
def end_what_is_left():
    """After each test: end what it has started, and what that has started."""
    yield
    for process in STARTED:
        process.kill()
    for keeper in PORTS:
        keeper.close()
    STARTED.clear()
    PORTS.clear()


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


if __name__ == "__main__":
    apply_fault()
    ddp_train.main(sys.argv[1:])
