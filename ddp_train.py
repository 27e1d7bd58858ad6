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

A run, in order: parse_args, init_distributed, load_data, build_model, preflight, wrap, resume, the loop of train, evaluate, save.
To use it for something else, replace the blocks MODEL and DATA. The same command again goes on from the last checkpoint.
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
import os
import re
import select
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import types
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
FAILED = 1000  # what a rank that cannot write tells the others, in place of a signal's number (see StopRequest)


# ---- MODEL: replace this block. The rest calls build_model(args), model(x) and loss_fn(output, target), a mean over ----
# ---- all elements, and compares a run with its checkpoint by SHAPE.                                              ----
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
        for embedding in (self.embed, self.position):  # torch's default std of 1 would drown what the blocks add
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x):
        x = self.drop(self.embed(x) + self.position.weight[: x.shape[1]])
        return self.head(self.norm(self.blocks(x)))


SHAPE = ("layers", "heads", "dim", "seq_len")  # the arguments in which a run and its checkpoint must agree


def build_model(args):
    return ByteTransformer(args.layers, args.heads, args.dim, args.seq_len, args.dropout)


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


# ---- DATA: replace this block. The rest calls load_data(path, seq_len): two map-style Datasets of (x, target). Their ----
# ---- `__getitems__` (a batch at once), `collate` and `fingerprint` (compared between the ranks) are optional.       ----
class ByteDataset(Dataset):
    """Sample i is (x, y), int64 of shape (seq_len,): the i-th window of the uint8 tensor `data`, and the same one byte later."""

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
            with open(where, "rb") as f:  # ACCESS_COPY: torch warns of read-only memory; nothing writes, so nothing is copied
                buffer = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) if os.fstat(f.fileno()).st_size else b""
    except OSError as e:
        raise UserError(f"--data {where}: {e.strerror}") from e
    held_out = max(len(buffer) // 20, seq_len + 1)
    if len(buffer) - held_out < seq_len + 1:
        raise UserError(f"--data {where} has {len(buffer)} bytes, {2 * seq_len + 2} are needed: two windows of --seq-len + 1")
    step = max(1 << 20, len(buffer) // 64)  # checksum: all of up to 64 MiB, 64 pieces of 1 MiB of anything larger
    crc = 0
    for i in range(0, len(buffer), step):
        crc = zlib.crc32(memoryview(buffer)[i : i + (1 << 20)], crc)
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    return ByteDataset(data[:-held_out], seq_len, f"{crc:08x}"), ByteDataset(data[-held_out:], seq_len)


# ---- ARGUMENTS ----
class UserError(Exception):
    """What the user can fix: reported in one line, without a traceback."""


def first_line(error):
    return (str(error) or repr(error)).splitlines()[0][:200]


def complain(message):
    """Print one error line. Under torchrun all ranks of a node come here alike, and local rank 0 prints; else every caller."""
    if os.environ.get("LOCAL_RANK", "0") == "0" or "LOCAL_WORLD_SIZE" not in os.environ:
        print(f"ddp_train.py: error: {message}", file=sys.stderr)


def tell(line, write=functools.partial(print, flush=True)):
    """Write a line for the user. If its reader is gone (Ctrl-C ends the `tee` behind a run as well) the run still has to save."""
    try:
        write(line)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    def error(self, message):
        complain(f"{message} (see --help)")
        raise SystemExit(2)


def number(kind, allowed, words):  # a `type` for add_argument
    def parse(text):
        with contextlib.suppress(ValueError):
            if allowed(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {words}, got {text!r}")

    return parse


def parse_args(argv=None):
    count = number(int, lambda v: 0 < v < 2**31, "an integer > 0 and < 2**31")
    whole = number(int, lambda v: 0 <= v < 2**31, "an integer >= 0 and < 2**31")
    real = number(float, lambda v: 0 < v < 1e9, "a number > 0 and < 1e9")
    share = number(float, lambda v: 0 <= v < 1, "a number >= 0 and < 1")
    limit = number(float, lambda v: v >= 0, "a number >= 0")
    p = Parser("ddp_train.py", formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False, description="Trains a "
               "byte-level transformer with data parallelism. Every --option-name may be spelled --option_name.")
    add = p.add_argument_group("run").add_argument
    add("--data", metavar="PATH", help="file or folder to train on; without it the source of Python's own library")
    add("--out", metavar="DIR", default="out", help="folder for checkpoint.pt and metrics.jsonl; a run found there goes on")
    add("--fresh", action="store_true", help="start again; the old run in --out is moved to --out/old-N")
    add("--epochs", type=count, metavar="N", default=1, help="passes over the training data")
    add("--max-steps", type=count, metavar="N", help="stop after N optimizer steps, if the epochs have not ended before")
    add("--log-every", type=count, metavar="N", default=20, help="steps between two lines of loss and throughput")
    add("--eval-every", type=count, metavar="N", help="steps between two evaluations, besides one after each epoch")
    add("--save-every", type=count, metavar="N", default=100, help="steps between two checkpoints")
    add("--seed", type=whole, metavar="N", default=0, help="seed of weights, order of samples and dropout")
    add = p.add_argument_group("optimization").add_argument
    add("--batch-size", type=count, metavar="N", default=32, help="samples per process and micro-batch")
    add("--accum", type=count, metavar="N", default=1, help="micro-batches per optimizer step (gradient accumulation)")
    add("--lr", type=real, metavar="X", default=2e-3, help="peak learning rate of one process; W processes use W times that")
    add("--scale-lr", action=argparse.BooleanOptionalAction, default=True, help="multiply --lr by the world size")
    add("--warmup-steps", type=whole, metavar="N", default=100, help="steps of linear warm-up, before the cosine")
    add("--grad-clip", type=limit, metavar="X", default=1.0, help="largest norm of the gradient; 0: no clipping")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the forward pass (autocast)")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--sync-bn", action="store_true", help="batch norm over all processes (GPU)")
    add("--workers", type=whole, metavar="N", default=0, help="loading processes per rank; 0 is enough for mapped bytes")
    add = p.add_argument_group("model").add_argument
    add("--layers", type=count, metavar="N", default=2, help="transformer blocks")
    add("--heads", type=count, metavar="N", default=4, help="attention heads")
    add("--dim", type=count, metavar="N", default=128, help="width")
    add("--seq-len", type=count, metavar="N", default=128, help="bytes per sample")
    add("--dropout", type=share, metavar="X", default=0.0, help="dropout probability")
    add = p.add_argument_group("processes").add_argument
    add("--device", metavar="D", default="auto", help="auto, cpu, cuda or GPU numbers like 0,3: local rank i takes the i-th")
    add("--backend", metavar="NAME", help="gloo, nccl, ... (default: what torch has for the device)")
    add("--init-method", metavar="URL", default="env://", help="env://, tcp://host:port or file:///path")
    add("--spawn", type=count, metavar="N", help="start N processes on this machine without a launcher")
    add("--timeout", type=real, metavar="SECONDS", default=600.0, help="longest wait for another rank")
    add("--comm-hook", choices=("none", "fp16", "bf16", "powersgd"), default="none", help="compress the all-reduced gradients")
    add("--sync-every", type=count, metavar="N", default=1, help="local SGD: average weights every N steps instead of gradients")
    p.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # python -m torch.distributed.launch adds it
    argv = [re.sub("^--[^=]+", lambda m: m[0].replace("_", "-"), a) for a in (sys.argv[1:] if argv is None else argv)]
    args = p.parse_args(argv)
    if args.dim % args.heads:
        p.error(f"--dim {args.dim} is not divisible by --heads {args.heads}")
    if args.sync_every > 1 and args.comm_hook != "none":
        p.error("--sync-every averages weights and never all-reduces gradients: leave out --comm-hook")
    if args.comm_hook == "powersgd" and args.precision == "fp16":
        p.error("--comm-hook powersgd remembers the infinities of fp16 for ever: use --precision bf16")
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

    @property
    def first_of_node(self):  # rank 0 started by hand may have another local rank
        return self.local_rank == 0 or self.is_main


def pick_device(name, local_rank=0, processes=None):
    """The torch.device of this process, made the current one. `processes` is how many share this node, if that is known.
    Raises UserError if there are too few devices."""
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

    All ranks call it, once. Without RANK there is no group, and the Place returned is that of a single process. Whatever the
    backend, CPU tensors go through gloo, so flags, losses and checkpoints never wait for the GPU. Raises UserError.
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
    # DDP and the optimizers import torch._dynamo. If that happens after the group was made, a default argument in it holds the
    # group for ever: destroy_process_group() then leaves gloo's threads running, and one run in six aborts at its exit.
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
    """A name that these processes share and no earlier ones did. All ranks call it. RuntimeError if some do not come in time.

    torchrun's store outlives a restart, and a rank that reads the addresses which earlier processes left in it hangs. So
    each rank says hello with a random number. When rank 0 sees a new set of hellos it answers each of them with a new name,
    and the name holds once all ranks have counted themselves in.
    """
    me, roll, joined, end = os.urandom(8).hex(), None, None, time.monotonic() + timeout
    store.set(f"hello/{rank}", me)
    hellos = [f"hello/{r}" for r in range(world_size)]
    while time.monotonic() < end:
        if rank == 0 and store.check(hellos) and roll != (roll := store.multi_get(hellos)):
            name = os.urandom(8).hex()
            for r, hello in enumerate(roll):
                store.set(f"welcome/{r}", f"{hello.decode()} {name}")
        if store.check([f"welcome/{rank}"]):
            hello, name = store.get(f"welcome/{rank}").decode().split()  # the answer may be to an earlier process
            if hello == me and store.add(name, int(name != joined)) == world_size:  # adds 1 once, then 0, to read the count
                return name
            joined = name
        time.sleep(0.01)
    late = [str(r) for r, hello in enumerate(hellos) if not store.check([hello])]
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
    """Run work() and return its result; if it raises UserError on any rank, raise that on all. All ranks call it."""
    result, problem = None, None
    try:
        result = work()
    except UserError as e:
        problem = str(e)
    for rank, (host, line) in enumerate(gather((socket.gethostname(), problem))):
        if line:
            raise UserError(f"rank {rank} (host {host}): {line}" if rank else line)
    return result


def quiet():
    """Let gloo's threads come to rest after the last collective: they free its tensors, and need Python's locks for that.

    A process that is forked in that moment inherits a lock that nobody will release: before Python 3.12 it waits for ever
    (one fork of some hundred). A group that is destroyed in that moment waits for ever with torch 2.6 (one run of some twenty).
    """
    if dist.is_initialized():
        time.sleep(0.1)


@contextlib.contextmanager
def process_group(place):
    """Leave the group in good order: together where all ranks leave, at once where this one failed.

    All ranks raise the same UserError or SystemExit; the UserError leaves this block on rank 0 alone, to be printed once.
    Of other errors the first rank to fail prints the traceback; the rest find their connections broken, and print a line.
    """
    try:
        yield
        sum_over_ranks(torch.zeros(1))  # a barrier: a rank that leaves can abort another that is still in a collective
    except (UserError, SystemExit) as e:
        traceback.clear_frames(e.__traceback__)  # they hold the DDP module, and that holds the group
        sum_over_ranks(torch.zeros(1))
        raise e if place.is_main or isinstance(e, SystemExit) else SystemExit(1)
    except Exception as e:
        report(place, e)
        traceback.clear_frames(e.__traceback__)
        raise SystemExit(1) from None
    finally:
        gc.collect()  # DDP is in reference cycles, and so are the loaders
        end_workers()
        if dist.is_initialized():
            quiet()
            dist.destroy_process_group()


def end_workers():
    """Kill what is left of the DataLoaders' workers: they ignore SIGTERM, and Python would wait for them at exit for ever."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises an error where a worker is killed
    for child in mp.active_children():
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
                frames = traceback.extract_tb(error.__traceback__)
                at = ([f for f in frames if f"{os.sep}torch{os.sep}" not in f.filename] or frames)[-1]
                print(f"rank {place.rank}: waited --timeout for rank {', '.join(silent)} in `{at.line}`", file=sys.stderr)
    except RuntimeError:  # the store was rank 0's or torchrun's, and is gone with it
        first = False
    if first:
        get_error_handler().record_exception(error)  # what @record does, for the first error alone
        text = "".join(traceback.format_exception(error))
        print(f"rank {place.rank} ({socket.gethostname()}) failed:\n{text}", file=sys.stderr)
    else:
        print(f"rank {place.rank} stops: another rank failed or was killed ({first_line(error)})", file=sys.stderr)


class StopRequest:
    """SIGTERM, SIGINT or SIGUSR1 to any rank becomes a stop of all ranks at the same step. A second SIGINT kills at once.

    `ask` starts an all-reduce of a flag, `answer` waits for it: the step in between hides its time. The GPU is not involved.
    """

    def __init__(self):
        self.code = 0
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        arrived, arriving = os.pipe()
        os.set_blocking(arriving, False)
        signal.set_wakeup_fd(arriving, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(arrived,), daemon=True).start()
        for s in SIGNALS:
            signal.signal(s, self._note)

    def _note(self, signum, frame):
        self.code = self.code or signum

    def _watch(self, arrived):
        """A thread: Python calls no handler while the main thread waits in a collective, as for a rank that hangs."""
        first = None  # within a second of it, it is one Ctrl-C that arrives twice: from the terminal and from torchrun
        while True:
            interrupted = signal.SIGINT in (select.select([arrived], [], [], first and 1)[0] and os.read(arrived, 99))
            now = time.monotonic()
            # torchrun passes no second SIGINT on: it ends.
            if first and now > first + 1 and (interrupted or self.parent not in (None, os.getppid())):
                os._exit(128 + signal.SIGINT)
            first = first or (now if interrupted else None)

    def ask(self, failed=False):
        """Start to ask all ranks whether one has to stop. `failed`: this one has. All ranks call it."""
        if self.parent not in (None, os.getppid()):
            self.code = self.code or signal.SIGTERM  # torchrun was killed, and nobody else would restart or stop us
        self.flag = torch.tensor([FAILED if failed else int(self.code)])
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True) if dist.is_initialized() else None

    def answer(self):
        """0, or the largest number among all ranks when they asked: a signal's or FAILED. All ranks call it."""
        if self.work is not None:
            self.work.wait()
        return int(self.flag)


def ignore_signals(worker_id):
    """In a DataLoader worker: a signal to the whole job must not kill it before the last batch. It ends with its rank."""
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
    hosts, firsts, facts = zip(*gather((socket.gethostname(), place.first_of_node, facts)))
    for fact in zip(*facts):  # one fact, as rank 0 has it, as rank 1 has it, ...
        if odd := [r for r, of_rank in enumerate(fact) if of_rank != fact[0]]:
            r, also = odd[0], f" (ranks {', '.join(map(str, odd[1:]))} differ, too)" if odd[1:] else ""
            raise UserError(f"rank {r} (host {hosts[r]}) has {fact[r][0]}, rank 0 has {fact[0][0]}{also}: {fact[0][1]}")
    return sum(firsts)


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
        return math.ceil((len(self.dataset) - self.start) / self.num_replicas)

    def __iter__(self):
        n = len(self.dataset)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        first = self.start + self.rank
        mine = order[torch.arange(first, first + len(self) * self.num_replicas, self.num_replicas) % n]
        for part in mine.split(1 << 16):  # a list of all of them would take 40 bytes a sample
            yield from part.tolist()


def make_loader(dataset, batch_size, sampler, place, workers=0):
    context = "fork" if workers and sys.platform == "linux" else None  # shares the mapped data; not Python 3.14's default
    return DataLoader(dataset, batch_size, sampler=sampler, num_workers=workers, persistent_workers=workers > 0,
                      worker_init_fn=ignore_signals, collate_fn=getattr(dataset, "collate", None),
                      pin_memory=place.device.type == "cuda", multiprocessing_context=context,
                      generator=torch.Generator().manual_seed(place.rank))  # seeds the workers: augmentation differs by rank


def batches_of(loader):
    """iter(loader), whose first call forks the workers."""
    if loader.num_workers and loader._iterator is None:
        quiet()
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
            for _ in range(50):  # a run that was told to stop may still be saving
                with contextlib.suppress(BlockingIOError, PermissionError):
                    return fcntl.lockf(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, workers do not inherit it
                time.sleep(0.1)
        except OSError as e:
            raise UserError(f"--out {self.folder} cannot be written: {e.strerror}") from e
        raise UserError(f"--out {self.folder} is in use by another run: wait for it, or give this one another --out")

    def start_fresh(self, place):
        """Move an old run aside, once in a job: torchrun and Slurm start it again with the same arguments. All ranks call it."""
        env, mark = os.environ, self.folder / ".job"  # the torchruns and the Slurm job that were here last
        known = mark.read_text().splitlines() if mark.exists() else []
        launcher = f"{socket.gethostname()} {os.getppid()}" if "TORCHELASTIC_RUN_ID" in env else None
        job = f"Slurm {env.get('SLURM_JOB_ID')}"  # unless it was requeued, its second start is one that the user wants (salloc)
        launchers, again = zip(*gather((launcher, launcher in known or (job in known and "SLURM_RESTART_COUNT" in env))))
        if not any(again):
            together(lambda: self.move_aside() if place.is_main else None)
            together(lambda: self.move_aside() if place.first_of_node else None)  # nodes with a disk of their own
        if place.is_main:  # only now: a start that was killed before does not count
            mark.write_text("\n".join({job, *launchers} - {None}))

    def move_aside(self):
        """Move an old run to `old-N`. The first rank of each node calls it."""
        parts = self.path, self.previous, self.folder / "metrics.jsonl", self.folder / "tensorboard"
        if old := [p for p in parts if p.exists()]:
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
            os.fsync(folder)  # makes the renames last
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
        """Step, path and bytes of the newest intact file (step -1: there is none), and a list of what is wrong with others.

        torch.load does not check the CRC-32 of the records, so this does; weights_only keeps code out.
        """
        problems = []
        for path in filter(Path.exists, (self.path, self.previous)):
            try:
                content = path.read_bytes()
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    # A flipped bit can make a record a directory: its CRC is still right, and torch fills it with stray memory.
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
    # The first rank of a node reads; the others of that node would see the same folder.
    step, path, content, problems = checkpoint.read() if place.first_of_node else (-1, None, b"", [])
    steps, paths, sizes, problems = zip(*gather((step, path, len(content), "; ".join(problems))))
    step, source = max(steps), steps.index(max(steps))
    for rank, problem in enumerate(problems):
        if problem and step < 0:
            raise UserError(f"rank {rank}: {problem}: nothing to go on from; --fresh moves it aside and starts again")
        if problem and place.is_main:
            print(f"warning: rank {rank}: {problem}; "
                  f"going on from {paths[source]} of rank {source} (step {step})", file=sys.stderr)
    if step < 0:
        return None
    if dist.is_initialized():
        content = bytearray(content if place.rank == source else sizes[source])
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), source)
    return load_checkpoint(content)


def resume(place, checkpoint, identity, parts, at):
    """Bring `parts` and `at` to where the newest checkpoint is, if there is one. UserError if it is of another run."""
    old = newest_checkpoint(place, checkpoint)
    if old is None:
        return
    try:
        problem = next((f"{k} {old['run'][k]}, this run has {k} {v}" for k, v in identity.items() if old["run"][k] != v), None)
        if problem is None:
            for name, part in parts.items():
                if old[name]:  # the scaler has no state without fp16
                    part.load_state_dict(old[name])
            vars(at).update({k: old[k] for k in vars(at)})
    except (RuntimeError, ValueError, KeyError) as e:
        problem = f"another model or program ({' '.join(str(e).split())[:160]})"
    if problem:
        raise UserError(f"the checkpoint in --out {checkpoint.folder} is of a run with {problem}: use the same data and options, "
                        "another --out, or --fresh")


# ---- TRAINING ----
class Log:
    """What a run tells: lines or a progress bar, metrics.jsonl, TensorBoard where it is installed. Rank 0 makes it."""

    def __init__(self, folder, step, total):
        self.folder, self.first, self.total = folder, step + 1, total
        self.board, self.bar, self.error = None, None, None
        self.file, end = open(folder / "metrics.jsonl", "a+", buffering=1), 0
        self.file.seek(0)
        with contextlib.suppress(ValueError):  # a line that is cut short or damaged is the end
            for line in iter(self.file.readline, ""):
                if not line.endswith("\n") or json.loads(line)["step"] > step:
                    break  # it will be trained again
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
        tell(line) if self.bar is None else tell(line, self.bar.write)


def wrap(model, place, hook="none"):
    """Wrap `model` in DDP, or return it where there is no process group. Raises UserError for a hook that torch refuses."""
    if not dist.is_initialized():
        return model
    one_bucket = hook == "powersgd" and place.device.type == "cpu"  # with more, its collectives mix up their order on gloo
    ddp = DistributedDataParallel(model, device_ids=[place.device] if place.device.type == "cuda" else None,
                                  gradient_as_bucket_view=True, bucket_cap_mb=1 << 20 if one_bucket else None)
    if hook == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
        ddp.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=12, start_powerSGD_iter=10), powerSGD_hook)
    elif hook != "none":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        try:
            ddp.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
        except TypeError as e:
            raise UserError(f"--comm-hook {hook} does not work with this build of torch, fp16 does ({first_line(e)})") from e
    return ddp


