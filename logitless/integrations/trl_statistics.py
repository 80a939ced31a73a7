"""The results of TRL's fused head, computed by functions of this library.

`token_statistics` and `divergences` replace TRL's two autograd functions. The first argument of
these functions is a `Call`. The other arguments are the arguments of the replaced function.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..heads.gemms import autocasts
from ..lazy.linear_logits import LinearLogits
from ..losses.dense_teacher import jsd
from ..losses.statistics import entropy, row_stats, token_logprobs
from .token_gradients import Tokens, Ways, statistics_of


class Call(NamedTuple):
    """The options of one forward of an adapted model."""

    options: dict  # options of LinearLogits
    ways: Ways | None = None  # of the trainer; None for a single model
    counts: Tensor | None = None  # (B, T), bool mask of the tokens that have a label, if known
    step: Any = None  # a Step, if the loss can be rehearsed (trl_rehearsal.py)


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
    half = None
    if "log_sum_sq_probs" in outputs:
        cooler = {**how, "temperature": how["temperature"] / 2}
        with torch.no_grad():
            half = token_logprobs(logits, targets, mask=mask, **cooler)
    wants = {
        "entropy": "entropy" in outputs, "total": "mean_logits" in outputs,
        "argmax": "is_top1" in outputs,
    }  # fmt: skip
    tokens = Tokens(targets, mask, counts, half, how, wants, call.step)
    compute: Any = statistics_of
    if torch.compiler.is_compiling():  # the way to compute gradients can change in every step
        compute = torch.compiler.disable(compute)
    logprob, entropy, total, argmax = compute(tokens, call.ways or Ways(), logits.head)
    results = {
        "entropy": entropy,
        # At half the temperature, a token has the log-probability 2 log p - log Σ p².
        "log_sum_sq_probs": None if half is None else 2 * logprob.detach() - half,
        "mean_logits": total.detach() / weight.shape[0] if wants["total"] else None,
        "is_top1": argmax == targets if wants["argmax"] else None,
    }
    return logprob, *(t if name in outputs else None for name, t in results.items())


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
