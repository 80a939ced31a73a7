"""The recipe of lazy logits: a head, operations on the head's logits, and an axis."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..heads.head import Head, ScaledHead
from ..heads.products import without_autocast
from ..heads.unshard import in_memory


class Recipe(NamedTuple):
    """The formula that computes the values of lazy logits.

    The logits are z = hidden @ weight.T + bias. With `capped`, the values are
    y = post · tanh(pre · z). Without `capped`, the values are y = pre · z. With `log`, the values
    are factor · log_softmax(y). Then each function in `after`, such as a softmax, is applied to
    whole rows. The values have the dtype `dtype` before the functions in `after`.
    """

    head: Head  # its tensors are detached
    needs: tuple[bool, bool, bool]  # whether hidden, weight and bias need a gradient
    dtype: torch.dtype
    versions: tuple[int, ...]  # versions of hidden, weight and bias when the logits were created
    watch: "Watch"  # detects writes to the weight
    trains: bool = False  # whether the logits were created in a training forward
    pre: float = 1.0
    capped: bool = False
    post: float = 1.0
    log: bool = False
    factor: float = 1.0
    after: tuple[Callable[[Tensor], Tensor], ...] = ()
    after_dtype: torch.dtype | None = None  # dtype after `after`; None if `after` is empty
    axis: int | None = None  # the dimension of the vocabulary; None for the last dimension
    shard: Any = None  # a VocabShard if weight and bias hold only the rows of this rank

    @property
    def vocab(self) -> int:
        return self.head.vocab if self.shard is None else self.shard.vocab

    @property
    def lead(self) -> torch.Size:
        """The shape of the rows."""
        return self.head.lead

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def of_logits(self) -> bool:
        """Whether the values are logits, up to a scale and a softcap."""
        return not self.log and not self.after

    @property
    def shape(self) -> tuple[int, ...]:
        lead = self.lead
        at = len(lead) if self.axis is None else self.axis
        return (*lead[:at], self.vocab, *lead[at:])

    @property
    def scale(self) -> float:
        """The factor of the head's logits before a softcap with the limit `post`."""
        scale = self.pre * self.post
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-15) else scale

    @property
    def cap(self) -> float | None:
        return self.post if self.capped else None

    def obstacle(self, softcap: float | None) -> str | None:
        """The reason why a loss with this softcap needs plain logits, or None."""
        if self.after:
            return "probabilities or other functions of logits"
        if self.log:
            return "log-probabilities"
        if self.axis is not None:
            return "transposed logits"
        return "logits capped twice" if self.capped and softcap is not None else None

    @property
    def reads(self) -> dict[str, float]:
        """The temperature and softcap of our losses that replace `pre`, `post` and `capped`."""
        if self.capped:
            return {"softcap": 1 / self.pre, "temperature": 1 / (self.pre * self.post)}
        return {"temperature": 1 / self.pre}

    def stale(self) -> bool:
        """Whether hidden, weight or bias was written to since. A compiler skips this."""
        return self.changed() or (not torch.compiler.is_compiling() and self.watch.differs())

    def changed(self) -> bool:
        """Whether the version of hidden, weight or bias has changed."""
        return not torch.compiler.is_compiling() and self.versions != versions(*self.head.tensors)

    def check(self, numbers: bool = True) -> None:
        """Raises if the values can no longer be computed.

        Without `numbers`, only versions are compared, which is enough before an operation whose
        result is checked again when its values are computed.
        """
        if self.stale() if numbers else self.changed():
            raise RuntimeError(
                "hidden, weight and bias of lazy logits must not be modified in place before the"
                " logits are used, as optimizer.step() modifies them, because the logits are not"
                " computed until then. Use the logits before the step, or keep a copy of them:"
                " logits.detach().materialize()."
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
            z = head.logits()
            z = z if self.shard is None else self.shard.over(z).materialize()
            z = self.values_of(z)
            # Contiguous, because LazyLogits has the strides of contiguous memory.
            return z if self.axis is None else z.movedim(-1, self.axis).contiguous()

    def values_of(self, z: Tensor) -> Tensor:
        """Computes the values, differentiably, from the head's logits z (..., V)."""
        z = z.to(self.dtype)
        z = z if self.pre == 1 else z * self.pre
        z = torch.tanh(z) * self.post if self.capped else z
        z = torch.log_softmax(z, -1) if self.log else z
        z = z if self.factor == 1 else z * self.factor
        for function in self.after:
            z = function(z)
        return z

    def constant_head(self, grad: bool = False) -> Head:
        """The head over detached tensors.

        With `grad`, the tensors in `needs` require a gradient. If the vocabulary is sharded, the
        head computes the columns of this rank.
        """
        self.check()
        hidden, weight, bias = (
            None if t is None else constant(t).requires_grad_(need and grad)
            for t, need in zip(self.head.tensors, self.needs, strict=True)
        )
        head = self.head.replace(hidden=hidden, weight=weight, bias=bias)
        if self.shard is None:
            return head
        return head.replace(columns=self.shard.head_backend(head.hidden, False))

    def teacher(self) -> Any:
        """The same logits as constants. `obstacle(None)` must be None."""
        if self.shard is None:
            return ScaledHead(self.constant_head(), self.pre, self.cap)
        return self.shard.over(self._replace(shard=None).teacher())

    def with_tensors(self, hidden: Any, weight: Any, bias: Any) -> "Recipe":
        """The same recipe over other tensors. Autograd nodes save a recipe without its tensors."""
        return self._replace(head=self.head.replace(hidden=hidden, weight=weight, bias=bias))


def constant(t: Tensor) -> Tensor:
    """t detached. Inference tensors are cloned, because autograd cannot save them."""
    if torch.compiler.is_compiling():  # a compiler cannot call is_inference
        return t.detach()
    return t.clone() if t.is_inference() else t.detach()


def own(t: Tensor) -> Tensor:
    """A copy of a caller's tensor, because the caller may write to it before values are computed.

    A copy of an inference tensor is a plain tensor, which autograd can save.
    """
    with torch.inference_mode(False):
        return t.clone()


class Watch:
    """Detects writes to a weight that do not change its version.

    Some optimisers write through `.data` or through an address. Such a write does not change the
    version of the tensor. So about 32 x 32 numbers of the weight are copied when the logits are
    created. On a CPU, these numbers are compared with the weight before each use of the logits. On
    other devices, they are compared only after a backward, because the host waits for the
    comparison.
    """

    def __init__(self, weight: Tensor):
        self.weight = weight
        self.passed: list[bool] = []  # not empty once a backward has passed the head
        known = type(weight) is Tensor and weight.device.type != "meta" and weight.dim() == 2
        known = known and not torch.compiler.is_compiling()
        in_memory = known and weight.untyped_storage().size() > 0  # FSDP may have freed the weight
        self.sample = self.read() if in_memory else None

    def read(self) -> Tensor:
        """The bits of some numbers of the weight."""
        rows, columns = (max(size // 32, 1) for size in self.weight.shape)
        some = self.weight[::rows, ::columns].clone(memory_format=torch.contiguous_format)
        return some.view(-1).view(torch.uint8)

    def differs(self) -> bool:
        weight, sample = self.weight, self.sample
        freed = not weight.untyped_storage().size() if sample is not None else True  # by FSDP
        if freed or not (weight.is_cpu or self.passed):
            return False
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        with torch.no_grad():
            return not torch.equal(self.read(), sample)  # pyright: ignore


def versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if t is None or t.is_inference() else t._version for t in tensors)
