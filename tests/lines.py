"""Is every line of ddp_train.py needed, and every value? Change one: a test must fail.

    make test-lines                                each statement and condition
    make test-lines ARGS=--values                  each value, too
    make test-lines ARGS="--values --sample 20"    twenty at random
    make test-lines ARGS="--values --line 250"     those on this line
    make test-lines ARGS="--log FILE --trace FILE"
        The next run skips what is in the log, and need not find out again which tests
        reach which line.

Each statement from THE RUN on becomes `pass`, and each condition True, and False. With
--values, see find_values(). This includes MODEL and DATA: a wrong number there trains a
wrong model. For each change the tests that reach its line run until one fails: first
those that are fast or have noticed many changes. Survivors are listed at the end. For
each, remove the line, add a test, or give the reason in EXCEPTIONS.
"""

import argparse
import ast
import collections
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import NamedTuple

# At the end: the spawned workers of a changed program import this file, too.
sys.path.append(str(Path(__file__).resolve().parent.parent))
import pytest

import ddp_train
import harness
from harness import ROOT, SCRIPT, fork_ranks

TESTS = ROOT / "test_ddp_train.py"
GPU = "a GPU, see tests/test_gpu.py: "
MEMORY = "memory: to send a file takes several times its size, see docs/launch.md"
# {part of a change: why no test on a CPU can notice it, or needs to}
EXCEPTIONS = {
    "if {world_size > 1 -> True": "speed: one process needs no DDP (make bench)",
    "if dist.get_world_size() {> -> >=} 1:": "speed: nor does it need a broadcast",
    'if {device.type == "cuda" -> ': GPU + "test_train",
    "gpu_gib": GPU + "test_train",
    '{"pin_memory"': "speed, with a GPU",
    '{"activation"': "a choice of the demo's model",
    'backend = "gloo" if {device.type == "cpu" -> True': GPU + "test_train",
    "if {dist.get_world_size() > 1 -> True": GPU + "test_batch_norm, without torchrun",
    "min(steps) < max(steps) -> True": MEMORY,
    "min(steps) {< -> <=} max(steps)": MEMORY,
    "{gradient_as_bucket_view": "memory",
    "{is_causal": "speed",
    "{fused": "speed",
    "val_samples, {**loading": "speed",
    "{time.sleep(0.1)": "a race in torch: pytorch issue 56297",
    "time.sleep({0.1": "longer is safer, and slower",
    "{os.fsync(": "a power loss",
    "{file.flush()": "a power loss",
    "max({0 -> 1}, len(data) - 1)": "a file of one byte has no sample either",
    'dist.new_group({backend="gloo"': "a GPU: on a CPU it is gloo",
    "days={365": "long enough",
    'backend="gloo", {timeout=': "torch's half an hour is too long for a test",
    "{dtype=torch.float64 -> nothing}) # one row": "float32 is exact enough, too",
    "{strict=True": "both are always of the same length",
    "{weights_only=True": "torch's default since 2.6",
    "{non_blocking=True": "speed, with a GPU",
    "os._exit({1": "any code but 0",
    "None, -{1": "below every step",
    "{0o666": "nobody executes it",
    '{1 -> 2}, f"rank 0 waits': "a terminal shows both outputs",
}
SURVIVED = "SURVIVED"
SHARED = {"layouts", "plain", "untouched"}  # the first test that needs them makes them
UNTRACED = "full_disk|cannot_be_written|worker|pieces_work"  # these reach unknown lines
TEXT_TESTS = "not imports_at_the_head"  # it only reads the program
TRACER = """
import contextlib, os, sys, threading
traced = os.environ.get("TRACED")
def trace(frame, event, arg, seen=set()):
    if frame.f_code.co_filename != traced:
        return None
    mark = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0], frame.f_lineno
    if mark not in seen:
        seen.add(mark)
        with contextlib.suppress(OSError), open(os.environ["TRACE"], "a") as file:
            file.write(f"{mark[0]}\\t{mark[1]}\\n")
    return trace
if traced:
    threading.settrace(trace)
    sys.settrace(trace)
"""


# ---- What is changed -----------------------------------------------------------------
BOUNDARY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
OPPOSITE |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
OPPOSITE |= {"and": "or", "or": "and"}
NO_ELEMENT, NO_ENTRY = "*()", "**{}"  # of a list, and of a dict or a call


