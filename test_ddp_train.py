"""Tests of ddp_train.py: they start the real thing, break it, and look at what it leaves.

    pytest test_ddp_train.py               the suite; what needs root, GPUs or a compiler skips elsewhere
    pytest -m faults test_ddp_train.py     the long form: many kills, many damaged files (SEED=... repeats one)
    pytest -s -m bench test_ddp_train.py   speed against the bare loop
"""
import concurrent.futures
import contextlib
import fcntl
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ddp_train

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "ddp_train.py"
TINY = "--device cpu --dim 16 --layers 1 --heads 2 --seq-len 32 --batch-size 4 --warmup-steps 3 --log-every 1".split()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """8,430 bytes with something to learn: 250 training windows of 32 and 13 held out, which 2, 3 and 4 processes cannot share evenly."""
    path = tmp_path_factory.mktemp("data") / "data.txt"
    path.write_bytes((b"the quick brown fox jumps over the lazy dog, %d times; " * 200)[:8430])
    return path


FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch._dynamo", "test_ddp_train"])


def forked(fifo, command, env):
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # the default of a process that Python starts itself
    os.environ.clear()
    os.environ.update(env)
    end = os.open(fifo, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(end, fd)
    os.close(end)
    sys.stdin, sys.stdout, sys.stderr = open(os.devnull), *(open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    sys.argv = command[1:]
    sys.path.insert(0, str(HERE))
    runpy.run_path(command[1], run_name="__main__")


class Forked:
    """`python script ...` with the face of subprocess.Popen, forked from a process that has imported torch already.

    That saves two seconds a process. What only a start by the launcher or the interpreter's exit can show is tested with those.
    """

    def __init__(self, command, env):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(HERE)):
            os.mkfifo(fifo := f"{folder}/output")
            self.process = FORK.Process(target=forked, args=(fifo, command, env))
            self.process.start()
            self.pid, self.stdout = self.process.pid, open(fifo)

    returncode = property(lambda self: self.process.exitcode)

    def send_signal(self, signum):
        os.kill(self.pid, signum)

    def wait(self, timeout=None):
        self.process.join(timeout)

    def communicate(self, timeout=None):
        output = []
        reader = threading.Thread(target=lambda: output.append(self.stdout.read()))
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired("forked", timeout)
        self.wait()
        return output[0], None


@contextlib.contextmanager
def start(*command, env=None, prefix=(), real=False, **kwargs):
    """A process in a session of its own, of which nothing is left afterwards."""
    full = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
    command = [*map(str, prefix), *map(str, command)]
    if sys.platform == "linux" and command[0] == sys.executable and command[1][0] == "/" and not (real or kwargs):
        p = Forked(command, full)
    else:
        p = subprocess.Popen(command, env=full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             start_new_session=True, stdin=subprocess.DEVNULL, **kwargs)
    with contextlib.suppress(OSError):  # F_SETPIPE_SZ: a run that nobody reads blocks soon, so it cannot end before it is told to
        fcntl.fcntl(p.stdout, 1031, 4096)
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


def run(*command, code=0, timeout=120, **kwargs):
    with start(*command, **kwargs) as p:
        try:
            out, _ = p.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill(p)
            raise AssertionError(f"still running after {timeout} s:\n{p.communicate(timeout=10)[0]}") from None
    assert code is None or p.returncode == code, f"exit code {p.returncode}\n{out}"
    return out


def by_hand(stack, world, *command, **env):
    """`world` processes with the environment that torchrun would make, each its own node: a disk and a name of its own.
    What is callable in the command is called with the rank."""
    port = str(free_port())
    return [stack.enter_context(start(sys.executable, *[c(r) if callable(c) else c for c in command], env={
        "RANK": str(r), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env})) for r in range(world)]


def run_ranks(world, *command, code=0, **env):
    """Runs them (one process without a group where world is 0 or 1), each exits with `code`. Returns what each printed."""
    if world < 2:
        return [run(sys.executable, *command, code=code, env=env)]
    with contextlib.ExitStack() as stack:
        processes = by_hand(stack, world, *command, **env)
        with concurrent.futures.ThreadPoolExecutor(world) as pool:
            outs = [out for out, _ in pool.map(lambda p: p.communicate(timeout=120), processes)]
    assert [p.returncode for p in processes] == [code] * world, outs
    return outs


def torchrun(nproc, *more):
    return [*TORCHRUN, "--standalone", f"--nproc_per_node={nproc}", *more]


def read_until(p, pattern):
    """Read lines of output up to one that matches; returns them all."""
    lines = []
    for line in p.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return "".join(lines)
    raise AssertionError(f"no {pattern!r} in:\n{''.join(lines)}")


def children(pid):
    try:
        return [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:
        return []


def tree(pid):
    return [d for c in children(pid) for d in (c, *tree(c))]


def ranks(launcher):
    """Pids of the training processes below torchrun, in order of rank."""
    return sorted(c for c in children(launcher) if "ddp_train" in Path(f"/proc/{c}/cmdline").read_text())


def metrics(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def losses(out):
    return {m["step"]: m["loss"] for m in metrics(out) if "loss" in m}


def load(out, name="checkpoint.pt"):
    return torch.load(Path(out) / name, weights_only=True)


def flat(value):
    """All tensors and numbers of a nested state, for comparing bit by bit."""
    if isinstance(value, dict):
        return [(f"{k}.{name}", v) for k, child in value.items() if k != "args" for name, v in flat(child)]
    if isinstance(value, (list, tuple)):
        return [(f"{i}.{name}", v) for i, child in enumerate(value) for name, v in flat(child)]
    return [("", value)]


def assert_same_run(a, b):
    """Two runs ended with bit-identical weights, optimizer and logged losses."""
    for (name, x), (other, y) in zip(flat(load(a)), flat(load(b)), strict=True):
        assert name == other and (torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y), name
    keep = lambda out: [{k: v for k, v in m.items() if k != "tokens_per_s"} for m in metrics(out)]
    assert keep(a) == keep(b)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def main(monkeypatch, capfd):
    """ddp_train.main in this process: (exit code, what it printed)."""
    old = {s: signal.getsignal(s) for s in ddp_train.SIGNALS}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def call(*args):
        try:
            code = ddp_train.main([str(a) for a in args])
        except SystemExit as e:
            code = e.code
        captured = capfd.readouterr()
        return code, captured.out + captured.err

    yield call
    for s, handler in old.items():
        signal.signal(s, handler)


# ---- A worker: this file under torchrun. It trains with ddp_train and writes down what it saw, a file for each rank. ----
def worker(out, *argv):
    trained, seen = [], {"grads": [], "buckets": [], "indices": [], "eval": {}, "dropout": [], "forks": []}
    os.register_at_fork(after_in_parent=lambda: seen["forks"].append(1))
    args = ddp_train.parse_args(argv)
    place = ddp_train.init_distributed(args.device)

    class Counted(ddp_train.ByteDataset):
        def __getitems__(self, indices):
            seen["indices"].append(list(indices))
            return super().__getitems__(indices)

    original_wrap, load_data = ddp_train.wrap, ddp_train.load_data

    def wrap(model, *rest):
        ddp = original_wrap(model, *rest)
        trained.append(model)
        seen["weights"] = float(sum(p.detach().double().abs().sum() for p in model.parameters()))
        model.drop.register_forward_hook(lambda m, i, o: seen["dropout"].append(int((o == 0).flatten().nonzero().sum())) if m.training else None)
        if dist.is_initialized():
            def hook(state, bucket):
                seen["buckets"].append(bucket.index())
                return default_hooks.allreduce_hook(state, bucket)
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
            ddp.register_comm_hook(None, hook)
        return ddp

    def counted_data(*a):
        train, held_out = load_data(*a)
        train.__class__ = Counted
        return train, held_out

    ddp_train.wrap, ddp_train.load_data = wrap, counted_data

    def first_gradient(optimizer, a, k):
        if not seen["grads"]:
            seen["grads"] = torch.cat([p.grad.flatten() for g in optimizer.param_groups for p in g["params"]]).tolist()
        seen.setdefault("buckets_of_steps", []).append(len(seen["buckets"]))

    register_optimizer_step_pre_hook(first_gradient)
    code = 0
    try:
        with ddp_train.process_group(place):
            torch.manual_seed(1)
            model = ddp_train.ByteTransformer(1, 1, 16, 8)
            for n in (1, 2, 7, 101):
                data = torch.randint(256, (n * 8 + 1,), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
                dataset = ddp_train.ByteDataset(data, 8)
                dataset.__class__ = Counted
                before = len(seen["indices"])
                loss = ddp_train.evaluate(model, ddp_train.make_loader(dataset, 3, range(place.rank, n, place.world_size), place), place)
                counted = ddp_train.gather(sum(seen["indices"][before:], []))
                seen["eval"][n] = (loss, sorted(sum(counted, [])) == list(range(n)))
                del seen["indices"][before:]
            ddp_train.train(args, place, ddp_train.StopRequest())
            seen["trained"] = [float(p.detach().double().sum()) for p in trained.pop().parameters()]
            if place.rank == int(os.environ.get("LATE_RANK", -1)):
                time.sleep(4)
            seen["ready"] = time.time()
    except SystemExit as e:
        code = e.code
    seen["left"] = time.time()
    seen["threads"] = [c for t in os.listdir("/proc/self/task") if "runloop" in (c := Path(f"/proc/self/task/{t}/comm").read_text())]
    Path(out, f"seen.{place.rank}.json").write_text(json.dumps(seen))
    sys.exit(code)


def faulty(kind, rank, *argv):
    """ddp_train in which one rank raises, hangs or has a loss of nan in its fifth micro-batch."""
    calls, original = itertools.count(1), ddp_train.loss_fn
    if kind == "stray":  # as a DataLoader worker that was forked, and an error came before it was noted down
        multiprocessing.Process(target=lambda: ddp_train.ignore_signals(0) or time.sleep(600), daemon=True).start()

    def loss_fn(output, target):
        if os.environ["RANK"] == rank and output.requires_grad and next(calls) == 5:
            if kind == "hang":
                while True:
                    time.sleep(60)
            if kind == "nan":
                return original(output, target) * math.nan
            raise ValueError("boom")
        return original(output, target)

    ddp_train.loss_fn = loss_fn
    sys.exit(ddp_train.main(argv))


def run_worker(nproc, out, *args, launcher=(), **env):
    out.mkdir(parents=True, exist_ok=True)
    command = __file__, "worker", out, "--out", out, *TINY, *args
    printed = run(*launcher, *command, env=env) if launcher else "".join(run_ranks(nproc, *command, **env))
    assert not re.search("Traceback|terminate called|Warning", printed.replace("OMP", "")), printed
    return [json.loads((out / f"seen.{r}.json").read_text()) for r in range(nproc or 1)]


SAME = {"1x8": (0, "--batch-size 8"), "2x4": (2, "--batch-size 4"), "4x2": (4, "--batch-size 2"), "1x2x4": (0, "--batch-size 2 --accum 4"),
        "3x1x2": (3, "--batch-size 1 --accum 2")}


@pytest.fixture(scope="session")
def same(data, tmp_path_factory):
    """The same training at several world sizes, watched from inside."""
    base = tmp_path_factory.mktemp("same")
    runs = {}
    for name, (nproc, args) in SAME.items():
        extra = "--epochs 2 --max-steps 60 --no-scale-lr" if name != "3x1x2" else "--epochs 2 --dropout 0.1"
        launcher = torchrun(nproc) if name in ("2x4", "3x1x2") else ()
        runs[name] = run_worker(nproc, base / name, "--data", data, *args.split(), *extra.split(), launcher=launcher, LATE_RANK="1"), base / name
    return runs


def test_same_training_at_any_world_size(same):
    reference = torch.tensor(same["1x8"][0][0]["grads"])
    for name in ("2x4", "4x2", "1x2x4"):
        for rank in same[name][0]:
            assert (torch.tensor(rank["grads"]) - reference).norm() <= 1e-5 * reference.norm(), name
        got, want = losses(same[name][1]), losses(same["1x8"][1])
        assert len(want) == 60 and got.keys() == want.keys()  # step 32, the last of an epoch, has 2 samples for up to 4 processes
        assert all(abs(got[s] - want[s]) <= 1e-4 * want[s] for s in want), name
    assert losses(same["1x8"][1])[60] < losses(same["1x8"][1])[1]


def test_same_evaluation_at_any_world_size(same):
    reference = same["1x8"][0][0]["eval"]
    for seen, _ in same.values():
        for rank in seen:
            for n, (loss, once) in rank["eval"].items():
                assert once, f"{n} samples on {len(seen)} processes"
                assert abs(loss - reference[n][0]) <= 1e-6 * reference[n][0]
    held_out = {name: [m["val_loss"] for m in metrics(out) if "val_loss" in m][0] for name, (_, out) in same.items()}
    assert held_out["4x2"] == pytest.approx(held_out["1x8"], rel=1e-4)


def test_each_sample_once_per_epoch_in_training(same, data):
    """250 windows on 3 processes: each once, but for the repeats that fill the last round; another order in epoch two."""
    n = len(ddp_train.load_data(data, 32)[0])
    assert n % 3 and n % 6
    epochs = []
    for epoch in range(2):
        per_rank = [sum(rank["indices"][1 :], []) for rank in same["3x1x2"][0]]  # [0] is the rehearsal before the first step
        size = -(-n // 3)
        rows = list(itertools.chain(*zip(*(r[epoch * size : (epoch + 1) * size] for r in per_rank))))
        assert sorted(rows[:n]) == list(range(n)) and len(rows) - n < 3
        epochs.append(rows[:n])
    assert epochs[0] != epochs[1]
    # The repeats count as nothing: the mean of an epoch that one process logs is the mean over n samples.
    assert load(same["3x1x2"][1])["epoch"] == 2 and load(same["3x1x2"][1])["step"] == 2 * -(-n // 6)


def test_one_all_reduce_per_optimizer_step(same):
    """With accumulation over 2 micro-batches the hook is called for each bucket once per step, not twice."""
    for seen, nproc in ((same["2x4"][0], 2), (same["3x1x2"][0], 3)):
        for rank in seen:
            steps = rank["buckets_of_steps"]
            per_step = [b - a for a, b in zip(steps, steps[1:])]
            assert set(per_step) == {len(set(rank["buckets"]))}, f"{nproc} processes"


def test_workers_are_forked_once(data, tmp_path):
    """A fork beside gloo's threads is a risk (see quiet): one for each loader, not one for each epoch and evaluation."""
    seen = run_worker(2, tmp_path, "--data", data, "--epochs", "3", "--eval-every", "5", "--workers", "1")
    assert [len(rank["forks"]) for rank in seen] == [2, 2] and load(tmp_path)["epoch"] == 3


def test_random_numbers(same):
    """The same weights on all ranks, before and after, a different dropout on each and at each step."""
    seen = same["3x1x2"][0]
    assert len({rank["weights"] for rank in seen}) == len({tuple(rank["trained"]) for rank in seen}) == 1
    masks = [rank["dropout"] for rank in seen]
    assert len({tuple(m[-20:]) for m in masks}) == 3
    assert len(set(masks[0])) > 20


def test_groups_end_cleanly(same):
    """After destroy_process_group no gloo thread is left: one that is ends the interpreter with an abort, now and then.
    run_worker has seen exit code 0 and no warning. Rank 1 reached its end 4 s after the others, and they waited for it."""
    for seen, _ in same.values():
        assert min(rank["left"] for rank in seen) >= max(rank["ready"] for rank in seen)
    assert all(rank["threads"] == [] for seen, _ in same.values() for rank in seen)


def test_sampler():
    n = 23
    def order(world, rank, epoch=0, at=0, seed=0):
        s = ddp_train.ResumableSampler(range(n), world, rank, seed=seed)
        s.set_epoch(epoch, at)
        assert len(list(s)) == len(s)
        return list(s)
    whole = order(1, 0)
    assert sorted(whole) == list(range(n)) and whole == order(1, 0)
    assert whole != order(1, 0, epoch=1) and whole != order(1, 0, seed=7)
    reference = torch.utils.data.DistributedSampler(range(n), 2, 1)  # the same order as torch's own
    assert list(reference)[:-1] == order(2, 1)[:-1]
    for world in (1, 2, 3, 5):
        for at in (0, 4, 9, 22):
            merged = list(itertools.chain(*zip(*(order(world, r, at=at) for r in range(world)))))
            assert merged[: n - at] == whole[at:] and len(merged) - (n - at) < world


# ---- Every way to start it ----
def test_started_by_hand_only_rank_0_speaks(data, tmp_path):
    outs = run_ranks(3, SCRIPT, *TINY, "--data", data, "--out", tmp_path, "--max-steps", 3)
    assert "3 processes on 3 nodes, gloo" in outs[0] and "done:" in outs[0]
    assert outs[1] == outs[2] == ""
    outs = run_ranks(2, SCRIPT, *TINY, "--data", data, "--out", tmp_path, "--max-steps", 4, LOCAL_RANK="1")  # a GPU of one's choice
    assert "2 processes on 1 node" in outs[0] and "going on from" in outs[0] and "step 3\n" in outs[0]


def test_restarted_ranks_find_each_other():
    """torchrun's store keeps what the ranks before a restart left in it. Rank 1, back first, must not take that for an answer."""
    store, names = dist.HashStore(), []
    for _ in range(3):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            one = pool.submit(ddp_train.generation, store, 1, 2, 20)
            time.sleep(0.1)  # enough to be misled; not needed to pass
            zero = pool.submit(ddp_train.generation, store, 0, 2, 20)
            assert one.result() == zero.result()
            names.append(one.result())
    assert len(set(names)) == 3
    for r in range(1, 1000):  # a thousand ranks: no key or value grows with their number
        store.set(f"hello/{r}", f"{r}")
    store = mock.Mock(wraps=store)
    with pytest.raises(RuntimeError, match="not all ranks came"):
        ddp_train.generation(store, 0, 1000, 0.5)
    assert max(len(str(arg)) for name in ("set", "add") for call in getattr(store, name).call_args_list for arg in call.args) < 40
    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        ddp_train.generation(dist.HashStore(), 0, 2, 0.2)


@pytest.mark.parametrize("more", [[], pytest.param(["--use_env"], marks=pytest.mark.faults)])
def test_old_launcher(data, tmp_path, more):
    base = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", "--nnodes=1", "--node_rank=0",
            "--master_addr=localhost", f"--master_port={free_port()}"]
    assert "2 processes" in run(*base, *more, SCRIPT, *TINY, "--data", data, "--out", tmp_path, "--max_steps", 2)


@pytest.mark.parametrize("method", ["env://", "file"])
def test_spawn(data, tmp_path, method):
    url = {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/rendezvous"}.get(method, method)
    printed = run(sys.executable, SCRIPT, *TINY, "--data", data, "--out", tmp_path / "out", "--max-steps", 2, "--spawn", 2, "--init-method", url)
    assert "2 processes on 1 node, gloo" in printed and printed.count("done:") == 1


def test_two_nodes_on_loopback_only_rank_0_saves(data, tmp_path):
    """Two agents with two processes each; each node has a folder of its own, and node 1's local rank 0 leaves it alone."""
    (tmp_path / "1").mkdir()
    port = free_port()
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(start(*TORCHRUN, "--nnodes=2", "--nproc_per_node=2", f"--node_rank={r}", "--master_addr=127.0.0.1",
                 f"--master_port={port}", SCRIPT, *TINY, "--data", data, "--out", tmp_path / str(r), "--max-steps", 3)) for r in (0, 1)]
        outs = [p.communicate(timeout=120)[0] for p in nodes]
    assert [p.returncode for p in nodes] == [0, 0], outs
    assert "4 processes on 2 nodes" in outs[0] and "done:" in outs[0] and "done:" not in outs[1]
    assert (tmp_path / "0/checkpoint.pt").exists() and not list(tmp_path.glob("1/*"))


def test_shell_scripts(data, tmp_path):
    env = {"PYTHON": sys.executable, "NPROC": "2", "OMP_NUM_THREADS": "1"}
    args = [*TINY, "--data", data, "--out", tmp_path / "a b", "--max-steps", 2]
    assert "2 processes on 1 node" in run(HERE / "run_single.sh", *args, env=env)
    for script in ("run_single.sh", "run_multi_node.sh"):
        run("bash", "-n", HERE / script)
    env = {"PYTHON": sys.executable, "NNODES": "2"}
    assert "MASTER_ADDR is not set" in run(HERE / "run_multi_node.sh", code=2, env=env)
    assert "does not resolve" in run(HERE / "run_multi_node.sh", code=2, env={**env, "MASTER_ADDR": "no.such.host.invalid"})
    assert "NNODES=two" in run(HERE / "run_multi_node.sh", code=2, env={**env, "MASTER_ADDR": "127.0.0.1", "NNODES": "two"})
    assert "must be NODE_RANK=0" in run(HERE / "run_multi_node.sh", code=2, env={**env, "MASTER_ADDR": "127.0.0.1", "NODE_RANK": "1"})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} is taken" in run(HERE / "run_multi_node.sh", code=2, env={**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    dry = run(HERE / "run_multi_node.sh", "--epochs", 3, env={**env, "MASTER_ADDR": "localhost", "DRY_RUN": "1", "GLOO_SOCKET_IFNAME": "mine"})
    assert "GLOO_SOCKET_IFNAME=mine" in dry and "is_host=true" in dry and "--epochs 3" in dry
    for nnodes, words, elastic in (("2", ["--out", "a:b"], False), ("1:2", [], True), ("1:2", ["--timeout", "9"], False)):
        dry = run(HERE / "run_multi_node.sh", *words, env={**env, "NNODES": nnodes, "MASTER_ADDR": "127.0.0.1", "DRY_RUN": "1"})
        assert ("--timeout 20" in dry) == elastic
    assert "NPROC=x" in run(HERE / "run_single.sh", code=2, env={"NPROC": "x"})


def test_import_has_no_side_effect(tmp_path):
    out = run(sys.executable, "-c", "import sys, signal; before = signal.getsignal(signal.SIGTERM); import ddp_train, torch; "
              "assert signal.getsignal(signal.SIGTERM) is before and not torch.distributed.is_initialized(); "
              "assert not {'tensorboard', 'torch._dynamo'} & set(sys.modules)", cwd=tmp_path, env={"PYTHONPATH": str(HERE)})
    assert out == "" and list(tmp_path.iterdir()) == []


# ---- One process: options, output, bad input ----
def test_help_and_underscores(main):
    code, text = main("--help")
    assert code == 0 and text.count("default") > 20
    for option in "data out epochs max-steps batch-size accum lr warmup-steps grad-clip seed precision compile sync-bn workers log-every eval-every " \
                  "save-every fresh device backend init-method spawn timeout layers heads dim seq-len dropout comm-hook sync-every".split():
        assert f"--{option}" in text
    args = ddp_train.parse_args(["--batch_size", "8", "--max_steps=5", "--data", "a_b", "--local_rank=1"])
    assert (args.batch_size, args.max_steps, args.data, args.local_rank) == (8, 5, "a_b", 1)


def test_output_finish_extend_fresh(main, data, tmp_path):
    common = [*TINY, "--data", data, "--out", tmp_path, "--seed", 2**31 - 1]
    code, text = main(*common, "--max-steps", 4, "--eval-every", 2)
    assert code == 0 and "bits per byte" in text and "checkpoint.pt" in text
    lines = metrics(tmp_path)
    assert [m["step"] for m in lines if "loss" in m] == [1, 2, 3, 4] and [m["step"] for m in lines if "val_loss" in m] == [2, 4]
    assert all(m.keys() == {"step", "loss", "lr", "tokens_per_s"} for m in lines if "loss" in m)
    assert lines[-1]["val_bits_per_byte"] == pytest.approx(lines[-1]["val_loss"] / math.log(2))
    state = load(tmp_path)
    assert state["step"] == 4 and state["model"].keys() == ddp_train.ByteTransformer(1, 2, 16, 32).state_dict().keys()
    before = (tmp_path / "checkpoint.pt").read_bytes()
    code, text = main(*common, "--max-steps", 4)
    assert code == 0 and "nothing left to do" in text and "--max-steps" in text and (tmp_path / "checkpoint.pt").read_bytes() == before
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, damaged}\n')
    code, text = main(*common, "--max-steps", 6)
    assert code == 0 and "going on from" in text and load(tmp_path)["step"] == 6 and [m["step"] for m in metrics(tmp_path)][-4:] == [4, 5, 6, 6]
    code, text = main(*common, "--max-steps", 2, "--fresh")
    assert code == 0 and load(tmp_path)["step"] == 2 and load(tmp_path / "old-1")["step"] == 6


def test_logged_loss_is_the_mean_of_all_elements(main, data, tmp_path):
    main(*TINY, "--data", data, "--out", tmp_path / "a")
    main(*TINY, "--data", data, "--out", tmp_path / "b", "--log-every", 1000, "--save-every", 7, "--eval-every", 11)
    per_step, n = losses(tmp_path / "a"), len(ddp_train.load_data(data, 32)[0])
    rows = {s: min(4, n - 4 * (s - 1)) for s in per_step}
    assert sum(rows.values()) == n and losses(tmp_path / "b") == {
        max(per_step): pytest.approx(sum(per_step[s] * rows[s] for s in per_step) / n, rel=1e-12)}


def test_learning_rate_scales_with_the_world(data, tmp_path, same):
    assert metrics(same["2x4"][1])[0]["lr"] == pytest.approx(2e-3 / 3)  # --no-scale-lr
    run_ranks(2, SCRIPT, *TINY, "--data", data, "--out", tmp_path, "--max-steps", 4, "--lr", 0.01)
    assert metrics(tmp_path)[0]["lr"] == pytest.approx(0.01 * 2 / 3)


def test_learning_rate(main, data, tmp_path):
    main(*TINY, "--data", data, "--out", tmp_path, "--max-steps", 40, "--lr", 0.01, "--warmup-steps", 10)
    lr = [m["lr"] for m in metrics(tmp_path) if "lr" in m]
    assert lr.index(max(lr)) in (8, 9) and lr[0] == pytest.approx(0.001) and lr[-1] < 1e-4
    assert lr[20] == pytest.approx(0.01 * (1 + math.cos(math.pi * 20 / 40)) / 2)


def test_mixed_precision(main, data, tmp_path):
    norms = []
    handle = register_optimizer_step_pre_hook(lambda o, a, k: norms.append(
        float(torch.nn.utils.get_total_norm([p.grad for g in o.param_groups for p in g["params"]]))))
    try:
        for precision in ("bf16", "fp16"):
            norms.clear()
            code, text = main(*TINY, "--data", data, "--out", tmp_path / precision, "--max-steps", 12, "--precision", precision, "--grad-clip", 1e-3)
            assert code == 0 and precision in text, text
            assert 0.9e-3 < norms[-1] < 1.1e-3  # clipped after unscaling: before it, 65,536 times less would be left
            assert all(v.dtype == torch.float32 for v in load(tmp_path / precision)["model"].values())
        code, text = main(*TINY, "--data", data, "--out", tmp_path / "bf16", "--max-steps", 14, "--precision", "fp16")
        assert code == 0 and "going on from" in text, text
    finally:
        handle.remove()


def test_fp16_stops_after_a_hundred_overflows(main, data, tmp_path, monkeypatch):
    monkeypatch.setattr(ddp_train, "loss_fn", lambda o, t: torch.nn.functional.cross_entropy(o.flatten(0, 1).float(), t.flatten()) * 1e35)
    code, text = main(*TINY, "--data", data, "--out", tmp_path, "--precision", "fp16", "--epochs", 9, "--log-every", 10, "--save-every", 1000)
    assert code == 1 and "overflowed" in text and "Traceback" not in text


@pytest.mark.parametrize("at", [1, 7])
def test_loss_that_is_not_finite(main, data, tmp_path, monkeypatch, at):
    """Nothing of it enters a checkpoint, and the step is named though only every fifth is logged."""
    calls = itertools.count(1)
    original = ddp_train.loss_fn
    monkeypatch.setattr(ddp_train, "loss_fn", lambda o, t: original(o, t) * (math.nan if next(calls) == at else 1))
    code, text = main(*TINY, "--data", data, "--out", tmp_path, "--log-every", 5, "--save-every", 5)
    assert code == 1 and f"not finite at step {at}" in text and "Traceback" not in text
    if at == 7:
        assert "(step 5)" in text and load(tmp_path)["step"] == 5
        assert all(v.isfinite().all() for v in load(tmp_path)["model"].values())
    else:
        assert not (tmp_path / "checkpoint.pt").exists()


def test_gradient_that_is_not_finite(main, data, tmp_path, monkeypatch):
    """The loss is fine: the gradient of a square root at 0 is not."""
    calls, original = itertools.count(1), ddp_train.loss_fn
    monkeypatch.setattr(ddp_train, "loss_fn", lambda o, t: original(o, t) + ((o.sum() * 0).sqrt() if next(calls) == 3 else 0))
    code, text = main(*TINY, "--data", data, "--out", tmp_path, "--log-every", 2, "--save-every", 2)
    assert code == 1 and "not finite at step 3" in text and load(tmp_path)["step"] == 2


def test_loss_that_is_not_finite_on_one_rank_stops_all(data, tmp_path):
    outs = run_ranks(2, __file__, "faulty", "nan", "1", *TINY, "--data", data, "--out", tmp_path, "--save-every", "3", code=1)
    assert "not finite at step 4" in outs[0] and "(step 3)" in outs[0] and outs[1] == "" and load(tmp_path)["step"] == 3


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")
def test_compile(data, tmp_path):
    run(sys.executable, SCRIPT, *TINY, "--data", data, "--out", tmp_path, "--max-steps", 3, "--compile", timeout=280, real=True)
    assert load(tmp_path)["model"].keys() == ddp_train.ByteTransformer(1, 2, 16, 32).state_dict().keys()


def test_sync_bn_on_the_cpu_is_refused(main, data, tmp_path, monkeypatch):
    assert main(*TINY, "--data", data, "--out", tmp_path / "a", "--max-steps", 1, "--sync-bn")[0] == 0  # no batch norm in it
    monkeypatch.setattr(ddp_train, "build_model", lambda args: torch.nn.Sequential(torch.nn.Embedding(256, 256), torch.nn.BatchNorm1d(32)))
    code, text = main(*TINY, "--data", data, "--out", tmp_path / "b", "--max-steps", 1, "--sync-bn")
    assert code == 1 and "no CPU kernel" in text


BAD = {
    "--data /no/such/file": "No such file", "--data EMPTY": "0 bytes", "--data SHORT": "60 bytes", "--lr 0": "--lr", "--lr -1": "--lr",
    "--lr nan": "--lr", "--lr inf": "--lr", "--batch-size 0": "--batch-size", "--batch-size x": "integer > 0", "--epochs -3": "--epochs", "--accum 0": "--accum",
    "--max-steps 0": "--max-steps", "--timeout 0": "--timeout", "--dropout 1": "--dropout", "--workers -1": "--workers", "--dim 6 --heads 4": "divisible",
    "--seq-len 0": "--seq-len", "--device tpu9": "--device tpu9", "--precision fp8": "fp8", "--no-such-option": "no-such-option",
    "--comm-hook powersgd --precision fp16": "bf16", "--seed 99999999999": "--seed", "--timeout 1e15": "--timeout",
    "--out /proc/no": "cannot be written", "--out FILE": "cannot be written", "--grad-clip -1": "--grad-clip", "--sync-every 2 --comm-hook fp16": "--comm-hook",
}
if not torch.accelerator.is_available():
    BAD |= {"--device 0,3": "insufficient CUDA devices", "--device cuda": "insufficient CUDA devices"}


@pytest.mark.parametrize("args", BAD)
def test_bad_input(main, data, tmp_path, args):
    for name, size in (("EMPTY", 0), ("SHORT", 60), ("FILE", 5)):
        (tmp_path / name).write_bytes(b"x" * size)
    given = [str(tmp_path / a) if a in ("EMPTY", "SHORT", "FILE") else a for a in args.split()]
    code, text = main(*TINY, "--data", data, "--out", tmp_path / "out", *given)
    assert code in (1, 2) and text.count("\n") == 1 and text.startswith("ddp_train.py: error:") and BAD[args] in text
    assert not (tmp_path / "out").exists() or "--out" in args


@pytest.mark.parametrize("env, says", [
    ({"RANK": "0"}, "go together"), ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"), ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
    ({"RANK": "x", "WORLD_SIZE": "2"}, "whole numbers"), ({"WORLD_SIZE": "2"}, "go together"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "TAKEN"}, "another program has that port"),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "FREE"}, "do all 2 ranks run"),
])
def test_bad_environment(main, data, tmp_path, monkeypatch, env, says):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        for k, v in env.items():
            monkeypatch.setenv(k, {"TAKEN": str(taken.getsockname()[1]), "FREE": str(free_port())}.get(v, v))
        code, text = main(*TINY, "--data", data, "--out", tmp_path, "--timeout", 2)
    ours = [line for line in text.splitlines() if "ddp_train" in line]  # torch's C++ side logs its sockets, too
    assert code == 1 and len(ours) == 1 and says in ours[0] and "Traceback" not in text


