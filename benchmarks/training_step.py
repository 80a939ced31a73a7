"""Measures speed and memory of a Llama's training step with several implementations of the loss.

    python benchmarks/training_step.py --out FOLDER [--quick] [--lengths 4096 8192 ...]

The model has the sizes of Llama 3.2 1B (tied head, bf16, gradient checkpointing) and random
weights. A step is a forward with Transformers' labels and a backward. The optimizer step is the
same for all implementations and is left out. Every implementation is first compared with the same
model in fp32 on one short batch. The errors of loss and gradients may be at most twice the errors
of the plain bf16 model plus 1e-3. Then all implementations alternate, so a drift of the GPU's clock
changes all times alike. The option --seconds limits the time of the whole run. Measurements after
this time are reported as "no time left". The script writes FOLDER/training-step.md.

The option --quick runs a small model for a short time, on a CPU or a GPU. The option --lengths
measures single sequences of these lengths, with and without ll.fuse.
"""

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import logitless as ll
from benchmarks.bench.clocks import wall_time
from logitless.cli import machine
from logitless.cli.report import NOTHING, short, table

SHAPES = ((4, 4096), (1, 16384), (1, 65536))  # batch × length
STEPS = 5
SIZES = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
QUICK_SHAPES = ((2, 64),)
QUICK_SIZES = SIZES | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
CHECKED = (2, 128)
CHECKS = ("variant", "loss", "d head", "d down_proj", "d q_proj", "verdict")  # column titles
MARGIN, FLOOR = 2.0, 1e-3  # error allowed: MARGIN · error of the plain model + FLOOR

Batch = dict[str, Tensor]


class Variant(NamedTuple):
    """An implementation of a model's loss, and the context manager that it needs."""

    name: str
    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    context: Callable[[], Any] = contextlib.nullcontext


def llama(sizes: dict, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, use_cache=False)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def batch_of(shape: tuple[int, int], vocab: int, device: str) -> Batch:
    """Random tokens and labels. Every eighth label is ignored."""
    ids = torch.randint(vocab, shape, device=device)
    ignored = torch.arange(shape[1], device=device) % 8 == 0
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}


def transformers_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def by_hand(model: Any, batch: Batch) -> Tensor:
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
    labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return ll.cross_entropy(ll.LinearLogits(hidden, model.lm_head.weight), labels)


@contextlib.contextmanager
def fused(model: nn.Module) -> Iterator[None]:
    ll.fuse(model)
    try:
        yield
    finally:
        ll.unfuse(model)


def liger_variants(model: LlamaForCausalLM) -> list[Variant]:
    """Variants with Liger's loss alone, and with Liger's whole patch, which replaces layers too."""
    liger = import_module("liger_kernel.transformers")
    forward = import_module("liger_kernel.transformers.model.llama").lce_forward
    patched, original = copy.deepcopy(model), dict(modeling_llama.__dict__)
    try:
        liger.apply_liger_kernel_to_llama(model=patched)
    finally:
        modeling_llama.__dict__.update(original)
    # `loss` patches the forward of one model. `rope` patches a function that all Llamas call.
    loss = partial(patch.object, model, "forward", MethodType(forward, model))
    rope = (modeling_llama, "apply_rotary_pos_emb", liger.liger_rotary_pos_emb)
    return [
        Variant("Liger's loss", model, transformers_loss, loss),
        Variant("Liger's whole patch", patched, transformers_loss, partial(patch.object, *rope)),
        *with_liger_layers(model, liger.apply_liger_kernel_to_llama, partial(patch.object, *rope)),
    ]


def with_liger_layers(model: nn.Module, apply: Callable, rope: Callable) -> list[Variant]:
    """Variants with our loss and Liger's layers, which are patched before or after ll.fuse."""
    layers = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    before, after = copy.deepcopy(model), copy.deepcopy(model)
    original = dict(modeling_llama.__dict__)
    try:
        apply(model=before, **layers)
        ll.fuse(before)
        ll.fuse(after)
        apply(model=after, **layers)
    finally:
        modeling_llama.__dict__.update(original)
    return [
        Variant("Liger's layers, then ll.fuse", before, transformers_loss, rope),
        Variant("ll.fuse, then Liger's layers", after, transformers_loss, rope),
    ]


def variants_of(model: LlamaForCausalLM) -> tuple[list[Variant], str]:
    """All implementations that can run, and the version of Liger or the reason for its absence."""
    variants = [Variant("Transformers as it is", model, transformers_loss)]
    try:
        variants += liger_variants(model)
        about = f"Liger {machine.installed('liger_kernel')}"
    except Exception as error:  # an import can raise any error
        about = f"without Liger: {short(error)}"
    variants += [
        Variant("LinearLogits by hand", model, by_hand),
        Variant("ll.fuse(model)", model, transformers_loss, partial(fused, model)),
    ]
    return variants, about


def loss_and_gradients(variant: Variant, batch: Batch) -> list[Tensor]:
    """The loss, and the gradients of three weights: the tied head and two weights of layers."""
    with variant.context():
        loss = variant.loss(variant.model, batch)
        loss.backward()
    model: Any = variant.model
    layer = model.model.layers[-1]
    weights = [model.lm_head.weight, layer.mlp.down_proj.weight, layer.self_attn.q_proj.weight]
    gradients = [p.grad.float() for p in weights]
    model.zero_grad()
    return [loss.detach().float(), *gradients]


