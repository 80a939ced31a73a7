"""Laws of the statistics: parts merge in any order; cuts, shapes and strides do not matter."""

import math

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import error, poisoned_memory

import logitless as ll
from logitless import Partial, merge, partial
from logitless.kernels import config

INF = math.inf
WANTS = {"entropy": True, "total": True, "argmax": True}
ROUNDING = 4e-6  # of fp32 against fp64, relative to the largest value


# --- parts of a row, in fp64: what is left is the law, not rounding

logit = st.one_of(
    st.floats(-50, 50),
    st.floats(-1e6, 1e6),
    st.sampled_from([-INF, torch.finfo(torch.float32).min, -0.0]),
)
columns = st.lists(logit, max_size=6).map(lambda z: torch.tensor(z, dtype=torch.float64))
quick = settings(max_examples=100, deadline=None, derandomize=True)
EMPTY = partial(torch.zeros(0, dtype=torch.float64))


def same(left: Partial, right: Partial) -> None:
    """Equal to fp64 rounding; w to that of the terms it is a sum of, each d e^d < 1."""
    torch.testing.assert_close(left.m, right.m, rtol=0, atol=0)
    torch.testing.assert_close(left.s, right.s, rtol=1e-12, atol=0)
    torch.testing.assert_close(left.w, right.w, rtol=1e-12, atol=1e-12)


@quick
@given(columns, columns)
def test_merge_is_the_partial_of_the_whole(a, b):
    same(merge(partial(a), partial(b)), partial(torch.cat((a, b))))


@quick
@given(columns, columns)
def test_merge_is_commutative(a, b):
    a, b = partial(a), partial(b)
    same(merge(a, b), merge(b, a))


@quick
@given(columns, columns, columns)
def test_merge_is_associative(a, b, c):
    a, b, c = partial(a), partial(b), partial(c)
    same(merge(merge(a, b), c), merge(a, merge(b, c)))


@quick
@given(columns)
def test_the_empty_part_is_the_identity(a):
    a = partial(a)
    for whole in (merge(a, EMPTY), merge(EMPTY, a)):
        for got, want in zip(whole, a, strict=True):
            assert torch.equal(got, want)


@quick
@given(columns, columns)
def test_partial_gives_logsumexp_and_entropy(a, b):
    z = torch.cat((a, b))
    got = merge(partial(a), partial(b))
    if (z == -INF).all():
        assert got.lse == -INF
        assert got.entropy == 0
        return
    torch.testing.assert_close(got.lse, torch.logsumexp(z, 0))
    torch.testing.assert_close(got.entropy, oracle.entropy(z), rtol=1e-10, atol=1e-10)


def test_the_empty_part_says_so():
    assert [t.item() for t in EMPTY] == [-INF, 0.0, 0.0]
    assert EMPTY.lse == -INF
    assert EMPTY.entropy == 0
    both = merge(EMPTY, EMPTY)
    assert [t.item() for t in both] == [-INF, 0.0, 0.0]


def test_a_nan_stays_in_its_row():
    z = torch.randn(3, 8)
    z[1, 5] = torch.nan
    whole = merge(partial(z[:, :4]), partial(z[:, 4:]))
    for value in (whole.lse, whole.entropy):
        assert value.isnan().tolist() == [False, True, False]


def test_a_plus_inf_logit_gives_lse_plus_inf():
    z = torch.tensor([[1.0, INF, 2.0, 3.0], [INF, 1.0, INF, 2.0]])
    want = torch.logsumexp(z, 1)
    assert torch.equal(partial(z).lse, want)
    assert torch.equal(merge(partial(z[:, :2]), partial(z[:, 2:])).lse, want)


