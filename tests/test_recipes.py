"""Tests of the recipes: recipes/*.diff.

    pytest tests/test_recipes.py               each applies, compiles, and is short
    pytest tests/test_recipes.py -m recipes    what their heads promise, on two ranks

Recipes 6 and 7 skip without scikit-learn and transformers.
"""

import functools
import gzip
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ddp_train
from test_ddp_train import (
    TINY,
    assert_same_bits,
    end_all,
    flatten,
    fork_ranks,
    load,
    metrics,
    ticks,
    torchrun,
    train,
)

HERE = Path(__file__).resolve().parent.parent
RECIPES = sorted((HERE / "recipes").glob("*.diff"))
RUFF = shutil.which("ruff") or shutil.which("ruff", path=Path(sys.executable).parent)
STEPS = 32


# ---- What the tests share ------------------------------------------------------------
@pytest.fixture
def recipe(tmp_path):
    """recipe("04", "01"): the path of a copy of ddp_train.py with these recipes."""

    def apply(*numbers):
        folder = tmp_path / "-".join(["with", *numbers])
        folder.mkdir()
        script = folder / "ddp_train.py"
        shutil.copy(HERE / "ddp_train.py", script)
        for number in numbers:
            (path,) = (HERE / "recipes").glob(f"{number}_*.diff")
            before = script.read_text()
            git("apply", "--check", path, cwd=folder)
            git("apply", path, cwd=folder)
            assert script.read_text() != before
        return script

    return apply


def git(*command, cwd):
    # Not as a part of a repository above this folder: there it would do nothing.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(cwd).parent)}
    words = ["git", *map(str, command)]
    run = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="session")
def options(tmp_path_factory):
    """The options of all runs here: a small model, 32 steps, a save in the middle."""
    path = tmp_path_factory.mktemp("data") / "data"
    path.write_bytes(Path(ddp_train.__file__).read_bytes()[:13_000])
    words = [*TINY, "--dim", 64, "--data", path, "--dropout", 0.1]
    return [*words, "--max_steps", STEPS, "--save_every", 16]


@pytest.fixture(scope="session")
def plain(options, tmp_path_factory):
    """The folder of a run on two ranks without a recipe."""
    out = tmp_path_factory.mktemp("plain")
    train(2, *options, "--out", out)
    return out


def start_recipe(size, script, *options, patch=None):
    """Start ranks of a patched program, as forks of this process.

    patch(program) is called in each rank before. What it returns is the rank's value.
    """
    words = [str(word) for word in options]

    def rank():
        spec = importlib.util.spec_from_file_location("ddp_train", script)
        program = importlib.util.module_from_spec(spec)
        sys.modules["ddp_train"] = program
        spec.loader.exec_module(program)
        value = patch(program) if patch else None
        program.main(words)
        return value

    what = shlex.join(torchrun(size, str(script), *words))
    return fork_ranks(size, rank, what=what)


def train_recipe(size, script, *options, code=0, patch=None):
    """Run a patched program to its end. Returns the ranks."""
    ranks = start_recipe(size, script, *options, patch=patch)
    end_all(ranks, code)
    return ranks


def around_each_step(program, before=None, after=None):
    """Call before(step, ddp, optimizer) and after(...) around each train_step().

    The first step of the process is 1.
    """
    train_step = program.train_step
    step = 0

    def wrapped(ddp, batches, optimizer, *others):
        nonlocal step
        step += 1
        if before:
            before(step, ddp, optimizer)
        result = train_step(ddp, batches, optimizer, *others)
        if after:
            after(step, ddp, optimizer)
        return result

    program.train_step = wrapped


def count_bytes(program):
    """A rank's value: for each step the bytes of its large all-reduces, and so on."""
    seen = {"sent": [], "weights": [], "numbers": 0}
    all_reduce = dist.all_reduce

    def counting(tensor, *others, **more):
        if seen["sent"] and tensor.numel() > 9:  # smaller: the loss, the stop signal
            seen["sent"][-1] += tensor.nbytes
        return all_reduce(tensor, *others, **more)

    def before(step, ddp, optimizer):
        seen["sent"].append(0)
        weights = torch.nn.utils.parameters_to_vector(ddp.parameters()).detach()
        seen["weights"].append(zlib.crc32(weights.numpy()))
        seen["numbers"] = weights.numel()

    dist.all_reduce = counting
    around_each_step(program, before)
    return seen


