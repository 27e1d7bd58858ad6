"""What ddp_train.py promises, in the order of its sections. A test's name is a promise.

    pytest test_ddp_train.py                       all that this machine can run
    pytest test_ddp_train.py -m "not processes"    the direct tests: some seconds

Most tests that start ranks fork this process, so that torch is not imported again; some
use torchrun. tests/harness.py starts the ranks, breaks the program, and reads what is
left. It all needs torch, numpy and pytest. tests/ has more tests: of the scripts, the
page, the recipes, of GPUs.
"""

import collections
import contextlib
import errno
import fcntl
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import types
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Subset, random_split

import ddp_train
from ddp_train import Checkpoint, StopSignal, World
from harness import (
    ALONE,
    CPU,
    DATA,
    DEADLINE,
    HARD,
    PATCHED,
    SCRIPT,
    TINY,
    Part,
    assert_same_run,
    at_call,
    before_step,
    boom,
    checkpoint_of,
    end_all,
    enter_twice,
    flatten,
    fork_ranks,
    free_port,
    hang_in_step_3,
    in_ranks,
    launch,
    load,
    main,
    metrics,
    noise,
    parse,
    processes,
    rank_of_this,
    refuses,
    send_this,
    start_training,
    ticks,
    torchrun,
    train,
    try_damaged_files,
)

pytest_plugins = ["harness"]  # its fixtures


# ---- MODEL ---------------------------------------------------------------------------
def test_model_sees_no_later_byte():
    """Other bytes from a place on change what comes from there on, and only that."""
    model = ddp_train.build_model(parse(*TINY)).eval()
    x = torch.randint(256, (3, 8))
    for place in (1, 5, 7):
        other = torch.cat([x[:, :place], 255 - x[:, place:]], 1)
        changed = (model(x) - model(other)).detach().abs().amax((0, 2))
        assert changed[:place].max() < 1e-6
        assert changed[place:].min() > 1e-4


def test_dropout_is_that_of_the_option():
    torch.manual_seed(0)
    x = torch.randint(256, (1, 8))
    for share, same in ((0, True), (0.5, False)):
        model = ddp_train.build_model(parse(*TINY, "--dropout", share))
        assert torch.equal(model(x), model(x)) == same


# ---- DATA ----------------------------------------------------------------------------
def test_sample_is_bytes_and_those_one_later(data):
    train_set, val_set, _ = ddp_train.load_data(parse(*TINY, "--data", data))
    assert (len(train_set), len(val_set)) == (60, 3)
    for i in range(63):
        x, y = train_set[i] if i < 60 else val_set[i - 60]
        assert bytes(x) == DATA[32 * i :][:32]
        assert bytes(y) == DATA[32 * i + 1 :][:32]


def test_held_out_bytes_are_not_trained(data):
    """What is to be predicted in an evaluation was never predicted in training."""
    data.write_bytes(bytes(32 * 60 + 1) + b"x" * 127)
    train_set, val_set, _ = ddp_train.load_data(parse(*TINY, "--data", data))
    for i in range(len(train_set)):
        assert max(train_set[i][1]) == 0
    for i in range(len(val_set)):
        assert bytes(val_set[i][1]) == b"x" * 32


@pytest.mark.parametrize("size, says", [(None, "No such file"), (0, "0 "), (64, "64 ")])
def test_missing_or_too_little_data_are_refused(data, size, says):
    data.unlink() if size is None else data.write_bytes(DATA[:size])
    with refuses(data, says) if size is not None else refuses("no data", says, data):
        ddp_train.load_data(parse(*TINY, "--data", data))


def test_two_samples_are_enough(data):
    data.write_bytes(DATA[:65])
    train_set, val_set, _ = ddp_train.load_data(parse(*TINY, "--data", data))
    assert (len(train_set), len(val_set)) == (1, 1)


def test_text_of_the_data_shows_one_other_byte(data):
    options = parse(*TINY, "--data", data)
    text = ddp_train.load_data(options)[2]
    assert ddp_train.load_data(options)[2] == text
    for other in (DATA[:-1] + b"!", DATA + b"\0"):
        data.write_bytes(other)
        assert ddp_train.load_data(options)[2] != text


# ---- THE RUN: it starts, learns and ends ---------------------------------------------
@processes
def test_run_learns_saves_and_is_finished(tiny, out):
    """The same command again trains nothing, and says which options are others."""
    (said,) = train(1, *tiny, "--epochs", 1, "--lr", 0.01)
    assert f"ranks: 1, cpu, fp32, host {socket.gethostname()}\n" in said
    assert "an epoch: 60 samples, 4 a step, 0 left over\nfrom step 0 to 15\n" in said
    assert said.endswith(f"done: step 15, saved in {out}/checkpoint.pt\n")
    losses = metrics(out, "loss")
    assert list(losses) == list(range(1, 16))
    assert losses[15] < losses[1] - 0.3
    assert set(metrics(out, "val_loss")) == {15}
    bits = metrics(out, "val_loss")[15] / math.log(2)
    assert metrics(out, "bits_per_byte")[15] == pytest.approx(bits)
    before = (out / "checkpoint.pt").read_bytes()
    (said,) = train(1, *tiny, "--epochs", 1, "--lr", 0.02)
    assert "--lr is 0.02, in the checkpoint it was 0.01\n" in said
    assert "from step 15 to 15\n" in said
    assert "done: step 15" in said
    assert (out / "checkpoint.pt").read_bytes() == before
    assert metrics(out, "loss") == losses


@processes
def test_run_can_be_extended(tiny, out):
    """Fewer steps or epochs than are done end it."""
    options = [*tiny, "--log_every", 50]
    wanted = [("--max_steps", 4, 4), ("--max_steps", 3, 4), ("--max_steps", 6, 6)]
    wanted += [("--epochs", 1, 15), ("--epochs", 2, 30), ("--epochs", 1, 30)]
    for option, number, step in wanted:
        train(1, *options, option, number)
        assert load(out)["step"] == step


def no_held_out_set():
    load_data = ddp_train.load_data

    def load_less(args):
        train_set, val_set, text = load_data(args)
        return train_set, Subset(val_set, []), text

    ddp_train.load_data = load_less


@processes
@pytest.mark.parametrize("size", [1, 2])
def test_run_without_a_held_out_set_trains_to_its_end(tiny, out, size):
    """Started again, too. No evaluation is logged."""
    options = [*tiny, "--epochs", 1, "--eval_every", 2]
    for _ in range(2):
        said = train(size, *options, patch=no_held_out_set)[0]
        assert said.splitlines()[-1].startswith(f"done: step {15 // size}, ")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(metrics(out, "loss")) == 15 // size


@processes
def test_only_rank_0_speaks_and_writes(tiny, out):

    def run():
        folder = [out, out / "1"][rank_of_this()]
        options = [*tiny, "--out", folder, "--max_steps", 2]
        main(*options)

    ranks = fork_ranks(2, run)
    said = end_all(ranks)
    assert "\nan epoch: 60 samples, 8 a step, 4 left over\n" in said[0]
    assert said[1] == ""
    assert list((out / "1").iterdir()) == []


@processes
def test_first_line_names_the_host_of_rank_0(tiny):
    """It need not be the one whose address all ranks know. The files are there."""

    def host():
        socket.gethostname = lambda: f"machine-{rank_of_this()}"

    said = train(2, *tiny, "--max_steps", 1, patch=host)[0]
    assert said.splitlines()[0] == "ranks: 2, cpu, fp32, host machine-0"


def lines_of(texts):
    """What each rank has said, which must be one line."""
    lines = []
    for text in texts:
        (line,) = text.splitlines()
        lines.append(line)
    return lines


def refused(size, *options):
    """What each rank says when it refuses to train: one line."""
    return lines_of(train(size, *options, code=1))


@processes
@pytest.mark.parametrize("size", [1, 2])
def test_bad_input_is_one_line_on_each_rank(tiny, size):
    for options, says in (
        (["--data", "/no/such"], "no data: "),
        (["--batch_size", 61], f"60 samples are less than one step of {61 * size}"),
        (["--heads", 3], "--dim 16 is not divisible by --heads 3"),
    ):
        for rank, line in enumerate(refused(size, *tiny, *options)):
            who = f"error: rank {rank}: " if size > 1 else ""
            assert line.startswith(f"{who}{says}")


# ---- THE RUN: the same numbers for any number of ranks -------------------------------
# Global batches of 8 in two epochs of 7 steps. 4 samples are left over in each.
EXACT = "--seed 7 --epochs 2 --grad_clip 1.75 --eval_every 5 --lr 0.001".split()
LAYOUTS = {
    "1 x 8": (1, "--batch_size 8"),
    "2 x 4": (2, "--batch_size 4"),
    "4 x 2": (4, "--batch_size 2"),
    "1 x 2 x accum 4": (1, "--batch_size 2 --accum 4"),
    "2 x 2 x accum 2": (2, "--batch_size 2 --accum 2"),
}


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def observe(*words):
    """Train. Returns what this rank has seen: samples, gradients, weights, and so on.

    draws: numbers that `random` and numpy would give to a step.
    """
    seen = types.SimpleNamespace(samples=[], gradients=[], seeds=[], draws=[])
    read = ddp_train.ByteWindows.__getitem__
    train_step = ddp_train.train_step
    take_step = torch.optim.AdamW.step
    seed = torch.manual_seed

    def note_sample(self, i):
        if torch.is_grad_enabled():
            seen.samples.append(i)
        return read(self, i)

    def note_gradient(optimizer, closure=None):
        [group] = optimizer.param_groups
        seen.gradients.append(flat(param.grad for param in group["params"]))
        seen.weights = flat(group["params"])
        return take_step(optimizer)

    def note_seed(number):
        seen.seeds.append(number)
        return seed(number)

    def note_draws(*args):
        seen.draws += [random.random(), numpy.random.random()]
        return train_step(*args)

    ddp_train.train_step = note_draws
    ddp_train.ByteWindows.__getitem__ = note_sample
    torch.optim.AdamW.step = note_gradient
    torch.manual_seed = note_seed
    main(*words)
    return seen


@pytest.fixture(scope="session")
def layouts(tmp_path_factory):
    """{name: (folder, what each rank has seen)}"""
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "data").write_bytes(DATA)
    runs = {}
    for name, (size, words) in LAYOUTS.items():
        options = [*TINY, *EXACT, *words.split(), "--data", folder / "data"]
        options += ["--out", folder / name]
        runs[name] = folder / name, in_ranks(size, lambda: observe(*options))  # noqa: B023
    return runs


def plain_loop(data):
    """The training of 1 x 8 as one writes it without this program."""
    args = parse(*TINY, *EXACT, "--batch_size", 8, "--data", data)
    torch.manual_seed(ddp_train.seed_of("weights", 7))
    model = ddp_train.build_model(args)
    optimizer = torch.optim.AdamW(model.parameters())
    train_set, _, _ = ddp_train.load_data(args)
    gradients = []
    losses = []
    for step in range(14):
        epoch, place = divmod(step, 7)
        indices = order_of(60, seed=7, epoch=epoch)[8 * place : 8 * place + 8]
        x = torch.stack([train_set[i][0] for i in indices])
        y = torch.stack([train_set[i][1] for i in indices])
        middle = epoch + (8 * place + 4) / 60
        optimizer.param_groups[0]["lr"] = args.lr * ddp_train.lr_factor(args, middle)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten().long())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.75)
        gradients.append(flat(param.grad for param in model.parameters()))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return gradients, losses, model.state_dict()


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    data = tmp_path_factory.mktemp("plain") / "data"
    data.write_bytes(DATA)
    [result] = in_ranks(1, lambda: plain_loop(data))
    return result


@processes
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_gradients_and_weights_are_those_of_a_plain_loop(layouts, plain, name):
    """The gradient is what the optimizer gets: averaged, then clipped."""
    folder, ranks = layouts[name]
    gradients, losses, weights = plain
    assert list(metrics(folder, "loss").values()) == pytest.approx(losses, rel=1e-6)
    assert len(metrics(folder, "loss")) == 14
    for rank in ranks:
        for found, expected in zip(rank.gradients, gradients, strict=True):
            assert (found - expected).norm() < 1e-5 * expected.norm()
        assert torch.equal(rank.weights, ranks[0].weights)
    for key, weight in load(folder)["model"].items():
        # The bias of the keys has no influence: its gradient is nothing but rounding.
        if not key.endswith("query_key_value.bias"):
            assert (weight - weights[key]).abs().max() < 1e-6


@processes
@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluations_rates_and_norms_are_the_same(layouts, name):
    folder, _ = layouts[name]
    expected, _ = layouts["1 x 8"]
    assert set(metrics(folder, "val_loss")) == {5, 7, 10, 14}
    for number in ("val_loss", "bits_per_byte", "lr", "grad_norm"):
        found = metrics(folder, number)
        assert found == pytest.approx(metrics(expected, number), rel=1e-5)
    norms = metrics(folder, "grad_norm").values()
    assert min(norms) < 1.75 < max(norms)  # some steps are clipped, and some are not


@processes
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_step_has_its_own_eight_samples(layouts, name):
    """The same for all layouts: in an epoch none comes twice, and 4 are left over."""
    _, ranks = layouts[name]
    share = 8 // len(ranks)
    for step in range(14):
        epoch, place = divmod(step, 7)
        read = []
        for rank in ranks:
            assert len(rank.samples) == 14 * share
            read += rank.samples[step * share :][:share]
        expected = order_of(60, seed=7, epoch=epoch)[8 * place : 8 * place + 8]
        assert sorted(read) == sorted(expected)


