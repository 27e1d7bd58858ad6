"""What another launch has recorded: to compare with it, and to do the same again."""

import torch

from ddp_check.rank.losses import Means
from ddp_check.rank.merge import Merge, find_rows
from ddp_check.rank.record import Recorded
from ddp_check.rank.tensors import checksum, comparison


class Reference:
    """The launch that this one is compared with, step by step.

    place: the number of a step there. It is `offset` more than that of the step here.
    """

    def __init__(self, options, rank):
        self.options = options
        first = Recorded(options.reference, 0)
        self.ranks = [first]  # whose numbers are drawn
        if options.again and rank > 0:
            self.ranks = [Recorded(options.reference, rank)]
        if options.replay:
            others = range(1, options.reference_ranks)
            self.ranks += [Recorded(options.reference, other) for other in others]
        self.first = first
        self.steps = min(recorded.steps for recorded in self.ranks)
        self.starts = {name: first.get("start", name) for name in first.keys("start")}
        self.shapes = {name: tuple(v.shape) for name, v in self.starts.items()}
        self.offset = None if options.again else 0
        self.values = dict(self.starts)  # the weights before the step `self.before`
        self.before = 0

    def place(self, step):
        """Where to compare this step; -1: nowhere."""
        if self.offset is None or step + self.offset >= self.steps:
            return -1
        return step + self.offset

    # ---- Where a relaunch starts
    def find_offset(self, bits):
        """Sets the step before which weights had all of these bits.

        Of several in a row it is the last: a rate of 0 has changed nothing. But those
        from before the first step have done none.
        """
        starts = {name: checksum(value) for name, value in self.starts.items()}
        self.offset = None
        for place in range(self.steps):
            state = starts | self.ranks[0].get("bits", place - 1, {})
            if bits and bits <= set(state.values()):
                self.offset = place
            elif self.offset is not None:
                return
            if self.offset == 0:
                return

    # ---- Comparisons
    def values_before(self, place):
        """All weights there before this step."""
        if place < self.before:
            self.values, self.before = dict(self.starts), 0
        while self.before < place:
            for kind in ("after", "final"):
                self.values |= self.first.values(kind, self.before)
            self.before += 1
        return self.values

    def compare(self, place, gradients, unclipped, changes, weights):
        """Of a step: tables of Comparisons, for Step.gradients and the three after it.

        changes: {name: what the step has added}. weights: at the end of the step.
        """
        known = self.shapes.items()
        names = [n for n, s in known if n in weights and s == tuple(weights[n].shape)]

        def table(theirs, mine):
            pairs = [(name, theirs.get(name), mine.get(name)) for name in names]
            return {n: comparison(a, b) for n, a, b in pairs if a is not b}

        their_unclipped = self.first.values("unclipped", place)
        both = bool(their_unclipped) and bool(unclipped)
        before, starts = dict(self.values_before(place)), self.starts
        end = self.values_before(place + 1)
        moved = {n: end[n] - before[n] for n in names if end[n] is not before[n]}
        theirs = {n: end[n] - starts[n] for n in names}
        return (
            table(self.first.values("gradient", place), gradients),
            table(their_unclipped, unclipped) if both else {},
            table(moved, changes),
            table(theirs, {n: weights[n] - starts[n] for n in names}),
        )


class Relaunch(Reference):
    """It draws again what this rank has drawn there."""

    def draw(self, step, key, number, turn, like, high):
        if self.offset is None:
            return None
        draw = self.ranks[0].get("draw", (step + self.offset, key, number))
        if draw is None or draw[-1].shape != like.shape:
            return None
        return draw[-1]


