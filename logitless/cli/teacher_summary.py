"""Statistics of a store for `logitless teacher info`: mass of the slots, entropy, token ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.store import Store
from logitless.store.codes import decoded
from logitless.store.remote import is_address
from logitless.targets.sparse import SparseTargets, unchecked

SAMPLE = 200_000  # number of tokens to read, from documents spread over the store
FETCHED = 4  # smallest number of shards to read from a remote store


@dataclass
class Summary:
    """Statistics over the rows of a sample, without rows that have no slots."""

    rows: int
    covered: Tensor  # covered[k - 1] is the mean mass of the k most probable tokens
    # Entropy in nats per row. This is a lower bound, because the whole tail counts as one token.
    entropy: Tensor
    rank: Tensor  # rank of each next token among the slots, from 0; K if no slot has the token
    slots: float  # mean number of slots per row whose probability is above 0

    def within(self, k: int) -> float:
        """The fraction of next tokens that are among the k most probable tokens."""
        return float((self.rank < k).double().mean()) if len(self.rank) else 0.0


def _sample(store: Store, most: int) -> list[int]:
    """The numbers of documents that are spread over the store, or over some remote shards."""
    shards = store.shards
    if is_address(store.path) and shards:
        needed = math.ceil(len(shards) * most / store.tokens)
        count = min(len(shards), max(FETCHED, needed))
        shards = [shards[n * len(shards) // count] for n in range(count)]
    tokens = sum(shard.listed.tokens for shard in shards)
    every = max(1, tokens // most)
    ranges = [range(shard.first, shard.first + len(shard), every) for shard in shards]
    numbers = [number for of_shard in ranges for number in of_shard]
    store.prefetch(numbers)
    return numbers


def summary(store: Store, most: int = SAMPLE) -> Summary:
    k = store.info.k
    covered, entropies, ranks, rows = torch.zeros(k, dtype=torch.float64), [], [], 0
    slots = 0
    for group in store.groups(_sample(store, most)):
        targets = decoded(group.rows, store.info)
        targets = _by_probability(targets) if store.info.sampled else targets
        p = targets.logprobs.double().exp()
        has_slots = p.sum(-1) > 0
        has_next = torch.ones_like(has_slots)
        has_next[torch.tensor(group.starts[1:]) - 1] = False
        hit = targets.ids[:-1] == group.tokens[1:, None]
        if targets.mask is not None:
            hit &= targets.mask[:-1]
        hit = hit[(has_slots & has_next)[:-1]]
        ranks.append(torch.where(hit.any(-1), hit.int().argmax(-1), k))
        slots += int((p[has_slots] > 0).sum())
        p = p[has_slots]
        covered += p.cumsum(-1).sum(0)
        rows += len(p)
        if targets.tail is not None:
            p = torch.cat([p, targets.tail[has_slots].double().exp()[:, None]], -1)
        entropies.append(torch.special.entr(p).sum(-1))
        if rows >= most:
            break
    empty = [torch.empty(0)]
    return Summary(
        rows, covered / max(rows, 1), torch.cat(entropies or empty), torch.cat(ranks or empty),
        slots / max(rows, 1),
    )  # fmt: skip


def _by_probability(targets: SparseTargets) -> SparseTargets:
    logprobs, order = targets.logprobs.sort(dim=-1, descending=True, stable=True)
    ids, mask = targets.ids.gather(-1, order), targets.mask.gather(-1, order)
    return unchecked(ids, logprobs, None, mask)
