"""`VocabShard`, for losses over a vocabulary that is sharded over the ranks of a process group.

rank_merge.py merges the statistics of all ranks' columns, so every loss accepts a VocabShard, with
bitwise the same result on all ranks. Forward gathers a few numbers per row: one all-gather for
logits, or one per chunk of rows for a head, and twice as many for JSD and TVD. Backward
communicates only to sum the gradient of a head's hidden states.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import TEACHER
from ..core import evaluate, tensor_checks
from ..core.call import check_values, in_func, named, thorough, under_transform
from ..core.capture import Capture, Captured
from ..core.choose_backend import backend_of
from ..core.in_place import overwrite_on
from ..core.invariant import aligned, is_invariant
from ..core.loss import RowLoss
from ..core.source import (
    Logits,
    Source,
    is_dense,
    is_over_ranks,
    teacher_columns,
    teacher_rows,
    without_wrapper,
)
from . import checks as rules
from . import same_call
from .rank_merge import ColumnBackend
from .ranks import Ranks, ranks_of


class Layout(NamedTuple):
    starts: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def vocab(self) -> int:
        return sum(self.widths)


# The largest width, keyed by (group, vocab) only: a key with this rank's columns could miss on some
# ranks, which would then wait for an exchange that the others never start.
_widest: dict[tuple, int] = {}


def exchanged(
    ranks: Ranks, width: int, start: int | None, vocab: int | None, device: torch.device
) -> Layout:
    """Each rank sends its width and start, and the host waits for the result."""
    own = [width, -1 if start is None else start]
    gathered = (
        [own] if ranks.count == 1 else ranks.gather(torch.tensor(own, device=device)).tolist()
    )
    widths = tuple(width for width, _ in gathered)
    before = [sum(widths[:rank]) for rank in range(len(widths))]
    starts = (first if at < 0 else at for (_, at), first in zip(gathered, before, strict=True))
    layout = Layout(tuple(starts), widths)
    rules.tiles(layout.starts, layout.widths, vocab)
    return layout


class VocabShard(Logits):
    """This rank's columns of logits (..., V), where V is the sum of the widths of all ranks.

    `source` is this rank's logits (..., width), a LinearLogits over this rank's rows of the head's
    weight, or the lazy logits of a fused head, for which the caller must sum the gradient of the
    hidden states over ranks. Widths can differ, and be 0. `group` is a process group or a
    DeviceMesh of one dimension; None means the default process group, or a single process if
    torch.distributed is not initialised.

    Every loss accepts a VocabShard instead of logits; all ranks make the same call. Ids, labels and
    class weights refer to the whole vocabulary, and must be the same on all ranks. A dense teacher
    is a VocabShard with the same columns, or has all V columns, as a tensor, a LinearLogits or lazy
    logits.

    All ranks must construct the shard together, because they exchange their widths, for which the
    host waits. `start` is this rank's first column, by default the sum of the earlier ranks'
    widths, and `vocab` is V. If all ranks pass both, only the first shard of this group and `vocab`
    exchanges them (with LOGITLESS_CHECK=1, every shard).

    With sequence_parallel=True, `source` must be a LinearLogits of this rank's tokens: a slice of
    the hidden states along the first dimension, of the same size on all ranks. VocabShard gathers
    the hidden states, and labels must cover the tokens of all ranks.

    >>> loss = cross_entropy(VocabShard(logits_of_this_rank, group), target)
    """

    @named()
    def __init__(
        self,
        source: Any,
        group: Any = None,
        start: int | None = None,
        *,
        vocab: int | None = None,
        sequence_parallel: bool = False,
    ):
        super().__init__(Shard.of(source, group, start, vocab, sequence_parallel))

    @property
    def start(self) -> int:
        """This rank's first column."""
        return self._source.start

    @property
    def width(self) -> int:
        """The number of this rank's columns."""
        return self._source.width

    def materialize(self) -> Tensor:
        """Gathers the logits of all ranks into a tensor of shape (..., V), without a gradient."""
        return self._source.materialize()


