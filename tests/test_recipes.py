"""Tests of recipes/*.diff: each applies, also to a ddp_train.py that was changed.

What they do is tested by test_recipe_runs.py.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.refresh import git, merge

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "ddp_train.py"
RECIPES = sorted((ROOT / "recipes").glob("*.diff"))
RUFF = shutil.which("ruff") or shutil.which("ruff", path=Path(sys.executable).parent)
# These do not apply to a program with another MODEL and DATA: number and reason.
OTHER_MODEL = {
    "06": "it is itself another MODEL and DATA",
    "07": "it is itself another MODEL and DATA",
}
PAIRS = [("05", "15"), ("15", "05"), ("06", "13"), ("13", "06")]
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)

# ---- A program that somebody has changed ---------------------------------------------
IMPORTS = "DataLoader, DistributedSampler, Subset, TensorDataset\n\nSIZE = 300\n"
MODEL_AND_DATA = """# ---- MODEL -----
MODEL_OPTIONS = {"hidden": (16, "numbers in the middle")}


class Network(nn.Module):
    def __init__(self, hidden, dropout):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, hidden))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.last(self.dropout(self.blocks(x).tanh()))


def build_model(args):
    return Network(args.hidden, args.dropout)


def build_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum)


def compute_loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def score(model, batch):
    count = len(batch[0])
    return {"val_loss": compute_loss(model, batch) * count, "count": count}


# ---- DATA -----
def load_data(args):
    x = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(x, x.sum(1, keepdim=True))
    return Subset(samples, range(280)), Subset(samples, range(280, SIZE)), "sums"


