"""What ddp_train.py promises. The name of a test is a promise, in plain words.

    pytest test_ddp_train.py                       all that this machine can run
    pytest test_ddp_train.py -m "not processes"    the direct tests: some seconds

It needs torch, numpy and pytest. Most tests that start ranks fork this process, so that
torch is not imported again: see tests/harness.py. tests/ has tests of the other files.
"""

import collections
import errno
import fcntl
import functools
import importlib
import itertools
import math
import multiprocessing
import operator
import os
import pty
import random
import re
import resource
import signal
import sys
import time
import types
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ddp_train
from harness import (
    CPU,
    DATA,
    DEADLINE,
    ROOT,
    TINY,
    WITH_FAULT,
    assert_same_run,
    flatten,
    fork_ranks,
    free_port,
    in_ranks,
    launch,
    load,
    main,
    metrics,
    processes,
    start_training,
    torchrun,
    train,
)

pytest_plugins = ["harness"]  # its fixtures
NO_TWO_ALIKE = random.Random(0).randbytes(2561)  # each sample has other bytes


def parse(*options):
    return ddp_train.parse_args([str(option) for option in options])


def before(owner, name, note):
    """From now on note() gets the arguments of this function before it is called."""
    function = getattr(owner, name)

    def noted(*args, **options):
        note(*args)
        return function(*args, **options)

    setattr(owner, name, noted)


@pytest.fixture
def alone():
    """A group of one rank, in this process."""
    with ddp_train.distributed("cpu"):
        yield


# ---- Model, data, options ------------------------------------------------------------
ABOVE_ZERO = "layers heads dim seq_len epochs max_steps batch_size accum lr timeout "
ABOVE_ZERO += "log_every eval_every save_every"
MISTAKES = [f"--{name} 0" for name in ABOVE_ZERO.split()]
MISTAKES += ["--no_such 1", "--heads -1", "--epochs 1.5", "--seed x", "--device gpu"]
MISTAKES += ["--precision fp16", "--lr nan", "--grad_clip -1", "--dropout -0.1"]
MISTAKES += ["--dropout 1", "--warmup 1", "--warmup -0.1", "--workers -1"]
MISTAKES += ["--data=", "--out="]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_an_option_is_named_below_the_usage_with_exit_code_2(mistake, capfd):
    with pytest.raises(SystemExit) as error:
        parse(*mistake.split())
    assert error.value.code == 2
    usage, line = capfd.readouterr().err.splitlines()
    assert usage.startswith("usage: ") and mistake.split()[0].strip("=") in line


def test_smallest_and_largest_numbers_are_accepted():
    parse(*[f"--{name}=1" for name in ABOVE_ZERO.split()])
    for name in ("auto", "cuda"):
        parse("--precision", "fp32", "--device", name)
    parse("--warmup", 0, "--seed", -1, "--lr", 1e-9, "--grad_clip", "inf")


DEFAULTS = "layers=2 heads=4 dim=128 seq_len=128 dropout=0.0 out=out epochs=3 "
DEFAULTS += "max_steps=None batch_size=32 accum=1 lr=0.002 warmup=0.05 grad_clip=1.0 "
DEFAULTS += "precision=fp32 compile=False workers=0 seed=0 log_every=20 "
DEFAULTS += "eval_every=None save_every=100 device=auto timeout=600"


def test_help_names_the_options_with_their_defaults(capfd):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capfd.readouterr().out.split())
    for pair in DEFAULTS.split():
        name, value = pair.split("=")
        help_of_it = text.partition(f"--{name} ")[2]
        assert help_of_it.partition("(default: ")[2].startswith(f"{value})"), name
    assert "--data FILE file to train on; default: Python's help texts" in text


def test_pieces_have_the_same_defaults():
    assert ddp_train.distributed.__wrapped__.__defaults__ == ("auto", 600)
    assert ddp_train.init_distributed.__defaults__ == ("auto", 600)
    assert ddp_train.loading_options.__defaults__ == (600,)


BAD_INPUT = {
    "--data /no/such": "no data: ",
    "--data /dev/null": "0 samples are fewer than one step of 4",
    "--batch_size 16 --accum 4": "60 samples are fewer than one step of 64",
    "--heads 3 --seq_len 33": "--dim 16 is not divisible by --heads 3",
    "--out /dev/null/out": "cannot use the folder /dev/null/out: ",
}


@pytest.mark.parametrize("options", BAD_INPUT)
def test_bad_input_is_one_line(tiny, options):
    with pytest.raises(SystemExit) as error:
        main(*tiny, *options.split())
    assert BAD_INPUT[options] in error.value.code
    assert "\n" not in error.value.code


def test_sample_is_bytes_and_those_one_later(data):
    """Nothing that is predicted in an evaluation is predicted in training."""
    for size, sizes in ((2048, (60, 3)), (2561, (76, 4)), (321, (9, 1))):
        data.write_bytes(NO_TWO_ALIKE[:size])
        train_set, val_set, _ = ddp_train.load_data(parse(*TINY, "--data", data))
        assert (len(train_set), len(val_set)) == sizes
        for i, (x, y) in enumerate([*train_set, *val_set]):
            assert bytes(x) == NO_TWO_ALIKE[32 * i :][:32]
            assert bytes(y) == NO_TWO_ALIKE[32 * i + 1 :][:32]


def test_without_an_option_there_are_data():
    train_set, _, _ = ddp_train.load_data(parse())
    assert len(train_set) > 1000


def test_text_of_the_data_changes_with_one_byte(data):
    texts = set()
    for content in (b"a" * 2**20, b"a" * 2**20 + b"b", b"a" * 100, b"a" * 2**20):
        data.write_bytes(content)
        texts.add(ddp_train.load_data(parse(*TINY, "--data", data))[2])
    assert len(texts) == 3


def test_prediction_of_a_byte_does_not_see_the_bytes_that_follow():
    """Otherwise the model reads the answer, and val_loss means nothing."""
    model = ddp_train.build_model(parse(*TINY))
    x = torch.randint(256, (1, 32))
    y = x.clone()
    y[0, 20:] = 0
    assert torch.equal(model(x)[:, :20], model(y)[:, :20])
    assert not torch.equal(model(x)[:, 20:], model(y)[:, 20:])


def test_options_of_the_model_change_the_model():
    """A block has 12 * dim**2 weights in its matrices, and two norms without biases."""
    for layers, dim, seq_len in ((1, 16, 32), (3, 8, 50)):
        words = ["--layers", layers, "--dim", dim, "--seq_len", seq_len]
        model = ddp_train.build_model(parse(*TINY, *words))
        size = layers * (12 * dim**2 + 2 * dim) + (2 * 256 + seq_len + 2) * dim
        assert sum(weight.numel() for weight in model.parameters()) == size
    x = torch.randint(256, (1, 32))
    logits = {}
    for words in ("--heads 2", "--heads 4", "--dropout 0", "--dropout 0.9"):
        torch.manual_seed(0)
        model = ddp_train.build_model(parse(*TINY, *words.split()))
        logits[words] = model(x)
    assert torch.equal(logits["--heads 2"], logits["--dropout 0"])
    assert not torch.equal(logits["--heads 2"], logits["--heads 4"])
    assert not torch.equal(logits["--heads 2"], logits["--dropout 0.9"])


def test_learning_rate_goes_by_samples_or_by_max_steps_and_ends_at_0():
    """A resumed epoch may have more samples than fit. Without warm-up, 0 is the peak.
    test_any_split_of_a_batch has the numbers between."""
    three_epochs, steps = parse("--epochs", 3), parse("--max_steps", 20)
    rest = 1001, 100  # samples, and those of a step
    example = ddp_train.get_progress(three_epochs, 12, 1, 200, *rest)
    assert example == pytest.approx((1 + 250 / 1000) / 3)
    assert ddp_train.get_progress(three_epochs, 99, 2, 999, *rest) == 1
    assert ddp_train.get_progress(steps, 12, 1, 200, *rest) == 12.5 / 20
    group = {}
    optimizer = types.SimpleNamespace(param_groups=[group])
    for progress, rate in ((1, 0), (0, 10)):
        ddp_train.set_learning_rate(optimizer, [10], progress, warmup=0)
        assert group["lr"] == rate


