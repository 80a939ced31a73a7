"""Documents of the store are found by their tokens."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

import logitless as ll
from logitless.store import batch_targets
from tests.support import stores
from tests.support.forked import FORKED
from tests.support.stores import LENGTHS, assert_near, document


class TestFinding:
    def test_a_document(self, some):
        found, store = some
        assert [store.find(tokens) for tokens, _ in found] == list(range(len(found)))
        assert store.find(found[2][0].tolist()) == 2
        for other in (found[0][0][:50], torch.cat([found[0][0], found[1][0]]), [5]):
            with pytest.raises(KeyError, match="tokens must be a document of the store"):
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

    def test_a_row_of_padding_before_other_rows(self, some):
        """The targets of the next row were returned for the row of padding."""
        found, store = some
        batch = torch.full((4, 100), -1)
        batch[1, :37], batch[3] = found[2][0], found[0][0]
        mask = (batch >= 0).int()
        for got in (
            store.targets_for(batch),
            store.targets_for(batch, [0, 37, 0, 100]),
            batch_targets(store, {"input_ids": batch.clamp_min(0), "attention_mask": mask}),
        ):
            assert torch.equal(got.mask.any(-1), mask.bool())
            assert_near(got[1, :37], found[2][1])
            assert_near(got[3], found[0][1])

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
        message = rf"at token {len(found[1][0])} of row 1\. Capture separators"
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
        with pytest.raises(ValueError, match="at least 0 and add up to at most 5 tokens per row"):
            store.targets_for(torch.zeros(2, 5).long(), [6, 1])

    def test_lengths_that_are_none(self, some):
        _, store = some
        for lengths in (2, torch.tensor(2), "ab", 1.5):
            with pytest.raises(
                TypeError, match="lengths must be a list or a tensor with one entry per row, got"
            ):
                store.targets_for(torch.zeros(2, 5).long(), lengths)
        with pytest.raises(TypeError, match=r"lengths must be whole numbers, got 1\.5"):
            store.targets_for(torch.zeros(2, 5).long(), [1.5, 2])

    def test_numbers(self, some):
        _, store = some
        assert len(store) == 5
        assert store.lengths.tolist() == list(LENGTHS)
        assert store.tokens == sum(LENGTHS)
        with pytest.raises(IndexError, match=r"a document's number must be in \[0, 5\), got 5"):
            store[5]
        with pytest.raises(TypeError, match="a document must be selected by its number, got 'a'"):
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
