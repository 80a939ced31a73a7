"""Computes the logits of a head in chunks of rows.

choose_cut.py chooses the number of rows per chunk. Every chunk reads the whole weight. Every chunk
except the first also reads the sum of the weight's gradient (gradient_sums.py). Therefore chunks
are as large as the workspace allows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.backend import Backend
from ..core.groups import Groups, packed
from ..core.loss import RowLoss, Saved
from .choose_cut import PACK, Cut, bounds, chunk_rows, layout
from .gradient_sums import GradientSums, Needs
from .head import Head, Rows


@dataclass(slots=True)
class Tile:
    """Some rows of a head, and the loss of these rows.

    The caller loops over tiles, and computes the loss of each tile from `logits`. If a gradient is
    needed, the caller computes the gradient of `logits`, and sets the field `gradient`. The caller
    writes the gradient to `into` if possible, and to a new tensor otherwise.
    """

    loss: Any  # the RowLoss of these rows
    saved: Saved | None  # tensors that an earlier forward saved for these rows
    rows: Rows
    results: Any  # where the outputs belong: the rows, or a slice of the groups
    logits: Any  # (n, V), or a `Blocks` (blocks.py)
    into: Any  # memory for the gradient; None if no gradient is needed
    gradient: Any = None

    def release(self) -> None:
        """Frees all tensors of the tile, including a teacher's logits in `loss`."""
        self.loss = self.saved = self.logits = self.into = self.gradient = None


