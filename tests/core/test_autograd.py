"""What autograd may ask of a loss: once through, twice refused, in place after, and functorch."""

import pytest
import torch
import torch.utils.checkpoint

import logitless as ll
from logitless.core import evaluate
from tests.support.calls import CALLS, TARGET, leaves, made


def make(rows=4, vocab=50, device="cpu"):
    return torch.randn(rows, vocab, device=device), torch.randint(0, vocab, (rows,), device=device)


@pytest.mark.parametrize("function", ["logsumexp", "entropy", "token_logprobs", "cross_entropy"])
def test_results_may_be_written_to(function, device):
    """`logprobs *= mask` is common code."""
    x, target = make(device=device)
    leaf = x.requires_grad_()
    arguments = {"token_logprobs": (target,), "cross_entropy": (target,)}.get(function, ())
    options = {"reduction": "none"} if function == "cross_entropy" else {}
    want = getattr(ll, function)(leaf, *arguments, **options) * 2
    with ll.impl("eager"):
        got = getattr(ll, function)(leaf, *arguments, **options).clone().detach()
        out = getattr(ll, function)(leaf, *arguments, **options)
        if function != "entropy":  # which backward needs, and PyTorch says so
            out.mul_(2)
            out.sum().backward()
            assert torch.equal(out, got * 2)
    torch.testing.assert_close(got * 2, want.detach())


TARGETS = ll.SparseTargets(torch.tensor([[0, 5, 9]] * 4), torch.tensor([[-1.0, -2.0, -3.0]] * 4))
EVERY_LOSS = {
    "cross_entropy": lambda x, t: ll.cross_entropy(x, t),
    "smoothed": lambda x, t: ll.cross_entropy(x, t, label_smoothing=0.1),
    "entropy": lambda x, t: ll.entropy(x).sum(),
    "token_logprobs": lambda x, t: ll.token_logprobs(x, t).sum(),
    "kl_div": lambda x, t: ll.kl_div(x, x.detach().flip(0), direction="reverse"),
    "jsd": lambda x, t: ll.jsd(x, x.detach().flip(0)),
    "tvd": lambda x, t: ll.tvd(x, x.detach().flip(0)),
    "gathered_kl": lambda x, t: ll.gathered_kl(x, torch.log_softmax(x.detach().flip(0), -1)),
    **{
        support: lambda x, t, support=support: ll.topk_distill(
            x, TARGETS.to(x.device), divergence="jsd", support=support
        )
        for support in ("truncate", "renorm", "tail")
    },
}


@pytest.mark.parametrize("loss", EVERY_LOSS.values(), ids=EVERY_LOSS.keys())
def test_under_a_checkpoint_and_in_torch_func(loss, impl, device):
    """A checkpoint gives what was saved once; torch.func wants functions of its own form."""
    x, target = make(device=device)
    leaf = x.requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf, target), leaf)
    again = torch.utils.checkpoint.checkpoint(loss, leaf, target, use_reentrant=False)
    (got,) = torch.autograd.grad(again, leaf)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach(), target), want)


def test_second_backward_gives_the_same(impl, device):
    """Second backward on a retained graph scaled twice."""
    leaf = torch.randn(3, 37, device=device, requires_grad=True)
    target = torch.randint(0, 37, (3,), device=device)
    loss = ll.cross_entropy(leaf * 1, target, label_smoothing=0.1) * 3
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


READERS = {
    "logsumexp": lambda x, t, **_: ll.logsumexp(x),
    "entropy": lambda x, t, **_: ll.entropy(x, softcap=3.0),
    "token_logprobs": lambda x, t, **_: ll.token_logprobs(x, t),
    "score": lambda x, t, **_: ll.score(x, t).logprob,
    "kept_scores": lambda x, t, **_: ll.kept_scores(x, t, t[:, None]).logprob,
    "cross_entropy": lambda x, t, **how: ll.cross_entropy(x, t, label_smoothing=0.1, **how),
    "cross_entropy_and_scores": lambda x, t, **how: ll.cross_entropy_and_scores(x, t, **how)[0],
}


@pytest.mark.parametrize("name", READERS)
def test_logits_are_not_overwritten(name, impl, device):
    """Input logits overwritten without telling autograd; even zeroed under no_grad."""
    x = torch.randn(3, 37, device=device)
    target = torch.randint(0, 37, (3,), device=device)
    leaf = x.clone().requires_grad_()
    READERS[name](leaf, target).sum().backward()
    assert torch.equal(leaf, x)
    assert leaf._version == 0
    with torch.no_grad():
        READERS[name](leaf, target, inplace=True)
    assert torch.equal(leaf, x)
    assert leaf._version == 0


DIFFERENTIABLE = (
    "cross_entropy", "cross_entropy_and_scores", "kl_div", "jsd", "tvd", "topk_distill",
    "row_loss", "row_loss, more", "score", "kept_scores", "kept_scores, mass", "slot_loss",
)  # fmt: skip


@pytest.mark.parametrize("source", ["tensor", "head"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_second_derivative_is_refused_not_zero(name, source, impl):
    """hessian and hvp were zeros; over a head a gradient penalty had no history."""
    parts = [t.requires_grad_() for t in leaves(source)]
    out = CALLS[name](made(source, parts))[0].sum()
    (first, *_) = torch.autograd.grad(out, parts, create_graph=True)
    with pytest.raises(RuntimeError, match="must not be differentiated twice"):
        (out + first.square().sum()).backward()

    def f(part):
        return CALLS[name](made(source, [part, *parts[1:]]))[0].sum()

    with pytest.raises(RuntimeError, match="must not be differentiated twice"):
        torch.autograd.functional.hessian(f, parts[0].detach())
    if source == "tensor":
        with pytest.raises(RuntimeError, match="differentiated twice"):
            torch.func.grad(lambda y: torch.func.grad(f)(y).sum())(parts[0].detach())


@pytest.mark.parametrize("source", ["tensor", "head"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_backward_reads_may_not_change(reduction, source, monkeypatch):
    """A target written to between forward and backward over a head gave a wrong gradient."""
    monkeypatch.setattr(evaluate, "SMALL", 0)  # else the gradient of few logits is made in forward
    labels = TARGET.clone()
    parts = [t.requires_grad_() for t in leaves(source)]
    loss = ll.cross_entropy(made(source, parts), labels, reduction=reduction).sum()
    labels.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_target_changed_before_backward(reduction, device):
    """Backward raises, or it does not read the target because forward computed the gradient."""
    h, w = torch.randn(4, 5, device=device, requires_grad=True), torch.randn(9, 5, device=device)
    for source in (lambda: h @ w.T, lambda: ll.LinearLogits(h, w)):
        target = torch.tensor([1, 2, 0, 3], device=device)
        loss, again = (
            ll.cross_entropy(source(), target, reduction=reduction).sum() for _ in range(2)
        )
        (want,) = torch.autograd.grad(again, h)
        target.add_(1)
        try:
            (got,) = torch.autograd.grad(loss, h)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
        else:
            assert torch.equal(got, want)
