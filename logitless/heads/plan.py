"""How a head's logits are cut to fit a workspace: by rows, by columns of the vocabulary, or both.

By rows, a chunk holds whole rows. Its loss and its gradients follow at once, in three GEMMs, but
every chunk reads and writes the sum of the weight's gradient (V, D). By columns, the statistics of
all rows come first, block by block, and then every block's logits are computed again. That takes
four GEMMs, but each block's rows of the weight's gradient are complete at once, and the gradient of
hidden (N, D), which is summed over blocks, is smaller. In units of one GEMM over all logits:

    n whole rows at once              3 + s / n
    all rows, c columns at once       3 + 1 + r - kept + s / c
    n of the rows, c columns          3 + 1 + r + s / c + s / n

s (SUM_ROWS) is the number of rows in a GEMM that takes as long as reading and writing the sum, r
(STATISTICS_COST) is the cost of reading the logits a second time. `kept` is the share of logits
that are kept in memory of the weight's gradient that is not written yet (blocks.py).
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

# Bytes of logits in memory at once, by default. fp32 logits of 16-bit hidden states get half as
# many again: they are then computed in few large slots, on an H200 as fast as 16-bit logits.
WORKSPACE = {"cuda": 1 << 30, "cpu": 64 << 20}
TILE = 128  # rows that a GEMM works on together
PACK = 8  # columns: rows of 16-bit logits start on 16-byte boundaries

# Measured on an H200 with 64 to 256 MiB (docs/heads.md). On a CPU, GEMMs are so slow that sums cost
# nothing in comparison, so rows are always whole there.
SUM_ROWS = {"cuda": 540.0}
STATISTICS_COST = 0.15  # of a GEMM: reading the logits once more, and merging statistics
MIN_GAIN = 0.1  # of a GEMM: columns are chosen where they save at least this

SPARE_EVERY = 64  # memory for fp32 logits has one spare row per 64 rows, and two more


class Cut(NamedTuple):
    """How many rows and columns of logits are computed at once."""

    rows: int  # at most
    columns: int | None = None  # None is all of them
    kept: bool = False  # whether the weight's gradient may keep blocks in its memory


class Work(NamedTuple):
    """The size of a computation over a head."""

    rows: int
    vocab: int
    width: int  # of hidden
    itemsize: int  # of hidden
    wide: bool  # whether logits are in fp32, where hidden is not
    merges: bool  # whether the loss can be computed block by block
    gemms: int  # extra GEMMs if cut by columns: 0 or 1
    sums: bool  # whether the weight's gradient is summed over rows in more bits than its own
    keeps: bool  # whether the weight's gradient, until it is written, may hold logits


# What cuts every head instead of `choose`, in a block of `override`.
forced: Callable[[Work, int | None, str], Cut] | None = None


@contextlib.contextmanager
def override(cut: Callable[[Work], Cut]):
    """Every head is cut as cut(work) says in this block: for tests and benchmarks."""
    global forced
    before, forced = forced, lambda work, *_: cut(work)
    try:
        yield
    finally:
        forced = before


@functools.lru_cache(1024)
def choose(work: Work, workspace: int | None, device: str) -> Cut:
    """The cut with the least estimated time; whole rows unless a workspace is given."""
    limit = workspace or WORKSPACE.get(device, WORKSPACE["cuda"]) * (3 if work.wide else 2) // 2
    room = limit // (-(-work.vocab // PACK) * PACK * work.itemsize)
    if work.wide:
        room = (room - 2) * SPARE_EVERY // (SPARE_EVERY + 1)  # without the spare_rows
    best = Cut(max(room, 1))
    cost = SUM_ROWS.get(device, 0.0) * (1 if work.sums else 0.5)  # otherwise the GEMM itself adds
    rows = even_chunk(work.rows, room)
    if workspace is None or not cost or rows >= work.rows or not work.merges:
        return best
    least = cost / rows - MIN_GAIN
    groups = 1
    while work.rows >= groups * TILE:
        rows = -(-work.rows // groups)
        size = work.itemsize + (4 if work.wide else 0)  # the gradient has memory of its own
        columns = even_columns(work.vocab, limit // (rows * size))
        if columns:
            kept = 0.0
            if groups == 1 and work.keeps:
                blocks = kept_blocks(rows, work.vocab, work.width, columns)
                kept = len(blocks) * columns / work.vocab
            extra = work.gemms + STATISTICS_COST - kept + cost / columns
            extra += cost / rows if groups > 1 else 0.0
            if extra < least:
                best, least = Cut(rows, columns, kept > 0), extra
        groups *= 2
    return best


def kept_blocks(rows: int, vocab: int, width: int, columns: int) -> dict[int, int]:
    """Blocks of columns that the weight's gradient keeps in its memory, and the place of each.

    Gradients are computed from the last block to the first. A place is rows · columns numbers long,
    and each block's own rows of the gradient take columns · width numbers. A block may be kept
    where its place ends before the block's own rows begin, because those are written later.
    """
    kept: dict[int, int] = {}
    for block in range(1, -(-vocab // columns)):
        if (len(kept) + 1) * rows <= block * width:
            kept[block] = len(kept)
    return kept


def even_chunk(rows: int, room: int) -> int:
    """The number of rows per chunk, in a workspace with room for `room` rows.

    Whole tiles of a GEMM if one fits. A power of two if several fit: batches are powers of two, and
    nothing is left over. All chunks have the same size, because even a short last chunk would read
    the whole weight.
    """
    most = max(room, 1)
    if most >= 8 * TILE:
        most = 1 << (most.bit_length() - 1)
    elif most >= TILE:
        most -= most % TILE
    even = -(-rows // max(-(-rows // most), 1))
    return max(min(most, -(-even // TILE) * TILE, rows), 1)


def even_columns(vocab: int, room: int) -> int:
    """The number of columns per block: whole tiles, equal blocks; 0 if no tile fits."""
    most = room - room % TILE
    if not most:
        return 0
    even = -(-vocab // -(-vocab // most))
    return -(-even // TILE) * TILE


@functools.lru_cache(1024)
def chunk_rows(rows: int, cut: Cut) -> int:
    """The number of rows per chunk."""
    if cut.columns is None:
        return even_chunk(rows, cut.rows)
    return max(min(cut.rows, rows), 1)


@functools.lru_cache(1024)
def bounds(rows: int, count: int, cut: Cut) -> tuple[tuple[int, int], ...]:
    """The begin and end of each chunk, if `count` of the rows are computed."""
    first = min(chunk_rows(rows, cut), count)
    step = chunk_rows(count - first, cut)
    starts = [*([0] if first else []), *range(first, count, step), count]
    return tuple(itertools.pairwise(starts))


class Slot(NamedTuple):
    """Rows of a chunk whose logits are in memory together."""

    rows: slice  # of the chunk
    at: int  # where their logits begin, in rows of the memory
    steps: tuple[slice, ...]  # rows of the slot; the gradient is written one step at a time


@functools.lru_cache(1024)
def layout(rows: int, most: int, wide: bool) -> tuple[int, tuple[Slot, ...]]:
    """The memory of a chunk: its length in rows of hidden's dtype, and the slots in it.

    A gradient in the logits' own dtype overwrites them all at once, in one slot. The 16-bit
    gradient of fp32 logits grows from the left, while the fp32 logits of a slot stand at the right
    end:

        | gradient of earlier slots | gap |  logits of this slot, fp32  |
        | gradient so far                 ▸ overwrites logits already read

    Each slot has as many rows as fit to the right of the gradient so far. Its gradient is written
    in steps, and each step is as long as the gap before the first unread row, so that no unread row
    is overwritten. So fp32 logits need the memory of 16-bit logits and of spare_rows more.
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
    """The number of spare rows in the memory for so many rows of fp32 logits."""
    return rows // SPARE_EVERY + 2
