"""Data-parallel training in PyTorch, in one file.

    python ddp_train.py                                     one process, CPU or GPU
    torchrun --standalone --nproc_per_node=4 ddp_train.py   four GPUs on one machine
    torchrun --nnodes=2 --node_rank=R --nproc_per_node=4 --master_addr=HOST ddp_train.py
        two machines with four GPUs each; R is 0 on the machine HOST, 1 on the other

torchrun starts one process per GPU, called a rank; their number is the world size. Each
rank has the whole model, and trains on its own share of each batch. During backward(),
DistributedDataParallel (DDP) averages the gradients over the ranks. So every optimizer
takes the same step, and the copies of the model stay equal. The README shows this in
less than 30 lines: read it first.

The mark "DDP:" is where the ranks communicate, and so does each function that "all
ranks call". All of them must get there, and in the same order. If one does not, the
others wait for it: look at these lines when a run hangs.

--batch_size is per rank. One step trains on batch_size * accum * world size samples,
the global batch: on twice as many ranks, halve --batch_size. Then the training is the
same on any number of ranks, up to rounding, except for dropout, random augmentation,
batch norm and losses that compare samples with each other.

The same command resumes; another --out starts a new run. Ctrl-C and SIGTERM save first;
torchrun then prints a traceback of its own. If one rank fails, all end: look for the
first error, or at torchrun's "Root Cause". After a timeout, that may be a rank which
only waited.

It needs Linux, Python 3.10, torch 2.9 and numpy. For a new project, replace the
sections MODEL and DATA, and name its options in MAY_DIFFER, MUST_NOT_CHANGE, ABOVE_ZERO
and FRACTIONS. For a script of your own, put this file beside it, `import ddp_train as
ddp`, and use the PIECES. Two rules:
  1. Never call what "all ranks call" under `if rank == 0`: the others would wait. All
     ranks need the same number of steps, too.
  2. Whatever decides what happens next (a stop, a learning rate, a best score) must be
     the same on all ranks: compute it from numbers that they all agree on.
"""

import argparse
import contextlib
import copy
import datetime
import fcntl
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import time
import zipfile
import zlib
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, or exit may crash
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


# ---- MODEL: replace it ---------------------------------------------------------------
def add_model_options(parser):
    """Those that a resume must not change are listed in MUST_NOT_CHANGE, in THE RUN."""
    add = parser.add_argument
    add("--layers", type=int, default=2, help="number of transformer blocks")
    add("--heads", type=int, default=4, help="attention heads")
    add("--dim", type=int, default=128, help="width of the model")
    add("--seq_len", type=int, default=128, help="bytes per sample")
    add("--dropout", type=float, default=0.0, help="dropout probability")


class ByteTransformer(nn.Module):
    """(batch, time) bytes -> (batch, time, 256) logits for the next byte."""

    def __init__(self, layers, heads, dim, seq_len, dropout):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.position = nn.Embedding(seq_len, dim)
        nn.init.normal_(self.embed.weight, std=0.02)  # by default 1: too large
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
    """To start from pretrained weights, load them here. A resume replaces them."""
    if args.dim % args.heads != 0:
        sys.exit(f"--dim {args.dim} is not divisible by --heads {args.heads}")
    shape = args.layers, args.heads, args.dim, args.seq_len
    return ByteTransformer(*shape, args.dropout)


def build_optimizer(model, args):
    """If it keeps state in its groups, as Prodigy does, see the end of resume()."""
    return torch.optim.AdamW(model.parameters(), args.lr, fused=True)


def compute_loss(model, batch):
    """The mean over the samples of a batch. model: in training, the DDP object.

    All batches count equally. So with padding, do not return a mean over tokens: a rank
    with 10 of them would weigh as much as one with 1,000 (see examples/lengths.py).
    Every trained weight must contribute to the loss, or DDP fails in the second step.
    """
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten().long())


def score(model, batch):
    """Sums over the batch, and "count": evaluate() divides by the sum of the counts.

    Each is a single number. For a ratio such as errors per word, return both sums, and
    divide the results in validate(). Of a matrix, return each entry by its own name.
    """
    x, _ = batch
    return {"val_loss": compute_loss(model, batch) * len(x), "count": len(x)}


# ---- DATA: replace it ----------------------------------------------------------------
def load_data(args):
    """Training set, validation set (the last 5%), and a string that names the data.

    All ranks call it at the same time, so download the data before the run, not here.
    The run exits if the string, such as a version, differs between ranks or launches.
    """
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


