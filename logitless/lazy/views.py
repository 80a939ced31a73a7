"""Views and slices of lazy logits: operations that rearrange rows, or select rows or columns."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .gradient import pulled_back
from .logits import LazyLogits, LazyOp
from .recipe import constant


def axis_of(z: LazyLogits) -> int:
    """Which dimension is the vocabulary, counted from the front."""
    return z.dim() - 1 if z.recipe.axis is None else z.recipe.axis


class _Filled(torch.autograd.Function):
    """A leaf without memory of its own, with the values of another tensor."""

    @staticmethod
    def forward(ctx, blank, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g, None


def _rows(
    z: LazyLogits, op: Callable[[Tensor], Tensor], on_logits: Callable | None = None, **changed
) -> LazyLogits:
    """Lazy logits whose leading dimensions `op` rearranges.

    `op` is for the hidden states and leaves their last dimension alone; `on_logits` is the same for
    the logits, if it differs. `op` is applied to the hidden states at once, under autograd.
    Backward follows that graph, which keeps no hidden states alive: `leaf` has no memory of its
    own.
    """
    recipe = z.recipe
    with torch.inference_mode(False), torch.enable_grad():
        before = recipe.head.hidden
        leaf = before.new_empty(()).expand(before.shape).requires_grad_()
        moved = op(_Filled.apply(leaf, constant(before)))  # pyright: ignore
        edge, hidden = get_gradient_edge(moved), moved.detach()
    shape = hidden.shape

    def back(parts):
        d_hidden, *rest = parts
        if d_hidden is not None:
            (d_hidden,) = torch.autograd.grad(
                edge, leaf, d_hidden.reshape(shape), retain_graph=True,
                create_graph=torch.is_grad_enabled(),
            )  # fmt: skip
        return d_hidden, *rest

    _, *of_weight = recipe.versions
    new = recipe._replace(
        head=recipe.head._replace(hidden=hidden), versions=(hidden._version, *of_weight), **changed
    )
    return LazyOp.apply(z, new, back, on_logits or op, True)  # pyright: ignore


def _columns(z: LazyLogits, columns: slice) -> LazyLogits:
    recipe = z.recipe

    def cut(t: Tensor) -> Tensor:
        return t[columns]

    _, *rows_of_v = recipe.head.tensors  # weight and bias
    # Backward needs only their shapes.
    likes = [None if t is None else t.new_empty(()).expand(t.shape) for t in rows_of_v]

    def back(parts):
        d_hidden, *rest = parts
        pairs = zip(likes, rest, strict=True)
        return d_hidden, *(None if d is None else pulled_back(cut, t, d) for t, d in pairs)

    weight, bias = (None if t is None else cut(t) for t in rows_of_v)
    new = recipe._replace(head=recipe.head._replace(weight=weight, bias=bias))
    return LazyOp.apply(z, new, back, lambda t: t[..., columns], True)  # pyright: ignore


def _dim(z: LazyLogits, dim: int, new: int = 0) -> int:
    """A dimension counted from the front; with new=1, the place of a new one."""
    size = z.dim() + new
    if not -size <= dim < size:
        raise IndexError(f"dim must be in [{-size}, {size - 1}], got {dim}.")
    return dim % size


def view(z: LazyLogits, *shape, **kwargs):
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


def flatten(z: LazyLogits, start_dim: int = 0, end_dim: int = -1):
    start, end = _dim(z, start_dim), _dim(z, end_dim)
    if end == z.dim() - 1 and start != end:
        return NotImplemented
    return _rows(z, lambda t: t.flatten(start, end))


def squeeze(z: LazyLogits, dim: int | tuple[int, ...] | None = None):
    dims = range(z.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = tuple(_dim(z, d) for d in dims if z.shape[d] == 1)
    return NotImplemented if z.dim() - 1 in dims else _rows(z, lambda t: t.squeeze(dims))


def unsqueeze(z: LazyLogits, dim: int):
    dim = _dim(z, dim, new=1)
    return NotImplemented if dim == z.dim() else _rows(z, lambda t: t.unsqueeze(dim))


def permute(z: LazyLogits, *dims):
    """Dimensions in another order. The vocabulary may leave the last place, and come back."""
    dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    dims = [_dim(z, dim) for dim in dims]
    if sorted(dims) != list(range(z.dim())):
        return NotImplemented  # PyTorch raises
    last, at = z.dim() - 1, axis_of(z)
    rows = [dim for dim in range(z.dim()) if dim != at]
    order = [rows.index(dim) for dim in dims if dim != at]
    axis = dims.index(at)
    return _rows(
        z, lambda t: t.permute(*order, last), lambda t: t.permute(dims),
        axis=None if axis == last else axis,
    )  # fmt: skip


def transpose(z: LazyLogits, dim0: int, dim1: int):
    dims = list(range(z.dim()))
    dim0, dim1 = _dim(z, dim0), _dim(z, dim1)
    dims[dim0], dims[dim1] = dim1, dim0
    return permute(z, dims)


def movedim(z: LazyLogits, source: int | tuple[int, ...], destination: int | tuple[int, ...]):
    sources, places = (
        [_dim(z, dim) for dim in ((dims,) if isinstance(dims, int) else dims)]
        for dims in (source, destination)
    )
    if len(set(sources)) != len(sources) or len(set(places)) != len(sources):
        return NotImplemented  # PyTorch raises
    there = dict(zip(places, sources, strict=True))
    rest = iter(dim for dim in range(z.dim()) if dim not in sources)
    return permute(z, [there[i] if i in there else next(rest) for i in range(z.dim())])


def getitem(z: LazyLogits, index: Any):
    """Selects rows by any index, or columns by a slice if all rows are kept."""
    parts = list(index) if isinstance(index, tuple) else [index]
    arrays = [isinstance(part, list) or type(part).__module__ == "numpy" for part in parts]
    parts = [torch.as_tensor(p) if array else p for p, array in zip(parts, arrays, strict=True)]
    if any(isinstance(part, LazyLogits) for part in parts):
        return NotImplemented
    free = z.dim() - sum(_taken(part) for part in parts)
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[at : at + 1] = [slice(None)] * free
    *rows, last = parts
    if not isinstance(last, slice) or (free < 0):  # a column, or a mask over all dimensions
        return NotImplemented
    size = z.shape[-1]
    if last.indices(size) == (0, size, 1):
        return _rows(z, lambda t: t[(*rows, slice(None))])
    whole = all(isinstance(part, slice) and part == slice(None) for part in rows)
    if z.recipe.log or z.recipe.shard or not whole or last.step not in (None, 1):
        return NotImplemented
    return _columns(z, last)


def _taken(part: Any) -> int:
    """The number of dimensions that one item of an index consumes."""
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def narrow(z: LazyLogits, dim: int, start: int, length: int):
    dim = _dim(z, dim)
    if dim == z.dim() - 1 or isinstance(start, Tensor):
        return NotImplemented
    return _rows(z, lambda t: t.narrow(dim, start, length))


def index_select(z: LazyLogits, dim: int, index: Tensor):
    dim = _dim(z, dim)
    return NotImplemented if dim == z.dim() - 1 else _rows(z, lambda t: t.index_select(dim, index))


def split(z: LazyLogits, size: int | list[int], dim: int = 0):
    return _pieces(z, dim, torch.arange(z.shape[dim]).split(size))


def chunk(z: LazyLogits, chunks: int, dim: int = 0):
    return _pieces(z, dim, torch.arange(z.shape[dim]).chunk(chunks))


def _pieces(z: LazyLogits, dim: int, pieces: tuple[Tensor, ...]):
    if _dim(z, dim) == z.dim() - 1:
        return NotImplemented
    sizes = [len(piece) for piece in pieces]
    return tuple(narrow(z, dim, sum(sizes[:i]), size) for i, size in enumerate(sizes))


def unbind(z: LazyLogits, dim: int = 0):
    dim = _dim(z, dim)
    if dim == z.dim() - 1:
        return NotImplemented
    return tuple(_rows(z, lambda t, i=i: t.select(dim, i)) for i in range(z.shape[dim]))
