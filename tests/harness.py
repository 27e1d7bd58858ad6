"""What all tests share: it starts ranks, breaks the program, and reads what is left.

    python tests/harness.py PATCH OPTIONS    ddp_train.py with a patch of this file

The fixtures are for all tests.
"""

import atexit
import contextlib
import importlib
import inspect
import itertools
import json
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
import traceback
from pathlib import Path

import pytest
import torch

import ddp_train
from ddp_train import StopSignal, World

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "ddp_train.py"
PATCHED = Path(__file__).resolve()  # as a script it is the program with a patch
# The promises are tested on CPUs, also where there are GPUs. test_gpu.py uses these.
GPUS = torch.cuda.device_count()
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
processes = pytest.mark.processes  # the mark of tests that start some
# A model so small that a step takes milliseconds.
TINY = "--device cpu --dim 16 --layers 1 --heads 2 --seq_len 32".split()
TINY += "--batch_size 4 --log_every 1".split()
DATA = bytes(range(256)) * 8  # 60 samples to train with, and 3 to evaluate
# What a resumed run may do wrong, in a few steps.
HARD = "--epochs 2 --dropout 0.1 --save_every 3 --eval_every 5".split()
# Seconds: no test waits longer for a process. Far above what a busy machine needs.
DEADLINE = int(os.environ.get("DEADLINE", 180))
STARTED = []  # the processes of the test that runs now


# ---- Start processes, and leave none -------------------------------------------------
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
            preexec_fn=begin,
        )
    process.returncode = 0  # Process waits for its end, not Popen
    settings = [f"{name}={value}" for name, value in (env or {}).items()]
    return Process(process.pid, log, shlex.join(settings + words))


def begin():
    """The first that a new process does."""
    # If this process cannot end it, the kernel does. An alarm outlives exec().
    signal.alarm(3 * DEADLINE)
    # Else they were ignored if pytest runs in the background, or under nohup.
    for number in (*StopSignal.NUMBERS, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)


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
        begin()
        signal.signal(signal.SIGINT, signal.default_int_handler)
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


def enter_twice():
    """What a rank runs that enters distributed() a second time."""
    for _ in range(2):
        with ddp_train.distributed("cpu"):
            print("entered", flush=True)


def new_log():
    handle, path = tempfile.mkstemp(suffix=".log")
    os.close(handle)
    return Path(path)


def free_port():
    """None of those from 32768 on: Linux gives them to connections of other tests."""
    for _ in ticks():
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def parse(*words):
    return ddp_train.parse_args([str(word) for word in words])


def refuses(*texts):
    """The block must end with sys.exit() and one line that has all these texts."""
    pattern = ".*".join(re.escape(str(text)) for text in texts)
    return pytest.raises(SystemExit, match=f"(?s)^[^\n]*{pattern}[^\n]*$")


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
    os.environ["PYTHONPATH"] = str(ROOT)
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


# ---- A checkpoint without a run ------------------------------------------------------
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


# ---- The program with a patch, as a script -------------------------------------------
def raise_in_step_3():
    before_step(3, boom, rank=1)


def kill_torchrun_in_step_3():
    before_step(3, kill_parent, rank=1)


def kill_torchrun_in_the_last_evaluation():
    at_call(ddp_train, "evaluate", 1, kill_parent, rank=1)


def kill_torchrun_in_load_data():
    load_data = ddp_train.load_data

    def kill_and_load(args):
        ddp_train.all_gather("joined")  # until then they need torchrun's store
        if os.environ["RANK"] == "1":
            kill_parent()
        ddp_train.all_gather("killed")  # rank 0 waits for it
        return load_data(args)

    ddp_train.load_data = kill_and_load


def kill_parent():
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    for _ in ticks():
        if os.getppid() != parent:
            break


def hang_in_step_3():
    """Rank 1, or a process alone, hangs."""

    def hang():
        print(f"hangs: {os.getpid()}", flush=True)
        time.sleep(3 * DEADLINE)

    before_step(3, hang, rank=int(os.environ.get("WORLD_SIZE", 1)) - 1)


def kill_once():
    """And in the end: print the threads that are left."""
    noise()
    atexit.register(print_threads)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        before_step(5, send_this(signal.SIGKILL), rank=1)


def print_threads():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print("threads:", *names)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    ddp_train.main(sys.argv[2:])
