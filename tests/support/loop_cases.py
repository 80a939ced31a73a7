"""Training loops of Transformers, PEFT, Accelerate and Lightning on tiny models."""

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from tests.support.trainer_runs import V, model
from tests.support.trl_cases import arguments

STEPS, LENGTH = 3, 9


class Case(NamedTuple):
    """A training loop with options. `make` returns an object that `run` can train."""

    library: str
    name: str
    make: Callable[..., Any]  # (folder, change of the model, options) → trainer
    options: Mapping[str, Any] = MappingProxyType({})
    tolerance: float = 2e-5


def batches(count: int = STEPS, rows: int = 3) -> list[dict[str, torch.Tensor]]:
    """Batches with some ignored labels."""
    torch.manual_seed(4)
    found = []
    for _ in range(count):
        ids = torch.randint(4, V, (rows, LENGTH))
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
        found.append({"input_ids": ids, "labels": labels})
    return found


# --- Transformers


def trainer(folder, change: Callable, options: Mapping):
    options = dict(options)
    scores = options.pop("scores", False)
    single = [{k: t[0] for k, t in given.items()} for given in batches(12, rows=1)]
    given: dict[str, Any] = {}
    if scores:
        given = {
            "compute_metrics": lambda p: {"right": float((p.predictions == p.label_ids).mean())},
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        }
    return transformers.Trainer(
        change(model("Qwen2")), transformers.TrainingArguments(**{**arguments(folder), **options}),
        train_dataset=single, eval_dataset=single, **given,
    )  # fmt: skip


# --- hand-written loops


def loop(module: nn.Module, step: Callable[[dict], dict[str, float]]) -> SimpleNamespace:
    """An object with the parts of a trainer that `run` reads."""
    state = SimpleNamespace(log_history=[])

    def train():
        state.log_history += [step(given) for given in batches()]

    return SimpleNamespace(model=module, state=state, train=train)


def peft(folder, change: Callable, options: Mapping):
    """A loop over a PEFT model. `change` is applied before or after PEFT."""
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    options = dict(options)
    after, tied = options.pop("after", False), options.pop("tied", False)
    base = model(tie_word_embeddings=tied)
    torch.manual_seed(6)
    if "num_virtual_tokens" in options:
        config = PromptTuningConfig(task_type="CAUSAL_LM", **options)
    else:
        config = LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied weights
        made = get_peft_model(base if after else change(base), config)
    made = change(made) if after else made
    optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.1)

    def step(given):
        optimizer.zero_grad()
        loss = made(**given).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        return {"loss": float(loss), "grad_norm": float(norm)}

    return loop(made, step)


def accelerate(folder, change: Callable, options: Mapping):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    options = dict(options)
    outside = options.pop("outside", False)
    how = Accelerator(cpu=True, **options)
    plain = change(model())
    made, optimizer = how.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))

    def step(given):
        with how.accumulate(made):
            if outside:
                logits = made(input_ids=given["input_ids"]).logits[:, :-1]
                target = given["labels"][:, 1:].reshape(-1)
                loss = nn.functional.cross_entropy(logits.reshape(-1, V), target)
            else:
                loss = made(**given).loss
            how.backward(loss)
            norm = how.clip_grad_norm_(made.parameters(), 1.0) if how.sync_gradients else 0.0
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": float(loss), "grad_norm": float(norm)}

    return loop(plain, step)


def lightning(folder, change: Callable, options: Mapping):
    import lightning

    options = dict(options)
    outside, manual = options.pop("outside", False), options.pop("manual", False)
    logged: list[dict[str, float]] = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = change(model())
            self.automatic_optimization = not manual

        def training_step(self, given, _):
            if outside:
                logits = self.model(input_ids=given["input_ids"]).logits[:, :-1]
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), given["labels"][:, 1:].flatten()
                )
            else:
                loss = self.model(**given).loss
            if manual:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.on_before_optimizer_step(optimizer)
                optimizer.step()
            logged.append(
                {"loss": float(loss), **logged.pop()} if manual else {"loss": float(loss)}
            )
            return loss

        def on_before_optimizer_step(self, optimizer):
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            logged.append({"grad_norm": float(nn.utils.get_total_norm(grads))})

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    how = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(batches(), batch_size=None)  # pyright: ignore
    state = SimpleNamespace(log_history=logged)
    return SimpleNamespace(model=module.model, state=state, train=lambda: how.fit(module, data))


LINEAR = {"target_modules": "all-linear"}
QUERIES = {"target_modules": ["q_proj"]}
CASES = (
    Case("Transformers", "Trainer", trainer),
    Case("Transformers", "Trainer, label smoothing", trainer, {"label_smoothing_factor": 0.1}),
    Case("Transformers", "Trainer, accumulation", trainer, {"gradient_accumulation_steps": 3}),
    Case("Transformers", "Trainer, bf16", trainer, {"bf16": True}, tolerance=2e-2),
    Case("Transformers", "Trainer, compute_metrics of argmax", trainer, {"scores": True}),
    Case("PEFT", "LoRA in the body", peft, LINEAR),
    Case("PEFT", "LoRA in the body, fused after", peft, {**LINEAR, "after": True}),
    Case("PEFT", "modules_to_save head", peft, {**QUERIES, "modules_to_save": ["lm_head"]}),
    Case("PEFT", "trainable tokens, tied", peft,
         {**QUERIES, "trainable_token_indices": [5, 6], "tied": True}),
    Case("PEFT", "prompt tuning", peft, {"num_virtual_tokens": 3}),
    Case("Accelerate", "prepare", accelerate),
    Case("Accelerate", "prepare, loss outside of the model", accelerate, {"outside": True}),
    Case("Accelerate", "accumulation", accelerate, {"gradient_accumulation_steps": 2}),
    Case("Accelerate", "bf16", accelerate, {"mixed_precision": "bf16"}, tolerance=2e-2),
    Case("Lightning", "loss in the model", lightning),
    Case("Lightning", "loss in training_step", lightning, {"outside": True}),
    Case("Lightning", "manual optimisation", lightning, {"manual": True}),
    Case("Lightning", "bf16-mixed", lightning, {"precision": "bf16-mixed"}, tolerance=2e-2),
)  # fmt: skip
