"""Functions of each value, or of whole rows, that stay lazy until a reduction of the vocabulary."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.lazy import by_rows
from tests.support.laws import error
from tests.support.lazy_models import (
    B,
    T,
    V,
    assert_alike,
    assert_same,
    assert_stays_lazy,
    backward,
    columns,
    model,
    other,
)  # fmt: skip


def entropy_from_logits(logits, chunk=3):
    """As trainers write it: -Σ p log p of some rows at a time."""
    found = []
    for rows in logits.reshape(-1, V).split(chunk):
        log_p = F.log_softmax(rows, dim=-1)
        found.append(-(torch.exp(log_p) * log_p).sum(-1))
    return torch.cat(found).reshape(logits.shape[:-1])


def divergence(z, t, beta):
    """A distillation loss by value, masked by the labels."""
    log_p, log_q = z.log_softmax(-1), other(z).log_softmax(-1)
    pair = (log_p, log_q) if beta == 0 else (log_q, log_p)
    each = F.kl_div(*pair, reduction="none", log_target=True)
    return each[t != -100].sum() / (t != -100).sum()


def teacher(z):
    """Other lazy logits without a gradient, or plain ones."""
    if type(z) is torch.Tensor:
        return z.detach().flip(0) / 2 + columns(z)
    return z.detach()[[1, 0]] / 2 + columns(z)


LAZY = {
    "entropy": lambda z, t: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "entropy from log p": lambda z, t: entropy_from_logits(z).square().sum(),
    "entropy of scaled ones": lambda z, t: (
        ((z / 2).softmax(-1) * F.log_softmax(z / 2, -1)).sum((1, 2)).square().sum()
    ),
    "entropy in other words": lambda z, t: (
        torch.special.entr(z.softmax(-1)).sum(-1).square().sum()
        + torch.xlogy(z.softmax(-1), z.softmax(-1)).sum()
        - (z.softmax(-1) * (z.softmax(-1) + 1e-8).log()).sum(-1).exp().sum()
    ),
    "F.kl_div by value": lambda z, t: (
        F.kl_div(z.log_softmax(-1), other(z).softmax(-1), reduction="none").sum(-1).square().sum()
    ),
    "F.kl_div, masked": lambda z, t: (
        (F.kl_div(z.log_softmax(-1), other(z).softmax(-1), reduction="none") * (t > 0)[..., None])
        .sum() / (t > 0).sum()
    ),
    "F.kl_div, some rows": lambda z, t: divergence(z, t, 0) + divergence(z, t, 1).square(),
    "F.kl_div, moved rows": lambda z, t: (
        F.kl_div(z.log_softmax(-1), other(z).softmax(-1), reduction="none")[:, 1:]
        .transpose(0, 1).reshape(-1, V)[[3, 0, 0]].mean(-1).exp().sum()
    ),
    "F.kl_div beside a lazy teacher": lambda z, t: (
        F.kl_div(z.log_softmax(-1), teacher(z).softmax(-1), reduction="none")[t > 2].sum()
        + (z.softmax(-1) * (z.log_softmax(-1) - teacher(z).log_softmax(-1))).sum(-1).square().sum()
    ),
    "F.kl_div of itself": lambda z, t: (
        F.kl_div(z.log_softmax(-1), (z / 2).softmax(-1), reduction="batchmean")
        + F.kl_div(z.log_softmax(-1), z.detach().softmax(-1) / 2, reduction="sum")
    ),
    "other losses by value": lambda z, t: (
        F.mse_loss(z, other(z)) + F.l1_loss(z, other(z), reduction="sum")
        + F.smooth_l1_loss(z, other(z), reduction="none").sum(-1).square().sum()
        + F.huber_loss(z, other(z), delta=0.5)
        + F.binary_cross_entropy_with_logits(z, other(z).sigmoid(), weight=columns(z))
        + F.binary_cross_entropy(z.sigmoid(), other(z).sigmoid())
    ),
    "a mean of a function": lambda z, t: (
        z.sin().mean() + (z / 10).exp().square().mean((1, 2)).sum()
    ),
    "shifted by the largest": lambda z, t: (
        (z - z.detach().amax(-1, keepdim=True)).exp().sum(-1).log().square().sum()
    ),
    "labels under a mask of values": lambda z, t: (
        F.cross_entropy(z.masked_fill(other(z) > 0.7, -30.0).view(-1, V), t.view(-1))
        + F.cross_entropy((z + other(z))[1], t[1], reduction="sum", label_smoothing=0.1)
        + F.nll_loss(
            (z * other(z)).view(-1, V).log_softmax(-1), t.view(-1), weight=1 + columns(z)
        )
        + F.cross_entropy(
            z.sin().view(-1, V), t.view(-1), reduction="none", weight=1 + columns(z)
        ).square().sum()
    ),
    "torch.where": lambda z, t: (
        torch.where(z > 0, z, z.exp()).sum(-1).square().sum()
        + torch.where((t > 3)[..., None], z, 2 * z.detach()).logsumexp(-1).sum()
        + torch.where(other(z) > 0, 0.5, z.tanh().tanh()).mean()
    ),
    "operators": lambda z, t: (
        (1 - z).square().sum(-1).exp().mean() + (1 / (2 + z.abs())).sum() + (z**2 / 3).mean()
        + (2 ** (z / 9)).sum() + (z % 2.5).sum() + (-z.sin() - 3 * z.cos() + z.sin() * 2).sum()
    ),
    "several tensors": lambda z, t: (
        torch.addcmul(z, z.tanh().tanh(), other(z), value=0.3).sum(-1).square().sum()
        + torch.lerp(z, other(z), 0.3).logsumexp(-1).sum() + torch.logaddexp(z, z * 2).mean()
        + torch.maximum(z, 1 - z).sum() + torch.clamp(z, min=-0.2, max=0.4).sum()
    ),
    "functions of functions of rows": lambda z, t: (
        (z.softmax(-1) * 3).log_softmax(-1).gather(-1, t.clamp(min=0)[..., None]).sum()
        + F.softmax(z.sin(), dim=-1).topk(2, -1)[0][..., 1].sum() + z.sin().argmax(-1).sum()
    ),
    "a transposed function": lambda z, t: F.nll_loss((2 * z.mT).log_softmax(1), t),
    "no gradient on one side": lambda z, t: (
        (z.detach().softmax(-1) * z.log_softmax(-1)).sum(-1).square().sum()
        + (z.softmax(-1).detach() * z).sum() + (z.softmax(-1) * z.softmax(-1).detach()).sum()
    ),
    "the same view twice": lambda z, t: (z[:, 1:].softmax(-1) * z[:, 1:].log_softmax(-1)).sum(),
    "a sum and its terms": lambda z, t: (
        (lambda p, log_p: ((p * log_p + p) * log_p).sum(-1).square().sum() + p.amax(-1).sum())(
            z.softmax(-1), z.log_softmax(-1)
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LAZY)
def test_stays_lazy(name, bias, x, t):
    assert_stays_lazy(x, lambda z: LAZY[name](z, t), bias)


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.few(8)
def test_in_small_pieces(name, x, t, monkeypatch):
    """The same for one row at a time."""
    monkeypatch.setattr(by_rows, "PIECE", {"cpu": 1, "cuda": 1})
    assert_stays_lazy(x, lambda z: LAZY[name](z, t))


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("name", LAZY)
def test_once_materialised(name, x, t):
    """The same if another operation has computed the values."""

    def loss(z):
        z.sort(-1)
        return LAZY[name](z, t) + z.softmax(-1).mul(z).flip(-1).exp().sum()

    assert_same(x, loss)


COMPARISONS = {
    "greater": lambda z: z > 0.1,
    "greater than a column": lambda z: z > z.detach().amax(-1, keepdim=True) - 0.5,
    "cast": lambda z: (z * 3).long(),
    "not": lambda z: ~(z >= other(z)),
    "sign": lambda z: torch.signbit(z),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_mask_is_a_plain_tensor(name, x):
    """A mask is computed from some rows at a time, and callers may write to it."""
    z, plain = model(True, x.device)(x), model(False, x.device)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mask, want = COMPARISONS[name](z), COMPARISONS[name](plain)
        assert type(mask) is torch.Tensor
        assert torch.equal(mask, want)
        mask[..., 0] = 0
        assert (z > z.gather(-1, torch.zeros(B, T, 1).long().to(z.device))).sum(-1).shape == (B, T)
    assert not z.known


def test_sums_of_questions(x):
    z = model(True, x.device)(x * torch.tensor([1.0, 1, 1, torch.nan]).to(x))
    assert z.isnan().sum() == z.numel()
    assert (z.isnan().sum(-1) == V).all()
    assert not z.known


FP64 = {
    "F.cross_entropy": lambda z, t: F.cross_entropy(z.view(-1, V), t.view(-1)),
    "soft labels": lambda z, t: F.cross_entropy(z[1], other(z)[1].softmax(-1)),
    "ours": lambda z, t: ll.cross_entropy(z, t, reduction="none").sum(),
    "ours, a mean": lambda z, t: ll.cross_entropy(z * 2, t),
    "statistics": lambda z, t: ll.score(z, t).entropy.sum() + ll.token_logprobs(z, t).mean(),
    "log_softmax": lambda z, t: z.log_softmax(-1).gather(-1, t.clamp(min=0)[..., None]).sum(),
    "KL": lambda z, t: ll.kl_div(z, other(z), direction="forward"),
    "KL beside a lazy teacher": lambda z, t: ll.kl_div(
        z, z.detach().flip(0) if type(z) is torch.Tensor else z.detach()[[1, 0]],
        direction="reverse",
    ),
    "sum": lambda z, t: z.sum(-1).square().mean() + z.mean(),
    "a bias": lambda z, t: (z + columns(z)).logsumexp(-1).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", {**LAZY, **FP64})
def test_a_double_precision_model_in_fp32(name, x, t):
    """CLIENTS, missing: `.float()` of fp64 logits, as the losses of Transformers call it."""

    def program(m):
        z = m(x).float()
        value = (LAZY | FP64)[name](z, t)
        gradients = torch.autograd.grad(value, list(m.parameters()))
        assert not getattr(z, "known", False)
        return value, *gradients

    assert_alike(x, program, within=2e-6 if name in FP64 else 2e-5)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["entropy", "F.kl_div, masked", "operators", "torch.where"])
def test_dtypes_are_those_of_plain_logits(name, dtype, autocast, x, t):
    m = [model(fused, x.device, dtype=dtype)(x.to(dtype)) for fused in (True, False)]
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        got, want = (LAZY[name](z, t) for z in m)
        each = [[z.exp(), z.softmax(-1) * z, z.double(), z * columns(z).double()] for z in m]
    assert got.dtype == want.dtype
    assert [z.dtype for z in each[0]] == [z.dtype for z in each[1]]
    assert error(got, want.double()) < (2e-5 if dtype == torch.float32 and not autocast else 0.03)


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_a_tensor_beside_the_logits_must_not_change(x):
    """It is read when the result is reduced; a small mask is copied."""
    z = model(True, x.device)(x)
    probs, mask = other(z).softmax(-1), torch.ones(B, T, 1).to(x)
    each = F.kl_div(z.log_softmax(-1), probs, reduction="none") * mask
    want = each.sum(-1)
    mask.zero_()
    assert torch.equal(each.sum(-1), want)
    probs.zero_()
    for use in (lambda: each.sum(-1), lambda: each.tolist(), lambda: each[:1].exp().sum()):
        with pytest.raises(RuntimeError, match="must not be modified in place before the result"):
            use()


def test_made_under_inference_mode(x):
    """Tensors made under inference_mode, which plain logits cannot be combined with."""
    m = model(True, x.device)
    z = m(x)
    with torch.inference_mode():
        probs, mask = other(z).softmax(-1), torch.ones(B, T, 1).to(x)
        assert error((z.softmax(-1) * mask).sum(), torch.tensor(float(B * T)).to(x)) < 1e-11
    got, want = (
        torch.autograd.grad(
            (F.kl_div(z.log_softmax(-1), q, reduction="none") * k).sum(), [*m.parameters()],
            retain_graph=True,
        )
        for q, k in ((probs, mask), (probs.clone(), mask.clone()))
    )  # fmt: skip
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 1e-11
    assert not z.known


BESIDE = {
    "a column each": lambda z, w: (z * w).logsumexp(-1).sum(),
    "a row each": lambda z, w: (z.softmax(-1) + w.sum() * torch.ones(B, T, 1).to(z)).exp().sum(),
    "F.kl_div": lambda z, w: F.kl_div(
        z.log_softmax(-1), w.softmax(-1).expand(z.shape), reduction="none"
    ).sum(),
    "F.mse_loss": lambda z, w: F.mse_loss(z, w + other(z)),
    "torch.where": lambda z, w: torch.where(z > 0, w, z).sum(),
    "added": lambda z, w: (z + w).logsumexp(-1).sum(),
    "added to scaled ones": lambda z, w: (z / 2 + w).logsumexp(-1).sum(),
    "a number": lambda z, w: (z * w.sum()).logsumexp(-1).sum(),
}


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", BESIDE)
def test_a_tensor_beside_the_logits_gets_its_gradient(name, frozen, x):
    """An adapter such as IA3 multiplies frozen logits by a weight that trains."""

    def program(m):
        w = torch.linspace(0.5, 1, V).to(x).requires_grad_()
        with ll.lazy_logits():
            z = m.requires_grad_(not frozen)(x)
        needed = [w, *(p for p in m.parameters() if p.requires_grad)]
        return torch.autograd.grad(BESIDE[name](z, w), needed)

    assert_alike(x, program)


def test_a_long_chain_of_functions(x):
    """A formula is not deeper than Python's recursion allows."""

    def loss(z):
        for _ in range(300):
            z = z.sin() + 0.5
        return z.sum()

    with pytest.warns(UserWarning, match="materialised"):
        assert_same(x, loss)


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_hooks_run_between_functions(x):
    def program(m):
        seen, z = [], m(x)

        def watched(part):
            part.register_hook(lambda g: seen.append(g.norm()))
            return part

        p, log_p = watched(z.softmax(-1)), watched(z.log_softmax(-1))
        watched(p * log_p).sum(-1).square().sum().backward()
        return seen

    assert_alike(x, program)


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_a_hook_may_change_a_gradient_before_logits_are_joined(x):
    """Logits with a hook are not joined, but materialised."""

    def program(m):
        z = m(x)
        p, log_p = z.softmax(-1), z.log_softmax(-1)
        p.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return backward(m, (p * log_p).sum(-1).square().sum())

    assert_alike(x, program)


