"""A loss may be a sum, divided by the number of rows that a rank has: so it is a mean.

If that is a fixed number, one process with the rows of all ranks divides by the same
number. So its loss is divided by the ranks.
"""

import math
from collections import Counter

import torch

from ddp_check.rank.patch import private


def sums_in(loss):
    """For each term of a loss: what its sum is multiplied by, and the shape of x.

    (1 / 16,), (16, 6) for x.sum() / 16. A term that is no sum, such as a mean: (), ().
    """
    terms, waiting = [], [(loss.grad_fn, ())]
    while waiting:
        node, factors = waiting.pop()
        name = node.name() if node is not None else ""
        after = [node for node, _ in node.next_functions] if node is not None else []
        if name in ("AddBackward0", "SubBackward0", "NegBackward0"):
            waiting += [(one, factors) for one in after if one is not None]
        elif name in ("DivBackward0", "MulBackward0") and (number := scalar_of(node)):
            factor = 1 / number if name == "DivBackward0" else number
            waiting.append((after[0] or after[-1], (*factors, factor)))
        else:
            is_sum = name.startswith("SumBackward")
            is_sum |= getattr(node, "_saved_reduction", 0) == 2
            terms.append((factors, shape_of_sum(node)) if is_sum else ((), ()))
        if len(terms) + len(waiting) > 100:
            return []
    return terms


def saved(node, name):
    """A tensor that the node keeps, or None. A checkpoint would have to compute it."""
    kept = getattr(getattr(node, f"_raw_saved_{name}", None), "data", None)
    return kept if torch.is_tensor(kept) else None


def shape_of_sum(node):
    target = saved(node, "target")  # of a loss of torch
    if target is not None:
        return tuple(target.shape)
    return tuple(getattr(node, "_saved_self_sym_sizes", ()))


def counts_of(shape, batches, ranks):
    """How many there are of what is summed: its values, or its rows.

    batches: how many samples the batches have. A sum over two values of each sample
    may be divided by the samples of two ranks, which is no mean of this rank.
    """
    rows = {*batches, *shape[:1]}
    return rows | {math.prod(shape)} - {n * ranks for n in rows}


def own_factors(factors, calls):
    """Without those that cancel each other, or divide by the calls of backward()."""
    left = Counter(factors)
    for factor in factors:
        if factor != 1 and left[factor] > 0 and left[1 / factor] > 0:
            left.subtract([factor, 1 / factor])
    if calls > 1 and left.total() > 1 and left[1 / calls] > 0:
        left.subtract([1 / calls])
    return set(+left)


class Means:
    """Knows of each rank by which numbers it has multiplied its sums.

    ranks: for each, what it has recorded: {(step, call of backward()): [(factors,
    counts of what is summed)]}.
    """

    def __init__(self, ranks):
        self.ranks = ranks
        self.calls = Counter(step for step, _ in ranks[0])  # of each step
        seen, means = Counter(), Counter()
        for terms_of in ranks:
            for (step, _), terms in terms_of.items():
                for factors, counts in terms:
                    for factor in own_factors(factors, self.calls[step]):
                        seen[factor] += 1
                        means[factor] += any(abs(factor * n - 1) < 1e-6 for n in counts)
        # Mostly: the last batch of an epoch may be smaller, and 0.5 its mean by chance.
        self.known = {factor for factor in seen if 2 * means[factor] > seen[factor]}

    def are_of_ranks(self, place, terms):
        """For each term of a loss, whether all ranks have made it a mean so."""
        of_ranks = [terms_of.get(place, []) for terms_of in self.ranks]
        found = []
        for group in zip(terms, *of_ranks):
            own = [own_factors(factors, self.calls[place[0]]) for factors, _ in group]
            found.append(bool(self.known.intersection(*own)))
        return found if len(found) == len(terms) else []


def scalar_of(node):
    """The number that a tensor was divided or multiplied by, or 0."""
    with private("without dispatch modes")():
        for other in (saved(node, "other"), saved(node, "self")):
            if other is not None and other.numel() == 1 and other.grad_fn is None:
                return 0 if other.requires_grad else float(other)
    return 0
