"""A GEMM that sums dz.T @ h over chunks of rows, and stores the sum in block floating point.

The sum is the gradient of the weight (dz: gradient of the logits, h: hidden states). In bf16 it
would be rounded to 8 bits after every chunk, and in fp32 it would take twice the memory of the bf16
gradient. So between chunks it lives in the gradient's memory, as 16-bit integers that share one
exponent per BLOCK neighbouring columns of a row:

    x ≈ q 2^e, where q is an int16 with |q| ≤ 2^14, and e is an int8 per BLOCK columns

The largest number of a block keeps 14 bits; NaN or an infinity makes the whole block NaN. The first
chunk overwrites the memory, and the last one leaves the gradient in bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import config
from ..launch import launch
from ..numerics import only_if
from ..profiling import elements, profiled

BLOCK = 128  # number of columns that share one exponent
# bf16 elements in 16 bytes; the interpreter of Triton 3.5 wrongly aligns to 16 elements
PACK = 16 if knobs.runtime.interpret and triton.__version__.startswith("3.5.") else 8
BLOCK_R = 64  # rows of dz and h per step of the GEMM loop
STAGES = 3  # pipeline stages; three stages of tiles fit into shared memory
# 1.5 · 2^23: for |y| < 2^22, the bits of the float WHOLE + y end with the low 16 bits of round(y)
WHOLE = tl.constexpr(12582912.0)
NOT_A_NUMBER = tl.constexpr(127)  # the exponent that marks a block as NaN


@triton.jit
def _encode(x):
    """Returns integers q and exponents e with x ≈ q 2^e. Each row of x has one exponent e."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    e = tl.maximum((bits >> 23) - (127 + 13), -126)
    q = (x * tl.exp2(-e.to(tl.float32))[:, None] + WHOLE).to(tl.int32, bitcast=True).to(tl.int16)
    return q, tl.where(bits < 0x7F800000, e, NOT_A_NUMBER).to(tl.int8)


@triton.jit
def _decode(q, e):
    # the XOR gives the bits of the float 2^23 + 2^15 + q
    y = ((q.to(tl.int32) & 0xFFFF) ^ 0x4B008000).to(tl.float32, bitcast=True) - 8421376.0
    scale = tl.where(e == NOT_A_NUMBER, float("nan"), tl.exp2(e.to(tl.float32)))
    return y * scale[:, None]


@triton.jit
def _add(x, e, SUM, OUT, at, mask, v, d, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Adds a tile x to the sum, at row v and column d.

    `e` holds the sum's old exponents; the new ones go to the addresses `at`. After the LAST chunk,
    the sum goes to OUT as floating-point numbers.
    """
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
    # a pointer, then tensor descriptors; SUM and OUT describe the same memory
    EXPONENTS, DZ, H, SUM, OUT,
    R, V, D, programs,  # sizes
    FIRST: tl.constexpr, LAST: tl.constexpr, TRANSPOSED: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Each program loops over tiles of the sum.

    Programs that run at the same time have consecutive tiles, of which many share columns of dz in
    the cache. With TRANSPOSED, DZ describes dz.T.
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
        # SUM goes through shared memory; two halves need less of it
        left, right = x.reshape(BLOCK_V, 2, BLOCK_D).permute(0, 2, 1).split()
        _add(left, e_here, SUM, OUT, at, here, v, d, FIRST, LAST)
        _add(right, e_there, SUM, OUT, at + V, there, v, d + BLOCK_D, FIRST, LAST)


def can_accumulate(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the weight's gradient can be accumulated in block floating point."""
    bf16 = hidden.dtype == weight.dtype == torch.bfloat16
    return bf16 and weight.shape[1] % PACK == 0 and _fits_tiles(hidden.device)


def _fits_tiles(device: torch.device) -> bool:
    """Whether the tiles fit into shared memory: on Hopper and on data-center Blackwell.

    Triton's interpreter has no limit.
    """
    if device.type != "cuda" or torch.version.hip:
        return device.type == "cpu"
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def exponents(total: Tensor) -> Tensor:
    """Allocates the exponents for a sum of shape (V, D)."""
    V, D = total.shape
    return torch.empty((config.ceil_div(D, BLOCK), V), device=total.device, dtype=torch.int8)


def accumulate(
    dz: Tensor,  # (R, V), with contiguous rows or contiguous columns
    h: Tensor,  # (R, D)
    total: Tensor,  # (V, D), updated in place
    exponents: Tensor,  # (blocks, V), updated in place
    first: bool,
    last: bool,
) -> None:
    """Adds dz.T @ h to `total`. The first call overwrites it, and the last converts it to bf16."""
    (R, V), D = dz.shape, h.shape[1]
    cut = config.blockfp_gemm()
    transposed = dz.stride(0) == 1 and dz.stride(1) >= R
    programs = config.processors(dz.device)
    launch(
        _blockfp_gemm_kernel, (programs,),
        (
            exponents,
            tiles_of(aligned_matrix(dz.t()), cut.block_v, BLOCK_R) if transposed
            else tiles_of(aligned_matrix(dz), BLOCK_R, cut.block_v),
            tiles_of(aligned_matrix(h), BLOCK_R, 2 * BLOCK),
            tiles_of(total.view(torch.int16), cut.block_v, BLOCK),
            tiles_of(total, cut.block_v, BLOCK),
        ),
        (R, V, D, programs),
        num_warps=cut.num_warps, num_stages=STAGES,
        FIRST=first, LAST=last, TRANSPOSED=transposed,
        UPCAST=knobs.runtime.interpret,  # the interpreter cannot multiply bf16
        BLOCK_V=cut.block_v, BLOCK_D=BLOCK, BLOCK_R=BLOCK_R,
    )  # fmt: skip


def aligned_matrix(t: Tensor) -> Tensor:
    """Returns t, or a copy, with contiguous rows that start on 16-byte boundaries."""
    if is_aligned(t):
        return t
    rows, columns = t.shape
    room = torch.empty(
        (rows, config.ceil_div(columns, PACK) * PACK), device=t.device, dtype=t.dtype
    )
    return room[:, :columns].copy_(t)


def is_aligned(t: Tensor) -> bool:
    packed = t.stride(1) == 1 and t.stride(0) >= t.shape[1]
    return packed and t.stride(0) % PACK == 0 and t.data_ptr() % 16 == 0


def tiles_of(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])
