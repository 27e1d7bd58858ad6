#!/usr/bin/env python3
"""Check a data-parallel training script on the CPU, without changing it.

    python tests/check.py [options] mine.py --batch_size {32} --out {out}

{32} becomes 32 divided by the number of ranks, so that the global batch stays the same.
{out} becomes a folder that a launch and its relaunch share. Every launch also runs in
its own folder: pass data as absolute paths, or with --link.

torchrun launches the script many times: on two ranks as is; on 1, 2 and 4 ranks
without dropout; on two ranks that are stopped or killed, and launched again; with a
rank that fails; and as two machines. On every rank, check.py watches what goes into the
DDP model, and what the optimizers do to the weights.

    ok      the check has passed
    WRONG   the script trains something different from what it seems to; exit code 1
    LOSES   training steps are lost, which some scripts accept
    note    something could not be judged, or may be intended

Only what runs is checked: choose options for 20 to 100 steps in which every branch
runs. The script sees CHECK=1 in its environment. This file needs Linux and torch alone,
so it can be copied into any project.
"""

import argparse
import atexit
import contextlib
import ctypes
import decimal
import functools
import gc
import json
import math
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import textwrap
import time
import types
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optim
from torch.overrides import TorchFunctionMode

# Each line that it prints, and below it what it means if it is not ok.
# The number is a section of docs/silent-errors.md; H is docs/hangs.md.
LINES = """
ends: it ends [H]
    Does a rank skip a batch, or return early?
    {why}
moves: training changes the weights: {steps} steps [1]
    They stay the same: is the gradient 0? Nothing else was checked.
left: no process is left [H]
    Still alive after the end: {pids}.
steps: all ranks make the same number of steps [H]
    Rank 0 makes {one}, rank 1 {two}.
weights: all ranks have the same weights after each step [1]
    They differ from step {first} on. Does each loss come from the DDP object, and not
    from the model in it? Are all learning rates the same?
buffers: all ranks have the same buffers [1]
    {names} differ. DDP replaces them by rank 0's in the next forward(): compute them
    from the samples of all ranks.
batch norm: each rank has its own batch norm statistics [3]
    Only rank 0's are saved, and small batches train differently.
samples: the ranks train on different samples [2]
    {share:.0%} of rank 0's samples are on rank 1 in the same step. Is there a sampler?
no samples: not judged: whether the ranks train on different samples [2]
    No DDP object gets rows that change from step to step.
order: each epoch has its own order [2]
    The same batches come again after {steps} steps. Is set_epoch() called?
fixed order: each epoch has the same order [2]
    The same batches come again after {steps} steps. Should they be shuffled?
dropout: the ranks use different dropout masks [2]
    They use the same. Seed each rank differently, after the model is built.
float32: compared in float32
    The script fails in float64, so only large differences show.
cannot end: {ranks} ranks: it ends [H]
    It was not compared.
    {why}
no step: not compared: {ranks} rank(s), where it makes no step
gradient: {ranks} ranks: the same gradient in the first step: {off:.0e} [1]
    Is the global batch the same, with {{N}} in the arguments? Is the loss a mean over
    it? Does it compare samples? Does each rank draw its own noise or weights?
training: {ranks} ranks: the same weights after {steps} steps: {off:.0e} [1]
    They differ from step {first} on, and {ranks} ranks make {made} steps. Is the order
    of the samples the same? Does a schedule count the steps of a rank?
printed: {ranks} ranks: the same {pattern} [3]
    {one} and {two}. Is each sample counted once?
not printed: not judged: rank 0 prints nothing like {pattern}
random: not judged: {what} [2]
    Two launches of the same command differ. Seed everything that is random.
stopped: all ranks end [H]
    {why}
signal: SIGTERM stops it [4]
    It trains to its end.
few: not judged: stopping and resuming, which needs three steps
again: launched again, it ends [4]
    {why}
begin: it continues [4]
    Its first weights are those of no earlier step.
all lost: it starts over: all {lost} steps are lost [4]
lost: it continues after step {done}: {lost} steps are lost [4]
    It does not save when it gets SIGTERM.
continues: it continues after step {done} ({lost} lost)
rest: it trains as if nothing had happened: {apart} [4]
    It makes {made} steps; {left} were left. Are the optimizer, the scheduler, the place
    in the epoch, and the seeds restored?
masks: it continues with different dropout masks [4]
    The random generator is not restored, nor is each step seeded.
failure: all ranks end, and the exit code is not 0 [H]
    Does the script catch the error? Still alive: {pids}.
    {why}
machines end: it trains, and ends [2]
    Is LOCAL_RANK taken for RANK?
    {why}
machines: it trains as two ranks on one machine do [2]
    Is LOCAL_RANK taken for RANK, or a seed made from it?
both save: both machines save {names} [4]
    On a shared disk they overwrite each other. Save if dist.get_rank() == 0.
"""
PAGES = {
    "H": "docs/hangs.md",
    "1": 'docs/silent-errors.md, "Loss and gradients"',
    "2": 'docs/silent-errors.md, "Batches and random numbers"',
    "3": 'docs/silent-errors.md, "Evaluation and log"',
    "4": 'docs/silent-errors.md, "Stop and resume"',
}


