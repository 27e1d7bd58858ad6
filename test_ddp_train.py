"""Tests of ddp_train.py: they start the real thing, break it, and look at what it leaves.

    pytest test_ddp_train.py                     what needs root, GPUs or a compiler skips elsewhere
    pytest -n 0 -s -m faults test_ddp_train.py   the long form: many kills, many damaged files

Each test that fails in the long form prints SEED=..., which repeats it.
"""

import concurrent.futures
import contextlib
import datetime
import fcntl
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ddp_train
from ddp_train import Checkpoint, World

HERE = Path(__file__).resolve().parent
SCRIPT, SINGLE, MULTI = (HERE / f for f in ("ddp_train.py", "run_single.sh", "run_multi_node.sh"))
PYTHON = sys.executable
LINUX = sys.platform == "linux"
SMALL = "--dim 16 --layers 1 --heads 2 --seq-len 32 --batch-size 4 --warmup-steps 3 --log-every 1"
ON_GPU = SMALL.split()
TINY = ["--device", "cpu", *ON_GPU]
LONG = "--epochs 6 --dropout 0.1 --save-every 7 --eval-every 11 --lr 1e-3".split()
PATIENCE = 300  # seconds: no test depends on it, but one that fails ends
GPUS = torch.cuda.device_count()
CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


# ---- Start processes, and leave none ----
def started(pid):
    """When a process was started: this and its number are not used twice."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]


MARK = f"{os.getpid()}.{started(os.getpid())}"  # in the environment of all that is started here


def sweep(is_left):
    """Kill what carries a mark that is_left, remove its namespaces. Returns what was found."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            mark = re.search(rb"(?:^|\0)DDP_TEST=([\d.]+)\0", environ.read_bytes())
            if mark and is_left(mark[1].decode()):
                found.append((environ.with_name("cmdline").read_text(), int(environ.parts[2])))
                os.kill(found[-1][1], signal.SIGKILL)
    for name in os.listdir("/run/netns") if os.path.isdir("/run/netns") else ():
        if (mark := re.match(r"ddp-([\d.]+)-.$", name)) and is_left(mark[1]):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return found


def die_with_parent():
    if LINUX:
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)


@pytest.fixture(scope="session", autouse=True)
def session(tmp_path_factory):
    """Remove what a suite that was killed left, and at the end whatever is left of this one."""
    sweep(lambda mark: started(mark.split(".")[0]) != mark.split(".")[1])
    if "PYTEST_XDIST_WORKER" in os.environ:
        die_with_parent()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    tempfile.tempdir = str(tmp_path_factory.mktemp("t"))
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    os.environ |= {"TMPDIR": tempfile.tempdir, "DDP_TEST": MARK, "PYTHONPATH": path}
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    torch.set_num_threads(1)
    yield
    left = [command for command, _ in sweep(MARK.__eq__) if "multiprocessing" not in command]
    assert not left, left


FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch._dynamo", "test_ddp_train"])


