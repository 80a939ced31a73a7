"""Sparse teachers: every divergence, support and option against the fp64 definitions."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.kernels import config
from tests.support import oracle
from tests.support.laws import assert_as_good_as_torch, error, value_and_grad
from tests.support.pairwise import pairwise
from tests.support.sparse_teachers import (
    CELLS,
    DTYPES,
    MATRIX,
    ROWS,
    SUPPORTS,
    K,
    V,
    both,
    make,
    masked,
    mix,
    told,
)


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
    "softcap at the ids alone": {"softcap": 3.0, "temperature": 2.0, "support": "renorm"},
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
        with pytest.raises(TypeError, match="must be one number for all rows, got a Tensor"):
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
