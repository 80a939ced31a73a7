"""Chooses how a head's logits are computed: by rows, by columns, by rows and columns, or on chip.

If `stays_on_chip` returns True, the logits of a head are never written to memory (on_chip.py). For
all other heads, the logits are split into chunks of rows or blocks of columns that fit into a
workspace.

A split by rows takes three GEMMs. A split by rows computes the loss and the gradients of some whole
rows at once. The weight's gradient (V, D) is summed over chunks, so every chunk reads and writes
this sum. A split by columns takes four GEMMs. A split by columns first computes the statistics of
all rows, block by block. Then the logits of every block are computed again, for the gradients. Each
row of the weight's gradient is written only once. Only the gradient of `hidden` (N, D) is summed
over blocks. The gradient of `hidden` is smaller than the weight's gradient.

The unit of all costs is the time of one GEMM over all logits. Reading and writing the sum of the
weight's gradient takes as long as a GEMM over SUM_ROWS rows. STATISTICS_COST is the time to read
the logits a second time and to merge statistics. A split by columns can keep some logits, which are
then computed only once. The kept logits stay in the memory of the weight's gradient until their own
gradient is computed (blocks.py). In the formulas below, `kept` is the fraction of the logits that
are kept.

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

# The default number of bytes of logits in memory at once. On a GPU, the default is larger if one
# row of logits takes more than 1 MiB (`default_workspace`). For fp32 logits of 16-bit hidden
# states, the default is 1.5 times as large. So a chunk of fp32 logits needs only a few slots (see
# `layout`). With this default, a loss over fp32 logits on an H200 is as fast as a loss over 16-bit
# logits.
WORKSPACE = {"cuda": 1 << 30, "cpu": 64 << 20}
TILE = 128  # rows per tile of a GEMM
# Each row of logits is padded to a multiple of PACK columns, so that every row of 16-bit logits
# starts on a 16-byte boundary.
PACK = 8

# SUM_ROWS was measured on an H200 with workspaces of 64 to 256 MiB (docs/heads.md). On a CPU, sums
# cost little compared with GEMMs, so a CPU always computes whole rows.
SUM_ROWS = {"cuda": 540.0}
# The time to read the logits a second time and to merge statistics, in units of one GEMM.
STATISTICS_COST = 0.15
# A split by columns is chosen only if it saves at least MIN_GAIN times the cost of one GEMM.
MIN_GAIN = 0.1

# A small head (small.py) has at most SMALL bytes of logits.
SMALL = {"cuda": 512 << 20, "cpu": 1 << 20}
# For a small head, rows · V · (D + READ_WIDTH) is also at most SMALL_WORK. D is the size of the
# hidden states. For a head at this limit, a GPU takes about 2 ms for the loss, and the host takes
# at least as long. READ_WIDTH accounts for the time to read and write the logits. Reading and
# writing the logits takes as long as the three GEMMs of a head with D = READ_WIDTH.
SMALL_WORK = {"cuda": 2e11, "cpu": math.inf}
READ_WIDTH = 200

# A dict {largest D: largest vocabulary} of limits for heads that are computed on the chip. D is the
# size of the hidden states. Only 16-bit heads within these limits are computed on the chip. On an
# H200, heads with a larger D are faster with logits in memory (benchmarks/results/h200/narrow.md).
ON_CHIP_VOCAB = {128: 1 << 31}
# The on-chip kernels need sorted pairs (row, id). Each row has one pair for its label, and one pair
# for each further id. Sorting the pairs takes time, and needs 64 bytes of memory per pair. So a
# head is computed on the chip only if its loss has at most ON_CHIP_PAIRS pairs.
ON_CHIP_PAIRS = 1 << 19

# If the logits are fp32, a chunk of n rows takes as much memory as n + n // 64 + 2 rows of 16-bit
# logits.
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
    """The sizes and properties that determine the best split of a head."""

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


# The function that replaces `choose` inside `with override(...)`.
forced: Callable[[Work, int | None, str], Cut] | None = None


@contextlib.contextmanager
def override(cut: Callable[[Work], Cut]):
    """Replaces `choose` by the function `cut` inside a `with` block, for tests and benchmarks."""
    global forced
    before, forced = forced, lambda work, *_: cut(work)
    try:
        yield
    finally:
        forced = before


@functools.lru_cache(1024)
def choose(work: Work, workspace: int | None, device: str) -> Cut:
    """Returns the split with the least estimated time.

    If `workspace` is None, only two results are possible: a split by rows, or on-chip kernels.
    """
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
    """Returns the default workspace in bytes. `row` is the size of a row of logits in bytes.

    On a GPU, the default workspace is enlarged to hold at least 1,024 rows, but never to more than
    2 · WORKSPACE. With fewer rows per chunk, summing the weight's gradient would take much of the
    time.
    """
    usual = WORKSPACE.get(device, WORKSPACE["cuda"])
    return usual if device == "cpu" else min(max(usual, 1024 * row), 2 * usual)


def extra_cost(work: Work, cut: Cut, device: str) -> float:
    """Returns the estimated cost of a split, not counting the GEMMs that every split needs."""
    # If the weight's gradient is summed in the dtype of the weight, the GEMM adds each product
    # directly to the gradient. Then summing takes half as long as in fp32.
    cost = SUM_ROWS.get(device, 0.0) * (1 if work.sums else 0.5)
    if cut.columns is None:
        rows = even_chunk(work.rows, cut.rows)
        return cost / rows if rows < work.rows else 0.0
    groups = cost / cut.rows if cut.rows < work.rows else 0.0
    again = work.gemms - len(blocks_kept(work, cut)) * cut.columns / work.vocab
    return again + STATISTICS_COST + cost / cut.columns + groups


def blocks_kept(work: Work, cut: Cut) -> dict[int, int]:
    """Returns a dict {block: slot} of the blocks that a split by columns keeps in memory."""
    if not cut.kept or cut.columns is None:
        return {}
    return kept_blocks(cut.rows, work.vocab, work.width, cut.columns)


def is_small(
    rows: int, vocab: int, width: int, itemsize: int, workspace: int | None, device: str
) -> bool:
    """Whether a head has so few logits that the host takes longer than the device.

    The logits may take only a quarter of `workspace`, because a loss can need four times the memory
    of its logits. For example, 16-bit logits, their saved fp32 gradient and their 16-bit gradient
    together take four times the memory of the logits.
    """
    count, limit = rows * vocab, SMALL[device]
    if workspace is not None:
        limit = min(limit, workspace // 4)
    return count * itemsize <= limit and count * (width + READ_WIDTH) <= SMALL_WORK[device]


def stays_on_chip(work: Work) -> bool:
    """Whether the head is computed on the chip, without writing logits to memory."""
    if not (work.narrow and work.merges and work.itemsize == 2):
        return False
    widest = [width for width in ON_CHIP_VOCAB if width >= work.width]
    pairs = work.rows * (work.ids + 1)
    return bool(widest) and work.vocab <= ON_CHIP_VOCAB[min(widest)] and pairs <= ON_CHIP_PAIRS


def kept_blocks(rows: int, vocab: int, width: int, columns: int) -> dict[int, int]:
    """Returns a dict {block: slot} of the blocks whose logits are kept in memory.

    A slot is a part of the memory of the weight's gradient. A slot holds the logits (rows, columns)
    of one block. Each block writes `columns` rows of the weight's gradient. These rows hold columns
    · width numbers. The last block writes first, and block 0 writes last. While a GEMM writes the
    rows of block b, the GEMM still reads the slot of block b. So the slot must end before these
    rows begin in memory.
    """
    kept: dict[int, int] = {}
    for block in range(1, -(-vocab // columns)):
        if (len(kept) + 1) * rows <= block * width:
            kept[block] = len(kept)
    return kept


def even_chunk(rows: int, room: int) -> int:
    """Returns the number of rows per chunk, for a workspace with room for `room` rows.

    If `room` is at least 8 · TILE, the function first rounds `room` down to a power of two. If
    `room` is smaller, but at least TILE, the function rounds `room` down to a multiple of TILE. In
    most batches, the number of rows is a power of two. If `room` is a power of two as well, all
    chunks of such a batch have the same size. Other batches are split into chunks of nearly equal
    size, because even a short last chunk would read the whole weight.
    """
    most = max(room, 1)
    if most >= 8 * TILE:
        most = 1 << (most.bit_length() - 1)
    elif most >= TILE:
        most -= most % TILE
    even = -(-rows // max(-(-rows // most), 1))
    return max(min(most, -(-even // TILE) * TILE, rows), 1)


def even_columns(vocab: int, room: int) -> int:
    """Returns the number of columns per block, a multiple of TILE.

    The workspace has room for `room` columns. The result is 0 if `room` is less than TILE.

    All blocks have the same size, except the last block.
    """
    most = room - room % TILE
    if not most:
        return 0
    even = -(-vocab // -(-vocab // most))
    return -(-even // TILE) * TILE


@functools.lru_cache(1024)
def chunk_rows(rows: int, cut: Cut) -> int:
    """Returns the number of rows per chunk."""
    if cut.columns is None and not (cut.on_chip or cut.whole):
        return even_chunk(rows, cut.rows)
    return max(min(cut.rows, rows), 1)


@functools.lru_cache(1024)
def bounds(rows: int, count: int, cut: Cut) -> tuple[tuple[int, int], ...]:
    """Returns (start, end) of each chunk. The chunks contain only the first `count` rows."""
    first = min(chunk_rows(rows, cut), count)
    step = chunk_rows(count - first, cut)
    starts = [*([0] if first else []), *range(first, count, step), count]
    return tuple(itertools.pairwise(starts))


class Slot(NamedTuple):
    """A range of rows of a chunk. The logits of these rows are in memory at the same time."""

    rows: slice  # a range of rows of the chunk
    at: int  # the row of the chunk's memory at which the logits begin
    steps: tuple[slice, ...]  # ranges of rows; the gradient is written one range at a time


@functools.lru_cache(1024)
def layout(rows: int, most: int, wide: bool) -> tuple[int, tuple[Slot, ...]]:
    """Returns the size of a chunk's memory, and the slots of the chunk (see `Slot`).

    The unit of the size is the memory of one row of logits in the dtype of `hidden`.

    If the gradient has the dtype of the logits, one slot holds the logits of all rows, and the
    gradient overwrites these logits. Otherwise, the logits are fp32 and the gradient is 16-bit. The
    gradient is then written from the left end of the memory to the right. The logits of a slot are
    stored at the right end:

        | gradient of earlier slots | gap |  logits of this slot, fp32  |
        | gradient so far                 ▸ overwrites logits already read

    A slot holds as many rows of logits as fit after the gradient of earlier slots. The gradient of
    a slot is written in several steps. Each step ends before the gradient would overwrite logits
    that are still needed. So if the logits are fp32, a chunk of n rows takes only as much memory as
    n + spare_rows(n) rows of 16-bit logits.
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
    """Returns the number of extra rows of memory, for a chunk of `rows` rows with fp32 logits."""
    return rows // SPARE_EVERY + 2
