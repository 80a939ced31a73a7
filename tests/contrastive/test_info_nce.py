"""InfoNCE against materialised logits: every option, both backends, all gradients."""

import pytest
import torch

import logitless as ll
from logitless.kernels import config
from tests.support import oracle
from tests.support.contrastive import SMALL, assert_right, embeddings, gradients
from tests.support.laws import error

N, M = 37, 45
CASES = {
    "symmetric": {},
    "one way": {"symmetric": False},
    "rectangular": {"symmetric": False, "m": M},
    "positives": {"symmetric": False, "m": M, "positives": True},
    "ignored": {"symmetric": False, "m": M, "positives": "ignored"},
    "mask": {"mask": True},
    "mask of columns": {"mask": "transposed"},
    "mask one way": {"symmetric": False, "m": M, "mask": True, "positives": True},
    "labels": {"labels": True},
    "labels one way": {"symmetric": False, "m": M, "labels": True, "positives": "ignored"},
    "labels and mask": {"labels": True, "mask": True},
}


def options(case, device):
    how = dict(CASES[case])
    m = how.pop("m", N)
    kind = how.pop("positives", None)
    if kind:
        how["positives"] = torch.randint(0, m, (N,), device=device)
        if kind == "ignored":
            how["positives"][::4] = -100
    kind = how.pop("mask", None)
    if kind:
        shape = (m, N) if kind == "transposed" else (N, m)
        mask = torch.rand(shape, device=device) < 0.4
        how["mask"] = mask.T if kind == "transposed" else mask
    if how.pop("labels", None):
        how["labels"] = tuple(torch.randint(0, 5, (size,), device=device) for size in (N, m))
    return m, how


@pytest.fixture
def small_tiles():
    with config.override(block_v=32, block_n=16, span=16, num_warps=4):
        yield


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", CASES)
def test_eager(case, reduction, device):
    m, how = options(case, device)
    a, b = embeddings(N, m, device=device)
    scale = torch.tensor(3.0, dtype=torch.float64, device=device)
    with ll.impl("eager"):
        assert_right("contrastive", a, b, scale=scale, reduction=reduction, **how)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("small_tiles")
def test_kernels(case, device):
    m, how = options(case, device)
    a, b = embeddings(N, m, torch.float32, device)
    scale = torch.tensor(3.0, device=device)
    with ll.impl("triton"):
        assert_right("contrastive", a, b, scale=scale, reduction="none", **how)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", ["symmetric", "one way", "positives", "ignored", "labels"])
@pytest.mark.usefixtures("small_tiles")
def test_kernels_of_16_bits(case, reduction, device):
    """16-bit similarities need one exponential per pair, if no pairs are left out."""
    m, how = options(case, device)
    a, b = embeddings(N, m, torch.bfloat16, device)
    scale = torch.tensor(3.0, device=device)
    with ll.impl("triton"):
        assert_right("contrastive", a, b, scale=scale, reduction=reduction, **how)


@pytest.mark.parametrize("scale", [30.0, 300.0])
@pytest.mark.usefixtures("small_tiles")
def test_normalisers_far_apart(scale, device):
    """Rows whose normalisers differ by more than fp32 can express need two exponentials."""
    a, b = embeddings(32, 32, torch.float16, device)
    a[::2] *= 4
    b[::3] *= 0.125
    with ll.impl("triton"):
        assert_right("contrastive", a, b, scale=torch.tensor(scale, device=device))


@pytest.mark.parametrize(("near", "scale"), [(0.3, 100.0), (0.01, 700.0)])
@pytest.mark.usefixtures("impl")
def test_large_logits_with_small_differences(near, scale, device):
    """A normaliser that is rounded to one fp32 number would lose the digits of the differences.

    The rounding of large logits makes one error large or small by chance, so errors are added.
    """
    ours, theirs = torch.zeros(3), torch.zeros(3)
    for _ in range(4):
        a, b = (1 + near * t for t in embeddings(N, N, torch.float32, device))
        one = torch.ones((), dtype=torch.float64, device=device)
        want = gradients(oracle.contrastive, a.double(), b.double(), one, scale=scale)
        for errors, function in ((ours, ll.contrastive), (theirs, oracle.contrastive)):
            found = gradients(function, a, b, one, scale=scale)
            errors += torch.tensor([error(x, y) for x, y in zip(found, want, strict=True)])
    assert (ours <= 2 * theirs).all(), (ours, theirs)


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.usefixtures("impl")
def test_equal_pairs(scale, device):
    """If all pairs are equal, all gradients cancel."""
    a = torch.full((10, 4), 0.5, device=device)
    found = gradients(
        ll.contrastive, a, a, torch.ones((), device=device), scale=scale, symmetric=False
    )
    assert found[1].abs().max() <= 1e-6 * scale


