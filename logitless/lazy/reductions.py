"""Statistics of lazy logits: functions that reduce over the vocabulary. Losses are in losses.py.

Each result has the dtype that PyTorch would return. Some functions are computed from the row
statistics that our losses also use. For all other functions, PyTorch's own function runs on some
rows at a time (by_rows.py).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..losses.statistics import logsumexp, row_stats, token_logprobs
from .by_rows import by_rows, mean_by_rows
from .formula import Direct
from .logits import LazyLogits, UnscaledLogits
from .rows import axis_of
from .scores import expected


def dtype_of(z: LazyLogits, kinds: tuple[str, ...] = ("cuda",)) -> torch.dtype:
    """The dtype that PyTorch's own function would return for z.

    `kinds` lists the device types on which autocast runs PyTorch's own function in fp32.
    """
    kind, half = z.device.type, z.dtype in (torch.float16, torch.bfloat16)
    cast = half and kind in kinds and torch.is_autocast_enabled(kind)
    return torch.float32 if cast else z.dtype


def is_vocabulary(z: LazyLogits, dim: Any) -> bool:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return isinstance(dim, int) and dim in (axis_of(z), axis_of(z) - z.dim())


def log_sum_exp(z: LazyLogits, dim, keepdim=False):
    if not is_vocabulary(z, dim):
        return NotImplemented
    if z.recipe.logits is None:
        return _log_sum_exp(z, dim, keepdim)
    lse = logsumexp(UnscaledLogits(z), **z.recipe.logits.reads).to(dtype_of(z))
    return lse.unsqueeze(-1) if keepdim else lse


def gather(z: LazyLogits, dim, index, **kwargs):
    if kwargs or not is_vocabulary(z, dim) or index.shape[:-1] != z.shape[:-1]:
        return NotImplemented
    direct = z.recipe.direct
    if direct is None:
        picked = by_rows(z, lambda t, ids: t.gather(-1, ids), index)
        return picked if picked is NotImplemented else picked[0]
    if direct.log:
        picked = direct.factor * token_logprobs(
            UnscaledLogits(z), index, ignore_index=None, **direct.reads
        )
    else:
        picked = row_stats(UnscaledLogits(z), index, ignore_index=None, **direct.reads).picked
    return picked.to(z.dtype)


def take_along_dim(z: LazyLogits, indices, dim=None, **kwargs):
    fits = isinstance(indices, Tensor) and indices.dim() == z.dim()
    return gather(z, dim, indices, **kwargs) if fits else NotImplemented


def argmax(z: LazyLogits, dim=None, keepdim=False):
    if not is_vocabulary(z, dim):
        return NotImplemented
    direct = z.recipe.direct
    if direct is None or direct.factor <= 0:
        return _argmax(z, dim, keepdim)
    with torch.no_grad():
        ids = row_stats(UnscaledLogits(z), argmax=True, **direct.reads).argmax
    return ids.unsqueeze(-1) if keepdim else ids


def _total(z: LazyLogits, direct: Direct) -> Tensor:
    """The sum of each row over the vocabulary, in the precision of our row statistics."""
    stats = row_stats(UnscaledLogits(z), total=True, **direct.reads)
    total: Any = stats.total - z.shape[-1] * stats.lse if direct.log else stats.total
    return direct.factor * total


def _over(z: LazyLogits, dim: Any) -> tuple[int, ...] | None:
    """The dimensions in `dim`, without the dimension of the vocabulary.

    Returns None if `dim` is invalid or does not include the vocabulary.
    """
    dims = range(z.dim()) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    if not all(isinstance(d, int) and -z.dim() <= d < z.dim() for d in dims):
        return None
    dims = {d % z.dim() for d in dims}
    return tuple(sorted(dims - {z.dim() - 1})) if z.dim() - 1 in dims else None


def summed(mean: bool):
    """Returns a version of torch.sum or torch.mean for lazy logits."""

    def reduction(z: LazyLogits, dim=None, keepdim=False, dtype=None):
        rows, counts = _over(z, dim), not z.is_floating_point()  # of booleans or integers
        dtypes = (None, z.dtype, torch.float32) if z.dtype != torch.float64 else (None, z.dtype)
        refused = (mean or dtype) if counts else dtype not in dtypes
        if rows is None or not z.numel() or refused:
            return NotImplemented
        wide = torch.float64 if z.dtype == torch.float64 else torch.float32
        of_rows = functools.partial(torch.sum, dim=-1, dtype=torch.int64 if counts else wide)
        direct, count = z.recipe.direct, math.prod(z.shape[d] for d in (*rows, -1))
        total: Any = expected(z) if direct is None else _total(z, direct)
        if total is None and len(rows) == z.dim() - 1 and not (keepdim or counts):
            total = mean_by_rows(z, of_rows)
            total = total if total is NotImplemented else total * math.prod(z.shape[:-1])
        else:
            total = by_rows(z, of_rows) if total is None else total
            total = total[0] if isinstance(total, tuple) else total
            if total is not NotImplemented:
                total = total.unsqueeze(-1) if keepdim else total
                total = total.sum(rows, keepdim) if rows else total
        if total is NotImplemented or counts:
            return total
        # Autocast casts sums to fp32, but does not cast means.
        return (total / count).to(dtype or z.dtype) if mean else total.to(dtype or dtype_of(z))

    return reduction


sum, mean = summed(mean=False), summed(mean=True)


def reduced(function: Callable, outputs: type | None = None):
    """Returns a version of `function` that runs on some rows of lazy logits at a time.

    `outputs` is the type of PyTorch's result if the function returns several tensors.
    """

    def reduction(z: LazyLogits, dim=None, keepdim=False, **options):
        if not is_vocabulary(z, dim) or not isinstance(keepdim, bool) or "out" in options:
            return NotImplemented
        if keepdim:
            options["keepdim"] = True

        def of_rows(values: Tensor):
            result = function(values, dim=-1, **options)
            return tuple(result) if isinstance(result, tuple) else result

        results = by_rows(z, of_rows)
        if results is NotImplemented:
            return results
        return results[0] if outputs is None else outputs(results)

    return reduction


def topk(z: LazyLogits, k, dim=-1, largest=True, sorted=True):
    function = functools.partial(torch.topk, k=k, largest=largest, sorted=sorted)
    return reduced(function, torch.return_types.topk)(z, dim)


def overall(function: Callable, by_dim: Callable, of_rows: Callable | None = None):
    """Returns a version of torch.max, min, any or all for lazy logits, with or without `dim`.

    Without `dim`, it is the function of the results of all rows, by `of_rows`. With gradients this
    is not lazy: PyTorch divides the gradient equally among all equal extremes, of whatever row.
    """

    def reduction(z: LazyLogits, *args, **kwargs):
        if args or kwargs:
            of_two = args and isinstance(args[0], Tensor)  # the larger of two tensors
            return NotImplemented if of_two else by_dim(z, *args, **kwargs)
        rows = NotImplemented if z.sends or not z.numel() else (of_rows or by_dim)(z, -1)
        return rows if rows is NotImplemented else function(rows)

    return reduction


_log_sum_exp, _argmax = reduced(torch.logsumexp), reduced(torch.argmax)
