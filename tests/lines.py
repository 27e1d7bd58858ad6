"""Is every line of ddp_train.py needed, and every value? Change one: a test must fail.

    make test-lines                                 each statement and condition
    make test-lines ARGS="--only ."                 each value, name and call, too
    make test-lines ARGS="--only 'name, line 25.'"  those of this kind on these lines
    make test-lines ARGS="--only . --part 2/9"      the second of nine parts
    make test-lines ARGS="--keep FOLDER"
        The folder keeps what was found: the next run does the rest.

Each statement from THE RUN on becomes `pass`, and each condition True, and False. More
is in find_values() and MISTAKES. That includes MODEL and DATA: a wrong number there
trains a wrong model. For each change the tests run until one fails: first those that
are fast, or have noticed changes near to it. Survivors are listed at the end. For each,
remove the line, add a test, or give the reason in EXCEPTIONS.

A test that fails for another reason must not count. So the tests also run without a
change, at first and at the end, as many side by side. And what was noticed only by a
time limit or by a strange exit runs again, alone: what that finds is what counts.
"""

import argparse
import ast
import collections
import functools
import io
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tokenize
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
# {part of one change: why no test on a CPU can notice it, or needs to}
# Without a "{" it is a whole line.
EXCEPTIONS = {
    "if {world_size > 1 -> True": "speed: one process needs no DDP (make bench)",
    "if dist.get_world_size() {> -> >=} 1:": "speed: nor does it need a broadcast",
    '{{"pin_memory"': "speed, with a GPU",
    "{activation": "a choice of the demo's model",
    '"gloo" if {device == "cpu" -> True': GPU + "test_train",
    "if {dist.get_world_size() > 1 -> True": GPU + "test_batch_norm, without torchrun",
    "{min(steps) < max(steps) -> True": MEMORY,
    "min(steps) {< -> <=} max(steps)": MEMORY,
    "{gradient_as_bucket_view": "memory",
    "{is_causal": "speed",
    "{fused": "speed",
    "{drop_last=True -> nothing": "the loop ends before it",
    "{time.sleep(0.1)": "a race in torch: pytorch issue 56297",
    "time.sleep({0.1": "longer is safer, and slower",
    "{time.sleep(1.1)": "a race: torchrun may look in between, and then sees it right",
    "time.sleep({1.1": "longer is safer, and slower",
    "{os.fsync(": "a power loss",
    "{file.flush()": "a power loss",
    "signal.alarm({30": "longer only waits longer",
    "return {stopped_by -> saving}": "they are the same there",
    "DistributedDataParallel({model -> wrapped}": "they are the same there",
    "check_together(results, {model -> wrapped})": "they have the same weights",
    "sums.get(name, 0) {+ -> -}": "the count changes its sign, too",
    "total.get(name, 0) {+ -> -}": "the count changes its sign, too",
    "if total else {1": "nothing is divided by it",
    "[weight{.detach()": "memory: tolist() does not need it",
    "{float(row[name])": "torch.tensor() takes one-element tensors, too",
    ', {float(results[-1]["grad_norm"])': "a GPU: a tensor would come with its device",
    'seed_all({"step" -> "epoch"': "any word that is not one of the others",
    'seed_all({"step" -> "last_step"': "any word that is not one of the others",
    "{weights_only=True -> nothing": "torch's default since 2.6",
    "{non_blocking=True": "speed, with a GPU",
    "os._exit({1 -> 2}) # the rank": "any code but 0",
    "None, -{1": "below every step",
    "{0o666": "nobody executes it",
}
# Names that are easily confused. Each becomes its neighbors, if its function has them.
# So do attributes of one object, and keys.
ALIKE = """rank world_size, start rank num_replicas, n used done global_batch, x y,
n held_out, epoch step last_step, model wrapped, loader val_loader,
train_set val_set, inputs targets, layers heads dim seq_len, batch_size accum epochs,
log_every save_every eval_every, saving stopped_by, began seconds,
progress warmup factor, loss loss_sum, sums total, row rows, peak peaks, before now,
index gpus, path beside, min max"""
DROPPED = "float detach contiguous".split()
# {right lines: a classic mistake that is none of these changes}
MISTAKES = {
    "range(rank, len(val_set), world_size)": "DistributedSampler(val_set)",  # padded
    "DataLoader(val_set, ": "DataLoader(val_set, drop_last=True, ",
    "in all_gather({name: float(value) for name, value in sums.items()})": "in [sums]",
    "total.get(name, 0) + value": "total.get(name, 0) + max(0, value)",
    'saved["epoch"], saved["done"]': 'saved["epoch"], 0',
    "part.load_state_dict(saved[name]": (
        'part.load_state_dict(saved[name], *[False] * (name == "model")'  # strict
    ),
    "weights_only=True": "weights_only=False",
    "block(x, mask, is_causal=True)": "block(x)",
    "= peak * factor": "= peaks[0] * factor",
    "wrapped.parameters(), ": 'optimizer.param_groups[0]["params"], ',
    "    if args.compile:": "    if args.compile and world_size == 1:",
    "if not all(abs(x - of_ranks[0]) <=": "if any(abs(x - of_ranks[0]) >",  # NaN
    "= global_batch / seconds": "= global_batch / world_size / seconds",
    "= stop.requested()": "= step % args.log_every == 0 and stop.requested()",
    "zlib.crc32(data.numpy())": "zlib.crc32(data[:65536].numpy())",
    'os.environ.get("LOCAL_RANK", 0)': 'os.environ.get("RANK", 0)',
    "suppress(OSError)": "suppress(BrokenPipeError)",
    'getattr(type(batch), "to"': 'getattr(batch, "to"',
    "and dist.get_world_size() > 1\n": (
        "and isinstance(wrapped, DistributedDataParallel)\n"
    ),
}
SURVIVED = "SURVIVED"
NOT_SURE = "not sure"