def test_bad_backend(main, data, tmp_path, monkeypatch):
    for k, v in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(k, v)
    for backend in ("nccl", "smoke-signals"):
        code, text = main(*TINY, "--data", data, "--out", tmp_path, "--backend", backend)
        assert code == 1 and text.count("\n") == 1 and f"--backend {backend}" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read and write everything")
def test_unreadable(main, data, tmp_path):
    (tmp_path / "secret").write_bytes(b"x" * 5000)
    (tmp_path / "secret").chmod(0)
    tmp_path.chmod(0o500)
    assert "Permission denied" in main(*TINY, "--data", tmp_path / "secret", "--out", tmp_path / "out")[1]
    assert "cannot be written" in main(*TINY, "--data", data, "--out", tmp_path / "out")[1]


@pytest.mark.parametrize("links", [True, False])
def test_checkpoint_is_replaced_in_one_step(main, data, tmp_path, monkeypatch, links):
    """Whoever reads checkpoint.pt while it is saved finds the old or the new one; without hard links, the old one has the other name."""
    seen, path = [], tmp_path / "checkpoint.pt"

    def watched(function):
        def call(*args, **kwargs):
            function(*args, **kwargs)
            seen.append((path.exists(), path.exists() or (tmp_path / "checkpoint.prev.pt").exists()))
        return call

    def link(*args):
        if not links:
            raise PermissionError("as exFAT does")
        os_link(*args)

    os_link = os.link
    for name, function in (("replace", os.replace), ("link", link), ("unlink", os.unlink)):
        monkeypatch.setattr(os, name, watched(function))
    assert main(*TINY, "--data", data, "--out", tmp_path, "--max-steps", 4, "--save-every", 1)[0] == 0
    monkeypatch.undo()
    assert len(seen) >= 7 and all(either for _, either in seen) and all(there for there, _ in seen) == links
    assert load(tmp_path)["step"] == 4 and load(tmp_path, "checkpoint.prev.pt")["step"] == 3


