"""What is read of a shard is compared with its checksums, block by block."""

import os

import pytest
import torch

from logitless.store import Store, merge
from logitless.store import blocks as _blocks
from logitless.store.format import BLOCK
from tests.support import store_damage, stores
from tests.support.stores import document, documents


@pytest.fixture
def long(tmp_path):
    """A store of one document of several blocks per column."""
    return stores.write(tmp_path / "store", [document(3000)])


def change(store, name, row):
    """Changes one byte of a row in a column; returns where."""
    shard = store.shards[0]
    _, shape, begin, end = shard.entries[name]
    place = shard.blocks.start + begin + (end - begin) // shape[0] * row
    with open(shard.path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


class TestDamage:
    def test_random_changes(self, tmp_path):
        """None gives other data. benchmarks/results/store-damage.txt has 2,000 of them."""
        counts = store_damage.rounds(40, 1, tmp_path)
        assert sum(counts.values()) == 80
        assert {outcome.split(": ")[1] for outcome in counts} <= {
            "refused by name",
            "nothing changed",
        }

    @pytest.mark.parametrize("name", ["codes", "top", "tail", "step", "ids.8", "ids.2"])
    def test_a_changed_byte_of_a_row(self, name, long):
        """Refused when it is read, by an open store too."""
        change(long, name, 2999)
        for store in (long, Store(long.path)):
            with pytest.raises(ValueError, match=r"0-000000\.safetensors must have the bytes it"):
                store[0, 2990:]
            with pytest.raises(ValueError, match=r"Remove the file and run the capture again"):
                store.targets_for(document(3000)[0])
        report = Store(long.path).verify()
        assert not report
        assert "must have the bytes it was written with" in report.problems[0]

    @pytest.mark.parametrize("name", ["tokens.8", "tokens.2", "index.hash", "index.doc"])
    def test_a_changed_byte_of_the_tokens_or_the_index(self, name, long):
        change(long, name, 0)
        with pytest.raises(ValueError, match=r"0-000000\.safetensors must have the bytes it was"):
            Store(long.path).find(document(3000)[0])

    def test_merge_refuses_a_damaged_store(self, long, tmp_path):
        """It would write new checksums of what it read."""
        change(long, "codes", 2999)
        with pytest.raises(ValueError, match=r"0-000000\.safetensors must have the bytes it was"):
            merge(tmp_path / "merged", [long.path])
        assert not (tmp_path / "merged").exists()

    def test_a_file_that_is_cut_off_while_it_is_open(self, long):
        """It must neither give zeros nor end the process."""
        path = long.shards[0].path
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ValueError, match=r"must keep its length while it is read|the bytes it"):
            long[0]

    def test_a_file_that_is_replaced_while_it_is_open(self, tmp_path, monkeypatch):
        """A store that has closed the file in between must not read the other file."""
        monkeypatch.setattr(_blocks, "KEPT_OPEN", 1)
        store = stores.write(tmp_path / "a", documents(40, 50), shard_bytes=1)
        other = stores.write(tmp_path / "b", [document(40, 7)])
        want = store[0][1]
        os.replace(other.shards[0].path, store.shards[0].path)
        assert torch.equal(store[0][1].logprobs, want.logprobs)
        store[1]  # closes the first file
        with pytest.raises(ValueError, match="must stay the same file while its store is open"):
            store[0]


class TestFiles:
    def test_more_files_than_are_kept_open(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_blocks, "KEPT_OPEN", 3)
        found = documents(*[3] * 8)
        store = stores.write(tmp_path, found, shard_bytes=1)
        assert len(store.shards) == 8
        for _ in range(2):
            for i, (tokens, _) in enumerate(found):
                assert torch.equal(store[i][0], tokens)
        assert sum(shard.blocks._file is not None for shard in store.shards) <= 3

    def test_files_are_closed_with_their_store(self, long):
        number = (long.shards[0].blocks._file or long.shards[0].blocks._opened()).number
        os.fstat(number)
        long.shards.clear()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)

    def test_a_relative_path_survives_another_working_folder(self, long, monkeypatch, tmp_path):
        monkeypatch.chdir(long.path.parent)
        store = Store("store")
        store.shards[0].blocks._file = None
        monkeypatch.chdir("/")
        assert torch.equal(store[0][0], document(3000)[0])

    def test_checksums_across_tensors(self):
        """Blocks do not end where tensors end."""
        import zlib

        tensors = [torch.arange(n, dtype=torch.uint8) for n in (200, 0, 255, 1)] * 30
        data = b"".join(bytes(t.tolist()) for t in tensors)
        want = [zlib.crc32(data[a : a + BLOCK]) for a in range(0, len(data), BLOCK)]
        assert _blocks.checksums(tensors).view(torch.int32).tolist() == [
            n - 2**32 if n >= 2**31 else n for n in want
        ]
