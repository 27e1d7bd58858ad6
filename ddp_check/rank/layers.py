"""Layers that treat each rank's rows by themselves: batch norm, and dropout.

In a replay, one process has the rows of all ranks. The script may have moved them, as
torch.cat([x, x]) or view(batch * frames, ...) do. So they are known by their content.
"""

import contextlib
import inspect

import torch
from torch import nn

from ddp_check.rank.patch import private, wrap
from ddp_check.rank.tensors import checksum, signatures


class Layers:
    def __init__(self, steps, draws):
        self.steps, self.draws = steps, draws
        self.inside = False
        wrap(nn.functional, "batch_norm", self.see_batch_norm)
        wrap(nn.functional, "dropout", self.see_dropout)
        wrap(nn.functional, "scaled_dot_product_attention", self.see_attention)
        wrap(nn.SyncBatchNorm, "forward", self.see_sync_norm)

    @contextlib.contextmanager
    def layer(self, rows=None):
        """A mode of torch calls a layer again: then it is not looked at.

        rows: where those of each rank are, for what is drawn in it.
        """
        self.inside = True
        if self.steps.replay:
            self.steps.replay.rows = rows
        try:
            yield
        finally:
            self.inside = False
            if self.steps.replay:
                self.steps.replay.rows = None

    def see_rows(self, x):
        """In a replay: where the rows of each rank are, or None if it is not known.

        They are known by their content, wherever the script has moved them.
        """
        place = self.steps.now.number, self.draws.next_number("rows")
        rows = signatures(x)
        self.steps.keep("rows", place, rows)
        return self.steps.replay and self.steps.replay.find_rows(place, rows)

    def see_dropout(self, drop, input, p=0.5, training=True, inplace=False):
        if self.inside or not training or p == 0 or is_of_func(input):
            return drop(input, p, training, inplace)
        with self.layer(self.see_rows(input)):
            return drop(input, p, training, inplace)

    def see_attention(self, attend, *args, **named):
        dropout = named.get("dropout_p", args[4] if len(args) > 4 else 0)
        query = named.get("query", args[0] if args else None)
        if self.inside or not dropout or is_of_func(query):
            return attend(*args, **named)
        with self.layer(self.see_rows(query)):
            return attend(*args, **named)

    def see_batch_norm(self, norm, *args, **named):
        if self.inside:
            return norm(*args, **named)
        with self.layer():
            call = inspect.signature(norm).bind(*args, **named)
            call.apply_defaults()
            return self.normalize(norm, *call.args)

    def see_sync_norm(self, forward, norm, x):
        """It normalizes the rows of all ranks, so there is nothing to replay."""
        with self.layer():
            return forward(norm, x)

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
        if training and self.steps.replay:
            text = "batch norm of rows that are not those of the ranks"
            self.steps.replay.merge.notes.problems.append(text)
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
