"""Counts bits that differ when the same rows are computed in several random batches."""

import pytest
import torch

import logitless as ll
from tests.support.sizes import ON_GPU

WIDTH = 24  # the size D of the hidden states
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


# The batches are on the CPU, where kernels need Triton's interpreter. On a GPU,
# tests/gpu/test_invariant_sizes.py runs the same kernels.
interpreted = pytest.mark.skipif(ON_GPU, reason="no interpreter on a machine with a GPU")


def bits(t):
    return t.detach().contiguous().view(BITS[t.element_size()])


def batch(rows, columns, vocab, dtype, seed):
    """Returns inputs of random rows. Every third row of x is multiplied by 10."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g)
    x[::3] *= 10
    return {
        "x": x.to(dtype),
        "target": torch.randint(vocab, (rows,), generator=g),
        "ids": torch.randint(vocab, (rows, 3), generator=g),
        "teacher": torch.randn(rows, vocab, generator=g).to(dtype),
        "temperature": torch.rand(rows, generator=g) + 0.5,
        "upstream": torch.randn(rows, generator=g),
    }


def statistics(z, of):
    return ll.row_stats(z, of["target"], entropy=True, total=True, softcap=20.0)[:4]


def scores(z, of):
    return ll.score(z, of["target"], temperature=of["temperature"])[:3]


def smoothed(z, of):
    weight = torch.linspace(0.5, 2, z.shape[-1])
    return [
        ll.cross_entropy(
            z, of["target"], weight=weight, label_smoothing=0.1, z_loss=1e-3, reduction="none"
        )
    ]


def total(z, of):
    """Runs backward of a sum. The gradient per row is compared, but the sum is not."""
    loss = ll.cross_entropy(z, of["target"], reduction="sum", row_weight=of["upstream"])
    loss.backward()
    return []


def ratio(z, of):
    def formula(stats, old):
        return (stats.logprob - old).exp() + 0.1 * stats.entropy

    rows = (of["temperature"],)
    return [ll.row_loss(formula, z, of["target"], rows=rows, entropy=True, reduction="none")]


def distilled(z, of):
    logprobs = torch.log_softmax(of["teacher"][:, :3].float(), -1) - 0.3
    targets = ll.SparseTargets(of["ids"], logprobs)
    return [
        ll.topk_distill(z, targets, divergence="reverse_kl", support="tail", reduction="none"),
        ll.topk_distill(z, targets, divergence="jsd", support="truncate", reduction="none"),
    ]


def against_a_teacher(z, of):
    return [
        ll.kl_div(z, of["teacher"], direction="forward", reduction="none"),
        ll.jsd(z, of["teacher"], beta=0.3, reduction="none"),
        ll.tvd(z, of["teacher"], temperature=of["temperature"], reduction="none"),
    ]


def captured(z, of):
    targets = ll.capture_topk(z, 4)
    return [targets.ids, targets.logprobs, targets.tail]


LOSSES = [statistics, scores, smoothed, total, ratio, distilled, against_a_teacher, captured]


def results(loss, probe, source, size, seed, positions):
    """Returns the results and the gradient of the probe's rows in a random batch of `size` rows."""
    vocab = probe["teacher"].shape[1]
    of = batch(size, probe["x"].shape[1], vocab, probe["x"].dtype, seed)
    of["target"][::2] = -100  # rows are ignored, except the probes
    for name, t in of.items():
        t[positions] = probe[name]
    x = of["x"].requires_grad_()
    values = loss(source(x, seed), of)
    floating = [t for t in values if t.requires_grad]
    if floating:
        upstream = [of["upstream"].view(-1, *(1,) * (t.dim() - 1)).expand_as(t) for t in floating]
        torch.autograd.backward(floating, upstream)
    values = [*values, *([] if x.grad is None else [x.grad])]
    return [bits(t[positions]) for t in values]


def differing(loss, source, columns, vocab, dtype, sizes):
    """Counts the numbers of two rows whose bits differ between batches of these sizes."""
    probe = batch(2, columns, vocab, dtype, 1)
    first = results(loss, probe, source, 2, 0, [0, 1])
    assert first
    count = 0
    for seed, size in enumerate(sizes, 10):
        positions = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:2]
        again = results(loss, probe, source, size, seed, positions)
        count += sum(int((a != b).sum()) for a, b in zip(first, again, strict=True))
    return count


def plain(x, seed):
    return x


def head(vocab, dtype, bias=True, **options):
    """Returns a function that creates a head. The size of the workspace depends on the seed."""
    g = torch.Generator().manual_seed(7)
    weight = torch.randn(vocab, WIDTH, generator=g).to(dtype).requires_grad_()
    offset = torch.randn(vocab, generator=g).to(dtype) if bias else None

    def source(x, seed):
        workspace = [None, 2 * vocab, 9 * vocab, 20 * vocab][seed % 4]
        return ll.LinearLogits(x, weight, offset, workspace=workspace, **options)

    return source
