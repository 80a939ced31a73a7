"""Dense-teacher losses against their definitions in fp64, by each implementation."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless import jsd, kl_div, soft_cross_entropy, tvd
from tests.support.calls import TEACHER, leaves
from tests.support.dense_teachers import (
    OPTIONS,
    ROWS,
    V,
    every_divergence,
    every_loss,
    make,
    naive,
    ours,
)
from tests.support.inputs import on
from tests.support.laws import FLOOR, assert_as_good_as_torch, error, value_and_grad

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


CASES = {name: (torch.float32, how) for name, how in OPTIONS.items()} | {
    f"all, {str(dtype)[6:]}": (dtype, OPTIONS["all"]) for dtype in DTYPES[1:]
}


@every_loss
@pytest.mark.parametrize(("dtype", "how"), CASES.values(), ids=CASES.keys())
@pytest.mark.usefixtures("small_blocks")
def test_value_and_gradient(loss, dtype, how, device):
    x, t = make(loss, dtype=dtype, device=device)
    how = on(how, device)
    assert_as_good_as_torch(
        lambda x: ours(x, t, loss, **how, reduction="none"),
        lambda x: naive(x, t, loss, **how, reduction="none"),
        x,
        factor=factor_of(how),
    )


def factor_of(how):
    """We multiply by a row's 1/T, which is rounded itself, where PyTorch divides."""
    return 4.0 if isinstance(how.get("temperature"), torch.Tensor) else 2.0