# A list of samples -> a batch. If their lengths differ, pad them in your own function.
collate = torch.utils.data.default_collate


# ---- THE RUN -------------------------------------------------------------------------
# All settings must be the same on all ranks, but for these:
MAY_DIFFER = ["out", "workers", "local_rank"]
# A resume refuses if one of these has changed: the weights of the checkpoint, or its
# place in the data, would mean something else. Of other changes it only prints a line.
MUST_NOT_CHANGE = ["seed", "data", "optimizer", "layers", "heads", "dim", "seq_len"]


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
    seed_all("start", args.seed)  # the same initial weights on all ranks
    train_set, val_set, data_name = load_data(args)
    model = build_model(args).to(device)  # optimize, evaluate and save this one
    if not model.training:
        sys.exit("build_model() returns a model in eval mode: call model.train()")
    optimizer = build_optimizer(model, args)
    optimizer.state_dict()  # some optimizers fail here: better now than at a save
    # What is saved and resumed. To use a torch scheduler, add it here, and step it in
    # place of set_learning_rate().
    parts = {"model": model, "optimizer": optimizer}
    peaks = [group["lr"] for group in optimizer.param_groups]  # of the learning rates
    n = len(train_set)
    global_batch = args.batch_size * args.accum * world_size  # samples per step
    data = f"{n} samples, {len(val_set)} held out, {data_name}"
    settings = describe(args, data, device, optimizer, global_batch)
    check_alike(settings)
    steps_per_epoch = n // global_batch
    if steps_per_epoch < 1:
        sys.exit(f"{n} samples are fewer than one step of {global_batch}")

    # ---- Resume
    folder = Path(args.out)
    path = folder / "checkpoint.pt"
    lock(folder)
    # done: samples of this epoch trained on so far, by all ranks together
    step, epoch, done = resume(path, parts, settings)
    steps_left = (n - done) // global_batch  # in this epoch
    steps_left += (args.epochs - epoch - 1) * steps_per_epoch
    last_step = args.max_steps or step + steps_left
    say(f"ranks: {world_size}, {device.type}, {args.precision}, {n} samples")
    say(f"from step {step} to {last_step}, {global_batch} samples each")
    end = f"done: step {last_step}, saved in {path}"
    if step >= last_step:
        end = "nothing left to train: raise --epochs or --max_steps, or change --out"

    # ---- Distribute
    wrapped = model  # call it to train; its weights are those of model, not a copy
    if world_size > 1:
        # DDP: send rank 0's weights to all. From here on, train with wrapped(...): with
        # model(...) or wrapped.module(...) no gradients are averaged. If a step may
        # leave out some weights, add find_unused_parameters=True. For batch norm over
        # all ranks see docs/special-cases.md.
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.compile:
        wrapped = torch.compile(wrapped)  # for training: evaluate() gets model
    use_bf16 = args.precision == "bf16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=use_bf16)
    loading = loading_options(device, args.workers, args.timeout)
    loading |= {"batch_size": args.batch_size, "collate_fn": collate}
    # Each rank has its own share. With DataLoader(shuffle=True) the shares overlap.
    sampler = ResumableSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)
    # Rank r validates samples r, r + W, r + 2W, ...: each one counts once.
    val_samples = range(rank, len(val_set), world_size)
    val_loader = DataLoader(val_set, sampler=val_samples, **loading)

    def validate():  # all ranks call it
        with autocast:
            means = evaluate(model, score, val_loader, device)
        log(folder, step, means)

    # ---- Train
    stop = StopSignal()
    eval_every = args.eval_every or steps_per_epoch
    results = []  # of the steps since the last log line, kept on the device
    seed_all("load", args.seed, step, rank)  # for workers, which start in the loop
    while step < last_step:
        sampler.set_epoch(epoch, done)  # a new order, the same on all ranks
        batches = iter(loader)
        # To the end of this epoch, or to last_step.
        for _ in range(min(last_step - step, (n - done) // global_batch)):
            if step % eval_every == 0:  # first, so that a resumed run evaluates, too
                validate()
            if not results:
                began = time.perf_counter()
            # For dropout: each rank draws its own. A checkpoint needs no random state,
            # because a resumed run draws the same in this step. (Workers draw others.)
            seed_all("step", args.seed, step, rank)
            progress = get_progress(args, step, epoch, done, n, global_batch)
            set_learning_rate(optimizer, peaks, progress, args.warmup)
            result = train_step(wrapped, batches, optimizer, autocast, args, device)
            results.append(result)
            step += 1
            done += global_batch

            stopped_by = stop.requested()  # the same answer on all ranks
            saving = stopped_by or step == last_step
            # Save before each evaluation, above: it may take long, or fail.
            saving = saving or step % args.save_every == 0 or step % eval_every == 0
            if saving or step % args.log_every == 0:
                check_together(results, model)  # first, so that no NaN is saved
                means = mean_over_ranks(results)
                seconds = (time.perf_counter() - began) / len(results)
                means["lr"] = float(optimizer.param_groups[0]["lr"])
                means["samples_per_s"] = global_batch / seconds
                log(folder, step, means)
                results = []
            if saving:
                states = {name: part.state_dict() for name, part in parts.items()}
                states |= {"epoch": epoch, "done": done, "settings": settings}
                save_checkpoint(path, step, **states)
            if stopped_by:
                say(f"stopped by signal {stopped_by}, saved at step {step}")
                return stopped_by
        epoch, done = epoch + 1, 0  # a resume at the end of an epoch comes here, too
    validate()
    say(end)


def describe(args, data, device, optimizer, global_batch):
    """{name: string}, to compare between ranks, and with those of a checkpoint."""
    settings = dict(vars(args), data=data, device=device.type)
    settings |= {"optimizer": type(optimizer).__name__, "global_batch": global_batch}
    return {k: str(value) for k, value in settings.items() if k not in MAY_DIFFER}


def resume(path, parts, settings):
    """Load what train() has saved, if anything. All ranks call it.

    Returns step, epoch and done.
    """
    saved = load_checkpoint(path)
    if saved is None:
        return 0, 0, 0
    for name, before in saved["settings"].items():
        now = settings.get(name)
        if now != before and name in MUST_NOT_CHANGE:
            sys.exit(f"{path} has {name} {before}, not {now}: use another --out")
        if now != before:
            say(f"{name} is {now}, it was {before}")
    options = [dict(group) for group in parts["optimizer"].param_groups]
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    # The optimizer has loaded its old options, such as the weight decay. Put back those
    # of this launch, but keep the learning rate: a scheduler goes on from it. If your
    # optimizer counts in its groups, as Prodigy does, delete this loop.
    for group, now in zip(parts["optimizer"].param_groups, options):
        group.update(now, lr=group["lr"])
    return saved["step"], saved["epoch"], saved["done"]


def train_step(wrapped, batches, optimizer, autocast, args, device):
    """One optimizer step on args.accum batches. All ranks call it.

    Returns {name: scalar tensor}, for the log. check_together() needs "grad_norm".
    """
    loss_sum = 0.0
    for i in range(args.accum):
        batch = to_device(next(batches), device)
        # Averaging once per step is enough: skip it in all backward() but the last.
        skip = i < args.accum - 1 and dist.get_world_size() > 1
        with wrapped.no_sync() if skip else contextlib.nullcontext():
            # DDP: the call of wrapped sends rank 0's buffers, if there are any, and the
            # last backward() averages the gradients. All batches on all ranks have as
            # many samples, so this is the mean over all samples of the step.
            with autocast:
                loss = compute_loss(wrapped, batch)
            (loss / args.accum).backward()
        loss_sum += loss.detach().float()
    # The gradients are averaged, so all ranks have the same norm and clip the same way.
    max_norm = args.grad_clip or math.inf
    grad_norm = nn.utils.clip_grad_norm_(wrapped.parameters(), max_norm)
    optimizer.step()
    wrapped.zero_grad()  # also weights that are not in the optimizer
    return {"loss": loss_sum / args.accum, "grad_norm": grad_norm}


def get_progress(args, step, epoch, done, n, global_batch):
    """How much of the run is done in the middle of the next step: from 0 to 1.

    With --epochs it counts samples, because a resume may change the global batch. With
    1,001 samples in steps of 100, the third step of the second epoch of three is at
    (1 + 250 / 1000) / 3 = 0.417.
    """
    if args.max_steps:
        return (step + 0.5) / args.max_steps
    used = n - n % global_batch
    part_of_epoch = (done + global_batch / 2) / used
    return (epoch + min(1, part_of_epoch)) / args.epochs


def set_learning_rate(optimizer, peaks, progress, warmup):
    """Linear warm-up to the peaks, then cosine decay to 0. progress: from 0 to 1."""
    if progress < warmup:
        factor = progress / warmup
    else:
        factor = (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2
    for group, peak in zip(optimizer.param_groups, peaks):
        group["lr"] = peak * factor


# ---- PIECES: ranks -------------------------------------------------------------------
# SIGTERM: torchrun, Slurm, containers. SIGINT: Ctrl-C. SIGHUP: a closed terminal.
# SIGUSR1, SIGUSR2: Slurm before the time limit, if asked to, and submitit.
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
STOP_SIGNALS += signal.SIGUSR1, signal.SIGUSR2


@contextlib.contextmanager
def distributed(device="auto", timeout=600):
    """Wrap all distributed code in `with distributed() as device:`, once per process.

    device: "auto", "cpu" or "cuda". timeout: seconds that a collective may take. For a
    user's mistake call sys.exit("message"): it is printed with its rank, without a
    traceback. When one rank has failed and ended, the others fail. A failed rank has
    30 seconds to clean up: then it is killed, even if you catch the error.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    device = init_distributed(device, timeout)
    failed = False
    try:
        yield device
        # DDP: leave together. If a rank left early, those that still wait would fail.
        dist.barrier()
    except BaseException as error:
        failed = dist.get_world_size() > 1
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            error.code = f"error: rank {dist.get_rank()}: {error.code}"
        else:
            get_error_handler().record_exception(error)  # for torchrun's summary
        if failed:
            signal.alarm(30)
            for number in STOP_SIGNALS:  # torchrun will send SIGTERM
                signal.signal(number, signal.SIG_IGN)
            # torchrun blames the earliest failure, but counts in whole seconds. The
            # others fail when this rank has ended, so let them fail a second later.
            time.sleep(1.1)
        raise
    finally:
        kill_workers()
        if not failed:  # otherwise destroying the group may wait for the other ranks
            # Freeing a DDP object while gloo's threads still run can hang: it waits for
            # them, and they for Python's lock. Usually it is freed by now. If you keep
            # one, delete it before this block ends (pytorch issue 56297).
            time.sleep(0.1)
            for number, handler in handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)
            dist.destroy_process_group()


def init_distributed(device="auto", timeout=600):
    """Join the process group and return this rank's device. All ranks call it.

    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without
    RANK this process alone is the group.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0))  # of the rank on this machine
        gpus = torch.cuda.device_count()
        if index >= gpus:
            sys.exit(f"local rank {index} needs a GPU, but torch finds {gpus} here")
        device = f"cuda:{index}"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        # NCCL sends GPU tensors. Small numbers go as CPU tensors, by gloo: it does not
        # wait for a busy GPU.
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        if os.environ["RANK"] == "0":
            place = f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}"
            print(f"rank 0 waits for all ranks at {place}", flush=True)
        # DDP: join the other ranks.
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    else:
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
            if int(os.environ.get(name, 1)) > 1:  # set by mpirun or srun
                use = "torchrun, or run_multi_node.sh as one task per node"
                sys.exit(f"{name} is set, but each run would train alone: use {use}")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return torch.device(device)


