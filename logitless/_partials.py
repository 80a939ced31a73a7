"""A loss of rows that come in parts, blocks of columns or shards of a vocabulary.

Each part gives its `Partials`, in any order. Joined, they are the statistics of whole rows, of
which a loss that `merges` makes its value and the coefficients of its gradient. The gradient of a
part then needs that part's logits alone: `run.gradient(..., part=(start, vocab))`.
"""

from collections.abc import Iterable
from types import ModuleType

from torch import Tensor

from ._contract import Partials
from ._loss import RowLoss, Saved

WAITING = 4  # parts that are merged together


def settled(
    run: ModuleType, loss: RowLoss, parts: Iterable[Partials], vocab: int
) -> tuple[tuple[Tensor, ...], Saved]:
    """The outputs of a loss, and what its coefficients need, from parts that are all of its rows.

    The parts are merged as they come, so that few are in memory.
    """
    waiting: list[Partials] = []
    for part in parts:
        waiting.append(part)
        if len(waiting) == WAITING:
            waiting = [run.merge(waiting, loss.reading)]
    whole = waiting[0] if len(waiting) == 1 else run.merge(waiting, loss.reading)
    return loss.settle(run, run.finish(whole, loss.reading, vocab), vocab)
