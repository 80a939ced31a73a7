"""Sparse teachers: every divergence, support and option against the fp64 definitions."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from covering import pairwise
from laws import assert_as_good_as_torch, error, value_and_grad

import logitless as ll
from logitless.contract import COEFFICIENTS, STATE
from logitless.core import loss as _loss
from logitless.kernels import config

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
SUPPORTS = ("truncate", "renorm_teacher", "renorm", "tail")
MATRIX = [(divergence, support) for divergence in DIVERGENCES for support in SUPPORTS]
KINDS = {d: {"divergence": d} for d in DIVERGENCES} | {
    f"jsd {beta}": {"divergence": "jsd", "beta": beta} for beta in (0.0, 0.3, 1.0)
}
CELLS = {
    f"{kind}-{support}": how | {"support": support}
    for kind, how in KINDS.items()
    for support in SUPPORTS
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
V, K, ROWS = 53, 5, 4


def make(
    dtype=torch.float64, device="cpu", rows=ROWS, vocab=V, k=K, repeated=False, scale=2.0,
    teacher=torch.float32,
):  # fmt: skip
    """Logits, and a teacher of its own that covers most of its mass."""
    g = torch.Generator().manual_seed(3)
    x = (torch.randn(rows, vocab, generator=g, dtype=torch.float64) * scale).to(dtype)
    log_p = torch.log_softmax(torch.randn(rows, vocab, generator=g) * scale, -1)
    logprobs, ids = log_p.topk(k)
    logprobs = logprobs.to(teacher)
    if repeated:
        ids[:, -1] = ids[:, 0]
    tail = torch.log1p(-logprobs.double().exp().sum(-1).clamp(max=1 - 1e-6)).float()
    return x.to(device), ll.SparseTargets(*(t.to(device) for t in (ids, logprobs, tail)))


def masked(targets, kind):
    """The targets with some slots masked: "partial", a "full" row, or "poison" in masked slots."""
    if kind == "none":
        return targets
    mask = torch.ones_like(targets.ids).bool()
    mask[1, 2:] = False
    ids, logprobs = targets.ids.clone(), targets.logprobs.clone()
    if kind == "full":
        mask[2] = False
    if kind == "poison":
        logprobs[1, 2:], ids[1, 2:] = torch.tensor([-torch.inf, torch.inf, torch.nan]), -7
    return ll.SparseTargets(ids, logprobs, targets.tail, mask)


def mix(rows=ROWS, device="cpu"):
    labels = torch.arange(rows, device=device) % V
    labels[0] = -100
    return {"labels": labels, "ce_weight": 0.3, "kd_weight": 0.7}


def both(x, targets, **how):
    """Value and gradient of a scalar loss: ours, and by the definitions in fp64."""
    upstream = torch.ones((), device=x.device)
    return (
        value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, upstream),
        value_and_grad(lambda x: oracle.topk_distill(x, targets, **how), x.double(), upstream),
    )


def told(targets, tail):
    """The targets, with the mass outside them or without."""
    return targets if tail else ll.SparseTargets(targets.ids, targets.logprobs, None, targets.mask)


class TestMatrix:
    """Every divergence by every support: fp64 finite differences, and by the definitions."""

    @pairwise(
        cell=CELLS,
        mask=["none", "partial", "full", "poison"],
        temperature=[1.0, 2.5],
        ce=[False, True],
        tail=[True, False],
        rest={
            "mean": {"reduction": "mean", "repeated": False},
            "sum": {"reduction": "sum", "repeated": True},
            "none": {"reduction": "none", "repeated": True},
        },
    )
    def test_gradcheck(self, cell, mask, temperature, ce, tail, rest):
        repeated = rest["repeated"]
        x, targets = make(rows=3, vocab=8, repeated=repeated)
        targets = told(masked(targets, mask), tail)
        how = cell | {
            "temperature": temperature, "t_squared": repeated, "reduction": rest["reduction"],
            **(mix(3) if ce else {}),
        }  # fmt: skip

        def f(x):
            return ll.topk_distill(x, targets, **how)

        want = oracle.topk_distill(x, targets, **how)
        torch.testing.assert_close(f(x), want, rtol=1e-6, atol=1e-9)
        assert torch.autograd.gradcheck(f, x.requires_grad_(), atol=1e-6)

    @pairwise(
        cell=CELLS,
        mask=["none", "full", "poison"],
        temperature=[1.0, 2.5],
        ce=[False, True],
        tail=[True, False],
        repeated=[False, True],
        dtype=DTYPES,
        teacher=DTYPES,
    )
    @pytest.mark.usefixtures("small_blocks")
    def test_definitions(self, cell, mask, temperature, ce, tail, repeated, dtype, teacher, device):
        x, targets = make(dtype, device, repeated=repeated, teacher=teacher)
        targets = told(masked(targets, mask), tail)
        how = cell | {
            "temperature": temperature, "t_squared": True, "reduction": "none",
            **(mix(device=device) if ce else {}),
        }  # fmt: skip
        assert_as_good_as_torch(
            lambda x: ll.topk_distill(x, targets, **how),
            lambda x: oracle.topk_distill(x, targets, **how),
            x,
            computed_in=torch.float32,
        )


OPTIONS = {
    "softcap": {"softcap": 3.0, "temperature": 2.0},
    "row_weight": {"row_weight": torch.linspace(0.5, 2, ROWS), "reduction": "sum"},
    "row temperature": {"temperature": torch.linspace(0.5, 2, ROWS), "t_squared": True},
    "labels": {"labels": torch.tensor([3, -100, 4, 5])},
    "int32": {},
    "one id": {"k": 1},
    "every id": {"k": V},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, dtype, impl, device):
    how = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[name].items()}
    x, targets = make(dtype, device, k=how.pop("k", K))
    if name == "int32":
        targets = ll.SparseTargets(targets.ids.int(), targets.logprobs, targets.tail)
    with config.override(block_v=16):
        got, want = both(x, targets, **{"divergence": "jsd", "support": "tail", **how})
    assert got[0].dtype == torch.float32
    assert got[1].dtype == dtype
    assert error(got[0], want[0]) < 1e-4
    assert error(got[1], want[1]) < 2e-5 + torch.finfo(dtype).eps


class TestLaws:
    how = pytest.mark.parametrize(("divergence", "support"), MATRIX)

    @how
    def test_halves_add_up(self, divergence, support, impl, device):
        x, targets = make(torch.float32, device)
        how = {"divergence": divergence, "support": support, "reduction": "sum", "temperature": 2.0}
        whole = ll.topk_distill(x, targets, **how)
        halves = sum(ll.topk_distill(x[s], targets[s], **how) for s in (slice(0, 1), slice(1, 4)))
        torch.testing.assert_close(halves, whole)

    @how
    def test_all_ids_are_the_dense_form(self, divergence, support, impl, device):
        x, targets = make(torch.float32, device, k=V)
        targets = ll.SparseTargets(targets.ids, targets.logprobs)
        teacher = torch.zeros_like(x).scatter(-1, targets.ids, targets.logprobs)
        got = value_and_grad(
            lambda x: ll.topk_distill(x, targets, divergence=divergence, support=support),
            x, torch.ones((), device=device),
        )  # fmt: skip

        def dense(x):
            return oracle.divergence(teacher.double(), x.log_softmax(-1), divergence).mean()

        want = value_and_grad(dense, x.double(), torch.ones((), device=device))
        assert error(got[0], want[0]) < 1e-5
        assert error(got[1], want[1]) < 1e-5

    @pytest.mark.parametrize("support", SUPPORTS)
    def test_one_certain_id_is_cross_entropy(self, support, impl, device):
        x, _ = make(torch.float32, device)
        ids = torch.tensor([[3], [7], [0], [52]], device=device)
        targets = ll.SparseTargets(ids, torch.zeros(ROWS, 1, device=device))
        got = value_and_grad(
            lambda x: ll.topk_distill(x, targets, divergence="forward_kl", support=support),
            x, torch.ones((), device=device),
        )  # fmt: skip
        want = value_and_grad(
            lambda x: F.cross_entropy(x, ids[:, 0]), x, torch.ones((), device=device)
        )
        if support == "renorm":
            want = torch.zeros_like(want[0]), torch.zeros_like(x)
        torch.testing.assert_close(got, want)

    @how
    def test_the_teacher_itself_is_at_zero(self, divergence, support, impl, device):
        x, _ = make(torch.float32, device)
        with ll.impl("eager"):
            targets = ll.capture_topk(x, K)
        loss, grad = value_and_grad(
            lambda x: ll.topk_distill(x, targets, divergence=divergence, support=support),
            x, torch.ones((), device=device),
        )  # fmt: skip
        if support != "renorm_teacher":
            assert loss.abs() < 1e-6
        if support in ("renorm", "tail") and divergence != "tvd":  # which has a kink there
            assert grad.abs().max() < 1e-6

    def test_gathered_is_what_renorm_is_for_a_whole_teacher(self, impl, device):
        x, targets = make(torch.float32, device)
        logprobs = torch.log_softmax(targets.logprobs, -1)
        got = ll.gathered_kl(x.gather(-1, targets.ids), logprobs)
        want = ll.topk_distill(
            x, targets, divergence="forward_kl", support="renorm", reduction="sum"
        )
        torch.testing.assert_close(got, want)


class TestTail:
    """The student's mass outside the ids is summed for itself, not left over."""

    @pytest.mark.parametrize("true", [0.5, 1e-3, 1e-6, 1e-12, 1e-30])
    def test_without_cancellation(self, true, impl, device):
        """All of the teacher's mass is outside: the loss is -log of the student's mass there."""
        x = torch.full((3, 200), 0.0, device=device)
        x[:, ::40] = torch.tensor(195 * (1 - true) / true / 5).log().item()
        x += torch.tensor([[0.0], [1e3], [-1e3]], device=device)
        ids = torch.arange(0, 200, 40, device=device).flip(0).expand(3, 5)
        nothing = torch.full((3, 5), -torch.inf, device=device)
        targets = ll.SparseTargets(ids, nothing, torch.zeros(3, device=device))
        with config.override(block_v=64):
            loss = ll.topk_distill(
                x, targets, divergence="forward_kl", support="tail", reduction="none"
            )
        want = -oracle.log_mass_outside(
            x[0].double().log_softmax(-1), ids[0], torch.ones_like(ids[0]).bool()
        )
        # Of the offset rows, what fp32 logits can say.
        torch.testing.assert_close(loss[0].double(), want, rtol=1e-4, atol=1e-4)
        assert loss.isfinite().all()

    def test_gradient_of_a_small_tail(self, impl, device):
        x = torch.zeros(2, 100, device=device)
        x[:, 7], x[:, 60] = 17.0, 16.0
        ids = torch.tensor([[60, 7, 60]] * 2, device=device)
        logp = torch.tensor([[0.2, 0.6, 0.1]] * 2, device=device).log()
        targets = ll.SparseTargets(ids, logp, torch.full((2,), 0.1, device=device).log())
        how = {"divergence": "forward_kl", "support": "tail", "reduction": "sum"}
        got, want = both(x, targets, **how)
        assert error(got[0], want[0]) < 1e-5
        assert error(got[1], want[1]) < 1e-5

    def test_many_ids(self, impl, device):
        """More than are sorted in the kernel."""
        x, targets = make(torch.float32, device, rows=1, vocab=2000, k=1500)
        how = {"divergence": "reverse_kl", "support": "tail"}
        got, want = both(x, targets, **how)
        assert error(got[1], want[1]) < 2e-5