class Change(NamedTuple):
    kind: str
    line: int
    text: str  # of the changed program
    lines: range  # tests that reach one of these lines may notice it


def find_statements(node):
    """(kind, begin, end, new text)"""
    others = ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "condition", node.test.begin, node.test.end, "True"
        yield "condition", node.test.begin, node.test.end, "False"
    elif isinstance(node, ast.stmt) and not isinstance(node, others):
        if not is_docstring:
            yield "statement", node.begin, node.end, "pass"


def find_values(node, text):
    if isinstance(node, ast.Constant):
        yield from find_constants(node)
    if isinstance(node, ast.Compare):
        yield from find_operators("comparison", [node.left, *node.comparators], text)
    if isinstance(node, ast.BoolOp):
        yield from find_operators("and/or", node.values, text)
    if isinstance(node, ast.keyword) and node.arg not in ("default", "help", "metavar"):
        yield "keyword", node.begin, node.end, NO_ENTRY
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if is_name(key):
                yield "name in a list", key.begin, value.end, NO_ENTRY
    if isinstance(node.parent, (ast.List, ast.Tuple, ast.Set)) and is_name(node):
        yield "name in a list", node.begin, node.end, NO_ELEMENT


def find_constants(node):
    """Each number; each default of a parameter or of an option, which may be a text."""
    is_option = getattr(node.parent, "arg", None) == "default"
    is_default = is_option or isinstance(node.parent, ast.arguments)
    kind = "default" if is_default else "number"
    if type(node.value) is int:
        yield kind, node.begin, node.end, str(node.value + 1)
    if type(node.value) is float:
        larger = float(f"{10 * node.value:g}") or 1.0
        yield kind, node.begin, node.end, str(larger)
    if is_text(node) and is_default:
        yield kind, node.begin, node.end, repr(f"{node.value}x")


def find_operators(kind, operands, text):
    """Between neighbors. A condition that is a comparison becomes True and False."""
    node = operands[0].parent
    is_condition = getattr(node.parent, "test", None) is node
    for left, right in itertools.pairwise(operands):
        old = text[left.end : right.begin].strip(" ()\n")
        begin = text.index(old, left.end)
        if old in BOUNDARY:
            yield kind, begin, begin + len(old), BOUNDARY[old]
        if kind == "and/or" or not is_condition:
            yield kind, begin, begin + len(old), OPPOSITE[old]


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_name(node):
    """Such as "seed", errno.ENOLCK or *MODEL_OPTIONS, and not what is assigned to."""
    if is_text(node):
        return " " not in node.value
    is_read = isinstance(getattr(node, "ctx", None), ast.Load)
    return is_read and isinstance(node, (ast.Attribute, ast.Starred))


def walk(parent, starts):
    """All nodes, with places in the text: those in f-strings are wrong before 3.12."""
    for node in ast.iter_child_nodes(parent):
        node.parent = parent
        if hasattr(node, "lineno"):
            node.begin = starts[node.lineno - 1] + node.col_offset
            node.end = starts[node.end_lineno - 1] + node.end_col_offset
        if not isinstance(node, ast.JoinedStr):
            yield node
            yield from walk(node, starts)


def lines_of(node):
    """Of the whole statement."""
    while not isinstance(node, ast.stmt):
        node = node.parent
    return range(node.lineno, node.end_lineno + 1)


def find_changes():
    """{what is changed: Change}"""
    changes = {}

    def add(kind, begin, end, new, lines):
        old = " ".join(text[begin:end].split())[:60]
        shown = "nothing" if new in ("", NO_ELEMENT, NO_ENTRY) else new
        before = text[:begin].rpartition("\n")[2]
        after = text[end:].partition("\n")[0]
        what = " ".join(f"{before}{{{old} -> {shown}}}{after}".split())
        while what in changes:
            what += " again"
        line = text[:begin].count("\n") + 1
        changed = text[:begin] + new + text[end:]
        changes[what] = Change(kind, line, changed, lines)

    text = SCRIPT.read_text()
    assert text.isascii()  # ast counts bytes
    lengths = map(len, text.splitlines(keepends=True))
    starts = list(itertools.accumulate(lengths, initial=0))
    nodes = [node for node in walk(ast.parse(text), starts) if hasattr(node, "begin")]
    for node in nodes:
        found = []
        if node.begin > text.index("# ---- MODEL"):
            found += find_values(node, text)
        if node.begin > text.index("# ---- THE RUN"):
            found += find_statements(node)
        for kind, begin, end, new in found:
            add(kind, begin, end, new, lines_of(node))
    return changes


