"""Cross-entropy over the target and K sampled rows (negatives) of a table, for recommenders.

Negatives that all rows share form a head with K columns, and heads/ computes the loss chunk by
chunk. If each row has its own, the backend gathers rows of the table for K + 1 dot products per
row, and `cross_entropy` computes the loss from these.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contract import NO_ID, PRECISION
from ..core import call, operators, target_checks, tensor_checks
from ..core.autograd import Node, refuse_second
from ..core.choose_backend import backend_of
from ..core.evaluate import evaluate
from ..heads import checks as head_checks
from ..heads.gemms import autocasts, cast_by_autocast, without_autocast
from ..heads.head import Head
from ..heads.linear import HeadLogits
from .cross_entropy import cross_entropy
from .row_loss import Formula
from .statistics import NO_CLASS

NO_HIT = -1  # the label of a row whose target is not among the negatives


@call.named()
def sampled_softmax(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    negatives: Tensor,
    *,
    log_q: Tensor | None = None,
    target_log_q: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    remove_hits: bool = True,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    reduction: str = "mean",
    row_weight: Tensor | None = None,
    sparse_grad: bool = False,
    workspace: int | None = None,
) -> Tensor:
    """Computes the cross-entropy of the target, with a softmax over the target and K negatives.

    `hidden` (..., D) holds one state per row. `weight` (V, D) and `bias` (V,) are the table of all
    items, and `target` (...) holds one item per row. `negatives` holds K items, as (K,) if all rows
    share them, or (..., K) if each row has its own. The logit of the negative j in row i is

        z_ij = (hidden_i · weight_j + bias_j) / temperature - log_q_j

    and that of the target is the same with `target_log_q`. `log_q` has the shape of `negatives`,
    and `target_log_q` that of `target`; None means 0. The loss of a row is

        row_weight · (log (e^z_target + Σ e^z_negative) - z_target)

    To correct for a sampler that draws the K negatives independently, item j with probability q_j,
    pass `log_q` = log(K · q) and remove_hits=True, but no `target_log_q`. Then the sum of
    exponentials is an unbiased estimate of the sum over all V items. remove_hits=True leaves hits,
    which are negatives equal to the target of the row, out of the sum. A negative that occurs
    several times counts several times.

    The logits and the loss are fp32 (fp64 for fp64 inputs), and the gradients of `hidden`, `weight`
    and `bias` are exact. With sparse_grad=True, the gradient of the weight is a sparse COO tensor
    with only the rows of the targets and negatives, as torch.optim.SparseAdam and
    torch.optim.Adagrad accept it. For shared negatives, `workspace` bounds the bytes of logits in
    memory, as in LinearLogits.

    A row is ignored if its target is ignore_index or its entry in `mask` is False; its loss and
    gradient are 0. "mean" divides by the number of rows that are not ignored. An id outside [0, V)
    raises an IndexError on a CPU, and on a GPU with LOGITLESS_CHECK=1. Without it, the loss is NaN:
    of the row for a target or a row's own negative, and of all rows for a shared negative.
    torch.compile breaks the graph at this function, so fullgraph=True raises an error.

    >>> negatives = torch.randint(0, len(items.weight), (8192,))
    >>> loss = sampled_softmax(hidden, items.weight, target, negatives)
    """
    casts = isinstance(hidden, Tensor) and autocasts(hidden.device)
    call.check_once(head_checks.table, hidden, weight, bias, casts)
    call.checked(
        sampled_softmax, hidden=hidden, target=target, negatives=negatives, temperature=temperature,
        remove_hits=remove_hits, ignore_index=ignore_index, mask=mask, reduction=reduction,
        row_weight=row_weight, sparse_grad=sparse_grad, workspace=workspace,
    )  # fmt: skip
    tensor_checks.constant_slots("log_q", log_q, "negatives", negatives)
    tensor_checks.constant_slots("target_log_q", target_log_q, "target", target)
    if call.in_func():
        tensor_checks.not_in_func("sampled_softmax")
    label = call.as_ids(target, ignore_index, mask).long()
    sample = _Sample(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, label.reshape(-1),
        call.as_ids(negatives).long(), log_q, _flat(target_log_q), float(temperature), remove_hits,
        ignore_index, sparse_grad, workspace,
    )  # fmt: skip
    compute = shared_loss if negatives.dim() == 1 else per_row_loss
    if torch.compiler.is_compiling():  # this call breaks the graph of torch.compile
        compute = torch.compiler.disable(compute)
    value = compute(sample, reduction, _flat(row_weight))
    return value.view(target.shape) if reduction == "none" else value


def _flat(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.reshape(-1)


@dataclass
class _Sample:
    """The arguments of sampled_softmax, with the leading dimensions flattened to N rows."""

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    target: Tensor  # (N,), ignore_index in ignored rows
    negatives: Tensor  # (K,) for shared negatives, or (..., K) for negatives per row
    log_q: Tensor | None  # same shape as negatives
    target_log_q: Tensor | None  # (N,)
    temperature: float
    remove_hits: bool
    ignore_index: int
    sparse_grad: bool
    workspace: int | None

    @property
    def full(self) -> torch.dtype:
        return PRECISION[torch.promote_types(self.hidden.dtype, self.weight.dtype)]

    @property
    def ignored(self) -> Tensor:
        return self.target == self.ignore_index

    def check_values(self) -> None:
        if not call.reads_values(self.target):
            return
        V, live = len(self.weight), ~self.ignored
        target_checks.in_range(self.target, V, live, "target", self.ignore_index)
        by_row = None if self.negatives.dim() == 1 else live.unsqueeze(-1)
        ids = (
            self.negatives
            if by_row is None
            else self.negatives.reshape(len(live), self.negatives.shape[-1])
        )
        place = "slot" if by_row is None else "row"
        target_checks.in_range(ids, V, by_row, "negatives", None, place)

    def is_bad(self, ids: Tensor) -> Tensor:
        return (ids < 0) | (ids >= len(self.weight))


@dataclass(eq=False)
class SharedNegatives(Formula):
    """The loss of each row, from the logits of the shared negatives and of the target.

    A row's label is the column of its hit, or NO_HIT. Forward writes -inf to the logit of the hit.
    Backward may not write to the logits, which autograd can have saved: it writes 0 to the gradient
    of the hit.
    """

    caller: ClassVar[str] = "sampled_softmax"
    has_gain: ClassVar[bool] = True

    def forward(self, backend, x):
        x.scatter_(*self.at_hits(x, -torch.inf))
        return super().forward(backend, x)

    def backward(self, backend, x, saved, upstream, factor=None, into=None):
        d_x = super().backward(backend, x, saved, upstream, factor, into)
        return d_x.scatter_(*self.at_hits(d_x, 0.0))

    def traced(self, x, call=operators.call):
        return super().traced(x.scatter(*self.at_hits(x, -torch.inf)), call)

    def at_hits(self, t: Tensor, value: float) -> tuple[int, Tensor, Tensor]:
        """The arguments of a scatter that writes `value` to each row's hit in t (N, K)."""
        column = self.reading.label.reshape(-1, 1)
        at = column.clamp_min(0).long()
        return 1, at, t.gather(1, at).masked_fill(column >= 0, value)