# ---- In each rank: watch the script --------------------------------------------------
FORK = multiprocessing.get_context("fork")
NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class Watcher:
    """Writes a line of JSON before the first and after each step of an optimizer."""

    def __init__(self, options):
        self.exact = bool(options["dtype"])  # without dropout, to compare ranks
        self.disturbance = options["disturbance"]
        self.rank = int(os.environ["RANK"])
        self.log = open(Path(os.environ["CHECK_LOG"], f"rank{self.rank}.jsonl"), "a")
        self.step = 0
        self.depth = 0  # one optimizer may call another one's step()
        self.optimizers = 0
        self.groups = set()  # of the DDP objects: see forget_everything()
        self.forget()
        wrap(optim.Optimizer, "__init__", self.see_optimizer)
        optim.register_optimizer_step_pre_hook(self.before_step)
        optim.register_optimizer_step_post_hook(self.after_step)
        wrap(torch, "randperm", self.see_shuffle)
        wrap(nn.functional, "batch_norm", self.see_batch_norm)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
            wrap(nn.functional, name, self.see_dropout)
        wrap(nn.functional, "scaled_dot_product_attention", self.see_attention)
        for layer in (nn.RNN, nn.LSTM, nn.GRU):
            wrap(layer, "forward", self.see_recurrent)
        if self.exact:
            wrap(torch.autocast, "__init__", disable_autocast)
        wrap(DistributedDataParallel, "forward", self.see_forward)
        # torch.compile traces what this calls, but not what check.py does in it.
        skip = torch.compiler.disable(recursive=False)
        DistributedDataParallel.forward = skip(DistributedDataParallel.forward)

    def forget(self):
        """What was seen in this step."""
        self.seen = {"samples": [], "buffers": {}, "dropout": None}
        self.seen |= {"batch_norm": False, "shuffles": False}

    # What the script calls. The first argument is the original.
    def see_optimizer(self, create, optimizer, *args, **kwargs):
        create(optimizer, *args, **kwargs)
        optimizer.check_number = self.optimizers
        optimizer.check_started = False
        self.optimizers += 1

    def see_shuffle(self, randperm, *args, **kwargs):
        self.seen["shuffles"] = self.step > 0
        return randperm(*args, **kwargs)

    def see_batch_norm(self, norm, x, mean, var, w=None, b=None, training=False, *more):
        if training and mean is not None:
            self.seen["batch_norm"] = True
            training = not self.exact
        return norm(x, mean, var, w, b, training, *more)

    def see_dropout(self, dropout, x, p=0.5, training=True, inplace=False):
        if training and p > 0:
            self.see_generator()
            training = not self.exact
        return dropout(x, p, training, inplace)

    def see_attention(self, attend, q, k, v, mask=None, dropout_p=0.0, *more, **named):
        mask = named.pop("attn_mask", mask)
        if dropout_p > 0:
            self.see_generator()
            if self.exact:
                dropout_p = 0.0
        return attend(q, k, v, mask, dropout_p, *more, **named)

    def see_recurrent(self, forward, layer, *args, **kwargs):
        if self.exact:
            layer.dropout = 0.0
        return forward(layer, *args, **kwargs)

    def see_generator(self):
        if not torch.compiler.is_compiling() and self.seen["dropout"] is None:
            self.seen["dropout"] = checksum(torch.get_rng_state())

    def see_forward(self, forward, wrapped, *inputs, **named):
        self.groups.add(wrapped.process_group)
        if wrapped.training and torch.is_grad_enabled():
            if not self.seen["samples"]:  # before DDP replaces buffers by rank 0's
                self.seen["buffers"] |= checksums_of_buffers(wrapped.module)
            self.seen["samples"] += checksums_of_rows(tensors_in([inputs, named]))
        return forward(wrapped, *inputs, **named)

    def before_step(self, optimizer, args, kwargs):
        self.depth += 1
        if self.depth == 1:
            self.counts = can_change_weights(optimizer)
        if self.depth == 1 and self.counts and not optimizer.check_started:
            optimizer.check_started = True
            self.write(optimizer, -1)

    def after_step(self, optimizer, args, kwargs):
        self.depth -= 1
        if self.depth == 0 and self.counts:
            self.write(optimizer, self.step)
            self.forget()
            self.step += 1
            self.disturb(*self.disturbance)

    def disturb(self, action, at, pause):
        if action == "stop" and self.rank == 0 and self.step >= at:
            if self.step == at:
                os.kill(os.getppid(), signal.SIGTERM)  # torchrun passes it on
            time.sleep(pause)  # so that it arrives before the end
        if self.rank == 1 and self.step == at:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if action == "fail":
                raise RuntimeError("check.py makes this rank fail")

    def write(self, optimizer, step):
        weights = []
        for group in optimizer.param_groups:
            weights += group["params"]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        record = {
            "step": step,
            "optimizer": optimizer.check_number,
            "bits": [checksum(weight) for weight in weights],
            "weights": [mark(i, weight) for i, weight in enumerate(weights)],
            "gradients": [mark(i, gradient) for i, gradient in enumerate(gradients)],
            "ranks": dist.get_world_size() if dist.is_initialized() else 1,
            **self.seen,
        }
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()


