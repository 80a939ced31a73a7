"""NeMo Automodel, in its YAML file, with NEMO_ENABLE_USER_MODULES=1 in the environment:

    loss_fn:
      _target_: logitless.integrations.automodel.LinearCrossEntropy

Further keys are options of `ll.linear_cross_entropy`, such as `z_loss` or `workspace`. The recipes
skip the head and gather its weight only for a subclass of their own LinearCrossEntropy.
"""

from typing import Any

from torch import Tensor

from .seams import check_seams

BASE = "nemo_automodel.components.loss.linear_ce_base:LinearCrossEntropy"
FUSED = "nemo_automodel.components.loss.linear_ce:FusedLinearCrossEntropy"
check_seams("nemo-automodel", {
    f"{BASE}.materialize_lm_weight": "lm_weight, grad_reduce_group",
    f"{FUSED}.forward": "self, hidden_states, labels, lm_weight, num_label_tokens,"
    " grad_reduce_group, loss_weights",
})  # fmt: skip

from nemo_automodel.components.loss import linear_ce_base

from ..losses.cross_entropy import linear_cross_entropy


class LinearCrossEntropy(linear_ce_base.LinearCrossEntropy):
    def __init__(
        self, ignore_index: int = -100, logit_softcapping: float = 0, reduction: str = "sum",
        **options: Any,
    ):  # fmt: skip
        super().__init__()
        self.ignore_index, self.reduction, self.options = ignore_index, reduction, options
        self.logit_softcapping = logit_softcapping

    def forward(
        self, hidden_states: Tensor, labels: Tensor, lm_weight: Tensor,
        num_label_tokens: int | None = None, grad_reduce_group: Any = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if self.reduction != "sum" and not (num_label_tokens is None and loss_weights is None):
            raise ValueError(
                "reduction must be 'sum', because the recipe passes num_label_tokens or"
                f" loss_weights, got {self.reduction!r}."
            )
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        loss = linear_cross_entropy(
            hidden_states, weight.to(hidden_states.dtype), labels, ignore_index=self.ignore_index,
            softcap=self.logit_softcapping or None, reduction=self.reduction,
            row_weight=loss_weights, **self.options,
        )  # fmt: skip
        if num_label_tokens is None:
            return loss
        return loss / num_label_tokens if num_label_tokens else loss * 0.0