# ---- Batches -------------------------------------------------------------------------
def order_of(n, rank, size, *start):
    """The samples of one of several ranks. As many as its sampler promises."""
    sampler = ddp_train.ResumableSampler(range(n), seed=0)
    sampler.rank, sampler.num_replicas = rank, size
    sampler.set_epoch(3, *start)
    order = list(sampler)
    assert len(order) == len(sampler)
    return order


def test_ranks_take_turns_from_any_start_and_have_as_many_samples(alone):
    """So none comes twice in an epoch, though the number of ranks changes."""
    for n, size in itertools.product((1, 7, 20), (1, 2, 3, 5)):
        assert len(ddp_train.ResumableSampler(range(n), seed=0)) == n
        order = order_of(n, 0, 1)
        assert sorted(order) == list(range(n))
        for start in range(n + 3):  # an epoch may have ended beyond the data
            ranks = [order_of(n, rank, size, start) for rank in range(size)]
            turns = list(itertools.chain(*zip(*ranks, strict=True)))
            assert turns == order[start : start + len(turns)]
            assert n - start - len(turns) < size


def test_pieces_work_if_new_tensors_are_made_elsewhere(alone):
    """By torch.set_default_device("cuda"), say. Here that other device is "meta"."""
    x = torch.ones(2)
    with torch.device("meta"):
        assert sorted(ddp_train.ResumableSampler(range(3), seed=0)) == [0, 1, 2]
        assert ddp_train.mean_over_ranks([{"a": 1, "b": x[0]}]) == {"a": 1, "b": 1}
        means = ddp_train.evaluate(
            nn.ReLU(), lambda *_: {"a": x[0], "count": x[1]}, [x], CPU
        )
        assert means == {"a": 1}
        assert ddp_train.StopSignal().requested() == 0


def test_random_numbers_differ_by_word_rank_and_step():
    """Those of torch, of numpy and of random. The same values give the same numbers."""
    draws = []
    for values in [("step", 0, 0), ("load", 0, 0), ("step", 1, 0), ("step", 0, 1)] * 2:
        ddp_train.seed_all(*values)
        draws.append((torch.rand(1).item(), numpy.random.rand(), random.random()))
    assert draws[:4] == draws[4:]
    for numbers in zip(*draws, strict=True):  # by torch, by numpy, by random
        assert len(set(numbers)) == 4


class Attributes(dict):
    """A dict whose entries are attributes, such as Hugging Face's ModelOutput."""

    __getattr__ = dict.__getitem__


Edge = collections.namedtuple("Edge", "x to")


def test_batch_of_any_nesting_goes_to_the_device():
    """Each part keeps its type: batch.x still works. No tensor is left behind."""
    x = torch.ones(2)
    own = nn.utils.rnn.pack_sequence([x])  # it has .to(), and is none of these
    batch = {"a": x, "b": [x, (x, "text")], "c": {"own": own}, "d": Edge(x, x)}
    batch |= {"e": Attributes(x=x), "f": collections.defaultdict(list, x=x)}
    moved = ddp_train.to_device(batch, torch.device("meta"))
    assert moved["b"][1][1] == "text"
    for name, part in batch.items():
        assert type(moved[name]) is type(part)
    found = [moved["a"], moved["b"][0], moved["b"][1][0], moved["c"]["own"].data]
    found += [moved["d"].x, moved["d"].to, moved["e"].x, moved["f"]["x"]]
    for tensor in found:
        assert tensor.is_meta
    assert not batch["e"].x.is_meta  # the batch itself is as it was


@processes
def test_worker_is_spawned_ignores_stop_signals_lives_on_and_may_not_hang():
    """It reports its handlers of signals. A fork has the one that its rank has set."""

    def rank():
        signal.signal(signal.SIGALRM, print)
        numbers = [*ddp_train.STOP_SIGNALS, signal.SIGALRM]
        with ddp_train.distributed("cpu") as device:
            patient = ddp_train.loading_options(device, 1) | {"batch_size": None}
            loader = DataLoader(numbers, collate_fn=signal.getsignal, **patient)
            assert list(loader) == [signal.SIG_IGN] * 5 + [signal.SIG_DFL]
            # It lives on: a new one in each epoch would import torch again.
            getpid = operator.methodcaller("__call__")
            loader = DataLoader([os.getpid], collate_fn=getpid, **patient)
            assert list(loader) == list(loader)
            hasty = patient | ddp_train.loading_options(device, 1, timeout=1)
            with pytest.raises(RuntimeError):
                list(DataLoader([2 * DEADLINE], collate_fn=time.sleep, **hasty))

    in_ranks(1, rank)


@processes
def test_numbers_are_averaged_by_name_and_compared_to_a_millionth():
    def rank():
        with ddp_train.distributed("cpu"):
            rank = dist.get_rank()
            results = [{"x": torch.tensor(i + 10.0 * rank)} for i in (1, 3)]
            assert ddp_train.mean_over_ranks(results) == {"x": (1 + 3 + 11 + 13) / 4}
            large = 2**24 + 1  # not a number of float32
            result = [{"a": 0.0, "b": torch.ones(1)}, {"a": 2 * large, "b": 1.0}][rank]
            assert ddp_train.mean_over_ranks([result]) == {"a": large, "b": 1}
            # The names, and the number of steps, must be the same on all ranks.
            own = [{"image": 1.0}, {"text": 1.0}][rank]
            for results in ([own], [result] * (1 + rank)):
                with pytest.raises(SystemExit, match="the log is .* on rank 1, but "):
                    ddp_train.mean_over_ranks(results)
            model = nn.LayerNorm(1)
            ddp_train.check_together([{"grad_norm": 1e6 + rank / 2}], model)
            with pytest.raises(SystemExit, match="the ranks differ"):
                ddp_train.check_together([{"grad_norm": 1e6 + 2 * rank}], model)
            model = nn.Sequential(nn.Linear(1000, 1, False), nn.Linear(1, 1, False))
            nn.init.constant_(model[0].weight, 1e6)  # beside it the last layer is small
            nn.init.constant_(model[1].weight, 1 + rank)
            with pytest.raises(SystemExit, match="norm of 1.weight: "):
                ddp_train.check_together([{"grad_norm": 1.0}], model)

    in_ranks(2, rank)


def mean_of(model, batch):
    return {"mean": model(batch).double().sum(), "count": len(batch)}


@processes
def test_samples_of_any_length_are_padded_by_collate_in_both_loaders(tiny):
    def pad(samples):
        return {"x": nn.utils.rnn.pad_sequence(samples, batch_first=True)}

    def mean_length(model, batch):
        return {"mean": (batch["x"] > 0).sum(), "count": len(batch["x"])}

    def patch():
        samples = [torch.ones(1 + i) for i in range(8)]
        ddp_train.load_data = lambda args: (samples, samples[:3], "lengths")
        ddp_train.collate, ddp_train.score = pad, mean_length
        ddp_train.build_model = lambda args: nn.Linear(1, 1)
        ddp_train.compute_loss = lambda model, batch: model(
            batch["x"][..., None]
        ).mean()

    assert "\nstep 2  mean 2\n" in train(2, *tiny, "--epochs", 2, patch=patch)[0]