def can_change_weights(optimizer):
    """False for the step by which torch.distributed.checkpoint prepares loading."""
    for group in optimizer.param_groups:
        gradients = [weight.grad for weight in group["params"]]
        if float(group.get("lr", 1)) != 0:
            return True
        if any(mark(0, gradient) for gradient in gradients if gradient is not None):
            return True
    return False


def wrap(owner, name, function):
    """Replace owner.name by function(the original, *args, **kwargs)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return function(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def disable_autocast(create, context, device_type, *args, **kwargs):
    create(context, device_type, enabled=False)


def whole(tensor):
    """On the CPU. All of it, where FSDP has sharded it: then all ranks call this."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def content(tensor):
    """The bytes of a tensor."""
    tensor = whole(tensor).contiguous()
    if tensor.numel() == 0:
        return b""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def checksum(tensor):
    return zlib.crc32(content(tensor))


def mark(i, tensor):
    """A number that depends on every value of a tensor, and on its place."""
    values = whole(tensor).double().flatten()
    places = torch.arange(len(values), dtype=torch.float64)
    return float(values @ torch.cos(0.7 * places + i))


def checksums_of_buffers(model):
    """Without batch norm, whose statistics rightly differ between ranks."""
    checksums = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, NORMS):
            for name, buffer in layer.named_buffers(path, recurse=False):
                checksums[name] = checksum(buffer)
    return checksums


def tensors_in(value):
    """All tensors with rows, in nested lists and dicts."""
    if torch.is_tensor(value) and value.dim() > 0 and value.numel() > 0:
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    found = []
    if isinstance(value, (list, tuple)):
        for entry in value:
            found += tensors_in(entry)
    return found


def checksums_of_rows(tensors):
    """A checksum of each sample: of its row in all tensors of the same length."""
    by_length = {}
    for tensor in tensors:
        data = content(tensor)
        size = len(data) // len(tensor)
        sums = by_length.setdefault(len(tensor), [0] * len(tensor))
        for i in range(len(tensor)):
            sums[i] = zlib.crc32(data[i * size : (i + 1) * size], sums[i])
    return sum(by_length.values(), [])


def watch(script):
    """Run the script in this rank, and watch it."""
    if os.environ["CHECK_PARENT"] != str(os.getppid()):
        sys.exit("torchrun was killed while it started this rank")  # see Launch.kill()
    folder = Path(os.environ["CHECK_LOG"])
    options = json.loads(os.environ["CHECK_OPTIONS"])
    rank = int(os.environ["RANK"])
    # A file for each rank's output. One for all errors, so that the first comes first.
    for descriptor, name in ((1, f"rank{rank}.out"), (2, "errors")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(folder / name, flags), descriptor)
    # Without a seed each launch would differ. A seed in the script replaces this one.
    seed = 0 if options["dtype"] else rank
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    if options["dtype"]:
        torch.set_default_dtype(getattr(torch, options["dtype"]))
    if options["cpu"]:
        pretend_that_the_cpu_is_a_gpu()
    watcher = Watcher(options)
    # Run it as Python does: as the module __main__, which lives until the exit.
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)
    main_module = types.ModuleType("__main__")
    main_module.__file__ = script
    sys.modules["check"] = sys.modules["__main__"]
    sys.modules["__main__"] = main_module
    atexit.register(forget_everything, main_module, watcher)
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(main_module))


def forget_everything(main_module, watcher):
    """Runs at the exit. A global DDP object would keep the threads of gloo alive.

    These may abort the exit: https://github.com/pytorch/pytorch/pull/179291
    Let go of the groups last. If a DDP object is the last to use one, it waits for the
    threads of gloo and holds the GIL, which they need. A group releases the GIL first:
    https://github.com/pytorch/pytorch/pull/154976
    """
    vars(main_module).clear()
    gc.collect()
    watcher.groups.clear()


