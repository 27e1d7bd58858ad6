"""Turns what the script calls into the Starts and Steps of trace.py.

A step begins with a forward() in training, or with a backward() if there is no module,
once an optimizer has ended the step before. All optimizers that change weights until
the next one begins belong to it: Muon with AdamW, or those in hooks of backward().
What a loader yields, or a generator draws, after the first of them belongs to the next.
"""

import contextlib
import dataclasses
import functools
import inspect
import multiprocessing
import os
import signal
import sys
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
from ddp_check.rank.loaders import Loaders
from ddp_check.rank.patch import wrap
from ddp_check.rank.record import Recording
from ddp_check.rank.replay import Reference, Relaunch, Replay
from ddp_check.rank.tensors import (
    checksum,
    checksums_of_buffers,
    is_finite,
    rows_of,
    tensors_in,
)


def reference_of(options, rank):
    """What this launch is compared with, or None."""
    if not options.reference:
        return None
    kind = Replay if options.replay else Relaunch if options.again else Reference
    return kind(options, rank)


class Watcher:
    """Writes the steps of this rank.

    now is the step that is seen at present. ended is the one before it, from an
    optimizer's step on until the next one begins.
    """

    def __init__(self, options, folder, rank, cast, gpus=None):
        self.options = options
        self.folder, self.rank, self.gpus = folder, rank, gpus
        self.writer = trace.Writer(folder, rank)
        self.recording = Recording(options.record, rank) if options.record else None
        self.reference = reference_of(options, rank)
        replay = self.reference if options.replay else None
        self.replay = replay
        self.weights = w.Weights(self.reference.shapes if self.reference else {})
        self.generators = Generators()
        self.draws = Draws(self.see_draw, self.see_collective, self.see_order)
        self.loaders = Loaders(self, cast, replay)
        self.now, self.ended = trace.Step(0), None
        self.written = None  # what was last written of a step
        self.stepped = []  # the optimizers that have ended this step
        self.gradients = None  # as an optimizer gets them
        self.unclipped = {}
        self.counts = True  # whether the optimizer can change weights
        self.depth = 0  # one optimizer may call another one's step()
        self.modules = 0  # that are in their forward(), or in backward()
        self.has_modules = False
        self.in_norm = False
        self.optimizers = []
        self.groups = set()  # of the DDP objects: see run.forget_everything()
        self.last = trace.Fetch(())  # the batch that came last
        self.batches = 0
        self.marks = set()
        self.address = self.outside = ""
        self.lines = None  # see run.py
        self.together = 0  # steps in which the ranks do something together
        self.listen()

    def listen(self):
        wrap(optim.Optimizer, "__init__", self.see_optimizer)
        optim.register_optimizer_step_pre_hook(self.before_step)
        optim.register_optimizer_step_post_hook(self.after_step)
        wrap(torch.autograd, "backward", self.see_backward)
        wrap(nn.functional, "batch_norm", self.see_batch_norm)
        wrap(nn.SyncBatchNorm, "forward", self.see_sync_norm)
        wrap(nn.Module, "__call__", self.see_call)
        wrap(DistributedDataParallel, "forward", self.see_ddp)
        for owner, name, mark in (
            (DistributedDataParallel, "register_comm_hook", "hook"),
            (DistributedDataParallel, "__init__", "wrapped"),
            (torch.cuda, "is_available", "cuda"),
            (torch, "manual_seed", "seeded"),
            (Join, "__enter__", "join"),
        ):
            wrap(owner, name, functools.partial(self.see_mark, mark))
        wrap(torch, "save", self.see_save)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(nn.utils, name, self.see_clip)
            wrap(nn.utils.clip_grad, name, self.see_clip)
        self.draws.__enter__()
        # A forked process, such as a worker of a loader, is not this rank.
        os.register_at_fork(after_in_child=self.stop)

    def stop(self):
        self.draws.paused = True
        self.depth = self.modules = 10**6
        self.writer = self.recording = None

    @contextlib.contextmanager
    def own_work(self):
        """What the check computes by itself is not the script's."""
        before, self.draws.paused = self.draws.paused, True
        try:
            yield
        finally:
            self.draws.paused = before

    def keep(self, kind, key, value):
        if self.recording:
            self.recording.keep(kind, key, value)

    def keep_values(self, kind, key, values):
        """Of weights or gradients: all ranks have the same."""
        if self.rank == 0:
            self.keep(kind, key, values)

    @property
    def step(self):
        """The one to which what happens now belongs."""
        return self.ended if self.depth and self.ended else self.now

    # ---- A step begins
    def begin(self, module=None):
        if self.ended:
            self.finish()
            self.ended, self.stepped, self.unclipped = None, [], {}
            self.may_leave()
            self.disturb()
        if module is not None:
            with self.own_work():
                self.start(self.weights.see_module(module))
        self.locate()

    def start(self, names):
        """These weights are seen for the first time."""
        if not names:
            return
        if self.replay:
            starts = self.replay.starts
            self.weights.set({n: starts[n] for n in names if n in starts})
        self.weights.look(names)
        values = {name: self.weights.values[name] for name in names}
        bits = {name: self.weights.bits[name] for name in names}
        finite = all(map(is_finite, values.values()))
        self.writer.write(trace.Start(self.now.number, bits, finite))
        for name, value in values.items():
            self.keep_values("start", name, value)

    def locate(self):
        """A relaunch: after which step of the other launch does it start?"""
        if self.options.again and self.now.number == 0 and not self.ended:
            with self.own_work():
                weights = sum(map(w.weights_of, self.optimizers), [])
                plain = [one for one in weights if not hasattr(one, "full_tensor")]
                bits = set(map(checksum, plain))
                if len(plain) < len(weights):  # one rank by itself cannot look at them
                    bits = set(self.weights.bits.values())
                self.reference.find_offset(bits)

    def may_leave(self):
        number = self.now.number
        if self.replay and self.replay.is_over(number):
            self.leave()
        if self.options.again:
            number = max(number, self.reference.place(number))
        hopeless = "cuda" in self.marks and "wrapped" not in self.marks
        hopeless &= self.options.probe and self.together < 3 == self.now.number
        if hopeless or (self.options.steps and number >= self.options.steps):
            self.leave()

    def disturb(self):
        action, at, number = self.options.action, self.options.at, self.now.number
        if action == "stop" and self.rank == 0 and number >= at:
            if number == at:
                os.kill(os.getppid(), signal.SIGTERM)  # torchrun passes it on
            time.sleep(self.options.pause)  # so that it arrives before the end
        if self.rank == 1 and number == at:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if action == "fail":
                raise RuntimeError("ddp_check makes this rank fail")

    # ---- An optimizer ends it
    def see_optimizer(self, create, optimizer, *args, **kwargs):
        create(optimizer, *args, **kwargs)
        if not any(one is optimizer for one in self.optimizers):
            self.optimizers.append(optimizer)
        self.draws.sets_up = False

    def before_step(self, optimizer, args, kwargs):
        self.depth += 1
        if self.depth > 1:
            return
        self.note_generators()
        self.counts = w.can_change_weights(optimizer)
        if not self.counts:
            return
        if any(one is optimizer for one in self.stepped):
            self.begin()  # without a forward() or backward() that was seen
        with self.own_work():
            self.start(self.weights.see_optimizer(optimizer))
            if self.replay:
                call = self.step_of_call()
                w.set_options(optimizer, self.replay.first.get("options", call))
            closures = [*args[1:], kwargs.get("closure")]
            has_closure = any(closure is not None for closure in closures)
            self.gradients = None if has_closure else self.gradients_of(optimizer)

    def gradients_of(self, optimizer):
        return self.weights.gradients(sum(self.weights.names(optimizer), []))

    def step_of_call(self):
        """The step, and how many optimizers have ended it before."""
        return self.step.number, len(self.stepped)

    def after_step(self, optimizer, args, kwargs):
        if self.depth == 1 and self.counts:
            self.see_changes(optimizer)
        self.depth -= 1

    def see_changes(self, optimizer):
        self.note_generators()
        call = self.step_of_call()
        if self.ended is None:
            self.ended = self.now
            self.now = trace.Step(self.now.number + 1)
            self.draws.end_step()
            self.take_notes()
            together = self.ended.ddp_forwards + self.ended.floats_reduced
            self.together += together > 0
        with self.own_work():
            self.end_step(optimizer, call)
        self.stepped.append(optimizer)

    def end_step(self, optimizer, call):
        step, weights = self.ended, self.weights
        groups = weights.names(optimizer)
        names = sum(groups, [])
        gradients = self.gradients
        if gradients is None:
            gradients = self.gradients_of(optimizer)
        changed = weights.look(weights.named)
        step.ranks = dist.get_world_size() if dist.is_initialized() else 1
        step.trained += [name for name in names if name not in step.trained]
        for group, of_group in zip(optimizer.param_groups, groups):
            if of_group:
                step.rates[of_group[0]] = float(group.get("lr", 0))
        step.gradient_bits |= {n: checksum(value) for n, value in gradients.items()}
        step.gradient_values += sum(value.numel() for value in gradients.values())
        self.keep("options", call, w.options_of(optimizer))
        after = {name: new for name, (_, new) in changed.items()}
        self.keep("after", call, after if self.rank == 0 else {})
        self.keep_values("gradient", call, gradients)
        self.keep_values("unclipped", step.number, self.unclipped)
        place = self.reference.place(step.number) if self.reference else -1
        step.place = place
        if place >= 0:
            compare = self.reference
            step.gradients |= compare.compare_gradients(place, gradients, names)
            step.unclipped |= compare.compare_unclipped(place, self.unclipped)
            step.changes |= compare.compare_changes(place, changed, names)
            step.weights = compare.compare_weights(place, weights.values, False)
        if self.replay:
            # So each step is compared by itself, and chaos does not grow.
            weights.set(self.replay.first.get("after", call, {}))
        self.write()
        self.keep("bits", step.number, step.bits)

    def finish(self):
        """The step is over: what has changed the weights since the optimizers?"""
        if self.ended is None or self.writer is None:
            return
        step = self.ended
        with self.own_work():
            changed = self.weights.look(self.weights.plain_ones())
            final = {name: new for name, (_, new) in changed.items()}
            self.keep_values("final", step.number, final)
            if final:
                self.keep("bits", step.number, dict(self.weights.bits))
            if step.place >= 0:
                values = self.weights.values
                step.weights = self.reference.compare_weights(step.place, values, True)
            if self.replay and step.place >= 0:
                theirs = self.replay.values_at_end(step.place)
                also = self.replay.first.get("final", step.place, {})
                names = [name for name in {*final, *also} if name in theirs]
                self.weights.set({name: theirs[name] for name in names})
        self.write()

    def write(self):
        step = self.ended
        step.bits = dict(self.weights.bits)
        step.finite = all(map(is_finite, self.weights.values.values()))
        if self.gpus and self.gpus._has_own_seed():
            self.marks.add("own seed")
        if self.gpus and self.gpus._is_shared():
            self.marks.add("shared gpu")
        if self.recording and self.recording.cut:
            self.marks.add("cut")
        step.marks = sorted(self.marks)
        step.address, step.outside = self.address, self.outside
        record = dataclasses.asdict(step)
        if record != self.written:
            self.written = record
            self.writer.write(step)

    def take_notes(self):
        """What a replay could not do in this step, and so on."""
        if self.replay:
            notes = self.replay.merge.take_notes()
            self.ended.problems += notes.problems
            self.ended.padded = notes.padded
            self.ended.alike = sorted(notes.alike)
            self.ended.different = sorted(notes.different)
            if self.replay.alone:
                self.marks.add("alone")

    def close(self):
        """At the end of the script."""
        if self.writer is None:
            return
        self.finish()
        if self.recording:
            self.recording.close()
        ran, every = self.lines.take() if self.lines else ([], [])
        self.writer.write(trace.End(ran, every))
        self.writer = None

    def forget(self):
        """Let go of what the script has made. Returns the groups of its DDP objects."""
        self.optimizers.clear()
        self.stepped.clear()
        self.loaders.known.clear()
        self.weights = w.Weights({})
        return self.groups

    def leave(self):
        """End this rank, as --steps asks for."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.close()
        for worker in multiprocessing.active_children():
            worker.kill()  # it would look for its parent only every 5 seconds
        os._exit(0)

    # ---- What the script calls. The first argument is the original.
    def sees_address(self, address):
        self.address = address

    def see_mark(self, mark, call, *args, **kwargs):
        self.marks.add(mark)
        return call(*args, **kwargs)

    def see_save(self, save, *args, **kwargs):
        file = inspect.signature(save).bind(*args, **kwargs).arguments["f"]
        file = getattr(file, "name", file)  # of open(path, "wb")
        if isinstance(file, (str, os.PathLike)):
            path, folder = map(os.path.realpath, (file, self.folder))
            if Path(folder).parent not in Path(path).parents:
                self.outside = path
        return save(*args, **kwargs)

    def see_clip(self, clip, *args, **kwargs):
        if not self.depth and self.ended is None:
            self.now.clipped = True
            if not self.unclipped:
                with self.own_work():
                    self.unclipped = self.weights.gradients(self.weights.named)
        return clip(*args, **kwargs)

    def see_ddp(self, forward, wrapped, *inputs, **named):
        self.groups.add(wrapped.process_group)
        self.now.ddp_forwards += dist.get_world_size() > 1
        if wrapped.training and torch.is_grad_enabled() and not self.now.buffers:
            # Before DDP replaces them by rank 0's.
            self.now.buffers = checksums_of_buffers(wrapped.module)
        return forward(wrapped, *inputs, **named)

    def see_call(self, call, module, *inputs, **named):
        if self.modules == 0:
            self.see_outermost(module, [inputs, named])
        self.modules += 1
        self.draws.in_module = self.modules
        try:
            return call(module, *inputs, **named)
        finally:
            self.modules -= 1
            self.draws.in_module = self.modules

    def see_outermost(self, module, inputs):
        weights = list(module.parameters())
        grad = torch.is_grad_enabled()
        trains = grad and module.training
        if weights and not trains:
            self.last.evaluates = True
        if grad and any(weight.requires_grad for weight in weights):
            self.has_modules = True
            self.begin(module)
            if type(module).__name__ == "FullyShardedDataParallel":
                self.now.sharded = True
            self.now.tensor_parallel |= w.shares_samples(module, weights)
            if trains:  # in eval() mode it may be an evaluation
                samples, parts = rows_of(tensors_in(inputs))
                self.now.inputs += samples
                self.now.parts += parts

    def see_backward(self, backward, *args, **kwargs):
        if not self.has_modules:
            self.begin()
        self.step.backwards += 1
        self.last.trains = True
        self.draws.end_turn()
        self.modules += 1  # layers that are computed again are not outermost
        try:
            return backward(*args, **kwargs)
        finally:
            self.modules -= 1

    # ---- Batch norm
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
            self.now.norms = True
        if not training and mean is not None and not torch.is_grad_enabled():
            number = checksum(mean)
            if number not in self.now.evaluated:
                self.now.evaluated.append(number)
        if training:
            place = self.now.number, self.draws.next_number("norm")
            self.keep("norm", place, len(x))
            sizes = self.replay and self.replay.rows_of_ranks(place, len(x))
            if sizes:
                return self.replay.norm_each(sizes, norm, x, mean, var, *more)
        return norm(x, mean, var, *more)

    # ---- What loaders yield
    @contextlib.contextmanager
    def fetching(self):
        self.note_generators()
        with self.own_work(), self.generators.pause():
            yield

    def sees_loader(self, number, samples, batches):
        self.keep("length", number, (samples, batches))

    def gives(self):
        self.note_generators()

    def fetched(self, fetch, batch, rows):
        if fetch.data and self.now.number == 0 and not self.now.fetched:
            self.now.other_draws.clear()  # the set-up has drawn them
        self.last = fetch
        self.now.fetched.append(fetch)
        if batch is not None:
            place = *fetch.key, self.batches
            self.batches += 1
            self.keep("batch", place, (rows, batch, self.draws.turn))

    # ---- Random numbers and collectives
    def note_generators(self):
        self.step.other_draws |= self.generators.take()

    def see_order(self, generator):
        if generator is torch.default_generator and "seeded" not in self.marks:
            self.marks.add("unseeded")

    def see_collective(self, floats):
        if self.optimizers and dist.get_world_size() > 1:
            self.step.collectives += 1
            self.step.floats_reduced += floats

    def see_draw(self, key, number, turn, draw, high, result):
        if torch.is_grad_enabled():
            self.now.draws.append(draw)
        step = self.now.number
        self.keep("draw", (step, key, number), (high, result))
        self.keep("turn", turn, (step, key, number))
        if isinstance(self.reference, (Replay, Relaunch)):
            self.locate()
            with self.own_work():
                return self.reference.draw(step, key, number, turn, result, high)
        return None
