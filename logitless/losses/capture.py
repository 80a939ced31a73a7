"""Captures the targets of a sparse teacher from the teacher's logits.

`capture_topk` captures the most probable ids of each row, and `capture_sampled` captures ids that
are drawn at random. `topk_distill` (sparse_teacher.py) computes a loss against the captured
targets.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..core import call
from ..core import tensor_checks as rules
from ..core.capture import Capture, Captured, Sampled, TopK, uniforms_of
from ..core.choose_backend import captured
from ..core.source import source_of
from ..targets.sparse import SparseTargets, unchecked
from . import checks


@call.named()
@torch.no_grad()
def capture_topk(
    logits: Tensor, k: int, *, temperature: float = 1.0, softcap: float | None = None
) -> SparseTargets:
    """Returns the k most probable ids per row, and their exact log-probabilities.

    The result also holds the log of the tail mass, which is the probability of all other ids.

    The ids are sorted by descending probability. Ids of equal probability are sorted in ascending
    order. The results have no gradient. On a GPU, the function reads the logits only once if k is
    at most 256. For k above 256, torch.topk runs on one chunk of rows at a time.

    >>> capture_topk(torch.tensor([[0.0, 2.0, 1.0]]), 2).ids
    tensor([[1, 2]])
    """
    call.check_once(checks.capture_topk, logits, k, temperature, softcap)
    options = (float(temperature), None if softcap is None else float(softcap))
    return unchecked(*_captured(logits, TopK(k), *options))


@call.named()
@torch.no_grad()
def capture_sampled(
    logits: Tensor,
    n: int,
    *,
    proposal: float = 1.0,
    generator: torch.Generator | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> SparseTargets:
    """Draws n ids per row with replacement, and returns the distinct ids and their weights.

    Let p = softmax(z), with z = softcap · tanh(logits / softcap) / temperature. The probability of
    a draw is p^proposal, divided by the sum of p^proposal over the row. The weight of an id is
    proportional to count · p^(1 - proposal), where `count` is the number of draws of the id. The
    weights of a row add up to 1. The field `logprobs` of the result holds the logs of the weights.
    With proposal=1, the weight is count / n. With `proposal` < 1, rare ids are drawn more often
    than with proposal=1.

    With proposal=1, the expected value of the weights is p. Therefore, the gradient of
    `topk_distill(..., divergence="forward_kl", support="truncate")` is an unbiased estimate of the
    gradient of the forward KL over the whole vocabulary. With any other `proposal`, the weights are
    divided by their sum, so the estimate has a bias of order 1 / n.

    The result has n slots per row. The ids are in ascending order. The slots after the last
    distinct id are masked, and hold the id 0. The targets have no tail. If all logits of a row are
    -inf, all slots of this row are masked. If a logit of a row is NaN or +inf, this row has one
    unmasked slot, whose log-weight is NaN. An id with p = 0 is never drawn. An id is also never
    drawn if its p^proposal is below 2^-41 times the largest p^proposal of the row.

    `generator` must be on the device of the logits. The function draws n sorted uniform numbers per
    row from the generator, and each number determines one id. Equal logits and equal generators
    give equal ids, even if the columns are sharded over ranks. The ranks of a VocabShard use the
    uniform numbers of the first rank. If two GEMMs round the logits differently, a draw can differ
    if its uniform number is close to the boundary between two ids. The uniform numbers of a row
    depend on the position of the row in the batch.

    On a GPU, one pass over the logits computes the max and the sums of each row, and a second pass
    reads only the blocks of 512 columns that contain a draw.

    torch.compile breaks the graph at this function, so fullgraph=True raises an error.

    >>> targets = capture_sampled(teacher_logits, 50)
    >>> loss = topk_distill(logits, targets, divergence="forward_kl", support="truncate")
    """
    where = generator.device if isinstance(generator, torch.Generator) else generator
    call.check_once(checks.capture_sampled, logits, n, proposal, where, temperature, softcap)
    run: Callable = _sampled
    if torch.compiler.is_compiling():  # a compiled graph cannot hold a generator
        run = torch.compiler.disable(_sampled)
    return run(logits, n, proposal, generator, temperature, softcap)  # pyright: ignore


def _sampled(logits, n, proposal, generator, temperature, softcap) -> SparseTargets:
    if isinstance(logits, Tensor) and call.mapped(logits):
        rules.not_mapped()  # otherwise, vmap would raise an unclear error about random numbers
    capture = Sampled(uniforms_of(logits, n, generator), float(proposal))
    options = (float(temperature), None if softcap is None else float(softcap))
    ids, logprobs, mask = _captured(logits, capture, *options)
    return unchecked(ids, logprobs, mask=mask)


def _captured(
    logits: Tensor, capture: Capture, temperature: float, softcap: float | None
) -> Captured:
    source = source_of(logits)
    if source is not None:
        return source.capture(capture, temperature, softcap)
    if call.mapped(logits):
        rules.not_mapped()
    return captured(logits.detach(), capture, temperature, softcap)
