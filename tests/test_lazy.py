"""Lazy logits: a tensor to everyone. What is absorbed, what is made, and that both are right."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from laws import error
from torch import nn
from torch.utils.checkpoint import checkpoint

import logitless as ll
from logitless.lazy import logits as lazy
from logitless.lazy.gradient import LazyGradient
from logitless.lazy.logits import LazyLogits

B, T, D, V = 2, 5, 6, 11


def model(fused: bool, device="cpu", bias=True, dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    head = (ll.nn.FusedHead if fused else nn.Linear)(D, V, bias=bias)
    return nn.Sequential(nn.Linear(4, D), head).to(device, dtype)


@pytest.fixture
def x(device):
    return torch.randn(B, T, 4, device=device, dtype=torch.float64)


@pytest.fixture
def t(device):
    target = torch.randint(0, V, (B, T), device=device)
    target[0, 1] = -100
    return target


def trained(m, x, loss):
    value = loss(m(x))
    grads = torch.autograd.grad(value, list(m.parameters()), retain_graph=True)
    return [value.detach(), *grads]


def assert_same(x, loss, **how):
    want, got = (trained(model(fused, x.device, **how), x, loss) for fused in (False, True))
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 1e-11


def distilled(z, **how):
    top = ll.capture_topk(torch.tanh(z.detach() * 2), 3)
    return ll.topk_distill(z, top, divergence="jsd", support="tail", temperature=2.0, **how)


ABSORBED = {
    "F.cross_entropy": lambda z, t: F.cross_entropy(z.view(-1, V), t.view(-1)),
    "sum": lambda z, t: F.cross_entropy(z.reshape(-1, V), t.reshape(-1), reduction="sum") / 7,
    "none": lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten(), reduction="none").mean(),
    "smoothed": lambda z, t: F.cross_entropy(z.view(-1, V), t.view(-1), label_smoothing=0.1),
    "weighted": lambda z, t: F.cross_entropy(
        z.view(-1, V), t.view(-1), weight=torch.linspace(1, 2, V).to(z)
    ),
    "shifted": lambda z, t: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, V), t[..., 1:].contiguous().view(-1)
    ),
    "one sequence": lambda z, t: F.cross_entropy(z[1], t[1]),
    "rows by mask": lambda z, t: F.cross_entropy(z[t > 3], t[t > 3]),
    "rows by index": lambda z, t: F.cross_entropy(z[0, [1, 3, 3]], t[1, :3]),
    "softcap": lambda z, t: F.cross_entropy((torch.tanh(z / 3) * 3).view(-1, V), t.view(-1)),
    "scaled": lambda z, t: F.cross_entropy((0.5 * z * 3 / 7).view(-1, V), t.view(-1)),
    "columns": lambda z, t: F.cross_entropy(
        z[..., :9].reshape(-1, 9), t.clamp(min=0, max=8).view(-1)
    ),
    "all columns": lambda z, t: F.nll_loss(z.log_softmax(-1)[0, 1:, : V + 3][:, 0:V], t[0, 1:]),
    "nll_loss": lambda z, t: F.nll_loss(F.log_softmax(z, -1).view(-1, V), t.view(-1)),
    "gather": lambda z, t: -z.log_softmax(-1).gather(-1, t.clamp(min=0)[..., None]).mean(),
    "picked": lambda z, t: z.gather(-1, t.clamp(min=0)[..., None]).square().mean(),
    "logsumexp": lambda z, t: z.logsumexp(-1).square().mean(),
    "total": lambda z, t: z.sum(-1, keepdim=True).square().mean(),
    "label smoother": lambda z, t: (
        (-F.log_softmax(z, -1)).sum(-1, keepdim=True).mean()
        + (-F.log_softmax(z, -1)).gather(-1, t.clamp(min=0)[..., None]).sum()
    ),
    "unbound": lambda z, t: sum(F.cross_entropy(s, u) for s, u in zip(z, t, strict=True)),
    "squeezed": lambda z, t: F.cross_entropy(z[:1].squeeze(0).unsqueeze(0)[0], t[0]),
    "transposed": lambda z, t: F.cross_entropy(
        z.transpose(0, 1).contiguous().view(-1, V), t.transpose(0, -1).reshape(-1)
    ),
    "permuted": lambda z, t: F.cross_entropy(
        z.permute(1, 0, -1).reshape(-1, V), t.permute(1, 0).reshape(-1)
    ),
    "selected": lambda z, t: F.cross_entropy(
        z.index_select(1, torch.tensor([3, 0, 3], device=t.device))[0], t[1, :3]
    ),
    "split": lambda z, t: sum(
        F.cross_entropy(a.reshape(-1, V), b.reshape(-1), reduction="sum")
        for size in (2, [1, 4])
        for a, b in zip(z.split(size, 1), t.split(size, 1), strict=True)
    ),
    "chunk": lambda z, t: sum(
        F.cross_entropy(a.reshape(-1, V), b.reshape(-1), reduction="sum")
        for a, b in zip(z.chunk(2, 1), t.chunk(2, 1), strict=True)
    ),
    "one row": lambda z, t: (
        F.cross_entropy(z[:1, :1].squeeze(), t[0, 0]) + F.cross_entropy(z[:1].squeeze((0, 1)), t[0])
    ),
    "a constant on the host": lambda z, t: F.cross_entropy(
        (z / torch.tensor(0.7) * torch.tensor(2)).view(-1, V), t.view(-1)
    ),
    "twice": lambda z, t: F.cross_entropy(z[0], t[0]) + z.logsumexp(-1).square().mean(),
    "ours": lambda z, t: ll.cross_entropy(z, t, z_loss=0.1) + ll.score(z, t).entropy.mean(),
    "ours by row": lambda z, t: ll.cross_entropy(z, t, reduction="none").square().sum(),
    "classes second": lambda z, t: (
        F.cross_entropy(z.transpose(1, 2), t)
        + F.cross_entropy(z.movedim(-1, 1).contiguous() / 2, t, label_smoothing=0.1)
        + F.cross_entropy(z.permute(1, 2, 0), t.mT, reduction="none").square().sum()
        + F.nll_loss(z.mT.log_softmax(1), t)
        + F.cross_entropy(z.mT.mT.flatten(0, 1), t.flatten())
    ),
    "classes second of four": lambda z, t: F.cross_entropy(
        torch.movedim(z.unsqueeze(2), (3, 0), (1, -1)).swapaxes(0, -1), t.unsqueeze(1)
    ),
    "ours of scaled ones": lambda z, t: (
        ll.cross_entropy(z * 0.5, t, softcap=3.0) + ll.score(z / 3, t, temperature=2.0).lse.sum()
    ),
    "ours of capped ones": lambda z, t: (
        ll.cross_entropy(torch.tanh(z / 3) * 3, t, z_loss=0.1)
        + ll.entropy(torch.tanh(z * 0.2) * 7).square().sum()
    ),
    "a teacher beside scaled ones": lambda z, t: (
        ll.kl_div(
            torch.tanh(z) * 2,
            (torch.tanh(z / 5) * 2).detach()[[1, 0]],
            direction="reverse",
            temperature=3.0,
        )
        + ll.jsd(
            z * 0.3, 2 * z.detach()[[1, 0]], temperature=2.0, reduction="none", softcap=3.0
        ).sum()
        + ll.kl_div(z / 3, z.detach()[[1, 0]], direction="forward", temperature=t.abs() + 0.5)
        + distilled(z * 0.3)
        + ll.soft_cross_entropy(z * 0.3, torch.full(z.shape, 1 / V).to(z))
    ),
    "row_loss": lambda z, t: ll.row_loss(
        lambda s, a: -s.logprob * a, z, t, rows=(t.to(z.dtype),), ignore_index=-100
    ),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ABSORBED)
def test_absorbed(name, bias, x, t):
    """The same loss and gradients, and the numbers are never made."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = model(True, x.device, bias)(x)
        ABSORBED[name](z, t).backward()
        assert z.dense_values is None
        assert_same(x, lambda z: ABSORBED[name](z, t), bias=bias)


