"""Iterates over the documents of a store, and resumes in the middle of an epoch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ..targets.sparse import SparseTargets, unchecked
from . import checks
from .device import on_cpu
from .reader import Store


class Place(NamedTuple):
    """A place in an epoch. `position` is the number of documents that this worker has read."""

    epoch: int
    position: int


class Documents(IterableDataset):
    """An iterable dataset of a store's documents. Each item is a pair (tokens, targets).

    Without `seed`, documents are read in the order of the store. With `seed`, each epoch has its
    own random order, so call `set_epoch` before each: the shards are shuffled, and then the
    documents of `mixed` consecutive shards together. A remote store thus needs only a few shards
    at a time, and the next ones are fetched in the background.

    Each rank reads the same number of documents, divided among the workers of its DataLoader; the
    remainder is left out. By default, `rank` and `world` are the environment variables RANK and
    WORLD_SIZE, which torchrun sets.

    The state (`state_dict`) is the position in the epoch, and StatefulDataLoader of torchdata saves
    and restores it. The first iteration after `load_state_dict` reads the rest of the saved epoch,
    which is nothing if the state was saved at its end. A resumed run must have the same store,
    seed, `mixed`, number of ranks and number of workers.

    >>> loader = StatefulDataLoader(Documents(store, seed=0), 8, collate_fn=pad_documents)
    """

    def __init__(
        self,
        store: Store,
        *,
        seed: int | None = None,
        mixed: int = 4,
        rank: int | None = None,
        world: int | None = None,
    ):
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
        if seed is not None:
            checks.whole("seed", seed, 0, 2**31)
        checks.whole("mixed", mixed, 1, 10**6)
        checks.whole("world", world, 1, 10**6)
        checks.whole("rank", rank, 0, world - 1)
        self.store, self.seed, self.mixed = store, seed, mixed
        self.rank, self.world = rank, world
        # The epoch of the next iteration, in shared memory, so that `set_epoch` reaches workers
        # that are already running.
        self._next_epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()
        self._place = Place(0, 0)
        self._resumed: Place | None = None  # the place that `load_state_dict` restored

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._next_epoch.share_memory_()

    @property
    def epoch(self) -> int:
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, which begins at its first document if it is new."""
        checks.whole("epoch", epoch, 0, 2**31)
        self._next_epoch.fill_(epoch)
        if epoch != self.epoch:
            self._place, self._resumed = Place(epoch, 0), None

    def __iter__(self) -> Iterator[tuple[Tensor, SparseTargets]]:
        self._place = self._resumed or Place(int(self._next_epoch), 0)
        self._resumed = None
        return self._items(self._place)

    def _items(self, place: Place) -> Iterator[tuple[Tensor, SparseTargets]]:
        order = self.order(place.epoch)
        share, shares = self._share()
        order = order[share::shares][place.position :]
        if len(order) and self.seed is None:
            self.store.prefetch(order)
        elif len(order):
            self.store.prefetch(order, ahead=max(2, self.mixed), mixed=self.mixed)
        for position, number in enumerate(order.tolist(), place.position + 1):
            item = self.store[number]
            self._place = Place(place.epoch, position)
            yield item

    @on_cpu
    def order(self, epoch: int) -> Tensor:
        """The document numbers of all ranks, in the order of the given epoch."""
        firsts = self.store.firsts
        order = torch.arange(len(self.store))
        if self.seed is not None:
            random = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            shards = torch.randperm(len(firsts) - 1, generator=random).tolist()
            groups = [order[:0]]
            for at in range(0, len(shards), self.mixed):
                together = [order[firsts[n] : firsts[n + 1]] for n in shards[at : at + self.mixed]]
                group = torch.cat(together)
                groups.append(group[torch.randperm(len(group), generator=random)])
            order = torch.cat(groups)
        return order[: len(order) - len(order) % self.world]

    def _share(self) -> tuple[int, int]:
        """The index of this worker's share of the documents, and the number of shares.

        Worker w of a rank reads every (workers · world)-th document from number w · world + rank,
        so that all ranks read equally many.
        """
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return number * self.world + self.rank, workers * self.world

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch, and the arguments that determine the order."""
        return {**self._place._asdict(), **self._fixed()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the last document that was read before `state_dict` was called.

        Later iterations read whole epochs. Call `set_epoch` before each of them.
        """
        checks.state_of_documents(state, self._fixed())
        self._place = self._resumed = Place(state["epoch"], state["position"])

    def _fixed(self) -> dict[str, Any]:
        share, shares = self._share()
        return {
            "documents": len(self.store), "store": self.store.digest, "seed": self.seed,
            "mixed": self.mixed, "share": share, "shares": shares,
        }  # fmt: skip


@on_cpu
def pad_documents(
    documents: Sequence[tuple[Tensor, SparseTargets]], pad_token: int = 0
) -> dict[str, Any]:
    """Pads documents, a list of (tokens, targets), on the right, and returns a batch.

    It has input_ids, attention_mask and labels of shape (B, T), and targets with one row per token.
    Padding tokens have the label -100 and masked slots.
    """
    if not documents:
        checks.refuse("documents", "have at least one document", "none")
    lengths = torch.tensor([len(tokens) for tokens, _ in documents])
    first = torch.cumsum(lengths, 0) - lengths
    place = torch.arange(int(lengths.max()))
    is_token = place < lengths[:, None]
    # `pad_token` and an empty row follow the tokens and rows of all documents, at `lengths.sum()`.
    at = torch.where(is_token, first[:, None] + place, lengths.sum())
    tokens = torch.cat([*(tokens for tokens, _ in documents), torch.tensor([pad_token])])[at]
    rows = [targets for _, targets in documents]
    if not bool(is_token.all()):
        like = rows[0][:1]
        empty = unchecked(
            torch.zeros_like(like.ids), torch.full_like(like.logprobs, -torch.inf),
            None if like.tail is None else torch.zeros_like(like.tail),
            torch.zeros(like.ids.shape, dtype=torch.bool),
        )  # fmt: skip
        rows.append(empty)
    return {
        "input_ids": tokens, "attention_mask": is_token.long(),
        "labels": tokens.masked_fill(~is_token, -100),
        "targets": SparseTargets.cat(rows)[at.flatten()].reshape(*at.shape),
    }  # fmt: skip
