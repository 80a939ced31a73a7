"""A vocabulary over several ranks gives what one process gives. Here, ranks are threads."""

import pytest
import torch

import logitless as ll
from tests.support.calls import CALLS, IDS, MASK, TARGET, D, K, N, V, normal
from tests.support.meanings import MEANINGS
from tests.support.rank_threads import on_ranks
from tests.support.shards import close, differentiated, on_shards, plainly, shard_of

WIDTHS = [(20, 17), (9, 0, 28), (0, 5, 31, 1)]


BY_KERNELS = (  # between them, every kernel that a shard launches; the interpreter takes its time
    "row_stats", "cross_entropy, every option", "cross_entropy, in place", "kl_div, reverse", "jsd",
    "kl_div, skewed", "kl_div, skewed reverse",
    "tvd", "cross_entropy_and_scores, in place", "soft_cross_entropy", "topk_distill",
    "topk_distill, with labels", "topk_distill, tvd", "capture_topk",
)  # fmt: skip
WAYS = [("eager", torch.float64, WIDTHS[0]), ("eager", torch.float32, WIDTHS[1])]
WAYS += [("eager", torch.float64, WIDTHS[2])]


@pytest.mark.parametrize("name", CALLS)
def test_every_call(name):
    x = normal(N, V, seed=1, dtype=torch.float32) * 2
    with ll.impl("eager"):
        want, d_want = plainly(MEANINGS[name], x.double())
        torchs, d_torchs = plainly(MEANINGS[name], x)
    by_kernels = [("triton", torch.float32, WIDTHS[1])] if name in BY_KERNELS else []
    for impl, dtype, widths in WAYS + by_kernels:
        with ll.impl(impl):
            got, d_got, _ = on_shards(CALLS[name], x.to(dtype), widths)
        for a, b, c in zip((*got, d_got), (*want, d_want), (*torchs, d_torchs), strict=True):
            close(a, b, c)


# How many numbers a row each rank sends, in each collective.
SENT = {
    "cross_entropy": [3],
    "cross_entropy, every option": [9],
    "score": [5, 1],
    "cross_entropy_and_scores": [5],
    "kept_scores": [K],
    "kept_scores, mass": [3 + K],
    "row_stats": [9 + K, 1],
    "kl_div": [5],
    "kl_div, skewed": [5, 3],
    "jsd": [5, 3],
    "tvd": [5, 3],
    "topk_distill": [5 + K],
    "topk_distill, tvd": [K],
    "slot_loss": [5 + K],
    "slot_loss, no tail": [3 + K],
    "capture_topk": [2 * K + 1] * 3,  # called three times
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name):
    """Few numbers per row; once a forward, twice for JSD, TVD and ranks; in a backward, nothing."""
    _, _, calls = on_shards(CALLS[name], normal(N, V, seed=1), (20, 17))
    exchange = ("gather", 2)  # of widths, once
    for of_rank in calls:
        assert of_rank == [exchange, *(("gather", N * count) for count in SENT[name])]


def starts_of(widths) -> list[int]:
    return [sum(widths[:rank]) for rank in range(len(widths))]


@pytest.mark.parametrize(("given", "sent"), [
    ((), [2, 3] * 3),
    (("vocab",), [2, 3] * 3),
    (("start",), [2, 3] * 3),
    (("start", "vocab"), [2, 3, 3, 3]),
])  # fmt: skip
def test_widths_are_exchanged(given, sent):
    """In every call, or in the first call if `start` and `vocab` are given."""
    widths = (2, 3)

    def work(ranks):
        known = {"start": starts_of(widths)[ranks.index], "vocab": 5}
        known = {name: known[name] for name in given}
        for _ in range(3):
            ll.logsumexp(ll.VocabShard(torch.zeros(1, widths[ranks.index]), ranks, **known))
        return [numbers for _, numbers in ranks.calls]

    assert on_ranks(2, work) == [sent] * 2


def test_one_process_exchanges_nothing():
    def work(ranks):
        for width in (3, 4):
            shard = ll.VocabShard(torch.zeros(1, width), ranks, 0, vocab=width)
            assert shard.shape == ll.VocabShard(torch.zeros(1, width), ranks).shape == (1, width)
        with pytest.raises(ValueError, match="vocab must be 5, the sum of the ranks' columns"):
            ll.VocabShard(torch.zeros(1, 5), ranks, 0, vocab=4)
        return ranks.calls

    assert on_ranks(1, work) == [[]]


