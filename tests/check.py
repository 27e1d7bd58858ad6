#!/usr/bin/env python3
"""Check a data-parallel training script on the CPU, without changing it.

    python check.py mine.py                 any script that torchrun can launch
    python check.py -m package.train        a module
    python check.py --steps 40 mine.py --batch_size 8 --out {out}

It needs Linux and torch, nothing else, so this file can be copied into any project.
Each launch runs in a folder of its own: pass data as absolute paths, or with --link.
In the arguments, {out} becomes a folder that a launch and its relaunch share, {ranks}
the number of ranks, {32} the number 32 divided by it, and ${local_rank} the LOCAL_RANK.

First it runs the script on two ranks, in float64, and records on each rank which
batches the DataLoaders yield and which random numbers are drawn. Then it replays both
on one process: each step gets the batches and random numbers of all ranks. If the
script trains one model on the samples of all ranks, each gradient must be the same.
This is the first answer. Then it runs the script on one process and on four ranks,
stops and kills it and launches it again, lets a rank fail, and runs it as on two
machines.

    ok      the check has passed
    WRONG   the script trains something different from what it seems to; exit code 1
    LOSES   training steps are lost, which some scripts accept
    note    something that may be intended, or could not be judged

Only what runs is checked, so choose options for 20 to 100 steps of a tiny model, over
two epochs. The script sees CHECK=1 in its environment.
"""

import argparse
import atexit
import contextlib
import ctypes
import dataclasses
import decimal
import functools
import gc
import importlib.util
import inspect
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import textwrap
import threading
import time
import types
import zlib
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optim
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

# ---- What it says --------------------------------------------------------------------
PAGES = {
    "H": "docs/hangs.md",
    "1": 'docs/silent-errors.md, "Loss and gradients"',
    "2": 'docs/silent-errors.md, "Batches and random numbers"',
    "3": 'docs/silent-errors.md, "Evaluation and log"',
    "4": 'docs/silent-errors.md, "Stop and resume"',
}


@dataclasses.dataclass
class Row:
    """A line: what it says if the check has passed, what if not, and where to look."""

    ok: str
    bad: str
    help: str = ""
    page: str = ""


ROWS = {
    # Does it start, and do the ranks train together?
    "start": Row("", "it fails at the start: {error}", "{hint}{why}", "H"),
    "hang": Row(
        "", "it does not end within {timeout} s (--timeout)", "{hint}{why}", "H"
    ),
    "slow": Row(
        "",
        "not judged: what is left. A launch takes longer than {timeout} s",
        "It still computes. Use fewer steps (--steps 20), a smaller model or fewer "
        "data, or raise --timeout.",
    ),
    "fails": Row("", "it fails after {steps} steps: {error}", "{why}", "H"),
    "float32": Row(
        "",
        "not judged: small differences. It fails in float64: {error}",
        "So it was compared in float32, and only differences above 1% show.",
    ),
    "imitated": Row("", "not judged: {error}", "It needs real GPUs.\n{why}"),
    "alone": Row(
        "the ranks train together",
        "every rank trains alone",
        "Most steps follow no forward() of DDP or FSDP, and no collective. "
        "Does the script call init_process_group(), and wrap the model?",
        "1",
    ),
    "not called": Row(
        "",
        "every rank trains alone: the DDP object is not called",
        "Each loss must come from the DDP object, not from the model in it.",
        "1",
    ),
    "finite": Row(
        "",
        "the weights are not finite {when}",
        "Nothing else was checked. {hint}",
    ),
    "moves": Row(
        "training changes the weights: {steps} steps",
        "training does not change the weights: {steps} steps",
        "Is the gradient 0? Nothing else was checked.",
        "1",
    ),
    "left": Row(
        "no process is left",
        "processes are left after its end: {pids}",
        "Does the script wait for the processes that it starts?",
        "H",
    ),
    "address": Row(
        "",
        "it sets the address where the ranks meet: {address}",
        "Here they met at the one that torchrun sets. With another one they may wait "
        "for each other in vain, or meet another job. Delete it.",
    ),
    "steps": Row(
        "all ranks make the same number of steps",
        "rank 0 makes {one} steps, rank 1 makes {two}",
        "All ranks need the same number of batches.",
        "H",
    ),
    "weights": Row(
        "all ranks have the same weights after each step",
        "the weights of the ranks differ from step {first} on",
        "Does each loss come from the DDP object, not from the model in it? Are the "
        "learning rates the same on all ranks? Does one rank change weights by itself?",
        "1",
    ),
    "same gpu": Row(
        "",
        "all ranks of a machine use GPU 0",
        'NCCL refuses that: "Duplicate GPU detected". Call '
        "torch.cuda.set_device(local_rank) first, with LOCAL_RANK. Torchrun does not "
        "pass --local_rank.",
        "H",
    ),
    "sharded": Row(
        "",
        "not judged: weights and gradients, which FSDP1 has sharded",
        "With FSDP2 (fully_shard) they are compared.",
    ),
    "tensor parallel": Row(
        "",
        "not judged: tensor parallelism",
        "The ranks share the work on the same samples. Nothing else was checked.",
    ),
    # What goes in
    "samples": Row(
        "the ranks train on different samples",
        "all ranks train on the same samples",
        "{share:.0%} of rank 0's samples are on rank 1 in the same step. Is there a "
        "sampler that gives each rank its own share?",
        "2",
    ),
    "overlap": Row(
        "",
        "the ranks have samples in common in a step",
        "{share:.0%} of rank 0's samples are on rank 1, too. Is that intended, as in "
        "repeated augmentation?",
        "2",
    ),
    "no samples": Row(
        "",
        "not judged: whether the ranks train on different samples",
        "The samples do not change from step to step, or no DataLoader and no module "
        "in train() mode gets any.",
    ),
    "whole epoch": Row(
        "",
        "the ranks have samples in common in an epoch",
        "{share:.0%} of rank 0's first epoch is in rank 1's, too. Does each rank go "
        "through all samples, or shuffle with a seed of its own?",
        "2",
    ),
    "own data": Row(
        "",
        "the ranks have different data, and share out its indices",
        "Sample 0 differs between ranks, so some samples may never be used. Is the "
        "data made, sorted or split with a seed of its own on each rank?",
        "2",
    ),
    "order": Row(
        "each epoch has its own order",
        "{which} the same order",
        "The same batches come again after {steps} steps. If they should be shuffled: "
        "is set_epoch() called?",
        "2",
    ),
    "unseeded": Row(
        "",
        "it shuffles or splits data before the first step, without a seed",
        "Ranks may draw different splits. Call torch.manual_seed() first, the same on "
        "all ranks.",
        "2",
    ),
    "masks": Row(
        "the ranks draw different random numbers (dropout, noise)",
        "all ranks draw the same random numbers: {names}",
        "So they drop the same units, or add the same noise, to their samples. Seed "
        "each rank differently, after the model is built.",
        "2",
    ),
    # What comes out
    "gradient": Row(
        "{ranks} ranks: the gradients of {steps} steps are those of one process with "
        "the same samples: {off:.0e}",
        "{ranks} ranks: the gradient is not that of one process with the same samples: "
        "{off:.0e} off in step {first}",
        "{scale} Most of it is in {worst}. Is the loss a mean over the samples, not a "
        "sum or a mean over something else (tokens, pixels)? Does it compare samples "
        "with each other? Does everything that has weights run through the DDP object?",
        "1",
    ),
    "later gradient": Row(
        "",
        "{ranks} ranks: from step {first} on, the gradient is not that of one process "
        "with the same samples: {off:.0e} off",
        "Most of it is in {worst}. The steps before are right. Does each rank update "
        "something from its own samples (a queue, a codebook, a running mean)? Is the "
        "loss a mean over what ranks may have unequal numbers of (tokens, boxes)? Or "
        "does a branch begin here?",
        "1",
    ),
    "buffers": Row(
        "",
        "{ranks} ranks: these buffers follow each rank's own samples: {names}",
        "From step {first} on, the gradient is not that of one process with the same "
        "samples: {off:.0e} off. DDP replaces buffers by rank 0's in the next "
        "forward(). Compute them from the samples of all ranks.",
        "1",
    ),
    "buffers differ": Row(
        "",
        "these buffers differ between ranks: {names}",
        "The gradients do not show it, but only rank 0's are saved.",
        "1",
    ),
    "uneven": Row(
        "",
        "{ranks} ranks: in step {first} the ranks have {rows} samples",
        "DDP gives each rank the same weight, so a sample counts more on a rank with "
        "fewer: {off:.0e}. Use drop_last=True if it matters.",
        "1",
    ),
    "not replayed": Row(
        "", "not judged: the gradients of {ranks} ranks", "{reason}", "1"
    ),
    "alone weights": Row(
        "one process alone trains to the same weights: {off:.0e}",
        "one process alone has a different gradient in the first step, though its "
        "samples are the same: {off:.0e} off",
        "Does the order of the ranks' samples matter, such as rows that are gathered "
        "and picked by number? Does each rank make its own weights or noise?",
        "1",
    ),
    "global batch": Row(
        "one process trains on as many samples a step: {one:.4g}",
        "{one:.4g} samples a step on one process, {two:.4g} on two ranks: the global "
        "batch {how}",
        "If you want the same training on any number of ranks, divide the batch size "
        "by their number.",
        "1",
    ),
    "rates": Row(
        "",
        "the learning rate depends on the number of ranks: in step {first} it is {one} "
        "on one process, {two} on two ranks",
        "The samples of each step are the same. Does a schedule count the batches of a "
        "rank?",
        "1",
    ),
    "one process": Row("", "not judged: one process alone. {error}", "{why}"),
    "no step": Row("", "not judged: {what}, where it makes no step"),
    # Evaluation
    "batch norm": Row(
        "",
        "each rank has its own batch norm statistics",
        "{detail} Only rank 0's are saved, and small batches train differently.",
        "3",
    ),
    "printed": Row(
        "two ranks print the same {pattern} as one process: {two}",
        "two ranks do not print the {pattern} of one process: {two}, not {one}",
        "The weights were the same. Is each sample counted once? Is the number summed "
        "over all ranks?",
        "3",
    ),
    "not printed": Row("", "not judged: {pattern}", "{reason}"),
    "random": Row(
        "",
        "not judged: {what}",
        "Two launches of the same command differ. Seed everything that is random.",
        "2",
    ),
    # Stop and resume
    "stopped": Row("", "after {action}, the ranks do not end", "{why}", "H"),
    "signal": Row(
        "",
        "SIGTERM does not stop it: it trains to its end",
        "A scheduler kills it soon after. Then all steps since the last save are lost.",
        "4",
    ),
    "outside": Row(
        "",
        "not judged: what follows the first answer. It saves {path}",
        "All launches share this file, and may resume from each other's. Let it save "
        "in the folder where it runs, or in {{out}}.",
    ),
    "few": Row("", "not judged: stopping and resuming, which needs three steps"),
    "again": Row("", "launched again, it fails: {error}", "{hint}{why}", "4"),
    "no rest": Row(
        "",
        "launched again, it makes {made} steps, and {left} were left",
        "Does it skip batches in each epoch, or take the number of steps for that of "
        "epochs?",
        "4",
    ),
    "begin": Row(
        "",
        "launched again, it starts from weights that it never had",
        "Is everything loaded on all ranks, before DDP is made? Is it saved in half "
        "precision?",
        "4",
    ),
    "all lost": Row("", "it starts over: all {lost} steps are lost", "", "4"),
    "lost": Row(
        "it continues after step {done} ({lost} steps lost)",
        "it continues after step {done}: {lost} steps are lost",
        "It does not save when it gets SIGTERM.",
        "4",
    ),
    "other samples": Row(
        "",
        "launched again, it trains on other samples than were left",
        "In its step {first} it does not have the samples of that step. Are the epoch "
        "and the place in it restored?",
        "4",
    ),
    "rest": Row(
        "it trains as if nothing had happened: {apart}",
        "launched again, it trains differently: {off:.0e} apart in its step {first}",
        "Weights and samples were restored, and random numbers were the same. Are the "
        "optimizer and the scheduler? {rates}",
        "4",
    ),
    "other noise": Row(
        "",
        "launched again, it draws other random numbers",
        "The random generator is not restored on {who}, nor is each step seeded.{same} "
        "{then}",
        "4",
    ),
    "prints otherwise": Row(
        "launched again, it prints the same {pattern}",
        "launched again, it prints a different {pattern}: {two}, not {one}",
        "Is a best score or a sum over the epoch not restored?",
        "4",
    ),
    # A failure, and two machines
    "failure": Row(
        "all ranks end, and the exit code is not 0",
        "one rank fails, and {what}",
        "Does the script catch the error?\n{why}",
        "H",
    ),
    "machines start": Row(
        "",
        "on two machines it fails: {error}",
        "Is RANK taken for LOCAL_RANK, or LOCAL_RANK for RANK?\n{hint}{why}",
        "2",
    ),
    "machines": Row(
        "it trains as two ranks on one machine do",
        "on two machines it trains differently from two ranks on one",
        "Is LOCAL_RANK taken for RANK, or a seed made from it?",
        "2",
    ),
    "shared disk": Row(
        "",
        "two machines need a shared disk: {error}",
        "In a folder of its own, the second one fails. In one folder, both train.",
        "2",
    ),
    "machine batch": Row(
        "",
        "not judged: two machines. A step has {two} samples there, and {one} on one",
        "Does the script divide the batch size by the GPUs of one machine?",
    ),
    "both save": Row(
        "",
        "both machines save {names}",
        "On a shared disk they overwrite each other. Save if dist.get_rank() == 0.",
        "4",
    ),
    "lines": Row("", "these lines of {name} did not run on two ranks: {lines}"),
    "left out": Row("", "not judged, because of the line above: {what}"),
}
FILE_HINT = "Each launch runs in its own folder: use --link or an absolute path.\n"
SPAWN = "it starts its own ranks with torch.multiprocessing: torchrun must start it"


# ---- In each rank: watch the script --------------------------------------------------
FORK = multiprocessing.get_context("fork")
NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
MOST_BYTES = 2**30  # that a rank records
MOST_DRAWS = 100  # in a step, without gradients
CONTROLS = "narrow", "wide"  # replays of rank 0's batches: see Check.why_not()


