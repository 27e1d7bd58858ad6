"""Two ranks that are disturbed: stopped or killed and launched again, or one fails."""

import os
import re
from collections import Counter

import torch

from ddp_check.judge import compare, machines
from ddp_check.judge.begin import reference
from ddp_check.judge.printed import judge_printed_again
from ddp_check.judge.samples import Samples
from ddp_check.launch import TooSlow
from ddp_check.rows import judge, line

SAME_WEIGHTS = 1e-6  # of a relaunch, relative to how far they have come
SAME_FILES = 1e-4  # of what is saved beside them
# What loaders say of a file of which a part is missing, or all
CUT_OFF = "EOFError|central directory|truncated|deserializing header|JSONDecode"
CUT_HINT = """\
A file seems to be cut off. Did the kill come while it was saved? Then save
under another name in the same folder, and os.replace() the old file.
"""
MOST_BYTES = 2**30  # of a saved file that is compared


def disturb(launcher, report, parts, answer, options):
    """Stop, kill, fail, and use two machines: all at the same time."""
    two = answer.run
    count = len(two.steps[0])
    epoch = answer.samples.first_epoch() or count
    # In the first epoch, and in the second: both places show faults of their own.
    places = {"stop": min(epoch // 2 + 1, count - 1)}
    places["kill"] = min(places["stop"] + epoch * (epoch < count), count - 1)
    launches = {}
    if "resume" in parts:
        if count < 3:
            report.say(line("note", "few"))
        else:
            for action, at in places.items():
                pause = min(5, 10 / (count - at))
                more = {"action": action, "at": at, "pause": pause}
                launches[action] = launcher.start(action, **more)
    if "failure" in parts and count > 1:  # it fails before its second step, or later
        at = min(count // 2 + 1, count - 1)
        launches["fail"] = launcher.start("fail", action="fail", at=at)
    if "machines" in parts:
        launches["machines"] = machines.start(launcher, answer)
    if launches:
        two_machines = "machines" in launches
        what = ["disturbed"] * (len(launches) > two_machines)
        what += ["on two machines"] * two_machines
        report.title(f"Two ranks, {' and '.join(what)}")
    slow = []
    runs = end_all(launches, slow)
    resumes = [action for action in places if action in runs]
    again = {}
    for action in resumes:
        more = {"folders": runs[action].folders, "again": True, **reference(two)}
        again[action] = launcher.start(f"{action}-again", **more)
    if again:
        report.title("Launched again")
    again = end_all(again, slow)
    names = {"stop": "Stopped by SIGTERM", "kill": "One rank killed by SIGKILL"}
    wrong = False
    for action in again:
        report.title(f"{names[action]}, and launched again")
        if wrong:
            found = [line("note", "left out", what="how it continues after a kill")]
        else:
            found = judge_resume(two, runs[action], again[action], options.steps)
            if found[-1].row == "rest" and found[-1].word == "ok":
                found += judge_saved(two, again[action])
                more = two, again[action], launcher.float64
                found += judge_printed_again(options.compare, *more)
        wrong = any(finding.word == "WRONG" for finding in found)
        report.say(*found)
    if "fail" in runs:
        report.title("One of two ranks fails")
        report.say(judge_failure(runs["fail"]))
    if "machines" in runs:
        report.title("Two machines with one rank each (two torchruns on this one)")
        machines.check(launcher, report, runs["machines"], answer)
    if slow:
        raise slow[0]


def end_all(launches, slow):
    """{name: its Run}, without those that are too slow. The others are judged first."""
    runs = {}
    for name, launch in launches.items():
        try:
            runs[name] = launch.end()
        except TooSlow as error:
            slow.append(error)
    return runs


def left_of(run):
    """What has not ended after its time, in words."""
    if run.hangs:
        return "the ranks do not end"
    return f"processes stay: {run.stayed}" if run.stayed else ""


def judge_failure(run):
    left = left_of(run)
    ends = not left and any(run.codes)
    return judge(ends, "failure", what=left or "the exit code is 0", **run.words())


def judge_resume(two, run, again, cut):
    """The findings on a run that was stopped or killed, and on its relaunch. Pure.

    two: the undisturbed run. cut: the steps after which each launch is ended, or 0.
    """
    expected, made = two.bits[0], run.bits[0]
    if left := left_of(run):
        action = "SIGTERM" if run.name == "stop" else "SIGKILL of one rank"
        return [line("WRONG", "stopped", action=action, what=left, **run.words())]
    # In its last step, the other rank may have been gone already.
    if made[:-1] != expected[: len(made)][:-1]:
        return [line("note", "random", what="how it continues")]
    if not made:  # it goes on from what another launch has saved
        return [line("note", "no step", what="how it continues")]
    if len(made) == len(expected) and run.name == "stop":
        return [line("LOSES", "signal")]
    if not again.ended_well and not goes_beyond(again, len(expected) - len(made), cut):
        # It may refuse, so as to overwrite nothing.
        refuses = re.search("exists|not empty", again.words()["error"])
        word = "LOSES" if refuses and not any(again.steps) else "WRONG"
        values = again.words()
        cut_off = re.search(CUT_OFF, values["why"])
        values["hint"] = CUT_HINT if run.name == "kill" and cut_off else ""
        return [line(word, "again", **values)]
    if not all(again.steps):
        values = {"made": 0, "left": len(expected) - len(made), "detail": ""}
        return [line("WRONG", "no rest", **values)]
    raw = [name for name in expected[0] if compare.is_raw(name)]  # may be a rank's own
    own = {*raw, *two.idle}
    same = all(compare.same_weights(a, b, own) for a, b in zip(*two.steps[:2]))
    if not same and not two.steps[0][0].sharded:
        return [line("note", "left out", what="how it continues")]
    # Where the weights were the same: the rank has looked for it.
    done = again.steps[0][0].place
    if done < 0 or any(steps[0].place != done for steps in again.steps):
        if "cut" in two.marks():  # only recorded weights are looked for
            return [line("note", "left out", what="how it continues")]
        return [line("WRONG", "begin")]
    left, count = len(expected) - done, len(again.steps[0])
    lost = len(made) - done
    if done == 0:
        if count != left and not (cut and count > left):
            detail = "It starts from its first weights: were the saved ones loaded? "
            detail += "load_state_dict(strict=False) does not fail."
            values = {"made": count, "left": left, "detail": detail}
            return [line("WRONG", "no rest", **values)]
        return [line("LOSES", "all lost", lost=lost)]
    word = "LOSES" if lost > 0 and run.name == "stop" else "ok"
    found = [line(word, "lost", done=done, lost=lost)]
    if count != left and not (cut and count > left):
        return [*found, line("WRONG", "no rest", made=count, left=left, detail="")]
    return found + judge_rest(two, again, done)


def goes_beyond(again, left, cut):
    """Whether it has trained on behind the step after which each launch is cut.

    So it does if it starts from other weights, and what comes then was not seen before.
    """
    steps = again.steps[0]
    return cut and bool(steps) and steps[0].place < 0 and len(steps) >= left


def judge_rest(two, again, done):
    """Compare what a relaunch trains with what was left, on all ranks."""
    rest = [steps[done:] for steps in two.steps]
    steps = [mine[: len(left)] for mine, left in zip(again.steps, rest)]
    other = [other_samples(two, again, done, kind) for kind in ("ids", "rows")]
    knows_ids = any(Samples(two).of(0, "ids"))
    if other[0] is not None or (other[1] is not None and not knows_ids):
        first = other[1] if other[0] is None else other[0]
        return [line("WRONG", "other samples", first=first)]
    drifts = [compare.drift(of_rank, SAME_WEIGHTS) for of_rank in steps]
    far = max(far for far, _ in drifts)
    first = min((where for _, where in drifts if where is not None), default=None)
    same = [[s.bits for s in a] == [s.bits for s in b] for a, b in zip(steps, rest)]
    who = [r for r, of_rank in enumerate(steps) if noises(rest[r], of_rank, str.__ne__)]
    pairs = [pair for a, b in zip(rest, steps) for pair in enumerate(zip(a, b))]
    inputs = [number for number, (a, b) in pairs if a.inputs != b.inputs]
    # A loader's workers may draw, too.
    both = [s for _, pair in pairs for s in pair]
    drawn = any(s.draws or s.other_draws or s.fetched for s in both)
    if inputs and first is not None and not drawn and min(inputs) <= first:
        return [line("WRONG", "other samples", first=min(inputs))]
    found = []
    # Generators beside torch's, whose old numbers it does not get again
    others = any(draws_otherwise(*pair, number == 0) for number, pair in pairs)
    unsure = first is not None and (others or inputs and drawn)
    kept = who and all(begins_alike(rest[rank], steps[rank]) for rank in who)
    if unsure and inputs and kept and not others:
        return [line("note", "other inputs")]
    if who or others or unsure:
        names = " and ".join(f"rank {rank}" for rank in who or range(two.ranks))
        alike = noises(*steps[:2], str.__eq__) and not noises(*rest[:2], str.__eq__)
        then = "The rest was compared with the old ones." if first is None else ""
        if unsure:
            then = "So the rest was not judged."
        if unsure and inputs:
            then = "So the samples differ, and the rest was not judged."
        text = " Now both ranks draw the same." if alike else ""
        found = [line("note", "other noise", who=names, same=text, then=then)]
        if unsure:
            return found
    if first is None and not all(same) and not all(map(compare.covers, steps)):
        return [*found, line("note", "left out", what="how it continues")]
    values = {"off": far, "first": first, "rates": ""}
    other = compare.other_rate(steps[0], rest[0])
    if other:
        number, mine, theirs = other
        text = f"The learning rate of its step {number} is {mine}, not {theirs}."
        values["rates"] = text
    values["apart"] = "the same bits" if all(same) else f"{far:.0e} apart"
    return [*found, judge(first is None, "rest", **values)]


def draws_otherwise(a, b, is_first):
    """Beside torch's generators. The set-up of a relaunch may have used others."""
    names = a.other_draws if is_first else a.other_draws | b.other_draws
    return any(a.other_draws.get(name) != b.other_draws.get(name) for name in names)


def other_samples(two, again, done, kind):
    """The first step of a relaunch without the samples that were left, or None."""
    found = []
    for rank in range(two.ranks):
        mine, theirs = [Samples(run).of(rank, kind) for run in (again, two)]
        known = Counter(sum(theirs, []))
        for number, (a, b) in enumerate(zip(mine, theirs[done:])):
            if Counter(b) - Counter(a):
                # Rows that never came before may be the same samples with other noise.
                if kind == "ids" or Counter(a) & known:
                    found.append(number)
                break
    return min(found, default=None)


def begins_alike(one, two):
    """Whether their first numbers come from the same state of the generator."""
    drawn = next(
        ((a.draws[0], b.draws[0]) for a, b in zip(one, two) if a.draws and b.draws),
        None,
    )
    return drawn is not None and drawn[0].state == drawn[1].state


def noises(one, two, compare):
    """Whether this is true of what some step has drawn in both.

    Without the order of an epoch: samples are compared anyway.
    """
    for steps in zip(one, two):
        a, b = [
            repr(
                [(d.name, d.shape, d.checksum) for d in s.draws if d.name != "randperm"]
            )
            for s in steps
        ]
        if (a != "[]" or b != "[]") and compare(a, b):
            return True
    return False


# ---- Files that both runs have saved -------------------------------------------------
def judge_saved(two, again):
    """The weights were the same, so what is saved beside them must be the same, too."""
    folders = [run.folders[0] for run in (two, again)]
    names = set.intersection(*[machines.checkpoints_in(f.parent) for f in folders])
    same = []
    for name in sorted(names):
        paths = [folder / name for folder in folders]
        if max(os.path.getsize(path) for path in paths) > MOST_BYTES:
            continue
        off, parts = compare_files(*map(tensors_of_file, paths))
        if off > SAME_FILES:
            values = {"name": name, "off": off, "names": name}
            values["parts"] = f"It differs in {compare.listed(parts)}."
            return [line("WRONG", "saved otherwise", **values)]
        same += [name] if off >= 0 else []
    return [line("ok", "saved otherwise", names=", ".join(same))] if same else []


def tensors_of_file(path):
    """{name: tensor} of a checkpoint; empty if it cannot be read safely."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # it may hold anything
        return {}
    found, values = {}, [("", value)]
    for name, value in values:
        if torch.is_tensor(value) and value.is_floating_point() and value.dim() > 0:
            found[name] = value.double()
        entries = value.items() if isinstance(value, dict) else ()
        if isinstance(value, (list, tuple)):
            entries = enumerate(value)
        values += [(f"{name}.{key}".lstrip("."), entry) for key, entry in entries]
    return found


def compare_files(one, two):
    """(how far apart, the tensors that differ). -1: they have nothing in common."""
    away, parts = -1.0, []
    for name in one.keys() & two.keys():
        a, b = one[name], two[name]
        if a.shape == b.shape and a.isfinite().all() and b.isfinite().all():
            off = float((a - b).norm() / (a.norm() or 1.0))
            away = max(away, off)
            parts += [name] * (off > SAME_FILES)
    return away, sorted(parts)
