"""Operations that lazy logits absorb: what models do between their head and their loss.

Each takes the lazy logits and the operation's own arguments, and gives its result, lazy again or
the loss itself; or NotImplemented: then the numbers are made, and PyTorch computes with them.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.options import LEAST, MOST
from ..losses import cross_entropy as losses
from ..losses.statistics import row_stats
from . import views as moves
from .logits import Head, LazyLogits, Step

T = Tensor


def absorbed(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of func, if it can be absorbed; else NotImplemented."""
    absorb = OPERATIONS.get(func)
    if absorb is not None and args and isinstance(args[0], LazyLogits):
        args[0].check()
        known = args[0].recipe.axis is None or absorb in ANY_AXIS
        return absorb(*args, **kwargs) if known and _fits(absorb, args, kwargs) else NotImplemented
    if func in PRODUCTS and len(args) == 2 and isinstance(args[1], LazyLogits):  # 30 * logits
        return _times(args[1], args[0], **kwargs)
    if func in STORAGE and args and isinstance(args[0], LazyLogits):  # which a wrapper lacks
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
    recipe = z.recipe._replace(**changed)
    if not all(LEAST <= number <= MOST for number in recipe.reads.values()):
        return NotImplemented  # neither a temperature nor a softcap that our losses take
    return Step.apply(z, recipe, None, op, False)  # pyright: ignore


def _same(z: LazyLogits, **kwargs):
    return NotImplemented if kwargs else z


def _to(z: LazyLogits, *args, **kwargs):
    """Another floating-point type of no fewer bits; fp64 would want other sums."""
    given = []
    for a in (*args, *kwargs.values()):
        given += [a.device, a.dtype] if isinstance(a, Tensor) else [a]
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
    field = "factor" if recipe.log else "post" if recipe.capped else "pre"
    if field != "factor" and by <= 0:
        return NotImplemented
    return _value(z, lambda t: t * by, **{field: getattr(recipe, field) * by})


def _divided(z: LazyLogits, by: Any, **kwargs):
    by = _number(by)
    return NotImplemented if by is None or by == 0 else _times(z, 1 / by, **kwargs)


def _tanh(z: LazyLogits):
    if z.recipe.capped or z.recipe.log:
        return NotImplemented
    return _value(z, torch.tanh, capped=True)


# --- losses and statistics: the result in the dtype that PyTorch would give it


def _dtype(z: LazyLogits, kinds: tuple[str, ...] = ("cuda",)) -> torch.dtype:
    """Of a sum over the logits: under autocast, on these devices, PyTorch takes them in fp32."""
    kind, half = z.device.type, z.dtype in (torch.float16, torch.bfloat16)
    cast = half and kind in kinds and torch.is_autocast_enabled(kind)
    return torch.float32 if cast else z.dtype


def _cross_entropy(
    z: LazyLogits, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean", label_smoothing=0.0,
):  # fmt: skip
    old = size_average is not None or reduce is not None
    classes = isinstance(target, Tensor) and not target.is_floating_point()
    second = moves.axis_of(z) == min(z.dim() - 1, 1)  # where PyTorch looks for the classes
    if not second or z.recipe.log or old or not classes or target.dim() != z.dim() - 1:
        return NotImplemented
    found = losses.cross_entropy(
        Head(z), target, weight=weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing, **z.recipe.reads,
    )  # fmt: skip
    if reduction == "mean":  # PyTorch's mean of no rows, or of no weight, is NaN
        mass = target != ignore_index
        if weight is not None:
            mass = torch.where(mass, weight[target.clamp(0, len(weight) - 1)], 0.0)
        found = torch.where(mass.sum() == 0, torch.nan, found)
    return found.to(_dtype(z, ("cuda", "cpu")))


def _nll_loss(
    z: LazyLogits, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean",
):  # fmt: skip
    if not z.recipe.log or z.recipe.factor != 1:
        return NotImplemented
    logits = _value(z, lambda t: t, log=False)  # log_softmax of log p is log p
    return _cross_entropy(logits, target, weight, size_average, ignore_index, reduce, reduction)


def _is_vocabulary(z: LazyLogits, dim: Any) -> bool:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return isinstance(dim, int) and dim in (moves.axis_of(z), moves.axis_of(z) - z.dim())


