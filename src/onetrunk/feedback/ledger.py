"""An append-only file of keys and values that survives a kill: what was answered once is never asked again.

Each line is a JSON object, `{"crc", "key", "value"}`. The key is the sha256 of everything that the value depends on;
the crc32 is of key and value as written in the line. A line is passed to the operating system in one write, so kill -9
loses at most the line being written; a crash of the machine loses at most the lines of the last FSYNC_EVERY_S seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onetrunk.utils.disk_map import DiskMap
from onetrunk.utils.locks import WriterLock

KEY = re.compile(r"[0-9a-f]{64}")
_LINE = re.compile(rb'\{"crc":"([0-9a-f]{8})",("key":"([0-9a-f]{64})","value":(.*))\}', re.DOTALL)
FSYNC_EVERY_S = 5.0
# Bytes of a line are fewer.
LONGEST = 1 << 32
# The first byte of a line, and its bytes.
PLACE = struct.Struct("<QL")


class Ledger:
    """A mapping of sha256 keys (64 hexadecimal digits) to JSON values. Safe to share between threads.

    Values are read from the file, and their places from a temporary index on disk, so memory does not grow with the
    entries. An incomplete last line is cut off when the file is opened; a damaged line anywhere else is an error.

    Args:
        path: the file; created with its folder if it is missing.

    Raises:
        RuntimeError: another process writes to the file, or a line is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._end = 0
        self._mutex = threading.RLock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(WriterLock(self.path).release)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, self._descriptor)
            # Where each line begins, and its length.
            self._places = stack.enter_context(DiskMap())
            self._load()
            self._resources: contextlib.ExitStack | None = stack.pop_all()
        self._synced = time.monotonic()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with self._mutex:
            self._require_open()
            return len(self._places)

    def __contains__(self, key: str) -> bool:
        with self._mutex:
            self._require_open()
            return _as_bytes(key) in self._places

    def keys(self) -> Iterator[str]:
        """Return the keys in the order of their first `put`."""
        with self._mutex:
            self._require_open()
            return iter([key.hex() for key in self._places])

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under `key`, or `default`.

        Raises:
            RuntimeError: the line was changed after the file was opened, or the ledger is closed.
        """
        with self._mutex:
            self._require_open()
            place = self._places.get(_as_bytes(key))
            if place is None:
                return default
            start, length = PLACE.unpack(place)
            line = os.pread(self._descriptor, length, start)
        entry = _read_line(line)
        if entry is None or entry[0].hex() != key:
            raise RuntimeError(f"{self.path} was changed at byte {start} while it was in use; start again")
        return json.loads(entry[1])

    def put(self, key: str, value: Any) -> Any:
        """Append a value unless the key has one already; return the value of the key. Errors as in `replace`."""
        with self._mutex:
            return self.get(key) if key in self else self.replace(key, value)

    def replace(self, key: str, value: Any) -> Any:
        """Append a value in place of the one of the key, if any: of several lines with one key the last counts.

        Raises:
            ValueError: not a key, or a value that is not JSON (NaN and infinity are not).
            RuntimeError: the ledger is closed.
            OSError: the write failed (the disk is full); the file is unchanged.
        """
        line = _as_line(_as_bytes(key), value)
        with self._mutex:
            self._require_open()
            start = self._end
            self._append(line)
            self._places[_as_bytes(key)] = PLACE.pack(start, len(line) - 1)
            if time.monotonic() - self._synced >= FSYNC_EVERY_S:
                os.fsync(self._descriptor)
                self._synced = time.monotonic()
        return value

    def close(self) -> None:
        """Write everything to the disk (fsync), and release the file for other writers; may be called twice."""
        with self._mutex:
            if self._resources is not None:
                os.fsync(self._descriptor)
                self._resources.close()
                self._resources = None

    def _require_open(self) -> None:
        if self._resources is None:
            raise RuntimeError(f"the ledger {self.path} is closed; open it again")

    def _append(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._end + written)
        except OSError:
            # A full disk may have taken a part of the line; the next line must not follow that part.
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)

    def _load(self) -> None:
        """Index the lines of the file, and repair its end."""
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.rstrip(b"\n")
                entry = _read_line(text)
                if entry is None and line.endswith(b"\n"):
                    raise RuntimeError(
                        f"{self.path} line {number} is damaged (its checksum does not fit); delete that line, and what"
                        " it held is asked for again"
                    )
                if entry is None:
                    os.ftruncate(self._descriptor, self._end)
                    return
                self._places[entry[0]] = PLACE.pack(self._end, len(text))
                self._end += len(line)
                if not line.endswith(b"\n"):
                    self._append(b"\n")
                    return  # Another iteration would read this line end as a line.


def _as_bytes(key: str) -> bytes:
    if KEY.fullmatch(key) is None:
        raise ValueError(f"the key is {key!r}; expected a sha256 as 64 hexadecimal digits")
    return bytes.fromhex(key)


def _as_line(key: bytes, value: Any) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        # A prompt from a damaged JSON file may hold half a surrogate pair; it is stored unchanged.
        body = f'"key":"{key.hex()}","value":{text}'.encode("utf-8", "surrogatepass")
    except (TypeError, ValueError) as error:
        name = key.hex()[:12]
        raise ValueError(f"the value under {name}... is not JSON ({error}); give texts, finite numbers") from error
    if len(body) > LONGEST - 64:
        raise ValueError(f"the value under {key.hex()[:12]}... has {len(body)} bytes; give less than 4 GiB")
    return b'{"crc":"%08x",%s}\n' % (zlib.crc32(body), body)


def _read_line(line: bytes) -> tuple[bytes, bytes] | None:
    """Return the key and the value's JSON of a line without its line end; None if it is damaged."""
    match = _LINE.fullmatch(line)
    if match is None or int(match[1], 16) != zlib.crc32(match[2]):
        return None
    return bytes.fromhex(match[3].decode()), match[4]
