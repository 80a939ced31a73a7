"""Measures time and memory of cross-entropy over a head with a DoRA adapter, on a GPU.

    python -m benchmarks.dora                    the default sizes
    python -m benchmarks.dora --rows 4096        other sizes

Three ways are compared, with and without dropout: the formula of PEFT with materialised logits, the
products that a fused head computes (logitless/lazy/dora.py), and LoRA by `LinearLogits(low_rank=)`.
LoRA is a lower bound of the time. PEFT need not be installed. The weight is frozen. Before the
timing, the results without dropout are checked against PEFT's formula in fp32.
"""

import torch
import torch.nn.functional as F

import logitless as ll
from benchmarks.low_rank import measured_steps, sizes_given, tensors
from logitless.lazy.dora import row_norms, times_rows

RANK, DROPOUT = 16, 0.1


def given_for(rows: int, width: int, vocab: int) -> tuple:
    hidden, weight, a, b, target = tensors(rows, width, vocab, RANK)
    norms = row_norms(weight, a, b, 1.0)
    magnitude = (norms * (1 + 0.1 * torch.rand_like(norms))).bfloat16().requires_grad_()
    return hidden, weight, a, b, magnitude, target


def peft(hidden, weight, a, b, magnitude, target, dropout=0.0):
    """The operations of PEFT's DoraLinearLayer.forward."""
    result = F.linear(hidden, weight)
    x = F.dropout(hidden, dropout) if dropout else hidden
    eye = torch.eye(weight.shape[1], device=weight.device, dtype=weight.dtype)
    whole = weight + F.linear(F.linear(eye, a), b).T.detach()
    norms = torch.linalg.norm(whole, dim=1).to(weight.dtype)
    scale = (magnitude / norms.detach()).view(1, -1)
    base = F.linear(x, weight) if dropout else result
    logits = result + ((scale - 1) * base + scale * F.linear(F.linear(x, a), b))
    return F.cross_entropy(logits.float(), target)


def fused(hidden, weight, a, b, magnitude, target, dropout=0.0):
    """The head that a fused DoRA layer computes."""
    norms = row_norms(weight, a, b, 1.0).bfloat16()
    scale = magnitude.float() / norms.float()
    if not dropout:
        rows, pair = times_rows(weight, scale), (F.linear(hidden, a), times_rows(b, scale))
        return ll.cross_entropy(ll.LinearLogits(hidden, rows, low_rank=pair), target)
    x = F.dropout(hidden, dropout)
    rows = torch.cat([times_rows(weight, scale - 1), times_rows(b, scale)], 1)
    both = torch.cat([x, F.linear(x, a)], -1)
    return ll.cross_entropy(ll.LinearLogits(both, rows, low_rank=(hidden, weight)), target)


def lora(hidden, weight, a, b, magnitude, target, dropout=0.0):
    x = F.dropout(hidden, dropout) if dropout else hidden
    logits = ll.LinearLogits(hidden, weight, low_rank=(F.linear(x, a), b))
    return ll.cross_entropy(logits, target) + 0 * magnitude.sum()


def gradients(way, given, dropout=0.0):
    loss = way(*given, dropout)
    wanted = [t for t in given if t.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, wanted)]


def check() -> None:
    given = given_for(512, 256, 5003)
    exact = [t.detach().float().requires_grad_(t.requires_grad) for t in given[:5]]
    truth = gradients(peft, (*exact, given[5]))
    for t, near, got in zip(truth, gradients(peft, given), gradients(fused, given), strict=True):
        floor = 2**-7 * t.abs().max()
        assert (got - t).abs().max() <= 2 * (near - t).abs().max() + floor


def main() -> None:
    options = sizes_given()
    print("| dropout | way | ms | MiB |\n|---|---|---|---|")
    check()
    given = given_for(options.rows, options.width, options.vocab)
    for dropout in (0.0, DROPOUT):
        for way in (peft, fused, lora):
            time, memory = measured_steps(lambda way=way, p=dropout: gradients(way, given, p))
            print(f"| {dropout} | {way.__name__} | {time:.1f} | {memory:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
