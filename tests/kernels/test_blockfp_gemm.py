"""Whole numbers with a common exponent, in the memory of the gradient."""

import pytest
import torch

import logitless as ll
from logitless import kernels
from logitless.kernels.gemms.blockfp_gemm import PACK


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
        for impl in ("triton", "eager"):
            W = weight.clone().requires_grad_()
            z = hidden @ W.t()
            if impl == "triton":
                z = ll.LinearLogits(hidden, W, workspace=(vocab + 7) * 2 * 2)
            with ll.impl(impl):
                f(z).backward()
            grads.append(W.grad.float())
        ours, plain = grads
        assert (ours - plain).norm() <= 0.02 * plain.norm()
