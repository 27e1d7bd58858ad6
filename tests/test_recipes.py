"""Tests of recipes/: each applies, and does on two ranks what its head says.

The first part is fast. The rest has the mark `recipes`: make test-recipes runs it.
"""

import functools
import importlib.util
import itertools
import math
import os
import re
import shutil
import sys

import pytest
import torch

import harness
from harness import assert_same_run, launch, load, metrics, train

RECIPES = {
    path.stem: path for path in sorted((harness.ROOT / "recipes").glob("*.diff"))
}
runs = pytest.mark.recipes


# ---- Each applies, alone and together ------------------------------------------------
def apply(diff, text):
    """The text, changed by a diff, whose old lines must be there once."""
    for hunk in re.split("^@@ .*\n", diff, flags=re.MULTILINE)[1:]:
        old = "".join(line[1:] for line in hunk.splitlines(True) if line[0] != "+")
        new = "".join(line[1:] for line in hunk.splitlines(True) if line[0] != "-")
        assert text.count(old) == 1, f"these lines must be there once:\n{old}"
        text = text.replace(old, new)
    return text


def with_recipes(*names):
    """The text of ddp_train.py with these recipes."""
    text = harness.SCRIPT.read_text()
    for name in names:
        text = apply(RECIPES[name].read_text(), text)
    return text


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository with ddp_train.py, the Makefile and the recipes."""
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)  # a hook of git has set them
    launch("git", "init", cwd=tmp_path).end()
    for name in ("ddp_train.py", "Makefile"):
        shutil.copy(harness.ROOT / name, tmp_path)
    shutil.copytree(harness.ROOT / "recipes", tmp_path / "recipes")
    launch("git", "add", "ddp_train.py", cwd=tmp_path).end()
    return tmp_path


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("how", ["git apply --3way", "patch -p1 -i"])
def test_recipe_applies(name, how, clone):
    """With ruff it is also formatted like ddp_train.py, and all its names exist."""
    if not shutil.which(how.split()[0]):
        pytest.skip(f"needs {how.split()[0]}")
    launch(*how.split(), RECIPES[name], cwd=clone).end()
    path = clone / "ddp_train.py"
    assert path.read_text() == with_recipes(name)
    compile(path.read_text(), path, "exec")
    if importlib.util.find_spec("ruff"):
        for words in (["format", "--diff"], ["check"]):
            command = [sys.executable, "-m", "ruff", *words, "--config"]
            launch(*command, harness.ROOT / "pyproject.toml", path).end()


@pytest.mark.skipif(not shutil.which("patch"), reason="needs patch")
def test_make_recipe_writes_a_new_file_or_none(clone):
    """It overwrites none, and leaves none if a recipe does not apply."""
    make = ["make", "recipe", "R=fp16 keep_last", "OUT=new.py"]
    launch(*make, cwd=clone).end()
    assert (clone / "new.py").read_text() == with_recipes("fp16", "keep_last")
    assert "new.py already exists" in launch(*make, cwd=clone).end(2)
    text = harness.SCRIPT.read_text()
    assert (clone / "ddp_train.py").read_text() == text
    (clone / "ddp_train.py").write_text(text.replace("optimizer.step()", "step()"))
    for name in ("fp16", "unknown"):
        launch(*make[:2], f"R={name}", "OUT=other.py", cwd=clone).end(2)
    assert not list(clone.glob("other*"))


# ---- What the runs share -------------------------------------------------------------
@pytest.fixture
def use(tmp_path, monkeypatch):
    """use("fp16", "keep_last"): then train() runs a program with these recipes."""

    def use_recipes(*names):
        script = tmp_path / f"with_{'_'.join(names)}.py"
        script.write_text(with_recipes(*names))
        spec = importlib.util.spec_from_file_location(script.stem, script)
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        monkeypatch.setattr(harness, "ddp_train", program)

    return use_recipes


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
    assert "all steps overflow" in said[0] and "step 35 " in said[0]


@runs
@pytest.mark.parametrize("others", [[], ["fp16"]], ids=str)
def test_keep_last(use, tiny, tmp_path, others):
    """Three stay. If the newest is damaged, the run resumes from the one before it."""
    use("keep_last", *others)
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
