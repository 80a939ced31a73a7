"""Heads over several ranks, each with some rows of the weight. Here, ranks are threads."""

import weakref

import pytest
import torch

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from logitless.heads.gradient_sums import Sum
from tests.support.calls import CALLS, TARGET, D, N, V, normal
from tests.support.rank_threads import on_ranks
from tests.support.shards import differentiated


class TestHeads:
    """A LinearLogits over a rank's rows of the head's weight."""

    @staticmethod
    def parts(dtype=torch.float64):
        return [normal(*size, seed=i, dtype=dtype) for i, size in enumerate([(N, D), (V, D), (V,)])]

    def on_shards(self, call, parts, widths, rows, sequence_parallel=False):
        """Results and gradients of all ranks: of hidden states, weight and bias."""
        width = -(-max(widths) // 8) * 8 * parts[0].element_size()

        def work(ranks):
            start = sum(widths[: ranks.index])
            own = [parts[0], *(t.narrow(0, start, widths[ranks.index]) for t in parts[1:])]
            if sequence_parallel:
                own[0] = parts[0].chunk(ranks.count)[ranks.index]
            own = [t.clone().requires_grad_() for t in own]
            head = ll.LinearLogits(*own, workspace=rows * width)
            shard = ll.VocabShard(head, ranks, sequence_parallel=sequence_parallel)
            return differentiated(call, shard, own), ranks.calls

        found = on_ranks(len(widths), work)
        results, gradients = zip(*(one for one, _ in found), strict=True)
        for others in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))
        d_hidden, d_weight, d_bias = zip(*gradients, strict=True)
        if not sequence_parallel:
            assert all(torch.equal(d, d_hidden[0]) for d in d_hidden)
            d_hidden = d_hidden[:1]
        joined = [torch.cat(parts) for parts in (d_hidden, d_weight, d_bias)]
        return results[0], joined, [calls for _, calls in found]

    def compare(self, name, widths, rows, dtype=torch.float64, **how):
        """Ranks give what one process gives. Returns the collectives of each rank."""
        parts = self.parts(dtype)
        leaves = [t.clone().requires_grad_() for t in parts]
        want, d_want = differentiated(CALLS[name], ll.LinearLogits(*leaves), leaves)
        got, d_got, calls = self.on_shards(CALLS[name], parts, widths, rows, **how)
        exact = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {}
        for a, b in zip((*got, *d_got), (*want, *d_want), strict=True):
            torch.testing.assert_close(a, b, **exact)
        return calls

    @pytest.mark.parametrize("name", CALLS)
    def test_every_call(self, name):
        for widths, rows in (((20, 17), N), ((9, 0, 28), 2)):
            self.compare(name, widths, rows)

    @pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy, none"])
    def test_by_the_kernels(self, name):
        with ll.impl("triton"):
            self.compare(name, (9, 0, 28), 4, torch.float32)

    @pytest.mark.parametrize("name", ["cross_entropy", "score"])
    def test_sequence_parallel(self, name):
        """Each rank has some of the tokens, and gets their gradient."""
        calls = self.compare(name, (9, 0, 28), 2, sequence_parallel=True)
        for first, *_, last in calls:
            assert (first, last) == (("gather", N * D // 3), ("reduce_scatter", N * D))
        assert "all_reduce" not in {what for of_rank in calls for what, _ in of_rank}

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_sequence_parallel_to_autograd(self, reduction):
        """Hidden is kept as saved tensors are, and a second differentiation is refused."""
        leaf, weight, _ = self.parts()
        leaf.requires_grad_()  # and nothing else

        def loss_of(hidden, ranks):
            shard = ll.VocabShard(ll.LinearLogits(hidden, weight), ranks, sequence_parallel=True)
            return ll.cross_entropy(shard, TARGET, reduction=reduction).sum()

        def work(ranks):
            hidden = leaf * 1
            kept = weakref.ref(hidden)
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                loss = loss_of(hidden, ranks)
            del hidden
            assert kept() is None
            loss.backward()
            (d,) = torch.autograd.grad(loss_of(leaf, ranks), leaf, create_graph=True)
            torch.testing.assert_close(d, leaf.grad)
            with pytest.raises(RuntimeError, match="differentiated twice"):
                d.sum().backward()

        on_ranks(1, work)

    def test_tokens_are_added_up_while_the_weight_waits(self, monkeypatch):
        """The last product of the weight comes after the sum of d_hidden has begun."""
        parts = [t.requires_grad_() for t in self.parts()]

        def work(ranks):
            def add(total, *given, plain=Sum.add):
                ranks.calls.append(("weight", 0))
                plain(total, *given)

            monkeypatch.setattr(Sum, "add", add)
            head = ll.LinearLogits(*parts, workspace=2 * 40 * 8)
            ll.cross_entropy(ll.VocabShard(head, ranks, sequence_parallel=True), TARGET).backward()
            return [what for what, _ in ranks.calls if what != "gather"]

        assert on_ranks(1, work) == [["weight", "weight", "reduce_scatter", "weight"]]

    @pytest.mark.parametrize(
        "name", ["cross_entropy, every option", "score", "row_stats", "row_loss", "topk_distill"]
    )
    def test_cut_by_columns(self, name, monkeypatch):
        """As a small workspace of a GPU cuts them; a tail needs whole rows."""
        for how in (Cut(N, 8), Cut(N, 8, kept=True), Cut(4, 16)):
            cut = lambda work, *_, how=how: how if work.merges else Cut(work.rows)  # noqa: E731
            monkeypatch.setattr(choose_cut, "forced", cut)
            calls = self.compare(name, (9, 0, 28), N)
            added = sum(count for what, count in calls[0] if what == "all_reduce")
            assert added in (N * D, (N - 1) * D)

    def test_d_hidden_is_added_up_once(self):
        """A chunk at a time, in forward where loss and gradient are made there."""
        _, _, calls = self.on_shards(CALLS["cross_entropy"], self.parts(), (20, 17), 3)
        for of_rank in calls:
            added = [count for what, count in of_rank if what == "all_reduce"]
            assert sum(added) == 5 * D  # of six rows, one is ignored
            assert len(added) == 2
