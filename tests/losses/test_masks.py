"""One rule for masks and means: a row counts unless its label or its mask says otherwise.

row_loss, token_logprobs and row_stats take the arguments of score.
"""

import pytest
import torch

import logitless as ll
from tests.support.laws import value_and_grad

N, V, D = 6, 13, 5
MASK = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)


def grpo(stats, old):
    return -(stats.logprob - old).exp() + 0.1 * stats.lse


def distance(slots, weight):
    return weight * (slots.teacher - slots.student).square().sum(-1) - slots.student_tail


# Each function of logits, a target and a mask; the results per row come first.
LOSSES = {
    "cross_entropy": lambda x, t, **how: ll.cross_entropy(x, t, label_smoothing=0.1, **how),
    "cross_entropy_and_scores": lambda x, t, **how: ll.cross_entropy_and_scores(x, t, **how)[0],
    "row_loss": lambda x, t, **how: ll.row_loss(
        grpo, x, t, rows=(torch.ones(N).to(x.device),), **how
    ),
    "row_loss without ids": lambda x, t, **how: ll.row_loss(lambda stats: stats.lse, x, **how),
    "topk_distill": lambda x, t, **how: ll.topk_distill(
        x, SPARSE.to(x.device), divergence="jsd", support="tail", **how
    ),
    "topk_distill with labels": lambda x, t, **how: ll.topk_distill(
        x, SPARSE.to(x.device), divergence="jsd", support="tail", labels=t, ce_weight=0.5, **how
    ),
    "topk_distill at ids": lambda x, t, **how: ll.topk_distill(
        x, SPARSE.to(x.device), divergence="forward_kl", support="renorm", **how
    ),
    "slot_loss": lambda x, t, **how: ll.slot_loss(
        distance, x, SPARSE.to(x.device), rows=(torch.ones(N).to(x.device),), **how
    ),
    "slot_loss with labels": lambda x, t, **how: ll.slot_loss(
        distance, x, SPARSE.to(x.device), rows=(torch.ones(N).to(x.device),), labels=t, **how
    ),
    "kl_div": lambda x, t, **how: ll.kl_div(x, DENSE.to(x.device), direction="forward", **how),
    "jsd": lambda x, t, **how: ll.jsd(x, DENSE.to(x.device), **how),
    "tvd": lambda x, t, **how: ll.tvd(x, DENSE.to(x.device), **how),
    "soft_cross_entropy": lambda x, t, **how: ll.soft_cross_entropy(
        x, DENSE.softmax(-1).to(x.device), **how
    ),
}
PER_ROW = {
    "token_logprobs": lambda x, t, **how: ll.token_logprobs(x, t, **how),
    "token_logprobs of K ids": lambda x, t, **how: ll.token_logprobs(
        x, torch.stack([t, t.clamp(max=3)], -1), **how
    ).sum(-1),
    "score": lambda x, t, **how: sum(ll.score(x, t, **how)[:3]),
    "kept_scores": lambda x, t, **how: sum(ll.kept_scores(x, t, KEPT.to(x.device), **how)[:2]),
    "kept_scores, mass": lambda x, t, **how: sum(
        ll.kept_scores(x, t, KEPT.to(x.device), mass=True, **how)
    ),
    "row_stats": lambda x, t, **how: ll.row_stats(x, t, entropy=True, **how).logprob,
    "row_stats of K ids": lambda x, t, **how: ll.row_stats(
        x, torch.stack([t, t.clamp(max=3)], -1), **how
    ).picked.sum(-1),
    "row_stats without ids": lambda x, t, **how: ll.row_stats(x, total=True, **how).total,
    "logsumexp": lambda x, t, **how: ll.logsumexp(x, **how),
    "entropy": lambda x, t, **how: ll.entropy(x, **how),
}
torch.manual_seed(0)
KEPT = torch.arange(V).expand(N, V)  # every target is kept
SPARSE, DENSE = ll.capture_topk(torch.randn(N, V), 3), torch.randn(N, V)


def make(device):
    x = torch.randn(N, V, device=device)
    return x, torch.randint(0, V, (N,), device=device), MASK.to(device)


@pytest.mark.parametrize("name", [*LOSSES, *PER_ROW])
def test_a_mask_leaves_rows_out(name, impl, device):
    """The other rows are as without a mask, and masked rows are not even read."""
    x, target, mask = make(device)
    per_row = PER_ROW.get(name) or (lambda x, t, **how: LOSSES[name](x, t, reduction="none", **how))
    upstream = torch.randn(N, device=device)
    want, d_want = value_and_grad(lambda x: per_row(x, target), x, upstream)
    x[~mask] = torch.nan
    for given in (mask, mask.int()):
        got, d_got = value_and_grad(lambda x, m=given: per_row(x, target, mask=m), x, upstream)
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

    want, d_want = value_and_grad(
        lambda h: mean(h, reduction="none")[mask].mean(), h, torch.ones((), device=device)
    )
    got, d_got = value_and_grad(lambda h: mean(h, mask=mask), h, torch.ones((), device=device))
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


@pytest.mark.parametrize(
    "name", ["cross_entropy", "row_loss", "token_logprobs of K ids", "kept_scores"]
)
def test_compiled(name, impl, device):
    x, target, mask = make(device)
    function = LOSSES.get(name) or PER_ROW[name]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, m: function(x, target, mask=m), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(x, mask), function(x, target, mask=mask))


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


def test_bad_masks_are_refused():
    x, target, mask = make("cpu")
    for function in (
        ll.cross_entropy, ll.cross_entropy_and_scores, ll.score, ll.token_logprobs, ll.row_stats
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"mask must have shape"):
            function(x, target, mask=mask[:3])
        with pytest.raises(TypeError, match="mask must"):
            function(x, target, mask=mask.tolist())


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
