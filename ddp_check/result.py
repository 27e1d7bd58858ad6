"""What a launch has come to, and what it said: the data that the judges get."""

import dataclasses
import re
import textwrap
from pathlib import Path

PACKAGE = str(Path(__file__).parent)
FILE_HINT = """\
Each launch runs in a new folder: use --link or an absolute path, and let
the script make the folders that it writes to.
"""
MISSING = "No such file|not found|FileNotFound"
RACE_HINT = """\
Do all ranks make a file or a folder, or read what rank 0 writes, without
waiting for each other?
"""
HINTS = {  # what helps if its traceback has this
    r"cuda:-1|but got: None": "Torchrun does not pass --local_rank: see --help.\n",
    r"/check-\w+/t\d+/": "It is in TMPDIR. Each machine has a new one here.\n",
    r"each machine has its own": "Leave the address of the ranks to torchrun.\n",
}
# What torchrun says of a rank that says nothing, as when there is no memory left
ENDED = r"Root Cause.*?rank +: (\d+) .*?\((SIG(?:SEGV|KILL|BUS|ILL|FPE))\)"
FAULTS = "Attribute|Key|Index|Name|UnboundLocal|Assertion|Import|ModuleNotFound|Type"


class OwnFault(Exception):
    """The check itself has failed inside a rank."""


@dataclasses.dataclass(eq=False)
class Run:
    """What a launch has come to."""

    name: str = ""
    traces: list = dataclasses.field(default_factory=list)  # of each rank
    codes: list = dataclasses.field(default_factory=lambda: [0])  # of each torchrun
    hangs: bool = False
    stayed: list = dataclasses.field(default_factory=list)  # pids left after its end
    said: dict = dataclasses.field(default_factory=dict)  # {file: its text}
    # {rank: (file, line, function) of its main thread, from inside out}, if it hangs
    stacks: dict = dataclasses.field(default_factory=dict)
    folders: list = dataclasses.field(default_factory=list)  # of each machine
    log: Path = Path()
    timeout: float = 0
    seconds: float = 0

    @property
    def ranks(self):
        return len(self.traces)

    @property
    def steps(self):
        return [of_rank.steps for of_rank in self.traces]

    @property
    def bits(self):
        return [of_rank.bits for of_rank in self.traces]

    @property
    def idle(self):
        """Weights that no optimizer has and no step changes. A model was only tried."""
        idle = []
        for of_rank in self.traces:
            began = of_rank.began
            trained = {name for step in of_rank.steps for name in step.trained}
            changed = {
                n for bits in of_rank.bits for n, _ in bits.items() - began.items()
            }
            idle.append(began.keys() - trained - changed)
        return set.intersection(*idle) if idle else set()

    @property
    def ended_well(self):
        return not self.hangs and not any(self.codes)

    @property
    def trained(self):
        return self.ended_well and all(self.steps)

    def marks(self, rank=0):
        """What has happened until its end: see Step.marks."""
        steps = self.traces[rank].steps if rank < self.ranks else []
        return steps[-1].marks if steps else []

    def why(self):
        """What helps most: the first traceback, or the last words."""
        counts = [len(steps) for steps in self.steps]
        text = f"Steps on each rank: {counts}. Exit codes of torchrun: {self.codes}.\n"
        for rank, frames in self.stacks.items():
            text += f"{where(rank, frames)}\n"
        ended = re.search(ENDED, self.said.get("torchrun0", ""), re.DOTALL)
        if ended and not self.hangs:
            return f"{text}rank {ended[1]} was ended by {ended[2]}"
        names = "errors", "rank0.out", "torchrun0"
        said = [without_colors(self.said.get(name, "")) for name in names]
        if any("Traceback" in words for words in said[:2]):
            said = ["\n".join(said[:2])]  # some scripts print their errors
        for words in said:
            if words.strip() and not (self.stacks and words is said[-1]):
                return text + first_traceback(words)
        return text

    def words(self):
        """What lines say of it. error: the first exception, in a line."""
        why = self.why().rstrip()
        lines = [line for line in why.splitlines()[1:] if line.strip(" ^~")]
        *_, code, last = ["", "it says nothing", *lines]
        if ":" not in last and code.startswith("    "):  # assert x == y
            last += f" in {code.strip()}"
        if self.hangs:
            last = f"it does not end within {self.timeout:.0f} s"
        missing = re.search(MISSING, why)
        program = "subprocess.py" in self.said.get("errors", "")
        hints = [HINTS[cause] for cause in HINTS if re.search(cause, why)]
        # The folder of an absolute path may be there.
        path = re.search(r"'(/[^']*)'", last)
        if missing and not program and not (path and Path(path[1]).parent.is_dir()):
            hints.append(FILE_HINT)
        values = {"error": textwrap.shorten(last, 160), "why": why}
        steps = len(self.steps[0]) if self.traces else 0
        ranks = f"{self.ranks} ranks: " if self.ranks > 2 else ""
        values |= {"timeout": f"{self.timeout:.0f}", "steps": steps, "ranks": ranks}
        return values | {"hint": hints[0] if hints else ""}

    def raise_own_fault(self):
        """The script is not to blame for an error that the check has made."""
        if self.hangs or not any(self.codes):
            return
        said = self.said.get("errors") or self.said.get("torchrun0", "")
        frames, error = traceback_of(said)
        last = frames[-1] if frames else ""
        # The check stands between the script and torch. A wrong call fails in torch.
        forwards = re.search(r"\b(call|create|function|make)\(.*\*args", last)
        if f'"{PACKAGE}' in last and re.match(FAULTS, error) and not forwards:
            raise OwnFault("".join(frames) + error)


