"""A vocabulary over several ranks gives what one process gives. Here, ranks are threads (ranks.py);
test_shard_ranks.py has processes."""

import weakref

import pytest
import torch
from calls import CALLS, IDS, MASK, TARGET, D, K, N, V, normal
from meanings import MEANINGS, excess
from ranks import Simulated, on_ranks

import logitless as ll
from logitless.heads import head
from logitless.heads.gradient_sums import Sum
from logitless.heads.plan import Cut

WIDTHS = [(20, 17), (9, 0, 28), (0, 5, 31, 1)]


def shard_of(ranks: Simulated, x: torch.Tensor, widths) -> torch.Tensor:
    start = sum(widths[: ranks.index])
    return x[..., start : start + widths[ranks.index]].detach().clone().requires_grad_()


def differentiated(call, source, leaf):
    """Results of a call, and the gradient of its leaf for random ones of the results."""
    found = [t for t in call(source) if t is not None]
    used = [t for t in found if t.requires_grad]
    upstream = [normal(t.numel(), seed=11, dtype=t.dtype).view(t.shape) for t in used]
    d = torch.autograd.grad(used, leaf, upstream) if used else (torch.zeros_like(leaf),)
    return [t.detach() for t in found], d[0]


def on_shards(call, x, widths):
    """The same of each rank's columns: results of all ranks, and the gradient of all columns."""

    def work(ranks):
        leaf = shard_of(ranks, x, widths)
        return differentiated(call, ll.VocabShard(leaf * 1.0, ranks), leaf), ranks.calls

    found = on_ranks(len(widths), work)
    results = [results for (results, _), _ in found]
    for others in results[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results[0], others, strict=True))
    return results[0], torch.cat([d for (_, d), _ in found], -1), [calls for _, calls in found]


def bits(t):
    return t.reshape(-1).view(torch.uint8)


def plainly(call, x):
    leaf = x.clone().requires_grad_()
    return differentiated(call, leaf * 1.0, leaf)


def close(got, want, torchs):
    """fp64 to 1e-9; fp32 to twice PyTorch's own error and a few roundings."""
    if not got.is_floating_point():
        assert torch.equal(got, want)
        return
    if got.dtype == torch.float32:
        assert excess(got, torchs, want) <= 1
    else:
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


BY_KERNELS = (  # between them, every kernel that a shard launches; the interpreter takes its time
    "row_stats", "cross_entropy, every option", "cross_entropy, in place", "kl_div, reverse", "jsd",
    "soft_cross_entropy", "topk_distill", "topk_distill, with labels", "topk_distill, tvd",
    "capture_topk",
)  # fmt: skip
WAYS = [(name, how) for name in CALLS for how in ("eager fp64", "eager fp32")]


@pytest.mark.parametrize(("name", "how"), [*WAYS, *((name, "triton fp32") for name in BY_KERNELS)])
def test_every_call(name, how):
    impl, _, precision = how.partition(" ")
    dtype = torch.float64 if precision == "fp64" else torch.float32
    x = normal(N, V, seed=1, dtype=torch.float32) * 2
    with ll.impl("eager"):
        want, d_want = plainly(MEANINGS[name], x.double())
        torchs, d_torchs = plainly(MEANINGS[name], x)
    for widths in WIDTHS if impl == "eager" else WIDTHS[1:2]:
        with ll.impl(impl):
            got, d_got, _ = on_shards(CALLS[name], x.to(dtype), widths)
        for a, b, c in zip(got, want, torchs, strict=True):
            close(a, b, c)
        close(d_got, d_want, d_torchs)


# How many numbers a row each rank sends, in each collective.
SENT = {
    "cross_entropy": [3],
    "cross_entropy, every option": [9],
    "score": [5],
    "row_stats": [9 + K],
    "kl_div": [5],
    "jsd": [5, 2],
    "topk_distill": [5 + K],
    "topk_distill, tvd": [K],
    "capture_topk": [2 * K + 1] * 3,  # called three times
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name):
    """Nothing as wide as the vocabulary; once a forward, twice for JSD; in a backward, nothing."""
    _, _, calls = on_shards(CALLS[name], normal(N, V, seed=1), (20, 17))
    exchange = ("gather", 2)  # of widths, once
    for of_rank in calls:
        assert of_rank == [exchange, *(("gather", N * count) for count in SENT[name])]


def test_widths_are_exchanged_once():
    def work(ranks):
        for _ in range(3):
            ll.logsumexp(ll.VocabShard(torch.zeros(1, 2 + ranks.index), ranks))
        return [numbers for _, numbers in ranks.calls]

    assert on_ranks(2, work) == [[2, 3, 3, 3]] * 2


def test_two_vocabularies():
    """Of which the first ranks have as many columns, and only the last knows more."""

    def work(ranks):
        for vocab in (5, 6, 5):
            width = 2 if ranks.index < 2 else vocab - 4
            shard = ll.VocabShard(torch.zeros(1, width), ranks, vocab=vocab)
            torch.testing.assert_close(ll.entropy(shard), torch.tensor([vocab]).log())
        return len(ranks.calls)

    assert on_ranks(3, work) == [2 + 3] * 3


