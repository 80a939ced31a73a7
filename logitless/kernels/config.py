"""Block sizes, warps and splits: a pure function of (rows, vocabulary, itemsize, device).

Chosen from sweeps on an H200, kept in benchmarks/results/h200/sweeps.txt.

`override` replaces any of them, for tests that want several blocks in a short row and for
benchmarks.
"""

import contextlib
import functools
from typing import NamedTuple

import torch

MAX_SPLITS = 128
SHORT = 4096  # columns: splitting shorter rows saves less than a second launch costs


class Config(NamedTuple):
    """How one launch is cut."""

    block_v: int
    num_warps: int
    splits: int = 1
    span: int = 0  # columns of a row that one program reads and writes
    registers: int | None = None  # that a thread may use at most, on an NVIDIA GPU


_override: dict[str, int] = {}
revision = 0  # changes with _override, so that a plan made before is not used after


@contextlib.contextmanager
def override(**fields: int):
    """Replace fields of every Config in this block: `with override(block_v=64, splits=3): ...`"""
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
    """Multiprocessors of a GPU; 1 for the interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    return 1


@functools.lru_cache(1024)
def stats_fwd(
    rows: int, vocab: int, itemsize: int, processors: int, heavy: bool = False, twice: bool = False
) -> Config:
    """One program a row when rows fill the GPU; else a row is split over several programs.

    More than max and sum of the plain logits (heavy) wants fewer registers and, where arithmetic
    is the limit, no reductions to wait for: one warp. Two normalisers (twice) want blocks between.
    A block of 8192 fits into 80 registers, but a compiler that takes a few more has one program
    fewer on each processor, and is 3 % slower.
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
    """A grid of (row, block): nothing is carried from block to block."""
    return overridden(Config(min(2048, ceil_pow2(vocab)), 2))


@functools.lru_cache(1024)
def ids_bwd(vocab: int, itemsize: int) -> Config:
    """A grid of (row, span), where ids are rewritten while the span is cached.

    Long, so that few programs look for their ids; many warps, so that it is written at once.
    """
    width = max(ceil_pow2(vocab), 16)  # a span of 1 would be a constant to Triton
    return overridden(Config(min(8192 // itemsize, width), 2 * itemsize, span=min(8192, width)))


@functools.lru_cache(1024)
def scale(vocab: int) -> Config:
    """Few, long programs: most often there is nothing to do."""
    return overridden(Config(min(4096, ceil_pow2(vocab)), 8))


@functools.lru_cache(1024)
def nll_fwd_bwd(vocab: int, itemsize: int, crowded: bool = False) -> Config:
    """Parts of a row small enough for the cache beside a processor to hold several at once.

    A softcap and two places, one read and one written (crowded), fill the registers.
    """
    block, warps, span = (2048, 2, 6144) if itemsize == 2 else (4096, 4, 4096)
    if crowded:
        block //= 2
    return overridden(Config(min(block, ceil_pow2(vocab)), warps, span=min(span, ceil_pow2(vocab))))


def blockfp_gemm() -> Config:
    """The largest tile whose sums two groups of warps can hold."""
    return overridden(Config(128, 8))


def pair_fwd(vocab: int) -> Config:
    """Two rows at once: sums for each lane stay in registers, and one warp waits for no other."""
    cut = overridden(Config(min(512, ceil_pow2(vocab)), 1))
    return cut._replace(block_v=max(cut.block_v, 16))  # the fringe, two packs of eight


def jsd_split_fwd(vocab: int, itemsize: int) -> Config:
    """Parts of two rows that the cache holds until each is read again: at most 64 of a row."""
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
    """With what `override` says."""
    return config._replace(**_override)
