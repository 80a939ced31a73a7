"""Sparse teachers: every divergence, support and option against the fp64 definitions."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from laws import error, value_and_grad

import logitless as ll
from logitless import _checks
from logitless.kernels import config

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
SUPPORTS = ("truncate", "renorm_teacher", "renorm", "tail")
MATRIX = list(itertools.product(DIVERGENCES, SUPPORTS))
V, K, ROWS = 53, 5, 4


def term(divergence, p, q, beta=0.5):
    """One slot's share, where 0 log 0 is 0."""

    def xlogy(a, b):
        return torch.where(a == 0, 0.0, a * torch.where(a == 0, 1.0, b).log())

    if divergence == "tvd":
        return (p - q).abs() / 2
    if divergence == "forward_kl" or (divergence == "jsd" and beta == 0):
        return xlogy(p, p / q)
    if divergence == "reverse_kl" or (divergence == "jsd" and beta == 1):
        return xlogy(q, q / p)
    m = beta * p + (1 - beta) * q
    return beta * xlogy(p, p / m) + (1 - beta) * xlogy(q, q / m)


def oracle(
    x, targets, *, divergence, support, beta=0.5, temperature=1.0, t_squared=False, softcap=None,
    labels=None, ignore_index=-100, ce_weight=0.0, kd_weight=1.0, row_weight=None, reduction="mean",
):  # fmt: skip
    """Row by row, slot by slot, by the definitions."""
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    losses = []
    for r in range(x.shape[0]):
        if labels is not None and labels[r] == ignore_index:
            losses.append(x[r].sum() * 0)
            continue
        T = temperature[r] if isinstance(temperature, torch.Tensor) else temperature
        keep = torch.ones_like(targets.ids[r]).bool()
        if targets.mask is not None:
            keep = targets.mask[r].bool()
        kd = x[r].sum() * 0
        if keep.any():
            ids = targets.ids[r][keep].long()
            p = targets.logprobs[r][keep].to(x.dtype).exp()
            full = torch.softmax(x[r] / T, -1)
            q = full[ids]
            if support == "tail":
                rest = torch.ones(x.shape[-1], dtype=torch.bool, device=x.device)
                rest[ids] = False
                tail = (1 - p.sum()).clamp(min=0)
                if targets.tail is not None:
                    tail = targets.tail[r].to(x.dtype).exp()
                p, q = torch.cat([p, tail[None]]), torch.cat([q, full[rest].sum()[None]])
            if support in ("renorm", "renorm_teacher"):
                p = p / p.sum()
            if support == "renorm":
                q = q / q.sum()
            kd = term(divergence, p, q, beta).sum() * (T * T if t_squared else 1)
        loss = kd_weight * kd
        if labels is not None and ce_weight:
            loss = loss + ce_weight * F.cross_entropy(x[r], labels[r])
        losses.append(loss if row_weight is None else loss * row_weight[r].to(x.dtype))
    loss = torch.stack(losses)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    count = len(loss) if labels is None else int((labels != ignore_index).sum())
    return loss.sum() / max(count, 1)


def make(dtype=torch.float64, device="cpu", rows=ROWS, vocab=V, k=K, repeated=False, scale=2.0):
    """Logits, and a teacher of its own that covers most of its mass."""
    g = torch.Generator().manual_seed(3)
    x = (torch.randn(rows, vocab, generator=g, dtype=torch.float64) * scale).to(dtype)
    teacher = torch.log_softmax(torch.randn(rows, vocab, generator=g) * scale, -1)
    logprobs, ids = teacher.topk(k)
    if repeated:
        ids[:, -1] = ids[:, 0]
    tail = torch.log1p(-logprobs.exp().sum(-1).clamp(max=1 - 1e-6))
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