def errors_of(variants: list[Variant], batch: Batch) -> dict[str, list[float] | str]:
    """The errors of each implementation relative to the fp32 model, or the raised exception."""
    exact = Variant("fp32", copy.deepcopy(variants[0].model).float(), transformers_loss)
    right = loss_and_gradients(exact, batch)
    errors = {}
    for variant in variants:
        try:
            pairs = zip(loss_and_gradients(variant, batch), right, strict=True)
            errors[variant.name] = [((a - b).norm() / b.norm()).item() for a, b in pairs]
        except Exception as error:
            variant.model.zero_grad()
            errors[variant.name] = f"fails: {short(error)}"
    return errors


def verdict(errors: list[float] | str, of_plain: list[float] | str) -> str:
    if isinstance(errors, str) or isinstance(of_plain, str):
        return str(errors)
    pairs = zip(errors, of_plain, strict=True)
    return "ok" if all(error <= MARGIN * plain + FLOOR for error, plain in pairs) else "WRONG"


def step(variant: Variant, batch: Batch, device: str) -> tuple[float, int]:
    """The milliseconds of one forward and backward, and the peak bytes beyond the weights."""
    before = torch.cuda.memory_allocated()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = wall_time(device, lambda _: variant.loss(variant.model, batch).backward())
    peak = torch.cuda.max_memory_allocated() - before
    variant.model.zero_grad()
    return ms, peak


def measure(
    variants: list[Variant], batch: Batch, device: str, steps: int, deadline: float
) -> dict[str, str]:
    """One table cell per implementation. The implementations alternate.

    The first step of each implementation is not counted.
    """
    taken: dict[str, list[tuple[float, int]]] = {variant.name: [] for variant in variants}
    failed: dict[str, str] = {}
    for turn in range(steps + 1):
        for variant in variants:
            if variant.name in failed or time.monotonic() > deadline:
                continue
            try:
                with variant.context():
                    result = step(variant, batch, device)
            except torch.cuda.OutOfMemoryError:
                variant.model.zero_grad()
                failed[variant.name] = "out of memory"
                continue
            if turn:
                taken[variant.name].append(result)
    tokens = batch["input_ids"].numel()
    return {name: failed.get(name) or speed(steps, tokens) for name, steps in taken.items()}


def speed(steps: list[tuple[float, int]], tokens: int) -> str:
    """The tokens per second of the median step, and the highest peak memory in GiB."""
    if not steps:
        return "no time left"
    times, peaks = zip(*steps, strict=True)
    return f"{1e3 * tokens / statistics.median(times):,.0f} · {max(peaks) / 2**30:.1f}"


def report(device: str, sizes: dict, about: str, speeds: str, checks: str) -> str:
    where = ", ".join(filter(None, machine.device(device).values()))
    versions = ", ".join(f"{name} {v}" for name, v in machine.versions().items() if v)
    lines = [
        "# A training step", "",
        f"- {where}; {versions}, transformers {transformers.__version__}; {about}",
        f"- logitless at commit {machine.commit()}; {machine.now()}",
        f"- Llama of {sizes['num_hidden_layers']} layers, width {sizes['hidden_size']}, vocabulary"
        f" {sizes['vocab_size']:,}, tied, bf16, gradient checkpointing; forward and backward",
        "", "Tokens per second · peak GiB beyond the weights:", "", speeds,
        "", "Relative errors against the plain model in fp32, measured first:", "", checks, "",
    ]  # fmt: skip
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="use a small model")
    add("--lengths", type=int, nargs="+", help="lengths of single sequences")
    add("--seconds", type=float, default=130.0, help="time for the whole run (default 130)")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.seconds
    sizes, shapes = (QUICK_SIZES, QUICK_SHAPES) if args.quick else (SIZES, SHAPES)
    vocab = sizes["vocab_size"]

    variants, about = variants_of(llama(sizes, args.device))
    if args.lengths:
        shapes = [(1, length) for length in args.lengths]
        variants = [v for v in variants if v.name in ("Transformers as it is", "ll.fuse(model)")]
    errors = errors_of(variants, batch_of(CHECKED, vocab, args.device))
    verdicts = {name: verdict(each, errors[variants[0].name]) for name, each in errors.items()}
    checks = []
    for name, each in errors.items():
        numbers = [NOTHING] * 4 if isinstance(each, str) else [f"{error:.1e}" for error in each]
        checks.append(dict(zip(CHECKS, [name, *numbers, verdicts[name]], strict=True)))
    variants = [variant for variant in variants if verdicts[variant.name] == "ok"]
    torch.cuda.empty_cache()

    rows = []
    for shape in shapes:
        batch = batch_of(shape, vocab, args.device)
        steps = 1 if args.lengths else STEPS if shape[0] * shape[1] <= 16384 else 2
        cells = measure(variants, batch, args.device, steps, deadline)
        rows.append({"batch × length": f"{shape[0]} × {shape[1]:,}", **cells})
        print(*rows[-1].values(), sep=" | ", flush=True)
        torch.cuda.empty_cache()

    text = report(args.device, sizes, about, table(rows), table(checks))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "training-step.md").write_text(text)
    print(text)
    return int(any(text != "ok" for name, text in verdicts.items() if "Liger" not in name))


if __name__ == "__main__":
    raise SystemExit(main())