def rehearse(model, runner, x, y, place, amp):
    """One forward and backward pass that changes no weight and no buffer. All ranks call it.

    After its first backward pass DDP lays out its buckets anew, and with them the order in which three ranks or more are
    summed. With that behind it, a resumed run rounds like one that was never stopped.
    """
    buffers = [b.clone() for b in model.buffers()]
    with amp:
        loss = loss_fn(runner(x.to(place.device)), y.to(place.device))
    loss.backward()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers):
        buffer.copy_(before)


def evaluate(model, loader, place, amp=contextlib.nullcontext(), stop=None):
    """Mean loss, each sample counted once, the same at any world size. None if `stop` came. All ranks call it.

    `loader` has every W-th sample from the r-th, without padding. `model` is the bare module: no collective hides in it,
    so ranks may have more or fewer samples, or none.
    """
    batches, sums, stopped = batches_of(loader), [torch.zeros((), device=place.device)], 0
    model.eval()
    with torch.inference_mode():
        for _ in range(0, len(loader.dataset), place.world_size * loader.batch_size):  # every rank asks and answers equally often
            if stop:
                stop.ask()
            if (batch := next(batches, None)) is not None:
                x, y = (t.to(place.device, non_blocking=True) for t in batch)
                with amp:
                    sums.append(loss_fn(model(x), y).float() * len(x))
            if stop and (stopped := stop.answer()):
                break
    model.train()
    total = sum_over_ranks(torch.stack(sums).cpu().double().sum())
    return None if stopped else float(total) / len(loader.dataset)


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


