"""Sparse teachers: rows that do not count, slots that are masked, and shapes."""

import pytest
import torch

import logitless as ll
from tests.support import oracle
from tests.support.laws import error, value_and_grad
from tests.support.pairwise import pairwise
from tests.support.sparse_teachers import DIVERGENCES, SUPPORTS, V, both, make, mix


def test_leading_dimensions_and_strides(impl, device):
    x, targets = make(torch.float32, device)
    wide = torch.randn(2, 3, V, device=device)
    wide[:, :2] = x.view(2, 2, V)
    shaped = ll.SparseTargets(
        *(t.view(2, 2, *t.shape[1:]) for t in (targets.ids, targets.logprobs))
    )
    for support in SUPPORTS:
        how = {"divergence": "forward_kl", "support": support}
        flat = ll.SparseTargets(targets.ids, targets.logprobs)
        up = torch.ones((), device=device)
        want = value_and_grad(lambda x: ll.topk_distill(x, flat, **how), x, up)  # noqa: B023
        got = value_and_grad(lambda w: ll.topk_distill(w[:, :2], shaped, **how), wide, up)  # noqa: B023
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1][:, :2].reshape(4, V), want[1])
        assert not got[1][:, 2].any()
        one = ll.topk_distill(x[1], flat[1], reduction="none", **how)
        assert one.shape == ()
        torch.testing.assert_close(one, ll.topk_distill(x[1:2], flat[1:2], **how))


def test_no_rows(impl, device):
    x, targets = make(torch.float32, device)
    for support in SUPPORTS:
        leaf = x[:0].clone().requires_grad_()
        loss = ll.topk_distill(leaf, targets[:0], divergence="jsd", support=support)
        loss.backward()
        assert loss == 0
        assert leaf.grad.shape == (0, V)


class TestIgnoredRows:
    """A row whose label is ignored takes part in nothing, whatever it and its teacher hold."""

    @pairwise(support=SUPPORTS, ce_weight=[0.0, 0.5], softcap=[None, 5.0])
    def test_they_may_hold_anything(self, support, ce_weight, softcap, impl, device):
        x, targets = make(torch.float32, device)
        ids, logprobs = targets.ids.clone(), targets.logprobs.clone()
        labels = torch.tensor([1, -100, 2, 3], device=device)
        x[1], ids[1], logprobs[1] = torch.nan, -1, torch.nan
        how = {"divergence": "jsd", "support": support, "ce_weight": ce_weight, "softcap": softcap}
        up = torch.ones((), device=device)
        poisoned = ll.SparseTargets(ids, logprobs, targets.tail)
        got = value_and_grad(lambda x: ll.topk_distill(x, poisoned, labels=labels, **how), x, up)
        keep = [0, 2, 3]
        want = value_and_grad(
            lambda x: ll.topk_distill(x, targets[keep], labels=labels[keep], **how), x[keep], up
        )
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[1][keep], want[1])
        assert not got[1][1].any()

    @pytest.mark.parametrize("support", SUPPORTS)
    def test_an_ignore_index_that_is_an_id(self, support, impl, device):
        x, targets = make(torch.float32, device)
        labels = torch.tensor([1, 7, 2, 3], device=device)
        ids = targets.ids.clone()
        ids[0, 0] = 7
        how = {"divergence": "forward_kl", "support": support, "ignore_index": 7}
        targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
        got = ll.topk_distill(x, targets, labels=labels, **how)
        want = oracle.topk_distill(x.double(), targets, labels=labels, **how)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)

    def test_an_ignore_index_wider_than_the_ids(self, impl, device):
        x, targets = make(torch.float32, device)
        labels = torch.tensor([1, -(2**33), 2, 3], device=device)
        narrow = ll.SparseTargets(targets.ids.int(), targets.logprobs, targets.tail)
        how = {"divergence": "forward_kl", "support": "tail", "ignore_index": -(2**33)}
        for ce_weight in (0.0, 1.0):
            how |= {"labels": labels, "ce_weight": ce_weight}
            want = oracle.topk_distill(x.double(), targets, **how)
            got = ll.topk_distill(x, narrow, **how)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


class TestMaskedSlots:
    """A slot that does not count holds no id: nothing is read for it, and it repeats none."""

    @pairwise(divergence=DIVERGENCES, support=SUPPORTS, ce=[False, True])
    def test_is_as_if_it_were_not_there(self, divergence, support, ce, impl, device):
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
        up = torch.ones((), device=device)
        torch.testing.assert_close(
            value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, up),
            value_and_grad(lambda x: ll.topk_distill(x, fewer, **how), x, up),
        )

    @pytest.mark.parametrize("support", SUPPORTS)
    def test_the_only_one(self, support, impl, device):
        x, targets = make(torch.float32, device, k=1)
        keep = torch.tensor([[True], [False], [True], [True]], device=device)
        targets = ll.SparseTargets(targets.ids, targets.logprobs, targets.tail, keep)
        how = {"divergence": "forward_kl", "support": support}
        got, want = both(x, targets, **how)
        assert error(got[0], want[0]) < 1e-5
        assert error(got[1], want[1]) < 1e-5
        assert not got[1][1].any()


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
