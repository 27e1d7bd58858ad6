# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "numpy"]
# ///
"""Data-parallel training in PyTorch, in one file. (ddp_train, version 9)

    python ddp_train.py                                     one process, CPU or GPU
    torchrun --standalone --nproc_per_node=4 ddp_train.py   four GPUs on one machine
    torchrun --nnodes=2 --node_rank=R --nproc_per_node=4 --master_addr=HOST ddp_train.py
        two machines with four GPUs each; R is 0 on the machine HOST, 1 on the other

torchrun starts one process per GPU. With --standalone it uses this machine only, and a
free port. Each process is called a rank, the number of ranks is the world size, and
together they form the process group. A collective is a call that all ranks make and
that combines their values: all-reduce gives all ranks the sum, broadcast sends one
rank's value to all, and a barrier only waits until all ranks are there.

Every rank has the whole model and trains on its own share of each batch. During
backward(), DistributedDataParallel (DDP) averages the gradients by all-reduce. So every
optimizer takes the same step, and the copies of the model stay equal. The idea:

    dist.init_process_group()                     # join the other ranks
    sampler = DistributedSampler(dataset)         # each rank gets its own share
    wrapped = DistributedDataParallel(model)      # all ranks get rank 0's weights
    for batch in DataLoader(dataset, batch_size, sampler=sampler):
        optimizer.zero_grad()
        compute_loss(wrapped, batch).backward()   # averages the gradients
        optimizer.step()                          # the same step on all ranks

examples/idea.py does just this, in 40 lines that run: read it first. The mark "DDP:"
is where training is data-parallel: join, share, average, add up, leave. Four paths:
  the ranks     main, distributed, init_distributed; at the end barrier, leave
  a batch       load_data, ResumableSampler, DataLoader, train_step, mean_over_ranks
  a checkpoint  save_checkpoint; on the next launch load_checkpoint, resume, set_epoch
  a signal      StopSignal.receive, requested (on all ranks), save_checkpoint, main

--batch_size is per rank: one step trains on batch_size * accum * world size samples,
the global batch. With k times as many ranks, divide --batch_size by k. The same global
batch gives the same training on any number of ranks, up to rounding, except for:
  - dropout and random augmentation, because each rank draws its own numbers
  - batch norm and losses that compare samples: they see the samples of one rank

Run the same command again to resume; a different --out starts a new run. Ctrl-C and
SIGTERM save first, so nothing is lost, even though torchrun then prints a traceback of
its own. After a crash or kill -9 the run continues from the last checkpoint. If one
rank fails, the others fail with it. Look for the cause in the first line that begins
with "error: rank" and does not say "by peer". If a rank was killed, look at torchrun's
"Root Cause". One process does not use DDP: test your changes with two, in a new folder.
    torchrun --standalone --nproc_per_node=2 ddp_train.py --device cpu --out trial

For a new project, copy the file and replace the sections MODEL and DATA, and --data in
OPTIONS. For a script of your own, put the file beside it, `import ddp_train as ddp`,
and call what you need from PIECES. Or copy a piece with all that it calls: the comment
at the top of its section lists the imports. Follow two rules:
  1. All ranks make each collective, in the same order. If one is missing, the others
     wait for it: never call what "all ranks call" under `if rank == 0`.
  2. Whatever decides what happens next (a stop, a learning rate, a best score) must be
     the same on all ranks: compute it from numbers that they all agree on.
"""

import argparse
import contextlib
import datetime
import faulthandler
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
from collections.abc import Mapping
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn  # looks unused, but without it exit may crash
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

# ---- MODEL: replace it ---------------------------------------------------------------
# {option: (default, help)}. The default sets the type: 0.0 for a float, 0 or 1 for a
# switch, never "". A resume cannot change them. List in RANGES which may be 0 or less.
MODEL_OPTIONS = {
    "layers": (2, "number of transformer blocks"),
    "heads": (4, "attention heads"),
    "dim": (128, "width of the model"),
    "seq_len": (128, "bytes per sample"),
    "dropout": (0.0, "dropout probability"),
}


