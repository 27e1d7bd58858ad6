"""Tests of README.md, docs/ and examples/.

What a page names exists. Its diffs are applied, its Python is run; so are the examples.
"""

import argparse
import contextlib
import functools
import itertools
import os
import random
import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddp_train
import harness
import lines
from harness import ROOT, TINY, flatten, fork_ranks, in_ranks, launch, processes
from test_recipes import apply

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
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


def snippet(word):
    """The block of Python on a page in which this word is."""
    code = [code for page in PAGES.values() for code in blocks(page, "python")]
    (code,) = [code for code in code if word in code]
    return textwrap.dedent(code)


def inline(beginning):
    """The span of code on a page that begins like this."""
    found = {span for page in PAGES.values() for span in spans(page)}
    (code,) = [span for span in found if span.startswith(beginning)]
    return code


# ---- What the pages show and name ----------------------------------------------------
@each_page
def test_diffs_lead_from_one_file_to_the_other(name):
    """A block without the names of the files continues the one before it."""
    series = "".join(blocks(PAGES[name], "diff")).split("--- ")[1:]
    for diff in series:
        old, new = re.match(r"(.*)\n\+\+\+ (.*)\n", diff).groups()
        found = apply(diff, (ROOT / old).read_text())
        assert found == (ROOT / new).read_text(), f"{old} does not become {new}"


def test_each_block_of_python_is_run_by_a_test():
    words = re.findall(r"snippet\(['\"](.+?)['\"]\)", Path(__file__).read_text())
    for page in PAGES.values():
        for code in blocks(page, "python"):
            assert any(word in code for word in words), code


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


# Options of git, pip, py-spy, Docker, Slurm, Ray, torchrun, torchfrtrace, open_clip,
# FlagEmbedding, of the check and of lines.py
OF_OTHER_TOOLS = """
    --3way --full-index --index-url --pid --shm-size --nodes --exclusive --requeue
    --signal --gpus-per-node --ntasks-per-node --time --partition --cpus-per-task --mem
    --working-dir --runtime-env-json --shutdown-timeout --signals-to-handle --prefix
    --gather-with-grad --local-loss --negatives_cross_device
    --compare --ranks --link --skip --steps --quick --json --only --local-rank --ema
"""


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
SGD = "torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)"


def assert_close(a, b, atol=1e-6):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def float64(change):
    """The change, and float64 as your-script.md says it."""
    line = inline("torch.set_default_dtype")
    return {**change, "from torch import nn\n": f"from torch import nn\n\n{line}\n"}


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
    code = snippet("dist.init_process_group")

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
    for size, script in ((1, "ported.py"), (2, "ported.py"), (4, "resumed.py")):
        folder = tmp_path / f"{script} on {size}"
        found = losses(run_example(size, script, folder)[0])
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
@pytest.mark.parametrize("size", [1, 2, 4])
def test_resumed_script_has_the_same_bits(size, tmp_path):
    """An epoch has 31 steps. It saves at its end, and each 20 steps."""
    change = DROPOUT
    if size == 4:  # otherwise DDP adds in another order after a resume
        wrapped = f"DistributedDataParallel(model, {inline('find_unused')})"
        change = {**DROPOUT, "DistributedDataParallel(model)": wrapped}
    untouched, parts = tmp_path / "untouched", tmp_path / "parts"
    run_example(size, "resumed.py", untouched, change)
    for call, step in (
        ("StopSignal.requested 25 SIGTERM", 25),  # in mid-epoch
        ("StopSignal.requested 10 SIGKILL", 31),  # in step 35
        ("StopSignal.requested 31 SIGTERM", 62),  # in the last step of an epoch
        ("evaluate 1 SIGKILL", 62),
        ("StopSignal.requested 23 SIGKILL", 80),  # in step 85
        ("", 93),
    ):
        run_example(size, "resumed.py", parts, change, call and f"{call} {size - 1}")
        assert saved(parts, "out/resumed.pt")["step"] == step
    for name in ("model.pt", "out/resumed.pt"):
        assert flatten(saved(parts, name)) == flatten(saved(untouched, name))


@processes
def test_sentences_of_different_lengths_train_alike_on_any_number_of_ranks(tmp_path):
    texts = []
    for size in (1, 2, 3):
        texts += run_example(size, "lengths.py", tmp_path / f"{size}", float64({}))[:1]
        assert_close(saved(tmp_path / f"{size}"), saved(tmp_path / "1"), 1e-12)
    first, *others = [re.findall(r"epoch .*", text) for text in texts]
    assert others == [first, first]
    assert losses("\n".join(first))[2] < 0.1


