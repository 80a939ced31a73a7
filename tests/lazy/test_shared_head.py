"""Multi-token prediction: several hidden states per position, and one head that all of them share.

docs/recipes/draft-heads.md describes the two ways: `LinearLogits` over one weight, and a fused
model whose forward calls its head several times.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import logitless as ll
from examples.demo.memory import extra_memory
from logitless.lazy.logits import LazyLogits
from tests.support.laws import FLOOR, error

B, T, D, V, AHEAD = 2, 7, 8, 53, 3


class Model(nn.Module):
    """Each step mixes the last hidden state with the embedding of the next token, as in MTP.

    The head is tied to the embedding, so the weight gets gradients from all steps twice.
    """

    def __init__(self, vocab=V, width=D):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.body = nn.Linear(width, width)
        self.steps = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(AHEAD - 1))
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.lm_head

    def hidden(self, ids):
        """Step k has shape (B, T - k, D), and predicts the token k + 1 places ahead."""
        states = [self.body(self.embed(ids)).tanh()]
        for k, step in enumerate(self.steps, start=1):
            both = states[-1][:, :-1], self.embed(ids[:, k:])
            states.append(step(torch.cat(both, -1)).tanh())
        return states

    def forward(self, ids):
        return [self.lm_head(state) for state in self.hidden(ids)]


def by_pytorch(logits, ids, shares):
    """The definition: the weighted sum of the mean cross-entropies of all steps."""
    losses = [
        F.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, k:].flatten())
        for k, z in enumerate(logits, start=1)
    ]
    return (torch.stack(losses) * shares.to(losses[0].dtype)).sum()


def by_heads(model, ids, shares):
    losses = [
        ll.cross_entropy(ll.LinearLogits(state[:, :-1], model.lm_head.weight), ids[:, k:])
        for k, state in enumerate(model.hidden(ids), start=1)
    ]
    return (torch.stack(losses) * shares).sum()


def trained(model, loss):
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.fixture
def ids(device):
    return torch.randint(0, V, (B, T), device=device)


@pytest.mark.parametrize("way", ["heads", "fused", "fused, joined"])
def test_equals_fp64_autograd(way, impl, ids, device, monkeypatch):
    def made(*_):
        raise AssertionError("logits were materialised")

    plain = Model().to(device)
    exact, ours = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    shares = torch.rand(AHEAD, device=device)  # random upstream gradients
    want = trained(exact, by_pytorch(exact(ids), ids, shares))
    naive = trained(plain, by_pytorch(plain(ids), ids, shares))
    ll.report()
    monkeypatch.setattr(LazyLogits, "plain", made)
    if way != "heads":
        logits = ll.fuse(ours)(ids)
        if way == "fused, joined":
            logits = torch.cat(logits, 1).split([T - k for k in range(AHEAD)], 1)
        assert [type(z) for z in logits] == [LazyLogits] * AHEAD
        got = trained(ours, by_pytorch(logits, ids, shares))
    else:
        got = trained(ours, by_heads(ours, ids, shares))
    assert not ll.report()
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert error(got[name], value) <= 2 * error(naive[name], value) + FLOOR[torch.float32], name


@pytest.mark.parametrize("way", ["heads", "fused"])
def test_memory_is_less_than_the_logits_of_one_step(way, device):
    """A workspace bounds the logits that exist at once. PyTorch keeps those of all steps."""
    rows, vocab, width = 256, 4096, 16
    model = Model(vocab, width).to(device)
    ids = torch.randint(0, vocab, (1, rows), device=device)
    shares = torch.ones(AHEAD, device=device)
    logits = rows * vocab * 4

    def pytorch(m):
        trained(m, by_pytorch(m(ids), ids, shares))

    def ours(m):
        if way == "fused":
            return pytorch(m)
        losses = [
            ll.cross_entropy(
                ll.LinearLogits(s[:, :-1], m.lm_head.weight, workspace=2**18), ids[:, k:]
            )
            for k, s in enumerate(m.hidden(ids), start=1)
        ]
        return trained(m, (torch.stack(losses) * shares).sum())

    plain = extra_memory(device, model, pytorch)
    model.zero_grad()
    if way == "fused":
        ll.fuse(model, workspace=2**18)
    assert plain > AHEAD * logits
    assert extra_memory(device, model, ours) < logits / 2