# ---- Exact ---------------------------------------------------------------------------
# Global batches of 8 in two epochs of 7 steps. 4 samples are left over in each.
# A layout is a number of ranks, a batch size, and how many batches are accumulated.
EXACT = "--seed 7 --epochs 2 --lr 0.001 --warmup 0.25 --grad_clip 2.25 --eval_every 5"
LAYOUTS = [(1, 8, 1), (2, 4, 1), (4, 2, 1), (1, 2, 4), (2, 2, 2)]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def two_groups(model, args):
    """The head has its own learning rate, as a pretrained model's might."""
    head = set(model.head.parameters())
    others = [weight for weight in model.parameters() if weight not in head]
    groups = [{"params": others}, {"params": list(head), "lr": args.lr / 10}]
    return torch.optim.AdamW(groups, args.lr)


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.fixture(scope="session")
def plain():
    """The training of (1, 8, 1), written by hand for one device.

    Only the model, and the seed of its first weights, are the program's.
    """
    ddp_train.seed_all("start", 7)
    model = ddp_train.build_model(parse(*TINY))
    optimizer = two_groups(model, parse("--lr", 0.001))
    rates = [group["lr"] for group in optimizer.param_groups]
    run = types.SimpleNamespace(samples=[], gradients=[])
    run.loss, run.grad_norm, run.lr, run.val_loss = {}, {}, {}, {}

    def loss_of(samples):
        x = torch.tensor([list(NO_TWO_ALIKE[32 * i :][:32]) for i in samples])
        y = torch.tensor([list(NO_TWO_ALIKE[32 * i + 1 :][:32]) for i in samples])
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    run.val_loss[0] = loss_of([60, 61, 62]).item()
    for step in range(1, 15):
        epoch, place = divmod(step - 1, 7)
        generator = torch.Generator().manual_seed(7 + epoch)
        order = torch.randperm(60, generator=generator).tolist()
        samples = order[8 * place :][:8]
        progress = (step - 0.5) / 14
        factor = progress / 0.25
        if progress >= 0.25:
            angle = math.pi * (progress - 0.25) / 0.75
            factor = (1 + math.cos(angle)) / 2
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.zero_grad()
        loss = loss_of(samples)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 2.25)
        optimizer.step()
        run.samples.append(sorted(samples))
        run.gradients.append(flat(weight.grad for weight in model.parameters()))
        run.loss[step] = loss.item()
        run.grad_norm[step] = norm.item()
        run.lr[step] = 0.001 * factor
        if step in (5, 10, 14):
            run.val_loss[step] = loss_of([60, 61, 62]).item()
    run.weights = flat(model.parameters())
    return run


def noting_averages(note):
    """DDP that calls note() when it averages a bucket of gradients."""

    def average(state, bucket):
        note()
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    class NotingDDP(DistributedDataParallel):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.register_comm_hook(None, average)

    return NotingDDP


def observe(*options):
    """Train. Returns what this rank has seen. draws: what dropout would draw in a step.
    averages: how many all-reduces of gradients the backward() of each batch makes."""
    seen = types.SimpleNamespace(samples=[], gradients=[], draws=[], averages=[])
    seen.epochs = []

    def note_epoch(sampler, epoch, done):
        seen.epochs.append(epoch)

    def note_sample(data_set, i):
        seen.samples.append(i)

    def note_gradient(optimizer):
        seen.weights = sum([group["params"] for group in optimizer.param_groups], [])
        seen.gradients.append(flat(weight.grad for weight in seen.weights))

    def note_draws(*_):
        seen.draws += [torch.rand(1).item(), numpy.random.rand(), random.random()]

    def note_batch(model, batch):
        seen.averages.append(0)

    def note_average():
        seen.averages[-1] += 1

    ddp_train.DistributedDataParallel = noting_averages(note_average)
    ddp_train.build_optimizer = two_groups
    before(ddp_train, "compute_loss", note_batch)
    before(ddp_train.ResumableSampler, "set_epoch", note_epoch)
    before(ddp_train.TensorDataset, "__getitem__", note_sample)
    before(torch.optim.AdamW, "step", note_gradient)
    before(ddp_train, "train_step", note_draws)
    main(*options)
    seen.weights = flat(seen.weights)
    seen.held_out = [i for i in seen.samples if i >= 60]
    seen.samples = [i for i in seen.samples if i < 60]
    return seen


@pytest.fixture(scope="session")
def layouts(tmp_path_factory):
    """layouts(layout): its folder, and what each rank has seen. Each runs once."""
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "data").write_bytes(NO_TWO_ALIKE[:2048])

    @functools.cache
    def run(layout):
        size, batch_size, accum = layout
        out = folder / f"{size} {accum}"
        options = [*TINY, *EXACT.split(), "--data", folder / "data", "--out", out]
        options += ["--batch_size", batch_size, "--accum", accum]
        return out, in_ranks(size, functools.partial(observe, *options))

    return run


@processes
@each_layout
def test_any_split_of_a_batch_has_the_numbers_of_a_plain_loop(layouts, plain, layout):
    """The gradient is what the optimizer gets: averaged, then clipped."""
    out, ranks = layouts(layout)
    for number in ("loss", "grad_norm", "lr", "val_loss"):
        expected = getattr(plain, number)
        assert metrics(out, number) == pytest.approx(expected, rel=1e-6)
    for rank in ranks:
        for found, expected in zip(rank.gradients, plain.gradients, strict=True):
            assert (found - expected).abs().max() < 1e-6
        assert (rank.weights - plain.weights).abs().max() < 1e-6
    assert torch.equal(flat(load(out)["model"].values()), ranks[0].weights)
    norms = plain.grad_norm.values()
    assert min(norms) < 2.25 < max(norms)  # some steps are clipped, and some are not


@processes
@each_layout
def test_each_step_has_its_own_samples(layouts, plain, layout):
    """In an epoch none comes twice. Each evaluation has each held-out sample once. No
    epoch begins after the last step, or workers would load it."""
    _, ranks = layouts(layout)
    share = 8 // len(ranks)
    for step, expected in enumerate(plain.samples):
        read = [rank.samples[step * share :][:share] for rank in ranks]
        assert sorted(sum(read, [])) == expected
    assert {len(rank.samples) for rank in ranks} == {share * 14}
    assert {tuple(rank.epochs) for rank in ranks} == {(0, 1)}
    held_out = sum([rank.held_out for rank in ranks], [])
    assert sorted(held_out) == sorted(4 * [60, 61, 62])


@processes
def test_gradients_are_averaged_once_per_step(layouts):
    """Of two batches in the second. The others are evaluated: one on rank 1."""
    for rank in layouts((2, 2, 2))[1]:
        assert [n for n in rank.averages if n] == [1] * 14
        assert rank.averages[:11] == [0] + [0, 1] * 5  # the first is evaluated


@processes
def test_each_rank_step_and_seed_draws_its_own_random_numbers(layouts, tiny):
    """For dropout, say."""
    _, ranks = layouts((4, 2, 1))
    draws = sum([rank.draws for rank in ranks], [])
    assert len(set(draws)) == len(draws) == 3 * 4 * 14
    [other] = in_ranks(1, functools.partial(observe, *tiny, "--seed", 8, "--epochs", 1))
    assert not set(other.draws) & set(draws)


DATA_SETS = """import time, torch
class Draws:
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return torch.rand(2)
class Hangs(Draws):
    def __getitem__(self, i):
        time.sleep(9999)
"""


def load_from(folder, name):
    """Train with this data set, which workers import. Draws are printed."""
    (folder / "data_sets.py").write_text(DATA_SETS)
    sys.path.insert(0, str(folder))
    data = getattr(importlib.import_module("data_sets"), name)()
    ddp_train.load_data = lambda args: (data, [], name)
    ddp_train.evaluate = lambda *args: {}  # it would start more workers
    ddp_train.compute_loss = loss_of_draws


def loss_of_draws(model, draws):
    print("draws", *draws.flatten().tolist(), flush=True)
    return sum(weight.sum() for weight in model.parameters())


@processes
def test_workers_of_each_rank_draw_their_own_random_numbers(tiny, tmp_path):
    """For augmentation, say. So do those of a resumed run."""
    patch = functools.partial(load_from, tmp_path, "Draws")
    options = [*tiny, "--workers", 1, "--max_steps", 4]
    said = train(2, *options, patch=patch, fault="train_step 2 SIGTERM 0", code=143)
    said += train(1, *options, patch=patch)  # not those from before the resume
    drawn = re.findall(r"0\.\d+", "".join(re.findall("draws .*", "".join(said))))
    assert len(set(drawn)) == len(drawn) == 2 * 2 * 8 + 2 * 8


# ---- A run and its log ---------------------------------------------------------------
@processes
def test_folder_may_have_any_name(tiny, tmp_path):
    out = os.fsdecode(bytes(tmp_path) + b"/no UTF-8: \xff")
    [rank] = start_training(1, *tiny, "--max_steps", 2, "--out", out)
    rank.end()
    line = f"\ndone: step 2, saved in {out}/checkpoint.pt\n"
    assert os.fsencode(line) in rank.log.read_bytes()


