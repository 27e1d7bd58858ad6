"""Tests of ddp_check: it finds what is wrong, and says nothing about what is right.

    make test-check                               all: half an hour or more
    make test-check ARGS="-k 'loss and sum' -s"   one case, with what is said

Each script in cases/ says at its head what must be found: see cases/common.py.
What ddp_check says in words is no matter here. The tests read what --json writes.
"""

import dataclasses
import itertools
import json
import math
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

import harness
from ddp_check.rows import PAGES, ROWS
from harness import ROOT, SCRIPT, flatten, launch, processes, torchrun

slow = pytest.mark.check
CASES = Path(__file__).parent / "cases"
# What a case may say for its options: the first answer, or one part of what follows.
OPTIONS = {
    "all": [],
    "quick": ["--quick"],
    "alone": ["--ranks", "1,2", "--skip", "resume,machines,failure"],
    "resume": ["--skip", "ranks,machines,failure"],
    "machines": ["--skip", "ranks,resume,failure"],
    "failure": ["--skip", "ranks,resume,machines"],
}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Several launches on a busy machine take long."""
    monkeypatch.setattr(harness, "DEADLINE", 900)


# ---- The cases -----------------------------------------------------------------------
@dataclasses.dataclass
class Case:
    script: Path
    words: list  # its arguments
    expected: list  # (word, row, {name: value}), where a value may be "0.1..0.2"
    options: list
    needs: str = ""  # a library
    ci: bool = False


def cases_of(script):
    """The cases at the head of a script."""
    lines = script.read_text().splitlines()
    head = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    options, needs = "quick", ""
    for line in re.sub(r"\n#  +", " ", head).splitlines():
        kind, _, text = line.removeprefix("# ").partition(": ")
        if kind == "options":
            options = text
        if kind == "needs":
            needs = text
        if kind in ("case", "case ci"):
            words, expected, *own = text.split(" | ")
            first, *more = shlex.split(own[0] if own else options)
            of_case = OPTIONS.get(first, [first]) + more
            expected = [expectation(entry) for entry in expected.split("; ")]
            yield Case(script, words.split(), expected, of_case, needs, "ci" in kind)


def expectation(text):
    word, *rest = shlex.split(text)
    row = " ".join(part for part in rest if "=" not in part)
    values = dict(part.split("=", 1) for part in rest if "=" in part)
    if (word, row) == ("ok", "gradient"):  # in float64, where not said otherwise
        values.setdefault("off", "..1e-11")
    return word, row, values


ALL = [case for path in sorted(CASES.rglob("*.py")) for case in cases_of(path)]


def parameter(case):
    marks = [slow, *[pytest.mark.check_ci] * case.ci]
    name = " ".join([case.script.stem, *case.words, *case.options])
    return pytest.param(case, id=name, marks=marks)


@pytest.mark.parametrize("case", list(map(parameter, ALL)))
def test_each_fault_and_only_faults_are_found(case, tmp_path):
    if case.needs:
        pytest.importorskip(case.needs)
    shutil.copytree(CASES, tmp_path / "cases")  # some write where they are
    script = tmp_path / "cases" / case.script.relative_to(CASES)
    findings = check(*case.options, script, *case.words, cwd=tmp_path)
    assert_found(findings, case.expected)


def start(*words, command=("-m", "ddp_check"), **options):
    env = {"TMPDIR": tempfile.gettempdir(), **options.pop("env", {})}
    return launch(sys.executable, *command, *words, env=env, **options)


def check(*words, cwd, **options):
    """Run the check to its end. Returns what it has found."""
    file = Path(cwd, "findings.json")
    if "--timeout" not in words:
        words = ["--timeout", "600", *words]
    process = start("--json", file, *words, cwd=cwd, **options)
    print(process.wait())
    process.leaves_none()
    if process.code not in (0, 1, 3):
        harness.fail(f"exit code {process.code}")
    report = json.loads(file.read_text())
    assert report["exit"] == process.code == exit_code(report["findings"])
    return report["findings"]


def exit_code(findings):
    said = {(finding["word"], finding["row"]) for finding in findings}
    if "WRONG" in {word for word, _ in said}:
        return 1
    return 0 if ("ok", "gradient") in said else 3


def assert_found(findings, expected):
    """These lines, and no other line of a fault."""
    asserted = {(word, row) for word, row, _ in expected}
    asserted |= {("ok", row[3:]) for word, row, _ in expected if word == "no"}
    expected = [entry for entry in expected if entry[0] != "no"]
    found = []
    for finding in findings:
        is_bad = finding["word"] != "ok"
        if is_bad or (finding["word"], finding["row"]) in asserted:
            found.append((finding["word"], finding["row"], finding["values"]))
    if Counter(line[:2] for line in found) != Counter(line[:2] for line in expected):
        harness.fail(f"found {found}, not {expected}")
    for kind in asserted:  # of several such lines, the first ones belong together
        pairs = zip(
            *[[c for *a, c in b if tuple(a) == kind] for b in (found, expected)]
        )
        for values, wanted in pairs:
            for name, value in wanted.items():
                if not fits(values.get(name), value):
                    harness.fail(f"{kind}: {name} of {values} is not {value}")


def fits(value, wanted):
    low, is_range, high = wanted.partition("..")
    if is_range:
        return float(low or 0) <= float(value) <= float(high)
    try:
        return math.isclose(float(value), float(wanted))
    except (TypeError, ValueError):
        return str(value) == wanted


def test_each_row_is_said_by_some_case():
    """Of each row: when it is ok, and when it is not."""
    said = {entry[:2] for case in ALL for entry in case.expected if entry[0] != "no"}
    missing = []
    for name, row in ROWS.items():
        missing += ["ok " + name] * bool(row.ok and ("ok", name) not in said)
        words = {(word, name) for word in ("WRONG", "LOSES", "note")}
        missing += [name] * bool(row.bad and not words & said)
    assert not missing
    assert not {row for _, row in said} - set(ROWS)


# ---- How it is called ----------------------------------------------------------------
def right_script(folder):
    """A copy of a right script, and the words that run it."""
    for name in ("plain.py", "common.py"):
        shutil.copy(CASES / name, folder)
    return ["--quick", Path(folder, "plain.py"), "right"]


@slow
def test_the_folder_can_be_copied(tmp_path):
    shutil.copytree(ROOT / "ddp_check", tmp_path / "elsewhere/ddp_check")
    env = {"PYTHONPATH": ""}
    command = [tmp_path / "elsewhere/ddp_check"]
    words = right_script(tmp_path)
    findings = check(*words, command=command, env=env, cwd=tmp_path)
    assert_found(findings, [expectation("ok gradient")])


@slow
def test_module_with_relative_imports(tmp_path):
    shutil.copytree(CASES / "project", tmp_path / "project")
    findings = check("--quick", "-m", "project.train", cwd=tmp_path)
    assert_found(findings, [expectation("ok gradient")])


LINKED = """\
import sys

