"""What grows with the number of ranks? A table for the README: make scale.

Ranks are threads of this process here. Each has a real gloo group, and connections to
all others; its store counts what gloo asks it; the kernel counts the bytes of each
connection. So bytes, messages and connections are those of a real run. The seconds of
a network are not: they are computed from the messages that wait for each other.
It needs Linux, and a minute or two.
"""

import datetime
import math
import os
import pickle
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch
import torch.distributed as dist

import ddp_train

LIMIT = datetime.timedelta(seconds=300)
COLUMNS = 8, 64, 512
MEASURED = 8, 64  # so many ranks fit into one process
HOP = 50e-6  # assumed: seconds of one small message by TCP from machine to machine
SPEED = 1e9  # assumed: bytes per second from machine to machine
CHECKPOINT = 1.2e9  # bytes: 100 million parameters and two moments of AdamW


# ---- Measure -------------------------------------------------------------------------
def at_once(ranks, function):
    """Call function(rank) in a thread for each rank. Returns the seconds it took."""
    errors = []

    def call(rank):
        try:
            function(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(ranks)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - began


class CountingStore(dist.Store):
    """A store that counts the calls of one rank, and their bytes."""

    def __init__(self, shared):
        super().__init__()
        self.shared = shared
        self.calls = 0
        self.bytes = 0

    def set(self, key, value):
        self.calls += 1
        self.bytes += len(value)
        self.shared.set(key, value)

    def get(self, key):
        value = self.shared.get(key)
        self.calls += 1
        self.bytes += len(value)
        return value

    def wait(self, *args):
        self.shared.wait(*args)


def sent_bytes():
    """{name of the connection: bytes that it has sent}, of this process."""
    sent = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # it was that of listdir()
        if not kind.startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(name))) as connection:
            try:
                connection.getpeername()
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            except OSError:
                continue  # it has no other end, as a socket that listens
        sent[name] = struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
    return sent


class Ranks:
    """So many ranks with a gloo group, as threads."""

    def __init__(self, number):
        self.number = number
        shared = dist.HashStore()
        self.stores = [CountingStore(shared) for _ in range(number)]
        self.groups = [None] * number
        before = len(sent_bytes())
        self.seconds_to_join = at_once(number, self.join)
        self.connections = (len(sent_bytes()) - before) / number

    def join(self, rank):
        store = self.stores[rank]
        self.groups[rank] = dist.ProcessGroupGloo(store, rank, self.number, LIMIT)

    def all_reduce(self, rank):
        self.groups[rank].allreduce([torch.zeros(1)]).wait()

    def neighbours(self):
        """How many others a rank exchanges bytes with in an all-reduce."""
        at_once(self.number, self.all_reduce)
        before = sent_bytes()
        at_once(self.number, self.all_reduce)
        time.sleep(0.5)  # until the last bytes have arrived
        used = [name for name, sent in sent_bytes().items() if sent > before[name]]
        return len(used) / self.number


def seconds_at_the_store(clients, address_bytes):
    """Seconds until so many clients of one TCPStore are connected, and until each has
    written its address and read those of all, as gloo does it.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [None] * clients

    def connect(rank):
        stores[rank] = dist.TCPStore(
            "127.0.0.1", server.port, is_master=False, timeout=LIMIT
        )

    def exchange(rank):
        stores[rank].set(str(rank), b"a" * address_bytes)
        for other in range(clients):
            stores[rank].get(str(other))

    # The fastest of three: the first may wait for the name of this machine.
    connecting = min(at_once(clients, connect) for _ in range(3))
    return connecting, at_once(clients, exchange)


def gathered_at_the_start():
    """Bytes of each value that ddp_train.py gathers from all ranks before step 1."""
    sizes = []

    def all_gather_object(values, value):
        sizes.append(len(pickle.dumps(value)))
        values[:] = [value] * len(values)

    dist.all_gather_object = all_gather_object
    ddp_train.Log.say = lambda self, line: None
    os.environ.update(RANK="0", WORLD_SIZE="1")
    with tempfile.TemporaryDirectory() as folder:
        Path(f"{folder}/data").write_bytes(bytes(2000))
        options = ["--max-steps", "1", "--data", f"{folder}/data", "--layers", "1"]
        args = ddp_train.parse_args([*options, "--out", f"{folder}/out"])
        world = ddp_train.init_distributed("cpu", url=f"file://{folder}/store")
        ddp_train.train(args, world, lambda: 0)
        dist.destroy_process_group()
    return sizes


def measure_addresses():
    """Bytes of the address that a rank tells the others: (of 0 ranks, more per rank).

    Stops where something is not as the table takes it to be.
    """
    sizes = []
    for number in MEASURED:
        ranks = Ranks(number)
        store = ranks.stores[0]
        sizes.append(store.bytes / store.calls)
        assert store.calls == number + 1, "a rank writes one address, and reads all"
        assert ranks.connections == number - 1, "a rank is connected with all others"
        assert ranks.neighbours() == 2, "an all-reduce goes round a ring"
    few, many = MEASURED
    growth = (sizes[1] - sizes[0]) / (many - few)
    return sizes[0] - growth * few, growth


def measure_lazy():
    """With TORCH_GLOO_LAZY_INIT=1, after an all-reduce: (connections, bytes read)."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    ranks = Ranks(MEASURED[1])
    assert ranks.connections == 0
    before = len(sent_bytes())
    at_once(ranks.number, ranks.all_reduce)
    connections = (len(sent_bytes()) - before) / ranks.number
    return connections, ranks.stores[0].bytes


