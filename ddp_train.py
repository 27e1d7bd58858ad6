# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "numpy"]  # torch needs numpy to send objects
# ///
"""Data-parallel training in PyTorch, in one file.

    python ddp_train.py                                     one process, CPU or GPU
    torchrun --standalone --nproc_per_node=4 ddp_train.py   four GPUs of one machine
    torchrun --nnodes=2 --node_rank=R --nproc_per_node=4 --master_addr=HOST ddp_train.py
        two machines with four GPUs each; R is 0 on the machine HOST, 1 on the other

DistributedDataParallel (DDP) needs one process for each GPU. Such a process is called a
rank; how many there are is the world size. Each rank has the whole model, and trains on
other samples. During backward() DDP averages the gradients over all ranks. So all
optimizers take the same step, and the copies of the model stay equal. Most lines that
are there because of it are marked "DDP:".

--batch_size is that of one rank: one step sees batch_size * accum * world size samples,
the global batch. With more ranks divide --batch_size, or try another --lr. The same
global batch gives the same training, up to rounding, on any number of ranks. But not
with dropout or augmentation, which each rank draws for itself, nor with batch norm or a
loss that compares samples with each other: they see the samples of one rank.

The same command again resumes the run in the folder --out. A run that was stopped goes
on at the very next step, one that was killed from its last save. Another --out begins a
new run. --max_restarts of torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.

To train something else, replace the sections MODEL and DATA, and --data in OPTIONS; a
collate_fn goes into train(). To make a script of your own distributed, copy or import
what you need of PIECES: each needs the imports at the head of its section, and the few
others that it names, with theirs. Two rules are left to you:

  1. All ranks take part in each collective (all-reduce, broadcast, ...), in the same
     order. If one is missing, the others wait for it. So never call a function that
     "all ranks call" under `if rank == 0`.
  2. Whatever decides what happens next (a stop, a learning rate, a best score) is the
     same on all ranks: calculate it from numbers that all of them have.
"""

import argparse
import contextlib
import datetime
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
import torch.distributed.nn  # DDP needs it: imported too late, the exit may crash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

# ---- MODEL: replace it ---------------------------------------------------------------
# {option: (default, help)}. A default is a number or a word, not True, False or None.
# A resumed run must have the same values.
MODEL_OPTIONS = {
    "layers": (2, "transformer blocks"),
    "heads": (4, "attention heads"),
    "dim": (128, "width of the model"),
    "seq_len": (128, "bytes per sample"),
    "dropout": (0.0, "dropout probability"),
}


class Block(nn.Module):
    """One transformer block: attention to the bytes before, then a small network."""

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
    """(batch, time) bytes -> (batch, time, 256) logits of the next byte."""

    def __init__(self, layers, heads, dim, seq_len, dropout):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.position = nn.Embedding(seq_len, dim)
        # torch's own initial embeddings have a standard deviation of 1: too large here.
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
    shape = args.layers, args.heads, args.dim, args.seq_len
    return ByteTransformer(*shape, args.dropout)


def build_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr, fused=True)


def compute_loss(model, batch):
    """The mean over the samples of a batch. The model may be wrapped: just call it.

    All batches weigh the same. So a mean over tokens is right only if all samples have
    as many of them. Each trained weight must have a part in the loss, else DDP fails.
    """
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten().long())


