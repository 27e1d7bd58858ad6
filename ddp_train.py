# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""Data-parallel training in PyTorch, in one file: one CPU, one GPU, many GPUs, many machines.

    python ddp_train.py                                        # one process, no process group
    torchrun --standalone --nproc_per_node=4 ddp_train.py      # NCCL on GPUs, gloo on CPUs
    torchrun --nnodes=2 --nproc_per_node=4 --node_rank=R --master_addr=A ddp_train.py
    python ddp_train.py --spawn 4                              # no launcher
    MASTER_ADDR=A NNODES=2 ./run_multi_node.sh                 # hosts without DNS; Slurm

Replace MODEL and DATA. The same command again goes on from the last checkpoint in --out.
"""

import argparse
import contextlib
import copy
import datetime
import fcntl
import gc
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import zipfile
import zlib
from collections import deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from multiprocessing.util import Finalize
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.hub import tqdm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SCRIPT = Path(sys.argv[0]).name  # begins each error line
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
START_LIMIT = 120.0  # seconds for joining, compiling and the first step, if --timeout is less


# ---- MODEL: replace it. The rest calls build_model(args), loss_fn(model(x), y), a mean over all
# ---- elements, and to evaluate score(model, x, y): a sum over samples for each name in SCORES.
class ByteTransformer(nn.Module):
    """Bytes (batch, time) -> logits of the next byte (batch, time, 256)."""

    def __init__(self, layers, heads, dim, seq_len, dropout=0.0):
        super().__init__()
        self.embed, self.position = nn.Embedding(256, dim), nn.Embedding(seq_len, dim)
        for embedding in (self.embed, self.position):  # torch's std of 1 would drown the blocks
            nn.init.normal_(embedding.weight, std=0.02)
        torch.backends.mha.set_fastpath_enabled(False)  # evaluate as in training
        form = dim, heads, 4 * dim, dropout, "gelu", 1e-5, True, True  # batch first, norm first
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(*form) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 256))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        x = self.embed(x.long()) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(x)


def build_model(args):
    if args.dim % args.heads or args.dropout >= 1:
        sys.exit("--dim must be divisible by --heads, and --dropout less than 1")
    return ByteTransformer(args.layers, args.heads, args.dim, args.seq_len, args.dropout)


def loss_fn(output, y):
    return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten().long())


def score(model, x, y):
    loss = loss_fn(model(x), y) * len(x)
    return torch.stack((loss, loss / math.log(2)))


# ---- DATA: replace it. The rest calls load_data(args): two map-style Datasets of (x, y), each
# ---- optionally with `collate`, and a checksum, by which ranks and checkpoints are compared.
def load_data(args):
    """Training set, held-out set (the last 5 %), checksum: of --data, or of Python's library.
    Sample i: the i-th window of seq_len bytes, and the same one byte later; both uint8."""
    where = Path(args.data or os.path.dirname(os.__file__))
    try:
        if where.is_dir():
            files = sorted(where.rglob("*") if args.data else where.glob("*.py"))
            data = bytearray(b"".join(f.read_bytes() for f in files if f.is_file()))
            data = torch.frombuffer(data, dtype=torch.uint8)
        else:  # mapped: all processes of a machine share its pages
            data = torch.from_file(str(where), size=where.stat().st_size, dtype=torch.uint8)
    except (OSError, ValueError, RuntimeError) as e:
        sys.exit(f"--data {where}: {e}")
    split = len(data) - max(len(data) // 20, args.seq_len + 1)
    if split < args.seq_len + 1:
        sys.exit(f"--data {where} has {len(data)} bytes, two windows of --seq-len + 1 are needed")
    crc = zlib.crc32(data[-1 << 25 :].numpy(), zlib.crc32(data[: 1 << 25].numpy()))  # of 64 MiB
    windows = [d.unfold(0, args.seq_len + 1, args.seq_len) for d in (data[:split], data[split:])]
    return *(TensorDataset(w[:, :-1], w[:, 1:]) for w in windows), f"{crc:08x}"  # views, no copies


UNIT = "bytes"  # what y has elements of
SCORES = "val_loss", "bits_per_byte"  # what score() sums
SHAPE = "--layers", "--heads", "--dim", "--seq-len"  # the same in a run and its checkpoint


def own_options(add):
    add("--data", metavar="PATH", help="file or folder; without it, the source of Python's library")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--heads", type=int, default=4, help="attention heads; they divide --dim")
    add("--dim", type=int, default=128, help="width of the model")
    add("--seq-len", type=int, default=128, help="bytes per sample")
    add("--dropout", type=float, default=0.0, help="dropout probability")


# ---- ARGUMENTS ----
MAY_BE_0 = "dropout warmup_steps grad_clip workers seed local_rank".split()
MAY_DIFFER = "data out device backend init_method local_rank timeout workers spawn".split()


def parse_args(argv):
    """The command line; --option_name is --option-name, too. Exits with 2 where it is wrong."""
    p = argparse.ArgumentParser(SCRIPT, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # all ranks of a node have the same line
    p.error = lambda problem: p.exit(2, f"{SCRIPT}: error: {problem}\n" if speaks else None)
    add = p.add_argument
    own_options(add)
    add("--out", default="out", help="folder of checkpoint and metrics; a run there goes on")
    add("--epochs", type=int, default=1, help="passes over the training data")
    add("--max-steps", type=int, help="stop after so many optimizer steps")
    add("--batch-size", type=int, default=32, help="samples per process and micro-batch")
    add("--accum", type=int, default=1, help="micro-batches per optimizer step")
    add("--lr", type=float, default=2e-3, help="peak for one process; W processes: W times that")
    add("--no-scale-lr", dest="scale_lr", action="store_false", help="--lr whatever the world size")
    add("--warmup-steps", type=int, default=100, help="of linear warm-up, then cosine")
    add("--grad-clip", type=float, default=1.0, help="largest norm of the gradient; 0: any")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the forward pass")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--sync-bn", action="store_true", help="batch norm over all processes (GPU)")
    add("--workers", type=int, default=0, help="loading processes per rank")
    add("--seed", type=int, default=0, help="of weights, order of samples, dropout")
    add("--log-every", type=int, default=20, help="steps between two lines of metrics")
    add("--eval-every", type=int, help="steps, besides once after each epoch")
    add("--save-every", type=int, default=100, help="steps between two checkpoints")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="local rank i: GPU i")
    add("--backend", help="gloo, nccl, ... (default: what torch has for the device)")
    add("--init-method", default="env://", help="env://, tcp://host:port or file:///path")
    add("--timeout", type=float, default=600.0, help="seconds to wait for another rank")
    add("--spawn", type=int, help="start so many processes here, without a launcher")
    add("--local-rank", type=int, help=argparse.SUPPRESS)  # torch.distributed.launch; as LOCAL_RANK
    args = p.parse_args([re.sub("^--[^=]+", lambda m: m[0].replace("_", "-"), a) for a in argv])
    for k, v in vars(args).items():
        if type(v) in (int, float) and not (0 < v < 2**31 or v == 0 and k in MAY_BE_0):
            p.error(f"--{k.replace('_', '-')} {v}: give a number > 0 and < 2**31")
    return args


# ---- PROCESSES. World says which one this is: 0 <= rank < size. No store: no process group.
World = namedtuple("World", "device rank size store", defaults=(0, 1, None))


def init_distributed(device="auto", backend=None, url="env://", timeout=600.0):
    """Join the process group that RANK, WORLD_SIZE, ... describe; without RANK there is none.
    All ranks call it, once; local rank i takes GPU i. CPU tensors go through gloo, and wait for no
    GPU. SystemExit if it cannot work. max(timeout, START_LIMIT) s limit it and each collective."""
    env, limit = os.environ, datetime.timedelta(seconds=max(timeout, START_LIMIT))
    no_gpu = device == "cpu" or "RANK" in env and torch.backends.mps.is_available()  # no gloo there
    gpus = 0 if no_gpu else torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator().type if gpus else "cpu"
    backend = backend or dist.get_default_backend_for_device(kind)
    try:
        rank, size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
        # Kubernetes sets no LOCAL_RANK. A GPU that Slurm shows to this process alone has number 0.
        local_rank = int(env.get("LOCAL_RANK", rank % max(1, gpus)))
        index = 0 if gpus == 1 and "CUDA_VISIBLE_DEVICES" in env else local_rank
        if not 0 <= rank < size or size > 1 and "RANK" not in env:
            raise ValueError("RANK and WORLD_SIZE go together, RANK < WORLD_SIZE: use torchrun")
        if 0 < gpus <= index or device not in ("auto", "cpu", kind):
            raise ValueError(f"--device {device}: no GPU {index} among {gpus}, use --device cpu")
        if not re.match(r"env://|tcp://.+:\d+$|file://.", url):
            raise ValueError(f"--init-method {url}: use env://, tcp://host:port or file:///path")
        if not dist.is_backend_available(backend) or backend == "nccl" and kind != "cuda":
            raise ValueError(f"--backend {backend}: not in this torch for {kind}, try gloo")
        if gpus:
            torch.accelerator.set_device_index(index)
            torch.set_float32_matmul_precision("high")  # TF32
        device = torch.device(kind, index) if gpus else torch.device("cpu")
        if "RANK" not in env:
            return World(device)
        if "TORCHELASTIC_RUN_ID" in env:  # if torchrun is killed its ranks die, too (on Linux)
            torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
        # Imported after the group it keeps that alive, and then gloo's threads may abort the exit.
        _ = torch._dynamo  # to look at it imports it, as DDP and optimizers do
        store, rank, size = next(dist.rendezvous(url, rank, size, timeout=limit))
        store = dist.PrefixStore(fresh_prefix(store, rank, size, limit), store)
        backends = backend if kind == "cpu" else f"cpu:gloo,{kind}:{backend}"
        bound = device if backend == "nccl" else None
        dist.init_process_group(backends, None, limit, size, rank, store, device_id=bound)
    except (RuntimeError, ValueError, OSError) as e:
        lines = str(e).strip().splitlines()  # NCCL says in the last one what it was
        why = lines[-1] if isinstance(e, dist.DistBackendError) else lines[0]
        hint = "" if isinstance(e, ValueError) else "; do all ranks run, and reach MASTER_ADDR?"
        sys.exit(f"{SCRIPT}: error: rank {env.get('RANK', 0)} cannot start: {why}{hint}")
    return World(device, rank, size, store)


def fresh_prefix(store, rank, size, limit):
    """A name that these processes share and no earlier ones did. All ranks call it.
    torchrun's store outlives a restart; who finds the address of a dead rank there hangs. So each
    writes a random id. Those that read the same ids make the same name, and count themselves in."""
    keys, seen, end = [f"id/{r}" for r in range(size)], None, datetime.datetime.now() + limit
    store.set(keys[rank], os.urandom(8).hex())
    while datetime.datetime.now() < end:
        name = f"round/{zlib.crc32(b''.join(store.multi_get(keys))):08x}"  # waits for all
        if store.add(name, int(name != seen)) == size:  # adds 1 once, then 0, to read it
            return name
        seen = name
        time.sleep(0.02 + size / 1000)
    raise RuntimeError("not all ranks came at the same time")


@contextlib.contextmanager
def process_group(world):
    """Leave together in the end; and if a rank fails, all at once, for a reason that is said once.
    The first to fail writes it into the store. A thread of each rank looks there, and so ends also
    one that hangs, or waits for its GPU. By os._exit: all else may wait for ever for the dead."""
    finished, leaving = threading.Event(), threading.Lock()

    def leave(why):
        leaving.acquire()  # one thread gets it, for ever
        mine = f"rank {world.rank} ({socket.gethostname()}): {why}"
        mine = first = mine.encode(errors="backslashreplace").decode()  # a file's name may need it
        with contextlib.suppress(RuntimeError):  # the store is gone with the process that had it
            first = world.store.compare_set("failed", "", mine).decode()
        if first != mine:
            mine = f"{mine.splitlines()[0]}; before that, {first.splitlines()[0]}"
        with contextlib.suppress(OSError):
            if first == mine or "\n" in first:  # of a mistake of the user's one rank tells
                print(f"{SCRIPT}: error: {mine}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        time.sleep(2)  # the store may be here, and the others look there; a short save ends
        _ = [p.kill() for p in active_children()]  # one may load for ever
        os._exit(1)

    def watch(main):
        while not finished.wait(1.0):
            with contextlib.suppress(RuntimeError):  # no store: in the end, or we end with it
                if world.store.check(["failed"]):
                    leave(f"ended at {traceback.extract_stack(sys._current_frames()[main])[-1]}")

    watcher = threading.Thread(target=watch, args=[threading.get_ident()], daemon=True)
    try:
        if world.store is not None:
            watcher.start()
        yield
        sum_over_ranks(torch.zeros(1))  # one that leaves early can abort one in a collective
    except BaseException as error:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises, if a worker was killed
            # What the user can mend is told in a line: SystemExit, or what the system refuses.
            mistake = isinstance(error, SystemExit) and isinstance(error.code, str)
            mistake = mistake or isinstance(error, OSError) and error.errno
            if world.store is not None:
                leave(str(error) if mistake else f"{error!r:.200}\n{traceback.format_exc()}")
            raise SystemExit(f"{SCRIPT}: error: {error}") if mistake else error
        finally:
            if world.store is not None:
                os._exit(1)
    if world.store is not None:
        finished.set()
        watcher.join()
        gc.collect()  # DDP is in reference cycles, and holds the group
        time.sleep(0.1)  # torch 2.6 hangs if gloo's thread is still freeing a tensor
        dist.destroy_process_group()


def gather(value):
    """[value of rank 0, value of rank 1, ...] on every rank. All ranks call it."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def sum_over_ranks(tensor):
    """Sum a CPU tensor over all ranks, in place, and return it. All ranks call it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def check_alike(facts):
    """Ranks that differ would hang, or train nonsense: compare a dict. All ranks call it."""
    (home, wanted), *others = gather((socket.gethostname(), facts))
    for rank, (host, theirs) in enumerate(others, 1):
        for k in wanted | theirs:
            if (a := theirs.get(k)) != (b := wanted.get(k)):
                sys.exit(f"{k} is {a} on rank {rank} ({host}), {b} on rank 0 ({home})")


class StopSignal:
    """stop() is 0, or the signal that a rank had got at the call before: the same on all ranks.
    All ranks call it equally often; its all-reduce runs while they train, on no GPU."""

    def __init__(self):
        self.signum, self.answer, self.flag, self.wait = 0, 0, torch.tensor([0]), lambda: None
        for s in SIGNALS:
            signal.signal(s, lambda signum, frame: setattr(self, "signum", int(signum)))

    def __call__(self):
        if not dist.is_initialized():
            self.answer = self.signum
        elif not self.answer:  # once there is one, it stays, and no rank asks again
            self.wait()
            self.answer, self.flag = int(self.flag), torch.tensor([self.signum])
            self.wait = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True).wait
        return self.answer

    def exit(self):
        """Last of all. 128 + signal, as in a shell; torchrun would then start the job again: 0."""
        if self.answer and "TORCHELASTIC_RUN_ID" not in os.environ:
            sys.exit(128 + self.answer)


# ---- DATA FOR EACH RANK ----
class ResumableSampler(DistributedSampler):
    """DistributedSampler that shuffles, and can start anywhere in an epoch, at any world size.
    The order of an epoch depends on seed and epoch alone; from `start` on, rank r takes every W-th
    sample from the r-th. All get equally many, by repeats at the end: see real_batches."""

    start = 0

    def set_epoch(self, epoch, start=0):
        super().set_epoch(epoch)
        self.start = start
        self.num_samples = math.ceil((len(self.dataset) - start) / self.num_replicas)

    def __iter__(self):
        n = len(self.dataset)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        mine = self.start + self.rank + self.num_replicas * torch.arange(len(self))
        return iter(order[mine % n].tolist())


def make_loader(dataset, batch_size, world, seed=0, workers=0):
    if workers:  # they ignore the SIGTERM of Python's exit, which waits; torch's SIGCHLD raises
        Finalize(None, lambda: [p.kill() for p in active_children() if p.daemon], exitpriority=0)
        Finalize(None, signal.signal, (signal.SIGCHLD, signal.SIG_DFL), exitpriority=1)  # first
    return DataLoader(
        dataset,
        batch_size,
        sampler=ResumableSampler(dataset, world.size, world.rank, seed=seed),
        collate_fn=getattr(dataset, "collate", None),
        pin_memory=world.device.type == "cuda",
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,  # they share the mapped data
        worker_init_fn=lambda _: [signal.signal(s, signal.SIG_IGN) for s in SIGNALS],  # end with us
        generator=torch.Generator().manual_seed(world.rank),  # seeds the workers, by rank
    )


def real_batches(loader, device):
    """(x, y, ..., rows, total): a batch on the device, without the sampler's repeats; the number of
    its samples, and that of the batches of all ranks at once. In training a mean loss counts with
    rows * world.size / total. Who has none left while others have gets a repeat, and rows 0."""
    if loader.num_workers and loader._iterator is None:
        time.sleep(0.1)  # before Python 3.12 a fork hangs if gloo's thread is freeing a tensor
    s, size = loader.sampler, loader.batch_size
    start, n, world = getattr(s, "start", 0), len(s.dataset), s.num_replicas
    for at, batch in zip(range(start, n, world * size), loader):
        rows = len(range(at + s.rank, n, world)[:size])
        batch = (t[: max(1, rows)].to(device, non_blocking=True) for t in batch)
        yield *batch, rows, min(world * size, n - at)


def seed_step(seed, step, rank):
    """Dropout differs by rank and step, and a resumed step draws what it drew: nothing to save."""
    rng = torch if torch.accelerator.is_available() else torch.default_generator  # CPU: 50 x faster
    rng.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)


def local_gradients(ddp, more):
    """A context: no all-reduce while `more` micro-batches of the step come. Also without DDP."""
    return ddp.no_sync() if more and hasattr(ddp, "no_sync") else contextlib.nullcontext()


def evaluate(model, loader, device, score, stop=lambda: 0):
    """The sum of score(model, x, y, ...), a tensor, over each sample once: float64, on the CPU.
    All ranks call it, with the bare module: no collective waits. Ends early if stop() is not 0."""
    for buffer in model.buffers() if dist.is_initialized() else ():
        if buffer.is_floating_point():  # the running means of batch norm: rank 0's are saved
            dist.broadcast(buffer, 0)
    sums, modes = [], [(m, m.training) for m in model.modules()]  # some may be frozen
    model.eval()
    with torch.no_grad():
        for *batch, rows, _ in real_batches(loader, device):
            sums.append(score(model, *batch) * min(1, rows))
            if stop():
                break
    _ = [m.train(mode) for m, mode in modes]
    return sum_over_ranks(torch.stack(sums).cpu().double().sum(0))


# ---- CHECKPOINT ----
class Checkpoint:
    """checkpoint.pt and the one before it, in a folder that one run has for itself.
    `parts`: what is saved and loaded, by name: whatever has state_dict() and load_state_dict().
    `run`: plain values, by name, in which a run and its checkpoint are alike. All ranks make it."""

    def __init__(self, folder, parts, run=None):
        self.path, self.previous = (Path(folder, f"checkpoint{x}.pt") for x in ("", ".prev"))
        self.parts, self.run, self.buffers = parts, run or {}, {}
        self.thread, self.saved = ThreadPoolExecutor(1), None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if self.rank == 0:  # lock it until this process ends
                self.lock = open(self.path.with_name(".lock"), "a")
                fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"--out {folder} is in use by another run: wait for it, or use another one")

    def resume(self):
        """Load the newest intact checkpoint of all machines; its plain values, {} if there is none.
        All ranks call it. SystemExit if all are damaged, or it is of another run or other parts."""
        # The first rank with a folder reads for all that have it: one machine, one read, one copy.
        folders = gather((socket.gethostname(), *os.stat(self.path.parent)[1:3]))  # inode, device
        readers = [folders.index(f) for f in folders]
        reader = readers[self.rank]
        found = self.newest() if reader == self.rank else (-1, None, "")
        steps, paths, damaged = zip(*gather(found))
        step, source = max(steps), steps.index(max(steps))
        if step < 0 and any(damaged):
            sys.exit(f"{max(damaged)}: nothing to go on from, use another --out")
        if step < 0:
            return {}
        if problem := damaged[self.rank]:
            print(f"warning: {problem}: going on from {paths[source]}", file=sys.stderr)
            with contextlib.suppress(FileNotFoundError):  # or it would be the one before the next
                os.replace(self.path, self.path.with_suffix(".damaged"))
        if lacks := [r for r in readers if steps[r] < step]:
            pieces = self.pieces(paths[source], source)
            self.replace(lambda f: f.writelines(pieces)) if self.rank in lacks else deque(pieces, 0)
            dist.all_reduce(torch.zeros(1))  # now it is there, for all ranks of a machine
        path = self.path if reader in lacks else paths[reader]
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if missing := [repr(name) for name in self.parts if name not in state]:
            sys.exit(f"{path} has no {missing[0]}, it has {', '.join(state)}: use another --out")
        for k, v in self.run.items():
            if (old := state["run"].get(k)) != v:
                sys.exit(f"{path} is of a run with {k} {old}, this one has {v}: use another --out")
        for name, part in self.parts.items():
            try:  # what a GradScaler saved without fp16 is empty
                part.load_state_dict(part.state_dict() if state[name] == {} else state[name])
            except (RuntimeError, ValueError) as e:  # torch says what differs
                sys.exit(f"{path} does not fit {name!r}, use another --out: {e!r:.300}")
        return state

    def newest(self):
        """(step, path, what is wrong with another) of the newest intact file; step -1: none."""
        problem = ""
        for path in [p for p in (self.path, self.previous) if p.is_symlink() or p.exists()]:
            try:
                with zipfile.ZipFile(path) as z:  # torch.load checks neither CRC-32 nor "directory"
                    if z.testzip() or any(i.external_attr for i in z.infolist()):
                        raise ValueError("a checksum or an attribute is wrong")
                state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
                return int(state["step"]), path, problem
            except Exception as e:  # whatever a damaged file makes zipfile, pickle and torch raise
                problem = f"rank {self.rank}: {path} is damaged or not a checkpoint ({e!r:.99})"
        return -1, None, problem

    def pieces(self, path, source):
        """Broadcast a file of rank `source`, piece by piece, and yield them. All ranks call it."""
        size = gather(path.stat().st_size if self.rank == source else 0)[source]
        with open(path if self.rank == source else os.devnull, "rb") as f:
            for start in range(0, size, 1 << 24):
                piece = torch.empty(min(1 << 24, size - start), dtype=torch.uint8)
                f.readinto(piece.numpy())
                dist.broadcast(piece, source)
                yield piece.numpy()

    def replace(self, fill):
        """fill(a new file), flush to the disk, rename: there is a checkpoint.pt at any moment."""
        beside = self.path.with_suffix(".tmp")
        with open(beside, "wb") as f:
            fill(f)
            f.flush()
            os.fsync(f.fileno())
        torch.load(beside, mmap=True, weights_only=True)  # what nobody can load replaces nothing
        if self.path.exists():
            self.previous.unlink(missing_ok=True)
            try:
                os.link(self.path, self.previous)  # a second name for it
            except OSError:  # a file system without links
                os.replace(self.path, self.previous)
        os.replace(beside, self.path)

    def save(self, step, **values):
        """Copy the state of the parts now, write it while training goes on. Rank 0 calls it.
        `values`: plain ones, or tensors. SystemExit if the save before it failed."""
        self.wait()
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        state = dict(**parts, **values, run=self.run, step=step)  # TypeError: a name twice
        copies, kept, self.buffers = {}, self.buffers, {}
        for i, t in enumerate(torch.utils._pytree.tree_leaves(state)):
            if isinstance(t, torch.Tensor):  # buffers are kept: pinned memory is slow to get
                if (key := (i, t.shape, t.dtype)) not in kept:
                    kept[key] = torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)
                copies[id(t)] = self.buffers[key] = kept[key].copy_(t.detach())
        state = copy.deepcopy(state, copies)  # all else, too: names, versions of modules
        self.saved = self.thread.submit(self.replace, lambda f: torch.save(state, f))

    def wait(self):
        """Wait until the last save is on the disk. SystemExit if it failed. Rank 0 calls it."""
        if self.saved and (error := self.saved.exception()):
            self.path.with_suffix(".tmp").unlink(missing_ok=True)
            sys.exit(f"cannot save {self.path}: {error}; the checkpoint before it is intact")


# ---- TRAINING ----
class Log:
    """Lines, or a bar at a terminal, metrics.jsonl, and TensorBoard if installed. On rank 0."""

    def __init__(self, rank, folder, step, total):
        self.rank, self.path, self.first = rank, Path(folder, "metrics.jsonl"), step
        if rank != 0:
            return
        self.bar = tqdm(total=total, initial=step, disable=None if sys.stdout.isatty() else True)
        self.board, self.began, kept = None, time.time(), 0
        self.path.touch()  # what was logged after `step` will be trained again
        for m in re.finditer(rb'{"step": (\d+), (.*"lr": )?.*}\n', self.path.read_bytes()):
            kept = m.end() if int(m[1]) < step + bool(m[2]) else kept
        os.truncate(self.path, kept)
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(Path(folder, "tensorboard"), purge_step=step)

    def write(self, step, **values):
        """Numbers of this step, by name. OSError if they cannot be written."""
        if self.rank != 0:
            return
        with open(self.path, "a") as f:
            f.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items() if self.board else ():
            self.board.add_scalar(name, value, step)
        words = [f"{v:,.0f} {k}" if "/" in k else f"{k} {v:.4g}" for k, v in values.items()]
        left = (time.time() - self.began) / max(1, step - self.first) * (self.bar.total - step)
        left = "{:02d}:{:02d} left".format(*divmod(max(0, int(left)), 60))
        self.say("  ".join([f"step {step}/{self.bar.total}", *words, left]))
        self.bar.update(step - self.bar.n)

    def say(self, line):
        """Print. Its reader may be gone (Ctrl-C ends a `| tee`, too): the run must still save."""
        with contextlib.suppress(OSError):
            if self.rank == 0:
                os.write(1, f"{line}\n".encode()) if self.bar.disable else self.bar.write(line)


def train(args, world, stop):
    """The whole run, from the data to the last checkpoint. All ranks call it."""
    device = world.device
    train_set, val_set, checksum = load_data(args)
    n, per_step = len(train_set), world.size * args.batch_size * args.accum
    options = {"--" + k.replace("_", "-"): v for k, v in vars(args).items() if k not in MAY_DIFFER}
    run = {k: options[k] for k in ("--seed", *SHAPE)} | {"data of CRC-32": checksum}
    program = zlib.crc32(Path(__file__).read_bytes())
    check_alike({"torch": torch.__version__, "program of CRC-32": program, **options, **run})
    loader = make_loader(train_set, args.batch_size, world, args.seed, args.workers)
    val_loader = make_loader(val_set, args.batch_size, world, args.seed, args.workers)
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = build_model(args).to(device)
    if args.sync_bn and device.type == "cpu":
        sys.exit("--sync-bn: torch's SyncBatchNorm has no CPU kernel")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_bn else model
    ddp = model
    if dist.is_initialized():
        ddp = DistributedDataParallel(
            model, gradient_as_bucket_view=True, find_unused_parameters=False, static_graph=False
        )
        # After its first backward pass DDP lays out its buckets anew, and three ranks or more sum
        # in another order: have that behind us, in each run, resumed or not.
        buffers = [b.clone() for b in model.buffers()]  # batch norm's, say
        x, y = next(iter(DataLoader(train_set, 2, collate_fn=loader.collate_fn)))
        loss_fn(ddp(x.to(device)), y.to(device)).backward()
        _ = [b.copy_(was) for b, was in zip(model.buffers(), buffers)]
        model.zero_grad()
    runner = torch.compile(ddp) if args.compile else ddp
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision)
    amp = torch.autocast(device.type, dtype, enabled=dtype is not None)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    checkpoint = Checkpoint(args.out, parts, run)
    state = checkpoint.resume()
    # Done by all ranks together: optimizer steps, epochs, samples of the epoch that runs.
    step, epoch, samples = start = [state.get(k, 0) for k in ("step", "epoch", "samples")]
    later = (max(args.epochs, epoch) - epoch - 1) * math.ceil(n / per_step)
    total = min(step + math.ceil((n - samples) / per_step) + later, args.max_steps or math.inf)
    peak = args.lr * (world.size if args.scale_lr else 1)
    nodes, accum = len(set(gather(socket.gethostname()))), args.accum
    place = f"{world.size} process(es) on {nodes} node(s), {device.type}, {args.precision}"
    size = f"{per_step} samples = {world.size} x {args.batch_size} x accum {accum}, lr {peak:g}"
    log = Log(world.rank, args.out, step, total)
    log.say(f"{place}: {size}; {'going on from' if step else 'from'} step {step} to {total}")

    batches, losses, seen, lr, norm = None, [], 0, 0.0, 0.0
    saved, since = step, time.perf_counter()
    while True:
        # ---- Between two steps: what is due.
        stopping, done = stop(), step >= total
        evaluating = step and (done or samples == 0 or step % (args.eval_every or total) == 0)
        saving = step > saved and (evaluating or stopping or step % args.save_every == 0)
        if losses and (saving or step % args.log_every == 0):  # waits for the GPU
            sums = sum_over_ranks(torch.stack(losses).cpu().double())
            if not sums.isfinite().all() or scaler.get_scale() < 1e-25:  # halved a hundred times
                gather(checkpoint.wait())  # nobody ends the others while rank 0 writes
                bad = step - len(sums) + 1 + int(sums.isfinite().int().argmin())
                sys.exit(f"loss or gradient not finite at step {bad}, saved is {saved}: lower --lr")
            rate = {f"{UNIT}/s": seen * y[0].numel() / (time.perf_counter() - since)}
            log.write(step, loss=float(sums.sum()) / seen, lr=lr, grad_norm=float(norm), **rate)
            losses, seen, since = [], 0, time.perf_counter()
        if saving:
            saved = step
            if world.rank == 0:
                checkpoint.save(step, epoch=epoch, samples=samples, args=vars(args))
        if evaluating and not stopping:
            means = evaluate(model, val_loader, device, amp(score), stop).view(-1) / len(val_set)
            if stop.answer:
                continue  # the steps are saved; the next start evaluates
            log.write(step, **dict(zip(SCORES, means.tolist(), strict=True)))
            since = time.perf_counter()
        if done or stopping:
            break

        # ---- One optimizer step.
        if batches is None:  # a new epoch, or the rest of one
            loader.sampler.set_epoch(epoch, samples)
            batches = real_batches(loader, device)
        seed_step(args.seed, step, world.rank)
        lr = peak * min(1, (step + 1) / max(1, args.warmup_steps))
        lr *= (1 + math.cos(math.pi * step / total)) / 2
        for group in optimizer.param_groups:
            group["lr"] = lr
        now = min(per_step, n - samples)  # the last step of an epoch may have fewer
        step_loss = 0.0
        for left in reversed(range(math.ceil(now / (world.size * args.batch_size)))):
            x, y, rows, _ = next(batches)
            with local_gradients(ddp, left), amp:  # another size of batch would be compiled anew
                loss = loss_fn((runner if rows == args.batch_size else ddp)(x), y) * rows
                scaler.scale(loss * (world.size / now)).backward()  # DDP divides by world.size
            step_loss = step_loss + loss.detach().float()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(step_loss + (0.0 if scaler.is_enabled() else 0 * norm))  # NaN if the norm is
        step, samples, seen = step + 1, samples + now, seen + now
        if step == start[0] + 1 and dist.is_initialized():  # all have compiled
            _set_pg_timeout(datetime.timedelta(seconds=args.timeout))
        if samples == n:  # counted before it is saved, or it would be trained again
            epoch, samples, batches = epoch + 1, 0, None

    checkpoint.wait()
    how = f"stopped by signal {stopping}, the same command goes on" if stopping else "done"
    log.say(f"{how}: step {step}; {checkpoint.path} has {saved}; more --epochs make it longer")


def main(argv):
    """Train as the command line says. SystemExit after a failure or a stop."""
    args = parse_args(argv)
    if args.spawn and "RANK" not in os.environ:  # become the torchrun that starts this again
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.spawn)))
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
        torchrun = "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.spawn}"
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until all are there: nothing is lost yet
    world = init_distributed(args.device, args.backend, args.init_method, args.timeout)
    with process_group(world):
        train(args, world, stop := StopSignal())
    stop.exit()


if __name__ == "__main__":
    main(sys.argv[1:])
