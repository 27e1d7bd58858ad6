"""Tests of README.md, for whoever changes the page or what it speaks of.

Each command in it exists, each program in it runs, each file that it names is there.
"""

import functools
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import ddp_train
from harness import (
    TINY,
    assert_same_bits,
    end_all,
    fork_ranks,
    free_port,
    in_ranks,
    launch,
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
    """Tables may be wider: a page shows them in columns. Pictures have a long text."""
    for line in PAGE.splitlines():
        assert len(line) <= 120 or line.startswith(("|", "<img ")), line
    folded = re.sub(r"<details>.*?</details>", "", PAGE, flags=re.DOTALL)
    assert len(folded.splitlines()) <= 330 and PAGE.count("<details>") <= 2


def test_each_block_of_code_is_tested_here():
    known = "make train", "TORCH_CPP_LOG_LEVEL", "# idea.py", "@@ "
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


def test_files_that_are_named_exist():
    names = re.findall(r"\]\(([^):]+)\)", PAGE) + re.findall(r'src="([^"]+)"', PAGE)
    assert len(names) > 10
    for path in names:
        assert (HERE / path).exists(), path


def test_pictures_have_the_text_of_their_run():
    for path in (HERE / "benchmarks/figures").glob("*.txt"):
        source = f'src="benchmarks/figures/{path.stem}.svg" width="800"'
        assert f'<img {source} alt="{path.read_text().strip()}">' in PAGE
    assert PAGE.count("<img ") == 2


def test_each_recipe_has_its_line():
    for path in (HERE / "recipes").glob("*.diff"):
        assert f"(recipes/{path.name})" in PAGE, path.name


def test_pieces_that_are_named_exist():
    """Those of the text. The programs of the page run below."""
    text = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    names = "all_gather mean_over_ranks seed_all seed_of to_device wrap evaluate"
    names += " check_same_weights train_loader distributed build_model build_optimizer"
    for name in [*names.split(), "compute_loss", "score", "load_data", "Checkpoint"]:
        assert f"{name}(" in text or f"`{name}`" in text, name
        assert callable(getattr(ddp_train, name))
    for name in re.findall(r"`(torch(?:\.\w+)+) = ", text):
        functools.reduce(getattr, name.split(".")[1:], torch)


def test_rate_of_a_longer_run_is_that_which_is_said():
    """After a finished run, with twice the epochs."""
    assert "half of its peak for twice the" in PAGE
    args = ddp_train.parse_args(["--epochs", "3"])
    assert ddp_train.lr_factor(args, 3) == pytest.approx(0, abs=1e-12)
    args.epochs = 6
    assert 0.5 < ddp_train.lr_factor(args, 3) < 0.6


def test_workflow_and_ci_run_what_the_page_tells():
    assert "make test\n" in (HERE / ".ci/run").read_text()
    assert "- run: .ci/run\n" in (HERE / ".github/workflows/test.yml").read_text()


# ---- The programs of the page --------------------------------------------------------
@pytest.mark.processes
def test_sample_output_and_weights_without_ddp(tmp_path):
    """A run prints lines like those of the page. Its weights fit the bare model."""
    options = [*TINY, "--max_steps", 2, "--out", tmp_path / "out"]
    printed = train(2, *options)[0]
    sample = block("text", "ranks: ")
    assert shape_of(printed)[:3] == shape_of(sample)[:3]
    for line in shape_of(printed):
        assert line in shape_of(sample)
    model = ddp_train.build_model(ddp_train.parse_args([str(word) for word in TINY]))
    code = inline('torch.load("out/checkpoint.pt"')
    code = code.replace("out/checkpoint.pt", str(tmp_path / "out/checkpoint.pt"))
    model.load_state_dict(eval(code, {"torch": torch}))


def shape_of(text):
    """The lines, without numbers and names of folders."""
    text = re.sub(r"\S*out/", "out/", text)
    text = re.sub(r"host \S+", "host", text)
    text = re.sub(r"\b[0-9.]+(e-?[0-9]+)?", "0", text)
    return text.splitlines()


@pytest.mark.processes
def test_idea_runs_alone_and_by_the_command_to_debug(tmp_path):
    path = tmp_path / "idea.py"
    path.write_text(block("python", "# idea.py"))
    alone = launch(sys.executable, path, cwd=tmp_path).end()
    command = block("sh", "TORCH_CPP_LOG_LEVEL")
    ddp_train.parse_args(command.split("ddp_train.py")[1].split())
    launcher = f"'{sys.executable}' -m torch.distributed.run"
    command = command.replace("torchrun", launcher).replace("ddp_train.py", str(path))
    env = {"MASTER_PORT": str(free_port())}
    ranks = launch("sh", "-c", command, cwd=tmp_path, env=env).end()
    assert "[default0]:" in ranks
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


def run_script(path, size, folder, code=0, stop_at=None, change=None):
    """Run a script of the page in a folder of its own, in so many forked ranks.

    stop_at: rank 1 gets a signal when it asks for the time of this number.
    change: {text in the script: text in its place}.
    """
    folder.mkdir(exist_ok=True)
    text = path.read_text()
    for old, new in (change or {}).items():
        assert old in text
        text = text.replace(old, new)

    def rank():
        os.chdir(folder)
        calls = []
        ask = ddp_train.StopSignal.requested

        def requested(self):
            calls.append(1)
            if len(calls) == stop_at and os.environ.get("RANK", "1") == "1":
                self.world.received = 15
            return ask(self)

        ddp_train.StopSignal.requested = requested
        exec(compile(text, str(path), "exec"), {"__name__": "__main__"})

    return end_all(fork_ranks(size, rank), code)


def test_diffs_are_short():
    first, second = [text for kind, text in BLOCKS if kind == "diff"]
    for text in (first, second):
        added = [line for line in text.splitlines() if re.match(r"\+ *\S", line)]
        assert len(added) <= 19


@pytest.mark.processes
def test_ported_script_is_exact_and_the_script_before_runs(scripts, tmp_path):
    """On one, two and four ranks. Other numbers if the global batch is another."""
    run_script(scripts / "before.py", 1, tmp_path / "before")
    models = []
    for size, batch in ((1, "16"), (2, "16"), (4, "16"), (1, "8")):
        change = {"Dropout(0.1)": "Tanh()", "= 16 //": f"= {batch} //"}
        folder = tmp_path / f"{size} x {batch}"
        run_script(scripts / "ported.py", size, folder, change=change)
        models.append(torch.load(folder / "model.pt", weights_only=True))
    one, two, four, other = models
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-6)
        torch.testing.assert_close(one[name], four[name], rtol=0, atol=1e-6)
    assert not torch.allclose(one["0.weight"], other["0.weight"], rtol=0, atol=1e-4)


