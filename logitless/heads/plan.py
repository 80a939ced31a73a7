"""How a head's logits are cut to fit a workspace: by rows, by columns of the vocabulary, or both.

By rows, a chunk holds whole rows: its loss and its gradients follow at once, in three GEMMs. But
every chunk reads and writes the sum of the weight's gradient (V, D). By columns, the statistics of
all rows come first, block by block, and then every block's logits are made once more: four GEMMs,
but each block's part of the weight's gradient is complete at once. What is summed over blocks is
the gradient of hidden (N, D), which is smaller. In units of one GEMM over all logits:

    n whole rows at once              3 + s / n
    all rows, c columns at once       3 + 1 + r - kept + s / c
    n of the rows, c columns          3 + 1 + r + s / c + s / n

s (SUM_ROWS) is the number of rows in a GEMM that takes as long as reading and writing the sum, r
(STATISTICS_COST) what a second reading of the logits costs. `kept` is the share of logits that wait
in memory of the weight's gradient that is not written yet (heads/blocks.py).
"""

import functools
import itertools
from typing import NamedTuple

# Bytes of logits alive at once, by default; half as many more for logits in fp32 of 16-bit hidden
# states, which are then made in few large parts (on an H200 as fast as 16-bit ones).
WORKSPACE = {"cuda": 1 << 30, "cpu": 64 << 20}
TILE = 128  # rows that a GEMM works on together
PACK = 8  # columns: rows of 16-bit logits start on 16-byte boundaries

# Measured on an H200 with 64 to 256 MiB (docs/heads.md). A CPU multiplies so slowly that sums cost
# nothing beside it: there rows are always whole.
SUM_ROWS = {"cuda": 540.0}
STATISTICS_COST = 0.15  # of a GEMM: reading the logits once more, and merging statistics
MIN_GAIN = 0.1  # of a GEMM: columns are chosen where they save at least this

SPARE_EVERY = 64  # rows: the memory for logits in fp32 has a spare row for so many, and two more


class Cut(NamedTuple):
    """How many rows and columns of logits are made at once."""

    rows: int  # at most
    columns: int | None = None  # None is all of them
    kept: bool = False  # whether blocks may wait in the memory of the weight's gradient


class Work(NamedTuple):
    """A head, and what is asked of it."""

    rows: int
    vocab: int
    width: int  # of hidden
    itemsize: int  # of hidden
    wide: bool  # whether logits are in fp32, where hidden is not
    merges: bool  # whether blocks of columns tell what is asked
    gemms: int  # by columns, more than by rows: 0 or 1
    sums: bool  # whether the weight has a gradient, summed over rows in more bits than its own
    keeps: bool  # whether the weight's gradient has memory for logits


@functools.lru_cache(1024)
def choose(work: Work, workspace: int | None, device: str) -> Cut:
    """The way that should take the least time; whole rows unless a workspace is given."""
    limit = workspace or WORKSPACE.get(device, WORKSPACE["cuda"]) * (3 if work.wide else 2) // 2
    room = limit // (-(-work.vocab // PACK) * PACK * work.itemsize)
    if work.wide:
        room = (room - 2) * SPARE_EVERY // (SPARE_EVERY + 1)  # with its spare_rows
    best = Cut(max(room, 1))
    cost = SUM_ROWS.get(device, 0.0) * (1 if work.sums else 0.5)  # else a GEMM adds, or only reads
    rows = even_chunk(work.rows, room)
    if workspace is None or not cost or rows >= work.rows or not work.merges:
        return best
    least = cost / rows - MIN_GAIN
    groups = 1
    while work.rows >= groups * TILE:
        rows = -(-work.rows // groups)
        size = work.itemsize + (4 if work.wide else 0)  # gradient and logits lie apart
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
    """Blocks of columns whose logits wait in the weight's gradient, and the place of each there.

    Gradients are computed from the last block to the first. A block may wait where its place,
    rows · columns numbers long, ends before the block's own rows of the gradient, columns · width
    numbers each, begin: what is written there comes later.
    """
    found: dict[int, int] = {}
    for block in range(1, -(-vocab // columns)):
        if (len(found) + 1) * rows <= block * width:
            found[block] = len(found)
    return found


def even_chunk(rows: int, room: int) -> int:
    """How many of so many rows make a chunk, in a workspace with room for `room` of them.

    Whole tiles of a GEMM if it holds one, a power of two if it holds several, as batches are: then
    nothing is left over. Chunks are even, for the smallest costs a reading of the weight too.
    """
    most = max(room, 1)
    if most >= 8 * TILE:
        most = 1 << (most.bit_length() - 1)
    elif most >= TILE:
        most -= most % TILE
    even = -(-rows // max(-(-rows // most), 1))
    return max(min(most, -(-even // TILE) * TILE, rows), 1)


def even_columns(vocab: int, room: int) -> int:
    """How many columns make a block, in whole tiles and even; 0 where not one tile has room."""
    most = room - room % TILE
    if not most:
        return 0
    even = -(-vocab // -(-vocab // most))
    return -(-even // TILE) * TILE


@functools.lru_cache(1024)
def chunk_rows(rows: int, cut: Cut) -> int:
    """How many of so many rows make a chunk."""
    if cut.columns is None:
        return even_chunk(rows, cut.rows)
    return max(min(cut.rows, rows), 1)


@functools.lru_cache(1024)
def bounds(rows: int, count: int, cut: Cut) -> tuple[tuple[int, int], ...]:
    """Where chunks begin and end, where `count` of the rows are computed."""
    first = min(chunk_rows(rows, cut), count)
    step = chunk_rows(count - first, cut)
    starts = [*([0] if first else []), *range(first, count, step), count]
    return tuple(itertools.pairwise(starts))


class Part(NamedTuple):
    """Rows of a chunk whose logits are in memory together."""

    rows: slice  # of the chunk
    at: int  # where their logits begin, in rows of the memory
    steps: tuple[slice, ...]  # of the part: rows whose gradient may be written at once


@functools.lru_cache(1024)
def layout(rows: int, most: int, wide: bool) -> tuple[int, tuple[Part, ...]]:
    """Of the memory of a chunk: its length in rows of hidden's dtype, and what is made there.

    A gradient of the logits' own dtype is written over them, all at once. One of 16 bits, of logits
    in fp32, fills the memory from its start, while logits are made at its end, a part of the rows
    at a time: as many as fit after the gradient so far. The gradient of a part is written over
    logits of it that were read before, in steps, each as long as the gap before those not yet
    read. So fp32 logits need the memory of 16-bit ones, and of spare_rows more.
    """
    if not wide:
        return rows, (Part(slice(0, rows), 0, (slice(0, rows),)),)
    size = min(most + spare_rows(most), 3 * rows)
    parts, start = [], 0
    while start < rows:
        count = (size - start - 1) // 2
        count -= count % (TILE // 2) if count > TILE // 2 else 0
        end = min(start + count, rows)
        at = size - 2 * (end - start)
        steps, done = [], 0
        while done < end - start:
            steps.append(slice(done, min(at - start + 2 * done, end - start)))
            done = steps[-1].stop
        parts.append(Part(slice(start, end), at, tuple(steps)))
        start = end
    return size, tuple(parts)


def spare_rows(rows: int) -> int:
    """What the memory for so many rows in fp32 has beyond them."""
    return rows // SPARE_EVERY + 2
