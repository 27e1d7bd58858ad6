"""Tests of README.md, docs/ and examples/.

Each diff on a page is part of the real one. What a page names exists. The examples run.
"""

import argparse
import contextlib
import difflib
import functools
import itertools
import os
import re
import runpy
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddp_train
import lines
from harness import ROOT, flatten, fork_ranks, in_ranks, processes

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
OWN = PAGES["docs/your-script.md"]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
each_page = pytest.mark.parametrize("name", PAGES)


def blocks(text, kind):
    return [code for of_kind, code in BLOCK.findall(text) if of_kind == kind]


def spans(text):
    """All `code` in the text, outside the blocks of code."""
    return re.findall(r"`([^`]+)`", BLOCK.sub("", text))


def commands(text):
    """Each line of the blocks of commands, and each span of code."""
    return "".join(blocks(text, "sh")).splitlines() + spans(text)


# ---- What the pages show and name ----------------------------------------------------
@each_page
def test_diffs_are_those_of_the_files(name):
    """Where a line begins with @@, a page may leave out lines of the diff.

    A block without the names of the files shows more of the diff before it.
    """
    for code in blocks(PAGES[name], "diff"):
        head, *parts = re.split(r"^@@.*\n", code, flags=re.MULTILINE)
        named = re.fullmatch(r"--- (.*)\n\+\+\+ (.*)\n", head)
        if named:
            texts = [(ROOT / path).read_text().splitlines() for path in named.groups()]
            whole = [line.rstrip() for line in difflib.unified_diff(*texts, n=10**6)]
        else:
            parts.insert(0, head)
        place = 0
        for part in parts:
            lines = [line.rstrip() for line in part.splitlines()]
            while whole[place : place + len(lines)] != lines:
                place += 1
                assert place < len(whole), f"not in the diff, or not here:\n{part}"
            place += len(lines)


@each_page
def test_links_lead_somewhere(name):
    text = BLOCK.sub("", PAGES[name])
    for target in re.findall(r'(?:\]\(|src=")(?!http)([^)"\s]+)', text):
        path, _, heading = target.partition("#")
        path = (ROOT / name).parent / path if path else ROOT / name
        assert path.exists(), target
        assert not heading or heading in names_on_github(path.read_text()), target


def names_on_github(text):
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


OF_OTHER_TOOLS = "--3way --index-url --pid --shm-size --nodes --exclusive --requeue"
OF_OTHER_TOOLS += " --signal --gpus-per-node --ntasks-per-node --time --partition"
OF_OTHER_TOOLS += " --working-dir --runtime-env-json"  # ray
OF_OTHER_TOOLS += " --shutdown-timeout --signals-to-handle"  # torchrun 2.9 lacks them
OF_OTHER_TOOLS += " --prefix"  # torchfrtrace
OF_OTHER_TOOLS += " --compare --ranks --link --skip --steps --quick"  # tests/check.py
OF_OTHER_TOOLS += " --values"  # tests/lines.py


@each_page
def test_targets_of_make_and_options_exist(name, capsys):
    makefile = (ROOT / "Makefile").read_text()
    with pytest.raises(SystemExit):
        ddp_train.parse_args(["--help"])
    options = {*re.findall(r"--\w+", capsys.readouterr().out), *OF_OTHER_TOOLS.split()}
    options |= set(get_args_parser()._option_string_actions)  # of torchrun
    for command in commands(PAGES[name]):
        for target in re.findall(r"\bmake(?: +\w+=\S+)* +([a-z][\w-]*)", command):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), command
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", command):
            assert option in options, command


def test_changes_of_lines_py_fit_the_program():
    assert lines.find_changes()  # it stops at one that does not


# ---- The examples --------------------------------------------------------------------
DROPOUT = {"nn.Tanh()": "nn.Tanh(), nn.Dropout(0.1)"}
FLOAT64 = "torch.set_default_dtype(torch.float64)"
FLOAT64 = {"torch.manual_seed": f"{FLOAT64}; torch.manual_seed"}
assert_close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-6)


