"""What recipes 9 to 16 promise: each is run on two ranks (three for recipe 9).

    pytest -m recipes tests/test_recipes_2.py

A recipe is applied to a copy of ddp_train.py, which is loaded as a module. The ranks
are forks of this process, as in test_ddp_train.py.
"""

import importlib.util
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import ddp_train
from test_ddp_train import (
    TINY,
    assert_same_bits,
    end_all,
    fork_ranks,
    launch,
    load,
    metrics,
    train,
)

pytestmark = pytest.mark.recipes
RECIPES = Path(ddp_train.__file__).parent / "recipes"


@pytest.fixture
def data(tmp_path):
    """A file of 60 samples to train with, and 3 to evaluate: 2048 bytes."""
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 8)
    return path


def patched(folder, *numbers):
    """ddp_train.py with these recipes: its path."""
    path = folder / f"patched_{'_'.join(map(str, numbers))}" / "ddp_train.py"
    path.parent.mkdir()
    shutil.copy(ddp_train.__file__, path)
    # In a folder of a repository further up, git would look for the file there.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder)}
    for number in numbers:
        (recipe,) = RECIPES.glob(f"{number:02}_*.diff")
        subprocess.run(["git", "apply", recipe], cwd=path.parent, env=env, check=True)
    return path


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.parent.name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(program, size, *options, code=0, patch=None, env=None):
    """Run it to its end, after patch() in each rank. Returns what each rank said."""
    words = [str(word) for word in options]

    def rank():
        if patch is not None:
            patch()
        program.main(words)

    what = f"{program.__file__} {' '.join(words)}"
    return end_all(fork_ranks(size, rank, env, what), code)


def at_step(program, number, ranks, function):
    """A patch: these ranks call function() before this step of theirs."""

    def patch():
        original = program.train_step
        calls = itertools.count(1)

        def train_step(*args):
            if next(calls) == number and os.environ.get("RANK", "0") in ranks:
                function()
            return original(*args)

        program.train_step = train_step

    return patch


# ---- 9: the same bits on three ranks -------------------------------------------------
def test_same_bits_on_three_ranks(tmp_path, data):
    program = module_of(patched(tmp_path, 9))
    options = [*TINY, "--data", data, "--dropout", 0.1, "--out"]
    run(program, 3, *options, tmp_path / "a", "--max_steps", 8)
    run(program, 3, *options, tmp_path / "b", "--max_steps", 4)
    run(program, 3, *options, tmp_path / "b", "--max_steps", 8)
    assert_same_bits(tmp_path / "a", tmp_path / "b")
    # Two ranks have the same bits anyway, those of the program without the recipe.
    run(program, 2, *options, tmp_path / "c", "--max_steps", 4)
    train(2, *options, tmp_path / "d", "--max_steps", 4)
    assert_same_bits(tmp_path / "c", tmp_path / "d")


# ---- 10: end all when one hangs ------------------------------------------------------
def test_end_all_when_one_hangs(tmp_path, data):
    """Rank 1 hangs. Both end long before --timeout, and say where they stood."""
    program = module_of(patched(tmp_path, 10))
    hang = at_step(program, 3, "1", lambda: time.sleep(3000))
    options = [*TINY, "--data", data, "--out", tmp_path / "a", "--hang_after", 15]
    texts = run(program, 2, *options, code=1, patch=hang)
    assert "step 2 " in texts[0] and "step 3 " not in texts[0]
    for text in texts:
        assert "Timeout (0:00:15)!" in text and "in train_step" in text


def test_watching_for_a_hang_does_no_harm(tmp_path, data):
    """A step that is shorter than the limit is not ended, and no bit changes."""
    program = module_of(patched(tmp_path, 10))
    options = [*TINY, "--data", data, "--max_steps", 4, "--out"]
    wait = at_step(program, 3, "1", lambda: time.sleep(1))
    run(program, 2, *options, tmp_path / "a", "--hang_after", 60, patch=wait)
    train(2, *options, tmp_path / "b")
    assert_same_bits(tmp_path / "a", tmp_path / "b")


