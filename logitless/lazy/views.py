"""Operations that rearrange or select lazy logits: views, slices, torch.cat and torch.stack."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..contract import has_values
from ..heads.head import Head
from ..heads.quantized import is_freed, is_quantized, storage_of
from .deferred import memory_of
from .gradient import pulled_back
from .logits import LazyLogits, kept
from .nodes import LazyCat, Op
from .origin import Filled
from .recipe import Recipe, constant, own


def axis_of(z: LazyLogits) -> int:
    return z.dim() - 1 if z.recipe.axis is None else z.recipe.axis


def _rows(
    z: LazyLogits, op: Callable[[Tensor], Tensor], on_logits: Callable | None = None, **changed
) -> LazyLogits:
    """Lazy logits whose leading dimensions are rearranged by `op`.

    `op` is applied to the hidden states immediately, and must keep their last dimension;
    `on_logits`, by default `op`, is the same operation on logits. Autograd records `op` from
    `leaf`, a tensor without memory, so that the graph holds no hidden states.
    """
    recipe = z.recipe
    with torch.inference_mode(False), torch.enable_grad():
        before = recipe.head.hidden
        leaf = before.new_empty(()).expand(before.shape).requires_grad_()
        try:
            moved = op(Filled.apply(leaf, constant(before)))  # pyright: ignore
        except (IndexError, RuntimeError):
            # Repeats the operation on a tensor of z's shape, so that the error names z.shape.
            (on_logits or op)(before.new_empty(()).expand(z.shape))
            raise
        edge, hidden = get_gradient_edge(moved), moved.detach()
    shape = hidden.shape
    # A view of the logits has hidden states that are a view. Indexing by a tensor copies them.
    is_view = memory_of(hidden) == memory_of(before)

    def back(parts):
        d_hidden, *rest = parts
        if d_hidden is not None:
            (d_hidden,) = torch.autograd.grad(
                edge, leaf, d_hidden.reshape(shape), retain_graph=True,
                create_graph=torch.is_grad_enabled(),
            )  # fmt: skip
        return d_hidden, *rest

    new = recipe.with_rows(op, hidden).replace(**changed)
    return kept(z, new, back, Op(on_logits or op, is_view=is_view))


def _columns(z: LazyLogits, columns: slice):
    recipe = z.recipe
    weight = recipe.head.weight
    if is_quantized(weight) or is_freed(weight):
        return NotImplemented

    def cut(t: Tensor) -> Tensor:
        return t[columns]

    _, *rows_of_v = recipe.head.tensors
    # Backward needs only the shapes of `weight` and `bias`.
    likes = [None if t is None else t.new_empty(()).expand(t.shape) for t in rows_of_v]

    def back(parts):
        d_hidden, *rest = parts
        pairs = zip(likes, rest, strict=True)
        return d_hidden, *(None if d is None else pulled_back(cut, t, d) for t, d in pairs)

    weight, bias, low_rank = (None if t is None else cut(t) for t in rows_of_v)
    op = Op(lambda t: t[..., columns], is_view=True)
    return kept(z, recipe.with_head(weight=weight, bias=bias, low_rank=low_rank), back, op)


def _dim(z: LazyLogits, dim: int, new: int = 0) -> int:
    """`dim` as a nonnegative number, where the operation adds `new` dimensions."""
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
    if last == -1:  # here, -1 must stand for the size of the vocabulary
        last = z.shape[-1] if -1 not in lead and known == rows else None
    if last != z.shape[-1] or lead.count(-1) > 1 or z.numel() == 0:
        return NotImplemented
    lead = [rows // max(known, 1) if size == -1 else size for size in lead]
    return _rows(z, lambda t: t.reshape(*lead, t.shape[-1]), lambda t: t.reshape(tuple(shape)))


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
    """Permutes the dimensions of the logits, including the dimension of the vocabulary."""
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
    """Selects rows by any index, and columns by a slice if all rows are kept.

    If an index selects both in logits for inference (`Recipe.inference`), the values of the
    selected rows are computed first.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, LazyLogits) for part in parts):
        return NotImplemented
    arrays = [isinstance(part, list) or type(part).__module__ == "numpy" for part in parts]
    parts = [_ids(p) if array else p for p, array in zip(parts, arrays, strict=True)]
    parts = [own(p) if isinstance(p, Tensor) else p for p in parts]
    free = z.dim() - sum(_taken(part) for part in parts)
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[at : at + 1] = [slice(None)] * free
    *rows, last = parts
    if free < 0:
        return NotImplemented
    if z.recipe.inference:
        return _part(z, rows, last)
    return _selected(z, rows, last)


