"""The state of a fused head, and the hooks of a fused model.

`resize_token_embeddings` and adapters can replace the head of a model, and other code can replace
the forward of the head. So the hooks find the head before each forward of the model, and fuse the
head again if needed. A `Guard` also counts the calls of its head, and warns if a training forward
never called the head.
"""

from typing import Any

import torch
from torch import nn

from . import checks
from .checks import kind_of, name_of
from .compiled import can_leave_graph, outside_of_graph
from .fused_head import Products, is_lazy, is_set, set_forward, wants_gradient
from .report import HEAD, warn_once

# GUARD, HOOKS and CALLS are keys in the __dict__ of modules. HOOKS and CALLS are set on the model
# that was fused. CALLS holds the value of Hooks.calls() before the model's last forward. GUARD
# holds the guards of all heads inside a module. GUARD is set on the fused model, on its heads and
# on the modules between them. So `unfuse` can be called on any of these modules.
GUARD, HOOKS, CALLS = "_logitless_guard", "_logitless_hooks", "_logitless_calls"


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
    """The model's head with its wrappers, or None if `name` is None and no head is found."""
    if name is not None:
        return model.get_submodule(name)
    return getattr(model, "get_output_embeddings", lambda: None)()


def mark(module: nn.Module, guard: "Guard") -> None:
    """Adds a guard to the guards of a module."""
    others = [g for g in module.__dict__.get(GUARD, ()) if g.active and g is not guard]
    module.__dict__[GUARD] = (*others, guard)


def remove_hooks(model: nn.Module) -> None:
    for handle in model.__dict__.pop(HOOKS, ()):
        handle.remove()


class Guard:
    """The state of one fused head.

    If a head cannot be fused, the head is not changed and a training forward warns once.
    """

    def __init__(self, name: str | None, options: dict, lazy_inference: bool):
        self.name, self.options, self.lazy_inference = name, options, lazy_inference
        self.group = [self]  # the guards of all heads that one call of `fuse` fused
        self.active = True  # False after unfuse
        self.calls = 0  # number of times that `called` has run
        self.unfusable: str | None = None  # the reason why the head cannot be fused
        self.obstacle: str | None = None  # why the last training forward had plain logits
        # The name of the model's class, if the model's last training forward did not call the head.
        # Otherwise, None.
        self.idle: str | None = None

    def find(self, model: nn.Module) -> nn.Module | None:
        """Returns the head, or None if the head cannot be fused."""
        try:
            head = head_of(model, self.name)
        except Exception as error:  # raised by our checks or by get_output_embeddings
            self.unfusable = f"{kind_of(model)} has a head that cannot be fused. {error}"
            return None
        self.unfusable = None
        return head

    def is_set(self, model: nn.Module) -> bool:
        """Whether the forward of the model's head is already replaced."""
        try:
            return is_set(named_head(model, self.name), self)
        except Exception:  # raised by get_output_embeddings
            return False

    def prepare(self, model: nn.Module) -> None:
        """Fuses the model's head, if the head is not fused yet."""
        if not torch.is_grad_enabled() and self.is_set(model):  # a fast check for decoding
            return
        head = self.find(model)
        if head is not None:
            mark(head, self)
            self.set_on(head)

    def set_on(self, head: nn.Module) -> None:
        if len(self.group) > 1:
            head.__dict__[HEAD] = self.name
        set_forward(head, self)

    def called(self, logits: Any, products: Products) -> None:
        """Runs after a call of the head, if gradients are enabled or `lazy_logits()` is active.

        The method does not run if the call is traced (`is_traced`) or if the head cannot be fused.
        """
        self.calls += 1
        self.obstacle = self.idle = None
        if wants_gradient(logits) and not is_lazy(logits):
            name = "" if len(self.group) == 1 else f" {self.name!r}"
            self.obstacle = f"The head{name}, {name_of(products.head)}, {products.why_plain()}."

    def read_by_adapter(self) -> None:
        """Runs after trl_head/adapter.py has used the head's weight without calling the head."""
        self.calls += 1
        self.obstacle = self.idle = None

    def reason(self) -> str | None:
        """The reason why `fuse` has no effect on the head now, or None."""
        return self.unfusable or self.obstacle or self.uncalled()

    def uncalled(self) -> str | None:
        """Returns a reason if the last training forward called no fused head, else None."""
        guards = [guard for guard in self.group if guard.active]
        if any(guard.idle is None for guard in guards):
            return None
        which = "its head" if len(guards) == 1 else "any of its heads"
        return (
            f"A training forward of {self.idle} did not call {which}. Some models and trainers,"
            " such as TRL's, multiply by the weight of the head themselves. For a trainer of TRL,"
            " call ll.hf.use_in_trl(trainer)."
        )


class Hooks:
    """The hooks of a fused model, which fuse a head again if the head was replaced."""

    def __init__(self, guards: list[Guard]):
        self.guards = guards

    def before(self, model: nn.Module, *_) -> None:
        """Runs before each forward of the model."""
        if not torch.compiler.is_compiling():
            self.prepare(model)
        elif torch.is_grad_enabled() and can_leave_graph():
            outside_of_graph(self.prepare, model)

    def prepare(self, model: nn.Module) -> None:
        """Fuses the model's heads that are not fused yet."""
        guards = [guard for guard in self.guards if guard.active]
        if not guards:
            remove_hooks(model)
            return
        model.__dict__[CALLS] = self.calls()
        for guard in guards:
            guard.prepare(model)

    def calls(self) -> list[int]:
        return [guard.calls for guard in self.guards]

    def after(self, model: nn.Module, *_) -> None:
        """Runs after each forward of the model."""
        if not (torch.is_grad_enabled() and model.training):
            return
        if not torch.compiler.is_compiling():
            self.check(model)
        elif can_leave_graph():
            outside_of_graph(self.check, model)

    def check(self, model: nn.Module) -> None:
        """Warns once if the logits of the last training forward were plain.

        A head that was not called gives no warning if the model called another fused head.
        """
        before = model.__dict__.get(CALLS) or [-1] * len(self.guards)
        for guard, calls in zip(self.guards, before, strict=True):
            skipped = guard.unfusable is None and calls == guard.calls
            guard.idle = kind_of(model) if skipped else None
        for guard in self.guards:
            if guard.active and (reason := guard.reason()) is not None:
                several = len(self.guards) > 1 and guard.uncalled() is None
                where = f"on the head {guard.name!r}" if several else "here"
                whose = "its" if several else "the"
                warn_once(f"fuse has no effect {where}, and {whose} logits are plain. {reason}")