class Watcher:
    """Writes a line of JSON before the first and after each step of an optimizer."""

    def __init__(self, options):
        self.disturbance = options["disturbance"]
        self.last_step = options["steps"]
        self.probes = options["probe"]
        self.together = 0  # steps that do something together
        self.gpus = None
        self.rank = int(os.environ["RANK"])
        self.log = open(Path(os.environ["CHECK_LOG"], f"rank{self.rank}.jsonl"), "a")
        self.step = 0
        self.depth = 0  # one optimizer may call another one's step()
        self.calls = 0  # modules that are in their forward()
        self.uses = {}  # of the batch that came last: "evaluates" and "trains"
        self.in_norm = False
        self.optimizers = []
        self.began = set()
        self.names = {}  # of weights, by id
        self.loaders = []
        self.groups = set()  # of the DDP objects: see forget_everything()
        names = "cuda", "seeded", "unseeded", "hook", "wrapped", "join"
        self.once = dict.fromkeys(names, False) | {"address": ""}
        self.forget()
        self.recorder = Recorder(self, options)
        wrap(optim.Optimizer, "__init__", self.see_optimizer)
        optim.register_optimizer_step_pre_hook(self.before_step)
        optim.register_optimizer_step_post_hook(self.after_step)
        wrap(torch.autograd, "backward", self.see_backward)
        wrap(nn.functional, "batch_norm", self.see_batch_norm)
        wrap(nn.SyncBatchNorm, "forward", self.see_sync_norm)
        wrap(nn.Module, "__call__", self.see_call)
        wrap(DataLoader, "__iter__", self.see_loader)
        wrap(DataLoader, "__len__", self.recorder.see_length)
        wrap(DistributedDataParallel, "forward", self.see_ddp)
        for owner, name, mark_of in (
            (DistributedDataParallel, "register_comm_hook", "hook"),
            (DistributedDataParallel, "__init__", "wrapped"),
            (torch.cuda, "is_available", "cuda"),
            (torch, "manual_seed", "seeded"),
            (Join, "__enter__", "join"),
        ):
            wrap(owner, name, functools.partial(self.see_once, mark_of))
        wrap(torch, "save", self.see_save)
        wrap(random, "seed", self.see_other_seed)
        if "numpy" in sys.modules:
            wrap(sys.modules["numpy"].random, "seed", self.see_other_seed)
        iterator = getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", None)
        if hasattr(iterator, "_next_index"):  # private, and of some versions of torch
            wrap(iterator, "_next_index", self.see_indices)
        self.recorder.__enter__()

    def forget(self):
        """What was seen in this step."""
        self.seen = {"fetched": [], "inputs": [], "draws": [], "buffers": {}}
        self.seen |= {"together": 0, "norms": False, "sharded": False, "others": []}
        self.seen |= {"evaluated": [], "backwards": 0, "tensor parallel": False}
        self.states = random_states()

    # What the script calls. The first argument is the original.
    def see_optimizer(self, create, optimizer, *args, **kwargs):
        create(optimizer, *args, **kwargs)
        self.number_of(optimizer)

    def number_of(self, optimizer):
        for number, known in enumerate(self.optimizers):
            if known is optimizer:
                return number
        self.optimizers.append(optimizer)
        return len(self.optimizers) - 1

    def see_once(self, name, call, *args, **kwargs):
        self.once[name] = True
        return call(*args, **kwargs)

    def see_save(self, save, *args, **kwargs):
        file = inspect.signature(save).bind(*args, **kwargs).arguments["f"]
        if isinstance(file, (str, os.PathLike)):
            path, log = map(os.path.realpath, (file, os.environ["CHECK_LOG"]))
            if Path(log).parent not in Path(path).parents:
                Path(log, "outside").write_text(path)
        return save(*args, **kwargs)

    def see_other_seed(self, seed, *args, **kwargs):
        """A seed changes the state of the generator, but draws nothing."""
        self.note_others()
        seed(*args, **kwargs)
        self.states = random_states()

    def see_ddp(self, forward, wrapped, *inputs, **named):
        self.groups.add(wrapped.process_group)
        self.seen["together"] += dist.get_world_size() > 1
        if wrapped.training and torch.is_grad_enabled() and not self.seen["buffers"]:
            # Before DDP replaces them by rank 0's.
            self.seen["buffers"] = checksums_of_buffers(wrapped.module)
        return forward(wrapped, *inputs, **named)

    def see_call(self, call, module, *inputs, **named):
        trains = torch.is_grad_enabled() and module.training
        weights = list(module.parameters()) if self.calls == 0 else []
        if weights and not trains:
            self.uses["evaluates"] = True
        grad = torch.is_grad_enabled()
        if grad and any(weight.requires_grad for weight in weights):
            if type(module).__name__ == "FullyShardedDataParallel":
                self.seen["sharded"] = True
            self.seen["tensor parallel"] |= shares_samples(module, weights)
            for name, weight in module.named_parameters():
                self.names.setdefault(id(weight), name)
            self.recorder.begin()
            if trains:  # in eval() mode it may be an evaluation
                self.seen["inputs"] += checksums_of_rows(tensors_in([inputs, named]))
        self.calls += 1
        try:
            return call(module, *inputs, **named)
        finally:
            self.calls -= 1

    def see_backward(self, backward, *args, **kwargs):
        self.seen["backwards"] += 1
        self.uses["trains"] = True
        self.recorder.end_turn()
        return backward(*args, **kwargs)

    def see_batch_norm(self, norm, *args, **named):
        if self.in_norm:  # a mode of torch calls it again
            return norm(*args, **named)
        self.in_norm = True
        try:
            call = inspect.signature(norm).bind(*args, **named)
            call.apply_defaults()
            return self.normalize(norm, *call.args)
        finally:
            self.in_norm = False

    def see_sync_norm(self, forward, norm, x):
        """It normalizes the rows of all ranks, so there is nothing to replay."""
        self.in_norm = True
        try:
            return forward(norm, x)
        finally:
            self.in_norm = False

    def normalize(self, norm, x, mean, var, *more):
        training = more[2]
        if training and mean is not None:
            self.seen["norms"] = True
        if not training and mean is not None and not torch.is_grad_enabled():
            number = checksum(mean)
            if number not in self.seen["evaluated"]:
                self.seen["evaluated"].append(number)
        if training:
            sizes = self.recorder.rows_of_ranks(len(x))
            if sizes:
                return self.recorder.norm_each(sizes, norm, x, mean, var, *more)
        return norm(x, mean, var, *more)

    def see_indices(self, choose, iterator):
        index = choose(iterator)
        vars(iterator).setdefault("check_indices", deque()).append(index)
        return index

    def see_loader(self, iterate, loader):
        number = [i for i, known in enumerate(self.loaders) if known[0] is loader]
        if not number:
            number = [len(self.loaders)]
            self.loaders.append([loader, 0])
            with contextlib.suppress(TypeError):  # a stream, or an endless sampler
                length = len(loader.dataset), len(loader)
                self.recorder.keep("length", number[0], length)
        known = self.loaders[number[0]]
        known[1] += 1
        key = (number[0], known[1] - 1)
        if self.recorder.gives(key):
            return self.recorder.give(key)
        if getattr(loader, "_iterator", None) is not None:  # workers that persist
            loader._iterator.check_indices = deque()
        with self.recorder.pause():
            iterator = iterate(loader)
        return Batches(self, key, loader, iterator)

    def fetched(self, key, indices, batch):
        """A DataLoader has yielded a batch, or has come to its end."""
        rows = []
        if torch.is_grad_enabled():
            rows = checksums_of_rows(tensors_in(batch))
        self.uses = {}
        entry = {"key": key, "ids": indices, "rows": rows, "uses": self.uses}
        self.seen["fetched"].append(entry)
        self.states = random_states()

    def note_others(self):
        """Whether the step has drawn random numbers that are not torch's."""
        for name, state in random_states().items():
            if state != self.states[name] and name not in self.seen["others"]:
                self.seen["others"].append(name)

    def before_step(self, optimizer, args, kwargs):
        self.depth += 1
        if self.depth == 1:
            self.note_others()
            self.counts = can_change_weights(optimizer)
        if self.depth == 1 and self.counts:
            if self.recorder.is_over():
                self.leave()
            number = self.number_of(optimizer)
            if number not in self.began:
                self.began.add(number)
                weights = self.write(optimizer, -1)
                self.recorder.keep("start", number, weights)
            self.recorder.set_options(optimizer)

    def after_step(self, optimizer, args, kwargs):
        self.depth -= 1
        if self.depth == 0 and self.counts:
            weights = self.write(optimizer, self.step)
            self.was_together = self.seen["together"] > 0
            self.recorder.end_step(optimizer, weights)
            self.forget()
            self.step += 1
            self.disturb(*self.disturbance)
            if self.step == self.last_step or self.is_hopeless():
                self.leave()

    def is_hopeless(self):
        """The first launch, of a script that trains alone where it sees no GPU."""
        self.together += self.was_together
        asks = self.once["cuda"] and not self.once["wrapped"]
        return self.probes and asks and self.step == 3 > self.together

    def leave(self):
        """End this rank, as --steps asks for."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.recorder.close()
        write_lines(self.rank)
        for worker in multiprocessing.active_children():
            worker.kill()  # it would look for its parent only every 5 seconds
        os._exit(0)

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
        """Returns the weights, whole where FSDP has sharded them."""
        weights = weights_of(optimizer)
        values = [whole(weight) for weight in weights]
        gradients = [weight.grad for weight in weights]
        record = {
            "step": step,
            "optimizer": self.number_of(optimizer),
            "bits": [checksum(value) for value in values],
            "weights": [mark(i, value) for i, value in enumerate(values)],
            "gradients": [mark(i, grad) for i, grad in enumerate(gradients)],
            "rates": [float(group.get("lr", 0)) for group in optimizer.param_groups],
            "ranks": dist.get_world_size() if dist.is_initialized() else 1,
            "own seed": self.gpus and self.gpus._seed != torch.initial_seed(),
            "shared": self.gpus and self.gpus._shared(),
            **self.once,
            **self.seen,
        }
        if step < 0:
            record["names"] = [self.names.get(id(weight), "?") for weight in weights]
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()
        return values


class Batches:
    """What iter(loader) returns: its batches, which are recorded."""

    def __init__(self, watcher, key, loader, iterator):
        self.watcher = watcher
        self.key = key
        self.iterator = iterator
        self.indices = vars(iterator).setdefault("check_indices", deque())
        self.data = 0
        if key[1] == 0:
            watcher.note_others()
            with watcher.recorder.pause():
                self.data = fingerprint(loader)
            if watcher.step == 0 and not watcher.seen["fetched"]:
                watcher.seen["others"].clear()  # the set-up has drawn them
            watcher.states = random_states()

    def __iter__(self):
        return self

    def __len__(self):
        return len(self.iterator)

    def __getattr__(self, name):
        return getattr(self.iterator, name)

    def __next__(self):
        watcher = self.watcher
        watcher.note_others()
        try:
            with watcher.recorder.pause():
                batch = next(self.iterator)
        except StopIteration:
            watcher.fetched(self.key, [], None)
            raise
        batch = map_tensors(in_default_dtype, batch)
        indices = []
        if self.indices:
            chosen = self.indices.popleft()
            chosen = chosen if isinstance(chosen, (list, tuple)) else [chosen]
            if all(index is not None for index in chosen):
                indices = [zlib.crc32(repr(index).encode()) for index in chosen]
        watcher.fetched(self.key, indices, batch)
        watcher.seen["fetched"][-1]["data"] = self.data
        watcher.recorder.keep_batch(self.key, len(indices), batch)
        return batch


def fingerprint(loader):
    """A checksum of sample 0, with fixed seeds. Ranks with the same data agree."""
    if not hasattr(loader.dataset, "__getitem__"):
        return 0
    numpy = sys.modules.get("numpy")
    kept = random.getstate(), torch.get_rng_state()
    kept_numpy = numpy.random.get_state() if numpy else None
    try:
        seed_all(0)
        sample = loader.dataset[0]
        tensors = tensors_in(sample)
        return sum(checksum(tensor) for tensor in tensors) if tensors else 0
    except Exception:  # a data set may raise anything
        return 0
    finally:
        random.setstate(kept[0])
        torch.set_rng_state(kept[1])
        if numpy:
            numpy.random.set_state(kept_numpy)


def random_states():
    """Checksums of the state of Python's and of numpy's random generator."""
    states = {"random": hash(random.getstate())}
    numpy = sys.modules.get("numpy")
    if numpy and hasattr(numpy, "random"):
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = hash((keys.tobytes(), *rest))
    return states


def seed_all(seed):
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)


class Recorder(TorchDispatchMode):
    """Records the batches and random numbers of a rank, or gives them again.

    record: this rank writes them to a file. replay: one process gets those of all
    ranks. again: a relaunch draws the random numbers of the step with the same weights.
    The mode is on in each launch, so that all compute in the same way.
    """

    def __init__(self, watcher, options):
        super().__init__()
        self.watcher = watcher
        self.paused = False
        self.numbers = Counter()  # of draws and norms within a step
        self.said = open(Path(os.environ["CHECK_LOG"], "replayed"), "a", buffering=1)
        self.file = None
        self.bytes = 0
        self.ranks = []  # what each rank has recorded, to be replayed
        self.order = ""  # in which the rows of all ranks are joined: see Check.replay()
        self.rows = None  # of each rank in this batch
        self.stacked = False  # the batch has a tensor of all samples
        self.turn = 0  # calls of backward() so far
        self.in_run = Counter()  # draws outside of modules
        self.in_forward = Counter()  # draws in modules, in this turn
        self.replays = "replay" in options
        self.placed = set()  # the optimizers whose weights were set
        self.offset = 0  # the step of the recorded launch at which this one starts
        self.after = None  # in a relaunch: the weights that were recorded
        if "record" in options:
            path = Path(options["record"], f"rank{watcher.rank}.pickle")
            self.file = open(path, "wb")
            atexit.register(self.close)
        if self.replays:
            how = options["replay"]
            paths = [Path(how["folder"], f"rank{i}.pickle") for i in how["ranks"]]
            self.ranks = [Record(path) for path in paths]
            names, *_ = keys = [list(map(tuple, keys)) for keys in how["keys"]]
            self.keys = set(names)  # each rank's iterations, by the names of rank 0's
            for rank, mine in zip(self.ranks, keys):
                pairs = list(zip(names, mine))
                rank.batches = {name: rank.batches.get(key, []) for name, key in pairs}
            self.order = how["order"]
        if "again" in options:
            path = Path(options["again"], f"rank{watcher.rank}.pickle")
            self.ranks = [Record(path)]
            self.after = options["states"]

    @contextlib.contextmanager
    def pause(self):
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    # ---- Record
    def keep(self, *entry):
        if self.file is None:
            return
        if entry[0] in ("weights", "start") and self.watcher.rank > 0:
            return
        data = pickle.dumps(entry)
        self.file.write(data)
        self.bytes += len(data)
        if self.bytes > MOST_BYTES:
            self.close()

    def keep_batch(self, key, rows, batch):
        if self.file is not None:
            try:
                batch = pickle.dumps(batch)
            except Exception:  # a batch may hold anything
                batch = pickle.dumps(None)
            self.keep("batch", key, rows, batch, self.turn)

    def close(self):
        if self.file is not None:
            self.file.close()
            self.file = None

    def problem(self, text):
        """Something that cannot be replayed as it was recorded."""
        self.said.write(f"problem\t{text}\n")

    # ---- Replay
    def gives(self, key):
        return self.replays and key in self.keys

    def give(self, key):
        """The batches of all ranks, one behind the other, instead of the loader's."""
        of_steps = list(zip(*self.batches_of_ranks(key)))
        if self.order == "in turn":
            of_steps = [[entry] for entries in of_steps for entry in entries]
        for entries in of_steps:
            rows = [rows for rows, *_ in entries]
            batches = [pickle.loads(batch) for _, batch, _ in entries]
            watcher = self.watcher
            watcher.note_others()
            if any(batch is None for batch in batches):
                self.problem("a batch could not be recorded")
            marks = [list(map(checksum, tensors_in(batch))) for batch in batches]
            same = len(batches) > 1 and all(m == marks[0] != [] for m in marks)
            if same:  # the ranks take their shares later
                batches = batches[:1]
            self.rows = None if same else rows
            self.stacked = any(has_rows(e, rows[0], 0) for e in entries_of(batches[0]))
            batch = self.merge(batches, top=True)
            watcher.fetched(key, [], batch)
            yield batch
        if self.is_over():
            return
        last = max(self.keys) if self.keys else key
        if key >= last and not any(rank.batches.get(key) for rank in self.ranks):
            self.watcher.leave()  # the script asks for more than the ranks had

    def batches_of_ranks(self, key):
        """Of each rank. Accelerate's rank 0 may read the batches for all ranks."""
        batches = [rank.batches.get(key, []) for rank in self.ranks]
        if (
            not batches[0]
            or len(batches) == 1
            or any(r.batches for r in self.ranks[1:])
        ):
            return batches
        self.said.write("alone\n")
        turns = batches[0][-1][-1] - batches[0][0][-1] + 1
        if len(batches[0]) < 1.5 * turns:
            return batches[:1]  # each batch is cut into the shares of the ranks
        return [batches[0][i :: len(self.ranks)] for i in range(len(self.ranks))]

    def see_length(self, length, loader):
        """Of a loader whose batches are replayed: as long as on a rank."""
        lengths = self.ranks[0].lengths if self.replays else {}
        known = [i for i, one in enumerate(self.watcher.loaders) if one[0] is loader]
        for number, (rows, count) in lengths.items():
            if not any(key[0] == number for key in self.keys):
                continue
            # Before its first iteration it is known by the size of its data.
            if known == [number] or (not known and rows == size_of(loader)):
                return count * (len(self.ranks) if self.order == "in turn" else 1)
        return length(loader)

    def merge(self, parts, top=False):
        """One batch of those of all ranks. top: it is not a part of a batch."""
        first = parts[0]
        if torch.is_tensor(first):
            if first.dim() == 0:
                if any(not torch.equal(first, part) for part in parts):
                    self.problem("a batch has a number that differs between ranks")
                return first
            dim = 0  # the dimension along which there are as many rows as samples
            if self.rows and first.dim() > 1 and first.shape[0] != self.rows[0] > 0:
                if all(p.shape[1] == n for p, n in zip(parts, self.rows)):
                    dim = 1
                elif self.stacked:  # they may hold numbers of samples, as boxes do
                    text = f"a batch of {self.rows[0]} has a tensor of"
                    text += f" {list(first.shape)}, which may hold sample numbers"
                    self.problem(text)
            try:
                return self.join(self.widen(parts, dim), dim)
            except RuntimeError:
                self.problem(f"batches of {[list(part.shape) for part in parts]}")
                return first
        if isinstance(first, Mapping):
            merged = {
                name: self.merge([part[name] for part in parts]) for name in first
            }
            if type(first) is dict:
                return merged
            first.update(merged)
            return first
        if isinstance(first, tuple) and hasattr(first, "_fields"):
            return type(first)(*map(self.merge, zip(*parts)))
        if isinstance(first, (list, tuple)):
            # Samples, as in detection, or columns: one entry for all samples each.
            counts = self.rows or [0]
            known = [entry for entry in first if rows_in(entry) is not None]
            columns = bool(known) and all(has_rows(e, counts[0]) for e in known)
            columns |= top and self.stacked
            stacked = top or self.stacked
            samples = all(len(part) == n for part, n in zip(parts, counts))
            plain = first and not known
            if plain or (samples and counts[0] and not (columns and stacked)):
                return type(first)(self.in_order([list(part) for part in parts]))
            return type(first)(map(self.merge, zip(*parts)))
        if any(part != first for part in parts):
            kind = type(first).__name__
            self.problem(f"batches with a value of type {kind}, which cannot be joined")
        return first

    def in_order(self, parts):
        """The rows of all ranks: rank by rank, or row by row."""
        if self.order in CONTROLS:
            return parts[0]
        rows = sum(parts, [])
        order = torch.cat(self.numbered(map(len, parts))).argsort().tolist()
        return [rows[i] for i in order]

    def join(self, parts, dim):
        if self.order in CONTROLS:
            return parts[0]
        order = torch.cat(self.numbered(part.shape[dim] for part in parts)).argsort()
        return torch.cat(parts, dim).index_select(dim, order)

    def widen(self, parts, dim):
        """Pad rows that were padded to different lengths to the longest."""
        sizes = [max(sizes) for sizes in zip(*[part.shape for part in parts])]
        rest = {part.shape[:dim] + part.shape[dim + 1 :] for part in parts}
        if len(rest) == 1 or self.order == "narrow":
            return parts
        self.said.write("padded\n")
        value = padding_of(parts, dim)
        padded = []
        for part in parts:
            sizes[dim] = part.shape[dim]
            padded.append(pad_to(part, sizes, value))
        return padded

    def begin(self):
        """Before a step computes something: start from the recorded weights."""
        if self.replays and self.watcher.step == 0:
            for number, optimizer in enumerate(self.watcher.optimizers):
                if number not in self.placed:  # once: the step may go on from them
                    self.placed.add(number)
                    self.set_weights(optimizer, self.ranks[0].starts.get(number))
        self.find_place()

    def find_place(self):
        """In a relaunch: the step that had the same weights before it."""
        if self.after and self.watcher.step == 0:
            optimizers = self.watcher.optimizers
            now = [[checksum(w) for w in weights_of(one)] for one in optimizers]
            for place, state in enumerate(self.after):
                if all(now[int(i)] == bits for i, bits in state if int(i) < len(now)):
                    self.offset = place
                    self.after = None
                    return

    def set_weights(self, optimizer, values):
        weights = weights_of(optimizer)
        if values is None or len(values) != len(weights):
            return
        with torch.no_grad():
            for weight, value in zip(weights, values):
                local = weight.to_local() if hasattr(weight, "to_local") else weight
                if local.shape == value.shape:
                    local.copy_(value)

    def set_options(self, optimizer):
        """The learning rate and so on, as the ranks had them."""
        options = self.ranks[0].options.get(self.watcher.step) if self.replays else None
        for group, recorded in zip(optimizer.param_groups, options or []):
            for name, value in recorded.items():
                if torch.is_tensor(group.get(name)):
                    group[name].fill_(value)
                elif name in group:
                    group[name] = value

    def end_turn(self):
        self.turn += 1
        self.in_forward.clear()

    def place_in_turn(self, name):
        """Of a draw: the turn and number in modules, or else the number in the run."""
        if self.watcher.calls:
            self.in_forward[name] += 1
            return self.turn, name, self.in_forward[name]
        self.in_run[name] += 1
        return self.in_run[name] - 1, name, 0

    def drawn_in_turn(self, name, result, place):
        """What the rank has drawn whose turn it is."""
        turn, rank = divmod(place[0], len(self.ranks))
        drawn = self.ranks[rank].draws_in_turn.get((turn, *place[1:]))
        if drawn is None and not torch.is_grad_enabled():
            return None
        if drawn is None or drawn.shape != result.shape:
            self.problem(f"torch.{name}() is drawn differently than on the ranks")
            return None
        return drawn

    def end_step(self, optimizer, weights):
        step = self.watcher.step
        self.numbers.clear()
        self.keep("options", step, plain_options(optimizer))
        self.keep("weights", step, weights)
        if self.replays:
            # So each step is compared by itself, and chaos does not grow.
            self.set_weights(optimizer, self.ranks[0].weights.get(step))

    def is_over(self):
        """Whether all steps that were recorded have been replayed."""
        return self.replays and self.watcher.step >= len(self.ranks[0].weights)

    def rows_of_ranks(self, rows):
        """How many rows each rank has normalized here, if one process has them all."""
        place = (self.watcher.step, "norm", self.numbers["norm"])
        self.numbers["norm"] += 1
        self.keep("norm", place, rows)
        if not self.replays:
            return None
        sizes = [rank.norms.get(place) for rank in self.ranks]
        if self.order in ("in turn", *CONTROLS):
            return None
        if None in sizes or len(sizes) < 2 or sum(sizes) != rows:
            return None  # the ranks, too, have normalized the rows of all
        return sizes

    def norm_each(self, sizes, norm, x, mean, var, *more):
        """Normalize the rows of each rank by themselves, as the ranks did."""
        numbers = self.numbered(sizes)
        parts = []
        for rank, rows in enumerate(numbers):
            stats = [mean, var]
            if rank > 0 and mean is not None:  # rank 0's are those that are saved
                stats = [mean.clone(), var.clone()]
            parts.append(norm(x[rows], *stats, *more))
        order = torch.cat(numbers).argsort()
        return torch.cat(parts)[order]

    def numbered(self, sizes):
        """For each rank, where its rows are among those of all."""
        of_ranks = [[(i, rank) for i in range(n)] for rank, n in enumerate(sizes)]
        places = sum(of_ranks, [])
        if self.order == "row by row":
            places.sort()
        number = {place: n for n, place in enumerate(places)}
        return [torch.tensor([number[p] for p in own]).long() for own in of_ranks]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        watcher = self.watcher
        if function.namespace.startswith(("c10d", "_c10d")) and watcher.optimizers:
            watcher.seen["together"] += dist.get_world_size() > 1
        if self.paused or torch.Tag.nondeterministic_seeded not in function.tags:
            return result
        name = function.overloadpacket.__name__
        if not watcher.optimizers:
            seeded = watcher.once["seeded"] or has_generator([args, kwargs or {}])
            if name.startswith("randperm") and not seeded:
                watcher.once["unseeded"] = True
            return result
        if not torch.is_tensor(result) or hasattr(result, "to_local"):
            return result
        key = name
        if not torch.is_grad_enabled():
            # Noise of the batch, or what one rank does by itself, such as sampling.
            key += " without gradients"
            if self.numbers[key] >= MOST_DRAWS:
                return result
        self.numbers[key] += 1
        self.find_place()
        place = (watcher.step + self.offset, key, self.numbers[key])
        high = 0
        if name.startswith(("randperm", "randint")):
            numbers = [value for value in args if type(value) is int]
            high = max(numbers[:2], default=0)
        shape = list(result.shape)
        if torch.is_grad_enabled():
            watcher.seen["draws"].append([name, shape, checksum(result)])
        turn = self.place_in_turn(key)
        self.keep("draw", place, turn, high, result)
        new = None
        if self.order == "in turn":
            new = self.drawn_in_turn(name, result, turn)
        elif self.ranks and not self.after:
            ranks = self.ranks[:1] if self.order in CONTROLS else self.ranks
            parts = [rank.draws.get(place) for rank in ranks]
            new = self.joined(name, result, high, parts)
        if new is not None:
            with torch.no_grad():
                result.copy_(new)
        return result

    def joined(self, name, result, high, parts):
        """What the ranks drew here, in the shape that one process draws, or None."""
        if None in parts:
            if not torch.is_grad_enabled():
                return None  # not all ranks do it, so it does not belong to the step
            self.problem(f"torch.{name}() is drawn more often than on the ranks")
            return None
        highs, parts = zip(*parts)
        shape = result.shape
        if all(part.shape == shape and torch.equal(part, parts[0]) for part in parts):
            return parts[0]  # they draw for the whole batch, or for one rank
        if any(part.dim() != len(shape) for part in parts):
            self.problem(f"torch.{name}() draws other shapes than on the ranks")
            return None
        if high and high == sum(highs) and len(parts) > 1:  # numbers of rows
            moved = []
            for part, rows in zip(parts, self.numbered(highs)):
                moved.append(rows[part.long()].to(part.dtype))
            parts = moved
        for exact in (True, False):  # False: rows that were padded to other lengths
            for d in range(len(shape)):
                rows = sum(part.shape[d] for part in parts)
                sizes = [[*shape[:d], part.shape[d], *shape[d + 1 :]] for part in parts]
                pairs = list(zip(parts, sizes))
                if rows != shape[d] or any(not fits_in(p, s, exact) for p, s in pairs):
                    continue
                # A few bits or numbers may be the same by chance.
                enough = result.numel() >= 16 or name in ("rand", "randn", "normal_")
                if len(parts) > 1 and enough:
                    same = all(torch.equal(part, parts[0]) for part in parts)
                    kind = "alike" if same else "different"
                    self.said.write(f"{kind}\ttorch.{name}()\n")
                return self.join([pad_to(p, s, 1) for p, s in pairs], d)
        shapes = [list(part.shape) for part in parts]
        self.problem(f"each rank draws torch.{name}() of {shapes[0]} for itself")
        return None


