"""Finds documents by their tokens.

A document matches at a position in a batch if its tokens follow there, or its first tokens up to
the end of the searched range. The index (store/index.py) gives candidates by the hashes of
prefixes, and then tokens are compared.

Looked up are the prefixes of 1, 4, 16, 64, ... tokens at a position and the whole range, and the
longest hit, of n tokens, is tried first. If several documents of a shard share it, every prefix of
n + 1 to 4 n tokens is tried too, because the index stores where documents diverge. The number of
comparisons grows with the number of shards, but not with the documents that share a prefix.
"""

import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..targets.safetensors import buffer
from . import file_checks
from .index import Hashes, beginnings, hash_of

FEW = 64  # for up to this many tokens, Python computes a hash faster than PyTorch


class Match(NamedTuple):
    """A document that matches at a position in a batch, or a candidate for a match."""

    shard: Any  # the shard.Shard that holds the document
    document: int  # number of the document within its shard
    length: int  # the document's first `length` tokens equal the tokens of the batch


class _Beginning(NamedTuple):
    """A prefix at one position in the batch, whose hash is in the index."""

    length: int
    entries: range  # index entries with this hash


class _Search(NamedTuple):
    """A search at one position for prefixes of `length` to `upper` tokens."""

    at: int  # index of this position in the list `starts`
    length: int  # the hash of the next `length` tokens is in the index
    upper: int  # the length of the longest prefix to look up
    entries: range  # index entries with the hash of the next `length` tokens