# ---- What is changed -----------------------------------------------------------------
# {operator: what takes its place}, by kind. Each comparison also moves its boundary.
COMPARISONS = {"<": "<=,>=", "<=": "<,>", ">": ">=,<=", ">=": ">,<", "==": "!="}
COMPARISONS |= {"!=": "==", "is": "is not", "in": "not in", "not in": "in"}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "%", "%": "//", "|": "&"}
OPERATORS |= {"+=": "-=", "-=": "+=", "|=": "&=", "and": "or", "or": "and"}
NO_ELEMENT = "*()"  # of a list
NO_ENTRY = "**{}"  # of a dict or a call


class Change(NamedTuple):
    kind: str
    line: int
    text: str  # of the changed program


def find_in_tree(node, text):
    """(kind, begin, end, new text) of what becomes of this node."""
    others = ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass
    is_docstring = isinstance(node, ast.Expr) and is_text(node.value)
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "condition", node.test.begin, node.test.end, "True"
        yield "condition", node.test.begin, node.test.end, "False"
    elif isinstance(node, ast.stmt) and not isinstance(node, others):
        if not is_docstring:
            yield "statement", node.begin, node.end, "pass"
    if isinstance(node, ast.keyword) and node.arg not in ("default", "help", "metavar"):
        yield "keyword", node.begin, node.end, NO_ENTRY
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if is_name(key):
                yield "name in a list", key.begin, value.end, NO_ENTRY
    if isinstance(node.parent, (ast.List, ast.Tuple, ast.Set)) and is_name(node):
        yield "name in a list", node.begin, node.end, NO_ELEMENT
    if is_text(node) and isinstance(node.parent, (ast.keyword, ast.arguments)):
        if getattr(node.parent, "arg", "default") == "default":
            yield "default", node.begin, node.end, repr(f"{node.value}x")
    if isinstance(node, ast.With) and node.items[0].optional_vars is None:
        yield "block", node.begin, node.items[0].context_expr.end, "if True"
    if isinstance(node, ast.Call):
        # x.float() becomes x, and max(x, y) becomes x, and y.
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if isinstance(node.func, ast.Attribute) and name in DROPPED:
            yield "call", node.func.value.end, node.end, ""
        if isinstance(node.func, ast.Name) and name in [*DROPPED, "min", "max"]:
            for argument in node.args:
                new = f"({text[argument.begin : argument.end]})"
                yield "call", node.begin, node.end, new


def find_in_tokens(text, starts):
    """The same of each number, operator and name."""
    words = {word for group in ALIKE.split(",") for word in group.split()}
    function = ""
    previous = ""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for token, following in itertools.pairwise(tokens):
        begin = starts[token.start[0] - 1] + token.start[1]
        end = begin + len(token.string)
        old = token.string
        if previous == "def":
            function = text[begin:].partition("\n\n\n")[0]
        if token.type == tokenize.NUMBER:
            value = ast.literal_eval(old)
            larger = value + 1 if isinstance(value, int) else 10 * value or 1.0
            yield "number", begin, end, f"{larger:g}"
        if old in COMPARISONS and previous != "for":
            for new in COMPARISONS[old].split(","):
                yield "comparison", begin, end, new
        if old in OPERATORS:
            yield "operator", begin, end, OPERATORS[old]
        name = old.strip("\"'")
        if name in words and following.string != "=":
            is_local = previous != "." and name not in ("min", "max")
            for new in neighbors(name):
                if re.search(rf"\b{new}\b", function if is_local else text):
                    yield "name", begin, end, old.replace(name, new)
        previous = old


