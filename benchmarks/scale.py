"""Computes the cost of a head and its loss on each rank of a tensor-parallel group.

    python -m benchmarks.scale --tokens 8192 --vocab 128256 --hidden 4096 --tp 8

The cost is computed, not measured. The command counts bytes and FLOPs, divides the counts by
speeds, and adds a latency for each collective. Some speeds were measured on one H200
(benchmarks/results). The other speeds are published or assumed. Comments in the source code state
where each speed comes from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    """Speeds of a GPU and its links."""

    flops: float  # FLOP per second that the three GEMMs of a bf16 head reach
    copy: float  # bandwidth in bytes per second, counting reads and writes
    link: float  # bytes per second in each direction, within a node
    network: float  # bytes per second in each direction, between nodes
    node: int  # GPUs in a node
    latency: float  # seconds that an empty collective takes


# NVLink of the 4th generation (18 links) moves 900 GB/s per GPU, as the sum of both directions. A
# node of 8 GPUs has ten InfiniBand adapters of 400 Gb/s. NVIDIA states these speeds of NVLink and
# InfiniBand in the system description "H200-SXM-141GBx8_TRT_MaxQ" (MLCommons, MLPerf Inference v4.1
# results). NVLink of the 5th generation moves 1.8 TB/s according to "NVLink and NVLink Switch"
# (NVIDIA, product page).
NVLINK_4, NVLINK_5, NDR = 900e9 / 2, 1800e9 / 2, 400e9 / 8
LATENCY = 15e-6  # assumed; nccl-tests measures similar times within a node

# Each pair holds the FLOP/s and the bytes/s of a GPU. The speeds of an H200 were measured
# (docs/heads.md, docs/performance.md). The peak speeds of dense bf16 GEMMs and of HBM are from
# "When Is It Worth Upgrading GPUs?" in the book "Machine Learning Engineering" by Stas Bekman.
H200, H200_PEAK, B200_PEAK = (674e12, 4.23e12), (989e12, 4.8e12), (2250e12, 8.0e12)
SHARE = H200[0] / H200_PEAK[0], H200[1] / H200_PEAK[1]
# No B200 was measured. We assume that a B200 reaches the same fractions of its peaks as an H200.
B200 = SHARE[0] * B200_PEAK[0], SHARE[1] * B200_PEAK[1]

GPUS = {
    "h200": Gpu(*H200, NVLINK_4, NDR, 8, LATENCY),
    "b200": Gpu(*B200, NVLINK_5, NDR, 8, LATENCY),
}

STATE = 3  # each rank sends 3 fp32 numbers per row in the all-gather of cross-entropy
BYTES, FULL = 2, 4  # bytes of a bf16 number and of an fp32 number
WORKSPACE = 1 << 30


class Cost(NamedTuple):
    """Time in seconds and memory in bytes of forward and backward on one rank."""

    tp: int
    products: float  # seconds for the three GEMMs
    loss: float  # seconds for reading and writing logits
    gather: float  # seconds for the all-gather of statistics
    reduce: float  # seconds for the all-reduce of `d_hidden`, assuming no overlap with other work
    weight: float  # bytes of one rank's shard of the weight, plus the gradient of this shard
    hidden: float  # bytes of the hidden states of all tokens, plus their gradient
    logits: float  # bytes of logits in memory at once

    @property
    def limit(self) -> str:
        names = ("products", "loss", "gather", "reduce")
        return max(names, key=lambda name: getattr(self, name))

    @property
    def memory(self) -> float:
        return self.weight + self.hidden + self.logits

    @property
    def time(self) -> float:
        return self.products + self.loss + self.gather + self.reduce


def cost(tokens: int, vocab: int, hidden: int, tp: int, gpu: Gpu) -> Cost:
    columns = -(-vocab // tp)
    logits = tokens * columns * BYTES
    link = gpu.link if tp <= gpu.node else gpu.network
    latency = 0.0 if tp == 1 else gpu.latency
    rows = tokens * hidden * BYTES
    return Cost(
        tp,
        products=3 * 2.0 * tokens * hidden * columns / gpu.flops,
        loss=3 * logits / gpu.copy,  # two reads of the logits and one write of their gradient
        gather=latency + (tp - 1) * tokens * STATE * FULL / link,
        reduce=latency + 2 * (tp - 1) / tp * rows / link,
        weight=2.0 * columns * hidden * BYTES,
        hidden=2.0 * rows,
        logits=min(logits, WORKSPACE),
    )


def sizes(most: int) -> list[int]:
    """Returns the powers of two up to `most`, and `most` itself."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return powers if powers[-1] == most else [*powers, most]


