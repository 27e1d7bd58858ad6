"""Tests of recipes/: each applies, and does on two ranks what its head says.

The first part is fast. The rest has the mark `recipes`: make test-recipes runs it.
"""

import functools
import gzip
import importlib.util
import itertools
import math
import os
import re
import shutil
import sys

import numpy
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import harness
from harness import TINY, assert_same_run, in_ranks, launch, load, metrics, train
from recipes import recipe as tool

PLAIN = harness.SCRIPT.read_text()
PAIRS = list(itertools.combinations(tool.RECIPES, 2))
STEPS = 32
runs = pytest.mark.recipes


# ---- Each applies, alone and in pairs ------------------------------------------------
def with_recipes(*names):
    """The text of ddp_train.py with these recipes. SystemExit: they do not merge."""
    text = PLAIN
    for name in names:
        text = tool.apply(tool.RECIPES[name].read_text(), text)
    return text


def check(path):
    """It compiles, uses no undefined names, and is formatted like ddp_train.py."""
    compile(path.read_text(), path, "exec")
    if importlib.util.find_spec("ruff"):
        for words in (["format", "--diff"], ["check"]):
            command = [sys.executable, "-m", "ruff", *words, "--config"]
            launch(*command, harness.ROOT / "pyproject.toml", path).end()


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository with ddp_train.py and the recipes."""
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)  # a hook of git has set them
    launch("git", "init", cwd=tmp_path).end()
    shutil.copy(harness.SCRIPT, tmp_path)
    shutil.copytree(tool.HERE, tmp_path / "recipes")
    launch("git", "add", "ddp_train.py", cwd=tmp_path).end()
    return tmp_path


@pytest.mark.parametrize("name", tool.RECIPES)
@pytest.mark.parametrize("how", ["git apply --3way", "patch -p1 -i", "tool"])
def test_recipe_applies(name, how, clone):
    out = clone / "ddp_train.py"
    command = [*how.split(), tool.RECIPES[name]]
    if how == "tool":
        out = clone / "my_train.py"
        command = [sys.executable, tool.__file__, name, out]
    if not shutil.which(command[0]):
        pytest.skip(f"needs {command[0]}")
    launch(*command, cwd=clone).end()
    assert out.read_text() == with_recipes(name)
    check(out)


def listed_pairs():
    """The pairs that do not go together, from README.md."""
    text = (tool.HERE / "README.md").read_text()
    return {tuple(sorted(pair)) for pair in re.findall(r"`(\w+)` and `(\w+)`", text)}


def test_pairs_that_do_not_merge_are_listed(tmp_path):
    assert listed_pairs() <= set(PAIRS)
    for a, b in set(PAIRS) - listed_pairs():
        both = tmp_path / f"{a}_{b}.py"
        both.write_text(with_recipes(a, b))
        assert both.read_text() == with_recipes(b, a)
        check(both)


def test_tool_lists_refuses_and_does_not_overwrite(tmp_path):
    command = [sys.executable, tool.__file__]
    lines = launch(*command).end().splitlines()
    assert [line.split()[0] for line in lines] == list(tool.RECIPES)
    (tmp_path / "old.py").write_text("precious")
    for words in ("fsdp2", "fsdp3 new.py", "fsdp2 old.py"):
        said = launch(*command, *words.split(), cwd=tmp_path).end(1)
        assert re.search("keep_last|exists", said) and said.count("\n") == 1
    launch(*command, "fp16", "fsdp2", "new.py", cwd=tmp_path).end(1)
    assert [path.name for path in tmp_path.glob("*.py")] == ["old.py"]
    assert (tmp_path / "old.py").read_text() == "precious"


def test_tool_updates_the_diffs(clone):
    """ddp_train.py has changed next to some recipes, and in the lines of one."""
    changed = PLAIN.replace("Move tensors", "Carry tensors")
    changed = changed.replace('"count": len(x)}', '"count": len(y)}')
    (clone / "ddp_train.py").write_text(changed)
    said = launch(sys.executable, "recipes/recipe.py", "--refresh", cwd=clone).end(1)
    assert "they conflict: ['images']" in said
    for name, path in tool.RECIPES.items():
        old, new = path.read_text(), (clone / "recipes" / path.name).read_text()
        assert (new == old) == (name == "images")
        assert new.startswith(old.partition("diff --git")[0])
        if name != "images":
            tool.apply(new, changed)


# ---- What the runs share -------------------------------------------------------------
@pytest.fixture
def use(tmp_path, monkeypatch):
    """use("fp16", "images"): then train() runs a program with these recipes."""

    def use_recipes(*names):
        # Optional, or imported late: it must be imported before the ranks fork.
        if "images" in names:
            pytest.importorskip("sklearn.datasets")
        if "hugging_face" in names:
            pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
        script = tmp_path / f"with_{'_'.join(names)}.py"
        script.write_text(with_recipes(*names))
        spec = importlib.util.spec_from_file_location(script.stem, script)
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        monkeypatch.setattr(harness, "ddp_train", program)
        return program

    return use_recipes


@pytest.fixture(scope="session")
def larger(tmp_path_factory):
    """Options: a model that is not tiny, and a save in the middle."""
    path = tmp_path_factory.mktemp("data") / "data"
    path.write_bytes(harness.SCRIPT.read_bytes()[:11_050])
    words = [*TINY, "--dim", 64, "--data", path, "--dropout", 0.1]
    return [*words, "--max_steps", STEPS, "--save_every", 16]


def overflow(first, last):
    """In these steps the gradient of rank 1 is infinite."""
    program = harness.ddp_train
    compute_loss = program.compute_loss
    calls = itertools.count(1)

    def infinite(*args):
        loss = compute_loss(*args)
        if loss.requires_grad and first <= next(calls) <= last:
            loss.register_hook(functools.partial(torch.mul, other=math.inf))
        return loss

    if os.environ["RANK"] == "1":
        program.compute_loss = infinite


# ---- The runs ------------------------------------------------------------------------
OPTIONS = {
    "fp16": ["--precision", "fp16"],
    "hugging_face": ["--vocab", 1000],
}


@runs
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pair_runs_or_is_listed(pair, use, tiny, data):
    """It trains, resumes and evaluates. With fp16 there is an overflow."""
    try:
        use(*pair)
    except SystemExit:
        return  # They do not merge, and are listed: another test checks it.
    numpy.arange(1000, dtype="uint16").tofile(data)  # tokens, or bytes for the others
    options = [*tiny, *OPTIONS.get(pair[0], []), *OPTIONS.get(pair[1], [])]
    patch = functools.partial(overflow, 25, 25) if "fp16" in pair else None
    code = int(pair in listed_pairs())
    train(2, *options, "--max_steps", 70, code=code, patch=patch)
    if code == 0:
        assert "from step 70 to 72" in train(2, *options, "--max_steps", 72)[0]


@runs
def test_where_the_time_goes(use, larger, tmp_path):
    """Shares from 0 to 1, a trace of five steps from each rank, and the same bits."""
    train(2, *larger, "--out", tmp_path / "plain")
    program = use("where_the_time_goes")
    train(2, *larger, "--out", tmp_path)
    waiting = metrics(tmp_path, "waiting").values()
    assert len(waiting) == STEPS and 0 <= min(waiting) and max(waiting) < 1
    for rank in (0, 1):
        trace = gzip.decompress((tmp_path / f"trace.{rank}.json.gz").read_bytes())
        assert trace.count(b'"Optimizer.step#AdamW.step"') == 5
        assert b'"gloo:all_reduce"' in trace
    assert_same_run(tmp_path / "plain", tmp_path)
    # One process ends or fails during the trace: an open profile would crash it.
    for words, code in (("--max_steps 12", 0), ("--lr 1e30 --log_every 12", 1)):
        options = [*larger, "--out", tmp_path / words, *words.split()]
        launch(sys.executable, program.__file__, *options).end(code)
        assert (tmp_path / words / "trace.0.json.gz").exists()


@runs
@pytest.mark.parametrize("accum", [1, 2])
def test_fsdp2(use, larger, tmp_path, accum):
    """Half of the weights and moments on each rank. The same numbers as with DDP."""
    # 17 samples are evaluated: rank 0 has one more batch than rank 1.
    options = [*larger, "--dropout", 0, "--batch_size", 8 // accum]
    options += ["--accum", accum, "--out"]
    a, b, c, d = map(tmp_path.joinpath, "abcd")
    train(2, *options, a)
    use("fsdp2")

    def measure():
        optimizers = []
        register_optimizer_step_post_hook(lambda *args: optimizers.append(args[0]))
        harness.main(*options, b)
        tensors = []
        for weight, state in optimizers[0].state.items():
            tensors += [weight, state["exp_avg"], state["exp_avg_sq"]]
        return sum(tensor.to_local().numel() for tensor in tensors)

    whole = 3 * sum(weight.numel() for weight in load(a)["model"].values())
    assert in_ranks(2, measure) == pytest.approx([whole / 2] * 2, rel=0.02)
    for name in ("loss", "grad_norm", "val_loss"):
        assert metrics(b, name) == pytest.approx(metrics(a, name), rel=1e-4)
    stop = "train_step 5 SIGTERM 0"
    train(2, *options, c, code=143, fault=stop)
    shutil.copytree(c, d)
    train(2, *options, c)
    assert_same_run(b, c)
    (c / "metrics.jsonl").unlink()
    train(2, *options, c)  # a finished run evaluates what was saved
    assert metrics(c, "val_loss") == {STEPS: metrics(b, "val_loss")[STEPS]}
    train(1, *options, d, "--accum", 2 * accum, code=143, fault=stop)
    use()
    train(2, *options, d)
    assert metrics(d, "loss") == pytest.approx(metrics(a, "loss"), rel=1e-4)


@runs
def test_images(use, tmp_path):
    """More than 90 % are right, and one rank gets the same evaluation as two."""
    use("images")
    options = ["--device", "cpu", "--epochs", 4, "--out"]
    train(2, *options, tmp_path)
    accuracy = metrics(tmp_path, "accuracy")
    last = max(accuracy)
    assert accuracy[last] > 0.9
    train(1, *options, tmp_path)
    assert metrics(tmp_path, "accuracy") == accuracy
    assert load(tmp_path)["model"]["1.num_batches_tracked"] == last
    said = train(2, *options, tmp_path / "b", "--sync_bn", 1, code=1)
    assert "SyncBatchNorm layers only work with GPU modules" in said[0]


@runs
def test_hugging_face(use, larger, tmp_path):
    """It learns to count, and transformers loads the result."""
    program = use("hugging_face")
    (numpy.arange(20_000) % 400).astype("uint16").tofile(tmp_path / "tokens")
    options = [*larger, "--data", tmp_path / "tokens", "--vocab", 500, "--lr", 0.01]
    train(2, *options, "--out", tmp_path)
    model = program.build_model(program.parse_args(map(str, options))).eval()
    model.load_state_dict(load(tmp_path)["model"])
    x = torch.arange(300, 332)[None]
    assert model(x, labels=x).loss < metrics(tmp_path, "loss")[1] / 2


@runs
def test_fp16(use, tiny, tmp_path):
    """An overflow on one rank: all ranks skip the step and halve the scale."""
    a, b, c = map(tmp_path.joinpath, "abc")
    options = [*tiny, "--dropout", 0.1, "--precision", "fp16", "--out"]
    use("fp16")
    train(2, *options, a, patch=functools.partial(overflow, 3, 3))
    train(2, *options, c, "--precision", "fp32")
    for name in ("loss", "grad_norm"):
        assert metrics(a, name)[2] == pytest.approx(metrics(c, name)[2], rel=1e-2)
    train(2, *options, b, code=143, fault="train_step 2 SIGTERM 0")
    before = load(b)
    patch = functools.partial(overflow, 1, 1)
    train(2, *options, b, code=143, patch=patch, fault="train_step 1 SIGTERM 0")
    after = load(b)
    assert after["scaler"]["scale"] == before["scaler"]["scale"] / 2
    assert harness.flatten(after["model"]) == harness.flatten(before["model"])
    assert metrics(b, "grad_norm")[3] == 0
    train(2, *options, b)
    assert_same_run(a, b)
    assert "precision is fp16, it was fp32" in train(2, *options, c, "--epochs", 4)[0]
    # Each step overflows: in the end a smaller scale does not help.
    options += [tmp_path / "d", "--epochs", 9]
    said = train(2, *options, code=1, patch=functools.partial(overflow, 1, 99))
    assert "not finite" in said[0] and "step 35 " in said[0]


@runs
def test_keep_last(use, tiny, tmp_path):
    """Three stay. If the newest is damaged, the run resumes from the one before it."""
    use("keep_last")
    a, b = tmp_path / "a", tmp_path / "b"
    options = [*tiny, "--save_every", 1, "--max_steps", 6, "--out"]
    train(2, *options, a)
    shutil.copytree(a, b)
    files = [f"checkpoint.00000000{step}.pt" for step in (4, 5, 6)]
    assert sorted(path.name for path in a.glob("checkpoint.*.pt")) == files
    content = bytearray((a / "checkpoint.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (a / "checkpoint.pt").write_bytes(content)  # also step 6's file: it is the same
    said = train(2, *options, a)[0]
    assert "checkpoint.pt is damaged" in said and "from step 5 to 6" in said
    assert sorted(path.name for path in a.glob("checkpoint.*.pt")) == files
    assert_same_run(b, a)
    for name in ("checkpoint.pt", *files[1:]):  # go back
        (a / name).unlink()
    assert "from step 4 to 6" in train(2, *options, a)[0]
    for path in a.glob("checkpoint*.pt"):
        os.truncate(path, 5000)
    assert "checkpoint.pt cannot be loaded" in train(2, *options, a, code=1)[0]
