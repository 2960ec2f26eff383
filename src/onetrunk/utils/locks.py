"""One writer per file or folder: a lock (of `filelock`) that ends with its process."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


class WriterLock:
    """The exclusive right to write to `path`, from the constructor to `release`.

    The lock file `<path>.lock` may stay after a release.

    Args:
        path: the file or folder that is written; its parent exists.

    Raises:
        RuntimeError: another process holds the lock.
        OSError: the folder cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.file = self.path.with_name(f"{self.path.name}.lock")
        self._lock = FileLock(self.file, thread_local=False)
        try:
            self._lock.acquire(blocking=False)
        except Timeout as error:
            raise RuntimeError(
                f"{self.path} is being written by another process (`fuser {self.file}` names it); wait for it, or stop"
                " it"
            ) from error

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        self._lock.release()


# How often this process holds each folder.
_held: Counter[Path] = Counter()


@contextlib.contextmanager
def held_folder(folder: str | os.PathLike[str], part: str = "") -> Iterator[None]:
    """Hold the lock of a run's folder inside the block. A process that holds it may enter again.

    Args:
        folder: an existing folder.
        part: name of the part of the folder that this process writes, if several processes share it.
    """
    # A name with an underscore is not uploaded to the Hub.
    path = Path(folder).resolve() / f"_run{part}"
    lock = None if _held[path] else WriterLock(path)
    _held[path] += 1
    try:
        yield
    finally:
        _held[path] -= 1
        if lock is not None:
            lock.release()
