"""Checks the arguments of training with a store or with a teacher model (training.py, hf.py)."""

from collections.abc import Mapping
from typing import Any

from ..core import option_checks as _option_checks
from ..core import tensor_checks as _checks


def labels_of(labels: Any, targets: Any) -> None:
    _checks._integer("labels", labels)
    if tuple(labels.shape) != tuple(targets.shape):
        raise ValueError(
            f"labels must have the shape of targets, {tuple(targets.shape)},"
            f" got {tuple(labels.shape)}. Do not shift the labels, because distill_loss shifts"
            " them."
        )


def own_loss(compute_loss_func: Any) -> None:
    if compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func must be None, because DistillTrainer computes the loss itself, got"
            f" {compute_loss_func!r:.80}. For your own loss, use Trainer with"
            " ll.store.distill_loss."
        )


def trainer_arguments(args: Any) -> None:
    """Refuses TrainingArguments that would have no effect, or would replace the loss."""
    if args is None:
        return
    if args.label_smoothing_factor:
        raise ValueError(
            "label_smoothing_factor must be 0, because DistillTrainer's cross-entropy has no label"
            f" smoothing, got {args.label_smoothing_factor}. The teacher's distribution replaces"
            " label smoothing."
        )
    if getattr(args, "use_liger_kernel", False):
        raise ValueError(
            "use_liger_kernel must be False, because Liger's models return no logits in training,"
            " got True. DistillTrainer fuses the head itself."
        )


def batch_of_trainer(inputs: Any) -> None:
    for name in ("input_ids", "labels"):
        if inputs.get(name) is None:
            raise ValueError(
                f"a batch must have {name}, got {sorted(inputs)}. Use a data_collator that"
                " returns input_ids and labels, such as"
                " DataCollatorForLanguageModeling(tokenizer, mlm=False)."
            )


def one_teacher(store: Any, teacher: Any) -> None:
    if (store is None) == (teacher is None):
        got = "neither" if store is None else "both"
        raise ValueError(f"a teacher must be given as store= or as teacher=, got {got}.")


def divergences(divergence: Any) -> dict[str, float]:
    """{name: weight} of the divergences of support="whole", a name or a mapping."""
    if not isinstance(divergence, Mapping):
        _option_checks.check(divergence=divergence)
        return {divergence: 1.0}
    if not divergence:
        raise ValueError("divergence must name at least one divergence, got an empty mapping.")
    for name, weight in divergence.items():
        _option_checks.check(divergence=name)
        _option_checks.factor(f"divergence[{name!r}]", weight)
    return dict(divergence)


def sparse_options(divergence: Any, support: Any) -> None:
    _checks.one_of("support", support, (*_option_checks.SUPPORTS, "whole"))
    if isinstance(divergence, Mapping):
        raise ValueError(
            "divergence must be one name, because only support='whole' adds several divergences,"
            f" got {divergence!r:.100}."
        )
    _option_checks.check(divergence=divergence)


def live_teacher(store: Any, support: Any, on_policy: Any, generation_config: Any) -> None:
    _option_checks.fraction("on_policy", on_policy)
    if store is not None and support == "whole":
        raise ValueError(
            "support must not be 'whole' with store=, because a store has only the top-k of each"
            " row, got 'whole'. Pass the teacher model as teacher=."
        )
    if store is not None and on_policy:
        raise ValueError(
            "on_policy must be 0 with store=, because a store has no targets for sampled tokens,"
            f" got {on_policy}. Pass the teacher model as teacher=."
        )
    if generation_config is not None and not on_policy:
        raise ValueError(
            "generation_config must be None without on_policy, because nothing is sampled, got"
            f" on_policy={on_policy}."
        )


def support_of_store(support: Any, sampled: bool) -> None:
    if sampled and support in ("tail", "renorm"):
        raise ValueError(
            'support must be "truncate" or "renorm_teacher" for a store with values="counts",'
            f" because sampled targets have no tail, got {support!r}."
        )


def whole_vocabulary(student: int | None, teacher: int | None) -> None:
    if student is not None and teacher is not None and teacher < student:
        raise ValueError(
            f"teacher must return at least as many logits per token as the student ({student})"
            f" with support='whole', got {teacher}."
        )
