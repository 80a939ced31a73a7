"""store.index: what it lists, who writes it, and that a forged one is refused."""

import contextlib
import json
import re
import subprocess
import sys

import pytest
import torch

from logitless.store import Store, capture, merge, recover
from logitless.store import listing as _listing
from logitless.store import writer as _writer
from logitless.store.listing import INDEX, Listing, hashed_file
from logitless.store.rows import encoded
from logitless.store.shard import digest_of, write_shard
from logitless.targets import safetensors
from tests.support import stores
from tests.support.stores import LENGTHS, K, V, documents, joined, open_writer


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


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder, and its address at a process of Python's own server of static files."""
    folder = tmp_path_factory.mktemp("served")
    server = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*server, "--directory", str(folder)], **how) as process:
        try:
            port = re.search(r"port (\d+)", process.stdout.readline())[1]
            yield folder, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def close(path, found, part=0):
    writer = open_writer(path, part=part)
    writer.extend(*joined(found))
    writer.close()


def error_in_the_block(path, found):
    with contextlib.suppress(KeyError), open_writer(path, shard_bytes=2000) as writer:
        writer.extend(*joined(found))
        raise KeyError


def ranks(path, found):
    """Both are open when the first one closes."""
    with open_writer(path, part=1) as second:
        close(path, found[:3])
        second.extend(*joined(found[3:]))


def a_killed_rank(path, found):
    """What it has flushed is listed by the next writer that closes."""
    killed = open_writer(path, part=1)
    killed.extend(*joined(found[:3]))
    killed.flush()
    stores.abandon(killed)
    close(path, found[3:])


def recovered(path, found):
    killed = open_writer(path, shard_bytes=2000)
    killed.extend(*joined(found))
    stores.abandon(killed)
    assert recover(path) == len(found)


def captured(path, found):
    model = torch.nn.Sequential(torch.nn.Embedding(V, 8), torch.nn.Linear(8, V))
    with open_writer(path) as writer:
        capture(model, [[tokens] for tokens, _ in found], writer, K, head="1")


def merged(path, found):
    merge(path, [stores.write(path.with_name("source"), found, shard_bytes=2000)])


CLOSED = (close, error_in_the_block, ranks, a_killed_rank, recovered, captured, merged)


@pytest.mark.parametrize("closed", CLOSED, ids=lambda closed: closed.__name__)
def test_a_closed_store_is_served_as_it_is(closed, served, tmp_path):
    folder, url = served
    path, found = folder / closed.__name__, documents(*LENGTHS)
    closed(path, found)
    for count in (5, 6):
        remote = Store(f"{url}/{path.name}", cache=tmp_path)
        stores.assert_same_store(remote, Store(path))
        assert len(remote) == count
        close(path, [stores.document(9, seed=7)])  # a store that is served can grow


class TestListing:
    def test_it_lists_every_shard(self, local):
        found = listing(local.path)
        assert found.header == local.info
        for listed, shard in zip(found.shards, local.shards, strict=True):
            assert listed.file == hashed_file(shard.path)
            assert listed.file[:2] == (shard.path.name, shard.bytes)
            assert torch.equal(listed.starts, shard.starts)
            assert listed.entries == len(shard.index()[0])
            assert listed.digest == shard.digest
        assert found.lookup == hashed_file(local.path / found.lookup.name)

    def test_an_older_lookup_file(self, local):
        """It stays while a reader can have read the store.index before. Older ones do not."""
        names = [listing(local.path).lookup.name]
        (local.path / "store.index.123.unfinished").touch()  # what a killed writer left
        for n in (7, 8):
            stores.write(local.path, documents(n))
            names.append(listing(local.path).lookup.name)
            left = [*local.path.glob("*.lookup"), *local.path.glob("*.unfinished")]
            assert {path.name for path in left} == {*names[-2:]}

    def test_known_shards_are_not_hashed_again(self, local, monkeypatch):
        """A shard is known if its size and the digest in its metadata are those of the index."""
        changed = local.shards[1].path
        rewrite(changed, seed=99)
        hashed = []

        def count(path):
            hashed.append(path.name)
            return hashed_file(path)

        for module in (_listing, _writer):
            monkeypatch.setattr(module, "hashed_file", count)
        found = stores.write(local.path, documents(*LENGTHS, 7))
        new = [found.shards[-1].path.name, changed.name]
        assert [name for name in hashed if name.endswith(".safetensors")] == new
        files = [shard.file for shard in listing(local.path).shards]
        assert files == [hashed_file(shard.path) for shard in found.shards]


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


def test_a_forged_index(local):
    data = (local.path / INDEX).read_bytes()
    for change, words in FORGED.values():
        (local.path / INDEX).write_bytes(data)
        forged(change, local.path)
        with pytest.raises(ValueError, match=words):
            listing(local.path)


def test_every_changed_byte_is_refused_or_changes_nothing(local):
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
