"""The k largest and the tail against a stable sort in fp64, by each implementation."""

import pytest
import torch

import logitless as ll
from logitless.kernels import config
from tests.support import oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def blocks(impl):
    """Rows in blocks of 64, and no splits."""
    with config.override(block_v=64, splits=1):
        yield


def topk(x, k, **how):
    found = ll.capture_topk(x, k, **how)
    return found.ids, found.logprobs, found.tail


def check(x, k, rtol=3e-6, **how):
    """Ids equal, log-probabilities and log tail mass to a few roundings of fp32; x as it was."""
    before = x.clone()
    ids, logprobs, tail = topk(x, k, **how)
    assert torch.equal(x, before) or x.isnan().any()
    want_ids, want_logprobs, want_tail = oracle.topk(x.double(), k, **how)
    precision = torch.float64 if x.dtype == torch.float64 else torch.float32
    assert ids.dtype == torch.int64
    assert logprobs.dtype == tail.dtype == precision
    assert logprobs.shape == ids.shape == (*x.shape[:-1], k)
    assert tail.shape == x.shape[:-1]
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(logprobs.double(), want_logprobs, rtol=rtol, atol=rtol)
    torch.testing.assert_close(tail.double(), want_tail, rtol=rtol, atol=rtol)
    return ids, logprobs, tail


def make(*shape, dtype=torch.float32, scale=3.0, device="cpu"):
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 64])
def test_against_a_stable_sort(blocks, dtype, k, device):
    _, logprobs, tail = check(make(2, 151, dtype=dtype, device=device), k)
    whole = logprobs.exp().sum(-1) + tail.exp()
    torch.testing.assert_close(whole, torch.ones_like(whole), rtol=2e-6, atol=0)


def test_many_and_one_row_without_a_batch(blocks, device):
    check(make(1, 501, dtype=torch.bfloat16, device=device), 256)
    check(make(50, device=device), 3)


def test_fp64(device):
    check(make(3, 301, dtype=torch.float64, device=device), 7, rtol=1e-13)


@pytest.mark.parametrize("V", [1, 5, 67, 300])
def test_the_whole_row(blocks, V, device):
    """k = V: nothing is left out. 300 is more than the kernels sort, and takes another way."""
    _, _, tail = check(make(2, V, device=device), V)
    assert (tail == -torch.inf).all()


READS = {
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 5.0},
    "both": {"temperature": 1.7, "softcap": 4.0},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", READS.values(), ids=READS.keys())
def test_reads(blocks, dtype, how, device):
    exact = 1e-5 if device == "cpu" or dtype != torch.bfloat16 else 1e-2  # one-instruction tanh
    check(make(2, 150, dtype=dtype, device=device), 7, **how, rtol=exact)


def test_one_block(device):
    """Blocks as they come: the row is shorter than one."""
    with ll.impl("triton"):
        check(make(2, 77, dtype=torch.bfloat16, device=device), 5)


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("offset", [0, 3])
def test_splits(splits, offset, device):
    """Splits that are merged, some of them empty, of rows that start anywhere."""
    x = make(2, 160, dtype=torch.bfloat16, device=device, scale=0.5)[:, offset:]
    with ll.impl("triton"), config.override(block_v=32, splits=splits):
        check(x, 40)


def only(kept):
    """A rising row, -inf but where kept."""
    return torch.arange(len(kept)).float().masked_fill(~kept, -torch.inf)


