"""`logitless scale`: what a head and its loss cost on each rank of a tensor-parallel group.

A model of it, not a measurement: bytes, FLOPs and collectives are counted, and divided by speeds
that were measured on one GPU (benchmarks/results) or are the maker's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple


class Gpu(NamedTuple):
    flops: float  # of a head's three products in bf16, a second
    copy: float  # bytes read and written, a second
    link: float  # bytes a second and direction, within a node
    network: float  # the same between nodes
    node: int  # GPUs in a node
    latency: float  # seconds of a collective that says nothing


# Of both directions of NVLink together, a GPU: 900 GB/s (18 links of the 4th generation) and, in a
# node of 8, ten InfiniBand adapters of 400 Gb/s, by NVIDIA's system description
# "H200-SXM-141GBx8_TRT_MaxQ" (MLCommons, MLPerf Inference v4.1 results); 1.8 TB/s of the 5th
# generation, by "NVLink and NVLink Switch" (NVIDIA, product page).
NVLINK_4, NVLINK_5, NDR = 900e9 / 2, 1800e9 / 2, 400e9 / 8
LATENCY = 15e-6  # assumed, of the order that nccl-tests prints within a node

# Measured on an H200 (docs/heads.md, docs/performance.md). Its peaks, and a B200's, are those of
# "Machine Learning Engineering" (S. Bekman, When Is It Worth Upgrading GPUs?): dense bf16, and HBM.
H200, H200_PEAK, B200_PEAK = (674e12, 4.23e12), (989e12, 4.8e12), (2250e12, 8.0e12)
SHARE = H200[0] / H200_PEAK[0], H200[1] / H200_PEAK[1]
B200 = SHARE[0] * B200_PEAK[0], SHARE[1] * B200_PEAK[1]  # not measured

GPUS = {
    "h200": Gpu(*H200, NVLINK_4, NDR, 8, LATENCY),
    "b200": Gpu(*B200, NVLINK_5, NDR, 8, LATENCY),
}

STATE, BYTES, FULL = 3, 2, 4  # numbers a row that ranks gather for cross-entropy; bf16 and fp32
WORKSPACE = 1 << 30


class Cost(NamedTuple):
    """Of one rank, forward and backward: seconds, and bytes of memory."""

    tp: int
    products: float
    loss: float  # reading and writing logits
    gather: float  # of states
    reduce: float  # of d_hidden, were it not hidden behind the weight's product
    weight: float  # the head's rows and their gradient
    hidden: float  # all tokens' hidden states and their gradient
    logits: float  # alive at once

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
        loss=3 * logits / gpu.copy,  # read for the state; read and written for the gradient
        gather=latency + (tp - 1) * tokens * STATE * FULL / link,
        reduce=latency + 2 * (tp - 1) / tp * rows / link,
        weight=2.0 * columns * hidden * BYTES,
        hidden=2.0 * rows,
        logits=min(logits, WORKSPACE),
    )


def sizes(most: int) -> list[int]:
    """Powers of two up to the largest, and that."""
    found = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return found if found[-1] == most else [*found, most]


def short(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def table(tokens: int, vocab: int, hidden: int, tps: list[int], gpu: Gpu) -> str:
    """In Markdown: milliseconds and GiB of a rank."""
    times = "products | loss | gather | d_hidden | all, ms"
    lines = [
        f"| TP | {times} | limit | weight | hidden | logits | all, GiB |",
        "|" + " --- |" * 11,
    ]
    for tp in tps:
        c = cost(tokens, vocab, hidden, tp, gpu)
        times = (c.products, c.loss, c.gather, c.reduce, c.time)
        room = (c.weight, c.hidden, c.logits, c.memory)
        ms = " | ".join(short(1e3 * t) for t in times)
        gib = " | ".join(short(b / 2**30) for b in room)
        limit = "d_hidden" if c.limit == "reduce" else c.limit
        lines.append(f"| {tp} | {ms} | {limit} | {gib} |")
    return "\n".join(lines)


def plot(path: Path, tokens: int, vocab: int, hidden: int, tps: list[int], gpu: Gpu) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    found = [cost(tokens, vocab, hidden, tp, gpu) for tp in tps]
    for name, label in (
        ("products", "three products"), ("loss", "loss over logits"),
        ("gather", "gather of states"), ("reduce", "sum of d_hidden"),
    ):  # fmt: skip
        axes.plot(tps, [1e3 * getattr(c, name) for c in found], marker="o", label=label)
    axes.set(
        xscale="log", yscale="log", xticks=tps, xticklabels=tps, xlabel="ranks that share the head",
        ylabel="ms a step and rank", title=f"{tokens:,} tokens, V = {vocab:,}, D = {hidden:,}",
    )  # fmt: skip
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=120)


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "scale",
        help="what a head and its loss cost on many GPUs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=8192, help="rows of a step, all ranks'")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=4096, help="width of the hidden states")
    parser.add_argument("--tp", type=int, default=8, help="the most ranks that share the head")
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--plot", type=Path, help="a file for a plot of the same")


def run(args: argparse.Namespace) -> int:
    for name in ("tokens", "vocab", "hidden", "tp"):
        if getattr(args, name) < 1:
            raise SystemExit(f"--{name} must be at least 1, got {getattr(args, name)}.")
    shape, gpu = (args.tokens, args.vocab, args.hidden), GPUS[args.gpu]
    print(
        f"Computed, not measured: each of TP ranks, forward and backward of {args.tokens:,} tokens,"
        f" vocabulary {args.vocab:,}, width {args.hidden:,}, bf16, {args.gpu.upper()}\n",
        file=sys.stderr,  # the table alone is what goes into a file
    )
    print(table(*shape, sizes(args.tp), gpu))
    if args.plot is not None:
        plot(args.plot, *shape, sizes(args.tp), gpu)
    return 0
