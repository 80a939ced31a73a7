"""SparseTargets: what a teacher says of each row, to be captured once, kept, batched and used."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from . import checks
from . import safetensors as _safetensors

FORMAT, VERSION = "logitless.SparseTargets", "1"  # of a file
_NAMES = ("ids", "logprobs", "tail", "mask")


@dataclass(frozen=True, eq=False, repr=False)
class SparseTargets:
    """What a teacher says of each row: K ids, their log-probabilities, the log mass of the rest.

    ids (..., K) int32 or int64; logprobs (..., K) as the teacher gave them, at its temperature;
    tail (...) the log mass outside the ids, where known; mask (..., K) True, or 1, for the slots
    that count. Ids may repeat: each slot is compared for itself, and their terms add up.

    On a CPU, or with LOGITLESS_CHECK=1, a row whose probabilities come to more than 1 raises; an
    id that repeats is counted once for that, with the largest of its probabilities. Rounding is
    allowed for, 2⁻⁸ (1 + log(K + 1)) of it.

    Indexed like its rows: targets[:, 1:] drops the first position of each sequence.

    >>> targets = capture_topk(teacher_logits, 64)
    >>> loss = topk_distill(logits, targets, divergence="forward_kl", support="tail")
    """

    ids: Tensor
    logprobs: Tensor
    tail: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self):
        checks.tensors(self.ids, self.logprobs, self.tail, self.mask)
        checks.mass(self.ids, self.logprobs, self.tail, self.mask)

    @property
    def shape(self) -> torch.Size:
        """Of the rows, (...)."""
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
        """On another device, with logprobs and tail in another dtype, or both.

        >>> targets.to("cuda", torch.float16)
        """
        if isinstance(device, torch.dtype) and dtype is None:
            device, dtype = None, device
        if dtype is not None:
            checks.float_dtype(dtype)
        ids, logprobs, tail, mask = _parts(self)
        return unchecked(
            *(None if t is None else t.to(device, kind, non_blocking=non_blocking)
              for t, kind in ((ids, None), (logprobs, dtype), (tail, dtype), (mask, None)))
        )  # fmt: skip

    def pin_memory(self) -> "SparseTargets":
        return self._each(lambda t: t.pin_memory())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of SparseTargets of a single row, which has no dimensions")
        return self.shape[0]

    def __getitem__(self, rows) -> "SparseTargets":
        """Of some rows; the slots stay together."""
        index = checks.row_index(rows, self.ids)
        return self._each(lambda t: t[index])

    def reshape(self, *rows: int | Sequence[int]) -> "SparseTargets":
        """The same rows in another shape, (2, -1) or 2, -1."""
        shape: Any = rows[0] if len(rows) == 1 and isinstance(rows[0], Sequence) else rows
        lead = len(self.shape)
        return self._each(lambda t: t.reshape((*shape, *t.shape[lead:])))

    @staticmethod
    def cat(targets: Sequence["SparseTargets"], dim: int = 0) -> "SparseTargets":
        """The rows of several, one after the other along a dimension of rows.

        Rows of fewer slots are filled up at the end to the largest K, with slots that are masked:
        id 0, log-probability -inf. There is a mask where one of them has one, or was filled up.
        Dtypes are promoted as torch.cat does. Either all have a tail, or none.
        """
        checks.joined(targets, SparseTargets)
        dim = checks.row_dim(dim, len(targets[0].shape))
        checks.same_rows(targets, but=dim)
        return _join(targets, lambda parts: torch.cat(parts, dim))

    @staticmethod
    def stack(targets: Sequence["SparseTargets"], dim: int = 0) -> "SparseTargets":
        """The rows of several along a new dimension, filled up as `cat` does.

        A DataLoader's default_collate does this to the targets of its samples.
        """
        checks.joined(targets, SparseTargets)
        dim = checks.row_dim(dim, len(targets[0].shape) + 1)
        checks.same_rows(targets, but=None)
        return _join(targets, lambda parts: torch.stack(parts, dim))

    def save(self, path: str | os.PathLike) -> None:
        """Into a file in the safetensors format, which holds no code."""
        _safetensors.write(path, _present(self), {"format": FORMAT, "version": VERSION})

    @staticmethod
    def load(path: str | os.PathLike) -> "SparseTargets":
        """What `save` wrote, on the CPU; any other file is refused."""
        header = _safetensors.read_header(path)
        checks.saved(path, header, FORMAT, VERSION)
        return SparseTargets(**_safetensors.read(path, header))

    def __repr__(self) -> str:
        told = ", ".join(f"{k}={_told(t)}" for k, t in zip(_NAMES, _parts(self), strict=True))
        return f"SparseTargets({told}, device={getattr(self.ids, 'device', None)})"

    def __reduce__(self):
        return SparseTargets, _parts(self)

    def _each(self, f: Callable[[Tensor], Tensor]) -> "SparseTargets":
        return unchecked(*(None if t is None else f(t) for t in _parts(self)))


def _parts(targets: SparseTargets) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return targets.ids, targets.logprobs, targets.tail, targets.mask


def _present(targets: SparseTargets) -> dict[str, Tensor]:
    return {k: t for k, t in zip(_NAMES, _parts(targets), strict=True) if t is not None}


def unchecked(ids, logprobs, tail=None, mask=None) -> SparseTargets:
    """Targets of parts that were found right before, or that a pytree puts in their place."""
    made = object.__new__(SparseTargets)
    for name, t in zip(_NAMES, (ids, logprobs, tail, mask), strict=True):
        object.__setattr__(made, name, t)  # as a frozen dataclass does, and older Dynamo follows
    return made


def _told(t) -> str:
    if not isinstance(t, Tensor):
        return repr(t)
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"


def _join(targets: Sequence[SparseTargets], join: Callable) -> SparseTargets:
    k = max(t.k for t in targets)
    masked = any(t.mask is not None or t.k < k for t in targets)
    parts = zip(*(_filled(t, k, masked) for t in targets), strict=True)
    return unchecked(*(None if part[0] is None else join(part) for part in parts))


def _filled(targets: SparseTargets, k: int, masked: bool) -> tuple:
    """The parts with k slots, and with a mask where there is to be one."""
    ids, logprobs, tail, mask = _parts(targets)
    if masked:
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    more = (0, k - ids.shape[-1])
    if more[1]:
        pad = torch.nn.functional.pad
        ids, logprobs, mask = pad(ids, more), pad(logprobs, more, value=-torch.inf), pad(mask, more)
    return ids, logprobs, tail, mask


def _collate(batch: Sequence[SparseTargets], *, collate_fn_map=None) -> SparseTargets:
    return SparseTargets.stack(batch)


SparseTargets.__module__ = "logitless"  # what a pickle calls it, wherever the class is defined
torch.serialization.add_safe_globals([SparseTargets])
default_collate_fn_map[SparseTargets] = _collate
pytree.register_pytree_node(
    SparseTargets,  # its leaves are the tensors that it has
    lambda targets: (list(_present(targets).values()), tuple(_present(targets))),
    lambda tensors, names: unchecked(**dict(zip(names, tensors, strict=True))),
)