class Shard(Source):
    over_ranks = True
    # Whether logitless sums the gradient of the hidden states over ranks; if not, the caller must.
    sums_hidden = True

    def __init__(self, source: Any, ranks: Ranks, start: int | None, vocab: int | None):
        self.ranks, self.width = ranks, source.shape[-1]
        self._set_columns(start, vocab, source.device)
        self._set_source(source)

    @staticmethod
    def of(
        source: Any,
        group: Any = None,
        start: int | None = None,
        vocab: int | None = None,
        sequence_parallel: bool = False,
    ) -> "Shard":
        ranks, source = ranks_of(group), without_wrapper(source)
        _check(ranks, source, start, vocab, sequence_parallel)
        if sequence_parallel:
            source = source.over_all_tokens(ranks.gather)
        return Shard(source, ranks, start, vocab)

    def _set_columns(self, start: int | None, vocab: int | None, device: torch.device) -> None:
        # `layout` stays None if `start` and `vocab` are given, except with LOGITLESS_CHECK=1.
        self.layout: Layout | None = None
        key, given = (self.ranks.group, vocab), start is not None and vocab is not None
        if given and key in _widest and self.ranks.count > 1 and not thorough():
            rules.inside(start, self.width, vocab)
            self.start, self.vocab, self.widest = start, vocab, _widest[key]
            return
        layout = exchanged(self.ranks, self.width, start, vocab, device)
        self.start, self.vocab = layout.starts[self.ranks.index], layout.vocab
        self.widest = max(layout.widths)
        if given:
            _widest[key] = self.widest
        if not given or thorough():
            self.layout = layout

    def _set_source(self, source: Any) -> None:
        self.source = source = columns_of(source)
        if source is not None:
            self.shape = torch.Size((*source.shape[:-1], self.vocab))
            self.dtype, self.device = source.dtype, source.device
            self.requires_grad = source.requires_grad

    def over(self, source: Any, **changed) -> "Shard":
        """Returns a copy with another `source`, which can be None."""
        copy = object.__new__(Shard)
        copy.__dict__.update(self.__dict__, **changed)
        copy._set_source(source)
        return copy

    def whole(self) -> Source:
        """The logits of all ranks as a `Source`, of which this rank computes its own columns."""
        return self.source.in_columns(self)

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        if torch.compiler.is_compiling():  # this call breaks the graph of torch.compile
            return torch.compiler.disable(_evaluate)(self, loss, reduction, row_weight)
        return _evaluate(self, loss, reduction, row_weight)

    def evaluate_in_place(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        if not self.requires_grad or not torch.is_grad_enabled() or under_transform():
            return self.evaluate(loss, reduction, row_weight)
        return self.whole().evaluate_in_place(loss, reduction, row_weight)

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        whole = self.whole()
        if thorough():
            self.ranks.agree(same_call.text_of_capture(self, capture, temperature, softcap))
        return whole.capture(capture, temperature, softcap)

    def backend(self, like: Tensor) -> ColumnBackend:
        return ColumnBackend(
            backend_of(like), self.start, self.width, self.vocab, self.ranks.gather,
            self.widest,
        )  # fmt: skip

    def head_backend(self, like: Tensor, gathered: bool) -> ColumnBackend:
        """A backend that can also sum the gradient of the hidden states over ranks.

        If they are `gathered` from all ranks, each rank needs only the gradient of its own.
        """
        backend = self.backend(like)
        if gathered:
            backend.reduce_scatter = self.ranks.reduce_scatter
        elif self.sums_hidden:
            backend.all_reduce = self.ranks.all_reduce
        return backend

    def materialize(self, rows: slice | Tensor | None = None) -> Tensor:
        """Gathers the logits (..., V) of all ranks, or (n, V) of `rows`, without a gradient."""
        local = self.local(rows).detach()
        layout = self.layout
        if layout is None:
            layout = exchanged(self.ranks, self.width, self.start, self.vocab, self.device)
        padded = local.new_zeros((*local.shape[:-1], max(layout.widths)))
        padded[..., : self.width] = local
        gathered = self.ranks.gather(padded)
        order = sorted(zip(*layout, range(self.ranks.count), strict=True))
        return torch.cat([gathered[rank, ..., :width] for _, width, rank in order], -1)

    def local(self, rows: slice | Tensor | None = None) -> Tensor:
        """This rank's logits (..., width), or (n, width) of `rows`."""
        return self.source.materialize(rows)

    def as_teacher(self) -> "Shard":
        return self.over(self.source.as_teacher())

    def times(self, factor: float) -> "Shard | None":
        """A shard of `factor` times the logits; None for a tensor, which would be copied."""
        scaled = self.source.times(factor)
        return None if scaled is None else self.over(scaled)

    def ranks_of_call(self) -> Ranks:
        return self.ranks

    def checked(self, loss: RowLoss, reduction: str, row_weight: Tensor | None) -> RowLoss:
        """Checks a loss, and restricts its teachers to this rank's columns.

        LOGITLESS_CHECK=1 also compares the calls of all ranks.
        """
        if thorough():
            text = same_call.text_of_loss(self, loss, reduction, row_weight)
            self.ranks.agree(text)
        check_values(loss)
        return loss.map_tensors({TEACHER: self.cut})

    def cut(self, teacher):
        """This rank's columns of a teacher, which is a shard or has all columns."""
        if is_over_ranks(teacher):
            rules.same_columns(teacher.columns_beside(self), self.columns_beside(teacher))
            local = teacher.as_teacher().source
        else:
            local = columns_of(teacher_columns(teacher, self.start, self.width))
        if local.exists:
            return local.x.detach()
        # Beside a student's tensor, the teacher's logits are materialised too.
        exist = self.source.exists
        return local.materialize(slice(None)).view(self.source.shape) if exist else local

    def columns_beside(self, other: "Shard") -> Layout:
        """The columns to compare with those of `other`: of all ranks if both layouts are known."""
        if self.layout is None or other.layout is None:
            return Layout((self.start,), (self.width,))
        return self.layout

    def __repr__(self) -> str:
        return f"VocabShard({self.source!r}, columns {self.start} to {self.start + self.width})"


class Columns(Source):
    """A tensor of one rank's columns."""

    exists = True

    def __init__(self, x: Tensor):
        self.x, self.shape, self.dtype, self.device = x, x.shape, x.dtype, x.device
        self.requires_grad = x.requires_grad

    def materialize(self, rows: slice | Tensor | None = None) -> Tensor:
        return self.x if rows is None else teacher_rows(self.x, rows)

    def as_teacher(self) -> "Columns":
        return self  # `cut` detaches the tensor

    def times(self, factor: float) -> None:
        """None: the product would copy the tensor."""

    def in_columns(self, shard: Shard) -> Source:
        return LogitColumns(self.x, shard)

    def describe(self) -> str:
        return f"logits {(*self.shape[:-1], str(self.dtype))}"


def columns_of(source: Any) -> Any:
    """Wraps a tensor of one rank's columns in `Columns`."""
    return Columns(source) if is_dense(source) else source


class LogitColumns(Source):
    """The logits of all ranks, of which this rank holds its own columns as a tensor."""

    def __init__(self, x: Tensor, shard: Shard):
        self.shard, self.x = shard, x
        self.shape, self.dtype, self.device = shard.shape, shard.dtype, shard.device
        self.requires_grad = shard.requires_grad

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        loss = self.shard.checked(loss, reduction, row_weight)
        backend = self.shard.backend(self.x)
        run = evaluate.evaluate_invariant if loss.reading.invariant else evaluate.evaluate_on
        return run(backend, self.x, loss, reduction, row_weight)

    def evaluate_in_place(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        loss = self.shard.checked(loss, reduction, row_weight)
        return overwrite_on(self.shard.backend(self.x), self.x, loss, reduction, row_weight)

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        x, invariant = self.x.detach(), is_invariant()
        x = aligned(x) if invariant else x
        return capture.of(self.shard.backend(x), x, temperature, softcap, invariant)


def _check(ranks: Ranks, *arguments: Any) -> None:
    try:
        rules.shard(*arguments)
    except Exception as error:
        if thorough():
            ranks.refuse(error)
        raise
    if thorough():
        ranks.agree(same_call.text_of_shard(*arguments))


def _evaluate(shard: Shard, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    if in_func():
        tensor_checks.no_head_in_func()
    return shard.whole().evaluate(loss, reduction, row_weight)
