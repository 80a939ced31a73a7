"""Checks the arguments of `fuse`. Error messages have the same form as in core/tensor_checks.py."""

from typing import Any

from torch import nn

from ..core import option_checks


def kind_of(x: Any) -> str:
    return type(x).__name__


def name_of(x: Any) -> str:
    """The class name of a module or tensor, with the Python module that defines the class."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def has_forward(module: nn.Module) -> bool:
    """Whether the class of a module has a forward. For example, nn.ModuleList has no forward."""
    return type(module).forward is not nn.Module.forward


def has_head(head: Any, model: Any) -> None:
    if head is None:
        raise ValueError(
            f"head must be given for {kind_of(model)}, which has no output embeddings: pass"
            " head=, a module or its name."
        )


def options_of_fuse(given: dict) -> None:
    if "main_grad" in given:
        raise TypeError(
            "options must not include main_grad, because main_grad belongs to a single weight."
        )
    if "low_rank" in given:
        raise TypeError(
            "options must not include low_rank, because low_rank belongs to one batch; fuse finds"
            " the adapters of a head itself."
        )
    option_checks.check(**given)


def is_head(head: Any) -> None:
    if head is None or isinstance(head, (str, nn.Module)):
        return
    if not isinstance(head, (list, tuple)):
        raise TypeError(
            "head must be a module of the model, the name of such a module, or a list of modules"
            f" and names, got {head!r}."
        )
    for i, each in enumerate(head):
        if not isinstance(each, (str, nn.Module)):
            raise TypeError(
                f"head[{i}] must be a module of the model or the module's name, got {each!r}."
            )


def some_heads(names: list, head: Any) -> None:
    if not names:
        got = f"an empty {kind_of(head)}" if isinstance(head, nn.Module) else repr(head)
        raise ValueError(f"head must contain at least one module, got {got}.")


def part_of_model(head: Any, names: list[str]) -> None:
    if not names:
        raise ValueError(
            f"head must be a module of the model, got a {kind_of(head)} that is not in the model."
        )


def fusable(head: Any) -> None:
    """Checks that the head is a linear layer, or wraps one."""
    layers = [m for m in head.modules() if isinstance(m, nn.Linear)]
    if not layers or not has_forward(head):
        raise TypeError(
            f"head must be a linear layer or a wrapper of one, got {name_of(head)}: pass head=, the"
            " layer that computes the logits."
        )
    for module in head.modules():
        sharded_by_fsdp1(module)


def kept_in_memory(model: nn.Module, name: str) -> None:
    """Raises if FSDP1 shards a module that is inside the model and contains the head."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        sharded_by_fsdp1(model.get_submodule(".".join(parts[:i])))


def sharded_by_fsdp1(module: nn.Module) -> None:
    if "_fsdp_wrapped_module" in module._modules:
        raise TypeError(
            "head must not be inside a FullyShardedDataParallel of its own, because the inner"
            " FullyShardedDataParallel frees the weight before the loss is computed. Exclude the"
            " head from auto_wrap_policy, so that the outermost FullyShardedDataParallel holds the"
            " head, or use fully_shard."
        )
