"""A training step of a Llama by each way to its loss: tokens a second and peak memory.

    python benchmarks/training_step.py --out FOLDER [--quick]

The model has the sizes of Llama 3.2 1B (tied head, bf16, gradient checkpointing), and random
weights. A step is a forward with Transformers' labels and a backward; the optimizer's part is the
same for all, and left out. Every way is first held against the same model in fp32, on one short
batch: its loss and its gradients may be twice as far off as those of the plain model. All ways then
take turns, so that a drift of the GPU's clock meets each of them. --seconds bounds the whole run:
what does not fit is left out, and said to be. Writes FOLDER/training-step.md.

--quick is a small model and a short run, for a CPU too.
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
from logitless.cli import machine as _machine
from logitless.cli.clocks import wall_time
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
CHECKS = ("way", "loss", "d head", "d down_proj", "d q_proj", "verdict")  # columns of the report
MARGIN, FLOOR = 2.0, 1e-3  # errors against fp32: times those of the plain model, and beyond

Batch = dict[str, Tensor]


class Way(NamedTuple):
    """How a model's loss is computed: a name, the model's loss, and the context it needs."""

    name: str
    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    within: Callable[[], Any] = contextlib.nullcontext


def llama(sizes: dict, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, use_cache=False)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def batch_of(shape: tuple[int, int], vocab: int, device: str) -> Batch:
    """Random tokens; every eighth label is ignored."""
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


def liger_ways(model: LlamaForCausalLM) -> list[Way]:
    """Its loss alone, and its whole patch, which has kernels for the layers too."""
    liger = import_module("liger_kernel.transformers")
    forward = import_module("liger_kernel.transformers.model.llama").lce_forward
    patched, own = copy.deepcopy(model), dict(modeling_llama.__dict__)
    try:
        liger.apply_liger_kernel_to_llama(model=patched)
    finally:
        modeling_llama.__dict__.update(own)
    # Its patches of one model's loss, and of a function in the module of all models.
    loss = partial(patch.object, model, "forward", MethodType(forward, model))
    rope = (modeling_llama, "apply_rotary_pos_emb", liger.liger_rotary_pos_emb)
    return [
        Way("Liger's loss", model, transformers_loss, loss),
        Way("Liger's whole patch", patched, transformers_loss, partial(patch.object, *rope)),
    ]


def ways_of(model: LlamaForCausalLM) -> tuple[list[Way], str]:
    """All ways that can run here, and what is to be said of Liger."""
    ways = [Way("Transformers as it is", model, transformers_loss)]
    try:
        ways += liger_ways(model)
        about = f"Liger {_machine.installed('liger_kernel')}"
    except Exception as error:  # it may fail to import in its own way
        about = f"without Liger: {short(error)}"
    ways += [
        Way("LinearLogits by hand", model, by_hand),
        Way("ll.fuse(model)", model, transformers_loss, partial(fused, model)),
    ]
    return ways, about


def answers(way: Way, batch: Batch) -> list[Tensor]:
    """The loss, and the gradients of the embedding (which is the head) and of a layer."""
    with way.within():
        loss = way.loss(way.model, batch)
        loss.backward()
    model: Any = way.model
    layer = model.model.layers[-1]
    found = [model.lm_head.weight, layer.mlp.down_proj.weight, layer.self_attn.q_proj.weight]
    gradients = [p.grad.float() for p in found]
    model.zero_grad()
    return [loss.detach().float(), *gradients]


def errors_of(ways: list[Way], batch: Batch) -> dict[str, list[float] | str]:
    """Of each way's answers, against the plain model in fp32; or why it has none."""
    exact = Way("fp32", copy.deepcopy(ways[0].model).float(), transformers_loss)
    right = answers(exact, batch)
    found = {}
    for way in ways:
        try:
            pairs = zip(answers(way, batch), right, strict=True)
            found[way.name] = [((a - b).norm() / b.norm()).item() for a, b in pairs]
        except Exception as error:
            way.model.zero_grad()
            found[way.name] = f"fails: {short(error)}"
    return found


