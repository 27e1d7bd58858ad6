"""`make figures`: draw two pictures of real runs into docs/, in about two minutes.

same_curve.svg  the losses on 1, 2 and 4 ranks, stopped and killed, over a plain loop
one_step.svg    one step on two ranks, as torch's profiler saw it

It also prints a text alternative for each, with the numbers of this run.
"""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyBboxPatch
from torch import nn

import ddp_train

FOLDER = Path(__file__).resolve().parent.parent / "docs"
OPTIONS = "--device cpu --dim 64 --seq_len 64 --lr 0.001 --log_every 1 --save_every 25"
STOP_IN, KILL_IN = 30, 115  # steps of 144: three epochs of 48
TRACE_OPTIONS = "--device cpu --layers 6 --heads 8 --dim 512 --seq_len 64"
TRACE_OPTIONS += " --batch_size 2 --max_steps 99"
NOT_TRACED, TRACED = 3, 7  # the first steps set things up
# The colors of Okabe and Ito: color-blind people can tell them apart.
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#009E73"
COLORS = {"forward": "#56B4E9", "backward": BLUE, "clip": GREEN}
COLORS |= {"Optimizer.step": GREEN, "stop?": "#CC79A7", "gloo:all_reduce": "#E69F00"}


# ---- What a rank runs: `figures.py rank ...` or `figures.py trace ...` ---------------
def rank(number, step, *options):
    """ddp_train.py, but in this step all ranks receive this signal."""
    train_step = ddp_train.train_step
    calls = itertools.count(1)

    def with_signal(*args):
        if next(calls) == int(step):
            os.kill(os.getpid(), int(number))
        return train_step(*args)

    ddp_train.train_step = with_signal
    ddp_train.main(options)


def trace(folder, *options):
    """ddp_train.py with small buckets and the profiler. It exits after these steps."""

    def give_name(where, function, name):
        original = getattr(where, function)

        def with_name(*args, **options):
            with torch.profiler.record_function(name):
                return original(*args, **options)

        setattr(where, function, with_name)

    give_name(ddp_train, "compute_loss", "forward")
    give_name(torch.Tensor, "backward", "backward")
    give_name(nn.utils, "clip_grad_norm_", "clip")
    give_name(ddp_train.StopSignal, "requested", "stop?")
    requested = ddp_train.StopSignal.requested
    ddp = ddp_train.DistributedDataParallel
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    calls = itertools.count(1)

    def requested_after_step(self):
        answer = requested(self)
        step = next(calls)
        if step == NOT_TRACED:
            profiler.start()
        if step == NOT_TRACED + TRACED:
            profiler.stop()
            profiler.export_chrome_trace(f"{folder}/rank{os.environ['RANK']}.json")
            sys.exit(0)
        return answer

    def with_small_buckets(model, **options):
        return ddp(model, bucket_cap_mb=12, **options)

    ddp_train.StopSignal.requested = requested_after_step
    ddp_train.DistributedDataParallel = with_small_buckets
    ddp_train.main(options)


# ---- The runs ------------------------------------------------------------------------
def start(ranks, words, says):
    """Run torchrun until it exits. Its output must contain this text."""
    print(f"{ranks} ranks, until {says!r}", flush=True)
    launcher = "-m torch.distributed.run --standalone --nproc_per_node"
    command = [sys.executable, *launcher.split(), ranks, __file__, *words]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in command], env=settings, **output)
    if says not in done.stdout:
        sys.exit(f"{command}\n{done.stdout}\nexit code {done.returncode}")


