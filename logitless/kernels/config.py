"""Block sizes, warps and splits of each kernel, as pure functions of the sizes and the device.

The numbers come from sweeps on an H200 (benchmarks/results/h200/sweeps.txt). Tests call `override`
to get several blocks even in short rows, and benchmarks call `override` to try other numbers.
"""

import contextlib
import functools
import math
from typing import NamedTuple

import torch
import triton

MAX_SPLITS = 128
# Rows with at most SHORT columns are not split over programs. Splits are merged in another launch,
# and for short rows this launch would take more time than the splits save.
SHORT = 4096
# If there are at least MANY rows per multiprocessor, one warp per row is enough to fill the GPU.
MANY = 16


class Config(NamedTuple):
    """The sizes that divide the work of one launch among programs and warps."""

    block_v: int
    num_warps: int
    splits: int = 1  # programs per row
    span: int = 0  # columns of a row that one program reads and writes
    registers: int | None = None  # the largest number of registers per thread, on NVIDIA GPUs
    block_n: int = 0  # rows of a tile, if a program computes tiles of several rows
    stages: int = 0  # number of loop iterations whose loads are in flight at once


_override: dict[str, int] = {}
# The revision is incremented whenever `_override` changes. The cache key of a launch plan contains
# either the revision, or the Config from which the plan was built. Therefore no call uses a plan
# that was built from another Config.
revision = 0


@contextlib.contextmanager
def override(**fields: int):
    """Replaces fields of every Config inside `with override(block_v=64, splits=3): ...`."""
    global _override, revision
    before, _override = _override, {**_override, **fields}
    revision += 1
    forget()
    try:
        yield
    finally:
        _override = before
        revision += 1
        forget()


@functools.cache
def processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU, or 1 for Triton's interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    return 1


@functools.lru_cache(1024)
def stats_fwd(
    rows: int, vocab: int, itemsize: int, processors: int, heavy: bool = False, twice: bool = False
) -> Config:
    """Returns the Config of the kernels that compute row statistics.

    If there are enough rows to fill the GPU, each program computes a whole row. Otherwise, several
    programs share a row. A row of at most SHORT columns always has one program. `heavy` means that
    the kernel computes more than max and sum, or applies a softcap. Heavy kernels have blocks of at
    most 4096 columns. If the logits are 16-bit and there are at least MANY rows per multiprocessor,
    heavy kernels use one warp. Then no reduction crosses warps. Otherwise, heavy kernels that read
    whole rows use four warps. `twice` means that the kernel computes two normalisers: one at the
    temperature, and one at temperature 1. With two normalisers, blocks have at most 4096 columns.

    For 16-bit logits, a kernel with a block of 8192 columns is compiled for at most 80 registers
    per thread. Without the limit of 80 registers, fewer programs fit on each multiprocessor, and
    the kernel is 3 % slower.
    """
    if rows >= 2 * processors or vocab <= SHORT:
        block, warps, registers = (8192, 4, 80) if vocab > 2**16 and not twice else (4096, 4, None)
        if heavy:
            one_warp = itemsize == 2 and rows >= MANY * processors
            block, warps = (1024, 1) if one_warp else (4096, 4)
        if heavy or itemsize != 2:
            registers = None
        return overridden(Config(min(block, ceil_pow2(vocab)), warps, registers=registers))
    block = min(1024, ceil_pow2(vocab))
    splits = min(ceil_div(32 * processors, max(rows, 1)), ceil_div(vocab, block), MAX_SPLITS)
    return overridden(Config(block, 1, splits))


@functools.lru_cache(1024)
def label_bwd(vocab: int) -> Config:
    """Returns the Config of label_bwd.py.

    Each program computes the gradient of one block of a row, because blocks are independent.
    """
    return overridden(Config(min(2048, ceil_pow2(vocab)), 2))


