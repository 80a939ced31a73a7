"""Checks of the arguments of contrastive losses."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core import call, option_checks, target_checks, tensor_checks
from ..core.invariant import is_invariant
from ..core.source import is_dtensor
from ..core.tensor_checks import _floating, _integer, _same_device, _shape, _shaped, _tensor
from ..parallel.ranks import Ranks

# PyTorch can be built without torch.distributed.
_GROUPS = (Ranks, *([dist.ProcessGroup] if dist.is_available() else []))


def contrastive(
    a, b, scale, symmetric, positives, mask, first_labels, second_labels, ignore_index, reduction,
    averaged, workspace,
) -> None:  # fmt: skip
    # the shape of the mask is checked by `pair_mask`
    embeddings(a, b)
    number("scale", scale, a)
    tensor_checks.yes_or_no("symmetric", symmetric)
    option_checks.ignore_index("ignore_index", ignore_index)
    if symmetric and positives is not None:
        raise ValueError(
            "positives must be None with symmetric=True, because both directions use the pairs"
            " (i, i), got a tensor; pass symmetric=False."
        )
    if symmetric and len(a) != len(b):
        raise ValueError(
            f"b must have as many rows as a ({len(a)}) with symmetric=True, got {_shape(b)}; pass"
            " symmetric=False for different numbers of rows."
        )
    positive_columns(a, b, positives)
    if mask is not None:
        _tensor("mask", mask)
    if first_labels is not None or second_labels is not None:
        pair_labels(first_labels, a, "a")
        pair_labels(second_labels, b, "b")
    options(reduction, averaged, workspace)


def sigmoid(a, b, scale, bias, positives, reduction, averaged, workspace) -> None:
    embeddings(a, b)
    number("scale", scale, a)
    number("bias", bias, a)
    positive_columns(a, b, positives)
    options(reduction, averaged, workspace)


def embeddings(a: Any, b: Any) -> None:
    for name, t in (("a", a), ("b", b)):
        _tensor(name, t)
        if is_dtensor(t):
            raise TypeError(
                f"{name} must be a plain Tensor, got a DTensor; pass this rank's rows as a plain"
                " tensor, and the process group as `group`."
            )
        if t.dtype not in tensor_checks.LOGIT_DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {t.dtype}.")
        if t.dim() != 2 or t.shape[1] == 0:
            raise ValueError(
                f"{name} must have shape (rows, D) with at least one column, got {_shape(t)}."
            )
    _shaped("b", b, (len(b), a.shape[1]), a, "a", f"(M, {a.shape[1]})")
    if b.dtype != a.dtype:
        raise TypeError(f"b must be {a.dtype} like a, got {b.dtype}.")


def number(name: str, value: Any, a: Tensor) -> None:
    if isinstance(value, Tensor):
        _floating(name, value)
        if value.numel() != 1:
            raise ValueError(f"{name} must hold one number, got shape {_shape(value)}.")
        _same_device(name, value, a, "a")
        return
    option_checks.factor(name, value)


def module_scale(scale: Any, max_scale: Any) -> None:
    for name, value in (("scale", scale), ("max_scale", max_scale)):
        if name == "scale" or value is not None:
            option_checks.between(name, value)
    if max_scale is not None and scale > max_scale:
        raise ValueError(
            f"scale must be at most max_scale, got {scale:g} and max_scale={max_scale:g}; for a"
            " scale without a bound, pass max_scale=None."
        )


def group(value: Any) -> None:
    # A DeviceMesh has a method `get_group`.
    if not (value is None or isinstance(value, _GROUPS) or hasattr(value, "get_group")):
        raise TypeError(f"group must be a process group, a DeviceMesh or None, got {value!r}.")


def positive_columns(a: Tensor, b: Tensor, positives: Any) -> None:
    if positives is None:
        if len(b) < len(a):
            raise ValueError(
                f"b must have at least {len(a)} rows, one positive for each row of a, got"
                f" {_shape(b)}. If row i of b is not the positive of row i of a, pass positives."
            )
        return
    _integer("positives", positives)
    _shaped("positives", positives, a.shape[:1], a, "a")
    if len(b) == 0 and len(a):
        raise ValueError(f"b must have at least one row, got {_shape(b)}.")


def pair_mask(mask: Tensor, a: Tensor, total: int) -> None:
    # `total` is the number of rows of `b` on all ranks.
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be torch.bool, True for pairs that are left out, got {mask.dtype}."
        )
    if mask.shape != (len(a), total):
        raise ValueError(
            f"mask must have shape ({len(a)}, {total}), one entry for each row of a and each row of"
            f" b, got {_shape(mask)}."
        )
    _same_device("mask", mask, a, "a")


def split_labels(labels: Any) -> tuple[Any, Any]:
    """`labels` is None, one tensor for both, or a pair (labels of a, labels of b)."""
    if labels is None or isinstance(labels, Tensor):
        return labels, labels
    if isinstance(labels, (tuple, list)) and len(labels) == 2:
        return labels[0], labels[1]
    got = f"{len(labels)} items" if isinstance(labels, (tuple, list)) else type(labels).__name__
    raise TypeError(f"labels must be a Tensor, or a pair (labels of a, labels of b), got {got}.")


def pair_labels(t: Any, x: Tensor, of: str) -> None:
    name = f"labels of {of}"
    _integer(name, t)
    _shaped(name, t, x.shape[:1], x, of)


def options(reduction: Any, averaged: Any, workspace: Any) -> None:
    option_checks.check(reduction=reduction, averaged=averaged, workspace=workspace)


def positive_ids(
    positives: Tensor | None, b: Tensor, ignore_index: int | None = None
) -> Tensor | None:
    """The positives as int64. A GPU's are compared with len(b) only with LOGITLESS_CHECK=1."""
    if positives is None:
        return None
    positives = call.as_ids(positives, ignore_index).long()
    if call.reads_values(positives):
        counts = None if ignore_index is None else positives != ignore_index
        target_checks.in_range(positives, len(b), counts, "positives", ignore_index)
    return positives


def supported(name: str) -> None:
    if is_invariant():
        raise RuntimeError(
            f"{name} must not be called inside ll.invariant(), because the loss of a pair depends"
            " on all rows of the batch."
        )
    if call.in_func():
        tensor_checks.not_in_func(name)
