"""What one backend writes into the structs of contract.py, the other can read."""

import pytest
import torch

from logitless import eager, kernels
from logitless.contract import ARG, STATISTICS, Pair, Reading, of_bits


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
    wants = tuple(name for name in STATISTICS if name not in ("tail", "rank"))
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


@pytest.mark.parametrize("backend", [eager, kernels], ids=["eager", "kernels"])
def test_smoothing_spreads_over_the_vocabulary(backend, device):
    """Columns of a longer row take ε / V from the reading, not from their own number."""
    x, probs = torch.randn(3, 20, device=device), torch.rand(3, 20, device=device)
    ones = torch.ones((), device=device)
    for vocab in (20, 50):
        target = probs * 0.9 + 0.1 / vocab
        pair, reading = Pair(probs, "soft", 0.1), Reading(vocab)
        _, _, _, mass, c = backend.pair_partial(x, reading, pair).unbind(1)
        torch.testing.assert_close(mass, target.sum(1))
        torch.testing.assert_close(c, (target * (x.amax(1, keepdim=True) - x)).sum(1))
        _, state = backend.pair_read(x, reading, pair)
        d = backend.pair_gradient(x, reading, pair, state, ones)
        want = x.softmax(1) * target.sum(1, keepdim=True) - target
        torch.testing.assert_close(d, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ignore_index", [None, -100, 7])
@pytest.mark.parametrize("width", [3, 64, 5000])
def test_hidden_states_of_ignored_rows(width, ignore_index, device):
    label = torch.tensor([4, -100, 7, 2], dtype=torch.int32, device=device)
    x = torch.randn(4, 2 * width, device=device)[:, ::2]
    for strided in (x, x.contiguous(), x.contiguous()[:, : width - 1]):
        spoilt = strided.clone()
        if ignore_index is not None:
            spoilt[label == ignore_index] = torch.nan
        reading = Reading(50, label=label, ignore_index=ignore_index)
        want = strided.clone()
        if ignore_index is not None:
            want[label == ignore_index] = 0
        assert torch.equal(kernels.zero_ignored(spoilt, reading), want)
        assert torch.equal(eager.zero_ignored(spoilt, reading), want)


@pytest.mark.parametrize("number", [1.0, 1.7])
@pytest.mark.parametrize("sizes", [(0, 0), (1, 1), (0, 9), (5, 9000), (9000, 5), (4096, 8192)])
def test_two_tensors_times_one_number(sizes, number, device):
    """The memory before and after each tensor stays as it is."""
    memory = [torch.randn(size + 9, device=device) for size in sizes]
    g = torch.tensor(number, device=device)
    for offset in (0, 1):
        for backend in (eager, kernels):
            got, want = ([m.clone() for m in memory] for _ in range(2))
            parts = [slice(offset, offset + size) for size in sizes]
            backend.scale_two_(*(t[part] for t, part in zip(got, parts, strict=True)), g)
            for t, m, part in zip(got, want, parts, strict=True):
                m[part] *= number
                assert torch.equal(t, m)
