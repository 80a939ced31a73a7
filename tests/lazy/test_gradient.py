"""The gradient of lazy logits: hooks see it, scale it and add it up."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import run
from logitless.lazy import report
from logitless.lazy.recipe import Recipe
from tests.support.laws import error
from tests.support.lazy_models import V, assert_alike, backward, model

MATERIALISED = pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")


def test_who_hooks_the_logits_gets_plain_ones(x, t):
    m, seen = model(True, x.device), []
    z = m(x)
    with pytest.warns(UserWarning, match=r"materialised by Tensor.register_hook, at .*test_grad"):
        z.register_hook(lambda g: seen.append(type(g)))
    F.cross_entropy(z.view(-1, V), t.view(-1)).backward()
    assert seen == [torch.Tensor]


HEAD_HOOKS = {
    "a full hook": lambda m, seen: m[1].register_full_backward_hook(
        lambda _, into, out: seen.append(out[0].norm()) or (into[0] * 2,)
    ),
    "a full pre-hook": lambda m, seen: m[1].register_full_backward_pre_hook(
        lambda _, out: seen.append(out[0].norm()) or (out[0] * 3,)
    ),
}


@pytest.mark.parametrize("name", HEAD_HOOKS)
def test_who_hooks_the_head_gets_plain_logits(name, x, t, monkeypatch):
    monkeypatch.setattr(report, "_warned", set())
    found = []
    for fused in (True, False):
        m, seen = model(False, x.device), []
        m = ll.fuse(m, head="1") if fused else m
        HEAD_HOOKS[name](m, seen)
        ll.report()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            z = m(x)
        F.cross_entropy(z.view(-1, V), t.view(-1)).backward()
        assert [r.operation for r in ll.report()] == ["a backward hook of the head"] * fused
        assert len(told) == fused
        found.append([*seen, *(p.grad for p in m.parameters())])
    for a, b in zip(*found, strict=True):
        assert error(a, b) < 1e-11


class Around(torch.nn.Module):
    def __init__(self, m):
        super().__init__()
        self.m = m

    def forward(self, x):
        return self.m(x)


def test_hooks_of_modules_around_the_head_keep_the_logits_lazy(x, t):
    """They may read shapes and pass the gradient on. Who reads it is told how to."""
    shapes, x = [], x.clone().requires_grad_()
    m = Around(model(True, x.device))
    handle = m.register_full_backward_hook(lambda _, into, out: shapes.append(out[0].shape))
    z = m(x)
    F.cross_entropy(z.view(-1, V), t.view(-1)).backward()
    assert shapes == [z.shape]
    assert not z.known
    want = model(False, x.device)
    backward(want, F.cross_entropy(want(x).view(-1, V), t.view(-1)))
    for a, b in zip(m.parameters(), want.parameters(), strict=True):
        assert error(a.grad, b.grad) < 1e-11
    handle.remove()
    for hook in (
        lambda _, out: print(out[0].norm()),
        lambda _, out: (out[0] * 2,),
        lambda _, out: (torch.ones(out[0].shape).to(x),),
    ):
        m = Around(model(True, x.device))
        m.register_full_backward_pre_hook(hook)
        loss = F.cross_entropy(m(x).view(-1, V), t.view(-1))
        with pytest.raises(RuntimeError, match=r"lazy logits is not computed.*materialize\(\)"):
            loss.backward()


def test_a_hook_that_comes_too_late_raises(x, t):
    z = model(True, x.device)(x)
    loss = F.cross_entropy(z.view(-1, V), t.view(-1))
    for late in (lambda: z.register_hook(print), lambda: z.retain_grad()):
        with pytest.raises(RuntimeError, match=r"before anything is computed.*materialize\(\)"):
            late()
    with pytest.raises(RuntimeError, match=r"must not be asked for.*materialize\(\)"):
        torch.autograd.grad(loss, z)


READS = {
    "norm": lambda g: g.norm(),
    "abs": lambda g: g.abs().sum(),
    "items": lambda g: torch.tensor(g.tolist()),
    "numpy": lambda g: torch.from_numpy(g.cpu().numpy().copy()).to(g),
    "a part": lambda g: g[0, :, 2:4],
    "a comparison": lambda g: (g > 0).double(),
    "clone": lambda g: g.clone().cpu() + 0,
    "isnan": lambda g: g.isnan().double(),
    "cast": lambda g: g.double().square(),
    "a product": lambda g: g * torch.ones_like(g),
    "scaled": lambda g: (g * 3 + g / 2 - g).square().sum(-1),
    "deepcopy": lambda g: copy.deepcopy(g),
}


@MATERIALISED
@pytest.mark.parametrize("name", READS)
def test_the_gradient_can_be_read(name, x, t):
    """It is computed when someone looks at it."""

    def program(m):
        z = m(x)
        z.retain_grad()
        loss = F.cross_entropy((z / 2).view(-1, V), t.view(-1))
        loss += z.log_softmax(-1).gather(-1, t.clamp(min=0)[..., None]).mean()
        loss.backward()
        return [READS[name](z.grad)]

    assert_alike(x, program)


HOOKS = {
    "clipped": lambda g: g.clamp(-0.01, 0.01),
    "in place": lambda g: g.mul_(2).clamp_(max=0.02),
    "through .data": lambda g: (g.data.clamp_(-0.01, 0.01), None)[1],
    "a list": lambda g: (torch._foreach_mul_([g], 0.5), None)[1],
    "through a view": lambda g: (g.view_as(g).mul_(0.5), None)[1],
    "abs": lambda g: g.abs(),
    "scaled by a tensor": lambda g: g * torch.linspace(0, 1, V).to(g),
    "only read": lambda g: print(g.norm(), file=io.StringIO()),
    "normalised": lambda g: g / g.norm(),
    "noise": lambda g: g + torch.linspace(0, 1, g.numel()).view(g.shape).to(g),
}


@MATERIALISED
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_may_compute_with_the_gradient(name, x, t):
    def program(m):
        z = m(x)
        z.register_hook(HOOKS[name])
        part = z[:, :3]
        part.register_hook(HOOKS[name])
        loss = F.cross_entropy(part.reshape(-1, V), t[:, :3].reshape(-1)) + z.square().sum()
        return backward(m, loss)

    assert_alike(x, program)


@MATERIALISED
@pytest.mark.parametrize("factor", [3, 0.5, 0.1, 0.01, 0.001])
def test_a_hook_loses_no_accuracy_in_16_bits(factor, device):
    """Gradients in bf16 are as exact as with plain logits, whatever the hook multiplies by."""
    hidden, weight = torch.randn(64, 16), torch.randn(97, 16)
    t = torch.randint(0, 97, (64,))

    def gradients(dtype, fused):
        h, w = (p.to(device, dtype).requires_grad_() for p in (hidden, weight))
        z = ll.LinearLogits(h, w).lazy() if fused else F.linear(h, w)
        z.register_hook(lambda g: g * factor)
        F.cross_entropy(z.float(), t.to(device)).backward()
        return h.grad.double(), w.grad.double()

    exact = gradients(torch.float64, False)
    plain, lazy = (gradients(torch.bfloat16, fused) for fused in (False, True))
    for a, b, want in zip(lazy, plain, exact, strict=True):
        assert error(a, want) <= 1.5 * error(b, want)


class Sink(torch.autograd.Function):
    """DDP's _DDPSink, which keeps branches that no loss uses."""

    @staticmethod
    def forward(ctx, *xs):
        ctx.set_materialize_grads(False)
        return tuple(x.clone() for x in xs)

    @staticmethod
    def backward(ctx, *gs):
        return gs