def measure_memory(program):
    """A rank's value: the bytes of weights and moments that it has after a step."""
    seen = {}

    def after(step, ddp, optimizer):
        seen["weights"] = bytes_of(ddp.parameters())
        if hasattr(optimizer, "optim"):
            optimizer = optimizer.optim  # that of this rank, inside of ZeRO's
        states = optimizer.state.values()
        seen["moments"] = sum(bytes_of(state.values()) for state in states)

    around_each_step(program, after=after)
    return seen


def bytes_of(tensors):
    total = 0
    for tensor in tensors:
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()  # the part of a sharded tensor that is here
        if tensor.dim() > 0:  # else it counts the steps
            total += tensor.nbytes
    return total


def stop_at(wanted, program):
    """functools.partial(stop_at, 5): each rank gets SIGTERM in its fifth step."""

    def before(step, ddp, optimizer):
        if step == wanted:
            os.kill(os.getpid(), signal.SIGTERM)

    around_each_step(program, before)


# ---- The diffs -----------------------------------------------------------------------
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_applies_is_short_and_says_what_for(recipe, path):
    script = recipe(path.stem[:2])
    compile(script.read_text(), script, "exec")
    head, diff = path.read_text().split("diff --git ", 1)
    assert len(head) > 300 and max(map(len, head.splitlines())) <= 100
    assert "COST_WIRE" not in head
    tests = re.findall(r"\btest_[a-z0-9_]+\b(?!\.py)", head)
    assert tests, "the head names no test"
    texts = [file.read_text() for file in HERE.glob("tests/test_recipes*.py")]
    for name in tests:
        assert f"def {name}(" in "".join(texts)
    changed = re.findall("^[+-](?![+-]{2} )", diff, re.M)
    assert 5 <= len(changed) <= 35
    if RUFF:
        command = [RUFF, "format", "--isolated", "--diff", script]
        formatted = subprocess.run(command, capture_output=True, text=True)
        assert formatted.returncode == 0, formatted.stdout


PAIRS = [("05", "15"), ("15", "05"), ("06", "13"), ("13", "06")]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_two_recipes_apply_together(recipe, pair):
    script = recipe(*pair)
    compile(script.read_text(), script, "exec")


# ---- Slow networks -------------------------------------------------------------------
@pytest.mark.recipes
@pytest.mark.parametrize("how", ["fp16", "powersgd"])
def test_compressed_gradients(recipe, options, plain, tmp_path, how):
    """Half of the bytes, or a third at most (of larger models less). The same loss.

    With fp16 a stop changes no bit.
    """
    script, more = recipe("01"), [*options, "--compress", how]
    one, two = tmp_path / "one", tmp_path / "two"
    seen = train_recipe(2, script, *more, "--out", one, patch=count_bytes)[0].value
    share = seen["sent"][-1] / (4 * seen["numbers"])
    if how == "powersgd":
        assert share < 1 / 3
    else:
        assert share == 1 / 2
        train_recipe(2, script, *more, "--out", two, "--max_steps", 5)
        train_recipe(2, script, *more, "--out", two)
        assert_same_bits(one, two)
    loss = metrics(one, "val_loss")[STEPS]
    assert loss == pytest.approx(metrics(plain, "val_loss")[STEPS], rel=0.02)


