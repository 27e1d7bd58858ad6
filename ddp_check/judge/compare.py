"""The verdict on gradients: pure functions of what was recorded and what was replayed.

compare() gives one verdict for each step. The reasons to excuse a step stand here, in
EXCUSES, and read only the traces of that step. To add one, add a function there, and a
case to tests/check/test_judge.py. Uneven rows are an excuse, too, up to a distance.
"""

import dataclasses
import math
import re
from collections import Counter

# How far a gradient or weights may be off, relative to their size.
LIMITS = {True: 1e-5, False: 1e-2}  # in float64, and in float32
# Uneven rows explain a difference of about the ratio of the rows, if the gradients of
# the ranks are about as large as their mean. They may be somewhat larger.
MOST_OF_UNEVEN_ROWS = 5


@dataclasses.dataclass
class Same:
    """The gradient of one process is that of the ranks."""

    distance: float


@dataclasses.dataclass
class Different:
    """It is not. The distance is relative to the size of the right gradient."""

    distance: float
    factor: float | None = None  # most weights are so many times too large
    names: list = dataclasses.field(default_factory=list)  # weights that are not
    weights: int = 0  # how many have been looked at
    hidden: str = ""  # "hides it": after clipping it is the same; "may": unknown

    @property
    def scales(self):
        """Whether most weights have a factor that is not 1."""
        return self.factor is not None and abs(self.factor - 1) >= 1e-2

    def __str__(self):
        """What is known of the difference, in a sentence."""
        names = listed(self.names)
        if self.factor is None:
            text = f"Most of it is in {names}." if names else ""
        elif not self.scales:
            text = f"It is right in most weights, but not in {names}."
        elif names:
            text = f"It is {self.factor:.4g} times as large, but not in {names}."
        else:
            text = f"It is {self.factor:.4g} times as large."
        if self.hidden == "hides it":
            text += " That is before clipping, which hides it."
        elif self.hidden and self.factor is None:
            text += " Clipping may hide a common factor."
        return text


@dataclasses.dataclass
class Excused:
    """It was not judged. The reason is in the traces of the step."""

    reason: str
    rows: list = dataclasses.field(default_factory=list)  # uneven rows of the ranks
    distance: float = 0.0  # of these


@dataclasses.dataclass
class Verdict:
    """All steps of a replay together."""

    steps: int = 0
    same: int = 0
    off: float = 0.0  # the largest distance of those that are the same
    first: int | None = None  # the first step that is different
    before: int = 0  # steps before it that are the same
    different: Different | None = None  # the one that says most, in the step `step`
    step: int | None = None
    excused: list = dataclasses.field(default_factory=list)
    uneven: tuple | None = None  # (step, rows of the ranks, distance)

    @property
    def wrong(self):
        return self.different is not None

    @property
    def right(self):
        return not self.wrong and 2 * self.same > self.steps

    @property
    def reason(self):
        """Why most of the others were excused. Uneven rows have a line of their own."""
        # With other numbers in it, such as those of rows, it is the same reason.
        reasons = [one.reason for one in self.left]
        kinds = [re.sub(r"\d+", "", reason) for reason in reasons]
        for kind, count in Counter(kinds).most_common(1):
            text = f" (in {count} of these steps)" if count < len(kinds) else ""
            return reasons[kinds.index(kind)] + text
        return ""

    @property
    def left(self):
        """The steps that were excused, and that no other line explains."""
        return [one for one in self.excused if not (self.right and one.rows)]


def summarize(verdicts):
    verdict = Verdict(len(verdicts))
    for number, one in enumerate(verdicts):
        if isinstance(one, Same):
            verdict.same += 1
            verdict.before += not verdict.wrong
            verdict.off = max(verdict.off, one.distance)
        elif isinstance(one, Different):
            if not verdict.wrong:
                verdict.first = number
            # A factor says what is wrong, though it may not show in the first step.
            if not verdict.wrong or (one.scales and not verdict.different.scales):
                verdict.step, verdict.different = number, one
        else:
            verdict.excused.append(one)
            if one.rows and verdict.uneven is None:
                verdict.uneven = (number, one.rows, one.distance)
    return verdict


