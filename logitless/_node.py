"""One differentiable function, in the three ways PyTorch wants it.

Called plainly it is a torch.autograd.Function, which costs the host least; inside torch.func one of
the form that asks for; to a compiler or a dispatch mode, which must see operators, it is one.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LENT, _REPAID = "_lent_to_logitless", "_repaid_by_logitless"


def is_watched() -> bool:
    """Whether a compiler, a mode or torch.func looks on."""
    return _is_traced() or _in_func()


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _in_func() -> bool:
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return functorch.peek_interpreter_stack() is not None


def lend(x: Tensor) -> Tensor:
    """x, with its memory offered for its own gradient: a backward may overwrite it, and give it.

    Only for a function that reads x in one node: a second one's backward would find a gradient.
    """
    setattr(x, _LENT, True)
    return x


def is_lent(x: Tensor) -> bool:
    return getattr(x, _LENT, False)


def repay(x: Tensor) -> None:
    """Say of what was lent that it holds its gradient already, for an upstream of 1."""
    setattr(x, _REPAID, True)


def is_repaid(x: Tensor) -> bool:
    return getattr(x, _REPAID, False)


def node(
    name: str,  # of the operator logitless::name
    library: torch.library.Library,  # which defines it
    forward: Callable,  # inputs -> outputs
    save: Callable,  # ctx, inputs, outputs
    backward: Callable,  # ctx, saved tensors, gradients of the outputs -> of the inputs
) -> Callable:
    """forward, with `backward` for its gradient, which has none of its own: it says so."""

    @once_differentiable
    def once(ctx, count, *tensors):
        # What was saved is named, so that a second differentiation raises in any case.
        return backward(ctx, tensors[:count], *tensors[count:])

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):  # a setup_context of its own would cost a third of a small call
            outputs = forward(*inputs)
            save(ctx, inputs, outputs)
            return outputs

        @staticmethod
        def backward(ctx, *gradients):
            saved = ctx.saved_tensors  # once: a checkpoint gives them no second time
            return once(ctx, len(saved), *saved, *gradients)

    class InFunc(torch.autograd.Function):
        setup_context = staticmethod(save)
        backward = staticmethod(Direct.backward)

    InFunc.forward = staticmethod(forward)
    torch.library.register_autograd(
        f"logitless::{name}",
        lambda ctx, *gradients: backward(ctx, ctx.saved_tensors, *gradients),
        setup_context=save,
        lib=library,
    )
    operator = getattr(torch.ops.logitless, name)

    def run(*inputs):
        if _is_traced():
            return operator(*inputs)
        return InFunc.apply(*inputs) if _in_func() else Direct.apply(*inputs)

    return run


def refuse_twice(name: str, library: torch.library.Library) -> None:
    """A backward operator has no gradient, and says so."""

    def backward(ctx, *gradients):
        raise RuntimeError(
            "logitless: a loss must not be differentiated twice; its backward has none."
        )

    torch.library.register_autograd(f"logitless::{name}", backward, lib=library)
