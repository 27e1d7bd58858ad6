#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tqdm"]
# ///
"""Data-parallel training in PyTorch, in one file: one CPU, one GPU, many GPUs, many machines.

    python ddp_train.py                                                 # one process, no process group
    torchrun --standalone --nproc_per_node=4 ddp_train.py               # 4 processes: NCCL on GPUs, gloo on CPUs
    torchrun --nnodes=2 --nproc_per_node=4 --node_rank=R --master_addr=A --master_port=29500 ddp_train.py
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_id=J --rdzv_backend=c10d --rdzv_endpoint=A:29500 ddp_train.py
    python ddp_train.py --spawn 4                                       # no launcher
    MASTER_ADDR=A NNODES=2 ./run_multi_node.sh                          # hosts without DNS, Slurm

The way through: arguments, init_distributed, data, model, preflight, DDP, resume, train, evaluate, save, leave.
To use it for something else, replace the two blocks MODEL and DATA. Start it again, and it goes on where it was.
"""
import argparse
import contextlib
import datetime
import fcntl
import functools
import gc
import io
import itertools
import json
import math
import mmap
import multiprocessing
import os
import re
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import uuid
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
FAILED = 1000  # beside the numbers of signals: a save failed


# ---- MODEL: replace this block. The rest knows `model(x)` and `loss_fn(output, target)`, a mean over all elements. ----
class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj, self.drop = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout * self.training, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.mlp(self.norm2(x)))


class ByteTransformer(nn.Module):
    """Bytes (batch, time) int64 → logits of the next byte (batch, time, 256)."""

    def __init__(self, layers=2, heads=4, dim=128, seq_len=128, dropout=0.0):
        super().__init__()
        self.embed, self.position, self.drop = nn.Embedding(256, dim), nn.Embedding(seq_len, dim), nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[Block(dim, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)
        for embedding in (self.embed, self.position):  # torch's default of 1 drowns what the blocks add to it
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x):
        x = self.drop(self.embed(x) + self.position.weight[: x.shape[1]])
        return self.head(self.norm(self.blocks(x)))


SHAPE = ("layers", "heads", "dim", "seq_len")  # the arguments in which a run and its checkpoint must agree


def build_model(args):
    return ByteTransformer(args.layers, args.heads, args.dim, args.seq_len, args.dropout)


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


# ---- DATA: replace this block. The rest knows a map-style Dataset of (x, target); its `__getitems__` (a batch at ----
# ---- once), `collate` and `fingerprint` (compared between the ranks) are optional.                            ----
class ByteDataset(Dataset):
    """Sample i is (x, y), both int64 (seq_len,): the i-th window of `data`, uint8, and the same one byte on."""

    def __init__(self, data, seq_len, fingerprint=None):
        self.windows, self.fingerprint = data.unfold(0, seq_len + 1, seq_len), fingerprint  # a view, not a copy

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, i):
        return self.windows[i, :-1].long(), self.windows[i, 1:].long()

    def __getitems__(self, indices):  # the DataLoader fetches a whole batch in one gather
        return self.windows[torch.tensor(indices)].long()

    @staticmethod
    def collate(rows):
        return rows[:, :-1], rows[:, 1:]


