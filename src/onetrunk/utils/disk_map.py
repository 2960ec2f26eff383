"""A mapping on disk, for keys that are too many for memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator


class DiskMap:
    """A mapping of bytes to bytes in a temporary file that no other process sees; the order is that of insertion.

    It takes a few MiB of memory whatever its size, and about 10 microseconds per operation. Threads may share it only
    under a lock, and a forked process must not use it. SQLite chooses the folder of the file (SQLITE_TMPDIR, TMPDIR),
    and removes it with the process.

    Raises:
        OSError: of every operation: the temporary file cannot be made or written (the disk is full).
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._run("PRAGMA journal_mode = OFF")
        self._run("PRAGMA synchronous = OFF")
        self._run("CREATE TABLE entries (number INTEGER PRIMARY KEY, key BLOB UNIQUE, value BLOB)")

    def __enter__(self) -> DiskMap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        # Nothing is ever removed, so the numbers have no gaps.
        return self._run("SELECT max(number) FROM entries").fetchone()[0] or 0

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    def __iter__(self) -> Iterator[bytes]:
        return (key for (key,) in self._run("SELECT key FROM entries ORDER BY number"))

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._run(
            "INSERT INTO entries (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, value),
        )

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None."""
        found = self._run("SELECT value FROM entries WHERE key = ?", (key,)).fetchone()
        return None if found is None else found[0]

    def add(self, key: bytes) -> bool:
        """Add a key with an empty value; return whether it is new."""
        return self._run("INSERT OR IGNORE INTO entries (key, value) VALUES (?, x'')", (key,)).rowcount == 1

    def close(self) -> None:
        """Remove the file."""
        self._database.close()

    def _run(self, statement: str, values: tuple[bytes, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise OSError(
                f"the temporary index of a ledger or a stream failed ({error}); free room in TMPDIR"
            ) from error