class Replay(Reference):
    """One process gets the batches and random numbers of all ranks."""

    def __init__(self, options, rank):
        super().__init__(options, rank)
        names, *_ = keys = options.replay.keys
        self.keys = set(names)  # each rank's iterations, by the names of rank 0's
        self.batches = []  # for each rank: {name: places of its batches}
        for recorded, mine in zip(self.ranks, keys):
            known = {}
            for iteration in recorded.keys("batch"):
                known.setdefault(iteration[:2], []).append(iteration)
            pairs = zip(names, mine)
            self.batches.append({name: known.get(key, []) for name, key in pairs})
        self.order = options.replay.order
        self.merge = Merge(self.order, self.batches_of_all)
        sums = [{key: r.get("sums", key) for key in r.keys("sums")} for r in self.ranks]
        self.means = Means(sums)
        self.places = None  # of the rows of each rank, in the layer that draws
        self.now = None  # the iteration whose batches are given
        self.alone = False  # rank 0 reads for all ranks

    def add_notes(self, step):
        """What could not be done in this step, and so on."""
        notes = self.merge.take_notes()
        step.problems = notes.problems
        step.widened = notes.widened
        step.alike, step.different = sorted(notes.alike), sorted(notes.different)

    # ---- Batches
    def gives(self, key):
        return key in self.keys

    def batches_of_ranks(self, key):
        """Of each rank. Accelerate's rank 0 may read the batches for all ranks."""
        batches = []
        for recorded, known in zip(self.ranks, self.batches):
            batches.append(
                [recorded.get("batch", place) for place in known.get(key, [])]
            )
        if not batches[0] or len(batches) == 1 or any(map(any, self.batches[1:])):
            return batches
        self.alone = True
        turns = batches[0][-1][-1] - batches[0][0][-1] + 1
        if len(batches[0]) < 1.5 * turns:
            return batches[:1]  # each batch is cut into the shares of the ranks
        return [batches[0][i :: len(self.ranks)] for i in range(len(self.ranks))]

    def batches_of_all(self):
        of_ranks = self.batches_of_ranks(self.now)
        batches = [batch for batches in of_ranks for _, batch, _ in batches]
        return [batch for batch in batches if batch is not None]

    def give(self, key):
        """The batches of all ranks, one behind the other, instead of the loader's."""
        self.now = key
        of_steps = list(zip(*self.batches_of_ranks(key)))
        if self.order == "in turn":
            of_steps = [[entry] for entries in of_steps for entry in entries]
        for entries in of_steps:
            rows, batches, _ = map(list, zip(*entries))
            yield self.merge.batch(batches, rows)

    def has_more(self, key):
        """Whether the ranks had more iterations than those up to this one."""
        last = max(self.keys) if self.keys else key
        return key < last or any(known.get(key) for known in self.batches)

    def length(self, number, rows):
        """Of a loader, as on a rank, or None. rows: the size of its data.

        Before its first iteration, a loader has no number: it is known by its size.
        """
        for known in self.ranks[0].keys("length"):
            of_data, count = self.ranks[0].get("length", known)
            if any(key[0] == known for key in self.keys):
                if number == known or (number is None and rows == of_data):
                    return count * (len(self.ranks) if self.order == "in turn" else 1)
        return None

    # ---- Random numbers
    def draw(self, step, key, number, turn, like, high):
        name = key.split()[0]
        if self.order == "in turn":
            return self.draw_in_turn(name, turn, like)
        draws = [recorded.get("draw", (step, key, number)) for recorded in self.ranks]
        return self.merge.draw(name, like, high, draws, self.places)

    def draw_in_turn(self, name, turn, like):
        """What the rank has drawn whose turn it is."""
        number, rank = divmod(turn[0], len(self.ranks))
        place = self.ranks[rank].get("turn", (number, *turn[1:]))
        drawn = place and self.ranks[rank].get("draw", place)[-1]
        if drawn is None and not torch.is_grad_enabled():
            return None
        if drawn is None or drawn.shape != like.shape:
            text = f"torch.{name}() is drawn differently than on the ranks"
            self.merge.notes.problems.append(text)
            return None
        return drawn

    # ---- Losses
    def as_on_a_rank(self, place, terms, loss):
        """Divided by the ranks, if it is a mean of each rank: see losses.py.

        terms: those of sums_in(loss).
        """
        own = self.means.are_of_ranks(place, terms)
        if self.order == "in turn" or not any(own):
            return loss
        if not all(own):
            text = "a part of the loss is divided by a number that may be that of a "
            text += "rank's samples, or be the same by chance (try another batch size)"
            self.merge.notes.problems.append(text)
            return loss
        return loss / len(self.ranks)

    # ---- Rows
    def find_rows(self, place, whole):
        """Where the rows of each rank are in these. whole: the signatures of all."""
        if self.order == "in turn":
            return [torch.arange(len(whole))]
        parts = [recorded.get("rows", place) for recorded in self.ranks]
        if any(part is None for part in parts):
            return None
        if not any(map(len, parts)):  # SyncBatchNorm has had those of all ranks
            return [torch.arange(len(whole))]
        return find_rows(parts, whole)