MADE = {
    "on the host": lambda z, t: F.cross_entropy(z.cpu().view(-1, V), t.cpu().view(-1)),
    "topk": lambda z, t: z.topk(3, -1).values.square().mean(),
    "with other arguments": lambda z, t: z.float(memory_format=torch.preserve_format).exp().sum(),
    "split columns": lambda z, t: z.split(4, -1)[1].sum(),
    "exp": lambda z, t: z.exp().mean(),
    "classes second, as a sum": lambda z, t: z.transpose(1, 2).logsumexp(1).sum(),
    "classes last of three": lambda z, t: F.cross_entropy(z, t[:, :1].expand(-1, V) % T),
    "softmax": lambda z, t: (z.softmax(-1) * torch.arange(V).to(z)).sum(),
    "a column": lambda z, t: z[..., 3].sum(),
    "one more term": lambda z, t: F.cross_entropy(z.view(-1, V), t.view(-1)) + z.exp().mean(),
    "of a view": lambda z, t: F.cross_entropy(z[0], t[0]) + z[1].exp().mean(),
    "of a softcap": lambda z, t: (torch.tanh(z / 3) * 3).square().mean(),
    "negative scale": lambda z, t: F.cross_entropy((-z).view(-1, V), t.view(-1)),
    "of log p": lambda z, t: (z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(),
    "plus dense": lambda z, t: F.cross_entropy((z + 0.1 * z.detach()).view(-1, V), t.view(-1)),
    "materialize": lambda z, t: getattr(z, "materialize", lambda: z)().square().sum(),
    "ours of one capped twice": lambda z, t: ll.cross_entropy(torch.tanh(z), t, softcap=2.0),
    "ours of log p": lambda z, t: ll.cross_entropy(z.log_softmax(-1), t),
    "a label beside scaled ones": lambda z, t: distilled(z * 0.3, labels=t, ce_weight=0.5),
    "a teacher that is a tensor beside scaled ones": lambda z, t: ll.kl_div(
        z * 0.3, torch.linspace(-1, 1, z.numel()).to(z).view(z.shape), direction="forward"
    ),
    "a teacher of log p": lambda z, t: ll.kl_div(
        z, (1.5 * z.detach().flip(0)).log_softmax(-1), direction="forward"
    ),
}


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("name", MADE)
def test_whatever_is_not_absorbed_is_right_too(name, x, t):
    assert_same(x, lambda z: MADE[name](z, t))


def test_a_materialisation_warns_once_for_each_cause(x, monkeypatch):
    monkeypatch.setattr(lazy, "_warned", set())
    m = model(True, x.device)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            m(x).exp().sum().backward()
    assert ["materialised by aten.exp.default" in str(w.message) for w in seen] == [True]


def test_without_gradients_it_is_a_plain_tensor(x):
    m = model(True, x.device)
    assert type(m(x)) is LazyLogits
    with torch.no_grad():
        assert type(m(x)) is torch.Tensor
    for p in m.parameters():
        p.requires_grad_(False)
    assert type(m.eval()(x)) is torch.Tensor
    assert m(x).argmax(-1).shape == (B, T)


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


def test_other_arithmetic_on_a_gradient_says_what_to_do(x, t):
    z = model(True, x.device)(x)
    z.register_hook(lambda g: g.abs())
    with pytest.raises(RuntimeError, match=r"must not be computed with, by aten.abs.*materialize"):
        F.cross_entropy(z.view(-1, V), t.view(-1)).backward()


def test_a_second_backward_and_a_checkpoint(x, t):
    m = model(True, x.device)

    def loss(x):
        return F.cross_entropy(m(x).view(-1, V), t.view(-1))

    value = loss(x)
    first = torch.autograd.grad(value, list(m.parameters()), retain_graph=True)
    again = torch.autograd.grad(value, list(m.parameters()))
    kept = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), list(m.parameters()))
    for a, b, c in zip(first, again, kept, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    value = loss(x)
    (grad, *_) = torch.autograd.grad(value, list(m.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


def test_what_they_are_made_of_must_not_change(x, t):
    m = model(True, x.device)
    z = m(x)
    with torch.no_grad():
        m[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="must not be modified in place"):
        F.cross_entropy(z.view(-1, V), t.view(-1))


def test_they_cannot_be_written_to(x):
    z = model(True, x.device)(x)
    with pytest.raises(RuntimeError, match=r"lazy logits must not be written to, by aten\.mul_"):
        z.detach().mul_(2)


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_nor_can_a_part_of_them(x, t):
    """Which is seen at once, or where they have no history, when they are used."""
    z = model(True, x.device)(x)
    match = "must not be written to, by assigning to a part"
    with pytest.raises(RuntimeError, match=match):
        z[..., 0] = 0.0
    z = model(True, x.device)(x).detach()
    z[..., 0] = 0.0
    for use in (lambda: F.cross_entropy(z.view(-1, V), t.view(-1)), z.materialize, z.exp):
        with pytest.raises(RuntimeError, match=match):
            use()


def test_a_materialised_one_can(x):
    assert_same(x, lambda z: getattr(z, "materialize", z.clone)().mul_(2).square().sum())
    z = model(True, x.device)(x)
    before = z.tolist()
    z.materialize().zero_()
    assert z.tolist() == before


@pytest.mark.parametrize(
    "op",
    [
        lambda z: z.squeeze(3), lambda z: z.unsqueeze(-5), lambda z: z.transpose(0, 4),
        lambda z: z.narrow(3, 0, 1), lambda z: z.unbind(-4), lambda z: z.flatten(0, 3),
        lambda z: z.chunk(2, 3),
    ],
)  # fmt: skip
def test_a_dimension_that_is_not_there(op, x):
    for fused in (False, True):
        with pytest.raises(IndexError):
            op(model(fused, x.device)(x))


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (lambda z, t: ll.cross_entropy(z.log_softmax(-1), t), "log-probabilities"),
        (lambda z, t: ll.entropy(z.mT), "transposed logits"),
        (lambda z, t: ll.entropy(z.tanh(), softcap=2.0), "logits capped twice"),
        (lambda z, t: distilled(z / 3, labels=t, ce_weight=0.5), "scaled logits, beside labels"),
    ],
)
def test_our_losses_say_why_they_materialise(loss, cause, x, t, monkeypatch):
    monkeypatch.setattr(lazy, "_warned", set())
    with pytest.warns(UserWarning, match=f"materialised by a loss of logitless over {cause}"):
        loss(model(True, x.device)(x), t)


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_numbers_on_demand(x):
    m = model(True, x.device)
    z, plain = m(x), model(False, x.device)(x)
    assert torch.equal(z.detach().cpu(), plain.detach().cpu())
    assert z.tolist() == plain.tolist()
    assert repr(z) == f"LazyLogits(shape=(2, 5, 11), dtype=torch.float64, device={z.device})"
    file = io.BytesIO()
    torch.save(z.detach(), file)
    file.seek(0)
    assert torch.equal(torch.load(file), plain.detach())
    assert torch.equal(copy.deepcopy(z.detach()).cpu(), plain.detach().cpu())
    assert torch.equal(z.argmax(-1), plain.argmax(-1))
    found, want = ll.capture_topk(z, 3), ll.capture_topk(plain, 3)
    assert torch.equal(found.ids, want.ids)


def test_a_teacher_may_be_lazy(x, t):
    student, teacher = model(True, x.device), model(True, x.device)
    want = ll.kl_div(
        student(x).materialize(), teacher(x).materialize().detach(), direction="forward"
    )
    got = ll.kl_div(student(x), teacher(x).detach(), direction="forward")
    assert error(got, want) < 1e-11


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_teacher_stays_lazy_where_asked(without, x, t):
    """Its logits are never made whole, whatever the model does to them; sampling is left alone."""
    student, teacher = model(True, x.device), model(True, x.device)
    teacher[0].weight.data.mul_(2)
    with without():
        plain = torch.tanh(teacher(x)[:, 1:] * 3 / 5) * 5
        with ll.lazy_logits():
            z = torch.tanh(teacher(x)[:, 1:] * 3 / 5) * 5
        assert type(teacher(x)) is torch.Tensor
    assert (type(plain), type(z)) == (torch.Tensor, LazyLogits)
    for loss in (
        lambda teacher: ll.kl_div(
            student(x)[:, 1:], teacher, direction="forward", mask=t[:, 1:] > 1
        ),
        lambda teacher: ll.jsd(student(x)[:, 1:], teacher, reduction="none", temperature=2.0).sum(),
        lambda teacher: ll.topk_distill(
            student(x)[:, 1:], ll.capture_topk(teacher, 3), divergence="jsd", support="tail"
        ),
    ):
        weights = list(student.parameters())
        got, want = (torch.autograd.grad(loss(of), weights) for of in (z, plain.clone()))
        for a, b in zip(got, want, strict=True):
            assert error(a, b) < 1e-11
    assert z.dense_values is None
    logits = student(x)[:, 1:].materialize()
    got, want = (ll.kl_div(logits, of, direction="reverse") for of in (z, plain.clone()))
    assert error(got, want) < 1e-11


AS_TENSOR = {
    "F.cross_entropy": lambda z, t: F.cross_entropy(z, t),
    "index": lambda z, t: F.cross_entropy(z[1:4], t[1:4]) + z[0].square().sum(),
    "methods": lambda z, t: F.cross_entropy(z.view(2, -1, V).mT.contiguous(), t.view(2, -1)),
    "operators": lambda z, t: (0.5 * z / 3).logsumexp(-1).sum() + (z + z).square().mean(),
    "torch": lambda z, t: torch.stack([z, 2 * z]).sum() + torch.logsumexp(z, -1).mean(),
    "rows": lambda z, t: sum(row.square().sum() for row in z) * len(z),
}


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("name", AS_TENSOR)
def test_a_linear_logits_is_a_tensor_to_pytorch(name, device):
    leaves = [torch.randn(s, device=device, dtype=torch.float64) for s in ((6, D), (V, D), (V,))]
    leaves = [t.requires_grad_() for t in leaves]
    t = torch.tensor([1, 2, -100, 4, 5, 6], device=device)
    heads = (ll.LinearLogits(*leaves, workspace=2 * V * 8), F.linear(*leaves))
    values = [AS_TENSOR[name](z, t) for z in heads]
    assert error(*values) < 1e-11
    for a, b in zip(*(torch.autograd.grad(value, leaves) for value in values), strict=True):
        assert error(a, b) < 1e-11


def test_a_linear_logits_is_no_tensor_where_it_must_not_be(device):
    h, w = torch.randn(6, D, device=device), torch.randn(V, D, device=device)
    z = ll.LinearLogits(h, w, main_grad=torch.zeros_like(w))
    with pytest.raises(ValueError, match="main_grad must be None where PyTorch"):
        F.cross_entropy(z, torch.zeros(6, dtype=torch.long, device=device))
    for name in ("shard", "__array__"):
        with pytest.raises(AttributeError, match=f"LinearLogits has no attribute {name!r}"):
            getattr(z, name)


def test_autocast_is_that_of_a_linear_layer(x, t):
    m, plain = (
        model(True, x.device, dtype=torch.float32),
        model(False, x.device, dtype=torch.float32),
    )
    x = x.float()
    with torch.autocast(x.device.type, torch.bfloat16):
        got = F.cross_entropy(m(x).view(-1, V), t.view(-1))
        want = F.cross_entropy(plain(x).view(-1, V), t.view(-1))
    assert m(x).dtype == plain(x).dtype
    got.backward()
    want.backward()
    for a, b in zip(m.parameters(), plain.parameters(), strict=True):
        assert a.grad.dtype == b.grad.dtype
        assert error(a.grad, b.grad.double()) < 0.02
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


# --- found by a review: what a plain tensor does, or an error


def test_a_write_through_a_view_is_refused(x, t):
    z = model(True, x.device)(x)
    with torch.no_grad():
        z[..., 3] = -torch.inf
    with pytest.raises(RuntimeError, match="must not be written to"):
        F.cross_entropy(z.view(-1, V), t.view(-1))


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_a_clone_is_a_copy(x):
    z = model(True, x.device)(x)
    least = z.min().item()
    z.detach().clone().materialize().fill_(-1e4)
    assert z.min().item() == least
    z.materialize().mul_(2)  # whose owner may write to it
    assert z.min().item() == least


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_a_move_to_where_it_is_keeps_the_graph(x, t):
    assert_same(x, lambda z: F.cross_entropy(z.to(x.device).view(-1, V), t.view(-1)))
    z = model(True, x.device)(x)
    assert z.to(torch.empty(1, device="meta", dtype=z.dtype)).device.type == "meta"
    if x.device.type == "cpu":
        assert_same(x, lambda z: F.cross_entropy(z.cpu().view(-1, V), t.view(-1)))


def test_the_dtype_of_a_log_softmax(x):
    z = model(True, x.device, dtype=torch.bfloat16)(x.bfloat16())
    for found in (
        torch.log_softmax(z, -1, torch.float32),
        z.log_softmax(-1, torch.float32),
        F.log_softmax(z, -1, dtype=torch.float32),
    ):
        assert type(found) is LazyLogits
        assert found.dtype == torch.float32


def test_hidden_must_not_change_before_a_view(x, t):
    m = model(True, x.device)
    h = m[0](x)
    z = m[1](h)
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="must not be modified in place"):
        z[1:]


