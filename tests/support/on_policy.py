"""Students, teachers and data for the tests of DistillTrainer, also on-policy."""

import torch
from transformers import GenerationConfig, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import logitless as ll
from tests.support.tiny_models import V, build

EOS, PAD, NEW = 5, 0, 6
CONFIG = GenerationConfig(
    do_sample=True, max_new_tokens=NEW, top_k=0, eos_token_id=EOS, pad_token_id=PAD
)
WHOLE = {"support": "whole", "divergence": "reverse_kl"}


def model_of(seed, scale=1.0, **options):
    torch.manual_seed(seed)
    model = build("LlamaForCausalLM", **options)
    torch.manual_seed(seed)
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn_like(p)).mul_(scale)
    return model


def student_model():
    return model_of(2)


def teacher_model():
    return model_of(1, 1.5, hidden_size=48)  # of another width, and sure of itself


def data(n=16):
    random = torch.Generator().manual_seed(5)
    lengths = [5 + i % 4 for i in range(n)]
    return [{"input_ids": torch.randint(6, V, (k,), generator=random).tolist()} for k in lengths]


def collate(samples):
    """The first 2 or 3 tokens are the prompt. Rows are padded on the right."""
    width = max(len(s["input_ids"]) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, sample in enumerate(samples):
        tokens = torch.tensor(sample["input_ids"])
        prompt = 2 + len(tokens) % 2
        ids[i, : len(tokens)], mask[i, : len(tokens)] = tokens, 1
        labels[i, prompt : len(tokens)] = tokens[prompt:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def arguments(path, **how):
    about = {
        "output_dir": str(path), "max_steps": 4, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "lr_scheduler_type": "constant", "seed": 3,
        "remove_unused_columns": False, "max_grad_norm": 0.0, "optim": "sgd",
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(**(about | how))


def trainer(path, model, how=None, **options):
    given = {"teacher": teacher_model(), "on_policy": 0.5, "generation_config": CONFIG, **WHOLE}
    return distill_trainer(path, model, data, collate, how, **(given | options))


def distill_trainer(path, model, data, collate, how=None, **options):
    found = ll.hf.DistillTrainer(
        model, arguments(path, **(how or {})), train_dataset=data(), eval_dataset=data(8),
        data_collator=collate, **options,
    )  # fmt: skip
    found.remove_callback(PrinterCallback)
    return found


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(one, other, most=1e-5):
    for name, p in other.items():
        assert (one[name] - p).abs().max() <= most, name


def logged(found, name):
    return [entry[name] for entry in found.state.log_history if name in entry]
