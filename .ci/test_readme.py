"""Tests of README.md: what it shows runs as it stands, and what it says is so.

The recipes have a file of their own, test_recipes.py.
"""

import ast
import datetime
import functools
import inspect
import itertools
import math
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import ddp_train as dt
from test_ddp_train import (  # noqa: F401 (the last two are fixtures)
    HERE,
    PYTHON,
    TINY,
    end_what_is_left,
    environment,
    fail,
    finish,
    finish_all,
    run,
    start,
    start_ranks,
    torchrun,
    wait_for,
)

README = (HERE / "README.md").read_text()
# The page without the recipes.
PAGE = re.sub("<!-- recipes: begin -->.*<!-- recipes: end -->", "", README, flags=re.S)
CPU = torch.device("cpu")
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}
processes = pytest.mark.processes


# ---- Read the page -------------------------------------------------------------------
def blocks(kind):
    """All code blocks of a language, without their indentation."""
    found = re.findall(rf"^( *)```{kind}\n(.*?)^ *```$", PAGE, re.M | re.S)
    return [re.sub(f"^{indent}", "", text, flags=re.M) for indent, text in found]


def example(name):
    """The Python block whose first line is `# name`."""
    (found,) = [text for text in blocks("python") if text.startswith(f"# {name}\n")]
    return found


def section(first, last):
    """The part of the page between two texts."""
    return PAGE.partition(first)[2].partition(last)[0]


def rows(first):
    """The rows of the table whose head begins so: lists of cells."""
    head = PAGE.index(f"\n| {first} |")
    table = PAGE[head:].partition("\n\n")[0].splitlines()[3:]
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table
    ]


def before_the_diff(diff):
    lines = [line[1:] for line in diff.splitlines() if line[:1] in " -"]
    return "\n".join(lines) + "\n"


def after_the_diff(diff):
    lines = [line[1:] for line in diff.splitlines() if line[:1] in " +"]
    return "\n".join(lines) + "\n"


def apply_hunks(text, diff):
    """The text after a diff in several hunks. Each must fit at exactly one place."""
    for hunk in re.split("^@@.*\n", diff, flags=re.M)[1:]:
        old = before_the_diff(hunk)
        assert text.count(old) == 1, f"this hunk fits {text.count(old)} times:\n{hunk}"
        text = text.replace(old, after_the_diff(hunk))
    return text


def change(text, changes):
    for old, new in changes.items():
        assert old in text, f"{old!r} is not in the script"
        text = text.replace(old, new)
    return text


DIFF, STOP_DIFF = blocks("diff")
BEFORE = before_the_diff(DIFF)
AFTER = after_the_diff(DIFF)
RESUMED = apply_hunks(AFTER, STOP_DIFF)
IDEA = example("idea.py")


def run_text(text, folder, world=1, code=0):
    """Run a script in a folder, on so many ranks. Returns the output of each rank."""
    script = folder / "script.py"
    script.write_text(text)
    if world == 1:
        return [run(PYTHON, script, env=WITHOUT_GPU, cwd=folder, code=code)]
    ranks = start_ranks(world, script, env=WITHOUT_GPU, cwd=folder)
    return finish_all(ranks, code)


def load(path):
    return torch.load(path, weights_only=True)


# ---- Its form ------------------------------------------------------------------------
def test_lines_are_at_most_120_characters_wide():
    wide = [line for line in README.splitlines() if len(line) > 120]
    assert not wide, "\n".join(wide)


def test_at_most_260_lines_are_to_be_seen():
    folded = r"<details>(<summary>.*?</summary>).*?</details>"
    visible = re.sub(folded, r"\1", README, flags=re.S).splitlines()
    assert len([line for line in visible if line.strip()]) <= 260


def test_each_code_block_is_known_to_a_test():
    python = [text.splitlines()[0].removeprefix("# ") for text in blocks("python")]
    assert python == [
        "idea.py",
        "load a checkpoint",
        "accumulation of 4 micro-batches",
        "dict batches",
        "weights by tokens",
        "a DataLoader of your own",
        "streaming data",
        "the noise of a GAN",
        "more in the checkpoint",
        "save more in the checkpoint",
        "start.py",
        "silence print() on the other ranks",
        "buffers that overlap",
    ]
    others = re.findall(r"^ *```(?!python)(\w+)$", PAGE, re.M)
    assert others == ["sh", "text", "mermaid", "diff", "diff", "sh"]


