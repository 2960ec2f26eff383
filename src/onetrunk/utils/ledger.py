"""A file of answers that survives a kill (SQLite): no answer is computed, or paid for, twice.

A key is the sha256 of everything that its value depends on. A value is committed before `put` returns, without waiting
for the disk (SQLite's WAL): kill -9 loses nothing, and a power cut at most the last seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onetrunk.utils.files import parse_json


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
        with self._errors():
            # Without an isolation level Python begins no transactions of its own.
            self._connection = sqlite3.connect(self.path, wait_s, isolation_level=None, check_same_thread=False)
            self._connection.executescript(setup)

    def rows(self, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with self._errors():
            return self._connection.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Commit what the block writes as one transaction, or nothing of it if the block fails."""
        with self._errors():
            if self._connection.in_transaction:
                yield self._connection
                return
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # Commits, or rolls back.
                yield self._connection

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with self._mutex:
                yield
        except sqlite3.Error as error:
            raise RuntimeError(
                f"{self.path} cannot be used ({error}). If it is locked, end the process that uses it; if the disk is"
                f" full, free some space; if it is damaged, restore a copy or delete it, and {self.advice}"
            ) from error

    def close(self) -> None:
        """Close the database; may be called twice."""
        with self._errors():
            self._connection.close()


class Ledger(Database):
    """A mapping of sha256 keys (64 hexadecimal digits) to JSON values, for one process. Threads may share it."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(
            path,
            wait_s=1.0,
            # One process alone needs no memory shared with others, which network file systems do not have.
            setup="PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;"
            " CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, key BLOB UNIQUE, value BLOB)",
            advice="its answers are asked for, and paid, again",
        )

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: str) -> bool:
        return bool(self.rows("SELECT 1 FROM answers WHERE key = ?", (bytes.fromhex(key),)))

    def keys(self) -> list[str]:
        """Return the keys in the order of their first `put`."""
        return [key.hex() for (key,) in self.rows("SELECT key FROM answers ORDER BY number")]

    def get(self, key: str) -> Any:
        """Return the value under `key`; None if there is none."""
        rows = self.rows("SELECT value FROM answers WHERE key = ?", (bytes.fromhex(key),))
        try:
            return parse_json(rows[0][0]) if rows else None
        except ValueError as error:
            fault = f"{self.path} holds an answer that is not JSON ({error})"
            raise RuntimeError(f"{fault}; restore a copy or delete it, and {self.advice}") from error

    def put(self, key: str, value: Any) -> None:
        """Keep a value unless the key has one already; raises ValueError for what is not JSON."""
        try:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"the value under {key[:12]}... is not JSON ({error}); give texts, finite numbers"
            ) from error
        # A prompt from a damaged JSON file may hold half a surrogate pair; it is stored unchanged.
        row = bytes.fromhex(key), text.encode("utf-8", "surrogatepass")
        with self.writing() as database:
            database.execute("INSERT OR IGNORE INTO answers (key, value) VALUES (?, ?)", row)
