"""Checks the files and the rows of a store."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..targets.sparse import SparseTargets
from . import checks
from .codes import decoded
from .counts import damaged_rows
from .format import Header
from .listing import shards_in
from .lookup import hashes_of
from .shard import Shard, listed_of

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

    def check(self, check: Callable[..., Any], *args: Any) -> Any:
        """Calls `check`, and makes a ValueError a problem."""
        try:
            return check(*args)
        except (ValueError, FileNotFoundError) as error:
            self.problems.append(str(error))
        return None


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


def verify(store: Any, progress: Callable[[int], None] | None = None) -> Report:
    """Compares all checksums, checks ids, masses and hashes, and whether rows are shifted.

    `progress` is called with the number of rows in each group of documents.
    """
    report, shift = Report(len(store), store.tokens), _Shift()
    if isinstance(store.path, Path):
        listed = {shard.listed.shard for shard in store.shards}
        for name in shards_in(store.path):
            if name not in listed:
                problem = f"{store.path} must list {name}.shard in store.index, got no such line"
                report.problems.append(f"{problem}: a writer was killed. Call ll.store.recover")
    report.check(_check_lookup, store)
    for at, shard in enumerate(store.shards):
        report.check(_check_table, store, at)
        numbers = range(shard.first, shard.first + len(shard))
        try:
            for group in store.groups(numbers):
                _check_rows(store.info, shard.name, group, shift, report)
                if progress is not None:
                    progress(len(group.tokens))
        except ValueError:
            for number in numbers:  # one by one, so that each problem is found
                report.check(store.document, number)
    report.label_logprob = shift.means()
    if (problem := shift.problem()) is not None:
        report.problems.append(problem)
    return report


def _check_lookup(store: Any) -> None:
    known = torch.zeros(len(store), dtype=torch.bool)
    for run in store.run_files:
        for _, numbers in run.pieces():
            known[numbers[numbers < len(store)]] = True
    if not bool(known.all()):
        got = f"none of document {int((~known).nonzero()[0])}. Call ll.store.recover"
        checks.refuse(store.path, "have all documents in its .lookup files", got)


def _check_table(store: Any, at: int) -> None:
    store.reading(at, Shard.entries)
    shard = store.shards[at]
    listed = store.reading(at, lambda shard: listed_of(shard.file, shard.listed.shard))
    checks.end_of_shard(shard.name, listed == shard.listed)


def _check_rows(header: Header, name: object, group: Any, shift: _Shift, report: Report) -> None:
    spans, tokens, starts, rows = group
    rows = torch.as_tensor(rows)
    targets = decoded(rows, header)
    logprobs = targets.logprobs
    if targets.mask is not None:
        logprobs = logprobs.masked_fill(~targets.mask, -torch.inf)
    mass = logprobs.logsumexp(-1).exp()
    if targets.tail is not None:
        mass = mass + targets.tail.exp()
    place, begins = torch.arange(len(tokens)), torch.tensor(starts)
    document = torch.searchsorted(begins, place, right=True) - 1

    def add(rule: str, bad: Tensor, got: str) -> None:
        if bool(bad.any()):
            span, row = spans[int(document[bad][0])], int((place - begins[document])[bad][0])
            where = f"in row {row} of document {span.number}"
            report.problems.append(f"{name} must have {rule}, got {got} {where}")

    add(f"tokens below {header.vocab_size}", tokens >= header.vocab_size, str(int(tokens.max())))
    add(
        f"ids below {header.vocab_size}",
        (targets.ids > header.vocab_size - 1).any(-1),
        "a larger id",
    )
    add("masses of at most 1", ~(mass <= MOST_MASS), f"{float(mass.max()):.4g}")
    if header.sampled:
        bad = damaged_rows(rows, header)
        add("draws of distinct ids in ascending order", bad, "other draws")
    else:
        codes = header.field(rows, "codes")[:, int(header.values == "u8") :]  # without the step
        unsorted = (codes[:, 1:] < codes[:, :-1]).any(-1)
        add("the most probable slots first", unsorted, "other slots first")
    for i, (span, (a, b)) in enumerate(zip(spans, pairwise(starts), strict=True)):
        right = hashes_of(tokens[a:b]) == (span.entry.key, span.entry.check)
        add("the hashes of its tokens", (document == i) & (not right), "other hashes")
    begin, end = begins[document], begins[document + 1]
    inner = ((place > begin) & (place + 2 < end)).nonzero()[:, 0]
    if len(inner):
        shift.add(tokens, targets, inner, header.vocab_size)
