"""Operations that lazy logits absorb: what models do between their head and their loss.

Each takes the lazy logits and the operation's own arguments, and gives its result, lazy again or
the loss itself; or NotImplemented, whereupon the numbers are made and PyTorch goes on with them.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import losses
from ._lazy_gradient import pulled_back
from .lazy import Head, LazyLogits, Recipe, Step
from .stats import row_stats

T = Tensor


def absorbed(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of func, if it can be absorbed; else NotImplemented."""
    absorb = OPERATIONS.get(func)
    if absorb is not None and args and isinstance(args[0], LazyLogits):
        args[0].check()
        return absorb(*args, **kwargs) if _fits(absorb, args, kwargs) else NotImplemented
    if func in PRODUCTS and len(args) == 2 and isinstance(args[1], LazyLogits):  # 30 * logits
        return _times(args[1], args[0], **kwargs)
    if func in STORAGE and args and isinstance(args[0], LazyLogits):  # what no wrapper can answer
        return func(args[0].dense(), *args[1:], **kwargs)
    return NotImplemented


_signature = functools.cache(inspect.signature)


def _fits(absorb: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether `absorb` knows these arguments; PyTorch may take others, such as `out`."""
    try:
        _signature(absorb).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _value(z: LazyLogits, op: Callable[[Tensor], Tensor], **changed) -> LazyLogits:
    """Of the same parts, whose gradients are what they are."""
    return Step.apply(z, z.recipe._replace(**changed), None, op)  # pyright: ignore


def _rows(z: LazyLogits, op: Callable[[Tensor], Tensor]) -> LazyLogits:
    """`op` moves rows, and leaves the last dimension alone."""
    recipe = z.recipe
    hidden, width = op(recipe.hidden), recipe.hidden.shape[-1]
    like = recipe.hidden

    def back(parts):
        d_hidden, *rest = parts
        if d_hidden is not None:
            d_hidden = pulled_back(op, like, d_hidden.reshape(*hidden.shape[:-1], width))
        return d_hidden, *rest

    return Step.apply(z, _moved(recipe, hidden), back, op)  # pyright: ignore


def _moved(recipe: Recipe, hidden: Tensor) -> Recipe:
    """Other rows: a copy has a version of its own."""
    return recipe._replace(hidden=hidden, versions=(hidden._version, *recipe.versions[1:]))


def _columns(z: LazyLogits, columns: slice) -> LazyLogits:
    recipe = z.recipe
    weight, bias = recipe.weight, recipe.bias

    def cut(t: Tensor) -> Tensor:
        return t[columns]

    def back(parts):
        d_hidden, d_weight, d_bias = parts
        if d_weight is not None:
            d_weight = pulled_back(cut, weight, d_weight)
        if d_bias is not None:
            d_bias = pulled_back(cut, bias, d_bias)  # pyright: ignore
        return d_hidden, d_weight, d_bias

    new = recipe._replace(weight=cut(weight), bias=None if bias is None else cut(bias))
    return Step.apply(z, new, back, lambda t: t[..., columns])  # pyright: ignore


def _same(z: LazyLogits, **kwargs):
    return NotImplemented if kwargs else z


def _to(z: LazyLogits, *args, **kwargs):
    """Another floating-point type of no fewer bits; fp64 would want other sums."""
    given = [a.dtype if isinstance(a, Tensor) else a for a in (*args, *kwargs.values())]
    device = [a for a in given if isinstance(a, (str, torch.device))]
    dtypes = [a for a in given if isinstance(a, torch.dtype)]
    if kwargs.keys() - {"dtype", "device"} or any(torch.device(d) != z.device for d in device):
        return NotImplemented
    if len(dtypes) + len(device) < len(given):
        return NotImplemented
    dtype = dtypes[0] if dtypes else z.dtype
    if dtype == z.dtype:
        return z
    if dtype != torch.float32 or z.dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented
    return _value(z, lambda t: t.to(dtype), dtype=dtype)


def _cpu(z: LazyLogits):
    """The numbers, which is what a caller wants of constants; else with their history."""
    if not z.requires_grad:
        return z.dense().cpu()
    return z if z.is_cpu else z.materialize().cpu()


def _number(by: Any) -> float | None:
    """A number, or a constant of the host that is one; reading it from a device would wait."""
    if isinstance(by, Tensor) and by.dim() == 0 and by.is_cpu and not by.requires_grad:
        by = by.item()
    return float(by) if isinstance(by, (int, float)) and not isinstance(by, bool) else None


def _times(z: LazyLogits, by: Any, **kwargs):
    by = _number(by)
    if kwargs or by is None:
        return NotImplemented
    recipe = z.recipe
    field = "sign" if recipe.log else "post" if recipe.capped else "pre"
    scale = getattr(recipe, field) * by
    if field != "sign" and not 0 < scale < math.inf:  # neither a temperature nor a softcap
        return NotImplemented
    return _value(z, lambda t: t * by, **{field: scale})


def _divided(z: LazyLogits, by: Any, **kwargs):
    by = _number(by)
    return NotImplemented if by is None or by == 0 else _times(z, 1 / by, **kwargs)


def _negated(z: LazyLogits):
    return _times(z, -1.0)


def _tanh(z: LazyLogits):
    if z.recipe.capped or z.recipe.log:
        return NotImplemented
    return _value(z, torch.tanh, capped=True)


def _dim(z: LazyLogits, dim: int, new: int = 0) -> int:
    """A dimension, or with `new` a place for one, counted from the front."""
    size = z.dim() + new
    if not -size <= dim < size:
        raise IndexError(f"dim must be in [{-size}, {size - 1}], got {dim}.")
    return dim % size


def _view(z: LazyLogits, *shape, **kwargs):
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    shape = kwargs.get("shape", shape)
    if isinstance(shape, torch.dtype) or not shape or kwargs.keys() - {"shape"}:
        return NotImplemented
    *lead, last = shape
    rows = z.shape[:-1].numel()
    known = torch.Size([size for size in lead if size != -1]).numel()
    if last == -1:  # the rest, which must be the vocabulary
        last = z.shape[-1] if -1 not in lead and known == rows else None
    if last != z.shape[-1] or lead.count(-1) > 1 or z.numel() == 0:
        return NotImplemented
    lead = [rows // max(known, 1) if size == -1 else size for size in lead]
    return _rows(z, lambda t: t.reshape(*lead, t.shape[-1]))


def _flatten(z: LazyLogits, start_dim: int = 0, end_dim: int = -1):
    start, end = _dim(z, start_dim), _dim(z, end_dim)
    if end == z.dim() - 1 and start != end:
        return NotImplemented
    return _rows(z, lambda t: t.flatten(start, end))


def _squeeze(z: LazyLogits, dim: int | tuple[int, ...] | None = None):
    dims = range(z.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = tuple(_dim(z, d) for d in dims if z.shape[d] == 1)
    return NotImplemented if z.dim() - 1 in dims else _rows(z, lambda t: t.squeeze(dims))


def _unsqueeze(z: LazyLogits, dim: int):
    dim = _dim(z, dim, new=1)
    return NotImplemented if dim == z.dim() else _rows(z, lambda t: t.unsqueeze(dim))


def _permute(z: LazyLogits, *dims):
    dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    if _dim(z, dims[-1]) != z.dim() - 1:
        return NotImplemented
    return _rows(z, lambda t: t.permute(dims))


def _transpose(z: LazyLogits, dim0: int, dim1: int):
    dim0, dim1 = _dim(z, dim0), _dim(z, dim1)
    if z.dim() - 1 in (dim0, dim1):
        return NotImplemented
    return _rows(z, lambda t: t.transpose(dim0, dim1))


def _getitem(z: LazyLogits, index: Any):
    """Rows by anything; columns by a slice, if all rows are kept."""
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [torch.as_tensor(part) if isinstance(part, list) else part for part in parts]
    if any(isinstance(part, LazyLogits) for part in parts):
        return NotImplemented
    free = z.dim() - sum(_taken(part) for part in parts)
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[at : at + 1] = [slice(None)] * free
    *rows, last = parts
    if not isinstance(last, slice) or (free < 0):  # a column, or a mask over all dimensions
        return NotImplemented
    if last == slice(None):
        return _rows(z, lambda t: t[(*rows, last)])
    whole = all(isinstance(part, slice) and part == slice(None) for part in rows)
    if z.recipe.log or not whole or last.step not in (None, 1):
        return NotImplemented
    return _columns(z, last)


def _taken(part: Any) -> int:
    """How many dimensions a part of an index takes."""
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _narrow(z: LazyLogits, dim: int, start: int, length: int):
    dim = _dim(z, dim)
    if dim == z.dim() - 1 or isinstance(start, Tensor):
        return NotImplemented
    return _rows(z, lambda t: t.narrow(dim, start, length))


def _index_select(z: LazyLogits, dim: int, index: Tensor):
    dim = _dim(z, dim)
    return NotImplemented if dim == z.dim() - 1 else _rows(z, lambda t: t.index_select(dim, index))


def _split(z: LazyLogits, size: int | list[int], dim: int = 0):
    return _pieces(z, dim, torch.arange(z.shape[dim]).split(size))


def _chunk(z: LazyLogits, chunks: int, dim: int = 0):
    return _pieces(z, dim, torch.arange(z.shape[dim]).chunk(chunks))


def _pieces(z: LazyLogits, dim: int, pieces: tuple[Tensor, ...]):
    if _dim(z, dim) == z.dim() - 1:
        return NotImplemented
    sizes = [len(piece) for piece in pieces]
    return tuple(_narrow(z, dim, sum(sizes[:i]), size) for i, size in enumerate(sizes))


def _unbind(z: LazyLogits, dim: int = 0):
    dim = _dim(z, dim)
    if dim == z.dim() - 1:
        return NotImplemented
    return tuple(_rows(z, lambda t, i=i: t.select(dim, i)) for i in range(z.shape[dim]))


# --- losses and statistics: the result in the dtype that PyTorch would give it


def _dtype(z: LazyLogits) -> torch.dtype:
    """Of a sum over the logits: under autocast PyTorch takes them in fp32."""
    half = z.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and torch.is_autocast_enabled(z.device.type) else z.dtype


def _cross_entropy(
    z: LazyLogits, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean", label_smoothing=0.0,
):  # fmt: skip
    old = size_average is not None or reduce is not None
    classes = isinstance(target, Tensor) and not target.is_floating_point()
    if z.dim() > 2 or z.recipe.log or old or not classes or target.dim() != z.dim() - 1:
        return NotImplemented
    found = losses.cross_entropy(
        Head(z), target, weight=weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing, **z.recipe.reads,
    )  # fmt: skip
    if reduction == "mean":  # PyTorch's mean of no rows is NaN, and users look for it
        none = (target == ignore_index).all()
        found = torch.where(none, torch.nan, found)
    return found.to(_dtype(z))


def _nll_loss(
    z: LazyLogits, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean",
):  # fmt: skip
    if not z.recipe.log or z.recipe.sign != 1:
        return NotImplemented
    logits = _value(z, lambda t: t, log=False)  # log_softmax of log p is log p
    return _cross_entropy(logits, target, weight, size_average, ignore_index, reduce, reduction)


def _is_last(z: LazyLogits, dim: Any) -> bool:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return isinstance(dim, int) and dim in (-1, z.dim() - 1)


def _kept(t: Tensor, z: LazyLogits, keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    return (t.unsqueeze(-1) if keepdim else t).to(dtype or _dtype(z))


def _logsumexp(z: LazyLogits, dim, keepdim=False):
    if not _is_last(z, dim) or z.recipe.log:
        return NotImplemented
    return _kept(losses.logsumexp(Head(z), **z.recipe.reads), z, keepdim)


def _log_softmax(z: LazyLogits, dim=None, _stacklevel=3, dtype=None):
    if not _is_last(z, dim) or z.recipe.log or dtype not in (None, z.dtype, torch.float32):
        return NotImplemented
    dtype = dtype or _dtype(z)
    return _value(z, lambda t: t.log_softmax(-1, dtype=dtype), log=True, dtype=dtype)


def _gather(z: LazyLogits, dim, index, **kwargs):
    if kwargs or not _is_last(z, dim) or index.shape[:-1] != z.shape[:-1]:
        return NotImplemented
    recipe = z.recipe
    if recipe.log:
        found = recipe.sign * losses.token_logprobs(Head(z), index, **recipe.reads)
    else:
        found = row_stats(Head(z), index, **recipe.reads).picked
    return found.to(z.dtype)  # pyright: ignore


def _sum(z: LazyLogits, dim=None, keepdim=False, dtype=None):
    if not _is_last(z, dim) or dtype not in (None, z.dtype, torch.float32):
        return NotImplemented
    recipe = z.recipe
    stats = row_stats(Head(z), total=True, **recipe.reads)
    found = stats.total - z.shape[-1] * stats.lse if recipe.log else stats.total
    return _kept(recipe.sign * found, z, keepdim, dtype)  # pyright: ignore


def _argmax(z: LazyLogits, dim=None, keepdim=False):
    if not _is_last(z, dim) or z.recipe.sign < 0:
        return NotImplemented
    with torch.no_grad():
        found = row_stats(Head(z), argmax=True, **z.recipe.reads).argmax
    return found.unsqueeze(-1) if keepdim else found  # pyright: ignore


STORAGE = {
    T.numpy, T.__array__, T.tolist, T.item, T.data_ptr, T.untyped_storage, T.storage,
    T.__reduce_ex__, T.__deepcopy__,
}  # fmt: skip
PRODUCTS = {T.mul, T.__mul__, T.__rmul__, torch.mul}
OPERATIONS: dict[Any, Callable] = {
    T.float: lambda z: _to(z, torch.float32),
    T.to: _to,
    T.type_as: lambda z, other: _to(z, other.dtype),
    T.cpu: _cpu,
    T.contiguous: _same,
    **dict.fromkeys((T.view, T.reshape, torch.reshape), _view),
    **dict.fromkeys((T.flatten, torch.flatten), _flatten),
    **dict.fromkeys((T.squeeze, torch.squeeze), _squeeze),
    **dict.fromkeys((T.unsqueeze, torch.unsqueeze), _unsqueeze),
    **dict.fromkeys((T.transpose, torch.transpose), _transpose),
    **dict.fromkeys((T.permute, torch.permute), _permute),
    **dict.fromkeys((T.index_select, torch.index_select), _index_select),
    **dict.fromkeys((T.split, torch.split), _split),
    **dict.fromkeys((T.chunk, torch.chunk), _chunk),
    T.__getitem__: _getitem,
    **dict.fromkeys((T.narrow, torch.narrow), _narrow),
    **dict.fromkeys((T.unbind, torch.unbind), _unbind),
    **dict.fromkeys(PRODUCTS, _times),
    **dict.fromkeys((T.div, T.__truediv__, T.true_divide, torch.div, torch.true_divide), _divided),
    **dict.fromkeys((T.neg, T.__neg__, torch.neg), _negated),
    **dict.fromkeys((T.tanh, torch.tanh, F.tanh), _tanh),
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    **dict.fromkeys((T.logsumexp, torch.logsumexp), _logsumexp),
    **dict.fromkeys((F.log_softmax, T.log_softmax, torch.log_softmax), _log_softmax),
    **dict.fromkeys((T.gather, torch.gather), _gather),
    **dict.fromkeys((T.sum, torch.sum), _sum),
    **dict.fromkeys((T.argmax, torch.argmax), _argmax),
}
