"""`fuse(model)`: a model with a linear head runs without materialising its logits.

Only the head's forward is replaced (fused_head.py). The head returns LazyLogits (logits.py). The
model itself, a Trainer or a training loop computes its loss from the LazyLogits. In inference,
logits of at most 32 MiB are plain tensors.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..core.call import named
from . import checks
from .checks import kind_of, name_of
from .compiled import can_leave_graph, outside_of_graph
from .fused_head import Products, is_lazy, is_set, remove_forward, set_forward, wants_gradient
from .linear_logits import LinearLogits
from .report import warn_once

Model = TypeVar("Model", bound=nn.Module)

# GUARD, HOOKS and CALLS are keys in the __dict__ of modules. HOOKS and CALLS are set on the model
# that was fused. CALLS holds the value of Guard.calls before the model's last forward. GUARD is set
# on the fused model, on its head and on the modules between model and head, so that `unfuse` can be
# called on any of these modules.
GUARD, HOOKS, CALLS = "_logitless_guard", "_logitless_hooks", "_logitless_calls"


@named(LinearLogits.__init__)
def fuse(
    model: Model,
    *,
    head: nn.Module | str | None = None,
    lazy_inference: bool = True,
    **options,
) -> Model:
    """Changes the model's head to return lazy logits, and returns the same model.

    `head` is a module of the model, or the module's name. By default, the head is the model's
    output embeddings, which every causal language model of Transformers has. `options` are options
    of LinearLogits. Without gradients, as in evaluation and sampling, logits of at most 32 MiB are
    plain and larger logits are lazy. If `lazy_inference` is false, all logits without gradients are
    plain. Calling `fuse` again changes the options. `unfuse` undoes `fuse`, and `is_fused` returns
    whether `fuse` has an effect. `report` returns where lazy logits were materialised.

    >>> model = fuse(AutoModelForCausalLM.from_pretrained(...))
    >>> model(input_ids=ids, labels=ids).loss.backward()
    """
    checks.options_of_fuse({**options, "lazy_inference": lazy_inference})
    checks.is_head(head)
    if isinstance(head, nn.Module):
        names = [name for name, module in model.named_modules() if module is head]
        checks.part_of_model(head, names)
        head = names[0]
    found = head_of(model, head)  # raises if the head cannot be fused
    unfuse(model)
    guard = Guard(head, options, lazy_inference)
    for module in between(model, found):
        module.__dict__[GUARD] = guard
    set_forward(found, guard)
    model.__dict__[HOOKS] = (
        model.register_forward_pre_hook(guard.before),
        model.register_forward_hook(guard.after),
    )
    return model


def unfuse(model: Model) -> Model:
    """Undoes `fuse`, even if `fuse` was called on a part or on a wrapper of the model."""
    for module in model.modules():
        guard = module.__dict__.pop(GUARD, None)
        if guard is not None:
            guard.active = False
        module.__dict__.pop(CALLS, None)
        remove_hooks(module)
        remove_forward(module)
    return model


class Fused(NamedTuple):
    """Whether `fuse` has an effect on a model, and the reason why or why not."""

    acts: bool
    reason: str

    def __bool__(self) -> bool:
        return self.acts

    def __str__(self) -> str:
        return self.reason


def is_fused(model: nn.Module) -> Fused:
    """Returns whether `fuse` has an effect on the model now, and the reason.

    `fuse` has an effect if the head returns lazy logits in training. The result also depends on the
    last training forward, because some trainers never call the head. `model` can also be a wrapper
    of the fused model, or a part of the fused model that contains its head.

    >>> found = is_fused(model)
    >>> assert found, found.reason
    """
    guards = list(dict.fromkeys(guards_of(model)))
    if not guards:
        return Fused(False, f"fuse was not called on this {kind_of(model)}, or was undone.")
    for module in model.modules():
        if HOOKS in module.__dict__ and module.__dict__.get(GUARD) in guards:
            module.__dict__[GUARD].find(module)
    reasons = [guard.unfusable or guard.obstacle for guard in guards]
    found = next(filter(None, reasons), None)
    always = all(guard.lazy_inference for guard in guards)
    kept = "." if always else " if gradients are wanted."
    return Fused(found is None, found or f"The head returns lazy logits{kept}")


def guards_of(model: nn.Module) -> Iterator["Guard"]:
    """The active guards (class Guard) of a model and of the modules inside the model."""
    guards = (module.__dict__.get(GUARD) for module in model.modules())
    return (guard for guard in guards if guard is not None and guard.active)


def head_of(model: nn.Module, name: str | None) -> nn.Module:
    """Returns the model's head with its wrappers. Raises if the head cannot be fused."""
    head = named_head(model, name)
    if name is None:
        checks.has_head(head, model)
    else:
        checks.kept_in_memory(model, name)
    checks.fusable(head)
    return head


