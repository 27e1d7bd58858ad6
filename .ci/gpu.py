"""Run all that needs a GPU, and print a table for the README: see test_gpu.py.

make test-gpu                              every check, one after the other
make test-gpu ARGS="-k resume"             some of them: the options are pytest's
DRY_RUN=1 make test-gpu                    only what it would do
CHECKS_ON_CPU=1 make test-gpu              try the checks themselves, without a GPU

A check that fails does not stop the rest. The exit code is 1 if one has failed.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
DRY_RUN = bool(os.environ.get("DRY_RUN"))


class Table:
    """A plugin of pytest: a row for each check."""

    def __init__(self):
        self.rows = []

    def pytest_collection_finish(self, session):
        import test_gpu

        if not DRY_RUN:
            return
        for item in session.items:
            what = item.function
            does = what.__doc__.strip().splitlines()[0]
            needs = f"needs {what.gpus}, at most {what.limit} s"
            reason = test_gpu.why_not(what)
            self.rows.append((name_of(item.nodeid), reason or "would run", needs, does))

    def pytest_runtest_logreport(self, report):
        skipped = report.when == "setup" and report.outcome != "passed"
        if report.when != "call" and not skipped:
            return
        notes = [str(value) for name, value in report.user_properties if name == "seen"]
        result = report.outcome
        if report.skipped:
            notes = [report.longrepr[2].removeprefix("Skipped: ")]
        if report.failed:
            result = "**failed**"
            notes.append(last_line(report.longreprtext))
        seconds = f"{report.duration:.0f}"
        self.rows.append((name_of(report.nodeid), result, seconds, "; ".join(notes)))

    def print(self):
        print(f"\n| {facts()} | | | |\n| --- | --- | --- | --- |")
        for row in self.rows:
            print("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |")


def name_of(nodeid):
    """.ci/test_gpu.py::test_train[bf16] -> train [bf16]"""
    name = nodeid.partition("::test_")[2]
    return name.replace("[", " [").replace("_", " ")


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.startswith("E ")]
    return (lines or text.strip().splitlines() or ["?"])[0][:150]


def facts():
    """GPU, driver, torch, NCCL, day."""
    day = time.strftime("%Y-%m-%d")
    if not torch.cuda.is_available():
        return f"no GPU, torch {torch.__version__}, {day}"
    found = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    driver = "?"
    if shutil.which("nvidia-smi"):
        command = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
        driver = subprocess.check_output(command.split(), text=True).split()[0]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    software = f"driver {driver}, torch {torch.__version__}, NCCL {nccl}"
    return f"{found}, {software}, {day}"


def main(argv):
    table = Table()
    # -rN: the table says what pytest's own summary would say.
    words = ["-v", "-rN", f"--rootdir={HERE.parent}"]
    words += ["-c", str(HERE.parent / ".pytest.ini"), str(HERE / "test_gpu.py"), *argv]
    if DRY_RUN:
        words += ["--collect-only", "-qq"]
    code = pytest.main(words, plugins=[table])
    table.print()
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
