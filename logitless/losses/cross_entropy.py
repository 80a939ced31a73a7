"""Cross-entropy against class ids, over logits or over a head, with or without scores."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import contract
from ..contract import Coefficients, Total
from ..core import call
from ..core.evaluate import evaluate
from ..core.in_place import evaluate_in_place
from ..core.loss import RowLoss, rows_in
from ..core.source import repeated
from ..eager.stats_coefficients import of_one
from ..heads.linear import HeadLogits, checked_head
from ..heads.operators import operator
from .statistics import SCORES, Scores


@operator("cross_entropy", saved=2)
@dataclass(eq=False)
class CrossEntropy(RowLoss):
    """Cross-entropy against one class id per row, the label."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def is_nll(self) -> bool:
        return not self.label_smoothing and not self.z_loss and self.reading.class_weight is None

    def value(self, backend, statistics):
        state = statistics.state
        if self.is_nll:
            coefficients = of_one.beside(state, "nll", state.device, state.dtype)
            return (statistics.nll,), (state, coefficients.rows)
        value, coefficients = backend.cross_entropy(
            statistics, self.reading, self.label_smoothing, self.z_loss
        )
        return (value,), (state, coefficients.rows)

    def coefficients(self, saved, upstream):
        has = ("a", "label", "total") if self.label_smoothing else ("a", "label")
        return Coefficients(saved[1], has), upstream[0]

    def value_and_gradient(self, backend, x, factor, into):
        if self.label_smoothing or self.z_loss or backend.one_pass is None:
            return super().value_and_gradient(backend, x, factor, into)
        # Here, the loss is -v[target] · log p[target]: the coefficients are known before the logits
        # are read, so one pass computes loss and gradient, unless the rows are too long (None).
        if self.is_nll:
            coefficients = of_one["nll", x.device, torch.float32]
        else:
            coefficients = backend.label_coefficients(self.reading, torch.float32)
        result = backend.one_pass(x, self.reading, coefficients, factor, into)
        if result is None:
            return super().value_and_gradient(backend, x, factor, into)
        value = result if self.is_nll else backend.weighted_nll(result, self.reading)
        return (value,), into, ()

    def in_one_launch(self, backend, reduction):
        if self.reading.class_weight is not None or backend.one_pass is None:
            return None
        return Total(reduction == "mean", self.label_smoothing, self.z_loss)

    def launch_total(self, total, backend, x, into):
        coefficients = of_one["nll", x.device, torch.float32]
        return backend.one_pass(x, self.reading, coefficients, None, into, total)

    def plan_total(self, total, backend, rows, stride, hidden, copies):
        coefficients = of_one["nll", hidden.device, torch.float32]
        return backend.plan_total(total, rows, stride, self.reading, coefficients, hidden, copies)

    def mass(self, backend, dtype):
        return (
            None if self.reading.class_weight is None else backend.label_mass(self.reading, dtype)
        )

    def shapes(self, x):
        rows = rows_in(x.shape[:-1])
        coefficients = (1 if self.is_nll else rows, contract.COEFFICIENTS)
        return [x.shape[:-1], (rows, contract.STATE), coefficients]


@operator("cross_entropy_and_scores", saved=2)
@dataclass(eq=False)
class ScoredCrossEntropy(CrossEntropy):
    """Cross-entropy whose `extras` are the scores of each row.

    The kernel that computes loss and gradient in one pass computes no scores, so it is not used.
    """

    extras: ClassVar[tuple[str, ...]] = SCORES

    value_and_gradient = RowLoss.value_and_gradient
    in_one_launch = RowLoss.in_one_launch

    def value(self, backend, statistics):
        (value,), saved = super().value(backend, statistics)
        return (value, *(getattr(statistics, name) for name in self.extras)), saved

    def shapes(self, x):
        value, *saved = super().shapes(x)
        return [value, *(value for _ in self.extras), *saved]


@operator("cross_entropy_scores_and_rank", saved=2)
@dataclass(eq=False)
class RankedCrossEntropy(ScoredCrossEntropy):
    extras: ClassVar[tuple[str, ...]] = Scores._fields


