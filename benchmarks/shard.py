"""Measures, on one GPU, how much longer a loss takes if its vocabulary is sharded over ranks.

    python benchmarks/shard.py

1. The overhead of VocabShard. The script compares cross_entropy over a VocabShard with the plain
   call, in a group of one process with NCCL. The target is at most 1.03 times the plain time.

2. The time of one of eight shards of a head. The script compares the time of one shard with an
   eighth of the time of the whole head. The target is at most 1.10 times an eighth of the whole
   time. The statistics of the other seven ranks are copies in memory, so the times include no
   collectives. benchmarks/scale.py computes the times of collectives.

Times are medians of several batches of calls. Two calls that are compared alternate. Without a
GPU, the script runs small sizes on the CPU with gloo, and the numbers have no meaning.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import logitless as ll
from benchmarks.bench.clocks import wall_times
from benchmarks.scale import GPUS, cost
from logitless.parallel.ranks import Alone

RANKS = 8


class SimulatedRanks(Alone):
    """Simulates several ranks with one process. All ranks have copies of the same statistics."""

    def __init__(self, count: int):
        self.group, self.index, self.count = self, 0, count

    def gather(self, t: Tensor) -> Tensor:
        gathered = t.detach().expand(self.count, *t.shape).contiguous()
        if not t.is_floating_point():  # t is (width, start), and start differs between ranks
            gathered[:, 1] += gathered[:, 0] * torch.arange(self.count, device=t.device)
        return gathered


def compared(device: str, target: Tensor, *sources: tuple[Callable, list[Tensor]]) -> list[float]:
    """Milliseconds per call of cross_entropy, for several sources of logits.

    A source is a function that returns logits, together with its leaves.
    """
    calls, budget = (40, 1000.0) if device == "cuda" else (1, 0.0)  # calls per timed batch

    def work(source: Callable, leaves: list[Tensor]):
        def run(_) -> None:
            for _ in range(calls):
                for leaf in leaves:
                    leaf.grad = None
                ll.cross_entropy(source(), target).backward()

        run(None)  # compiles the kernels
        return lambda: None, run

    return [ms / calls for ms in wall_times(device, [work(*source) for source in sources], budget)]


def overhead(rows: int, vocab: int, device: str, dtype: torch.dtype) -> None:
    x = torch.randn(rows, vocab, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(vocab, (rows,), device=device)
    plain, shard = compared(device, target, (lambda: x, [x]), (lambda: ll.VocabShard(x), [x]))
    print(f"cross_entropy, {rows:,} x {vocab:,} {str(dtype)[6:]}, forward + backward, ms:")
    print(f"  plain {plain:.3f}  VocabShard, world of 1 {shard:.3f}  ({shard / plain:.3f} x)")


def eighth(rows: int, vocab: int, width: int, device: str, dtype: torch.dtype) -> None:
    hidden = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, device=device, dtype=dtype).mul_(width**-0.5)
    rows_of_rank = weight[: vocab // RANKS].clone().requires_grad_()
    weight.requires_grad_()
    target = torch.randint(vocab, (rows,), device=device)
    ranks = SimulatedRanks(RANKS)
    whole, shard = compared(
        device,
        target,
        (lambda: ll.LinearLogits(hidden, weight), [hidden, weight]),
        (
            lambda: ll.VocabShard(ll.LinearLogits(hidden, rows_of_rank), ranks, 0, vocab=vocab),
            [hidden, rows_of_rank],
        ),
    )
    share, model = whole / RANKS, cost(rows, vocab, width, RANKS, GPUS["h200"])
    print(f"head, {rows:,} x {width:,} x {vocab:,} {str(dtype)[6:]}, forward + backward, ms:")
    print(f"  whole / {RANKS} {share:.3f}  one shard {shard:.3f}  ({shard / share:.3f} x)")
    print(f"  collectives, computed: {1e3 * (model.gather + model.reduce):.3f}")


def main() -> None:
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29655")
    dist.init_process_group("nccl" if gpu else "gloo", rank=0, world_size=1)
    print(torch.cuda.get_device_name() if gpu else "cpu", "torch", torch.__version__)
    overhead(*((8192, 128256) if gpu else (64, 1000)), device, dtype)
    eighth(*((8192, 128256, 4096) if gpu else (64, 1000, 32)), device, dtype)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
