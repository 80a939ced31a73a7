"""Laws of every function of logits: masks and means, shapes, sources, backward, torch.compile.

row_loss, token_logprobs and row_stats take the arguments of score. A row counts unless its label or
its mask says otherwise.
"""

import contextlib
from collections.abc import Callable

import pytest
import torch

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from tests.support.laws import ROUNDING, error, value_and_grad
from tests.support.sources import SOURCES

N, V, D = 6, 13, 5
MASK = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
torch.manual_seed(0)
KEPT = torch.randint(-1, V, (N, 4))  # beside the target; -1 is an empty slot
SPARSE, DENSE, OLD = ll.capture_topk(torch.randn(N, V), 3), torch.randn(N, V), torch.ones(N)


def grpo(stats, old):
    return -(stats.logprob - old).exp() + 0.1 * stats.lse


def distance(slots, weight):
    return weight * (slots.teacher - slots.student).square().sum(-1) - slots.student_tail


def beside(t, x):
    """The first rows of t, in the shape of the rows of x."""
    lead = x.shape[:-1]
    t = t[: lead.numel()].to(x.device)
    if isinstance(t, ll.SparseTargets):
        return t.reshape(*lead)
    return t.reshape(lead + t.shape[1:])


def kept(x, t):
    return torch.cat([t.clamp(min=0).unsqueeze(-1), beside(KEPT, x)], -1)


def distill(divergence, support, **options):
    options |= {"divergence": divergence, "support": support}
    return lambda x, t, **how: ll.topk_distill(x, beside(SPARSE, x), **options, **how)


def dense(function, **options):
    return lambda x, t, **how: function(x, beside(DENSE, x), **options, **how)


# Each function of logits, a target and a mask; the results per row come first.
LOSSES: dict[str, Callable] = {
    "cross_entropy": lambda x, t, **how: ll.cross_entropy(x, t, label_smoothing=0.1, **how),
    "cross_entropy_and_scores": lambda x, t, **how: ll.cross_entropy_and_scores(x, t, **how)[0],
    "row_loss": lambda x, t, **how: ll.row_loss(grpo, x, t, rows=(beside(OLD, x),), **how),
    "row_loss without ids": lambda x, t, **how: ll.row_loss(lambda stats: stats.lse, x, **how),
    "topk_distill": distill("jsd", "tail", t_squared=True),
    "topk_distill with labels": lambda x, t, **how: distill("jsd", "tail")(
        x, t, labels=t, ce_weight=0.5, **how
    ),
    "topk_distill at ids": distill("forward_kl", "renorm"),
    "topk_distill, a renormalised teacher": distill("reverse_kl", "renorm_teacher"),
    "topk_distill, truncated": distill("tvd", "truncate"),
    "slot_loss": lambda x, t, **how: ll.slot_loss(
        distance, x, beside(SPARSE, x), rows=(beside(OLD, x),), **how
    ),
    "slot_loss with labels": lambda x, t, **how: ll.slot_loss(
        distance, x, beside(SPARSE, x), rows=(beside(OLD, x),), labels=t, **how
    ),
    "kl_div": dense(ll.kl_div, direction="forward", t_squared=True),
    "kl_div, reverse": dense(ll.kl_div, direction="reverse"),
    "kl_div, skewed": dense(ll.kl_div, direction="forward", skew=0.1),
    "kl_div, skewed reverse": dense(ll.kl_div, direction="reverse", skew=0.1),
    "jsd": dense(ll.jsd, t_squared=True),
    "tvd": dense(ll.tvd),
    "soft_cross_entropy": lambda x, t, **how: ll.soft_cross_entropy(
        x, beside(DENSE.softmax(-1), x), **how
    ),
}
PER_ROW: dict[str, Callable] = {
    "token_logprobs": lambda x, t, **how: ll.token_logprobs(x, t, **how),
    "token_logprobs of K ids": lambda x, t, **how: ll.token_logprobs(
        x, torch.stack([t, t.clamp(max=3)], -1), **how
    ).sum(-1),
    "score": lambda x, t, **how: sum(ll.score(x, t, **how)[:3]),
    "kept_scores": lambda x, t, **how: sum(ll.kept_scores(x, t, kept(x, t), **how)[:2]),
    "kept_scores, mass": lambda x, t, **how: sum(
        t for t in ll.kept_scores(x, t, kept(x, t), mass=True, **how) if t is not None
    ),
    "row_stats": lambda x, t, **how: ll.row_stats(x, t, entropy=True, **how).logprob,
    "row_stats of K ids": lambda x, t, **how: ll.row_stats(
        x, torch.stack([t, t.clamp(max=3)], -1), **how
    ).picked.sum(-1),
    "row_stats without ids": lambda x, t, **how: ll.row_stats(x, total=True, **how).total,
    "logsumexp": lambda x, t, **how: ll.logsumexp(x, **how),
    "entropy": lambda x, t, **how: ll.entropy(x, **how),
}
every_function = pytest.mark.parametrize("name", [*LOSSES, *PER_ROW])