@processes
def test_run_learns_says_what_runs_where_and_is_finished(tiny, out):
    """Launched again, as a script on one rank, it evaluates, and does nothing else."""
    options = [*tiny, "--epochs", 2, "--lr", 0.01]
    said = train(2, *options)[0]
    first = "ranks: 2, cpu, fp32, 60 samples\nfrom step 0 to 14, 8 samples each\n"
    assert said.count(first) == 1
    assert said.endswith(f"\ndone: step 14, saved in {out}/checkpoint.pt\n")
    losses, val_losses = metrics(out, "loss"), metrics(out, "val_loss")
    assert list(losses) == list(range(1, 15))
    assert losses[14] < losses[1] - 0.3
    assert list(val_losses) == [0, 7, 14]
    checkpoint = (out / "checkpoint.pt").read_bytes()
    options += ["--batch_size", 8]
    said = launch(sys.executable, ddp_train.__file__, *options).end()
    assert "\nfrom step 14 to 14, 8 samples each\nstep 14  val_loss " in said
    assert "\nnothing left to train" in said and "done: " not in said
    assert metrics(out, "val_loss") == pytest.approx(val_losses, rel=1e-6)
    assert metrics(out, "loss") == losses
    assert (out / "checkpoint.pt").read_bytes() == checkpoint


@processes
def test_run_can_be_extended_and_the_optimizer_has_the_options_of_this_start(tiny, out):
    """Fewer steps or epochs than are done end it. The learning rate may be a tensor."""

    def build(model, args):
        rate = torch.tensor(args.lr)
        return torch.optim.AdamW(model.parameters(), rate, weight_decay=1000)

    decay = functools.partial(setattr, ddp_train, "build_optimizer", build)
    wanted = [("--max_steps", 4, 4), ("--max_steps", 3, 4), ("--epochs", 1, 15)]
    for option, number, step in wanted:
        train(1, *tiny, option, number)
        assert load(out)["step"] == step
    weights = flat(load(out)["model"].values())
    more = ["--max_steps", 18, "--lr", 0.01, "--warmup", 0, "--dropout", 0.1]
    said = train(1, *tiny, *more, patch=decay)[0]
    assert "dropout is 0.1, it was 0.0\n" in said
    assert "\nlr is 0.01, it was 0.002\nwarmup is 0.0, it was 0.05\n" in said
    assert "epochs is 3, it was 1\n" in said
    assert "\nmax_steps is 18, it was None\n" in said
    assert said.count("it was") == 5
    rate = 0.01 * (1 + math.cos(math.pi * 15.5 / 18)) / 2
    assert metrics(out, "lr")[16] == pytest.approx(rate)
    assert flat(load(out)["model"].values()).norm() < 0.9 * weights.norm()


@processes
def test_logged_number_is_the_mean_over_steps_and_only_rank_0_writes(tiny, out, plain):
    """A save comes with a line. Ranks may differ in folders and numbers of workers."""
    (out.parent / "data").write_bytes(NO_TWO_ALIKE[:2048])
    options = [*tiny, *EXACT.split(), "--log_every", 6, "--save_every", 4, "--out"]

    def rank():
        ddp_train.build_optimizer = two_groups
        number = os.environ["RANK"]
        main(*options, out / number, "--workers", number)

    (out / "1").mkdir(parents=True)
    ranks = fork_ranks(2, rank)
    assert [bool(rank.end()) for rank in ranks] == [True, False]
    assert os.listdir(out / "1") == []
    assert set(os.listdir(out / "0")) == {"checkpoint.pt", "metrics.jsonl", ".lock"}
    for name in ("loss", "grad_norm"):
        values = list(getattr(plain, name).values())
        expected = {}
        for begin, end in itertools.pairwise([0, 4, 5, 6, 8, 10, 12, 14]):
            expected[end] = numpy.mean(values[begin:end])
        assert metrics(out / "0", name) == pytest.approx(expected, rel=1e-6)
    assert list(metrics(out / "0", "val_loss")) == [0, 5, 10, 14]


@processes
def test_speed_in_the_log_is_of_all_ranks_and_without_evaluations(tiny, out):
    """By a clock that goes on by 2 s in each step, and by an hour in an evaluation."""

    def set_clock():
        clock = types.SimpleNamespace(now=0)

        def wait(seconds, *_):
            clock.now += seconds

        ddp_train.time = types.SimpleNamespace(perf_counter=lambda: clock.now)
        ddp_train.time.sleep = time.sleep
        before(ddp_train, "train_step", functools.partial(wait, 2))
        before(ddp_train, "evaluate", functools.partial(wait, 3600))

    train(2, *tiny, "--log_every", 2, "--epochs", 2, patch=set_clock)
    steps = [2, 4, 6, 7, 8, 10, 12, 14]
    assert metrics(out, "samples_per_s") == dict.fromkeys(steps, 4)


@processes
def test_bf16_computes_in_bf16_and_keeps_fp32_weights(tiny, out):
    def say_type(logits, targets):
        print("computes in", logits.dtype)

    patch = functools.partial(before, nn.functional, "cross_entropy", say_type)
    options = [*tiny, "--precision", "bf16", "--accum", 2, "--max_steps", 2]
    for _ in range(2):  # launched again, it only evaluates
        for text in train(2, *options, patch=patch):
            found = re.findall("computes in (.*)", text)
            assert set(found) == {"torch.bfloat16"}
    assert {weight.dtype for weight in load(out)["model"].values()} == {torch.float32}


@processes
@pytest.mark.parametrize("size", [1, 2])
def test_compiled_ranks_have_the_same_numbers_and_names(tiny, tmp_path, size):
    """The graphs are run as they are: this needs no C compiler."""

    def backend(graph, inputs):
        print("compiles a graph", flush=True)
        return graph.forward

    def use_backend():
        torch.compile = functools.partial(torch.compile, backend=backend)
        note = functools.partial(print, "averages", flush=True)
        ddp_train.DistributedDataParallel = noting_averages(note)

    options = [*tiny, "--accum", 2, "--max_steps", 2]
    train(size, *options, "--out", tmp_path / "a")
    options += ["--out", tmp_path / "b", "--compile"]
    for said in train(size, *options, patch=use_backend):
        assert "compiles a graph" in said
        assert said.count("averages") == (2 if size > 1 else 0)
    a, b = load(tmp_path / "a")["model"], load(tmp_path / "b")["model"]
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # names, too


def test_model_in_eval_mode_is_refused(tiny, monkeypatch):
    """As a pretrained one may be: it would train without dropout."""
    monkeypatch.setattr(ddp_train, "build_model", lambda args: nn.Linear(1, 1).eval())
    with pytest.raises(SystemExit, match="a model in eval mode"):
        main(*tiny)


def test_gradients_of_weights_that_the_optimizer_lacks_do_not_pile_up(alone):
    """As if a head alone is trained. They would count in the norm, and be clipped. With
    --grad_clip 0 nothing is clipped: the head is trained."""
    args = parse(*TINY, "--grad_clip", 0)
    model = ddp_train.build_model(args)
    first = model.head.weight.clone()
    optimizer = torch.optim.SGD(model.head.parameters(), 1e-5)
    batches = itertools.repeat(torch.randint(256, (2, 4, 32)).unbind())
    autocast = torch.autocast("cpu", enabled=False)
    norms = []
    for _ in range(3):
        result = ddp_train.train_step(model, batches, optimizer, autocast, args, CPU)
        norms.append(result["grad_norm"].item())
        assert not result["loss"].requires_grad  # it would keep all that led to it
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-3)
    assert not torch.equal(first, model.head.weight)


@pytest.mark.filterwarnings("error")
def test_weights_of_any_kind_are_compared_without_a_warning(alone):
    """Integers, too, as in a frozen layer of 8 bits."""
    model = nn.Linear(1, 1)
    model.frozen = nn.Parameter(torch.arange(3), requires_grad=False)
    ddp_train.check_together([{"grad_norm": 1.0}], model)


