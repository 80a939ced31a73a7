"""The divergence over K slots a row, against its definitions, by each implementation."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from laws import FLOOR, error, error_or_inf

import logitless as ll
from logitless.slots import divergence_over_slots

HERE = Path(__file__).parent
INF = math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUPPORTS = ["truncate", "renorm_teacher", "renorm", "tail", "gathered"]
DIVERGENCES = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("tvd", 0.5)] + [
    ("jsd", beta) for beta in (0.0, 0.3, 0.5, 1.0)
]
MASKS = ["none", "partial", "rubbish"]

by_divergence = pytest.mark.parametrize(
    ("divergence", "beta"), DIVERGENCES, ids=[f"{d}-{b}" for d, b in DIVERGENCES]
)
by_kind = pytest.mark.parametrize(  # as above, where the ends of JSD have nothing to add
    ("divergence", "beta"), [*DIVERGENCES[:3], ("jsd", 0.3)], ids=str
)
by_support = pytest.mark.parametrize("support", SUPPORTS)


def of_masses(log_p, log_q, divergence, beta):
    """Σ over a list of masses; a mass of 0 is left out of the sum it multiplies."""
    p, q = log_p.exp(), log_q.exp()
    if divergence == "jsd" and 0 < beta < 1:
        m, has_p, has_q = beta * p + (1 - beta) * q, p > 0, q > 0
        return (
            beta * (p[has_p] * (log_p[has_p] - m[has_p].log())).sum()
            + (1 - beta) * (q[has_q] * (log_q[has_q] - m[has_q].log())).sum()
        )
    if divergence == "forward_kl" or (divergence == "jsd" and beta == 0):
        some = p > 0
        return (p[some] * (log_p[some] - log_q[some])).sum()
    if divergence == "reverse_kl" or (divergence == "jsd" and beta == 1):
        some = q > 0
        return (q[some] * (log_q[some] - log_p[some])).sum()
    return 0.5 * (p - q).abs().sum()


def oracle(student, teacher, mask, student_tail, teacher_tail, *, divergence, support, beta):
    """Row by row, in the dtype of the student; masked slots are not in the lists at all."""
    K, shape = student.shape[-1], student.shape[:-1]
    rows = []
    for r in range(shape.numel()):
        log_q, log_p = student.reshape(-1, K)[r], teacher.reshape(-1, K)[r].to(student.dtype)
        if mask is not None:
            slots = mask.reshape(-1, K)[r].nonzero().squeeze(1)
            log_q, log_p = log_q[slots], log_p[slots]
        if len(log_q) == 0:
            rows.append(student.new_zeros(()))
            continue
        if support == "tail":
            if teacher_tail is None:
                rest = (1 - log_p.exp().sum()).clamp(min=0).log()
            else:
                rest = teacher_tail.reshape(-1)[r].to(student.dtype)
            log_p = torch.cat((log_p, rest.view(1)))
            log_q = torch.cat((log_q, student_tail.reshape(-1)[r].view(1).to(student.dtype)))
        if support in ("renorm", "renorm_teacher"):
            log_p = log_p - log_p.logsumexp(0)
        if support in ("renorm", "gathered"):
            log_q = log_q - log_q.logsumexp(0)
        rows.append(of_masses(log_p, log_q, divergence, beta))
    return torch.stack(rows).view(shape) if rows else student.new_zeros(shape)


def make(support, rows=(5,), K=7, dtype=torch.float32, device="cpu", masks="none", tail=True):
    """student, teacher, mask, student_tail, teacher_tail: of softmaxes over a few more classes."""
    logits = [torch.randn(*rows, K + 3, dtype=torch.float64) * 2 for _ in range(2)]
    log_q, log_p = (z.log_softmax(-1) for z in logits)
    rest_q, rest_p = (z[..., K:].logsumexp(-1).to(dtype).to(device) for z in (log_q, log_p))
    student = logits[0] if support in ("renorm", "gathered") else log_q
    student, teacher = (t[..., :K].to(dtype).to(device) for t in (student, log_p))
    mask = None
    if masks != "none":
        mask = torch.rand(*rows, K, device=device) < 0.7
        mask[..., 0] = True
        if rows and rows[-1] > 1:
            mask[..., 1, :] = False
        if masks == "rubbish":
            for t, values in (
                (student, (torch.nan, INF, -INF)),
                (teacher, (-INF, torch.nan, INF)),
            ):
                filling = torch.tensor(values, device=device).repeat(math.ceil(t.numel() / 3))
                t[~mask] = filling[: t.numel()].view(t.shape)[~mask].to(dtype)
    if support != "tail":
        return student, teacher, mask, None, None
    return student, teacher, mask, rest_q, rest_p if tail else None


def value_and_grads(f, args, upstream, dtype=None, **how):
    """f, and the gradients of the student and its tail, at leaves in a dtype."""
    student, teacher, mask, student_tail, teacher_tail = args
    leaves = [
        None if t is None else t.detach().to(dtype or t.dtype).clone().requires_grad_()
        for t in (student, student_tail)
    ]
    value = f(leaves[0], teacher, mask, leaves[1], teacher_tail, **how)
    asked = [t for t in leaves if t is not None]
    grads = torch.autograd.grad(value, asked, upstream.to(value.dtype), allow_unused=True)
    return [value.detach(), *(torch.zeros_like(t) if g is None else g
                              for t, g in zip(asked, grads, strict=True))]  # fmt: skip


def assert_right(args, *, factor=2.0, **how):
    """Value and gradients err at most twice as much as the definitions do in fp32."""
    student, _, mask, _, _ = args
    kept = [None if t is None else t.clone() for t in args]
    upstream = torch.randn(student.shape[:-1]).to(student.device)
    got = value_and_grads(divergence_over_slots, args, upstream, **how)
    truth = value_and_grads(oracle, args, upstream, torch.float64, **how)
    plain = value_and_grads(oracle, args, upstream, torch.float32, **how)
    assert got[0].dtype == torch.float32
    assert got[0].shape == student.shape[:-1]
    for i, (a, same, want) in enumerate(zip(got, plain, truth, strict=True)):
        rounding = FLOOR[torch.float32] + (torch.finfo(student.dtype).eps / 2 if i else 0)
        bound = factor * error_or_inf(same, want) + rounding
        assert error(a, want) <= bound, f"output {i}: error {error(a, want):.3g} > {bound:.3g}"
        assert a.dtype == (student.dtype if i else torch.float32)
    if mask is not None:
        assert (got[1][~mask] == 0).all()
    for t, was in zip(args, kept, strict=True):
        assert t is None or torch.equal(t.nan_to_num(9.0), was.nan_to_num(9.0))
    return got


@pytest.mark.parametrize("masks", MASKS)
@by_support
@by_divergence
def test_definitions(divergence, beta, support, masks, impl, device):
    """Every divergence by support and mask; row 1 of a mask is all masked."""
    args = make(support, masks=masks, device=device)
    value, *grads = assert_right(args, divergence=divergence, support=support, beta=beta)
    if masks != "none":
        assert value[1] == 0
        assert all((g[1] == 0).all() for g in grads)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@by_support
@by_kind
def test_half_precision(divergence, beta, support, dtype, impl, device):
    args = make(support, dtype=dtype, masks="rubbish", device=device)
    assert_right(args, divergence=divergence, support=support, beta=beta)


@pytest.mark.parametrize(
    ("rows", "K"),
    [((40,), 1), ((130,), 3), ((11,), 64), ((9,), 70), ((3,), 512), ((2,), 513), ((2, 3), 5),
     ((2, 1, 2), 4), ((), 6), ((1,), 4096)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("divergence", "support"), [("reverse_kl", "renorm"), ("jsd", "tail")])
def test_sizes(divergence, support, rows, K, impl, device):
    """Several programs, several rows a program, ragged both ways."""
    args = make(support, rows, K, masks="rubbish", device=device)
    assert_right(args, divergence=divergence, support=support, beta=0.3)


def test_more_slots_than_a_program_holds(impl, device):
    args = make("tail", (2,), 4097, masks="rubbish", device=device)
    assert_right(args, divergence="jsd", support="tail", beta=0.3)


@pytest.mark.parametrize(("rows", "K"), [(0, 4), (2, 0), (0, 0)])
@by_support
def test_nothing_to_compare(support, rows, K, impl, device):
    args = make(support, (rows,), 4, device=device)
    args = [t[..., :K] if t is not None and t.dim() == 2 else t for t in args]
    got = value_and_grads(
        divergence_over_slots, args, torch.ones(rows, device=device),
        divergence="jsd", support=support, beta=0.5,
    )  # fmt: skip
    assert torch.equal(got[0], torch.zeros(rows, device=device))
    assert got[1].shape == (rows, K)
    assert all((g == 0).all() for g in got[1:])


@pytest.mark.parametrize("masks", ["none", "partial"])
@pytest.mark.parametrize("tail", [True, False])
@by_divergence
def test_tail_given_or_the_rest(divergence, beta, masks, tail, impl, device):
    args = make("tail", masks=masks, tail=tail, device=device)
    assert_right(args, divergence=divergence, support="tail", beta=beta)


@by_divergence
def test_a_teacher_of_more_than_one(divergence, beta, impl, device):
    """Rounding may bring P above 1: nothing is left for the bucket."""
    student, teacher, _, tail, _ = make("tail", device=device)
    teacher = teacher.log_softmax(-1) + 1e-6
    assert (teacher.double().exp().sum(-1) > 1).all()
    how = {"divergence": divergence, "support": "tail", "beta": beta}
    value, _, d_tail = assert_right((student, teacher, None, tail, None), **how)
    if divergence == "forward_kl":
        assert (d_tail == 0).all()
    finite = divergence not in ("reverse_kl",) and (divergence, beta) != ("jsd", 1.0)
    assert value.isfinite().all() == finite


@pytest.mark.parametrize("log_top", [-1e-9, -3e-7, -1e-3, -0.2, -0.26, -0.7])
def test_a_sure_teacher_keeps_its_tail(log_top, impl, device):
    """1 - P to the last digit of log p: in fp32, 1 - exp(-1e-9) is 0."""
    teacher = torch.tensor([[log_top, math.log(-math.expm1(log_top)) - 1]], device=device)
    tail = torch.tensor([-2.0], device=device)
    args = (teacher - 1, teacher, None, tail, None)
    how = {"divergence": "forward_kl", "support": "tail", "beta": 0.5}
    _, _, d_tail = value_and_grads(divergence_over_slots, args, torch.ones(1, device=device), **how)
    top, other = teacher.double()[0].tolist()
    want = torch.tensor([math.expm1(top) + math.exp(other)], dtype=torch.float64)
    torch.testing.assert_close(d_tail.double().cpu(), want, rtol=2e-6, atol=0)


@by_support
@by_kind
def test_slots_without_mass(divergence, beta, support, impl, device):
    """p = 0 by itself, q = 0 by itself where that is finite, and both at once."""
    student, teacher, mask, *tails = make(support, masks="partial", device=device)
    mask[0], mask[2:] = True, True
    if divergence != "reverse_kl":
        teacher[:, 2] = -INF
        teacher[2] = -INF
    if divergence != "forward_kl":
        student[:, 4] = -INF
    student[:, 5] = teacher[:, 5] = -INF
    args = (student, teacher, mask, *tails)
    how = {"divergence": divergence, "support": support, "beta": beta}
    if support in ("renorm_teacher", "renorm"):  # 0/0 is no mass, which the definition cannot say
        kept = torch.tensor([0, 1, 3, 4], device=device)
        value, *grads = value_and_grads(
            divergence_over_slots, args, torch.ones(5, device=device), **how
        )
        assert value.isfinite().all()
        assert all(g.isfinite().all() for g in grads)
        args = tuple(None if t is None else t[kept] for t in args)
    value, *_ = assert_right(args, **how)
    assert value.isfinite().all()


@by_support
def test_infinite_divergences(support, impl, device):
    """As the formulas say: mass where the other has none. JSD and TVD stay finite."""
    student, teacher, *rest = make(support, device=device)
    no_p, no_q = teacher.clone(), student.clone()
    no_p[:, 3] = no_q[:, 3] = -INF
    for divergence, s, t, beta in (
        ("reverse_kl", student, no_p, 0.5),
        ("jsd", student, no_p, 1.0),
        ("forward_kl", no_q, teacher, 0.5),
        ("jsd", no_q, teacher, 0.0),
    ):
        how = {"divergence": divergence, "support": support, "beta": beta}
        assert (divergence_over_slots(s, t, *rest, **how) == INF).all()
    for divergence, s, t in itertools.product(("jsd", "tvd"), (student, no_q), (teacher, no_p)):
        how = {"divergence": divergence, "support": support, "beta": 0.4}
        assert_right((s, t, *rest), **how)
        assert divergence_over_slots(s, t, *rest, **how).isfinite().all()


@pytest.mark.parametrize("support", ["renorm", "gathered"])
@by_kind
def test_a_student_without_mass_has_no_gradient(divergence, beta, support, impl, device):
    student, teacher, mask, *tails = make(support, masks="partial", device=device)
    student[0] = -INF
    args = (student, teacher, mask, *tails)
    how = {"divergence": divergence, "support": support, "beta": beta}
    value, grad = value_and_grads(divergence_over_slots, args, torch.ones(5, device=device), **how)
    assert not value.isnan().any()
    assert torch.equal(grad[0], torch.zeros(7, device=device))
    assert grad.isfinite().all()


@by_support
@by_kind
def test_nan_stays_in_its_row(divergence, beta, support, impl, device):
    student, teacher, mask, *tails = make(support, masks="partial", device=device)
    student[2] = torch.nan
    teacher[3, 0] = torch.nan
    args = (student, teacher, mask, *tails)
    how = {"divergence": divergence, "support": support, "beta": beta}
    value, grad, *_ = value_and_grads(
        divergence_over_slots, args, torch.ones(5, device=device), **how
    )
    assert value.isnan().tolist() == [False, False, True, True, False]
    assert grad[[0, 1, 4]].isfinite().all()
    assert (grad[~mask] == 0).all()


@pytest.mark.parametrize("support", ["renorm", "tail"])
@by_kind
def test_a_student_like_its_teacher(divergence, beta, support, impl, device):
    """The divergence is 0 at its least: no value, and no gradient along the probabilities."""
    _, teacher, mask, _, tail = make(support, rows=(4,), K=70, masks="partial", device=device)
    mask = None if support == "tail" else mask
    args = (teacher, teacher, mask, tail, tail)
    how = {"divergence": divergence, "support": support, "beta": beta}
    value, *grads = value_and_grads(
        divergence_over_slots, args, torch.ones(4, device=device), **how
    )
    assert value.abs().max() <= 1e-6
    if divergence == "tvd":
        assert all((g == 0).all() for g in grads)
    # A change of probabilities keeps their sum: gradients by log q may be any multiple of q.
    for g, log_q in zip(grads, (teacher, tail), strict=False):
        slope = g / log_q.exp()
        level = slope.mean() if support == "tail" else 0.0
        assert ((slope - level) * log_q.exp()).abs().max() <= 1e-6


@pytest.mark.parametrize("support", ["renorm", "gathered"])
@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_logits_may_have_an_offset(support, offset, impl, device):
    student, teacher, *rest = make(support, device=device)
    student = (student * 256).round() / 256  # exact under the offset
    how = {"divergence": "jsd", "support": support, "beta": 0.5}
    ones = torch.ones(5, device=device)
    args, moved = (student, teacher, *rest), (student + offset, teacher, *rest)
    for a, b in zip(
        value_and_grads(divergence_over_slots, args, ones, **how),
        value_and_grads(divergence_over_slots, moved, ones, **how),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("masks", ["none", "partial"])
@by_support
@by_divergence
def test_gradcheck(divergence, beta, support, masks, device):
    student, teacher, mask, *tails = make(
        support, (2, 2), 4, torch.float64, masks=masks, device=device
    )
    if tails[0] is not None:
        tails[0].requires_grad_()

    def f(student, tail):
        return divergence_over_slots(
            student, teacher, mask, tail, tails[1],
            divergence=divergence, support=support, beta=beta,
        )  # fmt: skip

    with ll.impl("eager"):
        assert f(student, tails[0]).dtype == torch.float64
        assert torch.autograd.gradcheck(f, (student.requires_grad_(), tails[0]))


@pytest.mark.parametrize(
    "view", [lambda t: t.mT.contiguous().mT, lambda t: t[:, 1:]], ids=["mT", "slice"]
)
def test_strided_inputs(view, impl, device):
    args = make("tail", (4, 5), 9, torch.bfloat16, masks="partial", device=device)
    wide = [view(t) for t in args[:3]]
    tails = [t[:, : wide[0].shape[1]] for t in args[3:]]
    assert_right((*wide, *tails), divergence="jsd", support="tail", beta=0.5)


def test_every_output_is_written(impl, device, monkeypatch):
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))
    args = make("tail", (37,), 70, masks="rubbish", device=device)
    assert_right(args, divergence="jsd", support="tail", beta=0.5)


# --- autograd, functorch, the compiler


HOW = {"divergence": "jsd", "support": "tail", "beta": 0.3}


def test_backward_twice_through_a_retained_graph(impl, device):
    student, teacher, mask, tail, _ = make("tail", masks="partial", device=device)
    student.requires_grad_()
    tail.requires_grad_()
    loss = divergence_over_slots(student, teacher, mask, tail, None, **HOW).sum()
    first = torch.autograd.grad(loss, (student, tail), retain_graph=True)
    second = torch.autograd.grad(loss, (student, tail))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("which", [0, 3])
def test_only_who_asks_gets_a_gradient(which, impl, device):
    args = make("tail", device=device)
    args[which].requires_grad_()
    divergence_over_slots(*args, **HOW).sum().backward()
    assert [t is not None and t.grad is not None for t in args] == [i == which for i in range(5)]


@pytest.mark.parametrize("which", [0, 3])
def test_a_second_differentiation_raises(which, impl, device):
    args = make("tail", device=device)
    args[which].requires_grad_()
    loss = divergence_over_slots(*args, **HOW).sum()
    (grad,) = torch.autograd.grad(loss, args[which], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_a_result_may_be_written_to(impl, device):
    args = make("tail", device=device)
    value = divergence_over_slots(args[0].requires_grad_(), *args[1:], **HOW)
    value.mul_(2).sum().backward()
    assert args[0].grad.isfinite().all()


def test_functional_gradients(impl, device):
    student, *rest = make("renorm", masks="partial", device=device)
    how = {"divergence": "reverse_kl", "support": "renorm", "beta": 0.5}
    got = torch.func.grad(lambda s: divergence_over_slots(s, *rest, **how).sum())(student)
    want = torch.func.grad(lambda s: oracle(s, *rest, **how).sum())(student)
    torch.testing.assert_close(got, want)


@by_support
def test_compiles_whole(support, impl, device):
    torch._dynamo.reset()
    masks = "none" if support == "truncate" else "partial"
    args = make(support, (2, 3), masks=masks, dtype=torch.bfloat16, device=device)
    upstream = torch.randn(2, 3, device=device)
    how = {"divergence": "jsd", "support": support, "beta": 0.4}
    compiled = torch.compile(divergence_over_slots, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        value_and_grads(compiled, args, upstream, **how),
        value_and_grads(divergence_over_slots, args, upstream, **how),
        strict=True,
    ):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("support", "masks"), [("renorm", "none"), ("tail", "partial")])
def test_opcheck(support, masks, impl, device):
    ops = torch.ops.logitless
    student, *rest = make(support, (2, 3), masks=masks, dtype=torch.bfloat16, device=device)
    if support == "tail":
        rest[2].requires_grad_()
    args = (student.requires_grad_(), *rest, "jsd", support, 0.4)
    torch.library.opcheck(ops.slots.default, args)
    strided = [
        t.detach().mT.contiguous().mT if isinstance(t, torch.Tensor) and t.dim() > 1 else t
        for t in args
    ]
    torch.library.opcheck(ops.slots.default, tuple(strided))
    value, d_student, _ = ops.slots(*args)
    torch.library.opcheck(ops.slots_bwd.default, (student.detach(), d_student, value.detach()))


# --- ahead of time


def compile_for_hopper():
    """Prints the registers and spills of every variant; run where kernels aren't interpreted."""
    import aot
    import triton

    from logitless.kernels.slots import slots

    aot.TYPES[torch.uint8] = "*u8"
    triton.runtime.driver.set_active(aot.Driver(aot.TARGETS["cuda:90"]))
    variants = [(K, "renorm", d, torch.float32) for K in (64, 512) for d in ("reverse_kl", "jsd")]
    variants += [(K, "tail", "jsd", torch.bfloat16) for K in (64, 512, 4096)]
    variants += [(70, "truncate", "forward_kl", torch.float16), (1, "tail", "tvd", torch.float32)]
    for K, support, divergence, dtype in variants:
        args = make(support, (2,), K, dtype, masks="partial", tail=False)
        with aot.recording() as launches:
            slots(*args, divergence, support, 0.5)
        for source, options in launches:
            kernel = triton.compile(source, target=aot.TARGETS["cuda:90"], options=options)
            row = {"K": K, "support": support, "divergence": divergence}
            print(json.dumps(row | aot.resources(kernel.asm["ptx"], "sm_90a")), flush=True)


def test_compiles_ahead_of_time_for_hopper_without_spills():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(HERE.parent), str(HERE), *filter(None, [environment.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", "import test_slots; test_slots.compile_for_hopper()"],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 9
    assert not [row for row in rows if row["spills"]]
