"""Ids out of range: kernels stay in bounds, and the row is NaN."""

import pytest
import torch

import logitless as ll
from logitless.kernels import config
from tests.support.refusals import BAD_IDS as BAD
from tests.support.sizes import BLOCK

SENTINEL = 113  # in any dtype, int8 too
GUARD = 64  # elements on each side


class Guarded:
    """New tensors in the middle of larger buffers, whose ends must stay as they are."""

    def __init__(self):
        self.buffers = []
        self.real = torch.empty, torch.empty_like, torch.empty_strided

    def empty(self, *shape, **how):
        shape = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        buffer = self.real[0](shape.numel() + 2 * GUARD, **how).fill_(SENTINEL)
        self.buffers.append(buffer)
        return buffer[GUARD : GUARD + shape.numel()].view(shape)

    def empty_like(self, t, *, dtype=None, memory_format=None):
        return self.empty(t.shape, dtype=dtype or t.dtype, device=t.device)

    def empty_strided(self, shape, strides, **how):
        guarded = self.empty(shape, **how)
        assert guarded.stride() == strides
        return guarded

    def holding(self, t):
        return self.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)

    def __enter__(self):
        torch.empty, torch.empty_like = self.empty, self.empty_like
        torch.empty_strided = self.empty_strided
        return self

    def __exit__(self, *_):
        torch.empty, torch.empty_like, torch.empty_strided = self.real
        assert len(self.buffers) > 3, "the kernels' outputs are not guarded"
        for buffer in self.buffers:
            assert (buffer[:GUARD] == SENTINEL).all()
            assert (buffer[-GUARD:] == SENTINEL).all()


class TestBadTargets:
    """Out-of-range target: out-of-bounds read, or loss 0 with nonzero gradient."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("K", [None, 1, 3], ids=["1 id", "(1,) ids", "3 ids"])
    @pytest.mark.usefixtures("nobody_looks")
    def test_kernels_stay_in_bounds(self, dtype, K, device):
        """As on a GPU, where nobody looks: NaN for the row, and no other element knows."""
        rows, V = len(BAD) + 2, 37
        ids = torch.randint(0, V, (rows,) if K is None else (rows, K), device=device)
        wrong = ids.clone()
        wrong.view(rows, -1)[1:-1, -1] = torch.tensor(BAD, device=device)
        bad = torch.zeros(rows, dtype=torch.bool, device=device)
        bad[1:-1] = True
        x = torch.randn(rows, V, device=device).to(dtype)
        results = {}
        for name, given in (("right", ids), ("wrong", wrong)):
            with (
                ll.impl("triton"),
                config.override(block_v=BLOCK, splits=3 if K is None else 1),
                Guarded() as guarded,
            ):
                logits = guarded.holding(x).requires_grad_()
                found = ll.row_stats(logits, given)
                (grad,) = torch.autograd.grad(
                    (found.lse[:, None] - found.picked.view(rows, -1)).sum(), logits
                )
            assert torch.equal(logits, x)
            results[name] = found.lse.detach(), found.picked.detach(), grad
        (right_lse, right_picked, right_grad), (lse, picked, grad) = results.values()
        assert torch.equal(lse, right_lse)
        assert torch.equal(picked.isnan(), wrong != ids)
        assert torch.equal(picked[wrong == ids], right_picked[wrong == ids])
        assert grad[bad].isnan().all()
        assert torch.equal(grad[~bad], right_grad[~bad])

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.usefixtures("nobody_looks")
    def test_loss_is_not_silent(self, inplace, device):
        """Loss 0 with nonzero gradient is what it was; both are NaN, and only there."""
        target = torch.tensor([3, 37, -100, -1], device=device)
        bad = torch.tensor([False, True, False, True], device=device)
        leaf = torch.randn(4, 37, device=device, requires_grad=True)
        with ll.impl("triton"):
            loss = ll.cross_entropy(leaf * 1, target, reduction="none", inplace=inplace)
            loss.sum().backward()
        assert torch.equal(loss.isnan(), bad)
        assert torch.equal(leaf.grad.isnan(), bad[:, None].expand(4, 37))
