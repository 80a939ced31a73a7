"""Measures the head of TRL's trainers, with and without `ll.hf.use_in_trl`, on a GPU.

    python -m benchmarks.trl_head [--shape 8192×4096×128256] [--rivals .peers]

"SFT" computes the mean loss and its gradients, the entropy and the accuracy. "GRPO" computes a
weighted mean of log-probabilities and its gradients, and the entropy without a gradient. There are
three heads:

- "ours": the function that TRL's trainers call after `use_in_trl` (integrations/trl_statistics.py).
  "Ours, in backward" computes the gradients of GRPO in backward, without a rehearsal of the loss.

- "TRL": TRL's own function. This head is measured if TRL is installed, or if the folder --rivals
  has a package trl_kernels, which holds TRL's folder `kernels`.

- "chunks in PyTorch": a plain loop of PyTorch over chunks of rows, under torch.utils.checkpoint.
  This head is not TRL's code. It stands for trainers without a fused head.

Every head's results and gradients are compared with fp64 on a small shape before the timing. The
times are for forward and backward in bf16. Each head is timed for 1.5 s. The output is Markdown.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.step_clock import time_and_memory
from logitless.cli import machine
from logitless.cli.report import table
from logitless.integrations.token_gradients import Ways
from logitless.integrations.trl_statistics import Call, token_statistics

CHECKED = (512, 256, 5000)
BUDGET = 1500.0  # milliseconds of timing per head
ROWS = 1024  # rows per chunk of the head in PyTorch
COLUMNS = 32768  # columns per tile of TRL's head
FROZEN = "GRPO, frozen head"  # as with LoRA
BOUND = 2e-2  # the largest relative error of bf16


class Results(NamedTuple):
    logprob: Tensor  # (N,), with a gradient
    entropy: Tensor  # (N,)
    right: Tensor | None = None  # (N,), whether the target is the argmax


Head = Callable[[Tensor, Tensor, Tensor], Results]


def ours(way: str, outputs: tuple[str, ...]) -> Head:
    step = SimpleNamespace(loss=lambda logprob, *_: grpo(logprob.flatten()[1:]))

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> Results:
        # On a GPU, TRL passes only the tokens that have a label.
        counts = torch.arange(len(hidden) + 1, device=hidden.device)[None] > 0
        call = Call({}, Ways(way), counts, step)
        given = (hidden, weight, None, target, 1.0, COLUMNS, None, 1.0, outputs)
        logprob, entropy, _, _, right = token_statistics(call, *given)
        return Results(logprob, entropy, right)  # type: ignore

    return head


def of_trl(outputs: tuple[str, ...]) -> Head | None:
    """Returns TRL's own head, or None if TRL is not installed."""
    for name in ("trl.kernels.chunked_logprob", "trl_kernels.chunked_logprob"):
        try:
            function = importlib.import_module(name).ChunkedLogProbFunction
        except ImportError:
            continue

        def head(hidden: Tensor, weight: Tensor, target: Tensor, function=function) -> Results:
            found = function.apply(hidden, weight, None, target, 1.0, COLUMNS, None, 1.0, outputs)
            return Results(found[0], found[1], found[4])

        return head
    return None


