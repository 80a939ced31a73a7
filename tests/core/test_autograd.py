"""What autograd may ask of a loss: again under a checkpoint, and no second derivative."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import logitless as ll
from logitless.core import evaluate
from tests.support.calls import CALLS, NOT_DIFFERENTIABLE, SOURCES, TARGET, leaves, made, outcome


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_DIFFERENTIABLE])
def test_under_a_checkpoint(name, source, impl):
    """Which gives what was saved only once, and runs the call a second time."""
    again = functools.partial(checkpoint, use_reentrant=False)
    found, want = outcome(name, source, through=again), outcome(name, source)
    torch.testing.assert_close(found, want)


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
