"""Every loss and option against the fp64 oracle, for value and gradient, by each implementation."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from laws import assert_as_good_as_torch

import logitless as ll

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
V = 150  # blocks of 32, a ragged last one, rows that are not 16-byte aligned


def make(rows=(6,), vocab=V, dtype=torch.float32, device="cpu", scale=3.0):
    x = (torch.randn(*rows, vocab, dtype=torch.float64) * scale).to(dtype).to(device)
    target = torch.randint(0, vocab, rows).to(device)
    return x, target


def per_row(rows, low=0.5):
    return torch.rand(rows) + low


READS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 5.0},
    "both": {"temperature": 1.7, "softcap": 4.0},
    "rows": {"temperature": per_row((6,))},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", READS.values(), ids=READS.keys())
@pytest.mark.usefixtures("small_blocks")
class TestReads:
    """The functions that only read: every temperature and softcap."""

    @staticmethod
    def how_on(how, device):
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in how.items()}

    def test_logsumexp(self, dtype, how, device):
        x, _ = make(dtype=dtype, device=device)
        how = self.how_on(how, device)
        assert_as_good_as_torch(
            lambda x: ll.logsumexp(x, **how), lambda x: oracle.logsumexp(x, **how), x
        )

    def test_entropy(self, dtype, how, device):
        x, _ = make(dtype=dtype, device=device)
        how = self.how_on(how, device)
        assert_as_good_as_torch(
            lambda x: ll.entropy(x, **how), lambda x: oracle.entropy(x, **how), x
        )

    @pytest.mark.parametrize("K", [None, 1, 5, 70])
    def test_token_logprobs(self, dtype, how, K, device):
        x, ids = make(dtype=dtype, device=device)
        how = self.how_on(how, device)
        if K is not None:
            ids = torch.randint(0, V, (6, K), device=device)
            ids[:, -1] = ids[:, 0]  # ids may repeat
        assert_as_good_as_torch(
            lambda x: ll.token_logprobs(x, ids, **how),
            lambda x: oracle.token_logprobs(x, ids, **how),
            x,
        )

    def test_score(self, dtype, how, device):
        x, target = make(dtype=dtype, device=device)
        how = self.how_on(how, device)
        scores = ll.score(x, target, **how)
        assert torch.equal(scores.argmax, x.argmax(-1))
        for name, f in {
            "logprob": lambda x: oracle.token_logprobs(x, target, **how),
            "entropy": lambda x: oracle.entropy(x, **how),
            "lse": lambda x: oracle.logsumexp(x, **how),
        }.items():
            assert_as_good_as_torch(
                lambda x, name=name: getattr(ll.score(x, target, **how), name), f, x
            )

    def test_row_stats(self, dtype, how, device):
        x, _ = make(dtype=dtype, device=device)
        how = self.how_on(how, device)
        ids = torch.randint(0, V, (6, 3), device=device)
        wants = {"entropy": True, "total": True, "argmax": True}
        stats = ll.row_stats(x, ids, **how, **wants)
        assert torch.equal(stats.argmax, x.argmax(-1))
        for name, f in {
            "lse": lambda x: oracle.logsumexp(x, **how),
            "picked": lambda x: oracle.picked(x, ids, **how),
            "entropy": lambda x: oracle.entropy(x, **how),
            "total": lambda x: oracle.total(x, **how),
        }.items():
            assert_as_good_as_torch(
                lambda x, name=name: getattr(ll.row_stats(x, ids, **how, **wants), name), f, x
            )


OPTIONS = {
    "plain": {},
    "weight": {"weight": torch.linspace(0.1, 2, V)},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing+weight": {"label_smoothing": 0.3, "weight": torch.linspace(0, 2, V)},
    "z_loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 5.0},
    "temperature": {"temperature": 0.7},
    "row temperature": {"temperature": per_row((6,))},
    "row_weight": {"row_weight": torch.tensor([1.0, 0.5, -1.0, 0.0, 2.0, 3.0])},
    "all": {
        "weight": torch.linspace(0.1, 2, V),
        "label_smoothing": 0.2,
        "z_loss": 1e-3,
        "softcap": 6.0,
        "temperature": 1.3,
        "row_weight": torch.tensor([1.0, 0.5, -1.0, 0.0, 2.0, 3.0]),
    },
}


def on(options, device):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
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
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_gradcheck(options, reduction, device):
    x, target = make(dtype=torch.float64, vocab=V, rows=(6,), device=device)
    x, target = x[:, :V].requires_grad_(), target.clone()
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
    row_weight = per_row((6,)).to(device).requires_grad_()
    for inplace in (False, True):
        logits = x.clone().requires_grad_() * 1
        loss = ll.cross_entropy(logits, target, row_weight=row_weight, inplace=inplace)
        (got,) = torch.autograd.grad(loss * 3, row_weight)
        want = 3 * F.cross_entropy(x, target, reduction="none") / 6
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
    x, target = make(vocab=100, device=device)
    want = ll.cross_entropy(x, target)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(ll.cross_entropy(x, target.to(dtype)), want)
