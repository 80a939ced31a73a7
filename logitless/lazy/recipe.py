"""The recipe of lazy logits: a head, a formula, and the dimension of the vocabulary."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..heads.gemms import without_autocast
from ..heads.head import Head, ScaledHead
from ..heads.unshard import in_memory
from .formula import Direct, Formula, Input, Rows
from .gradient import described
from .weight_changes import Watch, Watches, versions

Tensors = tuple[Tensor | None, ...]

# Logits without gradients of at most SMALL bytes are plain: lazy ones would save little memory and
# cost time on the host, for example in decoding, with one row per sequence.
SMALL = 32 << 20


def is_small(count: int, dtype: torch.dtype) -> bool:
    return count * dtype.itemsize <= SMALL


class RowInput(NamedTuple):
    """An input of a formula, (..., 1) or (..., V): a tensor, or a head that computes it."""

    input: Input
    source: Tensor | Head
    versions: tuple[int, ...]  # `_version` of the source's tensors when the recipe was created

    @staticmethod
    def of(input: Input, source: Tensor | Head) -> "RowInput":
        return RowInput(input, source, versions(*tensors_of(source)))

    def changed(self) -> bool:
        """Whether the version of a tensor has changed; under a compiler, always False."""
        compiles = torch.compiler.is_compiling()
        return not compiles and self.versions != versions(*tensors_of(self.source))

    def check(self) -> None:
        if self.changed():
            raise RuntimeError(
                "a tensor that was combined with lazy logits, such as a teacher's probabilities,"
                " must not be modified in place before the result is used. The result is computed"
                " only when the result is used. Use the result before the tensor is modified, or"
                " combine the logits with a copy of the tensor."
            )

    def moved(self, op: Callable[[Tensor], Tensor]) -> "RowInput":
        """The input with rows rearranged by `op`, which must keep the last dimension."""
        if isinstance(self.source, Tensor):
            return RowInput.of(self.input, op(self.source))
        return RowInput.of(self.input, self.source.replace(hidden=op(self.source.hidden)))

    def values(self) -> Tensor:
        if isinstance(self.source, Tensor):
            return self.source
        with torch.no_grad(), without_autocast(self.source.device):
            return self.source.logits()


def tensors_of(source: Tensor | Head) -> Tensors:
    return (source,) if isinstance(source, Tensor) else source.tensors


@dataclass(frozen=True)
class Recipe:
    """What determines lazy logits: formula(z), where the head computes z."""

    head: Head  # a head with detached tensors
    needs: tuple[bool, bool, bool, bool]  # whether each of head.tensors needs a gradient
    formula: Formula
    versions: tuple[int, ...]  # `_version` of head.tensors when the logits were created
    # Detects writes to the weight; shared by all logits derived from one call of a head.
    watch: Watch | Watches
    trains: bool = False  # whether the logits were created in a training forward
    # Whether these are logits for inference: a fused head made them without gradients and outside
    # of `lazy_logits()`. They may be written to, and once computed, all operations use the values.
    inference: bool = False
    inputs: tuple[RowInput, ...] = ()  # the formula's inputs
    axis: int | None = None  # the dimension of the vocabulary; None for the last dimension
    shard: Any = None  # a VocabShard if weight and bias hold only the rows of this rank
    # Scores that losses computed over the logits of one head call (class Answers in
    # metrics_after_loss.py). None if there are none, or if a tensor of the head was replaced other
    # than by selecting or reordering rows of `hidden`.
    answers: Any = None
    # (..., 1), each row's index in the head call; None if losses compute no scores.
    places: Tensor | None = None

    def replace(self, **changed) -> "Recipe":
        return replace(self, **changed)

    @property
    def vocab(self) -> int:
        return self.head.vocab if self.shard is None else self.shard.vocab

    @property
    def lead(self) -> torch.Size:
        """The shape of the leading dimensions, which hold the rows."""
        return self.head.lead

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def direct(self) -> Direct | None:
        """The formula, or None if it is not `Direct`."""
        return self.formula if isinstance(self.formula, Direct) else None

    @property
    def logits(self) -> Direct | None:
        """The formula, or None if it has more than a scale and a softcap."""
        return None if self.direct is None or self.direct.log else self.direct

    @property
    def shape(self) -> tuple[int, ...]:
        lead = self.lead
        at = len(lead) if self.axis is None else self.axis
        return (*lead[:at], self.vocab, *lead[at:])

    @property
    def small(self) -> bool:
        return is_small(torch.Size(self.shape).numel(), self.formula.dtype)

    def obstacle(self, softcap: float | None) -> str | None:
        """Why a loss with this softcap cannot be computed from the head, as a phrase, or None."""
        if self.direct is None:
            return "probabilities or other functions of logits"
        if self.direct.log:
            return "log-probabilities"
        if self.axis is not None:
            return "transposed logits"
        return "logits capped twice" if self.direct.capped and softcap is not None else None

    # --- other recipes

    def with_head(self, **tensors: Tensor | None) -> "Recipe":
        """A copy with new fields of the head, such as a new `hidden`."""
        head = self.head.replace(**tensors)  # pyright: ignore[reportArgumentType]
        names = ("hidden", "weight", "bias", "low_rank")
        pairs = zip(names, head.tensors, self.versions, strict=True)
        known = tuple(versions(t)[0] if name in tensors else v for name, t, v in pairs)
        return self.replace(head=head, versions=known, answers=None, places=None)

    def with_rows(self, op: Callable[[Tensor], Tensor], hidden: Tensor) -> "Recipe":
        """The recipe with rows rearranged by `op`, as already done in `hidden`."""
        with torch.inference_mode(False), torch.no_grad():
            inputs = tuple(row_input.moved(op) for row_input in self.inputs)
            places = None if self.places is None else op(self.places)
        recipe = self.with_head(hidden=hidden)
        return recipe.replace(inputs=inputs, answers=self.answers, places=places)

    def released(self) -> "Recipe":
        """A copy whose tensors hold no memory, for logits that are already computed."""
        hidden, weight, bias, low_rank = (
            None if t is None else described(t).blank() for t in self.head.tensors
        )
        watch: Any = None
        recipe = self.with_head(
            hidden=hidden, weight=weight, bias=bias, low_rank=low_rank, module=None
        )
        return recipe.replace(inputs=(), watch=watch)

    def flatten(self) -> tuple[Tensors, "Recipe"]:
        """The tensors that autograd saves, and a copy of the recipe without tensors."""
        blank: Any = None
        tensors = [*self.head.tensors]
        for row_input in self.inputs:
            tensors += tensors_of(row_input.source)
        inputs = tuple(
            r._replace(source=blank if isinstance(r.source, Tensor) else r.source.blank())
            for r in self.inputs
        )
        blank_recipe = self.replace(
            head=self.head.blank(), inputs=inputs, answers=None, places=None
        )
        return tuple(tensors), blank_recipe

    def rebuild(self, tensors: Sequence[Any]) -> "Recipe":
        """Inverts `flatten`, with the current versions: autograd has checked the saved tensors."""
        left = iter(tensors)

        def filled(head: Head) -> Head:
            return head.rebuild([*(next(left) for _ in range(4)), None])

        head = filled(self.head)
        inputs = tuple(
            RowInput.of(r.input, next(left) if r.source is None else filled(r.source))
            for r in self.inputs
        )
        return self.replace(head=head, inputs=inputs, versions=versions(*head.tensors))

    # --- checks

    def stale(self) -> bool:
        """Whether a tensor was written to since the logits were created; False under a compiler."""
        return self.changed() or (not torch.compiler.is_compiling() and self.watch.differs())

    def changed(self) -> bool:
        if torch.compiler.is_compiling():
            return False
        own = self.versions != versions(*self.head.tensors)
        return own or any(row_input.changed() for row_input in self.inputs)

    def check(self) -> None:
        """Raises if a tensor has changed, because the values can then no longer be computed."""
        self.check_versions()
        if self.stale():
            raise_changed()

    def check_versions(self) -> None:
        """Like `check`, but compares only versions, for lazy operations.

        `check` runs later, when the values of the result are computed.
        """
        for row_input in self.inputs:
            row_input.check()
        if self.changed():
            raise_changed()

    # --- values

    def values(self) -> Tensor:
        return Computation(self).values(self.formula)

    def rows(self, z: Tensor) -> Rows:
        """The head's logits z, of shape (..., V), together with the inputs of the formula."""
        return Rows(z, {r.input: r.values() for r in self.inputs})

    @contextlib.contextmanager
    def in_memory(self) -> Iterator[None]:
        """Inside this block, the weights of all heads of the recipe are in memory."""
        heads = [self.head, *(r.source for r in self.inputs if not isinstance(r.source, Tensor))]
        with contextlib.ExitStack() as stack:
            for head in heads:
                stack.enter_context(in_memory(head.weight, head.module))
            yield

    def constant_head(self, grad: bool = False) -> Head:
        """The head with detached tensors, which require a gradient as in `needs` with `grad`.

        If the vocabulary is sharded, it computes only the columns of this rank.
        """
        self.check()
        tensors = [
            None if t is None else constant(t).requires_grad_(need and grad)
            for t, need in zip(self.head.tensors, self.needs, strict=True)
        ]
        head = self.head.rebuild([*tensors, None])
        if self.shard is None:
            return head
        return head.replace(columns=self.shard.head_backend(head.hidden, False))

    def teacher(self) -> Any:
        """The logits without gradients, for use as a teacher, if `obstacle(None)` is None."""
        if self.shard is None:
            assert self.direct is not None
            return ScaledHead(self.constant_head(), self.direct.pre, self.direct.cap)
        return self.shard.over(self.replace(shard=None).teacher())


