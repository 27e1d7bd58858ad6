"""The tensors of a launch that a replay needs: how they are written, and read again.

The file of a rank is a row of entries. Each has a kind and a key, and a value, which is
read only if somebody asks for it:

    start     name              a weight as it was when it was first seen
    after     (step, call)      {name: value} that a call of an optimizer has changed
    final     (step, 0)         {name: value} that has changed since then
    gradient  (step, call)      {name: value} as the optimizer got them
    unclipped (step, call)      {name: value} before clipping
    options   (step, call)      learning rates and so on
    bits      step              {name: checksum} of all weights
    batch     (loader, iteration, place)    rows, the batch, calls of backward() so far
    length    loader            numbers of samples and of batches
    draw      (step, name, number)          random numbers: see draws.py
    turn      (turn, name, number)          the place of such a draw
    sums      (step, call of backward())    the sums in a loss: see losses.py
    rows      (step, number)    signatures of what enters batch norm and dropout

The first five are those of rank 0: the other ranks have the same.
"""

import io
import pickle
import struct
from pathlib import Path

import torch

from ddp_check.rank.patch import private
from ddp_check.rank.tensors import content

OF_RANK_0 = "start", "after", "final", "gradient", "unclipped"
MOST_BYTES = 3 * 2**30  # that a rank records
SIZES = struct.Struct("<qq")  # of the kind with its key, and of the value


def path_of(folder, rank):
    return Path(folder, f"rank{rank}.pickle")


def rebuild(dtype, shape, data):
    if not data:
        return torch.empty(shape, dtype=dtype)
    with private("without modes")():
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


class Pickler(pickle.Pickler):
    """A tensor may be a view of a large one. Its own values are enough."""

    def reducer_override(self, value):
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        if not plain or value.requires_grad or value.is_quantized or value.is_meta:
            return NotImplemented
        return rebuild, (value.dtype, tuple(value.shape), content(value))


def as_bytes(value):
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


class Recording:
    """Writes what a replay of this rank needs."""

    def __init__(self, folder, rank):
        self.file = open(path_of(folder, rank), "wb")
        self.rank = rank
        self.bytes = 0
        self.cut = False  # it has become too large, so the later steps are missing

    def keep(self, kind, key, value):
        if self.file is None or (self.rank > 0 and kind in OF_RANK_0):
            return
        try:
            value = as_bytes(value)
        except Exception:
            rows, _, turn = value  # only a batch may hold anything
            value = as_bytes((rows, None, turn))
        name = pickle.dumps((kind, key))
        self.file.write(SIZES.pack(len(name), len(value)) + name + value)
        self.bytes += len(name) + len(value)
        if self.bytes > MOST_BYTES:
            self.cut = True
            self.close()

    def close(self):
        if self.file is not None:
            self.file.close()
            self.file = None


class Recorded:
    """Reads what a rank has recorded."""

    def __init__(self, folder, rank):
        self.places = {}  # for each kind: {key: where its value is}
        self.file = open(path_of(folder, rank), "rb")
        end = self.file.seek(0, io.SEEK_END)
        place = self.file.seek(0)
        while len(sizes := self.file.read(SIZES.size)) == SIZES.size:
            name, size = SIZES.unpack(sizes)
            place += SIZES.size + name + size
            if place > end:  # the rank was killed while it wrote this
                break
            kind, key = pickle.loads(self.file.read(name))
            self.places.setdefault(kind, {})[key] = (self.file.tell(), size)
            self.file.seek(place)

    def get(self, kind, key, default=None):
        where = self.places.get(kind, {}).get(key)
        if where is None:
            return default
        self.file.seek(where[0])
        return pickle.loads(self.file.read(where[1]))

    def keys(self, kind):
        return list(self.places.get(kind, {}))

    def values(self, kind, step):
        """{name: value}, of all calls of optimizers in this step."""
        values = {}
        for key in self.keys(kind):
            if key[0] == step:
                values |= self.get(kind, key)
        return values

    @property
    def steps(self):
        """The number of steps."""
        return 1 + max(self.keys("bits"), default=-1)
