# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "numpy"]  # torch needs numpy to send objects
# ///
"""Data-parallel training in PyTorch, in one file. (ddp_train, version 7)

    python ddp_train.py                                     one process, CPU or GPU
    torchrun --standalone --nproc_per_node=4 ddp_train.py   four GPUs of one machine
    torchrun --nnodes=2 --node_rank=R --nproc_per_node=4 --master_addr=HOST ddp_train.py
        two machines with four GPUs each; R is 0 on the machine HOST, 1 on the other

DistributedDataParallel (DDP) runs one process per GPU. Each process is called a rank,
and the number of processes is the world size. Every rank has the whole model and trains
on its own share of each batch. During backward() DDP averages the gradients over all
ranks, so every optimizer takes the same step, and the copies of the model stay equal.
The lines that do this are marked "DDP:". Search for it to see the idea.

--batch_size is per rank: one step trains on batch_size * accum * world size samples,
the global batch. With more ranks, divide --batch_size or try another --lr. The same
global batch gives the same training on any number of ranks, up to rounding. This does
not hold with dropout or augmentation, which each rank draws for itself, nor with batch
norm or a loss that compares samples: they see only the samples of one rank.

The same command again resumes the run in the folder --out. Ctrl-C and SIGTERM save
first, so nothing is lost; after a crash or kill -9 it goes back to the last save. A
different --out starts a new run.

To train something else, replace the sections MODEL and DATA, and --data in OPTIONS; a
collate_fn goes into train(). To make your own script distributed, copy or import what
you need from PIECES. The head of each section lists the imports; a piece also needs the
names that it uses, some of them from ENDINGS. Expected errors end in
sys.exit("one line"). Two rules are yours:

  1. All ranks take part in each collective (all-reduce, broadcast, ...), in the same
     order. If one rank is missing, the others wait for it, so never call a function
     that "all ranks call" under `if rank == 0`.
  2. Whatever decides what happens next (a stop, a learning rate, a best score) must be
     the same on all ranks: compute it from numbers that they all agree on.
"""

import argparse
import collections
import contextlib
import datetime
import errno
import fcntl
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
import zipfile
import zlib
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it; imported late, it may crash at exit
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

# ---- MODEL: replace it ---------------------------------------------------------------
# {option: (default, help)}. A default is a number or a word, not True, False or None.
# A resumed run must have the same values.
MODEL_OPTIONS = {
    "layers": (2, "number of transformer blocks"),
    "heads": (4, "attention heads"),
    "dim": (128, "width of the model"),
    "seq_len": (128, "bytes per sample"),
    "dropout": (0.0, "dropout probability"),
}


class Block(nn.Module):
    """One transformer block: attention over the preceding bytes, then an MLP."""

    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.project = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 4 * dim, bias=False)
        self.narrow = nn.Linear(4 * dim, dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        dim = x.shape[-1]
        qkv = self.query_key_value(self.norm1(x)).split(dim, dim=-1)
        # Three times (batch, time, dim) -> (batch, heads, time, dim / heads)
        q, k, v = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv]
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.project(y.transpose(1, 2).flatten(2)))
        y = self.narrow(nn.functional.gelu(self.widen(self.norm2(x))))
        return x + self.dropout(y)


class ByteTransformer(nn.Module):
    """(batch, time) bytes -> (batch, time, 256) logits for the next byte."""

    def __init__(self, layers, heads, dim, seq_len, dropout):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.position = nn.Embedding(seq_len, dim)
        # By default embeddings start with a standard deviation of 1: too large here.
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        blocks = [Block(dim, heads, dropout) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, x):
        x = self.embed(x.long()) + self.position.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def build_model(args):
    if args.dim % args.heads != 0:
        sys.exit(f"--dim {args.dim} is not divisible by --heads {args.heads}")
    if not 0 <= args.dropout <= 1:
        sys.exit(f"--dropout {args.dropout} must be from 0 to 1")
    shape = args.layers, args.heads, args.dim, args.seq_len
    return ByteTransformer(*shape, args.dropout)


