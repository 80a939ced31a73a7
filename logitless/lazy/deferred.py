"""`Deferred`: a tensor without memory of its own, whose values PyTorch's operations can read.

Lazy logits (logits.py), their gradient (gradient.py) and views of computed logits (`View`) share
one mechanism. An operation of PyTorch gets the values, `plain_values()`, instead. A result that
shares memory with them becomes a `View`, which must not be written to, unless `lend` returns True:
then it is plain, and writing to it changes the values. An operation that writes, as its schema
tells, runs the method `write` instead, which raises by default. A function that takes the address
of the memory gets that of the values, and DLPack raises unless it copies or `lend` returns True.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

F = TypeVar("F", bound=Callable)
T = Tensor

# --- functions that access memory directly, and so bypass __torch_dispatch__

COPIERS = {T.__reduce_ex__, T.__deepcopy__}
READERS = {T.tolist, T.item, T.is_shared} | COPIERS
ARRAYS = {T.numpy, T.__array__}  # functions that return writable memory
ADDRESSES = {
    T.data_ptr, T.untyped_storage, T.storage, T._typed_storage,
    T.__cuda_array_interface__.__get__,  # pyright: ignore
}  # fmt: skip
EXPORTS = {T.__dlpack__}
WRITERS = {
    T.__setitem__, T.data.__set__, T.share_memory_, T.apply_, T.map_, T.map2_,  # pyright: ignore
}  # fmt: skip
DIRECT = READERS | ARRAYS | ADDRESSES | EXPORTS | WRITERS


class _Absent:
    """Hides an attribute of Tensor from a subclass."""

    def __get__(self, instance, owner):
        raise AttributeError("a tensor without memory of its own does not have this attribute")


class Deferred(Tensor):
    """A tensor without memory of its own; see the module's docstring."""

    __dlpack_c_exchange_api__ = _Absent()  # a Deferred tensor has no memory that DLPack can read

    what = "lazy logits"  # the subject of error messages
    copy = "logits.materialize()"  # an expression that returns a writable tensor
    unwritable = "their values are not in memory"  # the reason why writing raises

    @classmethod
    def blank(cls, like: Any, **layout) -> Any:
        """A tensor with the shape, dtype and device of `like`."""
        t = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, like.shape, dtype=like.dtype, device=like.device, **layout
        )
        # Makes writes raise even in functions that bypass __torch_function__ and
        # __torch_dispatch__.
        torch._C._set_throw_on_mutable_data_ptr(t)
        return t

    def plain_values(self) -> Tensor:
        """The values as a plain, detached tensor, which the caller must not write to."""
        raise NotImplementedError

    def expose(self) -> Tensor:
        """The values, for a caller that takes their address and can overwrite them."""
        return self.plain_values()

    # Weak references to read-only views and arrays that share memory with the values, which must
    # not be written to while one of them exists. None if the values are never writable.
    lent: list[weakref.ref] | None = None

    def keep_lent(self, view: Any) -> None:
        if self.lent is not None:
            self.lent[:] = [ref for ref in self.lent if ref() is not None] + [weakref.ref(view)]

    def lend(self) -> bool:
        """Whether plain tensors may share and change the memory of the values."""
        return False

    def writable_values(self) -> Tensor | None:
        """The values as a writable tensor, in the memory that all views share, or None."""
        return None

    def write(self, func, args: tuple, kwargs: dict) -> Any:
        raise RuntimeError(
            f"{self.what} must not be written to by {running(func)}, because {self.unwritable}."
            f" Write to a copy instead: {self.copy}."
        )

    def __repr__(self, **_) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        kind = type(self).__name__
        return f"{kind}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in DIRECT and args and isinstance(args[0], Deferred):
            return _direct(func, args, kwargs)
        with called(func), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        targets = written(func, args, kwargs)
        if targets:
            return targets[0].write(func, args, kwargs)
        return on_values(func, args, kwargs)


class View(Deferred):
    """A view of the values of another Deferred tensor, for example one column."""

    values: Tensor

    @staticmethod
    def of(values: Tensor, owner: Deferred) -> "View":
        offset = values.storage_offset()
        view = View.blank(values, strides=values.stride(), storage_offset=offset)
        view.values = values
        part = isinstance(owner, View)
        view.what = owner.what if part else f"parts of {owner.what}"
        view.copy = owner.copy if part else f"{owner.copy}, and take the part of the copy"
        view.unwritable, view.lent = owner.unwritable, owner.lent
        view.keep_lent(view)
        return view

    def plain_values(self) -> Tensor:
        return self.values

    def __repr__(self, **_) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return repr(self.values)


