"""`make figures`: draw docs/same_curve.png from real runs, in about a minute.

It shows the losses of one process, and of 2 and 4 ranks that are stopped or killed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = "--device cpu --dim 64 --seq_len 64 --lr 0.001 --log_every 1 --save_every 25"
# {what: [(ranks, its fault as in harness.py, what it must say)]}
RUNS = {
    "1 rank": [(1, "", "from step 0 to 144")],
    "4 ranks, stopped by SIGTERM in step 30; then 2 ranks": [
        (4, "train_step 30 SIGTERM 3", "saved at step 30"),
        (2, "", "from step 30 to 144"),
    ],
    "2 ranks, one killed (-9) in step 115; again from step 100": [
        (2, "train_step 115 SIGKILL 1", "(SIGKILL)"),
        (2, "", "from step 100 to 144"),
    ],
}


def start(ranks, fault, says, *words):
    """Run torchrun until it exits. Its output must contain this text."""
    print(f"{ranks} ranks, until {says!r}", flush=True)
    launcher = "-m torch.distributed.run --standalone --nproc_per_node"
    command = [sys.executable, *launcher.split(), ranks, *words]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT": fault}
    settings["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([str(word) for word in command], env=settings, **output)
    if says not in done.stdout:
        sys.exit(f"{command}\n{done.stdout}\nexit code {done.returncode}")


def losses(data, starts):
    """{step: loss}, with the last loss of a repeated step."""
    out = Path(tempfile.mkdtemp(dir=data.parent))
    words = [ROOT / "tests/harness.py", *OPTIONS.split(), "--data", data, "--out", out]
    for ranks, fault, says in starts:
        start(ranks, fault, says, *words, "--batch_size", 32 // ranks)
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def main():
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        text = Path(os.__file__).parent / "pydoc_data/topics.py"
        data.write_bytes(text.read_bytes()[:105_000])
        curves = {what: losses(data, starts) for what, starts in RUNS.items()}
    one, *others = curves.values()
    assert all(other.keys() == one.keys() for other in others)
    worst = max(abs(o[s] - one[s]) / one[s] for o in others for s in one)
    figure, axes = plt.subplots(figsize=(8.5, 5.3))
    # The colors of Okabe and Ito: color-blind people can tell them apart.
    (first, *_), colors = curves, ["#009E73", "#D55E00"]
    axes.plot(one.keys(), one.values(), color="#0072B2", lw=10, alpha=0.3, label=first)
    for i, (what, color) in enumerate(zip([*curves][1:], colors)):
        steps = [*one][2 * i :: 4]  # both have dots of their own
        axes.plot(steps, [curves[what][s] for s in steps], "o", color=color, label=what)
    for step, color in zip((30, 115), colors):
        axes.axvline(step, color=color, linestyle="--")
    axes.set(xlabel="step", ylabel="training loss")
    title = "Stopped, killed, on other numbers of ranks: the same losses\n"
    text = f"(at most {worst:.1e} apart, relative to the loss)"
    axes.set_title(title + text)
    axes.legend()
    figure.savefig(ROOT / "docs/same_curve.png", dpi=110)
    print(text)


if __name__ == "__main__":
    main()