def all_gather(value):
    """[value of rank 0, of rank 1, ...], pickled: no gradients. All ranks call it."""
    values = [None] * dist.get_world_size()
    # DDP: each rank sends its value to all.
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


# ---- PIECES: batches -----------------------------------------------------------------
class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can resume mid-epoch, on any number of ranks.

    The order depends only on the seed and the epoch. Rank r of W gets positions r, r+W,
    r+2W, ... of it. So the samples done so far are always the first ones of the order.
    """

    def __init__(self, dataset, seed):
        super().__init__(dataset, seed=seed)
        self.start = 0

    def set_epoch(self, epoch, start=0):
        """Call it before each epoch. start: samples of it done so far, by all ranks."""
        super().set_epoch(epoch)
        self.start = start

    def __len__(self):
        return max(0, len(self.dataset) - self.start) // self.num_replicas

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator, device="cpu")
        mine = order[self.start + self.rank :: self.num_replicas][: len(self)]
        return iter(mine.tolist())


def to_device(batch, device):
    """A batch with its tensors on the device: also those in dicts, lists and tuples."""
    if callable(getattr(type(batch), "to", None)):  # a tensor, or a library's own batch
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        moved = copy.copy(batch)  # of the same class: batch.x may work, too
        for name, value in batch.items():
            moved[name] = to_device(value, device)
        return moved
    if isinstance(batch, (list, tuple)):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def seed_all(*values):
    """Seed torch (CPU and GPUs), numpy and random with a hash of these values."""
    seed = zlib.crc32(repr(values).encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def loading_options(device, workers, timeout=600):
    """Options for a DataLoader of a picklable dataset. timeout: seconds for a batch."""
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
        os._exit(1)  # the rank was killed while this started: torch would not notice


def kill_workers():
    """Kill daemon processes. Workers ignore SIGTERM, so Python's exit would hang."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


