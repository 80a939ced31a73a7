"""What lazy logits are computed from, and how: a head, operations on its values, and an axis."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..heads.head import Head, ScaledHead
from ..heads.products import without_autocast
from ..heads.unshard import in_memory


class Recipe(NamedTuple):
    """Lazy logits are post · tanh(pre · (hidden @ weight.T + bias)), in a dtype.

    Without `capped` they are pre · (...); with `log`, factor · log_softmax of that. The vocabulary
    is the last dimension, or another, `axis`.
    """

    head: Head  # its tensors are detached
    needs: tuple[bool, bool, bool]  # whether hidden, weight and bias need a gradient
    dtype: torch.dtype
    versions: tuple[int, ...]  # of hidden, weight and bias, when the logits were created
    pre: float = 1.0
    capped: bool = False
    post: float = 1.0
    log: bool = False
    factor: float = 1.0
    axis: int | None = None
    shard: Any = None  # the VocabShard without logits, where weight and bias are one rank's rows

    @property
    def vocab(self) -> int:
        return self.head.vocab if self.shard is None else self.shard.vocab

    @property
    def lead(self) -> torch.Size:
        """The shape of the rows."""
        return self.head.lead

    @property
    def shape(self) -> tuple[int, ...]:
        lead = self.lead
        at = len(lead) if self.axis is None else self.axis
        return (*lead[:at], self.vocab, *lead[at:])

    @property
    def scale(self) -> float:
        """The factor of the head's logits before a softcap of `post`."""
        scale = self.pre * self.post
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-15) else scale

    @property
    def cap(self) -> float | None:
        return self.post if self.capped else None

    def obstacle(self, softcap: float | None) -> str | None:
        """Why a loss with this softcap cannot be computed from the head; None if it can."""
        if self.log:
            return "log-probabilities"
        if self.axis is not None:
            return "transposed logits"
        return "logits capped twice" if self.capped and softcap is not None else None

    @property
    def reads(self) -> dict[str, float]:
        """The value operations as options of our losses: softcap and temperature."""
        if self.capped:
            return {"softcap": 1 / self.pre, "temperature": 1 / (self.pre * self.post)}
        return {"temperature": 1 / self.pre}

    def check(self) -> None:
        """Raises if hidden, weight or bias was written to since. A compiler skips this."""
        if torch.compiler.is_compiling():
            return
        if self.versions != versions(*self.head.tensors):
            raise RuntimeError(
                "hidden, weight and bias of lazy logits must not be modified in place before the"
                " logits are used: they are not computed until then."
            )

    def dense(self) -> Tensor:
        """The logits as a plain tensor, detached."""
        self.check()
        head = self.head
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            without_autocast(head.device),
            in_memory(head.weight, head.module),
        ):
            z = head.logits().to(self.dtype)
            z = z if self.shard is None else self.shard.over(z).materialize()
            z = z if self.pre == 1 else z * self.pre
            z = torch.tanh(z) * self.post if self.capped else z
            z = torch.log_softmax(z, -1) if self.log else z
            z = z if self.factor == 1 else z * self.factor
            # A wrapper subclass promises contiguous memory.
            return z if self.axis is None else z.movedim(-1, self.axis).contiguous()

    def constant_head(self, grad: bool = False) -> Head:
        """The head over detached tensors, which require the gradients that are needed if `grad`.

        Over ranks, the head of this rank's columns.
        """
        self.check()
        hidden, weight, bias = (
            None if t is None else constant(t).requires_grad_(need and grad)
            for t, need in zip(self.head.tensors, self.needs, strict=True)
        )
        head = self.head._replace(hidden=hidden, weight=weight, bias=bias)
        if self.shard is None:
            return head
        return head._replace(columns=self.shard.head_backend(head.hidden, False))

    def teacher(self) -> Any:
        """The same logits as constants. Only valid where `obstacle` is None."""
        if self.shard is None:
            return ScaledHead(self.constant_head(), self.pre, self.cap)
        return self.shard.over(self._replace(shard=None).teacher())

    def with_tensors(self, hidden: Any, weight: Any, bias: Any) -> "Recipe":
        """The same recipe over other tensors. Nodes save the tensors as autograd does."""
        return self._replace(head=self.head._replace(hidden=hidden, weight=weight, bias=bias))


def constant(t: Tensor) -> Tensor:
    """t detached. Inference tensors are cloned, because autograd cannot save them."""
    if torch.compiler.is_compiling():  # where is_inference is not available
        return t.detach()
    return t.clone() if t.is_inference() else t.detach()


def versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if t is None or t.is_inference() else t._version for t in tensors)