def test_checkpoint_of_another_run(main, data, tmp_path):
    other_data = tmp_path / "other"
    other_data.write_bytes(data.read_bytes().replace(b"quick", b"brisk"))
    main(*TINY, "--data", data, "--out", tmp_path, "--max-steps", 2)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    for other, says in (("--dim 32", "--dim 16, this run has --dim 32"), ("--heads 1", "--heads 2"), ("--seed 5", "--seed 0"),
                        ("--seq-len 16", "training samples"), (f"--data {other_data}", "data with CRC-32")):
        code, text = main(*TINY, "--data", data, "--out", tmp_path, "--max-steps", 4, *other.split())
        assert code == 1 and text.count("\n") == 1 and says in text and "--fresh" in text
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_stop_in_the_last_evaluation(main, data, tmp_path, monkeypatch):
    """All steps are done and saved, the result is not there yet: the next start evaluates, and then nothing is left."""
    common, evaluate = [*TINY, "--data", data, "--out", tmp_path, "--max-steps", 3], ddp_train.evaluate
    monkeypatch.setattr(ddp_train, "evaluate", lambda *a: os.kill(os.getpid(), signal.SIGTERM) or evaluate(*a))
    assert main(*common)[0] == 128 + signal.SIGTERM and load(tmp_path)["step"] == 3 and "val_loss" not in str(metrics(tmp_path))
    monkeypatch.undo()
    code, text = main(*common)
    assert code == 0 and "done: " in text and [m["step"] for m in metrics(tmp_path) if "val_loss" in m] == [3]
    assert "nothing left to do" in main(*common)[1]


