"""Training a student from a store: the targets of a batch, and the loss of a causal model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _call
from ..distill import topk_distill
from ..losses import cross_entropy
from ..targets import SparseTargets, unchecked
from . import _rules as rules
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

    Where position_ids begin again, as in rows packed without padding, so does a document.
    """
    ids = batch["input_ids"]
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    mask = None if mask is None or mask.shape != ids.shape else mask  # or one of attention itself
    if mask is None and positions is None:
        return store.targets_for(ids)
    there = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.cpu() != 0
    begins = torch.zeros_like(there)
    if positions is not None:
        begins |= positions.expand_as(ids).cpu() == 0
    begins[torch.arange(len(begins)), there.int().argmax(-1)] = True
    places = begins[there].nonzero()[:, 0]
    lengths = torch.diff(places, append=there.sum()[None])
    found = store.targets_for(ids.cpu()[there], lengths.tolist())
    return _spread(found, there.flatten()).reshape(*ids.shape).to(ids.device)


def _spread(targets: SparseTargets, there: Tensor) -> SparseTargets:
    """Rows at the places that are True, and rows of no slots at the others."""
    if bool(there.all()):
        return targets
    none = unchecked(
        torch.zeros_like(targets.ids[:1]), torch.full_like(targets.logprobs[:1], -torch.inf),
        torch.zeros_like(targets.tail[:1]), torch.zeros_like(targets.ids[:1], dtype=torch.bool),
    )  # fmt: skip
    rows = torch.where(there, there.cumsum(0) - 1, len(targets))
    return SparseTargets.cat([targets, none])[rows]


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