class Computation:
    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.rows: Rows | None = None

    def values(self, formula: Formula) -> Tensor:
        recipe = self.recipe
        with torch.inference_mode(False), torch.no_grad(), without_autocast(recipe.device):
            if self.rows is None:
                self.rows = self.start()
            values = self.rows.values(formula)
            # Contiguous, because a LazyLogits has the strides of contiguous memory.
            return values if recipe.axis is None else values.movedim(-1, recipe.axis).contiguous()

    def start(self) -> Rows:
        recipe = self.recipe
        recipe.check()
        with recipe.in_memory():
            z = recipe.head.logits()
            z = z if recipe.shard is None else recipe.shard.over(z).materialize()
            return recipe.rows(z)


def raise_changed() -> None:
    raise RuntimeError(
        "hidden, weight and bias of lazy logits must not be modified in place before the logits are"
        " used, for example by optimizer.step(). Lazy logits are computed only when they are used."
        " Use the logits before the step, or keep a copy of the logits:"
        " logits.detach().materialize()."
    )


def constant(t: Tensor) -> Tensor:
    """t, detached. Inference tensors are cloned, because autograd cannot save them."""
    if torch.compiler.is_compiling():  # torch.compile does not support is_inference()
        return t.detach()
    return t.clone() if t.is_inference() else t.detach()


def stored(hidden: Tensor) -> Tensor:
    """The detached hidden states, for lazy logits that are computed later.

    Inference tensors are copied, because they have no version counter that shows a later write.
    """
    if torch.compiler.is_compiling():  # torch.compile does not support is_inference()
        return hidden.detach()
    return own(hidden) if hidden.is_inference() else hidden.detach()


def own(t: Tensor) -> Tensor:
    """A copy of a caller's tensor, which the caller may write to before the values are computed.

    The copy of an inference tensor is a plain tensor, which autograd can save.
    """
    with torch.inference_mode(False):
        return t.clone()
