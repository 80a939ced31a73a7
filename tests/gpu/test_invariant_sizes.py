"""`ll.invariant()` at real sizes: the same rows have the same bits in 1,000 random batches."""

import contextlib

import pytest
import torch

import logitless as ll
from tests.support.invariance import BITS
from tests.support.sizes import DEVICE, sized

VOCAB, ODD = sized(128256, 72), sized(50257, 75)
WIDTH = sized(1024, 16)
PROBES, POOL = sized(8, 2), sized(2048, 12)  # rows that are compared; rows to fill the batches
MANY, SOME = sized(1000, 2), sized(100, 2)  # numbers of batches
SIZES = sized((8, 9, 33, 64, 127, 128, 200, 257, 300), (2, 5, 7))  # rows per batch
RARE = sized((1025, 2048), (9,))  # rows of every 50th batch


def results(source, x, target, upstream, positions):
    """Returns the bits of the scores and gradients of the probes at `positions` of a batch."""
    x = x.detach().requires_grad_()
    scores = ll.score(source(x), target, rank=True)
    values = scores.logprob + 0.5 * scores.entropy + 0.1 * scores.lse
    (d,) = torch.autograd.grad(values, x, upstream)
    total = ll.cross_entropy(source(x), target, reduction="sum", row_weight=upstream)
    found = (*scores, d, *torch.autograd.grad(total, x))
    return [t.detach()[positions].view(BITS[t.element_size()]) for t in found]


def differing(source, columns, vocab, dtype, batches):
    """Counts the numbers of the probes whose bits differ between batches, over all batches."""
    g = torch.Generator().manual_seed(0)
    pool = torch.randn(POOL, columns, device=DEVICE).to(dtype)
    probe = torch.randn(PROBES, columns, device=DEVICE).to(dtype)
    target = torch.randint(vocab, (POOL,), device=DEVICE)
    upstream = torch.randn(POOL, device=DEVICE)
    of_probe = torch.randint(vocab, (PROBES,), device=DEVICE), torch.randn(PROBES, device=DEVICE)
    first = results(source, probe, *of_probe, torch.arange(PROBES, device=DEVICE))
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(batches):
        sizes = RARE if i % 50 == 1 else SIZES
        size = sizes[int(torch.randint(len(sizes), (), generator=g))]
        start = int(torch.randint(POOL - size + 1, (), generator=g))
        positions = torch.randperm(size, generator=g)[:PROBES].to(DEVICE)
        x, t, up = (some[start : start + size].clone() for some in (pool, target, upstream))
        t[::3] = -100  # rows are ignored, except the probes
        x[positions], t[positions], up[positions] = probe, *of_probe
        again = results(source, x, t, up, positions)
        for a, b in zip(first, again, strict=True):
            count += (a != b).sum()
    return int(count)


def head(vocab, dtype, **options):
    weight = (torch.randn(vocab, WIDTH, device=DEVICE) * (2 / WIDTH**0.5)).to(dtype)
    bias = torch.randn(vocab, device=DEVICE).to(dtype)
    rooms = iter(range(10**9))

    def source(x):
        """Returns a head. The size of the workspace changes from call to call."""
        room = (None, 40, 130, 520)[next(rooms) % 4]
        workspace = None if room is None else room * vocab * dtype.itemsize
        return ll.LinearLogits(x, weight, bias, workspace=workspace, **options)

    return source


@pytest.mark.parametrize(
    ("vocab", "dtype", "options", "batches"),
    [
        (VOCAB, torch.bfloat16, {}, MANY),
        (ODD, torch.float16, {}, SOME),
        (VOCAB, torch.bfloat16, {"logits_dtype": torch.float32}, SOME),
        (sized(32000, 40), torch.float32, {}, sized(20, 2)),
    ],
)
def test_heads(vocab, dtype, options, batches):
    with ll.invariant():
        assert differing(head(vocab, dtype, **options), WIDTH, vocab, dtype, batches) == 0


@pytest.mark.parametrize(
    ("vocab", "dtype", "batches"),
    [(VOCAB, torch.bfloat16, MANY), (ODD, torch.float16, SOME), (ODD, torch.float32, SOME)],
)
def test_logits(vocab, dtype, batches):
    with ll.invariant():
        assert differing(lambda x: x, vocab, vocab, dtype, batches) == 0


@pytest.mark.parametrize("over_a_head", [True, False])
def test_every_function_has_the_same_log_probability(over_a_head):
    """So the ratio of equal policies is exactly 1, also if two functions compute the policies."""
    rows = sized(300, 3)
    z = torch.randn(rows, WIDTH if over_a_head else VOCAB, device=DEVICE).bfloat16()
    z = head(VOCAB, torch.bfloat16)(z) if over_a_head else z
    target = torch.randint(VOCAB, (rows,), device=DEVICE)
    with ll.invariant():
        logprob = ll.score(z, target).logprob
        others = (
            ll.token_logprobs(z, target),
            -ll.cross_entropy(z, target, reduction="none"),
            ll.row_loss(lambda stats: stats.logprob, z, target, reduction="none"),
            ll.row_stats(z, target, total=True, entropy=True).logprob,
        )
    for other in others:
        assert torch.equal(other, logprob)


@pytest.mark.gpu("kernels that depend on the number of rows")
@pytest.mark.parametrize("over_a_head", [False, True])
def test_bits_differ_outside_of_the_block(over_a_head):
    """The tests above can fail, because bits differ without `ll.invariant()`."""
    source = head(VOCAB, torch.bfloat16) if over_a_head else lambda x: x
    columns = WIDTH if over_a_head else VOCAB
    assert differing(source, columns, VOCAB, torch.bfloat16, SOME) > 0


@pytest.mark.gpu("a synchronisation of the host")
@pytest.mark.parametrize("over_a_head", [False, True])
def test_the_host_does_not_wait(over_a_head):
    x = torch.randn(64, WIDTH if over_a_head else VOCAB, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, device=DEVICE).bfloat16()
    target = torch.randint(VOCAB, (64,), device=DEVICE)
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        with contextlib.ExitStack() as stack:
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
            stack.enter_context(ll.invariant())
            z = ll.LinearLogits(x, weight, drop_ignored=False) if over_a_head else x
            ll.cross_entropy(z, target).backward()
