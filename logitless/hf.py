"""`ll.hf.DistillTrainer`: distillation with the Trainer of Transformers, which must be there."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from .core import options as _options
from .lazy.fuse import OPTIONS, fuse
from .losses.cross_entropy import cross_entropy
from .losses.sparse_teacher import capture_topk
from .store import checks as rules
from .store.capture import lazy_head
from .store.reader import Store
from .store.tokenizer import tokenizer_hash
from .store.training import Collator, batch_targets, distill_loss
from .targets.sparse import SparseTargets


class DistillTrainer(Trainer):
    """A Trainer whose loss is ce_weight · cross-entropy + kd_weight · divergence from a teacher.

    The teacher is a `store`, or its path, that holds the documents of the dataset, whole or their
    beginnings; or `teacher`, a model, of whose logits the `k` largest are taken in each step. Both
    heads are fused: neither's logits are materialised. divergence and support have no default
    (docs/distillation.md); the teacher is taken at `temperature`, and a store must be of it.

    The log has `ce_loss` and `kd_loss`, measured in the steps that are logged, and for evaluation
    `eval_ce_loss` and `eval_kd_loss`; `eval_teacher=False` evaluates by cross-entropy alone, as for
    documents that the store has not.

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
        rules.one_teacher(store, teacher)
        self.how = {
            "divergence": divergence, "support": support, "ce_weight": ce_weight,
            "kd_weight": kd_weight, "temperature": temperature, "beta": beta,
        }  # fmt: skip
        _options.check(**self.how)
        self.how["t_squared"] = t_squared
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
        # Of batches of training and of evaluation: sums of ce and kd over tokens, and how many.
        self._sums: dict[bool, list[Tensor]] = {True: [], False: []}

    def _opened(self, store: Store | str | os.PathLike, temperature: float) -> Store:
        found = store if isinstance(store, Store) else Store(store)
        rules.same_temperature(found.path, found.info.temperature, temperature)
        rules.vocabulary(found.path, found.info.vocab_size, self._vocabulary())
        if hasattr(self.processing_class, "get_vocab"):
            mine = tokenizer_hash(self.processing_class)
            rules.same_tokenizer(found.path, found.info.tokenizer, mine)
        return found

    def _vocabulary(self) -> int | None:
        """Of the student, where its head is known."""
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        return getattr(head, "out_features", None)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any):
        """Without the teacher, the store is not asked either."""
        collator = self.data_collator
        if not self.eval_teacher and isinstance(collator, Collator):
            self.data_collator = collator.inner
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.data_collator = collator

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        inputs = dict(inputs)
        given = inputs.pop("targets", None)
        if model.training or self.eval_teacher:
            given = self._teacher_says(inputs) if given is None else given
            self._targets = given.to(inputs["input_ids"].device)
        else:
            self._targets = None
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _teacher_says(self, inputs: dict[str, Any]) -> SparseTargets:
        if self.store is not None:
            return batch_targets(self.store, inputs)
        rest = {name: t for name, t in inputs.items() if name != "labels"}
        with torch.no_grad(), self.compute_loss_context_manager(), lazy_head(self.teacher):
            logits = self.teacher(**rest, use_cache=False).logits  # pyright: ignore
            logits = logits[..., : self._vocabulary()]  # a teacher's head may be padded
            return capture_topk(logits, self.k, temperature=self.how["temperature"])

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        training = torch.is_grad_enabled()
        count = (labels[..., 1:] != -100).sum()
        if self._targets is None:
            following = nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
            ce = cross_entropy(outputs.logits, following)
            self._keep(training, ce * count, ce * 0, count)
            return ce
        found = distill_loss(
            outputs.logits, labels, self._targets, num_items=num_items_in_batch,
            parts=not training or self._is_logged(), **self.how,
        )  # fmt: skip
        if found.ce is not None:
            items = count if num_items_in_batch is None else num_items_in_batch
            self._keep(training, found.ce * items, found.kd * items, count)
        return found.loss

    def _keep(self, training: bool, ce: Tensor, kd: Tensor, count: Tensor) -> None:
        self._sums[training].append(torch.stack((ce.detach(), kd.detach(), count)).double())

    def _is_logged(self) -> bool:
        """Whether the step that is under way will be."""
        every = max(1, int(self.state.logging_steps or 1))
        first = self.state.global_step == 0 and self.args.logging_first_step
        return first or (self.state.global_step + 1) % every == 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        training = "loss" in logs
        if training or "eval_loss" in logs:
            logs.update(self._means(training))
        super().log(logs, *args, **kwargs)

    def _means(self, training: bool) -> dict[str, float]:
        """Of all tokens that were measured, on all ranks."""
        sums, self._sums[training] = self._sums[training], []
        if not sums:
            return {}
        total = self.accelerator.reduce(torch.stack(sums).sum(0), "sum")
        ce, kd, count = torch.as_tensor(total).tolist()  # a tensor already, which types don't say
        prefix, count = "" if training else "eval_", max(count, 1)
        found = {f"{prefix}ce_loss": ce / count}
        if training or self.eval_teacher:
            found[f"{prefix}kd_loss"] = kd / count
        return found
