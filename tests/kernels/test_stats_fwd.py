"""Rows in blocks and splits: padding, -inf and offsets cost no exactness."""

import math

import pytest
import torch

import logitless as ll
from logitless import eager, kernels
from logitless.contract import Partials, Reading
from logitless.kernels import config
from tests.support import oracle
from tests.support.laws import ROUNDING, error, poisoned_memory, value_and_grad
from tests.support.statistics import WANTS, grads

BLOCK = 32


@pytest.fixture(params=[1, 3], ids=["whole rows", "3 splits"])
def cut(request, impl):
    """Blocks of 32 columns, with each row by one program, and split over three."""
    with config.override(block_v=BLOCK, splits=request.param):
        yield request.param


def assert_is(ours, naive, x, tolerance=ROUNDING):
    """Value and gradient of ours are those of naive in fp64, under a random upstream gradient."""
    upstream = torch.randn(naive(x.double()).shape, dtype=torch.float64).to(x.device)
    got = value_and_grad(ours, x, upstream)
    want = value_and_grad(naive, x.double(), upstream)
    assert error(got[0], want[0]) <= tolerance
    assert error(got[1], want[1]) <= tolerance


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("V", [1, BLOCK - 1, BLOCK + 1, 3 * BLOCK + 4])
def test_padded_columns_are_not_counted(V, device):
    """Padded columns counted in the logsumexp where V is not a multiple of the tile.

    Far below 0, one padded column read as 0 would be all of the result.
    """
    x = torch.randn(2, V, device=device) - 60
    target = torch.randint(0, V, (2,), device=device)
    assert_is(ll.logsumexp, oracle.logsumexp, x)
    assert_is(
        lambda x: ll.cross_entropy(x, target, reduction="none"),
        lambda x: oracle.cross_entropy(x, target, reduction="none"),
        x,
    )


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("offset", [-1e2, -1e4, -1e6])
def test_all_negative_logits(offset, device):
    """A max that starts at 0: all-negative logits give inf or NaN."""
    x = torch.randn(2, 70, device=device) + offset
    assert_is(ll.logsumexp, oracle.logsumexp, x)
    assert_is(ll.entropy, oracle.entropy, x)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(
    ("V", "place"), [(96, 0), (101, 0), (101, 1), (96, 2)], ids=["first", "odd", "middle", "last"]
)
@pytest.mark.parametrize(
    "low", [-torch.inf, torch.finfo(torch.float32).min], ids=["-inf", "lowest float"]
)
def test_a_block_all_minus_inf(V, place, low, device):
    """First block of a row all -inf: NaN. Nor is there one from any block, or the lowest float."""
    x = torch.randn(1, V, device=device) * 2
    x[:, place * BLOCK : (place + 1) * BLOCK] = low
    rest = (x[0] > low).nonzero().squeeze(1)
    target = rest[[3]]
    assert_is(ll.logsumexp, oracle.logsumexp, x)
    assert_is(ll.entropy, lambda x: oracle.entropy(x[:, rest]), x)
    assert_is(lambda x: ll.cross_entropy(x, target), lambda x: oracle.cross_entropy(x, target), x)
    assert torch.equal(ll.score(x, target).argmax, x.argmax(1))


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("V", [BLOCK + 1, 3 * BLOCK - 1])
def test_softcap_comes_before_padding(V, device):
    """softcap applied after padding: padded -inf columns become -softcap and count."""
    x = torch.full((2, V), -100.0, device=device)
    want = torch.full((2,), -5 + math.log(V), device=device)
    torch.testing.assert_close(ll.logsumexp(x, softcap=5.0), want, rtol=0, atol=2e-6)
    # Of logits far beyond the cap, 1 - tanh² would measure only the rounding of tanh.
    assert_is(
        lambda x: ll.logsumexp(x, softcap=5.0),
        lambda x: oracle.logsumexp(x, softcap=5.0),
        torch.randn_like(x) * 3 - 5,
    )


@pytest.fixture
def reading(device):
    x = torch.randn(2, 150, device=device) * 3
    x[1, :64] = -torch.inf  # whole blocks, and whole splits
    ids = torch.randint(64, 100, (2, 4), device=device)
    return x, ids


