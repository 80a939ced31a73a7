"""The gradient of lazy logits: hooks see it, scale it and add it up."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import run
from logitless.lazy.gradient import LazyGradient
from logitless.lazy.recipe import Computation
from tests.support.laws import error
from tests.support.lazy_models import V, model


def test_hooks_see_the_logits_and_the_head(x, t):
    m, seen = model(True, x.device), []
    m[1].register_full_backward_hook(lambda *_: seen.append("head"))
    z = m(x)
    z.register_hook(lambda g: seen.append(type(g)))
    F.cross_entropy(z.view(-1, V), t.view(-1)).backward()
    assert seen == [LazyGradient, "head"]


def test_the_graph_keeps_no_hidden_states(x, t):
    """Beyond what autograd saves, and frees in backward: a layer's worth of memory."""
    target = t[:, 1:].flatten()
    z = model(True, x.device)(x)[:, 1:].reshape(-1, V)
    loss = F.cross_entropy(z[target > 2] / 2, target[target > 2])
    node, kept = loss.grad_fn, []
    while "LazyHead" not in node.name():
        cells = getattr(getattr(node, "back", None), "__closure__", None) or ()
        kept += [cell.cell_contents for cell in cells]
        node = next(f for f, _ in node.next_functions if f is not None)
    tensors = [found for found in kept if isinstance(found, torch.Tensor)]
    assert len(tensors) == 3
    assert all(found.untyped_storage().nbytes() <= 8 for found in tensors)


def test_a_hook_may_scale_the_gradient(x, t):
    got, want = [], []
    for fused, found in ((True, got), (False, want)):
        m = model(fused, x.device)
        z = m(x)
        z.register_hook(lambda g: g * 3)
        F.cross_entropy(z.view(-1, V), t.view(-1)).backward()
        found.extend(p.grad for p in m.parameters())
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 1e-11


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


@pytest.mark.parametrize("name", READS)
def test_the_gradient_can_be_read(name, x, t):
    """It is computed when someone looks at it."""
    found = []
    for fused in (True, False):
        z = model(fused, x.device)(x)
        z.retain_grad()
        loss = (
            F.cross_entropy((z / 2).view(-1, V), t.view(-1))
            + z.log_softmax(-1).gather(-1, t.clamp(min=0)[..., None]).mean()
        )
        loss.backward()
        found.append(READS[name](z.grad))
    assert error(found[0], found[1]) < 1e-11


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


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_may_compute_with_the_gradient(name, x, t):
    found = []
    for fused in (True, False):
        m = model(fused, x.device)
        z = m(x)
        z.register_hook(HOOKS[name])
        part = z[:, :3]
        part.register_hook(HOOKS[name])
        loss = F.cross_entropy(part.reshape(-1, V), t[:, :3].reshape(-1)) + z.square().sum()
        loss.backward()
        found.append([p.grad for p in m.parameters()])
    for a, b in zip(*found, strict=True):
        assert error(a, b) < 1e-11


def test_limits_of_reading_are_told(x, t):
    z = model(True, x.device)(x)
    p = z.log_softmax(-1)
    p.retain_grad()
    F.nll_loss(p.view(-1, V), t.view(-1)).backward()
    with pytest.raises(RuntimeError, match="log-probabilities of lazy logits must not be read"):
        p.grad.norm()


JOINS = {
    "torch.cat": (lambda z: [z[1:] * 2, z[:1] * 2], lambda a, b: torch.cat([a, b])),
    "Tensor.mul": (lambda z: [z.softmax(-1), z.log_softmax(-1)], lambda a, b: a * b),
    "F.kl_div": (
        lambda z: [z.log_softmax(-1), z.softmax(-1)],
        lambda a, b: F.kl_div(a, b, reduction="none"),
    ),
}
CHANGES = {
    "scaled": lambda g: g * 2,
    "clipped": lambda g: g.clamp(-0.01, 0.01),
    "in place": lambda g: g.mul_(2),
    "another": lambda g: torch.ones_like(g),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", JOINS)
def test_the_gradient_of_joined_logits_must_not_be_changed(name, change, x):
    """A part of the gradient belongs to all of the logits. Logits before the join are complete."""
    pieces, join = JOINS[name]
    for at in (0, 1):
        parts = pieces(model(True, x.device)(x))
        loss = join(*parts).sum(-1).square().sum()
        parts[at].register_hook(CHANGES[change])
        with pytest.raises(RuntimeError, match=f"lazy argument of {name} must not be changed"):
            loss.backward()
    found = []
    for fused in (True, False):
        m = model(fused, x.device)
        z = m(x)
        z.register_hook(CHANGES[change])
        join(*pieces(z)).sum(-1).square().sum().backward()
        found.append([p.grad for p in m.parameters()])
    for a, b in zip(*found, strict=True):
        assert error(a, b) < 1e-11


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
        lambda z: F.cross_entropy(z.flatten(0, 1), torch.zeros(10, dtype=torch.long).to(z.device)),
    ],
)  # fmt: skip
def test_a_branch_without_gradient_costs_nothing(branch, x, t, monkeypatch):
    z = model(True, x.device, dtype=torch.float32)(x.float())
    loss, _ = Sink.apply(F.cross_entropy(z.view(-1, V), t.view(-1)), branch(z))
    gradients = []
    kept = run.Kept.gradients_of
    monkeypatch.setattr(Computation, "start", None)
    monkeypatch.setattr(run, "backward", None)
    monkeypatch.setattr(
        run.Kept, "gradients_of", lambda *args: gradients.append(kept(*args)) or gradients[-1]
    )
    loss.backward()
    assert sum(d.hidden is not None for d in gradients) == 1


def test_gradients_may_be_added_up(x, t):
    m = model(True, x.device)
    z = m(x)
    z.retain_grad()
    F.cross_entropy(z.view(-1, V), t.view(-1)).backward(inputs=[z])
    twice = z.grad
    twice += z.grad.clone()
    m.zero_grad()
    m(x).backward(twice)
    other = model(False, x.device)
    (2 * F.cross_entropy(other(x).view(-1, V), t.view(-1))).backward()
    for a, b in zip(m.parameters(), other.parameters(), strict=True):
        assert error(a.grad, b.grad) < 1e-11


def test_a_loss_of_constants_makes_no_gradients(x, t, monkeypatch):
    from logitless.heads.gradient_sums import GradientSums

    def refuse(*_):
        raise AssertionError("a gradient nobody asked for")

    monkeypatch.setattr(GradientSums, "add", refuse)
    z = model(True, x.device)(x).detach()
    assert not F.cross_entropy(z.view(-1, V), t.view(-1)).requires_grad


def test_a_detached_leaf_of_a_frozen_model(x, t):
    found = []
    for fused in (True, False):
        m = model(fused, x.device).requires_grad_(False)
        with ll.lazy_logits():
            z = m(x).detach().requires_grad_()
        F.cross_entropy(z.view(-1, V), t.view(-1)).backward()
        found.append(z.grad + 0)
    torch.testing.assert_close(*found)