def shared_loss(sample: _Sample, reduction: str, row_weight: Tensor | None) -> Tensor:
    sample.check_values()
    s, full, rows = sample, sample.full, len(sample.target)
    with without_autocast(s.hidden.device):
        ids, log_q = s.negatives, s.log_q
        ids, log_q, column = _distinct(ids, log_q, s.target, full) if s.remove_hits else (
            ids, log_q, torch.full_like(s.target, NO_HIT)
        )  # fmt: skip
        # targets and negatives at once, so that backward computes only one gradient of the table
        wanted = torch.cat((s.target, ids))
        bad = s.is_bad(wanted)
        # An invalid id becomes the first negative, so a sparse gradient has no further entries.
        wanted = torch.where(bad, ids[0].clamp(0, len(s.weight) - 1), wanted)
        bias = None if s.bias is None else _bias_of(s.bias, wanted, full)
        table = _TableRows.apply(s.weight, wanted, s.weight.dtype, s.sparse_grad)
        own, others = table[:rows], table[rows:]
        z = _target_logits(s, own, None if bias is None else bias[:rows], bad[:rows])
        extra = torch.zeros_like(ids, dtype=full) if bias is None else bias[rows:]
        if log_q is not None:
            extra = extra - s.temperature * log_q.to(full)
        extra = torch.where(bad[rows:], torch.nan, extra)
    hidden = s.hidden
    if autocasts(hidden.device):
        hidden, others = cast_by_autocast(hidden), cast_by_autocast(others)
    # With fp32 logits, the head accepts an fp32 bias, and `log_q` is not rounded to 16 bits.
    wide = None if full == hidden.dtype else full
    head = Head(hidden, others, extra, workspace=s.workspace, logits_dtype=wide)
    logits = HeadLogits(head)
    reading = call.reading_of(
        logits, s.temperature, None, label=torch.where(s.ignored, NO_CLASS, column),
        ignore_index=NO_CLASS, wants=("lse",),
    )  # fmt: skip
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in (logits, z))
    return evaluate(
        logits, SharedNegatives(reading, _loss_of_row, (z,), wants), reduction, row_weight
    )


def _loss_of_row(stats, z: Tensor) -> Tensor:
    """log (e^z + e^lse) - z, with the logsumexp of the negatives."""
    return torch.logaddexp(stats.lse - z, torch.zeros_like(z))


def _target_logits(s: _Sample, own: Tensor, bias: Tensor | None, bad: Tensor) -> Tensor:
    """The logits (N,) of the targets, from their rows `own` (N, D) of the table; 0 if ignored."""
    ignored = s.ignored
    # In an ignored row, a gradient of 0 times a hidden state that is not finite would be NaN.
    own = own.to(s.full).masked_fill(ignored.unsqueeze(-1), 0.0)
    z = (s.hidden.to(s.full) * own).sum(-1)
    z = z if bias is None else z + bias
    z = z / s.temperature
    z = z if s.target_log_q is None else z - s.target_log_q.to(s.full)
    z = torch.where(bad, torch.nan, z)
    return torch.where(ignored, 0.0, z)


