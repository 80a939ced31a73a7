"""Contrastive losses over a block of similarities, in plain PyTorch.

A block holds similarities x = a @ b.T of embeddings; its logits are z = scale · x, and -inf for a
pair that is left out, which a positive never is. The state of a row or column is the max m of its
logits and s = Σ e^(z - m), so further blocks can be merged into it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contract import PRECISION


class Block(NamedTuple):
    """The options of a block of similarities (n, m)."""

    scale: Tensor  # (), fp32, or fp64 for fp64 similarities
    # the column of each row's positive; outside [0, m) the positive is not in this block
    positives: Tensor | None = None  # (n,), int64
    # without `positives`, row i has its positive in column i + diagonal; if both are None, the
    # block has no positives
    diagonal: int | None = None
    mask: Tensor | None = None  # (n, m), bool; True for pairs that are left out
    # of the rows and columns; a pair with equal labels is left out
    labels: tuple[Tensor, Tensor] | None = None  # (n,) and (m,)

    def rows(self, rows: slice) -> "Block":
        mask, labels, diagonal = self.mask, self.labels, self.diagonal
        return self._replace(
            positives=None if self.positives is None else self.positives[rows],
            diagonal=None if diagonal is None else diagonal + rows.start,
            mask=None if mask is None else mask[rows],
            labels=None if labels is None else (labels[0][rows], labels[1]),
        )


def contrastive_read(
    x: Tensor,  # (n, m)
    block: Block,
    rows: Tensor | None,  # (n, 2)
    columns: Tensor | None,  # (m, 2)
) -> None:
    """Merges the logits of a block into the states of its rows and of its columns."""
    z = _logits(x, block)
    if rows is not None:
        _merge(rows, z, 1)
    if columns is not None:
        _merge(columns, z, 0)


def contrastive_finish(state: Tensor, picked: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns -log p of the positives, and the normalisers (n, 2) that `contrastive_gradient`
    needs.

    `picked` holds the similarities of the positives. The normalisers m and log s stay apart,
    because their rounded sum would lose digits of log s if m is large.
    """
    m, log_s = state[:, 0], state[:, 1].log()
    return log_s - (picked.to(m.dtype) * scale - m), torch.stack((m, log_s), 1)


def contrastive_gradient(
    x: Tensor,  # (n, m)
    block: Block,
    rows: Tensor,  # (n, 2), the normalisers of the rows
    columns: Tensor | None,  # (m, 2), the normalisers of the columns
    row_upstream: Tensor | None = None,  # (n,), or None for ones
    column_upstream: Tensor | None = None,  # (m,), or None for ones
    d_scale: bool = False,
) -> Tensor | None:
    """Overwrites x with the gradient of the logits, and returns Σ gradient · x if `d_scale`."""
    z = _logits(x, block)
    dz = _probability(z, rows.unsqueeze(1), row_upstream, 1, block)
    if columns is not None:
        dz += _probability(z, columns.unsqueeze(0), column_upstream, 0, block)
    total = None
    if d_scale:
        # z's memory is reused; x can be NaN where a pair is left out
        total = z.copy_(x).masked_fill_(dz == 0, 0.0).mul_(dz).sum()
    x.copy_(dz)
    return total


def sigmoid_contrastive(
    x: Tensor,  # (n, m)
    block: Block,
    bias: Tensor,  # ()
    gradient: bool,
    upstream: Tensor | None = None,  # (n,), or None for ones
) -> tuple[Tensor, Tensor | None]:
    """Returns Σ softplus(-y (z + bias)) of each row, where y is 1 for positives and -1 otherwise.

    With `gradient`, x is overwritten with the gradient of the logits, and the second result holds Σ
    gradient · x and Σ gradient.
    """
    t = x.to(PRECISION[x.dtype]) * block.scale
    t += bias
    _at_positives(t, block, torch.neg)
    loss = -F.logsigmoid(-t).sum(1)
    if not gradient:
        return loss, None
    dz = t.sigmoid_()
    _at_positives(dz, block, torch.neg)
    if upstream is not None:
        dz *= upstream.unsqueeze(1)
    sums = torch.stack(((dz * x).sum(), dz.sum()))
    x.copy_(dz)
    return loss, sums


def _logits(x: Tensor, block: Block) -> Tensor:
    z = x.to(PRECISION[x.dtype]) * block.scale
    out = block.mask
    if block.labels is not None:
        same = block.labels[0].unsqueeze(1) == block.labels[1]
        out = same if out is None else same.logical_or_(out)
    elif out is not None:
        out = out.clone()
    if out is None:
        return z
    _at_positives(out, block, torch.zeros_like)
    return z.masked_fill_(out, -torch.inf)


def _at_positives(t: Tensor, block: Block, change: Callable[[Tensor], Tensor]) -> None:
    (n, m), rows = t.shape, torch.arange(len(t), device=t.device)
    if block.positives is not None:
        columns = block.positives
    elif block.diagonal is not None:
        columns = rows + block.diagonal
    else:
        return
    if n and m:
        inside = (columns >= 0) & (columns < m)
        at = rows, torch.where(inside, columns, 0)
        t[at] = torch.where(inside, change(t[at]), t[at])


def _merge(state: Tensor, z: Tensor, dim: int) -> None:
    if z.shape[dim] == 0:
        return
    before, s = state.unbind(1)
    m = torch.maximum(before, z.amax(dim))
    shift = torch.where(m.abs() == torch.inf, 0.0, m)
    s = torch.where(s == 0, 0.0, s * (before - shift).exp())
    state[:, 1] = s + (z - shift.unsqueeze(dim)).exp_().sum(dim)
    state[:, 0] = m


def _probability(z: Tensor, lse: Tensor, upstream: Tensor | None, dim: int, block: Block) -> Tensor:
    """Returns p · upstream, and (p - 1) · upstream at positives; `lse` ends in (m, log s)."""
    m, log_s = lse.unbind(-1)
    p = (z - m).sub_(log_s).exp_()
    _at_positives(p, block, lambda entries: entries - 1)
    return p if upstream is None else p.mul_(upstream.unsqueeze(dim))
