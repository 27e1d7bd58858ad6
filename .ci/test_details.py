"""More direct tests of ddp_train.py: data, whole runs in one process, log, options, ...

It uses the harness and the helpers of test_ddp_train.py, which must be importable.
"""

import contextlib
import errno
import fcntl
import functools
import io
import itertools
import math
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import time
import zlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ddp_train
from ddp_train import Checkpoint, StopSignal, World
from test_ddp_train import (
    ALONE,
    CPU,
    DRIVER,
    PYTHON,
    SAME,
    SCRIPT,
    assert_same,
    free_port,
    into_nothing,
    load,
    logged,
    make_parts,
    metrics,
    processes,
    refuses,
    result,
    run,
    run_ranks,
    seen_by,
    start,
    tiny_model,
    train,
    wait_for,
    watch,
)


# ---- In this process: what the direct tests share ------------------------------------
def main(*options, code=0):
    try:
        ddp_train.main([str(option) for option in options])
    except SystemExit as error:
        assert error.code == code
    else:
        assert code == 0


def change_loss(monkeypatch, change):
    """The loss of the i-th batch that is trained becomes change(i, loss)."""
    batches = itertools.count(1)
    original_loss = ddp_train.compute_loss

    def changed_loss(model, batch):
        loss = original_loss(model, batch)
        if torch.is_grad_enabled():
            loss = change(next(batches), loss)
        return loss

    monkeypatch.setattr(ddp_train, "compute_loss", changed_loss)


# ---- Model and data ------------------------------------------------------------------
def test_model_is_causal():
    """Other bytes from a place on change nothing that is said before it."""
    x = torch.randint(256, (3, 8))
    for training, place in itertools.product((True, False), (1, 5, 7)):
        model = tiny_model().train(training)
        other = torch.cat([x[:, :place], 255 - x[:, place:]], 1)
        changed = (model(x) - model(other)).abs().amax((0, 2))
        assert changed[:place].max() < 1e-6
        assert changed[place:].min() > 1e-4


def load_data(path):
    args = ddp_train.parse_args(["--data", str(path), "--seq-len=32"])
    return ddp_train.load_data(args)


def test_held_out_bytes_are_not_trained(tmp_path):
    """They are the last 5 % of a file, and of a folder, whose files are sorted."""
    parts = [bytes(range(89)) * 90, b"\xa1" * 100, b"\xa2" * 100, b"\xa3" * 220]
    for index in (3, 1, 0, 2):
        folder = tmp_path / "folder" / str(index)
        folder.mkdir(parents=True)
        (folder / "text").write_bytes(parts[index])
    content = b"".join(parts)
    (tmp_path / "file").write_bytes(content)
    for name in ("folder", "file"):
        train_set, val_set, _ = load_data(tmp_path / name)
        assert (len(train_set), len(val_set)) == (250, 13)
        for index, (x, y) in enumerate(train_set):
            assert bytes(x) == content[32 * index :][:32]
            assert bytes(y) == content[32 * index + 1 :][:32]
            assert max(bytes(y)) < 89
        assert bytes(val_set[:][0][:, 20]) == b"\xa1" * 3 + b"\xa2" * 3 + b"\xa3" * 7
    (tmp_path / "file").write_bytes(b"\0" * 8430)
    assert train_set[5][0].max() == 0  # the file was mapped, not read


def test_text_of_the_data_shows_one_other_byte(data, tmp_path):
    (tmp_path / "other").write_bytes(data.read_bytes()[:-1] + b"!")
    assert load_data(data)[2] == load_data(data)[2] != load_data(tmp_path / "other")[2]


@pytest.mark.parametrize("size, says", [(None, "No such"), (0, "0"), (65, "65 bytes")])
def test_data_that_are_missing_or_too_short(tmp_path, size, says):
    if size is not None:
        (tmp_path / "file").write_bytes(b"x" * size)
    with refuses(f"--data {tmp_path}/file: ", says):
        load_data(tmp_path / "file")


