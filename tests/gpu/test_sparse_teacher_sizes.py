"""Distillation at real vocabularies, against the fp64 definitions."""

import pytest
import torch

import logitless as ll
from tests.support import oracle
from tests.support.laws import error, value_and_grad
from tests.support.sizes import DEVICE, sized
from tests.support.sparse_teachers import MATRIX

ROWS = 5
CASES = [  # K, dtype, mixed with cross-entropy, sure of the ids
    (sized(64, 20), torch.bfloat16, True, False),
    (sized(512, 40), torch.float32, False, True),
    (1, torch.float32, True, True),
]


def make(V, K, dtype, sure=False):
    g = torch.Generator(DEVICE).manual_seed(V + K)
    x = torch.randn(ROWS, V, device=DEVICE, generator=g).mul_(2)
    teacher = torch.log_softmax(torch.randn(ROWS, V, device=DEVICE, generator=g) * 3, -1)
    logprobs, ids = teacher.topk(K)
    ids[:, -1] = ids[:, 0]
    if sure:  # nearly all of the student's mass is on the ids
        x.scatter_(1, ids, 24.0)
    tail = torch.log1p(-logprobs.exp().sum(-1).clamp(max=1 - 1e-5))
    labels = torch.randint(V, (ROWS,), device=DEVICE, generator=g)
    labels[1] = -100
    return x.to(dtype), ll.SparseTargets(ids, logprobs, tail), labels


@pytest.mark.parametrize("V", sized([128256, 151936, 50257], [75]))
@pytest.mark.parametrize(("divergence", "support"), MATRIX)
def test_the_matrix(divergence, support, V):
    number = MATRIX.index((divergence, support))
    # Without a GPU one case after another, because tests/losses has the matrix at small sizes.
    for case in sized(CASES, CASES[number % 3 :][:1]):
        compare(divergence, support, V, *case)


def compare(divergence, support, V, K, dtype, mixed, sure):
    x, targets, labels = make(V, K, dtype, sure)
    how = {"divergence": divergence, "support": support, "temperature": 2.0, "t_squared": True}
    if mixed:
        how |= {"labels": labels, "ce_weight": 0.5, "kd_weight": 0.5}
    upstream = torch.ones((), device=DEVICE)
    got = value_and_grad(lambda x: ll.topk_distill(x, targets, **how), x, upstream)
    want = value_and_grad(lambda x: oracle.topk_distill(x, targets, **how), x.double(), upstream)
    assert error(got[0], want[0]) < 1e-4
    assert error(got[1], want[1]) < 1e-4 + torch.finfo(dtype).eps


@pytest.mark.parametrize("true", [1e-2, 1e-6, 1e-20])
@pytest.mark.parametrize("K", sized([64, 512, 1500], [40]))
def test_the_tail_without_cancellation(K, true):
    """All of the teacher's mass is outside the ids: the loss is -log of the student's there."""
    rows, V = sized((300, 128256), (2, 150))
    ids = torch.stack([torch.randperm(V, device=DEVICE)[:K] for _ in range(rows)])
    x = torch.zeros(rows, V, device=DEVICE)
    x.scatter_(1, ids, torch.tensor((V - K) * (1 - true) / true / K).log().item())
    nothing = torch.full((rows, K), -torch.inf, device=DEVICE)
    targets = ll.SparseTargets(ids, nothing, torch.zeros(rows, device=DEVICE))
    loss = ll.topk_distill(x, targets, divergence="forward_kl", support="tail", reduction="none")
    log_q = torch.log_softmax(x[:1].double(), -1)
    want = -oracle.log_mass_outside(log_q, ids[:1], torch.ones_like(ids[:1]).bool())
    torch.testing.assert_close(loss.double(), want.expand(rows), rtol=0, atol=1e-3)


BAD = [-1, "V", 2**40]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.usefixtures("nobody_looks")
def test_ids_out_of_range_make_their_row_nan(bad):
    V = sized(50257, 75)
    x, targets, _ = make(V, 8, torch.bfloat16)
    ids = targets.ids.clone()
    ids[3, 5] = V if bad == "V" else bad
    wrong = ll.SparseTargets(ids, targets.logprobs, targets.tail)
    for divergence, support in sized(MATRIX, MATRIX[BAD.index(bad) :: 3]):
        leaf = x.clone().requires_grad_()
        how = {"divergence": divergence, "support": support, "reduction": "none"}
        loss = ll.topk_distill(leaf, wrong, **how)
        loss.sum().backward()
        assert loss.isnan().tolist() == [False, False, False, True, False]
        assert leaf.grad[3].isnan().all()
        assert leaf.grad[[0, 1, 2, 4]].isfinite().all()
