"""Distillation at real vocabularies, against the fp64 definitions, on a GPU."""

import pytest
import torch
from laws import error, value_and_grad
from test_distill import MATRIX, oracle

import logitless as ll

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS = 5


def make(V, K, dtype, sure=False):
    g = torch.Generator("cuda").manual_seed(V + K)
    x = torch.randn(ROWS, V, device="cuda", generator=g).mul_(2)
    teacher = torch.log_softmax(torch.randn(ROWS, V, device="cuda", generator=g) * 3, -1)
    logprobs, ids = teacher.topk(K)
    ids[:, -1] = ids[:, 0]
    if sure:  # nearly all of the student's mass is on the ids
        x.scatter_(1, ids, 24.0)
    tail = torch.log1p(-logprobs.exp().sum(-1).clamp(max=1 - 1e-5))
    labels = torch.randint(V, (ROWS,), device="cuda", generator=g)
    labels[1] = -100
    return x.to(dtype), ll.SparseTargets(ids, logprobs, tail), labels


@pytest.mark.parametrize("V", [128256, 151936, 50257])
@pytest.mark.parametrize(("divergence", "support"), MATRIX)
def test_the_matrix(divergence, support, V):
    for K, dtype, mixed, sure in (
        (64, torch.bfloat16, True, False),
        (512, torch.float32, False, True),
        (1, torch.float32, True, True),
    ):
        x, targets, labels = make(V, K, dtype, sure)
        how = {"divergence": divergence, "support": support, "temperature": 2.0, "t_squared": True}
        if mixed:
            how |= {"labels": labels, "ce_weight": 0.5, "kd_weight": 0.5}
        upstream = torch.ones((), device="cuda")
        got = value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, upstream)  # noqa: B023
        want = value_and_grad(lambda x: oracle(x, targets, **how), x.double(), upstream)  # noqa: B023
        assert error(got[0], want[0]) < 1e-4
        assert error(got[1], want[1]) < 1e-4 + torch.finfo(dtype).eps


@pytest.mark.parametrize("true", [1e-2, 1e-6, 1e-20])
@pytest.mark.parametrize("K", [64, 512, 1500])
def test_the_tail_without_cancellation(K, true):
    from logitless.stats import measure

    V = 128256
    ids = torch.stack([torch.randperm(V, device="cuda")[:K] for _ in range(300)])
    x = torch.zeros(300, V, device="cuda")
    x.scatter_(1, ids, torch.tensor((V - K) * (1 - true) / true / K).log().item())
    tail = measure(x, ids, normalised=True, outside=0).tail
    want = torch.softmax(x[0].double(), -1).scatter(0, ids[0], 0.0).sum().log()
    torch.testing.assert_close(tail.double(), want.expand(300), rtol=0, atol=1e-3)


def test_ids_out_of_range_make_their_row_nan():
    x, targets, _ = make(50257, 8, torch.bfloat16)
    for bad in (-1, 50257, 2**40):
        ids = targets.ids.clone()
        ids[3, 5] = bad
        wrong = ll.SparseTargets(ids, targets.logprobs, targets.tail)
        for divergence, support in MATRIX:
            leaf = x.clone().requires_grad_()
            how = {"divergence": divergence, "support": support, "reduction": "none"}
            loss = ll.topk_distill(leaf, wrong, **how)
            loss.sum().backward()
            assert loss.isnan().tolist() == [False, False, False, True, False]
            assert leaf.grad[3].isnan().all()
            assert leaf.grad[[0, 1, 2, 4]].isfinite().all()


def test_no_synchronisation():
    x, targets, labels = make(32000, 16, torch.bfloat16)
    for divergence, support in MATRIX:
        for mixed in ({}, {"labels": labels, "ce_weight": 0.5, "temperature": 2.0}):
            leaf = x.clone().requires_grad_()
            torch.cuda.set_sync_debug_mode("error")
            try:
                ll.topk_distill(
                    leaf, targets, divergence=divergence, support=support, **mixed
                ).backward()
                ll.capture_topk(x, 16)
            finally:
                torch.cuda.set_sync_debug_mode("default")