def test_a_start_of_its_own():
    """Ranks in another order than their columns."""
    x, starts, widths = normal(N, V, seed=1), (30, 0, 12), (7, 12, 18)

    def work(ranks):
        part = x.narrow(-1, starts[ranks.index], widths[ranks.index])
        shard = ll.VocabShard(part, ranks, starts[ranks.index])
        return (*ll.score(shard, TARGET), ll.capture_topk(shard, 5).ids, shard.materialize())

    want = (*ll.score(x, TARGET), ll.capture_topk(x, 5).ids, x)
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
        return (*ll.score(source, target), ll.cross_entropy(source, target, reduction="none"))

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
            ll.VocabShard(leaf, ranks), leaf,
        )  # fmt: skip

    found = on_ranks(3, work)
    torch.testing.assert_close(found[0][0], want)
    torch.testing.assert_close(torch.cat([d for _, d in found], -1), d_want)


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
            ll.VocabShard(ll.VocabShard(z, ranks).whole().whole(), ranks)

        words = "source must be this rank's columns, got lazy logits of all ranks: give them to"
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
        words = "start must be 2 on rank 1, where the columns before it end, got 3; the ranks have"
        work = lambda r: ll.VocabShard(torch.zeros(1, 2), r, 3 * r.index)  # noqa: E731
        self.refused(work, ValueError, words)

    def test_another_vocabulary(self):
        words = "vocab must be the columns of all ranks, 4 of [2, 2], got 5."
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

        self.refused(work, ValueError, "teacher must have the columns of the student, (2, 2) from")

    def test_gathered_logits(self):
        def work(ranks):
            ll.gathered_kl(ll.VocabShard(torch.zeros(1, 2), ranks), torch.zeros(1, 4))

        words = "student_logits must be the logits of K ids a row, all on every rank, got"
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


def test_repr():
    def work(ranks):
        return repr(ll.VocabShard(torch.zeros(2, 3), ranks)).splitlines()[-1]

    assert on_ranks(2, work)[1].endswith("columns 3 to 6)")


class TestHeads:
    """A LinearLogits over a rank's rows of the head's weight."""

    @staticmethod
    def parts(dtype=torch.float64):
        return [normal(*size, seed=i, dtype=dtype) for i, size in enumerate([(N, D), (V, D), (V,)])]

    @staticmethod
    def differentiated(call, source, leaves):
        found = [t for t in call(source) if t is not None]
        used = [t for t in found if t.requires_grad]
        upstream = [normal(t.numel(), seed=11, dtype=t.dtype).view(t.shape) for t in used]
        d = torch.autograd.grad(used, leaves, upstream) if used else leaves
        return [t.detach() for t in found], d

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
            return self.differentiated(call, shard, own), ranks.calls

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

    @pytest.mark.parametrize("name", CALLS)
    def test_every_call(self, name):
        parts = self.parts()
        leaves = [t.clone().requires_grad_() for t in parts]
        want, d_want = self.differentiated(CALLS[name], ll.LinearLogits(*leaves), leaves)
        for widths, rows in (((20, 17), N), ((9, 0, 28), 2)):
            got, d_got, _ = self.on_shards(CALLS[name], parts, widths, rows)
            for a, b in zip((*got, *d_got), (*want, *d_want), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy, none"])
    def test_by_the_kernels(self, name):
        parts = self.parts(torch.float32)
        leaves = [t.clone().requires_grad_() for t in parts]
        want, d_want = self.differentiated(CALLS[name], ll.LinearLogits(*leaves), leaves)
        with ll.impl("triton"):
            got, d_got, _ = self.on_shards(CALLS[name], parts, (9, 0, 28), 4)
        for a, b in zip((*got, *d_got), (*want, *d_want), strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("name", ["cross_entropy", "score"])
    def test_sequence_parallel(self, name):
        """Each rank has some of the tokens, and gets their gradient."""
        parts = self.parts()
        leaves = [t.clone().requires_grad_() for t in parts]
        want, d_want = self.differentiated(CALLS[name], ll.LinearLogits(*leaves), leaves)
        got, d_got, calls = self.on_shards(CALLS[name], parts, (9, 0, 28), 2, True)
        for a, b in zip((*got, *d_got), (*want, *d_want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
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
        parts = self.parts()
        leaves = [t.clone().requires_grad_() for t in parts]
        want, d_want = self.differentiated(CALLS[name], ll.LinearLogits(*leaves), leaves)
        for how in (Cut(N, 8), Cut(N, 8, kept=True), Cut(4, 16)):
            cut = lambda work, *_, how=how: how if work.merges else Cut(work.rows)  # noqa: E731
            monkeypatch.setattr(head, "choose", cut)
            got, d_got, calls = self.on_shards(CALLS[name], parts, (9, 0, 28), N)
            for a, b in zip((*got, *d_got), (*want, *d_want), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
            added = sum(count for what, count in calls[0] if what == "all_reduce")
            assert added in (N * D, (N - 1) * D)

    def test_d_hidden_is_added_up_once(self):
        """A chunk at a time, in forward where loss and gradient are made there."""
        _, _, calls = self.on_shards(CALLS["cross_entropy"], self.parts(), (20, 17), 3)
        for of_rank in calls:
            added = [count for what, count in of_rank if what == "all_reduce"]
            assert sum(added) == 5 * D  # of six rows, one is ignored
            assert len(added) == 2
