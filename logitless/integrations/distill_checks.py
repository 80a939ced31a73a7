"""Checks of DistillTrainer's arguments and batches."""

from collections.abc import Mapping
from typing import Any

from ..core import option_checks as _option_checks
from ..core import tensor_checks as _checks
from ..store.checks import refuse
from ..store.reader import Store


def own_loss(compute_loss_func: Any) -> None:
    if compute_loss_func is not None:
        rule = "be None, because DistillTrainer computes the loss itself"
        advice = "For your own loss, use Trainer with ll.store.distill_loss"
        refuse("compute_loss_func", rule, f"{compute_loss_func!r:.80}. {advice}")


def trainer_arguments(args: Any) -> None:
    """Refuses TrainingArguments that would have no effect, or would replace the loss."""
    if args is not None and args.label_smoothing_factor:
        rule = "be 0, because DistillTrainer's cross-entropy has no label smoothing"
        got = f"{args.label_smoothing_factor}. The teacher's distribution replaces label smoothing"
        refuse("label_smoothing_factor", rule, got)
    if getattr(args, "use_liger_kernel", False):
        rule = "be False, because Liger's models return no logits in training"
        refuse("use_liger_kernel", rule, "True. DistillTrainer fuses the head itself")


def batch_of_trainer(inputs: Any) -> None:
    for name in ("input_ids", "labels"):
        if inputs.get(name) is None:
            advice = (
                "Use a data_collator that returns input_ids and labels, such as"
                " DataCollatorForLanguageModeling(tokenizer, mlm=False)"
            )
            refuse("a batch", f"have {name}", f"{sorted(inputs)}. {advice}")


def one_teacher(store: Any, teacher: Any) -> None:
    if (store is None) == (teacher is None):
        got = "neither" if store is None else "both"
        refuse("a teacher", "be given as store= or as teacher=", got)


def sparse_options(divergence: Any, support: Any) -> None:
    _checks.one_of("support", support, (*_option_checks.SUPPORTS, "whole"))
    if isinstance(divergence, Mapping):
        rule = "be one name, because only support='whole' adds several divergences"
        refuse("divergence", rule, f"{divergence!r:.100}")
    _option_checks.check(divergence=divergence)


def live_teacher(store: Any, support: Any, on_policy: Any, generation_config: Any) -> None:
    _option_checks.fraction("on_policy", on_policy)
    if store is not None and support == "whole":
        rule = "not be 'whole' with store=, because a store has only the top-k of each row"
        refuse("support", rule, "'whole'. Pass the teacher model as teacher=")
    if store is not None and on_policy:
        rule = "be 0 with store=, because a store has no targets for sampled tokens"
        refuse("on_policy", rule, f"{on_policy}. Pass the teacher model as teacher=")
    if generation_config is not None and not on_policy:
        rule = "be None without on_policy, because nothing is sampled"
        refuse("generation_config", rule, f"on_policy={on_policy}")


def store_for_student(store: Store, support: Any, temperature: Any, vocabulary: int | None) -> None:
    """`vocabulary` is the number of the student's logits per token, or None if it is unknown."""
    found = store.info
    if found.sampled and support in ("tail", "renorm"):
        rule = 'be "truncate" or "renorm_teacher" for a store with values="counts"'
        refuse("support", f"{rule}, because sampled targets have no tail", repr(support))
    if found.temperature != temperature:
        rule = f"have been captured at the student's temperature {temperature}"
        refuse(store.path, rule, found.temperature)
    if vocabulary is not None and found.vocab_size > vocabulary:
        rule = f"have a vocabulary of at most the model's {vocabulary}"
        advice = f"capture the teacher with vocab_size={vocabulary}"
        refuse(store.path, rule, f"{found.vocab_size}: {advice}")


def whole_vocabulary(student: int | None, teacher: int | None) -> None:
    if student is not None and teacher is not None and teacher < student:
        wanted = f"at least as many logits per token as the student ({student})"
        refuse("teacher", f"return {wanted} with support='whole'", teacher)