def score(model, batch):
    """Sums over the samples, and "count", their number: evaluate() divides by it."""
    x, _ = batch
    return {"val_loss": compute_loss(model, batch) * len(x), "count": len(x)}


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

    All ranks call it at the same time: so download the data before the run, not here.
    """
    # Without --data: the help texts that come with Python.
    path = args.data or Path(os.__file__).parent / "pydoc_data/topics.py"
    try:
        with open(path, "rb") as file:
            checksum = zlib.crc32(file.read(64 * 2**20))  # of the first 64 MiB
    except OSError as error:
        sys.exit(f"no data: {error}: give a file with --data")
    windows = ByteWindows(path, args.seq_len)
    n = len(windows)
    held_out = max(1, n // 20)
    train_set = Subset(windows, range(n - held_out))
    val_set = Subset(windows, range(n - held_out, n))
    return train_set, val_set, f"CRC-32 {checksum:08x}"


# ---- THE RUN -------------------------------------------------------------------------
def train(args, device):
    """The whole run. All ranks call it. Returns the signal that stopped it, or 0."""
    # ---- Set up
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Alike on all ranks: the first weights, or a random split in load_data().
    seed_all("start", args.seed)
    train_set, val_set, data_text = load_data(args)
    n = len(train_set)
    data_text = f"{n} samples, {len(val_set)} held out, {data_text}"
    step_samples = args.batch_size * args.accum * world_size
    settings = settings_of(args, device, data_text, step_samples)
    check_alike(settings)  # DDP: else ranks that differ hang, or train nonsense
    if n < step_samples:
        sys.exit(f"{n} samples are less than one step of {step_samples}")

    options = loading_options(device, args.workers, args.timeout)
    options["batch_size"] = args.batch_size
    # DDP: without this sampler all ranks would train on the same samples.
    sampler = ResumableSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, sampler=sampler, drop_last=True, **options)
    # DDP: the ranks take turns in the samples. Each sample counts once.
    val_samples = range(rank, len(val_set), world_size)
    val_loader = DataLoader(val_set, sampler=val_samples, **options)

    model = build_model(args).to(device)  # optimize, evaluate and save this one
    if not model.training:
        sys.exit("build_model() returns a model in eval mode: call its train()")
    wrapped = model  # train this one: see below
    if world_size > 1:
        # DDP: copies the weights of rank 0 to all ranks, and averages the gradients.
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.compile:
        wrapped = torch.compile(wrapped)
    optimizer = build_optimizer(model, args)
    groups = [dict(group) for group in optimizer.param_groups]  # of this start
    bf16 = args.precision == "bf16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)

    # ---- Resume
    folder = Path(args.out)
    path = folder / "checkpoint.pt"
    lock(folder)
    # done: how many samples of this epoch all ranks together have trained on.
    step, epoch, done = resume(path, model, optimizer, settings)
    for group, new in zip(optimizer.param_groups, groups, strict=True):
        group.update(new)  # a changed weight decay, say, counts
    last_step = args.max_steps
    whole_run = args.max_steps or args.epochs * (n // step_samples)  # in steps
    if last_step is None:
        steps_left = (n - done) // step_samples
        steps_left += (args.epochs - epoch - 1) * (n // step_samples)
        last_step = step + max(0, steps_left)
    say(f"ranks: {world_size}, {device.type}, {args.precision}, {socket.gethostname()}")
    left_over = n % step_samples
    say(f"global batch: {step_samples} samples; an epoch: {n}, {left_over} left over")
    say(f"from step {step} to {last_step}")
    if step >= last_step:
        with autocast:
            log(folder, step, evaluate(model, score, val_loader, device))
        say("nothing left to train: give more --epochs (or steps), or another --out")
        return 0

    # ---- Train
    stop = StopSignal()
    results = []  # of the steps since the last log line: they stay on the device
    while step < last_step:
        sampler.set_epoch(epoch, done)  # DDP: else each epoch has the same order
        # DDP: loading processes get their seeds when they start, in the first epoch.
        # Without the rank those of all ranks would draw the same augmentation.
        seed_all("load", args.seed, epoch, done, rank)
        batches = iter(loader)
        steps = min(last_step - step, (n - done) // step_samples)
        for i in range(steps):
            if not results:
                began = time.perf_counter()
            # DDP: without the rank all ranks would draw the same dropout. With the step
            # a resumed run draws what it would have drawn. Loading the batch may draw,
            # too: so this comes before it.
            seed_all("step", args.seed, step, rank)
            # Counted from the end: right also after a resume with another global batch.
            progress = 1 - (last_step - step - 0.5) / whole_run
            factor = lr_factor(progress, args.warmup)
            for group, new in zip(optimizer.param_groups, groups, strict=True):
                group["lr"] = new["lr"] * factor
            result = train_step(wrapped, batches, optimizer, autocast, args, device)
            results.append(result)
            step += 1
            done += step_samples

            # DDP: all ranks get the same answer. Else one stops, and the others wait.
            stopped_by = stop.requested()
            evaluating = i == steps - 1 or is_due(step, args.eval_every)
            saving = stopped_by or evaluating or is_due(step, args.save_every)
            if saving or is_due(step, args.log_every):
                # What is wrong must be found before it is saved.
                means = mean_over_ranks(results)
                if not all(math.isfinite(mean) for mean in means.values()):
                    sys.exit(f"not finite, not saved: {means}: a lower --lr? bad data?")
                check_together(results, model)
                seconds = (time.perf_counter() - began) / len(results)
                means["lr"] = float(optimizer.param_groups[0]["lr"])
                means["samples_per_s"] = step_samples / seconds
                means["seconds_left"] = seconds * (last_step - step)
                log(folder, step, means)
                results = []
            if saving:
                # Save last: after all that changes in the step, such as a scheduler.
                save_checkpoint(
                    path,
                    step,
                    epoch=epoch,
                    done=done,
                    settings=settings,
                    model=model.state_dict(),
                    optimizer=optimizer.state_dict(),
                )
            if stopped_by:
                say(f"stopped by signal {stopped_by}, saved at step {step}")
                return stopped_by
            if evaluating:
                with autocast:
                    log(folder, step, evaluate(model, score, val_loader, device))
        epoch, done = epoch + 1, 0
    say(f"done: step {step}, saved in {path}")
    return 0


def resume(path, model, optimizer, settings):
    """Load what train() has saved. All ranks call it. Returns step, epoch, done."""
    saved = load_checkpoint(path)
    if saved is None:
        return 0, 0, 0
    for name, value in settings.items():
        before = saved["settings"].get(name)
        if value != before and name in ["seed", "data", *MODEL_OPTIONS]:
            sys.exit(f"{path} has {name} {before}, not {value}: give another --out")
        if value != before:
            say(f"{name} is {value}, it was {before}")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"], saved["epoch"], saved["done"]


def train_step(wrapped, batches, optimizer, autocast, args, device):
    """One optimizer step with args.accum batches. All ranks call it.

    Returns {name: tensor on the device}, one number each, for the log.
    """
    loss_sum = 0.0
    for i in range(args.accum):
        batch = to_device(next(batches), device)
        averaging = contextlib.nullcontext()
        if i < args.accum - 1 and dist.get_world_size() > 1:
            # DDP: only the last backward() averages the gradients, which add up until
            # then. To average in each one would be slower.
            averaging = wrapped.no_sync()
        with averaging:
            with autocast:
                loss = compute_loss(wrapped, batch)
            # DDP: it averages over the ranks. All have as many samples, so this is the
            # mean over all samples of the step.
            (loss / args.accum).backward()
        loss_sum += loss.detach().float()
    # The gradients are averaged, so all ranks have the same norm, and clip alike.
    grad_norm = nn.utils.clip_grad_norm_(wrapped.parameters(), args.grad_clip)
    optimizer.step()
    wrapped.zero_grad()  # also of weights that the optimizer does not have
    return {"loss": loss_sum / args.accum, "grad_norm": grad_norm}


def lr_factor(progress, warmup):
    """The share of the learning rate: a linear rise to 1, then a cosine down to 0."""
    if progress < warmup:
        return progress / warmup
    return (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2


def is_due(step, every):
    return every is not None and step % every == 0


# ---- PIECES --------------------------------------------------------------------------
# ---- Ranks: join, compare, leave together
# Imports: contextlib, datetime, multiprocessing, os, signal, sys, time, traceback,
# torch, torch.distributed.nn, dist
@contextlib.contextmanager
def distributed(device="auto", timeout=600):
    """`with distributed() as device:` around all that the ranks do together.

    If one of several ranks fails, it says why and ends at once. An ordinary exit may
    hang: it waits for the other ranks, and they wait for it. torchrun ends the others.
    sys.exit(0) is no failure, if all ranks call it.
    """
    device = init_distributed(device, timeout)
    try:
        yield device
        all_gather("done")  # DDP: a rank that leaves early may break what others do
    except BaseException as error:
        has_failed = not isinstance(error, SystemExit) or error.code
        if has_failed and dist.get_world_size() > 1:
            end_this_rank(error)
        raise
    finally:
        kill_loading_processes()
        # Give gloo's threads the time to end, for which they need Python's lock (GIL).
        # A DDP object that is freed earlier keeps the lock while it waits for them: a
        # hang, see pytorch issue 56297.
        time.sleep(0.1)
        dist.destroy_process_group()


def end_this_rank(error):
    """It does not return."""
    try:
        text = error.code if isinstance(error, SystemExit) else repr(error)
        line = f"error: rank {dist.get_rank()}: {text}\n"
        print(line, end="", file=sys.stderr, flush=True)  # in one write: it stays whole
        if not isinstance(error, SystemExit):  # sys.exit("text") needs no traceback
            traceback.print_exception(error)
        sys.stdout.flush()
        kill_loading_processes()
        # Others fail as soon as this rank is gone. torchrun names the rank that failed
        # first, but counts whole seconds: so the others must fail in a later one.
        time.sleep(1.1)
    finally:
        os._exit(1)


def kill_loading_processes():
    """All daemon processes: Python would wait for ever, since they ignore SIGTERM."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else torch raises an error
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def init_distributed(device="auto", timeout=600):
    """Join the process group, and return the device of this rank. All ranks call it.

    torchrun has set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without
    them this process is alone, in a group of one: its collectives return at once.
    timeout: how many seconds a rank waits for the others.
    """
    device = choose_device(device)
    if "RANK" in os.environ:
        # NCCL carries tensors between GPUs, gloo between CPUs. Both are needed: to ask
        # whether to stop, the CPU must not wait for a busy GPU.
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if os.environ["RANK"] == "0":
            place = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            print("rank 0 waits for all ranks at", *place, flush=True)
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return device


