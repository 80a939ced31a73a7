"""The rules of a model that `fuse` takes; the wording of errors is that of core/checks.py."""

from typing import Any

from torch import nn


def has_head(head: Any, model: Any) -> None:
    if head is None:
        raise ValueError(
            f"head must be named for {type(model).__name__}, which has no output embeddings: pass"
            " head=, a module or its name."
        )


def options_of_fuse(options: dict) -> None:
    if "main_grad" in options:
        raise TypeError("options must not name main_grad, which belongs to one weight; got one.")


def part_of_model(head: Any, names: list[str]) -> None:
    if not names:
        raise ValueError(f"head must be a module of the model, got another {type(head).__name__}.")


def fusable(head: Any, fused: bool) -> None:
    """A linear layer whose forward is PyTorch's own, of a floating-point weight."""
    kind = type(head)
    own = isinstance(head, nn.Linear) and (
        kind.forward is nn.Linear.forward or hasattr(kind, "unshard")
    )
    if not own:
        raise TypeError(
            f"head must be an nn.Linear with its own forward, got {kind.__module__}"
            f".{kind.__qualname__}: what it computes cannot be known."
        )
    if "forward" in head.__dict__ and not fused:
        raise TypeError("head must not have a forward set on it by another wrapper, got one.")
    if not head.weight.is_floating_point():
        raise TypeError(f"head must have a floating-point weight, got {head.weight.dtype}.")
