"""A GEMM in which the bits of each result row do not depend on the number of rows.

A library chooses its kernel, and so the order of the sums, by the shapes. Here one program computes
a whole tile, BLOCK_K columns of the first matrix per step from left to right, and the tile sizes
depend only on dtype and device (config.row_gemm).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from .. import config
from ..launch import launch
from ..profiling import nothing, profiled
from .blockfp_gemm import PACK, aligned_matrix, is_aligned, tiles_of

# rows of tiles in a group, whose programs share data in the cache
GROUP = 16


@triton.jit(
    **profiled("row_gemm", BIAS=nothing),
    do_not_specialize=["M"],
    do_not_specialize_on_alignment=["BIAS"],
)
def _row_gemm_kernel(
    # BIAS is a pointer, not read without HAS_BIAS; A, B and OUT are tensor descriptors
    BIAS, A, B, OUT,
    M, N, K, programs,  # sizes
    HAS_BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Each program loops over tiles, group by group, column by column, from top to bottom.

    The result is A @ B + BIAS, or A @ B.T + BIAS if TRANSPOSED.
    """
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), down * across, programs, flatten=True):
        first = tile // (GROUP * across) * GROUP
        height = tl.minimum(down - first, GROUP)
        m = (first + tile % (GROUP * across) % height) * BLOCK_M
        n = tile % (GROUP * across) // height * BLOCK_N
        x = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            a = A.load([m, k])
            if TRANSPOSED:
                b = B.load([n, k]).T
            else:
                b = B.load([k, n])
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            x = tl.dot(a, b, x, input_precision=PRECISION)
        if HAS_BIAS:
            offs_n = n + tl.arange(0, BLOCK_N)
            x += tl.load(BIAS + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
        # OUT goes through shared memory; two halves need less of it
        left, right = x.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        OUT.store([m, n], left.to(OUT.dtype))
        OUT.store([m, n + BLOCK_N // 2], right.to(OUT.dtype))


def row_gemm(
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N), or (N, K) if `transposed` is True
    out: Tensor,  # (M, N)
    bias: Tensor | None = None,  # (N,)
    transposed: bool = False,
) -> Tensor:
    """Writes a @ b + bias to `out`, or a @ b.T + bias: fp32 sums, rounded once.

    fp32 matrices are multiplied in TF32 if PyTorch's setting allows it.
    """
    (M, K), N = a.shape, out.shape[1]
    if M == 0 or N == 0:
        return out
    if K == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    cut = config.row_gemm(a.element_size(), config.memory(a.device))
    a, b, target = aligned_matrix(a), aligned_matrix(b), out
    # a TensorDescriptor requires rows that start on 16-byte boundaries
    if not is_aligned(out):
        width = config.ceil_div(N, PACK) * PACK
        target = torch.empty((M, width), device=out.device, dtype=out.dtype)[:, :N]
    programs = config.processors(a.device)
    launch(
        _row_gemm_kernel, (programs,),
        (
            b if bias is None else bias.contiguous(),
            tiles_of(a, cut.block_n, cut.span),
            tiles_of(b, *((cut.block_v, cut.span) if transposed else (cut.span, cut.block_v))),
            tiles_of(target, cut.block_n, cut.block_v // 2),
        ),
        (M, N, K, programs),
        num_warps=cut.num_warps, num_stages=cut.stages,
        HAS_BIAS=bias is not None, TRANSPOSED=transposed,
        UPCAST=knobs.runtime.interpret,  # the interpreter cannot multiply bf16
        PRECISION=_precision(a),
        BLOCK_M=cut.block_n, BLOCK_N=cut.block_v, BLOCK_K=cut.span, GROUP=GROUP,
    )  # fmt: skip
    return out if target is out else out.copy_(target)


def _precision(a: Tensor) -> str:
    """Returns "tf32" or "ieee", which matters to fp32 matrices only."""
    # reading the older `allow_tf32` would raise if `fp32_precision` was set
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" and a.is_cuda else "ieee"