@pytest.mark.parametrize("hook", ["none", "fp16", "bf16", "powersgd"])
def test_communication(data, tmp_path, hook):
    """Compressed or rarer, it still trains, and all ranks hold one model; what torch's CPU build cannot do is refused in a line."""
    refused = hook == "bf16" and torch.version.cuda is None
    printed = "".join(run_ranks(2, SCRIPT, *TINY, "--data", data, "--out", tmp_path, "--epochs", 2, "--max-steps", 50, "--lr", "3e-3",
                                "--comm-hook", hook, code=int(refused)))
    if refused:
        assert printed.count("ddp_train.py: error: --comm-hook bf16 does not work with this build of torch") == 1 and "ddp_train.py\", line" not in printed
    else:
        assert losses(tmp_path)[50] < 0.8 * losses(tmp_path)[1]
        assert "one all-reduce of the gradients" in printed
        assert len(re.findall(r"\d+% of a step waits for the all-reduce", printed)) == (hook != "powersgd")


def test_local_sgd(data, tmp_path):
    """No gradient is all-reduced after the rehearsal, and in the end both ranks hold the same weights."""
    seen = run_worker(2, tmp_path, "--data", data, "--epochs", "2", "--max-steps", "50", "--lr", "3e-3", "--sync-every", "4")
    assert seen[0]["trained"] == seen[1]["trained"] and len(seen[0]["buckets"]) == len(set(seen[0]["buckets"]))
    assert losses(tmp_path)[50] < 0.8 * losses(tmp_path)[1]


def test_bad_input_on_all_ranks_and_on_one(data, tmp_path):
    """Two ranks say it once; where only node 1 knows (its data are missing or differ), both end, with its name."""
    printed = run(*torchrun(2), SCRIPT, *TINY, "--data", "/no/such", "--out", tmp_path, code=1)
    assert printed.count("ddp_train.py: error:") == 1 and "ddp_train.py\", line" not in printed
    changed = tmp_path / "changed"
    content = bytearray(data.read_bytes())
    content[4000] ^= 1
    changed.write_bytes(content)
    for args1, says in ((["--data", "/no/such"], "No such file"), (["--data", changed], "data with CRC-32"), (["--lr", "0.5"], "--lr 0.5")):
        outs = run_ranks(2, SCRIPT, *TINY, "--data", data, "--out", tmp_path / "out",
                         *[lambda r, a=a, i=i: a if r else ("--seed", "0")[i] for i, a in enumerate(args1)], code=1)
        assert outs[0].count("\n") == 1 and says in outs[0] and "rank 1 (host" in outs[0] and outs[1] == "", outs
        assert not (tmp_path / "out").exists()


