"""Weights of heads in memory while a loss is computed: FSDP frees them after a forward."""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor


@contextlib.contextmanager
def in_memory(weight: Tensor, module: torch.nn.Module | None):
    """The head's weight in memory: FSDP frees it after the module's forward."""
    if weight.untyped_storage().size() or not weight.numel() or weight.device.type == "meta":
        yield
    elif hasattr(module, "unshard"):
        module.unshard()  # pyright: ignore
        try:
            yield
        finally:
            module.reshard()  # pyright: ignore
    else:
        raise RuntimeError(
            "weight of a head must still be in memory when its loss is computed, and the module"
            " that shards it has freed it: compute the loss inside that module's forward, shard"
            " the head by itself (fully_shard(head)), or pass reshard_after_forward=False."
        )


@contextlib.contextmanager
def heads_in_memory(heads: Sequence):
    """The weights of all heads, gathered once.

    The number of chunks is that of a rank's own rows: gathered for each, ranks would wait forever.
    """
    with contextlib.ExitStack() as stack:
        for head in heads:
            stack.enter_context(in_memory(head.weight, head.module))
        yield
