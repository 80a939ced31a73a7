"""A head in chunks: how rows are cut, and that sums over chunks are as good as one product."""

import pytest
import torch
import torch.nn.functional as F
from laws import poisoned_memory
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from logitless import kernels
from logitless.kernels.blockfp_gemm import PACK


class Products(TorchDispatchMode):
    """How many rows of logits are made at once, time after time."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.rows = vocab, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.out, torch.ops.aten.mm.default):
            rows, columns = result.shape
            if columns == self.vocab:
                self.rows.append(rows)
        return result


ROW = 8 * 2  # bytes of a row of 8 logits in bf16


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of a CPU that has no bf16
@pytest.mark.parametrize(
    ("rows", "workspace", "cut"),
    [
        (8192, 4186 * ROW, [4096, 4096]),  # the largest power of two that fits
        (8192, 3533 * ROW, [2048] * 4),
        (2048, 523 * ROW, [512] * 4),
        (1152, 441 * ROW, [384] * 3),  # whole tiles
        (4100, 4186 * ROW, [2176, 1924]),  # two even chunks, not one and four rows
        (100, 4186 * ROW, [100]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_rows_at_once(rows, workspace, cut, device):
    hidden = torch.randn(rows, 5, device=device).bfloat16()
    weight = torch.randn(8, 5, device=device).bfloat16()
    target = torch.randint(8, (rows,), device=device)
    with Products(8) as products:
        ll.cross_entropy(ll.LinearLogits(hidden, weight, workspace=workspace), target)
    assert products.rows == cut


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 10])
def test_rows_that_count_alone_are_visited(count, device):
    """Three at once; those that do not count could hold anything."""
    hidden, weight = torch.randn(10, 4, device=device), torch.randn(50, 4, device=device)
    target = torch.full((10,), -100, device=device)
    chosen = torch.randperm(10)[:count].to(device)
    target[chosen] = torch.randint(50, (count,), device=device)
    want = F.cross_entropy(hidden[chosen] @ weight.t(), target[chosen], reduction="sum")
    hidden[target == -100] = torch.nan
    with Products(50) as products:
        source = ll.LinearLogits(hidden, weight, workspace=3 * 56 * 4)
        loss = ll.cross_entropy(source, target, reduction="sum")
    assert max(products.rows, default=0) <= 3
    # The first product may be ordered before it is known how many count.
    assert count <= sum(products.rows) <= max(count, 3)
    torch.testing.assert_close(loss, want)


class TestSumInPlace:
    """Whole numbers with a common exponent, in the memory of the gradient."""

    sizes = pytest.mark.parametrize(
        ("rows", "vocab", "width"), [(96, 200, 128 + PACK), (70, 144, 256 + PACK)]
    )

    @pytest.mark.parametrize("turned", [False, True])
    @sizes
    def test_as_exact_as_one_product(self, rows, vocab, width, turned, device):
        """However dz lies in memory: by rows, or by columns as for the gradient of hidden."""
        dtype = torch.float16
        parts = [
            (torch.randn(rows, vocab) * 4.0**i, torch.randn(rows, width)) for i in (0, 3, -3, 2, -9)
        ]
        total = torch.empty(vocab, width, dtype=dtype, device=device)
        exponents = kernels.exponents(total)
        truth = torch.zeros(vocab, width, dtype=torch.float64, device=device)
        for i, (dz, h) in enumerate(parts):
            dz, h = (0.01 * dz).to(device, dtype), h.to(device, dtype)
            dz = dz.t().contiguous().t() if turned else dz
            kernels.accumulate(dz, h, total, exponents, i == 0, i == len(parts) - 1)
            truth += dz.double().t() @ h.double()
        once = (truth.bfloat16() - truth).norm()  # of the gradients that it is made for
        assert (total - truth).norm() < 0.2 * once

    def test_between_chunks_it_has_fourteen_bits(self, device):
        width = 128 + PACK
        dz, h = torch.randn(64, 128).to(device).half(), torch.randn(64, width).to(device).half()
        total = torch.empty(128, width, dtype=torch.float16, device=device)
        exponents = kernels.exponents(total)
        kernels.accumulate(dz, h, total, exponents, True, False)
        truth = dz.double().t() @ h.double()
        scale = torch.exp2(exponents.double()).t().repeat_interleave(128, 1)[:, :width]
        waiting = total.view(torch.int16).double() * scale
        for block in (slice(0, 128), slice(128, width)):
            largest = truth[:, block].abs().amax(1, keepdim=True)
            assert ((waiting - truth)[:, block].abs() <= 2**-14 * largest).all()

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_what_is_no_number_stays_none(self, bad, device):
        dz, h = (
            torch.zeros(64, 128, device=device).half(),
            torch.ones(64, PACK, device=device).half(),
        )
        dz[3, 5] = bad
        total = torch.empty(128, PACK, dtype=torch.float16, device=device)
        exponents = kernels.exponents(total)
        kernels.accumulate(dz, h, total, exponents, True, False)
        kernels.accumulate(torch.ones_like(dz), h, total, exponents, False, True)
        assert not total[5].isfinite().any()
        rest = torch.arange(128, device=device) != 5
        assert (total[rest] == 64).all()

    def test_zeros(self, device):
        dz, h = (
            torch.zeros(64, 128, device=device).half(),
            torch.ones(64, PACK, device=device).half(),
        )
        total = torch.empty(128, PACK, dtype=torch.float16, device=device)
        exponents = kernels.exponents(total)
        for i in range(3):
            kernels.accumulate(dz, h, total, exponents, i == 0, i == 2)
        assert (total == 0).all()

    @pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of a CPU that has no bf16
    @pytest.mark.parametrize(
        ("vocab", "loss", "view"),
        [
            (23, "cross_entropy", "plain"),
            (24, "cross_entropy", "offset"),
            (201, "cross_entropy", "expanded"),
            (23, "cross_entropy", "transposed"),
            (23, "score", "plain"),
            (601, "many ids", "plain"),  # whose gradient is no longer in the workspace
        ],
    )
    def test_over_a_head(self, vocab, loss, view, device):
        """Rows that start anywhere, and gradients that a loss makes elsewhere."""
        rows, width = 5, 16  # in three chunks: the first, one between, the last
        hidden, weight = torch.randn(rows, width), torch.randn(vocab, width)
        if view == "offset":
            hidden = torch.randn(1 + rows * width).bfloat16().to(device)[1:].view(rows, width)
        elif view == "expanded":
            hidden = hidden[:1].bfloat16().to(device).expand(rows, width)
        elif view == "transposed":
            hidden = hidden.t().contiguous().bfloat16().to(device).t()
        hidden, weight = hidden.to(device).bfloat16(), weight.to(device).bfloat16()
        target = torch.randint(vocab, (rows,), device=device)
        ids = torch.stack([torch.randperm(vocab, device=device)[:520] for _ in range(rows)])
        f = {
            "cross_entropy": lambda z: ll.cross_entropy(z, target),
            "score": lambda z: (s := ll.score(z, target)).logprob.sum() + s.entropy.sum(),
            "many ids": lambda z: ll.token_logprobs(z, ids).mean(),
        }[loss]
        grads = []
        with ll.impl("triton"):
            for fused in (True, False):
                W = weight.clone().requires_grad_()
                z = (
                    ll.LinearLogits(hidden, W, workspace=(vocab + 7) * 2 * 2)
                    if fused
                    else hidden @ W.t()
                )
                f(z).backward()
                grads.append(W.grad.float())
        ours, plain = grads
        assert (ours - plain).norm() <= 0.02 * plain.norm()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_fp16_is_rounded_after_the_upstream(device):
    """What a GradScaler multiplies must not have been lost before."""
    hidden, weight = torch.randn(1024, 8, device=device), torch.randn(64, 8, device=device)
    weight[:, 0], hidden[:, 0] = torch.linspace(0, -12, 64), 1.0  # rare classes
    target = torch.zeros(1024, dtype=torch.int64, device=device)
    grads = []
    for dtype in (torch.float64, torch.float16):
        W = weight.half().to(dtype).requires_grad_()
        source = ll.LinearLogits(hidden.half().to(dtype), W, workspace=64 * 256 * 8)
        (ll.cross_entropy(source, target) * 65536).backward()
        grads.append(W.grad.double())
    truth, ours = grads
    gap = (ours - truth).norm(dim=1) / truth.norm(dim=1)
    assert gap.max() < 5e-3


@pytest.mark.parametrize("how", ["auto", "weight", "fp32"])
def test_fp16_sums_do_not_overflow(how, device):
    hidden = torch.full((2000, 8), 60.0, device=device).half()
    weight = torch.zeros(16, 8, device=device).half().requires_grad_()
    target = torch.zeros(2000, dtype=torch.int64, device=device)
    source = ll.LinearLogits(hidden, weight, workspace=500 * 16 * 2, accumulate=how)
    ll.cross_entropy(source, target).backward()
    torch.testing.assert_close(weight.grad[0].float(), torch.full((8,), -56.25, device=device))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_autocast_around_a_head_built_before_it(device):
    hidden = torch.randn(9, 8, device=device, requires_grad=True)
    weight = torch.randn(30, 8, device=device, requires_grad=True)
    target = torch.randint(30, (9,), device=device)
    target[::2] = -100
    source = ll.LinearLogits(hidden, weight)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = ll.cross_entropy(source, target)
        ll.score(source, target).logprob.sum().backward()
        loss.backward()
    want = torch.nn.functional.cross_entropy(hidden.detach() @ weight.detach().t(), target)
    torch.testing.assert_close(loss.detach(), want)


def test_row_weights_of_another_dtype(device):
    hidden, weight = torch.randn(2048, 8, device=device), torch.randn(30, 8, device=device)
    target = torch.randint(30, (2048,), device=device)
    row_weight = (torch.rand(2048, device=device) * 0.01).half()
    got = ll.cross_entropy(ll.LinearLogits(hidden, weight), target, row_weight=row_weight)
    want = ll.cross_entropy(hidden @ weight.t(), target, row_weight=row_weight.float())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_main_grad(reduction, device):
    """The weight's gradient is added to it; the weight's own stays."""
    hidden, weight = torch.randn(9, 8, device=device), torch.randn(30, 8, device=device)
    target = torch.randint(30, (9,), device=device)
    target[4] = -100
    want, got = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    (ll.cross_entropy(hidden @ want.t(), target, reduction=reduction) * 3).sum().backward()
    main_grad = torch.ones_like(weight)
    source = ll.LinearLogits(hidden, got, workspace=2 * 32 * 4, main_grad=main_grad)
    (ll.cross_entropy(source, target, reduction=reduction) * 3).sum().backward()
    assert got.grad is None
    torch.testing.assert_close(main_grad, 1 + want.grad)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_main_grad_keeps_what_fp32_sums_have(device):
    hidden, weight = torch.randn(64, 8).bfloat16().to(device), torch.randn(30, 8).bfloat16()
    weight = weight.to(device).requires_grad_()
    target = torch.randint(30, (64,), device=device)
    total = torch.zeros(30, 8, device=device)
    source = ll.LinearLogits(
        hidden, weight, workspace=8 * 32 * 2, accumulate="fp32", main_grad=total
    )
    ll.cross_entropy(source, target).backward()
    assert not torch.equal(total, total.bfloat16().float())


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (torch.zeros(30, 8).bfloat16(), "main_grad must be a tensor of torch.float32, got"),
        (torch.zeros(8, 30), r"main_grad must have the shape of weight \(30, 8\), got \(8, 30\)"),
        ([1.0], "main_grad must be a tensor of torch.float32, got list"),
    ],
)
def test_bad_main_grad(main_grad, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ll.LinearLogits(torch.zeros(2, 8), torch.zeros(30, 8), main_grad=main_grad)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of a CPU that has no bf16
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_memory_between_the_rows_of_a_workspace_is_never_read(logits_dtype):
    """On a CPU with AVX-512, PyTorch's bf16 product reads beyond the rows of a wider tensor."""
    hidden = torch.randn(64, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(901, 8, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 901, (64,))
    with poisoned_memory():
        logits = ll.LinearLogits(hidden, weight, logits_dtype=logits_dtype, workspace=32 * 1808)
        ll.cross_entropy(logits, target).backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
