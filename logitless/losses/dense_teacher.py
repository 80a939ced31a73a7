"""Losses against a dense teacher, which has logits or probabilities for the whole vocabulary.

Each loss computes one number per row. Most losses take one pass over the logits of student and
teacher. JSD, TVD and the skewed KL take two passes. The gradient is the only new tensor with V
columns.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..contract import PAIR_STATE, PRECISION, Pair
from ..core import call
from ..core.evaluate import evaluate
from ..core.loss import RowLoss, rows_in
from ..core.source import flat_teacher, scaled_teacher, teacher_of
from ..heads.operators import operator
from . import checks


@operator("dense_teacher", saved=1)
@dataclass(eq=False)
class Dense(RowLoss):
    """A loss that compares each row of the student with the same row of a dense teacher."""

    structs: ClassVar[tuple[str, ...]] = ("reading", "pair")

    pair: Pair

    @property
    def teachers(self):
        return (self.pair.teacher,)

    def forward(self, backend, x):
        value, state = backend.pair_read(x, self.reading, self.pair)
        return (value,), (state,)

    def backward(self, backend, x, saved, upstream, factor=None, into=None):
        return backend.pair_gradient(
            x, self.reading, self.pair, saved[0], upstream[0], factor, into
        )

    def flatten(self, recompute=False):
        (label, ids, class_weight, row_temperature), loss = super().flatten()
        leaves, blank = flat_teacher(self.pair.teacher)
        tensors = (label, ids, class_weight, row_temperature, *leaves)
        return tensors, loss.replace(pair=self.pair._replace(teacher=blank))

    def rebuild(self, tensors):
        label, ids, class_weight, row_temperature, *leaves = tensors
        loss = super().rebuild((label, ids, class_weight, row_temperature))
        blank = self.pair.teacher
        teacher = leaves[0] if blank is None else blank.rebuild(leaves)
        return loss.replace(pair=self.pair._replace(teacher=teacher))

    def fold_scale(self, scale, softcap):
        loss = super().fold_scale(scale, softcap)
        if loss is None or scale == 1 or self.pair.kind == "soft":
            return loss
        # In `loss`, the temperature is divided by `scale`. This temperature also applies to the
        # teacher. So the teacher's logits are divided by `scale` too, and the teacher's softmax
        # does not change.
        teacher = scaled_teacher(self.pair.teacher, 1 / scale)
        if teacher is None:
            return None
        return loss.replace(pair=self.pair._replace(teacher=teacher))

    def shapes(self, x):
        return [x.shape[:-1], (rows_in(x.shape[:-1]), PAIR_STATE)]


@call.named()
def kl_div(
    student: Tensor,
    teacher: Tensor,
    *,
    direction: str,
    skew: float = 0.0,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    t_squared: bool = False,
    mask: Tensor | None = None,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Computes the KL divergence between student and teacher logits of shape (..., V).

    Let p = softmax(teacher / T) and q = softmax(z), with z = softcap · tanh(student / softcap) / T.

        direction="forward" computes Σ p log(p / q), which penalises small q where p is large.
        direction="reverse" computes Σ q log(q / p), which penalises large q where p is small.

    For forward KL, a class with p = 0 adds 0 to the loss, and a class with p > 0 and q = 0 makes
    the loss +inf. For reverse KL, a class with q = 0 adds 0, and a class with q > 0 and p = 0 makes
    the loss +inf.

    With skew=α, the function computes the skewed KL divergence of DistiLLM. The distribution in
    the denominator is replaced by a mixture of p and q:

        direction="forward" computes Σ p log(p / (α p + (1-α) q)).
        direction="reverse" computes Σ q log(q / (α q + (1-α) p)).

    The skewed KL is at most -log α, so the loss is finite even if p or q is 0. DistiLLM uses
    α = 0.1. The skewed KL reads student and teacher twice, as `jsd` does.

    The softcap applies only to the student. With `t_squared=True`, the value and the gradient are
    multiplied by T², so that the gradient does not shrink as T grows.

    `temperature` (T) is one number, or a tensor with one number per row. Rows for which `mask` is
    False are not read, and their loss and gradient are 0. `row_weight` holds one number per row.
    The loss of each row is multiplied by this number. "mean" divides the sum by the number of rows
    that `mask` does not exclude. The teacher gets no gradient. The loss is fp32 (fp64 for an fp64
    student).

    >>> kl_div(torch.zeros(1, 4), torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]]),
    ...        direction="forward")
    tensor(0.6931)
    """
    call.check_once(checks.kl_div, student, direction, skew)
    return _compared(
        student, teacher, f"skewed_{direction}" if skew else direction, skew, temperature, softcap,
        t_squared, mask, row_weight, reduction,
    )  # fmt: skip