# ---- 11: W&B and TensorBoard ---------------------------------------------------------
@pytest.mark.parametrize("logger", ["wandb", "tensorboard"])
def test_loggers(tmp_path, data, logger):
    """Rank 0 alone sends what is in metrics.jsonl, and a second start goes on."""
    program = module_of(patched(tmp_path, 11))
    out = tmp_path / "run7"
    calls = tmp_path / "calls"

    def note(*call):
        with open(calls, "a") as file:
            file.write(json.dumps([os.environ["RANK"], *call]) + "\n")

    def init(id, resume, config):
        note("init", id, resume, config["batch_size"])
        return types.SimpleNamespace(log=lambda values, step: note("log", step, values))

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            note("init", str(folder), purge_step)

        def add_scalar(self, name, value, step):
            note("log", step, {name: value})

        def flush(self):
            pass

    def stand_in():  # for the two packages
        sys.modules["wandb"] = types.SimpleNamespace(init=init)
        board = types.SimpleNamespace(SummaryWriter=SummaryWriter)
        sys.modules["torch.utils.tensorboard"] = board

    options = [*TINY, "--data", data, "--out", out, "--logger", logger]
    run(program, 2, *options, "--max_steps", 2, patch=stand_in)
    run(program, 2, *options, "--max_steps", 4, patch=stand_in)
    calls = [json.loads(line) for line in calls.read_text().splitlines()]
    assert {call[0] for call in calls} == {"0"}
    begun = [call[2:] for call in calls if call[1] == "init"]
    expected = {
        "wandb": [["run7", "allow", 4], ["run7", "allow", 4]],
        "tensorboard": [[str(out), 1], [str(out), 3]],
    }
    assert begun == expected[logger]
    sent = [call[2:] for call in calls if call[1] == "log"]
    for name in ("loss", "val_loss"):
        of_name = {step: values[name] for step, values in sent if name in values}
        assert of_name == metrics(out, name)


# ---- 12: torchft ---------------------------------------------------------------------
def test_torchft(tmp_path, data):
    """A replica is killed: the other goes on. It comes back, and takes its weights."""
    pytest.importorskip("torchft")
    from torchft.coordination import LighthouseServer

    data.write_bytes(bytes(range(256)) * 400)
    path = patched(tmp_path, 12)
    # A step must be long enough for the others to join meanwhile.
    slow = "import sys, time, ddp_train; step = ddp_train.train_step\n"
    slow += "ddp_train.train_step = lambda *a: (time.sleep(0.2), step(*a))[1]\n"
    slow += "ddp_train.main(sys.argv[1:])"
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=500)
    env = {"TORCHFT_LIGHTHOUSE": server.address()}

    def replica(number, out):
        options = [*TINY, "--data", data, "--timeout", 20, "--out", tmp_path / out]
        options += ["--replica", number, "--replicas", 2]
        return launch(sys.executable, "-c", slow, *options, env=env, cwd=path.parent)

    first, second = replica(0, "0"), replica(1, "1")
    second.wait_for("(?s)\nstep .*\nstep ")
    second.send(signal.SIGKILL)
    steps = max(metrics(tmp_path / "0", "loss"))
    first.wait_for(f"step {steps + 5} ")
    second = replica(1, "again")
    second.wait_for("(?s)\nstep .*\nstep .*\nstep ")
    for process in (first, second):
        process.send(signal.SIGTERM)
        process.end(143)
    server.shutdown()
    # Both have had the same gradient, of the two together, and the same rate.
    joined = min(metrics(tmp_path / "again", "loss"))
    assert joined > steps + 5
    for name in ("grad_norm", "lr"):
        whole, again = metrics(tmp_path / "0", name), metrics(tmp_path / "again", name)
        assert whole[joined + 1] == again[joined + 1]


# ---- 13: fp16 ------------------------------------------------------------------------
def overflow(program, times):
    """A function: in so many of this rank's next batches the gradient is infinite."""

    def start():
        original = program.compute_loss
        calls = itertools.count(1)

        def compute_loss(*args):
            loss = original(*args)
            if loss.requires_grad and next(calls) <= times:
                loss.register_hook(lambda gradient: gradient * math.inf)
            return loss

        program.compute_loss = compute_loss

    return start