@processes
def test_random_numbers_differ_by_rank_and_step(layouts, tiny):
    """Nor are they those of the start, or of another --seed. So are random and numpy.

    torch.manual_seed() seeds the generators of GPUs, too.
    """
    _, ranks = layouts["4 x 2"]
    begin = [ddp_train.seed_of(use, 7) for use in ("data", "weights")]
    steps = []
    for rank in ranks:
        assert len(rank.seeds) >= 15
        steps += rank.seeds[-14:]
        assert rank.seeds[:2] == begin
    assert len({*begin, *steps}) == 2 + 4 * 14
    draws = [draw for rank in ranks for draw in rank.draws]
    assert len(set(draws)) == len(draws) == 2 * 4 * 14
    [other] = in_ranks(1, lambda: observe(*tiny, "--max_steps", 14))
    assert not set(other.seeds) & {*begin, *steps}
    assert not set(other.draws) & set(draws)
    [alone] = layouts["1 x 8"][1]
    assert alone.draws == ranks[0].draws  # a step draws the same in each run


class CountingDDP(ddp_train.DistributedDataParallel):
    """It counts how often the gradients are averaged."""

    averages = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_comm_hook(None, self.count)

    @staticmethod
    def count(group, bucket):
        CountingDDP.averages += 1
        return allreduce_hook(group, bucket)


@processes
def test_gradients_are_averaged_once_per_optimizer_step(tiny):
    def count():
        ddp_train.DistributedDataParallel = CountingDDP
        options = [*tiny, "--batch_size", 2, "--accum", 3, "--max_steps", 4]
        main(*options)
        return CountingDDP.averages

    assert in_ranks(2, count) == [4, 4]


def skip_ddp_in(*steps):
    """These steps call the model itself, so their gradients are not averaged."""
    train_step = ddp_train.train_step
    calls = itertools.count(1)

    def step(model, *others):
        if next(calls) in steps:
            model = model.module
        return train_step(model, *others)

    ddp_train.train_step = step


@processes
@pytest.mark.parametrize("size, steps, lr", [(2, [3], 1e-7), (3, range(1, 7), 0.01)])
def test_step_without_ddp_ends_all_ranks_unsaved(tiny, out, size, steps, lr):
    """Also if it is one of several between two log lines, at the lowest rate."""
    options = [*tiny, "--lr", lr, "--log_every", 50, "--save_every", 6]
    said = train(size, *options, patch=lambda: skip_ddp_in(*steps), code=1)
    for rank, text in enumerate(said):
        line = text.splitlines()[-1]
        assert line.startswith(f"error: rank {rank}: not averaged by DDP: ")
        assert "Traceback" not in text
    assert not (out / "checkpoint.pt").exists()


@processes
@pytest.mark.parametrize(
    "size, words",
    [
        (2, "--precision bf16 --accum 2 --log_every 2"),
        (3, "--grad_clip 0.1 --accum 2 --lr 0.05"),
    ],
)
def test_gradients_of_ddp_are_equal_on_all_ranks(tiny, size, words):
    """Though each has other samples, losses and dropout: no false alarm."""
    options = [*tiny, "--dropout", 0.2, "--batch_size", 3, "--epochs", 2]
    said = train(size, *options, *words.split())[0]
    assert "\ndone: " in said


def noise_in_the_optimizer():
    """Each rank draws its own, as each has its own seed."""
    take_step = torch.optim.AdamW.step

    def step(optimizer, closure=None):
        take_step(optimizer)
        for weight in optimizer.param_groups[0]["params"]:
            weight.data += 1e-4 * torch.randn_like(weight)

    torch.optim.AdamW.step = step


def rate_of_each_rank():
    """As of a scheduler that follows the loss of the rank."""
    factor = ddp_train.lr_factor
    share = 1 + rank_of_this() / 2
    ddp_train.lr_factor = lambda args, done: factor(args, done) * share


@processes
@pytest.mark.parametrize("patch", [noise_in_the_optimizer, rate_of_each_rank])
def test_weights_that_differ_end_all_ranks_unsaved(tiny, out, patch):
    """DDP averages all gradients that it knows, but the weights drift apart."""
    said = train(2, *tiny, "--save_every", 6, patch=patch, code=1)
    for rank, text in enumerate(said):
        line = text.splitlines()[-1]
        assert line.startswith(f"error: rank {rank}: the ranks have different weights")
    assert not (out / "checkpoint.pt").exists()


@processes
@pytest.mark.parametrize("size", [1, 2])
def test_weight_outside_of_the_model_ends_the_run_at_its_start(tiny, out, size):
    """It would be trained, but not saved, and DDP does not know it."""

    def weight_outside():
        build_optimizer = ddp_train.build_optimizer

        def build(model, args):
            optimizer = build_optimizer(model, args)
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(()))]})
            return optimizer

        ddp_train.build_optimizer = build

    for text in train(size, *tiny, patch=weight_outside, code=1):
        assert "optimizer has a weight that is in no module of the parts" in text
        assert "step 1 " not in text
    assert not (out / "checkpoint.pt").exists()


class Two(nn.Module):
    """Two layers of one shape. order: which one is defined first."""

    def __init__(self, order="ab"):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in order})


@processes
def test_models_of_ranks_with_another_order_of_weights_are_refused():
    """As from a set of names. DDP compares the shapes, and would mix the weights."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            ddp_train.wrap(Two(["ab", "ba"][world.rank]), world)

    for line in lines_of(end_all(fork_ranks(2, rank), code=1)):
        other, first = "layers.b.weight (2, 2)", "layers.a.weight (2, 2)"
        assert f"tensor 0 is {other} on rank 1" in line
        assert f"but {first} on rank 0" in line


@processes
def test_models_of_ranks_with_another_order_of_buffers_are_refused():
    def rank():
        with ddp_train.distributed("cpu") as world:
            model = nn.Linear(2, 2)
            for name in ["ab", "ba"][world.rank]:
                model.register_buffer(name, torch.zeros(()))
            ddp_train.wrap(model, world)

    for line in lines_of(end_all(fork_ranks(2, rank), code=1)):
        assert "tensor 2 is b () on rank 1" in line


@processes
@pytest.mark.parametrize("size", [1, 2])
def test_gradient_that_a_script_keeps_stays_as_it_is(size):
    """As in gradient surgery. With bucket views the next backward() writes into it."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            model = nn.Linear(2, 1, bias=False)
            wrapped = ddp_train.wrap(model, world)
            kept = []
            for scale in (1.0, 2.0, 3.0):  # DDP makes other buckets after the first one
                (wrapped(torch.ones(1, 2)) * scale).sum().backward()
                kept.append(model.weight.grad)
                model.zero_grad()
            return [gradient.tolist() for gradient in kept]

    assert in_ranks(size, rank) == [[[[1, 1]], [[2, 2]], [[3, 3]]]] * size


@processes
def test_options_of_ddp_are_those_of_the_user():
    """Without this one the second step of a model with an unused weight fails."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            model = Two()
            model.forward = lambda x: model.layers["a"](x)
            wrapped = ddp_train.wrap(model, world, find_unused_parameters=True)
            for _ in range(2):
                wrapped(torch.ones(1, 2)).sum().backward()
            return model.layers["a"].bias.grad.tolist()

    assert in_ranks(2, rank) == [[2, 2]] * 2


@processes
def test_weights_that_differ_little_are_found():
    """Each weight alone, also if both ranks have the same norm of it."""

    def rank():
        with ddp_train.distributed("cpu"):
            torch.manual_seed(0)
            weights = [torch.randn(64, 64), torch.zeros(64)]
            for weight in weights:
                weight.requires_grad_()
            optimizer = torch.optim.SGD(weights, 0.1)
            ddp_train.check_same_weights(optimizer)
            print("alike")
            if rank_of_this() == 1:
                weight = weights[0].data
                change = torch.ones(64, 64)
                change -= weight * (change * weight).sum() / weight.norm() ** 2
                weight += 1e-4 * change * weight.norm() / change.norm()
            ddp_train.check_same_weights(optimizer)

    for text in end_all(fork_ranks(2, rank), code=1):
        assert text.splitlines().count("alike") == 1
        assert "the ranks have different weights" in text


@processes
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("number", [math.inf, math.nan, 1e30])
def test_weight_that_is_not_finite_ends_all_ranks_unsaved(tiny, out, size, number):
    """The last update may have made it: the loss was still finite."""

    def broken_update():
        take_step = torch.optim.AdamW.step

        def step(optimizer, closure=None):
            take_step(optimizer)
            optimizer.param_groups[0]["params"][0].data[0] = number

        torch.optim.AdamW.step = step

    said = train(size, *tiny, "--save_every", 1, patch=broken_update, code=1)
    for text in said:
        assert "a weight is not finite, not saved" in text.splitlines()[-1]
    assert not (out / "checkpoint.pt").exists()


@processes
@pytest.mark.parametrize("size", [1, 2])
def test_weights_that_the_optimizer_lacks_collect_no_gradients(tiny, out, size):
    """As if a head alone is trained. A resume would forget what they had collected."""

    def head_alone():
        ddp_train.build_optimizer = lambda model, args: torch.optim.AdamW(
            model.head.parameters(), args.lr
        )

    options = [*tiny, "--grad_clip", 0.1]
    for step in (3, 6):
        train(size, *options, "--max_steps", step, patch=head_alone)
    whole = out / "whole"
    train(size, *options, "--max_steps", 6, "--out", whole, patch=head_alone)
    assert metrics(out, "grad_norm")[6] == metrics(whole, "grad_norm")[6]


def test_step_leaves_no_gradient(monkeypatch):
    """Nor of a weight beside the model, such as the temperature of a loss."""
    model, beside = nn.Linear(2, 2), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), beside], 0.1)
    loss = lambda model, batch: (model(batch) * beside).mean()  # noqa: E731
    monkeypatch.setattr(ddp_train, "compute_loss", loss)
    batches = iter([torch.ones(1, 2)])
    autocast = torch.autocast("cpu", enabled=False)
    ddp_train.train_step(model, batches, optimizer, autocast, parse(), ALONE)
    assert beside != 1
    assert [w.grad for w in (*model.parameters(), beside)] == [None] * 3


@processes
def test_ranks_split_the_data_alike(tiny, out):
    """Also by chance: torch's generator has the same seed when the data are loaded."""

    def split_by_chance():
        load_data = ddp_train.load_data

        def split(args):
            train_set, _, text = load_data(args)
            parts = random_split(train_set, [40, len(train_set) - 40])
            print("held out:", parts[1].indices)
            return *parts, text

        ddp_train.load_data = split

    first = train(2, *tiny, "--max_steps", 2, patch=split_by_chance)
    second = train(2, *tiny, "--max_steps", 4, patch=split_by_chance)
    lines = [re.search("held out: .*", text)[0] for text in first + second]
    assert len(set(lines)) == 1
    other = train(1, *tiny, "--out", out / "b", "--seed", 5, patch=split_by_chance)
    assert lines[0] not in other[0]


@processes
@pytest.mark.parametrize("size", [1, 2])
def test_model_in_eval_mode_is_refused(tiny, size):
    """As a pretrained one may be: it would train without dropout."""

    def eval_mode():
        build_model = ddp_train.build_model
        ddp_train.build_model = lambda args: build_model(args).eval()

    for line in lines_of(train(size, *tiny, patch=eval_mode, code=1)):
        assert line.endswith("a model in eval mode: call its train()")


@processes
def test_each_sample_at_most_once_though_a_run_is_resumed_on_fewer_ranks(tiny):
    """On 4, 2 and 1 ranks, each in the middle of the epoch."""
    read = []
    for size, batch_size, last_step in ((4, 2, 3), (2, 3, 5), (1, 7, 99)):
        more = "--epochs", 1, "--batch_size", batch_size, "--max_steps", last_step
        options = [*tiny, *more]
        for rank in in_ranks(size, lambda: observe(*options)):  # noqa: B023
            read += rank.samples
    assert len(read) == len(set(read)) == 24 + 12 + 21


# ---- THE RUN: stop and resume --------------------------------------------------------
@pytest.fixture(scope="session")
def untouched(tmp_path_factory):
    """{ranks: the folder of a run that nobody stopped}"""
    folder = tmp_path_factory.mktemp("untouched")
    (folder / "data").write_bytes(DATA)
    folders = {}
    for size in (1, 2):
        folders[size] = folder / str(size)
        options = [*TINY, *HARD, "--data", folder / "data", "--out", folders[size]]
        train(size, *options, patch=noise)
    return folders


@processes
@pytest.mark.parametrize(
    "size, rank, step, number",
    [
        (1, 0, 4, "SIGTERM"),
        (2, 1, 5, "SIGINT"),
        (2, 0, 8, "SIGUSR1"),
        (2, 1, 7, "SIGHUP"),
    ],
)
def test_stopped_and_resumed_the_bits_are_the_same(
    tiny, out, untouched, size, rank, step, number
):
    """With dropout and noise. One rank stops all. 5 is a step of an evaluation."""
    number = signal.Signals[number]

    def stop():
        noise()
        before_step(step, send_this(number), rank)

    said = train(size, *tiny, *HARD, patch=stop, code=128 + number)[0]
    assert f"stopped by signal {number:d}, saved at step {step}\n" in said
    assert "done" not in said
    assert load(out)["step"] == step
    said = train(size, *tiny, *HARD, patch=noise)[0]
    assert f"from step {step} to " in said
    assert_same_run(untouched[size], out)


KILLED = {
    "in a step": (ddp_train, "train_step", 5, 3),
    "in a save": (os, "fsync", 2, 3),
    "in an evaluation": (ddp_train, "evaluate", 1, 5),
}


@processes
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("place", KILLED)
def test_killed_and_resumed_the_bits_are_the_same(tiny, out, untouched, size, place):
    where, name, call, step = KILLED[place]
    victim = 0 if where is os else size - 1

    def kill():
        noise()
        at_call(where, name, call, send_this(signal.SIGKILL), victim)

    ranks = start_training(size, *tiny, *HARD, patch=kill)
    for rank in ranks:
        rank.end(-9 if rank is ranks[victim] else 1)
    said = train(size, *tiny, *HARD, patch=noise)[0]
    assert f"from step {step} to " in said
    assert_same_run(untouched[size], out)


