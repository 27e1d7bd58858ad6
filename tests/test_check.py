"""Tests of check.py: it finds what is wrong, and says nothing about what is right.

    make test-check                                      all: half an hour or less
    make test-check ARGS="-k codebook -s"                one fault, with what is said

Faults are put into examples/resumed.py, in place of the right lines. check.py must name
each of them in the lines listed beside it, and in no others.
"""

import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import check
import harness
from harness import ROOT, SCRIPT, flatten, launch, processes, torchrun

slow = pytest.mark.check
TRAINING = "--ranks 1,2 --skip resume --skip machines --skip failure"
RESUME = "--skip ranks --skip machines --skip failure"
MACHINES = "--skip ranks --skip resume --skip failure"
FAILURE = "--skip ranks --skip resume --skip machines"
AS_IT_IS = f"{MACHINES} --skip machines"
# Short forms of what the lines say
WEIGHTS = "WRONG all ranks have the same weights after each step"
BUFFERS = "WRONG all ranks have the same buffers"
SAMPLES = "WRONG the ranks train on different samples"
ORDER = "WRONG each epoch has its own order"
DROPOUT = "WRONG the ranks use different dropout masks"
GRADIENT = "WRONG 2 ranks: the same gradient in the first step"
TRAINED = "WRONG 2 ranks: the same weights after 93 steps"
PRINTED = r"WRONG 2 ranks: the same val_loss\s(\S+)"
REST = "WRONG it trains as if nothing had happened"
STARTS_OVER = "LOSES it starts over"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Several launches on a busy machine take long."""
    monkeypatch.setattr(harness, "DEADLINE", 900)


def run_check(script, *words, options=""):
    """Run check.py to its end. Returns what it said."""
    command = [sys.executable, check.__file__, *options.split(), script, *words]
    process = launch(*command, env={"TMPDIR": tempfile.gettempdir()})
    for _ in harness.ticks():
        if process.code is not None:
            break
    print(process.text)
    if process.code != int("  WRONG" in process.text):
        harness.fail(f"exit code {process.code}")
    process.leaves_none()
    return process.text


def complaints(text):
    """The lines that say WRONG or LOSES, without the numbers at their ends."""
    lines = re.findall(r"^  (WRONG|LOSES) +(.*)$", text, re.MULTILINE)
    number = r":( all)? [\w.+-]+( steps.*| apart)?$"
    return [re.sub(number, "", f"{word} {what}") for word, what in lines]


def assert_found(text, *expected):
    if sorted(complaints(text)) != sorted(expected):
        harness.fail(f"found {complaints(text)}, not {list(expected)}")


def change(text, *pairs):
    """Replace lines. Each of the old ones must be there once."""
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


# ---- Faults --------------------------------------------------------------------------
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
# (name, right changes, right lines, wrong lines, options, what must be found)
FAULTS = [
    (
        "model(x) instead of wrapped(x)",
        "",
        "mse_loss(wrapped(x), y)",
        "mse_loss(model(x), y)",
        TRAINING,
        [WEIGHTS, GRADIENT, TRAINED],
    ),
    (
        "a sum instead of a mean",
        "",
        "mse_loss(wrapped(x), y)",
        'mse_loss(wrapped(x), y, reduction="sum") / 256',
        TRAINING,
        [GRADIENT, TRAINED],
    ),
    (
        "the same dropout on all ranks",
        "dropout",
        SEED,
        'ddp.seed_all("step", 0, step)',
        TRAINING,
        [DROPOUT],
    ),
    (
        "no sampler: all ranks train on rank 0's samples",
        "",
        "        epoch = self.epoch\n",
        "        epoch, self.rank = self.epoch, 0\n",
        TRAINING,
        [SAMPLES, GRADIENT, TRAINED],
    ),
    (
        "no set_epoch",
        "",
        "sampler.set_epoch(epoch, done)",
        "sampler.start = done",
        TRAINING,
        [ORDER],
    ),
    (
        "the global batch grows with the ranks",
        "",
        "batch_size = 32 // world_size",
        "batch_size = 32",
        TRAINING,
        [GRADIENT, TRAINED],
    ),
    (
        "the optimizer is not saved",
        "",
        'parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}',
        'parts = {"model": model, "scheduler": scheduler}',
        RESUME,
        [REST, REST],
    ),
    (
        "the scheduler is not saved",
        "",
        'parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}',
        'parts = {"model": model, "optimizer": optimizer}',
        RESUME,
        [REST, REST],
    ),
    (
        "the epoch starts over",
        "",
        'saved["step"], saved["epoch"], saved["done"]',
        'saved["step"], saved["epoch"], 0',
        RESUME,
        [REST, REST],
    ),
    (
        "a learning rate by rank",
        "",
        "model.parameters(), 0.2,",
        "model.parameters(), 0.2 + 0.01 * rank,",
        TRAINING,
        [WEIGHTS, TRAINED],
    ),
    (
        "data seeded by rank",
        "",
        "torch.manual_seed(0)",
        "torch.manual_seed(rank)",
        TRAINING,
        [GRADIENT, TRAINED],
    ),
    (
        "all ranks evaluate rank 0's samples",
        "",
        "range(rank, len(val_set), world_size)",
        "range(0, len(val_set), world_size)",
        TRAINING,
        [PRINTED],
    ),
    (
        "the evaluation counts padded samples",
        "",
        "val_samples = range(rank, len(val_set), world_size)",
        "val_samples = ddp.DistributedSampler(val_set, shuffle=False)",
        TRAINING,
        [PRINTED],
    ),
    (
        "SIGTERM is caught, and nothing stops",
        "",
        "stopped = stop.requested()",
        "stopped = 0",
        RESUME,
        ["WRONG SIGTERM stops it"],
    ),
    (
        "no save when it gets SIGTERM",
        "",
        "if stopped or step % 20 == 0:",
        "if step % 20 == 0:",
        RESUME,
        ["LOSES it continues after step 40"],
    ),
    (
        "no checkpoint",
        "",
        "        ddp.save_checkpoint(path,",
        "        return\n        ddp.save_checkpoint(path,",
        RESUME,
        [STARTS_OVER, STARTS_OVER],
    ),
    (
        "a codebook of each rank's own samples",
        "codebook",
        "means = ddp.all_gather(x.mean(0).detach())",
        "means = [x.mean(0).detach()]",
        TRAINING,
        [BUFFERS, GRADIENT, TRAINED],
    ),
    (
        "weights that are normalized per rank",
        "weighted",
        "mean = torch.stack(ddp.all_gather(size.mean())).mean()",
        "mean = size.mean()",
        TRAINING,
        [GRADIENT, TRAINED],
    ),
    (
        "local numbers as seeds",
        "noise",
        "seeds = range(rank, 32, world_size)",
        "seeds = range(32 // world_size)",
        TRAINING,
        [GRADIENT, TRAINED],
    ),
    (
        "noise with the rank's shape",
        "",
        LOSS,
        '            ddp.seed_all("noise", 0, step)\n'
        "            x = x + 0.1 * torch.randn_like(x)\n" + LOSS,
        TRAINING,
        [GRADIENT, TRAINED],
    ),
    (
        "LOCAL_RANK as a seed",
        "dropout",
        SEED,
        f'ddp.seed_all("step", 0, step, {LOCAL_RANK})',
        MACHINES,
        ["WRONG it trains as two ranks on one machine do"],
    ),
    (
        "LOCAL_RANK for RANK",
        "",
        "        epoch = self.epoch\n",
        f"        epoch, self.rank = self.epoch, {LOCAL_RANK}\n",
        MACHINES,
        ["WRONG it trains as two ranks on one machine do"],
    ),
    (
        "all batches under no_sync()",
        "",
        LOSS + "            optimizer.zero_grad()\n            loss.backward()\n",
        "            with getattr(wrapped, 'no_sync', contextlib.nullcontext)():\n    "
        + LOSS
        + "                optimizer.zero_grad()\n                loss.backward()\n",
        TRAINING,
        [WEIGHTS, GRADIENT, TRAINED],
    ),
    (
        "a loss that compares samples",
        "",
        LOSS,
        """\
            features = nn.functional.normalize(wrapped(x))
            likeness = features @ nn.functional.normalize(y).T / 0.5
            loss = nn.functional.cross_entropy(likeness, torch.arange(len(x)))