def forked(fifo, command, env):
    die_with_parent()  # the fork server, which ends when the last that holds this file has ended:
    os.close(forkserver._forkserver._forkserver_alive_fd)
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    end = os.open(fifo, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(end, fd)
    os.close(end)
    sys.stdin = open(os.devnull)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    sys.argv = command[1:]
    ddp_train.SCRIPT = Path(command[1]).name
    runpy.run_path(command[1], run_name="__main__")


class Forked:
    """`python script ...` with the face of Popen, forked from a process that has imported torch.

    That saves two seconds of a core. What only a launcher or the interpreter's exit can show is
    tested with those.
    """

    def __init__(self, command, env):
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(fifo := f"{folder}/output")
            self.process = FORK.Process(target=forked, args=(fifo, command, env))
            self.process.start()
            self.pid, self.stdout = self.process.pid, open(fifo)

    returncode = property(lambda self: self.process.exitcode)

    def wait(self, timeout=None):
        self.process.join(timeout)

    def communicate(self, timeout=None):
        output = []
        reader = threading.Thread(target=lambda: output.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired("forked", timeout)
        self.wait()
        return output[0], None


@contextlib.contextmanager
def start(*command, env=None, prefix=(), real=False, **kwargs):
    """A process in a session of its own, of which nothing is left afterwards."""
    full = {**os.environ, **(env or {})}
    command = [str(c) for c in (*prefix, *command)]
    if LINUX and command[0] == PYTHON and command[1][0] == "/" and not (real or kwargs):
        p = Forked(command, full)
    else:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        kwargs |= {"stdin": subprocess.DEVNULL, "preexec_fn": die_with_parent}
        p = subprocess.Popen(command, env=full, start_new_session=True, **pipes, **kwargs)
    with contextlib.suppress(OSError):  # F_SETPIPE_SZ: what nobody reads blocks soon, so that a
        fcntl.fcntl(p.stdout, 1031, 4096)  # run cannot end before it is told to
    try:
        yield p
    finally:
        kill(p)
        p.wait()
        p.stdout.close()


def kill(p):
    pids = [*tree(p.pid), p.pid]  # noted first: what has no parent any more is not found
    with contextlib.suppress(ProcessLookupError):
        os.killpg(p.pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def finish(p):
    """The rest of its output, when it has ended."""
    try:
        return p.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        kill(p)
        raise AssertionError(f"still running:\n{p.communicate(timeout=10)[0]}") from None


def run(*command, code=0, **kwargs):
    with start(*command, **kwargs) as p:
        printed = finish(p)
    assert code is None or p.returncode == code, f"exit code {p.returncode}\n{printed}"
    return printed


@contextlib.contextmanager
def by_hand(world, *command, **env):
    """`world` processes with the environment that torchrun would make; one without any if it is 1.
    What is callable in command and environment is called with the rank."""
    if world > 1:
        home = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env = {"RANK": str, "WORLD_SIZE": str(world), "LOCAL_RANK": "0", **home, **env}
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(world):
            mine = lambda value: value(rank) if callable(value) else value
            env_of_rank = {k: mine(v) for k, v in env.items()}
            p = start(PYTHON, *map(mine, command), env=env_of_rank)
            processes.append(stack.enter_context(p))
        yield processes


def finish_all(processes, code=0):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        outs = list(pool.map(finish, processes))
    assert {p.returncode for p in processes} == {code}, outs
    return outs


def ranks(world, *command, code=0, **env):
    """Run them; each exits with `code`. Returns what each printed."""
    with by_hand(world, *command, **env) as processes:
        return finish_all(processes, code)


def torchrun(nproc, *more):
    launcher = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [*launcher, *more]


def read_until(p, pattern):
    """Read lines of output up to one that matches; returns them all."""
    lines = []
    for line in p.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return "".join(lines)
    raise AssertionError(f"no {pattern!r} in:\n{''.join(lines)}")


def signalled(p, pids, signum, line):
    """Read up to a line, signal processes, read the rest. Returns the whole output."""
    before = read_until(p, line)
    for pid in pids(p):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    return before + finish(p)


def children(pid):
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(c) for t in tasks for c in (t / "children").read_text().split()]
    return []


def tree(pid):
    return [d for c in children(pid) for d in (c, *tree(c))]


def pids_of_ranks(launcher):
    """Those of the training processes below torchrun, in order of rank."""
    is_rank = lambda pid: "ddp_train" in Path(f"/proc/{pid}/cmdline").read_text()
    return sorted(filter(is_rank, children(launcher)))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- What a run leaves ----
def metrics(out, name="step"):
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    return [m for m in map(json.loads, lines) if name in m]


def losses(out):
    return {m["step"]: m["loss"] for m in metrics(out, "loss")}


def load(out, name="checkpoint.pt"):
    return torch.load(Path(out) / name, weights_only=True)


def flat(value):
    """All tensors and numbers of a nested state, for comparing bit by bit."""
    if isinstance(value, dict):
        items = [(k, child) for k, child in value.items() if k != "args"]
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {"": value}
    return {f"{k}.{name}": v for k, child in items for name, v in flat(child).items()}


def assert_same(a, b):
    a, b = flat(a), flat(b)
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert torch.equal(x, b[name]) if isinstance(x, torch.Tensor) else x == b[name], name


def assert_same_run(a, b):
    """Two runs ended with bit-identical weights, optimizer and logged numbers."""
    assert_same(load(a), load(b))
    keep = lambda out: [{k: v for k, v in m.items() if k != "bytes/s"} for m in metrics(out)]
    assert keep(a) == keep(b)


# ---- What most tests are given ----
@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """shared(name, make): a folder that make(folder) fills once for all processes of the suite."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name, make):
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (base / name).exists():
                make(base / f"{name}.new")
                os.rename(base / f"{name}.new", base / name)
        return base / name

    return get


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """8,430 bytes with something to learn: 250 training windows of 32 and 13 held out, which 2, 3
    and 4 processes cannot share evenly."""
    path = tmp_path_factory.mktemp("data") / "data.txt"
    path.write_bytes((b"the quick brown fox jumps over the lazy dog, %d times; " * 200)[:8430])
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def tiny(data, out):
    """A small model on the CPU, a step of 4 samples, 63 steps an epoch with one process."""
    return [*TINY, "--data", data, "--out", out]


@pytest.fixture
def main(monkeypatch, capfd):
    """ddp_train.main in this process: (exit code, what it printed)."""
    old = {s: signal.getsignal(s) for s in ddp_train.SIGNALS}

    def call(*args):
        try:
            code = ddp_train.main([str(a) for a in args])
        except SystemExit as e:
            code = e.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        captured = capfd.readouterr()
        return code or 0, captured.out + captured.err

    yield call
    for s, handler in old.items():
        signal.signal(s, handler)


@pytest.fixture
def losing(monkeypatch):
    """losing(f): the loss of the n-th forward pass of the training becomes f(n, loss, output)."""

    def patch(f):
        calls, original = itertools.count(1), ddp_train.loss_fn
        changed = lambda o, y: f(next(calls), original(o, y), o)
        either = lambda o, y: changed(o, y) if o.requires_grad else original(o, y)
        monkeypatch.setattr(ddp_train, "loss_fn", either)

    return patch


# ---- Workers: this file as a script, one rank of several ----
def worker(out, *argv):
    """Train, watched from inside: what rank r saw is in out/seen.r."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    seen = {"grads": {}, "buckets": [], "at_step": [], "indices": [], "eval": {}, "draws": []}
    seen |= {"forks": [], "limits": [], "weights": []}
    os.register_at_fork(after_in_parent=lambda: seen["forks"].append(1))
    args = ddp_train.parse_args(argv)
    world = ddp_train.init_distributed(args.device, timeout=args.timeout)
    build, ddp_class = ddp_train.build_model, ddp_train.DistributedDataParallel
    fetch, models = ddp_train.TensorDataset.__getitem__, []

    def fetched(self, index):
        if len(self) == 250:
            seen["indices"].append(index)
        return fetch(self, index)

    def note_weights():
        vector = nn.utils.parameters_to_vector(models[0].parameters())
        seen["weights"].append(vector.detach().clone())

    def watched_model(args):
        models.append(build(args))
        note_weights()
        models[0].register_forward_pre_hook(watch_draws)
        return models[0]

    def watch_draws(module, _):
        if module.training:  # the next random numbers, of which dropout takes some
            seen["draws"].append(zlib.crc32(torch.get_rng_state().numpy()))

    def watched_ddp(*args, **kwargs):
        ddp = ddp_class(*args, **kwargs)
        ddp.register_comm_hook(None, hook)
        return ddp

    def hook(state, bucket):
        seen["buckets"].append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    def watch_step(optimizer, *_):
        seen["at_step"].append(len(seen["buckets"]))
        if (step := len(seen["at_step"])) in (1, 32):
            seen["grads"][step] = torch.cat([p.grad.flatten() for p in models[0].parameters()])

    def note_limit():
        if dist.is_initialized():
            options = dist.group.WORLD._get_backend(CPU).options
            seen["limits"].append(options._timeout.total_seconds())

    def threads():
        names = []
        for name in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has just ended
                names.append(name.read_text())
        return sum("runloop" in name for name in names)

    ddp_train.build_model, ddp_train.TensorDataset.__getitem__ = watched_model, fetched
    ddp_train.DistributedDataParallel = watched_ddp
    register_optimizer_step_pre_hook(watch_step)
    score = lambda m, x, y: len(x) * torch.stack([ddp_train.loss_fn(m(x), y), torch.ones(())])
    with ddp_train.process_group(world):
        torch.manual_seed(1)
        model = ddp_train.ByteTransformer(1, 1, 16, 8, dropout=0.5)
        for n in (1, 2, 7, 101):
            some = torch.arange(n * 8 + 1).mul(37).to(torch.uint8).unfold(0, 9, 8)
            dataset = ddp_train.TensorDataset(some[:, :-1], some[:, 1:])
            loader = ddp_train.make_loader(dataset, 3, world)
            seen["eval"][n] = ddp_train.evaluate(model, loader, CPU, score).tolist()
            assert model.training
        note_limit()
        ddp_train.train(args, world, ddp_train.StopSignal())
        note_limit()
        note_weights()
        models.clear()
        seen["threads"] = [threads()]
        time.sleep(2 * (world.rank == 1))
        seen["ready"] = time.time()
    seen["left"] = time.time()
    seen["threads"].append(threads())
    torch.save(seen, Path(out, f"seen.{world.rank}"))


def normed_model(args):
    """Batch norm over the 32 positions."""
    model = nn.Sequential(nn.Embedding(256, 256), nn.BatchNorm1d(32))
    model.register_forward_pre_hook(lambda _, x: (x[0].long(),))
    return model


def faulty(kind, rank, *argv):
    """ddp_train with another model, a small disk, or a rank with something in its fourth step."""
    calls, original = itertools.count(), ddp_train.loss_fn  # call 0 is before the first step
    if kind == "bn":
        ddp_train.build_model = normed_model
    if kind == "raise":  # as a loading process that was forked before an error came
        pause = lambda: die_with_parent() or os.closerange(0, 3) or time.sleep(PATIENCE)
        multiprocessing.get_context("fork").Process(target=pause, daemon=True).start()
    if kind.startswith("disk"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(kind[4:]), int(kind[4:])))

    def loss_fn(output, y):
        loss = original(output, y)
        if os.environ.get("RANK") == rank and output.requires_grad and next(calls) == 4:
            if kind == "hang":
                time.sleep(10**6)
            if kind == "raise":
                raise ValueError("boom")
            if kind == "nan":
                return loss * math.nan
        return loss

    def without_waiting(output, y):  # in steps 3 to 17 of 20, none of which logs
        torch.cuda.set_sync_debug_mode("error" if 3 <= next(calls) <= 17 else "default")
        return original(output, y)

    ddp_train.loss_fn = without_waiting if kind == "sync" else loss_fn
    ddp_train.main(argv)


def counted(*argv):
    """Train, and write down when which place of which epoch was trained, by how many ranks."""
    fetch, set_epoch = ddp_train.TensorDataset.__getitem__, ddp_train.ResumableSampler.set_epoch
    rank, world, at = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
    file = open(f"{os.environ['SEEN']}/{time.time_ns()}.{rank}", "w", buffering=1)

    def fetched(self, index):
        if at and len(self) == 250:  # not the held-out set, and not before the first step
            print(time.time_ns(), world, *at, index, file=file)
            at[1] += world
        return fetch(self, index)

    def told(self, epoch, start):
        at[:] = epoch, start + rank
        set_epoch(self, epoch, start)

    ddp_train.TensorDataset.__getitem__, ddp_train.ResumableSampler.set_epoch = fetched, told
    ddp_train.main(argv)


def resuming(folder):
    """Resume 200 MB, and write down how many bytes of memory of its own this process had more."""
    part = nn.ParameterDict({"weight": torch.full((50_000_000,), float(os.environ["RANK"]))})
    own = lambda: int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    most, done = [], threading.Event()
    watcher = threading.Thread(target=lambda: [most.append(own()) for _ in iter(watching, True)])
    watching = lambda: done.wait(0.002)
    with ddp_train.process_group(ddp_train.init_distributed("cpu")):
        checkpoint = Checkpoint(folder, {"part": part})
        dist.barrier()
        before = own()
        watcher.start()
        state = checkpoint.resume()
        most.append(own())
        done.set()
        watcher.join()
        assert state["step"] == 9 and part["weight"].eq(7).all()
    Path(folder, f"most.{os.environ['RANK']}").write_text(f"{1024 * (max(most) - before)}")


def run_worker(world, out, *args, launcher=()):
    out.mkdir(parents=True, exist_ok=True)
    command = __file__, "worker", out, "--out", out, *TINY, *args
    printed = run(*launcher, *command) if launcher else "".join(ranks(world, *command))
    assert not re.search("Traceback|terminate called|Warning", printed.replace("OMP", "")), printed
    return seen_by(world, out)


def seen_by(world, out):
    return [torch.load(out / f"seen.{r}", weights_only=True) for r in range(world)]


# ---- The same numbers at any world size ----
SAME = {
    "1x8": (1, "--batch-size 8"),
    "2x4": (2, "--batch-size 4"),
    "4x2": (4, "--batch-size 2"),
    "1x2x4": (1, "--batch-size 2 --accum 4"),
    "3x1x2": (3, "--batch-size 1 --accum 2"),
}
LIKE_1x8 = "2x4", "4x2", "1x2x4"


@pytest.fixture(scope="session")
def same(data, shared):
    """The same training at several world sizes, watched from inside, and its folders."""

    def make(base):
        for name, (world, args) in SAME.items():
            more = "--max-steps 60 --no-scale-lr" if name != "3x1x2" else "--dropout 0.1"
            more = [*args.split(), *more.split(), "--epochs", 2, "--timeout", 77, "--data", data]
            run_worker(world, base / name, *more, launcher=torchrun(2) if name == "2x4" else ())

    base = shared("same", make)
    return {name: seen_by(world, base / name) for name, (world, _) in SAME.items()}, base


def test_same_training_at_any_world_size(same):
    """Step 32, the last of an epoch, has 2 samples for up to 4 processes."""
    seen, base = same
    reference, want = seen["1x8"][0], losses(base / "1x8")
    assert len(want) == 60 and want[60] < want[1]
    for name in LIKE_1x8:
        for rank in seen[name]:
            for step, limit in ((1, 1e-5), (32, 1e-3)):
                grads, expected = rank["grads"][step], reference["grads"][step]
                assert (grads - expected).norm() <= limit * expected.norm(), (name, step)
        assert losses(base / name) == pytest.approx(want, rel=1e-4), name
        norms = [[m["grad_norm"] for m in metrics(base / n, "loss")] for n in (name, "1x8")]
        assert norms[0] == pytest.approx(norms[1], rel=1e-2), name


def test_gradient_of_the_last_step_is_a_mean_over_its_samples(main, tiny, monkeypatch):
    """The last step of an epoch has 2 samples for 4: torch's own gradient of their mean loss."""
    samples, steps, fetch = [], [], ddp_train.TensorDataset.__getitem__
    fetched = lambda self, index: samples.append(fetch(self, index)) or samples[-1]
    monkeypatch.setattr(ddp_train.TensorDataset, "__getitem__", fetched)

    def note(optimizer, *_):
        params = optimizer.param_groups[0]["params"]
        steps.append([(p.detach().clone(), p.grad.clone()) for p in params])

    handle = register_optimizer_step_pre_hook(note)
    try:
        assert main(*tiny, "--grad-clip", 0)[0] == 0
    finally:
        handle.remove()
    assert len(steps) == 63 and len(samples) == 250 + 13
    model = ddp_train.build_model(ddp_train.parse_args([str(a) for a in tiny]))
    with torch.no_grad():
        for p, (weight, _) in zip(model.parameters(), steps[62]):
            p.copy_(weight)
    x, y = map(torch.stack, zip(*samples[248:250]))
    ddp_train.loss_fn(model(x), y).backward()
    for p, (_, grad) in zip(model.parameters(), steps[62]):
        assert torch.allclose(p.grad, grad, rtol=1e-4, atol=1e-6)


def test_same_evaluation_at_any_world_size(same):
    """Each of 1, 2, 7 and 101 samples once, without dropout; the same number for the log."""
    seen, base = same
    for n, expected in seen["1x8"][0]["eval"].items():
        for rank in itertools.chain(*seen.values()):
            assert rank["eval"][n] == pytest.approx(expected, rel=1e-6) and expected[1] == n
    held_out = {n: [m["val_loss"] for m in metrics(base / n, "val_loss")] for n in seen}
    assert len(held_out["1x8"]) == 2
    assert all(held_out[n] == pytest.approx(held_out["1x8"], rel=1e-4) for n in LIKE_1x8)


def test_each_sample_once_per_epoch_in_training(same):
    """250 windows on 3 processes: each once, but for the repeats that fill the last round; another
    order in epoch two."""
    seen, base = same
    per_rank = [rank["indices"][1:] for rank in seen["3x1x2"]]  # [0] is before step 1
    rows, round_up = list(itertools.chain(*zip(*per_rank, strict=True))), 252
    first, second = rows[:250], rows[round_up : round_up + 250]
    assert len(rows) == 2 * round_up and sorted(first) == sorted(second) == list(range(250))
    assert first != second
    state = load(base / "3x1x2")
    assert (state["epoch"], state["samples"], state["step"]) == (2, 0, 2 * -(-250 // 6))


def test_one_all_reduce_per_optimizer_step(same):
    """With accumulation over 2 micro-batches the hook is called for each bucket once a step."""
    for name in ("2x4", "3x1x2"):
        for rank in same[0][name]:
            counts = rank["at_step"]
            per_step = {b - a for a, b in zip(counts, counts[1:])}
            assert per_step == {len(set(rank["buckets"]))}, name


def test_random_numbers(same):
    """The same weights on all ranks, before and after; another dropout on each and at each step."""
    seen = same[0]["3x1x2"]
    for rank in seen[1:]:
        assert all(map(torch.equal, rank["weights"], seen[0]["weights"]))
    draws = [draw for rank in seen for draw in rank["draws"]]
    assert len(draws) == len(set(draws)) == 3 * 2 * 84


def test_groups_end_cleanly(same):
    """Rank 1 reached its end later than the others, and they waited for it. No thread of gloo is
    left: one that is ends the interpreter with an abort, now and then. --timeout holds after the
    first step: until then ranks join and compile, which may take longer."""
    for name in ("2x4", "4x2", "3x1x2"):
        seen = same[0][name]
        assert min(rank["left"] for rank in seen) >= max(rank["ready"] for rank in seen)
        assert all(rank["threads"][0] and not rank["threads"][1] for rank in seen)
        assert all(rank["limits"] == [ddp_train.START_LIMIT, 77] for rank in seen)


def test_saved_names_and_learning_rate(same):
    """The names are those of the bare model. The rate is that of 1x8 with --no-scale-lr, and three
    times as much with three processes."""
    names = ddp_train.ByteTransformer(1, 2, 16, 32).state_dict().keys()
    for name in SAME:
        times = 3 if name == "3x1x2" else 1
        assert metrics(same[1] / name)[0]["lr"] == pytest.approx(times * 2e-3 / 3)
        assert load(same[1] / name)["model"].keys() == names


def test_workers_are_forked_once(data, out):
    """A fork beside gloo's threads is a risk: one for each loader, not one for each epoch."""
    args = "--data", data, "--epochs", 3, "--eval-every", 5, "--workers", 1
    assert [len(rank["forks"]) for rank in run_worker(2, out, *args)] == [2, 2]
    assert load(out)["epoch"] == 3


def test_resume_at_another_world_size(data, out):
    """4, then 2, then 1 process, each stopped in the middle of the epoch: every sample once."""
    seen = []
    for world, batch, stop in ((4, 3, 5), (2, 5, 12), (1, 7, 99)):
        more = "--data", data, "--batch-size", batch, "--max-steps", stop
        batches = [rank["indices"][world > 1 :] for rank in run_worker(world, out, *more)]
        seen += itertools.chain(*batches)
    assert sorted(seen) == list(range(250))


def test_sampler():
    """In the order of torch's own, from anywhere in it."""
    n, torchs = 23, torch.utils.data.DistributedSampler

    def order(world, rank, epoch=0, at=0, seed=0, kind=ddp_train.ResumableSampler):
        s = kind(range(n), world, rank, seed=seed)
        s.set_epoch(epoch, at) if kind is not torchs else s.set_epoch(epoch)
        assert len(list(s)) == len(s)
        return list(s)

    whole = order(1, 0)
    assert sorted(whole) == list(range(n))
    assert len({tuple(o) for o in (whole, order(1, 0, epoch=1), order(1, 0, seed=7))}) == 3
    for world in (1, 2, 3, 5):
        for rank, epoch, seed in itertools.product(range(world), (0, 1), (0, 7)):
            expected = order(world, rank, epoch, seed=seed, kind=torchs)
            assert order(world, rank, epoch, seed=seed) == expected
        for at in (0, 4, 9, 22):
            merged = itertools.chain(*zip(*(order(world, r, at=at) for r in range(world))))
            assert list(merged)[: n - at] == whole[at:]


def test_real_batches_of_torchs_sampler():
    """Of 7 samples on 3 ranks each counts once, and on all ranks there are equally many batches."""
    dataset, seen = torch.utils.data.TensorDataset(torch.arange(7), torch.arange(7) + 10), []
    for rank in range(3):
        sampler = torch.utils.data.DistributedSampler(dataset, 3, rank)
        loader = torch.utils.data.DataLoader(dataset, 2, sampler=sampler)
        batches = list(ddp_train.real_batches(loader, CPU))
        assert [total for *_, total in batches] == [6, 1]
        assert all(len(x) == max(1, rows) and torch.equal(x + 10, y) for x, y, rows, _ in batches)
        seen += [i for x, _, rows, _ in batches for i in x[:rows].tolist()]
    assert sorted(seen) == list(range(7))


def test_loading_processes_of_each_rank_draw_numbers_of_their_own():
    class Noise(torch.utils.data.Dataset):
        __len__ = lambda self: 8
        __getitem__ = lambda self, i: torch.rand(())

    loaders = [
        ddp_train.make_loader(Noise(), 4, World(CPU, rank=r, size=2), workers=1) for r in (0, 1)
    ]
    assert not torch.equal(*(next(iter(loader)) for loader in loaders))


def test_evaluation_with_batch_norm_is_that_of_the_saved_model(tiny, out):
    """Rank 0's running means count: what two ranks log is what a plain program computes."""
    options = *tiny, "--max-steps", 40, "--lr", 0.1
    ranks(2, __file__, "faulty", "bn", "0", *options)
    args = ddp_train.parse_args([str(a) for a in tiny])
    held_out, model = ddp_train.load_data(args)[1], normed_model(args)
    model.load_state_dict(load(out)["model"])
    x, y = held_out[:]
    with torch.no_grad():
        expected = ddp_train.loss_fn(model.eval()(x), y).item()
    assert metrics(out, "val_loss")[-1]["val_loss"] == pytest.approx(expected, rel=1e-6)


class Keeps(nn.Linear):
    def forward(self, x):
        self.kept = getattr(self, "kept", None) or [torch.ones(3)]
        return super().forward(x) * self.kept[0]


def test_evaluation_of_a_module_that_keeps_tensors():
    """What it kept is used in training: inference_mode would have spoiled it."""
    model, dataset = Keeps(2, 3), torch.utils.data.TensorDataset(torch.ones(5, 2))
    loader = ddp_train.make_loader(dataset, 2, World(CPU))
    total = ddp_train.evaluate(model, loader, CPU, lambda m, x: m(x).sum())
    assert total == pytest.approx(5 * model(torch.ones(2)).sum().item())
    model(torch.ones(1, 2)).sum().backward()


def test_model_is_causal():
    """What comes after byte t changes nothing that is said at t, in training and evaluation."""
    torch.backends.mha.set_fastpath_enabled(False)
    model, x = ddp_train.ByteTransformer(2, 2, 16, 12), torch.randint(256, (3, 12))
    for net in (model.train(), model.eval()):
        whole = net(x)
        for t in (1, 5, 11):
            other = torch.cat([x[:, :t], 255 - x[:, t:]], 1)
            assert torch.allclose(net(other)[:, :t], whole[:, :t], atol=1e-6)
            assert not torch.allclose(net(other)[:, t], whole[:, t], atol=1e-4)


def test_held_out_bytes_are_not_trained(tmp_path):
    """The last 5 % of a file, or of the files of a folder in their order."""
    (tmp_path / "folder/sub").mkdir(parents=True)
    (tmp_path / "folder/b").write_bytes(b"\1" * 421)
    (tmp_path / "folder/a").write_bytes(b"\0" * (8430 - 421))
    (tmp_path / "file").write_bytes(b"\0" * (8430 - 421) + b"\1" * 421)
    for where in ("file", "folder"):
        args = ddp_train.parse_args(["--data", str(tmp_path / where), "--seq-len", "32"])
        train, held_out, _ = ddp_train.load_data(args)
        assert (len(train), len(held_out)) == (250, 13)
        assert all(part.max() == 0 for part in train[:])
        assert all(part.min() == 1 for part in held_out[:])


@pytest.mark.skipif(not LINUX, reason="reads /proc/self/smaps")
def test_data_are_mapped_not_copied(tmp_path):
    """After a read of all samples the process has no page of the file for itself: however many
    ranks, the machine has them once."""
    (tmp_path / "data").write_bytes(os.urandom(1 << 24))
    args = ddp_train.parse_args(["--data", str(tmp_path / "data"), "--seq-len", "127"])
    train = ddp_train.load_data(args)[0]
    assert sum(int(train[i][0][0]) for i in range(0, len(train), 32)) > 0
    smaps = Path("/proc/self/smaps").read_text()
    entry = smaps.split(str(tmp_path / "data"))[1].split("VmFlags")[0]
    size = {k: int(v) for k, v in re.findall(r"(\w+): +(\d+) kB", entry)}
    assert size["Rss"] > 15_000 and size["Anonymous"] == 0, size


# ---- Every way to start it ----
def test_started_by_hand_only_rank_0_speaks_and_saves(tiny, tmp_path):
    """Each with a folder of its own, as on machines without a shared disk."""
    folder = lambda r: tmp_path / f"{r}"
    outs = ranks(3, SCRIPT, *tiny, "--out", folder, "--max-steps", 3)
    assert "3 process(es) on 1 node(s)" in outs[0] and "done: step 3" in outs[0]
    assert outs[1] == outs[2] == ""
    left = {p.name for r in (1, 2) for p in folder(r).iterdir()}
    assert left == set() and (folder(0) / "checkpoint.pt").exists()
    # A local rank of one's choice; where the ranks meet, said on the command line.
    for steps, url in (4, f"tcp://127.0.0.1:{free_port()}"), (5, f"file://{tmp_path}/meet"):
        more = "--out", folder(0), "--max-steps", steps, "--init-method", url
        outs = ranks(2, SCRIPT, *tiny, *more, LOCAL_RANK="1", MASTER_ADDR="", MASTER_PORT="")
        assert f"going on from step {steps - 1}" in outs[0] and outs[1] == ""


def test_restarted_ranks_find_each_other():
    """torchrun's store keeps what the ranks before a restart left in it. Rank 1, back first, must
    not take that for an answer."""
    limit = datetime.timedelta(seconds=PATIENCE)
    real, names = dist.HashStore(), []
    for _ in range(3):
        store, misled = mock.Mock(wraps=real), threading.Event()
        store.multi_get = lambda keys: misled.set() or real.multi_get(keys)
        store.wait = lambda keys, limit: real.wait(keys)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            one = pool.submit(ddp_train.fresh_prefix, store, 1, 2, limit)
            if names:  # it has read what the rank 0 of the last round wrote
                assert misled.wait(PATIENCE)
            zero = pool.submit(ddp_train.fresh_prefix, store, 0, 2, limit)
            assert one.result() == zero.result()
            names.append(one.result())
    assert len(set(names)) == 3
    with pytest.raises(RuntimeError, match="not all ranks came"):
        ddp_train.fresh_prefix(store, 0, 2, datetime.timedelta(seconds=0.2))


@pytest.mark.parametrize("more", [[], pytest.param(["--use_env"], marks=pytest.mark.faults)])
def test_old_launcher(tiny, more):
    launcher = "-m", "torch.distributed.launch", "--nproc_per_node=2", "--nnodes=1"
    home = "--node_rank=0", "--master_addr=localhost", f"--master_port={free_port()}"
    printed = run(PYTHON, *launcher, *home, *more, SCRIPT, *tiny, "--max_steps", 2)
    assert "2 process(es) on 1 node(s)" in printed and printed.count("done") == 1


def test_spawn(tiny, out):
    """A signal to the process that was started is one to the ranks."""
    with start(PYTHON, SCRIPT, *tiny, *LONG, "--spawn", 2) as p:
        printed = signalled(p, lambda p: [p.pid], signal.SIGTERM, "step 5/")
    assert p.returncode and printed.count("stopped by signal 15") == 1
    assert "2 process(es) on 1 node(s)" in printed and load(out)["step"] >= 5


def test_two_nodes_on_loopback(tiny, tmp_path):
    """Two agents, each with a folder of its own: node 1's local rank 0 leaves it alone."""
    port = free_port()

    def agent(r):
        home = f"--node_rank={r}", "--master_addr=127.0.0.1", f"--master_port={port}"
        launcher = PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"
        return start(*launcher, *home, SCRIPT, *tiny, "--out", tmp_path / f"{r}", "--max-steps", 3)

    with agent(0) as first, agent(1) as second:
        outs = finish_all([first, second])
    assert "2 process(es)" in outs[0] and "done" in outs[0] and "done" not in outs[1]
    assert (tmp_path / "0/checkpoint.pt").exists() and not list(tmp_path.glob("1/*"))


def test_run_single(tiny, tmp_path):
    """Each of two processes gets half of the cores."""
    cores = len(os.sched_getaffinity(0)) if LINUX else os.cpu_count()
    env = {"PYTHON": PYTHON, "NPROC": "2", "NPROC_PER_NODE": "7"}
    args = *tiny, "--out", tmp_path / "a b", "--epochs", 5
    with start("env", "-u", "OMP_NUM_THREADS", SINGLE, *args, env=env) as p:
        printed = read_until(p, "step 2/")
        for pid in pids_of_ranks(p.pid) if LINUX else ():
            environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
            assert f"OMP_NUM_THREADS={max(1, cores // 2)}" in environ
        printed += finish(p)
    assert p.returncode == 0 and "2 process(es) on 1 node(s)" in printed and "done" in printed
    assert load(tmp_path / "a b")["epoch"] == 5
    assert "NPROC=x" in run(SINGLE, code=2, env={"NPROC": "x"})


def test_run_multi_node():
    """What it refuses, and what it tells torchrun, gloo and NCCL."""
    home = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    home |= {"PYTHON": PYTHON, "NNODES": "2"}
    for env, says in (
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, "does not resolve"),
        ({"NNODES": "two"}, "NNODES=two"),
        ({"NODE_RANK": "1"}, "must be NODE_RANK=0"),
        ({"NODE_RANK": "0", "NNODES": "1:2"}, "NODE_RANK"),
    ):
        assert says in run(MULTI, code=2, env=home | env)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = home | {"MASTER_PORT": port}
        assert f"port {port} is taken" in run(MULTI, code=2, env=env)
    dry = lambda *args, **env: run(MULTI, *args, env=home | {"DRY_RUN": "1"} | env)
    told = dry("--epochs", 3, MASTER_ADDR="localhost", GLOO_SOCKET_IFNAME="mine")
    assert all(word in told for word in ("GLOO_SOCKET_IFNAME=mine", "is_host=true", "--epochs 3"))
    told = dry("--out", "a:b", "c d", NPROC_PER_NODE="1")
    assert "--timeout" not in told and "--out a:b c\\ d" in told
    assert re.search("GLOO_SOCKET_IFNAME==?lo", told) and "--nproc-per-node=1" in told
    assert re.search("NCCL_SOCKET_IFNAME==?lo", told) and "--local-addr=127.0.0.1" in told
    assert "--timeout 20" in dry(NNODES="1:2")
    assert "--timeout 20" not in dry("--timeout", 9, NNODES="1:2")


def test_import_has_no_side_effect(tmp_path):
    code = """
import signal, sys
before = signal.getsignal(signal.SIGTERM)
import ddp_train, torch
assert signal.getsignal(signal.SIGTERM) is before and not torch.distributed.is_initialized()
assert not {"tensorboard", "torch._dynamo"} & set(sys.modules)
"""
    assert run(PYTHON, "-c", code, cwd=tmp_path) == "" and list(tmp_path.iterdir()) == []


# ---- One process: options, output, bad input ----
def test_help_and_underscores(main):
    code, text = main("--help")
    options = vars(ddp_train.parse_args([])).keys() - {"local_rank", "scale_lr"}
    assert code == 0 and text.count("default") > 20
    assert all(f"--{option.replace('_', '-')}" in text for option in (*options, "no_scale_lr"))
    given = ["--batch_size", "8", "--max_steps=5", "--data", "a_b", "--local_rank=1"]
    args = ddp_train.parse_args(given)
    assert (args.batch_size, args.max_steps, args.data, args.local_rank) == (8, 5, "a_b", 1)


def test_output_finish_and_extend(main, tiny, out):
    common = [*tiny, "--seed", 2**31 - 1]
    code, text = main(*common, "--max-steps", 4, "--eval-every", 2)
    assert code == 0 and "done: step 4" in text and "checkpoint.pt" in text and "step 3/4" in text
    assert [m["step"] for m in metrics(out, "loss")] == [1, 2, 3, 4]
    assert [m["step"] for m in metrics(out, "val_loss")] == [2, 4]
    keys = {"step", "loss", "lr", "grad_norm", "bytes/s"}
    assert all(m.keys() == keys for m in metrics(out, "loss"))
    last = metrics(out)[-1]
    assert last["bits_per_byte"] == pytest.approx(last["val_loss"] / math.log(2))
    state, before = load(out), (out / "checkpoint.pt").read_bytes()
    assert state["step"] == 4 and state["samples"] == 16 and state["epoch"] == 0
    for _ in range(2):  # nothing is left to do: the same lines again
        code, text = main(*common, "--max-steps", 4)
        assert code == 0 and "done" in text and "--epochs" in text
        assert [m["step"] for m in metrics(out, "val_loss")] == [2, 4]
        assert (out / "checkpoint.pt").read_bytes() == before
    with open(out / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, damaged}\n{"step": 5, "loss": 1.0, "lr"')
    code, text = main(*common, "--max-steps", 6)
    assert code == 0 and "going on from step 4" in text and load(out)["step"] == 6
    assert [m["step"] for m in metrics(out)] == [1, 2, 2, 3, 4, 5, 6, 6]
    code, text = main(*common, "--epochs", 1, "--save-every", 63)
    state = load(out)
    assert (state["step"], state["epoch"], state["samples"]) == (63, 1, 0)


def test_logged_loss_is_the_mean_of_all_elements_since_the_last_line(main, tiny, tmp_path):
    """The last step of the epoch has 2 samples, the others 4."""
    main(*tiny, "--out", tmp_path / "a")
    rare = "--log-every", 1000, "--save-every", 7, "--eval-every", 11
    main(*tiny, "--out", tmp_path / "b", *rare)
    each, last = losses(tmp_path / "a"), 0
    rows = {step: min(4, 250 - 4 * (step - 1)) for step in each}
    assert sum(rows.values()) == 250
    lines = losses(tmp_path / "b")
    assert set(lines) == {*range(7, 64, 7), *range(11, 64, 11)}
    for step, loss in lines.items():
        since = range(last + 1, step + 1)
        expected = sum(each[s] * rows[s] for s in since) / sum(rows[s] for s in since)
        assert loss == pytest.approx(expected, rel=1e-12)
        last = step


def test_learning_rate(main, tiny, out):
    main(*tiny, "--max-steps", 40, "--lr", 0.01, "--warmup-steps", 10)
    lr = [m["lr"] for m in metrics(out, "lr")]
    assert lr.index(max(lr)) in (8, 9) and lr[0] == pytest.approx(0.001) and lr[-1] < 1e-4
    assert lr[20] == pytest.approx(0.01 * (1 + math.cos(math.pi * 20 / 40)) / 2)


def test_seed(main, tiny, tmp_path, monkeypatch, losing):
    """Order, weights and dropout of three steps follow it."""
    seen, fetch = [], ddp_train.TensorDataset.__getitem__
    note = lambda value: seen[-1].append(value)
    fetched = lambda self, index: note(index) or fetch(self, index)
    monkeypatch.setattr(ddp_train.TensorDataset, "__getitem__", fetched)
    losing(lambda n, loss, output: note(output.sum().item()) or note(torch.rand(()).item()) or loss)
    built, build, drawn = (
        [],
        ddp_train.build_model,
        lambda model: next(model.parameters()).detach().sum(),
    )
    noted = lambda args: (model := build(args), built.append(float(drawn(model))))[0]
    monkeypatch.setattr(ddp_train, "build_model", noted)
    for i, seed in enumerate((0, 0, 1)):
        seen.append([])
        main(*tiny, "--out", tmp_path / f"{i}", "--max-steps", 3, "--seed", seed)
    assert built[0] == built[1] != built[2]
    assert seen[0] == seen[1] and len(set(seen[0][:9])) == 9
    assert all(a != b for a, b in zip(seen[0][:9], seen[2][:9]))


def test_progress_bar_and_tensorboard(main, tiny, out, monkeypatch):
    """At a terminal a bar instead of lines; numbers for TensorBoard where that is installed."""
    pytest.importorskip("tqdm")
    board = mock.Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    code, text = main(*tiny, "--max-steps", 3)
    assert code == 0 and "3/3 [" in text and "done" in text
    added = board.SummaryWriter.return_value.add_scalar.call_args_list
    assert {(call[0][0], call[0][2]) for call in added} >= {("loss", 1), ("val_loss", 3)}
    board.SummaryWriter.return_value.add_scalar.side_effect = OSError(28, "No space left")
    code, text = main(*tiny, "--max-steps", 5)
    assert code == 1 and "No space left" in text and "Traceback" not in text


def test_mixed_precision(main, tiny, tmp_path, losing):
    """Clipped after unscaling: before it, 65,536 times less would be left."""
    norms, kinds = [], []

    def note(optimizer, *_):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))

    losing(lambda n, loss, output: kinds.append(output.dtype) or loss)
    handle = register_optimizer_step_pre_hook(note)
    try:
        for precision, kind in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
            norms.clear()
            kinds.clear()
            out, more = tmp_path / precision, ("--precision", precision, "--grad-clip", 1e-3)
            code, text = main(*tiny, "--out", out, "--max-steps", 12, *more)
            assert code == 0 and precision in text and kinds == [getattr(torch, kind)] * 12, text
            assert norms == [pytest.approx(1e-3, rel=0.1)] * 12
            assert all(0.01 < m["grad_norm"] < 100 for m in metrics(out, "grad_norm"))
            assert {v.dtype for v in load(out)["model"].values()} == {torch.float32}
        norms.clear()  # go on in another precision, without clipping
        main(*tiny, "--out", tmp_path / "fp32", "--max-steps", 14, *more[:2], "--grad-clip", 0)
        logged = [m["grad_norm"] for m in metrics(tmp_path / "fp32", "grad_norm")]
        assert len(logged) == 14 and norms == pytest.approx(logged[12:], rel=1e-5)
    finally:
        handle.remove()


def test_scale_is_resumed(main, tiny, out, losing):
    """An overflow halves it; it stays so when the run goes on."""
    losing(lambda n, loss, output: loss * (1e36 if n == 2 else 1))
    for steps in (3, 5):
        assert main(*tiny, "--max-steps", steps, "--precision", "fp16")[0] == 0
        scaler = load(out)["scaler"]
        assert (scaler["scale"], scaler["_growth_tracker"]) == (2**15, steps - 2)


def test_fp16_stops_after_a_hundred_overflows(main, tiny, losing):
    losing(lambda n, loss, output: loss * 1e35)
    rare = "--log-every", 10, "--save-every", 1000
    code, text = main(*tiny, "--precision", "fp16", "--epochs", 9, *rare)
    assert code == 1 and "not finite at step" in text and "Traceback" not in text


@pytest.mark.parametrize("at, kind", [(1, "loss"), (7, "loss"), (7, "gradient")])
def test_loss_or_gradient_that_is_not_finite(main, tiny, out, losing, at, kind):
    """Nothing of it enters a checkpoint, and the step is named though each fifth is logged. The
    gradient of a square root at 0 is not finite, though the loss is."""
    root = lambda output: (output.sum() * 0).sqrt()
    bad = lambda loss, output: loss * math.nan if kind == "loss" else loss + root(output)
    losing(lambda n, loss, output: bad(loss, output) if n == at else loss)
    code, text = main(*tiny, "--log-every", 5, "--save-every", 5)
    assert code == 1 and f"not finite at step {at}," in text and "Traceback" not in text
    assert (out / "checkpoint.pt").exists() == (at == 7)
    if at == 7:
        assert load(out)["step"] == 5
        assert all(v.isfinite().all() for v in load(out)["model"].values())


def test_loss_that_is_not_finite_on_one_rank_stops_all(tiny, out):
    more = *tiny, "--save-every", 3
    printed = "".join(ranks(2, __file__, "faulty", "nan", "1", *more, code=1))
    assert printed.count("not finite at step 4,") == printed.count("error: ") == 1
    assert load(out)["step"] == 3


def test_compile(main, tiny, out, monkeypatch):
    """Whole batches go through what torch.compile made; names stay those of the bare model."""
    compiled, rows = torch.compile, []

    def counting(model, *args, **kwargs):
        net = compiled(model, *args, backend="eager", **kwargs)
        return lambda x: rows.append(len(x)) or net(x)

    monkeypatch.setattr(torch, "compile", counting)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert main(*tiny, "--compile")[0] == 0  # the last of its 63 batches has 2 rows
    assert rows == [4] * 62 and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert load(out)["model"].keys() == ddp_train.ByteTransformer(1, 2, 16, 32).state_dict().keys()


@pytest.mark.faults  # it takes a minute of a core
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")
def test_compile_to_machine_code(main, tiny, out):
    """The same numbers as without."""
    for folder, more in ((out, ["--compile"]), (f"{out}2", [])):
        assert main(*tiny, "--out", folder, "--max-steps", 3, *more)[0] == 0
    assert losses(out) == pytest.approx(losses(f"{out}2"), rel=1e-4)


def test_sync_bn_on_the_cpu_is_refused(main, tiny, monkeypatch):
    monkeypatch.setattr(ddp_train, "build_model", normed_model)
    code, text = main(*tiny, "--max-steps", 1, "--sync-bn")
    assert code == 1 and "no CPU kernel" in text and text.count("\n") == 1


BAD = {
    **dict.fromkeys(("--data /no/such", "--data=/no"), "No such file"),
    "--data EMPTY": "0 bytes",
    "--data SHORT": "60 bytes",
    "--batch-size x": "--batch-size",
    "--dropout 1": "--dropout",
    "--dim 6 --heads 4": "divisible",
    "--device tpu9": "--device",
    "--precision fp8": "fp8",
    "--no-such-option": "no-such-option",
    "--out /proc/no": "'/proc/no'",
    "--out FILE": "FILE'",
}
for bad in (
    "lr 0, lr -1, lr nan, lr inf, batch-size 0, epochs -3, accum 0, max-steps 0, timeout 0, "
    "timeout 1e15, spawn 0, workers -1, seq-len 0, seed 99999999999, grad-clip -1"
).split(", "):
    BAD[f"--{bad}"] = f"--{bad.split()[0]}"
STARTS = (
    "--backend smoke-signals",
    "--backend nccl",
    "--init-method udp://x",
    "--init-method tcp://x",
)
if not torch.accelerator.is_available():
    BAD["--device cuda"] = "no GPU"


def test_bad_input(main, tiny, tmp_path, subtests):
    """One line, which names the option."""
    for name, size in (("EMPTY", 0), ("SHORT", 60), ("FILE", 5)):
        (tmp_path / name).write_bytes(b"x" * size)
    for args, says in BAD.items():
        with subtests.test(args):
            given = [str(tmp_path / a) if a.isupper() else a for a in args.split()]
            code, text = main(*tiny, *given)
            assert code in (1, 2) and text.count("\n") == 1 and says in text
            assert text.startswith(f"{ddp_train.SCRIPT}: error:")
            assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("args", STARTS)
def test_bad_start(main, tiny, out, monkeypatch, args):
    """Refused for one process without a group, too."""
    for group in (False, True):
        if group:
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", "1")
        code, text = main(*tiny, *args.split())
        assert code == 1 and text.count("\n") == 1 and args in text and not out.exists()


@pytest.mark.parametrize(
    "rank, size, port, says",
    [
        ("0", "", "", "MASTER_ADDR"),
        ("0", "2", "", "MASTER_ADDR"),
        ("2", "2", "", "RANK < WORLD_SIZE"),
        ("x", "2", "", "'x'"),
        ("", "2", "", "go together"),
        ("0", "2", "TAKEN", "already in use"),
        ("1", "2", "FREE", "rank 1 cannot start"),
    ],
)
def test_bad_environment(main, tiny, monkeypatch, rank, size, port, says):
    monkeypatch.setattr(ddp_train, "START_LIMIT", 1.0)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = {"TAKEN": str(taken.getsockname()[1]), "FREE": str(free_port())}.get(port)
        env = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        env["MASTER_ADDR"] = port and "127.0.0.1"
        for k in filter(env.get, env):
            monkeypatch.setenv(k, env[k])
        code, text = main(*tiny, "--timeout", 1)
    ours = [line for line in text.splitlines() if ": error: " in line]  # torch logs sockets, too
    assert code == 1 and len(ours) == 1 and says in ours[0] and "Traceback" not in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read and write everything")
def test_unreadable(main, tiny, tmp_path):
    (tmp_path / "secret").touch(0o000)
    (tmp_path / "folder").mkdir(0o500)
    assert "Permission denied" in main(*tiny, "--data", tmp_path / "secret")[1]
    assert "cannot be written" in main(*tiny, "--out", tmp_path / "folder/out")[1]


def test_bad_input_on_all_ranks_and_on_one(tiny, data, tmp_path):
    """Two ranks say it once; where only rank 1 has it, both end, and both say whose it is."""
    printed = "".join(ranks(2, SCRIPT, *tiny, "--data", "/no/such", code=1))
    assert printed.count("No such file") == printed.count("\n") == 1
    changed = tmp_path / "changed"
    content = bytearray(data.read_bytes())
    content[4000] ^= 1
    changed.write_bytes(content)
    for option, usual, other, says in (
        ("--data", data, changed, "data of CRC-32"),
        ("--lr", "0.1", "0.5", "--lr is 0.5 on rank 1"),
        ("--data", data, "/no/such", "No such file"),
    ):
        value = lambda r: (usual, other)[r]
        outs = ranks(2, SCRIPT, *tiny, option, value, code=1)
        printed = "".join(outs)
        assert outs[0].count("\n") <= 1 and outs[1].count("\n") <= 1 and says in printed, outs
        assert "rank 1 (" in printed and "Traceback" not in printed, outs
        assert not (tmp_path / "out").exists()


# ---- Checkpoint ----
@pytest.mark.parametrize("links", [True, False])
def test_checkpoint_is_replaced_in_one_step(main, tiny, out, monkeypatch, links):
    """Whoever reads checkpoint.pt while it is saved finds the old or the new one; without hard
    links, the old one has the other name."""
    seen, path, previous = [], out / "checkpoint.pt", out / "checkpoint.prev.pt"

    def watch(name):
        function = getattr(os, name)

        def call(*args, **kwargs):
            if name == "link" and not links:
                raise PermissionError("as exFAT does")
            function(*args, **kwargs)
            seen.append((name, path.exists(), path.exists() or previous.exists()))

        monkeypatch.setattr(os, name, call)

    assert main(*tiny, "--max-steps", 1)[0] == 0
    for name in ("replace", "unlink", "fsync", "link"):
        watch(name)
    assert main(*tiny, "--max-steps", 4, "--save-every", 1)[0] == 0
    names, there, either = zip(*seen)
    assert names.count("fsync") == 3 and names[0] == "fsync" and names.count("replace") >= 3
    assert all(either) and all(there) == links
    assert load(out)["step"] == 4 and load(previous.parent, previous.name)["step"] == 3


def test_checkpoint_has_the_weights_of_its_step(main, tiny, tmp_path, monkeypatch, losing):
    """It is written while training goes on, here three steps later; the same as if waited for."""
    args = *tiny, "--max-steps", 9, "--save-every", 5, "--out"
    save, write, later = Checkpoint.save, torch.save, threading.Event()
    waited = lambda self, step, **values: [save(self, step, **values), self.wait()]
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", waited)
        main(*args, tmp_path / "a")
    monkeypatch.setattr(torch, "save", lambda *a: later.wait(PATIENCE) and write(*a))
    losing(lambda n, loss, output: (n == 8 and later.set()) or loss)
    assert main(*args, tmp_path / "b")[0] == 0
    for name in ("checkpoint.prev.pt", "checkpoint.pt"):
        assert_same(load(tmp_path / "a", name), load(tmp_path / "b", name))


def test_checkpoint_of_any_parts(tmp_path, capfd):
    """Two networks, an optimizer, plain values; what a file lacks is called by its name."""

    def parts(seed):
        torch.manual_seed(seed)
        nets = {"generator": nn.Linear(2, 3), "discriminator": nn.Linear(3, 1)}
        adam = torch.optim.AdamW(nets["generator"].parameters())
        nets["discriminator"](nets["generator"](torch.ones(2))).sum().backward()
        adam.step()
        return {**nets, "optimizer_g": adam}

    first, second = parts(1), parts(2)
    checkpoint = Checkpoint(tmp_path, first, {"size": 3})
    assert checkpoint.resume() == {}
    checkpoint.save(7, epoch=2, best=[0.5, "text"], noise=torch.arange(3))
    checkpoint.wait()
    state = Checkpoint(tmp_path, second, {"size": 3}).resume()
    assert (state["step"], state["epoch"], state["best"]) == (7, 2, [0.5, "text"])
    assert state["noise"].tolist() == [0, 1, 2]
    states = lambda parts: {name: part.state_dict() for name, part in parts.items()}
    assert_same(states(first), states(second))
    for more, says in (({"size": 4}, "size 3, this one has 4"), ({"width": 1}, "width")):
        with pytest.raises(SystemExit, match=says):
            Checkpoint(tmp_path, parts(3), more).resume()
    untouched = parts(3)
    with pytest.raises(SystemExit, match="has no 'critic'"):
        Checkpoint(tmp_path, {**untouched, "critic": nn.Linear(1, 1)}, {"size": 3}).resume()
    assert_same(states(untouched), states(parts(3)))
    assert "damaged" not in capfd.readouterr().err


def test_checkpoint_of_another_run(main, tiny, data, out, tmp_path):
    changed = tmp_path / "changed"
    changed.write_bytes(data.read_bytes().replace(b"quick", b"brisk"))
    main(*tiny, "--max-steps", 2)
    before = (out / "checkpoint.pt").read_bytes()
    for other, says in (
        ("--dim 32", "--dim 16, this one has 32"),
        ("--heads 1", "--heads 2"),
        ("--layers 2", "--layers 1"),
        ("--seed 5", "--seed 0"),
        ("--seq-len 16", "len 32"),
        (f"--data={changed}", "data of CRC-32"),
    ):
        code, text = main(*tiny, "--max-steps", 4, *re.split(" (?=[0-9])", other))
        assert code == 1 and text.count("\n") == 1 and says in text and "another --out" in text
    assert (out / "checkpoint.pt").read_bytes() == before


def damage(content, rng):
    content, kind = bytearray(content), rng.choice("bit bit bit truncated zeros garbage".split())
    anywhere = rng.randrange(len(content))
    if kind == "bit":
        at = anywhere if rng.random() < 0.7 else len(content) - 1 - rng.randrange(4000)
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "truncated":
        del content[anywhere:]
    elif kind == "zeros":
        content[anywhere : anywhere + 512] = bytes(len(content[anywhere : anywhere + 512]))
    else:
        content = bytearray(rng.randbytes(rng.randrange(3000)))
    return bytes(content)


def damaged_files(main, tiny, out, count, seed):
    """Each is refused, or harmless: how many were refused."""
    assert main(*tiny, "--max-steps", 4, "--save-every", 2)[0] == 0
    path, rng, refused = out / "checkpoint.pt", random.Random(seed), 0
    good, truth, before = path.read_bytes(), load(out), load(out, "checkpoint.prev.pt")
    checkpoint = Checkpoint(out, {})
    for i in range(count):
        print(f"SEED={seed}, file {i}", flush=True)
        path.write_bytes(damage(good, rng))
        step, newest, problem = checkpoint.newest()
        assert (step, newest.name) in ((4, "checkpoint.pt"), (2, "checkpoint.prev.pt"))
        assert ("damaged" in problem) == (step == 2)
        got, want = flat(load(newest.parent, newest.name)), flat({4: truth, 2: before}[step])
        assert_same({k: got[k] for k in want}, want)
        refused += step == 2
    path.write_bytes(good)
    return refused


def test_damaged_checkpoints(main, tiny, out):
    # a flip in the padding between records harms nothing
    assert damaged_files(main, tiny, out, 50, seed=0) > 40
    path = out / "checkpoint.pt"
    path.write_bytes(b"not a checkpoint")
    code, text = main(*tiny, "--max-steps", 4)
    names = "checkpoint.pt is damaged.*going on from .*checkpoint.prev.pt"
    assert code == 0 and re.search(f"warning: .*{names}", text) and load(out)["step"] == 4
    assert (out / "checkpoint.damaged").read_bytes() == b"not a checkpoint"
    assert not (out / "checkpoint.prev.pt").exists() or load(out, "checkpoint.prev.pt")["step"] == 2
    main(*tiny, "--max-steps", 6, "--save-every", 2)
    assert load(out, "checkpoint.prev.pt")["step"] == 4
    good, truth, checkpoint = path.read_bytes(), load(out), Checkpoint(out, {})
    # The entry of a weight in the directory at the end, which no CRC protects.
    weight = re.search(rb"PK\x01\x02.{42}[^/]*/data/0", good, re.S)
    for bit in range(8 * weight.start(), 8 * weight.end()):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        if checkpoint.newest()[0] == 6:
            assert_same(load(out)["model"], truth["model"])
    for name in ("checkpoint.pt", "checkpoint.prev.pt"):
        (out / name).write_bytes(good[:-100])
    code, text = main(*tiny, "--max-steps", 9)
    assert code == 1 and "nothing to go on from" in text and text.count("\n") == 1
    assert path.read_bytes() == good[:-100]


@pytest.mark.faults
def test_damaged_checkpoints_long(main, tiny, out):
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    refused = damaged_files(main, tiny, out, 1000, seed)
    print(f"SEED={seed}: {refused} of 1000 refused, the rest unharmed where it counts")


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


def test_checkpoint_is_data_not_code(main, tiny, tmp_path, monkeypatch):
    """Here, and as the file of a rank other than 0 on a disk of its own."""
    bomb = tmp_path / "exploded"
    monkeypatch.setenv("BOMB", str(bomb))
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    (tmp_path / "0/checkpoint.pt").write_bytes(pickle.dumps(Bomb()))
    torch.save({"step": 10**6, "model": Bomb()}, tmp_path / "1/checkpoint.pt")
    for folder in "01":
        code, text = main(*tiny, "--out", tmp_path / folder)
        assert code == 1 and "not a checkpoint" in text and not bomb.exists()
    outs = ranks(2, SCRIPT, *tiny, "--out", lambda r: tmp_path / ["new", "0"][r], code=1)
    printed = "".join(outs)
    assert "rank 1: " in printed and "not a checkpoint" in printed and not bomb.exists()
    assert printed.count("\n") == 1, outs


def test_save_that_cannot_be_pickled(main, tiny, out, monkeypatch):
    save = Checkpoint.save
    bad = lambda self, step, **values: save(self, step, **values, more=lambda: None)
    monkeypatch.setattr(Checkpoint, "save", bad)
    code, text = main(*tiny, "--max-steps", 3)
    assert code == 1 and "cannot save" in text and "done" not in text
    assert not list(out.glob("checkpoint*"))


@pytest.mark.skipif(not LINUX, reason="reads /proc/self/status")
def test_resume_keeps_one_copy_per_node(tmp_path):
    """200 MB, two ranks: on one disk, and with a disk each, of which only rank 1's has the file.
    Mapped pages are the page cache's; what a process has for itself counts."""
    (tmp_path / "1").mkdir()
    part = nn.ParameterDict({"weight": torch.full((50_000_000,), 7.0)})
    checkpoint = Checkpoint(tmp_path / "1", {"part": part})
    checkpoint.save(9)
    checkpoint.wait()
    checkpoint.lock.close()
    good = (tmp_path / "1/checkpoint.pt").read_bytes()
    for folders in ("11", "01"):
        ranks(2, __file__, "resuming", lambda r: tmp_path / folders[r])
        most = [int((tmp_path / folders[r] / f"most.{r}").read_text()) for r in (0, 1)]
        assert sum(most) < 1.1 * len(good), most
    assert (tmp_path / "0/checkpoint.pt").read_bytes() == good


def test_two_runs_into_one_folder(main, tiny, out):
    with start(PYTHON, SCRIPT, *tiny, *LONG) as first:
        read_until(first, "step 9/")  # soon it blocks, and keeps the folder
        code, text = main(*tiny)
    assert code == 1 and "is in use by another run" in text and text.count("\n") == 1


@pytest.mark.parametrize("size, save_every", [(50_000, 7), (5_000, 1000)])
def test_full_disk(main, tiny, out, size, save_every):
    """The file-size limit stands for a full disk, for the checkpoint or for the metrics, too: the
    run stops, with the old checkpoint intact."""
    main(*tiny, *LONG, "--max-steps", 7)
    before = (out / "checkpoint.pt").read_bytes()
    more = *tiny, *LONG, "--save-every", save_every
    outs = ranks(2, __file__, "faulty", f"disk{size}", "", *more, code=1)
    says = "the checkpoint before it is intact" if save_every == 7 else "File too large"
    assert "error: rank 0 (" in outs[0] and says in outs[0], outs
    assert "step 90/" not in outs[0] and "Traceback" not in "".join(outs), outs
    assert outs[1].count("\n") <= 1
    assert (out / "checkpoint.pt").read_bytes() == before and not (out / "checkpoint.tmp").exists()


def test_folder_that_becomes_read_only(tiny, out):
    """Root writes wherever it likes, but not into an immutable folder."""
    ways = (
        (["chmod", "a-w"], ["chmod", "u+w"])
        if os.geteuid()
        else (["chattr", "+i"], ["chattr", "-i"])
    )
    with start(PYTHON, SCRIPT, *tiny, *LONG) as p:
        read_until(p, "step 22/")  # the save of step 21 began, so that of step 14 is done
        if not shutil.which(ways[0][0]) or subprocess.run([*ways[0], out]).returncode:
            pytest.skip("root, and no chattr that works here")
        try:
            printed = finish(p)
        finally:
            subprocess.run([*ways[1], out], check=True)
    assert load(out)["step"] >= 14
    assert p.returncode == 1 and "cannot save" in printed and "is intact" in printed, printed
    assert "Traceback" not in printed


# ---- Stop, kill, resume: the same bits ----
def training(tiny, *more, restarts=0):
    return [*torchrun(2, f"--max-restarts={restarts}"), SCRIPT, *tiny, *LONG, *more]


@pytest.fixture(scope="session")
def untouched(data, shared):
    """untouched(world): the folder of the run that nobody touched."""

    def get(world, *more):
        command = SCRIPT, *TINY, *LONG, "--data", data, *more
        make = lambda folder: ranks(world, *command, "--out", folder)
        return shared(f"untouched{world}{''.join(more)}", make)

    return get


STOPS = "1 SIGTERM step 25/, 1 SIGUSR1 from step 0, 3 SIGINT step 25/, 2 SIGTERM step 33/"


@pytest.mark.parametrize("case", STOPS.split(", "))
def test_stop_and_resume_is_bit_identical(tiny, out, untouched, case):
    """A signal to one rank; in the middle of an epoch, at the start, before an evaluation. All
    leave together; the next start ends with the same bits. Three processes: DDP's order of
    summation matters. Two: torchrun, with restarts left, does not restart them."""
    world, name, line = case.split(" ", 2)
    world, signum = int(world), getattr(signal, name).value
    more = *tiny, *LONG, "--save-every", 10**6
    if world == 2:
        with start(*torchrun(2, "--max-restarts=3"), SCRIPT, *more) as p:
            printed = signalled(p, lambda p: pids_of_ranks(p.pid)[-1:], signum, line)
        assert p.returncode == 0
    else:
        with by_hand(world, SCRIPT, *more) as processes:
            printed = read_until(processes[0], line)
            os.kill(processes[-1].pid, signum)
            printed += "".join(finish_all(processes, 128 + signum))
    assert printed.count(f"stopped by signal {signum}") == 1, printed
    assert printed.count("process(es)") == 1 and "Traceback" not in printed
    step = int(re.search(r"stopped by .* step (\d+)", printed)[1])
    assert not step or load(out)["step"] == step
    again = ranks(world, SCRIPT, *tiny, *LONG)[0]
    assert not step or f"going on from step {step} " in again and f"step {step + 1}/" in again
    assert_same(load(out), load(untouched(world)))
    assert [m["step"] for m in metrics(out, "loss")] == sorted(losses(out))
    assert losses(out) == losses(untouched(world))
    held_out = [metrics(folder, "val_loss") for folder in (out, untouched(world))]
    assert held_out[0] == held_out[1]


def test_stop_signal_to_the_launcher_and_during_evaluation(tiny, out, untouched):
    """Each step ends with an evaluation, so the signal comes in one. Loading processes get it as
    well and stay alive."""
    more = "--eval-every", "1", "--workers", "1", "--epochs", "2"
    with start(*training(tiny, *more)) as p:
        everybody = lambda p: [*tree(p.pid), p.pid]
        printed = signalled(p, everybody, signal.SIGTERM, "step 9/")
    assert printed.count("stopped by signal 15") == 1 and "DataLoader" not in printed, printed
    assert load(out)["step"] == int(re.search(r"stopped by .* step (\d+)", printed)[1])
    ranks(2, SCRIPT, *tiny, *LONG, *more)
    assert_same_run(out, untouched(2, *more))


@pytest.mark.parametrize("last", [3, 9])
def test_killed_in_an_evaluation(main, tiny, out, monkeypatch, last):
    """The steps before it are saved, and the next start evaluates."""
    common = *tiny, "--max-steps", last, "--eval-every", 3, "--save-every", 100
    save = Checkpoint.save
    with monkeypatch.context() as patch:
        patch.setattr(ddp_train, "evaluate", lambda *a: sys.exit("killed"))
        patch.setattr(Checkpoint, "save", lambda self, *a, **k: (save(self, *a, **k), self.wait()))
        assert main(*common)[0] == 1
    assert load(out)["step"] == 3 and not metrics(out, "val_loss")
    assert main(*common)[0] == 0
    assert [m["step"] for m in metrics(out, "val_loss")] == [*range(3, last + 1, 3)]


def test_reader_of_the_output_that_is_gone(tiny, out):
    """Ctrl-C on `... | tee log` ends the `tee`, too. The run still saves."""
    with start(PYTHON, SCRIPT, *tiny, *LONG, "--save-every", 10**6) as p:
        read_until(p, "step 5/")
        p.stdout.close()
        os.kill(p.pid, signal.SIGTERM)
        p.wait(PATIENCE)
    assert p.returncode == 128 + signal.SIGTERM and load(out)["step"] >= 5


def kill_once(tiny, seed, victims=("rank 0", "rank 1", "loader", "agent", "all")):
    """One SIGKILL at a random moment, then restarts where none happens by itself. Returns what
    was killed."""
    rng = random.Random(seed)
    victim, more = rng.choice(victims), ("--workers", "1")
    with start(*training(tiny, *more, restarts=3)) as p:
        if rng.random() < 0.8:
            read_until(p, f"step {rng.randint(1, 175)}/|done")
        else:
            read_until(p, "OMP|process")
            time.sleep(rng.random() * 4)  # any moment of the start
        pids = pids_of_ranks(p.pid)
        loaders = [c for r in pids for c in children(r)]
        hit = {"rank 0": pids[:1], "rank 1": pids[1:], "loader": loaders[:1], "agent": [p.pid]}
        for pid in hit.get(victim, [p.pid, *pids, *loaders]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        printed = finish(p)  # until the last of them is gone: without torchrun the ranks die
    if p.returncode:
        printed += ranks(2, SCRIPT, *tiny, *LONG, *more)[0]
    assert "done" in printed, printed
    return victim


@pytest.mark.parametrize("victim", ["rank 1"])
def test_kill_9(tiny, out, untouched, victim):
    """torchrun starts the ranks again, in the middle of the run."""
    kill_once(tiny, seed=4, victims=[victim])
    assert_same_run(out, untouched(2))


def test_ranks_die_with_torchrun(tiny, out, untouched):
    """Nobody could stop or restart them any more, and they would keep the folder. What was saved
    is enough for the same bits."""
    with start(*training(tiny)) as p:
        printed = signalled(p, lambda p: [p.pid], signal.SIGKILL, "step 30/")
    assert "stopped by" not in printed and "done" not in printed
    assert 21 <= load(out)["step"] < 192
    ranks(2, SCRIPT, *tiny, *LONG)
    assert_same_run(out, untouched(2))


@pytest.mark.faults
def test_kill_9_long(data, tmp_path, untouched):
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    victims = []
    for i in range(int(os.environ.get("KILLS", 100))):
        print(f"kill {i}: SEED={seed + i} KILLS=1", end=" ", flush=True)
        out = tmp_path / str(i)
        victims.append(kill_once([*TINY, "--data", data, "--out", out], seed + i))
        print(victims[-1], flush=True)
        assert_same_run(out, untouched(2))
        shutil.rmtree(out)
    print({v: victims.count(v) for v in set(victims)})


@pytest.mark.faults
def test_clean_exits_long(tiny, out):
    for _ in range(20):
        printed = run(*training(tiny, "--max-steps", "5"))
        assert not re.search("Traceback|terminate called|Fatal", printed)
        shutil.rmtree(out)


def test_node_with_another_disk_catches_up(tiny, tmp_path, untouched):
    """Two nodes with a disk each. The newest checkpoint is on rank 1's: rank 0, whose own is
    missing or damaged, gets a copy and goes on from it."""
    a, b, args = tmp_path / "a", tmp_path / "b", [*tiny, *LONG, "--out"]
    disks = lambda r: (a, b)[r]
    with by_hand(2, SCRIPT, *args, b) as processes:
        read_until(processes[0], "step 40/")
        os.kill(processes[1].pid, signal.SIGUSR1)
        finish_all(processes, 128 + signal.SIGUSR1)
    newest, step = (b / "checkpoint.pt").read_bytes(), load(b)["step"]
    for damaged in (newest[:-1], None):
        if damaged:
            a.mkdir()
            (a / "checkpoint.pt").write_bytes(damaged)
        outs = ranks(2, SCRIPT, *args, disks, "--max-steps", step)
        assert f"going on from step {step}" in outs[0] and ("rank 0: " in outs[0]) == bool(damaged)
        assert not damaged or (a / "checkpoint.damaged").read_bytes() == damaged
        for other, folder in ((b, a), (a, b)):  # and the other way round
            assert (folder / "checkpoint.pt").read_bytes() == newest
            shutil.rmtree(other)
            ranks(2, SCRIPT, *args, disks, "--max-steps", step)
            assert (other / "checkpoint.pt").read_bytes() == newest
        shutil.rmtree(a)
    ranks(2, SCRIPT, *args, disks)
    assert_same(load(a), load(untouched(2)))


# ---- A rank that fails ----
def test_rank_that_raises(tiny):
    """Its traceback once and first, a line of the other; its children are not waited for."""
    command = __file__, "faulty", "raise", "1", *tiny, "--workers", 1
    printed = run(*torchrun(2), *command, code=1)
    lines = [line for line in printed.splitlines() if ": error: rank " in line]
    assert len(lines) == 2 and "rank 1 (" in lines[0] and "boom" in lines[0], printed
    assert "rank 0 (" in lines[1] and "before that, rank 1 (" in lines[1], printed
    assert printed.count("ValueError: boom") == 1, printed


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_is_killed(tiny, victim):
    with by_hand(2, SCRIPT, *tiny, *LONG) as processes:
        read_until(processes[0], "step 5/")
        os.kill(processes[victim].pid, signal.SIGKILL)
        printed = finish(processes[1 - victim])
    assert processes[1 - victim].returncode == 1 and f"rank {1 - victim} (" in printed


@pytest.mark.parametrize("hangs", ["0", "1"])
def test_rank_that_hangs(tiny, hangs):
    """The others miss it after --timeout. It is told to end, too, and where it was."""
    begin = time.monotonic()
    outs = ranks(2, __file__, "faulty", "hang", hangs, *tiny, "--timeout", 3, code=1)
    assert time.monotonic() - begin < 90  # not the 120 s of the start, nor the usual 600
    hung = outs[int(hangs)]
    assert "ended at" in hung and "in loss_fn" in hung, outs
    assert f"before that, rank {1 - int(hangs)} (" in hung, outs


# ---- The README ----
def test_readme_names_what_exists():
    """Every make target that it tells of is there."""
    readme, makefile = ((HERE / name).read_text() for name in ("README.md", "Makefile"))
    targets = set(re.findall(r"(?:`|^    )make ([a-z][a-z0-9-]+)", readme, re.M))
    assert {"train", "test"} <= targets
    assert all(re.search(f"^{t}:", makefile, re.M) for t in targets), targets
    listed = run("make", "-s", "-C", HERE, "help")
    assert all(t in listed for t in targets)


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", (HERE / "README.md").read_text(), re.S)


@pytest.fixture
def ported(tmp_path, monkeypatch):
    """ported(name, world, changes): run a script of the README's two diffs, as it stands but for
    some texts, in a folder of its own; returns the folder."""
    lines, more = blocks("diff")[0].splitlines(True), blocks("diff")[1]
    texts = {n: "".join(x[1:] for x in lines if x[0] in keep) for n, keep in PORTED.items()}
    (tmp_path / "after.py").write_text(texts["after"])
    (tmp_path / "more.diff").write_text(f"--- a/after.py\n+++ b/after.py\n{more}")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    subprocess.run(["git", "apply", "more.diff"], cwd=tmp_path, check=True)
    texts["resumed"] = (tmp_path / "after.py").read_text()

    def run_it(name, world, changes, code=0, folder=None):
        folder = folder or Path(tempfile.mkdtemp(dir=tmp_path))
        text = f"import os; os.chdir({str(folder)!r})\n{texts[name]}"
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (folder / "ported.py").write_text(text)
        ranks(world, folder / "ported.py", code=code, CUDA_VISIBLE_DEVICES="")
        return folder

    return run_it


PORTED = {"before": " -", "after": " +"}
NO_DROPOUT = {"Dropout(0.1)": "Dropout(0.0)"}


def test_ported_script_is_exact(ported):
    """One process with batches of 32 and two with 16, on 1,001 samples; each its own dropout."""
    assert not (ported("before", 1, {}) / "out").exists()
    whole = ported("after", 1, NO_DROPOUT | {"dataset, 16": "dataset, 32"})
    mask = "torch.save(encoder[2](torch.ones(99)), f'{world.rank}.{epoch}.{step}')"
    seeded = "dt.seed_step(epoch, step, world.rank)\n"
    masks = {seeded: f"{seeded}{' ' * 12}{mask}\n"}
    halves = ported("after", 2, NO_DROPOUT)
    for (_, a), (_, b) in zip(*(flat(load(f, "model.pt")).items() for f in (whole, halves))):
        assert torch.allclose(a, b, rtol=0, atol=1e-6)
    seen = ported("after", 2, masks)
    drawn = [load(seen, f"{r}.{e}.{s}") for r in (0, 1) for e in (0, 2) for s in (0, 31)]
    assert len({tuple(m.tolist()) for m in drawn}) == len(drawn) == 8


def test_ported_script_stops_and_goes_on(ported):
    """A signal to rank 1 in the middle of an epoch; then on to the same bits."""
    whole = ported("resumed", 2, {})
    kill = "os.kill(os.getpid(), 15) if (world.rank, done) == (1, 1001 + 320) else None"
    counted = "done += of\n"
    stop = {counted: f"{counted}{' ' * 12}{kill}\n"}
    folder = ported("resumed", 2, stop, code=128 + signal.SIGTERM)
    assert load(folder / "out")["step"] == 1001 + 320 + 32  # one step to agree
    ported("resumed", 2, {}, folder=folder)
    assert_same(load(folder / "out"), load(whole / "out"))
    assert_same(load(folder, "model.pt"), load(whole, "model.pt"))


def test_readme_lets_the_model_write(main, tiny, tmp_path):
    main(*tiny, "--out", tmp_path / "out", "--max-steps", 2)
    printed = run(PYTHON, "-c", blocks("python")[0], cwd=tmp_path)
    assert printed.startswith("def ") and len(printed.encode()) >= 300


# ---- Two hosts: network and UTS namespaces, a wire, no DNS; each name leads to 127.0.1.1 on its
# ---- own host and nowhere elsewhere.
def can_make_hosts():
    if not LINUX or os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    probe = "unshare --net --uts --mount ip link add veth-probe type veth".split()
    return subprocess.run(probe, capture_output=True).returncode == 0


needs_hosts = pytest.mark.skipif(
    not can_make_hosts(), reason="needs root on Linux with `ip` and network namespaces"
)


@pytest.fixture
def hosts(tmp_path):
    """Command prefixes that run something on host a (10.77.0.1) and on host b (10.77.0.2), and
    `ip` in each."""
    names = [f"ddp-{MARK}-{x}" for x in "ab"]
    ip = lambda *args: subprocess.run(["ip", *args], check=True, capture_output=True)
    (tmp_path / "resolv").write_text("")
    try:
        for name in names:
            ip("netns", "add", name)
        ends = "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1]
        ip("link", "add", "wire", *ends)
        prefixes = []
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")
            known = tmp_path / f"hosts{i}"
            known.write_text(f"127.0.0.1 localhost\n127.0.1.1 host{'ab'[i]}\n")
            shell = (
                f"hostname host{'ab'[i]}; mount --bind '{known}' /etc/hosts; "
                f"mount --bind '{tmp_path}/resolv' /etc/resolv.conf; exec \"$@\""
            )
            namespaces = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount"]
            prefixes.append([*namespaces, "sh", "-c", shell, "sh"])
        yield prefixes, lambda i, *args: ip("-n", names[i], *args)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def node(hosts, i, tiny, folder, *args, script=MULTI, **env):
    env = {"MASTER_ADDR": "10.77.0.1", "NNODES": "2", "PYTHON": PYTHON, **env}
    command = script, *tiny, "--out", folder / "ab"[i], *args
    return start(*command, env=env, prefix=hosts[0][i])


@needs_hosts
@pytest.mark.parametrize(
    "first, nproc, ranked, name",
    [
        (1, 2, False, "10.77.0.1"),
        (0, 1, True, "hosta"),
        pytest.param(1, 1, True, "10.77.0.1", marks=pytest.mark.faults),
        pytest.param(0, 1, False, "hosta", marks=pytest.mark.faults),
    ],
)
def test_two_bare_hosts(hosts, tiny, tmp_path, first, nproc, ranked, name):
    """In either order, with NODE_RANK and without, one and two processes each; host a may know
    itself by its name."""
    with contextlib.ExitStack() as stack:
        both = {}
        for i in (first, 1 - first):
            env = {"NPROC_PER_NODE": str(nproc), "MASTER_ADDR": "10.77.0.1" if i else name}
            env |= {"NODE_RANK": str(i)} if ranked else {}
            run_node = node(hosts, i, tiny, tmp_path, "--max-steps", "3", **env)
            both[i] = stack.enter_context(run_node)
        outs = finish_all([both[0], both[1]])
    printed = "".join(outs)
    assert f"{2 * nproc} process(es) on 2 node(s)" in printed and printed.count("done:") == 1
    assert "10.77.0.1 on wire" in outs[0] and "this node" in outs[0]
    assert "10.77.0.2 on wire leads to 10.77.0.1" in outs[1]
    saved = list(tmp_path.glob("*/checkpoint.pt"))
    assert len(saved) == 1 and (not ranked or saved == [tmp_path / "a/checkpoint.pt"])


@needs_hosts
@pytest.mark.faults
def test_nodes_that_do_not_meet(hosts, tiny, tmp_path):
    soon = {"RDZV_TIMEOUT": "12"}
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(node(hosts, 0, tiny, tmp_path, **soon))
        b = stack.enter_context(node(hosts, 1, tiny, tmp_path, NNODES="3", **soon))
        printed = finish(b), finish(a)
    assert "NNODES is 3 on this node, hostb, and 2 on 10.77.0.1" in printed[0], printed
    assert "only 1 of 2 nodes came within 12 s" in printed[1] and "Traceback" not in printed[1]
    assert b.returncode == 2 and a.returncode
    for env, says in (
        ({"RDZV_TIMEOUT": "2"}, "nobody serves 10.77.0.1:29500 after 2 s"),
        ({"MASTER_ADDR": "10.99.0.1"}, "no route"),
    ):
        with node(hosts, 1, tiny, tmp_path, **env) as b:
            assert says in finish(b)
        assert b.returncode == 2


@needs_hosts
@pytest.mark.faults
@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_elastic_node_leaves_and_returns(hosts, tiny, tmp_path, fault):
    """NNODES=1:2. Host b dies or loses its wire: a goes on alone from the last checkpoint. b
    returns: a takes it back. No sample of an epoch is left out, and no more is trained again than
    lies between two checkpoints."""
    shutil.copy(MULTI, tmp_path)
    (tmp_path / "seen").mkdir()
    this = f"sys.path[0], sys.argv[:1] = {str(HERE)!r}, [{__file__!r}, 'counted']"
    path = f"import runpy, sys\n{this}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    (tmp_path / "ddp_train.py").write_text(path)
    args = "--epochs", "2000", "--save-every", "20", "--log-every", "10"
    env = {"script": tmp_path / MULTI.name, "NNODES": "1:2", "MAX_RESTARTS": "9"}
    env["SEEN"] = str(tmp_path / "seen")
    with contextlib.ExitStack() as stack:
        join = lambda i: stack.enter_context(node(hosts, i, tiny, tmp_path, *args, **env))
        a, b = join(0), join(1)
        read_until(a, "2 process.* on 2 node")
        read_until(a, r"step [4-9]\d/")
        if fault == "killed":
            for pid in [*tree(b.pid), b.pid]:
                os.kill(pid, signal.SIGKILL)
        else:
            hosts[1](1, "link", "set", "wire", "down")
        alone = read_until(a, r"1 process\(es\) on 1 node.*going on from")
        assert int(re.search(r"going on from step (\d+)", alone)[1]) >= 20, alone
        read_until(a, r"step \d+/")
        if fault == "cut":
            hosts[1](1, "link", "set", "wire", "up")
        join(1)
        read_until(a, r"2 process\(es\) on 2 node.*going on from")
        read_until(a, r"step \d+/")
    lines = [line.split() for file in (tmp_path / "seen").iterdir() for line in open(file)]
    order, again, worlds = {}, [0], []  # (epoch, position) -> sample
    for _, world, epoch, at, *indices in sorted([int(w) for w in line] for line in lines):
        if worlds[-1:] != [world]:
            worlds.append(world)
            again.append(0)
        for place, index in zip(itertools.count(at, world), indices):
            again[-1] += (epoch, place) in order
            order[epoch, place] = index
    assert worlds == [2, 1, 2] and max(again) <= 2 * 20 * 2 * 4
    for epoch in range(max(epoch for epoch, _ in order)):
        assert sorted(order[epoch, place] for place in range(250)) == list(range(250))


# ---- GPUs ----
@needs_gpu
@pytest.mark.parametrize(
    "options", ["--precision bf16", "--precision fp16", "--precision bf16 --compile", "--sync-bn"]
)
def test_nccl_with_one_rank(data, out, options):
    """--sync-bn with a model that has batch norm."""
    script = (__file__, "faulty", "bn", "") if "bn" in options else (SCRIPT,)
    args = *ON_GPU, "--data", data, "--out", out, "--max-steps", 20, "--lr", "3e-3"
    printed = run(*torchrun(1), *script, *args, *options.split())
    assert "cuda" in printed and losses(out)[20] < losses(out)[1]
    weights = load(out)["model"].values()
    assert {v.dtype for v in weights if v.is_floating_point()} == {torch.float32}


@needs_gpu
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_processes_on_one_gpu(data, out, backend):
    args = *ON_GPU, "--data", data, "--out", out, "--max-steps", 10, "--backend", backend
    env = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    printed = run(*torchrun(2), SCRIPT, *args, code=None, env=env)
    if backend == "nccl" and "Duplicate GPU" in printed:
        pytest.skip("this NCCL refuses two ranks on one GPU")
    assert "2 process(es)" in printed and "done" in printed, printed


@needs_gpu
def test_too_few_gpus(data, out):
    visible = ",".join(map(str, range(GPUS)))
    env = {"CUDA_VISIBLE_DEVICES": visible} if GPUS > 1 else {}
    prefix = ["env", "-u", "CUDA_VISIBLE_DEVICES"] if GPUS == 1 else []
    command = *prefix, *torchrun(GPUS + 1), SCRIPT, "--data", data, "--out", out
    assert f"local rank {GPUS} has no GPU" in run(*command, code=1, env=env)


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_no_synchronization_in_the_loop(data, out, precision):
    """Between two log lines nothing waits for the GPU, also with DDP: torch raises if it does."""
    args = *ON_GPU, "--data", data, "--out", out, "--max-steps", 20, "--log-every", 20
    run(*torchrun(1), __file__, "faulty", "sync", "", *args, "--precision", precision)


if __name__ == "__main__":
    roles = {"worker": worker, "faulty": faulty, "counted": counted, "resuming": resuming}
    roles[sys.argv[1]](*sys.argv[2:])