@pytest.mark.parametrize("size", [1, 8, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_part_at_the_lowest_float_vanishes(size, dtype):
    """The value that masks are made of: d · s overflows long before e^d forgets it."""
    low = torch.full((size,), torch.finfo(dtype).min, dtype=dtype)
    z = torch.randn(5, dtype=dtype)
    for whole in (merge(partial(low), partial(z)), merge(partial(z), partial(low))):
        for got, want in zip(whole, partial(z), strict=True):
            assert torch.equal(got, want)


# --- row_stats: how a row is cut is nobody's business


def grads(f, x, *args, **how):
    """Each statistic of row_stats, and its gradient under an upstream that differs by row."""
    leaf = x.detach().requires_grad_()
    stats = f(leaf, *args, **how)
    out = {"argmax": stats.argmax}
    for name in ("lse", "picked", "entropy", "total"):
        value = getattr(stats, name)
        generator = torch.Generator().manual_seed(3)
        upstream = torch.randn(value.shape, generator=generator).to(value)
        out[name] = value.detach()
        (out[f"d_{name}"],) = torch.autograd.grad(value, leaf, upstream, retain_graph=True)
    return out


@pytest.fixture
def reading(device):
    x = torch.randn(3, 150, device=device) * 3
    x[1, :64] = -INF  # whole blocks, and whole splits
    ids = torch.randint(64, 100, (3, 4), device=device)
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


@pytest.mark.parametrize(("rows", "V"), [(80, 60_000), (3, 2_200_000)], ids=["many", "long"])
def test_result_does_not_depend_on_eager_chunks(rows, V, device):
    """More than eager has in work at once, 8 MiB of fp32: many rows, or more than that in each."""
    x = torch.randn(rows, V, device=device)
    x[1, :64] = -INF
    ids = torch.randint(64, 100, (rows, 4), device=device)
    upstream = torch.randn(rows, device=device)

    def found(some):
        leaf = x[some].requires_grad_()
        stats = ll.row_stats(leaf, ids[some], **WANTS)
        loss = stats.lse + stats.picked.sin().sum(-1) + stats.entropy + 0.1 * stats.total
        return *stats, *torch.autograd.grad(loss, leaf, upstream[some])

    with ll.impl("eager"):
        whole = found(slice(None))
        step = max(rows // 9, 1)
        parts = [found(slice(i, i + step)) for i in range(0, rows, step)]
    for value, part in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(value, torch.cat(part), rtol=1e-6, atol=1e-6, equal_nan=True)


# --- row_stats: laws of the formulas

READS = {
    "loss": lambda x, t: ll.cross_entropy(x, t, reduction="none"),
    "smoothed": lambda x, t: ll.cross_entropy(x, t, reduction="none", label_smoothing=0.4),
    "entropy": lambda x, t: ll.entropy(x),
    "logprob": lambda x, t: ll.token_logprobs(x, t),
    "cold": lambda x, t: ll.score(x, t, temperature=0.5).logprob,
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.usefixtures("small_blocks")
def test_a_common_offset_changes_nothing(name, offset, device):
    """z + const: the same numbers to fp32 rounding, where the addition itself is exact."""
    x = (torch.randn(3, 70, device=device) * 512).round() / 512  # 1e4 + x needs no more digits
    assert torch.equal((x + offset) - offset, x)
    target = torch.randint(0, 70, (3,), device=device)
    results = []
    for shifted in (x, x + offset):
        leaf = shifted.requires_grad_()
        value = READS[name](leaf, target)
        results.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
    for plain, moved in zip(*results, strict=True):
        torch.testing.assert_close(moved, plain, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_blocks")
def test_entropy_is_between_0_and_log_V(scale, dtype, device):
    V = 100
    x = (torch.randn(4, V, device=device) * scale).to(dtype)
    x[0] = 0
    x[1, 1:] = -INF
    h = ll.entropy(x)
    assert (h >= 0).all()
    assert (h <= math.log(V) * (1 + 1e-6)).all()
    assert h[1] == 0
    torch.testing.assert_close(h[0].item(), math.log(V), rtol=1e-6, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.usefixtures("small_blocks")
def test_the_gradient_of_a_row_sums_to_what_the_formula_says(temperature, device):
    """Σ_i dz_i = a - b H + Σ_k g_k + V g_c: 1 of lse, 0 of entropy, K of picked, V of total."""
    x = torch.randn(3, 70, device=device) * 2
    ids = torch.randint(0, 70, (3, 4), device=device)
    got = grads(ll.row_stats, x, ids, temperature=temperature, **WANTS)
    sums = {
        name: got[f"d_{name}"].double().sum(-1) for name in ("lse", "picked", "entropy", "total")
    }
    generator = torch.Generator().manual_seed(3)
    upstream = torch.randn(3, generator=generator).to(device)
    generator.manual_seed(3)
    each_id = torch.randn(3, 4, generator=generator).to(device)
    wants = {
        "lse": upstream,
        "picked": each_id.sum(-1),
        "entropy": torch.zeros_like(upstream),
        "total": 70 * upstream,
    }
    for name, want in wants.items():
        torch.testing.assert_close(
            sums[name], want.double() / temperature, rtol=1e-5, atol=1e-5, msg=name
        )


@pytest.mark.parametrize("place", [0, 40, 69])
@pytest.mark.usefixtures("small_blocks")
def test_a_strange_logit_stays_in_its_row(place, device):
    """NaN makes its row NaN, +inf its lse +inf, and a row of -inf is -inf without gradient."""
    x = torch.randn(5, 70, device=device)
    ids = torch.randint(0, 70, (5,), device=device)
    want = ll.row_stats(x, ids, **WANTS)
    odd = x.clone()
    odd[1, place], odd[2, place], odd[3] = torch.nan, INF, -INF
    leaf = odd.requires_grad_()
    got = ll.row_stats(leaf, ids, **WANTS)
    for name in ("lse", "picked", "entropy", "total", "argmax"):
        for row in (0, 4):
            assert torch.equal(getattr(got, name)[row], getattr(want, name)[row]), name
    assert got.lse[1].isnan()
    assert got.entropy[1].isnan()
    assert got.lse[2] == INF
    assert got.lse[3] == -INF
    assert got.entropy[3] == 0
    assert got.argmax[3] == 0
    (got.lse + got.picked + got.entropy).sum().backward()
    assert leaf.grad[1].isnan().any()
    assert not leaf.grad[3].any()
    assert leaf.grad[[0, 4]].isfinite().all()


@pytest.mark.usefixtures("small_blocks")
def test_argmax_is_the_lowest_of_equals(device):
    x = torch.zeros(4, 101, device=device)
    x[1, [33, 70]] = 2
    x[2, [0, 100]] = 2
    x[3, 64:] = 1
    for splits in (1, 3):
        with config.override(splits=splits):
            assert ll.row_stats(x, argmax=True).argmax.tolist() == [0, 33, 0, 64]


@pytest.mark.usefixtures("small_blocks")
def test_ids_may_repeat_and_there_may_be_none(device):
    x = torch.randn(2, 70, device=device, requires_grad=True)
    ids = torch.tensor([[5, 5, 5], [0, 69, 0]], device=device)
    (got,) = torch.autograd.grad(ll.row_stats(x, ids).picked.sum(), x)
    want = torch.zeros_like(x).scatter_add_(1, ids, torch.ones(2, 3, device=device))
    assert torch.equal(got, want)
    nothing = ll.token_logprobs(x, ids[:, :0])
    assert nothing.shape == (2, 0)
    (got,) = torch.autograd.grad(nothing.sum(), x)
    assert not got.any()


# --- shapes and strides

VIEWS = {
    "contiguous": lambda x: x[:1],
    "shifted logits[:, :-1]": lambda x: x[:, :-1],
    "every other row": lambda x: x[:, ::2],
    "unaligned base": lambda x: x[:1, :, 1:],
    "a middle slice": lambda x: x[1:, 1:, 3:40],
    "transposed rows": lambda x: x.transpose(0, 1),
    "transposed vocabulary": lambda x: x[..., :3].transpose(1, 2),
    "strided vocabulary": lambda x: x[:1, :, ::2],
    "expanded rows": lambda x: x[:1, :2].expand(3, -1, -1),
    "expanded vocabulary": lambda x: x[:, :2, :1].expand(-1, -1, 9),
    "one column": lambda x: x[:1, :, :1],
    "one row": lambda x: x[1, 2],
    "4-D": lambda x: x.view(2, 2, 2, -1),
    "4-D permuted": lambda x: x.view(2, 2, 2, -1).permute(2, 0, 1, 3),
    "4-D reversed": lambda x: x.view(2, 2, 2, -1).permute(2, 1, 0, 3),
    "5-D": lambda x: x.view(2, 1, 2, 2, 1, -1)[:, :, :, 1:],
}


STATS = (torch.float32, lambda x, ids: sum(t.sum() for t in ll.row_stats(x, ids, **WANTS)[:4]))
LOSS = (
    torch.bfloat16,
    lambda x, ids: ll.cross_entropy(x, ids[..., 0], reduction="sum", label_smoothing=0.1),
)


@pytest.mark.parametrize(("dtype", "f"), [STATS, LOSS], ids=["stats fp32", "loss bf16"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.usefixtures("impl")
def test_strides_do_not_matter(dtype, f, view, device):
    """Any view gives what its contiguous copy gives, and the memory it looks at is left alone."""
    base = torch.randn(2, 4, 45, device=device).to(dtype)
    before = base.clone()
    x = view(base)
    ids = torch.randint(0, x.shape[-1], (*x.shape[:-1], 2), device=device)
    leaf = x.detach().requires_grad_()
    value = f(leaf, ids)
    (grad,) = torch.autograd.grad(value, leaf)
    copy = x.contiguous().double().requires_grad_()
    with ll.impl("eager"):
        want = f(copy, ids)
        (want_grad,) = torch.autograd.grad(want, copy)
    assert grad.shape == x.shape
    assert error(value, want) <= ROUNDING
    torch.testing.assert_close(grad.double(), want_grad, rtol=torch.finfo(dtype).eps, atol=4e-6)
    assert torch.equal(base, before)


@pytest.mark.parametrize(
    "rearranged",
    [
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t[:1].expand(3, *t.shape[1:]),
        lambda t: t.repeat_interleave(2, 1)[:, ::2],
    ],
    ids=["transposed", "expanded", "strided"],
)
@pytest.mark.usefixtures("small_blocks")
def test_strides_of_the_other_tensors_do_not_matter(rearranged, device):
    x = torch.randn(3, 2, 37, device=device)
    target = rearranged(torch.randint(0, 37, (3, 2), device=device))
    target_ids = rearranged(torch.randint(0, 37, (3, 2, 5), device=device))
    row = rearranged(torch.rand(3, 2, device=device) + 0.5)
    weight = torch.rand(74, device=device)[::2]
    for f in (
        lambda x, c: ll.cross_entropy(
            x, c(target), weight=c(weight), temperature=c(row), row_weight=c(row),
            label_smoothing=0.1, reduction="none",
        ),
        lambda x, c: ll.token_logprobs(x, c(target_ids), temperature=c(row)),
    ):  # fmt: skip
        results = []
        for laid_out in (lambda t: t, lambda t: t.contiguous()):
            leaf = x.clone().requires_grad_()
            value = f(leaf, laid_out)
            results.append((value, *torch.autograd.grad(value.sum(), leaf)))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


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


@pytest.mark.parametrize("shape", [(0, 9), (3, 0, 9), (0, 0, 9)], ids=str)
@pytest.mark.usefixtures("impl")
def test_an_empty_batch_is_connected_to_the_graph(shape, device):
    leaf = torch.zeros(shape, device=device, requires_grad=True)
    ids = torch.zeros(*shape[:-1], 4, dtype=torch.int64, device=device)
    stats = ll.row_stats(leaf, ids, **WANTS)
    assert stats.lse.shape == stats.entropy.shape == stats.total.shape == shape[:-1]
    assert stats.argmax.shape == shape[:-1]
    assert stats.picked.shape == ids.shape
    sum(t.sum() for t in stats[:4]).backward()
    assert leaf.grad.shape == shape
    for f in (ll.cross_entropy, lambda x, t: ll.score(x, t).logprob.sum()):
        leaf.grad = None
        loss = f(leaf, ids[..., 0])
        assert loss.item() == 0
        loss.backward()
        assert leaf.grad.shape == shape


# --- contracts: everything is written, nothing is touched, and it happens the same way again


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


@pytest.mark.usefixtures("small_blocks")
def test_what_is_not_asked_for_is_none(device):
    x = torch.randn(2, 5, device=device)
    assert ll.row_stats(x)[1:] == (None,) * 5
    stats = ll.row_stats(x, torch.zeros(2, dtype=torch.int64, device=device), **WANTS)
    assert all(value is not None for value in stats)
    assert stats.argmax.dtype == torch.int64


@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "int32", "uint16", "uint32", "uint64"])
@pytest.mark.usefixtures("impl")
def test_narrow_targets_are_compared_as_numbers(name, device):
    """156 in uint8 is not -100, and a vocabulary longer than the type is no obstacle."""
    V = 300
    dtype = getattr(torch, name)
    x = torch.randn(3, V, device=device)
    target = torch.tensor([min(156, torch.iinfo(dtype).max), 3, 120], device=device)
    weight, row_weight = torch.rand(V, device=device), torch.rand(3, device=device)
    for how in ({}, {"weight": weight}, {"row_weight": row_weight}):
        want = ll.cross_entropy(x, target, **how)
        got = ll.cross_entropy(x, target.to(dtype), **how)
        assert torch.equal(got, want)


@pytest.mark.usefixtures("impl")
def test_an_id_past_63_bits_is_out_of_range(device, monkeypatch):
    """2**64 - 100 is not -100."""
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    x = torch.randn(3, 300, device=device)
    ids = torch.tensor([2**64 - 100, 2**63, 2], dtype=torch.uint64, device=device)
    head = ll.LinearLogits(torch.randn(3, 4, device=device), torch.randn(300, 4, device=device))
    for source in (x, head):
        with pytest.raises(IndexError, match=r"target must be in \[0, 300\) or ignore_index"):
            ll.cross_entropy(source, ids)
        with pytest.raises(IndexError, match=r"ids must be in \[0, 300\), got 9223372036854775807"):
            ll.row_stats(source, ids[:, None], ignore_index=-100)


def test_merge_of_equal_maxima_has_the_gradient_of_the_whole():
    """The max of both parts, once in one and twice in the other: a tie is no reason to be off."""
    x = torch.tensor([[2.0, 0.0, 1.0, 2.0, 2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    for split in range(1, 6):
        whole = ll.merge(ll.partial(x[:, :split]), ll.partial(x[:, split:]))
        (got,) = torch.autograd.grad(whole.lse.sum(), x)
        torch.testing.assert_close(got, x.detach().softmax(-1))
    torch.autograd.gradcheck(
        lambda a: ll.merge(ll.partial(a[:, :2]), ll.partial(a[:, 2:])).entropy,
        torch.randn(2, 5, dtype=torch.float64, requires_grad=True),
    )


def test_the_gradient_of_an_infinite_logit_is_torchs(impl, device):
    """NaN at +inf, 0 elsewhere in its row, and other rows as ever."""
    x = torch.tensor([[1.0, torch.inf, 2.0], [1.0, 2.0, 3.0]], device=device, requires_grad=True)
    (want,) = torch.autograd.grad(x.logsumexp(-1).sum(), x)
    for splits in (1, 3):
        with config.override(block_v=16, splits=splits):
            (got,) = torch.autograd.grad(ll.logsumexp(x).sum(), x)
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("temperature", [1e-3, 0.05, 1.0])
def test_entropy_beside_minus_infinity_when_cold(temperature, impl, device):
    """At a low temperature the coefficients are large, and 0 times them times -inf was NaN."""
    x = torch.tensor([[1.0, -INF, 1.0, 0.5], [0.0, 0.0, -INF, -INF]], device=device)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    (got,) = torch.autograd.grad(ll.entropy(leaf, temperature=temperature).sum(), leaf)
    logp = (wide / temperature).log_softmax(-1)
    terms = torch.where(logp == -INF, 0.0, logp.exp() * logp.clamp(min=-1e6))
    (want,) = torch.autograd.grad(-terms.sum(), wide)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
