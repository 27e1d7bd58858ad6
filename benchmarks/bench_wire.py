"""Plain DDP and recipe 1 over 100 Mbit/s: prints a table. It is make bench-wire.

    python benchmarks/bench_wire.py                          240 steps
    python benchmarks/bench_wire.py --steps 60 --only plain  of the rows named so

It needs root on Linux with `ip` and `tc`. The two hosts are network namespaces; each
has one rank, with one thread. Goal: 0.95 of the samples per second, 1 % of the loss.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE / "recipes"))
from refresh import merge  # noqa: E402

LIMIT = 600  # seconds for one run

# name, is the wire limited?, recipe, options
ROWS = [
    ("no limit, plain DDP", False, "", []),
    ("100 Mbit/s, plain DDP", True, "", []),
    ("recipe 1, `--compress fp16`", True, "01", ["--compress", "fp16"]),
    ("recipe 1, `--compress powersgd`", True, "01", ["--compress", "powersgd"]),
]


def run(*words, **options):
    done = subprocess.run(words, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr}")


@contextlib.contextmanager
def two_hosts(limit):
    """Two network namespaces with a wire between them: 10.77.0.1 and 10.77.0.2.

    Yields their names. limit: no more than 100 Mbit/s in each direction.
    """
    names = [f"wire-{os.getpid()}-{letter}" for letter in "ab"]
    wire = f"-n {names[0]} link add wire type veth peer name wire netns {names[1]}"
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", *wire.split())
        for number, name in enumerate(names, start=1):
            run("ip", *f"-n {name} addr add 10.77.0.{number}/24 dev wire".split())
            run("ip", *f"-n {name} link set lo up".split())
            run("ip", *f"-n {name} link set wire up".split())
            if limit:
                tc = "tc qdisc add dev wire root tbf rate 100mbit burst 128kb"
                run(*f"ip netns exec {name} {tc} latency 50ms".split())
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def train(limit, recipe, folder, *options):
    """With one rank on each host. Returns rank 0's lines of metrics.jsonl."""
    script = folder / "ddp_train.py"
    if recipe:
        merge(folder, *(HERE / "recipes").glob(f"{recipe}_*.diff"))
    else:
        shutil.copy(HERE / "ddp_train.py", script)
    settings = "WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 "
    settings += "GLOO_SOCKET_IFNAME=wire OMP_NUM_THREADS=1"
    ranks = []
    with two_hosts(limit) as names:
        try:
            for rank, name in enumerate(names):
                words = f"ip netns exec {name} env RANK={rank} {settings}".split()
                words += [sys.executable, script, "--device", "cpu", *options]
                words += ["--out", folder / f"{rank}"]
                with open(folder / f"log.{rank}", "w") as log:
                    words = list(map(str, words))
                    ranks.append(subprocess.Popen(words, stdout=log, stderr=log))
            codes = [process.wait(LIMIT) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    if codes != [0, 0]:
        said = [(folder / f"log.{rank}").read_text() for rank in (0, 1)]
        raise RuntimeError(f"exit codes {codes}: {'---- rank 1: '.join(said)}")
    lines = (folder / "0/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--only", default="", help="a part of the names of the rows")
    args = parser.parse_args()
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("tc"):
        sys.exit("bench_wire.py needs root on Linux, with `ip` and `tc`")
    # SIGTERM ends it as Ctrl-C does: no namespace is left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = ["--batch_size", 16, "--max_steps", args.steps, "--log_every", 16]
    print("| | samples/s | of no limit | held-out loss | against plain DDP |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    best = None
    for name, limit, recipe, more in ROWS:
        if best and args.only not in name:  # all are compared with the first
            continue
        with tempfile.TemporaryDirectory() as folder:
            records = train(limit, recipe, Path(folder), *options, *more)
        # The fastest line, of 16 steps: the machine may have other work, too.
        speed = max(record.get("samples_per_s", 0) for record in records)
        loss = records[-1]["val_loss"]
        best = best or (speed, loss)
        shares = f"{speed / best[0]:.2f} | {loss:.4f} | {loss / best[1] - 1:+.1%}"
        print(f"| {name} | {speed:.0f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
