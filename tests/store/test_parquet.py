"""Stores as parquet files: the same targets after a round trip, and no file is trusted."""

import re
import sys

import pytest
import torch

import logitless as ll
from logitless.store import Store, from_parquet, to_parquet
from tests.support import stores
from tests.support.stores import K, V, assert_equal, document, documents, teacher

LENGTHS = (100, 1, 37, 64, 3)


def test_a_missing_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    store = stores.write(tmp_path / "s", documents(3))
    words = re.escape("Run pip install 'logitless[parquet]'")
    with pytest.raises(ModuleNotFoundError, match=words):
        to_parquet(store, tmp_path / "p")
    with pytest.raises(ModuleNotFoundError, match=words):
        from_parquet(["a"], tmp_path / "t")


def unusual(n: int) -> ll.SparseTargets:
    """Rows with equal, zero, masked and very small probabilities, and a row without slots."""
    t = teacher(n, seed=9)
    logprobs, mask = t.logprobs.clone(), torch.ones(n, K, dtype=torch.bool)
    logprobs[0, 3:] = -torch.inf
    logprobs[1] = logprobs[1, 0] - 0.01 * torch.arange(K)
    logprobs[1] -= logprobs[1].logsumexp(-1) + 0.1
    logprobs[2, 1:] = -60.0
    mask[3, 5:], mask[4] = False, False
    return ll.SparseTargets(t.ids, logprobs, t.tail.clamp_max(-3.0), mask)


@pytest.fixture
def pq():
    return pytest.importorskip("pyarrow.parquet", reason="needs pyarrow, of the extra parquet")


@pytest.mark.usefixtures("pq")
class TestRoundTrip:
    @pytest.mark.parametrize("values", ["u8", "f16"])
    @pytest.mark.parametrize("vocab", [V, 151_936])
    def test_the_same_targets(self, vocab, values, tmp_path):
        """Bit for bit, in the same order, from several shards, with unusual rows."""
        found = [*documents(*LENGTHS, vocab=vocab), (torch.arange(9), unusual(9))]
        how = {"vocab_size": vocab, "values": values, "teacher": "t", "shard_bytes": 2000}
        local = stores.write(tmp_path / "s", found, **how)
        assert to_parquet(local, tmp_path / "p") == len(found)
        files = sorted((tmp_path / "p").iterdir())
        assert len(files) == len(local.shards) > 1
        assert from_parquet(files, tmp_path / "t") == len(found)
        again = Store(tmp_path / "t")
        assert again.info == local.info
        for i in range(len(found)):
            assert_equal(again[i], local[i])
            masks = [store[i][1].mask for store in (again, local)]
            assert (masks[0] is None) == (masks[1] is None)
            assert masks[0] is None or torch.equal(*masks)
        assert again.verify().problems == local.verify().problems

    def test_sampled_targets(self, pq, tmp_path):
        """The counts are the same, and there is no column `tail`."""
        found = []
        for seed, n in enumerate((100, 1, 37)):
            random = torch.Generator().manual_seed(seed)
            logits = 3 * torch.randn(n, V, generator=random)
            logits[n // 2] = -torch.inf  # a row without slots
            targets = ll.capture_sampled(logits, 20, generator=random)
            found.append((torch.randint(V, (n,), generator=random), targets))
        local = stores.write(tmp_path / "s", found, k=20, values="counts", shard_bytes=2000)
        assert to_parquet(local, tmp_path / "p") == len(found)
        files = sorted((tmp_path / "p").iterdir())
        assert pq.read_schema(files[0]).names == ["tokens", "ids", "logprobs"]
        assert from_parquet(files, tmp_path / "t") == len(found)
        again = Store(tmp_path / "t")
        assert again.info == local.info
        for i, (tokens, _) in enumerate(found):
            assert torch.equal(again[i][0], tokens)
            for name in ("ids", "logprobs", "mask"):
                got, want = (getattr(store[i][1], name) for store in (again, local))
                assert torch.equal(got, want)
            assert again[i][1].tail is None

    def test_many_rows_at_k_64(self, tmp_path):
        """Many rows show a code that is rounded to a neighbour."""
        for values in ("u8", "f16"):
            found = [document(3000, vocab=151_936, k=64)]
            path = tmp_path / values
            local = stores.write(path / "s", found, vocab_size=151_936, k=64, values=values)
            to_parquet(local.path, path / "p")
            from_parquet(sorted((path / "p").iterdir()), path / "t")
            assert_equal(Store(path / "t")[0], local[0])

    def test_what_a_viewer_shows(self, pq, tmp_path):
        local = stores.write(tmp_path / "s", documents(5, 3))
        steps = []
        to_parquet(local, tmp_path / "p", progress=steps.append)
        assert sum(steps) == 8
        rows = pq.read_table(tmp_path / "p" / "part-000000.parquet").to_pylist()
        for row, (tokens, targets) in zip(rows, (local[0], local[1]), strict=True):
            assert row["tokens"] == tokens.tolist()
            assert row["ids"] == targets.ids.tolist()
            assert row["logprobs"] == targets.logprobs.tolist()
            assert row["tail"] == targets.tail.tolist()

    def test_a_file_of_another_program(self, pq, tmp_path):
        """Without step and without metadata, rows are rounded as by Writer.add."""
        pa = pytest.importorskip("pyarrow")
        tokens, targets = document(20)
        table = pa.table({
            "tail": [targets.tail.double().tolist()], "tokens": [tokens.tolist()],
            "logprobs": [targets.logprobs.double().tolist()], "ids": [targets.ids.tolist()],
        })  # fmt: skip
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=r"a.parquet must have a header in its metadata, or"):
            from_parquet([tmp_path / "a.parquet"], tmp_path / "t")
        from_parquet([tmp_path / "a.parquet"], tmp_path / "t", vocab_size=V, k=K)
        want = stores.write(tmp_path / "s", [(tokens, targets)])
        assert_equal(Store(tmp_path / "t")[0], want[0])


