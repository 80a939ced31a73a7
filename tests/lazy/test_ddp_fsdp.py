"""A model that ends in a fused head trains under DDP and FSDP2 exactly as one process without them.

Two processes on one machine, by gloo; all cases in one run, for starting them takes a while.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import logitless as ll
from tests.support.forked import together
from tests.support.rank_processes import PATIENCE, largest

V, D, STEPS = 11, 6, 5
WRAPPERS = [
    "ddp", "ddp static_graph", "ddp find_unused_parameters",
    "fsdp root", "fsdp blocks", "fsdp head alone",
]  # fmt: skip
CASES = [(wrapper, inside) for wrapper in WRAPPERS for inside in (False, True)]


class Model(nn.Module):
    """A small body and a head; with targets it gives the loss, without them the logits."""

    def __init__(self, fused: bool):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))
        self.head = (ll.nn.FusedHead if fused else nn.Linear)(D, V)

    def forward(self, x, target=None):
        for block in self.body:
            x = block(x)
        logits = self.head(x)
        return logits if target is None else loss_of(logits, target)


def loss_of(logits, target):
    return F.cross_entropy(logits.view(-1, V), target.view(-1))


def data(rank: int, step: int):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 3, D, generator=g), torch.randint(0, V, (2, 3), generator=g)


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    kind, _, how = wrapper.partition(" ")
    if kind == "ddp":
        return DistributedDataParallel(model, **({how: True} if how else {}))
    if how != "root":
        for block in model.body:
            fully_shard(block)
    if how == "head alone":
        fully_shard(model.head)
    fully_shard(model)
    return model


def train(model: nn.Module, inside: bool, ranks: list[int]) -> list[torch.Tensor]:
    """Parameters after some steps, each on the mean over `ranks` of this process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for rank in ranks:
            x, target = data(rank, step)
            losses.append(model(x, target) if inside else loss_of(model(x), target))
        (sum(losses) / len(losses)).backward()
        optimizer.step()
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]


def in_process(rank: int) -> dict[tuple[str, bool], float | str]:
    """What each of the two processes does: how far each case is from one process, or its error."""
    outcomes = {}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=PATIENCE)
    want = train(Model(fused=False), True, [0, 1])
    for wrapper, inside in CASES:
        try:
            found = train(wrapped(Model(fused=True), wrapper), inside, [rank])
            far = largest(float((a - b).abs().max()) for a, b in zip(found, want, strict=True))
        except Exception as error:
            far = f"{type(error).__name__}: {error}"
        outcomes[wrapper, inside] = far
    dist.destroy_process_group()
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    return together(2, in_process)


@pytest.mark.parametrize(("wrapper", "inside"), CASES)
def test_trains_as_one_process(wrapper, inside, outcomes):
    for rank, found in enumerate(outcomes):
        far = found[wrapper, inside]
        assert not isinstance(far, str), f"rank {rank}: {far}"
        assert far < 1e-5, f"rank {rank}"
