"""What only a GPU can show.

    make test-gpu                    all checks, one after the other, and a table
    DRY_RUN=1 make test-gpu          only the list
    CHECKS_ON_CPU=1 make test-gpu    on a CPU, as far as that goes: it tries the checks

They are ordinary tests: without a GPU they are skipped. Each has a limit of time, and
leaves no process behind. What a check has measured is printed in the table: seen(...).
"""

import atexit
import functools
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import make_recipes
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_train
from test_ddp_train import (  # noqa: F401
    STARTED,
    descendants,
    end_what_is_left,
    environment,
    fail,
    finish,
    run,
    start,
    torchrun,
    wait_for,
)

HERE = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
SCRIPT = HERE / "ddp_train.py"
ON_CPU = bool(os.environ.get("CHECKS_ON_CPU"))
SMALL = "--layers 2 --heads 2 --dim 64 --seq-len 64 --batch-size 8 --log-every 1"
STEPS = 40

pytestmark = pytest.mark.processes


# ---- What a check is -----------------------------------------------------------------
def check(gpus=1, limit=120, only_gpu=False, alone=False):
    """A decorator: the check needs so many GPUs, and ends after `limit` seconds.

    only_gpu: CHECKS_ON_CPU=1 cannot try it. alone: it measures time or memory.
    """

    def decorate(function):
        function.gpus = gpus
        function.limit = limit
        function.only_gpu = only_gpu
        function.alone = alone
        return function

    return decorate


def why_not(function):
    """Why this machine cannot run the check, or ""."""
    found = torch.cuda.device_count()
    if function.alone and os.environ.get("PYTEST_XDIST_WORKER"):
        return "it measures, and is not for a busy machine: make test-gpu"
    if ON_CPU:
        return "nothing of it works on a CPU" if function.only_gpu else ""
    if found == 0:
        return "no GPU"
    if found < function.gpus:
        return f"needs {function.gpus} GPUs, there are {found}"
    return ""


@pytest.fixture(autouse=True)
def limit(request, end_what_is_left):  # noqa: F811
    """Skip the check, or end it when its time is over."""
    reason = why_not(request.function)
    if reason:
        pytest.skip(reason)

    def time_is_over(*_):
        reason = f"it took longer than {request.function.limit} s"
        if not STARTED:
            pytest.fail(reason)
        fail(reason, STARTED[-1])

    before = signal.signal(signal.SIGALRM, time_is_over)
    signal.alarm(request.function.limit)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def seen(record_property):
    """seen("12 s"): a note for the table."""
    return functools.partial(record_property, "seen")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def options(tmp_path, out):
    """A small model, on the GPU, with 40,000 bytes of text."""
    data = tmp_path / "data"
    data.write_bytes(SCRIPT.read_bytes()[:40_000])
    device = "cpu" if ON_CPU else "cuda"
    small = [*SMALL.split(), "--device", device, "--data", str(data)]
    return [*small, "--out", str(out)]


def metrics(out, name):
    """{step: value} of metrics.jsonl, which must be JSON to the letter."""
    values = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line, parse_constant=not_json)
        if name in record:
            values[record["step"]] = record[name]
    return values


def not_json(word):
    pytest.fail(f"metrics.jsonl has the word {word}")


def load(out):
    return torch.load(out / "checkpoint.pt", "cpu", weights_only=True)


def largest_difference(a, b):
    """Between the weights of two runs."""
    one, other = load(a)["model"], load(b)["model"]
    return max((one[name] - other[name]).abs().max().item() for name in one)


def faulty(fault, *options):
    """The command that runs the program with a fault: see train_with_fault()."""
    return [__file__, fault, *options]


def one_gpu(backend="gloo"):
    """Two ranks on one GPU: gloo can do that, NCCL from 2.30 on."""
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    if not ON_CPU:
        env["CUDA_VISIBLE_DEVICES"] = "0"
    return ["--backend", backend], env


