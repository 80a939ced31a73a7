"""Bugs put into lazy logits on purpose, for lazy_programs.py: a tester must find them."""

from contextlib import AbstractContextManager, ExitStack
from unittest import mock

from logitless.lazy import deferred, gradient, logits, loss_nodes, nodes, values


def unguarded_views() -> AbstractContextManager:
    """A column of computed logits is a plain tensor, which can be written to."""
    return mock.patch.object(deferred.View, "of", staticmethod(lambda values, owner: values))


def writes_by_name() -> AbstractContextManager:
    """`out=` and lists of tensors are not seen as writes."""
    right = deferred.written

    def written(func, args, kwargs):
        flat = tuple(a for a in args if not isinstance(a, (list, tuple)))
        return right(func, flat, {}) if len(flat) == len(args) else None

    return mock.patch.multiple(logits, written=written)


def lost_sign() -> AbstractContextManager:
    """-logits forgets the sign of the gradient of the hidden states."""
    right = values.kept

    def kept(z, recipe, back, op):
        return right(z, recipe, None if back and back.__name__ == "back" else back, op)

    return mock.patch.object(values, "kept", kept)


def second_in_silence() -> AbstractContextManager:
    """A second derivative leaves out what depends on the values."""
    stack = ExitStack()
    for module in (nodes, loss_nodes):
        stack.enter_context(mock.patch.object(module, "final", lambda gradient, *inputs: gradient))
    return stack


def gradient_of_one() -> AbstractContextManager:
    """The gradient that is read is that of the first of several losses."""
    right = gradient.added

    def added(a, b):
        total = right(a, b)
        total.computes = total.computes[:1]
        return total

    return mock.patch.object(gradient, "added", added)


BUGS = {
    "a column can be written to": unguarded_views,
    "out= and lists are not seen as writes": writes_by_name,
    "-logits loses the sign of a gradient": lost_sign,
    "a second derivative in silence": second_in_silence,
    "the gradient that is read is one of several": gradient_of_one,
}


def planted(bug: str) -> AbstractContextManager:
    """The library with this bug."""
    return BUGS[bug]()
