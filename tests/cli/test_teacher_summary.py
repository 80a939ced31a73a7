"""The summary of a store."""

import pytest
import torch

import logitless as ll
from logitless.cli.teacher_summary import FETCHED, summary
from logitless.store import Store
from tests.support import stores
from tests.support.servers import served_store


def test_summary(tmp_path):
    """Of known rows: mass 0.5 and 0.75 of the first and both, labels first, second, outside."""
    half = torch.tensor([[0.5, 0.25]]).log().expand(4, 2)
    ids = torch.tensor([[1, 2], [9, 2], [5, 6], [0, 1]])
    targets = ll.SparseTargets(ids, half, torch.full((4,), 0.25).log())
    found = summary(stores.write(tmp_path, [(torch.tensor([0, 1, 2, 3]), targets)], k=2))
    assert (found.covered - torch.tensor([0.5, 0.75])).abs().max() < 1e-3
    assert found.rank.tolist() == [0, 1, 2]
    assert found.entropy.mean() == pytest.approx(1.5 * torch.tensor(2.0).log().item(), abs=1e-3)
    assert (found.within(1), found.within(2)) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


@pytest.mark.parametrize(("most", "shards"), [(50, FETCHED), (1200, 10)])
def test_a_remote_store_fetches_few_shards(most, shards, tmp_path):
    """More shards are fetched only if the first have too few tokens. No other shard is fetched."""
    local = stores.write(tmp_path / "s", stores.documents(*range(20, 60)), shard_bytes=4000)
    assert len(local.shards) > 10
    with served_store(local) as server:
        found = summary(Store(server.url, cache=tmp_path / "c"), most=most)
        fetched = [name for name in server.requests if name.endswith(".shard")]
    assert len(fetched) <= shards < len(local.shards)
    assert found.rows >= most


def test_an_empty_remote_store(tmp_path):
    with served_store(stores.write(tmp_path / "s", [])) as server:
        assert summary(Store(server.url, cache=tmp_path / "c")).rows == 0
