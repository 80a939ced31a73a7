"""The student's mass outside the ids is summed for itself, not left over."""

import pytest
import torch

import logitless as ll
from logitless.kernels import config
from tests.support import oracle
from tests.support.laws import error
from tests.support.sparse_teachers import both, make


class TestTail:
    """The student's mass outside the ids is summed for itself, not left over."""

    @pytest.mark.parametrize("true", [0.5, 1e-3, 1e-6, 1e-12, 1e-30])
    def test_without_cancellation(self, true, impl, device):
        """All of the teacher's mass is outside: the loss is -log of the student's mass there."""
        x = torch.full((3, 200), 0.0, device=device)
        x[:, ::40] = torch.tensor(195 * (1 - true) / true / 5).log().item()
        x += torch.tensor([[0.0], [1e3], [-1e3]], device=device)
        ids = torch.arange(0, 200, 40, device=device).flip(0).expand(3, 5)
        nothing = torch.full((3, 5), -torch.inf, device=device)
        targets = ll.SparseTargets(ids, nothing, torch.zeros(3, device=device))
        with config.override(block_v=64):
            loss = ll.topk_distill(
                x, targets, divergence="forward_kl", support="tail", reduction="none"
            )
        want = -oracle.log_mass_outside(
            x[0].double().log_softmax(-1), ids[0], torch.ones_like(ids[0]).bool()
        )
        # Of the offset rows, what fp32 logits can say.
        torch.testing.assert_close(loss[0].double(), want, rtol=1e-4, atol=1e-4)
        assert loss.isfinite().all()

    def test_gradient_of_a_small_tail(self, impl, device):
        x = torch.zeros(2, 100, device=device)
        x[:, 7], x[:, 60] = 17.0, 16.0
        ids = torch.tensor([[60, 7, 60]] * 2, device=device)
        logp = torch.tensor([[0.2, 0.6, 0.1]] * 2, device=device).log()
        targets = ll.SparseTargets(ids, logp, torch.full((2,), 0.1, device=device).log())
        how = {"divergence": "forward_kl", "support": "tail", "reduction": "sum"}
        got, want = both(x, targets, **how)
        assert error(got[0], want[0]) < 1e-5
        assert error(got[1], want[1]) < 1e-5

    def test_many_ids(self, impl, device):
        """More than are sorted in the kernel."""
        x, targets = make(torch.float32, device, rows=1, vocab=2000, k=1500)
        how = {"divergence": "reverse_kl", "support": "tail"}
        got, want = both(x, targets, **how)
        assert error(got[1], want[1]) < 2e-5


@pytest.mark.parametrize("gap", [85.0, 95.0, 110.0, 900.0])
def test_gradient_of_a_tail_that_is_no_number_in_fp32(gap, impl, device):
    """Its logits are pulled up by their shares of it, with a label among them or none."""
    x = torch.randn(3, 6, device=device) + 1e3 - gap
    x[:, 0] = 1e3
    ids, logp = torch.zeros(3, 1, dtype=torch.int64), torch.tensor([[0.6]] * 3).log()
    targets = ll.SparseTargets(ids, logp, torch.tensor([0.4] * 3).log()).to(device)
    labels = torch.tensor([0, 3, -100], device=device)
    how = {"divergence": "forward_kl", "support": "tail", "reduction": "sum"}
    for temperature in (1.0, 0.5):
        for ce in ({}, {"labels": labels, "ce_weight": 0.5}):
            got, want = both(x, targets, temperature=temperature, **how, **ce)
            assert want[1][0, 1:].abs().max() > 0.1
            assert error(got[1], want[1]) < 2e-4  # of log p, near -1000 at most