# ---- Speed: `make bench`. Ratios within one run, interleaved, medians; nothing is asserted about time. ----
def bare_loop(args, place, steps):
    """The shortest loop there is, on batches that are in memory already."""
    model = ddp_train.build_model(args).to(place.device)
    ddp = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    ddp = torch.compile(ddp) if args.compile else ddp
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    data, n = ddp_train.load_data(args.data, args.seq_len)[0], args.batch_size
    batches = [data.collate(data.__getitems__(range(i, i + n)).to(place.device)) for i in range(0, 4 * n, n)]
    for i in range(steps):
        x, y = batches[i % 4]
        with torch.autocast(place.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss = ddp_train.loss_fn(ddp(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def bench_worker(out, kind, steps, *argv):
    """Times bare_loop and ddp_train in turn; rank 0 writes seconds per step of each, and the peak memory of this process."""
    import resource
    steps, times, stamps = int(steps), {"bare": [], "ours": []}, []
    place = ddp_train.init_distributed(ddp_train.parse_args(argv).device)

    def stamp(*_):
        if place.device.type == "cuda" and len(stamps) in (5, steps - 1):
            torch.cuda.synchronize()
        stamps.append(time.perf_counter())

    register_optimizer_step_pre_hook(stamp)
    with ddp_train.process_group(place):
        for rep in range(7 if kind == "both" else 1):
            for name in ("bare", "ours") if rep % 2 else ("ours", "bare"):
                stamps.clear()
                args = ddp_train.parse_args([*argv, "--max-steps", str(steps), "--out", f"{out}/{rep}"])
                if name == "bare" and kind in ("bare", "both"):
                    bare_loop(args, place, steps)
                elif name == "ours" and kind != "bare":
                    if kind == "sync":
                        save = ddp_train.Checkpoint.save
                        ddp_train.Checkpoint.save = lambda self, state: (save(self, state), self.wait())
                    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
                        ddp_train.train(args, place, ddp_train.StopRequest())
                if stamps:
                    times[name].append((stamps[-1] - stamps[5]) / (len(stamps) - 6))
                    times["steps"] = [b - a for a, b in zip(stamps, stamps[1:])]
    if place.is_main:
        Path(f"{out}.json").write_text(json.dumps({**times, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


PARTS = """
import time
parts, last = [], time.perf_counter()
def part(name):
    global last
    parts.append(f"{name} {time.perf_counter() - last:.2f}")
    last = time.perf_counter()
import torch, torch.distributed; part("import torch")
import ddp_train; part("import ddp_train")
data, _ = ddp_train.load_data(None, 128); part("read and check the data")
import torch._dynamo; part("import torch._dynamo (by torch's optimizers)")
args = ddp_train.parse_args([])
model = ddp_train.build_model(args)
optimizer = torch.optim.AdamW(model.parameters(), fused=True); part("model and optimizer")
x, y = data.collate(data.__getitems__(range(args.batch_size)))
ddp_train.loss_fn(model(x), y).backward()
optimizer.step(); part("first step")
print(", ".join(parts))
"""


def bench_run(nproc, out, kind, steps, *argv, **env):
    launcher = torchrun(nproc) if nproc > 1 else [sys.executable]
    run(*launcher, __file__, "bench_worker", out, kind, steps, *argv, env=env, timeout=600, real=True)
    return json.loads(Path(f"{out}.json").read_text())


@pytest.mark.bench
def test_bench(tmp_path):
    middle = statistics.median
    cpu = next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?") \
        if Path("/proc/cpuinfo").exists() else "?"
    print(f"\n{cpu}, {os.cpu_count()} cores, torch {torch.__version__}, Python {sys.version.split()[0]}; {GPUS} GPUs"
          + (f" ({torch.cuda.get_device_name()}, NCCL {torch.cuda.nccl.version()})" if GPUS else ""))
    (tmp_path / "data").write_bytes(b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py")))[:1_000_000])
    small = ["--device", "cpu", "--batch-size", "16", "--warmup-steps", "10", "--data", tmp_path / "data"]
    for nproc, threads in ((1, os.cpu_count()), (2, max(1, os.cpu_count() // 2))):
        r = bench_run(nproc, tmp_path / f"both{nproc}", "both", 36, *small, OMP_NUM_THREADS=str(threads))
        ratios = [b / o for b, o in zip(r["bare"], r["ours"])]
        print(f"{nproc} process(es) x {threads} thread(s): {middle(ratios):.3f} of the bare loop's throughput "
              f"({len(ratios)} pairs: {min(ratios):.3f} to {max(ratios):.3f}; {16 * 128 * nproc / middle(r['ours']):,.0f} tokens/s)", flush=True)
    together, apart = [], []
    for i in range(3):
        run_one = lambda n, name: bench_run(n, tmp_path / f"{name}{i}", "ours", 50, *small, OMP_NUM_THREADS="1")["ours"][0]
        one, two = run_one(1, "one"), run_one(2, "two")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            neighbours = list(pool.map(run_one, (1, 1), ("left", "right")))
        together.append(one / two)
        apart.append(one / statistics.mean(neighbours))
    for ratios, what in ((together, "2 processes"), (apart, "2 runs of one process, side by side and strangers to each other,")):
        print(f"{what} over twice one, one thread each: {middle(ratios):.3f} (3 pairs: {min(ratios):.3f} to {max(ratios):.3f})", flush=True)
    memory = {k: bench_run(1, tmp_path / f"memory-{k}", k, 20, *small)["rss"] for k in ("bare", "ours")}
    print(f"peak memory of a process: {memory['ours'] / memory['bare']:.3f} of the bare loop's ({memory['bare'] / 1024:.0f} MiB)")
    starts = []
    for i in range(3):
        begin = time.perf_counter()
        run(sys.executable, "-c", "import torch, torch.distributed, torch._dynamo")
        imports = time.perf_counter() - begin
        with start(sys.executable, SCRIPT, "--device", "cpu", "--out", tmp_path / f"start{i}", "--log-every", 1, "--max-steps", 9, real=True) as p:
            begin = time.perf_counter()
            read_until(p, "step 1/")
            starts.append((time.perf_counter() - begin, imports))
    print(f"from the command to the first step: {middle(s for s, _ in starts):.2f} s; a Python that imports torch and torch._dynamo (which its "
          f"optimizers import) and ends: {middle(i for _, i in starts):.2f} s")
    print(f"its parts, in seconds: {run(sys.executable, '-c', PARTS, cwd=HERE).strip()}", flush=True)
    (tmp_path / "little").write_bytes((tmp_path / "data").read_bytes()[:20_000])
    big = ["--device", "cpu", "--layers", "14", "--heads", "12", "--dim", "768", "--seq-len", "64", "--batch-size", "4", "--log-every", "1", "--data", tmp_path / "little"]
    for kind, words in (("sync", "waited for"), ("ours", "written beside the training")):
        steps = bench_run(1, tmp_path / f"save-{kind}", kind, 9, *big, "--save-every", "4", OMP_NUM_THREADS=str(os.cpu_count()))["steps"]
        usual = middle(steps[:3])
        print(f"a save of 100 million parameters (1.2 GB with AdamW's moments), {words}: costs {sum(steps[3:7]) / usual - 4:.2f} steps of "
              f"{usual:.2f} s (each: {' '.join(f'{s / usual:.2f}' for s in steps)}, saved after the fourth)", flush=True)
    if GPUS:
        shape = ["--layers", "12", "--heads", "12", "--dim", "768", "--seq-len", "1024", "--batch-size", "32", "--precision", "bf16"]
        for more in ([], ["--compile"]):
            r = bench_run(1, tmp_path / f"gpu{len(more)}", "both", 60, *shape, *more, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
            n = sum(p.numel() for p in ddp_train.ByteTransformer(12, 12, 768, 1024).parameters())
            rate = (6 * n + 12 * 12 * 768 * 1024) * 32 * 1024 / middle(r["ours"])  # PaLM, appendix B; peaks: NVIDIA's data sheets, dense bf16, SXM
            peak = next((p for name, p in (("H200", 989e12), ("H100", 989e12), ("A100", 312e12)) if name in torch.cuda.get_device_name()), None)
            print(f"GPT-2-small shape, bf16, NCCL {' '.join(more)}: {middle(b / o for b, o in zip(r['bare'], r['ours'])):.3f} of the bare loop, "
                  f"{rate / 1e12:.0f} TFLOP/s of the model ((6 x parameters + 12 x layers x dim x seq-len) x tokens per second)"
                  + (f", utilisation {rate / peak:.0%} of {peak / 1e12:.0f}" if peak else ""))


@pytest.mark.wire
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("tc"), reason="needs root on Linux with `ip` and `tc`")
def test_bench_slow_wire(hosts, tmp_path):
    """Two hosts and 100 Mbit/s between them; the same number of samples for each."""
    prefixes, _ = hosts
    results = {}
    for wire in ("no limit", "100 Mbit/s"):
        if wire != "no limit":
            for prefix in prefixes:
                subprocess.run([*prefix, "tc", "qdisc", "add", "dev", "wire", "root", "tbf", "rate", "100mbit", "burst", "128kb", "latency", "50ms"], check=True)
        for options in ("", "--comm-hook fp16", "--comm-hook powersgd", "--sync-every 16") if wire != "no limit" else ("",):
            out = tmp_path / f"{wire}{options}".replace(" ", "").replace("/", "")
            out.mkdir()
            with contextlib.ExitStack() as stack:
                nodes = [stack.enter_context(start(HERE / "run_multi_node.sh", "--device", "cpu", "--batch-size", "16", "--max-steps", "240", "--out", out / "ab"[i],
                         "--no-scale-lr", *options.split(), prefix=prefixes[i], env={"MASTER_ADDR": "10.77.0.1", "NODE_RANK": str(i), "PYTHON": sys.executable})) for i in (0, 1)]
                printed = [p.communicate(timeout=300)[0] for p in nodes][0]
            rate = statistics.median(m["tokens_per_s"] for m in metrics(out / "a") if "loss" in m and m["step"] > 20)
            loss = [m["val_loss"] for m in metrics(out / "a") if "val_loss" in m][-1]
            results[wire, options] = rate, loss
            say = re.search(r"one all-reduce.*", printed)[0], *re.findall(r"\d+% of a step waits.*", printed)
            print(f"{wire:11} {options or 'plain DDP':22} {rate:8,.0f} bytes/s  {rate / results['no limit', ''][0]:.2f} of no limit  "
                  f"held-out loss {loss:.4f} ({loss / results['no limit', ''][1] - 1:+.1%})  {say[0]}; {say[-1][:40]}", flush=True)


# ---- Faults ----
LONG = "--epochs 6 --dropout 0.1 --save-every 7 --eval-every 11 --lr 1e-3".split()


@pytest.fixture(scope="session")
def untouched(data, tmp_path_factory):
    """out folder of the run that nobody touched, for 1, 2 and 3 processes."""
    done = {}

    def get(nproc, *more):
        if (nproc, more) not in done:
            done[nproc, more] = tmp_path_factory.mktemp("untouched")
            finish(nproc, data, done[nproc, more], *more)
        return done[nproc, more]

    return get


def training(nproc, data, out, *more, restarts=0):
    launcher = torchrun(nproc, f"--max-restarts={restarts}") if nproc > 1 else [sys.executable]
    return [*launcher, SCRIPT, *TINY, *LONG, "--data", data, "--out", out, *more]


def finish(nproc, data, out, *more):
    return run_ranks(nproc, SCRIPT, *TINY, *LONG, "--data", data, "--out", out, *more)[0]


def signalled(p, pids, signum, line):
    """Read up to a line, signal processes, read the rest. Returns the whole output."""
    before = read_until(p, line)
    for pid in pids(p):
        os.kill(pid, signum)
    return before + p.communicate(timeout=120)[0]


@pytest.mark.parametrize("nproc, signum, line", [(1, signal.SIGTERM, "step 25/"), (1, signal.SIGUSR1, "threads"), (3, signal.SIGINT, "step 25/"),
                                                 (2, signal.SIGTERM, "step 33/")])
def test_stop_and_resume_is_bit_identical(data, tmp_path, untouched, nproc, signum, line):
    """A signal to one rank; in the middle of an epoch, at the start, before an evaluation. All leave together; the next start ends
    with the same bits. Three processes: DDP's order of summation matters. With restarts left torchrun does not restart them."""
    pids = (lambda p: [p.pid]) if nproc == 1 else (lambda p: [ranks(p.pid)[-1]])
    with start(*training(nproc, data, tmp_path, restarts=3)) as p:
        printed = signalled(p, pids, signum, line)
    assert f"stopped by {signum.name}" in printed and "Traceback" not in printed and printed.count("threads)") == 1, printed
    assert p.returncode == (128 + signum if nproc == 1 else 0)
    step = int(re.search(r"at step (\d+)", printed)[1])
    assert load(tmp_path)["step"] == step
    again = finish(nproc, data, tmp_path)
    assert f"going on from {tmp_path}/checkpoint.pt" in again and f"step {step}" in again and f"step {step + 1}/" in again
    assert_same_run(tmp_path, untouched(nproc))


def test_stop_signal_to_the_launcher_and_during_evaluation(data, tmp_path, untouched):
    """Every step ends with an evaluation, so the signal comes in one. DataLoader workers get it as well and stay alive."""
    more = ("--eval-every", "1", "--workers", "1", "--epochs", "2")
    with start(*training(2, data, tmp_path, *more)) as p:
        printed = signalled(p, lambda p: [*tree(p.pid), p.pid], signal.SIGTERM, "step 9/")
    assert "stopped by SIGTERM" in printed and "DataLoader" not in printed and p.returncode != 0, printed
    finish(2, data, tmp_path, *more)
    assert_same_run(tmp_path, untouched(2, *more))


def interrupt(p, until):
    """Ctrl-C, again and again, more than a second apart (within a second it is the same one)."""
    for _ in range(60):
        with contextlib.suppress(ProcessLookupError):
            os.kill(p.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return until(timeout=1.2)
    raise AssertionError("still there after a minute of Ctrl-C")


@pytest.mark.parametrize("hangs", ["0", "1"])
def test_second_sigint_stops_at_once(data, tmp_path, hangs):
    """A rank that hangs in Python, and one that waits for it in a collective, where no Python code can run."""
    with contextlib.ExitStack() as stack:
        p, _ = by_hand(stack, 2, __file__, "faulty", "hang", hangs, *TINY, "--data", data, "--out", tmp_path)
        read_until(p, "step 3/")  # step 4 has no end
        interrupt(p, p.communicate)
    assert p.returncode == 128 + signal.SIGINT


def test_second_sigint_to_torchrun_leaves_no_rank(data, tmp_path):
    with start(*torchrun(2), __file__, "faulty", "hang", "1", *TINY, "--data", data, "--out", tmp_path) as p:
        read_until(p, "step 3/")
        interrupt(p, p.communicate)  # to the end of the output, which the ranks have as well


def test_reader_of_the_output_that_is_gone(data, tmp_path):
    """Ctrl-C on `... | tee log` ends the `tee`, too. The run still saves."""
    with start(*training(1, data, tmp_path, "--save-every", 100000)) as p:
        read_until(p, "step 5/")
        p.stdout.close()
        p.send_signal(signal.SIGTERM)
        p.wait(60)
    assert p.returncode == 128 + signal.SIGTERM and load(tmp_path)["step"] >= 5


def test_spawn_passes_signals_on(data, tmp_path):
    with start(*training(1, data, tmp_path), "--spawn", 2) as p:
        printed = signalled(p, lambda p: [p.pid], signal.SIGTERM, "step 5/")
    assert p.returncode == 128 + signal.SIGTERM and printed.count("stopped by SIGTERM") == 1 and "Traceback" not in printed


def kill_once(data, out, seed, workers=1):
    """One SIGKILL at a random moment, then restarts where none happens by itself. Returns what was killed."""
    rng = random.Random(seed)
    victim = rng.choice(["rank 0", "rank 1", "loader", "agent", "all"])
    more = ("--workers", str(workers))
    with start(*training(2, data, out, *more, restarts=3)) as p:
        if rng.random() < 0.8:
            read_until(p, f"step {rng.randint(1, 175)}/|done:")
        else:
            read_until(p, "OMP|processes")
            time.sleep(rng.random() * 4)  # any moment of the start
        pids = ranks(p.pid)
        loaders = [c for r in pids for c in children(r)]
        hit = {"rank 0": pids[:1], "rank 1": pids[1:], "loader": loaders[:1], "agent": [p.pid], "all": [p.pid, *pids, *loaders]}[victim]
        for pid in hit:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        printed = p.communicate(timeout=120)[0]  # until the last of them is gone: without torchrun the ranks stop by themselves
    if p.returncode:
        printed += finish(2, data, out, *more)
    assert "done:" in printed or "nothing left to do" in printed, printed
    return victim


def test_ranks_stop_when_torchrun_is_killed(data, tmp_path):
    """Nobody could stop or restart them any more, and they would keep the folder: they save and leave."""
    with start(*training(2, data, tmp_path)) as p:
        printed = signalled(p, lambda p: [p.pid], signal.SIGKILL, "step 9/")
    assert "stopped by SIGTERM" in printed and "done:" not in printed and 9 <= load(tmp_path)["step"] < 192, printed


@pytest.mark.faults
def test_ranks_give_up_when_torchrun_is_killed_before_they_are_up(data, tmp_path):
    """Its store is gone with it: they wait up to a minute for it, not for --timeout."""
    with start(*training(2, data, tmp_path)) as p:
        while len(ranks(p.pid)) < 2:
            time.sleep(0.01)
        p.kill()
        printed = p.communicate(timeout=120)[0]
    assert printed.count("ddp_train.py: error: rank 0 cannot join") == 1 and "ddp_train.py\", line" not in printed, printed


@pytest.mark.parametrize("seed", [4])
def test_kill_9(data, tmp_path, untouched, seed):
    print(kill_once(data, tmp_path, seed))
    assert_same_run(tmp_path, untouched(2))


@pytest.mark.faults
def test_kill_9_long(data, tmp_path, untouched):
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    victims = []
    for i in range(int(os.environ.get("KILLS", 100))):
        print(f"kill {i}: SEED={seed + i} KILLS=1", end=" ", flush=True)
        victims.append(kill_once(data, tmp_path / str(i), seed + i))
        print(victims[-1], flush=True)
        assert_same_run(tmp_path / str(i), untouched(2))
        shutil.rmtree(tmp_path / str(i))
    print({v: victims.count(v) for v in set(victims)})


@pytest.mark.faults
def test_clean_exits_long(data, tmp_path):
    for i in range(20):
        printed = run(*training(2, data, tmp_path / str(i), "--max-steps", "5"))
        assert not re.search("Traceback|terminate called|Fatal", printed)


def damage(content, rng):
    content, kind = bytearray(content), rng.choice(["bit", "bit", "bit", "truncated", "zeros", "garbage"])
    if kind == "bit":
        at = rng.randrange(len(content)) if rng.random() < 0.7 else len(content) - 1 - rng.randrange(4000)
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "truncated":
        del content[rng.randrange(len(content)) :]
    elif kind == "zeros":
        at = rng.randrange(len(content))
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    else:
        content = bytearray(rng.randbytes(rng.randrange(3000)))
    return bytes(content)


def damaged_files(data, tmp_path, count, seed):
    ddp_train.main([*TINY, "--data", str(data), "--out", str(tmp_path), "--max-steps", "4", "--save-every", "2"])
    path, good = tmp_path / "checkpoint.pt", (tmp_path / "checkpoint.pt").read_bytes()
    truth, before = dict(flat(ddp_train.load_checkpoint(good))), dict(flat(load(tmp_path, "checkpoint.prev.pt")))
    rng, fell_back = random.Random(seed), 0
    for i in range(count):
        path.write_bytes(damage(good, rng))
        step, _, content, _ = ddp_train.Checkpoint(tmp_path).read()
        got, want = dict(flat(ddp_train.load_checkpoint(content))), {4: truth, 2: before}[step]
        assert all(torch.equal(got[k], v) if isinstance(v, torch.Tensor) else got[k] == v for k, v in want.items()), f"SEED={seed}, file {i}"
        fell_back += step == 2
    return fell_back


def test_damaged_checkpoints(main, data, tmp_path, capfd):
    assert damaged_files(data, tmp_path, 50, seed=0) > 40  # a flip in the padding between records harms nothing
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    code, text = main(*TINY, "--data", data, "--out", tmp_path, "--max-steps", 4)
    assert code == 0 and re.search("warning: .*checkpoint.pt is damaged.* going on from .*checkpoint.prev.pt", text) and load(tmp_path)["step"] == 4
    assert load(tmp_path, "checkpoint.prev.pt")["step"] == 2  # the damaged one did not take its place
    good, truth = (tmp_path / "checkpoint.pt").read_bytes(), load(tmp_path)["model"]
    weight = re.search(rb"PK\x01\x02.{42}[^/]*/data/0", good, re.S)  # its entry in the directory at the end, which no CRC protects
    for bit in range(8 * weight.start(), 8 * weight.end()):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "checkpoint.pt").write_bytes(flipped)
        step, _, content, _ = ddp_train.Checkpoint(tmp_path).read()
        assert step == 2 or all(torch.equal(v, truth[k]) for k, v in ddp_train.load_checkpoint(content)["model"].items()), bit % (8 * 46)
    for name in ("checkpoint.pt", "checkpoint.prev.pt"):
        (tmp_path / name).write_bytes(good[:-100])
    code, text = main(*TINY, "--data", data, "--out", tmp_path, "--max-steps", 9)
    assert code == 1 and "nothing to go on from" in text and text.count("\n") == 1
    assert (tmp_path / "checkpoint.pt").read_bytes() == good[:-100]


@pytest.mark.faults
def test_damaged_checkpoints_long(data, tmp_path):
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    print(f"SEED={seed}", flush=True)
    print(damaged_files(data, tmp_path, 1000, seed), "of 1000 damaged files refused, the rest unharmed where it counts")


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


def test_checkpoint_is_data_not_code(main, data, tmp_path, monkeypatch):
    """Here, and as the file of a rank other than 0 on a disk of its own."""
    import pickle
    bomb = tmp_path / "exploded"
    monkeypatch.setenv("BOMB", str(bomb))
    for i, write in enumerate((lambda p: torch.save({"step": 10**6, "model": Bomb()}, p), lambda p: p.write_bytes(pickle.dumps(Bomb())))):
        (tmp_path / f"{i}").mkdir()
        write(tmp_path / f"{i}" / "checkpoint.pt")
        code, text = main(*TINY, "--data", data, "--out", tmp_path / f"{i}")
        assert code == 1 and "not a checkpoint" in text and not bomb.exists()
    outs = run_ranks(2, SCRIPT, *TINY, "--data", data, "--out", lambda r: tmp_path / ("0" if r else "new"), code=1)
    assert "rank 1: " in outs[0] and "not a checkpoint" in outs[0] and outs[1] == "" and not bomb.exists()


def test_node_with_an_empty_disk_catches_up(data, tmp_path, untouched):
    """Two nodes with a disk each: the newest checkpoint is on rank 1's, and rank 0 goes on from it."""
    with start(*training(2, data, tmp_path / "b")) as p:
        signalled(p, lambda p: ranks(p.pid), signal.SIGTERM, "step 40/")
    outs = run_ranks(2, SCRIPT, *TINY, *LONG, "--data", data, "--out", lambda r: tmp_path / "ab"[r])
    assert "going on" in outs[0], outs
    for (name, x), (_, y) in zip(flat(load(tmp_path / "a")), flat(load(untouched(2))), strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name


def test_resume_at_another_world_size(data, tmp_path):
    """4, then 2, then 1 process, each stopped in the middle of the epoch: every sample once."""
    out, seen = tmp_path / "out", []
    for nproc, more in ((4, "--batch-size 3 --max-steps 5"), (2, "--batch-size 5 --max-steps 12"), (0, "--batch-size 7")):
        skip = 1 if nproc else 0  # the rehearsal
        seen += [i for rank in run_worker(nproc, out, "--data", data, *more.split()) for i in sum(rank["indices"][skip:], [])]
    assert sorted(seen) == list(range(250))


@pytest.mark.parametrize("size, save_every", [(50_000, 7), (5_000, 100)])
def test_full_disk(data, tmp_path, size, save_every):
    """The file-size limit stands for a full disk, for the checkpoint or for the metrics, too: the run stops, with the old checkpoint intact."""
    import resource
    finish(1, data, tmp_path, "--max-steps", "7")
    before = (tmp_path / "checkpoint.pt").read_bytes()
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    printed = run(*training(2, data, tmp_path, "--save-every", save_every), code=1, preexec_fn=limit)
    assert "step 90/" not in printed  # with 5,000 bytes it was the metrics that did not fit
    assert "error: cannot" in printed and "is intact" in printed and "ddp_train.py\", line" not in printed, printed
    assert (tmp_path / "checkpoint.pt").read_bytes() == before and not (tmp_path / "checkpoint.tmp").exists()


@contextlib.contextmanager
def read_only(folder):
    """Root writes wherever it likes, but not into an immutable folder."""
    ways = (["chattr", "+i"], ["chattr", "-i"]) if os.geteuid() == 0 else (["chmod", "a-w"], ["chmod", "u+w"])
    if not shutil.which(ways[0][0]) or subprocess.run([*ways[0], folder], capture_output=True).returncode:
        pytest.skip("root, and no chattr that works here")
    try:
        yield
    finally:
        subprocess.run([*ways[1], folder], check=True)


def test_folder_that_becomes_read_only(data, tmp_path):
    out = tmp_path / "out"
    with start(*training(1, data, out)) as p:
        read_until(p, "step 22/")  # the save of step 21 began, so that of step 14 is done, and at every moment there is a checkpoint.pt
        before = load(out)["step"]
        with read_only(out):
            printed = p.communicate(timeout=60)[0]
    assert p.returncode == 1 and "error: cannot save" in printed and "is intact" in printed and "Traceback" not in printed, printed
    assert load(out)["step"] >= before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_data_are_mapped_not_copied(tmp_path):
    """After a read of all samples the process has no page of the file for itself: however many ranks, the machine has them once."""
    (tmp_path / "data").write_bytes(os.urandom(1 << 24))
    train, _ = ddp_train.load_data(tmp_path / "data", 127)
    assert sum(int(train.__getitems__([i])[0, 0]) for i in range(0, len(train), 32)) > 0
    entry = Path("/proc/self/smaps").read_text().split(str(tmp_path / "data"))[1].split("VmFlags")[0]
    size = {k: int(v) for k, v in re.findall(r"(\w+): +(\d+) kB", entry)}
    assert size["Rss"] > 15_000 and size["Anonymous"] == 0, size


def test_save_that_cannot_be_pickled(main, data, tmp_path, monkeypatch):
    save = ddp_train.Checkpoint.save
    monkeypatch.setattr(ddp_train.Checkpoint, "save", lambda self, state: save(self, {**state, "more": lambda: None}))
    code, text = main(*TINY, "--data", data, "--out", tmp_path, "--max-steps", 3)
    assert code == 1 and "cannot save" in text and "done" not in text and not list(tmp_path.glob("checkpoint*"))


def test_workers_of_each_rank_draw_numbers_of_their_own(tmp_path):
    class Noise(torch.utils.data.Dataset):
        __len__ = lambda self: 4
        __getitem__ = lambda self, i: torch.rand(())

    first = [next(iter(ddp_train.make_loader(Noise(), 4, range(4), ddp_train.Place(torch.device("cpu"), rank), 1))) for rank in (0, 1)]
    assert not torch.equal(*first)


def test_two_runs_into_one_folder(main, data, tmp_path):
    with start(*training(1, data, tmp_path)) as first:
        read_until(first, "step 3/")  # now it blocks, and keeps the folder
        code, text = main(*TINY, "--data", data, "--out", tmp_path, "--fresh")
        assert code == 1 and "in use by another run" in text and not (tmp_path / "old-1").exists()


def test_rank_that_raises(data, tmp_path):
    """Its traceback stands once and first; the others end with a line each."""
    printed = run(*torchrun(3), __file__, "faulty", "raise", "1", *TINY, "--data", data, "--out", tmp_path, code=1)
    assert printed.count("ValueError: boom\n") >= 1 and printed.count("failed:\nTraceback") == 1, printed
    ours = printed[printed.index("failed:\n") :]
    assert "rank 1" in printed[: printed.index("failed:\n")].splitlines()[-1] and "boom" in ours.split("Traceback")[1]
    assert "stops: another rank failed" not in printed[: printed.index("failed:\n")]


def test_rank_that_raises_does_not_wait_for_its_workers(data, tmp_path):
    outs = run_ranks(2, __file__, "faulty", "stray", "1", *TINY, "--data", data, "--out", tmp_path, "--workers", "1", code=1)
    assert "ValueError: boom" in outs[1] and "rank 0 stops" in outs[0]


def test_rank_that_hangs(data, tmp_path):
    with contextlib.ExitStack() as stack:
        both = by_hand(stack, 2, __file__, "faulty", "hang", "1", *TINY, "--data", data, "--out", tmp_path, "--timeout", "2")
        printed = both[0].communicate(timeout=60)[0]
        assert both[0].returncode == 1 and "waited --timeout for rank 1 in `" in printed and "backward" in printed, printed


def test_fresh_is_not_repeated_by_slurm_or_by_torchrun(main, data, tmp_path, monkeypatch):
    """A job that is requeued, or whose torchrun starts new ranks because a node came, goes on; a new job is fresh."""
    steps = itertools.count(1)

    def start_again(**env):
        for k, v in env.items():
            monkeypatch.setenv(k, v)
        code, text = main(*TINY, "--data", data, "--out", tmp_path, "--max-steps", next(steps), "--fresh")
        assert code == 0, text
        return "going on from" in text

    assert [start_again(SLURM_JOB_ID="7"), start_again(), start_again(SLURM_RESTART_COUNT="1")] == [False, False, True]
    assert [start_again(SLURM_JOB_ID="8"), start_again()] == [False, True]
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name)
    assert [start_again(TORCHELASTIC_RUN_ID="x"), start_again()] == [False, True]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with monkeypatch.context() as patch:  # what ends before the old run is aside does not count
        patch.setattr(ddp_train.Checkpoint, "move_aside", lambda self: 1 / 0)
        assert main(*TINY, "--data", data, "--out", tmp_path, "--max-steps", 99, "--fresh")[0] == 1
    assert [start_again(), start_again()] == [False, True]


def test_fresh_is_not_repeated_by_a_restart(data, tmp_path):
    with start(*training(2, data, tmp_path, "--fresh", restarts=2)) as p:
        before = read_until(p, "step 30/")
        os.kill(ranks(p.pid)[1], signal.SIGKILL)
        printed = before + p.communicate(timeout=120)[0]
    assert "going on from" in printed and p.returncode == 0 and not (tmp_path / "old-1").exists()


def test_readme_examples(data, tmp_path):
    """The porting example, before on one process and after on two; loading a checkpoint without DDP."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    diff = next(text for kind, text in blocks if kind == "diff").splitlines()
    for name, keep in (("before.py", " -"), ("after.py", " +")):
        (tmp_path / name).write_text("\n".join(line[1:] for line in diff if line[:1] in keep))
    env = {"PYTHONPATH": str(HERE)}
    results = [re.findall(r"epoch 2: loss ([\d.]+)", run(*how, cwd=tmp_path, env=env)) for how in (
        [sys.executable, "before.py"], [*torchrun(2), "after.py"])]
    assert [len(r) for r in results] == [1, 1] and all(float(r[0]) < 1 for r in results), results
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == {"weight", "bias"}
    run(sys.executable, SCRIPT, "--device", "cpu", "--data", data, "--max-steps", 2, cwd=tmp_path, env=env)
    code = next(text for kind, text in blocks if kind == "python")
    assert run(sys.executable, "-c", code, cwd=tmp_path, env=env).startswith("2 1 ")


def test_readme_names_what_exists():
    """Every make target and option that the README tells of is there."""
    readme, makefile, script = ((HERE / n).read_text() for n in ("README.md", "Makefile", "ddp_train.py"))
    targets = set(re.findall(r"(?:`|^    )make ([a-z][a-z0-9-]+)", readme, re.M))
    assert {"train", "test", "bench", "train-4gpu"} <= targets and all(re.search(f"^{t}:", makefile, re.M) for t in targets), targets
    listed = run("make", "-s", "-C", HERE, "help")
    assert all(t in listed for t in targets)


# ---- GPUs ----
@needs_gpu
@pytest.mark.parametrize("options", ["--precision bf16", "--precision fp16", "--precision bf16 --compile", "--sync-bn", "--comm-hook bf16"])
def test_nccl_with_one_rank(data, tmp_path, options):
    args = [a for a in TINY if a not in ("--device", "cpu")]
    printed = run(*torchrun(1), SCRIPT, *args, "--data", data, "--out", tmp_path, "--max-steps", 20, "--lr", "3e-3", *options.split(), timeout=300)
    assert "cuda" in printed and losses(tmp_path)[20] < losses(tmp_path)[1]
    assert all(v.dtype == torch.float32 for v in load(tmp_path)["model"].values())


@needs_gpu
def test_two_processes_on_one_gpu_with_gloo(data, tmp_path):
    args = [a for a in TINY if a not in ("--device", "cpu")]
    assert "2 processes" in run(*torchrun(2), SCRIPT, *args, "--device", "0,0", "--backend", "gloo", "--data", data, "--out", tmp_path, "--max-steps", 10)


@needs_gpu
def test_two_nccl_ranks_on_one_gpu(data, tmp_path):
    args = [a for a in TINY if a not in ("--device", "cpu")]
    printed = run(*torchrun(2), SCRIPT, *args, "--device", "0,0", "--data", data, "--out", tmp_path, "--max-steps", 10, code=None,
                  env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    if "Duplicate GPU" in printed:
        pytest.skip("this NCCL refuses two ranks on one GPU")
    assert "done:" in printed, printed


@needs_gpu
def test_too_few_gpus(data, tmp_path):
    assert "insufficient CUDA devices" in run(*torchrun(GPUS + 1), SCRIPT, "--data", data, "--out", tmp_path, code=1)


@needs_gpu
def test_no_synchronization_in_the_loop(main, data, tmp_path):
    """Between two log lines nothing waits for the GPU: torch raises if something does."""
    original, args = ddp_train.loss_fn, [a for a in TINY if a not in ("--device", "cpu")]
    calls = itertools.count(1)

    def loss_fn(output, target):  # steps 3 to 17 of 20, none of which logs
        n = next(calls)
        torch.cuda.set_sync_debug_mode("error" if 3 <= n <= 17 else "default")
        return original(output, target)

    ddp_train.loss_fn = loss_fn
    try:
        code, text = main(*args, "--data", data, "--out", tmp_path, "--max-steps", 20, "--log-every", 20)
    finally:
        ddp_train.loss_fn = original
        torch.cuda.set_sync_debug_mode("default")
    assert code == 0, text


# ---- Two hosts: network and UTS namespaces, a wire, no DNS; each name leads to 127.0.1.1 on its own host and nowhere elsewhere. ----
def can_make_hosts():
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare") and subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "veth-probe", "type", "veth"], capture_output=True).returncode == 0


needs_hosts = pytest.mark.skipif(not can_make_hosts(), reason="needs root on Linux with `ip` and network namespaces")


@pytest.fixture
def hosts(tmp_path):
    """Command prefixes that run something on host a (10.77.0.1) and on host b (10.77.0.2), and `ip` in each."""
    names = [f"ddp{os.getpid()}{x}" for x in "ab"]
    ip = lambda *args: subprocess.run(["ip", *args], check=True, capture_output=True)
    try:
        for n in names:
            ip("netns", "add", n)
        ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        prefixes = []
        for i, n in enumerate(names):
            ip("-n", n, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", n, "link", "set", device, "up")
            (tmp_path / f"hosts{i}").write_text(f"127.0.0.1 localhost\n127.0.1.1 host{'ab'[i]}\n")
            (tmp_path / "resolv.conf").write_text("")
            prefixes.append(["ip", "netns", "exec", n, "unshare", "--uts", "--mount", "sh", "-c",
                             f"hostname host{'ab'[i]}; mount --bind {tmp_path}/hosts{i} /etc/hosts; mount --bind {tmp_path}/resolv.conf /etc/resolv.conf; "
                             'exec "$@"', "sh"])
        yield prefixes, lambda i, *args: ip("-n", names[i], *args)
    finally:
        for n in names:
            for pid in subprocess.run(["ip", "netns", "pids", n], capture_output=True, text=True).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", n], capture_output=True)


def node(hosts, i, out, *args, script=HERE / "run_multi_node.sh", **env):
    env = {"MASTER_ADDR": "10.77.0.1", "NNODES": "2", "PYTHON": sys.executable, **env}
    return start(script, *TINY, "--out", out / "ab"[i], *args, env=env, prefix=hosts[0][i])


@needs_hosts
@pytest.mark.parametrize("first, nproc, ranked, name", [
    (1, 2, False, "10.77.0.1"), (0, 1, True, None), pytest.param(1, 1, True, "10.77.0.1", marks=pytest.mark.faults),
    pytest.param(0, 1, False, None, marks=pytest.mark.faults)])
def test_two_bare_hosts(hosts, data, tmp_path, first, nproc, ranked, name):
    """In either order, with NODE_RANK and without, one and two processes each; host a may know itself by its name."""
    with contextlib.ExitStack() as stack:
        both = {i: stack.enter_context(node(hosts, i, tmp_path, "--data", data, "--max-steps", "3", NPROC_PER_NODE=str(nproc),
                **({"NODE_RANK": str(i)} if ranked else {}), **({} if name or i else {"MASTER_ADDR": "hosta"}))) for i in (first, 1 - first)}
        outs = {i: p.communicate(timeout=100)[0] for i, p in both.items()}
    assert [p.returncode for p in both.values()] == [0, 0], outs
    assert f"{2 * nproc} processes on 2 nodes, gloo" in outs[0] + outs[1] and (outs[0] + outs[1]).count("done:") == 1
    assert "10.77.0.1 on wire" in outs[0] and "this node" in outs[0] and "10.77.0.2 on wire leads to 10.77.0.1" in outs[1]
    assert len(list(tmp_path.glob("*/checkpoint.pt"))) == 1 and (not ranked or (tmp_path / "a/checkpoint.pt").exists())


@needs_hosts
@pytest.mark.faults
def test_nodes_that_do_not_meet(hosts, data, tmp_path):
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(node(hosts, 0, tmp_path, RDZV_TIMEOUT="12"))
        b = stack.enter_context(node(hosts, 1, tmp_path, RDZV_TIMEOUT="12", NNODES="3"))
        printed = b.communicate(timeout=60)[0], a.communicate(timeout=60)[0]
        assert "NNODES is 3 on this node, hostb, and 2 on 10.77.0.1" in printed[0] and b.returncode == 2, printed
        assert "only 1 of 2 nodes came within 12 s" in printed[1] and a.returncode != 0 and "Traceback" not in printed[1]
    with node(hosts, 1, tmp_path, RDZV_TIMEOUT="2") as b:
        printed = b.communicate(timeout=60)[0]
        assert "nobody serves 10.77.0.1:29500 after 2 s" in printed and b.returncode == 2, printed
    with node(hosts, 1, tmp_path, MASTER_ADDR="10.99.0.1") as b:
        assert "no route" in b.communicate(timeout=60)[0] and b.returncode == 2


COUNTED = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("reference", {script!r})
reference = sys.modules["reference"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)
fetch, set_epoch = reference.ByteDataset.__getitems__, reference.ResumableSampler.set_epoch
file = open({folder!r} + f"/{{time.time_ns()}}.{{os.environ['RANK']}}.{{os.environ['WORLD_SIZE']}}", "w", buffering=1)

def counted(dataset, indices):
    if dataset.fingerprint:  # the training samples
        print(*indices, file=file)
    return fetch(dataset, indices)

def told(sampler, epoch, start):
    print("epoch", epoch, start, file=file)
    set_epoch(sampler, epoch, start)

reference.ByteDataset.__getitems__, reference.ResumableSampler.set_epoch = counted, told
sys.exit(reference.main())
"""


def check_counts(folder, n, save_every, batch):
    """From what each process wrote: in each epoch each sample counts once, whoever trained it, and what was trained again is no
    more than lies between two checkpoints. Returns the world sizes in order of time."""
    runs = []  # [world, {rank: [[epoch, start, indices], ...]}]
    for path in sorted(folder.iterdir(), key=lambda p: int(p.name.split(".")[0])):
        rank, world = map(int, path.name.split(".")[1:])
        parts = []
        for line in path.read_text().splitlines(True):
            if line.startswith("epoch "):
                parts.append([*map(int, line.split()[1:]), []])
            elif parts and line.endswith("\n"):  # what comes before is the rehearsal
                parts[-1][2].extend(map(int, line.split()))
        if parts:  # a process that was restarted before its first step wrote none
            if not runs or runs[-1][0] != world or rank in runs[-1][1]:
                runs.append([world, {}])
            runs[-1][1][rank] = parts
    assert all(len(ranks) == world for world, ranks in runs), runs
    order, redone = {}, []  # epoch -> the samples that count, in order
    for i, (world, ranks) in enumerate(runs):
        for parts in zip(*(ranks[r] for r in range(world))):
            epoch, start, _ = parts[0]
            kept = order.setdefault(epoch, [])
            for later in [e for e in order if e > epoch]:
                redone.append(len(order.pop(later)))
            redone.append(len(kept) - start)
            assert redone[-1] >= 0, f"epoch {epoch}: trained up to {len(kept)}, and on from {start}"
            kept[start:] = itertools.chain(*zip(*(indices for _, _, indices in parts)))
    for epoch in range(max(order)):
        assert sorted(order[epoch][:n]) == list(range(n)) and len(order[epoch]) < n + 2, f"epoch {epoch}"
    assert max(redone) <= 2 * save_every * 2 * batch
    return [world for world, _ in runs]


@needs_hosts
@pytest.mark.faults
@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_elastic_node_leaves_and_returns(hosts, data, tmp_path, fault):
    """NNODES=1:2. Host b dies or loses its wire: a goes on alone from the last checkpoint. b returns: a takes it back.
    Of what is trained between two checkpoints nothing is lost, and nothing counts twice."""
    shutil.copy(HERE / "run_multi_node.sh", tmp_path)
    (tmp_path / "seen").mkdir()
    (tmp_path / "ddp_train.py").write_text(COUNTED.format(script=str(SCRIPT), folder=str(tmp_path / "seen")))
    args = ["--data", data, "--epochs", "2000", "--save-every", "20", "--log-every", "10"]
    more = {"script": tmp_path / "run_multi_node.sh", "NNODES": "1:2", "MAX_RESTARTS": "9"}
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(node(hosts, i, tmp_path, *args, **more)) for i in (0, 1))
        before = read_until(a, "2 processes on 2 nodes") + read_until(a, r"step [4-9]\d/")
        if fault == "killed":
            for pid in [*tree(b.pid), b.pid]:
                os.kill(pid, signal.SIGKILL)
        else:
            hosts[1](1, "link", "set", "wire", "down")
        alone = read_until(a, "1 process on 1 node") + read_until(a, "going on from")
        assert int(re.search(r"going on from .* step (\d+)", alone)[1]) >= 20, before + alone
        read_until(a, "step")
        if fault == "cut":
            hosts[1](1, "link", "set", "wire", "up")
        again = stack.enter_context(node(hosts, 1, tmp_path, *args, **more))
        assert "going on from" in read_until(a, "2 processes on 2 nodes") + read_until(a, "going on from")
        read_until(a, "step")
        again.send_signal(0)
    worlds = check_counts(tmp_path / "seen", 250, save_every=20, batch=4)
    assert worlds == [2, 1, 2]


if __name__ == "__main__":
    {"worker": worker, "faulty": faulty, "bench_worker": bench_worker}[sys.argv[1]](*sys.argv[2:])