@processes
def test_three_ranks_resume_up_to_rounding(tiny, tmp_path):
    options = [*tiny, "--batch_size", 3, "--epochs", 2]
    train(3, *options, "--out", tmp_path / "a")
    train(
        3,
        *options,
        "--out",
        tmp_path / "b",
        patch=lambda: before_step(3, send_this(signal.SIGTERM), rank=2),
        code=143,
    )
    train(3, *options, "--out", tmp_path / "b")
    expected = metrics(tmp_path / "a", "loss")
    assert metrics(tmp_path / "b", "loss") == pytest.approx(expected, rel=1e-6)


@processes
def test_options_of_the_optimizer_are_those_of_this_start(tiny, out):
    """Not those of the checkpoint. Its state goes on."""

    def other_options():
        adamw = torch.optim.AdamW
        options = {"weight_decay": 0.5, "betas": (0.8, 0.9), "eps": 1e-5}
        torch.optim.AdamW = lambda *args, **more: adamw(*args, **more, **options)

    train(1, *tiny, "--max_steps", 2)
    train(1, *tiny, "--max_steps", 3, patch=other_options)
    optimizer = load(out)["optimizer"]
    (group,) = optimizer["param_groups"]
    used = group["weight_decay"], tuple(group["betas"]), group["eps"]
    assert used == (0.5, (0.8, 0.9), 1e-5)
    assert optimizer["state"][0]["step"] == 3


@processes
def test_group_of_the_optimizer_keeps_its_own_rate(tiny, out):
    """Its share of --lr, in each step, and also after a resume with another --lr."""

    def two_groups():
        adamw = torch.optim.AdamW

        def make(weights, lr, fused):
            first, *others = weights
            slow = {"params": [first], "lr": lr / 8}
            return adamw([slow, {"params": others}], lr, fused=fused)

        torch.optim.AdamW = make

    for step, lr in ((2, 0.01), (4, 0.03)):
        train(1, *tiny, "--max_steps", step, "--lr", lr, patch=two_groups)
        slow, other = [group["lr"] for group in load(out)["optimizer"]["param_groups"]]
        assert slow == metrics(out, "lr")[step]  # that of the first group
        assert slow == pytest.approx(other / 8)
        middle = (4 * step - 2) / 60  # of the step, in epochs
        factor = ddp_train.lr_factor(parse(*TINY), middle)
        assert slow == pytest.approx(lr / 8 * factor)


@processes
@pytest.mark.parametrize("size", [1, 2])
def test_signal_in_the_last_step_changes_nothing(tiny, out, size):
    """Nor does a step of all samples of the epoch."""
    options = [*tiny, "--batch_size", 60 // size, "--epochs", 3]

    def stop():
        before_step(3, send_this(signal.SIGTERM))

    assert "done: step 3" in train(size, *options, patch=stop)[0]
    assert set(metrics(out, "val_loss")) == {1, 2, 3}


@processes
def test_lost_evaluation_is_made_though_no_step_is_left(tiny, out):
    """Stopped one step before the end, then resumed with twice the batch."""

    options = [*tiny, "--epochs", 1]
    train(
        1, *options, patch=lambda: before_step(14, send_this(signal.SIGTERM)), code=143
    )
    assert metrics(out, "val_loss") == {}
    (said,) = train(1, *options, "--batch_size", 8)
    assert "from step 14 to 14" in said
    assert set(metrics(out, "val_loss")) == {14}


# ---- THE RUN: a step, and its log line -----------------------------------------------
@processes
def test_bf16_computes_in_bf16_and_keeps_fp32_weights(tiny, out):
    def check():
        """backward() must be outside of autocast."""
        seen = set()
        forward = nn.Linear.forward

        def linear(self, x):
            y = forward(self, x)
            seen.add(y.dtype)
            return y

        nn.Linear.forward = linear
        main(*options)
        return seen

    options = [*tiny, "--precision", "bf16", "--max_steps", 3]
    assert in_ranks(2, check) == [{torch.bfloat16}] * 2
    for weight in load(out)["model"].values():
        assert weight.dtype == torch.float32


@processes
def test_compile_has_the_same_numbers_and_names(tiny, tmp_path):
    """The graphs run as they are. tests/test_long.py has the real compiler."""

    def compile_quickly():
        original = torch.compile
        torch.compile = lambda model: original(model, backend=with_eager)

    def with_eager(graph, inputs):
        print("compiled")
        return graph.forward

    options = [*tiny, "--accum", 2, "--max_steps", 2]
    train(2, *options, "--out", tmp_path / "a")
    options += ["--out", tmp_path / "b", "--compile"]
    for text in train(2, *options, patch=compile_quickly):
        assert "compiled" in text
    a, b = load(tmp_path / "a")["model"], load(tmp_path / "b")["model"]
    assert list(a) == list(b)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_learning_rate_warms_up_and_then_follows_a_cosine():
    args = parse("--warmup", 0.1, "--epochs", 4, "--max_steps", 1)
    cosine = (1 + math.sqrt(0.5)) / 2
    factors = {0: 0, 0.05: 0.5, 0.1: 1, 0.325: cosine, 0.55: 0.5, 1: 0}
    for progress, factor in factors.items():
        found = ddp_train.lr_factor(args, 4 * progress)
        assert found == pytest.approx(factor, abs=1e-12)
    args.warmup = 0
    assert ddp_train.lr_factor(args, 0) == 1


@processes
def test_loss_is_the_mean_over_all_steps_since_the_last_line(tiny, tmp_path):
    """A save comes with a line, an evaluation with a save."""
    rare = "--log_every 6 --save_every 4 --eval_every 9".split()
    train(2, *tiny, "--epochs", 1, "--out", tmp_path / "a", "--log_every", 1)
    train(2, *tiny, "--epochs", 1, "--out", tmp_path / "b", *rare, "--max_steps", 7)
    train(2, *tiny, "--epochs", 2, "--out", tmp_path / "b", *rare)
    losses = metrics(tmp_path / "a", "loss")
    found = metrics(tmp_path / "b", "loss")
    assert set(found) == {4, 6, 7, 8, 9, 12, 14}
    assert found[4] == pytest.approx(sum(losses[step] for step in (1, 2, 3, 4)) / 4)
    assert found[6] == pytest.approx((losses[5] + losses[6]) / 2)
    assert found[7] == pytest.approx(losses[7])
    norms = metrics(tmp_path / "a", "grad_norm")
    found = metrics(tmp_path / "b", "grad_norm")
    assert found[4] == pytest.approx(sum(norms[step] for step in (1, 2, 3, 4)) / 4)
    assert found[6] == pytest.approx((norms[5] + norms[6]) / 2)


def one_more():
    """train_step() returns a further number: 1 in the first step, on rank 1 11."""
    train_step = ddp_train.train_step
    calls = itertools.count(1)

    def step(*args):
        number = next(calls) + 10 * rank_of_this()
        return {**train_step(*args), "one_more": torch.tensor(number)}

    ddp_train.train_step = step


@processes
def test_mean_over_ranks_goes_by_name():
    def rank():
        with ddp_train.distributed("cpu") as world:
            means = [{"b": 1.0, "a": 100.0}, {"a": 300.0, "b": 2.0}][world.rank]
            return list(ddp_train.mean_over_ranks(means, world).items())

    in_order = [("b", 1.5), ("a", 200.0)]
    assert in_ranks(2, rank) == [in_order, in_order[::-1]]


@processes
@pytest.mark.parametrize("names", ["ac", "a", "abc", ""])
def test_means_of_other_names_are_refused(names):
    """Not mixed, and not waited for."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            mine = ["ab", names][world.rank]
            ddp_train.mean_over_ranks(dict.fromkeys(mine, 1.0), world)

    for line in lines_of(end_all(fork_ranks(2, rank), code=1)):
        assert f"the names of the means is {list(names)} on rank 1" in line


@processes
def test_each_number_of_a_step_is_logged_as_a_mean_over_steps_and_ranks(tiny, out):
    """A further entry of train_step()'s dict is enough. It may be a whole number."""
    train(2, *tiny, "--log_every", 3, "--max_steps", 6, patch=one_more)
    assert metrics(out, "one_more") == {3: 2 + 5, 6: 5 + 5}


@processes
def test_speed_counts_the_samples_of_all_ranks_and_no_evaluation(tiny, out):
    def clock():
        """Each look at the clock takes a second, and an evaluation a thousand."""
        ticks = itertools.count()

        def evaluate(*args):
            for _ in range(1000):
                next(ticks)
            return {}

        ddp_train.evaluate = evaluate
        for step in range(1, 7):
            before_step(step, lambda: next(ticks), rank_of_this())
        time.perf_counter = lambda: next(ticks)

    options = [*tiny, "--log_every", 2, "--eval_every", 4, "--accum", 3]
    train(2, *options, "--max_steps", 6, "--epochs", 9, patch=clock)
    assert metrics(out, "samples_per_s") == {2: 16, 4: 16, 6: 16}
    assert metrics(out, "seconds_left") == {2: 6, 4: 3, 6: 0}


@processes
def test_nan_on_one_rank_between_two_lines_is_not_saved(tiny, out):
    def nan_in_step_6():
        loss = ddp_train.compute_loss
        calls = itertools.count(1)

        def bad_loss(model, batch):
            is_bad = next(calls) == 6 and rank_of_this() == 1
            return loss(model, batch) * (math.nan if is_bad else 1)

        ddp_train.compute_loss = bad_loss

    check_not_finite(out, *tiny, patch=nan_in_step_6)


@processes
def test_infinite_gradient_between_two_lines_is_not_saved(tiny, out, data):
    """That of a byte that does not occur in the text: all losses are finite."""

    def infinite_in_step_6():
        build_model = ddp_train.build_model
        calls = itertools.count(1)

        def change(gradient):
            gradient = gradient.clone()
            if next(calls) == 6 and rank_of_this() == 1:
                gradient[255] = math.inf
            return gradient

        def build(args):
            model = build_model(args)
            model.embed.weight.register_hook(change)
            return model

        ddp_train.build_model = build

    data.write_bytes(bytes(range(128)) * 16)
    check_not_finite(out, *tiny, patch=infinite_in_step_6)


def check_not_finite(out, *options, patch):
    more = ["--log_every", 50, "--save_every", 4, "--epochs", 9]
    for rank, text in enumerate(train(2, *options, *more, patch=patch, code=1)):
        line = text.splitlines()[-1]
        assert line.startswith(f"error: rank {rank}: not finite by step ")
        assert "Traceback" not in text
    assert load(out)["step"] == 4


# ---- THE RUN: evaluation -------------------------------------------------------------
def test_evaluation_changes_no_mode_for_good():
    """Inside: eval mode, no gradients, the given autocast. A frozen layer stays so."""

    def check(model, batch):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        return {"in_autocast": torch.is_autocast_enabled("cpu"), "count": 1}

    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(1).eval())
    with ddp_train.distributed("cpu") as world:
        loader = ddp_train.eval_loader(range(2), 2, world)
        autocast = torch.autocast("cpu", torch.bfloat16)
        for given, enabled in ((None, 0), (autocast, 1)):
            means = ddp_train.evaluate(model, check, loader, world, given)
            assert means == {"in_autocast": enabled}
    assert [module.training for module in model.modules()] == [True, True, False]


def test_evaluation_that_fails_sets_the_modes_back():
    """A notebook goes on with the model, and would train it without dropout."""
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(1).eval())
    with ddp_train.distributed("cpu") as world, pytest.raises(ZeroDivisionError):
        ddp_train.evaluate(model, lambda *both: 1 / 0, [1], world)
    assert [module.training for module in model.modules()] == [True, True, False]


class Merged(nn.Identity):
    """It does something when its mode changes, as LoRA does."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_evaluation_changes_modes_by_train_and_eval():
    def check(model, batch):
        return {"merged": model[0].merged, "count": 1}

    model = nn.Sequential(Merged())
    with ddp_train.distributed("cpu") as world:
        assert ddp_train.evaluate(model, check, [1], world) == {"merged": 1}
    assert not model[0].merged


def sum_and_count(model, batch):
    return {"mean": batch.double().sum(), "count": len(batch)}


@processes
@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_is_the_same_on_any_number_of_ranks(size):
    """All bits, though the sum of these numbers depends on their order.

    Also if there is one batch, and two ranks have none.
    """
    numbers = [1e99, 0.0, 1e50, 0.0, 0.5, 1.0, -1e99, 0.0, -1e50]
    of_batches = [1e99, 1e50, 1.5, -1e99, -1e50]
    assert len({sum(order) for order in itertools.permutations(of_batches)}) > 1

    def evaluate():
        with ddp_train.distributed("cpu") as world:
            for n in (1, 9):
                loader = ddp_train.eval_loader(numbers[:n], 2, world)
                yield ddp_train.evaluate(nn.Identity(), sum_and_count, loader, world)

    for one, nine in in_ranks(size, lambda: list(evaluate())):
        assert one == {"mean": 1e99}
        assert nine == {"mean": 1.5 / 9}


@processes
def test_number_that_one_batch_alone_has_is_evaluated_too():
    """The last batch has it, which is one of rank 1."""

    def score(model, batch):
        sums = {"mean": batch.item(), "count": 1}
        return {**sums, "last": 16.0} if batch.item() == 7 else sums

    def evaluate():
        with ddp_train.distributed("cpu") as world:
            loader = ddp_train.eval_loader(range(8), 1, world)
            return ddp_train.evaluate(nn.Identity(), score, loader, world)

    assert in_ranks(2, evaluate) == [{"mean": 3.5, "last": 2.0}] * 2


def sums_of(build):
    """On two ranks: the sum of a tensor. build(rank): the model that has it, and it."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            model, tensor = build(world.rank)

            def score(model, batch):
                return {"sum": tensor.sum(), "count": 1}

            return ddp_train.evaluate(model, score, [0], world)["sum"]

    return in_ranks(2, rank)


