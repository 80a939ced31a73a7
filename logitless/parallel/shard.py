"""`VocabShard`, for losses over a vocabulary that is sharded over the ranks of a process group.

`VocabShard(source, group)` represents one rank's columns of the logits. The source is a tensor with
these columns, a LinearLogits over this rank's rows of the head's weight, or the lazy logits of a
fused head. rank_merge.py merges the statistics of all ranks' columns, so every loss accepts a
VocabShard. All ranks call the same loss with the same arguments. Ids refer to the whole vocabulary.
The result is bitwise the same on all ranks.

The forward of a loss gathers a few numbers per row from each rank. For logits, the forward needs
one all-gather. For a head, the forward needs one all-gather per chunk of rows. JSD and TVD need
twice as many all-gathers. For logits, the backward needs no communication. For a head, the backward
sums the gradient of the hidden states over ranks. When a VocabShard is constructed, the ranks
exchange their widths. If `start` is given, the ranks also exchange their first columns. If `start`
and `vocab` are given, only the first VocabShard with this group and this `vocab` exchanges widths.
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
    """The first column and the number of columns of each rank."""

    starts: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def vocab(self) -> int:
        return sum(self.widths)


# This dict caches the largest width of all ranks. The cache is used if `start` and `vocab` are
# given. The key is the group and the vocabulary size. If a rank finds no cached width, the rank
# exchanges widths with the other ranks. An exchange that only some ranks start never finishes. So
# the key is the same on all ranks, and does not contain this rank's columns. Otherwise, a second
# VocabShard could have new columns on only some ranks, and only these ranks would start an
# exchange.
_widest: dict[tuple, int] = {}


def exchanged(
    ranks: Ranks, width: int, start: int | None, vocab: int | None, device: torch.device
) -> Layout:
    """Returns the `Layout`: the first column and the number of columns of each rank.

    Each rank sends its width and start, and the host waits for the result.
    """
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

    `source` is this rank's logits (..., width), or a LinearLogits over this rank's rows of the
    head's weight. Ranks can have different widths, and a width can be 0. `source` can also be the
    lazy logits of a fused head. For lazy logits, the caller must sum the gradient of the hidden
    states over ranks.

    `group` is a process group or a DeviceMesh of one dimension. A `group` of None means the default
    process group, or a single process if torch.distributed is not initialised. All ranks must
    construct the shard together, because the constructor exchanges the widths of the ranks. The
    host waits for this exchange.

    `start` is this rank's first column. By default, `start` is the sum of the earlier ranks'
    widths. `vocab` is the size V of the whole vocabulary. If all ranks pass `start` and `vocab`,
    only the first shard with this group and this `vocab` exchanges starts and widths. Later shards
    with the same group and `vocab` need no exchange, so the host does not wait. With
    LOGITLESS_CHECK=1, every shard exchanges starts and widths.

    With sequence_parallel=True, `source` must be a LinearLogits that holds only the hidden states
    of this rank's tokens. These tokens are a slice along the first dimension. The slices of all
    ranks must have the same size. VocabShard all-gathers the hidden states. Labels must cover the
    tokens of all ranks.

    Every loss accepts a VocabShard instead of logits. Ids, labels and class weights refer to the
    whole vocabulary and must be the same on all ranks. A dense teacher must be a VocabShard with
    the same columns, or must have all V columns. A teacher with all V columns can be a tensor, a
    LinearLogits or lazy logits.

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
    """One rank's columns of the logits, and the ranks that hold the other columns."""

    over_ranks = True
    # Whether logitless sums the gradient of the hidden states over ranks. If False, the caller must
    # sum this gradient over ranks.
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
        """Checks the arguments of a VocabShard, and returns its `Shard`."""
        ranks, source = ranks_of(group), without_wrapper(source)
        _check(ranks, source, start, vocab, sequence_parallel)
        if sequence_parallel:
            source = source.over_all_tokens(ranks.gather)
        return Shard(source, ranks, start, vocab)

    def _set_columns(self, start: int | None, vocab: int | None, device: torch.device) -> None:
        """Sets this rank's columns, and the largest width of all ranks."""
        # The layout stays None if `start` and `vocab` are given. With LOGITLESS_CHECK=1, the layout
        # is always set.
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
        """Returns a copy of the shard with another `source`, which can be None."""
        copy = object.__new__(Shard)
        copy.__dict__.update(self.__dict__, **changed)
        copy._set_source(source)
        return copy

    def whole(self) -> Source:
        """Returns the logits of all ranks as a `Source`.

        This rank computes only its own columns.
        """
        return self.source.in_columns(self)

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """Returns the weighted and reduced loss. The result is the same on all ranks."""
        if torch.compiler.is_compiling():  # this call breaks the graph of torch.compile
            return torch.compiler.disable(_evaluate)(self, loss, reduction, row_weight)  # pyright: ignore[reportCallIssue]
        return _evaluate(self, loss, reduction, row_weight)

    def evaluate_in_place(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """Computes the loss as `evaluate` does. The gradient overwrites this rank's logits."""
        if not self.requires_grad or not torch.is_grad_enabled() or under_transform():
            return self.evaluate(loss, reduction, row_weight)
        return self.whole().evaluate_in_place(loss, reduction, row_weight)

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        """Returns the results of a capture. The results are the same on all ranks."""
        whole = self.whole()
        if thorough():
            self.ranks.agree(same_call.text_of_capture(self, capture, temperature, softcap))
        return whole.capture(capture, temperature, softcap)

    def backend(self, like: Tensor) -> ColumnBackend:
        """Returns the backend that merges the partial statistics of all ranks."""
        return ColumnBackend(
            backend_of(like), self.start, self.width, self.vocab, self.ranks.gather,
            self.widest,
        )  # fmt: skip

    def head_backend(self, like: Tensor, gathered: bool) -> ColumnBackend:
        """Returns a backend for a head.

        This backend can also sum the gradient of `hidden` over ranks. If `gathered` is True, the
        hidden states were gathered from all ranks. Each rank then needs only the gradient of its
        own hidden states.
        """
        backend = self.backend(like)
        if gathered:
            backend.reduce_scatter = self.ranks.reduce_scatter
        elif self.sums_hidden:
            backend.all_reduce = self.ranks.all_reduce
        return backend

    def materialize(self, rows: slice | Tensor | None = None) -> Tensor:
        """Gathers the logits of all ranks into a tensor of shape (..., V), without a gradient.

        With `rows`, the result holds only the logits of these n rows, and has the shape (n, V).
        """
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
        """Returns this rank's logits, as a tensor of shape (..., width).

        With `rows`, the result holds only these n rows, and has the shape (n, width).
        """
        return self.source.materialize(rows)

    def as_teacher(self) -> "Shard":
        """Returns a shard of the same logits without a gradient."""
        return self.over(self.source.as_teacher())

    def times(self, factor: float) -> "Shard | None":
        """Returns a shard of these logits multiplied by `factor`.

        Returns None if the source is a tensor, because a multiplication would copy the tensor.
        """
        scaled = self.source.times(factor)
        return None if scaled is None else self.over(scaled)

    def ranks_of_call(self) -> Ranks:
        return self.ranks

    def checked(self, loss: RowLoss, reduction: str, row_weight: Tensor | None) -> RowLoss:
        """Checks a loss, and restricts its teachers to this rank's columns.

        The values of GPU tensors are checked only with LOGITLESS_CHECK=1, because the check makes
        the host wait for the GPU. LOGITLESS_CHECK=1 also compares the calls of all ranks.
        """
        if thorough():
            text = same_call.text_of_loss(self, loss, reduction, row_weight)
            self.ranks.agree(text)
        check_values(loss)
        return loss.map_tensors({TEACHER: self.cut})

    def cut(self, teacher):
        """Returns this rank's columns of a teacher. The teacher is a shard, or has all columns."""
        if is_over_ranks(teacher):
            rules.same_columns(teacher.columns_beside(self), self.columns_beside(teacher))
            local = teacher.as_teacher().source
        else:
            local = columns_of(teacher_columns(teacher, self.start, self.width))
        if local.exists:
            return local.x.detach()
        # If the student's logits are a tensor, the teacher's logits are materialised too.
        exist = self.source.exists
        return local.materialize(slice(None)).view(self.source.shape) if exist else local

    def columns_beside(self, other: "Shard") -> Layout:
        """Returns the columns of this shard, for a comparison with the columns of `other`.

        If both shards have a layout, the result covers the columns of all ranks. Otherwise, the
        result covers only the columns of this rank.
        """
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
        """Returns None, because a multiplication would copy the tensor."""

    def in_columns(self, shard: Shard) -> Source:
        return LogitColumns(self.x, shard)

    def describe(self) -> str:
        return f"logits {(*self.shape[:-1], str(self.dtype))}"


def columns_of(source: Any) -> Any:
    """Wraps a tensor of one rank's columns in `Columns`, and returns other sources unchanged."""
    return Columns(source) if is_dense(source) else source


class LogitColumns(Source):
    """The logits of all ranks. This rank holds only its own columns, as a tensor."""

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
    """Checks the arguments of a VocabShard.

    LOGITLESS_CHECK=1 also compares the arguments of all ranks.
    """
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
