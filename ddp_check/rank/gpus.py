"""For a script that asks for CUDA and NCCL: it gets the CPU and gloo.

Tensors stay on the CPU, so every result is that of a CPU. What the script asks of
torch.cuda and torch.accelerator is answered by Gpus, or by the rules of answers.py.
Nothing else can be imitated, and is refused.
"""

import contextlib
import functools
import os
import sys
import threading
import time
import types

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from ddp_check.rank.answers import PROPERTIES, answer_for
from ddp_check.rank.float64 import enter
from ddp_check.rank.gloo import (
    average_integers,
    gather_any_shape,
    gather_flat,
    gloo_for,
    normalize_over_all_ranks,
    with_future,
)
from ddp_check.rank.patch import (
    MEETS,
    PRIVATE,
    DeviceContext,
    always,
    stand_in,
    wrap,
)


class Stream:
    """Everything runs at once, so there is nothing to wait for."""

    priority = stream_id = cuda_stream = 0

    def __init__(self, *args, **kwargs):
        self.device = torch.device("cuda", torch.cuda.current_device())

    def wait(self, *args):
        """For an event or a stream."""

    wait_event = wait_stream = synchronize = is_capturing = wait  # which is false, too

    def query(self):
        return True

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Event(Stream):
    def record(self, stream=None):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return 1000 * (end.time - self.time)


