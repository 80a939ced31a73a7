"""LOGITLESS_CHECK=1 over ranks: raises on every rank unless all make the same call.

Before a collective of ours, each rank says in words what it is about to do. Where their words
differ all raise, and none waits for a collective that another rank does not begin. A rank whose
arguments are refused says that instead, and the others raise too.
"""

import contextlib
import zlib
from typing import Any

import torch
from torch import Tensor

from ..core.later import later
from ..core.loss import RowLoss
from . import checks as _rules


def agree(ranks, words: str) -> None:
    """Raise on all ranks unless all say the same."""
    own = torch.tensor(list(words.encode()), device=ranks.device)
    sizes = ranks.gather(own.new_tensor([len(own)])).flatten().tolist()
    room = own.new_zeros(max(sizes))
    room[: len(own)] = own
    pairs = zip(ranks.gather(room).tolist(), sizes, strict=True)
    _rules.same_call([bytes(one[:size]).decode() for one, size in pairs])


def refuse(ranks, error: Exception) -> None:
    """Tell the other ranks of an error that this one raises before it comes to `agree`."""
    with contextlib.suppress(ValueError):  # which the others raise; here the error itself is
        agree(ranks, f"{type(error).__name__}: {error}")


def refuse_logits(logits: Any, error: Exception) -> None:
    """The same, to the ranks that share these logits, if any do."""
    recipe = getattr(logits, "recipe", None)  # of lazy logits, which may be those of all ranks
    ranks = getattr(logits if recipe is None else recipe.shard, "ranks", None)
    if ranks is not None:
        refuse(ranks, error)


def of_shard(source: Any, start: Any, vocab: Any, sequence_parallel: bool) -> str:
    """Widths and starts may differ between ranks; whether a start is given may not."""
    options = {"start": start is not None, "vocab": vocab, "sequence_parallel": sequence_parallel}
    return f"VocabShard of {_of_source(source)}, {options}"


def of_loss(shard, loss: RowLoss, reduction: str, row_weight: Tensor | None) -> str:
    options = {name: _of_option(value) for name, value in vars(loss).items() if name != "reading"}
    numbers = [value for value in loss.reading if not isinstance(value, Tensor)]
    how = (*numbers, reduction, options, torch.is_grad_enabled())
    given = [_of_tensor(t) for t in (*loss.tensors, row_weight)]
    return f"{type(loss).__name__} of {_of_logits(shard)}, tensors {given}, options {how}"


def of_topk(shard, k: int, temperature: float, softcap: float | None) -> str:
    return f"capture_topk of {_of_logits(shard)}, options {(k, temperature, softcap)}"


def _of_logits(shard) -> str:
    return f"{_of_source(shard.source)} {(*shard.shape, str(shard.dtype))}"


def _of_source(source: Any) -> str:
    if isinstance(source, Tensor):
        return f"logits {(*source.shape[:-1], str(source.dtype))}"
    if not hasattr(source, "evaluate"):
        return f"a {type(source).__name__}"
    recipe = getattr(source, "recipe", None)
    if recipe is not None:
        kind, hidden, needs, how = "lazy logits", recipe.hidden, recipe.needs, recipe.how
    else:
        kind, hidden = "a head", source.hidden
        needs = tuple(t is not None and t.requires_grad for t in source.inputs)
        how = (source.workspace, source.logits_dtype, source.accumulate, source.drop_ignored)
    return f"{kind} of hidden {(*hidden.shape, str(hidden.dtype))}, {needs}, {how}"


def _of_option(value: Any) -> Any:
    """Of a number or a name itself, of a formula its name, of several the same."""
    if isinstance(value, tuple):
        return [_of_option(one) for one in value]
    known = isinstance(value, (str, int, float))
    return value if known else getattr(value, "__qualname__", None)


def _of_tensor(t: Any) -> Any:
    """Shape, dtype and a number that tells its values; nothing of a teacher in ranks' columns."""
    if not isinstance(t, Tensor):
        return None if t is None else type(t).__name__
    values = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return (*t.shape, str(t.dtype), zlib.crc32(values.numpy().tobytes()))


later.refuse_on_ranks = refuse_logits