def compare(
    recorded,
    replayed,
    limit=LIMITS[True],
    order="rank by rank",
    loads=True,
    missing="One process makes fewer steps.",
):
    """For each step of the ranks: Same, Different or Excused.

    recorded: the steps of each rank. replayed: those of one process that got what they
    had, in this order. loads: a DataLoader gives the samples. missing: why the replay
    has no such step.
    """
    ones = {step.number: step for step in replayed}
    fetched = [f for steps in recorded for step in steps for f in step.fetched]
    known = {row for fetch in fetched for row in fetch.parts}
    context = Context(order, loads, known)
    verdicts = []
    for number in range(max(map(len, recorded), default=0)):
        ranks = [steps[number] for steps in recorded if number < len(steps)]
        if len(ranks) < len(recorded):
            verdicts.append(Excused("Not all ranks make this step."))
        elif number not in ones:
            verdicts.append(Excused(missing))
        else:
            verdicts.append(compare_step(ranks, ones[number], limit, context))
    return verdicts


@dataclasses.dataclass
class Context:
    """What excuses know beside the step."""

    order: str
    loads: bool
    known: set  # the rows that loaders have given, in any step


def compare_step(ranks, one, limit, context):
    first = ranks[0]
    table, before = one.gradients, one.unclipped
    names = sorted({*first.trained} ^ {*one.trained})
    if names:
        text = f"One process trains other weights than the ranks: {listed(names)}."
        return Excused(text)
    if any(step.gradient_bits != first.gradient_bits for step in ranks) or not table:
        # The optimizer averages or clears the gradients. So compare what it does.
        table, before = changes_of(one, limit), {}
    if not any(row.aa or row.bb for row in table.values()):
        return Excused("There is no gradient, on the ranks and on one process.")
    if not all(math.isfinite(row.aa) for row in table.values()):
        return Excused("The gradients of the ranks are not finite.")
    away = distance(table)
    clips = first.clipped
    if away <= limit:
        if not (clips and before and was_clipped(table, before)):
            return Same(away)
        different = explain(before, limit)
        if different.distance <= limit or not is_multiple(different, limit):
            return Same(away)
        different.hidden = "hides it"
    elif clips and before and distance(before) > limit:
        different = explain(before, limit)
        different.distance = away
    else:
        different = explain(table, limit)
        different.hidden = "may" if clips else ""
    multiple = is_multiple(different, limit)
    for excuse, explains_all in EXCUSES:
        reason = excuse(ranks, one, context)
        if reason and (explains_all or not multiple):
            return Excused(reason)
    rows = [len(step.inputs) for step in ranks]
    loaded = [sum(len(fetch.ids) for fetch in step.fetched) for step in ranks]
    if all(loaded) and len(set(loaded)) == 1:  # as many samples, though not boxes
        rows = loaded
    # Ranks without samples add zeros to the mean, so that it is smaller.
    empty = multiple and abs(different.factor - share_with_rows(rows)) <= limit
    within = different.distance <= most_of(rows)
    if len(set(rows)) > 1 and (empty or within and not multiple):
        counts = " and ".join(map(str, rows))
        text = f"The ranks have unequal numbers of samples in a step ({counts})."
        return Excused(text, rows, different.distance)
    return different


def changes_of(one, limit):
    """What the optimizer does, but where it makes large steps of a rounding error."""
    sizes = {name: max(row.aa, row.bb) for name, row in one.gradients.items()}
    least = (1e-5 * limit) ** 2 * sum(sizes.values())
    return {n: row for n, row in one.changes.items() if not 0 < sizes.get(n, 0) < least}


