"""One writer per file or folder: a lock that is released when its process ends, and that says who holds it.

The operating system's lock (`flock`) decides on one machine. The lock file also holds the process id, host and boot id
of the holder, which are needed for the error message and for two cases without a reliable `flock`: a writer on another
machine that shares the folder, and a file system without locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# The errors of a file system without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class WriterLock:
    """The exclusive right to write to `path`, from the constructor to `release`.

    The lock file `<path>.lock` stays after a release, empty: if it were deleted, two processes could each lock a
    different file of that name.

    Args:
        path: what is to be written. Its folder exists.

    Raises:
        RuntimeError: another process holds the lock, or the lock file is a link; the message says what to do.
        OSError: the folder cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.file = self.path.with_name(f"{self.path.name}.lock")
        if self.file.is_symlink():
            raise RuntimeError(f"{self.file} is a link, and locking would write to the file it leads to; delete it")
        self._descriptor: int | None = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            holder = self._holder()
            if not self._flock(holder) or _may_be_alive_elsewhere(holder):
                known = {"pid", "host"} <= set(holder)
                who = f"process {holder['pid']} on {holder['host']}" if known else "another process"
                raise RuntimeError(
                    f"{self.path} is being written by {who}; wait for it, or stop it; if it is gone for certain,"
                    f" delete {self.file} and start again"
                )
            self._write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot_id()}))
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = None
            raise

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor is not None:
            self._write("")
            os.close(self._descriptor)
            self._descriptor = None

    def _holder(self) -> dict[str, object]:
        """Return what the lock file says of its holder; nothing if it is empty or only partly written."""
        try:
            holder = json.loads(os.pread(self._descriptor, 4096, 0))
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) else {}

    def _flock(self, holder: dict[str, object]) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return not _is_alive_here(holder)
        return True

    def _write(self, text: str) -> None:
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)
        except OSError as error:
            error.filename = str(self.file)  # An error on a descriptor names no file.
            raise


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _may_be_alive_elsewhere(holder: dict[str, object]) -> bool:
    """Return whether the holder ran on a machine whose processes cannot be seen from here.

    An equal boot id means the same machine, whatever host name a container has. An equal host name with another boot
    id means that the machine was restarted, so the holder is gone.
    """
    if "host" not in holder:
        return False
    return holder["host"] != socket.gethostname() and (not _boot_id() or holder.get("boot") != _boot_id())


def _is_alive_here(holder: dict[str, object]) -> bool:
    pid = holder.get("pid")
    if not isinstance(pid, int) or holder.get("boot") != _boot_id() or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# How often this process holds each folder.
_held: Counter[Path] = Counter()


@contextlib.contextmanager
def held_folder(folder: str | os.PathLike[str], part: str = "") -> Iterator[None]:
    """Hold the lock of a run's folder inside the block. A process that holds it may enter again.

    Args:
        folder: exists.
        part: of the folder, if several processes share it and each writes a part of its own.

    Raises:
        RuntimeError: another process holds the lock.
        OSError: the folder cannot be written to.
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