@pytest.mark.parametrize(
    "branch",
    [
        lambda z: z, lambda z: z / 2, lambda z: z.float(), lambda z: z[:1], lambda z: torch.tanh(z),
        lambda z: z.log_softmax(-1), lambda z: z.softmax(-1), lambda z: torch.cat([z, z]),
        lambda z: z + torch.ones(V).to(z), lambda z: z.logsumexp(-1), lambda z: z.topk(2)[0],
    ],
)  # fmt: skip
def test_a_branch_without_gradient_costs_nothing(branch, x, t, monkeypatch):
    z = model(True, x.device, dtype=torch.float32)(x.float())
    loss, _ = Sink.apply(F.cross_entropy(z.view(-1, V), t.view(-1)), branch(z))
    gradients = []
    right = run.HeadLoss.gradients
    monkeypatch.setattr(Recipe, "product", None)
    monkeypatch.setattr(run, "backward", None)
    recorded = staticmethod(lambda *args: gradients.append(right(*args)) or gradients[-1])
    monkeypatch.setattr(run.HeadLoss, "gradients", recorded)
    loss.backward()
    assert sum(d.hidden is not None for d in gradients) == 1


def test_a_loss_of_constants_makes_no_gradients(x, t, monkeypatch):
    from logitless.heads.gradient_sums import GradientSums

    def refuse(*_):
        raise AssertionError("a gradient nobody asked for")

    monkeypatch.setattr(GradientSums, "add", refuse)
    z = model(True, x.device)(x).detach()
    assert not F.cross_entropy(z.view(-1, V), t.view(-1)).requires_grad


def test_a_detached_leaf_of_a_frozen_model(x, t):
    def program(m):
        with ll.lazy_logits():
            z = m.requires_grad_(False)(x).detach().requires_grad_()
        F.cross_entropy(z.view(-1, V), t.view(-1)).backward()
        return [z.grad + 0]

    assert_alike(x, program)
