"""Test the tests: break the program in one place, and see the test fail that should.

    make test-the-tests                  all rows
    make test-the-tests ARGS="clip"      the rows that have this word in their name

The rows are in breaks.txt. Each one has three parts:

    the name of the break | file | the tests of which one must fail
    - lines of the file, which must be there exactly once
    + lines to put in their place (none: delete them)

A row whose - lines are not there once no longer applies: it is named and left out. Then
the tests of all others must pass on the unbroken program. A test that does not end is
not caught. The exit code is 1 if a break is not caught, or if the tests fail unbroken.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (imported once here, and not for each row)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
COPIED = "ddp_train.py test_ddp_train.py run_single.sh run_multi_node.sh .pytest.ini"
COPIED += " tests/conftest.py tests/harness.py tests/test_no_waiting.py"
LIMIT = 400  # seconds for one row; for the unbroken program ten times as many
os.environ.setdefault("DEADLINE", "60")  # for harness.py: many a broken program hangs
PARALLEL = 2
RESULTS = {0: "NOT CAUGHT", 1: "caught", 5: "no such test", None: "too slow"}


@dataclass
class Row:
    name: str
    file: str
    tests: str
    old: list = field(default_factory=list)
    new: list = field(default_factory=list)


def read_rows(words):
    """The rows that have one of these words in their name, or all."""
    rows = []
    for line in (HERE / "breaks.txt").read_text().splitlines():
        if line.startswith("- "):
            rows[-1].old.append(line[2:])
        elif line.startswith("+ "):
            rows[-1].new.append(line[2:])
        elif line.strip() and not line.startswith("#"):
            rows.append(Row(*[part.strip() for part in line.split("|")]))
    if words:
        rows = [row for row in rows if any(word in row.name for word in words)]
    return rows


class Run:
    """Some tests in a copy of the project, by a fork of this process."""

    def __init__(self, tests, row=None):
        self.row = row
        self.code = None
        self.began = time.monotonic()
        self.seconds = 0
        self.folder = Path(tempfile.mkdtemp())
        for name in COPIED.split():
            (self.folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        if row is not None:
            path = self.folder / row.file
            old, new = (
                "".join(f"{x}\n" for x in lines) for lines in (row.old, row.new)
            )
            path.write_text(path.read_text().replace("\n" + old, "\n" + new))
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            output = os.open(self.folder / "said", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            options = ["-q", "-x", "-k", tests, "--basetemp", str(self.folder / "tmp")]
            code = pytest.main([*options, "test_ddp_train.py", "tests"])
            sys.stdout.flush()
            os._exit(code)

    def has_ended(self):
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self.seconds = round(time.monotonic() - self.began)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
        elif self.seconds > (LIMIT if self.row else 10 * LIMIT):
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        else:
            return False
        self.said = (self.folder / "said").read_text(errors="replace")
        shutil.rmtree(self.folder, ignore_errors=True)
        return True


def run_all(rows):
    """Run the tests of each row with its break. Yields them as they end."""
    waiting = list(rows)
    running = []
    while waiting or running:
        while waiting and len(running) < PARALLEL:
            running.append(Run(waiting[0].tests, waiting.pop(0)))
        for run in list(running):
            if run.has_ended():
                running.remove(run)
                yield run
        time.sleep(0.05)


def applies(row):
    return (ROOT / row.file).read_text().count("\n".join(["", *row.old, ""])) == 1


def see_them_pass(rows):
    """All tests of these rows, on the unbroken program."""
    unbroken = Run(" or ".join(f"({row.tests})" for row in rows))
    while not unbroken.has_ended():
        time.sleep(0.1)
    print(f"the tests on the unbroken program: exit code {unbroken.code}", flush=True)
    if unbroken.code != 0:
        sys.exit(unbroken.said)


def main(words):
    rows = []
    left_out = 0
    for row in read_rows(words):
        if applies(row):
            rows.append(row)
        else:
            left_out += 1
            print(f"no longer applies: {row.name}", flush=True)
    if rows:
        see_them_pass(rows)
    missed = 0
    print("| break | test | result | seconds |\n| --- | --- | --- | --- |", flush=True)
    for run in run_all(rows):
        result = RESULTS.get(run.code, "pytest broke")
        row = run.row
        print(f"| {row.name} | `{row.tests}` | {result} | {run.seconds} |", flush=True)
        if result != "caught":
            missed += 1
            print(run.said[-3000:])
    print(f"{len(rows)} rows, {missed} not caught, {left_out} no longer apply")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