def test_losses_of_a_step_are_added_up_in_fp32(alone, monkeypatch):
    """In bf16, 256 + 1 is 256."""

    def loss_of(model, batch):
        return (0 * model.weight.sum() + batch).bfloat16()

    monkeypatch.setattr(ddp_train, "compute_loss", loss_of)
    model = nn.Linear(1, 1)
    rest = torch.optim.SGD(model.parameters()), torch.autocast("cpu", enabled=False)
    batches = iter(torch.tensor([256.0, 1.0]))
    result = ddp_train.train_step(model, batches, *rest, parse("--accum", 2), CPU)
    assert result["loss"].item() == 257 / 2


# ---- Evaluation ----------------------------------------------------------------------
@processes
@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_is_the_same_on_any_number_of_ranks_and_as_saved(size):
    """Nine numbers in batches of two, then one: some ranks have none. All ranks use the
    running means that rank 0 saves. A buffer that is not saved may have any size."""

    def score(model, batch):
        low = {"low": -len(batch), "zero": 0.0}
        return mean_of(model, batch) | low

    def evaluate():
        with ddp_train.distributed("cpu") as device:
            model = nn.BatchNorm1d(2, eps=0)
            # Some buffers are not contiguous. NCCL and gloo cannot send them.
            model.running_mean = torch.full((4,), 100.0 * dist.get_rank())[::2]
            mask = torch.ones(9 - dist.get_rank())
            model.register_buffer("mask", mask, persistent=False)
            means = []
            for numbers in (2 ** torch.arange(9.0).view(9, 1), torch.ones(1, 1)):
                numbers = numbers.repeat(1, 2) / 2
                samples = range(dist.get_rank(), len(numbers), size)
                loader = DataLoader(numbers, 2, sampler=samples)
                means.append(ddp_train.evaluate(model, score, loader, device))
            return means

    for nine, one in in_ranks(size, evaluate):
        assert nine == pytest.approx({"mean": 511 / 9, "low": -1, "zero": 0})
        assert one == pytest.approx({"mean": 1, "low": -1, "zero": 0})


@processes
def test_rank_may_have_no_batch_to_evaluate_though_ddp_would_send_buffers(tiny):
    """So the model itself is evaluated: there are three samples for four ranks."""

    def with_buffer(args):
        model = build_model(args)
        model.register_buffer("mask", torch.ones(1))
        return model

    build_model = ddp_train.build_model
    patch = functools.partial(setattr, ddp_train, "build_model", with_buffer)
    options = [*tiny, "--max_steps", 1, "--timeout", 10]
    for _ in range(2):  # launched again, it only evaluates
        assert "val_loss" in train(4, *options, patch=patch)[0]


def test_what_rank_0_says_goes_to_the_standard_output(alone, capfd):
    ddp_train.say("said")
    assert capfd.readouterr().out == "said\n"


def test_modes_come_back_after_an_evaluation(alone):
    """Inside: eval mode and no gradients. A frozen layer stays in eval mode. Sums are
    exact: in fp32, 2**24 + 1 is 2**24."""

    def check(model, batch):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        return {"mean": batch, "count": 1}

    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(1).eval())
    batches = torch.tensor([2.0**24, 1, 1])
    means = ddp_train.evaluate(model, check, batches, CPU)
    assert means == {"mean": (2**24 + 2) / 3}
    assert [module.training for module in model.modules()] == [True, True, False]


@processes
def test_run_without_a_held_out_set_trains_to_its_end(tiny, out):
    """Started again, too. No evaluation is logged. A step may take the whole set."""

    def no_held_out_set():
        bytes_of_samples = torch.zeros(8, 32, dtype=torch.uint8)
        train_set = ddp_train.TensorDataset(bytes_of_samples, bytes_of_samples)
        ddp_train.load_data = lambda args: (train_set, [], "all")

    for size, last in ((2, "done: step 2"), (1, "nothing left")):
        said = train(size, *tiny, "--max_steps", 2, patch=no_held_out_set)[0]
        assert said.splitlines()[-1].startswith(last)
        assert not re.search(r"\nstep \d+\n", said)  # an evaluation without a number
    assert "val_loss" not in (out / "metrics.jsonl").read_text()


def refuses(*texts):
    """The block must end with sys.exit() and one line that has all these texts."""
    pattern = ".*".join(re.escape(str(text)) for text in texts)
    return pytest.raises(SystemExit, match=f"(?s)^[^\n]*{pattern}[^\n]*$")


def reasons(texts):
    """Why each rank has ended: its last line. There is no traceback."""
    for rank, text in enumerate(texts):
        assert text.splitlines()[-1].startswith(f"error: rank {rank}: ")
        assert "Traceback" not in text
    return [text.splitlines()[-1] for text in texts]


# ---- Stop, kill, resume --------------------------------------------------------------
# What a resumed run may do wrong, in 30 steps on one rank, and in 14 on two.
HARD = "--batch_size 2 --accum 2 --epochs 2 --dropout 0.1".split()
HARD += "--save_every 3 --eval_every 5".split()


@pytest.fixture(scope="session")
def untouched(tmp_path_factory):
    """A folder with runs that nobody stopped: 1 on one rank, 2 on two ranks."""
    folder = tmp_path_factory.mktemp("untouched")
    (folder / "data").write_bytes(DATA)
    options = [*TINY, *HARD, "--data", folder / "data", "--out"]
    for size in (1, 2):
        train(size, *options, folder / str(size))
    return folder


INTERRUPTIONS = [  # (fault, exit code of each rank, step of the file that is left)
    ("train_step 4 SIGUSR2 0", [140], 4),
    ("train_step 10 SIGINT 1", [130, 130], 10),  # its evaluation is made up for
    ("evaluate 2 SIGHUP 1", [129, 129], 6),
    ("os.replace 2 SIGUSR1 0", [138], 6),
    ("train_step 14 SIGTERM 1", [143, 143], 14),
    ("train_step 18 SIGKILL 0", [-9], 15),
    ("train_step 12 SIGKILL 1", [1, -9], 10),
    ("evaluate 4 SIGKILL 1", [1, -9], 14),
]


@processes
@pytest.mark.parametrize("fault, codes, step", INTERRUPTIONS)
def test_resumed_run_has_the_same_bits(tiny, out, untouched, fault, codes, step):
    size = len(codes)
    ranks = start_training(size, *tiny, *HARD, fault=fault)
    for rank, code in zip(ranks, codes, strict=True):
        rank.end(code)
    assert load(out)["step"] == step
    assert f"\nfrom step {step} to " in train(size, *tiny, *HARD)[0]
    assert_same_run(untouched / str(size), out)


