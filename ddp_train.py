# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "numpy"]
# ///
"""Data-parallel training in PyTorch, in one file.

    python ddp_train.py                                     one process, CPU or GPU
    torchrun --standalone --nproc_per_node=4 ddp_train.py   four processes, four GPUs
    MASTER_ADDR=10.0.0.1 NNODES=2 ./run_multi_node.sh       two machines: on each

What DistributedDataParallel (DDP) does: each process, called a rank, has the whole
model, and reads its own share of the samples. During backward() DDP averages the
gradients over all ranks. So every optimizer takes the same step, and the copies of the
model stay equal. Three things are left to the training script, and this file is about
them:

  1. All ranks start alike: with the same weights, options and data set.
  2. All ranks take part in each collective (all-reduce, broadcast, ...), in the same
     order. If one rank is missing, the others wait for it.
  3. Each sample and its loss is counted once, and each file is written once.

The first half is the program: MODEL, DATA, ONE STEP, THE RUN, OPTIONS and main(), where
it starts. The second half has the tools that it calls. Replace MODEL and DATA with
yours, and their options in OPTIONS. The same command again continues a run that was
stopped. It runs on Linux and macOS.
"""

import argparse
import contextlib
import datetime
import fcntl
import gc
import io
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

# DDP imports this in any case. If that happens after the process group was made, the
# group is never freed, and the interpreter may crash when it exits. So import it first.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


# ---- MODEL ---------------------------------------------------------------------------
# Replace it. The rest of the file calls these three functions. A batch is a tensor with
# one row per sample, or a list or dict of such. (Tuples of the data set become lists.)
#   build_model(args)            returns a module
#   compute_loss(model, batch)   returns the mean of the samples' losses, for training
#   score(model, batch)          returns {name: sum over the samples of the batch}, as
#                                tensors; evaluate() divides by the number of samples
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
        seq_len = x.shape[1]
        x = self.embed(x.long()) + self.position.weight[:seq_len]
        return self.head(self.norm(self.blocks(x)))


def build_model(args):
    if args.dim % args.heads != 0:
        sys.exit(f"--dim {args.dim} is not divisible by --heads {args.heads}")
    shape = args.layers, args.heads, args.dim, args.seq_len
    return ByteTransformer(*shape, args.dropout)


def compute_loss(model, batch):
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten().long())


def score(model, batch):
    x, _ = batch
    loss_sum = compute_loss(model, batch) * len(x)
    return {"val_loss": loss_sum, "bits_per_byte": loss_sum / math.log(2)}