class Index:
    def __init__(self, shards: Sequence[Any]):
        self.shards: list[Any] = []
        self.first = [0]  # number of each shard's first document, then the number of all documents
        self.hashes = self._numbers = torch.empty(0, dtype=torch.int64)
        self.add(shards)

    def add(self, shards: Sequence[Any]) -> None:
        hashes, numbers = [self.hashes], [self._numbers]
        for shard in shards:
            of_shard, documents = shard.index()
            first, documents = self.first[-1], documents.long()
            hashes.append(of_shard)
            numbers.append(torch.where(documents < 0, documents - first, documents + first))
            self.shards.append(shard)
            self.first.append(first + len(shard))
        self.hashes, order = torch.cat(hashes).sort()
        self._numbers = torch.cat(numbers)[order]
        # A memoryview reads single elements faster than a tensor.
        self.numbers = memoryview(buffer(self._numbers)).cast("B").cast("q")

    def document(self, tokens: Tensor) -> Match | None:
        if len(tokens) > FEW:
            return self.documents(tokens, torch.tensor([0, len(tokens)]))[0]
        candidates = []
        for _, entries in self._hits(torch.tensor([hash_of(tokens.tolist())])):
            candidates += (c for c in map(self._candidate, entries) if c.length == len(tokens))
        return _first_that_agree(tokens, [(0, candidates)])[0]

    def documents(self, tokens: Tensor, starts: Tensor) -> list[Match | None]:
        """For each i, the document with tokens[starts[i] : starts[i + 1]], or None."""
        lengths, begins = starts.diff(), starts.tolist()
        proposed: list[tuple[int, list[Match]]] = [(begin, []) for begin in begins[:-1]]
        for at, entries in self._hits(Hashes(tokens)(starts[:-1], lengths)):
            length = begins[at + 1] - begins[at]
            candidates = map(self._candidate, entries)
            proposed[at][1].extend(c for c in candidates if c.length == length)
        return _first_that_agree(tokens, proposed)

    def match(
        self, tokens: Tensor, hashes: Hashes, starts: list[int], limits: list[int], whole: bool
    ) -> list[Match | None]:
        """The longest match at each start, or None.

        A match at starts[i] has at most limits[i] tokens, so a longer document is cut off there. If
        `whole` is True, a document shorter than the limit does not match.
        """
        matches: list[Match | None] = [None] * len(starts)
        waiting, turn = self._beginnings(hashes, starts, limits), 0
        while waiting:
            # Each pass tries one prefix per start, and a shorter one if no document agrees.
            searches = []
            for at, of_start in waiting.items():
                length, entries = of_start[turn]
                upper = of_start[turn - 1].length if turn else limits[at]
                searches.append(_Search(at, length, min(upper, 4 * length), entries))
            proposed = []
            for search, hits in zip(
                searches, self._proposed(hashes, starts, searches), strict=True
            ):
                limit = limits[search.at]
                # A document of at least `limit` tokens has entries for 1, 4, 16, ... tokens, so the
                # longest of these within the limit finds it, and other searches ignore it.
                may_be_cut_off = 4 * search.length > limit
                candidates = self._in_order(hits, limit, whole, may_be_cut_off)
                proposed.append((starts[search.at], candidates))
            for at, match in zip(waiting, _first_that_agree(tokens, proposed), strict=True):
                matches[at] = match
            turn += 1
            waiting = {
                at: of_start
                for at, of_start in waiting.items()
                if matches[at] is None and len(of_start) > turn
            }
        return matches

    def whole_documents(self, hashes: Hashes, start: int, limit: int) -> Iterator[Match]:
        """Yields candidates, by their hashes, for whole documents at `start`, longest first.

        They have at most `limit` tokens. The caller compares the tokens with `agree`.
        """
        lengths = torch.arange(limit, 0, -1)
        for place, entries in self._hits(hashes(torch.full_like(lengths, start), lengths)):
            candidates = map(self._candidate, entries)
            yield from (c for c in candidates if c.length == limit - place)

    def agree(self, tokens: Tensor, start: int, matches: Sequence[Match]) -> bool:
        """Whether the tokens of consecutive `matches` equal those that begin at `start`."""
        starts = accumulate((match.length for match in matches), initial=start)
        proposed = [(at, [match]) for at, match in zip(starts, matches, strict=False)]
        return None not in _first_that_agree(tokens, proposed)

    def likely_starts(self, hashes: Hashes, total: int, length: int) -> list[int]:
        """The positions where the hash of the next `length` tokens, 4 or 16, is in the index.

        A repetitive text can have very many; above (total / length), the result is [].
        """
        places = torch.arange(max(total - length + 1, 0))
        wanted = hashes(places, torch.full_like(places, length))
        likely = [place for place, _ in self._hits(wanted)]
        return likely if len(likely) <= total // length else []

    def _beginnings(
        self, hashes: Hashes, starts: list[int], limits: list[int]
    ) -> dict[int, list["_Beginning"]]:
        """The prefixes at each start whose hashes are in the index, longest first.

        A start without a prefix has no key.
        """
        if not starts:
            return {}
        begin, limit = torch.tensor(starts)[:, None], torch.tensor(limits)[:, None]
        tried = [max(limits), *beginnings(max(limits))]
        lengths = torch.tensor(tried).minimum(limit)
        found: dict[int, list[_Beginning]] = {}
        for place, entries in self._hits(hashes(begin, lengths).flatten()):
            at, column = divmod(place, len(tried))
            length, of_start = min(tried[column], limits[at]), found.setdefault(at, [])
            if not of_start or length < of_start[-1].length:
                of_start.append(_Beginning(length, entries))
        return found

    def _proposed(
        self, hashes: Hashes, starts: list[int], searches: list[_Search]
    ) -> list[list["_Hit"]]:
        """The index entries that each search finds."""
        proposed, shared = [], []
        for number, search in enumerate(searches):
            several = any(self.numbers[entry] < 0 for entry in search.entries)  # shared prefix
            proposed.append([(search.length, entry, not several) for entry in search.entries])
            if several and search.upper > search.length:
                shared.append((number, starts[search.at], search.length + 1, search.upper + 1))
        if shared:
            owner, begin, least, end = torch.tensor(shared).unbind(-1)
            counts = end - least
            of_range = torch.repeat_interleave(counts)
            lengths = torch.arange(len(of_range)) + (end - counts.cumsum(0))[of_range]
            owners = owner[of_range]
            for place, entries in self._hits(hashes(begin[of_range], lengths)):
                length, hits = int(lengths[place]), proposed[int(owners[place])]
                hits.extend((length, entry, False) for entry in entries)
        return proposed

    def _in_order(
        self, hits: list["_Hit"], limit: int, whole: bool, may_be_cut_off: bool
    ) -> list[Match]:
        """The candidates, sorted from the longest match to the shortest.

        Of the documents in a shard with `limit` or more tokens, one is enough: the one with the
        longest prefix in `hits`. Another with this prefix either agrees in the first `limit`
        tokens, or has a longer prefix in the index that is not in `hits`, and does not match.
        """
        cut_off, ending = {}, {}
        for length, entry, alone in sorted(hits, key=lambda hit: -hit[0]):
            candidate = self._candidate(entry)
            if candidate.length >= limit:
                if may_be_cut_off:
                    cut_off.setdefault(id(candidate.shard), candidate._replace(length=limit))
            elif not whole and (alone or candidate.length == length):
                ending[candidate.shard, candidate.document] = candidate
        return [*cut_off.values(), *sorted(ending.values(), key=lambda c: -c.length)]

    def _hits(self, wanted: Tensor) -> list[tuple[int, range]]:
        """(position in `wanted`, index entries) of each hash that is in the index."""
        if not len(self.hashes):
            return []
        low = torch.searchsorted(self.hashes, wanted)
        is_hit = self.hashes[low.clamp_max(len(self.hashes) - 1)] == wanted
        places = is_hit.nonzero()[:, 0]
        if not len(places):
            return []
        low, high = low[places], torch.searchsorted(self.hashes, wanted[places], right=True)
        return list(zip(places.tolist(), map(range, low.tolist(), high.tolist()), strict=True))

    def _candidate(self, entry: int) -> Match:
        number = self.numbers[entry]
        number = -1 - number if number < 0 else number
        file_checks.in_store(number, self.first[-1])
        which = bisect.bisect_right(self.first, number) - 1
        shard, document = self.shards[which], number - self.first[which]
        begin, end = shard.span(document)
        return Match(shard, document, end - begin)


