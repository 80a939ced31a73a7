"""Stores of sampled targets: the same weights bit for bit, in few bytes, however they are read."""

import dataclasses

import pytest
import torch

import logitless as ll
from logitless.cli.teacher_summary import summary
from logitless.eager.sampled import Sampling, distinct
from logitless.store.codes import encoded
from logitless.store.counts import slots_of
from tests.support import stores

N, V = 50, 151_936
LENGTHS = (100, 1, 37, 64, 3, 300)


def sampled(rows: int, vocab: int = V, n: int = N, seed: int = 0, steep: float = 1.7):
    """Targets of n draws per row, where p falls as a power of the rank, as in a language model."""
    random = torch.Generator().manual_seed(seed)
    p = torch.arange(1, vocab + 1.0).pow(-steep)
    ranks = torch.multinomial(p, rows * n, replacement=True, generator=random).view(rows, n)
    shift = torch.randint(0, vocab, (rows, 1), generator=random)
    ids = ((ranks + shift) % vocab).sort(-1).values
    found = distinct(ids, ids.double(), torch.zeros(rows), Sampling(1.0, 1.0, None))
    return ll.SparseTargets(found[0], found[1], None, found[2])


def documents(*lengths: int, vocab: int = V, n: int = N):
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, vocab, (length,), generator=random), sampled(length, vocab, n, seed))
        for seed, length in enumerate(lengths)
    ]


def open_writer(path, vocab=V, n=N, **how):
    return ll.store.Writer(path, vocab_size=vocab, k=n, values="counts", **how)


def write(path, found, **how):
    with open_writer(path, **how) as writer:
        for tokens, targets in found:
            writer.add(tokens, targets)
    return ll.store.Store(path)


def assert_same(got: ll.SparseTargets, want: ll.SparseTargets):
    assert got.tail is None
    assert torch.equal(got.ids.long(), want.ids)
    assert torch.equal(got.mask, want.mask)
    assert torch.equal(got.logprobs, want.logprobs)


