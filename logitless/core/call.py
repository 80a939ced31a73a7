"""What every call does first: check its arguments, ask for transforms, choose the backend.

Arguments are checked before any source of logits is looked at. What a check looks at, shapes,
dtypes, devices and Python numbers, is the same from call to call in a training loop. So a signature
that was found right is remembered, and not checked again. Only `values` reads what tensors hold,
and so runs only where reading costs no synchronisation: on a CPU, or when LOGITLESS_CHECK=1 asks.

Triton kernels run on a GPU and plain PyTorch on a CPU, unless `impl` chooses.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import eager
from ..contract import NO_ID, Reading
from ..heads import checks as head_checks
from . import checks, options
from .later import later

F = TypeVar("F", bound=Callable)

_REMEMBERED = 4096
_right: set[tuple] = set()


def once(check: Callable[..., None], *args: Any) -> None:
    """check(*args), unless arguments of the same signature passed it before."""
    if torch.compiler.is_compiling():  # shapes may be symbols
        check(*args)
        return
    try:
        key = (
            check,
            *[
                (a.__class__, a.shape, a.dtype, a.device, a.requires_grad)
                if hasattr(a, "requires_grad")
                else (a.__class__, a)
                for a in args
            ],
        )
        if key in _right:
            return
    except (AttributeError, TypeError):  # no tensor, or without a hash: the check will say so
        key = None
    try:
        check(*args)
    except Exception as error:
        if asked():
            later.refuse_on_ranks(args[0], error)
        raise
    if key is None:
        return
    if len(_right) >= _REMEMBERED:
        _right.clear()
    _right.add(key)


def named(*others: Callable) -> Callable[[F], F]:
    """A function that takes options by name, its own and as **options those of `others`.

    A misspelt one is answered with the one that was meant, one without a name with those that may
    come without.
    """

    def wrap(function: F) -> F:
        own = inspect.signature(function).parameters.values()
        first = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        most = None if any(p.kind is p.VAR_POSITIONAL for p in own) else len(first)
        names = first + [p.name for p in own if p.kind is p.KEYWORD_ONLY]
        for other in others:
            names += [name for name in options.taken_from(other) if name not in names]
        legal = frozenset(names)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if most is not None and len(args) > most:
                options.refuse_position(options.called(function, args), first, names, len(args))
            for name in kwargs:
                if name not in legal:
                    options.refuse_name(options.called(function, args), names, name)
            return function(*args, **kwargs)

        return call  # pyright: ignore[reportReturnType]

    return wrap


def as_ids(ids: Tensor, ignore_index: int | None = None) -> Tensor:
    """Ids as int32 or int64, so wide that ignore_index equals no other id."""
    fits = ignore_index is None or -(2**31) <= ignore_index < 2**31
    wide = ids.dtype == torch.int64 or (ids.dtype == torch.int32 and fits)
    if ids.dtype != torch.uint64:
        return ids if wide else ids.long()
    ids = ids.long()
    return torch.where(ids < 0, 2**63 - 1, ids)  # 2**64 - 100 is too large, and not -100


def as_label(mask: Tensor | None) -> Tensor | None:
    """A mask of rows as labels, of which 0 is to be ignored."""
    if mask is None:
        return None
    mask = mask if mask.dtype == torch.bool else mask != 0
    return mask.view(torch.int8)


def reading_of(logits, temperature: float | Tensor, softcap: float | None, **fields) -> Reading:
    """A Reading with a temperature as users give it: a number, or one a row."""
    by_row = None
    if isinstance(temperature, Tensor):
        by_row, temperature = temperature.expand(logits.shape[:-1]), 1.0
    return Reading(
        logits.shape[-1], row_temperature=by_row, temperature=float(temperature),
        softcap=None if softcap is None else float(softcap), **fields,
    )  # fmt: skip


def temperature_of(temperature, logits) -> None:
    if isinstance(temperature, Tensor):
        checks.row_temperature(temperature, logits)
    else:
        options.temperature(temperature)


def stats(logits, ids, temperature, softcap, ignore_index=None, needs_ids=False) -> None:
    checks.logits(logits)
    if ids is not None or needs_ids:
        checks.ids(ids, logits)
    temperature_of(temperature, logits)
    options.softcap(softcap)
    if ignore_index is not None:
        options.ignore_index(ignore_index)
        checks.has_an_id(ids, logits)


def row_loss(logits, row_weight, reduction, *rows) -> None:
    checks.row_weight(row_weight, logits)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    for i, t in enumerate(rows):
        checks.beside_rows(f"rows[{i}]", t, logits)


def score(logits, target, temperature, softcap, ignore_index) -> None:
    checks.logits(logits)
    checks.target(target, logits)
    options.ignore_index(ignore_index)
    temperature_of(temperature, logits)
    options.softcap(softcap)


def cross_entropy(
    logits, target, weight, row_weight, temperature, softcap, ignore_index, reduction,
    label_smoothing, z_loss,
) -> None:  # fmt: skip
    checks.logits(logits)
    checks.target(target, logits)
    checks.class_weight(weight, logits)
    checks.row_weight(row_weight, logits)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    options.fraction("label_smoothing", label_smoothing)
    options.z_loss(z_loss)
    options.ignore_index(ignore_index)
    temperature_of(temperature, logits)
    options.softcap(softcap)


def pair(
    student, teacher, names, weight, blend, temperature, softcap, mask, row_weight, reduction
) -> None:  # fmt: skip
    """A student and a teacher of whole rows; `names` of both, and of the blend."""
    checks.logits(student, names[0])
    checks.dense_teacher(names[1], teacher, names[0], student)
    checks.class_weight(weight, student)
    options.fraction(names[2], blend)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    checks.row_weight(row_weight, student)
    checks.row_mask(mask, student)
    temperature_of(temperature, student)
    options.softcap(softcap)


def direction(student, direction) -> None:
    """Of kl_div. The student is given for the ranks that may share its logits: see `once`."""
    checks.one_of("direction", direction, options.DIRECTIONS)


def gathered(logits, teacher, mask, renormalise, temperature, row_weight, reduction) -> None:
    checks.logits(logits, "student_logits")
    checks.of_ids("student_logits", logits)
    checks.slots("teacher_logprobs", teacher, "student_logits", logits)
    checks.slot_mask(mask, logits)
    checks.yes_or_no("renormalise", renormalise)
    temperature_of(temperature, logits)
    checks.row_weight(row_weight, logits)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)


def distill(
    logits, ids, labels, row_weight, temperature, softcap, divergence, support, beta,
    ignore_index, ce_weight, kd_weight, reduction,
) -> None:  # fmt: skip
    checks.logits(logits)
    checks.targets(ids, logits)
    checks.one_of("divergence", divergence, options.DIVERGENCES)
    checks.one_of("support", support, options.SUPPORTS)
    options.fraction("beta", beta)
    checks.row_weight(row_weight, logits)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    options.factor("ce_weight", ce_weight)
    options.factor("kd_weight", kd_weight)
    checks.labels(labels, logits, ce_weight)
    options.ignore_index(ignore_index)
    temperature_of(temperature, logits)
    options.softcap(softcap)


def topk(logits, k, temperature, softcap) -> None:
    checks.logits(logits)
    checks.how_many(k, logits)
    options.temperature(temperature)
    options.softcap(softcap)


def linear(
    hidden, weight, bias, main_grad, workspace, logits_dtype, accumulate, drop_ignored
) -> None:
    head_checks.linear(hidden, weight, bias, workspace)
    head_checks.logits_dtype(logits_dtype, hidden)
    head_checks.main_grad(main_grad, weight)
    checks.one_of("accumulate", accumulate, options.ACCUMULATE)


def asked() -> bool:
    """Whether LOGITLESS_CHECK=1 asks for checks that cost time."""
    return os.environ.get("LOGITLESS_CHECK", "0") not in ("", "0")


def looks_at(ids: Tensor) -> bool:
    """Whether values are checked: on a CPU, and with LOGITLESS_CHECK=1 on a GPU."""
    return ids.device.type == "cpu" or (asked() and ids.device.type != "meta")


def values(loss, vocab: int) -> None:
    """Raise on an id or a temperature out of bounds where it counts, naming its place."""
    reading = loss.reading
    given = reading.label
    if given is None:
        given = reading.row_temperature if reading.ids is None else reading.ids
    if given is None or not looks_at(given):
        return
    live = None
    if reading.ignore_index is not None:
        live = reading.label != reading.ignore_index
    if reading.row_temperature is not None:
        checks.in_bounds(reading.row_temperature, live, options.LEAST, options.MOST)
    if reads_label(loss):
        checks.in_range(reading.label, vocab, live, loss.names[0], reading.ignore_index)
    if reading.ids is not None:
        real = reading.ids != NO_ID
        real = real if live is None else real & live.unsqueeze(-1)
        checks.in_range(reading.ids, vocab, real, loss.names[1], None)


def reads_label(loss) -> bool:
    """Whether the label is a label, and does not only say which rows count."""
    wants = loss.reading.wants
    if "nll" in wants or "logprob_t1" in wants:
        return True
    return loss.reading.ids is None and ("picked" in wants or "logprob" in wants)


def under_transform() -> bool:
    """Whether a compiler, a dispatch mode or torch.func is active."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
    )


