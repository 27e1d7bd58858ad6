# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "numpy"]  # torch needs numpy to send objects
# ///
"""Data-parallel training in PyTorch, in one file.

    python ddp_train.py                                     one process, CPU or GPU
    torchrun --standalone --nproc_per_node=4 ddp_train.py   four processes, four GPUs
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=HOST ddp_train.py
        two machines; HOST is the first one, the other one has --node_rank=1

--batch_size is that of one process: four processes take four times as many samples in a
step. To train like one process alone, divide it by four.

What DistributedDataParallel (DDP) does: each process, called a rank, has the whole
model, and reads its own share of the samples. All start with the same weights. During
backward() DDP averages the gradients over all ranks. So every optimizer takes the same
step, and the copies of the model stay equal.

Most lines that are there because of this are marked "DDP:", with what goes wrong
without them. Not marked are calculations with world.size, functions that "all ranks
call", and section ENDINGS. Four rules are left to whoever changes the script:

  1. All ranks start alike: with the same weights, options and data set.
  2. All ranks take part in each collective (all-reduce, broadcast, ...), in the same
     order. If one rank is missing, the others wait for it. So never call one, or a
     function that does, under `if world.rank == 0`.
  3. No sample counts twice in an epoch, and only rank 0 writes files.
  4. The ranks end together: they stop at the same step. A rank that fails ends at once,
     and torchrun then ends the others.

Replace the sections MODEL and DATA with yours: MODEL_OPTIONS, build_model(),
build_optimizer(), compute_loss(), score(); load_data(). In OPTIONS replace --data, and
--dropout in two places. A collate_fn goes to both loaders in train().

A second start resumes the run in the folder --out. Weights of other names or shapes,
another seed and other data are then refused. Other options, such as --lr, and the
program may change: the log says so. To begin a new run, give another --out.

The same global batch gives the same numbers, up to rounding, on any number of ranks and
with any --accum: but not with dropout (each rank draws its own) or batch norm (it sees
the batch of one rank). A resumed run goes on with the same bits on CPUs with one or two
ranks, else up to rounding. Random numbers that loading processes draw (--workers) are
different after a resume.
"""

import argparse
import contextlib
import datetime
import fcntl
import json
import math
import multiprocessing
import multiprocessing.resource_tracker
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

with contextlib.suppress(ImportError):
    # DDP imports this module. If that is while there is a process group, threads of the
    # group live on, and may crash the exit (pytorch issue 190489). So import it now.
    import torch.distributed.nn

# ---- MODEL: replace it ---------------------------------------------------------------
# {option: (default, help)}. A default is a word or a number, and not True or False; the
# numbers must be above 0. A resumed run must have the same values as its checkpoint.
MODEL_OPTIONS = {
    "layers": (2, "transformer blocks"),
    "heads": (4, "attention heads"),
    "dim": (128, "width of the model"),
    "seq_len": (128, "bytes per sample"),
}


class Block(nn.Module):
    """One transformer block: attention to the bytes before, then a small network."""

    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 4 * dim)
        self.narrow = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch_size, seq_len, dim = x.shape
        qkv = self.query_key_value(self.norm1(x))
        qkv = qkv.view(batch_size, seq_len, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, dim / heads)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(batch_size, seq_len, dim)
        x = x + self.dropout(self.project(y))
        y = self.narrow(nn.functional.gelu(self.widen(self.norm2(x))))
        return x + self.dropout(y)


class ByteTransformer(nn.Module):
    """(batch, time) bytes -> (batch, time, 256) logits of the next byte."""

    def __init__(self, layers, heads, dim, seq_len, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.position = nn.Embedding(seq_len, dim)
        # torch's own initial embeddings have a standard deviation of 1: too large here.
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.Sequential()
        for _ in range(layers):
            self.blocks.append(Block(dim, heads, dropout))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256)

    def forward(self, x):
        x = self.embed(x.long()) + self.position.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def build_model(args):
    if args.dim % args.heads != 0:
        sys.exit(f"--dim {args.dim} is not divisible by --heads {args.heads}")
    shape = args.layers, args.heads, args.dim, args.seq_len
    return ByteTransformer(*shape, args.dropout)


def build_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr, fused=True)


def compute_loss(model, batch):
    """The mean over the samples of the batch. Training minimizes it.

    The batches of all ranks weigh the same. So a mean over tokens is right only if all
    samples have the same length, as here. The model may be wrapped in DDP: only call
    it, model(...), and no other method of it.
    """
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten().long())


def score(model, batch):
    """Sums over the samples, and "count", their number: evaluate() divides by it."""
    x, _ = batch
    loss_sum = compute_loss(model, batch) * len(x)
    bits = loss_sum / math.log(2)
    return {"val_loss": loss_sum, "bits_per_byte": bits, "count": len(x)}


