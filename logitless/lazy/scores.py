"""`fuse(model, scores=True)`: the scores that a loss computes beside its value, for later metrics.

A trainer computes its loss, and then metrics such as accuracy and entropy from the same logits,
each of which takes one GEMM, a third of a loss with its gradients. A loss that also computes the
scores of each row, its entropy, logsumexp, argmax and the log-probability of its label, takes only
1.016 times as long (benchmarks/results/h200/loss-and-scores.md). Metrics of these logits and of
their rows are then read from a `Table`. The first metric of a row that the loss ignored
computes the scores of all such rows.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract import Reading, has_values
from ..core.call import reading_of
from ..core.loss import RowLoss, ignored_value
from ..heads.linear import HeadLogits
from ..losses.cross_entropy import CrossEntropy, ScoredCrossEntropy
from ..losses.statistics import NO_CLASS, SCORES, Read, Scores, score
from .formula import PRODUCTS, Applied, Direct, Formula
from .recipe import Recipe

UNKNOWN = -1  # the label of rows without scores


Options = tuple[float, float | None, bool]  # of a softmax, equal for all scores in a `Table`


def options_of(reading: Reading) -> Options | None:
    """The temperature, softcap and invariance, or None if each row has its own temperature."""
    if reading.temperature is None:
        return None
    return reading.temperature, reading.softcap, reading.invariant


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


class Remembered:
    """The scores of all logits that are derived from one call of a head."""

    def __init__(self, whole: Recipe):
        self.whole = whole  # of all rows, without history
        self.tables: dict[Options, Table] = {}

    @staticmethod
    def of(recipe: Recipe) -> "Remembered | None":
        """What the logits of a head remember, or None.

        There are no scores with drop_ignored=False, because the host would have to wait for the
        number of rows without scores, nor of an FSDP module, because computing missing scores would
        gather its weight, and other ranks may have none missing.
        """
        head = recipe.head
        gathers = head.module is not None and hasattr(type(head.module), "unshard")
        if gathers or not head.drop_ignored or not may_wait(head.hidden):
            return None
        return Remembered(recipe.detached())

    def evaluate(
        self, recipe: Recipe, loss: Any, evaluate: Callable[[RowLoss], Any], grad: bool
    ) -> Any:
        """The result of a loss over the head's logits."""
        if isinstance(loss, Read) and not grad:
            known = self.statistics(recipe, loss)
            return evaluate(loss) if known is None else known
        if type(loss) is not CrossEntropy or options_of(loss.reading) is None:
            return evaluate(loss)
        wants = tuple(dict.fromkeys((*loss.reading.wants, *SCORES)))
        reading = loss.reading._replace(wants=wants)
        value, *scores = evaluate(ScoredCrossEntropy(reading, loss.label_smoothing, loss.z_loss))
        self.keep(recipe, reading, scores)
        return value

    def keep(self, recipe: Recipe, reading: Reading, scores: Sequence[Tensor]) -> None:
        options, label = options_of(reading), reading.label
        assert options is not None
        assert label is not None
        ignored = reading.ignored_rows()
        if ignored is not None:
            label = torch.where(ignored, UNKNOWN, label)
        flat = Scores(*(t.detach().reshape(-1) for t in scores))
        if options not in self.tables:
            self.tables[options] = Table(self.whole.head.rows, flat)
        self.tables[options].put(places_of(recipe), label.reshape(-1), reading.vocab, flat)

    def statistics(self, recipe: Recipe, loss: Read) -> tuple[Tensor, ...] | None:  # type: ignore
        """The statistics of `loss` from the `Table`, or None if this is not possible."""
        reading, options = loss.reading, options_of(loss.reading)
        scored = set(reading.wants) <= set(SCORES) and reading.ids_per_row <= 1
        table = None if options is None else self.tables.get(options)
        if not scored or table is None or not may_wait(recipe.head.hidden):
            return None
        recipe.check()
        ids, ignored = reading.ids, reading.ignored_rows()
        if ids is not None:
            ids = ids[..., 0]
        elif "logprob" in reading.wants:
            ids = reading.label
        places, at, computed, outputs = places_of(recipe), None, None, []
        if ids is None:
            if not self.has_rows(table, options, recipe.places):
                return None
        else:  # an id out of range can be equal to UNKNOWN
            label, ids = table.label[places], ids.reshape(-1)
            others = (label == UNKNOWN) | (label != ids)
            at = (others if ignored is None else others & ~ignored.reshape(-1)).nonzero()[:, 0]
            if len(at):
                computed = scores_of(recipe, options, at, ids[at])
        for name in reading.wants:
            t = getattr(table.scores, name)[places]
            if computed is not None:
                t[at] = getattr(computed, name)
            t = t.view(recipe.lead)
            if ignored is not None:
                t = torch.where(ignored, ignored_value(t.dtype), t)
            outputs.append(t[..., None] if name == "logprob" and reading.ids is not None else t)
        return tuple(outputs)

    def has_rows(self, table: Table, options: Options, places: Tensor) -> bool:
        """Whether the table has the scores of these rows, perhaps because they are computed now.

        If one is missing, those of all rows are computed: the next metrics will ask for them.
        """
        if table.complete or table.seen() is places:
            return True
        if not lacks(table, places):
            table.seen = weakref.ref(places)
            return True
        if self.whole.stale():
            return False
        at = (table.label == UNKNOWN).nonzero()[:, 0]
        target = torch.zeros_like(at)
        scores = scores_of(self.whole, options, at, target)
        table.put(at, target, self.whole.vocab, scores)
        table.complete = True
        return True


