"""The definition of group_loss, and its arguments, for functions.py."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from logitless.losses.group_loss import GroupStats
from tests.support import oracle

from .arguments import Argument, constant
from .case import Maker

Groups = int | Sequence[int]


def defined(formula, x, ignored, found, *, groups: Groups = 0, rows=(), reduction="mean"):
    """The loss from the statistics of all rows, 0 in ignored rows, and groups that count."""
    owner, count = owners(groups, x)
    of_row = {} if isinstance(groups, int) else {"group": owner}
    value = formula(GroupStats(**found, **of_row, groups=count), *rows)
    value, *more = value if isinstance(value, tuple) else (value,)
    live = sums(groups, count, owner, (~ignored).to(x.dtype)) > 0
    more = [t.detach().masked_fill(~live, 0) for t in more]
    loss = oracle.over_rows(value, live, None, reduction)
    return (loss, *more) if more else loss


def owners(groups: Groups, x: Tensor) -> tuple[Tensor, int]:
    """The number of each row's group, (...), and of the groups."""
    lead = x.shape[:-1]
    if isinstance(groups, int):
        numbers = torch.arange(lead[groups], device=x.device)
        return numbers.view(beside(lead, groups)).expand(lead), lead[groups]
    lengths = torch.tensor(groups, device=x.device)
    return torch.arange(len(groups), device=x.device).repeat_interleave(lengths), len(groups)


def beside(lead: Sequence[int], groups: int) -> tuple[int, ...]:
    """The shape of one number per group, that a tensor (*lead) can be multiplied by."""
    return tuple(n if i == groups % len(lead) else 1 for i, n in enumerate(lead))


def sums(groups: Groups, count: int, owner: Tensor | None, t: Tensor) -> Tensor:
    """Sums of t (...) over the rows of each group."""
    if not isinstance(groups, int):
        return t.new_zeros(count).index_add(0, owner, t)
    rest = [i for i in range(t.dim()) if i != groups % t.dim()]
    return t.sum(rest) if rest else t


def formula_of(of_row: Callable[..., Tensor], more: bool) -> Callable[[Maker], Callable]:
    """A formula that multiplies sums of a group. The first of the rows has a number per group."""

    def make(m: Maker) -> Callable:
        groups = groups_of(m)

        def formula(stats, scale, *rows):
            t, n = of_row(stats), scale.numel()
            for r in rows:
                t = t * r.to(t.dtype)
            p = stats.lse.new_zeros(()) if stats.logprob is None else stats.logprob.exp()
            p = p.sum(-1) if p.dim() > t.dim() else p.expand(t.shape)
            total, mass = (sums(groups, n, stats.group, one) for one in (t, p))
            value = (total + 0.1 * mass.square()) * scale.to(t.dtype).reshape(n)
            return (value, total, total > 1) if more else value

        return formula

    return make


# --- arguments


def lengths(m: Maker) -> Groups:
    """Of packed sequences, one of which is empty; else the last dimension."""
    if len(m.lead) > 1:
        return -1
    third, fourth = m.lead[0] // 3, m.lead[0] // 4
    return [third, 0, fourth, m.lead[0] - third - fourth]


GROUPS = Argument(
    {"0": lambda m: 0, "-1": lambda m: -1, "lengths": lengths},
    constant(True, 3, -4, "0", 0.5, None, [1000], [-1, 1])
    | {"a tensor": lambda m: torch.ones(1, dtype=torch.int64)},
)


def groups_of(m: Maker) -> Groups:
    return GROUPS.good.get(m.kind("groups") or "0", GROUPS.good["0"])(m)


def per_group(m: Maker) -> Tensor:
    groups = groups_of(m)
    return m.rand(beside(m.lead, groups) if isinstance(groups, int) else (len(groups),), 0.5, 2)


ROWS = Argument(
    {
        "groups": lambda m: (per_group(m),),
        "groups and rows": lambda m: (per_group(m), m.rows()),
        "want gradients": lambda m: (per_group(m).requires_grad_(), m.rows().requires_grad_()),
        "rows want gradients": lambda m: (per_group(m), m.rows().to(m.dtype).requires_grad_()),
    },
    {
        "a list of numbers": lambda m: [1.0],
        "many": lambda m: (m.rand((100,) * len(m.lead)),),
        "0-d": lambda m: (m.rand(()),),
        "on meta": lambda m: (per_group(m).to("meta"),),
    },
    needed=True,
)