@pytest.mark.recipes
def test_local_sgd(recipe, options, tmp_path):
    """One all-reduce in 16 steps; after it, and only then, the weights are equal.

    A stop in step 5 saves at step 16, and changes no bit.
    """
    script = recipe("02")
    one = [*options, "--out", tmp_path / "one"]
    seen0, seen1 = (r.value for r in train_recipe(2, script, *one, patch=count_bytes))
    moments = 2 * 4 * seen0["numbers"]
    at_save = 2 * seen0["numbers"] + moments
    sent = [at_save if step % 16 == 0 else 0 for step in range(1, STEPS + 1)]
    assert seen0["sent"] == sent
    pairs = zip(seen0["weights"], seen1["weights"], strict=True)
    assert [a == b for a, b in pairs] == [step % 16 == 0 for step in range(STEPS)]
    two = [*options, "--out", tmp_path / "two"]
    stop = functools.partial(stop_at, 5)
    ranks = train_recipe(2, script, *two, patch=stop, code=143)
    assert "saved at step 16" in ranks[0].text
    train_recipe(2, script, *two)
    assert metrics(tmp_path / "one", "loss") == metrics(tmp_path / "two", "loss")
    assert_same_bits(tmp_path / "one", tmp_path / "two")


@pytest.mark.recipes
def test_where_the_time_goes(recipe, options, plain, tmp_path):
    """Shares of 0 to 1, a trace of five steps of each rank, and the same bits."""
    train_recipe(2, recipe("03"), *options, "--out", tmp_path)
    waiting = metrics(tmp_path, "waiting")
    assert len(waiting) == STEPS and all(0 <= share < 1 for share in waiting.values())
    for rank in (0, 1):
        with gzip.open(tmp_path / f"trace.{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert names.count("Optimizer.step#AdamW.step") == 5
        assert "gloo:all_reduce" in names
    assert_same_bits(plain, tmp_path)


# ---- Memory --------------------------------------------------------------------------
@pytest.mark.recipes
def test_zero1(recipe, options, plain, tmp_path):
    """Half of the moments, the same bits as DDP, also through a stop.

    The program without the recipe goes on from its checkpoint, and the other way round;
    and so does one rank after two.
    """
    script, options = recipe("04"), [*options, "--out", tmp_path]
    stop = functools.partial(stop_at, 5)
    train(2, *options, "--max_steps", 3)
    train_recipe(2, script, *options, code=143, patch=stop)
    assert load(tmp_path)["step"] == 3 + 5
    train_recipe(2, script, *options, "--max_steps", 12)
    train(2, *options, "--max_steps", 14)
    seen = train_recipe(2, script, *options, patch=measure_memory)[0].value
    assert seen["moments"] == pytest.approx(seen["weights"], rel=0.1)  # else: twice
    assert metrics(tmp_path, "loss") == metrics(plain, "loss")
    assert_same_bits(plain, tmp_path)
    shutil.copytree(plain, tmp_path / "alone")
    options += ["--max_steps", STEPS + 2]
    train_recipe(1, script, *options)
    train(1, *options, "--out", tmp_path / "alone")
    assert_same_bits(tmp_path / "alone", tmp_path)


@pytest.mark.recipes
@pytest.mark.parametrize("accum", [1, 2])
def test_fsdp2(recipe, options, tmp_path, accum):
    """Half of the weights and of the moments. The numbers are those of DDP.

    A run goes on with the same bits, on another number of ranks with the same numbers,
    and without the recipe.
    """
    # 20 samples are evaluated, three or five batches: rank 0 has one more than rank 1.
    options = [*options, "--dropout", 0, "--batch_size", 8 // accum, "--accum", accum]
    train(2, *options, "--out", tmp_path / "plain")
    expected = metrics(tmp_path / "plain", "loss")
    val_loss = metrics(tmp_path / "plain", "val_loss")
    script, one = recipe("05"), [*options, "--out", tmp_path / "one"]
    seen = train_recipe(2, script, *one, patch=measure_memory)[0].value
    total = bytes_of(load(tmp_path / "one")["model"].values())
    assert seen["weights"] == pytest.approx(total / 2, rel=0.02)
    assert seen["moments"] == pytest.approx(total, rel=0.02)
    assert metrics(tmp_path / "one", "loss") == pytest.approx(expected, rel=1e-4)
    assert metrics(tmp_path / "one", "val_loss") == pytest.approx(val_loss, rel=1e-4)
    two = [*options, "--out", tmp_path / "two"]
    train_recipe(2, script, *two, code=143, patch=functools.partial(stop_at, 5))
    train_recipe(2, script, *two)
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert flatten(one["model"]) == flatten(two["model"])
    assert flatten(one["optimizer"]["state"]) == flatten(two["optimizer"]["state"])
    three = [*options, "--out", tmp_path / "three"]
    train_recipe(2, script, *three, "--max_steps", 5)
    train_recipe(1, script, *three, "--accum", 2 * accum, "--max_steps", 10)
    train(2, *three)
    assert metrics(tmp_path / "three", "loss") == pytest.approx(expected, rel=1e-4)


# ---- Other models --------------------------------------------------------------------
@pytest.mark.recipes
def test_images(recipe, tmp_path):
    """More than 90 % are right, and one rank evaluates as two do."""
    pytest.importorskip("sklearn.datasets")
    options = ["--device", "cpu", "--epochs", 4, "--out", tmp_path]
    train_recipe(2, recipe("06"), *options)
    accuracy = metrics(tmp_path, "accuracy")
    last = max(accuracy)
    assert accuracy[last] > 0.9
    train_recipe(1, tmp_path / "with-06/ddp_train.py", *options)
    assert metrics(tmp_path, "accuracy") == accuracy
    state = load(tmp_path)["model"]
    assert state["1.num_batches_tracked"] == last


@pytest.mark.recipes
def test_images_sync_bn_says_that_it_needs_gpus(recipe, tmp_path):
    pytest.importorskip("sklearn.datasets")
    options = ["--device", "cpu", "--sync_bn", "--out", tmp_path]
    ranks = train_recipe(2, recipe("06"), *options, code=1)
    assert "SyncBatchNorm layers only work with GPU modules" in ranks[0].text


@pytest.mark.recipes
def test_transformers(recipe, options, tmp_path):
    """It learns to count in tokens of 16 bits, and transformers loads the result."""
    transformers = pytest.importorskip("transformers")
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")  # before forks
    tokens = torch.arange(20_000).remainder(400).to(torch.uint16)
    tokens.numpy().tofile(tmp_path / "tokens")
    options = [*options, "--data", tmp_path / "tokens", "--vocab", 500]
    train_recipe(2, recipe("07"), *options, "--lr", 0.01, "--out", tmp_path)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=64, n_positions=32, vocab_size=500
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.load_state_dict(load(tmp_path)["model"])
    x = torch.arange(300, 332)[None]
    loss = model(x, labels=x).loss.item()
    assert loss < metrics(tmp_path, "loss")[1] / 2


# ---- Saves ---------------------------------------------------------------------------
@pytest.mark.recipes
def test_save_in_background(recipe, options, tmp_path):
    """The write of step 5 waits for step 7. It has the weights of step 5, all the same.

    And the run ends after the last write.
    """
    options = [*options, "--save_every", 5, "--max_steps", 7]

    def slow(program):
        write_whole = program.write_whole
        steps = []
        files = []

        def slow_write(path, content):
            for _ in ticks():
                if len(steps) == 7:
                    break
            write_whole(path, content)
            files.append(len(steps))
            shutil.copy(path, path.parent / f"{len(files)}.pt")

        program.write_whole = slow_write
        around_each_step(program, lambda step, *_: steps.append(step))
        return files

    out = tmp_path / "slow"
    rank0 = train_recipe(2, recipe("08"), *options, "--out", out, patch=slow)[0]
    assert rank0.value == [7, 7]
    for number, step in ((1, 5), (2, 7)):
        train(2, *options, "--max_steps", step, "--out", tmp_path / "plain")
        assert load(tmp_path / "plain")["step"] == step
        shutil.move(out / f"{number}.pt", out / "checkpoint.pt")
        assert_same_bits(out, tmp_path / "plain")


@pytest.mark.recipes
@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_save_in_background_that_fails(recipe, options, tmp_path):
    """The run ends at the next save, in one line."""
    (tmp_path / "checkpoint.tmp").symlink_to("/dev/full")
    options = [*options, "--save_every", 5, "--out", tmp_path]
    (rank,) = train_recipe(1, recipe("08"), *options, code=1)
    assert "step 10 " in rank.text and "step 11 " not in rank.text
    assert "cannot save" in rank.text and "Traceback" not in rank.text
