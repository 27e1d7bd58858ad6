"""Speed of ddp_train.py against the bare loop, as ratios within one run: the table of the README.

make bench          (about seven minutes on two cores; with a GPU the GPT-2-small shape, too)
"""

import contextlib
import itertools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
import ddp_train  # noqa: E402

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
PARTS = """
import time
parts, last = [], time.perf_counter()
def part(name):
    global last
    parts.append(f"{name} {time.perf_counter() - last:.2f}")
    last = time.perf_counter()
import torch, torch.distributed; part("import torch")
import ddp_train
args = ddp_train.parse_args([])
data, *_ = ddp_train.load_data(args); part("data")
import torch._dynamo; part("torch._dynamo (by optimizers)")
model = ddp_train.build_model(args)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x, y = next(iter(torch.utils.data.DataLoader(data, args.batch_size)))
ddp_train.loss_fn(model(x), y).backward()
optimizer.step(); part("the first step")
print(", ".join(parts))
"""


def bare_loop(args, world, steps):
    """The shortest loop there is, on batches that are in memory already."""
    model = ddp_train.build_model(args).to(world.device)
    ddp = torch.nn.parallel.DistributedDataParallel(model) if world.store else model
    ddp = torch.compile(ddp) if args.compile else ddp
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    loader = ddp_train.make_loader(ddp_train.load_data(args)[0], args.batch_size, world)
    batches = [b[:2] for b in itertools.islice(ddp_train.real_batches(loader, world.device), 4)]
    for i in range(steps):
        x, y = batches[i % 4]
        with torch.autocast(world.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss = ddp_train.loss_fn(ddp(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def worker(out, kind, steps, *argv):
    """Time bare_loop and ddp_train in turn; rank 0 writes seconds per step, and its peak memory."""
    steps, times, stamps = int(steps), {"bare": [], "ours": []}, []
    sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def stamp(*_):
        if len(stamps) in (5, steps - 1):
            sync()
        stamps.append(time.perf_counter())

    register_optimizer_step_pre_hook(stamp)
    args = ddp_train.parse_args(argv)
    world = ddp_train.init_distributed(args.device)
    if kind == "waited":
        save = ddp_train.Checkpoint.save
        ddp_train.Checkpoint.save = lambda self, *a, **k: (save(self, *a, **k), self.wait())
    with ddp_train.process_group(world):
        for rep in range(25 if kind == "both" else 1):
            for name in ("bare", "ours") if rep % 2 else ("ours", "bare"):
                torch._dynamo.reset()
                stamps.clear()
                folder = f"{out}/{rep}"
                args = ddp_train.parse_args([*argv, "--max-steps", str(steps), "--out", folder])
                if name == "bare" and kind in ("bare", "both"):
                    bare_loop(args, world, steps)
                elif name == "ours" and kind != "bare":
                    ddp_train.Log.say = lambda *_: None
                    ddp_train.train(args, world, ddp_train.StopSignal())
                if stamps:
                    times[name].append((stamps[-1] - stamps[5]) / (len(stamps) - 6))
                    times["steps"] = [b - a for a, b in zip(stamps, stamps[1:])]
    if world.rank == 0:
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        Path(f"{out}.json").write_text(json.dumps({**times, "rss": rss}))


def run(nproc, out, kind, steps, *argv, **env):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command = [
        sys.executable,
        *(launcher if nproc > 1 else []),
        __file__,
        "worker",
        out,
        kind,
        steps,
    ]
    subprocess.run(
        [*map(str, command), *map(str, argv)],
        check=True,
        env={**os.environ, "TMPDIR": str(Path(out).parent), **env},
        stderr=subprocess.DEVNULL if nproc > 1 else None,
    )
    return json.loads(Path(f"{out}.json").read_text())


def row(what, value):
    print(f"| {what} | {value} |", flush=True)


def spread(ratios):
    middle = statistics.median(ratios)
    return f"{middle:.3f} ({len(ratios)} pairs: {min(ratios):.3f} to {max(ratios):.3f})"


def bench(tmp):
    # Else glibc may give the end of the heap back in each step, and fault it in again: by chance
    # 0 or 2,000 page faults and 5 % of the time, in either loop.
    for name, value in ("MALLOC_MMAP_THRESHOLD_", 1 << 25), ("MALLOC_TRIM_THRESHOLD_", 1 << 30):
        os.environ.setdefault(name, str(value))
    middle = statistics.median
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = next((x.split(": ")[1] for x in info.splitlines() if x.startswith("model name")), "?")
    python = sys.version.split()[0]
    row("measured", f"on {cpu}, {CORES} cores, torch {torch.__version__}, Python {python}")
    row("---", "---")
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    (tmp / "data").write_bytes(b"".join(p.read_bytes() for p in files)[:1_000_000])
    small = "--device cpu --batch-size 16 --warmup-steps 10 --data".split() + [tmp / "data"]
    for nproc, threads in ((1, CORES), (2, max(1, CORES // 2))):
        r = run(nproc, tmp / f"{nproc}", "both", 36, *small, OMP_NUM_THREADS=str(threads))
        ratios = [b / o for b, o in zip(r["bare"], r["ours"])]
        what = f"throughput over the bare loop's, {nproc} process(es) x {threads} thread(s)"
        rate = 16 * 128 * nproc / middle(r["ours"])
        row(what, f"{spread(ratios)}; {rate:,.0f} bytes/s")
    together, apart = [], []
    for i in range(3):
        one_run = lambda n, name, i=i: run(
            n, tmp / f"{name}{i}", "ours", 50, *small, OMP_NUM_THREADS="1"
        )["ours"][0]
        one, two = one_run(1, "one"), one_run(2, "two")
        with ThreadPoolExecutor() as pool:
            neighbours = list(pool.map(one_run, (1, 1), ("left", "right")))
        together.append(one / two)
        apart.append(one / statistics.mean(neighbours))
    row("2 processes over twice one, one thread each", spread(together))
    row("2 runs that know nothing of each other, over twice one", spread(apart))
    rss = {k: run(1, tmp / f"memory-{k}", k, 20, *small)["rss"] for k in ("bare", "ours")}
    mib = f"{rss['bare'] / 1024:.0f} MiB"
    row(
        "peak memory of a process over the bare loop's", f"{rss['ours'] / rss['bare']:.3f} of {mib}"
    )
    starts = []
    for i in range(3):
        begin = time.perf_counter()
        command = [sys.executable, HERE / "ddp_train.py", "--device", "cpu", "--out", tmp / f"s{i}"]
        command += ["--log-every", "1", "--max-steps", "9"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as p:
            next(line for line in p.stdout if line.startswith("step 1/"))
            starts.append(time.perf_counter() - begin)
            p.communicate()
    parts = subprocess.run(
        [sys.executable, "-c", PARTS], cwd=HERE, check=True, capture_output=True, text=True
    ).stdout.strip()
    row("seconds from the command to the first step", f"{middle(starts):.2f}")
    row("of which", parts)
    (tmp / "little").write_bytes((tmp / "data").read_bytes()[:20_000])
    big = "--device cpu --layers 14 --heads 12 --dim 768 --seq-len 64 --batch-size 4 --log-every 1"
    big = [*big.split(), "--save-every", "4", "--data", tmp / "little"]
    for kind, words in (("waited", "waited for"), ("ours", "written while training goes on")):
        steps = run(1, tmp / kind, kind, 9, *big, OMP_NUM_THREADS=str(CORES))["steps"]
        usual = middle(steps[:3])
        cost = f"{sum(steps[3:7]) / usual - 4:.2f} steps of {usual:.2f} s"
        row(f"a save of 100 million parameters (1.2 GB), {words}", cost)
    if torch.cuda.is_available():
        gpu(tmp)


def gpu(tmp):
    name, nccl = torch.cuda.get_device_name(), torch.cuda.nccl.version()
    row("GPU", f"{name}, NCCL {nccl}")
    shape = "--layers 12 --heads 12 --dim 768 --seq-len 1024 --batch-size 32".split()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        env["MASTER_PORT"] = str(s.getsockname()[1])
    for more in ("--precision fp32", "--precision bf16", "--precision bf16 --compile"):
        r = run(1, tmp / more.replace(" ", ""), "both", 60, *shape, *more.split(), **env)
        model = ddp_train.ByteTransformer(12, 12, 768, 1024)
        n = sum(p.numel() for p in model.parameters())
        # PaLM, appendix B. Peaks: NVIDIA's data sheets, dense bf16, SXM.
        rate = (6 * n + 12 * 12 * 768 * 1024) * 32 * 1024 / statistics.median(r["ours"])
        peaks = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
        peak = next((p for k, p in peaks.items() if k in name), None)
        use = f", utilisation {rate / peak:.0%} of bf16's peak" if peak else ""
        ratios = [b / o for b, o in zip(r["bare"], r["ours"])]
        what = f"GPT-2-small shape, {more}: throughput over the bare loop's"
        row(what, f"{spread(ratios)}; {rate / 1e12:.0f} TFLOP/s{use}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
            assert not dist.is_initialized()
            bench(Path(folder))
