"""Explains how a loss over a head is computed, without computing the loss."""

from typing import NamedTuple

import torch

from ..core.source import needs_grad
from . import choose_cut
from .choose_cut import Cut
from .gemms import UNIT
from .head import Head


class Explanation(NamedTuple):
    """How a loss over a head is computed; str() of it is a text for users."""

    way: str  # "materialised", "rows", "columns", "rows and columns" or "on the chip"
    rows: int  # rows of logits in memory at once
    columns: int  # columns of logits in memory at once
    chunks: int  # number of chunks or groups of rows
    blocks: int  # number of blocks of columns
    workspace: int  # bytes of logits in memory at once
    gemms: float  # number of GEMMs; a GEMM over some of the logits counts as a fraction
    floor: int  # the least number of GEMMs for this reduction
    share: float  # estimated speed, relative to a loss that takes `floor` GEMMs
    rest: int  # a small GEMM computes the last `rest` columns (see gemms.gemm)
    title: str

    def __str__(self) -> str:
        texts = {
            "materialised": "all logits at once, because they are few",
            "on the chip": "tiles of logits are computed on the chip, and never written to memory",
            "rows": f"{self.chunks:,} chunks of {self.rows:,} whole rows",
            "columns": f"{self.blocks:,} blocks of {self.columns:,} columns of all rows",
            "rows and columns": f"{self.chunks:,} groups of {self.rows:,} rows, each in"
            f" {self.blocks:,} blocks of {self.columns:,} columns",
        }
        gemms = f"{self.gemms:.3g} over all logits"
        if self.rest:
            some = "1 column" if self.rest == 1 else f"{self.rest} columns"
            gemms += f"; {some} of the odd vocabulary in small GEMMs of their own"
        return "\n".join(
            (
                self.title,
                f"  way        {texts[self.way]}",
                f"  workspace  {self.workspace / 2**20:,.1f} MiB of logits at once",
                f"  GEMMs      {gemms}",
                f"  expected   {self.share:.0%} of the speed of {self.floor} GEMMs, estimated",
            )
        )


def explain(head: Head, reduction: str = "mean", gradient: bool = True) -> Explanation:
    """Explains how a loss over this head is computed, on a GPU if its device is "meta"."""
    kind = "cuda" if head.device.type == "meta" else head.device.type
    frozen = head.hidden.requires_grad and not needs_grad(*head.tensors[1:])
    mean = reduction != "none" or (gradient and frozen)  # forward computes the gradients
    kept = gradient and not mean and head.keeps_logits()
    sums = gradient and not frozen
    work = head.work(True, gemms=int(gradient and mean), sums=sums, keeps=sums and mean)
    if head.device.type == "meta":  # the explanation is for a GPU, which has on-chip kernels
        work = work._replace(narrow=True)
    floor = 1 if not gradient else 2 if frozen else 3 if mean or kept else 4
    size = head.dtype.itemsize
    unit = 16 // head.hidden.dtype.itemsize
    odd = kind == "cuda" and work.vocab % unit and work.vocab > UNIT
    title = (
        f"{work.rows:,} rows × width {work.width:,} × vocabulary {work.vocab:,},"
        f" {str(head.hidden.dtype).removeprefix('torch.')}, reduction {reduction!r},"
        f" {'with' if gradient else 'without'} gradients"
    )
    if head.is_small() and (reduction == "none" or head.hidden.dtype != torch.float16):
        memory = work.rows * (-(-work.vocab // unit) * unit if odd else work.vocab) * size
        return Explanation(
            "materialised", work.rows, work.vocab, 1, 1, memory, min(floor, 3),
            min(floor, 3), 1.0, work.vocab % UNIT if odd else 0, title,
        )  # fmt: skip
    if kept:
        work = work._replace(merges=False, narrow=False)
    choose = choose_cut.forced or choose_cut.choose
    cut = Cut(work.rows, whole=True) if kept else choose(work, head.workspace, kind)
    rows = choose_cut.chunk_rows(work.rows, cut)
    columns = min(cut.columns or work.vocab, work.vocab)
    chunks, blocks = -(-work.rows // rows), -(-work.vocab // columns)
    if cut.columns is None:
        units, _ = choose_cut.layout(rows, cut.rows, work.wide)
        units = rows * (3 if work.wide else 1) if kept else units  # logits, and gradients beside
        memory = units * -(-columns // choose_cut.PACK) * choose_cut.PACK * work.itemsize
    else:  # fp32 logits of 16-bit hidden states need extra memory for the gradient
        memory = rows * cut.columns * (size + work.itemsize * work.wide)
    if cut.on_chip:
        # For a mean, two computations of the logits (for the loss and the gradient of `hidden`, and
        # for that of the weight) and two GEMMs for the gradients; per row, one more in backward.
        way, memory, again = "on the chip", 0, (4 if mean else 5) - floor if sums else 0
        extra = again
    else:
        way = "rows" if cut.columns is None else "columns" if chunks == 1 else "rows and columns"
        # The logits of the last block are still in memory when their gradient is computed.
        once = (
            {*choose_cut.blocks_kept(work, cut), blocks - 1} if work.gemms and cut.columns else ()
        )
        widths = [min(columns, work.vocab - block * columns) for block in range(blocks)]
        again = sum(w for block, w in enumerate(widths) if once and block not in once) / work.vocab
        extra = choose_cut.extra_cost(work, cut, kind) if gradient else 0.0
    rest = work.vocab % UNIT if odd and not cut.on_chip else 0
    return Explanation(
        way, rows, columns, chunks, blocks, memory, floor + again, floor,
        floor / (floor + max(extra, 0.0)), rest, title,
    )  # fmt: skip
