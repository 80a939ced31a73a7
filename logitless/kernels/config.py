"""Block sizes, warps and splits of each kernel, as pure functions of sizes and device.

The numbers are from sweeps on an H200, which are in benchmarks/results/h200/sweeps.txt. `override`
replaces them: tests get several blocks in a short row, and benchmarks try other numbers.
"""

import contextlib
import functools
from typing import NamedTuple

import torch

MAX_SPLITS = 128
SHORT = 4096  # columns; splitting a shorter row saves less time than the second launch costs


class Config(NamedTuple):
    """How the work of one launch is divided."""

    block_v: int
    num_warps: int
    splits: int = 1  # programs per row
    span: int = 0  # columns of a row that one program reads and writes
    registers: int | None = None  # limit per thread, on an NVIDIA GPU


_override: dict[str, int] = {}
revision = 0  # part of every plan's key; changes with _override, so that no old plan is used


@contextlib.contextmanager
def override(**fields: int):
    """Replaces fields of every Config in this block: `with override(block_v=64, splits=3): ...`"""
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
    """The number of multiprocessors of a GPU; 1 for the interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    return 1


@functools.lru_cache(1024)
def stats_fwd(
    rows: int, vocab: int, itemsize: int, processors: int, heavy: bool = False, twice: bool = False
) -> Config:
    """One program per row if the rows fill the GPU; otherwise several programs per row.

    heavy (more statistics than max and sum, or a softcap): smaller blocks, and for 16-bit logits
    one warp, so that no reduction crosses warps. twice (two normalisers): medium blocks.

    A block of 8192 fits into 80 registers. Without a limit the compiler takes a few more, so that
    one program fewer fits on each multiprocessor, and the kernel is 3 % slower.
    """
    if rows >= 2 * processors or vocab <= SHORT:
        block, warps, registers = (8192, 4, 80) if vocab > 2**16 and not twice else (4096, 4, None)
        if heavy:
            block, warps = (1024, 1) if itemsize == 2 else (4096, 4)
        if heavy or itemsize != 2:
            registers = None
        return overridden(Config(min(block, ceil_pow2(vocab)), warps, registers=registers))
    block = min(1024, ceil_pow2(vocab))
    splits = min(ceil_div(32 * processors, max(rows, 1)), ceil_div(vocab, block), MAX_SPLITS)
    return overridden(Config(block, 1, splits))


@functools.lru_cache(1024)
def label_bwd(vocab: int) -> Config:
    """A grid of (row, block), because nothing is carried from block to block."""
    return overridden(Config(min(2048, ceil_pow2(vocab)), 2))


@functools.lru_cache(1024)
def ids_bwd(vocab: int, itemsize: int) -> Config:
    """A grid of (row, span). The gradient at the ids is rewritten while the span is cached.

    Spans are long, so that few programs search the ids. Many warps write a span in one step.
    """
    width = max(ceil_pow2(vocab), 16)  # Triton would make a span of 1 a constant
    return overridden(Config(min(8192 // itemsize, width), 2 * itemsize, span=min(8192, width)))


@functools.lru_cache(1024)
def scale(vocab: int) -> Config:
    """Few, long programs, because most often the factor is 1 and there is nothing to do."""
    return overridden(Config(min(4096, ceil_pow2(vocab)), 8))


@functools.lru_cache(1024)
def nll_fwd_bwd(vocab: int, itemsize: int, crowded: bool = False) -> Config:
    """Splits that are small enough for the L1 cache of a multiprocessor to hold several.

    crowded: a softcap, and a gradient in memory of its own, need more registers.
    """
    block, warps, span = (2048, 2, 6144) if itemsize == 2 else (4096, 4, 4096)
    if crowded:
        block //= 2
    return overridden(Config(min(block, ceil_pow2(vocab)), warps, span=min(span, ceil_pow2(vocab))))


def blockfp_gemm() -> Config:
    """The largest tile whose sums fit into the registers of two warp groups."""
    return overridden(Config(128, 8))


def pair_fwd(vocab: int) -> Config:
    """Two rows at once. Sums per lane stay in registers, and one warp needs no barrier."""
    cut = overridden(Config(min(512, ceil_pow2(vocab)), 1))
    return cut._replace(block_v=max(cut.block_v, 16))  # the fringe is two packs of eight


def jsd_split_fwd(vocab: int, itemsize: int) -> Config:
    """Splits of two rows that stay in cache until they are read again, at most 64 per row."""
    block, span = (256, 4096) if itemsize == 2 else (512, 2048)
    span = max(span, ceil_pow2(ceil_div(vocab, 64)))
    cut = overridden(Config(min(block, ceil_pow2(vocab)), 1, span=span))
    return cut._replace(block_v=max(cut.block_v, 16))


def pair_bwd(vocab: int, itemsize: int) -> Config:
    return overridden(Config(min(1024 if itemsize == 2 else 512, ceil_pow2(vocab)), 1))


def forget() -> None:
    for choice in (stats_fwd, label_bwd, ids_bwd, scale, nll_fwd_bwd):
        choice.cache_clear()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def ceil_pow2(n: int) -> int:
    return 1 << (max(n, 1) - 1).bit_length()


def overridden(config: Config) -> Config:
    """The config with the fields that `override` replaces."""
    return config._replace(**_override)