@processes
def test_resumed_on_other_numbers_of_ranks_the_run_is_the_same(tiny, data, out):
    """With the same global batch. The same losses show the same samples: all differ."""
    data.write_bytes(random.Random(0).randbytes(2144))  # 64 samples: 5 steps of 12
    options = [*tiny, "--epochs", 2, "--batch_size"]
    train(1, *options, 12, "--out", out / "whole")
    for size, fault, code in (
        (3, "train_step 2 SIGTERM 2", 143),
        (3, "train_step 2 SIGTERM 0", 143),
        (2, "train_step 1 SIGTERM 1", 143),
        (1, "train_step 2 SIGTERM 0", 143),
        (2, "", 0),
    ):
        train(size, *options, 12 // size, fault=fault, code=code)
    for name in ("loss", "grad_norm", "lr"):
        expected = metrics(out / "whole", name)
        assert len(expected) == 10
        assert metrics(out, name) == pytest.approx(expected, rel=1e-6)
    for name, weight in load(out / "whole")["model"].items():
        assert (load(out)["model"][name] - weight).abs().max() < 1e-6


@processes
def test_three_ranks_have_the_same_bits_if_ddp_looks_for_unused_parameters(tiny, out):
    """Otherwise it lays out its buckets anew after a resume, and rounds another way."""
    options = [*tiny, "--max_steps", 8, "--dim", 64, "--batch_size", 2, "--out"]

    def patch():
        small = {"bucket_cap_mb": 0.01, "find_unused_parameters": True}
        wrap = functools.partial(DistributedDataParallel, **small)
        ddp_train.DistributedDataParallel = wrap

    train(3, *options, out / "whole", patch=patch)
    fault = "train_step 4 SIGTERM 1"
    train(3, *options, out / "parts", patch=patch, fault=fault, code=143)
    train(3, *options, out / "parts", patch=patch)
    assert_same_run(out / "whole", out / "parts")


@processes
@pytest.mark.parametrize("batch, last_step", [(2, 48), (16, 8), (7, 16)])
def test_resumed_with_another_global_batch_the_rate_goes_on(
    tiny, out, batch, last_step
):
    """By the share of the samples that fit: 32 are done. So is the last step. Of the
    28 that are left in this epoch, four steps of 7 use all."""
    options = [*tiny, "--epochs", 2, "--batch_size"]
    train(2, *options, 4, fault="train_step 4 SIGTERM 1", code=143)
    said = train(1, *options, batch)[0]
    assert f"\nglobal_batch is {batch}, it was 8\n" in said
    assert f"\nfrom step 4 to {last_step}, {batch} samples each\n" in said
    used = 60 - 60 % batch
    for step, samples in ((5, 32), (last_step, 2 * used - batch)):
        progress = (samples + batch / 2) / (2 * used)
        rate = 0.002 * (1 + math.cos(math.pi * (progress - 0.05) / 0.95)) / 2
        assert metrics(out, "lr")[step] == pytest.approx(rate, rel=1e-6)


@processes
def test_nodes_without_a_shared_disk_go_on_from_one_newest_file(tiny, tmp_path):
    """The evaluation shows it: each of three ranks evaluates one sample."""
    most, fewer = tmp_path / "most", tmp_path / "fewer"
    train(1, *tiny, "--out", most, "--max_steps", 5)
    train(1, *tiny, "--out", fewer, "--max_steps", 3, "--lr", 0.5)
    stop = ["--max_steps", 3]
    for disks in (["nothing", "most", "fewer"], ["most", "fewer", "none"]):

        def rank(disks=disks):
            out = tmp_path / disks[int(os.environ["RANK"])]
            main(*tiny, "--batch_size", 1, "--timeout", 20, "--out", out, *stop)

        in_ranks(3, rank)
        found = metrics(tmp_path / disks[0], "val_loss")[5]
        assert found == pytest.approx(metrics(most, "val_loss")[5], rel=1e-6)

    def rank_without_a_step():
        path = tmp_path / os.environ["RANK"]
        with ddp_train.distributed("cpu"):
            if dist.get_rank() == 0:
                ddp_train.save_checkpoint(path, 0)
            return ddp_train.load_checkpoint(path)

    assert in_ranks(2, rank_without_a_step) == [{"step": 0}] * 2


@processes
def test_signal_to_all_processes_and_another_in_the_save(tiny, data, out):
    """As from Slurm. Workers get it first, and work on. The run saves, none is left."""
    data.write_bytes(DATA * 4000)  # no epoch ends: the first save is that of the stop
    options = [*tiny, "--workers", 1, "--save_every", 10**6]
    ranks = start_training(2, *options, fault="os.replace 1 SIGINT 0")
    ranks[0].wait_for("step 3 ")
    for worker in ranks[0].left:
        os.kill(worker, signal.SIGTERM)
    step = int(re.findall(r"\nstep (\d+) ", ranks[0].text)[-1])
    ranks[0].wait_for(f"step {step + 9} ")  # without the worker: two or three more
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGTERM)
    for rank in ranks:
        rank.end(143)
        rank.leaves_none()
    assert "signal 2: " in ranks[0].text
    assert f"signal 15, saved at step {load(out)['step']}\n" in ranks[0].text


@processes
@pytest.mark.parametrize(
    "name, code, step", [("SIGINT", 130, 3), ("SIGTERM", 143, 3), ("SIGHUP", 0, 5)]
)
def test_run_saves_though_nobody_reads_its_output(tiny, out, name, code, step):
    """As after Ctrl-C at `2>&1 | tee log`, and in a terminal that is closed. nohup
    ignores SIGHUP, and that stays so."""

    def close_output():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        reader, output = os.pipe() if name == "SIGINT" else pty.openpty()
        os.close(reader)
        os.dup2(output, 1)
        os.dup2(output, 2)

    fault = f"train_step 3 {name} 0"
    train(1, *tiny, "--max_steps", 5, patch=close_output, fault=fault, code=code)
    assert load(out)["step"] == len(metrics(out, "loss")) == step


@processes
def test_second_ctrl_c_ends_a_step_that_takes_too_long(tiny):
    """Without torchrun, which sends it twice."""
    [run] = start_training(1, *tiny, fault="train_step 2 hang 0")
    run.wait_for("hangs: ")
    run.send(signal.SIGINT)
    run.wait_for("signal 2: will save and stop after this step")
    run.send(signal.SIGINT)
    assert "KeyboardInterrupt" in run.end(1)


# ---- The file ------------------------------------------------------------------------
@pytest.fixture
def path(out):
    """A checkpoint of step 2, inside of a group of one."""
    out.mkdir()
    with ddp_train.distributed("cpu"):
        ddp_train.save_checkpoint(out / "checkpoint.pt", 2, x=torch.arange(5000.0))
        yield out / "checkpoint.pt"


def test_what_was_saved_comes_back(path):
    """What could not is refused at the save, and not hours later."""
    content = {"tensors": [torch.arange(5000.0), {"x": torch.tensor(7)}]}
    content["plain"] = {"a": [None, True, "x", 1.5, (2, b"x")], 3: {4, 5}, "b": {}}
    ddp_train.save_checkpoint(str(path), 3, **content)
    values = [numpy.float64(0.5), [{"best": (1, numpy.int64(3))}], Path("x"), iter([])]
    for value in [*values, (i for i in range(3))]:
        with pytest.raises((SystemExit, TypeError)):
            ddp_train.save_checkpoint(path, 4, best=value)
    saved = ddp_train.load_checkpoint(str(path))
    assert flatten(saved) == flatten({**content, "step": 3})


def test_resume_keeps_the_rate_of_a_scheduler_and_takes_all_other_new_options(path):
    """The scheduler is one more part to save. The weight decay is this launch's."""
    model = nn.Linear(1, 1)

    def build(rate, decay):
        optimizer = torch.optim.SGD(model.parameters(), rate, weight_decay=decay)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    parts = build(0.1, 0.5)
    parts["optimizer"].step()
    parts["scheduler"].step()
    states = {name: part.state_dict() for name, part in parts.items()}
    ddp_train.save_checkpoint(path, 3, epoch=1, done=4, settings={}, **states)
    parts = build(0.2, 0.7)
    assert ddp_train.resume(path, parts, {}) == (3, 1, 4)
    [group] = parts["optimizer"].param_groups
    assert (group["lr"], group["weight_decay"]) == (0.05, 0.7)
    assert parts["scheduler"].last_epoch == 1


@processes
@pytest.mark.parametrize("end, code", [(signal.SIG_IGN, 1), (signal.SIG_DFL, -25)])
def test_full_disk_or_a_kill_in_the_write_leaves_the_old_file(tiny, out, end, code):
    """No file can be longer than 20,000 bytes. That is an error, or signal 25 kills."""

    def limit_files():
        signal.signal(signal.SIGXFSZ, end)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    options = [*tiny, "--dim", 64]  # so large that torch hides the reason
    train(1, *options, "--max_steps", 2)
    before = (out / "checkpoint.pt").read_bytes()
    (said,) = train(1, *options, "--max_steps", 4, patch=limit_files, code=code)
    assert (out / "checkpoint.pt").read_bytes() == before
    if code == 1:
        line = f"cannot save, {out}/checkpoint.pt is the old one: [Errno 27] File too "
        assert line in reasons([said])[0]


