"""The recipe of lazy logits: a head whose tensors keep their autograd history, and a formula."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..heads.gemms import without_autocast
from ..heads.head import Head, ScaledHead
from ..heads.linear import HeadLogits as HeadSource
from ..heads.unshard import in_memory
from .formula import Direct, Formula, Input, Rows

# Logits without gradients of at most SMALL bytes are plain: lazy ones would save little memory and
# cost time on the host, for example in decoding, with one row per sequence.
SMALL = 32 << 20


def is_small(count: int, dtype: torch.dtype) -> bool:
    return count * dtype.itemsize <= SMALL


def same(t: Any) -> Any:
    return t


@dataclass(eq=False)
class Recipe:
    """The values of lazy logits are formula(hidden @ weight.T + bias)."""

    head: Head
    formula: Formula
    watches: "tuple[Watch, ...]"  # one per head, shared by all logits of one call of a head
    trains: bool = False  # whether the logits were created in a training forward
    inference: bool = False  # whether a fused head made them without gradients
    inputs: dict[Input, Tensor | Head] = field(default_factory=dict)
    axis: int | None = None  # the dimension of the vocabulary; None for the last dimension
    shard: Any = None  # a VocabShard if weight and bias hold only the rows of this rank
    versions: tuple = ()  # `_version` of all tensors when they became part of the recipe
    # What `fuse(scores=True)` remembers of a call of the head (scores.py), and each row's index in
    # that call, (..., 1). None after any change but a choice of rows.
    scores: Any = None
    places: Tensor | None = None
    base: Any = None  # a weak reference to the lazy logits of the head, before the formula

    def replace(self, **changed) -> "Recipe":
        copy = object.__new__(Recipe)
        copy.__dict__.update(self.__dict__, **changed)
        return copy

    def with_head(self, head: Head, **changed) -> "Recipe":
        """The recipe of other logits, of which `head` computes the rows or the columns."""
        new = self.replace(head=head, **{"scores": None, "places": None, "base": None, **changed})
        known = zip(self.tensors, self.versions, strict=True)
        known = {id(t): version for t, version in known if t is not None}
        new.versions = tuple(
            known[id(t)] if id(t) in known else versions(t)[0] for t in new.tensors
        )
        return new

    def map(self, rows: Callable, other: Callable = same, **changed) -> "Recipe":
        """Applies `rows` to hidden states and inputs, and `other` to all other tensors."""
        head = mapped(self.head, rows, other)
        return self.with_head(head, inputs=self.map_inputs(rows, other), **changed)

    def map_inputs(self, rows: Callable, other: Callable = same) -> "dict[Input, Tensor | Head]":
        return {
            key: mapped(t, rows, other) if isinstance(t, Head) else rows(t)
            for key, t in self.inputs.items()
        }

    def with_rows(self, rows: Callable, **changed) -> "Recipe":
        """The recipe of some rows, or of the same rows in another order or shape."""
        places = None if self.places is None else rows(self.places)
        return self.map(rows, scores=self.scores, places=places, **changed)

    @property
    def has_history(self) -> bool:
        return any(t is not None and t.requires_grad for t in self.tensors)

    def detached(self) -> "Recipe":
        if not self.has_history:
            return self
        kept = {"scores": self.scores, "places": self.places, "base": self.base}
        new = self.map(Tensor.detach, Tensor.detach, **kept)
        new.versions = self.versions  # which detached tensors share
        return new

    def blank(self) -> "Recipe":
        """The recipe without tensors, for an autograd node that saves `tensors`."""
        inputs: Any = {
            key: t.blank() if isinstance(t, Head) else None for key, t in self.inputs.items()
        }
        return self.replace(head=self.head.blank(), inputs=inputs, scores=None, places=None)

    def rebuild(self, tensors: Any) -> "Recipe":
        """Inverts `blank`, with the current versions: autograd has checked the saved tensors."""
        left = iter(tensors)

        def of(head: Head) -> Head:
            return head.rebuild([*(next(left) for _ in range(4)), None])

        head = of(self.head)
        inputs = {key: next(left) if t is None else of(t) for key, t in self.inputs.items()}
        new = self.replace(head=head, inputs=inputs)
        new.versions = versions(*new.tensors)
        return new

    @property
    def tensors(self) -> list[Any]:
        found = list(self.head.tensors)
        for t in self.inputs.values():
            found += [t] if isinstance(t, Tensor) or t is None else t.tensors
        return found

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
        return self.formula.direct

    @property
    def logits(self) -> Direct | None:
        """The normal form, or None if the formula has more than a scale and a softcap."""
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

    # --- checks

    def changed(self) -> bool:
        return self.versions != versions(*self.tensors)

    def stale(self) -> bool:
        """Whether a tensor was written to since the logits were created."""
        return self.changed() or any(watch.differs() for watch in self.watches)

    def check(self) -> None:
        """Raises if a tensor has changed, because the values can then no longer be computed."""
        if torch.compiler.is_compiling():  # a graph checks its inputs itself, and reads no versions
            return
        self.check_versions()
        if any(watch.differs() for watch in self.watches):
            raise_changed()

    def check_versions(self) -> None:
        """Like `check`, but compares only versions, for lazy operations."""
        if self.changed():
            raise_changed(of_input=self.versions[:4] == versions(*self.head.tensors))

    # --- the head, for losses and for values

    def source(self, head: Head) -> Any:
        """The logits of `head` over all ranks."""
        return HeadSource(head) if self.shard is None else self.shard.over(HeadSource(head))

    def oriented(self, grad: bool) -> Head:
        """The head whose logits `direct` scales, with or without autograd history."""
        self.check()
        head = self.head if grad else self.constant_head()
        if self.direct is not None and self.direct.negative:
            bias = None if head.bias is None else -head.bias
            head = head.replace(hidden=-head.hidden, bias=bias)
        return head

    def constant_head(self) -> Head:
        tensors = [None if t is None else constant(t) for t in self.head.tensors]
        return self.head.rebuild([*tensors, None])

    def teacher(self) -> Any:
        """The logits without gradients, for a loss, if `obstacle(None)` is None."""
        assert self.direct is not None
        head = ScaledHead(self.oriented(False), self.direct.pre, self.direct.cap)
        if self.direct.negative:
            head = head.replace(scale=abs(head.scale))
        return head if self.shard is None else self.shard.over(head)

    @contextlib.contextmanager
    def in_memory(self) -> Iterator[None]:
        """Inside this block, the weights of all heads of the recipe are in memory."""
        heads = [self.head, *(t for t in self.inputs.values() if isinstance(t, Head))]
        with contextlib.ExitStack() as stack:
            for head in heads:
                stack.enter_context(in_memory(head.weight, head.module))
            yield

    def values(self) -> Tensor:
        """The values as a plain tensor, without history."""
        with torch.inference_mode(False), torch.no_grad(), self.in_memory():
            return self.of_product(self.product())

    def product(self) -> Tensor:
        """The head's logits (..., V), without history."""
        self.check()
        with torch.no_grad(), without_autocast(self.device):
            z = self.head.logits()
            # Without .data it could be a view of another tensor, which callers cannot write to.
            return (z if self.shard is None else self.shard.over(z).materialize()).data

    def of_product(self, x: Tensor) -> Tensor:
        """The values, of which x are the head's logits. Contiguous, as the strides of logits."""
        with without_autocast(self.device):
            inputs = {key: values_of(t) for key, t in self.inputs.items()}
            t = Rows(x, inputs).values(self.formula)
        return (t if self.axis is None else t.movedim(-1, self.axis)).contiguous()