@pytest.mark.processes
def test_ported_script_ends_if_it_trains_without_ddp(scripts, tmp_path):
    change = {"mean_loss(ddp, ": "mean_loss(model, "}
    said = run_script(scripts / "ported.py", 2, tmp_path, code=1, change=change)
    for rank, text in enumerate(said):
        assert text.startswith(f"error: rank {rank}: the ranks have different weights")
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.processes
def test_resumed_script_has_the_same_bits(scripts, tmp_path):
    """An epoch has 62 steps. A script that is stopped ends with 128 + 15, too."""
    script = scripts / "resumed.py"
    run_script(script, 2, tmp_path / "whole")
    for stop_at in (5, 62, 80):  # in mid-epoch, at an epoch's end, in mid-epoch
        parts = tmp_path / f"stopped at {stop_at}"
        first = run_script(script, 2, parts, stop_at=stop_at, code=143)
        second = run_script(script, 2, parts)
        assert_same_bits(tmp_path / "whole" / "out", parts / "out")
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
    said = run_script(script, 2, whole)[0]
    run_script(script, 2, parts, stop_at=80, code=143)
    run_script(script, 2, parts)
    assert_same_bits(whole / "out", parts / "out")
    assert 4 <= said.count("epoch ") < 30
    assert run_script(script, 2, parts) == ["", ""]
    assert_same_bits(whole / "out", parts / "out")