@processes
def test_buffers_of_ranks_with_other_shapes_are_refused():
    """Such as a cache that grows. Else a part of it would be sent."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            model = nn.Linear(2, 2)
            model.register_buffer("cache", torch.zeros(4 + world.rank))
            ddp_train.evaluate(model, None, [], world)

    for line in lines_of(end_all(fork_ranks(2, rank), code=1)):
        assert "tensor 2 is cache (5,) on rank 1" in line


@processes
@pytest.mark.parametrize("trained", [True, False])
def test_models_of_ranks_with_other_weights_are_not_evaluated(trained):
    """Such as an EMA that rank 0 alone has updated: the mean would be a mixture."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            model = nn.Linear(2, 2, bias=False).requires_grad_(trained)
            model.weight.data.fill_(1)
            print(ddp_train.evaluate(model, sum_and_count, [torch.ones(1)], world))
            model.weight.data += world.rank / 100
            ddp_train.evaluate(model, sum_and_count, [torch.ones(1)], world)

    for text in end_all(fork_ranks(2, rank), code=1):
        assert text.count("{'mean': 1.0}") == 1
        assert "the ranks have different weights" in text


@processes
def test_cache_that_grows_on_one_rank_alone_is_left_to_it():
    """It is a buffer that is not saved, such as the table of rotary positions."""

    def build(rank):
        model, cache = nn.Linear(2, 2), torch.full((4 + rank,), rank)
        model.register_buffer("cache", cache, persistent=False)
        return model, cache

    assert sums_of(build) == [2.5, 2.5]


@processes
def test_buffer_with_another_name_in_the_checkpoint_is_that_of_rank_0():
    """As with activation checkpointing: state_dict() leaves the wrapper's name out."""

    def build(rank):
        layer = nn.BatchNorm1d(2)
        layer.running_mean += rank
        return nn.Sequential(checkpoint_wrapper(layer)), layer.running_mean

    assert sums_of(build) == [0, 0]


@processes
def test_buffer_of_any_layout_is_that_of_rank_0():
    """NCCL refuses one that is not contiguous. gloo does not, so this test does."""

    def evaluate():
        broadcast = ddp_train.dist.broadcast

        def broadcast_as_nccl(tensor, src):
            assert tensor.is_contiguous()
            broadcast(tensor, src)

        ddp_train.dist.broadcast = broadcast_as_nccl
        model = nn.Module()
        with ddp_train.distributed("cpu") as world:
            numbers = torch.arange(6.0).view(2, 3) * (1 + world.rank)
            model.register_buffer("columns", numbers.t())
            model.register_buffer("number", numbers[1, 0].clone())
            ddp_train.evaluate(model, sum_and_count, [], world)
        return model.columns.tolist(), model.number.item()

    assert in_ranks(2, evaluate) == [([[0, 3], [1, 4], [2, 5]], 3)] * 2


@processes
def test_workers_load_for_the_evaluation_too(tiny):
    """A run that is finished evaluates once more, and does nothing else."""

    def note():
        def evaluate(model, score, loader, *others):
            sys.exit(f"workers: {loader.num_workers}")

        ddp_train.evaluate = evaluate

    train(1, *tiny, "--max_steps", 1)
    (said,) = train(1, *tiny, "--max_steps", 1, "--workers", 3, patch=note, code=1)
    assert said.endswith("\nworkers: 3\n")


def batch_norm():
    """The model has batch normalization. A copy of what an evaluation evaluates."""
    build_model = ddp_train.build_model
    evaluate = ddp_train.evaluate

    def with_norm(args):
        model = build_model(args)
        model.norm = nn.Sequential(Swap(), nn.BatchNorm1d(args.dim), Swap())
        return model

    def keep_file(model, score, loader, world, autocast):
        out = Path(sys.argv[-1])
        if world.rank == 0:
            content = load(out)
            shutil.copy(out / "checkpoint.pt", out / f"{content['step']}.pt")
        return evaluate(model, score, loader, world, autocast)

    ddp_train.build_model = with_norm
    ddp_train.evaluate = keep_file


class Swap(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


@processes
@pytest.mark.parametrize("batch_size", [1, 4])  # with 4 rank 1 has none to evaluate
def test_batch_norm_is_evaluated_as_it_is_saved(
    tiny, out, data, monkeypatch, batch_size
):
    """In mid-run, at the end and after a resume. Each rank has means of its own."""
    monkeypatch.setattr(sys, "argv", ["", str(out)])
    options = [*tiny, "--batch_size", batch_size, "--eval_every", 3]
    train(2, *options, "--max_steps", 7, patch=batch_norm)
    train(2, *options, "--max_steps", 12, patch=batch_norm)
    args = parse(*TINY, "--data", data)
    _, val_set, _ = ddp_train.load_data(args)
    batch = torch.utils.data.default_collate([val_set[i] for i in range(3)])
    model = ddp_train.build_model(args)
    model.norm = nn.Sequential(Swap(), nn.BatchNorm1d(args.dim), Swap())
    losses = metrics(out, "val_loss")
    assert set(losses) == {3, 6, 7, 9, 12}
    for step, loss in losses.items():
        state = torch.load(out / f"{step}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        with torch.no_grad():
            expected = ddp_train.compute_loss(model.eval(), batch).item()
        assert loss == pytest.approx(expected, rel=1e-6)


# ---- BATCHES -------------------------------------------------------------------------
def order_of(n, rank=0, size=1, seed=0, epoch=0, start=0):
    sampler = ddp_train.ResumableSampler(range(n), size, rank, seed=seed)
    sampler.set_epoch(epoch, start)
    torch.manual_seed(rank)  # it must not matter
    order = list(sampler)
    assert len(order) == len(sampler)
    return order


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 7, 30])
def test_ranks_take_turns_in_one_order_from_any_start(n, size):
    for epoch, start in itertools.product((0, 3), range(n + 1)):
        order = order_of(n, epoch=epoch)
        assert sorted(order) == list(range(n))
        ranks = [order_of(n, rank, size, 0, epoch, start) for rank in range(size)]
        turns = list(itertools.chain(*zip(*ranks, strict=True)))
        assert turns == order[start : start + len(turns)]
        assert n - start - len(turns) < size


def test_each_seed_and_epoch_has_an_order_of_its_own():
    orders = set()
    for seed, epoch in itertools.product(range(3), range(5)):
        orders.add(tuple(order_of(30, seed=seed, epoch=epoch)))
    assert len(orders) == 15


def train_batches(rank, size, batch_size, start=0, n=60):
    world = World(rank, size, CPU)
    loader = ddp_train.train_loader(range(n), batch_size, world, seed=0)
    loader.sampler.set_epoch(1, start)
    return [batch.tolist() for batch in loader]


