"""The gradient at several ids per row: put right span by span, after the columns around them."""

import torch

import logitless as ll
from logitless.kernels import config
from tests.support import oracle
from tests.support.laws import assert_as_good_as_torch, error, value_and_grad
from tests.support.pairwise import pairwise
from tests.support.sparse_teachers import DTYPES, ROWS, SUPPORTS, both, make


class TestSpans:
    """Several ids a row are put right span by span, after the columns around them."""

    @pairwise(
        dtype=DTYPES,
        ce=[False, True],
        temperature=[1.0, 2.0],
        cut=[{"block_v": 16, "span": 32}, {"block_v": 64, "span": 64}],
    )
    def test_ids_at_every_edge(self, dtype, ce, temperature, cut, impl, device):
        """Repeated within a span and across them, on a span's ends, in the fringe."""
        vocab, k = 103, 20
        x, targets = make(dtype, device, vocab=vocab, k=k)
        ids = targets.ids.clone()
        edges = [0, 31, 32, 63, 64, vocab - 1]
        ids[0, : len(edges)] = torch.tensor(edges, device=device)
        ids[1, -1], ids[2, : k // 2] = ids[1, 0], ids[2, k // 2].clone()
        targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
        how = {"divergence": "jsd", "support": "tail", "temperature": temperature}
        if ce:  # a label that the teacher has as well, one that it has twice, and one it may not
            labels = torch.stack([ids[0, 0], ids[1, 0], ids[2, 0] * 0 + 5, ids[3, 2]])
            how |= {"labels": labels, "ce_weight": 0.3, "kd_weight": 0.7}
        up = torch.ones((), device=device)
        wide = torch.zeros(ROWS, vocab + 3, dtype=dtype, device=device)
        wide[:, 1:-2] = x
        want = value_and_grad(lambda x: oracle.topk_distill(x, targets, **how), x.double(), up)
        with config.override(**cut):
            got = value_and_grad(lambda w: ll.topk_distill(w[:, 1:-2], targets, **how), wide, up)
        assert error(got[0], want[0]) < 1e-4
        assert error(got[1][:, 1:-2], want[1]) < 2e-5 + torch.finfo(dtype).eps
        assert not got[1][:, 0].any()
        assert not got[1][:, -2:].any()

    def test_more_slots_than_a_program_looks_at_once(self, impl, device):
        x, targets = make(torch.bfloat16, device, rows=1, vocab=800, k=560)
        ids = targets.ids.clone()
        ids[0, 550] = ids[0, 3]
        targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
        how = {"divergence": "forward_kl", "support": "tail"}
        got, want = both(x, targets, **how)
        assert error(got[1], want[1]) < 2e-5 + torch.finfo(torch.bfloat16).eps

    def test_softcap_and_a_gradient_a_row(self, impl, device):
        """Every term of the one backward at repeated ids, against autograd."""
        x = torch.randn(3, 90, device=device) * 3
        ids = torch.randint(0, 90, (3, 40), device=device)
        weights = torch.randn(3, 40, device=device)
        how = {"temperature": 0.7, "softcap": 4.0}

        def naive(x):
            picked = (oracle.picked(x, ids, **how) * weights.to(x)).sum(-1)
            rest = oracle.entropy(x, **how) + 0.1 * oracle.total(x, **how)
            return picked + rest + 2 * oracle.logsumexp(x, **how)

        def ours(x):
            found = ll.row_stats(x, ids, **how, entropy=True, total=True)
            picked = (found.picked * weights).sum(-1)
            return picked + found.entropy + 0.1 * found.total + 2 * found.lse

        with config.override(block_v=16, span=48):
            assert_as_good_as_torch(ours, naive, x)

    @pairwise(support=SUPPORTS, ce=[False, True], temperature=[1.0, 2.0])
    def test_a_dead_row_has_no_gradient(self, support, ce, temperature, impl, device):
        x, targets = make(torch.float32, device)
        x[1] = -torch.inf
        how = {"divergence": "forward_kl", "support": support, "reduction": "none"}
        how |= {"labels": targets.ids[:, 0], "ce_weight": 0.5} if ce else {}
        leaf = x.requires_grad_()
        loss = ll.topk_distill(leaf, targets, temperature=temperature, **how)
        loss[[0, 2, 3]].sum().backward()
        assert not leaf.grad[1].any()
        assert leaf.grad[[0, 2, 3]].isfinite().all()


@pairwise(support=["tail", "truncate"], temperature=[1.0, 2.0], repeated=[False, True])
def test_a_label_among_the_teacher_s_ids(support, temperature, repeated, device):
    """The most common of labels: its slot and the teacher's write to one place."""
    x, targets = make(torch.float32, device)
    labels = targets.ids[:, 2]
    if repeated:
        ids = targets.ids.clone()
        ids[:, 4] = ids[:, 1]
        targets = ll.SparseTargets(ids, targets.logprobs, targets.tail)
    gradients = []
    for impl, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        leaf = x.clone().to(dtype).requires_grad_()
        with ll.impl(impl):
            ll.topk_distill(
                leaf, targets, divergence="forward_kl", support=support, temperature=temperature,
                labels=labels, ce_weight=0.7, kd_weight=0.4,
            ).backward()  # fmt: skip
        gradients.append(leaf.grad.double())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