class TestBugs:
    """13 to 18 of the bugs that users of others met."""

    def test_bug_13_t_squared_reaches_the_gradient(self, impl, device):
        x, targets = make(torch.float32, device)
        up = torch.ones((), device=device)
        how = {"divergence": "forward_kl", "support": "truncate", "temperature": 2.0}
        a = value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, up)
        b = value_and_grad(lambda x: ll.topk_distill(x, targets, t_squared=True, **how), x, up)
        torch.testing.assert_close(b, (4 * a[0], 4 * a[1]))

    def test_bug_13_a_truncated_teacher_weighs_the_softmax_by_its_mass(self, impl, device):
        x, targets = make(torch.float32, device)
        _, grad = value_and_grad(
            lambda x: ll.topk_distill(x, targets, divergence="forward_kl", support="truncate",
                                      reduction="sum"), x, torch.ones((), device=device),
        )  # fmt: skip
        p = targets.logprobs.exp()
        want = torch.softmax(x, -1) * p.sum(-1, keepdim=True)
        torch.testing.assert_close(grad, want.scatter_add(-1, targets.ids, -p))

    def test_bug_14_fully_masked(self, impl, device):
        x, targets = make(torch.float32, device)
        none = torch.zeros_like(targets.ids)
        bad = torch.full_like(targets.logprobs, -torch.inf)
        for divergence, support in MATRIX:
            leaf = x.clone().requires_grad_()
            loss = ll.topk_distill(
                leaf, ll.SparseTargets(targets.ids * 0 - 5, bad, None, none),
                divergence=divergence, support=support,
            )  # fmt: skip
            loss.backward()
            assert loss == 0
            assert not leaf.grad.any()

    def test_bug_15_the_mean_is_over_rows(self, impl, device):
        x, targets = make(torch.float32, device)
        how = {"divergence": "forward_kl", "support": "tail"}
        rows = ll.topk_distill(x, targets, reduction="none", **how)
        torch.testing.assert_close(ll.topk_distill(x, targets, **how), rows.mean())
        rows = ll.gathered_kl(x.gather(-1, targets.ids), targets.logprobs, reduction="none")
        mean = ll.gathered_kl(x.gather(-1, targets.ids), targets.logprobs, reduction="mean")
        torch.testing.assert_close(mean, rows.mean())

    def test_bug_16_repeated_ids_add_up(self, impl, device):
        x, _ = make(torch.float32, device)
        logp = torch.tensor([[0.25, 0.25, 0.5]] * ROWS, device=device).log()
        ids = torch.tensor([[4, 4, 9]] * ROWS, device=device)
        for support in ("truncate", "renorm"):
            how = {"divergence": "forward_kl", "support": support, "reduction": "sum"}
            got, want = both(x, ll.SparseTargets(ids, logp), **how)
            assert error(got[0], want[0]) < 1e-5
            assert error(got[1], want[1]) < 1e-5

    def test_bug_17_jsd_with_minus_inf_and_equal_rows(self, impl, device):
        x, _ = make(torch.float32, device)
        x[:, 3] = -torch.inf
        targets = ll.capture_topk(x, K)
        loss = ll.topk_distill(x.bfloat16(), targets, divergence="jsd", support="tail",
                               reduction="none")  # fmt: skip
        assert loss.isfinite().all()
        assert (loss >= 0).all()

    def test_bug_18_a_teacher_of_more_than_all_mass(self, impl, device):
        x, targets = make(torch.float32, device)
        logp = torch.log_softmax(targets.logprobs, -1) + 1e-3
        loss = ll.topk_distill(x, ll.SparseTargets(targets.ids, logp), divergence="forward_kl",
                               support="tail")  # fmt: skip
        assert loss.isfinite()