def test_all_ranks_have_as_many_batches_and_all_are_full():
    for size, n in itertools.product((1, 2, 3), range(20, 30)):
        for rank in range(size):
            batches = train_batches(rank, size, 4, n=n)
            assert [len(batch) for batch in batches] == [4] * (n // size // 4)


def test_set_smaller_than_a_batch_for_each_rank_is_refused():
    for rank in range(3):
        world = World(rank, 3, CPU)
        with refuses("11 samples are less than 3 batches of 4"):
            ddp_train.train_loader(range(11), 4, world, 0)
        assert len(ddp_train.train_loader(range(12), 4, world, 0)) == 1


def test_train_loader_needs_a_seed():
    with pytest.raises(TypeError, match="'seed'"):
        ddp_train.train_loader(range(9), 2, ALONE)


@processes
@pytest.mark.parametrize("change", [{"n": 9}, {"batch_size": 2}, {"seed": 1}], ids=str)
def test_loaders_of_ranks_that_differ_are_refused(change):
    """Else they read some samples twice. `seed + rank` is a habit of many."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            of_rank = {"n": 8, "batch_size": 1, "seed": 0}
            if world.rank == 1:
                of_rank |= change
            n = of_rank.pop("n")
            ddp_train.train_loader(range(n), world=world, **of_rank)

    [(name, value)] = change.items()
    said = {"n": "samples", "batch_size": "batch size", "seed": "seed of the order"}
    for line in lines_of(end_all(fork_ranks(2, rank), code=1)):
        assert f"{said[name]} is {value} on rank 1" in line


@pytest.mark.parametrize("name", ["shuffle", "num_workers", "sampler", "drop_last"])
def test_option_that_train_loader_sets_itself_is_an_error(name):
    """One that is taken and ignored would be worse."""
    with pytest.raises(TypeError, match=f"multiple values .*'{name}'"):
        ddp_train.train_loader(range(9), 2, ALONE, 0, **{name: None})


@processes
@pytest.mark.parametrize("n, batch_size", [(9, 2), (8, 3)])
def test_held_out_sets_of_ranks_that_differ_are_refused(n, batch_size):
    """Else the mean would be that of other batches."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            of_rank = [(8, 2), (n, batch_size)][world.rank]
            ddp_train.eval_loader(range(of_rank[0]), of_rank[1], world)

    said = f"is {n} on rank 1" if n != 8 else f"is {batch_size} on rank 1"
    for line in lines_of(end_all(fork_ranks(2, rank), code=1)):
        assert said in line


@processes
def test_loaders_of_ranks_that_train_alone_may_differ():
    """As in a search over options, one on each rank."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            n = 8 + world.rank
            ddp_train.eval_loader(range(n), 2, ALONE)
            return len(ddp_train.train_loader(range(n), 1, ALONE, seed=world.rank))

    assert in_ranks(2, rank) == [8, 9]


def test_option_that_eval_loader_sets_itself_is_an_error():
    with pytest.raises(TypeError, match="multiple values .*'num_workers'"):
        ddp_train.eval_loader(range(9), 2, ALONE, num_workers=1)


@pytest.mark.parametrize("make", ["train_loader", "eval_loader"])
def test_other_options_of_a_loader_are_those_of_the_user(make):
    options = {"worker_init_fn": id, "collate_fn": len, "prefetch_factor": 5}
    options |= {"pin_memory": True, "persistent_workers": False}
    needed = {"seed": 0} if make == "train_loader" else {}
    loader = getattr(ddp_train, make)(
        range(9), 2, ALONE, **needed, workers=1, **options
    )
    for name, value in options.items():
        assert getattr(loader, name) is value


def test_loader_leaves_the_random_numbers_of_the_model_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    loader = ddp_train.train_loader(range(9), 2, ALONE, seed=0)
    next(iter(loader))
    assert torch.rand(1) == expected


def test_batches_of_an_evaluation_are_the_same_for_any_number_of_ranks():
    for size in (1, 2, 3, 7):
        ranks = []
        for rank in range(size):
            loader = ddp_train.eval_loader(range(9), 2, World(rank, size, CPU))
            ranks.append([batch.tolist() for batch in loader])
        turns = itertools.chain(*itertools.zip_longest(*ranks))
        batches = [batch for batch in turns if batch is not None]
        assert batches == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


IMPORTED_BY = os.getpid()  # a fork does not import this again


class Draws:
    """A sample is a random number. Of two loading processes the first one is slower."""

    def __init__(self, folder):
        self.folder = folder
        self.count = 0

    def __len__(self):
        return 12

    def __getitem__(self, i):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self.count += 1
        info = torch.utils.data.get_worker_info()
        if info.num_workers == 2:
            second_batch = self.folder / "second batch"
            if info.id == 1 and self.count == 2:
                second_batch.touch()  # the first one has been handed over
            for _ in ticks():
                if info.id == 1 or second_batch.exists():
                    break
        assert blocked >= set(StopSignal.NUMBERS)
        assert os.getpid() == IMPORTED_BY
        return i, torch.rand(1).item()


@processes
def test_loading_processes_keep_order_draw_their_own_and_get_no_signal(tmp_path):
    numbers = []
    for rank, workers in ((0, 2), (1, 1)):
        loader = ddp_train.train_loader(
            Draws(tmp_path), 1, World(rank, 2, CPU), seed=0, workers=workers
        )
        order = []
        for i, number in loader:
            order.append(i.item())
            numbers.append(number.item())
        assert order == order_of(12, rank, 2)
    assert len(set(numbers)) == 12
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(StopSignal.NUMBERS)


@processes
def test_loading_processes_get_new_random_numbers_when_they_start(tiny):
    """Of two starts, the first of which ends in mid-epoch, on two ranks."""

    def seeds(*options):
        seen = []
        begin = ddp_train.Loader.__iter__

        def note(loader):
            if loader.generator is not None:  # not in an evaluation
                seen.append(loader.generator.initial_seed())
            return begin(loader)

        ddp_train.Loader.__iter__ = note
        main(*tiny, *options)
        return seen

    drawn = []
    for options in (["--max_steps", 4], ["--epochs", 2]):
        first, second = in_ranks(2, lambda: seeds(*options))  # noqa: B023
        assert len(first) == len(second)
        drawn += first + second
    assert len(set(drawn)) == len(drawn) == 2 * (1 + 2)


def test_seed_depends_on_each_number_and_on_their_order():
    """And on the word, so that two uses of the same numbers do not draw the same."""
    seeds = set()
    for numbers in 2 * list(itertools.product((0, 1, 2, 2**31), repeat=3)):
        seeds |= {ddp_train.seed_of(use, *numbers) for use in ("order", "step")}
    assert len(seeds) == 128


def test_numbers_of_a_seed_may_be_of_any_type_of_whole_numbers():
    expected = ddp_train.seed_of("order", 7, 2**40)
    for kind in (numpy.int64, torch.tensor, lambda number: torch.tensor([number])[0]):
        assert ddp_train.seed_of("order", kind(7), kind(2**40)) == expected
    assert ddp_train.seed_of("order", -7, 2**40) != expected


@pytest.mark.parametrize("parts", [(5,), (), (5, "order"), ("order", 5.0)], ids=repr)
def test_seed_without_a_word_or_with_a_fraction_is_an_error(parts):
    """It would be another seed, or that of another use."""
    with pytest.raises((TypeError, ValueError)):
        ddp_train.seed_of(*parts)


@pytest.mark.parametrize("number", [numpy.float64(5), torch.tensor(5.0)])
def test_fraction_of_numpy_or_torch_is_no_number_of_a_seed(number):
    with pytest.raises((TypeError, ValueError)):
        ddp_train.seed_of("order", number)


def test_seed_all_seeds_torch_numpy_and_random_alike():
    """The same seed gives the same numbers: another word, rank or step gives others."""

    def draw(*parts):
        ddp_train.seed_all(*parts)
        return torch.rand(2).tolist(), numpy.random.rand(2).tolist(), random.random()

    seeds = list(itertools.product(("step", "load"), (0, 1), (0, 1), (0, 1)))
    first = [draw(*parts) for parts in seeds]
    again = [draw(*parts) for parts in reversed(seeds)]
    assert first == again[::-1]
    for drawn in zip(*first, strict=True):  # by torch, by numpy, by random
        assert len({str(numbers) for numbers in drawn}) == len(seeds)


def test_batch_of_any_nesting_goes_to_the_device():
    x = torch.ones(2)
    batch = {"a": x, "b": [x, (x, "text")], "c": {"d": x, "e": 5}}
    moved = ddp_train.to_device(batch, torch.device("meta"))
    assert moved["b"][1][1] == "text" and moved["c"]["e"] == 5
    for tensor in (moved["a"], moved["b"][0], moved["b"][1][0], moved["c"]["d"]):
        assert tensor.is_meta


Pair = collections.namedtuple("Pair", "x text")


class OwnBatch:
    """A batch of a library that has .to(device), and nothing else."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return OwnBatch(self.x.to(device))


def test_batch_of_any_type_goes_to_the_device():
    x = torch.ones(2)
    batch = collections.UserDict(pair=Pair(x, "text"), own=OwnBatch(x))
    batch["packed"] = pack_sequence([x, x[:1]])
    moved = ddp_train.to_device([batch], torch.device("meta"))[0]
    assert isinstance(moved["pair"], Pair) and moved["pair"].text == "text"
    assert isinstance(moved["packed"], PackedSequence)
    for tensor in (moved["pair"].x, moved["own"].x, moved["packed"].data):
        assert tensor.is_meta
    assert not batch["own"].x.is_meta  # it is a copy


# ---- RANKS ---------------------------------------------------------------------------
def test_device_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses("--device cuda: torch finds no GPU"):
        ddp_train.choose_device("cuda", 1)


def test_ranks_do_not_share_the_gpu_of_a_mac(monkeypatch):
    """Two ranks take the CPU."""
    mac = torch.device("mps")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: mac
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", int)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert ddp_train.choose_device("auto", 1).type == "mps"
    for size in (2, 4):
        assert ddp_train.choose_device("auto", size) == CPU


@processes
def test_second_entry_of_launched_ranks_is_refused():
    """The old group's address may still answer: they might wait until --timeout."""
    for text in end_all(fork_ranks(2, enter_twice), code=1):
        refusal = "a rank can enter distributed() once: put all of the work inside"
        assert text.splitlines() == ["entered", refusal]


def load_by_forks():
    """Other loading processes take seconds to start, because they import torch."""
    loading_options = ddp_train.loading_options

    def with_fork(*args):
        options = loading_options(*args)
        if "multiprocessing_context" in options:
            options["multiprocessing_context"] = "fork"
        return options

    ddp_train.loading_options = with_fork


@processes
@pytest.mark.parametrize("workers", [0, 1])
def test_one_process_can_run_main_twice(tiny, out, workers):
    """As in a notebook. The first run is stopped, the second one resumes it.

    Between them Ctrl-C and the others do what they did before.
    """

    def run():
        load_by_forks()
        before = [signal.getsignal(number) for number in StopSignal.NUMBERS]
        before_step(3, send_this(signal.SIGTERM))
        with pytest.raises(SystemExit) as error:
            main(*tiny, "--workers", workers)
        between = [signal.getsignal(number) for number in StopSignal.NUMBERS]
        main(*tiny, "--workers", workers, "--max_steps", 5)
        return error.value.code, before == between

    [rank] = fork_ranks(1, run)
    said = rank.end()
    assert rank.value == (143, True)
    assert "stopped by signal 15, saved at step 3\n" in said
    assert "from step 3 to 5\n" in said
    assert "done: step 5" in said
    rank.leaves_none()


@processes
def test_rank_that_hangs_is_waited_for_until_the_timeout(tiny):
    ranks = start_training(
        2,
        *tiny,
        "--timeout",
        3,
        patch=lambda: before_step(2, lambda: time.sleep(3 * DEADLINE), rank=1),
    )
    said = ranks[0].end(1)
    assert re.search("[Tt]imed out waiting 3000ms", said)
    assert not ranks[1].has_ended()


@processes
@pytest.mark.parametrize("name", ["--lr", "the data"])
def test_ranks_that_differ_are_named_on_all(tiny, tmp_path, name):
    def run():
        options = [*tiny, "--lr", [0.002, 0.5][rank_of_this()]]
        if name == "the data":
            other = tmp_path / str(rank_of_this())
            other.write_bytes([DATA, DATA[::-1]][rank_of_this()])
            options = [*tiny, "--data", other]
        main(*options)

    for rank, text in enumerate(end_all(fork_ranks(2, run), code=1)):
        (line,) = text.splitlines()
        assert line.startswith(f"error: rank {rank}: {name} is ")
        assert "on rank 1 (" in line and "on rank 0 (" in line


def one_sample_less(which):
    """The data are one sample shorter, though the text of the data is the same."""
    load_data = ddp_train.load_data

    def load_less(args):
        *sets, text = load_data(args)
        sets[which] = Subset(sets[which], range(len(sets[which]) - 1))
        return *sets, text

    ddp_train.load_data = load_less


@processes
@pytest.mark.parametrize("which", [0, 1], ids=["train set", "held-out set"])
def test_rank_with_fewer_samples_is_named_on_all(tiny, which):
    """Before the first step. Else the others would wait for its last batch."""

    def fewer():
        if rank_of_this() == 1:
            one_sample_less(which)

    for rank, line in enumerate(lines_of(train(2, *tiny, patch=fewer, code=1))):
        assert line.startswith(f"error: rank {rank}: the data is ")
        counts = [f"{60 - (which == 0)} samples, {3 - (which == 1)} held out, "]
        counts += ["on rank 1 (", "60 samples, 3 held out, ", "on rank 0 ("]
        assert re.search(".*".join(map(re.escape, counts)), line)


@processes
@pytest.mark.parametrize("first, third", [(5, 6), (5, None), (None, 6)])
def test_third_rank_that_differs_is_named_before_a_checkpoint_is_loaded(
    out, first, third
):
    """On all, by Checkpoint.resume(): what must match is compared between the ranks.

    None: it has no such name.
    """

    def resume_other():
        with ddp_train.distributed("cpu") as world:
            depth = third if world.rank == 2 else first
            must_match = {"same": 1} | ({"depth": depth} if depth else {})
            folder = out / str(world.rank)
            ddp_train.Checkpoint(folder, {}, must_match, world).resume()

    said = end_all(fork_ranks(3, resume_other), code=1)
    for rank, line in enumerate(lines_of(said)):
        host = r"\(.*\)"
        differs = f"depth is {third} on rank 2 {host}, but {first} on rank 0 {host}"
        assert re.fullmatch(f"error: rank {rank}: {differs}", line)


# ---- CHECKPOINT ----------------------------------------------------------------------
def resume(checkpoint):
    with ddp_train.distributed("cpu"):
        return checkpoint.resume()


def test_checkpoint_has_all_parts_and_plain_values(saved):
    checkpoint = checkpoint_of(saved, 0, seed=1)
    values = resume(checkpoint)
    assert (values["step"], values["epoch"]) == (2, 3)
    assert checkpoint.parts["part"].state["state"] == 5
    assert checkpoint.parts["part"].state["weights"].sum() == 4999 * 2500


def test_value_of_plain_python_or_a_tensor_comes_back(out):
    values = {"a": {1, 2}, "b": [None, True, "x", 1.5, (2, b"x")], "c": {3: {}}}
    values["d"] = collections.OrderedDict(x=torch.arange(3))
    checkpoint_of(out, 5).save(2, **values)
    found = resume(checkpoint_of(out, 5))
    assert torch.equal(found["d"].pop("x"), values["d"].pop("x"))
    assert {name: found[name] for name in values} == values


class Own:
    pass


CANNOT_BE_LOADED = {
    "numpy": numpy.float64(0.5),
    "numpy ": [{"best": (1, numpy.int64(3))}],
    "Own": {Own()},
    "Path": Path("x"),
    "Pair": Pair(1, "x"),
    "generator": (i for i in ()),  # pickle refuses it, and a lambda
    "lambda": lambda: 0,
}


@pytest.mark.parametrize("name", CANNOT_BE_LOADED)
def test_value_that_could_not_be_loaded_is_not_saved(saved, name):
    """At the save, not hours later. The line names the type; the old file is intact."""
    before = (saved / "checkpoint.pt").read_bytes()
    with refuses("cannot save", "the old one is intact", name.strip()):
        checkpoint_of(saved, 0).save(3, best=CANNOT_BE_LOADED[name])
    assert (saved / "checkpoint.pt").read_bytes() == before
    assert not (saved / "checkpoint.tmp").exists()


@pytest.mark.parametrize("name", ["step", "time", "must_match", "part"])
def test_name_that_comes_twice_is_an_error_at_the_save(saved, name):
    """Of a plain value, or of a part."""
    before = (saved / "checkpoint.pt").read_bytes()
    with pytest.raises(TypeError, match=f"multiple values .*'{name}'"):
        checkpoint_of(saved, 0).save(3, **{name: 1})
    parts = {name: Part(), "other": Part()}
    more = {"part": 1} if name == "part" else {}
    with pytest.raises(TypeError, match=f"multiple values .*'{name}'"):
        ddp_train.Checkpoint(saved, parts, {}, ALONE).save(3, **more)
    assert (saved / "checkpoint.pt").read_bytes() == before


def test_checkpoint_of_step_0_is_resumed(out):
    """Such as that of a script that counts epochs from 0."""
    checkpoint_of(out, 5).save(0, best=0.5)
    checkpoint = checkpoint_of(out, 0)
    assert resume(checkpoint)["best"] == 0.5
    assert checkpoint.parts["part"].state["state"] == 5


@processes
def test_all_ranks_may_call_save_and_rank_0_writes(out):
    """Of two that write into one file, either could damage it."""

    def save():
        with ddp_train.distributed("cpu") as world:
            part = nn.Module()
            part.register_buffer("rank", torch.tensor(world.rank))
            folder = out / str(world.rank)
            ddp_train.Checkpoint(folder, {"part": part}, {}, world).save(3)
            return [path.name for path in folder.iterdir()]

    files = in_ranks(2, save)
    assert "checkpoint.pt" in files[0] and files[1] == []
    assert load(out / "0")["part"] == {"rank": 0}


def test_new_folder_has_no_checkpoint(out):
    checkpoint = checkpoint_of(out / "new" / "folder", 0)
    assert resume(checkpoint) == {}
    assert checkpoint.parts["part"].state["state"] == 0


def test_folder_that_cannot_be_made_is_one_line(data):
    with refuses(f"the folder {data}/out: "):
        checkpoint_of(data / "out", 0)


def test_checkpoint_that_does_not_fit_is_refused(out):
    """Of a layer with another shape or buffer, or without a part that is new."""
    layer = {"layer": nn.Linear(2, 2)}
    ddp_train.Checkpoint(out, layer, {}, ALONE).save(2)
    other = {"layer": nn.Linear(2, 3)}
    more = {**layer, "new": nn.Linear(2, 2)}
    with_buffer = {"layer": nn.Linear(2, 2)}
    with_buffer["layer"].register_buffer("number", torch.zeros(()))
    for parts, reason in (
        (other, "size mismatch"),
        (more, "'new'"),
        (with_buffer, "Missing key"),
        ({**layer, "new": Part()}, "'new'"),
    ):
        with refuses("cannot be loaded into this model: ", reason):
            resume(ddp_train.Checkpoint(out, parts, {}, ALONE))


def test_optimizer_that_does_not_fit_is_refused(out):
    x = torch.zeros(1)
    one_group = {"optimizer": torch.optim.Adam([x])}
    two_groups = {"optimizer": torch.optim.Adam([{"params": [x]}, {"params": []}])}
    with ddp_train.distributed("cpu"):
        ddp_train.Checkpoint(out, one_group, {}, ALONE).save(2)
    with refuses("cannot be loaded into this model: "):
        resume(ddp_train.Checkpoint(out, two_groups, {}, ALONE))


@processes
@pytest.mark.parametrize(
    "option", ["--seed 5", "--heads 4", "--dim 18", "--layers 2", "--data"]
)
def test_checkpoint_of_another_model_seed_or_data_is_refused(tiny, tmp_path, option):
    train(1, *tiny, "--max_steps", 1)
    words = option.split()
    if option == "--data":
        words.append(tmp_path / "other")
        words[-1].write_bytes(DATA[::-1])
    (line,) = refused(1, *tiny, *words)
    assert re.match(r"\S+ has (\S+|the data) .*: take another folder", line)


@processes
@pytest.mark.parametrize("which", [0, 1], ids=["train set", "held-out set"])
def test_data_that_have_grown_or_shrunk_are_refused(tiny, tmp_path, which):
    def fewer():
        one_sample_less(which)

    for patches in ((None, fewer), (fewer, None)):
        options = [*tiny, "--out", tmp_path / f"{patches[0]}", "--max_steps", 1]
        train(1, *options, patch=patches[0])
        (line,) = lines_of(train(1, *options, patch=patches[1], code=1))
        assert " has the data " in line and "take another folder" in line


def test_name_that_an_old_checkpoint_lacks_does_not_match(saved):
    with refuses(f"{saved}/checkpoint.pt has depth None, not 4: "):
        resume(checkpoint_of(saved, 0, seed=1, depth=4))


def test_name_that_only_an_old_checkpoint_has_does_not_match(saved):
    with refuses(f"{saved}/checkpoint.pt has seed 1, not None: "):
        resume(checkpoint_of(saved, 0))


@processes
def test_nodes_take_the_checkpoint_with_the_most_steps(tiny, tmp_path):
    """Four disks: nothing, most steps but the older file, most steps, fewer steps.

    The evaluation at the start shows what the ranks have: three evaluate a sample each.
    """
    disks = [tmp_path / name for name in ("nothing", "older", "best", "fewer")]
    for disk, steps, rate in ((1, 5, 0.01), (2, 5, 0.02), (3, 3, 0.03)):
        train(1, *tiny, "--out", disks[disk], "--max_steps", steps, "--lr", rate)

    def run():
        options = [*tiny, "--out", disks[rank_of_this()], "--batch_size", 1]
        main(*options, "--max_steps", 3)

    end_all(fork_ranks(4, run))
    expected = metrics(disks[2], "val_loss")
    assert metrics(disks[0], "val_loss") == pytest.approx(expected, rel=1e-6)


def test_damaged_file_is_refused(saved):
    try_damaged_files(saved, count=30, seed=1)


@pytest.mark.parametrize("content", [{"model": 1}, {"step": 7}, [1], torch.zeros(2)])
def test_file_of_another_program_is_refused(out, content):
    """It would be overwritten otherwise."""
    checkpoint = checkpoint_of(out, 0)
    torch.save(content, out / "checkpoint.pt")
    with refuses("cannot be loaded: ", "another program"):
        checkpoint.read()


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_code_in_a_checkpoint_does_not_run(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = checkpoint_of(out, 0)
    torch.save({"step": 1, "part": Bomb()}, out / "checkpoint.pt")
    with refuses("cannot be loaded: "):
        checkpoint.read()
    assert not Path("exploded").exists()


def test_checkpoint_is_mapped_and_not_read_into_memory(saved, monkeypatch):
    load = torch.load
    given = []

    def note(*args, **options):
        given.append(options.get("mmap"))
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", note)
    checkpoint_of(saved, 0).read()
    assert given == [True]


def test_bytes_are_on_the_disk_before_the_file_gets_its_name(saved, monkeypatch):
    events = []

    def fsync(descriptor):
        beside = saved / "checkpoint.tmp"
        events.append(("fsync", torch.load(beside)["step"]))

    def replace(source, target):
        events.append(("replace", source.name, target.name))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    checkpoint_of(saved, 0).save(7)
    assert events == [("fsync", 7), ("replace", "checkpoint.tmp", "checkpoint.pt")]


@processes
def test_checkpoint_is_whole_at_any_moment(saved):
    def save():
        where, name = moment
        at_call(where, name, 1, send_this(signal.SIGKILL), after=after)
        checkpoint_of(saved, 6).save(3)

    old = load(saved)
    moments = [(torch, "save"), (os, "fsync"), (os, "replace")]
    for moment, after in itertools.product(moments, (False, True)):
        [rank] = fork_ranks(1, save)
        rank.end(-9)
        if moment == (os, "replace") and after:
            assert load(saved)["step"] == 3
        else:
            assert flatten(load(saved)) == flatten(old)


@pytest.mark.parametrize("limit", [0, 8000])
def test_full_disk_leaves_the_old_checkpoint(saved, limit):
    checkpoint = checkpoint_of(saved, 6)
    old_limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    try:
        with refuses("cannot save", "the old one is intact"):
            checkpoint.save(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old_limit, most))
    assert load(saved)["step"] == 2
    assert not (saved / "checkpoint.tmp").exists()


@processes
def test_second_run_in_the_folder_is_refused_while_the_first_lives(tiny, out):
    [first] = start_training(
        1, *tiny, patch=lambda: before_step(2, lambda: time.sleep(3 * DEADLINE))
    )
    first.wait_for("step 1 ")
    (line,) = train(1, *tiny, code=1)
    assert line == f"{out} is in use by another run, or another Checkpoint\n"
    first.send(signal.SIGKILL)
    first.end(-9)
    train(1, *tiny, "--max_steps", 1)


def test_second_checkpoint_of_a_folder_is_refused(out):
    """It would replace the file of the first one. Nor does it take the lock away."""
    with ddp_train.distributed("cpu") as world:
        first = Checkpoint(out, {}, {}, world)
        for _ in range(2):
            with refuses(f"{out} is in use by another run, or another Checkpoint"):
                Checkpoint(out, {}, {}, world)
        first.save(2)
        del first
        Checkpoint(out, {}, {}, world)


def test_kept_checkpoint_does_not_keep_its_lock(out):
    """A notebook keeps what an error has left. The next cell may train again."""
    kept = []
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), ddp_train.distributed("cpu") as world:
            kept.append(Checkpoint(out, {}, {}, world))
            raise ZeroDivisionError