def choose_device(name):
    """The device of this rank. "auto": a GPU, of NVIDIA or AMD, else the CPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    # DDP: rank i of this machine (its local rank) takes GPU i. Else all take GPU 0.
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        sys.exit(f"local rank {local_rank} needs a GPU, but torch finds {gpus} here")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def all_gather(value):
    """[value of rank 0, value of rank 1, ...]. All ranks call it.

    It pickles the values. So it is not for a loss: no gradients go through it.
    """
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_alike(settings):
    """End all ranks if their {name: value} differ. All ranks call it."""
    everyone = all_gather(settings)
    for rank, other in enumerate(everyone):
        for name in everyone[0] | other:
            if other.get(name) != everyone[0].get(name):
                here = f"{other.get(name)} on rank {rank}"
                sys.exit(f"{name} is {here}, but {everyone[0].get(name)} on rank 0")


# ---- Batches
# Imports: multiprocessing, numpy, os, random, signal, zlib, torch, DistributedSampler
class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can begin in mid-epoch, on any number of ranks.

    The order depends on the seed and the epoch alone. The ranks take turns in it: of 2
    ranks, rank 0 takes the places 0, 2, 4, ..., rank 1 takes 1, 3, 5, ... So what all
    ranks together have done is always the beginning of the order.
    """

    def __init__(self, dataset, seed):
        super().__init__(dataset, seed=seed)
        self.start = 0  # how many samples of the epoch are done, by all ranks together

    def set_epoch(self, epoch, start=0):
        """The place of the next iteration, and of len(). Without it: the next epoch."""
        super().set_epoch(epoch)
        self.start = start

    def __len__(self):
        return (len(self.dataset) - self.start) // self.num_replicas

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)
        mine = order[self.start + self.rank :: self.num_replicas][: len(self)]
        self.set_epoch(self.epoch + 1)
        return iter(mine.tolist())