# ---- Excuses: what explains a difference, each from the traces of the step -----------
def has_problems(ranks, one, context):
    if one.problems:
        problems = "; ".join(list(dict.fromkeys(one.problems))[:2])
        return f"One process cannot get what the ranks had: {problems}."
    return ""


def other_generators(ranks, one, context):
    """Not if all ranks and one process have drawn the same."""
    steps = [*ranks, one]
    names = {name for step in steps for name in step.other_draws}
    names = [n for n in names if len({step.other_draws.get(n) for step in steps}) > 1]
    if names:
        drawn = " and ".join(sorted(names))
        return f"{drawn} draws in the step, and only torch's numbers are replayed."
    return ""


def has_hook(ranks, one, context):
    if "hook" in ranks[0].marks:
        return "A communication hook changes the gradients, such as by rounding."
    return ""


def other_calls(ranks, one, context):
    a, b = ranks[0].backwards, one.backwards
    if context.order != "in turn" and a != b and not same_inputs(ranks, one):
        return f"In a step, a rank calls backward() {a} times, one process {b}."
    return ""


def other_turns(ranks, one, context):
    if context.order != "in turn":
        return ""
    for kind in ("inputs", "draws"):
        mine = Counter(repr(x) for x in kind_of(one, kind))
        theirs = Counter(repr(x) for step in ranks for x in kind_of(step, kind))
        if mine != theirs:
            return (
                "One process makes more micro-steps than a rank, and these get other "
                "samples or random numbers than the ranks had."
            )
    return ""


def no_loader(ranks, one, context):
    if context.loads or (one.inputs and same_inputs(ranks, one)):
        return ""
    return (
        "It has no DataLoader, and one process makes other samples. To compare them, "
        "make them from seeds and global numbers."
    )


def batched_again(ranks, one, context):
    """One process got samples that the ranks had, but not in this step.

    Rows that the replay has padded further look like those of another step.
    """
    if one.widened:
        return ""
    mine = {row for step in ranks for row in step.parts}
    others = {row for row in one.parts if row not in mine} & context.known
    fetched = {row for step in ranks for f in step.fetched for row in f.parts}
    if others and others <= fetched:
        return "One process picks other rows of the batches than the ranks."
    if others:
        return (
            "The batches are made again behind the DataLoader, and one process makes "
            "others of the same samples."
        )
    return ""


def filled_up(ranks, one, context):
    rows = sum(len(step.inputs) for step in ranks)
    if "alone" in one.marks and len(one.inputs) != rows:
        return "Rank 0 reads for all ranks, and has filled up the batch."
    return ""


# (the excuse, whether it also explains a gradient that is exactly some times as large)
EXCUSES = [
    (other_generators, False),
    (no_loader, False),
    (has_problems, False),
    (has_hook, False),
    (other_calls, True),
    (other_turns, False),
    (batched_again, False),
    (filled_up, False),
]


def same_inputs(ranks, one):
    return Counter(one.inputs) == Counter(row for step in ranks for row in step.inputs)


def kind_of(step, kind):
    if kind == "inputs":
        return step.inputs
    return [(draw.name, draw.shape, draw.checksum) for draw in step.draws]


def share_with_rows(rows):
    """The share of the ranks that have samples."""
    return sum(map(bool, rows)) / len(rows)


def most_of(rows):
    """The largest distance that so many rows on each rank can explain."""
    total = sum(rows) or 1
    ratio = sum(abs(1 / len(rows) - count / total) for count in rows)
    return MOST_OF_UNEVEN_ROWS * ratio


# ---- Distances, from the exact sums of each weight -----------------------------------
def finite(row):
    return all(map(math.isfinite, (row.aa, row.bb, row.ab, row.off)))


def distance(table):
    """Of the reference from the right one (of one process), relative to its size."""
    if not all(map(finite, table.values())):
        return math.inf
    sizes = [sum(row.bb for row in table.values()), sum(r.aa for r in table.values())]
    off = sum(row.off for row in table.values())
    return math.sqrt(off / (sizes[0] or sizes[1])) if off else 0.0


