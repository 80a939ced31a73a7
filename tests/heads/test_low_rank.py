"""A head with `low_rank` has the same results as the sum of two plain products."""

import functools

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import choose_cut, gemms
from logitless.heads.choose_cut import Cut
from tests.support.heads import LOSSES, N, V, assert_same, make
from tests.support.rank_threads import on_ranks

R = 3
SMALL = dict(choose_cut.SMALL)  # conftest.py replaces choose_cut.SMALL in each test
CUTS = {"small": None, "rows": Cut(3), "columns": Cut(N, 8), "kept": Cut(N, 8, kept=True)}


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch):
    """Runs a test with the whole head at once, with chunks of rows and with blocks of columns."""
    how = CUTS[request.param]
    if how is None:
        monkeypatch.setattr(choose_cut, "SMALL", SMALL)
    else:
        choose = lambda work, *_: how if work.merges else Cut(3)  # noqa: E731
        monkeypatch.setattr(choose_cut, "forced", choose)


def tensors(dtype=torch.float64, device="cpu", lead=(N,), bias=True, needs=(True,) * 5):
    """Returns the leaves [hidden, weight, bias, (..., R), (V, R)], and the targets."""
    hidden, weight, b, target = make(dtype, device, bias, lead)
    g = torch.Generator().manual_seed(9)
    pair = [torch.randn(*s, R, generator=g, dtype=torch.float64) for s in (lead, (V,))]
    leaves = (hidden, weight, b, *(t.to(device, dtype) for t in pair))
    pairs = zip(leaves, needs, strict=True)
    return [None if t is None else t.clone().requires_grad_(need) for t, need in pairs], target


def materialised(leaves):
    hidden, weight, bias, second, low = leaves
    return F.linear(hidden, weight, bias) + F.linear(second, low)


def lazily(leaves, **options):
    hidden, weight, bias, *pair = leaves
    return ll.LinearLogits(hidden, weight, bias, low_rank=tuple(pair), **options)


def outcome(loss, z, leaves):
    """Returns the loss and the gradients of all leaves, under a random upstream gradient."""
    value = loss(z)
    g = torch.Generator().manual_seed(3)
    upstream = torch.randn(value.shape, generator=g, dtype=torch.float64).to(value)
    value.backward(upstream)
    return value.detach(), [None if t is None else t.grad for t in leaves]


