"""Shards that are refused, on every rank and in the same words."""

import pytest
import torch

import logitless as ll
from logitless.parallel.shard import Shard
from tests.support.calls import normal
from tests.support.rank_threads import on_ranks
from tests.support.shards import on_shards, plainly


class TestRefused:
    def refused(self, work, error, words, count=2):
        with pytest.raises(error) as caught:
            on_ranks(count, work)
        assert words in str(caught.value)

    def test_source(self):
        self.refused(lambda r: ll.VocabShard([1.0], r), TypeError, "source must be a Tensor")

    @pytest.mark.parametrize(("start", "error", "words"), [
        ("0", TypeError, "start must be an int, got '0'."),
        (-1, ValueError, "start must be at least 0, got -1."),
    ])  # fmt: skip
    def test_start(self, start, error, words):
        self.refused(lambda r: ll.VocabShard(torch.zeros(1, 2), r, start), error, words)

    def test_sequence_parallel_of_a_tensor(self):
        words = "source must be a LinearLogits over hidden states (tokens, ..., D) with sequence"
        work = lambda r: ll.VocabShard(torch.zeros(1, 2), r, sequence_parallel=True)  # noqa: E731
        self.refused(work, TypeError, words)

    def test_lazy_logits_of_all_ranks(self):
        def work(ranks):
            z = ll.LinearLogits(torch.zeros(1, 3), torch.zeros(2, 3)) / 2
            ll.VocabShard(Shard.of(z, ranks).whole().whole(), ranks)

        words = "source must be this rank's columns, got lazy logits of all ranks; pass the lazy"
        self.refused(work, TypeError, words)

    def test_ranks_are_told_once(self, monkeypatch):
        """Also where student and teacher are shards."""
        monkeypatch.setenv("LOGITLESS_CHECK", "1")

        def work(ranks):
            student, teacher = (ll.VocabShard(torch.zeros(1, 2), ranks) for _ in range(2))
            with pytest.raises(ValueError, match="beta must be"):
                ll.jsd(student, teacher, beta=-1.0 if ranks.index else 0.5)
            return ll.logsumexp(student)  # and are at the same place again

        on_ranks(2, work)

    def test_columns_with_a_gap(self):
        words = "start must be 2 on rank 1, because the preceding columns end at 2, got 3; the"
        work = lambda r: ll.VocabShard(torch.zeros(1, 2), r, 3 * r.index)  # noqa: E731
        self.refused(work, ValueError, words)

    def test_another_vocabulary(self):
        words = "vocab must be 4, the sum of the ranks' columns [2, 2], got 5."
        work = lambda r: ll.VocabShard(torch.zeros(1, 2), r, vocab=5)  # noqa: E731
        self.refused(work, ValueError, words)

    def test_no_columns(self):
        words = "source must have at least one column on one of the ranks, got none."
        self.refused(lambda r: ll.VocabShard(torch.zeros(1, 0), r), ValueError, words)

    def test_a_teacher_of_other_columns(self):
        def work(ranks):
            student = ll.VocabShard(torch.zeros(1, 2), ranks)
            teacher = ll.VocabShard(torch.zeros(1, 1 + 2 * ranks.index), ranks)
            ll.kl_div(student, teacher, direction="forward")

        words = "teacher must have the same columns as the student, widths (2, 2) and starts"
        self.refused(work, ValueError, words)

    def test_a_teacher_of_other_columns_that_were_not_exchanged(self):
        def work(ranks):
            def shard(widths):
                start, width = (0, widths[0])[ranks.index], widths[ranks.index]
                return ll.VocabShard(torch.zeros(1, width), ranks, start, vocab=4)

            ll.kl_div(shard((2, 2)), shard((1, 3)), direction="forward")

        words = "teacher must have the same columns as the student, widths (2,) and starts"
        self.refused(work, ValueError, words)

    def test_columns_beyond_the_vocabulary(self):
        """Also where the ranks exchange nothing, because they did so before."""

        def work(ranks):
            for start in (0, 1):
                ll.VocabShard(torch.zeros(1, 2), ranks, 2 * ranks.index + start, vocab=4)

        words = "start must be at most 2, so that 2 columns end within vocab 4, got 3."
        self.refused(work, ValueError, words)

    def test_gathered_logits(self):
        def work(ranks):
            ll.gathered_kl(ll.VocabShard(torch.zeros(1, 2), ranks), torch.zeros(1, 4))

        words = "student_logits must not be sharded over ranks, got VocabShard"
        self.refused(work, TypeError, words)

    def test_a_target_out_of_range_on_every_rank(self):
        def work(ranks):
            with pytest.raises(IndexError, match=r"target must be in \[0, 4\)"):
                ll.cross_entropy(ll.VocabShard(torch.zeros(1, 2), ranks), torch.tensor([4]))

        on_ranks(2, work)

    def test_bad_ids_make_their_rows_nan_where_nobody_looks(self, nobody_looks, impl):
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


@pytest.mark.parametrize(
    ("loss_sum", "count", "error", "words"),
    [
        (torch.ones(()), None, TypeError, NO_COUNT),
        (torch.ones(()), torch.ones(3), TypeError, NO_COUNT),
        (torch.ones(()), True, TypeError, NO_COUNT),
        (1.0, 3, TypeError, f"{NO_SUM} .* got float"),
        (torch.ones(3), 3, TypeError, rf"{NO_SUM} .* got torch.float32 of shape \(3,\)"),
        (torch.ones(()).long(), 3, TypeError, f"{NO_SUM} .* got torch.int64 of shape"),
        (torch.ones(()), -1, ValueError, r"count must be at least 0, got -1\.0"),
        (torch.ones(()), torch.tensor(-2), ValueError, r"count must be at least 0, got -2\.0"),
    ],
)
def test_arguments_of_global_mean(loss_sum, count, error, words):
    with pytest.raises(error, match=words):
        ll.global_mean(loss_sum, count)