def waiting(ddp, hook):
    """A line on the share of a step that waits for the all-reduce, by DDP's own clock; None before that has measured one."""
    clock = ddp._get_ddp_logging_data()  # averages since the start; PowerSGD starts with plain all-reduces: it is left out
    forward, backward, comm, overlap = (clock.get(f"avg_{k}_time", 0) for k in (
        "forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap"))
    if not comm or hook == "powersgd":
        return None
    share = (comm - overlap) / (forward + backward + comm - overlap)
    advice = f": {'--comm-hook fp16 halves its bytes, ' * (hook == 'none')}--accum 4 or --sync-every 16 make it rarer"
    return f"{share:.0%} of a step waits for the all-reduce{advice * (share > 0.2)}"


def train(args, place, stop):
    """The whole run, from the data to the last checkpoint. All ranks call it."""
    world, checkpoint = place.world_size, Checkpoint(args.out)
    say = tell if place.is_main else lambda line: None
    train_set, val_set = together(lambda: load_data(args.data, args.seq_len))
    torch.manual_seed(args.seed)
    model = build_model(args).to(place.device)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if place.device.type == "cpu" and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
            raise UserError("--sync-bn: torch's SyncBatchNorm has no CPU kernel")
    nodes = preflight(place, args, model, train_set, val_set)
    together(lambda: checkpoint.lock() if place.is_main else None)
    if any(gather(args.fresh)):
        checkpoint.start_fresh(place)

    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=place.device.type in ("cpu", "cuda", "mps", "xpu"))
    scaler = torch.amp.GradScaler(place.device.type, enabled=args.precision == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision)
    amp = torch.autocast(place.device.type, dtype, enabled=dtype is not None)
    ddp = together(lambda: wrap(model, place, args.comm_hook))
    runner = torch.compile(ddp) if args.compile else ddp
    if world > 1:
        rehearse(model, runner, *next(iter(make_loader(train_set, args.batch_size, None, place))), place, amp)

    # ---- Resume. `at`: done by all ranks together; `samples` in this epoch, `loss_sum` over `loss_rows` since the last log line.
    at = types.SimpleNamespace(epoch=0, step=0, samples=0, evaluated=0, loss_sum=0.0, loss_rows=0)
    n, per_step = len(train_set), world * args.batch_size * args.accum
    identity = {"--seed": args.seed, "training samples": n, "data with CRC-32": getattr(train_set, "fingerprint", None),
                **{f"--{k.replace('_', '-')}": getattr(args, k, None) for k in SHAPE}}
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    resume(place, checkpoint, identity, parts, at)
    # Steps done, left in this epoch, and in the epochs after it. The last step of an epoch may be smaller.
    total = at.step + math.ceil((n - at.samples) / per_step) + (args.epochs - at.epoch - 1) * math.ceil(n / per_step)
    total = min(total, args.max_steps or total)
    longer = f"raise {'--max-steps, or ' * bool(args.max_steps)}--epochs"
    if at.step >= total and at.evaluated == at.step:
        return say(f"nothing left to do: {checkpoint.path} has {at.epoch} epochs, {at.step} steps; to train longer "
                   f"{longer}, to start again use --fresh")

    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    lr = args.lr * (world if args.scale_lr else 1)
    backend = dist.get_backend() if dist.is_initialized() else "no group"
    say(f"{world} process{'es' * (world > 1)} on {nodes} node{'s' * (nodes > 1)}, {backend}, {place.device.type} "
        f"({torch.get_num_threads()} threads), {args.precision}; {numel:,} parameters; {n:,} training and "
        f"{len(val_set):,} held-out samples; effective batch {per_step} = {world} x {args.batch_size} x accum {args.accum}; "
        f"learning rate {lr:g}; {total} steps")
    if at.step:
        say(f"going on from {checkpoint.path} at epoch {at.epoch}, step {at.step}")
    if world > 1:
        say(f"one all-reduce of the gradients ({numel * 4 / 1e6:.1f} MB) takes {all_reduce_seconds(place, numel) * 1e3:.1f} ms")

    log = Log(checkpoint.folder, at.step, total) if place.is_main else None
    sampler = ResumableSampler(train_set, world, place.rank, seed=args.seed)
    loader = make_loader(train_set, args.batch_size, sampler, place, args.workers)
    val_loader = make_loader(val_set, args.batch_size, range(place.rank, len(val_set), world), place, args.workers)
    # On the CPU torch.manual_seed formats a stack trace each time, for a CUDA that is not there: 0.15 ms.
    seed = torch.manual_seed if place.device.type != "cpu" else torch.default_generator.manual_seed
    batches, losses, stopping, val_loss, saved, told = None, [], 0, None, at.step, None
    elements, since = 0, time.perf_counter()
    while True:
        # ---- Between two steps: what is due. After a restart that includes an evaluation that was cut short.
        step = at.step
        finished = step >= total
        evaluating = at.evaluated < step and (finished or at.samples == 0 or (args.eval_every and step % args.eval_every == 0))
        logging = losses and (finished or step % args.log_every == 0)
        saving = step > saved and (finished or stopping or step % args.save_every == 0)
        if args.sync_every > 1 and world > 1 and (step % args.sync_every == 0 or evaluating or saving):
            moments = [t for s in optimizer.state.values() for t in s.values() if t.dim()] if saving else []
            average_parameters(iter([*model.parameters(), *moments]), dist.group.WORLD)
        if losses and (logging or saving or evaluating):
            sums = sum_over_ranks(torch.stack(losses).cpu().double())  # in float64 the order of the ranks does not matter
            if not sums.isfinite().all():
                checkpoint.wait()
                bad = step + 1 - len(losses) + int((~sums.isfinite()).nonzero()[0])
                raise UserError(f"the loss or its gradient is not finite at step {bad}; the last good checkpoint is "
                                + (f"{checkpoint.path} (step {saved})" if saved else "none") + "; try a lower --lr")
            if scaler.is_enabled() and scaler.get_scale() < 2.0**-83:  # it starts at 2**16, and each skipped step halves it
                raise UserError(f"fp16 overflowed in a hundred steps in a row up to step {step}: use --precision bf16")
            at.loss_sum, losses = at.loss_sum + float(sums.sum()), []
        if logging:
            mean, rate = at.loss_sum / at.loss_rows, elements / (time.perf_counter() - since)
            at.loss_sum, at.loss_rows, elements, since = 0.0, 0, 0, time.perf_counter()
            if log:
                log.write(step, loss=mean, tokens_per_s=rate, lr=optimizer.param_groups[0]["lr"])
                if told is None and world > 1 and (told := waiting(ddp, args.comm_hook)):
                    log.say(told)
        if evaluating and not stopping:
            paused = time.perf_counter()
            val_loss = evaluate(model, val_loader, place, amp, stop)
            since += time.perf_counter() - paused
            if val_loss is None:
                stopping, saving = stop.answer(), step > saved
            else:
                at.evaluated, saving = step, saving or finished
                if log:
                    log.write(step, val_loss=val_loss, val_bits_per_byte=val_loss / math.log(2))
        if saving:
            saved = step
            if place.is_main:
                checkpoint.save({**{name: part.state_dict() for name, part in parts.items()}, **vars(at), "run": identity,
                                 "args": json.loads(json.dumps(vars(args), default=str))})  # weights_only reads plain types alone
        if finished or stopping:
            break

        # ---- One optimizer step.
        if batches is None:
            sampler.set_epoch(at.epoch, at.samples)
            batches = batches_of(loader)
        stop.ask(failed=checkpoint.error or (log and log.error))
        seed(((args.seed * 1_000_003 + step) * 65_537 + place.rank) % 2**63)  # dropout differs by rank; no state to save
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / max(1, args.warmup_steps)) * (1 + math.cos(math.pi * step / total)) / 2
        rows = min(per_step, n - at.samples)  # samples of this step, all ranks
        step_loss, starts = 0.0, range(at.samples, at.samples + rows, world * args.batch_size)
        for start in starts:  # the micro-batches, each of samples start, start + 1, ... in turn over the ranks
            x, y = (t.to(place.device, non_blocking=True) for t in next(batches))
            # How many of these are real, not the sampler's repeats at the end of an epoch. Where none is, one runs with weight 0.
            real = min(len(x), len(range(start + place.rank, n, world)))
            x, y = x[: max(1, real)], y[: max(1, real)]
            sync = args.sync_every == 1 and start == starts[-1]
            with contextlib.nullcontext() if sync or ddp is model else ddp.no_sync():
                with amp:
                    loss = loss_fn(runner(x), y)
                scaler.scale(loss * (real * world / rows)).backward()  # DDP divides by world: a mean over all samples
            step_loss = step_loss + loss.detach().float() * real
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(step_loss if scaler.is_enabled() else step_loss + 0 * norm)  # NaN if the norm is not finite
        at.step, at.samples, at.loss_rows = step + 1, at.samples + rows, at.loss_rows + rows
        elements += rows * y[0].numel()
        if at.samples >= n:  # counted before it is saved: a restart does not train the epoch again
            at.epoch, at.samples, batches = at.epoch + 1, 0, None
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
        # 128 + signal, as in a shell; but 0 while torchrun has restarts left, or it would start the job again.
        most, so_far = (int(os.environ.get(f"TORCHELASTIC_{k}", 0)) for k in ("MAX_RESTARTS", "RESTART_COUNT"))
        raise SystemExit(0 if most > so_far else 128 + stopping)
    say(f"done: {val_loss / math.log(2):.3f} bits per byte on held-out data (8 is chance) after {at.epoch} epochs, "
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
    with socket.socket() as s:  # a free port, for env://
        s.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.spawn)))
    context = mp.spawn(spawned, (argv, args.spawn), args.spawn, join=False)

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
