"""Measures a head's loss with and without metrics, beside TRL's and Liger's heads, on a GPU.

    python -m benchmarks.loss_and_scores [--shape 8192×4096×151936] [--rivals .peers]

"loss" is the mean cross-entropy. "loss and scores" also returns log-probability, entropy,
logsumexp and argmax of each row. "log-probabilities" is the step of a policy gradient: the
log-probability of each row with a gradient, and the entropy without a gradient. Every contender's
loss and gradients are compared with fp64 on a small shape before the timing. The times are for
forward and backward in bf16. The output is Markdown.
"""

import argparse
import importlib
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll
from benchmarks.step_clock import time_and_memory
from logitless.cli import machine
from logitless.cli.report import table

WORKSPACE = 1 << 30
CHECKED = (512, 256, 5000)
BUDGET = 1500.0  # milliseconds of timing per contender

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def head(hidden: Tensor, weight: Tensor) -> ll.LinearLogits:
    return ll.LinearLogits(hidden, weight, workspace=WORKSPACE)


def policy(logprob: Tensor) -> Tensor:
    """Returns minus the mean of log-probabilities, with a different weight for each row."""
    return -(logprob * torch.linspace(0.5, 1.5, len(logprob), device=logprob.device)).mean()


def ours_scored(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    scores = ll.score(head(hidden, weight), target)
    return policy(scores.logprob) + 0 * scores.entropy.detach().sum()


def trl(chunk: int, outputs: tuple[str, ...], reduce: Callable[[Tensor], Tensor]) -> Loss:
    function = importlib.import_module("trl_kernels.chunked_logprob").ChunkedLogProbFunction

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logprob, *_ = function.apply(hidden, weight, None, target, 1.0, chunk, None, 1.0, outputs)
        return reduce(logprob)

    return loss


def liger(**options) -> Loss:
    module = importlib.import_module("liger_kernel.transformers")
    function = module.LigerFusedLinearCrossEntropyLoss(**options)

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        result = function(weight, hidden, target)
        return result if isinstance(result, Tensor) else result.loss

    return loss


def contenders(chunk: int) -> dict[str, tuple[Loss, Loss]]:
    """Returns a dict from a name to (measured loss, the same loss in PyTorch)."""

    def mean(h, w, t):
        return F.cross_entropy(F.linear(h, w), t)

    def rows(h, w, t):
        return policy(-F.cross_entropy(F.linear(h, w), t, reduction="none"))

    return {
        "loss, ours": (lambda h, w, t: ll.cross_entropy(head(h, w), t), mean),
        "loss and scores, ours": (
            lambda h, w, t: ll.cross_entropy_and_scores(head(h, w), t)[0],
            mean,
        ),
        "loss, entropy and accuracy, TRL": (
            trl(chunk, ("entropy", "is_top1"), lambda x: -x.mean()),
            mean,
        ),
        "loss, Liger": (liger(), mean),
        "loss and accuracy, Liger": (liger(return_token_accuracy=True), mean),
        "log-probabilities and entropy, ours": (ours_scored, rows),
        "log-probabilities and entropy, TRL": (trl(chunk, ("entropy",), policy), rows),
    }


def inputs(rows: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda").bfloat16()
    weight = (torch.randn(vocab, width, device="cuda") / width**0.5).bfloat16()
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(vocab, (rows,)).cuda()


def error_of(loss: Loss, exact: Loss) -> float:
    """Returns the largest relative error of the loss and its gradients against fp64."""
    hidden, weight, target = inputs(*CHECKED)
    found = loss(hidden, weight, target)
    gradients = torch.autograd.grad(found, (hidden, weight))
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    right = exact(leaves[0], leaves[1], target)
    truth = (right, *torch.autograd.grad(right, leaves))
    pairs = zip((found, *gradients), truth, strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def measured(loss: Loss, shape: tuple[int, int, int]) -> tuple[float, float]:
    """Returns the milliseconds of forward and backward, and the peak MiB beyond the gradients."""
    hidden, weight, target = inputs(*shape)
    leaves = (hidden, weight)
    return time_and_memory(lambda: loss(hidden, weight, target).backward(), leaves, BUDGET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8192×4096×151936", help="rows×width×vocabulary")
    parser.add_argument("--rivals", default=".peers", help="folder of the rivals' packages")
    parser.add_argument("--chunk", type=int, default=32768, help="TRL's chunk of the vocabulary")
    args = parser.parse_args()
    sys.path.insert(0, args.rivals)
    rows, width, vocab = map(int, args.shape.split("×"))
    lines = []
    for name, (loss, exact) in contenders(args.chunk).items():
        line = {"contender": name, "error": "", "ms": "", "MiB beyond the gradients": ""}
        try:
            line["error"] = f"{error_of(loss, exact):.1e}"
            ms, mib = measured(loss, (rows, width, vocab))
            line |= {"ms": f"{ms:.2f}", "MiB beyond the gradients": f"{mib:,.0f}"}
        except Exception as error:  # a rival can raise anything
            line["error"] = f"{type(error).__name__}: {error}"[:60]
        lines.append(line)
        print(*line.values(), sep=" | ", flush=True)
    versions = ", ".join(f"{name} {v}" for name, v in machine.versions().items() if v)
    print(f"\n{machine.device('cuda')['name']}; {versions}; {args.shape}, bf16, workspace 1 GiB\n")
    print(table(lines))


if __name__ == "__main__":
    main()
