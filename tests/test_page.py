"""Tests of README.md, for whoever changes the page or what it speaks of.

Each command in it exists, each program in it runs, each test that it names is there.
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ddp_train
from test_ddp_train import (
    TINY,
    assert_same_bits,
    end_all,
    fork_ranks,
    free_port,
    in_ranks,
    launch,
    torchrun,
    train,
)

HERE = Path(__file__).resolve().parent.parent
PAGE = (HERE / "README.md").read_text()
BLOCKS = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", PAGE, re.MULTILINE | re.DOTALL)


def block(kind, beginning):
    """The text of the block of code that begins so."""
    found = [text for what, text in BLOCKS if what == kind and beginning in text[:60]]
    assert len(found) == 1, f"{len(found)} blocks begin with {beginning}"
    return found[0]


# ---- What the page names exists ------------------------------------------------------
def test_page_can_be_read():
    """Tables may be wider: a page shows them in columns."""
    for line in PAGE.splitlines():
        assert len(line) <= 120 or line.startswith("|"), line
    folded = re.sub(r"<details>.*?</details>", "", PAGE, flags=re.DOTALL)
    assert len(folded.splitlines()) <= 325 and PAGE.count("<details>") <= 3


def test_each_block_of_code_is_tested_here():
    known = "make train", "TORCH_CPP_LOG_LEVEL", "# write.py", "# idea.py", "@@ "
    for kind, text in BLOCKS:
        assert kind == "text" or text.lstrip().startswith((*known, "import torch"))


def test_targets_and_options_exist(capsys):
    makefile = (HERE / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z][a-z0-9-]+)", PAGE, re.M):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    with pytest.raises(SystemExit):
        ddp_train.parse_args(["--help"])
    options = re.findall(r"--\w+", capsys.readouterr().out)
    with_underscores = re.findall(r"--[a-z]+_[a-z_]+", PAGE)
    for option in with_underscores:
        torchruns = "--nproc_per_node --node_rank --master_addr".split()
        assert option in [*options, *torchruns], option
    for option in "--precision --compile --accum --epochs --device --lr".split():
        assert option in PAGE and option in options


def test_files_and_tests_that_are_named_exist():
    for path in re.findall(r"\]\(([^):]+)\)", PAGE):
        assert (HERE / path).exists(), path
    tests = (HERE / "test_ddp_train.py").read_text()
    tests += "".join(path.read_text() for path in (HERE / "tests").glob("*.py"))
    names = re.findall(r"`(test_\w+)`", PAGE)
    assert len(names) > 20
    for name in names:
        assert f"def {name}(" in tests, name


def test_each_recipe_has_its_line():
    for path in (HERE / "recipes").glob("*.diff"):
        assert f"(recipes/{path.name})" in PAGE, path.name


def test_pieces_that_are_named_exist():
    for name in set(re.findall(r"\bdt\.(\w+)", PAGE)):
        assert hasattr(ddp_train, name), name


def test_marked_lines_are_as_many_as_is_said():
    marks = (HERE / "ddp_train.py").read_text().count("DDP: ")
    numbers = {9: "nine", 10: "ten", 11: "eleven", 12: "twelve"}
    assert f"shows all {numbers[marks]}" in PAGE


def test_workflow_and_ci_run_what_the_page_tells():
    assert "make test\n" in (HERE / ".ci/run").read_text()
    assert "- run: .ci/run\n" in (HERE / ".github/workflows/test.yml").read_text()


# ---- The programs of the page --------------------------------------------------------
@pytest.mark.processes
def test_sample_output_and_write_py(tmp_path):
    """A run prints lines like those of the page. Its checkpoint writes text."""
    options = [*TINY, "--max_steps", 2, "--out", tmp_path / "out"]
    printed = train(1, *options)[0]
    sample = block("text", "ranks: ")
    assert shape_of(printed)[:3] == shape_of(sample)[:3]
    for line in shape_of(printed):
        assert line in shape_of(sample)
    path = tmp_path / "write.py"
    path.write_text(block("python", "# write.py"))
    written = launch(sys.executable, path, cwd=tmp_path).end()
    assert written.startswith("The ") and len(written) > 100


def shape_of(text):
    """The lines, without numbers and names of folders."""
    text = re.sub(r"\S*out/", "out/", text)
    text = re.sub(r"[0-9.]+(e-?[0-9]+)?", "0", text)
    return text.splitlines()


@pytest.mark.processes
def test_idea_runs_alone_and_under_torchrun(tmp_path):
    path = tmp_path / "idea.py"
    path.write_text(block("python", "# idea.py"))
    alone = launch(sys.executable, path, cwd=tmp_path).end()
    ranks = launch(*torchrun(2, path), cwd=tmp_path).end()
    for text in (alone, ranks):
        losses = [float(loss) for loss in re.findall(r"epoch \d: loss (.*)", text)]
        assert len(losses) == 3 and losses[2] < losses[0]
    assert "0.weight" in torch.load(tmp_path / "idea.pt", weights_only=True)


def test_idea_has_thirty_lines_or_so():
    lines = block("python", "# idea.py").splitlines()
    code = [
        line for line in lines if line and not line.startswith(("#", "import", "from"))
    ]
    assert len(code) <= 34


# ---- Into your own script ------------------------------------------------------------
def versions():
    """The script of the page: before, with DDP, with DDP and resume."""
    first, second = [text for kind, text in BLOCKS if kind == "diff"]
    before = [line[1:] for line in first.splitlines() if line[:1] in (" ", "-")]
    ported = [line[1:] for line in first.splitlines() if line[:1] in (" ", "+")]
    return "\n".join(before), "\n".join(ported), second


@pytest.fixture
def scripts(tmp_path):
    """A folder with before.py, ported.py and resumed.py."""
    before, ported, second = versions()
    (tmp_path / "before.py").write_text(before + "\n")
    (tmp_path / "ported.py").write_text(ported + "\n")
    (tmp_path / "resumed.py").write_text(ported + "\n")
    patch = f"--- a/resumed.py\n+++ b/resumed.py\n{second}"
    command = ["git", "apply", "-"]
    subprocess.run(command, input=patch, text=True, check=True, cwd=tmp_path)
    return tmp_path


def run_script(path, size, folder, code=0, stop_at=None, batch_size=16):
    """Run a script of the page in a folder of its own, in so many forked ranks."""
    folder.mkdir(exist_ok=True)
    text = (
        path.read_text()
        .replace("16", str(batch_size))
        .replace("Dropout(0.1)", "Tanh()")
    )
    if stop_at is not None:
        text = path.read_text()

    def rank():
        os.chdir(folder)
        calls = []
        ask = ddp_train.StopSignal.__call__

        def stop(self):
            calls.append(1)
            if len(calls) == stop_at and os.environ.get("RANK", "1") == "1":
                self.received = 15
            return ask(self)

        ddp_train.StopSignal.__call__ = stop
        exec(compile(text, str(path), "exec"), {"__name__": "__main__"})

    return end_all(fork_ranks(size, rank), code)


def test_diffs_are_short():
    first, second = [text for kind, text in BLOCKS if kind == "diff"]
    for text in (first, second):
        added = [line for line in text.splitlines() if re.match(r"\+ *\S", line)]
        assert len(added) <= 16


@pytest.mark.processes
def test_ported_script_is_exact_and_the_script_before_runs(scripts, tmp_path):
    run_script(scripts / "before.py", 1, tmp_path / "before")
    run_script(scripts / "ported.py", 1, tmp_path / "one", batch_size=32)
    run_script(scripts / "ported.py", 2, tmp_path / "two", batch_size=16)
    run_script(scripts / "ported.py", 2, tmp_path / "other", batch_size=8)
    one, two, other = [
        torch.load(tmp_path / name / "model.pt", weights_only=True)
        for name in ("one", "two", "other")
    ]
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-6)
    assert not torch.allclose(one["0.weight"], other["0.weight"], rtol=0, atol=1e-4)


@pytest.mark.processes
@pytest.mark.parametrize("stop_at", [5, 31, 40])  # mid-epoch, an epoch's end, mid-epoch
def test_resumed_script_has_the_same_bits(scripts, tmp_path, stop_at):
    """An epoch has 31 steps."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_script(scripts / "resumed.py", 2, whole, stop_at=-1)
    first = run_script(scripts / "resumed.py", 2, parts, stop_at=stop_at)
    second = run_script(scripts / "resumed.py", 2, parts, stop_at=-1)
    assert_same_bits(whole / "out", parts / "out")
    said = "".join(first + second)
    for epoch in range(3):
        assert said.count(f"epoch {epoch}: ") == 1


