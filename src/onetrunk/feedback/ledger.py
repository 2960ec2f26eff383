"""An append-only file of keys and values that survives a kill: what was answered once is never asked again.

Each line is a JSON object, `{"crc", "key", "value"}`. The key is the sha256 of everything that the value depends on;
the crc32 is of key and value as written in the line. A line is passed to the operating system in one write, so kill -9
loses at most the line being written. `fsync_every_s` bounds what a crash of the machine can lose.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onetrunk.utils.locks import WriterLock

KEY = re.compile(r"[0-9a-f]{64}")
_LINE = re.compile(rb'\{"crc":"([0-9a-f]{8})",("key":"([0-9a-f]{64})","value":(.*))\}', re.DOTALL)


class Ledger:
    """A mapping of sha256 keys to JSON values, in a file that only grows. Safe to share between threads.

    Memory holds only the place of each value (about 200 bytes per entry); values are read from the file. An incomplete
    last line is cut off when the file is opened; a damaged line anywhere else is an error.

    Args:
        path: the file; created with its folder if it is missing.
        fsync_every_s: seconds between fsyncs (0: after every line; None: only in `close`).

    Raises:
        RuntimeError: another process writes to the file, or a line is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], fsync_every_s: float | None = 5.0):
        self.path = Path(path)
        self.fsync_every_s = fsync_every_s
        self.repaired_bytes = 0
        self._places: dict[bytes, tuple[int, int]] = {}
        self._mutex = threading.RLock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock: WriterLock | None = WriterLock(self.path)
        self._descriptor = -1
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            self._end = self._load()
        except BaseException:
            self._release()
            raise
        self._synced = time.monotonic()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return bytes.fromhex(key) in self._places

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under `key`, or `default`.

        Raises:
            RuntimeError: the line was changed after the file was opened.
        """
        with self._mutex:
            place = self._places.get(bytes.fromhex(key))
            if place is None:
                return default
            self._require_open()
            line = os.pread(self._descriptor, place[1], place[0])
        entry = _read_line(line)
        if entry is None or entry[0].hex() != key:
            raise RuntimeError(f"{self.path} was changed at byte {place[0]} while it was in use; start again")
        return json.loads(entry[1])

    def put(self, key: str, value: Any) -> Any:
        """Append a value unless the key has one already; return the value of the key.

        Args:
            key: 64 hexadecimal digits.
            value: JSON, without NaN and infinity.

        Raises:
            ValueError: not a key, or not JSON.
            RuntimeError: the ledger is closed.
            OSError: the write failed (the disk is full); the file is unchanged.
        """
        return self._put(key, value, replaces=False)

    def replace(self, key: str, value: Any) -> Any:
        """Append a value that replaces the one of the key, if any; otherwise like `put`.

        The old line stays in the file; of several lines with one key the last counts.
        """
        return self._put(key, value, replaces=True)

    def _put(self, key: str, value: Any, *, replaces: bool) -> Any:
        if KEY.fullmatch(key) is None:
            raise ValueError(f"the key is {key!r}; expected a sha256 as 64 hexadecimal digits")
        line = _as_line(key, value)
        with self._mutex:
            self._require_open()
            if bytes.fromhex(key) in self._places and not replaces:
                return self.get(key)
            self._append(line)
            self._places[bytes.fromhex(key)] = (self._end, len(line) - 1)
            self._end += len(line)
            if self.fsync_every_s is not None and time.monotonic() - self._synced >= self.fsync_every_s:
                self.sync()
        return value

    def keys(self) -> Iterator[str]:
        """Yield the keys in the order of their first `put`."""
        with self._mutex:
            keys = list(self._places)
        return (key.hex() for key in keys)

    def sync(self) -> None:
        """Write everything to the disk (fsync)."""
        with self._mutex:
            self._require_open()
            os.fsync(self._descriptor)
            self._synced = time.monotonic()

    def close(self) -> None:
        """Sync and release the file for other writers; may be called twice."""
        with self._mutex:
            if self._lock is not None:
                os.fsync(self._descriptor)
                self._release()

    def _release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _require_open(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"the ledger {self.path} is closed; open it again")

    def _append(self, line: bytes) -> None:
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(self._descriptor, line[written:], self._end + written)
        except OSError:
            # A full disk may have taken a part of the line; the next line must not follow that part.
            os.ftruncate(self._descriptor, self._end)
            raise

    def _load(self) -> int:
        """Index the file, repair its end, and return its length."""
        start, number = 0, 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                entry = _read_line(line.rstrip(b"\n"))
                if entry is None and line.endswith(b"\n"):
                    raise RuntimeError(
                        f"{self.path} line {number} is damaged (its checksum does not fit); delete that line, and what"
                        " it held is asked for again"
                    )
                if entry is None:
                    self.repaired_bytes = len(line)
                    os.ftruncate(self._descriptor, start)
                    break
                self._places[entry[0]] = (start, len(line.rstrip(b"\n")))
                start += len(line)
                if not line.endswith(b"\n"):
                    os.pwrite(self._descriptor, b"\n", start)
                    self.repaired_bytes = 1
                    return start + 1  # Another iteration would read this line end as a line.
        return start


def _as_line(key: str, value: Any) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        # A prompt from a damaged JSON file may hold half a surrogate pair; it is stored unchanged.
        body = f'"key":"{key}","value":{text}'.encode("utf-8", "surrogatepass")
    except (TypeError, ValueError) as error:
        raise ValueError(f"the value under {key[:12]}... is not JSON ({error}); give texts, finite numbers") from error
    return b'{"crc":"%08x",%s}\n' % (zlib.crc32(body), body)


def _read_line(line: bytes) -> tuple[bytes, bytes] | None:
    """Return the key and the value's JSON of a line without its line end; None if it is damaged."""
    match = _LINE.fullmatch(line)
    if match is None or int(match[1], 16) != zlib.crc32(match[2]):
        return None
    return bytes.fromhex(match[3].decode()), match[4]
