"""The journal of a writer: its next shard, while it grows (docs/store-format.md).

A journal has the start of the shard, and then the documents, each written in one call. When it is
full, the table and the end are appended and the file is renamed. If a writer is killed, the last
document can be incomplete: recovery cuts it off, and keeps all documents before it.
"""

import os
import weakref
from pathlib import Path

from ..targets.safetensors import sync
from . import checks
from .format import Header
from .listing import journals
from .lookup import Hashes
from .shard import ENTRY, MAGIC, Entry, File, end_of, entry_of, number_in, start_of


class Journal:
    """The journal of the shard PART-NUMBER, or a later one that the last writer has left."""

    def __init__(self, folder: Path, shard: str, header: Header, store: str):
        part, number = shard.split("-")
        self.path, self.header = folder / f"{part}.journal", header
        if self.path.exists():  # after the last shard was removed, it keeps its number
            number = f"{max(int(number), number_in(_start(self.path))):06}"
        self.shard = f"{part}-{number}"
        self.start = start_of(store, self.shard)
        self.number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.close = weakref.finalize(self, os.close, self.number)
        self.table, self.known, self.tokens = bytearray(), set(), 0
        self.known: set[Hashes]
        self.finished = False
        self.size = self._recovered()
        os.ftruncate(self.number, self.size)
        if not self.size:
            self._write(self.start)

    def __len__(self) -> int:
        return len(self.table) // ENTRY.size

    @property
    def filled(self) -> int:
        """The bytes of all documents."""
        return self.size - len(self.start)

    def _recovered(self) -> int:
        """Finds the documents in the file, and returns its size up to the last of them."""
        file, end = File(self.path), os.fstat(self.number).st_size
        start = file.read(0, min(end, len(self.start)))
        if len(start) < len(self.start) or not any(start):  # a loss of power can leave zeros
            return 0
        if start != self.start:
            rule = "begin as the next shard of its part in this store"
            advice = "Remove the file, and run the capture again to restore its documents"
            checks.refuse(self.path, rule, f"other bytes. {advice}")
        place = len(start)
        while place + ENTRY.size <= end:
            entry = entry_of(file.read(place, ENTRY.size))
            after = place + ENTRY.size
            # The table that a killed writer may have appended has entries of other places.
            if entry is None or entry.place != after or after + entry.size > end:
                break
            # A document that was damaged later is left out, those after it are kept.
            if entry.has(file.read(after, entry.size), self.header):
                self._add(entry)
            elif after + entry.size == end:
                break
            place = after + entry.size
        return place

    def _add(self, entry: Entry) -> None:
        self.table += entry.packed()
        self.known.add(Hashes(entry.key, entry.check))
        self.tokens += entry.tokens

    def append(self, documents: list[tuple[Hashes, int, bytes]]) -> None:
        """Appends documents: hashes, number of tokens, bytes. After an error, none is there."""
        entries, parts, place = [], [], self.size
        for hashes, tokens, data in documents:
            place += ENTRY.size
            entries.append(Entry(place, len(data), *hashes, tokens))
            parts += entries[-1].packed(), data
            place += len(data)
        self._write(b"".join(parts))
        for entry in entries:
            self._add(entry)

    def _write(self, data: bytes) -> None:
        view, place = memoryview(data), self.size
        try:
            while view:  # one pwrite may write only a part
                done = os.pwrite(self.number, view, place)
                view, place = view[done:], place + done
        except BaseException:
            os.ftruncate(self.number, self.size)
            raise
        self.size = place

    def finish(self) -> None:
        """Turns the journal into a shard, which is on the disk when this function returns."""
        size, path = self.size, self.path.with_name(f"{self.shard}.shard")
        table = bytes(self.table)
        try:
            self._write(table + end_of(table, self.tokens, self.size))
            os.fsync(self.number)
            os.rename(self.path, path)
        except BaseException:
            os.ftruncate(self.number, size)
            self.size = size
            raise
        sync(path.parent)
        self.close()
        self.table, self.finished = bytearray(), True


def unfinished(path: Path) -> int:
    """Bytes of the documents in journals, open or left by a killed writer."""
    size = 0
    for journal, _ in journals(path):
        size += journal.stat().st_size - len(_start(journal))
    return size


def _start(path: Path) -> bytes:
    """The bytes before the first document."""
    with open(path, "rb") as file:
        head = file.read(len(MAGIC) + 4)
        return head + file.read(int.from_bytes(head[-4:], "little"))
