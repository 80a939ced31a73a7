"""Rows of any shape and strides, and offsets past 2^31 elements."""

import pytest
import torch
import triton
import triton.language as tl

import logitless as ll
from logitless.kernels.layout import row_offset
from tests.support.laws import ROUNDING, error
from tests.support.statistics import WANTS

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
LOSS = (torch.bfloat16, lambda x, ids: ll.cross_entropy(
    x, ids[..., 0], reduction="sum", label_smoothing=0.1))  # fmt: skip


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


@triton.jit
def _offsets_kernel(OUT, rows_t, stride_b, stride_t):
    row = tl.program_id(0)
    tl.store(OUT + row, row_offset(row, rows_t, stride_b, stride_t))


@pytest.mark.parametrize("stride_t", [2**31 - 16, 2**31 + 16, 1 << 28], ids=str)
@pytest.mark.parametrize("stride_b", [0, 2**33 + 8, 2**31 - 8], ids=str)
def test_row_offsets_are_int64(stride_t, stride_b, device):
    """int32 overflow past 2^31 elements."""
    offsets = torch.zeros(24, dtype=torch.int64, device=device)
    _offsets_kernel[(24,)](offsets, 12, stride_b, stride_t)
    assert offsets.tolist() == [r // 12 * stride_b + r % 12 * stride_t for r in range(24)]
    assert max(offsets.tolist()) > 2**31
