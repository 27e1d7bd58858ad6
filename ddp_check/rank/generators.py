"""All generators of random numbers beside torch's: who has drawn in a step?"""

import contextlib
import random
import sys
import zlib
from collections import Counter

import torch

from ddp_check.rank.patch import stand_in, wrap

try:
    import numpy
except ImportError:
    numpy = None


def seed_all(seed):
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy:
        numpy.random.seed(seed)


def crc(*state):
    return zlib.crc32(repr(state).encode())


def state_of(generator):
    """A checksum of the state of any generator."""
    if isinstance(generator, torch.Generator):
        return zlib.crc32(generator.get_state().numpy().tobytes())
    if hasattr(generator, "getstate"):
        return crc(generator.getstate())
    if hasattr(generator, "get_state"):
        kind, keys, *rest = generator.get_state(legacy=True)
        return crc(keys.tobytes(), *rest)
    return crc(generator.bit_generator.state)


class Generators:
    """Knows those of Python and numpy, also what default_rng() or Random() makes.

    A generator has drawn, or was seeded, if its state has changed.
    """

    def __init__(self):
        self.known = {"random": random._inst}
        self.states = {}
        self.made = Counter()
        self.paused = False
        wrap(random.Random, "__init__", self.see_random)
        if numpy:
            self.known["numpy.random"] = numpy.random.mtrand._rand
            for name in ("Generator", "RandomState"):
                of_numpy = getattr(numpy.random, name)
                setattr(numpy.random, name, stand_in(of_numpy, self.make))
            wrap(numpy.random, "default_rng", self.make)
        self.take()

    def see_random(self, create, generator, *args, **kwargs):
        create(generator, *args, **kwargs)
        maker = sys._getframe(2).f_globals.get("__name__", "")
        if maker.partition(".")[0] not in NOT_OF_SCRIPTS:
            self.add("random.Random()", generator)

    def make(self, create, *args, **kwargs):
        generator = create(*args, **kwargs)
        self.add(f"numpy.random.{create.__name__}()", generator)
        return generator

    def add(self, name, generator):
        # What a data set makes for one sample does not matter.
        if not self.paused and not any(g is generator for g in self.known.values()):
            number = self.made[name] + 1
            unique = f"{name} {number}" if number > 1 else name
            with contextlib.suppress(NotImplementedError):  # random.SystemRandom
                self.states[unique] = state_of(generator)
                self.known[unique] = generator
                self.made[name] = number

    def take(self):
        """What has drawn since the last time: {name: its state}."""
        drawn = {}
        for name in list(self.known):
            state = state_of(self.known[name])
            if state != self.states.get(name):
                self.states[name] = drawn[name] = state
            # Here, and as the argument of this call: the script has let go of it.
            if sys.getrefcount(self.known[name]) <= 2 and name not in GLOBAL:
                del self.known[name]
        return drawn

    @contextlib.contextmanager
    def pause(self):
        """While a loader yields: the batch is recorded, so it does not matter."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before
            self.take()


GLOBAL = "random", "numpy.random"
NOT_OF_SCRIPTS = "tempfile", "sympy"  # torch imports sympy when it first needs it
