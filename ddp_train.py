# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "numpy"]  # torch needs numpy to send objects
# ///
"""Data-parallel training in PyTorch, in one file.

    python ddp_train.py                                     one process, CPU or GPU
    torchrun --standalone --nproc_per_node=4 ddp_train.py   four processes, four GPUs
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=HOST ddp_train.py
        two machines; HOST is the first one, the other one has --node_rank=1

--batch_size is that of one rank: four ranks take four times as many samples in a step.

What DistributedDataParallel (DDP) does: each process, called a rank, has the whole
model, and reads its own share of the samples. During backward() DDP averages the
gradients over all ranks. So every optimizer takes the same step, and the copies of the
model stay equal. The lines that every such program has are marked: search for "DDP:".
Four things are left to the training script, and most of this file is about them:

  1. All ranks start alike: with the same weights, options and data.
  2. All ranks take part in each collective (all-reduce, broadcast, ...), in the same
     order. If one rank is missing, the others wait for it. So never call one, or a
     function that does, under `if world.rank == 0`.
  3. Each sample counts once, and each file is written once, by rank 0.
  4. The ranks end together: they stop at the same step. A rank that fails ends at once,
     and torchrun then ends the others.

Replace MODEL (build_model, compute_loss, score) and DATA (load_data) with yours, their
options, and the list SAME_AS_CHECKPOINT.

A second start resumes the run in the folder --out, also with another --lr: the log says
what has changed. To begin a new run, give another --out.

What you can expect, on Linux and macOS:

  - The same global batch gives the same numbers, up to rounding, on any number of ranks
    and with any --accum. Not with dropout (each rank draws its own) or batch norm (it
    sees the batch of one rank).
  - A resumed run has the same bits as one that was never stopped, on CPUs with one or
    two ranks. With more it is the same up to rounding. Random numbers that loading
    processes draw (--workers) are others after a resume.
"""

import argparse
import collections
import contextlib
import datetime
import fcntl
import json
import math
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import socket
import sys
import time
import traceback
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# DDP imports this. It keeps the process group of that moment, and the threads of the
# group, which may crash the exit. So it is imported now, before there is a group.
import torch.distributed.nn
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


# ---- MODEL: replace it ---------------------------------------------------------------
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


def compute_loss(model, batch):
    """The mean over the samples of the batch. Training minimizes it.

    The model may be wrapped in DDP, which works only if it is called: model(...).
    """
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten().long())


def score(model, batch):
    """Sums over the samples, and "count", their number. evaluate() divides the two."""
    x, _ = batch
    loss_sum = compute_loss(model, batch) * len(x)
    bits = loss_sum / math.log(2)
    return {"val_loss": loss_sum, "bits_per_byte": bits, "count": len(x)}


# ---- DATA: replace it ----------------------------------------------------------------
class ByteWindows(Dataset):
    """Sample i is seq_len bytes of a file, and the same bytes shifted by one."""

    def __init__(self, path, first, count, seq_len):
        self.path = path
        self.first = first
        self.count = count
        self.seq_len = seq_len

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        with open(self.path, "rb") as file:
            file.seek((self.first + i) * self.seq_len)
            window = bytearray(file.read(self.seq_len + 1))
        window = torch.frombuffer(window, dtype=torch.uint8)
        return window[:-1], window[1:]


def load_data(args):
    """Training set, held-out set (the last 5 %), and a text that identifies the data.

    The ranks compare this text, and so does a resumed run.
    """
    # Without --data: the help texts that come with Python.
    path = args.data or Path(os.__file__).parent / "pydoc_data/topics.py"
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            checksum = zlib.crc32(file.read(64 * 2**20))  # its beginning is enough
    except OSError as error:
        sys.exit(f"no data: {error}: give a file with --data")
    count = (size - 1) // args.seq_len
    if count < 2:
        sys.exit(f"--data {path}: {size} bytes are too few for two samples")
    held_out = max(1, count // 20)
    train_set = ByteWindows(path, 0, count - held_out, args.seq_len)
    val_set = ByteWindows(path, count - held_out, held_out, args.seq_len)
    return train_set, val_set, f"{size} bytes, CRC-32 {checksum:08x}"


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
        generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch))
        order = torch.randperm(len(self.dataset), generator=generator)
        # DDP: each rank takes its own samples, and as many as the others.
        mine = order[self.start + self.rank :: self.num_replicas]
        return iter(mine[: len(self)].tolist())