# ---- PIECES: numbers -----------------------------------------------------------------
def mean_over_ranks(results):
    """[{name: number or tensor}], one per step -> {name: mean over steps and ranks}.

    All ranks call it, with the same names in each step. It waits for the GPU. For a
    single number: mean_over_ranks([{"loss": loss}])["loss"].
    """
    names = list(results[0])
    check_alike({"the log": f"{len(results)} steps of {names}"})
    rows = [[float(row[name]) for name in names] for row in results]
    means = torch.tensor(rows, dtype=torch.float64, device="cpu").mean(0)
    # DDP: add up the means of all ranks. Otherwise the log has only rank 0's loss.
    dist.all_reduce(means)
    return dict(zip(names, (means / dist.get_world_size()).tolist()))


def check_together(results, model):
    """Exit if the ranks' models have diverged, or are not finite. All ranks call it.

    DDP keeps them equal, unless a step bypasses it, or a rank changes its own weights.
    Compared are each weight's norm, and that of the gradient, results[-1]["grad_norm"].
    """
    names = [*dict(model.named_parameters()), "the gradient"]
    norms = [weight.detach().float().norm() for weight in model.parameters()]
    norms = [*torch.stack(norms).tolist(), float(results[-1]["grad_norm"])]
    for name, *of_ranks in zip(names, *all_gather(norms)):  # on rank 0, rank 1, ...
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
        saved_names = model.state_dict().keys()  # other buffers may have any size
        for name, buffer in model.named_buffers():
            if name in saved_names:
                sent = buffer.contiguous()  # NCCL needs that
                # DDP: rank 0 sends its buffer to all.
                dist.broadcast(sent, src=0)
                buffer.copy_(sent)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    sums = {}
    for batch in loader:
        for name, value in score_fn(model, to_device(batch, device)).items():
            value = torch.as_tensor(value, dtype=torch.float64, device=device)
            sums[name] = sums.get(name, 0) + value
    for module, was_training in modes:  # a frozen layer stays in eval mode
        module.train(was_training)
    # Add up the sums of all ranks. One without a batch has none.
    total = {}
    for row in all_gather({name: float(value) for name, value in sums.items()}):
        for name, value in row.items():
            total[name] = total.get(name, 0) + value
    count = total.pop("count") if total else 1
    return {name: value / count for name, value in total.items()}


