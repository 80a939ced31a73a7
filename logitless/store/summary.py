"""What a teacher in a store is like: how much its slots hold, how sure it is, how often right."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .reader import Store

SAMPLE = 200_000  # tokens, at most, of documents spread over the store


@dataclass
class Summary:
    """Means over the rows of a sample that have a teacher."""

    rows: int
    covered: Tensor  # (K,) mass of the 1, 2, ..., K most probable tokens
    entropy: Tensor  # of each row, its tail taken as one token: less than the whole, in nats
    rank: Tensor  # of the next token among the slots, from 0; K where it is outside

    def within(self, k: int) -> float:
        """Share of next tokens that are among the k most probable."""
        return float((self.rank < k).double().mean()) if len(self.rank) else 0.0


def summary(store: Store, most: int = SAMPLE) -> Summary:
    k = store.info.k
    covered, entropies, ranks, rows = torch.zeros(k).double(), [], [], 0
    every = max(1, store.tokens // most)
    for i in range(0, len(store), every):
        tokens, targets = store[i, 0:most]
        p = targets.logprobs.double().exp()
        there = p.sum(-1) > 0
        p, tail = p[there], targets.tail[there].double().exp()
        covered += p.cumsum(-1).sum(0)
        rows += len(p)
        parts = torch.cat([p, tail[:, None]], -1)
        entropies.append(torch.special.entr(parts).sum(-1))
        hit = targets.ids[:-1] == tokens[1:, None]
        if targets.mask is not None:
            hit &= targets.mask[:-1]
        hit = hit[there[:-1]]
        ranks.append(torch.where(hit.any(-1), hit.int().argmax(-1), k))
        if rows >= most:
            break
    empty = [torch.empty(0)]
    return Summary(
        rows, covered / max(rows, 1), torch.cat(entropies or empty), torch.cat(ranks or empty)
    )