def run_example(size, name, folder, change=None, fault="", code=0):
    """Run an example in so many forked ranks. change: {old text: text in its place}."""
    folder.mkdir(exist_ok=True)
    text = (ROOT / "examples" / name).read_text()
    for old, new in (change or {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / name).write_text(text)

    def rank():
        os.chdir(folder)
        runpy.run_path(str(folder / name), run_name="__main__")

    codes = [code] * size
    if "SIGKILL" in fault:
        codes = [1] * (size - 1) + [-9]  # the last rank is killed
    ranks = fork_ranks(size, rank, {"FAULT": fault}, name)
    return [rank.end(codes.pop(0)) for rank in ranks]


def losses(text):
    return [float(loss) for loss in re.findall(r"epoch \d: .*loss (\S+)", text)]


def saved(folder, name="model.pt"):
    return torch.load(folder / name, weights_only=True)


@processes
def test_idea_in_the_readme_trains_as_the_example_does_on_one_and_two_ranks(tmp_path):
    """The lines that a reader may paste run as they stand."""
    (code,) = blocks(PAGES["README.md"], "python")

    def rank():
        os.chdir(tmp_path)
        exec(code, {})

    for process in fork_ranks(2, rank):
        process.end()
    for size in (1, 2):
        folder = tmp_path / f"{size}"
        assert losses(run_example(size, "idea.py", folder)[0])[2] < 0.1
        assert_close(saved(folder, "idea.pt"), saved(tmp_path, "idea.pt"))


@processes
def test_ported_script_ends_with_the_weights_of_the_script_before(tmp_path):
    expected = losses(run_example(1, "before.py", tmp_path / "before")[0])
    runs = [(size, "ported.py", {}) for size in (1, 2, 4)]
    runs.append((2, "resumed.py", {"0.1 * torch.randn": "0.0 * torch.randn"}))
    for size, script, change in runs:
        folder = tmp_path / f"{script} on {size}"
        found = losses(run_example(size, script, folder, change)[0])
        assert found == pytest.approx(expected, rel=0, abs=3e-6)  # they are rounded
        assert_close(saved(folder), saved(tmp_path / "before"))


@processes
@pytest.mark.parametrize("name", ["idea.py", "ported.py", "resumed.py"])
def test_each_rank_and_step_draws_different_dropout(name, tmp_path):
    mask = "nn.functional.dropout(torch.ones(64)).int().tolist()"
    change = {"optimizer.step()": f'print("mask", {mask}); optimizer.step()'}
    texts = run_example(2, name, tmp_path, change)
    masks = re.findall("mask .*", "\n".join(texts))
    assert len(masks) == len(set(masks)) == 2 * 93  # ranks * steps


@processes
@pytest.mark.parametrize("name", ["idea.py", "ported.py"])
def test_batch_that_ranks_cannot_share_is_refused_in_one_line(name, tmp_path):
    for text in run_example(3, name, tmp_path, code=1):
        assert "3 ranks cannot share a batch of 32 equally\n" in text
        assert "Traceback" not in text


@processes
def test_noise_is_the_same_on_any_number_of_ranks(tmp_path):
    """And that of the old script, if this draws with the same seed."""
    seed, draw = inline('ddp.seed_all("noise", 0'), inline("torch.randn(32, 8)")
    change = {
        "import torch\n": "import ddp_train as ddp\nimport torch\n",
        "for x, y in loader": "for step, (x, y) in enumerate(loader, 31 * epoch)",
        "loss = nn": f"{seed}; x = x + 0.1 * torch.randn(32, 8); loss = nn",
    }
    run_example(1, "before.py", tmp_path, change | FLOAT64)
    expected = saved(tmp_path)
    change = {
        'ddp.seed_all("step"': f'{seed}; noise = {draw}; ddp.seed_all("step"',
        "wrapped(x)": "wrapped(x + 0.1 * noise)",
    }
    for size in (1, 2, 4):
        run_example(size, "ported.py", tmp_path, change | FLOAT64)
        torch.testing.assert_close(saved(tmp_path), expected, rtol=0, atol=1e-12)


@processes
@pytest.mark.parametrize("size", [1, 2])
def test_resumed_script_has_the_same_bits(size, tmp_path):
    """An epoch has 31 steps. It saves at its end, and each 20 steps."""
    untouched, parts = tmp_path / "untouched", tmp_path / "parts"
    run_example(size, "resumed.py", untouched, DROPOUT)
    for call, step in (
        ("StopSignal.requested 25 SIGTERM", 25),  # in mid-epoch
        ("StopSignal.requested 10 SIGKILL", 31),  # in step 35
        ("StopSignal.requested 31 SIGTERM", 62),  # in the last step of an epoch
        ("evaluate 1 SIGKILL", 62),
        ("StopSignal.requested 23 SIGKILL", 80),  # in step 85
        ("", 93),
    ):
        run_example(size, "resumed.py", parts, DROPOUT, call and f"{call} {size - 1}")
        assert saved(parts, "out/resumed.pt")["step"] == step
    for name in ("model.pt", "out/resumed.pt"):
        assert flatten(saved(parts, name)) == flatten(saved(untouched, name))


@processes
def test_resumed_script_is_exact_on_fewer_ranks_and_with_workers(tmp_path):
    one, parts, workers = tmp_path / "one", tmp_path / "parts", tmp_path / "workers"
    run_example(1, "resumed.py", one)
    run_example(2, "resumed.py", parts, fault="StopSignal.requested 45 SIGTERM 0")
    run_example(1, "resumed.py", parts)
    assert_close(saved(parts), saved(one))
    run_example(1, "resumed.py", workers, {"workers=0": "workers=2"})
    assert flatten(saved(workers)) == flatten(saved(one))


@processes
def test_best_checkpoint_tracker_and_early_stopping(tmp_path):
    """The loss rises. So the first epoch is the best, and the third is the last."""
    added = textwrap.indent(snippet("tracker"), " " * 8)
    writer = "type('', (), {'add_scalar': lambda *a: print('tracked', *a[2:])})()"
    begin = f"import math; SummaryWriter = lambda folder: {writer}; "
    begin += f"{inline('best, best_epoch')}\n    {inline('if rank == 0: tracker')}\n"
    change = {
        "0.2, momentum=0.9": "1e-3, maximize=True",
        "    stop = ddp": f"    {begin}    stop = ddp",
        "while epoch < 3:": inline("while epoch <").replace("< 3", "< 30"),
        "        epoch, done = epoch": f"{added}        epoch, done = epoch",
    }
    texts = run_example(2, "resumed.py", tmp_path, change)
    assert [text.count("tracked") for text in texts] == [3, 0]
    first, _, third = re.findall(r"tracked (\S+) (\d+)", texts[0])
    assert first[0] < third[0] and third[1] == "93"
    assert saved(tmp_path, "out/best.pt")["step"] == 31


# ---- Code in the text of your-script.md ----------------------------------------------
def inline(beginning):
    (code,) = [span for span in spans(OWN) if span.startswith(beginning)]
    return code


def snippet(word):
    """The block of Python in which this word is."""
    (code,) = [code for code in blocks(OWN, "python") if word in code]
    return textwrap.dedent(code)


@processes
def test_accumulated_loss_per_token_is_that_of_one_rank():
    """One step of three batches, each of four sequences of different lengths."""

    def rank():
        with ddp_train.distributed("cpu"):
            rank, world_size = dist.get_rank(), dist.get_world_size()
            torch.manual_seed(0)
            model = nn.Linear(1, 1)
            wrapped = DistributedDataParallel(model) if world_size > 1 else model
            batches = []
            for _ in range(3):
                mask = torch.arange(20) < torch.randint(1, 21, (4, 1))
                x = torch.randn(4, 20, 1)
                batches.append([rows[rank::world_size] for rows in (x, 2 * x, mask)])
            names = {"batches": batches, "wrapped": wrapped, "contextlib": contextlib}
            names |= {"ddp": ddp_train, "rank": rank, "world_size": world_size}
            names |= {"step": 0, "token_losses": squared_errors}
            exec(snippet("tokens"), names)
            return float(model.weight.grad)

    gradients = [in_ranks(size, rank)[0] for size in (1, 2, 4)]
    assert gradients == pytest.approx([gradients[0]] * 3)


def squared_errors(found, expected):
    return (found - expected).square().squeeze(2)


@processes
def test_score_of_the_whole_set_has_the_rows_of_all_ranks():
    """Three samples: of four ranks, one has none. And all rows in the global order."""

    def rank():
        with ddp_train.distributed("cpu") as device:
            rank, world_size = dist.get_rank(), dist.get_world_size()
            y = torch.arange(3.0)
            x = torch.stack([y.sin(), y.cos()], 1)
            names = {"ddp": ddp_train, "torch": torch, "device": device}
            names["model"] = nn.Linear(2, 1)
            nn.init.ones_(names["model"].weight)
            mine = range(rank, 3, world_size)
            names["val_loader"] = DataLoader(TensorDataset(x, y), 2, sampler=mine)
            names["roc_auc_score"] = zip
            exec(snippet("roc_auc_score"), names)
            found = sorted(names["rows"][:, 1].tolist())
            names["rows"] = torch.arange(8).view(8, 1)[rank::world_size]
            return found, eval(inline("torch.stack("), names).flatten().tolist()

    for size in (1, 4):
        for found in in_ranks(size, rank):
            assert found == ([0.0, 1.0, 2.0], list(range(8)))


@processes
def test_weighted_samples_are_those_of_one_rank():
    """Nine samples, from the third on."""

    def rank():
        with ddp_train.distributed("cpu"):
            names = {"ddp": ddp_train, "torch": torch}
            names["weights"] = torch.tensor([0.0, 0, 0, 1, 2, 3, 4, 5, 6])
            exec(snippet("class WeightedSampler"), names)
            sampler = names["WeightedSampler"](range(9), 0)
            sampler.set_epoch(1, 3)
            return list(sampler)

    (order,), (first, second) = in_ranks(1, rank), in_ranks(2, rank)
    assert [first, second] == [order[0::2], order[1::2]]
    assert min(order) >= 3 and len(order) == 6


def test_items_of_a_stream_are_read_once_by_ranks_and_workers():
    names, read = {"world_size": 2, "workers": 3}, []
    for names["rank"], worker in itertools.product(range(2), range(3)):
        names["get_worker_info"] = functools.partial(argparse.Namespace, id=worker)
        for names["number"] in range(23):
            if eval(inline("number % "), names):
                read.append(names["number"])
    assert sorted(read) == list(range(23))


def test_batches_by_hand():
    names = {"order": list(range(40)), "B": 8, "world_size": 2, "i": 3}
    mine = [eval(inline("order["), names, {"rank": rank}) for rank in range(2)]
    assert mine == [[24, 26, 28, 30], [25, 27, 29, 31]]
