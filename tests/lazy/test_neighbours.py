"""Fused heads that others wrap, hook or replace: the plain model's numbers, lazy where possible."""

import warnings
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import logitless as ll
from logitless.lazy import report
from logitless.lazy.logits import LazyLogits
from tests.support.fusable_models import D, Model, V
from tests.support.quantised import Int8, ReadableInt8, WithInput, quantised


@pytest.fixture(autouse=True)
def warns_anew(monkeypatch):
    monkeypatch.setattr(report, "_warned", set())


@pytest.fixture
def ids(device):
    return torch.randint(0, V, (2, 5), device=device)


class Step(NamedTuple):
    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    told: list[str]  # warnings of ours


def step(model: nn.Module, ids: Tensor) -> Step:
    model.zero_grad()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        z = model(ids)
        loss = F.cross_entropy(z.view(-1, V), ids.view(-1))
        loss.backward()
    gradients = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    return Step(z, loss.detach(), gradients, [str(w.message) for w in seen])


def assert_as_plain(plain: nn.Module, fused: nn.Module, ids: Tensor, is_lazy: bool = True) -> None:
    """The same numbers in inference and training; lazy, or told once and known to is_fused."""
    with torch.no_grad():
        torch.testing.assert_close(fused(ids), plain(ids), rtol=0, atol=0)
    got, want = step(fused, ids), step(plain, ids)
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(got.gradients, want.gradients)
    assert (type(got.logits) is LazyLogits) == is_lazy
    assert bool(ll.is_fused(fused)) == is_lazy, ll.is_fused(fused)
    told = [said for said in got.told if said.startswith("fuse has no effect here")]
    assert len(told) == (not is_lazy)
    if not is_lazy:
        assert str(ll.is_fused(fused)) in told[0]
    assert step(fused, ids).told == []


# --- forwards that others set on a head


def tripled(model):
    inner = model.lm_head.forward
    model.lm_head.forward = lambda x: 3 * inner(x)
    return model


def by_hand(model):
    model.lm_head.forward = lambda x: x @ model.lm_head.weight.t()
    return model


class Doubled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def replaced(model):
    head = Doubled(D, V, device=model.lm_head.weight.device)
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head
    return model


class Rounded(nn.Linear):
    """A head whose weight is rounded in forward, as in training for quantisation."""

    def forward(self, input):
        rounded = self.weight + ((self.weight * 8).round() / 8 - self.weight).detach()
        return F.linear(input, rounded, self.bias)


def rounded(model):
    head = Rounded(D, V, device=model.lm_head.weight.device)
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head
    return model


def flipped(model):
    """A head that needs the values of its logits."""
    inner = model.lm_head.forward
    model.lm_head.forward = lambda x: inner(x).flip(-1)
    return model


def softened(model):
    """A head with a function of each of its logits."""
    inner = model.lm_head.forward
    model.lm_head.forward = lambda x: (lambda z: F.softplus(z) - 0.1 * z.sin())(inner(x))
    return model


def inside(model):
    model.lm_head = nn.Sequential(nn.Tanh(), model.lm_head)
    return model


