"""Checks that all ranks make the same call, with LOGITLESS_CHECK=1.

Before a collective, the ranks exchange a text that describes the public call, or the error of
invalid arguments. If the texts differ, all ranks raise, instead of waiting for a collective that
another rank never starts.
"""

import zlib
from typing import Any

import torch
from torch import Tensor

from ..core.capture import Capture
from ..core.loss import RowLoss
from ..core.source import is_dense, is_source


def text_of_shard(source: Any, start: Any, vocab: Any, sequence_parallel: bool) -> str:
    """Describes a VocabShard by what must be equal on all ranks.

    The width and the value of `start` can differ, but not whether `start` is given.
    """
    options = {"start": start is not None, "vocab": vocab, "sequence_parallel": sequence_parallel}
    return f"VocabShard of {_of_source(source)}, {options}"


def text_of_loss(shard, loss: RowLoss, reduction: str, row_weight: Tensor | None) -> str:
    fields = {name: _of_option(value) for name, value in vars(loss).items() if name != "reading"}
    numbers = [value for value in loss.reading if not isinstance(value, Tensor)]
    options = (*numbers, reduction, fields, torch.is_grad_enabled())
    tensors = [_of_tensor(t) for t in (*_tensors_of(loss), row_weight)]
    return f"{type(loss).__name__} of {_of_logits(shard)}, tensors {tensors}, options {options}"


def text_of_capture(shard, capture: Capture, temperature: float, softcap: float | None) -> str:
    options = (*capture.options, temperature, softcap)
    return f"{capture.name} of {_of_logits(shard)}, options {options}"


def _of_logits(shard) -> str:
    return f"{_of_source(shard.source)} {(*shard.shape, str(shard.dtype))}"


def _tensors_of(loss: RowLoss) -> list:
    tensors = []
    for name in loss.structs:
        struct = getattr(loss, name)
        tensors += [getattr(struct, field) for field, _ in struct.TENSORS]
    return [*tensors, *loss.row_inputs]


def _of_source(source: Any) -> str:
    if is_dense(source):
        return f"logits {(*source.shape[:-1], str(source.dtype))}"
    return source.describe() if is_source(source) else f"a {type(source).__name__}"


def _of_option(value: Any) -> Any:
    # formulas by name
    if isinstance(value, tuple):
        return [_of_option(one) for one in value]
    plain = isinstance(value, (str, int, float))
    return value if plain else getattr(value, "__qualname__", None)


def _of_tensor(t: Any) -> Any:
    """Shape, dtype and a checksum of a tensor; the type of a teacher that is a shard or a head."""
    if not isinstance(t, Tensor):
        return None if t is None else type(t).__name__
    values = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return (*t.shape, str(t.dtype), zlib.crc32(values.numpy().tobytes()))