def test_fp16(tmp_path, data):
    """An overflow on one rank: no rank takes the step, the scale is halved, and the run
    goes on. A resumed run has the same bits."""
    program = module_of(patched(tmp_path, 13))
    options = [*TINY, "--data", data, "--precision", "fp16", "--out"]
    a, b = tmp_path / "a", tmp_path / "b"
    at_3 = at_step(program, 3, "1", overflow(program, 1))
    run(program, 2, *options, a, "--max_steps", 6, patch=at_3)
    run(program, 2, *options, b, "--max_steps", 2)
    before = load(b)
    at_1 = at_step(program, 1, "1", overflow(program, 1))
    run(program, 2, *options, b, "--max_steps", 3, patch=at_1)
    after = load(b)
    assert after["scaler"]["scale"] == before["scaler"]["scale"] / 2
    for name, weight in before["model"].items():
        assert torch.equal(weight, after["model"][name])
    run(program, 2, *options, b, "--max_steps", 6)
    assert metrics(b, "grad_norm")[3] == 0
    assert_same_bits(a, b)
    # fp32 is as without the recipe, fp16 is about fp32, and they are not mixed.
    options[options.index("fp16")] = "fp32"
    run(program, 2, *options, tmp_path / "c", "--max_steps", 6)
    train(2, *options, tmp_path / "d", "--max_steps", 6)
    assert_same_bits(tmp_path / "c", tmp_path / "d")
    for name in ("loss", "grad_norm"):
        fp16, fp32 = metrics(a, name)[2], metrics(tmp_path / "c", name)[2]
        assert fp16 == pytest.approx(fp32, rel=1e-2)
    options[options.index("fp32")] = "fp16"
    texts = run(program, 2, *options, tmp_path / "c", code=1)
    assert "has precision None, not fp16" in texts[0]


def test_fp16_ends_if_nothing_helps(tmp_path, data):
    """Each step overflows. When no smaller scale has helped, the run ends."""
    program = module_of(patched(tmp_path, 13))
    options = [*TINY, "--data", data, "--precision", "fp16", "--epochs", 9]
    texts = run(
        program, 2, *options, "--out", tmp_path, code=1, patch=overflow(program, 99)
    )
    assert "not finite" in texts[0]


# ---- 14: no launcher -----------------------------------------------------------------
def test_spawn(tmp_path, data):
    """--spawn 2: a signal to the first process alone stops both ranks, saved."""
    path = patched(tmp_path, 14)
    options = [*TINY, "--data", data, "--out", tmp_path / "a"]
    command = [sys.executable, path, *options, "--spawn", 2]
    process = launch(*command, "--epochs", 10000)
    process.wait_for("ranks: 2(.*\n)*step 2 ")
    process.send(signal.SIGTERM)
    assert "stopped by signal 15, saved" in process.end(143)
    step = load(tmp_path / "a")["step"]
    process = launch(*command, "--epochs", 10000, "--max_steps", step + 2)
    assert f"done: step {step + 2}" in process.end(0)


def test_spawn_of_a_rank_that_fails(tmp_path, data):
    path = patched(tmp_path, 14)
    options = [*TINY, "--data", data, "--out", tmp_path / "a", "--dim", 15]
    text = launch(sys.executable, path, *options, "--spawn", 2).end(1)
    assert "--dim 15 is not divisible by --heads 2" in text


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_init_method(tmp_path, data, method):
    """RANK, WORLD_SIZE and a URL are enough."""
    program = module_of(patched(tmp_path, 14))
    url = f"file://{tmp_path}/meet"
    if method == "tcp":
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    options = [*TINY, "--data", data, "--max_steps", 2, "--out"]
    nobody = {"MASTER_ADDR": "nobody.invalid", "MASTER_PORT": "1"}
    options += [tmp_path / "a", "--init_method", url]
    texts = run(program, 2, *options, env=[nobody, nobody])
    assert "ranks: 2" in texts[0] and "done: step 2" in texts[0]


# ---- 15: keep the last checkpoints ---------------------------------------------------
def kept(out):
    return sorted(int(path.name.split(".")[1]) for path in out.glob("checkpoint.*.pt"))


def damage(path):
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"damaged")


