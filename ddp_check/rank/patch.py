"""How functions of torch are replaced, and which of its private names are used.

A private name may go with a next version of torch. They are all here, and
tests/check/test_rank.py says that each of them exists.
"""

import functools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401
from torch.utils.data import dataloader

PRIVATE = {
    "backward": (torch.autograd, "_engine_run_backward"),  # of all ways to call it
    "next indices": (dataloader._BaseDataLoaderIter, "_next_index"),
    "make an iterator": (dataloader.DataLoader, "_get_iterator"),
    "load a tensor": (torch._utils, "_rebuild_tensor"),
    "optimize TorchScript": (torch._C, "_set_graph_executor_optimize"),
    "trace": (torch.jit, "_get_trace_graph"),  # as PyTorch's ONNX exporter does
    "is of torch.func": (torch._C._functorch, "is_functorch_wrapped_tensor"),
    "without dispatch modes": (_python_dispatch, "_disable_current_modes"),
    "without modes": (torch._C, "DisableTorchFunction"),
    "move a module": (torch.nn.Module, "_apply"),
    "no override": (torch._C, "_disabled_torch_function_impl"),
    "accelerator": (torch._C, "_get_accelerator"),
    "refuse SyncBatchNorm": (DistributedDataParallel, "_passing_sync_batchnorm_handle"),
    "work of a future": (
        torch._C._distributed_c10d,
        "_create_work_from_future",
    ),
}
MEETS = dist, dist.distributed_c10d, dist.device_mesh  # they have init_process_group()


def private(name):
    return getattr(*PRIVATE[name])


def wrap(owner, name, function):
    """Replace owner.name by function(the original, *args, **kwargs)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return function(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def always(answer, original=None, *args, **kwargs):
    return answer


def stand_in(original, create):
    """A class that makes instances of the original, by create(original, ...)."""

    class StandIn(type):
        def __call__(cls, *args, **kwargs):
            return create(original, *args, **kwargs)

        def __instancecheck__(cls, instance):
            return isinstance(instance, original)

        def __eq__(cls, other):
            return other is cls or other is original

        def __hash__(cls):
            return hash(original)

    return StandIn(original.__name__, (), {"__module__": original.__module__})