@processes
def test_batches_by_length_hold_each_sentence_once_and_resume():
    lengths = random.Random(0).choices(range(5, 50), k=1001)

    def rank():
        with ddp_train.distributed("cpu"):
            names = runpy.run_path(str(ROOT / "examples" / "lengths.py"))
            sampler = names["BatchesByLength"](lengths, seed=0)
            sampler.set_epoch(1)
            batches = list(sampler)
            sampler.set_epoch(1, 2 * 32)
            assert list(sampler) == batches[2:] and len(sampler) == 29
            sampler.set_epoch(2)
            assert list(sampler) != batches
            return batches

    batches = [sum(parts, []) for parts in zip(*in_ranks(3, rank))]
    assert len(set(sum(batches, []))) == sum(map(len, batches)) == 31 * 32
    left_out = {*range(1001)} - set(sum(batches, []))
    assert min(lengths[i] for i in left_out) < 30  # not only the longest
    for batch in batches:
        assert max(lengths[i] for i in batch) - min(lengths[i] for i in batch) < 16


@processes
def test_ranks_started_by_spawn_train_as_others_do(data, tmp_path):
    options = [*TINY, "--data", data, "--out"]
    harness.train(2, *options, tmp_path / "a")
    command = [sys.executable, ROOT / "examples" / "spawn.py", 2]
    port = {"MASTER_PORT": str(harness.free_port())}
    launch(*command, *options, tmp_path / "b", env=port).end()
    harness.assert_same_run(tmp_path / "a", tmp_path / "b")


# ---- Code of the pages, in the examples ----------------------------------------------
def noise():
    """The same as that of the old script, if this draws with the same seed."""
    seed, draw = inline('ddp.seed_all("noise", 0'), inline("torch.randn(32, 8)")
    before = {
        "import torch\n": "import ddp_train as ddp\nimport torch\n",
        "for x, y in loader": "for step, (x, y) in enumerate(loader, 31 * epoch)",
        "loss = nn": f"{seed}; x = x + 0.1 * torch.randn(32, 8); loss = nn",
    }
    after = {
        'ddp.seed_all("step"': f'{seed}; noise = {draw}; ddp.seed_all("step"',
        "wrapped(x)": "wrapped(x + 0.1 * noise)",
    }
    return before, after


def batch_norm():
    """With Adam, for which the bias before it must be frozen."""
    adam = {SGD: "torch.optim.Adam(model.parameters(), 1e-2)"}
    frozen = inline("model[0].bias")
    define = snippet("class SumOverRanks").partition("def gather")[0]
    define += snippet("class BatchNormOverRanks")
    before = {
        "nn.Tanh()": "nn.BatchNorm1d(64), nn.Tanh()",
        "    optimizer =": f"    {frozen}\n    optimizer =",
    }
    after = {
        "nn.Tanh()": "BatchNormOverRanks(64), nn.Tanh()",
        "    wrapped =": f"    {frozen}\n    wrapped =",
        "def score": f"{define}\n\ndef score",
    }
    return before | adam, after | adam


def loss_that_compares_samples():
    loss = "nn.functional.cross_entropy(found @ y.T, torch.arange(len(y)))"
    define = f"def contrastive(found, y):\n    return {loss}\n\n\ndef main"
    gather, _, line = snippet("class SumOverRanks").strip().rpartition("\n")
    old = "loss = nn.functional.mse_loss({}(x), y)\n            optimizer"
    before = {
        "def main": define,
        old.format("model"): "loss = contrastive(model(x), y)\n            optimizer",
    }
    after = {
        "def main": f"{gather}\n\n{define}",
        old.format("wrapped"): line.replace("labels", "y") + "\n            optimizer",
    }
    return before, after


def dropout():
    """The script before cannot have it: one rank takes its place."""
    after = {
        "nn.Tanh()": "nn.Tanh(), GlobalDropout()",
        'ddp.seed_all("step", 0, step, rank)': inline('ddp.seed_all("step", 0, step)'),
        "def score": f"{snippet('class GlobalDropout')}\n\ndef score",
    }
    return None, after


