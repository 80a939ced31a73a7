"""PyTorch's functions that keep logits lazy: what models do between their head and their loss.

OPERATIONS maps each function of PyTorch to one here that takes the lazy logits and the same
arguments. It returns the result, lazy again or a loss, or NotImplemented: then the logits are
materialised, and PyTorch computes with them.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.options import LEAST, MOST
from ..losses.cross_entropy import cross_entropy
from ..losses.statistics import logsumexp, row_stats, token_logprobs
from . import views
from .logits import LazyLogits, LazyOp, UnscaledLogits

T = Tensor


def kept_lazy(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of func without materialised logits, or NotImplemented."""
    operation = OPERATIONS.get(func)
    if operation is not None and args and isinstance(args[0], LazyLogits):
        args[0].check()
        if args[0].recipe.axis is not None and operation not in ANY_AXIS:
            return NotImplemented
        return operation(*args, **kwargs) if _fits(operation, args, kwargs) else NotImplemented
    if func in PRODUCTS and len(args) == 2 and isinstance(args[1], LazyLogits):  # 30 * logits
        return _times(args[1], args[0], **kwargs)
    if func in STORAGE and args and isinstance(args[0], LazyLogits):  # a wrapper has no storage
        return func(args[0].dense(), *args[1:], **kwargs)
    return NotImplemented


_signature = functools.cache(inspect.signature)


