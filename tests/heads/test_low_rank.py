"""A head with `low_rank` has the same results as the sum of two plain products."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import choose_cut, gemms
from logitless.heads.choose_cut import Cut
from tests.support.heads import (
    CUTS,
    R,
    V,
    assert_as_materialised,
    cut_like,
    lazily,
    materialised,
    tensors,
)
from tests.support.rank_threads import on_ranks


@pytest.mark.parametrize("way", CUTS)
def test_a_frozen_weight_costs_no_gemm(way, monkeypatch):
    """No GEMM has the size of the weight's gradient."""
    sizes = []
    cut_like(way, monkeypatch)
    plain = gemms.plain_gemm
    monkeypatch.setattr(
        gemms, "plain_gemm", lambda a, b, *rest: sizes.append((len(a), b.shape[1])) or
        plain(a, b, *rest),
    )  # fmt: skip
    leaves, target = tensors(needs=(True, False, False, True, True))
    D = leaves[1].shape[1]
    ll.cross_entropy(lazily(leaves), target).backward()
    assert not [size for size in sizes if size[0] in (8, V) and size[1] == D]
    assert [size for size in sizes if size[1] == R]


def test_functions_of_pytorch(device, monkeypatch):
    monkeypatch.setenv("LOGITLESS_WARN_BYTES", "off")
    for loss in (
        lambda z, t: F.cross_entropy(z, t, reduction="sum"),
        lambda z, t: F.cross_entropy(z[1:, :20] * 2 + 1, t[1:].clamp(max=19), reduction="sum"),
        lambda z, t: F.cross_entropy(
            (-z).masked_fill(torch.arange(V, device=z.device) == 3, 0.5), t
        ),
        lambda z, t: z.flip(0).sum() + F.cross_entropy(z, t),  # materialises the logits
        lambda z, t: (torch.cat([z[:2], z[4:]]).softmax(-1) ** 2).sum(),
    ):
        assert_as_materialised(loss, device=device)


def test_one_shard_per_rank():
    """Each rank holds its rows of both weights. The gradient of hidden is summed over ranks."""
    want, target = tensors()
    loss = ll.cross_entropy(materialised(want), target)
    grads = torch.autograd.grad(loss, want)

    def run(rank):
        (hidden, weight, bias, second, low), _ = tensors()
        rows = slice(0, 9) if rank.index == 0 else slice(9, V)
        own = [t.detach()[rows].clone().requires_grad_() for t in (weight, bias, low)]
        head = ll.LinearLogits(hidden, own[0], own[1], low_rank=(second, own[2]))
        ours = ll.cross_entropy(ll.VocabShard(head, rank), target)
        leaves = (hidden, second, *own)
        found = torch.autograd.grad(ours, leaves)
        expected = (grads[0], grads[3], *(grads[i][rows] for i in (1, 2, 4)))
        torch.testing.assert_close(ours, loss)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)

    on_ranks(2, run)


def test_members():
    (hidden, weight, bias, second, low), _ = tensors()
    z = ll.LinearLogits(hidden, weight, bias, low_rank=(second, low))
    assert torch.equal(z.hidden, hidden)
    assert torch.equal(z.low_rank[0], second)
    assert z.low_rank[1] is low
    assert ll.LinearLogits(hidden, weight).low_rank is None
    torch.testing.assert_close(z.materialize(), materialised((hidden, weight, bias, second, low)))
    with choose_cut.override(lambda work: Cut(3)):
        assert z.explain().chunks == 3


def refused():
    (*_, second, low), _ = tensors()
    yield "must be a pair (hidden, weight) of tensors, or None, got a Tensor", TypeError, second
    yield "got a tuple of length 1", TypeError, (second,)
    yield "low_rank[1] must be a plain tensor, got a NoneType", TypeError, (second, None)
    yield "low_rank[1] must be torch.float64 like hidden", TypeError, (second, low.float())
    yield "low_rank[0] must have shape (7, R) with R >= 1", ValueError, (second[1:], low)
    yield "low_rank[1] must have shape (23, R) with R >= 1", ValueError, (second, low[1:])
    yield "low_rank[1] must have shape (23, 3) to match", ValueError, (second, low[:, 1:])
    yield "with R >= 1, got (7, 0)", ValueError, (second[:, :0], low[:, :0])


@pytest.mark.parametrize(("message", "kind", "pair"), list(refused()))
def test_refusals(message, kind, pair):
    (hidden, weight, bias, *_), _ = tensors()
    with pytest.raises(kind) as error:
        ll.LinearLogits(hidden, weight, bias, low_rank=pair)
    assert message in str(error.value)
