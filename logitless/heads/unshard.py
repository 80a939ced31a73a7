"""A head's weight in memory while a loss is computed, because FSDP frees it after a forward."""

import contextlib

import torch
from torch import Tensor


@contextlib.contextmanager
def in_memory(weight: Tensor, module: torch.nn.Module | None):
    """The weight is in memory in this block. `module` is the module that shards it, if one does."""
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
