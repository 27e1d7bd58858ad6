"""What NCCL does and gloo does not, for a script with pretended GPUs."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_check.rank.patch import private


def gather_any_shape(gather, tensor_list, tensor, *args, **kwargs):
    """NCCL looks only at the number of values, gloo at the shapes, too."""
    fits = [one.numel() == tensor.numel() for one in tensor_list]
    same = [one.view(tensor.shape) if f else one for one, f in zip(tensor_list, fits)]
    return gather(same, tensor, *args, **kwargs)


def gather_flat(gather, output_tensor, input_tensor, *args, **kwargs):
    """all_gather_into_tensor(): the output may be flat, or have one more dimension."""
    return gather(output_tensor.view(-1), input_tensor.view(-1), *args, **kwargs)


def average_integers(reduce, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    """NCCL has averages of integers, as Lightning asks for at the end of an epoch."""
    if op != dist.ReduceOp.AVG or tensor.is_floating_point() or async_op:
        return reduce(tensor, op, group, async_op)
    reduce(tensor, dist.ReduceOp.SUM, group)
    tensor.div_(dist.get_world_size(group), rounding_mode="trunc")
    return None


class GatherRows(torch.autograd.Function):
    """Those of each rank, with a gradient. torch.distributed.nn's fails in a group."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, rows, group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx, gradients):
        gradients = gradients.contiguous()
        dist.all_reduce(gradients, group=ctx.group)
        return gradients[dist.get_rank(ctx.group)], None


def normalize_over_all_ranks(forward, norm, x):
    """SyncBatchNorm.forward(): torch has none for the CPU. So gather all rows."""
    group = norm.process_group or dist.group.WORLD
    ranks = dist.get_world_size(group) if norm.training and group else 1
    if ranks > 1:
        # Ranks may have images of other sizes: each value of a channel is a row.
        channels = x.transpose(0, 1)
        rows = channels.flatten(1).t()
        counts = [None] * ranks
        dist.all_gather_object(counts, len(rows), group=group)
        rows = nn.functional.pad(rows, (0, 0, 0, max(counts) - len(rows)))
        gathered = GatherRows.apply(rows.contiguous(), group)
        rows = torch.cat([part[:count] for part, count in zip(gathered, counts)])
        rows = nn.modules.batchnorm._BatchNorm.forward(norm, rows)
        rank = dist.get_rank(group)
        mine = rows.narrow(0, sum(counts[:rank]), counts[rank])
        return mine.t().reshape(channels.shape).transpose(0, 1).contiguous()
    return nn.modules.batchnorm._BatchNorm.forward(norm, x)


def gloo_for(backend):
    return "gloo" if "nccl" in str(backend or "nccl").lower() else backend


def with_future(reduce, output, *args, **kwargs):
    """Gloo's reduce_scatter() has no future."""
    work = reduce(output, *args, **kwargs)
    if type(work) is not dist.Work:
        return work
    work.wait()
    future = torch.futures.Future()
    future.set_result([output])
    return private("work of a future")(future)
