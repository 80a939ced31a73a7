"""Heads of realistic or small sizes, and their gradients."""

import torch
import torch.nn.functional as F

from tests.support import oracle
from tests.support.sizes import DEVICE

MIB = 1 << 20


def make(rows, width, vocab, dtype):
    hidden = torch.randn(rows, width, device=DEVICE).to(dtype)
    weight = (torch.randn(vocab, width, device=DEVICE) * (2 / width**0.5)).to(dtype)
    return hidden, weight, torch.randint(vocab, (rows,), device=DEVICE)


def gradients(f, hidden, weight, *others):
    """The value of f, and the gradients of hidden and weight for an upstream gradient of 0.5.

    A factor of 0.5 causes no rounding.
    """
    h, W = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    out = f(h, W, *others)
    out.backward(torch.full_like(out, 0.5))
    return out.detach().double(), h.grad.double(), W.grad.double()


def unfused(h, W, target):
    return F.cross_entropy(F.linear(h, W).float(), target)


def truth(hidden, weight, target):
    return gradients(
        lambda h, W: oracle.cross_entropy(F.linear(h, W), target), hidden.double(), weight.double()
    )


def assert_as_exact(got, plain, truth, name=""):
    for a, b, c in zip(got, plain, truth, strict=True):
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 1e-6 * c.norm(), name
