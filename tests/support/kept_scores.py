"""Logits, targets and kept ids for the tests of kept_scores."""

import torch

N, V, K = 7, 37, 6


def make(dtype=torch.float32, device="cpu", scale=2.0):
    """Logits, targets and kept ids of rows that differ in the kind of their set."""
    g = torch.Generator().manual_seed(3)
    x = (torch.randn(N, V, generator=g, dtype=torch.float64) * scale).to(dtype)
    kept = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(N)])
    target = kept[:, 2].clone()
    kept[0, 3:] = -1  # a set of three
    kept[1, [0, 4]] = target[1]  # the target three times
    kept[2, 3] = kept[2, 0].clone()  # another id twice
    kept[3] = target[3]  # only the target
    kept[4, [0, 5]] = -1  # empty slots first and last
    return x.to(device), target.to(device), kept.to(device)


def gradients(scores, *leaves):
    """Gradients for random upstream gradients."""
    g = torch.Generator().manual_seed(1)
    real = [t for t in scores if t is not None]
    upstream = [torch.randn(t.shape, generator=g).to(t) for t in real]
    return torch.autograd.grad(real, leaves, upstream)
