"""The sampled softmax by its definition, over all logits of the table, and random cases of it."""

import torch


def by_definition(
    hidden, weight, target, negatives, *, log_q=None, target_log_q=None, bias=None,
    temperature=1.0, remove_hits=True, ignore_index=-100, mask=None, reduction="mean",
    row_weight=None, **_,
):  # fmt: skip
    """Cross-entropy of column 0 of [target, negatives], gathered from materialised logits."""
    live = target != ignore_index if mask is None else (target != ignore_index) & mask.bool()
    target = target.masked_fill(~live, 0).long()
    hidden = hidden.masked_fill(~live.unsqueeze(-1), 0.0)
    z = hidden @ weight.T
    z = z if bias is None else z + bias
    z = z / temperature
    many = negatives.long().expand(*target.shape, negatives.shape[-1])
    many = many.masked_fill(~live.unsqueeze(-1), 0)
    own = z.gather(-1, target.unsqueeze(-1))
    own = own if target_log_q is None else own - target_log_q.to(z.dtype).unsqueeze(-1)
    others = z.gather(-1, many)
    others = others if log_q is None else others - log_q.to(z.dtype)
    if remove_hits:
        others = others.masked_fill(many == target.unsqueeze(-1), -torch.inf)
    loss = -torch.log_softmax(torch.cat((own, others), -1), -1)[..., 0]
    loss = loss if row_weight is None else loss * row_weight.to(z.dtype)
    loss = loss.masked_fill(~live, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / live.sum().clamp_min(1) if reduction == "mean" else loss.sum()


N, D, V, K = 7, 5, 20, 30


def case(device, dtype=torch.float64, per_row=False, lead=(N,), seed=0):
    """Arguments with hits, repeated negatives and an ignored row.

    K is larger than V, so every row has hits and repeated negatives, except rows whose target is
    the last item.
    """
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype)

    shape = (*lead, K) if per_row else (K,)
    tensors = {
        "hidden": randn(*lead, D).requires_grad_(),
        "weight": randn(V, D).requires_grad_(),
        "bias": randn(V).requires_grad_(),
    }
    target = torch.randint(0, V, lead, generator=g).to(device)
    target.view(-1)[0], target.view(-1)[1] = V - 1, -100
    how = {
        "negatives": torch.randint(0, V - 1, shape, generator=g).to(device),
        "log_q": torch.rand(shape, generator=g, dtype=torch.float64).to(device) * 3 - 5,
        "target_log_q": torch.rand(lead, generator=g, dtype=torch.float64).to(device) * 3 - 5,
    }
    return tensors, {"target": target, **how}
