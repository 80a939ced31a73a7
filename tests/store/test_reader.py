"""Reading a store of any size."""

import json
import math

import pytest
import torch

from logitless.store import Header, Store, Writer
from logitless.store import folder as _folder
from logitless.store import format as _format
from logitless.store import rows as _rows
from logitless.targets import safetensors as _safetensors
from tests.support import stores


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A store of a document of 2,048 tokens and of 16 that fill as many; the tokens of the 16."""
    path = tmp_path_factory.mktemp("packed") / "store"
    header = Header(151_936, 64)
    rows = _rows.encoded(stores.teacher(2048, 151_936, 64), header)
    parts = [torch.randint(0, 151_936, (128,)) for _ in range(16)]
    with Writer(path, vocab_size=151_936, k=64) as writer:
        writer.append(torch.randint(0, 151_936, (2048,)), rows)
        for i, tokens in enumerate(parts):
            part = {name: t[128 * i : 128 * (i + 1)] for name, t in rows.items()}
            writer.append(tokens, part)
    return Store(path), torch.cat(parts)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("known", [True, False])
def test_a_packed_batch(packed, rows, known):
    """How long it takes: benchmarks/store_speed.py."""
    store, tokens = packed
    lengths = [[128] * (16 // rows)] * rows if known else None
    got, (_, want) = store.targets_for(tokens.view(rows, -1), lengths), store[0]
    assert torch.equal(got.ids.view(-1, 64), want.ids)
    assert torch.equal(got.logprobs.view(-1, 64), want.logprobs)


def test_empty_ranges(tmp_path):
    """Every eighth token begins at a byte of its own, where an empty range has no bytes."""
    store = stores.write(tmp_path / "s", stores.documents(30, 20))
    for number, n in enumerate((30, 20)):
        for at in range(n + 1):
            tokens, targets = store[number, at:at]
            assert tokens.shape == (0,)
            assert targets.ids.shape == (0, stores.K)


def test_opening_a_hundred_million_tokens_reads_where_documents_begin(tmp_path):
    """Their files are holes except for the starts of documents, and no index is made."""
    header = Header(151_936, 64)
    _folder.write_header(tmp_path, header)
    tokens, each = 1_200_000, 1000
    sparse_shard(tmp_path / "0-000000.safetensors", header, tokens, each)
    for i in range(1, 84):
        (tmp_path / f"0-{i:06}.safetensors").hardlink_to(tmp_path / "0-000000.safetensors")
    store = Store(tmp_path)
    assert "index" not in vars(store)
    assert store.tokens == 100_800_000
    assert len(store) == 84 * tokens // each
    assert store[50_000][0].shape == (each,)


def sparse_shard(path, header, tokens, each):
    """A file of documents of the same length, whose columns are holes except for their starts."""
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
