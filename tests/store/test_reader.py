"""Reading a store of any size."""

import math
import time

import pytest
import torch

from logitless.store import Header, Store, Writer
from logitless.store import format as _format
from logitless.store import shard as _shard
from tests.support import stores


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