class Record:
    """What a rank has recorded."""

    def __init__(self, path):
        self.batches = {}  # by (loader, iteration): rows, the batch as bytes, the turn
        self.draws, self.draws_in_turn = {}, {}
        self.norms, self.starts, self.lengths = {}, {}, {}
        self.weights, self.options = {}, {}
        with open(path, "rb") as file:
            while True:
                try:
                    kind, *entry = pickle.load(file)
                except EOFError:
                    return
                if kind == "batch":
                    key, *batch = entry
                    self.batches.setdefault(key, []).append(batch)
                elif kind == "draw":
                    place, turn, high, numbers = entry
                    self.draws_in_turn[turn] = numbers
                    self.draws[place] = (high, numbers)
                else:
                    table = {"norm": self.norms, "start": self.starts}
                    table["length"] = self.lengths
                    table |= {"weights": self.weights, "options": self.options}
                    table[kind][entry[0]] = entry[1]


def can_change_weights(optimizer):
    """False for the step by which torch.distributed.checkpoint prepares loading."""
    for group in optimizer.param_groups:
        gradients = [weight.grad for weight in group["params"]]
        if float(group.get("lr", 1)) != 0:
            return True
        if any(mark(0, gradient) for gradient in gradients):
            return True
    return False


def weights_of(optimizer):
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def shares_samples(module, weights):
    """Whether the ranks work together on each sample: tensor parallelism.

    Its weights are DTensors, and those of FSDP2 as well. With both, the mesh has two
    dimensions, as in hybrid FSDP2, where the first one has copies.
    """
    cut = [weight for weight in weights if hasattr(weight, "device_mesh")]
    if any(hasattr(part, "unshard") for part in module.modules()):
        cut = [weight for weight in cut if weight.device_mesh.ndim > 1]
        cut = [weight for weight in cut if not weight.placements[0].is_replicate()]
    return bool(cut)


def plain_options(optimizer):
    """The learning rate and so on, for each group of weights."""
    groups = []
    for group in optimizer.param_groups:
        options = {}
        for name, value in group.items():
            if torch.is_tensor(value) and value.dim() == 0:
                value = float(value)
            if type(value) in (int, float, tuple) and name != "params":
                options[name] = value
        groups.append(options)
    return groups