def test_two_vocabularies():
    """The first ranks have as many columns of the second vocabulary as of the first."""

    def work(ranks):
        for vocab in (5, 6, 5):
            width = 2 if ranks.index < 2 else vocab - 4
            shard = ll.VocabShard(torch.zeros(1, width), ranks)
            torch.testing.assert_close(ll.entropy(shard), torch.tensor([vocab]).log())

    on_ranks(3, work)


# Ways to shard one vocabulary of 6. Of the fourth, every rank has had its width before.
CUTS = [(1, 2, 3), (2, 3, 1), (3, 1, 2), (1, 3, 2), (3, 2, 1), (0, 6, 0), (1, 2, 3)]


@pytest.mark.parametrize("source", ["logits", "head"])
@pytest.mark.parametrize("given", [(), ("vocab",), ("start",), ("start", "vocab")], ids=str)
def test_one_vocabulary_cut_in_several_ways(given, source):
    """Widths cached per rank would make a rank take one layout for another."""
    hidden, weight = normal(N, 3, seed=1), normal(6, 3, seed=2)
    x, other = hidden @ weight.T, normal(N, 6, seed=3)
    target = torch.arange(N, device=x.device) % 6
    want = (ll.cross_entropy(x, target), ll.capture_topk(x, 4).ids, x)
    d_want = ll.kl_div(x, other, direction="forward")

    def work(ranks):
        for widths in CUTS:
            start, width = starts_of(widths)[ranks.index], widths[ranks.index]
            known = {"start": start, "vocab": 6}
            known = {name: known[name] for name in given}
            rows = weight.narrow(0, start, width)
            own = hidden @ rows.T
            if source == "head":
                own = ll.LinearLogits(hidden, rows, workspace=3 * 8 * 4)
            shard = ll.VocabShard(own, ranks, **known)
            teacher = ll.VocabShard(other.narrow(1, start, width), ranks, **known)
            ids = ll.capture_topk(shard, 4).ids
            got = (ll.cross_entropy(shard, target), ids, shard.materialize())
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b)
            torch.testing.assert_close(ll.kl_div(shard, teacher, direction="forward"), d_want)

    on_ranks(3, work)


def test_a_start_of_its_own():
    """Ranks in another order than their columns."""
    x, starts, widths = normal(N, V, seed=1), (30, 0, 12), (7, 12, 18)

    def work(ranks):
        part = x.narrow(-1, starts[ranks.index], widths[ranks.index])
        shard = ll.VocabShard(part, ranks, starts[ranks.index])
        return (
            *ll.score(shard, TARGET, rank=True),
            ll.capture_topk(shard, 5).ids,
            shard.materialize(),
        )

    want = (*ll.score(x, TARGET, rank=True), ll.capture_topk(x, 5).ids, x)
    for got in on_ranks(3, work):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dead", range(3))
