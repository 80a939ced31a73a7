"""The slots of a sparse teacher: masses of 0, sizes, NaN and infinity, by each implementation.

`gathered` is gathered_kl, whose slots are given, and `gathered_renorm` the same over the slots that
count; of the other supports the slots are among logits.
"""

import itertools
import math

import pytest
import torch

import logitless as ll
from tests.support import oracle
from tests.support.laws import assert_as_good_as_torch, value_and_grad

INF = math.inf
SUPPORTS = ["truncate", "renorm_teacher", "renorm", "tail"]
GATHERED = ["gathered", "gathered_renorm"]
KINDS = {
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "tvd": {"divergence": "tvd"},
    "jsd": {"divergence": "jsd", "beta": 0.3},
}
CELLS = {
    f"{kind}-{support}": how | {"support": support}
    for kind, how in KINDS.items()
    for support in SUPPORTS
} | {name: {"divergence": "forward_kl", "support": name} for name in GATHERED}

by_cell = pytest.mark.parametrize("how", CELLS.values(), ids=CELLS.keys())


def make(rows=(5,), K=7, *, masks="none", tail=True, dtype=torch.float32, device="cpu"):
    """Logits over K + 3 classes, and K of a teacher's; row 1 of a mask is all masked."""
    x, t = (torch.randn(*rows, K + 3, dtype=torch.float64) * 2 for _ in range(2))
    order = torch.rand(*rows, K + 3).argsort(-1)
    log_p = t.log_softmax(-1).gather(-1, order)
    ids, logprobs = order[..., :K].to(device), log_p[..., :K].to(dtype).to(device)
    rest = log_p[..., K:].logsumexp(-1).float().to(device) if tail else None
    mask = None
    if masks != "none":
        mask = torch.rand(*rows, K, device=device) < 0.7
        mask[..., 0] = True
        if rows and rows[-1] > 1:
            mask[..., 1, :] = False
        if masks == "rubbish":
            rubbish = torch.tensor([-INF, torch.nan, INF], device=device)
            rubbish = rubbish.repeat(math.ceil(mask.numel() / 3))[: mask.numel()].view(mask.shape)
            logprobs = torch.where(mask, logprobs, rubbish.to(dtype))
            ids = torch.where(mask, ids, -7)
    return x.to(dtype).to(device), ll.SparseTargets(ids, logprobs, rest, mask)


def at(x, targets, support):
    """The logits at the ids; where a slot is masked, -inf or those of id 0, or anything."""
    mask = torch.ones_like(targets.ids).bool() if targets.mask is None else targets.mask
    z = x.gather(-1, torch.where(mask, targets.ids, 0))
    if support == "gathered_renorm":
        return z.masked_fill(~mask, torch.nan)
    some = torch.arange(z.shape[-1], device=z.device) % 2 == 0
    return z.masked_fill(~mask & some, -INF)


def gathered(module, x, targets, support):
    how = {"reduction": "none", "renormalise": support == "gathered_renorm"}
    return module.gathered_kl(at(x, targets, support), targets.logprobs, targets.mask, **how)


def ours(x, targets, *, support, divergence, beta=0.5):
    """One number a row."""
    if support in GATHERED:
        return gathered(ll, x, targets, support)
    how = {"divergence": divergence, "support": support, "beta": beta}
    return ll.topk_distill(x, targets, reduction="none", **how)


def naive(x, targets, *, support, divergence, beta=0.5):
    if support in GATHERED:
        return gathered(oracle, x, targets, support)
    how = {"divergence": divergence, "support": support, "beta": beta}
    return oracle.topk_distill(x, targets, reduction="none", **how)


def assert_right(x, targets, **how):
    """As exact as the definitions are in fp32, and everything given is left alone."""
    given = (x, targets.ids, targets.logprobs, targets.tail, targets.mask)
    kept = [None if t is None else t.clone() for t in given]
    assert_as_good_as_torch(
        lambda x: ours(x, targets, **how),
        lambda x: naive(x, targets, **how),
        x,
        computed_in=torch.float32,
    )
    for t, was in zip(given, kept, strict=True):
        assert t is None or torch.equal(t.nan_to_num(9.0), was.nan_to_num(9.0))


SIZES = [
    ((40,), 1), ((130,), 3), ((11,), 64), ((9,), 70), ((3,), 512), ((2,), 513), ((2, 3), 5),
    ((2, 1, 2), 4), ((), 6), ((1,), 4096), ((2,), 4097),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "K"), SIZES, ids=str)
