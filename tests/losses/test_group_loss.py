"""group_loss: a user's own loss over groups of rows, held against autograd over the logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import logitless as ll
from logitless.heads import choose_cut
from tests.differential.functions import group_loss as defined
from tests.differential.groups import owners, sums
from tests.support.sizes import DEVICE
from tests.support.sources import fused

D, V = 8, 40
GROUPS = {  # rows, groups
    "pairs": ((2, 3, 4), 1),
    "sequences": ((5, 6), 0),
    "columns": ((4, 3, 2), -1),
    "packed": ((20,), [7, 1, 0, 5, 7]),
    "rows": ((9,), 0),
}
ROW = V * 8  # bytes of a row of logits in fp64


def formula_of(groups):
    """A formula that is linear in nothing, as a user of group_loss writes it."""

    def formula(stats, weight, bias):
        n = bias.numel()
        total = sums(groups, n, stats.group, weight * stats.logprob) * 0.3 + bias.reshape(n)
        value = F.softplus(total) + 0.1 * sums(groups, n, stats.group, stats.entropy.square())
        return value, value.detach() * 2

    return formula


def inputs(lead, groups, ignored, dtype=torch.float64, frozen=False):
    generator = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    hidden, weight = normal(*lead, D).requires_grad_(), (normal(V, D) * 0.5)
    ids = torch.randint(V, lead, generator=generator).to(DEVICE)
    if ignored:
        ids.view(-1)[::3] = -100
        owner, count = owners(groups, hidden)
        ids[owner == count - 1] = -100  # a whole group
    shape = list(lead)
    if isinstance(groups, int):
        shape = [n if i == groups % len(lead) else 1 for i, n in enumerate(lead)]
    beside = [normal(*lead).requires_grad_()]
    beside.append(
        (normal(*shape) if isinstance(groups, int) else normal(len(groups))).requires_grad_()
    )
    return hidden, weight.requires_grad_(not frozen), ids, beside


SOURCES = {  # hidden, weight, whether the weight is frozen
    "tensor": (lambda h, w: h @ w.T, False),
    "small head": (lambda h, w: ll.LinearLogits(h, w), False),
    "frozen small head": (lambda h, w: ll.LinearLogits(h, w), True),
    "groups fit": (lambda h, w: ll.LinearLogits(h, w, workspace=13 * ROW), False),
    "frozen, groups fit": (lambda h, w: ll.LinearLogits(h, w, workspace=13 * ROW), True),
    "beyond the workspace": (lambda h, w: ll.LinearLogits(h, w, workspace=ROW), False),
    "nothing dropped": (
        lambda h, w: ll.LinearLogits(h, w, workspace=13 * ROW, drop_ignored=False), True,
    ),
    "lazy": (fused, False),
    "lazy, frozen": (fused, True),
    "lazy small head": (fused, False),
}  # fmt: skip


def source_of(name, monkeypatch):
    """In tests, no head is small unless it is told to be."""
    limit = 1 << 20 if "small" in name else -1
    monkeypatch.setattr(choose_cut, "SMALL", dict.fromkeys(choose_cut.SMALL, limit))
    return SOURCES[name]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", GROUPS)
def test_as_autograd_over_the_logits(name, source, monkeypatch):
    """Values and gradients of every input, twice, for the three reductions."""
    lead, groups = GROUPS[name]
    made, frozen = source_of(source, monkeypatch)
    formula, reads = formula_of(groups), {"groups": groups, "entropy": True}
    for ignored, reduction in itertools.product((False, True), ("mean", "sum", "none")):
        hidden, weight, ids, beside = inputs(lead, groups, ignored, frozen=frozen)
        leaves = [t for t in (hidden, weight, *beside) if t.requires_grad]
        how = {"rows": beside, "reduction": reduction, **reads}
        value, more = ll.group_loss(formula, made(hidden, weight), ids, **how)
        want, more_of_all = defined(hidden @ weight.T, formula, ids=ids, **how)
        torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-9)
        upstream = torch.randn_like(want)
        wanted = torch.autograd.grad(want, leaves, upstream)
        for again in (True, False):  # a second backward of a retained graph
            got = torch.autograd.grad(value, leaves, upstream, retain_graph=again)
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        assert not more.requires_grad
        torch.testing.assert_close(more, more_of_all, rtol=1e-9, atol=1e-9)


def dpo(stats, reference):
    chosen, rejected = stats.logprob.sum(-1) - reference
    return -F.logsigmoid(0.1 * (chosen - rejected))


HOW = {
    "plain": {},
    "temperature and softcap": {"temperature": 0.7, "softcap": 4.0},
    "frozen": {},
    "low rank": {},
    "main_grad": {},
    "fp32 logits": {},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_dpo(how, dtype):
    """The error to fp64 is at most twice PyTorch's in the same dtype."""
    options, lead = HOW[how], (2, 3, 5)
    generator = torch.Generator().manual_seed(7)
    given = {
        "hidden": torch.randn(*lead, D, generator=generator),
        "weight": torch.randn(V, D, generator=generator) * 0.5,
    }
    if how == "low rank":
        given["a"] = torch.randn(*lead, 2, generator=generator)
        given["b"] = torch.randn(V, 2, generator=generator) * 0.5
    ids = torch.randint(V, lead, generator=generator).to(DEVICE)
    ids[..., -1] = -100
    reference = torch.randn(*lead[:-1], generator=generator).to(DEVICE)

    def gradients(dtype, loss):
        leaves = {n: t.to(DEVICE, dtype, copy=True).requires_grad_() for n, t in given.items()}
        leaves["weight"].requires_grad_(how != "frozen")
        value, main_grad = loss(**leaves)
        (3 * value).backward()
        found = {name: t.grad for name, t in leaves.items() if t.requires_grad}
        if main_grad is not None:
            assert found["weight"] is None
            found["weight"] = main_grad
        return [value.detach(), *found.values()]

    def plain(hidden, weight, a=None, b=None):
        z = hidden @ weight.T if a is None else hidden @ weight.T + a @ b.T
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if "softcap" in options:
            z = 4.0 * torch.tanh(z / 4.0) / 0.7
        logp = torch.log_softmax(z, -1).gather(-1, ids.clamp(0).unsqueeze(-1)).squeeze(-1)
        stats = ll.RowStats(logprob=torch.where(ids == -100, 0.0, logp))
        return dpo(stats, reference).mean(), None

    def ours(hidden, weight, a=None, b=None):
        main = {"main_grad": torch.zeros(V, D, device=DEVICE)} if how == "main_grad" else {}
        logits = ll.LinearLogits(
            hidden, weight, workspace=25 * V * hidden.itemsize, **main,
            low_rank=None if a is None else (a, b),
            logits_dtype=torch.float32 if how == "fp32 logits" else None,
        )  # fmt: skip
        value = ll.group_loss(dpo, logits, ids, groups=1, rows=(reference,), **options)
        return value, main.get("main_grad")

    found = gradients(torch.float64, plain), gradients(dtype, plain), gradients(dtype, ours)
    for want, theirs, mine in zip(*found, strict=True):
        error, allowed = ((t.double() - want).norm() / want.norm() for t in (mine, theirs))
        assert error <= 2 * allowed + 4 * torch.finfo(dtype).eps