def test_make_targets_exist():
    makefile = (HERE / "Makefile").read_text()
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z0-9-]+)", README, re.M))
    assert {"train", "test", "lint"} <= named
    missing = [name for name in named if not re.search(f"^{name}:", makefile, re.M)]
    assert not missing


def test_options_exist(capsys):
    with pytest.raises(SystemExit):
        dt.parse_args(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    of_other_programs = """--standalone --nproc --nnodes --node --master --rdzv --tee
    --max-restarts --nodes --ntasks-per-node --signal --requeue --exclusive
    --network --shm-size --gpus --pid --local-addr
    --shutdown-timeout --signals-to-handle --index-url""".split()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE.replace("--pid PID", "")))
    assert not named - known - set(of_other_programs)


def test_pieces_have_the_arguments_that_the_table_shows():
    for piece, _ in rows("piece"):
        name, arguments = re.fullmatch(r"`(\w+)\((.*)\)`", piece).groups()
        found = []
        for parameter in inspect.signature(getattr(dt, name)).parameters.values():
            text = parameter.name
            if parameter.default is not parameter.empty:
                text += f"={parameter.default!r}".replace("'", '"')
            found.append(text)
        assert ", ".join(found) == arguments, name


def test_table_of_what_goes_wrong_names_what_exists():
    table = rows("what goes wrong")
    assert len(table) == 11
    for _, _, where, test in table:
        for name in re.findall("`(.*?)`", where):
            assert hasattr(dt, name), name
        name = test.strip("`")
        assert f"test_idea_{name}" in globals(), name


def test_table_of_faults_names_tests_that_exist():
    # A name with a star stands for all tests whose names begin so.
    names = re.findall(r"`(test_\w+)\*?`", section("## Faults", "## Speed"))
    files = [*HERE.glob("test_*.py"), *HERE.glob(".ci/test_*.py")]
    tests = "\n".join(file.read_text() for file in files)
    missing = [name for name in names if f"\ndef {name}" not in tests]
    assert not missing


def test_first_commands_are_targets_that_start_the_program():
    said = run("make", "-n", "train", "test", cwd=HERE)
    assert "run_single.sh" in said and "pytest" in said


@pytest.fixture(scope="module")
def small_run(environment, tmp_path_factory):  # noqa: F811
    """A folder with the output of a small run of ddp_train.py, and what it printed."""
    folder = tmp_path_factory.mktemp("small")
    options = [*TINY, "--max-steps", "2", "--out", "out"]
    said = run(PYTHON, HERE / "ddp_train.py", *options, cwd=folder)
    return folder, said


@processes
def test_output_looks_like_the_sample(small_run):
    def form(line):
        return re.sub(r"\d[\d.e+:-]*", "1", line.strip())

    (sample,) = blocks("text")
    printed = {form(line) for line in small_run[1].splitlines()}
    for line in sample.splitlines():
        assert form(line) in printed, small_run[1]


@processes
def test_checkpoint_loads_and_writes_text(small_run):
    script = small_run[0] / "write.py"
    script.write_text(example("load a checkpoint"))
    said = run(PYTHON, script, cwd=small_run[0])
    assert said.startswith("def ") and len(said) > 200


@processes
def test_command_to_debug_runs(tmp_path):
    command = blocks("sh")[-1].replace("\\\n", " ").split()
    assert command[3] == "torchrun" and "ddp_train.py" in command
    variables = dict(word.split("=") for word in command[:3])
    arguments = " ".join(command[4:]).replace(
        "ddp_train.py", str(HERE / "ddp_train.py")
    )
    launcher = [PYTHON, "-m", "torch.distributed.run"]
    more = [*TINY, "--max-steps", "2", "--out", tmp_path]
    said = run(*launcher, *arguments.split(), *more, env=variables, cwd=tmp_path)
    assert re.search(r"^\[default0\]:step 2 ", said, re.M), said
    assert "reducer.cpp" in said, said


# ---- The idea in 30 lines, and what goes wrong with it -------------------------------
# These test the 30 lines, not the program: most are of the long form, to keep the suite
# short.
long_form = pytest.mark.faults