@pytest.mark.parametrize("ce", [False, True], ids=["kd", "mix"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("divergence", "support"), MATRIX)
class TestMatrix:
    """The whole matrix: fp64 finite differences, and both implementations by the definitions."""

    @pytest.mark.parametrize("mask", ["none", "partial", "full", "poison"])
    def test_gradcheck(self, divergence, support, temperature, mask, ce):
        for repeated, reduction in ((False, "mean"), (True, "sum"), (True, "none")):
            x, targets = make(rows=3, vocab=11, repeated=repeated)
            targets = masked(targets, mask)
            how = {
                "divergence": divergence, "support": support, "temperature": temperature,
                "t_squared": repeated, "reduction": reduction, **(mix(3) if ce else {}),
            }  # fmt: skip
            got = ll.topk_distill(x, targets, **how)
            torch.testing.assert_close(got, oracle(x, targets, **how), rtol=1e-6, atol=1e-9)

            def f(leaf, targets=targets, how=how):
                return ll.topk_distill(leaf, targets, **how)

            assert torch.autograd.gradcheck(f, x.requires_grad_(), atol=1e-6)

    @pytest.mark.parametrize(("mask", "repeated"), [("poison", False), ("full", True)])
    def test_kernels(self, divergence, support, temperature, mask, repeated, ce, impl, device):
        x, targets = make(torch.float32, device, repeated=repeated)
        targets = masked(targets, mask)
        how = {
            "divergence": divergence, "support": support, "temperature": temperature,
            "reduction": "none", "t_squared": True, **(mix(device=device) if ce else {}),
        }  # fmt: skip
        upstream = torch.linspace(-1, 2, ROWS, device=device)
        with config.override(block_v=32):
            got = value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, upstream)
        want = value_and_grad(lambda x: oracle(x, targets, **how), x.double(), upstream)
        assert error(got[0], want[0]) < 2e-5
        assert error(got[1], want[1]) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", [
    {"softcap": 3.0, "temperature": 2.0}, {"beta": 0.0}, {"beta": 0.2}, {"beta": 1.0},
    {"row_weight": True, "reduction": "sum"}, {"temperature": "rows", "t_squared": True},
    {"reduction": "mean", "labels": True}, {"int32": True}, {"untold": True}, {"k": 1}, {"k": V},
], ids=str)  # fmt: skip
def test_options(how, dtype, impl, device):
    x, targets = make(dtype, device, k=how.pop("k", K) if "k" in (how := dict(how)) else K)
    if how.pop("int32", False):
        targets = ll.SparseTargets(targets.ids.int(), targets.logprobs, targets.tail)
    if how.pop("untold", False):
        targets = ll.SparseTargets(targets.ids, targets.logprobs)
    if how.get("row_weight"):
        how["row_weight"] = torch.linspace(0.5, 2, ROWS, device=device)
    if how.get("temperature") == "rows":
        how["temperature"] = torch.linspace(0.5, 2, ROWS, device=device)
    if how.get("labels"):
        how["labels"] = torch.tensor([3, -100, 4, 5], device=device)
    how = {"divergence": "jsd", "support": "tail", **how}
    upstream = torch.ones(ROWS if how.get("reduction") == "none" else (), device=device)
    with config.override(block_v=16):
        got = value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, upstream)
    want = value_and_grad(lambda x: oracle(x, targets, **how), x.double(), upstream)
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
            q = torch.softmax(x, -1)
            return term(divergence, teacher.double().exp(), q).sum() / len(x)

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
        targets = ll.capture_topk(x * 1.0, K)
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
        from logitless.stats import Reading, statistics

        x = torch.full((3, 400), 0.0, device=device)
        x[:, ::80] = torch.tensor(395 * (1 - true) / true / 5).log().item()
        x += torch.tensor([[0.0], [1e3], [-1e3]], device=device)
        ids = torch.arange(0, 400, 80, device=device).flip(0).expand(3, 5)
        with config.override(block_v=64):
            reading = Reading.of(x, ids, None, 1.0, None, None, True, outside=0)
            tail = statistics(x, *reading, False, False, False)[7]
        q = torch.softmax(x[0].double(), -1)
        q[ids[0]] = 0
        # Of the offset rows, what fp32 logits can say.
        torch.testing.assert_close(tail[0].double(), q.sum().log(), rtol=1e-4, atol=1e-4)
        assert tail.isfinite().all()

    def test_gradient_of_a_small_tail(self, impl, device):
        x = torch.zeros(2, 100, device=device)
        x[:, 7], x[:, 60] = 17.0, 16.0
        ids = torch.tensor([[60, 7, 60]] * 2, device=device)
        logp = torch.tensor([[0.2, 0.6, 0.1]] * 2, device=device).log()
        targets = ll.SparseTargets(ids, logp, torch.full((2,), 0.1, device=device).log())
        how = {"divergence": "forward_kl", "support": "tail", "reduction": "sum"}
        up = torch.ones((), device=device)
        got = value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, up)
        want = value_and_grad(lambda x: oracle(x, targets, **how), x.double(), up)
        assert error(got[0], want[0]) < 1e-5
        assert error(got[1], want[1]) < 1e-5

    def test_many_ids(self, impl, device):
        """More than are sorted in the kernel."""
        x, targets = make(torch.float32, device, vocab=2000, k=1500)
        how = {"divergence": "reverse_kl", "support": "tail"}
        up = torch.ones((), device=device)
        got = value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, up)
        want = value_and_grad(lambda x: oracle(x, targets, **how), x.double(), up)
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
            up = torch.ones((), device=device)
            targets = ll.SparseTargets(ids, logp)
            got = value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, up)  # noqa: B023
            want = value_and_grad(lambda x: oracle(x, targets, **how), x.double(), up)  # noqa: B023
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