def test_keep_last(tmp_path, data):
    """Three stay. If the newest is damaged, the run goes on from the one before it."""
    program = module_of(patched(tmp_path, 15))
    a, b = tmp_path / "a", tmp_path / "b"
    options = [*TINY, "--data", data, "--save_every", 1, "--max_steps", 6, "--out"]
    run(program, 2, *options, a)
    shutil.copytree(a, b)
    assert kept(a) == [4, 5, 6]
    damage(a / "checkpoint.pt")  # it is the same file as that of step 6
    texts = run(program, 2, *options, a)
    assert "cannot be loaded" in texts[0] and "from step 5 to 6" in texts[0]
    assert kept(a) == [4, 5, 6]
    assert_same_bits(a, b)
    for path in a.glob("checkpoint*.pt"):
        damage(path)
    texts = run(program, 2, *options, a, code=1)
    assert "all checkpoints in" in texts[0]


def test_all_nodes_fall_back_to_the_same_file(tmp_path, data):
    """Each node has its own disk, and the newest file that is whole is on node 1."""
    program = module_of(patched(tmp_path, 15))
    options = [*TINY, "--data", data, "--save_every", 1, "--max_steps", 6, "--out"]
    train(2, *options, tmp_path / "whole")
    run(program, 2, *options, tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    for step in (5, 6):
        damage(tmp_path / "0" / f"checkpoint.{step:09}.pt")
    damage(tmp_path / "1" / "checkpoint.000000006.pt")
    damage(tmp_path / "1" / "checkpoint.pt")
    damage(tmp_path / "0" / "checkpoint.pt")

    def go_to_node():
        os.chdir(tmp_path / os.environ["RANK"])

    texts = run(program, 2, *options, ".", patch=go_to_node)
    assert "from step 5 to 6" in texts[0]
    assert_same_bits(tmp_path / "0", tmp_path / "whole")


@pytest.mark.parametrize("order", [(5, 15), (15, 5), (6, 13), (13, 6)])
def test_these_apply_together(tmp_path, order):
    compile(patched(tmp_path, *order).read_text(), "ddp_train.py", "exec")


def test_keep_last_with_fsdp2(tmp_path, data):
    program = module_of(patched(tmp_path, 5, 15))
    options = [*TINY, "--data", data, "--save_every", 1, "--max_steps", 4, "--out"]
    run(program, 2, *options, tmp_path / "a")
    damage(tmp_path / "a" / "checkpoint.pt")
    texts = run(program, 2, *options, tmp_path / "a")
    assert "from step 3 to 4" in texts[0]


# ---- 16: every sample ----------------------------------------------------------------
def in_double_precision():
    torch.set_default_dtype(torch.float64)


def test_every_sample(tmp_path, data):
    """61 samples, 8 a step: the last of an epoch has 5, and their exact mean.

    On one rank that is a plain batch of 5. Other splits give the same numbers.
    """
    program = module_of(patched(tmp_path, 16))
    generator = torch.Generator().manual_seed(0)
    content = torch.randint(256, [64 * 32 + 1], generator=generator)
    data.write_bytes(bytes(content.tolist()))
    options = [*TINY, "--data", data, "--epochs", 2, "--out"]
    one = tmp_path / "1 8 1"
    for size, batch_size, accum in [(1, 8, 1), (2, 4, 1), (2, 2, 2), (4, 2, 1)]:
        out = tmp_path / f"{size} {batch_size} {accum}"
        split = ["--batch_size", batch_size, "--accum", accum]
        texts = run(program, size, *options, out, *split, patch=in_double_precision)
        assert "from step 0 to 16" in texts[0]
        for name in ("loss", "grad_norm", "lr", "val_loss"):
            assert metrics(out, name) == pytest.approx(metrics(one, name), rel=1e-6)


def test_every_sample_resumes_with_the_same_bits(tmp_path, data):
    """It stops after a short step, and within an epoch."""
    program = module_of(patched(tmp_path, 16))
    options = [*TINY, "--data", data, "--dropout", 0.1, "--accum", 2, "--epochs", 2]
    options.append("--batch_size")
    run(program, 2, *options, 2, "--out", tmp_path / "a")
    for last in (8, 10, 16):
        run(program, 2, *options, 2, "--out", tmp_path / "b", "--max_steps", last)
    assert_same_bits(tmp_path / "a", tmp_path / "b")
    # Without a short step it has the bits of the program without the recipe.
    data.write_bytes(bytes(range(256)) * 8 + bytes(97))  # 64 samples
    run(program, 2, *options, 4, "--out", tmp_path / "c")
    train(2, *options, 4, "--out", tmp_path / "d")
    assert_same_bits(tmp_path / "c", tmp_path / "d")
