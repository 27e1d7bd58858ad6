"""Tests of the recipes: each is applied to a copy of ddp_train.py and run.

    python -m pytest .ci/test_recipes.py

Recipes 6 and 7 skip without scikit-learn and transformers.
"""

import argparse
import gzip
import json
import re
import shutil
import sys
from pathlib import Path

import make_recipes
import pytest
import torch
from bench_wire import CAN_LIMIT, over_wire
from make_recipes import apply_recipes
from recipes.watch_ranks import checksum

from test_ddp_train import HERE, PYTHON, SCRIPT, run

WATCH = HERE / ".ci/recipes/watch_ranks.py"
RECIPES = make_recipes.read_recipes()
DIFFS = [number for number in RECIPES if RECIPES[number].changes]
STEPS = 32
SMALL = "--device cpu --dim 128 --layers 1 --heads 4 --seq-len 32 --log-every 1".split()
TRAIN = [*SMALL, "--warmup", 0.02, "--max-steps", STEPS, "--save-every", 16]


# ---- What the tests use --------------------------------------------------------------
@pytest.fixture
def recipe(tmp_path):
    """recipe(1, 4): the path of a copy of ddp_train.py with these recipes."""

    def apply_to_copy(*numbers):
        return apply_recipes(tmp_path / f"with {numbers}", *numbers)

    return apply_to_copy


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.txt"
    path.write_bytes(Path(argparse.__file__).read_bytes()[:50_000])
    return path


@pytest.fixture(scope="session")
def plain(data, tmp_path_factory):
    """The folder of a run on two ranks without a recipe."""
    out = tmp_path_factory.mktemp("plain")
    run_ranks(2, SCRIPT, out, *TRAIN, "--batch-size", 4, "--data", data)
    return out


def run_ranks(world, script, out, *options, code=0, watch=(), env=None):
    """Run a script on several ranks. Returns its output. watch: for watch_ranks.py."""
    command = [PYTHON, WATCH, "--world", world, "--folder", out, *watch]
    return run(*command, script, "--out", out, *options, code=code, env=env)


def seen(out, rank=0):
    return json.loads((out / f"seen.{rank}.json").read_text())


def metrics(out, name="loss"):
    """{step: value}"""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record[name] for record in records if name in record}


def load(out, name="checkpoint.pt"):
    return torch.load(out / name, "cpu", weights_only=True)