@every_loss
@pytest.mark.parametrize("how", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_gradcheck(loss, how, device):
    x, t = make(loss, vocab=13, dtype=torch.float64, device=device)
    how = on(how, device)
    assert torch.autograd.gradcheck(lambda x: ours(x, t, loss, **how), x.requires_grad_())


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_jsd_ends_in_the_kl_divergences(direction, impl, device):
    x, t = make(("jsd", 0.5), device=device)
    beta = {"forward": 0, "reverse": 1.0}[direction]
    upstream = torch.ones((), device=device)
    got = value_and_grad(lambda x: jsd(x, t, beta=beta), x, upstream)
    want = value_and_grad(lambda x: kl_div(x, t, direction=direction), x, upstream)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@every_divergence
@pytest.mark.parametrize("temperature", [2.5, torch.tensor([0.5, 1.0, 2.5])])
def test_t_squared_scales_value_and_gradient(loss, temperature, impl, device):
    x, t = make(loss, device=device)
    temperature = temperature.to(device) if isinstance(temperature, torch.Tensor) else temperature
    upstream = torch.randn(ROWS, device=device)
    how = {"temperature": temperature, "reduction": "none"}
    plain = value_and_grad(lambda x: ours(x, t, loss, **how), x, upstream)
    scaled = value_and_grad(lambda x: ours(x, t, loss, **how, t_squared=True), x, upstream)
    square = torch.as_tensor(temperature, device=device).expand(ROWS) ** 2
    torch.testing.assert_close(scaled[0], plain[0] * square)
    torch.testing.assert_close(scaled[1], plain[1] * square[:, None])


@every_divergence
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.usefixtures("small_blocks")
def test_a_student_that_is_the_teacher(loss, dtype, device):
    x, _ = make(loss, dtype=dtype, device=device)
    x[:, 3:9] = -torch.inf
    upstream = torch.ones(ROWS, device=device)
    value, grad = value_and_grad(
        lambda s: ours(s, x, loss, temperature=1.7, reduction="none"), x, upstream
    )
    assert torch.equal(value, torch.zeros_like(value))
    assert torch.equal(grad, torch.zeros_like(grad))


@every_divergence
def test_never_negative(loss, impl, device):
    t = torch.randn(8, V, device=device) * 2
    noise = torch.tensor([0, 1e-4, 1e-3, 1e-2], device=device).repeat(2)[:, None]
    x = (t + noise * torch.randn_like(t)).bfloat16()
    value = ours(x, t.bfloat16(), loss, reduction="none")
    assert (value >= 0).all()
    assert (value <= 1e-2).all()


@every_loss
@pytest.mark.usefixtures("small_blocks")
def test_offsets_cost_no_digits(loss, device):
    """A common 1e4 on either row is nothing to the loss."""
    x, t = make(loss, device=device)
    x, t = x.mul(8).round() / 8, t if loss[0] == "soft" else t.mul(8).round() / 8  # exact at 1e4
    upstream = torch.ones(ROWS, device=device)
    want = value_and_grad(lambda x: ours(x, t, loss, reduction="none"), x, upstream)
    moved = t if loss[0] == "soft" else t - 1e4
    got = value_and_grad(lambda x: ours(x, moved, loss, reduction="none"), x + 1e4, upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


# soft_cross_entropy is PyTorch's


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.usefixtures("small_blocks")
def test_soft_cross_entropy_is_pytorchs(smoothing, weighted, reduction, device):
    x, probs = make(("soft", None), device=device)
    how = {
        "label_smoothing": smoothing,
        "weight": torch.linspace(0, 2, V, device=device) if weighted else None,
        "reduction": reduction,
    }
    upstream = torch.randn((ROWS,) if reduction == "none" else (), device=device)
    got = value_and_grad(lambda x: soft_cross_entropy(x, probs, **how), x, upstream)
    want = value_and_grad(lambda x: F.cross_entropy(x, probs, **how), x, upstream)
    torch.testing.assert_close(got[0], want[0], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)


def test_soft_cross_entropy_of_one_hot_rows_is_cross_entropy(impl, device):
    x, _ = make(("soft", None), device=device)
    target = torch.randint(0, V, (ROWS,), device=device)
    probs = F.one_hot(target, V).float()
    x[probs == 0] = x[probs == 0].masked_fill(torch.rand_like(x[probs == 0]) < 0.2, -torch.inf)
    torch.testing.assert_close(soft_cross_entropy(x, probs), ll.cross_entropy(x, target))


def test_forward_kl_is_pytorchs(impl, device):
    x, t = make(("forward", None), device=device)
    want = F.kl_div(x.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean")
    torch.testing.assert_close(kl_div(x, t, direction="forward"), want)


@every_divergence
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_heads(loss, reduction, impl, device):
    """Student and teacher are heads of different widths; the teacher's gets no gradient."""
    parts = [torch.randn(n, 5, device=device) for n in (7, V)]
    teacher = [torch.randn(n, 9, device=device) / 2 for n in (7, V)]
    mask = torch.arange(7, device=device) != 2
    how = {"mask": mask, "temperature": 1.5, "reduction": reduction}
    upstream = torch.rand(7 if reduction == "none" else (), device=device)

    def trained(dtype, function):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in parts]
        value = function(*leaves, *(t.to(dtype) for t in teacher))
        return [value.detach(), *torch.autograd.grad(value, leaves, upstream.to(value.dtype))]

    def by_heads(h, w, th, tw):
        student = ll.LinearLogits(h, w, workspace=2 * V * 4)
        return ours(student, ll.LinearLogits(th, tw), loss, **how)

    def by_logits(h, w, th, tw):
        return naive(h @ w.T, th @ tw.T, loss, **how)

    got, torchs = trained(torch.float32, by_heads), trained(torch.float32, by_logits)
    for a, b, c in zip(got, torchs, trained(torch.float64, by_logits), strict=True):
        assert error(a, c) <= 2 * error(b, c) + FLOOR[torch.float32]


# What is refused


def test_bad_input_is_named(device):
    x, t = make(("jsd", 0.5), device=device)
    refused = [
        (ValueError, "direction must be one of 'forward', 'reverse', got 'up'.",
         lambda: kl_div(x, t, direction="up")),
        (ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'batchmean'.",
         lambda: kl_div(x, t, direction="forward", reduction="batchmean")),
        (ValueError, "reduction must be one of", lambda: soft_cross_entropy(x, t, reduction="no")),
        (ValueError, r"beta must be in \[0, 1\], got 1.5.", lambda: jsd(x, t, beta=1.5)),
        (TypeError, "beta must be a number, got '1'.", lambda: jsd(x, t, beta="1")),
        (ValueError, r"teacher must have shape \(3, 75\) to match student .*, got \(2, 75\).",
         lambda: jsd(x, t[:2])),
        (ValueError, "probs must have shape", lambda: soft_cross_entropy(x, t[:, :9])),
        (TypeError, "probs must be float16, bfloat16, float32 or float64, got torch.int64.",
         lambda: soft_cross_entropy(x, t.long())),
        (TypeError, "student must be a Tensor, got list.", lambda: jsd([1.0], t)),
        (ValueError, "teacher must be on .* like student, got meta.",
         lambda: jsd(x, t.to("meta"))),
        (ValueError, "teacher must not require grad, .*; pass teacher.detach",
         lambda: jsd(x, t.clone().requires_grad_())),
        (ValueError, "probs must not require grad, .*; pass probs.detach",
         lambda: soft_cross_entropy(x, t.clone().requires_grad_())),
        (ValueError, r"mask must have shape \(3,\)", lambda: jsd(x, t, mask=torch.ones(4))),
        (TypeError, "mask must be a Tensor, got list.", lambda: jsd(x, t, mask=[1])),
        (ValueError, r"row_weight must have shape \(3,\)",
         lambda: jsd(x, t, row_weight=torch.ones(4))),
        (ValueError, r"temperature must be in \[1e-12, 1e\+12\], got 0\.",
         lambda: jsd(x, t, temperature=0)),
        (ValueError, "label_smoothing must be in",
         lambda: soft_cross_entropy(x, t, label_smoothing=2)),
        (ValueError, "weight must have shape",
         lambda: soft_cross_entropy(x, t, weight=torch.ones(3, device=x.device))),
        (TypeError, "direction", lambda: kl_div(x, t)),  # pyright: ignore
        (ValueError, "reduction must be one of", lambda: tvd(x, t, reduction="batchmean")),
        (ValueError, r"temperature must be in", lambda: tvd(x, t, temperature=0)),
        (ValueError, r"mask must have shape \(3,\)", lambda: tvd(x, t, mask=torch.ones(4))),
        (TypeError, "beta", lambda: tvd(x, t, beta=0.5)),  # pyright: ignore
        (ValueError, "teacher must not require grad",
         lambda: tvd(x, t.clone().requires_grad_())),
    ]  # fmt: skip
    for kind, message, call in refused:
        with pytest.raises(kind, match=message):
            call()


def test_a_student_and_a_teacher_by_name():
    """ll.kl_div(student=a, teacher=b), as documented: "missing 'logits'"."""
    x = leaves("tensor")[0]
    for f, how in ((ll.kl_div, {"direction": "reverse"}), (ll.jsd, {}), (ll.tvd, {})):
        assert torch.equal(f(student=x, teacher=TEACHER, **how), f(x, TEACHER, **how))
