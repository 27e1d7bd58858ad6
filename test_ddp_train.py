"""Tests of ddp_train.py: they start the real thing, break it, and look at what it leaves.

    pytest test_ddp_train.py                     what needs root, GPUs or a compiler skips elsewhere
    pytest -n 0 -s -m faults test_ddp_train.py   the long form: many kills, many damaged files

Each test that fails in the long form prints SEED=..., which repeats it.
"""

import concurrent.futures
import contextlib
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
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from datetime import timedelta
from multiprocessing import forkserver, util
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.run import get_args_parser
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ddp_train
from ddp_train import Checkpoint, World

HERE = Path(__file__).resolve().parent
SCRIPT, SINGLE, MULTI = (HERE / f for f in ("ddp_train.py", "run_single.sh", "run_multi_node.sh"))
PYTHON = sys.executable
LINUX = sys.platform == "linux"
TINY = (
    "--device cpu --dim 16 --layers 1 --heads 2 --seq-len 32 --batch-size 4 --warmup-steps 3 "
    "--log-every 1"
).split()
LONG = "--epochs 6 --dropout 0.1 --save-every 7 --eval-every 11 --lr 1e-3".split()
PATIENCE = 300  # seconds: no test depends on it, but one that fails ends
GPUS = torch.cuda.device_count()
CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


# ---- Start processes, and leave none ----
MARK = str(os.getpid())  # in the environment of all that is started here


def sweep(is_left):
    """Kill what carries a mark that is_left, remove its namespaces. Returns the commands."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            mark = re.search(rb"(?:^|\0)DDP_TEST=(\d+)\0", environ.read_bytes())
            if mark and is_left(mark[1].decode()):
                found.append(environ.with_name("cmdline").read_text())
                os.kill(int(environ.parts[2]), signal.SIGKILL)
    for name in os.listdir("/run/netns") if os.path.isdir("/run/netns") else ():
        if (mark := re.match(r"ddp-(\d+)-.$", name)) and is_left(mark[1]):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return found


def die_with_parent():
    if LINUX:
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)


@pytest.fixture(scope="session", autouse=True)
def session(tmp_path_factory):
    """Remove what a suite that was killed left, and at the end whatever is left of this one."""
    sweep(lambda mark: not os.path.exists(f"/proc/{mark}"))
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
    left = [command for command in sweep(MARK.__eq__) if "multiprocessing" not in command]
    util._run_finalizers()  # now, as its folder will go with pytest's
    assert not left, left


FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch._dynamo", "test_ddp_train"])


def die_with_fork_server():  # which ends when the last that holds this file has ended
    die_with_parent()
    os.close(forkserver._forkserver._forkserver_alive_fd)


def forked(output, command, env):
    die_with_fork_server()
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)  # the fork server has read OMP_NUM_THREADS, maybe another one
    _ = [os.dup2(output.fileno(), fd) for fd in (1, 2)]
    output.close()
    sys.argv = command[1:]
    ddp_train.SCRIPT = Path(command[1]).name
    runpy.run_path(command[1], run_name="__main__")


class Forked(multiprocessing.context.ForkServerProcess):
    """`python script ...` with the face of Popen, forked from a process that has imported torch:
    that saves two seconds of a core. What only the interpreter's exit shows is tested with it."""

    returncode = property(lambda self: self.exitcode)
    wait = multiprocessing.Process.join


RUNNING = []


def start(*command, env=None):
    """A process in a session of its own, of which nothing is left after the test."""
    env, command = {**os.environ, **(env or {})}, [str(c) for c in command]
    if LINUX and command[0] == PYTHON and command[1][0] == "/":
        reading, writing = FORK.Pipe(duplex=False)
        p = Forked(target=forked, args=(writing, command, env))
        p.start()
        writing.close()
        p.stdout = open(os.dup(reading.fileno()))
    else:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        apart = {"start_new_session": True, "preexec_fn": die_with_parent}
        p = subprocess.Popen(command, env=env, stderr=subprocess.STDOUT, **pipes, **apart)
    with contextlib.suppress(OSError):  # F_SETPIPE_SZ: what nobody reads blocks soon, so that a
        fcntl.fcntl(p.stdout, 1031, 4096)  # run cannot end before it is told to
    RUNNING.append(p)
    return p


def hit(pids, signum):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def kill(p):
    hit([*tree(p.pid), p.pid, -p.pid], signal.SIGKILL)  # -: its process group


@pytest.fixture(autouse=True)
def nothing_runs_on():
    yield
    while RUNNING:
        p = RUNNING.pop()
        if p.returncode is None:
            kill(p)
            p.wait()
        p.stdout.close()


def finish(p):
    """The rest of its output, when it has ended."""
    late = threading.Timer(PATIENCE, kill, [p])
    late.start()
    printed = re.sub(r"\[Gloo\] Rank .*\n", "", p.stdout.read())  # what torch 2.9 says of its own
    p.wait()
    assert late.is_alive(), f"still running:\n{printed}"
    late.cancel()
    return printed


def run(*command, code=0, env=None):
    printed = finish(p := start(*command, env=env))
    assert code is None or p.returncode == code, f"exit code {p.returncode}\n{printed}"
    return printed


def by_hand(world, *command, **env):
    """`world` processes with the environment that torchrun would make; one without any if it is 1.
    What is callable in the command is called with the rank."""
    of = lambda rank: [c(rank) if callable(c) else c for c in command]
    if world == 1:
        return [start(PYTHON, *of(0), env=env)]
    home = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {"WORLD_SIZE": str(world), "LOCAL_RANK": "0", **home, **env}
    return [start(PYTHON, *of(r), env={"RANK": str(r), **env}) for r in range(world)]


def finish_all(processes, code=0):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        outs = list(pool.map(finish, processes))
    assert {p.returncode for p in processes} == {code}, outs
    return outs


def ranks(world, *command, code=0, **env):
    """Run them; each exits with `code`. Returns what each printed."""
    return finish_all(by_hand(world, *command, **env), code)


def torchrun(nproc, *more):
    launcher = PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"
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
    hit(pids(p), signum)
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


def logged(out, name="loss"):
    return {m["step"]: m[name] for m in metrics(out, name)}


def load(out, name="checkpoint.pt"):
    return torch.load(Path(out) / name, weights_only=True)


def moment(out):
    """Adam's first, as one vector: after the first step a tenth of its gradient."""
    states = load(out)["optimizer"]["state"].values()
    return nn.utils.parameters_to_vector(state["exp_avg"] for state in states)


def assert_same(a, b):
    """The same keys, values and bits, but for the command line."""
    bare = lambda state: {**state, "args": 0} if "args" in state else state
    leaves, other = (dict(pytree.tree_flatten_with_path(bare(state))[0]) for state in (a, b))
    assert leaves.keys() == other.keys()
    for at, x in leaves.items():
        assert torch.equal(x, other[at]) if isinstance(x, torch.Tensor) else x == other[at], at


def assert_same_run(a, b):
    """Two runs ended with bit-identical weights, optimizer and logged numbers."""
    assert_same(load(a), load(b))
    keep = lambda out: [{k: v for k, v in m.items() if k != "bytes/s"} for m in metrics(out)]
    assert keep(a) == keep(b)


