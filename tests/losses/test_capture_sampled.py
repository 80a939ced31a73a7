"""Draws against an inversion in fp64, their distribution, and the gradient that they estimate."""

import math

import pytest
import torch

import logitless as ll
from logitless.core.capture import Sampled, uniforms_of
from logitless.core.choose_backend import captured
from tests.support import oracle
from tests.support.calls import normal
from tests.support.rank_threads import on_ranks

SEED = 7
HOW = [
    {},
    {"proposal": 0.6},
    {"proposal": 1.5, "temperature": 2.0, "softcap": 5.0},
]


def generator(device="cpu", seed=SEED):
    return torch.Generator(device).manual_seed(seed)


def draw(x, n, seed=SEED, **how):
    return ll.capture_sampled(x, n, generator=generator(x.device, seed), **how)


def uniforms(rows, n, device="cpu", seed=SEED):
    return uniforms_of(torch.empty(rows, 1, device=device), n, generator(device, seed))


def test_uniform_numbers(device):
    """The k-th of n sorted uniform numbers has the distribution Beta(k, n + 1 - k)."""
    rows, n = 20_000, 7
    found = uniforms(rows, n, device)
    assert (found.diff(dim=1) >= 0).all()
    assert (found >= 0).all()
    assert (found <= 1).all()
    mean = torch.arange(1, n + 1, device=device) / (n + 1)
    variance = mean * (1 - mean) / (n + 2)
    assert ((found.mean(0) - mean).abs() < 4 * (variance / rows).sqrt()).all()
    torch.testing.assert_close(found.var(0), variance.double(), rtol=0.06, atol=0)
    counts = found.flatten().mul(50).long().clamp_max(49).bincount(minlength=50).double()
    expected = rows * n / 50
    assert ((counts - expected) ** 2 / expected).sum() < 49 + 4 * 98**0.5


def dense(targets, vocab):
    """The weights (rows, vocab) of sampled targets, after checks of their form."""
    ids, mask = targets.ids, targets.mask
    assert targets.tail is None
    assert ids.dtype == torch.int64
    assert mask.dtype == torch.bool
    assert bool(((ids >= 0) & (ids < vocab)).all())
    count = mask.sum(-1, keepdim=True)
    assert torch.equal(mask, torch.arange(ids.shape[-1], device=ids.device) < count)
    assert bool(((ids[..., 1:] > ids[..., :-1]) | ~mask[..., 1:]).all())  # ascending, distinct
    assert bool((ids[~mask] == 0).all())
    assert bool((targets.logprobs[~mask] == -torch.inf).all())
    weights = torch.where(mask, targets.logprobs.double().exp(), 0.0).flatten(0, -2)
    found = torch.zeros(len(weights), vocab, dtype=torch.float64, device=ids.device)
    return found.scatter_add_(-1, ids.flatten(0, -2), weights)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("dtype", "shape", "n"),
    [
        (torch.float32, (2, 3, 37), 9),
        (torch.bfloat16, (3, 1337), 10),
        (torch.float16, (3, 1024), 7),
    ],
)
def test_against_an_inversion_in_fp64(dtype, shape, n, how, impl, device):
    x = (normal(*shape, seed=1) * 3).to(dtype)
    before = x.clone()
    found = draw(x, n, **how)
    assert torch.equal(x, before)
    assert found.ids.shape == found.logprobs.shape == (*shape[:-1], n)
    assert found.logprobs.dtype == torch.float32
    rows = x.flatten(0, -2)
    want, margins = oracle.sampled(rows, uniforms(len(rows), n, x.device), **how)
    clear = margins > 3e-7
    assert clear.any()
    got = dense(found, shape[-1])
    torch.testing.assert_close(got[clear], want[clear], rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[:, 0]), rtol=1e-6, atol=0)


def test_weights_are_counts(impl, device):
    found = draw(normal(3, 40, seed=1) * 3, 25)
    counts = found.logprobs.double().exp() * 25
    assert torch.equal(counts.round().sum(-1), torch.full_like(counts[:, 0], 25))
    want = (counts.round() / 25).log().float()  # the same bits from counts, on every device
    assert torch.equal(found.logprobs, torch.where(found.mask, want, -torch.inf))


