"""What lazy logits are made of, and how their numbers are made: see lazy/logits.py."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..heads.linear import LinearLogits, dtypes_as_given, plain_logits
from ..heads.unshard import in_memory


class Recipe(NamedTuple):
    """What lazy logits are made of: post · tanh(pre · (hidden @ weight.T + bias)), in a dtype.

    Without `capped` it is pre · (...); with `log`, factor · log_softmax of that. The vocabulary is
    the last dimension, or another, `axis`.
    """

    hidden: Tensor  # (..., D); this and the next two without history
    weight: Tensor  # (V, D)
    bias: Tensor | None
    needs: tuple[bool, bool, bool]  # which of the three want a gradient
    dtype: torch.dtype
    how: dict  # options of the LinearLogits
    module: nn.Module | None  # whose weight it is: a wrapper may have to gather it again
    versions: tuple[int, ...]  # of the three, when the logits were made
    pre: float = 1.0
    capped: bool = False
    post: float = 1.0
    log: bool = False
    factor: float = 1.0
    axis: int | None = None
    shard: Any = None  # the VocabShard without logits, where weight and bias are one rank's rows

    @property
    def vocab(self) -> int:
        return self.weight.shape[0] if self.shard is None else self.shard.vocab

    @property
    def rows(self) -> torch.Size:
        return self.hidden.shape[:-1]

    @property
    def shape(self) -> tuple[int, ...]:
        at = len(self.rows) if self.axis is None else self.axis
        return (*self.rows[:at], self.vocab, *self.rows[at:])

    @property
    def scale(self) -> float:
        """What multiplies the head's numbers before a softcap that is `post`."""
        scale = self.pre * self.post
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-15) else scale

    @property
    def cap(self) -> float | None:
        return self.post if self.capped else None

    def obstacle(self, softcap: float | None) -> str | None:
        """Why a loss with this softcap cannot read them from the head, if it cannot."""
        if self.log:
            return "log-probabilities"
        if self.axis is not None:
            return "transposed logits"
        return "logits capped twice" if self.capped and softcap is not None else None

    @property
    def reads(self) -> dict[str, float]:
        """As options of our losses: softcap · tanh(x / softcap) / temperature."""
        if self.capped:
            return {"softcap": 1 / self.pre, "temperature": 1 / (self.pre * self.post)}
        return {"temperature": 1 / self.pre}

    def check(self) -> None:
        """Raise where what the logits are made of was written to since; no compiler can know."""
        if torch.compiler.is_compiling():
            return
        if self.versions != versions(self.hidden, self.weight, self.bias):
            raise RuntimeError(
                "hidden, weight and bias of lazy logits must not be modified in place before the"
                " logits are used: they are not computed until then."
            )

    def dense(self) -> Tensor:
        """The numbers, without history."""
        self.check()
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            dtypes_as_given(self.hidden.device),
            in_memory(self.weight, self.module),
        ):
            exact = self.how.get("logits_dtype") or self.hidden.dtype
            z = plain_logits(self.hidden, self.weight, self.bias, exact).to(self.dtype)
            z = z if self.shard is None else self.shard.over(z).materialize()
            z = z if self.pre == 1 else z * self.pre
            z = torch.tanh(z) * self.post if self.capped else z
            z = torch.log_softmax(z, -1) if self.log else z
            z = z if self.factor == 1 else z * self.factor
            # A wrapper promises contiguous numbers.
            return z if self.axis is None else z.movedim(-1, self.axis).contiguous()

    def source(self, wanted: bool = True) -> LinearLogits:
        """The head as a source of logits, of leaves that require the gradients wanted, if any."""
        self.check()
        hidden, weight, bias = (
            None if t is None else constant(t).requires_grad_(need and wanted)
            for t, need in zip(self[:3], self.needs, strict=True)
        )
        with dtypes_as_given(self.hidden.device):
            head = LinearLogits(hidden, weight, bias, **self.how)  # pyright: ignore[reportArgumentType]
        head.module = self.module
        return head if self.shard is None else self.shard.over(head).head()

    def teacher(self) -> Any:
        """The same as constants, of logits that no `obstacle` keeps from their head."""
        if self.shard is None:
            head = self.source(False)
            head.scale, head.cap = self.pre, self.cap
            return head
        return self.shard.over(self._replace(shard=None).teacher())

    def without_parts(self) -> "Recipe":
        """For a node, which saves them as autograd saves."""
        return self._replace(hidden=None, weight=None, bias=None)

    def with_parts(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> "Recipe":
        return self._replace(hidden=hidden, weight=weight, bias=bias)


def constant(t: Tensor) -> Tensor:
    """Without history; outside inference mode a copy of its tensors, which autograd cannot save."""
    if torch.compiler.is_compiling():  # which cannot ask
        return t.detach()
    return t.clone() if t.is_inference() else t.detach()


def versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if t is None or t.is_inference() else t._version for t in tensors)