# ---- What most tests are given ----
def shared(name, make):
    """A folder that make(folder) fills once for all processes of the suite."""
    base = Path(tempfile.tempdir).parents["PYTEST_XDIST_WORKER" in os.environ]
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / name).exists():
            make(base / f"{name}.new")
            os.rename(base / f"{name}.new", base / name)
    return base / name


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Something to learn: 250 windows to train on, 13 held out, which 3 and 4 do not divide."""
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
def main(capfd):
    """main(...): it succeeds, ends with that code, or with a line about that error. Its output."""
    old = {s: signal.getsignal(s) for s in ddp_train.SIGNALS}

    def call(*args, code=0, error=None):
        try:
            got, text = ddp_train.main([str(a) for a in args]) or 0, ""
        except SystemExit as e:
            got, text = (1, f"{e.code}\n") if isinstance(e.code, str) else (e.code, "")
        printed = "".join(capfd.readouterr()) + text
        assert got in (1, 2) if error else got == code, printed
        assert "Traceback" not in printed and printed.count(": error: ") == bool(error), printed
        assert (error or "") in printed.partition(f"{ddp_train.SCRIPT}: error: ")[2], printed
        return printed

    yield call
    for s, handler in old.items():
        signal.signal(s, handler)


def losing(monkeypatch, f):
    """The loss of the n-th forward pass of the training becomes f(n, loss, output)."""
    calls, original = itertools.count(1), ddp_train.loss_fn
    changed = lambda o, y: f(next(calls), original(o, y), o) if o.requires_grad else original(o, y)
    monkeypatch.setattr(ddp_train, "loss_fn", changed)


# ---- Workers: this file as a script, one rank of several ----
def worker(out, *argv):
    """Train, watched from inside: what rank r saw is in out/seen.r."""
    seen = {k: [] for k in "buckets at_step weights indices draws threads".split()}
    seen |= {"grads": {}, "eval": {}}
    args = ddp_train.parse_args(argv)
    world = ddp_train.init_distributed(args.device)
    fetch, ddp_class = ddp_train.TensorDataset.__getitem__, ddp_train.DistributedDataParallel

    def watched_ddp(*args, **kwargs):
        ddp = ddp_class(*args, **kwargs)
        ddp.register_comm_hook(None, watch_bucket)
        return ddp

    def watch_bucket(state, bucket):
        seen["buckets"].append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    def watch_step(optimizer, *_):
        seen["at_step"].append(len(seen["buckets"]))
        params, vector = optimizer.param_groups[0]["params"], nn.utils.parameters_to_vector
        seen["weights"].append(zlib.crc32(vector(params).detach().numpy()))
        if (step := len(seen["at_step"])) in (1, 32):
            seen["grads"][step] = vector(p.grad for p in params)

    def watch_draws(module, _):  # the next random numbers, of which dropout takes some
        if module.training and isinstance(module, ddp_train.ByteTransformer):
            seen["draws"].append(zlib.crc32(torch.get_rng_state().numpy()))

    def fetched(self, index):
        if len(self) == 250:
            seen["indices"].append(index)
        return fetch(self, index)

    ddp_train.DistributedDataParallel, ddp_train.TensorDataset.__getitem__ = watched_ddp, fetched
    register_optimizer_step_post_hook(watch_step)
    nn.modules.module.register_module_forward_pre_hook(watch_draws)
    threads = lambda: len([*Path("/proc/self/task").glob("*")])
    score = lambda m, x, y: len(x) * torch.stack([ddp_train.loss_fn(m(x), y), torch.ones(())])
    with ddp_train.process_group(world):
        torch.manual_seed(1)
        model = ddp_train.ByteTransformer(1, 1, 16, 8, dropout=0.5)
        for n in (1, 2, 7, 101):
            some = torch.arange(n * 8 + 1).mul(37).to(torch.uint8).unfold(0, 9, 8)
            windows = ddp_train.TensorDataset(some[:, :-1], some[:, 1:])
            loader = ddp_train.make_loader(windows, 3, world)
            if n == 7:  # torch's own sampler will do as well
                sampler = DistributedSampler(windows, world.size, world.rank)
                loader = DataLoader(windows, 3, sampler=sampler)
            seen["eval"][n] = ddp_train.evaluate(model, loader, CPU, score).tolist()
        ddp_train.train(args, world, ddp_train.StopSignal())
        seen["threads"].append(threads())
        time.sleep(2 * (world.rank == 1))
        seen["ready"] = time.time()
    seen["left"] = time.time()
    seen["threads"].append(threads())
    torch.save(seen, Path(out, f"seen.{world.rank}"))


class NormedModel(nn.Sequential):
    """Batch norm over the 32 positions, then a frozen one; a part that only training uses; and, as
    in some modules, a tensor of an evaluation in training, which inference_mode would spoil."""

    def __init__(self, args):
        super().__init__(nn.Embedding(256, 256), nn.BatchNorm1d(32), nn.BatchNorm1d(32).eval())
        self.kept, self.helper = 1, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        if not torch.is_grad_enabled():
            self.kept = torch.ones((), device=x.device)
        return super().forward(x.long()) * self.kept + (self.helper if self.training else 0)


def faulty(kind, rank, *argv):
    """ddp_train with another model, a small disk, or a rank with something in its fourth step."""
    calls, original = itertools.count(), ddp_train.loss_fn  # call 0 is before the first step
    if kind == "bn":
        ddp_train.build_model = NormedModel
    if kind == "hang" and torch.__version__ < "2.7":  # there the limit of the start stays
        ddp_train.START_LIMIT = 10.0
    if kind == "raise":  # as a loading process that was forked before an error came
        fork = multiprocessing.get_context("fork")
        fork.Process(target=time.sleep, args=[PATIENCE], daemon=True).start()
    if kind.startswith("disk"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(kind[4:]), int(kind[4:])))

    def loss_fn(output, y):
        call = next(calls) if output.requires_grad else 0
        if kind == "sync":  # in steps 3 to 17 of 20, none of which logs
            torch.cuda.set_sync_debug_mode("error" if 3 <= call <= 17 else "default")
        mine = os.environ.get("RANK", "alone") == rank
        now = mine and call == 4
        if kind == "hang" and mine and call in (0, 4):  # after a start that takes its time
            time.sleep(10**6 if call else 4)
        if now and kind == "raise":
            raise type("ApiError", (Exception,), {"code": "limit"})("boom")
        return original(output, y) * (math.nan if now and kind == "nan" else 1)

    ddp_train.loss_fn = loss_fn
    ddp_train.main(argv)


def resuming(folder):
    """Resume 200 MB, and print how many bytes of memory of its own this process had more."""
    part = nn.ParameterDict({"weight": torch.full((50_000_000,), float(os.environ["RANK"]))})
    own = lambda: int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    with ddp_train.process_group(ddp_train.init_distributed("cpu")):
        checkpoint = Checkpoint(folder, {"part": part})
        dist.barrier()
        had = [own()]
        sys.setprofile(lambda *_: had.append(own()))  # at each call, and when it returns
        state = checkpoint.resume()
        sys.setprofile(None)
        assert state["step"] == 9 and part["weight"].eq(7).all()
    print(1024 * (max(had) - had[0]))


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
def same(data):
    """The same training at several world sizes, watched from inside, and its folders."""

    def make(base):
        for name, (world, args) in SAME.items():
            more = "--max-steps 60 --no-scale-lr" if name != "3x1x2" else "--dropout 0.1"
            more = [*args.split(), *more.split(), "--epochs", 2, "--data", data]
            run_worker(world, base / name, *more, launcher=torchrun(2) if name == "2x4" else ())

    base = shared("same", make)
    return {name: seen_by(world, base / name) for name, (world, _) in SAME.items()}, base


def test_same_training_at_any_world_size(same):
    """Step 32, the last of an epoch, has 2 samples for up to 4 processes."""
    seen, base = same
    reference, want = seen["1x8"][0], logged(base / "1x8")
    assert len(want) == 60 and want[60] < want[1]
    for name in LIKE_1x8:
        for rank, (step, limit) in itertools.product(seen[name], ((1, 1e-5), (32, 1e-3))):
            grads, expected = rank["grads"][step], reference["grads"][step]
            assert (grads - expected).norm() <= limit * expected.norm(), (name, step)
        assert logged(base / name) == pytest.approx(want, rel=1e-4), name
        norms = [logged(base / n, "grad_norm") for n in (name, "1x8")]
        assert norms[0] == pytest.approx(norms[1], rel=1e-2), name


def test_gradient_of_the_last_step_is_a_mean_over_its_samples(main, tiny, out):
    """The one step of this epoch has 250 samples for 300: torch's gradient of their mean loss."""
    main(*tiny, "--batch-size", 300, "--grad-clip", 0)
    args = ddp_train.parse_args([str(a) for a in tiny])
    train_set = ddp_train.load_data(args)[0]
    torch.manual_seed(args.seed)
    model = ddp_train.build_model(args)
    x, y = train_set[:]
    ddp_train.loss_fn(model(x), y).backward()
    expected = nn.utils.parameters_to_vector(p.grad for p in model.parameters())
    assert load(out)["step"] == 1 and torch.allclose(10 * moment(out), expected, 1e-4, 1e-6)


def test_same_evaluation_at_any_world_size(same):
    """Each of 1, 2, 7 and 101 samples once, without dropout; the same number for the log."""
    seen, base = same
    for n, expected in seen["1x8"][0]["eval"].items():
        for rank in itertools.chain(*seen.values()):
            assert rank["eval"][n] == pytest.approx(expected, rel=1e-6) and expected[1] == n
    held_out = logged(base / "1x8", "val_loss")
    assert len(held_out) == 2
    for name in LIKE_1x8:
        assert logged(base / name, "val_loss") == pytest.approx(held_out, rel=1e-4)


