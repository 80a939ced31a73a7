"""The GEMMs of a head, and the functions that choose the dtypes of these GEMMs."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..contract import PRECISION, has_values
from ..core.source import is_dtensor
from .quantized import PLAIN, is_quantized, row_blocks

SLAB = 64 << 20  # the largest number of bytes of a temporary fp32 copy on a CPU
UNCHANGED = contextlib.nullcontext()  # a context manager that does nothing
UNIT = 64  # if `gemm` splits a matrix, the size of the first part is a multiple of UNIT
PADDED = 8  # `side_by_side` pads hidden states to a multiple of PADDED columns


def product(
    h: Tensor, weight: Tensor, bias: Tensor | None, low_rank: Tensor | None, out: Tensor
) -> Tensor:
    """Writes the logits of h to `out`, whose sums are not rounded to 16 bits if it is fp32."""
    if low_rank is None:
        return add_product(h, weight, bias, out)
    # The small product first, so that the GEMM of the large one adds it and rounds only once.
    first, second = two_parts(h, weight, low_rank)
    add_product(second, low_rank.to(h.dtype), bias, out)
    return add_product(first, weight, out, out)


def add_product(h: Tensor, weight: Tensor, add: Tensor | None, out: Tensor) -> Tensor:
    """Writes h @ weight.T + add to `out`. `add` is a bias (V,), `out` itself, or None."""
    if is_quantized(weight):
        for rows, block in row_blocks(weight, h.dtype):
            add_product(h, block, None if add is None else add[..., rows], out[:, rows])
        return out
    if out.dtype == h.dtype:
        return gemm(h, weight.t(), out, add)
    if h.is_cuda:
        bias = add is not None and add.dim() == 1
        return gemm(h, weight.t(), out, out.copy_(add) if bias else add)
    h = h.to(out.dtype)
    step = max(SLAB // (out.element_size() * max(h.shape[1], 1)), 1)
    for start in range(0, len(weight), step):
        columns = slice(start, start + step)
        wide = weight[columns].to(out.dtype).t()
        if add is None:
            out[:, columns] = h @ wide
        else:
            out[:, columns] = torch.addmm(add[..., columns].to(out.dtype), h, wide)
    return out


def steady_product(
    backend: Any, h: Tensor, weight: Tensor, bias: Tensor | None, low_rank: Tensor | None,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """Like `product`, but the bits of a row do not depend on the other rows (ll.invariant).

    A quantised weight is dequantised as a whole.
    """
    first = h if low_rank is None else h[:, : weight.shape[1]].contiguous()
    backend.row_gemm(first, plain_weight(weight, h.dtype), out, bias, transposed=True)
    if low_rank is not None:
        _, second = two_parts(h, weight, low_rank)
        adapted = torch.empty_like(out)
        low_rank = low_rank.to(h.dtype).contiguous()
        out += backend.row_gemm(second.contiguous(), low_rank, adapted, None, transposed=True)
    return out


def steady_hidden_gradient(
    backend: Any, dz: Tensor, weight: Tensor, low_rank: Tensor | None, skips_first: bool,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """Like `hidden_gradient`, but the bits of a row do not depend on the other rows."""
    plain = plain_weight(weight, dz.dtype)
    if low_rank is None:
        return backend.row_gemm(dz, plain, out)
    parts = two_parts(out, weight, low_rank)
    out.zero_()
    for part, factor in zip(parts, (plain, low_rank.to(dz.dtype).contiguous()), strict=True):
        if part is parts[1] or not skips_first:
            found = torch.empty(part.shape, device=out.device, dtype=out.dtype)
            part.copy_(backend.row_gemm(dz, factor, found))
    return out


def plain_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.dequantize().to(dtype) if is_quantized(weight) else weight


def side_by_side(hidden: Tensor, *others: Tensor) -> Tensor:
    """Joins hidden states along the last dimension, and pads them with zeros.

    With a multiple of PADDED columns, 16-bit and 32-bit rows start on 16-byte boundaries.
    """
    width = hidden.shape[-1] + sum(t.shape[-1] for t in others)
    rest = hidden.new_zeros((*hidden.shape[:-1], -width % PADDED))
    return torch.cat([hidden, *others, rest], -1)


def two_parts(t: Tensor, weight: Tensor, low_rank: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of `hidden`, or of its gradient, that belong to `weight` and to `low_rank`."""
    width, rank = weight.shape[1], low_rank.shape[1]
    return t[..., :width], t[..., width : width + rank]


