"""`make figures`: draw two pictures of real runs into docs/, in about a minute.

same_curve.svg  the losses of one process, and of 2 and 4 ranks, stopped and killed
one_step.svg    one step on two ranks, as torch's profiler saw it

Each has a text alternative in it, with the numbers of this run.
"""

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from torch import nn

import ddp_train

ROOT = Path(ddp_train.__file__).parent
OPTIONS = "--device cpu --dim 64 --seq_len 64 --lr 0.001 --log_every 1 --save_every 25"
TRACE_OPTIONS = "--device cpu --layers 6 --heads 8 --dim 512 --seq_len 64"
TRACE_OPTIONS += " --batch_size 2 --max_steps 10"
NOT_TRACED = 3  # steps of 10: they set things up
FONT = 'font-family="DejaVu Sans, Verdana, sans-serif"'
# The colors of Okabe and Ito: color-blind people can tell them apart.
BLUE, RED, GREEN, GRAY = "#0072B2", "#D55E00", "#009E73", "#CCCCCC"
COLORS = {"forward": "#56B4E9", "backward": BLUE, "clip": GREEN}
COLORS |= {"Optimizer.step": GREEN, "stop?": "#CC79A7", "gloo:all_reduce": "#E69F00"}
# {color: [(ranks, first and last step, its fault as in harness.py, what it must say)]}
RUNS = {
    BLUE: [(1, 1, 144, "", "from step 0 to 144")],
    GREEN: [
        (4, 1, 30, "train_step 30 SIGTERM 3", "saved at step 30"),
        (2, 31, 144, "", "from step 30 to 144"),
    ],
    RED: [
        (2, 1, 114, "train_step 115 SIGKILL 1", "(SIGKILL)"),
        (2, 101, 144, "", "from step 100 to 144"),
    ],
}


# ---- The runs ------------------------------------------------------------------------
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