def test_idea_is_short():
    assert len(IDEA.splitlines()) <= 32


@processes
def test_idea_runs_alone(tmp_path):
    (said,) = run_text(IDEA, tmp_path)
    assert "epoch 2: loss 0.0" in said
    assert (tmp_path / "idea.pt").exists()


@processes
def test_idea_runs_with_torchrun(tmp_path):
    script = tmp_path / "idea.py"
    script.write_text(IDEA)
    said = run(*torchrun(2, script), env=WITHOUT_GPU, cwd=tmp_path)
    assert said.count("epoch 2: loss 0.0") == 1, said
    assert (tmp_path / "idea.pt").exists()


@pytest.fixture(scope="module")
def observed(environment, tmp_path_factory):  # noqa: F811
    """What two ranks of idea.py read, draw and lose: a list of batches for each rank.

    A batch is (epoch, samples, dropout mask, loss).
    """
    folder = tmp_path_factory.mktemp("idea")
    backward = "        loss.backward()"
    mask = "torch.get_rng_state().sum().item()"
    note = f"        seen.append((epoch, x.tolist(), {mask}, loss.item()))\n"
    text = change(
        IDEA,
        {
            "torch.manual_seed(0)": "torch.manual_seed(0)\nseen = []",
            backward: note + backward,
            "dist.destroy": "torch.save(seen, f'{local_rank}.seen')\ndist.destroy",
        },
    )
    run_text(text, folder, world=2)
    return [load(folder / f"{rank}.seen") for rank in range(2)]


def samples_of(batches, epoch):
    lists = [samples for number, samples, _, _ in batches if number == epoch]
    return [tuple(sample) for sample in itertools.chain(*lists)]


@processes
def test_idea_repeats_a_sample(observed):
    samples = samples_of(observed[0], 0) + samples_of(observed[1], 0)
    assert len(samples) == 1002 and len(set(samples)) == 1001


@processes
def test_idea_repeats_the_order(observed):
    assert samples_of(observed[0], 0) == samples_of(observed[0], 2)


@processes
def test_idea_repeats_the_dropout(observed):
    state = [[batch[2] for batch in batches] for batches in observed]
    assert state[0] == state[1] and len(set(state[0])) > 1


@processes
def test_idea_prints_one_loss(observed):
    last = [batches[-1][3] for batches in observed]
    assert abs(last[0] - last[1]) > 1e-4


@processes
@long_form
def test_idea_saves_on_each_machine(tmp_path):
    # Two machines with one process each: both have the local rank 0.
    machines = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        machines.append(tmp_path / str(number))
    script = tmp_path / "idea.py"
    script.write_text(
        change(IDEA, {"import os\n": "import os, sys\nos.chdir(sys.argv[1])\n"})
    )
    env = {**WITHOUT_GPU, "LOCAL_RANK": "0"}
    said = finish_all(start_ranks(2, script, machines, env=env))
    assert [text.count("epoch 2") for text in said] == [1, 1], said
    assert all((machine / "idea.pt").exists() for machine in machines)


@processes
@long_form
def test_idea_loses_a_stopped_run(tmp_path):
    script = tmp_path / "idea.py"
    script.write_text(change(IDEA, {"range(3)": "range(100_000)"}))
    process = start(PYTHON, script, env=WITHOUT_GPU, cwd=tmp_path)
    wait_for(process, "epoch 3")
    process.terminate()
    finish(process, code=-signal.SIGTERM)
    (said,) = run_text(IDEA, tmp_path)
    assert "epoch 0" in said


@processes
@long_form
def test_idea_destroys_its_file(tmp_path):
    run_text(IDEA, tmp_path)
    good = load(tmp_path / "idea.pt")
    assert good
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (999, 999))\n"
    run_text(limited + IDEA, tmp_path, code=None)
    with pytest.raises((RuntimeError, EOFError)):
        load(tmp_path / "idea.pt")


@processes
@long_form
def test_idea_lets_two_runs_in(tmp_path):
    script = tmp_path / "idea.py"
    script.write_text(IDEA)
    runs = [start(PYTHON, script, env=WITHOUT_GPU, cwd=tmp_path) for _ in range(2)]
    assert all("epoch 2" in said for said in finish_all(runs))