# ---- DATA: replace it ----------------------------------------------------------------
class ByteWindows(Dataset):
    """Sample i is seq_len bytes of a file, and the same bytes shifted by one."""

    def __init__(self, path, seq_len):
        self.path = path  # loading processes get a copy of this object, not of the data
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
    """Training set, held-out set (the last 5 %), and a text that identifies the data.

    The ranks compare this text, and so does a resumed run. All ranks call this at the
    same time: so download the data before the run, not here.
    """
    # Without --data: the help texts that come with Python.
    path = args.data or Path(os.__file__).parent / "pydoc_data/topics.py"
    try:
        with open(path, "rb") as file:
            # It is quick, since it reads only 64 MiB. It misses changes behind them.
            checksum = zlib.crc32(file.read(64 * 2**20))
    except OSError as error:
        sys.exit(f"no data: {error}: give a file with --data")
    windows = ByteWindows(path, args.seq_len)
    n = len(windows)
    if n < 2:
        sys.exit(f"--data {path}: {os.path.getsize(path)} bytes are too few")
    held_out = max(1, n // 20)
    train_set = Subset(windows, range(n - held_out))
    val_set = Subset(windows, range(n - held_out, n))
    return train_set, val_set, f"CRC-32 {checksum:08x}"


# ---- THE RUN -------------------------------------------------------------------------
def train(args, world):
    """The whole run. All ranks call it."""
    # ---- Set up
    # DDP: else a random split in load_data() would differ between the ranks.
    seed_all("data", args.seed)
    train_set, val_set, data_text = load_data(args)
    stop = StopSignal(world)  # not before: a Pool in load_data() would inherit it
    n = len(train_set)
    data_text = f"{n} samples, {len(val_set)} held out, {data_text}"
    settings = settings_of(args, world, data_text)
    check_alike(settings)  # DDP: else ranks that differ hang, or train nonsense
    step_samples = args.batch_size * args.accum * world.size
    if n < step_samples:
        sys.exit(f"{n} samples are less than one step of {step_samples}")
    loader = train_loader(train_set, args.batch_size, world, args.seed, args.workers)
    val_loader = eval_loader(val_set, args.batch_size, world, args.workers)
    seed_all("weights", args.seed)
    model = build_model(args).to(world.device)  # evaluate and save this one
    if not model.training:
        sys.exit("build_model() returns a model in eval mode: call its train()")
    # The same weights: train this one. Bucket views: the gradients lie in the buffers
    # that DDP sends, which saves memory. If you want to keep one, clone() it.
    wrapped = wrap(model, world, args.compile, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, args)
    bf16 = args.precision == "bf16"
    autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=bf16)

    # ---- Resume
    parts = {"model": model, "optimizer": optimizer}
    must_match = {name: getattr(args, name) for name in ["seed", *MODEL_OPTIONS]}
    must_match["the data"] = data_text
    checkpoint = Checkpoint(args.out, parts, must_match, world)
    log = Log(args.out, world)
    fresh_groups = [dict(group) for group in optimizer.param_groups]
    state = checkpoint.resume()
    # The options of the optimizer are those of this start, not of the checkpoint. (Not
    # good for one that keeps a state among them, such as Prodigy.)
    for group, fresh in zip(optimizer.param_groups, fresh_groups, strict=True):
        group.update(fresh)
    for name, before in state.get("settings", {}).items():
        now = settings.get(name)
        if now != before:
            log.say(f"{name} is {now}, in the checkpoint it was {before}")
    step = state.get("step", 0)  # optimizer steps that are done
    # The place in the data, counted in samples of all ranks together. An epoch has n of
    # them: so place // n epochs are done, and place % n samples of the next one.
    place = state.get("place", 0)
    epoch, done = divmod(place, n)
    steps_left = (n - done) // step_samples
    steps_left += (args.epochs - epoch - 1) * (n // step_samples)
    last_step = step + max(0, steps_left)
    if args.max_steps is not None:
        last_step = max(step, min(last_step, args.max_steps))
    host = socket.gethostname()
    log.say(f"ranks: {world.size}, {world.device.type}, {args.precision}, host {host}")
    left_over = n % step_samples
    log.say(f"an epoch: {n} samples, {step_samples} a step, {left_over} left over")
    log.say(f"from step {step} to {last_step}")

    def evaluate_now():
        means = evaluate(model, score, val_loader, world, autocast)
        if means:  # else there is no held-out set
            log.write(step, **means)

    if step > 0 and (state["to_evaluate"] or step == last_step):
        evaluate_now()  # the run may have ended between a save and its evaluation

    # ---- Train
    batches = None
    results = []  # of the steps since the last log line: they stay on the device
    while step < last_step:
        epoch, done = divmod(place, n)
        if n - done < step_samples:  # no whole step is left in this epoch
            epoch, done = epoch + 1, 0
            place = epoch * n
        if batches is None or done == 0:
            # DDP: else every epoch has the same order.
            loader.sampler.set_epoch(epoch, done)
            # Loading processes get seeds from it when they start: others in a resume.
            loader.generator.manual_seed(seed_of("load", args.seed, place, world.rank))
            batches = iter(loader)
        if not results:
            began = time.perf_counter()
        # DDP: without the rank all ranks would draw the same dropout. With the step, a
        # resumed run draws what it would have drawn: no state of a generator is saved.
        seed_all("step", args.seed, step, world.rank)
        factor = lr_factor(args, (place + step_samples / 2) / n)  # of the step's middle
        for group, fresh in zip(optimizer.param_groups, fresh_groups, strict=True):
            group["lr"] = fresh["lr"] * factor  # a group may have its own rate
        results.append(train_step(wrapped, batches, optimizer, autocast, args, world))
        step += 1
        place += step_samples

        left = n - done - step_samples  # samples that this epoch still has
        epoch_ended = left < step_samples
        to_evaluate = epoch_ended or step == last_step or is_due(step, args.eval_every)
        # DDP: all ranks get the same answer. Else one would stop, and the others would
        # wait for it.
        stopped_by = stop.requested()
        saving = stopped_by or to_evaluate or is_due(step, args.save_every)
        # A step with a save logs, too: what is wrong must be found before it is saved.
        # In other steps the CPU does not wait for the GPU.
        if saving or is_due(step, args.log_every):
            means = mean_over_steps(results)
            check_averaged(means["grad_norm"])
            means = mean_over_ranks(means, world)
            if not all(math.isfinite(mean) for mean in means.values()):
                sys.exit(f"not finite by step {step}, not saved: try a lower --lr")
            seconds = (time.perf_counter() - began) / len(results)
            speed = {"samples_per_s": step_samples / seconds}
            speed["seconds_left"] = round(seconds * (last_step - step))
            lr = float(optimizer.param_groups[0]["lr"])
            log.write(step, **means, lr=lr, **speed)
            results = []
        if saving:
            values = {"place": place, "to_evaluate": to_evaluate, "settings": settings}
            checkpoint.save(step, **values)
        if stopped_by and step < last_step:
            log.say(f"stopped by signal {stopped_by}, saved at step {step}")
            sys.exit(0)  # it ends a search, too. The exit code: see distributed()
        if to_evaluate:
            evaluate_now()
    world.stopped_by = 0  # the run is done: a signal in the last step changes nothing
    log.say(f"done: step {step}, saved in {checkpoint.path}")


def wrap(model, world, compiled=False, **options):
    """The model as it is to be trained. A process alone has no DDP. All ranks call it.

    options: those of DistributedDataParallel, such as find_unused_parameters.
    """
    if world.size > 1:
        # DDP: it matches weights and buffers by their order, not by their names. If a
        # model is built from a set, or from a list of files, the order may differ.
        tensors = [*model.named_parameters(), *model.named_buffers()]
        check_alike(names_and_shapes("tensor", tensors))
        # DDP: it copies the weights of rank 0 to all ranks, and averages the gradients.
        # Else each rank trains a model of its own.
        model = DistributedDataParallel(model, **options)
    return torch.compile(model) if compiled else model


def train_step(wrapped, batches, optimizer, autocast, args, world):
    """One optimizer step with args.accum batches. All ranks call it.

    Returns {name: tensor on the device}, one number each, for the log. grad_norm is
    that before clipping.
    """
    loss_sum = 0.0
    for i in range(args.accum):
        batch = to_device(next(batches), world.device)
        context = contextlib.nullcontext()
        if i < args.accum - 1 and world.size > 1:
            # DDP: no averaging yet: the gradients of the batches add up on this rank.
            # The last backward() averages the sums. To average in each would be slower.
            context = wrapped.no_sync()  # a compiled DDP has it, too
        with context:
            with autocast:
                loss = compute_loss(wrapped, batch)
            # DDP: the last backward() averages the gradients over the ranks. All have
            # as many samples, so it is the mean over all samples of the step.
            (loss / args.accum).backward()
        loss_sum += loss.detach().float()
    grad_norm = nn.utils.clip_grad_norm_(wrapped.parameters(), args.grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    wrapped.zero_grad()  # also of weights that the optimizer does not have
    return {"loss": loss_sum / args.accum, "grad_norm": grad_norm}


def mean_over_steps(results):
    """{name: mean} of what train_step() has returned, on this rank."""
    columns = {name: [result[name] for result in results] for name in results[0]}
    means = torch.stack([torch.stack(c).float().mean() for c in columns.values()])
    # The CPU waits for the GPU here.
    return dict(zip(columns, means.tolist(), strict=True))


def mean_over_ranks(means, world):
    """The same {name: mean} on all ranks. All ranks call it."""
    names = sorted(means)  # a rank may have them in another order
    check_alike({"the names of the means": names})
    total = torch.tensor([means[name] for name in names], dtype=torch.float64)
    # DDP: the sum over all ranks. Else the log has the loss of rank 0 alone.
    dist.all_reduce(total)
    totals = dict(zip(names, total.tolist(), strict=True))
    return {name: totals[name] / world.size for name in means}


@torch.no_grad()
def evaluate(model, score_fn, loader, world, autocast=None):
    """The sums of score_fn(model, batch) over all batches, divided by that of "count".

    All ranks call it, and get the same {name: mean}, for any number of ranks. Give it
    an eval_loader(), and the model itself: as a rank may have one batch less than
    another, DDP might wait for ever.
    """
    if world.size > 1:
        # DDP: the running means of batch norm are those of the rank's own samples. Rank
        # 0 saves its own. Without this the others would evaluate another model.
        # What is not saved is a cache, which a rank may have extended. state_dict() may
        # have other names (with activation checkpointing), so look for the objects.
        saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        buffers = [named for named in model.named_buffers() if id(named[1]) in saved]
        weights = list(model.named_parameters())
        check_alike(names_and_shapes("tensor", weights + buffers))
        compare_weights([w for _, w in weights])  # not an EMA of rank 0 alone
        for _, buffer in buffers:
            sent = buffer.contiguous()  # NCCL takes no other
            dist.broadcast(sent, src=0)
            buffer.copy_(sent)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    results = []
    try:
        for batch in loader:
            with autocast or contextlib.nullcontext():
                results.append(score_fn(model, to_device(batch, world.device)))
    finally:
        for module, was_training in modes:  # a frozen layer stays in eval mode
            module.train(was_training)
    mine = []
    for sums in results:  # only now: so the CPU did not wait for the GPU at each batch
        mine += [(name, float(value)) for name, value in sums.items()]
    values = {}
    # DDP: the batches of all ranks. Else each rank has another result.
    for of_rank in all_gather(mine):
        for name, value in of_rank:
            values.setdefault(name, []).append(value)
    # fsum() is exact, so the order does not matter.
    totals = {name: math.fsum(of_batches) for name, of_batches in values.items()}
    count = totals.pop("count", 0)
    return {name: total / count for name, total in totals.items()}


def lr_factor(args, epochs_done):
    """The share of the learning rate: a linear rise to 1, then a cosine down to 0.

    It follows the share of --epochs that is done, so it does not depend on --max_steps.
    """
    progress = epochs_done / args.epochs
    if progress < args.warmup:
        return progress / args.warmup
    after_warmup = (progress - args.warmup) / (1 - args.warmup)
    return (1 + math.cos(math.pi * after_warmup)) / 2


def is_due(step, every):
    return every is not None and step % every == 0


# ---- BATCHES -------------------------------------------------------------------------
class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can begin in mid-epoch, on any number of ranks.

    Seed and epoch decide the order, and the ranks take turns in it: of 2 ranks, rank 0
    takes the places 0, 2, 4 and so on, rank 1 takes 1, 3, 5. So what all ranks together
    have done is always the beginning of the order.
    """

    start = 0  # how many samples of the epoch are done, by all ranks together

    def set_epoch(self, epoch, start=0):
        super().set_epoch(epoch)
        self.start = start

    def __len__(self):
        return (len(self.dataset) - self.start) // self.num_replicas

    def __iter__(self):
        seed = seed_of("order", self.seed, self.epoch)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.dataset), generator=generator)
        # DDP: each rank takes its own samples, and as many as the others. Else they
        # repeat each other's work, or wait for a rank that has no batch left.
        mine = order[self.start + self.rank :: self.num_replicas]
        return iter(mine[: len(self)].tolist())


def train_loader(dataset, batch_size, world, seed, workers=0, **options):
    """This rank's share of an epoch, in full batches, as many as on the other ranks.

    All ranks call it, with the same seed. Before each epoch call
    loader.sampler.set_epoch(epoch). What is left over is less than a batch for each
    rank. It is left out: the next epoch shuffles all samples anew.
    workers: how many processes load for this rank; with 0 it loads by itself.
    options: others of DataLoader, such as collate_fn.
    """
    n = len(dataset)
    if world.size > 1:
        # DDP: else the ranks read some samples twice, and others never.
        check_alike({"samples": n, "batch size": batch_size, "seed of the order": seed})
    if n < batch_size * world.size:
        sys.exit(f"{n} samples are less than {world.size} batches of {batch_size}")
    return Loader(  # a DataLoader, see ENDINGS
        dataset,
        batch_size,
        shuffle=None,  # the sampler does
        sampler=ResumableSampler(dataset, world.size, world.rank, seed=seed),
        drop_last=True,
        num_workers=workers,
        # Loading processes get their seeds from it. Else they would come from torch's
        # own generator, and change the random numbers of the model. train() seeds it
        # anew.
        generator=torch.Generator().manual_seed(seed_of("load", seed, world.rank)),
        **(loading_options(world, workers) | options),
    )


def eval_loader(dataset, batch_size, world, workers=0, **options):
    """This rank's share of the batches, for evaluate(). The ranks take turns in them.

    So the batches are the same for any number of ranks. The last one may be smaller,
    and a rank may have one batch less than another, or none. All ranks call it.
    """
    n = len(dataset)
    if world.size > 1:
        check_alike({"held-out samples": n, "batch size": batch_size})
    batches = [range(i, min(i + batch_size, n)) for i in range(0, n, batch_size)]
    # DDP: each rank evaluates its own batches. Else all would do the same work.
    mine = batches[world.rank :: world.size]
    options = loading_options(world, workers) | options
    return Loader(dataset, batch_sampler=mine, num_workers=workers, **options)


def loading_options(world, workers):
    options = {"pin_memory": world.device.type == "cuda"}
    if workers > 0:
        options["persistent_workers"] = True
        # The usual "fork" may deadlock with NCCL, says the documentation of DDP.
        options["multiprocessing_context"] = "spawn"
        options["worker_init_fn"] = end_without_rank
    return options


def seed_of(use, *numbers):
    """One seed from a word and whole numbers, such as seed_of("order", seed, epoch).

    So two uses of the same numbers have different seeds.
    """
    text = " ".join([use, *[f"{number:d}" for number in numbers]])
    return zlib.crc32(text.encode())


def seed_all(use, *numbers):
    """Seed torch with its GPUs, numpy and random: see seed_of()."""
    seed = seed_of(use, *numbers)
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def to_device(batch, device):
    """Tensors, also in tuples, lists and dicts. A plain tuple becomes a list."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):  # such as a batch of another library
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*[to_device(value, device) for value in batch])
    if isinstance(batch, (tuple, list)):
        return [to_device(value, device) for value in batch]
    return batch


# ---- RANKS ---------------------------------------------------------------------------
@dataclass
class World:
    """Which process this is (0 <= rank < size), and where its tensors are."""

    rank: int
    size: int
    device: torch.device
    received: int = 0  # the signal that this rank has got: see ENDINGS
    stopped_by: int = 0  # the signal that has stopped the run, on all ranks
    parent: int = field(default_factory=os.getppid)  # torchrun, if it started this rank


has_joined = False  # this process was launched as a rank, and has joined the group


def init_distributed(device="auto", timeout=600):
    """Join the process group. All ranks call it. timeout: seconds to wait for others.

    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without
    them this process is alone, in a group of one: its collectives return at once.
    """
    global has_joined
    launched = "RANK" in os.environ
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ["WORLD_SIZE"]) if launched else 1
    if has_joined:
        # A second group would meet at the same address, where the first one may still
        # answer: a hang.
        sys.exit("a rank can enter distributed() once: put all of the work inside")
    has_joined = launched
    device = choose_device(device, size)
    # What carries tensors between the ranks: gloo those on CPUs, NCCL those on GPUs.
    # gloo is there in any case: the stop signal must not wait for a busy GPU.
    backend = "gloo"
    if device.type != "cpu" and size > 1:
        backend = dist.get_default_backend_for_device(device.type)
        backend = f"cpu:gloo,{device.type}:{backend}"
    # DDP: the ranks meet here. Without it each is alone.
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=size,
        store=None if launched else dist.HashStore(),  # alone: no address is needed
        timeout=datetime.timedelta(seconds=timeout),
    )
    return World(rank, size, device)


