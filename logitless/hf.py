"""`ll.hf.DistillTrainer`: distillation with the Trainer of Transformers.

This file needs the package transformers. The loss is in store/training.py.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from .core import options as _options
from .lazy.fuse import OPTIONS, fuse
from .losses.cross_entropy import cross_entropy
from .losses.sparse_teacher import capture_topk
from .store import checks
from .store.capture import lazy_head
from .store.reader import Store
from .store.tokenizer import tokenizer_hash
from .store.training import Collator, batch_targets, distill_loss
from .targets.sparse import SparseTargets


class DistillTrainer(Trainer):
    """A Trainer whose loss is ce_weight · cross-entropy + kd_weight · divergence from a teacher.

    The teacher is a `store` (or its path) or a model, `teacher`. With a store, the samples of the
    dataset must be documents of the store, whole or cut off at their end. With a model, its `k`
    largest logits are captured in each step. Both heads are fused, so that no logits are
    materialised. divergence and support have no default (docs/distillation.md). `temperature`
    applies to student and teacher; a store must have been captured at the same temperature.

    The log has `ce_loss` and `kd_loss` of the logged steps, and `eval_ce_loss` and `eval_kd_loss`
    of evaluations. With `eval_teacher=False`, evaluation uses cross-entropy alone, for documents
    that are not in the store.

    >>> DistillTrainer(model, arguments, train_dataset=data, data_collator=collator,
    ...                store="targets", divergence="forward_kl", support="tail").train()
    """

    def __init__(
        self,
        *args: Any,
        store: Store | str | os.PathLike | None = None,
        teacher: nn.Module | None = None,
        k: int = 64,
        divergence: str,
        support: str,
        ce_weight: float = 0.5,
        kd_weight: float = 0.5,
        temperature: float = 1.0,
        t_squared: bool = True,
        beta: float = 0.5,
        eval_teacher: bool = True,
        **kwargs: Any,
    ):
        checks.one_teacher(store, teacher)
        self.loss_options = {
            "divergence": divergence, "support": support, "ce_weight": ce_weight,
            "kd_weight": kd_weight, "temperature": temperature, "beta": beta,
        }  # fmt: skip
        _options.check(**self.loss_options)
        self.loss_options["t_squared"] = t_squared
        self.teacher, self.k, self.eval_teacher = teacher, k, eval_teacher
        super().__init__(*args, compute_loss_func=self._loss, **kwargs)
        if OPTIONS not in self.model.__dict__:
            fuse(self.model)
        self.store = None if store is None else self._opened(store, temperature)
        if self.store is not None and not isinstance(self.data_collator, Collator):
            self.data_collator = Collator(self.store, self.data_collator)
        if teacher is not None:
            teacher.to(self.args.device).eval().requires_grad_(False)
        self._targets: SparseTargets | None = None
        # Per batch: sums of ce and kd over tokens, and the number of tokens; True is for training.
        self._sums: dict[bool, list[Tensor]] = {True: [], False: []}

    def _opened(self, store: Store | str | os.PathLike, temperature: float) -> Store:
        """Opens the store, and checks that it fits the student."""
        store = store if isinstance(store, Store) else Store(store)
        checks.same_temperature(store.path, store.info.temperature, temperature)
        checks.vocabulary(store.path, store.info.vocab_size, self._vocabulary())
        if hasattr(self.processing_class, "get_vocab"):
            tokenizer = tokenizer_hash(self.processing_class)
            checks.same_tokenizer(store.path, store.info.tokenizer, tokenizer)
        return store

    def _vocabulary(self) -> int | None:
        """Size of the student's vocabulary; None if its head is not known."""
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        return getattr(head, "out_features", None)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any):
        """With eval_teacher=False, the batches of evaluation are not looked up in the store."""
        collator = self.data_collator
        if not self.eval_teacher and isinstance(collator, Collator):
            self.data_collator = collator.inner
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.data_collator = collator

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        inputs = dict(inputs)
        targets = inputs.pop("targets", None)
        if model.training or self.eval_teacher:
            targets = self._targets_of(inputs) if targets is None else targets
            self._targets = targets.to(inputs["input_ids"].device)
        else:
            self._targets = None
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _targets_of(self, inputs: dict[str, Any]) -> SparseTargets:
        """The targets of a batch, from the store or from the teacher's model."""
        if self.store is not None:
            return batch_targets(self.store, inputs)
        inputs = {name: t for name, t in inputs.items() if name != "labels"}
        with torch.no_grad(), self.compute_loss_context_manager(), lazy_head(self.teacher):
            logits = self.teacher(**inputs, use_cache=False).logits  # pyright: ignore
            logits = logits[..., : self._vocabulary()]  # a teacher's head may be padded
            return capture_topk(logits, self.k, temperature=self.loss_options["temperature"])

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        training = torch.is_grad_enabled()
        count = (labels[..., 1:] != -100).sum()
        if self._targets is None:
            next_tokens = nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
            ce = cross_entropy(outputs.logits, next_tokens)
            self._keep(training, ce * count, ce * 0, count)
            return ce
        losses = distill_loss(
            outputs.logits, labels, self._targets, num_items=num_items_in_batch,
            parts=not training or self._is_logged(), **self.loss_options,
        )  # fmt: skip
        if losses.ce is not None:
            items = count if num_items_in_batch is None else num_items_in_batch
            self._keep(training, losses.ce * items, losses.kd * items, count)
        return losses.loss

    def _keep(self, training: bool, ce: Tensor, kd: Tensor, count: Tensor) -> None:
        self._sums[training].append(torch.stack((ce.detach(), kd.detach(), count)).double())

    def _is_logged(self) -> bool:
        """Whether the current step will be logged."""
        every = max(1, int(self.state.logging_steps or 1))
        first = self.state.global_step == 0 and self.args.logging_first_step
        return first or (self.state.global_step + 1) % every == 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        training = "loss" in logs
        if training or "eval_loss" in logs:
            logs.update(self._means(training))
        super().log(logs, *args, **kwargs)

    def _means(self, training: bool) -> dict[str, float]:
        """Means of ce and kd over the tokens of all recorded batches, on all ranks."""
        sums, self._sums[training] = self._sums[training], []
        if not sums:
            return {}
        total = self.accelerator.reduce(torch.stack(sums).sum(0), "sum")
        ce, kd, count = torch.as_tensor(total).tolist()  # as_tensor is for type checkers only
        prefix, count = "" if training else "eval_", max(count, 1)
        means = {f"{prefix}ce_loss": ce / count}
        if training or self.eval_teacher:
            means[f"{prefix}kd_loss"] = kd / count
        return means