@processes
@long_form
def test_idea_saves_nan(tmp_path):
    run_text(change(IDEA, {"0.1, momentum": "1e30, momentum"}), tmp_path)
    weights = load(tmp_path / "idea.pt").values()
    assert not all(weight.isfinite().all() for weight in weights)


@processes
@long_form
def test_idea_accepts_other_data(tmp_path):
    other = "torch.manual_seed(int(os.environ['RANK']))"
    said = run_text(change(IDEA, {"torch.manual_seed(0)": other}), tmp_path, world=2)
    assert "epoch 2" in said[0] and "rror" not in "".join(said)


@processes
@long_form
def test_idea_waits_in_silence(tmp_path):
    script = tmp_path / "idea.py"
    script.write_text(change(IDEA, {"range(3)": "range(100_000)"}))
    ranks = start_ranks(2, script, env=WITHOUT_GPU, cwd=tmp_path)
    wait_for(ranks[0], "epoch 3")
    ranks[1].send_signal(signal.SIGSTOP)
    time.sleep(1)  # what is under way comes to its end
    said = ranks[0].log.read_text()
    time.sleep(5)
    assert ranks[0].poll() is None
    assert ranks[0].log.read_text() == said
    assert dist.default_pg_timeout == datetime.timedelta(minutes=30)


# ---- What may I delete? --------------------------------------------------------------
def parts_to_delete():
    """{number: (texts to delete, {text: what it becomes})}, as the page says it."""
    text = section("Delete these lines.", "These parts belong together")
    parts = {}
    for number, item in re.findall(r"^(\d+)\. (.*(?:\n   .*)*)", text, re.M):
        becomes = dict(re.findall("`([^`]*)` becomes `([^`]*)`", item))
        item = re.sub("`[^`]*` becomes `[^`]*`", "", item)
        parts[int(number)] = re.findall("`([^`]*)`", item), becomes
    return parts


def code_of(node, lines):
    """The text of a statement without any spaces."""
    text = lines[node.lineno - 1 : node.end_lineno]
    text[-1] = text[-1].encode()[: node.end_col_offset].decode()
    return "".join("".join(text).split()).replace(",)", ")")  # as ruff breaks a line


def is_meant(node, code, text):
    """Does `text`, as it stands in the page, mean this statement?"""
    kind, _, name = text.partition(" ")
    if kind in ("def", "class"):
        definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        return definition and node.name == name
    wanted = "".join(text.split())
    if text.endswith(("…", ":")):
        return code.startswith(wanted.removesuffix("…"))
    return code == wanted


class Deleter(ast.NodeTransformer):
    """Deletes the statements that some texts mean, and what is empty then."""

    def __init__(self, source, texts):
        self.lines = source.splitlines()
        self.texts = texts
        self.found = set()

    def visit(self, node):
        if not isinstance(node, ast.stmt):
            return node  # no statement is inside of an expression
        code = code_of(node, self.lines)
        meant = [text for text in self.texts if is_meant(node, code, text)]
        if meant:
            self.found.update(meant)
            return None
        self.generic_visit(node)
        if isinstance(node, (ast.If, ast.For, ast.With)) and not node.body:
            return None
        return node


def delete(source, parts):
    """The program without these parts, a list of values of parts_to_delete()."""
    wanted = []
    for texts, becomes in parts:
        wanted += texts
        for old, new in becomes.items():
            assert source.count(old) == 1, old
            source = source.replace(old, new)
    deleter = Deleter(source, wanted)
    tree = deleter.generic_visit(ast.parse(source))
    missing = set(wanted) - deleter.found
    assert not missing, f"ddp_train.py has no {missing}"
    return ast.unparse(tree)


# A rank that runs one script after the other. Importing torch takes most of the time of
# a small run, so it does that once, and each script runs in a fork.
ONE_AFTER_THE_OTHER = """
import os, runpy, signal, sys
import torch, torch._dynamo
rank = os.environ["RANK"]
folders, options = sys.argv[1].split(":"), sys.argv[2:]
for folder in folders:
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        os.chdir(folder)
        log = os.open(f"said.{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["ddp_train.py", "--init-method", f"file://{folder}/meet", *options]
        runpy.run_path("ddp_train.py", run_name="__main__")
        sys.exit()
    _, status = os.waitpid(child, 0)
    with open(f"{folder}/status.{rank}", "w") as file:
        file.write(str(status))
"""


