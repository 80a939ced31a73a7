"""`Shared`: a tensor whose values are computed when they are read, and `Cell`, their memory.

A head's logits and all their aliases (views, detached ones, `.data`) hold one cell, and each knows
how it is a view of it. Who only reads gets values that nobody else sees. Who takes the address of
the memory, gets a tensor that shares it, or writes, fills the cell with plain logits: from then on,
every alias is a view of these (`Cell.exposed`), and no longer computed from the head.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = Tensor
aten = torch.ops.aten


class Cell:
    """The memory of the logits that `recipe` describes, once it exists."""

    def __init__(self, recipe: Any):
        self.recipe = recipe
        self.memory: Tensor | None = None
        self.version = 0  # of the memory when it was filled
        self.lent = False  # whether a tensor or an address of this memory was handed out

    def fill(self) -> Tensor:
        if self.memory is None:
            self.keep(self.recipe.values())
        return self.memory

    def keep(self, values: Tensor) -> None:
        self.memory, self.version = values, version_of(values)

    @property
    def exposed(self) -> bool:
        """Whether the memory can differ from the values that the head computes."""
        return self.lent or (self.memory is not None and version_of(self.memory) != self.version)


def version_of(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


class Shared(Tensor):
    """A tensor without memory of its own; see the module's docstring."""

    cell: Cell
    path: tuple[Callable[[Tensor], Tensor], ...]  # from the memory of the cell to these values
    own: Tensor | None  # values that only this tensor reads, while the cell is empty

    @staticmethod
    def blank(kind: type, shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
        t: Any = Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)
        torch._C._set_throw_on_mutable_data_ptr(t)  # where no function of ours sees the access
        t.path, t.own = (), None
        return t

    @property
    def known(self) -> bool:
        return self.cell.memory is not None or self.own is not None

    def values(self) -> Tensor:
        """The values without history, in memory that must not be handed out."""
        if self.cell.memory is None and self.own is not None:
            return self.own
        t = self.cell.fill()
        for view in self.path:
            t = view(t)
        return t

    def read(self) -> Tensor:
        """The values without history, for code that asked for them."""
        return self.values()

    def plain(self) -> Tensor:
        """The values as a plain tensor, with its autograd history."""
        return self.read()

    def like(self) -> Tensor:
        """A tensor without values and with the strides of the memory that is handed out."""
        t = torch.empty(self.cell.recipe.shape, device="meta")
        for view in self.path:
            t = view(t)
        return t

    def expose(self) -> None:
        """Fills the cell, because the caller hands out its memory."""
        self.cell.fill()
        self.cell.lent, self.own = True, None

    def alias(self, other: "Shared") -> Any:
        """Makes this tensor an alias of `other`, with its memory and values."""
        self.cell, self.path, self.own = other.cell, other.path, other.own
        return self

    def __repr__(self, **_) -> str:
        return repr(self.plain())

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_of_tensor(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with called(func):
            if writes(func, args, kwargs):
                return write(func, args, kwargs)
            for function in TABLE:
                result = function(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            return on_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if written(func, args, kwargs):
            return write(func, args, kwargs)
        return on_values(func, args, kwargs, lambda t: t.read())


class Part(Shared):
    """Values in memory that PyTorch would share with logits, such as one column of them."""

    @staticmethod
    def of(t: Shared, view: Callable, values: Tensor) -> "Part":
        part = Shared.blank(Part, values.shape, values.dtype, values.device)
        part.cell, part.path, part.own = t.cell, (*t.path, view), values
        return part


TABLE: list[Callable] = []  # functions that keep logits lazy (torch_functions.py)
NAMES = [
    "size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "register_hook", "retain_grad", "requires_grad_", "backward", "storage_offset",
    "__hash__", "__repr__", "is_inference", "is_signed", "get_device", "ndimension", "is_same_size",
    "register_post_accumulate_grad_hook", "__len__", "_is_view", "has_names", "is_pinned",
    "__format__",
]  # fmt: skip
# Functions that read no values. All other unknown functions get the values.
OF_TENSOR = {getattr(T, name) for name in NAMES if hasattr(T, name)}
OF_TENSOR |= {
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor, torch.is_same_size,
    torch.autograd.backward, torch.autograd.grad,
}  # fmt: skip
ADDRESSES = {
    T.data_ptr, T.untyped_storage, T.storage, T._typed_storage, T.__dlpack__, T.numpy, T.__array__,
    T.__cuda_array_interface__.__get__,
}  # fmt: skip
GETTERS = {
    T.data.__get__, T.T.__get__, T.mT.__get__, T.H.__get__, T.mH.__get__, T.real.__get__,  # type: ignore
    T.imag.__get__, T.__cuda_array_interface__.__get__, T.data.__set__,  # type: ignore
}  # fmt: skip
LIKE = {T.to, T.type_as, T.view_as, T.expand_as, T.reshape_as}  # read only the first argument
COPIERS = {T.__reduce_ex__, T.__deepcopy__}
MOVERS = {
    "unsqueeze_", "squeeze_", "transpose_", "t_", "swapdims_", "swapaxes_", "resize_", "detach_",
    "resize_as_", "set_", "as_strided_", "rename_", "__set__",
}  # fmt: skip


def is_of_tensor(func: Any) -> bool:
    return func in OF_TENSOR or (
        getattr(func, "__name__", "") in ("__get__", "__set__") and func not in GETTERS
    )


def on_values(func, args: tuple, kwargs: dict, read: Callable = lambda t: t.plain()) -> Any:
    """Runs a function on the values of its arguments. Results may share their memory."""
    first = args[0] if args else None
    takes = func in ADDRESSES
    while True:
        given: list[tuple[Shared, Tensor]] = []
        alike = str(getattr(func, "__name__", "")).split(".")[0]
        alike = alike.endswith("_like") or alike.startswith("new_")

        def value(t: Shared, alike=alike, given=given) -> Tensor:
            if alike or (func in LIKE and t is not first):  # no values are read
                return torch.empty((), dtype=t.dtype, device=t.device).expand(t.shape)
            if func in COPIERS:
                if t.requires_grad and not t.is_leaf:
                    return torch.empty(0).requires_grad_() * 1  # PyTorch's error
                return t.plain().detach().requires_grad_(t.requires_grad)
            if takes:
                t.expose()
            found = read(t)
            given.append((t, found))
            return found

        plain_args, plain_kwargs = pytree.tree_map_only(Shared, value, (args, kwargs))
        versions = [version_of(v) for _, v in given]
        result = func(*plain_args, **plain_kwargs)
        if versions != [version_of(v) for _, v in given]:
            raise RuntimeError(refusal(func, "the library did not expect this function to write"))
        owners = {id(v): t for t, v in given}  # a function may return its argument
        result = pytree.tree_map_only(Tensor, lambda t, o=owners: o.get(id(t), t), result)
        found = aliases(result, given)
        private = [t for t, _ in found if t.cell.memory is None]
        if not private:
            for t, _ in found:
                t.cell.lent = True
            return result
        history = torch.is_grad_enabled() and private[0].requires_grad
        if len(given) == 1 and not history:
            return as_parts(func, args, kwargs, private[0], result, given[0][1])
        for t in private:
            t.expose()


def aliases(result: Any, given: list) -> list[tuple[Shared, Tensor]]:
    """The arguments whose memory a result shares."""
    memory: dict[int, Shared] = {memory_of(v): t for t, v in given}
    leaves = pytree.tree_leaves(result) if given else ()
    tensors = (t for t in leaves if isinstance(t, Tensor) and not isinstance(t, Shared))
    return [(memory[memory_of(t)], t) for t in tensors if memory_of(t) in memory]


def memory_of(t: Tensor) -> int:
    """An id of a tensor's memory, which its views share."""
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


def as_parts(func, args: tuple, kwargs: dict, of: Shared, result: Any, values: Tensor) -> Any:
    """The results, those that share the memory of `values` as Parts.

    `values` are contiguous, so some are views only here, and copies for the strides of the memory.
    """
    leaves, tree = pytree.tree_flatten(result)

    def view(t: Tensor, i: int) -> Tensor:
        found = pytree.tree_map_only(Shared, lambda _: t, (args, kwargs))
        return pytree.tree_leaves(func(*found[0], **found[1]))[i]

    for i, t in enumerate(leaves):
        if isinstance(t, Tensor) and memory_of(t) == memory_of(values):
            like = of.like()
            is_view = memory_of(view(like, i)) == memory_of(like)
            leaves[i] = Part.of(of, lambda t, i=i: view(t, i), t) if is_view else t.clone()
    return pytree.tree_unflatten(leaves, tree)


# --- writes


def writes(func, args: tuple, kwargs: dict) -> bool:
    """Whether a function writes to its first argument, or to `out`."""
    name = getattr(func, "__name__", "")
    inside = name.endswith("_") and not name.endswith("__")
    inside = inside or name in ("__setitem__", "__set__") or kwargs.get("inplace") is True
    inside = inside or (name.startswith("__i") and hasattr(T, f"__{name[3:]}"))  # such as __iadd__
    inside = inside or (func is torch.nn.functional.relu and len(args) > 1 and args[1])
    first = args[0] if args else kwargs.get("input")
    found = pytree.tree_leaves(first) if isinstance(first, (list, tuple)) else [first]
    outs = pytree.tree_leaves(kwargs.get("out")) if "out" in kwargs else ()
    return any(isinstance(t, Shared) for t in (*(found if inside else ()), *outs))


def written(func, args: tuple, kwargs: dict) -> list:
    """The tensors that an operation writes to, as its schema tells."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        t = args[i] if i < len(args) else kwargs.get(argument.name)
        into = argument.alias_info is not None and argument.alias_info.is_write
        if (into or func._schema.name == "aten::set_") and t is not None:
            found += [one for one in pytree.tree_leaves(t) if isinstance(one, Shared)]
    return found


def write(func, args: tuple, kwargs: dict) -> Any:
    """Writes to the memory that all aliases share."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    reason = None
    if any(isinstance(t, Shared) and t.requires_grad for t in tensors):
        reason = "they need a gradient"
    elif torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        reason = "what is written needs a gradient"
    name = str(getattr(func, "__name__", "")).split(".")[0]
    if reason is None and (name in MOVERS or torch.Tag.inplace_view in getattr(func, "tags", ())):
        reason = "it would change their shape or their memory"
    if reason is not None:
        raise RuntimeError(refusal(func, reason))
    owners: dict[int, Shared] = {}

    def value(t: Shared) -> Tensor:
        t.expose()
        values = t.values()
        owners[id(values)] = t
        return values

    args, kwargs = pytree.tree_map_only(Shared, value, (args, kwargs))
    with torch.no_grad():
        result = func(*args, **kwargs)
    return pytree.tree_map_only(Tensor, lambda t: owners.get(id(t), t), result)


def refusal(func, reason: str) -> str:
    return (
        f"lazy logits must not be written to by {running(func)}, because {reason}."
        " Write to a copy instead: logits.materialize()."
    )


# --- the name of the running function, for warnings and errors

_called: ContextVar[Any] = ContextVar("called", default=None)


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
