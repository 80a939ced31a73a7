"""The reference implementations of the tests, written from the definitions without the library.

Each function computes in the dtype of its logits, and is differentiated by autograd. In fp64, the
results are taken as exact. In another dtype, the results have the errors of PyTorch.
"""

import math

import torch
from torch import Tensor

# --- statistics of one row


def z_of(x: Tensor, temperature=1.0, softcap=None) -> Tensor:
    """z = softcap · tanh(x / softcap) / temperature, in the dtype of x."""
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(x.dtype).unsqueeze(-1) if temperature.dim() else temperature
    return x / temperature


def logsumexp(x, **how):
    return torch.logsumexp(z_of(x, **how), -1)


def token_logprobs(x, ids, **how):
    logp = torch.log_softmax(z_of(x, **how), -1)
    if ids.dim() == x.dim():
        return logp.gather(-1, ids.long())
    return logp.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


def entropy(x, **how):
    logp = torch.log_softmax(z_of(x, **how), -1)
    return -torch.where(logp == -torch.inf, 0.0, logp.exp() * logp).sum(-1)


def total(x, **how):
    return z_of(x, **how).sum(-1)


def picked(x, ids, **how):
    z = z_of(x, **how)
    if ids.dim() == x.dim():
        return z.gather(-1, ids.long())
    return z.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


def topk(x, k, temperature=1.0, softcap=None):
    """(ids, log p, log mass outside). Ids are sorted by (-logit, id). The mass is a direct sum."""
    ids = x.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    logp = torch.log_softmax(z_of(x, temperature, softcap), -1)
    tail = logp.scatter(-1, ids, -torch.inf).logsumexp(-1)
    return ids, logp.gather(-1, ids), tail


def sampled(x, uniforms, *, proposal=1.0, temperature=1.0, softcap=None):
    """(weights, margins) of draws by inversion, in fp64.

    `weights` (rows, V) holds the weight of each id of the vocabulary. `margins` (rows,) holds the
    smallest distance of a row's uniform numbers to the boundary between two ids.
    """
    logp = torch.log_softmax(z_of(x.double(), temperature, softcap), -1)
    ends = torch.softmax(proposal * logp, -1).cumsum(-1)
    drawn = torch.searchsorted(ends, uniforms, right=True).clamp_max(x.shape[-1] - 1)
    counts = torch.zeros_like(ends).scatter_add_(-1, drawn, torch.ones_like(uniforms))
    weights = counts * ((1 - proposal) * logp).exp()
    weights = torch.where(counts > 0, weights, 0.0)
    gaps = (uniforms.unsqueeze(-1) - ends.unsqueeze(-2)).abs().amin((-1, -2))
    return weights / weights.sum(-1, keepdim=True), gaps


def kept_scores(x, target, kept, *, mass=False, **how):
    """(log q[target], entropy of q, log mass), where q is the softmax over the kept columns.

    The results of a row without mass at its kept columns are (-inf, 0, -inf). A logprob of -inf has
    no gradient.
    """
    z, V = z_of(x, **how), x.shape[-1]
    inside = torch.zeros(*x.shape[:-1], V + 1, dtype=torch.bool, device=x.device)
    inside = inside.scatter(-1, torch.where(kept < 0, V, kept).long(), True)[..., :V]
    none = ~(inside & (z != -torch.inf)).any(-1)

    def at_kept(t):
        return t.masked_fill(~inside, -torch.inf).masked_fill(none.unsqueeze(-1), 0.0)

    log_q = torch.log_softmax(at_kept(z), -1)
    logprob = log_q.gather(-1, target.long().unsqueeze(-1)).squeeze(-1)
    gone = none | (logprob == -torch.inf)
    entropy = -expected(log_q.exp(), log_q).masked_fill(none, 0.0)
    log_mass = None
    if mass:
        whole = torch.log_softmax(z, -1)
        log_mass = at_kept(whole).logsumexp(-1).masked_fill(none, -torch.inf)
    return logprob.masked_fill(gone, -torch.inf), entropy, log_mass


# --- cross-entropy


def cross_entropy(
    x, target, *, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0,
    softcap=None, temperature=1.0, row_weight=None,
):  # fmt: skip
    """Cross-entropy by its definition, from one dense log_softmax."""
    z = z_of(x, temperature, softcap)
    V = z.shape[-1]
    logp = torch.log_softmax(z, -1)
    v = torch.ones(V, dtype=z.dtype, device=z.device) if weight is None else weight.to(z.dtype)
    live = target != ignore_index
    at = torch.where(live, target, 0).long()
    nll = -logp.gather(-1, at.unsqueeze(-1)).squeeze(-1)
    row = (1 - label_smoothing) * v[at] * nll
    if label_smoothing:
        row = row - label_smoothing / V * (logp * v).sum(-1)
    if z_loss:
        row = row + z_loss * torch.logsumexp(z, -1) ** 2
    if row_weight is not None:
        row = row * row_weight.to(z.dtype)
    row = torch.where(live, row, torch.zeros_like(row))
    if reduction == "none":
        return row
    if reduction == "sum":
        return row.sum()
    mass = (v[at] * live).sum()
    return row.sum() / mass if mass > 0 else row.sum()