def _distinct(
    ids: Tensor, log_q: Tensor | None, target: Tensor, full: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sorted negatives, their log_q, and the column of each row's hit (or NO_HIT).

    The first column of an id gets the mass Σ e^(-log_q) of all its columns, the others the logit
    -inf, so each row has at most one hit. The number of columns stays, so the host does not wait.
    """
    ids, order = ids.sort(stable=True)
    log_q = torch.zeros_like(ids, dtype=full) if log_q is None else log_q.to(full)[order]
    first = torch.searchsorted(ids, ids)  # for each column, the first column with the same id
    most = torch.full_like(log_q, -torch.inf).scatter_reduce(0, first, -log_q, "amax")
    most = torch.where(most.isinf(), 0.0, most)
    mass = torch.zeros_like(log_q).index_add_(0, first, (-log_q - most[first]).exp())
    merged = -(mass.log() + most)
    is_first = first == torch.arange(len(ids), device=ids.device)
    column = torch.searchsorted(ids, target).clamp_max(len(ids) - 1)
    column = torch.where(ids[column] == target, column, NO_HIT)
    return ids, torch.where(is_first, merged, torch.inf), column


def per_row_loss(sample: _Sample, reduction: str, row_weight: Tensor | None) -> Tensor:
    sample.check_values()
    s, full, rows = sample, sample.full, len(sample.target)
    with without_autocast(s.hidden.device):
        negatives, ignored = (
            s.negatives.reshape(rows, s.negatives.shape[-1]),
            s.ignored.unsqueeze(-1),
        )
        ids = torch.cat((s.target.unsqueeze(-1), negatives), 1)
        z = _RowDots.apply(s.hidden, s.weight, torch.where(ignored, NO_ID, ids), s.sparse_grad)
        if s.bias is not None:
            z = z + _bias_of(s.bias, torch.where(s.is_bad(ids), 0, ids), full)
        z = z / s.temperature
        if s.log_q is not None or s.target_log_q is not None:
            z = z - torch.cat((
                _or_zeros(s.target_log_q, s.target.shape, full, ids.device).view(rows, 1),
                _or_zeros(s.log_q, negatives.shape, full, ids.device).reshape(negatives.shape),
            ), 1)  # fmt: skip
        if s.remove_hits:
            hits = F.pad(negatives == s.target.unsqueeze(-1), (1, 0))
            z = z.masked_fill(hits, -torch.inf)
        label = torch.where(s.ignored, NO_CLASS, 0)
        return cross_entropy(
            z, label, ignore_index=NO_CLASS, reduction=reduction, row_weight=row_weight
        )


def _or_zeros(t: Tensor | None, shape: torch.Size, dtype: torch.dtype, device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if t is None else t.to(dtype)


def _bias_of(bias: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    return _TableRows.apply(bias.unsqueeze(-1), ids.reshape(-1), dtype, False).view(ids.shape)


class _TableRows(Node):
    """Gathers the rows `ids` (n,) of a table (V, D), and casts them to `dtype`.

    Backward adds the gradients of equal ids in fp32 or fp64, and rounds once. F.embedding adds in
    16 bits, where a sum stops growing after a few hundred equal ids.
    """

    @staticmethod
    def forward(ctx, table, ids, dtype, sparse):
        ctx.backend, ctx.sparse = backend_of(table), sparse
        ctx.table = table.detach()  # backward reads the shape and the dtype, but no values
        ctx.save_for_backward(ids)
        return table[ids].to(dtype)

    @staticmethod
    def backward(ctx, upstream):
        Node.refuse_vmap((upstream,))
        (ids,) = ctx.saved_tensors
        with torch.no_grad():
            # the gradient of Σ_i upstream[i] · table[ids[i]]
            pairs, ones = ids.unsqueeze(-1), torch.ones_like(upstream[:, :1])
            _, d_table = ctx.backend.row_dots_gradients(
                upstream, ctx.table, pairs, ones, (False, True), ctx.sparse
            )
        if torch.is_grad_enabled():
            (d_table,) = refuse_second((d_table,), (upstream,))
        return d_table, None, None, None


class _RowDots(Node):
    """Dot products of each hidden state (N, D) with M rows `ids` (N, M) of a table (V, D)."""

    @staticmethod
    def forward(ctx, hidden, weight, ids, sparse):
        ctx.backend, ctx.sparse = backend_of(hidden), sparse
        ctx.save_for_backward(hidden, weight, ids)
        return ctx.backend.row_dots(hidden, weight, ids)

    @staticmethod
    def backward(ctx, g):
        Node.refuse_vmap((g,))
        hidden, weight, ids = ctx.saved_tensors
        with torch.no_grad():
            found = ctx.backend.row_dots_gradients(
                hidden, weight, ids, g, tuple(ctx.needs_input_grad[:2]), ctx.sparse
            )
        if torch.is_grad_enabled():
            found = refuse_second(found, (hidden, weight, g))
        return *found, None, None