class TestTargets:
    def test_rows_are_indexed_together(self, device):
        _, targets = make(device=device)
        some = targets[torch.tensor([2, 0], device=device)]
        assert torch.equal(some.ids, targets.ids[[2, 0]])
        assert torch.equal(some.tail, targets.tail[[2, 0]])
        assert targets[1].shape == ()
        assert targets[1:].shape == (3,)
        assert len(targets) == ROWS
        assert targets[targets.tail < 9].shape == (ROWS,)
        with pytest.raises(IndexError, match="targets must be indexed by rows, of which it has"):
            targets[:, 0]
        assert targets.to("cpu").device.type == "cpu"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"ids": torch.zeros(4, 5)}, "ids must hold integers"),
            ({"ids": torch.zeros(4, 5, dtype=torch.int16)}, "ids must be int32 or int64"),
            (
                {"ids": torch.zeros(4, 0).long()},
                "ids must have at least one slot in its last dimension, got",
            ),
            ({"mask": torch.zeros(4, 5).cfloat()}, "mask must be bool, or 0 and 1"),
            ({"logprobs": torch.zeros(4, 6)}, r"logprobs must have shape \(4, 5\)"),
            (
                {"logprobs": torch.zeros(4, 5).long()},
                "logprobs must hold floating-point numbers, got",
            ),
            ({"tail": torch.zeros(5)}, r"tail must have shape \(4,\)"),
            ({"mask": torch.zeros(4).bool()}, r"mask must have shape \(4, 5\)"),
        ],
    )
    def test_checked_on_construction(self, change, message):
        good = {"ids": torch.zeros(4, 5).long(), "logprobs": torch.zeros(4, 5)}
        ll.SparseTargets(**good)
        with pytest.raises((TypeError, ValueError), match=message):
            ll.SparseTargets(**{**good, **change})


class TestBadInput:
    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ({"divergence": "kl"}, "divergence must be one of 'forward_kl'"),
            ({"support": "top"}, "support must be one of 'truncate'"),
            ({"ce_weight": 0.5}, "ce_weight must be 0 without labels"),
            ({"kd_weight": float("inf")}, "kd_weight must be finite, got inf"),
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
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("mask", [None, "bool", "float"])
    def test_against_the_definition(self, dtype, mask, impl, device):
        g = torch.Generator().manual_seed(1)
        z = torch.randn(2, 3, 7, generator=g).to(device, dtype)
        logp = torch.log_softmax(torch.randn(2, 3, 9, generator=g), -1)[..., :7].to(device)
        keep = torch.rand(2, 3, 7, generator=g).to(device) > 0.4
        keep[0, 0] = False
        given = {None: None, "bool": keep, "float": keep.float()}[mask]
        if mask is None:
            keep = torch.ones_like(keep)
        else:
            logp = logp.masked_fill(~keep, -torch.inf)

        def naive(z):
            logq = torch.log_softmax(z.masked_fill(~keep, -torch.inf), -1)
            p = torch.where(keep, logp.double(), 0.0)
            terms = torch.where(keep, p.exp() * (p - logq.masked_fill(~keep, 0.0)), 0.0)
            return terms.nan_to_num(0.0).sum()

        up = torch.ones((), device=device)
        got = value_and_grad(lambda z: ll.gathered_kl(z, logp, given), z, up)
        want = value_and_grad(naive, z.double(), up)
        assert error(got[0], want[0]) < 1e-5
        assert error(got[1], want[1].nan_to_num(0.0)) < 1e-5 + torch.finfo(dtype).eps

    def test_bad_input(self):
        with pytest.raises(ValueError, match="teacher_logprobs must have shape"):
            ll.gathered_kl(torch.zeros(2, 3), torch.zeros(2, 4))
        with pytest.raises(ValueError, match="mask must have shape"):
            ll.gathered_kl(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2).bool())


