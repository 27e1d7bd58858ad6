"""Plain DDP and the recipes for slow networks over 100 Mbit/s: a table (root, Linux, ip and tc)."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
from test_ddp_train import two_hosts  # noqa: E402

RECIPES = (HERE / "README.md").read_text().partition("# Recipes")[2]
BLOCK = r"<summary>(\d)\. (?:(?!</details>).)*?```diff\n(.*?)```"
DIFFS = {int(n): diff for n, diff in re.findall(BLOCK, RECIPES, re.S)}

RUNS = {  # name: wire with a limit, recipes, options
    "no limit, plain DDP": (False, []),
    "100 Mbit/s, plain DDP": (True, []),
    "recipe 1, `--compress fp16`": (True, [1], "--compress", "fp16"),
    "recipe 1, `--compress powersgd`": (True, [1], "--compress", "powersgd"),
    "recipe 2": (True, [2]),
    "recipe 2, `--lr 0.0028`": (True, [2], "--lr", "0.0028"),  # the default times the root of 2
}


def git_apply(folder, diff):
    """To the files of a folder, and not to those of a repository around it."""
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent), "LC_ALL": "C"}
    git = ["git", "apply", "--verbose"]
    done = subprocess.run(git, input=diff, cwd=folder, env=env, text=True, stderr=-1)
    assert "Applied patch" in done.stderr and not done.returncode, done.stderr


def apply(folder, *numbers):
    """A copy of ddp_train.py in a new folder, with these recipes."""
    folder.mkdir()
    (script := folder / "ddp_train.py").write_text((HERE / "ddp_train.py").read_text())
    for n in numbers:
        git_apply(folder, DIFFS[n])
    return script


def metrics(out, name="loss"):
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {m["step"]: m[name] for m in lines if name in m}


def over_wire(limit, script, out, *args):
    """Train with one process on each host, one thread each. Returns the folder of rank 0."""
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    env |= {"OMP_NUM_THREADS": "1", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "wire"}
    tc = "tc qdisc add dev wire root tbf rate 100mbit burst 128kb latency 50ms"
    program = sys.executable, script, "--device", "cpu", *args, "--out"
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as (hosts, _):
        ranks = []
        for host in hosts if limit else ():
            subprocess.run([*host, *tc.split()], check=True)
        for r, host in enumerate(hosts):
            command = *host, *program, out / "ab"[r]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started = subprocess.Popen(map(str, command), env={**env, "RANK": str(r)}, **quiet)
            ranks.append(started)
        try:
            assert [p.wait(600) for p in ranks] == [0, 0]
        finally:
            for p in ranks:
                p.kill()
    return out / "a"


def main(steps=240, only=""):
    """Steps, and a part of the names of those that run (the first runs in any case)."""
    # 16 steps to a line of metrics: what happens every 16 steps is in each.
    options = ["--batch-size", 16, "--max-steps", steps, "--no-scale-lr", "--log-every", 16]
    print("| | bytes/s | of no limit | held-out loss | against plain DDP |\n" + "| --- " * 5 + "|")
    base = None
    for name, (limit, recipes, *more) in RUNS.items():
        if base and only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            script = apply(Path(folder, "recipe"), *recipes)
            out = over_wire(limit, script, Path(folder), *options, *more)
            speed = max(metrics(out, "bytes/s").values())  # the machine may have other work, too
            loss = metrics(out, "val_loss")[int(steps)]
        base = base or (speed, loss)
        row = f"{speed:,.0f}", f"{speed / base[0]:.2f}", f"{loss:.4f}", f"{loss / base[1] - 1:+.1%}"
        print("|", " | ".join((name, *row)), "|", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
