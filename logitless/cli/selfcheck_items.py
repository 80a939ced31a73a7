"""Checks of `logitless doctor` for losses over pairs, sampled items and sampled ids.

A check function has the arguments of a Check (selfcheck.py): logits or embeddings `x` (N, V), N
ids, and a second matrix (N, V).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll

from ..core.capture import uniforms_of
from .formulas import at

ITEMS = 16  # the number of rows of a table
DRAWS = 8  # the number of ids that are drawn per row


def head_of(other: Tensor, classes: int = ITEMS) -> Tensor:
    """A weight (classes, D) with one nonzero entry per row, 1 or -0.5: logits have no rounding."""
    rows = torch.arange(classes, device=other.device)
    weight = other.new_zeros((classes, other.shape[1]))
    weight[rows, rows % other.shape[1]] = torch.where(rows % 2 == 0, 1.0, -0.5).to(other.dtype)
    return weight


def labels_of(x: Tensor) -> Tensor:
    return torch.arange(ITEMS, device=x.device) % len(x)


def three_ids(ids: Tensor, vocab: int) -> Tensor:
    """Three ids per row, of which the first two are equal."""
    return torch.stack((ids, ids, (ids + 1) % vocab), -1)


def by_pairs(x, ids, other):
    b, labels = head_of(other, len(x)), ids % 3
    return ll.contrastive(x, b, labels=labels, reduction="none")


def naive_by_pairs(x, ids, other):
    same, one = (ids % 3)[:, None] == ids % 3, torch.eye(len(x), device=x.device)
    z = (x @ head_of(other, len(x)).T).masked_fill(same & (one == 0), -torch.inf)
    return (z.logsumexp(1) + z.logsumexp(0)) / 2 - z.diagonal()


def by_sigmoids(x, _, other):
    return ll.sigmoid_contrastive(x, head_of(other, len(x)), bias=-1.0, reduction="none")


def naive_by_sigmoids(x, _, other):
    sign = 1 - 2 * torch.eye(len(x), device=x.device, dtype=x.dtype)
    return F.softplus(sign * (x @ head_of(other, len(x)).T - 1)).sum(1)


def naive_sampled(hidden: Tensor, table: Tensor, target: Tensor, negatives: Tensor) -> Tensor:
    z = hidden @ table.T
    hits = negatives == target.unsqueeze(-1)
    others = z.gather(-1, negatives).masked_fill(hits, -torch.inf)
    own = at(z, target)
    return torch.cat((own.unsqueeze(-1), others), -1).logsumexp(-1) - own


def shared_negatives(x: Tensor) -> Tensor:
    return torch.tensor((1, 2, 2, 5, 7), device=x.device)


def over_shared(x, ids, other):
    table, negatives = head_of(other).requires_grad_(), shared_negatives(x)
    return ll.sampled_softmax(x, table, ids % ITEMS, negatives, reduction="none")


def naive_over_shared(x, ids, other):
    negatives = shared_negatives(x).expand(len(x), -1)
    return naive_sampled(x, head_of(other), ids % ITEMS, negatives)


def over_own(x, ids, other):
    negatives = three_ids((ids + 1) % ITEMS, ITEMS)
    return ll.sampled_softmax(x, head_of(other), ids % ITEMS, negatives, reduction="none")


def naive_over_own(x, ids, other):
    return naive_sampled(x, head_of(other), ids % ITEMS, three_ids((ids + 1) % ITEMS, ITEMS))


def of_a_table(x, _, other):
    target = labels_of(x)
    negatives = three_ids((target + 1) % len(x), len(x))
    return ll.sampled_softmax(head_of(other), x, target, negatives, reduction="none")


def naive_of_a_table(x, _, other):
    target = labels_of(x)
    return naive_sampled(head_of(other), x, target, three_ids((target + 1) % len(x), len(x)))


def outside_draws(x, *_):
    """How far each uniform random number is outside the interval of the drawn id.

    The interval of an id begins at the total probability of all ids before it and is as long as its
    own, so the result is 0, except for rounding errors.
    """
    seed = x.shape[1]
    found = ll.capture_sampled(x, DRAWS, generator=torch.Generator(x.device).manual_seed(seed))
    uniforms = uniforms_of(x, DRAWS, torch.Generator(x.device).manual_seed(seed))
    counts = (found.logprobs.exp() * DRAWS).round().long()
    ids = found.ids.flatten().repeat_interleave(counts.flatten()).view(len(x), DRAWS)
    probs = x.detach().double().softmax(-1)
    end = probs.cumsum(-1).gather(-1, ids)
    start = end - probs.gather(-1, ids)
    return ((uniforms - (start + end) / 2).abs() - (end - start) / 2).clamp(min=0)