@pytest.mark.parametrize(
    ("vocab", "n"), [(V, 50), (256, 8), (100, 9), (3, 20), (2, 1), (70_000, 64), (2**32, 5)]
)
def test_the_same_targets_come_back(vocab, n, tmp_path):
    small = min(vocab, 5000)  # of the draws; ids of many bits are large
    found = [
        (tokens, dataclasses.replace(targets, ids=targets.ids * (vocab // small)))
        for tokens, targets in documents(*LENGTHS, vocab=small, n=n)
    ]
    found[3][1].mask[5] = False  # a row without slots
    found[3][1].ids[5], found[3][1].logprobs[5] = 0, -torch.inf
    store = write(tmp_path / "s", found, vocab=vocab, n=n)
    assert store.info.values == "counts"
    assert store.info.k == n
    for number, (tokens, targets) in enumerate(found):
        number = store.find(tokens) if vocab > 3 else number
        if len(store) < len(found):  # with two ids, short documents can be the same
            continue
        assert torch.equal(store[number][0], tokens)
        assert_same(store[number][1], targets)
        assert_same(store[number, 30:60][1], targets[30:60])
        assert_same(store[number, 5:5][1], targets[5:5])
    assert store.verify()


def test_rows_without_slots(tmp_path):
    """Also where no row of a range, or of a document, has slots."""
    (tokens, targets), (others, _) = documents(20, 5)
    targets.mask[:4] = False
    targets.ids[:4], targets.logprobs[:4] = 0, -torch.inf
    empty = targets[:4][torch.tensor([0, 1, 2, 3, 0])]
    store = write(tmp_path / "s", [(tokens, targets), (others, empty)])
    assert_same(store[0][1], targets)
    assert_same(store[0, :4][1], targets[:4])
    assert_same(store[1][1], empty)
    assert_same(store.targets_for(tokens[None, :4], documents=[0]).reshape(-1), targets[:4])


def test_a_padded_batch(tmp_path):
    found = documents(5, 9)
    batch = ll.store.pad_documents([write(tmp_path / "s", found)[i] for i in (0, 1)])
    for row, (tokens, targets) in enumerate(found):
        n = len(tokens)
        assert torch.equal(batch["input_ids"][row, :n], tokens)
        assert_same(batch["targets"][row, :n], targets)
        assert not batch["targets"].mask[row, n:].any()


def test_what_capture_sampled_returns(tmp_path, impl):
    """Both implementations; fp32 weights with the bits of the store, and int64 ids."""
    logits = torch.randn(70 if impl == "eager" else 9, 300) * 3
    targets = ll.capture_sampled(logits, 10)
    tokens = torch.arange(len(logits))
    for n in {len(logits), 9}:
        store = write(tmp_path / str(n), [(tokens[:n], targets[:n])], vocab=300, n=10)
        assert_same(store[0][1], targets[:n])


def test_the_size(tmp_path):
    """At most 48 bytes per token at n = 50 and V = 151,936, as the formula says."""
    found = documents(*[500] * 8)
    store = write(tmp_path / "s", found)
    per_row = torch.cat([targets.mask.sum(-1) for _, targets in found]).double().mean().item()
    assert 12 <= per_row <= 16
    size = store.shards[0].size / store.tokens
    assert size == pytest.approx(4 + 7 + per_row * 18 / 8, rel=1e-2)
    assert size < 48
    assert store.info.token_bytes(per_row) == pytest.approx(size, rel=1e-2)
    assert store.info.token_bytes(15) == 4 + 7 + 15 * 18 / 8
    with open_writer(tmp_path / "t") as writer:
        for tokens, targets in found:
            writer.add(tokens, targets)
        want = store.tokens * store.info.token_bytes(per_row)
        assert writer.written == pytest.approx(want, rel=1e-3)


def test_batches(tmp_path):
    """Packed documents with padding, from several shards."""
    found = documents(*LENGTHS)
    store = write(tmp_path / "s", found, shard_bytes=5_000)
    assert len(store.shards) > 1
    row = torch.cat([found[0][0], found[2][0][:35], torch.zeros(4, dtype=torch.int64)])
    got = store.targets_for(row[None], lengths=[[100, 35]])[0]
    assert_same(got[:100], found[0][1])
    assert_same(got[100:135], found[2][1][:35])
    assert not got.mask[135:].any()
    logits = torch.randn(1, len(row), V, requires_grad=True)
    how = {"divergence": "forward_kl", "support": "truncate"}
    labels = torch.where(torch.arange(len(row)) < 135, row, -100)[None]
    loss = ll.store.distill_loss(logits, labels, got.reshape(1, -1), **how).loss
    loss.backward()
    assert bool(loss > 0)
    assert logits.grad.isfinite().all()


def test_a_killed_writer(tmp_path):
    found = documents(*LENGTHS)
    writer = open_writer(tmp_path / "s")
    for tokens, targets in found:
        writer.add(tokens, targets)
    stores.abandon(writer)
    assert ll.store.recover(tmp_path / "s") == len(found)
    store = ll.store.Store(tmp_path / "s")
    for tokens, targets in found:
        assert_same(store[store.find(tokens)][1], targets)


def test_extend_and_merge(tmp_path):
    found = documents(*LENGTHS)
    with open_writer(tmp_path / "a") as writer:
        assert writer.extend(*stores.joined(found[:4])) == 4
    write(tmp_path / "b", found[2:], shard_bytes=5_000)
    assert ll.store.merge(tmp_path / "c", [tmp_path / "a", tmp_path / "b"]) == len(found)
    store = ll.store.Store(tmp_path / "c")
    for tokens, targets in found:
        assert_same(store[store.find(tokens)][1], targets)
    assert store.verify()
    stores.write(tmp_path / "d", stores.documents(5), vocab_size=V, k=N)
    with pytest.raises(ValueError, match="must have values 'counts' to match"):
        ll.store.merge(tmp_path / "e", [tmp_path / "a", tmp_path / "d"])


def test_verify_finds_damaged_rows(tmp_path):
    ((tokens, targets),) = documents(60)

    def report(name, change):
        with open_writer(tmp_path / name) as writer:
            rows = encoded(targets, writer.header)
            draws, ids = (writer.header.field(rows, field) for field in ("draws", "ids"))
            change(draws, ids, slots_of(draws))
            writer.append(tokens, rows)
        return ll.store.Store(tmp_path / name).verify()

    def order(draws, ids, slots):
        several = int((slots > 2).nonzero()[0])
        ids[several, :2] = ids[several, :2].flip(0)

    def first(draws, ids, slots):
        draws[7, 0] &= 254  # the first draw of a row is always the first of its id

    def last(draws, ids, slots):
        draws[7, 6] |= 128  # there is no draw 55
        ids[7, int(slots[7])] = V - 1

    assert report("right", lambda draws, ids, slots: None)
    for change in (order, first, last):
        found = report(change.__name__, change)
        assert "draws of distinct ids in ascending order" in str(found)
        assert not found


BAD = (
    (lambda t: t, 60, r"be log\(count / 60\)"),  # another number of draws
    (
        lambda t: ll.capture_sampled(torch.randn(9, V) * 3, N, proposal=0.5), N,
        r"as capture_sampled\(logits, 50\) returns with proposal=1",
    ),
    (lambda t: dataclasses.replace(t, tail=torch.full((9,), -9.0)), N, "tail must be"),
    (
        lambda t: dataclasses.replace(t, logprobs=torch.where(t.mask, -3.912023, -torch.inf)), N,
        r"got counts that add up to \d+",
    ),
    (
        lambda t: dataclasses.replace(t, ids=torch.where(t.mask, 7, 0)), N,
        "targets.ids must differ within a row, got 7 twice",
    ),
    (lambda t: dataclasses.replace(t, mask=torch.ones_like(t.mask)), N, r"log\(count / "),
)  # fmt: skip


def test_targets_that_are_not_counts(tmp_path):
    ((tokens, targets),) = documents(9)
    for number, (change, n, message) in enumerate(BAD):
        with open_writer(tmp_path / str(number), n=n) as writer:
            with pytest.raises(ValueError, match=message):
                writer.add(tokens, change(targets))
            assert len(writer) == 0


def test_importance_weights_fit_into_a_store_of_log_probabilities(tmp_path):
    tokens = torch.arange(70)
    targets = ll.capture_sampled(torch.randn(70, 300) * 3, 20, proposal=0.5)
    store = stores.write(tmp_path / "s", [(tokens, targets)], vocab_size=300, k=20, values="f16")
    got = store[0][1]
    for row in (0, 69):
        want = dict(
            zip(targets.ids[row].tolist(), targets.logprobs[row].exp().tolist(), strict=True)
        )
        for i, p, kept in zip(got.ids[row], got.logprobs[row].exp(), got.mask[row], strict=True):
            assert not kept or float(p) == pytest.approx(want[int(i)], rel=1e-2)


def test_capture(tmp_path):
    """The draws of a model, with a generator; a teacher of NaN is refused."""
    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.Embedding(40, 8), torch.nn.Linear(8, 40))
    batch = torch.randint(0, 40, (3, 70))
    with open_writer(tmp_path / "s", vocab=40, n=12) as writer:
        seed = torch.Generator().manual_seed(3)
        assert ll.store.capture(teacher, [batch], writer, head="1", generator=seed) == 3
        with pytest.raises(ValueError, match=r"k must lie in \[12, 12\], got 5"):
            ll.store.capture(teacher, [batch], writer, 5, head="1")
    with torch.no_grad():
        want = ll.capture_sampled(teacher(batch), 12, generator=torch.Generator().manual_seed(3))
    store = ll.store.Store(tmp_path / "s")
    for row in range(3):
        assert_same(store[store.find(batch[row])][1], want[row])
    found = summary(store)
    assert found.slots == pytest.approx(want.mask.sum(-1).double().mean().item())
    assert found.covered[-1] == pytest.approx(1.0)
    assert found.covered[0] > 0.1
    assert bool((found.covered[1:] - found.covered[:-1] >= 0).all())
    with torch.no_grad():
        teacher[1].bias[0] = torch.nan
    with (
        open_writer(tmp_path / "t", vocab=40, n=12) as writer,
        pytest.raises(ValueError, match="model must return rows whose largest logit is finite"),
    ):
        ll.store.capture(teacher, [batch], writer, head="1")
    with (
        ll.store.Writer(tmp_path / "u", vocab_size=40, k=12) as writer,
        pytest.raises(ValueError, match="generator must be None unless the writer has values"),
    ):
        ll.store.capture(teacher, [batch], writer, head="1", generator=torch.Generator())