# --- divergences of two lists of masses, of whole rows, and of K slots


def expected(p, h):
    """Σ p h over the last dimension. Where p = 0, the term and its gradient are 0."""
    gone = p == 0
    return (p * torch.where(gone, torch.zeros_like(h), h)).sum(-1)


def divergence(log_p, log_q, kind, beta=0.5):
    """The divergence of a teacher p and a student q over the last dimension.

    The sums of p and q need not be 1.
    """
    p, q = log_p.exp(), log_q.exp()
    if kind == "terms":  # magnitudes of the terms of forward_kl, for bounds on rounding errors
        return expected(p, log_p.abs() + log_q.abs())
    if kind == "tvd":
        return (p - q).abs().sum(-1) / 2
    if kind == "forward_kl" or (kind == "jsd" and beta == 0):
        return expected(p, log_p - log_q)
    if kind == "reverse_kl" or (kind == "jsd" and beta == 1):
        return expected(q, log_q - log_p)
    assert kind == "jsd", kind
    neither = (p == 0) & (q == 0)
    log_m = torch.logaddexp(
        log_p.masked_fill(neither, 0.0) + math.log(beta),
        log_q.masked_fill(neither, 0.0) + math.log(1 - beta),
    )
    return beta * expected(p, log_p - log_m) + (1 - beta) * expected(q, log_q - log_m)


def over_rows(row, live, row_weight, reduction):
    """The weighted and reduced losses of rows that count. A mean divides by their number."""
    if row_weight is not None:
        row = row * row_weight.to(row.dtype)
    if live is not None:
        row = torch.where(live, row, torch.zeros_like(row))
    if reduction == "none":
        return row
    count = row.numel() if live is None else int(live.sum())
    return row.sum() / (max(count, 1) if reduction == "mean" else 1)


def dense_divergence(
    x, teacher, kind, *, beta=0.5, temperature=1.0, softcap=None, t_squared=False, mask=None,
    row_weight=None, reduction="mean",
):  # fmt: skip
    """kl_div, jsd and tvd against the softmax of a teacher's logits (..., V)."""
    log_q = torch.log_softmax(z_of(x, temperature, softcap), -1)
    log_p = torch.log_softmax(z_of(teacher.to(x.dtype), temperature), -1)
    row = divergence(log_p, log_q, kind, beta)
    if t_squared:
        row = row * temperature**2
    return over_rows(row, None if mask is None else mask != 0, row_weight, reduction)


def soft_cross_entropy(
    x, probs, *, weight=None, label_smoothing=0.0, temperature=1.0, softcap=None, mask=None,
    row_weight=None, reduction="mean",
):  # fmt: skip
    """Soft cross-entropy against a teacher's probabilities (..., V)."""
    log_q = torch.log_softmax(z_of(x, temperature, softcap), -1)
    v = probs.to(x.dtype) * (1 - label_smoothing) + label_smoothing / x.shape[-1]
    row = -expected(v if weight is None else v * weight.to(x.dtype), log_q)
    return over_rows(row, None if mask is None else mask != 0, row_weight, reduction)


def over_slots(
    student, teacher, mask=None, student_tail=None, teacher_tail=None, *, kind, support, beta=0.5
):
    """The divergence over K slots per row (..., K). Masked slots have no effect.

    `student` is log q. For the supports "renorm" and "gathered", `student` may be any logits,
    because q is normalised over the slots. "gathered" does not normalise p. "tail" adds one slot
    for all other ids.
    """
    log_q, log_p = student, teacher.to(student.dtype)
    mask = torch.ones_like(log_q, dtype=torch.bool) if mask is None else mask.bool()
    some = mask.any(-1)
    # The result of a row without slots is 0. Its inputs are replaced by finite numbers.
    absent = torch.where(some, -torch.inf, 0.0).to(log_q).unsqueeze(-1)
    log_q, log_p = torch.where(mask, log_q, absent), torch.where(mask, log_p, absent)
    if support == "tail":
        if teacher_tail is None:
            teacher_tail = (1 - log_p.exp().sum(-1)).clamp(min=0).log()
        tails = (torch.where(some, t.to(log_p), 0.0) for t in (teacher_tail, student_tail))
        log_p, log_q = (
            torch.cat((t, tail.unsqueeze(-1)), -1)
            for t, tail in zip((log_p, log_q), tails, strict=True)
        )
    if support in ("renorm", "renorm_teacher"):
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
    if support in ("renorm", "gathered"):
        log_q = log_q - log_q.logsumexp(-1, keepdim=True)
    row = divergence(log_p, log_q, kind, beta)
    return torch.where(some, row, torch.zeros_like(row))


