"""What the heads of recipes/*.diff promise, on two ranks and more: make test-recipes.

A recipe is applied to a copy of ddp_train.py, and that is loaded as a module. The ranks
are forks of this process. Recipes 6 and 7 skip without scikit-learn and transformers.
"""

import collections
import gzip
import importlib.util
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ddp_train
from harness import (
    TINY,
    assert_same_bits,
    at_call,
    end_all,
    flatten,
    fork_ranks,
    launch,
    load,
    metrics,
    rank_of_this,
    send_this,
    ticks,
    torchrun,
    train,
)
from test_recipes import OTHER_MODEL, RECIPES, changed_program, merged

pytestmark = pytest.mark.recipes
STEPS = 32


# ---- What the tests share ------------------------------------------------------------
@pytest.fixture
def recipe(tmp_path):
    """recipe("05", "15"): ddp_train.py with these recipes, as a module."""

    def load_module(*numbers, text=None):
        folder = tmp_path / "-".join(["with", *numbers])
        script = merged(folder, *numbers, text=text)
        spec = importlib.util.spec_from_file_location(folder.name, script)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load_module


def run(program, size, *options, code=0, patch=None, env=None):
    """Run it to its end in so many ranks. Returns them.

    patch(program) is called in each rank before. What it returns is the rank's value.
    """
    words = [str(word) for word in options]

    def rank():
        value = patch(program) if patch else None
        program.main(words)
        return value

    what = shlex.join(torchrun(size, program.__file__, *words))
    ranks = fork_ranks(size, rank, env, what)
    end_all(ranks, code)
    return ranks


@pytest.fixture(scope="session")
def larger(tmp_path_factory):
    """Options: a model that is not tiny, 32 steps, a save in the middle."""
    path = tmp_path_factory.mktemp("data") / "data"
    path.write_bytes(Path(ddp_train.__file__).read_bytes()[:13_000])
    words = [*TINY, "--dim", 64, "--data", path, "--dropout", 0.1]
    return [*words, "--max_steps", STEPS, "--save_every", 16]


@pytest.fixture(scope="session")
def plain(larger, tmp_path_factory):
    """The folder of such a run on two ranks without a recipe."""
    out = tmp_path_factory.mktemp("plain")
    train(2, *larger, "--out", out)
    return out


def stop_in_step_5(program):
    """All ranks get SIGTERM."""
    at_call(program, "train_step", 5, send_this(signal.SIGTERM), rank_of_this())


def around_each_step(program, before=None, after=None):
    """Call before(step, model, optimizer) and after(...) around each train_step().

    The first step of the process is 1.
    """
    train_step = program.train_step
    steps = itertools.count(1)

    def wrapped(model, batches, optimizer, *others):
        step = next(steps)
        if before:
            before(step, model, optimizer)
        result = train_step(model, batches, optimizer, *others)
        if after:
            after(step, model, optimizer)
        return result

    program.train_step = wrapped


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_runs_in_a_changed_program(recipe, tmp_path, path):
    """With another model, optimizer and data: it trains, resumes, and evaluates."""
    number = path.name[:2]
    if number in OTHER_MODEL:
        pytest.skip(OTHER_MODEL[number])
    program = recipe(number, text=changed_program())
    options = ["--device", "cpu", "--log_every", 1, "--out", tmp_path / "out"]
    run(program, 2, *options, "--max_steps", 5)
    run(program, 2, *options, "--max_steps", 30)
    losses = metrics(tmp_path / "out", "loss")
    assert len(losses) == 30 and losses[30] < losses[1] / 2
    assert 30 in metrics(tmp_path / "out", "val_loss")


# ---- 1: compressed gradients ---------------------------------------------------------
def count_bytes(program):
    """A rank's value: the bytes of the large all-reduces of each step, and so on."""
    seen = {"sent": [], "numbers": 0}
    all_reduce = dist.all_reduce

    def counting(tensor, *others, **more):
        if seen["sent"] and tensor.numel() > 9:  # smaller: the loss, the stop signal
            seen["sent"][-1] += tensor.nbytes
        return all_reduce(tensor, *others, **more)

    def before(step, model, optimizer):
        seen["sent"].append(0)
        seen["numbers"] = sum(weight.numel() for weight in model.parameters())

    dist.all_reduce = counting
    around_each_step(program, before)
    return seen