def test_rows_that_are_not_numbers(impl, device):
    x = normal(6, 700, seed=1) * 3
    x[1], x[2, 600], x[3, 5], x[4, :650] = -torch.inf, torch.nan, torch.inf, -torch.inf
    for start in (0, 1):  # also rows that do not start on 16-byte boundaries
        here = x[:, start:]
        found = draw(here, 4)
        assert not found.mask[1].any()
        for row in (2, 3):
            assert found.mask[row].tolist() == [True, False, False, False]
            assert found.logprobs[row, 0].isnan()
            assert bool((found.ids[row] == 0).all())
        assert bool((found.ids[4][found.mask[4]] >= 650 - start).all())
        others = draw(here.nan_to_num(0.0, posinf=0.0), 4)  # the other rows are as they were
        for row in (0, 4, 5):
            assert torch.equal(found.ids[row], others.ids[row]) or row == 4
        student = normal(6, 700 - start, seed=2).requires_grad_()
        how = {"divergence": "forward_kl", "support": "truncate", "reduction": "none"}
        loss = ll.topk_distill(student, found, **how)
        assert loss.isnan().tolist() == [False, False, True, True, False, False]
        assert loss[1] == 0


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_an_id_without_probability_is_never_drawn(offset, impl, device):
    """Neighbours of mass 0 on both sides of every id, for targets on every boundary."""
    x = torch.full((1, 600), -torch.inf, device=device)
    x[0, 3::41] = offset
    edges = torch.linspace(0, 1, len(x[0, 3::41]) + 1, dtype=torch.float64, device=device)[:-1]
    below = edges[1:].nextafter(torch.zeros_like(edges[1:]))
    numbers = torch.cat((edges, below, edges.new_tensor([1 - 2**-53]))).sort().values
    ids, logprobs, mask = captured(x, Sampled(numbers[None], 1.0), 1.0, None)
    drawn = ids[mask]
    assert torch.equal(drawn, torch.arange(3, 600, 41, device=device))
    counts = (logprobs[mask].double().exp() * len(numbers)).round()
    # Each boundary is drawn as the id after it, and a number just below as the id before it. A
    # boundary such as 1/3 is rounded, so one of both can be on the other side.
    assert bool((counts >= 1).all())
    assert bool((counts <= 3).all())
    assert counts.sum() == len(numbers)


@pytest.mark.parametrize("power", [19, 22, 30])
def test_ids_of_small_probability(power, impl, device):
    """599 ids, each 2^-power times as probable as the first id, are drawn in their places."""
    x = torch.full((1, 600), -power * math.log(2), device=device)
    x[0, 0] = 0
    wanted = torch.tensor([1, 2, 300, 511, 512, 513, 599], dtype=torch.float64, device=device)
    places = (1 + (wanted - 0.5) * 2.0**-power) / (1 + 599 * 2.0**-power)
    numbers = torch.cat((torch.zeros_like(places[:1]), places))[None]
    ids, _, mask = captured(x, Sampled(numbers, 1.0), 1.0, None)
    assert bool(mask.all())
    assert ids[0].tolist() == [0, *wanted.long().tolist()]


def test_shapes(impl, device):
    assert draw(torch.zeros(3, 1, device=device), 5).mask.sum(-1).tolist() == [1, 1, 1]
    assert draw(torch.zeros(0, 4, 9, device=device), 5).ids.shape == (0, 4, 5)
    assert draw(torch.zeros(9, device=device), 5).ids.shape == (5,)
    n = 1024 if impl == "eager" else 33
    many = draw(normal(1, 30, seed=1), n)  # more draws than ids
    want, margins = oracle.sampled(normal(1, 30, seed=1), uniforms(1, n, many.device))
    assert margins.min() > 3e-7
    torch.testing.assert_close(dense(many, 30), want, rtol=2e-6, atol=0)
    apart = normal(4, 3, 50, seed=1).transpose(0, 1)[:, :, 1:]  # neither contiguous nor aligned
    assert torch.equal(draw(apart, 5).ids, draw(apart.contiguous(), 5).ids)


def test_meta():
    x = torch.empty(3, 5, device="meta")
    assert ll.capture_sampled(x, 4).ids.shape == (3, 4)


# --- the distribution of draws, on every source of logits

ROWS, VOCAB, WIDTHS = 60, 13, (5, 0, 8)
HIDDEN, WEIGHT = normal(1, 4, seed=3).expand(ROWS, 4), normal(VOCAB, 4, seed=4)


