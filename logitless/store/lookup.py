"""Finding a document by its tokens.

The index of a shard holds sorted hashes of each document: of its first 1, 4, 16, 64, ... tokens and
of all its tokens. A whole document is found by the hash of all its tokens. A document that was cut
off is found by its longest beginning in the index. Every candidate is then compared token by token,
because hashes only propose candidates.

The hash of tokens[a:b] is Σ (token + 1) B^(i - a) mod 2^64, mixed with the length. It is computed
from prefix sums, so that one pass over the tokens serves all a and b.
"""

import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks

BASE = 0x9E3779B97F4A7C15 - 2**64  # odd, so that it has an inverse mod 2^64
INVERSE = pow(BASE, -1, 2**64)
INVERSE -= 2**64 if INVERSE >= 2**63 else 0
MIX = 0x2545F4914F6CDD1D
NOTICED = 16  # number of tokens that `likely_starts` hashes at each place
COMPARED = 4096  # number of candidates that are compared at once
PEEKED = 64  # several candidates are first compared by as many tokens


class Match(NamedTuple):
    """A document of the store that agrees with some tokens of a batch."""

    shard: Any  # shard.Shard
    document: int  # number of the document within its shard
    length: int  # number of tokens that agree, from the document's first


class Hashes:
    """Hashes of any ranges of one sequence of tokens."""

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
    """Lengths of the hashed beginnings of a document, longest first, without its whole length."""
    lengths = [1]
    while lengths[-1] * 4 < longest:
        lengths.append(lengths[-1] * 4)
    return lengths[::-1]


def index_of(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The columns index.hash and index.doc of a shard."""
    begin, lengths = starts[:-1], starts.diff()
    documents = torch.arange(len(lengths))
    hash_of = Hashes(tokens)
    hashes, owners = [hash_of(begin, lengths)], [documents]
    for n in beginnings(int(lengths.max())):
        longer = documents[lengths > n]
        hashes.append(hash_of(begin[longer], torch.full_like(longer, n)))
        owners.append(longer)
    hashes, order = torch.cat(hashes).sort(stable=True)
    return hashes, torch.cat(owners)[order].int()


class Index:
    """The index of a store.

    The index of a single shard is read in place. The indices of several shards are merged.
    """

    def __init__(self, shards: Sequence[Any]):
        self.shards = shards
        self.first = list(accumulate(map(len, shards), initial=0))
        indices = [(shard.columns["index.hash"], shard.columns["index.doc"]) for shard in shards]
        if len(shards) == 1:
            ((self.hashes, self.numbers),) = indices
            return
        numbers = [doc.long() + n for n, (_, doc) in zip(self.first, indices, strict=False)]
        self.hashes, order = torch.cat([torch.empty(0).long(), *(h for h, _ in indices)]).sort()
        self.numbers = torch.cat([torch.empty(0).long(), *numbers])[order]

    def document(self, tokens: Tensor) -> Match | None:
        """The document that has exactly these tokens."""
        wanted = Hashes(tokens)(torch.zeros(1, dtype=torch.int64), torch.tensor([len(tokens)]))
        for _, entries in self._hits(wanted):
            for shard, documents in self._candidates(*entries):
                lengths = shard.starts[documents + 1] - shard.starts[documents]
                for match in _agreeing(shard, documents[lengths == len(tokens)], tokens, True):
                    return match
        return None

    def match(
        self, tokens: Tensor, hashes: Hashes, starts: list[int], limits: list[int], whole: bool
    ) -> list[Match | None]:
        """The longest match at each start of a sequence, None if no document matches there.

        `limits` are the greatest lengths of the matches. A document longer than the limit matches
        by its beginning. With `whole`, a document shorter than the limit does not match.
        """
        matches: list[Match | None] = [None] * len(starts)
        if not starts:
            return matches
        begin, limit = torch.tensor(starts)[:, None], torch.tensor(limits)[:, None]
        lengths = torch.tensor([0, *beginnings(max(limits))]).repeat(len(starts), 1)
        lengths[:, :1] = limit  # the whole range first, then shorter and shorter beginnings
        wanted = hashes(begin, lengths.clamp_max(limit)).flatten()
        for place, entries in self._hits(wanted):
            at = place // lengths.shape[1]
            if matches[at] is None:
                here = tokens[starts[at] : starts[at] + limits[at]]
                matches[at] = self._longest(entries, here, whole)
        return matches

    def likely_starts(self, hashes: Hashes, total: int) -> list[int]:
        """Places where a document of at least NOTICED tokens may begin."""
        places = torch.arange(max(total - NOTICED + 1, 0))
        wanted = hashes(places, torch.full_like(places, NOTICED))
        return [place for place, _ in self._hits(wanted)]

    def _hits(self, wanted: Tensor) -> list[tuple[int, tuple[int, int]]]:
        """The places of `wanted` whose hash is in the index, with the range of its entries."""
        if not len(self.hashes):
            return []
        low = torch.searchsorted(self.hashes, wanted)
        is_hit = self.hashes[low.clamp_max(len(self.hashes) - 1)] == wanted
        places = is_hit.nonzero()[:, 0]
        high = torch.searchsorted(self.hashes, wanted[places], right=True)
        ranges = zip(low[places].tolist(), high.tolist(), strict=True)
        return list(zip(places.tolist(), ranges, strict=True))

    def _candidates(self, low: int, high: int) -> Iterator[tuple[Any, Tensor]]:
        """The documents in a range of index entries, in groups that belong to one shard."""
        for begin in range(low, high, COMPARED):
            numbers = self.numbers[begin : min(begin + COMPARED, high)].long()
            least, most = (int(end) for end in numbers.aminmax())
            checks.in_store(least, most, self.first[-1])
            first, last = (bisect.bisect_right(self.first, n) - 1 for n in (least, most))
            for i in range(first, last + 1):
                documents = numbers - self.first[i]
                if first < last:
                    documents = documents[(documents >= 0) & (documents < len(self.shards[i]))]
                yield self.shards[i], documents

    def _longest(self, entries: tuple[int, int], here: Tensor, whole: bool) -> Match | None:
        for shard, documents in self._candidates(*entries):
            agreeing = list(_agreeing(shard, documents, here, whole))
            if agreeing:
                return max(agreeing, key=lambda match: match.length)
        return None


def _agreeing(shard: Any, documents: Tensor, here: Tensor, whole: bool) -> Iterator[Match]:
    """Matches of the candidate documents that agree with the tokens `here`."""
    begin = shard.starts[documents]
    lengths = (shard.starts[documents + 1] - begin).clamp_max(len(here))
    if len(documents) > 1:  # most candidates differ within the first tokens
        places = torch.arange(min(PEEKED, len(here)))
        inside = places < lengths[:, None]
        seen = shard.tokens_at((begin[:, None] + places) * inside)
        same = ((seen == here[places]) | ~inside).all(-1)
        documents, begin, lengths = documents[same], begin[same], lengths[same]
    for document, a, n in zip(documents.tolist(), begin.tolist(), lengths.tolist(), strict=True):
        if (n == len(here) or not whole) and torch.equal(shard.tokens(a, a + n), here[:n]):
            yield Match(shard, document, n)