@processes
def test_all_parts_may_be_deleted(tmp_path):
    source = (HERE / "ddp_train.py").read_text()
    parts = parts_to_delete()
    assert sorted(parts) == list(range(1, 17))
    assert [int(row[0]) for row in rows("number")] == sorted(parts)
    for part in parts.values():
        delete(source, [part])  # the program has all that the page names
    run_what_is_left(tmp_path, {"all parts": delete(source, parts.values())})


@processes
@pytest.mark.faults  # the long form, to keep the suite short
def test_each_part_may_be_deleted(tmp_path):
    source = (HERE / "ddp_train.py").read_text()
    programs = {}
    for number, part in parts_to_delete().items():
        programs[f"part {number}"] = delete(source, [part])
    run_what_is_left(tmp_path, programs)


def run_what_is_left(tmp_path, programs):
    """On two ranks: each program ends, and with the same bits as the whole one."""
    source = (HERE / "ddp_train.py").read_text()
    programs = {"nothing": source, **programs}
    folders = []
    for name, program in programs.items():
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        (folder / "ddp_train.py").write_text(program)
        folders.append(folder)
    data = tmp_path / "data"
    data.write_bytes(source.encode()[:20_000])
    runner = tmp_path / "runner.py"
    runner.write_text(ONE_AFTER_THE_OTHER)
    options = [*TINY, "--data", data, "--max-steps", "4", "--save-every", "2"]
    options += ["--eval-every", "3", "--out", "out"]
    names = ":".join(str(folder) for folder in folders)
    finish_all(start_ranks(2, runner, names, *options))

    problems = []
    expected = load(folders[0] / "out" / "checkpoint.pt")["model"]
    for folder in folders:
        said = "".join((folder / f"said.{rank}").read_text() for rank in range(2))
        status = [(folder / f"status.{rank}").read_text() for rank in range(2)]
        if status != ["0", "0"] or "done: step 4" not in said:
            problems.append(f"---- without {folder.name}: {status}\n{said}")
            continue
        weights = load(folder / "out" / "checkpoint.pt")["model"]
        if not all(torch.equal(weights[name], expected[name]) for name in expected):
            problems.append(f"---- without {folder.name}: other weights")
    assert not problems, "\n".join(problems)


# ---- Into your own script ------------------------------------------------------------
def changed_lines(old, new):
    """How many lines of the new text are new. A line that is only indented is not."""
    left = [line.strip() for line in old.splitlines()]
    changed = 0
    for line in new.splitlines():
        if line.strip() in left:
            left.remove(line.strip())
        elif line.strip():
            changed += 1
    return changed


@pytest.mark.parametrize("old, new", [(BEFORE, AFTER), (AFTER, RESUMED)])
def test_diff_changes_at_most_16_lines(old, new):
    assert changed_lines(old, new) <= 16


def test_script_before_the_diff_does_not_know_of_ranks():
    assert "dt." not in BEFORE and "rank" not in BEFORE


@processes
def test_script_before_the_diff_runs(tmp_path):
    (said,) = run_text(BEFORE, tmp_path)
    assert "epoch 2: validation loss 0.0" in said


@processes
def test_script_is_exact(tmp_path):
    results = []
    for world, batch_size in (1, 32), (2, 16):
        folder = tmp_path / str(world)
        folder.mkdir()
        changes = {
            "Dropout(0.1)": "Dropout(0.0)",
            "train_set, 16": f"train_set, {batch_size}",
        }
        said = run_text(change(AFTER, changes), folder, world)
        results.append((said[0], load(folder / "model.pt")))
        assert not said[1:] or said[1] == ""
    (said1, model1), (said2, model2) = results
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", said1 + said2)]
    assert losses[:3] == pytest.approx(losses[3:], abs=2e-6)
    for name in model1:
        assert torch.allclose(model1[name], model2[name], rtol=0, atol=1e-6)


COUNT = "            samples += total\n"