def wrap(owner, name, function):
    """Replace owner.name by function(the original, *args, **kwargs)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return function(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def always(answer, original, *args, **kwargs):
    return answer


def whole(tensor):
    """On the CPU. All of it, where FSDP has sharded it: then all ranks call this."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def content(tensor):
    """The bytes of a tensor."""
    tensor = whole(tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.contiguous()
    if tensor.numel() == 0:
        return b""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def checksum(tensor):
    return zlib.crc32(content(tensor))


def mark(i, tensor):
    """A number that depends on every value of a tensor, and on its place."""
    if tensor is None:
        return 0.0
    values = whole(tensor)
    if values.layout is not torch.strided:
        values = values.to_dense()
    values = values.double().flatten()
    return float(values @ factors(i, len(values)))


@functools.lru_cache(1000)
def factors(i, count):
    return torch.cos(0.7 * torch.arange(count, dtype=torch.float64) + i)


def checksums_of_buffers(model):
    """Without batch norm, whose statistics rightly differ between ranks."""
    checksums = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, NORMS):
            for name, buffer in layer.named_buffers(path, recurse=False):
                checksums[name] = checksum(buffer)
    return checksums


def map_tensors(function, value):
    """The same nested lists and dicts, with function(tensor) for each tensor."""
    if torch.is_tensor(value):
        return function(value)
    if type(value) is dict:
        return {name: map_tensors(function, entry) for name, entry in value.items()}
    if isinstance(value, Mapping):
        with contextlib.suppress(Exception):  # it may not be mutable
            for name in value:
                value[name] = map_tensors(function, value[name])
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(function, entry) for entry in value])
    if type(value) in (list, tuple):
        return type(value)([map_tensors(function, entry) for entry in value])
    return value


def in_default_dtype(tensor):
    """float64 instead of float32, where a rank computes in float64."""
    if tensor.dtype in LESS and torch.get_default_dtype() == torch.float64:
        return tensor.double()
    return tensor


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


def entries_of(batch):
    if isinstance(batch, Mapping):
        return list(batch.values())
    return batch if isinstance(batch, (list, tuple)) else [batch]


def has_rows(value, count, depth=2):
    """Whether it is a tensor or a list of so many rows, or lists of such ones."""
    if torch.is_tensor(value):
        return value.dim() > 0 and len(value) == count
    if depth == 0 or not isinstance(value, (Mapping, list, tuple)):
        return False
    entries = [has_rows(entry, count, depth - 1) for entry in entries_of(value)]
    if isinstance(value, Mapping):
        return any(entries)
    return len(value) == count or (entries != [] and all(entries))


def has_generator(value):
    """Whether a call has a random generator of its own, which has its own seed."""
    if isinstance(value, torch.Generator):
        return not torch.equal(value.get_state(), torch.get_rng_state())
    if isinstance(value, (list, tuple, Mapping)):
        return any(map(has_generator, entries_of(value)))
    return False


def size_of(loader):
    """The number of samples of its data, or None."""
    try:
        return len(loader.dataset)
    except TypeError:
        return None


def rows_in(value):
    """How many rows a part of a batch has, or None."""
    if isinstance(value, Mapping) and value:
        return rows_in(next(iter(value.values())))
    if torch.is_tensor(value):
        return len(value) if value.dim() else None
    return len(value) if isinstance(value, (list, tuple)) else None


def padding_of(parts, dim):
    """The value that rows were padded with: the most frequent one at their ends."""
    last = 1 if dim == 0 else 0
    ends = [part.select(last, -1).flatten() for part in parts if part.shape[last] > 0]
    return torch.cat(ends).mode().values.item() if ends else 0


def pad_to(tensor, sizes, value):
    edges = []
    for have, size in zip(reversed(tensor.shape), reversed(sizes)):
        edges += [0, size - have]
    return nn.functional.pad(tensor, edges, value=value) if any(edges) else tensor


def fits_in(tensor, sizes, exact):
    if exact:
        return list(tensor.shape) == list(sizes)
    return all(have <= size for have, size in zip(tensor.shape, sizes))


# Every floating-point number is in float64, also where a script asks for another dtype.
LESS = torch.float32, torch.float16, torch.bfloat16
MODES = []  # that change what the script calls


class InFloat64(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ("float", "half", "bfloat16") and torch.is_tensor(args[0]):
            if name != "float" and not args[0].requires_grad:
                rounded = function(*args, **(kwargs or {}))  # as in a checkpoint
                if not rounded.is_meta and rounded.isfinite().all():
                    return rounded.double()
            return args[0].double()
        if name in ("view", "frombuffer"):  # these look at bytes: cast the result
            return in_default_dtype(function(*args, **(kwargs or {})))
        for i, value in enumerate(args):
            if is_less(value):
                args = (*args[:i], torch.float64, *args[i + 1 :])
        if kwargs and is_less(kwargs.get("dtype")):
            kwargs = {**kwargs, "dtype": torch.float64}
        result = function(*args, **(kwargs or {}))
        if name in ("tensor", "as_tensor", "asarray"):  # of a numpy array
            return in_default_dtype(result)
        return result


def run_in_modes(run, *args, **kwargs):
    """A mode is off while it handles backward(), where checkpointed layers run."""
    with contextlib.ExitStack() as stack:
        for mode in MODES:
            stack.enter_context(mode)
        return run(*args, **kwargs)


def is_less(value):
    return type(value) is torch.dtype and value in LESS


def disable_autocast(create, context, device_type, *args, **kwargs):
    create(context, device_type, enabled=False)


def disable_scaler(create, scaler, device="cuda", *args, **kwargs):
    create(scaler, device, enabled=False)


def double_of(make, array, *args, **kwargs):
    return in_default_dtype(make(array, *args, **kwargs))


def rebuild(make, *args):
    """What torch.load() does. It makes an empty tensor with the dtype of the file."""
    with torch._C.DisableTorchFunction():
        tensor = make(*args)
    return in_default_dtype(tensor)


def keep_float64(set_dtype, dtype):
    """Transformers sets the dtype of a checkpoint while it makes a model."""
    set_dtype(torch.float64 if is_less(dtype) else dtype)


def compile_nothing(compile, model=None, **options):
    """With TORCH_COMPILE_DISABLE=1, fullgraph=True would be an error."""
    return compile(model, **options | {"fullgraph": False})


def refuse_to_spawn(start, *args, **kwargs):
    sys.exit(SPAWN)


def meet_at_torchrun(torchruns, watcher, join, *args, **options):
    """The launches run side by side, so the script's own port may be taken."""
    call = inspect.signature(join).bind(*args, **options)
    method = call.arguments.get("init_method") or "env://"
    address = {name: os.environ.get(name) for name in torchruns}
    its_own = ":".join(map(str, address.values())) if address != torchruns else ""
    place = ":".join(map(str, torchruns.values()))
    if not method.startswith(("env:", f"tcp://{place}")):
        its_own = method
    if its_own and call.arguments.get("store") is None:
        watcher.once["address"] = its_own
        local = re.search(r"localhost|127\.0\.0\.1|file:", its_own)
        if local and os.environ["GROUP_WORLD_SIZE"] != "1":
            raise RuntimeError(f"each machine has its own {its_own}")
        os.environ.update(torchruns)
        call.arguments["init_method"] = "env://"
    return join(*call.args, **call.kwargs)


def watch(words):
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
    seed_all(rank)
    gpus = pretend_that_the_cpu_is_a_gpu() if options["gpus"] else None
    if options["float64"]:
        torch.set_default_dtype(torch.float64)
        wrap(torch.autocast, "__init__", disable_autocast)
        wrap(torch.amp.GradScaler, "__init__", disable_scaler)
        wrap(torch, "from_numpy", double_of)
        wrap(torch._utils, "_rebuild_tensor", rebuild)
        wrap(torch, "set_default_dtype", keep_float64)
        MODES.append(InFloat64())
        MODES[-1].__enter__()
    # On a CPU the other kernels of attention do not always give the same bits.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch._C._set_graph_executor_optimize(False)  # TorchScript would hide its draws
    wrap(torch, "compile", compile_nothing)
    wrap(torch.multiprocessing, "start_processes", refuse_to_spawn)
    wrap(torch.multiprocessing, "spawn", refuse_to_spawn)
    watcher = Watcher(options)
    watcher.gpus = gpus
    if hasattr(torch.autograd, "_engine_run_backward"):  # private
        wrap(torch.autograd, "_engine_run_backward", run_in_modes)
    address = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    meet = functools.partial(meet_at_torchrun, address, watcher)
    for owner in (dist, dist.distributed_c10d, dist.device_mesh):
        wrap(owner, "init_process_group", meet)
    # Run it as Python does: as the module __main__, which lives until the exit.
    main_module = types.ModuleType("__main__")
    if words[0] == "-m":
        name = words[1]
        sys.path[0] = os.environ["CHECK_CWD"]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None:
            sys.exit(f"there is no module {name}")
        main_module.__spec__ = spec
        main_module.__package__ = spec.parent
        script, code, words = spec.origin, spec.loader.get_code(spec.name), words[1:]
    else:
        script = words[0]
        sys.path[0] = str(Path(script).parent)
        code = compile(Path(script).read_bytes(), script, "exec")
    sys.argv = [script, *words[1:]]
    main_module.__file__ = script
    sys.modules["check"] = sys.modules["__main__"]
    sys.modules["__main__"] = main_module
    atexit.register(forget_everything, main_module, watcher)
    if options["lines"]:
        atexit.register(write_lines, rank)
        watch_lines(code)
    exec(code, vars(main_module))


LINES_RUN = set()
LINES_OF = {}  # the name of the script's file, and all its lines with code


def watch_lines(code):
    """Collect the numbers of the lines that run, in the script's own file."""
    LINES_OF[code.co_filename] = sorted(lines_in(code))

    def trace_function(frame, event, argument):
        if frame.f_code.co_filename in LINES_OF:
            LINES_RUN.add(frame.f_lineno)
            return trace_line
        return None

    def trace_line(frame, event, argument):
        LINES_RUN.add(frame.f_lineno)
        return trace_line

    sys.settrace(trace_function)


def lines_in(code):
    lines = {line for _, _, line in code.co_lines() if line}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            lines |= lines_in(constant)
    return lines


def write_lines(rank):
    sys.settrace(None)
    path = Path(os.environ["CHECK_LOG"], f"lines{rank}")
    text = json.dumps([sorted(LINES_RUN), *LINES_OF.values()])
    path.write_text(text)


def forget_everything(main_module, watcher):
    """Runs at the exit. A global DDP object would keep the threads of gloo alive.

    These may abort the exit: https://github.com/pytorch/pytorch/pull/179291
    Let go of the groups last. If a DDP object is the last to use one, it waits for the
    threads of gloo and holds the GIL, which they need. A group releases the GIL first:
    https://github.com/pytorch/pytorch/pull/154976
    """
    watcher.optimizers.clear()
    watcher.loaders.clear()
    vars(main_module).clear()
    gc.collect()
    watcher.groups.clear()


# ---- For a script that asks for CUDA and NCCL: it gets the CPU and gloo --------------
# Tensors stay on the CPU, so every result is that of a CPU. This is what torch.cuda and
# torch.accelerator answer, besides what is in Gpus. Nothing else can be imitated.
ANSWERS = [
    (True, "is_available is_initialized is_bf16_supported is_tf32_supported"),
    (True, "can_device_access_peer"),
    (False, "is_current_stream_capturing"),
    (None, "init _lazy_init synchronize empty_cache empty_host_cache ipc_collect"),
    (None, "set_stream set_sync_debug_mode set_per_process_memory_fraction"),
    (None, "reset_peak_memory_stats reset_accumulated_memory_stats seed seed_all"),
    (None, "reset_max_memory_allocated reset_max_memory_cached"),
    (None, "reset_peak_host_memory_stats _record_memory_history _dump_snapshot"),
    (0, "memory_allocated memory_reserved memory_cached get_sync_debug_mode"),
    (0, "max_memory_allocated max_memory_reserved max_memory_cached"),
    (0, "range_push range_pop range_start range_end mark"),
    (Counter(), "memory_stats memory_stats_as_nested_dict host_memory_stats"),
    ((60 * 2**30, 80 * 2**30), "mem_get_info get_memory_info"),
    ("a pretended GPU uses no memory", "memory_summary"),
    ([], "memory_snapshot"),
    (["sm_80"], "get_arch_list"),
    ("", "get_gencode_flags"),
    ("native", "get_allocator_backend"),
    ((2, 27, 5), "version"),
    (torch.device("cuda"), "current_accelerator"),
]
PROPERTIES = {"name": "NVIDIA A100 (pretended)", "major": 8, "minor": 0, "uuid": "0"}
PROPERTIES |= {"total_memory": 80 * 2**30, "multi_processor_count": 108}
PROPERTIES |= {"max_threads_per_multi_processor": 2048, "warp_size": 32}
PROPERTIES |= {"L2_cache_size": 40 * 2**20, "is_integrated": 0, "gcnArchName": ""}


class CannotImitate(RuntimeError):
    """The script asks a pretended GPU for what no CPU can do."""


class Stream:
    """Everything runs at once, so there is nothing to wait for."""

    priority = stream_id = cuda_stream = 0

    def __init__(self, *args, **kwargs):
        self.device = torch.device("cuda", torch.cuda.current_device())

    def wait(self, *args):
        """For an event or a stream."""

    wait_event = wait_stream = synchronize = wait

    def query(self):
        return True

    def is_capturing(self):
        return False

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Event(Stream):
    def record(self, stream=None):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return 1000 * (end.time - self.time)


class Gpus:
    """The GPUs of this machine: one for each of its ranks.

    What has a public name answers in place of what torch.cuda has under this name. The
    other methods replace functions of torch: their first argument is the original.
    """

    Stream = current_stream = default_stream = Stream
    Event = Event
    stream = StreamContext = device_of = contextlib.nullcontext

    def __init__(self):
        self._current = 0
        self._used = set()  # those that the script has named
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._seed = torch.initial_seed()
        self._nccl = set()  # the names of the groups that seem to use it

    def _find(self, device=None):
        """The number of a GPU. It fails if the machine does not have so many."""
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):  # that of a tensor is the CPU
            device = device.index if device.type == "cuda" else None
        index = self._current if device is None else int(device)
        if not 0 <= index < self.device_count():
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: cuda:{index} on a machine with "
                f"{self.device_count()} ranks, which seems to have a GPU for each"
            )
        self._used.add(index)
        # FSDP1 takes a second to import. So it is changed when the script has it.
        module = sys.modules.get("torch.distributed.fsdp")
        fsdp = getattr(module, "FullyShardedDataParallel", None)
        if fsdp and not hasattr(fsdp.__init__, "__wrapped__"):
            wrap(fsdp, "__init__", shard_on_cpu)
            stay = functools.partial(always, contextlib.nullcontext())
            wrap(module._flat_param.FlatParamHandle, "to_cpu", stay)
        return index

    def _on_cpu(self, place):
        """The CPU instead of a GPU. What is no place remains as it is."""
        is_gpu = type(place) is int
        if isinstance(place, (str, torch.device)):
            is_gpu = str(place).partition(":")[0] == "cuda"
        if not is_gpu:
            return place
        self._find(place)
        return torch.device("cpu") if isinstance(place, torch.device) else "cpu"

    def _shared(self):
        """Whether this rank uses rank 0's GPU, and no other, with NCCL."""
        rank = int(os.environ["LOCAL_RANK"])
        return bool(self._nccl) and 0 < rank < self.device_count() and self._used == {0}

    def device_count(self):
        count = os.environ.get("CHECK_GPUS") or os.environ["LOCAL_WORLD_SIZE"]
        count = int(count)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible and visible != self._visible:  # the script has set it
            count = min(count, len(visible.split(",")))
        return count

    def current_device(self):
        return self._find()

    def set_device(self, device):
        if device is None:
            raise ValueError("Expected a torch.device or an integer, but got: None")
        if device != -1:
            self._current = self._find(device)

    @contextlib.contextmanager
    def device(self, device):
        before = self._current
        try:
            self.set_device(before if device is None else device)
            yield
        finally:
            self._current = before

    # The same under torch.accelerator's names
    current_device_index = current_device_idx = current_device
    set_device_index = set_device_idx = set_device
    device_index = device

    def get_device_properties(self, device=None):
        self._find(device)
        return types.SimpleNamespace(**PROPERTIES)

    def get_device_name(self, device=None):
        return self.get_device_properties(device).name

    def get_device_capability(self, device=None):
        return 8, 0

    # All random numbers come from the CPU's generator. So its state is the one to keep.
    # But a seed for the GPU alone must not change what the script draws on the CPU.
    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def get_rng_state_all(self):
        return [torch.get_rng_state() for _ in range(self.device_count())]

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)

    def set_rng_state_all(self, states):
        torch.set_rng_state(states[min(self._current, len(states) - 1)])

    def manual_seed(self, seed):
        self._seed = int(seed)

    manual_seed_all = manual_seed

    def initial_seed(self):
        return self._seed

    def _places(self, call, *args, **kwargs):
        for name in ("device", "device_type"):
            if name in kwargs:
                kwargs[name] = self._on_cpu(kwargs[name])
        return call(*[self._on_cpu(value) for value in args], **kwargs)

    def _autocast(self, ask, device_type="cuda"):
        return ask(self._on_cpu(device_type))

    def _cuda_storage(self, cuda, storage, device=None, non_blocking=False):
        self._find(device)
        return storage

    def _load_storage(self, storage, location):
        """torch.load() asks this first. None: ask others."""
        if location.partition(":")[0] == "cuda":
            self._find(location)
            return storage

    def _start_thread(self, start, thread):
        """A mode holds for one thread."""
        run = thread.run

        def run_on_cpu():
            with OnCpu(self):
                run()

        thread.run = run_on_cpu
        start(thread)

    def _data_parallel(self, create, model, module, device_ids=None, *args, **kwargs):
        """As it is without GPUs: it calls the module."""
        for device in device_ids or []:
            self._find(device)
        nn.Module.__init__(model)
        model.module = module
        model.device_ids = []

    def _ddp(self, create, ddp, module, device_ids=None, output_device=None, **options):
        for device in [*(device_ids or []), output_device]:
            self._find(device)
        create(ddp, module, **options)

    def _join(self, join, backend=None, *args, device_id=None, **options):
        self._find(device_id)
        options.pop("pg_options", None)
        join(gloo_for(backend), *args, **options)
        if str(backend).lower() == "nccl":
            self._nccl.add(dist.group.WORLD.group_name)

    def _group(self, create, ranks=None, timeout=None, backend=None, *args, **options):
        options.pop("pg_options", None)
        options.pop("device_id", None)
        group = create(ranks, timeout, gloo_for(backend), *args, **options)
        world = dist.group.WORLD.group_name in self._nccl
        if str(backend).lower() == "nccl" or (backend is None and world):
            self._nccl.add(getattr(group, "group_name", None))
        return group

    def _get_backend(self, ask, group=None):
        """Torch itself gets the truth: some of its functions depend on it."""
        name = getattr(group or dist.group.WORLD, "group_name", None)
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if name in self._nccl and not caller.startswith("torch."):
            return dist.Backend("nccl")
        return ask(group)

    def _barrier(self, barrier, group=None, async_op=False, device_ids=None, **options):
        for device in device_ids or []:
            self._find(device)
        return barrier(group, async_op, **options)


