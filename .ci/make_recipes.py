"""Write the recipes of .ci/recipes/ into README.md, as diffs against ddp_train.py.

    python .ci/make_recipes.py            write them
    python .ci/make_recipes.py --check    exit code 1 if README.md is not up to date

A recipe is a text file. Its first line is the title. Then comes a text, and what is to
be changed. Each old text must occur exactly once in ddp_train.py.

    #### change
    old text
    #### to
    new text
    #### text
    More text, which comes after the diff.

Comments of ddp_train.py may change: in an old text, the line `# ...` stands for any
lines of comment, and `code  # ...` for this code with any comment, or with none.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CI = Path(__file__).resolve().parent
SCRIPT = CI.parent / "ddp_train.py"
README = CI.parent / "README.md"
BEGIN = "<!-- recipes: begin -->"
END = "<!-- recipes: end -->"


@dataclass
class Recipe:
    """One file of .ci/recipes/."""

    name: str
    number: int
    title: str
    text: str
    changes: list  # of (old text, new text)
    text_after: str


def read_recipe(path):
    head, *parts = re.split(r"^#### (.*)\n", path.read_text(), flags=re.MULTILINE)
    title, _, text = head.partition("\n")
    number = int(path.name.split("_")[0])
    recipe = Recipe(path.name, number, title, text.strip(), [], "")
    old = None
    for kind, part in zip(parts[::2], parts[1::2], strict=True):
        if kind == "change" and old is None:
            old = part.removesuffix("\n")
        elif kind == "to" and old is not None:
            recipe.changes.append((old, part.removesuffix("\n")))
            old = None
        elif kind == "text" and old is None:
            recipe.text_after = part.strip()
        else:
            sys.exit(f"recipe {path.name}: '#### {kind}' is not expected here")
    return recipe


def read_recipes():
    """All recipes: {number: recipe}."""
    paths = sorted((CI / "recipes").glob("*.txt"))
    recipes = [read_recipe(path) for path in paths]
    return {recipe.number: recipe for recipe in recipes}


def make_pattern(old):
    """The regular expression that finds an old text."""
    pattern = ""
    for line in old.split("\n"):
        if line.strip() == "# ...":
            pattern += r"(?:^ *#.*\n)*"
        elif line.endswith("  # ..."):
            pattern += re.escape(line.removesuffix("  # ...")) + r"(?:  #.*)?\n"
        else:
            pattern += re.escape(line) + r"\n"
    return pattern.removesuffix(r"\n")


def change(source, recipe):
    """The program with the changes of a recipe."""
    for old, new in recipe.changes:
        found = list(re.finditer(make_pattern(old), source, re.M))
        if len(found) != 1:
            times = f"{len(found)} times, not once"
            sys.exit(f"recipe {recipe.name}: this occurs {times}:\n{old}")
        source = source[: found[0].start()] + new + source[found[0].end() :]
    return source


def make_diff(recipe):
    """The changes of a recipe as `git apply` takes them: "" if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        source = SCRIPT.read_text()
        for name, content in (("a", source), ("b", change(source, recipe))):
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "ddp_train.py").write_text(content)
        # With one line around each change, recipes disturb each other least.
        git = "git diff --no-index --no-color --no-prefix --unified=1 a b".split()
        done = subprocess.run(git, cwd=folder, capture_output=True, text=True)
    # The first two lines say where git found the files.
    return "".join(done.stdout.splitlines(keepends=True)[2:])


def git_apply(folder, diff):
    """Apply a diff to the files of a folder, whatever repository is around it."""
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(folder).parent)}
    command = ["git", "apply", "--verbose"]
    done = subprocess.run(
        command, input=diff, cwd=folder, env=env, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"git apply: {done.stderr}")


def apply_recipes(folder, *numbers):
    """A copy of ddp_train.py in a new folder, with the diffs of these recipes."""
    folder = Path(folder)
    folder.mkdir()
    script = folder / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    recipes = read_recipes()
    for number in numbers:
        git_apply(folder, make_diff(recipes[number]))
    return script


def render(recipe):
    """A recipe as it stands in README.md."""
    summary = f"<summary>{recipe.number}. {recipe.title}</summary>"
    parts = [f"<details>{summary}", recipe.text]
    if recipe.changes:
        parts.append(f"```diff\n{make_diff(recipe)}```")
    if recipe.text_after:
        parts.append(recipe.text_after)
    parts.append("</details>")
    return "\n\n".join(parts)


def main(argv):
    readme = README.read_text()
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        sys.exit(f"{README.name} needs the lines {BEGIN} and {END}, once each")
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    recipes = "\n\n".join(render(recipe) for recipe in read_recipes().values())
    wanted = f"{before}{BEGIN}\n\n{recipes}\n\n{END}{after}"
    if argv == ["--check"]:
        if wanted != readme:
            sys.exit(f"the recipes in {README.name} are not up to date: make recipes")
    elif argv:
        sys.exit(__doc__)
    elif wanted != readme:
        README.write_text(wanted)


if __name__ == "__main__":
    main(sys.argv[1:])