def to_device(batch, device):
    """Tensors, also in tuples, lists and dicts. A tuple becomes a list."""
    if hasattr(batch, "to"):  # a tensor, or a batch of another library
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [to_device(value, device) for value in batch]
    return batch


def seed_all(*values):
    """Seed torch with its GPUs, numpy and random. Other values, other random draws."""
    seed = zlib.crc32(repr(values).encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def loading_options(device, workers, timeout=600):
    """Options of a DataLoader. timeout: how many seconds a batch may take.

    Loading processes are spawned: the data set must be picklable, and they do not have
    what main() has written into globals.
    """
    options = {"pin_memory": device.type == "cuda", "num_workers": workers}
    if workers > 0:
        options["timeout"] = timeout  # else a loading process that hangs is waited for
        options["persistent_workers"] = True
        # The usual "fork" may deadlock with NCCL, says the documentation of DDP.
        options["multiprocessing_context"] = "spawn"
        options["worker_init_fn"] = ignore_signals
    return options


def ignore_signals(worker):
    """torchrun and Ctrl-C send them to all processes: the rank must save before."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if not multiprocessing.parent_process().is_alive():
        os._exit(1)  # the rank was killed meanwhile: torch would not notice it


# ---- Numbers: average, compare, evaluate, log
# Imports: contextlib, json, os, sys, torch, nn, dist
def mean_over_ranks(results):
    """[{name: tensor}], one for each step -> {name: mean over steps and ranks}.

    All ranks call it, and get the same numbers. The CPU waits for the GPU here.
    """
    steps = [torch.stack(list(result.values())) for result in results]
    means = torch.stack(steps).double().mean(0).cpu()
    # DDP: the sum over all ranks. Else the log has the loss of rank 0 alone.
    dist.all_reduce(means)
    means /= dist.get_world_size()
    return dict(zip(results[0], means.tolist(), strict=True))


def check_together(results, model):
    """End all ranks if they do not train one and the same model. All ranks call it.

    DDP keeps gradients and weights equal, but not if a step called the model without
    DDP, or if a rank has another learning rate, or changed its weights by itself. This
    compares their norms only: it finds most mistakes, not all.
    """
    norms = [weight.detach().float().norm() for weight in model.parameters()]
    norms = [float(nn.utils.get_total_norm(norms)), float(results[-1]["grad_norm"])]
    everyone = torch.tensor(all_gather(norms))
    if not ((everyone - everyone[0]).abs() <= 1e-6 * everyone[0]).all():  # or NaN
        sys.exit(f"the ranks differ: norms of [weights, gradient]: {everyone.tolist()}")


@torch.no_grad()
def evaluate(model, score_fn, loader, device):
    """The sums of score_fn(model, batch) over all batches, divided by that of "count".

    All ranks call it, each with its own batches, and get the same {name: mean}. Give it
    the model itself: the forward() of DDP may wait for the other ranks, and one of them
    may have a batch less.
    """
    if dist.get_world_size() > 1:
        # DDP sends the running means of batch norm only before a training step. Since
        # then each rank has others. Rank 0 saves its own: so evaluate these.
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    sums = {}
    for batch in loader:
        scores = score_fn(model, to_device(batch, device))
        for name, value in scores.items():
            sums[name] = sums.get(name, 0.0) + torch.as_tensor(value).double()
    for module, was_training in modes:  # a frozen layer stays in eval mode
        module.train(was_training)
    total = {}
    # DDP: the sums of all ranks. Else each has the result of its own batches.
    for of_rank in all_gather({name: float(value) for name, value in sums.items()}):
        for name, value in of_rank.items():
            total[name] = total.get(name, 0.0) + value
    count = total.pop("count", 0)
    return {name: value / count for name, value in total.items()}


def say(line):
    """Print a line, on rank 0 alone."""
    if dist.get_rank() == 0:
        # Ctrl-C at `... | tee log` ends tee, too. The run goes on until it has saved.
        # print() would keep what nobody reads, and fail with it at the exit.
        with contextlib.suppress(OSError):
            os.write(1, f"{line}\n".encode())


def log(folder, step, means):
    """A line on the terminal, and in metrics.jsonl, on rank 0. means: {name: number}"""
    if dist.get_rank() == 0 and means:
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **means}) + "\n")
        say("  ".join([f"step {step}", *[f"{k} {v:.5g}" for k, v in means.items()]]))


# ---- Checkpoint
# Imports: fcntl, os, sys, zipfile, torch, dist
def save_checkpoint(path, step, **content):
    """Rank 0 writes a file, which is whole at any moment: the old one, or the new one.

    content: tensors and plain Python, such as a state_dict(). All ranks may call it.
    """
    content["step"] = step
    if dist.get_rank() == 0:  # DDP: else all would write into one file
        beside = path.with_suffix(".tmp")
        try:
            with open(beside, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            # What torch.load() would refuse, such as a number of numpy, must fail now.
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(beside)
            if refused:
                raise RuntimeError(f"torch.load() would refuse {refused}")
            os.replace(beside, path)
        except Exception as error:  # pickle and torch raise all kinds
            beside.unlink(missing_ok=True)
            sys.exit(f"cannot save {path} (the old one is intact): {error}")


def load_checkpoint(path):
    """{name: content} of the rank with the most steps, or None. All ranks call it."""
    content, step = None, -1  # of a rank that has no file
    if path.exists():
        try:
            # torch.load() does not compare the checksums in the file, so we do.
            with zipfile.ZipFile(path) as archive:
                if archive.testzip():
                    raise ValueError("a checksum is wrong")
            # weights_only: no code in it is run. mmap: not all of it is in memory.
            content = torch.load(path, "cpu", weights_only=True, mmap=True)
            step = content["step"]
        except Exception as error:  # zipfile, pickle and torch raise all kinds
            sys.exit(f"{path} cannot be loaded: {error!r:.200}")
    steps = all_gather(step)
    if min(steps) < max(steps):
        # The nodes have no shared disk. One rank that has the file sends it to all.
        box = [content]
        dist.broadcast_object_list(box, src=steps.index(max(steps)))
        content = box[0]
    return content


def lock(folder):
    """Make the folder, and keep other runs out of it until this process ends.

    All ranks may call it: rank 0, which writes there, does it. (A process that reads
    its own .lock, to copy the folder, loses the lock.)
    """
    if dist.get_rank() > 0:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)  # stays open
    except OSError as error:
        sys.exit(f"the folder {folder}: {error}")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{folder} is in use by another run")
    except OSError as error:  # some network disks have no locks
        say(f"warning: {folder} cannot be locked: {error}")


# ---- Stop
# Imports: contextlib, os, signal, torch, dist
# SIGTERM: torchrun, Slurm, containers. SIGINT: Ctrl-C. SIGHUP: a closed terminal.
# SIGUSR1: Slurm before the time is over, if it is asked to.
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


class StopSignal:
    """Whether any rank has got a signal to stop (Ctrl-C is SIGINT), or lost torchrun.

    All ranks call requested() after each step, and get the same answer: so they save
    and stop at the same step. torchrun gives them 30 s (--shutdown-timeout), and hands
    on SIGUSR1 only if --signals-to-handle names it.
    """

    number = 0

    def __init__(self):
        self.parent = os.getppid()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.receive)

    def receive(self, number, frame):
        self.number = number
        text = f"signal {number}: saves and stops after a step"
        text += f" (kill -9 {os.getpid()} ends it at once)\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())

    def requested(self):
        """The number of the signal, or 0. All ranks call it."""
        if dist.is_torchelastic_launched() and os.getppid() != self.parent:
            self.number = signal.SIGTERM  # torchrun was killed
        number = torch.tensor(int(self.number))
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)


# ---- OPTIONS -------------------------------------------------------------------------
MAY_DIFFER_BETWEEN_RANKS = ["out", "workers", "local_rank"]
ABOVE_ZERO = "layers heads dim seq_len epochs max_steps batch_size accum lr grad_clip"
ABOVE_ZERO += " log_every eval_every save_every timeout"


def settings_of(args, device, data_text, step_samples):
    """{name: text} of what all ranks must have alike. A resume says what is new."""
    settings = {name: str(value) for name, value in vars(args).items()}
    settings |= {"data": data_text, "device": device.type}
    settings["global batch"] = str(step_samples)
    for name in MAY_DIFFER_BETWEEN_RANKS:
        del settings[name]
    return settings


def parse_args(argv=None):
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(formatter_class=formatter)
    add = parser.add_argument
    add("--data", metavar="FILE", help="bytes to learn; else a file of Python's own")
    for name, (default, text) in MODEL_OPTIONS.items():
        add(f"--{name}", type=type(default), default=default, help=text)
    add("--out", default="out", help="folder of the checkpoint; resumes there")
    add("--epochs", type=int, default=3, help="passes over the data")
    add("--max_steps", type=int, help="end at this step, instead of --epochs")
    add("--batch_size", type=int, default=32, help="samples of a rank's batch")
    add("--accum", type=int, default=1, help="batches per optimizer step")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--warmup", type=float, default=0.05, help="share of the run with rising rate")
    add("--grad_clip", type=float, default=1.0, help="largest norm of the gradients")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--workers", type=int, default=0, help="loading processes per loader and rank")
    add("--seed", type=int, default=0, help="of weights, order, dropout")
    add("--log_every", type=int, default=20, help="steps")
    add("--eval_every", type=int, help="steps; also after each epoch")
    add("--save_every", type=int, default=100, help="steps; also before an evaluation")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    add("--timeout", type=int, default=600, help="seconds to wait for a rank")
    # The old launcher, torch.distributed.launch, passes this. It is not used.
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ABOVE_ZERO.split():
        value = getattr(args, name, None)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"argument --{name}: {value} is not above 0")
    return args


def main(argv=None):
    args = parse_args(argv)
    with distributed(args.device, args.timeout) as device:
        stopped_by = train(args, device)
    # torchrun would start a stopped rank again if it did not end with 0.
    if stopped_by and not dist.is_torchelastic_launched():
        sys.exit(128 + stopped_by)


if __name__ == "__main__":
    main()
