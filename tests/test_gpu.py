"""What only a GPU can show: `make test-gpu`. It prints a table at the end.

    TRY_ON_CPU=1 make test-gpu    tries the tests themselves, as far as a CPU can

Without a GPU all tests are skipped. One GPU is enough for most of them: with one rank
the program does not use DDP, but the patch `nccl` adds it, and with gloo two ranks can
share a GPU.
"""

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_train
import harness
from harness import GPUS, launch, load, metrics, torchrun

ON_CPU = bool(os.environ.get("TRY_ON_CPU"))
needs_gpu = pytest.mark.skipif(GPUS < 1, reason="a CPU cannot do this")
needs_two = pytest.mark.skipif(GPUS < 2, reason="it needs two GPUs")
no_gpu = pytest.mark.skipif(not GPUS and not ON_CPU, reason="there is no GPU")
# `make test` runs tests side by side, but these measure memory and speed.
SIDE_BY_SIDE = "PYTEST_XDIST_WORKER" in os.environ
in_turn = pytest.mark.skipif(SIDE_BY_SIDE, reason="make test-gpu runs it")
pytestmark = [pytest.mark.processes, no_gpu, in_turn]
THIS = Path(__file__).resolve()  # run as a script, it is the program with patches
STEPS = 40
ROWS = []


# ---- Patches: `python tests/test_gpu.py nccl,sync options` ---------------------------
def before_step(number, action):
    """Call action() before this step, on rank 0, in torchrun's first attempt."""
    train_step = ddp_train.train_step
    steps = iter(range(1, 10**9))

    def step(*args):
        if next(steps) == number:
            action()
        return train_step(*args)

    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not restarted and os.environ.get("RANK", "0") == "0":
        ddp_train.train_step = step


def nccl():
    """One rank, launched by torchrun, trains with DDP, and thus with NCCL."""
    train, train_step = ddp_train.train, ddp_train.train_step
    held = []

    def step(model, *others):
        if not held:
            held.append(DistributedDataParallel(model, gradient_as_bucket_view=True))
        return train_step(held[0], *others)

    def train_and_let_go(*args):
        try:
            return train(*args)
        finally:
            held.clear()  # otherwise it would keep the process group alive

    ddp_train.train_step = step
    ddp_train.train = train_and_let_go


def gloo():
    """All ranks share the first GPU, which NCCL cannot do."""
    join = dist.init_process_group
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group = lambda backend, **options: join("gloo", **options)


