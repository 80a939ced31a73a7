"""A small model with a fused or a plain head, and assertions that both train in the same way."""

import warnings

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from tests.support.laws import error

B, T, D, V = 2, 5, 6, 11


def model(fused: bool, device="cpu", bias=True, dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    head = (ll.nn.FusedHead if fused else nn.Linear)(D, V, bias=bias)
    return nn.Sequential(nn.Linear(4, D), head).to(device, dtype)


def trained(m, x, loss):
    value = loss(m(x))
    grads = torch.autograd.grad(value, list(m.parameters()), retain_graph=True)
    return [value.detach(), *grads]


def assert_alike(x, program, within=1e-11, **how):
    """program(m) gives the same tensors over a fused and a plain head m."""
    want, got = (program(model(fused, x.device, **how)) for fused in (False, True))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert error(a, b.double()) < within


def assert_same(x, loss, **how):
    assert_alike(x, lambda m: trained(m, x, loss), **how)


def backward(m, loss):
    """The gradients of the parameters of m, by Tensor.backward."""
    loss.backward()
    return [p.grad for p in m.parameters()]


def assert_stays_lazy(x, loss, bias=True):
    """The same loss and gradients, and the values are never computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = model(True, x.device, bias)(x)
        loss(z).backward()
        assert not z.known
        assert_same(x, loss, bias=bias)


def columns(z):
    """One number per column."""
    return torch.linspace(0, 1, V).to(z)


def other(z):
    """Other logits."""
    return torch.linspace(-2, 1, z.numel()).sin().to(z).view(z.shape)


def distilled(z, **how):
    top = ll.capture_topk(torch.tanh(z.detach() * 2), 3)
    return ll.topk_distill(z, top, divergence="jsd", support="tail", temperature=2.0, **how)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest memory that an operation returns."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(result):
            if type(t) is torch.Tensor and t.is_floating_point():
                self.size = max(self.size, t.untyped_storage().nbytes() // t.element_size())
        return result
