"""The first steps of every call: checks of the arguments, and detection of transforms.

Shapes, dtypes, devices and numbers are usually the same in every training step, so `check_once`
checks each combination only once. Only `check_values` reads the values of tensors: always on a CPU,
where reading needs no synchronisation, and on a GPU only if LOGITLESS_CHECK=1 is set.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..contract import Reading, has_values
from . import invariant as invariance
from . import option_checks, target_checks, tensor_checks
from .environment import CHECK, variables
from .rules import collected
from .source import ranks_of_call

F = TypeVar("F", bound=Callable)

_REMEMBERED = 1024  # largest number of entries of `_passed`, and of Signatures per entry
# (check, *types of the arguments): (positions of tensors, a Signature per combination that passed)
_passed: dict[tuple, tuple[tuple[int, ...], dict[tuple, "Signature"]]] = {}
_describe = attrgetter("shape", "dtype", "device", "requires_grad")


class Signature:
    """Identifies all calls of a check with equal arguments, as a key of caches."""

    __slots__ = ()


def check_once(check: Callable[..., None], *args: Any) -> Signature | None:
    """Calls check(*args), unless equal arguments passed before; returns their Signature.

    Tensors are equal if their shapes, dtypes, devices and requires_grad are. The result is None
    under torch.compile, and if an argument has no hash.
    """
    return _once(check, args, check, args)


def checked(function: Callable, **given: Any) -> Signature | None:
    """Checks arguments of a `named` function, like `check_once`, by the rules of their names.

    The first is the logits. A function calls it in one place, so the names are no part of the key.
    """
    return _once(function, given.values(), function.check, (given,))  # type: ignore


def _once(name: Callable, values: Iterable, check: Callable[..., None], args: tuple) -> Any:
    if torch.compiler.is_compiling():  # shapes can be symbolic
        check(*args)
        return None
    passed = key = None
    try:
        kinds = (name, *map(type, values))
        described = list(values)
        tensors, passed = _passed.get(kinds) or _add_entry(kinds, described)
        for i in tensors:
            described[i] = _describe(described[i])
        key = tuple(described)
        signature = passed.get(key)
        if signature is not None:
            return signature
    except (AttributeError, TypeError):  # an argument has no hash or shape
        passed = None
    try:
        check(*args)
    except Exception as error:
        if thorough():
            _refuse_on_ranks(values, error)
        raise
    if passed is None or key is None:
        return None
    if len(passed) >= _REMEMBERED:
        passed.clear()
    return passed.setdefault(key, Signature())


def _add_entry(kinds: tuple, args: list) -> tuple[tuple[int, ...], dict[tuple, Signature]]:
    # Tensors and other sources of logits have the attribute requires_grad.
    if len(_passed) >= _REMEMBERED:
        _passed.clear()
    found = tuple(i for i, a in enumerate(args) if hasattr(a, "requires_grad"))
    return _passed.setdefault(kinds, (found, {}))


def _refuse_on_ranks(args: Iterable, error: Exception) -> None:
    """Sends the error to the ranks that share these logits, so that all of them raise."""
    ranks = next(filter(None, map(ranks_of_call, args)), None)
    if ranks is not None:
        ranks.refuse(error)


def named(*others: Callable) -> Callable[[F], F]:
    """Decorator that raises for unknown options and for too many positional arguments.

    Legal are the keyword-only arguments of the decorated function and of `others`. `checked` knows
    the rules of its own arguments.
    """

    def wrap(function: F) -> F:
        own = list(inspect.signature(function).parameters.values())
        first = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        most = None if any(p.kind is p.VAR_POSITIONAL for p in own) else len(first)
        names = first + [p.name for p in own if p.kind is p.KEYWORD_ONLY]
        for other in others:
            names += [name for name in option_checks.taken_from(other) if name not in names]
        legal = frozenset(names)
        rules = collected(own)

        def check(given: dict[str, Any]) -> None:
            logits = next(iter(given.values()))
            for name, value in given.items():
                rules[name](name, value, logits)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if most is not None and len(args) > most:
                option_checks.refuse_position(
                    option_checks.called(function, args), first, names, len(args)
                )
            for name in kwargs:
                if name not in legal:
                    option_checks.refuse_name(option_checks.called(function, args), names, name)
            return function(*args, **kwargs)

        call.check = check  # type: ignore
        return call

    return wrap


def as_ids(ids: Tensor, ignore_index: int | None = None, mask: Tensor | None = None) -> Tensor:
    """Converts ids to int64 (int32 stays if ignore_index fits); masked rows get ignore_index."""
    if mask is None and ids.dtype == torch.int64:
        return ids
    fits = ignore_index is None or -(2**31) <= ignore_index < 2**31
    if ids.dtype == torch.uint64:
        ids = ids.long()
        ids = torch.where(ids < 0, 2**63 - 1, ids)  # the id 2**64 - 100 must not become -100
    elif not (ids.dtype == torch.int64 or (ids.dtype == torch.int32 and fits)):
        ids = ids.long()
    if mask is None:
        return ids
    assert ignore_index is not None
    return torch.where(as_bool(mask), ids, ignore_index)


def as_bool(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != 0


def as_label(mask: Tensor | None) -> Tensor | None:
    """Converts a mask of rows to labels 0 and 1, for ignore_index=0."""
    return None if mask is None else as_bool(mask).view(torch.int8)


def reading_of(
    logits: Any,
    temperature: float | Tensor,
    softcap: float | None,
    *,
    label: Tensor | None = None,
    ids: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int | None = None,
    wants: tuple[str, ...] = (),
) -> Reading:
    by_row, for_all = None, None
    if isinstance(temperature, Tensor):
        by_row = temperature.expand(logits.shape[:-1])
    else:
        for_all = float(temperature)
    return Reading(
        logits.shape[-1], label, ids, class_weight, by_row, for_all,
        None if softcap is None else float(softcap), ignore_index, wants, invariance.depth > 0,
    )  # fmt: skip


def thorough() -> bool:
    return os.environ.get("LOGITLESS_CHECK", "0") not in ("", "0")


def reads_values(ids: Tensor) -> bool:
    return (ids.is_cpu or (CHECK in variables and thorough())) and has_values(ids)


def check_values(loss) -> None:
    """Raises if an id or a temperature is out of bounds in a row that is not ignored."""
    reading, vocab = loss.reading, loss.reading.vocab
    t = reading.label
    if t is None:
        t = reading.row_temperature if reading.ids is None else reading.ids
    if t is None or not reads_values(t):
        return
    live = None
    if reading.ignore_index is not None:
        live = reading.label != reading.ignore_index
    if reading.row_temperature is not None:
        tensor_checks.in_bounds(
            reading.row_temperature, live, option_checks.LEAST, option_checks.MOST
        )
    if reads_label(loss):
        target_checks.in_range(reading.label, vocab, live, loss.names[0], reading.ignore_index)
    if reading.ids is not None:
        real = loss.real_ids
        if live is not None:
            real = live.unsqueeze(-1) if real is None else real & live.unsqueeze(-1)
        target_checks.in_range(reading.ids, vocab, real, loss.names[1], None)


def reads_label(loss) -> bool:
    """Whether the labels of the loss are class ids, instead of a mask of rows."""
    wants = loss.reading.wants
    if loss.labels_are_ids or "nll" in wants or "logprob_t1" in wants:
        return True
    return loss.reading.ids is None and bool({"picked", "logprob", "rank"} & {*wants})


def under_transform() -> bool:
    """Whether a compiler, a dispatch mode or torch.func is active."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def in_func() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


# torch.compile then treats the result as a constant. torch.compiler.assume_constant_result sets the
# same attribute, but imports the compiler.
in_func._dynamo_marked_constant = True  # type: ignore


def mapped(t: Tensor) -> bool:
    """Whether t is a batched tensor of torch.func.vmap or of is_grads_batched=True."""
    return not torch.compiler.is_compiling() and (is_batched(t) or is_legacy_batched(t))


is_batched = torch._C._functorch.is_batchedtensor
is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
