"""Gradients of token statistics for a loss that other code computes from them.

The gradients of a head take three GEMMs if the gradients of the loss are known while the logits are
in memory, and four if they are known only in backward. So `TokenStatistics` takes the fastest way
on which the trainer's loss has not failed yet:

- "sum": all tokens have the same gradient.
- "rows", "sequences", "pairs": a rehearsal of the loss (trl_rehearsal.py, verl.py) computes the
  gradients of some tokens from the statistics of these tokens, of whole sequences, or of the
  sequences b and b + B/2. The statistics of all other tokens are arbitrary constants.
- "statistics": backward computes the gradients. Over a frozen head, this way takes only two GEMMs
  as long as the entropies need no gradient.

Backward compares the gradients that arrive with the gradients that forward has used. They may
differ by one factor. If they differ more, backward computes the exact gradients from the
statistics, and the trainer's next step takes the next way.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import PRECISION
from ..core.evaluate import evaluate
from ..heads.chunks import to_host
from ..heads.head import Head
from ..heads.linear import HeadLogits
from ..losses.cross_entropy import cross_entropy_and_scores
from ..losses.group_loss import group_loss
from ..losses.row_loss import row_loss
from ..losses.statistics import Read, stats_reading

NEXT = {"sum": "statistics", "rows": "sequences", "sequences": "pairs", "pairs": "statistics"}
RTOL, ATOL = 1e-5, 1e-6  # of one gradient, and of the largest gradient
OTHERS = -1.0  # the log-probability of tokens outside of a rehearsal's chunk


class Ways:
    """The way of a trainer's next step."""

    def __init__(self, way: str = "statistics"):
        self.way = way
        self.can_rehearse = way == "rows"
        # Whether the head is trained, and whether the loss has a gradient for the entropies.
        self.trained, self.entropy = True, False

    @property
    def rehearses(self) -> bool:
        """Whether the next step begins with a rehearsal. Equal on all ranks, unlike `way`."""
        return self.can_rehearse and (self.trained or self.entropy)

    def choose(self, trained: bool, step: Any, sums: bool) -> str:
        """Returns the way of this step. `sums` is whether the way "sum" has all results."""
        self.trained = trained
        possible = sums if self.way == "sum" else step is not None and self.rehearses
        return self.way if possible else "statistics"

    def failed(self, way: str) -> None:
        """Backward needed another gradient than `way` has."""
        if way == "statistics":
            self.entropy = True
        elif way == self.way:
            self.way = NEXT[way]


class Statistics(NamedTuple):
    """One number per token."""

    logprob: Tensor
    entropy: Tensor | None = None
    total: Tensor | None = None  # Σ z
    argmax: Tensor | None = None


class Results(NamedTuple):
    statistics: Statistics
    # A scalar whose gradient is the gradient for the upstream gradients `used` of `logprob` and
    # `entropy`. None if the gradients are those of the statistics themselves.
    loss: Tensor | None = None
    used: tuple[Tensor | None, ...] = ()


