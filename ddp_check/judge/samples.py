"""Which samples the ranks train on: a table, sample -> the (rank, step) that had it."""

import itertools
from collections import Counter

from ddp_check.rows import judge, line

OF_MODULES = "inputs", "ddp_inputs"  # kinds: what a module gets


def trained_on(steps):
    """(loader, iteration) of what a rank trains on, and not only evaluates."""
    uses = {}
    for fetch in [fetch for step in steps for fetch in step.fetched]:
        counts = uses.setdefault(fetch.key, Counter())
        use = "trains" if fetch.trains else "evaluates"
        counts[use] += fetch.trains or fetch.evaluates
    return [k for k, n in uses.items() if n["trains"] >= max(1, n["evaluates"])]


def samples_in(fetch, kind, loaders):
    """Indices are those of one data set, and a script may have several.

    loaders: the numbers of those that this rank trains on. Another rank may have other
    numbers, such as if rank 0 alone evaluates first.
    """
    found, number = getattr(fetch, kind), loaders.index(fetch.key[0])
    return [(number, index) for index in found] if kind == "ids" else found


class Samples:
    """Those of a run. kind: they are known by "ids", "rows" or "inputs"."""

    def __init__(self, run):
        self.run = run
        self.keys = [trained_on(steps) for steps in run.steps]
        self.data = [self.data_of(rank) for rank in range(run.ranks)]
        self.kind = "inputs"  # what a module gets
        for kind in ("rows", "ids"):  # batches of a loader, or their indices
            known = all(any(self.of(rank, kind)) for rank in range(run.ranks))
            same = len(set(self.data)) == 1 and min(self.data) > 0
            if known and (kind == "rows" or same):
                self.kind = kind

    def of(self, rank, kind=None):
        """For each step, the checksums of what the rank has trained on."""
        kind = kind or self.kind
        steps = self.run.steps[rank]
        if kind in OF_MODULES:
            return [getattr(step, kind) for step in steps]
        keys = self.keys[rank]
        loaders = list(dict.fromkeys(loader for loader, _ in keys))
        mine = [[fetch for fetch in s.fetched if fetch.key in keys] for s in steps]
        of_steps = [
            sum([samples_in(fetch, kind, loaders) for fetch in fetched], [])
            for fetched in mine
        ]
        # A loader may fetch ahead. If its rows enter the model as they are, it is known
        # in which step.
        rows = [row for fetched in mine for f in fetched for row in f.rows]
        inputs = [row for step in steps for row in step.inputs]
        samples = sum(of_steps, [])
        if inputs and rows[: len(inputs)] == inputs and len(samples) == len(rows):
            entering = iter(samples)
            return [list(itertools.islice(entering, len(s.inputs))) for s in steps]
        return of_steps

    def of_all(self, kind=None):
        """For each step, those of all ranks."""
        ranks = [self.of(rank, kind) for rank in range(self.run.ranks)]
        return [sum(rows, []) for rows in zip(*ranks)]

    def data_of(self, rank):
        """A checksum of some samples, where there is one: see loaders.fingerprint()."""
        loaders = {loader for loader, _ in self.keys[rank]}
        fetched = [f for step in self.run.steps[rank] for f in step.fetched]
        known = [f.data for f in fetched if f.data and f.key[0] in loaders]
        return known[0] if known else 0

    def first_epoch(self):
        """The number of steps in the first iteration of the loader, if it has ended."""
        second = self.iterations()[1:2]
        for number, step in enumerate(self.run.steps[0]):
            if any(fetch.key in second for fetch in step.fetched):
                return number or None
        return None

    def iterations(self):
        """The keys of rank 0's epochs: of the first loader, or of new ones for each.

        Of those at the same time, as in zip(loader, loader), only the first one.
        """
        keys = self.keys[0]
        first = [key for key in keys if key[0] == keys[0][0]]
        fetched = [f.key for step in self.run.steps[0] for f in step.fetched]
        epochs, ended = [], -1
        for key in first if len(first) > 1 else keys:
            places = [place for place, one in enumerate(fetched) if one == key]
            if places[0] > ended:
                epochs.append(key)
                ended = places[-1]
        return epochs

    def table(self, kind=None):
        """{sample: how often each (rank, step) had it}, of two ranks."""
        table = {}
        for rank in (0, 1):
            for step, rows in enumerate(self.of(rank, kind)):
                for row, count in Counter(rows).items():
                    # Equal rows in a step are no samples, but such as a noise level.
                    if count == 1 or (kind or self.kind) not in OF_MODULES:
                        table.setdefault(row, Counter())[rank, step] = count
        return table

    def share_in_step(self, kind=None):
        """The share of rank 0's samples that rank 1 has in the same step, or None."""
        common = chance = total = 0
        last = len(self.run.steps[0]) - 1
        for places in self.table(kind).values():
            for (rank, step), count in list(places.items()):
                if rank == 0 and step < last:
                    total += count
                    common += min(count, places[1, step])
                    # Rows that all steps have, or of few values, come next as well.
                    chance += min(count, places[1, step + 1])
        return None if total == chance else (common - chance) / (total - chance)

    def share_in_epoch(self, steps, kind="ids"):
        """The share of rank 0's first epoch that is in rank 1's. None: too few.

        Without its last step, which samplers fill up with the first samples.
        """
        epochs = [set(sum(self.of(rank, kind)[: steps - 1], [])) for rank in (0, 1)]
        return len(epochs[0] & epochs[1]) / len(epochs[0]) if epochs[0] else None


