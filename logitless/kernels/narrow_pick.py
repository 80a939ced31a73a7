"""The logits of a narrow head (narrow_tile.py) at the label and at the ids of each row."""

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from . import config
from .launch import REMEMBERED, Launch
from .narrow_tile import HeadLayout, layout, with_bias
from .numerics import INF, capped, only_if
from .profiling import Arguments, profiled
from .state import field, is_live, load_label
from .stats_merge import SPLIT_M, SPLIT_Y_LABEL


@dataclass(frozen=True)
class _Constants:
    layout: HeadLayout
    fields: int
    block_k: int
    block_p: int


@triton.jit
def _pick(WEIGHT, BIAS, h, ids, inside, softcap, top, CONSTANTS: tl.constexpr):
    """Returns min(y, top) at the ids, where y are the logits, and `top` is the max of the row.

    The kernel that computed `top` may round sums over D differently; a y above it would make log
    p > 0.
    """
    offs_d = tl.arange(0, layout(CONSTANTS, "block_d"))
    first = WEIGHT + ids.to(tl.int64) * layout(CONSTANTS, "stride_w")
    if layout(CONSTANTS, "w_aligned"):
        first = tl.multiple_of(first, 16)
    at = first[:, None] + offs_d[None, :]
    mask = inside[:, None] & (offs_d < layout(CONSTANTS, "width"))[None, :]
    w = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x = with_bias(tl.sum(w * h[None, :], axis=1), BIAS, ids, inside)
    y, _ = capped(x, softcap)
    return tl.where(y > top, top, y)


def _picks(args: Arguments) -> int:
    """The number of logits at labels and ids."""
    return len(args["HIDDEN"]) * (args["K"] + 1)


@triton.jit(
    **profiled(
        "narrow_pick", shows=("K",), BIAS=_picks,
        WEIGHT=lambda args: _picks(args) * args["HIDDEN"].shape[1],
    ),
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["HIDDEN", "WEIGHT", "BIAS", "LABEL", "IDS"],
)  # fmt: skip
def _narrow_pick_kernel(
    HIDDEN, WEIGHT, BIAS, LABEL, IDS,  # inputs
    SPLITS, PICKED,  # outputs, (N, fields, splits) and (N, K)
    V, K, splits,  # sizes
    softcap, ignore_index,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program computes the logits y of one row at the label and at the ids.

    The label's goes to the row's first split. PICKED is 0 for ids outside the vocabulary, and for
    all ids of an ignored row.
    """
    BLOCK_K: tl.constexpr = field(CONSTANTS, "block_k")
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, layout(CONSTANTS, "block_d"))
    mask_d = offs_d < layout(CONSTANTS, "width")
    first = HIDDEN + row * layout(CONSTANTS, "stride_h")
    if layout(CONSTANTS, "h_aligned"):
        first = tl.multiple_of(first, 16)
    h = tl.load(first + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    label = load_label(LABEL, row)
    live = is_live(label, ignore_index)
    SPLITS += row * (splits * field(CONSTANTS, "fields"))
    offs_p = tl.arange(0, field(CONSTANTS, "block_p"))
    top = tl.max(
        tl.load(SPLITS + SPLIT_M * splits + offs_p, mask=offs_p < splits, other=-INF), axis=0
    )
    if LABEL is not None:
        labels = tl.zeros((1,), tl.int64) + label
        is_class = only_if(live, (labels >= 0) & (labels < V))
        y_label = _pick(WEIGHT, BIAS, h, labels, is_class, softcap, top, CONSTANTS)
        at = SPLIT_Y_LABEL * splits + tl.zeros((1,), tl.int32)
        tl.store(SPLITS + at, tl.where(is_class, y_label, 0.0))
    if IDS is not None:
        for start in range(0, K, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            mask_k = offs_k < K
            ids = tl.load(IDS + row * K + offs_k, mask=mask_k, other=-1)
            inside = only_if(live, mask_k & (ids >= 0) & (ids < V))
            y = _pick(WEIGHT, BIAS, h, ids, inside, softcap, top, CONSTANTS)
            tl.store(PICKED + row * K + offs_k, tl.where(inside, y, 0.0), mask=mask_k)


@functools.lru_cache(REMEMBERED)
def pick_launch(
    N: int, V: int, K: int, splits: int, fields: int, softcap: float | None,
    ignore_index: int | None, where: HeadLayout,
) -> Launch:  # fmt: skip
    block_k = max(min(config.ceil_pow2(K), 2048 // where.block_d), 2)
    block_p = max(config.ceil_pow2(splits), 2)
    return Launch(
        _narrow_pick_kernel, (N,), (V, K, splits, softcap, ignore_index),
        num_warps=1, CONSTANTS=_Constants(where, fields, block_k, block_p),
    )  # fmt: skip
