"""SparseTargets of random rows, and an assertion that two SparseTargets are equal bit for bit."""

import torch

import logitless as ll

V, K = 53, 5


def make(*rows, k=K, tail=True, masked=False, device="cpu"):
    """The k most probable of V ids of a random teacher."""
    targets = ll.capture_topk(torch.randn(*rows, V), k)
    mask = torch.rand(*rows, k) < 0.7 if masked else None
    made = ll.SparseTargets(targets.ids, targets.logprobs, targets.tail if tail else None, mask)
    return made.to(device)


def parts(targets):
    return [targets.ids, targets.logprobs, targets.tail, targets.mask]


def assert_same(got, want):
    """Asserts that values, dtypes and missing tensors are the same, bit for bit."""
    for a, b in zip(parts(got), parts(want), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
