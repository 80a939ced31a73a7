"""Uploads the finished shards of a writer in a background thread.

RANK.uploaded has one line per uploaded shard, so that the writer after one that was killed uploads
only the rest. A line does not count if its shard is no longer at the address. After its last shard,
a writer uploads store.index with the uploaded shards of all ranks that share the folder, so it
never lists a shard that is missing. Older lookup files stay, for readers with an older store.index.
"""

import contextlib
import json
import os
import queue
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import file_checks
from . import remote_checks as checks
from .folder import SHARD, shard_files
from .format import Header
from .listing import INDEX, Listing, existing, listing_of
from .lock import Lock
from .remote import Remote, is_address
from .shard import Shard

ATTEMPTS = 8  # attempts per file; the waits between the attempts take one minute in total


def destination(url: str, options: Mapping[str, Any] | None = None) -> Remote:
    checks.upload_address(url, is_address(url))
    remote = Remote(url, attempts=ATTEMPTS, options=options, argument="upload")
    checks.can_write(url, remote.is_http)
    return remote


class Uploads:
    """The uploads of one writer."""

    def __init__(self, remote: Remote, folder: Path, rank: int, header: Header):
        self.remote, self.folder, self.rank, self.header = remote, folder, rank, header
        self.record = folder / f"{rank}.uploaded"
        self.failed: dict[Path, Exception] = {}
        self._waiting: queue.Queue[Path | None] = queue.Queue()
        self._stopping = threading.Event()
        self.remote.pause = self._pause
        self._uploaded: set[str] = set()  # names of the shards that this object has uploaded
        done = self._at_address([self.record])
        for path in shard_files(folder):
            if path.name.partition("-")[0] == str(rank) and path.name not in done:
                self._waiting.put(path)
        self._thread = threading.Thread(target=self._run, name="logitless upload", daemon=True)
        self._thread.start()

    def add(self, path: Path) -> None:
        self._waiting.put(path)

    def finish(self) -> None:
        """Waits for the uploads, then uploads store.index. Raises an OSError for missing shards."""
        self._waiting.put(None)
        self._thread.join()
        for path in list(self.failed):  # each failed upload is repeated once
            self._upload(path)
        if self.failed:
            names = sorted(path.name for path in self.failed)
            error = next(iter(self.failed.values()))
            raise checks.not_uploaded(self.remote.url, names, error) from error
        self._upload_index()

    def stop(self) -> None:
        """Stops the thread after its current upload, without waiting for it."""
        self._stopping.set()
        self._waiting.put(None)

    def _run(self) -> None:
        while (path := self._waiting.get()) is not None and not self._stopping.is_set():
            self._upload(path)

    def _upload(self, path: Path) -> None:
        try:
            self.remote.write(path, path.name)
            line = json.dumps({"url": self.remote.url, "name": path.name})
            with open(self.record, "a") as file:
                # Begins with a line break, because a killed writer may have left part of a line.
                file.write(f"\n{line}\n")
                file.flush()
                os.fsync(file.fileno())
            self._uploaded.add(path.name)
            self.failed.pop(path, None)
        except Exception as error:  # `finish` raises an error that contains this error
            self.failed[path] = error

    def _upload_index(self) -> None:
        with (
            Lock(self.folder / "store.lock", wait=True),
            tempfile.TemporaryDirectory() as temporary,
        ):
            done = self._at_address(self.folder.glob("*.uploaded"))
            files = [path for path in shard_files(self.folder) if path.name in done]
            into, known = Path(temporary), existing(self.folder, self.header).hashed
            listing = listing_of(files, self.header, known, into)
            for path in (into / listing.lookup.name, self.folder / "store.json", into / INDEX):
                self.remote.write(path, path.name)

    def _at_address(self, records: Iterable[Path]) -> set[str]:
        """The names of all shards that are known to be at the address.

        These are listed in its store.index, or in `records` (RANK.uploaded files) and have their
        local size there. Raises if the address has another store, whose files would be replaced.
        """
        found = {*self._uploaded, *self._listed()}
        for name in set().union(*(_recorded(record, self.remote.url) for record in records)):
            path = self.folder / name
            is_new = name not in found and path.is_file()
            if is_new and self.remote.size(name) == path.stat().st_size:
                found.add(name)
        return found

    def _listed(self) -> set[str]:
        try:
            listing = self.remote.read(INDEX, Listing.of_bytes)
        except FileNotFoundError:
            return set()
        where = self.remote.address(INDEX)
        file_checks.same_header(where, listing.header, self.header, self.folder)
        for shard in listing.shards:
            path = self.folder / shard.file.name
            same = path.is_file() and Shard(path, self.header).digest == shard.digest
            checks.own_address(self.remote.url, shard.file.name, same)
        return {shard.file.name for shard in listing.shards}

    def _pause(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise InterruptedError("the upload was stopped")


def _recorded(record: Path, url: str) -> set[str]:
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for line in record.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # a killed writer can leave a part of a line
                fields = json.loads(line)
                if isinstance(fields, dict) and fields.get("url") == url:
                    found.add(str(fields.get("name")))
    return {name for name in found if SHARD.fullmatch(name)}
