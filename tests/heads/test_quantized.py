"""A head with a quantised weight has the same results as a head with the dequantised weight."""

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import logitless as ll
from logitless.heads import choose_cut, quantized
from logitless.heads.choose_cut import Cut
from logitless.heads.quantized import is_quantized
from tests.support.heads import LOSSES, N, V, assert_same, make
from tests.support.quantised import Int8, ReadableInt8, WithInput

CUTS = {"rows": Cut(3), "columns": Cut(N, 8)}


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch):
    """Splits the head by rows or by columns. The weight is dequantised eight rows at a time."""
    how = CUTS[request.param]
    monkeypatch.setattr(choose_cut, "forced", lambda work, *_: how if work.merges else Cut(3))
    monkeypatch.setattr(quantized, "UNIT", 8)
    monkeypatch.setattr(quantized, "BLOCK", 1)
    monkeypatch.setattr(ReadableInt8, "most", 0)


def differentiated(loss, source, *leaves):
    value = loss(source)
    g = torch.Generator().manual_seed(3)
    value.backward(torch.randn(value.shape, generator=g, dtype=torch.float64).to(value))
    return value.detach(), [t.grad for t in leaves]


def heads(dtype=torch.float64, device="cpu", lead=(N,), adapter=False):
    """Returns two heads, one with a quantised and one with the dequantised weight, and targets."""
    found = []
    for plain in (False, True):
        hidden, weight, bias, target = make(dtype, device, lead=lead)
        leaves = [hidden.requires_grad_(), bias.requires_grad_()]
        weight = ReadableInt8.of(weight)
        options = {}
        if adapter:
            leaves.append((hidden.detach()[..., :2] / 3).requires_grad_())
            leaves.append(torch.linspace(-1, 1, 2 * V).view(V, 2).to(hidden).requires_grad_())
            options["low_rank"] = tuple(leaves[2:])
        weight = weight.plain() if plain else weight
        found.append((ll.LinearLogits(hidden, weight, bias, **options), *leaves))
    return found, target


@pytest.mark.parametrize("name", LOSSES)
def test_as_if_dequantised(name, cut, device):
    for reduction in ("mean", "none"):
        found, target = heads(device=device)
        loss = lambda z: LOSSES[name](z, target, reduction=reduction)  # noqa: E731, B023
        got, want = (differentiated(loss, *head) for head in found)
        assert_same(got, want, rtol=1e-9, atol=1e-9)
    assert 0 < ReadableInt8.most <= 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_with_an_adapter_and_other_dtypes(dtype, cut, device):
    found, target = heads(dtype, device, lead=(1, N), adapter=True)
    got, want = (differentiated(lambda z: ll.cross_entropy(z, target), *head) for head in found)
    eps = torch.finfo(dtype).eps
    assert_same(got, want, rtol=4 * eps, atol=4 * eps)


def test_small_heads_are_read_in_blocks_too(monkeypatch, device):
    monkeypatch.setattr(choose_cut, "SMALL", {"cpu": 1 << 20, "cuda": 1 << 20})
    found, target = heads(device=device)
    got, want = (differentiated(lambda z: ll.cross_entropy(z, target), *head) for head in found)
    assert_same(got, want, rtol=1e-9, atol=1e-9)


def test_scores_topk_and_values(cut, device):
    (got, *_), (want, *_) = heads(device=device)[0]
    with torch.no_grad():
        torch.testing.assert_close(ll.entropy(got), ll.entropy(want))
        a, b = (ll.capture_topk(z, 3).logprobs for z in (got, want))
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(got.materialize(), want.materialize())


RULE = "must be a plain tensor, or a quantised weight whose rows can be dequantised"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Int8, "its class has no method dequantize"), (WithInput, "is quantised together with its")],
)
def test_refusals(kind, reason):
    hidden, weight, _, _ = make()
    with pytest.raises(TypeError, match=f"weight {RULE}.*{reason}"):
        ll.LinearLogits(hidden, kind.of(weight))


def test_a_weight_with_a_gradient_is_refused():
    hidden, weight, _, _ = make()
    with pytest.raises(TypeError, match="which is quantised and requires a gradient"):
        ll.LinearLogits(hidden, ReadableInt8.of(weight).requires_grad_())


def test_compiled(device):
    """The graph breaks at the loss, because the class of the weight handles all operators."""
    hidden, weight, _, target = make(device=device)
    int8 = ReadableInt8.of(weight)

    @torch.compile(backend="eager")
    def loss(hidden, weight):
        return ll.cross_entropy(ll.LinearLogits(hidden * 1, weight), target)

    want = ll.cross_entropy(ll.LinearLogits(hidden, int8.plain()), target)
    torch.testing.assert_close(loss(hidden, int8), want)


def test_a_tensor_of_a_collective_is_not_quantised():
    hidden, weight, _, _ = make()
    gathered = AsyncCollectiveTensor(weight)
    assert not is_quantized(gathered)
    assert torch.equal(
        ll.logsumexp(ll.LinearLogits(hidden, gathered)),
        ll.logsumexp(ll.LinearLogits(hidden, weight)),
    )
