"""The logits h @ w.T from every source that is not a tensor."""

import torch

import logitless as ll


def fused(h, w):
    """The lazy logits of a fused model."""
    vocab, width = w.shape
    head = torch.nn.Linear(width, vocab, bias=False, device=w.device)
    del head.weight  # a Parameter would be a leaf of its own
    head.weight = w
    return ll.fuse(torch.nn.Sequential(head), head="0")(h)


def in_chunks(h, w):
    """A head that computes three rows at a time."""
    return ll.LinearLogits(h, w, workspace=3 * len(w) * h.itemsize)


SOURCES = {
    "head": lambda h, w: ll.LinearLogits(h, w),
    "head in chunks": in_chunks,
    "head, nothing dropped": lambda h, w: ll.LinearLogits(h, w, drop_ignored=False),
    "shard": lambda h, w: ll.VocabShard(h @ w.T),
    "shard of a head": lambda h, w: ll.VocabShard(ll.LinearLogits(h, w)),
    "lazy": fused,
    "lazy, scaled": lambda h, w: fused(h, w) * 0.5,
}