def changed(**columns):
    """The columns of a document of two tokens, some of them changed. None removes a column."""
    plain = {
        "tokens": [[1, 2]], "ids": [[[1, 2], [3]]], "logprobs": [[[-1.0, -2.0], [-0.5]]],
        "tail": [[-1.0, -1.0]],
    }  # fmt: skip
    return {name: value for name, value in (plain | columns).items() if value is not None}


BAD = {
    "no tail": (changed(tail=None), "must have the columns tokens, ids, logprobs, tail, got no"),
    "texts": (changed(tokens=[["a", "b"]]), "must have integers in the column tokens"),
    "no lists": (changed(tokens=[1]), "must have lists in the column tokens"),
    "a null": (changed(tokens=[None]), "must have lists in the column tokens"),
    "a null inside": (changed(tokens=[[1, None]]), "must have integers in the column tokens"),
    "fewer ids": (changed(ids=[[[1, 2]]]), "must have as many items in ids as tokens"),
    "fewer tails": (changed(tail=[[-1.0]]), "must have as many items in tail as tokens"),
    "other slots": (changed(ids=[[[1], [3, 4]]]), "must have as many items in logprobs as"),
    "many slots": (
        changed(ids=[[[1] * 9, [3]]], logprobs=[[[-3.0] * 9, [-0.5]]]),
        "must have at most 8 ids per token, got 9",
    ),
    "an id": (changed(ids=[[[1, 5000], [3]]]), r"targets.ids must be in the vocabulary of 1000"),
    "a token": (changed(tokens=[[1, 5000]]), "tokens must"),
    "a probability": (changed(logprobs=[[[0.5, 0.1], [0.5]]]), "logprobs must"),
    "an empty document": (changed(tokens=[[]], ids=[[]], logprobs=[[]], tail=[[]]), "must"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name, pq, tmp_path):
    pa = pytest.importorskip("pyarrow")
    columns, words = BAD[name]
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises((TypeError, ValueError), match=words):
        from_parquet([tmp_path / "a.parquet"], tmp_path / "t", vocab_size=V, k=K)
    assert len(Store(tmp_path / "t")) == 0


@pytest.mark.usefixtures("pq")
def test_arguments(tmp_path):
    with pytest.raises(ValueError, match="files must be a list of parquet files, got 'a'"):
        from_parquet("a", tmp_path / "t")
    local = stores.write(tmp_path / "s", documents(3))
    to_parquet(local, tmp_path / "p")
    with pytest.raises(ValueError, match="must have no parquet files before the export, got part"):
        to_parquet(local, tmp_path / "p")
    files = sorted((tmp_path / "p").iterdir())
    with pytest.raises(ValueError, match="because the file contains a header, got k, vocab_size"):
        from_parquet(files, tmp_path / "t", vocab_size=V, k=K)
    other = stores.write(tmp_path / "o", documents(3), teacher="other")
    to_parquet(other, tmp_path / "q")
    with pytest.raises(ValueError, match="must have teacher '' to match"):
        from_parquet([*files, *sorted((tmp_path / "q").iterdir())], tmp_path / "t")
