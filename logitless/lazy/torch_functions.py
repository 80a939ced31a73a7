"""The functions of PyTorch that keep logits lazy. Models call these functions before the loss.

OPERATIONS maps each function of PyTorch to an operation in lazy/. The operation takes the lazy
logits and the function's other arguments. The operation returns lazy logits, a loss, a statistic or
NotImplemented. If the operation returns NotImplemented, the logits are materialised and PyTorch's
function is called.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.return_types import max as Max
from torch.return_types import min as Min

from . import losses, ops, reductions, rows
from .logits import LazyLogits
from .memory import TABLE
from .ops import applied

T = Tensor


def kept_lazy(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of func, computed without materialising logits, or NotImplemented."""
    found = False
    for t in (*args, *kwargs.values()):
        for one in t if isinstance(t, (list, tuple)) else (t,):
            if isinstance(one, LazyLogits):
                found = one.settle() is one
    if not found:
        return NotImplemented
    result = _operation(func, args, kwargs)
    if result is NotImplemented and func in ELEMENTWISE:
        return applied(func, args, kwargs)
    return result


TABLE.append(kept_lazy)


def _operation(func: Callable, args: tuple, kwargs: dict) -> Any:
    args, kwargs = _with_first(func, args, kwargs)
    z, operation = args[0] if args else None, OPERATIONS.get(func)
    if func in LISTS and isinstance(z, (list, tuple)):
        z = z[0] if z else None
    if operation is None or not isinstance(z, LazyLogits):  # such as a loss of two logits
        z, operation = args[1] if len(args) > 1 else None, SECOND.get(func)
    if operation is None or not isinstance(z, LazyLogits):
        return NotImplemented
    lazy = z.views_stay_lazy if operation in VIEWS else z.from_head
    if not lazy or (z.recipe.axis is not None and operation not in ANY_AXIS):
        return NotImplemented
    return operation(*args, **kwargs) if _fits(operation, args, kwargs) else NotImplemented


