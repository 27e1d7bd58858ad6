"""Make the diffs anew, for the present ddp_train.py. It is make refresh-recipes.

A diff names the version of ddp_train.py that it was made for. With that version
`git apply --3way` merges it with what has changed since. Where both have changed the
same lines, the recipe stays as it is, and a person is needed. Commit all, and then:

    git apply --3way recipes/05_fsdp2.diff     resolve the conflict in ddp_train.py
    git diff --full-index HEAD ddp_train.py    put this below the head of the recipe
    git checkout HEAD ddp_train.py

Commit ddp_train.py with the recipes: a clone has only the versions that were committed.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parent / "ddp_train.py"


def git(folder, *words):
    """What git prints. If it fails, a RuntimeError with what it says."""
    env = {name: os.environ[name] for name in os.environ if not name.startswith("GIT_")}
    env["LC_ALL"] = "C"
    if folder != HERE:  # a new repository. It sees the objects of this one.
        env["GIT_CONFIG_GLOBAL"] = os.devnull
        with contextlib.suppress(RuntimeError):  # this is no clone
            objects = HERE / git(HERE, "rev-parse", "--git-path", "objects").strip()
            env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = str(objects.resolve())
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True}
    run = subprocess.run(["git", *map(str, words)], **options)
    if run.returncode != 0:
        raise RuntimeError(run.stderr.strip())
    return run.stdout


def merge(folder, *recipes, text=None):
    """Write ddp_train.py with these recipes into an empty folder. Returns the diff.

    text: that of a ddp_train.py which was changed. A conflict is a RuntimeError.
    """
    git(folder, "init", "-q")
    script = Path(folder) / "ddp_train.py"
    for version in (PROGRAM.read_text(), text or PROGRAM.read_text()):
        script.write_text(version)
        git(folder, "add", "ddp_train.py")
    before = git(folder, "write-tree").strip()
    for recipe in recipes:
        git(folder, "apply", "--3way", recipe)
    compile(script.read_text(), script, "exec")
    return git(folder, "diff-index", "-p", "--full-index", "--cached", before)


def main():
    untouched = 0
    for recipe in sorted(HERE.glob("*.diff")):
        head, mark, old = recipe.read_text().partition("diff --git ")
        with tempfile.TemporaryDirectory() as folder:
            try:
                new = merge(folder, recipe)
            except (RuntimeError, SyntaxError) as error:
                untouched += 1
                print(f"{recipe.name}: NOT CHANGED, it needs a person: {error}")
                continue
        recipe.write_text(head + new)
        print(recipe.name, "as it was" if new == mark + old else "made anew", sep=": ")
    git(HERE, "hash-object", "-w", PROGRAM)  # keep this version for the next time
    sys.exit(untouched > 0)


if __name__ == "__main__":
    main()