""",
        TRAINING,
        [GRADIENT, TRAINED],
    ),
    (
        "a mean over the rank's tokens",
        "",
        LOSS,
        TOKENS,
        TRAINING,
        [GRADIENT, TRAINED],
    ),
    (
        "a layer is unfrozen",
        "frozen",
        LOSS,
        UNFREEZE + LOSS,
        TRAINING,
        [WEIGHTS, TRAINED],
    ),
    (
        "gathered rows in the order of the ranks",
        "gathered",
        "torch.stack(shares, 1).flatten(0, 1)",
        "torch.cat(shares)",
        TRAINING,
        [GRADIENT, TRAINED],
    ),
    (
        "a decision for the batch, by the rank's seed",
        "",
        LOSS,
        "            x = -x if torch.rand(()) < 0.5 else x\n" + LOSS,
        TRAINING,
        [TRAINED],
    ),
    (
        "a score that is no mean over samples",
        "",
        '"val_loss": loss * len(x)',
        '"val_loss": loss.sqrt() * len(x)',
        TRAINING,
        [PRINTED],
    ),
    (
        "a mean of means",
        "",
        '{"val_loss": loss * len(x), "count": len(x)}',
        '{"val_loss": loss, "count": 1}',
        TRAINING,
        [PRINTED],
    ),
    (
        "rank 0's loss in the log",
        "",
        "{means['val_loss']:.6f}",
        "{loss.item():.6f}",
        TRAINING,
        [PRINTED],
    ),
    (
        "a seed that comes after the batch's noise",
        "",
        "torch.randn(8, generator=generator)",
        "torch.randn(8)",
        RESUME,
        [REST, REST],
    ),
    (
        "noise that workers draw",
        "workers",
        "torch.randn(8, generator=generator)",
        "torch.randn(8)",
        RESUME,
        [REST, REST],
    ),
    (
        "one rank changes weights",
        "",
        STEP,
        STEP + "            if rank == 1 and step == 10:\n"
        "                model[0].bias.data += 0.1\n",
        TRAINING,
        [WEIGHTS, TRAINED],
    ),
    (
        "a schedule whose length counts the rank's batches",
        "whole run",
        "3 * 1001 // 32",
        "3 * 1001 // batch_size",
        TRAINING,
        [TRAINED],
    ),
    (
        "a rank skips a batch",
        "",
        "            step += 1\n",
        "            step += 1\n"
        "            if rank == 1 and step == 10:\n                continue\n",
        f"{AS_IT_IS} --timeout 60",
        ["WRONG it ends"],
    ),
    (
        "a process is left behind",
        "",
        "    stop = ddp.StopSignal()\n",
        "    stop = ddp.StopSignal()\n    subprocess.Popen(['sleep', '1000'])\n",
        AS_IT_IS,
        ["WRONG no process is left"],
    ),
    (
        "an error on one rank is swallowed, and the others hang",
        "",
        "        main(device)\n",
        "        with contextlib.suppress(RuntimeError):\n            main(device)\n",
        f"{FAILURE} --timeout 60",
        ["WRONG all ranks end, and the exit code is not 0"],
    ),
    (
        "an error on one rank is swallowed, and the exit code is 0",
        "",
        "            optimizer.step()\n",
        "            with contextlib.suppress(RuntimeError):\n"
        "                optimizer.step()\n",
        FAILURE,
        ["WRONG all ranks end, and the exit code is not 0"],
    ),
]


def write_resumed(folder, *pairs):
    head = ("import zlib\n", "import contextlib\nimport subprocess\nimport zlib\n")
    path = folder / "resumed.py"
    path.write_text(change(RESUMED, head, *pairs))
    return path


def check_fault(name, folder):
    (fault,) = [fault for fault in FAULTS if fault[0] == name]
    _, extra, right, wrong, options, expected = fault
    script = write_resumed(folder, *EXTRAS.get(extra, []), (right, wrong))
    options += r" --compare val_loss\s(\S+)"
    if "--timeout" not in options:
        options += " --timeout 600"
    assert_found(run_check(script, options=options), *expected)


@slow
@pytest.mark.parametrize("name", [fault[0] for fault in FAULTS])
def test_fault_is_found(name, tmp_path):
    check_fault(name, tmp_path)


@slow
def test_right_changes_are_right(tmp_path):
    """What the faults begin with has no fault."""
    pairs = EXTRAS["dropout"] + EXTRAS["noise"] + EXTRAS["whole run"]
    script = write_resumed(tmp_path, *pairs)
    assert_found(run_check(script, options="--timeout 600"))
    pairs = EXTRAS["weighted"] + EXTRAS["codebook"] + EXTRAS["workers"]
    script = write_resumed(tmp_path, *pairs)
    assert_found(run_check(script, options=f"{TRAINING} --timeout 600"))
    script = write_resumed(tmp_path, *EXTRAS["gathered"])
    assert_found(run_check(script, options=f"{TRAINING} --timeout 600"))


@slow
def test_what_may_be_intended_is_a_note(tmp_path):
    pairs = [(SEED, "pass"), ("if rank == 0:", f"if {LOCAL_RANK} == 0:")]
    script = write_resumed(tmp_path, WITH_DROPOUT, *pairs)
    options = "--skip ranks --skip failure --timeout 600"
    text = run_check(script, options=options)
    assert_found(text, DROPOUT)
    for note in ("different dropout masks", "both machines save ['model.pt']"):
        if note not in text:
            harness.fail(f"no note: {note}")


@processes
def test_a_fault_is_found_quickly(tmp_path):
    script = write_resumed(tmp_path, ("mse_loss(wrapped(x)", "mse_loss(model(x)"))
    assert_found(run_check(script, options=AS_IT_IS), WEIGHTS)


# ---- Right scripts -------------------------------------------------------------------
HEAD = """import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import TensorDataset
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(320, 8)
dataset = TensorDataset(x, x.sin())
sampler = DistributedSampler(dataset, seed=0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
"""
SCRIPTS = {
    "accumulation": """\
loader = DataLoader(dataset, 8 // size, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        wrapped.require_backward_grad_sync = i % 4 == 3
        with wrapped.no_sync() if i % 4 < 3 else torch.enable_grad():
            (nn.functional.mse_loss(wrapped(x), y) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
""",
    "two networks": """\
critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
critic = DistributedDataParallel(critic)
critic_optimizer = torch.optim.Adam(critic.parameters(), 0.01)
loader = DataLoader(dataset, 32 // size, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (_, real) in enumerate(loader):
        torch.manual_seed(100 * epoch + i)
        fake = wrapped(torch.randn(32, 8)[rank::size])
        loss = nn.functional.softplus(critic(fake.detach())).mean()
        (loss + nn.functional.softplus(-critic(real)).mean()).backward()
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        nn.functional.softplus(-critic(fake)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        critic_optimizer.zero_grad()
""",
    "iterable": """\
class Stream(IterableDataset):
    def __iter__(self):
        return iter([dataset[i] for i in range(rank, 320, size)])
for epoch in range(3):
    for x, y in DataLoader(Stream(), 32 // size):
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
""",
    "dicts": """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model
        self.register_buffer("scale", torch.ones(8))
    def forward(self, ones, batch):
        return nn.functional.mse_loss(self.net(batch["x"] * self.scale), batch["y"])
wrapped = DistributedDataParallel(Model())
dataset = [{"x": x, "y": y} for x, y in dataset]
loader = DataLoader(dataset, 32 // size, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        wrapped(torch.ones(len(batch["x"])), batch=batch).backward()
        optimizer.step()
""",
    "compile": """\
compiled = torch.compile(wrapped, backend="eager")
loader = DataLoader(dataset, 32 // size, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(compiled(x), y).backward()
        optimizer.step()
""",
    "recurrent": """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
    def forward(self, x):
        return self.norm(self.lstm(x[:, None])[0][:, 0])
wrapped = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
loader = DataLoader(dataset, 32 // size, sampler=sampler)
torch.manual_seed(rank)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
""",
    "bf16": """\
loader = DataLoader(dataset, 32 // size, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(wrapped(x), y)
        loss.backward()
        optimizer.step()
""",
}
TAIL = "dist.destroy_process_group()\n"


@slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_small_right_script(name, tmp_path):
    """They save no checkpoint, and check.py says so."""
    script = tmp_path / "mine.py"
    script.write_text(HEAD + SCRIPTS[name] + TAIL)
    text = run_check(script, options="--timeout 600")
    assert_found(text, STARTS_OVER, STARTS_OVER)


@slow
@pytest.mark.parametrize("name", ["idea", "ported", "noise", "resumed", "no_data"])
def test_example(name):
    """Those that save no checkpoint lose all steps."""
    text = run_check(ROOT / f"examples/{name}.py", options="--timeout 600")
    saves = name in ("resumed", "no_data")
    assert_found(text, *[STARTS_OVER, STARTS_OVER] * (not saves))


def watched(folder):
    """The environment of a rank that check.py watches. It writes to this folder."""
    options = {"dtype": "", "cpu": False, "disturbance": ["", 0, 0]}
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
    script.write_text(HEAD + SCRIPTS["bf16"] + BUSY_GLOO + TAIL)
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


TINY = "--device cpu --dim 16 --layers 1 --heads 2 --seq_len 32 --batch_size {8}"
TINY += " --max_steps 20 --log_every 1 --save_every 5 --dropout 0.1 --out {out}"
RECIPES = ["", "compressed_gradients", "fp16", "fsdp2", "keep_last"]
RECIPES += ["where_the_time_goes"]


@slow
@pytest.mark.parametrize("name", RECIPES)
def test_program_and_its_recipes(name, tmp_path, data):
    script = SCRIPT
    if name:
        script = tmp_path / "mine.py"
        launch(sys.executable, ROOT / "recipes/recipe.py", name, script).end()
    words = [*TINY.split(), "--data", data]
    options = r"--timeout 600 --compare val_loss\s(\S+)"
    assert_found(run_check(script, *words, options=options))


@processes
def test_right_script_quickly(tmp_path):
    """It trains to the same bits as without check.py."""
    words = torchrun(2, ROOT / "examples/ported.py")
    launch(*words, cwd=tmp_path).end()
    text = run_check(ROOT / "examples/ported.py", options=AS_IT_IS)
    assert_found(text)
    folder = Path(re.search("Everything that the launches said: (.*)", text)[1])
    a, b = tmp_path / "model.pt", folder / "two-ranks/folder0/model.pt"
    a, b = [flatten(torch.load(path, weights_only=True)) for path in (a, b)]
    assert a == b


# ---- Other libraries -----------------------------------------------------------------
LIBRARIES = {
    "accelerate": """\
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
# Without it, one process shuffles in a different order than several do.
config = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=config)
set_seed(0)
x = torch.randn(320, 8)
batch_size = 32 // accelerator.num_processes
loader = DataLoader(TensorDataset(x, x.sin()), batch_size, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
accelerator.end_training()
""",
    "lightning": """\
import lightning, os, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)
lightning.seed_everything(0)
size = int(os.environ["WORLD_SIZE"])
x = torch.randn(320, 8)
loader = DataLoader(TensorDataset(x, x.sin()), 32 // size, shuffle=True)
trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp",
    num_nodes=size // int(os.environ["LOCAL_WORLD_SIZE"]), max_epochs=3,
    enable_checkpointing=False, logger=False, enable_progress_bar=False,
)
trainer.fit(Model(), loader)
""",
    "transformers": """\
import os, torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers import set_seed
set_seed(0)
config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
tokens = torch.randint(50, (160, 16))
dataset = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=16 // int(os.environ["WORLD_SIZE"]),
    num_train_epochs=2, save_strategy="no", report_to=[], use_cpu=True,
    lr_scheduler_type="constant", disable_tqdm=True,
)
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset).train()
""",
}


@slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_library(name, tmp_path):
    pytest.importorskip(name)
    script = tmp_path / "mine.py"
    script.write_text(LIBRARIES[name])
    text = run_check(script, options="--timeout 600")
    # The Trainer sets the same seed on all ranks.
    also = [DROPOUT] * (name == "transformers")
    assert_found(text, STARTS_OVER, STARTS_OVER, *also)


# ---- Bad input, and the end ----------------------------------------------------------
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


REFUSED = [
    ("print('hello')", "makes no step of a torch optimizer"),
    ("torch.zeros(1).cuda()", "needs GPUs, but the check hides them: add --cpu"),
    (
        "w = torch.nn.Parameter(torch.ones(1))\n"
        "optimizer = torch.optim.SGD([w], 1.0)\n"
        "w.sum().backward()\n"
        "optimizer.step()\n",
        "every rank trains alone: call init_process_group()",
    ),
]


@pytest.mark.parametrize(
    "text, said",
    [pytest.param(*REFUSED[0], marks=processes)]
    + [pytest.param(*case, marks=slow) for case in REFUSED[1:]],
)
def test_script_that_cannot_be_checked_gets_one_line(text, said, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(f"import torch\n{text}")
    process = launch(sys.executable, check.__file__, script)
    lines = process.end(1).splitlines()
    assert said in lines[-1] and len(lines) == 3
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
    process.wait_for("two-ranks")
    for _ in harness.ticks():
        if len(process.left) >= 4:  # check.py, and torchrun as its fork, and two ranks
            break
    process.send(number)
    assert process.end(1).endswith("interrupted: no process is left\n")
    process.leaves_none()


@slow
def test_timeout_leaves_no_process(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import time\ntime.sleep(999)")
    text = run_check(script, options="--timeout 20")
    assert "It does not end within 20 s" in text
    assert_found(text, "WRONG it ends")


def test_help_and_pages(capsys):
    with pytest.raises(SystemExit):
        check.parse(["--help"])
    said = capsys.readouterr().out
    assert "mine.py --batch_size {32} --out {out}" in said and "--compare REGEX" in said
    for page in check.PAGES.values():
        path, _, heading = page.partition(", ")
        text = (ROOT / path).read_text()
        assert re.search(rf"^#.*{heading.strip(chr(34))}", text, re.MULTILINE)
