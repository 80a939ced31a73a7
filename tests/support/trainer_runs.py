"""Runs trainers on tiny models. Records the logged numbers and the materialised logits."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import logitless as ll
from logitless.lazy import recipe
from logitless.lazy import report as reports

V, D = 211, 32  # V is a prime, so that no other dimension of a tensor has this size
ROWS = 5  # rows of fp32 logits that fit into the workspace
WORKSPACE = ROWS * V * 4
GRADIENT = 1e-3  # gradients with a larger entry are compared relative to it
LAZY = 2 * ROWS  # the largest number of rows in one tensor: the workspace in bf16
TIMES = ("runtime", "per_second", "step_time")  # logged names that contain these words are times


class Run(NamedTuple):
    """One training run."""

    logs: list[dict[str, float]]  # the numbers that the trainer logged, without times
    weights: dict[str, torch.Tensor]  # after training
    widest: int  # the largest number of rows of logits in one tensor
    materialised: list[str]  # the operations of `ll.report`
    warnings: set[str]
    floor: float = 1.0  # differences of larger tensors are relative to their largest entry


def model(name: str = "Llama", seed: int = 0, **fields) -> nn.Module:
    """Returns a tiny random causal LM. The names of its classes start with `name`."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": V, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 2,
        "initializer_range": 0.2, "tie_word_embeddings": False,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**sizes, **fields})
    built = getattr(transformers, f"{name}ForCausalLM")(config)
    built.generation_config = transformers.GenerationConfig(
        pad_token_id=1, eos_token_id=2, bos_token_id=0
    )
    return built


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w2", pad_token="w1", unk_token="w0",
        padding_side="left",
    )  # fmt: skip
    made.chat_template = (
        "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}w3 {% endif %}"
    )
    return made


def text(start: int, length: int = 7) -> str:
    return " ".join(f"w{4 + (37 * start + i * (start + 3)) % (V - 4)}" for i in range(length))


class Widest(TorchDispatchMode):
    """Records the largest number of rows of width V in one tensor.

    Transposed weights, whose last two dimensions are (width, V), lazy logits, and tensors without
    memory are left out.
    """

    def __init__(self, width: int = D):
        super().__init__()
        self.rows, self.width = 0, width

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            plain = isinstance(t, torch.Tensor) and "logitless" not in type(t).__module__
            if plain and not t.is_meta and t.shape[-1:] == (V,) and t.shape[-2:] != (self.width, V):
                self.rows = max(self.rows, t.numel() // V)
        return out


def numbers(history: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Returns the logged numbers, without times."""
    return [
        {k: float(v) for k, v in entry.items() if not any(part in k for part in TIMES)}
        for entry in history
    ]


def run(trainer: Any, evaluates: bool = False) -> Run:
    """Trains, and evaluates if `evaluates` is true."""
    transformers.set_seed(7)  # for sampled tokens
    with watched() as found:
        trainer.train()
        if evaluates:
            trainer.evaluate()
    weights = {k: p.detach().clone() for k, p in trainer.model.named_parameters()}
    return Run(numbers(trainer.state.log_history), weights, **vars(found))


def far(got: Run, want: Run) -> float:
    """The largest difference of a number or a tensor, relative to what is above the floor."""
    assert [entry.keys() for entry in got.logs] == [entry.keys() for entry in want.logs]
    assert got.weights.keys() == want.weights.keys()
    pairs = [
        (mine[name], theirs[name])
        for mine, theirs in zip(got.logs, want.logs, strict=True)
        for name in theirs
    ]
    found = [abs(a - b) / max(1.0, abs(b)) for a, b in pairs if not (a == b or (a != a and b != b))]
    for name, value in want.weights.items():
        scale = max(want.floor, float(value.abs().max()))
        found.append(float((got.weights[name] - value).abs().max()) / scale)
    assert not any(math.isnan(number) for number in found)
    return max(found)


@contextmanager
def watched(width: int = D) -> Iterator[SimpleNamespace]:
    """Records inside what `Run` needs of memory: `widest`, `materialised` and `warnings`."""
    reports._warned.clear()
    ll.report()
    widest, found = Widest(width), SimpleNamespace()
    small = patch.object(recipe, "SMALL", WORKSPACE)  # larger logits are lazy in evaluation too
    with warnings.catch_warnings(record=True) as seen, small, widest:
        warnings.simplefilter("always")
        yield found
    found.widest = widest.rows
    found.materialised = [record.operation for record in ll.report()]
    found.warnings = {str(w.message) for w in seen}


def once(module: nn.Module, compute: Callable[[], Any], width: int = D) -> Run:
    """Runs one step. `compute` returns a loss, or the loss and numbers to compare."""
    module.zero_grad()
    with watched(width) as found:
        loss = compute()
        loss, logs = loss if isinstance(loss, tuple) else (loss, {})
        loss.backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    logs = [{"loss": float(loss.detach()), **logs}]
    return Run(logs, gradients, **vars(found), floor=GRADIENT)
