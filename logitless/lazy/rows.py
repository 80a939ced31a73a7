"""Operations that rearrange or select rows and columns, and join rows of the same head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..contract import has_values
from ..core.source import needs_grad
from ..heads.quantized import is_freed, is_quantized, storage_of
from .logits import LazyLogits, derived
from .memory import Shared, memory_of
from .recipe import Recipe, own, purpose, same


def axis_of(z: LazyLogits) -> int:
    """The dimension of the vocabulary, as a nonnegative number."""
    return z.dim() - 1 if z.recipe.axis is None else z.recipe.axis


def rows(z: LazyLogits, op: Callable, on_logits: Callable | None = None, **changed) -> LazyLogits:
    """Rearranges or selects rows.

    `op` is applied to the hidden states, and must keep their last dimension; `on_logits`, by
    default `op`, is the same operation on logits.
    """
    recipe = z.recipe
    recipe.check_versions()
    before = recipe.head.hidden
    with torch.inference_mode(False):
        try:
            new = recipe.with_rows(op, **changed)
        except (IndexError, RuntimeError):
            # Repeats the operation on a tensor of z's shape, so that the error names z.shape.
            (on_logits or op)(before.new_empty(()).expand(z.shape))
            raise
    # A view of the logits has hidden states that are a view. Indexing by a tensor copies them.
    is_view = memory_of(new.head.hidden) == memory_of(before)
    return derived(new, z, view=(on_logits or op) if is_view else None)


def dim_of(z: LazyLogits, dim: int, new: int = 0) -> int:
    """Returns `dim` as a nonnegative number. The operation adds `new` dimensions."""
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
    size, width = z.shape, z.shape[-1]
    count = size[:-1].numel()  # type: ignore
    known = torch.Size([n for n in lead if n != -1]).numel()
    if last == -1:  # here, -1 must stand for the size of the vocabulary
        last = width if -1 not in lead and known == count else None
    if last != width or lead.count(-1) > 1 or not count * width:
        return NotImplemented
    lead = [count // max(known, 1) if n == -1 else n for n in lead]
    return rows(z, lambda t: t.reshape(*lead, t.shape[-1]), lambda t: t.reshape(tuple(shape)))


def flatten(z: LazyLogits, start_dim: int = 0, end_dim: int = -1):
    start, end = dim_of(z, start_dim), dim_of(z, end_dim)
    if end == z.dim() - 1 and start != end:
        return NotImplemented
    return z if start == end else rows(z, lambda t: t.flatten(start, end))


def squeeze(z: LazyLogits, dim: int | tuple[int, ...] | None = None):
    dims = range(z.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = tuple(dim_of(z, d) for d in dims if z.shape[d] == 1)
    return NotImplemented if z.dim() - 1 in dims else rows(z, lambda t: t.squeeze(dims))


def unsqueeze(z: LazyLogits, dim: int):
    dim = dim_of(z, dim, new=1)
    return NotImplemented if dim == z.dim() else rows(z, lambda t: t.unsqueeze(dim))


def permuted(function: Callable):
    """Returns a version of torch.permute or of another permutation of dimensions."""

    def permute(z: LazyLogits, *args, **kwargs):
        last, at = z.dim() - 1, axis_of(z)
        numbered = torch.empty(tuple(range(z.dim())), device="meta")  # dimension i has the size i
        dims = tuple(function(numbered, *args, **kwargs).shape)
        others = [dim for dim in range(z.dim()) if dim != at]
        order = [others.index(dim) for dim in dims if dim != at]
        axis = dims.index(at)
        return rows(
            z, lambda t: t.permute(*order, last), lambda t: t.permute(dims),
            axis=None if axis == last else axis,
        )  # fmt: skip

    return permute


MASKS = (torch.bool, torch.uint8)


def getitem(z: LazyLogits, index: Any):
    """Selects rows by any index, and columns by a slice if all rows are kept.

    If an index selects both in logits without gradients, the values of the selected rows are
    computed first.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, Shared) for part in parts):
        return NotImplemented
    arrays = [isinstance(part, list) or type(part).__module__ == "numpy" for part in parts]
    parts = [_ids(p) if array else p for p, array in zip(parts, arrays, strict=True)]
    parts = [own(p) if isinstance(p, Tensor) else p for p in parts]
    free = z.dim() - sum(map(_taken, parts))
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[at : at + 1] = [slice(None)] * free
    *lead, last = parts
    if free < 0:
        return NotImplemented
    chosen = _selected(z, lead, last)
    whole = all(isinstance(part, slice) and part == slice(None) for part in lead)
    if z.sends or chosen is not NotImplemented or whole:
        return chosen
    if all(isinstance(part, (int, slice)) for part in lead):
        return _selected(z, lead, slice(None))[..., last]
    ids = [part for part in parts if isinstance(part, Tensor)]
    if len(ids) < z.dim() or any(t.dtype in MASKS or t.device != z.device for t in ids):
        return NotImplemented
    last = torch.broadcast_tensors(*ids)[-1]
    return _selected(z, lead, slice(None)).gather(-1, last.long()[..., None])[..., 0]