@pytest.mark.parametrize("first", ["fuse", "change"])
@pytest.mark.parametrize(
    ("change", "is_lazy"),
    [
        (tripled, True), (replaced, True), (rounded, True), (inside, True), (by_hand, False),
        (flipped, False), (softened, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_another_forward(change, is_lazy, first, ids, device):
    """A forward that was set on a fused head is not thrown away."""
    fused = ll.fuse(Model().to(device)) if first == "fuse" else Model().to(device)
    fused = change(fused) if first == "fuse" else ll.fuse(change(fused))
    assert_as_plain(change(Model().to(device)), fused, ids, is_lazy)


def test_forwards_on_forwards(ids, device):
    """Ours, theirs, ours again, theirs again; unfuse leaves theirs."""
    fused = tripled(ll.fuse(tripled(ll.fuse(Model().to(device)))))
    plain = tripled(tripled(Model().to(device)))
    assert_as_plain(plain, fused, ids)
    ll.unfuse(fused)
    assert type(fused(ids)) is torch.Tensor
    torch.testing.assert_close(fused(ids), plain(ids))
    ll.fuse(fused)
    assert_as_plain(plain, fused, ids)


# --- weights that are not plain tensors


def quantised_head(kind, device):
    model = Model().to(device)
    quantised(model.lm_head, kind)
    return model


@pytest.mark.parametrize("first", ["fuse", "quantise"])
@pytest.mark.parametrize("kind", [Int8, WithInput, ReadableInt8])
def test_a_quantised_head(kind, first, ids, device):
    """If rows of the weight cannot be dequantised, logits are plain, with a warning."""
    plain = quantised_head(kind, device)
    if first == "fuse":
        fused = ll.fuse(Model().to(device))
        quantised(fused.lm_head, kind)
    else:
        fused = ll.fuse(quantised_head(kind, device))
    assert_as_plain(plain, fused, ids, is_lazy=kind is ReadableInt8)
    if kind is WithInput:
        assert "WithInput, is quantised together with its input" in str(ll.is_fused(fused))


def test_operations_on_the_logits_of_a_quantised_head(ids, device):
    for operation in (
        lambda z: z[..., : V - 1].logsumexp(-1),
        lambda z: z.masked_fill(torch.arange(V, device=device) == 2, -9.0).logsumexp(-1),
        lambda z: (z.float() / 2).log_softmax(-1).gather(-1, ids[..., None]),
        lambda z: torch.cat([z[:1], z[1:]]).softmax(-1).square(),
        lambda z: z.cumsum(-1),
    ):
        results = []
        for fuse in (lambda model: model, ll.fuse):
            model = fuse(quantised_head(ReadableInt8, device))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = operation(model(ids)).sum()
            value.backward()
            results.append([value.detach(), model.embed.weight.grad])
        torch.testing.assert_close(*results)


def test_a_product_inside_of_an_autograd_function(ids, device):
    """The quantised layers of bitsandbytes call F.linear in the forward of an autograd function."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return F.linear(x, weight)

        @staticmethod
        def backward(ctx, g):
            return g @ ctx.saved_tensors[0], None

    def changed(model):
        model.lm_head.requires_grad_(False)
        model.lm_head.forward = lambda x: Product.apply(x, model.lm_head.weight)
        return model

    fused = changed(ll.fuse(Model().to(device)))
    assert_as_plain(changed(Model().to(device)), fused, ids, is_lazy=False)
    with ll.lazy_logits():
        assert type(fused(ids)) is Tensor


@pytest.mark.parametrize("other", [nn.Identity(), nn.Embedding(D, V), None])
def test_in_inference_the_guard_never_raises(other, ids, device):
    """Another head that cannot be fused, or none."""
    model = ll.fuse(Model().to(device))
    model.lm_head = other
    model.forward = lambda ids: model.embed(ids)
    with torch.no_grad():
        assert model(ids).shape == (2, 5, D)
    assert not ll.is_fused(model)
    with pytest.warns(UserWarning, match="Model has a head that cannot be fused"):
        model(ids)


# --- heads that are never called


class ByWeight(Model):
    """A model that multiplies by the weight of its head, as MobileBERT and TRL's trainers do."""

    def forward(self, ids):
        return self.embed(ids) @ self.lm_head.weight.t()


def test_a_head_that_is_never_called(ids, device):
    model = ll.fuse(ByWeight().to(device))
    assert ll.is_fused(model)  # nothing is known before the first forward
    with torch.no_grad():
        model(ids)
    model.eval()(ids)
    assert ll.is_fused(model)
    with pytest.warns(UserWarning, match="A training forward of ByWeight did not call its head"):
        model.train()(ids)
    found = ll.is_fused(model)
    assert not found
    assert "did not call its head" in found.reason == str(found)
    assert step(model, ids).told == []
    model.forward = lambda ids: Model.forward(model, ids)
    step(model, ids)
    assert ll.is_fused(model)


# --- is_fused, and unfuse of models inside models


class Around(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def forward(self, ids):
        return self.model(ids)


@pytest.mark.parametrize("fused", ["inner", "middle", "outer"])
@pytest.mark.parametrize("undone", ["inner", "middle", "outer"])
def test_unfuse_of_any_of_the_models(fused, undone, ids, device):
    """A guard of another of the nested models must not fuse the head again."""
    models = {"inner": Model().to(device)}
    models["middle"] = Around(models["inner"])
    models["outer"] = Around(models["middle"])
    ll.fuse(models[fused])
    assert type(models["outer"](ids)) is LazyLogits
    assert all(map(ll.is_fused, models.values()))
    ll.unfuse(models[undone])
    for model in models.values():
        assert type(model(ids)) is torch.Tensor
        assert not ll.is_fused(model)
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
    assert "forward" not in models["inner"].lm_head.__dict__


def test_the_last_fuse_counts(ids, device):
    inner = Model().to(device)
    outer = ll.fuse(Around(inner), workspace=2 * V * 4)
    ll.fuse(inner, workspace=3 * V * 4)
    assert outer(ids).recipe.head.workspace == 3 * V * 4
    ll.fuse(outer, workspace=4 * V * 4)
    assert outer(ids).recipe.head.workspace == 4 * V * 4
    assert inner(ids).recipe.head.workspace == 4 * V * 4


def test_options_of_a_head_are_checked_when_it_is_made():
    """For the module and for LinearLogits."""
    for how in ({"workspace": -1}, {"logits_dtype": torch.int8}):
        with pytest.raises(ValueError, match=f"{next(iter(how))} must be"):
            ll.nn.FusedHead(D, V, **how)
    with pytest.raises(TypeError, match="drop_ignored must be True or False"):
        ll.nn.FusedHead(D, V, drop_ignored=3)
    with pytest.raises(TypeError, match="drop_ignored must be True or False"):
        ll.LinearLogits(torch.randn(2, D), torch.randn(V, D), drop_ignored=3)


def test_logits_dtype_is_kept_under_a_compiler(device):
    model = ll.fuse(Model().to(device).bfloat16(), logits_dtype=torch.float32)
    ids = torch.arange(5, device=device)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        got, want = compiled(ids), model(ids)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)