def gemms_of(call) -> float:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / (2 * 2 * 4 * 8 * D * V)


@pytest.mark.parametrize("frozen", [False, True])
def test_gemms(frozen):
    """Two over a frozen weight, three otherwise, one more beyond the workspace."""
    lead = (2, 4, 8)
    hidden, weight, ids, _ = inputs(lead, 1, False, torch.float32, frozen)
    half = ids.index_fill(-1, torch.arange(4, 8, device=DEVICE), -100)
    reference = torch.zeros(2, 4, device=DEVICE)

    def run(ids, rows, reduction="mean"):
        logits = ll.LinearLogits(hidden, weight, workspace=rows * V * 4)
        ll.group_loss(
            dpo, logits, ids, groups=1, rows=(reference,), reduction=reduction
        ).sum().backward()

    floor = 2 if frozen else 3
    assert gemms_of(lambda: run(ids, 20)) == pytest.approx(floor)
    assert gemms_of(lambda: run(half, 20)) == pytest.approx(floor / 2)
    assert gemms_of(lambda: run(ids, 15)) == pytest.approx(floor + 1)
    assert gemms_of(lambda: run(ids, 20, "none")) == pytest.approx(2 if frozen else 4)
    assert gemms_of(lambda: run(ids, 64, "none")) == pytest.approx(floor)


@pytest.mark.parametrize("source", ["tensor", "small head", "frozen, groups fit", "lazy"])
def test_an_ignored_group_costs_nothing_even_if_its_formula_is_nan(source, monkeypatch):
    """Its loss and gradients are 0, and its upstream gradient can be NaN."""
    made, frozen = source_of(source, monkeypatch)
    hidden, weight, ids, _ = inputs((5, 6), 0, True, frozen=frozen)
    old = torch.randn(5, 6, dtype=torch.float64, device=DEVICE)
    old[4] = torch.inf
    old.requires_grad_()

    def per_token(stats, old):  # 0 / 0 for the last sequence
        counts = (stats.logprob != 0).to(old.dtype)
        return ((stats.logprob - old) * counts).sum(-1) / counts.sum(-1)

    loss = ll.group_loss(
        per_token, made(hidden, weight), ids, groups=0, rows=(old,), reduction="none"
    )
    assert loss[4] == 0
    assert loss.isfinite().all()
    upstream = torch.tensor([1.0, 2, 3, 4, torch.nan], dtype=torch.float64, device=DEVICE)
    d_hidden, d_old = torch.autograd.grad(loss, (hidden, old), upstream)
    for d in (d_hidden, d_old):
        assert (d[4] == 0).all()
        assert d.isfinite().all()
        assert d[:4].norm() > 0


