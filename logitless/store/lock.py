"""A lock on a file, which the system releases when the process ends."""

import fcntl
import os
import weakref
from pathlib import Path

from . import checks


class Lock:
    """Holds a lock on a file until `release`, the end of the `with` block, or its deletion.

    If the file is locked already, the constructor raises, or waits with `wait=True`. The system
    releases the lock of a process that ends, even if it is killed. A forked process does not
    inherit the lock: it closes its copy of the descriptor immediately, because any open copy would
    keep the lock.
    """

    def __init__(self, path: Path, wait: bool = False):
        self.owner = os.getpid()
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            owner = os.pread(file, 20, 0).decode(errors="replace")
            os.close(file)
            checks.not_locked(path, owner, self.owner)
        except OSError as error:
            os.close(file)
            raise OSError(error.errno, f"{error.strerror} (flock)", os.fspath(path)) from None
        self.file = file
        self._end = weakref.finalize(self, _unlock, file)
        _held.add(self)
        os.ftruncate(file, 0)
        os.pwrite(file, str(self.owner).encode(), 0)

    @property
    def is_mine(self) -> bool:
        return self.owner == os.getpid()

    def release(self) -> None:
        self._end()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def leave(self) -> None:
        if self._end.detach() is not None:
            os.close(self.file)


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _unlock(file: int) -> None:
    # A fork by C code skips `_leave_all` and leaves the child a copy of the descriptor; LOCK_UN
    # releases the lock all the same.
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _leave_all() -> None:
    for lock in list(_held):
        lock.leave()


os.register_at_fork(after_in_child=_leave_all)
