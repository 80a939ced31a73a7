"""A store over the protocol of S3, with moto as the server."""

import socket

import pytest

from logitless.store import Store
from tests.support import stores
from tests.support.stores import LENGTHS, documents

pytest.importorskip("s3fs", reason="needs s3fs, which the extra remote brings")
moto = pytest.importorskip("moto.server", reason="needs moto[server]")
fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def options(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=port)
    server.start()
    found = {
        "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"},
        "use_listings_cache": False,
    }
    system = fsspec.filesystem("s3", **found)
    if not system.exists("bucket"):  # the servers of one process share their buckets
        system.mkdir("bucket")
    yield found
    server.stop()


@pytest.fixture
def local(tmp_path):
    return stores.write(tmp_path / "store", documents(*LENGTHS), shard_bytes=2000)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
class TestS3:
    def test_the_same_targets(self, local, options, tmp_path):
        system = fsspec.filesystem("s3", **options)
        system.put(str(local.path), "bucket/same", recursive=True)
        remote = Store("s3://bucket/same", cache=tmp_path / "c", storage_options=options)
        stores.assert_same_store(remote, local)

    def test_a_wrong_and_a_missing_shard(self, local, options, tmp_path, monkeypatch):
        monkeypatch.setattr("logitless.store.remote.FIRST_WAIT", 0.0)
        system = fsspec.filesystem("s3", **options)
        system.put(str(local.path), "bucket/targets", recursive=True)
        remote = Store("s3://bucket/targets", cache=tmp_path / "c", storage_options=options)
        system.pipe("bucket/targets/0-000001.safetensors", bytes(remote.shards[1].bytes))
        with pytest.raises(OSError, match=r"0-000001\.safetensors must be read in 5 attempts, got"):
            remote[1]
        system.rm("bucket/targets/0-000001.safetensors")
        with pytest.raises(FileNotFoundError):
            remote[1]
        assert remote[0][0].tolist() == local[0][0].tolist()

    def test_an_upload(self, options, tmp_path):
        url, how = "s3://bucket/uploaded", {"shard_bytes": 2000, "storage_options": options}
        local = stores.write(tmp_path / "s", documents(*LENGTHS), upload=url, **how)
        remote = Store(url, cache=tmp_path / "c", storage_options=options)
        stores.assert_same_store(remote, local)
        with pytest.raises(OSError, match="must have all shards of this writer, got an upload"):
            stores.write(tmp_path / "t", documents(3), upload="s3://no-such-bucket/a", **how)

    def test_a_missing_store(self, options, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"s3://bucket/none must have a store\.index"):
            Store("s3://bucket/none", cache=tmp_path / "c", storage_options=options)
