"""Plain DDP and recipes 1 and 2 on a network of 100 Mbit/s: prints a table.

    python .ci/bench_wire.py                          240 steps
    python .ci/bench_wire.py --steps 60 --only plain  of the rows named so

It needs root on Linux with `ip` and `tc`. The two hosts are network namespaces; each
has one rank, with one thread.
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

from make_recipes import apply_recipes

CAN_LIMIT = sys.platform == "linux" and os.geteuid() == 0
CAN_LIMIT = CAN_LIMIT and bool(shutil.which("ip") and shutil.which("tc"))
DEADLINE = 600  # seconds for one run
HIGHER_LR = 0.0028  # the default times the square root of 2

# name, is the wire limited?, recipes, options
ROWS = [
    ("no limit, plain DDP", False, [], []),
    ("100 Mbit/s, plain DDP", True, [], []),
    ("recipe 1, `--compress fp16`", True, [1], ["--compress", "fp16"]),
    ("recipe 1, `--compress powersgd`", True, [1], ["--compress", "powersgd"]),
    ("recipe 2", True, [2], []),
    (f"recipe 2, `--lr {HIGHER_LR}`", True, [2], ["--lr", HIGHER_LR]),
]


def ip(line):
    subprocess.run(["ip", *line.split()], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts(limit):
    """Two network namespaces with a wire between them: 10.77.0.1 and 10.77.0.2.

    Yields their names. limit: no more than 100 Mbit/s in each direction.
    """
    names = [f"wire-{os.getpid()}-{letter}" for letter in "ab"]
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"-n {names[0]} link add wire type veth peer name wire netns {names[1]}")
        for number, name in enumerate(names, start=1):
            ip(f"-n {name} addr add 10.77.0.{number}/24 dev wire")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set wire up")
            if limit:
                tc = "tc qdisc add dev wire root tbf rate 100mbit burst 128kb"
                inside = f"ip netns exec {name} {tc} latency 50ms"
                subprocess.run(inside.split(), check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def over_wire(limit, script, folder, *options):
    """Train with one rank on each host. The folders `a` and `b` are their --out."""
    env = {**os.environ, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    env["GLOO_SOCKET_IFNAME"] = "wire"
    ranks = []
    with two_hosts(limit) as names:
        try:
            for rank, name in enumerate(names):
                command = ["ip", "netns", "exec", name, sys.executable, script]
                command += ["--device", "cpu", "--out", folder / "ab"[rank], *options]
                with open(folder / f"log.{rank}", "w") as log:
                    process = subprocess.Popen(
                        [str(word) for word in command],
                        env={**env, "RANK": str(rank)},
                        stdout=log,
                        stderr=log,
                    )
                ranks.append(process)
            codes = [process.wait(DEADLINE) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    if codes != [0, 0]:
        logs = [(folder / f"log.{rank}").read_text() for rank in (0, 1)]
        raise RuntimeError(f"exit codes {codes}: {'---- rank 1'.join(logs)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--only", default="", help="a part of the names of the rows")
    args = parser.parse_args()
    if not CAN_LIMIT:
        sys.exit("bench_wire.py needs root on Linux, with `ip` and `tc`")
    # SIGTERM ends it as Ctrl-C does: no namespace is left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A line of metrics for 16 steps: then each has one meeting of recipe 2.
    options = ["--batch-size", 16, "--max-steps", args.steps, "--log-every", 16]
    print("| | samples/s | of no limit | held-out loss | against plain DDP |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    best_speed = best_loss = None
    for name, limit, recipes, more in ROWS:
        # All rows are compared with the first.
        if best_speed is not None and args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            script = apply_recipes(folder / "script", *recipes)
            over_wire(limit, script, folder, *options, *more)
            lines = (folder / "a/metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        # The fastest 16 steps: the machine may have other work, too.
        speed = max(record.get("samples_per_s", 0) for record in records)
        loss = records[-1]["val_loss"]
        if best_speed is None:
            best_speed, best_loss = speed, loss
        row = [name, f"{speed:.0f}", f"{speed / best_speed:.2f}", f"{loss:.4f}"]
        print("|", " | ".join([*row, f"{loss / best_loss - 1:+.1%}"]), "|", flush=True)


if __name__ == "__main__":
    main()