# ---- --cpu: for a script that asks for CUDA and NCCL ---------------------------------
def on_cpu(value, numbers=False):
    """The CPU instead of a GPU, in nested lists and dicts. numbers: 1 is GPU 1."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value):
        return "cpu"
    if numbers and type(value) is int:
        return "cpu"
    if type(value) in (list, tuple):
        return type(value)([on_cpu(entry, numbers) for entry in value])
    if type(value) is dict:
        return {name: on_cpu(v, name == "device") for name, v in value.items()}
    return value


class OnCpu(TorchFunctionMode):
    """Every torch function that is told to use a GPU uses the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        places = on_cpu(args[1:], numbers=name == "to")
        return function(*args[:1], *places, **on_cpu(kwargs or {}))


def pretend_that_the_cpu_is_a_gpu():
    ranks = max(2, int(os.environ["LOCAL_WORLD_SIZE"]))
    answers = {"is_available": True, "device_count": ranks, "is_bf16_supported": True}
    answers |= {"current_device": 0, "current_device_index": 0}
    answers |= {"current_accelerator": torch.device("cuda")}
    for name in ("set_device", "set_device_index", "synchronize", "empty_cache"):
        answers[name] = None
    for kind in ("cuda", "accelerator"):  # private, and of some versions of torch
        answers[f"_{kind}_graph_capture_health_check"] = None
    for name, answer in answers.items():
        for owner in (torch.cuda, torch.accelerator, optim.Optimizer):
            if hasattr(owner, name):
                wrap(owner, name, functools.partial(always, answer))
    always_gloo = functools.partial(always, "gloo")
    wrap(dist, "get_default_backend_for_device", always_gloo)
    wrap(dist, "init_process_group", join_with_gloo)
    wrap(DistributedDataParallel, "__init__", create_without_gpus)
    wrap(nn.Module, "cuda", stay_on_cpu)
    wrap(nn.Module, "to", move_to_cpu)
    wrap(torch, "load", load_to_cpu)
    wrap(torch.autocast, "__init__", autocast_on_cpu)
    wrap(torch.utils.data.DataLoader, "__init__", without_pinning)
    OnCpu().__enter__()


def always(answer, original, *args, **kwargs):
    return answer


def stay_on_cpu(cuda, module, *args, **kwargs):
    return module


def move_to_cpu(to, module, *args, **kwargs):
    return to(module, *on_cpu(args, numbers=True), **on_cpu(kwargs))


def load_to_cpu(load, file, *args, **kwargs):
    kwargs["map_location"] = "cpu"
    return load(file, **kwargs)


def autocast_on_cpu(create, context, device_type, *args, **kwargs):
    create(context, on_cpu(device_type), *args, **kwargs)


def without_pinning(create, loader, *args, **kwargs):
    kwargs["pin_memory"] = False
    create(loader, *args, **kwargs)


def join_with_gloo(join, backend=None, *args, device_id=None, **kwargs):
    join("gloo", *args, **kwargs)


def create_without_gpus(create, ddp, module, device_ids=None, output_device=None, **k):
    create(ddp, module, **k)