def inline(beginning):
    """The code in the text of the page that begins so."""
    (code,) = re.findall(f"`({re.escape(beginning)}[^`]*)`", PAGE)
    return code


@pytest.mark.processes
def test_early_stopping_survives_a_stop_and_a_second_start(scripts, tmp_path):
    """As the paragraph says, in resumed.py. The loss must get better by a tenth."""
    script = scripts / "resumed.py"
    text = script.read_text()
    save = inline("checkpoint.save(step, epoch=epoch + 1")
    kept = save[save.index(", best") :]
    better = "mean['loss'] < 0.9 * best"
    for old, new in (
        ('"start": 0}', '"start": 0, "best": 1e9, "bad_epochs": 0}'),
        (", start = state", ", start, best, bad_epochs = state"),
        ('state["start"]', 'state["start"], state["best"], state["bad_epochs"]'),
        (" 3):\n", f" 30):\n        {inline('if bad_epochs')}\n"),
        (
            "        if world.rank == 0:\n            print",
            f"        bad_epochs = 0 if {better} else bad_epochs + 1\n"
            "        best = min(best, mean['loss'])\n"
            "        if world.rank == 0:\n            print",
        ),
        ("start=start)", f"start=start{kept}"),
        ("checkpoint.save(step, epoch=epoch + 1, start=0)", save),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script.write_text(text)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = run_script(script, 2, whole, stop_at=-1)[0]
    run_script(script, 2, parts, stop_at=40)
    run_script(script, 2, parts, stop_at=-1)
    assert_same_bits(whole / "out", parts / "out")
    assert 4 <= said.count("epoch ") < 30
    assert run_script(script, 2, parts, stop_at=-1) == ["", ""]
    assert_same_bits(whole / "out", parts / "out")


@pytest.mark.processes
def test_mean_over_tokens_is_that_of_one_process():
    """Of four sequences with other lengths, on one and on two ranks."""

    def gradient():
        with ddp_train.distributed("cpu") as world:
            torch.manual_seed(0)
            model = nn.Linear(1, 1)
            ddp = ddp_train.DistributedDataParallel(model) if world.size > 1 else model
            x = torch.arange(80.0).view(4, 20, 1)[world.rank :: world.size]
            lengths = torch.tensor([3, 9, 5, 20])[world.rank :: world.size, None]
            mask = torch.arange(20) < lengths
            loss_sum = (ddp(x).squeeze(2).square() * mask).sum()
            names = {"dt": ddp_train, "world": world, "mask": mask}
            names["loss_sum"] = loss_sum
            exec(inline("tokens = "), names)
            exec(inline("(loss_sum"), names)
            return torch.cat([model.weight.grad.flatten(), model.bias.grad])

    one, two = in_ranks(1, gradient)[0], in_ranks(2, gradient)
    for found in two:
        torch.testing.assert_close(found, one)


@pytest.mark.processes
def test_ranks_end_a_stream_together():
    """Of 11 items rank 0 has six, rank 1 five: two full batches each."""

    def read():
        with ddp_train.distributed("cpu") as world:
            mine = iter(range(world.rank, 11, world.size))
            batches = []
            while True:
                batch = list(itertools.islice(mine, 2))
                names = {"dt": ddp_train, "has_batch": len(batch) == 2}
                if eval(inline("if min(dt.all_gather").split(":")[0][3:], names):
                    return batches
                batches.append(batch)

    assert in_ranks(2, read) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


@pytest.mark.processes
def test_command_to_debug_runs(tmp_path):
    text = block("sh", "TORCH_CPP_LOG_LEVEL")
    command = text.replace("torchrun", f"'{sys.executable}' -m torch.distributed.run")
    command = command.replace("ddp_train.py", f"'{HERE}/ddp_train.py' {' '.join(TINY)}")
    env = {"MASTER_PORT": str(free_port())}
    said = launch("sh", "-c", command, cwd=tmp_path, env=env).end()
    assert "[default0]:" in said and "done: step 20" in said