def test_sizes(rows, K, impl, device):
    """Several programs, several rows a program, ragged both ways, more slots than one holds."""
    for masks, support in itertools.product(("none", "rubbish"), GATHERED):
        x, targets = make(rows, K, masks=masks, device=device)
        assert_right(x, targets, divergence="forward_kl", support=support)


SHAPES = [((6,), 3), ((3,), 70), ((2, 1, 2), 4), ((1, 4), 6)]


@by_cell
def test_shapes_of_every_kind(how, impl, device):
    for rows, K in (SHAPES[:2], SHAPES[2:])[how["divergence"] in ("tvd", "jsd")]:
        x, targets = make(rows, K, masks="rubbish", device=device)
        assert_right(x, targets, **how)


ENDS = {f"jsd {beta}": {"divergence": "jsd", "beta": beta} for beta in (0.0, 1.0)}


@pytest.mark.parametrize("how", [*KINDS.values(), *ENDS.values()], ids=[*KINDS, *ENDS])
def test_a_teacher_of_more_than_one(how, impl, device):
    """Rounding may bring P above 1: nothing is left for the bucket."""
    x, targets = make(tail=False, device=device)
    logprobs = targets.logprobs.log_softmax(-1) + 1e-6
    assert (logprobs.double().exp().sum(-1) > 1).all()
    targets = ll.SparseTargets(targets.ids, logprobs)
    assert_right(x, targets, support="tail", **how)
    finite = how["divergence"] != "reverse_kl" and how.get("beta") != 1.0
    assert ours(x, targets, support="tail", **how).isfinite().all() == finite


@pytest.mark.parametrize("log_top", [-1e-9, -3e-7, -1e-3, -0.2, -0.26, -0.7])
def test_a_sure_teacher_keeps_its_tail(log_top, impl, device):
    """1 - P to the last digit of log p: in fp32, 1 - exp(-1e-9) is 0.

    All of the student's mass is outside the ids, so that the loss is -log(1 - P).
    """
    logprobs = torch.tensor([[log_top, math.log(-math.expm1(log_top)) - 1]], device=device)
    x = torch.tensor([[-90.0, -90.0, 0.0, 0.0]], device=device)
    targets = ll.SparseTargets(torch.tensor([[1, 0]], device=device), logprobs)
    loss = ours(x, targets, divergence="reverse_kl", support="tail")
    top, other = logprobs.double()[0].tolist()
    want = torch.tensor([-math.log(-math.expm1(top) - math.exp(other))], dtype=torch.float64)
    torch.testing.assert_close(loss.double().cpu(), want, rtol=2e-6, atol=2e-6)


@by_cell
def test_slots_without_mass(how, impl, device):
    """p = 0 by itself, q = 0 by itself where that is finite, and both at once."""
    x, targets = make(masks="partial", device=device)
    ids, logprobs, mask = targets.ids, targets.logprobs.clone(), targets.mask.clone()
    mask[0], mask[2:] = True, True
    if how["divergence"] != "reverse_kl":
        logprobs[:, 2] = -INF
        if how["support"] not in GATHERED:
            logprobs[2] = -INF
    if how["divergence"] != "forward_kl":
        x.scatter_(-1, ids[:, 4:5], -INF)
    x.scatter_(-1, ids[:, 5:6], -INF)
    logprobs[:, 5] = -INF
    targets = ll.SparseTargets(ids, logprobs, targets.tail, mask)
    upstream = torch.ones(5, device=device)
    value, grad = value_and_grad(lambda x: ours(x, targets, **how), x, upstream)
    assert value.isfinite().all()
    assert grad.isfinite().all()
    if how["support"] in ("renorm_teacher", "renorm"):  # 0/0: no mass, which no definition can say
        kept = torch.tensor([0, 1, 3, 4], device=device)
        x, targets = x[kept], targets[kept]
    assert_right(x, targets, **how)


@pytest.mark.parametrize("support", SUPPORTS)
def test_infinite_divergences(support, impl, device):
    """As the formulas say: mass where the other has none. JSD and TVD stay finite."""
    x, targets = make((3,), device=device)
    logprobs = targets.logprobs.clone()
    logprobs[:, 3] = -INF
    no_p = ll.SparseTargets(targets.ids, logprobs, targets.tail)
    no_q = x.scatter(-1, targets.ids[:, 3:4], -INF)
    for divergence, s, t, beta in (
        ("reverse_kl", x, no_p, 0.5),
        ("jsd", x, no_p, 1.0),
        ("forward_kl", no_q, targets, 0.5),
        ("jsd", no_q, targets, 0.0),
    ):
        assert (ours(s, t, divergence=divergence, support=support, beta=beta) == INF).all()
    for divergence, s, t in itertools.product(("jsd", "tvd"), (x, no_q), (targets, no_p)):
        assert ours(s, t, divergence=divergence, support=support, beta=0.4).isfinite().all()
        assert_right(s, t, divergence=divergence, support=support, beta=0.4)