def _part(z: LazyLogits, rows: list, last: Any):
    """Selects rows and columns of logits for inference, and computes only the selected rows."""
    chosen = _selected(z, rows, last)
    whole = all(isinstance(part, slice) and part == slice(None) for part in rows)
    if chosen is not NotImplemented or whole:
        return chosen
    if all(isinstance(part, (int, slice)) for part in rows):
        return _selected(z, rows, slice(None))[..., last]
    ids = [part for part in (*rows, last) if isinstance(part, Tensor)]
    if len(ids) < z.dim() or any(t.dtype in MASKS or t.device != z.device for t in ids):
        return NotImplemented
    *_, last = torch.broadcast_tensors(*ids)
    return _selected(z, rows, slice(None)).gather(-1, last.long()[..., None])[..., 0]


def _selected(z: LazyLogits, rows: list, last: Any):
    if not isinstance(last, slice):  # the index selects single columns or values
        return NotImplemented
    size = z.shape[-1]
    if last.indices(size) == (0, size, 1):
        return _rows(z, lambda t: t[(*rows, slice(None))])
    whole = all(isinstance(part, slice) and part == slice(None) for part in rows)
    if z.recipe.logits is None or z.recipe.shard or not whole or last.step not in (None, 1):
        return NotImplemented
    return _columns(z, last)


def _taken(part: Any) -> int:
    """The number of dimensions that one item of an index consumes: 2 for a 2-d mask."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in MASKS else 1


MASKS = (torch.bool, torch.uint8)


def _ids(part: Any) -> Tensor:
    ids = torch.as_tensor(part)
    return ids.long() if isinstance(part, list) and ids.numel() == 0 else ids


def narrow(z: LazyLogits, dim: int, start: int, length: int):
    dim = _dim(z, dim)
    if dim == z.dim() - 1 or isinstance(start, Tensor):
        return NotImplemented
    return _rows(z, lambda t: t.narrow(dim, start, length))


def index_select(z: LazyLogits, dim: int, index: Tensor):
    dim, index = _dim(z, dim), own(index)
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


def cat(tensors, dim: int = 0):
    """torch.cat of lazy logits of the same head, by joining their hidden states."""
    first = tensors[0]
    if not all(isinstance(z, LazyLogits) and z.from_head for z in tensors):
        return NotImplemented
    dim, recipes = _dim(first, dim), [z.recipe for z in tensors]
    alike = all(_same_head(recipe, recipes[0]) for recipe in recipes)
    # Only the first batch gets the gradient of the weight, summed over all batches, so that either
    # all or none must need it. The same holds for the bias.
    alike = alike and all(r.needs[1:] == recipes[0].needs[1:] for r in recipes)
    alike = alike and len({z.requires_grad for z in tensors}) == 1
    ranks = {z.dim() for z in tensors}
    watched = any(z._backward_hooks or z.retains_grad for z in tensors)
    if not alike or len(ranks) > 1 or dim == first.dim() - 1 or watched:
        return NotImplemented
    for recipe in recipes:
        recipe.check()
    with torch.inference_mode(False), torch.no_grad():
        hidden = torch.cat([recipe.head.hidden for recipe in recipes], dim)
    needs = tuple(any(r.needs[i] for r in recipes) for i in range(4))
    trains = any(r.trains for r in recipes)
    inference = all(r.inference for r in recipes)
    recipe = recipes[0].with_head(hidden=hidden)
    recipe = recipe.replace(needs=needs, trains=trains, inference=inference)
    return LazyCat.apply(recipe, dim, *tensors)


def stack(tensors, dim: int = 0):
    """torch.stack of lazy logits of the same head, by stacking their hidden states."""
    first = tensors[0]
    if not all(isinstance(z, LazyLogits) and z.from_head for z in tensors):
        return NotImplemented
    dim = _dim(first, dim, new=1)
    alike = all(z.shape == first.shape and _same_head(z.recipe, first.recipe) for z in tensors)
    watched = any(z._backward_hooks or z.retains_grad for z in tensors)
    if not alike or dim == first.dim() or watched:
        return NotImplemented
    return cat([unsqueeze(z, dim) for z in tensors], dim)


def _same_head(a: Recipe, b: Recipe) -> bool:
    plain = all(r.axis is None and r.shard is None and r.direct is not None for r in (a, b))
    same = plain and a.formula == b.formula and a.versions[1:] == b.versions[1:]
    same = same and all(map(is_alias, a.head.tensors[1:], b.head.tensors[1:]))
    return same and options_of(a.head) == options_of(b.head)


def options_of(head: Head) -> Head:
    """A copy of the head without tensors, for comparing the options of two heads."""
    return head.blank()


def is_alias(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether both have the same memory, shape, strides and dtype, or are None."""
    if x is None or y is None:
        return x is y

    def place(t: Tensor) -> tuple:
        if not has_values(t):
            memory = t.untyped_storage()._cdata
        else:
            memory = storage_of(t) if is_quantized(t) else t.data_ptr()
        return memory, t.shape, t.stride(), t.dtype, t.device

    return x is y or place(x) == place(y)
