"""Checks of arguments, with error messages of the form `<argument> must <rule>, got <value>.`

All checks read only shapes and dtypes, except `in_bounds`. call.py explains when they run.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..eager.sampled import MOST_COLUMNS
from .source import is_dtensor, is_over_ranks, is_source

LOGIT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCTIONS = ("mean", "sum", "none")
MOST_DRAWS = 1 << 16  # the largest number of draws per row in `capture_sampled`


def one_of(name: str, value: Any, legal: Sequence[str]) -> None:
    if value not in legal:
        listed = ", ".join(repr(choice) for choice in legal)
        raise ValueError(f"{name} must be one of {listed}, got {value!r}.")


def logits(x: Any, name: str = "logits") -> None:
    some_logits(x, name)
    if x.shape[-1] == 0:
        raise ValueError(
            f"{name} must have at least one column in its last dimension, got {_shape(x)}."
        )


def some_logits(x: Any, name: str) -> None:
    # may have 0 columns, as a shard
    if not is_source(x):
        raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}.")
    if is_dtensor(x):
        placed(name, x, len(x.shape) - 1)
    if x.dtype not in LOGIT_DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}.")
    if len(x.shape) == 0:
        raise ValueError(f"{name} must have a vocabulary as its last dimension, got shape ().")


def placed(name: str, x: Any, dim: int) -> None:
    sharded = [p for p in x.placements if not p.is_replicate()]
    if sharded and (len(sharded) > 1 or not is_shard(sharded[0], dim)):
        raise TypeError(
            f"{name} must be replicated, or have a single placement Shard({dim}) (the vocabulary),"
            f" got a DTensor of placements {x.placements}; redistribute the DTensor."
        )


def is_shard(placement: Any, dim: int) -> bool:
    # a subclass of Shard has other columns
    return type(placement).__name__ == "Shard" and placement.dim == dim


def _shape(x: Any) -> str:
    return str(tuple(getattr(x, "shape", x)))


def _same_device(name: str, t: Any, x: Any, of: str = "logits") -> None:
    if t.device != x.device:
        raise ValueError(f"{name} must be on {x.device} like {of}, got {t.device}.")


def _shaped(
    name: str, t: Any, wanted: Sequence[int], x: Any, of: str = "logits", legal: str = "{wanted}"
) -> None:
    """Checks that t has the shape `wanted` and the device of x.

    The error calls the shape `legal`, with "{rows}" for one number per row of x, and "{K}" or "{k}"
    for several. It is formatted only for the error, because a compiler cannot print sizes.
    """
    if t.shape != wanted:
        several = {last: _by_row(x, last) for last in "Kk"}
        legal = legal.format(wanted=_shape(wanted), rows=_shape(x.shape[:-1]), **several)
        raise ValueError(
            f"{name} must have shape {legal} to match {of} {_shape(x)}, got {_shape(t)}."
        )
    _same_device(name, t, x, of)


def _by_row(x: Any, last: str) -> str:
    """The shape of a tensor with `last` numbers per row of x, such as (2, 3, K)."""
    return f"({', '.join([*map(str, x.shape[:-1]), last])})"


def _tensor(name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(t).__name__}.")


def _integer(name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor of integers, got {type(t).__name__}.")
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {t.dtype}.")


def _rows(name: str, t: Tensor, x: Tensor) -> None:
    _shaped(name, t, x.shape[:-1], x)


def in_bounds(temperature: Tensor, live: Tensor | None, least: float, most: float) -> None:
    bad = ~((temperature >= least) & (temperature <= most))
    bad = bad if live is None else bad & live
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        where = place[0] if len(place) == 1 else place
        raise ValueError(
            f"temperature must be in [{least:g}, {most:g}], got {float(temperature[place])} at row "
            f"{where}."
        )


def row_temperature(t: Tensor, x: Tensor) -> None:
    if t.requires_grad:
        raise ValueError(
            "temperature must not require grad, because losses compute no gradient for "
            "temperature; to train a scale, multiply the hidden states by the scale."
        )
    if not t.is_floating_point():
        raise TypeError(f"temperature must be a floating-point tensor, got {t.dtype}.")
    if t.dim() != 0:
        _rows("temperature", t, x)
    _same_device("temperature", t, x)


def is_class_weight(t: Any, name: str = "weight") -> None:
    if t is not None and not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor of class weights, got {type(t).__name__}.")


def class_weight(name: str, t: Any, x: Tensor) -> None:
    is_class_weight(t, name)
    if not t.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {t.dtype}.")
    constant(name, t)
    _shaped(name, t, x.shape[-1:], x)


def row_weight(name: str, t: Any, x: Tensor) -> None:
    _tensor(name, t)
    if t.is_complex():
        raise TypeError(f"{name} must be real, got {t.dtype}.")
    if t.dtype == torch.bool:  # a mean would also count rows whose weight is False
        raise TypeError(
            f"{name} must hold numbers that multiply the losses, got torch.bool. "
            "To select the rows that count, pass `mask`."
        )
    _rows(name, t, x)


def constant(name: str, t: Tensor) -> None:
    if t.requires_grad:
        raise ValueError(
            f"{name} must not require grad, because losses compute no gradient for {name}."
        )


def overwritable(x: Tensor, owner: Tensor) -> None:
    """Raises if retain_grad was called for x, or if two elements of x share memory."""
    if any(t.retains_grad and not t.is_leaf for t in (x, owner)):
        raise ValueError(
            "logits must not retain grad (retain_grad was called) if inplace=True, because the "
            "gradient overwrites the logits."
        )
    if x.numel() == 0:  # the strides of an empty tensor are arbitrary
        return
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                "logits must not have elements that share memory if inplace=True, "
                f"got shape {_shape(x)} with strides {tuple(x.stride())}."
            )
        reach += (size - 1) * stride


def triton_can_run(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise TypeError(
            "impl 'triton' must be used with float16, bfloat16 or float32, got float64."
        )
    kind = x.device.type
    interpreted = kind == "cpu" and os.environ.get("TRITON_INTERPRET", "0") == "1"
    if kind not in ("cuda", "xpu") and not interpreted:
        raise RuntimeError(
            "impl 'triton' must be used with a GPU tensor, or with a cpu tensor and "
            "TRITON_INTERPRET=1, "
            f"got a {kind} tensor."
        )


def only_in_reverse(*_: Any) -> None:
    raise RuntimeError(
        "logits must be differentiated in reverse mode, by torch.autograd.grad or torch.func.grad, "
        "because losses have no forward-mode derivative (jvp, jacfwd, forward_ad)."
    )


def only_once(*_: Any) -> None:
    raise RuntimeError(
        "logitless: a loss must not be differentiated twice, because its backward has no gradient."
    )


def not_mapped(*_: Any) -> None:
    raise RuntimeError(
        "logits must not be mapped over by torch.func.vmap (nor by jacrev or is_grads_batched, "
        'which use vmap); pass all rows in one call, with reduction="none" for one loss per row.'
    )


def not_in_func(name: str) -> None:
    raise RuntimeError(
        f"{name} must be differentiated by torch.autograd, because torch.func (grad, vjp, vmap) is"
        " not supported."
    )


def no_head_in_func() -> None:
    raise RuntimeError(
        "logits must be a Tensor under torch.func (grad, vjp, vmap), got LinearLogits; use "
        "torch.autograd.grad, or pass logits.materialize() to the loss."
    )


def dense_teacher(name: str, t: Any, x: Tensor, of: str) -> None:
    logits(t, name)
    if is_dtensor(t) and not is_dtensor(x):
        raise TypeError(f"{name} must be a plain Tensor like {of}, got a DTensor.")
    _shaped(name, t, x.shape, x, of)
    # A teacher's head computes logits without a gradient, so only a Tensor can require one.
    if isinstance(t, Tensor) and t.requires_grad:
        raise ValueError(
            f"{name} must not require grad, because losses compute no gradient for {name}; pass "
            f"{name}.detach()."
        )


def _mask(t: Any) -> None:
    # of rows, or of a teacher's ids
    _tensor("mask", t)
    if t.is_complex():
        raise TypeError(f"mask must be bool, or 0 and 1, got {t.dtype}.")


def row_mask(name: str, t: Any, x: Tensor) -> None:
    _mask(t)
    _rows(name, t, x)


def slot_mask(t: Any, x: Tensor, of: str = "student_logits") -> None:
    if t is not None:
        _mask(t)
        _shaped("mask", t, x.shape, x, of)


def yes_or_no(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def _floating(name: str, t: Any) -> None:
    _tensor(name, t)
    if not t.is_floating_point():
        raise TypeError(f"{name} must hold floating-point numbers, got {t.dtype}.")


def slots(name: str, t: Any, x: Tensor, of: str) -> None:
    _floating(name, t)
    _shaped(name, t, x.shape, x, of)


def constant_slots(name: str, t: Any, of: str, x: Tensor) -> None:
    if t is not None:
        slots(name, t, x, of)
        constant(name, t)


def of_ids(name: str, x: Any) -> None:
    """Raises if logits (..., K), gathered at K ids per row, are sharded over ranks."""
    if is_over_ranks(x):
        raise TypeError(
            f"{name} must not be sharded over ranks, got {type(x).__name__}; for a vocabulary that "
            "is sharded over ranks, use topk_distill."
        )


def is_targets(t: Any, kind: type) -> None:
    if not isinstance(t, kind):
        raise TypeError(f"targets must be SparseTargets, got {type(t).__name__}.")


def targets(name: str, ids: Tensor, x: Any) -> None:
    if ids.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{name} must have rows {_shape(x.shape[:-1])} to match logits {_shape(x)}, "
            f"got ids {_shape(ids)}."
        )
    _same_device(name, ids, x)


def whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}.")


def count(name: str, value: Any, most: int) -> None:
    whole(name, value)
    if not 1 <= value <= most:
        raise ValueError(f"{name} must be in [1, {most}], got {value}.")


def draws(name: str, n: Any, x: Tensor) -> None:
    count(name, n, MOST_DRAWS)
    if x.shape[-1] > MOST_COLUMNS:
        raise ValueError(
            f"logits must have at most {MOST_COLUMNS} columns for draws, got {tuple(x.shape)}."
        )


def generator(name: str, where: Any, x: Tensor) -> None:
    if not isinstance(where, torch.device):
        kind = type(where).__name__
        raise TypeError(f"{name} must be a torch.Generator or None, got {kind}.")
    there = x.device
    if where.type != there.type or (where.index or 0) != (there.index or 0):
        raise ValueError(f"{name} must be on the device of logits, {there}, got {where}.")


def beside_rows(x: Any, *rows: Any) -> None:
    """Checks the argument `rows`: tensors with one or several numbers per row of x."""
    lead = x.shape[:-1]
    for i, t in enumerate(rows):
        _tensor(f"rows[{i}]", t)
        several = t.shape[len(lead) : len(lead) + 1]
        _shaped(f"rows[{i}]", t, (*lead, *several), x, legal="{rows} or {k}")
