"""Documents are found by their numbers, or by their tokens."""

import os
import pickle
import random

import pytest
import torch
from torch.utils.data import DataLoader

import logitless as ll
from logitless.store import Store, batch_targets, lookup
from logitless.store.lookup import FIRST, RunFile, extended
from logitless.store.shard import File
from tests.support import stores
from tests.support.forked import FORKED
from tests.support.stores import LENGTHS, assert_equal, assert_near, document, documents


def prompted(n, shared=70, total=76):
    """Documents of which the first tokens are the same."""
    prompt, _ = document(shared)
    ends = [document(total - shared, seed)[0] for seed in range(1, n + 1)]
    return [(torch.cat([prompt, end]), stores.teacher(total, seed=i)) for i, end in enumerate(ends)]


class TestNumbers:
    def test_one_per_row(self, some):
        found, store = some
        batch = torch.full((3, 70), 5)
        batch[0], batch[1, :37], batch[2, :3] = found[0][0][:70], found[2][0], found[4][0]
        for numbers in ([0, 2, 4], torch.tensor([0, 2, 4]), [[0], [2], [4]], (-5, -3, -1)):
            got = store.targets_for(batch, documents=numbers)
            assert got.mask.any(-1).sum(-1).tolist() == [70, 37, 3]
            for row, (number, n) in enumerate(((0, 70), (2, 37), (4, 3))):
                assert_near(got[row, :n], found[number][1][:n])

    def test_packed(self, some):
        """Even documents of one token, cut off at the end of a row, and the same one twice."""
        found, store = some
        one = torch.cat([found[i][0] for i in (1, 4, 2, 1)] + [found[0][0][:8]])
        two = torch.nn.functional.pad(found[2][0], (0, len(one) - 37), value=3)
        batch, of_rows = torch.stack([one, two]), [[1, 4, 2, 1, 0], [2]]
        lengths = [[1, 3, 37, 1, 8], [37]]
        want = store.targets_for(batch, lengths, of_rows)
        for got in (
            store.targets_for(batch, documents=of_rows),
            store.targets_for(batch, lengths, [1, 4, 2, 1, 0, 2]),
        ):
            assert torch.equal(got.logprobs, want.logprobs)
            assert torch.equal(got.mask, want.mask)
        assert_near(want[0, 4:41], found[2][1])
        assert_near(want[0, 42:], found[0][1][:8])
        assert want[1].mask.any(-1).sum() == 37

    def test_a_wrong_number_is_an_error(self, some):
        found, store = some
        batch = found[0][0][None]
        with pytest.raises(
            ValueError, match="input_ids must have the tokens of document 3 of the store"
        ):
            store.targets_for(batch, documents=[3])
        changed = batch.clone()
        changed[0, 42] += 1
        with pytest.raises(ValueError, match="got another at token 42 of row 0"):
            store.targets_for(changed, documents=[0])
        with pytest.raises(ValueError, match="lengths must be at most 37 for document 2 in row 0"):
            store.targets_for(batch, [100], [2])
        for numbers, kind, message in (
            ([5], IndexError, r"a document's number must be in \[0, 5\), got 5"),
            ([1.5], TypeError, "a document must be selected by its number, got 1.5"),
            (7, TypeError, "documents must be a list or a tensor of numbers, got 7"),
            ([[1], [2]], ValueError, "documents must have an entry for each of 1 rows, got 2"),
        ):
            with pytest.raises(kind, match=message):
                store.targets_for(batch, documents=numbers)
        with pytest.raises(ValueError, match="name the 2 documents whose lengths row 0 has, got 1"):
            store.targets_for(batch, [[50, 50]], [[0]])

    def test_several_at_once(self, some):
        _, store = some
        for numbers in ([3, 0, 3], torch.tensor([4, -1]), [2], []):
            got = store[numbers]
            assert len(got) == len(numbers)
            for i, one in zip(numbers, got, strict=True):
                assert_equal(one, store[int(i)])
        with pytest.raises(IndexError, match=r"in \[0, 5\), got 5"):
            store[[1, 5]]

    @pytest.mark.parametrize("inner", ["padded", "packed"])
    def test_the_collator(self, inner, some):
        """Samples carry their numbers, which the inner collator does not see."""
        found, store = some

        def collate(samples):
            assert all(sample.keys() == {"input_ids"} for sample in samples)
            tokens = [sample["input_ids"] for sample in samples]
            if inner == "padded":
                return {"input_ids": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)}
            places = torch.cat([torch.arange(len(t)) for t in tokens])
            return {"input_ids": torch.cat(tokens)[None], "position_ids": places[None]}

        samples = [{"input_ids": found[i][0], "document": i} for i in (2, 4, 1)]
        got = ll.store.Collator(store, collate)(samples)["targets"]
        flat = got.reshape(-1) if inner == "packed" else got
        for at, i in enumerate((2, 4, 1)):
            n = LENGTHS[i]
            of_one = flat[at, :n] if inner == "padded" else flat[(0, 37, 40)[at] :][:n]
            assert_near(of_one, found[i][1])
        again = ll.store.Collator(store, collate)([{"input_ids": found[2][0]}])
        assert_near(again["targets"].reshape(-1), found[2][1])


