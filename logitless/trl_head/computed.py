"""The results of TRL's fused head, computed by functions of this library.

`token_statistics` and `divergences` replace TRL's two autograd functions. The first argument of
these functions is a `Call`. The other arguments are the arguments of the replaced function.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..heads.gemms import autocasts
from ..lazy.linear_logits import LinearLogits
from ..losses.cross_entropy import cross_entropy_and_scores
from ..losses.dense_teacher import jsd
from ..losses.statistics import entropy, row_stats, token_logprobs

IN_ONE_PASS = {"log_probs", "entropy", "is_top1"}  # results of cross_entropy_and_scores


class Call(NamedTuple):
    """The options of one forward of an adapted model."""

    options: dict  # options of LinearLogits
    sums_its_loss: bool = False  # whether only the sum of the log-probabilities is used
    counts: Tensor | None = None  # bool mask of the tokens that have a label, if known


def token_statistics(
    call: Call,
    hidden: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,)
    temperature: float,
    _chunk: int,  # columns per tile of TRL's own function
    softcap: float | None = None,
    scale: float = 1.0,
    outputs: tuple[str, ...] = (),
) -> tuple[Tensor | None, ...]:
    """Returns, for each token, log p of the target and further statistics.

    The further statistics are the entropy, log Σ p², the mean logit, and whether the target is the
    argmax. Let x be the logits of the head, z = softcap · tanh(scale · x / softcap) / temperature,
    and p = softmax(z). The function always computes log p. The other statistics are None if they
    are not in `outputs`.
    """
    logits, scale = _logits(hidden, weight, bias, scale, call.options)
    how = {"temperature": temperature / scale, "softcap": softcap and softcap / scale}
    # On a CPU, TRL passes all rows, and sets the target of rows without a label to 0.
    counts = call.counts
    all_rows = counts is not None and counts.numel() == len(hidden)
    mask = counts.reshape(-1).to(hidden.device) if all_rows else None
    if call.sums_its_loss and IN_ONE_PASS.issuperset(outputs):
        loss, scores = cross_entropy_and_scores(logits, targets, mask=mask, reduction="sum", **how)
        logprob = LogprobsOfSum.apply(loss, scores.logprob, mask)
        results = {"entropy": scores.entropy, "is_top1": scores.argmax == targets}
    else:
        wants = {
            "entropy": "entropy" in outputs, "total": "mean_logits" in outputs,
            "argmax": "is_top1" in outputs,
        }  # fmt: skip
        stats = row_stats(logits, targets, mask=mask, **wants, **how)
        logprob, results = stats.logprob, {"entropy": stats.entropy}
        if wants["total"]:
            results["mean_logits"] = stats.total.detach() / weight.shape[0]
        if wants["argmax"]:
            results["is_top1"] = stats.argmax == targets
        if "log_sum_sq_probs" in outputs:
            results["log_sum_sq_probs"] = _log_sum_of_squares(logits, logprob, targets, how)
    names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    return logprob, *(results.get(name) if name in outputs else None for name in names)


@torch.no_grad()
def _log_sum_of_squares(
    logits: LinearLogits, logprob: Tensor, targets: Tensor, how: dict
) -> Tensor:
    """Returns log Σ p².

    At half the temperature, a token has the log-probability 2 log p - log Σ p². So log Σ p² follows
    from the target's log-probabilities at both temperatures.
    """
    half = {**how, "temperature": how["temperature"] / 2}
    return 2 * logprob - token_logprobs(logits, targets, **half)


def divergences(
    call: Call,
    student_hidden: Tensor,  # (N, D)
    student_weight: Tensor,  # (V, D)
    student_bias: Tensor | None,
    teacher_hidden: Tensor,  # (N, D of the teacher)
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float = 1.0,
    student_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_scale: float = 1.0,
    teacher_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the divergence `jsd` of each row, and the detached entropy of the student.

    By default, the logits of both heads are in fp32, as in TRL. The option `logits_dtype` selects
    another dtype.
    """
    options = {"logits_dtype": torch.float32, **call.options}
    student = _transformed(
        (student_hidden, student_weight, student_bias), student_scale, student_softcap, options
    )
    with torch.no_grad():
        teacher = _transformed(
            (teacher_hidden, teacher_weight, teacher_bias), teacher_scale, teacher_softcap, options
        )
    value = jsd(student, teacher, beta=beta, temperature=temperature, reduction="none")
    with torch.no_grad():
        return value, entropy(student.detach(), temperature=temperature)


