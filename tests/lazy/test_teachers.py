"""Lazy logits of a teacher, and of scaled heads."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.lazy import report
from logitless.lazy.logits import LazyLogits
from tests.support.laws import error
from tests.support.lazy_models import distilled, model


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_teacher_stays_lazy_where_asked(without, x, t):
    """Its logits are never made whole, whatever the model does to them; sampling is left alone."""
    student, teacher = model(True, x.device), model(True, x.device)
    teacher[0].weight.data.mul_(2)
    with without():
        plain = torch.tanh(teacher(x)[:, 1:] * 3 / 5) * 5
        with ll.lazy_logits():
            z = torch.tanh(teacher(x)[:, 1:] * 3 / 5) * 5
        assert type(teacher(x)) is torch.Tensor
    assert (type(plain), type(z)) == (torch.Tensor, LazyLogits)
    for loss in (
        lambda teacher: ll.kl_div(
            student(x)[:, 1:], teacher, direction="forward", mask=t[:, 1:] > 1
        ),
        lambda teacher: ll.jsd(student(x)[:, 1:], teacher, reduction="none", temperature=2.0).sum(),
        lambda teacher: ll.tvd(student(x)[:, 1:], teacher, mask=t[:, 1:] > 1, softcap=4.0),
        lambda teacher: ll.topk_distill(
            student(x)[:, 1:], ll.capture_topk(teacher, 3), divergence="jsd", support="tail"
        ),
    ):
        weights = list(student.parameters())
        got, want = (torch.autograd.grad(loss(of), weights) for of in (z, plain.clone()))
        for a, b in zip(got, want, strict=True):
            assert error(a, b) < 1e-11
    assert not z.known
    logits = student(x)[:, 1:].materialize()
    got, want = (ll.kl_div(logits, of, direction="reverse") for of in (z, plain.clone()))
    assert error(got, want) < 1e-11


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (lambda z, t: ll.cross_entropy(z.log_softmax(-1), t), "log-probabilities"),
        (lambda z, t: ll.entropy(z.mT), "transposed logits"),
        (lambda z, t: ll.entropy(z.tanh(), softcap=2.0), "logits capped twice"),
        (lambda z, t: distilled(z / 3, labels=t, ce_weight=0.5), "scaled logits, with labels"),
    ],
)
def test_our_losses_say_why_they_materialise(loss, cause, x, t, monkeypatch):
    monkeypatch.setattr(report, "_warned", set())
    with pytest.warns(UserWarning, match=f"materialised by a loss of logitless over {cause}"):
        loss(model(True, x.device)(x), t)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1 / 0.7, 4.0])
def test_a_scale_costs_no_bits(scale, dtype, device):
    """Hidden states are not rounded again, nor do they overflow."""
    hidden = torch.randn(40, 64, device=device).to(dtype)
    hidden[0, 0] = 3e4
    weight = (torch.randn(300, 64, device=device) * 0.3).to(dtype)
    weight[:, 0] *= 1e-4
    target = torch.randint(300, (40,), device=device)
    z = ll.LinearLogits(hidden, weight, logits_dtype=torch.float32)
    exact = scale * F.linear(hidden.double(), weight.double())
    beside = ll.LinearLogits(hidden.flip(0), weight, logits_dtype=torch.float32)
    for loss in (
        lambda z, teacher: ll.cross_entropy(z, target),
        lambda z, teacher: ll.kl_div(z, teacher, direction="forward", temperature=3.0),
        lambda z, teacher: ll.kl_div(teacher, z, direction="forward", temperature=3.0),
    ):
        got, want = loss(z * scale, beside), loss(exact, exact.flip(0) / scale)
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-6)
