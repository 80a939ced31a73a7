"""The k largest logits of each row, and the mass of the other columns, in plain PyTorch.

torch.topk guarantees no order of equal numbers, so each logit becomes a unique 64-bit key: the
logit in the high half, the column in the low half, larger for lower columns. fp64 logits need all
64 bits, so their rows are sorted instead.
"""

import torch
from torch import Tensor

from ..contract import PRECISION
from .rows import capped, chunks

LAST = 2**31 - 1


def topk(
    x: Tensor,  # (..., V)
    k: int,
    temperature: float,
    softcap: float | None,
    invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids and log-probabilities of the k largest logits of each row, and `log_tail`.

    Ids are in order of descending logit, then of ascending id. If `invariant` is True, each row is
    copied and processed on its own.
    """
    shape, V = x.shape[:-1], x.shape[-1]
    flat = x.detach().reshape(-1, V)
    ids = torch.empty((flat.shape[0], k), dtype=torch.int64, device=x.device)
    logprobs = torch.empty((flat.shape[0], k), dtype=PRECISION[x.dtype], device=x.device)
    log_tail = torch.empty(flat.shape[0], dtype=PRECISION[x.dtype], device=x.device)
    single = (slice(i, i + 1) for i in range(len(flat)))
    for rows in single if invariant else chunks(flat, None):
        here = flat[rows].clone() if invariant else flat[rows]
        at = ids[rows] = _largest(here, k)
        y, _ = capped(here, softcap)
        m = y.amax(1, keepdim=True)
        z = (y - torch.where(m.isinf(), 0.0, m)) / temperature
        chosen = z.gather(1, at)
        rest = z.scatter_(1, at, -torch.inf).logsumexp(1)
        log_s = torch.logaddexp(chosen.logsumexp(1), rest)
        logprobs[rows] = chosen - log_s[:, None]
        log_tail[rows] = rest - log_s
    return ids.view(*shape, k), logprobs.view(*shape, k), log_tail.view(shape)


def _largest(x: Tensor, k: int) -> Tensor:
    """Returns the ids (N, k) of the k largest logits of each row of x (N, V), largest first."""
    if x.dtype == torch.float64:
        return x.sort(dim=1, descending=True, stable=True).indices[:, :k]
    bits = torch.where(x == 0, 0.0, x).float().view(torch.int32)  # -0 equals 0
    ordered = bits ^ ((bits >> 31) & LAST)
    keys = ordered.long() << 32
    keys |= LAST ^ torch.arange(x.shape[1], device=x.device)
    return keys.topk(k, dim=1).values & LAST ^ LAST
