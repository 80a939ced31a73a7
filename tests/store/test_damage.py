"""Every change to a file of a store is an error that names the file, or changes nothing."""

import pytest
import torch

import logitless as ll
from logitless.store import Store, recover
from tests.support import store_damage, store_kills, stores
from tests.support.stores import assert_equal, documents, open_writer


@pytest.fixture
def long(tmp_path):
    return stores.write(tmp_path / "store", documents(300, 5, 100))


def change(path, place, by=1):
    data = bytearray(path.read_bytes())
    data[place] ^= by
    path.write_bytes(data)


def test_random_changes(tmp_path):
    """benchmarks/results/store-damage.txt has 1,000."""
    counts = store_damage.rounds(40, 1, tmp_path)
    assert not [outcome for outcome in counts if "OTHER" in outcome or "REFUSED" in outcome]


def test_kill_9(tmp_path):
    """For more rounds: python -m tests.support.store_kills 200."""
    assert store_kills.rounds(2, 1, tmp_path / "store") > 0


def test_a_changed_row_names_its_rows_and_spares_the_others(long):
    entry = long.entry(0)
    row = 150
    place = entry.place + row * long.info.row_bytes + 3
    whole = [long[0, 0:150], long[0, 151:300], long[1], long[2]]
    path = long.path / "0-000000.shard"
    change(path, place)
    store = Store(long.path)
    message = r"0-000000\.shard must have .* \(CRC-32\), got other bytes in row 150 of docu"
    for read in (
        lambda: store[0],
        lambda: store[0, 150:151],
        lambda: store[0, 100:160],
        lambda: store[[1, 0]],
        lambda: store.targets_for(whole[0][0][None], documents=[0]) and store[0],
        lambda: Store(long.path).find(documents(300)[0][0]),
    ):
        with pytest.raises(ValueError, match=message + "ment 0. To mend the store"):
            read()
    again = [store[0, 0:150], store[0, 151:300], store[1], store[2]]
    for got, want in zip(again, whole, strict=True):
        assert_equal(got, want)
    report = store.verify()
    assert len(report.problems) == 1
    assert "row 150 of document 0" in report.problems[0]
    # rows that changed places
    first, width = entry.place + 2 * store.info.row_bytes, store.info.row_bytes
    data = path.read_bytes()
    rows = data[first : first + width], data[first + width : first + 2 * width]
    path.write_bytes(data[:first] + rows[1] + rows[0] + data[first + 2 * width :])
    with pytest.raises(ValueError, match="got other bytes in rows 2 to 3 of document 0"):
        Store(long.path)[0, 1:4]
    path.write_bytes(data)
    change(path, place + 7 * store.info.row_bytes)
    with pytest.raises(ValueError, match="got other bytes in rows 150 to 157 of document 0"):
        Store(long.path)[0]


@pytest.mark.parametrize("values", ["u8", "counts"])
def test_rows_that_nobody_asks_for_are_not_read(values, tmp_path):
    """A damaged document beside one that begins with the same tokens, and is longer."""
    tokens = torch.arange(60)
    targets = ll.capture_sampled(torch.randn(60, stores.V), 8) if values == "counts" else None
    targets = stores.teacher(60) if targets is None else targets
    found = [(tokens[:n], targets[:n]) for n in (50, 60)]
    store = stores.write(tmp_path, found, values=values)
    whole, entry = store[1], store.entry(0)
    change(tmp_path / "0-000000.shard", entry.place + entry.size - 30)
    with pytest.raises(ValueError, match=r"of document 0\. To mend"):
        store[0]
    assert len(store[0, 5:5][0]) == 0
    for how in ({"lengths": [55]}, {"documents": [1]}, {"documents": [[1, 0]], "lengths": [55]}):
        got = store.targets_for(tokens[None, :55], **how)
        assert torch.equal(got.ids[0], whole[1].ids[:55])


def test_a_changed_entry(long):
    store, shard = Store(long.path), long.shards[0]
    change(long.path / "0-000000.shard", shard.table + 40 + 20)
    with pytest.raises(ValueError, match=r"got other bytes in the table, at document 1\. To mend"):
        store[1]
    assert_equal(store[2], long[2])
    assert "in the table, at document 1" in str(store.verify())
    change(long.path / "0-000000.shard", shard.table + 40 + 20)
    assert_equal(store[1], long[1])  # also for the store that has read the damage