def _fits(operation: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether `operation` takes these arguments; PyTorch may take others, such as `out`."""
    try:
        _signature(operation).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _value(z: LazyLogits, op: Callable[[Tensor], Tensor], **changed) -> LazyLogits:
    """Changes values only (scale, cap, dtype); hidden, weight and their gradients stay."""
    recipe = z.recipe._replace(**changed)
    if not all(LEAST <= number <= MOST for number in recipe.reads.values()):
        return NotImplemented  # outside the range of temperature and softcap of our losses
    return LazyOp.apply(z, recipe, None, op, False)  # pyright: ignore


def _same(z: LazyLogits, **kwargs):
    return NotImplemented if kwargs else z


def _to(z: LazyLogits, *args, **kwargs):
    """A cast to a wider floating-point dtype, except fp64, which needs other sums."""
    arguments = []
    for a in (*args, *kwargs.values()):
        arguments += [a.device, a.dtype] if isinstance(a, Tensor) else [a]
    device = [a for a in arguments if isinstance(a, (str, torch.device))]
    dtypes = [a for a in arguments if isinstance(a, torch.dtype)]
    if kwargs.keys() - {"dtype", "device"} or any(torch.device(d) != z.device for d in device):
        return NotImplemented
    if len(dtypes) + len(device) < len(arguments):
        return NotImplemented
    dtype = dtypes[0] if dtypes else z.dtype
    if dtype == z.dtype:
        return z
    if dtype != torch.float32 or z.dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented
    return _value(z, lambda t: t.to(dtype), dtype=dtype)


def _number(by: Any) -> float | None:
    """A number, also from a 0-d tensor on the CPU; reading it from a GPU would wait."""
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


# --- losses and statistics: the result has the dtype that PyTorch would return


def _dtype(z: LazyLogits, kinds: tuple[str, ...] = ("cuda",)) -> torch.dtype:
    """The dtype that PyTorch returns for a reduction; fp32 under autocast on these devices."""
    kind, half = z.device.type, z.dtype in (torch.float16, torch.bfloat16)
    cast = half and kind in kinds and torch.is_autocast_enabled(kind)
    return torch.float32 if cast else z.dtype


def _cross_entropy(
    z: LazyLogits, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean", label_smoothing=0.0,
):  # fmt: skip
    deprecated = size_average is not None or reduce is not None
    classes = isinstance(target, Tensor) and not target.is_floating_point()
    second = views.axis_of(z) == min(z.dim() - 1, 1)  # where PyTorch expects the classes
    if not second or z.recipe.log or deprecated or not classes or target.dim() != z.dim() - 1:
        return NotImplemented
    loss = cross_entropy(
        UnscaledLogits(z), target, weight=weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing, **z.recipe.reads,
    )  # fmt: skip
    if reduction == "mean":  # PyTorch's mean of no rows, or of no weight, is NaN
        mass = target != ignore_index
        if weight is not None:
            mass = torch.where(mass, weight[target.clamp(0, len(weight) - 1)], 0.0)
        loss = torch.where(mass.sum() == 0, torch.nan, loss)
    return loss.to(_dtype(z, ("cuda", "cpu")))


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
    return isinstance(dim, int) and dim in (views.axis_of(z), views.axis_of(z) - z.dim())


def _kept(t: Tensor, z: LazyLogits, keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    return (t.unsqueeze(-1) if keepdim else t).to(dtype or _dtype(z))


def _logsumexp(z: LazyLogits, dim, keepdim=False):
    if not _is_vocabulary(z, dim) or z.recipe.log:
        return NotImplemented
    return _kept(logsumexp(UnscaledLogits(z), **z.recipe.reads), z, keepdim)


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
        picked = recipe.factor * token_logprobs(UnscaledLogits(z), index, **recipe.reads)
    else:
        picked = row_stats(UnscaledLogits(z), index, **recipe.reads).picked
    return picked.to(z.dtype)  # pyright: ignore


def _sum(z: LazyLogits, dim=None, keepdim=False, dtype=None):
    if not _is_vocabulary(z, dim) or dtype not in (None, z.dtype, torch.float32):
        return NotImplemented
    recipe = z.recipe
    stats = row_stats(UnscaledLogits(z), total=True, **recipe.reads)
    total = stats.total - z.shape[-1] * stats.lse if recipe.log else stats.total
    return _kept(recipe.factor * total, z, keepdim, dtype)  # pyright: ignore


def _argmax(z: LazyLogits, dim=None, keepdim=False):
    if not _is_vocabulary(z, dim) or z.recipe.factor <= 0:
        return NotImplemented
    with torch.no_grad():
        ids = row_stats(UnscaledLogits(z), argmax=True, **z.recipe.reads).argmax
    return ids.unsqueeze(-1) if keepdim else ids  # pyright: ignore


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
    **dict.fromkeys((T.view, T.reshape, torch.reshape), views.view),
    **dict.fromkeys((T.flatten, torch.flatten), views.flatten),
    **dict.fromkeys((T.squeeze, torch.squeeze), views.squeeze),
    **dict.fromkeys((T.unsqueeze, torch.unsqueeze), views.unsqueeze),
    **dict.fromkeys((T.transpose, torch.transpose), views.transpose),
    **dict.fromkeys((T.swapaxes, torch.swapaxes, T.swapdims, torch.swapdims), views.transpose),
    T.mT.__get__: lambda z: views.transpose(z, -2, -1),  # pyright: ignore
    **dict.fromkeys((T.permute, torch.permute), views.permute),
    **dict.fromkeys((T.movedim, torch.movedim, T.moveaxis, torch.moveaxis), views.movedim),
    **dict.fromkeys((T.index_select, torch.index_select), views.index_select),
    **dict.fromkeys((T.split, torch.split), views.split),
    **dict.fromkeys((T.chunk, torch.chunk), views.chunk),
    T.__getitem__: views.getitem,
    **dict.fromkeys((T.narrow, torch.narrow), views.narrow),
    **dict.fromkeys((T.unbind, torch.unbind), views.unbind),
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
ANY_AXIS = {  # operations that allow the vocabulary in another place than the last
    *(OPERATIONS[f] for f in (T.float, T.to, T.type_as, T.contiguous, T.mul, T.div, T.neg, T.tanh)),
    *(OPERATIONS[f] for f in (T.transpose, T.permute, T.movedim, T.mT.__get__)),  # pyright: ignore
    *(OPERATIONS[f] for f in (F.cross_entropy, F.nll_loss, F.log_softmax, T.log_softmax)),
}