class TestBadInput:
    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ({"divergence": "kl"}, "divergence must be one of 'forward_kl'"),
            ({"support": "top"}, "support must be one of 'truncate'"),
            ({"ce_weight": 0.5}, "ce_weight must be 0 without labels"),
            ({"kd_weight": float("inf")}, r"kd_weight must be in \[-1e\+12, 1e\+12\], got inf"),
            ({"beta": 2.0}, r"beta must be in \[0, 1\]"),
            ({"temperature": 0.0}, "temperature must be"),
            ({"reduction": "avg"}, "reduction must be one of"),
            ({"labels": torch.zeros(3).long()}, "labels must have shape"),
        ],
    )
    def test_named(self, how, message):
        x, targets = make(torch.float32)
        with pytest.raises((TypeError, ValueError), match=message):
            ll.topk_distill(x, targets, **{"divergence": "jsd", "support": "tail", **how})
        with pytest.raises(TypeError, match="divergence"):
            ll.topk_distill(x, targets, support="tail")

    def test_of_a_capture(self):
        x, _ = make(torch.float32)
        with pytest.raises(ValueError, match=r"k must be in \[1, 53\], got 54"):
            ll.capture_topk(x, 54)
        with pytest.raises(TypeError, match="temperature must be a number here, got a Tensor"):
            ll.capture_topk(x, 5, temperature=torch.ones(4))

    @pytest.mark.parametrize("support", SUPPORTS)
    def test_ids_out_of_range(self, support, impl, device):
        x, targets = make(torch.float32, device)
        ids = targets.ids.clone()
        ids[1, 2] = V
        bad = ll.SparseTargets(ids, targets.logprobs, targets.tail)
        how = {"divergence": "forward_kl", "support": support, "reduction": "none"}
        if device == "cpu":
            with pytest.raises(IndexError, match=r"targets.ids must be in \[0, 53\), got 53"):
                ll.topk_distill(x, bad, **how)
            return
        leaf = x.clone().requires_grad_()
        loss = ll.topk_distill(leaf, bad, **how)
        loss.sum().backward()
        assert loss.isnan().tolist() == [False, True, False, False]
        assert leaf.grad.isnan().all(-1).tolist() == [False, True, False, False]
        assert leaf.grad[[0, 2, 3]].isfinite().all()

    def test_rows_that_do_not_match(self):
        x, targets = make(torch.float32)
        with pytest.raises(ValueError, match="targets must have rows"):
            ll.topk_distill(x[:3], targets, divergence="jsd", support="tail")
        with pytest.raises(TypeError, match="targets must be SparseTargets"):
            ll.topk_distill(x, targets.ids, divergence="jsd", support="tail")