def leaves(state):
    """All tensors and numbers in a state, as tensors."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        return [leaf for value in state for leaf in leaves(value)]
    if isinstance(state, (torch.Tensor, float, int)):
        return [torch.as_tensor(state)]
    return []


def assert_same_bits(a, b):
    for part in ("model", "optimizer"):
        pairs = zip(leaves(a[part]), leaves(b[part]), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs), part


# ---- The recipes as texts ------------------------------------------------------------
def test_readme_is_up_to_date():
    run(PYTHON, HERE / ".ci/make_recipes.py", "--check")


def test_a_change_that_does_not_apply_is_named(monkeypatch):
    broken = make_recipes.Recipe("1_x.txt", 1, "", "", [("no such text", "")], "")
    with pytest.raises(
        SystemExit, match="1_x.txt: this occurs 0 times.*\nno such text"
    ):
        make_recipes.make_diff(broken)


@pytest.mark.parametrize("number", DIFFS)
def test_recipe_is_short(number):
    changed = re.findall(
        "^[+-](?![+-]{2} )", make_recipes.make_diff(RECIPES[number]), re.M
    )
    assert len(changed) <= 36


@pytest.mark.parametrize("number", DIFFS)
def test_recipe_is_formatted(recipe, number):
    ruff = shutil.which("ruff") or shutil.which("ruff", path=Path(PYTHON).parent)
    if ruff is None:
        pytest.skip("needs ruff")
    script = recipe(number)
    run(ruff, "format", "--isolated", "--diff", script)
    run(ruff, "check", "--isolated", "--select", "E,F,I,UP,B,E731", script)


PAIRS = [(3, 1), (3, 2), (3, 4), (3, 5), (1, 4), (6, 3), (7, 3), (8, 1), (8, 2)]


@pytest.mark.parametrize("pair", PAIRS + [(second, first) for first, second in PAIRS])
def test_recipes_apply_together(recipe, pair):
    """`git apply` gives the text that the changes give, one recipe after the other."""
    text = SCRIPT.read_text()
    for number in pair:
        text = make_recipes.change(text, RECIPES[number])
    assert recipe(*pair).read_text() == text
    compile(text, "ddp_train.py", "exec")


# ---- Speed ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "hook", ["fp16", pytest.param("powersgd", marks=pytest.mark.faults)]
)
def test_compress(recipe, data, plain, tmp_path, hook):
    """Half of the bytes, or less than a fifth; and about the same loss."""
    options = [*TRAIN, "--batch-size", 4, "--data", data]
    run_ranks(2, recipe(1), tmp_path, *options, "--compress", hook)
    share = sum(seen(tmp_path)["sent"][-2]) / seen(plain)["parameters"]
    if hook == "fp16":
        assert share == 0.5
    else:
        assert share < 0.2
    loss = metrics(tmp_path, "val_loss")[STEPS]
    assert loss == pytest.approx(metrics(plain, "val_loss")[STEPS], rel=0.02)


def test_local_sgd(recipe, data, tmp_path):
    """One all-reduce in 16 steps; after it, and only then, the weights are the same."""
    options = [*TRAIN, "--batch-size", 4, "--data", data, "--max-steps", 48]
    run_ranks(2, recipe(2), tmp_path, *options)
    rank0, rank1 = seen(tmp_path, 0), seen(tmp_path, 1)
    half = rank0["parameters"] // 2  # fp16
    meetings = [sent.count(half) for sent in rank0["sent"]]
    assert meetings == [int(step % 16 == 0) for step in range(1, 49)]
    pairs = zip(rank0["weights"], rank1["weights"], strict=True)
    assert [a == b for a, b in pairs] == [step % 16 == 0 for step in range(48)]


@pytest.mark.faults  # the long form, to keep the suite short
def test_local_sgd_stops_and_goes_on(recipe, data, tmp_path):
    """It stops at the second meeting after the signal. The stop changes no bit."""
    script = recipe(2)
    options = [*TRAIN, "--batch-size", 4, "--data", data, "--max-steps", 48]
    run_ranks(2, script, tmp_path / "a", *options)
    watch = ["--stop-at", 5]
    stopped = run_ranks(2, script, tmp_path / "b", *options, watch=watch, code=143)
    assert "saved at step 32" in stopped
    assert "from step 32" in run_ranks(2, script, tmp_path / "b", *options)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert_same_bits(load(tmp_path / "a"), load(tmp_path / "b"))


def test_where_the_time_goes(recipe, data, tmp_path):
    options = [*TRAIN, "--batch-size", 4, "--data", data]
    output = run_ranks(2, recipe(3), tmp_path, *options)
    assert re.search(r"all-reduce of all gradients: \d+\.\d+ s", output)
    waiting = metrics(tmp_path, "waiting")
    assert len(waiting) == STEPS and all(0 <= share < 1 for share in waiting.values())
    for rank in (0, 1):
        trace = gzip.open(tmp_path / f"trace.{rank}.json.gz").read()
        names = [event.get("name", "") for event in json.loads(trace)["traceEvents"]]
        steps = [name for name in names if name == "Optimizer.step#AdamW.step"]
        assert len(steps) == 5
        assert any("all" in name and "reduce" in name for name in names)


@pytest.mark.faults
@pytest.mark.skipif(not CAN_LIMIT, reason="needs root on Linux with `ip` and `tc`")
@pytest.mark.parametrize("limit", [True, False])
def test_where_with_a_slow_wire(recipe, data, tmp_path, limit):
    """At 100 Mbit/s most of a step waits; without a limit almost nothing."""
    batch_size = 4 if limit else 32
    options = ["--batch-size", batch_size, "--max-steps", 6, "--log-every", 6]
    over_wire(limit, recipe(3), tmp_path, *options, "--data", data)
    waiting = metrics(tmp_path / "a", "waiting")[6]
    assert waiting > 0.5 if limit else waiting < 0.2


# ---- Memory --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "number, limit", [pytest.param(4, 1e-5, marks=pytest.mark.faults), (5, 1e-4)]
)
def test_sharded(recipe, data, plain, tmp_path, number, limit):
    """Each rank has 1/W. The losses are those of DDP, also at another world size."""
    script, options = recipe(number), [*TRAIN, "--data", data]
    stop = ["--stop-at", 10]
    run_ranks(2, script, tmp_path, *options, "--batch-size", 4, watch=stop, code=143)
    half, whole = seen(tmp_path), seen(plain)
    assert half["state"] == pytest.approx(whole["state"] / 2, rel=0.02)
    if number == 5:
        assert half["parameters"] == pytest.approx(whole["parameters"] / 2, rel=0.02)
    output = run_ranks(4, script, tmp_path, *options, "--batch-size", 2)
    assert "going on from step 11" in output
    assert metrics(tmp_path) == pytest.approx(metrics(plain), rel=limit)
    # ddp_train.py without the recipe loads the checkpoint, and evaluates it.
    run(PYTHON, SCRIPT, "--out", tmp_path, *options, "--batch-size", 8)
    losses = metrics(tmp_path, "val_loss"), metrics(plain, "val_loss")
    assert losses[0][STEPS] == pytest.approx(losses[1][STEPS], rel=limit)


# ---- Other models --------------------------------------------------------------------
def test_images(recipe, tmp_path):
    """More than 90 % are right. One rank evaluates as two do."""
    pytest.importorskip("sklearn")
    script = recipe(6)
    options = ["--device", "cpu", "--epochs", 3]
    run_ranks(1, script, tmp_path / "1", *options, "--batch-size", 64)
    run_ranks(2, script, tmp_path / "2", *options, "--batch-size", 32)
    one, two = (metrics(tmp_path / name, "accuracy") for name in "12")
    last = max(two)
    assert one[last] > 0.9 and two[last] > 0.9
    loss = metrics(tmp_path / "2", "val_loss")[last]
    run_ranks(1, script, tmp_path / "2", *options, "--batch-size", 64)
    assert metrics(tmp_path / "2", "val_loss")[last] == pytest.approx(loss, abs=1e-4)


@pytest.mark.faults
def test_transformers(recipe, tmp_path):
    """It trains on mapped tokens, computes activations again; transformers loads it."""
    transformers = pytest.importorskip("transformers")
    tokens = torch.arange(20_000).remainder(100).to(torch.uint16)
    tokens.numpy().tofile(tmp_path / "tokens")
    options = [*TRAIN, "--batch-size", 4, "--layers", 2, "--vocab", 512]
    run_ranks(2, recipe(7), tmp_path, *options, "--data", tmp_path / "tokens")
    losses = metrics(tmp_path)
    assert losses[STEPS] < 0.8 * losses[1]
    assert seen(tmp_path)["forwards"]["GPT2MLP"] == 2 * 2 * STEPS  # two layers, twice
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=128, n_positions=32, vocab_size=512
    )
    model = transformers.GPT2LMHeadModel.from_pretrained(
        None, config=config, state_dict=load(tmp_path)["model"]
    )
    x = torch.arange(32)[None]
    loss = model.eval()(x, labels=x).loss.item()
    assert loss < losses[1] / 4  # it has learned that the tokens count up


# ---- Runs ----------------------------------------------------------------------------
def test_save_in_background(recipe, data, tmp_path):
    """The step after a save waits less than a third of the write. The file is right."""
    options = [*TRAIN, "--batch-size", 4, "--data", data]
    options += ["--save-every", 5, "--max-steps", 9]
    run_ranks(2, recipe(8), tmp_path, *options, watch=["--slow-write", 40])
    rank0 = seen(tmp_path)
    assert rank0["began"][5] - rank0["began"][4] < rank0["write"] / 3
    first, last = load(tmp_path, "checkpoint.prev.pt"), load(tmp_path)
    assert (first["step"], last["step"]) == (5, 9)
    assert checksum(leaves(first["model"])) == rank0["weights"][5]
    assert checksum(leaves(first["optimizer"]["state"])) == rank0["moments"][5]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_save_in_background_fails(recipe, data, tmp_path):
    """The run ends at the next save, in one line."""
    (tmp_path / "checkpoint.tmp").symlink_to("/dev/full")
    options = [*TRAIN, "--batch-size", 4, "--data", data]
    options += ["--save-every", 5, "--max-steps", 99]
    output = run_ranks(1, recipe(8), tmp_path, *options, code=1)
    assert "step 10 " in output and "step 11 " not in output
    assert "cannot save" in output and "Traceback" not in output


@pytest.mark.faults  # the long form, to keep the suite short
def test_same_bits_on_three_ranks(recipe, data, tmp_path):
    script, first, second = recipe(9), tmp_path / "first", tmp_path / "second"
    options = [*TRAIN, "--dropout", 0.1, "--batch-size", 4, "--data", data]
    options += ["--save-every", 4, "--max-steps", 8]
    run_ranks(3, script, first, *options)
    second.mkdir()
    shutil.copy(first / "checkpoint.prev.pt", second / "checkpoint.pt")
    assert "going on from step 4" in run_ranks(3, script, second, *options)
    assert_same_bits(load(first), load(second))


@pytest.mark.parametrize("fault", ["a rank fails", "a rank hangs"])
def test_end_all_ranks(recipe, data, tmp_path, fault):
    """The others hang meanwhile, as they do in NCCL. Without the recipe: an hour."""
    options = [*TRAIN, "--batch-size", 4, "--data", data, "--timeout", 10]
    if fault == "a rank fails":
        watch = ["--fail", 1, "--hang", "0,2"]
    else:
        watch = ["--hang", "1,2"]
    output = run_ranks(3, recipe(10), tmp_path, *options, watch=watch, code=1)
    began = max(float(text) for text in re.findall(r"fault at ([\d.]+)", output))
    ended = float(re.search(r"have ended at ([\d.]+)", output)[1])
    assert ended - began < 40
    assert "another rank has failed" in output


@pytest.mark.faults  # the long form, to keep the suite short
def test_end_all_ranks_does_no_harm(recipe, data, tmp_path):
    options = [*TRAIN, "--batch-size", 4, "--data", data]
    assert "failed" not in run_ranks(3, recipe(10), tmp_path, *options)


WANDB = """
import json

class Run:
    def log(self, values, step):
        with open("logged", "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\\n")

def init(**options):
    with open("started", "a") as file:
        file.write(json.dumps(options) + "\\n")
    return Run()
"""


def test_wandb(recipe, data, tmp_path):
    """Rank 0 alone calls it, with what is in metrics.jsonl, and in one run."""
    (tmp_path / "wandb.py").write_text(WANDB)
    script, out = recipe(11), tmp_path / "run7"
    env = {"PYTHONPATH": f"{tmp_path}:{HERE}"}
    command = [PYTHON, WATCH, "--world", 2, "--folder", out, script, "--out", out]
    command += [*TRAIN, "--batch-size", 4, "--data", data]
    for last in (4, 8):
        run(*command, "--max-steps", last, cwd=tmp_path, env=env)
    logged = (tmp_path / "logged").read_text()
    assert logged == (out / "metrics.jsonl").read_text()
    started = (tmp_path / "started").read_text().splitlines()
    started = [json.loads(line) for line in started]
    assert [(call["id"], call["resume"]) for call in started] == [("run7", "allow")] * 2
    assert started[0]["config"]["batch_size"] == 4
