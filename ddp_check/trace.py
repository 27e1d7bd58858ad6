"""What a rank has done, as data: written by the rank, read by the judge.

Each launch has a folder. Rank r writes rank{r}.trace there: the Starts, Steps and the
End, pickled one after another. A launch that is recorded also writes rank{r}.pickle,
with the tensors that a replay needs (rank/record.py reads it again). Nothing else
passes from the room `rank`, which watches the script, to the room `judge`, which gives
the verdict.

A *step* is what lies between two changes of the weights with a forward() (or, without
a module, a backward()) in between, whatever number of optimizers changes them. Weights
are known by their names in the model, without what wrappers put in front of them.
"""

import contextlib
import dataclasses
import os
import pickle
from pathlib import Path


@dataclasses.dataclass
class Replay:
    """One process gets the batches and random numbers of all ranks of a launch."""

    keys: list  # for each rank, the (loader, iteration) that it trains on
    order: str  # how rows are joined: "rank by rank", "row by row" or "in turn"


@dataclasses.dataclass
class LaunchOptions:
    """What a rank is told, in the environment variable CHECK_OPTIONS."""

    steps: int = 0  # leave after so many steps; 0: run to the end
    float64: bool = True
    gpus: int = 0  # pretend to have so many GPUs on this machine; 0: none
    watched: bool = True  # False: only run it, in its own precision
    probe: bool = False  # leave early if it plainly trains alone for want of a GPU
    record: str = ""  # write the tensors of this launch to this folder
    # Compare each step with the launch that was recorded in this folder, of `ranks`
    # ranks. A relaunch also draws what the same rank has drawn there from the place
    # on at which it starts.
    reference: str = ""
    reference_ranks: int = 0
    again: bool = False  # a relaunch: look for the place by the weights
    replay: Replay | None = None  # give the batches and random numbers of the reference
    action: str = ""  # "stop", "kill" or "fail", before step `at` begins
    at: int = 0
    pause: float = 0  # seconds to wait before each step after a stop signal


@dataclasses.dataclass
class Fetch:
    """A DataLoader has yielded a batch, or has come to its end (then without rows)."""

    key: tuple  # (number of the loader, number of its iteration)
    ids: list = dataclasses.field(default_factory=list)  # checksums of the indices
    rows: list = dataclasses.field(default_factory=list)  # checksums of the rows
    # Checksums of the rows of each tensor by itself. They stay if a batch is made again
    parts: list = dataclasses.field(default_factory=list)
    data: int = 0  # checksum of some samples of the data set: loaders.fingerprint()
    trains: bool = False  # a backward() followed it
    evaluates: bool = False  # a module in eval mode or without gradients got it


@dataclasses.dataclass
class Draw:
    """Random numbers that torch has drawn, with gradients on."""

    name: str
    shape: list
    checksum: int
    state: int  # checksum of the generator's state before it


@dataclasses.dataclass
class Comparison:
    """One weight in one step, beside the reference: exact sums over all its values.

    a is the value of the reference, b that of this launch.
    """

    aa: float  # sum of a * a
    bb: float
    ab: float
    off: float  # sum of (a - b) ** 2, computed from the differences themselves


@dataclasses.dataclass
class Start:
    """Weights as they were when they were first seen, before the step `step`."""

    step: int
    bits: dict  # {name: checksum}
    finite: bool = True


