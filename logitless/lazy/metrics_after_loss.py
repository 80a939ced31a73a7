"""Keeps the scores that a loss over lazy logits computes, so that later metrics need no GEMM.

A trainer computes its loss, and then metrics such as accuracy and entropy from the same logits,
each of which takes one GEMM, a third of a loss with its gradients. A loss that also computes the
scores of each row, its entropy, logsumexp, argmax and the log-probability of its label, takes only
1.016 times as long (benchmarks/results/h200/loss-and-scores.md). So losses compute scores for heads
whose metrics are read:

1. At first, they compute none. `Answers` counts, per call of the head, the rows that losses and
   later metrics read. If metrics read at least half as many, the head is added to `_READ`.
2. From then on, losses store scores in a `Table`, from which metrics of these logits and of their
   views are read. The first metric computes the scores of the rows that the loss ignored.

Training and evaluation are counted separately, because many trainers read metrics only in the
latter.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..contract import Reading, has_values
from ..core.loss import RowLoss, ignored_value
from ..heads.head import Head
from ..heads.linear import HeadLogits
from ..losses.cross_entropy import CrossEntropy, ScoredCrossEntropy
from ..losses.statistics import NO_CLASS, SCORES, Read, Scores, score
from .recipe import Recipe

# The heads whose metrics are read after a loss, in training (True) and in evaluation, and the
# number of head calls since a metric last used the scores.
_READ: dict[bool, "weakref.WeakKeyDictionary[nn.Module, int]"] = {
    True: weakref.WeakKeyDictionary(),
    False: weakref.WeakKeyDictionary(),
}
# After this many calls of a head without a read, losses stop computing scores: 16 of them cost
# about as much as one metric from the head.
PATIENCE = 16
UNKNOWN = -1  # the label of rows without scores


class Options(NamedTuple):
    """The options of a softmax, equal for all scores in a `Table`."""

    temperature: float
    softcap: float | None
    invariant: bool

    @staticmethod
    def of(reading: Reading) -> "Options | None":
        """The options of a `Reading`, or None if each row has its own temperature."""
        if reading.temperature is None:
            return None
        return Options(reading.temperature, reading.softcap, reading.invariant)


class Table:
    """The scores of all rows of one head call, each for one label."""

    def __init__(self, rows: int, like: Scores):
        self.label = torch.full((rows,), UNKNOWN, device=like.lse.device)
        self.scores = Scores(*(t.new_zeros(rows) for t in tensors_of(like)))
        self.complete = False  # whether the scores of all rows are known
        self.seen: Any = lambda: None  # weak reference to `places`, if all its rows have scores

    def put(self, places: Tensor, label: Tensor, vocab: int, scores: Scores) -> None:
        """Copies label[i] and the scores at index i to row places[i], for labels in [0, vocab).

        `places` can contain a row several times, with different labels, so a scatter chooses one
        entry per row first.
        """
        if not len(places):
            return
        source = torch.full_like(self.label, -1)
        source[places] = torch.arange(len(places), device=places.device)
        at = source.clamp_min(0)
        new = (source >= 0) & (label[at] >= 0) & (label[at] < vocab)
        self.label = torch.where(new, label[at].long(), self.label)
        pairs = zip(tensors_of(scores), tensors_of(self.scores), strict=True)
        self.scores = Scores(*(torch.where(new, t[at], old) for t, old in pairs))


class Answers:
    """The scores of all logits that are derived from one call of a head."""

    def __init__(self, head: Head, trains: bool):
        self.module, self.trains, self.rows = weakref.ref(head.module), trains, head.rows
        self.tables: dict[Options, Table] = {}
        self.losses: dict[Options, int] = {}  # number of rows in losses that compute no scores
        self.read: dict[Options, int] = {}  # number of rows that metrics read after these losses
        self.cell: Any = lambda: None  # a weak reference to the cell of the head's own logits

    @staticmethod
    def of(head: Head, trains: bool) -> "tuple[Answers | None, Tensor | None]":
        """(answers, places) for the logits of one call of a head, or (None, None).

        `places` (class Recipe) is None if losses over these logits compute no scores. A head has no
        `Answers` with drop_ignored=False, because the host would have to wait for the number of
        rows without scores; as an FSDP module, because computing missing scores would gather its
        weight, and other ranks may have none missing; and with deterministic algorithms, because
        computing scores can change the last bits of a loss.
        """
        module, device = head.module, head.device
        if module is None or hasattr(type(module), "unshard") or not head.drop_ignored:
            return None, None
        if not may_wait(head.hidden) or torch.are_deterministic_algorithms_enabled():
            return None, None
        unread = _READ[trains].pop(module, PATIENCE)
        if unread == PATIENCE:
            return Answers(head, trains), None
        _READ[trains][module] = unread + 1
        places = torch.arange(head.rows, device=device)
        return Answers(head, trains), places.view(*head.lead, 1)

    def evaluate(self, source: Any, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        recipe: Recipe = source.recipe
        if isinstance(loss, CrossEntropy):
            scored = self.scored(recipe, loss)
            if scored is not None:
                value, *scores = source.computed(scored, reduction, row_weight)
                self.keep(recipe, scored.reading, scores)
                return value
        elif isinstance(loss, Read) and not (source.requires_grad and torch.is_grad_enabled()):
            known = self.statistics(recipe, loss)
            if known is not None:
                return known
        return source.computed(loss, reduction, row_weight)

    # --- losses

    def scored(self, recipe: Recipe, loss: Any) -> RowLoss | None:
        """A version of `loss` that also computes scores, or None to compute none."""
        options = Options.of(loss.reading)
        if type(loss) is not CrossEntropy or options is None:
            return None
        if recipe.places is None:
            self.losses[options] = self.losses.get(options, 0) + recipe.lead.numel()
            return None
        wants = tuple(dict.fromkeys((*loss.reading.wants, *SCORES)))
        reading = loss.reading._replace(wants=wants)
        return ScoredCrossEntropy(reading, loss.label_smoothing, loss.z_loss)

    def keep(self, recipe: Recipe, reading: Reading, scores: Sequence[Tensor]) -> None:
        options, label = Options.of(reading), reading.label
        assert options is not None
        assert label is not None
        ignored = reading.ignored_rows()
        if ignored is not None:
            label = torch.where(ignored, UNKNOWN, label)
        flat = Scores(*(t.detach().reshape(-1) for t in scores))
        if options not in self.tables:
            self.tables[options] = Table(self.rows, flat)
        self.tables[options].put(places_of(recipe), label.reshape(-1), reading.vocab, flat)

    # --- metrics

    def statistics(self, recipe: Recipe, loss: Read) -> tuple[Tensor, ...] | None:
        """The statistics of `loss` from the `Table`, or None if this is not possible."""
        reading, options = loss.reading, Options.of(loss.reading)
        scored = set(reading.wants) <= set(SCORES) and reading.ids_per_row <= 1
        if not scored or options is None or not may_wait(recipe.head.hidden):
            return None
        table = self.tables.get(options)
        if table is None:
            self.count(options, recipe.lead.numel())
            return None
        recipe.check()
        self.remember()
        ids, ignored = reading.ids, reading.ignored_rows()
        if ids is not None:
            ids = ids[..., 0]
        elif "logprob" in reading.wants:
            ids = reading.label
        known, at, computed = self.complete(table, recipe, options, ids, ignored)
        places, outputs = places_of(recipe), []
        for name in reading.wants:
            t = getattr(known, name)[places]
            if computed is not None:
                t[at] = getattr(computed, name)
            t = t.view(recipe.lead)
            if ignored is not None:
                t = torch.where(ignored, ignored_value(t.dtype), t)
            outputs.append(t[..., None] if name == "logprob" and reading.ids is not None else t)
        return tuple(outputs)

    def count(self, options: Options, rows: int) -> None:
        module = self.module()
        if options not in self.losses or module is None:
            return
        self.read[options] = self.read.get(options, 0) + rows
        if 2 * self.read[options] >= self.losses[options]:
            _READ[self.trains][module] = 0

    def remember(self) -> None:
        module = self.module()
        if module is not None:
            _READ[self.trains][module] = 0

    def complete(
        self, table: Table, recipe: Recipe, options: Options, ids: Tensor | None, ignored: Any
    ) -> tuple[Scores, Tensor | None, Scores | None]:
        """Computes the scores that the `Table` lacks for the rows of `recipe`, except ignored ones.

        With `ids`, a row lacks the scores if its label is another id. Returns (known, at, scores):
        the scores computed and the indices of their rows, or None, and the known scores of all
        other rows. Computed scores are added to the `Table`, but not to `known`, which has one id
        per row, while `recipe` can contain a row several times with different ids.

        A trainer may compute a metric without `ids` for many small views in turn. So if `recipe`
        has less than half of the head call's rows, the missing scores of all rows are computed at
        once, and the host waits only once.
        """
        known = table.scores
        if ids is None and (table.complete or table.seen() is recipe.places):
            return known, None, None
        at = missing(table, recipe, ids, ignored)
        if ids is None and ignored is None:
            table.seen = weakref.ref(recipe.places)
        if not len(at):
            return known, None, None
        cell = self.cell() if ids is None and 2 * recipe.lead.numel() < self.rows else None
        if cell is None or cell.recipe.answers is not self or cell.recipe.changed():
            return known, at, fill(table, recipe, options, at, ids)
        fill(table, cell.recipe, options, missing(table, cell.recipe, None, None), None)
        table.complete = True
        return table.scores, None, None


def tensors_of(scores: Scores) -> list[Tensor]:
    return [getattr(scores, name) for name in SCORES]


def places_of(recipe: Recipe) -> Tensor:
    assert recipe.places is not None
    return recipe.places.reshape(-1)


def missing(table: Table, recipe: Recipe, ids: Tensor | None, ignored: Tensor | None) -> Tensor:
    """The rows of `recipe` that have no scores in the `Table`. The host waits for the GPU."""
    label = table.label[places_of(recipe)]
    rows = label == UNKNOWN
    if ids is not None:  # an id out of range can be equal to UNKNOWN
        rows = rows | (label != ids.reshape(-1))
    return (rows if ignored is None else rows & ~ignored.reshape(-1)).nonzero()[:, 0]


def fill(table: Table, recipe: Recipe, options: Options, at: Tensor, ids: Tensor | None) -> Scores:
    """Computes the scores of the rows `at`, and adds those of rows that had none to the `Table`."""
    head = recipe.constant_head()
    hidden = head.hidden.reshape(-1, head.hidden.shape[-1])[at]
    target = torch.zeros_like(at) if ids is None else ids.reshape(-1)[at]
    with torch.no_grad():
        scores = score(
            HeadLogits(head.replace(hidden=hidden)), target, temperature=options.temperature,
            softcap=options.softcap, ignore_index=NO_CLASS,
        )  # fmt: skip
    places = places_of(recipe)[at]
    new = torch.where(table.label[places] == UNKNOWN, target, UNKNOWN)
    table.put(places, new, recipe.vocab, scores)
    return scores


def may_wait(hidden: Tensor) -> bool:
    """Whether the host can wait for a number that is computed from the hidden states."""
    if torch.compiler.is_compiling() or not has_values(hidden):
        return False
    return not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
