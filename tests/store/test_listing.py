"""store.index: what it lists, and that a forged one is refused."""

import json

import pytest
import torch

from logitless.store import Store, write_index
from logitless.store.listing import INDEX, Listing, existing, listing_of, sha256_of
from logitless.store.rows import encoded
from logitless.store.shard import digest_of, write_shard
from logitless.targets import safetensors
from tests.support import stores
from tests.support.stores import LENGTHS, documents


@pytest.fixture
def local(tmp_path):
    return stores.write(tmp_path / "store", documents(*LENGTHS), shard_bytes=2000)


def rewrite(path, seed: int) -> None:
    """Writes a shard with the same tokens, the same size and other targets."""
    store, size = Store(path.parent), path.stat().st_size
    shard = next(shard for shard in store.shards if shard.path == path)
    tokens, n = shard.tokens(0, int(shard.starts[-1])), int(shard.starts[-1])
    rows = encoded(stores.teacher(n, seed=seed), store.info)
    write_shard(path, store.info, tokens, shard.starts, rows)
    assert path.stat().st_size == size


def listing(path):
    return Listing.of_bytes(INDEX, (path / INDEX).read_bytes())


class TestListing:
    def test_it_lists_every_shard(self, local):
        assert write_index(local.path) == len(local)
        found = listing(local.path)
        assert found.header == local.info
        for listed, shard in zip(found.shards, local.shards, strict=True):
            file = listed.file
            assert file == (shard.path.name, shard.bytes, sha256_of(shard.path))
            assert torch.equal(listed.starts, shard.starts)
            assert listed.entries == len(shard.index()[0])
            assert listed.digest == shard.digest
        lookup = local.path / found.lookup.name
        assert found.lookup[1:] == (lookup.stat().st_size, sha256_of(lookup))

    def test_a_folder_with_an_index_stays_a_store(self, local, tmp_path):
        """Readers and writers of the folder do not need the index, and do not refuse it."""
        write_index(local.path)
        grown = documents(*LENGTHS, 7)
        stores.assert_holds(stores.write(local.path, grown), grown)
        before = listing(local.path)
        assert write_index(local.path) == len(grown)
        after = listing(local.path)
        assert len(after.shards) == len(before.shards) + 1
        assert [path.name for path in local.path.glob("*.lookup")] == [after.lookup.name]
        assert after.lookup.name != before.lookup.name

    def test_known_shards_are_not_hashed_again(self, local, monkeypatch):
        """A shard is known if its size and the digest in its metadata are those of the index."""
        write_index(local.path)
        changed = local.shards[1].path
        rewrite(changed, seed=99)
        found, hashed = stores.write(local.path, documents(*LENGTHS, 7)), []

        def count(path):
            hashed.append(path.name)
            return sha256_of(path)

        monkeypatch.setattr("logitless.store.listing.sha256_of", count)
        files = [shard.path for shard in found.shards]
        after = listing_of(local.path, found.info, files, existing(local.path))
        new = [changed.name, files[-1].name]
        assert [name for name in hashed if name.endswith(".safetensors")] == new
        assert [shard.file.sha256 for shard in after.shards] == [*map(sha256_of, files)]

    def test_write_index_reads_all_shards(self, local):
        """A shard that the existing index lists can have changed since then."""
        write_index(local.path)
        path = local.shards[1].path
        data = bytearray(path.read_bytes())
        data[-300] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"{path.name} must have the bytes it was written"):
            write_index(local.path)

    def test_a_damaged_shard_is_not_listed(self, local):
        path = local.shards[1].path
        data = bytearray(path.read_bytes())
        data[-300] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"{path.name} must have the bytes it was written"):
            write_index(local.path)
        assert not (local.path / INDEX).exists()

    def test_arguments(self, tmp_path):
        with pytest.raises(ValueError, match="path must be a local folder, got 's3://a'"):
            write_index("s3://a")
        with pytest.raises(ValueError, match=r"must be a folder with a store\.json, got none"):
            write_index(tmp_path)


def forged(change, path):
    """store.index with changed JSON, and the SHA-256 of the changed tensors."""
    _, tensors = safetensors.from_bytes(INDEX, (path / INDEX).read_bytes())
    fields = json.loads(bytes(safetensors.buffer(tensors["files"])))
    change(fields)
    text = bytearray(json.dumps(fields).encode())
    tensors["files"] = torch.frombuffer(text, dtype=torch.uint8)
    metadata = {"format": "logitless.index", "version": "1", "sha256": digest_of(tensors)}
    safetensors.write(path / INDEX, tensors, metadata)


CONTENT = "must list the files, the documents and the header of a store, got other content"
FORGED = {
    "another form": (lambda f: f.update(more=1), CONTENT),
    "no shards": (lambda f: f.pop("shards"), CONTENT),
    "a path": (lambda f: f["shards"][0].__setitem__(0, "../0-000000.safetensors"), CONTENT),
    "an absolute path": (lambda f: f["lookup"].__setitem__(0, "/etc/passwd"), CONTENT),
    "a path as SHA-256": (lambda f: f["shards"][0].__setitem__(2, "../" + "a" * 61), CONTENT),
    "a digest": (lambda f: f["shards"][0].__setitem__(5, "a"), CONTENT),
    "a negative size": (lambda f: f["shards"][0].__setitem__(1, -1), CONTENT),
    "a size that is no number": (lambda f: f["shards"][0].__setitem__(1, "1"), CONTENT),
    "more documents": (lambda f: f["shards"][-1].__setitem__(3, 9), CONTENT),
    "fewer documents": (lambda f: f["shards"].pop(), CONTENT),
    "documents of another shard": (
        lambda f: [f["shards"][at].__setitem__(3, n) for at, n in ((0, 2), (1, 1))],
        "must have starts that increase",
    ),
    "a header": (lambda f: f["header"].pop("k"), "must hold a header with the fields"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_index(name, local):
    change, words = FORGED[name]
    write_index(local.path)
    forged(change, local.path)
    with pytest.raises(ValueError, match=words):
        listing(local.path)


def test_every_changed_byte_is_refused_or_changes_nothing(local):
    write_index(local.path)
    data, want = (local.path / INDEX).read_bytes(), listing(local.path)
    for place in range(0, len(data), 7):
        bad = bytearray(data)
        bad[place] ^= 4
        try:
            got = Listing.of_bytes(INDEX, bytes(bad))
        except ValueError:
            continue
        assert (got.header, got.lookup) == (want.header, want.lookup)
        for one, other in zip(got.shards, want.shards, strict=True):
            assert one.file == other.file
            assert torch.equal(one.starts, other.starts)
