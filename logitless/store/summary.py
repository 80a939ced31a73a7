"""Statistics of a store: mass in the slots, entropy, and rank of the next token.

`logitless teacher info` prints and plots these statistics (cli/teacher.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .reader import Store

SAMPLE = 200_000  # number of tokens to read, from documents spread over the store


@dataclass
class Summary:
    """Statistics over the rows of a sample, except rows without slots."""

    rows: int
    covered: Tensor  # (K,), mean mass of the 1, 2, ..., K most probable tokens
    entropy: Tensor  # (rows,), a lower bound in nats; the tail counts as one token
    rank: Tensor  # rank of each next token among the slots, from 0; K if no slot has the token

    def within(self, k: int) -> float:
        """The share of next tokens that are among the k most probable tokens."""
        return float((self.rank < k).double().mean()) if len(self.rank) else 0.0


def summary(store: Store, most: int = SAMPLE) -> Summary:
    """Reads about `most` tokens and returns their statistics."""
    k = store.info.k
    covered, entropies, ranks, rows = torch.zeros(k).double(), [], [], 0
    every = max(1, store.tokens // most)
    for i in range(0, len(store), every):
        tokens, targets = store[i, 0:most]
        p = targets.logprobs.double().exp()
        has_slots = p.sum(-1) > 0
        p, tail = p[has_slots], targets.tail[has_slots].double().exp()
        covered += p.cumsum(-1).sum(0)
        rows += len(p)
        with_tail = torch.cat([p, tail[:, None]], -1)
        entropies.append(torch.special.entr(with_tail).sum(-1))
        hit = targets.ids[:-1] == tokens[1:, None]
        if targets.mask is not None:
            hit &= targets.mask[:-1]
        hit = hit[has_slots[:-1]]
        ranks.append(torch.where(hit.any(-1), hit.int().argmax(-1), k))
        if rows >= most:
            break
    empty = [torch.empty(0)]
    return Summary(
        rows, covered / max(rows, 1), torch.cat(entropies or empty), torch.cat(ranks or empty)
    )
