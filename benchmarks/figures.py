"""`make figures`: draw docs/same_curve.svg from real runs, in about a minute.

It shows the losses of one process, and of 2 and 4 ranks that are stopped or killed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ddp_train

ROOT = Path(ddp_train.__file__).parent
OPTIONS = "--device cpu --dim 64 --seq_len 64 --lr 0.001 --log_every 1 --save_every 25"
FONT = 'font-family="DejaVu Sans, Verdana, sans-serif"'
# The colors of Okabe and Ito: color-blind people can tell them apart.
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#009E73"
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


# ---- The picture ---------------------------------------------------------------------
class Picture:
    """An SVG of 850 x 530: a white panel, since the page around it may be dark."""

    def __init__(self):
        self.tags = []
        size = {"x": 1, "y": 1, "width": 848, "height": 528, "rx": 12}
        self.tag("rect", **size, fill="white", stroke="#CCCCCC")

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

    def bar(self, begin, end, y, color, words):
        size = {"x": begin, "y": y, "width": end - begin - 1, "height": 28}
        self.tag("rect", **size, fill=color)
        self.text((begin + end) / 2, y + 19, words, fill="white")

    def save(self, path, description):
        """description: the text alternative. It is in the picture, too."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" font-size="15" {FONT} '
        head += 'viewBox="0 0 850 530">'
        tags = [head, f"<title>{description}</title>", *self.tags, "</svg>\n"]
        path.write_text("\n".join(tags))
        print(f"{path.name}, {path.stat().st_size / 1024:.0f} KiB: {description}")


def same_curve(data):
    title = "Stopped, killed, on other numbers of ranks: the same losses"
    picture = Picture()
    picture.text(425, 34, title, font_size=20)

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
            picture.bar(x(first - 1), x(last), y, color, words)
            before = last
    worst = f"{worst:.1e}".replace("e-0", "e-")
    notes = ["line: one process;  dots: the other two runs"]
    notes += [f"they differ by at most {worst} of the loss", "(the tests allow 1e-6)"]
    for number, note in enumerate(notes):
        picture.text(x(73), 156 + 22 * number, note)
    for loss in range(2, 6):
        picture.text(72, 360 - 50 * loss, loss, "end")
    axes = [(80, 55), (80, 470), (830, 470)]
    for step in range(0, 144, 20):
        axes += [None, (x(step), 470), (x(step), 475)]
        picture.text(x(step), 492, step)
    picture.line(axes)
    picture.text(455, 514, "step")
    for words, y in (("training loss", 180), ("ranks × samples", 385)):
        picture.text(30, y, words, transform=f"rotate(-90 30 {y})")
    text = "Losses of three runs on a CPU: one process; four ranks, stopped and resumed"
    text += " on two; two ranks, one of them killed, and started again. They differ by"
    text += f" at most {worst} of the loss."
    picture.save(ROOT / "docs/same_curve.svg", text)


def main():
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        text = Path(os.__file__).parent / "pydoc_data/topics.py"
        data.write_bytes(text.read_bytes()[:105_000])
        same_curve(data)


if __name__ == "__main__":
    main()
