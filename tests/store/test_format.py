"""The format of the store: what is written is read, and small."""

import json
import math

import pytest
import torch

import logitless as ll
from logitless.store import Header, Store, merge
from logitless.store import codes as _codes
from logitless.store.format import IN_TORCH, library
from tests.support import stores
from tests.support.stores import V, assert_near, document, documents, kl


class TestRoundTrip:
    @pytest.mark.parametrize("values", ["u8", "f16"])
    @pytest.mark.parametrize("vocab", [2, 3, 255, 256, 257, 4096, 151_936, 2**31 + 1, 2**32])
    def test_any_vocabulary(self, vocab, values, tmp_path):
        for k in (k for k in (1, 2, 7, 8) if k <= vocab):
            want = stores.teacher(5, vocab, k)
            ids = want.ids.clone()
            ids[0, 0] = vocab - 1  # the largest there is
            want = ll.SparseTargets(ids, want.logprobs, want.tail)
            tokens = torch.tensor([0, vocab - 1, 1, vocab // 2, vocab - 1])
            how = {"vocab_size": vocab, "k": k, "values": values}
            got_tokens, got = stores.write(tmp_path / str(k), [(tokens, want)], **how)[0]
            assert torch.equal(got_tokens, tokens)
            assert got.ids.dtype == (torch.int64 if vocab > 2**31 else torch.int32)
            assert torch.equal(got.tail, want.tail)
            assert got.mask is None
            most = 1e-5 if values == "f16" else 1e-4
            assert_near(got, want, 1e-6 if k == 1 else most)

    @pytest.mark.parametrize("values", ["u8", "f16"])
    def test_masked_slots_zeros_and_rows_without_a_teacher(self, values, tmp_path):
        inf = math.inf
        logprobs = torch.tensor([[-3.0, -1.0, -2.0], [-1.0, -inf, -2.0], [-1.0, -1.0, -9.0]])
        mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
        ids = torch.tensor([[5, 6, -1], [7, 8, 9], [-1, -1, -1]])
        given = ll.SparseTargets(ids, logprobs, torch.full((3,), -2.5), mask)
        _, got = stores.write(tmp_path, [(torch.arange(3), given)], k=4, values=values)[0]
        assert got.mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
        assert got.ids.tolist() == [[6, 5, 0, 0], [7, 9, 8, 0], [0, 0, 0, 0]]
        want = torch.tensor([[-1, -3, -inf, -inf], [-1, -2, -inf, -inf], [-inf] * 4])
        assert torch.equal(got.logprobs == -inf, want == -inf)
        assert (got.logprobs - want)[want > -inf].abs().max() < 0.01
        assert got.tail.tolist() == [-2.5, -2.5, 0.0]
        logits = torch.randn(3, V, requires_grad=True)
        ll.topk_distill(logits, got, divergence="forward_kl", support="tail").backward()
        assert logits.grad.isfinite().all()

    def test_a_tail_that_is_not_given_is_what_is_left(self, tmp_path):
        want = stores.teacher(4)
        given = ll.SparseTargets(want.ids, want.logprobs)
        _, got = stores.write(tmp_path, [(torch.arange(4), given)])[0]
        assert (got.tail - want.tail).abs().max() < 1e-5

    def test_sixteen_bits_and_gradients_are_taken(self, tmp_path):
        want = stores.teacher(4)
        given = ll.SparseTargets(want.ids.int(), want.logprobs.bfloat16().requires_grad_())
        _, got = stores.write(tmp_path, [(list(range(4)), given)])[0]
        assert (got.logprobs - want.logprobs).abs().max() < 0.05

    def test_extreme_ranges(self, tmp_path):
        """-1e-9 beside -100, all alike, far below."""
        logprobs = torch.tensor([[-1e-9, -100.0], [-0.7, -0.7], [-80.0, -81.0], [-5.0, -1e4]])
        given = ll.SparseTargets(torch.tensor([[1, 2]] * 4), logprobs, torch.full((4,), -99.0))
        _, got = stores.write(tmp_path, [(torch.arange(4), given)], k=2)[0]
        near = (got.logprobs - logprobs).abs()
        assert near[:3].max() < 0.3
        assert near[0, 0] < 1e-6
        assert near[1].max() < 1e-6
        assert near[3, 0] < 1e-6
        assert got.logprobs[3, 1] < -100  # as good as never

    def test_a_range_of_tokens(self, some):
        found, store = some
        whole_tokens, whole = store[0]
        for a, b in ((0, 100), (3, 70), (99, 100), (5, 5), (-20, None), (50, 1000)):
            tokens, got = store[0, a:b]
            assert torch.equal(tokens, whole_tokens[a:b])
            assert torch.equal(got.ids, whole.ids[a:b])
            assert torch.equal(got.logprobs, whole.logprobs[a:b])
        assert torch.equal(store[-1][0], found[-1][0])

    def test_what_was_read_is_its_reader_s_own(self, some):
        _, store = some
        for t in (store[0][1].tail, store[0][1].logprobs, store[0][0]):
            t.fill_(0)
        assert store[0][1].tail.max() < 0
        assert store.verify()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_has_no_effect(dtype, tmp_path):
    """Documents without a tail could not be recovered, and targets were read in fp64."""
    full = stores.teacher(100)
    found = [
        (document(n, n)[0], ll.SparseTargets(full.ids[:n], full.logprobs[:n])) for n in (5, 100)
    ]
    want = stores.write(tmp_path / "want", found)
    torch.set_default_dtype(dtype)
    library.cache_clear()
    _codes._distances.cache_clear()
    try:
        got = stores.write(tmp_path / "got", found)
        for (_, a), (_, b) in zip((got[0], got[1]), (want[0], want[1]), strict=True):
            assert a.logprobs.dtype == a.tail.dtype == torch.float32
            assert torch.equal(a.logprobs, b.logprobs)
            assert torch.equal(a.tail, b.tail)
        assert got.verify()
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_device_has_no_effect(tmp_path):
    """Reading raised errors of PyTorch about two devices."""
    found = documents(5, 100, 30)
    batch = torch.cat([tokens for tokens, _ in found])
    stores.write(tmp_path / "a", found[:2])
    with torch.device("meta"):  # as torch.set_default_device("cuda") on a machine with a GPU
        with stores.open_writer(tmp_path / "b") as writer:
            assert writer.add(*found[2])
            assert found[2][0].tolist() in writer
        assert merge(tmp_path / "c", [tmp_path / "a", tmp_path / "b"]) == 3
        store = Store(tmp_path / "c")
        assert store.verify()
        assert [store.find(tokens) for tokens, _ in found] == [0, 1, 2]
        got = store.targets_for(batch, documents=[0, 1, 2])
        assert store.lengths.tolist() == [5, 100, 30]
    assert_near(got, ll.SparseTargets.cat([targets for _, targets in found]))


def test_bytes_a_token(tmp_path):
    store = stores.write(
        tmp_path, documents(512, 100, 1000, vocab=151_936, k=64), vocab_size=151_936, k=64
    )
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size / store.tokens <= 225
    assert store.info.token_bytes() == 224


def assert_kl_is_small(want):
    """Nats, mean of rows, K = 64; the whole divergence, not only its size."""
    header = Header(151_936, 64)
    got = _codes.decoded(_codes.encoded(want, header), header)
    error = kl(want, got)
    assert error.abs().mean() <= 2e-5
    assert error.min() > -1e-6  # mass is kept: a divergence, and none that cancels
    return got


@pytest.mark.parametrize("steep", [0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0])
def test_kl_of_the_round_trip(steep):
    assert_kl_is_small(stores.teacher(2000, 151_936, 64, steep=steep))


@pytest.mark.parametrize("steep", [0.7, 1.5, 4.0])
def test_kl_does_not_depend_on_the_lowest_slots(steep):
    """As in masked vocabularies, or of a server's "never"."""
    given = stores.teacher(500, 151_936, 64, steep=steep)
    for slots, lowest in ((1, -20.0), (1, -50.0), (1, -9999.0), (8, -100.0), (32, -9999.0)):
        logprobs = given.logprobs.clone()
        logprobs[:, -slots:] = lowest
        got = assert_kl_is_small(ll.SparseTargets(given.ids, logprobs, given.tail))
        low = got.logprobs[:, -slots:]
        assert ((low < 0.7 * lowest) & (low > 1.4 * lowest)).all()  # about as low as it was


@pytest.mark.parametrize("values", ["u8", "f16"])
@pytest.mark.parametrize("vocab", [2, 1000, 2**24, 2**32])
def test_the_same_without_numpy(vocab, values, monkeypatch):
    header, given = Header(vocab, min(vocab, 9), values), stores.teacher(700, vocab, min(vocab, 9))
    mask = torch.ones_like(given.ids, dtype=torch.bool)
    given.logprobs[::3, -1], mask[5, -1:], mask[7] = -50.0, False, False
    targets = ll.SparseTargets(given.ids, given.logprobs, given.tail, mask)
    rows = _codes.encoded(targets, header)
    monkeypatch.setattr(_codes, "SLOTS", 300 * header.k)
    want = [_codes.decoded(rows[a:], header) for a in (0, 600, 700)]
    monkeypatch.setattr(_codes, "library", lambda: IN_TORCH)
    got = [_codes.decoded(rows[a:], header) for a in (0, 600, 700)]
    for a, b in zip(got, want, strict=True):
        stores.assert_equal((rows, a), (rows, b))
        assert all(t.is_contiguous() for t in vars(b).values() if t is not None)
    assert torch.equal(got[0].mask, mask)
    assert got[1].mask is got[2].mask is None


@pytest.mark.parametrize("values", ["u8", "f16", "counts"])
def test_a_document_is_read_to_the_cpu(values, tmp_path, monkeypatch):
    tokens, targets = document(5)
    if values == "counts":
        targets = ll.capture_sampled(torch.randn(5, V), stores.K)
    store = stores.write(tmp_path, [(tokens, targets)], values=values)
    want = store[0], store[0, 1:3]
    for lib in (library(), IN_TORCH):
        monkeypatch.setattr(_codes, "library", lambda lib=lib: lib)
        with torch.device("meta"):  # as torch.set_default_device("cuda")
            got = store[0], store[0, 1:3], store[0, 2:2]
        for a, b in zip(got, want, strict=False):
            stores.assert_equal(a, b)
        assert [len(t) for t in got[2]] == [0, 0]


def test_rows_do_not_depend_on_those_beside_them():
    """Few rows try all units in one pass, and many one after the other."""
    header, many = Header(151_936, 64), stores.teacher(2000, 151_936, 64)
    one = _codes.encoded(many[:5], header)
    assert torch.equal(_codes.encoded(many, header)[:5], one)


def test_an_older_store_is_refused(tmp_path):
    """Version 2 had the header alone in store.json."""
    fields = {"vocab_size": V, "k": 8, "values": "u8", "alignment": "next"}
    (tmp_path / "store.json").write_text(json.dumps(fields))
    message = r"store\.json must be a store of version 5 .* got 'an older version'\. Capture the"
    for opened in (lambda: Store(tmp_path), lambda: stores.open_writer(tmp_path)):
        with pytest.raises(ValueError, match=message):
            opened()