def test_a_mask_must_not_change_before_backward(x, t):
    z = model(True, x.device)(x)
    mask = t > 3
    loss = F.cross_entropy(z[mask], t[mask])
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_inference_mode_leaves_nothing_behind(x):
    z = model(True, x.device)(x)
    with torch.inference_mode():
        z.max()
    assert z.materialize().exp().sum().requires_grad


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomaly_detection(x, t):
    with torch.autograd.set_detect_anomaly(True):
        assert_same(x, lambda z: F.cross_entropy(z.view(-1, V), t.view(-1)))
        z = model(True, x.device)(x * torch.nan)
        with pytest.raises(RuntimeError, match="returned nan values"):
            F.cross_entropy(z.view(-1, V), t.view(-1)).backward()


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


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_other_forms_of_a_call(x, t):
    """Absorbed or not, they do what PyTorch does."""
    z, plain = model(True, x.device)(x), model(False, x.device)(x)

    def same(a, b):
        torch.testing.assert_close(a.materialize() if type(a) is LazyLogits else a, b)

    same(z.sum(axis=-1), plain.sum(axis=-1))
    same(z.argmax(axis=-1), plain.argmax(axis=-1))
    same(z.mul(other=2.0), plain.mul(other=2.0))
    same(z[:1].squeeze(), plain[:1].squeeze())
    same(z[(z > 0).cpu().numpy()], plain[(plain > 0).cpu().numpy()])
    same((z.log_softmax(-1) * 0).argmax(-1), (plain.log_softmax(-1) * 0).argmax(-1))
    tiny = (F.cross_entropy((logits * 1e-13)[1], t[1]) for logits in (z, plain))
    same(*tiny)
    for wrong in (lambda z: z.unsqueeze(6), lambda z: z.narrow(4, 0, 1), lambda z: z.squeeze(5)):
        with pytest.raises(IndexError):
            wrong(z)
    none = torch.zeros(V, device=x.device, dtype=x.dtype)
    assert F.cross_entropy(z[1], t[1], weight=none).isnan()
    assert F.cross_entropy(z[1], torch.full_like(t[1], -100)).isnan()


