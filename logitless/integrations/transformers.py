"""Transformers' Trainer: `Trainer(..., callbacks=[ll.hf.LogitlessCallback()])`, or DistillTrainer.

The callback is for scripts that load the model themselves, such as LLaMA-Factory's run_exp; where
you hold the model, `ll.fuse(model)` is enough. The losses of DistillTrainer are in
store/training.py and, with support="whole", in whole_loss.py; the completions of on-policy
distillation are in on_policy.py.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"logitless.hf needs transformers and accelerate, but {error.name} is not installed. "
        "Run pip install 'logitless[teacher]', or in a clone pip install '.[teacher]'."
    ) from error

from ..core import option_checks as _option_checks
from ..lazy.fuse import fuse, is_fused
from ..losses.capture import capture_topk
from ..losses.cross_entropy import cross_entropy
from ..store.capture import lazy_head
from ..store.checks import same_tokenizer
from ..store.reader import Store
from ..store.tokenizer import tokenizer_hash
from ..store.training import Collator, DistillLosses, batch_targets, distill_loss
from ..targets.sparse import SparseTargets
from . import distill_checks as checks
from .on_policy import check_model, checked_config, draws_on_policy, sample, seed_of
from .seams import check_effect
from .trl import OnlyFuseNeededError, is_of_trl, use_in_trl
from .whole_loss import divergences, whole_loss


class LogitlessCallback(TrainerCallback):
    """Fuses the model when training begins, unless it is fused, and stops if that had no effect.

    After the first step, plain logits raise `NoEffectError` with the reason, or with `strict=False`
    warn. `options` are those of `fuse`. If `trainer` is given and is TRL's, `use_in_trl` adapts it
    too where it has a fused head. The model stays fused after training.

    >>> Trainer(model, arguments, train_dataset=data, callbacks=[LogitlessCallback()]).train()
    """

    def __init__(self, *, strict: bool = True, trainer: Any = None, **options: Any):
        self.strict, self.trainer, self.options = strict, trainer, options
        self.is_first_step = True

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any):
        self.is_first_step = True
        if not is_fused(model):
            fuse(model, **self.options)
        if is_of_trl(self.trainer):
            with suppress(OnlyFuseNeededError):
                use_in_trl(self.trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any):
        if self.is_first_step:
            check_effect(is_fused(model), self.strict)
        self.is_first_step = False


class DistillTrainer(Trainer):
    """A Trainer with the loss (ce_weight · cross-entropy + kd_weight · divergence from a teacher).

    The teacher is a model, passed as `teacher`, whose `k` largest logits per token each step
    captures, or `store`, a `Store` or its path. Each sample of the dataset must then be a document
    of the store, or its beginning, and can have its number there as `document`. The heads of
    student and teacher are fused, so that no logits are materialised. `divergence` and `support`
    are required (see docs/distillation.md). `temperature` applies to both, and must be that at
    which a store was captured.

    With a teacher model and support="whole", the divergence is computed over the whole vocabulary,
    and `k` has no effect. Then `divergence` can also be a mapping from names to weights, such as
    {"reverse_kl": 0.8, "tvd": 0.2}, for a weighted sum.

    `on_policy` is the probability that samples of the student replace a training batch (λ of GKD).
    Then `sample` draws completions of the batch's prompts, all tokens of a row before its first
    label that is not -100, with `generation_config`, and the teacher model scores them. The loss of
    such a batch is kd_weight · divergence over the sampled tokens, without a cross-entropy, because
    the labels are the student's own samples. The choice depends only on the seed, the step, and the
    index of a batch in the step, so that all ranks sample in the same steps, each its own samples.
    A resumed run draws the same samples.

    Training steps log `ce_loss` and `kd_loss` of batches from the dataset, and `on_policy_kd_loss`
    of sampled batches. Evaluations never sample, and log `eval_ce_loss` and `eval_kd_loss`, or with
    `eval_teacher=False` only the cross-entropy: the evaluation dataset can then contain documents
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
        divergence: str | Mapping[str, float],
        support: str,
        on_policy: float = 0.0,
        generation_config: Any = None,
        ce_weight: float = 0.5,
        kd_weight: float = 0.5,
        temperature: float = 1.0,
        t_squared: bool = True,
        beta: float = 0.5,
        eval_teacher: bool = True,
        **kwargs: Any,
    ):
        checks.one_teacher(store, teacher)
        checks.live_teacher(store, support, on_policy, generation_config)
        self.loss_options: dict[str, Any] = {
            "ce_weight": ce_weight, "kd_weight": kd_weight, "temperature": temperature,
            "beta": beta,
        }  # fmt: skip
        _option_checks.check(**self.loss_options)
        self.loss_options |= {"t_squared": t_squared, "divergence": divergence}
        self.whole = support == "whole"
        if self.whole:
            divergences(divergence)
        else:
            checks.sparse_options(divergence, support)
            self.loss_options["support"] = support
        self.on_policy = on_policy
        self.generation_config = checked_config(generation_config) if on_policy else None
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
        if self.whole:
            checks.whole_vocabulary(_vocabulary_of(self.model), _vocabulary_of(teacher))
            if not is_fused(teacher):
                fuse(teacher)
        if on_policy:
            check_model(self.model)
        # The teacher's targets of the current batch: the top-k, or the logits of whole rows.
        self._targets: SparseTargets | Tensor | None = None
        self._is_sampled = False  # whether the student sampled the current batch
        # Per kind of batch (training dataset, evaluation, sampled), one tensor per batch with the
        # cross-entropy and the divergence, summed over the tokens, and the number of tokens.
        self._sums: dict[str, list[Tensor]] = {"": [], "eval_": [], "on_policy_": []}

    def _fuse_student(self) -> None:
        if not is_fused(self.model):
            fuse(self.model)

    def call_model_init(self, trial: Any = None):
        """Fuses each model that `model_init` returns, which `Trainer` calls again to train."""
        model = super().call_model_init(trial)
        return model if is_fused(model) else fuse(model)

    def _opened(self, store: Store | str | os.PathLike, temperature: float) -> Store:
        store = store if isinstance(store, Store) else Store(store)
        support = self.loss_options["support"]
        checks.store_for_student(store, support, temperature, self._vocabulary())
        if hasattr(self.processing_class, "get_vocab"):
            tokenizer = tokenizer_hash(self.processing_class)
            same_tokenizer(store.path, store.info.tokenizer, tokenizer)
        return store

    def _vocabulary(self) -> int | None:
        return _vocabulary_of(self.model)

    def get_batch_samples(self, epoch_iterator: Iterable, *args: Any, **kwargs: Any):
        """The batches of one optimizer step, and the number of their labels.

        The student samples here, so that this number includes the sampled tokens. The weights
        change only at the end of the step.
        """
        if self.on_policy:
            epoch_iterator = (self._drawn(i, batch) for i, batch in enumerate(epoch_iterator))
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def _drawn(self, i: int, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        place = self.args.seed, self.state.global_step, i
        if not draws_on_policy(self.on_policy, *place):
            return batch
        seed = seed_of(*place, rank=self.args.process_index)
        model = self.accelerator.unwrap_model(self.model)
        with self.compute_loss_context_manager():
            sampled = sample(model, batch, generation_config=self.generation_config, seed=seed)
        return sampled | {"on_policy": True}

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps the column `document` of a dataset, which the collator reads."""
        super()._set_signature_columns_if_needed()
        if "document" not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, "document"]  # type: ignore

    def get_eval_dataloader(self, *args: Any, **kwargs: Any):
        """The evaluation batches, without targets from the store with `eval_teacher=False`."""
        collator = self.data_collator
        if not self.eval_teacher and isinstance(collator, Collator):
            self.data_collator = collator.without_targets
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.data_collator = collator

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        # Trainer passes a batch without labels to the model, which does not accept `targets`.
        if inputs.get("labels") is None:
            inputs = {name: t for name, t in inputs.items() if name != "targets"}
        return super().prediction_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        inputs = dict(inputs)
        checks.batch_of_trainer(inputs)
        self._is_sampled = inputs.pop("on_policy", False)
        targets = inputs.pop("targets", None)
        if model.training or self.eval_teacher:
            targets = self._targets_of(inputs) if targets is None else targets
            self._targets = targets.to(inputs["input_ids"].device)
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._targets = None  # frees the teacher's hidden states

    def _targets_of(self, inputs: dict[str, Any]) -> SparseTargets | Tensor:
        """The teacher's targets, from the store or the model; lazy logits with support="whole"."""
        if self.store is not None:
            return batch_targets(self.store, inputs)
        inputs = {name: t for name, t in inputs.items() if name != "labels"}
        with torch.no_grad(), self.compute_loss_context_manager(), lazy_head(self.teacher):
            logits = self.teacher(**inputs, use_cache=False).logits  # type: ignore
            logits = logits[..., : self._vocabulary()]  # the teacher's head can have padded columns
            if self.whole:
                return logits
            return capture_topk(logits, self.k, temperature=self.loss_options["temperature"])

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        training = torch.is_grad_enabled()
        count = (labels[..., 1:] != -100).sum()
        prefix = "eval_" if not training else "on_policy_" if self._is_sampled else ""
        if self._targets is None:
            next_tokens = nn.functional.pad(labels[..., 1:], (0, 1), value=-100)
            ce = cross_entropy(outputs.logits, next_tokens)
            self._keep(prefix, ce * count, ce * 0, count)
            return ce
        losses = self._losses(outputs.logits, labels, num_items_in_batch, training)
        if losses.ce is not None:
            items = count if num_items_in_batch is None else num_items_in_batch
            self._keep(prefix, losses.ce * items, losses.kd * items, count)
        return losses.loss

    def _losses(self, logits: Tensor, labels: Tensor, num_items: Any, training: bool):
        """The loss of a batch, and its parts if they are logged."""
        loss_of: Any = whole_loss if self.whole else distill_loss
        options: dict[str, Any] = {**self.loss_options, "num_items": num_items}
        if not self._is_sampled:
            parts = not training or self._is_logged()
            return loss_of(logits, labels, self._targets, parts=parts, **options)
        loss = loss_of(logits, labels, self._targets, **(options | {"ce_weight": 0.0})).loss
        scale = options["kd_weight"]
        kd = loss.detach() / scale if scale else torch.zeros_like(loss)
        return DistillLosses(loss, torch.zeros_like(kd), kd)

    def _keep(self, prefix: str, ce: Tensor, kd: Tensor, count: Tensor) -> None:
        self._sums[prefix].append(torch.stack((ce.detach(), kd.detach(), count)).double())

    def _is_logged(self) -> bool:
        """Whether Trainer logs the losses after the current training step."""
        every = max(1, int(self.state.logging_steps or 1))
        first = self.state.global_step == 0 and self.args.logging_first_step
        return first or (self.state.global_step + 1) % every == 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self._means("") | self._means("on_policy_"))
        elif "eval_loss" in logs:
            logs.update(self._means("eval_"))
        super().log(logs, *args, **kwargs)

    def _means(self, prefix: str) -> dict[str, float]:
        """The mean cross-entropy and divergence per token, over the batches of all ranks."""
        sums, self._sums[prefix] = self._sums[prefix], []
        if not sums:
            return {}
        total = self.accelerator.reduce(torch.stack(sums).sum(0), "sum")
        ce, kd, count = torch.as_tensor(total).tolist()  # `as_tensor` is for type checkers only
        count = max(count, 1)
        means = {f"{prefix}ce_loss": ce / count, f"{prefix}kd_loss": kd / count}
        if prefix == "on_policy_":
            del means["on_policy_ce_loss"]  # the loss of sampled batches has no cross-entropy
        elif prefix == "eval_" and not self.eval_teacher:
            del means["eval_kd_loss"]
        return means


def _vocabulary_of(model: Any) -> int | None:
    """The number of logits per token, or None if the model's head is unknown."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return getattr(head, "out_features", None)