@pytest.mark.parametrize("how", ["fp16", "powersgd"])
def test_compressed_gradients(recipe, larger, plain, tmp_path, how):
    """Half of the bytes, or a third at most (of larger models less). The same loss.

    With fp16 a stop changes no bit.
    """
    program, options = recipe("01"), [*larger, "--compress", how]
    one, two = tmp_path / "one", tmp_path / "two"
    seen = run(program, 2, *options, "--out", one, patch=count_bytes)[0].value
    share = seen["sent"][-1] / (4 * seen["numbers"])
    if how == "powersgd":
        assert share < 1 / 3
    else:
        assert share == 1 / 2
        run(program, 2, *options, "--out", two, "--max_steps", 5)
        run(program, 2, *options, "--out", two)
        assert_same_bits(one, two)
    loss = metrics(one, "val_loss")[STEPS]
    assert loss == pytest.approx(metrics(plain, "val_loss")[STEPS], rel=0.02)


# ---- 3: where the time goes ----------------------------------------------------------
def test_where_the_time_goes(recipe, larger, plain, tmp_path):
    """Shares of 0 to 1, a trace of five steps of each rank, and the same bits."""
    run(recipe("03"), 2, *larger, "--out", tmp_path)
    waiting = metrics(tmp_path, "waiting")
    assert len(waiting) == STEPS and all(0 <= share < 1 for share in waiting.values())
    for rank in (0, 1):
        with gzip.open(tmp_path / f"trace.{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert names.count("Optimizer.step#AdamW.step") == 5
        assert "gloo:all_reduce" in names
    assert_same_bits(plain, tmp_path)


# ---- 5: FSDP2 ------------------------------------------------------------------------
def measure_memory(program):
    """A rank's value: the bytes of weights and moments that it has after a step."""
    seen = {}

    def after(step, model, optimizer):
        seen["weights"] = bytes_of(model.parameters())
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


@pytest.mark.parametrize("accum", [1, 2])
def test_fsdp2(recipe, larger, tmp_path, accum):
    """Half of the weights and of the moments. The numbers are those of DDP.

    A run goes on with the same bits, on another number of ranks with the same numbers,
    and without the recipe.
    """
    # 20 samples are evaluated, three or five batches: rank 0 has one more than rank 1.
    options = [*larger, "--dropout", 0, "--batch_size", 8 // accum, "--accum", accum]
    train(2, *options, "--out", tmp_path / "plain")
    program, one = recipe("05"), [*options, "--out", tmp_path / "one"]
    seen = run(program, 2, *one, patch=measure_memory)[0].value
    total = bytes_of(load(tmp_path / "one")["model"].values())
    assert seen["weights"] == pytest.approx(total / 2, rel=0.02)
    assert seen["moments"] == pytest.approx(total, rel=0.02)
    for name in ("loss", "grad_norm", "val_loss"):
        expected = metrics(tmp_path / "plain", name)
        assert metrics(tmp_path / "one", name) == pytest.approx(expected, rel=1e-4)
    two = [*options, "--out", tmp_path / "two"]
    run(program, 2, *two, code=143, patch=stop_in_step_5)
    run(program, 2, *two)
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert flatten(one["model"]) == flatten(two["model"])
    assert flatten(one["optimizer"]["state"]) == flatten(two["optimizer"]["state"])
    three = [*options, "--out", tmp_path / "three"]
    run(program, 2, *three, "--max_steps", 5)
    run(program, 1, *three, "--accum", 2 * accum, "--max_steps", 10)
    train(2, *three)
    expected = metrics(tmp_path / "plain", "loss")
    assert metrics(tmp_path / "three", "loss") == pytest.approx(expected, rel=1e-4)


# ---- 6 and 7: other models -----------------------------------------------------------
def test_images(recipe, tmp_path):
    """More than 90 % are right, and one rank evaluates as two do."""
    pytest.importorskip("sklearn.datasets")
    options = ["--device", "cpu", "--epochs", 4, "--out", tmp_path]
    program = recipe("06")
    run(program, 2, *options)
    accuracy = metrics(tmp_path, "accuracy")
    last = max(accuracy)
    assert accuracy[last] > 0.9
    run(program, 1, *options)
    assert metrics(tmp_path, "accuracy") == accuracy
    state = load(tmp_path)["model"]
    assert state["1.num_batches_tracked"] == last


def test_images_sync_bn_says_that_it_needs_gpus(recipe, tmp_path):
    pytest.importorskip("sklearn.datasets")
    options = ["--device", "cpu", "--sync_bn", "--out", tmp_path]
    ranks = run(recipe("06"), 2, *options, code=1)
    assert "SyncBatchNorm layers only work with GPU modules" in ranks[0].text


def test_transformers(recipe, larger, tmp_path):
    """It learns to count in tokens of 16 bits, and transformers loads the result."""
    transformers = pytest.importorskip("transformers")
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")  # before forks
    tokens = torch.arange(20_000).remainder(400).to(torch.uint16)
    tokens.numpy().tofile(tmp_path / "tokens")
    options = [*larger, "--data", tmp_path / "tokens", "--vocab", 500]
    run(recipe("07"), 2, *options, "--lr", 0.01, "--out", tmp_path)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=64, n_positions=32, vocab_size=500
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.load_state_dict(load(tmp_path)["model"])
    x = torch.arange(300, 332)[None]
    loss = model(x, labels=x).loss.item()
    assert loss < metrics(tmp_path, "loss")[1] / 2


# ---- 8: save in the background -------------------------------------------------------
def test_save_in_background(recipe, larger, tmp_path):
    """The write of step 5 waits for step 7. It has the weights of step 5, all the same.

    And the run ends after the last write.
    """
    options = [*larger, "--save_every", 5, "--max_steps", 7]

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
    rank0 = run(recipe("08"), 2, *options, "--out", out, patch=slow)[0]
    assert rank0.value == [7, 7]
    for number, step in ((1, 5), (2, 7)):
        train(2, *options, "--max_steps", step, "--out", tmp_path / "plain")
        assert load(tmp_path / "plain")["step"] == step
        shutil.move(out / f"{number}.pt", out / "checkpoint.pt")
        assert_same_bits(out, tmp_path / "plain")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_save_in_background_that_fails(recipe, larger, tmp_path):
    """The run ends at the next save, in one line."""
    (tmp_path / "checkpoint.tmp").symlink_to("/dev/full")
    options = [*larger, "--save_every", 5, "--out", tmp_path]
    (rank,) = run(recipe("08"), 1, *options, code=1)
    assert "step 10 " in rank.text and "step 11 " not in rank.text
    assert "cannot save" in rank.text and "Traceback" not in rank.text


# ---- 9: the same bits on three ranks -------------------------------------------------
def test_same_bits_on_three_ranks(recipe, tmp_path, data):
    program = recipe("09")
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
def test_end_all_when_one_hangs(recipe, tiny):
    """Rank 1 hangs. Both end long before --timeout, and say where they stood."""

    def hang(program):
        at_call(program, "compute_loss", 3, lambda: time.sleep(3000), rank=1)

    ranks = run(recipe("10"), 2, *tiny, "--hang_after", 15, code=1, patch=hang)
    assert "step 2 " in ranks[0].text and "step 3 " not in ranks[0].text
    for rank in ranks:
        assert "Timeout (0:00:15)!" in rank.text and "in train_step" in rank.text


def test_watching_for_a_hang_does_no_harm(recipe, tiny, tmp_path):
    """A step that is shorter than the limit is not ended, and no bit changes."""

    def wait(program):
        at_call(program, "train_step", 3, lambda: time.sleep(1), rank=1)

    options = [*tiny, "--max_steps", 4, "--out"]
    run(recipe("10"), 2, *options, tmp_path / "a", "--hang_after", 60, patch=wait)
    train(2, *options, tmp_path / "b")
    assert_same_bits(tmp_path / "a", tmp_path / "b")


# ---- 13: fp16 ------------------------------------------------------------------------
def overflow(first, last, rank=0):
    """A patch: in these steps the gradient of one rank is infinite."""

    def patch(program):
        if rank_of_this() == rank:
            compute_loss = program.compute_loss
            calls = itertools.count(1)

            def infinite(*args):
                loss = compute_loss(*args)
                if loss.requires_grad and first <= next(calls) <= last:
                    loss.register_hook(lambda gradient: gradient * math.inf)
                return loss

            program.compute_loss = infinite

    return patch


def test_fp16(recipe, tmp_path, data):
    """An overflow on one rank: no rank takes the step, the scale is halved, and the run
    goes on. A resumed run has the same bits."""
    program = recipe("13")
    options = [*TINY, "--data", data, "--precision", "fp16", "--out"]
    a, b = tmp_path / "a", tmp_path / "b"
    run(program, 2, *options, a, "--max_steps", 6, patch=overflow(3, 3, rank=1))
    run(program, 2, *options, b, "--max_steps", 2)
    before = load(b)
    run(program, 2, *options, b, "--max_steps", 3, patch=overflow(1, 1, rank=1))
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
    ranks = run(program, 2, *options, tmp_path / "c", code=1)
    assert "has precision None, not fp16" in ranks[0].text


def test_fp16_ends_if_nothing_helps(recipe, tiny):
    """Each step overflows. When no smaller scale has helped, the run ends."""
    options = [*tiny, "--precision", "fp16", "--epochs", 9]
    ranks = run(recipe("13"), 2, *options, code=1, patch=overflow(1, 99))
    assert "not finite" in ranks[0].text


# ---- 14: no launcher -----------------------------------------------------------------
def test_spawn(recipe, tiny, out):
    """--spawn 2: a signal to the first process alone stops both ranks, saved."""
    command = [sys.executable, recipe("14").__file__, *tiny, "--spawn", 2]
    process = launch(*command, "--epochs", 10000)
    process.wait_for("ranks: 2(.*\n)*step 2 ")
    process.send(signal.SIGTERM)
    assert "stopped by signal 15, saved" in process.end(143)
    step = load(out)["step"]
    process = launch(*command, "--epochs", 10000, "--max_steps", step + 2)
    assert f"done: step {step + 2}" in process.end(0)


def test_spawn_of_a_rank_that_fails(recipe, tiny):
    script = recipe("14").__file__
    text = launch(sys.executable, script, *tiny, "--dim", 15, "--spawn", 2).end(1)
    assert "--dim 15 is not divisible by --heads 2" in text


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_init_method(recipe, tiny, tmp_path, method):
    """RANK, WORLD_SIZE and a URL are enough."""
    url = f"file://{tmp_path}/meet"
    if method == "tcp":
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    options = [*tiny, "--max_steps", 2, "--init_method", url]
    nobody = {"MASTER_ADDR": "nobody.invalid", "MASTER_PORT": "1"}
    ranks = run(recipe("14"), 2, *options, env=[nobody, nobody])
    assert "ranks: 2" in ranks[0].text and "done: step 2" in ranks[0].text


# ---- 15: keep the last checkpoints ---------------------------------------------------
def kept(out):
    return sorted(int(path.name.split(".")[1]) for path in out.glob("checkpoint.*.pt"))


def damage(path):
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"damaged")


def test_keep_last(recipe, tmp_path, data):
    """Three stay. If the newest is damaged, the run goes on from the one before it."""
    program = recipe("15")
    a, b = tmp_path / "a", tmp_path / "b"
    options = [*TINY, "--data", data, "--save_every", 1, "--max_steps", 6, "--out"]
    run(program, 2, *options, a)
    shutil.copytree(a, b)
    assert kept(a) == [4, 5, 6]
    damage(a / "checkpoint.pt")  # it is the same file as that of step 6
    text = run(program, 2, *options, a)[0].text
    assert "cannot be loaded" in text and "from step 5 to 6" in text
    assert kept(a) == [4, 5, 6]
    assert_same_bits(a, b)
    for path in a.glob("checkpoint*.pt"):
        damage(path)
    ranks = run(program, 2, *options, a, code=1)
    assert "all checkpoints in" in ranks[0].text


def test_all_nodes_fall_back_to_the_same_file(recipe, tmp_path, data):
    """Each node has its own disk, and the newest file that is whole is on node 1."""
    program = recipe("15")
    options = [*TINY, "--data", data, "--save_every", 1, "--max_steps", 6, "--out"]
    train(2, *options, tmp_path / "whole")
    run(program, 2, *options, tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    for step in (5, 6):
        damage(tmp_path / "0" / f"checkpoint.{step:09}.pt")
    damage(tmp_path / "1" / "checkpoint.000000006.pt")
    damage(tmp_path / "1" / "checkpoint.pt")
    damage(tmp_path / "0" / "checkpoint.pt")

    def go_to_node(program):
        os.chdir(tmp_path / os.environ["RANK"])

    ranks = run(program, 2, *options, ".", patch=go_to_node)
    assert "from step 5 to 6" in ranks[0].text
    assert_same_bits(tmp_path / "0", tmp_path / "whole")


def test_keep_last_with_fsdp2(recipe, tiny, out):
    program = recipe("05", "15")
    options = [*tiny, "--save_every", 1, "--max_steps", 4]
    run(program, 2, *options)
    damage(out / "checkpoint.pt")
    assert "from step 3 to 4" in run(program, 2, *options)[0].text


# ---- 16: every sample ----------------------------------------------------------------
@pytest.fixture
def of_61(data):
    """The file has 61 samples to train with, and 3 to evaluate."""
    generator = torch.Generator().manual_seed(0)
    content = torch.randint(256, [64 * 32 + 1], generator=generator)
    data.write_bytes(bytes(content.tolist()))
    return data


def test_every_sample(recipe, tmp_path, of_61):
    """61 samples, 8 a step: the last of an epoch has 5, and their exact mean.

    On one rank that is a plain batch of 5. Other splits give the same numbers.
    """

    def in_double_precision(program):
        torch.set_default_dtype(torch.float64)

    program = recipe("16")
    options = [*TINY, "--data", of_61, "--epochs", 2, "--out"]
    one = tmp_path / "1 8 1"
    for size, batch_size, accum in [(1, 8, 1), (2, 4, 1), (2, 2, 2), (4, 2, 1)]:
        out = tmp_path / f"{size} {batch_size} {accum}"
        split = ["--batch_size", batch_size, "--accum", accum]
        ranks = run(program, size, *options, out, *split, patch=in_double_precision)
        assert "from step 0 to 16" in ranks[0].text
        for name in ("loss", "grad_norm", "lr", "val_loss"):
            assert metrics(out, name) == pytest.approx(metrics(one, name), rel=1e-6)


def test_every_sample_resumes_with_the_same_bits(recipe, tmp_path, data):
    """It stops after a short step, and within an epoch."""
    program = recipe("16")
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


def test_every_sample_though_a_run_goes_on_with_other_ranks(recipe, tmp_path, of_61):
    """Two epochs, on two ranks and then on three: each sample is trained twice."""

    def note_samples(program):
        """A rank's value: the samples that it has trained."""
        weighted_batches = program.weighted_batches
        samples = []

        def noting(*args):
            for batch, weight in weighted_batches(*args):
                samples.extend(bytes(x) for x in batch[0].tolist() if weight > 0)
                yield batch, weight

        program.weighted_batches = noting
        return samples

    program = recipe("16")
    options = [*TINY, "--data", of_61, "--epochs", 2, "--out", tmp_path]
    ranks = run(program, 2, *options, "--max_steps", 9, patch=note_samples)
    assert load(tmp_path)["place"] == 61 + 8
    ranks += run(program, 3, *options, "--batch_size", 3, patch=note_samples)
    assert load(tmp_path)["place"] == 61 + 61
    times = collections.Counter(sample for rank in ranks for sample in rank.value)
    assert len(times) == 61 and set(times.values()) == {2}
