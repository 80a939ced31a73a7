"""Stores as parquet files, for dataset viewers."""

import sys

import pytest
import torch

import logitless as ll
from logitless.store import to_parquet
from tests.support import stores
from tests.support.stores import K, documents, teacher


def test_a_missing_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    store = stores.write(tmp_path / "s", documents(3))
    words = r"must be written and read with pyarrow, got an import error .* 'logitless\[parquet\]'"
    with pytest.raises(ModuleNotFoundError, match=words):
        to_parquet(store, tmp_path / "p")


@pytest.mark.parametrize("values", ["u8", "f16"])
def test_what_a_viewer_shows(values, tmp_path):
    """Every number of every document, from several shards, with masked rows."""
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow, of the extra parquet")
    mask = torch.ones(9, K, dtype=torch.bool)
    mask[3, 5:], mask[4] = False, False
    full = teacher(9, seed=9)
    masked = ll.SparseTargets(full.ids, full.logprobs, full.tail, mask)
    found = [*documents(5, 64, 3), (torch.arange(9), masked)]
    local, steps = stores.write(tmp_path / "s", found, values=values, shard_bytes=900), []
    assert to_parquet(local, tmp_path / "p", progress=steps.append) == 4
    assert sum(steps) == local.tokens
    files = sorted((tmp_path / "p").iterdir())
    assert len(files) == len(local.shards) > 1
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    for row, (tokens, targets) in zip(rows, local[[0, 1, 2, 3]], strict=True):
        kept = torch.ones_like(targets.ids) if targets.mask is None else targets.mask
        assert row["tokens"] == tokens.tolist()
        assert row["tail"] == targets.tail.tolist()
        for i, of_row in enumerate(kept.bool()):
            assert row["ids"][i] == targets.ids[i][of_row].tolist()
            assert row["logprobs"][i] == targets.logprobs[i][of_row].tolist()
    with pytest.raises(ValueError, match="must have no parquet files before the export, got part"):
        to_parquet(local, tmp_path / "p")