# ---- DATA ----------------------------------------------------------------------------
# Replace it. load_data(args) returns two map-style datasets, and a short text about the
# data. The ranks compare this text, and so does a resumed run: other text, other data.
def load_data(args):
    """Training set, held-out set (the last 5 % of --data), and the text.

    Sample i has seq_len bytes, and as its target the same bytes, shifted by one.
    """
    path = Path(args.data or os.path.dirname(os.__file__))
    try:
        if path.is_dir():
            # By default, the files of Python's own library, without its packages.
            pattern = "**/*" if args.data else "*.py"
            files = sorted(file for file in path.glob(pattern) if file.is_file())
            text = b"".join(file.read_bytes() for file in files)
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        else:
            # The file is mapped into memory: all processes of a machine share it.
            size = path.stat().st_size
            data = torch.from_file(str(path), size=size, dtype=torch.uint8)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"--data {path}: {error}")
    window = args.seq_len + 1
    held_out = max(len(data) // 20, window)
    if len(data) < held_out + window:
        sys.exit(f"--data {path}: {len(data)} bytes, but two windows have {2 * window}")
    datasets = []
    for part in (data[:-held_out], data[-held_out:]):
        # Windows of seq_len + 1 bytes, one every seq_len bytes. Nothing is copied.
        windows = part.unfold(0, window, args.seq_len)
        datasets.append(TensorDataset(windows[:, :-1], windows[:, 1:]))
    # Only the first 64 MiB, to start quickly. It is enough to notice a wrong file.
    checksum = zlib.crc32(data[: 64 * 2**20].numpy())
    return *datasets, f"{len(data)} bytes, CRC-32 {checksum:08x}"


# ---- ONE STEP ------------------------------------------------------------------------
def train_step(ddp, batches, step_samples, optimizer, scaler, autocast, args, world):
    """One optimizer step. All ranks call it.

    batches: the iterator of real_batches(). step_samples: the number of samples of this
    step, on all ranks and in all its micro-batches together. `batches` must have at
    least so many left.
    Returns the sum of the losses of this rank's samples, and the norm of the gradient.
    """
    loss_sum = 0.0
    samples_left = step_samples
    while samples_left > 0:
        # real: how many samples of this batch count. If 0, this rank has none left, but
        # joins in with a filler. total: the sum of `real` over all ranks.
        batch, real, total = next(batches)
        samples_left -= total
        # DDP averages the gradients over the ranks in backward(). With several
        # micro-batches it is enough to do that once, in the last one.
        with local_gradients(ddp, samples_left > 0):
            with autocast:
                loss = compute_loss(ddp, batch)
            # The loss of the step is the sum of the losses of all its samples, divided
            # by step_samples. This batch adds loss * real to that sum. And as DDP
            # divides by the number of ranks, we multiply by it.
            weight = real / step_samples * world.size
            scaler.scale(loss * weight).backward()
        loss_sum += loss.detach().float() * real
    # In fp16 the gradients are multiplied by a scale. Undo that, and only then clip.
    scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(ddp.parameters(), args.grad_clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss_sum, grad_norm


def local_gradients(ddp, more_to_come):
    """A context in which DDP does not average the gradients, if more batches come.

    Without a process group `ddp` is the bare model, which has nothing to average.
    """
    if more_to_come and hasattr(ddp, "no_sync"):
        return ddp.no_sync()
    return contextlib.nullcontext()


@torch.no_grad()
def evaluate(model, score_fn, loader, world, autocast=None):
    """{name: sum of score_fn(model, batch) over all batches / number of samples}.

    All ranks call it, and get the same numbers. Each sample counts once. Give it the
    model itself: DDP would send the running means of batch norm in each batch.
    """
    autocast = autocast or contextlib.nullcontext()
    share_buffers(model)
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    sums = []
    for batch, real, _ in real_batches(loader, world.device):
        with autocast:
            scores = score_fn(model, batch)
        names = scores.keys()
        batch_sums = torch.stack(list(scores.values()))
        if real == 0:  # this rank has no sample left, and must not count this one
            batch_sums = torch.zeros_like(batch_sums)
        sums.append(batch_sums)
    # model.train() would also wake up layers that the user keeps in eval mode.
    for module in in_training:
        module.training = True
    totals = all_reduce_sum(torch.stack(sums)).sum(0)
    means = totals / len(loader.dataset)
    return dict(zip(names, means.tolist(), strict=True))


def learning_rate(args, share):
    """Linear warm-up to --lr, then a cosine down to 0.

    share: the part of all --epochs that is done, from 0 to 1, counted in samples. So
    the rate depends neither on the number of ranks nor on --max-steps. train() gives
    the share at the middle of a step: so the rate of the first step is not 0.
    """
    if share < args.warmup:
        return args.lr * share / args.warmup
    after_warmup = (min(share, 1.0) - args.warmup) / (1 - args.warmup)
    return args.lr * (1 + math.cos(math.pi * after_warmup)) / 2


# ---- THE RUN -------------------------------------------------------------------------
def train(args, world, stop):
    """The whole run. All ranks call it. Returns False if a signal stopped it."""
    train_set, val_set, data_text = load_data(args)
    facts = facts_of_run(args, data_text)
    compare_ranks(args, world, facts)

    torch.manual_seed(args.seed)
    model = build_model(args).to(world.device)
    if args.sync_bn:
        if world.device.type == "cpu":
            sys.exit("--sync-bn: torch's SyncBatchNorm does not run on the CPU")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # `model` is the network itself, which is saved and evaluated. `ddp` is trained: the
    # network inside DDP, or the network alone if there is no process group.
    ddp = model
    if dist.is_initialized():
        # Has a rank failed so far? barrier() goes through gloo, which would notice. DDP
        # goes through NCCL on GPUs, which would wait for that rank.
        barrier()
        # DDP copies the weights of rank 0 to all ranks. Bucket views save memory.
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.compile:
        ddp = torch.compile(ddp)  # it still has no_sync()
    # Without fused=True, AdamW with fp16 waits for the GPU in each step.
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    device_type = world.device.type
    scaler = torch.amp.GradScaler(device_type, enabled=args.precision == "fp16")
    dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16
    autocast = torch.autocast(device_type, dtype, enabled=args.precision != "fp32")
    if device_type == "cuda":
        torch.set_float32_matmul_precision("high")  # --precision fp32 is TF32 on GPUs
    loader = make_loader(train_set, args.batch_size, world, args.seed, args.workers)
    val_loader = make_loader(val_set, args.batch_size, world, args.seed, args.workers)

    # The model is saved without DDP, so that any program can load it.
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    checkpoint = Checkpoint(args.out, parts, facts)
    state = checkpoint.resume()
    step = state.get("step", 0)
    samples = state.get("samples", 0)  # that are done, by all ranks together
    epoch_size = len(train_set)
    all_samples = args.epochs * epoch_size
    full_step = args.batch_size * args.accum * world.size
    last_step = args.max_steps or math.inf
    samples_at_end = min(all_samples, samples + full_step * (last_step - step))
    log = Log(world.rank, args.out, step, samples, samples_at_end)
    nodes = len(set(all_gather(socket.gethostname())))
    log.say(f"ranks: {world.size}, nodes: {nodes}, {device_type}, {args.precision}")
    log.say(f"from step {step}, {full_step} samples a step, --lr {args.lr}")
    if state:
        say_if_schedule_changed(log, args, state, epoch_size)
    losses = []  # one per step since the last log line, on the device
    finished = samples >= all_samples or step >= last_step
    # If an evaluation is due at this step, it is made (again): the last start may have
    # ended before it.
    at_end_of_epoch = samples > 0 and samples % epoch_size == 0
    evaluating = at_end_of_epoch or is_due(step, args.eval_every)
    while not finished:
        epoch, start = divmod(samples, epoch_size)
        loader.sampler.set_epoch(epoch, start)  # ours can start in mid-epoch
        batches = real_batches(loader, world.device)
        epoch_ended = False
        while not epoch_ended and not finished:
            if evaluating:
                values = evaluate(model, score, val_loader, world, autocast)
                log.write(step, samples, **values)
            if not losses:  # the speed of the next log line counts from here
                logged_samples = samples
                logged_at = time.perf_counter()
            # No step reaches into the next epoch: the last one may have fewer samples.
            step_samples = min(full_step, (epoch + 1) * epoch_size - samples)
            lr = learning_rate(args, (samples + step_samples / 2) / all_samples)
            for group in optimizer.param_groups:
                group["lr"] = lr
            seed_step(args.seed, step, world.rank, world.device)
            loss_sum, grad_norm = train_step(
                ddp, batches, step_samples, optimizer, scaler, autocast, args, world
            )
            losses.append(loss_sum)
            step += 1
            samples += step_samples

            stopping = stop()  # a signal, or 0: the answer to the call one step ago
            # What is due now? All ranks agree. (The next turn makes the evaluation.)
            epoch_ended = samples % epoch_size == 0
            finished = samples >= all_samples or step >= last_step
            evaluating = epoch_ended or is_due(step, args.eval_every)
            saving = stopping or evaluating or finished or is_due(step, args.save_every)
            # Each save needs a log line, because that checks that the loss is finite.
            if saving or is_due(step, args.log_every):
                # In other steps the CPU does not wait for the GPU. (--sync-bn does.)
                new_samples = samples - logged_samples
                loss = all_reduce_sum(torch.stack(losses)).sum().item() / new_samples
                grad_norm = grad_norm.item()
                check_finite(loss, grad_norm, scaler, step)
                speed = new_samples / (time.perf_counter() - logged_at)
                values = {"loss": loss, "lr": lr, "grad_norm": grad_norm}
                log.write(step, samples, **values, samples_per_s=speed)
                losses = []
            if saving and world.rank == 0:
                # The other ranks wait for this one in their next collective.
                checkpoint.save(step=step, samples=samples, args=vars(args))
            if stopping and not finished:
                log.say(f"stopped by signal {stopping}, saved at step {step}")
                kill_loading_processes()  # else freeing the loader waits for a busy one
                return False
    values = evaluate(model, score, val_loader, world, autocast)
    log.write(step, samples, **values)
    log.say(f"done: step {step}, saved in {checkpoint.path}")
    return True


def is_due(step, every):
    return every is not None and step > 0 and step % every == 0


def check_finite(loss, grad_norm, scaler, step):
    """End the run, unsaved, if it cannot go on. All ranks come to the same answer."""
    finite = math.isfinite(loss)
    if scaler.is_enabled():
        # fp16: if a gradient is infinite, the scaler skips the step, and halves its
        # scale. A scale of almost 0 shows that this does not help.
        finite = finite and scaler.get_scale() > 1e-20
    else:
        finite = finite and math.isfinite(grad_norm)
    if not finite:
        numbers = f"loss {loss}, gradient norm {grad_norm}"
        sys.exit(f"not finite at step {step}, not saved: {numbers}. Try a lower --lr")


def facts_of_run(args, data_text):
    """{name: value} in which a run and its checkpoint must be alike."""
    facts = {option(name): getattr(args, name) for name in SAME_AS_CHECKPOINT}
    facts["--data"] = data_text
    return facts


def compare_ranks(args, world, facts):
    """End all ranks if they do not fit together. All ranks call it."""
    # Besides the facts there is more that the ranks must have in common.
    alike = {"torch": torch.__version__, "the device": world.device.type, **facts}
    alike["the checksum of the program"] = zlib.crc32(Path(__file__).read_bytes())
    for name, value in vars(args).items():
        if name not in MAY_DIFFER_BETWEEN_RANKS:
            alike[option(name)] = value
    check_alike(alike)


def say_if_schedule_changed(log, args, state, epoch_size):
    """Another --epochs, --lr or --warmup makes the learning rate jump. Tell how far."""
    old = argparse.Namespace(**state["args"])
    epochs_done = state["samples"] / epoch_size
    was = learning_rate(old, epochs_done / old.epochs)
    now = learning_rate(args, epochs_done / args.epochs)
    if now != was:
        log.say("other --epochs, --lr or --warmup than before:")
        log.say(f"the learning rate was {was:.3g} and goes on at {now:.3g}")


# ---- OPTIONS -------------------------------------------------------------------------
# A run that goes on must have the same values of these as its checkpoint.
SAME_AS_CHECKPOINT = "seed layers heads dim seq_len".split()
# The ranks must have the same values of all options but these.
MAY_DIFFER_BETWEEN_RANKS = "data out device backend init_method timeout".split()
MAY_DIFFER_BETWEEN_RANKS += "workers spawn local_rank".split()
MAY_BE_ZERO = "dropout warmup grad_clip workers seed local_rank".split()


def parse_args(argv):
    """The options. A mistake ends the process with one line and exit code 2."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    # argparse prints the usage before each error. Without it an error is one line.
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, formatter_class=formatter)
    add = parser.add_argument
    add("--data", metavar="PATH", help="file or folder; else Python's own library")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--heads", type=int, default=4, help="attention heads")
    add("--dim", type=int, default=128, help="width of the model")
    add("--seq-len", type=int, default=128, help="bytes per sample")
    add("--dropout", type=float, default=0.0, help="dropout probability")
    add("--out", default="out", help="folder of the checkpoint; a run there goes on")
    add("--epochs", type=int, default=1, help="passes over the data")
    add("--max-steps", type=int, help="end after so many optimizer steps")
    add("--batch-size", type=int, default=32, help="samples per rank and micro-batch")
    add("--accum", type=int, default=1, help="micro-batches per optimizer step")
    add("--lr", type=float, default=2e-3, help="learning rate after the warm-up")
    add("--warmup", type=float, default=0.05, help="share of the run with rising rate")
    add("--grad-clip", type=float, default=1.0, help="largest gradient norm; 0: any")
    precisions = ("fp32", "bf16", "fp16")
    add("--precision", choices=precisions, default="fp32", help="fp32 on GPUs is TF32")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--sync-bn", action="store_true", help="batch norm over all ranks (GPU)")
    add("--workers", type=int, default=0, help="loading processes per rank")
    add("--seed", type=int, default=0, help="of weights, order and dropout")
    add("--log-every", type=int, default=20, help="steps between two log lines")
    add("--eval-every", type=int, help="steps; it is done after each epoch, too")
    add("--save-every", type=int, default=100, help="steps between two checkpoints")
    devices = ("auto", "cpu", "cuda")
    add("--device", choices=devices, default="auto", help="where to run")
    add("--backend", help="gloo, nccl, ... (default: what torch has for the device)")
    add("--init-method", default="env://", help="env://, tcp://host:port, file:///path")
    add("--timeout", type=float, default=600, help="seconds to wait for another rank")
    add("--spawn", type=int, help="run torchrun here, with so many processes")
    # The old launcher, torch.distributed.launch, passes this. It is not used.
    add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        given = f"{option(name)} {value}"
        if type(value) not in (int, float):
            continue
        if value == 0 and name in MAY_BE_ZERO:
            continue
        if not 0 < value < 2**31:
            parser.error(f"{given} is out of range")
        if name in ("warmup", "dropout") and value >= 1:
            parser.error(f"{given} is out of range: it must be below 1")
    if not args.init_method.startswith(("env://", "tcp://", "file:///")):
        parser.error(f"--init-method {args.init_method}: see --help")
    return args


def option(name):
    """seq_len -> --seq-len"""
    return "--" + name.replace("_", "-")


def main(argv):
    """Train as the command line says.

    Exit code: 0 done, 1 failed, 2 refused by parse_args(), 128 + N stopped by signal N.
    Under torchrun a rank that was stopped ends with 0. torchrun then ends with 0, or
    with 1 if it got the signal itself.
    """
    args = parse_args(argv)
    if args.spawn and "RANK" not in os.environ:
        become_torchrun(args.spawn, argv)
    # Until all ranks are there, Ctrl-C ends the process at once. (Python's own handler
    # does not run while torch waits for other ranks.) Then StopSignal takes over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    world = init_distributed(args.device, args.backend, args.init_method, args.timeout)
    # Now the process group exists. What the ranks do with it stands in this block, and
    # at its end they leave the group together.
    with process_group(world):
        stop = StopSignal()
        finished = train(args, world, stop)
    if not finished:
        stop.exit()


# ======================================================================================
# The tools that the program calls. If it says "all ranks call it", never call it under
# `if world.rank == 0`: most of these functions wait for all ranks.


# ---- PROCESSES -----------------------------------------------------------------------
@dataclass
class World:
    """Which process this is (0 <= rank < size), and where its tensors are."""

    rank: int
    size: int
    device: torch.device


def init_distributed(device="auto", backend=None, url="env://", timeout=600.0):
    """Join the process group that RANK, WORLD_SIZE, ... describe. All ranks call it.

    torchrun sets these variables. Without them there is one process, and no group.
    timeout: seconds to wait for another rank. SystemExit if this rank cannot join.
    """
    rank = os.environ.get("RANK", "0")
    try:
        return join_group(device, backend, url, timeout)
    except (RuntimeError, ValueError, OSError) as error:
        # Some errors of torch have a C++ stack trace behind the message.
        message = str(error).split("Exception raised from")[0]
        line = f"error: rank {rank} cannot start: {' '.join(message.split())}"
        if dist.is_initialized():
            # The group exists: the other ranks have joined. An ordinary exit might wait
            # for them.
            say(line, output=2)
            os._exit(1)
        sys.exit(line)


def join_group(device, backend, url, timeout):
    """The work of init_distributed(). Raises ValueError, or what torch raises."""
    launched = "RANK" in os.environ
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < size:
        raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {size}")
    if size > 1 and not launched:
        raise ValueError(f"WORLD_SIZE is {size}, but RANK is not set: use torchrun")
    device = choose_device(device, rank)
    backend = backend or dist.get_default_backend_for_device(device.type)
    if not dist.is_backend_available(backend):
        raise ValueError(f"--backend {backend}: this torch does not have it")
    if not launched:
        return World(rank, size, device)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # the parent is torchrun
    if url.startswith("tcp://"):
        # torchrun sets this to True. Then rank 0 would not open the port of the URL.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    # To join may take two minutes longer than later waits: some machines start slowly.
    start_limit = datetime.timedelta(seconds=timeout + 120)
    # The store is a small database. In it the ranks tell each other their addresses.
    store, rank, size = next(dist.rendezvous(url, rank, size, timeout=start_limit))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun restarts the ranks, but keeps the store. NCCL leaves this key in it
        # when it fails. New ranks that find the key would end, too.
        store.delete_key("exception_dump")
        # The store also has the addresses of the dead ranks (pytorch issue 135712). So
        # each attempt gets keys of its own. (On several nodes that is not enough: there
        # run_multi_node.sh sets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.)
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = dist.PrefixStore(f"attempt {attempt}", store)
    if device.type != "cpu":
        # Tensors on the CPU go through gloo: stop signals, metrics and names must not
        # wait for what the GPU still has to do.
        backend = f"cpu:gloo,{device.type}:{backend}"
    # NCCL waits a minute for a debugging dump before it gives up. A second is enough.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    gpu = device if device.type == "cuda" else None
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=start_limit,
        device_id=gpu,
    )
    barrier()  # all have joined: from now on a rank that fails breaks no other's start
    # Both backends have the limit of the start now. NCCL keeps it. The CPU's backend,
    # gloo, gets a shorter one, `timeout`. So gloo gives up first: it raises an error,
    # where NCCL aborts the process. torch has no public function for this limit. With
    # TORCH_DISTRIBUTED_DEBUG=DETAIL the backend is inside another one.
    cpu_backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    cpu_backend = getattr(cpu_backend, "wrapped_pg", cpu_backend)
    cpu_backend._set_default_timeout(datetime.timedelta(seconds=timeout))
    return World(rank, size, device)


def choose_device(device, rank):
    """Local rank i takes GPU i of its machine. "auto" without a GPU takes the CPU."""
    gpus = torch.accelerator.device_count()
    if "RANK" in os.environ and torch.backends.mps.is_available():
        gpus = 0  # gloo cannot send the tensors of Apple's GPU
    if device == "cpu" or (device == "auto" and gpus == 0):
        return torch.device("cpu")
    # Kubernetes sets no LOCAL_RANK. Then each machine must have one rank per GPU.
    index = int(os.environ.get("LOCAL_RANK", rank % max(1, gpus)))
    # Slurm may let each process see its own GPU alone, which then has number 0.
    if gpus == 1:
        index = 0
    if index >= gpus:
        raise ValueError(f"there is no GPU {index} among {gpus}: try --device cpu")
    torch.accelerator.set_device_index(index)
    return torch.device(torch.accelerator.current_accelerator().type, index)


def become_torchrun(processes, argv):
    """Replace this process by torchrun, which starts this file in so many processes."""
    threads = max(1, torch.get_num_threads() // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # torchrun reads its option --signals-to-handle from this variable. The ranks get
    # these signals.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGUSR1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={processes}", __file__, *argv]
    os.execv(sys.executable, torchrun)


def die_with_parent():
    """Linux kills this process as soon as its parent has died. Elsewhere: no effect."""
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)


@contextlib.contextmanager
def process_group(world):
    """Put all the work of the ranks inside. They leave together. All ranks call it.

    A rank that fails says why, and ends at once. Your own code may call sys.exit(0)
    inside, on all ranks: that is no failure.
    """
    try:
        yield
    except BaseException as error:
        orderly = isinstance(error, SystemExit) and error.code in (None, 0)
        if not orderly:
            end_at_once(world, error)  # does not return
        # The traceback keeps the variables of train(). One of them is DDP, and DDP
        # holds the group.
        traceback.clear_frames(error.__traceback__)
        leave_group(world)
        raise
    leave_group(world)


def leave_group(world):
    """The orderly end. All ranks call it."""
    try:
        barrier()  # a rank that leaves early may break a collective of the others
    except RuntimeError as error:
        end_at_once(world, error)  # does not return
    kill_loading_processes()
    gc.collect()  # frees DDP, which holds the group, if it is in a reference cycle
    if dist.is_initialized():
        dist.destroy_process_group()


def end_at_once(world, error):
    """The end of a rank that has failed. The others fail in their next collective.

    It must not leave in the ordinary way: destroy_process_group() and the exit of the
    interpreter may wait for the other ranks, and these wait for this one.
    """
    reason = traceback.format_exc()
    if isinstance(error, SystemExit):
        reason = error.code  # the user made a mistake: one line is enough
    message = str(error).lower()
    if dist.is_initialized() and isinstance(error, RuntimeError):
        if "gloo" in message and ("by peer" in message or "broken pipe" in message):
            reason = "another rank has ended; its own message says why"
        elif "timeout" in message or "timed out" in message:
            reason += "Perhaps another rank did not answer within --timeout seconds"
    with contextlib.suppress(OSError):  # os._exit() would lose what was printed
        sys.stdout.flush()
    say(f"error: rank {world.rank}: {reason}", output=2)
    kill_loading_processes()
    os._exit(1)


def kill_loading_processes():
    """The loading processes ignore SIGTERM. So a busy one would delay our exit."""
    # torch has set a handler that raises an error when a loading process was killed.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        process.kill()


def all_gather(value):
    """[value of rank 0, value of rank 1, ...]. All ranks call it."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_reduce_sum(value):
    """The sum of a number or tensor over all ranks: float64, on the CPU.

    All ranks call it, with the same shape. The value itself does not change.
    """
    # If a rank is missing, gloo raises an error here. Without this barrier .cpu() would
    # wait for the GPU, and the GPU for the missing rank.
    barrier()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    total = torch.as_tensor(value, dtype=torch.float64).clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def barrier():
    """All ranks call it, and wait for all. (dist.barrier() waits for the GPU, too.)"""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def share_buffers(model):
    """Give all ranks the buffers of rank 0, such as the running means of batch norm.

    All ranks call it. Each rank has changed its own in its last step.
    """
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def check_alike(facts):
    """End all ranks if their {name: value} differ: they would hang, or train nonsense.

    All ranks call it.
    """
    everyone = all_gather((socket.gethostname(), facts))
    host0, facts0 = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        for name in sorted(facts0.keys() | other.keys()):
            value = other.get(name)
            value0 = facts0.get(name)
            if value != value0:
                here = f"{value} on rank {rank} ({host})"
                sys.exit(f"{name} is {here}, but {value0} on rank 0 ({host0})")


class StopSignal:
    """stop() tells whether any rank has got SIGTERM, SIGINT (Ctrl-C) or SIGUSR1.

    All ranks call stop(), equally often: a rank that calls it alone waits for the
    others. All get the same answer at the same call, so all stop at the same step.
    """

    NUMBERS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1

    def __init__(self):
        self.received = 0  # the signal that this rank has got
        self.received_at = 0.0
        self.agreed = 0  # the signal that all ranks know of
        self.work = None  # the all-reduce that is under way
        self.flag = None  # the tensor of this all-reduce
        for number in self.NUMBERS:
            signal.signal(number, self.remember)

    def remember(self, number, frame):
        if self.received == 0:
            self.received = int(number)
            self.received_at = time.monotonic()
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                say("Ctrl-C: it will save and stop. A second Ctrl-C ends it at once.")
        elif self.received == signal.SIGINT and number == signal.SIGINT:
            # A second Ctrl-C: end at once. (But Python calls this only when torch does
            # not wait for another rank.) One Ctrl-C may arrive twice, from the terminal
            # and from torchrun. So ignore what comes within a second.
            if time.monotonic() - self.received_at > 1:
                os._exit(128 + number)

    def __call__(self):
        """The number of the signal, or 0. All ranks call it.

        An answer takes a moment, and nobody should wait for it. So each call asks the
        other ranks, and their answer comes out of the next call, one step later.
        """
        if not dist.is_initialized():
            self.agreed = self.received
            return self.agreed
        if self.work is not None:
            self.work.wait()
            self.agreed = self.flag.item()
        self.flag = torch.tensor(self.received)
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True)
        return self.agreed

    def exit(self):
        """Call it last. If there was a signal, the exit code is 128 + its number.

        Under torchrun it is 0: after any other code torchrun may start the ranks again.
        """
        if self.agreed and "TORCHELASTIC_RUN_ID" not in os.environ:
            sys.exit(128 + self.agreed)


# ---- BATCHES -------------------------------------------------------------------------
class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can start anywhere in an epoch, on any number of ranks.

    Seed and epoch alone decide the order of the samples. The ranks take turns: with 7
    samples and 2 ranks, these places of the order go to

        rank 0:  0 2 4 6
        rank 1:  1 3 5 0

    The last 0 is a filler: all ranks must take equally many steps. See real_batches().
    """

    def __init__(self, dataset, world, seed=0):
        super().__init__(dataset, world.size, world.rank, seed=seed)
        self.worker_seeds = torch.Generator()
        self.set_epoch(0)

    def set_epoch(self, epoch, start=0):
        """All ranks call it before each epoch.

        start: how many samples of the epoch are done, by all ranks together.
        """
        self.epoch = epoch
        self.start = start
        # DistributedSampler's __len__ returns this: how many samples this rank takes.
        self.num_samples = math.ceil((len(self.dataset) - start) / self.num_replicas)
        # make_loader() gives this generator to torch, to seed the loading processes.
        self.worker_seeds.manual_seed(hash((self.seed, epoch, start, self.rank)))

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        n = len(self.dataset)
        order = torch.randperm(n, generator=generator)
        places = torch.arange(self.num_samples) * self.num_replicas
        places += self.start + self.rank
        return iter(order[places % n].tolist())


def make_loader(dataset, batch_size, world, seed=0, workers=0):
    """A DataLoader for real_batches(). workers: loading processes of this rank."""
    sampler = ResumableSampler(dataset, world, seed)
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        pin_memory=world.device.type == "cuda",
        num_workers=workers,
        # Forked processes share the data in memory with their rank.
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=start_worker,
        generator=sampler.worker_seeds,
    )


def start_worker(number):
    """The first thing that a loading process does."""
    # A stop signal reaches it, too. But its rank needs it until the rank has saved.
    for stop_signal in StopSignal.NUMBERS:
        signal.signal(stop_signal, signal.SIG_IGN)
    # If its rank is killed it must end, too: as its copy, it holds memory of the GPU.
    die_with_parent()


def real_batches(loader, device):
    """Yield (batch, real, total). Each sample of the data set is counted once.

    batch: what the loader gives, on the device. Tuples become lists.
    real: how many samples of it count. 0 if this rank has no sample left, but others
        have: then the batch has one sample as a filler, so that this rank can join in.
        (Only batch norm sees it.)
    total: the sum of `real` over all ranks.
    With 5 samples, 2 ranks and a batch size of 2, (real, total) is first (2, 4) on both
    ranks. Then it is (1, 1) on rank 0, and (0, 1) on rank 1.
    """
    sampler = loader.sampler
    if not isinstance(sampler, ResumableSampler) or loader.drop_last:
        raise TypeError(
            "real_batches() needs a loader of make_loader(), or a DataLoader with "
            "sampler=ResumableSampler(dataset, world), and without drop_last"
        )
    ranks = sampler.num_replicas
    place = sampler.start  # in the epoch, where the next batches of all ranks begin
    for batch in loader:
        total = min(loader.batch_size * ranks, len(sampler.dataset) - place)
        # The sampler gave each rank equally many: on some ranks the last is a filler.
        loaded = math.ceil(total / ranks)
        # Of the places 0 to total - 1 this rank has rank, rank + ranks, and so on.
        real = len(range(sampler.rank, total, ranks))
        kept = max(1, real)
        yield take(batch, loaded, kept, device), real, total
        place += total


def take(batch, loaded, kept, device):
    """The first `kept` of the `loaded` samples of a batch, on the device."""
    if isinstance(batch, torch.Tensor) and batch.shape[:1] == (loaded,):
        return batch[:kept].to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: take(batch[key], loaded, kept, device) for key in batch}
    if isinstance(batch, (tuple, list)):
        return [take(value, loaded, kept, device) for value in batch]
    found = getattr(batch, "shape", batch)
    raise TypeError(
        f"a batch of {loaded} samples has {type(batch).__name__} {found!r:.50}: it "
        f"must be of tensors with {loaded} rows, in tuples, lists or dicts"
    )


def seed_step(seed, step, rank, device):
    """Each rank and step has its own dropout, and after a resume the same as before."""
    number = hash((seed, step, rank))  # of numbers, so it is the same in each process
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)


# ---- CHECKPOINT ----------------------------------------------------------------------
class Checkpoint:
    """checkpoint.pt, and the one before it, in a folder. All ranks construct it.

    parts: {name: anything with state_dict() and load_state_dict()}.
    facts: {name: value} in which a run and its checkpoint must be alike.
    """

    def __init__(self, folder, parts, facts=None):
        self.path = Path(folder) / "checkpoint.pt"
        self.previous = Path(folder) / "checkpoint.prev.pt"
        self.parts = parts
        self.facts = facts or {}
        # Is checkpoint.pt known to be good? Only then save() keeps it as `previous`.
        # find_intact() and save() find it out.
        self.path_is_intact = False
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.rank == 0:
                # The lock is held as long as this object lives.
                self.lock = open(self.path.with_name(".lock"), "a")
        except OSError as error:
            sys.exit(f"the folder {folder}: {error}")
        if self.rank == 0:
            try:
                fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.exit(f"the folder {folder} is in use by another run")
            except OSError as error:  # some network disks have no locks
                say(f"warning: {folder} cannot be locked against a second run: {error}")

    def save(self, step, **values):
        """Write all parts, the step, and other plain values. Rank 0 alone calls it.

        The new file is written beside the old one, and then gets its name. So at any
        moment there is a whole checkpoint. SystemExit if it cannot be saved.
        """
        if self.rank != 0:
            sys.exit("Checkpoint.save() is for rank 0 alone: if world.rank == 0: ...")
        states = {name: part.state_dict() for name, part in self.parts.items()}
        file_id = os.urandom(8).hex()  # tells apart two files of one step
        # dict() raises a TypeError if a name comes twice.
        content = dict(**states, **values, step=step, facts=self.facts, file_id=file_id)
        beside = self.path.with_suffix(".tmp")
        try:
            with open(beside, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            # torch.load() refuses some values that torch.save() takes, such as a Path.
            # Such a file must not replace a good one.
            torch.load(beside, "cpu", mmap=True, weights_only=True)
            if self.path_is_intact:  # else `previous` is the better one
                os.replace(self.path, self.previous)
            os.replace(beside, self.path)
        except Exception as error:  # of the disk, or of a value that is not plain
            with contextlib.suppress(OSError):
                beside.unlink()
            reason = f"{error!r:.300}"
            sys.exit(f"cannot save {self.path}: {reason}; earlier files are intact")
        self.path_is_intact = True

    def resume(self):
        """Load the newest checkpoint that any rank finds. All ranks call it.

        Returns its plain values, or {} if there is none. SystemExit if all files are
        damaged, or the checkpoint is of another run.
        """
        content, path, problem = self.find_intact()
        found = all_gather((content.get("step", -1), content.get("file_id", "")))
        problems = [text for text in all_gather(problem) if text]
        newest = max(found)  # the highest step; of two such files all take the same
        if newest[0] < 0:
            if problems:
                sys.exit(f"{problems[0]}: nothing to go on from, use another folder")
            return {}
        if len(set(found)) > 1:
            # Without a shared disk the nodes may have different files, or none. The
            # rank `source` has the newest, and sends its bytes to all ranks.
            source = found.index(newest)
            file_bytes = [path.read_bytes() if self.rank == source else None]
            dist.broadcast_object_list(file_bytes, source)
            content = torch.load(io.BytesIO(file_bytes[0]), "cpu", weights_only=True)
        where = f"the checkpoint in {self.path.parent}"
        for name, value in self.facts.items():
            old = content["facts"].get(name)
            if old != value:
                sys.exit(f"{where} has {name} {old}, not {value}: use another folder")
        for name, part in self.parts.items():
            if name not in content:
                sys.exit(f"{where} has no {name!r}: use another folder")
            saved = content.pop(name)
            if isinstance(part, torch.amp.GradScaler) and saved == {}:
                continue  # it was not in use
            try:
                part.load_state_dict(saved)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, KeyError) as error:
                sys.exit(f"{where} does not fit {name!r}: {error!r:.300}")
        if self.rank == 0:
            say(f"going on from step {content['step']}: {where}")
        return content

    def find_intact(self):
        """(content, path, problem) of checkpoint.pt, or of the one before it.

        ({}, None, problem) if this rank can read neither. problem: what is wrong with a
        damaged file, or "".
        """
        problem = ""
        for path in (self.path, self.previous):
            if not path.exists():
                continue
            try:
                with zipfile.ZipFile(path) as archive:
                    # torch.load() does not compare the checksums, so we do.
                    damaged_name = archive.testzip()
                    # A flag says which entries of a zip file are folders. It has no
                    # checksum. If it is wrong, torch.load() fills a weight with stray
                    # memory. torch.save() leaves all these flags 0.
                    marked = [file for file in archive.infolist() if file.external_attr]
                if damaged_name or marked:
                    raise ValueError("a checksum or an attribute is wrong")
                # The file is mapped, not read. (save() never writes into an old file.)
                content = torch.load(path, "cpu", mmap=True, weights_only=True)
                if not {"step", "file_id", "facts"} <= content.keys():
                    raise ValueError("it is another kind of file")
            except Exception as error:  # zipfile, pickle and torch raise all kinds
                problem = f"{path} is damaged or not a checkpoint: {error!r:.100}"
                say(f"warning: {problem}")
                continue
            self.path_is_intact = path == self.path
            return content, path, problem
        return {}, None, problem


# ---- LOG -----------------------------------------------------------------------------
class Log:
    """Lines, metrics.jsonl, and TensorBoard if it is installed.

    All ranks call it. It works on rank 0, and does nothing on the others.
    """

    def __init__(self, rank, folder, step, samples, samples_at_end):
        """samples: how many are done. samples_at_end: how many then will be."""
        self.rank = rank
        if rank != 0:
            return
        self.path = Path(folder) / "metrics.jsonl"
        self.first_samples = samples
        self.samples_at_end = samples_at_end
        self.began = time.monotonic()
        self.board = None
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            # What an earlier start has drawn after this step comes again: remove it.
            self.board = SummaryWriter(f"{folder}/tensorboard", purge_step=step + 1)

    def write(self, step, samples, **values):
        """values: {name: number}. To use another logger, call it here."""
        if self.rank != 0:
            return
        record = {"step": step}
        for name, value in values.items():
            record[name] = value
            if not math.isfinite(value):
                record[name] = None  # JSON has no infinity
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")
            if self.board is not None:
                for name, value in values.items():
                    self.board.add_scalar(name, value, step)
                self.board.flush()  # a kill would lose what it still has
        except OSError as error:
            sys.exit(f"cannot write {self.path}: {error}")
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.say(f"step {step}  {numbers}  {self.time_left(samples)} left")

    def time_left(self, samples):
        seconds = time.monotonic() - self.began
        samples_left = max(0, self.samples_at_end - samples)
        samples_done = samples - self.first_samples  # since this start
        if samples_done == 0 and samples_left > 0:
            return "?"
        seconds_per_sample = seconds / max(1, samples_done)
        return datetime.timedelta(seconds=round(seconds_per_sample * samples_left))

    def say(self, line):
        if self.rank == 0:
            say(line)


def say(line, output=1):
    """Print a line at once, even into a file. It is no error if nobody reads it.

    output: 1 is stdout, 2 is stderr.
    Ctrl-C at `... | tee log` ends tee, too, but the run must go on until it has saved.
    print() would keep what it cannot write, and fail again when the interpreter exits.
    """
    with contextlib.suppress(OSError):
        # The line may have the name of a file, which need not be UTF-8.
        os.write(output, f"{line}\n".encode(errors="backslashreplace"))


if __name__ == "__main__":
    main(sys.argv[1:])
