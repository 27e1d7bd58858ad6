"""Runs the script in this rank, as Python would, and watches it."""

import atexit
import ctypes
import gc
import importlib.util
import inspect
import os
import re
import signal
import sys
import threading
import traceback
import types
from pathlib import Path

import torch

from ddp_check import trace
from ddp_check.rank.float64 import cast_everything
from ddp_check.rank.generators import seed_all
from ddp_check.rank.patch import MEETS, private, wrap
from ddp_check.rank.watch import Watcher

SPAWN = "it starts its own ranks with torch.multiprocessing: torchrun must start it"


def run(words):
    """words: the script and its arguments, or -m, a module and its arguments."""
    end_with_torchrun()
    folder = Path(os.environ["CHECK_LOG"])
    options = trace.options_of_this_rank()
    rank = int(os.environ["RANK"])
    # A file for each rank's output. One for all errors, so that the first comes first.
    for descriptor, name in ((1, f"rank{rank}.out"), (2, "errors")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(folder / name, flags), descriptor)
    # Without a seed each launch would differ. A seed in the script replaces this one.
    seed_all(rank)
    gpus = None
    if options.gpus:
        from ddp_check.rank.gpus import pretend_that_the_cpu_is_a_gpu

        gpus = pretend_that_the_cpu_is_a_gpu(options.gpus)
    wrap(torch.multiprocessing, "start_processes", refuse_to_spawn)
    wrap(torch.multiprocessing, "spawn", refuse_to_spawn)
    wrap(torch, "compile", compile_nothing)
    # Accelerate calls the CPU cpu:0, which torch.load() does not know as a place. (No
    # other package may have the same priority.)
    torch.serialization.register_package(1, lambda storage: None, stay_on_cpu)
    module, code, sys.argv = prepare(words)
    if options.watched:
        cast = cast_everything(torch.float64 if options.float64 else torch.float32)
        compute_the_same_each_time()
        watcher = Watcher(options, folder, rank, cast, gpus)
        meet_at_torchrun(watcher)
        atexit.register(forget_everything, module, watcher)
        atexit.register(watcher.close)
    sys.modules["__main__"] = module
    sys.excepthook = write_at_once
    exec(code, vars(module))


def write_at_once(*error):
    """Errors of two ranks would mix line by line: they come into the same file.

    The reason may be in the second line of a message: it becomes one line.
    """
    sys.stderr.flush()
    text = "".join(traceback.format_exception(*error))
    message = str(error[1])
    if 0 < message.count("\n") < 4:
        text = text.replace(message, " ".join(message.split()))
    os.write(2, text.encode(errors="backslashreplace"))


def end_with_torchrun():
    """If torchrun is killed, so is this rank."""
    death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
    if os.environ["CHECK_PARENT"] != str(os.getppid()):
        sys.exit("torchrun was killed while it started this rank")


def prepare(words):
    """Returns the module __main__, its code, and sys.argv, as Python makes them."""
    module = types.ModuleType("__main__")
    # Python has put the folder of ddp_check here. The script's own one comes first.
    package = Path(__file__).parents[1]
    sys.path[:] = [path for path in sys.path if path != str(package)]
    if words[0] == "-m":
        sys.path[0] = os.environ["CHECK_CWD"]
        spec = importlib.util.find_spec(words[1])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{words[1]}.__main__")
        if spec is None:
            sys.exit(f"there is no module {words[1]}")
        module.__spec__, module.__package__ = spec, spec.parent
        script, code, words = spec.origin, spec.loader.get_code(spec.name), words[1:]
    else:
        script = words[0]
        sys.path[0] = str(Path(script).parent)
        code = compile(Path(script).read_bytes(), script, "exec")
    module.__file__ = script
    return module, code, [script, *words[1:]]


def compute_the_same_each_time():
    # On a CPU the other kernels of attention do not always give the same bits.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    private("optimize TorchScript")(False)  # it would hide its draws


def compile_nothing(compile, model=None, **options):
    """With TORCH_COMPILE_DISABLE=1, fullgraph=True would be an error."""
    return compile(model, **options | {"fullgraph": False})


def stay_on_cpu(storage, place):
    return storage if place.startswith("cpu:") else None


def refuse_to_spawn(start, *args, **kwargs):
    sys.exit(SPAWN)


def meet_at_torchrun(watcher):
    """The launches run side by side, so the script's own port may be taken."""
    torchruns = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}

    def meet(join, *args, **options):
        call = inspect.signature(join).bind(*args, **options)
        method = call.arguments.get("init_method") or "env://"
        address = {name: os.environ.get(name) for name in torchruns}
        its_own = ":".join(map(str, address.values())) if address != torchruns else ""
        place = ":".join(map(str, torchruns.values()))
        if not method.startswith(("env:", f"tcp://{place}")):
            its_own = method
        if its_own and call.arguments.get("store") is None:
            watcher.sees_address(its_own)
            local = re.search(r"localhost|127\.0\.0\.1|file:", its_own)
            if local and os.environ["GROUP_WORLD_SIZE"] != "1":
                raise RuntimeError(f"each machine has its own {its_own}")
            os.environ.update(torchruns)
            call.arguments["init_method"] = "env://"
        return join(*call.args, **call.kwargs)

    for owner in MEETS:
        wrap(owner, "init_process_group", meet)


def forget_everything(module, watcher):
    """Runs at the exit. A global DDP object would keep the threads of gloo alive.

    These may abort the exit: https://github.com/pytorch/pytorch/pull/179291
    Let go of the groups last. If a DDP object is the last to use one, it waits for the
    threads of gloo and holds the GIL, which they need. A group releases the GIL first:
    https://github.com/pytorch/pytorch/pull/154976
    """
    if threading.active_count() > 1:  # a thread of the script may use its globals
        return
    groups = watcher.forget()
    vars(module).clear()
    gc.collect()
    groups.clear()