def test_each_sample_once_per_epoch_in_training(same):
    """250 windows on 3 processes: each once, and repeats to fill the last round; a new order."""
    seen, base = same
    per_rank = [rank["indices"][2:] for rank in seen["3x1x2"]]  # two are before step 1
    rows, round_up = list(itertools.chain(*zip(*per_rank, strict=True))), 252
    first, second = rows[:250], rows[round_up : round_up + 250]
    assert len(rows) == 2 * round_up and sorted(first) == sorted(second) == list(range(250))
    assert first != second
    state = load(base / "3x1x2")
    assert (state["epoch"], state["samples"], state["step"]) == (2, 0, 2 * -(-250 // 6))


def test_one_all_reduce_per_optimizer_step(same):
    """With accumulation over 2 micro-batches the hook is called for each bucket once a step."""
    for rank in same[0]["2x4"] + same[0]["3x1x2"]:
        per_step = {b - a for a, b in zip(rank["at_step"], rank["at_step"][1:])}
        assert per_step == {len(set(rank["buckets"]))}


def test_random_numbers(same):
    """The same weights on all ranks after each step; another dropout on each and at each step."""
    seen = same[0]["3x1x2"]
    assert len(seen[0]["weights"]) == 84
    assert all(rank["weights"] == seen[0]["weights"] for rank in seen)
    draws = [draw for rank in seen for draw in rank["draws"][1:]]  # [0] is before step 1
    assert len(draws) == len(set(draws)) == 3 * 2 * 84


def test_groups_end_cleanly(same):
    """Rank 1 came last, and all waited. A thread that is left can abort the exit: none is."""
    for name in ("2x4", "4x2", "3x1x2"):
        seen = same[0][name]
        assert min(rank["left"] for rank in seen) >= max(rank["ready"] for rank in seen)
        threads = [rank["threads"] for rank in seen]
        assert not LINUX or all(before - after >= 3 for before, after in threads), threads


def test_saved_names_and_learning_rate(same):
    """Names of the bare model. The rate scales with the processes, warms up, follows a cosine."""
    names = ddp_train.ByteTransformer(1, 2, 16, 32).state_dict().keys()
    for name in SAME:
        peak, total = (3 * 2e-3, 84) if name == "3x1x2" else (2e-3, 60)
        cosine = lambda step: (1 + math.cos(math.pi * step / total)) / 2
        rates = {step + 1: peak * min(1, (step + 1) / 3) * cosine(step) for step in range(total)}
        assert logged(same[1] / name, "lr") == pytest.approx(rates)
        assert load(same[1] / name)["model"].keys() == names


def test_workers_are_forked_once(main, tiny, out, monkeypatch):
    """A fork beside gloo's threads is a risk: one for each loader, not one for each epoch."""
    fork = mock.Mock(wraps=os.fork)
    monkeypatch.setattr(os, "fork", fork)
    main(*tiny, "--epochs", 3, "--eval-every", 5, "--workers", 1)
    assert fork.call_count == 2 and load(out)["epoch"] == 3


def test_resume_at_another_world_size(data, out):
    """4, then 2, then 1 process, each stopped in the middle of the epoch: every sample once."""
    seen = []
    for world, batch, stop in ((4, 3, 5), (2, 5, 12), (1, 7, 99)):
        more = "--data", data, "--batch-size", batch, "--max-steps", stop
        batches = [rank["indices"][2 * (world > 1) :] for rank in run_worker(world, out, *more)]
        seen += itertools.chain(*batches)
    assert sorted(seen) == list(range(250))


def test_loading_processes_of_each_rank_draw_numbers_of_their_own():
    class Noise(Dataset):
        __len__ = lambda self: 8
        __getitem__ = lambda self, i: torch.rand(()).item()
        collate = lambda self, items: set(items)

    worlds = (World(CPU, rank=rank, size=2) for rank in (0, 1))
    loaders = [ddp_train.make_loader(Noise(), 4, world, workers=1) for world in worlds]
    assert len(set.union(*(next(iter(loader)) for loader in loaders))) == 8


def test_evaluation_with_batch_norm_is_that_of_the_saved_model(tiny, out):
    """Rank 0's running means count: what two ranks log is what a plain program computes."""
    ranks(2, __file__, "faulty", "bn", "0", *tiny, "--eval-every", 20, "--lr", 0.1)
    args = ddp_train.parse_args([str(a) for a in tiny])
    held_out, model = ddp_train.load_data(args)[1], NormedModel(args)
    model.load_state_dict(load(out)["model"])
    assert [model[i].num_batches_tracked for i in (1, 2)] == [32, 0]
    x, y = held_out[:]
    with torch.no_grad():
        expected = ddp_train.loss_fn(model.eval()(x), y).item()
    assert logged(out, "val_loss")[32] == pytest.approx(expected, rel=1e-6)
    loader, score = ddp_train.make_loader(held_out, 4, World(CPU)), ddp_train.score
    summed = ddp_train.evaluate(model, loader, CPU, score)[0].item()
    assert summed / len(held_out) == pytest.approx(expected, rel=1e-6) and not model.training
    many = ddp_train.evaluate(model, loader, CPU, lambda *_: torch.tensor(2**24 + 1))
    assert many.item() == 4 * (2**24 + 1)


def test_model_is_causal():
    """What comes from byte t on changes nothing that is said before, in training and evaluation."""
    model, x = ddp_train.ByteTransformer(2, 2, 16, 12), torch.randint(256, (3, 12))
    for mode, t in itertools.product((True, False), (1, 5, 11)):
        other = torch.cat([x[:, :t], 255 - x[:, t:]], 1)
        changed = (model.train(mode)(x) - model(other)).abs().amax((0, 2))
        assert changed[:t].max() < 1e-6 and changed[t:].min() > 1e-4


def test_held_out_bytes_are_not_trained(tmp_path):
    """The last 5 % of a file, or of a folder's files in their order. A file is mapped, no copy."""
    (tmp_path / "folder/sub").mkdir(parents=True)
    (tmp_path / "folder/b").write_bytes(b"\1" * 421)
    (tmp_path / "folder/a").write_bytes(b"\0" * (8430 - 421))
    (tmp_path / "file").write_bytes(b"\0" * (8430 - 421) + b"\1" * 421)
    for where in ("folder", "file"):
        args = ddp_train.parse_args(["--data", str(tmp_path / where), "--seq-len", "32"])
        train, held_out, _ = ddp_train.load_data(args)
        assert (len(train), len(held_out)) == (250, 13)
        assert all(part.max() == 0 for part in train[:])
        assert all(part.min() == 1 for part in held_out[:])
    (tmp_path / "file").write_bytes(b"\2" * 8430)
    assert train[:][0].min() == 2  # mapped: what was read is no copy


# ---- Every way to start it ----
def test_started_by_hand_only_rank_0_speaks_and_saves(tiny, tmp_path):
    """Each with a folder of its own, as on machines without a shared disk."""
    folder = lambda r: tmp_path / f"{r}"
    outs = ranks(3, SCRIPT, *tiny, "--out", folder, "--max-steps", 3)
    assert "3 process(es) on 1 node(s)" in outs[0] and "done: step 3" in outs[0]
    assert outs[1] == outs[2] == "" and (folder(0) / "checkpoint.pt").exists()
    assert not [*folder(1).iterdir(), *folder(2).iterdir()]
    # A local rank of one's choice; where the ranks meet, said on the command line.
    for steps, url in (4, f"tcp://127.0.0.1:{free_port()}"), (5, f"file://{tmp_path}/meet"):
        more = "--out", folder(0), "--max-steps", steps, "--init-method", url
        outs = ranks(2, SCRIPT, *tiny, *more, LOCAL_RANK="1", MASTER_ADDR="", MASTER_PORT="")
        assert f"going on from step {steps - 1}" in outs[0] and outs[1] == ""


def test_restarted_ranks_find_each_other():
    """torchrun's store keeps what ranks left there. Rank 1, back first, must not believe it."""
    store, names = dist.HashStore(), set()
    meet = lambda rank, s=PATIENCE: ddp_train.fresh_prefix(store, rank, 2, timedelta(seconds=s))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for n in range(1, 4):
            names |= set(pool.map(meet, (1, 0)))
            assert len(names) == n
            with pytest.raises(RuntimeError, match="not all ranks came"):
                meet(1, 0.2)


@pytest.mark.parametrize("more", [[], pytest.param(["--use_env"], marks=pytest.mark.faults)])
def test_two_nodes_on_loopback(tiny, tmp_path, more):
    """Two agents, one by the old launcher: node 1's local rank 0 leaves its folder alone."""
    port = free_port()

    def agent(r, *launcher):
        home = f"--node_rank={r}", "--master_addr=127.0.0.1", f"--master_port={port}"
        launcher = PYTHON, "-m", *launcher, "--nnodes=2", "--nproc_per_node=1"
        return start(*launcher, *home, SCRIPT, *tiny, "--out", tmp_path / f"{r}", "--max_steps", 3)

    old = agent(1, "torch.distributed.launch", *more)
    outs = finish_all([agent(0, "torch.distributed.run"), old])
    assert "2 process(es)" in outs[0] and "done" in outs[0] and "done" not in outs[1]
    assert (tmp_path / "0/checkpoint.pt").exists() and not list(tmp_path.glob("1/*"))


def test_run_single(tiny, tmp_path):
    """By --spawn. Each of two processes gets half of the cores; a signal to the process that was
    started is one to them, SIGUSR1 too where torchrun can be told so. The next run finishes."""
    can = "signals" in get_args_parser().format_help()
    signum = int(signal.SIGUSR1 if can else signal.SIGTERM)
    cores = len(os.sched_getaffinity(0)) if LINUX else os.cpu_count()
    env = {"PYTHON": PYTHON, "NPROC": "2", "NPROC_PER_NODE": "7"}
    command = "env", "-u", "OMP_NUM_THREADS", SINGLE, *tiny, *LONG, "--out", tmp_path / "a b"
    p = start(*command, env=env)
    printed = read_until(p, "step 5/")
    for pid in pids_of_ranks(p.pid) if LINUX else ():
        environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert f"OMP_NUM_THREADS={max(1, cores // 2)}" in environ
    hit([p.pid], signum)
    printed += finish(p)
    assert p.returncode and printed.count(f"stopped by signal {signum}") == 1, printed
    assert "2 process(es) on 1 node(s)" in printed and load(tmp_path / "a b")["step"] >= 5
    assert "done" in run(*command, env=env) and load(tmp_path / "a b")["epoch"] == 6
    assert "NPROC=x" in run(SINGLE, code=2, env={"NPROC": "x"})


def test_run_multi_node():
    """What it refuses, and what it tells torchrun, gloo and NCCL."""
    home = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    home |= {"PYTHON": PYTHON, "NNODES": "2"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for env, says in (
            ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
            ({"MASTER_ADDR": "no.such.host.invalid"}, "does not resolve"),
            ({"NNODES": "two"}, "NNODES=two"),
            ({"NODE_RANK": "1"}, "must be NODE_RANK=0"),
            ({"NODE_RANK": "0", "NNODES": "1:2"}, "NODE_RANK"),
            ({"MASTER_PORT": port}, f"port {port} is taken"),
        ):
            assert says in run(MULTI, code=2, env=home | env)
    dry = lambda *args, **env: run(MULTI, *args, env=home | {"DRY_RUN": "1"} | env)
    told = dry("--epochs", 3, MASTER_ADDR="localhost", GLOO_SOCKET_IFNAME="mine")
    assert all(word in told for word in ("GLOO_SOCKET_IFNAME=mine", "is_host=true", "--epochs 3"))
    told = dry("--out", "a:b", "c d", NPROC_PER_NODE="1")
    assert "--timeout" not in told and "--out a:b c\\ d" in told
    assert re.search("GLOO_SOCKET_IFNAME==?lo", told) and "--nproc-per-node=1" in told
    assert re.search("NCCL_SOCKET_IFNAME==?lo", told) and "--local-addr=127.0.0.1" in told
    assert "--timeout 20" in dry(NNODES="1:2")
    assert "--timeout 20" not in dry("--timeout", 9, NNODES="1:2")


# ---- One process: options, output, bad input ----
def test_output_finish_and_extend(main, tiny, out):
    common, steps = [*tiny, "--seed", 2**31 - 1], lambda: [m["step"] for m in metrics(out)]
    assert "--no-scale-lr " in main("--help")
    text = main(*common, "--max_steps=4", "--eval-every", 2)
    assert "done: step 4" in text and "checkpoint.pt" in text and "step 3/4" in text
    assert steps() == [1, 2, 2, 3, 4, 4] and list(logged(out, "val_loss")) == [2, 4]
    keys = {"step", "loss", "lr", "grad_norm", "bytes/s"}
    assert all(m.keys() == keys for m in metrics(out, "loss"))
    last = metrics(out)[-1]
    assert last["bits_per_byte"] == pytest.approx(last["val_loss"] / math.log(2))
    state, before = load(out), (out / "checkpoint.pt").read_bytes()
    assert (state["step"], state["epoch"], state["samples"]) == (4, 0, 16)
    for _ in range(2):  # nothing is left to do: the same lines again
        text = main(*common, "--max-steps", 4)
        assert "done" in text and "--epochs" in text and steps() == [1, 2, 2, 3, 4, 4]
        assert (out / "checkpoint.pt").read_bytes() == before
    with open(out / "metrics.jsonl", "ab") as f:
        f.write(b'{"step": 4, \xff}\n{"step": 5, "loss": 1.0, "lr"')
    assert "going on from step 4" in main(*common, "--max-steps", 6) and load(out)["step"] == 6
    assert steps() == [1, 2, 2, 3, 4, 5, 6, 6]
    main(*common, "--epochs", 1, "--save-every", 63)
    state = load(out)
    assert (state["step"], state["epoch"], state["samples"]) == (63, 1, 0)
    main(*common, "--epochs", 2)
    assert "from step 126 to 126" in main(*common, "--epochs", 1, "--batch-size", 1)


def test_logged_loss_is_the_mean_of_all_elements_since_the_last_line(main, tiny, tmp_path):
    """The last step of the epoch has 2 samples, the others 4."""
    rare = "--log-every", 1000, "--save-every", 7, "--eval-every", 11
    main(*tiny, "--out", tmp_path / "a")
    main(*tiny, "--out", tmp_path / "b", *rare)
    each = [loss for loss in logged(tmp_path / "a").values() for _ in range(4)][:250]  # by sample
    lines, last = logged(tmp_path / "b"), 0
    assert set(lines) == {*range(7, 64, 7), *range(11, 64, 11)}
    for step, loss in lines.items():
        since, last = each[4 * last : 4 * step], step
        assert loss == pytest.approx(sum(since) / len(since), rel=1e-12)


def test_seed(data, tmp_path):
    """Weights, which such a rate does not change, order and dropout of three steps follow it."""
    more = "--data", data, "--max-steps", 3, "--lr", 1e-99, "--seed"
    a, b, c = (run_worker(1, tmp_path / f"{i}", *more, i // 2)[0] for i in range(3))  # 0, 0, 1
    for name in ("weights", "indices", "draws"):
        assert len(a[name]) > 0 and a[name] == b[name] != c[name], name


def test_progress_bar_and_tensorboard(main, tiny, out, monkeypatch):
    """At a terminal a bar instead of lines; numbers for TensorBoard where that is installed."""
    pytest.importorskip("tqdm")
    board = mock.Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    text = main(*tiny, "--max-steps", 3)
    assert "3/3 [" in text and "done" in text
    add = board.SummaryWriter.return_value.add_scalar
    assert {(c[0][0], c[0][2]) for c in add.call_args_list} >= {("loss", 1), ("val_loss", 3)}
    add.side_effect = OSError(28, "No space left")
    main(*tiny, "--max-steps", 5, error="No space left")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_mixed_precision(main, tiny, out, monkeypatch, precision):
    """Clipped after unscaling: before it, 65,536 times less would be left."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    kinds = []
    losing(monkeypatch, lambda n, loss, output: kinds.append(output.dtype) or loss)
    more = "--precision", precision, "--grad-clip", 1e-3, "--max-steps"
    assert precision in main(*tiny, *more, 1)
    assert moment(out).norm() == pytest.approx(1e-4, rel=0.1)
    main(*tiny, *more, 12)
    assert kinds == [kind] * 12 and (last := moment(out)).norm() < 1.001e-3  # none was longer
    assert all(0.01 < norm < 100 for norm in logged(out, "grad_norm").values())
    assert {v.dtype for v in load(out)["model"].values()} == {torch.float32}
    # Go on in another precision, without clipping.
    main(*tiny, "--precision", "fp16", "--max-steps", 13, "--grad-clip", 0)
    norm = 10 * float((moment(out) - 0.9 * last).norm())
    assert logged(out, "grad_norm")[13] == pytest.approx(norm, rel=1e-4)


def test_scale_is_resumed(main, tiny, out, monkeypatch):
    """An overflow halves it; it stays so when the run goes on. A hundred of them end the run."""
    losing(monkeypatch, lambda n, loss, output: loss * (1e36 if n == 2 or n > 5 else 1))
    for steps in (3, 5):
        main(*tiny, "--max-steps", steps, "--precision", "fp16")
        scaler = load(out)["scaler"]
        assert (scaler["scale"], scaler["_growth_tracker"]) == (2**15, steps - 2)
    rare = "--log-every", 10, "--save-every", 1000, "--epochs", 9
    main(*tiny, "--precision", "fp16", *rare, error="not finite at step")


@pytest.mark.parametrize("at, kind", [(1, "loss"), (7, "loss"), (7, "gradient")])
def test_loss_or_gradient_that_is_not_finite(main, tiny, out, monkeypatch, at, kind):
    """Nothing of it is saved, and the step is named. The gradient of a root at 0 is not finite."""
    root = lambda output: (output.sum() * 0).sqrt()
    bad = lambda loss, output: loss * math.nan if kind == "loss" else loss + root(output)
    losing(monkeypatch, lambda n, loss, output: bad(loss, output) if n == at else loss)
    main(*tiny, "--log-every", 5, "--save-every", 5, error=f"not finite at step {at},")
    assert (out / "checkpoint.pt").exists() == (at == 7)
    if at == 7:
        assert load(out)["step"] == 5
        assert all(v.isfinite().all() for v in load(out)["model"].values())


def test_loss_that_is_not_finite_on_one_rank_stops_all(tiny, out):
    more = *tiny, "--save-every", 3
    printed = "".join(ranks(2, __file__, "faulty", "nan", "1", *more, code=1))
    assert printed.count("not finite at step 4,") == printed.count("error: ") == 1
    assert load(out)["step"] == 3


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.faults)])
def test_compile(main, tiny, tmp_path, monkeypatch, backend):
    """Whole batches go through what torch.compile made; numbers and names stay the same."""
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("it needs a C++ compiler")
    compiled, rows = torch.compile, []

    def counting(model, *args, **kwargs):
        net = compiled(model, *args, backend=backend, **kwargs)
        return lambda x: rows.append(len(x)) or net(x)

    monkeypatch.setattr(torch, "compile", counting)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    a, b = tmp_path / "a", tmp_path / "b"
    main(*tiny, "--out", a, "--compile")  # the last of its 63 batches has 2 rows
    main(*tiny, "--out", b)
    assert rows == [4] * 62 and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert load(a)["model"].keys() == load(b)["model"].keys()
    assert logged(a) == pytest.approx(logged(b), rel=1e-4)


STARTS = "--backend smoke", "--backend nccl", "--init-method udp://x", "--init-method tcp://x"
BAD = {
    **dict.fromkeys(("--data /no/such", "--data=/no"), "No such file"),
    "--data EMPTY": "0 bytes",
    "--data SHORT": "60 bytes",
    "--dim 6 --heads 4": "divisible",
    "--sync-bn": "no CPU kernel",
    "--out /proc/no": "'/proc/no'",
    "--out FILE": "FILE'",
    **{f"{group} {start}": start for start in STARTS for group in ("", "RANK=0 WORLD_SIZE=1")},
    "RANK=0 LOCAL_RANK=99 --device cuda": "no GPU 99 among",
    "RANK=0": "MASTER_ADDR",
    "RANK=0 WORLD_SIZE=2": "MASTER_ADDR",
    "RANK=2 WORLD_SIZE=2": "RANK < WORLD_SIZE",
    "RANK=x WORLD_SIZE=2": "'x'",
    "WORLD_SIZE=2": "go together",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=TAKEN": "already in use",
    "RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=FREE": "rank 1 cannot start",
}
NOT_NUMBERS = (
    "lr 0, lr -1, lr nan, lr inf, batch-size 0, epochs -3, accum 0, max-steps 0, timeout 0, "
    "timeout 1e15, spawn 0, workers -1, seq-len 0, seed 99999999999, grad-clip -1, batch-size x, "
    "dropout 1, device tpu9, precision fp8, no-such-option"
)
BAD |= {f"--{bad}": f"--{bad.split()[0]}" for bad in NOT_NUMBERS.split(", ")}


def test_bad_input(main, tiny, out, tmp_path, monkeypatch, subtests):
    """One line, which names what is wrong: an option or, in capitals, a variable."""
    monkeypatch.setattr(ddp_train, "START_LIMIT", 1.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    known = {name: shlex.quote(str(tmp_path / name)) for name in ("EMPTY", "SHORT", "FILE")}
    for name, size in zip(known, (0, 60, 5)):
        (tmp_path / name).write_bytes(b"x" * size)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        known |= {"TAKEN": str(taken.getsockname()[1]), "FREE": str(free_port())}
        for given, says in BAD.items():
            given = re.sub("|".join(known), lambda name: known[name[0]], given)
            variables, dashes, options = given.partition("--")
            env = dict(variable.split("=") for variable in variables.split())
            with subtests.test(given), mock.patch.dict(os.environ, env):
                text = main(*tiny, "--timeout", 1, *shlex.split(dashes + options), error=says)
                assert text.count("\n") == 1 or "MASTER_PORT" in env  # torch logs sockets
                assert not out.exists()
    with pytest.raises(SystemExit, match="device gpu: no GPU 0"):
        ddp_train.init_distributed("gpu")
    monkeypatch.setattr(ddp_train, "gather", lambda _: [("a", {}), ("b", {"x": 1})])
    with pytest.raises(SystemExit, match=r"x is 1 on rank 1 \(b\), None on rank 0"):
        ddp_train.check_alike({})


def test_bad_input_on_all_ranks_and_on_one(tiny, data, tmp_path):
    """Two ranks say it once; where only rank 1 has it, both end, and both say whose it is."""
    printed = "".join(ranks(2, SCRIPT, *tiny, "--data", "/no/such", code=1))
    assert printed.count("No such file") == printed.count("\n") == 1
    changed = tmp_path / "changed"  # one bit
    changed.write_bytes(data.read_bytes().replace(b"dog", b"dof", 1))
    for option, usual, other, says in (
        ("--data", data, changed, "data of CRC-32"),
        ("--lr", "0.1", "0.5", "--lr is 0.5 on rank 1"),
        ("--data", data, os.fsdecode(b"/no/\xff"), "No such file"),
    ):
        outs = ranks(2, SCRIPT, *tiny, option, lambda r: (usual, other)[r], code=1)
        printed = "".join(outs)
        assert all(said.count("\n") <= 1 for said in outs), outs
        assert says in printed and "rank 1 (" in printed and "Traceback" not in printed, outs
        assert not (tmp_path / "out").exists()


# ---- Checkpoint ----
@pytest.mark.parametrize("links", [True, False])
def test_checkpoint_is_replaced_in_one_step(main, tiny, out, monkeypatch, links):
    """A reader finds the old one or the new one; without hard links, under one of two names."""
    seen, path, previous = [], out / "checkpoint.pt", out / "checkpoint.prev.pt"

    def watch(name, function):
        def call(*args, **kwargs):
            if name == "link" and not links:
                raise PermissionError("as exFAT does")
            function(*args, **kwargs)
            seen.append((name, path.exists(), path.exists() or previous.exists()))

        monkeypatch.setattr(os, name, call)

    main(*tiny, "--max-steps", 1)
    for name in ("replace", "unlink", "fsync", "link"):
        watch(name, getattr(os, name))
    main(*tiny, "--max-steps", 4, "--save-every", 1)
    names, there, either = zip(*seen)
    assert names.count("fsync") == 3 and names[0] == "fsync" and names.count("replace") >= 3
    assert all(either) and all(there) == links
    assert load(out)["step"] == 4 and load(out, previous.name)["step"] == 3


def test_checkpoint_has_the_weights_of_its_step(main, tiny, tmp_path, monkeypatch):
    """It is written while training goes on, here three steps later; the same as if waited for."""
    args = *tiny, "--max-steps", 9, "--save-every", 5, "--out"
    save, write, later = Checkpoint.save, torch.save, threading.Event()
    waited = lambda self, step, **values: [save(self, step, **values), self.wait()]
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", waited)
        main(*args, tmp_path / "a")
    monkeypatch.setattr(torch, "save", lambda *a: later.wait(PATIENCE) and write(*a))
    losing(monkeypatch, lambda n, loss, output: (n == 8 and later.set()) or loss)
    main(*args, tmp_path / "b")
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

    states = lambda parts: {name: part.state_dict() for name, part in parts.items()}
    first, second, run = parts(1), parts(2), {"size": 3}
    plain = {"epoch": 2, "best": [0.5, "text"], "noise": torch.arange(3)}
    checkpoint = Checkpoint(tmp_path, first, run)
    assert checkpoint.resume() == {}
    checkpoint.save(7, **plain)
    checkpoint.wait()
    state = Checkpoint(tmp_path, second, run).resume()
    assert_same(states(first), states(second))
    assert_same({k: state[k] for k in ("step", *plain)}, {"step": 7, **plain})
    assert state["generator"]._metadata == first["generator"].state_dict()._metadata
    for more, other, says in (
        ({}, {"width": 1}, "width None, this one has 1"),
        ({"critic": nn.Linear(1, 1)}, run, "has no 'critic'"),
        ({"discriminator": nn.Linear(4, 1)}, run, "^.* not fit 'discriminator', .*size mism.*$"),
        ({"optimizer_g": torch.optim.SGD([torch.ones(1)])}, run, "not fit 'optimizer_g'"),
    ):
        with pytest.raises(SystemExit, match=says):
            Checkpoint(tmp_path, parts(3) | more, other).resume()
    assert "damaged" not in capfd.readouterr().err
    with pytest.raises(TypeError, match="multiple values.*'generator'"):
        checkpoint.save(8, generator=1)
    buffers = len(checkpoint.buffers)
    for step in (8, 9):
        checkpoint.save(step, noise=torch.ones(step))
    assert len(checkpoint.buffers) == buffers  # those of the last save
    checkpoint.wait()
    checkpoint.save(10, **plain, path=tmp_path)  # which weights_only=True would refuse
    with pytest.raises(SystemExit, match="(?s)cannot save.*PosixPath"):
        checkpoint.wait()
    assert checkpoint.newest()[0] == 9 and not list(tmp_path.glob("*.tmp"))
    (tmp_path / "checkpoint.pt").unlink()
    (tmp_path / "checkpoint.pt").symlink_to("gone")
    step, path, problem = checkpoint.newest()
    assert (step, path.name) == (8, "checkpoint.prev.pt") and "No such file" in problem


def test_checkpoint_of_another_run(main, tiny, data, out, tmp_path):
    changed = tmp_path / "changed"
    changed.write_bytes(data.read_bytes().replace(b"quick", b"brisk"))
    main(*tiny, "--max-steps", 2)
    before = (out / "checkpoint.pt").read_bytes()
    for k, old in {"dim": 16, "heads": 2, "layers": 1, "seed": 0, "seq-len": 32}.items():
        says = f"is of a run with --{k} {old}, this one has 8: use another --out"
        assert main(*tiny, "--max-steps", 4, f"--{k}", 8, error=says).count("\n") == 1
    main(*tiny, "--max-steps", 4, "--data", changed, error="is of a run with data of CRC-32")
    assert (out / "checkpoint.pt").read_bytes() == before


def damaged(content, rng):
    """A bit flipped (half of all), cut off, a hole, garbage; a third of them at the end."""
    at = len(content) - 1 - rng.randrange(rng.choice((len(content), len(content), 4000)))
    hole = content[:at] + bytes(512) + content[at + 512 :]
    flip = bytearray(content)
    flip[at] ^= 1 << rng.randrange(8)
    return rng.choice([content[:at], hole, rng.randbytes(at % 3000), *[flip] * 3])


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.faults)])
def test_damaged_checkpoints(main, tiny, out, count):
    """Each is refused, or harmless, as a flip in the padding between records is."""
    seed = 0 if count == 50 else int(os.environ.get("SEED", random.randrange(10**6)))
    main(*tiny, "--max-steps", 4, "--save-every", 2)
    path, rng, steps = out / "checkpoint.pt", random.Random(seed), []
    good, states = path.read_bytes(), {4: load(out), 2: load(out, "checkpoint.prev.pt")}
    checkpoint = Checkpoint(out, {})
    for i in range(count):
        print(f"SEED={seed}, file {i}", flush=True)
        path.write_bytes(damaged(good, rng))
        step, newest, problem = checkpoint.newest()
        assert (step, newest.name) in ((4, "checkpoint.pt"), (2, "checkpoint.prev.pt"))
        assert ("damaged" in problem) == (step == 2)
        assert_same(load(out, newest.name), states[step])
        steps.append(step)
    assert steps.count(2) > 0.8 * count


def test_damaged_checkpoints_are_named_and_not_kept_as_the_one_before(main, tiny, out):
    main(*tiny, "--max-steps", 4, "--save-every", 2)
    path, previous = out / "checkpoint.pt", out / "checkpoint.prev.pt"
    path.write_bytes(b"not a checkpoint")
    names = "checkpoint.pt is damaged.*going on from .*checkpoint.prev.pt"
    assert re.search(f"warning: .*{names}", main(*tiny, "--max-steps", 4))
    assert (out / "checkpoint.damaged").read_bytes() == b"not a checkpoint"
    assert load(out)["step"] == 4
    assert not previous.exists() or load(out, previous.name)["step"] == 2
    main(*tiny, "--max-steps", 6, "--save-every", 2)
    assert load(out, previous.name)["step"] == 4
    # The entry of a weight in the directory at the end, which no CRC protects.
    good = path.read_bytes()
    at = 38 + re.search(rb"PK\x01\x02.{42}[^/]*/data/0", good, re.S).start()
    path.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])  # a "directory": torch
    assert Checkpoint(out, {}).newest()[0] == 4  # would take for the weights what is in memory
    for file in (path, previous):
        file.write_bytes(good[:-100])
    assert main(*tiny, "--max-steps", 9, error="nothing to go on from").count("\n") == 1
    assert path.read_bytes() == good[:-100]


def test_checkpoint_is_data_not_code(main, tiny, tmp_path):
    """Here, and as the file of a rank other than 0 on a disk of its own."""
    bomb, folders = tmp_path / "exploded", [tmp_path / "0", tmp_path / "1"]

    class Bomb:
        __reduce__ = lambda self: (os.mkdir, (str(bomb),))

    content = {"step": 10**6, "model": Bomb()}
    for folder, save in zip(folders, (pickle.dump, torch.save)):
        folder.mkdir()
        with open(folder / "checkpoint.pt", "wb") as f:
            save(content, f)
        main(*tiny, "--out", folder, error="not a checkpoint")
    outs = ranks(2, SCRIPT, *tiny, "--out", lambda r: [tmp_path / "new", folders[0]][r], code=1)
    printed = "".join(outs)
    assert "rank 1: " in printed and "not a checkpoint" in printed and printed.count("\n") == 1
    assert not bomb.exists()


@pytest.mark.skipif(not LINUX, reason="reads /proc/self/status")
def test_resume_keeps_one_copy_per_node(tmp_path):
    """200 MB, two ranks: on one disk, or on two of which rank 1's has it. Mapped is no copy."""
    path = tmp_path / "1/checkpoint.pt"
    path.parent.mkdir()
    torch.save({"step": 9, "run": {}, "part": {"weight": torch.full((50_000_000,), 7.0)}}, path)
    for folders in ("11", "01"):
        had = ranks(2, __file__, "resuming", lambda r: tmp_path / folders[r])
        assert sum(map(int, had)) < 1.1 * path.stat().st_size, had


def test_two_runs_into_one_folder(main, tiny, out):
    first = start(PYTHON, SCRIPT, *tiny, *LONG)
    read_until(first, "step 9/")  # soon it blocks, and keeps the folder
    assert main(*tiny, error="is in use by another run").count("\n") == 1


@pytest.mark.parametrize("size, save_every", [(50_000, 7), (5_000, 1000), (10**9, 7)])
def test_full_disk_or_read_only_folder(main, tiny, out, request, size, save_every):
    """A limit of the size of files is the full disk. 10**9: a folder read-only even to root."""
    freeze, thaw = ("chattr +i", "chattr -i") if os.geteuid() == 0 else ("chmod a-w", "chmod u+w")
    main(*tiny, *LONG, "--max-steps", 7)
    before = (out / "checkpoint.pt").read_bytes()
    if size == 10**9:
        if subprocess.run([*freeze.split(), out]).returncode:
            pytest.skip("root, and no chattr that works here")
        request.addfinalizer(lambda: subprocess.run([*thaw.split(), out], check=True))
    more = *tiny, *LONG, "--save-every", save_every
    outs = ranks(2, __file__, "faulty", f"disk{size}", "", *more, code=1)
    says = "the checkpoint before it is intact" if save_every == 7 else "File too large"
    assert "error: rank 0 (" in outs[0] and says in outs[0], outs
    assert "step 90/" not in outs[0] and "Traceback" not in "".join(outs), outs
    assert outs[1].count("\n") <= 1
    assert (out / "checkpoint.pt").read_bytes() == before and not (out / "checkpoint.tmp").exists()


# ---- Stop, kill, resume: the same bits ----
def untouched(data, world, *more):
    """The folder of the run that nobody touched."""
    command = SCRIPT, *TINY, *LONG, "--data", data, *more, "--out"
    return shared(f"untouched{world}{''.join(more)}", lambda out: ranks(world, *command, out))


@pytest.mark.parametrize(
    "case", "1 TERM step 25/, 1 USR1 from step 0, 3 INT step 25/, 2 TERM step 33/".split(", ")
)
def test_stop_and_resume_is_bit_identical(tiny, data, out, case):
    """A signal to one rank; in the middle of an epoch, at the start, before an evaluation. All
    leave together; the next start ends with the same bits. Three processes: DDP's order of
    summation matters. Two: torchrun, with restarts left, does not restart them."""
    world, name, line = case.split(" ", 2)
    world, signum = int(world), signal.Signals[f"SIG{name}"].value
    more = *tiny, *LONG, "--save-every", 10**6
    if world == 2:
        p = start(*torchrun(2, "--max-restarts=3"), SCRIPT, *more)
        printed = signalled(p, lambda p: pids_of_ranks(p.pid)[-1:], signum, line)
        assert p.returncode == 0
    else:
        processes = by_hand(world, SCRIPT, *more)
        printed = read_until(processes[0], line)
        os.kill(processes[-1].pid, signum)
        printed += "".join(finish_all(processes, 128 + signum))
    assert printed.count(f"stopped by signal {signum}") == 1, printed
    assert printed.count("process(es)") == 1 and "Traceback" not in printed
    step = int(re.search(r"stopped by .* step (\d+)", printed)[1])
    assert not step or load(out)["step"] == step
    again = ranks(world, SCRIPT, *tiny, *LONG)[0]
    assert not step or f"going on from step {step} " in again and f"step {step + 1}/" in again
    assert_same_run(out, untouched(data, world))


def test_stop_signal_to_the_launcher_and_during_evaluation(tiny, data, out):
    """Each step ends with an evaluation: it comes in one. Loading processes get it and live on."""
    more = "--eval-every", "1", "--workers", "1", "--epochs", "2"
    p = start(*torchrun(2), SCRIPT, *tiny, *LONG, *more)
    printed = signalled(p, lambda p: [*tree(p.pid), p.pid], signal.SIGTERM, "step 9/")
    assert printed.count("stopped by signal 15") == 1 and "DataLoader" not in printed, printed
    assert load(out)["step"] == int(re.search(r"stopped by .* step (\d+)", printed)[1])
    ranks(2, SCRIPT, *tiny, *LONG, *more)
    assert_same_run(out, untouched(data, 2, *more))


@pytest.mark.parametrize("last", [3, 9])
@pytest.mark.parametrize("killed", [True, False])
def test_killed_or_stopped_in_an_evaluation(main, tiny, out, monkeypatch, last, killed):
    """The steps before it are saved, and the next start evaluates."""
    common = *tiny, "--max-steps", last, "--eval-every", 3, "--save-every", 100
    save, evaluate = Checkpoint.save, ddp_train.evaluate
    told = lambda *a: os.kill(os.getpid(), signal.SIGTERM) or evaluate(*a)
    with monkeypatch.context() as patch:
        patch.setattr(ddp_train, "evaluate", (lambda *a: sys.exit("killed")) if killed else told)
        patch.setattr(Checkpoint, "save", lambda self, *a, **k: (save(self, *a, **k), self.wait()))
        main(*common, error="killed" if killed else None, code=0 if killed else 143)
    assert load(out)["step"] == 3 and not metrics(out, "val_loss")
    main(*common)
    assert list(logged(out, "val_loss")) == [*range(3, last + 1, 3)]


def test_reader_of_the_output_that_is_gone(tiny, out):
    """Ctrl-C on `... | tee log` ends the `tee`, too. The run still saves."""
    p = start(PYTHON, SCRIPT, *tiny, *LONG, "--save-every", 10**6)
    read_until(p, "step 5/")
    p.stdout.close()
    os.kill(p.pid, signal.SIGTERM)
    p.wait(PATIENCE)
    assert p.returncode == 128 + signal.SIGTERM and load(out)["step"] >= 5


@pytest.mark.parametrize("kills", [1, pytest.param(100, marks=pytest.mark.faults)])
def test_kill_9(data, tmp_path, kills):
    """torchrun starts the ranks again, or else we. The long form: any process, at any moment."""
    victims, first = ["rank 1"], 4
    if kills > 1:
        victims += ["rank 0", "loader", "agent", "all"]
        first = int(os.environ.get("SEED", random.randrange(10**6)))
    for seed in range(first, first + int(os.environ.get("KILLS", kills))):
        rng, out = random.Random(seed), tmp_path / str(seed)
        victim = rng.choice(victims)
        print(f"SEED={seed} KILLS=1: {victim}", flush=True)
        tiny, more = [*TINY, "--data", data, "--out", out], ("--workers", "1")
        p = start(*torchrun(2, "--max-restarts=3"), SCRIPT, *tiny, *LONG, *more)
        if rng.random() < 0.8:
            read_until(p, f"step {rng.randint(1, 175)}/|done")
        else:
            read_until(p, "OMP|process")
            time.sleep(rng.random() * 4)  # any moment of the start
        pids = pids_of_ranks(p.pid)
        loaders = [c for r in pids for c in children(r)]
        of = {"rank 0": pids[:1], "rank 1": pids[1:], "loader": loaders[:1], "agent": [p.pid]}
        hit(of.get(victim, [p.pid, *pids, *loaders]), signal.SIGKILL)
        printed = finish(p)  # until the last of them is gone: without torchrun the ranks die
        if p.returncode:
            printed += ranks(2, SCRIPT, *tiny, *LONG, *more)[0]
        assert "done" in printed, printed
        assert_same_run(out, untouched(data, 2))
        shutil.rmtree(out)


def test_ranks_die_with_torchrun(tiny, out):
    """Nobody could stop or restart them any more, and they would keep the folder."""
    p = start(*torchrun(2), SCRIPT, *tiny, *LONG)
    printed = signalled(p, lambda p: [p.pid], signal.SIGKILL, "step 30/")
    assert "stopped by" not in printed and "done" not in printed
    assert 21 <= load(out)["step"] < 192


def test_node_with_another_disk_catches_up(tiny, data, tmp_path):
    """A disk each, the newest on one: a node without it, or with a damaged one, gets a copy."""
    a, b, args = tmp_path / "a", tmp_path / "b", [*tiny, *LONG, "--out"]
    disks = lambda r: (a, b)[r]
    processes = by_hand(2, SCRIPT, *args, b)
    read_until(processes[0], "step 40/")
    os.kill(processes[1].pid, signal.SIGUSR1)
    finish_all(processes, 128 + signal.SIGUSR1)
    newest, step = (b / "checkpoint.pt").read_bytes(), load(b)["step"]
    for lacks, damaged in (a, newest[:-1]), (b, b""), (a, b""):
        shutil.rmtree(lacks, ignore_errors=True)
        lacks.mkdir()
        if damaged:
            (lacks / "checkpoint.pt").write_bytes(damaged)
        said = ranks(2, SCRIPT, *args, disks, "--max-steps", step)[0]
        assert f"going on from step {step}" in said and ("rank 0: " in said) == bool(damaged)
        assert (a / "checkpoint.pt").read_bytes() == (b / "checkpoint.pt").read_bytes() == newest
        assert not damaged or (a / "checkpoint.damaged").read_bytes() == damaged
    ranks(2, SCRIPT, *args, disks)
    assert_same(load(a), load(untouched(data, 2)))


@pytest.mark.faults
def test_clean_exits(tiny):
    """20 of 20: no abort of the interpreter, no torch warning about the group."""
    for _ in range(20):
        printed = run(*torchrun(2), SCRIPT, *tiny, "--max-steps", 5)
        assert not re.search("terminate called|Traceback|destroy_process_group", printed), printed


# ---- A rank that fails ----
def test_rank_that_raises(tiny):
    """Its traceback once and first, a line of the other; its children are not waited for."""
    command = __file__, "faulty", "raise", "1", *tiny, "--workers", 1
    printed = run(*torchrun(2), *command, code=1)
    lines = [line for line in printed.splitlines() if ": error: rank " in line]
    assert len(lines) == 2 and "rank 1 (" in lines[0] and "boom" in lines[0], printed
    assert "rank 0 (" in lines[1] and "before that, rank 1 (" in lines[1], printed
    assert printed.count("ApiError: boom") == 1, printed


def test_loading_processes_end_with_the_interpreter(tiny):
    """They ignore SIGTERM. A process that raises, as a child, too; a script that keeps a loader."""
    alone = PYTHON, __file__, "faulty", "raise", "alone", *tiny, "--workers", 1
    for launcher in ["env"], []:
        assert "ApiError: boom" in run(*launcher, *alone, code=1)
    script = """import ddp_train as dt
loader = dt.make_loader(range(9), 4, dt.World(dt.torch.device("cpu")), workers=2)
next(iter(loader))"""
    assert run("env", PYTHON, "-c", script) == ""


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_is_killed(tiny, victim):
    """The other ends at once; where gloo does not notice, as happens now and then, by --timeout."""
    processes = by_hand(2, SCRIPT, *tiny, *LONG, "--timeout", 60)
    read_until(processes[0], "step 5/")
    os.kill(processes[victim].pid, signal.SIGKILL)
    printed = finish(processes[1 - victim])
    assert processes[1 - victim].returncode == 1 and f"rank {1 - victim} (" in printed


@pytest.mark.parametrize("hangs", ["0", "1"])
def test_rank_that_hangs(tiny, hangs):
    """The others miss it after --timeout, though the start takes longer; it says where it was."""
    begin = time.monotonic()
    outs = ranks(2, __file__, "faulty", "hang", hangs, *tiny, "--timeout", 2, code=1)
    assert time.monotonic() - begin < 90  # not the 120 s of the start, nor the usual 600
    hung = outs[int(hangs)]
    assert "step 3/" in outs[0]
    assert "ended at" in hung and "in loss_fn" in hung, outs
    assert f"before that, rank {1 - int(hangs)} (" in hung, outs


# ---- Two hosts: network and UTS namespaces, a wire, no DNS; each is 127.0.1.1 to itself ----
@contextlib.contextmanager
def two_hosts(folder):
    """What a command begins with on host a, 10.77.0.1, and on host b, 10.77.0.2; `ip` on either."""
    names, prefixes = [f"ddp-{MARK}-{x}" for x in "ab"], []
    run_ip = lambda i, line: subprocess.run(["ip", "-n", names[i], *line.split()], check=True)
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        run_ip(0, f"link add wire type veth peer name wire netns {names[1]}")
        for i, name in enumerate(names):
            wire = f"addr add 10.77.0.{i + 1}/24 dev wire"
            for line in (wire, "link set lo up", "link set wire up"):
                run_ip(i, line)
            (folder / name).write_text(f"127.0.0.1 localhost\n127.0.1.1 host{'ab'[i]}\n")
            shell = f"hostname host{'ab'[i]}; mount --bind '{folder / name}' /etc/hosts; "
            shell += 'mount --bind /dev/null /etc/resolv.conf; exec "$@"'
            namespaces = f"ip netns exec {name} unshare --uts --mount sh -c".split()
            prefixes.append([*namespaces, shell, "sh"])
        yield prefixes, run_ip
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def hosts(tiny, tmp_path):
    """A function that starts MULTI on host 0 or 1, with the folder a or b as --out; `ip` on it."""
    probe = "unshare --net --uts --mount ip link add veth-probe type veth"
    if subprocess.run(probe, shell=True, capture_output=True).returncode:
        pytest.skip("needs root on Linux with `ip` and network namespaces")
    with two_hosts(tmp_path) as (prefixes, run_ip):

        def join(i, *args, **env):
            env = {"MASTER_ADDR": "10.77.0.1", "NNODES": "2", "PYTHON": PYTHON, **env}
            command = *prefixes[i], MULTI, *tiny, "--out", tmp_path / "ab"[i], *args
            return start(*command, env=env)

        yield join, run_ip


@pytest.mark.parametrize("first, nproc, ranked, name", [(1, 2, 0, "10.77.0.1"), (0, 1, 1, "hosta")])
def test_two_bare_hosts(hosts, tmp_path, first, nproc, ranked, name):
    """In either order, with NODE_RANK and without; host a may know itself by its name."""
    both = {}
    for i in (first, 1 - first):
        env = {"NPROC_PER_NODE": str(nproc), "MASTER_ADDR": "10.77.0.1" if i else name}
        env |= {"NODE_RANK": str(i)} if ranked else {}
        both[i] = hosts[0](i, "--max-steps", 3, **env)
    outs = finish_all([both[0], both[1]])
    printed = "".join(outs)
    assert f"{2 * nproc} process(es) on 2 node(s)" in printed and printed.count("done:") == 1
    assert "10.77.0.1 on wire" in outs[0] and "this node" in outs[0]
    assert "10.77.0.2 on wire leads to 10.77.0.1" in outs[1]
    saved = list(tmp_path.glob("*/checkpoint.pt"))
    assert len(saved) == 1 and (not ranked or saved == [tmp_path / "a/checkpoint.pt"])


@pytest.mark.faults
def test_nodes_that_do_not_meet(hosts):
    join, _ = hosts
    a, b = join(0, RDZV_TIMEOUT="12"), join(1, RDZV_TIMEOUT="12", NNODES="3")
    printed = finish(b), finish(a)
    assert "NNODES is 3 on this node, hostb, and 2 on 10.77.0.1" in printed[0], printed
    assert "only 1 of 2 nodes came within 12 s" in printed[1] and "Traceback" not in printed[1]
    assert b.returncode == 2 and a.returncode
    for env, says in (
        ({"RDZV_TIMEOUT": "2"}, "nobody serves 10.77.0.1:29500 after 2 s"),
        ({"MASTER_ADDR": "10.99.0.1"}, "no route"),
    ):
        b = join(1, **env)
        assert says in finish(b) and b.returncode == 2


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_elastic_node_leaves_and_returns(hosts, fault):
    """NNODES=1:2. Host b dies or loses its wire: a goes on alone. b returns: a takes it back. No
    sample is left out, and no more is trained again than lies between two checkpoints."""
    args = "--epochs", 2000, "--save-every", 20, "--log-every", 10
    join = lambda i: hosts[0](i, *args, NNODES="1:2", MAX_RESTARTS="9")
    a, b = join(0), join(1)
    printed = read_until(a, "2 process.* on 2 node") + read_until(a, r"step [4-9]\d/")
    if fault == "killed":
        kill(b)
    else:
        hosts[1](1, "link set wire down")
    printed += read_until(a, r"1 process\(es\) on 1 node.*going on from")
    printed += read_until(a, r"step \d+/")
    if fault == "cut":
        hosts[1](1, "link set wire up")
    join(1)
    printed += read_until(a, r"2 process\(es\) on 2 node.*going on from")
    worlds, saying = [], r"(\d) process\(es\) on .* from step (\d+) to (\d+)|step (\d+)/"
    step = done = per_step = last = 0  # done: the samples of all epochs; a step ends with its epoch
    for world, start, total, at in re.findall(saying, printed):
        if world:  # the steps that it has left tell the place it goes on from
            assert not worlds or 20 <= int(start) and last - int(start) <= 2 * 20, printed
            while step < int(start):
                step, done = step + 1, min(done + per_step, done - done % 250 + 250)
            worlds.append(int(world))
            per_step = 4 * int(world)
            later = (1999 - done // 250) * math.ceil(250 / per_step)
            assert int(total) == step + math.ceil((250 - done % 250) / per_step) + later, printed
        last = int(at or last)
    assert worlds == [2, 1, 2]


# ---- GPUs ----
@needs_gpu
@pytest.mark.parametrize(
    "options", ["--precision bf16", "--precision fp16", "--precision bf16 --compile", "--sync-bn"]
)
def test_nccl_with_one_rank(tiny, out, options):
    """--sync-bn with a model that has batch norm."""
    script = (__file__, "faulty", "bn", "") if "bn" in options else (SCRIPT,)
    args = *tiny, "--device", "cuda", "--max-steps", 20, "--lr", "3e-3", *options.split()
    assert "cuda" in run(*torchrun(1), *script, *args) and logged(out)[20] < logged(out)[1]
    weights = load(out)["model"].values()
    assert {v.dtype for v in weights if v.is_floating_point()} == {torch.float32}


@needs_gpu
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_processes_on_one_gpu(tiny, backend):
    args = *tiny, "--device", "cuda", "--max-steps", 10, "--backend", backend
    env = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    printed = run(*torchrun(2), SCRIPT, *args, code=None, env=env)
    if backend == "nccl" and "Duplicate GPU" in printed:
        pytest.skip("this NCCL refuses two ranks on one GPU")
    assert "2 process(es)" in printed and "done" in printed, printed


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_no_synchronization_in_the_loop(tiny, precision):
    """Between two log lines nothing waits for the GPU, also with DDP: torch raises if it does."""
    args = *tiny, "--device", "cuda", "--max-steps", 20, "--log-every", 20, "--precision", precision
    run(*torchrun(1), __file__, "faulty", "sync", "", *args)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])  # worker, faulty, resuming