@pytest.mark.parametrize("source", ["tensor", "small head", "frozen, groups fit", "lazy"])
@pytest.mark.parametrize(("lead", "groups"), [((0, 3), 0), ((2, 0, 3), 0), ((0,), [0, 0])])
def test_without_groups_or_rows(lead, groups, source, monkeypatch):
    """No groups, and groups without rows: loss 0, connected to the graph."""
    made, frozen = source_of(source, monkeypatch)
    hidden, weight, ids, _ = inputs(lead, groups, False, torch.float32, frozen)
    beside = torch.ones(lead, device=DEVICE, requires_grad=True)
    count = lead[0] if isinstance(groups, int) else len(groups)

    def formula(stats, row):
        return (stats.logprob * row).sum() + stats.logprob.new_ones(count)

    for reduction in ("mean", "none"):
        loss = ll.group_loss(
            formula, made(hidden, weight), ids, groups=groups, rows=(beside,), reduction=reduction
        ).sum()
        leaves = [hidden, beside, *([] if frozen else [weight])]
        gradients = torch.autograd.grad(loss, leaves)
        assert loss == 0
        assert [t.shape for t in gradients] == [t.shape for t in leaves]
        assert not any(t.any() for t in gradients)


def total(stats, *rows):
    return stats.logprob.flatten(1).sum(1)


@pytest.mark.parametrize(
    ("error", "message", "how"),
    [
        (IndexError, r"groups must be a dimension of the rows, in \[-2, 2\)", {"groups": 2}),
        (TypeError, "list of ints, got True", {"groups": True}),
        (TypeError, r"Pass lengths\.tolist\(\)", {"groups": torch.tensor([3, 3])}),
        (TypeError, "list of ints", {"groups": [1.0, 2.0]}),
        (ValueError, r"sum to N for logits \(N, V\)", {"groups": [3, 3]}),
        (ValueError, r"rows\[0\] must have size 3 in dim", {"rows": (torch.zeros(2, 4),)}),
        (TypeError, r"rows\[0\] must be a Tensor", {"rows": (1,)}),
        (ValueError, r"reduction must be one of", {"reduction": "avg"}),
        (TypeError, "formula must be a function", {"formula": 3}),
        (ValueError, r"one number per group, shape \(3,\), got \(3, 4\)",
         {"formula": lambda stats: stats.logprob}),
        (TypeError, r"stats.entropy \(pass entropy=True to group_loss\)",
         {"formula": lambda stats: stats.entropy.sum(-1)}),
    ],
)  # fmt: skip
def test_errors(error, message, how):
    how = {"formula": total, "groups": 0, **how}
    for logits in (torch.randn(3, 4, V), ll.LinearLogits(torch.randn(3, 4, D), torch.randn(V, D))):
        with pytest.raises(error, match=message):
            ll.group_loss(logits=logits, ids=torch.zeros(3, 4, dtype=torch.long), **how)


def test_a_formula_that_mixes_groups_is_found(monkeypatch):
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    logits, ids = torch.randn(4, 3, V), torch.zeros(4, 3, dtype=torch.long)
    head = ll.LinearLogits(torch.randn(4, 3, D), torch.randn(V, D), workspace=7 * V * 4)
    for source in (logits, head):
        ll.group_loss(total, source, ids)
        with pytest.raises(ValueError, match="formula must not mix groups"):
            ll.group_loss(lambda s: total(s) - total(s).mean(), source, ids)
    packed = {"groups": [4, 5, 3]}
    with pytest.raises(ValueError, match="formula must not mix groups"):
        ll.group_loss(
            lambda s: s.logprob.sum() + s.logprob.new_zeros(int(s.group[-1]) + 1),
            logits.view(12, V), ids.view(12), **packed,
        )  # fmt: skip


@pytest.mark.parametrize("groups", [[10, 4, 0, 10], 1])
@pytest.mark.few(1)
def test_compiled(groups):
    hidden, weight, ids, _ = inputs((2, 3, 4), 1, True, torch.float32)
    if not isinstance(groups, int):
        hidden, ids = hidden.detach().flatten(0, 2).requires_grad_(), ids.flatten()
    of = (0, 2)

    def formula(stats):
        if stats.group is not None:
            return stats.lse.new_zeros(4).index_add(0, stats.group, stats.logprob).square()
        return stats.logprob.sum(of).square()

    def step(hidden, weight, ids):
        return ll.group_loss(formula, ll.LinearLogits(hidden, weight), ids, groups=groups)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    results = []
    for run in (step, compiled):
        value = run(hidden, weight, ids)
        results.append((value, *torch.autograd.grad(value, (hidden, weight))))
    torch.testing.assert_close(*results)


def test_invariant_results_do_not_depend_on_the_batch():
    hidden, weight, ids, _ = inputs((5, 6), 0, False, torch.float32)
    with ll.invariant():
        logits = ll.LinearLogits(hidden.detach(), weight.detach())
        alone = ll.LinearLogits(hidden.detach()[3:4], weight.detach())
        every = ll.group_loss(total, logits, ids, reduction="none")
        assert torch.equal(every[3:4], ll.group_loss(total, alone, ids[3:4], reduction="none"))