@call.named()
def jsd(
    student: Tensor,
    teacher: Tensor,
    *,
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    t_squared: bool = False,
    mask: Tensor | None = None,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Computes the generalised Jensen-Shannon divergence between student and teacher.

    Let p be the distribution of the teacher and q the distribution of the student, as in `kl_div`.
    Let M = βp + (1-β)q. The divergence is

        β Σ p log(p / M) + (1-β) Σ q log(q / M)

    The divergence is never negative, and is finite if p and q contain no NaN. The formula
    approaches 0 as β approaches 0 or 1. However, beta=0 selects the forward KL divergence, and
    beta=1 selects the reverse KL divergence. The other options are the same as in `kl_div`.

    >>> jsd(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]]))
    tensor(0.6931)
    """
    return _compared(
        student, teacher, "jsd", beta, temperature, softcap, t_squared, mask, row_weight, reduction
    )


@call.named()
def tvd(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    t_squared: bool = False,
    mask: Tensor | None = None,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Computes the total variation distance between student and teacher logits (..., V).

    Let p be the distribution of the teacher and q the distribution of the student, as in `kl_div`.
    The distance is

        ½ Σ |p - q|

    The distance is in [0, 1]. For a class with p = q, the derivative of |p - q| is taken as 0. So
    the gradient is 0 if student and teacher are equal. The options are the same as in `kl_div`. As
    the temperature T grows, the gradient shrinks only in proportion to 1/T. So t_squared=True is
    rarely useful.

    Speculative sampling accepts a token of the draft model with the probability 1 - TVD. If d is
    `ll.tvd(draft, target, reduction="none")`, then `-torch.log1p(-d.clamp(max=1 - 1e-6))` is
    -log(acceptance rate) per row. If the distance of a row is rounded to 1, the acceptance rate is
    0. Without the clamp, the loss of this row would be infinite, and its gradient would be NaN.

    >>> tvd(torch.zeros(1, 4), torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]]))
    tensor(0.5000)
    """
    return _compared(
        student, teacher, "tvd", 0.0, temperature, softcap, t_squared, mask, row_weight, reduction
    )


@call.named()
def soft_cross_entropy(
    logits: Tensor,
    probs: Tensor,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Computes the cross-entropy against class probabilities (..., V), as F.cross_entropy does.

    Let q = softmax(z), with z = softcap · tanh(logits / softcap) / temperature. Let ε be
    label_smoothing, and let v be the class weights (1 without `weight`). The loss of a row is

        row_weight · Σ_i v_i ((1-ε) probs_i + ε/V) (-log q_i)

    A class of probability 0 adds 0 to the loss, even if its logit is -inf. "mean" divides by the
    number of rows that `mask` does not exclude, even with class weights. `probs` gets no gradient.
    `weight` has shape (V,). The other options are the same as in `kl_div`.

    >>> soft_cross_entropy(torch.zeros(1, 4), torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
    tensor(1.3863)
    """
    return _compared(
        logits, probs, "soft", label_smoothing, temperature, softcap, False, mask, row_weight,
        reduction, weight, ("logits", "probs", "label_smoothing"),
    )  # fmt: skip


def _compared(
    student, teacher, kind, blend, temperature, softcap, t_squared, mask, row_weight, reduction,
    weight=None, names=("student", "teacher", "beta"),
) -> Tensor:  # fmt: skip
    """Checks the arguments and computes the weighted and reduced loss."""
    call.check_once(
        checks.dense_teacher, student, teacher, names, weight, blend, temperature, softcap, mask,
        row_weight, reduction,
    )  # fmt: skip
    if kind == "jsd" and blend in (0, 1):
        kind = "reverse" if blend else "forward"
    label = call.as_label(mask)
    reading = call.reading_of(
        student, temperature, softcap, label=label, class_weight=weight,
        ignore_index=None if label is None else 0,
    )  # fmt: skip
    by_row, squared = reading.squared(PRECISION[student.dtype]) if t_squared else (None, 1.0)
    if by_row is not None:
        row_weight = by_row if row_weight is None else row_weight * by_row
    loss = Dense(reading, Pair(teacher_of(teacher, student), kind, float(blend)))
    value = evaluate(student, loss, reduction, row_weight)
    return value if squared == 1 else value * squared