# ---- Which tests reach which line ----------------------------------------------------
class Tests:
    """A plugin of pytest: it notes {test: seconds}, and {test: the runs it shares}.

    usual: how many seconds each test takes without a change.
    """

    def __init__(self, usual):
        self.usual, self.seconds, self.shared = usual, {}, {}

    def pytest_collection_modifyitems(self, items):
        for item in items:
            self.shared[item.nodeid] = SHARED & set(item.fixturenames)

    def pytest_runtest_setup(self, item):
        """A change may make the program hang. The shorter a test, the less it waits."""
        if item.nodeid in self.usual:
            harness.DEADLINE = int(15 + 5 * self.usual[item.nodeid])
            signal.alarm(3 * harness.DEADLINE)

    def pytest_runtest_logreport(self, report):
        so_far = self.seconds.get(report.nodeid, 0)
        self.seconds[report.nodeid] = so_far + report.duration


def run_pytest(folder, text, tests, *words):
    """pytest with this text in place of ddp_train.py, also in what the tests start."""
    script = folder / SCRIPT.name
    script.write_text(text)
    sys.path.insert(0, str(folder))
    ddp_train.__file__ = str(script)
    for name in [name for name in vars(ddp_train) if not name.startswith("__")]:
        delattr(ddp_train, name)  # what is taken away must not stay from before
    exec(compile(text, script, "exec"), vars(ddp_train))
    sys.dont_write_bytecode = False  # compile the tests once, see sys.pycache_prefix
    options = ["-x", "-q", "-p", "no:xdist", "--rootdir", ROOT, "--basetemp"]
    options += [folder / "nested", "--import-mode=append"]  # workers import it, too
    words = [*options, "-o", f"pythonpath={folder} {ROOT}/tests", *words]
    return int(pytest.main([str(word) for word in words], plugins=[tests]))


def trace_tests():
    """{"seconds": {test: seconds}, "reached": {line: [tests]}}"""
    folder = Path(tempfile.mkdtemp())

    def run():
        signal.alarm(0)  # it takes longer than a test may
        (folder / "sitecustomize.py").write_text(TRACER)
        os.environ["TRACED"] = str(folder / SCRIPT.name)
        os.environ["TRACE"] = str(folder / "trace")
        exec(TRACER, {})
        tests = Tests({})
        text = SCRIPT.read_text()
        code = run_pytest(folder, text, tests, "-k", TEXT_TESTS, TESTS)
        return code, tests.seconds, tests.shared

    [tracing] = fork_ranks(1, run)
    tracing.process.join()
    code, seconds, shared = tracing.value
    if code != 0:
        print(tracing.text[-3000:])
        sys.exit("it fails without any change: mend this first")
    reached = collections.defaultdict(set)
    for row in set((folder / "trace").read_text().splitlines()):
        test, line = row.split("\t")
        reached[line].add(test)
    for line, tests in reached.items():
        runs = set().union(*[shared.get(test, set()) for test in tests])
        tests |= {test for test in shared if shared[test] & runs}
        if "" in tests:  # at the import: any test may notice it
            tests |= set(seconds)
        reached[line] = sorted(tests & set(seconds))
    for test in seconds:
        seconds[test] += 10 * len(shared[test])  # alone, it must make them
    return {"seconds": seconds, "reached": reached}


def read_trace(file):
    """From this file, if the program and its tests are still the same."""
    version = zlib.crc32(SCRIPT.read_bytes() + TESTS.read_bytes())
    if file.exists():
        trace = json.loads(file.read_text())
        if trace["version"] == version:
            return trace
    trace = {**trace_tests(), "version": version}
    file.write_text(json.dumps(trace))
    return trace