class TestIgnoredRows:
    """A row whose label is ignored takes part in nothing, whatever it and its teacher hold."""

    @pytest.mark.parametrize("support", SUPPORTS)
    @pytest.mark.parametrize("ce_weight", [0.0, 0.5])
    @pytest.mark.parametrize("softcap", [None, 5.0])
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
        want = oracle(x.double(), targets, labels=labels, **how)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)

    def test_an_ignore_index_wider_than_the_ids(self, impl, device):
        x, targets = make(torch.float32, device)
        labels = torch.tensor([1, -(2**33), 2, 3], device=device)
        narrow = ll.SparseTargets(targets.ids.int(), targets.logprobs, targets.tail)
        how = {"divergence": "forward_kl", "support": "tail", "ignore_index": -(2**33)}
        for ce_weight in (0.0, 1.0):
            how |= {"labels": labels, "ce_weight": ce_weight}
            want = oracle(x.double(), targets, **how)
            got = ll.topk_distill(x, narrow, **how)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_gradient_of_a_tail_of_e_to_minus_85(impl, device):
    x = torch.full((2, 6), -85.0, device=device)
    x[:, 0] = 0
    ids, logp = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[0.9]] * 2).log()
    targets = ll.SparseTargets(ids, logp, torch.tensor([0.1] * 2).log()).to(device)
    how = {"divergence": "forward_kl", "support": "tail", "reduction": "sum"}
    up = torch.ones((), device=device)
    got = value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, up)
    want = value_and_grad(lambda x: oracle(x, targets, **how), x.double(), up)
    assert error(got[1], want[1]) < 1e-4


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

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("ce", [False, True], ids=["kd", "mix"])
    @pytest.mark.parametrize("temperature", [1.0, 2.0])
    def test_ids_at_every_edge(self, ce, temperature, dtype, impl, device):
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
        want = value_and_grad(lambda x: oracle(x, targets, **how), x.double(), up)
        for cut in ({"block_v": 16, "span": 32}, {"block_v": 64, "span": 64}):
            with config.override(**cut):
                got = value_and_grad(
                    lambda w: ll.topk_distill(w[:, 1:-2], targets, **how), wide, up
                )
            assert error(got[0], want[0]) < 1e-4
            assert error(got[1][:, 1:-2], want[1]) < 2e-5 + torch.finfo(dtype).eps
            assert not got[1][:, 0].any()
            assert not got[1][:, -2:].any()

    def test_more_slots_than_a_program_looks_at_once(self, impl, device):
        x, targets = make(torch.bfloat16, device, rows=2, vocab=1600, k=600)
        ids = targets.ids.clone()
        ids[0, 550] = ids[0, 3]
        targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
        how = {"divergence": "forward_kl", "support": "tail"}
        up = torch.ones((), device=device)
        got = value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, up)
        want = value_and_grad(lambda x: oracle(x, targets, **how), x.double(), up)
        assert error(got[1], want[1]) < 2e-5 + torch.finfo(torch.bfloat16).eps

    def test_softcap_weights_and_a_gradient_a_row(self, impl, device):
        """Every term of the one backward at repeated ids, against autograd."""
        from logitless.stats import measure

        x = torch.randn(3, 90, dtype=torch.float64, device=device) * 3
        ids = torch.randint(0, 90, (3, 40), device=device)
        v = torch.rand(90, device=device)
        upstream = torch.randn(3, 40, device=device)

        def by_definition(x):
            z = 4 * torch.tanh(x / 4) / 0.7
            logp, p = torch.log_softmax(z, -1), torch.softmax(z, -1)
            total = (v.to(x) * logp).sum(-1) - (p * logp).sum(-1)
            return (logp.gather(-1, ids) * upstream.to(x)).sum(-1) + total

        def ours(x):
            found = measure(
                x, ids, temperature=0.7, softcap=4.0, weight=v, normalised=True,
                entropy=True, total=True,
            )  # fmt: skip
            return (found.picked * upstream.to(found.picked)).sum(-1) + found.total + found.entropy

        ones = torch.ones(3, device=device)
        want = value_and_grad(by_definition, x, ones)
        with config.override(block_v=16, span=48):
            got = value_and_grad(ours, x.float(), ones)
        assert error(got[1], want[1]) < 2e-5

    @pytest.mark.parametrize("support", SUPPORTS)
    @pytest.mark.parametrize("ce", [False, True], ids=["kd", "mix"])
    def test_a_dead_row_has_no_gradient(self, support, ce, impl, device):
        x, targets = make(torch.float32, device)
        x[1] = -torch.inf
        how = {"divergence": "forward_kl", "support": support, "reduction": "none"}
        how |= {"labels": targets.ids[:, 0], "ce_weight": 0.5} if ce else {}
        for temperature in (1.0, 2.0):
            leaf = x.clone().requires_grad_()
            loss = ll.topk_distill(leaf, targets, temperature=temperature, **how)
            loss[[0, 2, 3]].sum().backward()
            assert not leaf.grad[1].any()
            assert leaf.grad[[0, 2, 3]].isfinite().all()