def test_damaged_file_is_refused_or_harmless(path):
    """Cut off, with a hole or a flipped bit. Those between records are harmless."""
    whole = path.read_bytes()
    expected = flatten(ddp_train.load_checkpoint(path))
    refused = 0
    for seed in range(30):
        rng = random.Random(seed)
        place = rng.choice([rng.randrange(len(whole)), len(whole) - 1 - 30 * seed])
        with_flip = bytearray(whole)
        with_flip[place] ^= 1 << rng.randrange(8)
        with_hole = whole[:place] + b"\xff" * 512 + whole[place + 512 :]
        path.write_bytes(rng.choice([whole[:place], with_hole, with_flip, with_flip]))
        try:
            content = ddp_train.load_checkpoint(path)
        except SystemExit as error:
            assert re.fullmatch(f"{path} cannot be loaded: .*", str(error))
            refused += 1
        else:
            assert flatten(content) == expected, f"seed {seed}"
    assert refused > 20


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_code_in_a_file_does_not_run_and_files_of_others_are_refused(path, monkeypatch):
    """One without "step" is of another program. A new run would replace it."""
    monkeypatch.chdir(path.parent)
    for content in ({"step": 1, "model": Bomb()}, {"model": 1}, [1]):
        torch.save(content, path)
        with refuses(path, "cannot be loaded: "):
            ddp_train.load_checkpoint(path)
    assert not Path("exploded").exists()


def sgd(model, args):
    return torch.optim.SGD(model.parameters(), args.lr)


def with_bias(args):
    model = ddp_train.ByteTransformer(1, 2, 16, 32, 0)
    model.head = nn.Linear(16, 256)
    return model


CHANGED_CODE = {  # {what the line must say: (function, what takes its place)}
    "optimizer AdamW, not SGD": ("build_optimizer", sgd),
    'Missing key(s) in state_dict: "head.bias"': ("build_model", with_bias),
}


@processes
@pytest.mark.parametrize("line", CHANGED_CODE)
def test_checkpoint_of_changed_code_is_refused(tiny, out, line):
    patch = functools.partial(setattr, ddp_train, *CHANGED_CODE[line])
    train(1, *tiny, "--max_steps", 1)
    for said in train(2, *tiny, patch=patch, code=1):
        assert line in said


@processes
def test_optimizer_that_cannot_be_saved_is_refused_before_the_first_step(tiny, out):
    """Otherwise all that is trained up to the first save would be lost."""

    def shard(model, args):
        from torch.distributed.optim import ZeroRedundancyOptimizer  # it takes a second

        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    patch = functools.partial(setattr, ddp_train, "build_optimizer", shard)
    for said in train(2, *tiny, patch=patch, code=1):
        assert "has not been consolidated" in said and "step 1 " not in said


@processes
def test_new_or_removed_option_of_the_program_is_reported(tiny, out):
    def add_option():
        def add(parser):
            parser.add_argument("--extra", type=int, default=0)

        before(ddp_train, "add_model_options", add)

    train(1, *tiny, "--max_steps", 1)
    train(1, *tiny, "--max_steps", 2, patch=add_option)
    assert load(out)["settings"]["extra"] == "0"
    assert "extra is None, it was 0\n" in train(1, *tiny, "--max_steps", 3)[0]


@processes
def test_checkpoint_of_another_model_seed_or_data_is_refused(tiny, out, tmp_path):
    """In one line. Another optimizer is in test_checkpoint_of_changed_code."""
    train(1, *tiny, "--max_steps", 1)
    grown = tmp_path / "grown"
    grown.write_bytes(DATA + bytes(64))
    changes = {"layers": 2, "heads": 4, "dim": 32, "seq_len": 16}
    for name, value in {**changes, "seed": 5, "data": grown}.items():
        [line] = reasons(train(1, *tiny, f"--{name}", value, code=1))
        assert f": {out}/checkpoint.pt has {name} " in line
        assert line.endswith(": use another --out")


