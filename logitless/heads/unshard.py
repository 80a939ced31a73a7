"""Brings a head's weight back into memory for a loss, if FSDP has freed the weight."""

import contextlib

import torch
from torch import Tensor

from .quantized import is_freed


@contextlib.contextmanager
def in_memory(weight: Tensor, module: torch.nn.Module | None):
    """Keeps the weight in memory, gathered by `module`, the FSDP module that shards it, if any."""
    if not is_freed(weight) or not weight.numel() or weight.device.type == "meta":
        yield
    elif hasattr(module, "unshard"):
        module.unshard()  # type: ignore
        try:
            yield
        finally:
            module.reshard()  # type: ignore
    else:
        raise RuntimeError(
            "weight of a head must be in memory when the loss is computed, but FSDP has freed the"
            " weight; compute the loss inside the forward of the FSDP module, shard the head"
            " separately (fully_shard(head)), or pass reshard_after_forward=False."
        )
