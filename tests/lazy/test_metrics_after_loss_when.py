"""When a loss over lazy logits computes scores for later metrics, and when the host waits."""

import pytest
import torch
from torch import nn

import logitless as ll
from logitless.lazy import metrics_after_loss
from tests.support.metrics_after_loss import B, D, Model, T, V, pair, shifted, step


@pytest.fixture
def ids(device):
    return torch.randint(0, V, (B, T), device=device)


def test_the_host_waits_once_for_the_same_rows(ids, monkeypatch):
    _, fused = pair(ids.device)
    step(fused, ids, shifted)
    waits, missing = [], metrics_after_loss.missing
    monkeypatch.setattr(metrics_after_loss, "missing", lambda *a: waits.append(a) or missing(*a))
    z = fused(ids)
    shifted(z, ids)
    assert not waits
    rows = z.detach()[:, :-1]
    for _ in range(3):
        rows.argmax(-1)
        rows.logsumexp(-1)
    assert len(waits) == 1


def test_scores_that_nobody_reads(ids):
    """After PATIENCE calls without a metric, losses compute no scores."""
    _, fused = pair(ids.device)
    step(fused, ids, shifted)
    for _ in range(metrics_after_loss.PATIENCE):
        assert fused(ids).recipe.places is not None
    assert fused(ids).recipe.places is None
    step(fused, ids, shifted)
    assert fused(ids).recipe.places is not None


def test_deterministic_algorithms(ids):
    """Whether a metric was read before does not change the bits of a loss."""
    _, fused = pair(ids.device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        step(fused, ids, shifted)
        assert fused(ids).recipe.answers is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_head_that_must_not_wait_or_gather(ids):
    """The option drop_ignored=False, and an FSDP module, whose ranks gather the weight together."""
    model = ll.fuse(Model().to(ids.device), drop_ignored=False)
    step(model, ids, shifted)
    _, gemms = step(model, ids, shifted)
    assert all(gemms.values())

    class Sharded(nn.Linear):
        def unshard(self):
            raise AssertionError("the weight is in memory")

    model = Model()
    model.lm_head = Sharded(D, V, bias=False).double()
    model = ll.fuse(model.to(ids.device))
    step(model, ids, shifted)
    assert model(ids).recipe.answers is None
