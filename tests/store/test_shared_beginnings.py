"""Documents that begin alike, or that can be read in two ways, are found for what they are."""

import random

import pytest
import torch

from logitless.store import Store, batch_targets
from logitless.store import lookup as _lookup
from logitless.store import shard as _shard
from logitless.store.index import Hashes
from tests.support import stores
from tests.support.stores import assert_near, document, open_writer


def prompted(n, shared=70, total=76):
    """Documents of which the first tokens are the same."""
    prompt, _ = document(shared)
    ends = [document(total - shared, seed)[0] for seed in range(1, n + 1)]
    targets = stores.teacher(total)
    return [(torch.cat([prompt, end]), targets) for end in ends]


class Count:
    """How many documents are compared with tokens of a batch while the block runs."""

    def __init__(self, monkeypatch):
        self.reads, real = 0, _shard.Shard.tokens_of

        def counted(shard, spans):
            self.reads += len(spans)
            return real(shard, spans)

        monkeypatch.setattr(_shard.Shard, "tokens_of", counted)


class TestShared:
    @pytest.mark.parametrize("files", [1, 4])
    @pytest.mark.parametrize("shared", [0, 70])
    def test_comparisons_do_not_grow_with_the_documents(self, shared, files, tmp_path, monkeypatch):
        """Documents with the same first 64 tokens are not compared one by one."""
        found = prompted(400, shared)
        with open_writer(tmp_path) as writer:
            for i, one in enumerate(found):
                if i % (400 // files) == 0:
                    writer.flush()
                writer.add(*one)
        store, chosen = Store(tmp_path), [7, 123, 256, 399]
        assert len(store.shards) == files
        batch = torch.stack([found[i][0] for i in chosen])
        padded = torch.nn.functional.pad(batch, (0, 20))
        mask = (torch.arange(96) < 76).expand(4, 96).int()
        count = Count(monkeypatch)
        for look in (
            lambda: store.targets_for(padded),
            lambda: batch_targets(store, {"input_ids": padded, "attention_mask": mask}),
            lambda: store.targets_for(batch),
            lambda: store.targets_for(batch, [76] * 4),
            lambda: store.targets_for(batch[:, :73].contiguous()),
            lambda: store.targets_for(batch[:, :73].contiguous(), [73] * 4),
            lambda: store.targets_for(batch.view(1, -1)),
        ):
            count.reads = 0
            look()
            assert count.reads <= 4 * 2 * files
        count.reads = 0
        with pytest.raises(KeyError):
            store.targets_for(torch.cat([found[0][0][:70], document(6, 999)[0]]))
        assert count.reads <= 4 * files + 8

    def test_the_index_does_not_grow_with_a_shared_beginning(self, tmp_path):
        sizes = []
        for shared in (0, 70):
            store = stores.write(tmp_path / str(shared), prompted(100, shared))
            sizes.append(store.shards[0].entries["index.hash"].shape[0])
        assert sizes[1] <= sizes[0] + 100

    def test_two_prompts_that_differ_late(self, tmp_path):
        """A document that is cut off between the hashed beginnings, behind one of two prompts."""
        one = prompted(40, 70, 90)
        two = [(tokens.clone(), targets) for tokens, targets in one]
        for tokens, _ in two:
            tokens[66] = (tokens[66] + 1) % stores.V
        store = stores.write(tmp_path, one + two)
        for n in (65, 66, 67, 69, 70, 75):
            for tokens, targets in (one[3], two[3]):
                assert_near(store.targets_for(tokens[:n], [n]), targets[:n])
                assert_near(store.targets_for(tokens[:n]), targets[:n])

    def test_documents_of_one_repeated_token(self, tmp_path, monkeypatch):
        """Not every place of a row is a start, and not every reading is compared."""
        targets = stores.teacher(120)
        store = stores.write(tmp_path, [(torch.full((n,), 5), targets[:n]) for n in range(1, 121)])
        candidates, real = [], _lookup.Index._candidate
        monkeypatch.setattr(
            _lookup.Index, "_candidate", lambda i, e: candidates.append(e) or real(i, e)
        )
        count = Count(monkeypatch)
        rows = torch.full((4, 130), -1)
        rows[:, :110] = 5
        got = store.targets_for(rows)
        assert torch.equal(got.mask.any(-1), rows == 5)
        assert len(candidates) < 4 * 130
        rows[:, 110:113] = torch.tensor([7, 8, 9])
        count.reads = 0
        with pytest.raises(KeyError, match=r"got \[7, 8, 9\], at token 110 of row 0"):
            store.targets_for(rows)
        assert count.reads < 2 * 130


class TestLongest:
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_whatever_the_file_it_is_in(self, order, tmp_path):
        """The first file that has a match does not decide."""
        targets = stores.teacher(3)
        both = [(torch.tensor([1, 2]), targets[:2]), (torch.tensor([1, 2, 3]), targets)]
        with open_writer(tmp_path) as writer:
            for i in order:
                writer.add(*both[i])
                writer.flush()
        store = Store(tmp_path)
        got = store.targets_for(torch.tensor([[1, 2, 3, 0, 0], [1, 2, 0, 0, 0]]))
        assert got.mask.all(-1).tolist() == [[True] * 3 + [False] * 2, [True] * 2 + [False] * 3]
        got = store.targets_for(torch.tensor([[1, 2, 3, 3, 3]]))  # padding is the next token
        assert got.mask.all(-1).tolist() == [[True] * 3 + [False] * 2]

    @pytest.mark.parametrize("seed", range(4))
    def test_as_by_trying_every_document(self, seed, tmp_path):
        """Random documents over three tokens, in several files, against a search of all of them."""
        draw = random.Random(seed)
        texts = {tuple(draw.choices(range(3), k=draw.randrange(1, 40))) for _ in range(60)}
        texts |= {(*text, *draw.choices(range(3), k=5)) for text in list(texts)[:20]}
        with open_writer(tmp_path, shard_bytes=4000) as writer:
            for text in texts:
                writer.add(list(text), stores.teacher(len(text)))
        store = Store(tmp_path)
        assert len(store.shards) > 2
        for _ in range(60):
            row = draw.choice(list(texts)) + tuple(draw.choices(range(3), k=draw.randrange(30)))
            row = row[draw.randrange(3) :][: draw.randrange(1, 50)]
            fits = [t for t in texts if t[: len(row)] == row[: len(t)]]
            tokens = torch.tensor(row)
            for whole in (False, True):
                want = max((min(len(t), len(row)) for t in fits), default=0)
                want = want if want == len(row) or not whole else 0
                (match,) = store.index.match(tokens, Hashes(tokens), [0], [len(row)], whole)
                assert (match.length if match else 0) == want
                if match:
                    begin, _ = match.shard.span(match.document)
                    got = match.shard.tokens(begin, begin + want)
                    assert torch.equal(got, tokens[:want])


class TestTwoReadings:
    @pytest.fixture
    def store(self, tmp_path):
        targets = stores.teacher(4)
        texts = ([1, 2], [3, 4], [1, 2, 3], [4, 5, 6])
        return stores.write(tmp_path, [(torch.tensor(t), targets[: len(t)]) for t in texts])

    def test_a_row_that_documents_fill(self, store):
        """It is [1, 2] and [3, 4], and not [1, 2, 3] and one token of padding."""
        got = store.targets_for(torch.tensor([[1, 2, 3, 4]]))
        assert got.mask is None or got.mask.any(-1).all()

    def test_a_step_back_where_the_longest_leads_nowhere(self, store):
        got = store.targets_for(torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4, 5, 6]]))
        assert got.mask is None or got.mask.any(-1).all()
        ids = torch.tensor([[1, 2, 3, 4, 0, 0]])
        mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
        got = batch_targets(store, {"input_ids": ids, "attention_mask": mask})
        assert torch.equal(got.mask.any(-1), mask.bool())

    def test_what_stays_unknown(self, store):
        """A single token of padding stays padding; an unknown end is named without our -1."""
        got = store.targets_for(torch.tensor([[1, 2, 3, 9]]))
        assert got.mask.any(-1).tolist() == [[True] * 3 + [False]]
        row = torch.tensor([[1, 2, 9, 8, 7]])
        with pytest.raises(KeyError, match=r"got \[9, 8, 7\], at token 2 of row 0"):
            batch_targets(store, {"input_ids": row, "attention_mask": torch.ones_like(row)})
