"""Finds documents by their tokens.

A document matches at a place of a batch if all its tokens follow there. A document also matches if
the end of the searched range cuts it off. The index proposes documents by their hashes, and then
the tokens of each proposed document are compared.

The search at a place begins with the longest beginning of 1, 4, 16, 64, ... tokens whose hash is in
the index (store/index.py). If several documents of a shard have this beginning, the hashes of all
longer ranges are looked up, up to the next hashed beginning. These lookups find whole documents,
and the first tokens where documents with a shared beginning differ. The number of comparisons grows
with the number of shards, but not with the number of documents that share a beginning.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import file_checks
from .index import Hashes, beginnings, hash_of

FEW = 64  # number of tokens up to which Python computes a hash faster than PyTorch
NOTICED = 16  # number of tokens that `likely_starts` hashes at each place


class Match(NamedTuple):
    """A document of the store that agrees with some tokens of a batch."""

    shard: Any  # the shard.Shard that holds the document
    document: int  # number of the document within its shard
    length: int  # number of the document's first tokens that agree


class _Search(NamedTuple):
    """A search for documents at one start of the batch, in a range of lengths."""

    at: int  # position in the list of starts
    length: int  # length of a hashed beginning that is in the index
    upper: int  # the largest length to search
    entries: list[int]  # index entries of the hashed beginning


class Index:
    """The indices of all shards of a store, merged."""

    def __init__(self, shards: Sequence[Any]):
        self.shards = shards
        self.first = list(accumulate(map(len, shards), initial=0))
        hashes, numbers = [torch.empty(0).long()], [torch.empty(0).long()]
        for first, shard in zip(self.first, shards, strict=False):
            of_shard, documents = shard.index()
            hashes.append(of_shard)
            documents = documents.long()
            numbers.append(torch.where(documents < 0, documents - first, documents + first))
        self.hashes, order = torch.cat(hashes).sort()
        self.numbers = torch.cat(numbers)[order]

    def document(self, tokens: Tensor) -> Match | None:
        """The document that has exactly these tokens, or None."""
        if len(tokens) > FEW:
            return self.documents(tokens, torch.tensor([0, len(tokens)]))[0]
        wanted = torch.tensor([hash_of(tokens.tolist())])
        return self._exact((entry for _, entry in self._hits(wanted)), tokens)

    def documents(self, tokens: Tensor, starts: Tensor) -> list[Match | None]:
        """The documents that have exactly the tokens between two starts; None if not found."""
        lengths = starts.diff()
        matches: list[Match | None] = [None] * len(lengths)
        for at, entry in self._hits(Hashes(tokens)(starts[:-1], lengths)):
            a, b = starts[at : at + 2].tolist()
            if matches[at] is None:
                matches[at] = self._exact([entry], tokens[a:b])
        return matches

    def match(
        self, tokens: Tensor, hashes: Hashes, starts: list[int], limits: list[int], whole: bool
    ) -> list[Match | None]:
        """The longest match at each start, or None if no document matches at this start.

        `limits` are the greatest lengths of the matches. A document longer than the limit matches
        by its beginning. With `whole`, a document shorter than the limit does not match.
        """
        matches: list[Match | None] = [None] * len(starts)
        waiting = self._searches(hashes, starts, limits)
        while waiting:
            # One search per start and pass. Shorter beginnings follow if no document was found.
            proposed = self._proposed(hashes, starts, [searches[0] for searches in waiting])
            left = []
            for searches, hits in zip(waiting, proposed, strict=True):
                at = searches[0].at
                here = tokens[starts[at] : starts[at] + limits[at]]
                # A document longer than the limit has every hashed beginning up to the limit.
                may_be_cut_off = 4 * searches[0].length > limits[at]
                candidates = self._in_order(hits, limits[at], whole, may_be_cut_off)
                matches[at] = _first_that_agrees(candidates, here)
                if matches[at] is None and len(searches) > 1:
                    left.append(searches[1:])
            waiting = left
        return matches

    def whole_documents(
        self, tokens: Tensor, hashes: Hashes, start: int, limit: int
    ) -> Iterator[Match]:
        """Matches of documents that end at most `limit` tokens after a start, longest first."""
        lengths = torch.arange(limit, 0, -1)
        for place, entry in self._hits(hashes(torch.full_like(lengths, start), lengths)):
            match = self._exact([entry], tokens[start : start + limit - place])
            if match is not None:
                yield match

    def likely_starts(self, hashes: Hashes, total: int) -> list[int]:
        """Places where a document of at least NOTICED tokens may begin."""
        places = torch.arange(max(total - NOTICED + 1, 0))
        wanted = hashes(places, torch.full_like(places, NOTICED))
        return list(dict.fromkeys(place for place, _ in self._hits(wanted)))

    def _searches(
        self, hashes: Hashes, starts: list[int], limits: list[int]
    ) -> list[list[_Search]]:
        """The searches of each start that has hashed beginnings in the index, longest first."""
        if not starts:
            return []
        begin, limit = torch.tensor(starts)[:, None], torch.tensor(limits)[:, None]
        tried = [0, *beginnings(max(limits))]
        lengths = torch.tensor(tried).repeat(len(starts), 1)
        lengths[:, :1] = limit  # the whole range comes before shorter beginnings
        lengths = lengths.clamp_max(limit)
        found: dict[int, dict[int, list[int]]] = {}
        for place, entry in self._hits(hashes(begin, lengths).flatten()):
            at, column = divmod(place, len(tried))
            length = limits[at] if column == 0 else min(tried[column], limits[at])
            entries = found.setdefault(at, {}).setdefault(length, [])
            if entry not in entries:
                entries.append(entry)
        searches = []
        for at, by_length in found.items():
            descending = sorted(by_length, reverse=True)
            uppers = [limits[at], *descending]
            searches.append([
                _Search(at, length, min(upper, 4 * length), by_length[length])
                for length, upper in zip(descending, uppers, strict=False)
            ])  # fmt: skip
        return searches

    def _proposed(
        self, hashes: Hashes, starts: list[int], searches: list[_Search]
    ) -> list[list["_Hit"]]:
        """Searches the index once for each start, and returns the entries."""
        proposed, begin, length, owner = [], [], [], []
        for number, search in enumerate(searches):
            several = min(self.numbers[search.entries].tolist()) < 0  # share the beginning
            proposed.append([(search.length, entry, not several) for entry in search.entries])
            if several:
                more = torch.arange(search.length + 1, search.upper + 1)
                begin.append(torch.full_like(more, starts[search.at]))
                length.append(more)
                owner.append(torch.full_like(more, number))
        if begin:
            lengths, owners = torch.cat(length), torch.cat(owner)
            for place, entry in self._hits(hashes(torch.cat(begin), lengths)):
                proposed[int(owners[place])].append((int(lengths[place]), entry, False))
        return proposed

    def _in_order(
        self, hits: list["_Hit"], limit: int, whole: bool, may_be_cut_off: bool
    ) -> list[Match]:
        """The candidates, sorted from the longest match to the shortest match.

        Of the documents that the limit cuts off, one candidate per shard is enough. This candidate
        is the document whose index entry has the longest hash. All documents of the shard with this
        beginning agree up to the next longer entry, and no longer entry was found.
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

    def _hits(self, wanted: Tensor) -> list[tuple[int, int]]:
        """Pairs of a place in `wanted` and an index entry with the hash at this place."""
        if not len(self.hashes):
            return []
        low = torch.searchsorted(self.hashes, wanted)
        is_hit = self.hashes[low.clamp_max(len(self.hashes) - 1)] == wanted
        places = is_hit.nonzero()[:, 0]
        if not len(places):
            return []
        low, high = low[places], torch.searchsorted(self.hashes, wanted[places], right=True)
        ranges = zip(places.tolist(), low.tolist(), high.tolist(), strict=True)
        return [(place, entry) for place, a, b in ranges for entry in range(a, b)]

    def _candidate(self, entry: int) -> Match:
        """The document of an index entry, with its whole length."""
        number = int(self.numbers[entry])
        number = -1 - number if number < 0 else number
        file_checks.in_store(number, self.first[-1])
        which = bisect.bisect_right(self.first, number) - 1
        shard, document = self.shards[which], number - self.first[which]
        begin, end = shard.span(document)
        return Match(shard, document, end - begin)

    def _exact(self, entries: Iterable[int], tokens: Tensor) -> Match | None:
        """The document of one of the index entries that has exactly these tokens, or None."""
        candidates = (self._candidate(entry) for entry in entries)
        return _first_that_agrees((c for c in candidates if c.length == len(tokens)), tokens)


_Hit = tuple[int, int, bool]  # length, index entry, and whether only one document has it


def _first_that_agrees(candidates: Iterable[Match], here: Tensor) -> Match | None:
    for match in candidates:
        begin, _ = match.shard.span(match.document)
        if torch.equal(match.shard.tokens(begin, begin + match.length), here[: match.length]):
            return match
    return None