class OnCpu(TorchFunctionMode):
    """Every torch function that is told to use a GPU uses the CPU."""

    def __init__(self, gpus):
        super().__init__()
        self.gpus = gpus
        self.is_cuda = torch.Tensor.is_cuda.__get__

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        args = list(args)
        kwargs = dict(kwargs or {})
        if name == "__get__" and function == self.is_cuda:
            # Of every tensor: nobody knows which of them the script has moved.
            return args[0].device.type == "cpu"
        if name == "get_device":
            return self.gpus.current_device()
        if name == "pin_memory":
            return args[0]
        if name == "cpu":  # a copy, as on a real machine: best = model.weight.cpu()
            return function(*args, **kwargs).clone()
        if name == "cuda":
            place = kwargs.get("device", args[1] if len(args) > 1 else None)
            return args[0].to(self.gpus._on_cpu("cuda" if place is None else place))
        if name == "to":
            args[1:] = [self.gpus._on_cpu(value) for value in args[1:]]
        if name == "type" and len(args) > 1 and isinstance(args[1], str):
            args[1] = args[1].replace("torch.cuda.", "torch.")
        if "device" in kwargs:
            kwargs["device"] = self.gpus._on_cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)


class SumOfRanks(torch.autograd.Function):
    """An all_reduce() that gradients pass."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context, gradient):
        return SumOfRanks.apply(gradient.contiguous(), context.group), None


def normalize_over_all_ranks(forward, norm, x):
    """SyncBatchNorm.forward(): torch has none for the CPU."""
    group = norm.process_group or dist.group.WORLD
    if not norm.training or group is None or dist.get_world_size(group) == 1:
        return nn.modules.batchnorm._BatchNorm.forward(norm, x)
    norm._check_input_dim(x)
    shape = [1, -1] + [1] * (x.dim() - 2)
    dims = [0, *range(2, x.dim())]
    rows = x.to(torch.promote_types(x.dtype, torch.float32))
    count = torch.tensor(x.numel() // x.shape[1]).to(rows.dtype)
    dist.all_reduce(count, group=group)
    mean = SumOfRanks.apply(rows.sum(dims), group) / count
    centered = rows - mean.view(shape)
    var = SumOfRanks.apply(centered.square().sum(dims), group) / count
    if norm.track_running_stats:
        norm.num_batches_tracked.add_(1)
        momentum = norm.momentum
        if momentum is None:
            momentum = 1 / norm.num_batches_tracked.item()
        with torch.no_grad():
            unbiased = var * count / (count - 1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
    y = centered * (var + norm.eps).rsqrt().view(shape)
    if norm.weight is not None:
        y = y * norm.weight.view(shape)
    if norm.bias is not None:
        y = y + norm.bias.view(shape)
    return y.to(x.dtype)


def refusal(name, original):
    """Takes the place of a function or a class that cannot be imitated."""

    @functools.wraps(original, updated=())  # torch._dynamo asks for __wrapped__
    def refuse(*args, **kwargs):
        raise CannotImitate(f"cannot be imitated on a CPU: {name}")

    if isinstance(original, type):
        return type(original.__name__, (), {"__init__": refuse})
    return functools.wraps(original)(refuse)  # torch itself looks at its attributes


def answer_for(package, answers):
    """Replace what torch.cuda or torch.accelerator offers: by answers, or refusals."""
    modules = [package]
    for name in ("memory", "random", "streams", "graphs", "nccl", "profiler"):
        if hasattr(package, name):
            modules.append(getattr(package, name))
    for module in modules:
        for name, value in list(vars(module).items()):
            home = str(getattr(value, "__module__", None))
            if not callable(value) or not home.startswith(package.__name__):
                continue
            if name in answers:
                setattr(module, name, answers[name])
            elif name.endswith(("Tensor", "Storage")) and hasattr(torch, name):
                setattr(module, name, getattr(torch, name))
            elif not name.startswith("_") and not hasattr(value, "with_traceback"):
                setattr(module, name, refusal(f"{module.__name__}.{name}", value))


def stand_in(original, create):
    """A class that makes instances of the original, by create(original, ...)."""

    class StandIn(type):
        def __call__(cls, *args, **kwargs):
            return create(original, *args, **kwargs)

        def __instancecheck__(cls, instance):
            return isinstance(instance, original)

        def __eq__(cls, other):
            return other is cls or other is original

        def __hash__(cls):
            return hash(original)

    return StandIn(original.__name__, (), {"__module__": original.__module__})


def create_device(create, *args, **kwargs):
    if args and type(args[0]) is int:  # a torch without CUDA does not know such a GPU
        return create("cuda", *args)
    return create(*args, **kwargs)


def device_module(find, device="cuda"):
    return find(device)


def set_default_type(set_type, kind):
    set_type(kind.replace("cuda.", "") if isinstance(kind, str) else kind)


def without_pinning(create, loader, *args, **kwargs):
    create(loader, *args, **kwargs)
    loader.pin_memory = False


def shard_on_cpu(create, model, *args, **kwargs):
    create(model, *args, **(kwargs | {"device_id": torch.device("cpu")}))


def gloo_for(backend):
    return "gloo" if "nccl" in str(backend or "nccl").lower() else backend


def gather_any_shape(gather, tensors, tensor, *args, **kwargs):
    """NCCL looks only at the number of values, gloo at the shapes, too."""
    views = []
    for one in tensors:
        fits = one.shape != tensor.shape and one.numel() == tensor.numel()
        views.append(one.view(tensor.shape) if fits else one)
    return gather(views, tensor, *args, **kwargs)


def average(reduce, *args, **kwargs):
    """A collective with ReduceOp.AVG and a future, which gloo does not have."""
    call = inspect.signature(reduce).bind(*args, **kwargs)
    is_mean = call.arguments.get("op") == dist.ReduceOp.AVG
    if is_mean:
        call.arguments["op"] = dist.ReduceOp.SUM
    work = reduce(*call.args, **call.kwargs)
    total = call.args[0]
    if type(work) is dist.Work:
        work.wait()
        future = torch.futures.Future()
        future.set_result([total])
        work = torch._C._distributed_c10d._create_work_from_future(future)
    if is_mean:
        whole = None if total.is_floating_point() else "trunc"  # as NCCL does
        ranks = dist.get_world_size(call.arguments.get("group"))
        total.div_(ranks, rounding_mode=whole)
    return work


def pretend_that_the_cpu_is_a_gpu():
    """To be called once, before the script runs. Returns what is known of the GPUs."""
    gpus = Gpus()
    answers = {}
    for answer, names in ANSWERS:
        for name in names.split():
            answers[name] = functools.partial(always, answer, None)
    for name in dir(gpus):
        if not name.startswith("_"):
            answers[name] = getattr(gpus, name)
    answer_for(torch.cuda, answers)
    answer_for(torch.cuda.nvtx, answers | {"range": torch.cuda.nvtx.range})
    del answers["get_device_capability"]  # that of torch.accelerator has another form
    answer_for(torch.accelerator, answers)
    torch.cuda.default_generators = (torch.default_generator,) * gpus.device_count()
    torch.version.cuda = torch.version.cuda or "12.8"

    # Places
    torch._C._get_accelerator = functools.partial(torch.device, "cpu")
    torch.Stream, torch.Event = Stream, Event
    torch.Generator = stand_in(torch.Generator, gpus._places)
    torch.device = stand_in(torch.device, create_device)
    for owner in (torch.autocast, DeviceContext):
        wrap(owner, "__init__", gpus._places)
    wrap(dist.device_mesh.DeviceMesh, "__init__", gpus._places)
    wrap(nn.Module, "to", gpus._places)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        wrap(storage, "cuda", gpus._cuda_storage)
    nothing = functools.partial(always, None)
    torch.serialization.register_package(0, nothing, gpus._load_storage)
    wrap(torch.Tensor, "record_stream", nothing)
    wrap(torch, "get_device_module", device_module)
    wrap(torch, "set_default_tensor_type", set_default_type)
    wrap(torch, "is_autocast_enabled", gpus._autocast)
    wrap(torch, "get_autocast_dtype", gpus._autocast)
    torch.get_autocast_gpu_dtype = torch.get_autocast_dtype
    wrap(torch.utils.data.DataLoader, "__init__", without_pinning)
    wrap(threading.Thread, "start", gpus._start_thread)

    # Groups and parallel models
    for owner in (dist, dist.distributed_c10d, dist.device_mesh):
        wrap(owner, "init_process_group", gpus._join)
        wrap(owner, "new_group", gpus._group)
    wrap(dist, "get_backend", gpus._get_backend)
    wrap(dist, "barrier", gpus._barrier)
    wrap(dist, "is_nccl_available", functools.partial(always, True))
    dist.ProcessGroupNCCL = types.SimpleNamespace(Options=types.SimpleNamespace)
    for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
        wrap(dist, name, average)
    if hasattr(dist, "reduce_scatter_single"):  # since torch 2.13
        wrap(dist, "reduce_scatter_single", average)
    wrap(dist, "all_gather", gather_any_shape)
    wrap(nn.DataParallel, "__init__", gpus._data_parallel)
    wrap(nn.SyncBatchNorm, "forward", normalize_over_all_ranks)
    wrap(DistributedDataParallel, "__init__", gpus._ddp)
    # This refuses SyncBatchNorm on the CPU, and does nothing else.
    wrap(DistributedDataParallel, "_passing_sync_batchnorm_handle", nothing)
    MODES.append(OnCpu(gpus))
    MODES[-1].__enter__()
    return gpus


# ---- A launch of the script ----------------------------------------------------------
class Launch:
    """The script, launched by torchrun: by one for each machine. It starts immediately.

    It runs in `folders`; a relaunch passes those of the launch before it. `log` has
    what the ranks have recorded, and everything they said.
    """

    alive = []  # the launches that may have processes

    def __init__(self, check, name, ranks=2, machines=1, folders=None, **more):
        self.name = name
        self.ranks = ranks
        self.timeout = check.options.timeout
        self.deadline = time.monotonic() + self.timeout
        self.log = check.base / name
        self.log.mkdir()
        self.folders = folders
        if folders is None:
            names = [f"machine{i}" for i in range(machines)]
            self.folders = [self.log / name / "folder" for name in names]
        options = {"float64": check.float64, "gpus": check.gpus, "lines": False}
        options |= {"probe": False}
        options |= {"disturbance": ["", 0, 0], "steps": check.options.steps, **more}
        self.options = options
        environment = {
            "CHECK": "1",
            "CHECK_CWD": os.getcwd(),
            "CHECK_LOG": str(self.log),
            "CHECK_OPTIONS": json.dumps(options),
            "CHECK_GPUS": str(options.get("count", ranks // machines)),
            "CUDA_VISIBLE_DEVICES": "",  # a CPU computes the same bits every time
            "PYTHONPATH": check.python_path,
            "TORCH_COMPILE_DISABLE": "1",  # it would not see the random numbers
            # Lightning's options for several machines. Most scripts leave them out.
            "PL_TRAINER_NUM_NODES": str(machines),
            "LT_NUM_NODES": str(machines),
        }
        if not options["gpus"]:
            # Without these, Accelerate, the Trainer and Lightning take one process.
            environment |= {"ACCELERATE_USE_CPU": "true"}
            environment |= {"PL_TRAINER_DEVICES": str(ranks // machines)}
            environment |= {"LT_ACCELERATOR": "cpu"}
            environment |= {"LT_DEVICES": str(ranks // machines)}
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        self.processes = []
        Launch.alive.append(self)
        for machine, folder in enumerate(self.folders):
            folder.mkdir(parents=True, exist_ok=True)
            # A short name: sockets in it may have no more than 107 characters.
            short = check.base / f"t{len(check.temporary)}"
            temporary = check.temporary.setdefault((folder, machine), short)
            temporary.mkdir(exist_ok=True)
            for path in check.options.link:
                place = folder / path.name
                if path.parts[0] == "..":  # where the script opens ../data
                    place = folder / path
                if not place.is_symlink():
                    place.symlink_to(path.resolve())
            words = [f"--nproc-per-node={ranks // machines}", "--local-addr=localhost"]
            if machines == 1:
                words += ["--standalone"]
            else:
                words += [f"--nnodes={machines}", f"--node-rank={machine}"]
                words += ["--master-addr=127.0.0.1", f"--master-port={port}"]
            words += [__file__, *check.script]
            words += [fill_in(word, ranks, folder) for word in check.options.words]
            # A fork of this process, which has imported torch already.
            said = self.log / f"torchrun{machine}"
            of_machine = environment | {"TMPDIR": str(temporary)}
            arguments = words, folder, said, of_machine
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
        while time.monotonic() < self.deadline:
            self.codes = [process.exitcode for process in self.processes]
            if None not in self.codes:
                break
            if any(self.codes):  # the other machine may wait for long
                self.deadline = min(self.deadline, time.monotonic() + 10)
            time.sleep(0.05)
        self.hangs = None in self.codes and not any(self.codes)
        if self.hangs and self.computes():
            raise TooSlow
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
        self.trained = self.ended_well and all(self.steps)

    def computes(self):
        """Whether it uses the CPU. Ranks that wait for each other do not."""
        pids = self.left()
        before = cpu_seconds(pids)
        time.sleep(3)
        return cpu_seconds(pids) - before > 0.3

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

    @functools.cached_property
    def keys(self):
        """(loader, iteration) of what each rank trains on, and not only evaluates."""
        keys = []
        for steps in self.steps:
            places = {}
            for entry in sum([step["fetched"] for step in steps], []):
                uses = places.setdefault(tuple(entry["key"]), Counter())
                trains = "trains" in entry["uses"]
                uses["trains" if trains else "evaluates"] += bool(entry["uses"])
            pairs = places.items()
            keys.append([k for k, n in pairs if n["trains"] >= max(1, n["evaluates"])])
        return keys

    def samples(self, rank, kind):
        """For each step, what the rank has trained on: checksums of its samples."""
        if kind == "inputs":
            return [step["inputs"] for step in self.steps[rank]]
        keys = set(self.keys[rank])
        of_steps = []
        for step in self.steps[rank]:
            entries = [e for e in step["fetched"] if tuple(e["key"]) in keys]
            of_steps.append(sum([entry[kind] for entry in entries], []))
        return of_steps

    def kind_of_samples(self):
        """How samples are known: by indices, batches, or what a module gets."""
        for kind in ("ids", "rows"):
            if all(any(self.samples(rank, kind)) for rank in range(self.ranks)):
                if kind == "rows" or len(set(self.data)) == 1:
                    return kind
        return "inputs"

    @functools.cached_property
    def data(self):
        """A checksum of sample 0 on each rank, where there is one."""
        checksums = []
        for of_rank, keys in zip(self.steps, self.keys):
            entries = sum([step["fetched"] for step in of_rank], [])
            loaders = {loader for loader, _ in keys}
            known = [
                e["data"] for e in entries if "data" in e and e["key"][0] in loaders
            ]
            checksums.append(known[0] if known else 0)
        return checksums

    def first_epoch(self):
        """The number of steps in the first iteration of the loader, if it has ended."""
        keys = self.keys[0]
        if len({key[0] for key in keys}) == 1 and len(keys) == 1 or not keys:
            return None
        for number, step in enumerate(self.steps[0]):
            if any(tuple(e["key"]) == keys[1] for e in step["fetched"]):
                return number or None
        return None

    def words(self):
        """What lines say of it. error: the first exception, in a line."""
        why = self.why()
        lines = [line for line in why.splitlines() if line.strip(" ^~")]
        *_, code, last = ["", *lines]
        if ":" not in last and code.startswith("    "):  # assert x == y
            last += f": {code.strip()}"
        if self.hangs:
            last = f"it does not end within {self.timeout} s"
        missing = re.search("No such file|not found|(?<!Module)NotFound", why)
        words = {"error": textwrap.shorten(last, 160), "why": why}
        words["hint"] = FILE_HINT if missing else ""
        if re.search("cuda:-1|but got: None", why):
            words["hint"] = "Torchrun does not pass --local_rank: see --help.\n"
        return words | {"timeout": self.timeout, "steps": len(self.steps[0])}

    def why(self):
        """What helps most: the first traceback, or the last words."""
        counts = [len(steps) for steps in self.steps]
        text = f"Steps on each rank: {counts}. Exit codes of torchrun: {self.codes}.\n"
        said = [self.read(name) for name in ("errors", "rank0.out", "torchrun0")]
        if any("Traceback" in words for words in said[:2]):
            said = ["\n".join(said[:2])]  # some scripts print their errors
        for words in said:
            if words.strip():
                return text + first_traceback(words)
        return text


class TooSlow(Exception):
    """The time of a launch is over, and it does not hang."""


def cpu_seconds(pids):
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


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
    """{32} becomes 32 divided by the ranks, {ranks} their number, {out} a folder."""
    word = re.sub(r"\{(\d+)\}", lambda number: str(int(number[1]) // ranks), word)
    word = word.replace("{ranks}", str(ranks))
    return word.replace("{out}", str(folder / "out"))


def first_traceback(text):
    """The exception, and where the script was. Each rank may have its own prefix."""
    lines = text.splitlines()
    victim = ""  # of another rank's failure
    for i, line in enumerate(lines):
        prefix, found, _ = line.partition("Traceback (most recent call last)")
        if not found:
            continue
        own = [line for line in lines[i + 1 :] if line.startswith(prefix)]
        own = "\n".join([line.removeprefix(prefix) for line in own]) + "\n"
        end = re.search(r"^(?!Traceback)\w.*\n", own, re.MULTILINE)
        if end:
            frames = re.findall(r'  File ".*\n(?:    .*\n)*', own[: end.start()])
            frames = [frame for frame in frames if __file__ not in frame]
            # The script's own, rather than those of Python and of what is installed.
            mine = [f for f in frames if not re.search("site-packages|lib/python", f)]
            found = "".join([*(mine or frames)[-1:], end[0]]).rstrip()
            if "by peer" not in end[0]:
                return found
            victim = victim or found
    return victim or "\n".join(lines[-6:])


# ---- The checks ----------------------------------------------------------------------
# How far a gradient or weights may be off, relative to their size.
LIMITS = {True: 1e-5, False: 1e-2}  # in float64, and in float32


class Check:
    """All checks of a script. options: those of the command line."""

    def __init__(self, options):
        self.options = options
        self.began = time.monotonic()
        self.base = Path(tempfile.mkdtemp(prefix="check-"))
        paths = [".", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.python_path = os.pathsep.join(os.path.abspath(path) for path in paths)
        self.script = ["-m", options.module] if options.module else []
        if options.script:
            self.script = [str(options.script.resolve())]
        self.name = options.module or options.script.name
        self.counts = Counter()
        self.wrong = []
        self.float64 = True
        self.gpus = False
        self.temporary = {}  # a folder for each machine of each launch
        self.order = ""  # of the rows in the last replay
        self.alone = None  # one process, as it is
        self.replayed = None  # two ranks
        parts = ["ranks", "resume", "machines", "failure"]
        self.parts = [part for part in parts if part not in options.skip]
        self.parts *= not options.quick

    def title(self, text, *launches):
        seconds = time.monotonic() - self.began
        print(f"{text}  [{seconds:.0f} s]", flush=True)
        for launch in launches:
            launch.end()

    def say_what_comes(self):
        numbers = ", ".join(map(str, self.options.ranks))
        names = {"ranks": f"{numbers} ranks", "resume": "stop and kill, twice"}
        names |= {"failure": "a failure", "machines": "two machines"}
        if self.parts:
            rest = ", ".join(names[part] for part in self.parts)
            print(f"This is the first answer. To come: {rest}", flush=True)

    def line(self, word, row, **values):
        """Print a line, and what it means if it is not ok."""
        row = ROWS[row]
        what = (row.ok if word == "ok" else row.bad).format(**values)
        judged = not what.startswith("not judged")
        self.counts[word] += judged
        self.counts["not judged"] += not judged
        print(f"  {word:<6} {what}", flush=True)
        if word != "ok":
            text = row.help.format(**values).strip()
            lines = []
            for line in text.splitlines():
                lines += textwrap.wrap(line, 78) if len(line) > 78 else [line]
            if row.page and word in ("WRONG", "LOSES"):
                lines.append(f"More: {PAGES[row.page]}")
            for line in lines:
                print(f"         {line}", flush=True)
        if word == "WRONG":
            self.wrong.append(what)

    def judge(self, passed, row, word="WRONG", **values):
        self.line("ok" if passed else word, row, **values)
        return passed

    # ---- Two ranks, and one process with what they had
    def first_answer(self):
        """Returns whether there is something else to check."""
        run = self.first_launch()
        if run is None:
            return False
        self.two = run
        one, two = run.steps
        if not run.ended_well or not one:
            row = "fails" if one else "start"
            self.line("WRONG", "hang" if run.hangs else row, **run.words())
            return False
        row = "not called" if one[0]["wrapped"] else "alone"
        if not trains_together(run):
            self.line("WRONG", row)
            return False
        self.line("ok", "alone")
        states = [*run.starts.values(), *one]
        strange = [
            s["step"] for s in states if not all(map(math.isfinite, s["weights"]))
        ]
        if strange:
            values = {"when": "before the first step"}
            values["hint"] = "Does it start from uninitialized weights?"
            if strange[0] >= 0:
                values["when"] = f"from step {strange[0]} on"
                values["hint"] = "Is the learning rate too high?"
            self.line("WRONG", "finite", **values)
            return False
        moved = [run.starts[x["optimizer"]]["bits"] != x["bits"] for x in one]
        if not self.judge(any(moved), "moves", steps=len(one)):
            return False
        self.judge(not run.stayed, "left", pids=run.stayed)
        if any(step["tensor parallel"] for step in one):
            self.line("note", "tensor parallel")
            return False
        if one[-1]["address"]:
            self.line("note", "address", address=one[-1]["address"])
        if run.read("outside") and self.parts:
            self.line("note", "outside", path=run.read("outside"))
            self.parts.clear()
        if two[-1:] and two[-1]["shared"]:
            self.line("WRONG", "same gpu")
        word = "note" if one[-1]["join"] else "WRONG"  # Join expects unequal numbers
        counts = {"one": len(one), "two": len(two)}
        same = self.judge(len(one) == len(two), "steps", word, **counts)
        self.sharded = any(step["sharded"] for step in one)
        if self.sharded:
            self.line("note", "sharded")
        else:
            pairs = zip(one, two)
            differ = [a["step"] for a, b in pairs if a["bits"] != b["bits"]]
            same &= self.judge(not differ, "weights", first=differ[:1] and differ[0])
        same &= self.check_samples(run)
        if not same:
            self.line("note", "left out", what="the gradients")
        elif not self.sharded:
            if "ranks" in self.parts and 1 in self.options.ranks:
                self.alone = Launch(self, "1-rank", 1)  # beside the replay
            self.check_replay(run)
        self.counts["comparable"] = same and not self.sharded
        self.check_norms(one, two)
        self.check_lines(run)
        return True

    def first_launch(self):
        """Two ranks: in float64 if that works, with pretended GPUs if it asks."""
        self.title("Two ranks, in float64")
        run = self.launch_recorded("2-ranks", 2, probe=True)
        run.end()
        run = self.with_gpus(run)
        if SPAWN in run.read("errors"):
            sys.exit(f"{self.name}: {SPAWN}")
        # A rank that has failed may leave the other one waiting.
        if not run.ended_well and (not run.hangs or "Traceback" in run.read("errors")):
            failed = run
            self.float64 = False
            self.title("It fails: again, in float32")
            run = self.launch_recorded("2-ranks-float32", 2)
            run.end()
            run = self.with_gpus(run)
            if run.ended_well:
                failed.hangs = False
                self.line("note", "float32", error=failed.words()["error"])
        # Gloo, which takes the place of NCCL, refuses some calls.
        error = run.words()["error"].lower()
        refused = re.search("gloo|not implemented", error) and "by peer" not in error
        refused = refused and self.gpus and not run.ended_well
        if refused or "cannot be imitated" in run.read("errors"):
            self.line("note", "imitated", **run.words())
            return None
        if not run.steps[0] and run.ended_well:
            text = "makes no step of a torch optimizer in torchrun's processes"
            sys.exit(f"{self.name} {text}: nothing to check")
        return run

    def with_gpus(self, run):
        """Another launch with pretended GPUs, if this one has missed them."""
        asks = any(s["cuda"] and not s["wrapped"] for s in sum(run.steps, []))
        alone = run.steps[0] and not trains_together(run)
        wants_gpu = re.search("cuda|nccl|nvidia|accelerator|gpu", run.why().lower())
        failed = not run.steps[0] and not run.hangs
        if self.gpus or not (failed and wants_gpu or alone and asks):
            return run
        self.gpus = True
        self.title("It asks for GPUs: again, with a CPU that pretends to be one")
        again = self.launch_recorded(f"{run.name}-gpu", 2)
        again.end()
        return again

    def launch_recorded(self, name, ranks, **more):
        folder = self.base / f"record-{name}"
        folder.mkdir()
        lines = ranks == 2
        run = Launch(self, name, ranks, record=str(folder), lines=lines, **more)
        run.recorded = folder
        return run

    def check_samples(self, run):
        """What goes in. Returns whether the ranks train on different samples."""
        kind = run.kind_of_samples()
        share = shared_of(run, kind)
        if share is not None and share >= 0.2 and kind != "inputs":
            loaded = sum(map(len, run.samples(0, kind)))
            enter = sum(map(len, run.samples(0, "inputs")))
            if enter * run.ranks <= loaded * 1.05 or shared_of(run, "inputs") is None:
                share = shared_of(run, "inputs")  # each rank takes its share by itself
        if share is None:
            self.line("note", "no samples")
        elif 0.2 <= share < 0.9:
            self.line("note", "overlap", share=share)
        elif not self.judge(share < 0.2, "samples", share=share):
            return False
        steps = run.first_epoch()
        if kind == "ids" and steps and (shared_of(run, kind) or 0) < 0.2:
            a, b = [set(sum(run.samples(rank, kind)[:steps], [])) for rank in (0, 1)]
            share = len(a & b) / len(a)
            if share > 0.3 and len(a) > 2:
                self.line("note", "whole epoch", share=share)
        if kind != "ids" and all(run.data) and len(set(run.data)) > 1:
            a, b = [set(sum(run.samples(rank, "ids")[:steps], [])) for rank in (0, 1)]
            if a and steps and len(a & b) < 0.2 * len(a):
                self.line("note", "own data")
        self.check_order(run, run.samples(0, kind))
        if run.steps[0][0]["unseeded"] and not run.steps[0][-1]["seeded"]:
            self.line("note", "unseeded")
        return True

    def check_order(self, run, samples):
        """Whether epochs have the same order: those of a loader, or of the run."""
        epochs = {}
        for step in run.steps[0]:
            for entry in step["fetched"]:
                epochs.setdefault(tuple(entry["key"]), []).append(entry["ids"])
        epochs = [tuple(map(tuple, epochs[key])) for key in run.keys[0]]
        epochs = [epoch for epoch in epochs if sum(map(len, epoch)) > 1]
        pairs = list(zip(epochs, epochs[1:]))
        same = [i for i, (a, b) in enumerate(pairs) if a == b]
        for steps in range(2, len(samples) // 2 + 1):
            if samples[steps:] == samples[:-steps] and any(samples):
                self.line("note", "order", which="each epoch has", steps=steps)
                return
        if same:
            which = f"epochs {same[0]} and {same[0] + 1} have"
            self.line("note", "order", which=which, steps=len(epochs[same[0]]))
        elif pairs:
            self.line("ok", "order")

    def check_replay(self, run):
        """One process with what the ranks had: the gradients must be the same."""
        results = []
        orders = ["rank by rank", "row by row"]
        if self.order == "in turn":
            orders = ["in turn"]
        elif self.order in orders:  # with which two ranks were right
            orders.sort(key=self.order.__ne__)
        for order in orders:
            results.append(self.replay(run, order))
            if results[-1].takes_turns:
                results = [self.replay(run, "in turn")]
            self.order = results[-1].order
            if results[-1].is_right or self.order == "in turn":
                break
            if not results[-1].compared:
                break
        best = min(results, key=lambda result: result.worst)
        for result in results:
            if result.is_right:
                best = result
        self.replayed = best
        values = {"ranks": run.ranks, "steps": best.compared, "off": best.worst}
        values |= {"first": best.first, "worst": best.name, "scale": best.scale}
        if best.compared and best.is_right:
            self.line("ok", "gradient", **values)
            if best.uneven:
                step, rows, off = best.uneven
                values |= {"first": step, "rows": rows, "off": off}
                self.line("note", "uneven", **values)
        else:
            reason = self.why_not(best, run)
            if reason:
                self.line("note", "not replayed", reason=reason, ranks=run.ranks)
            elif differing_buffers(run) and not best.scale:
                self.line("WRONG", "buffers", names=differing_buffers(run), **values)
            elif best.first == 0:
                self.line("WRONG", "gradient", **values)
            else:
                self.line("WRONG", "later gradient", **values)
        right = best.compared and best.is_right
        if right and differing_buffers(run) and run.ranks == 2:
            self.line("note", "buffers differ", names=differing_buffers(run))
        if run.ranks == 2:
            self.check_masks(best, run)
        return right

    def replay(self, run, order):
        """One process, with the batches and random numbers of all ranks.

        order: their rows are joined "rank by rank" or "row by row" (the first of each
        rank, then the second, ...), or the batches come "in turn". "narrow" and "wide"
        are controls with rank 0's batches, padded as on rank 0 or as for all ranks.
        """
        how = {"folder": str(run.recorded), "ranks": list(range(run.ranks))}
        how |= {"keys": run.keys, "order": order}
        name = f"1-as-{run.name}-{order.replace(' ', '-')}"
        one = Launch(self, name, 1, replay=how, steps=0)
        self.title(f"One process with what {run.ranks} ranks had, {order}", one)
        # Some scripts insist on several GPUs.
        if self.gpus and one.ended_well and not one.steps[0]:
            one = Launch(self, f"{name}-gpus", 1, replay=how, steps=0, count=run.ranks)
            self.title(f"The same with {run.ranks} GPUs", one)
        return Replay(one, run, self.float64, order)

    def why_not(self, best, run):
        """Why a difference is no proof, or None."""
        one = best.one
        if best.problems:
            return f"One process cannot get what the ranks had: {best.problems[0]}."
        if not best.compared:
            if one.ended_well and not one.steps[0]:
                return "One process makes no step."
            if not one.steps[0]:
                return f"One process fails: {one.words()['error']}"
            return "One process makes other steps."
        step = best.first
        others = [of_rank[step]["others"] for of_rank in run.steps]
        if any(others):
            names = sorted(set(sum(others, [])))
            return (
                f"{' and '.join(names)} draws in the step; only torch's are replayed."
            )
        if run.steps[0][step]["hook"]:
            return "A communication hook changes the gradients, such as by rounding."
        a, b = [r.steps[0][step]["backwards"] for r in (run, one)]
        if best.order != "in turn" and a != b:
            return f"In this step a rank calls backward() {a} times, one process {b}."
        if best.order == "in turn":
            for kind in ("inputs", "draws"):
                mine = [repr(x) for x in one.steps[0][step][kind]]
                theirs = [repr(x) for ranks in run.steps for x in ranks[step][kind]]
                if sorted(mine) != sorted(theirs):
                    text = (
                        "One process makes more micro-steps than a rank, and these get"
                    )
                    return f"{text} other samples or random numbers than the ranks had."
        elif not run.keys[0]:
            mine = sorted(sum([of_rank[step]["inputs"] for of_rank in run.steps], []))
            if not mine or sorted(one.steps[0][step]["inputs"]) != mine:
                text = "It has no DataLoader, and one process makes other samples."
                return f"{text} To compare them, make them of seeds and global numbers."
        rows = [len(of_rank[step]["inputs"]) for of_rank in [*run.steps, one.steps[0]]]
        if ("alone", "") in best.said and 2 * rows[-1] != sum(rows):
            return "Rank 0 reads for all ranks, and has filled up the last batch."
        if ("padded", "") in best.said:
            narrow, wide = [self.replay(run, control) for control in CONTROLS]
            if not Replay(wide.one, narrow.one, self.float64, "").is_right:
                return "Rows are padded to the longest, and that changes the gradients."
        return None

    def check_masks(self, best, run):
        """Whether the ranks draw the same random numbers for different samples."""
        alike = Counter(line for kind, line in best.said if kind == "alike")
        different = Counter(line for kind, line in best.said if kind == "different")
        if not best.compared:
            return
        names = [name for name in alike if name not in different]
        if names and run.steps[0][-1]["own seed"]:
            return  # the GPUs were seeded apart, and here there is one generator
        if names:
            self.line("note", "masks", names=", ".join(names))
        elif different:
            self.line("ok", "masks")

    def check_norms(self, one, two):
        if not any(step["norms"] for step in one) or self.sharded:
            return
        evaluated = [step["evaluated"] for step in one]
        pairs = [[step["evaluated"] for step in steps] for steps in zip(one, two)]
        differ = any(a and b and a != b for a, b in pairs)
        if any(evaluated) and differ:
            detail = "They evaluate with these."
        elif any(evaluated):
            return  # all ranks evaluate with the same ones
        else:
            detail = "No evaluation was seen."
        self.line("note", "batch norm", detail=detail)

    def check_lines(self, run):
        ran, every = set(), set()
        for rank in range(2):
            text = run.read(f"lines{rank}")
            if text:
                mine, lines = json.loads(text)
                ran |= set(mine)
                every |= set(lines)
        texts = []
        for has_run, lines in itertools.groupby(sorted(every), ran.__contains__):
            lines = list(lines)
            if not has_run:
                end = f"-{lines[-1]}" if len(lines) > 1 else ""
                texts.append(f"{lines[0]}{end}")
        if not texts or not ran:
            return
        text = ", ".join(texts[:8])
        if len(texts) > 8:
            text += f", and {len(texts) - 8} more places"
        self.line("note", "lines", lines=text, name=self.name)

    # ---- One process alone, and more ranks
    def any_number_of_ranks(self):
        numbers = [n for n in self.options.ranks if n not in (1, 2)]
        alone = self.alone
        if alone is None and 1 in self.options.ranks:
            alone = Launch(self, "1-rank", 1)
        more = [self.launch_recorded(f"{n}-ranks", n) for n in numbers]
        names = ["one process alone"] * bool(alone) + [f"{n} ranks" for n in numbers]
        runs = [alone] * bool(alone) + more
        self.title(", ".join(names).capitalize(), *runs)
        if alone:
            self.check_alone(alone)
        for run in more:
            if not run.trained:
                row = "hang" if run.hangs else "fails"
                self.line("WRONG", row, **run.words())
            elif self.counts["comparable"] and self.replayed.is_right:
                self.check_replay(run)
            else:
                self.line("note", "left out", what=f"{run.ranks} ranks")
            remove(run.recorded)

    def check_alone(self, one):
        two = self.two
        if one.ended_well and not one.steps[0]:
            self.line("note", "no step", what="one process alone")
            return
        if not one.trained:
            self.line("note", "one process", **one.words())
            return
        kind = two.kind_of_samples()
        mine = one.samples(0, kind)
        theirs = [
            sum(rows, []) for rows in zip(*[two.samples(r, kind) for r in (0, 1)])
        ]
        sizes = [[len(rows) for rows in steps if rows] for steps in (mine, theirs)]
        if not all(sizes):
            return
        # In most steps: a loader may fetch a batch ahead. Or the mean, if sizes vary.
        count, of_ranks = map(statistics.median, sizes)
        pairs = [(count, of_ranks), [statistics.mean(of_run) for of_run in sizes]]
        same_size = any(abs(a - b) <= 0.02 * b for a, b in pairs)
        how = "grows" if of_ranks > count else "shrinks"
        values = {"one": count, "two": of_ranks, "how": how}
        self.judge(same_size, "global batch", "note", **values)
        pairs = list(zip(mine, theirs))
        same = all(Counter(a) == Counter(b) for a, b in pairs)
        if not same or not same_size:
            return
        rates = [[step["rates"] for step in run.steps[0]] for run in (one, two)]
        for first, (a, b) in enumerate(zip(*rates)):
            if any(abs(x - y) > 1e-6 * max(abs(x), abs(y)) for x, y in zip(a, b)):
                values = {"one": f"{a[0]:.4g}", "two": f"{b[0]:.4g}", "first": first}
                self.line("WRONG", "rates", **values)
                return
        if not self.counts["comparable"] or not self.replayed.is_right:
            return
        limit = LIMITS[self.float64]
        far, where = drift(one.steps[0], two.steps[0], one, limit)
        if where is None:
            self.line("ok", "alone weights", off=far)
            return
        # The same rows, and nothing random: then the first gradient must be the same.
        draws = any(
            step["draws"] or step["norms"] or step["others"] for step in one.steps[0]
        )
        rows = Counter(one.samples(0, "rows")[0])
        of_ranks = sum([two.samples(r, "rows")[0] for r in (0, 1)], [])
        if not draws and rows == Counter(of_ranks) and rows:
            off = relative(one.steps[0][0]["gradients"], two.steps[0][0]["gradients"])
            if not off < limit:
                self.line("WRONG", "alone weights", off=off)

    # ---- Numbers that are printed
    def check_printed(self):
        """With the weights of the ranks, one process must print what rank 0 does."""
        for pattern in self.options.compare:
            one = printed(self.replayed.one, pattern) if self.replayed else []
            two = printed(self.two, pattern)
            short = shortened(pattern)
            if not two:
                reason = "Rank 0 prints nothing like it."
                self.line("note", "not printed", pattern=short, reason=reason)
            elif not self.replayed or not self.replayed.is_right or not one:
                reason = "The weights of one process are not the same."
                self.line("note", "not printed", pattern=short, reason=reason)
            else:
                same = len(one) == len(two) and all(map(self.agree, one, two))
                values = {"one": one[-3:], "two": two[-3:], "pattern": short}
                self.judge(same, "printed", **values)

    def agree(self, one, two):
        """Whether two printed numbers are the same, but for the last digit."""
        if math.isnan(float(one)) or math.isnan(float(two)):
            return math.isnan(float(one)) and math.isnan(float(two))
        if "." not in one or not self.float64:
            return math.isclose(float(one), float(two), rel_tol=1e-2)
        digits = decimal.Decimal(one).as_tuple()
        unit = 10.0**digits.exponent
        return abs(float(one) - float(two)) <= max(1.5 * unit, 1e-6 * abs(float(one)))

    @functools.cached_property
    def is_reproducible(self):
        run = Launch(self, "2-ranks-repeated")
        self.title("Is it random? The same command again", run)
        return run.bits[0] == self.two.bits[0]

    # ---- Two ranks, disturbed, and on two machines
    def disturbed(self):
        """Stop, kill, fail, and use two machines: all at the same time."""
        count = len(self.two.steps[0])
        epoch = self.two.first_epoch() or count
        # In the first epoch, and in the second: both places show faults of their own.
        places = {"stop": min(epoch // 2 + 1, count)}
        places["kill"] = min(places["stop"] + epoch * (epoch < count), count)
        runs = {}
        if "resume" in self.parts:
            for action, at in places.items():
                pause = min(5, 10 / max(1, count - at))
                disturbance = [action, at, pause]
                runs[action] = Launch(self, action, disturbance=disturbance)
        if "failure" in self.parts:
            at = min(count // 2 + 1, count)
            runs["fail"] = Launch(self, "fail", disturbance=["fail", at, 0])
        if "machines" in self.parts:
            asks = any(step["cuda"] for step in self.two.steps[0])
            runs["machines"] = Launch(
                self, "machines", machines=2, gpus=self.gpus or asks
            )
        if not runs:
            return
        self.title("Two ranks, disturbed, and on two machines", *runs.values())
        again = {}
        states = states_of(self.two)
        for action in [action for action in places if action in runs]:
            more = {"again": str(self.two.recorded), "states": states}
            folders = runs[action].folders
            again[action] = Launch(self, f"{action}-again", folders=folders, **more)
        if again:
            self.title("Launched again", *again.values())
            print("Stopped by SIGTERM, and launched again")
            found = len(self.wrong)
            self.check_resume(runs["stop"], again["stop"])
            print("One rank killed by SIGKILL, and launched again")
            if len(self.wrong) > found:
                self.line("note", "left out", what="how it continues after a kill")
            else:
                self.check_resume(runs["kill"], again["kill"])
        if "fail" in runs:
            run = runs["fail"]
            print("One of two ranks fails")
            what = "the exit code is 0"
            if run.hangs or run.stayed:
                what = f"processes stay: {run.stayed}"
            failed = not run.hangs and not run.stayed and any(run.codes)
            self.judge(failed, "failure", what=what, **run.words())
        if "machines" in runs:
            print("Two machines with one rank each (two torchruns on this one)")
            self.check_machines(runs["machines"])

    def check_resume(self, run, again):
        expected = self.two.bits[0]
        made = run.bits[0]
        if run.hangs or run.stayed:
            action = "SIGTERM" if run.name == "stop" else "SIGKILL of one rank"
            self.line("WRONG", "stopped", action=action, **run.words())
        elif len(expected) < 3:
            self.line("note", "few")
        elif made != expected[: len(made)]:
            self.line("note", "random", what="how it continues")
        elif len(made) == len(expected) and run.name == "stop":
            self.line("LOSES", "signal")
        elif again.hangs or not again.ended_well:
            # It may refuse, so as to overwrite nothing.
            refuses = re.search("exists|not empty", again.words()["error"])
            word = "LOSES" if refuses and not again.steps[0] else "WRONG"
            self.line(word, "again", **again.words())
        elif not again.steps[0]:
            values = {"made": 0, "left": len(expected) - len(made)}
            self.line("WRONG", "no rest", **values)
        else:
            done = place_of(again, self.two)
            lost = len(made) - (done or 0)
            if done is None:
                self.line("WRONG", "begin")
            elif done == 0:
                self.line("LOSES", "all lost", lost=lost)
            elif lost > 0 and run.name == "stop":
                self.line("LOSES", "lost", done=done, lost=lost)
            else:
                self.line("ok", "lost", done=done, lost=lost)
            if done:
                self.check_rest(again, done)

    def check_rest(self, again, done):
        """Compare what a relaunch trains with what was left."""
        two = self.two
        left = len(two.steps[0]) - done
        steps = again.steps[0][:left]
        rest = two.steps[0][done:]
        if len(again.steps[0]) != left and not self.options.steps:
            self.line("WRONG", "no rest", made=len(again.steps[0]), left=left)
            return
        ids, rows = [self.other_samples(again, done, kind) for kind in ("ids", "rows")]
        if ids is not None or (rows is not None and not any(two.samples(0, "ids"))):
            self.line("WRONG", "other samples", first=rows if ids is None else ids)
            return
        far, where = drift(rest, steps, two, 1e-6)
        old = [of_rank[done:] for of_rank in two.steps]
        who = [r for r in (0, 1) if noises(old[r], again.steps[r], str.__ne__)]
        other = any(a["inputs"] != b["inputs"] for a, b in zip(rest, steps))
        if who or (other and where is not None):
            names = " and ".join(f"rank {rank}" for rank in who or (0, 1))
            same = ""
            if noises(*again.steps, str.__eq__) and not noises(*old, str.__eq__):
                same = " Now both ranks draw the same."
            then = "The rest was compared with the old ones." if where is None else ""
            if where is not None and other:
                then = "So the samples differ, and the rest was not judged."
            self.line("note", "other noise", who=names, same=same, then=then)
            if where is not None and other:
                return
        apart = f"{far:.0e} apart"
        if again.bits[0][:left] == [step["bits"] for step in rest][: len(steps)]:
            apart = "the same bits"
        rates = ""
        for i, (a, b) in enumerate(zip(rest, steps)):
            if a["rates"] != b["rates"] and not rates:
                rates = f"The learning rate of its step {i} is {b['rates'][0]:.4g}, "
                rates += f"not {a['rates'][0]:.4g}."
        first = None if where is None else where - done
        values = {"apart": apart, "off": far, "first": first, "rates": rates}
        if self.judge(where is None, "rest", **values):
            self.check_printed_again(again, done)

    def other_samples(self, again, done, kind):
        """The first step of a relaunch without the samples that were left, or None."""
        mine, theirs = [run.samples(0, kind) for run in (again, self.two)]
        for i, (a, b) in enumerate(zip(mine, theirs[done:])):
            if Counter(b) - Counter(a):
                # Rows that never came before may be the same samples, with other noise.
                known = kind == "ids" or Counter(a) & Counter(sum(theirs, []))
                return i if known else None
        return None

    def check_printed_again(self, again, done):
        for pattern in self.options.compare:
            expected = printed(self.two, pattern)
            found = printed(again, pattern)
            count = min(len(expected), len(found))
            if not count or self.options.steps:
                continue
            pairs = list(zip(expected[-count:], found[-count:]))
            other = [(a, b) for a, b in pairs if not self.agree(a, b)]
            one, two = other[0] if other else pairs[0]
            values = {"pattern": shortened(pattern), "one": one, "two": two}
            self.judge(not other, "prints otherwise", **values)

    def check_machines(self, run):
        asks = run.options["gpus"] and not self.gpus
        ordinal = "invalid device ordinal" in run.read("errors")
        if asks and not ordinal and (not run.trained or run.bits != self.two.bits):
            run = Launch(self, "machines-cpu", machines=2)
            self.title("Two machines, without pretended GPUs", run)
        if run.options["gpus"] and run.ended_well and not run.steps[0]:
            run = Launch(self, "machines-gpus", machines=2, gpus=True, count=2)
            self.title("The same with two GPUs on each", run)
        error = run.words()["error"]
        shared = run.log / "shared"
        if not run.trained and run.words()["hint"] == FILE_HINT:
            gpus = run.options["gpus"]
            folders = [shared, shared]
            run = Launch(self, "machines-shared", 2, 2, folders, gpus=gpus)
            self.title("Two machines that share a folder", run)
            if run.trained:
                self.line("note", "shared disk", error=error)
        if not run.trained:
            if "cannot be imitated" in run.read("errors"):
                self.line("note", "imitated", **run.words())
            elif run.ended_well:
                self.line("note", "no step", what="two machines")
            else:
                self.line("WRONG", "machines start", **run.words())
            return
        same = run.bits == self.two.bits
        kind = self.two.kind_of_samples()
        sizes = [2 * len(r.samples(0, kind)[0]) for r in (self.two, run)]
        if sizes[0] != sizes[1]:
            self.line("note", "machine batch", one=sizes[0], two=sizes[1])
        elif same or self.is_reproducible:
            self.judge(same, "machines")
        else:
            self.line("note", "random", what="two machines")
        first, second = [checkpoints_in(folder.parent) for folder in run.folders]
        if first & second and shared not in run.folders:
            self.line("note", "both save", names=sorted(first & second))

    def summary(self):
        wrong, loses, notes = [self.counts[word] for word in ("WRONG", "LOSES", "note")]
        checked = self.counts["ok"] + wrong + loses
        text = "Nothing of what was checked is wrong."
        if wrong:
            text = f"First mend this: {self.wrong[0]}."
        elif not checked:
            text = "Nothing was checked."
        seconds = time.monotonic() - self.began
        print(f"\n{self.name}: {text}")
        counts = f"{wrong} WRONG, {loses} LOSES, {notes} note{'s' * (notes != 1)}"
        counts = f"{checked} checked, {self.counts['not judged']} not judged: {counts}"
        print(f"{counts}. [{seconds:.0f} s]")
        print(f"Everything that the launches said: {self.base}")


class Replay:
    """Compares the gradients of each step with those of the ranks."""

    def __init__(self, one, run, float64, order):
        self.one = one
        self.order = order
        said = [line.partition("\t") for line in one.read("replayed").splitlines()]
        self.said = [(kind, line) for kind, _, line in said]
        self.problems = [line for kind, line in self.said if kind == "problem"]
        self.worst = 0.0
        self.first = None  # the first step that is off
        self.uneven = None
        self.name = "?"
        self.scale = ""
        limit = LIMITS[float64]
        pairs = list(zip(run.steps[0], one.steps[0]))
        pairs = [pair for pair in pairs if pair[0]["optimizer"] == pair[1]["optimizer"]]
        self.compared = len(pairs)
        before = {number: start["weights"] for number, start in run.starts.items()}
        for a, b in pairs:
            number = a["step"]
            mine, theirs = b["gradients"], a["gradients"]
            ranks = [of_rank[number]["gradients"] for of_rank in run.steps]
            if not any(theirs) or any(gradients != theirs for gradients in ranks):
                # The optimizer averages or clears them. So compare what it does.
                old = before[a["optimizer"]]
                mine, theirs = [difference(x["weights"], old) for x in (b, a)]
            before[a["optimizer"]] = a["weights"]
            off = relative(mine, theirs)
            rows = [len(of_rank[number]["inputs"]) for of_rank in run.steps]
            if off > limit and len(set(rows)) > 1 and off < 0.5:
                uneven = (number, " and ".join(map(str, rows)), off)
                self.uneven = self.uneven or uneven
                continue
            if not off < limit and self.first is None:
                self.first = number
                self.worst = off
                each = list(map(abs, difference(mine, theirs)))
                self.scale = scale_of(mine, theirs, limit)
                names = run.starts[a["optimizer"]]["names"]
                self.name = names[each.index(max(each))] if each else "?"
            elif self.first is None:
                self.worst = max(self.worst, off)
        self.is_right = self.compared > 0 and self.first is None
        # Gradient accumulation that is divided by the number of ranks.
        a, b = [sum(x["backwards"] for x in r.steps[0][:1]) for r in (run, one)]
        self.takes_turns = order == "rank by rank" and b == run.ranks * a > 0


def trains_together(run):
    """Whether most steps follow a forward() of DDP, or a collective."""
    steps = run.steps[0]
    together = sum(step["together"] > 0 for step in steps)
    return steps[0]["ranks"] > 1 and together > len(steps) / 2


def noises(one, two, compare):
    """Whether this is true of what some step has drawn in both.

    Without the order of an epoch: samples are compared anyway.
    """
    for steps in zip(one, two):
        a, b = [[d for d in s["draws"] if d[0] != "randperm"] for s in steps]
        if (a or b) and compare(repr(a), repr(b)):
            return True
    return False


def remove(folder):
    for path in folder.glob("*.pickle"):
        path.unlink()


def shared_of(run, kind):
    """The share of rank 0's samples that rank 1 has in the same step, or None."""
    a, b = [list(map(Counter, run.samples(rank, kind))) for rank in (0, 1)]
    total = sum(rows.total() for rows in a[:-1])
    by_chance = shared_rows(a, b[1:])  # rows that all steps have, or few values
    if total == by_chance:
        return None
    return (shared_rows(a[:-1], b) - by_chance) / (total - by_chance)


