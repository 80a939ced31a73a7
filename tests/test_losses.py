"""Every loss and option against the fp64 oracle, for value and gradient, by each implementation."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from covering import pairwise
from laws import assert_as_good_as_torch, assert_each_as_good_as_torch

import logitless as ll

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]
V = 75  # blocks of 32, a ragged last one, rows that are not 16-byte aligned
ROWS = 4


def make(rows=(ROWS,), vocab=V, dtype=torch.float32, device="cpu", scale=3.0):
    x = (torch.randn(*rows, vocab, dtype=torch.float64) * scale).to(dtype).to(device)
    target = torch.randint(0, vocab, rows).to(device)
    return x, target


def on(options, device):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}


READS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 5.0},
    "both": {"temperature": 1.7, "softcap": 4.0},
    "rows": {"temperature": torch.tensor([0.5, 1.0, 1.5])},
}


@pytest.mark.usefixtures("small_blocks")
class TestReads:
    """The functions that only read: every temperature and softcap."""

    every_read = pytest.mark.parametrize("how", READS.values(), ids=READS.keys())
    every_dtype = pytest.mark.parametrize("dtype", DTYPES)

    @every_dtype
    @every_read
    def test_logsumexp(self, dtype, how, device):
        x, _ = make((3,), dtype=dtype, device=device)
        how = on(how, device)
        assert_as_good_as_torch(
            lambda x: ll.logsumexp(x, **how), lambda x: oracle.logsumexp(x, **how), x
        )

    @every_dtype
    @every_read
    def test_entropy(self, dtype, how, device):
        x, _ = make((3,), dtype=dtype, device=device)
        how = on(how, device)
        assert_as_good_as_torch(
            lambda x: ll.entropy(x, **how), lambda x: oracle.entropy(x, **how), x
        )

    @pairwise(how=READS, K=[None, 1, 5, 70], dtype=DTYPES)
    def test_token_logprobs(self, dtype, how, K, device):
        x, ids = make((3,), dtype=dtype, device=device)
        how = on(how, device)
        if K is not None:
            ids = torch.randint(0, V, (3, K), device=device)
            ids[:, -1] = ids[:, 0]  # ids may repeat
        assert_as_good_as_torch(
            lambda x: ll.token_logprobs(x, ids, **how),
            lambda x: oracle.token_logprobs(x, ids, **how),
            x,
        )

    @every_dtype
    @every_read
    def test_score(self, dtype, how, device):
        x, target = make((3,), dtype=dtype, device=device)
        how = on(how, device)

        def ours(x):
            found = ll.score(x, target, **how)._asdict()
            assert torch.equal(found.pop("argmax"), x.argmax(-1))
            return found

        assert_each_as_good_as_torch(
            ours,
            {
                "logprob": lambda x: oracle.token_logprobs(x, target, **how),
                "entropy": lambda x: oracle.entropy(x, **how),
                "lse": lambda x: oracle.logsumexp(x, **how),
            },
            x,
        )

    @every_dtype
    @every_read
    def test_row_stats(self, dtype, how, device):
        x, _ = make((3,), dtype=dtype, device=device)
        how = on(how, device)
        ids = torch.randint(0, V, (3, 3), device=device)

        def ours(x):
            stats = ll.row_stats(x, ids, **how, entropy=True, total=True, argmax=True)._asdict()
            assert torch.equal(stats.pop("argmax"), x.argmax(-1))
            return stats

        assert_each_as_good_as_torch(
            ours,
            {
                "lse": lambda x: oracle.logsumexp(x, **how),
                "picked": lambda x: oracle.picked(x, ids, **how),
                "logprob": lambda x: oracle.token_logprobs(x, ids, **how),
                "entropy": lambda x: oracle.entropy(x, **how),
                "total": lambda x: oracle.total(x, **how),
            },
            x,
        )


OPTIONS = {
    "plain": {},
    "weight": {"weight": torch.linspace(0.1, 2, V)},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing+weight": {"label_smoothing": 0.3, "weight": torch.linspace(0, 2, V)},
    "z_loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 5.0},
    "temperature": {"temperature": 0.7},
    "row temperature": {"temperature": torch.linspace(0.5, 1.5, ROWS)},
    "row_weight": {"row_weight": torch.tensor([-1.0, 0.5, 2.0, 0.0])},
    "all": {
        "weight": torch.linspace(0.1, 2, V),
        "label_smoothing": 0.2,
        "z_loss": 1e-3,
        "softcap": 6.0,
        "temperature": 1.3,
        "row_weight": torch.tensor([-1.0, 0.5, 2.0, 3.0]),
    },
}


@pairwise(options=OPTIONS, dtype=DTYPES, reduction=REDUCTIONS)
@pytest.mark.usefixtures("small_blocks")
def test_cross_entropy(dtype, options, reduction, device):
    x, target = make(dtype=dtype, device=device)
    target[2] = -100
    how = on(options, device) | {"reduction": reduction}
    assert_as_good_as_torch(
        lambda x: ll.cross_entropy(x, target, **how),
        lambda x: oracle.cross_entropy(x, target, **how),
        x,
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_gradcheck(options, reduction, device):
    x, target = make(dtype=torch.float64, device=device)
    x.requires_grad_()
    target[3] = -100
    how = on(options, device)

    def f(x):
        return ll.cross_entropy(x, target, reduction=reduction, **how)

    assert torch.autograd.gradcheck(f, (x,), fast_mode=True)


def test_reads_gradcheck(device):
    x, _ = make(dtype=torch.float64, vocab=17, rows=(2, 2), device=device)
    ids = torch.randint(0, 17, (2, 2, 4), device=device)

    def f(x):
        stats = ll.row_stats(x, ids, temperature=0.8, softcap=3.0, entropy=True, total=True)
        return stats[:4]

    assert torch.autograd.gradcheck(f, (x.requires_grad_(),))


def test_row_weight_gets_its_gradient(impl, device):
    x, target = make(device=device)
    row_weight = torch.rand(ROWS).to(device).requires_grad_()
    for inplace in (False, True):
        logits = x.clone().requires_grad_() * 1
        loss = ll.cross_entropy(logits, target, row_weight=row_weight, inplace=inplace)
        (got,) = torch.autograd.grad(loss * 3, row_weight)
        want = 3 * F.cross_entropy(x, target, reduction="none") / ROWS
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 3), (2, 2, 2, 2)])
def test_leading_dimensions(shape, impl, device):
    x, target = make(rows=shape, vocab=11, device=device)
    loss = ll.cross_entropy(x, target, reduction="none")
    want = F.cross_entropy(x.reshape(-1, 11), target.reshape(-1), reduction="none").view(shape)
    torch.testing.assert_close(loss, want)
    assert ll.score(x, target).argmax.shape == shape


def test_cross_entropy_is_pytorchs_on_defaults(impl, device):
    x, target = make(rows=(9,), device=device)
    module = ll.nn.CrossEntropyLoss(
        torch.linspace(0.1, 1, V), ignore_index=3, reduction="sum", label_smoothing=0.1
    ).to(device)
    torch_module = torch.nn.CrossEntropyLoss(
        torch.linspace(0.1, 1, V), ignore_index=3, reduction="sum", label_smoothing=0.1
    ).to(device)
    torch.testing.assert_close(module(x, target), torch_module(x, target))


def test_target_may_be_any_integer_type(impl, device):
    x, target = make(device=device)
    want = ll.cross_entropy(x, target)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(ll.cross_entropy(x, target.to(dtype)), want)
