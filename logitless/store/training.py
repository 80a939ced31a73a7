"""Training a student from a store: the targets of a batch, and the loss of a causal model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import call as _call
from ..losses.cross_entropy import cross_entropy
from ..losses.sparse_teacher import topk_distill
from ..targets.sparse import SparseTargets
from . import checks as rules
from .reader import Store


class DistillLosses(NamedTuple):
    """What `distill_loss` returns; ce and kd are without gradients, and None unless asked for."""

    loss: Tensor
    ce: Tensor | None = None
    kd: Tensor | None = None


@_call.named(topk_distill)
def distill_loss(
    logits: Tensor,
    labels: Tensor,
    targets: SparseTargets,
    *,
    ce_weight: float = 0.5,
    kd_weight: float = 0.5,
    num_items: Tensor | int | None = None,
    parts: bool = False,
    **how,
) -> DistillLosses:
    """ce_weight · cross-entropy + kd_weight · divergence of a causal model from its teacher.

    logits (B, T, V), of a head or of a fused model too; labels (B, T) as Transformers has them: the
    token itself, so that row t is held to labels[t + 1], and -100 for what does not count. targets
    (B, T) as `Store.targets_for` gives them. The mean over the tokens that count, or their sum
    divided by num_items. `parts` asks for both terms, for a log: another pass over the logits.
    Other options are those of `topk_distill`; divergence and support have no default.

    >>> targets = store.targets_for(input_ids)
    >>> how = {"divergence": "forward_kl", "support": "tail"}
    >>> distill_loss(model(input_ids).logits, input_ids, targets, **how).loss.backward()
    """
    rules.labels_of(labels, targets)
    ignore = how.get("ignore_index", -100)
    following = F.pad(labels[..., 1:], (0, 1), value=ignore)
    reduction = "mean" if num_items is None else "sum"
    weights = {"ce_weight": ce_weight, "kd_weight": kd_weight, "reduction": reduction}
    loss = topk_distill(logits, targets, labels=following, **weights, **how)
    ce = kd = None
    if parts:
        with torch.no_grad():
            ce = cross_entropy(logits, following, ignore_index=ignore, reduction=reduction)
            kd = (loss.detach() - ce_weight * ce) / kd_weight if kd_weight else torch.zeros_like(ce)
    if num_items is None:
        return DistillLosses(loss, ce, kd)
    found = (None if t is None else t / num_items for t in (loss, ce, kd))
    return DistillLosses(*found)


def batch_targets(store: Store, batch: Mapping[str, Any]) -> SparseTargets:
    """Of input_ids (B, T): padding is where attention_mask is 0, on either side.

    Where position_ids begin again, so does a document; without them a row may hold several too, and
    `targets_for` finds where they begin.
    """
    ids = batch["input_ids"]
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    mask = None if mask is None or mask.shape != ids.shape else mask  # or one of attention itself
    there = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.cpu() != 0
    order = torch.sort(~there, dim=-1, stable=True).indices  # padding last
    tokens = ids.cpu().masked_fill(~there, -1).gather(-1, order)
    lengths = None
    if positions is not None:
        begins = (positions.expand_as(ids).cpu() == 0).gather(-1, order)
        lengths = [_lengths(row, int(n)) for row, n in zip(begins, there.sum(-1), strict=True)]
    if mask is not None:  # each row ends in padding, -1: then no repeated token is taken for it
        tokens = F.pad(tokens, (0, 1), value=-1)
    found = store.targets_for(tokens, lengths)
    if mask is not None:
        rows = order.argsort(-1) + tokens.shape[-1] * torch.arange(len(order))[:, None]
        found = found.reshape(-1)[rows.flatten()].reshape(*ids.shape)
    return found.to(ids.device)


def _lengths(begins: Tensor, tokens: int) -> list[int]:
    """Of the documents of a row, from where they begin."""
    starts = begins[1:tokens].nonzero()[:, 0] + 1
    return torch.diff(starts, prepend=torch.tensor([0]), append=torch.tensor([tokens])).tolist()


class Collator:
    """A collator that also brings what the teacher says of each batch, under "targets".

    It does what `inner` does, and asks the store for the documents that it is given; in the workers
    of a DataLoader, where there are some, and on each rank for its own batch alone.

    >>> DataLoader(documents, batch_size=8, collate_fn=Collator(store, pad_and_stack))
    """

    def __init__(self, store: Store, inner: Callable[[Sequence[Any]], Mapping[str, Any]]):
        self.store, self.inner = store, inner

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        batch = dict(self.inner(samples))
        return batch | {"targets": batch_targets(self.store, batch)}
