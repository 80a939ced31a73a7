"""Losses of a vocabulary that is spread over the ranks of a process group.

`VocabShard(source, group)` is one rank's columns of the logits: a tensor of them, or a LinearLogits
over its rows of the head's weight. The statistics of a rank's columns merge with those of others as
those of blocks do (parallel/columns.py), so that every loss here takes it. All ranks call the same
loss with the same arguments, with ids of the whole vocabulary, and get the same result bit
for bit.

The forward of a loss gathers a few numbers a row from each rank: once (JSD twice), of a head once a
chunk of rows. The backward of logits says nothing to other ranks; that of a head adds up the
gradient of the hidden states.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core import call as _call
from ..core import checks as _checks
from ..core.call import backend, in_func, under_transform
from ..core.in_place import overwrite_on
from ..core.loss import RowLoss, evaluate_on
from ..heads.linear import LinearLogits
from . import checks as _rules
from . import same_call as _agreed
from .columns import Columns


def _either(*names: str) -> Any:
    """PyTorch's function of one of these names: new, old; None in a build without ranks."""
    return next((getattr(dist, name) for name in names if hasattr(dist, name)), None)


_all_gather = _either("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _either("reduce_scatter_single", "reduce_scatter_tensor")


class Ranks:
    """The ranks that share a vocabulary, and what they say to each other."""

    device = torch.device("cpu")  # of numbers that come from no tensor

    def __init__(self, group: "dist.ProcessGroup | None" = None):
        self.group = dist.group.WORLD if group is None else group
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)
        _rules.member(self.index)
        self.by_cpu = dist.get_backend(group) == "gloo"  # which takes few collectives of a GPU
        if not self.by_cpu:
            self.device = torch.accelerator.current_accelerator() or self.device

    def gather(self, t: Tensor) -> Tensor:
        """t (...) of every rank, (ranks, ...)."""
        found = torch.empty((self.count, *t.shape), device=t.device, dtype=t.dtype)
        if t.numel() == 0:
            return found
        if t.is_cuda and self.by_cpu:
            return self.gather(t.cpu()).to(t.device)
        _all_gather(found.view(-1), t.contiguous().view(-1), group=self.group)
        return found

    def add_up(self, t: Tensor) -> Any:
        """Begin to add t of every rank into t; done when what is returned has been waited for."""
        return dist.all_reduce(t, group=self.group, async_op=True)

    def add_up_slices(self, t: Tensor) -> "_Slice":
        """Begin to sum t over ranks, and of as many slices as ranks to get this rank's."""
        if t.is_cuda and self.by_cpu:
            return _Slice(self.add_up_slices(t.cpu()).wait().to(t.device))
        found = t.new_empty((len(t) // self.count, *t.shape[1:]))
        return _Slice(
            found, _reduce_scatter(found, t.contiguous(), group=self.group, async_op=True)
        )


class Alone(Ranks):
    """One process, where torch.distributed has not been set up: it has all columns."""

    def __init__(self):
        self.group, self.index, self.count = None, 0, 1

    def gather(self, t: Tensor) -> Tensor:
        return t.detach().unsqueeze(0).clone()

    def add_up(self, t: Tensor) -> Any:
        return _Done()

    def add_up_slices(self, t: Tensor) -> "_Slice":
        return _Slice(t)


class _Done:
    def wait(self) -> None:
        pass


class _Slice(NamedTuple):
    """A tensor that other ranks are still adding to, until it has been waited for."""

    found: Tensor
    work: Any = _Done()

    def wait(self) -> Tensor:
        self.work.wait()
        return self.found


def ranks_of(group) -> Ranks:
    if isinstance(group, Ranks):
        return group
    if hasattr(group, "get_group"):  # a DeviceMesh of one dimension
        group = group.get_group()
    there = dist.is_available() and dist.is_initialized()
    return Ranks(group) if there or group is not None else Alone()


class Layout(NamedTuple):
    """Which columns each rank has."""

    starts: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def vocab(self) -> int:
        return sum(self.widths)


_layouts: dict[tuple, Layout] = {}


def layout_of(
    ranks: Ranks, width: int, start: int | None, vocab: int | None, device: torch.device
) -> Layout:
    """Of a rank's own columns and those of the others, who are asked once for each key."""
    key = (ranks.group, width, start, vocab)
    if key not in _layouts or _call.asked():
        own = torch.tensor([width, -1 if start is None else start], device=device)
        given = ranks.gather(own).tolist()
        widths = tuple(one for one, _ in given)
        before = [sum(widths[:rank]) for rank in range(len(widths))]
        starts = (first if at < 0 else at for (_, at), first in zip(given, before, strict=True))
        layout = Layout(tuple(starts), widths)
        _rules.tiles(layout.starts, layout.widths, vocab)
        _layouts[key] = layout
    return _layouts[key]


class VocabShard:
    """This rank's columns of logits (..., V), V over all ranks of a process group.

    source is this rank's logits (..., width) or a LinearLogits over its `width` rows of the head's
    weight; widths may differ, and be 0. Logits may be the lazy ones of a fused head: the gradient
    of its hidden states is then this rank's share, which nobody here adds up.

    group is a process group or a DeviceMesh of one dimension, and where it is None the world (this
    process alone, if torch.distributed is not set up). start, this rank's first column, is the sum
    of the earlier ranks' widths. Ranks tell each other their widths when one of these arguments is
    new to them, so it must be new to all: give vocab, which is V, where several vocabularies are
    cut.

    sequence_parallel=True: the hidden states of a LinearLogits are this rank's slice of the tokens,
    the first dimension, cut evenly. All of them are gathered here, and labels are those of all.

    Every loss takes it in place of logits, with ids, labels and class weights of the whole
    vocabulary, the same on all ranks. A dense teacher is a VocabShard of the same columns.

    >>> loss = cross_entropy(VocabShard(logits_of_this_rank, group), target)
    """

    @_call.named()
    def __init__(
        self,
        source: Any,
        group: Any = None,
        start: int | None = None,
        *,
        vocab: int | None = None,
        sequence_parallel: bool = False,
    ):
        ranks = ranks_of(group)
        _check(ranks, source, start, vocab, sequence_parallel)
        if sequence_parallel:
            source = _of_all_tokens(source, ranks)
        elif is_lazy(source) and source.recipe.obstacle(None):
            source = source.materialize()
        self.ranks = ranks
        self.adds_up = True  # the ranks' shares of d_hidden; else whoever gathered hidden does
        self.width = source.shape[-1]
        self.layout = layout_of(ranks, self.width, start, vocab, source.device)
        self.start, self.vocab = self.layout.starts[ranks.index], self.layout.vocab
        self._take(source)

    def _take(self, source: Any) -> None:
        self.source = source
        if source is not None:
            self.shape = torch.Size((*source.shape[:-1], self.vocab))
            self.dtype, self.device = source.dtype, source.device
            self.requires_grad = source.requires_grad

    def over(self, source: Any) -> "VocabShard":
        """The same columns of other logits, or of none yet."""
        copy = object.__new__(VocabShard)
        copy.__dict__.update(self.__dict__)
        copy._take(source)
        return copy

    def dim(self) -> int:
        return len(self.shape)

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """The loss of the rows, the same on all ranks."""
        if torch.compiler.is_compiling():  # torch.compile breaks the graph here
            return torch.compiler.disable(_evaluate)(self, loss, reduction, row_weight)  # pyright: ignore[reportCallIssue]
        return _evaluate(self, loss, reduction, row_weight)

    def evaluate_in_place(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """The same, leaving the gradient of this rank's logits in their memory."""
        x = self.source
        plain = isinstance(x, Tensor) and not is_lazy(x)
        wanted = plain and torch.is_grad_enabled() and x.requires_grad
        if not wanted or under_transform():
            return self.evaluate(loss, reduction, row_weight)
        loss = self.checked(loss, reduction, row_weight)
        return overwrite_on(self.columns(), x, loss, reduction, row_weight)

    def columns(self) -> Columns:
        """The backend that joins what it reads here with what others read."""
        source, ranks = self.source, self.ranks
        run = backend(source if isinstance(source, Tensor) else source.hidden)
        columns = Columns(
            run, self.start, self.width, self.vocab, ranks.gather, max(self.layout.widths)
        )
        if getattr(source, "own_hidden", None) is not None:
            columns.add_up_slices = ranks.add_up_slices
        elif self.adds_up:
            columns.add_up = ranks.add_up
        return columns

    def head(self) -> LinearLogits:
        """The head of these columns, which stands for all of them."""
        head = self.source.with_parts(self.source.parts, self.source.own_hidden)
        head.columns, head.shape = self.columns(), self.shape
        return head

    def capture_topk(
        self, k: int, temperature: float, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k most probable ids of each row, their log-probabilities, and the log tail mass."""
        if is_lazy(self.source) and self.source.recipe.obstacle(softcap):
            return self.over(self.source.dense()).capture_topk(k, temperature, softcap)
        if _call.asked():
            words = _agreed.of_topk(self, k, temperature, softcap)
            _agreed.agree(self.ranks, words)
        if is_lazy(self.source):
            return self._of_all_ranks().capture_topk(k, temperature, softcap)
        if isinstance(self.source, Tensor):
            return self.columns().topk(self.source.detach(), k, temperature, softcap)
        return self.head().capture_topk(k, temperature, softcap)

    def materialize(self, rows: slice | Tensor | None = None) -> Tensor:
        """The logits of all ranks, (..., V), or of some rows, (n, V), as constants: gathered."""
        here = self.local(rows).detach()
        room = here.new_zeros((*here.shape[:-1], max(self.layout.widths)))
        room[..., : self.width] = here
        found = self.ranks.gather(room)
        order = sorted(zip(*self.layout, range(self.ranks.count), strict=True))
        return torch.cat([found[rank, ..., :width] for _, width, rank in order], -1)

    def local(self, rows: slice | Tensor | None = None) -> Tensor:
        """This rank's logits, (..., width), or those of some rows, (n, width)."""
        if not isinstance(self.source, Tensor):
            return self.source.materialize(rows)
        return self.source if rows is None else self.source.reshape(-1, self.width)[rows]

    def as_teacher(self) -> "VocabShard":
        """The same logits as constants, which those of a teacher are."""
        lazy = hasattr(self.source, "as_teacher")  # a tensor is a constant where it is read
        return self.over(self.source.as_teacher()) if lazy else self

    def times(self, factor: float) -> "VocabShard":
        """Of a teacher's head: its logits times a factor."""
        return self.over(self.source.times(factor))

    def checked(self, loss: RowLoss, reduction: str, row_weight: Tensor | None) -> RowLoss:
        """The same loss in these columns, found right, and the same on all ranks if that is asked.

        Values are looked at where it is free.
        """
        if _call.asked():
            words = _agreed.of_loss(self, loss, reduction, row_weight)
            _agreed.agree(self.ranks, words)
        _call.values(loss, self.vocab)
        return loss.with_columns(self.cut)

    def _of_all_ranks(self):
        """Lazy logits of this rank as those of all. Whoever made them adds up d_hidden."""
        shard = self.over(None)
        shard.adds_up = False
        return self.source.over(shard)

    def cut(self, teacher):
        """A teacher's logits or probabilities in these columns: of a shard, or of whole rows."""
        if isinstance(teacher, VocabShard):
            _rules.same_columns(teacher.layout, self.layout)
            here = teacher.as_teacher().source
        else:
            here = _some_columns(teacher, self.start, self.width)
        if isinstance(here, Tensor):
            return here.detach()
        if isinstance(self.source, Tensor):  # a head beside logits that exist: its rows exist too
            return here.materialize(slice(None)).view(self.source.shape)
        return here

    def __repr__(self) -> str:
        return f"VocabShard({self.source!r}, columns {self.start} to {self.start + self.width})"


def _check(ranks: Ranks, *given: Any) -> None:
    """The arguments of a VocabShard; if that is asked, they are also compared between ranks."""
    try:
        _rules.shard(*given)
    except Exception as error:
        if _call.asked():
            _agreed.refuse(ranks, error)
        raise
    if _call.asked():
        _agreed.agree(ranks, _agreed.of_shard(*given))


def is_lazy(source: Any) -> bool:
    """Whether it is a tensor of lazy logits, of a fused head."""
    return isinstance(source, Tensor) and hasattr(source, "recipe")


def _some_columns(logits, start: int, width: int):
    """The columns [start, start + width) of a tensor or a head."""
    if isinstance(logits, Tensor):
        return logits.narrow(-1, start, width)
    hidden, weight, bias = logits.parts
    bias = None if bias is None else bias[start : start + width]
    rows = weight[start : start + width]
    how = {"workspace": logits.workspace, "logits_dtype": logits.logits_dtype}
    head = LinearLogits(hidden, rows, bias, **how)
    head.module, head.scale, head.cap = logits.module, logits.scale, logits.cap
    return head


def _evaluate(shard: VocabShard, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    if in_func():
        _checks.no_head_in_func()
    if is_lazy(shard.source):
        if shard.source.loss_of_head(loss) is not None:
            return shard._of_all_ranks().evaluate(loss, reduction, row_weight)
        shard = shard.over(shard.source.materialize())
    loss = shard.checked(loss, reduction, row_weight)
    if isinstance(shard.source, Tensor):
        return evaluate_on(shard.columns(), shard.source, loss, reduction, row_weight)
    return shard.head().evaluate(loss, reduction, row_weight)


@_call.named()
def global_mean(
    loss_sum: Tensor, count: Tensor | int, group=None, *, averaged: bool = True
) -> Tensor:
    """The mean of a loss over all ranks of a group, each with rows of its own: (Σ sums) / Σ counts.

    A mean on each rank, averaged over ranks, weighs every rank alike, however many of its tokens
    count; this weighs every token alike. loss_sum is this rank's, as reduction="sum" gives it, and
    count its tokens that count. The result is the same on all ranks. Its gradient is this rank's
    part: averaged=True where gradients are averaged over the group afterwards, as DDP and FSDP do,
    False where they are added up. With no token that counts on any rank it is 0.

    >>> loss = global_mean(cross_entropy(logits, target, reduction="sum"), (target != -100).sum())
    """
    return _GlobalMean.apply(loss_sum, count, ranks_of(group), averaged)  # pyright: ignore


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss_sum, count, ranks, averaged):
        full = torch.promote_types(loss_sum.dtype, torch.float32)
        count = torch.as_tensor(count, device=loss_sum.device).to(torch.float64)
        both = ranks.gather(torch.stack((loss_sum.double(), count))).sum(0)
        share = torch.where(both[1] == 0, 1.0, 1.0 / both[1])
        ctx.scale = (share * ranks.count if averaged else share).to(full)
        return (both[0] * share).to(full)

    @staticmethod
    def backward(ctx, upstream):  # pyright: ignore
        return upstream * ctx.scale, None, None, None


def _of_all_tokens(head: LinearLogits, ranks: Ranks) -> LinearLogits:
    """The same head over the hidden states of all ranks' tokens."""
    own, weight, bias = head.parts
    head = head.with_parts((ranks.gather(own.detach()).flatten(0, 1), weight, bias), own)
    head.shape = torch.Size((*head.hidden.shape[:-1], head.shape[-1]))
    return head