@call.named()
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    row_weight: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """Computes the cross-entropy of softmax(z) against one class id per row.

    `logits` has shape (..., V), and `target` (...) holds integers. The result is a scalar, or (...)
    for reduction="none", in fp32 (fp64 for fp64 logits). `weight` (V,) holds class weights v (1 if
    None), `mask` and `row_weight` have shape (...), and `temperature` is one number or (...). With
    z = softcap · tanh(logits / softcap) / temperature, p = softmax(z), lse = log Σ e^z and ε =
    label_smoothing, the loss of a row is

        row_weight · [ (1-ε) v[target] (-log p[target]) + ε/V Σ_i v_i (-log p_i) + z_loss · lse² ]

    A row is ignored if its target is ignore_index or its entry in `mask` is False: it is not read,
    and its loss and gradient are 0. "mean" divides by the number of the other rows or, with class
    weights, by their sum of v[target], as in F.cross_entropy. If all rows are ignored, it is 0.

    For logits of shape (N, V, ...), as in F.cross_entropy, pass logits.movedim(1, -1). If another
    dimension also has size V, a wrong order is not detected, and the loss is wrong. A target
    outside [0, V) raises an IndexError on a CPU, and on a GPU with LOGITLESS_CHECK=1; without it,
    the loss of its row is NaN. `temperature` and `softcap` must be in [1e-12, 1e12], and `z_loss`
    at most 1e12, because fp32 would overflow outside these limits.

    inplace=True saves the memory of the gradient, which then overwrites the logits in forward if a
    gradient is needed. A second backward raises an error, and so does the backward of another
    operation that saved the logits before this call, or that uses them afterwards. Only if the
    logits are a leaf, or a slice of a larger tensor, such a later use is not detected. Under
    torch.compile, the option has no effect, because the compiler plans memory itself.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
    tensor(1.3863)
    """
    signature = call.checked(
        cross_entropy, logits=logits, target=target, weight=weight, ignore_index=ignore_index,
        mask=mask, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss,
        softcap=softcap, temperature=temperature, row_weight=row_weight,
    )  # fmt: skip
    label = call.as_ids(target, ignore_index, mask)
    if weight is None and row_weight is None and reduction != "none":
        again = repeated(logits, signature, label)
        if again is not None:
            return again
    wants = ("nll",)
    if label_smoothing:
        wants += ("log_total",)
    if z_loss:
        wants += ("lse",)
    reading = call.reading_of(
        logits, temperature, softcap, label=label, class_weight=weight, ignore_index=ignore_index,
        wants=wants,
    )  # fmt: skip
    loss = CrossEntropy(reading, float(label_smoothing), float(z_loss))
    loss.signature = signature
    run = evaluate_in_place if inplace else evaluate
    return run(logits, loss, reduction, row_weight)


@call.named()
def cross_entropy_and_scores(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    row_weight: Tensor | None = None,
    inplace: bool = False,
    rank: bool = False,
) -> tuple[Tensor, Scores]:
    """Computes the cross-entropy, and the scores of each row, in the same pass over the logits.

    The result is (loss, scores): the loss of `cross_entropy` with the same options, and a `Scores`,
    as `score` returns it for the same temperature and softcap: log p[target], entropy, logsumexp
    and argmax of each row, and with rank=True also the rank of the target. Class weights, row
    weights, label smoothing and z_loss change the loss, but not the scores. In an ignored row,
    argmax and rank are -1, and the other scores are 0.

    The scores are detached; for a loss that differentiates log p or the entropy, use `score` or
    `row_loss`. Over a LinearLogits, a mean or sum takes three GEMMs, as in `cross_entropy`. With
    inplace=True, the scores are computed before the gradient overwrites the logits.

    >>> loss, scores = cross_entropy_and_scores(logits, target)
    >>> loss.backward()
    >>> accuracy = (scores.argmax == target).sum() / (target != -100).sum()
    """
    call.checked(
        cross_entropy_and_scores, logits=logits, target=target, weight=weight,
        ignore_index=ignore_index, mask=mask, reduction=reduction, label_smoothing=label_smoothing,
        z_loss=z_loss, softcap=softcap, temperature=temperature, row_weight=row_weight, rank=rank,
    )  # fmt: skip
    wants = ("nll", *(Scores._fields if rank else SCORES))
    if label_smoothing:
        wants += ("log_total",)
    reading = call.reading_of(
        logits, temperature, softcap, label=call.as_ids(target, ignore_index, mask),
        class_weight=weight, ignore_index=ignore_index, wants=wants,
    )  # fmt: skip
    kind = RankedCrossEntropy if rank else ScoredCrossEntropy
    loss = kind(reading, float(label_smoothing), float(z_loss))
    run = evaluate_in_place if inplace else evaluate
    value, *scores = run(logits, loss, reduction, row_weight)
    return value, Scores(*scores)


@call.named(cross_entropy)
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
    low_rank: tuple[Tensor, Tensor] | None = None,
    **options,
) -> Tensor:
    """Computes the cross-entropy of the logits hidden (..., D) @ weight (V, D).T + bias (V,).

    Large logits are never materialised as a whole. `class_weight` is the option `weight` of
    `cross_entropy`, and `options` are its other options. `workspace`, `logits_dtype`, `accumulate`,
    `main_grad`, `drop_ignored` and `low_rank` are those of LinearLogits.

    >>> linear_cross_entropy(hidden, head.weight, target)
    """
    head = checked_head(
        hidden, weight, bias, workspace=workspace, logits_dtype=logits_dtype,
        accumulate=accumulate, main_grad=main_grad, drop_ignored=drop_ignored, low_rank=low_rank,
    )  # fmt: skip
    return cross_entropy(HeadLogits(head), target, weight=class_weight, **options)