@processes
def test_second_run_in_the_folder_is_refused_while_the_first_lives(tiny, out):
    """Rank 0 says so. A disk without locks is used with a warning."""

    def lockf(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    options = [*tiny, "--max_steps", 2]
    [first] = start_training(1, *options, fault="train_step 2 hang 0")
    first.wait_for("hangs: ")
    line = f"error: rank 0: {out} is in use by another run\n"
    assert train(1, *options, code=1) == [line]
    assert train(2, *options, code=1)[0].endswith(line)
    first.send(signal.SIGKILL)
    first.end(-9)
    assert "\ndone: " in train(1, *options)[0]
    no_locks = functools.partial(setattr, fcntl, "lockf", lockf)
    (said,) = train(1, *options, patch=no_locks)
    assert f"warning: {out} is not locked: [Errno 37] No locks available" in said


# ---- Ranks that differ ---------------------------------------------------------------
DIFFER = {  # {what: (the function of the program that is changed, the line)}
    "an option": ("parse_args", "grad_clip is 2.0 on rank 1, but 1.0 "),
    "an option of rank 1": ("parse_args", "extra is 1 on rank 1, but None on rank 0"),
    "the device": ("init_distributed", "device is meta on rank 1, but cpu on rank 0"),
    "the data": ("load_data", "data is 60 samples, 3 held out, CRC-32 "),
    "noise in the weights": ("train_step", "the ranks differ, "),
    "a step without DDP": ("train_step", "the ranks differ, "),
    "NaN on one rank": ("compute_loss", "the ranks differ, or are not finite"),
    "NaN in the weights": ("train_step", "the ranks differ, "),
}


def changed(what, function, *args):
    """What the ranks call in place of the function."""
    rank = int(os.environ["RANK"])
    if what == "a step without DDP":  # all ranks, at a rate too low to change weights
        args[2].param_groups[0]["lr"] = 1e-9
        return function(args[0].module, *args[1:])
    result = function(*args)
    if what == "an option":
        result.grad_clip += rank
    if what == "an option of rank 1" and rank == 1:
        result.extra = 1
    if what == "the device":  # as where a driver is broken
        result = torch.device(["cpu", "meta"][rank])
    if what == "the data":
        result = *result[:2], f"{result[2]} {rank}"
    if what == "noise in the weights":
        for weight in args[0].parameters():
            weight.data += 1e-4 * rank * torch.randn_like(weight)
    if what == "NaN in the weights":  # of all ranks: the last step has made them NaN
        args[0].module.norm.weight.data.fill_(math.nan)
    if what == "NaN on one rank":
        result = result * [1, math.nan][rank]
    return result


@processes
@pytest.mark.parametrize("what", DIFFER)
def test_ranks_that_differ_end_in_one_line_and_are_not_saved(tiny, out, what):
    name, text = DIFFER[what]

    def patch():
        function = functools.partial(changed, what, getattr(ddp_train, name))
        setattr(ddp_train, name, function)

    for line in reasons(train(2, *tiny, "--save_every", 1, patch=patch, code=1)):
        assert text in line
    assert not list(out.glob("checkpoint*"))
    assert all('"loss"' not in file.read_text() for file in out.glob("metrics*"))


# ---- Failures and exits --------------------------------------------------------------
@processes
@pytest.mark.parametrize("action, code", [("raise", 1), ("exit", 0), ("hang", None)])
def test_rank_that_fails_leaves_or_hangs_ends_the_other(tiny, action, code):
    """One that hangs after --timeout. One that fails says why."""
    fault = f"train_step 2 {action} 1"
    patch = functools.partial(print, "printed, and not flushed")
    ranks = start_training(2, *tiny, "--timeout", 6, fault=fault, patch=patch)
    assert "RuntimeError: " in ranks[0].end(1)
    assert ("by peer" in ranks[0].text) == (action != "hang")
    if action != "hang":
        ranks[1].end(code)
    assert ranks[1].code == code
    assert ("RuntimeError: boom\n" in ranks[1].text) == (action == "raise")
    assert action == "hang" or "printed, and not flushed" in ranks[1].text


def hanging_clean_up(folder):
    """A failed rank's. After it fails it has 5 s, and not 30."""
    alarm = signal.alarm
    signal.alarm = lambda seconds: alarm(seconds // 6)
    try:
        with ddp_train.distributed("cpu"):
            raise RuntimeError("boom")
    finally:
        print("cleans up", flush=True)
        time.sleep(1)
        (folder / os.environ["RANK"]).touch()
        time.sleep(DEADLINE)


@processes
def test_exit_of_a_failed_rank_is_not_cut_off_but_may_not_hang(tmp_path):
    """torchrun sends SIGTERM when another rank has failed."""
    ranks = fork_ranks(2, functools.partial(hanging_clean_up, tmp_path))
    for rank in ranks:
        rank.wait_for("cleans up")
        rank.send(signal.SIGTERM)
    for rank in ranks:
        rank.end(-signal.SIGALRM)
    assert len(os.listdir(tmp_path)) == 2


@processes
def test_sys_exit_0_of_all_ranks_is_orderly(tiny):
    def leave(*args):
        sys.exit(0)

    patch = functools.partial(setattr, ddp_train, "train_step", leave)
    for text in train(2, *tiny, patch=patch):
        assert "error: " not in text


@processes
def test_ranks_leave_together_though_a_ddp_object_outlives_the_block():
    """Its end waits for threads of gloo. On one core a wrong program often hangs."""

    def rank(pause):
        if hasattr(os, "sched_setaffinity"):  # not on macOS
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        sys.setswitchinterval(DEADLINE)
        with ddp_train.distributed("cpu"):
            wrapped = ddp_train.DistributedDataParallel(torch.nn.Linear(1, 1))
            wrapped(torch.ones(1, 1)).sum().backward()
            time.sleep(pause * int(os.environ["RANK"]))
            ready = time.time()
        return ready, time.time()

    for pause in (0.2, 0, 0, 0, 0):
        times = in_ranks(4, functools.partial(rank, pause))
        ready, left = zip(*times, strict=True)
        assert max(ready) < min(left)


@processes
def test_behind_the_block_the_handlers_of_signals_are_those_from_before():
    """Ctrl-C works again. Inside, each signal is noted. A user's process lives on."""

    def rank():
        own = multiprocessing.get_context("fork").Process(target=time.sleep, args=[1])
        own.start()
        signal.signal(signal.SIGTERM, print)
        numbers = ddp_train.STOP_SIGNALS
        handlers = [signal.getsignal(number) for number in numbers]
        with ddp_train.distributed("cpu"):
            stop = ddp_train.StopSignal()
            for number in numbers:
                os.kill(os.getpid(), number)
                assert stop.requested() == number
        own.join()
        assert own.exitcode == 0
        return handlers == [signal.getsignal(number) for number in numbers]

    [alone] = fork_ranks(1, rank)
    said = alone.end()
    for number in (15, 2, 1, 10, 12):
        assert f"signal {number}: will save and stop after this step (kill -9" in said
    assert alone.value


@processes
def test_signal_while_the_group_ends_is_no_error(tiny):
    """It ends the run, which is done, without a traceback."""
    fault = "dist.destroy_process_group 1 SIGTERM 0"
    [said] = train(1, *tiny, "--max_steps", 1, fault=fault, code=-signal.SIGTERM)
    assert "\ndone: step 1" in said and "Traceback" not in said


@processes
@pytest.mark.parametrize("action, code", [("raise", 1), ("SIGKILL", -9)])
def test_no_worker_is_left_after_a_failure(tiny, action, code):
    """Before the first batch: they still import torch. `| tee` would wait for them."""
    ranks = start_training(2, *tiny, "--workers", 1, fault=f"evaluate 1 {action} 1")
    for rank, of_rank in zip(ranks, (1, code), strict=True):
        rank.end(of_rank)
        rank.leaves_none()


@processes
def test_worker_that_never_delivers_is_an_error(tiny, tmp_path):
    """After --timeout. It is not left."""
    patch = functools.partial(load_from, tmp_path, "Hangs")
    ranks = start_training(2, *tiny, "--workers", 1, "--timeout", 6, patch=patch)
    for rank in ranks:
        rank.end(1)
        rank.leaves_none()


@processes
def test_stop_under_torchrun_ends_with_0_and_main_can_be_called_again(tiny):
    """The stop takes effect at once, though neither a line nor a save is due."""
    options = [*tiny, "--log_every", 100]

    def rank():
        main(*options)
        main(*options, "--max_steps", 5)

    env = {"FAULT": "train_step 3 SIGTERM 0", "TORCHELASTIC_RUN_ID": "a run"}
    [alone] = fork_ranks(1, rank, env)
    for line in ("stopped by signal 15, saved", "from step 3 to 5, ", "done: step 5"):
        assert f"\n{line}" in alone.end()


# ---- Launchers -----------------------------------------------------------------------
@processes
def test_torchrun_names_the_rank_that_failed_first_and_its_reason(tiny):
    """It looks late, when both have failed, and its clock counts whole seconds."""
    env = {"FAULT": "train_step 3 raise 1"}
    run = launch(*torchrun(2, "--monitor-interval=4", WITH_FAULT, *tiny), env=env)
    said = run.end(1)
    run.leaves_none()
    assert "[rank1]: RuntimeError: boom\n" in said
    cause = said[said.index("Root Cause") :]
    assert re.search(r"rank +: 1 ", cause) and "RuntimeError: boom" in cause


def test_only_an_error_with_a_traceback_goes_to_the_summary_of_torchrun(
    tmp_path, monkeypatch
):
    """A user's mistake is one line: it has been printed. A process that is alone may go
    on after the error: it is not killed."""
    monkeypatch.setattr(signal, "alarm", pytest.fail)
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    for error in (SystemExit("no data"), RuntimeError("boom")):
        with pytest.raises(type(error)), ddp_train.distributed("cpu"):
            raise error
        assert file.exists() == isinstance(error, RuntimeError)


@processes
def test_torch_distributed_launch_trains_and_if_it_is_killed_ranks_save(tiny, out):
    """So they do under torchrun. The older launcher passes --local-rank, too."""
    launcher = ["-m", "torch.distributed.launch", "--nproc_per_node=2", "--master_port"]
    options = [ddp_train.__file__, *tiny, "--epochs", 9999]
    run = launch(sys.executable, *launcher, free_port(), *options)
    run.wait_for("ranks: 2, ")
    run.wait_for("step 3 ")
    run.send(signal.SIGKILL)
    run.end(-9)
    run.leaves_none()
    assert load(out)["step"] >= 3


@processes
def test_run_single_restarts_a_rank_that_was_killed(tiny, out, untouched):
    """The run ends with the bits of one that nobody killed."""
    env = {"PYTHON": sys.executable, "NPROC": "2", "MAX_RESTARTS": "1"}
    env |= {"SCRIPT": str(WITH_FAULT), "FAULT": "train_step 6 SIGKILL 1"}
    said = launch(ROOT / "run_single.sh", *tiny, *HARD, env=env).end()
    assert said.count("from step 5 to 14, ") == 1
    assert_same_run(untouched / "2", out)


@processes
def test_rank_0_says_that_it_waits():
    """As with RANK left over from another run: the others never come."""
    port = free_port()
    env = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    [rank] = fork_ranks(1, lambda: main("--device", "cpu"), env)
    rank.wait_for(f"rank 0 waits for all ranks at 127.0.0.1 {port}\n")


def test_rank_takes_the_gpu_of_its_local_rank(monkeypatch):
    """Played: there is no GPU."""
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    assert ddp_train.init_distributed("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert ddp_train.init_distributed("cpu") == CPU
    for local_rank, gpu in ((None, 0), ("0", 0), ("3", 3)):
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert ddp_train.init_distributed("auto") == torch.device("cuda", gpu)
        assert chosen.pop() == f"cuda:{gpu}"
    monkeypatch.setenv("LOCAL_RANK", "4")
    with refuses("local rank 4 needs a GPU, but torch finds 4 here"):
        ddp_train.init_distributed("cuda")


STARTED = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]


@pytest.mark.parametrize("name", STARTED)
def test_run_that_mpirun_or_srun_started_is_told_what_to_do(
    tiny, out, monkeypatch, name
):
    """Each process would train alone. One process is right, and so is torchrun."""
    monkeypatch.setenv(name, "2")
    with refuses(f"{name} is set", "use torchrun, or run_multi_node.sh"):
        main(*tiny)
    assert not out.exists()
    monkeypatch.setenv(name, "1")
    with ddp_train.distributed("cpu"):
        assert dist.get_world_size() == 1