@pytest.mark.parametrize("shape", [(6, 1), (1, 1)])
@pytest.mark.usefixtures("impl")
def test_one_column(shape, device):
    """A row whose only pair is its positive has a loss and a gradient of exactly 0."""
    a, b = embeddings(*shape, torch.bfloat16, device)
    found = gradients(
        ll.contrastive, a, b, torch.ones((), device=device), scale=7.3, symmetric=False,
        positives=torch.zeros(shape[0], dtype=torch.int64, device=device), reduction="none",
    )  # fmt: skip
    assert not any(t.any() for t in found)


@pytest.mark.parametrize("n", [16, 37])
@pytest.mark.usefixtures("impl", "small_tiles")
def test_a_left_out_column_does_not_reach_the_gradient_of_scale(n, device):
    a, b = embeddings(n, n + 16, torch.float32, device)
    b[-1] = torch.inf
    mask = torch.zeros(n, n + 16, dtype=torch.bool, device=device)
    mask[:, -1] = True
    *_, d_scale = gradients(
        ll.contrastive, a, b, torch.ones((), device=device), ("scale",), symmetric=False,
        scale=torch.tensor(2.0, device=device), mask=mask,
    )  # fmt: skip
    assert d_scale.isfinite()


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.usefixtures("impl", "small_tiles")
def test_an_infinite_embedding_spoils_all_losses(name, value, device):
    """Both directions of a batch contain every embedding."""
    pair = dict(zip("ab", embeddings(N, N, torch.bfloat16, device), strict=True))
    pair[name][3, 5] = value
    loss = ll.contrastive(pair["a"], pair["b"], scale=3.0, reduction="none")
    assert loss.isnan().any()
    assert not loss.mean().isfinite()


@pytest.mark.usefixtures("small_tiles")
def test_whole_tiles(device):
    """Sizes that are multiples of all tiles take another path in the kernels."""
    a, b = embeddings(32, 32, torch.float32, device)
    with ll.impl("triton"):
        assert_right("contrastive", a, b, scale=torch.tensor(2.0, device=device), workspace=None)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.usefixtures("impl")
def test_no_rows(reduction, device):
    a, b = embeddings(0, 0, torch.float32, device)
    scale = torch.tensor(2.0, device=device)
    value, d_a, d_b, d_scale = gradients(
        ll.contrastive, a, b, torch.ones((), device=device), ("scale",), scale=scale,
        reduction=reduction,
    )  # fmt: skip
    assert value.shape == ((0,) if reduction == "none" else ())
    assert not value.any()
    assert d_a.shape == d_b.shape == a.shape
    assert d_scale == 0


@pytest.mark.usefixtures("impl")
def test_all_rows_ignored(device):
    a, b = embeddings(4, 6, torch.float32, device)
    value, *found = gradients(
        ll.contrastive, a, b, torch.ones((), device=device), symmetric=False,
        positives=torch.full((4,), 7, device=device), ignore_index=7,
    )  # fmt: skip
    assert value == 0
    assert not any(t.any() for t in found)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("left_out", [None, "mask", "labels"])