@pytest.mark.processes
@pytest.mark.parametrize("accum", [1, 2])
def test_mean_over_tokens_is_that_of_one_process(accum):
    """Of four sequences with other lengths, on one and on two ranks."""

    def gradient():
        with ddp_train.distributed("cpu") as world:
            torch.manual_seed(0)
            model = nn.Linear(1, 1)
            ddp = ddp_train.wrap(model, world)
            x = torch.arange(80.0).view(4, 20, 1)[world.rank :: world.size]
            lengths = torch.tensor([3, 9, 5, 20])[world.rank :: world.size, None]
            mask = torch.arange(20) < lengths
            names = {"all_gather": ddp_train.all_gather, "world": world, "mask": mask}
            exec(inline("tokens = "), names)  # of all micro-batches
            for x_part, mask_part in zip(
                x.chunk(accum), mask.chunk(accum), strict=True
            ):
                losses = ddp(x_part).squeeze(2).square() * mask_part
                names["loss_sum"] = losses.sum()
                exec(inline("(loss_sum"), names)
            return torch.cat([model.weight.grad.flatten(), model.bias.grad])

    one, two = in_ranks(1, gradient)[0], in_ranks(2, gradient)
    for found in two:
        torch.testing.assert_close(found, one)


class Numbers(torch.utils.data.IterableDataset):
    """The numbers of a stream that this loading process has to read, says the page."""

    def __init__(self, condition, world, workers):
        self.names = {"world": world, "workers": workers}
        self.condition = condition

    def __iter__(self):
        info = torch.utils.data.get_worker_info
        for number in range(23):
            names = {**self.names, "number": number, "get_worker_info": info}
            if eval(self.condition, names):
                yield number


@pytest.mark.processes
def test_items_of_a_stream_are_read_once_by_ranks_and_loading_processes():
    condition = inline("number % ")
    read = []
    for rank in (0, 1):
        world = ddp_train.World(rank, 2, torch.device("cpu"))
        stream = Numbers(condition, world, 2)
        loader = torch.utils.data.DataLoader(stream, None, num_workers=2)
        read += list(loader)
    assert sorted(read) == list(range(23))


@pytest.mark.processes
def test_stream_that_is_stopped_is_saved(tmp_path):
    """Its loading processes get the signal, too. Those of a DataLoader would end."""
    name = inline("ddp_train.Loader").split(".")[1]

    def rank():
        with ddp_train.distributed("cpu") as world:
            stop = ddp_train.StopSignal(world)
            stream = Numbers(inline("number % "), world, 2)
            loader = getattr(ddp_train, name)(stream, 1, num_workers=2)
            parts = {"model": nn.Linear(1, 1)}
            checkpoint = ddp_train.Checkpoint(tmp_path, parts, {}, world)
            for step, _ in enumerate(loader):
                if step == 2:
                    children = multiprocessing.active_children()
                    for pid in (*[child.pid for child in children], os.getpid()):
                        os.kill(pid, signal.SIGTERM)
                    time.sleep(1)  # a DataLoader raises an error now
                if stop.requested():
                    checkpoint.save(step)
                    sys.exit(0)

    end_all(fork_ranks(2, rank), 143)
    content = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert content["step"] == 2


@pytest.mark.processes
def test_ranks_end_a_stream_together():
    """Of 11 items rank 0 has six, rank 1 five: two full batches each."""

    def read():
        with ddp_train.distributed("cpu") as world:
            mine = iter(range(world.rank, 11, world.size))
            batches = []
            while True:
                batch = list(itertools.islice(mine, 2))
                names = {"all_gather": ddp_train.all_gather}
                names["has_batch"] = len(batch) == 2
                if eval(inline("if min(all_gather").split(":")[0][3:], names):
                    return batches
                batches.append(batch)

    assert in_ranks(2, read) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