class Loader(DataLoader):
    """A DataLoader whose loading processes never get a signal to stop.

    torchrun and Ctrl-C send it to all processes. The loading processes must live until
    the rank has saved, so they start with these signals blocked, and it stays so.
    """

    def __iter__(self):
        if self.num_workers == 0:
            return super().__iter__()
        # Python starts a helper process first, and that unblocks signals: so do it now.
        multiprocessing.resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, StopSignal.NUMBERS)
        batches = super().__iter__()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, StopSignal.NUMBERS)
        return batches

    @staticmethod
    def kill_processes():
        """Python would end them with SIGTERM, which is blocked."""
        # torch watches them, and would raise an error because they were killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in multiprocessing.active_children():
            if process.daemon:  # as all of a DataLoader are
                process.kill()


def train_loader(dataset, batch_size, world, seed=0, workers=0, **options):
    """This rank's share of an epoch, in full batches, as many as on the other ranks.

    Before each epoch call loader.sampler.set_epoch(epoch). What is left over is less
    than a batch for each rank. It waits for another epoch, which has another order.
    world: a World, see PROCESSES. options: others of DataLoader, such as collate_fn.
    """
    # A DataLoader draws a seed for its loading processes when it begins. It takes it
    # from this generator, so the random numbers of the model do not change.
    generator = torch.Generator().manual_seed(seed_of(seed, world.rank))
    return Loader(
        dataset,
        batch_size,
        sampler=ResumableSampler(dataset, world.size, world.rank, seed=seed),
        drop_last=True,
        generator=generator,
        **loading_options(world, workers, options),
    )


def eval_loader(dataset, batch_size, world, workers=0, **options):
    """This rank's share of the batches, for evaluate(). The ranks take turns in them.

    So the batches are the same for any number of ranks. The last one may be smaller,
    and a rank may have one batch less than another.
    """
    n = len(dataset)
    batches = [range(i, min(i + batch_size, n)) for i in range(0, n, batch_size)]
    mine = batches[world.rank :: world.size]
    options = loading_options(world, workers, options)
    return Loader(dataset, batch_sampler=mine, **options)


def loading_options(world, workers, others):
    """workers: how many processes load for this rank. With 0 it loads by itself."""
    return {
        "num_workers": workers,
        "persistent_workers": workers > 0,
        # The usual "fork" may deadlock with NCCL, says the documentation of DDP.
        "multiprocessing_context": "spawn" if workers else None,
        "pin_memory": world.device.type == "cuda",
        **others,
    }


def seed_of(*numbers):
    """One seed from several numbers."""
    return zlib.crc32(repr(numbers).encode())


