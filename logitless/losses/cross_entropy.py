"""Losses and scores: formulas over row statistics. Vocabulary is always the last dimension."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import contract
from ..contract import Coefficients, made_once
from ..core import call as _call
from ..core.in_place import evaluate_in_place
from ..core.loss import RowLoss, evaluate, rows_in
from ..core.operators import operator
from ..heads.linear import LinearLogits
from .statistics import Read, row_stats


@operator("plain", saved=2)
@dataclass(eq=False)
class Plain(RowLoss):
    """Cross-entropy with a class a row, the label."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def is_nll(self) -> bool:
        return not self.label_smoothing and not self.z_loss and self.reading.class_weight is None

    def settle(self, run, found):
        state = found.state
        value, coefficients = found.nll, _of_nll[state.device, state.dtype]
        if not self.is_nll:
            value, coefficients = run.cross_entropy(
                found, self.reading, self.label_smoothing, self.z_loss
            )
        return (value,), (state, coefficients.rows)

    def coefficients(self, saved, upstream):
        has = ("a", "label", "total") if self.label_smoothing else ("a", "label")
        return Coefficients(saved[1], has), upstream[0]

    def at_once(self, run, x, factor, into):
        if self.label_smoothing or self.z_loss or run.one_pass is None:
            return super().at_once(run, x, factor, into)
        # A loss that is linear in log p knows its coefficients before any logit is read. (Those of
        # class weights are made in vain where one pass then cannot do it: for very long rows.)
        coefficients = _of_nll[x.device, torch.float32]
        if not self.is_nll:
            coefficients = run.label_coefficients(self.reading, torch.float32)
        value = run.one_pass(x, self.reading, coefficients, factor, into)
        if value is None:
            return super().at_once(run, x, factor, into)
        if not self.is_nll:
            value = run.weighted_nll(value, self.reading)
        return value, into, ()

    def mean_at_once(self, run, x, into):
        if not self.is_nll or run.one_pass is None:
            return None
        coefficients = _of_nll[x.device, torch.float32]
        shares = run.one_pass(x, self.reading, coefficients, None, into, mean=True)
        return None if shares is None else shares.sum()

    def mass(self, run, dtype):
        return None if self.reading.class_weight is None else run.label_mass(self.reading, dtype)

    def shapes(self, x):
        rows = rows_in(x.shape[:-1])
        coefficients = (1 if self.is_nll else rows, contract.COEFFICIENTS)
        return [x.shape[:-1], (rows, contract.STATE), coefficients]


@made_once
def _of_nll(device: torch.device, dtype: torch.dtype) -> Coefficients:
    """d nll / dz_i = p_i - [i = label], the same for all rows."""
    rows = torch.zeros((1, contract.COEFFICIENTS), device=device, dtype=dtype)
    rows[0, contract.A], rows[0, contract.G_LABEL] = 1.0, -1.0
    return Coefficients(rows, ("a", "label"))


class Scores(NamedTuple):
    """One pass over the logits: what RL, DPO and evaluation need of each token."""

    logprob: Tensor  # (...)  log p[target]
    entropy: Tensor  # (...)  -Σ p log p, in nats
    lse: Tensor  # (...)      log Σ e^z
    argmax: Tensor  # (...)   int64; -1 where ignored


@_call.named()
def logsumexp(
    logits: Tensor, *, temperature: float | Tensor = 1.0, softcap: float | None = None
) -> Tensor:
    """log Σ e^z over the last dimension: (..., V) to (...), in fp32 (fp64 for fp64).

    -inf for a row of -inf, with zero gradient; +inf where a logit is +inf.

    >>> logsumexp(torch.tensor([[0.0, 0.0]]))
    tensor([0.6931])
    """
    return row_stats(logits, temperature=temperature, softcap=softcap).lse


