"""`make bench`: print a table of the speed of ddp_train.py against a bare loop.

make bench                          a few minutes; with a GPU ten more
make bench ARGS=--only-gpu          only the rows that need a GPU
make bench ARGS="--program OTHER/ddp_train.py"
    compare whole processes with those of a different version

Two loops from loops.py take turns in one process, so that both see the same machine.
Each pair gives a ratio; the table has the median and the range. Compare only these
ratios: the other numbers depend on what else the machine is doing.
"""

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import loops
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ddp_train

SCRIPT = Path(ddp_train.__file__)
CORES = torch.get_num_threads()
SMALL = "--device cpu --batch_size 16".split()
FIRST = 6  # the steps before this one set things up, and do not count
GPT2 = "--layers 12 --heads 12 --dim 768 --seq_len 1024 --batch_size 32".split()


# ---- A process that measures: `bench.py worker RESULT PAIRS LOOPS options` -----------
def worker(result, pairs, names, *options):
    """Run the loops in turn. Rank 0 writes its measurements."""
    args = ddp_train.parse_args(options)
    ddp_train.say = lambda line: None
    names = names.split(",")
    found = {"saves": [], **{name: [] for name in names}}
    stamps = []

    def stamp(*_):
        if torch.cuda.is_available() and len(stamps) in (FIRST, args.max_steps - 1):
            torch.cuda.synchronize()
        stamps.append(time.perf_counter())

    def timed_save(*args, save=ddp_train.save_checkpoint, **content):
        began = time.perf_counter()
        save(*args, **content)
        found["saves"].append(time.perf_counter() - began)

    register_optimizer_step_pre_hook(stamp)
    ddp_train.save_checkpoint = timed_save
    with ddp_train.distributed(args.device) as device:
        for pair in range(int(pairs)):
            names.reverse()
            for name in names:
                args.out = f"{result}.{name}{pair}"
                stamps.clear()
                getattr(loops, name)(args, device)
                seconds = stamps[-1] - stamps[FIRST]
                found[name].append(seconds / (len(stamps) - 1 - FIRST))
                # The next loop must not start with what this one has left behind.
                gc.collect()
                torch.compiler.reset()
                if torch.cuda.is_available():
                    found["gpu"] = torch.cuda.max_memory_allocated()
                    torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            Path(result).write_text(json.dumps(found))


def measure(folder, processes, pairs, names, *options):
    """Start workers, and return what rank 0 has written."""
    result = tempfile.mktemp(dir=folder)
    run(processes, [__file__, "worker", result, pairs, names, *options])
    return json.loads(Path(result).read_text())


def run(processes, command):
    """Run a program to its end.

    Returns [(step, seconds since the start)], and the memory of its largest process.
    """
    words = [sys.executable, *map(str, command)]
    if processes > 1:
        launcher = "-m torch.distributed.run --standalone --nproc_per_node"
        words[1:1] = [*launcher.split(), str(processes)]
    # Otherwise glibc may return memory in each step and fault it in again. By chance
    # that is 0 or 2,000 page faults per step, and 5 % of the time, in either loop.
    settings = {"MALLOC_MMAP_THRESHOLD_": "33554432"}
    settings |= {"MALLOC_TRIM_THRESHOLD_": "1073741824"}
    settings |= {"OMP_NUM_THREADS": f"{max(1, CORES // processes)}", **os.environ}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    began = time.perf_counter()
    process = subprocess.Popen(words, env=settings, **pipes)
    steps, said = [], ""
    for line in process.stdout:
        said += line
        step = re.match(r"\s*step (\d+)\b.*\bloss", line)
        if step and "val_loss" not in line:
            steps.append((int(step[1]), time.perf_counter() - began))
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(words)}\n{said}exit status {status}")
    return steps, usage.ru_maxrss / 1024


# ---- The rows ------------------------------------------------------------------------
def row(what, value):
    print(f"| {what} | {value} |", flush=True)


