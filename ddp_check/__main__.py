#!/usr/bin/env python3
"""Check a data-parallel training script on the CPU, without changing it.

    python -m ddp_check mine.py             any script that torchrun can launch
    python ddp_check mine.py                where this folder was copied
    ddp-check -m package.train              after pip install; a module
    python -m ddp_check --steps 40 mine.py --batch_size 8 --out {out}

It needs Linux and torch, nothing else. Each launch runs in a folder of its own: pass
data as absolute paths, or with --link. In the arguments, {out} becomes the path of a
folder that a launch and its relaunch share, {ranks} the number of ranks, {local_ranks}
that of a machine, {32} the number 32 divided by the ranks, and ${local_rank} the
LOCAL_RANK.

First it runs the script on two ranks, in float64, and records on each rank which
batches the DataLoaders yield and which random numbers are drawn. Then it replays both
on one process: each step gets the batches and random numbers of all ranks. If the
script trains one model on the samples of all ranks, each gradient must be the same.
This is the first answer. Then it runs the script on one process and on four ranks,
stops and kills it and launches it again, lets a rank fail, and runs it as on two
machines.

    ok      the check has passed
    WRONG   the script trains something different from what it seems to
    LOSES   training steps are lost, which some scripts accept
    note    something that may be intended, or could not be judged

The exit code is 0 if it is right, 1 if something is WRONG, 2 for a wrong command, 3 if
nothing was judged, or not the gradients, and 4 if the check itself fails. With 1, 3 and
4, a folder is kept with all that the launches said, but not what they saved.

Only what runs is checked, so choose options for 20 to 100 steps of a tiny model, over
two epochs. The script sees CHECK=1 in its environment.
"""

# To add a line: a row in rows.py, and its Finding in the judge that knows. The rooms:
#
#   __main__.py    the command line, what is printed, exit codes; in a rank: run it
#   trace.py       the data that the ranks write and the judges read
#   rows.py        the sentences
#   launch.py      processes; result.py: what a launch has come to, and what it said
#   rank/          runs in each rank: watch the script, record it, replay it
#   judge/         begin.py: the first launch; first.py: what two ranks did, and the
#                  replay; compare.py: the verdict on gradients; samples.py; alone.py:
#                  other numbers of ranks; resume.py; machines.py; printed.py. A judge
#                  is a pure function of Runs where it can be.
#   tests/check/   test_judge.py: judges, on traces that it makes up; test_rank.py:
#                  functions of rank/; test_check.py: the scripts in cases/

import argparse
import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

if not __package__:  # python ddp_check mine.py
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from ddp_check import rows  # noqa: E402
from ddp_check.launch import STACK_SIGNAL, Guardian, Launcher, TooSlow  # noqa: E402
from ddp_check.result import OwnFault  # noqa: E402

PARTS = "ranks", "resume", "machines", "failure"
RIGHT, WRONG, USAGE, NOT_JUDGED, FAULT, INTERRUPTED = 0, 1, 2, 3, 4, 130
GRADIENTS = "gradient", "later gradient", "buffers"  # rows that judge them
SILENCE = 10  # seconds before a terminal shows that it is alive


