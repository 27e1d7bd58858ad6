"""One process alone, as the script runs without other ranks; and four ranks."""

import statistics
from collections import Counter

from ddp_check.judge import begin, compare, first
from ddp_check.judge.samples import Samples
from ddp_check.rows import judge, line


def any_number_of_ranks(launcher, report, numbers, answer):
    more = [n for n in numbers if n not in (1, 2)]
    launches = [answer.alone] * bool(answer.alone)
    if 1 in numbers and not launches:
        launches.append(launcher.start("1-rank", 1, **begin.reference(answer.run)))
    alone = bool(launches)
    launches += [launcher.start(f"{n}-ranks", n, record=True) for n in more]
    names = ["one process alone"] * alone + [f"{n} ranks" for n in more]
    report.title(", ".join(names).capitalize())
    runs = [launch.end() for launch in launches]
    if alone:
        report.say(*judge_alone(runs[0], answer, compare.LIMITS[launcher.float64]))
    for run in runs[alone:]:
        if run.ended_well and not all(run.steps):
            report.say(line("note", "no step", what=f"{run.ranks} ranks"))
        elif not run.trained:
            report.say(begin.failed(run))
        elif answer.right:
            order = answer.replayed.order
            first.replay(launcher, report, run, Samples(run), order)
        else:
            what = f"the gradients of {run.ranks} ranks"
            report.say(line("note", "left out", what=what))
        for path in run.log.glob("*.pickle"):
            path.unlink()


def judge_alone(run, answer, limit):
    """What one process alone does, beside two ranks. Pure."""
    if run.ended_well and not run.steps[0]:
        return [line("note", "no step", what="one process alone")]
    if not run.trained:
        return [line("note", "one process", **run.words())]
    one, two, kind = Samples(run), answer.samples, answer.samples.kind
    mine, theirs = one.of(0, kind), two.of_all(kind)
    sizes = [[len(rows) for rows in steps if rows] for steps in (mine, theirs)]
    common = set(sum(mine, [])) & set(sum(theirs, []))
    if not all(sizes) or (kind == "inputs" and not common):
        return []  # a row may be no sample, such as a step in time
    # In most steps: a loader may fetch a batch ahead. Or the mean, if sizes vary.
    count, of_ranks = map(statistics.median, sizes)
    pairs = [(count, of_ranks), [statistics.mean(of_run) for of_run in sizes]]
    # What a module keeps, such as a hidden state, may count as a sample, too.
    same_size = any(abs(a - b) <= 0.25 * b for a, b in pairs)
    how = "grows" if of_ranks > count else "shrinks"
    values = {"one": count, "two": of_ranks, "how": how}
    found = [judge(same_size, "global batch", "note", **values)]
    same = all(Counter(a) == Counter(b) for a, b in zip(mine, theirs))
    if not same or not same_size:
        return found
    steps = run.steps[0]
    other = compare.other_rate(steps, answer.run.steps[0])
    if not answer.comparable:
        return found
    if other:
        # A schedule may follow the loss. In a replay that is the same.
        one = answer.replayed.one.steps[0]
        values = dict(zip(("first", "one", "two"), other))
        by_ranks = compare.other_rate(one, answer.run.steps[0])
        return found + [line("WRONG", "rates", **values)] * bool(by_ranks)
    if answer.replayed.verdict.wrong:
        return found
    if not compare.covers(steps):
        return found
    far, where = compare.drift(steps, limit)
    if where is None:
        return [*found, line("ok", "alone weights", off=far)]
    # The same samples, and nothing random: then the first gradient must be the same.
    if any(step.draws for step in steps):
        return found
    if first.normalizes(two.run):
        said = first.judge_norms(two.run, False)
        return found + [line("note", "alone norms", off=far, first=where)] * (not said)
    if not answer.right or answer.replayed.order == "in turn":
        # In turn, it has had the batches of the ranks. Alone, it makes others.
        return [*found, line("note", "alone differs", off=far, first=where)]
    rows = one.of(0, "rows")[0]
    if not rows or Counter(rows) != Counter(two.of_all("rows")[0]):
        return found
    # Its loader gave the same rows, so it is no excuse that others came out behind it.
    context = compare.Context("rank by rank", True, known=set())
    ranks = [of_rank[0] for of_rank in two.run.steps]
    verdict = compare.compare_step(ranks, steps[0], limit, context)
    if isinstance(verdict, compare.Different):
        found.append(line("WRONG", "alone weights", off=verdict.distance))
    return found
