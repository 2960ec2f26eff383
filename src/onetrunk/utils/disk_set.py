"""A set on disk, for keys that are too many for memory."""

from __future__ import annotations

import sqlite3


class DiskSet:
    """A set of bytes in a temporary file that no other process sees.

    It takes a few MiB of memory whatever its size, and about 10 microseconds per operation. Threads may share it only
    under a lock, and a forked process must not use it. SQLite chooses the folder of the file (SQLITE_TMPDIR, TMPDIR),
    and removes it with the process.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF")
        self._database.execute("CREATE TABLE entries (key BLOB UNIQUE)")

    def __enter__(self) -> DiskSet:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add(self, key: bytes) -> bool:
        """Add a key; return whether it is new. Raises OSError if the temporary file cannot be written."""
        try:
            return self._database.execute("INSERT OR IGNORE INTO entries VALUES (?)", (key,)).rowcount == 1
        except sqlite3.OperationalError as error:
            raise OSError(f"the temporary set of prompts cannot be written ({error}); free room in TMPDIR") from error
