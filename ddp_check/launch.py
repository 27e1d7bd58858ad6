"""A launch of the script: its processes, and what is known after its end.

torchrun runs as a fork of the check, which has imported torch already. All processes of
a check are known by their environment and by where they write: see processes_of(). So
nothing is left behind, also if the check is killed by SIGKILL: see Guardian.
"""

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

from ddp_check import trace
from ddp_check.result import PACKAGE, Run, in_collective

FORK = multiprocessing.get_context("fork")
STACK_SIGNAL = signal.SIGRTMIN + 5  # a rank writes where its main thread is


class TooSlow(Exception):
    """The time of a launch is over, and it does not hang."""


@dataclasses.dataclass
class Launcher:
    """Starts launches of one script. What all of them have in common."""

    base: Path
    script: list  # ["/path/mine.py"] or ["-m", "module"]
    arguments: list
    links: list
    steps: int
    timeout: float
    pipe: int  # to the guardian
    tick: object  # is called while a launch is waited for
    float64: bool = True
    gpus: bool = False
    temporary: dict = dataclasses.field(default_factory=dict)  # {folder: TMPDIR}

    def start(self, name, ranks=2, machines=1, folders=None, gpus=None, **options):
        return Launch(self, name, ranks, machines, folders, gpus, options)

    def run(self, name, *more, **options):
        return self.start(name, *more, **options).end()


