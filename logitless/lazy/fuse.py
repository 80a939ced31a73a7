"""`fuse(model)` lets a model with a linear head run without materialising the logits.

Only the head's forward is replaced (fused_head.py). The state of each fused head is kept in
model_hooks.py. For example, model_hooks.py records whether a forward of the model called the head.
The head returns LazyLogits (logits.py). The model itself, a Trainer or a training loop computes the
loss from the LazyLogits. In inference, logits of at most 32 MiB are plain tensors.
"""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from torch import nn

from ..core.call import named
from . import checks
from .checks import has_forward, kind_of
from .fused_head import remove_forward
from .linear_logits import LinearLogits
from .model_hooks import CALLS, GUARD, HOOKS, Guard, Hooks, head_of, mark, named_head, remove_hooks
from .report import HEAD

Model = TypeVar("Model", bound=nn.Module)
Heads = nn.Module | str | Sequence[nn.Module | str]


@named(LinearLogits.__init__)
def fuse(
    model: Model,
    *,
    head: Heads | None = None,
    lazy_inference: bool = True,
    **options,
) -> Model:
    """Changes the model's head to return lazy logits, and returns the same model.

    `head` is a module of the model, or the module's name. By default, the head is the model's
    output embeddings, which every causal language model of Transformers has. For a model with
    several heads, `head` is a list of modules and names. An nn.ModuleList or nn.ModuleDict stands
    for all modules that it contains. `options` are options of LinearLogits. Without gradients, as
    in evaluation and sampling, logits of at most 32 MiB are plain tensors, and larger logits are
    lazy. If `lazy_inference` is false, all logits without gradients are plain tensors. Calling
    `fuse` again replaces the heads and the options of the earlier call. `unfuse` undoes `fuse`, and
    `is_fused` returns whether `fuse` has an effect. `report` returns the operations that
    materialised lazy logits. With the environment variable LOGITLESS_FUSE=0, `fuse` checks its
    arguments and leaves the model unchanged.

    >>> model = fuse(AutoModelForCausalLM.from_pretrained(...))
    >>> model(input_ids=ids, labels=ids).loss.backward()
    """
    checks.options_of_fuse({**options, "lazy_inference": lazy_inference})
    checks.is_head(head)
    given = [head] if head is None or isinstance(head, (str, nn.Module)) else list(head)
    names = [name for each in given for name in names_of(model, each)]
    checks.some_heads(names, head)
    found: dict[nn.Module, str | None] = {}  # a module that is given twice counts as one head
    for name in names:
        found.setdefault(head_of(model, name), name)  # raises if the head cannot be fused
    unfuse(model)
    if switched_off():
        return model
    guards = [Guard(name, options, lazy_inference) for name in found.values()]
    for guard, module in zip(guards, found, strict=True):
        guard.group = guards
        for each in between(model, module):
            mark(each, guard)
        guard.set_on(module)
    hooks = Hooks(guards)
    model.__dict__[HOOKS] = (
        model.register_forward_pre_hook(hooks.before),
        model.register_forward_hook(hooks.after),
    )
    return model


def unfuse(model: Model) -> Model:
    """Undoes `fuse`, even if `fuse` was called on a part or on a wrapper of the model.

    If `model` is a part of the fused model, only the heads in this part are changed back.
    """
    for module in model.modules():
        for guard in module.__dict__.pop(GUARD, ()):
            guard.active = False
        module.__dict__.pop(CALLS, None)
        module.__dict__.pop(HEAD, None)
        remove_hooks(module)
        remove_forward(module)
    return model


def switched_off() -> bool:
    """Returns whether the environment variable LOGITLESS_FUSE switches `fuse` off."""
    value = os.environ.get("LOGITLESS_FUSE", "1")
    checks.switch("LOGITLESS_FUSE", value)
    return value == "0"


class Fused(NamedTuple):
    """Whether `fuse` has an effect on a model, and the reason."""

    acts: bool
    reason: str

    def __bool__(self) -> bool:
        return self.acts

    def __str__(self) -> str:
        return self.reason


def is_fused(model: nn.Module) -> Fused:
    """Returns whether `fuse` has an effect on the model now, and the reason.

    `fuse` has an effect if the head returns lazy logits in training. Some trainers multiply by the
    head's weight themselves, and never call the head. So the result is false if the last training
    forward did not call the head. `model` can also be a wrapper of the fused model, or a part of
    the fused model that contains the head.

    >>> found = is_fused(model)
    >>> assert found, found.reason
    """
    guards = list(dict.fromkeys(guards_of(model)))
    if not guards:
        if switched_off():
            return Fused(False, "LOGITLESS_FUSE=0 switches fuse off.")
        return Fused(False, f"fuse was not called on this {kind_of(model)}, or was undone.")
    for module in model.modules():
        if HOOKS in module.__dict__:
            for guard in module.__dict__.get(GUARD, ()):
                if guard.active:
                    guard.find(module)
    found = next(filter(None, (guard.reason() for guard in guards)), None)
    if found is not None:
        return Fused(False, found)
    always = all(guard.lazy_inference for guard in guards)
    which = "The head returns" if len(guards) == 1 else "The heads return"
    said = f"{which} lazy logits" + ("." if always else " if gradients are wanted.")
    idle = ", ".join(repr(guard.name) for guard in guards if guard.idle is not None)
    return Fused(True, said + (f" The last training forward did not call {idle}." if idle else ""))


def guards_of(model: nn.Module) -> Iterator[Guard]:
    """The active guards (class Guard) of a model and of the modules inside the model."""
    guards = (guard for module in model.modules() for guard in module.__dict__.get(GUARD, ()))
    return (guard for guard in guards if guard.active)


def names_of(model: nn.Module, head: nn.Module | str | None) -> Iterator[str | None]:
    """Yields the names of all modules in `head`. The name None stands for the output embeddings."""
    module = head if isinstance(head, nn.Module) else named_head(model, head)
    listed = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_forward(module)
    if isinstance(head, nn.Module) or (listed and head is None):
        names = [name for name, each in model.named_modules() if each is module]
        checks.part_of_model(module, names)
        head = names[0]
    if not listed:
        yield head
        return
    for key in module._modules:
        yield from names_of(model, f"{head}.{key}" if head else key)


def between(model: nn.Module, head: nn.Module) -> list[nn.Module]:
    """The model, its head, and all modules of the model that contain the head."""
    name = next((name for name, module in model.named_modules() if module is head), "")
    parts = name.split(".") if name else []
    return [model, *(model.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts)))]
