"""The functions in losses/ as `nn.Module`s that store the options, and FusedHead."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .contrastive.modules import ContrastiveLoss, SigmoidContrastiveLoss
from .core import call as _call
from .core import option_checks as _option_checks
from .core import tensor_checks as _checks
from .lazy.fused_head import head_logits
from .lazy.linear_logits import LinearLogits
from .losses import cross_entropy as losses
from .losses import dense_teacher as pair
from .losses import sampled_softmax as sampled
from .losses import sparse_teacher as distill
from .losses import statistics

__all__ = [
    "ContrastiveLoss",
    "CrossEntropyLoss",
    "Entropy",
    "FusedHead",
    "JSDLoss",
    "KLDivLoss",
    "LinearCrossEntropyLoss",
    "LogSumExp",
    "SampledSoftmaxLoss",
    "Score",
    "SigmoidContrastiveLoss",
    "TVDLoss",
    "TokenLogprobs",
    "TopKDistillLoss",
]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]


class _LogitsModule(nn.Module):
    @_call.named()
    def __init__(self, temperature: float | Tensor = 1.0, softcap: float | None = None):
        super().__init__()
        _option_checks.check(temperature=temperature, softcap=softcap)
        if isinstance(temperature, Tensor):
            self.register_buffer("temperature", temperature, persistent=False)
        else:
            self.temperature = temperature
        self.softcap = softcap

    def _arguments(self) -> dict:
        return {"temperature": self.temperature, "softcap": self.softcap}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._arguments().items())


class LogSumExp(_LogitsModule):
    """`logitless.logsumexp` as a module."""

    def forward(self, logits: Tensor) -> Tensor:
        return statistics.logsumexp(logits, **self._arguments())


class Entropy(_LogitsModule):
    """`logitless.entropy` as a module."""

    def forward(self, logits: Tensor) -> Tensor:
        return statistics.entropy(logits, **self._arguments())


class TokenLogprobs(_LogitsModule):
    """`logitless.token_logprobs` as a module."""

    def forward(self, logits: Tensor, ids: Tensor) -> Tensor:
        return statistics.token_logprobs(logits, ids, **self._arguments())


class Score(_LogitsModule):
    """`logitless.score` as a module."""

    @_call.named(_LogitsModule)
    def __init__(self, *, ignore_index: int = -100, **reading):
        super().__init__(**reading)
        _option_checks.check(ignore_index=ignore_index)
        self.ignore_index = ignore_index

    def _arguments(self) -> dict:
        return {"ignore_index": self.ignore_index, **super()._arguments()}

    def forward(self, logits: Tensor, target: Tensor) -> statistics.Scores:
        return statistics.score(logits, target, **self._arguments())


class CrossEntropyLoss(_LogitsModule):
    """Drop-in replacement for `torch.nn.CrossEntropyLoss` on (N, V) logits and class ids.

    The options are those of `logitless.cross_entropy`. Unlike in PyTorch, the vocabulary is always
    the last dimension: targets (B, T) match logits (B, T, V). For logits (B, V, T), pass
    logits.movedim(1, -1). If V equals T, a wrong order is not detected, and the loss is wrong.

    >>> loss = CrossEntropyLoss(label_smoothing=0.1)(logits, target)
    """

    weight: Tensor | None

    @_call.named(_LogitsModule)
    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        inplace: bool = False,
        **reading,
    ):
        super().__init__(**reading)
        _checks.is_class_weight(weight)
        _option_checks.check(
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
            z_loss=z_loss,
        )  # fmt: skip
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.inplace = inplace

    def _arguments(self) -> dict:
        return {
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "inplace": self.inplace,
            **super()._arguments(),
        }

    def forward(
        self, logits: Tensor | LinearLogits, target: Tensor, row_weight: Tensor | None = None
    ) -> Tensor:
        return losses.cross_entropy(
            logits, target, weight=self.weight, row_weight=row_weight, **self._arguments()
        )


class _LossModule(_LogitsModule):
    """Base of loss modules. `options` holds all but `temperature` and `softcap`."""

    def __init__(self, options: dict, reading: dict):
        super().__init__(**reading)
        _option_checks.check(**options)
        self.options = options

    def _arguments(self) -> dict:
        return {**self.options, **super()._arguments()}


class TopKDistillLoss(_LossModule):
    """`logitless.topk_distill` as a module. `divergence` and `support` are required."""

    @_call.named(_LogitsModule)
    def __init__(
        self,
        *,
        divergence: str,
        support: str,
        beta: float = 0.5,
        t_squared: bool = False,
        ignore_index: int = -100,
        ce_weight: float = 0.0,
        kd_weight: float = 1.0,
        reduction: str = "mean",
        **reading,
    ):
        options = {
            "divergence": divergence, "support": support, "beta": beta, "t_squared": t_squared,
            "ignore_index": ignore_index, "ce_weight": ce_weight, "kd_weight": kd_weight,
            "reduction": reduction,
        }  # fmt: skip
        super().__init__(options, reading)

    def forward(
        self,
        logits: Tensor,
        targets: distill.SparseTargets,
        labels: Tensor | None = None,
        row_weight: Tensor | None = None,
    ) -> Tensor:
        return distill.topk_distill(
            logits, targets, labels=labels, row_weight=row_weight, **self._arguments()
        )


class _PairLoss(_LossModule):
    """Base of loss modules that take the logits of a student and of a teacher."""

    _function: Callable

    def forward(
        self,
        student: Tensor,
        teacher: Tensor,
        mask: Tensor | None = None,
        row_weight: Tensor | None = None,
    ) -> Tensor:
        loss = type(self)._function
        return loss(student, teacher, mask=mask, row_weight=row_weight, **self._arguments())


class KLDivLoss(_PairLoss):
    """`logitless.kl_div` as a module, for two tensors of logits. `direction` is required."""

    _function = staticmethod(pair.kl_div)

    @_call.named(_LogitsModule)
    def __init__(
        self,
        *,
        direction: str,
        skew: float = 0.0,
        t_squared: bool = False,
        reduction: str = "mean",
        **reading,
    ):
        options = {"direction": direction, "skew": skew, "t_squared": t_squared}
        super().__init__({**options, "reduction": reduction}, reading)


class JSDLoss(_PairLoss):
    """`logitless.jsd` as a module, for two tensors of logits."""

    _function = staticmethod(pair.jsd)

    @_call.named(_LogitsModule)
    def __init__(
        self, *, beta: float = 0.5, t_squared: bool = False, reduction: str = "mean", **reading
    ):
        super().__init__({"beta": beta, "t_squared": t_squared, "reduction": reduction}, reading)


class TVDLoss(_PairLoss):
    """`logitless.tvd` as a module, for two tensors of logits."""

    _function = staticmethod(pair.tvd)

    @_call.named(_LogitsModule)
    def __init__(self, *, t_squared: bool = False, reduction: str = "mean", **reading):
        super().__init__({"t_squared": t_squared, "reduction": reduction}, reading)


class LinearCrossEntropyLoss(CrossEntropyLoss):
    """`logitless.linear_cross_entropy` as a module.

    `weight` holds the class weights; the head's weight is the argument `linear_weight` of forward.
    """

    def forward(
        self,
        hidden: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        row_weight: Tensor | None = None,
    ) -> Tensor:
        return super().forward(LinearLogits(hidden, linear_weight, bias), target, row_weight)


class SampledSoftmaxLoss(nn.Module):
    """`logitless.sampled_softmax` as a module. The table of items is an argument of forward."""

    @_call.named()
    def __init__(
        self,
        *,
        temperature: float = 1.0,
        remove_hits: bool = True,
        ignore_index: int = -100,
        reduction: str = "mean",
        sparse_grad: bool = False,
        workspace: int | None = None,
    ):
        super().__init__()
        self.options = {
            "temperature": temperature, "remove_hits": remove_hits, "ignore_index": ignore_index,
            "reduction": reduction, "sparse_grad": sparse_grad, "workspace": workspace,
        }  # fmt: skip
        _option_checks.check(**self.options)
        _option_checks.temperature(temperature)  # one number, not one number per row

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        negatives: Tensor,
        log_q: Tensor | None = None,
        target_log_q: Tensor | None = None,
        bias: Tensor | None = None,
        row_weight: Tensor | None = None,
    ) -> Tensor:
        return sampled.sampled_softmax(
            hidden, weight, target, negatives, log_q=log_q, target_log_q=target_log_q, bias=bias,
            row_weight=row_weight, **self.options,
        )  # fmt: skip


class FusedHead(nn.Linear):
    """A linear head that returns lazy logits in training.

    Losses of logitless and PyTorch compute lazy logits (LazyLogits) from the hidden states and the
    weight, without materialising them. Without gradients, as in evaluation and sampling, logits of
    at most 32 MiB are plain tensors, and larger ones lazy; with lazy_inference=False, all are plain
    tensors. `workspace`, `logits_dtype`, `accumulate` and `drop_ignored` are those of LinearLogits.

    >>> head = FusedHead(4096, 128256, bias=False)
    >>> loss = cross_entropy(head(hidden), target)  # or torch.nn.functional.cross_entropy
    """

    @_call.named(nn.Linear)
    def __init__(
        self, *args, workspace: int | None = None, logits_dtype: torch.dtype | None = None,
        accumulate: str = "auto", drop_ignored: bool = True, lazy_inference: bool = True, **kwargs,
    ):  # fmt: skip
        super().__init__(*args, **kwargs)
        self.lazy_inference = lazy_inference
        self.head_options = {
            "workspace": workspace, "logits_dtype": logits_dtype, "accumulate": accumulate,
            "drop_ignored": drop_ignored,
        }  # fmt: skip
        _option_checks.check(**self.head_options, lazy_inference=lazy_inference)

    def forward(self, input: Tensor) -> Tensor:
        return head_logits(self, input, self.head_options, self.lazy_inference)