def assert_as_materialised(loss, **how):
    """`loss` of the logits and the targets has the values and gradients of the sum."""
    (want, target), (got, _) = tensors(**how), tensors(**how)
    want, got = (
        outcome(lambda z: loss(z, target), f(t), t)
        for f, t in ((materialised, want), (lazily, got))
    )
    assert_same(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_as_if_materialised(name, cut, device):
    for reduction in ("mean", "none"):
        loss = functools.partial(LOSSES[name], reduction=reduction)
        for bias, lead in ((True, (N,)), (False, (1, N))):
            assert_as_materialised(loss, device=device, bias=bias, lead=lead)


NEEDS = {
    "lora": (True, False, False, True, True),
    "adapter alone": (False, False, False, True, True),
    "only B": (False, False, False, False, True),
    "only the weight": (False, True, False, False, False),
    "only hidden": (True, False, True, False, False),
}


@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
def test_exactly_what_requires_a_gradient_gets_one(needs, cut, device):
    for reduction in ("sum", "none"):
        loss = functools.partial(ll.cross_entropy, reduction=reduction)
        assert_as_materialised(loss, device=device, needs=needs)


def test_a_frozen_weight_costs_no_gemm(cut, monkeypatch):
    """No GEMM has the size of the weight's gradient."""
    sizes = []
    plain = gemms.plain_gemm
    monkeypatch.setattr(
        gemms, "plain_gemm", lambda a, b, *rest: sizes.append((len(a), b.shape[1])) or
        plain(a, b, *rest),
    )  # fmt: skip
    leaves, target = tensors(needs=NEEDS["lora"])
    D = leaves[1].shape[1]
    ll.cross_entropy(lazily(leaves), target).backward()
    assert not [size for size in sizes if size[0] in (8, V) and size[1] == D]
    assert [size for size in sizes if size[1] == R]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_other_dtypes(dtype, wide, cut, device):
    """The error against fp64 is at most twice the error of the materialised sum."""
    options = {"logits_dtype": torch.float32} if wide and dtype != torch.float32 else {}
    truth, target = tensors(dtype, device)
    truth = [t.detach().double().requires_grad_() for t in truth]
    plain, got = (tensors(dtype, device)[0] for _ in range(2))
    loss = lambda z: ll.cross_entropy(z, target)  # noqa: E731
    exact = outcome(loss, materialised(truth), truth)
    near = outcome(loss, materialised(plain), plain)
    ours = outcome(loss, lazily(got, **options), got)
    for e, p, o in zip(
        (exact[0], *exact[1]), (near[0], *near[1]), (ours[0], *ours[1]), strict=True
    ):
        floor = torch.finfo(dtype).eps * e.abs().max()
        assert (o - e).abs().max() <= 2 * (p - e).abs().max() + floor


def test_a_second_backward_is_right(cut, device):
    leaves, target = tensors(device=device)
    for reduction in ("mean", "none"):
        loss = ll.cross_entropy(lazily(leaves), target, reduction=reduction).sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(3 * loss, leaves)
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(3 * a, b)


@pytest.mark.parametrize("drop_ignored", [True, False])
def test_ignored_rows_may_hold_nan(drop_ignored, cut, device):
    leaves, target = tensors(device=device)
    with torch.no_grad():
        for t in (leaves[0], leaves[3]):
            t[target == -100] = torch.nan
    ll.cross_entropy(lazily(leaves, drop_ignored=drop_ignored), target).backward()
    for t in leaves:
        assert t.grad.isfinite().all()
    assert not leaves[3].grad[target == -100].any()


def test_no_rows_and_all_ignored(cut, device):
    for n, to in ((N, -100), (0, 0)):
        leaves, target = tensors(device=device)
        hidden, weight, bias, second, low = leaves
        z = ll.LinearLogits(hidden[:n], weight, bias, low_rank=(second[:n], low))
        ll.cross_entropy(z, torch.full_like(target[:n], to)).backward()
        for t in leaves:
            assert not t.grad.any()


def test_a_teacher(cut, device):
    teacher = [t.detach() * 1.5 for t in tensors(device=device)[0]]
    for given in (lazily(teacher), materialised(teacher)):
        assert_as_materialised(
            lambda z, _, given=given: ll.kl_div(z, given, direction="reverse"), device=device
        )


def test_statistics_and_topk(cut, device):
    leaves, _ = tensors(device=device)
    with torch.no_grad():
        for a, b in zip(
            ll.row_stats(lazily(leaves), entropy=True, total=True, argmax=True),
            ll.row_stats(materialised(leaves), entropy=True, total=True, argmax=True),
            strict=True,
        ):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)
        got, want = (ll.capture_topk(z, 4) for z in (lazily(leaves), materialised(leaves)))
    torch.testing.assert_close(got.logprobs, want.logprobs)


def test_main_grad(device):
    """Only the gradient of the weight goes to main_grad."""
    (want, target), (got, _) = (tensors(torch.float32, device) for _ in range(2))
    main_grad = torch.ones_like(want[1])
    with choose_cut.override(lambda work: Cut(3)):
        ll.cross_entropy(lazily(got, main_grad=main_grad), target).backward()
    ll.cross_entropy(materialised(want), target).backward()
    assert got[1].grad is None
    torch.testing.assert_close(main_grad - 1, want[1].grad)
    torch.testing.assert_close(got[4].grad, want[4].grad)


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


def test_linear_cross_entropy(device):
    (hidden, weight, bias, *pair), target = tensors(device=device)
    got = ll.linear_cross_entropy(hidden, weight, target, bias=bias, low_rank=tuple(pair))
    torch.testing.assert_close(got, ll.cross_entropy(lazily((hidden, weight, bias, *pair)), target))


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