def tests_for(change, trace, noticed):
    """First those that are fast, or have noticed many changes."""
    seconds = trace["seconds"]
    names = {name for name in seconds if re.search(UNTRACED, name)}
    for line in change.lines:
        names |= set(trace["reached"].get(str(line), []))

    def cost(name):
        return seconds[name] / (1 + noticed[f"FAILED {name}"])

    return sorted(names, key=cost)


# ---- Run -----------------------------------------------------------------------------
def start(change, folder, names, seconds):
    def run():
        if names:
            tests = Tests(seconds)
            sys.exit(run_pytest(folder, change.text, tests, *names))

    harness.STARTED.clear()  # the first test would end these
    [process] = fork_ranks(1, run)
    return process


def verdict(process):
    """Which test has noticed it, or why none has."""
    for line in process.text.splitlines():
        if line.startswith(("FAILED ", "ERROR ")) and process.code == 1:
            return line.split(" - ")[0]
    return SURVIVED if process.code in (0, 5) else "noticed: the tests cannot run"


def run_all(changes, trace, log, jobs):
    """All that are not in the log yet."""
    noticed = collections.Counter(read_log(log).values())
    waiting = [what for what in changes if what not in read_log(log)]
    number, total, running = 0, len(waiting), {}
    while waiting or running:
        if waiting and len(running) < jobs:
            what = waiting.pop(0)
            folder = Path(tempfile.mkdtemp())
            names = tests_for(changes[what], trace, noticed)
            process = start(changes[what], folder, names, trace["seconds"])
            running[process] = what, folder, time.monotonic()
        for process in [process for process in running if process.code is not None]:
            what, folder, began = running.pop(process)
            shutil.rmtree(folder, ignore_errors=True)
            found = verdict(process)
            noticed[found] += 1
            seconds = f"{time.monotonic() - began:.0f} s"
            place = f"line {changes[what].line}"
            row = "\t".join([changes[what].kind, place, what, found, seconds])
            with open(log, "a") as file:
                file.write(f"{row}\n")
            number += 1
            print(f"{number}/{total}  {row}", flush=True)
        time.sleep(0.05)


def read_log(log):
    """{what: the test that has noticed it, or SURVIVED}"""
    log.touch()
    rows = [row.split("\t") for row in log.read_text().splitlines()]
    return {what: found for _, _, what, found, _ in rows}


def report(changes, found):
    """Returns the number of survivors that are not declared."""
    survivors = [what for what in changes if found[what] == SURVIVED]
    all_kinds = collections.Counter(change.kind for change in changes.values())
    kinds = collections.Counter(changes[what].kind for what in survivors)
    for kind, number in all_kinds.items():
        print(f"{kind}: {number} changes, {kinds[kind]} survived")
    unexpected = 0
    for what in survivors:
        why = [EXCEPTIONS[part] for part in EXCEPTIONS if part in what]
        unexpected += not why
        place = f"line {changes[what].line}"
        print(f"  {place}: {changes[what].kind}: {what}: {why or 'NOT EXPECTED'}")
    return unexpected


def main():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--values", action="store_true", help="change values, too")
    add("--sample", type=int, help="only this many, at random")
    add("--line", type=int, action="append", help="only those on this line")
    add("--log", type=Path, help="append results, and skip what is in it")
    add("--trace", type=Path, help="which tests reach which line; made if it is old")
    add("--jobs", type=int, default=2 * os.cpu_count())
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    log = (args.log or folder / "log").absolute()
    trace = (args.trace or folder / "trace").absolute()
    tempfile.tempdir = str(folder)
    sys.pycache_prefix = str(folder)
    os.chdir(ROOT)
    changes = find_changes()
    for part in EXCEPTIONS:
        if not any(part in what for what in changes):
            print(f"an exception that is not in the program: {part}")
    chosen = list(changes)
    if not args.values:
        kinds = "statement", "condition"
        chosen = [what for what in chosen if changes[what].kind in kinds]
    if args.line:
        chosen = [what for what in chosen if changes[what].line in args.line]
    if args.sample:
        chosen = random.sample(chosen, min(args.sample, len(chosen)))
    changes = {what: changes[what] for what in chosen}
    run_all(changes, read_trace(trace), log, args.jobs)
    sys.exit(report(changes, read_log(log)) > 0)


if __name__ == "__main__":
    main()