@pytest.mark.parametrize(("splits", "block_v"), [(1, 32), (2, 32), (3, 16), (5, 16), (1, 256)])
def test_result_does_not_depend_on_the_cut(splits, block_v, reading):
    x, ids = reading
    want = grads(ll.row_stats, x.double(), ids, **WANTS)
    with ll.impl("triton"), config.override(block_v=block_v, splits=splits):
        got = grads(ll.row_stats, x, ids, **WANTS)
    assert torch.equal(got.pop("argmax"), want.pop("argmax"))
    for name in got:
        assert error(got[name], want[name]) <= ROUNDING, name


@pytest.mark.parametrize(("splits", "V"), [(1, 77), (3, 77), (3, 64)])
@pytest.mark.usefixtures("small_blocks")
def test_every_output_element_is_written(splits, V, device):
    x = torch.randn(4, V, device=device)
    target = torch.tensor([1, -100, V - 1, -100], device=device)
    ids = torch.randint(0, V, (4, 3), device=device)
    losses = []
    with poisoned_memory(), config.override(splits=splits):
        score = ll.score(x, target)
        everything = grads(ll.row_stats, x, ids, **WANTS)
        for inplace in (False, True):
            leaf = x.clone().requires_grad_()
            loss = ll.cross_entropy(
                leaf * 1, target, label_smoothing=0.1, reduction="none", inplace=inplace
            )
            loss.sum().backward()
            losses += [loss, leaf.grad]
    for value in (*score[:3], *everything.values(), *losses):
        assert value.isfinite().all()
    for best in (score.argmax[target >= 0], everything["argmax"]):
        assert ((best >= 0) & (best < V)).all()
    ignored = target == -100
    assert (score.argmax[ignored] == -1).all()
    for value in (score.logprob, score.entropy, score.lse, *losses):
        assert not value[ignored].any()


@pytest.mark.usefixtures("small_blocks")
def test_inputs_are_untouched_and_results_bitwise_repeatable(device):
    x = torch.randn(3, 77, device=device)
    given = {
        "target": torch.tensor([5, -100, 76], device=device),
        "weight": torch.rand(77, device=device),
        "row_weight": torch.rand(3, device=device),
        "temperature": torch.rand(3, device=device) + 0.5,
    }
    ids = torch.randint(0, 77, (3, 3), device=device)
    kept = {name: t.clone() for name, t in given.items()} | {"x": x.clone(), "ids": ids.clone()}
    runs = []
    for _ in range(2):
        leaf = x.requires_grad_()
        loss = ll.cross_entropy(leaf, **given, label_smoothing=0.2, z_loss=0.1, softcap=9.0)
        (grad,) = torch.autograd.grad(loss, leaf)
        stats = grads(ll.row_stats, x, ids, softcap=9.0, **WANTS)
        runs.append([loss.detach(), grad, *stats.values()])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    for name, t in given.items() | {"x": x.detach(), "ids": ids}.items():
        assert torch.equal(t, kept[name]), name


@pytest.mark.parametrize("run", [eager, kernels])
def test_parts_far_below_weigh_nothing(run, device):
    """A block that is masked with the lowest number: 0 times a distance of 1e38 is 0."""
    reading = Reading(128, wants=("lse", "entropy"))
    x = torch.randn(4, 64, device=device)
    masked = torch.full_like(x, torch.finfo(torch.float32).min)
    parts = [run.partial(t, reading, start) for start, t in ((0, x), (64, masked))]
    found = run.finish(run.merge(parts, reading), reading)
    together = run.finish(Partials(torch.cat([p.state for p in parts], 1)), reading)
    for ours in (found, together):
        torch.testing.assert_close(ours.entropy.view(-1), ll.entropy(x))
        torch.testing.assert_close(ours.lse.view(-1), ll.logsumexp(x))


@pytest.mark.parametrize("V", [1, 7, 32, 65])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.usefixtures("small_blocks")
def test_any_vocabulary_size(V, splits, device):
    x = torch.randn(1, V, device=device)
    ids = torch.randint(0, V, (1, 2), device=device)
    with ll.impl("eager"):
        want = grads(ll.row_stats, x.double(), ids, **WANTS)
    with config.override(splits=splits):
        got = grads(ll.row_stats, x, ids, **WANTS)
    if V == 1:
        assert torch.equal(got["lse"], x[:, 0])
        assert not got["entropy"].any()
        assert not got["d_entropy"].any()
        return
    for name in got:
        assert error(got[name], want[name]) <= ROUNDING, name