def _kept(t: Tensor, z: LazyLogits, keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    return (t.unsqueeze(-1) if keepdim else t).to(dtype or _dtype(z))


def _logsumexp(z: LazyLogits, dim, keepdim=False):
    if not _is_vocabulary(z, dim) or z.recipe.log:
        return NotImplemented
    return _kept(losses.logsumexp(Head(z), **z.recipe.reads), z, keepdim)


def _log_softmax(z: LazyLogits, dim, dtype=None):
    if not _is_vocabulary(z, dim) or z.recipe.log or dtype not in (None, z.dtype, torch.float32):
        return NotImplemented
    dtype = dtype or _dtype(z)
    return _value(z, lambda t: t.log_softmax(dim, dtype=dtype), log=True, dtype=dtype)


def _log_softmax_of_nn(z: LazyLogits, dim=None, _stacklevel=3, dtype=None):
    return _log_softmax(z, dim, dtype)


def _gather(z: LazyLogits, dim, index, **kwargs):
    if kwargs or not _is_vocabulary(z, dim) or index.shape[:-1] != z.shape[:-1]:
        return NotImplemented
    recipe = z.recipe
    if recipe.log:
        found = recipe.factor * losses.token_logprobs(Head(z), index, **recipe.reads)
    else:
        found = row_stats(Head(z), index, **recipe.reads).picked
    return found.to(z.dtype)  # pyright: ignore


def _sum(z: LazyLogits, dim=None, keepdim=False, dtype=None):
    if not _is_vocabulary(z, dim) or dtype not in (None, z.dtype, torch.float32):
        return NotImplemented
    recipe = z.recipe
    stats = row_stats(Head(z), total=True, **recipe.reads)
    found = stats.total - z.shape[-1] * stats.lse if recipe.log else stats.total
    return _kept(recipe.factor * found, z, keepdim, dtype)  # pyright: ignore


def _argmax(z: LazyLogits, dim=None, keepdim=False):
    if not _is_vocabulary(z, dim) or z.recipe.factor <= 0:
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
    T.type_as: lambda z, other: _to(z, other),
    T.contiguous: _same,
    **dict.fromkeys((T.view, T.reshape, torch.reshape), moves.view),
    **dict.fromkeys((T.flatten, torch.flatten), moves.flatten),
    **dict.fromkeys((T.squeeze, torch.squeeze), moves.squeeze),
    **dict.fromkeys((T.unsqueeze, torch.unsqueeze), moves.unsqueeze),
    **dict.fromkeys((T.transpose, torch.transpose), moves.transpose),
    **dict.fromkeys((T.swapaxes, torch.swapaxes, T.swapdims, torch.swapdims), moves.transpose),
    T.mT.__get__: lambda z: moves.transpose(z, -2, -1),  # pyright: ignore
    **dict.fromkeys((T.permute, torch.permute), moves.permute),
    **dict.fromkeys((T.movedim, torch.movedim, T.moveaxis, torch.moveaxis), moves.movedim),
    **dict.fromkeys((T.index_select, torch.index_select), moves.index_select),
    **dict.fromkeys((T.split, torch.split), moves.split),
    **dict.fromkeys((T.chunk, torch.chunk), moves.chunk),
    T.__getitem__: moves.getitem,
    **dict.fromkeys((T.narrow, torch.narrow), moves.narrow),
    **dict.fromkeys((T.unbind, torch.unbind), moves.unbind),
    **dict.fromkeys(PRODUCTS, _times),
    **dict.fromkeys((T.div, T.__truediv__, T.true_divide, torch.div, torch.true_divide), _divided),
    **dict.fromkeys((T.neg, T.__neg__, torch.neg), lambda z: _times(z, -1.0)),
    **dict.fromkeys((T.tanh, torch.tanh, F.tanh), _tanh),
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    **dict.fromkeys((T.logsumexp, torch.logsumexp), _logsumexp),
    F.log_softmax: _log_softmax_of_nn,
    **dict.fromkeys((T.log_softmax, torch.log_softmax), _log_softmax),
    **dict.fromkeys((T.gather, torch.gather), _gather),
    **dict.fromkeys((T.sum, torch.sum), _sum),
    **dict.fromkeys((T.argmax, torch.argmax), _argmax),
}
ANY_AXIS = {  # those that know the vocabulary at another place than the last
    *(OPERATIONS[f] for f in (T.float, T.to, T.type_as, T.contiguous, T.mul, T.div, T.neg, T.tanh)),
    *(OPERATIONS[f] for f in (T.transpose, T.permute, T.movedim, T.mT.__get__)),  # pyright: ignore
    *(OPERATIONS[f] for f in (F.cross_entropy, F.nll_loss, F.log_softmax, T.log_softmax)),
}
