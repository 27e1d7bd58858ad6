"""Layers that treat each rank's rows by themselves: batch norm, and dropout.

In a replay, one process has the rows of all ranks. The script may have moved them, as
torch.cat([x, x]) or view(batch * frames, ...) do. So they are known by their content.
"""

import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from ddp_check.rank.float64 import enter
from ddp_check.rank.patch import private, wrap
from ddp_check.rank.tensors import checksum, is_norm, signatures


class Layers(TorchFunctionMode):
    """A mode, because TorchScript does not compile functions that were replaced."""

    def __init__(self, steps, draws):
        super().__init__()
        self.steps, self.draws = steps, draws
        self.synchronizes = False
        f = nn.functional
        drops = f.dropout, f.dropout1d, f.dropout2d, f.dropout3d, f.alpha_dropout
        self.seen = dict.fromkeys(drops, self.see_dropout)
        self.seen[f.scaled_dot_product_attention] = self.see_attention
        self.seen[f.batch_norm] = self.see_batch_norm
        wrap(nn.SyncBatchNorm, "forward", self.see_sync_norm)
        enter(self)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in self.seen and self.watches(*args, *kwargs.values()):
            return self.seen[function](function, *args, **kwargs)
        return function(*args, **kwargs)

    def watches(self, x=None, *more):
        """Not while torch.jit, torch.export or torch.fx trace a model."""
        traces = torch.jit.is_tracing() or torch.compiler.is_compiling()
        return torch.is_tensor(x) and not (traces or self.synchronizes)

    def see_rows(self, x):
        """In a replay: where the rows of each rank are, or None if it is not known.

        They are known by their content, wherever the script has moved them.
        """
        place = self.steps.now.number, self.draws.next_number("rows")
        rows = signatures(x)
        self.steps.keep("rows", place, rows)
        return self.steps.replay and self.steps.replay.find_rows(place, rows)

    def see_dropout(self, drop, input, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return drop(input, p, training, inplace)
        return self.draw_in(input, drop, input, p, training, inplace)

    def see_attention(self, attend, *args, **named):
        dropout = named.get("dropout_p", args[4] if len(args) > 4 else 0)
        if not dropout:
            return attend(*args, **named)
        query = named.get("query", args[0] if args else None)
        return self.draw_in(query, attend, *args, **named)

    def draw_in(self, x, layer, *args, **named):
        """What the layer draws belongs to the rows of x."""
        replay = self.steps.replay
        if not is_of_func(x):
            rows = self.see_rows(x)
            if replay:
                replay.places = rows
        try:
            return layer(*args, **named)
        finally:
            if replay:
                replay.places = None

    def see_sync_norm(self, forward, norm, x):
        """It normalizes the rows of all ranks, as batch norm on one process does."""
        if norm.training or norm.running_mean is None:
            place = self.steps.now.number, self.draws.next_number("rows")
            if norm.process_group in (None, dist.group.WORLD):
                self.steps.keep("rows", place, torch.zeros(0))  # those of no rank
        self.synchronizes = True
        try:
            return forward(norm, x)
        finally:
            self.synchronizes = False

    def see_module(self, module):
        """TorchScript does not tell when it normalizes."""
        scripted = torch.jit.ScriptModule
        if any(isinstance(x, scripted) and is_norm(x) for x in module.modules()):
            self.steps.now.norms = True
            self.cannot_normalize()

    def cannot_normalize(self):
        if self.steps.replay:
            text = "batch norm of rows that are not those of the ranks"
            self.steps.replay.merge.notes.problems.append(text)

    def see_batch_norm(self, norm, *args, **named):
        call = inspect.signature(norm).bind(*args, **named)
        call.apply_defaults()
        return self.normalize(norm, *call.args)

    def normalize(self, norm, x, mean, var, *more):
        training = more[2]
        if training and mean is not None:
            self.steps.now.norms = True
        if not training and mean is not None and not torch.is_grad_enabled():
            number = checksum(mean)
            if number not in self.steps.now.evaluated:
                self.steps.now.evaluated.append(number)
        rows = self.see_rows(x) if training else None
        if rows:
            return norm_each(rows, norm, x, mean, var, *more)
        if training:
            self.cannot_normalize()
        return norm(x, mean, var, *more)


def is_of_func(tensor):
    """Whether it is one of torch.func, and has no values of its own."""
    return private("is of torch.func")(tensor)


def norm_each(rows, norm, x, mean, var, *more):
    """Normalize the rows of each rank by themselves, as the ranks did."""
    parts = []
    for rank, mine in enumerate(rows):
        stats = [mean, var]
        if rank > 0 and mean is not None:  # rank 0's are those that are saved
            stats = [mean.clone(), var.clone()]
        parts.append(norm(x[mine], *stats, *more))
    return torch.cat(parts)[torch.cat(rows).argsort()]