MOVES = {
    "transposed": lambda z: z.transpose(1, 2),
    "permuted": lambda z: z.permute(1, 2, 0),
    "moved": lambda z: z.movedim(-1, 0),
    "some rows": lambda z: z[:, :-1],
    "some columns": lambda z: z[..., 2:7],
    "narrowed": lambda z: z.narrow(1, 1, 3),
    "unbound": lambda z: z.unbind(1)[2],
}


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_any_view_of_moved_ones(name, known, x):
    """Whether their numbers are made after the move, or were before it."""

    def flat(z):
        if known:
            z.exp()
        moved = MOVES[name](z)
        first = moved.shape[0]
        return moved.reshape(-1) + moved.contiguous().view(first, -1).flatten() + moved.flatten()

    assert_same(x, lambda z: flat(z).square().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1 / 0.7, 4.0])
def test_a_scale_costs_no_bits(scale, dtype, device):
    """Hidden states are not rounded again, nor do they overflow."""
    hidden = torch.randn(40, 64, device=device).to(dtype)
    hidden[0, 0] = 3e4
    weight = (torch.randn(300, 64, device=device) * 0.3).to(dtype)
    weight[:, 0] *= 1e-4
    target = torch.randint(300, (40,), device=device)
    z = ll.LinearLogits(hidden, weight, logits_dtype=torch.float32)
    exact = scale * F.linear(hidden.double(), weight.double())
    beside = ll.LinearLogits(hidden.flip(0), weight, logits_dtype=torch.float32)
    for loss in (
        lambda z, teacher: ll.cross_entropy(z, target),
        lambda z, teacher: ll.kl_div(z, teacher, direction="forward", temperature=3.0),
        lambda z, teacher: ll.kl_div(teacher, z, direction="forward", temperature=3.0),
    ):
        got, want = loss(z * scale, beside), loss(exact, exact.flip(0) / scale)
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-6)


