"""Sparse teachers: every divergence, support and option against the fp64 definitions."""

import pytest
import torch

import logitless as ll
from logitless.contract import COEFFICIENTS, STATE
from logitless.core import evaluate
from logitless.kernels import config
from tests.support import oracle
from tests.support.inputs import on
from tests.support.laws import assert_as_good_as_torch, value_and_grad
from tests.support.pairwise import pairwise
from tests.support.sizes import BLOCK
from tests.support.sparse_teachers import (
    CELLS,
    DIVERGENCES,
    DTYPES,
    MATRIX,
    ROWS,
    SUPPORTS,
    K,
    V,
    both,
    make,
    masked,
    mix,
    told,
)

BACKENDS = {"eager float64": ("eager", torch.float64)} | {
    f"{impl} {str(dtype)[6:]}": (impl, dtype) for impl in ("eager", "triton") for dtype in DTYPES
}
ROW = torch.linspace(0.5, 2, ROWS)
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 2.5},
    "softcap": {"temperature": 2.0, "softcap": 3.0},
    "by rows": {"temperature": ROW, "row_weight": ROW},
}


@pairwise(
    cell=CELLS,
    backend=BACKENDS,
    mask=["none", "partial", "full", "poison"],
    options=OPTIONS,
    ce=[False, True],
    tail=[True, False],
    repeated=[False, True],
    teacher=DTYPES,
)
def test_definitions(cell, backend, mask, options, ce, tail, repeated, teacher, device):
    impl, dtype = backend
    x, targets = make(dtype, device, repeated=repeated, teacher=teacher)
    targets = told(masked(targets, mask), tail)
    how = cell | on(options, device) | {"t_squared": True}
    how |= mix(device=device) if ce else {}
    with ll.impl(impl), config.override(block_v=BLOCK):
        if dtype == torch.float64:
            for reduction in ("mean", "sum"):
                got, want = both(x, targets, reduction=reduction, **how)
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
            return
        how["reduction"] = "none"
        assert_as_good_as_torch(
            lambda x: ll.topk_distill(x, targets, **how),
            lambda x: oracle.topk_distill(x, targets, **how),
            x,
            computed_in=torch.float32,
        )


# --- faults that users of other libraries met


def test_rows_without_any_slot_are_0(impl, device):
    x, targets = make(torch.float32, device)
    none = torch.zeros_like(targets.ids)
    bad = torch.full_like(targets.logprobs, -torch.inf)
    for divergence, support in MATRIX if impl == "eager" else MATRIX[::3]:
        leaf = x.clone().requires_grad_()
        loss = ll.topk_distill(
            leaf, ll.SparseTargets(targets.ids * 0 - 5, bad, None, none),
            divergence=divergence, support=support,
        )  # fmt: skip
        loss.backward()
        assert loss == 0
        assert not leaf.grad.any()


def test_jsd_beside_minus_infinity(impl, device):
    x, _ = make(torch.float32, device)
    x[:, 3] = -torch.inf
    targets = ll.capture_topk(x, K)
    loss = ll.topk_distill(x.bfloat16(), targets, divergence="jsd", support="tail",
                           reduction="none")  # fmt: skip
    assert loss.isfinite().all()
    assert (loss >= 0).all()


# --- rows that do not count, and slots that are masked


@pairwise(support=SUPPORTS, ce_weight=[0.0, 0.5], softcap=[None, 5.0])
def test_ignored_rows_may_hold_anything(support, ce_weight, softcap, impl, device):
    x, targets = make(torch.float32, device)
    ids, logprobs = targets.ids.clone(), targets.logprobs.clone()
    labels = torch.tensor([1, -100, 2, 3], device=device)
    x[1], ids[1], logprobs[1] = torch.nan, -1, torch.nan
    how = {"divergence": "jsd", "support": support, "ce_weight": ce_weight, "softcap": softcap}
    poisoned = ll.SparseTargets(ids, logprobs, targets.tail)
    got = value_and_grad(lambda x: ll.topk_distill(x, poisoned, labels=labels, **how), x)
    keep = [0, 2, 3]
    want = value_and_grad(
        lambda x: ll.topk_distill(x, targets[keep], labels=labels[keep], **how), x[keep]
    )
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1][keep], want[1])
    assert not got[1][1].any()


