"""Running a teacher over documents, its logits never materialised, into a store."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..core import call as _call
from ..lazy.fuse import OPTIONS, fuse, lazy_logits, unfuse
from ..losses.sparse_teacher import capture_topk
from . import checks as rules
from .format import Columns, encoded
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
    progress: Callable[[int], None] | None = None,
) -> int:
    """The k most probable tokens after each token of some documents; returns how many it added.

    A batch is a list of documents, each the ids of its tokens; or input_ids (B, T), a document a
    row; or what a Transformers model is called with, where attention_mask says what is padding.
    Documents that the writer has are passed over before the model runs, so that a run that died is
    resumed by running it again. `k` is the writer's unless it is smaller, `head` as in `fuse`;
    `progress` is called with the tokens of each batch, those that were there already too. Logits
    beyond the writer's vocab_size, as padded heads have them, count as -inf.

    Under torchrun each rank gives its own share of the batches:

    >>> with Writer("targets", vocab_size=model.config.vocab_size, k=64) as writer:
    ...     capture(model, share(batches), writer)
    """
    rules.capture(k, writer.header.k)
    added, waiting = 0, None
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), lazy_head(model, head):
            for batch in batches:
                given, there = _inputs(batch)
                wanted, passed = _unknown(given["input_ids"], there, writer)
                if progress is not None and passed:
                    progress(passed)
                found = None
                if len(wanted):
                    part = {name: _rows(t, wanted, len(there)) for name, t in given.items()}
                    found = _run(model, part, there[wanted], writer, k)
                # While the GPU works on this batch, the last one is written.
                added += _written(waiting, writer, progress)
                waiting = found
            added += _written(waiting, writer, progress)
    finally:
        model.train(training)
    return added


def share(
    items: Iterable[Item], rank: int | None = None, world: int | None = None
) -> Iterator[Item]:
    """Every world-th item from the rank-th: of this process, as torchrun numbers them."""
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
    return islice(items, rank, None, world)


@contextlib.contextmanager
def lazy_head(model: nn.Module, name: str | None = None) -> Iterator[None]:
    """The model's head is fused here, if it is not already, and lazy without gradients too."""
    fused = OPTIONS in model.__dict__
    if not fused:
        fuse(model, head=name)
    try:
        with lazy_logits():
            yield
    finally:
        if not fused:
            unfuse(model)


class _Found(NamedTuple):
    """Documents of a batch, and the rows of all of its places, on their way to the host."""

    documents: list[tuple[Tensor, Tensor]]  # tokens, and which of the rows are theirs
    rows: Columns
    arrived: Any  # an event, or None where they are there


def _inputs(batch: Any) -> tuple[dict[str, Any], Tensor]:
    """What the model is called with, and which places of input_ids (B, T) are of documents."""
    if isinstance(batch, Mapping):
        given = {name: t for name, t in batch.items() if name != "labels"}
    elif isinstance(batch, Tensor):
        given = {"input_ids": batch}
    else:
        given = _padded([torch.as_tensor(tokens) for tokens in batch])
    rules.batch(given)
    ids, mask = given["input_ids"], given.get("attention_mask")
    there = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    return given, there.cpu()


def _padded(documents: Sequence[Tensor]) -> dict[str, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    ids = pad(list(documents), batch_first=True)
    mask = pad([torch.ones_like(tokens) for tokens in documents], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}


def _unknown(ids: Tensor, there: Tensor, writer: Writer) -> tuple[list[int], int]:
    """The rows whose documents the writer has not, and how many tokens the others have."""
    wanted, passed = [], 0
    for row, (tokens, kept) in enumerate(zip(ids.cpu(), there, strict=True)):
        tokens = tokens[kept]
        if len(tokens) and tokens not in writer:
            wanted.append(row)
        else:
            passed += len(tokens)
    return wanted, passed


def _rows(t: Any, wanted: list[int], rows: int) -> Any:
    whole = not isinstance(t, Tensor) or t.dim() == 0 or len(t) != rows or len(wanted) == rows
    return t if whole else t[wanted]


def _run(model: nn.Module, given: dict, there: Tensor, writer: Writer, k: int | None) -> _Found:
    """Without waiting for the device: the tokens are read from the batch as it was given."""
    tokens, device = given["input_ids"].cpu(), next(model.parameters()).device
    given = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in given.items()}
    ids = given["input_ids"]
    named = hasattr(model, "get_output_embeddings")  # a model of Transformers
    output = model(**{"use_cache": False, **given}) if named else model(ids)
    logits = getattr(output, "logits", output)
    header = writer.header
    rules.logits_of_batch(logits, ids, header.vocab_size)
    if logits.shape[-1] > header.vocab_size:  # the last rows of a padded head are no tokens
        logits = logits[..., : header.vocab_size]
    targets = capture_topk(logits, k or header.k, temperature=header.temperature)
    rows = encoded(targets.reshape(-1), header, sorted_=True)
    rows = {name: t.to("cpu", non_blocking=True) for name, t in rows.items()}
    arrived = None
    if ids.is_cuda:
        arrived = torch.cuda.Event()
        arrived.record()
    places = torch.arange(there.numel()).view(there.shape)
    documents = [(t[kept], at[kept]) for t, at, kept in zip(tokens, places, there, strict=True)]
    return _Found(documents, rows, arrived)


def _written(found: _Found | None, writer: Writer, progress: Callable | None) -> int:
    if found is None:
        return 0
    if found.arrived is not None:
        found.arrived.synchronize()
    added = 0
    for tokens, places in found.documents:
        if tokens not in writer:  # twice in one batch, or in the one before
            whole = int(places[-1] - places[0]) + 1 == len(places)
            where = slice(int(places[0]), int(places[-1]) + 1) if whole else places
            rows = {name: t[where].clone() for name, t in found.rows.items()}
            rules.rows_of_teacher(rows["top"])
            writer.append(rules.tokens(tokens, writer.header.vocab_size), rows)
            added += 1
        if progress is not None:
            progress(len(tokens))
    return added
