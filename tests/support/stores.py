"""Small stores and teachers for the tests, which are the same in every run."""

from itertools import accumulate

import torch

import logitless as ll

V, K = 1000, 8
LENGTHS = (100, 1, 37, 64, 3)  # lengths of the documents that most tests write


def teacher(n: int, vocab: int = V, k: int = K, seed: int = 0, steep: float = 1.5):
    """Sorted targets of n rows. As in a language model, p falls as a power of the rank."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.rand(n, vocab, generator=random).topk(k).indices if vocab <= 4096 else None
    if ids is None:
        ids = torch.randint(0, vocab // k, (n, k), generator=random)
        ids = ids * k + torch.arange(k)  # the ids of a row differ
    z = -steep * torch.arange(1, k + 1.0).log() + 0.3 * torch.randn(n, k, generator=random)
    inside = 0.5 + 0.49 * torch.rand(n, 1, generator=random)
    logprobs = z.log_softmax(-1).sort(-1, descending=True).values + inside.log()
    return ll.SparseTargets(ids, logprobs, torch.log1p(-inside[:, 0]))


def document(n: int, seed: int = 0, vocab: int = V, k: int = K):
    random = torch.Generator().manual_seed(seed + 10_000)
    return torch.randint(0, vocab, (n,), generator=random), teacher(n, vocab, k, seed)


def documents(*lengths: int, **how):
    return [document(n, seed, **how) for seed, n in enumerate(lengths)]


def joined(found):
    """The tokens, starts and targets of several documents, as `Writer.extend` takes them."""
    starts = [0, *accumulate(len(tokens) for tokens, _ in found)]
    targets = ll.SparseTargets.cat([targets for _, targets in found])
    return torch.cat([tokens for tokens, _ in found]), starts, targets


def open_writer(path, **how):
    return ll.store.Writer(path, **({"vocab_size": V, "k": K} | how))


def write(path, found, **how):
    with open_writer(path, **how) as writer:
        for tokens, targets in found:
            writer.add(tokens, targets)
    return ll.store.Store(path)


def kl(want: ll.SparseTargets, got: ll.SparseTargets):
    """KL of each row over slots and tail, in fp64. Both must have the same order of slots."""
    assert torch.equal(want.ids.long(), got.ids.long())
    logp, tail = want.logprobs.double(), want.tail.double()
    inside = (logp.exp() * (logp - got.logprobs.double())).sum(-1)
    return inside + tail.exp() * (tail - got.tail.double())


def assert_near(got: ll.SparseTargets, want: ll.SparseTargets, most: float = 1e-4):
    assert kl(want, got).abs().max() < most


def abandon(writer):
    """As the system does to the files of a process that was killed."""
    writer.journal.close()
    writer.lock.release()
    writer.closed = True


def assert_holds(store, found):
    assert len(store) == len(found)
    for tokens, targets in found:
        assert_near(store[store.find(tokens)][1], targets)
    assert store.verify()


def assert_same_store(got, want):
    """All documents, by number, by range and by tokens, and a packed batch."""
    assert len(got) == len(want)
    assert got.tokens == want.tokens
    assert torch.equal(got.lengths, want.lengths)
    for i in range(len(want)):
        assert_equal(got[i], want[i])
        assert_equal(got[i, 1:3], want[i, 1:3])
        assert got.find(want[i][0]) == i
    order = list(reversed(range(len(want))))
    batch = torch.cat([want[i][0] for i in order])[None]
    for name in ("ids", "logprobs", "tail"):
        of_got = getattr(got.targets_for(batch, [got.lengths[order]]), name)
        of_want = getattr(want.targets_for(batch, documents=[order]), name)
        assert torch.equal(of_got, of_want)


def assert_equal(got, want):
    assert torch.equal(got[0], want[0])
    for name in ("ids", "logprobs", "tail", "mask"):
        a, b = getattr(got[1], name), getattr(want[1], name)
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