class Launch:
    """The script, launched by torchrun: by one for each machine. It starts immediately.

    It runs in `folders`; a relaunch passes those of the launch before it. `log` has
    what the ranks have recorded, and everything they said.
    """

    def __init__(self, launcher, name, ranks, machines, folders, gpus, options):
        self.launcher = launcher
        self.name = name
        self.ranks = ranks
        self.began = time.monotonic()
        self.timeout = launcher.timeout
        self.log = launcher.base / name
        self.log.mkdir()
        names = [f"machine{i}" for i in range(machines)]
        self.folders = folders or [self.log / name / "folder" for name in names]
        of_machine = ranks // machines
        if gpus is None:
            gpus = of_machine if launcher.gpus else 0
        options = {"float64": launcher.float64, "steps": launcher.steps, **options}
        if options.get("record"):
            options["record"] = str(self.log)
        self.options = trace.LaunchOptions(gpus=gpus, **options)
        environment = {
            "CHECK": "1",
            "CHECK_CWD": os.getcwd(),
            "CHECK_LOG": str(self.log),
            "CHECK_OPTIONS": trace.options_as_text(self.options),
            "CUDA_VISIBLE_DEVICES": "",  # a CPU computes the same bits every time
            "PYTHONPATH": python_path(),
            "TORCH_COMPILE_DISABLE": "1",  # it would not see the random numbers
            "HYDRA_FULL_ERROR": "1",  # Hydra hides tracebacks
            # Lightning's options for several machines. Most scripts leave them out.
            "PL_TRAINER_NUM_NODES": str(machines),
            "LT_NUM_NODES": str(machines),
        }
        if not gpus:
            # Without these, Accelerate, the Trainer and Lightning take one process.
            environment |= {"ACCELERATE_USE_CPU": "true", "LT_ACCELERATOR": "cpu"}
            environment |= {"PL_TRAINER_DEVICES": str(of_machine)}
            environment |= {"LT_DEVICES": str(of_machine)}
        meet = ["--standalone"]  # torchrun takes a free port and keeps it open
        if machines > 1:
            meet = [f"--nnodes={machines}", "--master-addr=127.0.0.1"]
            meet += [f"--master-port={free_port()}"]
        self.processes = []
        for machine, folder in enumerate(self.folders):
            folder.mkdir(parents=True, exist_ok=True)
            # A short name: sockets in it may have no more than 107 characters.
            short = launcher.base / f"t{len(launcher.temporary)}"
            temporary = launcher.temporary.setdefault((folder, machine), short)
            temporary.mkdir(exist_ok=True)
            link(launcher.links, folder)
            words = [f"--nproc-per-node={of_machine}", "--local-addr=localhost", *meet]
            words += [f"--node-rank={machine}"] * (machines > 1)
            # Without --, torchrun would read options of the script as its own.
            words += ["--", f"{PACKAGE}/__main__.py", *launcher.script]
            given = ranks, of_machine, folder
            words += [fill_in(word, *given) for word in launcher.arguments]
            said = self.log / f"torchrun{machine}"
            more = environment | {"TMPDIR": str(temporary)}
            arguments = words, folder, said, more, launcher.pipe
            process = FORK.Process(target=become_torchrun, args=arguments)
            process.start()
            self.processes.append(process)

    def end(self, timeout=None):
        """Wait until it ends, but not beyond the timeout. Leaves no process."""
        self.timeout = min(self.timeout, timeout or self.timeout)
        deadline = self.began + self.timeout
        while True:
            codes = [process.exitcode for process in self.processes]
            if None not in codes or time.monotonic() > deadline:
                break
            if any(codes):  # the other machine may wait for long
                deadline = min(deadline, time.monotonic() + 10)
            self.launcher.tick(self)
            time.sleep(0.05)
        hangs = None in codes and not any(codes)
        stacks = {}
        if hangs:
            stacks = self.stacks()
            if not self.waits(stacks):
                kill_all(self.log)
                raise TooSlow(self.timeout)
        stayed = processes_of(self.log)
        # Workers of a killed rank look for their parent only every 5 seconds.
        for _ in range(150):
            if hangs or not stayed:
                break
            time.sleep(0.1)
            stayed = processes_of(self.log)
        kill_all(self.log)
        for process in self.processes:
            process.join()
        names = ["errors", "rank0.out", "torchrun0", "torchrun1"]
        paths = [self.log / name for name in names]
        said = {p.name: p.read_text(errors="replace") for p in paths if p.exists()}
        traces = [trace.read_trace(self.log, rank) for rank in range(self.ranks)]
        seconds = time.monotonic() - self.began
        of_run = codes, hangs, stayed, said, stacks, self.folders, self.log
        run = Run(self.name, traces, *of_run, self.timeout, seconds)
        run.raise_own_fault()
        return run

    def progress(self):
        """It grows whenever a rank makes a step."""
        return sum(path.stat().st_size for path in self.log.glob("rank*.trace"))

    def rank_pids(self):
        """{rank: pid}: the children of torchrun."""
        torchruns = [process.pid for process in self.processes]
        pids = {}
        for pid in processes_of(self.log):
            with contextlib.suppress(OSError, KeyError, ValueError):
                if int(stat(f"/proc/{pid}/stat")[1]) in torchruns:
                    pids[int(environment_of(pid)["RANK"])] = pid
        return pids

    def waits(self, stacks):
        """Whether nothing moves, so that it hangs, and is not only slow.

        If a rank waits in a collective, only main threads and helpers, such as workers
        of a DataLoader, make progress. Other threads may compute for ever.
        """
        ranks = self.rank_pids().values()
        torchruns = [process.pid for process in self.processes]
        helpers = [p for p in processes_of(self.log) if p not in (*ranks, *torchruns)]
        main = any(map(in_collective, stacks.values()))
        before = self.progress()
        running = 0
        for _ in range(30):
            busy = [is_running(pid, main) for pid in ranks]
            running += any(busy + [is_running(pid) for pid in helpers])
            time.sleep(0.1)
        # Without a rank, only torchrun is left, which ends soon.
        return bool(ranks) and self.progress() == before and running < 3

    def stacks(self):
        """Of each rank, the frames of its main thread: (file, line, function)."""
        for pid in self.rank_pids().values():
            with contextlib.suppress(OSError):
                os.kill(pid, STACK_SIGNAL)
        time.sleep(0.5)
        stacks = {}
        for rank in range(self.ranks):
            path = self.log / f"rank{rank}.stack"
            text = path.read_text(errors="replace") if path.exists() else ""
            frames = re.findall(r'  File "(.*)", line (\d+) in (.*)', text)
            if frames:
                stacks[rank] = frames
        return stacks