def neighbors(name):
    """Those next to it in ALIKE."""
    for group in ALIKE.split(","):
        for pair in itertools.pairwise(group.split()):
            if name in pair:
                yield pair[1 - pair.index(name)]


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_name(node):
    """Such as "seed", signal.SIGINT or *names, and not what is assigned to."""
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


def find_changes():
    """{what is changed: Change}"""
    text = SCRIPT.read_text()
    assert text.isascii()  # ast counts bytes
    lengths = map(len, text.splitlines(keepends=True))
    starts = list(itertools.accumulate(lengths, initial=0))
    found = list(find_in_tokens(text, starts))
    for node in list(walk(ast.parse(text), starts)):
        found += find_in_tree(node, text)
    for right, wrong in MISTAKES.items():
        assert text.count(right) == 1, f"not in the program, or not once: {right}"
        begin = text.index(right)
        found.append(("mistake", begin, begin + len(right), wrong))
    changes = {}
    for kind, begin, end, new in found:
        is_code = kind in ("statement", "condition")
        changed = text[:begin] + new + text[end:]
        if begin < text.index("# ---- THE RUN" if is_code else "# ---- MODEL"):
            continue
        if kind in ("comparison", "operator", "name") and not is_valid(changed):
            continue  # such as the "in" of a loop
        old = " ".join(text[begin:end].split())[:60]
        shown = "nothing" if new in ("", NO_ELEMENT, NO_ENTRY) else new.strip()
        before = text[:begin].rpartition("\n")[2]
        after = text[end:].partition("\n")[0]
        what = " ".join(f"{before}{{{old} -> {shown}}}{after}".split())
        while what in changes:
            what += " again"
        changes[what] = Change(kind, text[:begin].count("\n") + 1, changed)
    for part in EXCEPTIONS:
        number = sum(part in what for what in changes)
        if number == 0 or (number > 1 and "{" in part):
            sys.exit(f"an exception for {number} changes, and not for one: {part}")
    return changes


def is_valid(text):
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


# ---- Run -----------------------------------------------------------------------------
class Tests:
    """A plugin of pytest: it picks a part of the tests, and notes {test: seconds}.

    usual: how many seconds each test takes without a change.
    """

    def __init__(self, usual, part=0, parts=1):
        self.usual = usual
        self.part = part
        self.parts = parts
        self.seconds = collections.Counter()

    def pytest_collection_modifyitems(self, items):
        items[:] = items[self.part :: self.parts]

    def pytest_runtest_setup(self, item):
        """A change may make the program hang. The shorter a test, the less it waits."""
        if item.nodeid in self.usual:
            harness.DEADLINE = int(20 + 5 * self.usual[item.nodeid])
            signal.alarm(3 * harness.DEADLINE)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration


def run_pytest(folder, text, tests, words):
    """pytest with this text in place of ddp_train.py, also in what the tests start."""
    signal.alarm(0)  # each test has its own
    script = folder / SCRIPT.name
    script.write_text(text)
    sys.path.insert(0, str(folder))
    ddp_train.__file__ = str(script)
    for name in [name for name in vars(ddp_train) if not name.startswith("__")]:
        delattr(ddp_train, name)  # what is taken away must not stay from before
    try:
        exec(compile(text, script, "exec"), vars(ddp_train))
    except Exception as error:
        print(f"FAILED at the import - {error!r}", flush=True)
        sys.exit(1)
    sys.dont_write_bytecode = False  # compile the tests once, see sys.pycache_prefix
    options = ["-x", "-q", "-p", "no:xdist", "--rootdir", ROOT, "--basetemp"]
    options += [folder / "nested", "--import-mode=append"]  # workers import it, too
    words = [*options, "-o", f"pythonpath={folder} {ROOT}/tests", *words]
    code = pytest.main([str(word) for word in words], plugins=[tests])
    if code != 0:
        sys.exit(int(code))
    return tests.seconds


def start(text, tests, words):
    folder = Path(tempfile.mkdtemp())
    harness.STARTED.clear()  # the first test would end these
    run = functools.partial(run_pytest, folder, text, tests, words)
    [process] = fork_ranks(1, run)
    process.folder = folder
    return process


def verdict(process):
    """Which test has noticed it, or why it is not sure that one has."""
    shutil.rmtree(process.folder, ignore_errors=True)
    said = process.text
    failed = re.search("^((?:FAILED|ERROR) .*?)( - .*)?$", said, re.MULTILINE)
    if process.code == 0:
        return SURVIVED
    if process.code not in (1, 2) or not failed:
        return f"{NOT_SURE}: exit code {process.code}"
    if re.search(rf"{harness.TIME_LIMIT} of \d+ s is over", said):
        return f"{NOT_SURE}: {harness.TIME_LIMIT}, {failed[1]}"
    return failed[1]


