"""What a stage of a pipeline reads: every file and folder that its settings name, by the sha256 of the contents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from fnmatch import fnmatch
from glob import glob
from pathlib import Path
from typing import Any

from onetrunk.data.files import BUILDERS

# Files of a run that no later stage reads.
IGNORED = ("checkpoint-*", "runs", "__pycache__", ".*", "events.out.tfevents.*", "_report")


def paths_in(value: Any) -> Iterator[Path]:
    """Yield each text in nested settings that may be a path, such as "model", "rewards.py:score" or "reward:model"."""
    if isinstance(value, (dict, list)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from paths_in(entry)
    if not isinstance(value, str) or "://" in value:
        return
    text = value.removeprefix("reward:")
    before, colon, _ = text.rpartition(":")
    for candidate in (text, before) if colon else (text,):
        if not candidate or len(candidate) >= 1000 or "\n" in candidate:
            continue
        yield Path(candidate).expanduser()
        if "*" in candidate and Path(candidate).suffix in BUILDERS:  # Rows that are streamed.
            yield from map(Path, sorted(glob(str(Path(candidate).expanduser()), recursive=True)))


def is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that a later stage may read, sorted; links to folders are not followed."""

    def is_read(file: Path) -> bool:
        parts = file.relative_to(folder).parts
        return file.is_file() and not any(fnmatch(part, pattern) for part in parts for pattern in IGNORED)

    return sorted(filter(is_read, folder.rglob("*")))


class Digests:
    """Digests of files and folders. A file is read again only if its size or its time of change is another.

    `known` maps a path to the size, the time and the digest.
    """

    def __init__(self, known: dict[str, list[Any]]):
        self.known = known

    def __getitem__(self, path: Path) -> str:
        if path.is_file():
            return self._of_file(path)
        names = [f"{file.relative_to(path).as_posix()} {self._of_file(file)}\n" for file in files_of(path)]
        return hashlib.sha256("".join(names).encode()).hexdigest()

    def _of_file(self, path: Path) -> str:
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns]
        entry = self.known.get(str(path))
        if entry is None or entry[:2] != stamp:
            with path.open("rb") as file:
                entry = [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
            self.known[str(path)] = entry
        return entry[2]
