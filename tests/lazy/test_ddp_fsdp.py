"""A model that ends in a fused head trains under DDP and FSDP exactly as one process without them.

Two processes on one machine, by gloo; all cases in one run, for starting them takes a while.
"""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import logitless as ll
from tests.support.forked import together
from tests.support.rank_processes import PATIENCE, largest

V, D, STEPS = 11, 6, 3
WRAPPERS = [
    "ddp", "ddp static_graph", "ddp find_unused_parameters",
    "fsdp root", "fsdp blocks", "fsdp head alone", "fsdp bf16",
    "fsdp1 root", "fsdp1 blocks", "fsdp1 head alone", "fsdp1 by size",
]  # fmt: skip
CASES = [(wrapper, bool(i % 2)) for i, wrapper in enumerate(WRAPPERS)]  # inside of the model


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
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    kind, _, how = wrapper.partition(" ")
    if kind == "ddp":
        return DistributedDataParallel(model, **({how: True} if how else {}))
    if kind == "fsdp1":
        return wrapped_by_fsdp1(model, how)
    policy = MixedPrecisionPolicy()
    if how == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if how != "root":
        for block in model.body:
            fully_shard(block, mp_policy=policy)
    if how == "head alone":
        fully_shard(model.head)
    fully_shard(model, mp_policy=policy)
    return model


def wrapped_by_fsdp1(model: nn.Module, how: str) -> nn.Module:
    """FSDP1 around the head itself frees the weight, so that fuse steps aside."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    def shard(module: nn.Module, **options) -> nn.Module:
        here = torch.device("cpu")
        return FullyShardedDataParallel(module, device_id=here, use_orig_params=True, **options)

    if how == "by size":
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=D * V)
        return shard(model, auto_wrap_policy=policy)
    if how == "blocks":
        model.body = nn.ModuleList(map(shard, model.body))
    if how == "head alone":
        model.head = shard(model.head)
    return shard(model)


def whole(model: nn.Module) -> list[torch.Tensor]:
    """The parameters of a model that may be sharded."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().clone() for p in model.parameters()]
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]


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
    return whole(model)


def distance(found: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return largest(float((a - b).abs().max()) for a, b in zip(found, want, strict=True))


def fused_model(wrapper: str) -> nn.Module:
    """A FusedHead, or for FSDP1 a model that was fused before it was wrapped."""
    if wrapper.startswith("fsdp1"):
        return ll.fuse(Model(fused=False), head="head")
    return Model(fused=True)


def in_process(rank: int) -> dict[tuple[str, bool], float | str]:
    """What each of the two processes does: how far each case is from one process, or its error."""
    outcomes = {}
    warnings.simplefilter("ignore")  # FSDP1 is deprecated; that fuse steps aside is in is_fused
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=PATIENCE)
    want = train(Model(fused=False), True, [0, 1])
    for wrapper, inside in CASES:
        try:
            model = wrapped(fused_model(wrapper), wrapper)
            found = train(model, inside, [rank])
            if wrapper.startswith("fsdp1"):
                aside = wrapper in ("fsdp1 head alone", "fsdp1 by size")
                assert bool(ll.is_fused(model)) != aside, ll.is_fused(model)
            far = distance(found, want)
            if wrapper == "fsdp bf16":  # at most twice as far as the model without a fused head
                plain = train(wrapped(Model(fused=False), wrapper), inside, [rank])
                far -= 2 * distance(plain, want)
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
