"""Second derivatives through lazy logits are right, or raise."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from tests.support.laws import error
from tests.support.lazy_models import V

pytestmark = pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")


def squares(z):
    """The sum of squares of plain values, because no lazy logits can be flipped."""
    return z.flip(-1).square().sum()


LOSSES = {
    "log_softmax": lambda z, t: squares(z.log_softmax(-1)),
    "tanh": lambda z, t: squares(torch.tanh(z)),
    "tanh, a sum": lambda z, t: torch.tanh(z).sin().sum(),
    "softmax": lambda z, t: squares(z.softmax(-1)),
    "exp": lambda z, t: (z.exp() * 2).sin().sum(),
    "entropy": lambda z, t: -(z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(),
    "entropy, materialised": lambda z, t: squares(z.log_softmax(-1).exp() * z.log_softmax(-1)),
    "views": lambda z, t: squares((z[1:] * 2).transpose(0, 1)),
    "a square": lambda z, t: (z * z).sum(),
    "a square, materialised": lambda z, t: squares(z),
    "a bias": lambda z, t: squares(z + torch.linspace(0, 1, V).to(z)),
    "negative": lambda z, t: squares(-z / 3),
    "masked": lambda z, t: squares(z.masked_fill(torch.arange(V) < 2, 0.5)),
    "joined": lambda z, t: squares(torch.cat([z, z])),
    "materialised": lambda z, t: getattr(z, "materialize", z.clone)().square().sum(),
    "a column": lambda z, t: z[:, 3].square().sum(),
    "cross_entropy": lambda z, t: F.cross_entropy(z, t),
    "by row": lambda z, t: F.cross_entropy(z, t, reduction="none").square().sum(),
    "ours": lambda z, t: (F if type(z) is torch.Tensor else ll).cross_entropy(z, t),
    "gather": lambda z, t: z.log_softmax(-1).gather(-1, t[:, None]).square().sum(),
    "logsumexp": lambda z, t: z.logsumexp(-1).square().sum(),
    "topk": lambda z, t: z.topk(2, -1).values.square().sum(),
    "softmax, gathered": lambda z, t: z.softmax(-1).gather(-1, t[:, None]).square().sum(),
    "kl_div": lambda z, t: F.kl_div(
        z.log_softmax(-1), torch.full(z.shape, 0.1).to(z), reduction="sum"
    ),
    "kl_div by value": lambda z, t: squares(
        F.kl_div(z.log_softmax(-1), torch.full(z.shape, 0.1).to(z), reduction="none")
    ),
}


REFUSED = {  # losses and statistics of our kernels
    "cross_entropy", "by row", "ours", "gather", "logsumexp", "topk", "softmax, gathered", "kl_div",
    "entropy", "exp", "tanh, a sum", "a square",
}  # fmt: skip


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_second_derivatives(name, beside, t):
    """Right or an error, also if another term gives the inputs a second derivative."""
    torch.manual_seed(0)
    h, w = (torch.randn(size, 6, dtype=torch.float64, requires_grad=True) for size in (4, V))
    target = t.flatten()[2:6].clamp(min=0).cpu()

    def second(z):
        loss = LOSSES[name](z, target)
        loss = loss + (h**3).sum() + (w**3).sum() if beside else loss
        (g,) = torch.autograd.grad(loss, h, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (h, w))

    want = second(F.linear(h, w))
    if name in REFUSED:
        with pytest.raises(RuntimeError, match="twice"):
            second(ll.LinearLogits(h, w).lazy())
        return
    for a, b in zip(second(ll.LinearLogits(h, w).lazy()), want, strict=True):
        assert error(a, b) < 1e-9


@pytest.mark.parametrize("function", [torch.sigmoid, lambda z: z.softmax(-1), torch.neg])
def test_a_hook_between_the_derivatives(function):
    """PyTorch's sigmoid saves its result, so that the hook runs in the second derivative too."""
    torch.manual_seed(0)
    h, w = (torch.randn(size, 6, dtype=torch.float64, requires_grad=True) for size in (4, V))

    def second(z):
        y = function(z)
        y.register_hook(lambda g: g * -0.5)
        (g,) = torch.autograd.grad(squares(y), h, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (h, w))

    z = ll.LinearLogits(h, w).lazy()
    if function is torch.neg:  # whose derivative is a constant
        torch.testing.assert_close(second(z), second(F.linear(h, w)))
        return
    with pytest.raises(RuntimeError, match=r"has a hook must not be differentiated twice.*materi"):
        second(z)
    torch.testing.assert_close(second(z.materialize()), second(F.linear(h, w)))