def test_leading_dimensions_and_strides(impl, device):
    x, targets = make(torch.float32, device)
    wide = torch.randn(2, 3, V, device=device)
    wide[:, :2] = x.view(2, 2, V)
    shaped = ll.SparseTargets(
        *(t.view(2, 2, *t.shape[1:]) for t in (targets.ids, targets.logprobs))
    )
    for support in SUPPORTS:
        how = {"divergence": "forward_kl", "support": support}
        flat = ll.SparseTargets(targets.ids, targets.logprobs)
        up = torch.ones((), device=device)
        want = value_and_grad(lambda x: ll.topk_distill(x, flat, **how), x, up)  # noqa: B023
        got = value_and_grad(lambda w: ll.topk_distill(w[:, :2], shaped, **how), wide, up)  # noqa: B023
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1][:, :2].reshape(4, V), want[1])
        assert not got[1][:, 2].any()
        one = ll.topk_distill(x[1], flat[1], reduction="none", **how)
        assert one.shape == ()
        torch.testing.assert_close(one, ll.topk_distill(x[1:2], flat[1:2], **how))


def test_no_rows(impl, device):
    x, targets = make(torch.float32, device)
    for support in SUPPORTS:
        leaf = x[:0].clone().requires_grad_()
        loss = ll.topk_distill(leaf, targets[:0], divergence="jsd", support=support)
        loss.backward()
        assert loss == 0
        assert leaf.grad.shape == (0, V)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("ce", [False, True])
def test_compiles_whole(support, ce, impl, device):
    x, targets = make(torch.float32, device)
    how = {"divergence": "jsd", "support": support, "temperature": 2.0}
    how |= mix(device=device) if ce else {}

    def f(x, ids, logprobs, tail):
        return ll.topk_distill(x, ll.SparseTargets(ids, logprobs, tail), **how)

    given = (targets.ids, targets.logprobs, targets.tail)
    up = torch.ones((), device=device)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        value_and_grad(lambda x: compiled(x, *given), x, up),
        value_and_grad(lambda x: f(x, *given), x, up),
    )


