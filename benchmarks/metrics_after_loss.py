"""Measures a trainer's metrics after the loss of a fused head, on a GPU.

    python -m benchmarks.metrics_after_loss [--shape 8192×4096×151936]

A step is the mean cross-entropy over lazy logits, forward and backward. "metrics" are the argmax,
and the entropy as TRL computes it in chunks, of all rows except the last. In the line "no scores",
the head is forgotten before each step, so every metric takes a GEMM, as in the first step. In the
line "scores", the metrics are read from the scores that the loss computed. The accuracy and the
mean entropy of both lines are compared before the timing. The output is Markdown.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import logitless as ll
from benchmarks.step_clock import time_and_memory
from logitless.cli import machine
from logitless.cli.report import table
from logitless.lazy import answers

BUDGET = 1500.0  # milliseconds of timing per line


def entropies(logits: Tensor, chunk: int) -> Tensor:
    """Returns the entropy of each row, by the code of TRL's entropy_from_logits."""
    found = []
    for part in logits.split(chunk):
        logp = F.log_softmax(part, dim=-1)
        found.append(-(torch.exp(logp) * logp).sum(-1))
    return torch.cat(found)


def step(head: nn.Module, hidden: Tensor, target: Tensor, chunk: int | None) -> list[Tensor]:
    """Runs one training step. Returns the metrics, or [] if `chunk` is None."""
    logits = head(hidden)
    loss = F.cross_entropy(logits, target)
    found = []
    if chunk is not None:
        with torch.no_grad():
            rows, labels = logits[:-1], target[:-1]
            accuracy = (rows.argmax(-1) == labels).float().mean()
            found = [accuracy, entropies(rows, chunk).float().mean()]
    loss.backward()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8192×4096×151936", help="rows×width×vocabulary")
    parser.add_argument("--chunk", type=int, default=128, help="TRL's rows per chunk of entropies")
    args = parser.parse_args()
    rows, width, vocab = map(int, args.shape.split("×"))
    torch.manual_seed(0)
    head = ll.nn.FusedHead(width, vocab, bias=False).cuda().bfloat16()
    hidden = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(vocab, (rows,), device="cuda")
    target[-1] = -100
    heads = answers._READ[True]

    def unscored(chunk: int | None) -> list[Tensor]:
        heads.discard(head)
        return step(head, hidden, target, chunk)

    def scored(chunk: int | None) -> list[Tensor]:
        heads.add(head)
        return step(head, hidden, target, chunk)

    for a, b in zip(scored(args.chunk), unscored(args.chunk), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    steps = {
        "loss": (unscored, None),
        "loss with scores that are not read": (scored, None),
        "loss and metrics, no scores": (unscored, args.chunk),
        "loss and metrics, scores": (scored, args.chunk),
    }
    lines = []
    for name, (function, chunk) in steps.items():
        ms, mib = time_and_memory(
            lambda function=function, chunk=chunk: function(chunk), (hidden, head.weight), BUDGET
        )
        lines.append({"step": name, "ms": f"{ms:.2f}", "MiB beyond the gradients": f"{mib:,.0f}"})
        print(*lines[-1].values(), sep=" | ", flush=True)
    versions = ", ".join(f"{name} {v}" for name, v in machine.versions().items() if v)
    print(f"\n{machine.device('cuda')['name']}; {versions}; {args.shape}, bf16\n")
    print(table(lines))


if __name__ == "__main__":
    main()
