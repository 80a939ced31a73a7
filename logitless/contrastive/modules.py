"""The contrastive losses as `nn.Module`s, whose scale and bias can be trained."""

import math

import torch
from torch import Tensor, nn

from ..core import option_checks
from ..core.call import named
from . import checks
from .info_nce import contrastive
from .sigmoid import sigmoid_contrastive


class _Group:
    """A process group, which cannot be copied; all copies of a module share it."""

    def __init__(self, group):
        self.group = group

    def __deepcopy__(self, memo) -> "_Group":
        return self

    def __reduce__(self):
        if self.group is not None:
            raise TypeError(
                "a contrastive loss must have group=None to be pickled, because a process group"
                f" belongs to one process, got {type(self.group).__name__}; pickle the state_dict."
            )
        return _Group, (None,)


class _ContrastiveModule(nn.Module):
    """The scale is exp(log_scale), and can be trained."""

    log_scale: Tensor

    def __init__(
        self, scale: float, max_scale: float | None, trainable: bool, group, options: dict
    ):
        super().__init__()
        checks.module_scale(scale, max_scale)
        checks.group(group)
        option_checks.check(trainable=trainable, **options)
        self.max_scale, self.trainable, self._group = max_scale, trainable, _Group(group)
        self.options = options
        self._number("log_scale", math.log(scale))

    def _number(self, name: str, value: float) -> None:
        """A parameter, or a buffer if the module is not trainable."""
        number = torch.tensor(value, dtype=torch.float32)
        if self.trainable:
            self.register_parameter(name, nn.Parameter(number))
        else:
            self.register_buffer(name, number)

    def _scale(self) -> Tensor:
        """exp(log_scale), at most max_scale.

        As in CLIP, log_scale is clamped in place, so that a later step can reduce the scale again.
        """
        if self.max_scale is not None:
            with torch.no_grad():
                self.log_scale.clamp_(max=math.log(self.max_scale))
        return self.log_scale.exp()

    @property
    def group(self):
        return self._group.group

    def extra_repr(self) -> str:
        about = {"max_scale": self.max_scale, "trainable": self.trainable, **self.options}
        return ", ".join(f"{name}={value}" for name, value in about.items())


class ContrastiveLoss(_ContrastiveModule):
    """`logitless.contrastive` as a module, with a scale that can be trained.

    The parameter is log_scale, as in CLIP: the scale exp(log_scale) starts at `scale`, and is at
    most `max_scale`. With trainable=False, it is constant. The embeddings are not normalised. The
    state_dict does not hold `group`; copies of a module share it, and a module with a group cannot
    be pickled. The other options are those of `logitless.contrastive`.

    >>> loss = ContrastiveLoss()(images, texts)
    """

    @named()
    def __init__(
        self,
        *,
        scale: float = 1 / 0.07,
        max_scale: float | None = 100.0,
        trainable: bool = True,
        symmetric: bool = True,
        ignore_index: int = -100,
        reduction: str = "mean",
        group=None,
        averaged: bool = True,
        workspace: int | None = None,
    ):
        options = {
            "symmetric": symmetric, "ignore_index": ignore_index, "reduction": reduction,
            "averaged": averaged, "workspace": workspace,
        }  # fmt: skip
        super().__init__(scale, max_scale, trainable, group, options)

    def forward(
        self,
        a: Tensor,
        b: Tensor,
        positives: Tensor | None = None,
        mask: Tensor | None = None,
        labels: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        return contrastive(
            a, b, scale=self._scale(), positives=positives, mask=mask, labels=labels,
            group=self.group, **self.options,
        )  # fmt: skip


class SigmoidContrastiveLoss(_ContrastiveModule):
    """`logitless.sigmoid_contrastive` as a module, with a scale and a bias that can be trained.

    The scale is exp(log_scale). By default, training starts at scale 10 and bias -10, as in SigLIP,
    and the scale has no upper bound. The other options are those of `ContrastiveLoss`.

    >>> loss = SigmoidContrastiveLoss()(images, texts)
    """

    bias: Tensor

    @named()
    def __init__(
        self,
        *,
        scale: float = 10.0,
        bias: float = -10.0,
        max_scale: float | None = None,
        trainable: bool = True,
        reduction: str = "mean",
        group=None,
        averaged: bool = True,
        workspace: int | None = None,
    ):
        options = {"reduction": reduction, "averaged": averaged, "workspace": workspace}
        super().__init__(scale, max_scale, trainable, group, options)
        option_checks.factor("bias", bias)
        self._number("bias", bias)

    def forward(self, a: Tensor, b: Tensor, positives: Tensor | None = None) -> Tensor:
        return sigmoid_contrastive(
            a, b, scale=self._scale(), bias=self.bias, positives=positives, group=self.group,
            **self.options,
        )  # fmt: skip
