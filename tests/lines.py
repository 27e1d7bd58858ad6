"""Is every line of ddp_train.py needed? Take each one away: a test must notice.

    make test-lines                       all of them: about an hour on two cores
    make test-lines ARGS="--sample 20"    twenty at random
    make test-lines ARGS="--line 250"     those that begin in this line

Each statement of THE RUN, PIECES, OPTIONS and ENDINGS becomes `pass`, and each
condition becomes True, and False, one at a time. Then the tests that reach this line
run, the fastest first, until one fails. Definitions, imports, docstrings and MODEL are
left out. What survived is listed at the end: either the line goes, or a test comes.
"""

import argparse
import ast
import collections
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("DEADLINE", "60")  # seconds: a change may make the program hang

# At the end: the spawned workers of a changed program import this file, too.
sys.path.append(str(Path(__file__).resolve().parent.parent))
import pytest

import ddp_train
import harness
from harness import ROOT, SCRIPT, fork_ranks

TESTS = ROOT / "test_ddp_train.py"
# {beginning of a statement: why no test on a CPU can notice that it is missing}
GPU = "a GPU, see tests/test_gpu.py: "
EXCEPTIONS = {
    "world_size > 1 -> True": "speed: one process needs no DDP (make bench)",
    'device.type == "cuda" -> ': GPU + "test_train",
    'means["gpu_gib"]': GPU + "test_train",
    'device.type == "cpu" -> True': GPU + "test_train",
    "dist.get_world_size() > 1 -> True": GPU + "test_batch_norm, without torchrun",
    "min(versions) < max(versions) -> True": "memory: to send a file takes several"
    " times its size, docs/launch.md has the numbers",
    "time.sleep(0.1)": "a race in torch: pytorch issue 56297",
    "os.fsync(": "a power cut",
    "file.flush()": "a power cut",
}
SURVIVED = "SURVIVED"
SHARED = {"layouts", "plain", "untouched"}  # the first test that needs them makes them
UNTRACED = "full_disk|worker|pieces_work"  # these cannot tell what they reach
TRACER = """
import contextlib, os, sys, threading
def trace(frame, event, arg, seen=set()):
    if frame.f_code.co_filename != os.environ["TRACED"]:
        return None
    mark = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0], frame.f_lineno
    if mark not in seen:
        seen.add(mark)
        with contextlib.suppress(OSError), open(os.environ["TRACE"], "a") as file:
            file.write(f"{mark[0]}\\t{mark[1]}\\n")
    return trace
if "TRACE" in os.environ:
    threading.settrace(trace)
    sys.settrace(trace)
"""


