"""Losses against a dense teacher, which has logits or probabilities for the whole vocabulary.

They take one pass over the logits of student and teacher (JSD, TVD and the skewed KL: two), and the
gradient is the only new tensor with V columns.
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


@operator("dense_teacher", saved=1)
@dataclass(eq=False)
class Dense(RowLoss):
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
        # The temperature of `loss` is divided by `scale`, also for the teacher. To keep the
        # teacher's softmax, its logits are divided too.
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
    The softcap applies only to the student.

        direction="forward" computes Σ p log(p / q), which penalises small q where p is large.
        direction="reverse" computes Σ q log(q / p), which penalises large q where p is small.

    A class whose first factor (p, or q in reverse) is 0 adds 0 to the loss; otherwise, a 0 in the
    denominator makes the loss +inf. With skew=α, the denominator is a mixture, as in DistiLLM with
    α = 0.1. Then the loss is finite, at most -log α, and student and teacher are read twice:

        direction="forward" computes Σ p log(p / (α p + (1-α) q)).
        direction="reverse" computes Σ q log(q / (α q + (1-α) p)).

    `temperature` (T) is one number, or one per row. With `t_squared=True`, value and gradient are
    multiplied by T², so that the gradient does not shrink as T grows.

    The result is a scalar, or one number per row for reduction="none", in fp32 (fp64 for an fp64
    student). `row_weight` (...) multiplies the loss of each row. Rows for which `mask` (...) is
    False are not read, and their loss and gradient are 0; "mean" divides by the number of the other
    rows. The teacher gets no gradient.

    >>> kl_div(torch.zeros(1, 4), torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]]),
    ...        direction="forward")
    tensor(0.6931)
    """
    call.checked(
        kl_div, student=student, teacher=teacher, direction=direction, skew=skew,
        temperature=temperature, softcap=softcap, mask=mask, row_weight=row_weight,
        reduction=reduction,
    )  # fmt: skip
    return compared(
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

    With the teacher's p and the student's q of `kl_div`, and M = βp + (1-β)q, the divergence is

        β Σ p log(p / M) + (1-β) Σ q log(q / M)

    It is never negative, and finite if p and q contain no NaN. As β approaches 0 or 1, the formula
    approaches 0; but beta=0 selects the forward KL divergence, and beta=1 the reverse. The other
    options are those of `kl_div`.

    >>> jsd(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]]))
    tensor(0.6931)
    """
    call.checked(
        jsd, student=student, teacher=teacher, beta=beta, temperature=temperature, softcap=softcap,
        mask=mask, row_weight=row_weight, reduction=reduction,
    )  # fmt: skip
    kind = "jsd" if 0 < beta < 1 else "reverse" if beta else "forward"
    return compared(
        student, teacher, kind, beta, temperature, softcap, t_squared, mask, row_weight, reduction
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

    With the teacher's p and the student's q of `kl_div`, the distance is

        ½ Σ |p - q|

    It is in [0, 1]. Where p = q, the derivative of |p - q| is taken as 0, so the gradient is 0 if
    student and teacher are equal. The options are those of `kl_div`; t_squared=True is rarely
    useful, because the gradient shrinks only in proportion to 1/T as the temperature T grows.

    Speculative sampling accepts a token of the draft model with the probability 1 - TVD. If d is
    `ll.tvd(draft, target, reduction="none")`, then `-torch.log1p(-d.clamp(max=1 - 1e-6))` is
    -log(acceptance rate) per row. Without the clamp, a distance that is rounded to 1 would make the
    loss infinite and its gradient NaN.

    >>> tvd(torch.zeros(1, 4), torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]]))
    tensor(0.5000)
    """
    call.checked(
        tvd, student=student, teacher=teacher, temperature=temperature, softcap=softcap, mask=mask,
        row_weight=row_weight, reduction=reduction,
    )  # fmt: skip
    return compared(
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

    With q = softmax(z), z = softcap · tanh(logits / softcap) / temperature, ε = label_smoothing and
    class weights v from `weight` (V,) (1 if None), the loss of a row is

        row_weight · Σ_i v_i ((1-ε) probs_i + ε/V) (-log q_i)

    A class of probability 0 adds 0 to the loss, even if its logit is -inf. "mean" divides by the
    number of rows that `mask` does not exclude, even with class weights. `probs` gets no gradient.
    The other options are those of `kl_div`.

    >>> soft_cross_entropy(torch.zeros(1, 4), torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
    tensor(1.3863)
    """
    call.checked(
        soft_cross_entropy, logits=logits, probs=probs, weight=weight,
        label_smoothing=label_smoothing, temperature=temperature, softcap=softcap, mask=mask,
        row_weight=row_weight, reduction=reduction,
    )  # fmt: skip
    return compared(
        logits, probs, "soft", label_smoothing, temperature, softcap, False, mask, row_weight,
        reduction, weight,
    )  # fmt: skip


def compared(
    student, teacher, kind, blend=0.0, temperature=1.0, softcap=None, t_squared=False, mask=None,
    row_weight=None, reduction="mean", weight=None,
) -> Tensor:  # fmt: skip
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