# ---- A launch of the script ----------------------------------------------------------
class Launch:
    """The script, launched by torchrun: by one for each machine. It starts immediately.

    It runs in `folders`; a relaunch passes those of the launch before it. `log` has
    what the ranks have recorded, and everything they said.
    """

    alive = []  # the launches that may have processes

    def __init__(
        self, check, name, ranks=2, machines=1, folders=None, dtype="", **more
    ):
        self.name = name
        self.ranks = ranks
        self.timeout = check.options.timeout
        self.deadline = time.monotonic() + self.timeout
        self.log = check.base / name
        self.log.mkdir()
        self.folders = folders
        if folders is None:
            self.folders = [self.log / f"folder{i}" for i in range(machines)]
        options = {"dtype": dtype, "cpu": check.options.cpu, "disturbance": ["", 0, 0]}
        environment = {
            "CHECK": "1",
            "CHECK_LOG": str(self.log),
            "CHECK_OPTIONS": json.dumps(options | more),
            "CUDA_VISIBLE_DEVICES": "",  # a CPU computes the same bits every time
            "PYTHONPATH": check.python_path,
        }
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        self.processes = []
        Launch.alive.append(self)
        for machine, folder in enumerate(self.folders):
            folder.mkdir(exist_ok=True)
            for path in check.options.link:
                if not (folder / path.name).is_symlink():
                    (folder / path.name).symlink_to(path.resolve())
            words = [f"--nproc-per-node={ranks // machines}", "--local-addr=localhost"]
            if machines == 1:
                words += ["--standalone"]
            else:
                words += [f"--nnodes={machines}", f"--node-rank={machine}"]
                words += ["--master-addr=localhost", f"--master-port={port}"]
            words += [__file__, str(check.options.script.resolve())]
            words += [fill_in(word, ranks, folder) for word in check.options.words]
            # A fork of this process, which has imported torch already.
            said = self.log / f"torchrun{machine}"
            arguments = words, folder, said, environment
            process = FORK.Process(target=become_torchrun, args=arguments)
            process.start()
            self.processes.append(process)

    def left(self):
        """The processes that are still alive."""
        entry = f"CHECK_LOG={self.log}\0".encode()
        pids = [process.pid for process in self.processes if process.is_alive()]
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if entry in path.read_bytes():
                    pids.append(int(path.parent.name))
        return pids

    def end(self):
        """Wait until it ends, but not beyond the timeout. Leaves no process."""
        for process in self.processes:
            process.join(max(0.1, self.deadline - time.monotonic()))
        self.codes = [process.exitcode for process in self.processes]
        self.hangs = None in self.codes
        self.ended_well = not self.hangs and not any(self.codes)
        for _ in range(50):  # a process may need a moment to exit
            self.stayed = self.left()
            if self.hangs or not self.stayed:
                break
            time.sleep(0.1)
        self.kill()
        # What each rank has recorded. The last piece is empty, or half a line.
        lines = [
            self.read(f"rank{i}.jsonl").split("\n")[:-1] for i in range(self.ranks)
        ]
        records = [list(map(json.loads, of_rank)) for of_rank in lines]
        self.starts = {r["optimizer"]: r for r in records[0] if r["step"] < 0}
        self.steps = [[r for r in of_rank if r["step"] >= 0] for of_rank in records]
        self.bits = [[r["bits"] for r in of_rank] for of_rank in self.steps]

    def kill(self):
        while pids := self.left():
            for pid in pids:  # torchrun first: it must not start ranks again
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        Launch.alive.remove(self)

    def read(self, name):
        path = self.log / name
        return path.read_text(errors="replace") if path.exists() else ""

    def why(self):
        """What helps most: the first traceback, or the last words."""
        text = f"It does not end within {self.timeout} s (--timeout).\n" * self.hangs
        counts = [len(steps) for steps in self.steps]
        text += f"Steps on each rank: {counts}. Exit codes of torchrun: {self.codes}.\n"
        for name in ("errors", "rank0.out", "torchrun0"):
            if self.read(name).strip():
                return text + first_traceback(self.read(name))
        return text


def become_torchrun(words, folder, said, environment):
    """What a forked process does: the same as the command torchrun."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.update(environment)
    os.environ["CHECK_PARENT"] = str(os.getpid())
    output = os.open(said, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    torch.distributed.run.main(words)


def fill_in(word, ranks, folder):
    """{32} becomes 32 divided by the ranks, and {out} a folder."""
    word = re.sub(r"\{(\d+)\}", lambda number: str(int(number[1]) // ranks), word)
    return word.replace("{out}", str(folder / "out"))


def first_traceback(text):
    """Its last lines. Each rank's lines have a prefix of their own."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        prefix, found, _ = line.partition("Traceback (most recent call last)")
        if found:
            own = [line for line in lines[i + 1 :] if line.startswith(prefix)]
            own = [line.removeprefix(prefix) for line in own]
            for last, line in enumerate(own):
                if line.strip() and not line.startswith(" "):
                    return "\n".join(own[max(0, last - 4) : last + 1])
    return "\n".join(lines[-6:])


