"""Two machines with one rank each: two torchruns on this machine."""

import contextlib
import os
import re

from ddp_check.judge import begin, compare
from ddp_check.launch import TooSlow
from ddp_check.result import MISSING, RACE_HINT
from ddp_check.rows import line

RANKS_HINT = "Is RANK used in place of LOCAL_RANK, or LOCAL_RANK in place of RANK?\n"
# What Lightning says if it is told a number of GPUs for each machine
OF_MACHINE = "devices=.*num_nodes="
ENDINGS = ".pt", ".pth", ".tar", ".ckpt", ".bin", ".safetensors", ".pkl"


def start(launcher, answer):
    """With a pretended GPU on each if the script asks for GPUs. There is no cuda:1."""
    gpus = int(launcher.gpus or "cuda" in answer.run.marks())
    return launcher.start("machines", machines=2, gpus=gpus)


def check(launcher, report, run, answer):
    """At most two more launches: without GPUs, or in one folder."""
    two = answer.run
    asks = "cuda" in two.marks() and not launcher.gpus
    ordinal = "invalid device ordinal" in run.said.get("errors", "")
    same = run.trained and run.bits == two.bits
    if asks and not ordinal and not run.hangs and not same:
        report.title("Two machines, without pretended GPUs")
        run = launcher.run("machines-cpu", machines=2, gpus=0)
    if launcher.gpus and run.ended_well and not any(run.steps):
        report.title("The same with two GPUs on each")
        run = launcher.run("machines-gpus", machines=2, gpus=2)
    shared = None
    missing = "FileNotFound" in run.said.get("errors", "")  # or another error for it
    missing = missing or re.search(MISSING, run.words()["why"])
    if not run.trained and (run.hangs or missing):
        # If each machine waits for a file of the other one, it trains in one folder.
        report.title("Two machines that share a folder")
        folder = run.log / "shared"
        launch = launcher.start("machines-shared", machines=2, folders=[folder] * 2)
        with contextlib.suppress(TooSlow):
            shared = launch.end(timeout=20 + 5 * two.seconds)
    told = any("{ranks}" in word for word in launcher.arguments)
    found, trained = judge_start(run, shared, told)
    report.say(*found)
    if trained is None:
        return
    found, unsure = judge_machines(trained, answer.samples)
    report.say(*found)
    if unsure:
        report.say(judge_bits(launcher, report, trained, two))
    alone = any(finding.row == "machines alone" for finding in found)
    if trained is not shared and not alone:
        report.say(*judge_files([folder.parent for folder in trained.folders]))


def judge_start(run, shared, told=False):
    """(the findings, the run that has trained or None).

    told: its arguments have the number of ranks, perhaps as that of a machine.
    """
    if run.trained:
        return [], run
    words = run.words()
    if shared is not None and shared.trained:
        return [line("note", "shared disk", error=words["error"])], shared
    if shared is not None and not (shared.hangs or shared.ended_well):
        run, words = shared, shared.words()  # this is wrong with a shared disk, too
    if "cannot be imitated" in run.said.get("errors", ""):
        return [line("note", "imitated", **words)], None
    if run.ended_well:
        return [line("note", "no step", what="two machines")], None
    told = told and "invalid device ordinal" not in words["error"]
    if told or re.search(OF_MACHINE, words["error"]):
        return [line("note", "machine ranks", **words)], None
    words["hint"] = words["hint"] or RANKS_HINT
    return [line("WRONG", "machines start", **words)], None


def judge_machines(run, samples):
    """(the findings, whether other bits are left to be judged)."""
    if begin.trains_together(samples.run) and not begin.trains_together(run):
        return [line("WRONG", "machines alone")], False
    of_machines = type(samples)(run)
    shares = [one.share_in_step(samples.kind) or 0 for one in (samples, of_machines)]
    if shares[0] < 0.2 and shares[1] >= 0.9:
        return [line("WRONG", "machine samples")], False
    rows = [s.of(0, samples.kind)[0] for s in (samples, of_machines)]
    one, two = [2 * len(of_rank) for of_rank in rows]
    if one != two:
        return [line("note", "machine batch", one=one, two=two)], False
    if run.bits == samples.run.bits:
        return [line("ok", "machines")], False
    return [], True


def judge_bits(launcher, report, run, two):
    """They are other bits. That is wrong only if the same command repeats its bits."""
    report.title("Is it random? The same command again")
    again = launcher.run("2-ranks-repeated")
    if not again.ended_well:
        finding = begin.failed(again)
        finding.values["hint"] = f"The same command has run before. {RACE_HINT}"
        return finding
    if again.bits[0] != two.bits[0]:
        return line("note", "random", what="two machines")
    return line("WRONG" if is_fault(two, run) else "note", "machines")


def is_fault(one, two):
    """Whether two machines train differently on the same inputs and random numbers, or
    only there both ranks have the same seed.

    Otherwise one rank of each machine may have evaluated, which draws a number.
    """
    for ranks in zip(zip(*one.steps), zip(*two.steps)):
        bits = [[step.bits for step in of_run] for of_run in ranks]
        if bits[0] != bits[1]:
            had = [[(step.inputs, step.draws) for step in of_run] for of_run in ranks]
            return had[0] == had[1] or [*map(one_seed, ranks)] == [False, True]
    return True  # the number of steps is another one


def one_seed(steps):
    """Whether the generators of both ranks are in the same state at the first draw."""
    states = [[draw.state for draw in step.draws][:1] for step in steps]
    return states[0] == states[1] != []


def judge_files(machines):
    names = set.intersection(*[checkpoints_in(folder) for folder in machines])
    listed = compare.listed(sorted(names))
    return [line("note", "both save", names=listed)] if names else []


def checkpoints_in(machine):
    paths = [path for path in machine.rglob("*") if path.suffix in ENDINGS]
    paths = [path for path in paths if not path.is_symlink()]
    return {os.path.relpath(path, machine / "folder") for path in paths}
