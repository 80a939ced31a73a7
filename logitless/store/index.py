"""The index of a shard holds hashes of prefixes of the shard's documents.

The prefix of length n of a document is its first n tokens. An entry of the index holds the hash of
a prefix and the number of one document that has it. Every document has an entry for its whole
length, for each of 1, 4, 16, 64, ... below it, and for l + 1 if another document of the shard
shares exactly the first l tokens: there the two prefixes differ, and so do their hashes. Documents
share the entry of a common prefix; if one of them is exactly as long, the entry holds its number. A
search (store/lookup.py) compares only the tokens of the candidates that the hashes give.

The hash of tokens[a:b] comes from its length and from Σ (tokens[i] + 1) · BASE^(i - a) mod 2^64, so
one cumulative sum gives the hashes of all ranges.
"""

import functools

import torch
from torch import Tensor

from ..targets.safetensors import buffer

BASE = 0x9E3779B97F4A7C15 - 2**64  # odd, because only odd numbers have an inverse mod 2^64
INVERSE = pow(BASE, -1, 2**64)
INVERSE -= 2**64 if INVERSE >= 2**63 else 0
MIX = 0x2545F4914F6CDD1D


class Hashes:
    def __init__(self, tokens: Tensor):
        n = len(tokens)
        powers, inverse = _powers(1 << n.bit_length())
        self.sums = torch.zeros(n + 1, dtype=torch.int64)
        torch.cumsum((tokens + 1) * powers[:n], 0, out=self.sums[1:])
        self.inverse = inverse

    def __call__(self, begin: Tensor, length: Tensor) -> Tensor:
        h = (self.sums[begin + length] - self.sums[begin]) * self.inverse[begin]
        h = (h ^ h >> 29) * MIX + length
        return (h ^ h >> 32) * MIX


def hash_of(tokens: list[int]) -> int:
    """The hash of a list of tokens, for short lists faster than `Hashes`."""
    h = 0
    for token in reversed(tokens):
        h = h * BASE + token + 1 & 2**64 - 1
    h = _signed(h)
    h = _signed((h ^ h >> 29) * MIX + len(tokens))
    return _signed((h ^ h >> 32) * MIX)


def _signed(h: int) -> int:
    return (h + 2**63 & 2**64 - 1) - 2**63


@functools.lru_cache(maxsize=4)
def _powers(n: int) -> tuple[Tensor, Tensor]:
    """BASE^0, ..., BASE^n and the inverses of these powers, mod 2^64."""
    powers = torch.tensor([[BASE], [INVERSE]]).repeat(1, n + 1)
    powers[:, 0] = 1
    first, second = powers.cumprod(-1)
    return first, second


def beginnings(longest: int) -> list[int]:
    """The powers of 4 below `longest`, and always 1, in descending order."""
    lengths = [1]
    while lengths[-1] * 4 < longest:
        lengths.append(lengths[-1] * 4)
    return lengths[::-1]


def index_of(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    hashed = Hashes(tokens)
    order = _sorted(tokens, starts)
    begin, lengths = starts[:-1][order], starts.diff()[order]
    shared = _shared(hashed, begin, lengths)
    before, after = torch.zeros_like(lengths), torch.zeros_like(lengths)
    before[1:], after[:-1] = shared, shared
    places = torch.arange(len(order))  # positions of the documents in the sorted order
    entries = [(places, lengths)]
    for n in beginnings(int(lengths.max())):
        first = places[(lengths > n) & (before < n)]
        entries.append((first, torch.full_like(first, n)))
    entries += [(places[1:], shared + 1), (places[:-1], shared + 1)]
    place, length = (torch.cat(column) for column in zip(*entries, strict=True))
    # Where a whole document is a prefix of another, `shared + 1` exceeds the shorter one.
    within = length <= lengths[place]
    place, length = place[within], length[within]
    hashes, by_hash = hashed(begin[place], length).sort(stable=True)
    place, length = place[by_hash], length[by_hash]
    # Of several entries with one hash, the first is kept: the sort is stable, and whole documents
    # come first in `entries`, so they take precedence.
    kept = torch.ones(len(hashes), dtype=torch.bool)
    kept[1:] = hashes[1:] != hashes[:-1]
    place, length = place[kept], length[kept]
    document = order[place]
    several = torch.maximum(before[place], after[place]) >= length
    return hashes[kept], torch.where(several, -1 - document, document).int()


def _sorted(tokens: Tensor, starts: Tensor) -> Tensor:
    # Big-endian bytes sort in the same order as the tokens.
    digits = tokens[:, None] >> torch.tensor([24, 16, 8, 0]) & 255
    digits = digits.to(torch.uint8)  # keeps the tensor alive while `buffer` uses its memory
    data = bytes(buffer(digits))
    ends = (4 * starts).tolist()
    order = sorted(range(len(ends) - 1), key=lambda d: data[ends[d] : ends[d + 1]])
    return torch.tensor(order)


def _shared(hashed: Hashes, begin: Tensor, lengths: Tensor) -> Tensor:
    """The number of first tokens that each sorted document shares with the next, by bisection."""
    low = torch.zeros(len(begin) - 1, dtype=torch.int64)
    high = torch.minimum(lengths[:-1], lengths[1:])
    while bool((low < high).any()):
        middle = (low + high + 1) // 2
        same = hashed(begin[:-1], middle) == hashed(begin[1:], middle)
        low, high = torch.where(same, middle, low), torch.where(same, high, middle - 1)
    return low