def on_three_ranks(part, n, order=(0, 1, 2), **how):
    """The targets that three ranks capture; `part(start, width)` returns the logits of a rank."""
    starts = [sum(WIDTHS[:i]) for i in range(3)]

    def work(ranks):
        mine = order[ranks.index]
        shard = ll.VocabShard(part(starts[mine], WIDTHS[mine]), ranks, starts[mine])
        # Only the numbers of the first rank count.
        return draw(shard, n, seed=SEED + ranks.index, **how)

    first, *others = on_ranks(3, work)
    for other in others:
        assert torch.equal(first.ids, other.ids)
        assert torch.equal(first.mask, other.mask)
        assert torch.equal(first.logprobs.nan_to_num(9.0), other.logprobs.nan_to_num(9.0))
    return first


def over(made):
    return lambda n, **how: draw(made(HIDDEN, WEIGHT), n, **how)


def over_ranks(made, order=(0, 1, 2)):
    def part(start, width):
        return made(HIDDEN, WEIGHT[start : start + width])

    return lambda n, **how: on_three_ranks(part, n, order, **how)


def plain(h, w):
    return h @ w.T


def head(h, w):
    return ll.LinearLogits(h, w, workspace=2000)


def lazy(h, w):
    return ll.LinearLogits(h, w) * 1.0