def _with_first(func: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Returns the arguments, with the first argument passed by position."""
    if "axis" in kwargs:  # numpy's name for dim
        kwargs = {"dim" if key == "axis" else key: value for key, value in kwargs.items()}
    name = "tensors" if func in LISTS else "input"
    if args or name not in kwargs:
        return args, kwargs
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}


_signature = functools.cache(inspect.signature)


def _fits(operation: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether `operation` accepts these arguments.

    PyTorch's own function can have arguments that `operation` lacks, such as `out`.
    """
    try:
        _signature(operation).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _of_rows(function: Callable):
    """Returns a version of torch.softmax or log_softmax for lazy logits."""

    def softmax(z: LazyLogits, dim=None, *args, dtype=None, _stacklevel=3):
        """`args` can hold the dtype, and the _stacklevel of torch.nn.functional."""
        if not reductions.is_vocabulary(z, dim) or not z.is_floating_point():
            return NotImplemented
        dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
        dtype = dtype or reductions.dtype_of(z)
        return applied(function, (z, -1), {"dtype": dtype}, dtype=dtype)

    return softmax


# Names of elementwise functions in torch, Tensor, torch.special and torch.nn.functional. They are
# deterministic and do not write to their arguments.
NAMES = [
    "abs", "add", "addcmul", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "cos", "div",
    "divide", "entr", "eq", "erf", "exp", "expit", "expm1", "floor", "ge", "gelu", "greater",
    "greater_equal", "gt", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "le", "lerp",
    "less", "less_equal", "log", "log1p", "log2", "logaddexp", "logical_and", "logical_not",
    "logical_or", "logsigmoid", "lt", "masked_fill", "maximum", "minimum", "mul", "multiply",
    "nan_to_num", "ne", "neg", "negative", "not_equal", "pow", "reciprocal", "relu", "remainder",
    "round", "rsqrt", "rsub", "sigmoid", "sign", "signbit", "sin", "softplus", "sqrt", "square",
    "sub", "subtract", "tanh", "true_divide", "where", "xlogy",
]  # fmt: skip
OPERATORS = [
    "abs", "add", "and", "eq", "floordiv", "ge", "gt", "invert", "le", "lt", "mod", "mul", "ne",
    "neg", "or", "pos", "pow", "radd", "rmod", "rmul", "rpow", "rsub", "rtruediv", "sub",
    "truediv", "xor",
]  # fmt: skip
ELEMENTWISE = {
    getattr(place, name)
    for place in (torch, T, torch.special, F)
    for name in NAMES
    if hasattr(place, name)
}
ELEMENTWISE |= {getattr(T, f"__{name}__") for name in OPERATORS if hasattr(T, f"__{name}__")}

_amax, _amin = reductions.reduced(torch.amax), reductions.reduced(torch.amin)
_max, _min = reductions.reduced(torch.max, Max), reductions.reduced(torch.min, Min)
_any, _all = reductions.reduced(torch.any), reductions.reduced(torch.all)

SUMS = {T.add, T.__add__, T.__radd__, torch.add}
LOSSES_OF_VALUES = {
    function: losses.loss_of_values(function)
    for function in (
        F.kl_div, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
    )
}  # fmt: skip
CASTS = {
    function: ops.cast(function)
    for function in (
        T.to,
        T.type_as,
        T.float,
        T.double,
        T.half,
        T.bfloat16,
        T.bool,
        T.int,
        T.long,
        T.cpu,
        T.cuda,
    )
}
_softmax, _log_softmax = _of_rows(torch.softmax), _of_rows(torch.log_softmax)
DETACHES = {T.detach, torch.detach, T.data.__get__}  # type: ignore
CATS = {torch.cat, torch.concat, torch.concatenate}
LISTS = {*CATS, torch.stack}
SECOND: dict[Any, Callable] = {
    **dict.fromkeys(SUMS, lambda other, z, **kwargs: ops.plus(z, other, **kwargs)),
    **LOSSES_OF_VALUES,
}
PERMUTATIONS = {
    function: rows.permuted(function)
    for function in (
        T.permute, torch.permute, T.transpose, torch.transpose, T.swapaxes, torch.swapaxes,
        T.swapdims, torch.swapdims, T.movedim, torch.movedim, T.moveaxis, torch.moveaxis,
        T.mT.__get__,  # type: ignore
    )
}  # fmt: skip
OPERATIONS: dict[Any, Callable] = {
    # values
    **CASTS,
    T.contiguous: ops.contiguous,
    torch.atleast_1d: lambda z: z,  # the Trainer calls it before torch.cat
    **dict.fromkeys((T.clone, torch.clone), ops.clone),
    **dict.fromkeys(DETACHES, ops.detach),
    **dict.fromkeys(SUMS, ops.plus),
    **dict.fromkeys((T.sub, T.__sub__, torch.sub), ops.minus),
    **dict.fromkeys((T.log_softmax, torch.log_softmax, F.log_softmax), _log_softmax),
    **dict.fromkeys((T.softmax, torch.softmax, F.softmax), _softmax),
    # rows and columns
    **dict.fromkeys((T.view, T.reshape, torch.reshape), rows.view),
    **dict.fromkeys((T.view_as, T.reshape_as), ops.view_as),
    **dict.fromkeys((T.flatten, torch.flatten), rows.flatten),
    **dict.fromkeys((T.squeeze, torch.squeeze), rows.squeeze),
    **dict.fromkeys((T.unsqueeze, torch.unsqueeze), rows.unsqueeze),
    **PERMUTATIONS,
    **dict.fromkeys((T.index_select, torch.index_select), rows.index_select),
    **dict.fromkeys((T.split, torch.split), rows.split),
    **dict.fromkeys((T.chunk, torch.chunk), rows.chunk),
    T.__getitem__: rows.getitem,
    **dict.fromkeys((T.narrow, torch.narrow), rows.narrow),
    **dict.fromkeys((T.unbind, torch.unbind), rows.unbind),
    **dict.fromkeys(CATS, rows.cat),
    torch.stack: rows.stack,
    # losses
    F.cross_entropy: losses.cross_entropy_loss,
    F.nll_loss: losses.nll_loss,
    **LOSSES_OF_VALUES,
    # statistics
    **dict.fromkeys((T.logsumexp, torch.logsumexp), reductions.log_sum_exp),
    **dict.fromkeys((T.gather, torch.gather), reductions.gather),
    **dict.fromkeys((T.take_along_dim, torch.take_along_dim), reductions.take_along_dim),
    **dict.fromkeys((T.sum, torch.sum), reductions.sum),
    **dict.fromkeys((T.mean, torch.mean), reductions.mean),
    **dict.fromkeys((T.argmax, torch.argmax), reductions.argmax),
    **dict.fromkeys((T.amax, torch.amax), _amax),
    **dict.fromkeys((T.amin, torch.amin), _amin),
    **dict.fromkeys((T.max, torch.max), reductions.overall(torch.max, _max, _amax)),
    **dict.fromkeys((T.min, torch.min), reductions.overall(torch.min, _min, _amin)),
    **dict.fromkeys((T.topk, torch.topk), reductions.topk),
    **dict.fromkeys((T.any, torch.any), reductions.overall(torch.any, _any)),
    **dict.fromkeys((T.all, torch.all), reductions.overall(torch.all, _all)),
}
VIEWS = {  # operations that return a view of a plain tensor
    *PERMUTATIONS.values(), rows.view, rows.flatten, rows.squeeze, rows.unsqueeze, rows.narrow,
    rows.split, rows.chunk, rows.unbind, rows.getitem, ops.detach,
}  # fmt: skip
ANY_AXIS = {  # operations that accept the vocabulary in any dimension
    *CASTS.values(), *PERMUTATIONS.values(), ops.contiguous, ops.clone, ops.detach, _softmax,
    _log_softmax, losses.cross_entropy_loss, losses.nll_loss,
}  # fmt: skip
