"""Losses and metrics as trainers compute them, and the GEMMs that they take."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll

B, T, D, V = 3, 7, 6, 23
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.linear}


class Gemms(TorchDispatchMode):
    """Collects the number of rows of each product of hidden states and the weight (V, D)."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket in PRODUCTS:
            *_, a, b = (t for t in args if isinstance(t, torch.Tensor))
            if {D, V} == set(b.shape[-2:]):
                self.rows.append(a.shape[-2])
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self, dtype=torch.float64, bias=False):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(V, D, dtype=dtype)
        self.lm_head = nn.Linear(D, V, bias=bias, dtype=dtype)
        nn.init.normal_(self.lm_head.weight)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def pair(device, **how) -> tuple[nn.Module, nn.Module]:
    return Model(**how).to(device), ll.fuse(Model(**how).to(device), scores=True)


def labels_of(ids):
    """As in Transformers: labels are shifted and padded, so the last row is ignored."""
    return F.pad(ids, (0, 1), value=-100)[:, 1:]


def causal(z, ids):
    """The loss of Transformers."""
    return F.cross_entropy(z.view(-1, V), labels_of(ids).reshape(-1), ignore_index=-100)


def shifted(z, ids):
    return F.cross_entropy(z[:, :-1].contiguous().view(-1, V), ids[:, 1:].reshape(-1))


def in_chunks(z, ids):
    pairs = zip(z.split(2, 1), labels_of(ids).split(2, 1), strict=True)
    return sum(F.cross_entropy(c.flatten(0, 1), t.flatten(), reduction="sum") for c, t in pairs)


LOSSES = {
    "causal": causal,
    "shifted": shifted,
    "in chunks": in_chunks,
    "transposed": lambda z, ids: F.cross_entropy(z.transpose(1, 2), labels_of(ids)),
    "smoothed": lambda z, ids: F.cross_entropy(
        z.flatten(0, 1), labels_of(ids).flatten(), label_smoothing=0.1
    ),
    "per row": lambda z, ids: F.cross_entropy(
        z.flatten(0, 1), labels_of(ids).flatten(), reduction="none"
    ).sum(),
    "nll": lambda z, ids: F.nll_loss(z.log_softmax(-1).flatten(0, 1), labels_of(ids).flatten()),
    "ours": lambda z, ids: ll.cross_entropy(z, labels_of(ids), z_loss=1e-2),
}


def trl_entropy(z, ids):
    """entropy_from_logits of TRL, which computes some rows at a time."""
    found = []
    for chunk in z.reshape(-1, V).split(4):
        logp = F.log_softmax(chunk, dim=-1)
        found.append(-(torch.exp(logp) * logp).sum(-1))
    return torch.cat(found).reshape(z.shape[:-1])


def logprob(z, ids):
    return z.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


METRICS = {  # functions of the rows that count
    "argmax": lambda z, ids: z.argmax(-1),
    "argmax of flat rows": lambda z, ids: torch.argmax(z.reshape(-1, V), dim=1, keepdim=True),
    "logsumexp": lambda z, ids: z.logsumexp(-1),
    "log-probability": logprob,
    "log-probability, fp32": lambda z, ids: logprob(z.float(), ids),
    "entropy of TRL": trl_entropy,
    "entropy by softmax": lambda z, ids: (-z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "entropy of verl": lambda z, ids: z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1),
    "mean entropy": lambda z, ids: (z.softmax(-1) * -z.log_softmax(-1)).sum() / (B * T),
    "entropy of logitless": lambda z, ids: ll.entropy(z),
    "score": lambda z, ids: torch.stack(ll.score(z, ids[:, 1:].where(ids[:, 1:] > 3, -100))[:4]),
    "token_logprobs": lambda z, ids: ll.token_logprobs(z, ids[:, 1:]),
}


def step(model, ids, loss, metrics=METRICS):
    """Returns loss, gradients and metrics of a training step, and the GEMMs of each metric."""
    z = model(ids)
    value = loss(z, ids)
    found, gemms = [], {}
    with torch.no_grad():
        rows = z[:, :-1]
        for name, metric in metrics.items():
            with Gemms() as seen:
                found.append(metric(rows, ids))
            gemms[name] = seen.rows
    gradients = torch.autograd.grad(value, list(model.parameters()))
    return [value.detach(), *gradients, *found], gemms


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        allowed = 1e-5 if a.dtype == torch.float32 else 1e-10
        torch.testing.assert_close(a, b, rtol=allowed, atol=allowed)