def named_head(model: nn.Module, name: str | None) -> Any:
    """The model's head with its wrappers, or None if `name` is None and the model has no head."""
    if name is not None:
        return model.get_submodule(name)
    return getattr(model, "get_output_embeddings", lambda: None)()


def between(model: nn.Module, head: nn.Module) -> list[nn.Module]:
    """The model, its head, and all modules of the model that contain the head."""
    name = next((name for name, module in model.named_modules() if module is head), "")
    parts = name.split(".") if name else []
    return [model, *(model.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts)))]


def remove_hooks(model: nn.Module) -> None:
    for handle in model.__dict__.pop(HOOKS, ()):
        handle.remove()


class Guard:
    """The hooks of a fused model, which fuse its head again if the head was replaced.

    `resize_token_embeddings` and adapters replace the head, and other code replaces the forward of
    the head. If a head cannot be fused, the head is not changed and a training forward warns once.
    """

    def __init__(self, head: str | None, options: dict, lazy_inference: bool):
        self.head, self.options, self.lazy_inference = head, options, lazy_inference
        self.active = True  # False after unfuse
        self.calls = 0  # number of times that `called` has run
        self.unfusable: str | None = None  # the reason why the head cannot be fused
        self.obstacle: str | None = None  # why the last training forward had plain logits

    def find(self, model: nn.Module) -> nn.Module | None:
        """Returns the head, or None if the head cannot be fused."""
        try:
            head = head_of(model, self.head)
        except Exception as error:  # raised by our checks or by get_output_embeddings
            self.unfusable = f"{kind_of(model)} has a head that cannot be fused. {error}"
            return None
        self.unfusable = None
        return head

    def is_set(self, model: nn.Module) -> bool:
        """Whether the forward of the model's head is already replaced."""
        try:
            return is_set(named_head(model, self.head), self)
        except Exception:  # raised by get_output_embeddings
            return False

    def before(self, model: nn.Module, *_) -> None:
        """Runs before each forward of the model."""
        if not torch.compiler.is_compiling():
            self.prepare(model)
        elif torch.is_grad_enabled() and can_leave_graph():
            outside_of_graph(self.prepare, model)

    def prepare(self, model: nn.Module) -> None:
        """Fuses the model's head, if the head is not fused yet."""
        if not self.active:
            remove_hooks(model)
            return
        model.__dict__[CALLS] = self.calls
        if not torch.is_grad_enabled() and self.is_set(model):  # a fast check for decoding
            return
        head = self.find(model)
        if head is not None:
            head.__dict__[GUARD] = self
            set_forward(head, self)

    def called(self, logits: Any, products: Products) -> None:
        """Runs after each call of the head with gradients enabled or inside `lazy_logits()`.

        The method does not run if the call is traced (`is_traced`) or if the head cannot be fused.
        """
        self.calls += 1
        self.obstacle = None
        if wants_gradient(logits) and not is_lazy(logits):
            self.obstacle = f"The head, {name_of(products.head)}, {products.why_plain()}."

    def read_by_adapter(self) -> None:
        """Runs after trl_head/adapter.py has used the head's weight without calling the head."""
        self.calls += 1
        self.obstacle = None

    def after(self, model: nn.Module, *_) -> None:
        """Runs after each forward of the model."""
        if not (torch.is_grad_enabled() and model.training):
            return
        if not torch.compiler.is_compiling():
            self.check(model)
        elif can_leave_graph():
            outside_of_graph(self.check, model)

    def check(self, model: nn.Module) -> None:
        """Warns once if the logits of the last training forward were plain."""
        if self.unfusable is None and model.__dict__.get(CALLS) == self.calls:
            self.obstacle = (
                f"A training forward of {kind_of(model)} did not call its head. Some models and"
                " trainers, such as TRL's, multiply by the weight of the head themselves. For a"
                " trainer of TRL, call ll.hf.use_in_trl(trainer)."
            )
        if (reason := self.unfusable or self.obstacle) is not None:
            warn_once(f"fuse has no effect here, and the logits are plain. {reason}")