class ByteTransformer(nn.Module):
    """(batch, time) bytes -> (batch, time, 256) logits for the next byte."""

    def __init__(self, layers, heads, dim, seq_len, dropout):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.position = nn.Embedding(seq_len, dim)
        # By default the standard deviation of an embedding is 1, which is too large.
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        options = dict(activation="gelu", bias=False, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            block = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout, **options)
            self.blocks.append(block)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, x):
        # A causal mask: no position sees the bytes after it.
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        x = self.embed(x.long()) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))


def build_model(args):
    if args.dim % args.heads != 0:
        sys.exit(f"--dim {args.dim} is not divisible by --heads {args.heads}")
    shape = args.layers, args.heads, args.dim, args.seq_len
    return ByteTransformer(*shape, args.dropout)


def build_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr, fused=True)


def compute_loss(model, batch):
    """The mean over the samples of a batch.

    The model may be the DDP wrapper, so use it only as model(...). Average over tokens
    only if every sample has as many of them, because every batch counts equally.
    Every trained weight must contribute to the loss, or DDP fails in the second step.
    """
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten().long())


def score(model, batch):
    """Sums over the batch, not means, and "count", the number to divide them by."""
    x, _ = batch
    return {"val_loss": compute_loss(model, batch) * len(x), "count": len(x)}


