"""The first launch: does the script start, and under which conditions?"""

import dataclasses
import re

from ddp_check.launch import TooSlow
from ddp_check.result import RACE_HINT
from ddp_check.rows import line

SPAWNS = "it starts its own ranks"
# With pretended GPUs, these errors are the script's own. Others may be due to them.
ANYWHERE = "(ModuleNotFound|Import|Syntax|Name|UnboundLocal|Key|FileNotFound"
ANYWHERE += "|FileExists|Permission)Error|.*: error: |.*invalid device ordinal"
OF_RANKS = "by peer|mismatch|preamble"  # one has ended, or calls another collective


def first_launch(launcher, report):
    """Two ranks: in float64 if that works, with pretended GPUs if it asks for them."""
    launcher.gpus = needs_gpus(launcher)
    report.title("Two ranks, in float64")
    run = with_gpus(launcher, report, record(launcher, "2-ranks", probe=True))
    if SPAWNS in run.said.get("errors", ""):
        report.say(line("note", "spawns"))
        return None
    # A rank that has failed may leave the other one waiting.
    raised = "Traceback" in run.said.get("errors", "")
    if not run.ended_well and (raised or not run.hangs):
        launcher.float64 = False
        report.title("It fails: again, in float32")
        again = with_gpus(launcher, report, record(launcher, "2-ranks-float32"))
        if again.ended_well:
            words = dataclasses.replace(run, hangs=False).words()
            report.say(line("note", "float32", error=words["error"]))
        run = again
    words = run.words()
    if "cannot be imitated" in run.said.get("errors", ""):
        report.say(line("note", "imitated", **words))
        return None
    if run.ended_well and not any(run.steps):
        report.say(line("note", "no optimizer"))
        return None
    if run.ended_well or run.hangs:
        return run
    report.title("It fails: again, without being watched")
    if not fails(launcher, 2 * run.seconds + 30):
        report.say(line("note", "only here", **words))
        return None
    known = re.match(ANYWHERE, words["error"]) or re.search(OF_RANKS, words["why"])
    if launcher.gpus and not known:
        report.say(line("note", "imitated", **words))
        return None
    return run


def fails(launcher, timeout):
    """Whether it also fails without being watched."""
    try:
        run = launcher.start("2-ranks-unwatched", watched=False).end(timeout)
    except TooSlow:  # it went on, and has not failed
        return False
    return not run.ended_well


def needs_gpus(launcher):
    """Whether the text of the script takes GPUs for granted: then it gets them at once.

    Otherwise the first launch tells: see with_gpus().
    """
    if launcher.script[0] == "-m":
        return False
    with open(launcher.script[0], errors="replace") as file:
        text = file.read()
    return bool(re.search("(?i)cuda|nccl", text)) and not re.search(
        "is_available|cpu|gloo", text
    )


def with_gpus(launcher, report, run):
    """Another launch with pretended GPUs, if this one has missed them."""
    steps, marks = run.steps[0], run.marks()
    alone = steps and not trains_together(run)
    asks = "cuda" in marks and "wrapped" not in marks
    # A line of code may have a name such as `accelerator`.
    wanted = "cuda|nccl|nvidia|gpu|MULTI_CPU|^(?!    ).*accelerator"
    # Each rank may have an error of its own.
    errors = re.findall(r"(?m)^\S*Error: .*", run.said.get("errors", ""))
    said = "\n".join([run.why(), *errors])
    wants = re.search(wanted, said, re.IGNORECASE | re.MULTILINE)
    fails_early = not steps and not run.hangs
    if launcher.gpus or not (fails_early and wants or alone and asks):
        return run
    launcher.gpus = True
    report.title("It asks for GPUs: again, with a CPU that pretends to be one")
    return record(launcher, f"{run.name}-gpu")


def record(launcher, name, **options):
    return launcher.start(name, record=True, **options).end()


def trains_together(run):
    """Whether most steps call DDP, or reduce as many numbers as the gradient has."""
    steps = run.steps[0]
    carries = [
        s.ddp_forwards or 0 < s.gradient_values <= s.floats_reduced for s in steps
    ]
    return steps[0].ranks > 1 and 2 * sum(map(bool, carries)) > len(steps)


def failed(run):
    row = "hang" if run.hangs else "fails" if any(run.steps) else "start"
    finding = line("WRONG", row, **run.words())
    if row == "start" and run.ranks > 2:
        finding.values["hint"] = f"Two ranks have started. {RACE_HINT}"
    return finding


def reference(run):
    """The options of a launch that is compared with this one."""
    return {"reference": str(run.log), "reference_ranks": run.ranks}
