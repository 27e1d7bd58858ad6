"""The first answer: two ranks, and one process that replays what they had."""

import dataclasses
import math
from collections import Counter

from ddp_check.judge import compare
from ddp_check.judge.begin import failed, first_launch, reference, trains_together
from ddp_check.judge.samples import Samples, judge_samples
from ddp_check.rows import judge, line
from ddp_check.trace import Replay


@dataclasses.dataclass
class First:
    """What the other judges know of the first answer."""

    run: object  # two ranks
    samples: Samples
    comparable: bool = False  # the ranks train together, on different samples
    replayed: object = None  # a Replayed
    alone: object = None  # the launch of one process, which may still run
    outside: bool = False  # it saves files that all launches share

    @property
    def right(self):
        return self.replayed is not None and self.replayed.verdict.right


@dataclasses.dataclass
class Replayed:
    verdict: compare.Verdict
    one: object  # the Run of one process
    order: str  # how the rows of the ranks were joined


def first_answer(launcher, report, alone):
    """Returns a First, or None if nothing else can be judged.

    alone: one process alone is wanted later. It is started beside the replay.
    """
    run = first_launch(launcher, report)
    if run is None:
        return None
    parts = parts_in(launcher, report, run) if run.ended_well else []
    found, goes_on, same = judge_run(run, parts)
    report.say(*found)
    if not goes_on:
        return None
    first = First(run, Samples(run))
    first.outside = any(finding.row == "outside" for finding in found)
    found, differ = judge_samples(first.samples, names_of(parts))
    report.say(*found)
    sharded = any(step.sharded for step in run.steps[0])
    first.comparable = same and differ and not sharded
    if first.comparable:
        if alone and not first.outside:
            first.alone = launcher.start("1-rank", 1, **reference(run))
        first.replayed = replay(launcher, report, run, first.samples)
        report.say(*judge_masks(run, first.replayed))
    elif not sharded:
        report.say(line("note", "left out", what="the gradients"))
    report.say(*judge_norms(run, sharded))
    return first


# ---- What two ranks did --------------------------------------------------------------
def judge_run(run, parts=()):
    """(the findings, whether it can be judged further, and whether the ranks agree)."""
    if run.ended_well and any(run.steps) and not all(run.steps):
        one, two = map(len, run.steps[:2])
        return [line("WRONG", "steps", one=one, two=two)], False, False
    if not run.ended_well and ends_early(run):
        return [ends_early(run)], False, False
    if not run.ended_well:
        return [failed(run)], False, False
    one, two = run.steps[:2]
    if any(step.tensor_parallel for step in one):
        return [line("note", "tensor parallel")], False, False
    found = []
    left_out = {*parts, *run.idle}
    pairs = [(a.number, compare.same_weights(a, b, left_out)) for a, b in zip(one, two)]
    first = next((number for number, same in pairs if not same), None)
    # One rank may change weights by itself after the last step. That is not looked at.
    looked = all(of_rank.end is None or of_rank.end.looked for of_rank in run.traces)
    later = pairs[first or 0 : None if looked else -1]
    again = next((number for number, same in later if same), None)
    meet = first is not None and again is not None
    if trains_together(run):
        found.append(line("ok", "alone"))
    else:
        # A collective of something else trains nothing together. The weights tell.
        idle = 2 * sum(s.collectives + s.ddp_forwards > 0 for s in one) < len(one)
        uncalled = 2 * sum(s.ddp_forwards > 0 for s in one) < len(one)
        if "wrapped" in run.marks() and uncalled and (idle or first is not None):
            return [line("WRONG", "not called")], False, False
        if idle and not meet:
            return [line("WRONG", "alone")], False, False
    strange = not_finite(run)
    if strange:
        return [*found, strange], False, False
    began = run.traces[0].began
    moved = any(step.bits.get(n) != began.get(n) for step in one for n in step.trained)
    found.append(judge(moved, "moves", steps=len(one)))
    if not moved:
        return found, False, False
    found.append(judge(not run.stayed, "left", pids=run.stayed))
    if one[-1].address:
        found.append(line("note", "address", address=one[-1].address))
    saved = [step.outside for steps in run.steps for step in steps if step.outside]
    if saved:
        found.append(line("note", "outside", path=saved[-1]))
    if "shared gpu" in run.marks(1):
        found.append(line("WRONG", "same gpu"))
    joins = "join" in run.marks()  # it expects unequal numbers
    counts = {"one": len(one), "two": len(two)}
    same = len(one) == len(two)
    found.append(judge(same, "steps", "note" if joins else "WRONG", **counts))
    if any(step.sharded for step in one):
        return [*found, line("note", "sharded")], True, False
    if meet:
        found.append(line("note", "weights meet", first=first, again=again))
    elif same or not joins:
        names = "" if first is None else differing(one[first], two[first], left_out)
        found.append(judge(first is None, "weights", first=first, names=names))
    named = names_of(parts)
    if named:
        found.append(line("note", "parts", names=compare.listed(named)))
    return found, True, same and first is None and not named