class Gpus:
    """The GPUs of this machine: one for each of its ranks.

    What has a public name answers in place of what torch.cuda has under this name. The
    other methods replace functions of torch: their first argument is the original.
    """

    Stream = current_stream = default_stream = Stream
    Event = Event
    StreamContext = device_of = range = contextlib.nullcontext

    def __init__(self, count):
        self._count = count
        self._current = 0
        self._used = set()  # those that the script has named
        # Some scripts look up their GPU there. For CUDA itself, real GPUs stay hidden.
        self._visible = ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = self._visible
        os.putenv("CUDA_VISIBLE_DEVICES", "")
        self._seed = torch.initial_seed()
        self._nccl = set()  # the names of the groups that seem to use it

    def _find(self, device=None):
        """The number of a GPU. It fails if the machine does not have so many."""
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):  # that of a tensor is the CPU
            device = device.index if device.type == "cuda" else None
        index = self._current if device is None else int(device)
        count = self.device_count()
        # A machine may have more GPUs than ranks. One that takes cuda:RANK is wrong.
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", count))
        is_rank = not self._used and index == int(os.environ.get("RANK", 0)) >= ranks
        if is_rank or not 0 <= index < count:
            of = f"{ranks} rank{'s' * (ranks != 1)}"
            where = f"on a machine with {of}, which seems to have a GPU for each"
            if count < ranks:
                where = (
                    f"with CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}"
                )
            text = f"CUDA error: invalid device ordinal: cuda:{index} {where}"
            raise RuntimeError(text)
        self._count = count
        self._used.add(index)
        # FSDP1 takes a second to import. So it is changed when the script has it.
        module = sys.modules.get("torch.distributed.fsdp")
        fsdp = getattr(module, "FullyShardedDataParallel", None)
        if fsdp and not hasattr(fsdp.__init__, "__wrapped__"):
            wrap(fsdp, "__init__", shard_on_cpu)
            stay = functools.partial(always, contextlib.nullcontext())
            wrap(module._flat_param.FlatParamHandle, "to_cpu", stay)
        return index

    def _on_cpu(self, place):
        """The CPU instead of a GPU. What is no place remains as it is."""
        is_gpu = type(place) is int
        if isinstance(place, (str, torch.device)):
            is_gpu = str(place).partition(":")[0] == "cuda"
        if not is_gpu:
            return place
        self._find(place)
        return torch.device("cpu") if isinstance(place, torch.device) else "cpu"

    def _has_own_seed(self):
        """Whether it was seeded by itself, and not with the CPU."""
        return self._seed != torch.initial_seed()

    def _is_shared(self):
        """Whether this rank uses rank 0's GPU, and no other, with NCCL."""
        rank = int(os.environ["LOCAL_RANK"])
        return bool(self._nccl) and 0 < rank < self.device_count() and self._used == {0}

    def device_count(self):
        count = self._count
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        # The script may set it, but not after CUDA has started.
        if visible and visible != self._visible and not self._used:
            count = min(count, len(visible.split(",")))
        return count

    def stream(self, stream=None):
        return contextlib.nullcontext()

    def current_device(self):
        return self._find()

    def set_device(self, device):
        if device is None:
            raise ValueError("Expected a torch.device or an integer, but got: None")
        if device != -1:
            self._current = self._find(device)

    @contextlib.contextmanager
    def device(self, device):
        before = self._current
        try:
            self.set_device(before if device is None else device)
            yield
        finally:
            self._current = before

    # The same under torch.accelerator's names
    current_device_index = current_device_idx = current_device
    set_device_index = set_device_idx = set_device
    device_index = device

    def get_device_properties(self, device=None):
        self._find(device)
        return types.SimpleNamespace(**PROPERTIES)

    def get_device_name(self, device=None):
        return self.get_device_properties(device).name

    def get_device_capability(self, device=None):
        return 8, 0

    # All random numbers come from the CPU's generator. So its state is the one to keep.
    # But a seed for the GPU alone must not change what the script draws on the CPU.
    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def get_rng_state_all(self):
        return [torch.get_rng_state() for _ in range(self.device_count())]

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)

    def set_rng_state_all(self, states):
        torch.set_rng_state(states[min(self._current, len(states) - 1)])

    def manual_seed(self, seed):
        self._seed = int(seed)

    manual_seed_all = manual_seed

    def initial_seed(self):
        return self._seed

    def _places(self, call, *args, **kwargs):
        for name in ("device", "device_type"):
            if name in kwargs:
                kwargs[name] = self._on_cpu(kwargs[name])
        return call(*[self._on_cpu(value) for value in args], **kwargs)

    def _autocast(self, ask, device_type="cuda"):
        return ask(self._on_cpu(device_type))

    def _load_storage(self, storage, location):
        """torch.load() asks this first. None: ask others."""
        if location.partition(":")[0] == "cuda":
            self._find(location)
            return storage

    def _move_storage(self, move, storage, device=None, *args, **options):
        """As in map_location=lambda storage, place: storage.cuda(0)."""
        self._find(device)
        return storage

    def _start_thread(self, start, thread):
        """A mode holds for one thread."""
        run = thread.run

        def run_on_cpu():
            with OnCpu(self):
                run()

        thread.run = run_on_cpu
        start(thread)

    def _data_parallel(self, create, model, module, device_ids=None, *args, **kwargs):
        """As it is without GPUs: it calls the module."""
        for device in device_ids or []:
            self._find(device)
        nn.Module.__init__(model)
        model.module = module
        model.device_ids = []

    def _ddp(self, create, ddp, module, device_ids=None, output_device=None, **options):
        for device in device_ids or []:
            self._find(device)
        create(ddp, module, **options)

    def _join(self, join, backend=None, *args, device_id=None, **options):
        self._find(device_id)
        options.pop("pg_options", None)
        join(gloo_for(backend), *args, **options)
        if str(backend).lower() == "nccl":
            self._nccl.add(dist.group.WORLD.group_name)

    def _group(self, create, ranks=None, timeout=None, backend=None, *args, **options):
        options.pop("pg_options", None)
        options.pop("device_id", None)
        group = create(ranks, timeout, gloo_for(backend), *args, **options)
        world = dist.group.WORLD.group_name in self._nccl
        if str(backend).lower() == "nccl" or (backend is None and world):
            self._nccl.add(getattr(group, "group_name", None))
        return group

    def _get_backend(self, ask, group=None):
        """Torch itself gets the truth: some of its functions depend on it."""
        name = getattr(group or dist.group.WORLD, "group_name", None)
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if name in self._nccl and not caller.startswith("torch."):
            return dist.Backend("nccl")
        return ask(group)

    def _barrier(self, barrier, group=None, async_op=False, device_ids=None, **options):
        for device in device_ids or []:
            self._find(device)
        return barrier(group, async_op, **options)


class OnCpu(TorchFunctionMode):
    """Every torch function that is told to use a GPU uses the CPU."""

    def __init__(self, gpus):
        super().__init__()
        self.gpus = gpus
        self.is_cuda = torch.Tensor.is_cuda.__get__
        self.pid = os.getpid()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        args = list(args)
        kwargs = dict(kwargs or {})
        if name == "__get__" and function == self.is_cuda:
            # Of every tensor: nobody knows which of them the script has moved. A worker
            # of a loader has no GPU.
            return args[0].device.type == "cpu" and os.getpid() == self.pid
        if name == "get_device":
            return self.gpus.current_device()
        if name == "pin_memory":
            return args[0]
        if name == "cpu":  # a copy, as on a real machine: best = model.weight.cpu()
            return function(*args, **kwargs).clone()
        if name in ("cuda", "to") and not args[0].is_contiguous():
            args[0] = args[0].clone()  # a move to a GPU makes it dense
        if name == "cuda":
            place = kwargs.get("device", args[1] if len(args) > 1 else None)
            return args[0].to(self.gpus._on_cpu("cuda" if place is None else place))
        if name == "to":
            args[1:] = [self.gpus._on_cpu(value) for value in args[1:]]
        if name == "type" and len(args) > 1 and isinstance(args[1], str):
            args[1] = args[1].replace("torch.cuda.", "torch.")
        if "device" in kwargs:
            kwargs["device"] = self.gpus._on_cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)