# ---- One GPU: training ---------------------------------------------------------------
PRECISIONS = ["fp32", "bf16", "fp16 --accum 2 --dropout 0.1", "bf16 --compile"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ranks", ["one process", "one NCCL rank"])
@check(limit=300)
def test_train(options, out, seen, precision, ranks):
    """The loss falls, the weights stay in fp32, metrics.jsonl is JSON."""
    if "--compile" in precision and shutil.which("cc") is None:
        pytest.skip("--compile needs a C compiler")
    launcher = [PYTHON] if ranks == "one process" else torchrun(1)
    wanted = ["--epochs", 2, "--max-steps", STEPS]
    wanted += ["--precision", *precision.split()]
    output = run(*launcher, SCRIPT, *options, *wanted)
    assert "done:" in output
    losses = metrics(out, "loss")
    assert losses[STEPS] < losses[1] - 0.5
    weights = load(out)["model"].values()
    assert {weight.dtype for weight in weights} == {torch.float32}
    seen(f"loss {losses[1]:.2f} to {losses[STEPS]:.2f}")


@check(only_gpu=True)
def test_nothing_waits_for_the_gpu_between_two_log_lines(options):
    """torch raises where it does. It does not see DDP's own waits, or collectives."""
    for precision in ("fp32", "fp16"):
        wanted = ["--precision", precision, "--max-steps", 20, "--log-every", 20]
        run(*torchrun(1), *faulty("sync", *options, *wanted))


@check(limit=300, only_gpu=True)
def test_compile_with_accumulation_and_a_ragged_tail(options, seen):
    """How often is it compiled? Each recompilation is a line of the log."""
    wanted = "--compile --accum 2 --batch-size 7 --epochs 2".split()
    env = {"TORCH_LOGS": "recompiles"}
    output = run(*torchrun(1), SCRIPT, *options, *wanted, env=env)
    seen(f"{output.count('Recompiling function')} recompilations")
    assert "recompile_limit" not in output, output


# ---- One GPU: stop and resume --------------------------------------------------------
@pytest.mark.parametrize("sums", ["in any order", "deterministic"])
@check(limit=300)
def test_stop_and_resume(options, out, tmp_path, seen, sums):
    """As if nobody had stopped it: to rounding; with deterministic sums, to the bit."""
    command = [SCRIPT, *options]
    env = {}
    if sums == "deterministic":
        command = faulty("deterministic", *options)
        env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command += ["--dropout", "0.1", "--max-steps", "100"]
    untouched = tmp_path / "untouched"
    run(PYTHON, *command, "--out", untouched, env=env)
    process = start(PYTHON, *command, env=env)
    wait_for(process, "step 20 ")
    process.send_signal(signal.SIGTERM)
    output = finish(process, 128 + signal.SIGTERM)
    assert "stopped by signal 15" in output, output
    assert "going on from step" in run(PYTHON, *command, env=env)
    difference = largest_difference(out, untouched)
    seen(f"largest difference of a weight {difference:.1g}")
    assert difference == 0 or (sums == "in any order" and difference < 0.05)


# ---- One GPU: failures ---------------------------------------------------------------
@check(limit=300)
def test_loading_processes_20_runs(options):
    """They are forked after CUDA has started. Do all runs end?"""
    runs = 2 if ON_CPU else 20
    for number in range(runs):
        wanted = ["--workers", 4, "--max-steps", 5, "--out", f"{options[-1]}{number}"]
        assert "done:" in run(PYTHON, SCRIPT, *options, *wanted)


@check(alone=True)
def test_kill_9_with_loading_processes(options, seen):
    """Within a second all processes are gone, and the memory of the GPU is free."""
    before = memory_in_use()
    process = start(PYTHON, SCRIPT, *options, "--workers", 4, "--epochs", 999)
    wait_for(process, "step 20 ")
    family = descendants(process.pid)
    assert len(family) == 4
    used = memory_in_use() - before
    process.kill()
    began = time.monotonic()
    while memory_in_use() > before + used / 2 or any(map(is_alive, family)):
        assert time.monotonic() - began < 10
        time.sleep(0.02)
    seconds = time.monotonic() - began
    seen(f"{used} MiB free after {seconds:.2f} s")
    assert seconds < 1


def memory_in_use():
    """MiB on all GPUs."""
    if ON_CPU:
        return 0
    if shutil.which("nvidia-smi") is None:
        pytest.skip("there is no nvidia-smi")
    command = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"
    return sum(map(int, subprocess.check_output(command.split(), text=True).split()))


def is_alive(pid):
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


@check(alone=True)
def test_rank_that_raises(options, seen):
    """Its traceback once; the other one ends, too, with one line."""
    backend, env = one_gpu()
    command = [*torchrun(2), *faulty("raise", *options, *backend, "--workers", 1)]
    began = time.monotonic()
    output = run(*command, code=1, env=env)
    seen(f"all ended after {time.monotonic() - began:.0f} s, with the start")
    assert output.count("RuntimeError: boom") == 1, output
    assert "error: rank 1: Traceback" in output, output


@check(alone=True)
def test_rank_that_hangs_on_the_cpu(options, seen):
    """--timeout 5: the other one misses it in gloo, and torchrun ends both."""
    backend, env = one_gpu()
    command = [*torchrun(2), *faulty("hang", *options, *backend, "--timeout", 5)]
    process = start(*command, env=env)
    wait_for(process, "step 5 ")
    began = time.monotonic()
    output = finish(process, 1)
    seconds = time.monotonic() - began
    seen(f"ended after {seconds:.0f} s")
    assert "error: rank 0:" in output and "imed out" in output, output
    assert 4 < seconds < 60


@check(limit=420, only_gpu=True, alone=True)
def test_kernel_that_does_not_end(options, seen):
    """NCCL's watchdog ends the rank; the next attempt is not aborted by what it left.

    NCCL's limit is that of the start: --timeout and two minutes.
    """
    launcher = torchrun(1, "--max-restarts=1")
    process = start(*launcher, *faulty("gpu-hang", *options, "--timeout", 5))
    wait_for(process, "step 5 ")
    began = time.monotonic()
    wait_for(process, "attempt 1 starts")
    seen(f"the next attempt started after {time.monotonic() - began:.0f} s")
    output = finish(process)
    assert "done:" in output, output
    assert "exception_dump is gone: True" in output, output
    seen("it said: " + first_line(output, "atchdog|imed out|error:"))


@check(alone=True)
def test_error_on_the_gpu(options, seen):
    """An index out of range. Who says it: our line, or NCCL's watchdog by SIGABRT?"""
    process = start(*torchrun(1), *faulty("index", *options, "--max-steps", 20))
    output = finish(process, 1)
    ours = "error: rank 0:" in output
    watchdog = "terminate called" in output or "SIGABRT" in output
    seen(f"our line: {ours}, watchdog: {watchdog}")
    seen(first_line(output, "assert|IndexError"))
    assert ours or watchdog, output
    assert re.search("device-side assert|out of (range|bounds)", output), output


def first_line(output, pattern):
    lines = [line for line in output.splitlines() if re.search(pattern, line)]
    return lines[0][:100] if lines else "nothing"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@check(limit=180)
def test_two_ranks_on_one_gpu(options, seen, backend):
    """With batch norm and --sync-bn, where a GPU is there."""
    words, env = one_gpu(backend)
    if ON_CPU and backend == "nccl":
        pytest.skip("NCCL needs a GPU")
    wanted = ["--max-steps", 10] + ([] if ON_CPU else ["--sync-bn"])
    command = [*torchrun(2), *faulty("batch-norm", *options, *words, *wanted)]
    output = run(*command, code=None, env=env)
    if "Duplicate GPU" in output:
        pytest.skip("this NCCL refuses two ranks on one GPU")
    assert "ranks: 2" in output and "done:" in output, output
    means = re.findall(r"running mean (\S+)", output)
    assert len(means) == 2, output
    assert (means[0] == means[1]) == (not ON_CPU), output  # SyncBN: all ranks alike
    seen(f"running mean {means[0]} and {means[1]}")


# ---- Two and more GPUs ---------------------------------------------------------------
@check(gpus=2, limit=300)
def test_two_gpus_give_the_numbers_of_one(options, tmp_path, seen):
    """Twice the batch on one GPU, or the batch on two: the same losses and weights."""
    one, two = tmp_path / "one", tmp_path / "two"
    run(PYTHON, SCRIPT, *options, "--batch-size", 16, "--max-steps", 20, "--out", one)
    run(*torchrun(2), SCRIPT, *options, "--max-steps", 20, "--out", two)
    losses, others = metrics(one, "loss"), metrics(two, "loss")
    difference = max(abs(losses[step] - others[step]) for step in losses)
    seen(f"largest difference of a loss {difference:.1g}")
    assert difference < 0.02


@check(gpus=2, limit=300, alone=True)
def test_killed_peer_and_restart(options, seen):
    """torchrun starts both again. How long until the next step?"""
    command = [*torchrun(2, "--max-restarts=1"), SCRIPT, *options]
    process = start(*command, "--epochs", 20, "--save-every", 10)
    wait_for(process, "step 30 ")
    ranks = [pid for pid in descendants(process.pid) if parent(pid) == process.pid]
    os.kill(ranks[-1], signal.SIGKILL)
    began = time.monotonic()
    wait_for(process, r"going on from step \d+.*[\s\S]*\nstep ")
    seen(f"next step {time.monotonic() - began:.1f} s after the kill")
    assert "done:" in finish(process)


def parent(pid):
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


@check(gpus=2, limit=120, alone=True)
def test_speed_of_the_all_reduce(seen):
    """256 MB, as DDP would send them: bytes per second of each GPU."""
    ranks = 2 if ON_CPU else torch.cuda.device_count()
    output = run(*torchrun(ranks), *faulty("all-reduce"))
    gigabytes = float(re.search(r"(\S+) GB/s", output)[1])
    seen(f"{ranks} ranks: {gigabytes:.1f} GB/s")


@check(gpus=4, limit=300)
def test_four_gpus_by_the_script(options):
    """What `make train-4gpu` starts."""
    env = {"NPROC": "4", "PYTHON": PYTHON}
    output = run(HERE / "run_single.sh", *options, "--max-steps", 20, env=env)
    assert "ranks: 4" in output and "done:" in output, output


@pytest.mark.parametrize("recipe", [None, 1, 4, 5])
@check(gpus=2, limit=300)
def test_recipes(options, tmp_path, seen, recipe):
    """Two ranks with a recipe of the README, and the memory that each needs."""
    script = SCRIPT
    if recipe is not None:
        script = make_recipes.apply_recipes(tmp_path / "copy", recipe)
    wanted = ["--dim", 64 if ON_CPU else 1024, "--max-steps", 10]
    output = run(*torchrun(2), *faulty("memory", script, *options, *wanted))
    assert "done:" in output, output
    megabytes = re.findall(r"most memory (\d+) MB", output)
    assert len(megabytes) == 2, output
    seen(f"{' and '.join(megabytes)} MB")


def run_long(*command):
    """run() has a limit of its own, which is shorter than that of the check."""
    process = start(*command, cwd=HERE)
    process.wait()
    return finish(process)


# ---- Speed ---------------------------------------------------------------------------
@check(limit=660, only_gpu=True, alone=True)
def test_bench(seen):
    """The GPU rows of `make bench`."""
    output = run_long(PYTHON, HERE / ".ci/bench.py", "--only-gpu")
    for line in output.splitlines():
        if line.startswith("| GPT-2"):
            seen(line.strip("| "))


# ---- The program with a fault: `python .ci/test_gpu.py FAULT options` ----------------
def train_with_fault(fault, *argv):
    """Run ddp_train.py; in step 6 of the first attempt, on the last rank: a fault.

    sync: not a fault, but one where the CPU waits for the GPU.
    """
    calls = 0
    original_step = ddp_train.train_step
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def step_with_fault(*args):
        nonlocal calls
        calls += 1
        world = args[-1]
        if calls == 6 and attempt == "0" and world.rank == world.size - 1:
            if fault == "raise":
                raise RuntimeError("boom")
            if fault == "hang":
                time.sleep(10**6)
            if fault == "gpu-hang":
                torch.cuda._sleep(10**15)
            if fault == "index":
                places = torch.tensor([7], device=world.device)
                torch.zeros(3, device=world.device)[places] += 1
        if fault == "sync":
            # The first steps set things up, and the last one logs.
            mode = "error" if 3 <= calls <= 18 else "default"
            torch.cuda.set_sync_debug_mode(mode)
        result = original_step(*args)
        if fault == "sync":
            torch.cuda.set_sync_debug_mode("default")
        return result

    ddp_train.train_step = step_with_fault
    if attempt != "0":
        print(f"attempt {attempt} starts", flush=True)
    ddp_train.init_distributed = tell_what_is_in_the_store
    ddp_train.main(argv)


def tell_what_is_in_the_store(*args, join=ddp_train.init_distributed):
    """NCCL's key, below all prefixes, would make this attempt abort after minutes."""
    world = join(*args)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False)
        print(f"exception_dump is gone: {not store.check(['exception_dump'])}")
    return world