# ---- The checks ----------------------------------------------------------------------
class Check:
    """All checks of a script. options: those of the command line."""

    def __init__(self, options):
        self.options = options
        self.base = Path(tempfile.mkdtemp(prefix="check-"))
        paths = [".", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.python_path = os.pathsep.join(os.path.abspath(path) for path in paths)
        self.counts = Counter()
        self.dtype = ""
        self.plain = None

    def run(self, title, *launches):
        if not launches:
            return
        print(title, flush=True)
        print(f"  ...    {', '.join(launch.name for launch in launches)}", flush=True)
        for launch in launches:
            launch.end()

    def line(self, word, row, **values):
        """Print a line, and what it means if it is not ok."""
        self.counts[word] += 1
        pattern = rf"^{row}: (.*?)(?: \[(.)\])?\n((?:    .*\n)*)"
        what, page, meaning = re.search(pattern, LINES, re.MULTILINE).groups()
        print(f"  {word:<6} {what.format(**values)}", flush=True)
        if word != "ok":
            text = textwrap.dedent(meaning).format(**values).rstrip()
            text += f"\nMore: {PAGES[page]}" if page else ""
            if text:
                print(textwrap.indent(text.strip(), " " * 9), flush=True)

    def judge(self, passed, row, **values):
        word = "ok" if passed else "WRONG"
        self.line(word, row, **values)

    def as_it_is(self):
        """Returns whether there is something else to check."""
        run = Launch(self, "two-ranks")
        self.untouched = run
        self.run("Two ranks, as is", run)
        name = self.options.script.name
        one, two = run.steps
        last_words = run.why().splitlines()[-1].lower()
        wants_gpu = re.search("cuda|nccl|nvidia|accelerator|gpu", last_words)
        if not one and wants_gpu and not self.options.cpu:
            sys.exit(f"{name} needs GPUs, but the check hides them: add --cpu")
        if not one and run.ended_well:
            sys.exit(f"{name} makes no step of a torch optimizer: nothing to check")
        if one and one[0]["ranks"] == 1:
            sys.exit(f"{name}: every rank trains alone: call init_process_group()")
        if not run.ended_well:
            self.line("WRONG", "ends", why=run.why())
            return False
        moved = [run.starts[x["optimizer"]]["bits"] != x["bits"] for x in one]
        self.judge(any(moved), "moves", steps=len(one))
        if not any(moved):
            return False
        self.judge(not run.stayed, "left", pids=run.stayed)
        self.judge(len(one) == len(two), "steps", one=len(one), two=len(two))
        pairs = list(zip(one, two, strict=False))
        differ = [a["step"] for a, b in pairs if a["bits"] != b["bits"]]
        self.judge(not differ, "weights", first=differ[:1])
        names = set()
        for a, b in pairs:
            names |= {name for name, _ in a["buffers"].items() ^ b["buffers"].items()}
        if names:
            self.line("WRONG", "buffers", names=sorted(names))
        if any(step["batch_norm"] for step in one):
            self.line("note", "batch norm")
        self.check_samples(one, two)
        masks = [(a["dropout"], b["dropout"]) for a, b in pairs if a["dropout"]]
        if masks:
            self.judge(all(a != b for a, b in masks), "dropout")
        return True

    def check_samples(self, one, two):
        a = [Counter(step["samples"]) for step in one]
        b = [Counter(step["samples"]) for step in two]
        total = sum(len(step["samples"]) for step in one)
        shared = shared_rows(a, b)
        by_chance = shared_rows(a, b[1:])  # rows that all steps have, or few values
        if total == by_chance:
            self.line("note", "no samples")
            return
        share = (shared - by_chance) / (total - by_chance)
        self.judge(share < 0.2, "samples", share=share)
        samples = [step["samples"] for step in one]
        for steps in range(2, len(samples) // 2 + 1):
            if samples[steps:] == samples[:-steps]:
                if any(step["shuffles"] for step in one):
                    self.line("WRONG", "order", steps=steps)
                else:
                    self.line("note", "fixed order", steps=steps)
                return

    def any_number_of_ranks(self):
        """Without dropout. self.plain: the launch that disturbed ones must match."""
        numbers = self.options.ranks
        for self.dtype in ("float64", "float32"):
            name = f"ranks-{self.dtype}"
            runs = [Launch(self, f"{n}-{name}", n, dtype=self.dtype) for n in numbers]
            self.run(f"Without dropout, on {numbers} ranks", *runs)
            if all(run.ended_well for run in runs):
                break
        self.plain = runs[numbers.index(2)]
        if self.dtype == "float32" and len(runs) > 1:
            self.line("note", "float32")
        trained = [run for run in runs if run.ended_well and run.steps[0]]
        for run in runs:
            if not run.ended_well:
                self.line("WRONG", "cannot end", ranks=run.ranks, why=run.why())
            elif run not in trained:
                self.line("note", "no step", ranks=run.ranks)
            elif run is not trained[0]:
                self.compare_training(trained[0], run)
        if self.plain not in trained:
            self.plain = None

    def compare_training(self, first, run):
        limits = {"float64": (1e-6, 1e-5), "float32": (1e-3, 5e-2)}
        gradient_limit, limit = limits[self.dtype]
        expected = first.steps[0][0]["gradients"]
        gradient = distance(expected, run.steps[0][0]["gradients"])
        gradient /= math.hypot(*expected) or 1.0
        far, where = drift(first.steps[0], run.steps[0], first, limit)
        steps = len(first.steps[0])
        trained = where is None and steps == len(run.steps[0])
        values = {"ranks": run.ranks, "steps": steps, "made": len(run.steps[0])}
        if not (trained and gradient < gradient_limit) and not self.is_reproducible:
            self.line("note", "random", what=f"{run.ranks} ranks")
            return
        self.judge(gradient < gradient_limit, "gradient", off=gradient, **values)
        self.judge(trained, "training", off=far, first=where, **values)
        if not trained:  # then the numbers differ, too
            return
        for pattern in self.options.compare:
            one = printed(first, pattern)
            two = printed(run, pattern)
            values = {"ranks": run.ranks, "pattern": pattern}
            same = len(one) == len(two) and all(map(self.agree, one, two))
            if one or two:
                self.judge(same, "printed", one=one[-3:], two=two[-3:], **values)
            else:
                self.line("note", "not printed", pattern=pattern)

    def agree(self, one, two):
        """Whether two printed numbers are the same, but for the last digit."""
        if "." not in one or self.dtype == "float32":
            return math.isclose(float(one), float(two), rel_tol=1e-2)
        digits = decimal.Decimal(one).as_tuple()
        unit = 10.0**digits.exponent
        return abs(float(one) - float(two)) <= max(1.5 * unit, 1e-6 * abs(float(one)))

    @functools.cached_property
    def is_reproducible(self):
        run = Launch(self, "two-ranks-repeated")
        self.run("Is it random? The same command again", run)
        return run.bits[0] == self.untouched.bits[0]

    def disturbed(self):
        """Stop, kill, fail, and use two machines: all at the same time."""
        count = len(self.untouched.steps[0])
        at = min(count // 2 + 1, count)
        runs = {}
        if self.plain is not None and "resume" not in self.options.skip:
            pause = min(5, 10 / max(1, count - at))
            for action in ("stop", "kill"):
                disturbance = [action, at, pause]
                run = Launch(self, action, dtype=self.dtype, disturbance=disturbance)
                runs[action] = run
        if "failure" not in self.options.skip:
            runs["fail"] = Launch(self, "fail", disturbance=["fail", at, 0])
        if "machines" not in self.options.skip:
            runs["machines"] = Launch(self, "machines", machines=2)
        self.run("Two ranks, disturbed, and on two machines", *runs.values())
        again = {}
        for action in {"stop", "kill"} & set(runs):
            more = {"folders": runs[action].folders, "dtype": self.dtype}
            again[action] = Launch(self, f"{action}-again", **more)
        self.run("Launched again", *again.values())
        if "stop" in runs:
            print("Stopped by SIGTERM, and launched again")
            self.check_resume(runs["stop"], again["stop"])
            print("One rank killed by SIGKILL, and launched again")
            self.check_resume(runs["kill"], again["kill"])
        if "fail" in runs:
            run = runs["fail"]
            print("One of two ranks fails")
            failed = not run.hangs and not run.stayed and any(run.codes)
            self.judge(failed, "failure", why=run.why(), pids=run.stayed)
        if "machines" in runs:
            print("Two machines with one rank each (two torchruns on this one)")
            self.check_machines(runs["machines"])

    def check_resume(self, run, again):
        expected = self.plain.bits[0]
        made = run.bits[0]
        if run.hangs or run.stayed:
            self.line("WRONG", "stopped", why=run.why())
        elif len(expected) < 3:
            self.line("note", "few")
        elif made != expected[: len(made)]:
            self.line("note", "random", what="how it continues")
        elif len(made) == len(expected):
            self.line("WRONG", "signal")
        elif not again.ended_well:
            self.line("WRONG", "again", why=again.why())
        else:
            done = place_of(again, self.plain)
            lost = len(made) - (done or 0)
            if done is None:
                self.line("WRONG", "begin")
            elif done == 0:
                self.line("LOSES", "all lost", lost=lost)
            elif lost > 0 and run.name == "stop":
                self.line("LOSES", "lost", done=done, lost=lost)
            else:
                self.line("ok", "continues", done=done, lost=lost)
            if done:
                self.check_rest(again, self.plain.steps[0][done:])

    def check_rest(self, again, rest):
        """Compare what a relaunch trains with what was left."""
        steps = again.steps[0]
        far, where = drift(rest, steps, self.plain, 1e-6)
        apart = f"{far:.0e} apart"
        if again.bits[0] == [step["bits"] for step in rest]:
            apart = "the same bits"
        values = {"apart": apart, "made": len(steps), "left": len(rest)}
        self.judge(where is None and len(steps) == len(rest), "rest", **values)
        pairs = zip(rest, steps, strict=False)
        if any(a["dropout"] != b["dropout"] for a, b in pairs):
            self.line("note", "masks")

    def check_machines(self, run):
        if not run.ended_well or not run.steps[0]:
            self.line("WRONG", "machines end", why=run.why())
            return
        same = run.bits == self.untouched.bits
        if same or self.is_reproducible:
            self.judge(same, "machines")
        else:
            self.line("note", "random", what="two machines")
        first, second = [checkpoints_in(folder) for folder in run.folders]
        if first & second:
            self.line("note", "both save", names=sorted(first & second))


def shared_rows(one, two):
    return sum((a & b).total() for a, b in zip(one, two, strict=False))


def distance(a, b):
    return math.dist(a, b) if len(a) == len(b) else math.inf


def drift(expected, steps, launch, limit):
    """How far steps are from those expected, relative to how far the weights have come.

    Returns the largest distance, and the first step with more than the limit.
    """
    far = 0.0
    where = None
    for a, b in zip(expected, steps, strict=False):
        start = launch.starts[a["optimizer"]]["weights"]
        apart = distance(a["weights"], b["weights"])
        apart /= distance(a["weights"], start) or 1.0
        far = max(far, apart)
        if where is None and not apart < limit:  # not finite, too
            where = a["step"]
    return far, where


def place_of(again, plain):
    """The number of steps after which a relaunch has started, or None."""
    left = len(again.steps[0])
    if left == 0:
        return len(plain.steps[0])
    first = list(again.starts.values())[0]
    before = plain.starts[first["optimizer"]]["bits"]
    places = []
    for place, step in enumerate(plain.steps[0]):
        if step["optimizer"] == first["optimizer"]:
            if before == first["bits"]:
                places.append(place)
            before = step["bits"]
    # Several, if a step changes nothing: prefer the one that fits what is left.
    if len(plain.steps[0]) - left in places:
        return len(plain.steps[0]) - left
    return min(places, default=None)


def checkpoints_in(folder):
    endings = ".pt", ".pth", ".ckpt", ".bin", ".safetensors"
    paths = [path for path in folder.rglob("*") if path.suffix in endings]
    return {str(path.relative_to(folder)) for path in paths}


def printed(run, pattern):
    """What rank 0 prints that matches, as text; or what is among the errors."""
    numbers = re.findall(pattern, run.read("rank0.out"))
    return numbers or re.findall(pattern, run.read("errors"))


# ---- The command line ----------------------------------------------------------------
def parse(arguments):
    usage = "python tests/check.py [options] mine.py [its arguments]"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        usage=usage, description=__doc__, formatter_class=formatter
    )
    add = parser.add_argument
    add("--ranks", default="1,2,4", help="numbers of ranks to compare (1,2,4)")
    text = "a number that rank 0 prints, and that must not depend on the ranks, such as"
    text += " 'val_loss (\\S+)' (repeatable)"
    add("--compare", action="append", default=[], metavar="REGEX", help=text)
    text = "a file or folder that the script expects where it runs (repeatable)"
    add("--link", action="append", default=[], metavar="PATH", type=Path, help=text)
    text = "for a script that asks for CUDA and NCCL: it gets the CPU and gloo"
    add("--cpu", action="store_true", help=text)
    text = "leave out ranks, resume, machines or failure (repeatable)"
    choices = ["ranks", "resume", "machines", "failure"]
    add("--skip", action="append", default=[], choices=choices, help=text)
    text = "seconds that each launch may take, while others run beside it (120)"
    add("--timeout", type=int, default=120, help=text)
    add("script", type=Path, help="the training script")
    add("words", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    for path in [options.script, *options.link]:
        if not path.exists():
            sys.exit(f"there is no {path}")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)+", options.ranks):
        sys.exit(f"--ranks {options.ranks}: give two or more numbers, such as 1,2,4")
    numbers = {2, *map(int, options.ranks.split(","))}
    options.ranks = [2] if "ranks" in options.skip else sorted(numbers)
    for pattern in options.compare:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            sys.exit(f"--compare {pattern}: {error}")
        if groups != 1:
            sys.exit(
                f"--compare {pattern}: put the number in parentheses: 'loss (\\S+)'"
            )
    for number in re.findall(r"\{(\d+)\}", " ".join(options.words)):
        for ranks in options.ranks:
            if int(number) == 0 or int(number) % ranks > 0:
                text = f"{{{number}}} cannot be divided by {ranks} ranks"
                sys.exit(f"{text}: choose a multiple, or different --ranks")
    return options


def main():
    options = parse(None)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed.run  # noqa: F401  once, for all forks

    for number in (signal.SIGTERM, signal.SIGHUP):  # they end it as Ctrl-C does
        signal.signal(number, signal.default_int_handler)
    if torch.cuda.device_count() > 0:
        print("The GPUs of this machine are hidden from the script.")
    check = Check(options)
    try:
        if check.as_it_is():
            if not {"ranks", "resume"} <= set(options.skip):
                check.any_number_of_ranks()
            check.disturbed()
    except KeyboardInterrupt:
        sys.exit("interrupted: no process is left")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for launch in list(Launch.alive):
            launch.kill()
    wrong, loses, notes = [check.counts[word] for word in ("WRONG", "LOSES", "note")]
    text = f"{wrong} WRONG, {loses} LOSES, {notes} notes"
    print(f"{text}. What did not run was not checked.")
    print(f"Everything that the launches said: {check.base}")
    sys.exit(min(wrong, 1))


if __name__ == "__main__":
    if "CHECK_LOG" in os.environ:
        watch(sys.argv[1])
    else:
        main()