def judge_samples(samples, parts=()):
    """(the findings, whether the ranks train on different samples).

    parts: weights of which each rank has a part. Then ranks may share their batches.
    """
    run, kind, found = samples.run, samples.kind, []
    share = samples.share_in_step()
    if share is not None and share >= 0.2 and kind != "inputs":
        # A list of images [3, H, W] enters as three rows, however many images it has.
        counts = [sum(map(len, samples.of(0, known))) for known in (kind, "rows")]
        loaded = min(filter(None, counts))
        enter = sum(map(len, samples.of(0, "inputs")))
        of_inputs = samples.share_in_step("inputs")
        if enter * run.ranks <= loaded * 1.05 or of_inputs is None:
            share = of_inputs  # each rank takes its share of the batch by itself
    elif share is not None:
        # Other indices may be of the same samples, if the data set draws them.
        rows = samples.share_in_step("rows")
        share = rows if rows is not None and rows >= 0.9 else share
    unsure = min(samples.data) < 1 and (samples.share_in_step("ids") or 0) >= 0.2
    if unsure and share is not None and share < 0.2:
        share = None  # the same indices, maybe of the same samples with other noise
    # A module may give its DDP object the rank's share of what it has got.
    inner = samples.share_in_step("ddp_inputs")
    takes_share = inner is not None and inner < 0.2
    if share is None:
        found.append(line("note", "no samples"))
    elif 0.2 <= share and (share < 0.9 or parts or takes_share):
        found.append(line("note", "overlap", share=share))
    else:
        found.append(judge(share < 0.2, "samples", share=share))
        if share >= 0.2:
            return found, False
    steps = samples.first_epoch()
    in_epoch = samples.share_in_epoch(steps or len(run.steps[0]))
    if kind == "ids" and in_epoch is not None:
        # In one iteration, a loader may go through its data several times.
        ids = sum(samples.of(0)[: steps and steps - 1], [])
        once = len(set(ids)) == len(ids) > 2
        if once and (samples.share_in_step() or 0) < 0.2 and in_epoch > 0.3:
            found.append(line("note", "whole epoch", share=in_epoch))
    elif in_epoch is not None and in_epoch < 0.2:
        if min(samples.data) > 0 and len(set(samples.data)) > 1:
            found.append(line("note", "own data"))
    return found + judge_order(samples), True


def judge_order(samples):
    """Whether epochs have the same order: those of a loader, or of the run."""
    epochs = {}
    for step in samples.run.steps[0]:
        for fetch in step.fetched:
            if fetch.rows:
                epochs.setdefault(fetch.key, []).append(fetch)
    keys = samples.iterations()
    # Of several data sets, the same indices may be of other samples.
    kinds = ("ids", "rows") if len({loader for loader, _ in keys}) > 1 else ("ids",)
    epochs = [
        [[x for kind in kinds for x in getattr(fetch, kind)] for fetch in epochs[key]]
        for key in keys
        if key in epochs
    ]
    epochs = [epoch for epoch in epochs if sum(map(len, epoch)) > 1]
    rows = samples.of(0)
    for steps in range(2, len(rows) // 2 + 1):
        if rows[steps:] == rows[:-steps] and any(rows):
            # Another model may train on the same epochs, as in cross-validation.
            count = steps // (samples.first_epoch() or steps)
            which = "each epoch has" if count <= 1 else f"epochs 0 and {count} have"
            return [line("note", "order", which=which, period=f"{steps} steps")]
    judged = False
    for i, (one, two) in enumerate(zip(epochs, epochs[1:])):
        count = min(len(one), len(two))  # --steps may have cut the last one
        if count < 2:  # such as one that is looked at
            continue
        if one[:count] == two[:count]:
            which = f"epochs {i} and {i + 1} have"
            period = f"{len(one)} batches"
            return [line("note", "order", which=which, period=period)]
        judged = True
    return [line("ok", "order")] if judged else []