# ---- Processes -----------------------------------------------------------------------
class Guardian:
    """A process that cleans up after the check, whatever end that has.

    It waits until the check closes its end of a pipe, as SIGKILL does, too. Then it
    kills all processes of the check and removes its folder, or what is large in it if
    the check has asked for the rest.
    """

    def __init__(self, folder):
        self.folder = folder
        read, self.pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.wait(read)
            finally:
                os._exit(0)
        os.close(read)

    def wait(self, read):
        os.setsid()  # what kills the group of the check does not kill this process
        os.close(self.pipe)
        for descriptor in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        word = b""
        while more := os.read(read, 100):
            word += more
        kill_all(self.folder, patience=10)
        if word == b"keep":
            for pattern in ("t[0-9]*", "*/machine*", "*/shared"):
                for path in self.folder.glob(pattern):
                    shutil.rmtree(path, ignore_errors=True)
            for path in self.folder.glob("*/*.pickle"):
                path.unlink()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def end(self, keep):
        os.write(self.pipe, b"keep" if keep else b"")
        os.close(self.pipe)
        os.waitpid(self.pid, 0)


def become_torchrun(words, folder, said, environment, pipe):
    """What a forked process does: the same as the command torchrun."""
    import torch.distributed.run

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the check
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.close(pipe)
    os.chdir(folder)
    os.environ.update(environment)
    tempfile.tempdir = None  # look at TMPDIR again
    os.environ["CHECK_PARENT"] = str(os.getpid())
    output = os.open(said, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    torch.distributed.run.main(words)


def processes_of(folder):
    """The processes of a launch, or of a check: the folder is in their environment.

    Or they write there: a fork has the environment of its parent.
    """
    entry = re.compile(b"CHECK_LOG=" + re.escape(os.fsencode(folder)) + b"[/\0]")
    pids = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry.search((path / "environ").read_bytes()):
                pids.add(int(path.name))
        with contextlib.suppress(OSError):  # its output may be closed
            if os.readlink(path / "fd/1").startswith(f"{folder}/"):
                pids.add(int(path.name))
    return sorted(pids)


def kill_all(folder, patience=1):
    """patience: how often to look in vain, for processes that are about to start."""
    quiet = 0
    while quiet < patience:
        pids = processes_of(folder)
        for pid in sorted(pids):  # torchrun first: it must not start ranks again
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if pids else quiet + 1
        time.sleep(0.02)


def environment_of(pid):
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(e.partition("=")[::2] for e in entries.split("\0") if "=" in e)


def stat(path):
    """The fields behind the name: the state, the parent, ..."""
    return Path(path).read_text().rpartition(")")[2].split()


def is_running(pid, main_thread=False):
    """Whether a thread computes, reads the disk, or would if it got a CPU."""
    paths = Path(f"/proc/{pid}/task").glob(str(pid) if main_thread else "*")
    with contextlib.suppress(OSError):
        return any(stat(path / "stat")[0] in "RD" for path in paths)
    return False


def free_port():
    """One that the system gives to nobody who asks for any port, as others do."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(low // 2, low)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def python_path():
    paths = [".", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(os.path.abspath(path) for path in paths)


def link(paths, folder):
    for path in paths:
        place = folder / path.name
        if path.parts[0] == "..":  # where the script opens ../data
            place = folder / path
        if not place.is_symlink():
            place.symlink_to(path.resolve())


def fill_in(word, ranks, of_machine, folder):
    """{32} becomes 32 divided by the ranks, {ranks} their number, {out} a folder."""
    word = re.sub(r"\{(\d+)\}", lambda number: str(int(number[1]) // ranks), word)
    word = word.replace("{ranks}", str(ranks))
    word = word.replace("{local_ranks}", str(of_machine))
    return word.replace("{out}", str(folder / "out"))
