"""PyTorch's own inputs of its losses, over lazy logits: as near to fp64 as PyTorch's losses."""

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db

import logitless as ll

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LOSSES = {  # what is applied to the logits before the loss
    nn.CrossEntropyLoss: lambda z: z,
    nn.NLLLoss: lambda z: z.log_softmax(1 if z.dim() > 1 else 0),
    nn.KLDivLoss: lambda z: z.log_softmax(-1),
}
FLOOR = 8  # roundings of the largest number, beside twice PyTorch's own error against fp64


def inputs_of(kind: type, dtype: torch.dtype) -> list:
    info = next(m for m in module_db if m.module_cls is kind)
    device = torch.device("cpu")
    return list(info.module_inputs_func(info, device, dtype, requires_grad=False, training=True))


def lazy(logits: torch.Tensor) -> tuple:
    """Logits with the vocabulary at dimension 1 (or 0) as those of a head with weight identity."""
    at = 1 if logits.dim() > 1 else 0
    hidden = logits.movedim(at, -1).detach().clone().requires_grad_()
    eye = torch.eye(hidden.shape[-1], dtype=hidden.dtype)
    head = nn.Linear(*eye.shape, bias=False, dtype=hidden.dtype)
    head.weight = nn.Parameter(eye, requires_grad=False)
    model = ll.fuse(nn.Sequential(head), head="0")
    z = model(hidden)
    assert ll.is_fused(model)
    return hidden, z.movedim(-1, at)


def in_fp64(x):
    return x.double() if torch.is_tensor(x) and x.is_floating_point() else x


def assert_as_near(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor) -> None:
    """NaN where PyTorch has NaN, and otherwise at most twice as far from fp64."""
    assert got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    error, theirs = ((x.double() - exact).nan_to_num().abs().max() for x in (got, want))
    size = exact.nan_to_num().abs().max().clamp(min=1)
    assert error <= 2 * theirs + FLOOR * torch.finfo(want.dtype).eps * size


def run(kind: type, case, logits: torch.Tensor, leaf: torch.Tensor, of):
    """The loss and the gradient of a leaf; `of` casts the other tensors."""
    made, given = case.constructor_input, case.forward_input
    loss = kind(*map(of, made.args), **{k: of(v) for k, v in made.kwargs.items()})
    others = map(of, given.args[1:])
    value = loss(LOSSES[kind](logits), *others, **{k: of(v) for k, v in given.kwargs.items()})
    value.sum().backward()
    return value.detach(), leaf.grad


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LOSSES, ids=lambda kind: kind.__name__)
def test_inputs(kind, dtype):
    cases = inputs_of(kind, dtype)
    assert cases
    for case in cases:
        logits = case.forward_input.args[0]
        if logits.dim() == 0:  # KLDivLoss of one number: no vocabulary
            continue
        plain = logits.detach().clone().requires_grad_()
        want = run(kind, case, plain, plain, lambda x: x)
        double = logits.detach().double().requires_grad_()
        exact = run(kind, case, double, double, in_fp64)
        hidden, z = lazy(logits)
        value, found = run(kind, case, z, hidden, lambda x: x)
        assert_as_near(value, want[0], exact[0])
        at = 1 if logits.dim() > 1 else 0
        assert_as_near(found.movedim(-1, at), want[1], exact[1])
