"""On-policy distillation: a student learns from a teacher on the student's own samples.

    python examples/on_policy.py

The script needs the packages transformers and accelerate, but neither a network nor a GPU. The text
is the source code of Python's standard library, as in `make demo`. A teacher is trained on the
text, and a narrower student is trained on a small part of the text. The student then samples
completions of prompts, and minimises the reverse KL divergence from the teacher on these
completions. The script trains one copy of the student with `DistillTrainer(on_policy=1)`, and
another copy with its own training loop. In this loop, the teacher consists of hidden states and the
weight of a head. The script prints the teacher's log-probability of the student's own samples, in
nats per token, before and after the training. No loss materialises the logits of either model.
"""

import argparse
import copy
import itertools
import tempfile
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import logitless as ll
from demo import encode, read_sources, vocabulary

VOCAB, PROMPT, NEW, BATCH = 2048, 8, 16, 32
ENDS = ("\n",)  # a completion ends before a line without indentation


def corpus(chars: int) -> tuple[Tensor, Tensor, list[int]]:
    """Returns training text, held-out text, and the ids of the tokens that end a completion."""
    text = read_sources(limit=chars)
    words = vocabulary(text, VOCAB)
    ids = encode(text, words)
    ends = [i for i, word in enumerate(words) if i and word in ENDS]
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:], ends


def llama(width: int, layers: int, seed: int, ends: list[int], device: str) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=width // 16, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=ends, pad_token_id=0,
    )  # fmt: skip
    return ll.fuse(LlamaForCausalLM(config).to(device))


def windows(ids: Tensor, length: int, seed: int, device: str) -> Iterator[Tensor]:
    """Yields an endless sequence of batches (BATCH, length) of random windows of the text."""
    random = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(ids) - length, (BATCH, 1), generator=random)
        yield ids[start + torch.arange(length)].to(device)


def train_on_text(model: LlamaForCausalLM, ids: Tensor, steps: int, lr: float, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1)
    for tokens in itertools.islice(windows(ids, PROMPT + NEW, seed, str(model.device)), steps):
        ll.cross_entropy(model(tokens).logits[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def generation() -> GenerationConfig:
    """Returns a config that samples from the student's own distribution."""
    return GenerationConfig(do_sample=True, max_new_tokens=NEW)


@torch.no_grad()
def teacher_logprob(student: LlamaForCausalLM, teacher: LlamaForCausalLM, prompts: Tensor) -> float:
    """Returns the teacher's mean log-probability per token of the student's own samples."""
    inputs = {"input_ids": prompts}
    batch = ll.hf.sample(student, inputs, generation_config=generation(), seed=0)
    logits = teacher(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return -ll.cross_entropy(logits, batch["labels"][:, 1:]).item()


def by_trainer(student: LlamaForCausalLM, teacher: LlamaForCausalLM, ids: Tensor, args) -> None:
    """Trains the student with DistillTrainer.

    The prompts are windows of the text. All labels are -100, so the whole window is a prompt.
    """
    rows = itertools.islice(windows(ids, PROMPT, args.seed + 2, "cpu"), args.steps)
    prompts = [{"input_ids": row} for batch in rows for row in batch]

    def collate(samples: list[dict]) -> dict[str, Tensor]:
        tokens = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": tokens, "labels": torch.full_like(tokens, -100)}

    with tempfile.TemporaryDirectory() as folder:
        trainer = ll.hf.DistillTrainer(
            student,
            TrainingArguments(
                folder, max_steps=args.steps, per_device_train_batch_size=BATCH,
                learning_rate=args.lr, logging_steps=max(args.steps // 5, 1), seed=args.seed,
                report_to=[], disable_tqdm=True, save_strategy="no", remove_unused_columns=False,
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=prompts, data_collator=collate, teacher=teacher,
            support="whole", divergence="reverse_kl", kd_weight=1.0,
            on_policy=1.0, generation_config=generation(),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    for entry in trainer.state.log_history:
        if "on_policy_kd_loss" in entry:
            print(f"step {entry['step']:4}  reverse KL {entry['on_policy_kd_loss']:.3f}")


def by_hand(student: LlamaForCausalLM, teacher: LlamaForCausalLM, ids: Tensor, args) -> None:
    """Trains the student on the teacher's hidden states (B, T, width) and the weight of its head.

    The hidden states could also come from another process, or from a file.
    """
    optimizer = torch.optim.AdamW(student.parameters(), args.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.steps)
    prompts = windows(ids, PROMPT, args.seed + 2, str(student.device))
    for step, tokens in enumerate(itertools.islice(prompts, args.steps)):
        inputs = {"input_ids": tokens}
        batch = ll.hf.sample(student, inputs, generation_config=generation(), seed=step)
        texts = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            teacher_hidden = teacher.model(**texts).last_hidden_state[:, :-1]
        loss = ll.kl_div(
            student(**texts).logits[:, :-1],
            ll.LinearLogits(teacher_hidden, teacher.lm_head.weight),
            direction="reverse",
            mask=batch["labels"][:, 1:] != -100,
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80, help="on-policy steps; default: 80")
    parser.add_argument("--lr", type=float, default=2e-3, help="default: 0.002")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    args = parser.parse_args()
    if args.steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {args.steps}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    text, unseen, ends = corpus(2_000_000)
    teacher, student = llama(64, 2, 1, ends, device), llama(32, 1, args.seed, ends, device)
    train_on_text(teacher, text, 5 * args.steps, 5e-3, args.seed)
    train_on_text(student, text[: len(text) // 10], 2 * args.steps, 5e-3, args.seed + 1)
    teacher.requires_grad_(False).eval()

    prompts = torch.cat([*itertools.islice(windows(unseen, PROMPT, 9, device), 8)])
    before = teacher_logprob(student, teacher, prompts)
    own = teacher_logprob(teacher, teacher, prompts)
    results = {"student before": before}
    ll.report()
    for name, train in (("DistillTrainer", by_trainer), ("own loop", by_hand)):
        learner = copy.deepcopy(student)
        train(learner, teacher, text, args)
        results[f"student after, {name}"] = teacher_logprob(learner, teacher, prompts)
    results["teacher"] = own
    print(f"materialised logits: {len(ll.report())}   {time.perf_counter() - start:.0f} s")
    print("\nthe teacher's log-probability of the model's own samples, nats per token")
    for name, value in results.items():
        print(f"{name:>30}  {value:.3f}")


if __name__ == "__main__":
    main()
