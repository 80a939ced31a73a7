"""DistillTrainer's loss with a teacher model and support="whole"."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import option_checks as _option_checks
from ..losses.cross_entropy import cross_entropy
from ..losses.dense_teacher import jsd, kl_div, tvd
from ..store.training import DistillLosses


def divergences(divergence: Any) -> dict[str, float]:
    """{name: weight} of the divergences of support="whole", a name or a mapping."""
    if not isinstance(divergence, Mapping):
        _option_checks.check(divergence=divergence)
        return {divergence: 1.0}
    if not divergence:
        raise ValueError("divergence must name at least one divergence, got an empty mapping.")
    for name, weight in divergence.items():
        _option_checks.check(divergence=name)
        _option_checks.factor(f"divergence[{name!r}]", weight)
    return dict(divergence)


def whole_loss(
    logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor,
    *,
    divergence: str | Mapping[str, float],
    ce_weight: float = 0.5,
    kd_weight: float = 0.5,
    num_items: Tensor | int | None = None,
    parts: bool = False,
    beta: float = 0.5,
    temperature: float = 1.0,
    t_squared: bool = False,
) -> DistillLosses:
    """The loss of `distill_loss` from teacher logits of shape (B, T, V).

    `divergence` is a name, or a mapping from names to weights. The logits of student and teacher
    are read once per divergence.
    """
    next_tokens = F.pad(labels[..., 1:], (0, 1), value=-100)
    reduction = "mean" if num_items is None else "sum"
    options = {
        "temperature": temperature, "t_squared": t_squared, "reduction": reduction,
        "mask": next_tokens != -100,
    }  # fmt: skip
    weighted = [
        weight * _whole_divergence(name, logits, teacher_logits, beta, options)
        for name, weight in divergences(divergence).items()
    ]
    kd = torch.stack(weighted).sum()
    ce, loss = None, kd_weight * kd
    if ce_weight or parts:
        with torch.set_grad_enabled(torch.is_grad_enabled() and ce_weight != 0):
            ce = cross_entropy(logits, next_tokens, reduction=reduction)
        loss = loss + ce_weight * ce
    items = 1 if num_items is None else num_items
    if not parts or ce is None:
        return DistillLosses(loss / items)
    return DistillLosses(loss / items, ce.detach() / items, kd.detach() / items)


def _whole_divergence(name: str, logits: Tensor, teacher: Tensor, beta: float, options: dict):
    if name == "jsd":
        return jsd(logits, teacher, beta=beta, **options)
    if name == "tvd":
        return tvd(logits, teacher, **options)
    return kl_div(logits, teacher, direction=name.removesuffix("_kl"), **options)
