"""The ranks of a process group that share a vocabulary, and the collectives between them."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks


def _either(*names: str) -> Any:
    """The first that exists in torch.distributed; None if PyTorch was built without it."""
    return next((getattr(dist, name) for name in names if hasattr(dist, name)), None)


_all_gather = _either("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _either("reduce_scatter_single", "reduce_scatter_tensor")


class Ranks:
    device = torch.device("cpu")  # the device of the tensors that `agree` gathers

    def __init__(self, group: "dist.ProcessGroup | None" = None):
        self.group = dist.group.WORLD if group is None else group
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)
        checks.member(self.index)
        # gloo supports few collectives on a GPU, so GPU tensors go over the CPU
        self.by_cpu = dist.get_backend(group) == "gloo"
        if not self.by_cpu:
            self.device = torch.accelerator.current_accelerator() or self.device

    def gather(self, t: Tensor) -> Tensor:
        """All-gathers `t`, with a new first dimension for the ranks."""
        gathered = torch.empty((self.count, *t.shape), device=t.device, dtype=t.dtype)
        if t.numel() == 0:
            return gathered
        if t.is_cuda and self.by_cpu:
            return self.gather(t.cpu()).to(t.device)
        _all_gather(gathered.view(-1), t.contiguous().view(-1), group=self.group)
        return gathered

    def all_reduce(self, t: Tensor) -> Any:
        """Starts an all-reduce of `t` in place. The sum is complete after wait()."""
        return dist.all_reduce(t, group=self.group, async_op=True)

    def reduce_scatter(self, t: Tensor) -> "_Slice":
        """Starts a reduce-scatter of `t`. wait() returns this rank's rows of the sum."""
        if t.is_cuda and self.by_cpu:
            return _Slice(self.reduce_scatter(t.cpu()).wait().to(t.device))
        local = t.new_empty((len(t) // self.count, *t.shape[1:]))
        return _Slice(
            local, _reduce_scatter(local, t.contiguous(), group=self.group, async_op=True)
        )

    def shift(self, tensors: Sequence[Tensor], rows: int, tag: int = 0) -> "_Arrivals":
        """Starts to send tensors to the next rank, and to receive from the previous one.

        wait() returns the received tensors, of `rows` rows each. k tensors use the tags from `tag`
        to `tag + k - 1`, and shifts that run at the same time must use different tags.
        """
        if self.by_cpu and any(t.is_cuda for t in tensors):
            moved = self.shift([t.cpu() for t in tensors], rows, tag).wait()
            return _Arrivals([t.to(s.device) for t, s in zip(moved, tensors, strict=True)], ())
        after, before = (
            dist.get_global_rank(self.group, (self.index + step) % self.count) for step in (1, -1)
        )
        sent = [t.contiguous() for t in tensors]
        got = [torch.empty((rows, *t.shape[1:]), device=t.device, dtype=t.dtype) for t in sent]
        operations = [
            dist.P2POp(function, t, peer, self.group, number)
            for function, some, peer in ((dist.isend, sent, after), (dist.irecv, got, before))
            for number, t in enumerate(some, tag)
            if t.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Arrivals(got, works, sent)

    # --- checks for LOGITLESS_CHECK=1; the texts that ranks compare are from same_call.py

    def agree(self, text: str) -> None:
        """Raises an error on all ranks if the ranks send different texts."""
        local = torch.tensor(list(text.encode()), device=self.device)
        sizes = self.gather(local.new_tensor([len(local)])).flatten().tolist()
        padded = local.new_zeros(max(sizes))
        padded[: len(local)] = local
        pairs = zip(self.gather(padded).tolist(), sizes, strict=True)
        checks.same_call([bytes(text[:size]).decode() for text, size in pairs])

    def refuse(self, error: Exception) -> None:
        """Sends an error of this rank to the ranks that wait in `agree`, which then raise.

        Here, the error of `agree` is suppressed, because the caller raises the original one.
        """
        with contextlib.suppress(ValueError):
            self.agree(f"{type(error).__name__}: {error}")


class Alone(Ranks):
    """A single process with all columns, for use without torch.distributed."""

    def __init__(self):
        self.group, self.index, self.count = None, 0, 1

    def gather(self, t: Tensor) -> Tensor:
        return t.detach().unsqueeze(0).clone()

    def all_reduce(self, t: Tensor) -> Any:
        return _Done()

    def reduce_scatter(self, t: Tensor) -> "_Slice":
        return _Slice(t)

    def shift(self, tensors: Sequence[Tensor], rows: int, tag: int = 0) -> "_Arrivals":
        return _Arrivals(list(tensors), ())


class _Done:
    def wait(self) -> None:
        pass


class _Slice(NamedTuple):
    """`local` is complete after wait()."""

    local: Tensor
    work: Any = _Done()

    def wait(self) -> Tensor:
        self.work.wait()
        return self.local


class _Arrivals(NamedTuple):
    """The received tensors are complete after wait()."""

    received: list[Tensor]
    works: Sequence[Any]
    sent: Sequence[Tensor] = ()  # kept in memory until the transfer is complete

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


def ranks_of(group) -> Ranks:
    """The ranks of a process group, or of a DeviceMesh of one dimension.

    None is the default process group, or a single process without torch.distributed.
    """
    if isinstance(group, Ranks):
        return group
    if hasattr(group, "get_group"):  # a DeviceMesh
        group = group.get_group()
    initialised = dist.is_available() and dist.is_initialized()
    return Ranks(group) if initialised or group is not None else Alone()