@processes
@pytest.mark.parametrize(
    "case", [noise, batch_norm, loss_that_compares_samples, dropout]
)
def test_any_number_of_ranks_trains_as_one_process_does(case, tmp_path):
    before, after = case()
    if before is None:
        run_example(1, "ported.py", tmp_path, float64(after))
    else:
        run_example(1, "before.py", tmp_path, float64(before))
    expected = saved(tmp_path)
    for size in (2, 4):
        run_example(size, "ported.py", tmp_path, float64(after))
        assert_close(saved(tmp_path), expected, 1e-12)


@processes
def test_dataset_that_draws_is_exact_after_a_resume_and_with_workers(tmp_path):
    options = inline("DataLoader(train_set, **options").partition("**ddp")[2]
    define = snippet("class SamplerWithEpoch")
    change = {
        "def score": f"{define}\n\ndef score",
        "ddp.ResumableSampler(train_set": "SamplerWithEpoch(train_set",
        "train_set = Tensor": "train_set = Noisy(Tensor",
        "x[:1001].sin())": "x[:1001].sin()))",
    }
    workers = {"sampler=sampler, drop": f"sampler=sampler, **ddp{options[:-1]}, drop"}
    change, workers = float64(change), float64(change | workers)
    one, parts = tmp_path / "one", tmp_path / "parts"
    run_example(1, "resumed.py", one, change)
    stop = "StopSignal.requested 45 SIGTERM 0"
    run_example(2, "resumed.py", parts, change, fault=stop)
    run_example(1, "resumed.py", parts, workers)
    assert_close(saved(parts), saved(one), 1e-12)


@processes
def test_best_checkpoint_tracker_and_early_stopping(tmp_path):
    """The loss rises. So the first epoch is the best, and the third is the last."""
    writer = "type('', (), {'add_scalar': lambda *a: print('tracked', *a[1:])})()"
    begin = f"import math; SummaryWriter = lambda folder: {writer}; "
    begin += f"{inline('best, best_epoch')}\n    {inline('if rank == 0: tracker')}\n"
    in_step = textwrap.indent(snippet("mean_over_ranks"), " " * 12)
    after_epoch = textwrap.indent(snippet("best_epoch"), " " * 8)
    change = {
        SGD: "torch.optim.SGD(model.parameters(), 1e-3, maximize=True)",
        "    stop = ddp": f"    {begin}    stop = ddp",
        "while epoch < 3:": inline("while epoch <").replace("< 3", "< 30"),
        "            done += batch_size": f"{in_step}            done += batch_size",
        "        epoch, done = epoch": f"{after_epoch}        epoch, done = epoch",
    }
    tracked = [r"tracked loss (\S+) (\d+)", r"tracked val_loss (\S+) (\d+)"]
    first = run_example(1, "resumed.py", tmp_path / "one", change)[0]
    texts = run_example(2, "resumed.py", tmp_path, change)
    assert "tracked" not in texts[1]
    for pattern, steps in zip(tracked, (["20", "40", "60", "80"], ["31", "62", "93"])):
        found, expected = re.findall(pattern, texts[0]), re.findall(pattern, first)
        assert [step for _, step in found] == steps
        assert [float(loss) for loss, _ in found] == pytest.approx(
            [float(loss) for loss, _ in expected]
        )
    assert saved(tmp_path, "out/best.pt")["step"] == 31


@processes
def test_run_starts_from_a_checkpoint_of_one_gpu(tmp_path):
    state = '{"model": model.state_dict(), "optimizer": optimizer.state_dict()}'
    change = {'model.state_dict(), "model.pt"': f'{state}, "old.pt"'}
    before = losses(run_example(1, "before.py", tmp_path, change)[0])
    block = textwrap.indent(snippet("if saved is None"), " " * 4)
    change = {"    def save()": f"{block}\n    def save()"}
    run_example(1, "resumed.py", tmp_path, change)
    expected = saved(tmp_path)
    (tmp_path / "out/resumed.pt").unlink()
    texts = run_example(2, "resumed.py", tmp_path, change)
    assert_close(saved(tmp_path), expected)
    assert losses(texts[0])[0] < before[2]  # it goes on learning


def test_weights_of_another_run_are_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, old = nn.Linear(2, 2), nn.Linear(2, 2).state_dict()
    torch.save(old, "old.pt")
    exec(inline("model.load_state_dict(torch.load("), {"torch": torch, "model": model})
    assert_close(dict(model.state_dict()), dict(old))
    wrapped = {f"module.{name}": value for name, value in old.items()}
    assert eval(inline("{k.removeprefix"), {"old": wrapped}) == old


