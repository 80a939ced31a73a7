"""Modules that store arguments and call the functions."""

from torch import Tensor, nn

from . import losses


class _Reads(nn.Module):
    """How a module reads its logits."""

    def __init__(self, temperature: float | Tensor = 1.0, softcap: float | None = None):
        super().__init__()
        if isinstance(temperature, Tensor):
            self.register_buffer("temperature", temperature, persistent=False)
        else:
            self.temperature = temperature
        self.softcap = softcap

    def _how(self) -> dict:
        return {"temperature": self.temperature, "softcap": self.softcap}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._how().items())


class LogSumExp(_Reads):
    """`logitless.logsumexp` as a module."""

    def forward(self, logits: Tensor) -> Tensor:
        return losses.logsumexp(logits, **self._how())


class Entropy(_Reads):
    """`logitless.entropy` as a module."""

    def forward(self, logits: Tensor) -> Tensor:
        return losses.entropy(logits, **self._how())


class TokenLogprobs(_Reads):
    """`logitless.token_logprobs` as a module."""

    def forward(self, logits: Tensor, ids: Tensor) -> Tensor:
        return losses.token_logprobs(logits, ids, **self._how())


class Score(_Reads):
    """`logitless.score` as a module."""

    def __init__(self, *, ignore_index: int = -100, **reads):
        super().__init__(**reads)
        self.ignore_index = ignore_index

    def _how(self) -> dict:
        return {"ignore_index": self.ignore_index, **super()._how()}

    def forward(self, logits: Tensor, target: Tensor) -> losses.Scores:
        return losses.score(logits, target, **self._how())


class CrossEntropyLoss(_Reads):
    """`torch.nn.CrossEntropyLoss` on (N, V) and class ids, with `cross_entropy`'s options.

    Unlike PyTorch's, the vocabulary is the last dimension of any shape: (B, T, V) with targets (B,
    T).
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        inplace: bool = False,
        **reads,
    ):
        super().__init__(**reads)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.inplace = inplace

    def _how(self) -> dict:
        return {
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "inplace": self.inplace,
            **super()._how(),
        }

    def forward(self, logits: Tensor, target: Tensor, row_weight: Tensor | None = None) -> Tensor:
        return losses.cross_entropy(
            logits, target, weight=self.weight, row_weight=row_weight, **self._how()
        )
