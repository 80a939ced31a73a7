"""Shards that are refused, on every rank and in the same words."""

import re

import pytest
import torch

import logitless as ll
from logitless.parallel.shard import Shard
from tests.support.calls import normal
from tests.support.rank_threads import on_ranks
from tests.support.shards import on_shards, plainly


def shard(ranks, *args, width=2, **how):
    return ll.VocabShard(torch.zeros(1, width), ranks, *args, **how)


def of_lazy_logits_of_all_ranks(ranks):
    z = ll.LinearLogits(torch.zeros(1, 3), torch.zeros(2, 3)) / 2
    ll.VocabShard(Shard.of(z, ranks).whole().whole(), ranks)


def beside_a_teacher_of_other_columns(ranks):
    teacher = shard(ranks, width=1 + 2 * ranks.index)
    ll.kl_div(shard(ranks), teacher, direction="forward")


def beside_other_columns_that_were_not_exchanged(ranks):
    def cut(widths):
        start = (0, widths[0])[ranks.index]
        return shard(ranks, start, width=widths[ranks.index], vocab=4)

    ll.kl_div(cut((2, 2)), cut((1, 3)), direction="forward")


def beyond_the_vocabulary(ranks):
    """Also where the ranks exchange nothing, because they did so before."""
    for start in (0, 1):
        shard(ranks, 2 * ranks.index + start, vocab=4)


REFUSED = {
    "source": (lambda r: ll.VocabShard([1.0], r), TypeError, "source must be a Tensor"),
    "start": (lambda r: shard(r, "0"), TypeError, "start must be an int, got '0'."),
    "negative": (lambda r: shard(r, -1), ValueError, "start must be at least 0, got -1."),
    "tokens of a tensor": (
        lambda r: shard(r, sequence_parallel=True), TypeError,
        "source must be a LinearLogits over hidden states (tokens, ..., D) with sequence"),
    "lazy logits": (
        of_lazy_logits_of_all_ranks, TypeError,
        "source must be this rank's columns, got lazy logits of all ranks; pass the lazy"),
    "a gap": (
        lambda r: shard(r, 3 * r.index), ValueError,
        "start must be 2 on rank 1, because the preceding columns end at 2, got 3; the"),
    "vocab": (
        lambda r: shard(r, vocab=5), ValueError,
        "vocab must be 4, the sum of the ranks' columns [2, 2], got 5."),
    "no columns": (
        lambda r: shard(r, width=0), ValueError,
        "source must have at least one column on one of the ranks, got none."),
    "teacher": (
        beside_a_teacher_of_other_columns, ValueError,
        "teacher must have the same columns as the student, widths (2, 2) and starts"),
    "teacher, not exchanged": (
        beside_other_columns_that_were_not_exchanged, ValueError,
        "teacher must have the same columns as the student, widths (2,) and starts"),
    "too far": (
        beyond_the_vocabulary, ValueError,
        "start must be at most 2, so that 2 columns end within vocab 4, got 3."),
    "gathered": (
        lambda r: ll.gathered_kl(shard(r), torch.zeros(1, 4)), TypeError,
        "student_logits must not be sharded over ranks, got VocabShard"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(name):
    work, error, words = REFUSED[name]

    with pytest.raises(error, match=re.escape(words)):
        on_ranks(2, work)


def test_ranks_are_told_once(monkeypatch):
    """Also where student and teacher are shards."""
    monkeypatch.setenv("LOGITLESS_CHECK", "1")

    def work(ranks):
        student, teacher = (shard(ranks) for _ in range(2))
        with pytest.raises(ValueError, match="beta must be"):
            ll.jsd(student, teacher, beta=-1.0 if ranks.index else 0.5)
        with pytest.raises(IndexError, match=r"target must be in \[0, 4\)"):
            ll.cross_entropy(shard(ranks), torch.tensor([4]))
        return ll.logsumexp(student)  # and are at the same place again

    on_ranks(2, work)


def test_bad_ids_make_their_rows_nan_where_nobody_looks(nobody_looks, impl):
    x = normal(5, 6, seed=1)
    target = torch.tensor([0, 99, 5, -100, -7], device=x.device)

    def call(source):
        return (ll.cross_entropy(source, target, reduction="none"),)

    got, d_got, _ = on_shards(call, x, (4, 2))
    want, d_want = plainly(call, x)
    torch.testing.assert_close((got[0], d_got), (want[0], d_want), equal_nan=True)
    assert got[0].isnan().tolist() == [False, True, False, False, True]


NO_COUNT = "count must be one number, or a tensor of one number, got"
NO_SUM = "loss_sum must be one floating-point number as a tensor, such as a loss with"


@pytest.mark.parametrize(("loss_sum", "count", "error", "words"), [
    (torch.ones(()), None, TypeError, NO_COUNT),
    (torch.ones(()), torch.ones(3), TypeError, NO_COUNT),
    (torch.ones(()), True, TypeError, NO_COUNT),
    (1.0, 3, TypeError, f"{NO_SUM} .* got float"),
    (torch.ones(3), 3, TypeError, rf"{NO_SUM} .* got torch.float32 of shape \(3,\)"),
    (torch.ones(()).long(), 3, TypeError, f"{NO_SUM} .* got torch.int64 of shape"),
    (torch.ones(()), -1, ValueError, r"count must be at least 0, got -1\.0"),
    (torch.ones(()), torch.tensor(-2), ValueError, r"count must be at least 0, got -2\.0"),
])  # fmt: skip
def test_arguments_of_global_mean(loss_sum, count, error, words):
    with pytest.raises(error, match=words):
        ll.global_mean(loss_sum, count)
