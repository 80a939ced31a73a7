"""Runs a teacher on documents and writes its distributions to a store.

The logits are not materialised, and the rows of a batch are written while the model runs the next.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..core import call as _call
from ..lazy.fuse import fuse, guards_of, unfuse
from ..lazy.fused_head import lazy_logits
from ..losses.capture import capture_sampled, capture_topk
from . import checks
from .codes import encoded
from .writer import Writer

Item = TypeVar("Item")


@_call.named()
def capture(
    model: nn.Module,
    batches: Iterable[Any],
    writer: Writer,
    k: int | None = None,
    *,
    head: str | None = None,
    generator: torch.Generator | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Stores a teacher's k most probable next tokens, and returns the number of added documents.

    A batch is a list of documents, each a list of token ids, or a tensor of input_ids (B, T) with
    one document per row, or a dict with the keyword arguments of a Transformers model, where
    attention_mask is 0 for padding. Documents that the writer already has are skipped before the
    model runs, so calling `capture` again resumes a run that was killed.

    `k` is at most the writer's k, its default. `head` has the same meaning as in `fuse`. If the
    head returns more logits than the writer's vocab_size, the rest are ignored. `progress` is
    called after each document with its number of tokens, and once per batch for the skipped ones.
    If the writer has values="counts", its k next tokens are drawn per token, with `generator` on
    the device of the model.

    Under torchrun, each rank captures the part of the batches that the function `share` selects:

    >>> with Writer("targets", vocab_size=model.config.vocab_size, k=64) as writer:
    ...     capture(model, share(batches), writer)
    """
    checks.capture(k, writer.header, generator)
    added, pending = 0, None
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), lazy_head(model, head):
            for batch in batches:
                inputs, is_token = _inputs(batch)
                new, skipped = _new_documents(inputs["input_ids"], is_token, writer)
                if progress is not None and skipped:
                    progress(skipped)
                launched = None
                if len(new):
                    inputs = {name: _rows(t, new, len(is_token)) for name, t in inputs.items()}
                    launched = _launch(model, inputs, is_token[new], writer, k, generator)
                # The previous batch is written while the GPU works on the current batch.
                added += _write(pending, writer, progress)
                pending = launched
            added += _write(pending, writer, progress)
    finally:
        model.train(training)
    return added


def share(
    items: Iterable[Item], rank: int | None = None, world: int | None = None
) -> Iterator[Item]:
    """Yields this rank's share of the items: every `world`-th item, starting at item `rank`.

    By default, `rank` and `world` are the environment variables RANK and WORLD_SIZE, which torchrun
    sets.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
    return islice(items, rank, None, world)


@contextlib.contextmanager
def lazy_head(model: nn.Module, name: str | None = None) -> Iterator[None]:
    """Fuses the model inside the `with` block if needed; its logits are lazy even without grad."""
    fused = any(guards_of(model))
    if not fused:
        fuse(model, head=name)
    try:
        with lazy_logits():
            yield
    finally:
        if not fused:
            unfuse(model)


class _Pending(NamedTuple):
    tokens: Tensor  # (B, T), on the CPU
    is_token: Tensor  # (B, T), False for padding
    rows: Tensor  # (B · T, row_bytes)
    copied: Any  # CUDA event at the end of the copy to the host; None on the CPU


def _inputs(batch: Any) -> tuple[dict[str, Any], Tensor]:
    """The model's keyword arguments, and a mask that is False for padding tokens."""
    if isinstance(batch, Mapping):
        inputs = {name: t for name, t in batch.items() if name != "labels"}
    elif isinstance(batch, Tensor):
        inputs = {"input_ids": batch}
    else:
        if isinstance(batch, (str, bytes)) or not hasattr(batch, "__iter__"):
            rule = "be a list of documents, input_ids (B, T) or the arguments of a model"
            checks.refuse("a batch", rule, type(batch).__name__, TypeError)
        inputs = _padded([checks.one_document(tokens) for tokens in batch])
    checks.batch(inputs)
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    is_token = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    return inputs, is_token.cpu()


def _padded(documents: Sequence[Tensor]) -> dict[str, Tensor]:
    if not documents:
        return {"input_ids": torch.empty(0, 0, dtype=torch.int64)}
    pad = nn.utils.rnn.pad_sequence
    ids = pad(list(documents), batch_first=True)
    mask = pad([torch.ones_like(tokens) for tokens in documents], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}


def _new_documents(ids: Tensor, is_token: Tensor, writer: Writer) -> tuple[list[int], int]:
    """The batch rows to capture, and the number of tokens to skip."""
    new, skipped = [], 0
    for row, (tokens, kept) in enumerate(zip(ids.cpu(), is_token, strict=True)):
        tokens = tokens[kept]
        if len(tokens) and tokens not in writer:
            new.append(row)
        else:
            skipped += len(tokens)
    return new, skipped


def _rows(t: Any, wanted: list[int], rows: int) -> Any:
    """Selects batch rows of one keyword argument, if it has a batch dimension."""
    whole = not isinstance(t, Tensor) or t.dim() == 0 or len(t) != rows or len(wanted) == rows
    return t if whole else t[wanted]


def _launch(
    model: nn.Module,
    inputs: dict,
    is_token: Tensor,
    writer: Writer,
    k: int | None,
    generator: torch.Generator | None,
) -> _Pending:
    """Starts the model on a batch without waiting for the device.

    The tokens stay on the CPU too, so that they need not be copied back.
    """
    tokens, device = inputs["input_ids"].cpu(), next(model.parameters()).device
    inputs = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in inputs.items()}
    ids = inputs["input_ids"]
    of_transformers = hasattr(model, "get_output_embeddings")
    output = model(**{"use_cache": False, **inputs}) if of_transformers else model(ids)
    logits = getattr(output, "logits", output)
    header = writer.header
    checks.logits_of_batch(logits, ids, header.vocab_size)
    if logits.shape[-1] > header.vocab_size:  # the last columns are padding
        logits = logits[..., : header.vocab_size]
    if header.sampled:
        how = {"generator": generator, "temperature": header.temperature}
        targets = capture_sampled(logits, header.k, **how)
    else:
        targets = capture_topk(logits, k or header.k, temperature=header.temperature)
    rows = encoded(targets.reshape(-1), header, sorted_=True).to("cpu", non_blocking=True)
    copied = None
    if ids.is_cuda:
        copied = torch.cuda.Event()
        copied.record()
    return _Pending(tokens, is_token, rows, copied)


def _write(pending: _Pending | None, writer: Writer, progress: Callable | None) -> int:
    if pending is None:
        return 0
    if pending.copied is not None:
        pending.copied.synchronize()
    header, kept = writer.header, pending.is_token
    rows = pending.rows if bool(kept.all()) else pending.rows[kept.flatten()]
    checks.rows_of_teacher(header.field(rows, "draws" if header.sampled else "top"))
    lengths = kept.sum(-1).tolist()
    # `_new_documents` removes only documents that the writer has, so one may still occur twice in
    # this batch, or in this batch and the previous one; `append` adds it once.
    tokens = checks.tokens(pending.tokens[kept], header.vocab_size)
    added = writer.append(tokens, rows, list(accumulate(lengths, initial=0)))
    if progress is not None:
        for n in lengths:
            progress(n)
    return added