def in_func() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore


# A compiler asks while it traces: as torch.compiler.assume_constant_result, which would import it.
in_func._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def mapped(t: Tensor) -> bool:
    """Whether torch.func.vmap, or what autograd has instead, maps over it."""
    return not torch.compiler.is_compiling() and (_is_batched(t) or _is_legacy_batched(t))


_is_batched = torch._C._functorch.is_batchedtensor  # pyright: ignore
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore

CHOICES = ("triton", "eager")
_chosen: str | None = None


@contextlib.contextmanager
def impl(name: str):
    """Run every loss in this block by `"triton"` or `"eager"`; a choice never falls back,
    but for more slots (4096) or a larger k (256) than a kernel sorts, which PyTorch serves.

    Triton on CPU tensors runs under Triton's interpreter (`TRITON_INTERPRET=1`). The environment
    variable LOGITLESS_IMPL makes the same choice. Both are for the whole process, threads and all.
    """
    global _chosen
    checks.one_of("impl", name, CHOICES)
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def chosen() -> str | None:
    """The explicit choice in force, if any."""
    name = _chosen or os.environ.get("LOGITLESS_IMPL") or None
    if name is not None:
        checks.one_of("LOGITLESS_IMPL", name, CHOICES)
    return name


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda or x.is_xpu  # which take a sixth of the time of x.device.type


def backend(x: Tensor) -> ModuleType:
    """The module whose functions serve this tensor: `kernels` or `eager`."""
    if _chosen is None and not os.environ.get("LOGITLESS_IMPL"):
        return _kernels() if on_gpu(x) and x.dtype != torch.float64 else eager
    if chosen() == "eager":
        return eager
    checks.triton_can_run(x)
    return _kernels()


@functools.cache
def _kernels() -> ModuleType:
    from .. import kernels  # imported late: without a GPU, Triton need not be installed

    return kernels