def run_unchanged(words, usual, jobs):
    """These tests without a change, so many side by side. Returns {test: seconds}."""
    text = SCRIPT.read_text()
    parts = [start(text, Tests(usual, part, jobs), words) for part in range(jobs)]
    seconds = {}
    for process in parts:
        while process.code is None:
            time.sleep(0.1)
        if verdict(process) != SURVIVED:
            print(process.text[-3000:])
            sys.exit("tests fail without a change, so nothing is shown")
        seconds |= process.value
    return seconds


def measure(keep, jobs):
    """{test: seconds}, from the folder if the program and its tests are the same."""
    version = zlib.crc32(SCRIPT.read_bytes() + TESTS.read_bytes())
    file = keep / f"seconds.{version}"
    if not file.exists():
        file.write_text(json.dumps(run_unchanged([TESTS], {}, jobs)))
    return json.loads(file.read_text())


def read_log(keep):
    """{what: (which test has noticed it, or that none has; the line)}"""
    (keep / "log").touch()
    rows = [row.split("\t") for row in (keep / "log").read_text().splitlines()]
    return {what: (found, int(line)) for found, line, what in rows}


def order(usual, change, log):
    """All tests: first those that are fast, or have noticed changes near to it."""
    near = collections.Counter()
    for found, line in log.values():
        near[found.removeprefix("FAILED ")] += 1 / (1 + abs(line - change.line))

    def cost(test):
        return usual[test] / (0.01 + near[test])

    return sorted(usual, key=cost)


def run_all(changes, usual, keep, jobs):
    """So many side by side, those that are not in the log yet. Returns {what: found}"""
    waiting = [what for what in changes if what not in read_log(keep)]
    total = len(waiting)
    running = {}
    while waiting or running:
        if waiting and len(running) < jobs:
            change = changes[waiting[0]]
            words = order(usual, change, read_log(keep))
            running[start(change.text, Tests(usual), words)] = waiting.pop(0)
        for process in [process for process in running if process.code is not None]:
            what = running.pop(process)
            found = verdict(process)
            line = changes[what].line
            with open(keep / "log", "a") as file:
                file.write(f"{found}\t{line}\t{what}\n")
            number = total - len(waiting) - len(running)
            print(f"{number}/{total}  line {line}: {what}: {found}", flush=True)
        time.sleep(0.02)
    log = read_log(keep)
    return {what: log[what][0] for what in changes}


def find_all(changes, keep, jobs):
    """{what: which test has noticed it, or that none has}"""
    usual = measure(keep, jobs)
    found = run_all(changes, usual, keep, jobs)
    doubtful = [what for what in found if NOT_SURE in found[what]]
    alone = run_all(
        {f"alone: {what}": changes[what] for what in doubtful}, usual, keep, 1
    )
    found |= {what: alone[f"alone: {what}"] for what in doubtful}
    noticed = [test for test in usual if f"FAILED {test}" in found.values()]
    if noticed:
        run_unchanged(noticed, usual, jobs)
    return found


def report(changes, found):
    """Print what has survived. Returns how many without a reason."""
    kinds = collections.Counter(change.kind for change in changes.values())
    print(f"{len(changes)} changes: {dict(kinds)}")
    unexpected = 0
    for what, change in changes.items():
        reasons = [EXCEPTIONS[part] for part in EXCEPTIONS if part in what]
        if found[what] == SURVIVED and not reasons:
            unexpected += 1
            reasons = ["NOT EXPECTED"]
        if reasons or NOT_SURE in found[what]:
            print(
                f"  line {change.line}: {change.kind}: {what}: {found[what]} {reasons}"
            )
    return unexpected


def main():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--only", default="^statement|^condition", help='in "name, line 25: what"')
    add("--part", default="1/1", help="such as 2/9: the second of nine parts")
    add("--keep", type=Path, help="a folder: skip what an earlier run has found")
    add("--jobs", type=int, default=2 * os.cpu_count())
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    keep = (args.keep or folder).absolute()
    keep.mkdir(exist_ok=True)
    tempfile.tempdir = str(folder)
    sys.pycache_prefix = str(folder)
    os.chdir(ROOT)
    chosen = {}
    for what, change in find_changes().items():
        if re.search(args.only, f"{change.kind}, line {change.line}: {what}"):
            chosen[what] = change
    part, parts = map(int, args.part.split("/"))
    chosen = dict(list(chosen.items())[part - 1 :: parts])
    found = find_all(chosen, keep, args.jobs)
    sys.exit(report(chosen, found) > 0)


if __name__ == "__main__":
    main()