class TestFinding:
    def test_a_document(self, some):
        found, store = some
        for i, (tokens, _) in enumerate(found):
            assert store.find(tokens) == i
            assert store.find(tokens.tolist()) == i
        for tokens in (found[0][0][:50], found[0][0].flip(0), [7]):
            with pytest.raises(KeyError, match="tokens must be a document of the store, got"):
                store.find(tokens)

    def test_a_row_is_a_document_and_padding(self, some):
        found, store = some
        for n in (1, 3, 37, 64, 100):
            tokens, want = next(one for one in found if len(one[0]) == n)
            for padding in (0, 1, 20):
                for value in (-1, 0, int(tokens[-1])):
                    row = torch.nn.functional.pad(tokens, (0, padding), value=value)
                    got = store.targets_for(row[None])[0]
                    assert_near(got[:n], want)
                    assert padding == 0 or got.mask.any(-1).sum() == n

    def test_a_beginning_of_at_least_32_tokens(self, some):
        found, store = some
        tokens, want = found[0]
        for n in range(FIRST, 101):
            assert_near(store.targets_for(tokens[:n]), want[:n])
            assert_near(store.targets_for(tokens[:n], [n]), want[:n])
        with pytest.raises(KeyError, match="found by its first 32 tokens, or by `documents`"):
            store.targets_for(tokens[:31], [31])

    def test_lengths(self, some):
        found, store = some
        row = torch.cat([found[2][0], found[0][0], found[3][0][:40]])
        want = ll.SparseTargets.cat([found[2][1], found[0][1], found[3][1][:40]])
        for lengths in ([37, 100, 40], [[37, 100, 40]], torch.tensor([[37, 100, 40]])):
            assert_near(store.targets_for(row[None], lengths).reshape(-1), want)
        with pytest.raises(
            KeyError, match="must hold documents of the store, whole or cut off at their end, got"
        ):
            store.targets_for(row[None])

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_masks_and_positions(self, side, some):
        found, store = some
        rows = [[0], [2, 4, 1], []]
        batch, mask, places = (torch.zeros(3, 110, dtype=torch.int64) for _ in range(3))
        want = {}
        for row, of_row in enumerate(rows):
            n = sum(LENGTHS[i] for i in of_row)
            at = 110 - n if side == "left" else 0
            mask[row, at : at + n] = 1
            for i in of_row:
                batch[row, at : at + LENGTHS[i]] = found[i][0]
                places[row, at : at + LENGTHS[i]] = torch.arange(LENGTHS[i])
                want[row, at] = i
                at += LENGTHS[i]
        inputs = {"input_ids": batch, "attention_mask": mask, "position_ids": places}
        for more in ({}, {"documents": rows}):
            got = batch_targets(store, inputs | more)
            assert torch.equal(got.mask.any(-1), mask.bool())
            for (row, at), i in want.items():
                assert_near(got[row, at : at + LENGTHS[i]], found[i][1])

    @pytest.mark.parametrize("shards", [1, 5])
    def test_documents_that_begin_alike(self, shards, tmp_path):
        """As behind one system prompt: whole, cut off behind it, and one that is not there."""
        found = prompted(60)
        with stores.open_writer(tmp_path) as writer:
            for i, one in enumerate(found):
                if i % (60 // shards) == 0:
                    writer.flush()
                writer.add(*one)
        store = Store(tmp_path)
        assert len(store.shards) == shards
        batch = torch.stack([tokens for tokens, _ in found])
        want = ll.SparseTargets.cat([targets for _, targets in found])
        assert_near(store.targets_for(batch).reshape(-1), want)
        padded = torch.nn.functional.pad(batch, (0, 9))
        assert torch.equal(
            store.targets_for(padded)[:, :76].logprobs, store.targets_for(batch).logprobs
        )
        for n in (73, 75):
            got = store.targets_for(batch[:, :n].contiguous(), [n] * 60)
            assert_near(got.reshape(-1), want.reshape(60, 76)[:, :n].reshape(-1))
        with pytest.raises(KeyError):
            store.targets_for(torch.cat([found[0][0][:70], document(6, 999)[0]]))

    @pytest.mark.few(1)
    @pytest.mark.parametrize("seed", range(4))
    def test_as_by_trying_every_document(self, seed, tmp_path):
        """Documents of few different tokens, so that many are beginnings of others."""
        draw = random.Random(seed)
        every = {tuple(draw.choices((1, 2), k=draw.randint(1, 50))) for _ in range(150)}
        every |= {tokens[: draw.randint(1, len(tokens))] for tokens in sorted(every)[:40]}
        listed = sorted(every)
        draw.shuffle(listed)
        found = [(torch.tensor(t), stores.teacher(len(t), seed=i)) for i, t in enumerate(listed)]
        store = stores.write(tmp_path, found, shard_bytes=20_000)
        numbers = {tokens: i for i, tokens in enumerate(listed)}
        for tokens in listed[:60]:
            assert store.find(list(tokens)) == numbers[tokens]
            row = torch.tensor([*tokens, *[tokens[-1]] * 3, *[0] * 2])
            content = row[: len(row) - 2].tolist()
            longest = max(
                (t for t in listed if row.tolist()[: len(t)] == list(t) and len(t) <= len(content)),
                key=len,
            )
            if len(longest) < len(content):  # the rest is not one id
                with pytest.raises(KeyError):
                    store.targets_for(row[None])
            row = row[: len(content)]
            got = store.targets_for(row[None])[0]
            assert_near(got[: len(longest)], found[numbers[longest]][1])

    def test_nothing_and_bad_arguments(self, some):
        _, store = some
        assert store.targets_for(torch.empty(2, 0).long()).shape == (2, 0)
        assert not store.targets_for(torch.zeros(1, 4).long(), [[]]).mask.any()
        assert not store.targets_for(torch.full((2, 4), -1)).mask.any()
        zeros = torch.zeros(2, 5).long()
        for batch, lengths, kind, message in (
            (
                torch.tensor(1),
                None,
                ValueError,
                "input_ids must have tokens in its last dimension, got shape",
            ),
            (zeros, [1], ValueError, "lengths must have an entry for each of 2 rows"),
            (zeros, [6, 1], ValueError, "at least 0 and add up to at most 5 tokens per row"),
            (zeros, 2, TypeError, "lengths must be a list or a tensor with one entry per row, got"),
            (zeros, torch.tensor(2), TypeError, "lengths must be a list or a tensor"),
            (zeros, [1.5, 2], TypeError, r"lengths must be whole numbers, got 1\.5"),
            (zeros, None, KeyError, "Padding comes after the document of a row"),
        ):
            with pytest.raises(kind, match=message):
                store.targets_for(batch, lengths)

    def test_numbers(self, some):
        _, store = some
        assert len(store) == 5
        assert store.lengths.tolist() == list(LENGTHS)
        assert store.tokens == sum(LENGTHS)
        with pytest.raises(TypeError, match="a document must be selected by its number, got 'a'"):
            store["a"]
        with pytest.raises(IndexError, match="a range of tokens must be a slice of step 1, got 3"):
            store[0, 3]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_data_loader(self, some, workers):
        """A DataLoader reads a batch at once; its workers open the store themselves."""
        _, store = some
        how = {"multiprocessing_context": FORKED} if workers else {}
        loader = DataLoader(store, batch_size=5, num_workers=workers, collate_fn=list, **how)
        (batch,) = loader
        for i, one in enumerate(batch):
            assert_equal(one, store[i])
        assert_equal(pickle.loads(pickle.dumps(store))[0], store[0])


class TestRuns:
    def test_they_merge_like_a_log(self, tmp_path):
        """Any sizes: every document is found, and there are few files."""
        draw, runs, sizes, every = random.Random(0), [], [], []
        for _ in range(60):
            keys = torch.tensor([draw.randrange(2000) for _ in range(draw.randint(1, 900))])
            numbers = torch.arange(len(every), len(every) + len(keys))
            runs = extended(tmp_path, runs, sizes, (keys, numbers))
            sizes.append(len(keys))
            every += keys.tolist()
            assert [run.begin for run in runs] == [0, *(run.end for run in runs[:-1])]
            assert runs[-1].end == len(sizes)
        assert len(runs) <= 8
        files = [RunFile(File(tmp_path / r.name), sum(sizes[r.begin : r.end])) for r in runs]
        for low, high in [(k, k) for k in range(0, 2000, 37)] + [(0, 50), (1990, 3000), (-5, -1)]:
            want = [i for i, key in enumerate(every) if low <= key <= high]
            assert sorted(n for file in files for n in file.numbers(low, high)) == want

    def test_merging_takes_little_memory(self, tmp_path, monkeypatch):
        """Pieces of both runs, which end at different keys."""
        monkeypatch.setattr(lookup, "PIECE", 1)
        a, b = torch.arange(0, 3000, 3), torch.arange(0, 3000, 2)
        runs = extended(tmp_path, [], [], (a, torch.arange(1000)))
        runs = extended(tmp_path, runs, [1000], (b, torch.arange(1000, 2500)))
        (run,) = runs
        pieces = [keys for keys, _ in RunFile(File(tmp_path / run.name), 2500).pieces()]
        assert torch.equal(torch.cat(pieces), torch.cat((a, b)).sort().values)

    def test_a_reader_that_is_older_than_the_merged_files(self, tmp_path):
        """It reads the newer files, and does not find newer documents."""
        found = documents(*[9] * 12)
        stores.write(tmp_path, found[:1])
        store = Store(tmp_path)
        with stores.open_writer(tmp_path) as writer:
            for one in found[1:]:
                writer.add(*one)
                writer.flush()
        assert not os.path.exists(tmp_path / "0-1.lookup")
        assert store.find(found[0][0]) == 0
        with pytest.raises(KeyError):
            store.find(found[5][0])
        assert Store(tmp_path).find(found[5][0]) == 5