class Report:
    """Prints what is found, and counts it."""

    def __init__(self, name):
        self.name = name
        self.began = self.spoke = time.monotonic()
        self.findings = []
        self.beats = sys.stdout.isatty()

    def seconds(self):
        return time.monotonic() - self.began

    def print(self, text, end="\n"):
        clear = "\r\033[K" if self.beats else ""
        print(f"{clear}{text}", end=end, flush=True)

    def title(self, text):
        self.print(f"{text}  [{self.seconds():.0f} s]")
        self.spoke = time.monotonic()

    def say(self, *findings):
        for finding in findings:
            self.findings.append(finding)
            self.print(rows.as_text(finding))

    def tick(self, launch):
        """While a launch is waited for: a heartbeat, on a terminal."""
        now = time.monotonic()
        if self.beats and now - self.spoke > SILENCE:
            text = f"  {now - launch.began:.0f} of at most {launch.timeout:.0f} s"
            self.print(f"{text}: {launch.name}", end="")
            self.spoke = now - SILENCE + 1

    def code(self):
        if any(finding.word == "WRONG" for finding in self.findings):
            return WRONG
        return RIGHT if self.judges_gradients() else NOT_JUDGED

    def judges_gradients(self):
        judged = [f for f in self.findings if f.row in GRADIENTS]
        return any(finding.word in ("ok", "WRONG") for finding in judged)

    def summary(self):
        counts = Counter(finding.word for finding in self.findings)
        left = sum(map(rows.not_judged, self.findings))
        checked = counts["ok"] + counts["WRONG"] + counts["LOSES"]
        words = f"{counts['WRONG']} WRONG, {counts['LOSES']} LOSES"
        words += f", {counts['note']} note{'s' * (counts['note'] != 1)}"
        self.print(f"\n{checked} checked, {left} not judged: {words}. ", end="")
        print(f"[{self.seconds():.0f} s]")

    def last_line(self):
        wrong = [f for f in self.findings if f.word == "WRONG"]
        text = "Nothing of what was checked is wrong."
        if wrong:
            text = f"First fix this: {rows.sentences(wrong[0])[0].rstrip('.!?')}."
        elif not any(finding.word in ("ok", "LOSES") for finding in self.findings):
            text = "Nothing was judged."
        left = any(finding.row == "not replayed" for finding in self.findings)
        if not self.judges_gradients() and (left or text.startswith("Nothing of")):
            text = f"The gradients were not judged. {text}"
        print(f"{self.name}: {text}", flush=True)

    def as_json(self, code):
        findings = [rows.as_record(finding) for finding in self.findings]
        record = {"script": self.name, "exit": code, "seconds": self.seconds()}
        return json.dumps(record | {"findings": findings}, indent=1, default=str) + "\n"


def check(options, launcher, report):
    from ddp_check.judge.alone import any_number_of_ranks
    from ddp_check.judge.first import first_answer
    from ddp_check.judge.printed import judge_printed
    from ddp_check.judge.resume import disturb

    parts = [p for p in PARTS if p not in options.skip and not options.quick]
    alone = "ranks" in parts and 1 in options.ranks
    answer = first_answer(launcher, report, alone)
    if answer is None:
        return
    more = options.compare, answer.run, answer.replayed, launcher.float64
    report.say(*judge_printed(*more))
    if answer.outside:
        parts = []
    if parts:
        report.print(what_comes(parts, options.ranks, answer.run.seconds))
    if "ranks" in parts:
        any_number_of_ranks(launcher, report, options.ranks, answer)
    disturb(launcher, report, parts, answer, options)


def what_comes(parts, ranks, seconds):
    """How long it takes: by that of two ranks, if each core runs one rank at a time."""
    names = {"ranks": f"{', '.join(map(str, ranks))} ranks"}
    names |= {"resume": "stop and kill, and launch again", "failure": "a failure"}
    names["machines"] = "two machines"
    others = [n for n in ranks if n != 2]
    # What is stopped, killed or fails makes about half of its steps.
    together = (
        2 * ("resume" in parts) + ("failure" in parts) + 2 * ("machines" in parts)
    )
    phases = [together, 2 * ("resume" in parts)]
    if "ranks" in parts:
        phases += [sum(others), *[1] * len([n for n in others if n > 1])]
    cores = max(2, len(os.sched_getaffinity(0)))
    rest = sum(seconds * max(1, count / cores) for count in phases if count)
    time_ = (
        f"{rest / 60:.0f} minutes" if rest > 90 else f"{max(10, round(rest, -1)):.0f} s"
    )
    rest = ", ".join(names[part] for part in parts)
    return f"This is the first answer. To come: {rest}. About {time_}"


