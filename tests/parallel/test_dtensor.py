"""DTensors that are refused by name."""

import pytest
import torch

import logitless as ll
from tests.support.calls import TARGET, N, V


def test_a_sharded_weight_is_refused_by_name():
    """Its part would be taken for the whole, or mixed with plain tensors, deep in PyTorch."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(torch.randn(V, 3), mesh, [Shard(0)])
        logits = distribute_tensor(torch.randn(N, V), mesh, [Shard(0)])
        with pytest.raises(TypeError, match=r"hidden must be a DTensor on the mesh of weight, got"):
            ll.LinearLogits(torch.randn(N, 3), weight)
        with pytest.raises(
            TypeError, match=r"logits must be replicated, or have a single placement .*Shard\(dim=0"
        ):
            ll.cross_entropy(logits, TARGET)
    finally:
        dist.destroy_process_group()
