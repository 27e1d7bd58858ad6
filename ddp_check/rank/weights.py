"""Weights and optimizers, known by the names that the weights have in the model."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddp_check.rank.tensors import checksum, is_finite, whole

# What wrappers put into the names of the weights: the first ones only at the front.
AT_FRONT = "module", "_forward_module"
WRAPPERS = "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"


def plain_name(path):
    words = [word for word in path.split(".") if word not in WRAPPERS]
    while len(words) > 1 and words[0] in AT_FRONT:
        del words[0]
    return ".".join(words)


def without_ddp(path, ddp):
    """If "part" is in ddp, the places of DDP objects: part.module.bias is part.bias."""
    words = path.split(".")
    return ".".join(w for i, w in enumerate(words) if ".".join(words[:i]) not in ddp)


def is_ddp(module):
    """Torch's, or one of a library's own, such as Apex's or that of Opacus."""
    own = type(module).__name__.endswith("DistributedDataParallel")
    return own or isinstance(module, DistributedDataParallel)


class Weights:
    """All weights that have been seen in training, by name.

    shapes: those of the launch that this one is compared with, by name. A weight gets
    its name there, if it is clear, even if other modules are called here: Lightning
    calls DDP on two ranks, and what is in it on one.
    """

    def __init__(self, shapes):
        self.shapes = shapes
        self.named = {}  # name: the weight
        self.name_of = {}  # id of the weight: name
        self.bits = {}  # name: checksum, at the last look
        self.values = {}  # name: value, at the last look
        self.raw = 0  # weights that are in no module
        self.whole = None  # an FSDP2 module of which some weights were whole

    def see_module(self, module):
        """Returns the names of the weights that are new."""
        # A lazy layer gets its weights in its first forward().
        weights = [(p, w) for p, w in module.named_parameters() if not is_lazy(w)]
        new = [(path, w) for path, w in weights if id(w) not in self.name_of]
        if new and any(hasattr(part, "unshard") for part in module.modules()):
            # FSDP2 puts whole weights into the places of its own ones for a while, such
            # as from an evaluation to the end of the next backward().
            self.whole = module
            new = [(path, w) for path, w in new if hasattr(w, "device_mesh")]
        parts = module.named_modules() if new else ()
        ddp = {p for p, part in parts if is_ddp(part)}
        return [self.add(plain_name(without_ddp(p, ddp)), w) for p, w in new]

    def see_optimizer(self, optimizer):
        new = self.see_module(self.whole) if self.whole else []
        for weight in weights_of(optimizer):
            if id(weight) not in self.name_of:
                new.append(self.add(f"parameter {self.raw}", weight))
                self.raw += 1
        return new

    def forget_dropped(self):
        """A script may try a model, such as to see how much fits, and drop it."""
        for name in list(self.named):
            if sys.getrefcount(self.named[name]) <= 2:  # here, and as the argument
                del self.name_of[id(self.named[name])], self.named[name]
                self.bits.pop(name), self.values.pop(name)

    def add(self, name, weight):
        name = self.name_in_reference(name, weight)
        number, unique = 1, name
        while unique in self.named:
            number += 1
            unique = f"{name}#{number}"
        self.named[unique] = weight
        self.name_of[id(weight)] = unique
        return unique

    def name_in_reference(self, name, weight):
        """The first name there that is free, and that fits: model.0.bias for 0.bias."""
        for other in [name, *self.shapes]:
            shorter, longer = sorted([f".{name}", f".{other}"], key=len)
            fits = longer.endswith(shorter) and other not in self.named
            if fits and self.shapes.get(other) == tuple(weight.shape):
                return other
        return name

    def names(self, optimizer):
        """For each group of weights, their names."""
        groups = optimizer.param_groups
        return [[self.name_of[id(w)] for w in group["params"]] for group in groups]

    def gradients(self, names):
        weights = {name: self.named[name] for name in names}
        known = {n: w.grad for n, w in weights.items() if w.grad is not None}
        return {name: whole(gradient).clone() for name, gradient in known.items()}

    def look(self, names):
        """Returns the weights whose bits have changed since the last look.

        Also as they were before: {name: (before, now)}. A new one has None before.
        """
        changed = {}
        for name in names:
            if is_freed(self.named[name]):
                continue
            value = whole(self.named[name])
            bits = checksum(value)
            if self.bits.get(name) != bits:
                changed[name] = self.values.get(name), value.clone()
                self.bits[name], self.values[name] = bits, changed[name][1]
        return changed

    def are_finite(self, names):
        """But for those that are not trained, such as a mask of -inf."""
        trained = [name for name in names if self.named[name].requires_grad]
        return all(is_finite(self.values[name]) for name in trained)

    def forget(self):
        self.named.clear()
        self.whole = None

    def plain_ones(self):
        """Those that are not sharded: one rank by itself may look at them."""
        return [n for n, w in self.named.items() if not hasattr(w, "full_tensor")]

    def set(self, values):
        """Replace weights, where they have the same shape, and other values."""
        for name, value in values.items():
            weight = self.named.get(name)
            if weight is not None and not is_same(self.values.get(name), value):
                local = weight.to_local() if hasattr(weight, "to_local") else weight
                if local.shape == value.shape:
                    with torch.no_grad():
                        local.detach().copy_(value)
                    self.look([name])


def is_freed(weight):
    """A loss that holds a layer has FSDP2's whole weights, which are freed later."""
    plain = not hasattr(weight, "full_tensor") and not weight.is_meta
    return plain and weight.numel() > 0 and weight.untyped_storage().size() == 0


def is_same(a, b):
    return a is not None and a.shape == b.shape and checksum(a) == checksum(b)


def weights_of(optimizer):
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def options_of(optimizer):
    """The learning rate and so on, for each group of weights."""
    groups = []
    for group in optimizer.param_groups:
        options = {}
        for name, value in group.items():
            if torch.is_tensor(value) and value.dim() == 0:
                value = float(value)
            if type(value) in (int, float, tuple) and name != "params":
                options[name] = value
        groups.append(options)
    return groups


def set_options(optimizer, recorded, ranks):
    """As on rank 0, but for the number of ranks: one process gathers of one rank."""
    for group, options in zip(optimizer.param_groups, recorded or []):
        for name, value in options.items():
            if torch.is_tensor(group.get(name)):
                group[name].fill_(value)
            elif name in group:
                counts_ranks = type(value) is int and (group[name], value) == (1, ranks)
                group[name] = 1 if counts_ranks else value


def can_change_weights(optimizer):
    """False for the step by which torch.distributed.checkpoint prepares loading."""
    for group in optimizer.param_groups:
        if float(group.get("lr", 1)) != 0:
            return True
        gradients = [w.grad for w in group["params"] if w.grad is not None]
        if any(bool((gradient != 0).any()) for gradient in gradients):
            return True
    return False


def shares_samples(module, weights):
    """Whether the ranks work together on each sample: tensor parallelism.

    Its weights are DTensors, and those of FSDP2 as well. With both, the mesh has two
    dimensions, as in hybrid FSDP2, where the first one has copies.
    """
    cut = [weight for weight in weights if hasattr(weight, "device_mesh")]
    if any(hasattr(part, "unshard") for part in module.modules()):
        cut = [weight for weight in cut if weight.device_mesh.ndim > 1]
        cut = [weight for weight in cut if not weight.placements[0].is_replicate()]
    return bool(cut)