def purpose(*recipes: Recipe) -> dict[str, bool]:
    """Whether logits that are computed from several serve training, and inference."""
    inference = all(recipe.inference for recipe in recipes)
    return {"trains": any(recipe.trains for recipe in recipes), "inference": inference}


def mapped(head: Head, rows: Callable, other: Callable) -> Head:
    weight, bias, low_rank = (None if t is None else other(t) for t in head.tensors[1:])
    return head.replace(hidden=rows(head.hidden), weight=weight, bias=bias, low_rank=low_rank)


def values_of(t: Tensor | Head) -> Tensor:
    """An input of a formula, or the logits that its head computes."""
    if isinstance(t, Tensor):
        return t
    with torch.no_grad(), without_autocast(t.device):
        return t.logits()


def raise_changed(of_input: bool = False) -> None:
    if of_input:
        raise RuntimeError(
            "a tensor that was combined with lazy logits, such as a teacher's probabilities, must"
            " not be modified in place before the result is used. The result is computed only when"
            " the result is used. Use the result before the tensor is modified, or combine the"
            " logits with a copy of the tensor."
        )
    raise RuntimeError(
        "hidden, weight and bias of lazy logits must not be modified in place before the logits are"
        " used, for example by optimizer.step(). Lazy logits are computed only when they are used."
        " Use the logits before the step, or keep a copy of the logits:"
        " logits.detach().materialize()."
    )


def constant(t: Tensor) -> Tensor:
    """t, detached. Inference tensors are cloned, because autograd cannot save them."""
    if not torch.compiler.is_compiling() and t.is_inference():
        return t.clone()
    return t.detach()


def own(t: Tensor) -> Tensor:
    """A copy of a caller's tensor, which the caller may write to before the values are computed.

    The copy of an inference tensor is a plain tensor, which autograd can save.
    """
    with torch.inference_mode(False):
        return t.clone()


# --- whether tensors were written to before the logits are computed


class Watch:
    """Detects writes to a weight, even if they do not change the weight's version counter.

    Some optimisers write through `.data` or a raw pointer. So about 32 x 32 numbers of the weight
    are copied when the logits are created, and compared before each use: on a CPU and for logits
    for inference always, on other devices only after a backward, because the host must wait.
    """

    def __init__(self, weight: Tensor, inference: bool = False):
        self.inference, self.parameter = inference, weight if weight.is_leaf else None
        grad = None if self.parameter is None else self.parameter.grad
        self.grad = (lambda: None) if grad is None else weakref.ref(grad)
        self.version = 0 if grad is None else grad._version
        self.weight = weight = weight.detach()
        known = type(weight) is Tensor and weight.device.type != "meta" and weight.dim() == 2
        known = known and not torch.compiler.is_compiling()
        in_memory = known and weight.untyped_storage().size() > 0  # FSDP may have freed the weight
        self.sample = self.read() if in_memory else None

    @property
    def passed(self) -> bool:
        """Whether a backward has reached the weight, after which an optimiser may write to it."""
        grad = None if self.parameter is None else self.parameter.grad
        return grad is not None and (grad is not self.grad() or grad._version != self.version)

    def read(self) -> Tensor:
        rows, columns = (max(size // 32, 1) for size in self.weight.shape)
        some = self.weight[::rows, ::columns].clone(memory_format=torch.contiguous_format)
        return some.view(-1).view(torch.uint8)

    def differs(self) -> bool:
        weight, sample = self.weight, self.sample
        freed = not weight.untyped_storage().size() if sample is not None else True  # by FSDP
        if freed or not (weight.is_cpu or self.inference or self.passed):
            return False
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        with torch.no_grad():
            return not torch.equal(self.read(), sample)


def versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if t is None or t.is_inference() else t._version for t in tensors)