class TestMaskedSlots:
    """A slot that does not count holds no id: nothing is read for it, and it repeats none."""

    @pytest.mark.parametrize("ce", [False, True], ids=["kd", "mix"])
    @pytest.mark.parametrize(("divergence", "support"), MATRIX)
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
        up = torch.ones((), device=device)
        got = value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, up)
        want = value_and_grad(lambda x: oracle(x, targets, **how), x.double(), up)
        assert error(got[0], want[0]) < 1e-5
        assert error(got[1], want[1]) < 1e-5
        assert not got[1][1].any()


@pytest.mark.parametrize("k", [1, K])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_node_is_what_its_operators_are(reduction, k, impl, device):
    """What those who look on see, torch.func here, is the same loss and the same gradient."""
    x, targets = make(torch.float32, device, k=k)
    labels = torch.tensor([3, -100, 4, 5], device=device)
    # A weight of inf is for a row that does not count.
    rows = {"row_weight": torch.tensor([1.0, torch.inf, 2.0, 3.0], device=device)}
    for options in ({}, {"labels": labels}, {"labels": labels, "ce_weight": 0.5, **rows}):
        for support, temperature in itertools.product(("truncate", "tail"), (1.0, 2.0)):
            how = {
                "divergence": "reverse_kl", "support": support, "temperature": temperature,
                "t_squared": True, "kd_weight": 0.7, "reduction": reduction, **options,
            }  # fmt: skip

            def f(x, how=how):
                return (ll.topk_distill(x, targets, **how) * 1.5).sum()

            got = value_and_grad(f, x, torch.ones((), device=device))
            torch.testing.assert_close(got[0], f(x))
            torch.testing.assert_close(got[1], torch.func.grad(f)(x))


def test_only_the_gradients_of_slots_are_kept(impl, device):
    """Of what is as large as the ids, one tensor: at K = 512 each counts."""
    x, targets = make(torch.float32, device)
    x.requires_grad_()
    kept = []
    labels = torch.tensor([3, -100, 4, 5], device=device)
    for options in ({}, {"labels": labels, "ce_weight": 0.5, "temperature": 2.0}):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            ll.topk_distill(x, targets, divergence="jsd", support="tail", **options)
        wide = [t for t in kept if t.is_floating_point() and t.dim() == 2 and t.shape[1] < V]
        assert [tuple(t.shape) for t in wide] == [(ROWS, K)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("t_squared", [False, True])
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


@pytest.mark.parametrize("support", ["tail", "truncate"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("repeated", [False, True])
def test_a_label_among_the_teacher_s_ids(support, temperature, repeated, device):
    """The most common of labels: its slot and the teacher's write to one place."""
    x = torch.randn(6, 90, device=device)
    targets = ll.capture_topk(torch.randn(6, 90, device=device), 5)
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
def test_a_bad_id_is_no_mark_of_an_ignored_row(bad, device, monkeypatch):
    """As on a GPU, where nobody looks."""
    monkeypatch.setattr(_checks, "ids_in_range", lambda *_, **__: None)
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
