"""Speed of ddp_train.py against the bare loop: a table for the README.

make bench                                      some minutes; with a GPU ten more
OMP_NUM_THREADS=1 make bench                    for a machine that has other work
python .ci/bench.py --only-gpu                  the rows for which a GPU is needed
python .ci/bench.py --program OTHER/ddp_train.py    beside another copy of the program

The bare loop is the shortest there is: the same model, on batches in memory. The two
take turns in one process, so that both see the same machine. Each pair of them gives a
ratio; the table has the median, and the range.
"""

import argparse
import gc
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ddp_train

SCRIPT = Path(ddp_train.__file__)
CORES = os.cpu_count()
if hasattr(os, "sched_getaffinity"):
    CORES = len(os.sched_getaffinity(0))
SMALL = "--device cpu --batch-size 16".split()
FIRST = 6  # the steps before set things up, and do not count
GPT2 = "--layers 12 --heads 12 --dim 768 --seq-len 1024 --batch-size 32".split()
# Dense bf16 of the SXM boards, from NVIDIA's data sheets.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


# ---- What is compared ----------------------------------------------------------------
def bare_loop(args, world):
    """The shortest loop there is, on four batches that are in memory already."""
    model = ddp_train.build_model(args).to(world.device)
    ddp = model
    if dist.is_initialized():
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.compile:
        ddp = torch.compile(ddp)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    mixed = args.precision == "bf16"
    autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=mixed)
    train_set = ddp_train.load_data(args)[0]
    loader = ddp_train.make_loader(train_set, args.batch_size, world)
    batches = []
    for batch, _, _ in ddp_train.real_batches(loader, world.device):
        batches.append(batch)
        if len(batches) == 4:
            break
    for step in range(args.max_steps):
        with autocast:
            loss = ddp_train.compute_loss(ddp, batches[step % 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def the_program(args, world):
    ddp_train.train(args, world, ddp_train.StopSignal())


LOOPS = {"bare": bare_loop, "ours": the_program}


# ---- A process that measures: `bench.py worker RESULT PAIRS LOOPS options` -----------
def worker(result, pairs, names, *options):
    """Run the loops in turn. Rank 0 writes the seconds per step, and its memory."""
    args = ddp_train.parse_args(options)
    world = ddp_train.init_distributed(args.device)
    ddp_train.Log.say = lambda self, line: None
    stamps = []

    def stamp(*_):
        if world.device.type == "cuda" and len(stamps) in (FIRST, args.max_steps - 1):
            torch.cuda.synchronize()
        stamps.append(time.perf_counter())

    register_optimizer_step_pre_hook(stamp)
    names = names.split(",")
    seconds = {name: [] for name in names}
    with ddp_train.process_group(world):
        for pair in range(int(pairs)):
            names.reverse()
            for name in names:
                args.out = f"{result}.{name}{pair}"
                stamps.clear()
                LOOPS[name](args, world)
                counted = len(stamps) - 1 - FIRST
                seconds[name].append((stamps[-1] - stamps[FIRST]) / counted)
                forget()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if world.rank == 0:
        Path(result).write_text(json.dumps({**seconds, "memory": memory}))


def forget():
    """The next loop begins without what the last one has left."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def save_worker(result, *options):
    """Seconds of each save, and of each step without one."""
    args = ddp_train.parse_args(options)
    world = ddp_train.init_distributed(args.device)
    ddp_train.Log.say = lambda self, line: None
    saves, steps = [], []

    def timed(function, seconds):
        def wrapped(*args, **kwargs):
            began = time.perf_counter()
            value = function(*args, **kwargs)
            seconds.append(time.perf_counter() - began)
            return value

        return wrapped

    ddp_train.Checkpoint.save = timed(ddp_train.Checkpoint.save, saves)
    ddp_train.train_step = timed(ddp_train.train_step, steps)
    ddp_train.train(args, world, ddp_train.StopSignal())
    size = Path(args.out, "checkpoint.pt").stat().st_size
    answer = {"saves": saves, "steps": steps, "size": size}
    Path(result).write_text(json.dumps(answer))


def measure(folder, processes, *words, threads=CORES):
    """Start workers, and return what rank 0 has written."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={processes}"]
    result = tempfile.mktemp(dir=folder)
    kind, *others = map(str, words)
    command = [*launcher, __file__, kind, result, *others]
    # Otherwise glibc may give memory back in each step and fault it in again: by chance
    # that is 0 or 2,000 page faults a step, and 5 % of the time, in either loop.
    environment = {"MALLOC_MMAP_THRESHOLD_": f"{2**25}"}
    environment |= {"MALLOC_TRIM_THRESHOLD_": f"{2**30}"}
    environment |= {"OMP_NUM_THREADS": str(threads), **os.environ}
    run(command, environment)
    return json.loads(Path(result).read_text())


def run(command, environment=None, limit=900):
    """Run a command to its end. If it fails, show it and all that it said."""
    command = list(map(str, command))
    done = subprocess.run(
        command,
        env=environment,
        timeout=limit,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}exit code {done.returncode}")
    return done.stdout


# ---- The rows ------------------------------------------------------------------------
def row(what, value):
    print(f"| {what} | {value} |", flush=True)


def ratio(above, below):
    """The median of the ratios of the pairs, and their range."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    middle = statistics.median(ratios)
    return f"{middle:.3f} ({len(ratios)} pairs: {min(ratios):.3f} to {max(ratios):.3f})"


def throughput_rows(folder, data, pairs):
    for processes in 1, 2:
        threads = os.environ.get("OMP_NUM_THREADS", max(1, CORES // processes))
        options = [*SMALL, "--data", data, "--max-steps", "36"]
        words = ["worker", pairs, "bare,ours", *options]
        found = measure(folder, processes, *words, threads=threads)
        rate = processes * 16 * 128 / statistics.median(found["ours"])
        what = f"{processes} process(es) x {threads} thread(s): throughput over the "
        what += "bare loop's"
        row(what, f"{ratio(found['bare'], found['ours'])}; {rate:,.0f} bytes/s")


def memory_row(folder, data):
    options = [*SMALL, "--data", data, "--max-steps", "20"]
    ours = measure(folder, 1, "worker", 1, "ours", *options)["memory"]
    bare = measure(folder, 1, "worker", 1, "bare", *options)["memory"]
    what = "peak memory of a process over the bare loop's"
    row(what, f"{ours / bare:.3f} of {bare / 1024:.0f} MiB")


def start_row(folder, data):
    starts = []
    for number in range(3):
        out = folder / f"start{number}"
        options = [*SMALL, "--data", data, "--max-steps", 9, "--log-every", 1]
        starts.append(step_lines(SCRIPT, *options, "--out", out)[0][1])
    row(
        "seconds from the command to the first step", f"{statistics.median(starts):.2f}"
    )
    code = "import time; began = time.perf_counter(); import torch, torch._dynamo; "
    code += "print(time.perf_counter() - began)"
    imports = float(run([sys.executable, "-c", code]))
    row("of which `import torch, torch._dynamo`", f"{imports:.2f}")


def save_row(folder, data):
    big = "--layers 14 --heads 12 --dim 768 --seq-len 64 --batch-size 4".split()
    due = "--max-steps 6 --save-every 2".split()
    options = ["--device", "cpu", *big, *due, "--data", data]
    found = measure(folder, 1, "save_worker", *options, "--out", folder / "big")
    what = (
        f"a save of 100 million parameters ({found['size'] / 1e9:.1f} GB), waited for"
    )
    save = statistics.median(found["saves"])
    row(what, f"{save:.1f} s; a step takes {statistics.median(found['steps']):.1f} s")


def step_lines(script, *options):
    """Run a program to its end. [(step, seconds since its start)], as it prints."""
    command = [sys.executable, str(script), *map(str, options)]
    # Several threads on a busy machine wait for each other: one is comparable.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    lines = []
    said = ""
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            said += line
            step = re.match(r"\s*step (\d+)\b.*\bloss", line)
            if step and "val_loss" not in line:
                lines.append((int(step[1]), time.perf_counter() - began))
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{said}exit code {process.returncode}")
    return lines


def program_rows(folder, data, other, pairs):
    """Whole processes of two programs, in turn: the same data, shape and options."""
    options = [*SMALL, "--data", data, "--max-steps", 60, "--log-every", 10]
    starts = {"this": [], "other": []}
    steps = {"this": [], "other": []}
    for pair in range(pairs):
        for name, script in ("this", SCRIPT), ("other", other):
            out = folder / f"{name}{pair}"
            lines = step_lines(script, *options, "--out", out)
            lines = [line for line in lines if line[0] % 10 == 0]  # and not step 1
            (first_step, first), (last_step, last) = lines[0], lines[-1]
            starts[name].append(first)
            steps[name].append((last - first) / (last_step - first_step))
    row(
        "steps per second over the other program's",
        ratio(steps["other"], steps["this"]),
    )
    what = "seconds to step 10: this program, the other"
    row(what, ", ".join(f"{statistics.median(starts[name]):.2f}" for name in starts))


def gpu_rows(folder, pairs=3):
    """GPT-2-small shape. At most ten minutes."""
    name = torch.cuda.get_device_name()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    row("GPU", f"{name}, torch {torch.__version__}, NCCL {nccl}")
    data = folder / "text"
    data.write_bytes(SCRIPT.read_bytes() * 200)
    peak = next((PEAKS[word] for word in PEAKS if word in name), None)
    for more in "--precision bf16", "--precision bf16 --compile":
        options = [*GPT2, *more.split(), "--data", data, "--max-steps", "40"]
        # One NCCL rank: with DDP, as it would be in a run on several GPUs.
        launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(launched)
        found = measure(folder, 1, "worker", pairs, "bare,ours", *options)
        flops = flops_per_step() / statistics.median(found["ours"])
        use = f"; {flops / 1e12:.0f} TFLOP/s"
        if peak is not None:
            use += f", utilisation {flops / peak:.0%}"
        what = f"GPT-2-small shape, {more}: throughput over the bare loop's"
        row(what, ratio(found["bare"], found["ours"]) + use)


def flops_per_step():
    """As in PaLM, appendix B: 6 per parameter and token, and those of attention."""
    args = ddp_train.parse_args(GPT2)
    parameters = sum(p.numel() for p in ddp_train.build_model(args).parameters())
    per_token = 6 * parameters + 12 * args.layers * args.dim * args.seq_len
    return per_token * args.seq_len * args.batch_size


def machine():
    """The name of the CPU, if Linux says it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    names = re.findall(r"model name\s*: (.*)", text)
    return names[0] if names else "an unknown CPU"


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, help="another ddp_train.py")
    parser.add_argument("--only-gpu", action="store_true")
    parser.add_argument("--pairs", type=int, default=15)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data"
        library = sorted(Path(os.__file__).parent.glob("*.py"))
        data.write_bytes(b"".join(file.read_bytes() for file in library)[:1_000_000])
        little = folder / "little"
        little.write_bytes(data.read_bytes()[:20_000])
        versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
        row("measured", f"on {machine()}, {CORES} cores, {versions}")
        row("---", "---")
        if args.program:
            program_rows(folder, data, args.program.resolve(), args.pairs)
            return
        if not args.only_gpu:
            throughput_rows(folder, data, args.pairs)
            memory_row(folder, data)
            start_row(folder, data)
            save_row(folder, little)
        if torch.cuda.is_available():
            gpu_rows(folder)
        elif args.only_gpu:
            sys.exit("there is no GPU")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    elif sys.argv[1:2] == ["save_worker"]:
        save_worker(*sys.argv[2:])
    else:
        main(sys.argv[1:])