@dataclasses.dataclass
class Step:
    """A step of one rank. Written anew when more is known: the last one counts."""

    number: int
    place: int = -1  # in the reference: the step that it is compared with; -1: none
    ranks: int = 1  # the world size
    # After the step
    bits: dict = dataclasses.field(default_factory=dict)  # {weight: checksum}
    finite: bool = True
    trained: list = dataclasses.field(default_factory=list)  # weights of its optimizers
    gradient_bits: dict = dataclasses.field(default_factory=dict)  # {weight: checksum}
    # {first weight of a group: lr}, in a replay before it gets that of the ranks
    rates: dict = dataclasses.field(default_factory=dict)
    clipped: bool = False  # clip_grad_norm_() or clip_grad_value_() ran in it
    # Beside the reference, by the name of the weight
    gradients: dict = dataclasses.field(default_factory=dict)  # as the optimizer got it
    unclipped: dict = dataclasses.field(default_factory=dict)  # before clipping
    changes: dict = dataclasses.field(default_factory=dict)  # weights after - before
    # Weights after it (off), and how far the reference has come since its start (aa).
    weights: dict = dataclasses.field(default_factory=dict)
    # What goes in
    fetched: list = dataclasses.field(default_factory=list)  # [Fetch]
    inputs: list = dataclasses.field(default_factory=list)  # rows that the model got
    parts: list = dataclasses.field(default_factory=list)  # of these, as in Fetch.parts
    # Rows that a DDP object in another module got, which may be its share of them
    ddp_inputs: list = dataclasses.field(default_factory=list)
    draws: list = dataclasses.field(default_factory=list)  # [Draw]
    # Generators beside torch's (also default_rng(), random.Random() of the script) that
    # have drawn in this step, but not while a loader yielded: {name: state after it}
    other_draws: dict = dataclasses.field(default_factory=dict)
    backwards: int = 0
    # What the ranks do together
    ddp_forwards: int = 0
    collectives: int = 0  # calls, beside those of the check itself
    floats_reduced: int = 0  # floating-point values in all-reduces and reduce-scatters
    gradient_values: int = 0  # values in the gradients of the trained weights
    buffers: dict = dataclasses.field(default_factory=dict)  # before DDP replaces them
    norms: bool = False  # batch norm has used the rank's own rows
    evaluated: list = dataclasses.field(default_factory=list)  # running means used
    sharded: bool = False  # FSDP1
    tensor_parallel: bool = False
    # What a replay could not do in this step, each a sentence. It excuses this step.
    problems: list = dataclasses.field(default_factory=list)
    widened: bool = False  # rows that the ranks have padded to other lengths
    # In a replay: torch calls whose numbers were the same on all ranks, or not.
    alike: list = dataclasses.field(default_factory=list)
    different: list = dataclasses.field(default_factory=list)
    # What has happened so far: "cuda" (asked for one), "hook" (DDP's communication
    # hook), "wrapped" (a DDP object was made), "join", "own seed" (the GPUs have one),
    # "shared gpu", "alone" (rank 0 reads for all ranks), "cut" (the bound of the
    # recording has been reached), "other length" (a loader of one process has other
    # numbers of batches than that of a rank, before it gets these).
    marks: list = dataclasses.field(default_factory=list)
    address: str = ""  # where the script wants the ranks to meet, if not at torchrun's
    outside: str = ""  # a file that it saves outside of its folder


@dataclasses.dataclass
class End:
    """The script has come to its end on this rank, or was cut off by `steps`."""

    failed: bool = False  # by an exception
    looked: bool = True  # at the weights, after all that has changed them
    problems: list = dataclasses.field(
        default_factory=list
    )  # of a step that never ends


class Writer:
    """Writes the trace of a rank. It is complete whenever the rank is killed."""

    def __init__(self, folder, rank):
        self.file = open(Path(folder, f"rank{rank}.trace"), "ab", buffering=0)
        self.last = b""

    def write(self, entry):
        """Returns whether it says more than the entry before."""
        data = pickle.dumps(entry)
        if data == self.last:
            return False
        self.last = data
        self.file.write(data)
        return True


@dataclasses.dataclass
class RankTrace:
    """What a rank has written."""

    starts: list = dataclasses.field(default_factory=list)
    steps: list = dataclasses.field(default_factory=list)
    end: End | None = None

    @property
    def began(self):
        """The checksums of the weights when they were first seen."""
        return {name: bits for one in self.starts for name, bits in one.bits.items()}

    @property
    def bits(self):
        """The checksums of the weights after each step."""
        return [step.bits for step in self.steps]


def read_trace(folder, rank):
    """The RankTrace of a rank; an empty one if it has written nothing."""
    trace, steps = RankTrace(), {}
    path = Path(folder, f"rank{rank}.trace")
    for entry in entries_of(path) if path.exists() else ():
        if isinstance(entry, Step):
            steps[entry.number] = entry
        elif isinstance(entry, Start):
            trace.starts.append(entry)
        else:
            trace.end = entry
    trace.steps = [steps[number] for number in sorted(steps)]
    return trace


def entries_of(path):
    with open(path, "rb") as file:
        # A rank that is killed may leave half an entry.
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                yield pickle.load(file)


def options_of_this_rank():
    return pickle.loads(bytes.fromhex(os.environ["CHECK_OPTIONS"]))


def options_as_text(options):
    """For CHECK_OPTIONS."""
    return pickle.dumps(options).hex()


@dataclasses.dataclass
class Finding:
    """A line of the check: what the printer, --json and the tests get.

    word: "ok", "WRONG", "LOSES" or "note". row: a key of rows.ROWS. values: what the
    sentences of the row are filled with.
    """

    word: str
    row: str
    values: dict
