"""docs/distillation.md says what is so."""

import math

import pytest
import torch

import logitless as ll
from tests.support import oracle

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")


class TestPage:
    @pytest.mark.parametrize("divergence", DIVERGENCES)
    def test_its_table_of_minima(self, divergence):
        """There the loss is what the table says and its gradient 0; anywhere else it is more."""
        teacher = torch.randn(1, 20, dtype=torch.float64)
        targets = ll.capture_topk(teacher, 6)
        p = targets.logprobs[0].exp()
        P = p.sum().item()
        where = {  # q on the ids, and the loss
            "truncate": (p, 0.0),
            "renorm_teacher": (p / P, 0.0),
            "renorm": (p * 0.3, 0.0),
            "tail": (p, 0.0),
        }
        if divergence == "forward_kl":
            where["truncate"] = p / P, P * math.log(P)
        if divergence == "reverse_kl":
            where["truncate"] = p / math.e, -P / math.e
            where["renorm_teacher"] = p / (math.e * P), -1 / math.e
        for support, (q, loss) in where.items():
            how = {"divergence": divergence, "support": support, "reduction": "none"}
            z = torch.full((1, 20), max((1 - q.sum().item()) / 14, 1e-14), dtype=torch.float64)
            z = z.log().index_copy(1, targets.ids[0], q.log().unsqueeze(0)).requires_grad_()
            at = ll.topk_distill(z, targets, **how)
            assert at.item() == pytest.approx(loss, abs=1e-9)
            if divergence != "tvd":  # which has a kink there
                assert torch.autograd.grad(at.sum(), z)[0].abs().max() < 1e-9
            near = z.detach() + 0.3 * torch.randn(100, 20, dtype=torch.float64)
            rows = targets[torch.zeros(100, dtype=torch.long)]
            assert (ll.topk_distill(near, rows, **how) > loss + 1e-9).all()

    @pytest.mark.parametrize("divergence", DIVERGENCES)
    def test_its_table_of_divergences(self, divergence):
        """The pull on a lost id, the push off an excluded one, the largest value."""
        how = {"divergence": divergence, "support": "tail"}
        p = torch.tensor([0.4, 0.3], dtype=torch.float64)
        ids, tail = torch.tensor([[0, 1]]), torch.tensor([0.3], dtype=torch.float64).log()

        z = torch.tensor([[-40.0, 0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
        lost = ll.topk_distill(z, ll.SparseTargets(ids, p.log().unsqueeze(0), tail), **how)
        pull = -torch.autograd.grad(lost, z)[0][0, 0]
        assert pull == pytest.approx(0.4 if divergence == "forward_kl" else 0.0, abs=1e-6)

        z = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)  # each q is 1/4
        log_p = torch.tensor([[-1e6, math.log(0.7)]], dtype=torch.float64)
        loss = ll.topk_distill(z, ll.SparseTargets(ids, log_p, tail), **how)
        push = torch.autograd.grad(loss, z)[0][0, 0]
        if divergence == "forward_kl":
            assert push == pytest.approx(1 / 4)
        elif divergence == "reverse_kl":
            assert push == pytest.approx(1 / 4 * 3 / 4 * 1e6, rel=1e-4)
        else:
            assert 0 < push < 1 / 4

        z = torch.tensor([[-80.0, -80.0, 0.0, 0.0]], dtype=torch.float64)
        apart = ll.SparseTargets(ids, (p / 0.7).log().unsqueeze(0), torch.tensor([-300.0]).double())
        for beta in (0.1, 0.5):
            largest = {"jsd": -beta * math.log(beta) - (1 - beta) * math.log1p(-beta), "tvd": 1.0}
            loss = ll.topk_distill(z, apart, **how, beta=beta).item()
            if divergence in largest:
                assert loss == pytest.approx(largest[divergence])
            else:
                assert loss > 50

    @pytest.mark.parametrize("divergence", DIVERGENCES)
    def test_tail_grows_with_k_to_the_whole_vocabulary(self, divergence):
        teacher, student = torch.randn(2, 5, 12, dtype=torch.float64) * 3
        how = {"divergence": divergence, "support": "tail", "reduction": "none"}
        by_k = torch.stack(
            [ll.topk_distill(student, ll.capture_topk(teacher, k), **how) for k in range(1, 13)]
        )
        assert (by_k.diff(dim=0) > -1e-12).all()
        dense = oracle.divergence(teacher.log_softmax(-1), student.log_softmax(-1), divergence)
        torch.testing.assert_close(by_k[-1], dense)

    @pytest.mark.parametrize("support", ["truncate", "renorm_teacher", "renorm", "tail"])
    @pytest.mark.parametrize("divergence", DIVERGENCES)
    def test_t_squared_keeps_the_gradient_where_it_says(self, divergence, support):
        teacher, student = torch.randn(2, 1, 40, dtype=torch.float64) * 2
        sizes = []
        for T in (1e4, 1e5):
            z = student.clone().requires_grad_()
            ll.topk_distill(
                z, ll.capture_topk(teacher, 6, temperature=T), temperature=T, t_squared=True,
                divergence=divergence, support=support,
            ).backward()  # fmt: skip
            sizes.append(z.grad.abs().sum())
        keeps = divergence in ("forward_kl", "reverse_kl", "jsd") and support in ("renorm", "tail")
        keeps |= (divergence, support) == ("jsd", "truncate")
        assert sizes[1] / sizes[0] == pytest.approx(1 if keeps else 10, rel=0.05)