def test_a_retained_graph_and_a_second_differentiation(impl, device):
    x, targets = make(torch.float32, device)
    for support in SUPPORTS:
        leaf = x.clone().requires_grad_()
        loss = ll.topk_distill(leaf, targets, divergence="jsd", support=support)
        (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        (again,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        assert torch.equal(first, again)
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            grad.square().sum().backward()


class TestGathered:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("mask", [None, "bool", "float"])
    def test_against_the_definition(self, dtype, mask, impl, device):
        g = torch.Generator().manual_seed(1)
        z = torch.randn(2, 3, 7, generator=g).to(device, dtype)
        logp = torch.log_softmax(torch.randn(2, 3, 9, generator=g), -1)[..., :7].to(device)
        keep = torch.rand(2, 3, 7, generator=g).to(device) > 0.4
        keep[0, 0] = False
        given = {None: None, "bool": keep, "float": keep.float()}[mask]
        if mask is not None:
            logp = logp.masked_fill(~keep, -torch.inf)
        for how in (
            {}, {"temperature": 3.0, "t_squared": True, "reduction": "mean"},
            {"renormalise": True}, {"renormalise": True, "temperature": 0.5},
        ):  # fmt: skip
            assert_as_good_as_torch(
                lambda z, how=how: ll.gathered_kl(z, logp, given, **how),
                lambda z, how=how: oracle.gathered_kl(z, logp, given, **how),
                z,
                computed_in=torch.float32,
            )

    @pytest.mark.parametrize("masked", [False, True])
    def test_gradcheck(self, masked, device):
        z = torch.randn(2, 2, 4, dtype=torch.float64, device=device, requires_grad=True)
        logp = torch.randn(2, 2, 6, device=device).log_softmax(-1)[..., :4]
        mask = torch.rand(2, 2, 4, device=device) > 0.3 if masked else None
        for reduction in ("sum", "none"):
            assert torch.autograd.gradcheck(
                lambda z, reduction=reduction: ll.gathered_kl(
                    z, logp, mask, temperature=0.7, reduction=reduction
                ),
                z,
            )

    def test_bad_input(self):
        with pytest.raises(ValueError, match="teacher_logprobs must have shape"):
            ll.gathered_kl(torch.zeros(2, 3), torch.zeros(2, 4))
        with pytest.raises(ValueError, match="mask must have shape"):
            ll.gathered_kl(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2).bool())
        with pytest.raises(TypeError, match="renormalise must be True or False, got 'yes'"):
            ll.gathered_kl(torch.zeros(2, 3), torch.zeros(2, 3), renormalise="yes")


class TestIgnoredRows:
    """A row whose label is ignored takes part in nothing, whatever it and its teacher hold."""

    @pairwise(support=SUPPORTS, ce_weight=[0.0, 0.5], softcap=[None, 5.0])
    def test_they_may_hold_anything(self, support, ce_weight, softcap, impl, device):
        x, targets = make(torch.float32, device)
        ids, logprobs = targets.ids.clone(), targets.logprobs.clone()
        labels = torch.tensor([1, -100, 2, 3], device=device)
        x[1], ids[1], logprobs[1] = torch.nan, -1, torch.nan
        how = {"divergence": "jsd", "support": support, "ce_weight": ce_weight, "softcap": softcap}
        up = torch.ones((), device=device)
        poisoned = ll.SparseTargets(ids, logprobs, targets.tail)
        got = value_and_grad(lambda x: ll.topk_distill(x, poisoned, labels=labels, **how), x, up)
        keep = [0, 2, 3]
        want = value_and_grad(
            lambda x: ll.topk_distill(x, targets[keep], labels=labels[keep], **how), x[keep], up
        )
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1][keep], want[1])
        assert not got[1][1].any()

    @pytest.mark.parametrize("support", SUPPORTS)
    def test_an_ignore_index_that_is_an_id(self, support, impl, device):
        x, targets = make(torch.float32, device)
        labels = torch.tensor([1, 7, 2, 3], device=device)
        ids = targets.ids.clone()
        ids[0, 0] = 7
        how = {"divergence": "forward_kl", "support": support, "ignore_index": 7}
        targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
        got = ll.topk_distill(x, targets, labels=labels, **how)
        want = oracle.topk_distill(x.double(), targets, labels=labels, **how)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)

    def test_an_ignore_index_wider_than_the_ids(self, impl, device):
        x, targets = make(torch.float32, device)
        labels = torch.tensor([1, -(2**33), 2, 3], device=device)
        narrow = ll.SparseTargets(targets.ids.int(), targets.logprobs, targets.tail)
        how = {"divergence": "forward_kl", "support": "tail", "ignore_index": -(2**33)}
        for ce_weight in (0.0, 1.0):
            how |= {"labels": labels, "ce_weight": ce_weight}
            want = oracle.topk_distill(x.double(), targets, **how)
            got = ll.topk_distill(x, narrow, **how)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gap", [85.0, 95.0, 110.0, 900.0])