def signal_at(samples):
    """Lines for the script: rank 1 gets a signal after so many samples."""
    return (
        f"            if world.rank == 1 and samples == {samples}:\n"
        "                import os\n"
        "                os.kill(os.getpid(), 15)\n"
    )


@processes
def test_script_stops_and_continues_with_the_same_bits(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    run_text(RESUMED, whole, world=2)
    # Rank 1 gets a signal in the middle of the second epoch.
    kill = signal_at(1001 + 320)
    said = run_text(change(RESUMED, {COUNT: COUNT + kill}), stopped, 2, code=128 + 15)
    assert "epoch 0" in said[0] and "epoch 1" not in said[0]
    # One step to agree.
    assert load(stopped / "out" / "checkpoint.pt")["step"] == 1001 + 320 + 32
    said = run_text(RESUMED, stopped, world=2)
    assert "going on from step 1353" in said[0]
    a, b = (load(folder / "out" / "checkpoint.pt") for folder in (whole, stopped))
    assert_equal(a["model"], b["model"])
    assert_equal(a["optimizer"], b["optimizer"])
    assert_equal(load(whole / "model.pt"), load(stopped / "model.pt"))


def assert_equal(a, b):
    """The same bits."""
    leaves = zip(
        *(torch.utils._pytree.tree_leaves(tree) for tree in (a, b)), strict=True
    )
    for left, right in leaves:
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right)
        else:
            assert left == right


@processes
def test_script_says_that_it_resumes_and_refuses_other_data(tmp_path):
    short = {"3):\n": "1):\n"}
    run_text(change(RESUMED, short), tmp_path)
    (said,) = run_text(change(RESUMED, short), tmp_path)
    assert re.fullmatch("going on from step 1001.*\n", said)
    assert "prints `going on from step 3003`" in PAGE
    other = {"x[:1001]": "x[:1000]"}
    (said,) = run_text(change(RESUMED, other), tmp_path, code=1)
    assert "samples 1001, not 1000" in said


# ---- Other shapes of scripts: direct tests -------------------------------------------
class Recorder:
    """In the place of an optimizer: keeps the gradients of each step."""

    def __init__(self, model):
        self.model = model
        self.steps = []

    def step(self):
        gradients = [p.grad.flatten().clone() for p in self.model.parameters()]
        self.steps.append(torch.cat(gradients))

    def zero_grad(self):
        for parameter in self.model.parameters():
            parameter.grad = None


def gradients(code, world_size, model, **names):
    """What DDP would average: the mean over the ranks of the gradients of each step.

    The ranks run one after the other, so `code` must not use a collective.
    """
    steps = []
    for rank in range(world_size):
        optimizer = Recorder(model)
        optimizer.zero_grad()
        made = {name: make(rank) for name, make in names.items()}
        world = dt.World(rank, world_size, CPU)
        scope = {"dt": dt, "torch": torch, "nn": nn, "math": math, "world": world}
        scope |= {"device": CPU, "ddp": model, "model": model, "optimizer": optimizer}
        exec(code, {**scope, **made})
        steps.append(torch.stack(optimizer.steps))
    return sum(steps) / world_size


