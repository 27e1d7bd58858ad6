"""Sees what torch computes: random numbers, and collectives of the ranks."""

from collections import Counter

import torch

from ddp_check import trace
from ddp_check.rank.generators import state_of
from ddp_check.rank.patch import TorchDispatchMode
from ddp_check.rank.tensors import checksum, entries_of

MOVES = torch.ops.aten.flip.default, torch.ops.aten.roll.default
MOST_DRAWS = 1000  # in a step, without gradients
REDUCES = "allreduce", "all_reduce", "reduce_scatter", "_reduce_scatter"


class Draws(TorchDispatchMode):
    """The mode is on in each launch, so that all compute in the same way.

    see_draw(key, number, turn, draw, high, result) and see_collective(floats) are told
    of each. The first one may return other numbers. see_move(name, tensor) is told if
    each row of a tensor takes the place of another one.

    A draw is known by its number among those of the same name in a step. Beside it
    there is its turn, for gradient accumulation: in modules, the calls of backward()
    so far, and its number since the last one; or else its number in the run.
    """

    def __init__(self, see_draw, see_move, see_collective):
        super().__init__()
        self.see_draw = see_draw
        self.see_move = see_move
        self.see_collective = see_collective
        self.sets_up = True  # no optimizer was made yet
        self.paused = False
        self.in_module = 0
        self.numbers = Counter()  # within a step
        self.turn = 0  # calls of backward() so far
        self.in_turn = Counter()  # draws in modules, since the last backward()
        self.in_run = Counter()  # draws outside of modules

    def end_turn(self):
        self.turn += 1
        self.in_turn.clear()

    def end_step(self):
        self.numbers.clear()

    def next_number(self, key):
        self.numbers[key] += 1
        return self.numbers[key]

    def next_turn(self, key):
        if self.in_module:
            self.in_turn[key] += 1
            return self.turn, key, self.in_turn[key]
        self.in_run[key] += 1
        return self.in_run[key] - 1, key, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace in ("c10d", "_c10d_functional") and not self.paused:
            self.see_collective(floats_reduced(function, args))
        if function in MOVES and not self.paused and moves_rows(*args):
            self.see_move(function.overloadpacket.__name__, args[0])
        draws = torch.Tag.nondeterministic_seeded in function.tags and not self.paused
        if not draws:
            return function(*args, **kwargs)
        generator = generator_in([args, kwargs]) or torch.default_generator
        state = state_of(generator)
        result = function(*args, **kwargs)
        # A part of a sharded weight is left out, and so is a weight that has no values.
        is_plain = torch.is_tensor(result) and not hasattr(result, "to_local")
        if is_plain and not result.is_meta and not self.sets_up:
            self.draw(function.overloadpacket.__name__, state, args, result)
        return result

    def draw(self, name, state, args, result):
        key = name
        if not torch.is_grad_enabled():
            # Noise of the batch, or what one rank does by itself, such as sampling.
            key += " without gradients"
            if self.numbers[key] >= MOST_DRAWS:
                return
        number = self.next_number(key)
        high = 0
        if name.startswith(("randperm", "randint")):
            numbers = [value for value in args if type(value) is int]
            high = max(numbers[:2], default=0)
        draw = trace.Draw(name, list(result.shape), checksum(result), state)
        new = self.see_draw(key, number, self.next_turn(key), draw, high, result)
        if new is not None:
            with torch.no_grad():
                result.copy_(new)


def moves_rows(tensor, *dims):
    """dims: those of flip(), or the shifts and those of roll(), which may have none.

    A single column may be scores that the loss has sorted.
    """
    moves = 0 in dims[-1] or -tensor.dim() in dims[-1] or dims[1:] == ([],)
    return moves and tensor.dim() > 1


def generator_in(value):
    """The generator that a call is given, or None."""
    if isinstance(value, torch.Generator):
        return value
    if isinstance(value, (list, tuple, dict)):
        return next(filter(None, map(generator_in, entries_of(value))), None)
    return None


def floats_reduced(function, args):
    """How many floating-point values a collective adds up over the ranks."""
    if not function.overloadpacket.__name__.startswith(REDUCES):
        return 0
    return max([count_floats(value) for value in args], default=0)


def count_floats(value):
    if torch.is_tensor(value):
        return value.numel() * value.is_floating_point()
    return sum(map(count_floats, value)) if isinstance(value, (list, tuple)) else 0
