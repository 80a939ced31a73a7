"""Σ dz.T @ h over chunks, in the gradient's own 16 bits, exact to 14 of them.

A sum kept in bf16 is rounded to 8 bits after every chunk, and a sum in fp32 takes twice the memory
of the gradient. Here, between chunks, the sum is stored as integers with a common exponent: 16 bits
a number, in the memory of the gradient, and a byte for each BLOCK columns of a row. The first chunk
has nothing to add to, and the last one writes the gradient itself.

    x ≈ q 2^e        |q| ≤ 2^14, q an int16        e of BLOCK columns of a row, an int8

A block with a NaN or an infinity in it is NaN from then on.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from . import config
from .launch import REMEMBERED, Launch
from .numerics import only_if
from .profiling import elements, profiled

BLOCK = 128  # columns with one exponent
# Numbers in 16 bytes; but the interpreter of Triton 3.5 wants 16 numbers where it means 16 bytes.
PACK = 16 if knobs.runtime.interpret and triton.__version__.startswith("3.5.") else 8
BLOCK_R = 64  # rows of a step of the product
STAGES = 3  # steps whose tiles are on their way: as many as shared memory holds
WHOLE = tl.constexpr(12582912.0)  # 1.5 · 2^23: added to |y| < 2^22, it leaves y rounded in its bits
NOT_A_NUMBER = tl.constexpr(127)  # as an exponent


@triton.jit
def _encode(x):
    """(q, e) of rows of x, such that x ≈ q 2^e."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    e = tl.maximum((bits >> 23) - (127 + 13), -126)
    q = (x * tl.exp2(-e.to(tl.float32))[:, None] + WHOLE).to(tl.int32, bitcast=True).to(tl.int16)
    return q, tl.where(bits < 0x7F800000, e, NOT_A_NUMBER).to(tl.int8)


@triton.jit
def _decode(q, e):
    """q 2^e."""
    # As a number just above 2^23, whose last bits q + 2^15 are.
    y = ((q.to(tl.int32) & 0xFFFF) ^ 0x4B008000).to(tl.float32, bitcast=True) - 8421376.0
    scale = tl.where(e == NOT_A_NUMBER, float("nan"), tl.exp2(e.to(tl.float32)))
    return y * scale[:, None]


