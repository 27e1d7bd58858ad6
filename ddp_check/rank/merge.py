"""Joins what several ranks had into what one process gets. Nothing here has a state
beside the notes that a Merge takes: what could not be joined, and so on.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from ddp_check.rank.tensors import checksum, entries_of, tensors_in

# Problems, of which each excuses a difference.
PADDED = (
    "rows that are padded to different lengths, since the value to pad with is a guess "
    "(pad in collate_fn to a length that all ranks share)"
)
CHOSEN = (
    "torch.{}(), which may draw numbers of rows: those in a larger batch are a guess"
)


@dataclasses.dataclass
class Notes:
    problems: list = dataclasses.field(default_factory=list)  # sentences
    alike: set = dataclasses.field(default_factory=set)  # calls with the same numbers
    different: set = dataclasses.field(default_factory=set)
    widened: bool = False  # rows of a batch, to the longest of all ranks


class Merge:
    """Joins parts, one of each rank.

    order: rows come "rank by rank", or "row by row": the first of each rank, then the
    second of each. all_batches(): the batches of all steps and ranks, which show what
    rows are padded with.
    """

    def __init__(self, order, all_batches=list):
        self.order = order
        self.all_batches = all_batches
        self.rows = 0  # in the last batch
        self.paddings = {}  # path in a batch: the value, or None if nobody knows
        self.notes = Notes()

    def take_notes(self):
        """Those since the last time."""
        notes, self.notes = self.notes, Notes()
        return notes

    # ---- Batches
    def batch(self, parts, rows):
        """One batch of those of all ranks. rows: how many samples each of them has."""
        self.rows = sum(rows)
        if any(part is None for part in parts):
            self.notes.problems.append("a batch could not be recorded")
            return parts[0]
        marks = [list(map(checksum, tensors_in(part))) for part in parts]
        if all(m == marks[0] != [] for m in marks):
            return parts[0]  # the ranks take their shares later
        entries = entries_of(parts[0])
        stacked = any(has_rows(e, rows[0], 0) for e in entries)
        alike = {(e.dtype, e.dim()) if torch.is_tensor(e) else None for e in entries}
        named = isinstance(parts[0], Mapping)
        if stacked and not named and len(entries) == rows[0] > 2 and len(alike) == 1:
            text = f"a batch of {rows[0]} has {rows[0]} tensors with as many rows"
            self.notes.problems.append(text)
        return self.join(parts, rows, stacked)

    def join(self, parts, rows, stacked, path=()):
        """stacked: the batch has a tensor of all samples. path: the place in it."""
        first = parts[0]
        if torch.is_tensor(first) and first.is_nested:
            samples = self.in_order([list(part.unbind()) for part in parts])
            return torch.nested.nested_tensor(samples, layout=first.layout)
        if torch.is_tensor(first):
            return self.join_tensors(parts, rows, stacked, path)
        if is_array(first) and first.dtype.kind in "biuf":  # of numpy
            parts = [torch.as_tensor(part) for part in parts]
            return self.join_tensors(parts, rows, stacked, path).numpy()

        def columns(names):
            for name in names:
                of_ranks = [part[name] for part in parts]
                yield self.join(of_ranks, rows, stacked, (*path, name))

        if isinstance(first, Mapping):
            merged = dict(zip(first, columns(first)))
            if type(first) is dict:
                return merged
            first.update(merged)
            return first
        if isinstance(first, tuple) and hasattr(first, "_fields"):
            return type(first)(*columns(range(len(first))))
        if isinstance(first, (list, tuple)):
            if is_list_of_samples(parts, rows, stacked, top=not path):
                return type(first)(self.in_order([list(part) for part in parts]))
            return type(first)(columns(range(min(map(len, parts)))))
        try:
            same = all(part == first for part in parts)
        except RuntimeError:  # of an object that holds tensors
            same = False
        if not same:
            kind = type(first).__name__
            text = f"batches with a value of type {kind}, which cannot be joined"
            self.notes.problems.append(text)
        return first

    def join_tensors(self, parts, rows, stacked, path):
        first = parts[0]
        if first.dim() == 0:
            if any(not torch.equal(first, part) for part in parts):
                self.notes.problems.append(
                    "a batch has a number that differs between ranks"
                )
            return first
        shapes = [list(part.shape) for part in parts]
        if len(set(map(len, shapes))) > 1:  # such as after squeeze()
            self.notes.problems.append(f"batches of {shapes}")
            return first
        dim = 0  # the dimension along which there are as many rows as samples
        if first.shape[0] != rows[0] > 0:
            if first.dim() > 1 and all(p.shape[1] == n for p, n in zip(parts, rows)):
                dim = 1
            elif stacked:  # they may hold numbers of samples, as boxes and offsets do
                text = f"a batch of {rows[0]} has a tensor of {list(first.shape)}"
                self.notes.problems.append(f"{text}, which may hold sample numbers")
        if all(map(counts_through_rows, parts)):
            text = f"a batch has a tensor of {list(first.shape)} that counts through"
            self.notes.problems.append(f"{text} its rows: it may hold sample numbers")
        try:
            return self.concatenate(self.widen(parts, dim, path), dim)
        except RuntimeError:
            self.notes.problems.append(f"batches of {shapes}")
            return first

    def in_order(self, parts):
        rows = sum(parts, [])
        order = torch.cat(numbered(self.order, map(len, parts))).argsort().tolist()
        return [rows[i] for i in order]

    def concatenate(self, parts, dim, places=None):
        """places: where the rows of each rank belong, if that is known."""
        sizes = [part.shape[dim] for part in parts]
        if dim > 0 or places is None or [*map(len, places)] != sizes:
            places = numbered(self.order, sizes)
        order = torch.cat(places).argsort()
        return torch.cat(parts, dim).index_select(dim, order)

    def widen(self, parts, dim, path):
        """Pad rows that were padded to different lengths to the longest."""
        rest = {part.shape[:dim] + part.shape[dim + 1 :] for part in parts}
        if len(rest) == 1:
            return parts
        self.notes.widened = True
        if path not in self.paddings:
            self.paddings[path] = known_padding(self.all_batches(), path)
        value = self.paddings[path]
        if value is None:
            value = guess_padding(parts, dim)
            self.notes.problems.append(PADDED)
        sizes = [max(sizes) for sizes in zip(*[part.shape for part in parts])]
        padded = []
        for part in parts:
            sizes[dim] = part.shape[dim]
            padded.append(pad_to(part, sizes, value))
        return padded

    # ---- Random numbers
    def draw(self, name, like, high, draws, places=None):
        """What the ranks have drawn, in the shape that one process draws, or None.

        like: what one process has drawn, of numbers up to high. draws: of each rank,
        its own high, and what it has drawn. places: see concatenate().
        """
        if None in draws:
            text = f"torch.{name}(), which some ranks or one process draw more often"
            self.notes.problems.append(text)
            return None
        if name.startswith("rrelu"):  # it returns its output, not what it has drawn
            self.notes.problems.append(f"torch.{name}(), which keeps what it draws")
            return None
        highs, parts = zip(*draws)
        shape = like.shape
        same = all(p.shape == parts[0].shape and p.equal(parts[0]) for p in parts)
        if same and parts[0].shape == shape:
            return parts[0]  # they draw for the whole batch, or for one rank
        if any(part.dim() != len(shape) for part in parts):
            self.notes.problems.append(
                f"torch.{name}() draws other shapes than on the ranks"
            )
            return None
        if high and high == sum(highs):  # numbers of rows
            if name.startswith("randint"):
                self.notes.problems.append(CHOSEN.format(name))
            moved = [
                n[part.long()] for n, part in zip(numbered(self.order, highs), parts)
            ]
            parts = [n.to(part.dtype) for n, part in zip(moved, parts)]
        if name == "multinomial":
            self.notes.problems.append(CHOSEN.format(name))
        for exact in (True, False):  # False: rows that were padded to other lengths
            for d in range(len(shape)):
                sizes = [[*shape[:d], part.shape[d], *shape[d + 1 :]] for part in parts]
                pairs = list(zip(parts, sizes))
                rows = sum(part.shape[d] for part in parts)
                if rows != shape[d] or any(not fits_in(p, s, exact) for p, s in pairs):
                    continue
                if not exact and not self.notes.widened:
                    text = f"each rank draws torch.{name}() with a width of its own"
                    self.notes.problems.append(text)
                # A few bits or numbers may be the same by chance.
                enough = like.numel() >= 16 or name in ("rand", "randn", "normal_")
                if enough:
                    (self.notes.alike if same else self.notes.different).add(
                        f"torch.{name}()"
                    )
                parts = [pad_to(part, size, 1) for part, size in pairs]
                return self.concatenate(parts, d, places)
        text = f"torch.{name}() draws {list(shape) or 'one number'} on one process, and"
        shapes = dict.fromkeys(str(list(part.shape)) for part in parts)
        of_ranks = f"on the ranks {' and '.join(shapes)}"
        if parts[0].shape == shape:
            of_ranks = "other numbers on each rank"
        self.notes.problems.append(f"{text} {of_ranks}")
        return None


def numbered(order, sizes):
    """For each rank, where its rows are among those of all."""
    of_ranks = [[(i, rank) for i in range(n)] for rank, n in enumerate(sizes)]
    places = sum(of_ranks, [])
    if order == "row by row":
        places.sort()
    number = {place: n for n, place in enumerate(places)}
    return [torch.tensor([number[p] for p in own]).long() for own in of_ranks]


def find_rows(parts, whole):
    """For each part, where its rows are in the whole, by their signatures; or None.

    Of rows that are the same, but for rounding, the first is the first. If each rank
    has had all rows, there is one part.
    """
    if len(parts[0]) == len(whole):
        parts = parts[:1]
    theirs = torch.cat(parts)
    if len(theirs) != len(whole) or len(whole) == 0:
        return None
    near = theirs.abs().max().clamp(min=1e-30) * torch.finfo(theirs.dtype).eps ** 0.5
    whole, theirs = (whole / near).round(), (theirs / near).round()
    order, place = whole.argsort(stable=True), theirs.argsort(stable=True)
    if not bool(((whole[order] - theirs[place]).abs() <= 1).all()):
        return None
    where = torch.empty_like(place)
    where[place] = order
    return where.split(list(map(len, parts)))


def counts_through_rows(tensor):
    """Whether row 1 of [rows, n, ...] has numbers from n on, row 2 from 2 n on, ...

    Or whether [n] has each number below n.
    """
    if tensor.is_floating_point() or min(tensor.shape[:2]) < 2:
        return False
    if tensor.dim() == 1:
        return len(tensor) >= 4 and bool(
            (tensor.sort()[0] == torch.arange(len(tensor))).all()
        )
    rows = tensor.flatten(1) // tensor.shape[1]
    return bool((rows == torch.arange(len(rows))[:, None]).all())


def is_array(value):
    return torch.is_tensor(value) or type(value).__name__ == "ndarray"


def has_rows(value, count, depth=2):
    """Whether it is a tensor or a list of so many rows, or lists of such ones."""
    if is_array(value):
        return value.ndim > 0 and len(value) == count
    if depth == 0 or not isinstance(value, (Mapping, list, tuple)):
        return False
    entries = [has_rows(entry, count, depth - 1) for entry in entries_of(value)]
    if isinstance(value, Mapping):
        arrays = [e for e in value.values() if is_array(e) and e.ndim > 0]
        return all(len(e) == count for e in arrays) if arrays else any(entries)
    return len(value) == count or (entries != [] and all(entries))


def is_list_of_samples(parts, rows, stacked, top):
    """Samples, as in detection; or columns: one entry for all samples each."""
    first = parts[0]
    kinds = Mapping, list, tuple
    known = [e for e in first if isinstance(e, kinds) or (is_array(e) and e.ndim > 0)]
    if first and not known:  # such as names
        return True
    columns = bool(known) and all(has_rows(entry, rows[0]) for entry in known)
    columns |= top and stacked
    samples = all(len(part) == n for part, n in zip(parts, rows)) and rows[0]
    return bool(samples) and not (columns and (top or stacked))


# ---- Padding -------------------------------------------------------------------------
def at(batch, path):
    for word in path:
        batch = batch[word]
    return batch


def pad_to(tensor, sizes, value):
    edges = []
    for have, size in zip(reversed(tensor.shape), reversed(sizes)):
        edges += [0, size - have]
    return nn.functional.pad(tensor, edges, value=value) if any(edges) else tensor


def fits_in(tensor, sizes, exact):
    if exact:
        return list(tensor.shape) == list(sizes)
    return all(have <= size for have, size in zip(tensor.shape, sizes))


def guess_padding(parts, dim):
    """The most frequent value at the ends of rows."""
    last = 1 if dim == 0 else 0
    ends = [part.select(last, -1).flatten() for part in parts if part.shape[last] > 0]
    return torch.cat(ends).mode().values.item() if ends else 0


def is_of_bits(tensor):
    return bool(((tensor == 0) | (tensor == 1)).all())


def masks_in(batch):
    """Tensors of ones that end in zeros in some rows."""
    found = []
    for one in tensors_in(batch):
        if one.dim() == 2 and is_of_bits(one) and bool((one[:, 0] == 1).all()):
            if bool((one.long().diff(dim=1) <= 0).all()):
                found.append(one.bool())
    return found


def known_padding(batches, path):
    """What the rows of the tensor at this place are padded with, or None.

    It is 0 for bits. Otherwise a mask beside it shows the value, or the rows: it is the
    only value that ends several rows, that is never before another one in a row, and
    that does not end the longest row of any batch.
    """
    tensors = [at(batch, path) for batch in batches]
    if all(map(is_of_bits, tensors)):
        return 0
    values = set()
    for batch, tensor in zip(batches, tensors):
        for mask in masks_in(batch):
            if mask.shape == tensor.shape[:2]:
                values |= set(tensor[~mask].flatten().tolist()[:10000])
    if len(values) == 1:
        return values.pop()
    if any(tensor.dim() < 2 or tensor.numel() == 0 for tensor in tensors):
        return None
    sizes = zip(*[tensor.shape for tensor in tensors])
    padded = [d for d, of_all in enumerate(sizes) if d > 1 and len(set(of_all)) > 1]
    if padded:  # such as in [rows, channels, times]
        tensors = [t.movedim(padded[0], -1).flatten(0, -2) for t in tensors]
    ends = torch.cat([tensor[:, -1].reshape(len(tensor), -1) for tensor in tensors])
    ends = Counter(row[0] for row in ends.tolist() if len(set(row)) == 1)
    values = [v for v, count in ends.items() if count > 1]
    values = [v for v in values if all(ends_rows(v, t) for t in tensors)]
    return values[0] if len(values) == 1 else None


def ends_rows(value, tensor):
    """Whether it is only at the end of rows, and not of all of them."""
    here = (tensor == value).reshape(*tensor.shape[:2], -1).all(2).long()
    return bool((here.diff(dim=1) >= 0).all()) and not bool(here[:, -1].all())
