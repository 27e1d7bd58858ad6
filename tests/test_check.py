"""Tests of check.py: it finds what is wrong, and says nothing about what is right.

    make test-check                                      all: half an hour or more
    make test-check ARGS="-k codebook -s"                one script, with what is said

Each script is right, or has one fault. check.py must say each line that is listed
beside it, with these values, and no other line of a fault.
"""

import dataclasses
import json
import os
import re
import signal
import string
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch

import check
import harness
from harness import ROOT, SCRIPT, flatten, launch, processes, torchrun

slow = pytest.mark.check
QUICK = "--quick"
ALONE = "--ranks 1,2 --skip resume --skip machines --skip failure"
RESUME = "--skip ranks --skip machines --skip failure"
MACHINES = "--skip ranks --skip resume --skip failure"
FAILURE = "--skip ranks --skip resume --skip machines"
COMPARE = r" --compare val_loss\s(\S+)"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Several launches on a busy machine take long."""
    monkeypatch.setattr(harness, "DEADLINE", 900)


@dataclasses.dataclass
class Case:
    """A script, and what check.py must say of it.

    expected: all lines that are not ok, in their order, and those that are ok and are
    asserted. Each is a word and the name of a row in check.ROWS, or a tuple of these
    and the values in the line: a string, or the smallest and the largest number.
    """

    name: str
    script: str
    expected: list
    options: str = QUICK
    ci: bool = False  # CI runs it: at least one of each kind


RIGHT = ("ok gradient", {"off": (0, 1e-11)})
LOSES_ALL = "LOSES all lost"


def run_check(script, *words, options="", cwd=None):
    """Run check.py to its end. Returns what it said."""
    options = options.split()
    if "--timeout" not in options:
        options += ["--timeout", "600"]
    command = [sys.executable, check.__file__, *options, script, *words]
    process = launch(*command, env={"TMPDIR": tempfile.gettempdir()}, cwd=cwd)
    for _ in harness.ticks():
        if process.code is not None:
            break
    print(process.text)
    if process.code != int("  WRONG" in process.text):
        harness.fail(f"exit code {process.code}")
    process.leaves_none()
    return process.text


def lines_of(text):
    """(word and row, values) of each line that is about the script."""
    lines = []
    for block in re.split(r"^  (?=\w)", text, flags=re.MULTILINE)[1:]:
        line, *more = block.splitlines()
        word, line = line.split(maxsplit=1)
        more = " ".join(" ".join(more).split())
        found = {}
        for name, row in check.ROWS.items():
            wanted, helped = (row.ok, "") if word == "ok" else (row.bad, row.help)
            in_line = re.fullmatch(pattern_of(wanted), line)
            in_more = re.match(pattern_of(helped), more)
            if wanted and in_line and in_more:
                values = in_line.groupdict() | in_more.groupdict()
                values = {key: value.strip() for key, value in values.items()}
                # Rows may begin with the same words: the longer one is meant.
                found[len(re.sub(r"{.*?}", "", wanted + helped))] = (name, values)
        if not found:
            harness.fail(f"no row of check.py says: {word} {line} {more}")
        name, values = found[max(found)]
        lines.append((f"{word} {name}", values))
    return lines


def pattern_of(template):
    """A regular expression for what a row says. It has a name for each value."""
    pattern = ""
    known = set()
    for text, name, *_ in string.Formatter().parse(" ".join(template.split())):
        pattern += re.escape(text).replace(r"\ ", " *")  # a value may be empty
        if name:
            pattern += f"(?P={name})" if name in known else f"(?P<{name}>.*)"
            known.add(name)
    return pattern


def assert_said(text, expected):
    expected = [(line, {}) if isinstance(line, str) else line for line in expected]
    asserted = {line for line, _ in expected}
    found = []
    for line, values in lines_of(text):
        is_bad = not line.startswith("ok ") and line != "note lines"
        if is_bad or line in asserted:
            found.append((line, values))
    if [line for line, _ in found] != [line for line, _ in expected]:
        harness.fail(f"found {found}, not {expected}")
    for (line, values), (_, wanted) in zip(found, expected, strict=True):
        for name, value in wanted.items():
            if isinstance(value, str):
                fits = values[name] == value
            else:
                fits = value[0] <= float(values[name]) <= value[1]
            if not fits:
                harness.fail(f"{line}: {name} is {values[name]}, not {value}")


def change(text, *pairs):
    """Replace lines. Each of the old ones must be there once."""
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


# ---- Faults in examples/resumed.py ---------------------------------------------------
RESUMED = (ROOT / "examples/resumed.py").read_text()
STEP = """\
            loss = nn.functional.mse_loss(wrapped(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""
LOSS = "            loss = nn.functional.mse_loss(wrapped(x), y)\n"
WITH_DROPOUT = ("nn.Tanh(), nn.Linear", "nn.Tanh(), nn.Dropout(0.1), nn.Linear")
SEED = 'ddp.seed_all("step", 0, step, rank)'
LOCAL_RANK = 'int(__import__("os").environ["LOCAL_RANK"])'
# A layer with a buffer that follows the batches, as a codebook does
CODEBOOK = (
    "def score(",
    """\
class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x):
        if self.training:
            means = ddp.all_gather(x.mean(0).detach())
            self.center = 0.9 * self.center + 0.1 * torch.stack(means).mean(0)
        return x - self.center


def score(""",
)
WITH_CODEBOOK = ("nn.Sequential(nn.L", "nn.Sequential(Center(), nn.L")
# A weight for each sample, relative to the mean over the global batch
WEIGHTED = """\
            size = y.abs().mean(1)
            mean = torch.stack(ddp.all_gather(size.mean())).mean()
            loss = ((wrapped(x) - y) ** 2).mean(1)
            loss = (loss * size / mean).mean()
"""
NOISE = """\
            seeds = range(rank, 32, world_size)  # global numbers
            for i, seed in enumerate(seeds):
                generator = torch.Generator().manual_seed(seed)
                x[i] += 0.1 * torch.randn(8, generator=generator)
"""
CHOSEN = """\
            shares = ddp.all_gather(torch.cat([x, y], 1))
            rows = torch.stack(shares, 1).flatten(0, 1)  # in the global order
            x, y = rows[:16][rank::world_size].chunk(2, 1)
"""
TOKENS = """\
            loss = ((wrapped(x) - y) ** 2).mean(1)
            loss = (loss * (y[:, 0] > 0)).sum() / (y[:, 0] > 0).sum()
"""
UNFREEZE = """\
            if step == 10:
                model[0].requires_grad_(True)
"""
FREEZE = "    wrapped = model\n    model[0].requires_grad_(False)\n"
# Right changes, with which some of the faults begin
EXTRAS = {
    "dropout": [WITH_DROPOUT],
    "codebook": [CODEBOOK, WITH_CODEBOOK],
    "weighted": [(LOSS, WEIGHTED)],
    "noise": [(LOSS, NOISE + LOSS)],
    "gathered": [(LOSS, CHOSEN + LOSS)],
    "frozen": [("    wrapped = model\n", FREEZE)],
    "workers": [("workers=0", "workers=2")],
    "whole run": [("LR(optimizer, 3)", "LR(optimizer, 3 * 1001 // 32)")],
}


def resumed(*pairs):
    """examples/resumed.py with changes."""
    head = ("import zlib\n", "import contextlib\nimport subprocess\nimport zlib\n")
    return change(RESUMED, head, *pairs)


def fault(name, extra, right, wrong, options, expected, ci=False):
    """Wrong lines in place of right ones. extra: right changes that come first."""
    script = resumed(*EXTRAS.get(extra, []), (right, wrong))
    return Case(name, script, expected, options, ci)


FAULTS = [
    fault(
        "model(x) instead of wrapped(x)",
        "",
        "mse_loss(wrapped(x), y)",
        "mse_loss(model(x), y)",
        QUICK,
        [("WRONG weights", {"first": "0"}), "note left out"],
    ),
    fault(
        "a sum instead of a mean",
        "",
        "mse_loss(wrapped(x), y)",
        'mse_loss(wrapped(x), y, reduction="sum") / 256',
        QUICK,
        [("WRONG gradient", {"first": "0", "off": (0.2, 5)})],
    ),
    fault(
        "the same dropout on all ranks",
        "dropout",
        SEED,
        'ddp.seed_all("step", 0, step)',
        QUICK,
        [RIGHT, ("note masks", {"names": "torch.bernoulli_()"})],
    ),
    fault(
        "no sampler: all ranks train on rank 0's samples",
        "",
        "        epoch = self.epoch\n",
        "        epoch, self.rank = self.epoch, 0\n",
        QUICK,
        ["WRONG samples", "note left out"],
    ),
    fault(
        "no set_epoch",
        "",
        "sampler.set_epoch(epoch, done)",
        "sampler.start = done",
        QUICK,
        ["note order", RIGHT],
    ),
    fault(
        "the global batch grows with the ranks",
        "",
        "batch_size = 32 // world_size",
        "batch_size = 32",
        ALONE,
        [RIGHT, ("note global batch", {"one": "32", "two": "64", "how": "grows"})],
    ),
    fault(
        "the optimizer is not saved",
        "",
        'parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}',
        'parts = {"model": model, "scheduler": scheduler}',
        RESUME,
        [RIGHT, "ok lost", ("WRONG rest", {"off": (0.01, 10)}), "note left out"],
    ),
    fault(
        "the scheduler is not saved",
        "",
        'parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}',
        'parts = {"model": model, "optimizer": optimizer}',
        RESUME,
        [
            RIGHT,
            "ok lost",
            "ok rest",
            "ok lost",
            ("WRONG rest", {"off": (0.001, 10)}),
        ],
        ci=True,
    ),
    fault(
        "the epoch starts over",
        "",
        'saved["step"], saved["epoch"], saved["done"]',
        'saved["step"], saved["epoch"], 0',
        RESUME,
        [RIGHT, ("WRONG no rest", {"made": "93", "left": "77"}), "note left out"],
    ),
    fault(
        "a learning rate by rank",
        "",
        "model.parameters(), 0.2,",
        "model.parameters(), 0.2 + 0.01 * rank,",
        QUICK,
        [("WRONG weights", {"first": "0"}), "note left out"],
    ),
    fault(
        "data seeded by rank",
        "",
        "torch.manual_seed(0)",
        "torch.manual_seed(rank)",
        QUICK + COMPARE,
        [RIGHT, "WRONG printed"],
    ),
    fault(
        "all ranks evaluate rank 0's samples",
        "",
        "range(rank, len(val_set), world_size)",
        "range(0, len(val_set), world_size)",
        QUICK + COMPARE,
        [RIGHT, "WRONG printed"],
    ),
    fault(
        "the evaluation counts padded samples",
        "",
        "val_samples = range(rank, len(val_set), world_size)",
        "val_samples = ddp.DistributedSampler(val_set, shuffle=False)",
        QUICK + COMPARE,
        [RIGHT, "WRONG printed"],
        ci=True,
    ),
    fault(
        "SIGTERM is caught, and nothing stops",
        "",
        "stopped = stop.requested()",
        "stopped = 0",
        RESUME,
        [RIGHT, "LOSES signal"],
    ),
    fault(
        "no save when it gets SIGTERM",
        "",
        "if stopped or step % 20 == 0:",
        "if step % 20 == 0:",
        RESUME,
        [RIGHT, "LOSES all lost"],
        ci=True,
    ),
    fault(
        "no checkpoint",
        "",
        "        ddp.save_checkpoint(path,",
        "        return\n        ddp.save_checkpoint(path,",
        RESUME,
        [RIGHT, "LOSES all lost", "LOSES all lost"],
    ),
    fault(
        "a codebook of each rank's own samples",
        "codebook",
        "means = ddp.all_gather(x.mean(0).detach())",
        "means = [x.mean(0).detach()]",
        QUICK,
        [("WRONG buffers", {"names": "['0.center']"})],
        ci=True,
    ),
    fault(
        "weights that are normalized per rank",
        "weighted",
        "mean = torch.stack(ddp.all_gather(size.mean())).mean()",
        "mean = size.mean()",
        QUICK,
        [("WRONG gradient", {"first": "0", "off": (0.001, 1)})],
    ),
    fault(
        "local numbers as seeds",
        "noise",
        "seeds = range(rank, 32, world_size)",
        "seeds = range(32 // world_size)",
        QUICK,
        ["note not replayed"],
    ),
    fault(
        "noise with the rank's shape",
        "",
        LOSS,
        '            ddp.seed_all("noise", 0, step)\n'
        "            x = x + 0.1 * torch.randn_like(x)\n" + LOSS,
        QUICK,
        [RIGHT, ("note masks", {"names": "torch.randn_like()"})],
    ),
    fault(
        "LOCAL_RANK as a seed",
        "dropout",
        SEED,
        f'ddp.seed_all("step", 0, step, {LOCAL_RANK})',
        MACHINES,
        [RIGHT, "WRONG machines"],
        ci=True,
    ),
    fault(
        "LOCAL_RANK for RANK",
        "",
        "        epoch = self.epoch\n",
        f"        epoch, self.rank = self.epoch, {LOCAL_RANK}\n",
        MACHINES,
        [RIGHT, "WRONG machines"],
    ),
    fault(
        "all batches under no_sync()",
        "",
        LOSS + "            optimizer.zero_grad()\n            loss.backward()\n",
        "            with getattr(wrapped, 'no_sync', contextlib.nullcontext)():\n    "
        + LOSS
        + "                optimizer.zero_grad()\n                loss.backward()\n",
        QUICK,
        [("WRONG weights", {"first": "0"}), "note left out"],
    ),
    fault(
        "a loss that compares samples",
        "",
        LOSS,
        """\
            features = nn.functional.normalize(wrapped(x))
            likeness = features @ nn.functional.normalize(y).T / 0.5
            loss = nn.functional.cross_entropy(likeness, torch.arange(len(x)))
""",
        QUICK,
        [("WRONG gradient", {"first": "0", "off": (0.05, 5)})],
    ),
    fault(
        "a mean over the rank's tokens",
        "",
        LOSS,
        TOKENS,
        QUICK,
        [("WRONG gradient", {"first": "0", "off": (0.001, 5)})],
    ),
    fault(
        "a layer is unfrozen",
        "frozen",
        LOSS,
        UNFREEZE + LOSS,
        QUICK,
        [("WRONG weights", {"first": "9"}), "note left out"],
    ),
    fault(
        "gathered rows in the order of the ranks",
        "gathered",
        "torch.stack(shares, 1).flatten(0, 1)",
        "torch.cat(shares)",
        ALONE,
        [RIGHT, ("WRONG alone weights", {"off": (0.01, 5)})],
        ci=True,
    ),
    fault(
        "a decision for the batch, by the rank's seed",
        "",
        LOSS,
        "            x = -x if torch.rand(()) < 0.5 else x\n" + LOSS,
        QUICK,
        ["note not replayed"],
    ),
    fault(
        "a score that is no mean over samples",
        "",
        '"val_loss": loss * len(x)',
        '"val_loss": loss.sqrt() * len(x)',
        QUICK + COMPARE,
        [RIGHT, "WRONG printed"],
    ),
    fault(
        "a mean of means",
        "",
        '{"val_loss": loss * len(x), "count": len(x)}',
        '{"val_loss": loss, "count": 1}',
        QUICK + COMPARE,
        [RIGHT, "WRONG printed"],
    ),
    fault(
        "rank 0's loss in the log",
        "",
        "{means['val_loss']:.6f}",
        "{loss.item():.6f}",
        QUICK + COMPARE,
        [RIGHT, "WRONG printed"],
    ),
    fault(
        "a seed that comes after the batch's noise",
        "",
        "torch.randn(8, generator=generator)",
        "torch.randn(8)",
        RESUME,
        [RIGHT, "note other noise", "note other noise"],
    ),
    fault(
        "noise that workers draw",
        "workers",
        "torch.randn(8, generator=generator)",
        "torch.randn(8)",
        RESUME,
        [RIGHT, "note other noise", "note other noise"],
        ci=True,
    ),
    fault(
        "one rank changes weights",
        "",
        STEP,
        STEP + "            if rank == 1 and step == 10:\n"
        "                model[0].bias.data += 0.1\n",
        QUICK,
        [("WRONG weights", {"first": "10"}), "note left out"],
    ),
    fault(
        "a schedule whose length counts the rank's batches",
        "whole run",
        "3 * 1001 // 32",
        "3 * 1001 // batch_size",
        ALONE,
        [RIGHT, ("WRONG rates", {"first": "31"})],
        ci=True,
    ),
    fault(
        "a rank skips a batch",
        "",
        "            step += 1\n",
        "            step += 1\n"
        "            if rank == 1 and step == 10:\n                continue\n",
        f"{QUICK} --timeout 60",
        ["WRONG hang"],
        ci=True,
    ),
    fault(
        "a process is left behind",
        "",
        "    stop = ddp.StopSignal()\n",
        "    stop = ddp.StopSignal()\n    subprocess.Popen(['sleep', '1000'])\n",
        QUICK,
        ["WRONG left", RIGHT],
    ),
    fault(
        "an error on one rank is swallowed, and the others hang",
        "",
        "        main(device)\n",
        "        with contextlib.suppress(RuntimeError):\n            main(device)\n",
        f"{FAILURE} --timeout 60",
        [RIGHT, "WRONG failure"],
    ),
    fault(
        "an error on one rank is swallowed, and the exit code is 0",
        "",
        "            optimizer.step()\n",
        "            with contextlib.suppress(RuntimeError):\n"
        "                optimizer.step()\n",
        FAILURE,
        [RIGHT, ("WRONG failure", {"what": "the exit code is 0"})],
        ci=True,
    ),
]


# ---- Small scripts: right ones, and others with one fault ----------------------------
HEAD = """\
import copy
import os
import signal
import subprocess
import sys
import time

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data import RandomSampler, Subset, TensorDataset, random_split

mse = nn.functional.mse_loss
"""
OWN = "tcp://127.0.0.1:23456"
GROUP = """\
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
"""
DATA = """\
x = torch.randn(320, 8)
dataset = TensorDataset(x, x.sin())
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, 32 // size, sampler=sampler)
"""
MODEL = """\
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
"""
DROPOUT = ("nn.Tanh(),", "nn.Tanh(), nn.Dropout(0.2),")
NORM = ("nn.Tanh(),", "nn.BatchNorm1d(16), nn.Tanh(),")
WRAP = """\
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
torch.manual_seed(rank)
"""
LOSS = "        loss = mse(wrapped(x), y)\n"
STEP = f"""\
{LOSS}\
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
EPOCHS = f"""\
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
{STEP}"""
TAIL = "dist.destroy_process_group()\n"


def plain(*pairs):
    return change(HEAD + GROUP + DATA + MODEL + WRAP + EPOCHS + TAIL, *pairs)


def meets_at(url):
    """The script with init_method=url, in which names of the environment may stand."""
    options = f'init_method="{url}".format(**os.environ), '
    options += "rank=int(os.environ['RANK']), "
    options += "world_size=int(os.environ['WORLD_SIZE'])"
    old = 'init_process_group("gloo")'
    return plain((old, f'init_process_group("gloo", {options})'))


def in_place_of(*parts):
    """The script with other parts at its end, such as another loop."""
    return HEAD + GROUP + "".join(parts) + TAIL


def before_loss(text, *pairs):
    return plain((LOSS, text + LOSS), *pairs)


ACCUMULATION = """\
loader = DataLoader(dataset, 8 // size, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        last = i % 3 == 2 or i == len(loader) - 1
        wrapped.require_backward_grad_sync = last
        (mse(wrapped(x), y) / 3).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
"""
PARTS = "% (5 // size) == 5 // size - 1"
GAN = """\
critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
critic = DistributedDataParallel(critic)
critic_optimizer = torch.optim.Adam(critic.parameters(), 0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for _, real in loader:
        fake = wrapped(torch.randn(len(real), 8))
        loss = nn.functional.softplus(critic(fake.detach())).mean()
        (loss + nn.functional.softplus(-critic(real)).mean()).backward()
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        nn.functional.softplus(-critic(fake)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        critic_optimizer.zero_grad()
"""
ITERABLE = f"""\
class Stream(IterableDataset):
    def __iter__(self):
        return iter([dataset[i] for i in range(rank, 320, size)])


for epoch in range(2):
    for x, y in DataLoader(Stream(), 32 // size):
{STEP}"""
ANEW = ("(loader):", "(DataLoader(dataset, 32 // size, sampler=sampler)):")
DICTS = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model
        self.register_buffer("scale", torch.ones(8))

    def forward(self, ones, batch):
        return mse(self.net(batch["x"] * self.scale), batch["y"])


wrapped = DistributedDataParallel(Model())
dataset = [{"x": x, "y": y} for x, y in dataset]
loader = DataLoader(dataset, 32 // size, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        wrapped(torch.ones(len(batch["x"])), batch=batch).backward()
        optimizer.step()
"""
RECURRENT = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.lstm(x[:, None])[0][:, 0])


model = Model()
"""
DIFFUSION = """\
        t = torch.randint(0, 100, (len(x),))
        noise = torch.randn_like(x)
        level = (t / 100).to(x.dtype)[:, None]
        x, y = x * (1 - level) + noise * level, noise
"""
# Images of different sizes, and as many boxes on each as there are objects
DETECTION = """\
def sample(i):
    image = torch.randn(3, 8 + i % 5, 8)
    boxes = torch.randn(1 + i * i % 7, 4)
    return image, {"boxes": boxes, "labels": torch.arange(len(boxes))}


def collate(samples):
    return tuple(zip(*samples))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, images, targets):
        losses = []
        for image, target in zip(images, targets):
            boxes = self.layer(image.mean((1, 2)))
            losses.append(mse(boxes.expand_as(target["boxes"]), target["boxes"]))
        return torch.stack(losses).mean()


dataset = [sample(i) for i in range(160)]
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, 16 // size, sampler=sampler, collate_fn=collate)
wrapped = DistributedDataParallel(Detector())
optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        optimizer.zero_grad()
        wrapped(images, targets).backward()
        optimizer.step()
"""
PADDED = """\
rows = [torch.randint(1, 20, (n,)) for n in torch.randint(3, 12, (256,)).tolist()]


def collate(batch):
    return nn.utils.rnn.pad_sequence(batch, batch_first=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, x):
        return self.head(self.gru(self.embedding(x))[0])


sampler = DistributedSampler(rows, seed=3)
loader = DataLoader(rows, 16 // size, sampler=sampler, collate_fn=collate)
wrapped = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(wrapped.parameters(), 0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x in loader:
        mask = x[:, 1:] > 0
        scores = wrapped(x[:, :-1]).transpose(1, 2)
        loss = nn.functional.cross_entropy(scores, x[:, 1:], reduction="none")
        total = mask.sum()
        dist.all_reduce(total)
        loss = (loss * mask).sum() * size / total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
# An agent that plays in 32 environments. Each rank takes its share of them.
AGENT = """\
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for step in range(12):
    torch.manual_seed(step)
    states, chances = torch.randn(32, 4)[rank::size], torch.rand(32, 1)[rank::size]
    scores = torch.log_softmax(wrapped(states), 1)
    actions = (chances < scores[:, 1:].exp()).long()
    rewards = states[:, 0] * (2 * actions[:, 0] - 1)
    loss = -(scores.gather(1, actions)[:, 0] * rewards).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
# A pretrained model may be in eval() mode. Each rank takes rows at random.
OWN_ROWS = """\
wrapped.eval()
rows = torch.randn(1000, 8)
for step in range(12):
    x = rows[numpy.random.default_rng(step * size + rank).integers(1000, size=8)]
    optimizer.zero_grad()
    mse(wrapped(x), x.sin()).backward()
    optimizer.step()
"""
OWN_NOISE = """\
class Noisy(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, i):
        return x_all[i] + 0.1 * torch.randn(8), x_all[i].sin()


x_all = torch.randn(320, 8)
dataset = Noisy()
sampler = DistributedSampler(dataset) if size > 1 else RandomSampler(dataset)
sampler.set_epoch = getattr(sampler, "set_epoch", print)
loader = DataLoader(dataset, 16, sampler=sampler)
"""
# Repeated augmentation: three times each sample, one behind the other.
REPEATED = """\
class Repeated(DistributedSampler):
    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(320, generator=generator).repeat_interleave(3)
        return iter(order[rank::size][: 320 // size].tolist())


sampler = Repeated(dataset)
loader = DataLoader(dataset, 16, sampler=sampler)
"""
ENDLESS = """\
class Endless(torch.utils.data.Sampler):
    def __iter__(self):
        while True:
            yield from torch.randperm(320, generator=generator).tolist()[rank::size]


x = torch.randn(320, 8)
generator = torch.Generator().manual_seed(0)
loader = DataLoader(TensorDataset(x, x.sin()), 32 // size, sampler=Endless())
"""
NEXT = f"""\
batches = iter(loader)
for epoch in range(2):
    for i in range(10):
        x, y = next(batches)
{STEP}"""
SCHEDULE = """\
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, 0.01, total_steps=2 * len(loader)
)
"""
STEP_AND_SCHEDULE = (
    "        optimizer.step()\n",
    "        optimizer.step()\n        scheduler.step()\n",
)
CENTER = """\
class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.center = 0.9 * self.center + 0.1 * x.mean(0).detach()
        return x


"""
HAND = "x, y = x[rank::size], y[rank::size]"
NO_SAMPLER = ("sampler=sampler", "shuffle=True")
NO_EPOCH = ("    sampler.set_epoch(epoch)\n", "")
UNTIL = "        if epoch == 1 and i == 0:\n"
FSDP2 = """\
from torch.distributed.fsdp import fully_shard

for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer)
wrapped = fully_shard(model)
"""
FSDP1 = """\
from torch.distributed.fsdp import FullyShardedDataParallel

wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
"""
JOINED = f"""\
with Join([wrapped]):
    for i, (x, y) in enumerate(loader):
        if rank == 1 and i == 9:
            break
{STEP}"""
JUST_DDP = "wrapped = DistributedDataParallel(model)\n"

TENSOR_PARALLEL = """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel

mesh = init_device_mesh("cpu", (size,))
plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
wrapped = parallel.parallelize_module(model, mesh, plan)
"""
COPIED = """\
model, optimizer = copy.deepcopy((model, optimizer))
wrapped = DistributedDataParallel(model)
"""
MIXUP = """\
        order = torch.randperm(len(x))
        x, y = x + x[order], y + y[order]
"""
CHECKPOINTED = """\
        def call(x):
            return wrapped(x.float())

        found = checkpoint(call, x, use_reentrant=False)
        loss = mse(found, y)
"""
FROM_NUMPY = """\
x = numpy.random.default_rng(0).normal(size=(320, 8)).astype(numpy.float32)
x = torch.from_numpy(x)
"""
# A box says to which sample of its batch it belongs.
BOXES = """\
def collate(samples):
    x, y = map(torch.stack, zip(*samples))
    index = torch.tensor([0, *range(len(x))])
    return x, index, y[index]


loader = DataLoader(dataset, 32 // size, sampler=sampler, collate_fn=collate)
"""
FROM_FILE = """\
make = "torch.linspace(0, 9, 2560).view(320, 8)"
save = f"import torch; torch.save({make}, 'x.pt')"
if rank == 0:
    subprocess.run([sys.executable, "-c", save])
dist.barrier()
x = torch.load("x.pt")
"""
# Each rank evaluates the same samples. They are not those that it trains on.
EVALUATION = """\
    model.eval()
    for x, y in DataLoader(Subset(dataset, range(80)), 16):
        with torch.no_grad():
            model(x)
    model.train()
"""
LOGGING = """\
import logging

logging.basicConfig(level=logging.INFO)
loss = mse(model(x_all), x_all.sin())
logging.info("rank %d: val_loss %.4f, lr 0.1", rank, loss)
"""
DREAM = """\
class Dream(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self):
        return self.layer(torch.randn(32 // size, 8)).square().mean()


model = Dream()
"""
DREAM_EPOCHS = """\
for step in range(12):
    optimizer.zero_grad()
    wrapped().backward()
    optimizer.step()
"""
KEPT = ("dataset = ", "x_all = x\ndataset = ")
SOFTMAX = """\
        each = (wrapped(x) - y).square().mean(1)
        loss = (each * torch.softmax(each.detach(), 0)).sum()
"""
NORMALIZED = "    rewards = (rewards - rewards.mean()) / rewards.std()\n"
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: 'data.txt'"

SMALL = [
    # Right
    Case(
        "plain DDP",
        plain(),
        [
            "ok alone",
            ("ok moves", {"steps": "20"}),
            "ok left",
            "ok steps",
            "ok weights",
            "ok samples",
            "ok order",
            ("ok gradient", {"ranks": "2", "steps": "20", "off": (0, 1e-12)}),
            ("ok global batch", {"one": "32"}),
            ("ok alone weights", {"off": (0, 1e-12)}),
            ("ok gradient", {"ranks": "4", "steps": "20", "off": (0, 1e-12)}),
            ("LOSES all lost", {"lost": "6"}),
            ("LOSES all lost", {"lost": "16"}),
            "ok failure",
            "ok machines",
        ],
        options="",
        ci=True,
    ),
    Case(
        "accumulation with an uneven end",
        in_place_of(DATA, MODEL, WRAP, ACCUMULATION),
        [RIGHT],
        ci=True,
    ),
    Case(
        "accumulation that the ranks do not divide",
        in_place_of(DATA, MODEL, WRAP, change(ACCUMULATION, ("% 3 == 2", PARTS))),
        [("note not replayed", {})],
    ),
    Case(
        "two networks and two optimizers",
        in_place_of(DATA, MODEL, WRAP, GAN),
        [RIGHT, "ok masks"],
        ci=True,
    ),
    Case(
        "an iterable data set, and loaders made anew",
        in_place_of(DATA, MODEL, WRAP, ITERABLE),
        ["note order", RIGHT],
    ),
    Case("dicts and a scale", in_place_of(DATA, MODEL, WRAP, DICTS), [RIGHT]),
    Case(
        "compiled",
        plain((WRAP, WRAP + 'wrapped = torch.compile(wrapped, backend="eager")\n')),
        [RIGHT],
    ),
    Case(
        "a recurrent network with batch norm",
        in_place_of(DATA, RECURRENT, WRAP, EPOCHS),
        [RIGHT, "ok masks", "note batch norm"],
    ),
    Case(
        "bf16",
        plain(
            (LOSS, '        with torch.autocast("cpu", torch.bfloat16):\n    ' + LOSS)
        ),
        [RIGHT],
    ),
    Case("diffusion", before_loss(DIFFUSION), [RIGHT, "ok masks"], ci=True),
    Case("detection", in_place_of(DETECTION), [RIGHT], ci=True),
    Case("padded rows", in_place_of(PADDED), [RIGHT], ci=True),
    Case("an agent without a DataLoader", in_place_of(AGENT), [RIGHT], ci=True),
    Case(
        "its own rows, in eval() mode",
        in_place_of(MODEL, WRAP, OWN_ROWS),
        ["note no samples", "note not replayed"],
    ),
    Case(
        "noise in the data and the step, another sampler, a schedule",
        in_place_of(
            OWN_NOISE,
            change(MODEL, NORM),
            WRAP,
            SCHEDULE,
            change(
                EPOCHS,
                (LOSS, "        x = x + 0.1 * torch.randn_like(x)\n" + LOSS),
                STEP_AND_SCHEDULE,
            ),
        ),
        [
            RIGHT,
            "ok masks",
            "note batch norm",
            ("note global batch", {"one": "16", "two": "32", "how": "grows"}),
        ],
        options=ALONE,
        ci=True,
    ),
    Case(
        "a copied optimizer",
        plain(
            (
                WRAP,
                WRAP + COPIED,
            )
        ),
        [RIGHT],
    ),
    Case(
        "a scripted module with dropout",
        plain(DROPOUT, (WRAP, "model = torch.jit.script(model)\n" + WRAP)),
        [RIGHT, "ok masks"],
    ),
    Case(
        "drop path",
        before_loss("        x = x * (torch.rand(len(x), 1) < 0.8)\n"),
        [RIGHT, "ok masks"],
    ),
    Case(
        "alpha dropout",
        plain(("nn.Tanh(),", "nn.SELU(), nn.AlphaDropout(0.1),")),
        [RIGHT, "ok masks"],
    ),
    Case(
        "mixup",
        before_loss(MIXUP),
        [RIGHT, "ok masks"],
        ci=True,
    ),
    Case(
        "activation checkpointing",
        plain(
            DROPOUT,
            (
                LOSS,
                CHECKPOINTED,
            ),
        ),
        [RIGHT, "ok masks"],
    ),
    Case(
        "each rank takes its rows of the batch",
        plain(
            DROPOUT,
            ("DistributedSampler(dataset, seed=0)", "RandomSampler(dataset)"),
            ("32 // size", "32"),
            ("    sampler.set_epoch(epoch)\n", "    torch.manual_seed(epoch)\n"),
            (
                LOSS,
                f"        torch.manual_seed(100 * i + rank)\n        {HAND}\n{LOSS}",
            ),
        ),
        [RIGHT, "ok masks"],
        ci=True,
    ),
    Case(
        "each rank has data of its own",
        plain(
            (
                "x = torch.randn(320, 8)",
                "torch.manual_seed(rank)\nx = torch.randn(160, 8)",
            ),
            NO_SAMPLER,
            NO_EPOCH,
        ),
        [RIGHT],
    ),
    Case(
        "rank 0 looks at a batch first",
        plain((WRAP, WRAP + "if rank == 0:\n    print(next(iter(loader)))\n")),
        [RIGHT],
        ci=True,
    ),
    Case(
        "loaders made anew in each epoch",
        plain(ANEW),
        [RIGHT],
    ),
    Case("FSDP2", plain((JUST_DDP, FSDP2)), [RIGHT], ci=True),
    Case("FSDP1", plain((JUST_DDP, FSDP1)), ["note sharded"]),
    Case(
        "tensor parallelism",
        plain((JUST_DDP, TENSOR_PARALLEL)),
        ["note tensor parallel"],
    ),
    Case(
        "only five steps",
        plain(),
        [
            ("ok moves", {"steps": "5"}),
            ("ok gradient", {"steps": "5", "off": (0, 1e-12)}),
        ],
        options=f"{QUICK} --steps 5",
    ),
    # What may be intended, or was not judged
    Case(
        "the ranks' last batches differ",
        plain(("sampler=sampler", "sampler=range(rank, 319, size)")),
        [
            "note order",
            RIGHT,
            (
                "note uneven",
                {"first": (9, 19), "rows": "16 and 15", "off": (1e-4, 0.1)},
            ),
        ],
    ),
    Case(
        "a model that draws its own input",
        in_place_of(DATA, DREAM, WRAP, DREAM_EPOCHS),
        ["note no samples", RIGHT, "ok masks"],
    ),
    Case(
        "each rank shuffles everything",
        plain(("model = ", "torch.manual_seed(rank)\nmodel = "), NO_SAMPLER, NO_EPOCH),
        [("note whole epoch", {}), RIGHT],
    ),
    Case(
        "each sample is on both ranks, with other noise",
        in_place_of(OWN_NOISE, REPEATED, MODEL, WRAP, EPOCHS),
        ["note overlap", RIGHT],
    ),
    Case(
        "each rank shuffles with its own seed",
        plain(("seed=0", "seed=rank")),
        [("note whole epoch", {}), RIGHT],
    ),
    Case(
        "shared out indices of different data",
        plain(
            (
                "x = torch.randn(320, 8)",
                "torch.manual_seed(rank)\nx = torch.randn(320, 8)",
            )
        ),
        ["note own data", RIGHT],
    ),
    Case(
        "a split without a seed",
        plain(
            ("torch.manual_seed(0)\n", ""),
            ("x = torch.randn(320, 8)", "x = torch.arange(2560).sin().view(320, 8)"),
            (
                "sampler = D",
                "dataset, _ = random_split(dataset, [256, 64])\nsampler = D",
            ),
            ("torch.manual_seed(rank)\n", ""),
        ),
        ["note own data", "note unseeded", RIGHT],
    ),
    Case(
        "one seed for all ranks",
        plain(DROPOUT, ("torch.manual_seed(rank)\n", "")),
        [RIGHT, ("note masks", {"names": "torch.bernoulli_()"})],
    ),
    Case(
        "drop path with one seed",
        before_loss(
            "        x = x * (torch.rand(len(x), 1) < 0.8)\n",
            ("torch.manual_seed(rank)\n", ""),
        ),
        [RIGHT, ("note masks", {"names": "torch.rand()"})],
    ),
    Case(
        "a buffer of the rank's samples that is not used",
        plain(
            (
                MODEL,
                CENTER + MODEL.replace("nn.Sequential(", "nn.Sequential(Center(), "),
            )
        ),
        [RIGHT, ("note buffers differ", {"names": "['0.center']"})],
    ),
    Case(
        "boxes with the numbers of their samples",
        plain(
            ("loader = DataLoader(dataset, 32 // size, sampler=sampler)\n", BOXES),
            ("(x, y) in enum", "(x, index, y) in enum"),
            ("wrapped(x), y", "wrapped(x)[index], y"),
        ),
        ["note not replayed"],
    ),
    Case(
        "a batch is looked at before training",
        plain(("for epoch", "next(iter(loader))\nfor epoch")),
        [RIGHT, ("ok global batch", {"one": "32"}), "ok alone weights"],
        ALONE,
    ),
    Case(
        "Python draws before the first step, and the loss is a sum over ranks",
        plain(
            ("torch.manual_seed(rank)\n", "import random\n\nrandom.random()\n"),
            ("loss = mse", "loss = size * mse"),
        ),
        [("WRONG gradient", {"first": "0", "scale": "It is 2 times as large."})],
    ),
    Case(
        "numpy draws in the step",
        before_loss(
            "        x = x + numpy.random.default_rng().normal(size=8)\n".replace(
                "default_rng().", ""
            )
        ),
        ["note not replayed"],
    ),
    Case(
        "an endless sampler without a length",
        in_place_of(ENDLESS, MODEL, WRAP, NEXT),
        [RIGHT],
        ci=True,
    ),
    Case(
        "a sum, and numpy draws in the data set",
        change(
            in_place_of(OWN_NOISE, MODEL, WRAP, EPOCHS),
            ("torch.randn(8), x_all", "numpy.random.randn(8), x_all"),
            ("mse(wrapped(x), y)", 'mse(wrapped(x), y, reduction="sum") / 128'),
        ),
        [("WRONG gradient", {"off": (0.2, 5)})],
    ),
    Case(
        "it asks for float32",
        before_loss("        assert x.dtype == torch.float32, x.dtype\n"),
        [
            ("note float32", {"error": "AssertionError: torch.float64"}),
            ("ok gradient", {"off": (1e-9, 1e-4)}),
        ],
    ),
    Case(
        "numpy's float32",
        plain(("x = torch.randn(320, 8)\n", FROM_NUMPY)),
        [RIGHT],
    ),
    Case(
        "a float32 file",
        plain(("x = torch.randn(320, 8)\n", FROM_FILE)),
        [RIGHT],
    ),
    Case(
        "it needs two ranks",
        plain(
            (
                "torch.manual_seed(0)\n",
                "torch.manual_seed(0)\nassert size > 1, 'alone'\n",
            )
        ),
        [
            ("note not replayed", {"ranks": "2"}),
            ("note one process", {"error": "AssertionError: alone"}),
        ],
        options=ALONE,
    ),
    Case(
        "one process has nothing to do",
        plain(("range(2)", "range(2 * (size > 1))")),
        [
            ("note not replayed", {"ranks": "2"}),
            ("note no step", {"what": "one process alone"}),
        ],
        options=ALONE,
    ),
    Case(
        "evaluation with each rank's batch norm",
        plain(
            NORM,
            (
                "    sampler.set_epoch(epoch)\n",
                "    sampler.set_epoch(epoch)\n" + EVALUATION,
            ),
        ),
        [RIGHT, "note batch norm"],
    ),
    Case(
        "nothing like it is printed",
        plain(),
        [RIGHT, ("note not printed", {"pattern": "val_loss"})],
        options=QUICK + COMPARE,
    ),
    Case(
        "a number with a comma, from the log of all ranks",
        plain(
            (TAIL, LOGGING + TAIL),
            KEPT,
        ),
        [RIGHT, ("ok printed", {"pattern": "val_loss"})],
        options=QUICK + COMPARE,
    ),
    # Wrong
    Case(
        "the model is called, not the DDP object",
        plain(("mse(wrapped(x), y)", "mse(model(x), y)")),
        ["WRONG not called"],
    ),
    Case(
        "each rank trains alone, with a group",
        plain((JUST_DDP, "wrapped = model\n")),
        ["WRONG alone"],
        ci=True,
    ),
    Case(
        "no gradient",
        plain((LOSS, LOSS.replace("= ", "= 0 * "))),
        [("WRONG moves", {"steps": "20"})],
    ),
    Case(
        "weights that are not finite",
        plain(
            ("0.01)", "1e300)"),
            ("loss.backward()", "(loss * 1e200).square().backward()"),
        ),
        ["WRONG finite"],
        ci=True,
    ),
    Case(
        "one rank makes another step",
        plain((TAIL, "if rank == 1:\n    optimizer.step()\n" + TAIL)),
        [("WRONG steps", {"one": "20", "two": "21"}), "note left out"],
    ),
    Case(
        "one rank has another batch, under Join",
        plain((EPOCHS, JOINED)),
        [("note steps", {"one": "10", "two": "9"}), "note left out"],
    ),
    Case(
        "a file is missing",
        plain(("x = torch", 'open("data.txt")\nx = torch')),
        [
            (
                "WRONG start",
                {"error": MISSING},
            )
        ],
    ),
    Case(
        "an error after seven steps",
        before_loss("        assert i < 7, 'too many'\n"),
        [("WRONG fails", {"steps": "7", "error": "AssertionError: too many"})],
    ),
    Case(
        "all ranks shuffle with one seed",
        plain(NO_SAMPLER, NO_EPOCH, ("torch.manual_seed(rank)\n", "")),
        ["WRONG samples", "note left out"],
        ci=True,
    ),
    Case(
        "each rank sums its loss",
        before_loss("").replace(
            "mse(wrapped(x), y)", "(wrapped(x) - y).square().sum()"
        ),
        [("WRONG gradient", {"first": "0", "off": (0.49, 0.51)})],
    ),
    Case(
        "a softmax over the rank's samples",
        plain(
            (
                LOSS,
                SOFTMAX,
            )
        ),
        [("WRONG gradient", {"first": "0", "off": (0.01, 1)})],
        ci=True,
    ),
    Case(
        "a loss that is averaged over the ranks before backward()",
        plain(
            (
                "        loss.backward()",
                "        dist.all_reduce(loss)\n        (loss / size).backward()",
            )
        ),
        [("WRONG gradient", {"first": "0", "off": (0.49, 0.51)})],
    ),
    Case(
        "a sum from the second epoch on",
        plain((LOSS, LOSS + "        loss = loss * len(x) if epoch else loss\n")),
        [("WRONG later gradient", {"first": "10", "off": (0.49, 0.51)})],
        ci=True,
    ),
    Case(
        "padded rows, and a mean over the rank's tokens",
        change(
            in_place_of(PADDED),
            ("        dist.all_reduce(total)\n", ""),
            (" * size / total", " / total"),
        ),
        [("WRONG gradient", {"first": "0", "off": (1e-3, 0.5)})],
        ci=True,
    ),
    Case(
        "an agent whose advantages are normalized per rank",
        change(
            in_place_of(AGENT),
            (
                "    loss = -",
                NORMALIZED + "    loss = -",
            ),
        ),
        [("WRONG gradient", {"first": "0", "off": (1e-3, 1)})],
    ),
    Case(
        "detection with a mean over the boxes of the rank",
        change(
            in_place_of(DETECTION),
            ("losses.append(mse(", "losses.append((len(target['boxes']), mse("),
            ('target["boxes"]))\n', 'target["boxes"])))\n'),
            (
                "torch.stack(losses).mean()",
                "sum(n * loss for n, loss in losses) / sum(n for n, _ in losses)",
            ),
        ),
        [("WRONG later gradient", {"first": "1", "off": (0.001, 1)})],
    ),
    Case(
        "random numbers without any seed",
        plain(
            DROPOUT, ("torch.manual_seed(rank)", "torch.manual_seed(time.time_ns())")
        ),
        [RIGHT, "ok masks", "note random", "note random", "note random"],
        options="--skip ranks --skip failure",
    ),
]
# ---- Stop and resume -----------------------------------------------------------------
RESUMABLE = """\
stop, start, done, best = [], 0, 0, 99.0
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start, done, best = saved["epoch"], saved["done"], saved["best"]
for epoch in range(start, 2):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        if epoch == start and i < done:
            continue
        torch.manual_seed(1000 * epoch + 2 * i + rank)
        loss = mse(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        score = float(mse(model(x_all), x_all.sin()).detach())
        model.train()
        best = min(best, score)
        if rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            states |= {"epoch": epoch, "done": i + 1, "best": best}
            torch.save(states, "new.pt")
            os.replace("new.pt", "checkpoint.pt")
        stops = torch.tensor(len(stop))
        dist.all_reduce(stops)
        if stops:
            sys.exit()
    if rank == 0:
        print(f"val_loss {best:.6f}")
"""


def resumable(*pairs):
    text = in_place_of(DATA, change(MODEL, DROPOUT), WRAP, RESUMABLE)
    return change(text, KEPT, *pairs)


FIRST = "stop, start, done, best = [], 0, 0, 99.0\n"
SHARED = """\
if rank == 0:
    torch.save(x, "made.pt")
dist.barrier()
torch.load("made.pt")
"""
RESTORED = """\
if start + done:
    torch.set_rng_state(saved["rng"])
"""
SLEEPS = '            subprocess.Popen(["sleep", "1000"])\n'
SAVED = ("ok lost", {"lost": "0"})
AFTER = "note left out"  # how it continues after a kill
RESUMES = [
    Case(
        "it resumes",
        resumable(),
        [
            RIGHT,
            "ok masks",
            "ok lost",
            "ok rest",
            "ok prints otherwise",
            "ok lost",
            "ok rest",
            "ok prints otherwise",
        ],
        RESUME + COMPARE,
        ci=True,
    ),
    Case(
        "it skips batches in each epoch",
        resumable(("if epoch == start and i < done", "if i < done")),
        [
            RIGHT,
            "ok masks",
            "ok lost",
            ("WRONG no rest", {"made": "8", "left": "14"}),
            AFTER,
        ],
        RESUME,
        ci=True,
    ),
    Case(
        "launched again, it ends at once",
        resumable(
            ('saved["epoch"], saved["done"]', 'saved["epoch"] + 2, saved["done"]')
        ),
        [RIGHT, "ok masks", ("WRONG no rest", {"made": "0", "left": "14"}), AFTER],
        RESUME,
    ),
    Case(
        "launched again, it fails",
        resumable(('saved["best"]', 'saved["worst"]')),
        [RIGHT, "ok masks", ("WRONG again", {"error": "KeyError: 'worst'"}), AFTER],
        RESUME,
    ),
    Case(
        "launched again, it refuses",
        resumable((FIRST, 'if rank == 0:\n    os.mkdir("once")\n' + FIRST)),
        [RIGHT, "ok masks", "LOSES again", "LOSES again"],
        RESUME,
    ),
    Case(
        "it loads other weights",
        resumable(
            (
                "    optimizer.load_state",
                "    model[0].weight.data *= 0.5\n    optimizer.load_state",
            )
        ),
        [RIGHT, "ok masks", "WRONG begin", AFTER],
        RESUME,
    ),
    Case(
        "the epoch of the sampler is not restored",
        resumable(("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch - start)")),
        [RIGHT, "ok masks", "ok lost", "ok lost", "WRONG other samples"],
        RESUME,
    ),
    Case(
        "the optimizer is not restored",
        resumable(('    optimizer.load_state_dict(saved["optimizer"])\n', "")),
        [RIGHT, "ok masks", ("WRONG rest", {"off": (1e-3, 10)}), AFTER],
        RESUME,
    ),
    Case(
        "rank 0's random state for all ranks",
        resumable(
            ("        torch.manual_seed(1000 * epoch + 2 * i + rank)\n", ""),
            ('"best": best}', '"best": best, "rng": torch.get_rng_state()}'),
            (
                "for epoch in range(start",
                RESTORED + "for epoch in range(start",
            ),
        ),
        [
            RIGHT,
            "ok masks",
            ("note other noise", {}),
            "ok rest",
            ("note other noise", {}),
            "ok rest",
        ],
        RESUME,
    ),
    Case(
        "the best score is lost",
        resumable(
            ('saved["best"]\n', "99.0\n"), ("score = float(", "score = epoch + float(")
        ),
        [RIGHT, "ok masks", "ok prints otherwise", "WRONG prints otherwise"],
        RESUME + COMPARE,
    ),
    Case(
        "after SIGTERM a process is left",
        resumable(
            (
                "            sys.exit()",
                SLEEPS + "            sys.exit()",
            )
        ),
        [RIGHT, "ok masks", "WRONG stopped", AFTER],
        RESUME,
    ),
    Case(
        "it saves every fifth step only",
        resumable(
            (
                "        if rank == 0:\n            states",
                "        if rank == 0 and i % 5 == 4:\n            states",
            )
        ),
        [
            RIGHT,
            "ok masks",
            ("LOSES lost", {"done": "5", "lost": "1"}),
            "ok rest",
            ("ok lost", {"done": "15", "lost": "1"}),
            "ok rest",
        ],
        RESUME,
    ),
    Case(
        "a file that rank 0 makes for all",
        resumable((FIRST, SHARED + FIRST)),
        [RIGHT, "ok masks", "note shared disk", "ok machines"],
        MACHINES,
    ),
    Case(
        "both machines save",
        resumable(
            (
                "        if rank == 0:\n            states",
                '        if os.environ["LOCAL_RANK"] == "0":\n            states',
            )
        ),
        [
            RIGHT,
            "ok masks",
            "ok machines",
            ("note both save", {"names": "['checkpoint.pt']"}),
        ],
        MACHINES,
    ),
    Case(
        "torchrun's address as a URL",
        meets_at("tcp://{MASTER_ADDR}:{MASTER_PORT}"),
        [RIGHT, "ok machines"],
        MACHINES,
    ),
    Case(
        "an address of its own",
        meets_at(OWN),
        [
            ("note address", {"address": OWN}),
            RIGHT,
            (
                "WRONG machines start",
                {"error": f"RuntimeError: each machine has its own {OWN}"},
            ),
        ],
        MACHINES,
    ),
    Case(
        "a checkpoint in half precision",
        resumable(
            (
                '{"model": model.state_dict(), ',
                '{"model": {k: v.half() for k, v in model.state_dict().items()}, ',
            )
        ),
        [RIGHT, "ok masks", "WRONG begin", AFTER],
        RESUME,
        ci=True,
    ),
    Case(
        "an order that is drawn before each epoch",
        resumable(
            (
                "    sampler.set_epoch(epoch)\n",
                "    sampler.set_epoch(epoch)\n    torch.manual_seed(epoch)\n"
                "    torch.randperm(320)\n",
            )
        ),
        [RIGHT, "ok masks", SAVED, "ok rest", SAVED, "ok rest"],
        RESUME,
    ),
    Case(
        "all launches save the same file",
        resumable(
            (
                'if os.path.exists("checkpoint.pt"):\n',
                "os.chdir(os.path.dirname(__file__))\n"
                'if os.path.exists("checkpoint.pt"):\n',
            )
        ),
        ["note outside", "note not replayed"],
        RESUME,
        ci=True,
    ),
    Case(
        "SIGTERM is ignored",
        resumable(("if stops:", "if False:")),
        [RIGHT, "ok masks", "LOSES signal"],
        RESUME,
    ),
    Case(
        "too few steps to stop",
        plain(),
        [RIGHT, "note few", "note few"],
        f"{RESUME} --steps 2",
    ),
]

# ---- Scripts that ask for GPUs, on one machine and on two ----------------------------
# Each of these is right on one machine with two GPUs. On two machines with one GPU
# each, rank 1 has no cuda:1.
GPU_GROUP = """\
rank, local, size = [int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
torch.cuda.set_device(local)
dist.init_process_group("nccl")
torch.manual_seed(0)
"""
TWO_GPUS = """\
if torch.cuda.device_count() < 2:
    print("it needs two GPUs")
    sys.exit()
"""
SYNC = "model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()\n"
GPU_WRAP = WRAP.replace("(model)", "(model.cuda(), device_ids=[local])")
GPU_LOSS = "        x, y = x.cuda(non_blocking=True), y.to(f'cuda:{local}')\n"


def on_gpus(*pairs, model=MODEL):
    epochs = change(EPOCHS, (LOSS, GPU_LOSS + LOSS))
    text = HEAD + GPU_GROUP + DATA + model + GPU_WRAP + epochs + TAIL
    return change(text, *pairs)


# Each rank averages a share of the gradient, as an optimizer with sharded states does.
SHARES = """\
class Shares(torch.optim.SGD):
    def step(self):
        for weight in model.parameters():
            total = weight.grad.flatten()
            share = total[: len(total) // size].clone()
            mean, more = dist.ReduceOp.AVG, {"async_op": True}
            work = dist.reduce_scatter_tensor(share, total, op=mean, **more)
            work.get_future().wait()
            work = dist.all_gather_into_tensor(total, share, **more)
            work.get_future().wait()
            weight.data -= 0.1 * total.view_as(weight)


wrapped, optimizer = model, Shares(model.parameters(), 0.1)
"""
SCALED = [
    ("rank, local,", "scaler = torch.amp.GradScaler()\nrank, local,"),
    ("loss.backward()", "scaler.scale(loss).backward()"),
    ("optimizer.step()", "scaler.step(optimizer)\n        scaler.update()"),
]
ORDINAL = (
    "RuntimeError: CUDA error: invalid device ordinal: cuda:1 on a machine with 1 "
    "ranks, which seems to have a GPU for each"
)
BY_RANK = [RIGHT, ("WRONG machines start", {"error": ORDINAL})]
GPUS = [
    Case("GPUs by LOCAL_RANK", on_gpus(), [RIGHT, "ok machines"], MACHINES, ci=True),
    Case(
        "set_device(rank)",
        on_gpus(("set_device(local)", "set_device(rank)")),
        BY_RANK,
        MACHINES,
        ci=True,
    ),
    Case(
        "a GradScaler, and workers that persist",
        on_gpus(
            *SCALED, ("32 // size, ", "16, num_workers=1, persistent_workers=True, ")
        ),
        [RIGHT, ("note global batch", {"one": "16", "two": "32"})],
        ALONE,
        ci=True,
    ),
    Case(
        "all ranks on GPU 0",
        on_gpus(("torch.cuda.set_device(local)\n", "local = 0\n")),
        ["WRONG same gpu", RIGHT],
        ci=True,
    ),
    Case(
        "device_ids=[rank]",
        on_gpus(("device_ids=[local]", "device_ids=[rank]")),
        BY_RANK,
        MACHINES,
    ),
    Case(
        "the local rank's share, where a machine must have two GPUs",
        on_gpus(
            ("torch.cuda.set", TWO_GPUS + "torch.cuda.set"),
            ("(dataset, seed=0)", "(dataset, size, local, seed=0)"),
        ),
        [RIGHT, "WRONG machines"],
        MACHINES,
    ),
    Case(
        "to cuda:rank",
        on_gpus(("cuda:{local}", "cuda:{rank}")),
        BY_RANK,
        MACHINES,
    ),
    Case(
        "rank 0 evaluates, and DDP broadcasts its buffers",
        on_gpus((TAIL, "if rank == 0:\n    wrapped(x)\n"), model=change(MODEL, NORM)),
        ["WRONG fails"],
    ),
    Case(
        "a batch for each machine",
        on_gpus(("32 // size", "32 // torch.cuda.device_count()")),
        [RIGHT, ("note machine batch", {"one": "32", "two": "64"})],
        MACHINES,
    ),
    Case(
        "SyncBatchNorm",
        on_gpus(model=change(MODEL, NORM) + SYNC),
        [RIGHT],
        ci=True,
    ),
    Case(
        "batch norm of each rank on GPUs",
        on_gpus(model=change(MODEL, NORM)),
        [RIGHT, "note batch norm"],
    ),
    Case("shares of the gradient", on_gpus((GPU_WRAP, SHARES)), [RIGHT], ci=True),
    Case(
        "sums of shares of the gradient",
        on_gpus((GPU_WRAP, SHARES.replace("AVG", "SUM"))),
        [("WRONG gradient", {"first": "0", "scale": "It is 2 times as large."})],
    ),
    Case(
        "the random state of the GPU",
        on_gpus(
            (
                WRAP[-25:],
                WRAP[-25:]
                + "torch.cuda.manual_seed_all(1)\nstate = torch.cuda.get_rng_state()\n",
            )
        ),
        [RIGHT],
    ),
    Case(
        "DataParallel on one process",
        on_gpus(
            (
                'dist.init_process_group("nccl")\n',
                'if size > 1:\n    dist.init_process_group("nccl")\n',
            ),
        )
        .replace(
            "DistributedSampler(dataset, seed=0)",
            "DistributedSampler(dataset, size, rank)",
        )
        .replace("wrapped = D", "wrapped = nn.DataParallel(model) if size == 1 else D")
        .replace(TAIL, ""),
        [RIGHT, "ok global batch", "ok alone weights"],
        ALONE,
    ),
    Case(
        "what no CPU can do",
        on_gpus(
            (
                "torch.manual_seed(0)\n",
                "torch.manual_seed(0)\ngraph = torch.cuda.CUDAGraph()\n",
            )
        ),
        [("note imitated", {})],
    ),
]

# ---- Other libraries -----------------------------------------------------------------
LIBRARY_HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.linspace(0, 99, 2560).sin().view(320, 8)
dataset = TensorDataset(x, x.sin())
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
"""
ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator()
set_seed(0)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(dataset, 32 // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
accelerator.end_training()
"""
# Rank 0 reads the batches for all ranks, where there is no index.
STREAM = ACCELERATE.replace("DataLoader(dataset,", "DataLoader(Stream(),").replace(
    "shuffle=True", "shuffle=False"
)
STREAM = (
    """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(dataset)


"""
    + STREAM
)
LIGHTNING = """
import lightning


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


lightning.seed_everything(0)
loader = DataLoader(dataset, 16, shuffle=True)
trainer = lightning.Trainer(
    max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Model(), loader)
"""
FABRIC = """
from lightning.fabric import Fabric

fabric = Fabric()
fabric.launch()
fabric.seed_everything(0)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(dataset, 16, shuffle=True))
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
"""
TRAINER = """
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        row = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": row, "labels": LABELS}


options = TrainingArguments(
    "out",
    per_device_train_batch_size=8,
    num_train_epochs=2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    max_grad_norm=1e9,
)
"""
GPT = (
    TRAINER.replace("LABELS", "row")
    + """
config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
Trainer(GPT2LMHeadModel(config), options, train_dataset=Rows()).train()
"""
)
CLASSIFIER = (
    TRAINER.replace("LABELS", "(row.sum() % 2).long()")
    + """
config = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
)
Trainer(BertForSequenceClassification(config), options, train_dataset=Rows()).train()
"""
)
LIBRARIES = [
    Case("accelerate", ACCELERATE, [RIGHT], ci=True),
    Case("accelerate", STREAM, ["note order", RIGHT]),
    Case("lightning", LIGHTNING, [RIGHT], ci=True),
    Case("lightning.fabric", FABRIC, [RIGHT]),
    # The Trainer sets the same seed on all ranks.
    Case("transformers", GPT, [RIGHT, "note masks"], ci=True),
]


# ---- Run them ------------------------------------------------------------------------
CASES = FAULTS + SMALL + RESUMES + GPUS


def parameters(cases):
    marks = {True: [slow, pytest.mark.check_ci], False: [slow]}
    return [pytest.param(case, id=case.name, marks=marks[case.ci]) for case in cases]


@pytest.mark.parametrize("case", parameters(CASES))
def test_each_fault_and_only_faults_are_found(case, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(case.script)
    assert_said(run_check(script, options=case.options), case.expected)


@pytest.mark.parametrize("case", parameters(LIBRARIES))
def test_library(case, tmp_path):
    pytest.importorskip(case.name)
    script = tmp_path / "mine.py"
    script.write_text(LIBRARY_HEAD + case.script)
    assert_said(run_check(script, options=case.options), case.expected)


@pytest.mark.check_ci
@slow
def test_trainer_scales_the_gradient_of_a_classifier(tmp_path):
    """Since version 5. It multiplies the loss by the number of ranks."""
    transformers = pytest.importorskip("transformers")
    script = tmp_path / "mine.py"
    script.write_text(LIBRARY_HEAD + CLASSIFIER)
    text = run_check(script, options=QUICK)
    wrong = ("WRONG gradient", {"first": "0", "off": (0.99, 1.01)})
    is_new = int(transformers.__version__.split(".")[0]) >= 5
    assert_said(text, [wrong if is_new else RIGHT, "note masks"])


@slow
def test_module_with_relative_imports(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "data.py").write_text(HEAD + GROUP + DATA)
    (package / "train.py").write_text("from .data import *\n" + MODEL + WRAP + EPOCHS)
    words = f"{QUICK} -m"
    assert_said(run_check("package.train", options=words, cwd=tmp_path), [RIGHT])


@slow
def test_files_are_linked_and_each_rank_gets_its_own_local_rank(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/1.txt").write_text("1")
    (tmp_path / "2.txt").write_text("2")
    script = tmp_path / "mine.py"
    seed = 'open("1.txt").read() + open("../2.txt").read()'
    script.write_text(
        on_gpus(
            ("torch.manual_seed(0)", f"torch.manual_seed(int({seed}))"),
            ("set_device(local)", "set_device(int(sys.argv[1]))"),
        )
    )
    text = run_check(
        script,
        "${local_rank}",
        options=f"{QUICK} --link 1.txt --link ../2.txt",
        cwd=tmp_path / "folder",
    )
    assert_said(text, [RIGHT])


TINY = "--device cpu --dim 16 --layers 1 --heads 2 --seq_len 32 --batch_size {8}"
TINY += " --max_steps 20 --log_every 1 --save_every 5 --dropout 0.1 --out {out}"
RECIPES = ["", "fp16", "fsdp2", "keep_last", "where_the_time_goes"]


@slow
@pytest.mark.parametrize("name", RECIPES)
def test_program_and_its_recipes(name, tmp_path, data):
    script = SCRIPT
    if name:
        script = tmp_path / "mine.py"
        launch(sys.executable, ROOT / "recipes/recipe.py", name, script).end()
    words = [*TINY.split(), "--data", data]
    text = run_check(script, *words, options=COMPARE)
    lines = [line for line, _ in lines_of(text)]
    assert not [line for line in lines if line.startswith(("WRONG", "LOSES"))]
    assert RIGHT[0] in lines and "ok rest" in lines and "ok machines" in lines


@slow
@pytest.mark.parametrize("name", ["idea", "ported", "resumed", "no_data"])
def test_example(name):
    """Those that save no checkpoint lose all steps."""
    text = run_check(ROOT / f"examples/{name}.py")
    lines = [line for line, _ in lines_of(text)]
    bad = [line for line in lines if line.startswith(("WRONG", "LOSES"))]
    saves = name in ("resumed", "no_data")
    assert bad == [LOSES_ALL, LOSES_ALL] * (not saves)
    assert lines.count("ok gradient") == 2 and "ok machines" in lines


@processes
def test_right_script_quickly(tmp_path):
    """In float32, it trains to the same bits as without check.py."""
    script = tmp_path / "mine.py"
    told = 'torch.save(model.state_dict(), "model.pt")\n'
    asks = before_loss("        assert x.dtype == torch.float32\n")
    script.write_text(change(asks, (TAIL, told + TAIL)))
    launch(*torchrun(2, script), cwd=tmp_path).end()
    text = run_check(script, options=QUICK)
    assert_said(text, ["note float32", "ok gradient"])
    folder = Path(re.search("Everything that the launches said: (.*)", text)[1])
    a, b = tmp_path / "model.pt", folder / "2-ranks-float32/machine0/folder/model.pt"
    a, b = [flatten(torch.load(path, weights_only=True)) for path in (a, b)]
    assert a == b


@processes
def test_a_fault_is_found_quickly(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(plain(("mse(wrapped(x), y)", "mse(model(x), y)")))
    text = run_check(script, options=QUICK)
    assert_said(text, ["WRONG not called"])


# ---- Each line is said by some script ------------------------------------------------
def test_each_row_is_said():
    """Of each row in check.py: when it is ok, and when it is not."""
    said = set()
    for case in CASES + LIBRARIES:
        for line in case.expected:
            said.add(line if isinstance(line, str) else line[0])
    # By test_lines_that_did_not_run() and test_timeout_leaves_no_process()
    said |= {"note lines", "note slow"}
    missing = []
    for name, row in check.ROWS.items():
        if row.ok and f"ok {name}" not in said:
            missing.append(f"ok {name}")
        words = [f"{word} {name}" for word in ("WRONG", "LOSES", "note")]
        if row.bad and not said & set(words):
            missing.append(name)
    assert not missing


@pytest.mark.parametrize(
    "word, row, values, line",
    [
        (
            "WRONG",
            "samples",
            {"share": 1},
            "WRONG  all ranks train on the same samples",
        ),
        ("ok", "samples", {}, "ok     the ranks train on different samples"),
        ("WRONG", "alone", {}, "WRONG  every rank trains alone"),
        (
            "note",
            "masks",
            {"names": "torch.rand()"},
            "note   all ranks draw the same random numbers: torch.rand()",
        ),
        (
            "note",
            "global batch",
            {"one": 16, "two": 32, "how": "grows"},
            "note   16 samples a step on one process, 32 on two ranks: the global "
            "batch grows",
        ),
    ],
)
def test_line_says_what_is_the_case(word, row, values, line, capsys):
    here = check.Check(check.parse(["--quick", __file__]))
    here.line(word, row, **values)
    assert capsys.readouterr().out.splitlines()[0] == f"  {line}"


# ---- Its functions -------------------------------------------------------------------
@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """One that replays, and has joined nothing yet."""
    monkeypatch.setenv("CHECK_LOG", str(tmp_path))
    recorder = check.Recorder(types.SimpleNamespace(rank=0, step=0), {})
    recorder.rows = [2, 2]
    yield recorder
    recorder.said.close()


def said(recorder):
    return Path(recorder.said.name).read_text()


def test_batches_are_merged(recorder):
    a, b = torch.tensor([1, 2]), torch.tensor([3, 4])
    assert recorder.merge([a, b]).tolist() == [1, 2, 3, 4]
    merged = recorder.merge([{"x": a, "n": ["p", "q"]}, {"x": b, "n": ["r", "s"]}])
    assert merged["x"].tolist() == [1, 2, 3, 4] and merged["n"] == ["p", "q", "r", "s"]
    columns = recorder.merge([[a, a], [b, b]], top=True)
    assert [column.tolist() for column in columns] == [[1, 2, 3, 4]] * 2
    images = [torch.zeros(3, 4), torch.zeros(3, 5)]  # samples, not columns
    merged = recorder.merge([images, [torch.ones(3, 6), torch.ones(3, 7)]])
    assert [image.shape[1] for image in merged] == [4, 5, 6, 7]
    assert recorder.merge([("a", "b"), ("c", "d")]) == ("a", "b", "c", "d")
    time_first = recorder.merge([torch.zeros(5, 2), torch.ones(5, 2)])
    assert time_first.shape == (5, 4) and said(recorder) == ""
    objects = recorder.merge([(object(), [a, a]), (object(), [b, b])], top=True)
    assert len(objects) == 2 and len(objects[1]) == 4
    assert "\tbatches with a value of type object, which" in said(recorder)
    recorder.stacked = True
    boxes = recorder.merge([(a, torch.ones(3, 6)), (b, torch.ones(1, 6))], top=True)
    assert boxes[0].tolist() == [1, 2, 3, 4] and boxes[1].shape == (4, 6)
    assert "problem\ta batch of 2 has a tensor of [3, 6], which" in said(recorder)
    recorder.order = "row by row"
    assert recorder.merge([a, b]).tolist() == [1, 3, 2, 4]
    assert recorder.merge([("a", "b"), ("c", "d")]) == ("a", "c", "b", "d")
    recorder.merge([torch.tensor(1), torch.tensor(2)])
    assert "problem\ta batch has a number that differs" in said(recorder)


def test_rows_are_padded_to_the_longest(recorder):
    rows = [torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([[4, 5], [6, 0]])]
    merged = recorder.merge(rows)
    assert merged.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 0], [6, 0, 0]]
    assert said(recorder) == "padded\n"
    ends_with_9 = torch.tensor([[1, 9]]), torch.tensor([[2, 9, 9]])
    assert check.padding_of(ends_with_9, 0) == 9


def test_random_numbers_are_joined(recorder):
    a, b = torch.rand(8, 2), torch.rand(8, 2)
    whole = torch.empty(16, 2)
    joined = recorder.joined("rand", whole, 0, [(0, a), (0, b)])
    assert torch.equal(joined, torch.cat([a, b]))
    assert said(recorder) == "different\ttorch.rand()\n"
    recorder.joined("rand", whole, 0, [(0, a), (0, a)])
    assert said(recorder).endswith("alike\ttorch.rand()\n")
    assert recorder.joined("rand", a, 0, [(0, a), (0, a)]) is a  # for the whole batch
    order = torch.tensor([1, 0])
    joined = recorder.joined("randperm", torch.empty(4), 4, [(2, order), (2, order)])
    assert joined.tolist() == [1, 0, 3, 2]
    assert recorder.joined("rand", a, 0, [(0, a), (0, b)]) is None
    assert said(recorder).endswith(
        "each rank draws torch.rand() of [8, 2] for itself\n"
    )
    assert recorder.joined("rand", a, 0, [(0, a), None]) is None
    assert said(recorder).endswith("is drawn more often than on the ranks\n")


def test_distances():
    assert check.relative([3, 4], [3, 4]) == 0
    assert check.relative([3, 4], [6, 8]) == 1
    assert check.relative([0, 0], [0, 2]) == 2
    assert (
        check.relative([3, 4], [3])
        == check.relative([1], [float("nan")])
        == float("inf")
    )
    launched = types.SimpleNamespace(starts={0: {"weights": [0, 0]}})
    steps = [{"optimizer": 0, "step": i, "weights": [3, 4]} for i in range(3)]
    other = [*steps[:2], {"optimizer": 0, "step": 2, "weights": [3, 5]}]
    assert check.drift(steps, steps, launched, 1e-6) == (0, None)
    assert check.drift(steps, other, launched, 1e-6) == (0.2, 2)
    other[1] = {"optimizer": 0, "step": 1, "weights": [3, float("nan")]}
    assert check.drift(steps, other, launched, 1e-6)[1] == 1


def test_place_of_a_relaunch():
    def launched(first, *bits):
        steps = [{"optimizer": 0, "bits": [number]} for number in bits]
        start = {"optimizer": 0, "bits": [first]}
        return types.SimpleNamespace(starts={0: start}, steps=[steps])

    whole = launched(0, 1, 2, 3, 3, 4)
    assert check.place_of(launched(0, 1), whole) == 0
    assert check.place_of(launched(2, 3, 3, 4), whole) == 2
    assert check.place_of(launched(3, 3, 4), whole) == 3
    assert check.place_of(launched(3, 4), whole) == 3 or 4
    assert check.place_of(launched(9, 4), whole) is None


PRINTED = [
    ("loss 0.4321,", ["0.4321"]),
    ("loss 95.2%", ["95.2"]),
    ("loss tensor(0.43)", ["0.43"]),
    ("loss nan", ["nan"]),
    ("loss -1e-05", ["-1e-05"]),
    ("loss none", []),
    ("loss 1\nloss 2", ["1", "2"]),
    ("loss 1\nloss 1", ["1", "1"]),
]


@pytest.mark.parametrize("text, numbers", PRINTED)
def test_printed_numbers(text, numbers):
    files = {"rank0.out": text, "errors": ""}
    run = types.SimpleNamespace(read=files.get)
    assert check.printed(run, r"loss (\S+)") == numbers


def test_numbers_that_all_ranks_log_count_once():
    files = {"rank0.out": "", "errors": "rank 0: loss 3\nrank 1: loss 3\nloss 2\n"}
    run = types.SimpleNamespace(read=files.get)
    assert check.printed(run, r"loss (\S+)") == ["3", "2"]


AGREE = [
    ("0.4321", "0.4322", True),
    ("0.4321", "0.4323", False),
    ("5", "6", False),
    ("nan", "nan", True),
    ("nan", "0.1", False),
]


@pytest.mark.parametrize("one, two, same", AGREE)
def test_numbers_agree_but_for_the_last_digit(one, two, same):
    here = check.Check(check.parse(["--quick", __file__]))
    assert here.agree(one, two) == same


def test_words_are_filled_in():
    folder = Path("/folder")
    words = ["{32}", "{ranks}", "{out}/x", "{", "a{8}b"]
    filled = [check.fill_in(word, 4, folder) for word in words]
    assert filled == ["8", "4", "/folder/out/x", "{", "a2b"]


def test_lines_that_did_not_run(tmp_path, capsys):
    code = compile(
        "def f(x):\n    if x:\n        return 1\n\n    return 2\n", "f", "exec"
    )
    assert sorted(check.lines_in(code)) == [1, 2, 3, 5]
    ran = {"lines0": [[1, 2, 5], [1, 2, 3, 5]], "lines1": [[1, 2], [1, 2, 3, 5]]}
    texts = {name: json.dumps(lines) for name, lines in ran.items()}
    run = types.SimpleNamespace(read=texts.get)
    here = check.Check(check.parse(["--quick", __file__]))
    here.check_lines(run)
    text = "note   these lines of test_check.py did not run on two ranks: 3"
    assert text in capsys.readouterr().out


def test_first_traceback():
    text = "[rank1]: Traceback (most recent call last):\n[rank0]: warning\n"
    text += '[rank1]:   File "mine.py", line 1\n[rank1]:     work()\n'
    text += '[rank1]:   File "/lib/python3/io.py", line 1\n'
    text += "[rank1]: ValueError: no\n[rank1]: more\n"
    last = '  File "mine.py", line 1\n    work()\nValueError: no'
    assert check.first_traceback(text) == last
    assert check.first_traceback("last words") == "last words"
    peer = "[rank0]: Traceback (most recent call last):\n"
    peer += '[rank0]:   File "mine.py", line 2\n[rank0]: RuntimeError: closed by peer\n'
    assert check.first_traceback(peer + text) == last
    assert check.first_traceback(peer).endswith("closed by peer")
    # Two ranks that write at the same time
    both = "Traceback (most recent call last):\n" * 2
    both += '  File "mine.py", line 3\n    assert x\nAssertionError\n'
    assert check.first_traceback(both).endswith("assert x\nAssertionError")


CPU_GAPS = """
import torch, check

check.pretend_that_the_cpu_is_a_gpu()
x = torch.ones(4)
assert x.cuda().is_cuda and x.to(1) is not None
torch.cuda.get_device_capability()
torch.cuda.get_device_name(0)
torch.cuda.get_device_properties(0).total_memory
torch.cuda.mem_get_info()
torch.cuda.max_memory_allocated()
torch.cuda.reset_peak_memory_stats()
torch.cuda.get_rng_state()
torch.cuda.get_rng_state_all()
torch.cuda.manual_seed_all(0)
torch.cuda.Event(enable_timing=True).record()
torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
with torch.cuda.device(0), torch.device("cuda"):
    torch.zeros(2)
torch.Generator(device="cuda")
torch.amp.GradScaler("cuda").scale(x.sum())
with torch.cuda.amp.autocast():
    torch.cuda.FloatTensor([1.0])
torch.tensor([1], device=0)
torch.nn.Linear(2, 2, device="cuda")
torch.nn.Parameter(x).data.to("cuda")
torch.nn.utils.rnn.pack_sequence([x]).to("cuda")
torch.nn.DataParallel(torch.nn.Linear(4, 1))(x)
torch.cuda.nccl.version()
torch.save(x, "x.pt")
torch.load("x.pt", "cuda")
torch.load("x.pt", "cuda:1", weights_only=True)
torch.set_default_device("cuda")
torch.zeros(2)
for use in (
    torch.cuda.set_device,
    x.to,
    torch.nn.Linear(2, 2).to,
    x.cuda,
    torch.cuda.get_device_properties,
):
    try:
        use("cuda:2")
    except RuntimeError as error:
        assert "invalid device ordinal" in str(error)
    else:
        raise AssertionError(use)
try:
    torch.cuda.CUDAGraph()
except check.CannotImitate:
    print("all answered")
"""


@processes
def test_pretended_gpus_answer(tmp_path):
    env = {"LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(Path(check.__file__).parent)}
    words = [sys.executable, "-W", "ignore", "-c", CPU_GAPS]
    assert launch(*words, env=env, cwd=tmp_path).end() == "all answered\n"


# ---- Its end, and bad input ----------------------------------------------------------
def watched(folder):
    """The environment of a rank that check.py watches. It writes to this folder."""
    options = {
        "float64": False,
        "gpus": False,
        "lines": False,
        "probe": False,
        "steps": 0,
    }
    options |= {"disturbance": ["", 0, 0]}
    env = {"CHECK_LOG": folder, "CHECK_OPTIONS": json.dumps(options)}
    return {**env, "CHECK_PARENT": str(os.getpid())}


BUSY_GLOO = """
if rank == 0:
    dist.all_reduce(torch.ones(1), async_op=True)  # a thread waits for rank 1
else:
    import time
    time.sleep(2)
    dist.all_reduce(torch.ones(1))
"""


@processes
def test_a_global_ddp_object_does_not_hang_at_the_exit(tmp_path):
    """A thread of gloo needs the GIL at the end of what it does."""
    script = tmp_path / "mine.py"
    script.write_text(plain((TAIL, BUSY_GLOO + TAIL)))
    # The ranks belong to torchrun, which has another pid than this process.
    ranks = ["bash", "-c", 'CHECK_PARENT=$$ exec "$@"', "bash"]
    words = [*ranks, *torchrun(2, check.__file__, script)]
    launch(*words, env=watched(tmp_path)).end()


LAST_WORDS = """
import sys
class Global:
    def __del__(self, say=print, is_finalizing=sys.is_finalizing):
        say("finalizing:", is_finalizing())
kept = Global()
kept.itself = kept  # a DDP object is part of a cycle, too
"""


@processes
def test_globals_go_before_python_ends(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(LAST_WORDS)
    env = {"RANK": "0", **watched(tmp_path)}
    launch(sys.executable, check.__file__, script, env=env).end()
    assert "finalizing: False" in (tmp_path / "rank0.out").read_text()
    env["CHECK_PARENT"] = "1"
    said = launch(sys.executable, check.__file__, script, env=env).end(1)
    assert said.endswith("torchrun was killed while it started this rank\n")


BAD = [
    ("missing.py", "there is no missing.py"),
    ("here.py --n {0}", "{0} cannot be divided by 1 ranks: choose a multiple"),
    ("here.py --n {3}", "{3} cannot be divided by 2 ranks"),
    ("here.py --n {2}", "{2} cannot be divided by 4 ranks"),
    ("--ranks 2 here.py", "--ranks 2: give two or more numbers"),
    ("--ranks 0,2 here.py", "--ranks 0,2: give two"),
    ("--compare x here.py", "--compare x: put the number in parentheses"),
    ("--compare ( here.py", "--compare (: missing )"),
    ("--link nowhere here.py", "there is no nowhere"),
]


@pytest.mark.parametrize("words, said", BAD)
def test_bad_input_gets_one_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here.py").touch()
    with pytest.raises(SystemExit, match=re.escape(said)) as error:
        check.parse(words.split())
    assert "\n" not in str(error.value)


SPAWN = """\
import torch

def worker(rank):
    print(rank)

if __name__ == "__main__":
    torch.multiprocessing.spawn(worker, nprocs=2)
"""
REFUSED = [
    pytest.param("print('hello')", "makes no step of a torch optimizer", marks=slow),
    pytest.param(SPAWN, "it starts its own ranks", marks=processes),
]


@pytest.mark.parametrize("text, said", REFUSED)
def test_script_that_cannot_be_checked_gets_one_line(text, said, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(text)
    process = launch(sys.executable, check.__file__, script)
    lines = process.end(1).splitlines()
    assert lines[-1].startswith("mine.py") and said in lines[-1] and len(lines) == 2
    process.leaves_none()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=processes),
        pytest.param(signal.SIGTERM, marks=slow),
    ],
)
def test_interrupted_it_leaves_no_process(number, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import time\ntime.sleep(999)")
    process = launch(sys.executable, check.__file__, script)
    process.wait_for("Two ranks")
    for _ in harness.ticks():
        if len(process.left) >= 4:  # check.py, and torchrun as its fork, and two ranks
            break
    process.send(number)
    assert process.end(1).endswith("interrupted: no process is left\n")
    process.leaves_none()


@slow
@pytest.mark.parametrize("waits", ["time.sleep(999)", "while True: pass"])
def test_timeout_leaves_no_process(tmp_path, waits):
    """What still computes is slow, and does not hang."""
    script = tmp_path / "mine.py"
    script.write_text(f"import time\n{waits}")
    text = run_check(script, options="--timeout 20")
    line = "note slow" if "while" in waits else "WRONG hang"
    assert_said(text, [(line, {"timeout": "20"})])


def test_help_and_pages(capsys):
    with pytest.raises(SystemExit):
        check.parse(["--help"])
    said = capsys.readouterr().out
    assert "python check.py mine.py" in said and "--compare REGEX" in said
    for page in check.PAGES.values():
        path, _, heading = page.partition(", ")
        text = (ROOT / path).read_text()
        assert re.search(rf"^#.*{heading.strip(chr(34))}", text, re.MULTILINE)