def in_chunks(hidden: Tensor, weight: Tensor, target: Tensor) -> Results:
    """Computes the textbook formulas in chunks of rows. Backward recomputes each chunk."""

    def some_rows(h: Tensor, t: Tensor):
        logp = F.linear(h, weight).float().log_softmax(-1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
            right = logp.argmax(-1) == t
        return logp.gather(-1, t[:, None])[:, 0], entropy, right

    chunks = zip(hidden.split(ROWS), target.split(ROWS), strict=True)
    parts = [checkpoint(some_rows, h, t, use_reentrant=False) for h, t in chunks]
    return Results(*(torch.cat(part) for part in zip(*parts, strict=True)))


def sft(logprob: Tensor) -> Tensor:
    return -logprob.sum() / len(logprob)


def grpo(logprob: Tensor) -> Tensor:
    weights = torch.linspace(-0.5, 1.5, len(logprob), device=logprob.device)
    return -(logprob * weights).sum() / len(logprob)


def contenders() -> dict[tuple[str, str], tuple[Head, Callable[[Tensor], Tensor]]]:
    """Returns a dict from (step, name of the head) to (head, loss of the step)."""
    wants = ("log_probs", "entropy", "is_top1")
    found = {
        ("SFT", "ours"): (ours("sum", wants), sft),
        ("SFT", "TRL"): (of_trl(wants), sft),
        ("SFT", "chunks in PyTorch"): (in_chunks, sft),
        ("GRPO", "ours"): (ours("rows", wants[:2]), grpo),
        ("GRPO", "ours, in backward"): (ours("statistics", wants[:2]), grpo),
        ("GRPO", "TRL"): (of_trl(wants[:2]), grpo),
        ("GRPO", "chunks in PyTorch"): (in_chunks, grpo),
        (FROZEN, "ours"): (ours("rows", wants[:2]), grpo),
        (FROZEN, "TRL"): (of_trl(wants[:2]), grpo),
    }
    return {name: (head, loss) for name, (head, loss) in found.items() if head is not None}


def inputs(rows: int, width: int, vocab: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=device).bfloat16()
    weight = (torch.randn(vocab, width, device=device) / width**0.5).bfloat16()
    target = torch.randint(vocab, (rows,), device=device)
    target[: CHECKED[0] // 2] = F.linear(hidden[: CHECKED[0] // 2], weight).argmax(-1)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def error_of(head: Head, loss: Callable[[Tensor], Tensor], device: str) -> float:
    """Returns the largest relative error of loss, gradients, entropy and accuracy against fp64."""
    hidden, weight, target = inputs(*CHECKED, device)
    found = head(hidden, weight, target)
    value = loss(found.logprob)
    got = [value, *torch.autograd.grad(value, (hidden, weight)), found.entropy]
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logp = F.linear(*leaves).log_softmax(-1)
    right = loss(logp.gather(-1, target[:, None])[:, 0])
    want = [right, *torch.autograd.grad(right, leaves, retain_graph=True)]
    want.append(-(logp.exp() * logp).sum(-1))
    if found.right is not None:
        # Two logits of a row can be equal in bf16 and not in fp64.
        exact = F.linear(hidden, weight).argmax(-1) == target
        got, want = [*got, found.right.double().mean()], [*want, exact.double().mean()]
    pairs = zip(got, want, strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def measured(
    head: Head, loss: Callable, shape: tuple[int, ...], frozen: bool
) -> tuple[float, float]:
    """Returns the milliseconds of forward and backward, and the peak MiB beyond the gradients."""
    hidden, weight, target = inputs(*shape, "cuda")  # type: ignore
    weight.requires_grad_(not frozen)

    def step():
        found = head(hidden, weight, target)
        loss(found.logprob).backward()
        found.entropy.detach().sum()
        if found.right is not None:
            found.right.sum()

    return time_and_memory(step, (hidden,) if frozen else (hidden, weight), BUDGET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8192×4096×128256", help="rows×width×vocabulary")
    parser.add_argument("--rivals", default=".peers", help="folder of the package trl_kernels")
    parser.add_argument("--check", action="store_true", help="compare the results, time nothing")
    args = parser.parse_args()
    sys.path.insert(0, args.rivals)
    if not (args.check or torch.cuda.is_available()):
        parser.error("timing needs a GPU. Pass --check to compare the results only.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = tuple(map(int, args.shape.split("×")))
    lines = []
    for (step, name), (head, loss) in contenders().items():
        error = error_of(head, loss, device)
        line = {"step": step, "head": name, "error": f"{error:.1e}"}
        if error > BOUND:
            raise SystemExit(f"{step}, {name}: the error {error:.1e} is above {BOUND}.")
        if not args.check:
            ms, mib = measured(head, loss, shape, step == FROZEN)
            line |= {"ms": f"{ms:.2f}", "MiB beyond the gradients": f"{mib:,.0f}"}
        lines.append(line)
        print(*line.values(), sep=" | ", flush=True)
    versions = ", ".join(f"{name} {v}" for name, v in machine.versions().items() if v)
    print(f"\n{machine.device(device)['name']}; {versions}; {args.shape}, bf16\n")
    print(table(lines))


if __name__ == "__main__":
    main()