sys.argv[1:] = [open("1.txt").read(), *sys.argv[1:]]
from plain import *

assert open("../2.txt").read() == "2"
assert sys.argv[2] == str(local), sys.argv
"""


@slow
def test_files_are_linked_and_each_rank_gets_its_own_local_rank(tmp_path):
    right_script(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/1.txt").write_text("right")
    (tmp_path / "2.txt").write_text("2")
    (tmp_path / "mine.py").write_text(LINKED)
    words = ["--quick", "--link", "1.txt", "--link", "../2.txt", "../mine.py"]
    findings = check(*words, "${local_rank}", cwd=tmp_path / "folder")
    assert_found(findings, [expectation("ok gradient")])


TINY = "--device cpu --dim 16 --layers 1 --heads 2 --seq_len 32 --batch_size {8}"
TINY += " --max_steps 20 --log_every 1 --save_every 5 --dropout 0.1 --out {out}"
RECIPES = ["", *sorted(path.stem for path in (ROOT / "recipes").glob("*.diff"))]


@slow
@pytest.mark.parametrize("name", RECIPES)
def test_program_and_its_recipes(name, tmp_path, data):
    script = SCRIPT
    if name:
        script = tmp_path / "mine.py"
        make = ["make", "-C", ROOT, "recipe", f"R={name}", f"OUT={script}"]
        launch(*make).end()
    words = ["--compare", r"val_loss\s(\S+)", script, *TINY.split(), "--data", data]
    findings = check(*words, cwd=tmp_path)
    said = [(finding["word"], finding["row"]) for finding in findings]
    assert not [line for line in said if line[0] in ("WRONG", "LOSES")]
    assert {("ok", "gradient"), ("ok", "rest"), ("ok", "machines")} <= set(said)


@slow
@pytest.mark.parametrize("name", ["idea", "ported", "resumed", "no_data"])
def test_example(name, tmp_path):
    """Those that save no checkpoint lose all steps."""
    findings = check(ROOT / f"examples/{name}.py", cwd=tmp_path)
    said = [(finding["word"], finding["row"]) for finding in findings]
    bad = [line for line in said if line[0] in ("WRONG", "LOSES")]
    saves = name in ("resumed", "no_data")
    assert bad == [("LOSES", "all lost")] * 2 * (not saves)
    assert said.count(("ok", "gradient")) == 2 and ("ok", "machines") in said


SAVES = """\
from plain import *