"""
MOMENTUM = '    add("--momentum", type=float, default=0.9, help="of SGD")\n'
# Pieces that no recipe changes: all their comments are others.
PIECES = "mean_over_steps|lr_factor|choose_device|check_alike|lock|Log|Loader|to_device"


def changed_program():
    """Another MODEL and DATA, and other comments, help texts, defaults and options."""
    text = PROGRAM.read_text()
    changes = [
        (r'\A(.*?\n)"""D.*?"""\n', r'\1"""My program."""\n'),
        (r"(?<=from torch.utils.data import ).*?\n", IMPORTS),
        (r"# ---- MODEL.*(?=# ---- THE RUN)", MODEL_AND_DATA.replace("\\", r"\\")),
        (r'(add\("--(epochs|batch_size|save_every)"[^\n]*default=)\d+', r"\g<1>5"),
        (r'(add\("--(lr|warmup|dropout)"[^\n]*default=)[0-9.e-]+', r"\g<1>0.1"),
        (r'(add\("--(data|out|lr|seed|log_every)"[^\n]*help=)"[^\n]*"', r'\1"mine"'),
        (r'(    add\("--lr"[^\n]*\n)', r"\1" + MOMENTUM),
    ]
    for pattern, new in changes:
        text, count = re.subn(pattern, new, text, flags=re.DOTALL)
        assert count > 0, pattern
    pieces = text.split("\n\n\n")
    for i, piece in enumerate(pieces):
        if re.search(rf"^(def|class) ({PIECES})\b", piece, re.MULTILINE):
            piece = re.sub(r"^( +)# .*", r"\1# Words of mine.", piece, flags=re.M)
            pieces[i] = re.sub(r'"""[A-Z](.|\n)*?"""', '"""Mine."""', piece)
    return "\n\n\n".join(pieces)


# ---- What the tests share ------------------------------------------------------------
def has_all_history():
    """A tarball and a shallow clone lack the versions that the diffs were made for."""
    try:
        shallow = git(ROOT / "recipes", "rev-parse", "--is-shallow-repository")
    except RuntimeError:
        return False
    return shallow.strip() == "false"


def merged(folder, *numbers, text=None):
    """The path of a ddp_train.py with these recipes, merged as `make test` does."""
    folder.mkdir(exist_ok=True)
    recipes = []
    for number in numbers:
        recipes += (ROOT / "recipes").glob(f"{number}_*.diff")
    try:
        merge(folder, *recipes, text=text)
    except RuntimeError as error:
        if "lacks the necessary blob" in str(error) and not has_all_history():
            pytest.skip("without the history a recipe cannot be merged")
        pytest.fail(f"{numbers}: {error}")
    return folder / "ddp_train.py"


def check(script):
    """No conflict, no name that is not there, and formatted like the program."""
    assert not re.search("^(<<<<<<<|>>>>>>>)", script.read_text(), re.M)
    compile(script.read_text(), script, "exec")
    if RUFF:
        for words in (["format", "--diff"], ["check", "--ignore", "F401"]):
            command = [RUFF, *words, "--config", ROOT / ".ruff.toml", script]
            run = subprocess.run(command, capture_output=True, text=True)
            assert run.returncode == 0, run.stdout + run.stderr


# ---- The tests -----------------------------------------------------------------------
@each_recipe
def test_recipe_applies(path, tmp_path):
    """By git apply --3way, so a comment of ddp_train.py may change without it."""
    check(merged(tmp_path, path.name[:2]))


@each_recipe
def test_recipe_applies_to_a_changed_program(path, tmp_path):
    number, text = path.name[:2], changed_program()
    if number not in OTHER_MODEL:
        check(merged(tmp_path, number, text=text))
        return
    with pytest.raises(RuntimeError, match="with conflicts|lacks the necessary"):
        merge(tmp_path, path, text=text)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_two_recipes_apply_together(pair, tmp_path):
    check(merged(tmp_path, *pair))


@each_recipe
def test_recipe_applies_as_it_is_to_the_version_that_it_names(path, tmp_path):
    """Without --3way, and the result is what the diff says."""
    before, after = versions(path)
    git(tmp_path, "init", "-q")
    shutil.copy(PROGRAM, tmp_path)
    git(tmp_path, "add", "ddp_train.py")
    try:
        content = git(tmp_path, "cat-file", "blob", before)
    except RuntimeError:
        assert not has_all_history(), "this version is not in the history"
        pytest.skip("this version is not here: it needs the history")
    (tmp_path / "ddp_train.py").write_text(content)
    git(tmp_path, "apply", path)
    assert git(tmp_path, "hash-object", "ddp_train.py").strip() == after


def test_version_that_a_recipe_names_is_in_each_clone():
    """Else git apply --3way has nothing to merge with. The cure: make refresh-recipes.

    As long as ddp_train.py is not committed, its present version will do.
    """
    if not has_all_history():
        pytest.skip("it needs the history")
    present = git(ROOT / "recipes", "hash-object", PROGRAM).strip()
    for version in {versions(path)[0] for path in RECIPES} - {present}:
        log = git(ROOT / "recipes", "log", "--oneline", f"--find-object={version}")
        assert log, f"{version} was never committed"


def versions(path):
    """The ids that git gives to ddp_train.py without and with the recipe."""
    (found,) = re.findall(r"^index (\w{40})\.\.(\w{40})\b", path.read_text(), re.M)
    return found


@each_recipe
def test_recipe_is_short_and_its_head_names_its_tests(path):
    head, diff = path.read_text().split("diff --git ", 1)
    assert len(head) > 300 and max(map(len, head.splitlines())) <= 100
    names = re.findall(r"\btest_[a-z0-9_]+\b", head)
    assert names, "the head names no test"
    runs = (ROOT / "tests/test_recipe_runs.py").read_text()
    for name in names:
        assert f"def {name}(" in runs, name
    assert 5 <= len(re.findall("^[+-](?![+-]{2} )", diff, re.M)) <= 40


def test_refresh_makes_the_diffs_anew_and_leaves_what_conflicts(tmp_path):
    """In a repository of its own, with a changed program."""
    if not has_all_history():
        pytest.skip("without the history a recipe cannot be merged")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    git(tmp_path, "init", "-q")
    objects = git(ROOT / "recipes", "rev-parse", "--git-path", "objects").strip()
    objects = (ROOT / "recipes" / objects).resolve()  # with the old versions
    (tmp_path / ".git/objects/info/alternates").write_text(f"{objects}\n")
    script = tmp_path / "ddp_train.py"
    shutil.copy(PROGRAM, script)
    git(tmp_path, "add", "ddp_train.py")
    script.write_text(changed_program())
    command = [sys.executable, tmp_path / "recipes/refresh.py"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (1, "")
    present = git(tmp_path, "hash-object", "ddp_train.py").strip()
    for path in RECIPES:
        new = tmp_path / "recipes" / path.name
        if path.name[:2] in OTHER_MODEL:
            assert f"{path.name}: NOT CHANGED" in run.stdout
            assert new.read_text() == path.read_text()
        else:
            assert f"{path.name}: made anew" in run.stdout
            assert new.read_text().split("diff --git")[0] in path.read_text()
            assert versions(new)[0] == present
            git(tmp_path, "apply", "--check", new)