def per_row(name):
    """The function, with one result per row."""
    return PER_ROW.get(name) or (lambda x, t, **how: LOSSES[name](x, t, reduction="none", **how))


def make(device):
    x = torch.randn(N, V, device=device)
    return x, torch.randint(0, V, (N,), device=device), MASK.to(device)


@every_function
def test_a_mask_leaves_rows_out(name, impl, device):
    """The other rows are as without a mask, and masked rows are not even read."""
    x, target, mask = make(device)
    function, upstream = per_row(name), torch.randn(N, device=device)
    want, d_want = value_and_grad(lambda x: function(x, target), x, upstream)
    x[~mask] = torch.nan
    for given in (mask, mask.int()):
        got, d_got = value_and_grad(lambda x, m=given: function(x, target, mask=m), x, upstream)
        torch.testing.assert_close(got, torch.where(mask, want, 0.0))
        torch.testing.assert_close(d_got, torch.where(mask[:, None], d_want, 0.0))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("head", [False, True], ids=["logits", "head"])
def test_a_mean_divides_by_the_rows_that_count(name, head, impl, device):
    _, target, mask = make(device)
    weight = torch.randn(V, D, device=device)
    h = torch.randn(N, D, device=device)

    def mean(h, **how):
        logits = ll.LinearLogits(h, weight) if head else h @ weight.T
        return LOSSES[name](logits, target, **how)

    want, d_want = value_and_grad(lambda h: mean(h, reduction="none")[mask].mean(), h)
    got, d_got = value_and_grad(lambda h: mean(h, mask=mask), h)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(d_got, d_want)


LABELLED = [
    "cross_entropy", "cross_entropy_and_scores", "row_loss", "topk_distill with labels",
    "slot_loss with labels", "token_logprobs", "score", "kept_scores",
]  # fmt: skip


@pytest.mark.parametrize("name", [*LABELLED, "token_logprobs of K ids", "row_stats"])
def test_ignore_index_is_minus_100_wherever_there_are_labels(name, impl, device):
    x, target, mask = make(device)
    function = LOSSES.get(name) or PER_ROW[name]
    want = function(x, target, mask=mask)
    ignored = torch.where(mask, target, -100)
    torch.testing.assert_close(function(x, ignored), want)
    torch.testing.assert_close(function(x, torch.where(mask, target, -7), ignore_index=-7), want)
    some = mask.clone()
    some[0] = False  # a row is ignored by its label or by its mask
    torch.testing.assert_close(function(x, ignored, mask=some), function(x, target, mask=some))


CUTS = {
    "head on chip": lambda work: Cut(work.rows, on_chip=work.merges and work.narrow),
    "head in blocks": lambda work: Cut(3, 16) if work.merges else Cut(3),
}


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@every_function
@pytest.mark.parametrize("source", [*SOURCES, "small head", *CUTS])
def test_sources(source, name, device, monkeypatch):
    """Over every source of logits, and every cut of a head, as over a tensor of logits."""
    if source == "small head":
        monkeypatch.setattr(choose_cut, "is_small", lambda *_: True)
    h, w = (torch.randn(n, D, device=device, requires_grad=True) for n in (N, V))
    _, target, mask = make(device)
    how = {"mask": mask, "softcap": 6.0, "temperature": torch.linspace(0.5, 2, N, device=device)}
    tensor = h @ w.T * (0.5 if "scaled" in source else 1)
    for function in (per_row(name), LOSSES.get(name)):
        if function is None:
            continue
        want = function(tensor, target, **how)
        upstream = torch.randn_like(want)
        d_want = torch.autograd.grad(want, (h, w), upstream, retain_graph=True)
        with contextlib.ExitStack() as stack:
            if source in CUTS:
                stack.enter_context(choose_cut.override(CUTS[source]))
                stack.enter_context(ll.impl("triton"))
            got = function(SOURCES.get(source, ll.LinearLogits)(h, w), target, **how)
            d_got = torch.autograd.grad(got, (h, w), upstream)
        for a, b in zip((got, *d_got), (want, *d_want), strict=True):
            assert error(a.detach(), b.detach()) < 2 * ROUNDING