def tensors_of(scores: Scores) -> list[Tensor]:
    return [getattr(scores, name) for name in SCORES]


def places_of(recipe: Recipe) -> Tensor:
    assert recipe.places is not None
    return recipe.places.reshape(-1)


def lacks(table: Table, places: Tensor) -> bool:
    """Whether the table has no scores of some of these rows. The host waits for the answer."""
    return bool((table.label[places.reshape(-1)] == UNKNOWN).any())


def scores_of(recipe: Recipe, options: Options, at: Tensor, target: Tensor) -> Scores:
    """The scores of the rows `at`. The host waits for their number."""
    head = recipe.constant_head()
    hidden = head.hidden.reshape(-1, head.hidden.shape[-1])[at]
    with torch.no_grad():
        return score(
            HeadLogits(head.replace(hidden=hidden)), target, temperature=options[0],
            softcap=options[1], ignore_index=NO_CLASS,
        )  # fmt: skip


def may_wait(hidden: Tensor) -> bool:
    """Whether the host can wait for a number that is computed from the hidden states."""
    if torch.compiler.is_compiling() or not has_values(hidden):
        return False
    return not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())


# --- p log p and p y, whose row sums follow from the scores of a row


NEGATIONS = (torch.neg, torch.negative, Tensor.neg, Tensor.negative, Tensor.__neg__)
EXPONENTIALS = (torch.exp, Tensor.exp)


def expected(z: Any) -> Tensor | None:
    """The row sums of p log p or p y, p = softmax(y), from the scores of an earlier loss, or None.

    Trainers compute the entropy as -(logp.exp() * logp).sum(-1), or as the logsumexp of y minus
    (p * y).sum(-1). None too if the head has a bias: with a bias of -inf, p log p is NaN in
    PyTorch, but our entropy is finite. Without one, p log p is NaN only if logits overflow.
    """
    recipe = z.recipe
    if recipe.scores is None or recipe.head.bias is not None or z.sends:
        return None
    product, sign = positive(recipe.formula)
    if not calls(product, PRODUCTS, 2):
        return None
    for p, y in (product.args, product.args[::-1]):
        p, sign_of_p = positive(p)
        of = y.direct if isinstance(y, Formula) else None
        if of is None or of.negative or not is_softmax(p, of):
            continue
        reads = {"softcap": None, **of.reads}
        reading = reading_of(HeadLogits(recipe.constant_head()), **reads, wants=("lse", "entropy"))
        known = recipe.scores.statistics(recipe, Read(reading))
        if known is None:
            return None
        lse, entropy = known
        return sign * sign_of_p * of.factor * (-entropy if of.log else lse - entropy)
    return None


def calls(formula: Any, functions: tuple, arguments: int) -> bool:
    called = isinstance(formula, Applied) and formula.function in functions
    return called and len(formula.args) == arguments and not formula.kwargs


def positive(formula: Any) -> tuple[Any, float]:
    """The formula without its minus sign, and the sign."""
    return (formula.args[0], -1.0) if calls(formula, NEGATIONS, 1) else (formula, 1.0)


def is_softmax(p: Any, of: Direct) -> bool:
    """Whether p is softmax(y) or exp(log_softmax(y)); `of` is the normal form of y or log p."""
    softmax = isinstance(p, Applied) and p.function is torch.softmax
    if not softmax and not calls(p, EXPONENTIALS, 1):
        return False
    y = p.args[0].direct
    right = y is not None and not y.negative and y.reads == of.reads and y.log != softmax
    return right and (softmax or y.factor == 1)