# ---- The table -----------------------------------------------------------------------
def in_bytes(number):
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= 10 * unit:
            return f"{number / unit:.0f} {name}"
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:.0f} bytes"


def in_seconds(number):
    if number < 0.1:
        return f"{number * 1e3:.2g} ms"
    return f"{number:.2g} s"


def chain(messages):
    """What messages cost that wait for each other."""
    return f"{messages}, {in_seconds(messages * HOP)}"


def main():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gathered = gathered_at_the_start()
    base, growth = measure_addresses()
    lazy_connections, lazy_bytes = measure_lazy()
    rows = [
        ["What grows with the ranks"],
        ["---"],
        ["Start: all connect to one store (measured)"],
        ["Start: gloo's connections of a rank: to all others"],
        ["Start: for that a rank reads from the store (a)"],
        ["Start: the same, all ranks together (a)"],
        ["Start: the same, seconds at the store (measured)"],
        ["With `TORCH_GLOO_LAZY_INIT=1`: connections; bytes (e)"],
        [f"Start: bytes of {len(gathered)} `all_gather()` to a rank (b)"],
        ["Start: their messages one after the other (c)"],
        ["A stop signal, each step; not waited for (c)"],
        ["A log line: two all-reduces, waited for (c)"],
        ["An evaluation: two all-reduces, at its end (c)"],
        ["A checkpoint of 1.2 GB to ranks without one (d)"],
    ]
    for number in COLUMNS:
        address = base + growth * number
        read = address * (number + 1)
        connecting, exchanging = seconds_at_the_store(number, round(address))
        # An all-reduce of little goes twice round the ring, an all-gather once. To
        # gather an object, gloo gathers its size first.
        ring = number - 1
        copies = math.ceil(math.log2(number))
        cells = [
            f"{number} ranks",
            "---",
            in_seconds(connecting),
            f"{number - 1}",
            in_bytes(read),
            in_bytes(read * number),
            in_seconds(exchanging),
            f"{lazy_connections:.0f}; {in_bytes(lazy_bytes)}",
            in_bytes(sum(gathered) * number),
            chain(len(gathered) * 2 * ring),
            chain(2 * ring),
            chain(2 * 2 * ring),
            chain(2 * 2 * ring),
            f"{copies} copies, {in_seconds(copies * CHECKPOINT / SPEED)}",
        ]
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(f"""
(a) Counted with {MEASURED[0]} and {MEASURED[1]} ranks: a rank's address has \
{base:.0f} + {growth:.0f} n bytes, and each reads all n.
(b) Counted with one rank: {sum(gathered)} bytes of each rank.
(c) The number of messages that wait for each other, and {HOP * 1e6:.0f} µs for each \
(assumed). That they go round a ring was seen with {MEASURED[1]} ranks.
(d) Computed: gloo sends it along a tree, log2(n) times from the rank that has it, \
with {SPEED / 1e9:.0f} GB/s (assumed).
(e) Counted with {MEASURED[1]} ranks, after one all-reduce.""")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the groups of all these ranks would take long to end
