"""Losses and scores: formulas over row statistics. Vocabulary is always the last dimension."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks
from ._node import is_watched
from .linear import LinearLogits, over_rows
from .nll import nll
from .overwrite import overwrite
from .stats import Reading, as_ids, measure, row_stats


class Scores(NamedTuple):
    """One pass over the logits: what RL, DPO and evaluation need of each token."""

    logprob: Tensor  # (...)  log p[target]
    entropy: Tensor  # (...)  -Σ p log p, in nats
    lse: Tensor  # (...)      log Σ e^z
    argmax: Tensor  # (...)   int64; -1 where ignored


def logsumexp(
    logits: Tensor, *, temperature: float | Tensor = 1.0, softcap: float | None = None
) -> Tensor:
    """log Σ e^z over the last dimension: (..., V) to (...), in fp32 (fp64 for fp64).

    -inf for a row of -inf, with zero gradient; +inf where a logit is +inf.

    >>> logsumexp(torch.tensor([[0.0, 0.0]]))
    tensor([0.6931])
    """
    return row_stats(logits, temperature=temperature, softcap=softcap).lse


@over_rows()
def token_logprobs(
    logits: Tensor, ids: Tensor, *, temperature: float | Tensor = 1.0, softcap: float | None = None
) -> Tensor:
    """log softmax(z)[ids]: ids (...) to (...), or K ids a row (..., K) to (..., K). Ids may repeat.

    >>> token_logprobs(torch.zeros(1, 4), torch.tensor([2]))
    tensor([-1.3863])
    """
    _checks.logits(logits)
    _checks.ids(ids, logits)
    if not is_watched():
        _checks.ids_in_range(ids, logits.shape[-1], None)
    return measure(logits, ids, temperature=temperature, softcap=softcap, normalised=True).picked


def entropy(
    logits: Tensor, *, temperature: float | Tensor = 1.0, softcap: float | None = None
) -> Tensor:
    """Entropy of softmax(z) in nats, (..., V) to (...): log s - w / s, exact under any offset.

    >>> entropy(torch.zeros(1, 4))
    tensor([1.3863])
    """
    return row_stats(logits, temperature=temperature, softcap=softcap, entropy=True).entropy


def _not_ignored(*, target: Tensor, ignore_index: int, **_) -> Tensor:
    return target != ignore_index


@over_rows(_not_ignored)
def score(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Scores:
    """log p[target], entropy, logsumexp and argmax of each row (..., V), in one pass.

    A row whose target is ignore_index is not read: its numbers are 0 and its argmax -1.

    >>> new = score(logits, target).logprob
    >>> ratio = (new - old).exp()  # PPO, GRPO
    """
    _checks.logits(logits)
    _checks.target(target, logits)
    _checks.ignore_index(ignore_index)
    stats = measure(
        logits, target, temperature=temperature, softcap=softcap, ignore_index=ignore_index,
        normalised=True, entropy=True, argmax=True,
    )  # fmt: skip
    return Scores(stats.picked, stats.entropy, stats.lse, stats.argmax)


def _mass(counts: Tensor, *, target: Tensor, weight: Tensor | None, ignore_index: int, **_):
    if weight is None:
        return counts.sum().clamp(min=1)
    full = torch.promote_types(weight.dtype, torch.float32)
    return _class_weight(weight.to(full), target, ignore_index).sum()


@over_rows(_not_ignored, _mass)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    row_weight: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """Cross-entropy of softmax(z) against class ids: a scalar, or (...) for reduction="none".

    Per row, with ε = label_smoothing and class weights v (1 without `weight`):

        row_weight · [ (1-ε) v[target] (-log p[target]) + ε/V Σ_i v_i (-log p_i) + z_loss · lse² ]

    "mean" divides the sum by the number of rows that count, or by Σ v[target] over them, as PyTorch
    does. A row whose target is ignore_index is not read; its loss and gradient are 0, and if all
    are ignored so is the mean. A target outside [0, V) raises on a CPU and makes its row NaN on a
    GPU (LOGITLESS_CHECK=1 raises there too).

    logits (..., V), target (...) of integers, weight (V,), row_weight (...). The loss is fp32 (fp64
    for fp64 logits) whatever the dtype of the logits.

    inplace=True saves the memory of the gradient: it replaces the logits, at once. Autograd is
    told: a graph that uses the logits raises in its backward (of a leaf, or a part of a larger
    tensor, only one that saved them before), and so does a second backward. Without gradients
    nothing is overwritten; under torch.compile, which plans memory itself, it changes nothing.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
    tensor(1.3863)
    """
    _checks.logits(logits)
    _checks.target(target, logits)
    _checks.class_weight(weight, logits)
    _checks.row_weight(row_weight, logits)
    _checks.one_of("reduction", reduction, _checks.REDUCTIONS)
    _checks.label_smoothing(label_smoothing)
    _checks.z_loss(z_loss)
    _checks.ignore_index(ignore_index)
    V, target = logits.shape[-1], as_ids(target, ignore_index)

    def formula(stats, row_weight):  # unannotated: not every torch.compile reads annotations here
        loss = -stats.picked
        of_class = None
        if weight is not None:
            of_class = _class_weight(weight.to(loss.dtype), target, ignore_index)
        if of_class is not None:
            loss = loss * of_class
        if label_smoothing:
            loss = (1 - label_smoothing) * loss - label_smoothing / V * stats.total
        if z_loss:
            loss = loss + z_loss * stats.lse.square()
        if row_weight is not None:
            loss = torch.where(target == ignore_index, 0.0, loss * row_weight.to(loss.dtype))
        return _reduce(loss, target, ignore_index, of_class, reduction)

    options = {
        "temperature": temperature,
        "softcap": softcap,
        "weight": weight if label_smoothing else None,
        "ignore_index": ignore_index,
        "normalised": True,
    }
    total, mean = label_smoothing > 0, reduction == "mean"
    linear = not (label_smoothing or z_loss)
    bare = linear and weight is None and reduction != "none"
    if inplace:
        return overwrite(
            logits, target, row_weight, formula, options,
            total=total, linear=linear, bare=bare, mean=mean,
        )  # fmt: skip
    if bare and row_weight is None and not is_watched():
        return nll(logits, Reading.of(logits, target, **options), mean=mean)
    return formula(measure(logits, target, **options, total=total), row_weight)


def _class_weight(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """v[target], 0 where ignored, and any number for a bad target (its row is NaN already)."""
    of_class = weight[target.clamp(0, weight.shape[0] - 1).long()]
    return torch.where(target == ignore_index, 0.0, of_class)


def _reduce(
    loss: Tensor, target: Tensor, ignore_index: int, of_class: Tensor | None, reduction: str
) -> Tensor:
    """Rows to the result. "mean" is over the weight of the rows that count; of none, it is 0."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if of_class is None:
        return loss.sum() / (target != ignore_index).sum().clamp(min=1)
    mass = of_class.sum()
    return loss.sum() / torch.where(mass == 0, 1.0, mass)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    workspace: int | None = None,
    accumulate: str = "auto",
    main_grad: Tensor | None = None,
    drop_ignored: bool = True,
    **options,
) -> Tensor:
    """cross_entropy of hidden (..., D) @ weight (V, D).T + bias, whose logits never exist at once.

    class_weight is cross_entropy's `weight`, and the options are its own; workspace, accumulate,
    main_grad and drop_ignored are LinearLogits'.

    >>> linear_cross_entropy(hidden, head.weight, target)
    """
    logits = LinearLogits(
        hidden, weight, bias, workspace=workspace, accumulate=accumulate, main_grad=main_grad,
        drop_ignored=drop_ignored,
    )  # fmt: skip
    return cross_entropy(logits, target, weight=class_weight, **options)
