"""The steps of this rank, as trace.py describes them: when they begin and end.

A step begins with a forward() in training, or with a backward() if there is no module,
once an optimizer has ended the step before. All optimizers that change weights until
the next one begins belong to it: Muon with AdamW, or those in hooks of backward().
What a loader yields, or a generator draws, after the first of them belongs to the next.
"""

import sys

import torch.distributed as dist

from ddp_check import trace
from ddp_check.rank import weights as w
from ddp_check.rank.record import Recording
from ddp_check.rank.replay import Reference, Relaunch, Replay
from ddp_check.rank.tensors import checksum


class Steps:
    """Knows the weights, and writes what becomes of them.

    now is the step that is seen at present. ended is the one before it, from an
    optimizer's step on until the next one begins.
    """

    def __init__(self, options, folder, rank):
        self.writer = trace.Writer(folder, rank)
        self.recording = Recording(options.record, rank) if options.record else None
        self.reference = self.replay = self.relaunch = None
        if options.replay:
            self.reference = self.replay = Replay(options, rank)
        elif options.again:
            self.reference = self.relaunch = Relaunch(options, rank)
        elif options.reference:
            self.reference = Reference(options, rank)
        self.weights = w.Weights(self.reference.shapes if self.reference else {})
        self.now, self.ended = trace.Step(0), None
        self.together = 0  # steps in which the ranks do something together
        self.forget_step()

    def forget_step(self):
        """What is known of the step that an optimizer has ended."""
        self.optimizers = []  # that have ended it
        self.gradients, self.unclipped = {}, {}  # by the names of the weights
        self.changes = {}  # what has been added to them

    def keep(self, kind, key, value):
        if self.recording:
            self.recording.keep(kind, key, value)

    def begin(self, notes):
        """Returns whether a step begins, or the one before goes on."""
        if self.ended is None:
            return False
        self.finish(notes)
        self.ended = None
        self.forget_step()
        return True

    def see_module(self, module):
        self.start(self.weights.see_module(module))

    def start(self, names):
        """These weights are seen for the first time."""
        if not names:
            return
        self.weights.look(names)
        if self.replay:
            starts = self.replay.starts
            self.weights.set({n: starts[n] for n in names if n in starts})
        values = {name: self.weights.values[name] for name in names}
        bits = {name: self.weights.bits[name] for name in names}
        finite = self.weights.are_finite(names)
        self.writer.write(trace.Start(self.now.number, bits, finite))
        for name, value in values.items():
            self.keep("start", name, value)

    def clip(self):
        """The gradients will be clipped."""
        if self.ended is None:
            self.now.clipped = True
            # Groups of weights may be clipped one after another: the first one counts.
            now = self.weights.gradients(self.weights.named)
            self.unclipped = now | self.unclipped

    def optimize(self, optimizer, has_gradients):
        """An optimizer makes a step. A closure may compute the gradients in it."""
        self.start(self.weights.see_optimizer(optimizer))
        if self.call == (0, 0):
            self.weights.forget_dropped()
        for group, names in zip(optimizer.param_groups, self.weights.names(optimizer)):
            if names:
                step = self.ended or self.now
                step.rates[names[0]] = float(group.get("lr", 0))
        if self.replay:
            ranks = len(self.replay.ranks)
            w.set_options(optimizer, self.replay.first.get("options", self.call), ranks)
        if has_gradients:
            self.see_gradients(optimizer)

    @property
    def call(self):
        """The number of the step, and how many optimizers have ended it before."""
        return (self.ended or self.now).number, len(self.optimizers)

    def see_gradients(self, optimizer):
        step = self.ended or self.now
        names = sum(self.weights.names(optimizer), [])
        gradients = self.weights.gradients(names)
        self.gradients |= gradients
        self.keep("gradient", self.call, gradients)
        step.gradient_bits |= {n: checksum(value) for n, value in gradients.items()}
        step.gradient_values += sum(value.numel() for value in gradients.values())

    def end(self, optimizer, notes):
        """It has made the step. notes(step) adds what is known else when one ends."""
        call = self.call
        if self.ended is None:
            step = self.ended = self.now
            self.now = trace.Step(step.number + 1)
            self.together += step.ddp_forwards + step.floats_reduced > 0
            step.ranks = dist.get_world_size() if dist.is_initialized() else 1
            if self.reference:
                step.place = self.reference.place(step.number)
            if self.replay:
                self.replay.add_notes(step)
            self.keep("unclipped", call, self.unclipped)
        self.optimizers.append(optimizer)
        groups = self.weights.names(optimizer)
        trained = self.ended.trained + sum(groups, [])
        self.ended.trained = list(dict.fromkeys(trained))
        changed = self.weights.look(self.weights.named)
        self.add_changes(changed)
        self.keep("options", call, w.options_of(optimizer))
        self.keep("after", call, {name: new for name, (_, new) in changed.items()})
        if self.replay:
            # So each step is compared by itself, and chaos does not grow.
            self.weights.set(self.replay.first.get("after", call, {}))
        self.write(notes)

    def add_changes(self, changed):
        for name, (old, new) in changed.items():
            if old is not None:
                self.changes[name] = self.changes.get(name, 0) + (new - old)

    def finish(self, notes, look=True):
        """The step is over: what has changed the weights since the optimizers?

        Join gives each rank the weights of the last one, which no step has made.
        look: whether what has changed them belongs to the step.
        """
        step = self.ended
        if step is None or self.writer is None:
            return
        final = {}
        if look and "join" not in step.marks:
            # One rank by itself may come here: it cannot look at what is sharded.
            changed = self.weights.look(self.weights.plain_ones())
            final = {name: new for name, (_, new) in changed.items()}
            self.add_changes(changed)
        if final:
            self.keep("final", (step.number, 0), final)
        if step.place >= 0:
            seen = self.gradients, self.unclipped, self.changes
            tables = self.reference.compare(step.place, *seen, self.weights.values)
            step.gradients, step.unclipped, step.changes, step.weights = tables
        if self.replay and step.place >= 0:
            theirs = self.replay.first.values("final", step.place)
            before = self.replay.values_before(step.place + 1)
            self.weights.set({n: before[n] for n in {*theirs, *final} if n in before})
        self.write(notes)

    def write(self, notes):
        """Of the step that has ended. It is written anew if something has changed."""
        step = self.ended
        step.bits = dict(self.weights.bits)
        step.finite = self.weights.are_finite(self.weights.values)
        notes(step)
        if self.writer.write(step):
            self.keep("bits", step.number, step.bits)

    def close(self, notes):
        # One rank may put averages into its model, to save them. But local SGD ends
        # with an all-reduce.
        step = self.ended
        look = not step or self.now.floats_reduced >= step.gradient_values > 0
        self.finish(notes, look=look)
        if self.recording:
            self.recording.close()
        if self.writer:
            failed = hasattr(sys, "last_value")
            problems = self.replay.merge.notes.problems if self.replay else []
            self.writer.write(trace.End(failed, look, problems))
        self.stop()

    def stop(self):
        """Nothing more is written, such as in a process that was forked."""
        self.writer = self.recording = None