def verdict(found: list[float] | str, of_plain: list[float] | str) -> str:
    if isinstance(found, str) or isinstance(of_plain, str):
        return str(found)
    pairs = zip(found, of_plain, strict=True)
    return "ok" if all(error <= MARGIN * plain + FLOOR for error, plain in pairs) else "WRONG"


def step(way: Way, batch: Batch, device: str) -> tuple[float, int]:
    """One forward and backward: milliseconds, and the most bytes at once beyond the weights."""
    before = torch.cuda.memory_allocated()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = wall_time(device, lambda _: way.loss(way.model, batch).backward())
    peak = torch.cuda.max_memory_allocated() - before
    way.model.zero_grad()
    return ms, peak


def measure(
    ways: list[Way], batch: Batch, device: str, steps: int, deadline: float
) -> dict[str, str]:
    """A cell for each: of its median step, taken in turns after one that is not counted."""
    taken: dict[str, list[tuple[float, int]]] = {way.name: [] for way in ways}
    failed: dict[str, str] = {}
    for turn in range(steps + 1):
        for way in ways:
            if way.name in failed or time.monotonic() > deadline:
                continue
            try:
                with way.within():
                    result = step(way, batch, device)
            except torch.cuda.OutOfMemoryError:
                way.model.zero_grad()
                failed[way.name] = "out of memory"
                continue
            if turn:
                taken[way.name].append(result)
    tokens = batch["input_ids"].numel()
    return {name: failed.get(name) or speed(found, tokens) for name, found in taken.items()}


def speed(found: list[tuple[float, int]], tokens: int) -> str:
    if not found:
        return "no time left"
    times, peaks = zip(*found, strict=True)
    return f"{1e3 * tokens / statistics.median(times):,.0f} · {max(peaks) / 2**30:.1f}"


def report(device: str, sizes: dict, about: str, speeds: str, checks: str) -> str:
    where = ", ".join(filter(None, _machine.device(device).values()))
    versions = ", ".join(f"{name} {v}" for name, v in _machine.versions().items() if v)
    lines = [
        "# A training step", "",
        f"- {where}; {versions}, transformers {transformers.__version__}; {about}",
        f"- logitless at commit {_machine.commit()}; {_machine.now()}",
        f"- Llama of {sizes['num_hidden_layers']} layers, width {sizes['hidden_size']}, vocabulary"
        f" {sizes['vocab_size']:,}, tied, bf16, gradient checkpointing; forward and backward",
        "", "Tokens a second · peak GiB beyond the weights:", "", speeds,
        "", "Relative errors against the plain model in fp32, checked first:", "", checks, "",
    ]  # fmt: skip
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--quick", action="store_true", help="a small model")
    add("--seconds", type=float, default=130.0, help="to spend in all (default 130)")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.seconds
    sizes, shapes = (QUICK_SIZES, QUICK_SHAPES) if args.quick else (SIZES, SHAPES)
    vocab = sizes["vocab_size"]

    ways, about = ways_of(llama(sizes, args.device))
    errors = errors_of(ways, batch_of(CHECKED, vocab, args.device))
    verdicts = {name: verdict(found, errors[ways[0].name]) for name, found in errors.items()}
    checks = []
    for name, found in errors.items():
        numbers = [NOTHING] * 4 if isinstance(found, str) else [f"{error:.1e}" for error in found]
        checks.append(dict(zip(CHECKS, [name, *numbers, verdicts[name]], strict=True)))
    ways = [way for way in ways if verdicts[way.name] == "ok"]
    torch.cuda.empty_cache()

    rows = []
    for shape in shapes:
        batch = batch_of(shape, vocab, args.device)
        steps = STEPS if shape[0] * shape[1] <= 16384 else 2
        cells = measure(ways, batch, args.device, steps, deadline)
        rows.append({"batch × length": f"{shape[0]} × {shape[1]:,}", **cells})
        print(*rows[-1].values(), sep=" | ", flush=True)
        torch.cuda.empty_cache()

    text = report(args.device, sizes, about, table(rows), table(checks))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "training-step.md").write_text(text)
    print(text)
    return int(any(found != "ok" for name, found in verdicts.items() if "Liger" not in name))


if __name__ == "__main__":
    raise SystemExit(main())