def train_deterministic(*argv):
    torch.use_deterministic_algorithms(True)
    ddp_train.main(argv)


class WithBatchNorm(nn.Module):
    """(batch, time) bytes -> (batch, time, 256) logits, with a BatchNorm1d."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 256)

    def forward(self, x):
        x = self.norm(self.embed(x.long()).transpose(1, 2))
        return self.head(x.transpose(1, 2))


def train_with_batch_norm(*argv):
    """Prints the running mean of each rank, as the last step left it."""
    models = []

    def build_model(args):
        models.append(WithBatchNorm())
        return models[0]

    def evaluate(model, *args):
        norm = model.norm
        print(f"running mean {norm.running_mean.abs().sum().item():.6f}\n", flush=True)
        return {"val_loss": math.nan}

    ddp_train.build_model = build_model
    ddp_train.evaluate = evaluate
    ddp_train.main(argv)


def train_and_tell_memory(script, *argv):
    """Run a script, and say at the end how much memory of the GPU its tensors took."""

    def tell():
        most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        print(f"most memory {most / 1e6:.0f} MB\n", end="", flush=True)

    atexit.register(tell)
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")


def time_all_reduce():
    """Each GPU sends and receives 2 (n - 1) / n of the bytes: that counts."""
    world = ddp_train.init_distributed("cpu" if ON_CPU else "auto")
    with ddp_train.process_group(world):
        tensor = torch.ones(2**26, device=world.device)  # 256 MiB
        seconds = []
        for _ in range(3 if ON_CPU else 10):
            ddp_train.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()  # wait for it
            seconds.append(time.perf_counter() - began)
        sent = tensor.nbytes * 2 * (world.size - 1) / world.size
        if world.rank == 0:
            print(f"{sent / min(seconds) / 1e9:.2f} GB/s", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "deterministic":
        train_deterministic(*sys.argv[2:])
    elif sys.argv[1] == "batch-norm":
        train_with_batch_norm(*sys.argv[2:])
    elif sys.argv[1] == "memory":
        train_and_tell_memory(*sys.argv[2:])
    elif sys.argv[1] == "all-reduce":
        time_all_reduce()
    else:
        train_with_fault(*sys.argv[1:])