def shared_rows(one, two):
    return sum((a & b).total() for a, b in zip(one, two))


def differing_buffers(run):
    names = set()
    for steps in zip(*run.steps):
        for step in steps[1:]:
            names |= {
                name
                for name, _ in steps[0]["buffers"].items() ^ step["buffers"].items()
            }
    return sorted(names)


def difference(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


def relative(expected, found):
    """How far apart two vectors are, relative to the first."""
    if len(expected) != len(found):
        return math.inf
    off = math.dist(expected, found) / (math.hypot(*expected) or 1.0)
    return off if math.isfinite(off) else math.inf


def scale_of(expected, found, limit):
    """A sentence if the one is a multiple of the other."""
    square = sum(x * x for x in expected) or 1.0
    factor = sum(x * y for x, y in zip(expected, found, strict=True)) / square
    if relative([factor * x for x in expected], found) < limit:
        return f"It is {factor:.4g} times as large."
    return ""


def drift(expected, steps, launch, limit):
    """How far steps are from those expected, relative to how far the weights have come.

    Returns the largest distance, and the first step with more than the limit.
    """
    far = 0.0
    where = None
    for a, b in zip(expected, steps):
        start = launch.starts[a["optimizer"]]["weights"]
        apart = math.dist(a["weights"], b["weights"])
        apart /= math.dist(a["weights"], start) or 1.0
        far = max(far, apart)
        if where is None and not apart < limit:  # not finite, too
            where = a["step"]
    return far, where


def states_of(run):
    """For each step, the weights of each optimizer before it."""
    bits = {number: start["bits"] for number, start in run.starts.items()}
    states = []
    for step in run.steps[0]:
        states.append(sorted(bits.items()))
        bits[step["optimizer"]] = step["bits"]
    return states


def place_of(again, plain):
    """The number of steps after which a relaunch has started, or None."""
    left = len(again.steps[0])
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


def checkpoints_in(machine):
    endings = ".pt", ".pth", ".tar", ".ckpt", ".bin", ".safetensors"
    paths = [path for path in machine.rglob("*") if path.suffix in endings]
    paths = [path for path in paths if not path.is_symlink()]
    return {os.path.relpath(path, machine / "folder") for path in paths}


def printed(run, pattern):
    """The numbers that rank 0 prints and that match; or those among the errors."""
    found = re.findall(pattern, run.read("rank0.out"))
    if not found:
        # All ranks write there: take a line that each of them prints once.
        lines = re.findall(pattern, run.read("errors"))
        found = [line for i, line in enumerate(lines) if line not in lines[:i]]
    numbers = [
        re.search(r"[-+]?(\d+\.?\d*([eE][-+]?\d+)?|nan|inf)", text) for text in found
    ]
    return [number[0] for number in numbers if number]


def shortened(pattern):
    return pattern.split("(")[0].replace("\\s", " ").strip() or pattern


# ---- The command line ----------------------------------------------------------------
def parse(arguments):
    usage = "python check.py [options] mine.py [its arguments]"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        usage=usage, description=__doc__, formatter_class=formatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two ranks and the replay, no more")
    text = "end each launch after this many steps of an optimizer"
    add("--steps", type=int, default=0, metavar="N", help=text)
    add("--ranks", default="1,2,4", help="numbers of ranks to compare (1,2,4)")
    text = "a number that rank 0 prints, and that must not depend on the ranks, such as"
    text += " 'val_loss (\\S+)' (repeatable)"
    add("--compare", action="append", default=[], metavar="REGEX", help=text)
    text = "a file or folder that the script expects where it runs (repeatable)"
    add("--link", action="append", default=[], metavar="PATH", type=Path, help=text)
    text = "leave out ranks, resume, machines or failure (repeatable)"
    choices = ["ranks", "resume", "machines", "failure"]
    add("--skip", action="append", default=[], choices=choices, help=text)
    text = "seconds that each launch may take, while others run beside it (120)"
    add("--timeout", type=int, default=120, help=text)
    add("-m", dest="is_module", action="store_true", help="a module, not a file")
    add("script", help="the training script, or the module")
    add("words", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    options.module = options.script if options.is_module else None
    options.script = None if options.is_module else Path(options.script)
    for path in [options.script, *options.link]:
        if path is not None and not path.exists():
            sys.exit(f"there is no {path}")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)+", options.ranks):
        sys.exit(f"--ranks {options.ranks}: give two or more numbers, such as 1,2,4")
    options.ranks = sorted({2, *map(int, options.ranks.split(","))})
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
        if check.first_answer():
            check.check_printed()
            check.say_what_comes()
            if "ranks" in check.parts:
                check.any_number_of_ranks()
            check.disturbed()
    except TooSlow:
        check.line("note", "slow", timeout=options.timeout)
    except KeyboardInterrupt:
        sys.exit("interrupted: no process is left")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for launch in list(Launch.alive):
            launch.kill()
        for folder in check.base.glob("record-*"):
            remove(folder)
    check.summary()
    sys.exit(min(check.counts["WRONG"], 1))


if __name__ == "__main__":
    if "CHECK_LOG" in os.environ:
        watch(sys.argv[1:])
    else:
        main()