@every_function
@pytest.mark.parametrize("head", [False, True], ids=["logits", "head"])
@pytest.mark.few(5)
def test_compiled(name, head, device):
    """As one graph, with the mask as an argument."""
    _, target, mask = make(device)
    h, w = torch.randn(N, D, device=device), torch.randn(V, D, device=device)
    function, one = LOSSES.get(name) or PER_ROW[name], torch.ones((), device=device)

    def total(h, mask):
        logits = ll.LinearLogits(h, w) if head else h @ w.T
        return function(logits, target, mask=mask).sum()

    torch._dynamo.reset()
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    got, want = (value_and_grad(lambda h, f=f: f(h, mask), h, one) for f in (compiled, total))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@every_function
def test_leading_dimensions_and_strides(name, impl, device):
    x, target, mask = make(device)
    function, upstream = per_row(name), torch.randn(N, device=device)
    want, d_want = value_and_grad(lambda x: function(x, target, mask=mask), x, upstream)
    wide = torch.randn(2, 4, V + 2, device=device)
    wide[:, :3, 1:-1] = x.view(2, 3, V)
    target, mask = target.view(2, 3), mask.view(2, 3)
    got, d_got = value_and_grad(
        lambda w: function(w[:, :3, 1:-1], target, mask=mask), wide, upstream
    )
    torch.testing.assert_close(got, want.view(2, 3))
    torch.testing.assert_close(d_got[:, :3, 1:-1], d_want.view(2, 3, V))
    one = function(x[0], target[0, 0])
    assert one.shape == ()
    torch.testing.assert_close(one, want[0])


@every_function
def test_no_row_counts(name, impl, device):
    """Of no rows, or of ignored rows, which may be NaN, result and gradient are 0."""
    nothing = {"mask": torch.zeros(N, device=device)}
    for shape, how in (((0,), {}), ((2, 0), {}), ((N,), nothing), ((N,), {"ignore_index": 0})):
        if "ignore_index" in how and name not in LABELLED:
            continue
        leaf = torch.full((*shape, V), torch.nan, device=device, requires_grad=True)
        ids = torch.zeros(shape, dtype=torch.int64, device=device)
        for function in (per_row(name), LOSSES.get(name) or PER_ROW[name]):
            result = function(leaf, ids, **how)
            assert result.shape in (shape, ())
            assert not result.any()
            (d,) = torch.autograd.grad(result.sum(), leaf)
            assert torch.equal(d, torch.zeros_like(leaf))


@every_function
def test_one_temperature_as_a_tensor(name, impl, device):
    """Of no dimensions, or narrow: 1.0078125² has 15 bits, of which bf16 keeps 8."""
    x, target, _ = make(device)
    t = torch.tensor(1.0078125, dtype=torch.bfloat16, device=device)
    want = per_row(name)(x, target, temperature=1.0078125)
    for one in (t, t.expand(N)):
        torch.testing.assert_close(per_row(name)(x, target, temperature=one), want)


@every_function
def test_a_second_backward_and_results_that_are_written_to(name, impl, device):
    x, target, _ = make(device)
    leaf = x.clone().requires_grad_()
    loss = LOSSES[name](leaf, target) if name in LOSSES else per_row(name)(leaf, target).sum()
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    teacher = DENSE.clone()
    per_row(name)(leaf, target).mul_(2).sum().backward()
    assert torch.equal(leaf, x)
    assert torch.equal(DENSE, teacher)


def test_a_row_weight_multiplies_and_never_divides():
    x, target, mask = make("cpu")
    weight = torch.rand(N)
    rows = ll.cross_entropy(x, target, reduction="none")
    got = ll.cross_entropy(x, target, row_weight=weight, mask=mask)
    torch.testing.assert_close(got, (rows * weight)[mask].sum() / mask.sum())
    with pytest.raises(
        TypeError,
        match=r"row_weight must hold numbers that multiply the losses, got torch.bool.*`mask`",
    ):
        ll.cross_entropy(x, target, row_weight=mask)


def test_a_formula_without_a_gradient_is_refused():
    x, target, _ = make("cpu")
    x.requires_grad_()
    for formula in (
        lambda stats: stats.logprob.detach(),
        lambda stats: torch.from_numpy(stats.logprob.detach().numpy()),
        lambda stats: stats.logprob.long(),
    ):
        with pytest.raises(RuntimeError, match="numbers that have a gradient"):
            ll.row_loss(formula, x, target)
        with torch.no_grad():
            ll.row_loss(formula, x, target)
    with pytest.raises(TypeError, match=r"must return real numbers, got torch.complex64"):
        ll.row_loss(lambda stats: stats.logprob * 1j, x, target)


def test_a_statistic_that_was_not_requested_is_named():
    x, target, _ = make("cpu")
    with pytest.raises(TypeError, match=r"stats.entropy \(pass entropy=True to row_loss\)"):
        ll.row_loss(lambda stats: 0.1 * stats.entropy, x, target)
    with pytest.raises(TypeError, match=r"stats.entropy \(pass entropy=True to row_loss\)"):
        ll.row_loss(lambda stats: stats.entropy.float(), x, target)
    with pytest.raises(TypeError, match=r"stats.logprob \(pass ids to row_loss\)"):
        ll.row_loss(lambda stats: stats.logprob, x)
