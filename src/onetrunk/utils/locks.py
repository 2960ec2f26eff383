"""One writer per file: a lock that dies with its process, and says who holds it.

The operating system's own lock (`flock`) decides on one machine: it goes with the process, however that ends. What
the lock file holds (pid, host, boot) serves the sentence, and the case that `flock` cannot see: a writer on another
machine that shares the folder. Knows nothing of the file that it guards.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# A file system without locks; the pid decides there.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class WriterLock:
    """The right to write beside `path`, from the constructor to `release`.

    The lock file `<path>.lock` stays, empty, after a release: a file that comes and goes could be locked twice.

    Args:
        path: what is to be written. Its folder exists.

    Raises:
        RuntimeError: another process has the right; the sentence says which, and what to do.
        OSError: the folder cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.file = self.path.with_name(f"{self.path.name}.lock")
        self._descriptor: int | None = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            holder = self._holder()
            if not self._flocked(holder) or _may_live_elsewhere(holder):
                raise RuntimeError(self._refusal(holder))
            self._write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot_id()}))
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = None
            raise

    def release(self) -> None:
        """Give the right back; twice is as once."""
        if self._descriptor is not None:
            self._write("")
            os.close(self._descriptor)
            self._descriptor = None

    def _holder(self) -> dict[str, object]:
        try:
            holder = json.loads(os.pread(self._descriptor, 4096, 0))
        except ValueError:
            return {}  # Released, new, or killed while it wrote the few bytes.
        return holder if isinstance(holder, dict) else {}

    def _flocked(self, holder: dict[str, object]) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return not _is_alive_here(holder)
        return True

    def _refusal(self, holder: dict[str, object]) -> str:
        who = f"process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= set(holder) else "another process"
        return (
            f"{self.path} is being written by {who}; wait for it, or stop it; if it is gone for certain, delete"
            f" {self.file} and start again"
        )

    def _write(self, text: str) -> None:
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)
        except OSError as error:
            error.filename = str(self.file)  # A descriptor has no name.
            raise


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _may_live_elsewhere(holder: dict[str, object]) -> bool:
    """True for a holder on a machine whose processes cannot be seen from here.

    The same boot is the same machine, whatever a container calls itself; the same host after another boot has no
    process of old.
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
        return True
    return True


_held: dict[Path, int] = {}


@contextlib.contextmanager
def held_folder(folder: str | os.PathLike[str], part: str = "") -> Iterator[None]:
    """Hold the right to write a run's folder in the block; a process that holds it already may hold it again.

    Args:
        folder: exists.
        part: of the folder, where several processes share it, each with a part of its own.

    Raises:
        RuntimeError: another process holds it.
        OSError: the folder cannot be written to.
    """
    # On the Hub no name with an underscore is uploaded.
    path = Path(folder).resolve() / f"_run{part}"
    lock = WriterLock(path) if not _held.get(path) else None
    _held[path] = _held.get(path, 0) + 1
    try:
        yield
    finally:
        _held[path] -= 1
        if lock is not None:
            lock.release()
