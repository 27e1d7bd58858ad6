"""What torch.cuda and torch.accelerator answer to a script that has pretended GPUs.

Nothing else can be imitated, and is refused.
"""

import functools
from collections import Counter

import torch

from ddp_check.rank.patch import always

PROPERTIES = {"name": "NVIDIA A100 (pretended)", "major": 8, "minor": 0, "uuid": "0"}
PROPERTIES |= {"total_memory": 80 * 2**30, "multi_processor_count": 108}

# The first rule whose beginning fits a name of torch.cuda says what it answers.
ANSWERS = [
    (False, "is_current_stream_capturing"),
    (True, "is_ can_"),
    (Counter(), "memory_stats host_memory_stats"),
    ([], "memory_snapshot"),
    ("", "memory_summary get_gencode_flags"),
    ((60 * 2**30, 80 * 2**30), "mem_get_info get_memory_info"),
    (None, "set_ reset_ empty_ init _lazy_init synchronize ipc_collect seed _dump"),
    (0, "memory_ max_memory_ get_sync_debug_mode range_ mark _record"),
    (["sm_80"], "get_arch_list"),
    ("native", "get_allocator_backend"),
    ((2, 27, 5), "version"),
    (torch.device("cuda"), "current_accelerator"),
]


def answer_to(name):
    """What torch.cuda's function of this name answers, or None if nobody knows."""
    for answer, beginnings in ANSWERS:
        if name.startswith(tuple(beginnings.split())):
            return functools.partial(always, answer, None)
    return None


class CannotImitate(RuntimeError):
    """The script asks a pretended GPU for what no CPU can do."""


def refusal(name, original):
    """Takes the place of a function or a class that cannot be imitated."""

    @functools.wraps(original, updated=())  # torch._dynamo asks for __wrapped__
    def refuse(*args, **kwargs):
        raise CannotImitate(f"cannot be imitated on a CPU: {name}")

    if isinstance(original, type):
        return type(original.__name__, (), {"__init__": refuse})
    return functools.wraps(original)(refuse)  # torch itself looks at its attributes


def answer_for(package, gpus):
    """Replace what torch.cuda or torch.accelerator offers: by answers, or refusals."""
    modules = [package]
    for name in ("memory", "random", "streams", "graphs", "nccl", "profiler"):
        if hasattr(package, name):
            modules.append(getattr(package, name))
    for module in modules:
        for name, value in list(vars(module).items()):
            home = str(getattr(value, "__module__", None))
            if not callable(value) or not home.startswith(package.__name__):
                continue
            public = not name.startswith("_")
            answer = getattr(gpus, name, None) if public else None
            answer = answer or answer_to(name)
            if answer is not None:
                setattr(module, name, answer)
            elif name.endswith(("Tensor", "Storage")) and hasattr(torch, name):
                setattr(module, name, getattr(torch, name))
            elif public and not hasattr(value, "with_traceback"):
                setattr(module, name, refusal(f"{module.__name__}.{name}", value))