@triton.jit
def _add(x, e, SUM, OUT, at, mask, v, d, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Add a tile to the sum at (v, d), whose exponents are e and will be at `at`."""
    if not FIRST:
        x += _decode(SUM.load([v, d]), e)
    if LAST:
        OUT.store([v, d], x.to(OUT.dtype))
    else:
        q, e_new = _encode(x)
        SUM.store([v, d], q)
        tl.store(at, e_new, mask=mask)


@triton.jit(
    **profiled("blockfp_gemm", SUM=lambda args: 0 if args["FIRST"] else elements(args["SUM"])),
    do_not_specialize=["R"],
)
def _blockfp_gemm_kernel(
    EXPONENTS, DZ, H, SUM, OUT,  # tiles but for the first; SUM and OUT, of one memory, are outputs
    R, V, D, programs,  # sizes
    FIRST: tl.constexpr, LAST: tl.constexpr, TRANSPOSED: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program a tile after another: those at work together share columns of dz.

    dz.T is what lies in memory where TRANSPOSED.
    """
    across = tl.cdiv(D, 2 * BLOCK_D)
    tiles = tl.cdiv(V, BLOCK_V) * across
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=True):
        v, d = tile // across * BLOCK_V, tile % across * (2 * BLOCK_D)
        offs_v = v + tl.arange(0, BLOCK_V)
        at = EXPONENTS + (d // BLOCK_D).to(tl.int64) * V + offs_v
        here, there = offs_v < V, only_if(d + BLOCK_D < D, offs_v < V)
        e_here = tl.zeros((BLOCK_V,), tl.int8)
        e_there = e_here
        if not FIRST:
            e_here, e_there = tl.load(at, mask=here, other=0), tl.load(at + V, mask=there, other=0)
        x = tl.zeros((BLOCK_V, 2 * BLOCK_D), tl.float32)
        for r in range(0, R, BLOCK_R):
            if TRANSPOSED:
                dz = DZ.load([v, r])
            else:
                dz = DZ.load([r, v]).T
            h = H.load([r, d])
            if UPCAST:
                dz, h = dz.to(tl.float32), h.to(tl.float32)
            x = tl.dot(dz, h, x)
        # By halves: what is loaded, and stored, passes through shared memory.
        left, right = x.reshape(BLOCK_V, 2, BLOCK_D).permute(0, 2, 1).split()
        _add(left, e_here, SUM, OUT, at, here, v, d, FIRST, LAST)
        _add(right, e_there, SUM, OUT, at + V, there, v, d + BLOCK_D, FIRST, LAST)


def can_accumulate(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the gradient can be stored so between chunks, and the GPU has what adding needs.

    It is bf16, in rows that start on 16-byte boundaries.
    """
    bf16 = hidden.dtype == weight.dtype == torch.bfloat16
    return bf16 and weight.shape[1] % PACK == 0 and _copies_tiles(hidden.device)


def _copies_tiles(device: torch.device) -> bool:
    """Hopper and data-center Blackwell, with shared memory for such tiles; and the interpreter."""
    if device.type != "cuda" or torch.version.hip:
        return device.type == "cpu"
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def exponents(total: Tensor) -> Tensor:
    """Room for the exponents of a sum (V, D)."""
    V, D = total.shape
    return torch.empty((config.ceil_div(D, BLOCK), V), device=total.device, dtype=torch.int8)


def accumulate(
    dz: Tensor,  # (R, V), of which rows or columns may be contiguous
    h: Tensor,  # (R, D)
    total: Tensor,  # (V, D), written to
    exponents: Tensor,  # (blocks, V), written to
    first: bool,
    last: bool,
) -> None:
    """Add dz.T @ h to the total: set it if it is the first, convert it back to bf16 if the last."""
    (R, V), D = dz.shape, h.shape[1]
    cut = config.blockfp_gemm()
    transposed = dz.stride(0) == 1 and dz.stride(1) >= R
    _plan(R, V, D, config.processors(dz.device), first, last, transposed, cut)(
        exponents,
        _tiles(_aligned(dz.t()), cut.block_v, BLOCK_R)
        if transposed
        else _tiles(_aligned(dz), BLOCK_R, cut.block_v),
        _tiles(_aligned(h), BLOCK_R, 2 * BLOCK),
        _tiles(total.view(torch.int16), cut.block_v, BLOCK),
        _tiles(total, cut.block_v, BLOCK),
    )


@functools.lru_cache(REMEMBERED)
def _plan(
    R: int, V: int, D: int, programs: int, first: bool, last: bool, transposed: bool,
    cut: config.Config,
) -> Launch:  # fmt: skip
    return Launch(
        _blockfp_gemm_kernel, (programs,), (R, V, D, programs),
        num_warps=cut.num_warps, num_stages=STAGES,
        FIRST=first, LAST=last, TRANSPOSED=transposed,
        UPCAST=knobs.runtime.interpret,  # it multiplies no bf16
        BLOCK_V=cut.block_v, BLOCK_D=BLOCK, BLOCK_R=BLOCK_R,
    )  # fmt: skip


def _aligned(t: Tensor) -> Tensor:
    """A matrix whose rows start on 16-byte boundaries: itself, or a copy."""
    rows, columns = t.shape
    packed = t.stride(1) == 1 and t.stride(0) >= columns
    if packed and t.stride(0) % PACK == 0 and t.data_ptr() % 16 == 0:
        return t
    room = torch.empty(
        (rows, config.ceil_div(columns, PACK) * PACK), device=t.device, dtype=t.dtype
    )
    return room[:, :columns].copy_(t)


def _tiles(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])