SOURCES = {
    "tensor": over(plain),
    "head": over(head),
    "lazy": over(lazy),
    "lazy, scaled": over(lambda h, w: lazy(h, w / 2) * 2.0),
    "ranks": over_ranks(plain),
    "ranks, in another order": over_ranks(plain, (2, 0, 1)),
    "heads of ranks": over_ranks(head),
    "lazy, on ranks": over_ranks(lazy),
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_seed_draws_the_same_ids(source):
    for how in ({}, {"proposal": 0.7, "temperature": 1.5, "softcap": 4.0}):
        want, found = SOURCES["tensor"](8, **how), SOURCES[source](8, **how)
        assert torch.equal(found.ids, want.ids)
        torch.testing.assert_close(found.logprobs, want.logprobs)
    assert not torch.equal(SOURCES["tensor"](8, seed=SEED + 1).ids, SOURCES["tensor"](8).ids)


@pytest.mark.parametrize("source", ["tensor", "head", "ranks", "heads of ranks"])
def test_chi_square(source):
    n = 500
    counts = (dense(SOURCES[source](n, proposal=1.0), VOCAB) * n).sum(0)
    expected = ROWS * n * torch.softmax(HIDDEN[0].double() @ WEIGHT.double().T, -1)
    assert ((counts - expected) ** 2 / expected).sum() < 40  # 12 degrees: below 32.9 in 99.9 %
    biased = (dense(SOURCES[source](n, proposal=1.0, temperature=1.1), VOCAB) * n).sum(0)
    assert ((biased - expected) ** 2 / expected).sum() > 40  # what the test can tell apart


def test_on_triton_ranks():
    """Kernels on ranks, with a row of NaN on one rank and columns of -inf on another."""
    x = normal(4, VOCAB, seed=1)
    x[1, 2], x[2, :5] = torch.nan, -torch.inf
    with ll.impl("triton"):
        want = draw(x, 6, proposal=0.8)
        found = on_three_ranks(lambda start, width: x[:, start : start + width], 6, proposal=0.8)
    assert torch.equal(found.ids, want.ids)
    assert torch.equal(found.mask, want.mask)
    torch.testing.assert_close(found.logprobs, want.logprobs, equal_nan=True)


@pytest.mark.parametrize("proposal", [1.0, 0.5])
def test_what_is_sent(proposal):
    """Numbers per row: n uniforms, the max, mass and start, n ids, and n logits for weights."""
    x, n = normal(4, VOCAB, seed=1), 6

    def work(ranks):
        start, width = ((0, 7), (7, VOCAB - 7))[ranks.index]
        shard = ll.VocabShard(x[:, start : start + width], ranks)
        draw(shard, n, proposal=proposal)
        return ranks.calls

    for calls in on_ranks(2, work):
        (_, *counts) = [count // 4 for _, count in calls]  # the first exchanges the widths
        assert counts == [n, 1, 2, n] + [n] * (proposal != 1)


def test_dtensor():
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    x = normal(3, 9, seed=1).cpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Shard(1), Replicate()):
            found = draw(distribute_tensor(x, mesh, [placement]), 6)
            assert torch.equal(found.ids, draw(x, 6).ids)
    finally:
        dist.destroy_process_group()


# --- the estimated gradient


def test_the_gradient_is_an_estimate_of_the_full_gradient():
    """The mean over 2,000 captures is within 4 standard errors; the same number of top ids is not.

    Eight draws have at most eight distinct ids, so that eight top ids take at least as many bytes.
    """
    captures, vocab, n = 2000, 40, 8
    teacher, student = normal(1, vocab, seed=1), normal(1, vocab, seed=2)
    how = {"divergence": "forward_kl", "support": "truncate", "reduction": "sum"}

    def gradient(targets, rows):
        x = student.repeat(rows, 1).requires_grad_()
        ll.topk_distill(x, targets, **how).backward()
        assert x.grad is not None
        return x.grad.double()

    full = student.double() * 1
    full.requires_grad_()
    ll.kl_div(full, teacher.double(), direction="forward", reduction="sum").backward()
    assert full.grad is not None
    each = gradient(draw(teacher.expand(captures, vocab), n), captures)
    p = torch.softmax(teacher[0].double(), -1)
    error = (p * (1 - p) / (n * captures)).sqrt()
    torch.testing.assert_close(each.std(0) / captures**0.5, error, rtol=0.3, atol=0)
    assert ((each.mean(0) - full.grad[0]).abs() / error).max() < 4
    truncated = gradient(ll.capture_topk(teacher, n), 1)[0]
    assert ((truncated - full.grad[0]).abs() / error).max() > 20


def test_other_proposals_estimate_the_same_distribution():
    """Self-normalised weights: the bias falls with n."""
    logits = normal(1, 30, seed=1) * 2
    p = torch.softmax(logits.double(), -1)[0]
    for proposal in (0.5, 1.3):
        # The error and the bias of self-normalised weights, to first order in 1 / n.
        ratio = p / (p**proposal / (p**proposal).sum())
        spread = (p * ratio).sum()
        error = ((p * ratio - 2 * p**2 * ratio + p**2 * spread) / 400 / 400).sqrt()
        bias = p * (spread - ratio).abs() / 400
        mean = dense(draw(logits.expand(400, 30), 400, proposal=proposal), 30).mean(0)
        assert ((mean - p).abs() <= 5 * error + 2 * bias).all()


# --- a row in other batches, other functions of PyTorch, and errors


def test_invariant(impl, device):
    x, u = (normal(5, 333, seed=1) * 3).bfloat16(), uniforms(5, 20, device)
    with ll.invariant():
        together = captured(x, Sampled(u, 0.7), 1.0, None)
        for row in (0, 3):
            alone = captured(x[row : row + 1].clone(), Sampled(u[row : row + 1], 0.7), 1.0, None)
            assert all(torch.equal(a[row], b[0]) for a, b in zip(together, alone, strict=True))


def test_under_compile():
    x = normal(3, 17, seed=1)
    torch.manual_seed(1)
    want = ll.capture_sampled(x, 4).ids
    torch.manual_seed(1)
    got = torch.compile(lambda x: ll.capture_sampled(x, 4).ids + 0, backend="eager")(x)
    assert torch.equal(got, want)


def test_without_a_generator():
    x = normal(3, 17, seed=1)
    torch.manual_seed(1)
    want = ll.capture_sampled(x, 4).ids
    other = ll.capture_sampled(x, 4).ids
    torch.manual_seed(1)
    assert torch.equal(ll.capture_sampled(x, 4).ids, want)
    assert not torch.equal(other, want)


def test_bad_arguments():
    with pytest.raises(TypeError, match="generator must be a"):
        ll.capture_sampled(torch.zeros(2, 5), 3, generator=5)  # pyright: ignore
    with pytest.raises(
        ValueError, match="generator must be on the device of logits, meta, got cpu"
    ):
        ll.capture_sampled(torch.zeros(2, 5, device="meta"), 3, generator=torch.Generator())
    with pytest.raises(ValueError, match=r"at most 4194304 columns for draws, got \(1, 4194305\)"):
        ll.capture_sampled(torch.zeros(1, 1).expand(1, 2**22 + 1), 3)
    with pytest.raises(RuntimeError, match="logits must not be mapped"):
        torch.func.vmap(lambda x: ll.capture_sampled(x, 2).ids)(torch.zeros(3, 2, 5))
