"""Trains a fused model with Transformers' Trainer: first all weights, then a LoRA adapter.

    python examples/trainer.py

The script needs the packages transformers, accelerate and peft, but neither a network nor a GPU.
The model is small and random, and its tokens are numbers. Each row of tokens starts at some number
and counts in steps of 1, 2 or 3. So the first two numbers of a row determine all other numbers.
First the model learns to count. Then an adapter learns to count backwards, while the model's own
weights are frozen.
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import logitless as ll

VOCABULARY, LENGTH = 1024, 16


class Counting(Dataset):
    """Rows of numbers. The labels of the first two numbers of a row are ignored."""

    def __init__(self, direction: int):
        self.direction = direction

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        start, step = i * 37 % VOCABULARY, self.direction * (1 + i % 3)
        ids = (start + step * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < 2, -100, ids)}


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(name: str, model: nn.Module, data: Dataset, steps: int) -> None:
    """Trains the model, and prints the loss of the first step and of the last step."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=32, learning_rate=1e-2,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"{name:>12}  first loss {losses[0]:.3f}  last loss {losses[-1]:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps

    model = ll.fuse(small_model())  # the only line that logitless needs
    train("all weights", model, Counting(1), steps)

    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    train("LoRA", get_peft_model(model, lora), Counting(-1), steps)


if __name__ == "__main__":
    main()
