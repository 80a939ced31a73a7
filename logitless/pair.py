"""Losses against a dense teacher: the second stream of logits.

Each is one number a row, from one pass over student and teacher side by side (two for JSD), and
nothing as wide as the vocabulary but the gradient. Masks, weights and the reduction are plain
PyTorch over these numbers; autograd brings their gradient back to one number a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks
from ._dispatch import backend
from ._node import is_lent, is_watched, node, refuse_twice
from ._reduce import reduced
from .linear import over_rows

DIRECTIONS = ("forward", "reverse")


def _masked(*, mask: Tensor | None, **_) -> Tensor | None:
    return None if mask is None else mask != 0


@over_rows(_masked)
def kl_div(
    student: Tensor,
    teacher: Tensor,
    *,
    direction: str,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    t_squared: bool = False,
    mask: Tensor | None = None,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """KL divergence between the distributions of two rows of logits (..., V).

    With p = softmax(teacher / T) and q = softmax(z), z = softcap · tanh(student / softcap) / T:

        direction="forward"    Σ p log(p / q)    the student covers what the teacher does
        direction="reverse"    Σ q log(q / p)    the student keeps to what the teacher does

    An entry of no probability under the first adds 0; one that only the second gives none makes the
    loss +inf. The softcap is the student's alone. t_squared=True multiplies value and gradient by
    T², which keeps the gradient's size as T grows.

    temperature is a number or (...). Rows that `mask` (...) leaves out are not read, their loss and
    gradient are 0; `row_weight` (...) multiplies a row's loss. "mean" divides the sum by the number
    of rows that count. The teacher is a constant. The loss is fp32 (fp64 for an fp64 student).

    >>> kl_div(torch.zeros(1, 4), torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]]),
    ...        direction="forward")
    tensor(0.6931)
    """
    _checks.one_of("direction", direction, DIRECTIONS)
    return _divergence(
        student, teacher, direction, 0.0, temperature, softcap, t_squared, mask, row_weight,
        reduction,
    )  # fmt: skip


@over_rows(_masked)
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
    """Generalised Jensen-Shannon divergence between two rows of logits (..., V).

    With p of the teacher and q of the student as in `kl_div`, and M = βp + (1-β)q:

        β Σ p log(p / M) + (1-β) Σ q log(q / M)

    Never negative, and finite wherever both are distributions. beta=0 is the forward KL divergence
    and beta=1 the reverse one; in between it goes to 0 towards either end. The options are those of
    `kl_div`.

    >>> jsd(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]]))
    tensor(0.6931)
    """
    _checks.beta(beta)
    kind = "forward" if beta == 0 else "reverse" if beta == 1 else "jsd"
    return _divergence(
        student, teacher, kind, float(beta), temperature, softcap, t_squared, mask, row_weight,
        reduction,
    )  # fmt: skip


@over_rows(_masked)
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
    """Cross-entropy of softmax(z) against class probabilities (..., V), as F.cross_entropy has it.

    Per row, with ε = label_smoothing and class weights v (1 without `weight`):

        row_weight · Σ_i v_i ((1-ε) probs_i + ε/V) (-log q_i)

    A class of probability 0 adds 0, also where its logit is -inf. "mean" divides by the number of
    rows that count, whatever the class weights. probs are a constant; weight is (V,), the other
    options are those of `kl_div`.

    >>> soft_cross_entropy(torch.zeros(1, 4), torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
    tensor(1.3863)
    """
    _checks.logits(logits)
    _checks.dense_teacher("probs", probs, "logits", logits)
    _checks.class_weight(weight, logits)
    _checks.label_smoothing(label_smoothing)
    _checks.one_of("reduction", reduction, _checks.REDUCTIONS)
    return _reduced(
        logits, probs, "soft", weight, float(label_smoothing), temperature, softcap, False, mask,
        row_weight, reduction,
    )  # fmt: skip


def _divergence(
    student, teacher, kind, beta, temperature, softcap, t_squared, mask, row_weight, reduction
) -> Tensor:
    _checks.logits(student, "student")
    _checks.dense_teacher("teacher", teacher, "student", student)
    _checks.one_of("reduction", reduction, _checks.REDUCTIONS)
    return _reduced(
        student, teacher, kind, None, beta, temperature, softcap, t_squared, mask, row_weight,
        reduction,
    )  # fmt: skip


def _reduced(
    x, teacher, kind, weight, blend, temperature, softcap, t_squared, mask, row_weight, reduction
) -> Tensor:
    """The losses of the rows, scaled, weighted, and reduced over those that count."""
    _checks.row_weight(row_weight, x)
    _checks.row_mask(mask, x)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask != 0
    how = Setting.of(x, weight, temperature, softcap, mask, blend, kind)
    loss = _rows(x, teacher, how)
    if t_squared:
        t = how.temperature if how.row_temperature is None else how.row_temperature.to(loss.dtype)
        loss = loss * t**2
    uneven = t_squared or row_weight is not None
    return reduced(loss, row_weight, mask if uneven else None, mask, reduction)


class Setting(NamedTuple):
    """How two rows are read: what forward and backward share, as operators take it."""

    weight: Tensor | None  # (V,), of "soft"
    row_temperature: Tensor | None  # (...)
    mask: Tensor | None  # (...), bool: rows that count
    temperature: float
    softcap: float | None
    blend: float  # β of "jsd", the label smoothing of "soft"
    kind: str  # "forward", "reverse", "jsd" or "soft"

    @classmethod
    def of(cls, x, weight, temperature, softcap, mask, blend, kind) -> "Setting":
        _checks.temperature(temperature, x)
        _checks.softcap(softcap)
        softcap = None if softcap is None else float(softcap)
        rows = None
        if isinstance(temperature, Tensor):
            rows, temperature = temperature.expand(x.shape[:-1]), 1.0
        return cls(weight, rows, mask, float(temperature), softcap, blend, kind)


def _rows(x: Tensor, teacher: Tensor, how: Setting) -> Tensor:
    """The loss of each row, (...)."""
    return _both(x, teacher, *how)[0]


def _pair_fwd(x, *args):
    return backend(x).pair_fwd(x, *args)


def _pair_bwd(x, *args, **how):
    return backend(x).pair_bwd(x, *args, **how)


def _save(ctx, inputs, output):
    x, teacher, weight, row_temperature, mask, *ctx.how = inputs
    _, stats = output
    ctx.save_for_backward(x, teacher, weight, row_temperature, mask, stats)
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _backward(ctx, saved, d_loss, _):
    *inputs, stats = saved
    d_x = None
    if d_loss is not None:
        if is_watched():
            d_x = torch.ops.logitless.pair_bwd(*inputs, *ctx.how, stats, d_loss)
        else:
            d_x = _pair_bwd(*inputs, *ctx.how, stats, d_loss, inplace=is_lent(inputs[0]))
    return d_x, *(None,) * 8


# The same as operators, so that torch.compile and opcheck see through them.

_PAIR = (
    "Tensor x, Tensor teacher, Tensor? weight, Tensor? row_temperature, Tensor? mask,"
    " float temperature, float? softcap, float blend, str kind"
)
_library = torch.library.Library("logitless", "FRAGMENT")
_library.define(f"pair_fwd({_PAIR}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    f"pair_bwd({_PAIR}, Tensor stats, Tensor g) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def _pair_fwd_fake(x, *args):
    loss = x.new_empty(
        x.shape[:-1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32
    )
    return loss, loss.new_empty((*loss.shape, 5))


def _pair_bwd_fake(x, *args):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("pair_fwd", _pair_fwd, "CompositeExplicitAutograd")
_library.impl("pair_bwd", _pair_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("logitless::pair_fwd", _pair_fwd_fake, lib=_library)
torch.library.register_fake("logitless::pair_bwd", _pair_bwd_fake, lib=_library)
_both = node("pair_fwd", _library, _pair_fwd, _save, _backward)
refuse_twice("pair_bwd", _library)