def test_a_file_that_changes_while_it_is_open(long):
    long[0]
    path = long.path / "0-000000.shard"
    data = path.read_bytes()
    with open(path, "r+b") as file:
        file.truncate(len(data) // 2)
    with pytest.raises(ValueError, match="must keep its length while it is read, got a shorter"):
        long[2]
    with pytest.raises(ValueError, match=r"must have the \d+ bytes that store.index lists, got"):
        Store(long.path)
    path.unlink()
    with pytest.raises(ValueError, match=r"0-000000\.shard must exist, because store.index lists"):
        Store(long.path)


def test_a_shard_of_another_store(long, tmp_path):
    other = stores.write(tmp_path / "other", documents(300, 5, 100))
    (long.path / "0-000000.shard").write_bytes((other.path / "0-000000.shard").read_bytes())
    with pytest.raises(ValueError, match="must begin as a shard of this store and of this name"):
        Store(long.path)[0]


def test_a_damaged_lookup_and_index(long):
    """Both are made anew from the shards."""
    tokens, _ = long[2]
    for name, place in (("0-1.lookup", 0), ("0-1.lookup", -6), ("store.index", 12)):
        change(long.path / name, place)
        with pytest.raises(ValueError, match=rf"{name}.*Call|{name}.*call ll.store.recover"):
            Store(long.path).find(tokens)
        assert recover(long.path) == 3
        assert Store(long.path).find(tokens) == 2
        assert Store(long.path).verify()


def test_entries_that_change_places(long):
    path, size = long.path / "0-000000.shard", 40
    data, table = bytearray(path.read_bytes()), long.shards[0].table
    first, second = table + size, table + 2 * size
    data[first:second], data[second : second + size] = (
        data[second : second + size], data[first:second]
    )  # fmt: skip
    path.write_bytes(data)
    assert "got other bytes in the table" in str(Store(long.path).verify())
    with pytest.raises(ValueError, match="got other bytes in the table"):
        _ = Store(long.path).lengths


def test_headers(long):
    path = long.path / "store.json"
    text = path.read_text()
    for bad, message in (
        (text[:-9], "must describe a store of the format logitless.store, got"),
        ("[]", "must describe a store"),
        (text.replace('"version": 5', '"version": 4'), "must be a store of version 5"),
        (text.replace('"k": 8', '"k": -8'), "must have a valid header, got an error: k must lie"),
        (text.replace('"k": 8', '"k": 8, "x": 1'), "must have a header of k, teacher"),
        (text.replace('"id": "', '"id": "/'), "must have an id of 16 digits"),
        ('{"a":' * 9000, "must describe a store"),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            Store(long.path)
    path.write_text(text.replace('"k": 8', '"k": 7'))
    with pytest.raises(ValueError, match="must begin as a shard of this store"):
        Store(long.path)[0]


def test_strange_files(long):
    for name, form in (("copy of 0.shard", "PART-NUMBER.shard"), ("a.journal", "PART.journal")):
        (long.path / name).write_bytes(b"")
        with pytest.raises(ValueError, match=f"must be named {form}, as a writer names the files"):
            recover(long.path)
        (long.path / name).unlink()
    (long.path / "notes.txt").write_bytes(b"")
    assert recover(long.path) == 3
    (long.path / "0.journal").write_bytes(b"something else, long enough for a start" * 20)
    with pytest.raises(ValueError, match=r"0\.journal must begin as the next shard of its part in"):
        open_writer(long.path)


def test_ids_beyond_the_vocabulary(tmp_path):
    """Rows of another program: only `verify` looks at all ids."""
    from logitless.store.codes import encoded

    ((tokens, targets),) = documents(10)
    with open_writer(tmp_path) as writer:
        rows = encoded(targets, writer.header)
        writer.header.field(rows, 8).fill_(255)
        writer.header.field(rows, 2).fill_(255)
        writer.append(tokens, rows)
    assert "must have ids below 1000" in str(Store(tmp_path).verify())
    assert torch.equal(Store(tmp_path)[0][0], tokens)