def hidden_gradient(
    dz: Tensor, weight: Tensor, low_rank: Tensor | None, skips_first: bool, out: Tensor | None
) -> Tensor:
    """Writes the gradient of `hidden` to `out`, which may be None without `low_rank`."""
    if low_rank is None or out is None:
        return times_weight(dz, weight, out)
    first, second = two_parts(out, weight, low_rank)
    if skips_first:
        first.zero_()
    else:
        times_weight(dz, weight, first)
    gemm(dz, low_rank.to(dz.dtype), second)
    out[:, first.shape[1] + second.shape[1] :] = 0
    return out


def times_weight(dz: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """dz @ weight. For a quantised weight, the products of its blocks are summed in fp32."""
    if not is_quantized(weight):
        return gemm(dz, weight, out)
    shape, full = (len(dz), weight.shape[1]), PRECISION[dz.dtype]
    total = torch.zeros(shape, device=dz.device, dtype=full)
    for rows, block in row_blocks(weight, dz.dtype):
        part = dz[:, rows]
        if dz.is_cuda or dz.dtype == full:
            gemm(part, block, total, total)
        else:
            total.addmm_(part.to(full), block.to(full))
    return total.to(dz.dtype) if out is None else out.copy_(total)


def gemm(a: Tensor, b: Tensor, out: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    """a @ b + add, where `add` can be `out`, or a single row that is added to all rows.

    A GEMM on a GPU is fast only if each matrix row is a multiple of 16 bytes. Dimensions that are
    not are split into an aligned part (`aligned_part`) and fewer than UNIT rows or columns.
    """
    pack, (m, k), n = 16 // a.dtype.itemsize, a.shape, b.shape[1]
    if not ((m % pack or k % pack or n % pack) and reads_vectors(a)):
        return plain_gemm(a, b, out, add)
    if out is None:
        out = torch.empty((m, n), device=a.device, dtype=a.dtype)
    columns, rows, terms = aligned_part(out, 1), aligned_part(a, 0), aligned_part(a, 1)
    for b_n, out_n, add_n in in_two(columns, -1, b, out, add):
        for a_m, out_mn, add_mn in in_two(rows, -2, a, out_n, add_n):
            if terms == k:
                plain_gemm(a_m, b_n, out_mn, add_mn)
                continue
            # The small GEMM runs first, so that the large GEMM rounds its sum only once.
            plain_gemm(a_m[:, terms:], b_n[terms:], out_mn, add_mn)
            plain_gemm(a_m[:, :terms], b_n[:terms], out_mn, out_mn)
    return out


def in_two(size: int, dim: int, source: Tensor, out: Tensor, add: Tensor | None) -> Iterable[tuple]:
    """(source, out, add) in two, the first of `size` columns (dim=-1) or rows (dim=-2).

    `source` is b of `gemm` for columns, and a for rows. A single row `add` is not split along rows.
    """
    sizes = (size, out.shape[dim] - size)
    if sizes[1] == 0:
        return ((source, out, add),)
    whole = add is None or add.dim() < -dim
    adds = (add, add) if whole else torch.split_with_sizes(add, sizes, dim)
    views = (torch.split_with_sizes(t, sizes, dim) for t in (source, out))
    return zip(*views, adds, strict=True)


def aligned_part(t: Tensor, dim: int) -> int:
    """Size of t along `dim` in the large GEMM: rounded down to UNIT if t is padded there.

    Padded means that the rows (dim=1) or columns (dim=0) start, but do not end, on 16 bytes.
    """
    size, pack = t.shape[dim], 16 // t.element_size()
    padded = size % pack and t.stride(dim) == 1 and t.stride(1 - dim) % pack == 0
    return size - size % UNIT if padded and size > UNIT else size


def reads_vectors(t: Tensor) -> bool:
    """Whether unaligned rows make GEMMs with this tensor several times slower."""
    return t.is_cuda


def is_aligned(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch.mm is as fast as `gemm` for logits hidden (N, D) @ weight (V, D).T.

    V and D must fill 16 bytes, if the device cares; N is free, as logits are stored row by row.
    """
    pack, (vocab, width) = 16 // dtype.itemsize, weight.shape
    return not ((vocab % pack or width % pack) and reads_vectors(weight))


def plain_gemm(a: Tensor, b: Tensor, out: Tensor | None, add: Tensor | None) -> Tensor:
    """Like `gemm`, but never splits. If a and b are 16-bit tensors, `out` can be fp32."""
    if out is None and add is None:  # without keyword arguments, torch.mm takes less host time
        return torch.mm(a, b)
    wide = {} if out is None or out.dtype == a.dtype else {"out_dtype": out.dtype}
    # Without values, nothing is added, because PyTorch has no fake addmm with out_dtype.
    if add is None or (wide and not has_values(a)):
        return torch.mm(a, b, out=out, **wide)
    return torch.addmm(add, a, b, out=out, **wide)  # type: ignore


def flat(hidden: Tensor) -> Tensor:
    return hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])


def padded_memory(rows: int, vocab: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for logits (rows, vocab), each row on 16 bytes on a GPU: `gemm` is fast for any V."""
    width = padded_width(vocab, like, dtype)
    padded = torch.empty((rows, width), device=like.device, dtype=dtype)
    return padded if width == vocab else padded[:, :vocab]


def padded_width(vocab: int, like: Tensor, dtype: torch.dtype) -> int:
    pack = 16 // dtype.itemsize if reads_vectors(like) else 1
    return -(-vocab // pack) * pack


def padded_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_rank: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The logits (..., V) of hidden (..., D) in `padded_memory`, without a gradient."""
    h, vocab = flat(hidden), weight.shape[0]
    if is_dtensor(weight) or (low_rank is None and is_aligned(weight, dtype)):
        x = dense_logits(h, weight, bias, None, dtype)
    else:
        x = product(h, weight, bias, low_rank, padded_memory(h.shape[0], vocab, h, dtype))
    return x if h is hidden else x.view(*hidden.shape[:-1], vocab)


def dense_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_rank: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The materialised logits (..., V), contiguous and differentiable."""
    if low_rank is not None:
        first, second = two_parts(hidden, weight, low_rank)
        adapted = dense_logits(second, low_rank.to(hidden.dtype), None, None, dtype)
        return dense_logits(first, weight, bias, None, dtype) + adapted
    if dtype == hidden.dtype and (type(weight) in PLAIN or not is_quantized(weight)):
        return torch.nn.functional.linear(hidden, weight, bias)
    wanted = any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    differentiable = torch.compiler.is_compiling() or (torch.is_grad_enabled() and wanted)
    if differentiable or is_dtensor(weight):  # torch.mm has no out_dtype for a DTensor
        weight = weight.dequantize() if is_quantized(weight) else weight
        tensors = (None if t is None else t.to(dtype) for t in (hidden, weight, bias))
        with without_autocast(hidden.device):
            return torch.nn.functional.linear(*tensors)
    flat = hidden.reshape(-1, hidden.shape[-1])
    out = torch.empty((len(flat), len(weight)), device=flat.device, dtype=dtype)
    with without_autocast(hidden.device):
        return add_product(flat, weight, bias, out).view(*hidden.shape[:-1], len(weight))


def autocasts(device: torch.device) -> bool:
    if not torch._C._is_any_autocast_enabled():  # six times as fast as is_autocast_enabled
        return False
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device):
    if not autocasts(device):
        return UNCHANGED
    return torch.autocast(device.type, enabled=False)


def cast_by_autocast(t: Tensor) -> Tensor:
    """Casts t as autocast does in F.linear, which leaves fp64 as it is."""
    if not isinstance(t, Tensor) or t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return t
    if is_quantized(t):  # `row_blocks` casts each block of a quantised weight
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))