def say(line):
    """Print a line on rank 0, even if nobody is reading it."""
    # Ctrl-C in `... | tee log` ends tee, too. Then print() would end the run unsaved.
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            os.write(1, os.fsencode(f"{line}\n"))


def log(folder, step, means):
    """Rank 0 prints a line and adds it to metrics.jsonl. means: {name: number}"""
    if dist.get_rank() > 0 or not means:
        return
    say("  ".join([f"step {step}", *[f"{k} {v:.5g}" for k, v in means.items()]]))
    with open(Path(folder, "metrics.jsonl"), "a") as file:
        file.write(json.dumps({"step": step, **means}) + "\n")


# ---- PIECES: checkpoint --------------------------------------------------------------
def save_checkpoint(path, step, **content):
    """Rank 0 writes a file, atomically: you always have the old one or the new one.

    content: tensors and plain Python, such as a state_dict(). All ranks may call it, or
    rank 0 alone.
    """
    if dist.get_rank() > 0:
        return
    beside = Path(f"{path}.tmp")
    try:
        with open(beside, "wb") as file:
            torch.save({"step": step, **content}, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:  # on a full disk torch.save() hides the OSError
        sys.exit(f"cannot save, {path} is the old one: {error.__context__ or error}")
    # Fail now if torch.load() would refuse it later, as it does a numpy number.
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(beside)
    if refused:
        sys.exit(f"torch.load() would refuse {refused}; {path} is the old one")
    os.replace(beside, path)


def load_checkpoint(path):
    """The checkpoint with the most steps on any rank, or None. All ranks call it."""
    content, step = None, -1
    if Path(path).exists():
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip():  # torch.load() does not look at the checksums
                    raise ValueError("a checksum is wrong")
            # weights_only: no code in the file is run.
            content = torch.load(path, "cpu", weights_only=True)
            step = content["step"]
        except Exception as error:  # zipfile, pickle and torch can raise anything
            sys.exit(f"{path} cannot be loaded: {error!r:.200}")
    steps = all_gather(step)
    if min(steps) < max(steps):
        box = [content]
        # DDP: each has its own disk. A rank with the newest file sends it to the rest.
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


# ---- PIECES: stop --------------------------------------------------------------------
class StopSignal:
    """Tracks whether any rank has received a signal to stop. Workers must ignore it.

    torchrun kills the ranks 30 s after it gets a signal (--shutdown-timeout). It passes
    on SIGUSR1 and SIGUSR2 only with --signals-to-handle. Without it they kill torchrun:
    then the ranks notice that it is gone, save and stop.
    """

    def __init__(self):
        self.number = 0
        self.parent = os.getppid()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.receive)

    def receive(self, number, frame):
        is_second = number == self.number == signal.SIGINT
        if is_second and not dist.is_torchelastic_launched():  # torchrun sends it twice
            raise KeyboardInterrupt
        self.number = number
        text = "will save and stop after this step"
        say(f"signal {number}: {text} (kill -9 {os.getpid()} to quit now)")

    def requested(self):
        """The signal's number on any rank, or 0. All ranks call it after each step."""
        if dist.is_torchelastic_launched() and os.getppid() != self.parent:
            self.number = signal.SIGTERM  # torchrun was killed
        number = torch.tensor(int(self.number), device="cpu")
        # DDP: the largest number of any rank, so that all stop at the same step.
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)