def _selected(z: LazyLogits, lead: list, last: Any):
    size = z.shape[-1]
    if not isinstance(last, slice):  # the index selects single columns or values
        return NotImplemented
    if last.indices(size) == (0, size, 1):
        return rows(z, lambda t: t[(*lead, slice(None))])
    whole = all(isinstance(part, slice) and part == slice(None) for part in lead)
    recipe = z.recipe
    if recipe.logits is None or recipe.shard or not whole or last.step not in (None, 1):
        return NotImplemented
    if is_quantized(recipe.head.weight) or is_freed(recipe.head.weight):
        return NotImplemented
    new = recipe.map(same, lambda t: t[last])
    return derived(new, z, view=lambda t: t[..., last])


def _taken(part: Any) -> int:
    """The number of dimensions that one item of an index consumes, for example 2 for a 2-d mask."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in MASKS else 1


def _ids(part: Any) -> Tensor:
    ids = torch.as_tensor(part)
    return ids.long() if isinstance(part, list) and ids.numel() == 0 else ids


def narrow(z: LazyLogits, dim: int, start: int, length: int):
    dim = dim_of(z, dim)
    if dim == z.dim() - 1 or isinstance(start, Tensor):
        return NotImplemented
    return rows(z, lambda t: t.narrow(dim, start, length))


def index_select(z: LazyLogits, dim: int, index: Tensor):
    dim, index = dim_of(z, dim), own(index)
    return NotImplemented if dim == z.dim() - 1 else rows(z, lambda t: t.index_select(dim, index))


def split(z: LazyLogits, size: int | list[int], dim: int = 0):
    return _pieces(z, dim, torch.arange(z.shape[dim]).split(size))


def chunk(z: LazyLogits, chunks: int, dim: int = 0):
    return _pieces(z, dim, torch.arange(z.shape[dim]).chunk(chunks))


def _pieces(z: LazyLogits, dim: int, pieces: tuple[Tensor, ...]):
    if dim_of(z, dim) == z.dim() - 1:
        return NotImplemented
    sizes = [len(piece) for piece in pieces]
    return tuple(narrow(z, dim, sum(sizes[:i]), size) for i, size in enumerate(sizes))


def unbind(z: LazyLogits, dim: int = 0):
    dim = dim_of(z, dim)
    if dim == z.dim() - 1:
        return NotImplemented
    return tuple(rows(z, lambda t, i=i: t.select(dim, i)) for i in range(z.shape[dim]))


def cat(tensors, dim: int = 0, join: Callable = torch.cat, new: int = 0):
    """Joins the hidden states of lazy logits of the same head."""
    first = tensors[0]
    if not all(isinstance(z, LazyLogits) and z.from_head for z in tensors):
        return NotImplemented
    dim, recipes = dim_of(first, dim, new), [z.recipe for z in tensors]
    alike = all(_same_head(recipe, recipes[0]) for recipe in recipes)
    alike = alike and all(z.dim() == first.dim() and z.sends == first.sends for z in tensors)
    if not alike or dim == first.dim() - 1 + new:
        return NotImplemented
    for recipe in recipes:
        recipe.check()
    with torch.inference_mode(False):
        hidden = join([recipe.head.hidden for recipe in recipes], dim)
    head = recipes[0].head.replace(hidden=hidden)
    return derived(recipes[0].with_head(head, **purpose(*recipes)), *tensors)


def stack(tensors, dim: int = 0):
    if any(t.shape != tensors[0].shape for t in tensors):
        return NotImplemented
    return cat(tensors, dim, torch.stack, new=1)


def _same_head(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes differ only in their hidden states."""
    plain = all(r.axis is None and r.shard is None and r.direct is not None for r in (a, b))
    same = plain and a.direct == b.direct and a.versions[1:] == b.versions[1:]
    pairs = list(zip(a.head.tensors[1:], b.head.tensors[1:], strict=True))
    same = same and all(is_alias(x, y) and needs_grad(x) == needs_grad(y) for x, y in pairs)
    return same and a.head.blank() == b.head.blank()


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