def test_gradient_of_a_tail_that_is_no_number_in_fp32(gap, impl, device):
    """Its logits are pulled up by their shares of it, with a label among them or none."""
    x = torch.randn(3, 6, device=device) + 1e3 - gap
    x[:, 0] = 1e3
    ids, logp = torch.zeros(3, 1, dtype=torch.int64), torch.tensor([[0.6]] * 3).log()
    targets = ll.SparseTargets(ids, logp, torch.tensor([0.4] * 3).log()).to(device)
    labels = torch.tensor([0, 3, -100], device=device)
    how = {"divergence": "forward_kl", "support": "tail", "reduction": "sum"}
    for temperature in (1.0, 0.5):
        for ce in ({}, {"labels": labels, "ce_weight": 0.5}):
            got, want = both(x, targets, temperature=temperature, **how, **ce)
            assert want[1][0, 1:].abs().max() > 0.1
            assert error(got[1], want[1]) < 2e-4  # of log p, near -1000 at most


def test_gathered_kl_divides_in_full_precision(impl, device):
    z = torch.randn(3, 9, device=device).bfloat16()
    logp = torch.log_softmax(torch.randn(3, 9, device=device), -1)
    got = ll.gathered_kl(z, logp, temperature=3.0)
    torch.testing.assert_close(got, ll.gathered_kl(z.float(), logp, temperature=3.0))


def test_modules(device):
    x, targets = make(torch.float32, device)
    labels, other = torch.tensor([1, -100, 2, 3], device=device), x.flip(0)
    what = {"divergence": "jsd", "support": "tail", "temperature": 2.0, "ce_weight": 0.5}
    module = ll.nn.TopKDistillLoss(**what)
    want = ll.topk_distill(x, targets, labels=labels, **what)
    torch.testing.assert_close(module(x, targets, labels), want)
    assert "divergence=jsd" in repr(module)
    kl = {"direction": "reverse", "temperature": 2.0, "t_squared": True}
    torch.testing.assert_close(ll.nn.KLDivLoss(**kl)(x, other), ll.kl_div(x, other, **kl))
    mask = labels != -100
    jsd = ll.nn.JSDLoss(beta=0.2, softcap=5.0)
    want = ll.jsd(x, other, beta=0.2, softcap=5.0, mask=mask)
    torch.testing.assert_close(jsd(x, other, mask), want)