@processes
def test_lock_does_not_live_on_in_a_forked_process(out):
    """Such as a loading process of a script's own, when its rank was killed."""
    checkpoint = checkpoint_of(out, 5)
    [child] = fork_ranks(
        1, lambda: (print("forked", flush=True), time.sleep(3 * DEADLINE))
    )
    child.wait_for("forked")
    with refuses("in use"):
        checkpoint_of(out, 0)
    del checkpoint
    checkpoint_of(out, 0)
    assert child.has_ended() is False
    child.send(signal.SIGKILL)
    child.end(-9)


def model_and_optimizer(order="ab"):
    model = Two(order)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sum(weight.sum() for weight in model.parameters()).backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_model_with_another_order_of_weights_is_refused(out):
    """The optimizer would give the momentum of one weight to another."""
    must_match = {}
    with ddp_train.distributed("cpu"):
        Checkpoint(out, model_and_optimizer(), must_match, ALONE).save(1)
        Checkpoint(out, model_and_optimizer(), must_match, ALONE).resume()
        others = Checkpoint(out, model_and_optimizer("ba"), must_match, ALONE)
        with refuses(
            "has optimizer weight 0 model.layers.a.weight (2, 2), not model.layers.b."
        ):
            others.resume()
    assert not must_match  # the caller's own


def test_optimizer_with_another_order_of_weights_is_refused(out):
    """As if its groups came from a set: the model is the same."""
    with ddp_train.distributed("cpu"):
        Checkpoint(out, model_and_optimizer(), {}, ALONE).save(1)
        parts = model_and_optimizer()
        (group,) = parts["optimizer"].param_groups
        group["params"].reverse()
        with refuses(
            "has optimizer weight 0 model.layers.a.weight (2, 2), not model.layers.b."
        ):
            Checkpoint(out, parts, {}, ALONE).resume()


def test_each_optimizer_has_its_own_weights_in_a_checkpoint(out):
    with ddp_train.distributed("cpu"):
        other = {f"other {name}": x for name, x in model_and_optimizer().items()}
        Checkpoint(out, model_and_optimizer() | other, {}, ALONE).save(1)
        with refuses("has optimizer weight 0 "):
            Checkpoint(out, model_and_optimizer("ba") | other, {}, ALONE).resume()


def test_two_networks_with_the_same_names_are_told_apart(out):
    def parts(first, second):
        networks = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
        weights = [*networks[first].parameters(), *networks[second].parameters()]
        return networks | {"optimizer": torch.optim.SGD(weights, 0.1)}

    with ddp_train.distributed("cpu"):
        Checkpoint(out, parts("a", "b"), {}, ALONE).save(1)
        with refuses("has optimizer weight 0 a.weight (2, 2), not b.weight (2, 2)"):
            Checkpoint(out, parts("b", "a"), {}, ALONE).resume()


def test_weight_that_no_part_saves_is_refused(out):
    """Its momentum would be saved, and not the weight."""
    beside = nn.Parameter(torch.ones(()))
    parts = model_and_optimizer()
    parts["optimizer"].add_param_group({"params": [beside]})
    with ddp_train.distributed("cpu"):
        checkpoint = Checkpoint(out, parts, {}, ALONE)
        for use in (checkpoint.resume, lambda: checkpoint.save(1)):
            with refuses("optimizer has a weight", "make it an nn.Parameter of one"):
                use()
        parts["model"].beside = beside
        checkpoint.save(1)
    assert load(out)["model"]["beside"] == 1


def test_activation_checkpointing_may_come_with_a_resume(out):
    """It changes the names in named_parameters(), but not those in the file."""
    with ddp_train.distributed("cpu"):
        parts = model_and_optimizer()
        Checkpoint(out, parts, {}, ALONE).save(1)
        layers = parts["model"].layers
        layers["a"] = checkpoint_wrapper(layers["a"])
        assert Checkpoint(out, parts, {}, ALONE).resume()["step"] == 1


def test_model_that_was_pruned_in_the_run_is_resumed(out):
    """The names in the file are those of what was saved."""
    with ddp_train.distributed("cpu"):
        first = model_and_optimizer()
        checkpoint = Checkpoint(out, first, {}, ALONE)
        checkpoint.resume()
        prune.l1_unstructured(first["model"].layers["a"], "weight", amount=1)
        checkpoint.save(1)
        del checkpoint
        second = model_and_optimizer()
        prune.l1_unstructured(second["model"].layers["a"], "weight", amount=1)
        assert Checkpoint(out, second, {}, ALONE).resume()["step"] == 1


@processes
def test_rank_0_alone_may_have_a_copy_of_the_model(out):
    """Such as an EMA. No optimizer has its weights."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            parts = model_and_optimizer()
            if world.rank == 0:
                parts["ema"] = Two()
            checkpoint = Checkpoint(out, parts, {}, world)
            assert checkpoint.resume() == {}
            checkpoint.save(1)

    end_all(fork_ranks(2, rank))
    assert "ema" in load(out)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weight_that_is_not_finite_is_not_saved_by_any_script(out, value):
    with ddp_train.distributed("cpu"):
        parts = model_and_optimizer()
        checkpoint = Checkpoint(out, parts, {}, ALONE)
        checkpoint.save(1)
        parts["model"].layers["b"].bias.data[1] = value
        with refuses("a weight is not finite, not saved"):
            checkpoint.save(2)
    assert load(out)["step"] == 1


def test_each_optimizer_is_compared_before_a_save(out):
    with ddp_train.distributed("cpu"):
        good, bad = model_and_optimizer(), model_and_optimizer()
        bad["model"].layers["a"].bias.data[0] = math.nan
        groups = bad["optimizer"].param_groups
        of_another_class = types.SimpleNamespace(param_groups=groups, state_dict=dict)
        for second in (bad["optimizer"], of_another_class):
            parts = {"first": good["optimizer"], "second": second}
            parts |= {"model": good["model"], "bad model": bad["model"]}
            with refuses("a weight is not finite, not saved"):
                Checkpoint(out, parts, {}, ALONE).save(1)


def test_weights_that_are_not_trained_and_no_weights_are_saved(out):
    mask = nn.Parameter(torch.full((2,), -math.inf), requires_grad=False)
    frozen = torch.optim.AdamW([mask])
    empty = torch.optim.AdamW([{"params": []}])
    with ddp_train.distributed("cpu"):
        Checkpoint(out, {"frozen": frozen, "empty": empty}, {}, ALONE).save(1)
    assert load(out)["step"] == 1


@processes
@pytest.mark.parametrize(
    ("trained", "values"),
    [(True, [0, 1]), (False, [0, 1]), (False, [math.inf, 0]), (False, [0, math.nan])],
)
def test_ranks_that_differ_are_not_saved_by_any_script(out, trained, values):
    """Without log lines, such as in the page's script when it is stopped.

    Not trained is a codebook, for example, which forward() itself changes.
    """

    def rank():
        with ddp_train.distributed("cpu") as world:
            parts = model_and_optimizer()
            parts["model"].requires_grad_(trained)
            parts["model"].layers["b"].bias.data += values[world.rank]
            Checkpoint(out, parts, {}, world).save(1)

    for line in lines_of(end_all(fork_ranks(2, rank), code=1)):
        assert "the ranks have different weights" in line
    assert not (out / "checkpoint.pt").exists()


@processes
@pytest.mark.parametrize(
    "value",
    [
        lambda rank: 0.1 + rank,
        lambda rank: {"hidden": torch.full((2,), rank)},
        lambda rank: 9999 * [rank],
        lambda rank: torch.arange(9999) == 5000 + rank,
    ],
)
def test_value_that_differs_between_ranks_is_not_saved(out, value):
    """All would load that of rank 0: a sum over its samples, the state of its batch."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            checkpoint = Checkpoint(out, {"part": Part()}, {}, world)
            checkpoint.save(1, mine={"a": [world.size, math.nan]})
            checkpoint.save(2, same=0.5, mine=value(world.rank))

    text = []
    for of_rank in (value(0), value(1)):
        if isinstance(of_rank, torch.Tensor):
            of_rank = of_rank.tolist()
        text.append(str(of_rank)[:200])
    for line in lines_of(end_all(fork_ranks(2, rank), code=1)):
        assert (
            f": mine (all_gather() it before save()) is {text[1]} on rank 1 (" in line
        )
        assert f"), but {text[0]} on rank 0 (" in line
    assert load(out)["step"] == 1