# ---- One step ------------------------------------------------------------------------
def test_local_gradients():
    ddp = mock.Mock()
    assert ddp_train.local_gradients(ddp, True) is ddp.no_sync.return_value
    for module, more_to_come in ((ddp, False), (tiny_model(), True)):
        with ddp_train.local_gradients(module, more_to_come):
            ddp.no_sync.assert_called_once()


# ---- Evaluation and learning rate ----------------------------------------------------
def test_other_epochs_are_said_with_the_old_and_the_new_rate(tiny, capfd):
    more = [*tiny, "--lr", 1e-2, "--warmup", 0, "--log-every", 99, "--max-steps"]
    train(*more, 31)
    train(*more, 32)
    assert "than before" not in capfd.readouterr().out
    train(*more, 33, "--epochs", 2)
    said = capfd.readouterr().out
    old_rate = 5e-3 * (1 + math.cos(math.pi * 128 / 250))
    new_rate = 5e-3 * (1 + math.cos(math.pi * 128 / 500))
    assert "other --epochs, --lr or --warmup than before:" in said
    assert f"was {old_rate:.3g} and goes on at {new_rate:.3g}" in said


# ---- The run -------------------------------------------------------------------------
@pytest.mark.parametrize("options, step", [([], 63), (["--max-steps", 4], 4)])
def test_finished_run_trains_nothing(tiny, out, capfd, options, step):
    main(*tiny, *options)
    assert f"done: step {step}, saved in" in capfd.readouterr().out
    before = (out / "checkpoint.pt").read_bytes()
    losses = [record for record in metrics(out) if "loss" in record]
    main(*tiny, *options)
    said = capfd.readouterr().out
    assert f"going on from step {step}" in said
    assert f"done: step {step}," in said
    assert (out / "checkpoint.pt").read_bytes() == before
    assert [record for record in metrics(out) if "loss" in record] == losses


