"""Finding a document by its tokens.

The index of a shard holds a hash of some beginnings of each document, of 1, 4, 16, 64, ... tokens
and of all of them, sorted. A whole document is found by the last; one that was cut off by its
longest beginning in the index, and is then compared token by token: hashes only propose.

The hash of tokens[a:b] is Σ (token + 1) B^(i - a) mod 2^64, made of sums that are taken once for
all a and b, and mixed with the length.
"""

import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks as rules

BASE = 0x9E3779B97F4A7C15 - 2**64  # odd: it has an inverse
INVERSE = pow(BASE, -1, 2**64)
INVERSE -= 2**64 if INVERSE >= 2**63 else 0
MIX = 0x2545F4914F6CDD1D
NOTICED = 16  # tokens of a beginning by which a document is noticed
COMPARED = 4096  # candidates at once
PEEKED = 64  # tokens of a candidate that are compared before all of them are


class Found(NamedTuple):
    shard: Any  # _shard.Shard
    document: int  # of the shard
    length: int  # how many tokens of it agree


class Hashes:
    """Of any range of a sequence of tokens."""

    def __init__(self, tokens: Tensor):
        factors = torch.full((len(tokens) + 1,), BASE)
        factors[0] = 1
        factors = factors.cumprod(0)
        self.sums = torch.zeros(len(tokens) + 1, dtype=torch.int64)
        torch.cumsum((tokens + 1) * factors[:-1], 0, out=self.sums[1:])
        factors.fill_(INVERSE)
        factors[0] = 1
        self.inverse = factors.cumprod(0)

    def __call__(self, begin: Tensor, length: Tensor) -> Tensor:
        h = (self.sums[begin + length] - self.sums[begin]) * self.inverse[begin]
        h = (h ^ h >> 29) * MIX + length
        return (h ^ h >> 32) * MIX


def beginnings(longest: int) -> list[int]:
    """Lengths that are in the index beside the whole, the longest first."""
    found = [1]
    while found[-1] * 4 < longest:
        found.append(found[-1] * 4)
    return found[::-1]


def index_of(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The columns index.hash and index.doc of a shard."""
    begin, lengths = starts[:-1], starts.diff()
    every = torch.arange(len(lengths))
    hashes = Hashes(tokens)
    found, whose = [hashes(begin, lengths)], [every]
    for n in beginnings(int(lengths.max())):
        longer = every[lengths > n]
        found.append(hashes(begin[longer], torch.full_like(longer, n)))
        whose.append(longer)
    found, order = torch.cat(found).sort(stable=True)
    return found, torch.cat(whose)[order].int()


class Index:
    """Of all shards of a store. That of one shard is read where it lies; several are merged."""

    def __init__(self, shards: Sequence[Any]):
        self.shards = shards
        self.first = list(accumulate(map(len, shards), initial=0))
        columns = [(shard.columns["index.hash"], shard.columns["index.doc"]) for shard in shards]
        if len(shards) == 1:
            ((self.hashes, self.numbers),) = columns
            return
        numbers = [doc.long() + n for n, (_, doc) in zip(self.first, columns, strict=False)]
        self.hashes, order = torch.cat([torch.empty(0).long(), *(h for h, _ in columns)]).sort()
        self.numbers = torch.cat([torch.empty(0).long(), *numbers])[order]

    def document(self, tokens: Tensor) -> Found | None:
        """The one that has just these tokens."""
        wanted = Hashes(tokens)(torch.zeros(1, dtype=torch.int64), torch.tensor([len(tokens)]))
        for _, entries in self._hits(wanted):
            for shard, documents in self._candidates(*entries):
                lengths = shard.starts[documents + 1] - shard.starts[documents]
                for found in _agreeing(shard, documents[lengths == len(tokens)], tokens, True):
                    return found
        return None

    def match(
        self, tokens: Tensor, hashes: Hashes, starts: list[int], limits: list[int], whole: bool
    ) -> list[Found | None]:
        """For each start the longest document that agrees with the tokens there, up to the limit.

        A document may be longer than the limit: then its beginning agrees. With `whole`, one that
        is shorter is none.
        """
        found: list[Found | None] = [None] * len(starts)
        if not starts:
            return found
        begin, limit = torch.tensor(starts)[:, None], torch.tensor(limits)[:, None]
        lengths = torch.tensor([0, *beginnings(max(limits))]).repeat(len(starts), 1)
        lengths[:, :1] = limit  # then shorter and shorter beginnings
        wanted = hashes(begin, lengths.clamp_max(limit)).flatten()
        for place, entries in self._hits(wanted):
            at = place // lengths.shape[1]
            if found[at] is None:
                here = tokens[starts[at] : starts[at] + limits[at]]
                found[at] = self._longest(entries, here, whole)
        return found

    def likely_starts(self, hashes: Hashes, total: int) -> list[int]:
        """Places of a sequence of tokens where a document may begin, unless it is a short one."""
        places = torch.arange(max(total - NOTICED + 1, 0))
        wanted = hashes(places, torch.full_like(places, NOTICED))
        return [place for place, _ in self._hits(wanted)]

    def _hits(self, wanted: Tensor) -> list[tuple[int, tuple[int, int]]]:
        """Which of the hashes are in the index, each with the range of its entries."""
        if not len(self.hashes):
            return []
        low = torch.searchsorted(self.hashes, wanted)
        there = self.hashes[low.clamp_max(len(self.hashes) - 1)] == wanted
        places = there.nonzero()[:, 0]
        high = torch.searchsorted(self.hashes, wanted[places], right=True)
        ranges = zip(low[places].tolist(), high.tolist(), strict=True)
        return list(zip(places.tolist(), ranges, strict=True))

    def _candidates(self, low: int, high: int) -> Iterator[tuple[Any, Tensor]]:
        """The documents that a range of the index names, some of one shard at a time."""
        for begin in range(low, high, COMPARED):
            numbers = self.numbers[begin : min(begin + COMPARED, high)].long()
            least, most = (int(end) for end in numbers.aminmax())
            rules.in_store(least, most, self.first[-1])
            one, last = (bisect.bisect_right(self.first, n) - 1 for n in (least, most))
            for i in range(one, last + 1):
                here = numbers - self.first[i]
                if one < last:
                    here = here[(here >= 0) & (here < len(self.shards[i]))]
                yield self.shards[i], here

    def _longest(self, entries: tuple[int, int], here: Tensor, whole: bool) -> Found | None:
        for shard, documents in self._candidates(*entries):
            agreeing = list(_agreeing(shard, documents, here, whole))
            if agreeing:
                return max(agreeing, key=lambda found: found.length)
        return None


def _agreeing(shard: Any, documents: Tensor, here: Tensor, whole: bool) -> Iterator[Found]:
    """Those of some candidates whose tokens are the ones that stand here."""
    begin = shard.starts[documents]
    lengths = (shard.starts[documents + 1] - begin).clamp_max(len(here))
    if len(documents) > 1:  # of many, most differ soon
        places = torch.arange(min(PEEKED, len(here)))
        inside = places < lengths[:, None]
        seen = shard.tokens_at((begin[:, None] + places) * inside)
        same = ((seen == here[places]) | ~inside).all(-1)
        documents, begin, lengths = documents[same], begin[same], lengths[same]
    for document, a, n in zip(documents.tolist(), begin.tolist(), lengths.tolist(), strict=True):
        if (n == len(here) or not whole) and torch.equal(shard.tokens(a, a + n), here[:n]):
            yield Found(shard, document, n)