def run(data, starts):
    """Returns {step: loss}, with the last loss of a repeated step."""
    out = Path(tempfile.mkdtemp(dir=data.parent))
    words = [ROOT / "tests/harness.py", *OPTIONS.split(), "--data", data, "--out", out]
    for ranks, _, _, fault, says in starts:
        start(ranks, fault, says, *words, "--batch_size", 32 // ranks)
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def trace(folder, *options):
    """A rank, `figures.py trace ...`: ddp_train.py with small buckets, and profiled."""

    def give_name(owner, function, name):
        with_name = torch.profiler.record_function(name)(getattr(owner, function))
        setattr(owner, function, with_name)

    give_name(ddp_train, "compute_loss", "forward")
    give_name(torch.Tensor, "backward", "backward")
    give_name(nn.utils, "clip_grad_norm_", "clip")
    give_name(ddp_train.StopSignal, "requested", "stop?")
    ddp_train.DistributedDataParallel = functools.partial(
        ddp_train.DistributedDataParallel, bucket_cap_mb=12
    )
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        ddp_train.main(options)
    profiler.export_chrome_trace(f"{folder}/rank{os.environ['RANK']}.json")


def traced_step(data):
    """[(rank, name, begin, end, thread)] in ms, of the step with the median length."""
    out = Path(tempfile.mkdtemp(dir=data.parent))
    words = [__file__, "trace", out, *TRACE_OPTIONS.split()]
    start(2, "", "done: ", *words, "--data", data, "--out", out)
    steps = [[] for _ in range(12)]  # before the first one, ten steps, the evaluation
    for rank in range(2):
        content = json.loads((out / f"rank{rank}.json").read_text())
        zero = content["baseTimeNanoseconds"] / 1e6
        spans = []
        for event in content["traceEvents"]:
            if event.get("ph") == "X" and event["name"].startswith(tuple(COLORS)):
                begin = zero + event["ts"] / 1e3
                name = event["name"].partition("#")[0]
                end = begin + event["dur"] / 1e3
                spans.append((begin, end, name, event["tid"]))
        step = 0
        for begin, end, name, thread in sorted(spans):
            step = min(step + (name == "forward"), 11)
            steps[step].append((rank, name, begin, end, thread))
    traced = sorted(steps[NOT_TRACED + 1 : 11], key=length)
    return traced[len(traced) // 2]


def length(step):
    return max(span[3] for span in step) - min(span[2] for span in step)


# ---- The pictures --------------------------------------------------------------------
class Picture:
    """An SVG, 850 wide: a white panel, since the page around it may be dark."""

    def __init__(self, height, title):
        self.height, self.tags = height, []
        size = {"x": 1, "y": 1, "width": 848, "height": height - 2, "rx": 12}
        self.tag("rect", **size, fill="white", stroke=GRAY)
        self.text(425, 34, title, font_size=20)

    def tag(self, name, content="", **attributes):
        words = [f"<{name}"]
        for key, value in attributes.items():
            shown = value if isinstance(value, str) else f"{value:.4g}"
            words.append(f'{key.replace("_", "-")}="{shown}"')
        self.tags.append(f"{' '.join(words)}>{content}</{name}>")

    def text(self, x, y, words, text_anchor="middle", **attributes):
        self.tag("text", words, x=x, y=y, text_anchor=text_anchor, **attributes)

    def line(self, points, color="black", width=1, **attributes):
        """A path through these points. After None a new line begins in it."""
        words, letter = [], "M"
        for point in points:
            if point is not None:
                words.append(f"{letter}{point[0]:.1f} {point[1]:.1f}")
            letter = "M" if point is None else "L"
        style = {"fill": "none", "stroke": color, "stroke_width": width}
        style |= {"stroke_linejoin": "round", **attributes}
        self.tag("path", d=" ".join(words), **style)

    def bar(self, begin, end, y, height, color, words="", ink="white"):
        # At least 2 wide, so that even a very short one is visible.
        size = {"x": begin, "y": y, "width": max(2, end - begin - 1), "height": height}
        self.tag("rect", **size, fill=color)
        self.text((begin + end) / 2, y + height / 2 + 5, words, fill=ink)

    def axis(self, y, marks, name):
        """marks: {x: number}"""
        points = [(80, y), (830, y)]
        for x, number in marks.items():
            points += [None, (x, y), (x, y + 5)]
            self.text(x, y + 22, number)
        self.line(points)
        self.text(455, y + 44, name)

    def save(self, name, description):
        """description: the text alternative. It is in the picture, too."""
        path = ROOT / f"docs/{name}.svg"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" font-size="15" {FONT} '
        head += f'viewBox="0 0 850 {self.height}">'
        tags = [head, f"<title>{description}</title>", *self.tags, "</svg>\n"]
        path.write_text("\n".join(tags))
        print(f"{path.name}, {path.stat().st_size / 1024:.0f} KiB: {description}")


def same_curve(data):
    title = "Stopped, killed, on other numbers of ranks: the same losses"
    picture = Picture(530, title)

    def x(step):
        return 90 + 5.1 * step

    def points(losses, steps):
        return [(x(step), 355 - 50 * losses[step]) for step in steps]

    for step, color, anchor, what in (
        (30, GREEN, "start", "stopped by SIGTERM"),
        (115, RED, "end", "a rank killed (kill -9)"),
    ):
        picture.line([(x(step), 55), (x(step), 470)], color, stroke_dasharray="5 4")
        place = x(step) + {"start": 8, "end": -8}[anchor]
        picture.text(place, 100, what, anchor, fill=color)
        picture.text(place, 120, f"in step {step}", anchor, fill=color)
    curves = {color: run(data, starts) for color, starts in RUNS.items()}
    one = curves[BLUE]
    picture.line(points(one, one), BLUE, 14, opacity=0.3)
    worst, y = 0, 280
    for first, color in ((1, GREEN), (3, RED)):
        assert curves[color].keys() == one.keys()
        for step, loss in curves[color].items():
            worst = max(worst, abs(loss - one[step]) / one[step])
        dots = points(curves[color], range(first, 145, 4))
        pieces = sum([[dot, dot, None] for dot in dots], [])
        picture.line(pieces, color, 8, stroke_linecap="round")
    for color, starts in RUNS.items():
        before = 144
        for ranks, first, last, *_ in starts:
            if first <= before:  # not a continuation: it gets its own line
                y += 36
            words = f"{ranks} rank{'s' * (ranks > 1)} × {32 // ranks}"
            if first > 1:
                words = f"from step {first - 1}: {words}"
            picture.bar(x(first - 1), x(last), y, 28, color, words)
            before = last
    worst = f"{worst:.1e}".replace("e-0", "e-")
    notes = ["line: one process;  dots: the other two runs"]
    notes += [f"they differ by at most {worst} of the loss", "(the tests allow 1e-6)"]
    for number, note in enumerate(notes):
        picture.text(x(73), 156 + 22 * number, note)
    for loss in range(2, 6):
        picture.text(72, 360 - 50 * loss, loss, "end")
    picture.line([(80, 55), (80, 470)])
    for words, y in (("training loss", 180), ("ranks × samples", 385)):
        picture.text(30, y, words, transform=f"rotate(-90 30 {y})")
    picture.axis(470, {x(step): step for step in range(0, 144, 20)}, "step")
    text = "Losses of three runs on a CPU: one process; four ranks, stopped and resumed"
    text += " on two; two ranks, one of them killed, and started again. They differ by"
    picture.save("same_curve", f"{text} at most {worst} of the loss.")


def one_step(data):
    spans = traced_step(data)
    zero = min(begin for _, _, begin, _, _ in spans)
    whole = length(spans)
    title = "One step on two ranks: gradients travel while backward is running"
    picture = Picture(440, title)
    note = "Orange: the all-reduce of each bucket of gradients, in gloo's threads."
    picture.text(425, 58, f"{note} The rank that comes first waits.", font_size=14)
    note = "“stop?” is a small all-reduce, too: has any rank received a signal to stop?"
    picture.text(425, 78, note, font_size=14)

    def x(time):
        return 80 + 715 * time / whole

    for rank in (1, 0):
        top = 115 + 150 * rank
        picture.text(72, top + 27, f"rank {rank}", "end", font_weight="bold")
        phases, sends, threads = {}, 0, []
        for of_rank, name, begin, end, thread in spans:
            if of_rank != rank:
                continue
            begin, end = begin - zero, end - zero
            if name != "gloo:all_reduce":
                phases[name] = begin, end
                words = name if "ward" in name else ""
                picture.bar(x(begin), x(end), top, 44, COLORS[name], words)
                continue
            if thread not in threads:
                threads.append(thread)
            words, color = "", COLORS["stop?"]
            if begin < phases["backward"][1]:
                sends += 1
                words, color = sends, COLORS[name]
            y = top + 49 + 31 * threads.index(thread)
            picture.bar(x(begin), x(end), y, 27, color, words, "black")
    # From here the numbers are rank 0's, the last one in the loop.
    picture.text(x(phases["stop?"][0]) - 4, 108, "optimizer", "end")
    picture.text(x(phases["stop?"][0]) + 4, 108, "stop?", "start")
    apart = 10 ** math.floor(math.log10(whole))  # milliseconds between two marks
    marks = range(0, int(whole) + 1, apart)
    picture.axis(388, {x(time): time for time in marks}, "milliseconds")
    text = f"One step of {whole:.0f} ms on two ranks, on a CPU: forward, backward, and"
    text += " the optimizer. During backward, other threads add up the gradients, in"
    picture.save("one_step", f"{text} {sends} all-reduces.")


def main():
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        text = Path(os.__file__).parent / "pydoc_data/topics.py"
        data.write_bytes(text.read_bytes()[:105_000])
        same_curve(data)
        one_step(data)


if __name__ == "__main__":
    if sys.argv[1:2] == ["trace"]:
        trace(*sys.argv[2:])
    else:
        main()