@processes
def test_part_that_differs_between_ranks_is_not_saved(out):
    """A meter, a generator, the place of a loader: all would load that of rank 0."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            part = Part(state=5)
            optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
            parts = {"scheduler": scheduler, "part": part}
            checkpoint = Checkpoint(out, parts, {}, world)
            checkpoint.save(1)
            part.state = {"sum": world.rank}
            checkpoint.save(2)

    for line in lines_of(end_all(fork_ranks(2, rank), code=1)):
        what = "part (all_gather() it before save())"
        assert f": {what} is {{'sum': 1}} on rank 1 (" in line
        assert "), but {'sum': 0} on rank 0 (" in line
    assert load(out)["step"] == 1


@processes
def test_ranks_of_other_steps_are_not_saved(out):
    def rank():
        with ddp_train.distributed("cpu") as world:
            Checkpoint(out, {"part": Part()}, {}, world).save(world.rank)

    for line in lines_of(end_all(fork_ranks(2, rank), code=1)):
        assert "step (all_gather() it before save()) is 1 on rank 1 (" in line
    assert not (out / "checkpoint.pt").exists()


@processes
def test_value_on_the_gpu_of_each_rank_is_saved(out):
    """The text of a tensor there has the name of the GPU, as this text."""

    def rank():
        with ddp_train.distributed("cpu") as world:
            world.device = torch.device("cuda", world.rank)
            best = f"tensor(0.5, device='{world.device}')"
            Checkpoint(out, {"part": Part()}, {}, world).save(1, best=best)

    in_ranks(2, rank)
    assert load(out)["best"] == "tensor(0.5, device='cuda:0')"


@processes
def test_rank_leaves_a_save_when_the_file_is_whole(out):
    """If it ended its process before, a launcher might end rank 0 in its write."""

    def rank():
        fsync = os.fsync

        def slow_fsync(number):
            time.sleep(1)
            fsync(number)

        os.fsync = slow_fsync
        with ddp_train.distributed("cpu") as world:
            Checkpoint(out, {"part": Part()}, {}, world).save(1)
            return (out / "checkpoint.pt").exists()

    assert in_ranks(2, rank) == [True, True]


def test_run_that_goes_on_after_a_stop_is_not_saved_again(out):
    """As if a function that trains an epoch returned to the loop over the epochs.

    At the same place another save has what has changed: scheduler.step(), an EMA.
    """
    world = ddp_train.World(0, 1, torch.device("cpu"))
    part = Part(state=5)
    parts = {"part": part, **model_and_optimizer()}
    weight = parts["model"].layers["a"].bias.data
    weight[0] = 1
    with ddp_train.distributed("cpu"):
        checkpoint = Checkpoint(out, parts, {}, world)
        checkpoint.save(1)
        checkpoint.save(2)
        world.stopped_by = signal.SIGTERM
        checkpoint.save(3, epoch=0)
        part.state = {"state": 6}
        checkpoint.save(3, epoch=0)
        for step, epoch, of_weight in ((3, 1, 1), (4, 0, 1), (3, 0, 2)):
            weight[0] = of_weight
            with refuses("the run goes on after the save of a stop: call sys.exit(0)"):
                checkpoint.save(step, epoch=epoch)
    assert (load(out)["step"], load(out)["epoch"]) == (3, 0)
    assert load(out)["part"] == {"state": 6}


def test_save_of_a_stop_that_failed_can_be_made_good(out):
    world = ddp_train.World(0, 1, torch.device("cpu"))
    checkpoint = Checkpoint(out, {"part": Part(state=5)}, {}, world)
    world.stopped_by = signal.SIGTERM
    for _ in range(2):
        with refuses("cannot save", "numpy"):
            checkpoint.save(1, best=numpy.float64(0.5))
    checkpoint.save(1, best=0.5)
    assert load(out)["best"] == 0.5


@processes
def test_folder_that_was_removed_is_made_anew(tiny, out):
    """By a save: else the work of the run would be lost."""

    def remove_before_each_save():
        check = ddp_train.check_same_weights

        def check_and_remove(optimizer):
            shutil.rmtree(out)
            return check(optimizer)

        ddp_train.check_same_weights = check_and_remove

    train(1, *tiny, "--max_steps", 3, patch=remove_before_each_save)
    assert load(out)["step"] == 3


def test_disk_without_locks_is_used_with_a_warning(saved, monkeypatch, capfd):
    """As some network disks of clusters are."""

    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert resume(checkpoint_of(saved, 0, seed=1))["step"] == 2
    assert "cannot be locked: [Errno 37] No locks" in capfd.readouterr().err


def test_lock_that_is_answered_by_permission_denied_is_in_use(saved, monkeypatch):
    """As some systems answer."""

    def flock(file, operation):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fcntl, "flock", flock)
    with refuses(f"{saved} is in use by another run"):
        checkpoint_of(saved, 0)


# ---- LOG -----------------------------------------------------------------------------
def test_log_writes_numbers_on_rank_0_alone(tmp_path, capfd):
    for rank in (0, 1):
        log = ddp_train.Log(tmp_path, World(rank, 2, CPU))
        log.write(7, loss=0.123456, lr=1e-3)
        log.say("the end")
    assert capfd.readouterr().out == "step 7  loss 0.12346  lr 0.001\nthe end\n"
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 7, "loss": 0.123456, "lr": 1e-3}


def test_training_goes_on_when_the_log_has_no_space(tmp_path, capfd):
    (tmp_path / "metrics.jsonl").mkdir()  # this cannot be opened either
    ddp_train.Log(tmp_path, ALONE).write(7, loss=0.5)
    assert "cannot write" in capfd.readouterr().out


@processes
def test_one_process_saves_though_nobody_reads_its_output(tiny, out, untouched):
    words = [sys.executable, PATCHED, "noise", *tiny, *HARD]
    command = shlex.join([str(word) for word in words])
    launch("bash", "-c", f"set -o pipefail; {command} | head -1").end()
    assert_same_run(untouched[1], out)


@processes
@pytest.mark.parametrize("closed", [[1], [2], [1, 2]], ids=repr)
def test_closed_output_harms_neither_the_run_nor_another_file(
    tiny, out, tmp_path, closed
):
    """`>&-` and `2>&-`: the next file that is opened gets that number."""

    def run():
        files = []
        streams = sys.stdout, sys.stderr
        for number in closed:
            os.close(number)
            setattr(sys, ["stdout", "stderr"][number - 1], None)  # as Python does
            files.append(open(tmp_path / str(number), "w"))
        assert [file.fileno() for file in files] == closed
        before_step(3, send_this(signal.SIGTERM))
        try:
            main(*tiny)
        finally:
            sys.stdout, sys.stderr = [io.StringIO() for _ in streams]

    end_all(fork_ranks(1, run), 143)
    assert load(out)["step"] == 3
    assert set(metrics(out, "loss")) == {1, 2, 3}
    for number in closed:
        said = (tmp_path / str(number)).read_text()
        assert not re.search("(?m)^(step|signal|ranks|from|error)", said)


# ---- OPTIONS -------------------------------------------------------------------------
MISTAKES = "--no_such 1, --batch_size 0, --batch_size x, --accum -1, --epochs 1.5, "
MISTAKES += "--max_steps 0, --lr 0, --lr nan, --lr inf, --dropout 1, --dropout nan, "
MISTAKES += "--warmup 1, --warmup -0.1, --grad_clip 0, --precision fp16, --device tpu, "
MISTAKES += (
    "--timeout 0, --workers -1, --eval_every 0, --save_every 0, --log_every 0, stray"
)


@pytest.mark.parametrize("mistake", MISTAKES.split(", "))
def test_mistake_in_an_option_is_one_line_and_exit_code_2(mistake, capfd):
    with pytest.raises(SystemExit) as error:
        parse(*mistake.split())
    assert error.value.code == 2
    assert mistake.split()[0] in capfd.readouterr().err.splitlines()[-1]


def test_option_has_the_name_of_its_variable():
    args = parse("--batch_size", 8, "--local-rank=1", "--warmup", 0, "--dropout", 0)
    assert (args.batch_size, args.local_rank, args.warmup) == (8, 1, 0)
    for name in vars(parse()):
        assert "-" not in name


@processes
def test_ranks_compare_all_that_must_be_alike(tiny):
    def run():
        def compare(must_match):
            sys.exit(json.dumps(list(must_match)))

        ddp_train.check_alike = compare
        main(*tiny)

    [process] = fork_ranks(1, run)
    compared = set(json.loads(process.end(1)))
    must = set(vars(parse())) - {"data", "out", "device", "workers", "local_rank"}
    others = {"the data", "the device", "the program", "torch"}
    assert compared == others | {f"--{name}" for name in must}


# ---- ENDINGS: the ranks end together -------------------------------------------------
def test_exception_of_a_single_process_is_an_ordinary_one():
    for error in (ValueError("wrong"), SystemExit(75), SystemExit("wrong")):
        with pytest.raises(type(error)) as info:
            with ddp_train.distributed("cpu"):
                raise error
        assert info.value is error
        assert not torch.distributed.is_initialized()


@processes
def test_rank_that_raises_ends_the_other(tiny):
    """It prints its traceback, and what it has printed before is not lost."""

    ranks = start_training(2, *tiny, patch=lambda: before_step(2, boom, rank=1))
    said = end_all(ranks, 1)
    # torchrun's summary has seconds.
    assert ranks[0].log.stat().st_mtime > ranks[1].log.stat().st_mtime + 1
    assert said[1].startswith("error: rank 1: Traceback")
    assert "\nRuntimeError: boom\n" in said[1]
    assert "printed before" in said[1]
    assert "error: rank 0: Traceback" in said[0]


@processes
def test_rank_says_why_it_fails_though_its_error_file_cannot_be_written(tiny, data):
    """The folder of one cannot be made, the disk of the other one is full."""
    files = [data / "folder" / "error", "/dev/full"]
    env = [{"TORCHELASTIC_ERROR_FILE": file} for file in files]

    def fail():
        before_step(2, boom, rank_of_this())

    said = end_all(start_training(2, *tiny, patch=fail, env=env), 1)
    for rank, text in enumerate(said):
        assert f"error: rank {rank}: Traceback" in text
        assert "\nRuntimeError: boom\n" in text


@processes
def test_reason_of_a_rank_is_one_write():
    """torchrun starts python -u: what is written twice mixes with another rank's."""

    def rank():
        os.dup2(to_us.fileno(), 2)
        sys.stderr = io.TextIOWrapper(open(2, "wb", buffering=0), write_through=True)
        with ddp_train.distributed("cpu"):
            sys.exit("boom")

    with contextlib.ExitStack() as stack:
        pair = socket.socketpair(type=socket.SOCK_DGRAM)  # a write is a message
        us, to_us = map(stack.enter_context, pair)
        end_all(fork_ranks(2, rank), code=1)
        us.settimeout(DEADLINE)
        said = set()
        while len(said) < 2:
            said |= {us.recv(10_000).decode()} - {""}
    assert said == {f"error: rank {rank}: boom\n" for rank in range(2)}


@processes
def test_rank_stays_for_a_second_though_nobody_reads_why_it_fails(tiny, tmp_path):
    """torchrun's summary has seconds. As in `2>&1 | head -1`."""

    def fail():
        nobody, pipe = os.pipe()
        os.close(nobody)
        os.dup2(pipe, 2)
        (tmp_path / "failed").touch()
        raise RuntimeError("boom")

    ranks = start_training(2, *tiny, patch=lambda: before_step(2, fail, rank=1))
    assert "error: rank 0: " in end_all(ranks, 1)[0]
    began = (tmp_path / "failed").stat().st_mtime
    assert ranks[0].log.stat().st_mtime > began + 1


@processes
def test_sys_exit_0_of_all_ranks_is_orderly(tiny):
    """An ordinary exit, also if gloo's threads get the GIL only from who waits."""

    def run():
        sys.setswitchinterval(DEADLINE)
        before_step(2, sys.exit, rank=rank_of_this())
        try:
            main(*tiny)
        except SystemExit:
            return "ended"

    assert in_ranks(2, run) == ["ended", "ended"]


@processes
def test_sys_exit_0_of_one_rank_ends_the_other(tiny):
    ranks = start_training(2, *tiny, patch=lambda: before_step(2, sys.exit, rank=1))
    ranks[1].end()
    assert "error: rank 0: " in ranks[0].end(1)


@processes
def test_ranks_leave_the_block_together(tmp_path):
    def run():
        with ddp_train.distributed("cpu") as world:
            if world.rank == 1:
                time.sleep(0.5)
                (tmp_path / "last").touch()
        return (tmp_path / "last").exists()

    assert in_ranks(2, run) == [True, True]


@processes
def test_ddp_may_outlive_the_block():
    """The same. Its end is that of the group, and waits for gloo's threads.

    On one core these still work then. A wrong program hangs in 8 of 10 runs: so five.
    """

    def run():
        if hasattr(os, "sched_setaffinity"):  # not on macOS
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        sys.setswitchinterval(DEADLINE)
        with ddp_train.distributed("cpu") as world:
            ddp = ddp_train.DistributedDataParallel(nn.Linear(1, 1))
            ddp(torch.ones(1, 1)).sum().backward()
        return world.rank

    for _ in range(5):
        assert in_ranks(4, run) == [0, 1, 2, 3]


