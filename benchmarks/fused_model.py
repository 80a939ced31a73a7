"""Measures evaluation, prefill and compiled training of a fused Llama beside the plain model.

    python -m benchmarks.fused_model --out FOLDER [--quick] [--skip-compile]

The model has the sizes of Llama 3.2 1B (tied head, bf16) and random weights. The variants of a
table run alternately, so that a drift of the GPU's clock affects all variants equally. Before the
timing, the results of every variant are compared with those of the plain model.

- "Evaluation" is a forward with labels and without gradients. The caller reads the loss.
- "Prefill" is a forward without labels that fills a KV cache. The caller reads the logits of the
  last token. The peak includes the KV cache.
- "Training" is a forward with labels and a backward, without gradient checkpointing. Attention is
  called without a mask. Otherwise, Transformers would build a causal mask under torch.compile
  before PyTorch 2.14. With a mask, PyTorch cannot use the fast attention kernels, and the mask
  would hide the speedup by the compiler.

The option --quick runs a small model for a short time, on a CPU or a GPU. The script writes
FOLDER/fused-model.md.
"""

import argparse
import contextlib
import copy
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

import logitless as ll
from benchmarks.bench.clocks import wall_time
from benchmarks.training_step import QUICK_SIZES, SIZES, batch_of, fused, llama
from logitless.cli import machine
from logitless.cli.report import table

EVALUATED, TRAINED = (1, 32768), (4, 4096)  # batch × length
QUICK = (2, 64)
TURNS = 5


class Variant(NamedTuple):
    name: str
    run: Callable[[], Tensor]  # returns the result to compare with the plain model's
    context: Callable[[], Any] = contextlib.nullcontext


def causal_attention(module, query, key, value, mask, *, scaling=None, **_):
    """Causal attention without a mask tensor, with the signature that Transformers expects."""
    attended = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


def loss_of(model, batch) -> Tensor:
    with torch.no_grad():
        return model(**batch).loss


def last_logits(model, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True).logits[:, -1].float() + 0


def trained(model, batch) -> Tensor:
    loss = model(**batch).loss
    loss.backward()
    model.zero_grad()
    return loss.detach()


def measured(variants: list[Variant], device: str) -> list[dict]:
    """Returns one row of a table per variant."""
    taken: dict[str, list[tuple[float, int]]] = {variant.name: [] for variant in variants}
    errors: dict[str, float] = {}
    right = None
    for turn in range(TURNS + 1):
        for variant in variants:
            with variant.context():
                before = torch.cuda.memory_allocated()
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                found: list[Tensor] = []
                ms = wall_time(device, lambda _, v=variant, into=found: into.append(v.run()))
                peak = torch.cuda.max_memory_allocated() - before
            if turn:
                taken[variant.name].append((ms, peak))
                continue
            right = found[0].float() if right is None else right
            errors[variant.name] = ((found[0].float() - right).norm() / right.norm()).item()
    rows = []
    for variant in variants:
        times, peaks = zip(*taken[variant.name], strict=True)
        rows.append(
            {
                "variant": variant.name,
                "ms": f"{statistics.median(times):,.1f}",
                "peak GiB beyond the weights": f"{max(peaks) / 2**30:.2f}",
                "difference from the first": f"{errors[variant.name]:.1e}",
            }
        )
    return rows


def materialised() -> str:
    """Returns one line that lists the lazy logits materialised since the last report."""
    return "; ".join(str(ll.report()).split("\n"))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="use a small model")
    add("--skip-compile", action="store_true", help="leave out torch.compile, which takes minutes")
    add("--only-compile", action="store_true", help="leave out evaluation and prefill")
    args = parser.parse_args()
    sizes = QUICK_SIZES if args.quick else SIZES
    model = llama(sizes, args.device)
    model.gradient_checkpointing_disable()
    parts, lazy = [], partial(fused, model)

    batch = batch_of(QUICK if args.quick else EVALUATED, sizes["vocab_size"], args.device)
    model.eval()
    without = {
        "Evaluation": partial(loss_of, model, batch),
        "Prefill": partial(last_logits, model, batch["input_ids"]),
    }
    for title, run in () if args.only_compile else without.items():
        ll.report()
        rows = measured([Variant("plain", run), Variant("ll.fuse(model)", run, lazy)], args.device)
        shape = " × ".join(f"{n:,}" for n in batch["input_ids"].shape)
        parts.append(f"## {title}, {shape} tokens\n\n{table(rows)}\n\nReport: {materialised()}\n")
        print(parts[-1], flush=True)

    if not args.skip_compile:
        batch = batch_of(QUICK if args.quick else TRAINED, sizes["vocab_size"], args.device)
        model.train()
        transformers.AttentionInterface.register("causal", causal_attention)
        AttentionMaskInterface.register("causal", lambda *_, **__: None)
        model.set_attn_implementation("causal")
        other = ll.fuse(copy.deepcopy(model))
        compiled = torch.compile(other)
        rows = measured(
            [
                Variant("plain", partial(trained, model, batch)),
                Variant("ll.fuse(model)", partial(trained, other, batch)),
                Variant("torch.compile of it", partial(trained, compiled, batch)),
            ],
            args.device,
        )
        shape = " × ".join(f"{n:,}" for n in batch["input_ids"].shape)
        parts.append(f"## Training, {shape} tokens\n\n{table(rows)}\n\nReport: {materialised()}\n")
        print(parts[-1], flush=True)

    where = ", ".join(filter(None, machine.device(args.device).values()))
    versions = ", ".join(f"{name} {v}" for name, v in machine.versions().items() if v)
    head = f"""# A fused model: evaluation, prefill, torch.compile

- {where}; {versions}, transformers {transformers.__version__}
- logitless at commit {machine.commit()}; {machine.now()}
- Llama of {sizes["num_hidden_layers"]} layers, width {sizes["hidden_size"]}, vocabulary
  {sizes["vocab_size"]:,}, tied, bf16; times by turns, median of {TURNS}
"""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "fused-model.md").write_text("\n".join((head, *parts)))


if __name__ == "__main__":
    main()
