"""`ll.hf.DistillTrainer`: distillation with the Trainer of Transformers.

This module needs the package transformers. The loss is computed in store/training.py. The module
also exports `use_in_trl` and `unuse_in_trl` from trl_head/adapter.py.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"logitless.hf needs transformers and accelerate, but {error.name} is not installed. "
        "Run pip install 'logitless[teacher]', or in a clone pip install '.[teacher]'."
    ) from error

from .core import option_checks as _option_checks
from .lazy.fuse import fuse, guards_of
from .losses.capture import capture_topk
from .losses.cross_entropy import cross_entropy
from .store import checks, file_checks
from .store.capture import lazy_head
from .store.reader import Store
from .store.tokenizer import tokenizer_hash
from .store.training import Collator, batch_targets, distill_loss
from .targets.sparse import SparseTargets
from .trl_head.adapter import unuse_in_trl as unuse_in_trl
from .trl_head.adapter import use_in_trl as use_in_trl


class DistillTrainer(Trainer):
    """A Trainer with the loss (ce_weight · cross-entropy + kd_weight · divergence from a teacher).

    The teacher is either a model, passed as `teacher`, or a store of captured logits. The argument
    `store` is a `Store` or its path. With a store, each sample of the dataset must be a document of
    the store, or the beginning of such a document. With a teacher model, each step captures the
    model's `k` largest logits per token. The heads of student and teacher are fused, so that no
    logits are materialised. The arguments `divergence` and `support` are required, and
    docs/distillation.md explains them. `temperature` applies to student and teacher. With a store,
    `temperature` must be the temperature at which the store was captured.

    Training steps log `ce_loss` and `kd_loss`. Evaluations log `eval_ce_loss` and `eval_kd_loss`.
    With `eval_teacher=False`, evaluation computes only the cross-entropy, so that the evaluation
    dataset can contain documents that are not in the store.

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
        _option_checks.check(**self.loss_options)
        self.loss_options["t_squared"] = t_squared
        self.teacher, self.k, self.eval_teacher = teacher, k, eval_teacher
        checks.own_loss(kwargs.pop("compute_loss_func", None))
        checks.trainer_arguments(kwargs.get("args", args[1] if len(args) > 1 else None))
        super().__init__(*args, compute_loss_func=self._loss, **kwargs)
        self._fuse_student()
        self.store = None if store is None else self._opened(store, temperature)
        if self.store is not None and not isinstance(self.data_collator, Collator):
            self.data_collator = Collator(self.store, self.data_collator)
        if teacher is not None:
            teacher.to(self.args.device).eval().requires_grad_(False)
        self._targets: SparseTargets | None = None
        # `_sums` has the key True for training and the key False for evaluation. Each value is a
        # list with one tensor per batch. The tensor holds three numbers: the sum of the
        # cross-entropy over tokens, the sum of the divergence over tokens, and the number of
        # tokens.
        self._sums: dict[bool, list[Tensor]] = {True: [], False: []}

    def _fuse_student(self) -> None:
        if not any(guards_of(self.model)):
            fuse(self.model)

    def call_model_init(self, trial: Any = None):
        """Fuses each model that model_init returns.

        When training starts, Trainer calls model_init again.
        """
        model = super().call_model_init(trial)
        return model if any(guards_of(model)) else fuse(model)

    def _opened(self, store: Store | str | os.PathLike, temperature: float) -> Store:
        """Opens the store and checks its temperature, vocabulary and tokenizer."""
        store = store if isinstance(store, Store) else Store(store)
        file_checks.same_temperature(store.path, store.info.temperature, temperature)
        file_checks.vocabulary(store.path, store.info.vocab_size, self._vocabulary())
        if hasattr(self.processing_class, "get_vocab"):
            tokenizer = tokenizer_hash(self.processing_class)
            file_checks.same_tokenizer(store.path, store.info.tokenizer, tokenizer)
        return store

    def _vocabulary(self) -> int | None:
        """The size of the student's vocabulary, or None if the student's head is unknown."""
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        return getattr(head, "out_features", None)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any):
        """Returns the evaluation batches.

        With eval_teacher=False, the batches contain no targets from the store.
        """
        collator = self.data_collator
        if not self.eval_teacher and isinstance(collator, Collator):
            self.data_collator = collator.inner
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.data_collator = collator

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        # Trainer passes a batch without labels directly to the model, which does not accept the
        # argument `targets`.
        if inputs.get("labels") is None:
            inputs = {name: t for name, t in inputs.items() if name != "targets"}
        return super().prediction_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        inputs = dict(inputs)
        checks.batch_of_trainer(inputs)
        targets = inputs.pop("targets", None)
        if model.training or self.eval_teacher:
            targets = self._targets_of(inputs) if targets is None else targets
            self._targets = targets.to(inputs["input_ids"].device)
        else:
            self._targets = None
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _targets_of(self, inputs: dict[str, Any]) -> SparseTargets:
        """Returns the teacher's targets for a batch, from the store or from the teacher model."""
        if self.store is not None:
            return batch_targets(self.store, inputs)
        inputs = {name: t for name, t in inputs.items() if name != "labels"}
        with torch.no_grad(), self.compute_loss_context_manager(), lazy_head(self.teacher):
            logits = self.teacher(**inputs, use_cache=False).logits  # pyright: ignore
            logits = logits[..., : self._vocabulary()]  # the teacher's head can have padded columns
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
        """Whether Trainer logs the losses after the current training step."""
        every = max(1, int(self.state.logging_steps or 1))
        first = self.state.global_step == 0 and self.args.logging_first_step
        return first or (self.state.global_step + 1) % every == 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        training = "loss" in logs
        if training or "eval_loss" in logs:
            logs.update(self._means(training))
        super().log(logs, *args, **kwargs)

    def _means(self, training: bool) -> dict[str, float]:
        """The mean cross-entropy and the mean divergence per token, over all batches in `_sums`.

        The means cover the batches of all ranks.
        """
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
