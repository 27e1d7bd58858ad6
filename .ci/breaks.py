"""Test the tests: break the program in one place, and see the test fail that should.

    make test-the-tests                  all rows
    make test-the-tests ARGS="clip"      the rows that have this word in their name

The rows are in breaks.txt. Each one has three parts:

    the name of the break | file | the test that must fail
    - lines of the file, which must be there exactly once
    + lines to put in their place (none: delete them)

First all these tests must pass on the unbroken program. A row that no longer applies,
and a test that does not end, are errors, and do not count as caught.
"""

import concurrent.futures
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
COPIED = ["ddp_train.py", "test_ddp_train.py", "run_single.sh", "run_multi_node.sh"]
COPIED += ["README.md", "Makefile", ".pytest.ini", ".ci"]
LIMIT = 400  # seconds for one row
WAIT = 100  # seconds for one process in a test: if it hangs, the test fails


@dataclass
class Row:
    name: str
    file: str
    test: str
    old: list = field(default_factory=list)
    new: list = field(default_factory=list)


def read_rows():
    rows = []
    for line in (HERE / ".ci/breaks.txt").read_text().splitlines():
        if line.startswith("- "):
            rows[-1].old.append(line[2:])
        elif line.startswith("+ "):
            rows[-1].new.append(line[2:])
        elif line.strip() and not line.startswith("#"):
            name, file, test = [word.strip() for word in line.split("|")]
            rows.append(Row(name, file, test))
    return rows


def run_tests(folder, tests, *options, limit=LIMIT):
    """(result, output); result: passed, failed, skipped, no such test, too slow."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-k", tests]
    command += [*options, "test_ddp_train.py", ".ci"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "DEADLINE": str(WAIT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return "too slow", output
    last_line = output.strip().splitlines()[-1]
    if process.returncode == 5:
        return "no such test", output
    if process.returncode == 0 and " passed" not in last_line:
        return "skipped", output
    words = {0: "passed", 1: "failed"}
    return words.get(process.returncode, "pytest broke"), output


def copy_project(folder):
    for name in COPIED:
        if (HERE / name).is_dir():
            shutil.copytree(HERE / name, Path(folder, name))
        else:
            shutil.copy(HERE / name, folder)


def run_unbroken(rows):
    """(result, output) of the tests of all rows."""
    tests = " or ".join(f"({row.test})" for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        copy_project(folder)
        return run_tests(folder, tests, "-n", "4", limit=5 * LIMIT)


def run_broken(row):
    """(result, output, seconds) of one row."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy_project(folder)
        path = Path(folder, row.file)
        text = path.read_text()
        old = "\n".join(row.old)
        if text.count(old) != 1:
            return f"applies {text.count(old)} times", old, 0
        path.write_text(text.replace(old, "\n".join(row.new)))
        result, output = run_tests(folder, row.test, "-x")
    if result == "failed":
        result = "caught"
    if result == "passed":
        result = "SURVIVED"
    return result, output, round(time.monotonic() - begin)


def main(words):
    rows = read_rows()
    if words:
        rows = [row for row in rows if any(word in row.name for word in words)]
    began = time.monotonic()
    result, output = run_unbroken(rows)
    seconds = round(time.monotonic() - began)
    print(f"the tests on the unbroken program: {result}, {seconds} s")
    if result not in ("passed", "skipped"):
        print(output)
        return 1
    errors = []
    print("| break | test | result | seconds |\n| --- | --- | --- | --- |", flush=True)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for row, done in zip(rows, pool.map(run_broken, rows), strict=True):
            result, output, seconds = done
            print(f"| {row.name} | `{row.test}` | {result} | {seconds} |", flush=True)
            if result not in ("caught", "skipped"):
                errors.append(f"{row.name}: {result}\n{output[-2000:]}")
    seconds = round(time.monotonic() - began)
    print(f"{len(rows)} rows in {seconds} s, {len(errors)} errors")
    print("\n\n".join(errors))
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