def short(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def table(tokens: int, vocab: int, hidden: int, tps: list[int], gpu: Gpu) -> str:
    """Returns a Markdown table of the costs per rank, in milliseconds and GiB."""
    times = "products | loss | gather | d_hidden | all, ms"
    lines = [
        f"| TP | {times} | limit | weight | hidden | logits | all, GiB |",
        "|" + " --- |" * 11,
    ]
    for tp in tps:
        c = cost(tokens, vocab, hidden, tp, gpu)
        times = (c.products, c.loss, c.gather, c.reduce, c.time)
        memory = (c.weight, c.hidden, c.logits, c.memory)
        ms = " | ".join(short(1e3 * t) for t in times)
        gib = " | ".join(short(b / 2**30) for b in memory)
        limit = "d_hidden" if c.limit == "reduce" else c.limit
        lines.append(f"| {tp} | {ms} | {limit} | {gib} |")
    return "\n".join(lines)


def plot(path: Path, tokens: int, vocab: int, hidden: int, tps: list[int], gpu: Gpu) -> None:
    """Draws a stacked bar of milliseconds for each number of ranks.

    The label of a bar is its total.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    costs = [cost(tokens, vocab, hidden, tp, gpu) for tp in tps]
    names, bottom = [f"{tp:,}" for tp in tps], [0.0] * len(tps)
    for name, label in (
        ("products", "three GEMMs"), ("loss", "loss over logits"),
        ("gather", "all-gather of statistics"), ("reduce", "all-reduce of d_hidden"),
    ):  # fmt: skip
        ms = [1e3 * getattr(c, name) for c in costs]
        bars = axes.bar(names, ms, bottom=bottom, label=label)
        bottom = [low + high for low, high in zip(bottom, ms, strict=True)]
    axes.bar_label(bars, [short(ms) for ms in bottom], padding=2)
    axes.set_ylim(0, 1.1 * max(bottom))
    axes.set(
        xlabel="ranks that share the head", ylabel="ms per step and rank",
        title="Forward + backward of cross-entropy over a head: computed, not measured\n"
        f"{tokens:,} tokens, vocabulary {vocab:,}, width {hidden:,}",
    )  # fmt: skip
    axes.title.set_fontsize(10)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step of the group")
    parser.add_argument("--vocab", type=int, default=128256, help="size of the vocabulary")
    parser.add_argument("--hidden", type=int, default=4096, help="width of the hidden states")
    parser.add_argument(
        "--tp", type=int, default=8, help="largest number of ranks that share the head"
    )
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--plot", type=Path, help="file for a plot of the costs")
    args = parser.parse_args(argv)
    for name in ("tokens", "vocab", "hidden", "tp"):
        if getattr(args, name) < 1:
            raise SystemExit(f"--{name} must be at least 1, got {getattr(args, name)}.")
    shape, gpu = (args.tokens, args.vocab, args.hidden), GPUS[args.gpu]
    print(
        "Computed, not measured: the cost of forward and backward on each of TP ranks, for"
        f" {args.tokens:,} tokens, vocabulary {args.vocab:,}, width {args.hidden:,}, bf16,"
        f" {args.gpu.upper()}\n",
        file=sys.stderr,  # stdout contains only the table
    )
    print(table(*shape, sizes(args.tp), gpu))
    if args.plot is not None:
        plot(args.plot, *shape, sizes(args.tp), gpu)


if __name__ == "__main__":
    main()
