"""Checks the files and the rows of a store."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..targets.sparse import SparseTargets
from . import file_checks
from .counts import damaged_rows
from .rows import decoded
from .shard import Shard

ROWS = 8192  # number of rows that are decoded at once
OFFSETS = (-1, 0, 1)
# Rows count as shifted if another offset has a mean log-probability that is higher than that of
# offset 0 by more than this many standard errors.
CERTAIN = 5.0
# Largest sum of a row's probabilities: the limit of `SparseTargets` for K = 2^16, the largest K.
MOST_MASS = 1 + 2**-8 * (1 + math.log(2**16))


@dataclass
class Report:
    """The result of `verify`. A `Report` is falsy if there are problems."""

    documents: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)
    label_logprob: dict[int, float] = field(default_factory=dict)  # {offset: mean in nats}

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        means = ", ".join(f"{at:+d}: {mean:.3f}" for at, mean in self.label_logprob.items())
        lines = [
            f"{self.documents} documents, {self.tokens} tokens",
            f"mean log-probability of the label at offsets {means}",
            *(f"problem: {problem}" for problem in self.problems),
        ]
        return "\n".join([*lines, "right" if self else "not right"])


class _Shift:
    """Tests whether the rows of a store are shifted by one token.

    Row i describes token i + 1, so the mean log-probability that row i gives to token i + 1 (offset
    0) should exceed those of token i (offset -1) and token i + 2 (offset +1).
    """

    def __init__(self):
        self.n, self.sums, self.squares = 0, torch.zeros(3).double(), torch.zeros(3).double()

    def add(self, tokens: Tensor, targets: SparseTargets, inner: Tensor, vocab_size: int) -> None:
        """Adds rows to the means. `inner` lists those with tokens at all three offsets."""
        ids, logprobs = targets.ids[inner], targets.logprobs[inner]
        # A token outside the slots gets an equal share of the tail or, as sampled targets have no
        # tail, half the weight of one draw.
        if targets.tail is None:
            rest = torch.full((len(inner),), -math.log(2 * targets.k), dtype=torch.float64)
        else:
            rest = targets.tail[inner].double() - math.log(max(vocab_size - targets.k, 1))
            rest = rest.clamp_min(-50)
        by_offset = []
        for offset in OFFSETS:
            here = ids == tokens[inner + 1 + offset, None]
            if targets.mask is not None:
                here &= targets.mask[inner]
            inside = logprobs.masked_fill(~here, -torch.inf).amax(-1).double()
            by_offset.append(torch.where(here.any(-1), inside, rest).clamp_min(-50))
        labels = torch.stack(by_offset)
        if targets.mask is not None:
            labels = labels[:, targets.mask[inner].any(-1)]
        self.n += labels.shape[1]
        self.sums += labels.sum(-1)
        self.squares += ((labels - labels[1]) ** 2).sum(-1)

    def means(self) -> dict[int, float]:
        return dict(zip(OFFSETS, (self.sums / max(self.n, 1)).tolist(), strict=True))

    def problem(self) -> str | None:
        means = self.means()
        for offset, squares in zip(OFFSETS, self.squares.tolist(), strict=True):
            gain = means[offset] - means[0]
            error = math.sqrt(max(squares / max(self.n, 1) - gain**2, 0) / max(self.n, 1))
            if gain > 0 and gain > CERTAIN * error:
                return (
                    f"rows must describe the next token (mean log-probability {means[0]:.3f}), got"
                    f" a higher mean of {means[offset]:.3f} at offset {offset:+d}. The rows are"
                    " shifted by one token, or the teacher has learnt too little for this test"
                )
        return None


def verify(store: Any, progress: Any = None) -> Report:
    """Checks the checksums, ids and masses of all rows, and tests whether rows are shifted.

    `progress` is called with the number of rows in each block of at most ROWS.
    """
    report, shift = Report(len(store), store.tokens), _Shift()
    for shard in store.shards:
        for check in (
            lambda shard=shard: file_checks.same_digest(shard.path, shard.is_intact()),
            lambda shard=shard: _check_rows(shard, store.info.vocab_size, shift, report, progress),
        ):
            try:
                check()
            except ValueError as error:
                report.problems.append(str(error))
    report.label_logprob = shift.means()
    if (problem := shift.problem()) is not None:
        report.problems.append(problem)
    return report


def _check_rows(
    shard: Shard, vocab_size: int, shift: _Shift, report: Report, progress: Any
) -> None:
    total = int(shard.starts[-1])
    for a in range(0, total, ROWS):
        b = min(a + ROWS, total)
        rows, tokens = shard.rows_of(a, b), shard.tokens(a, min(b + 2, total))
        targets = decoded(rows, shard.header)
        logprobs = targets.logprobs
        if targets.mask is not None:
            logprobs = logprobs.masked_fill(~targets.mask, -torch.inf)
        mass = logprobs.logsumexp(-1).exp()
        if targets.tail is not None:
            mass = mass + targets.tail.exp()
        place = torch.arange(a, b)
        document = torch.searchsorted(shard.starts, place, right=True) - 1

        def add(rule: str, bad: Tensor, got: str, document: Tensor = document) -> None:
            if bool(bad.any()):
                where = f"in document {int(document[bad][0])}"
                report.problems.append(f"{shard.path} must have {rule}, got {got} {where}")

        of_rows = tokens[: b - a]
        add(f"tokens below {vocab_size}", of_rows >= vocab_size, str(int(of_rows.max())))
        add("masses of at most 1", ~(mass <= MOST_MASS), f"{float(mass.max()):.4g}")
        if shard.header.sampled:
            bad = damaged_rows(rows, shard.header)
            add("draws of distinct ids in ascending order", bad, "other draws")
        else:
            codes = rows["codes"]
            unsorted = (codes[:, 1:] < codes[:, :-1]).any(-1)
            add("the most probable slots first", unsorted, "other slots first")
        begin, end = shard.starts[document], shard.starts[document + 1]
        inner = ((place > begin) & (place + 2 < end)).nonzero()[:, 0]
        if len(inner):
            shift.add(tokens, targets, inner, vocab_size)
        if progress is not None:
            progress(b - a)
