"""Sparse teachers of small vocabularies, and every divergence and support."""

import torch

import logitless as ll
from tests.support import oracle
from tests.support.laws import value_and_grad

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
SUPPORTS = ("truncate", "renorm_teacher", "renorm", "tail")
MATRIX = [(divergence, support) for divergence in DIVERGENCES for support in SUPPORTS]


KINDS = {d: {"divergence": d} for d in DIVERGENCES} | {
    f"jsd {beta}": {"divergence": "jsd", "beta": beta} for beta in (0.0, 0.3, 1.0)
}


CELLS = {
    f"{kind}-{support}": how | {"support": support}
    for kind, how in KINDS.items()
    for support in SUPPORTS
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
V, K, ROWS = 53, 5, 4


def make(
    dtype=torch.float64, device="cpu", rows=ROWS, vocab=V, k=K, repeated=False, scale=2.0,
    teacher=torch.float32,
):  # fmt: skip
    """Random logits, and the K most probable ids of another random distribution."""
    g = torch.Generator().manual_seed(3)
    x = (torch.randn(rows, vocab, generator=g, dtype=torch.float64) * scale).to(dtype)
    log_p = torch.log_softmax(torch.randn(rows, vocab, generator=g) * scale, -1)
    logprobs, ids = log_p.topk(k)
    logprobs = logprobs.to(teacher)
    if repeated:
        ids[:, -1] = ids[:, 0]
    tail = torch.log1p(-logprobs.double().exp().sum(-1).clamp(max=1 - 1e-6)).float()
    return x.to(device), ll.SparseTargets(*(t.to(device) for t in (ids, logprobs, tail)))


def masked(targets, kind):
    """The targets with masked slots. `kind` is "none", "partial", "full" (a row) or "poison"."""
    if kind == "none":
        return targets
    mask = torch.ones_like(targets.ids).bool()
    mask[1, 2:] = False
    ids, logprobs = targets.ids.clone(), targets.logprobs.clone()
    if kind == "full":
        mask[2] = False
    if kind == "poison":
        logprobs[1, 2:], ids[1, 2:] = torch.tensor([-torch.inf, torch.inf, torch.nan]), -7
    return ll.SparseTargets(ids, logprobs, targets.tail, mask)


def mix(rows=ROWS, device="cpu"):
    labels = torch.arange(rows, device=device) % V
    labels[0] = -100
    return {"labels": labels, "ce_weight": 0.3, "kd_weight": 0.7}


def both(x, targets, **how):
    """Value and gradient of a loss, by the library and by the definitions in fp64."""
    upstream = torch.ones((), device=x.device)
    return (
        value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, upstream),
        value_and_grad(lambda x: oracle.topk_distill(x, targets, **how), x.double(), upstream),
    )


def told(targets, tail):
    """The targets, with or without their tail."""
    return targets if tail else ll.SparseTargets(targets.ids, targets.logprobs, None, targets.mask)