class TestSpans:
    """Several ids a row are put right span by span, after the columns around them."""

    @pairwise(
        dtype=DTYPES,
        ce=[False, True],
        temperature=[1.0, 2.0],
        cut=[{"block_v": 16, "span": 32}, {"block_v": 64, "span": 64}],
    )
    def test_ids_at_every_edge(self, dtype, ce, temperature, cut, impl, device):
        """Repeated within a span and across them, on a span's ends, in the fringe."""
        vocab, k = 103, 20
        x, targets = make(dtype, device, vocab=vocab, k=k)
        ids = targets.ids.clone()
        edges = [0, 31, 32, 63, 64, vocab - 1]
        ids[0, : len(edges)] = torch.tensor(edges, device=device)
        ids[1, -1], ids[2, : k // 2] = ids[1, 0], ids[2, k // 2].clone()
        targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
        how = {"divergence": "jsd", "support": "tail", "temperature": temperature}
        if ce:  # a label that the teacher has as well, one that it has twice, and one it may not
            labels = torch.stack([ids[0, 0], ids[1, 0], ids[2, 0] * 0 + 5, ids[3, 2]])
            how |= {"labels": labels, "ce_weight": 0.3, "kd_weight": 0.7}
        up = torch.ones((), device=device)
        wide = torch.zeros(ROWS, vocab + 3, dtype=dtype, device=device)
        wide[:, 1:-2] = x
        want = value_and_grad(lambda x: oracle.topk_distill(x, targets, **how), x.double(), up)
        with config.override(**cut):
            got = value_and_grad(lambda w: ll.topk_distill(w[:, 1:-2], targets, **how), wide, up)
        assert error(got[0], want[0]) < 1e-4
        assert error(got[1][:, 1:-2], want[1]) < 2e-5 + torch.finfo(dtype).eps
        assert not got[1][:, 0].any()
        assert not got[1][:, -2:].any()

    def test_more_slots_than_a_program_looks_at_once(self, impl, device):
        x, targets = make(torch.bfloat16, device, rows=1, vocab=1600, k=600)
        ids = targets.ids.clone()
        ids[0, 550] = ids[0, 3]
        targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
        how = {"divergence": "forward_kl", "support": "tail"}
        got, want = both(x, targets, **how)
        assert error(got[1], want[1]) < 2e-5 + torch.finfo(torch.bfloat16).eps

    def test_softcap_and_a_gradient_a_row(self, impl, device):
        """Every term of the one backward at repeated ids, against autograd."""
        x = torch.randn(3, 90, device=device) * 3
        ids = torch.randint(0, 90, (3, 40), device=device)
        weights = torch.randn(3, 40, device=device)
        how = {"temperature": 0.7, "softcap": 4.0}

        def naive(x):
            picked = (oracle.picked(x, ids, **how) * weights.to(x)).sum(-1)
            rest = oracle.entropy(x, **how) + 0.1 * oracle.total(x, **how)
            return picked + rest + 2 * oracle.logsumexp(x, **how)

        def ours(x):
            found = ll.row_stats(x, ids, **how, entropy=True, total=True)
            picked = (found.picked * weights).sum(-1)
            return picked + found.entropy + 0.1 * found.total + 2 * found.lse

        with config.override(block_v=16, span=48):
            assert_as_good_as_torch(ours, naive, x)

    @pairwise(support=SUPPORTS, ce=[False, True], temperature=[1.0, 2.0])
    def test_a_dead_row_has_no_gradient(self, support, ce, temperature, impl, device):
        x, targets = make(torch.float32, device)
        x[1] = -torch.inf
        how = {"divergence": "forward_kl", "support": support, "reduction": "none"}
        how |= {"labels": targets.ids[:, 0], "ce_weight": 0.5} if ce else {}
        leaf = x.requires_grad_()
        loss = ll.topk_distill(leaf, targets, temperature=temperature, **how)
        loss[[0, 2, 3]].sum().backward()
        assert not leaf.grad[1].any()
        assert leaf.grad[[0, 2, 3]].isfinite().all()


class TestMaskedSlots:
    """A slot that does not count holds no id: nothing is read for it, and it repeats none."""

    @pairwise(divergence=DIVERGENCES, support=SUPPORTS, ce=[False, True])
    def test_is_as_if_it_were_not_there(self, divergence, support, ce, impl, device):
        x, targets = make(torch.float32, device)
        x[:, 0] = 9.0  # what a slot that is taken for id 0 would find
        x.scatter_(-1, targets.ids[:, 1:2], 30.0)  # hardly anything is left outside
        keep = torch.zeros_like(targets.ids).bool()
        keep[:, 1::2] = True  # not the first
        wild = torch.where(keep, targets.ids, 2**31 - 5)
        targets = ll.SparseTargets(wild, targets.logprobs, targets.tail, keep)
        fewer = ll.SparseTargets(targets.ids[:, 1::2], targets.logprobs[:, 1::2], targets.tail)
        how = {"divergence": divergence, "support": support, "temperature": 2.0}
        how |= mix(device=device) if ce else {}
        up = torch.ones((), device=device)
        torch.testing.assert_close(
            value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, up),
            value_and_grad(lambda x: ll.topk_distill(x, fewer, **how), x, up),
        )

    @pytest.mark.parametrize("support", SUPPORTS)
    def test_the_only_one(self, support, impl, device):
        x, targets = make(torch.float32, device, k=1)
        keep = torch.tensor([[True], [False], [True], [True]], device=device)
        targets = ll.SparseTargets(targets.ids, targets.logprobs, targets.tail, keep)
        how = {"divergence": "forward_kl", "support": support}
        got, want = both(x, targets, **how)
        assert error(got[0], want[0]) < 1e-5
        assert error(got[1], want[1]) < 1e-5
        assert not got[1][1].any()


@pairwise(
    reduction=["mean", "sum", "none"],
    options=["no labels", "labels", "mixed and weighed"],
    k=[1, K],
    support=["truncate", "tail"],
    temperature=[1.0, 2.0],
)
def test_torch_func_sees_the_same(reduction, options, k, support, temperature, impl, device):
    """What those who look on see, torch.func here, is the same loss and the same gradient."""
    x, targets = make(torch.float32, device, k=k)
    how = {
        "divergence": "reverse_kl", "support": support, "temperature": temperature,
        "t_squared": True, "kd_weight": 0.7, "reduction": reduction,
    }  # fmt: skip
    if options != "no labels":
        how["labels"] = torch.tensor([3, -100, 4, 5], device=device)
    if options == "mixed and weighed":  # a weight of inf is for a row that does not count
        how["ce_weight"] = 0.5
        how["row_weight"] = torch.tensor([1.0, torch.inf, 2.0, 3.0], device=device)

    def f(x):
        return (ll.topk_distill(x, targets, **how) * 1.5).sum()

    want, want_grad = value_and_grad(f, x, torch.ones((), device=device))
    grad, value = torch.func.grad_and_value(f)(x)
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(grad, want_grad)


def test_only_the_gradients_of_slots_are_kept(impl, device, monkeypatch):
    """Of what is as large as the ids, one tensor: at K = 512 each counts."""
    monkeypatch.setattr(_loss, "on_gpu", lambda x: False)  # where a gradient waits for backward
    x, targets = make(torch.float32, device)
    x.requires_grad_()
    kept = []
    labels = torch.tensor([3, -100, 4, 5], device=device)
    for options in ({}, {"labels": labels, "ce_weight": 0.5, "temperature": 2.0}):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            ll.topk_distill(x, targets, divergence="jsd", support="tail", **options)
        wide = [t for t in kept if t.is_floating_point() and t.dim() == 2 and t.shape[1] < V]
        per_row = {(ROWS, STATE), (ROWS, COEFFICIENTS)}
        assert [tuple(t.shape) for t in wide if t.shape not in per_row] == [(ROWS, K)]