def gathered_kl(
    z, teacher, mask=None, *, renormalise=False, temperature=1.0, t_squared=False, row_weight=None,
    reduction="sum", kind="forward_kl",
):  # fmt: skip
    """KL with q over all slots, including masked slots. `renormalise` excludes masked slots."""
    z = z_of(z, temperature)
    support = "gathered" if renormalise else "truncate"
    if not renormalise:
        z = z - torch.where(z.isneginf().all(-1), 0.0, z.logsumexp(-1)).unsqueeze(-1)
    row = over_slots(z, teacher, mask, kind=kind, support=support)
    return over_rows(row * temperature**2 if t_squared else row, None, row_weight, reduction)


def log_mass_outside(log_q, ids, mask):
    """The log of the mass of q (..., V) outside the unmasked ids (..., K); -inf without mass."""
    V = log_q.shape[-1]
    taken = torch.zeros(*log_q.shape[:-1], V + 1, dtype=torch.bool, device=log_q.device)
    taken = taken.scatter(-1, torch.where(mask, ids, V).long(), True)[..., :V]
    nothing = taken.all(-1)
    rest = log_q.masked_fill(taken & ~nothing.unsqueeze(-1), -torch.inf).logsumexp(-1)
    return rest.masked_fill(nothing, -torch.inf)


def topk_distill(
    x, targets, *, divergence, support, beta=0.5, temperature=1.0, t_squared=False, softcap=None,
    labels=None, ignore_index=-100, ce_weight=0.0, kd_weight=1.0, row_weight=None, reduction="mean",
):  # fmt: skip
    """Distillation from SparseTargets: ids, logprobs, and an optional tail and mask."""
    live = None if labels is None else labels != ignore_index
    mask = torch.ones_like(targets.ids).bool() if targets.mask is None else targets.mask.bool()
    if live is not None:
        mask = mask & live.unsqueeze(-1)
    log_q = torch.log_softmax(z_of(x, temperature, softcap), -1)
    at = torch.where(mask, targets.ids, 0).long()
    outside = log_mass_outside(log_q, targets.ids, mask) if support == "tail" else None
    row = kd_weight * over_slots(
        log_q.gather(-1, at), targets.logprobs, mask, outside, targets.tail,
        kind=divergence, support=support, beta=beta,
    )  # fmt: skip
    if t_squared:
        row = row * temperature**2
    if live is not None and ce_weight:
        label = torch.where(live, labels, 0).long()
        logp = torch.log_softmax(z_of(x, 1.0, softcap), -1)
        row = row - ce_weight * logp.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    return over_rows(row, live, row_weight, reduction)


# --- contrastive losses


def left_out(n, m, positives, mask=None, labels=None):
    """Which pairs are left out, (n, m), and which pairs are positives."""
    positive = positives.unsqueeze(1) == torch.arange(m, device=positives.device)
    out = torch.zeros(n, m, dtype=torch.bool, device=positives.device)
    if mask is not None:
        out = out | mask
    if labels is not None:
        out = out | (labels[0].unsqueeze(1) == labels[1])
    return out & ~positive, positive


def contrastive(a, b, *, scale=1.0, symmetric=True, positives=None, mask=None, labels=None,
                ignore_index=-100, reduction="mean"):  # fmt: skip
    z, m = scale * a @ b.T, len(b)
    own = torch.arange(len(a), device=a.device) if positives is None else positives.long()
    counts = own != ignore_index
    out, _ = left_out(len(a), m, own, mask, labels)
    z = z.masked_fill(out, -torch.inf)
    own = torch.where(counts, own, 0).unsqueeze(1)
    loss = torch.where(counts, torch.logsumexp(z, 1) - z.gather(1, own).squeeze(1), 0.0)
    if symmetric:
        loss = (loss + torch.logsumexp(z, 0) - z.diagonal()) / 2
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / counts.sum().clamp(min=1)


def sigmoid_contrastive(a, b, *, scale=1.0, bias=0.0, positives=None, reduction="mean"):
    own = torch.arange(len(a), device=a.device) if positives is None else positives.long()
    _, positive = left_out(len(a), len(b), own)
    y = torch.where(positive, 1.0, -1.0).to(a.dtype)
    loss = -torch.nn.functional.logsigmoid(y * (scale * a @ b.T + bias)).sum(1)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / max(len(a), 1)
