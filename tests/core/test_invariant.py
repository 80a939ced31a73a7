"""Inside `ll.invariant()`, a row's results and gradient have the same bits in every batch."""

import threading

import pytest
import torch

import logitless as ll
from logitless.contract import Reading
from logitless.core.invariant import is_invariant
from logitless.kernels import config
from logitless.losses.statistics import SCORES
from tests.support import oracle
from tests.support.invariance import (
    LOSSES,
    WIDTH,
    against_a_teacher,
    bits,
    captured,
    differing,
    distilled,
    head,
    interpreted,
    plain,
    ratio,
    scores,
    smoothed,
    statistics,
    total,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BLOCK = 32


@pytest.fixture(params=["eager", pytest.param("triton", marks=interpreted)])
def backend(request):
    blocks = {"block_v": BLOCK, "block_n": 16, "span": 32} if request.param == "triton" else {}
    with ll.impl(request.param), config.override(**blocks):
        yield request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_logits_in_plain_pytorch(loss, dtype):
    with ll.impl("eager"), ll.invariant():
        assert differing(loss, plain, 75, 75, dtype, (3, 17)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_heads_in_plain_pytorch(loss, dtype):
    with ll.impl("eager"), ll.invariant():
        assert differing(loss, head(75, dtype), WIDTH, 75, dtype, (3, 17)) == 0


@interpreted
@pytest.mark.parametrize("loss", [statistics, smoothed, distilled, against_a_teacher, captured])
def test_logits_by_kernels(loss):
    """The address of a row of 43 columns, modulo 16, depends on the row's position in the batch."""
    with ll.impl("triton"), config.override(block_v=BLOCK), ll.invariant():
        assert differing(loss, plain, 43, 43, torch.float16, (4,)) == 0


@interpreted
@pytest.mark.parametrize("loss", [scores, total, ratio, captured])
def test_heads_by_kernels(loss):
    cuts = {"block_v": BLOCK, "block_n": 16, "span": 16}
    with ll.impl("triton"), config.override(**cuts), ll.invariant():
        assert differing(loss, head(43, torch.float16), WIDTH, 43, torch.float16, (7,)) == 0


def test_fp32_logits_of_16_bit_heads(backend):
    dtype = torch.bfloat16
    with ll.invariant():
        source = head(43, dtype, bias=False, logits_dtype=torch.float32)
        assert differing(total, source, WIDTH, 43, dtype, (7,)) == 0


def test_fp64():
    with ll.invariant():
        assert differing(scores, plain, 75, 75, torch.float64, (3, 17)) == 0
        source = head(75, torch.float64)
        assert differing(scores, source, WIDTH, 75, torch.float64, (3, 17)) == 0


@pytest.mark.parametrize("lead", [(2, 1, 3), (2, 3)])
@pytest.mark.few(2)
def test_leading_dimensions(backend, lead):
    """Rows of logits (..., V) have the same bits as the rows of logits (N, V)."""
    x = torch.randn(*lead, 75)
    target = torch.randint(75, lead)
    found = []
    for shape in (lead, (6,)):
        z = x.reshape(*shape, 75).clone().requires_grad_()
        with ll.invariant():
            loss = ll.cross_entropy(z, target.reshape(shape), reduction="none", label_smoothing=0.1)
        loss.backward(torch.ones_like(loss))
        assert z.grad is not None
        assert (loss.shape, z.grad.shape) == (shape, z.shape)
        found.append((bits(loss).view(-1), bits(z.grad).view(6, 75)))
    assert all(map(torch.equal, *found))


def test_a_row_stride_changes_no_bits(backend):
    """Tests rows with padding between them, and every second row of a tensor."""
    x, target = torch.randn(4, 75, dtype=torch.float16), torch.arange(4)
    padded, twice = torch.zeros(4, 81, dtype=x.dtype), torch.zeros(4, 2, 75, dtype=x.dtype)
    padded[:, 3:78], twice[:, 1] = x, x
    with ll.invariant():
        first, *others = (ll.score(z, target) for z in (x, padded[:, 3:78], twice[:, 1]))
    for other in others:
        assert all(torch.equal(bits(getattr(first, n)), bits(getattr(other, n))) for n in SCORES)


def test_in_place(backend):
    """The gradient that overwrites the logits has the same bits in every batch too."""
    probe, target = torch.randn(75, dtype=torch.float16), torch.randint(75, (6,))
    found = []
    for size, at in ((1, 0), (5, 3), (6, 1)):
        x = torch.randn(size, 75, dtype=torch.float16)
        x[at] = probe
        z = x.requires_grad_() * 1
        here = target[:size].clone()
        here[at] = 7
        with ll.invariant():
            loss = ll.cross_entropy(z, here, reduction="none", inplace=True)
        loss.backward(torch.full((size,), 0.5))
        assert x.grad is not None
        found.append((bits(loss[at]), bits(x.grad[at])))
    assert all(torch.equal(a, b) for more in found[1:] for a, b in zip(found[0], more, strict=True))


def test_with_and_without_a_gradient(backend):
    """A scorer without gradients and a trainer with gradients compute the same bits."""
    hidden, weight = torch.randn(5, WIDTH), torch.randn(75, WIDTH)
    target = torch.tensor([3, -100, 7, 74, 0])
    with ll.invariant():
        with torch.no_grad():
            alone = ll.score(ll.LinearLogits(hidden[2:3], weight), target[2:3])
        h = hidden.clone().requires_grad_()
        together = ll.score(ll.LinearLogits(h, weight), target)
        loss, reported = ll.cross_entropy_and_scores(ll.LinearLogits(h, weight), target)
    for name in SCORES:
        assert torch.equal(bits(getattr(alone, name)[0]), bits(getattr(together, name)[2]))
    assert torch.equal(bits(reported.logprob), bits(together.logprob))
    assert loss.requires_grad


def test_backward_outside_of_the_block(backend):
    """The nodes of autograd keep the setting of forward, also for a second backward."""
    hidden, weight = torch.randn(5, WIDTH), torch.randn(43, WIDTH)
    target, found = torch.arange(5), []
    for rows in (slice(0, 5), slice(3, 4)):
        h = hidden[rows].clone().requires_grad_()
        with ll.invariant():
            loss = ll.cross_entropy(ll.LinearLogits(h, weight), target[rows], reduction="sum")
            rowwise = ll.token_logprobs(ll.LinearLogits(h, weight), target[rows])
        assert not is_invariant()
        for _ in range(2):
            found.append([
                bits(torch.autograd.grad(t, h, torch.ones_like(t), retain_graph=True)[0])
                for t in (loss, rowwise)
            ])  # fmt: skip
    for d in found:
        for of_one, first in zip(d, found[0], strict=True):
            assert torch.equal(of_one if len(of_one) == 1 else of_one[3:4], first[3:4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_exact(backend, dtype):
    """The errors against fp64 are at most twice those of PyTorch in the same dtype."""
    hidden, weight = torch.randn(9, WIDTH).to(dtype), torch.randn(75, WIDTH).to(dtype)
    bias, target = torch.randn(75).to(dtype), torch.randint(75, (9,))
    target[4], upstream = -100, torch.randn(9)

    def run(function, kind):
        inputs = [t.to(kind).requires_grad_() for t in (hidden, weight, bias)]
        values = function(*inputs)
        values.backward(upstream.to(values.dtype))
        return [values, *(t.grad for t in inputs)]

    def ours(h, W, b):
        with ll.invariant():
            return ll.cross_entropy(ll.LinearLogits(h, W, b), target, reduction="none")

    def naive(h, W, b):
        return oracle.cross_entropy(torch.nn.functional.linear(h, W, b), target, reduction="none")

    truth = run(naive, torch.float64)
    for got, same, exact in zip(run(ours, dtype), run(naive, dtype), truth, strict=True):
        error, theirs = (got - exact).norm(), (same - exact).norm()
        assert error <= 2 * theirs + 1e-6 * exact.norm()


def test_lazy_logits_of_a_fused_head(backend):
    model = torch.nn.Linear(WIDTH, 75)
    fused = ll.fuse(torch.nn.Sequential(model), head="0")
    hidden, target, found = torch.randn(6, WIDTH), torch.arange(6), []
    for rows in (slice(0, 6), slice(4, 5)):
        h = hidden[rows].clone().requires_grad_()
        with ll.invariant():
            loss = torch.nn.functional.cross_entropy(fused(h), target[rows], reduction="none")
        loss.backward(torch.ones_like(loss))
        assert h.grad is not None
        found.append(
            (bits(loss[-2 if len(loss) > 1 else 0]), bits(h.grad[-2 if len(h) > 1 else 0]))
        )
    assert all(map(torch.equal, *found))


def test_a_teacher_head(backend):
    """If the teacher is a head, the teacher's logits have the same bits in every batch too."""
    weight, other = torch.randn(43, WIDTH), torch.randn(43, WIDTH)
    hidden, found = torch.randn(6, WIDTH), []
    for rows in (slice(0, 6), slice(4, 6)):
        h = hidden[rows].clone().requires_grad_()
        with ll.invariant():
            teacher = ll.LinearLogits(h.detach(), other)
            loss = ll.kl_div(
                ll.LinearLogits(h, weight), teacher, direction="reverse", reduction="none"
            )
            dense = ll.kl_div(
                torch.zeros(len(h), 43), teacher, direction="forward", reduction="none"
            )
        loss.backward(torch.ones_like(loss))
        assert h.grad is not None
        found.append((bits(loss[-2:]), bits(h.grad[-2:]), bits(dense[-2:])))
    assert all(map(torch.equal, *found))


def test_the_setting_is_read_once():
    with ll.invariant():
        with ll.invariant():
            pass
        assert is_invariant()
        found = []
        thread = threading.Thread(target=lambda: found.append(is_invariant()))
        thread.start()
        thread.join()
    assert found == [True]
    assert not is_invariant()
    with pytest.raises(ZeroDivisionError), ll.invariant():
        raise ZeroDivisionError
    assert not is_invariant()
    assert not Reading(4).invariant


def test_torch_func_is_refused():
    x, target = torch.randn(2, 8), torch.tensor([1, 2])
    with ll.invariant(), pytest.raises(RuntimeError, match=r"ll.invariant\(\) must not be active"):
        torch.func.grad(lambda x: ll.cross_entropy(x, target))(x)


def test_torch_compile_leaves_the_loss_to_python():
    x, target = torch.randn(3, 8), torch.tensor([1, 2, 3])
    weight = torch.randn(8, 8)

    @torch.compile(backend="eager")
    def loss(x, target):
        return ll.cross_entropy(ll.LinearLogits(x, weight), target, reduction="none") * 2

    with ll.invariant():
        compiled, alone = loss(x, target), ll.LinearLogits(x[1:2], weight)
        alone = 2 * ll.cross_entropy(alone, target[1:2], reduction="none")
    assert torch.equal(bits(compiled[1:2]), bits(alone))
