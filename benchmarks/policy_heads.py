"""Measures policy gradients and preference losses over a head, beside TRL and Liger, on a GPU.

    python -m benchmarks.policy_heads [--shape 8×1024×4096×128256] [--rivals .peers] [--only DPO]

The shape is sequences × tokens × width × vocabulary; DPO pairs the first half of the sequences with
the second. "frozen" is a weight that needs no gradient, as with LoRA. Each contender's loss and
gradients are compared with fp64 on a small shape before the timing. The times are for forward and
backward in bf16; "GEMMs" is the time in units of one GEMM over all logits, measured in the same
run. The output is Markdown.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll
from benchmarks.bench import clocks
from benchmarks.step_clock import time_and_memory
from logitless.cli import machine
from logitless.cli.report import table

CHECKED = (8, 64, 256, 5000)
BUDGET = 700.0  # milliseconds of timing per contender
BETA = 0.1
HALVES = ("the formula", "Liger's chunked DPO")  # also timed with half of the rows ignored


class Batch(NamedTuple):
    hidden: Tensor  # (B, T, D)
    weight: Tensor  # (V, D)
    target: Tensor  # (B, T)
    old: Tensor  # (B, T), log-probabilities of the sampling or the reference model
    advantage: Tensor  # (B, 1)


Loss = Callable[[Batch], Tensor]


def clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def grpo(logprob: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    return clipped((logprob - old).exp(), advantage)


def gspo(logprob: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    return clipped((logprob - old).mean(-1).exp(), advantage.squeeze(-1))


def dpo(logprob: Tensor, old: Tensor) -> Tensor:
    """The losses of the pairs. The first dimension is (chosen, rejected)."""
    chosen, rejected = (logprob - old).sum(-1)
    return -F.logsigmoid(BETA * (chosen - rejected))


def pairs(t: Tensor) -> Tensor:
    return t.view(2, -1, *t.shape[1:])


def from_logprobs(kind: str, batch: Batch, logprob: Tensor) -> Tensor:
    """The loss, in PyTorch, from log-probabilities (B, T)."""
    if kind == "GRPO":
        rows = grpo(logprob, batch.old, batch.advantage)
        return rows.sum() / (batch.target != -100).sum()
    if kind == "GSPO":
        return gspo(logprob, batch.old, batch.advantage).mean()
    return dpo(pairs(logprob), pairs(batch.old)).mean()


def in_pytorch(kind: str) -> Loss:
    def loss(batch: Batch) -> Tensor:
        logp = F.linear(batch.hidden, batch.weight).log_softmax(-1)
        picked = logp.gather(-1, batch.target.clamp(0).unsqueeze(-1)).squeeze(-1)
        return from_logprobs(kind, batch, torch.where(batch.target == -100, 0.0, picked))

    return loss


def by_logprobs(kind: str, score: Callable[..., Tensor], **options) -> Loss:
    def loss(batch: Batch) -> Tensor:
        logits = ll.LinearLogits(batch.hidden, batch.weight, **options)
        return from_logprobs(kind, batch, score(logits, batch.target))

    return loss


def scores(logits, target) -> Tensor:
    return ll.score(logits, target).logprob


def one_score(logits, target) -> Tensor:
    return ll.score(logits, target, gradient=("logprob",)).logprob


def by_formula(kind: str) -> Loss:
    def loss(batch: Batch) -> Tensor:
        hidden, target, old = batch.hidden, batch.target, batch.old
        if kind == "DPO":
            hidden, target, old = pairs(hidden), pairs(target), pairs(old)
        logits = ll.LinearLogits(hidden, batch.weight)
        if kind == "DPO":
            formula = lambda stats, old: dpo(stats.logprob, old)  # noqa: E731
            return ll.group_loss(formula, logits, target, groups=1, rows=(old,))
        if kind == "GSPO":
            formula = lambda stats, *rows: gspo(stats.logprob, *rows)  # noqa: E731
            return ll.group_loss(formula, logits, target, rows=(old, batch.advantage))
        formula = lambda stats, *rows: grpo(stats.logprob, *rows)  # noqa: E731
        return ll.row_loss(formula, logits, target, rows=(old, batch.advantage.expand_as(old)))

    return loss


def trl(kind: str) -> Loss:
    function = importlib.import_module("trl_kernels.chunked_logprob").ChunkedLogProbFunction

    def loss(batch: Batch) -> Tensor:
        hidden, target = batch.hidden.flatten(0, 1), batch.target.flatten()
        logprob, *_ = function.apply(
            hidden, batch.weight, None, target, 1.0, 32768, None, 1.0, ("entropy",)
        )
        return from_logprobs(kind, batch, logprob.view(batch.target.shape))

    return loss


def liger_dpo(batch: Batch) -> Tensor:
    """Liger adds reference log-probabilities of whole sequences in its own way, so they are 0."""
    module = importlib.import_module("liger_kernel.chunked_loss")
    function = module.LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=False)
    return function(batch.weight, batch.hidden, batch.target)[0]


def contenders(kept: int) -> dict[tuple[str, str], Loss]:
    """The losses by (kind, way). `kept` is a workspace that holds all logits."""
    found: dict[tuple[str, str], Loss] = {}
    for kind in ("GRPO", "DPO", "GSPO"):
        found[kind, "TRL's head, then PyTorch"] = trl(kind)
        if kind == "DPO":
            found[kind, "Liger's chunked DPO"] = liger_dpo
        found[kind, "score, then PyTorch"] = by_logprobs(kind, scores)
        found[kind, "score(gradient=), then PyTorch"] = by_logprobs(kind, one_score)
        found[kind, "score, a workspace for all logits"] = by_logprobs(kind, scores, workspace=kept)
        found[kind, "the formula"] = by_formula(kind)
    found["log-probabilities", "token_logprobs"] = by_logprobs("GRPO", ll.token_logprobs)
    found["log-probabilities", "a workspace for all logits"] = by_logprobs(
        "GRPO", ll.token_logprobs, workspace=kept
    )
    return found


def inputs(shape: tuple[int, ...], frozen: bool, way: str, ignored: float = 0.0) -> Batch:
    torch.manual_seed(0)
    sequences, tokens, width, vocab = shape
    hidden = torch.randn(sequences, tokens, width, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocab, width, device="cuda") / width**0.5).bfloat16()
    target = torch.randint(vocab, (sequences, tokens), device="cuda")
    target[:, tokens - int(ignored * tokens) :] = -100
    logprob = torch.log(torch.tensor(1.0 / vocab)).item() - 0.5
    old = logprob + 0.1 * torch.randn(sequences, tokens, device="cuda")
    old = torch.where(target == -100, 0.0, old)
    if way.startswith("Liger"):
        old = torch.zeros_like(old)
    advantage = torch.randn(sequences, 1, device="cuda")
    return Batch(hidden, weight.requires_grad_(not frozen), target, old, advantage)


def error_of(loss: Loss, kind: str, way: str, frozen: bool) -> float:
    """Returns the largest relative error of the gradients against fp64."""
    batch = inputs(CHECKED, frozen, way)
    exact = batch._replace(
        hidden=batch.hidden.detach().double().requires_grad_(),
        weight=batch.weight.detach().double().requires_grad_(not frozen),
        old=batch.old.double(),
    )
    kind = "GRPO" if kind == "log-probabilities" else kind
    results = []
    for run, given in ((loss, batch), (in_pytorch(kind), exact)):
        leaves = [t for t in (given.hidden, given.weight) if t.requires_grad]
        results.append(torch.autograd.grad(run(given), leaves))
    pairs = zip(*results, strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def measured(loss: Loss, batch: Batch) -> tuple[float, float]:
    """Returns the milliseconds of forward and backward, and the peak MiB beyond the gradients."""
    leaves = tuple(t for t in (batch.hidden, batch.weight) if t.requires_grad)
    return time_and_memory(lambda: loss(batch).backward(), leaves, BUDGET)


def gemm_time(shape: tuple[int, ...]) -> float:
    """The milliseconds of one GEMM over all logits."""
    batch = inputs(shape, True, "")
    hidden, weight = batch.hidden.detach().flatten(0, 1), batch.weight
    out = torch.empty(len(hidden), len(weight), device="cuda", dtype=torch.bfloat16)
    return clocks.device_time(lambda: None, lambda _: torch.mm(hidden, weight.T, out=out), BUDGET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8×1024×4096×128256")
    parser.add_argument("--rivals", default=".peers", help="folder of the rivals' packages")
    parser.add_argument("--only", default="", help="only contenders with this text in their name")
    args = parser.parse_args()
    sys.path.insert(0, args.rivals)
    shape = tuple(map(int, args.shape.split("×")))
    gemm, lines = gemm_time(shape), []
    kept = shape[0] * shape[1] * -(-shape[3] // 8) * 8 * 2
    for (kind, way), loss in contenders(kept).items():
        for frozen, ignored in ((False, 0.0), (True, 0.0), (False, 0.5)):
            name = f"{kind}, {way}"
            if args.only not in name or (
                ignored and way not in ("the formula", "Liger's chunked DPO")
            ):
                continue
            line = {
                "loss": kind, "way": way + (", half of the rows ignored" if ignored else ""),
                "head": "frozen" if frozen else "trained", "error": "", "ms": "", "GEMMs": "",
                "MiB beyond the gradients": "",
            }  # fmt: skip
            try:
                line["error"] = f"{error_of(loss, kind, way, frozen):.1e}"
                ms, mib = measured(loss, inputs(shape, frozen, way, ignored))
                line |= {"ms": f"{ms:.1f}", "GEMMs": f"{ms / gemm:.2f}"}
                line["MiB beyond the gradients"] = f"{mib:,.0f}"
            except Exception as error:  # a rival can raise anything
                line["error"] = f"{type(error).__name__}: {error}"[:60]
            lines.append(line)
            print(*line.values(), sep=" | ", flush=True)
            torch.cuda.empty_cache()
    versions = ", ".join(f"{name} {v}" for name, v in machine.versions().items() if v)
    where = machine.device("cuda")["name"]
    print(f"\n{where}; {versions}; {args.shape}, bf16; one GEMM takes {gemm:.2f} ms\n")
    print(table(lines))


if __name__ == "__main__":
    main()
