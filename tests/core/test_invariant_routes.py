"""Inside `ll.invariant()`, the kernels and the splits do not depend on the number of rows.

Whether another split changes bits depends on the machine. So these tests do not compare bits. They
check which functions are called, and with which arguments.
"""

import contextlib
import importlib

import pytest
import torch

import logitless as ll
from logitless import eager, kernels
from logitless.contract import sums_of
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from logitless.kernels import config
from logitless.kernels.layout import describe
from logitless.kernels.statistics.forward import cut_of
from tests.support.invariance import interpreted
from tests.support.launches import launched

pytestmark = interpreted


def test_splits(monkeypatch):
    """For few rows, a GPU with many processors splits each row, except inside the block."""
    monkeypatch.setattr(config, "processors", lambda device: 132)
    x, device = torch.zeros(4000, 8), torch.device("cpu")
    many, few, one = (describe(x[:n].shape, (8, 1), 0, 2) for n in (4000, 40, 1))
    for wants in (("nll",), ("logprob", "entropy", "lse", "argmax"), ("logprob_t1",)):
        for vocab in (5000, 128256):
            cuts = {
                cut_of(rows._replace(vocab=vocab), device, sums_of(wants, False), cap, True)
                for rows in (many, few, one)
                for cap in (None, 20.0)
            }
            assert len(cuts) == 1
            assert cuts.pop().splits == 1
    light = sums_of(("nll",), True)
    assert cut_of(one._replace(vocab=5000), device, light, None, False).splits > 1


def test_splits_of_topk(monkeypatch):
    asked = []
    module = importlib.import_module("logitless.kernels.at_ids.topk")
    cut = module._cut
    monkeypatch.setattr(module, "_cut", lambda *args: asked.append(args) or cut(*args))
    with ll.impl("triton"), ll.invariant():
        for rows in (1, 3):
            ll.capture_topk(torch.randn(rows, 40), 2)
    assert len({*asked}) == 1


def test_small_heads_and_splits_by_columns(monkeypatch):
    def refused(*args):
        raise AssertionError

    monkeypatch.setattr("logitless.heads.linear.run_small", refused)
    monkeypatch.setattr("logitless.heads.on_chip.OnChipChunks.begin", refused)
    monkeypatch.setattr("logitless.heads.on_chip.BlockChunks.begin", refused)
    hidden, weight = torch.randn(3, 4), torch.randn(40, 4)
    for forced in (Cut(3, on_chip=True), Cut(3, 16)):
        with ll.impl("triton"), ll.invariant(), choose_cut.override(lambda work, cut=forced: cut):
            ll.cross_entropy(ll.LinearLogits(hidden, weight), torch.arange(3))


def test_a_gradient_over_a_head_takes_two_passes():
    """The one-pass kernel is not used, because its loss can differ from that without gradients."""
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(40, 4)
    found = []
    for block in (contextlib.nullcontext(), ll.invariant()):
        # A forced split keeps the head from being small.
        with (
            ll.impl("triton"),
            choose_cut.override(lambda work: Cut(2)),
            block,
            launched() as names,
        ):
            ll.cross_entropy(ll.LinearLogits(hidden, weight), torch.arange(3))
        found.append("_nll_fwd_bwd_kernel" in names)
    assert found == [True, False]


def spied(monkeypatch, module, name):
    """Returns a list that collects the first argument of each call of a backend's function."""
    seen, function = [], getattr(module, name)

    def spy(x, *args, **kwargs):
        seen.append(x)
        return function(x, *args, **kwargs)

    monkeypatch.setattr(module, name, spy)
    return seen


def test_plain_pytorch_computes_single_rows(monkeypatch):
    """Forward and backward get one row at a time, and the row starts on a 64-byte boundary."""
    read, gradient = (spied(monkeypatch, eager, name) for name in ("read", "gradient"))
    x, target = torch.randn(2, 3, 75, requires_grad=True), torch.zeros(2, 3, dtype=torch.int64)
    with ll.impl("eager"), ll.invariant():
        ll.cross_entropy(x, target).backward()
        y = torch.randn(6, 75, requires_grad=True) * 1
        ll.cross_entropy(y, target.view(6), inplace=True)
    assert len(read) == len(gradient) == 12
    for t in (*read, *gradient):
        assert t.shape == (1, 75)
        assert t.data_ptr() % 64 == 0


@pytest.mark.parametrize(("name", "backend"), [("eager", eager), ("triton", kernels)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_gemms_of_a_head(monkeypatch, name, backend, reduction):
    """row_gemm computes the logits (twice for results per row) and the gradient of hidden."""
    seen = spied(monkeypatch, backend, "row_gemm")
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    # A forced split keeps the head from being small. The eager backend computes single rows.
    with ll.impl(name), choose_cut.override(lambda work: Cut(2)):
        with ll.invariant():
            loss = ll.cross_entropy(
                ll.LinearLogits(hidden, weight), torch.arange(5), reduction=reduction
            )
        loss.backward(torch.ones_like(loss))
    chunks = 5 if name == "eager" else 3
    of_logits = [t for t in seen if t.shape[1] == 8]
    of_hidden = [t for t in seen if t.shape[1] == 16]
    assert len(of_logits) == chunks * (2 if reduction == "none" else 1)
    assert len(of_hidden) == chunks


@pytest.mark.parametrize("over_a_head", [False, True])
def test_the_logits_of_a_teacher(monkeypatch, over_a_head):
    """row_gemm computes a teacher's logits, also in a backward outside of the block."""
    seen = spied(monkeypatch, kernels, "row_gemm")
    hidden, student = torch.randn(3, 8), torch.randn(3, 16, requires_grad=True)
    with ll.impl("triton"):
        with ll.invariant():
            teacher = ll.LinearLogits(hidden, torch.randn(16, 8))
            trained = torch.randn(16, 16, requires_grad=True)
            source = ll.LinearLogits(student, trained) if over_a_head else student
            loss = ll.kl_div(source, teacher, direction="forward", reduction="none")
        loss.backward(torch.ones_like(loss))
    assert sum(t.shape == (3, 8) for t in seen) == (2 if over_a_head else 1)
