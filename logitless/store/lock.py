"""A lock on a file, which the system releases when the process ends."""

import fcntl
import os
import weakref
from pathlib import Path

from . import file_checks


class Lock:
    """Holds a lock on a file.

    The lock is released by `release`, at the end of a `with` block, or when the object is deleted.
    The system also releases the lock when the process ends, even if the process is killed. A forked
    process does not inherit the lock. The forked process closes its copy of the descriptor
    immediately, because a lock is held as long as any copy of its descriptor is open. If the file
    is already locked, the constructor raises an error. With `wait=True`, the constructor waits
    until the file is unlocked instead of raising. Several processes can hold the lock at the same
    time if all of them pass `shared=True`.
    """

    def __init__(self, path: Path, wait: bool = False, shared: bool = False):
        self.owner = os.getpid()
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(file, kind | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            owner = os.pread(file, 20, 0).decode(errors="replace")
            os.close(file)
            file_checks.not_locked(path, owner, self.owner)
        except OSError as error:
            os.close(file)
            raise OSError(error.errno, f"{error.strerror} (flock)", os.fspath(path)) from None
        self.file = file
        self._end = weakref.finalize(self, _unlock, file)
        _held.add(self)
        if not shared:
            os.ftruncate(file, 0)
            os.pwrite(file, str(self.owner).encode(), 0)

    @property
    def is_mine(self) -> bool:
        """Whether this process took the lock. In a forked process, the value is False."""
        return self.owner == os.getpid()

    def release(self) -> None:
        self._end()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def leave(self) -> None:
        """Closes this process's copy of the descriptor, while the parent process keeps the lock."""
        if self._end.detach() is not None:
            os.close(self.file)


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _unlock(file: int) -> None:
    # After a fork by C code, Python does not call `_leave_all`, and the child process still has a
    # copy of the descriptor `file`. LOCK_UN releases the lock even if such a copy is open.
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _leave_all() -> None:
    for lock in list(_held):
        lock.leave()


os.register_at_fork(after_in_child=_leave_all)