# ---- What is taken away --------------------------------------------------------------
def is_counted(node):
    """Not a definition, an import or a docstring."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
        return False
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not is_text and not isinstance(node, ast.Pass)


def find_changes(text):
    """[(first line, last line, what is changed, the changed text)]"""
    first = text[: text.index("# ---- THE RUN")].count("\n")
    changes = []
    for node in ast.walk(ast.parse(text)):
        if getattr(node, "lineno", 0) <= first:
            continue
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            for value in ("True", "False"):
                changes.append(change(text, node, node.test, value))
        if is_counted(node) and not isinstance(node, (ast.If, ast.While)):
            changes.append(change(text, node, node, "pass"))
    return sorted(changes)


def change(text, statement, node, new):
    lines = [line.encode() for line in text.splitlines(keepends=True)]  # ast: bytes
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = text.encode()
    old = " ".join(whole[begin:end].decode().split())
    changed = whole[:begin] + new.encode() + whole[end:]
    last = statement.lineno if hasattr(statement, "body") else statement.end_lineno
    return statement.lineno, last, f"{old[:60]} -> {new}", changed.decode()


# ---- Which tests reach which line ----------------------------------------------------
class Durations:
    """A plugin of pytest: {test: seconds}, and {test: the runs that it shares}."""

    def __init__(self):
        self.seconds, self.shared = {}, {}

    def pytest_collection_modifyitems(self, items):
        for item in items:
            self.shared[item.nodeid] = SHARED & set(item.fixturenames)

    def pytest_runtest_logreport(self, report):
        so_far = self.seconds.get(report.nodeid, 0)
        self.seconds[report.nodeid] = so_far + report.duration


def run_pytest(folder, text, *words, plugins=()):
    """pytest with this text in place of ddp_train.py, also in what the tests start."""
    script = folder / "ddp_train.py"
    script.write_text(text)
    sys.path.insert(0, str(folder))
    ddp_train.__file__ = str(script)
    for name in [name for name in vars(ddp_train) if not name.startswith("__")]:
        delattr(ddp_train, name)  # what is taken away must not stay from before
    exec(compile(text, script, "exec"), vars(ddp_train))
    options = ["-x", "-q", "-p", "no:xdist", "--rootdir", ROOT, "--basetemp"]
    options += [folder / "nested", "--import-mode=append"]  # workers import it, too
    words = [*options, "-o", f"pythonpath={folder} {ROOT}/tests", *words]
    return int(pytest.main([str(word) for word in words], plugins=list(plugins)))


def trace_tests(folder):
    """{line: [tests that reach it, the fastest first]}"""

    def run():
        signal.alarm(0)  # it takes longer than a test may
        (folder / "sitecustomize.py").write_text(TRACER)
        os.environ["TRACED"] = str(folder / "ddp_train.py")
        os.environ["TRACE"] = str(folder / "trace")
        exec(TRACER, {})
        durations = Durations()
        code = run_pytest(folder, SCRIPT.read_text(), TESTS, plugins=[durations])
        return code, durations.seconds, durations.shared

    [tracing] = fork_ranks(1, run)
    tracing.process.join()
    code, seconds, shared = tracing.value
    if code != 0:
        sys.exit(
            f"{tracing.text[-3000:]}\nit fails without any change: mend this first"
        )
    reached = {}
    for row in set((folder / "trace").read_text().splitlines()):
        test, line = row.split("\t")
        reached.setdefault(int(line), set()).add(test)
    for test in seconds:
        seconds[test] += 10 * len(shared[test])  # alone, it must make them
    for line, tests in reached.items():
        runs = set().union(*[shared.get(test, set()) for test in tests])
        tests |= {test for test in shared if shared[test] & runs}
        if "" in tests:  # at the import: any test may notice it
            tests |= set(seconds)
        reached[line] = sorted(tests & set(seconds), key=seconds.get)
    untraced = [test for test in seconds if re.search(UNTRACED, test)]
    return collections.defaultdict(list, reached), untraced


# ---- Run -----------------------------------------------------------------------------
def start(change, reached, untraced):
    first, last, _, text = change
    tests = sum([reached[line] for line in range(first, last + 1)], []) + untraced
    tests = list(dict.fromkeys(tests))
    folder = Path(tempfile.mkdtemp())

    def run():
        harness.STARTED.clear()  # a test ends what it has started
        signal.alarm(0)  # all tests together take longer than one may
        for name in list(os.environ):
            if name.startswith("PYTEST_"):
                del os.environ[name]
        sys.exit(run_pytest(folder, text, *tests) if tests else 0)

    [process] = fork_ranks(1, run)
    return process


def verdict(process):
    """Which test has noticed it, or why none has."""
    for line in process.text.splitlines():
        if line.startswith(("FAILED ", "ERROR ")) and process.code == 1:
            return line.split(" - ")[0]
    return SURVIVED if process.code in (0, 5) else "noticed: the tests cannot run"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, help="this many at random")
    parser.add_argument("--line", type=int, action="append", help="only these lines")
    parser.add_argument("--jobs", type=int, default=2 * os.cpu_count())
    args = parser.parse_args()
    tempfile.tempdir = tempfile.mkdtemp()
    os.chdir(ROOT)
    changes = find_changes(SCRIPT.read_text())
    if args.line:
        changes = [change for change in changes if change[0] in args.line]
    if args.sample:
        changes = sorted(random.sample(changes, min(args.sample, len(changes))))
    reached, untraced = trace_tests(Path(tempfile.mkdtemp()))
    waiting, running, survivors = list(changes), {}, []
    while waiting or running:
        if waiting and len(running) < args.jobs:
            change = waiting.pop(0)
            running[start(change, reached, untraced)] = change, time.monotonic()
        for process in [process for process in running if process.code is not None]:
            (line, _, what, _), began = running.pop(process)
            harness.STARTED.remove(process)
            found = verdict(process)
            if found == SURVIVED:
                survivors.append((line, what))
            number = f"{len(changes) - len(waiting) - len(running)}/{len(changes)}"
            seconds = f"{time.monotonic() - began:.0f} s"
            print(f"{number}  line {line}: {what}: {found} ({seconds})", flush=True)
        time.sleep(0.05)
    for what in EXCEPTIONS:
        if not any(
            text.startswith(what) for _, _, text, _ in find_changes(SCRIPT.read_text())
        ):
            print(f"an exception that is not in the program: {what}")
    print(f"{len(survivors)} of {len(changes)} survived:")
    for line, what in sorted(survivors):
        why = [EXCEPTIONS[start] for start in EXCEPTIONS if what.startswith(start)]
        print(f"  line {line}: {what}: {why or 'NOT EXPECTED'}")
    sys.exit(any(not what.startswith(tuple(EXCEPTIONS)) for _, what in survivors))


if __name__ == "__main__":
    main()
