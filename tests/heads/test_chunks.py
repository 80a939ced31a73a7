"""A head in chunks of rows: how rows are cut, and how much memory two heads take."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from examples.demo import memory as _memory
from tests.support.laws import poisoned_memory


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


@pytest.mark.parametrize("loss", ["jsd", "tvd", "skewed", "forward", "reverse", "soft"])
@pytest.mark.few(2)
def test_two_heads_stay_near_their_workspace(loss):
    """jsd of two heads on a CPU peaked at 410 MiB with a workspace of 64.

    Two workspaces, one of each head, the weight's gradient, and what is in work beside them.
    """
    rows, width, vocab, space = 256, 8, 16384, 4 << 20
    student, teacher = (
        (torch.randn(rows, width).requires_grad_(), torch.randn(vocab, width).requires_grad_())
        for _ in range(2)
    )

    def run(_):
        q, p = (ll.LinearLogits(*parts, workspace=space) for parts in (student, teacher))
        if loss in ("jsd", "tvd"):
            getattr(ll, loss)(q, p).backward()
        elif loss == "soft":
            ll.soft_cross_entropy(q, p).backward()
        elif loss == "skewed":
            ll.kl_div(q, p, direction="forward", skew=0.1).backward()
        else:
            ll.kl_div(q, p, direction=loss).backward()

    gradients = sum(t.numel() * t.element_size() for t in student)
    peak = _memory.extra_memory("cpu", None, run)
    assert peak <= 2 * space + 2 * gradients + (32 << 20)
