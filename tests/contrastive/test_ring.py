"""Contrastive losses over several ranks: as if one process had all pairs."""

import pytest
import torch

import logitless as ll
from tests.support.contrastive_ranks import (
    CASES,
    all_errors,
    largest_error,
    tower_batch,
    trained_by_ddp,
)
from tests.support.forked import together
from tests.support.rank_threads import on_ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_as_one_process(case, ranks):
    """Ranks have different numbers of pairs, and one of four ranks has none."""
    errors = on_ranks(ranks, lambda group: largest_error(case, group, group.index, ranks))
    assert max(errors) < 1e-9


@pytest.mark.parametrize("case", ["mean", "labels", "sigmoid none"])
def test_kernels(case, device):
    with ll.impl("triton"):
        errors = on_ranks(
            2, lambda group: largest_error(case, group, group.index, 2, torch.float32, device)
        )
    assert max(errors) < 1e-5


def test_processes():
    """The same cases over gloo."""
    for errors in together(4, all_errors, 4):
        assert errors.keys() == CASES.keys()
        assert max(errors.values()) < 1e-9


def test_ddp_averages_to_the_gradient_of_one_process():
    towers, images, texts = tower_batch()
    ll.contrastive(*towers(images, texts), scale=5.0).backward()
    want = [float(p.grad.abs().sum()) for p in towers.parameters()]
    for got in together(2, trained_by_ddp, 2):
        assert got == pytest.approx(want, rel=1e-9)


def test_no_rank_sends_more_than_its_block():
    """With more ranks, a rank sends as many numbers per step, and holds as many."""

    def sent(group):
        a, b = torch.randn(2, 6, 8).requires_grad_().unbind()
        ll.contrastive(a, b, group=group).backward()
        return [numbers for what, numbers in group.calls if what == "shift"]

    for ranks in (2, 4):
        for calls in on_ranks(ranks, sent):
            # Forward: b and the states of columns. Backward: b, normalisers, and the gradient of b.
            assert max(calls) == 6 * 8
            assert calls.count(6 * 8) == 2 * (ranks - 1) + ranks
            assert calls.count(6 * 2) == ranks + ranks - 1


def test_without_a_group_nothing_is_sent(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: 1 / 0)
    assert ll.contrastive(torch.eye(3), torch.eye(3)) > 0


def test_ranks_that_disagree_raise(monkeypatch):
    """With LOGITLESS_CHECK=1. Otherwise, ranks could wait for each other forever."""
    monkeypatch.setenv("LOGITLESS_CHECK", "1")

    def different(group):
        with pytest.raises(ValueError, match="ranks must call the same loss with the same"):
            ll.contrastive(torch.ones(3, 2), torch.ones(3, 2), scale=1.0 + group.index, group=group)

    def bad(group):
        width = 2 + group.index
        kind = ValueError if group.index else "ranks must call"
        match = "b must have shape" if group.index else kind
        with pytest.raises(ValueError, match=match):
            ll.sigmoid_contrastive(torch.ones(3, 2), torch.ones(3, width), group=group)

    on_ranks(2, different)
    on_ranks(2, bad)


ONE_RANK = {
    "positives must be in": {"symmetric": False, "positives": torch.tensor([0, 1, 9])},
    "labels must be a Tensor": {"labels": 3},
    "labels of b must have shape": {"labels": (torch.arange(3), torch.arange(4))},
    "mask must have shape": {"mask": torch.zeros(4, 6) > 0},
}


@pytest.mark.parametrize("message", ONE_RANK)
def test_an_error_of_one_rank_raises_on_all_ranks(message, monkeypatch):
    """With LOGITLESS_CHECK=1. Here, rank 1 passes right values, and rank 0 passes wrong values."""
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    right = {
        "positives": torch.tensor([0, 1, 2]),
        "labels": (torch.arange(3), torch.arange(3)),
        "mask": torch.zeros(3, 6) > 0,
    }

    def call(group):
        how = ONE_RANK[message]
        if group.index:
            how = {name: right.get(name, value) for name, value in how.items()}
        with pytest.raises((TypeError, ValueError, IndexError)) as raised:
            ll.contrastive(torch.ones(3, 2), torch.ones(3, 2), group=group, **how)
        return str(raised.value)

    wrong, other = on_ranks(2, call)
    assert message in wrong
    assert message in other
    assert "ranks must call the same loss" in other


def test_a_positive_out_of_range_on_one_rank(monkeypatch):
    monkeypatch.setenv("LOGITLESS_CHECK", "1")

    def call(group):
        positives = torch.tensor([0, 1, 2 if group.index else 9])
        with pytest.raises((ValueError, IndexError), match="positives must be in"):
            ll.sigmoid_contrastive(
                torch.ones(3, 2), torch.ones(3, 2), positives=positives, group=group
            )

    on_ranks(2, call)