def load_data(path, seq_len):
    """The training and the held-out (last 5 %) ByteDataset of a file, a folder or, without a path, Python's library.

    A file is mapped: all processes of a machine share its pages. A folder is read into each process.
    """
    where = Path(path or sysconfig.get_paths()["stdlib"])
    try:
        if where.is_dir():
            files = where.rglob("*") if path else where.glob("*.py")
            buffer = bytearray(b"".join(f.read_bytes() for f in sorted(files) if f.is_file()))
        else:
            with open(where, "rb") as f:  # ACCESS_COPY: torch wants to be able to write; nothing is written
                buffer = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) if os.fstat(f.fileno()).st_size else b""
    except OSError as e:
        raise UserError(f"--data {where}: {e.strerror}") from e
    held_out = max(len(buffer) // 20, seq_len + 1)
    if len(buffer) - held_out < seq_len + 1:
        raise UserError(f"--data {where} has {len(buffer)} bytes, {2 * seq_len + 2} are needed: two windows of --seq-len + 1")
    step = max(1 << 20, len(buffer) // 64)  # up to 64 MiB all of it, of more 64 pieces of 1 MiB
    crc = 0
    for i in range(0, len(buffer), step):
        crc = zlib.crc32(memoryview(buffer)[i : i + (1 << 20)], crc)
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    return ByteDataset(data[:-held_out], seq_len, f"{crc:08x}"), ByteDataset(data[-held_out:], seq_len)


# ---- ARGUMENTS ----
class UserError(Exception):
    """What its user can mend: reported in one line, without a traceback."""


def first_line(error):
    return (str(error) or repr(error)).splitlines()[0][:200]


def complain(message):
    """Print one error line: from local rank 0 where torchrun started all ranks alike, else from the rank that knows."""
    if os.environ.get("LOCAL_RANK", "0") == "0" or "LOCAL_WORLD_SIZE" not in os.environ:
        print(f"ddp_train.py: error: {message}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        complain(f"{message} (see --help)")
        raise SystemExit(2)


def number(kind, allowed, words):
    def parse(text):
        with contextlib.suppress(ValueError):
            if allowed(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {words}, got {text!r}")

    return parse


def parse_args(argv=None):
    count, whole = number(int, lambda v: v > 0, "an integer > 0"), number(int, lambda v: v >= 0, "an integer >= 0")
    real, share = number(float, lambda v: 0 < v < math.inf, "a number > 0"), number(float, lambda v: 0 <= v < 1, "a number >= 0 and < 1")
    limit = number(float, lambda v: v >= 0, "a number >= 0")
    p = Parser(prog="ddp_train.py", formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False,
               description="Trains a byte-level transformer with data parallelism. Every --option-name may be spelled --option_name.")
    g = p.add_argument_group("run")
    g.add_argument("--data", metavar="PATH", help="file or folder to train on; without it the source of Python's own library")
    g.add_argument("--out", metavar="DIR", default="out", help="folder for checkpoint.pt and metrics.jsonl; a run found there goes on")
    g.add_argument("--fresh", action="store_true", help="start again; the old run in --out is moved to --out/old-N")
    g.add_argument("--epochs", type=count, metavar="N", default=1, help="passes over the training data")
    g.add_argument("--max-steps", type=count, metavar="N", help="optimizer steps, if they end before the epochs do")
    g.add_argument("--log-every", type=count, metavar="N", default=20, help="steps between two lines of loss and throughput")
    g.add_argument("--eval-every", type=count, metavar="N", help="steps between two evaluations, besides one after each epoch")
    g.add_argument("--save-every", type=count, metavar="N", default=100, help="steps between two checkpoints")
    g.add_argument("--seed", type=whole, metavar="N", default=0, help="seed of weights, order of samples and dropout")
    g = p.add_argument_group("optimization")
    g.add_argument("--batch-size", type=count, metavar="N", default=32, help="samples per process and micro-batch")
    g.add_argument("--accum", type=count, metavar="N", default=1, help="micro-batches per optimizer step (gradient accumulation)")
    g.add_argument("--lr", type=real, metavar="X", default=2e-3, help="peak learning rate of one process; W processes use W times that")
    g.add_argument("--scale-lr", action=argparse.BooleanOptionalAction, default=True, help="that linear scaling by the world size")
    g.add_argument("--warmup-steps", type=whole, metavar="N", default=100, help="steps of linear warm-up, before the cosine")
    g.add_argument("--grad-clip", type=limit, metavar="X", default=1.0, help="largest norm of the gradient; 0: any")
    g.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the forward pass (autocast)")
    g.add_argument("--compile", action="store_true", help="torch.compile the model")
    g.add_argument("--sync-bn", action="store_true", help="batch norm over all processes (GPU)")
    g.add_argument("--workers", type=whole, metavar="N", default=0, help="loading processes per rank; 0 is enough for mapped bytes")
    g = p.add_argument_group("model")
    g.add_argument("--layers", type=count, metavar="N", default=2, help="transformer blocks")
    g.add_argument("--heads", type=count, metavar="N", default=4, help="attention heads")
    g.add_argument("--dim", type=count, metavar="N", default=128, help="width")
    g.add_argument("--seq-len", type=count, metavar="N", default=128, help="bytes per sample")
    g.add_argument("--dropout", type=share, metavar="X", default=0.0, help="dropout probability")
    g = p.add_argument_group("processes")
    g.add_argument("--device", metavar="D", default="auto", help="auto, cpu, cuda or GPU numbers like 0,3: local rank i takes the i-th")
    g.add_argument("--backend", metavar="NAME", help="gloo, nccl, ... (default: what torch has for the device)")
    g.add_argument("--init-method", metavar="URL", default="env://", help="env://, tcp://host:port or file:///path")
    g.add_argument("--spawn", type=count, metavar="N", help="start N processes on this machine without a launcher")
    g.add_argument("--timeout", type=real, metavar="SECONDS", default=600.0, help="longest wait for another rank")
    g.add_argument("--comm-hook", choices=("none", "fp16", "bf16", "powersgd"), default="none", help="compression of the all-reduced gradients")
    g.add_argument("--sync-every", type=count, metavar="N", default=1, help="local SGD: average weights every N steps, not gradients every step")
    p.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # python -m torch.distributed.launch adds it
    argv = [re.sub("^--[^=]+", lambda m: m[0].replace("_", "-"), a) for a in (sys.argv[1:] if argv is None else argv)]
    args = p.parse_args(argv)
    if args.dim % args.heads:
        p.error(f"--dim {args.dim} is not divisible by --heads {args.heads}")
    if args.sync_every > 1 and args.comm_hook != "none":
        p.error("--sync-every averages weights and never all-reduces gradients: leave out --comm-hook")
    return args


# ---- PROCESSES ----
@dataclass(frozen=True)
class Place:
    """Where this process stands. Made once by `init_distributed`, then passed."""

    device: torch.device
    rank: int = 0  # 0 to world_size - 1, over all nodes; rank 0 alone prints and saves
    local_rank: int = 0  # 0 to processes of this node - 1: which GPU
    world_size: int = 1
    store: object = None  # the key-value store of the process group; None without one

    @property
    def is_main(self):
        return self.rank == 0


def pick_device(name, local_rank=0, processes=None):
    """The torch.device of this process, one of `processes` on this node if that is known; makes it the current one.
    Raises UserError where it is not there."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and found is None):
        return torch.device("cpu")
    kind = found.type if found else "cuda"
    numbers = [int(i) for i in name.split(",")] if re.fullmatch(r"\d+(,\d+)*", name) else None
    if numbers is None and name not in ("auto", "cuda", kind):
        raise UserError(f"--device {name}: give auto, cpu, cuda or GPU numbers like 0,3")
    there = torch.accelerator.device_count() if found and (numbers or name in ("auto", kind)) else 0
    numbers = numbers or list(range(there))
    needed = processes or local_rank + 1
    if needed > len(numbers) or max(numbers) >= there:
        raise UserError(f"insufficient {kind.upper()} devices: {needed} process(es) with --device {name} on a machine that "
                        f"has {there}: start fewer (--nproc_per_node), or use --device cpu")
    torch.accelerator.set_device_index(numbers[local_rank])
    return torch.device(kind, numbers[local_rank])


def init_distributed(device="auto", backend=None, init_method="env://", timeout=600.0, local_rank=None):
    """Join the process group that the environment describes (RANK, WORLD_SIZE, ...; see the README), if any.

    All ranks call it, once. Returns a Place: of a single process without a group where RANK is not set. CPU tensors
    always have gloo, so that flags, losses and checkpoints never wait for the GPU. Raises UserError.
    """
    env = os.environ
    try:
        rank, world_size, env_local_rank, processes = (
            int(env[k]) if k in env else None for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    except ValueError as e:
        raise UserError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers: {e}") from e
    if rank is None and world_size in (None, 1):
        return Place(pick_device(device))
    if rank is None or world_size is None:
        raise UserError("RANK and WORLD_SIZE go together: set both (or start with torchrun, which does)")
    if not 0 <= rank < world_size:
        raise UserError(f"RANK={rank} must be from 0 to WORLD_SIZE - 1 = {world_size - 1}")
    if init_method == "env://" and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise UserError("RANK is set, MASTER_ADDR or MASTER_PORT is not: set them to a port of rank 0's host, or use torchrun")
    local_rank = local_rank if env_local_rank is None else env_local_rank
    if local_rank is None:  # Kubernetes operators do not set it
        local_rank = rank % max(1, torch.accelerator.device_count())
    device = pick_device(device, local_rank, processes)
    # DDP and the optimizers import torch._dynamo. Imported while there is a group, it keeps that alive for ever (as a
    # default argument), so destroy_process_group() joins no thread and one run in six aborts in the interpreter's exit.
    from torch import _dynamo  # noqa: F401
    backend = backend or dist.get_default_backend_for_device(device)
    if backend not in dist.Backend.backend_list or not dist.is_backend_available(backend):
        raise UserError(f"--backend {backend} is not in this build of torch: try gloo{' or nccl' * dist.is_nccl_available()}")
    if backend == "nccl" and device.type != "cuda":
        raise UserError("--backend nccl needs GPUs: leave --backend out, or use gloo")
    limit = datetime.timedelta(seconds=timeout)
    where = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" if init_method == "env://" else init_method
    try:
        # torchrun's own store is there before we are. Where it does not answer, torchrun was killed. (torch tries twice.)
        patience = min(limit, datetime.timedelta(seconds=30)) if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else limit
        store, rank, world_size = next(dist.rendezvous(init_method, rank, world_size, timeout=patience))
        store.set_timeout(limit)
        store = dist.PrefixStore(generation(store, rank, world_size, timeout), store)
        dist.init_process_group(
            backend if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}", store=store, rank=rank,
            world_size=world_size, timeout=limit, device_id=device if backend == "nccl" else None)
    except (RuntimeError, ValueError, OSError) as e:
        hint = ("another program has that port: choose another" if "EADDRINUSE" in str(e) else
                f"do all {world_size} ranks run, and is it reachable from each?")
        raise UserError(f"rank {rank} cannot join the process group at {where}: {hint} ({first_line(e)})") from e
    return Place(device, rank, local_rank, world_size, store)


def generation(store, rank, world_size, timeout):
    """A name that only these processes share. All ranks call it. Raises RuntimeError if some do not come in time.

    torchrun's store outlives a restart, with the addresses of the processes before in it: a rank that reads those hangs.
    So each rank says hello with a number of its own. Rank 0 answers each hello with a name that is new where one hello
    is, and the name holds once all ranks have joined it.
    """
    me, roll, joined, end = uuid.uuid4().hex[:16], None, None, time.monotonic() + timeout
    store.set(f"hello/{rank}", me)
    hellos = [f"hello/{r}" for r in range(world_size)]
    while time.monotonic() < end:
        if rank == 0 and store.check(hellos) and roll != (roll := store.multi_get(hellos)):
            name = uuid.uuid4().hex[:16]
            for r, hello in enumerate(roll):
                store.set(f"welcome/{r}", f"{hello.decode()} {name}")
        if store.check([f"welcome/{rank}"]):
            hello, name = store.get(f"welcome/{rank}").decode().split()
            if hello == me:
                joined, before = name, joined
                if store.add(name, int(joined != before)) == world_size:
                    return name
        time.sleep(0.01)
    late = [str(r) for r in range(world_size) if not store.check([hellos[r]])]
    raise RuntimeError(f"rank {', '.join(late)} did not come" if late else "not all ranks came at the same time")


def gather(value):
    """[value of rank 0, value of rank 1, ...] on every rank. `value` can be pickled. All ranks call it."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(tensor):
    """Sum a CPU tensor over all ranks, in place, and return it. All ranks call it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def together(work):
    """work() of this rank; where it raises UserError on any rank, all raise that. All ranks call it."""
    result, problem = None, None
    try:
        result = work()
    except UserError as e:
        problem = str(e)
    for rank, (host, line) in enumerate(gather((socket.gethostname(), problem))):
        if line:
            raise UserError(f"rank {rank} (host {host}): {line}" if rank else line)
    return result


@contextlib.contextmanager
def process_group(place):
    """Leave the group in good order: together where all ranks leave, at once where this one failed.

    UserError and SystemExit are raised on all ranks alike; rank 0 passes the first on, to be printed. Of other errors the
    first rank to fail prints its traceback, before its connections break; the others see those broken, a line each.
    """
    try:
        try:
            yield
            leaving = None
        except (UserError, SystemExit) as e:
            leaving = e if place.is_main or isinstance(e, SystemExit) else SystemExit(1)
            traceback.clear_frames(e.__traceback__)  # they hold the DDP module, and that the group
        except Exception as e:
            report(place, e)
            traceback.clear_frames(e.__traceback__)
            raise SystemExit(1) from None
        sum_over_ranks(torch.zeros(1))  # a rank that destroys its group while another is in a collective can abort that one
        if leaving is not None:
            raise leaving
    finally:
        gc.collect()  # DDP is in reference cycles, and so are the loaders
        end_workers()
        if dist.is_initialized():
            dist.destroy_process_group()


def end_workers():
    """Kill what is left of the DataLoaders' workers: they ignore SIGTERM, and Python would wait for them at exit for ever."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises an error where a worker is killed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
            child.join()
    signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def report(place, error):
    """Print the traceback of the first rank that fails, tell torchrun, and say after a time-out who did not answer."""
    first = not re.search("closed by peer|reset by peer|broken pipe|remote process exited", str(error), re.I)
    try:
        if first and place.store is not None:
            place.store.set(f"failed/{place.rank}", "")
            first = place.store.add("failures", 1) == 1
            if first and re.search("timed? ?out", str(error), re.I):
                time.sleep(3)  # the other ranks that wait give up at about the same time
                silent = [str(r) for r in range(place.world_size) if not place.store.check([f"failed/{r}"])]
                at = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}torch{os.sep}" not in f.filename][-1]
                print(f"rank {place.rank}: waited --timeout for rank {', '.join(silent)} in `{at.line}`", file=sys.stderr)
    except RuntimeError:  # the store was rank 0's or torchrun's, and is gone with it
        first = False
    if first:
        get_error_handler().record_exception(error)  # what @record does, for the first error alone
        text = "".join(traceback.format_exception(error))
        print(f"rank {place.rank} ({socket.gethostname()}) failed:\n{text}", file=sys.stderr, flush=True)
    else:
        print(f"rank {place.rank} stops: another rank failed or was killed ({first_line(error)})", file=sys.stderr, flush=True)


class StopRequest:
    """SIGTERM, SIGINT or SIGUSR1 to any rank becomes a stop of all ranks at the same step. A second SIGINT kills at once.

    `ask` starts an all-reduce of a flag, `answer` ends it: the step in between hides it, and the GPU is not involved.
    """

    def __init__(self):
        self.code, self.since = 0, 0.0
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        for s in SIGNALS:
            signal.signal(s, self._note)

    def _note(self, signum, frame):
        # Within a second it is one Ctrl-C that arrives twice: from the terminal and from torchrun.
        if signum == signal.SIGINT and self.code and time.monotonic() - self.since > 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.code, self.since = self.code or signum, self.since or time.monotonic()

    def ask(self, failed=False):
        """Start to ask all ranks whether one has to stop. `failed`: this one has. All ranks call it."""
        if self.parent not in (None, os.getppid()):
            self.code = self.code or signal.SIGTERM  # torchrun was killed: nobody would restart or stop us
        self.flag = torch.tensor([FAILED if failed else int(self.code)])
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True) if dist.is_initialized() else None

    def answer(self):
        """0, or the largest number among all ranks when they asked: a signal's or FAILED. All ranks call it."""
        if self.work is not None:
            self.work.wait()
        return int(self.flag)


def ignore_signals(worker_id):
    """In a DataLoader worker: it ends with its parent. A signal to the whole job would kill it before the last batch."""
    for s in SIGNALS:
        signal.signal(s, signal.SIG_IGN)


def preflight(place, args, model, train_set, val_set):
    """Compare what must be alike; returns the number of nodes. Raises UserError on all ranks. All ranks call it."""
    shapes = " ".join(f"{k}{list(v.shape)}" for k, v in model.state_dict().items())
    may_differ = {"data", "out", "device", "local_rank", "timeout", "workers", "spawn", "init_method", "fresh"}
    same_data = "are the data the same on every node?"
    facts = [  # what this rank has, and what to do where another has something else
        (f"ddp_train.py with CRC-32 {zlib.crc32(Path(__file__).read_bytes()):08x}", "copy the same file to every node"),
        (f"torch {torch.__version__}", "install the same version on every node"),
        *((f"--{k.replace('_', '-')} {v}", "start every rank with the same arguments")
          for k, v in vars(args).items() if k not in may_differ),
        (f"{len(train_set)} training samples", same_data),
        (f"{len(val_set)} held-out samples", same_data),
        (f"data with CRC-32 {getattr(train_set, 'fingerprint', None)}", same_data),
        (f"model parameters with CRC-32 {zlib.crc32(shapes.encode()):08x}", "is the model the same on every node?"),
    ]
    everyone = gather((socket.gethostname(), place.local_rank, facts))
    for mine, *others in zip(*(facts for _, _, facts in everyone)):
        odd = [r for r, other in enumerate(others, 1) if other != mine]
        if odd:
            also = f" (ranks {', '.join(map(str, odd[1:]))} differ, too)" if odd[1:] else ""
            raise UserError(f"rank {odd[0]} (host {everyone[odd[0]][0]}) has {others[odd[0] - 1][0]}, rank 0 has {mine[0]}{also}: {mine[1]}")
    return sum(local_rank == 0 for _, local_rank, _ in everyone)


# ---- DATA FOR EACH RANK ----
class ResumableSampler(DistributedSampler):
    """DistributedSampler that can start anywhere in an epoch, at any world size, so that a resumed epoch is exact.

    The order of an epoch depends on seed and epoch alone; from `start` on, rank r takes every W-th sample from the r-th.
    As in DistributedSampler all ranks get equally many, by repeats at the very end: the loss counts those as nothing.
    """

    start = 0

    def set_epoch(self, epoch, start=0):
        super().set_epoch(epoch)
        self.start = start

    def __len__(self):
        return -(-(len(self.dataset) - self.start) // self.num_replicas)

    def __iter__(self):
        n = len(self.dataset)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        first = self.start + self.rank
        mine = order[torch.arange(first, first + len(self) * self.num_replicas, self.num_replicas) % n]
        for part in mine.split(1 << 16):  # a list of all of them would take 40 bytes a sample
            yield from part.tolist()


def make_loader(dataset, batch_size, sampler, place, workers=0):
    fork = sys.platform == "linux"  # no longer Python's default from 3.14 on, but the way to share mapped data
    return DataLoader(dataset, batch_size, sampler=sampler, num_workers=workers, persistent_workers=workers > 0,
                      worker_init_fn=ignore_signals, collate_fn=getattr(dataset, "collate", None),
                      pin_memory=place.device.type == "cuda", multiprocessing_context="fork" if fork and workers else None,
                      generator=torch.Generator().manual_seed(place.rank))  # of the workers: augmentation differs by rank


def batches_of(loader):
    """iter(loader). Its first call forks the workers, and that needs a quiet moment.

    After a collective gloo's thread frees the tensors, for which it becomes a Python thread. Where a fork falls into that,
    the child of a Python before 3.12 waits for a lock for ever (measured: one fork of some hundred).
    """
    if loader.num_workers and loader._iterator is None and dist.is_initialized():
        time.sleep(0.1)
    return iter(loader)


# ---- CHECKPOINT ----
class Checkpoint:
    """`checkpoint.pt` and the one before it, in a folder that one run has for itself. Rank 0 saves."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.path, self.previous = self.folder / "checkpoint.pt", self.folder / "checkpoint.prev.pt"
        self.thread, self.error, self.damaged = None, None, False

    def lock(self):
        """Make the folder and take its lock. Rank 0 calls it. Raises UserError if another run has it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock_file = open(self.folder / ".lock", "a+")
            for attempt in range(50):  # a run that was told to stop may still be saving
                with contextlib.suppress(BlockingIOError, PermissionError):
                    return fcntl.lockf(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by workers, as flock is
                time.sleep(0.1)
        except OSError as e:
            raise UserError(f"--out {self.folder} cannot be written: {e.strerror}") from e
        raise UserError(f"--out {self.folder} is in use by another run: wait for it, or give this one another --out")

    def move_aside(self):
        """Move an old run to `old-N`. The first rank of each node calls it."""
        names = (self.path.name, self.previous.name, "metrics.jsonl", "tensorboard")
        if old := [self.folder / name for name in names if (self.folder / name).exists()]:
            target = next(p for n in itertools.count(1) if not (p := self.folder / f"old-{n}").exists())
            target.mkdir()
            for p in old:
                p.rename(target / p.name)

    def save(self, state):
        """Copy `state` now, write it while training goes on. Never two at once. Rank 0 calls it."""
        self.wait()
        state = tree_map_only(torch.Tensor, lambda t: t.detach().to("cpu", copy=True), state)
        self.thread = threading.Thread(target=self._write, args=(state,))
        self.thread.start()

    def _write(self, state):
        beside = self.folder / "checkpoint.tmp"
        try:
            with open(beside, "wb") as f:
                torch.save(state, f)
                f.flush()
                os.fsync(f.fileno())
            if self.path.exists() and not self.damaged:
                self.previous.unlink(missing_ok=True)
                try:
                    os.link(self.path, self.previous)  # a second name for it: checkpoint.pt is there at every moment
                except OSError:  # a file system without links
                    os.replace(self.path, self.previous)
            os.replace(beside, self.path)
            folder = os.open(self.folder, os.O_RDONLY)
            os.fsync(folder)  # the renames
            os.close(folder)
            self.damaged = False
        except Exception as e:  # reported by the next step, not by this thread
            self.error = f"cannot save {self.path}: {first_line(e)}"
            with contextlib.suppress(OSError):
                beside.unlink()

    def wait(self):
        """Wait until the last save is on the disk."""
        if self.thread is not None:
            self.thread.join()

    def read(self):
        """(step, path, bytes) of the newest intact file, step -1 without one, and a list of what is wrong with damaged ones.

        torch.load does not check the CRC-32 of the records; weights_only keeps code out.
        """
        problems = []
        for path in (self.path, self.previous):
            if not path.exists():
                continue
            try:
                content = path.read_bytes()
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    # A record that one flipped bit makes a directory has a good CRC, and torch takes stray memory for its content.
                    if bad := archive.testzip() or next((i.filename for i in archive.infolist() if i.external_attr), None):
                        raise ValueError(f"CRC-32 or attribute of {bad} is wrong")
                return load_checkpoint(content)["step"], path, content, problems
            except Exception as e:  # whatever a damaged archive makes zipfile, pickle or torch raise
                self.damaged |= path == self.path
                problems.append(f"{path} is damaged or not a checkpoint ({first_line(e)})")
        return -1, None, b"", problems


def load_checkpoint(content):
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(state["step"], int) or not isinstance(state["model"], dict):
        raise ValueError("no step or model in it")
    return state


def newest_checkpoint(place, checkpoint):
    """The newest intact checkpoint of any node on every rank, or None. All ranks call it; no shared disk is needed."""
    # The other ranks of a node see the same folder as its first.
    step, path, content, problems = checkpoint.read() if place.local_rank == 0 else (-1, None, b"", [])
    everyone = gather((step, str(path), len(content), "; ".join(problems)))
    source = max(range(len(everyone)), key=lambda r: everyone[r][0])
    step, path, size, _ = everyone[source]
    for rank, (_, _, _, problem) in enumerate(everyone):
        if problem and step < 0:
            raise UserError(f"rank {rank}: {problem}: nothing to go on from; --fresh moves it aside and starts again")
        if problem and place.is_main:
            print(f"warning: rank {rank}: {problem}; going on from {path} of rank {source} (step {step})", file=sys.stderr, flush=True)
    if step < 0:
        return None
    if dist.is_initialized():
        content = bytearray(content if place.rank == source else size)
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), source)
    return load_checkpoint(content)


# ---- TRAINING ----
class Log:
    """What a run tells: lines or a progress bar, metrics.jsonl, TensorBoard where it is installed. Rank 0 makes it."""

    def __init__(self, folder, step, total):
        self.total, self.folder, self.first, self.board, self.bar, self.error = total, folder, step + 1, None, None, None
        self.file, end = open(folder / "metrics.jsonl", "a+", buffering=1), 0
        self.file.seek(0)
        for line in iter(self.file.readline, ""):
            if not line.endswith("}\n") or json.loads(line).get("step", 0) > step:
                break  # cut short by a kill, or of a step that will be trained again
            end = self.file.tell()
        self.file.truncate(end)
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm
                self.bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True)

    def write(self, step, **values):
        """Values of this step, by name: numbers."""
        try:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
            if self.board is None:
                try:  # only now: it takes a second to import
                    from torch.utils.tensorboard import SummaryWriter
                    self.board = SummaryWriter(self.folder / "tensorboard", purge_step=self.first)
                except ImportError:
                    self.board = False
            for name, value in values.items() if self.board else ():
                self.board.add_scalar(name, value, step)
        except OSError as e:  # TensorBoard raises what its thread could not write, a little later
            self.error = f"cannot write the metrics in {self.folder}: {first_line(e)}"
        text = ", ".join(f"{name} {value:{',.0f' if value > 1000 else '.4g'}}" for name, value in values.items())
        if self.bar is not None and "loss" in values:
            self.bar.set_postfix_str(text)
        else:
            self.say(f"step {step}/{self.total}: {text}")

    def say(self, line):
        print(line, flush=True) if self.bar is None else self.bar.write(line)


def wrap(model, place, hook="none"):
    """Wrap `model` in DDP, or return it where there is no process group. Raises UserError for a hook that torch refuses."""
    if not dist.is_initialized():
        return model
    one_bucket = {"bucket_cap_mb": 1 << 20} if hook == "powersgd" and place.device.type == "cpu" else {}
    ddp = DistributedDataParallel(model, device_ids=[place.device] if place.device.type == "cuda" else None,
                                  gradient_as_bucket_view=True, **one_bucket)
    if hook == "powersgd":  # on gloo its collectives keep one order on all ranks only with a single bucket
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
        ddp.register_comm_hook(power.PowerSGDState(None, matrix_approximation_rank=12, start_powerSGD_iter=10), power.powerSGD_hook)
    elif hook != "none":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        try:
            ddp.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
        except TypeError as e:
            raise UserError(f"--comm-hook {hook} does not work with this build of torch, fp16 does ({first_line(e)})") from e
    return ddp


def evaluate(model, loader, place, loss_fn=loss_fn, amp=contextlib.nullcontext, stop=None):
    """Mean loss, each sample counted once, the same at any world size. None if `stop` came. All ranks call it.

    `loader` has every W-th sample from the r-th, without padding. `model` is the bare module: no collective hides in it,
    so ranks may have more or fewer samples, or none.
    """
    batches, sums = batches_of(loader), [torch.zeros(2, device=place.device)]
    model.eval()
    with torch.inference_mode():
        for _ in range(0, len(loader.dataset), place.world_size * loader.batch_size):  # as many on each rank
            if stop is not None:
                stop.ask()
            if (batch := next(batches, None)) is not None:
                x, y = (t.to(place.device, non_blocking=True) for t in batch)
                with amp():
                    loss = loss_fn(model(x), y).float()
                sums.append(torch.stack([loss * len(x), torch.ones_like(loss) * len(x)]))
            if stop is not None and stop.answer():
                break
        else:
            stop = None
    model.train()
    total, rows = sum_over_ranks(torch.stack(sums).cpu().double().sum(0)).tolist()
    return total / rows if stop is None else None


def all_reduce_seconds(place, numel):
    """Seconds of one all-reduce of `numel` float32 on the device. All ranks call it."""
    synchronize = torch.accelerator.synchronize if place.device.type != "cpu" else lambda: None
    for size in (1, numel):
        buffer = torch.zeros(size, device=place.device)
        synchronize()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        synchronize()
    return time.perf_counter() - start


def waiting_share(ddp):
    """The share of a step that waits for the all-reduce, by DDP's own clock; None before it has measured one."""
    clock = ddp._get_ddp_logging_data()
    forward, backward, comm, overlap = (clock.get(f"avg_{k}_time", 0) for k in (
        "forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap"))
    return (comm - overlap) / (forward + backward + comm - overlap) if comm else None


def train(args, place, stop):
    """The whole run, from the data to the last checkpoint. All ranks call it."""
    world, checkpoint = place.world_size, Checkpoint(args.out)
    say = functools.partial(print, flush=True) if place.is_main else lambda *a: None
    train_set, val_set = together(lambda: load_data(args.data, args.seq_len))
    torch.manual_seed(args.seed)
    model = build_model(args).to(place.device)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if place.device.type == "cpu" and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
            raise UserError("--sync-bn: torch's SyncBatchNorm has no CPU kernel")
    nodes = preflight(place, args, model, train_set, val_set)
    together(lambda: checkpoint.lock() if place.is_main else None)
    if args.fresh and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # torchrun restarts with the same arguments
        for rank_0 in (True, False):  # one after the other: on a shared disk nothing is left for the other nodes
            together(lambda: checkpoint.move_aside() if place.local_rank == 0 and place.is_main == rank_0 else None)
    old = newest_checkpoint(place, checkpoint)

    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=place.device.type in ("cpu", "cuda", "mps", "xpu"))
    scaler = torch.amp.GradScaler(place.device.type, enabled=args.precision == "fp16")
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
    amp = (lambda: torch.autocast(place.device.type, dtype)) if dtype else contextlib.nullcontext
    ddp = together(lambda: wrap(model, place, args.comm_hook))
    runner = torch.compile(ddp) if args.compile else ddp
    if world > 1:
        # DDP lays out its buckets anew after its first backward pass, and with it the order in which three ranks or more
        # are summed. A rehearsal makes that happen before the first step, so that a resumed run rounds like any other.
        buffers = {k: v.clone() for k, v in model.named_buffers()}
        x, y = next(iter(make_loader(train_set, args.batch_size, range(min(args.batch_size, len(train_set))), place)))
        with amp():
            loss = loss_fn(runner(x.to(place.device)), y.to(place.device))
        loss.backward()
        optimizer.zero_grad()
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])

    # ---- Resume. `samples` is of this epoch, `loss_sum` over `loss_rows` samples since the last log line; all of all ranks.
    at = {"epoch": 0, "step": 0, "samples": 0, "evaluated": 0, "loss_sum": 0.0, "loss_rows": 0}
    n, per_step = len(train_set), world * args.batch_size * args.accum
    identity = {"--seed": args.seed, "training samples": n, "data with CRC-32": getattr(train_set, "fingerprint", None),
                **{f"--{k.replace('_', '-')}": getattr(args, k, None) for k in SHAPE}}
    if old is not None:
        try:
            problem = next((f"{k} {old['run'][k]}, this run has {k} {v}" for k, v in identity.items() if old["run"][k] != v), None)
            if problem is None:
                model.load_state_dict(old["model"])
                optimizer.load_state_dict(old["optimizer"])
                scaler.load_state_dict(old["scaler"] if scaler.is_enabled() else {})
                at, old = {k: old[k] for k in at}, None
        except (RuntimeError, ValueError, KeyError) as e:
            problem = f"another model or program ({' '.join(str(e).split())[:160]})"
        if problem:
            raise UserError(f"the checkpoint in --out {args.out} is of a run with {problem}: use the same data and options, "
                            "another --out, or --fresh")
    # The steps of this epoch and of the epochs after it. The last step of an epoch may be smaller.
    total = at["step"] + -(-(n - at["samples"]) // per_step) + (args.epochs - at["epoch"] - 1) * -(-n // per_step)
    total = min(total, args.max_steps or total)
    longer = f"raise {'--max-steps, or ' * bool(args.max_steps)}--epochs"
    if at["step"] >= total and at["evaluated"] == at["step"]:
        return say(f"nothing left to do: {checkpoint.path} has {at['epoch']} epochs, {at['step']} steps; to train longer "
                   f"{longer}, to start again use --fresh")

    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    lr = args.lr * (world if args.scale_lr else 1)
    say(f"{world} process{'es' * (world > 1)} on {nodes} node{'s' * (nodes > 1)}, {dist.get_backend() if dist.is_initialized() else 'no group'}, "
        f"{place.device.type} ({torch.get_num_threads()} threads), {args.precision}; {numel:,} parameters; {n:,} training and "
        f"{len(val_set):,} held-out samples; effective batch {per_step} = {world} x {args.batch_size} x accum {args.accum}; "
        f"learning rate {lr:g}; {total} steps")
    if at["step"]:
        say(f"going on from {checkpoint.path} at epoch {at['epoch']}, step {at['step']}")
    if world > 1:
        say(f"one all-reduce of the gradients ({numel * 4 / 1e6:.1f} MB) takes {all_reduce_seconds(place, numel) * 1e3:.1f} ms")

    log = Log(checkpoint.folder, at["step"], total) if place.is_main else None
    sampler = ResumableSampler(train_set, world, place.rank, seed=args.seed)
    loader = make_loader(train_set, args.batch_size, sampler, place, args.workers)
    val_loader = make_loader(val_set, args.batch_size, range(place.rank, len(val_set), world), place, args.workers)
    # torch.manual_seed formats a stack trace for a CUDA that is not there, each time: 0.15 ms
    seed = torch.manual_seed if place.device.type != "cpu" else torch.default_generator.manual_seed
    batches, losses, stopping, val_loss, saved, share = None, [], 0, None, at["step"], None
    elements, since = 0, time.perf_counter()
    while True:
        # ---- Between two steps: what is due. After a restart that includes an evaluation that was cut short.
        step = at["step"]
        finished = step >= total
        evaluating = at["evaluated"] < step and (
            finished or at["samples"] == 0 or (args.eval_every and step % args.eval_every == 0))
        logging = losses and (finished or step % args.log_every == 0)
        saving = step > saved and (finished or stopping or step % args.save_every == 0)
        if args.sync_every > 1 and world > 1 and (step % args.sync_every == 0 or evaluating or saving):
            from torch.distributed.algorithms.model_averaging.utils import average_parameters
            moments = [t for s in optimizer.state.values() for t in s.values() if t.dim()] if saving else []
            average_parameters(iter([*model.parameters(), *moments]), dist.group.WORLD)
        if losses and (logging or saving or evaluating):
            sums = sum_over_ranks(torch.stack(losses).cpu().double())  # float32 summed in float64: exact in any order
            if not sums.isfinite().all():
                checkpoint.wait()
                bad = step + 1 - len(losses) + int((~sums.isfinite()).nonzero()[0])
                raise UserError(f"the loss or its gradient is not finite at step {bad}; the last good checkpoint is "
                                + (f"{checkpoint.path} (step {saved})" if saved else "none") + "; try a lower --lr")
            if scaler.is_enabled() and scaler.get_scale() < 2.0**-83:  # it starts at 2**16, and each skipped step halves it
                raise UserError(f"fp16 overflowed in a hundred steps in a row up to step {step}: use --precision bf16")
            at["loss_sum"], losses = at["loss_sum"] + float(sums.sum()), []
        if logging:
            mean, rate = at["loss_sum"] / at["loss_rows"], elements / (time.perf_counter() - since)
            at["loss_sum"], at["loss_rows"], elements, since = 0.0, 0, 0, time.perf_counter()
            if log:
                log.write(step, loss=mean, tokens_per_s=rate, lr=optimizer.param_groups[0]["lr"])
                # PowerSGD is left out: it begins with plain all-reduces, and DDP's clock is an average since the start.
                if share is None and world > 1 and args.comm_hook != "powersgd" and (share := waiting_share(ddp)) is not None:
                    halve = "--comm-hook fp16 halves its bytes, " * (args.comm_hook == "none")
                    log.say(f"{share:.0%} of a step waits for the all-reduce" + (
                        f": {halve}--accum 4 or --sync-every 16 make it rarer" if share > 0.2 else ""))
        if evaluating and not stopping:
            start = time.perf_counter()
            val_loss = evaluate(model, val_loader, place, loss_fn, amp, stop)
            since += time.perf_counter() - start
            if val_loss is None:
                stopping, saving = stop.answer(), step > saved
            else:
                at["evaluated"], saving = step, saving or finished
                if log:
                    log.write(step, val_loss=val_loss, val_bits_per_byte=val_loss / math.log(2))
        if saving:
            saved = step
            if place.is_main:
                checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                                 "scaler": scaler.state_dict(), **at, "run": identity,
                                 "args": json.loads(json.dumps(vars(args), default=str))})  # plain types: weights_only
        if finished or stopping:
            break

        # ---- One optimizer step.
        if batches is None:
            sampler.set_epoch(at["epoch"], at["samples"])
            batches = batches_of(loader)
        stop.ask(failed=checkpoint.error or (log and log.error))
        seed((args.seed * 1_000_003 + step) * 65_537 + place.rank)  # dropout: differs by rank, no state to save
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / max(1, args.warmup_steps)) * (1 + math.cos(math.pi * step / total)) / 2
        rows = min(per_step, n - at["samples"])  # samples of this step, all ranks
        step_loss, micro_batches = 0.0, -(-rows // (world * args.batch_size))
        for i in range(micro_batches):
            x, y = (t.to(place.device, non_blocking=True) for t in next(batches))
            # How many of this rank's samples are real: the very last one of an epoch can be a repeat.
            left = -(-(n - at["samples"] - i * world * args.batch_size - place.rank) // world)
            real = max(0, min(len(x), left))
            x, y = x[: max(1, real)], y[: max(1, real)]
            sync = args.sync_every == 1 and i == micro_batches - 1
            with contextlib.nullcontext() if sync or ddp is model else ddp.no_sync():
                with amp():
                    loss = loss_fn(runner(x), y)
                scaler.scale(loss * (real * world / rows)).backward()  # DDP divides by world: a mean over all samples
            step_loss = step_loss + loss.detach().float() * real
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(step_loss if scaler.is_enabled() else step_loss + 0 * norm)  # not finite if one is; looked at later
        at["step"], at["samples"], at["loss_rows"] = step + 1, at["samples"] + rows, at["loss_rows"] + rows
        elements += rows * y[0].numel()
        if at["samples"] >= n:  # counted before it is saved: a restart does not train the epoch again
            at["epoch"], at["samples"], batches = at["epoch"] + 1, 0, None
        if log and log.bar:
            log.bar.update()
        stopping = stop.answer()

    # ---- The end: the last checkpoint is on the disk before anything is reported.
    checkpoint.wait()
    if log and log.bar:
        log.bar.close()
    if error := gather(checkpoint.error or (log and log.error))[0]:
        raise UserError(f"{error}; the checkpoint before it is intact")
    if stopping:
        say(f"stopped by {signal.Signals(stopping).name} at step {step}, saved in {checkpoint.path}; the same command goes on")
        # 128 + signal, as shells have it; 0 where torchrun would take that for a failure and start the job again.
        most, so_far = (int(os.environ.get(f"TORCHELASTIC_{k}", 0)) for k in ("MAX_RESTARTS", "RESTART_COUNT"))
        raise SystemExit(0 if most > so_far else 128 + stopping)
    say(f"done: {val_loss / math.log(2):.3f} bits per byte on held-out data (8 is chance) after {at['epoch']} epochs, "
        f"{step} steps; {checkpoint.path}; to go on, {longer}")


def main(argv=None):
    """Train as the command line says. Returns the exit code, or raises SystemExit."""
    args = parse_args(argv)
    if args.spawn and "RANK" not in os.environ:
        return spawn(args, argv)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until all ranks are there a signal ends this one at once: nothing is lost
    try:
        place = init_distributed(args.device, args.backend, args.init_method, args.timeout, args.local_rank)
        with process_group(place):
            train(args, place, StopRequest())
    except UserError as e:
        complain(e)
        return 1
    return 0


def spawned(index, argv, processes):
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    sys.exit(main(argv))


def spawn(args, argv):
    """Start `--spawn N` processes, pass signals on to them, and return their exit code."""
    from torch import multiprocessing as mp
    with socket.socket() as s:  # a free port, for env://
        s.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.spawn)))
    context = mp.spawn(spawned, (sys.argv[1:] if argv is None else argv, args.spawn), args.spawn, join=False)

    def pass_on(signum, frame):
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, signum)

    for s in SIGNALS:
        signal.signal(s, pass_on)
    try:
        while not context.join():
            pass
    except mp.ProcessExitedException as e:
        return e.exit_code if e.exit_code > 0 else 128 - e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