class Tokens(NamedTuple):
    """The tokens of a batch."""

    targets: Tensor  # (N,)
    mask: Tensor | None  # (N,), True for tokens with a label; None if all tokens have one
    counts: Tensor | None  # (B, T), True for tokens with a label
    half: Tensor | None  # (N,), log-probabilities at half the temperature
    how: dict[str, Any]  # temperature and softcap
    wants: dict[str, bool]  # entropy, total, argmax
    step: Any = None  # has a method `loss`; None if the loss cannot be rehearsed

    def read(self, head: Head, gradient: tuple[str, ...] | None = None) -> Statistics:
        """Reads the statistics. `gradient` names those that get a gradient; None for all."""
        logits, wants = HeadLogits(head), self.wants
        read = Read(
            stats_reading(
                logits, self.targets, self.how["temperature"], self.how["softcap"], -100,
                self.mask, wants["entropy"], wants["total"], wants["argmax"], False,
            )
        )  # fmt: skip
        read.gradient = gradient
        outputs = {
            name: t if read.has_gradient(name) else t.detach()
            for name, t in zip(read.reading.wants, evaluate(logits, read), strict=True)
        }
        return Statistics(**{name: outputs.get(name) for name in Statistics._fields})

    def sum(self, head: Head) -> Results:
        loss, scores = cross_entropy_and_scores(
            HeadLogits(head), self.targets, mask=self.mask, reduction="sum", **self.how
        )
        ones = torch.ones_like(scores.logprob) if self.mask is None else self.mask
        used = -ones.to(scores.logprob.dtype)
        statistics = Statistics(scores.logprob, scores.entropy, argmax=scores.argmax)
        return Results(statistics, loss, (used, None))

    def rehearse(self, head: Head, way: str) -> Results | None:
        """Computes loss and gradients for the tokens of each chunk from a rehearsal.

        The result is None if the tokens form no such groups.
        """
        assert self.counts is not None
        mask = self.counts.to(head.device)
        count, (half_batch, odd) = head.rows, divmod(len(mask), 2)
        rows = torch.arange(count, device=mask.device)
        if self.mask is not None:
            rows = mask.flatten().nonzero().squeeze(1)

        @functools.cache
        def places() -> Tensor:
            """The places of the N rows in (B, T)."""
            if self.mask is not None:
                return torch.arange(count, device=mask.device)
            # N tokens have a label: the host need not wait for their number
            return mask.flatten().argsort(descending=True, stable=True)[:count]

        targets, lengths = self.targets, None if way == "rows" else mask.sum(1)
        if way == "pairs":
            if odd:
                return None
            order = (places()[rows] // mask.shape[1] % half_batch).argsort(stable=True)
            rows, lengths = rows[order], lengths.view(2, half_batch).sum(0)
        if way == "pairs" or len(rows) < count:
            head = head.replace(hidden=head.hidden.index_select(0, rows))
            targets = targets[rows]

        @functools.cache
        def shared() -> tuple[Tensor, Tensor, Statistics]:
            """What all chunks share. The first chunk makes it, while the GPU computes a GEMM."""
            fill = torch.where(mask, OTHERS, 0.0).to(PRECISION[head.dtype]).flatten()
            logprob, entropy, total = fill.new_zeros(3, count).unbind()
            argmax = torch.full((count,), -1, device=mask.device)
            return fill, torch.zeros_like(fill), Statistics(logprob, entropy, total, argmax)

        used: list[Tensor | None] = [None, None]

        def formula(stats, rows: Tensor, *groups: Tensor) -> Tensor:
            at = places()[rows]
            values, result = (stats.logprob, stats.entropy), torch.zeros_like(stats.logprob)
            fill, zeros, statistics = shared()
            if torch.is_grad_enabled():  # not in a check whether the formula mixes rows
                leaves = [t.detach().requires_grad_() for t in values]
                logprob, entropy = (
                    whole.index_copy(0, at, leaf).view(mask.shape)
                    for whole, leaf in zip((fill, zeros), leaves, strict=True)
                )
                squares = None
                if self.half is not None:
                    squares = 2 * stats.logprob.detach() - self.half[rows]
                    squares = zeros.index_copy(0, at, squares).view(mask.shape)
                loss = self.step.loss(logprob, entropy, squares, mask)
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
                for i, (g, value) in enumerate(zip(gradients, values, strict=True)):
                    if g is not None:
                        into = used[i] = g.new_zeros(count) if used[i] is None else used[i]
                        into[rows] = g  # type: ignore
                        result = result + g * (value - value.detach())  # 0, with the gradient g
                for name, into in statistics._asdict().items():
                    if (t := getattr(stats, name)) is not None:
                        into[rows] = t.detach()
            return groups[0].index_add(0, stats.group, result) if groups else result

        how = {**self.how, **self.wants, "entropy": True, "reduction": "sum", "ignore_index": None}
        if way == "rows":
            loss = row_loss(formula, HeadLogits(head), targets, rows=(rows,), **how)
        else:
            inputs = (rows, torch.zeros_like(lengths, dtype=PRECISION[head.dtype]))
            how["groups"] = lengths.tolist()
            loss = group_loss(formula, HeadLogits(head), targets, rows=inputs, **how)
        return Results(shared()[-1], loss, tuple(used))


class TokenStatistics(torch.autograd.Function):
    """The statistics of tokens, with gradients for log-probability and entropy."""

    @staticmethod
    def forward(ctx, tokens: Tokens, ways: Ways, head: Head, *inputs: Tensor | None):
        ctx.leaves = [
            t.detach().requires_grad_() if t is not None and t.requires_grad else t for t in inputs
        ]
        hidden, weight, bias, low_rank = ctx.leaves
        head = head.replace(hidden=hidden, weight=weight, bias=bias, low_rank=low_rank, late=True)
        trained = any(t is not None and t.requires_grad for t in inputs[1:])
        way = ways.choose(trained, tokens.step, not tokens.wants["total"] and tokens.half is None)
        results = None
        with torch.enable_grad():
            if way == "sum":
                results = tokens.sum(head)
            elif way != "statistics":
                results = tokens.rehearse(head, way)
            if results is None:
                if way != "statistics":
                    ways.failed(way)
                way, gradient = "statistics", None if ways.entropy else ("logprob",)
                results = Results(tokens.read(head, gradient))
        ctx.given, ctx.way, ctx.results = (head, tokens, ways), way, results
        ctx.set_materialize_grads(False)
        outputs = tuple(None if t is None else t.detach() for t in results.statistics)
        ctx.mark_non_differentiable(*(t for t in outputs[2:] if t is not None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        (g_logprob, g_entropy, *_), (statistics, loss, used) = upstream, ctx.results
        gradients: Any = None
        wanted = [t for t in ctx.leaves if t is not None and t.requires_grad]
        if g_logprob is None and g_entropy is None:
            return (None,) * (3 + len(ctx.leaves))
        if loss is None:
            exact = g_entropy is None or statistics.entropy.requires_grad
        else:
            factor, near = _common_factor(used, (g_logprob, g_entropy))
            near, copied = to_host(near)
            # The GEMMs of the last chunk are queued before the host waits for `near`.
            gradients = _gradients([(loss, factor)], wanted)
            if copied is not None:
                copied.synchronize()
            exact = bool(near)
        if not exact:
            head, tokens, ways = ctx.given
            ways.failed(ctx.way)
            gradients = None  # frees the others
            with torch.enable_grad():
                statistics = tokens.read(head)
        if loss is None or not exact:
            pairs = [(statistics.logprob, g_logprob), (statistics.entropy, g_entropy)]
            gradients = _gradients([p for p in pairs if p[1] is not None], wanted)
        by_leaf = iter(gradients)  # type: ignore
        of_inputs = (
            next(by_leaf) if t is not None and t.requires_grad else None for t in ctx.leaves
        )
        return None, None, None, *of_inputs


def statistics_of(tokens: Tokens, ways: Ways, head: Head) -> Statistics:
    needed = any(t is not None and t.requires_grad for t in head.inputs)
    if not (torch.is_grad_enabled() and needed):
        return tokens.read(head)
    return Statistics(*TokenStatistics.apply(tokens, ways, head, *head.inputs))


def _gradients(pairs: list, wanted: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of `wanted`, for pairs of an output and its upstream gradient."""
    outputs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)


def _common_factor(used: tuple, upstream: tuple) -> tuple[Tensor, Tensor]:
    """Returns k, and whether upstream = k · used, as tensors."""
    pairs = [p for p in zip(used, upstream, strict=True) if p[0] is not None or p[1] is not None]
    some = next(t for t in upstream if t is not None)
    c, g = (
        torch.cat([torch.zeros_like(some) if t is None else t for t in each])
        for each in zip(*pairs, strict=True)
    )
    if not len(c):
        return c.sum(), c.new_ones((), dtype=torch.bool)
    largest = c.abs().argmax().view(1)  # an index of shape () would make the host wait
    of_c, of_g = c[largest].squeeze(0), g[largest].squeeze(0)
    factor = torch.where(of_c == 0, 0.0, of_g / of_c)
    factor = torch.where((factor - 1).abs() < RTOL, 1.0, factor)  # to scale by 1 costs nothing
    near = (g - factor * c).abs() <= RTOL * g.abs() + ATOL * g.abs().amax()
    return factor, near.all()
