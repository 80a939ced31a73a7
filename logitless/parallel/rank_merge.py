"""A backend for logits whose columns are sharded over ranks.

`ColumnBackend` has the functions of a backend (core/backend.py), so every RowLoss works unchanged.
A function that reads logits computes the partial statistics of this rank's columns, gathers those
of all ranks, and merges them to statistics of whole rows. From these, each rank computes the
gradient of its own columns, without communication.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import contract, eager
from ..contract import (
    NO_ID,
    PAIR_STATE,
    PAIR_SUMS,
    PRECISION,
    Pair,
    Partials,
    Reading,
    Statistics,
    part_width,
)
from ..eager.pair_losses import LOSSES
from ..eager.rows import capped, inverse_temperature, live_rows
from ..eager.sampled import Sampling
from ..heads.gradient_sums import put
from ..heads.head import Rows

BAD = -1  # marks an id outside the vocabulary; NO_ID marks an id in another rank's columns


class ColumnBackend:
    """A backend for the columns [start, start + width) of a vocabulary.

    `gather` is an all-gather of tensors (N, F) to (ranks, N, F). Statistics and top-k ids call it
    once, JSD, TVD and the statistic "rank" twice, and gradients never.
    """

    # a gradient needs the statistics of all ranks
    one_pass = None
    # has no argument `start`, and so needs all columns
    stats_gradient = None

    def __init__(
        self,
        backend: Any,
        start: int,
        width: int,
        vocab: int,
        gather: Callable[[Tensor], Tensor],
        widest: int = 0,  # the largest number of columns on any rank
    ):
        self.backend, self.join = backend, gather
        # At most one is set: it sums the gradient of the hidden states over ranks.
        self.all_reduce: Callable[[Tensor], Any] | None = None
        self.reduce_scatter: Callable[[Tensor], Any] | None = None
        self.start, self.width, self.vocab, self.widest = start, width, vocab, widest

        # what reads no logits
        self.slots, self.reduce, self.share = backend.slots, backend.reduce, backend.share
        self.scale_, self.merge = backend.scale_, backend.merge
        self.scale_two_, self.zero_ignored = backend.scale_two_, backend.zero_ignored
        self.cross_entropy, self.label_mass = backend.cross_entropy, backend.label_mass
        self.label_coefficients = backend.label_coefficients
        self.coefficients = backend.coefficients
        self.weighted_nll, self.can_accumulate = backend.weighted_nll, backend.can_accumulate
        self.is_narrow, self.row_gemm = backend.is_narrow, backend.row_gemm
        self.exponents = getattr(backend, "exponents", None)
        self.accumulate = getattr(backend, "accumulate", None)

    def hidden_sum(self, total: Tensor, chunks: int) -> "AllRows | OwnRows | None":
        """What sums the gradient of the hidden states over ranks into `total`, chunk by chunk.

        None if logitless does not sum it.
        """
        if self.all_reduce is not None:
            return AllRows(self.all_reduce, total)
        if self.reduce_scatter is not None:
            return OwnRows(self.reduce_scatter, total, chunks)
        return None

    def read(self, x: Tensor, reading: Reading) -> Statistics:
        """Statistics of whole rows. x holds only this rank's columns."""
        lead, wants = x.shape[:-1], reading.wants
        part = self.partial(x, reading)
        tail = self._tail(x, reading, part) if "tail" in wants else None
        whole, tails = self._joined(part, reading, tail)
        merged = tuple(name for name in wants if name not in ("tail", "rank"))
        found = self.backend.finish(whole, reading._replace(wants=merged), lead)
        if "rank" in wants:
            found = found._replace(rank=self._rank(x, reading, whole).view(lead))
        if "tail" not in wants:
            return found
        tail = self._joined_tail(tails, reading, found)
        found.state[:, contract.TAIL] = tail
        state = self.backend.with_repeats(found.state, reading.ids)
        return found._replace(state=state, tail=tail.view(lead).clone())

    def finish(self, partials: Partials, reading: Reading, shape=None) -> Statistics:
        whole, _ = self._joined(partials, reading)
        return self.backend.finish(whole, reading, shape)

    def _joined(
        self, part: Partials, reading: Reading, more: Tensor | None = None
    ) -> tuple[Partials, Tensor]:
        """Gathers the partial statistics of all ranks, together with the numbers in `more`."""
        part = part if part.state.shape[1] == 1 else self.backend.merge([part], reading)
        fields, K = part_width(*reading.sums), 0 if part.picked is None else part.picked.shape[1]
        sent = [part.state[:, 0, :fields]]
        sent += [part.picked] if K else []
        sent += [] if more is None else [more]
        got = self.join(torch.cat(sent, 1) if len(sent) > 1 else sent[0])
        state, rest = got[..., :fields], got[..., fields:]
        # Only one rank has the column of an id, and all others add 0, here and in `gather`.
        picked = rest[..., :K].sum(0) if K else part.picked
        return Partials(state.transpose(0, 1), picked), rest[..., K:]

    def _rank(self, x: Tensor, reading: Reading, whole: Partials) -> Tensor:
        """The statistic "rank" (N,), from the ids' logits in `whole`.

        Each rank counts the greater logits in its own columns, and a second all-gather collects the
        counts.
        """
        if whole.picked is None:
            first, y0 = reading.label, whole.state[..., contract.Y_LABEL].sum(1)
        else:
            first, y0 = reading.ids[..., 0], whole.picked[:, 0]
        first = first.reshape(-1)
        y0 = torch.where((first >= 0) & (first < self.vocab), y0, torch.nan)
        count = torch.zeros(len(y0), device=x.device, dtype=torch.int64)
        if self.width:
            count = self.backend.above(x, reading, y0)
        rank, live = self.join(count[:, None]).sum(0)[:, 0], live_rows(reading)
        return rank if live is None else torch.where(live, rank, -1)

    def gradient(
        self, x, reading, state, coefficients, upstream, factor=None, into=None, start=0
    ) -> Tensor:
        # `start` is the index of x's first column within this rank's columns.
        if x.shape[-1] == 0:
            return torch.empty_like(x) if into is None else into
        start = self.start + (start or 0)
        return self.backend.gradient(x, reading, state, coefficients, upstream, factor, into, start)

    def gather(self, x: Tensor, reading: Reading) -> Tensor:
        """The logits of the columns `reading.ids`, of any rank, after the softcap."""
        ids = self._columns(reading.ids)
        picked = torch.zeros(ids.shape, device=x.device, dtype=PRECISION[x.dtype])
        if self.width:
            picked = torch.where(ids >= 0, self.backend.gather(x, self.here(reading)), picked)
        whole = self.join(picked.view(-1, 1)).sum(0).view(ids.shape)
        whole = torch.where((ids == BAD) | (reading.ids == NO_ID), torch.nan, whole)
        live = live_rows(reading)
        return whole if live is None else torch.where(live.view(*x.shape[:-1], 1), whole, 0.0)

    def gather_gradient(self, x, reading, picked, g, upstream, factor=None, into=None) -> Tensor:
        if self.width == 0:
            return torch.empty_like(x) if into is None else into
        here = self.here(reading)
        return self.backend.gather_gradient(x, here, picked, g, upstream, factor, into)

    def pair_read(self, x: Tensor, reading: Reading, pair: Pair) -> tuple[Tensor, Tensor]:
        """The loss per row over the columns of all ranks, and the state for backward."""
        lead, rows = x.shape[:-1], x.shape[:-1].numel()  # type: ignore
        here = self._pair_reading(reading)
        part = torch.zeros((rows, PAIR_STATE), device=x.device, dtype=PRECISION[x.dtype])
        part[:, 0] = part[:, 2] = -torch.inf
        if self.width:
            part = self.backend.pair_partial(x, here, pair)
        whole, sums = eager.merge_pairs(self.join(part), reading, pair), None
        if LOSSES[pair.kind].twice:
            sums = part.new_zeros((rows, PAIR_SUMS))
            if self.width:
                sums = self.backend.pair_sums(x, here, pair, whole)
            sums = self.join(sums).sum(0)
        value, state = self.backend.pair_finish(whole, sums, here, pair)
        return value.view(lead), state

    def pair_gradient(self, x, reading, pair, state, upstream, factor=None, into=None) -> Tensor:
        if self.width == 0:
            return torch.empty_like(x) if into is None else into
        here = self._pair_reading(reading)
        return self.backend.pair_gradient(x, here, pair, state, upstream, factor, into)

    def _pair_reading(self, reading: Reading) -> Reading:
        # Label smoothing needs the size of the whole vocabulary.
        return self.here(reading)._replace(vocab=reading.vocab)

    def topk(
        self,
        x: Tensor,
        k: int,
        temperature: float,
        softcap: float | None,
        invariant: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each rank sends its k largest logits of a row; those of the whole row are among them."""
        lead, rows, own = x.shape[:-1], x.shape[:-1].numel(), min(k, self.width)  # type: ignore
        part = torch.full((rows, 2 * k + 1), -torch.inf, device=x.device, dtype=PRECISION[x.dtype])
        nowhere = torch.full((rows, k), contract.NOWHERE, device=x.device)
        part[:, k : 2 * k] = contract.as_bits(nowhere, part.dtype)
        if own:
            ids, logprobs, tail = self.backend.topk(x, own, temperature, softcap, invariant)
            top = x.gather(-1, ids).view(rows, own)
            part[:, :own] = top
            part[:, k : k + own] = contract.as_bits(ids.view(rows, own) + self.start, part.dtype)
            # With s = Σ e^(z - max z) of this rank's z, logprobs[..., 0] is -log s, and `rest`, log
            # Σ e^(z - max z) outside `ids`, is tail + log s. If tail is -inf, so is `rest`; log s
            # is not used then, because it is NaN if the largest logit is +inf.
            rest = torch.where(tail == -torch.inf, tail, tail - logprobs[..., 0]).view(rows)
            y, _ = capped(top[:, 0], softcap)
            part[:, 2 * k] = torch.where(y == -torch.inf, y, rest)
        ids, logprobs, tail = _largest(self.join(part), k, temperature, softcap)
        return ids.view(*lead, k), logprobs.view(*lead, k), tail.view(lead)

    def sampled(self, x: Tensor, uniforms: Tensor, how: Sampling) -> tuple[Tensor, Tensor, Tensor]:
        """Draws with the uniform numbers of the first rank, since generators can differ.

        The ranks gather the max and the mass of each row, and each finds the draws in its columns.
        """
        return self.backend.sampled(x, self.join(uniforms)[0], how, self.join, self.start)

    def here(self, reading: Reading) -> Reading:
        """`reading` for this rank: `ids` holds its columns, but `label` stays a vocabulary id."""
        weight = reading.class_weight
        if weight is not None:
            weight = weight[self.start : self.start + self.width]
        ids = None if reading.ids is None else self._columns(reading.ids)
        return reading._replace(vocab=self.width, ids=ids, class_weight=weight)

    def _columns(self, ids: Tensor) -> Tensor:
        """This rank's columns, NO_ID for ids of other ranks, and BAD outside the vocabulary."""
        at = ids.long() - self.start
        elsewhere = ((ids >= 0) & (ids < self.vocab)) | (ids == NO_ID)
        return torch.where((at >= 0) & (at < self.width), at, torch.where(elsewhere, NO_ID, BAD))

    def partial(self, x: Tensor, reading: Reading, start: int = 0) -> Partials:
        """Partial statistics; `start` is the first column of x within this rank's columns."""
        if x.shape[-1]:
            return self.backend.partial(x, reading, self.start + start)
        rows, dtype = x.shape[:-1].numel(), PRECISION[x.dtype]  # type: ignore
        state = torch.zeros((rows, 1, contract.PART), device=x.device, dtype=dtype)
        nowhere = torch.full((rows, 1), contract.NOWHERE, device=x.device)
        state[..., contract.M] = -torch.inf
        state[..., contract.ARG] = contract.as_bits(nowhere, dtype)
        if reading.ids is None:
            return Partials(state)
        return Partials(state, state.new_zeros((rows, reading.ids.shape[-1])))

    def _tail(self, x: Tensor, reading: Reading, part: Partials) -> Tensor:
        """`shift` and `tail` of each row, as (N, 2), for this rank's logits y after the softcap.

        `shift` is the largest y, or 0 if it is infinite. `tail` is log Σ e^((y - shift) / T) over
        the columns outside `reading.ids`, with temperature T.
        """
        if self.width == 0:
            empty = part.state[:, 0, :2].clone()
            empty[:, 0], empty[:, 1] = 0, -torch.inf
            return empty
        here = self.here(reading)._replace(wants=("logprob",))
        found = self.backend.finish(part, here, x.shape[:-1])
        log_s = found.state[:, contract.LOG_S]
        tail = self.backend.outside(x, here, found).view(-1) + log_s
        tail = torch.where(log_s == -torch.inf, -torch.inf, tail)
        return torch.stack((found.state[:, contract.SHIFT], tail), 1)

    def _joined_tail(self, tails: Tensor, reading: Reading, found: Statistics) -> Tensor:
        """The log of each row's mass outside `reading.ids`, from the `_tail` of all ranks."""
        state, ids = found.state, reading.ids
        shift, tail = tails.unbind(-1)
        moved = shift - state[:, contract.SHIFT]
        inv_t = inverse_temperature(reading, state[:, :1])
        moved = moved if inv_t is None else moved * inv_t[:, 0]
        tail = torch.where(tail == -torch.inf, -torch.inf, tail + moved).logsumexp(0)
        tail = tail - state[:, contract.LOG_S]
        bad = ((ids < 0) | (ids >= self.vocab)) & (ids != NO_ID)
        tail = torch.where(bad.any(-1).view(-1), torch.nan, tail)
        live = live_rows(reading)
        return tail if live is None else torch.where(live, tail, 0.0)


class AllRows:
    """Sums the gradient of the hidden states over ranks; every rank gets all rows.

    The all-reduce of a chunk of rows runs while this rank computes the weight's gradient.
    """

    def __init__(self, all_reduce: Callable[[Tensor], Any], total: Tensor):
        self.all_reduce, self.total, self.pending = all_reduce, total, []

    def put(self, rows: Rows, chunk: Tensor) -> None:
        self.pending.append((self.all_reduce(chunk), rows, chunk))

    def result(self) -> Tensor:
        for work, rows, chunk in self.pending:
            work.wait()
            put(self.total, rows, chunk)
        return self.total


class OwnRows:
    """Sums the gradient of the hidden states over ranks; each gets its own rows.

    One reduce-scatter starts after the last chunk of rows.
    """

    def __init__(self, reduce_scatter: Callable[[Tensor], Any], total: Tensor, chunks: int):
        self.reduce_scatter, self.total, self.missing = reduce_scatter, total, chunks
        self.local = None

    def put(self, rows: Rows, chunk: Tensor) -> None:
        put(self.total, rows, chunk)
        self.missing -= 1
        if not self.missing:
            self.local = self.reduce_scatter(self.total)

    def result(self) -> Tensor:
        # without chunks, the reduce-scatter starts here
        local = self.reduce_scatter(self.total) if self.local is None else self.local
        return local.wait()


def _largest(
    parts: Tensor,  # (ranks, N, 2 k + 1): k logits, k ids as bits, and `rest` (see `topk`)
    k: int,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """k ids per row, their log-probabilities, and the log mass of all other columns."""
    x, bits, rest = parts.transpose(0, 1).split((k, k, 1), -1)
    rest, first = rest.squeeze(-1), capped(x[..., 0], softcap)[0]
    x, ids = x.flatten(1), contract.of_bits(bits).flatten(1).long()
    by_id = ids.argsort(1)
    x, ids = x.gather(1, by_id), ids.gather(1, by_id)
    x, order = x.sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    y, _ = capped(x, softcap)
    y = torch.where(ids == contract.NOWHERE, -torch.inf, y)
    shift = torch.where(y[:, :1].isinf(), 0.0, y[:, :1])
    z = (y - shift) / temperature
    rest = torch.where(rest == -torch.inf, -torch.inf, rest + (first - shift) / temperature)
    chosen, rest = z[:, :k], torch.cat((z[:, k:], rest), 1).logsumexp(1)
    log_s = torch.logaddexp(chosen.logsumexp(1), rest)
    return ids[:, :k], chosen - log_s[:, None], rest - log_s
