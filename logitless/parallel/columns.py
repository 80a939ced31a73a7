"""Losses of rows of which only some columns are here: partial, join, finish.

`Columns` stands where a backend stands. It has the backend's functions, so that every RowLoss runs
on it as it is: whatever reads rows computes the partial state of the columns at hand, joins it with
the states of the other columns, and finishes; every gradient is the backend's own, with the state
of whole rows. How states are joined, by ranks that gather them or otherwise, is for the one who
makes it to say.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import contract, eager
from ..contract import NO_ID, PAIR_STATE, PRECISION, Pair, Partials, Reading, Statistics, part_width
from ..eager.rows import capped, inverse_temperature, live_rows
from ..heads.chunks import Rows, put

BAD = -1  # an id that is none, where NO_ID is one of other columns


class Columns:
    """A backend for the columns [start, start + width) of a vocabulary.

    join(t) gives (parts, N, F): the numbers t (N, F) of each part of the vocabulary, the same in
    whatever part it is called. Each function here that reads logits calls it once, JSD twice.
    """

    one_pass = None  # the gradient waits for the other columns

    def __init__(
        self,
        run: ModuleType,
        start: int,
        width: int,
        vocab: int,
        join: Callable[[Tensor], Tensor],
        widest: int = 0,  # width of the widest part
    ):
        self.run, self.join = run, join
        # Of gradients of hidden: what begins to add t of all parts into t, or to make a slice of
        # that sum. One of the two, or none.
        self.add_up: Callable[[Tensor], Any] | None = None
        self.add_up_slices: Callable[[Tensor], Any] | None = None
        self.start, self.width, self.vocab, self.widest = start, width, vocab, widest

    def __getattr__(self, name: str):
        """What knows no columns is the backend's own: slots, reduce, scale_."""
        return getattr(self.run, name)

    def hidden_sum(self, total: Tensor, chunks: int) -> "AllRows | OwnRows | None":
        """What adds up the gradient of hidden, total (N, D), over ranks; None where nobody does."""
        if self.add_up is not None:
            return AllRows(self.add_up, total)
        if self.add_up_slices is not None:
            return OwnRows(self.add_up_slices, total, chunks)
        return None

    def read(self, x: Tensor, reading: Reading) -> Statistics:
        """The statistics of whole rows, of x (..., width) and all other columns."""
        lead, wants = x.shape[:-1], reading.wants
        part = self.partial(x, reading)
        if "tail" not in wants:
            return self.finish(part, reading, lead)
        whole, tails = self._joined(part, reading, self._tail(x, reading, part))
        without = reading._replace(wants=tuple(name for name in wants if name != "tail"))
        found = self.run.finish(whole, without, lead)
        tail = self._joined_tail(tails, reading, found)
        found.state[:, contract.TAIL] = tail
        state = self.run.with_repeats(found.state, reading.ids)
        return found._replace(state=state, tail=tail.view(lead).clone())

    def finish(self, part: Partials, reading: Reading, shape=None) -> Statistics:
        """The statistics of whole rows, of what is here and elsewhere."""
        whole, _ = self._joined(part, reading)
        return self.run.finish(whole, reading, shape)

    def _joined(
        self, part: Partials, reading: Reading, more: Tensor | None = None
    ) -> tuple[Partials, Tensor]:
        """The parts of all ranks, and what else (N, k) each has to say."""
        part = part if part.state.shape[1] == 1 else self.run.merge([part], reading)
        fields, K = part_width(*reading.sums), 0 if part.picked is None else part.picked.shape[1]
        sent = [part.state[:, 0, :fields]]
        sent += [part.picked] if K else []
        sent += [] if more is None else [more]
        got = self.join(torch.cat(sent, 1) if len(sent) > 1 else sent[0])
        state, rest = got[..., :fields], got[..., fields:]
        picked = rest[..., :K].sum(0) if K else part.picked  # 0 of all but one
        return Partials(state.transpose(0, 1), picked), rest[..., K:]

    def gradient(
        self, x, reading, state, coefficients, upstream, factor=None, into=None, start=0
    ) -> Tensor:
        """The gradient of these columns, or of some from `start` on. Nothing is joined."""
        if x.shape[-1] == 0:
            return torch.empty_like(x) if into is None else into
        start = self.start + (start or 0)
        return self.run.gradient(x, reading, state, coefficients, upstream, factor, into, start)

    def gather(self, x: Tensor, reading: Reading) -> Tensor:
        """y at reading.ids of whole rows, (..., K)."""
        ids = self._columns(reading.ids)
        picked = torch.zeros(ids.shape, device=x.device, dtype=PRECISION[x.dtype])
        if self.width:
            picked = torch.where(ids >= 0, self.run.gather(x, self.here(reading)), picked)
        whole = self.join(picked.view(-1, 1)).sum(0).view(ids.shape)  # 0 of all but one
        whole = torch.where((ids == BAD) | (reading.ids == NO_ID), torch.nan, whole)
        live = live_rows(reading)
        return whole if live is None else torch.where(live.view(*x.shape[:-1], 1), whole, 0.0)

    def gather_gradient(self, x, reading, picked, g, upstream, factor=None, into=None) -> Tensor:
        if self.width == 0:
            return torch.empty_like(x) if into is None else into
        here = self.here(reading)
        return self.run.gather_gradient(x, here, picked, g, upstream, factor, into)

    def pair_read(self, x: Tensor, reading: Reading, pair: Pair) -> tuple[Tensor, Tensor]:
        """The loss of whole rows, (...), and their state. JSD joins twice."""
        lead, rows = x.shape[:-1], x.shape[:-1].numel()
        here = self._pair_reading(reading)
        part = torch.zeros((rows, PAIR_STATE), device=x.device, dtype=PRECISION[x.dtype])
        part[:, 0] = part[:, 2] = -torch.inf
        if self.width:
            part = self.run.pair_partial(x, here, pair)
        inv_t = inverse_temperature(reading, part[:, :1])
        whole = eager.merge_pairs(self.join(part), pair.kind, inv_t)
        value, state = self.run.pair_finish(whole, pair.kind, inv_t)
        if pair.kind == "jsd":
            sums = torch.zeros_like(part[:, :2])
            if self.width:
                found, known = self.run.pair_read(x, here, pair, state)
                sums = torch.stack((found.reshape(-1), known[:, 4]), 1)
            value, mean = self.join(sums).sum(0).split(1, 1)
            state[:, 4:] = mean
        live = live_rows(reading)
        if live is not None:
            value, state = (torch.where(live[:, None], t, 0.0) for t in (value, state))
        return value.reshape(lead).clone(), state

    def pair_gradient(self, x, reading, pair, state, upstream, factor=None, into=None) -> Tensor:
        if self.width == 0:
            return torch.empty_like(x) if into is None else into
        here = self._pair_reading(reading)
        return self.run.pair_gradient(x, here, pair, state, upstream, factor, into)

    def _pair_reading(self, reading: Reading) -> Reading:
        """The reading with the class weights of these columns. V stays, for label smoothing."""
        return self.here(reading)._replace(vocab=reading.vocab)

    def topk(
        self, x: Tensor, k: int, temperature: float, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k largest of whole rows, of the k largest here and elsewhere."""
        lead, rows, own = x.shape[:-1], x.shape[:-1].numel(), min(k, self.width)
        part = torch.full((rows, 2 * k + 1), -torch.inf, device=x.device, dtype=PRECISION[x.dtype])
        nowhere = torch.full((rows, k), contract.NOWHERE, device=x.device)
        part[:, k : 2 * k] = contract.as_bits(nowhere, part.dtype)
        if own:
            ids, logprobs, tail = self.run.topk(x, own, temperature, softcap)
            top = x.gather(-1, ids).view(rows, own)
            part[:, :own] = top
            part[:, k : k + own] = contract.as_bits(ids.view(rows, own) + self.start, part.dtype)
            # Of what is left: log Σ e^z, z from the largest on, of which log p is -log s.
            rest = (tail - logprobs[..., 0]).view(rows)
            y, _ = capped(top[:, 0], softcap)
            part[:, 2 * k] = torch.where(y == -torch.inf, y, rest)
        ids, logprobs, tail = _largest(self.join(part), k, temperature, softcap)
        return ids.view(*lead, k), logprobs.view(*lead, k), tail.view(lead)

    def here(self, reading: Reading) -> Reading:
        """The same reading with ids and class weights of these columns. Its label stays."""
        weight = reading.class_weight
        if weight is not None:
            weight = weight[self.start : self.start + self.width]
        ids = None if reading.ids is None else self._columns(reading.ids)
        return reading._replace(vocab=self.width, ids=ids, class_weight=weight)

    def _columns(self, ids: Tensor) -> Tensor:
        """ids of the vocabulary as columns here; NO_ID of those elsewhere, BAD of those nowhere."""
        at = ids.long() - self.start
        elsewhere = ((ids >= 0) & (ids < self.vocab)) | (ids == NO_ID)
        return torch.where((at >= 0) & (at < self.width), at, torch.where(elsewhere, NO_ID, BAD))

    def partial(self, x: Tensor, reading: Reading, start: int = 0) -> Partials:
        """Of these columns, or of some from `start` on."""
        if x.shape[-1]:
            return self.run.partial(x, reading, self.start + start)
        rows, dtype = x.shape[:-1].numel(), PRECISION[x.dtype]
        state = torch.zeros((rows, 1, contract.PART), device=x.device, dtype=dtype)
        nowhere = torch.full((rows, 1), contract.NOWHERE, device=x.device)
        state[..., contract.M] = -torch.inf
        state[..., contract.ARG] = contract.as_bits(nowhere, dtype)
        if reading.ids is None:
            return Partials(state)
        return Partials(state, state.new_zeros((rows, reading.ids.shape[-1])))

    def _tail(self, x: Tensor, reading: Reading, part: Partials) -> Tensor:
        """(N, 2): the shift of these columns, and log Σ e^((y - shift) / T) outside the ids."""
        if self.width == 0:
            empty = part.state[:, 0, :2].clone()
            empty[:, 0], empty[:, 1] = 0, -torch.inf
            return empty
        here = self.here(reading)._replace(wants=("logprob",))
        found = self.run.finish(part, here, x.shape[:-1])
        log_s = found.state[:, contract.LOG_S]
        tail = self.run.outside(x, here, found).view(-1) + log_s
        tail = torch.where(log_s == -torch.inf, -torch.inf, tail)
        return torch.stack((found.state[:, contract.SHIFT], tail), 1)

    def _joined_tail(self, tails: Tensor, reading: Reading, found: Statistics) -> Tensor:
        """(N,): log of the mass outside the ids, of tails (parts, N, 2)."""
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
    """The gradient of hidden, of which every rank wants all rows: each chunk is added up.

    That goes on while this rank turns to the weight's gradient.
    """

    def __init__(self, add_up: Callable[[Tensor], Any], total: Tensor):
        self.add_up, self.total, self.adding = add_up, total, []

    def put(self, rows: Rows, part: Tensor) -> None:
        self.adding.append((self.add_up(part), rows, part))

    def found(self) -> Tensor:
        for work, rows, part in self.adding:
            work.wait()
            put(self.total, rows, part)
        return self.total


class OwnRows:
    """The same where each rank wants a slice of the rows: added up once all chunks are there."""

    def __init__(self, add_up_slices: Callable[[Tensor], Any], total: Tensor, chunks: int):
        self.add_up_slices, self.total, self.missing = add_up_slices, total, chunks
        self.own = None

    def put(self, rows: Rows, part: Tensor) -> None:
        put(self.total, rows, part)
        self.missing -= 1
        if not self.missing:
            self.own = self.add_up_slices(self.total)

    def found(self) -> Tensor:
        own = self.add_up_slices(self.total) if self.own is None else self.own  # of no rows at all
        return own.wait()


def _largest(
    parts: Tensor,  # (parts, N, 2 k + 1): logits, ids as bits, and log Σ e^z of the rest
    k: int,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """ids and log-probabilities (N, k) and the log of the tail's mass (N,), as `topk` has them."""
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
