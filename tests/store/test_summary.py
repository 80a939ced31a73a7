"""The summary of a store."""

import pytest
import torch

import logitless as ll
from tests.support import stores


def test_summary():
    """Of known rows: mass 0.5 and 0.75 of the first and both, labels first, second, outside."""
    import tempfile

    half = torch.tensor([[0.5, 0.25]]).log().expand(4, 2)
    ids = torch.tensor([[1, 2], [9, 2], [5, 6], [0, 1]])
    targets = ll.SparseTargets(ids, half, torch.full((4,), 0.25).log())
    with tempfile.TemporaryDirectory() as path:
        found = teacher_summary(stores.write(path, [(torch.tensor([0, 1, 2, 3]), targets)], k=2))
    assert (found.covered - torch.tensor([0.5, 0.75])).abs().max() < 1e-3
    assert found.rank.tolist() == [0, 1, 2]
    assert found.entropy.mean() == pytest.approx(1.5 * torch.tensor(2.0).log().item(), abs=1e-3)
    assert (found.within(1), found.within(2)) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


def teacher_summary(store):
    from logitless.store.summary import summary

    return summary(store)
