"""Looks up the targets of a batch in a store, and computes the student's loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import call as _call
from ..losses.cross_entropy import cross_entropy
from ..losses.sparse_teacher import topk_distill
from ..targets.sparse import SparseTargets
from . import checks
from .device import on_cpu
from .reader import Store


class DistillLosses(NamedTuple):
    """The result of `distill_loss`. `ce` and `kd` are None without `parts=True`."""

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
    **options,
) -> DistillLosses:
    """Returns (ce_weight · cross-entropy + kd_weight · divergence from the teacher).

    `logits`, of shape (B, T, V), are a tensor, a `LinearLogits` or the output of a fused causal
    model. `labels`, of shape (B, T), are not shifted: the logits at position t are compared with
    `labels[:, t + 1]`, and the label -100 is ignored. `targets` come from `Store.targets_for`, and
    have the shape of `labels`.

    The loss is the mean over the tokens that are not ignored, or their sum divided by `num_items`.
    `parts=True` also returns the cross-entropy `ce` and the divergence `kd`, for logging, at the
    cost of a second read of the logits. Other options are passed to `topk_distill`, and must
    include `divergence` and `support`; for sampled targets, `support` must be "truncate" or
    "renorm_teacher".

    >>> targets = store.targets_for(input_ids)
    >>> options = {"divergence": "forward_kl", "support": "tail"}
    >>> distill_loss(model(input_ids).logits, input_ids, targets, **options).loss.backward()
    """
    checks.labels_of(labels, targets)
    ignore = options.get("ignore_index", -100)
    next_tokens = F.pad(labels[..., 1:], (0, 1), value=ignore)
    reduction = "mean" if num_items is None else "sum"
    weights = {"ce_weight": ce_weight, "kd_weight": kd_weight, "reduction": reduction}
    loss = topk_distill(logits, targets, labels=next_tokens, **weights, **options)
    ce = kd = None
    if parts:
        with torch.no_grad():
            ce = cross_entropy(logits, next_tokens, ignore_index=ignore, reduction=reduction)
            kd = (loss.detach() - ce_weight * ce) / kd_weight if kd_weight else torch.zeros_like(ce)
    if num_items is None:
        return DistillLosses(loss, ce, kd)
    return DistillLosses(*(None if t is None else t / num_items for t in (loss, ce, kd)))


@on_cpu
def batch_targets(store: Store, batch: Mapping[str, Any]) -> SparseTargets:
    """Returns the targets of a batch with input_ids of shape (B, T).

    Tokens whose attention_mask is 0 are padding, on the left or on the right. A document begins
    where position_ids is 0. `documents` has the numbers of the documents, as in
    `Store.targets_for`; without it, they are found by their tokens.
    """
    ids = batch["input_ids"]
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and mask.shape != ids.shape:  # a 4-dimensional mask does not mark padding
        mask = None
    tokens = ids.cpu()
    is_token = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.cpu() != 0
    order = torch.sort(~is_token, dim=-1, stable=True).indices  # moves padding to the end
    lengths = None if mask is None else [[int(n)] if n else [] for n in is_token.sum(-1)]
    if positions is not None:
        begins = (positions.expand_as(ids).cpu() == 0).gather(-1, order)
        lengths = [_lengths(row, int(n)) for row, n in zip(begins, is_token.sum(-1), strict=True)]
    targets = store.targets_for(tokens.gather(-1, order), lengths, batch.get("documents"))
    if mask is not None:
        rows = order.argsort(-1) + tokens.shape[-1] * torch.arange(len(order))[:, None]
        targets = targets.reshape(-1)[rows.flatten()].reshape(*ids.shape)
    return targets.to(ids.device)


def _lengths(begins: Tensor, tokens: int) -> list[int]:
    """The lengths of the documents in the first `tokens` tokens of a row, from their beginnings."""
    starts = begins[1:tokens].nonzero()[:, 0] + 1
    return torch.diff(starts, prepend=torch.tensor([0]), append=torch.tensor([tokens])).tolist()


class Collator:
    """Wraps a collator, and adds the teacher's targets to each batch as "targets".

    A sample can have the number of its document as "document", or a list of several that are packed
    into it; `inner` gets the samples without it. Without numbers, documents are found by their
    tokens. Each rank looks up only its own batches, in the workers of the DataLoader if there are
    any.

    >>> DataLoader(documents, batch_size=8, collate_fn=Collator(store, pad_and_stack))
    """

    def __init__(self, store: Store, inner: Callable[[Sequence[Any]], Mapping[str, Any]]):
        self.store, self.inner = store, inner

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        batch, numbers = self.without_targets(samples), None
        if samples and all(_has_number(sample) for sample in samples):
            numbers = [sample["document"] for sample in samples]
            if len(batch["input_ids"]) != len(samples):  # `inner` packs the samples
                several = [n if isinstance(n, (list, tuple)) else [n] for n in numbers]
                numbers = [number for of_sample in several for number in of_sample]
        return batch | {"targets": batch_targets(self.store, batch | {"documents": numbers})}

    def without_targets(self, samples: Sequence[Any]) -> dict[str, Any]:
        """The batch of `inner`."""
        plain = [
            {name: value for name, value in sample.items() if name != "document"}
            if _has_number(sample)
            else sample
            for sample in samples
        ]
        return dict(self.inner(plain))


def _has_number(sample: Any) -> bool:
    return isinstance(sample, Mapping) and "document" in sample
