"""Block sizes, warps and splits of each kernel, as pure functions of the sizes and the device.

The numbers come from sweeps on an H200 (benchmarks/results/h200/sweeps.txt). `override` lets tests
have several blocks in short rows, and benchmarks try other numbers.
"""

import contextlib
import functools
import math
from typing import NamedTuple

import torch
import triton

MAX_SPLITS = 128
# shorter rows are never split: merging takes another launch, longer than what the splits save
SHORT = 4096
# rows per multiprocessor from which one warp per row fills the GPU
MANY = 16


class Config(NamedTuple):
    block_v: int
    num_warps: int
    splits: int = 1  # programs per row
    span: int = 0  # columns of a row that one program reads and writes
    registers: int | None = None  # the largest number of registers per thread, on NVIDIA GPUs
    block_n: int = 0  # rows of a tile, if a program computes tiles of several rows
    stages: int = 0  # number of loop iterations whose loads are in flight at once


_override: dict[str, int] = {}
# Incremented when `_override` changes. The cache key of a plan holds the revision or the Config, so
# no plan outlives the Config it was built from.
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

    Enough rows fill the GPU with a program each; otherwise several programs share a row. `heavy`
    kernels compute more than max and sum, or a softcap; of many 16-bit rows, one warp reads each,
    so that no reduction crosses warps. `twice`: a second normaliser, at temperature 1. Blocks of
    8192 16-bit columns are compiled for 80 registers: without this limit fewer programs fit on a
    multiprocessor, which costs 3 %.
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
def stats_bwd(vocab: int, itemsize: int, at_ids: bool) -> Config:
    """A span is one block; `at_ids`, as every program searches all ids of its row, it is longer."""
    if not at_ids:
        return overridden(Config(min(2048, ceil_pow2(vocab)), 2))
    # at least 16 columns, because Triton would treat a span of 1 as a constant
    width = max(ceil_pow2(vocab), 16)
    return overridden(Config(min(8192 // itemsize, width), 2 * itemsize, span=min(8192, width)))


def tail_mass(vocab: int) -> Config:
    return overridden(Config(min(512, ceil_pow2(vocab)), 1))


@functools.lru_cache(1024)
def scale(vocab: int) -> Config:
    """Few programs with large blocks: mostly, all factors are 1, and a program reads only these."""
    return overridden(Config(min(4096, ceil_pow2(vocab)), 8))


@functools.lru_cache(1024)
def nll_fwd_bwd(vocab: int, itemsize: int, crowded: bool = False) -> Config:
    """Splits are small, so that the L1 cache holds several.

    `crowded`: a softcap, and a gradient that does not overwrite the logits, take more registers.
    """
    block, warps, span = (2048, 2, 6144) if itemsize == 2 else (4096, 4, 4096)
    if crowded:
        block //= 2
    return overridden(Config(min(block, ceil_pow2(vocab)), warps, span=min(span, ceil_pow2(vocab))))


def blockfp_gemm() -> Config:
    """The largest tile whose accumulators fit into the registers of eight warps."""
    return overridden(Config(128, 8))


# (bytes per element, shared memory of Hopper or more) -> (rows, columns, span, warps, stages)
ROW_GEMM = {
    (2, True): (128, 256, 64, 8, 3), (2, False): (128, 128, 32, 4, 2),
    (4, True): (64, 128, 16, 8, 3), (4, False): (64, 64, 16, 4, 2),
}  # fmt: skip


def row_gemm(itemsize: int, memory: int) -> Config:
    """Tiles of block_n rows and block_v columns, for any number of rows.

    Each step reads `span` columns of the first matrix. `memory` is in bytes of shared memory.
    """
    rows, columns, step, warps, stages = ROW_GEMM[itemsize, memory >= HOPPER_MEMORY]
    return overridden(Config(columns, warps, span=step, block_n=rows, stages=stages))


def pair_fwd(vocab: int) -> Config:
    """One warp, which needs no barrier; the sums stay in registers, one per column of a block."""
    cut = overridden(Config(min(512, ceil_pow2(vocab)), 1))
    # at least as wide as the fringe tile (layout.py): 32 bytes, 16 columns of 16-bit logits
    return cut._replace(block_v=max(cut.block_v, 16))


def pair_split_fwd(vocab: int, itemsize: int) -> Config:
    """At most 64 splits, which stay in the cache until they are read again."""
    block, span = (256, 4096) if itemsize == 2 else (512, 2048)
    span = max(span, ceil_pow2(ceil_div(vocab, 64)))
    cut = overridden(Config(min(block, ceil_pow2(vocab)), 1, span=span))
    return cut._replace(block_v=max(cut.block_v, 16))


def pair_bwd(vocab: int, itemsize: int, heavy: bool = False) -> Config:
    """`heavy`: a skewed KL beside a softcap, for which a long block takes too many registers."""
    block = 1024 if itemsize == 2 and not heavy else 512
    return overridden(Config(min(block, ceil_pow2(vocab)), 1))


# (kernel, bytes per element) -> D, padded to a power of two -> (rows, columns, warps, stages), and
# perhaps a limit of registers per thread. "fwd_expected" is the forward with the sums of
# narrow/expected.py.
NARROW = {
    ("fwd", 2): {64: (128, 64, 4, 4), 128: (128, 64, 8, 4)},
    ("fwd", 4): {64: (32, 32, 8, 2)},
    ("fwd_expected", 2): {64: (64, 128, 4, 3), 128: (64, 128, 4, 2)},
    ("fwd_expected", 4): {64: (32, 32, 8, 2)},
    ("d_hidden", 2): {64: (128, 64, 4, 4), 128: (128, 64, 8, 3, 128)},
    ("d_hidden", 4): {64: (32, 32, 8, 2)},
    ("d_weight", 2): {64: (128, 64, 4, 2, 128), 128: (128, 64, 4, 2)},
    ("d_weight", 4): {64: (32, 32, 8, 2)},
}  # fmt: skip
# most bytes of partial sums of d_hidden, if the vocabulary is split
NARROW_SUMS = 32 << 20
# Triton 3.5 raises "cp.async does not support transfers smaller than 4 bytes" in d_weight.
LOADS_IN_ADVANCE = not triton.__version__.startswith("3.5.")
HOPPER_MEMORY = 227 << 10  # bytes of shared memory that a program on Hopper can use


@functools.lru_cache(1024)
def narrow(kernel: str, width: int, itemsize: int, memory: int, heavy: int) -> Config:
    """Returns the tile sizes of a kernel for narrow heads of padded `width` D.

    A program keeps one tile, of the hidden states or of the weight, in shared memory, and loads
    those of the other matrix in a loop, `stages` in advance, as many as `memory` bytes hold.

    `heavy`: 0–2, one for a softcap, extra sums or coefficients, one for unaligned rows. Heavy
    kernels need more registers, so they have eight warps, and (except "fwd") the streamed tile is
    halved `heavy` times, to at least 16.
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
    """Splits the vocabulary so that the GPU is busiest; of equal numbers, into the fewest splits.

    It assumes two programs at once per multiprocessor. Each split has partial sums (rows, width) in
    fp32, together at most `limit` bytes.
    """
    tiles, at_once = max(ceil_div(rows, cut.block_n), 1), 2 * processors
    most = min(ceil_div(2 * at_once, tiles), ceil_div(vocab, cut.block_v), MAX_SPLITS)
    if limit is not None:
        most = min(most, limit // max(4 * rows * width, 1))

    def busy(splits: int) -> float:
        waves = tiles * splits / at_once
        return waves / math.ceil(waves)

    splits = max(range(1, max(most, 1) + 1), key=busy)
    return overridden(cut._replace(splits=splits))


def contrastive_fwd(rows: int, columns: int, itemsize: int) -> Config:
    """A program reads `span` rows of a strip of `block_v` columns, one row of a tile per warp.

    That is 512 bytes per row, 16 per thread. More rows per program leave fewer column states to
    merge.
    """
    cut = Config(
        min(512 // itemsize, ceil_pow2(columns)), 2, span=1024, block_n=min(16, ceil_pow2(rows))
    )
    # about 1024 programs keep all multiprocessors busy
    strips = ceil_div(columns, cut.block_v)
    cut = overridden(cut._replace(span=min(cut.span, max(rows * strips // 1024, 1))))
    cut = cut._replace(block_n=max(cut.block_n, min(cut.num_warps, ceil_pow2(rows))))
    return cut._replace(span=ceil_div(cut.span, cut.block_n) * cut.block_n)


def contrastive_merge() -> Config:
    """Each program merges `block_v` rows or columns, `block_n` states at a time."""
    return overridden(Config(32, 4, block_n=32))


def contrastive_bwd(rows: int, columns: int, itemsize: int, warps: int = 4) -> Config:
    """A program overwrites `span` rows of a strip of `block_v` columns, a row per warp at a time.

    That is 16 bytes per thread, so sums of rows stay inside a warp. What a program keeps of its
    columns stays in registers.
    """
    cut = Config(
        min(512 // itemsize, ceil_pow2(columns)), warps, span=64,
        block_n=min(warps, ceil_pow2(rows)),
    )  # fmt: skip
    cut = overridden(cut)
    return cut._replace(span=ceil_div(cut.span, cut.block_n) * cut.block_n)


@functools.cache
def memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that one program can use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return HOPPER_MEMORY


@functools.cache
def has_async_copies(device: torch.device) -> bool:
    """Whether an NVIDIA GPU has cp.async, asynchronous copies from global to shared memory."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def forget() -> None:
    for choice in (stats_fwd, stats_bwd, scale, nll_fwd_bwd, narrow, narrow_splits):
        choice.cache_clear()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def ceil_pow2(n: int) -> int:
    return 1 << (max(n, 1) - 1).bit_length()


def overridden(config: Config) -> Config:
    return config._replace(**_override)