@_call.named()
def token_logprobs(
    logits: Tensor, ids: Tensor, *, temperature: float | Tensor = 1.0, softcap: float | None = None
) -> Tensor:
    """log softmax(z)[ids]: ids (...) to (...), or K ids a row (..., K) to (..., K). Ids may repeat.

    >>> token_logprobs(torch.zeros(1, 4), torch.tensor([2]))
    tensor([-1.3863])
    """
    _call.once(_call.stats, logits, ids, temperature, softcap, None, True)
    ids = _call.as_ids(ids)
    one = ids.dim() < len(logits.shape)
    reading = _call.reading_of(
        logits, temperature, softcap, label=ids if one else None, ids=None if one else ids,
        wants=("logprob",),
    )  # fmt: skip
    return evaluate(logits, Read(reading))[0]


@_call.named()
def entropy(
    logits: Tensor, *, temperature: float | Tensor = 1.0, softcap: float | None = None
) -> Tensor:
    """Entropy of softmax(z) in nats, (..., V) to (...): log s - w / s, exact under any offset.

    >>> entropy(torch.zeros(1, 4))
    tensor([1.3863])
    """
    return row_stats(logits, temperature=temperature, softcap=softcap, entropy=True).entropy


@_call.named()
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
    _call.once(_call.score, logits, target, temperature, softcap, ignore_index)
    reading = _call.reading_of(
        logits, temperature, softcap, label=_call.as_ids(target, ignore_index),
        ignore_index=ignore_index, wants=Scores._fields,
    )  # fmt: skip
    return Scores(*evaluate(logits, Read(reading, "target")))


@_call.named()
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
    for fp64 logits) whatever the dtype of the logits. The vocabulary is the last dimension, where
    F.cross_entropy has it second: give logits.movedim(1, -1) of its (N, V, ...). Where V equals
    another size, shapes cannot tell the two apart, and the loss would be wrong.

    temperature and softcap are in [1e-12, 1e12], z_loss at most 1e12: beyond, fp32 would overflow.

    inplace=True saves the memory of the gradient: it replaces the logits, at once. Autograd is
    told: a graph that uses the logits raises in its backward (of a leaf, or a part of a larger
    tensor, only one that saved them before), and so does a second backward. Without gradients
    nothing is overwritten; under torch.compile, which plans memory itself, it changes nothing.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
    tensor(1.3863)
    """
    _call.once(
        _call.cross_entropy, logits, target, weight, row_weight, temperature, softcap,
        ignore_index, reduction, label_smoothing, z_loss,
    )  # fmt: skip
    wants = ("nll",)
    if label_smoothing:
        wants += ("log_total",)
    if z_loss:
        wants += ("lse",)
    reading = _call.reading_of(
        logits, temperature, softcap, label=_call.as_ids(target, ignore_index),
        class_weight=weight, ignore_index=ignore_index, wants=wants,
    )  # fmt: skip
    loss = Plain(reading, float(label_smoothing), float(z_loss))
    run = evaluate_in_place if inplace else evaluate
    return run(logits, loss, reduction, row_weight)


@_call.named(cross_entropy)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    workspace: int | None = None,
    logits_dtype: torch.dtype | None = None,
    accumulate: str = "auto",
    main_grad: Tensor | None = None,
    drop_ignored: bool = True,
    **options,
) -> Tensor:
    """cross_entropy of hidden (..., D) @ weight (V, D).T + bias, whose logits never exist at once.

    class_weight is cross_entropy's `weight`, and the options are its own; workspace, logits_dtype,
    accumulate, main_grad and drop_ignored are LinearLogits'.

    >>> linear_cross_entropy(hidden, head.weight, target)
    """
    logits = LinearLogits(
        hidden, weight, bias, workspace=workspace, logits_dtype=logits_dtype,
        accumulate=accumulate, main_grad=main_grad, drop_ignored=drop_ignored,
    )  # fmt: skip
    return cross_entropy(logits, target, weight=class_weight, **options)