# Length of a prefix, position of its entry, and whether no shard has several documents with it. The
# flag is always False for the longer prefixes that `_proposed` adds.
_Hit = tuple[int, int, bool]


def _first_that_agree(
    tokens: Tensor, proposed: Sequence[tuple[int, list[Match]]]
) -> list[Match | None]:
    """The first candidate that matches at each start, or None.

    The first candidates of all starts are compared together, then the second of those remaining,
    and so on.
    """
    here = memoryview(buffer(tokens)).cast("B")
    first: list[Match | None] = [None] * len(proposed)
    waiting, turn = [i for i, (_, candidates) in enumerate(proposed) if candidates], 0
    while waiting:
        by_shard: dict[Any, list[int]] = {}
        for i in waiting:
            by_shard.setdefault(proposed[i][1][turn].shard, []).append(i)
        for shard, of_shard in by_shard.items():
            tried = [proposed[i][1][turn] for i in of_shard]
            begins = [shard.span(match.document)[0] for match in tried]
            spans = [(a, a + match.length) for a, match in zip(begins, tried, strict=True)]
            stored, places = shard.tokens_of(spans)
            there = memoryview(buffer(stored)).cast("B")
            for i, match, place in zip(of_shard, tried, places, strict=True):
                start, size = 8 * proposed[i][0], 8 * match.length
                place *= 8
                if bytes(there[place : place + size]) == bytes(here[start : start + size]):
                    first[i] = match
        turn += 1
        waiting = [i for i in waiting if first[i] is None and len(proposed[i][1]) > turn]
    return first
