"""Captures the targets of a sparse teacher, for `topk_distill`, from the teacher's logits."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..core import call
from ..core import tensor_checks as rules
from ..core.capture import Capture, Captured, Sampled, TopK, uniforms_of
from ..core.choose_backend import captured
from ..core.source import source_of
from ..targets.sparse import SparseTargets, unchecked


@call.named()
@torch.no_grad()
def capture_topk(
    logits: Tensor, k: int, *, temperature: float = 1.0, softcap: float | None = None
) -> SparseTargets:
    """Returns the k most probable ids per row, and their exact log-probabilities.

    For logits (..., V), the int64 `ids` and the `logprobs` of the result have shape (..., k), by
    descending probability, with equal probabilities in ascending order of ids. `tail` (...) is the
    log of the mass of all other ids. Both are fp32 (fp64 for fp64 logits), without a gradient. On a
    GPU, the logits are read only once if k is at most 256; for larger k, torch.topk runs on one
    chunk of rows at a time.

    >>> capture_topk(torch.tensor([[0.0, 2.0, 1.0]]), 2).ids
    tensor([[1, 2]])
    """
    call.checked(capture_topk, logits=logits, k=k, temperature=temperature, softcap=softcap)
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

    Let p = softmax(z), with z = softcap · tanh(logits / softcap) / temperature. A draw takes an id
    with a probability proportional to p^proposal, so `proposal` < 1 draws rare ids more often than
    1. The weight of an id is proportional to count · p^(1 - proposal), where `count` is the number
    of its draws; for proposal=1, it is count / n. The weights of a row add up to 1, and the field
    `logprobs` of the result holds their logs.

    With proposal=1, the expected value of the weights is p, so the gradient of
    `topk_distill(..., divergence="forward_kl", support="truncate")` is an unbiased estimate of the
    gradient of the forward KL over the whole vocabulary. With any other `proposal`, the weights are
    divided by their sum, which gives the estimate a bias of order 1 / n.

    The result has n slots per row and no tail. The ids are in ascending order; the slots after the
    last distinct id are masked, and hold the id 0. An id with p = 0 is never drawn, nor one whose
    p^proposal is below 2^-41 times the largest of the row. A row whose logits are all -inf has only
    masked slots; a row with a logit NaN or +inf has one unmasked slot, whose log-weight is NaN.

    `generator` must be on the device of the logits. It draws n sorted uniform numbers per row,
    which depend on the row's position in the batch, and each number determines one id. So equal
    logits and equal generators give equal ids, even if the columns are sharded over ranks (the
    ranks of a VocabShard use the numbers of the first rank). Only a number close to the boundary
    between two ids can select the other one if another GEMM rounds the logits differently.

    On a GPU, one pass over the logits computes the max and the sums of each row, and a second pass
    reads only the blocks of 512 columns that contain a draw. torch.compile breaks the graph at this
    function, so fullgraph=True raises an error.

    >>> targets = capture_sampled(teacher_logits, 50)
    >>> loss = topk_distill(logits, targets, divergence="forward_kl", support="truncate")
    """
    where = generator.device if isinstance(generator, torch.Generator) else generator
    call.checked(
        capture_sampled, logits=logits, n=n, proposal=proposal, generator=where,
        temperature=temperature, softcap=softcap,
    )  # fmt: skip
    run: Callable = _sampled
    if torch.compiler.is_compiling():  # a compiled graph cannot hold a generator
        run = torch.compiler.disable(_sampled)
    return run(logits, n, proposal, generator, temperature, softcap)


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
