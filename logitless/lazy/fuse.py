"""`fuse(model)`: a model with a linear head trains without materialising its logits.

Only the head's forward is replaced: where gradients are wanted it returns LazyLogits
(lazy/logits.py), and whatever computes the loss, the model itself, a Trainer or a loop, computes it
from those.
"""

import contextlib
from contextvars import ContextVar
from types import MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..core import call as _call
from ..core.call import in_func
from ..heads.linear import LinearLogits
from . import checks
from .colwise import made_logits, spread_logits
from .logits import LazyLogits, Made, warn_once
from .torch_functions import absorbed

Model = TypeVar("Model", bound=nn.Module)

LazyLogits.absorb = staticmethod(absorbed)

OPTIONS = "_logitless"  # where a fused head keeps its options, and a model its guard


@_call.named(LinearLogits.__init__)
def fuse(model: Model, *, head: nn.Module | str | None = None, **options) -> Model:
    """The same model, whose head gives lazy logits in training; options are LinearLogits'.

    head is a module, or its name in the model; by default the model's output embeddings, which
    every causal language model of Transformers has. Without gradients, as in evaluation and
    sampling, the head gives plain logits. Calling it again changes the options; `unfuse` undoes it.

    >>> model = fuse(AutoModelForCausalLM.from_pretrained(...))
    >>> model(input_ids=ids, labels=ids).loss.backward()
    """
    checks.options_of_fuse(options)
    if isinstance(head, nn.Module):
        names = [name for name, module in model.named_modules() if module is head]
        checks.part_of_model(head, names)
        head = names[0]
    plain_head(model, head)  # which may refuse it
    unfuse(model)
    guard = _Guard(head, options)
    guard(model)
    handle = model.register_forward_pre_hook(guard)
    model.__dict__[OPTIONS] = (guard, handle)
    return model


def unfuse(model: Model) -> Model:
    """The model as it was before `fuse`."""
    _, handle = model.__dict__.pop(OPTIONS, (None, None))
    if handle is not None:
        handle.remove()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.__dict__.pop(OPTIONS, None) is not None:
            del module.__dict__["forward"]
    return model


class _Guard:
    """Before each forward of a model: its head is fused, also one that has taken another's place.

    `resize_token_embeddings` and adapters replace the head.
    """

    def __init__(self, head: str | None, options: dict):
        self.head, self.options = head, options

    def __call__(self, model: nn.Module, *_) -> None:
        if torch.compiler.is_compiling():  # a compiler sees the plain product in any case
            return
        head = plain_head(model, self.head)
        own = head.__dict__.get("forward")
        bound = getattr(own, "__func__", None) is forward and getattr(own, "__self__", None) is head
        if not bound or head.__dict__.get(OPTIONS) is not self.options:
            head.__dict__[OPTIONS] = self.options
            head.__dict__["forward"] = MethodType(forward, head)


def plain_head(model: nn.Module, name: str | None) -> nn.Linear:
    """The linear layer that makes the logits, or an error that says why there is none."""
    if name is None:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        checks.has_head(head, model)
    else:
        head = model.get_submodule(name)
    copies = getattr(head, "modules_to_save", None)  # an adapter trains a copy of the head
    if copies is not None:
        head = copies[head.active_adapters[0]]  # pyright: ignore
    head = getattr(head, "base_layer", head)  # an adapter adds to what its base gives
    checks.fusable(head, OPTIONS in head.__dict__)
    return head  # pyright: ignore


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """What a fused head does; pickled by its name, so that a head unpickled has its own again."""
    return head_logits(self, input, self.__dict__[OPTIONS])


_lazy = ContextVar("lazy", default=False)


@contextlib.contextmanager
def lazy_logits():
    """In this block fused heads give lazy logits without gradients too: for a teacher's.

    >>> with torch.no_grad(), lazy_logits():
    ...     teacher_logits = teacher(ids).logits
    >>> loss = kl_div(student(ids).logits, teacher_logits, direction="forward")
    """
    before = _lazy.set(True)
    try:
        yield
    finally:
        _lazy.reset(before)


def head_logits(module: nn.Linear, hidden: Tensor, how: dict) -> Tensor:
    """The logits of a head: lazy where a gradient is wanted, or `lazy_logits` says so, else plain.

    A compiler sees the plain product, and its user is told once.
    """
    parts = (hidden, module.weight, module.bias)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in parts)
    spread = hasattr(hidden, "placements") and hasattr(module.weight, "placements")
    if torch.compiler.is_compiling() and wanted:
        _say_how_to_compile()
    if torch.compiler.is_compiling() or in_func() or not (wanted or _lazy.get()):
        if how.get("logits_dtype") is None:
            return nn.functional.linear(*parts)
        return made_logits(parts, how) if spread else LinearLogits(*parts, **how).materialize()
    if spread:
        return spread_logits(parts, how, module)
    source = LinearLogits(*parts, **how)  # which checks them, and casts as autocast says
    return Made.apply(*source.parts, how, module)  # pyright: ignore[reportReturnType]


def _say_how_to_compile() -> None:
    """Called while a graph is traced, and no part of it."""
    warn_once(
        "torch.compile(model) sees the head of a fused model as a plain product, and makes its"
        " logits. Compile what comes before the head instead, such as model.model.compile()."
    )


# As torch.compiler.assume_constant_result does, which would import the compiler, and Triton.
_say_how_to_compile._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