def to_device(batch, device):
    """Tensors, also in tuples, lists and dicts. So DDP needs no device_ids."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [to_device(value, device) for value in batch]
    return batch


# ---- THE RUN -------------------------------------------------------------------------
def train_step(ddp, batches, optimizer, autocast, args, world):
    """One optimizer step with args.accum batches. All ranks call it.

    Returns the mean loss of this rank's samples, and the norm of the gradient: two
    tensors on the device.
    """
    loss_sum = 0.0
    for i in range(args.accum):
        batch = to_device(next(batches), world.device)
        # DDP: of several batches the last one averages what all of them have added up.
        # A process alone has no DDP.
        sync = i == args.accum - 1 or world.size == 1
        with contextlib.nullcontext() if sync else ddp.no_sync():
            with autocast:
                loss = compute_loss(ddp, batch)
            # DDP: backward() averages the gradients over the ranks. All have the same
            # number of samples, so this is the mean over all samples of the step.
            (loss / args.accum).backward()
        loss_sum += loss.detach().float()
    grad_norm = nn.utils.clip_grad_norm_(ddp.parameters(), args.grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum / args.accum, grad_norm


@torch.no_grad()
def evaluate(model, score_fn, loader, world, autocast=None):
    """{name: sum of score_fn(model, batch) over all batches / sum of "count"}.

    All ranks call it, and get the same numbers; up to rounding they do not depend on
    the number of ranks. Give it an eval_loader(), and the model itself: as a rank may
    have one batch less than another, DDP might wait for ever.
    """
    if world.size > 1:
        # Each rank has running means of batch norm of its own. Those of rank 0 are
        # saved, so those are evaluated.
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    scores = []
    for batch in loader:
        with autocast or contextlib.nullcontext():
            scores.append(score_fn(model, to_device(batch, world.device)))
    for module, was_training in modes:
        module.training = was_training
    sums = collections.Counter()  # its update() adds
    for score_of_batch in scores:  # only now, so that the GPU is not waited for before
        sums.update({name: float(value) for name, value in score_of_batch.items()})
    totals = collections.Counter()
    for rank_sums in all_gather(sums):
        totals.update(rank_sums)
    count = totals.pop("count")
    return {name: total / count for name, total in totals.items()}


def learning_rate(args, epochs_done):
    """Linear warm-up to --lr, then a cosine down to 0.

    It follows the share of --epochs that is done, from 0 to 1. So it depends neither on
    the number of ranks nor on --max_steps.
    """
    progress = epochs_done / args.epochs
    if progress < args.warmup:
        return args.lr * progress / args.warmup
    after_warmup = (progress - args.warmup) / (1 - args.warmup)
    return args.lr * (1 + math.cos(math.pi * after_warmup)) / 2


def train(args, world):
    """The whole run. All ranks call it. Returns the signal that stopped it, or 0."""
    stop = StopSignal()
    train_set, val_set, data_text = load_data(args)
    settings = settings_of(args, world, data_text)
    check_alike(settings)
    n = len(train_set)
    step_samples = args.batch_size * args.accum * world.size
    if n < step_samples:
        sys.exit(f"{n} samples are less than one step of {step_samples}")

    torch.manual_seed(args.seed)
    model = build_model(args).to(world.device)
    # `model` is the network itself, which is evaluated and saved. `ddp` is trained.
    ddp = model
    if world.size > 1:
        # DDP: it copies the weights of rank 0 to all ranks. Bucket views save memory.
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.compile:
        ddp = torch.compile(ddp)  # it still has no_sync(); evaluate() runs uncompiled
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    bf16 = args.precision == "bf16"
    autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=bf16)
    torch.set_float32_matmul_precision("high")  # fp32 is TF32 on GPUs
    loader = train_loader(train_set, args.batch_size, world, args.seed, args.workers)
    val_loader = eval_loader(val_set, args.batch_size, world, args.workers)

    parts = {"model": model, "optimizer": optimizer}
    must_match = {name: getattr(args, name) for name in SAME_AS_CHECKPOINT}
    must_match["the data"] = data_text
    checkpoint = Checkpoint(args.out, parts, must_match, world)
    log = Log(args.out, world)
    state = checkpoint.resume()
    step = state.get("step", 0)  # optimizer steps that are done
    epoch = state.get("epoch", 0)
    start = state.get("start", 0)  # samples of this epoch that are done, by all ranks
    for name, before in state.get("settings", {}).items():
        now = settings.get(name)
        if now != before:
            log.say(f"{name} is {now}, in the checkpoint it was {before}")
    # What is left: the rest of this epoch, and the whole ones after it.
    steps_left = (n - start) // step_samples
    steps_left += (args.epochs - epoch - 1) * (n // step_samples)
    last_step = step + max(0, steps_left)
    if args.max_steps is not None:
        last_step = min(last_step, args.max_steps)
    log.say(f"ranks: {world.size}, {world.device.type}, {args.precision}")
    left_over = n % step_samples
    log.say(f"an epoch: {n} samples, {step_samples} a step, {left_over} left over")
    log.say(f"from step {step} to {last_step}")
    if step > 0 and (state["to_evaluate"] or step >= last_step):
        # An evaluation comes after its save. The run may have ended between them.
        means = evaluate(model, score, val_loader, world, autocast)
        log.write(step, **means)

    batches = None
    losses = []  # of the steps since the last log line: tensors on the device
    grad_norms = []
    while step < last_step:
        if n - start < step_samples:  # the epoch has no whole step left
            epoch += 1
            start = 0
            batches = None
        if batches is None:
            # DDP: without set_epoch() every epoch would have the same order.
            loader.sampler.set_epoch(epoch, start)
            # Loading processes draw other random numbers each time that they begin.
            loader.generator.manual_seed(seed_of(args.seed, step, world.rank))
            batches = iter(loader)
        if not losses:
            interval_began = time.perf_counter()
        # Each rank and step has its own dropout, and the same after a resume: so no
        # state of the generator is saved. If you use random or numpy, seed them, too.
        torch.manual_seed(seed_of(args.seed, step, world.rank))
        middle = start + step_samples / 2  # of this step
        lr = learning_rate(args, epoch + middle / n)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss, grad_norm = train_step(ddp, batches, optimizer, autocast, args, world)
        losses.append(loss)
        grad_norms.append(grad_norm)
        step += 1
        start += step_samples

        epoch_ended = n - start < step_samples
        to_evaluate = epoch_ended or step == last_step or is_due(step, args.eval_every)
        stopping = stop()  # all ranks ask, and get the same answer
        saving = stopping or to_evaluate or is_due(step, args.save_every)
        # A save comes with a log line, because that finds out whether all is finite.
        # In other steps the CPU does not wait for the GPU.
        if saving or is_due(step, args.log_every):
            loss = torch.stack(losses).mean().cpu().double()
            dist.all_reduce(loss)  # DDP: the sum over all ranks, by gloo
            loss = loss.item() / world.size
            grad_norm = torch.stack(grad_norms).max().item()
            if not math.isfinite(loss) or not math.isfinite(grad_norm):
                sys.exit(f"not finite by step {step}, not saved: try a lower --lr")
            seconds = (time.perf_counter() - interval_began) / len(losses)
            values = {"loss": loss, "lr": lr, "grad_norm": grad_norm}
            values["samples_per_s"] = step_samples / seconds
            values["seconds_left"] = round(seconds * (last_step - step))
            log.write(step, **values)
            losses = []
            grad_norms = []
        if saving and world.rank == 0:  # DDP: one rank writes, else files are torn
            values = {"epoch": epoch, "start": start, "settings": settings}
            checkpoint.save(step, **values, to_evaluate=to_evaluate)
        if stopping and step < last_step:
            log.say(f"stopped by signal {stopping}, saved at step {step}")
            return stopping
        if to_evaluate:
            means = evaluate(model, score, val_loader, world, autocast)
            log.write(step, **means)
    log.say(f"done: step {step}, saved in {checkpoint.path}")
    return 0


def is_due(step, every):
    return every is not None and step % every == 0


# ---- PROCESSES -----------------------------------------------------------------------
@dataclass
class World:
    """Which process this is (0 <= rank < size), and where its tensors are."""

    rank: int
    size: int
    device: torch.device


@contextlib.contextmanager
def distributed(device="auto", timeout=600):
    """`with distributed() as world:` around all that the ranks do together.

    They leave the block together; or all call sys.exit(0), an orderly end, too. One of
    several ranks that fails ends at once, and no exit hook runs: an ordinary exit may
    wait for the other ranks, and these wait for it. torchrun then ends them.
    """
    world = init_distributed(device, timeout)
    try:
        yield world
        all_gather("done")  # a rank that leaves early may break a collective of others
    except BaseException as error:
        has_failed = not isinstance(error, SystemExit) or error.code
        if has_failed and world.size > 1:
            end_this_rank(world, error)
        raise
    finally:
        Loader.kill_processes()
        # gloo's threads need Python's lock (GIL) to end their work. If a DDP object is
        # freed before they have, it holds the lock and waits for them: a hang.
        time.sleep(0.1)
        # DDP: without it NCCL complains, and the exit may hang.
        dist.destroy_process_group()


def end_this_rank(world, error):
    try:
        Loader.kill_processes()
        ErrorHandler().record_exception(error)  # for the summary of torchrun
        reason = traceback.format_exc()
        if isinstance(error, SystemExit):  # of sys.exit("text"): one line is enough
            reason = error.code
        print(f"error: rank {world.rank}: {reason}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # The others fail as soon as this rank is gone. torchrun names who failed first,
        # but counts whole seconds: so stay for more than one.
        time.sleep(1.1)
    finally:
        os._exit(1)


def init_distributed(device="auto", timeout=600):
    """Join the process group. All ranks call it. timeout: seconds to wait for others.

    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without
    them this process is alone, in a group of one.
    """
    launched = "RANK" in os.environ
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ["WORLD_SIZE"]) if launched else 1
    device = choose_device(device, size)
    backend = "gloo"
    if device.type != "cpu" and size > 1:
        # Tensors on the CPU go through gloo, also if the model is on a GPU: the stop
        # signal must not wait for what the GPU still has to do.
        backend = dist.get_default_backend_for_device(device.type)
        backend = f"cpu:gloo,{device.type}:{backend}"
    # DDP: the ranks meet here.
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=size,
        store=None if launched else dist.HashStore(),  # alone: no address is needed
        timeout=datetime.timedelta(seconds=timeout),
    )
    return World(rank, size, device)


def choose_device(name, size):
    """DDP: local rank i takes GPU i of its machine. "auto": without a GPU the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch finds no GPU here")
    if name == "cpu" or accelerator is None:
        return torch.device("cpu")
    if accelerator.type == "mps" and size > 1:
        return torch.device("cpu")  # the ranks cannot share the GPU of a Mac
    gpus = torch.accelerator.device_count()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= gpus:
        # Slurm may show each process one GPU alone: then set LOCAL_RANK=0 for all.
        sys.exit(f"local rank {local_rank}, but {gpus} GPUs: start fewer processes")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def all_gather(value):
    """[value of rank 0, value of rank 1, ...]. All ranks call it, and wait for all."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_alike(settings):
    """End all ranks if their {name: value} differ: they would hang, or train nonsense.

    All ranks call it.
    """
    everyone = all_gather((socket.gethostname(), settings))
    host0, settings0 = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        for name, value in settings0.items():
            if other.get(name) != value:
                here = f"{other.get(name)} on rank {rank} ({host})"
                sys.exit(f"{name} is {here}, but {value} on rank 0 ({host0})")


class StopSignal:
    """stop() tells whether any rank has got a signal to stop: Ctrl-C is SIGINT.

    All ranks call it after each step, and get the same answer: so they stop at the same
    step. A stop during an evaluation waits for its end, and for one step more.
    torchrun hands on all of these but SIGUSR1, and kills the ranks after 30 s: see its
    --signals-to-handle and --shutdown-timeout.
    """

    NUMBERS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1

    def __init__(self):
        self.received = 0  # the signal that this rank has got
        self.parent = os.getppid()
        for number in self.NUMBERS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.remember)

    def remember(self, number, frame):
        self.received = number

    def __call__(self):
        """The number of the signal, or 0. All ranks call it."""
        if dist.is_torchelastic_launched() and os.getppid() != self.parent:
            # torchrun was killed. Nobody would look after this rank.
            self.received = signal.SIGTERM
        flag = torch.tensor(int(self.received))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag.item()


# ---- CHECKPOINT ----------------------------------------------------------------------
def write_whole(path, content):
    """torch.save(), but at any moment there is a whole file: the old one or the new.

    The new file is written beside the old one, and then gets its name.
    """
    beside = path.with_suffix(".tmp")
    try:
        with open(beside, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:
        beside.unlink(missing_ok=True)
        sys.exit(f"cannot save {path} (the old one is intact): {error}")


def lock(path, wait=10):
    """An open file that no other process has locked, or SystemExit.

    wait: seconds. A run that was just killed may need some to end.
    """
    file = open(path, "a")
    for _ in range(wait):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except (BlockingIOError, PermissionError):
            time.sleep(1)
        except OSError as error:  # some network disks have no locks
            print(f"warning: {path} cannot be locked: {error}", file=sys.stderr)
            return file
    sys.exit(f"the folder {path.parent} is in use by another run")


class Checkpoint:
    """checkpoint.pt in a folder, to resume from. All ranks construct it.

    parts: {name: anything with state_dict() and load_state_dict()}.
    A part cannot have the name of a plain value: step, epoch, must_match, time, ...
    must_match: {name: value}. A checkpoint with other values is refused.
    """

    def __init__(self, folder, parts, must_match, world):
        self.path = Path(folder) / "checkpoint.pt"
        self.parts = parts
        self.must_match = must_match
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if world.rank == 0:
                # It is locked as long as this file is open.
                self.lock_file = lock(self.path.with_name(".lock"))
        except OSError as error:
            sys.exit(f"the folder {folder}: {error}")

    def save(self, step, **values):
        """Write all parts, and values that are plain Python. Rank 0 alone calls it."""
        content = {name: part.state_dict() for name, part in self.parts.items()}
        # Two nodes may have files of the same step: the time tells which is newer.
        content.update(values, step=step, must_match=self.must_match, time=time.time())
        write_whole(self.path, content)

    def resume(self):
        """Load the checkpoint with the most steps that any rank has. All ranks call it.

        Returns its plain values, or {} if there is none.
        """
        content = self.read()
        found = all_gather((content.get("step", 0), content.get("time", 0)))
        best = max(found)
        if best[0] == 0:
            return {}
        if min(found) < best:
            # Without a shared disk the nodes have different files, or none. One rank
            # that has the best one sends it to all.
            box = [content]
            dist.broadcast_object_list(box, src=found.index(best))
            content = box[0]
        for name, value in self.must_match.items():
            old = content["must_match"].get(name)
            if old != value:
                where = f"{self.path} has {name} {old}, not {value}"
                sys.exit(f"{where}: take another --out")
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
            # mmap: not all of it is in memory. A later save does not change this file.
            content = torch.load(self.path, "cpu", weights_only=True, mmap=True)
            if not {"step", "time", "must_match"} <= set(content):
                raise ValueError("another program has written it")
            return content
        except Exception as error:  # zipfile, pickle and torch raise all kinds
            sys.exit(f"{self.path} cannot be loaded: {error!r:.200}")


# ---- LOG -----------------------------------------------------------------------------
class Log:
    """Lines on the terminal, and in metrics.jsonl. It does nothing on other ranks."""

    def __init__(self, folder, world):
        self.path = Path(folder) / "metrics.jsonl"
        self.is_on = world.rank == 0

    def write(self, step, **values):
        """values: {name: number}. To use another logger, call it here.

        A run that was killed repeats some steps: the last values of a step count.
        """
        if self.is_on:
            try:
                with open(self.path, "a") as file:
                    file.write(json.dumps({"step": step, **values}) + "\n")
            except OSError as error:  # a full disk: training goes on
                self.say(f"cannot write {self.path}: {error}")
        numbers = [f"{name} {value:.5g}" for name, value in values.items()]
        self.say("  ".join([f"step {step}", *numbers]))

    def say(self, line):
        if self.is_on:
            # Ctrl-C at `... | tee log` ends tee, too. Then this fails. But the run must
            # go on until it has saved.
            with contextlib.suppress(OSError):
                os.write(1, f"{line}\n".encode())


# ---- OPTIONS -------------------------------------------------------------------------
# A resumed run must have the same values of these as its checkpoint.
SAME_AS_CHECKPOINT = "seed layers heads dim seq_len".split()
# The ranks must have the same values of all options but these.
MAY_DIFFER_BETWEEN_RANKS = "data out device workers local_rank".split()


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
    add("--layers", type=positive_int, default=2, help="transformer blocks")
    add("--heads", type=positive_int, default=4, help="attention heads")
    add("--dim", type=positive_int, default=128, help="width of the model")
    add("--seq_len", type=positive_int, default=128, help="bytes per sample")
    add("--dropout", type=share, default=0.0, help="dropout probability")
    add("--out", default="out", help="folder of the checkpoint; resumes there")
    add("--epochs", type=positive_int, default=3, help="passes over the data")
    add("--max_steps", type=positive_int, help="end sooner; --lr follows --epochs")
    add("--batch_size", type=positive_int, default=32, help="samples of a rank's batch")
    add("--accum", type=positive_int, default=1, help="batches per optimizer step")
    add("--lr", type=positive_float, default=2e-3, help="highest learning rate")
    add("--warmup", type=share, default=0.05, help="share of the run with rising rate")
    add("--grad_clip", type=positive_float, default=1.0, help="1e9: no clipping")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="GPUs use TF32")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--workers", type=natural_int, default=0, help="loading processes per rank")
    add("--seed", type=int, default=0, help="of weights, order and dropout")
    add("--log_every", type=positive_int, default=20, help="steps")
    add("--eval_every", type=positive_int, help="steps; also after each epoch")
    add("--save_every", type=positive_int, default=100, help="steps")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    add("--timeout", type=positive_int, default=600, help="seconds to wait for a rank")
    # The old launcher, torch.distributed.launch, passes this. It is not used.
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# argparse calls these, and turns a ValueError into one clear line.
def positive_int(text):
    if int(text) <= 0:
        raise ValueError
    return int(text)


def natural_int(text):
    if int(text) < 0:
        raise ValueError
    return int(text)


def positive_float(text):
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


def share(text):
    if not 0 <= float(text) < 1:
        raise ValueError
    return float(text)


def main(argv=None):
    """Exit code: 0 done, 1 failed, 2 bad option, 128 + N stopped by signal N.

    Under torchrun a rank that was stopped ends with 0, like one that is done: after
    another code torchrun may start the ranks again. The last line tells which it was.
    """
    args = parse_args(argv)
    with distributed(args.device, args.timeout) as world:
        stopped_by = train(args, world)
    if stopped_by and not dist.is_torchelastic_launched():
        sys.exit(128 + stopped_by)


if __name__ == "__main__":
    main()