# ---- What a launch said --------------------------------------------------------------
def is_library(frame):
    return (
        re.search(r"site-packages|lib/python|<frozen|\.pyx", frame) or PACKAGE in frame
    )


def in_collective(frames):
    """Whether a main thread waits for other ranks: in a call, or in backward()."""
    wait = "torch/distributed|torch/nn/parallel|_engine_run_backward"
    return any(re.search(wait, f"{file} {name}") for file, _, name in frames[:8])


def where(rank, frames):
    """Where the main thread of a rank was at the timeout, in a line."""
    mine = [frame for frame in frames if not is_library(frame[0])]
    file, line, name = (mine or frames)[0]
    verb = "waits" if in_collective(frames) else "is"
    call = f" in {frames[0][2]}()," if is_library(frames[0][0]) else ""
    return f"Rank {rank} {verb}{call} at {file}, line {line}, in {name}"


def traceback_of(text):
    """(the frames, the error) of the first traceback, or ([], "").

    Each rank may have its own prefix. Others count only if there is no better one: an
    error because another rank has ended, or without a line of the script. (While a
    library handles an error, it may raise another one, which has such a line.)
    """
    lines = text.splitlines()
    best = {}
    for i, line in enumerate(lines):
        prefix, found, _ = line.partition("Traceback (most recent call last)")
        if not found:
            continue
        prefix = prefix.removesuffix("Original ")  # of a DataLoader's worker
        while prefix and not any(
            x.startswith(f"{prefix}  File") for x in lines[i + 1 :]
        ):
            prefix = prefix[1:]  # a progress bar stands before it
        own = [line for line in lines[i + 1 :] if line.startswith(prefix)]
        own = "\n".join([line.removeprefix(prefix) for line in own]) + "\n"
        # The words of some errors begin in a line below, or go on there after a colon.
        words = r"^(?!Traceback)\w.*?(:\s+\w.*?(:\n\w.*)?)?\n"
        end = re.search(words, own, re.MULTILINE)
        if end and not re.search(r": Caught \w+ in ", end[0]):  # the original follows
            frames = re.findall(r'  File ".*\n(?:    .*\n)*', own[: end.start()])
            error, rest = end[0], own[end.end() :]
            if error.startswith("torch.jit.Error"):  # what has failed there comes last
                inner = re.findall(
                    r"^(?:builtins\.)?(\w+Error: .*\n)", rest, re.MULTILINE
                )
                error = (inner + [error])[0]
            worth = 2 * ("by peer" not in end[0]) + (not all(map(is_library, frames)))
            best.setdefault(worth, (frames, error))
    return best[max(best)] if best else ([], "")


def first_traceback(text):
    """The exception, and where the script was; or what it said before its end."""
    frames, error = traceback_of(text)
    words = own_words(text)
    if error and not (words and "by peer" in error):
        frames = [frame for frame in frames if PACKAGE not in frame]
        # The script's own, rather than those of Python and of what is installed.
        mine = [frame for frame in frames if not is_library(frame)]
        return "".join([*(mine or frames)[-1:], error]).rstrip()
    text = re.sub(r"(Warning: .*\n)  .*\n", r"\1", text)  # without its line of code
    lines = words or [line for line in text.splitlines() if line.strip()]
    faults = [line for line in lines if re.search(r"\berror\b.*\w", line, re.I)]
    return "\n".join(faults[:1] or lines[-6:])


def without_colors(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def own_words(text):
    """The lines before tracebacks and dumps, without warnings and progress bars."""
    ends = r"^(.*Traceback \(|Fatal Python error|Current thread|Thread 0x|Stack \()"
    words = re.split(ends, text, maxsplit=1, flags=re.MULTILINE)[0]
    words = re.sub(r".*Warning: .*\n(  .*\n)?|.*\d%\|.*", "", words)
    return [line for line in words.splitlines() if re.search(r"\w", line)]