def ratio(above, below):
    """The median of the ratios of the pairs, and their range."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    middle = statistics.median(ratios)
    return f"{middle:.3f} ({len(ratios)} pairs: {min(ratios):.3f} to {max(ratios):.3f})"


def throughput_row(folder, data, pairs, name, processes):
    options = [*SMALL, "--data", data, "--max_steps", 36]
    found = measure(folder, processes, pairs, f"bare,{name}", *options)
    rate = processes * 16 * 128 / statistics.median(found[name])
    what = f"{name}, {processes} process(es): throughput over the bare loop's"
    row(what, f"{ratio(found['bare'], found[name])}; {rate:,.0f} bytes/s")


def other_rows(folder, data):
    options = [*SMALL, "--data", data, "--max_steps", 20]
    for name in ("ours", "bare"):
        command = [__file__, "worker", folder / "memory", 1, name, *options]
        row(f"peak MiB of a process: {name}", f"{run(1, command)[1]:.0f}")

    big = "--device cpu --layers 14 --heads 12 --dim 768 --seq_len 64 --batch_size 4"
    few = folder / "few"
    few.write_bytes(data.read_bytes()[:20_000])
    options = [*big.split(), "--max_steps", 8, "--save_every", 3, "--data", few]
    saves = measure(folder, 1, 1, "ours", *options)["saves"]
    what = "seconds that a save of 100 million parameters takes"
    row(what, f"{statistics.median(saves):.1f}")


def program_rows(folder, data, other, pairs):
    """Run two programs in turn, with the same data, shape and options."""
    options = [*SMALL, "--data", data, "--max_steps", 60, "--log_every", 10, "--out"]
    for processes in (1, 2):
        speeds, starts, sizes = {}, {}, {}
        for _ in range(pairs):
            for script in (SCRIPT, other):
                words = [*options, tempfile.mkdtemp(dir=folder)]
                steps, memory = run(processes, [script, *words])
                steps = [step for step in steps if step[0] % 10 == 0]  # and not step 1
                (first, began), (last, ended) = steps[0], steps[-1]
                speed = (last - first) / (ended - began)
                speeds.setdefault(script, []).append(speed)
                starts.setdefault(script, []).append(began)
                sizes.setdefault(script, []).append(memory)
        what = f"{processes} process(es), this program over the other: "
        row(what + "steps per second", ratio(speeds[SCRIPT], speeds[other]))
        row(what + "seconds to step 10", ratio(starts[SCRIPT], starts[other]))
        row(what + "peak memory", ratio(sizes[SCRIPT], sizes[other]))


def gpu_rows(folder, pairs=3):
    """The shape of GPT-2 small, one process. At most ten minutes."""
    name = torch.cuda.get_device_name()
    data = folder / "text"
    data.write_bytes(SCRIPT.read_bytes() * 200)  # 200 batches
    for more in ("--precision bf16", "--precision bf16 --compile"):
        options = [*GPT2, *more.split(), "--data", data, "--max_steps", 40]
        # Each loop sees enough new batches: 32 x 1,024 bytes a step.
        found = measure(folder, 1, pairs, "bare,clipped,ours", *options)
        what = f"GPT-2-small shape, {more}, {name}: "
        for loop in ("bare", "clipped"):
            value = ratio(found[loop], found["ours"])
            row(what + f"throughput over that of the loop {loop}", value)
        row(what + "peak memory", f"{found['gpu'] / 1e9:.1f} GB")
        for loop in ("bare", "clipped", "ours"):
            times = [1000 * seconds for seconds in found[loop]]
            text = f"{statistics.median(times):.1f}"
            text += f" ({min(times):.1f} to {max(times):.1f})"
            row(what + f"ms a step, {loop}", text)


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
        versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
        row("measured", f"{CORES} threads, {versions}")
        row("---", "---")
        if args.program:
            other = args.program.resolve()
            program_rows(folder, data, other, args.pairs)
        elif not args.only_gpu:
            throughput_row(folder, data, args.pairs, "ours", 1)
            throughput_row(folder, data, args.pairs, "ours", 2)
            other_rows(folder, data)
        if torch.cuda.is_available() and not args.program:
            gpu_rows(folder)
        elif args.only_gpu:
            sys.exit("there is no GPU")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        main(sys.argv[1:])