def on_values(func, args: tuple, kwargs: dict, memory: dict[int, Tensor] | None = None) -> Any:
    """Runs an operation on the values of its Deferred arguments.

    `memory` maps id(t) to the values of each argument t that the operation writes to.
    """
    owners: dict[int, Deferred] = {}  # maps memory_of(t.plain_values()) to t
    memory = memory or {}
    name = func._schema.name
    described = name.endswith("_like") or name.startswith("aten::new_")  # no values are read

    def values_of(t: Deferred) -> Tensor:
        if described:
            return torch.empty((), dtype=t.dtype, device=t.device).expand(t.shape)
        if id(t) in memory:
            return memory[id(t)]
        values = t.plain_values()
        owners[memory_of(values)] = t
        return values

    def guarded(t: Tensor) -> Tensor:
        strided = type(t) is Tensor and t.layout is torch.strided
        owner = owners.get(memory_of(t)) if strided else None
        return t if owner is None or owner.lend() else View.of(t, owner)

    with called(_called.get() or func):
        args, kwargs = pytree.tree_map_only(Deferred, values_of, (args, kwargs))
    return pytree.tree_map_only(Tensor, guarded, func(*args, **kwargs))


def memory_of(t: Tensor) -> int:
    """An id of a tensor's memory, which its views share."""
    return t.untyped_storage()._cdata


def written(func, args: tuple, kwargs: dict) -> list[Deferred]:
    """The Deferred tensors that the operation writes to."""
    schema = func._schema
    takes_memory = schema.name == "aten::set_"  # x.set_(t) makes x share the memory of t
    found = []
    for i, argument in enumerate(schema.arguments):
        t = args[i] if i < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if (writes or takes_memory) and t is not None:
            found += [one for one in pytree.tree_leaves(t) if isinstance(one, Deferred)]
    return found


def _direct(func, args: tuple, kwargs: dict) -> Any:
    t, *rest = args
    if func in WRITERS or (func in EXPORTS and not kwargs.get("copy") and not t.lend()):
        with called(func):
            return t.write(func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if func in ARRAYS and t.requires_grad and not kwargs.get("force"):
            return func(torch.empty(0).requires_grad_(), *rest, **kwargs)  # raises PyTorch's error
        if func is T.__deepcopy__ and not t.is_leaf:
            return func(torch.empty(0).requires_grad_() * 1, *rest)  # raises PyTorch's error
        with called(func):
            values = t.expose() if func in ADDRESSES else t.plain_values()
        if func in COPIERS:
            values = values.detach().requires_grad_(t.requires_grad)
        if func in EXPORTS and kwargs.get("copy"):
            return func(values.clone(), *rest, **{**kwargs, "copy": None})
        result = func(values, *rest, **kwargs)
        if func in ARRAYS and not t.lend():
            result.flags.writeable = False
            t.keep_lent(result)
        return result


# --- the function that the user called, for warnings and errors

_called: ContextVar[Any] = ContextVar("called", default=None)


_COMPUTED: list[Callable[[Callable, tuple, dict], Any]] = []


def keeps_lazy(function: F) -> F:
    """Registers a function that computes results of PyTorch's functions without reading values.

    It takes (func, args, kwargs), and returns func(*args, **kwargs) or NotImplemented.
    """
    _COMPUTED.append(function)
    return function


def result_of(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of the first registered function that knows one, or NotImplemented."""
    for function in _COMPUTED:
        result = function(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return NotImplemented


@contextlib.contextmanager
def called(func) -> Iterator[None]:
    """Inside this block, warnings and errors name the PyTorch function `func`."""
    before = _called.set(func)
    try:
        yield
    finally:
        _called.reset(before)


def running(func=None) -> str:
    """The name of the PyTorch function that the user called, by default that of `func`."""
    func = _called.get() or func
    name = torch.overrides.resolve_name(func)
    if name is None:
        of_tensor = getattr(func, "__qualname__", "").startswith(("Tensor.", "TensorBase."))
        name = f"torch.{'Tensor.' * of_tensor}{getattr(func, '__name__', func)}"
    for module, short in MODULES.items():
        name = short + name.removeprefix(module) if name.startswith(module) else name
    return name.removesuffix(".__get__")  # the name of a property's getter ends in `.__get__`


MODULES = {"torch.nn.functional.": "F.", "torch.functional.": "torch.", "torch.Tensor.": "Tensor."}