def test_run_is_extended_by_steps_and_by_epochs(tiny, out):
    """Fewer than are done end it."""
    for option, number, step in (
        ("--max-steps", 4, 4),
        ("--max-steps", 3, 4),
        ("--max-steps", 6, 6),
        ("--epochs", 1, 63),
        ("--epochs", 2, 126),
        ("--epochs", 1, 126),
    ):
        train(*tiny, "--log-every", 50, option, number)
        assert load(out)["step"] == step
        assert load(out)["samples"] == 4 * step - 2 * (step // 63)


def test_what_is_logged_when(tiny, tmp_path):
    """The loss is the mean of all samples since the last line: the last step has 2, the
    others 4. What is evaluated last is the model that is saved.
    """
    train(*tiny, "--out", tmp_path / "a")
    rare = ["--log-every", 12, "--save-every", 7, "--eval-every", 11]
    train(*tiny, "--out", tmp_path / "b", *rare)
    of_samples = []
    for loss in logged(tmp_path / "a").values():
        of_samples += 4 * [loss]
    losses = logged(tmp_path / "b")
    assert set(losses) == {*range(12, 63, 12), *range(7, 64, 7), *range(11, 63, 11)}
    begin = 0
    for step, loss in losses.items():
        since = of_samples[:250][begin : 4 * step]
        assert loss == pytest.approx(sum(since) / len(since), rel=1e-9)
        begin = 4 * step
    assert list(logged(tmp_path / "b", "val_loss")) == [11, 22, 33, 44, 55, 63]
    args = ddp_train.parse_args([str(option) for option in tiny])
    model = ddp_train.build_model(args).eval()
    model.load_state_dict(load(tmp_path / "b")["model"])
    val_loss = ddp_train.compute_loss(model, ddp_train.load_data(args)[1][:]).item()
    last = metrics(tmp_path / "b")[-1]
    bits = val_loss / math.log(2)
    expected = {"step": 63, "val_loss": val_loss, "bits_per_byte": bits}
    assert last == pytest.approx(expected)


def test_samples_per_second(tiny, out, monkeypatch):
    """A step takes 50 ms here, and an evaluation, which must not count, 10 s."""
    seconds = [0.0]

    def step(index, loss):
        seconds.append(0.05)
        return loss

    def evaluate(*args):
        seconds.append(10)
        return {"val_loss": 1.0}

    def read_clock():
        return sum(seconds)

    monkeypatch.setattr(time, "perf_counter", read_clock)
    monkeypatch.setattr(ddp_train, "evaluate", evaluate)
    change_loss(monkeypatch, step)
    rare = ["--log-every", 4, "--eval-every", 3, "--save-every", 5]
    train(*tiny, *rare, "--max-steps", 12)
    expected = dict.fromkeys([3, 4, 5, 6, 8, 9, 10, 12], 80)
    assert logged(out, "samples_per_s") == pytest.approx(expected)


def test_resumed_in_mid_epoch_the_bits_are_the_same(tiny, tmp_path, monkeypatch):
    """With dropout, in the second epoch. --seed decides the order, and the weights."""
    places = []
    original = ddp_train.ResumableSampler.set_epoch

    def note_place(sampler, epoch, start=0):
        places.append((sampler.seed, epoch, start))
        original(sampler, epoch, start)

    monkeypatch.setattr(ddp_train.ResumableSampler, "set_epoch", note_place)
    more = [*tiny, "--batch-size", 16, "--dropout", 0.1, "--epochs", 2, "--out"]
    train(*more, tmp_path / "a")
    train(*more, tmp_path / "b", "--max-steps", 20)
    train(*more, tmp_path / "b")
    assert places[-1] == (0, 1, 4 * 16)
    assert_same(result(tmp_path / "a")[0], result(tmp_path / "b")[0])
    assert logged(tmp_path / "a") == logged(tmp_path / "b")
    weights = []
    for seed in (0, 1):
        out = tmp_path / str(seed)
        train(*more, out, "--max-steps", 1, "--lr", 1e-30, "--seed", seed)
        weights.append(load(out)["model"]["head.weight"])
    assert places[-1] == (1, 0, 0)
    assert not torch.equal(*weights)


@pytest.mark.parametrize("number", StopSignal.NUMBERS)
def test_stop_signal_saves_the_step(tiny, out, monkeypatch, capfd, number):
    """In the last step it stops nothing. An evaluation that was due is not lost: the
    next start makes it.
    """

    def send(index, loss):
        if index in (5, 8):
            os.kill(os.getpid(), number)
        return loss

    change_loss(monkeypatch, send)
    kill = mock.Mock()
    monkeypatch.setattr(ddp_train, "kill_loading_processes", kill)
    options = *tiny, "--max-steps", 8, "--eval-every", 5
    main(*options, code=128 + number)
    assert kill.call_count == 2  # before train() frees the loader, and at the end
    said = capfd.readouterr().out
    assert f"stopped by signal {int(number)}, saved at step 5" in said
    assert load(out)["step"] == 5
    assert logged(out, "val_loss") == {}
    main(*options)
    assert list(logged(out, "val_loss")) == [5, 8]


@pytest.mark.parametrize(
    "options, steps",
    [(["--max-steps", 3], [3]), (["--max-steps", 4, "--eval-every", 3], [3, 4])],
)
def test_killed_in_an_evaluation(tiny, out, monkeypatch, options, steps):
    """There is a checkpoint of the step before it, and the next start evaluates."""
    killed = mock.Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(ddp_train, "evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            train(*tiny, *options)
    assert load(out)["step"] == 3
    assert logged(out, "val_loss") == {}
    train(*tiny, *options)
    assert list(logged(out, "val_loss")) == steps


def test_precision_may_change_between_two_starts(tiny, out, monkeypatch):
    """Training and evaluation run in it. The weights stay in fp32."""
    seen = set()
    original_loss = ddp_train.compute_loss

    def note_loss(model, batch):
        seen.add((torch.is_grad_enabled(), model(batch[0]).dtype))
        return original_loss(model, batch)

    monkeypatch.setattr(ddp_train, "compute_loss", note_loss)
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for step, precision in enumerate(["fp32", "fp16", "bf16", "fp32", "fp16"], start=1):
        seen.clear()
        train(*tiny, "--max-steps", step, "--precision", precision, "--eval-every", 1)
        assert seen == {(True, dtypes[precision]), (False, dtypes[precision])}
        weights = load(out)["model"].values()
        assert {weight.dtype for weight in weights} == {torch.float32}


def test_fp16_skips_a_step_that_overflows_and_goes_on(tiny, out, monkeypatch):
    """The scale is halved, and that is resumed. If it falls for ever, the run ends."""

    def overflow(index, loss):
        return loss * 1e36 if index == 2 or index > 70 else loss

    change_loss(monkeypatch, overflow)
    more = [*tiny, "--precision", "fp16", "--epochs", 9, "--max-steps"]
    train(*more, 2, "--save-every", 1)
    assert logged(out, "grad_norm")[2] is None  # JSON has no infinity
    assert_same(load(out)["model"], load(out, "checkpoint.prev.pt")["model"])
    train(*more, 5)
    assert load(out)["scaler"]["scale"] == 2**15
    assert load(out)["scaler"]["_growth_tracker"] == 3
    with refuses("not finite at step", "not saved"):
        train(*more, 999)


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
@pytest.mark.parametrize("at, found", [(1, 4), (7, 8), (10, 10)])
def test_not_finite_ends_the_run_unsaved(tiny, out, monkeypatch, wrong, at, found):
    """It is noticed at the next log line, and that is before the next checkpoint."""

    def spoil(index, loss):
        if index == at and wrong == "loss":
            loss = loss * math.inf
        elif index == at:
            loss = loss + (loss * 0).sqrt()  # the slope of a root at 0 is infinite
        return loss

    change_loss(monkeypatch, spoil)
    with refuses(f"not finite at step {found}, not saved"):
        train(*tiny, "--log-every", 4, "--save-every", 5)
    assert (out / "checkpoint.pt").exists() == (at > 5)
    assert at < 5 or load(out)["step"] == 5


def test_compile_takes_ddp(tiny, monkeypatch):
    compiled = []

    def compile_nothing(module):
        compiled.append(type(module))
        return module

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setenv("RANK", "0")
    url = f"tcp://127.0.0.1:{free_port()}"
    world = ddp_train.init_distributed("cpu", url=url)
    train(*tiny, "--max-steps", 2, "--compile", world=world)
    assert compiled == [DistributedDataParallel]


def test_sync_bn_is_refused_on_the_cpu(tiny):
    with refuses("--sync-bn: "):
        train(*tiny, "--sync-bn")


def test_weights_are_those_of_a_plain_loop(tiny, data, out):
    """The order is that of torch's sampler, AdamW has warm-up, cosine and clipping."""
    options = *tiny, "--lr", 1e-2, "--warmup", 0.05, "--grad-clip", 2
    train(*options, "--max-steps", 12)
    args = ddp_train.parse_args([str(option) for option in options])
    torch.manual_seed(0)
    model = ddp_train.build_model(args)
    optimizer = torch.optim.AdamW(model.parameters())
    train_set = ddp_train.load_data(args)[0]
    sampler = DistributedSampler(train_set, 1, 0, seed=0)
    for step, (x, y) in enumerate(DataLoader(train_set, 4, sampler=sampler)):
        done = (4 * step + 2) / 250
        rate = 1e-2 * done / 0.05
        if done > 0.05:
            rate = 5e-3 * (1 + math.cos(math.pi * (done - 0.05) / 0.95))
        optimizer.param_groups[0]["lr"] = rate
        logits = model(x).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, y.flatten().long()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2)
        optimizer.step()
        optimizer.zero_grad()
        if step == 11:
            break
    weights = load(out)["model"]
    weights.pop(
        "blocks.0.query_key_value.bias"
    )  # of the keys: its gradient is rounding
    for name, weight in weights.items():
        expected = model.state_dict()[name]
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-5)