def differing(a, b, left_out):
    names = [n for n in a.bits if n in b.bits and a.bits[n] != b.bits[n]]
    names = [n for n in names if n not in left_out]
    return f"These do: {compare.listed(names)}. " if names else ""


def parts_in(launcher, report, run):
    """Weights that differ between ranks, since each has a part of them.

    Such as a classifier for its own classes. On one process they have another shape, or
    there are more of them.
    """
    differ = set()
    for a, b in zip(*run.bits[:2]):
        differ |= {name for name in a.keys() & b.keys() if a[name] != b[name]}
    differ -= run.idle
    if not differ or (run.steps[0] and differ == set(run.bits[0][0])):
        return []
    report.title("Weights differ: one step on one process")
    more = {"steps": 1, **reference(run)}
    one = launcher.run("1-rank-one-step", 1, **more).steps[0]
    return parts_of(differ, run.steps[0][0], one[0]) if one else []


def names_of(parts):
    """Without those of weights that are in no module, which ZeRO makes."""
    return [name for name in parts if not compare.is_raw(name)]


def parts_of(differ, of_rank, of_one):
    """Which of these weights are parts, by a step of rank 0 and one of one process."""
    if {*of_rank.trained} < {*of_one.trained}:  # such as tables of embeddings
        return sorted(differ)
    return sorted(differ - of_one.weights.keys())


def ends_early(run):
    """A rank that has come to its end, while others wait for it."""
    ends = [of_rank.end for of_rank in run.traces]
    early = [rank for rank, end in enumerate(ends) if end and not end.failed]
    waits = run.hangs or "by peer" in run.words()["error"]
    if not waits or not early or len(early) == run.ranks:
        return None
    values = {"rank": early[0], "made": len(run.steps[early[0]])}
    return line("WRONG", "ends early", **run.words() | values)


def not_finite(run):
    starts = all(start.finite for start in run.traces[0].starts)
    steps = [step.number for step in run.steps[0] if not step.finite]
    if starts and not steps:
        return None
    values = {"when": "before the first step"}
    values["hint"] = "Does it start from uninitialized weights?"
    if starts:
        values["when"] = f"from step {steps[0]} on"
        values["hint"] = "Is the learning rate too high?"
    return line("WRONG", "finite", **values)


def normalizes(run):
    """In the first step, a script may only have asked the model for its shapes."""
    one = run.steps[0]
    return any(step.norms for step in one[1:] or one)


def judge_norms(run, sharded):
    """Whether each rank has its own batch norm statistics, and evaluates with them."""
    one, two = run.steps[:2]
    if sharded or not normalizes(run):
        return []
    pairs = [(a.evaluated, b.evaluated) for a, b in zip(one, two)]
    if any(a and b and a != b for a, b in pairs):
        detail = "They evaluate with these."
    elif any(a and not b for a, b in pairs) and not any(b for _, b in pairs):
        detail = "Rank 0 alone evaluates, with its own."
    elif any(a for a, _ in pairs):
        return []  # all ranks evaluate with the same ones
    else:
        detail = "No evaluation in eval() mode was seen."
    return [line("note", "batch norm", detail=detail)]


# ---- One process with what the ranks had ---------------------------------------------
def replay(launcher, report, run, samples, order=""):
    """Replay it, and say what it shows. order: that with which two ranks were right."""
    results = []
    orders = [order] if order else ["rank by rank", "row by row"]
    for order in orders:
        results.append(replay_in_order(launcher, report, run, samples, order))
        verdict, one = results[-1].verdict, results[-1].one
        if verdict.right or not (one.ended_well or any(one.steps)):
            break
        calls = [r.steps[0][0].backwards for r in (run, one) if r.steps[0]]
        divides = calls[1:] == [run.ranks * calls[0]] != [0]
        if order == "rank by rank" and divides and not verdict.wrong:
            # Gradient accumulation that is divided by the number of ranks
            turns = replay_in_order(launcher, report, run, samples, "in turn")
            if turns.one.steps[0]:  # otherwise it refuses such batches
                results = [turns]
            break
    best = min(results, key=lambda result: rank_of(result.verdict))
    report.say(*judge_gradients(best.verdict, run, best.one))
    return best


def rank_of(verdict):
    """Right is best. What one order excuses, another one does not accuse."""
    off = verdict.different.distance if verdict.wrong else 0
    return not verdict.right, verdict.wrong, off