@pytest.mark.parametrize("support", SUPPORTS)
def test_an_ignore_index_that_is_an_id(support, impl, device):
    x, targets = make(torch.float32, device)
    labels = torch.tensor([1, 7, 2, 3], device=device)
    ids = targets.ids.clone()
    ids[0, 0] = 7
    how = {"divergence": "forward_kl", "support": support, "ignore_index": 7}
    targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
    got = ll.topk_distill(x, targets, labels=labels, **how)
    want = oracle.topk_distill(x.double(), targets, labels=labels, **how)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_an_ignore_index_wider_than_the_ids(impl, device):
    x, targets = make(torch.float32, device)
    labels = torch.tensor([1, -(2**33), 2, 3], device=device)
    narrow = ll.SparseTargets(targets.ids.int(), targets.logprobs, targets.tail)
    how = {"divergence": "forward_kl", "support": "tail", "ignore_index": -(2**33)}
    for ce_weight in (0.0, 1.0):
        how |= {"labels": labels, "ce_weight": ce_weight}
        want = oracle.topk_distill(x.double(), targets, **how)
        got = ll.topk_distill(x, narrow, **how)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pairwise(divergence=DIVERGENCES, support=SUPPORTS, ce=[False, True])
def test_a_masked_slot_is_as_if_it_were_not_there(divergence, support, ce, impl, device):
    x, targets = make(torch.float32, device)
    x[:, 0] = 9.0  # what a slot that is taken for id 0 would find
    x.scatter_(-1, targets.ids[:, 1:2], 30.0)  # hardly anything is left outside
    keep = torch.zeros_like(targets.ids).bool()
    keep[:, 1::2] = True  # not the first
    wild = torch.where(keep, targets.ids, 2**31 - 5)
    targets = ll.SparseTargets(wild, targets.logprobs, targets.tail, keep)
    fewer = ll.SparseTargets(targets.ids[:, 1::2], targets.logprobs[:, 1::2], targets.tail)
    how = {"divergence": divergence, "support": support, "temperature": 2.0}
    how |= mix(device=device) if ce else {}
    torch.testing.assert_close(
        value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x),
        value_and_grad(lambda x: ll.topk_distill(x, fewer, **how), x),
    )


def test_an_ignored_row_is_0_whatever_multiplies_it(device):
    x = torch.randn(2, 9, device=device, requires_grad=True)
    targets = ll.capture_topk(torch.randn(2, 9, device=device), 3)
    labels = torch.tensor([1, -100], device=device)
    for reduction in ("mean", "none"):
        loss = ll.topk_distill(
            x, targets, divergence="forward_kl", support="tail", labels=labels, ce_weight=0.5,
            temperature=torch.tensor([2.0, torch.inf], device=device), t_squared=True,
            reduction=reduction,
        )  # fmt: skip
        assert loss.isfinite().all()
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert gradient.isfinite().all()
        assert not gradient[1].any()


@pytest.mark.parametrize("bad", [-1, -7, 37])
@pytest.mark.usefixtures("nobody_looks")
def test_a_bad_id_is_no_label_of_an_ignored_row(bad, device):
    targets = ll.capture_topk(torch.randn(2, 37, device=device), 3)
    ids = targets.ids.clone()
    ids[0, 0] = bad
    targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
    with ll.impl("triton"):
        loss = ll.topk_distill(
            torch.randn(2, 37, device=device), targets, divergence="forward_kl", support="tail",
            labels=torch.tensor([1, 2], device=device), reduction="none",
        )  # fmt: skip
    assert loss.isnan().tolist() == [True, False]


# --- autograd


def test_only_the_gradients_of_slots_are_kept(impl, device, monkeypatch):
    """Of what is as large as the ids, one tensor: at K = 512 each counts."""
    monkeypatch.setattr(evaluate, "on_gpu", lambda x: False)  # where a gradient waits for backward
    x, targets = make(torch.float32, device)
    x.requires_grad_()
    kept = []
    labels = torch.tensor([3, -100, 4, 5], device=device)
    for options in ({}, {"labels": labels, "ce_weight": 0.5, "temperature": 2.0}):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            ll.topk_distill(x, targets, divergence="jsd", support="tail", **options)
        wide = [t for t in kept if t.is_floating_point() and t.dim() == 2 and t.shape[1] < V]
        per_row = {(ROWS, STATE), (ROWS, COEFFICIENTS)}
        assert [tuple(t.shape) for t in wide if t.shape not in per_row] == [(ROWS, K)]


# --- errors


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"ce_weight": 0.5}, "ce_weight must be 0 without labels"),
        ({"targets": make()[1][:3]}, "targets must have rows"),
    ],
)
def test_bad_input(how, message):
    x, targets = make(torch.float32)
    how = {"targets": targets, "divergence": "jsd", "support": "tail", **how}
    with pytest.raises((TypeError, ValueError), match=message):
        ll.topk_distill(x, **how)


def test_bad_input_of_a_capture():
    x, targets = make(torch.float32)
    with pytest.raises(ValueError, match=r"k must be in \[1, 53\], got 54"):
        ll.capture_topk(x, 54)
    with pytest.raises(TypeError, match="must be one number for all rows, got a Tensor"):
        ll.capture_topk(x, 5, temperature=torch.ones(4))
    with pytest.raises(TypeError, match="divergence"):
        ll.topk_distill(x, targets, support="tail")  # pyright: ignore
