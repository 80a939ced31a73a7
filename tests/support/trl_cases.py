"""Trainers of TRL on tiny models and tiny datasets."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from tests.support.trainer_runs import model, text, tokenizer


class Case(NamedTuple):
    """A trainer with options of its configuration."""

    name: str
    make: Callable[..., Any]  # (model, options, change of other models) → trainer
    options: Mapping[str, Any] = MappingProxyType({})
    model: tuple[str, dict[str, Any]] = ("Llama", {})
    tolerance: float = 2e-5

    def trainer(self, folder, change: Callable[[nn.Module], nn.Module] = lambda m: m):
        """Returns a trainer of new models. `change` is applied to the models first."""
        name, fields = self.model
        policy = model(name, **fields)
        if "beta" in self.options and self.make in (grpo, rloo):  # loads a reference from a folder
            policy.save_pretrained(folder)
            policy.config._name_or_path = str(folder)
        return self.make(change(policy), {**arguments(folder), **self.options}, change)


def arguments(folder) -> dict[str, Any]:
    return {
        "max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, "bf16": False,
        "save_strategy": "no", "logging_steps": 1, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "optim": "sgd", "seed": 3, "output_dir": str(folder),
    }  # fmt: skip


def dataset(rows: list[dict]):
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(rows)


def lora(options: dict) -> Any:
    """Removes "lora" from the options. Returns a LoraConfig with these options, or None."""
    from peft import LoraConfig

    given = options.pop("lora", None)
    if given is None:
        return None
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **given)


def sft(policy: nn.Module, options: dict, _change: Callable):
    import trl

    completions = options.pop("completions", False)
    rows = [{"text": text(i, 4 + i)} for i in range(8)]
    if completions:
        rows = [{"prompt": text(i, 3 + i), "completion": text(i + 9)} for i in range(8)]
    return trl.SFTTrainer(
        policy, peft_config=lora(options), args=trl.SFTConfig(**options),
        train_dataset=dataset(rows), eval_dataset=dataset(rows), processing_class=tokenizer(),
    )  # fmt: skip


def dpo(policy: nn.Module, options: dict, _change: Callable):
    import trl

    peft = lora(options)
    return trl.DPOTrainer(
        policy, None if peft else model(seed=5), peft_config=peft, args=trl.DPOConfig(**options),
        train_dataset=pairs(), eval_dataset=pairs(), processing_class=tokenizer(),
    )  # fmt: skip


def pairs():
    return dataset(
        [{"prompt": text(i), "chosen": text(i + 1), "rejected": text(i + 2, 5)} for i in range(8)]
    )


def kto(policy: nn.Module, options: dict, _change: Callable):
    import trl

    peft = lora(options)
    rows = [{"prompt": text(i), "completion": text(i + 3), "label": i % 2 == 0} for i in range(8)]
    return trl.KTOTrainer(
        policy, None if peft else model(seed=5), peft_config=peft, args=trl.KTOConfig(**options),
        train_dataset=dataset(rows), eval_dataset=dataset(rows), processing_class=tokenizer(),
    )  # fmt: skip


def reward(completions: list[str], **_) -> list[float]:
    """Returns, for each text, the share of words whose number is even."""
    words = [[int(word[1:]) for word in text.split()] for text in completions]
    return [sum(n % 2 == 0 for n in found) / max(1, len(found)) for found in words]


GENERATION = {"per_device_train_batch_size": 4, "max_completion_length": 7}


def grpo(policy: nn.Module, options: dict, _change: Callable):
    import trl

    options = {**options, **GENERATION, "num_generations": 4}
    peft = lora(options)
    return trl.GRPOTrainer(
        policy, reward, peft_config=peft, args=trl.GRPOConfig(**options),
        train_dataset=prompts(), processing_class=tokenizer(),
    )  # fmt: skip


def rloo(policy: nn.Module, options: dict, _change: Callable):
    import trl

    options = {**options, **GENERATION, "num_generations": 4}
    return trl.RLOOTrainer(
        policy, reward, args=trl.RLOOConfig(**options), train_dataset=prompts(),
        processing_class=tokenizer(),
    )  # fmt: skip


def prompts():
    return dataset([{"prompt": text(i)} for i in range(8)])


def distillation(student: nn.Module, options: dict, _change: Callable):
    import trl

    name, fields = options.pop("teacher", ("Llama", {}))
    teacher = model(name, seed=5, **fields)
    return trl.DistillationTrainer(
        student, teacher, args=trl.DistillationConfig(**{**options, **GENERATION}),
        train_dataset=prompts(), processing_class=tokenizer(),
    )  # fmt: skip


# --- trainers without a fused head of their own


def messages(start: int) -> list[dict]:
    return [
        {"role": "user", "content": text(start)},
        {"role": "assistant", "content": text(start + 1)},
    ]


def gkd(student: nn.Module, options: dict, change: Callable):
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    rows = [{"messages": messages(i)} for i in range(8)]
    options = {**options, "max_new_tokens": 5, "lmbda": 0.0}
    return GKDTrainer(
        student, change(model(seed=5)), args=GKDConfig(**options), train_dataset=dataset(rows),
        processing_class=tokenizer(),
    )  # fmt: skip


def orpo(policy: nn.Module, options: dict, _change: Callable):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return ORPOTrainer(
        policy, args=ORPOConfig(**options), train_dataset=pairs(), processing_class=tokenizer()
    )


def cpo(policy: nn.Module, options: dict, _change: Callable):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOTrainer(
        policy, args=CPOConfig(**options), train_dataset=pairs(), processing_class=tokenizer()
    )


def tpo(policy: nn.Module, options: dict, _change: Callable):
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    rows = [
        {
            "prompt": text(i), "chosen": text(i + 1), "rejected": text(i + 2),
            "reference": text(i + 3),
        }
        for i in range(8)
    ]  # fmt: skip
    return TPOTrainer(
        policy, args=TPOConfig(**options), train_dataset=dataset(rows),
        processing_class=tokenizer(),
    )  # fmt: skip


def online_dpo(policy: nn.Module, options: dict, change: Callable):
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    options = {**options, "max_new_tokens": 6, "max_length": 32}
    return OnlineDPOTrainer(
        policy, change(model(seed=5)), reward_funcs=reward, args=OnlineDPOConfig(**options),
        train_dataset=prompts(), processing_class=tokenizer(),
    )  # fmt: skip


SAVED = {"lora": {"modules_to_save": ["lm_head"]}}
CAPPED = ("Gemma2", {"final_logit_softcapping": 4.0, "query_pre_attn_scalar": 8})
SCALED = ("Cohere", {"logit_scale": 0.25})
EXPERTS = (
    "Mixtral",
    {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
)
ADAPTED = (
    Case("SFT", sft),
    Case("SFT, Qwen2, tied weights", sft, model=("Qwen2", {"tie_word_embeddings": True})),
    Case("SFT, loss_type=\"dft\"", sft, {"loss_type": "dft"}),
    Case("SFT, completion_only_loss", sft, {"completions": True}),
    Case("SFT, packing", sft, {"packing": True, "max_length": 16, "packing_strategy": "wrapped"}),
    Case("SFT, accumulation", sft, {"gradient_accumulation_steps": 3}),
    Case("SFT, gradient checkpointing", sft, {"gradient_checkpointing": True}),
    Case("SFT, bf16", sft, {"bf16": True}, tolerance=2e-2),
    Case("SFT, softcapped logits", sft, model=CAPPED),
    Case("SFT, scaled logits", sft, model=SCALED),
    Case("SFT, experts", sft, model=EXPERTS),
    Case("SFT, LoRA", sft, {"lora": {}}),
    Case("SFT, LoRA, head saved", sft, SAVED),
    Case("SFT, label smoothing", sft, {"label_smoothing_factor": 0.1}),
    Case("DPO", dpo),
    Case("DPO, loss_type=\"ipo\"", dpo, {"loss_type": "ipo"}),
    Case("DPO, weighted (WPO)", dpo, {"use_weighting": True}),
    Case("DPO, LoRA", dpo, {"lora": {}}),
    Case("DPO, LoRA, head saved", dpo, SAVED),
    Case("KTO", kto),
    Case("KTO, LoRA", kto, {"lora": {}}),
    Case("GRPO", grpo),
    Case("GRPO, beta=0.1", grpo, {"beta": 0.1}),
    Case("GRPO, temperature=0.7, entropy quantile", grpo,
         {"temperature": 0.7, "top_entropy_quantile": 0.5}),
    Case("GRPO, head in fp32", grpo, {"cast_lm_head_to_fp32": True}),
    Case("GRPO, LoRA", grpo, {"lora": {}}),
    Case("RLOO", rloo, {"beta": 0.1}),
    Case("Distillation, beta=0", distillation, {"beta": 0.0}),
    Case("Distillation, beta=0.5", distillation, {"beta": 0.5}),
    Case("Distillation, beta=1", distillation, {"beta": 1.0}),
    Case("Distillation, softcapped teacher", distillation, {"beta": 0.5, "teacher": CAPPED}),
    Case("Distillation, scaled student", distillation, {"beta": 0.5}, model=SCALED),
    Case("GKD, beta=0.5", gkd, {"beta": 0.5}),
)  # fmt: skip
FUSED = (
    Case("GKD, beta=0", gkd, {"beta": 0.0}),
    Case("GKD, beta=1", gkd, {"beta": 1.0}),
    Case("ORPO", orpo),
    Case("CPO", cpo),
    Case("TPO", tpo),
    Case("OnlineDPO", online_dpo),
)
# On a GPU, these trainers call a kernel of TRL with the logits of the model.
BY_KERNEL = (
    Case("ORPO, TRL's kernel", orpo),
    Case("CPO, TRL's kernel", cpo),
    Case("TPO, TRL's kernel", tpo),
)
