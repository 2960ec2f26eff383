"""Answers that survive a kill, in an SQLite database: what was answered once is never asked again.

A key is the sha256 of everything that its value depends on. A value is committed before `put` returns, without waiting
for the disk (SQLite's WAL): kill -9 loses nothing, and a power cut at most the last seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEY = re.compile(r"[0-9a-f]{64}")


class Database:
    """An SQLite database that threads share.

    Args:
        path: created with its folder if it is missing.
        wait_s: how long to wait for other processes that use it.
        setup: statements of SQL to begin with.
        advice: what is lost with the file, for the error message.

    Raises:
        RuntimeError: of every operation: the database is damaged, in use, closed, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], wait_s: float, setup: str, advice: str):
        self.path, self.advice = Path(path), advice
        self._mutex = threading.RLock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.errors():
            # Without an isolation level Python begins no transactions of its own.
            self._connection = sqlite3.connect(self.path, wait_s, isolation_level=None, check_same_thread=False)
            self._connection.executescript(setup)

    def rows(self, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with self.errors():
            return self._connection.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Commit what the block writes as one transaction, or nothing of it if the block fails."""
        with self.errors():
            if self._connection.in_transaction:
                yield self._connection
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # After some errors SQLite has rolled back by itself.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Hold the lock between threads, and name the file in errors of the database."""
        try:
            with self._mutex:
                yield
        except (sqlite3.Error, json.JSONDecodeError) as error:
            raise RuntimeError(
                f"{self.path} cannot be used ({error}). If it is locked, end the process that uses it; if the disk is"
                f" full, free some space; if it is damaged, restore a copy or delete it, and {self.advice}"
            ) from error

    def close(self) -> None:
        """Close the database; may be called twice."""
        with self.errors():
            self._connection.close()


class Ledger:
    """A mapping of sha256 keys (64 hexadecimal digits) to JSON values, for one process. Threads may share it.

    Args:
        path: the database; created with its folder if it is missing.

    Raises:
        RuntimeError: of every operation, as `Database`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._database = Database(
            path,
            wait_s=1.0,
            # One process alone needs no memory shared with others, which network file systems do not have.
            setup="PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;"
            " CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, key BLOB UNIQUE, value BLOB)",
            advice="its answers are asked for, and paid, again",
        )
        # Commits what is put inside at once.
        self.writing = self._database.writing
        self.close = self._database.close

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: str) -> bool:
        return self._value(key) is not None

    def keys(self) -> list[str]:
        """Return the keys in the order of their first `put`."""
        return [key.hex() for (key,) in self._database.rows("SELECT key FROM answers ORDER BY number")]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under `key`, or `default`."""
        value = self._value(key)
        with self._database.errors():
            return default if value is None else json.loads(value)

    def put(self, key: str, value: Any) -> None:
        """Keep a value unless the key has one already; raises ValueError for what is no key or not JSON."""
        row = _as_bytes(key), _as_json(key, value)
        with self.writing() as database:
            database.execute("INSERT OR IGNORE INTO answers (key, value) VALUES (?, ?)", row)

    def _value(self, key: str) -> bytes | None:
        rows = self._database.rows("SELECT value FROM answers WHERE key = ?", (_as_bytes(key),))
        return rows[0][0] if rows else None


def _as_bytes(key: str) -> bytes:
    if KEY.fullmatch(key) is None:
        raise ValueError(f"the key is {key!r}; expected a sha256 as 64 hexadecimal digits")
    return bytes.fromhex(key)


def _as_json(key: str, value: Any) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the value under {key[:12]}... is not JSON ({error}); give texts, finite numbers") from error
    # A prompt from a damaged JSON file may hold half a surrogate pair; it is stored unchanged.
    return text.encode("utf-8", "surrogatepass")
