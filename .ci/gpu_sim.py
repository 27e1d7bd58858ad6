"""train() on a GPU that is not there: what does it copy, and where does it wait?

    python .ci/gpu_sim.py [options of ddp_train.py]

torch >= 2.13 can register a device from Python, here "sim". FakeTensorMode runs the
real train() on tensors without data: an operation that mixes devices raises. This
program prints a line of JSON for each copy between the devices, each read of a value,
and each collective: {"step", "what", "where", "device", "shape", "waits"}.

What it cannot show: numbers, kernels, autocast's choice of types, and DDP, which reads
its tensors in C++. The process group is a real one, of one rank, made by join_group().
"""

import functools
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives of fake tensors
from torch import library as operators
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ddp_train


# ---- The device ----------------------------------------------------------------------
class Device(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]

    def manual_seed(self, seed):
        pass


def make_backend(store, rank, size, timeout):
    """What NCCL is for "cuda". It does nothing."""
    return FakeProcessGroup._create_internal(rank, size)


def register():
    backend_registration._setup_privateuseone_for_python_backend("sim", Device())
    dist.Backend.register_backend("simccl", make_backend, devices=["sim"])
    kernels = operators.Library("_", "IMPL")
    kernels.fallback(operators.fallthrough_kernel, "AutocastPrivateUse1")
    return kernels  # what it registers is there as long as it lives


# ---- What is noted -------------------------------------------------------------------
class Watch(TorchDispatchMode):
    """Sees each operation before it runs, and prints those that matter."""

    def __init__(self):
        super().__init__()
        self.steps = 0
        register_optimizer_step_post_hook(self.count_step)

    def count_step(self, *_):
        self.steps += 1

    def note(self, what, tensor, waits):
        frames = traceback.extract_stack()
        where = "outside"
        for frame in frames:
            if frame.filename == ddp_train.__file__ and frame.name[0] != "<":
                where = frame.name  # and not "<listcomp>"
        event = {"step": self.steps, "what": what, "where": where}
        event |= {"device": str(tensor.device), "shape": list(tensor.shape)}
        print(json.dumps({**event, "waits": waits}), flush=True)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation.__name__.split(".")[0]
        if operation.namespace == "c10d":
            for tensor in tree_leaves(args):
                if isinstance(tensor, torch.Tensor):
                    self.note(name, tensor, True)
        if name == "_to_copy":
            source, target = args[0].device, kwargs.get("device", args[0].device)
            if source.type != torch.device(target).type:
                waits = not kwargs.get("non_blocking", False)
                self.note(f"copy to {target}", args[0], waits)
        if name == "copy_" and args[0].device.type != args[1].device.type:
            waits = not (kwargs.get("non_blocking") or args[2:] == (True,))
            self.note(f"copy to {args[0].device}", args[1], waits)
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
            if args[0].device.type != "cpu":
                self.note("read", args[0], True)
            # There is no value. Any other will do, but 0 is "no stop signal".
            return 1.0 if args[0].is_floating_point() else 0
        return operation(*args, **kwargs)


# ---- The run -------------------------------------------------------------------------
def with_data(function):
    """The function, outside of FakeTensorMode."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return wrapped


def build_on_the_device(args, build=ddp_train.build_model):
    with torch.device("sim:0"):
        return build(args)


def save(state, file):
    """torch.save() cannot write a fake tensor. It would copy each to the CPU."""
    for value in tree_leaves(state):
        if isinstance(value, torch.Tensor):
            value.cpu()


def main(argv):
    kernels = register()
    ddp_train.load_data = with_data(ddp_train.load_data)
    ddp_train.all_gather = with_data(ddp_train.all_gather)
    ddp_train.ResumableSampler.__iter__ = with_data(ddp_train.ResumableSampler.__iter__)
    ddp_train.build_model = build_on_the_device
    torch.nn.Module.to = lambda self, device: self  # it cannot move fake tensors
    ddp_train.DistributedDataParallel = lambda model, **_: model
    torch.save = save
    torch.load = lambda *_, **__: None  # of what save() did not write
    with tempfile.TemporaryDirectory() as folder:
        args = ddp_train.parse_args([*argv, "--out", f"{folder}/out"])
        os.environ.update(RANK="0", WORLD_SIZE="1")
        world = ddp_train.init_distributed("auto", url=f"file://{folder}/store")
        watch = Watch()
        with ddp_train.process_group(world):
            with watch:
                dist.broadcast_object_list(["a checkpoint"], 0)
            with FakeTensorMode(allow_non_fake_inputs=True), watch:
                ddp_train.train(args, world, ddp_train.StopSignal())
    del kernels


if __name__ == "__main__":
    main(sys.argv[1:])