class Chunks:
    """Computes the logits of one chunk of rows at a time. Ignored rows can be left out.

    The number of rows that are not ignored is computed on the GPU. The host queues the first GEMM
    before it waits for this number, so that the GPU has work while the host waits.
    """

    blocks = (slice(None),)  # blocks of columns; `Chunks` has a single block with all columns

    def __init__(
        self,
        head: Head,
        cut: Cut,
        live: Tensor | None,  # (N,), False for rows to leave out; None if all rows are computed
        groups: Groups | None = None,  # then every chunk holds whole groups
        kept: Tensor | None = None,  # the logits of an earlier `Chunks`, if cut.whole
    ):
        self.head, self.cut, self.lead = head, cut, head.lead
        self.groups, self.kept = groups, kept
        self.weight = head.weight.detach()
        self.bias = None if head.bias is None else head.bias.detach()
        self.low_rank = None
        if head.low_rank is not None:
            self.low_rank = head.low_rank.detach().to(head.hidden.dtype)  # (V, R)
        self.hidden = head.hidden.detach().reshape(-1, head.hidden.shape[-1])  # (N, D)
        self.drops, self.index = live is not None, None
        if groups is not None:
            self.choose_groups(groups, live)
            return
        rows = len(self.hidden)
        count, copied = rows, None
        if live is not None:
            self.index = torch.argsort(live, descending=True, stable=True)
            count, copied = to_host(live.sum())
        # Kept logits have no room for rows to leave out, so the number of the others comes first.
        self.backend = None if cut.whole else self.begin(head.dtype)
        if copied is not None:
            copied.synchronize()
        count = int(count)
        if cut.whole:
            self.cut = cut = Cut(count, whole=True)
            self.backend = self.begin(head.dtype)
        if count == rows:
            self.index = None
        self.slices: list[Rows] = [
            slice(start, end) if self.index is None else self.index[start:end]
            for start, end in bounds(rows, count, cut)
        ]

    def choose_groups(self, groups: Groups, live: Tensor | None) -> None:
        """Puts whole groups into chunks. The rows of a group that are left out cost nothing.

        `taken` holds (rows, groups, present) of each chunk. `present` are the places of the rows
        among all rows of these groups; None if no row is left out. The first GEMM waits until the
        host knows how many rows of each group count.
        """
        rows, sizes, copied = len(self.hidden), groups.sizes, None
        counts: Any = list(sizes)
        order = by_group = None
        if not groups.in_order:
            places = torch.arange(rows, device=self.hidden.device)
            self.index = by_group = groups.by_group(places.view(groups.lead))
        if live is not None:
            mask = live if by_group is None else live[by_group]
            order = torch.argsort(mask, descending=True, stable=True)
            counts, copied = to_host(groups.sums(mask))
            self.index = order if by_group is None else by_group[order]
        if not self.cut.on_chip:
            even = -(-rows // max(-(-rows // self.cut.rows), 1))
            most = min(self.cut.rows, even + max(sizes, default=0))
            self.cut = self.cut._replace(rows=most)
        self.backend = self.begin(self.head.dtype)
        if copied is not None:
            copied.synchronize()
        if isinstance(counts, Tensor):
            counts = counts.tolist()
        if sum(counts) == rows:
            order, self.index = None, by_group
        self.taken, start, first = [], 0, 0
        for a, b in packed(counts, self.cut.rows):
            end, last = start + sum(counts[a:b]), first + sum(sizes[a:b])
            some: Rows = slice(start, end) if self.index is None else self.index[start:end]
            present = None if order is None else order[start:end] - first
            self.taken.append((some, slice(a, b), present))
            start, first = end, last
        self.slices = [some for some, *_ in self.taken] if start else []

    def pieces(self, loss: Any) -> Iterator[tuple[Rows, Any, Any]]:
        """Yields (rows, results, the loss of these rows) of each chunk."""
        if self.groups is None:
            for rows in self.slices:
                yield rows, rows, loss.rows(rows, self.lead)
        else:
            for rows, some, present in self.taken:
                yield rows, some, loss.of_groups(rows, self.lead, some, present)

    def begin(self, dtype: torch.dtype) -> Backend:
        """Allocates memory for a chunk's logits in this dtype, and queues the first GEMM.

        Returns the backend that reads the tiles.
        """
        hidden, vocab, padded = self.hidden, len(self.weight), -(-len(self.weight) // PACK) * PACK
        first, given = chunk_rows(len(hidden), self.cut), self.kept is not None
        if self.cut.whole:
            _, slots = layout(first, first, False)
            if self.kept is None:
                self.kept = torch.empty((first, padded), device=hidden.device, dtype=dtype)
            self.memory, self.slots = self.kept, [(slots[0], self.kept[:, :vocab])]
        else:
            size, slots = layout(first, self.cut.rows, dtype != hidden.dtype)
            self.memory = torch.empty((size, padded), device=hidden.device, dtype=hidden.dtype)
            self.slots = []
            for slot in slots:
                room = (slot.rows.stop - slot.rows.start, padded)
                logits = self.memory[slot.at :].view(dtype).view(room)[:, :vocab]
                self.slots.append((slot, logits))
        if self.groups is None and not given:
            slot, logits = self.slots[0]
            h = hidden[slot.rows if self.index is None else self.index[slot.rows]]
            if len(h):
                self.head.product(h, logits[: len(h)])
        return self.head.backend()

    def gradients(self, needs: Needs, into: Tensor | None = None) -> GradientSums:
        """Allocates the tensors in which the gradients are summed over chunks.

        The method `tiles` adds the gradients of each chunk to these tensors.
        """
        if self.memory.dtype != self.hidden.dtype:
            self.memory = torch.empty_like(self.memory, dtype=self.hidden.dtype)
        all_rows = self.index is None
        return GradientSums(
            self.head, self.hidden, needs, len(self.slices), all_rows, self.blocks, into
        )

    def hidden_of(self, rows: Rows, piece: RowLoss, sums: GradientSums | None) -> Tensor:
        """Returns the hidden states of some rows. `piece` is the loss of these rows.

        If gradients are computed, the hidden states of ignored rows are replaced by 0. The logits
        of an ignored row have a gradient of 0. In the GEMM for the weight's gradient, 0 times a NaN
        or infinity in `hidden` would be NaN.
        """
        h = self.hidden[rows]
        if self.drops or sums is None or piece.reading.ignore_index is None:
            return h
        return self.head.backend().zero_ignored(h, piece.reading)

    def tiles(
        self,
        loss: RowLoss,
        sums: GradientSums | None = None,  # None if no gradient is needed
        known: Iterable[Saved] = (),  # the tensors that forward saved for each tile
    ) -> Iterator[Tile]:
        """Yields the tiles one after the other, and adds the gradient of each chunk to `sums`."""
        known = iter(known)
        queued = self.groups is None  # `begin` has already queued the first GEMM
        for rows, results, piece in self.pieces(loss):
            h = self.hidden_of(rows, piece, sums)
            dz = self.memory[: len(h), : len(self.weight)]
            for slot, logits in self.slots:
                count = len(h[slot.rows])
                if not count and slot.rows.start:
                    break
                here, z = rows_at(rows, slot.rows), logits[:count]
                if not queued and count:
                    self.head.product(h[slot.rows], z)
                queued = False
                into = None if sums is None else dz[slot.rows]
                if len(self.slots) > 1:
                    piece, results = loss.rows(here, self.lead), here
                whole = Tile(piece, next(known, None), here, results, z, into)
                steps = [at for at in slot.steps if at.start < count]
                if sums is None or len(steps) <= 1:
                    yield whole
                    if count == len(h):  # the gradient can be a new tensor instead of `into`
                        dz = whole.gradient
                else:
                    for at in steps:
                        tile = self._step(whole, at, count)
                        yield tile
                        tile.release()
                whole.release()
                piece = None  # else a teacher's logits live until the next ones exist
            if sums is not None and len(h):
                sums.add(rows, h, dz)

    def _step(self, whole: Tile, at: slice, count: int) -> Tile:
        """Returns a part of the tile `whole`: the rows in the slice `at`.

        The gradient of this part overwrites only logits that are no longer needed (see `layout` in
        choose_cut.py).
        """
        saved = whole.saved
        if saved is not None:  # a saved tensor that is shared by all rows is not sliced
            saved = tuple(t if t is None or len(t) != count else t[at] for t in saved)
        loss, rows = whole.loss.rows(at, torch.Size((count,))), rows_at(whole.rows, at)
        return Tile(loss, saved, rows, rows, whole.logits[at], whole.into[at])


def rows_at(rows: Rows, at: slice) -> Rows:
    """Returns rows[at], where `rows` is a slice or a tensor of indices."""
    if isinstance(rows, slice):
        return slice(rows.start + at.start, min(rows.start + at.stop, rows.stop))
    return rows[at]


def to_host(number: Tensor) -> tuple[Tensor, "torch.cuda.Event | None"]:
    """Starts an asynchronous copy of numbers to the host. Returns the copy and a CUDA event."""
    if not number.is_cuda:
        return number, None
    copied = torch.cuda.Event()
    pinned = torch.empty(number.shape, dtype=number.dtype, device="cpu", pin_memory=True)
    pinned.copy_(number, non_blocking=True)
    copied.record()
    return pinned, copied