def choose_device(name, size):
    """ "auto" is the GPU; without one the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch finds no GPU here")
    if name == "cpu" or accelerator is None:
        return torch.device("cpu")
    if accelerator.type == "mps" and size > 1:
        return torch.device("cpu")  # the ranks cannot share the GPU of a Mac
    # DDP: rank i of a machine (its local rank) takes GPU i. Else all take GPU 0.
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.accelerator.device_count()
    if local_rank >= gpus:
        # Slurm may show each process one GPU alone: then set LOCAL_RANK=0 for all.
        sys.exit(f"local rank {local_rank}, but {gpus} GPUs: start fewer processes")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def all_gather(value):
    """[value of rank 0, value of rank 1, ...], by way of the CPU. All ranks call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_alike(settings):
    """End all ranks if their {name: value} differ: they would hang, or train nonsense.

    All ranks call it.
    """
    if not dist.is_initialized():
        return  # a test of a loader, without ranks
    everyone = all_gather((socket.gethostname(), settings))
    host0, settings0 = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        for name in settings0 | other:
            value0, value = settings0.get(name), other.get(name)
            if value != value0:
                here = f"{value!s:.200} on rank {rank} ({host})"
                sys.exit(f"{name} is {here}, but {value0!s:.200} on rank 0 ({host0})")


