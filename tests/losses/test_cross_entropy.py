"""Cross-entropy and its options against the fp64 oracle, by each implementation."""

import math

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from tests.support import oracle
from tests.support.calls import CLASSES, TARGET, leaves, made, normal
from tests.support.inputs import ROWS, V, make, on
from tests.support.laws import assert_as_good_as_torch, error, value_and_grad
from tests.support.pairwise import pairwise
from tests.support.paths import ROOT
from tests.support.sizes import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]


OPTIONS = {
    "plain": {},
    "weight": {"weight": torch.linspace(0.1, 2, V)},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing+weight": {"label_smoothing": 0.3, "weight": torch.linspace(0, 2, V)},
    "z_loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 5.0},
    "temperature": {"temperature": 0.7},
    "row temperature": {"temperature": torch.linspace(0.5, 1.5, ROWS)},
    "row_weight": {"row_weight": torch.tensor([-1.0, 0.5, 2.0, 0.0])},
    "all": {
        "weight": torch.linspace(0.1, 2, V),
        "label_smoothing": 0.2,
        "z_loss": 1e-3,
        "softcap": 6.0,
        "temperature": 1.3,
        "row_weight": torch.tensor([-1.0, 0.5, 2.0, 3.0]),
    },
}


@pairwise(options=OPTIONS, dtype=DTYPES, reduction=REDUCTIONS)
@pytest.mark.usefixtures("small_blocks")
def test_cross_entropy(dtype, options, reduction, device):
    x, target = make(dtype=dtype, device=device)
    target[2] = -100
    how = on(options, device) | {"reduction": reduction}
    assert_as_good_as_torch(
        lambda x: ll.cross_entropy(x, target, **how),
        lambda x: oracle.cross_entropy(x, target, **how),
        x,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_is_fp32(dtype, reduction, impl, device):
    """Loss returned or accumulated in bf16: 1.6e-2 off."""
    x = (torch.randn(12, 50, device=device) * 2).to(dtype)
    target = torch.randint(0, 50, (12,), device=device)
    got = ll.cross_entropy(x, target, reduction=reduction)
    want = oracle.cross_entropy(x.double(), target, reduction=reduction)
    assert got.dtype == torch.float32
    assert error(got, want) <= 1e-6
    assert error(want.to(dtype), want) > 1e-5, "the bug would not show on these numbers"


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_true_class_gradient_is_rounded_once(dtype, inplace, impl, device):
    """True-class gradient rounded before subtracting 1: 100 % off at p = 0.999 in bf16."""
    V, target = 65, torch.tensor([7, 0], device=device)
    x = torch.zeros(2, V, device=device)
    x[[0, 1], target] = math.log(999 * (V - 1))
    x = x.to(dtype)
    want = value_and_grad(lambda x: F.cross_entropy(x, target, reduction="sum"), x.double())[1]
    got = value_and_grad(
        lambda x: ll.cross_entropy(x * 1, target, reduction="sum", inplace=inplace),
        x,
        torch.ones((), device=device),
    )[1]
    at = target[:, None]
    relative = (got.double().gather(1, at) / want.gather(1, at) - 1).abs()
    assert (relative <= torch.finfo(dtype).eps).all()
    assert (want.gather(1, at).abs() < 2e-3).all()


def test_an_ignored_row_reads_no_class_weight(impl, device):
    x, target = make(device=device)
    target[0], target[1:] = -100, 3
    weight = torch.ones(V, device=device)
    weight[0] = torch.inf
    loss = ll.cross_entropy(x, target, weight=weight, reduction="none")
    torch.testing.assert_close(loss, F.cross_entropy(x, target, weight=weight, reduction="none"))


def test_an_ignore_index_beyond_int32_is_no_class(impl, device):
    x, target = make(device=device)
    want = F.cross_entropy(x, torch.zeros_like(target))
    got = ll.cross_entropy(x, torch.zeros_like(target).int(), ignore_index=2**32)
    torch.testing.assert_close(got, want)


def test_classes_in_dimension_1_are_told_where_shapes_cannot_tell():
    """(B, V, T) logits with V = T: another loss than F.cross_entropy's, and nothing can see it."""
    x, labels = normal(2, 4, 4, seed=1), torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
    want = F.cross_entropy(x, labels)
    assert not torch.allclose(ll.cross_entropy(x, labels), want)
    torch.testing.assert_close(ll.cross_entropy(x.movedim(1, -1), labels), want)
    page = (ROOT / "docs/migrating.md").read_text()
    for words in (ll.cross_entropy.__doc__, ll.nn.CrossEntropyLoss.__doc__, page):
        assert "movedim(1, -1)" in words


@pytest.mark.parametrize("source", ["tensor", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_class_weights_of_an_fp64_head_are_summed_in_fp64(dtype, source):
    """The mass that a mean divides by was summed in fp32."""
    parts = leaves(source, torch.float64)
    weight = (CLASSES.double() / 3).to(dtype)
    got = ll.cross_entropy(made(source, parts), TARGET, weight=weight, label_smoothing=0.1)
    x = parts[0] if source == "tensor" else F.linear(*parts)
    want = F.cross_entropy(x, TARGET, weight=weight.double(), label_smoothing=0.1)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "int32", "uint16", "uint32", "uint64"])
@pytest.mark.usefixtures("impl")
def test_narrow_targets_are_compared_as_numbers(name, device):
    """156 in uint8 is not -100, and a vocabulary longer than the type is no obstacle."""
    V = 300
    dtype = getattr(torch, name)
    x = torch.randn(3, V, device=device)
    target = torch.tensor([min(156, torch.iinfo(dtype).max), 3, 120], device=device)
    weight, row_weight = torch.rand(V, device=device), torch.rand(3, device=device)
    for how in ({}, {"weight": weight}, {"row_weight": row_weight}):
        want = ll.cross_entropy(x, target, **how)
        got = ll.cross_entropy(x, target.to(dtype), **how)
        assert torch.equal(got, want)