def replay_in_order(launcher, report, run, samples, order):
    """One process, with the batches and random numbers of all ranks.

    order: their rows are joined "rank by rank" or "row by row" (the first of each rank,
    then the second, ...), or the batches come "in turn".
    """
    options = {"replay": Replay(samples.keys, order), "steps": 0, **reference(run)}
    name = f"1-as-{run.name}-{order.replace(' ', '-')}"
    report.title(f"One process with what {run.ranks} ranks had, {order}")
    one = launcher.run(name, 1, **options)
    if launcher.gpus and one.ended_well and not one.steps[0]:
        report.title(f"The same with {run.ranks} GPUs")  # some scripts insist on them
        one = launcher.run(f"{name}-gpus", 1, gpus=run.ranks, **options)
    limit = compare.LIMITS[launcher.float64]
    loads = bool(samples.keys[0])
    steps = compare.compare(
        run.steps, one.steps[0], limit, order, loads, missing(run, one)
    )
    return Replayed(compare.summarize(steps), one, order)


def missing(run, one):
    """Why one process has not made a step."""
    end = one.traces[0].end
    if not one.ended_well and end and end.problems:
        return f"One process cannot get what the ranks had: {end.problems[0]}."
    if not one.ended_well:
        error = one.words()["error"].rstrip(".")
        return f"One process with what the ranks had fails: {error}."
    if not one.steps[0]:
        return "One process makes no step."
    if "cut" in run.marks():
        return "The ranks had more than is recorded (3 GiB on each)."
    return "One process makes fewer steps."


def judge_gradients(verdict, run, one):
    values = {"ranks": run.ranks, "steps": verdict.steps, "same": verdict.same}
    if verdict.wrong:
        different = verdict.different
        values |= {"off": different.distance, "first": verdict.first}
        values |= {"step": verdict.step}
        factor = different.factor and round(different.factor, 6)
        values |= {"scale": str(different), "factor": factor}
        values |= {"weights": different.names}
        buffers = differing_buffers(run)
        if buffers and not compare.is_multiple(different, 1e-5):
            return [line("WRONG", "buffers", names=buffers, **values)]
        later = verdict.first == verdict.before > 0
        if later and "other length" in one.marks() and not different.scales:
            reason = f"It is right before step {verdict.first}, and not from there on. "
            reason += "One process has more batches in an epoch, and a schedule may "
            reason += "count these. To know it, divide the batch size by the ranks: "
            reason += "--batch_size {32}."
            values["left"] = verdict.steps - verdict.before
            return [line("note", "not replayed", reason=reason, **values)]
        return [line("WRONG", "later gradient" if later else "gradient", **values)]
    found = []
    if verdict.right:
        found.append(line("ok", "gradient", off=verdict.off, **values))
    if verdict.left:
        values |= {"left": len(verdict.left), "reason": verdict.reason}
        found.append(line("note", "not replayed", **values))
    if verdict.uneven:
        step, rows, off = verdict.uneven
        values |= {"first": step, "rows": " and ".join(map(str, rows)), "off": off}
        found.append(line("note", "uneven", **values))
    buffers = differing_buffers(run)
    if verdict.right and buffers and run.ranks == 2:
        found.append(line("note", "buffers differ", names=buffers))
    return found


def differing_buffers(run):
    names = set()
    for steps in zip(*run.steps):
        for step in steps[1:]:
            names |= {n for n, _ in steps[0].buffers.items() ^ step.buffers.items()}
    return sorted(names)


def judge_masks(run, replayed):
    """Whether the ranks draw the same random numbers for different samples.

    The replay knows which draws belong to the samples of a rank. They are the same if
    the generators of the ranks had the same state, also if the shapes differ.
    """
    if "own seed" in run.marks():
        return []  # the GPUs were seeded apart, and here there is one generator
    joined = {name for s in replayed.one.steps[0] for name in [*s.alike, *s.different]}
    alike, drawn = Counter(), Counter()  # steps, by the name
    for steps in zip(*run.steps[:2]):
        for name in joined:
            draws = [draws_of(step, name) for step in steps]
            if all(draws):
                drawn[name] += 1
                alike[name] += begin_alike(*draws)
    names = sorted(+alike)
    if names:
        values = {"same": max(alike.values()), "steps": max(drawn.values())}
        return [line("note", "masks", names=", ".join(names), **values)]
    return [line("ok", "masks")] if drawn else []


def draws_of(step, name):
    """Those of this name. A single number may be a decision for all ranks."""
    draws = [d for d in step.draws if f"torch.{d.name}()" == name]
    return [d for d in draws if math.prod(d.shape) > 1]


def begin_alike(one, two):
    """Whether the generator had the same state, before each of these draws.

    The first ones of other shapes set the generators of the ranks apart.
    """
    for a, b in zip(one, two):
        if a.state != b.state:
            return False
        if a.shape != b.shape:
            return True
    return True