def is_raw(name):
    """Whether the weight is in no module, and so has no name of its own."""
    return name.startswith("parameter ")


def same_weights(a, b, parts=()):
    """Whether two ranks have the same weights after a step, but for these parts.

    One may have others beside them, such as an average that rank 0 keeps.
    """
    trained = [{n for n in step.trained if not is_raw(n)} - {*parts} for step in (a, b)]
    common = (a.bits.keys() & b.bits.keys()) - {*parts}
    return trained[0] == trained[1] and all(a.bits[n] == b.bits[n] for n in common)


def other_rate(steps, others):
    """The first step with another learning rate: (its number, this rate, the other)."""
    for number, (a, b) in enumerate(zip(steps, others)):
        for name in a.rates.keys() & b.rates.keys():
            x, y = a.rates[name], b.rates[name]
            if abs(x - y) > 1e-6 * max(abs(x), abs(y)):
                return number, f"{x:.4g}", f"{y:.4g}"
    return None


def covers(steps):
    """Whether the weights of most steps have been compared."""
    return 2 * sum(bool(step.weights) for step in steps) > len(steps)


def drift(steps, limit):
    """How far a relaunch, or one process alone, is from the reference.

    It is relative to how far the weights have come since the start. Returns the largest
    distance, and the first step that has more than the limit.
    """
    far, where = 0.0, None
    for number, step in enumerate(steps):
        rows = step.weights.values()
        off, size = sum(row.off for row in rows), sum(row.aa for row in rows)
        apart = math.sqrt(off / size) if off and size else float(off > 0)
        if not math.isfinite(apart):
            apart = math.inf
        far = max(far, apart)
        if where is None and not apart < limit:
            where = number
    return far, where


def was_clipped(table, before):
    sizes = [sum(row.bb for row in rows.values()) for rows in (table, before)]
    return abs(sizes[0] - sizes[1]) > 1e-6 * sizes[1]


def is_multiple(different, limit):
    """Whether all weights are the same number of times too large.

    One weight alone may be a single number, and that is always some times too large.
    """
    factor, several = different.factor, different.weights > 1
    whole = several and factor is not None and not different.names
    return whole and abs(factor - 1) > limit


def explain(table, limit):
    """Different: with the factor that most weights share, and those that do not."""
    if not all(map(finite, table.values())):
        names = [name for name, row in table.items() if not finite(row)]
        return Different(math.inf, None, names)
    total = sum(row.bb for row in table.values()) or sum(r.aa for r in table.values())
    least = (limit / 10) ** 2 * total  # smaller ones are rounding
    counted = {n: row for n, row in table.items() if max(row.aa, row.bb) > least}
    factors = {}
    for name, row in counted.items():
        # What is left if the right one, times this factor, is taken away.
        rest = row.aa - row.ab**2 / row.bb if row.bb else math.inf
        if rest <= limit**2 * row.aa:
            factors[name] = row.ab / row.bb
    away = distance(table)
    best = []
    for factor in sorted(factors.values(), key=lambda factor: abs(factor - 1)):
        near = 2 * limit * max(1, abs(factor))
        alike = [n for n, other in factors.items() if abs(other - factor) <= near]
        best = max(best, alike, key=len)  # the first of several: the one nearest to 1
    if 2 * len(best) <= len(counted):
        worst = sorted(counted, key=lambda name: -counted[name].off)
        wrong = [name for name in worst if counted[name].off > limit**2 * total]
        return Different(away, None, wrong[:3])
    factor = sum(factors[name] for name in best) / len(best)
    names = [name for name in counted if name not in best]
    return Different(away, factor, names, len(counted))


def listed(names):
    text = ", ".join(names[:3])
    return f"{text} and {len(names) - 3} more" if len(names) > 3 else text