def test_a_shard_of_nothing_but_inf(dead, impl):
    widths, x = (9, 0, 28), normal(N, V, seed=1)
    start = sum(widths[:dead])
    x[:, start : start + widths[dead]] = -torch.inf
    x[4] = -torch.inf

    def call(source):
        target = IDS[:, 0].clamp(*((9, 36) if dead == 0 else (0, 8)))
        return (
            *ll.score(source, target, rank=True),
            ll.cross_entropy(source, target, reduction="none"),
        )

    got, d_got, _ = on_shards(call, x, widths)
    want, d_want = plainly(call, x)
    for a, b in zip((*got, d_got), (*want, d_want), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_an_offset_costs_nothing():
    x = normal(N, V, seed=1)
    for call in (lambda x: ll.score(x, TARGET)[:2], CALLS["kl_div"], CALLS["topk_distill"]):
        plain, d_plain, _ = on_shards(call, x, (20, 17))
        moved, d_moved, _ = on_shards(call, (x.double() + 1024).float(), (20, 17))
        torch.testing.assert_close(moved[0], plain[0], rtol=0, atol=3e-4)
        torch.testing.assert_close(d_moved, d_plain, rtol=0, atol=3e-4)


@pytest.mark.parametrize(
    "of", ["shard", "head shard", "tensor", "head", "lazy logits", "lazy shard"]
)
def test_teachers(of):
    hidden, weight = normal(N, 3, seed=20), normal(V, 3, seed=21)
    teacher, x = hidden @ weight.T, normal(N, V, seed=1)
    want, d_want = plainly(lambda s: (ll.kl_div(s, teacher, direction="reverse", mask=MASK),), x)
    widths = (9, 0, 28)

    def work(ranks):
        leaf, start = shard_of(ranks, x, widths), sum(widths[: ranks.index])
        rows = weight[start : start + widths[ranks.index]]
        given = {
            "shard": lambda: ll.VocabShard(hidden @ rows.T, ranks),
            "head shard": lambda: ll.VocabShard(ll.LinearLogits(hidden, rows), ranks),
            "tensor": lambda: teacher,
            "head": lambda: ll.LinearLogits(hidden, weight),
            "lazy logits": lambda: ll.LinearLogits(hidden, 2 * weight) / 2,
            "lazy shard": lambda: ll.VocabShard(ll.LinearLogits(hidden, 2 * rows) / 2, ranks),
        }[of]()
        return differentiated(
            lambda s: (ll.kl_div(s, given, direction="reverse", mask=MASK),),
            ll.VocabShard(leaf, ranks), [leaf],
        )  # fmt: skip

    found = on_ranks(3, work)
    torch.testing.assert_close(found[0][0], want)
    torch.testing.assert_close(torch.cat([d for _, (d,) in found], -1), d_want)


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("of", ["shard", "head shard", "tensor", "head"])
def test_teachers_of_scaled_lazy_columns(of):
    """A teacher that is a tensor has this rank make its own columns, and no others."""
    parts = [normal(*size, seed=i, dtype=torch.float64) for i, size in enumerate(((N, D), (V, D)))]
    hidden, weight = normal(N, 3, seed=20), normal(V, 3, seed=21)
    teacher, widths = hidden.double() @ weight.double().T, (9, 0, 28)
    whole = [t.clone().requires_grad_() for t in parts]
    want = ll.kl_div(whole[0] @ whole[1].T / 2, teacher, direction="forward", mask=MASK)
    d_want = torch.autograd.grad(want, whole)

    def work(ranks):
        own = (0, sum(widths[: ranks.index]), widths[ranks.index])
        rows = weight.narrow(*own).double()
        given = {
            "shard": lambda: ll.VocabShard(hidden.double() @ rows.T, ranks),
            "head shard": lambda: ll.VocabShard(ll.LinearLogits(hidden.double(), rows), ranks),
            "tensor": lambda: teacher,
            "head": lambda: ll.LinearLogits(hidden.double(), weight.double()),
        }[of]()
        leaves = [t.clone().requires_grad_() for t in (parts[0], parts[1].narrow(*own))]
        student = ll.VocabShard(ll.LinearLogits(*leaves) / 2, ranks)
        loss = ll.kl_div(student, given, direction="forward", mask=MASK)
        d = torch.autograd.grad(loss, leaves)
        assert max(count for _, count in ranks.calls) <= N * 5  # nothing as wide as the vocabulary
        return loss, *d

    losses, d_hidden, d_weight = zip(*on_ranks(3, work), strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    torch.testing.assert_close(losses[0], want)
    torch.testing.assert_close((sum(d_hidden), torch.cat(d_weight)), d_want)


def test_topk_of_lazy_columns_capped_twice():
    """Which a head cannot give: each rank makes its own columns."""
    hidden, weight = normal(N, D, seed=1), normal(2 * 5, D, seed=2)
    want = ll.capture_topk(30 * torch.tanh(hidden @ weight.T / 30), 3, softcap=5.0)

    def work(ranks):
        z = ll.LinearLogits(hidden, weight.chunk(2)[ranks.index]) * 1
        found = ll.capture_topk(ll.VocabShard(30 * torch.tanh(z / 30), ranks), 3, softcap=5.0)
        assert max(count for _, count in ranks.calls) <= N * 7
        return found

    for got in on_ranks(2, work):
        assert torch.equal(got.ids, want.ids)
        torch.testing.assert_close(got.logprobs, want.logprobs)


def test_repr():
    def work(ranks):
        return repr(ll.VocabShard(torch.zeros(2, 3), ranks)).splitlines()[-1]

    assert on_ranks(2, work)[1].endswith("columns 3 to 6)")