ROWS = {
    "constant": lambda V: torch.full((V,), 2.5),
    "zeros of both signs": lambda V: torch.zeros(V) * torch.randint(0, 2, (V,)).sub(0.5),
    "ascending": lambda V: torch.arange(V) / 8.0,
    "descending": lambda V: -torch.arange(V) / 8.0,
    "few values": lambda V: torch.randint(0, 3, (V,)).float(),
    "fewer finite than k": lambda V: only(torch.arange(V) < 5),
    "finite ones last": lambda V: only(torch.arange(V) > V - 5),
    "-inf here and there": lambda V: torch.randn(V).masked_fill(torch.rand(V) < 0.3, -torch.inf),
    "finite minimum": lambda V: torch.full((V,), torch.finfo(torch.float32).min).index_fill(
        0, torch.tensor([V // 2]), 1.0
    ),
    "large offset": lambda V: 1e4 + torch.randn(V),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("k", [1, 9])
def test_orders_and_ties(blocks, row, k, device):
    check(torch.stack([row(131), torch.randn(131)]).to(device), k)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_thousands_of_ties(blocks, softcap, device):
    """Of equal logits the lowest ids, though there are many more than fit a list."""
    x = torch.randint(0, 4, (2, 3000)).to(torch.bfloat16).to(device)
    with config.override(block_v=512):
        check(x, 70, softcap=softcap, rtol=1e-5 if device == "cpu" else 1e-2)


def test_softcap_of_minus_infinity(blocks, device):
    """-inf is -softcap then, and has its mass, also where it is among the k."""
    x = torch.full((2, 100), -torch.inf, device=device)
    x[0, 40:43] = torch.tensor([1.0, 3.0, 2.0])
    check(x, 7, softcap=4.0, rtol=1e-5)


def test_a_row_of_minus_infinity(blocks, device):
    """No distribution, but ids, and for the other rows all as ever."""
    x = make(3, 100, device=device)
    x[1] = -torch.inf
    ids, logprobs, tail = topk(x, 7)
    assert torch.equal(ids[1], torch.arange(7, device=device))
    assert logprobs[1].isnan().all()
    assert not tail[1].isfinite()
    for got, want in zip((ids, logprobs, tail), topk(x[::2].contiguous(), 7), strict=True):
        assert torch.equal(got[::2], want)


@pytest.mark.parametrize("where", [0, 55, slice(3, 100), slice(0, 100)])
def test_nan_stays_in_its_row(blocks, where, device):
    x = make(3, 100, device=device)
    x[1, where] = torch.nan
    ids, logprobs, tail = topk(x, 7)
    assert ((ids >= 0) & (ids < 100)).all()
    assert logprobs[1].isnan().all()
    assert tail[1].isnan()
    for got, want in zip((ids, logprobs, tail), topk(x[::2].contiguous(), 7), strict=True):
        assert torch.equal(got[::2], want)


@pytest.mark.parametrize(("log10_mass", "temperature"), [(-6, 1.0), (-12, 0.5), (-30, 1.0)])
def test_small_tails(blocks, log10_mass, temperature, device):
    """Not one minus the rest: a mass of 1e-30 has its digits too."""
    x = make(2, 200, device=device, scale=0.1)
    top = torch.randperm(200)[:5]
    x[:, top] += 5 - temperature * log10_mass * 2.302585
    _, _, tail = check(x, 5, temperature=temperature)
    _, _, want = oracle.topk(x.double(), 5, temperature)
    assert (want < log10_mass * 2.3).all()
    assert ((tail.double() - want).exp() - 1).abs().max() < 1e-3


def test_tail_far_below_fp32(blocks, device):
    """e^-400 is 0 in fp32; its logarithm is not lost."""
    x = torch.cat([torch.zeros(1, 3), torch.full((1, 60), -400.0)], 1).to(device)
    check(x, 3)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_start_anywhere(blocks, dtype, offset, device):
    """Shifted, strided and unaligned rows, of few values so that ties cross every seam."""
    big = torch.randint(0, 6, (2, 3, 143)).to(dtype).to(device)
    check(big[:, :-1, offset : offset + 131], 9)
    check(big[..., :2].transpose(1, 2), 2)


def test_empty_batch(blocks, device):
    ids, logprobs, tail = topk(torch.zeros(0, 4, 50, device=device), 3)
    assert ids.shape == logprobs.shape == (0, 4, 3)
    assert tail.shape == (0, 4)


def test_nothing_is_differentiated(blocks, device):
    x = make(2, 50, device=device).requires_grad_()
    assert not any(t.requires_grad for t in topk(x, 3))
