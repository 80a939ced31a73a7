"""The teacher store: what is written is read, found by its tokens, small, fast."""

import math
import pickle
import time

import pytest
import stores
import torch
from forked import FORKED
from stores import K, V, assert_near, document, documents, kl
from torch.utils.data import DataLoader

import logitless as ll
from logitless.store import Header, Store, Writer, merge
from logitless.store import format as _format
from logitless.store import shard as _shard

LENGTHS = (100, 1, 37, 64, 3)


@pytest.fixture
def some(tmp_path):
    found = documents(*LENGTHS)
    return found, stores.write(tmp_path / "store", found)


class TestRoundTrip:
    @pytest.mark.parametrize("values", ["u8", "f16"])
    @pytest.mark.parametrize("vocab", [2, 3, 255, 256, 257, 4096, 151_936, 2**31 + 1, 2**32])
    @pytest.mark.parametrize("k", [1, 2, 7, 8])
    def test_any_vocabulary(self, vocab, k, values, tmp_path):
        if k > vocab:
            with pytest.raises(ValueError, match="k must lie in"):
                Header(vocab, k)
            return
        want = stores.teacher(5, vocab, k)
        ids = want.ids.clone()
        ids[0, 0] = vocab - 1  # the largest there is
        want = ll.SparseTargets(ids, want.logprobs, want.tail)
        tokens = torch.tensor([0, vocab - 1, 1, vocab // 2, vocab - 1])
        store = stores.write(tmp_path, [(tokens, want)], vocab_size=vocab, k=k, values=values)
        got_tokens, got = store[0]
        assert torch.equal(got_tokens, tokens)
        assert got.ids.dtype == (torch.int64 if vocab > 2**31 else torch.int32)
        assert torch.equal(got.tail, want.tail)
        assert got.mask is None
        assert_near(got, want, 1e-5 if values == "f16" else 1e-4)
        if k == 1:
            assert_near(got, want, 1e-6)

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


def test_bytes_a_token(tmp_path):
    store = stores.write(
        tmp_path, documents(512, 100, 1000, vocab=151_936, k=64), vocab_size=151_936, k=64
    )
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size / store.tokens <= 220


@pytest.mark.parametrize("steep", [0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0])
def test_kl_of_the_round_trip(steep):
    """Nats, mean of rows, K = 64; the whole divergence, not only its size."""
    want = stores.teacher(2000, 151_936, 64, steep=steep)
    header = Header(151_936, 64)
    got = _format.decoded(_format.encoded(want, header), header)
    error = kl(want, got)
    assert error.abs().mean() <= 2e-5
    assert error.min() > -1e-6  # mass is kept: a divergence, and none that cancels


class TestSpeed:
    """On one core, of which this process may not have all: its own time is counted."""

    @pytest.fixture(scope="class")
    @classmethod
    def packed(cls, tmp_path_factory):
        """A document of 8,192 tokens, and 64 that fill as many."""
        path = tmp_path_factory.mktemp("speed") / "store"
        header = Header(151_936, 64)
        rows = _format.encoded(stores.teacher(8192, 151_936, 64), header)
        parts = [torch.randint(0, 151_936, (128,)) for _ in range(64)]
        with Writer(path, vocab_size=151_936, k=64) as writer:
            writer.append(torch.randint(0, 151_936, (8192,)), rows)
            for i, tokens in enumerate(parts):
                part = {name: t[128 * i : 128 * (i + 1)] for name, t in rows.items()}
                writer.append(tokens, part)
        return Store(path), torch.cat(parts)

    def best(self, call) -> float:
        """Milliseconds."""
        torch.set_num_threads(1)
        times = []
        for _ in range(10):
            begin = time.process_time()
            call()
            times.append(time.process_time() - begin)
        return 1e3 * min(times)

    def test_a_slice_of_8192_tokens(self, packed):
        store, _ = packed
        assert self.best(lambda: store[0, 0:8192]) < 5

    @pytest.mark.parametrize("rows", [1, 8])
    @pytest.mark.parametrize("known", [True, False])
    def test_a_packed_batch(self, packed, rows, known):
        store, tokens = packed
        lengths = [[128] * (64 // rows)] * rows if known else None
        batch = tokens.view(rows, -1)
        assert self.best(lambda: store.targets_for(batch, lengths)) < 20
        assert torch.equal(store.targets_for(batch, lengths).ids.view(-1, 64), store[0][1].ids)

    def test_a_hundred_million_tokens_are_open_in_a_second(self, tmp_path):
        """Their files are holes but for where documents begin: what opening reads is all there."""
        header = Header(151_936, 64)
        _shard.write_header(tmp_path, header)
        tokens, each = 1_200_000, 1000
        sparse_shard(tmp_path / "0-000000.safetensors", header, tokens, each)
        for i in range(1, 84):
            (tmp_path / f"0-{i:06}.safetensors").hardlink_to(tmp_path / "0-000000.safetensors")
        begin = time.perf_counter()
        store = Store(tmp_path)
        assert time.perf_counter() - begin < 1
        assert store.tokens == 100_800_000
        assert len(store) == 84 * tokens // each
        assert store[50_000][0].shape == (each,)


def sparse_shard(path, header, tokens, each):
    import json

    from logitless.targets import safetensors as _safetensors

    shapes = {name: (d, (tokens, *shape)) for name, (d, shape) in header.layout().items()}
    shapes |= {"starts": (torch.int64, (tokens // each + 1,))}
    shapes |= {"index.hash": (torch.int64, (7 * tokens // each,))}
    shapes |= {"index.doc": (torch.int32, (7 * tokens // each,))}
    for width, dtype in _format.widths(header.bits):
        shapes[f"tokens.{width}"] = (
            dtype or torch.uint8,
            (_format.packed_length(tokens, width),),
        )
    names = {dtype: name for name, dtype in _safetensors.DTYPES.items()}
    about = {"format": "logitless.store", "version": "1", "header": header.to_json()}
    text, end = {"__metadata__": about}, 0
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        text[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [begin, end]}
    data = json.dumps(text).encode()
    data += b" " * (-len(data) % 8)
    with open(path, "wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + end)
        file.seek(8 + len(data) + text["starts"]["data_offsets"][0])
        starts = torch.arange(0, tokens + 1, each)
        file.write(_safetensors.buffer(starts))


class TestFinding:
    def test_a_document(self, some):
        found, store = some
        assert [store.find(tokens) for tokens, _ in found] == list(range(len(found)))
        assert store.find(found[2][0].tolist()) == 2
        for other in (found[0][0][:50], torch.cat([found[0][0], found[1][0]]), [5]):
            with pytest.raises(KeyError, match="tokens must be those of a document"):
                store.find(other)

    def test_a_beginning_is_another_document(self, tmp_path):
        tokens, targets = document(64)
        found = [(tokens[:n], targets[:n]) for n in (64, 16, 4, 1, 20)]
        store = stores.write(tmp_path, found)
        assert [store.find(t) for t, _ in found] == list(range(5))

    def test_rows_padded(self, some):
        found, store = some
        batch = torch.full((3, 110), 7)
        for row, (tokens, _) in zip(batch, found, strict=False):
            row[: len(tokens)] = tokens
        for lengths in (None, LENGTHS[:3], torch.tensor(LENGTHS[:3]), [[n] for n in LENGTHS[:3]]):
            got = store.targets_for(batch, lengths)
            assert got.shape == (3, 110)
            for row, (tokens, want) in enumerate(found[:3]):
                n = len(tokens)
                assert_near(got[row, :n], want)
                assert not got.mask[row, n:].any()
                assert got.mask[row, :n].all()

    def test_rows_packed_and_cut_off(self, some):
        """Two rows: documents 2, 0 and the beginning of 3; document 4, then 0, cut off."""
        found, store = some
        tokens = [t for t, _ in found]
        one = torch.cat([tokens[2], tokens[0], tokens[3]])[:150]
        two = torch.cat([tokens[4], tokens[0], torch.full((47,), 9)])
        batch = torch.stack([one, two]).view(2, 1, 150)
        want = ll.SparseTargets.cat([found[i][1] for i in (2, 0, 3)])[:150]
        for lengths in (None, [[37, 100, 13], [3, 100]]):
            got = store.targets_for(batch, lengths)
            assert got.shape == (2, 1, 150)
            assert_near(got[0, 0], want)
            assert_near(got[1, 0, 3:103], found[0][1])
            assert not got.mask[1, 0, 103:].any()
        assert store.for_tokens(one).shape == (150,)
        assert_near(store.targets_for(one, [37, 100, 13]), want)

    def test_any_beginning(self, some):
        found, store = some
        for n in range(1, 101):
            assert_near(store.targets_for(found[0][0][:n]), found[0][1][:n])
            assert_near(store.targets_for(found[0][0][:n], [n]), found[0][1][:n])

    def test_many_documents_that_begin_alike(self, tmp_path):
        """As behind one system prompt."""
        prompt, _ = document(80)
        found = [
            (torch.cat([prompt, document(20, seed)[0]]), stores.teacher(100, seed=seed))
            for seed in range(1, 60)
        ]
        store = stores.write(tmp_path, found, shard_bytes=40_000)
        assert len(store.shards) > 1
        batch = torch.stack([tokens for tokens, _ in found])
        assert_near(
            store.targets_for(batch).reshape(-1), ll.SparseTargets.cat([t for _, t in found])
        )
        assert_near(store.targets_for(batch[7, :90]), found[7][1][:90])
        with pytest.raises(KeyError):
            store.targets_for(torch.cat([prompt, document(20, 99)[0]]))

    def test_what_is_not_there(self, some):
        found, store = some
        tokens = found[0][0].clone()
        tokens[60] += 1
        for batch, lengths, message in (
            (tokens, None, "must hold documents of the store, whole or cut off at their end, got"),
            (tokens, [100], "100 tokens long, at token 0 of row 0. Tokenise as the capture did"),
            (found[2][0], [30, 7], "7 tokens long, at token 30 of row 0"),
            (torch.zeros(2, 5).long(), None, "Padding comes after the documents of a row"),
        ):
            with pytest.raises(KeyError, match=message):
                store.targets_for(batch, lengths)
        row = torch.cat([found[1][0], torch.tensor([1]), found[2][0]])
        message = rf"at token {len(found[1][0])} of row 1\. Separators, and whatever"
        with pytest.raises(KeyError, match=message):
            store.targets_for(torch.stack([torch.full_like(row, -1), row]))

    def test_nothing(self, some):
        _, store = some
        assert store.targets_for(torch.empty(2, 0).long()).shape == (2, 0)
        assert not store.targets_for(torch.zeros(1, 4).long(), [[]]).mask.any()
        with pytest.raises(
            ValueError, match="input_ids must have tokens in its last dimension, got shape"
        ):
            store.targets_for(torch.tensor(1))
        with pytest.raises(ValueError, match="lengths must have an entry for each of 2 rows"):
            store.targets_for(torch.zeros(2, 5).long(), [1])
        with pytest.raises(ValueError, match="lengths must add up to at most 5 tokens per row"):
            store.targets_for(torch.zeros(2, 5).long(), [6, 1])

    def test_numbers(self, some):
        _, store = some
        assert len(store) == 5
        assert store.lengths.tolist() == list(LENGTHS)
        assert store.tokens == sum(LENGTHS)
        with pytest.raises(IndexError, match=r"a document's number must be in \[0, 5\), got 5"):
            store[5]
        with pytest.raises(TypeError, match="a document must be named by its number, got 'a'"):
            store["a"]
        with pytest.raises(IndexError, match="a range of tokens must be a slice of step 1, got 3"):
            store[0, 3]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_data_loader(self, some, workers):
        _, store = some
        how = {"multiprocessing_context": FORKED} if workers else {}
        loader = DataLoader(Three(store), batch_size=3, num_workers=workers, **how)
        ((tokens, targets),) = loader
        assert tokens.shape == (3, 3)
        assert targets.shape == (3, 3)
        again = pickle.loads(pickle.dumps(store))
        assert torch.equal(again[0][0], store[0][0])


class Three:
    """The last three tokens of the longer documents."""

    def __init__(self, store):
        self.store, self.which = store, [0, 2, 3]

    def __len__(self):
        return 3

    def __getitem__(self, i):
        n = int(self.store.lengths[self.which[i]])
        return self.store[self.which[i], n - 3 : n]


class TestVerify:
    def text(self, n, seed=0):
        """A document whose teacher gives most to its next token."""
        tokens, targets = document(n, seed)
        ids = targets.ids.clone()
        ids[:-1, 0] = tokens[1:]
        return tokens, ll.SparseTargets(ids, targets.logprobs, targets.tail)

    def test_a_good_one(self, tmp_path):
        report = stores.write(tmp_path, [self.text(100, i) for i in range(5)]).verify()
        assert report
        assert report.problems == []
        assert report.label_logprob[0] > report.label_logprob[1] + 1
        assert "500 tokens" in str(report)
        assert "right" in str(report)

    @pytest.mark.parametrize("shift", [-1, 1])
    def test_one_shifted_by_a_token(self, shift, tmp_path):
        found = []
        for i in range(3):
            tokens, targets = self.text(50, i)
            found.append((tokens, targets[torch.arange(50).roll(shift)]))
        report = stores.write(tmp_path, found).verify()
        assert not report
        assert f"offset {-shift:+d}" in report.problems[0]
        assert "must be of the next token" in report.problems[0]

    def test_one_of_no_relation_is_not_called_shifted(self, some):
        assert some[1].verify()

    def test_a_changed_byte(self, some):
        _, store = some
        path = store.shards[0].path
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        report = Store(store.path).verify()
        assert not report
        assert "must have the bytes it was written with (SHA-256)" in report.problems[0]

    def test_mass_and_tokens(self, tmp_path):
        tokens, targets = document(10)
        with Writer(tmp_path, vocab_size=V, k=K) as writer:
            rows = _format.encoded(targets, writer.header)
            rows["top"] = rows["top"] + 1
            writer.append(tokens + 10, rows)
        report = Store(tmp_path).verify()
        assert any("must have masses of at most 1, got" in p for p in report.problems)
        with Writer(tmp_path / "b", vocab_size=V, k=K) as writer:
            writer.append(torch.full((10,), 1023), _format.encoded(targets, writer.header))
        report = Store(tmp_path / "b").verify()
        assert any("must have tokens below 1000, got 1023" in p for p in report.problems)

    def test_an_empty_one(self, tmp_path):
        store = stores.write(tmp_path, [])
        assert store.verify()
        assert (len(store), store.tokens, len(store.lengths)) == (0, 0, 0)
        with pytest.raises(KeyError):
            store.find([1])


class TestMerge:
    def test_workers_and_doubles(self, tmp_path):
        found = documents(*LENGTHS)
        for part in range(3):
            with Writer(tmp_path / "many", vocab_size=V, k=K, part=part) as writer:
                for tokens, targets in found[part::3]:
                    writer.add(tokens, targets)
        many = Store(tmp_path / "many")
        assert len(many.shards) == 3
        again = stores.write(tmp_path / "again", found[:2])
        assert merge(tmp_path / "one", [many, again.path]) == 5
        one = Store(tmp_path / "one")
        assert len(one.shards) == 1
        for tokens, _ in found:
            (_, got), (_, want) = one[one.find(tokens)], many[many.find(tokens)]
            assert torch.equal(got.logprobs, want.logprobs)
            assert torch.equal(got.ids, want.ids)
        assert one.verify()
        assert merge(tmp_path / "small", [one], shard_bytes=100) == 5
        assert len(Store(tmp_path / "small").shards) > 2

    def test_others_are_refused(self, tmp_path):
        one = stores.write(tmp_path / "one", documents(3))
        two = stores.write(tmp_path / "two", documents(3), teacher="another")
        with pytest.raises(ValueError, match="two must have teacher '' to match "):
            merge(tmp_path / "out", [one, two])
        with pytest.raises(ValueError, match="stores must name at least one store, got none"):
            merge(tmp_path / "out", [])


class TestArguments:
    @pytest.mark.parametrize(
        ("how", "kind", "message"),
        [
            ({"vocab_size": 0}, ValueError, r"vocab_size must lie in \[1, 4294967296\], got 0"),
            ({"vocab_size": 1.0}, TypeError, "vocab_size must be a whole number, got 1.0"),
            ({"k": 1001}, ValueError, r"k must lie in \[1, 1000\], got 1001"),
            ({"values": "u4"}, ValueError, "values must be one of 'u8', 'f16', got 'u4'"),
            ({"teacher": 3}, TypeError, "teacher must be a string of at most 1000 characters"),
            ({"temperature": 0}, ValueError, "temperature must be in"),
            ({"part": -1}, ValueError, "part must lie in"),
            ({"shard_bytes": 0}, ValueError, "shard_bytes must lie in"),
            ({"tail": 1}, TypeError, "Writer must be given arguments among .* got 'tail'"),
        ],
    )
    def test_of_a_writer(self, how, kind, message, tmp_path):
        with pytest.raises(kind, match=message):
            Writer(tmp_path / "store", **({"vocab_size": V, "k": K} | how))
        assert not (tmp_path / "store").exists()

    def test_of_a_document(self, tmp_path):
        tokens, targets = document(4)
        with Writer(tmp_path, vocab_size=V, k=K) as writer:
            for bad, good, message in [
                (tokens[:3], targets, "targets must have one row for each of the 3 tokens"),
                (tokens[:0], targets[:0], "tokens must be those of one document, of shape"),
                (tokens.view(2, 2), targets, "tokens must be those of one document"),
                (tokens + V, targets, "tokens must be ids of a vocabulary of 1000"),
                (tokens, stores.teacher(4, k=9), "targets must have at most the store's 8 slots"),
                (
                    tokens,
                    ll.SparseTargets(targets.ids + V, targets.logprobs),
                    "targets.ids must be in the vocabulary of 1000",
                ),
                (
                    tokens,
                    ll.SparseTargets(targets.ids, targets.logprobs * math.nan),
                    "targets.logprobs must be logarithms of probabilities, got nan",
                ),
                (
                    tokens,
                    ll.SparseTargets(targets.ids, targets.logprobs, targets.tail * math.nan),
                    "targets.tail must be the logarithm of a mass, got nan",
                ),
            ]:
                with pytest.raises(ValueError, match=message):
                    writer.add(bad, good)
            with pytest.raises(TypeError, match="targets must be SparseTargets"):
                writer.add(tokens, targets.logprobs)
            with pytest.raises(TypeError, match="tokens must hold integers"):
                writer.add(tokens.float(), targets)
            assert len(writer) == 0
        with pytest.raises(
            ValueError, match="a writer must be open to add documents, got a closed writer"
        ):
            writer.add(tokens, targets)

    def test_another_tokenizer_is_refused(self, tmp_path):
        stores.write(tmp_path, documents(3), tokenizer="abc")
        assert Store(tmp_path, tokenizer="abc").info.tokenizer == "abc"
        assert len(Store(tmp_path)) == 1
        with pytest.raises(ValueError, match="the tokenizer it was made with, whose hash is 'abc'"):
            Store(tmp_path, tokenizer="abd")
        with pytest.raises(
            ValueError, match="must have tokenizer 'xyz' to match this writer, got 'abc'"
        ):
            stores.write(tmp_path, [], tokenizer="xyz")

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="file must be a folder, or not exist yet, got a file"):
            stores.write(tmp_path / "file", [])

    def test_no_store(self, tmp_path):
        with pytest.raises(ValueError, match=r"must be a folder with a store\.json, got none"):
            Store(tmp_path)
