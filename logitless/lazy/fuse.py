"""`fuse(model)`: a model with a linear head trains without materialising its logits.

Only the head's forward is replaced. Where gradients are wanted it returns LazyLogits (logits.py),
and the model itself, a Trainer or a training loop computes its loss from them.
"""

import contextlib
from contextvars import ContextVar
from types import MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..core.call import in_func, named
from ..core.source import is_dtensor
from ..heads.linear import LinearLogits
from . import checks
from .colwise import spread_dense_logits, spread_logits
from .logits import lazy_logits_of, warn_once

Model = TypeVar("Model", bound=nn.Module)

OPTIONS = "_logitless"  # the key of a fused head's options, and of a model's guard


@named(LinearLogits.__init__)
def fuse(model: Model, *, head: nn.Module | str | None = None, **options) -> Model:
    """The same model, whose head returns lazy logits in training; options are LinearLogits'.

    head is a module, or its name in the model. By default it is the model's output embeddings,
    which every causal language model of Transformers has. Without gradients, as in evaluation and
    sampling, the head returns plain logits. Calling fuse again changes the options; `unfuse` undoes
    it.

    >>> model = fuse(AutoModelForCausalLM.from_pretrained(...))
    >>> model(input_ids=ids, labels=ids).loss.backward()
    """
    checks.options_of_fuse(options)
    if isinstance(head, nn.Module):
        names = [name for name, module in model.named_modules() if module is head]
        checks.part_of_model(head, names)
        head = names[0]
    linear_head(model, head)  # raises if the head cannot be fused
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
    """Before each forward of a model: fuses the head again if it was replaced.

    `resize_token_embeddings` and adapters replace the head.
    """

    def __init__(self, head: str | None, options: dict):
        self.head, self.options = head, options

    def __call__(self, model: nn.Module, *_) -> None:
        if torch.compiler.is_compiling():  # a compiler sees the plain product anyway
            return
        head = linear_head(model, self.head)
        method = head.__dict__.get("forward")
        ours = getattr(method, "__func__", None) is forward
        bound = ours and getattr(method, "__self__", None) is head
        if not bound or head.__dict__.get(OPTIONS) is not self.options:
            head.__dict__[OPTIONS] = self.options
            head.__dict__["forward"] = MethodType(forward, head)


def linear_head(model: nn.Module, name: str | None) -> nn.Linear:
    """The linear layer that computes the logits; raises if it cannot be fused."""
    if name is None:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        checks.has_head(head, model)
    else:
        head = model.get_submodule(name)
    copies = getattr(head, "modules_to_save", None)  # an adapter that trains a copy of the head
    if copies is not None:
        head = copies[head.active_adapters[0]]  # pyright: ignore
    head = getattr(head, "base_layer", head)  # an adapter that adds to the output of its base
    checks.fusable(head, OPTIONS in head.__dict__)
    return head  # pyright: ignore


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Forward of a fused head. It is a module-level function so that fused heads can be pickled."""
    return head_logits(self, input, self.__dict__[OPTIONS])


_lazy = ContextVar("lazy", default=False)


@contextlib.contextmanager
def lazy_logits():
    """In this block fused heads return lazy logits without gradients too, for a teacher.

    >>> with torch.no_grad(), lazy_logits():
    ...     teacher_logits = teacher(ids).logits
    >>> loss = kl_div(student(ids).logits, teacher_logits, direction="forward")
    """
    before = _lazy.set(True)
    try:
        yield
    finally:
        _lazy.reset(before)


def head_logits(module: nn.Linear, hidden: Tensor, options: dict) -> Tensor:
    """The logits of a head: lazy if a gradient is wanted or in `lazy_logits()`, else plain.

    Under a compiler they are the plain product, with a warning.
    """
    tensors = (hidden, module.weight, module.bias)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    spread = is_dtensor(hidden) and is_dtensor(module.weight)
    if torch.compiler.is_compiling() and wanted:
        _say_how_to_compile()
    if torch.compiler.is_compiling() or in_func() or not (wanted or _lazy.get()):
        if options.get("logits_dtype") is None:
            return nn.functional.linear(*tensors)
        if spread:
            return spread_dense_logits(tensors, options)
        return LinearLogits(*tensors, **options).materialize()
    if spread:
        return spread_logits(tensors, options, module)
    # LinearLogits checks the tensors, and casts them as autocast does.
    return lazy_logits_of(LinearLogits(*tensors, **options).head._replace(module=module))


def _say_how_to_compile() -> None:
    """Runs while a graph is traced, and is not part of the graph."""
    warn_once(
        "torch.compile(model) sees the head of a fused model as a plain product, and makes its"
        " logits. Compile what comes before the head instead, such as model.model.compile()."
    )


# As torch.compiler.assume_constant_result does, which would import the compiler, and Triton.
_say_how_to_compile._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
