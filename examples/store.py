"""Captures a teacher into a store once, and trains a student from the store.

    python examples/store.py --teacher Qwen/Qwen3-8B --student Qwen/Qwen3-0.6B --data my.jsonl
    python examples/store.py

Each line of the data is a JSON object with the field `text`. Every tenth line is held out. Teacher
and student are names or folders of Transformers models that share one tokenizer. Without arguments,
the script first creates a text and a small pair of models, and needs neither a network nor a GPU.
The script needs the packages transformers and accelerate.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

import logitless as ll

K, MOST = 64, 1024  # stored tokens per position, most tokens per document
SMALL_LR = 3e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--teacher", "--student", "--data"):
        parser.add_argument(name)
    parser.add_argument(
        "--out", help="folder of the store; an existing store is resumed; default: targets"
    )
    parser.add_argument("--save", help="folder for the trained student")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, help="default: 1e-5, or 3e-3 for the small pair")
    args = parser.parse_args()
    names = [args.teacher, args.student, args.data]
    if any(names) and not all(names):
        parser.error("--teacher, --student and --data must be given together")
    with tempfile.TemporaryDirectory() as folder:
        if not any(names):
            args.teacher, args.student, args.data = small_pair(Path(folder))
            args.out = args.out or f"{folder}/targets"
            args.lr = args.lr or SMALL_LR
        run(args, folder)


def run(args: argparse.Namespace, folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.teacher)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    documents = read(args.data, tokenizer)
    held_out, documents = documents[::10], [d for i, d in enumerate(documents) if i % 10]

    teacher, student = (
        AutoModelForCausalLM.from_pretrained(name) for name in (args.teacher, args.student)
    )
    header = {"teacher": args.teacher, "tokenizer": ll.store.tokenizer_hash(tokenizer)}
    # The heads of two models of one family may be padded to different sizes.
    vocabulary = min(m.get_output_embeddings().out_features for m in (teacher, student))
    teacher.to("cuda" if torch.cuda.is_available() else "cpu")
    path = args.out or "targets"
    with ll.store.Writer(path, vocab_size=vocabulary, k=K, **header) as writer:
        added = ll.store.capture(teacher, batches(documents, 8), writer)
    del teacher
    store = ll.store.Store(path)
    report = store.verify()
    print(f"{added} documents captured\n{report}")
    if not report:
        raise SystemExit(1)

    trainer = ll.hf.DistillTrainer(
        student,
        arguments(folder, args.steps, args.lr or 1e-5),
        train_dataset=[{"input_ids": d} for d in documents],
        eval_dataset=[{"input_ids": d} for d in held_out],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
        store=store,
        divergence="forward_kl",
        support="tail",
        eval_teacher=False,  # the held-out text is not in the store
    )
    trainer.remove_callback(PrinterCallback)
    before = trainer.evaluate()["eval_ce_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_ce_loss"]
    print(f"held-out loss of the student: {before:.3f} before, {after:.3f} after")
    if args.save:
        trainer.save_model(args.save)


def read(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The documents, each with the end-of-text token, cut off after MOST tokens."""
    if tokenizer.eos_token_id is None:
        raise SystemExit("the teacher's tokenizer must have an end-of-text token (eos_token)")
    texts = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
    return [[*ids, tokenizer.eos_token_id][:MOST] for ids in tokenizer(texts)["input_ids"]]


def batches(documents: list[list[int]], size: int) -> list[list[list[int]]]:
    """Batches of documents of similar lengths, which have little padding."""
    ordered = sorted(documents, key=len)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def arguments(folder: str, steps: int, lr: float) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=lr,
        logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip


def small_pair(folder: Path) -> tuple[str, str, str]:
    """Creates a text, a tokenizer, a teacher that is trained on the text, and a random student.

    Returns the folders of teacher and student, and the file of the data.
    """
    choose = random.Random(0)
    nouns, verbs = ["cat", "dog", "bird", "tree", "child"], ["sees", "likes", "finds", "hears"]

    def sentence() -> str:
        subject, object_ = choose.choices(nouns, k=2)
        return f"the {subject} {choose.choice(verbs)} the {object_} ."

    texts = [" ".join(sentence() for _ in range(choose.randint(2, 6))) for _ in range(60)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
    bpe_trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>", "<pad>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(texts, bpe_trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    for name, width, layers in (("teacher", 64, 2), ("student", 32, 1)):
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=layers, num_attention_heads=4, max_position_embeddings=MOST,
            bos_token_id=None, eos_token_id=0, pad_token_id=1,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        if name == "teacher":
            trainer = Trainer(
                ll.fuse(model), arguments(str(folder / "training"), 60, SMALL_LR),
                train_dataset=[{"input_ids": d} for d in read(folder / "data.jsonl", tokenizer)],
                data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
            )  # fmt: skip
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return str(folder / "teacher"), str(folder / "student"), str(folder / "data.jsonl")


if __name__ == "__main__":
    main()
