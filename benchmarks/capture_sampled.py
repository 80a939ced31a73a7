"""Measures `ll.capture_sampled` on a GPU, beside one reading of the logits.

    python -m benchmarks.capture_sampled --out FOLDER

The logits have 8192 rows and V = 128,256 in bf16. The sorted probabilities of a "zipf" row follow a
power law, as in language models, and the draws of a row hit few ids. The logits of a "flat" row are
normal with a standard deviation of 1, and almost every draw hits another id.

The script first compares the draws with an inversion in fp64, and the counts of many draws with
their expected values. Then the script measures five calls: one reading of the logits
(`ll.logsumexp`), `torch.sum` of the logits, `ll.capture_sampled`, `ll.capture_topk`, and
`torch.multinomial` of the softmax. The target for `ll.capture_sampled` with n = 50 is three times
one reading. The script prints a Markdown table, and writes capture-sampled.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import logitless as ll
from benchmarks.bench.clocks import device_time, wall_times
from logitless.cli import machine
from logitless.cli.report import table
from logitless.core.capture import uniforms_of

AIM = 3.0  # times one reading of the logits
POWER = 1.5  # p of the id of rank r is proportional to r^-POWER


def logits_of(kind: str, rows: int, vocab: int, device: str) -> Tensor:
    """Returns logits (rows, vocab) in bf16, computed in chunks of 256 rows."""
    random = torch.Generator(device).manual_seed(0)
    out = torch.empty((rows, vocab), device=device, dtype=torch.bfloat16)
    for chunk in out.split(256):
        if kind == "flat":
            chunk.copy_(torch.randn(chunk.shape, generator=random, device=device))
        else:
            ranks = torch.rand(chunk.shape, generator=random, device=device) * vocab + 1
            chunk.copy_(ranks.log_().mul_(-POWER))
    return out


def check(x: Tensor, n: int) -> float:
    """Raises if draws are wrong. Returns the mean number of distinct ids per row."""
    few = x[:64]
    seed = torch.Generator(x.device).manual_seed(1)
    found = ll.capture_sampled(few, n, generator=seed)
    seed.manual_seed(1)
    numbers = uniforms_of(few, n, seed)
    ends = torch.softmax(few.double(), -1).cumsum(-1)
    want = torch.searchsorted(ends, numbers, right=True)
    counts = torch.zeros(ends.shape, device=x.device).scatter_add_(
        1, want, torch.ones_like(want).float()
    )
    weights = torch.where(found.mask, found.logprobs.exp(), 0.0)
    got = torch.zeros(ends.shape, device=x.device).scatter_add_(1, found.ids, weights)
    differ = (got - counts / n).abs().sum().item() * n / 2  # draws that differ
    assert differ <= 0.002 * want.numel() + 1, f"{differ} of {want.numel()} draws differ"
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[:, 0]))

    row = x[:1].expand(4096, -1)  # the same row many times; the top ids have many draws
    found = ll.capture_sampled(row, n, generator=seed)
    weights = torch.where(found.mask, found.logprobs.double().exp(), 0.0)
    total = torch.zeros(x.shape[1], device=x.device, dtype=torch.float64)
    total.scatter_add_(0, found.ids.flatten(), weights.flatten())
    p = torch.softmax(x[0].double(), -1)
    draws = 4096 * n
    off = (total / 4096 - p).abs() / (p * (1 - p) / draws).sqrt()
    assert off[p * draws > 30].max() < 6, off[p * draws > 30].max()
    return found.mask.sum(-1).double().mean().item()


def multinomial(x: Tensor, n: int) -> Tensor:
    """Draws from the softmax of some rows at a time, because multinomial needs probabilities."""
    chunks = [torch.softmax(rows.float(), -1) for rows in x.split(1024)]
    return torch.cat([torch.multinomial(p, n, replacement=True) for p in chunks])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--draws", type=int, nargs="+", default=[50])
    parser.add_argument("--budget", type=float, default=300.0, help="milliseconds per call")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def time(run) -> float:
        if device == "cuda":
            return device_time(lambda: None, lambda _: run(), args.budget)
        return wall_times(device, [(lambda: None, lambda _: run())], args.budget)[0]

    rows = []
    for kind in ("zipf", "flat"):
        x = logits_of(kind, args.rows, args.vocab, device)
        reading = time(lambda x=x: ll.logsumexp(x))
        for n in args.draws:
            distinct = check(x, n)
            calls = {
                "one reading: ll.logsumexp": lambda x=x: ll.logsumexp(x),
                "torch.sum": lambda x=x: x.sum(-1),
                f"ll.capture_sampled, n = {n}": lambda x=x, n=n: ll.capture_sampled(x, n),
                f"ll.capture_topk, k = {n}": lambda x=x, n=n: ll.capture_topk(x, n),
                f"softmax and torch.multinomial, n = {n}": lambda x=x, n=n: multinomial(x, n),
            }
            for name, run in calls.items():
                ms = time(run)
                rows.append({
                    "logits": f"{kind}, {distinct:.1f} distinct ids", "call": name,
                    "time": f"{ms:.3f} ms", "readings": f"{ms / reading:.2f}",
                    "TB/s of one reading": f"{x.nbytes / ms * 1e-9:.2f}",
                })  # fmt: skip
    name = machine.device(device)["name"]
    about = f"{name}, torch {torch.__version__}, commit {machine.commit()}"
    text = f"# Sampled targets\n\n{about}; logits {args.rows:,} × {args.vocab:,} in bf16.\n\n"
    text += f"The target for n = 50 is {AIM:.0f} readings.\n\n{table(rows)}\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "capture-sampled.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
