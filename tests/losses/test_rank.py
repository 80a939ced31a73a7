"""The statistic "rank": how many logits of a row are greater than the logit of the row's id.

tests/differential and the calls of tests/support/calls.py have rank over every source and several
ranks. Here are its definition for odd logits, and the metrics of the docs.
"""

import math

import pytest
import torch

import logitless as ll
from logitless.kernels import config
from tests.support.rank_threads import on_ranks

V = 101
INF, NAN = math.inf, math.nan


def by_definition(x, ids, softcap=None):
    """Counts in fp64. A NaN is greater than every number, and than NaN."""
    y = x.double()
    y = y if softcap is None else softcap * torch.tanh(y / softcap)
    return (~(y <= y.gather(-1, ids.long().unsqueeze(-1)))).sum(-1)


def odd_logits(device):
    """Rows with equal logits, infinities and NaN, and the rank of each row's id."""
    x = torch.arange(V, device=device, dtype=torch.float32).flip(0).repeat(9, 1)
    ids = torch.full((9,), 7, device=device)
    want = [7] * 9
    x[1, 3], want[1] = x[1, 7], 6  # an equal logit is not greater
    x[2] = -INF
    want[2] = 0
    x[3, 7], want[3] = -INF, V - 1
    x[4, 7], x[4, 90], want[4] = INF, INF, 0
    x[5, 60], want[5] = NAN, 8  # a NaN counts as greater
    x[6, 7], want[6] = NAN, V
    x[7], want[7] = NAN, V
    ids[8], want[8] = -100, -1
    return x, ids, want


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.usefixtures("small_blocks")
def test_odd_logits(splits, device):
    x, ids, want = odd_logits(device)
    with config.override(splits=splits):
        for form in (ids, ids.int(), torch.stack((ids, ids * 0, ids), 1)):
            for start in (0, 1):  # a slice, whose rows are not aligned
                wide = torch.zeros(len(x), V + 3, device=device)
                wide[:, start : start + V] = x
                got = ll.row_stats(wide[:, start : start + V], form, rank=True)
                assert got.rank.dtype == torch.int64
                assert got.rank.tolist() == want
                assert got.argmax is None


@pytest.mark.parametrize("widths", [(0, 40, 61), (101, 0)], ids=str)
@pytest.mark.usefixtures("impl")
def test_odd_logits_over_ranks(widths, device):
    x, ids, want = odd_logits(device)

    def work(ranks):
        start = sum(widths[: ranks.index])
        own = x[:, start : start + widths[ranks.index]]
        one = ll.row_stats(ll.VocabShard(own, ranks), ids, rank=True).rank
        several = torch.stack((ids, ids * 0), 1)
        return one.tolist(), ll.row_stats(ll.VocabShard(own, ranks), several, rank=True).rank

    for one, several in on_ranks(len(widths), work):
        assert one == want
        assert several.tolist() == want


@pytest.mark.usefixtures("impl", "nobody_looks")
@pytest.mark.parametrize("shard", [False, True])
def test_an_id_out_of_range_ranks_last(shard, device):
    x = torch.randn(3, V, device=device)
    ids = torch.tensor([V, -7, 4], device=device)
    got = ll.row_stats(ll.VocabShard(x) if shard else x, ids, rank=True).rank
    assert got.tolist() == [V, V, by_definition(x, ids.clamp(0, 4))[2]]


@pytest.mark.usefixtures("impl")
def test_saturated_logits_are_equal(device):
    """Logits are compared after the softcap: 900 and 1000 are both 2 after a softcap of 2."""
    x = torch.tensor([[1.0, 900.0, 1000.0]], device=device)
    ids = torch.tensor([1], device=device)
    assert ll.row_stats(x, ids, rank=True).rank.item() == 1
    assert ll.row_stats(x, ids, rank=True, softcap=2.0).rank.item() == 0


def test_metrics_of_the_docs():
    """Recall, reciprocal rank and NDCG of one relevant item, by sorting."""
    x, ids = torch.randn(50, V), torch.randint(0, V, (50,))
    rank = ll.row_stats(x, ids, rank=True).rank
    place = (x.argsort(-1, descending=True) == ids[:, None]).int().argmax(-1)
    assert torch.equal(rank, place)
    top = x.topk(10, -1).indices
    assert torch.equal(rank < 10, (top == ids[:, None]).any(-1))


def test_bad_arguments():
    x = torch.randn(2, V)
    with pytest.raises(ValueError, match="ids must be given if rank=True, got None"):
        ll.row_stats(x, rank=True)
    with pytest.raises(
        ValueError, match=r"ids must hold at least one id per row if rank=True, got \(2, 0\)"
    ):
        ll.row_stats(x, torch.zeros(2, 0, dtype=torch.int64), rank=True)