@functools.lru_cache(1024)
def ids_bwd(vocab: int, itemsize: int) -> Config:
    """Returns the Config of ids_bwd.py.

    Each program writes the gradient of one span, and then rewrites the gradient at the ids, while
    the span is in the cache. Every program of a row searches all ids of the row. Therefore spans
    are long, and a row has few programs. A program writes its span one block at a time, with
    several warps.
    """
    # The block and the span have at least 16 columns, because Triton would treat a span of 1 as a
    # constant.
    width = max(ceil_pow2(vocab), 16)
    return overridden(Config(min(8192 // itemsize, width), 2 * itemsize, span=min(8192, width)))


@functools.lru_cache(1024)
def scale(vocab: int) -> Config:
    """Returns the Config of scale.py, whose kernel multiplies each row by a factor, in place.

    The grid has few programs, and each program loops over large blocks of columns. In most calls,
    the factor is 1 for all rows. In these calls, each program reads only the factor, and then ends.
    """
    return overridden(Config(min(4096, ceil_pow2(vocab)), 8))


@functools.lru_cache(1024)
def nll_fwd_bwd(vocab: int, itemsize: int, crowded: bool = False) -> Config:
    """Returns the Config of nll_fwd_bwd.py.

    Splits are so small that the L1 cache of a multiprocessor holds several splits. `crowded` means
    that the logits have a softcap and that the gradient does not overwrite the logits. If `crowded`
    is True, blocks are smaller, because the programs need more registers.
    """
    block, warps, span = (2048, 2, 6144) if itemsize == 2 else (4096, 4, 4096)
    if crowded:
        block //= 2
    return overridden(Config(min(block, ceil_pow2(vocab)), warps, span=min(span, ceil_pow2(vocab))))


def blockfp_gemm() -> Config:
    """Returns the largest tile whose accumulators fit into the registers of eight warps."""
    return overridden(Config(128, 8))


# The tile sizes of row_gemm.py. A key is a pair: the bytes per element, and whether the GPU has at
# least as much shared memory as Hopper. A value is (rows, columns, span, warps, stages). Each step
# of a program reads `span` columns of the first matrix.
ROW_GEMM = {
    (2, True): (128, 256, 64, 8, 3), (2, False): (128, 128, 32, 4, 2),
    (4, True): (64, 128, 16, 8, 3), (4, False): (64, 64, 16, 4, 2),
}  # fmt: skip


def row_gemm(itemsize: int, memory: int) -> Config:
    """Returns the tile sizes of row_gemm.py. These sizes do not depend on the number of rows.

    A tile has `block_n` rows and `block_v` columns. Each step reads `span` columns of the first
    matrix. `memory` is the number of bytes of shared memory that a program can use.
    """
    rows, columns, step, warps, stages = ROW_GEMM[itemsize, memory >= HOPPER_MEMORY]
    return overridden(Config(columns, warps, span=step, block_n=rows, stages=stages))


def pair_fwd(vocab: int) -> Config:
    """Returns the block size for reading a student's and a teacher's row together.

    In the loop over blocks, the sums stay in registers and have one element per column of a block.
    A program has one warp and needs no barrier.
    """
    cut = overridden(Config(min(512, ceil_pow2(vocab)), 1))
    # A block must be at least as wide as the fringe tile (layout.py). The fringe tile has 32 bytes,
    # which are 16 columns of 16-bit logits.
    return cut._replace(block_v=max(cut.block_v, 16))


def jsd_tvd_split_fwd(vocab: int, itemsize: int) -> Config:
    """Returns the Config of the kernel in jsd_tvd_fwd.py that splits rows.

    A row has at most 64 splits. A split is small enough to stay in the cache until the kernel reads
    the split again.
    """
    block, span = (256, 4096) if itemsize == 2 else (512, 2048)
    span = max(span, ceil_pow2(ceil_div(vocab, 64)))
    cut = overridden(Config(min(block, ceil_pow2(vocab)), 1, span=span))
    return cut._replace(block_v=max(cut.block_v, 16))


def pair_bwd(vocab: int, itemsize: int) -> Config:
    return overridden(Config(min(1024 if itemsize == 2 else 512, ceil_pow2(vocab)), 1))


# The table NARROW holds the tile sizes of the kernels for narrow heads. The outer key is the
# kernel's name and the number of bytes per element. The inner key is the width D of the hidden
# states, padded to a power of two. Each entry is (rows, columns, warps, stages). An optional fifth
# number limits the registers per thread. The kernel "fwd_expected" is a forward kernel that also
# computes the sums of narrow_expected.py. The kernel "fwd_expected" and the backward kernels also
# accumulate a sum that is D columns wide. Therefore these kernels have smaller tiles of logits than
# "fwd" at D = 256. At D = 512, only the backward kernels have smaller tiles than "fwd".
NARROW = {
    ("fwd", 2): {
        64: (128, 64, 4, 4), 128: (128, 64, 8, 4), 256: (128, 64, 8, 3), 512: (64, 64, 4, 2),
    },
    ("fwd", 4): {64: (32, 32, 8, 2)},
    ("fwd_expected", 2): {
        64: (64, 128, 4, 3), 128: (64, 128, 4, 2), 256: (64, 64, 4, 3), 512: (64, 64, 8, 1),
    },
    ("fwd_expected", 4): {64: (32, 32, 8, 2)},
    ("d_hidden", 2): {
        64: (128, 64, 4, 4), 128: (128, 64, 8, 3, 128), 256: (64, 64, 8, 3), 512: (64, 32, 8, 2),
    },
    ("d_hidden", 4): {64: (32, 32, 8, 2)},
    ("d_weight", 2): {
        64: (128, 64, 4, 2, 128), 128: (128, 64, 4, 2), 256: (32, 64, 4, 3), 512: (32, 64, 8, 2),
    },
    ("d_weight", 4): {64: (32, 32, 8, 2)},
}  # fmt: skip
# The largest number of bytes for partial sums of d_hidden, if the vocabulary is split.
NARROW_SUMS = 32 << 20
# In Triton 3.5, the kernel for d_weight cannot load hidden states in advance. Triton 3.5 raises
# "cp.async does not support transfers smaller than 4 bytes".
LOADS_IN_ADVANCE = not triton.__version__.startswith("3.5.")
HOPPER_MEMORY = 227 << 10  # bytes of shared memory that a program on Hopper can use


@functools.lru_cache(1024)
def narrow(kernel: str, width: int, itemsize: int, memory: int, heavy: int) -> Config:
    """Returns the tile sizes of a kernel for narrow heads.

    `width` is the width D of the hidden states, padded to a power of two. A program keeps one tile
    of the hidden states or of the weight in shared memory. Tiles of the other matrix are loaded in
    a loop, `stages` tiles in advance. The function reduces `stages` until all these tiles fit into
    `memory` bytes of shared memory.

    `heavy` is 0, 1 or 2. In the forward kernel, `heavy` increases by 1 if there is a softcap or if
    any flag of `Sums` (contract.py) is set. In the backward kernels, `heavy` increases by 1 if
    there is a softcap, or if any of the coefficients "b", "total" and "logprob_t1" is used. In all
    kernels, `heavy` increases by 1 if the rows of the hidden states or of the weight do not start
    on 16-byte boundaries. If `heavy` is not 0, the kernel needs more registers per thread and uses
    eight warps. The backward kernels and "fwd_expected" load tiles in a loop. The size of these
    tiles is halved `heavy` times, but is at least 16. If `heavy` is not 0, a tile of "d_hidden" or
    "fwd_expected" has at most 64 rows.
    """
    rows, columns, warps, stages, *limit = NARROW[kernel, itemsize][max(width, 64)]
    if kernel in ("d_hidden", "fwd_expected"):
        columns, rows = max(columns >> heavy, 16), min(rows, 64) if heavy else rows
    elif kernel == "d_weight":
        rows = max(rows >> heavy, 16)
    held, streamed = (columns, rows) if kernel == "d_weight" else (rows, columns)
    if kernel == "d_weight" and not LOADS_IN_ADVANCE:
        stages = 1
    while stages > 1 and (held + stages * streamed) * width * itemsize + 8192 > memory:
        stages -= 1
    registers = limit[0] if limit and not heavy else None
    return overridden(
        Config(columns, 8 if heavy else warps, registers=registers, block_n=rows, stages=stages)
    )


@functools.lru_cache(1024)
def narrow_splits(
    cut: Config, rows: int, vocab: int, width: int, processors: int, limit: int | None = None
) -> Config:
    """Returns a copy of `cut` in which `splits` is the number that keeps the GPU busiest.

    `splits` is the number of splits of the vocabulary. The function assumes that a multiprocessor
    runs two programs at once. For each number of splits, the function estimates the fraction of the
    time in which a multiprocessor is busy. The function chooses the number of splits with the
    largest fraction. If several numbers are equally good, the function chooses the smallest.

    Each split has its own partial sums of shape (rows, width) in fp32. All partial sums together
    take at most `limit` bytes.
    """
    tiles, at_once = max(ceil_div(rows, cut.block_n), 1), 2 * processors
    most = min(ceil_div(2 * at_once, tiles), ceil_div(vocab, cut.block_v), MAX_SPLITS)
    if limit is not None:
        most = min(most, limit // max(4 * rows * width, 1))

    def busy(splits: int) -> float:
        """Returns the fraction of the time in which a multiprocessor is busy."""
        waves = tiles * splits / at_once
        return waves / math.ceil(waves)

    splits = max(range(1, max(most, 1) + 1), key=busy)
    return overridden(cut._replace(splits=splits))


def contrastive_fwd(rows: int, columns: int, itemsize: int) -> Config:
    """Returns the Config of contrastive_fwd.py.

    A program reads `span` rows of a strip of `block_v` columns. Each warp reads one row of a tile,
    with 16 bytes per thread and 512 bytes per row. With more rows per program, fewer states of
    columns are written and merged.
    """
    cut = Config(
        min(512 // itemsize, ceil_pow2(columns)), 2, span=1024, block_n=min(16, ceil_pow2(rows))
    )
    # About 1024 programs keep all multiprocessors busy.
    strips = ceil_div(columns, cut.block_v)
    cut = overridden(cut._replace(span=min(cut.span, max(rows * strips // 1024, 1))))
    cut = cut._replace(block_n=max(cut.block_n, min(cut.num_warps, ceil_pow2(rows))))
    return cut._replace(span=ceil_div(cut.span, cut.block_n) * cut.block_n)


def contrastive_merge() -> Config:
    """Returns the Config of the kernel that merges contrastive states (contrastive_fwd.py).

    Each program merges the states of `block_v` rows or columns. In each step, a program merges
    `block_n` states per row or column.
    """
    return overridden(Config(32, 4, block_n=32))


def contrastive_bwd(rows: int, columns: int, itemsize: int) -> Config:
    """Returns the Config of contrastive_bwd.py.

    A program overwrites `span` rows of a strip of `block_v` columns, `block_n` rows at a time. The
    normalisers of the columns stay in registers.
    """
    cut = Config(
        min(512 // itemsize, ceil_pow2(columns)), 4, span=64, block_n=min(4, ceil_pow2(rows))
    )
    cut = overridden(cut)
    return cut._replace(span=ceil_div(cut.span, cut.block_n) * cut.block_n)


def sigmoid_contrastive(rows: int, columns: int, itemsize: int) -> Config:
    """Returns the Config of sigmoid_contrastive.py.

    Each warp reads one row of a tile, with 16 bytes per thread. Therefore the sum of a row needs no
    exchange between warps.
    """
    cut = Config(
        min(512 // itemsize, ceil_pow2(columns)), 2, span=64, block_n=min(2, ceil_pow2(rows))
    )
    cut = overridden(cut)
    return cut._replace(span=ceil_div(cut.span, cut.block_n) * cut.block_n)


@functools.cache
def memory(device: torch.device) -> int:
    """Returns the number of bytes of shared memory that one program can use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return HOPPER_MEMORY


@functools.cache
def has_async_copies(device: torch.device) -> bool:
    """Whether an NVIDIA GPU has asynchronous copies from global to shared memory (cp.async)."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def forget() -> None:
    for choice in (stats_fwd, label_bwd, ids_bwd, scale, nll_fwd_bwd, narrow, narrow_splits):
        choice.cache_clear()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def ceil_pow2(n: int) -> int:
    return 1 << (max(n, 1) - 1).bit_length()


def overridden(config: Config) -> Config:
    """Returns a copy of `config` with the values that `override` has set."""
    return config._replace(**_override)
