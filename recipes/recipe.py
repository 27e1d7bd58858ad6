"""Write a copy of ddp_train.py with a recipe, or with several that go together.

    python recipes/recipe.py                              lists the recipes
    python recipes/recipe.py fsdp2 my_train.py            writes my_train.py
    python recipes/recipe.py fp16 keep_last my_train.py   writes it with both
    python recipes/recipe.py --refresh                    after ddp_train.py was changed

--refresh updates all diffs. It needs a git clone. A diff that conflicts stays as it is.
"""

import os
import re
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, run

HERE = Path(__file__).resolve().parent
RECIPES = {path.stem: path for path in sorted(HERE.glob("*.diff"))}


def apply(diff, text):
    """The text, changed by a diff. It must contain the old lines of the diff."""
    for hunk in re.split("^@@ .*\n", diff, flags=re.M)[1:]:
        old = "".join(line[1:] for line in hunk.splitlines(True) if line[0] != "+")
        new = "".join(line[1:] for line in hunk.splitlines(True) if line[0] != "-")
        if text.count(old) != 1:
            sys.exit(f"it does not fit: these lines must be there once:\n{old}")
        text = text.replace(old, new)
    return text


def git(*words):
    return run(["git", *words], cwd=HERE.parent, stdout=PIPE, text=True)


def refresh(path):
    """Update a diff: git merges it with what has changed. False: a conflict."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GIT_INDEX_FILE"] = f"{folder}/index"  # not the clone's
        git("add", "ddp_train.py")
        before = git("write-tree").stdout.strip()
        merge = git("apply", "--3way", "--cached", path)
        new = git("diff-index", "-p", "-U2", "--full-index", "--cached", before).stdout
    if merge.returncode == 0:
        path.write_text(path.read_text().partition("diff --git ")[0] + new)
    return merge.returncode == 0


def main(*words):
    if not words:
        for name, path in RECIPES.items():
            print(name.ljust(21), path.read_text().splitlines()[0])
    elif words == ("--refresh",):
        failed = [name for name, path in RECIPES.items() if not refresh(path)]
        if failed:
            sys.exit(f"not updated, they conflict: {failed}")
    elif len(words) == 1 or set(words[:-1]) - set(RECIPES):
        sys.exit(f"name recipes of {', '.join(RECIPES)}, and a new file")
    else:
        text = (HERE.parent / "ddp_train.py").read_text()
        for name in words[:-1]:
            text = apply(RECIPES[name].read_text(), text)
        if os.path.exists(words[-1]):
            sys.exit(f"{words[-1]} already exists")
        Path(words[-1]).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