def test_compile(tiny, tmp_path, monkeypatch):
    """Numbers and names are the same. Here a compiled graph runs as it is."""
    graphs = []

    def compile_nothing(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_with = functools.partial(torch.compile, backend=compile_nothing)
    monkeypatch.setattr(torch, "compile", compile_with)
    train(*tiny, "--out", tmp_path / "a", "--max-steps", 9)
    assert graphs == []
    train(*tiny, "--out", tmp_path / "b", "--max-steps", 9, "--compile")
    assert graphs
    assert load(tmp_path / "a")["model"].keys() == load(tmp_path / "b")["model"].keys()
    assert logged(tmp_path / "b") == pytest.approx(logged(tmp_path / "a"), rel=1e-4)


# ---- Log -----------------------------------------------------------------------------
def test_log_tells_numbers_and_the_time_left(tmp_path, capfd):
    log = ddp_train.Log(0, tmp_path, 5, 100, 1000)
    log.began -= 10
    log.write(5, 100, loss=2.5)  # nothing is trained yet
    log.write(6, 200, loss=1.5, norm=math.inf)
    last = {"step": 6, "loss": 1.5, "norm": None}
    assert metrics(tmp_path) == [{"step": 5, "loss": 2.5}, last]
    said = "step 5  loss 2.5  ? left\nstep 6  loss 1.5  norm inf  0:01:20 left\n"
    assert capfd.readouterr().out == said
    with full_disk(0):
        with refuses(f"cannot write {tmp_path}/metrics.jsonl", "File too large"):
            log.write(7, 300, loss=1.5)


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    """None: it is not installed."""
    board = mock.Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    ddp_train.Log(0, tmp_path, 5, 0, 100).write(7, 4, loss=0.5)
    board.SummaryWriter.assert_called_once_with(f"{tmp_path}/tensorboard", purge_step=6)
    board.SummaryWriter().add_scalar.assert_called_once_with("loss", 0.5, 7)
    board.SummaryWriter().flush.assert_called_once_with()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    ddp_train.Log(0, tmp_path, 5, 0, 100).write(7, 4, loss=0.5)


def test_lines_wait_in_no_buffer_and_need_no_reader(monkeypatch, capfd):
    """A buffer would be lost in a kill, and fail again when the interpreter exits."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    ddp_train.say("a line")
    assert capfd.readouterr().out == "a line\n"
    reader, writer = os.pipe()
    os.close(reader)
    ddp_train.say("a line", output=writer)
    os.close(writer)


def test_name_that_is_not_utf8_is_told(capfd):
    ddp_train.say(os.fsdecode(b"/no/\xff"))
    assert capfd.readouterr().out == "/no/\\udcff\n"


# ---- Options -------------------------------------------------------------------------
MISTAKES = (
    "lr 0, lr -1, lr nan, lr inf, lr x, batch-size 0, batch-size 1.5, epochs -3, "
    "accum 0, max-steps 0, log-every 0, eval-every 0, save-every 0, timeout 0, "
    "timeout 1e15, timeout inf, spawn 0, workers -1, seq-len 0, layers 0, heads 0, "
    "dim 0, seed -1, seed 99999999999, grad-clip -1, warmup 1, warmup -0.1, dropout 1, "
    "dropout nan, device tpu9, precision fp8, init-method udp://x, no-such-option 1"
).split(", ")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_an_option(mistake, capfd):
    """One line that names the option, and exit code 2."""
    name, value = mistake.split()
    main(f"--{name}={value}", code=2)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert f"--{name}" in said.err


def test_options_that_are_allowed(capfd):
    zeros = [f"--{name}=0" for name in "dropout warmup grad-clip workers".split()]
    args = ddp_train.parse_args([*zeros, "--local_rank=0", f"--seed={2**31 - 1}"])
    assert args.seed == 2**31 - 1
    main("--help", code=0)
    assert "TF32" in capfd.readouterr().out


def test_checkpoint_of_another_run_is_refused(tiny, data, out, tmp_path):
    """And left as it is."""
    train(*tiny, "--max-steps", 2)
    before = (out / "checkpoint.pt").read_bytes()
    other = tmp_path / "other"
    other.write_bytes(data.read_bytes().replace(b"quick", b"brisk"))
    for name in "data seed layers heads dim seq-len".split():
        value = other if name == "data" else 8
        with refuses(f"has --{name} ", "use another folder"):
            train(*tiny, "--max-steps", 4, f"--{name}", value)
    with refuses("--dim", "--heads"):
        train(*tiny, "--dim", 6, "--heads", 4)
    assert (out / "checkpoint.pt").read_bytes() == before


def test_what_ranks_compare(tiny, monkeypatch):
    """Versions, the program, the data by their checksum, and options; not folders."""
    facts = {}
    monkeypatch.setattr(ddp_train, "check_alike", facts.update)
    train(*tiny, "--max-steps", 1)
    assert {zlib.crc32(SCRIPT.read_bytes()), torch.__version__} <= set(facts.values())
    assert facts["the device"] == "cpu"
    assert "CRC-32" in facts["--data"]
    options = {f"--{name.replace('_', '-')}" for name in vars(ddp_train.parse_args([]))}
    may_differ = {"--out", "--device", "--backend", "--init-method", "--timeout"}
    may_differ |= {"--workers", "--spawn", "--local-rank"}
    assert options - facts.keys() == may_differ


# ---- Processes -----------------------------------------------------------------------
STARTS = {
    "RANK=x WORLD_SIZE=2": "'x'",
    "RANK=2 WORLD_SIZE=2": "RANK is 2",
    "RANK=-1 WORLD_SIZE=2": "RANK is -1",
    "WORLD_SIZE=2": "RANK is not set",
    "RANK=0": "MASTER_ADDR",
    "BACKEND=smoke": "--backend smoke",
    "RANK=0 LOCAL_RANK=99 DEVICE=cuda": "GPU",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=TAKEN": "EADDRINUSE",
}


@pytest.mark.parametrize("variables, says", STARTS.items())
def test_start_that_is_refused(monkeypatch, variables, says):
    with socket.create_server(("0.0.0.0", 0)) as server:
        variables = variables.replace("TAKEN", str(server.getsockname()[1]))
        for variable in variables.split():
            monkeypatch.setenv(*variable.split("="))
        device = os.environ.get("DEVICE", "cpu")
        with refuses("cannot start: ", says):
            ddp_train.init_distributed(device, os.environ.get("BACKEND"))


def test_failure_when_all_have_joined_does_not_wait_for_them(monkeypatch, capfd):
    """sys.exit() might do so, as the process group is there already."""
    monkeypatch.setenv("RANK", "0")
    ended = mock.Mock(side_effect=SystemExit)
    monkeypatch.setattr(ddp_train, "barrier", mock.Mock(side_effect=RuntimeError("x")))
    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemExit):
        ddp_train.init_distributed("cpu", url=f"tcp://127.0.0.1:{free_port()}")
    ended.assert_called_once_with(1)
    assert capfd.readouterr().err == "error: rank 0 cannot start: x\n"


def test_tcp_works_under_torchrun(monkeypatch):
    """This variable of torchrun says that somebody else serves the address."""
    assert ddp_train.init_distributed("cpu") == ALONE
    assert not dist.is_initialized()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    url = f"tcp://127.0.0.1:{free_port()}"
    assert ddp_train.init_distributed("cpu", None, url, 1) == ALONE
    assert ddp_train.all_gather({"a": 1}) == [{"a": 1}]
    assert ddp_train.all_reduce_sum(2**24 + 1).item() == 2**24 + 1


def test_ctrl_c_ends_the_process_at_once_at_the_start_and_when_it_is_the_second(
    monkeypatch, capfd
):
    """But not within a second: it may be the first one again. Rank 0 says that it has
    got the first one: to save may take a while.
    """
    join = mock.Mock(side_effect=SystemExit)
    monkeypatch.setattr(ddp_train, "init_distributed", join)
    main(code=None)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    stop = StopSignal()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().out.count("Ctrl-C: it will save and stop.") == 1
    monkeypatch.setenv("RANK", "1")
    StopSignal().remember(signal.SIGINT, None)
    assert capfd.readouterr().out == ""
    signal.signal(signal.SIGINT, stop.remember)
    stop.received_at -= 2
    os.kill(os.getpid(), signal.SIGTERM)
    assert codes == []
    os.kill(os.getpid(), signal.SIGINT)
    assert codes == [130]


# ---- Batches -------------------------------------------------------------------------
def drawn(workers=1, rank=0, seed=0, epoch=0, start=0):
    """The random numbers of loading processes."""

    class Noise:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            for number in StopSignal.NUMBERS:
                assert signal.getsignal(number) == signal.SIG_IGN
            return torch.rand(1)

    loader = ddp_train.make_loader(Noise(), 2, World(rank, 2, CPU), seed, workers)
    loader.sampler.set_epoch(epoch, start)
    return torch.cat(list(loader)).flatten().tolist()


def test_loading_processes_draw_numbers_of_their_own():
    """By seed, epoch, start and rank, and the same when these come again. They ignore
    stop signals. They are forked: others could not get the class above.
    """
    default = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        numbers = drawn()
        assert drawn() == numbers
        numbers += drawn(rank=1) + drawn(seed=1) + drawn(epoch=1) + drawn(start=4)
        numbers += drawn(workers=2, epoch=2)
    finally:
        multiprocessing.set_start_method(default, force=True)
    assert len(set(numbers)) == 22


# ---- Checkpoint ----------------------------------------------------------------------
def test_out_of_memory_does_not_mean_that_a_part_does_not_fit(saved):
    large = mock.Mock()
    large.load_state_dict.side_effect = torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError):
        Checkpoint(saved, {"generator": large}).resume()


def test_disk_without_locks_is_used_with_a_warning(saved, monkeypatch, capfd):
    """As some network disks of clusters are."""
    no_locks = mock.Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented"))
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    assert Checkpoint(saved, make_parts()).resume()["step"] == 2
    assert f"warning: {saved} cannot be locked" in capfd.readouterr().out


def test_save_is_for_rank_0_alone(saved):
    checkpoint = Checkpoint(saved, {})
    checkpoint.rank = 1
    with refuses("for rank 0 alone", "if world.rank == 0"):
        checkpoint.save(step=3)
    assert load(saved)["step"] == 2


@contextlib.contextmanager
def full_disk(limit):
    """No file may get larger than so many bytes."""
    old_limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old_limit, most))


@pytest.mark.parametrize("limit", [0, 1000, 8000])
def test_full_disk_and_folder_that_cannot_be_made(saved, limit):
    """The checkpoint before stays, and no half of one."""
    checkpoint = Checkpoint(saved, make_parts())
    checkpoint.resume()
    with full_disk(limit):
        with refuses("cannot save", "earlier files are intact"):
            checkpoint.save(step=3)
    assert load(saved)["step"] == 2
    assert not (saved / "checkpoint.tmp").exists()
    with refuses(f"the folder {saved}/.lock/out: "):
        Checkpoint(saved / ".lock" / "out", {})


def damaged(content, rng):
    """A bit flipped (half of all), cut off, a hole, garbage; a third near the end."""
    near = rng.choice((len(content), len(content), 4000))
    place = len(content) - 1 - rng.randrange(near)
    with_flip = bytearray(content)
    with_flip[place] ^= 1 << rng.randrange(8)
    with_hole = content[:place] + bytes(512) + content[place + 512 :]
    others = [content[:place], with_hole, rng.randbytes(place % 3000)]
    return rng.choice([*others, with_flip, with_flip, with_flip])


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.faults)])
def test_damaged_files(saved, count):
    """Each is refused, or harmless, as a flip in the padding between records is."""
    seed = int(os.environ.get("SEED", count))
    rng = random.Random(seed)
    path = saved / "checkpoint.pt"
    whole = path.read_bytes()
    states = {2: load(saved), 1: load(saved, "checkpoint.prev.pt")}
    refused = 0
    for index in range(count):
        print(f"SEED={seed}, file {index}")
        path.write_bytes(damaged(whole, rng))
        state, _, problem = Checkpoint(saved, {}).find_intact()
        assert_same(state, states[state["step"]])
        assert ("damaged" in problem) == (state["step"] == 1)
        refused += state["step"] == 1
    assert refused > 0.7 * count


# ---- Whole runs ----------------------------------------------------------------------
@processes
@pytest.mark.faults  # the long form, to keep the suite short
def test_each_sample_once_though_the_number_of_ranks_changes(tmp_path, tiny):
    """4 ranks, then 2, then 1, which stop in the middle of the epoch."""
    read = []
    for world, batch_size, last_step in (4, 3, 5), (2, 5, 12), (1, 7, 99):
        options = *tiny, "--batch-size", batch_size, "--max-steps", last_step
        if world == 1:
            watch(tmp_path, *options)
        else:
            run_ranks(world, DRIVER, "watch", tmp_path, *options)
        for rank in seen_by(tmp_path, world):
            read += rank["read"]
    assert sorted(read) == list(range(250))


ANSWERS = """
import os, signal, time, torch
from torch.utils.data import TensorDataset
import ddp_train

def score(model, batch):
    return {"mean": batch[0].sum()}

world = ddp_train.init_distributed("cpu")
with ddp_train.process_group(world):
    stop = ddp_train.StopSignal()
    ones = torch.ones(2, dtype=torch.float64)
    print(ddp_train.all_reduce_sum(ones).tolist(), ones.tolist())
    loader = ddp_train.make_loader(TensorDataset(torch.arange(5.0)), 2, world)
    print(ddp_train.evaluate(torch.nn.Identity(), score, loader, world))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1)
    print([stop(), stop(), stop()])