def build_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr, fused=True)


def compute_loss(model, batch):
    """The mean over the samples of a batch. The model may be wrapped: just call it.

    Every batch has the same weight, so a mean over tokens is right only if every sample
    has the same number of tokens. Every trained weight must contribute to the loss, or
    DDP fails.
    """
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten().long())


def score(model, batch):
    """Sums over the samples, and "count", the number of samples to divide them by."""
    x, _ = batch
    return {"val_loss": compute_loss(model, batch) * len(x), "count": len(x)}


# ---- DATA: replace it ----------------------------------------------------------------
class ByteWindows(Dataset):
    """Sample i is seq_len bytes of a file, and the same bytes shifted by one."""

    def __init__(self, path, seq_len):
        self.path = path  # each worker gets a copy of this object, not of the data
        self.seq_len = seq_len

    def __len__(self):
        return max(0, os.path.getsize(self.path) - 1) // self.seq_len

    def __getitem__(self, i):
        with open(self.path, "rb") as file:
            file.seek(i * self.seq_len)
            window = bytearray(file.read(self.seq_len + 1))
        window = torch.frombuffer(window, dtype=torch.uint8)
        return window[:-1], window[1:]


def load_data(args):
    """Training set, validation set (the last 5 %), and a text that identifies the data.

    All ranks call it at the same time, so download the data before the run, not here.
    """
    # The default is a text that comes with Python: its help topics.
    path = args.data or Path(os.__file__).parent / "pydoc_data/topics.py"
    try:
        with open(path, "rb") as file:
            checksum = zlib.crc32(file.read(64 * 2**20))  # of the first 64 MiB
    except OSError as error:
        sys.exit(f"no data: {error}: choose a file with --data")
    windows = ByteWindows(path, args.seq_len)
    n = len(windows)
    held_out = max(1, n // 20)
    train_set = Subset(windows, range(n - held_out))
    val_set = Subset(windows, range(n - held_out, n))
    return train_set, val_set, f"CRC-32 {checksum:08x}"


# ---- THE RUN -------------------------------------------------------------------------
def train(args, device):
    """The whole run. All ranks call it. Returns the signal that stopped it, if any."""
    # ---- Set up
    # DDP: each rank knows its own number and the number of ranks.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # The same seed on all ranks, so that the initial weights (and a random split in
    # load_data()) match.
    seed_all("start", args.seed)
    train_set, val_set, data_text = load_data(args)
    model = build_model(args).to(device)  # optimize, evaluate and save this one
    if not model.training:
        sys.exit("build_model() returns a model in eval mode: call its train()")
    optimizer = build_optimizer(model, args)
    n = len(train_set)
    step_samples = args.batch_size * args.accum * world_size
    # {name: text} that must match on all ranks. A resume reports or refuses changes.
    settings = {name: str(value) for name, value in vars(args).items()}
    for name in MAY_DIFFER_BETWEEN_RANKS:
        del settings[name]
    settings["data"] = f"{n} samples, {len(val_set)} held out, {data_text}"
    settings["device"] = device.type
    settings["global batch"] = str(step_samples)
    settings["optimizer"] = type(optimizer).__name__
    check_alike(settings)
    if n < step_samples:
        sys.exit(f"{n} samples are fewer than one step of {step_samples}")

    # ---- Resume
    folder = Path(args.out)
    path = folder / "checkpoint.pt"
    lock(folder)
    # done: samples of this epoch trained on so far, by all ranks together
    step, epoch, done = resume(path, model, optimizer, settings)
    steps_per_epoch = n // step_samples
    whole_run = args.max_steps or args.epochs * steps_per_epoch  # in steps
    steps_left = (n - done) // step_samples  # of this epoch
    epochs_left = args.epochs - epoch - 1  # after this one
    last_step = args.max_steps or step + steps_left + epochs_left * steps_per_epoch

    wrapped = model  # train this one
    if world_size > 1:
        # DDP: copy the weights of rank 0 to all ranks. Then average the gradients in
        # each backward(). It uses the GPU that init_distributed() has chosen.
        # gradient_as_bucket_view saves memory: one copy of the gradients.
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.compile:
        wrapped = torch.compile(wrapped)
    bf16 = args.precision == "bf16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    options = loading_options(device, args.workers, args.timeout)
    # DDP: without this sampler all ranks would train on the same samples.
    sampler = ResumableSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)
    # DDP: rank r validates samples r, r + W, r + 2W, ...: each one counts once.
    val_samples = range(rank, len(val_set), world_size)
    val_loader = DataLoader(val_set, args.batch_size, sampler=val_samples, **options)

    say(f"ranks: {world_size}, {device.type}, {args.precision}, {socket.gethostname()}")
    left_over = n % step_samples
    say(f"global batch: {step_samples} samples; an epoch: {n}, {left_over} left over")
    say(f"from step {step} to {last_step}")
    if step >= last_step:
        with autocast:
            log(folder, step, evaluate(model, score, val_loader, device))
        say("nothing left to train: give more --epochs (or steps), or another --out")
        return None

    # ---- Train
    eval_every = args.eval_every or last_step
    stop = StopSignal()
    results = []  # of the steps since the last log line; they stay on the device
    while step < last_step:
        # DDP: shuffle differently in each epoch, but in the same way on all ranks.
        sampler.set_epoch(epoch, done)
        # DDP: workers are seeded from this, once, when they start. Without the rank,
        # the workers of all ranks would draw the same augmentation.
        seed_all("load", args.seed, step, rank)
        batches = iter(loader)
        steps = min(last_step - step, (n - done) // step_samples)
        for i in range(steps):
            if not results:
                began = time.perf_counter()
            # DDP: without the rank, all ranks would draw the same dropout. With the
            # step, dropout is the same after a resume as without one.
            seed_all("step", args.seed, step, rank)
            # Counted from the end, so it still fits if a resume changes the global
            # batch. -0.5: the middle of the step.
            progress = 1 - (last_step - step - 0.5) / whole_run
            factor = lr_factor(progress, args.warmup)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            result = train_step(wrapped, batches, optimizer, autocast, args, device)
            results.append(result)
            step += 1
            done += step_samples

            # DDP: all ranks get the same answer. Otherwise one would stop, and the
            # others would wait for it.
            stopped_by = stop.requested()
            evaluating = i == steps - 1 or step % eval_every == 0
            saving = stopped_by or evaluating or step % args.save_every == 0
            if saving or step % args.log_every == 0:
                # Look for errors before saving.
                means = mean_over_ranks(results)
                if not all(math.isfinite(mean) for mean in means.values()):
                    sys.exit(f"not finite, not saved: {means}: a lower --lr? bad data?")
                check_together(results, model)
                seconds = (time.perf_counter() - began) / len(results)
                means["lr"] = float(optimizer.param_groups[0]["lr"])
                means["samples_per_s"] = step_samples / seconds
                means["seconds_left"] = seconds * (last_step - step)
                if device.type == "cuda":
                    means["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
                log(folder, step, means)
                results = []
            if saving:
                # Save after everything that a step changes, such as a scheduler.
                state = {"epoch": epoch, "done": done, "settings": settings}
                state["model"] = model.state_dict()
                state["optimizer"] = optimizer.state_dict()
                save_checkpoint(path, step, **state)
            if stopped_by:
                say(f"stopped by signal {stopped_by}, saved at step {step}")
                return stopped_by
            if evaluating:
                with autocast:
                    log(folder, step, evaluate(model, score, val_loader, device))
        epoch, done = epoch + 1, 0
    say(f"done: step {step}, saved in {path}")


def resume(path, model, optimizer, settings):
    """Load what train() has saved. All ranks call it. Returns step, epoch, done."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # peak lr; torch's schedulers use this key
    saved = load_checkpoint(path)
    if saved is None:
        return 0, 0, 0
    try:
        for name, before in saved["settings"].items():
            value = settings.get(name)
            if value == before:
                continue
            if name in ["seed", "data", "optimizer", *MODEL_OPTIONS]:
                sys.exit(f"{path} has {name} {before}, not {value}: use another --out")
            say(f"{name} is {value}, it was {before}")
        model.load_state_dict(saved["model"])
        # The state comes from the checkpoint, but options, such as weight decay, from
        # this launch.
        options = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": options})
        return saved["step"], saved["epoch"], saved["done"]
    except Exception as error:  # torch raises all kinds
        sys.exit(f"{path} is not of this program: {error!r:.200}: use another --out")


def train_step(wrapped, batches, optimizer, autocast, args, device):
    """One optimizer step on args.accum batches. All ranks call it.

    Returns {name: scalar tensor on the device}, for the log.
    """
    loss_sum = 0.0
    for i in range(args.accum):
        batch = to_device(next(batches), device)
        averaging = contextlib.nullcontext()
        if i < args.accum - 1 and dist.get_world_size() > 1:
            # DDP: gradients add up, and only the last backward() averages them, which
            # is faster than averaging each time.
            averaging = wrapped.no_sync()
        with averaging:
            with autocast:
                loss = compute_loss(wrapped, batch)
            # DDP: averages the gradients over the ranks. All ranks have equally many
            # samples, so this is the mean over all samples of the step.
            (loss / args.accum).backward()
        loss_sum += loss.detach().float()
    # The gradients are averaged, so all ranks have the same norm and clip the same way.
    grad_norm = nn.utils.clip_grad_norm_(wrapped.parameters(), args.grad_clip)
    optimizer.step()
    wrapped.zero_grad()  # also weights that are not in the optimizer
    return {"loss": loss_sum / args.accum, "grad_norm": grad_norm}


def lr_factor(progress, warmup):
    """The fraction of the peak lr: linear warm-up to 1, then cosine decay to 0."""
    if progress < warmup:
        return progress / warmup
    return (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2


# ---- PIECES --------------------------------------------------------------------------
# ---- Ranks: join, choose the device, compare, leave together
# Imports: contextlib, datetime, os, signal, sys, time, torch, torch.distributed.nn,
# dist
@contextlib.contextmanager
def distributed(device="auto", timeout=600):
    """`with distributed() as device:` around everything that the ranks do together.

    If one of several ranks fails, it says why and exits immediately, and torchrun ends
    the others. sys.exit(0) is not a failure if all ranks call it. At the end the ranks
    wait for each other, without a time limit.
    """
    handlers = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    device = init_distributed(device, timeout)
    try:
        # No time limit at the end: rank 0 may still be busy with an export.
        everyone = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))
        yield device
        # DDP: leave together. A rank that exits early may make the others fail.
        dist.barrier(everyone)
    except BaseException as error:
        has_failed = not isinstance(error, SystemExit) or error.code
        if has_failed and dist.get_world_size() > 1:
            end_this_rank(error)
        raise
    finally:
        kill_workers()
        # gloo's threads need the GIL to finish: give them time. To free a DDP object
        # sooner waits for them with the GIL held: a deadlock (pytorch issue 56297).
        time.sleep(0.1)
        dist.destroy_process_group()
        for number, handler in handlers:
            signal.signal(number, handler or signal.SIG_DFL)


def init_distributed(device="auto", timeout=600):
    """Join the process group and return the device of this rank. All ranks call it.

    torchrun has set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without
    them this process is alone, in a group of one, whose collectives return immediately.
    timeout: how long a collective waits for the other ranks, in seconds.
    """
    device = choose_device(device)
    if "RANK" in os.environ:
        # NCCL connects GPUs, gloo connects CPUs. We need both: the CPU must not
        # wait for a busy GPU to ask whether to stop.
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if os.environ["RANK"] == "0":
            place = f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}"
            write(1, f"rank 0 waits for all ranks at {place}")
        # DDP: join the other ranks.
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return device


def choose_device(name):
    """The device of this rank. "auto" is a GPU of NVIDIA or AMD, or else the CPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    # DDP: rank i of this machine (its local rank) takes GPU i.
    index = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.cuda.device_count()
    if gpus == 1 and not dist.is_torchelastic_launched():
        index = 0  # Slurm's --gpus-per-task=1 shows each rank its own GPU as number 0
    if index >= gpus:
        sys.exit(f"local rank {index} needs a GPU, but torch finds {gpus} here")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def all_gather(value):
    """[value of rank 0, value of rank 1, ...]. All ranks call it.

    It pickles the values, so no gradients flow through it.
    """
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_alike(settings):
    """End all ranks if {name: text} differs between them. All ranks call it."""
    everyone = all_gather(settings)
    for rank, other in enumerate(everyone):
        for name, _ in sorted(everyone[0].items() ^ other.items()):
            here = f"{other.get(name)} on rank {rank}"
            sys.exit(f"{name} is {here}, but {everyone[0].get(name)} on rank 0")


# ---- Batches
# Imports: numpy, random, zlib, torch, DistributedSampler
class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can resume mid-epoch, on any number of ranks.

    The order depends only on the seed and the epoch. It is dealt out in turn: rank r of
    W has the positions r, r + W, r + 2W, ..., so the samples done so far are
    always the first ones of the order.
    """

    def __init__(self, dataset, seed):
        super().__init__(dataset, seed=seed)
        self.start = 0  # samples of the epoch done so far, by all ranks together
        self.automatic = True  # until set_epoch() is called

    def set_epoch(self, epoch, start=0):
        """Set the epoch and where it starts, before each iteration over it.

        If it is never called, each iteration is the next epoch.
        """
        super().set_epoch(epoch)
        self.start = start
        self.automatic = False

    def __len__(self):
        return (len(self.dataset) - self.start) // self.num_replicas

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)
        # DDP: each rank takes its own share of the samples.
        mine = order[self.start + self.rank :: self.num_replicas][: len(self)]
        if self.automatic:
            self.epoch += 1
        return iter(mine.tolist())


def to_device(batch, device):
    """Move tensors, also in tuples, lists and dicts. A tuple becomes a list."""
    if hasattr(batch, "to"):  # a tensor, or a batch of another library
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [to_device(value, device) for value in batch]
    return batch


def seed_all(*values):
    """Seed torch (CPU and GPUs), numpy and random with a hash of these values."""
    seed = zlib.crc32(repr(values).encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def loading_options(device, workers, timeout=600):
    """Options for a DataLoader. timeout: how long a batch may take, in seconds.

    Workers are spawned, so the data set must be picklable, and workers do not see
    globals that main() has set.
    """
    options = {"pin_memory": device.type == "cuda", "num_workers": workers}
    if workers > 0:
        options["timeout"] = timeout  # otherwise a hung worker blocks forever
        options["persistent_workers"] = True
        # The default, "fork", may deadlock with NCCL (documentation of DDP).
        options["multiprocessing_context"] = "spawn"
        options["worker_init_fn"] = ignore_signals
    return options


# ---- Numbers: average, compare, evaluate, log
# Imports: collections, contextlib, json, math, os, sys, Path, torch, nn, dist
def mean_over_ranks(results):
    """[{name: tensor}], one per step -> {name: mean over steps and ranks}.

    All ranks call it and get the same numbers. Here the CPU waits for the GPU.
    """
    names = sorted(results[0])  # in the same order on all ranks
    steps = [torch.stack([result[name] for name in names]) for result in results]
    means = torch.stack(steps).double().mean(0).cpu()
    # DDP: the mean over all ranks. Otherwise the log has the loss of rank 0 only.
    dist.all_reduce(means)
    means /= dist.get_world_size()
    by_name = dict(zip(names, means.tolist(), strict=True))
    return {name: by_name[name] for name in results[0]}


def check_together(results, model):
    """Exit on all ranks if their models have diverged. All ranks call it.

    DDP keeps weights and gradients equal, unless a step calls the model without DDP, or
    a rank uses a different learning rate, or changes its weights by itself. This
    compares two norms: of all weights, and of the last gradient, which must be in
    results[-1]["grad_norm"]. It finds most mistakes, not all.
    """
    norms = [weight.detach().float().norm() for weight in model.parameters()]
    norms = [float(nn.utils.get_total_norm(norms)), float(results[-1]["grad_norm"])]
    everyone = torch.tensor(all_gather(norms), dtype=torch.float64)
    if not ((everyone - everyone[0]).abs() <= 1e-6 * everyone[0]).all():  # or NaN
        sys.exit(f"the ranks differ: norms of [weights, gradient]: {everyone.tolist()}")


@torch.no_grad()
def evaluate(model, score_fn, loader, device):
    """Sum score_fn(model, batch) over all batches, and divide by the sum of "count".

    All ranks call it, each with its own batches, and get the same {name: mean}. Pass
    the model itself: the forward() of DDP may wait for the other ranks, and one of them
    may have one batch fewer.
    """
    if dist.get_world_size() > 1:
        # DDP: each rank has its own running means of batch norm. Only those of rank
        # 0 are saved, so use them. (NCCL sends only contiguous tensors.)
        for buffer in model.buffers():
            copy = buffer.contiguous()
            dist.broadcast(copy, src=0)
            buffer.copy_(copy)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    sums = collections.Counter()
    for batch in loader:
        scores = score_fn(model, to_device(batch, device))
        for name, value in scores.items():
            sums[name] += torch.as_tensor(value).double()
    for module, was_training in modes:  # a frozen layer stays in eval mode
        module.train(was_training)
    total = collections.Counter()
    # DDP: add up the sums of all ranks.
    for of_rank in all_gather({name: float(value) for name, value in sums.items()}):
        total.update(of_rank)
    count = total.pop("count", 0)
    if total and not count:
        sys.exit('score() must return "count", the number of samples')
    return {name: value / count for name, value in total.items()}


def write(descriptor, line):
    """A line to stdout (1) or stderr (2), in one piece, even if the pipe is closed."""
    # Ctrl-C in `... 2>&1 | tee log` ends tee first. The run must still save. print()
    # would keep what it could not write, and fail at the exit.
    with contextlib.suppress(OSError):
        os.write(descriptor, os.fsencode(f"{line}\n"))


def say(line):
    """Print a line, on rank 0 only."""
    if dist.get_rank() == 0:  # DDP: otherwise each line appears once per rank
        write(1, line)


def log(folder, step, means):
    """Rank 0 prints a line and adds it to metrics.jsonl. means: {name: number}"""
    if dist.get_rank() > 0 or not means:  # DDP: one rank writes
        return
    say("  ".join([f"step {step}", *[f"{k} {v:.5g}" for k, v in means.items()]]))
    record = {"step": step}
    for name, value in means.items():
        record[name] = value if math.isfinite(value) else None  # JSON has no NaN
    file = open(Path(folder, "metrics.jsonl"), "a")
    size = file.tell()
    try:
        with file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:  # a full disk: train on, and leave no half line
        os.truncate(file.name, size)
        say(f"warning: {file.name}: {error}")


# ---- Checkpoint
# Imports: os, sys, zipfile, Path, torch, dist
def save_checkpoint(path, step, **content):
    """Rank 0 writes a file, atomically: it is always the old or the new one.

    content: tensors and plain Python, such as a state_dict(). No rank waits in it: all
    may call it, or rank 0 alone.
    """
    if dist.get_rank() > 0:  # DDP: only rank 0 saves
        return
    path = Path(path)
    beside = path.with_suffix(".tmp")
    try:
        with open(beside, "wb") as file:
            torch.save({"step": step, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        # Fail now on what torch.load() would refuse, such as a numpy number.
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(beside)
        if refused:
            raise RuntimeError(f"torch.load() would refuse {refused}")
        os.replace(beside, path)
    except Exception as error:  # pickle and torch raise all kinds
        beside.unlink(missing_ok=True)
        while error.__context__:  # torch hides "No space left" in there
            error = error.__context__
        sys.exit(f"cannot save {path} (the old one is intact): {error}")


def load_checkpoint(path):
    """The checkpoint with the most steps on any rank, or None. All ranks call it."""
    path = Path(path)
    content, version = None, (-1, [])  # of a rank that has no file
    if path.exists():
        try:
            # torch.load() does not verify the checksums in the file, so we do.
            with zipfile.ZipFile(path) as archive:
                if archive.testzip():
                    raise ValueError("a checksum is wrong")
                checksums = [entry.CRC for entry in archive.infolist()]
            # weights_only: no code in the file is run.
            content = torch.load(path, "cpu", weights_only=True)
            version = content["step"], checksums
        except Exception as error:  # zipfile, pickle and torch raise all kinds
            sys.exit(f"{path} cannot be loaded: {error!r:.200}")
    versions = all_gather(version)
    if min(versions) < max(versions):
        # The nodes have no shared disk. A rank that has the newest file sends it.
        box = [content]
        dist.broadcast_object_list(box, src=versions.index(max(versions)))
        content = box[0]
    return content


# ---- Stop
# Imports: os, signal, torch, dist
# SIGTERM: torchrun, Slurm, containers. SIGINT: Ctrl-C. SIGHUP: a closed terminal.
# SIGUSR1: Slurm, before the time limit, if asked to.
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


class StopSignal:
    """Tells whether any rank has received a signal to stop, or has lost torchrun.

    All ranks call requested() after each step and get the same answer, so that they
    save and stop at the same step. torchrun gives them 30 s (--shutdown-timeout), and
    passes on SIGUSR1 only if --signals-to-handle names it.
    """

    number = 0

    def __init__(self):
        self.parent = os.getppid()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.receive)

    def receive(self, number, frame):
        self.number = number
        text = f"signal {number}: will save and stop after this step"
        write(2, f"{text} (kill -9 {os.getpid()} ends it immediately)")

    def requested(self):
        """The number of the signal, or 0. All ranks call it."""
        if dist.is_torchelastic_launched() and os.getppid() != self.parent:
            self.number = signal.SIGTERM  # torchrun was killed
        number = torch.tensor(int(self.number))
        # DDP: if one rank must stop, all ranks stop.
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)


# ---- OPTIONS -------------------------------------------------------------------------
MAY_DIFFER_BETWEEN_RANKS = ["out", "workers", "local_rank"]
ABOVE_ZERO = "layers heads dim seq_len epochs max_steps batch_size accum lr grad_clip"
ABOVE_ZERO += " log_every eval_every save_every timeout"
# {option: (smallest, upper limit)}. Torch's timers cannot take much more than 10 days.
RANGES = {"warmup": (0, 1), "workers": (0, 10**6), "seed": (-(2**63), 2**63)}
RANGES["timeout"] = (1, 10**6)


def parse_args(argv=None):
    formatter = argparse.ArgumentDefaultsHelpFormatter
    usage = "%(prog)s [options], see --help"
    parser = argparse.ArgumentParser(formatter_class=formatter, usage=usage)
    add = parser.add_argument
    add("--data", metavar="FILE", help="file to learn; without it, Python's help texts")
    for name, (default, text) in MODEL_OPTIONS.items():
        add(f"--{name}", type=type(default), default=default, help=text)
    add("--out", default="out", help="folder of the checkpoint; resumes from it")
    add("--epochs", type=int, default=3, help="passes over the data")
    add("--max_steps", type=int, help="train to this step, instead of --epochs")
    add("--batch_size", type=int, default=32, help="samples per batch and rank")
    add("--accum", type=int, default=1, help="batches per optimizer step")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=float, default=0.05, help="fraction of the run for warm-up")
    add("--grad_clip", type=float, default=1.0, help="maximum norm of the gradients")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    add("--compile", action="store_true", help="use torch.compile")
    add("--workers", type=int, default=0, help="workers per DataLoader and rank")
    add("--seed", type=int, default=0, help="for weights, shuffling, dropout")
    add("--log_every", type=int, default=20, help="steps")
    add("--eval_every", type=int, help="steps; also after each epoch")
    add("--save_every", type=int, default=100, help="steps; also before an evaluation")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    add("--timeout", type=int, default=600, help="seconds to wait for a rank or worker")
    # The old launcher, torch.distributed.launch, passes this. It is not needed.
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ABOVE_ZERO.split():
        value = getattr(args, name, None)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"argument --{name}: {value} must be above 0")
    for name, (low, limit) in RANGES.items():
        value = getattr(args, name)
        if not low <= value < limit:
            parser.error(f"argument --{name}: {value} is not in [{low}, {limit})")
    return args


def main(argv=None):
    args = parse_args(argv)
    with distributed(args.device, args.timeout) as device:
        stopped_by = train(args, device)
    # torchrun would restart a stopped rank if its exit code were not 0.
    if stopped_by and not dist.is_torchelastic_launched():
        sys.exit(128 + stopped_by)


# ---- ENDINGS: skip at first reading --------------------------------------------------
# ---- How a rank fails, and what it must not leave
# Imports: errno, fcntl, multiprocessing, os, signal, sys, time, traceback, Path, dist,
# get_error_handler
def end_this_rank(error):
    """Say why, and exit. It does not return.

    An ordinary exit may hang: this rank and the others would wait for each other.
    """
    try:
        text = error.code if isinstance(error, SystemExit) else repr(error)
        write(2, f"error: rank {dist.get_rank()}: {text}")
        # sys.exit("text") needs no traceback, nor does a failure that only follows from
        # the failure of another rank ("Connection closed by peer").
        follows = isinstance(error, RuntimeError) and "by peer" in text
        if not isinstance(error, SystemExit) and not follows:
            traceback.print_exception(error)
        sys.stdout.flush()
        kill_workers()
        get_error_handler().record_exception(error)  # for the summary of torchrun
        # The others fail as soon as this rank is gone. torchrun names the first rank to
        # fail, but counts in whole seconds: wait for the next one.
        time.sleep(1.1)
    finally:
        os._exit(1)


def kill_workers():
    """Kill all daemon processes: workers ignore SIGTERM, and the exit would hang."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise torch raises an error
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def ignore_signals(worker):
    """torchrun and Ctrl-C signal workers, too, but the rank must save first."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if not multiprocessing.parent_process().is_alive():
        os._exit(1)  # the rank was killed before this: torch would not notice


def lock(folder):
    """Create the folder, and lock it until this process ends. All ranks call it."""
    problem = None
    if dist.get_rank() == 0:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            # The file stays open.
            file = os.open(Path(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"{folder} is in use by another run"
        except OSError as error:
            problem = f"the folder {folder}: {error}"
            # Some network disks have no locks.
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                say(f"warning: no lock: {problem}")
                problem = None
    problem = all_gather(problem)[0]
    if problem:
        sys.exit(problem)


if __name__ == "__main__":
    main()