# ---- OPTIONS -------------------------------------------------------------------------
ABOVE_ZERO = ["layers", "heads", "dim", "seq_len", "epochs", "max_steps", "batch_size"]
ABOVE_ZERO += ["accum", "lr", "log_every", "eval_every", "save_every", "timeout"]
FRACTIONS = ["dropout", "warmup"]


def parse_args(argv=None):
    formatter = argparse.ArgumentDefaultsHelpFormatter
    usage = "%(prog)s [options], see --help"
    parser = argparse.ArgumentParser(formatter_class=formatter, usage=usage)
    add_model_options(parser)
    add = parser.add_argument
    add("--data", metavar="FILE", help="file to train on; default: Python's help texts")
    add("--out", default="out", help="folder of the checkpoint; resumes from it")
    add("--epochs", type=int, default=3, help="passes over the data")
    add("--max_steps", type=int, help="train to this step, instead of --epochs")
    add("--batch_size", type=int, default=32, help="samples per batch on each rank")
    add("--accum", type=int, default=1, help="batches per optimizer step")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=float, default=0.05, help="fraction of the run for warm-up")
    add("--grad_clip", type=float, default=1.0, help="gradient norm limit; 0: none")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    add("--compile", action="store_true", help="use torch.compile")
    add("--workers", type=int, default=0, help="loading processes per rank and loader")
    add("--seed", type=int, default=0, help="for weights, shuffling, dropout")
    add("--log_every", type=int, default=20, help="steps between log lines")
    add("--eval_every", type=int, help="steps; default: an epoch")
    add("--save_every", type=int, default=100, help="steps; also before evaluating")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    add("--timeout", type=int, default=600, help="seconds to wait for a rank or worker")
    # torch.distributed.launch passes it, but we read LOCAL_RANK.
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if name in ABOVE_ZERO and value is not None and not value > 0:
            parser.error(f"--{name} must be above 0")
        if name in FRACTIONS and not 0 <= value < 1:
            parser.error(f"--{name} must be at least 0, and below 1")
        if name in ("grad_clip", "workers") and not value >= 0:
            parser.error(f"--{name} must not be negative")
        if name in ("data", "out") and value == "":
            parser.error(f"--{name} must not be empty")
    return args


if __name__ == "__main__":
    main()
