"""Measures peak memory and time of a compiled GPT-2 (124M) with cross-entropy over its logits.

    python -m benchmarks.compiled_step [--quick] [--seconds 420]

The model is plain PyTorch with random weights, in bf16, and forward, loss and backward are one
torch.compile. F.cross_entropy, ll.cross_entropy, and ll.cross_entropy whose backward is an operator
(a new tensor beside the logits) alternate. Losses and gradients are compared before the times.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from unittest import mock

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # two variants have the same graph

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import logitless as ll
from benchmarks.bench.clocks import wall_time
from logitless.cli import machine
from logitless.cli.report import table
from logitless.core import operators

STEPS = 10


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.before(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocab: int, length: int, width: int, heads: int, layers: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.tokens(ids) + self.places(places))
        return self.last(x) @ self.tokens.weight.T


def compiled(model: nn.Module, loss: Callable, vocab: int) -> Callable:
    def run(ids: Tensor, target: Tensor) -> Tensor:
        return loss(model(ids).view(-1, vocab), target.view(-1))

    return torch.compile(run, fullgraph=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--seconds", type=float, default=420.0, help="time for the whole run")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, length, sizes = 32, 1024, (768, 12, 12)
    vocab = 50257
    if args.quick:
        batch, length, sizes, vocab = 2, 32, (64, 2, 2), 517
    torch.manual_seed(0)
    model = GPT2(vocab, length, *sizes).to(device, torch.bfloat16)
    ids, target = torch.randint(vocab, (2, batch, length), device=device)

    variants = {
        "F.cross_entropy": compiled(model, F.cross_entropy, vocab),
        "ll.cross_entropy": compiled(model, ll.cross_entropy, vocab),
        "its gradient as an operator": compiled(model, lambda x, t: ll.cross_entropy(x, t), vocab),
    }
    found = {}
    for name, run in variants.items():  # the first call compiles
        traced = operators._is_traced
        if "operator" in name:
            traced = lambda: False  # noqa: E731
        with mock.patch.object(operators, "_is_traced", traced):
            loss = run(ids, target)
            loss.backward()
        found[name] = loss.detach().float(), model.tokens.weight.grad.float()
        model.zero_grad()
    want_loss, want = found["F.cross_entropy"]
    for name, (loss, grad) in found.items():
        apart = float((grad - want).norm() / want.norm())
        print(f"{name}: loss {float(loss):.5f}, gradient {apart:.1e} from F.cross_entropy's")
        assert abs(float(loss - want_loss)) < 0.01 * float(want_loss)  # PyTorch's is bf16
        assert apart < 0.02
    found.clear()
    del want, grad

    taken: dict[str, list] = {name: [] for name in variants}
    for turn in range(STEPS + 2):
        for name, run in variants.items():
            if time.monotonic() > deadline:
                break
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            ms = wall_time(device, lambda _, run=run: run(ids, target).backward())
            peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
            model.zero_grad()
            if turn > 1:
                taken[name].append((ms, peak))
    rows = [
        {
            "loss": name,
            "ms": f"{statistics.median(ms for ms, _ in steps):.1f}",
            "peak GiB": f"{max(peak for _, peak in steps) / 2**30:.1f}",
        }
        for name, steps in taken.items()
        if steps
    ]
    where = ", ".join(filter(None, machine.device(device).values()))
    print(
        f"\n{where}; torch {torch.__version__}; {batch} × {length} tokens, vocabulary {vocab:,}\n"
    )
    print(table(rows) if rows else "no time left for measurements")


if __name__ == "__main__":
    main()
