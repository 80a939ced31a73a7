"""Chooses how a head's logits are computed: by rows, by columns, by rows and columns, or on chip.

A head that `stays_on_chip` never writes its logits to memory (on_chip.py). For all others, they are
split into chunks of rows or blocks of columns that fit into a workspace.

A split by rows takes three GEMMs: the loss and its gradients for some whole rows at once. Every
chunk reads and writes the sum of the weight's gradient (V, D). A split by columns takes four: the
logits are computed for the statistics of all rows, and again for the gradients. But each row of the
weight's gradient is written once, and only the smaller gradient of `hidden` (N, D) is summed.
Logits kept in the memory of the weight's gradient until their own (blocks.py) are computed only
once.

In units of one GEMM over all logits, where SUM_ROWS rows take as long as a pass over the sum of the
weight's gradient, STATISTICS_COST is a second read of the logits and the merging of statistics, and
`kept` is a fraction of the logits:

    Chunks with n rows and all columns cost 3 + SUM_ROWS / n.
    Blocks with all rows and c columns cost 4 + STATISTICS_COST - kept + SUM_ROWS / c.
    Blocks with n rows and c columns cost 4 + STATISTICS_COST + SUM_ROWS / c + SUM_ROWS / n.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

# Default bytes of logits in memory at once; on a GPU more if a row takes more than 1 MiB
# (`default_workspace`). 1.5 times that for fp32 logits of 16-bit hidden states, so that a chunk
# needs few slots (`layout`): on an H200, such a loss is then as fast as over 16-bit logits.
WORKSPACE = {"cuda": 1 << 30, "cpu": 64 << 20}
TILE = 128  # rows per tile of a GEMM
# Rows of logits are padded to a multiple of PACK columns, so that 16-bit rows start on 16 bytes.
PACK = 8

# Measured on an H200 with workspaces of 64 to 256 MiB (docs/heads.md). On a CPU, sums cost little
# beside GEMMs, so it always computes whole rows.
SUM_ROWS = {"cuda": 540.0}
STATISTICS_COST = 0.15
# A split by columns must save at least MIN_GAIN GEMMs.
MIN_GAIN = 0.1

# Most bytes of logits of a small head (run.py).
SMALL = {"cuda": 512 << 20, "cpu": 1 << 20}
# And most rows · V · (D + READ_WIDTH): there, a GPU takes about 2 ms for the loss, and the host at
# least as long. Reading and writing logits takes as long as three GEMMs with D = READ_WIDTH.
SMALL_WORK = {"cuda": 2e11, "cpu": math.inf}
READ_WIDTH = 200

# {largest D: largest vocabulary} of the 16-bit heads computed on the chip. On an H200, a larger D
# is faster with logits in memory (benchmarks/results/h200/narrow.md).
ON_CHIP_VOCAB = {128: 1 << 31}
# Most (row, id) pairs of a loss on the chip, one for the label and one per further id: the kernels
# need them sorted, which takes time and 64 bytes of memory per pair.
ON_CHIP_PAIRS = 1 << 19

# A chunk of n rows of fp32 logits takes the memory of n + n // 64 + 2 rows of 16-bit logits.
SPARE_EVERY = 64


class Cut(NamedTuple):
    """A split of a head: the numbers of rows and columns of logits to compute at once."""

    rows: int  # the largest number of rows to compute at once
    columns: int | None = None  # the number of columns to compute at once; None for all columns
    kept: bool = False  # whether some logits are kept in the memory of the weight's gradient
    on_chip: bool = False  # whether kernels compute all rows without writing logits (on_chip.py)
    # Whether all logits of a chunk stay until its gradient: a gradient of another dtype has memory
    # of its own, and `rows` is not evened out.
    whole: bool = False


class Work(NamedTuple):
    """What determines the best split of a head."""

    rows: int
    vocab: int
    width: int  # the size D of the hidden states
    itemsize: int  # bytes per element of the hidden states
    wide: bool  # whether the logits are fp32 and the hidden states are not
    merges: bool  # whether the loss can be computed from merged partial statistics
    gemms: int  # extra GEMMs of a split by columns, compared with a split by rows: 0 or 1
    sums: bool  # False if the weight needs no gradient, or if `accumulate` is "weight"
    keeps: bool  # whether logits can use the memory of d_weight until d_weight is written
    narrow: bool = False  # whether the backend's on-chip kernels support this head
    ids: int = 0  # the number of ids per row, besides the label


forced: Callable[[Work, int | None, str], Cut] | None = None


@contextlib.contextmanager
def override(cut: Callable[[Work], Cut]):
    """Replaces `choose` by `cut` inside a `with` block, for tests and benchmarks."""
    global forced
    before, forced = forced, lambda work, *_: cut(work)
    try:
        yield
    finally:
        forced = before


@functools.lru_cache(1024)
def choose(work: Work, workspace: int | None, device: str) -> Cut:
    """The split with the least estimated time. Without `workspace`, by rows or on the chip."""
    if device == "cuda" and stays_on_chip(work):
        return Cut(work.rows, on_chip=True)
    row = -(-work.vocab // PACK) * PACK * work.itemsize  # bytes of a row of logits
    limit = workspace or default_workspace(row, device) * (3 if work.wide else 2) // 2
    room = limit // row
    if work.wide:
        room = (room - 2) * SPARE_EVERY // (SPARE_EVERY + 1)  # `spare_rows` also need memory
    best = Cut(max(room, 1))
    least = extra_cost(work, best, device) - MIN_GAIN
    if workspace is None or least <= 0 or not work.merges:
        return best
    groups = 1
    while work.rows >= groups * TILE:
        rows = -(-work.rows // groups)
        size = work.itemsize + (4 if work.wide else 0)  # bytes per logit, including its gradient
        columns = even_columns(work.vocab, limit // (rows * size))
        if columns:
            keeps = groups == 1 and work.keeps
            keeps = keeps and bool(kept_blocks(rows, work.vocab, work.width, columns))
            cut = Cut(rows, columns, keeps)
            extra = extra_cost(work, cut, device)
            if extra < least:
                best, least = cut, extra
        groups *= 2
    return best


def default_workspace(row: int, device: str) -> int:
    """The default workspace in bytes, for rows of logits of `row` bytes.

    On a GPU, it is enlarged for 1,024 rows, up to 2 · WORKSPACE: with fewer rows per chunk, summing
    the weight's gradient would take much of the time.
    """
    usual = WORKSPACE.get(device, WORKSPACE["cuda"])
    return usual if device == "cpu" else min(max(usual, 1024 * row), 2 * usual)


def extra_cost(work: Work, cut: Cut, device: str) -> float:
    """The estimated cost of a split, beyond the GEMMs that every split needs."""
    # A sum in the dtype of the weight takes half as long as in fp32: the GEMM itself adds to it.
    cost = SUM_ROWS.get(device, 0.0) * (1 if work.sums else 0.5)
    if cut.columns is None:
        rows = even_chunk(work.rows, cut.rows)
        return cost / rows if rows < work.rows else 0.0
    groups = cost / cut.rows if cut.rows < work.rows else 0.0
    again = work.gemms - len(blocks_kept(work, cut)) * cut.columns / work.vocab
    return again + STATISTICS_COST + cost / cut.columns + groups


def blocks_kept(work: Work, cut: Cut) -> dict[int, int]:
    """{block: slot} of the blocks that a split by columns keeps in memory."""
    if not cut.kept or cut.columns is None:
        return {}
    return kept_blocks(cut.rows, work.vocab, work.width, cut.columns)


def is_small(
    rows: int, vocab: int, width: int, itemsize: int, workspace: int | None, device: str
) -> bool:
    """Whether a head has so few logits that the host takes longer than the device.

    They may take only a quarter of `workspace`, because a loss can need four times their memory, as
    for 16-bit logits, their saved fp32 gradient and their 16-bit gradient.
    """
    count, limit = rows * vocab, SMALL[device]
    if workspace is not None:
        limit = min(limit, workspace // 4)
    return count * itemsize <= limit and count * (width + READ_WIDTH) <= SMALL_WORK[device]


def stays_on_chip(work: Work) -> bool:
    if not (work.narrow and work.merges and work.itemsize == 2):
        return False
    widest = [width for width in ON_CHIP_VOCAB if width >= work.width]
    pairs = work.rows * (work.ids + 1)
    return bool(widest) and work.vocab <= ON_CHIP_VOCAB[min(widest)] and pairs <= ON_CHIP_PAIRS


def kept_blocks(rows: int, vocab: int, width: int, columns: int) -> dict[int, int]:
    """{block: slot} of the blocks whose logits are kept in the memory of the weight's gradient.

    A slot holds the logits (rows, columns) of one block. Each block writes columns · width numbers
    of the gradient, the last block first and block 0 last. Its GEMM still reads its slot meanwhile,
    so the slot must end before these numbers begin.
    """
    kept: dict[int, int] = {}
    for block in range(1, -(-vocab // columns)):
        if (len(kept) + 1) * rows <= block * width:
            kept[block] = len(kept)
    return kept


def even_chunk(rows: int, room: int) -> int:
    """The number of rows per chunk, for a workspace with room for `room` rows.

    From 8 · TILE on, `room` is rounded down to a power of two, and from TILE on to a multiple of
    TILE. Most batches have a power of two of rows, whose chunks are then equal; others are split
    nearly equally, because even a short last chunk would read the whole weight.
    """
    most = max(room, 1)
    if most >= 8 * TILE:
        most = 1 << (most.bit_length() - 1)
    elif most >= TILE:
        most -= most % TILE
    even = -(-rows // max(-(-rows // most), 1))
    return max(min(most, -(-even // TILE) * TILE, rows), 1)


def even_columns(vocab: int, room: int) -> int:
    """The number of columns per block, a multiple of TILE, or 0 if there is room for less.

    All blocks have the same size, except the last.
    """
    most = room - room % TILE
    if not most:
        return 0
    even = -(-vocab // -(-vocab // most))
    return -(-even // TILE) * TILE


@functools.lru_cache(1024)
def chunk_rows(rows: int, cut: Cut) -> int:
    if cut.columns is None and not (cut.on_chip or cut.whole):
        return even_chunk(rows, cut.rows)
    return max(min(cut.rows, rows), 1)


@functools.lru_cache(1024)
def bounds(rows: int, count: int, cut: Cut) -> tuple[tuple[int, int], ...]:
    """(start, end) of each chunk of the first `count` rows."""
    first = min(chunk_rows(rows, cut), count)
    step = chunk_rows(count - first, cut)
    starts = [*([0] if first else []), *range(first, count, step), count]
    return tuple(itertools.pairwise(starts))


class Slot(NamedTuple):
    """A range of rows of a chunk whose logits are in memory at the same time."""

    rows: slice  # a range of rows of the chunk
    at: int  # the row of the chunk's memory at which the logits begin
    steps: tuple[slice, ...]  # ranges of rows; the gradient is written one range at a time


@functools.lru_cache(1024)
def layout(rows: int, most: int, wide: bool) -> tuple[int, tuple[Slot, ...]]:
    """The size of a chunk's memory, in rows of logits in the dtype of `hidden`, and its slots.

    If the gradient has the dtype of the logits, one slot holds all rows, and the gradient
    overwrites them. Otherwise the logits are fp32 and the gradient is 16-bit: the gradient is
    written from the left end of the memory, and the logits of a slot, as many rows as fit, are at
    the right end:

        | gradient of earlier slots | gap |  logits of this slot, fp32  |
        | gradient so far                 ▸ overwrites logits already read

    Each step of a slot's gradient ends before it would overwrite logits that are still needed. So a
    chunk of n rows of fp32 logits takes only the memory of n + spare_rows(n) rows of 16-bit ones.
    """
    if not wide:
        return rows, (Slot(slice(0, rows), 0, (slice(0, rows),)),)
    size = min(most + spare_rows(most), 3 * rows)
    slots, start = [], 0
    while start < rows:
        count = (size - start - 1) // 2
        count -= count % (TILE // 2) if count > TILE // 2 else 0
        end = min(start + count, rows)
        at = size - 2 * (end - start)
        steps, done = [], 0
        while done < end - start:
            steps.append(slice(done, min(at - start + 2 * done, end - start)))
            done = steps[-1].stop
        slots.append(Slot(slice(start, end), at, tuple(steps)))
        start = end
    return size, tuple(slots)


def spare_rows(rows: int) -> int:
    """Extra rows of memory for a chunk of `rows` rows with fp32 logits."""
    return rows // SPARE_EVERY + 2
