"""The host's side of a row: any logits as (B, T, V) rows with unit stride, and where they start."""

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

_HERE = contextlib.nullcontext()


class Rows(NamedTuple):
    """Logits as kernels see them: row r at r // rows_t · stride_b + r % rows_t · stride_t."""

    x: Tensor  # (B, T, V), unit stride in V
    count: int
    rows_t: int
    stride_b: int
    stride_t: int
    lead: int  # elements from the 16-byte boundary before the base to the base
    pack: int  # elements in 16 bytes
    aligned: bool  # every row starts and ends on a 16-byte boundary

    def in_step_with(self, other: "Rows") -> bool:
        """Whether every row starts as far from a 16-byte boundary as the other's."""
        return not (
            (self.lead - other.lead) % self.pack
            or (self.stride_b - other.stride_b) % self.pack
            or (self.stride_t - other.stride_t) % self.pack
        )


def rows_of(x: Tensor) -> Rows:
    """View (..., V) as rows without copying where strides allow (shifted logits[:, :-1] do)."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    view = _collapse(x)
    if view is None:
        view = x.contiguous().view(1, -1, x.shape[-1])
    return _describe(view)


def rows_like(x: Tensor, rows: Rows) -> Rows:
    """A contiguous tensor with the rows of another, numbered alike."""
    return _describe(x.view(-1, rows.rows_t, x.shape[-1]))


def _describe(view: Tensor) -> Rows:
    batches, rows_t, vocab = view.shape
    stride_b, stride_t, _ = view.stride()
    pack = 16 // view.element_size()
    lead = view.data_ptr() % 16 // view.element_size()
    aligned = not (lead or vocab % pack or stride_t % pack or stride_b % pack)
    return Rows(view, batches * rows_t, rows_t, stride_b, stride_t, lead, pack, aligned)


def _collapse(x: Tensor) -> Tensor | None:
    """(..., V) as a (B, T, V) view, or None where the strides forbid it."""
    if x.dim() <= 3:
        return x.reshape(1, 1, -1) if x.dim() == 1 else x.unsqueeze(0) if x.dim() == 2 else x
    for cut in range(x.dim() - 1):
        with contextlib.suppress(RuntimeError):  # these dims do not collapse
            return x.view(x.shape[:cut].numel(), -1, x.shape[-1])
    return None


def on_device(x: Tensor):
    """Launch on the tensor's own GPU, not the current one."""
    if x.device.type == "cpu" or x.device.index == torch.accelerator.current_device_index():
        return _HERE
    return torch.get_device_module(x.device).device(x.device)
