"""Where does train() wait for the GPU? `make test` asks this without a GPU.

The device is "meta": its tensors have a shape but no values, and what needs a value
fails. A TorchDispatchMode sees each operation (torch documents it in "Extending
PyTorch", though its module has an underscore). It notes the copies, the collectives,
and each read of a value; there it gives one. Autocast, the fused AdamW and DDP do not
know this device, and have stand-ins: for them the last test runs on the CPU.
"""

import contextlib
import traceback
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import ddp_train
from harness import TINY, in_ranks, processes

pytestmark = processes
SCRIPT = ddp_train.__file__
OPTIONS = [*TINY, "--data", SCRIPT, *"--seq_len 128 --dropout 0.1 --accum 2".split()]
OPTIONS += "--log_every 3 --save_every 7 --eval_every 5".split()
# where: the function of ddp_train.py. inside: is it called by train_step()?
Event = namedtuple("Event", "what where inside step device waits")


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.events = []
        self.step = 0

    def note(self, what, tensor, waits=True):
        stack = [f for f in traceback.extract_stack() if f.filename == SCRIPT]
        names = [frame.name for frame in stack if frame.name[0] != "<"]
        event = [what, names[-1], "train_step" in names, self.step]
        self.events.append(Event(*event, tensor.device.type, waits))

    def __torch_dispatch__(self, operation, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation.__name__.split(".")[0]
        tensor = args[0] if args else None
        if operation.namespace == "c10d":
            while isinstance(tensor, list):
                tensor = tensor[0]
            self.note(name, tensor)
        if name == "_local_scalar_dense":
            self.note("read", tensor)
            if tensor.is_meta:
                return 1.0
        if name == "_to_copy" and kwargs.get("device", tensor.device) != tensor.device:
            if tensor.is_meta:
                self.note("read", tensor)
                return torch.ones(tensor.shape)
            self.note("copy", tensor, not kwargs.get("non_blocking"))
        return operation(*args, **kwargs)


def pretend():
    """From now on this process has a GPU, "meta", and an NCCL for it."""
    torch.nn.Module.no_sync = lambda model: contextlib.nullcontext()
    ddp_train.DistributedDataParallel = lambda model, **options: model
    adamw = torch.optim.AdamW
    torch.optim.AdamW = lambda weights, lr, fused: adamw(weights, lr, foreach=True)
    torch.autocast = lambda *args, **options: contextlib.nullcontext()
    ddp_train.choose_device = lambda name, size: torch.device("meta")
    dist.Backend.register_backend("pretended", dist.ProcessGroupGloo, devices=["meta"])


def watch(out, precision):
    """Train two steps. Then resume, up to step 12: the events of that."""
    args = ddp_train.parse_args([*OPTIONS, "--precision", precision])
    train_step = ddp_train.train_step
    watching = Watch()

    def count(*args):
        watching.step += 1
        return train_step(*args)

    ddp_train.train_step = count
    with ddp_train.distributed("cpu") as world, watching:
        args.out = f"{out}/{world.rank}"  # as if the ranks had no common disk
        for args.max_steps in (2, 12):
            watching.events.clear()
            ddp_train.train(args, world)
    return watching.events


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    def rank():
        pretend()
        return watch(out, "fp32")

    out = tmp_path_factory.mktemp("out")
    return in_ranks(2, rank)


def test_values_are_read_to_log_and_to_evaluate_alone(ranks):
    for events in ranks:
        reads = [e for e in events if e.what == "read" and e.device == "meta"]
        logged = [e.step for e in reads if e.where == "mean_over_steps"]
        assert logged == [3, 5, 6, 7, 9, 10, 12]
        others = {(e.where, e.step) for e in reads if e.where != "mean_over_steps"}
        evaluated = {("evaluate", step) for step in (2, 5, 10, 12)}
        # Before each evaluation and each save.
        compared = {("compare_weights", step) for step in (2, 5, 7, 10, 12)}
        assert others == evaluated | compared


def test_batches_alone_are_copied_and_not_waited_for(ranks):
    for events in ranks:
        copies = [e for e in events if e.what == "copy" and e.step > 2]
        assert {(e.where, e.waits) for e in copies} == {("to_device", False)}
    gpu = ddp_train.World(0, 1, torch.device("cuda"))
    assert ddp_train.loading_options(gpu, 0)["pin_memory"]  # else it would wait


def test_evaluation_reads_after_its_last_batch(ranks):
    for events in ranks:
        for step in (2, 5, 10, 12):
            here = [e for e in events if e.step == step and not e.inside]
            kinds = [e.what for e in here if e.where in ("to_device", "evaluate")]
            assert set(kinds) == {"copy", "read"} and kinds == sorted(kinds)


def test_ranks_meet_on_the_cpu_before_they_wait_for_the_gpu(ranks):
    """If one is missing, gloo says so. NCCL would wait for it, and then abort."""
    for events in ranks:
        for step in range(3, 13):
            here = [e for e in events if e.step == step and e.waits and not e.inside]
            assert (here[0].what, here[0].where) == ("allreduce_", "requested")


def test_collectives_are_on_the_cpu(ranks):
    """All but those of DDP."""
    for events in ranks:
        sent = [e for e in events if e.what not in ("read", "copy")]
        assert {(e.where, e.device) for e in sent} == {
            ("all_gather", "cpu"),
            ("resume", "cpu"),
            ("requested", "cpu"),  # the stop signal
            ("mean_over_ranks", "cpu"),  # the loss of a log line
        }


def test_step_in_bf16_reads_nothing(tmp_path):
    """On the CPU, with autocast, DDP and the fused AdamW themselves."""
    for events in in_ranks(2, lambda: watch(tmp_path, "bf16")):
        reads = [e for e in events if e.what == "read"]
        assert reads and not any(e.inside for e in reads)
