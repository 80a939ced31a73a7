"""A student compared with a teacher on K slots a row, with little around the kernels.

Statistics (stats.py) and slots (slots.py) are differentiable each, and those who look on see them
so. To everyone else they are one node here: on a GPU each operator between takes the host as long
as a kernel takes the GPU, and nothing but the slots' gradients is kept for backward, which scales
them where it reads them.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._dispatch import backend
from ._node import is_lent, is_watched
from .slots import divergence_over_slots
from .stats import Reading, Upstream, statistics


class Comparison(NamedTuple):
    """What a row is compared with, and what that is worth."""

    teacher: Tensor  # (..., K)  log p
    counts: Tensor | None  # (..., K), slots that count, or (...), rows
    tail: Tensor | None  # (...)  log mass of the teacher outside
    divergence: str
    support: str
    beta: float
    weight: float | Tensor  # of the divergence; or (...)
    ce_weight: float | None = None  # of the first id's cross-entropy, where that is a label

    def over_slots(self, student: Tensor, student_tail: Tensor | None) -> Tensor:
        """The divergence a row, differentiable."""
        return divergence_over_slots(
            student, self.teacher, self.counts, student_tail, self.tail,
            divergence=self.divergence, support=self.support, beta=self.beta,
        )  # fmt: skip

    def weighed(self, divergence: Tensor, label: Tensor | None = None) -> Tensor:
        """weight · divergence - ce_weight · log p of a label."""
        if isinstance(self.weight, Tensor) or self.weight != 1:
            divergence = divergence * self.weight
        if self.ce_weight is None:
            return divergence
        return torch.sub(divergence, label, alpha=self.ce_weight)


def compare(logits: Tensor, reading: Reading, given: Comparison) -> Tensor:
    """The loss of each row, (...), over the logits (..., V) at reading.ids."""
    if not is_watched():
        return _Compare.apply(logits, reading, given)
    _, _, _, picked, _, _, _, tail, label, _ = statistics(logits, *reading, False, False, False)
    tail = tail if reading.outside is not None else None  # an operator's outputs cannot be None
    student, label = _parts(picked, label, reading, given)
    return given.weighed(given.over_slots(student, tail), label)


def _parts(picked, label, reading, given) -> tuple[Tensor, Tensor | None]:
    """The student at the teacher's ids, and log p of the label before them."""
    if given.ce_weight is None:
        return picked, None
    return picked[..., 1:], label if reading.plain else picked[..., 0]


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, reading, given):
        run = backend(x)
        shift, log_s, _, picked, _, _, _, tail, label, log_s1, repeats = run.stats_fwd(
            x, *reading, False, False, False
        )
        student, label = _parts(picked, label, reading, given)
        value, d_student, d_tail = run.slots(
            student, given.teacher, given.counts, tail, given.tail, *given[3:6]
        )
        ctx.save_for_backward(
            x, reading.ids, reading.row_temperature, shift, log_s, log_s1, tail, repeats,
            d_student, d_tail,
        )  # fmt: skip
        ctx.reading = reading._replace(ids=None, row_temperature=None)
        ctx.weight, ctx.ce_weight = given.weight, given.ce_weight
        return given.weighed(value, label)

    @staticmethod
    def backward(ctx, d_loss):
        return _backward(ctx, d_loss, *ctx.saved_tensors)


@once_differentiable
def _backward(
    ctx, d_loss, x, ids, row_temperature, shift, log_s, log_s1, tail, repeats, d_student, d_tail
):  # fmt: skip
    """x is named so that a second differentiation raises even where d_loss is a constant."""
    reading = ctx.reading._replace(ids=ids, row_temperature=row_temperature)
    if d_loss.numel() > 1 and not any(d_loss.stride()):  # of a sum: one number for all
        d_loss = d_loss[(0,) * d_loss.dim()]
    one = isinstance(ctx.weight, float) and ctx.weight == 1
    upstream = Upstream.of(x, reading, None, tail, None, d_student, None, None, d_tail)
    if ctx.ce_weight is not None:
        upstream = upstream._replace(d_label=d_loss * -ctx.ce_weight)
    d_x = backend(x).stats_bwd(
        x, *reading, shift, log_s, log_s1, *upstream,
        gain=d_loss if one else d_loss * ctx.weight, repeats=repeats, inplace=is_lent(x),
    )  # fmt: skip
    return d_x, None, None


def gathered_sum(
    z: Tensor,  # (..., K)
    teacher: Tensor,  # (..., K), log p
    mask: Tensor | None,  # (..., K)
    temperature: float,
    weight: float,
) -> Tensor:
    """weight · Σ of the forward KL over all rows, of a student normalised over its slots."""
    return _GatheredSum.apply(z, teacher, mask, temperature, weight)


class _GatheredSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, teacher, mask, temperature, weight):
        full = torch.promote_types(z.dtype, torch.float32)
        student = z if temperature == 1 else z.to(full) / temperature
        value, d_student, _ = backend(z).slots(
            student, teacher, mask, None, None, "forward_kl", "gathered", 0.0
        )
        ctx.save_for_backward(z, d_student)
        ctx.factor = weight / temperature
        return value.sum() if weight == 1 else value.sum() * weight

    @staticmethod
    def backward(ctx, d_loss):
        return _gathered_backward(ctx, d_loss, *ctx.saved_tensors)


@once_differentiable
def _gathered_backward(ctx, d_loss, z, d_student):
    d_loss = d_loss if ctx.factor == 1 else d_loss * ctx.factor
    d_z = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    return torch.mul(d_student, d_loss, out=d_z), *(None,) * 4  # rounded once