def make_linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def mean_loss(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def make_data(n):
    torch.manual_seed(1)
    x = torch.randn(n, 3)
    return TensorDataset(x, x[:, :2].sin())


def make_loader(rank, dataset, world_size, batch_size):
    return dt.make_loader(dataset, batch_size, dt.World(rank, world_size, CPU))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_accumulation(world_size):
    """Of 77 samples: the gradients of steps of 48 and 29, on any number of ranks."""
    dataset = make_data(77)
    found = gradients(
        example("accumulation of 4 micro-batches"),
        world_size,
        make_linear(),
        loader=lambda rank: make_loader(rank, dataset, world_size, 12 // world_size),
        train_set=lambda rank: dataset,
        mean_loss=lambda rank: mean_loss,
        samples=lambda rank: 0,
    )
    order = torch.randperm(77, generator=torch.Generator().manual_seed(0))
    for gradient, picked in zip(found, (order[:48], order[48:]), strict=True):
        model = make_linear()
        mean_loss(model, *dataset[picked]).backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-6)


class DictDataset(TensorDataset):
    def __getitem__(self, i):
        x, labels = super().__getitem__(i)
        return {"x": x, "labels": labels}


class LikeTransformers(nn.Linear):
    """A model that takes the labels, and returns an object that has the loss."""

    def forward(self, x, labels):
        loss = nn.functional.mse_loss(super().forward(x), labels)
        return type("Output", (), {"loss": loss})


@pytest.mark.parametrize("world_size", [2, 3])
def test_dict_batches(world_size):
    dataset = DictDataset(*make_data(25).tensors)
    model = LikeTransformers(3, 2)
    code = example("dict batches") + "    optimizer.step()\n    optimizer.zero_grad()\n"
    found, expected = (
        gradients(
            code,
            size,
            model,
            loader=lambda rank, size=size: make_loader(rank, dataset, size, 12 // size),
        )
        for size in (world_size, 1)
    )
    assert len(found) == 3
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_dataloader_of_your_own(world_size):
    dataset = make_data(25)
    loop = "for (x, y), real, total in dt.real_batches(loader, device):\n"
    loop += "    (mean_loss(ddp, x, y) * real * world.size / total).backward()\n"
    loop += "    optimizer.step()\n    optimizer.zero_grad()\n"
    code = example("a DataLoader of your own") + loop
    found, expected = (
        gradients(
            change(code, {"dataset, 16": f"dataset, {12 // size}"}),
            size,
            make_linear(),
            DataLoader=lambda rank: DataLoader,
            dataset=lambda rank: dataset,
            pad=lambda rank: default_collate,
            mean_loss=lambda rank: mean_loss,
        )
        for size in (world_size, 1)
    )
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


@functools.cache
def streaming():
    scope = {}
    exec(example("streaming data"), scope)
    return scope["stream_batches"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("start_at", [0, 24, 25])
def test_streaming_data_is_exact(world_size, start_at):
    """Each step takes one stretch of the stream, from any place on: 37 items."""
    stream = list(make_data(37))
    ranks = []
    for rank in range(world_size):
        world = dt.World(rank, world_size, CPU)
        ranks.append(list(streaming()(stream, 4, world, start_at)))
    place = start_at
    for step in zip(*ranks, strict=True):
        taken = []
        totals = set()
        for (x, y), real, total in step:
            assert len(x) == len(y) == max(1, real)
            taken += [tuple(row.tolist()) for row in x[:real]]
            totals.add(total)
        assert totals == {min(4 * world_size, 37 - place)}
        expected = [tuple(x.tolist()) for x, _ in stream[place : place + total]]
        assert sorted(taken) == sorted(expected)
        place += total
    assert place == 37


@processes
def test_streaming_script_stops_and_continues_with_the_same_bits(tmp_path):
    """The script of the second diff, with stream_batches() for real_batches()."""
    batches = "dt.real_batches(loader, device)"
    stream = "stream_batches(train_set, 16, world, samples % len(train_set))"
    text = example("streaming data") + change(
        RESUMED, {batches: stream, ", 3):": ", 2):"}
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    run_text(text, whole, world=2)
    kill = signal_at(320)
    run_text(change(text, {COUNT: COUNT + kill}), stopped, 2, code=128 + 15)
    assert load(stopped / "out" / "checkpoint.pt")["step"] == 352
    run_text(text, stopped, world=2)
    assert_equal(load(whole / "model.pt"), load(stopped / "model.pt"))


@pytest.mark.parametrize("total", [12, 7, 2, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_noise_of_a_gan_is_that_of_one_process(total, world_size):
    code = example("the noise of a GAN")
    drawn = []
    for rank in range(world_size):
        world = dt.World(rank, world_size, CPU)
        scope = {"dt": dt, "torch": torch, "world": world, "device": CPU}
        scope |= {"samples": 5, "total": total}
        exec(code, scope)
        real = math.ceil((total - rank) / world_size)
        assert len(scope["noise"]) == max(1, real)
        if real > 0:
            drawn.append(scope["noise"])
    dt.seed_step(0, 5, 0, CPU)
    expected = torch.randn(total, 100)
    for rank, noise in enumerate(drawn):
        assert torch.equal(noise, expected[rank::world_size])


def test_more_in_the_checkpoint_comes_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = run_with_a_checkpoint(steps=3)
    second = run_with_a_checkpoint(steps=0)
    for name in ("model", "ema", "scheduler", "optimizer"):
        assert_equal(first[name].state_dict(), second[name].state_dict())
    assert second["best"] == 0.5 and second["samples"] == 3
    assert torch.equal(second["hidden"], torch.full((1, 32), 3.0))


def run_with_a_checkpoint(steps):
    """Some steps between the two examples that save more. Returns all names."""
    model = make_linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    world = dt.World(0, 1, CPU)
    scope = {"dt": dt, "torch": torch, "math": math, "world": world}
    scope |= {"model": model, "optimizer": optimizer}
    exec(example("more in the checkpoint"), scope)
    for _ in range(steps):
        mean_loss(model, *make_data(4)[:]).backward()
        optimizer.step()
        scope["scheduler"].step()
        scope["ema"].update_parameters(model)
        scope["samples"] += 1
        scope["hidden"] = scope["hidden"] + 1
        scope["best"] = 0.5
    if steps > 0:
        exec(example("save more in the checkpoint"), scope)
    scope["checkpoint"].lock.close()
    return scope


# ---- Other shapes of scripts: on two ranks -------------------------------------------
TOKENS = """
import torch
from torch import nn
import ddp_train as dt

world = dt.init_distributed()
with dt.process_group(world):
    torch.manual_seed(0)
    x = torch.randn(5, 4, 3)
    all_labels = torch.randint(0, 7, (5, 4))
    all_labels[torch.rand(5, 4) < 0.5] = -100
    model = nn.Linear(3, 7)
    ddp = dt.DistributedDataParallel(model) if world.size > 1 else model
    loader = dt.make_loader(torch.utils.data.TensorDataset(x, all_labels), 9, world)
    for (x, labels), real, total in dt.real_batches(loader, world.device):
        logits = ddp(x)
{block}
    if world.rank == 0:
        torch.save(model.weight.grad, f"{{world.size}}.grad")
"""


@processes
def test_weights_by_tokens(tmp_path):
    block = re.sub("^", " " * 8, example("weights by tokens"), flags=re.M)
    for world in (1, 3):
        run_text(TOKENS.format(block=block), tmp_path, world)
    one, three = (load(tmp_path / f"{world}.grad") for world in (1, 3))
    assert torch.allclose(one, three, rtol=0, atol=1e-6)


@processes
def test_script_without_main_and_with_silent_ranks(tmp_path):
    silence = example("silence print() on the other ranks")
    lines = ["import os, sys", "import ddp_train as dt", "world = dt.world", silence]
    lines += ["print('hello from', world.size)"]
    lines += ["print('not silent', world.rank, file=sys.stderr)"]
    lines += ["print('sum', dt.all_reduce_sum(world.rank + 1).item())"]
    (tmp_path / "my_script.py").write_text("\n".join(lines))
    said = run_text(example("start.py"), tmp_path, world=2)
    assert "hello from 2" in said[0] and "sum 3.0" in said[0]
    assert said[1].strip() == "not silent 1"


OVERLAP = """
import torch
from torch import nn
import ddp_train as dt

class Encoder(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        position = torch.randn(10, 4).unsqueeze(0).transpose(0, 1)
        self.register_buffer("position", position)

    def forward(self, x):
        return super().forward(x + self.position[:2])

world = dt.init_distributed()
with dt.process_group(world):
    model = Encoder()
    {wrap}
    for _ in range(2):
        ddp(torch.ones(2, 2, 4)).sum().backward()
    dt.share_buffers(model)
"""


@processes
@pytest.mark.parametrize("mended", [False, True])
def test_buffers_that_overlap(tmp_path, mended):
    wrap = "ddp = dt.DistributedDataParallel(model)"
    if mended:
        wrap = example("buffers that overlap").strip()
    text = OVERLAP.format(wrap=wrap.replace("\n", "\n    "))
    said = run_text(text, tmp_path, world=2, code=0 if mended else 1)
    assert ("single memory location" in said[0]) != mended


# ---- The workflow --------------------------------------------------------------------
def test_workflow_runs_what_ci_runs():
    workflow = (HERE / ".github" / "workflows" / "test.yml").read_text()
    assert ".ci/run" in workflow
    assert "torch==2.9" in workflow