def run(data, *starts):
    """Each start is (ranks, signal, the step that gets it, what the program then says).

    Returns {step: loss}, with the last loss of a repeated step, and for each start
    (ranks, first step, last step).
    """
    folder = Path(tempfile.mkdtemp(dir=data.parent))
    losses, parts, done = {}, [], 0
    for ranks, number, step, says in starts:
        words = [*OPTIONS.split(), "--data", data, "--out", folder]
        start(ranks, ["rank", number, step, *words, "--batch_size", 32 // ranks], says)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "loss" in row]
        parts.append((ranks, rows[done]["step"], rows[-1]["step"]))
        losses.update((row["step"], row["loss"]) for row in rows[done:])
        done = len(rows)
    return losses, parts


def plain_loop(data):
    """{step: loss} of one process, with only the model and the data of ddp_train.py.

    The seeds and the learning rate are written out here. A run has the same ones.
    """
    args = ddp_train.parse_args([*OPTIONS.split(), "--data", str(data)])
    train_set, _, _ = ddp_train.load_data(args)
    n = len(train_set)
    torch.set_num_threads(1)
    torch.manual_seed(zlib.crc32(b"('start', 0)"))
    model = ddp_train.build_model(args)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = {}
    for epoch in range(3):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
        for first in range(0, n - 31, 32):
            samples = [train_set[i] for i in order[first : first + 32].tolist()]
            x = torch.stack([sample[0] for sample in samples])
            y = torch.stack([sample[1] for sample in samples]).long()
            done = (len(losses) + 0.5) / (3 * (n // 32))
            rate = done / 0.05
            if done >= 0.05:
                rate = (1 + math.cos(math.pi * (done - 0.05) / 0.95)) / 2
            optimizer.param_groups[0]["lr"] = 0.001 * rate
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses[len(losses) + 1] = loss.item()
    return losses


def traced_step(data):
    """[(rank, name, begin, end, thread)] in ms, of the step with the median length."""
    folder = tempfile.mkdtemp(dir=data.parent)
    words = ["trace", folder, *TRACE_OPTIONS.split(), "--data", data, "--out", folder]
    start(2, words, "from step 0")
    steps = [[] for _ in range(TRACED)]  # for each: (rank, name, begin, end, thread)
    for rank in range(2):
        content = json.loads(Path(folder, f"rank{rank}.json").read_text())
        zero = content["baseTimeNanoseconds"] / 1e6
        spans = []
        for event in content["traceEvents"]:
            if event.get("ph") == "X" and event["name"].startswith(tuple(COLORS)):
                begin, length = event["ts"] / 1e3, event["dur"] / 1e3
                name = event["name"].partition("#")[0]
                spans.append((begin, begin + length, name, event["tid"]))
        step = -1
        for begin, end, name, thread in sorted(spans):
            step += name == "forward"
            steps[step].append((rank, name, zero + begin, zero + end, thread))

    def length(step):
        return max(span[3] for span in step) - min(span[2] for span in step)

    return sorted(steps, key=length)[TRACED // 2]


# ---- The pictures --------------------------------------------------------------------
def new_picture(height, rows, title):
    """A white panel with round corners, since the page around it may be dark."""
    figure = plt.figure(figsize=(8.5, height))
    figure.patch.set_visible(False)
    panel = FancyBboxPatch((0, 0), 8.5, height, "round,pad=-0.02,rounding_size=0.12")
    panel.set(facecolor="white", edgecolor="#BBBBBB", zorder=-1)
    panel.set_transform(figure.dpi_scale_trans)
    figure.add_artist(panel)
    figure.text(0.5, 1 - 0.31 / height, title, size=14, ha="center")
    axes = figure.subplots(len(rows), sharex=True, height_ratios=rows)
    return figure, axes


def save(figure, name, text):
    """The picture, with its text alternative in it."""
    path = FOLDER / f"{name}.svg"
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(path, metadata={"Title": text, **nothing})
    # Make it a third smaller: no indentation, and one decimal of a point is enough.
    picture = re.sub(r"\n +", "\n", path.read_text())
    path.write_text(re.sub(r"(\d\d\.\d)\d+", r"\1", picture))
    print(f"{path.name}, {path.stat().st_size / 1024:.0f} KiB: {text}")


def bar(axes, begin, end, y, height, color, text="", ink="white"):
    # With an outline in its own color, even a very short bar is visible.
    edge = "white" if text else color
    axes.barh(y, end - begin, height, begin, color=color, edgecolor=edge, lw=0.6)
    middle = (begin + end) / 2
    axes.text(middle, y, text, color=ink, ha="center", va="center_baseline")


def same_curve(data):
    plain = plain_loop(data)
    last = len(plain)
    stops, ends = f"saved at step {STOP_IN}", f"done: step {last}"
    runs = {
        BLUE: run(data, (1, 0, 0, ends)),
        GREEN: run(data, (4, signal.SIGTERM, STOP_IN, stops), (2, 0, 0, ends)),
        RED: run(data, (2, signal.SIGKILL, KILL_IN, "SIGKILL"), (2, 0, 0, ends)),
    }
    title = "Three runs and a plain loop without DDP: the same losses"
    figure, (top, middle, bottom) = new_picture(6.4, [3, 1.6, 1.6], title)
    figure.subplots_adjust(0.1, 0.09, 0.97, 0.92, hspace=0.09)
    top.plot(plain.keys(), plain.values(), color="#CCCCCC", lw=10)
    worst, line = 0, 0
    for number, (color, (losses, parts)) in enumerate(runs.items()):
        shown = list(plain)[2 * number :: 6]
        top.plot(shown, [losses[step] for step in shown], "o", color=color, ms=4.5)
        apart = [abs(losses[step] - plain[step]) / plain[step] for step in plain]
        worst = max(worst, *apart)
        x, y = [], []
        for step, height in zip(plain, apart, strict=True):  # a stem, and a gap
            if height == 0:
                continue
            x += [step + number * 0.3 - 0.3] * 2 + [math.nan]
            y += [0, height, math.nan]
        bottom.plot(x, y, color=color, lw=1.2, solid_capstyle="butt")
        before = last
        for ranks, first, end in parts:
            if first <= before:  # not a continuation: it gets its own line
                line -= 1
            label = f"{ranks} rank{'s' * (ranks > 1)} × {32 // ranks}"
            if first > 1:
                label = f"from step {first - 1}: {label}"
            bar(middle, first - 1, end, line, 0.8, color, label)
            before = end
    for axes in (top, middle, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.axvline(STOP_IN, color=GREEN, ls="--", lw=1.2, zorder=0)
        axes.axvline(KILL_IN - 1, color=RED, ls="--", lw=1.2, zorder=0)
    top.text(STOP_IN + 1, 4.6, f"stopped by SIGTERM\nin step {STOP_IN}", color=GREEN)
    note = f"all ranks killed (kill -9)\nin step {KILL_IN}"
    top.text(KILL_IN - 2, 4.6, note, color=RED, ha="right")
    note = "gray line: the plain loop;  dots: the three runs below"
    top.text((STOP_IN + KILL_IN) / 2, 3.2, note, ha="center")
    top.set_ylabel("training loss")
    middle.set(yticks=[], ylabel="ranks × samples")
    worst = f"{worst:.1e}".replace("e-0", "e-")
    bottom.axhline(1e-6, color="black", lw=1)
    bottom.text(1, 0.9e-6, "tests allow 1e-6", va="top")
    bottom.text(STOP_IN + 2, 4e-7, f"measured: at most {worst} of the loss")
    bottom.set(yticks=[0, 5e-7, 1e-6], yticklabels=["0", "5e-7", "1e-6"])
    bottom.set(ylabel="difference", xlabel="step", xlim=(-1, last + 1))
    [_, _, killed_at], [_, goes_on_with, _] = runs[RED][1]
    repeated = killed_at - goes_on_with + 1
    text = (
        f"Training losses of {last} steps of 32 samples, on a CPU. Three runs follow"
        " the curve of a plain loop without DDP: one on 1 rank; one on 4 ranks, stopped"
        f" by SIGTERM in step {STOP_IN} and resumed on 2 ranks; one on 2 ranks, killed"
        f" by kill -9 in step {KILL_IN} and started again, which repeats {repeated}"
        f" steps. They differ from the plain loop by at most {worst} of the loss; the"
        " tests allow 1e-6."
    )
    save(figure, "same_curve", text)


def one_step(data):
    spans = traced_step(data)
    zero = min(begin for _, _, begin, _, _ in spans)
    title = "One step on two ranks: gradients travel while backward is running"
    figure, axes = new_picture(4.4, [1], title)
    figure.subplots_adjust(0.1, 0.12, 0.97, 0.81)
    note = "Orange: the all-reduce of each bucket of gradients, in gloo's threads."
    note += " The rank that comes first waits.\n“stop?” is a small all-reduce, too:"
    note += " has any rank received a signal to stop?"
    figure.text(0.5, 0.84, note, ha="center", size=10)
    for rank in (1, 0):
        top = -2.7 * rank
        phases, sends, threads = {}, [], []
        for of_rank, name, begin, end, thread in spans:
            if of_rank != rank:
                continue
            begin, end = begin - zero, end - zero
            if name != "gloo:all_reduce":
                phases[name] = begin, end
                label = name if "ward" in name else ""
                ink = "black" if name == "forward" else "white"
                bar(axes, begin, end, top, 0.8, COLORS[name], label, ink)
                continue
            if thread not in threads:
                threads.append(thread)
            y = top - 0.72 - 0.55 * threads.index(thread)
            if begin < phases["backward"][1]:
                sends.append((begin, end))
                label = str(len(sends))
                bar(axes, begin, end, y, 0.5, COLORS[name], label, "black")
            else:
                bar(axes, begin, end, y, 0.5, COLORS["stop?"])
        axes.text(0, top, f"rank {rank}  ", ha="right", va="center", weight="bold")
    # From here the numbers are rank 0's, the last one in the loop.
    axes.text(phases["Optimizer.step"][1], 0.55, "optimizer", ha="right")
    axes.text(phases["stop?"][0], 0.55, " stop?", ha="left")
    axes.spines[["top", "left", "right"]].set_visible(False)
    length = phases["stop?"][1]
    axes.set(yticks=[], xlabel="milliseconds")
    axes.set(xlim=(0, 1.08 * length), ylim=(-4.5, 0.9))
    begin, end = phases["backward"]
    inside = sum(send[1] < end for send in sends)
    text = (
        f"Timeline of one step on two ranks, on a CPU: the step with the median length"
        f" of {TRACED}, {length:.0f} ms. Rank 0 runs forward until {begin:.0f} ms,"
        f" backward until {end:.0f} ms, then the optimizer, then a small all-reduce"
        " that asks whether any rank has received a signal to stop. During backward,"
        f" other threads run {len(sends)} all-reduces, one per bucket of gradients: the"
        f" first begins at {sends[0][0]:.0f} ms, and {inside} end before backward does."
    )
    save(figure, "one_step", text)


def main():
    matplotlib.rcParams.update({"svg.hashsalt": "figures", "font.size": 10.5})
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        text = Path(os.__file__).parent / "pydoc_data/topics.py"
        data.write_bytes(text.read_bytes()[:105_000])
        same_curve(data)
        one_step(data)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*sys.argv[2:])
    elif sys.argv[1:2] == ["trace"]:
        trace(*sys.argv[2:])
    else:
        main()
