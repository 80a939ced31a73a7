"""slot_loss: the formulas of topk_distill, what a formula gets, and errors."""

import pytest
import torch

import logitless as ll
from tests.support import oracle
from tests.support.inputs import on
from tests.support.laws import ROUNDING, error, value_and_grad
from tests.support.pairwise import pairwise
from tests.support.refusals import refuses
from tests.support.sparse_teachers import DIVERGENCES, MATRIX, ROWS, K, V, make, masked, told


def formula_of(divergence, support):
    """A divergence of topk_distill by its definition."""

    def formula(slots):
        tails = (slots.student_tail, slots.teacher_tail) if support == "tail" else ()
        return oracle.over_slots(
            slots.student, slots.teacher, slots.mask, *tails, kind=divergence, support=support
        )

    return formula


def both(x, targets, cell, **how):
    """Values and gradients of slot_loss and of topk_distill, under a random upstream gradient."""
    divergence, support = cell
    formula = formula_of(divergence, support)
    upstream = torch.linspace(-1, 2, x.shape[0], device=x.device)
    upstream = upstream if how.get("reduction") == "none" else None
    return (
        value_and_grad(
            lambda x: ll.slot_loss(formula, x, targets, tail=support == "tail", **how), x, upstream
        ),
        value_and_grad(
            lambda x: ll.topk_distill(x, targets, divergence=divergence, support=support, **how),
            x, upstream,
        ),
    )  # fmt: skip


@pairwise(
    cell={f"{divergence}-{support}": (divergence, support) for divergence, support in MATRIX},
    backend=[("eager", torch.float64), ("triton", torch.float32), ("triton", torch.bfloat16)],
    mask=["none", "partial", "full", "poison"],
    given=[True, False],
    repeated=[False, True],
    how={
        "mean": {"temperature": 2.0},
        "sum": {"reduction": "sum", "softcap": 3.0},
        "none": {"reduction": "none", "row_weight": torch.linspace(-1, 1, ROWS)},
        "labels": {"labels": torch.tensor([-100, 4, 5, 6])},
        "mask": {"mask": torch.tensor([True, False, True, True])},
    },
)
def test_equals_topk_distill(cell, backend, mask, given, repeated, how, device):
    """tests/losses/test_sparse_teacher.py compares topk_distill with its definition."""
    impl, dtype = backend
    x, targets = make(dtype, device, repeated=repeated)
    targets = told(masked(targets, mask), given)
    with ll.impl(impl):
        (got, d_got), (want, d_want) = both(x, targets, cell, **on(how, device))
    if dtype == torch.float64:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(d_got, d_want, rtol=1e-10, atol=1e-13)
    else:
        assert error(got, want) < 4 * ROUNDING
        assert error(d_got, d_want) < 4 * ROUNDING + torch.finfo(dtype).eps


def test_a_tail_that_is_tiny(impl, device):
    """The gradient of the tail is exact although e^tail underflows in fp32."""
    x, targets = make(torch.float32, device)
    x = x.scatter(-1, targets.ids, 150.0 + torch.arange(K, device=device).expand(ROWS, K))

    def of_tail(slots):
        return slots.student_tail * 0.01 + slots.student[:, 0]

    def naive(x):
        at = torch.zeros_like(x, dtype=torch.bool).scatter(-1, targets.ids, True)
        log_q = x.log_softmax(-1)
        outside = log_q.masked_fill(at, -torch.inf).logsumexp(-1)
        return outside * 0.01 + log_q.gather(-1, targets.ids)[:, 0]

    upstream = torch.linspace(-1, 2, ROWS, device=device)
    got, d_got = value_and_grad(
        lambda x: ll.slot_loss(of_tail, x, targets, reduction="none"), x, upstream
    )
    want, d_want = value_and_grad(naive, x.double(), upstream.double())
    assert got.min() < -1.2
    assert error(got, want) < ROUNDING
    assert error(d_got, d_want) < ROUNDING


def test_all_ids_of_the_vocabulary(impl, device):
    """Both tails are empty, so a term of the tails is 0, and its gradient is 0."""
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).to(device)
    targets = ll.capture_topk(x.flip(0), 6)
    for i, divergence in enumerate(DIVERGENCES):
        (got, d_got), (want, d_want) = both(x, told(targets, i % 2 == 0), (divergence, "tail"))
        assert error(got, want) < ROUNDING
        assert error(d_got, d_want) < ROUNDING


