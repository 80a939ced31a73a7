"""What one backend writes into the structs of contract.py, the other can read."""

import pytest
import torch

from logitless import eager, kernels
from logitless.contract import ARG, STATISTICS, Reading, of_bits


def test_every_statistic_at_once(device):
    x = torch.randn(3, 50, device=device)
    reading = Reading(
        50,
        label=torch.tensor([4, 49, -100], device=device),
        ids=torch.tensor([[1, 2], [3, 3], [0, 4]], device=device),
        class_weight=torch.rand(50, device=device),
        temperature=1.5,
        ignore_index=-100,
        wants=STATISTICS,
    )
    ours, theirs = kernels.read(x, reading), eager.read(x, reading)
    for name in STATISTICS:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("reader", [eager, kernels], ids=["by eager", "by kernels"])
@pytest.mark.parametrize("writer", [eager, kernels], ids=["from eager", "from kernels"])
def test_splits_of_either_backend(writer, reader, device):
    wants = tuple(name for name in STATISTICS if name != "tail")
    x, label = torch.randn(3, 50, device=device), torch.tensor([4, 49, 20], device=device)
    reading = Reading(50, label=label, temperature=1.5, wants=wants)
    splits = [writer.partial(x[:, :30], reading), writer.partial(x[:, 30:], reading, 30)]
    columns = of_bits(torch.cat([split.state[..., ARG] for split in splits], 1))
    first, second = x[:, :30].argmax(1), x[:, 30:].argmax(1) + 30
    assert torch.equal(columns.long(), torch.stack((first, second), 1))
    got = reader.finish(reader.merge(splits, reading), reading)
    want = eager.read(x, reading)
    for name in wants:
        torch.testing.assert_close(getattr(got, name), getattr(want, name))