if (rank, size) == (0, 2):
    torch.save(wrapped.state_dict(), sys.argv[2])
"""


@slow
@pytest.mark.check_ci
def test_the_check_does_not_change_the_training(tmp_path):
    """In float32, it ends with the same bits as without the check."""
    words = right_script(tmp_path)
    script = tmp_path / "mine.py"
    script.write_text(SAVES)
    launch(*torchrun(2, script, "float32", tmp_path / "a.pt"), cwd=tmp_path).end()
    findings = check(words[0], script, "float32", tmp_path / "b.pt", cwd=tmp_path)
    expected = "note float32", "note outside", "ok gradient off=..1e-4"
    assert_found(findings, list(map(expectation, expected)))
    a, b = [flatten(torch.load(tmp_path / name)) for name in ("a.pt", "b.pt")]
    assert a == b


@processes
def test_a_fault_is_found_quickly(tmp_path):
    shutil.copytree(CASES, tmp_path / "cases")
    findings = check("--quick", "cases/loss.py", "not-called", cwd=tmp_path)
    assert_found(findings, [expectation("WRONG not called")])


# ---- Bad input, and its end ----------------------------------------------------------
BAD = [
    "missing.py",
    "here.py --n {0}",
    "here.py --n {3}",
    "here.py --n {2}",
    "--ranks 2 here.py",
    "--ranks 0,2 here.py",
    "--compare x here.py",
    "--compare ( here.py",
    "--link nowhere here.py",
    "--skip ranks,nothing here.py",
    "--json no/such/folder here.py",
]


@processes
def test_bad_input_gets_one_line(tmp_path):
    (tmp_path / "here.py").touch()
    runs = {words: start(*words.split(), cwd=tmp_path) for words in BAD}
    for words, process in runs.items():
        said = process.end(2)
        assert len(said.splitlines()) == 1, words


# A launch that is made again would leave another folder.
COUNTS = (
    "import os\n\nos.makedirs(f'{os.environ['COUNT']}/{os.getppid()}', exist_ok=True)\n"
)
COUNTS = COUNTS.replace("os.environ['COUNT']", 'os.environ["COUNT"]')


@slow
@pytest.mark.parametrize(
    "text, launches",
    [("import time; time.sleep(999)", 1), ("raise RuntimeError('no CUDA GPUs')", 2)],
)
def test_no_launch_is_made_in_vain(text, launches, tmp_path):
    """A hang is waited for once. GPUs that are missed are pretended, in one launch."""
    (tmp_path / "mine.py").write_text(COUNTS + text)
    env = {"COUNT": str(tmp_path / "count")}
    check("--quick", "--timeout", "15", "mine.py", cwd=tmp_path, env=env)
    assert len(list((tmp_path / "count").iterdir())) == launches


@slow
@pytest.mark.check_ci
def test_first_answer_comes_first(tmp_path):
    """What is found is said at once, and not at the end of all launches."""
    process = start(*right_script(tmp_path)[1:], cwd=tmp_path)
    line = process.wait_for(r"  ok +2 ranks: the gradient.*\n")[0]
    assert process.code is None and line
    process.send(signal.SIGINT)
    process.wait()
    process.leaves_none()


SPOILS = """\
import os

open(os.environ["CHECK_LOG"] + "/rank0.trace", "a").write("cnonsense\\nx\\n.")
"""


@processes
def test_fault_of_the_check_itself(tmp_path):
    (tmp_path / "mine.py").write_text(SPOILS)
    said = start("--quick", "mine.py", cwd=tmp_path).end(4)
    assert "Traceback" in said and "report" in said.splitlines()[-1]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=processes),
        pytest.param(signal.SIGTERM, marks=slow),
        pytest.param(signal.SIGKILL, marks=processes),
    ],
)
def test_ended_by_a_signal_it_leaves_nothing(number, tmp_path):
    """No process, and no folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(999)")
    process = start("mine.py", cwd=tmp_path, env={"TMPDIR": str(temporary)})
    for _ in harness.ticks():
        if len(process.left) >= 5:  # the check, its guard, torchrun and two ranks
            break
    assert list(temporary.iterdir())
    process.send(number)
    process.wait()
    process.leaves_none()
    for _ in harness.ticks("a folder is left"):
        if not list(temporary.iterdir()):
            break
    assert process.code not in (0, 1, 2, 3)


def test_pages_exist():
    for page in PAGES.values():
        path, _, heading = page.partition(", ")
        text = (ROOT / path).read_text()
        assert re.search(rf"^#.*{heading.strip(chr(34))}", text, re.MULTILINE)