@pytest.mark.usefixtures("impl", "small_tiles")
def test_ignored_rows_are_not_read(left_out, reduction, device):
    """As padding: NaN embeddings, an infinite upstream gradient, and all pairs left out."""
    a, b = embeddings(N, M, torch.float32, device)
    ignored = torch.arange(N, device=device) % 3 == 0
    positives = torch.randint(0, M, (N,), device=device).masked_fill(ignored, -100)
    upstream = torch.ones(N if reduction == "none" else (), device=device)
    how = {"symmetric": False, "positives": positives, "reduction": reduction}
    how["scale"] = torch.tensor(2.0, device=device)
    clean = gradients(ll.contrastive, a, b, upstream, ("scale",), **how)
    a[ignored] = torch.nan
    if reduction == "none":
        upstream[ignored] = torch.inf
    if left_out == "mask":
        how["mask"] = ignored.unsqueeze(1).expand(N, M).contiguous()
    elif left_out == "labels":
        how["labels"] = ignored.long(), torch.ones(M, dtype=torch.int64, device=device)
    dirty = gradients(ll.contrastive, a, b, upstream, ("scale",), **how)
    for x, y in zip(clean, dirty, strict=True):
        assert torch.equal(x, y)
    assert not dirty[1][ignored].any()


@pytest.mark.parametrize("by", ["mask", "labels"])
@pytest.mark.usefixtures("impl", "small_tiles")
def test_only_the_positives_are_left(by, device):
    """Loss and gradients are exactly 0."""
    a, b = embeddings(N, N, torch.float32, device)
    how = {"mask": torch.ones(N, N, dtype=torch.bool, device=device)}
    if by == "labels":
        how = {"labels": torch.zeros(N, dtype=torch.int64, device=device)}
    found = gradients(
        ll.contrastive, a, b, torch.ones((), device=device), ("scale",),
        scale=torch.tensor(7.3, device=device), reduction="none", **how,
    )  # fmt: skip
    assert not any(t.any() for t in found)


@pytest.mark.usefixtures("impl")
def test_large_logits(device):
    """Logits of ±10,000 neither overflow nor underflow."""
    a, b = embeddings(N, N, torch.float32, device)
    assert_right("contrastive", a, b, scale=torch.tensor([1e4], device=device))


@pytest.mark.usefixtures("impl", "small_tiles")
def test_nan_stays_in_its_row_and_column(device):
    a, b = embeddings(N, N, torch.float32, device)
    a[5] = torch.nan
    one_way = ll.contrastive(a, b, symmetric=False, reduction="none")
    assert one_way.isnan().nonzero().flatten().tolist() == [5]
    assert ll.contrastive(a, b, reduction="none").isnan().all()


@pytest.mark.usefixtures("impl")
def test_the_same_bits_every_time(device):
    a, b = embeddings(N, N, torch.float32, device)
    how = {"scale": torch.tensor(3.0, device=device), "workspace": SMALL}
    one = torch.ones((), device=device)
    first, second = (
        gradients(ll.contrastive, a, b, one, ("scale",), **how) for _ in range(2)
    )  # fmt: skip
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("impl")
def test_strided_inputs(device):
    wide = torch.randn(N, 2 * 24, device=device)
    a, b = wide[:, ::2], torch.randn(24, N, device=device).T
    assert_right("contrastive", a, b, scale=torch.tensor(1.0, device=device))


@pytest.mark.usefixtures("impl", "nobody_looks")
def test_positives_out_of_range(device):
    """Values that are not checked make the row NaN, and read nothing out of bounds."""
    a, b = embeddings(4, 6, torch.float32, device)
    positives = torch.tensor([0, 6, -1, 3], device=device)
    a.requires_grad_()
    loss = ll.contrastive(a, b, symmetric=False, positives=positives, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, False]
    (d_a,) = torch.autograd.grad(loss.sum(), a)
    assert d_a.isnan().any(1).tolist() == [False, True, True, False]


def test_equal_to_two_cross_entropies(impl, device):
    a, b = embeddings(N, N, torch.float32, device)
    t = torch.arange(N, device=device)
    both = [ll.linear_cross_entropy(5.0 * x, y, t) for x, y in ((a, b), (b, a))]
    torch.testing.assert_close(ll.contrastive(a, b, scale=5.0), sum(both) / 2)


def test_a_number_as_scale(impl, device):
    a, b = embeddings(N, N, torch.float32, device)
    assert_right("contrastive", a, b, scale=2.5, numbers=())
    want = oracle.contrastive(a.double(), b.double(), scale=3)
    torch.testing.assert_close(ll.contrastive(a, b, scale=3).double(), want, rtol=1e-5, atol=0)