"""


@processes
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_all_ranks_get_the_same_answers(debug):
    """The sum, which leaves the tensor as it was, the evaluation, and a stop signal: a
    rank that asks first waits for the others' answer.
    """
    number = int(signal.SIGUSR1)
    expected = ["[2.0, 2.0] [1.0, 1.0]", "{'mean': 2.0}", f"[0, {number}, {number}]"]
    env = {"TORCH_DISTRIBUTED_DEBUG": debug}
    for said in run_ranks(2, "-c", ANSWERS, env=env):
        assert said.splitlines() == expected


def test_rank_whose_peer_failed_at_the_very_end_fails_too(monkeypatch):
    """It has done all its work, but what it believes to be saved may not be."""
    broken = RuntimeError("gloo: closed by peer")
    ended = mock.Mock(side_effect=SystemExit(1))
    monkeypatch.setattr(ddp_train, "barrier", mock.Mock(side_effect=broken))
    monkeypatch.setattr(ddp_train, "end_at_once", ended)
    with pytest.raises(SystemExit):
        with ddp_train.process_group(ALONE):
            pass
    ended.assert_called_once_with(ALONE, broken)


@processes
def test_two_runs_into_one_folder(tiny, out):
    """The second is refused while the first lives, however the first ends."""
    first = start(PYTHON, DRIVER, "hang", 0, 3, *tiny)
    wait_for(first, "step 2 ")
    with pytest.raises(SystemExit, match="is in use by another run"):
        ddp_train.Checkpoint(out, {})
    first.kill()
    first.wait()
    ddp_train.Checkpoint(out, {})


EXITS = """
import sys, torch, ddp_train
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train():
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    stop = ddp_train.StopSignal()
    for _ in range(3):
        ddp(torch.ones(2, 4)).sum().backward()
        stop()
    sys.exit(0)

for _ in range(30):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ddp_train.process_group(ddp_train.World(0, 1, torch.device("cpu"))):
            train()
    except SystemExit:
        print("exit")
"""


@processes
def test_sys_exit_0_does_not_block():
    """Frames of train() hold DDP, which holds the group, whose thread needs the GIL."""
    assert run(PYTHON, "-c", EXITS).count("exit") == 30


@processes
@pytest.mark.parametrize("name", ["2x4", "4x2", "3x1x2"])
def test_group_leaves_no_thread(same, name):
    """A thread of gloo that is left can abort the exit of the process, or block it."""
    for rank in seen_by(same / name, SAME[name][0]):
        assert "pt_gloo_runloop" not in "".join(rank["threads"])


@processes
def test_failure_when_the_reader_of_the_output_has_gone(tiny):
    run(*into_nothing(DRIVER, "raise", 0, 20, *tiny), code=1)