@pairwise(dtype=DTYPES, temperature=[1.0, 2.0], t_squared=[False, True])
def test_gathered_sums_are_the_sum_of_rows(dtype, temperature, t_squared, impl, device):
    z = torch.randn(2, 3, 9, device=device).to(dtype)
    logp = torch.log_softmax(torch.randn(2, 3, 9, device=device), -1)
    how = {"temperature": temperature, "t_squared": t_squared}
    up = torch.tensor(1.5, device=device)
    rows = value_and_grad(lambda z: ll.gathered_kl(z, logp, reduction="none", **how).sum(), z, up)
    total = value_and_grad(lambda z: ll.gathered_kl(z, logp, **how), z, up)
    mean = value_and_grad(lambda z: ll.gathered_kl(z, logp, reduction="mean", **how), z, 6 * up)
    eps = torch.finfo(dtype).eps
    for got in (total, (6 * mean[0], mean[1])):
        assert error(got[0], rows[0].double()) < 1e-6
        assert error(got[1], rows[1].double()) < 1e-6 + eps
    leaf = z.clone().requires_grad_()
    (grad,) = torch.autograd.grad(ll.gathered_kl(leaf, logp), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.float().square().sum().backward()


@pairwise(support=["tail", "truncate"], temperature=[1.0, 2.0], repeated=[False, True])
def test_a_label_among_the_teacher_s_ids(support, temperature, repeated, device):
    """The most common of labels: its slot and the teacher's write to one place."""
    x, targets = make(torch.float32, device)
    labels = targets.ids[:, 2]
    if repeated:
        ids = targets.ids.clone()
        ids[:, 4] = ids[:, 1]
        targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
    gradients = []
    for impl, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        leaf = x.clone().to(dtype).requires_grad_()
        with ll.impl(impl):
            ll.topk_distill(
                leaf, targets, divergence="forward_kl", support=support, temperature=temperature,
                labels=labels, ce_weight=0.7, kd_weight=0.4,
            ).backward()  # fmt: skip
        gradients.append(leaf.grad.double())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_an_ignored_row_is_0_whatever_multiplies_it(device):
    x = torch.randn(2, 9, device=device, requires_grad=True)
    targets = ll.capture_topk(torch.randn(2, 9, device=device), 3)
    labels = torch.tensor([1, -100], device=device)
    for reduction in ("mean", "none"):
        loss = ll.topk_distill(
            x, targets, divergence="forward_kl", support="tail", labels=labels, ce_weight=0.5,
            temperature=torch.tensor([2.0, torch.inf], device=device), t_squared=True,
            reduction=reduction,
        )  # fmt: skip
        assert loss.isfinite().all()
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert gradient.isfinite().all()
        assert not gradient[1].any()


@pytest.mark.parametrize("bad", [-1, -7, 37])
@pytest.mark.usefixtures("nobody_looks")
def test_a_bad_id_is_no_label_of_an_ignored_row(bad, device):
    targets = ll.capture_topk(torch.randn(2, 37, device=device), 3)
    ids = targets.ids.clone()
    ids[0, 0] = bad
    targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
    with ll.impl("triton"):
        loss = ll.topk_distill(
            torch.randn(2, 37, device=device), targets, divergence="forward_kl", support="tail",
            labels=torch.tensor([1, 2], device=device), reduction="none",
        )  # fmt: skip
    assert loss.isnan().tolist() == [True, False]


@pytest.mark.parametrize("support", ["tail", "renorm"])
def test_one_temperature_as_a_tensor(support, impl, device):
    """A tensor of no dimensions is one number for all rows, also where it is squared."""
    x, targets = make(torch.float32, device)
    how = {"divergence": "forward_kl", "support": support, "t_squared": True, "reduction": "none"}
    z, logp = x[..., :K].contiguous(), targets.logprobs
    for f in (
        lambda t: ll.topk_distill(x, targets, temperature=t, **how),
        lambda t: ll.gathered_kl(z, logp, temperature=t, t_squared=True, reduction="none"),
    ):
        torch.testing.assert_close(f(torch.tensor(2.0, device=device)), f(2.0))
        # 1.0078125² has 15 bits, of which bf16 keeps 8.
        narrow = torch.tensor(1.0078125, device=device, dtype=torch.bfloat16)
        torch.testing.assert_close(f(narrow), f(1.0078125))


def test_jsd_keeps_the_bits_of_beta_in_fp64():
    x, targets = make()
    how = {"divergence": "jsd", "support": "truncate", "beta": 0.1}
    want = oracle.topk_distill(x, targets, **how)
    torch.testing.assert_close(ll.topk_distill(x, targets, **how), want, rtol=1e-13, atol=0)
