"""Sees what DataLoaders yield."""

import contextlib
import os
import select
import signal
import zlib
from collections import deque

from torch.utils.data import DataLoader

from ddp_check import trace
from ddp_check.rank.generators import seed_all
from ddp_check.rank.patch import PRIVATE, wrap
from ddp_check.rank.tensors import checksum, map_tensors, rows_of, tensors_in

PATIENCE = 10  # seconds for three samples


class Loaders:
    """Numbers the loaders and their iterations. A replay gives other batches.

    A listener is told: fetching() is a context in which a loader works, and
    fetched(a trace.Fetch, the batch).
    """

    def __init__(self, listener, cast, replay=None):
        self.listener = listener
        self.cast = cast  # for each tensor of a batch
        self.replay = replay
        self.known = []  # [data set, batch size, number of iterations]
        self.iterates = False  # DataLoader.__iter__() makes the iterator
        wrap(DataLoader, "__iter__", self.see_iteration)
        self.see_class(DataLoader)
        # A loader with an __iter__() of its own may have its own iterator, as that of
        # torchdata.
        DataLoader.__init_subclass__ = classmethod(self.see_subclass)
        self.length = DataLoader.__len__
        wrap(DataLoader, "__len__", self.see_length)
        wrap(*PRIVATE["next indices"], self.see_indices)

    def number(self, loader):
        """A loader may be made again for each epoch, but not its data."""
        for number, (data, size, _) in enumerate(self.known):
            if data is loader.dataset and size == loader.batch_size:
                return number
        return None

    def see_subclass(self, cls, **options):
        super(DataLoader, cls).__init_subclass__(**options)
        self.see_class(cls)

    def see_class(self, cls):
        name = PRIVATE["make an iterator"][1]
        if name in vars(cls):
            wrap(cls, name, self.see_iterator)

    def see_iterator(self, make, loader):
        """Where DataLoader.__iter__() does not call it, the loader has its own."""
        if self.iterates:
            return make(loader)
        batches = self.see_iteration(make, loader)
        if isinstance(batches, Batches):
            return batches
        with self.listener.fetching():
            return Given(batches, make(loader))

    def see_iteration(self, iterate, loader):
        number = self.number(loader)
        if number is None:
            number = len(self.known)
            self.known.append([loader.dataset, loader.batch_size, 0])
            with contextlib.suppress(TypeError):  # a stream, or an endless sampler
                self.listener.sees_loader(number, len(loader.dataset), len(loader))
        key = number, self.known[number][-1]
        self.known[number][-1] += 1
        self.listener.begins_iteration(number)
        persists = loader.persistent_workers and loader.num_workers > 0
        if self.replay and self.replay.gives(key):
            with contextlib.suppress(TypeError):
                own = self.length(loader)
                if own != self.replay.length(number, None):
                    self.listener.has_other_length()
            batches = self.give(key)
        else:
            if persists:
                loader._iterator = getattr(loader._iterator, "iterator", None)
            if persists and loader._iterator is not None:
                loader._iterator.check_indices = deque()
            with self.listener.fetching():
                self.iterates = True
                try:
                    iterator = iterate(loader)
                finally:
                    self.iterates = False
                data = fingerprint(loader) if key[1] == 0 else 0
            several = loader.batch_sampler is not None
            batches = Batches(self, key, iterator, data, several)
        if persists:  # a loader of the script's own may go on with it
            loader._iterator = batches
        return batches

    def give(self, key):
        self.listener.begins_to_give()
        for batch in self.replay.give(key):
            self.listener.gives()
            self.see_batch(trace.Fetch(key), batch, 0)
            yield batch
        if not self.replay.has_more(key):
            self.listener.leave()  # the script asks for more than the ranks had

    def see_length(self, length, loader):
        """Of a loader whose batches are replayed: as long as on a rank."""
        known = None
        if self.replay:
            size = None
            with contextlib.suppress(TypeError):
                size = len(loader.dataset)
            known = self.replay.length(self.number(loader), size)
        return length(loader) if known is None else known

    def see_indices(self, choose, iterator):
        index = choose(iterator)
        vars(iterator).setdefault("check_indices", deque()).append(index)
        return index

    def see_batch(self, fetch, batch, rows):
        fetch.rows, fetch.parts = rows_of(tensors_in(batch))
        self.listener.fetched(fetch, batch, rows)


class Batches:
    """What iter(loader) returns: its batches, which are recorded."""

    def __init__(self, loaders, key, iterator, data, batches):
        self.loaders = loaders
        self.batches = batches  # whether an index is one of a sample
        self.key = key
        self.iterator = iterator
        self.indices = vars(iterator).setdefault("check_indices", deque())
        self.data = data

    def __iter__(self):
        return self

    def __len__(self):
        return len(self.iterator)

    def __getattr__(self, name):
        return getattr(self.iterator, name)

    def __next__(self):
        fetch = trace.Fetch(self.key, data=self.data)
        try:
            with self.loaders.listener.fetching():
                batch = next(self.iterator)
        except StopIteration:
            self.loaders.listener.fetched(fetch, None, 0)
            raise
        batch = map_tensors(self.loaders.cast, batch)
        if self.indices:
            chosen = self.indices.popleft()
            # A batch sampler may yield a range, say.
            several = self.batches or isinstance(chosen, (list, tuple))
            chosen = list(chosen) if several else [chosen]
            if all(index is not None for index in chosen):
                fetch.ids = [zlib.crc32(repr(index).encode()) for index in chosen]
        self.loaders.see_batch(fetch, batch, len(fetch.ids) if self.batches else 0)
        return batch


class Given(Batches):
    """The same in a replay, with the batches of all ranks."""

    def __init__(self, given, iterator):
        self.given = given
        self.iterator = iterator

    def __next__(self):
        return next(self.given)


def fingerprint(loader):
    """A checksum of three samples, with fixed seeds. Ranks with the same data agree.

    -1 if they are others each time, and 0 if nothing is known. It is made in a process
    of its own: a data set may open files when it is first asked, or draw numbers.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(checksum_of_samples(loader)).encode())
        finally:
            os._exit(0)
    os.close(write)
    if not select.select([read], [], [], PATIENCE)[0]:
        os.kill(pid, signal.SIGKILL)
    with open(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return int(text or 0)


def checksum_of_samples(loader):
    sums = set()
    for _ in range(2):
        seed_all(0)
        try:
            last = len(loader.dataset) - 1
            samples = [loader.dataset[i] for i in (0, last // 2, last)]
            if loader.batch_sampler is not None:  # it may make the tensors
                samples = [loader.collate_fn([sample]) for sample in samples]
            sums.add(sum(map(checksum, tensors_in(samples))))
        except Exception:  # a data set may raise anything
            return 0
    return sums.pop() if len(sums) == 1 else -1