def test_probabilities_of_zero(impl, device):
    """Slots without any mass add 0. A slot without the student's mass gets no gradient."""
    x, targets = make(torch.float32, device)
    x[1].scatter_(0, targets.ids[1, :2], -torch.inf)
    logprobs = targets.logprobs.clone()
    logprobs[1, 0] = -torch.inf
    targets = ll.SparseTargets(targets.ids, logprobs)
    seen = []

    def formula(slots):
        seen.append(slots)
        p, q = slots.teacher, slots.student
        return (q[:, 0].exp() * (q[:, 0] - p[:, 0])) + (p.exp() - q.exp()).abs().sum(-1)

    got, d_got = value_and_grad(
        lambda x: ll.slot_loss(formula, x, targets, reduction="none"),
        x)  # fmt: skip
    assert got.isfinite().all()
    assert d_got.isfinite().all()
    assert (d_got[1, targets.ids[1, :2]] == 0).all()
    slots = seen[0]
    assert slots.student[1, 0] == slots.teacher[1, 0]
    assert slots.student[1, 1] == -torch.inf
    assert (slots.student[1, 0].exp(), slots.teacher[1, 1].isfinite()) == (0, True)


def test_what_the_formula_gets(impl, device):
    """Masked slots and ignored rows hold the same finite number in student and teacher."""
    x, targets = make(torch.float32, device)
    x[3] = torch.nan
    targets = masked(targets, "poison")
    rows = torch.arange(ROWS, device=device)
    seen = []

    def formula(slots, index):
        seen.append((slots, index))
        return slots.student.sum(-1) + slots.student_tail

    ll.slot_loss(formula, x, targets, rows=(rows,), mask=rows < 3)
    (slots, index) = seen[0]
    assert index.tolist() == [0, 1, 2, 3]
    mask = torch.ones(ROWS, K, dtype=torch.bool, device=device)
    mask[1, 2:], mask[3] = False, False
    assert torch.equal(slots.mask, mask)
    for t in (slots.student, slots.teacher):
        assert t.dtype == torch.float32
        assert t.isfinite().all()
        assert (t[~mask].exp() == 0).all()
    assert torch.equal(slots.student[~mask], slots.teacher[~mask])
    assert torch.equal(slots.teacher[mask], targets.logprobs[mask])
    assert torch.equal(slots.teacher_tail[:3], targets.tail[:3])
    ids = targets.ids.clamp(min=0)
    log_q = x.double().log_softmax(-1)
    torch.testing.assert_close(slots.student[mask].double(), log_q.gather(-1, ids)[mask])


def test_a_row_without_slots_has_no_gradient(impl, device):
    """Also if the formula divides by the number of slots, which is 0."""
    x, targets = make(torch.float32, device)
    mask = torch.ones(ROWS, K, dtype=torch.bool, device=device)
    mask[1] = False
    targets = ll.SparseTargets(targets.ids, targets.logprobs, targets.tail, mask)

    def formula(slots, share, several):
        off = ((slots.teacher - slots.student) ** 2 * slots.mask).sum(-1) / slots.mask.sum(-1)
        return (share + several.sum(-1)) * off

    for lead in ((ROWS,), (2, ROWS // 2)):
        z = x.view(*lead, V).clone().requires_grad_()
        rows = [torch.rand(*lead, *k, device=device, requires_grad=True) for k in ((), (3,))]
        losses = ll.slot_loss(formula, z, targets.reshape(*lead), rows=rows, reduction="none")
        grads = torch.autograd.grad(losses.sum(), (z, *rows))
        assert losses.flatten()[1] == 0
        for d in grads:
            assert d.isfinite().all()
            assert not d.flatten(0, len(lead) - 1)[1].any()
            assert d.flatten(0, len(lead) - 1)[0].all()


# --- errors


def test_a_wrong_result_is_refused(impl, device):
    x, targets = make(torch.float32, device)
    with refuses(
        ValueError,
        f"formula must return one number per row, shape ({ROWS},), got ({ROWS}, {K}).",
    ):
        ll.slot_loss(lambda slots: slots.student, x, targets)
    with refuses(TypeError, "formula must return a Tensor, got float."):
        ll.slot_loss(lambda slots: 1.0, x, targets)
    with pytest.raises(RuntimeError, match=r"call slot_loss under torch.no_grad\(\)"):
        ll.slot_loss(lambda slots: slots.teacher.sum(-1), x.requires_grad_(), targets)
    with torch.no_grad():
        ll.slot_loss(lambda slots: slots.teacher.sum(-1), x, targets)


def test_a_tail_that_was_not_requested_is_named(device):
    x, targets = make(torch.float32, device)
    for formula in (lambda s: s.student_tail, lambda s: s.student.sum(-1) + s.teacher_tail):
        with pytest.raises(TypeError, match=r"slots.student_tail \(pass tail=True to slot_loss\)"):
            ll.slot_loss(formula, x, targets, tail=False)


def test_a_look_across_rows_is_caught_on_request(device, monkeypatch):
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    x, targets = make(torch.float32, device)
    ll.slot_loss(formula_of("tvd", "tail"), x, targets)
    with pytest.raises(ValueError, match="formula must not mix rows"):
        ll.slot_loss(lambda s: s.student.sum(-1) - s.student.mean(), x, targets)