# ---- DATA: replace it ----------------------------------------------------------------
def load_data(args):
    """Training set, validation set (the last 5%), and a string that names the data.

    All ranks call it at the same time, so download the data before the run, not here.
    The run exits if the string differs between ranks or from the checkpoint's: choose
    a checksum, a version, or a date. List new options for data in MUST_NOT_CHANGE.
    """
    # By default, train on a file shipped with Python: its help topics.
    path = args.data or Path(os.__file__).parent / "pydoc_data/topics.py"
    try:
        data = torch.from_numpy(numpy.fromfile(path, numpy.uint8))
    except OSError as error:
        sys.exit(f"no data: {error}: pass a file with --data")
    # The target of a sample is the same window, shifted by one byte.
    n = (len(data) - 1) // args.seq_len
    held_out = max(1, n // 20)
    inputs = data[: n * args.seq_len].view(n, args.seq_len)
    targets = data[1 : n * args.seq_len + 1].view(n, args.seq_len)
    windows = TensorDataset(inputs, targets)
    train_set = Subset(windows, range(n - held_out))
    val_set = Subset(windows, range(n - held_out, n))
    return train_set, val_set, f"CRC-32 {zlib.crc32(data.numpy()):08x}"


# ---- THE RUN -------------------------------------------------------------------------
MAY_DIFFER = ["out", "workers"]  # between ranks; all other options must be the same
MUST_NOT_CHANGE = ["seed", "data", "optimizer", *MODEL_OPTIONS]  # between launches


def main(argv=None):
    args = parse_args(argv)
    with distributed(args.device, args.timeout) as device:
        stopped_by = train(args, device)
    # To torchrun any code but 0 is a failure: --max_restarts would start it again.
    if stopped_by and not dist.is_torchelastic_launched():
        sys.exit(128 + stopped_by)


def train(args, device):
    """The whole run. All ranks call it. Returns the signal that stopped it, if any."""
    # ---- Set up
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_all("start", args.seed)
    train_set, val_set, data_name = load_data(args)
    model = build_model(args).to(device)  # optimize, evaluate and save this one
    if not model.training:
        sys.exit("build_model() returns a model in eval mode: call model.train()")
    optimizer = build_optimizer(model, args)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # the peak; torch's schedulers use this name
    optimizer.state_dict()  # some optimizers fail here: better now than at a save
    n = len(train_set)
    global_batch = args.batch_size * args.accum * world_size  # samples per step
    used = n - n % global_batch  # samples per epoch: of 1001, in steps of 32, 992
    # {name: string} to compare between ranks, and in resume() with the checkpoint
    settings = {name: str(value) for name, value in vars(args).items()}
    for name in MAY_DIFFER:
        del settings[name]
    settings["data"] = f"{n} samples, {len(val_set)} held out, {data_name}"
    settings["device"] = device.type
    settings["global batch"] = str(global_batch)
    settings["optimizer"] = type(optimizer).__name__
    check_alike(settings)
    if n < global_batch:
        sys.exit(f"{n} samples are fewer than one step of {global_batch}")

    # ---- Resume
    folder = Path(args.out)
    path = folder / "checkpoint.pt"
    lock(folder)
    # done: samples of this epoch trained on so far, by all ranks together
    step, epoch, done, evaluation_due = resume(path, model, optimizer, settings)
    # n, not used: this epoch may have begun with another global batch.
    samples_left = n - done + (args.epochs - epoch - 1) * used
    last_step = args.max_steps or step + samples_left // global_batch

    wrapped = model  # call it to train; its weights are those of model, not a copy
    if world_size > 1:
        # DDP: copy rank 0's weights to all ranks, then average the gradients in each
        # backward(). gradient_as_bucket_view keeps no copy of them if --accum is 1.
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.compile:
        wrapped = torch.compile(wrapped)
    bf16 = args.precision == "bf16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    loading = loading_options(device, args.workers, args.timeout)
    # DDP: each rank has its own share. With DataLoader(shuffle=True) shares overlap.
    sampler = ResumableSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, **loading)
    # DDP: rank r validates samples r, r + W, r + 2W, ...: each one counts once.
    val_samples = range(rank, len(val_set), world_size)
    val_loader = DataLoader(val_set, args.batch_size, sampler=val_samples, **loading)

    say(f"ranks: {world_size}, {device.type}, {args.precision}, {socket.gethostname()}")
    say(f"global batch: {global_batch} samples; an epoch: {n}, {n - used} left over")
    say(f"from step {step} to {last_step}")
    stop = StopSignal()
    if evaluation_due or step >= last_step:  # saved before evaluating: repeat it
        with autocast:
            log(folder, step, evaluate(model, score, val_loader, device))
    if step >= last_step:
        say("nothing left to train: raise --epochs or --max_steps, or change --out")
        return None

    # ---- Train
    eval_every = args.eval_every or last_step
    results = []  # of the steps since the last log line, kept on the device
    while step < last_step:
        sampler.set_epoch(epoch, done)  # a new order, the same on all ranks
        seed_all("load", args.seed, step, rank)
        batches = iter(loader)
        steps = min(last_step - step, (n - done) // global_batch)  # 0: epoch is over
        for i in range(steps):
            if not results:
                began = time.perf_counter()
            seed_all("step", args.seed, step, rank)
            # The fraction of the run that is done, halfway through this step. Without
            # --max_steps it counts samples, in case a resume changes the global batch.
            progress = (epoch * used + done + global_batch / 2) / (args.epochs * used)
            if args.max_steps:
                progress = (step + 0.5) / args.max_steps
            set_learning_rate(optimizer, progress, args.warmup)  # or your own schedule
            result = train_step(wrapped, batches, optimizer, autocast, args, device)
            results.append(result)
            step += 1
            done += global_batch

            stopped_by = stop.requested()  # the same answer on all ranks
            evaluation_due = i == steps - 1 or step % eval_every == 0
            saving = stopped_by or evaluation_due or step % args.save_every == 0
            if saving or step % args.log_every == 0:
                means = mean_over_ranks(results)
                # Before a save, look for NaN and for ranks that have diverged.
                if not all(math.isfinite(mean) for mean in means.values()):
                    sys.exit(f"not finite, not saved: {means}: try a lower --lr?")
                check_together(results, model)
                seconds = (time.perf_counter() - began) / len(results)
                means["lr"] = float(optimizer.param_groups[0]["lr"])
                means["samples_per_s"] = global_batch / seconds
                means["seconds_left"] = seconds * (last_step - step)
                if device.type == "cuda":
                    means["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
                log(folder, step, means)
                results = []
            if saving:
                # A torch scheduler: pass it to resume(), to load what you add here.
                state = {"epoch": epoch, "done": done, "settings": settings}
                state |= {"evaluation_due": evaluation_due, "model": model.state_dict()}
                state["optimizer"] = optimizer.state_dict()
                save_checkpoint(path, step, **state)
            if stopped_by:
                say(f"stopped by signal {stopped_by}, saved at step {step}")
                return stopped_by
            if evaluation_due:
                with autocast:
                    log(folder, step, evaluate(model, score, val_loader, device))
        epoch, done = epoch + 1, 0  # a resume at the end of an epoch comes here, too
    say(f"done: step {step}, saved in {path}")


def resume(path, model, optimizer, settings):
    """Load what train() has saved, if anything. All ranks call it.

    Returns step, epoch, done, and whether an evaluation is due at this step.
    """
    saved = load_checkpoint(path)
    if saved is None:
        return 0, 0, 0, False
    try:
        for name, before in saved["settings"].items():
            value = settings.get(name)
            if value != before and name in MUST_NOT_CHANGE:
                sys.exit(f"{path} has {name} {before}, not {value}: use another --out")
            if value != before:
                say(f"{name} is {value}, it was {before}")
        model.load_state_dict(saved["model"])
        # The optimizer restores its old options, too. The lines around it put this
        # launch's back. A torch scheduler needs the old ones: delete those three lines.
        options = [dict(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(saved["optimizer"])
        for group, now in zip(optimizer.param_groups, options, strict=True):
            group.update(now)
        return saved["step"], saved["epoch"], saved["done"], saved["evaluation_due"]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        sys.exit(f"cannot restore {path} (a new model? use another --out): {error!r}")


def train_step(wrapped, batches, optimizer, autocast, args, device):
    """One optimizer step on args.accum batches. All ranks call it.

    Returns {name: scalar tensor}, for the log. check_together() needs "grad_norm".
    """
    loss_sum = 0.0
    for i in range(args.accum):
        batch = to_device(next(batches), device)
        context = contextlib.nullcontext()
        if i < args.accum - 1 and dist.get_world_size() > 1:
            # DDP: only add up gradients. The last backward() of the step averages them.
            context = wrapped.no_sync()
        with context:
            with autocast:
                loss = compute_loss(wrapped, batch)
            # DDP: the step's last backward() averages the gradients over the ranks. All
            # have as many samples, so this is the mean over all samples of the step.
            (loss / args.accum).backward()
        loss_sum += loss.detach().float()
    # The gradients are averaged, so all ranks have the same norm and clip the same way.
    grad_norm = nn.utils.clip_grad_norm_(wrapped.parameters(), args.grad_clip)
    optimizer.step()
    wrapped.zero_grad()  # also weights that are not in the optimizer
    return {"loss": loss_sum / args.accum, "grad_norm": grad_norm}


def set_learning_rate(optimizer, progress, warmup):
    """Linear warm-up to the peak, then cosine decay to 0. progress: from 0 to 1."""
    progress = min(progress, 1.0)  # a resume with another global batch may overshoot
    if progress < warmup:
        factor = progress / warmup
    else:
        factor = (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


# ---- PIECES --------------------------------------------------------------------------
# ---- Ranks: join, choose the device, compare, leave together
# Imports: contextlib, datetime, os, signal, sys, torch, torch.distributed.nn, dist
# SIGTERM: torchrun, Slurm, containers. SIGINT: Ctrl-C. SIGHUP: a closed terminal.
# SIGUSR1: Slurm, before the time limit, if asked to.
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


@contextlib.contextmanager
def distributed(device="auto", timeout=600):
    """Wrap all distributed code in `with distributed() as device:`.

    If one of several ranks fails, it says why and exits with 1. `finally` blocks around
    the `with` have 30 s. For expected errors, call sys.exit("one line"). At the end
    they wait for the last rank, up to `timeout`, unless all of them call sys.exit(0).
    """
    handlers = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    device = init_distributed(device, timeout)
    try:
        yield device
        # DDP: leave together. A rank that exits early may make the others fail.
        dist.barrier()
    except BaseException as error:
        is_exit_0 = isinstance(error, SystemExit) and not error.code
        if dist.get_world_size() > 1 and not is_exit_0:
            end_this_rank(error)
        leave(handlers)
        raise
    leave(handlers)


def init_distributed(device="auto", timeout=600):
    """Join the process group and return this rank's device. All ranks call it.

    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without
    RANK this process alone is the group. timeout: seconds that a collective may take.
    """
    device = choose_device(device)
    if "RANK" in os.environ:
        # Tensors on GPUs are sent by NCCL, those on CPUs by gloo. requested() and
        # all_gather() send CPU tensors, so these two never wait for a busy GPU.
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if os.environ["RANK"] == "0":
            place = f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}"
            write(1, f"rank 0 waits for all ranks at {place}")
        # DDP: join the other ranks.
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    else:
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
            if int(os.environ.get(name, 1)) > 1:  # set by mpirun or srun
                use = "torchrun, or run_multi_node.sh as one task per node"
                sys.exit(f"{name} is set, but each run would train alone: use {use}")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return device


def choose_device(name):
    """This rank's device. "auto": an NVIDIA or AMD GPU, or the CPU if there is none."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    # Rank i of this machine (its local rank) takes GPU i.
    index = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.cuda.device_count()
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
    """Exit if {name: string} differs between ranks. All ranks call it."""
    rows = all_gather(settings)
    for rank, row in enumerate(rows):
        for name in rows[0] | row:  # names in either
            if row.get(name) != rows[0].get(name):
                here = f"{row.get(name)} on rank {rank}"
                sys.exit(f"{name} is {here}, but {rows[0].get(name)} on rank 0")


# ---- Batches
# Imports: multiprocessing, numpy, os, random, signal, zlib, Mapping, torch,
# DistributedSampler
class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can resume mid-epoch, on any number of ranks.

    The order depends only on the seed and the epoch. Samples are dealt out in turn,
    like cards: rank r of W gets positions r, r + W, r + 2W, .... So the samples done so
    far are always the first ones of the order. Call set_epoch() before each epoch.
    From DistributedSampler: rank, num_replicas (the world size), seed, epoch, dataset.
    """

    def __init__(self, dataset, seed):
        super().__init__(dataset, seed=seed)
        self.start = 0

    def set_epoch(self, epoch, start=0):
        """start: samples of this epoch done so far, by all ranks together."""
        super().set_epoch(epoch)
        self.start = start

    def __len__(self):
        return max(0, len(self.dataset) - self.start) // self.num_replicas

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)
        # DDP: each rank takes its own share of the samples.
        mine = order[self.start + self.rank :: self.num_replicas][: len(self)]
        return iter(mine.tolist())


def to_device(batch, device):
    """A batch with its tensors on the device: also those in tuples, lists, mappings."""
    if hasattr(batch, "to"):  # a tensor, or another library's batch
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {name: to_device(value, device) for name, value in batch.items()}
        return moved if isinstance(batch, dict) else type(batch)(moved)
    if isinstance(batch, (tuple, list)):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def seed_all(*values):
    """Seed torch (CPU and GPUs), numpy and random with a hash of these values.

    train() uses three seeds:
      "start"  is the same on all ranks, so that initial weights and random splits match
      "load"   differs between ranks: it seeds workers when they start, once per launch
      "step"   differs between ranks and steps: each rank draws its own dropout, and a
               run resumed on as many ranks draws the same as an uninterrupted one
    """
    seed = zlib.crc32(repr(values).encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def loading_options(device, workers, timeout=600):
    """Options for a DataLoader. timeout: how long a batch may take, in seconds.

    Workers are spawned, so the dataset must be picklable, and workers do not see
    globals that main() has set.
    """
    options = {"pin_memory": device.type == "cuda", "num_workers": workers}
    if workers > 0:
        options["timeout"] = timeout  # otherwise a hung worker blocks forever
        options["persistent_workers"] = True
        # Forked workers may deadlock with NCCL (DDP's documentation).
        options["multiprocessing_context"] = "spawn"
        options["worker_init_fn"] = ignore_signals
    return options


def ignore_signals(worker):
    """torchrun and Ctrl-C also signal workers, but the current step needs them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if not multiprocessing.parent_process().is_alive():
        os._exit(1)  # the rank has already died, and torch would not notice


# ---- Numbers: average, compare, evaluate, log
# Imports: contextlib, json, os, sys, Path, torch, dist
def mean_over_ranks(results):
    """[{name: number or tensor}], one per step -> {name: mean over steps and ranks}.

    All ranks call it, with the same names in each step. It waits for the GPU.
    """
    # Each rank's {(number of steps, names)}: over all ranks and steps, only one pair.
    seen = all_gather({(len(results), *sorted(row)) for row in results or [{}]})
    if len(set().union(*seen)) > 1:
        sys.exit(f"mean_over_ranks() needs the same names everywhere, not {seen}")
    names = sorted(results[0])
    rows = [[float(row[name]) for name in names] for row in results]
    means = torch.tensor(rows, dtype=torch.float64).mean(0) / dist.get_world_size()
    # DDP: the mean over all ranks. Otherwise the log has only rank 0's loss.
    dist.all_reduce(means)
    return {name: float(means[names.index(name)]) for name in results[0]}


def check_together(results, model):
    """Exit on all ranks if their models have diverged. All ranks call it.

    DDP keeps them equal, unless a step bypasses it, or a rank changes its own weights.
    Compared are each weight's norm, and that of the gradient, results[-1]["grad_norm"].
    """
    names = [*dict(model.named_parameters()), "the gradient"]
    norms = [weight.detach().float().norm() for weight in model.parameters()]
    norms = [*torch.stack(norms).tolist(), float(results[-1]["grad_norm"])]
    for name, *of_ranks in zip(names, *all_gather(norms), strict=True):
        # "not <=" instead of ">", because comparisons with NaN are False.
        if not all(abs(x - of_ranks[0]) <= 1e-6 * of_ranks[0] for x in of_ranks):
            sys.exit(f"the ranks differ, or are not finite: norm of {name}: {of_ranks}")


@torch.no_grad()
def evaluate(model, score_fn, loader, device):
    """Sum score_fn(model, batch) over all batches, and divide by the sum of "count".

    All ranks call it, each with its own batches, and get the same {name: mean}. Pass
    the model, not its DDP wrapper, whose forward() may wait for the other ranks.
    """
    if dist.get_world_size() > 1:
        # Batch norm's running means differ between ranks. Rank 0's are saved: use them.
        names = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in names:
                sent = buffer.contiguous()  # a copy if NCCL could not send it as it is
                dist.broadcast(sent, src=0)
                buffer.copy_(sent)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    sums = {}
    for batch in loader:
        scores = score_fn(model, to_device(batch, device))
        for name, value in scores.items():
            sums[name] = sums.get(name, 0) + torch.as_tensor(value).double()
    for module, was_training in modes:  # a frozen layer stays in eval mode
        module.train(was_training)
    rows = all_gather({name: float(value) for name, value in sums.items()})
    rows = [row for row in rows if row] or [{}]  # a rank may have no batch
    if any(row.keys() != rows[0].keys() for row in rows):
        sys.exit(f"score() must return the same names on all ranks, not {rows}")
    # DDP: add up the sums of all ranks.
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    count = total.pop("count", 0)
    if total and not count:
        sys.exit('score() must return "count", the number of samples')
    return {name: value / count for name, value in total.items()}


def write(descriptor, line):
    """Write a line to stdout (1) or stderr (2), even if nobody is reading it."""
    # Ctrl-C in `... | tee log` kills tee first. Then print() would end the run unsaved.
    with contextlib.suppress(OSError):
        os.write(descriptor, os.fsencode(f"{line}\n"))


def say(line):
    """Print a line, on rank 0 only."""
    if dist.get_rank() == 0:
        write(1, line)


def log(folder, step, means):
    """Rank 0 prints a line and adds it to metrics.jsonl. means: {name: number}"""
    if dist.get_rank() > 0 or not means:
        return
    say("  ".join([f"step {step}", *[f"{k} {v:.5g}" for k, v in means.items()]]))
    with open(Path(folder, "metrics.jsonl"), "a") as file:
        file.write(json.dumps({"step": step, **means}) + "\n")


# ---- Checkpoint
# Imports: fcntl, os, sys, zipfile, Path, torch, dist
def save_checkpoint(path, step, **content):
    """Rank 0 writes a file, atomically: you always have the old one or the new one.

    content: tensors and plain Python, such as a state_dict(). It does no communication,
    so all ranks may call it, or rank 0 alone.
    """
    if dist.get_rank() > 0:
        return
    path = Path(path)
    beside = path.with_name(f"{path.name}.tmp")
    handled = sys.exc_info()[1]  # the caller's own error, if it saves in an "except"
    try:
        with open(beside, "wb") as file:
            torch.save({"step": step, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        # Fail now if torch.load() would refuse it later, such as a numpy number.
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(beside)
        if refused:
            raise RuntimeError(f"torch.load() would refuse {refused}")
        os.replace(beside, path)
    except Exception as error:  # pickle and torch can raise anything
        beside.unlink(missing_ok=True)
        while error.__context__ not in (None, handled):  # torch buries the cause
            error = error.__context__
        sys.exit(f"cannot save {path} (the old one is intact): {error}")


def load_checkpoint(path):
    """The checkpoint with the most steps on any rank, or None. All ranks call it."""
    path = Path(path)
    content, step = None, -1
    if path.exists():
        try:
            # torch.load() does not verify the checksums in the file, so we do.
            with zipfile.ZipFile(path) as archive:
                if archive.testzip():
                    raise ValueError("a checksum is wrong")
            # weights_only: no code in the file is run.
            content = torch.load(path, "cpu", weights_only=True)
            step = content["step"]
        except Exception as error:  # zipfile, pickle and torch can raise anything
            sys.exit(f"{path} cannot be loaded: {error!r:.200}")
    steps = all_gather(step)
    if min(steps) < max(steps):
        # Each has its own disk. A rank that has the newest file sends it to the rest.
        box = [content]
        dist.broadcast_object_list(box, src=steps.index(max(steps)))
        content = box[0]
    return content


def lock(folder):
    """Rank 0 creates the folder and keeps other runs out of it until it ends."""
    if dist.get_rank() > 0:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # The file stays open, or the lock would be released.
        file = os.open(Path(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        sys.exit(f"cannot use the folder {folder}: {error}")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{folder} is in use by another run")
    except OSError as error:  # some network disks do not support locks
        say(f"warning: {folder} is not locked: {error}")


# ---- Stop
# Imports: contextlib, os, signal, torch, dist
class StopSignal:
    """Tracks whether any rank has received a signal to stop, or torchrun has died.

    All ranks call requested() after each step and get the same answer, so they stop at
    the same step. torchrun gives them 30 s (--shutdown-timeout), and passes on SIGUSR1
    only with --signals-to-handle. Workers must ignore signals: see loading_options().
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
        with contextlib.suppress(OSError):
            os.write(2, f"{text} (kill -9 {os.getpid()} to quit now)\n".encode())

    def requested(self):
        """The number of the signal, or 0. All ranks call it."""
        if dist.is_torchelastic_launched() and os.getppid() != self.parent:
            self.number = signal.SIGTERM  # torchrun was killed
        number = torch.tensor(int(self.number))
        # If one rank must stop, all ranks stop.
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)


# ---- OPTIONS -------------------------------------------------------------------------
# low <= x < high. All other numbers must be above 0, unless that is their default.
RANGES = {"dropout": (0, 1), "warmup": (0, 1), "workers": (0, 1000), "seed": (0, 2**63)}


def parse_args(argv=None):
    formatter = argparse.ArgumentDefaultsHelpFormatter
    usage = "%(prog)s [options], see --help"
    parser = argparse.ArgumentParser(formatter_class=formatter, usage=usage)
    add = parser.add_argument
    add("--data", metavar="FILE", help="file to train on; default: Python's help texts")
    for name, (default, text) in MODEL_OPTIONS.items():
        add(f"--{name}", type=type(default), default=default, help=text)
    add("--out", default="out", help="folder of the checkpoint; resumes from it")
    add("--epochs", type=int, default=3, help="passes over the data")
    add("--max_steps", type=int, help="train to this step, instead of --epochs")
    add("--batch_size", type=int, default=32, help="samples per batch on each rank")
    add("--accum", type=int, default=1, help="batches per optimizer step")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=float, default=0.05, help="fraction of the run for warm-up")
    add("--grad_clip", type=float, default=1.0, help="maximum norm of the gradients")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    add("--compile", action="store_true", help="use torch.compile")
    add("--workers", type=int, default=0, help="workers per DataLoader and rank")
    add("--seed", type=int, default=0, help="for weights, shuffling, dropout")
    add("--log_every", type=int, default=20, help="steps between log lines")
    add("--eval_every", type=int, help="steps; also at the end of each epoch")
    add("--save_every", type=int, default=100, help="steps; also before an evaluation")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    add("--timeout", type=int, default=600, help="seconds to wait for a rank or worker")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        low, high = RANGES.get(name, (1e-300, math.inf))
        is_number = type(value) in (int, float) and value != parser.get_default(name)
        if value == "" or (is_number and not low <= value < high):
            parser.error(f"argument --{name}: {value!r} is out of range")
    return args


# ---- ENDINGS: skip on a first read ---------------------------------------------------
# ---- Failure and cleanup
# Imports: faulthandler, multiprocessing, signal, sys, time, traceback, dist,
# get_error_handler
def end_this_rank(error):
    """Say why, and raise SystemExit, so that the caller's `finally` and atexit run."""
    # If the exit hangs, print where, and end it. After Python's end, the alarm ends it.
    faulthandler.dump_traceback_later(30, exit=True, file=2)
    signal.alarm(35)
    for number in STOP_SIGNALS:  # torchrun sends them when another rank has failed
        signal.signal(number, signal.SIG_IGN)
    kill_workers()
    get_error_handler().record_exception(error)  # for torchrun's summary
    text = error.code if isinstance(error, SystemExit) else repr(error)
    if isinstance(error, RuntimeError) and "by peer" in text:
        # Another rank failed, or is in a different collective: no traceback, one line.
        calls = traceback.TracebackException.from_exception(error).stack
        text += f" (in {' > '.join(call.name for call in calls)})"
    elif not isinstance(error, SystemExit):
        text = f"{text}\n{''.join(traceback.format_exception(error))}"
    write(2, f"error: rank {dist.get_rank()}: {text}")
    # The others fail as soon as this rank is gone. torchrun blames the earliest
    # failure, but counts in whole seconds. Wait, so that the others fail later.
    time.sleep(1.1)
    sys.exit(1)


def leave(handlers):
    """Leave the process group, and restore the signal handlers from before it."""
    kill_workers()
    # Give gloo's threads time to finish. A DDP object that is freed before that would
    # wait for them, and they for Python's lock, which it holds (pytorch issue 56297).
    time.sleep(0.1)
    dist.destroy_process_group()
    for number, handler in handlers:
        signal.signal(number, handler or signal.SIG_DFL)


def kill_workers():
    """Kill all daemon processes. Workers ignore SIGTERM, so exit would hang."""
    # Torch's handler would raise an error for each. It is set once per process, so put
    # it back: in a second distributed() it notices a worker that was killed.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
            process.join()
    signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


if __name__ == "__main__":
    main()