def names_and_shapes(what, named_tensors):
    """{place: name and shape}, for check_alike()."""
    numbered = enumerate(named_tensors)
    return {f"{what} {i}": f"{name} {tuple(t.shape)}" for i, (name, t) in numbered}


def check_averaged(grad_norm):
    """End all ranks if their gradients differ: some step was not averaged by DDP.

    All ranks call it, with the norm of all gradients after backward(), or with its mean
    over some steps. With DDP all ranks have the same bits. (GPUs of different types may
    round differently.)
    """
    norms = all_gather(float(grad_norm))
    if max(norms) > 1.00001 * min(norms):
        sys.exit(f"not averaged by DDP: the ranks have gradients of the norms {norms}")


def weights_of(optimizer):
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def check_same_weights(optimizer):
    """End all ranks if their weights differ, or trained ones are not finite.

    All ranks call it. DDP keeps the weights equal, but not if a rank skips a step, or
    has another learning rate. Returns their norms and sums: see compare_weights().
    """
    weights = weights_of(optimizer)
    norms_and_sums = compare_weights(weights)
    trained = [weight.requires_grad for weight in weights]
    trained = torch.tensor(trained, dtype=torch.bool)
    if not norms_and_sums[..., trained].isfinite().all():
        sys.exit("a weight is not finite, not saved: try a lower --lr")
    return norms_and_sums