# ---- The command line ----------------------------------------------------------------
def parse(arguments):
    usage = "ddp-check [options] mine.py [its arguments]"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        usage=usage, description=__doc__, formatter_class=formatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two ranks and the replay, no more")
    text = "end each launch after this many steps of training"
    add("--steps", type=int, default=0, metavar="N", help=text)
    add("--ranks", default="1,2,4", help="numbers of ranks to compare (1,2,4)")
    text = "a number that rank 0 prints, and that must not depend on the ranks, such as"
    text += " 'val_loss (\\S+)' (repeatable)"
    add("--compare", action="append", default=[], metavar="REGEX", help=text)
    text = "a file or folder that the script expects where it runs (repeatable)"
    add("--link", action="append", default=[], metavar="PATH", type=Path, help=text)
    text = "leave out some of ranks,resume,machines,failure"
    add("--skip", action="append", default=[], metavar="A,B", help=text)
    text = "seconds that each launch may take, while others run beside it (120)"
    add("--timeout", type=int, default=120, help=text)
    text = "write all findings to this file: word, row, values, text, help, page"
    add("--json", type=Path, metavar="FILE", help=text)
    add("-m", dest="is_module", action="store_true", help="a module, not a file")
    add("script", help="the training script, or the module")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    options.skip = ",".join(options.skip).split(",") if options.skip else []
    for part in options.skip:
        if part not in PARTS:
            refuse(f"--skip {part}: choose from {', '.join(PARTS)}")
    for path in [*[Path(options.script)] * (not options.is_module), *options.link]:
        if not path.exists():
            refuse(f"there is no {path}")
    if options.json and not options.json.absolute().parent.is_dir():
        refuse(f"--json {options.json}: there is no such folder")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)+", options.ranks):
        refuse(f"--ranks {options.ranks}: give two or more numbers, such as 1,2,4")
    options.ranks = sorted({2, *map(int, options.ranks.split(","))})
    for pattern in options.compare:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            refuse(f"--compare {pattern}: {error}")
        if groups != 1:
            refuse(f"--compare {pattern}: put the number in parentheses: 'loss (\\S+)'")
    numbers = [2] if options.quick or "ranks" in options.skip else options.ranks
    for number in re.findall(r"\{(\d+)\}", " ".join(options.arguments)):
        for ranks in numbers:
            if int(number) == 0 or int(number) % ranks > 0:
                text = f"{{{number}}} cannot be divided by {ranks} ranks"
                refuse(f"{text}: choose a multiple, or different --ranks")
    return options


def refuse(text):
    print(text, file=sys.stderr)
    sys.exit(USAGE)


def main(arguments=None):
    options = parse(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed.run  # noqa: F401  once, for all forks

    for number in (signal.SIGTERM, signal.SIGHUP):  # they end it as Ctrl-C does
        signal.signal(number, signal.default_int_handler)
    if torch.cuda.device_count() > 0:
        print("The GPUs of this machine are hidden from the script.")
    path = str(Path(options.script).resolve())
    script = ["-m", options.script] if options.is_module else [path]
    report = Report(options.script if options.is_module else Path(path).name)
    base = Path(tempfile.mkdtemp(prefix="check-"))
    guardian = Guardian(base)
    more = options.arguments, options.link, options.steps, options.timeout
    launcher = Launcher(base, script, *more, guardian.pipe, report.tick)
    try:
        try:
            check(options, launcher, report)
        except TooSlow as slow:
            report.say(rows.line("note", "slow", timeout=f"{slow.args[0]:.0f}"))
        code = report.code()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        code = FAULT
        text = traceback.format_exc()
        if isinstance(error, OwnFault):
            text = f"Traceback of a rank:\n{error}"
        report.print(text)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    keeps = code in (WRONG, NOT_JUDGED, FAULT)
    guardian.end(keeps)
    if code == INTERRUPTED:
        print("interrupted: no process is left", file=sys.stderr)
        return code
    report.summary()
    if keeps:
        print(f"Everything that the launches said: {base}")
    if code == FAULT:
        print(
            "The check itself has failed, not the script. Please report the traceback."
        )
    else:
        report.last_line()
    if options.json:
        options.json.write_text(report.as_json(code))
    return code


def run_in_rank(words):
    """torchrun has started this process: see launch.py."""
    path = Path(os.environ["CHECK_LOG"], f"rank{os.environ['RANK']}.stack")
    faulthandler.register(STACK_SIGNAL, open(path, "w"), all_threads=False)
    from ddp_check.rank.patch import wrap
    from ddp_check.rank.run import run

    wrap(signal, "signal", keep_stack_signal)
    run(words)


def keep_stack_signal(set_handler, number, handler):
    """Lightning sets all signals back to what Python knows of, which is not this."""
    return None if number == STACK_SIGNAL else set_handler(number, handler)


if __name__ == "__main__":
    if "CHECK_LOG" in os.environ:
        run_in_rank(sys.argv[1:])
    else:
        sys.exit(main())
