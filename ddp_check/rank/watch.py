"""Hears what the script calls, and tells the other files of this room.

steps.py: what becomes of the weights. loaders.py: batches. layers.py: batch norm and
dropout. losses.py: what sums are divided by. draws.py and generators.py: random
numbers. replay.py: what was recorded, and is given again.
"""

import contextlib
import functools
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optim

from ddp_check import trace
from ddp_check.rank import weights as w
from ddp_check.rank.draws import Draws
from ddp_check.rank.generators import Generators
from ddp_check.rank.layers import Layers, is_of_func
from ddp_check.rank.loaders import Loaders
from ddp_check.rank.losses import counts_of, sums_in
from ddp_check.rank.patch import PRIVATE, private, wrap
from ddp_check.rank.steps import Steps
from ddp_check.rank.tensors import (
    checksum,
    checksums_of_buffers,
    rows_of,
    tensors_in,
)


class Watcher:
    """Wraps what a script calls. cast(tensor) gives tensors of a batch their dtype."""

    def __init__(self, options, folder, rank, cast, gpus=None):
        self.options = options
        self.folder, self.rank, self.gpus = folder, rank, gpus
        self.steps = Steps(options, folder, rank)
        self.generators = Generators()
        self.draws = Draws(self.see_draw, self.see_move, self.see_collective)
        self.loaders = Loaders(self, cast, self.steps.replay)
        self.layers = Layers(self.steps, self.draws)
        self.depth = 0  # of optimizers: one may call another one's step()
        self.outer = None  # the one that makes a step, or has made the last one
        self.has_gradients = True  # the step that is made has no closure
        self.modules = 0  # that are in their forward(), or in backward()
        self.evaluated = None  # the module that was called in eval() mode
        self.optimizers = []
        self.groups = set()  # of the DDP objects: see run.forget_everything()
        self.last = trace.Fetch(())  # the batch that came last
        self.since = {}  # iteration: its last batch since the last backward()
        self.batches = 0
        self.thread = threading.get_ident()
        self.marks = set()
        self.address = self.outside = ""
        self.listen()

    def listen(self):
        wrap(optim.Optimizer, "__init__", self.see_optimizer)
        optim.register_optimizer_step_pre_hook(self.before_step)
        optim.register_optimizer_step_post_hook(self.after_step)
        wrap(torch.autograd, "backward", self.see_backward)
        wrap(nn.Module, "__call__", self.see_call)
        wrap(DistributedDataParallel, "forward", self.see_ddp)
        for owner, name, mark in (
            (DistributedDataParallel, "register_comm_hook", "hook"),
            (DistributedDataParallel, "__init__", "wrapped"),
            (Join, "__enter__", "join"),
        ):
            wrap(owner, name, functools.partial(self.see_mark, mark))
        for owner in (torch.cuda, torch.accelerator):
            for name in ("is_available", "device_count"):
                wrap(owner, name, self.see_question)
        wrap(torch.accelerator, "current_accelerator", self.see_question)
        wrap(torch, "save", self.see_save)
        for owner, name in ((torch.jit, "trace"), PRIVATE["trace"]):
            wrap(owner, name, self.see_trace)
        wrap(torch.jit, "trace_module", self.see_trace)
        wrap(torch.export, "export", self.see_trace)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for owner in (nn.utils, nn.utils.clip_grad):
                wrap(owner, name, self.see_clip)
        self.draws.__enter__()
        # A forked process, such as a worker of a loader, is not this rank.
        os.register_at_fork(after_in_child=self.stop)

    def stop(self):
        self.draws.paused = True
        self.depth = self.modules = 10**6
        self.outer = None
        self.steps.stop()

    def in_main_thread(self):
        """A script may read its loader in another one."""
        return threading.get_ident() == self.thread

    @contextlib.contextmanager
    def own_work(self):
        """What the check computes by itself is not the script's."""
        if not self.in_main_thread():  # the mode is not on there
            yield
            return
        before, self.draws.paused = self.draws.paused, True
        try:
            yield
        finally:
            self.draws.paused = before

    @property
    def step(self):
        """The one to which what happens now belongs."""
        ended = self.steps.ended
        return ended if self.depth and ended else self.steps.now

    def notes(self, step):
        """What is known when a step ends."""
        if self.gpus and self.gpus._has_own_seed():
            self.marks.add("own seed")
        if self.gpus and self.gpus._is_shared():
            self.marks.add("shared gpu")
        if self.steps.recording and self.steps.recording.cut:
            self.marks.add("cut")
        if self.steps.replay and self.steps.replay.alone:
            self.marks.add("alone")
        step.marks = sorted(self.marks)
        step.address, step.outside = self.address, self.outside

    # ---- Steps
    def begin(self, module=None):
        self.evaluated = None
        if self.steps.writer is None:  # in a process that was forked
            return
        with self.own_work():
            begins = self.steps.begin(self.notes)
        if begins:
            self.may_leave()
            self.disturb()
        if module is not None:
            with self.own_work():
                self.steps.see_module(module)
        self.locate()

    def locate(self):
        """A relaunch: after which step of the other launch does it start?"""
        relaunch, steps = self.steps.relaunch, self.steps
        if relaunch and steps.now.number == 0:
            with self.own_work():
                weights = sum(map(w.weights_of, self.optimizers), [])
                # Those in no module may be of the samples of a step.
                names = steps.weights.name_of
                weights = [one for one in weights if id(one) in names] or weights
                plain = [one for one in weights if not hasattr(one, "full_tensor")]
                bits = set(map(checksum, plain))
                if len(plain) < len(weights):  # one rank by itself cannot look at them
                    bits = set(steps.weights.bits.values())
                relaunch.find_offset(bits)

    def may_leave(self):
        number, replay = self.steps.now.number, self.steps.replay
        over = bool(replay) and number >= replay.steps
        if self.options.probe and number == 3 > self.steps.together:
            over = "cuda" in self.marks and "wrapped" not in self.marks
        if self.steps.relaunch:
            number = max(number, self.steps.relaunch.place(number))
        if over or (self.options.steps and number >= self.options.steps):
            self.leave()

    def disturb(self):
        action, at, number = self.options.action, self.options.at, self.steps.now.number
        if action == "stop" and self.rank == 0 and number >= at:
            if number == at:
                os.kill(os.getppid(), signal.SIGTERM)  # torchrun passes it on
            time.sleep(self.options.pause)  # so that it arrives before the end
        if self.rank == 1 and number == at:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if action == "fail":
                raise RuntimeError("ddp_check makes this rank fail")

    def see_optimizer(self, create, optimizer, *args, **kwargs):
        create(optimizer, *args, **kwargs)
        if not any(one is optimizer for one in self.optimizers):
            self.optimizers.append(optimizer)
        self.draws.sets_up = False
        # FSDP takes a second to import. So it is changed when the script has it.
        fsdp = sys.modules.get("torch.distributed.fsdp")
        module = getattr(fsdp, "FSDPModule", None)
        if module and not hasattr(module.unshard, "__wrapped__"):
            wrap(module, "unshard", self.see_unshard)

    def before_step(self, optimizer, args, kwargs):
        if optimizer is self.outer:  # it cannot call itself: its last step has failed
            self.depth = 0
        self.depth += 1
        if self.depth > 1:
            return
        self.outer = optimizer
        closures = [*args[1:], kwargs.get("closure")]
        self.has_gradients = all(closure is None for closure in closures)
        self.counts = w.can_change_weights(optimizer)
        if self.counts:
            self.note_generators()
            if self.has_gradients and not self.step.backwards:
                self.uses_batches()  # by autograd.grad(), say
            if any(one is optimizer for one in self.steps.optimizers):
                self.begin()  # without a forward() or backward() that was seen
            with self.own_work():
                self.steps.optimize(optimizer, self.has_gradients)

    def after_step(self, optimizer, args, kwargs):
        if self.depth == 1 and self.counts:
            self.note_generators()
            with self.own_work():
                if not self.has_gradients:
                    self.steps.see_gradients(optimizer)
                if self.steps.ended is None:
                    self.draws.end_step()
                self.steps.end(optimizer, self.notes)
        self.depth = max(self.depth - 1, 0)

    def leave(self):
        """End this rank, as --steps asks for."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.close()
        for worker in multiprocessing.active_children():
            worker.kill()  # it would look for its parent only every 5 seconds
        os._exit(0)

    def close(self):
        """At the end of the script."""
        with self.own_work():
            self.steps.close(self.notes)

    def forget(self):
        """Let go of what the script has made. Returns the groups of its DDP objects."""
        self.optimizers.clear()
        self.loaders.known.clear()
        self.steps.weights.forget()
        return self.groups

    # ---- What the script calls. The first argument is the original.
    def sees_address(self, address):
        self.address = address

    def see_mark(self, mark, call, *args, **kwargs):
        self.marks.add(mark)
        return call(*args, **kwargs)

    def see_question(self, ask, *args, **kwargs):
        """Is there a GPU? Torch itself asks, too: in each optimizer's step."""
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if not caller.startswith("torch."):
            self.marks.add("cuda")
        return ask(*args, **kwargs)

    def see_trace(self, trace, *args, **kwargs):
        """It fails under a dispatch mode, and keeps whatever is computed meanwhile."""
        self.modules += 1  # so no module is the outermost one, of which rows are kept
        try:
            with private("without dispatch modes")():
                return trace(*args, **kwargs)
        finally:
            self.modules -= 1

    def see_save(self, save, *args, **kwargs):
        file = inspect.signature(save).bind(*args, **kwargs).arguments["f"]
        file = getattr(file, "name", file)  # of open(path, "wb")
        if isinstance(file, (str, os.PathLike)):
            path, folder = map(os.path.realpath, (file, self.folder))
            if Path(folder).parent not in Path(path).parents:
                self.outside = path
        return save(*args, **kwargs)

    def see_clip(self, clip, *args, **kwargs):
        with self.own_work():
            self.steps.clip()
        return clip(*args, **kwargs)

    def see_ddp(self, forward, wrapped, *inputs, **named):
        self.groups.add(wrapped.process_group)
        self.steps.now.ddp_forwards += dist.get_world_size() > 1
        now = self.steps.now
        if wrapped.training and torch.is_grad_enabled():
            if not now.buffers:  # before DDP replaces them by rank 0's
                now.buffers = checksums_of_buffers(wrapped.module)
            if self.modules > 1:
                now.ddp_inputs += rows_of(tensors_in([inputs, named]))[0]
        return forward(wrapped, *inputs, **named)

    def see_unshard(self, unshard, module, *args, **named):
        """A script may gather weights before the first call."""
        if self.modules == 0:
            with self.own_work():
                self.steps.see_module(module)
        return unshard(module, *args, **named)

    def see_call(self, call, module, *inputs, **named):
        if not self.in_main_thread():  # such as a transform of the data
            return call(module, *inputs, **named)
        if self.modules == 0:
            self.see_outermost(module, [inputs, named])
            if not inputs and not named:  # a trainer: what it calls gets the rows
                return call(module)
        self.modules += 1
        self.draws.in_module = self.modules
        try:
            return call(module, *inputs, **named)
        finally:
            self.modules -= 1
            self.draws.in_module = self.modules

    def see_outermost(self, module, inputs):
        weights = list(module.parameters())
        if any(map(is_of_func, [*weights, *tensors_in(inputs)])):
            return
        grad = torch.is_grad_enabled()
        trains = grad and module.training
        if trains and self.has_gradients:
            self.depth = 0  # only a closure calls it in a step: the last one has failed
        if weights and not trains:  # its loader may have come to its end already
            for fetch in (self.last, self.since.get(self.last.key, self.last)):
                fetch.evaluates = True
        if grad and any(weight.requires_grad for weight in weights):
            if trains:
                self.begin(module)
                self.layers.see_module(module)
            else:  # an evaluation, if no backward() follows
                self.evaluated = module
            names = {type(part).__name__ for part in module.modules()}
            self.steps.now.sharded |= "FullyShardedDataParallel" in names
            self.steps.now.tensor_parallel |= w.shares_samples(module, weights)
            if trains:  # in eval() mode it may be an evaluation
                samples, parts = rows_of(tensors_in(inputs))
                self.steps.now.inputs += samples
                self.steps.now.parts += parts

    def see_backward(self, backward, *args, **kwargs):
        self.begin(self.evaluated)
        self.step.backwards += 1
        if args and torch.is_tensor(args[0]):
            args = (self.see_loss(args[0]), *args[1:])
        self.uses_batches()
        self.draws.end_turn()
        self.modules += 1  # layers that are computed again are not outermost
        try:
            return backward(*args, **kwargs)
        finally:
            self.modules -= 1

    def uses_batches(self):
        """To train: the last one, and those of other loaders, as of unlabeled data."""
        self.last.trains = True
        for fetch in self.since.values():
            fetch.trains |= not fetch.evaluates
        self.since.clear()

    def see_loss(self, loss):
        """Returns it, or in a replay what takes its place: see losses.py."""
        place, terms = (self.step.number, self.step.backwards), sums_in(loss)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        batches = [len(fetch.ids) for fetch in self.since.values()]
        counted = [(f, counts_of(shape, batches, ranks)) for f, shape in terms]
        self.steps.keep("sums", place, counted)
        replay = self.steps.replay
        return replay.as_on_a_rank(place, terms, loss) if replay else loss

    # ---- What loaders yield
    @contextlib.contextmanager
    def fetching(self):
        if not self.in_main_thread():
            yield
            return
        self.note_generators()
        with self.own_work(), self.generators.pause():
            yield

    def sees_loader(self, number, samples, batches):
        self.steps.keep("length", number, (samples, batches))

    def begins_iteration(self, number):
        """A loader starts again. What it yielded before was only looked at."""
        self.since = {k: f for k, f in self.since.items() if k[0] != number}

    def has_other_length(self):
        self.marks.add("other length")

    def begins_to_give(self):
        if self.steps.now.number == 0 and not self.steps.now.fetched:
            self.steps.replay.merge.take_notes()  # of the set-up

    def gives(self):
        self.note_generators()

    def fetched(self, fetch, batch, rows):
        if self.steps.now.number == 0 and not self.steps.now.fetched:
            self.steps.now.other_draws.clear()  # the set-up has drawn them
        self.last = fetch
        self.steps.now.fetched.append(fetch)
        if batch is not None:
            self.since[fetch.key] = fetch
            place = *fetch.key, self.batches
            self.batches += 1
            self.steps.keep("batch", place, (rows, batch, self.draws.turn))
        else:  # a loop that has ended without a backward() was an evaluation
            self.since.pop(fetch.key, None)

    # ---- Random numbers and collectives
    def note_generators(self):
        self.step.other_draws |= self.generators.take()

    def see_move(self, name, tensor):
        replay = self.steps.replay
        if replay and len(tensor) == replay.merge.rows:
            text = f"torch.{name}() of the rows of a batch, whose neighbors are others"
            replay.merge.notes.problems.append(text)

    def see_collective(self, floats):
        if self.optimizers and dist.get_world_size() > 1:
            self.step.collectives += 1
            self.step.floats_reduced += floats

    def see_draw(self, key, number, turn, draw, high, result):
        if torch.is_grad_enabled():
            self.steps.now.draws.append(draw)
        step = self.steps.now.number
        self.steps.keep("draw", (step, key, number), (high, result))
        self.steps.keep("turn", turn, (step, key, number))
        self.locate()
        source = self.steps.replay or self.steps.relaunch
        with self.own_work():
            return source and source.draw(step, key, number, turn, result, high)
