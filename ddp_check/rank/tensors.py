"""Small functions on tensors, and on the nested lists and dicts that hold them."""

import contextlib
import ctypes
import zlib
from builtins import isinstance  # noqa: UP029 - s3prl puts its own there
from collections.abc import Mapping

import torch
from torch import nn

from ddp_check import trace
from ddp_check.rank.patch import private

NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def whole(tensor):
    """On the CPU. All of it, where FSDP has sharded it: then all ranks call this."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor


def content(tensor):
    """The bytes of a tensor."""
    with private("without modes")():
        tensor = whole(tensor).contiguous()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.numel() == 0:
            return b""
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def checksum(tensor):
    return zlib.crc32(content(tensor))


def is_finite(tensor):
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def comparison(a, b):
    """Of two tensors, of which one may be None, which stands for zeros."""
    with private("without modes")():
        shape = (b if a is None else a).shape
        zeros = torch.zeros(shape, dtype=torch.float64)
        a, b = [zeros if x is None else x for x in (a, b)]
        if a.is_complex() or b.is_complex():
            a, b = [torch.view_as_real(x.to(torch.complex128)) for x in (a, b)]
        a, b = a.double().flatten(), b.double().flatten()
        off = a - b
        sums = [float(x @ y) for x, y in ((a, a), (b, b), (a, b), (off, off))]
    return trace.Comparison(*sums)


def is_norm(layer):
    """Whether it is batch norm, also in TorchScript."""
    if isinstance(layer, torch.jit.ScriptModule):
        return getattr(layer, "original_name", "").startswith("BatchNorm")
    return isinstance(layer, NORMS)


def checksums_of_buffers(model):
    """Without batch norm, whose statistics rightly differ between ranks."""
    checksums = {}
    for path, layer in model.named_modules():
        if not is_norm(layer):
            for name, buffer in layer.named_buffers(path, recurse=False):
                checksums[name] = checksum(buffer)
    return checksums


def entries_of(batch):
    if isinstance(batch, Mapping):
        return list(batch.values())
    return batch if isinstance(batch, (list, tuple)) else [batch]


def map_tensors(function, value):
    """The same nested lists and dicts, with function(tensor) for each tensor."""
    if torch.is_tensor(value):
        return function(value)
    if type(value) is dict:
        return {name: map_tensors(function, entry) for name, entry in value.items()}
    if isinstance(value, Mapping):
        with contextlib.suppress(Exception):  # it may not be mutable
            for name in value:
                value[name] = map_tensors(function, value[name])
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(function, entry) for entry in value])
    if type(value) in (list, tuple):
        return type(value)([map_tensors(function, entry) for entry in value])
    return value


def tensors_in(value):
    """All tensors with rows, in nested lists and dicts. Not nested tensors."""
    if torch.is_tensor(value) and value.is_nested:
        return []
    if torch.is_tensor(value) and value.dim() > 0 and value.numel() > 0:
        return [value]
    if not isinstance(value, (Mapping, list, tuple)):
        return []
    return sum([tensors_in(entry) for entry in entries_of(value)], [])


def rows_of(tensors):
    """Two lists of checksums: of samples, and of the rows of each tensor by itself.

    A sample is known by its row in all tensors of the same length.
    """
    samples, parts = {}, []
    for tensor in tensors:
        data = content(tensor)
        size = len(data) // len(tensor)
        sums = samples.setdefault(len(tensor), [0] * len(tensor))
        for i in range(len(tensor)):
            row = data[i * size : (i + 1) * size]
            sums[i] = zlib.crc32(row, sums[i])
            parts.append(zlib.crc32(row))
    return sum(samples.values(), []), parts


def signatures(x):
    """A number for each row, by which it is known again."""
    if x.dim() == 0 or x.is_nested or x.numel() == 0:
        return torch.zeros(0)
    rows = whole(x).reshape(len(x), -1)
    return rows @ torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype)
