"""torch.func, vmap and forward mode: right, or an error that says what to do."""

import pytest
import torch

import logitless as ll
from tests.support.calls import CALLS, TARGET, TEACHER, N, V, leaves, normal, outcome

FUNC = {
    "grad": torch.func.grad,
    "vjp": lambda f: lambda x: torch.func.vjp(f, x),
    "vmap": lambda f: torch.func.vmap(lambda row: f(row.expand(N, -1))),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "forward_ad": lambda f: lambda x: forward_ad(f, x),
    "is_grads_batched": lambda f: lambda x: batched(f, x),
}


WORDS = "|".join((
    "logits must be a Tensor under torch.func", "logits must not be mapped over by torch.func.vmap",
    "logits must be differentiated in reverse mode, by torch.autograd.grad or torch.func.grad",
))  # fmt: skip


def forward_ad(f, x):
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(x, x))


def batched(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x, torch.ones(2, device=x.device), is_grads_batched=True)


@pytest.mark.parametrize("transform", FUNC)
@pytest.mark.parametrize(
    "name",
    ["cross_entropy", "cross_entropy_and_scores", "row_loss", "row_loss, more", "topk_distill",
     "jsd", "slot_loss"],
)  # fmt: skip
def test_torch_func_is_right_or_says_what_to_do(name, transform):
    """Transforms over a head, vmap and jacrev: errors of internal names."""
    x = leaves("tensor")[0]
    hidden, weight, bias = leaves("head")

    def over_logits(x):
        return CALLS[name](x)[0]

    def over_a_head(hidden):
        return CALLS[name](ll.LinearLogits(hidden, weight, bias))[0]

    with pytest.raises(RuntimeError, match=WORDS):
        FUNC[transform](over_a_head)(hidden)
    if transform == "grad":
        torch.testing.assert_close(torch.func.grad(over_logits)(x), outcome(name, "tensor")[-1])
    elif transform != "vjp":
        with pytest.raises(RuntimeError, match=WORDS):
            FUNC[transform](over_logits)(x)


def test_in_place_and_capture_under_transforms():
    x = leaves("tensor")[0].requires_grad_()
    loss = ll.cross_entropy(x * 1, TARGET, inplace=True)
    with pytest.raises(RuntimeError, match="logits must not be mapped"):
        torch.autograd.grad(loss, x, torch.ones(2, device=x.device), is_grads_batched=True)
    weight = normal(V, V, seed=1)
    for source in (lambda x: x, lambda x: ll.LinearLogits(x, weight)):
        with pytest.raises(RuntimeError, match="logits must not be mapped"):
            torch.func.vmap(lambda x, f=source: ll.capture_topk(f(x), 2).ids)(TEACHER)