RENORMALISED = {
    name: how for name, how in CELLS.items() if how["support"] in ("renorm", "gathered_renorm")
}


@pytest.mark.parametrize("how", RENORMALISED.values(), ids=RENORMALISED.keys())
def test_a_student_without_mass_has_no_gradient(how, impl, device):
    x, targets = make(masks="partial", device=device)
    x[0].scatter_(-1, targets.ids[0], -INF)
    upstream = torch.ones(5, device=device)
    value, grad = value_and_grad(lambda x: ours(x, targets, **how), x, upstream)
    assert not value.isnan().any()
    assert torch.equal(grad[0], torch.zeros_like(grad[0]))
    assert grad.isfinite().all()


@by_cell
def test_nan_stays_in_its_row(how, impl, device):
    x, targets = make(masks="partial", device=device)
    logprobs = targets.logprobs.clone()
    x[2], logprobs[3, 0] = torch.nan, torch.nan
    targets = ll.SparseTargets(targets.ids, logprobs, targets.tail, targets.mask)
    upstream = torch.ones(5, device=device)
    value, grad = value_and_grad(lambda x: ours(x, targets, **how), x, upstream)
    assert value.isnan().tolist() == [False, False, True, True, False]
    assert grad[[0, 1, 4]].isfinite().all()


@pytest.mark.parametrize(("temperature", "offset"), [(1.0, 1e4), (3.0, -1e4), ("rows", 1e4)])
@pytest.mark.parametrize("support", ["renorm", "renorm with labels", *GATHERED])
def test_logits_may_have_an_offset(support, temperature, offset, impl, device):
    x, targets = make(device=device)
    x = (x * 256).round() / 256  # exact under the offset
    t = torch.linspace(0.3, 3, 5, device=device) if temperature == "rows" else temperature
    labels = torch.arange(5, device=device)

    def loss(x):
        if support in GATHERED:
            how = {"temperature": t, "renormalise": support == "gathered_renorm"}
            return ll.gathered_kl(at(x, targets, support), targets.logprobs, **how)
        with_labels = {"labels": labels, "ce_weight": 0.5} if support != "renorm" else {}
        how = {"divergence": "jsd", "support": "renorm", "temperature": t, **with_labels}
        return ll.topk_distill(x, targets, **how)

    upstream = torch.tensor(1.7, device=device)
    want = value_and_grad(loss, x, upstream)
    got = value_and_grad(loss, x + offset, upstream)
    for a, b in zip(got, want, strict=True):
        if impl == "eager" and support == "renorm with labels":  # whose lse holds the offset
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "view", [lambda t: t.mT.contiguous().mT, lambda t: t[:, 1:]], ids=["mT", "slice"]
)
@pytest.mark.parametrize("support", ["renorm", "tail", *GATHERED])
def test_strided_inputs(view, support, impl, device):
    """As the teacher's ids, log-probabilities and mask come, and the logits."""
    x, targets = make((4, 5), 9, masks="partial", device=device)
    ids, logprobs, mask = (view(t) for t in (targets.ids, targets.logprobs, targets.mask))
    tail = targets.tail[:, : ids.shape[1]]
    targets = ll.SparseTargets(ids, logprobs, tail, mask)
    assert_right(view(x), targets, divergence="forward_kl", support=support)


@pytest.mark.parametrize("support", ["renorm", "tail", *GATHERED])
def test_every_output_is_written(support, impl, device, monkeypatch):
    rows = 37 if support in GATHERED else 3  # of which a program takes several
    x, targets = make((rows,), 70, masks="rubbish", device=device)
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    assert_right(x, targets, divergence="forward_kl", support=support)


def poisoned(t):
    return t.fill_(torch.nan if t.is_floating_point() else 1)


@pytest.mark.parametrize("support", ["renorm", "tail", *GATHERED])
def test_a_result_may_be_written_to(support, impl, device):
    x, targets = make(device=device)
    leaf = x.requires_grad_()
    value = ours(leaf, targets, divergence="forward_kl", support=support)
    value.mul_(2).sum().backward()
    assert leaf.grad.isfinite().all()
    assert leaf.grad.any()