# ---- Code of the pages, alone --------------------------------------------------------
@processes
def test_accumulated_loss_per_token_is_that_of_one_process():
    """Steps of three batches, the last of two, of sequences of different lengths."""

    def rank():
        with ddp_train.distributed("cpu"):
            rank, world_size = dist.get_rank(), dist.get_world_size()
            torch.manual_seed(0)
            model = nn.Linear(1, 1)
            wrapped = DistributedDataParallel(model) if world_size > 1 else model
            whole = []
            for _ in range(5):
                mask = torch.arange(20) < torch.randint(1, 21, (4, 1))
                x = torch.randn(4, 20, 1)
                whole.append((x, 2 * x, mask))
            mine = [[rows[rank::world_size] for rows in batch] for batch in whole]
            names = {"loader": mine, "wrapped": wrapped, "contextlib": contextlib}
            names |= {"ddp": ddp_train, "rank": rank, "world_size": world_size}
            names |= {"step": 0, "token_losses": squared_errors, "accum": 3}
            names |= {"optimizer": torch.optim.SGD(model.parameters(), 0.1)}
            names["itertools"] = itertools
            per_token, old = (
                snippet("token_losses"),
                "(losses.sum() * world_size / tokens)",
            )
            assert old in per_token
            new = inline("(loss / len(batches))").partition(".")[0]
            new = new.replace("loss", "losses.mean()")
            results = []
            for code in (per_token, per_token.replace(old, new)):
                names["step"] = 0
                exec(code, names)
                assert names["step"] == 2
                results.append(float(model.weight))
            return results

    found = [in_ranks(size, rank)[0] for size in (1, 2, 4)]
    assert found == [pytest.approx(found[0])] * 3


def squared_errors(found, expected):
    return (found - expected).square().squeeze(2)


@processes
def test_score_of_the_whole_set_has_the_rows_of_all_ranks_in_their_order():
    """Three samples: of four ranks, one has none. And equal rows of all ranks."""

    def rank():
        with ddp_train.distributed("cpu") as device:
            rank, world_size = dist.get_rank(), dist.get_world_size()
            y = nn.functional.normalize(torch.arange(6.0).view(3, 2).cos())
            mine = range(rank, 3, world_size)
            names = {"ddp": ddp_train, "torch": torch, "device": device}
            names |= {"model": nn.Identity(), "world_size": world_size}
            names["val_loader"] = DataLoader(TensorDataset(y, y), 1, sampler=mine)
            exec(snippet("recall"), names)
            found = names["wanted"].equal(y), names["hits"].tolist()
            names["x"] = torch.arange(8).view(8, 1)[rank::world_size]
            return found, eval(inline("torch.stack("), names).flatten().tolist()

    for size in (1, 4):
        for found in in_ranks(size, rank):
            assert found == ((True, [True] * 3), list(range(8)))


def write_program(path, changes):
    """ddp_train.py with changes {old text: text in its place}."""
    text = harness.SCRIPT.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return path


@processes
def test_ratio_of_two_sums_is_logged(tiny, out, tmp_path):
    """Each of the three samples has 2 errors in 3 words, and counts once."""
    changes = {
        '"val_loss": compute_loss(model, batch) * len(x)': '"errors": 2, "words": 3',
        "device)\n        log(": f"device)\n        {inline('means[')}\n        log(",
    }
    program = write_program(tmp_path / "program.py", changes)
    launch(sys.executable, program, *tiny).end()
    assert list(harness.metrics(out, "wer").values()) == pytest.approx([2 / 3] * 4)


@pytest.mark.recipes
def test_model_from_hugging_face_trains(tiny, out, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "gpt2"
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32}
    config = transformers.GPT2Config(**shape, vocab_size=256)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    block = snippet("AutoModelForCausalLM").replace('"gpt2"', f'"{folder}"')
    changes = {"# ---- DATA": f"{block}\n\n# ---- DATA"}
    program = write_program(tmp_path / "program.py", changes)
    launch(*harness.torchrun(2, program, *tiny)).end()
    transformers.AutoModelForCausalLM.from_config(config).load_state_dict(
        harness.load(out)["model"]
    )
    first, *_, last = harness.metrics(out, "val_loss").values()
    assert last < first - 0.1


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