def compare_weights(weights):
    """End all ranks if they have other norms or sums of the weights. All ranks call it.

    Returns them: shape (ranks, 2, weights). Rounding may differ between machines.
    """
    norms = [weight.detach().float().norm() for weight in weights]
    sums = [weight.detach().float().sum() for weight in weights]
    mine = [[float(norm) for norm in norms], [float(total) for total in sums]]
    everyone = torch.tensor(all_gather(mine), dtype=torch.float64)
    finite = everyone.nan_to_num(1e300)  # a mask of -inf is equal to itself
    norms0, sums0 = finite[0]
    # A sum rounds more than a norm does.
    limits = torch.stack([1e-5 * norms0, 1e-4 * norms0 + 1e-5 * sums0.abs()])
    if ((finite - finite[0]).abs() > limits).any():
        sys.exit("the ranks have different weights: did one of them change its own?")
    return everyone


# ---- CHECKPOINT ----------------------------------------------------------------------
class Checkpoint:
    """checkpoint.pt in a folder, to resume from. All ranks construct it.

    parts: {name: anything with state_dict() and load_state_dict()}. Rank 0's are saved.
    must_match: {name: value}. The ranks, and a checkpoint, must have the same.

    The names of the weights of each optimizer must match, too, in their order: it knows
    a weight by its place alone. They are weights of modules among the parts: else they
    would not be saved. Each Checkpoint has its own folder.
    """

    def __init__(self, folder, parts, must_match, world):
        self.path = Path(folder) / "checkpoint.pt"
        self.parts = parts
        self.must_match = must_match
        self.world = world
        self.saved_at_stop = ""  # the values and the weights, as a text
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if world.rank == 0:
                # It is locked until this object is freed, or distributed() ends.
                self.lock_file = lock(self.path.with_name(".lock"))
        except OSError as error:
            sys.exit(f"the folder {folder}: {error}")

    def all_that_must_match(self):
        """must_match, and the weights of each optimizer. All ranks call it."""
        names = {}
        for part_name, part in self.parts.items():
            if isinstance(part, nn.Module):
                for name, weight in part.state_dict(keep_vars=True).items():
                    names[id(weight)] = f"{part_name}.{name}"
        must_match = dict(self.must_match)
        for part_name, part in self.parts.items():
            if not hasattr(part, "param_groups"):
                continue
            weights = weights_of(part)
            if any(w.requires_grad and id(w) not in names for w in weights):
                what = f"{part_name} has a weight that is in no module of the parts"
                sys.exit(f"{what}: add its module, or make it an nn.Parameter of one")
            named = [(names.get(id(weight), "frozen"), weight) for weight in weights]
            must_match |= names_and_shapes(f"{part_name} weight", named)
        return must_match

    def save(self, step, **values):
        """Write all parts, and values that are plain Python. All ranks call it.

        It ends the run if the ranks differ in the values, in the weights of an
        optimizer, or in a part such as a scheduler; if a weight is not finite; and if a
        run goes on after a stop.
        """
        values = dict(values, step=step)
        # The state_dict() of a part may need all ranks.
        states = {name: part.state_dict() for name, part in self.parts.items()}
        to_compare = dict(values)
        for name, part in self.parts.items():
            if not isinstance(part, nn.Module) and not hasattr(part, "param_groups"):
                to_compare[name] = states[name]  # a scheduler, a generator, a meter
        texts = {}
        for name, value in to_compare.items():
            if isinstance(value, torch.Tensor):
                value = value.tolist()  # repr() shows only the ends of a long tensor
            # For a tensor in a list it names the GPU, and each rank has another one.
            text = repr(value).replace(str(self.world.device), "")
            texts[f"{name} (all_gather() it before save())"] = text
        # DDP: rank 0 saves what it has, and all ranks load that. Else a sum over the
        # samples of another rank would be lost.
        check_alike(texts)
        fingerprint = repr(values)
        for part in self.parts.values():
            if hasattr(part, "param_groups"):  # an optimizer, or one made of several
                fingerprint += repr(check_same_weights(part).tolist())
        # The same may be saved again, such as after scheduler.step().
        if self.saved_at_stop not in ("", fingerprint):
            sys.exit("the run goes on after the save of a stop: call sys.exit(0)")
        must_match = self.all_that_must_match()
        content = dict(  # it raises an error if a name comes twice
            must_match=must_match,
            time=time.time(),  # two nodes may have files of the same step
            **states,
            **values,
        )
        # DDP: one rank writes. Else all would write into one file.
        if self.world.rank == 0:
            write_whole(self.path, content)
        if self.world.size > 1:
            all_gather("saved")  # a rank that ends early may break the save of others
        if self.world.stopped_by:
            self.saved_at_stop = fingerprint

    def resume(self):
        """Load the checkpoint with the most steps that any rank has. All ranks call it.

        Returns its plain values, or {} if there is none.
        """
        must_match = self.all_that_must_match()
        check_alike(must_match)
        content = self.read()
        found = all_gather((content.get("step", -1), content.get("time", 0)))
        best = max(found)
        if best[0] == -1:
            return {}
        if min(found) < best:
            # Without a shared disk the nodes have different files, or none. One rank
            # that has the best one sends it to all.
            box = [content]
            dist.broadcast_object_list(box, src=found.index(best))
            content = box[0]
        for name in must_match | content["must_match"]:
            value, old = must_match.get(name), content["must_match"].get(name)
            if old != value:
                where = f"{self.path} has {name} {old}, not {value}"
                sys.exit(f"{where}: take another folder")
        try:
            for name, part in self.parts.items():
                part.load_state_dict(content.pop(name))
        except (KeyError, RuntimeError, ValueError) as error:
            sys.exit(f"{self.path} cannot be loaded into this model: {error!r:.300}")
        return content

    def read(self):
        if not self.path.exists():
            return {}
        try:
            # torch.load() does not compare the checksums in the file, so we do.
            with zipfile.ZipFile(self.path) as archive:
                if archive.testzip():
                    raise ValueError("a checksum is wrong")
            # mmap: not all of it is in memory. A later save makes another file, and
            # does not write into this one.
            content = torch.load(self.path, "cpu", weights_only=True, mmap=True)
            if not {"step", "time", "must_match"} <= set(content):
                raise ValueError("another program has written it")
            return content
        except Exception as error:  # zipfile, pickle and torch raise all kinds
            sys.exit(f"{self.path} cannot be loaded: {error!r:.200}")