def logprobs_and_entropies(
    logits: Tensor,  # (..., V)
    index: Tensor,  # (...)
    temperature: float = 1.0,
    row_mask: Tensor | None = None,  # (...)
) -> tuple[Tensor, Tensor]:
    """Returns log p[index] and the entropy of each row.

    Both results are 0 in rows whose entry in `row_mask` is 0.
    """
    mask = None if row_mask is None else row_mask != 0
    how = {"temperature": temperature, "mask": mask, "ignore_index": None}
    stats = row_stats(logits, index, entropy=True, **how)
    return stats.logprob, stats.entropy


def gkd_loss(
    student_logits: Tensor,  # (B, T, V)
    teacher_logits: Tensor,  # (B, T, V)
    labels: Tensor | None = None,  # (B, T)
    beta: float = 0.5,
    temperature: float = 1.0,
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """Returns the sum of `jsd` over all tokens that have a label, divided by `num_items_in_batch`.

    If num_items_in_batch is None, the divisor is the number of tokens that have a label. Without
    labels, the sum is over all tokens, and the default divisor is the batch size B.
    """
    mask = None if labels is None else labels != -100
    rows = jsd(
        student_logits, teacher_logits, beta=beta, temperature=temperature, mask=mask,
        reduction="none",
    )  # fmt: skip
    if num_items_in_batch is not None:
        # Only a GPU tensor has to be moved. A Python number or a 0-d CPU tensor can divide a GPU
        # tensor.
        if isinstance(num_items_in_batch, Tensor) and num_items_in_batch.is_cuda:
            num_items_in_batch = num_items_in_batch.to(rows.device)
        return rows.sum() / num_items_in_batch
    return rows.sum() / (max(len(rows), 1) if mask is None else mask.sum().clamp(min=1))


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, options: dict
) -> tuple[LinearLogits, float]:
    """Returns (logits, factor), where factor · logits is `scale` times the head's logits.

    The factor is positive. If `scale` is not positive, `hidden` and `bias` are multiplied by
    `scale`, and the factor is 1.
    """
    if hasattr(weight, "ds_id"):
        raise NotImplementedError(
            "use_in_trl does not support weights that DeepSpeed ZeRO-3 shards. Call unuse_in_trl on"
            " the trainer."
        )
    if not autocasts(hidden.device):
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
    if scale <= 0:  # the temperature is divided by `scale`, and must stay positive
        hidden, bias, scale = hidden * scale, None if bias is None else bias * scale, 1.0
    return LinearLogits(hidden, weight, bias, **options), scale


def _transformed(
    head: tuple[Tensor, Tensor, Tensor | None], scale: float, softcap: float | None, options: dict
) -> Tensor:
    """Returns lazy logits softcap · tanh(scale · x / softcap), where x are the head's logits."""
    logits, scale = _logits(*head, scale, options)
    z = logits.lazy()
    if scale != 1:
        z = z * scale
    return z if softcap is None else torch.tanh(z / softcap) * softcap


class LogprobsOfSum(torch.autograd.Function):
    """Returns the log-probabilities of tokens. The backward computes only the gradient of `loss`.

    All tokens whose entry in `mask` is True must have the same upstream gradient g, as in TRL's
    SFTTrainer. If `mask` is None, all tokens must have the same upstream gradient. `loss` is minus
    the sum of the log-probabilities, so the gradient of `loss` is -g. The forward that computed
    `loss` has already computed the gradients of `loss`. So backward does not compute the logits
    again.
    """

    @staticmethod
    def forward(ctx, loss: Tensor, logprob: Tensor, mask: Tensor | None):
        ctx.save_for_backward(mask)
        return logprob.clone()

    @staticmethod
    def backward(ctx, *upstream):
        (g,), (mask,) = upstream, ctx.saved_tensors
        low, high = g, g
        if mask is not None:
            low, high = g.where(mask, torch.inf), g.where(mask, -torch.inf)
        if not g.numel():
            return g.sum(), None, None
        low, high = low.amin(), high.amax()
        # Unequal upstream gradients give NaN. To raise an error, the host would have to wait for
        # the GPU.
        equal = torch.where(low == high, -low, torch.nan)
        return torch.where(low > high, 0.0, equal), None, None
