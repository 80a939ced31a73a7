"""z at K ids a row and nothing else: what a loss over the ids alone reads of its logits.

The gradient is zeros but for the ids, where what repeated ids bring is added before it is rounded.
"""

import torch
from torch import Tensor

from . import _checks
from ._dispatch import backend
from ._node import is_lent, is_watched, node, refuse_twice


def pick(
    logits: Tensor,  # (..., V)
    ids: Tensor,  # (..., K)
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """z[ids], (..., K), in fp32 (fp64 for fp64); NaN for an id outside [0, V)."""
    _checks.temperature(temperature, logits)
    _checks.softcap(softcap)
    y = _picked(logits, ids, None if softcap is None else float(softcap))
    if isinstance(temperature, Tensor):
        return y / temperature.to(y.dtype).expand(y.shape[:-1]).unsqueeze(-1)
    return y if temperature == 1 else y / temperature


def _pick(x, ids, softcap):
    _checks.ids_in_range(ids, x.shape[-1], None, several=True)
    return backend(x).pick(x, ids, softcap)


def _pick_bwd(x, *args, **how):
    return backend(x).pick_bwd(x, *args, **how)


def _save(ctx, inputs, output):
    x, ids, ctx.softcap = inputs
    ctx.save_for_backward(x, ids, output)


def _backward(ctx, saved, d_y):
    x, ids, y = saved
    if is_watched():
        return torch.ops.logitless.pick_bwd(x, ids, y, ctx.softcap, d_y), None, None
    return _pick_bwd(x, ids, y, ctx.softcap, d_y, inplace=is_lent(x)), None, None


_library = torch.library.Library("logitless", "FRAGMENT")
_library.define(
    "pick(Tensor x, Tensor ids, float? softcap) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.define(
    "pick_bwd(Tensor x, Tensor ids, Tensor y, float? softcap, Tensor d_y) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _pick_fake(x, ids, softcap):
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(ids.shape, dtype=dtype)


def _pick_bwd_fake(x, ids, y, softcap, d_y):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("pick", _pick, "CompositeExplicitAutograd")
_library.impl("pick_bwd", _pick_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("logitless::pick", _pick_fake, lib=_library)
torch.library.register_fake("logitless::pick_bwd", _pick_bwd_fake, lib=_library)
_picked = node("pick", _library, _pick, _save, _backward)
refuse_twice("pick_bwd", _library)