def write_whole(path, content):
    """torch.save(), but at any moment there is a whole file: the old one or the new.

    The new file is written beside the old one. It gets its name when all bytes are on
    the disk, and when it is sure that torch.load() will take it.
    """
    beside = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # if it was removed meanwhile
        with open(beside, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        # torch.load() takes only tensors and plain Python. A number of numpy, for
        # example, must fail now, and not in the resume.
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(beside)
        if refused:
            raise RuntimeError(f"torch.load() would refuse {refused}")
        os.replace(beside, path)
    except Exception as error:  # a full disk, or a value that cannot be saved
        beside.unlink(missing_ok=True)
        sys.exit(f"cannot save {path} (the old one is intact): {error!r:.300}")


lock_files = weakref.WeakSet()  # those of the Checkpoints that still live


def lock(path):
    """An open file that nobody else has locked, or SystemExit."""
    file = open(path, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        sys.exit(f"{path.parent} is in use by another run, or another Checkpoint")
    except OSError as error:  # some network disks have no locks
        print(f"warning: {path} cannot be locked: {error}", file=sys.stderr)
    lock_files.add(file)
    return file


def unlock_all():
    for file in list(lock_files):
        file.close()


# A forked process must not hold the locks when this one has ended.
os.register_at_fork(after_in_child=unlock_all)


# ---- LOG -----------------------------------------------------------------------------
class Log:
    """Lines on the terminal, and in metrics.jsonl, of rank 0 alone."""

    def __init__(self, folder, world):
        self.path = Path(folder) / "metrics.jsonl"
        self.is_on = world.rank == 0

    def write(self, step, **values):
        """values: {name: number}.

        A run that was killed repeats some steps: the last values of a step count.
        """
        if not self.is_on:
            return
        # To use another logger, call it here.
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:  # a full disk: training goes on
            self.say(f"cannot write {self.path}: {error}")
        numbers = [f"{name} {value:.5g}" for name, value in values.items()]
        self.say("  ".join([f"step {step}", *numbers]))

    def say(self, line):
        if self.is_on and sys.stdout is not None:
            # Ctrl-C at `... | tee log` ends tee, too. Then this fails. But the run must
            # go on until it has saved.
            with contextlib.suppress(OSError):
                os.write(1, f"{line}\n".encode())


# ---- OPTIONS -------------------------------------------------------------------------
# The ranks must have the same values of all options but these, and the same type of
# device.
MAY_DIFFER_BETWEEN_RANKS = "data out device workers local_rank".split()
MUST_BE_POSITIVE = "epochs max_steps batch_size accum lr grad_clip".split()
MUST_BE_POSITIVE += "log_every eval_every save_every timeout".split()


def settings_of(args, world, data_text):
    """{name: text} of what all ranks must have alike.

    A resumed run says which of them have changed since the checkpoint.
    """
    settings = {"the data": data_text, "the device": world.device.type}
    settings["torch"] = str(torch.__version__)
    settings["the program"] = str(zlib.crc32(Path(__file__).read_bytes()))
    for name, value in vars(args).items():
        if name not in MAY_DIFFER_BETWEEN_RANKS:
            settings[f"--{name}"] = str(value)
    return settings


def parse_args(argv=None):
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(formatter_class=formatter)
    add = parser.add_argument
    add("--data", metavar="FILE", help="bytes to learn; else a file of Python's own")
    for name, (default, text) in MODEL_OPTIONS.items():
        add(f"--{name}", type=type(default), default=default, help=text)
    add("--dropout", type=float, default=0.0, help="dropout probability")
    add("--out", default="out", help="folder of the checkpoint; resumes there")
    add("--epochs", type=int, default=3, help="passes over the data")
    add("--max_steps", type=int, help="end sooner; --lr follows --epochs")
    add("--batch_size", type=int, default=32, help="samples of a rank's batch")
    add("--accum", type=int, default=1, help="batches per optimizer step")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--warmup", type=float, default=0.05, help="share of the run with rising rate")
    add("--grad_clip", type=float, default=1.0, help="1e9: no clipping")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--workers", type=int, default=0, help="loading processes per rank")
    add("--seed", type=int, default=0, help="of data, weights, order, dropout")
    add("--log_every", type=int, default=20, help="steps")
    add("--eval_every", type=int, help="steps; also after each epoch")
    add("--save_every", type=int, default=100, help="steps; also at each evaluation")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    add("--timeout", type=int, default=600, help="seconds to wait for a rank")
    # The old launcher, torch.distributed.launch, passes this. It is not used.
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in [*MODEL_OPTIONS, *MUST_BE_POSITIVE]:
        value = getattr(args, name)
        if isinstance(value, (int, float)) and not 0 < value < math.inf:
            parser.error(f"argument --{name}: {value} is not above 0")
    for name in ("dropout", "warmup"):
        if not 0 <= getattr(args, name) < 1:
            parser.error(f"argument --{name}: not from 0 to below 1")
    if args.workers < 0:
        parser.error(f"argument --workers: {args.workers} is below 0")
    return args


# ---- ENDINGS: how the ranks stop, fail and leave together. Skip this at first. -------
@contextlib.contextmanager
def distributed(device="auto", timeout=600):
    """`with distributed() as world:` around all that the ranks do together.

    They leave the block together; sys.exit(0) on all ranks is orderly, too. One of
    several ranks that fails ends at once, and no exit hook runs: an ordinary exit may
    wait for the other ranks, and these wait for it. torchrun then ends them.

    Exit code: 0 done, 1 failed, 2 refused by argparse, 128 + N stopped by signal N.
    Under torchrun a rank that was stopped ends with 0, like one that is done: after
    another code torchrun may start the ranks again. The last line tells which it was.
    """
    handlers = {number: signal.getsignal(number) for number in StopSignal.NUMBERS}
    others = multiprocessing.active_children()  # processes of the user
    world = init_distributed(device, timeout)
    try:
        yield world
        all_gather("done")  # a rank that leaves early may break a collective of others
    except BaseException as error:
        has_failed = not isinstance(error, SystemExit) or error.code
        if has_failed and world.size > 1:
            end_this_rank(world, error)
        if has_failed or not world.stopped_by:
            raise
    finally:
        kill_loading_processes(others)
        unlock_all()  # in a notebook an error may keep a Checkpoint alive
        # Give gloo's threads the time to end. They need Python's lock (GIL) for it. A
        # DDP object that is freed before holds that lock and waits for them: a hang.
        # See pytorch issue 56297, and test_ddp_may_outlive_the_block.
        time.sleep(0.1)
        # DDP: without it NCCL complains, and the exit may hang.
        dist.destroy_process_group()
        with contextlib.suppress(ValueError):  # a thread cannot set any
            for number, handler in handlers.items():
                if handler is not None:  # else Python has not set it, and cannot now
                    signal.signal(number, handler)
    if torchrun_is_gone(world):
        # torch may have started this rank from a launcher in Python: after the code 0
        # the rank would wait for that launcher.
        sys.exit(128 + signal.SIGTERM)
    if world.stopped_by:
        code = 128 + world.stopped_by
        if dist.is_torchelastic_launched():  # that is torchrun
            code = 0
        sys.exit(code)


def end_this_rank(world, error):
    """It does not return."""
    try:
        reason = traceback.format_exc()
        if isinstance(error, SystemExit):  # of sys.exit("text"): one line is enough
            reason = error.code
        kill_loading_processes()
        with contextlib.suppress(Exception):  # a full disk must not hide the reason
            ErrorHandler().record_exception(error)  # for the summary of torchrun
        with contextlib.suppress(Exception):  # nobody reads it any more
            text = f"error: rank {world.rank}: {reason}\n"
            # With its own end of line print() would write twice under torchrun, and the
            # lines of two ranks would mix.
            print(text, end="", file=sys.stderr, flush=True)
            sys.stdout.flush()
        # The others fail as soon as this rank is gone. torchrun names who failed first,
        # but counts whole seconds: so stay for more than one. See
        # test_torchrun_names_the_rank_that_failed_first.
        time.sleep(1.1)
    finally:
        os._exit(1)


class StopSignal:
    """Whether any rank has got a signal to stop: Ctrl-C is SIGINT.

    All ranks call it after each step, and get the same answer: so they stop at the same
    step. A stop during an evaluation waits for its end, and for one step more.
    torchrun hands on all of these but SIGUSR1, and kills the ranks after 30 s: see its
    --signals-to-handle and --shutdown-timeout.
    """

    NUMBERS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1

    def __init__(self, world):
        self.world = world
        for number in self.NUMBERS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.remember)

    def remember(self, number, frame):
        self.world.received = number
        if sys.stderr is not None:
            text = f"signal {number}: after this step the run saves and ends"
            text += f" (kill -9 {os.getpid()} ends it at once)\n"
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.write(2, text.encode())

    def requested(self):
        """The number of the signal, or 0. All ranks call it."""
        if torchrun_is_gone(self.world):
            self.world.received = signal.SIGTERM
        flag = torch.tensor(int(self.world.received))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        self.world.stopped_by = flag.item()
        return self.world.stopped_by


def torchrun_is_gone(world):
    """It was killed: nobody would look after this rank."""
    return dist.is_torchelastic_launched() and os.getppid() != world.parent


class Loader(DataLoader):
    """A DataLoader whose loading processes never get a signal to stop.

    torchrun and Ctrl-C send it to all processes. The loading processes must live until
    the rank has saved, so they start with these signals blocked, and it stays so.
    """

    def __iter__(self):
        if self.num_workers == 0:
            return super().__iter__()
        # Before its first process Python starts a helper, which unblocks the signals.
        # So start it now, before we block them.
        multiprocessing.resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, StopSignal.NUMBERS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_without_rank(worker):
    """A loading process calls it first. It ends when its rank was killed.

    torch looks for the rank only now and then, and not at all in a busy data set.
    """

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def kill_loading_processes(others=()):
    """Python would end them with SIGTERM, which is blocked. others live on."""
    # torch watches them, and would raise an error because they were killed.
    with contextlib.suppress(ValueError):  # a thread cannot set it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        # All of a DataLoader are daemons: Python ends these, too. Not those of a Pool:
        # one that is killed may hold a lock, and the Pool would wait for it for ever.
        of_pool = "PoolWorker" in process.name
        if process.daemon and not of_pool and process not in others:
            process.kill()


# ---- MAIN ----------------------------------------------------------------------------
def main(argv=None):
    args = parse_args(argv)
    with distributed(args.device, args.timeout) as world:
        train(args, world)


if __name__ == "__main__":
    main()
