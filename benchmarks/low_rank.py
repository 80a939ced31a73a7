"""Measures time and memory of cross-entropy over a head with a LoRA adapter, on a GPU.

    python -m benchmarks.low_rank                    the default sizes
    python -m benchmarks.low_rank --rows 4096        other sizes

Three ways are compared: logits in PyTorch, `LinearLogits(low_rank=...)`, and the head without an
adapter. The head without an adapter is a lower bound of the time. The weight is frozen, as in LoRA.
Before the timing, the results are checked against PyTorch in fp32.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

import logitless as ll


def tensors(rows: int, width: int, vocab: int, rank: int):
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape, scale):
        t = torch.randn(*shape, generator=g, device="cuda") * scale
        return t.bfloat16()

    hidden = normal(rows, width, scale=1.0).requires_grad_()
    weight = normal(vocab, width, scale=width**-0.5)
    a = normal(rank, width, scale=width**-0.5).requires_grad_()
    b = normal(vocab, rank, scale=0.1).requires_grad_()
    target = torch.randint(0, vocab, (rows,), generator=g, device="cuda")
    return hidden, weight, a, b, target


def plain(hidden, weight, a, b, target):
    return F.cross_entropy(
        (F.linear(hidden, weight) + F.linear(F.linear(hidden, a), b)).float(), target
    )


def low_rank(hidden, weight, a, b, target):
    return ll.cross_entropy(ll.LinearLogits(hidden, weight, low_rank=(hidden @ a.t(), b)), target)


def frozen(hidden, weight, a, b, target):
    return ll.cross_entropy(ll.LinearLogits(hidden, weight), target) + 0 * (a.sum() + b.sum())


def gradients(way, given):
    loss = way(*given)
    return [loss.detach(), *torch.autograd.grad(loss, (given[0], given[2], given[3]))]


def check(rank: int) -> None:
    given = tensors(512, 256, 5003, rank)
    exact = [t.detach().float().requires_grad_(t.requires_grad) for t in given[:4]]
    truth = gradients(plain, (*exact, given[4]))
    for t, near, got in zip(
        truth, gradients(plain, given), gradients(low_rank, given), strict=True
    ):
        floor = 2**-7 * t.abs().max()
        assert (got - t).abs().max() <= 2 * (near - t).abs().max() + floor


def measured_steps(step: Callable[[], object], runs: int = 10) -> tuple[float, float]:
    """Returns the median time in ms, and the peak memory in MiB beyond the input tensors."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() - before
    return sorted(times)[runs // 2], peak / 2**20


def sizes_given() -> argparse.Namespace:
    """Returns the sizes in the command line, and prints them with the machine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {vars(options)}, bf16")
    return options


def main() -> None:
    options = sizes_given()
    print("| rank | way | ms | MiB |\n|---|---|---|---|")
    for rank in (8, 13, 64):
        check(rank)
        given = tensors(options.rows, options.width, options.vocab, rank)
        for way in (plain, low_rank, frozen):
            time, memory = measured_steps(lambda way=way, given=given: gradients(way, given))
            print(f"| {rank} | {way.__name__} | {time:.1f} | {memory:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
