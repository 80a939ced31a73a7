"""capture_sampled by its definition, for rows whose draws do not depend on rounding."""

import torch

import logitless as ll
from logitless.core.capture import uniforms_of
from tests.support import oracle

from .arguments import NO_NUMBER, POSITIVE, Argument, constant

# A cumulative probability of 16-bit logits may be off by this much. A draw within this distance of
# the boundary between two ids is not compared.
MARGIN = 0.02
DRAWS = Argument(constant(1, 2, 3), constant(0, -1, 2.0, True, None, "1", 2**20), needed=True)
PROPOSAL = Argument(constant(0.5, 1, 1.0, 2), POSITIVE | NO_NUMBER)


def _generator(x):
    return torch.Generator(getattr(x, "device", "cpu")).manual_seed(5)


def call(x, n, **how):
    found = ll.capture_sampled(x, n, generator=_generator(x), **how)
    return {"ids": found.ids, "logprobs": found.logprobs, "kept": found.mask.long()}


def sampled(x, n, *, unknown, **how):
    """The results of `call`. The results of a row whose draws rounding decides are `unknown`."""
    vocab, lead = x.shape[-1], x.shape[:-1]
    x = x.detach().reshape(-1, vocab)
    uniforms = uniforms_of(x, n, _generator(x))
    z = oracle.z_of(x.double(), how.get("temperature", 1.0), how.get("softcap"))
    top = z.amax(-1)
    fine = top.isfinite()[:, None]
    weights, margins = oracle.sampled(x.masked_fill(~fine, 0.0), uniforms, **how)
    # The distinct ids in ascending order, and then the slots that are left over.
    kept = torch.nn.functional.pad(weights > 0, (0, n)) & fine
    order = kept.int().argsort(dim=-1, descending=True, stable=True)[:, :n]
    kept = kept.gather(-1, order)
    ids = torch.where(kept, order, 0)
    logprobs = torch.nn.functional.pad(weights, (0, n)).gather(-1, order).log()
    logprobs = torch.where(kept, logprobs, -torch.inf)
    bad = top.isnan() | (top == torch.inf)
    kept[:, 0] |= bad
    logprobs[:, 0].masked_fill_(bad, torch.nan)
    hidden = ((margins < MARGIN) & fine[:, 0])[:, None]
    return {
        "ids": torch.where(hidden, unknown, ids).view(*lead, n),
        "logprobs": logprobs.masked_fill(hidden, torch.nan).to(x.dtype).view(*lead, n),
        "kept": torch.where(hidden, unknown, kept.long()).view(*lead, n),
    }
