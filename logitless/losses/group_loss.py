"""`group_loss` computes a user-defined loss over groups of rows, such as sequences or pairs."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Reading
from ..core import call
from ..core.evaluate import evaluate
from ..core.groups import Groups
from ..core.loss import RowLoss, ignored_value
from ..core.source import is_dtensor
from ..core.tensor_checks import _same_device
from .row_loss import Formula, Result, check_formula
from .statistics import stats_reading


class GroupStats(NamedTuple):
    """The statistics of the rows of some groups, as in RowStats."""

    lse: Tensor | None = None
    picked: Tensor | None = None
    entropy: Tensor | None = None
    total: Tensor | None = None
    argmax: Tensor | None = None
    logprob: Tensor | None = None
    rank: Tensor | None = None
    group: Tensor | None = None  # (n,), the number of each row's group, if `groups` is a list
    groups: int = 0  # how many groups these are


@call.named()
def group_loss(
    formula: Callable[..., Result],
    logits: Tensor,
    ids: Tensor | None = None,
    *,
    groups: int | Sequence[int] = 0,
    rows: Sequence[Tensor] = (),
    reduction: str = "mean",
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    total: bool = False,
    argmax: bool = False,
    rank: bool = False,
    ignore_index: int | None = -100,
    mask: Tensor | None = None,
) -> Result:
    """Computes a user-defined loss over groups of rows, such as the sequences or pairs of a batch.

    The result is a scalar, or one number per group for reduction="none". Let L be the leading shape
    of logits (*L, V). The groups lie apart along the dimension `groups` of L: for pairs of
    sequences (2, pairs, T), groups=1, and for sequences (B, T), groups=0. `formula(stats, *rows)`
    is called for g groups at a time. Each statistic of `stats` has the shape L, with g instead of
    the number of groups, and each tensor in `rows` is cut along the same dimension; its other
    dimensions are free. The formula returns a tensor (g,), one number per group, or a tuple (loss,
    *more), where the tensors of `more` have shape (g, ...), and are detached in the result.

    For packed sequences, logits (N, V), `groups` is the list of the row counts of the sequences, in
    their order. The formula then gets n rows of g whole sequences, stats.group (n,), the number of
    each row's sequence among these g, and stats.groups, which is g. A tensor in `rows` has one
    entry per row or one per sequence (one per row if N equals their number), and is cut
    accordingly.

    An ignored row has logprob, entropy and all other statistics 0, argmax and rank -1, and gradient
    0. Entries of `rows` beside ignored rows reach the formula as they are. A group whose rows are
    all ignored has loss 0 and no gradient, and "mean" divides by the number of the other groups.

    The formula can be called several times, each time for some of the groups, and must not mix
    groups; with LOGITLESS_CHECK=1, a formula that does raises an error. Tensors that it uses from
    its closure get no gradient. `ids` and all further options are those of `row_stats`. Over a
    LinearLogits, a mean or sum takes three GEMMs if the logits of each group fit into its
    workspace, and four otherwise and in fp16; over a weight without gradient, one less.

    >>> def dpo(stats, reference):  # stats.logprob (2, pairs, T), reference (2, pairs)
    ...     chosen, rejected = stats.logprob.sum(-1) - reference
    ...     return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))
    >>> loss = group_loss(dpo, logits, tokens, groups=1, rows=(reference,))
    >>> def reinforce(stats, reward):  # packed: stats.logprob (n,), reward (g,)
    ...     zeros = stats.logprob.new_zeros(stats.groups)
    ...     return -reward * zeros.index_add(0, stats.group, stats.logprob)
    >>> loss = group_loss(reinforce, packed, packed_tokens, groups=lengths, rows=(rewards,))
    """
    check_formula(formula, rows)
    groups = _dimension_or_counts(groups)
    call.checked(
        group_loss, logits=logits, ids=ids, reduction=reduction, temperature=temperature,
        softcap=softcap, rank=rank, ignore_index=ignore_index, mask=mask,
    )  # fmt: skip
    call.check_once(_check_groups, logits, groups, *rows)
    reading = stats_reading(
        logits, ids, temperature, softcap, ignore_index, mask, entropy, total, argmax, rank
    )
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (logits, *rows))
    lead = tuple(logits.shape[:-1])
    if isinstance(groups, int):
        split = Groups(lead, groups % len(lead))
    else:
        split = Groups.packed(groups, torch.device(logits.device))
    inputs = tuple(t.movedim(split.dim, 0) for t in rows)
    per_row = tuple(split.lengths is not None and t.shape[0] == lead[0] for t in rows)
    live = _live_groups(reading, split, logits.device)
    loss = GroupFormula(reading, formula, inputs, wanted, split, per_row, live)
    return evaluate(logits, loss, reduction)


def _dimension_or_counts(groups) -> int | tuple[int, ...]:
    if isinstance(groups, Tensor):
        raise TypeError(
            "groups must be a dimension or a list of ints, got a Tensor, whose values would make"
            " the host wait. Pass lengths.tolist()."
        )
    if isinstance(groups, bool):
        return groups
    try:
        if hasattr(groups, "__index__"):
            return operator.index(groups)
        return tuple(map(operator.index, groups))
    except TypeError:
        raise TypeError(f"groups must be a dimension or a list of ints, got {groups!r}.") from None


def _check_groups(logits, groups, *rows) -> None:
    lead = tuple(logits.shape[:-1])
    if isinstance(groups, bool):
        raise TypeError(f"groups must be a dimension or a list of ints, got {groups!r}.")
    if isinstance(groups, int):
        if not -len(lead) <= groups < len(lead):
            raise IndexError(
                f"groups must be a dimension of the rows, in [{-len(lead)}, {len(lead)}) for logits"
                f" {tuple(logits.shape)}, got {groups}."
            )
        dim, sizes = groups % len(lead), (lead[groups],)
    else:
        if len(lead) != 1 or sum(groups) != lead[0] or min(groups, default=0) < 0:
            raise ValueError(
                "groups must be row counts that are not negative and sum to N for logits (N, V),"
                f" got {len(groups)} counts with the sum {sum(groups)} for logits"
                f" {tuple(logits.shape)}."
            )
        dim, sizes = 0, (lead[0], len(groups))
    for i, t in enumerate(rows):
        name = f"rows[{i}]"
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(t).__name__}.")
        if t.dim() <= dim or t.shape[dim] not in sizes:
            raise ValueError(
                f"{name} must have size {' or '.join(map(str, dict.fromkeys(sizes)))} in dimension"
                f" {dim}, the dimension of groups, got shape {tuple(t.shape)}."
            )
        _same_device(name, t, logits)


def _live_groups(reading: Reading, groups: Groups, device: torch.device) -> Tensor | None:
    """A mask (G,), False for groups whose rows are all ignored. None if there can be none."""
    ignored: Any = reading.ignored_rows()
    if ignored is not None:
        ignored = ignored.full_tensor() if is_dtensor(ignored) else ignored
        return groups.sums(groups.by_group(~ignored)) > 0
    if 0 not in groups.sizes:
        return None
    return groups.sums(torch.ones(math.prod(groups.lead), dtype=torch.bool, device=device)) > 0


@dataclass(eq=False)
class GroupFormula(Formula):
    """A loss that a user's function computes from the statistics of whole groups.

    The row_inputs have their dimension of groups first (of rows, if packed sequences have one entry
    per row). Over a whole batch, statistics have the shape of its rows. `of_groups` makes the loss
    of one chunk of a head, whose statistics are those of its `present` rows, flat and by group.
    """

    caller: ClassVar[str] = "group_loss"
    unit: ClassVar[str] = "group"

    groups: Groups = None  # type: ignore
    per_row: tuple[bool, ...] = ()  # which of the row_inputs have one entry per row
    live: Tensor | None = None  # (g,), False for groups whose rows are all ignored
    is_chunk: bool = False
    present: Tensor | None = None  # the places of the rows among all rows; None if all are present

    def first_argument(self, statistics, row_inputs):
        return GroupStats(**statistics), row_inputs

    def hints(self, argument):
        if argument.group is not None:
            return super().hints(argument)
        return [*super().hints(argument._replace(group=0)), "stats.group (pass groups as a list)"]

    # --- what belongs to a group instead of a row

    @property
    def counted(self):
        if self.live is None:
            return Reading(self.reading.vocab)
        return Reading(self.reading.vocab, label=self.live.view(torch.int8), ignore_index=0)

    def results(self, lead):
        return torch.Size((self.groups.count,))

    def place(self, i, results):
        return self.groups.rows_of(results) if self.per_row[i] else results

    def spread(self, g: Tensor, i: int, d: Tensor) -> Tensor:
        """One number per group, in a shape that multiplies row_inputs[i] or its gradient d."""
        g = self.groups.spread(g) if self.per_row[i] else g
        return g.view(-1, *(1,) * (d.dim() - 1))

    def times_input(self, i, d, scale):
        if scale.dim():
            scale = scale if self.live is None else torch.where(self.live, scale, 0.0)
            scale = self.spread(scale, i, d)
        return d * scale

    def of_rows(self, g):
        if not g.dim():
            return g
        g = self.groups.spread(g)
        if not self.is_chunk:
            return self.groups.shaped(g).reshape(-1)
        return g if self.present is None else g[self.present]

    def of_groups(
        self, rows: Any, lead: torch.Size, some: slice, present: Tensor | None
    ) -> "GroupFormula":
        """The loss of some groups, whose rows that are not left out are `rows`."""
        plain: Any = RowLoss.rows(self.replace(row_inputs=()), rows, lead)
        inputs = (t[self.place(i, some)] for i, t in enumerate(self.row_inputs))
        inputs = tuple(t.detach().requires_grad_(t.requires_grad) for t in inputs)
        live = None if self.live is None else self.live[some]
        return plain.replace(
            groups=self.groups.cut(some), row_inputs=inputs, live=live, is_chunk=True,
            present=present,
        )  # fmt: skip

    # --- the shapes that the function gets

    def whole(self, t):
        if not self.is_chunk:
            return t
        if self.present is not None:
            blank = (sum(self.groups.sizes), *t.shape[1:])
            t = t.new_full(blank, ignored_value(t.dtype)).index_copy(0, self.present, t)
        return self.groups.shaped(t)

    def parts(self, t):
        if t is None or not self.is_chunk:
            return t
        t = self.groups.by_group(t)
        return t if self.present is None else t[self.present]

    def apply(self, statistics, row_inputs, lead, dtype):
        groups, inputs = self.groups, list(row_inputs)
        for i, t in enumerate(row_inputs):
            if self.live is not None and t.requires_grad:  # 0 · NaN of an ignored group is NaN
                inputs[i] = torch.where(self.spread(self.live, i, t), t, t.detach())

        def results_of(some: slice) -> tuple[Tensor, ...]:
            part, cut = groups.cut(some), dict(statistics)
            for name, t in statistics.items():
                if groups.lengths is None:
                    cut[name] = t.narrow(groups.dim, some.start, part.count)
                else:
                    cut[name] = t[groups.rows_of(some)]
            cut["group"], cut["groups"] = part.owner, part.count
            own = (t[self.place(i, some)].movedim(0, groups.dim) for i, t in enumerate(inputs))
            return self.call(cut, list(own), part.count)

        value, *more = results_of(slice(0, groups.count))
        self.check_alone(results_of, groups.count)
        if self.live is not None:
            value = torch.where(self.live, value, 0.0)
            more = [
                t.masked_fill(~self.live.view(-1, *(1,) * (t.dim() - 1)), ignored_value(t.dtype))
                for t in more
            ]
        return value.to(dtype), *more