class Freed(nn.Linear):
    """As a module that FSDP2 shards: its weight is freed after forward, and gathered when asked."""

    def forward(self, x):
        self.numbers, self.gathered = self.weight.detach().clone(), 0
        made = ll.LinearLogits(x, self.weight, workspace=1)
        made.head = made.head._replace(module=self)
        self.reshard()
        return made[:]

    def unshard(self):
        self.gathered += 1
        self.weight.untyped_storage().resize_(self.numbers.nbytes)
        with torch.no_grad():
            self.weight.data.copy_(self.numbers)

    def reshard(self):
        self.weight.untyped_storage().resize_(0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("masked", [0, 3, 6])
def test_heads_are_gathered_once_whatever_the_rows(masked, reduction, device):
    """Or ranks whose masks differ would wait for each other."""
    student, teacher = (Freed(D, V, bias=False, device=device) for _ in range(2))
    hidden = torch.randn(6, D, device=device, requires_grad=True)
    mask = torch.arange(6, device=device) >= masked
    value = ll.kl_div(
        student(hidden), teacher(hidden).detach(), direction="forward", mask=mask,
        reduction=reduction,
    )  # fmt: skip
    assert (student.gathered, teacher.gathered) == (1, 1)
    value.sum().backward()
    again = 1 + (reduction == "none")
    assert (student.gathered, teacher.gathered) == (again, again)