def move_buffers(move, module, *args, **kwargs):
    """On a GPU it is a new tensor, which may be changed in place, and no leaf."""
    moved = move(module, *args, **kwargs)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.requires_grad and buffer.is_leaf:
            setattr(module, name, buffer.clone())
    return moved


def create_device(create, *args, **kwargs):
    if args and type(args[0]) is int:  # a torch without CUDA does not know such a GPU
        return create("cuda", *args)
    return create(*args, **kwargs)


def without_pinning(create, loader, *args, **kwargs):
    create(loader, *args, **kwargs)
    loader.pin_memory = False


def profile_on_cpu(create, profile, *args, **kwargs):
    """Without this, each operation waits for a CUDA event, and warns."""
    create(profile, *args, **(kwargs | {"use_cuda": False, "use_device": None}))


def shard_on_cpu(create, model, *args, **kwargs):
    create(model, *args, **(kwargs | {"device_id": torch.device("cpu")}))


def pretend_that_the_cpu_is_a_gpu(count):
    """To be called once, before the script runs. Returns what is known of the GPUs."""
    gpus = Gpus(count)
    for package in (torch.cuda, torch.cuda.nvtx, torch.accelerator):
        answer_for(package, gpus)
    torch.cuda.default_generators = (torch.default_generator,) * gpus.device_count()
    torch.version.cuda = torch.version.cuda or "12.8"

    # Places
    owner, name = PRIVATE["accelerator"]
    setattr(owner, name, functools.partial(torch.device, "cpu"))
    torch.Stream, torch.Event = Stream, Event
    torch.Generator = stand_in(torch.Generator, gpus._places)
    torch.device = stand_in(torch.device, create_device)
    for owner in (torch.autocast, DeviceContext, dist.device_mesh.DeviceMesh):
        wrap(owner, "__init__", gpus._places)
    wrap(nn.Module, "to", gpus._places)
    wrap(*PRIVATE["move a module"], move_buffers)
    nothing = functools.partial(always, None)
    torch.serialization.register_package(0, nothing, gpus._load_storage)
    for owner in (torch.UntypedStorage, torch.TypedStorage):
        wrap(owner, "cuda", gpus._move_storage)
    wrap(torch.Tensor, "record_stream", nothing)
    wrap(torch, "is_autocast_enabled", gpus._autocast)
    wrap(torch, "get_autocast_dtype", gpus._autocast)
    torch.get_autocast_gpu_dtype = torch.get_autocast_dtype
    wrap(torch.utils.data.DataLoader, "__init__", without_pinning)
    wrap(torch.autograd.profiler.profile, "__init__", profile_on_cpu)
    wrap(threading.Thread, "start", gpus._start_thread)

    # Groups and parallel models
    for owner in MEETS:
        wrap(owner, "init_process_group", gpus._join)
        wrap(owner, "new_group", gpus._group)
    wrap(dist, "get_backend", gpus._get_backend)
    wrap(dist, "barrier", gpus._barrier)
    wrap(dist, "is_nccl_available", functools.partial(always, True))
    dist.ProcessGroupNCCL = types.SimpleNamespace(Options=types.SimpleNamespace)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        if hasattr(dist, name):  # the second one since torch 2.13
            wrap(dist, name, with_future)
    wrap(dist, "all_gather", gather_any_shape)
    wrap(dist, "all_gather_into_tensor", gather_flat)
    wrap(dist, "all_reduce", average_integers)
    wrap(nn.DataParallel, "__init__", gpus._data_parallel)
    wrap(nn.SyncBatchNorm, "forward", normalize_over_all_ranks)
    wrap(DistributedDataParallel, "__init__", gpus._ddp)
    # This refuses SyncBatchNorm on the CPU, and does nothing else.
    wrap(*PRIVATE["refuse SyncBatchNorm"], nothing)
    enter(OnCpu(gpus))
    return gpus
