"""A fused head trains in fp16 under torch.amp.GradScaler as the plain head does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import logitless as ll

D, V, ROWS = 8, 57, 24


def trained(model: nn.Module, scale: float, device: str) -> list[torch.Tensor]:
    """The parameters after four steps. A scale that is too large makes the scaler skip steps."""
    scaler = torch.amp.GradScaler(device, init_scale=scale, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        x = torch.randn(ROWS, D, generator=generator).to(device)
        target = torch.randint(0, V, (ROWS,), generator=generator).to(device)
        target[::5] = -100
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("scale", [1.0, 2.0**12, 2.0**24])
def test_same_steps_as_the_plain_head(scale, device):
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, V)).to(device)
    fused = ll.fuse(copy.deepcopy(exact), head="2")
    before = [p.detach().clone() for p in exact.parameters()]
    plain = trained(copy.deepcopy(exact), scale, device)
    found = trained(fused, scale, device)
    assert ll.is_fused(fused)
    for a, b, start in zip(found, plain, before, strict=True):
        moved = (b - start).abs().max()
        assert scale == 2.0**24 or moved > 0
        assert (a - b).abs().max() <= 0.01 * moved + 1e-7
