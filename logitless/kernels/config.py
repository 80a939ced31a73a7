"""Block sizes, warps and splits: a pure function of (rows, vocabulary, itemsize, device).

`override` replaces any of them, for tests that want several blocks in a short row and for
benchmarks.
"""

import contextlib
import functools
from typing import NamedTuple

import torch
import triton

MAX_SPLITS = 256


class Config(NamedTuple):
    """How one launch is cut."""

    block_v: int
    num_warps: int
    splits: int = 1
    span: int = 0  # columns of a row that one program visits


_override: dict[str, int] = {}


@contextlib.contextmanager
def override(**fields: int):
    """Replace fields of every Config in this block: `with override(block_v=64, splits=3): ...`"""
    global _override
    before, _override = _override, {**_override, **fields}
    try:
        yield
    finally:
        _override = before


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    return 1


def forward(rows: int, vocab: int, itemsize: int, processors: int) -> Config:
    """One program a row when rows fill the GPU; else a row is split over several programs."""
    if rows >= 2 * processors:
        config = Config(min(4096, triton.next_power_of_2(vocab)), 4 if itemsize == 2 else 8)
    else:
        block = min(4096 // itemsize, triton.next_power_of_2(vocab))
        splits = min(triton.cdiv(4 * processors, max(rows, 1)), triton.cdiv(vocab, block))
        config = Config(block, 4, min(splits, MAX_SPLITS))
    return _overridden(config)


def backward(vocab: int, itemsize: int) -> Config:
    """A grid of (row, block): nothing is carried from block to block."""
    return _overridden(Config(min(4096, triton.next_power_of_2(vocab)), 4))


def visit(vocab: int, itemsize: int) -> Config:
    """Parts of a row small enough for the cache beside a processor to hold several at once."""
    span = min(16384 // itemsize, triton.next_power_of_2(vocab))
    return _overridden(Config(min(4096, span), 4, span=span))


def _overridden(config: Config) -> Config:
    return config._replace(**_override)