def test_a_function_that_writes_is_not_lazy(x):
    z = model(True, x.device)(x)
    for write in (lambda: F.relu(z, inplace=True), lambda: F.relu(z, True)):
        with pytest.raises(RuntimeError, match="must not be written to"):
            write()


PER_ROW = {  # functions of transposed logits and one number per row
    "add": lambda z, c: z.mT + c,
    "divide": lambda z, c: z.mT / (c + 1),
    "maximum": lambda z, c: torch.maximum(z.mT, c),
    "masked_fill": lambda z, c: z.mT.masked_fill(c < 2, 1.0),
    "where": lambda z, c: torch.where(c < 2, z.mT, 0.0),
    "clamp": lambda z, c: z.mT.clamp(min=c),
}


@pytest.mark.parametrize("name", PER_ROW)
@pytest.mark.parametrize("rows", [3, 4])
def test_transposed_logits_and_one_number_per_row(name, rows):
    """The numbers belong to the last dimension, also if there are as many rows as columns."""
    hidden, weight = torch.randn(rows, 2), torch.randn(4, 2)
    numbers = torch.arange(float(rows))
    got = PER_ROW[name](ll.LinearLogits(hidden, weight).lazy(), numbers)
    torch.testing.assert_close(got.clone(), PER_ROW[name](hidden @ weight.T, numbers))