def batch_norm():
    class Norm(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    build_model, evaluate = ddp_train.build_model, ddp_train.evaluate

    def build(args):
        model = build_model(args)
        model.norm = Norm(args.dim)
        return model

    def evaluate_strided(model, *others):
        """NCCL cannot send a buffer that is not contiguous."""
        means = model.norm.running_mean
        model.norm.running_mean = means.repeat_interleave(2)[::2]
        return evaluate(model, *others)

    ddp_train.build_model = build
    ddp_train.evaluate = evaluate_strided


def sync():
    """In steps 3 to 18 torch raises an error where the CPU waits, except in DDP."""
    before_step(3, lambda: torch.cuda.set_sync_debug_mode("error"))
    before_step(19, lambda: torch.cuda.set_sync_debug_mode("default"))


def wrong_index():
    torch.zeros(3, device="cuda")[torch.tensor([7]).cuda()]


def tell_memory():
    most = torch.cuda.max_memory_allocated() if GPUS else 0
    print(f"GPU memory {most / 2**20:.0f} MiB", flush=True)


PATCHES = {
    "plain": lambda: None,
    "nccl": nccl,
    "gloo": gloo,
    "sync": sync,
    "batch_norm": batch_norm,
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "kernel_hangs": lambda: before_step(6, lambda: torch.cuda._sleep(10**15)),
    "index": lambda: before_step(6, wrong_index),
}


# ---- What the tests share ------------------------------------------------------------
@pytest.fixture(scope="module", autouse=True)
def table():
    """Show the GPUs, and give processes more time. At the end, print the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", harness.VISIBLE)
        patch.setattr(harness, "DEADLINE", 300)
        yield
    gpu = ask_gpus("gpu_name").splitlines()[0] if GPUS else "no GPU"
    print(f"\n| {GPUS} x {gpu}, torch {torch.__version__} | | |\n| --- | --- | --- |")
    for row in ROWS:
        print(f"| {' | '.join(row)} |")


@pytest.fixture
def seen(request):
    """seen("12 s") adds a note to the table."""
    notes = []
    began = time.monotonic()
    yield notes.append
    seconds = f"{time.monotonic() - began:.0f} s"
    ROWS.append((request.node.name.removeprefix("test_"), seconds, "; ".join(notes)))


@pytest.fixture
def options(tmp_path, out):
    data = tmp_path / "data"
    data.write_bytes(Path(ddp_train.__file__).read_bytes() * 2)
    words = "--layers 2 --heads 2 --dim 64 --seq_len 64 --batch_size 8 --log_every 1"
    words += f" --device {'cpu' if ON_CPU else 'cuda'} --max_steps {STEPS}"
    return [*words.split(), "--data", data, "--out", out]


def start(size, patches, *options, restarts=0, **env):
    """size 0: one process without torchrun."""
    command = [sys.executable]
    if size > 0:
        command = torchrun(size, f"--max_restarts={restarts}")
        # As in run_single.sh: a new attempt must not see the last one's store, and
        # NCCL's timeout kills a rank whose kernel never ends, here after 4 s.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
        env["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
    return launch(*command, THIS, patches, *options, env=env)


def gpu_memory():
    """MiB in use on the GPUs, by all processes."""
    if ON_CPU:
        return 0
    return sum(map(int, ask_gpus("memory.used").split()))


def ask_gpus(what):
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return subprocess.check_output(query, text=True).strip()


def needs_compiler(words):
    if "--compile" in words and not shutil.which("cc"):
        pytest.skip("torch.compile needs a C compiler")


# ---- Training ------------------------------------------------------------------------
@pytest.mark.parametrize("size, patch", [(0, "plain"), (1, "plain"), (1, "nccl")])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 --compile --accum 2"])
def test_train(options, out, seen, precision, size, patch):
    """The loss falls. The checkpoint is fp32, and the run resumes without a GPU."""
    needs_compiler(precision)
    options += ["--precision", *precision.split()]
    said = start(size, patch, *options, TORCH_LOGS="recompiles").end()
    losses = metrics(out, "loss")
    assert losses[STEPS] < losses[1] - 0.5
    assert {t.dtype for t in load(out)["model"].values()} == {torch.float32}
    seen(f"loss {losses[1]:.2f} to {losses[STEPS]:.2f}")
    seen(re.search("GPU memory .*", said)[0])
    seen(f"{said.count('Recompiling function')} recompilations")
    if precision == "fp32":
        options += ["--device", "cpu", "--max_steps", STEPS + 1]
        start(0, "plain", *options, CUDA_VISIBLE_DEVICES="").end()


def test_two_compiled_ranks_with_accumulation_do_not_recompile(options, seen):
    needs_compiler("--compile")
    options += ["--compile", "--accum", 2]
    run = start(2, "gloo", *options, TORCH_LOGS="recompiles")
    run.wait_for("step 5 ")
    first = run.text.count("Recompiling function")
    said = run.end()
    seen(f"{first} recompilations in the first steps")
    assert said.count("Recompiling function") == first


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16 --dropout 0.1 --accum 2"])
def test_nothing_waits_between_two_log_lines(options, precision):
    words = ["--precision", *precision.split(), "--log_every", 20, "--max_steps", 20]
    start(1, "nccl,sync", *options, *words).end()


@pytest.mark.parametrize("size, patches", [(0, ""), (1, "nccl,"), (2, "gloo,")])
def test_batch_norm_is_evaluated_as_it_is_saved(options, out, seen, size, patches):
    """If a finished run is launched again, it evaluates what was saved."""
    start(size, f"{patches}batch_norm", *options).end()
    before = metrics(out, "val_loss")[STEPS]
    start(size, f"{patches}batch_norm", *options).end()
    difference = abs(metrics(out, "val_loss")[STEPS] - before)
    seen(f"difference {difference:.1g}")
    assert difference < 1e-5


@pytest.mark.parametrize("patches", ["nccl", "nccl,deterministic"])
def test_stop_and_resume(options, out, tmp_path, seen, patches):
    """The same weights as an uninterrupted run: up to rounding, or bit for bit."""
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    options += ["--dropout", 0.1, "--max_steps", 60]
    untouched = tmp_path / "untouched"
    start(1, patches, *options, "--out", untouched, **env).end()
    fault = {"FAULT": "train_step 21 SIGTERM 0"}
    assert "stopped by signal 15" in start(1, patches, *options, **env, **fault).end()
    start(1, patches, *options, **env).end()
    a, b = load(untouched)["model"], load(out)["model"]
    difference = max((a[name] - b[name]).abs().max().item() for name in a)
    seen(f"largest difference of a weight {difference:.1g}")
    assert difference == 0 or (patches == "nccl" and difference < 0.05)


@pytest.mark.parametrize("patch", ["gloo", pytest.param("plain", marks=needs_two)])
def test_two_ranks_give_the_numbers_of_one(options, out, tmp_path, seen, patch):
    """Half the batch on each of two ranks, with gloo on one GPU, with NCCL on two."""
    one = tmp_path / "one"
    start(0, "plain", *options, "--out", one).end()
    assert "ranks: 2" in start(2, patch, *options, "--batch_size", 4).end()
    losses, others = metrics(one, "loss"), metrics(out, "loss")
    difference = max(abs(losses[step] - others[step]) for step in losses)
    seen(f"largest difference of a loss {difference:.1g}")
    assert difference < 0.02


# ---- Failures ------------------------------------------------------------------------
def test_kill_9_frees_the_gpu_and_the_workers(options, seen):
    before = gpu_memory()
    run = start(0, "plain", *options, "--workers", 4, "--max_steps", 10**6)
    run.wait_for("step 20 ")
    used = gpu_memory() - before
    run.send(signal.SIGKILL)
    began = time.monotonic()
    while gpu_memory() > before + used / 2:
        assert time.monotonic() - began < 10
    seen(f"{used} MiB free after {time.monotonic() - began:.1f} s")
    run.leaves_none()
    seen(f"no process after {time.monotonic() - began:.1f} s")


def test_rank_that_hangs_ends_the_other(options, seen):
    """It is killed 30 s after torchrun has sent it SIGTERM."""
    run = start(2, "gloo", *options, "--timeout", 5, FAULT="train_step 6 hang 1")
    run.wait_for("step 5 ")
    began = time.monotonic()
    assert "imed out" in run.end(1)
    run.leaves_none()
    seen(f"all ended after {time.monotonic() - began:.0f} s")


@pytest.mark.parametrize("size, patch", [(1, "nccl"), (2, "gloo")])
def test_rank_that_fails_ends_on_its_own(options, seen, size, patch):
    """After 30 s it would be cut off, and not run its exit hooks."""
    fault = f"train_step 6 raise {size - 1}"
    run = start(size, patch, *options, "--workers", 1, FAULT=fault)
    run.wait_for("step 5 ")
    began = time.monotonic()
    assert "boom" in run.end(1)
    run.leaves_none()
    seconds = time.monotonic() - began
    seen(f"all ended after {seconds:.0f} s")
    assert seconds < 30


def test_killed_peer_and_restart(options, seen):
    options += ["--save_every", 2]
    fault = {"FAULT": "train_step 6 SIGKILL 1"}
    check_restart(start(2, "gloo", *options, restarts=1, **fault), seen)


@needs_gpu
def test_kernel_that_does_not_end(options, seen):
    """NCCL's watchdog kills the rank, and the next attempt continues the run."""
    options += ["--timeout", 5, "--save_every", 2]
    said = check_restart(start(1, "nccl,kernel_hangs", *options, restarts=1), seen)
    seen(re.search(".*(?:atchdog|imed out).*", said)[0][:100])


def check_restart(run, seen):
    run.wait_for("step 5 ")
    began = time.monotonic()
    run.wait_for("from step 4 to .*[\\s\\S]*\nstep 5 ")
    seen(f"the next step after {time.monotonic() - began:.1f} s")
    said = run.end()
    assert "done:" in said
    return said


@needs_gpu
@pytest.mark.parametrize("patch", ["plain", "nccl"])
def test_error_on_the_gpu(options, seen, patch):
    """An index out of range: the error on the GPU makes the rank fail."""
    run = start(1, f"{patch},index", *options)
    said = run.end(1)
    assert re.search("device-side assert|out of (range|bounds)", said)
    run.leaves_none()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = harness.VISIBLE
    atexit.register(tell_memory)
    for patch in sys.argv[1].split(","):
        PATCHES[patch]()
    harness.apply_fault()
    ddp_train.main(sys.argv[2:])