# ---- ENDINGS: signals to stop --------------------------------------------------------
@pytest.fixture
def handlers():
    """The handlers of the signals are set back after the test."""
    before = {number: signal.getsignal(number) for number in StopSignal.NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_nohup_stays(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    StopSignal(ALONE)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_rank_stops_when_torchrun_is_gone(handlers, monkeypatch):
    """Without torchrun the parent is a shell, which may end before the run."""
    with pytest.raises(SystemExit) as error:
        with ddp_train.distributed("cpu") as world:
            stop = StopSignal(world)
            world.parent = -1
            assert stop.requested() == world.stopped_by == 0
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
            assert stop.requested() == world.stopped_by == signal.SIGTERM
    assert error.value.code == 128 + signal.SIGTERM  # nobody starts it again


@processes
def test_stop_ends_later_runs_of_a_search_too(tiny, out):
    """As under torchrun, which has one block for all. The second one is not begun."""

    def search():
        before_step(3, send_this(signal.SIGTERM))
        with ddp_train.distributed("cpu") as world:
            for name in "ab":
                ddp_train.train(parse(*tiny, "--out", out / name), world)

    end_all(fork_ranks(1, search), 143)
    assert load(out / "a")["step"] == 3
    assert not (out / "b").exists()


@processes
def test_stop_in_the_last_evaluation_ends_the_next_run_of_a_search(tiny, out):
    def search():
        at_call(ddp_train, "evaluate", 1, send_this(signal.SIGTERM), after=True)
        with ddp_train.distributed("cpu") as world:
            for name in "ab":
                options = [*tiny, "--max_steps", 3, "--out", out / name]
                ddp_train.train(parse(*options), world)

    end_all(fork_ranks(1, search), 143)
    assert [load(out / name)["step"] for name in "ab"] == [3, 1]


@processes
def test_stopped_rank_of_torchrun_ends_with_0(tiny):
    def stop():
        os.environ["TORCHELASTIC_RUN_ID"] = "a run"
        before_step(3, send_this(signal.SIGTERM))

    assert "saved at step 3" in train(2, *tiny, patch=stop)[0]


@processes
@pytest.mark.parametrize("leave", [int, sys.exit])
@pytest.mark.parametrize("env, code", [({}, 143), ({"TORCHELASTIC_RUN_ID": "x"}, 0)])
def test_stopped_script_of_a_user_ends_with_128_and_the_number(out, env, code, leave):
    """Without train(), and also if it calls sys.exit(0) itself.

    Under torchrun with 0: it would start the ranks again.
    """

    def script():
        with ddp_train.distributed("cpu") as world:
            stop = StopSignal(world)
            checkpoint = ddp_train.Checkpoint(out, {"part": Part()}, {}, world)
            for step in range(checkpoint.resume().get("step", 0), 9):
                if step == 4 and world.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if stop.requested():
                    break
            checkpoint.save(step)
            leave()

    end_all(fork_ranks(2, script, [env, env]), code)
    assert load(out)["step"] == 4
    end_all(fork_ranks(1, script))
    assert load(out)["step"] == 8


@processes
def test_rank_in_a_thread_says_why_it_fails():
    def rank():
        thread = threading.Thread(target=fail_in_the_block)
        thread.start()
        thread.join()

    def fail_in_the_block():
        with ddp_train.distributed("cpu") as world:
            if world.rank == 1:
                sys.exit("the reason")

    said = [rank.end(1) for rank in fork_ranks(2, rank)]
    assert said[1] == "error: rank 1: the reason\n"


def test_thread_may_be_in_the_block_and_another_one_after_it():
    def work(results):
        with ddp_train.distributed("cpu"):
            results.append(ddp_train.all_gather(1))
        results.append("left")

    for _ in range(2):
        results = []
        thread = threading.Thread(target=work, args=[results])
        thread.start()
        thread.join()
        assert results == [[1], "left"]


@processes
def test_stopped_run_saves_though_nobody_reads_what_it_says_of_the_signal(tiny, out):
    """As in `2>&1 | head -1`."""

    def stop():
        nobody, pipe = os.pipe()
        os.close(nobody)
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        before_step(3, send_this(signal.SIGTERM))

    train(1, *tiny, patch=stop, code=143)
    assert load(out)["step"] == 3


@processes
def test_signal_says_on_stderr_how_to_end_at_once_and_that_ends_a_run_that_hangs(
    tiny, tmp_path
):
    def patch():
        hang_in_step_3()
        os.dup2(os.open(tmp_path / "stderr", os.O_CREAT | os.O_WRONLY), 2)

    [rank] = start_training(1, *tiny, patch=patch)
    rank.wait_for("hangs: ")
    for number in (signal.SIGINT, signal.SIGTERM):
        rank.send(number)
        for _ in ticks():
            said = (tmp_path / "stderr").read_text()
            if f"signal {number:d}: " in said:
                break
        line = said.splitlines()[-1]
        assert line.startswith(f"signal {number:d}: after this step the run saves")
        assert f"(kill -9 {rank.pid} ends it at once)" in line
    assert not rank.has_ended()
    rank.send(signal.SIGKILL)
    rank.end(-signal.SIGKILL)
    rank.leaves_none()


# ---- ENDINGS: loading processes ------------------------------------------------------
class Busy(ddp_train.ByteWindows):
    """A data set whose loading process hangs in its fifth batch."""

    def __getitem__(self, i):
        self.read = getattr(self, "read", 0) + 1
        if self.read > 16:
            time.sleep(3 * DEADLINE)
        return super().__getitem__(i)


@processes
def test_signal_to_all_processes_when_loading_ones_start_and_one_is_busy(tiny, out):
    """Those of the evaluation start after step 3. The run saves and leaves none."""

    def patch():
        ddp_train.ByteWindows = Busy
        send = lambda: os.killpg(os.getpgrp(), signal.SIGTERM)  # noqa: E731
        at_call(ddp_train.Loader, "__iter__", 2, send, after=True)

    options = [*tiny, "--workers", 1, "--eval_every", 3]
    [rank] = start_training(1, *options, patch=patch)
    said = rank.end(143)
    assert "stopped by signal 15, saved at step 4\n" in said
    assert "DataLoader" not in said
    assert set(metrics(out, "val_loss")) == {3}
    rank.leaves_none()


@processes
def test_loading_process_is_killed_though_it_blocks_other_signals():
    def rank():
        batches = iter(ddp_train.train_loader(range(9), 1, ALONE, seed=0, workers=1))
        [process] = multiprocessing.active_children()
        ddp_train.kill_loading_processes()
        process.join(DEADLINE)
        return process.exitcode, len(batches)

    assert in_ranks(1, rank) == [(-signal.SIGKILL, 9)]


@processes
def test_rank_that_fails_leaves_no_busy_loading_process(tiny):
    def patch():
        ddp_train.ByteWindows = Busy
        before_step(4, boom, rank=1)

        loading_options = ddp_train.loading_options

        def without_ours(*args):  # as if the user had another worker_init_fn
            return loading_options(*args) | {"worker_init_fn": None}

        ddp_train.loading_options = without_ours

    ranks = start_training(2, *tiny, "--workers", 1, patch=patch)
    for rank in ranks:
        assert "error: rank" in rank.end(1)
        rank.leaves_none()
    first, later = [rank.log.stat().st_mtime for rank in reversed(ranks)]
    assert later > first + 1


class KillsItsRank:
    """A data set whose loading process kills the rank while it starts."""

    def __len__(self):
        return 9

    def __getitem__(self, i):
        return i

    def __getstate__(self):
        return "else Python does not call __setstate__()"

    def __setstate__(self, state):
        rank = os.getppid()
        os.kill(rank, signal.SIGKILL)
        for _ in ticks():
            if os.getppid() != rank:
                break


class KillsItsRankAndIsBusy:
    def __len__(self):
        return 9

    def __getitem__(self, i):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3 * DEADLINE)


@processes
@pytest.mark.parametrize("make", ["train_loader", "eval_loader"])
@pytest.mark.parametrize("dataset", [KillsItsRank, KillsItsRankAndIsBusy])
def test_loading_process_ends_whose_rank_was_killed(make, dataset):
    """While it started, or while it loads a sample: torch does not look then."""

    def rank():
        needed = {"seed": 0} if make == "train_loader" else {}
        make_loader = getattr(ddp_train, make)
        next(iter(make_loader(dataset(), 1, ALONE, **needed, workers=1)))

    [killed] = fork_ranks(1, rank)
    killed.end(-signal.SIGKILL)
    killed.leaves_none()


@processes
def test_child_process_of_the_user_outlives_the_block():
    """Only daemonic ones are ended, as loading processes are, and no older ones."""
    context = multiprocessing.get_context("fork")
    children = []

    def start(daemon):
        child = context.Process(target=time.sleep, args=[3 * DEADLINE], daemon=daemon)
        child.start()
        children.append(child)

    try:
        start(daemon=True)
        with ddp_train.distributed("cpu"):
            start(daemon=False)
            start(daemon=True)
        children[2].join(DEADLINE)
        assert children[2].exitcode == -signal.SIGKILL
        assert children[0].is_alive() and children[1].is_alive()
    finally:
        for child in children:
            child.kill()
            child.join()


@processes
def test_process_in_load_data_inherits_no_handler(tiny):
    """As that of a Pool, which ends its processes with SIGTERM, and waits for them."""

    def process_in_load_data():
        load_data = ddp_train.load_data

        def load(args):
            context = multiprocessing.get_context("fork")
            child = context.Process(target=time.sleep, args=[3 * DEADLINE])
            child.start()
            child.terminate()
            child.join(DEADLINE)
            if child.exitcode != -signal.SIGTERM:
                child.kill()
                sys.exit("SIGTERM has not ended it")
            return load_data(args)

        ddp_train.load_data = load

    train(1, *tiny, "--max_steps", 1, patch=process_in_load_data)


@processes
def test_pool_of_the_user_outlives_the_block():
    """Also one that was made inside. With a killed process its end would hang."""

    def rank():
        with ddp_train.distributed("cpu"):
            pool = multiprocessing.get_context("fork").Pool(1)
            before = pool.apply(os.getpid)
        assert pool.apply(os.getpid) == before
        pool.terminate()
        pool.join()

    [alone] = fork_ranks(1, rank)
    alone.end(0)
    alone.leaves_none()


# ---- Launchers -----------------------------------------------------------------------
@processes
def test_torchrun_names_the_rank_that_failed_first(tiny):
    """It ends the other within seconds."""
    run = launch(*torchrun(2, PATCHED, "raise_in_step_3", *tiny))
    said = run.end(1)
    assert "step 2 " in said
    cause = said[said.index("Root Cause (first observed failure)") :]
    assert re.search(r"rank +: 1 ", cause)
    assert "RuntimeError: boom" in cause
    run.leaves_none()


@processes
def test_two_nodes_by_torchrun_and_by_the_old_launcher(tiny, tmp_path):
    """With a static rendezvous: the same bits as of ranks that are started by hand."""
    options = [*tiny, "--epochs", 1, "--batch_size", 8]
    train(2, *options, "--out", tmp_path / "by hand")
    address = ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    agents = []
    for rank, launcher in enumerate(("run", "launch")):
        command = [sys.executable, "-m", f"torch.distributed.{launcher}", *address]
        command += ["--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=1"]
        agents.append(launch(*command, SCRIPT, *options))
    said = end_all(agents)
    assert said[0].count("ranks: 2, cpu, fp32, host ") == 1
    assert "ranks: " not in said[1]
    assert_same_run(tmp_path / "by hand", tmp_path / "out")


@processes
def test_run_single_restarts_a_rank_that_was_killed(tiny, untouched, tmp_path):
    """The new ranks go on, and end with the same bits. --out has a space in it. Threads
    of gloo that outlive their group may abort the exit: one of each rank is harmless.
    """
    script = tmp_path / "run_single.sh"
    script.write_text((SCRIPT.parent / "run_single.sh").read_text())
    # In place of the program: a patched one.
    folders = [str(SCRIPT.parent), str(PATCHED.parent)]
    (tmp_path / "ddp_train.py").write_text(
        f"import runpy, sys\nsys.path[:1] = {folders}\n"
        "sys.argv.insert(1, 'kill_once')\n"
        f"runpy.run_path({str(PATCHED)!r}, run_name='__main__')\n"
    )
    options = [*tiny[: tiny.index("--out")], *HARD, "--out", tmp_path / "a b"]
    env = {"NPROC": "2", "MAX_RESTARTS": "1", "PYTHON": sys.executable}
    said = launch("bash", script, *options, env=env).end()
    assert said.count("from step 3 to 14\n") == 1
    assert_same_run(untouched[2], tmp_path / "a b")
    assert said.count("threads:") == 2
    assert said.count("gloo") <= 2


@processes
@pytest.mark.parametrize(("when", "step"), [("load_data", 1), ("step_3", 3)])
def test_ranks_save_and_stop_when_torchrun_is_killed(when, step, tiny, out):
    run = launch(*torchrun(2, PATCHED, f"kill_torchrun_in_{when}", *tiny))
    run.end(-9)
    run.leaves_none()
    assert f"stopped by signal 15, saved at step {step}\n" in run.text
    assert load(out)["step"] == step


@processes
@pytest.mark.parametrize("when", ["step_3", "the_last_evaluation"])
def test_ranks_of_a_launcher_in_python_end_when_it_is_killed(when, tiny, out):
    """As that of a notebook whose kernel is killed. It starts the ranks by a fork."""
    script = [
        "import sys",
        f"sys.path[:0] = {sys.path!r}",
        "import harness",
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch",
        "def rank():",
        f"    harness.kill_torchrun_in_{when}()",
        "    harness.main(*sys.argv[1:])",
        "options = dict(start_method='fork', rdzv_backend='c10d', max_restarts=0)",
        "config = LaunchConfig(1, 1, 2, rdzv_endpoint='localhost:0', **options)",
        "elastic_launch(config, rank)()",
    ]
    run = launch(sys.executable, "-c", "\n".join(script), *tiny, "--max_steps", 4)
    run.end(-9)
    run.leaves_none()
    assert load(out)["step"] == (3 if when == "step_3" else 4)


@processes
def test_sigterm_to_run_single_saves_and_leaves_no_process(tiny, out):
    """Its process becomes torchrun. A loading process gets the signal, too."""
    options = [*tiny, "--workers", 1, "--epochs", 99999, "--eval_every", 10**9]
    env = {"NPROC": "1", "PYTHON": sys.executable}
    run = launch(SCRIPT.parent / "run_single.sh", *options, env=env)
    run.wait_for("step 3 ")
    run.send(signal.SIGTERM)
    said = run.end(1)
    step = int(re.search(r"stopped by signal 15, saved at step (\d+)\n", said)[1])
    assert load(out)["step"] == step
    assert "DataLoader" not in said
    run.leaves_none()


@processes
def test_kill_9_of_one_rank_ends_those_of_torchrun_that_hang(tiny):
    """After a SIGTERM to torchrun, which would kill them, too, but after 30 s."""
    run = launch(*torchrun(2, PATCHED, "hang_in_step_3", *tiny))
    hanging = int(run.wait_for(r"hangs: (\d+)\n")[1])
    run.send(signal.SIGTERM)
    run.wait_for(rf"signal 15: .*kill -9 {hanging} ends it at once")
    os.kill(hanging, signal.SIGKILL)
    said = run.end(1)
    run.leaves_none()
    assert "forcefully" not in said
