"""What a vocabulary over ranks costs on one GPU: the route, and an eighth of a head.

    python benchmarks/shard.py

1. The route: cross_entropy over logits by VocabShard, in a world of one process with NCCL, beside
   the plain call. At most 3 % more.
2. A simulated shard: a head of V/8 rows whose loss waits for nobody, with the states of seven other
   ranks given, beside an eighth of the whole head's time. At most 1.10 of it; the collectives come
   on top, as `logitless scale` counts them.

Medians of several runs, the two of a pair by turns. Without a GPU, small sizes on the CPU by gloo:
numbers of no meaning.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import logitless as ll
from logitless.cli.scale import GPUS, cost
from logitless.parallel import Alone

RANKS = 8


class Given(Alone):
    """One of several ranks, to whom the others' numbers are known."""

    def __init__(self, count: int):
        self.group, self.index, self.count = self, 0, count

    def gather(self, t: Tensor) -> Tensor:
        return t.detach().expand(self.count, *t.shape).contiguous()


def seconds(work: Callable[[], None], device: str, calls: int) -> float:
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls / 1e3


def compared(works: dict[str, Callable[[], None]], device: str, rounds: int, calls: int) -> dict:
    """Medians, in seconds, of works that take turns."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for i in range(rounds + 2):
        for name, work in works.items():
            took = seconds(work, device, calls)
            if i >= 2:  # after warming up
                found[name].append(took)
    return {name: statistics.median(times) for name, times in found.items()}


def differentiated(source: Callable[[], object], target: Tensor, leaves: list[Tensor]):
    def work() -> None:
        for leaf in leaves:
            leaf.grad = None
        ll.cross_entropy(source(), target).backward()  # pyright: ignore[reportArgumentType]

    return work


def route(rows: int, vocab: int, device: str, dtype: torch.dtype, how: tuple) -> None:
    x = torch.randn(rows, vocab, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(vocab, (rows,), device=device)
    found = compared(
        {
            "plain": differentiated(lambda: x, target, [x]),
            "VocabShard": differentiated(lambda: ll.VocabShard(x), target, [x]),
        },
        device, *how,
    )  # fmt: skip
    plain, shard = found["plain"], found["VocabShard"]
    print(f"cross_entropy, {rows:,} x {vocab:,} {str(dtype)[6:]}, forward + backward, ms:")
    print(f"  plain {1e3 * plain:.3f}  VocabShard, world of 1 {1e3 * shard:.3f}", end="")
    print(f"  ({shard / plain:.3f} x)")


def eighth(rows: int, vocab: int, width: int, device: str, dtype: torch.dtype, how: tuple) -> None:
    hidden = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, device=device, dtype=dtype).mul_(width**-0.5)
    part = weight[: vocab // RANKS].clone().requires_grad_()
    weight.requires_grad_()
    target = torch.randint(vocab, (rows,), device=device)
    ranks = Given(RANKS)
    found = compared(
        {
            "whole": differentiated(
                lambda: ll.LinearLogits(hidden, weight), target, [hidden, weight]
            ),
            "shard": differentiated(
                lambda: ll.VocabShard(ll.LinearLogits(hidden, part), ranks, vocab=vocab), target,
                [hidden, part],
            ),
        },
        device, *how,
    )  # fmt: skip
    share, shard = found["whole"] / RANKS, found["shard"]
    wire = cost(rows, vocab, width, RANKS, GPUS["h200"])
    print(f"head, {rows:,} x {width:,} x {vocab:,} {str(dtype)[6:]}, forward + backward, ms:")
    print(f"  whole / {RANKS} {1e3 * share:.3f}  a shard {1e3 * shard:.3f}", end="")
    print(f"  ({shard / share:.3f} x)")
    print(f"  collectives by the model: {1e3 * (wire.gather + wire.reduce):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29655")
    dist.init_process_group("nccl" if gpu else "gloo", rank=0, world_size=1)
    how = (args.rounds, 10 if gpu else 1)
    print(torch.cuda.get_device_name() if gpu else "cpu", "torch", torch.__version__)
    route(*((8192, 128256) if gpu else (64, 1000)), device, dtype, how)
    eighth(*((8192, 128256, 4096) if gpu else (64, 1000, 32)), device, dtype, how)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
