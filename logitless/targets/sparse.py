"""SparseTargets: a teacher's K ids per row, which can be saved, batched and indexed."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from . import safetensors, sparse_checks

FORMAT, VERSION = "logitless.SparseTargets", "1"  # stored in the metadata of a file
_NAMES = ("ids", "logprobs", "tail", "mask")


@dataclass(frozen=True, eq=False, repr=False)
class SparseTargets:
    """A teacher's distribution per row: K ids, their log-probabilities, and the mass of other ids.

    `ids` (..., K) is int32 or int64. `logprobs` (..., K) holds the teacher's log-probabilities of
    these ids, at the teacher's temperature. `tail` (...) is the log of the mass outside the ids, or
    None if unknown. Slots, the K positions of a row, are ignored where `mask` (..., K) is False or
    0. An id can be in several slots of a row, and every slot adds its own term to a loss.

    A ValueError is raised on a CPU, or with LOGITLESS_CHECK=1, if the probabilities of a row add up
    to more than 1, by more than the rounding error 2⁻⁸ (1 + log(K + 1)). Here, a repeated id counts
    once, with its largest probability.

    Indexing selects rows: targets[:, 1:] drops the first position of each sequence.

    >>> targets = capture_topk(teacher_logits, 64)
    >>> loss = topk_distill(logits, targets, divergence="forward_kl", support="tail")
    """

    ids: Tensor
    logprobs: Tensor
    tail: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self):
        sparse_checks.tensors(self.ids, self.logprobs, self.tail, self.mask)
        sparse_checks.mass(self.ids, self.logprobs, self.tail, self.mask)

    @property
    def shape(self) -> torch.Size:
        """The shape of the rows, without the dimension of the K ids."""
        return self.ids.shape[:-1]

    @property
    def k(self) -> int:
        return self.ids.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> "SparseTargets":
        """Moves the targets to a device, converts `logprobs` and `tail` to a dtype, or both.

        >>> targets.to("cuda", torch.float16)
        """
        if isinstance(device, torch.dtype) and dtype is None:
            device, dtype = None, device
        if dtype is not None:
            sparse_checks.float_dtype(dtype)
        ids, logprobs, tail, mask = _tensors(self)
        return unchecked(
            *(None if t is None else t.to(device, kind, non_blocking=non_blocking)
              for t, kind in ((ids, None), (logprobs, dtype), (tail, dtype), (mask, None)))
        )  # fmt: skip

    def pin_memory(self) -> "SparseTargets":
        return self._map(lambda t: t.pin_memory())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("targets must have a dimension of rows for len(), got a single row.")
        return self.shape[0]

    def __getitem__(self, rows) -> "SparseTargets":
        """Selects rows. An index over the K ids of a row raises an IndexError."""
        index = sparse_checks.row_index(rows, self.ids)
        return self._map(lambda t: t[index])

    def reshape(self, *rows: int | Sequence[int]) -> "SparseTargets":
        """Returns the same rows in another shape, given as one tuple or as several sizes."""
        shape: Any = rows[0] if len(rows) == 1 and isinstance(rows[0], Sequence) else rows
        lead = len(self.shape)
        return self._map(lambda t: t.reshape((*shape, *t.shape[lead:])))

    @staticmethod
    def cat(targets: Sequence["SparseTargets"], dim: int = 0) -> "SparseTargets":
        """Concatenates the rows of several targets along a dimension of rows.

        Targets with fewer slots per row are padded to the largest K with masked slots, of id 0 and
        log-probability -inf. The result has a mask if one of the targets has a mask or is padded.
        Dtypes are promoted as in torch.cat. Either all targets or none must have a tail.
        """
        sparse_checks.joined(targets, SparseTargets)
        dim = sparse_checks.row_dim(dim, len(targets[0].shape))
        sparse_checks.same_rows(targets, except_dim=dim)
        return _join(targets, lambda tensors: torch.cat(tensors, dim))

    @staticmethod
    def stack(targets: Sequence["SparseTargets"], dim: int = 0) -> "SparseTargets":
        """Stacks several targets along a new dimension of rows, padded as in `cat`.

        `default_collate`, the default `collate_fn` of a DataLoader, calls it.
        """
        sparse_checks.joined(targets, SparseTargets)
        dim = sparse_checks.row_dim(dim, len(targets[0].shape) + 1)
        sparse_checks.same_rows(targets, except_dim=None)
        return _join(targets, lambda tensors: torch.stack(tensors, dim))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the targets to a safetensors file, which contains no code."""
        safetensors.write(path, _present(self), {"format": FORMAT, "version": VERSION})

    @staticmethod
    def load(path: str | os.PathLike) -> "SparseTargets":
        """Reads a file of `save` to the CPU. A file of another format raises a ValueError."""
        header = safetensors.read_header(path)
        sparse_checks.saved(path, header, FORMAT, VERSION)
        return SparseTargets(**safetensors.read(path, header))

    def __repr__(self) -> str:
        text = ", ".join(f"{k}={_text(t)}" for k, t in zip(_NAMES, _tensors(self), strict=True))
        return f"SparseTargets({text}, device={getattr(self.ids, 'device', None)})"

    def __reduce__(self):
        return SparseTargets, _tensors(self)

    def _map(self, f: Callable[[Tensor], Tensor]) -> "SparseTargets":
        return unchecked(*(None if t is None else f(t) for t in _tensors(self)))


def _tensors(targets: SparseTargets) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return targets.ids, targets.logprobs, targets.tail, targets.mask


def _present(targets: SparseTargets) -> dict[str, Tensor]:
    return {k: t for k, t in zip(_NAMES, _tensors(targets), strict=True) if t is not None}


def unchecked(ids, logprobs, tail=None, mask=None) -> SparseTargets:
    """Without checks, from valid tensors, or from leaves of a pytree."""
    targets = object.__new__(SparseTargets)
    for name, t in zip(_NAMES, (ids, logprobs, tail, mask), strict=True):
        # The dataclass is frozen. Older versions of Dynamo can trace this call too.
        object.__setattr__(targets, name, t)
    return targets


def _text(t) -> str:
    if not isinstance(t, Tensor):
        return repr(t)
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"


def _join(targets: Sequence[SparseTargets], join: Callable) -> SparseTargets:
    k = max(t.k for t in targets)
    masked = any(t.mask is not None or t.k < k for t in targets)
    groups = zip(*(_padded(t, k, masked) for t in targets), strict=True)
    return unchecked(*(None if group[0] is None else join(group) for group in groups))


def _padded(targets: SparseTargets, k: int, masked: bool) -> tuple:
    """Pads the tensors to k slots, with a mask if `masked`."""
    ids, logprobs, tail, mask = _tensors(targets)
    if masked:
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    missing = k - ids.shape[-1]
    if missing:
        pad = torch.nn.functional.pad
        logprobs = pad(logprobs, (0, missing), value=-torch.inf)
        ids, mask = pad(ids, (0, missing)), pad(mask, (0, missing))
    return ids, logprobs, tail, mask


def _collate(batch: Sequence[SparseTargets], *, collate_fn_map=None) -> SparseTargets:
    return SparseTargets.stack(batch)


# Pickles name the module "logitless", so they can be loaded after the class moves to another file.
SparseTargets.__module__ = "logitless"
torch.serialization.add_safe_globals([SparseTargets])
default_collate_fn_map[SparseTargets] = _collate
pytree.register_pytree_node(
    SparseTargets,  # the leaves of this pytree are the tensors that are not None
    lambda targets: (list(_present(targets).values()), tuple(_present(targets))),
    lambda tensors, names: unchecked(**dict(zip(names, tensors, strict=True))),
)
