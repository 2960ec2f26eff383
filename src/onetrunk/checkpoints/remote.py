"""Checkpoints in a store: put there whole and read again, known for what they are when a process was killed, deleted.

A checkpoint counts once its manifest is there, which is written last and deleted first. A mark stands beside the files
while they are written or deleted. Knows files and manifests; when and how often is `mirror`'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from onetrunk.checkpoints.folders import step_of
from onetrunk.checkpoints.manifest import MANIFEST, check_manifest, sync
from onetrunk.checkpoints.store import Store
from onetrunk.names import require_inside

MARK = ".unfinished.json"
# There one commit deletes a whole folder.
DELETES_AT_ONCE = "hf"


class DamagedError(Exception):
    """What lies there is not what its manifest says; the message is a phrase."""


@dataclass(frozen=True)
class Held:
    """What is known of a checkpoint folder.

    Args:
        name: of the folder; "" for the root, where a result lies.
        run: id of the run that wrote it; None where nothing says so.
        has_manifest: whether its manifest is there, written to its end.
        has_mark: whether it is being written or deleted, or was when a process was killed.
        is_empty: whether nothing is there.
        settings: digest of the settings of the run that was writing it; None where no mark says so.
    """

    name: str
    run: str | None
    has_manifest: bool
    has_mark: bool
    is_empty: bool
    settings: str | None = None

    @property
    def is_something(self) -> bool:
        """Whether there is a checkpoint folder that holds anything, or at the root a result."""
        return self.has_manifest or bool(self.name) and not self.is_empty

    @property
    def is_foreign(self) -> bool:
        """Whether there is something of which nothing says that it was written here."""
        return not (self.is_empty or self.has_manifest or self.has_mark)

    @property
    def is_begun(self) -> bool:
        """Whether it was not written to its end, or deleted in part: nothing can go on from it."""
        return self.has_mark and not self.has_manifest

    @property
    def is_settled(self) -> bool:
        """Whether it was written to its end and read again."""
        return self.has_manifest and not self.has_mark


class RemoteCheckpoints:
    """The checkpoints in a store. Every method may raise what the file system raises."""

    def __init__(self, store: Store):
        self.store = store

    def names(self) -> list[str]:
        """Return the names of the checkpoint folders, by step, whole or not."""
        return sorted((name for name in self.store.list("") if step_of(name) is not None), key=step_of)

    def held(self, name: str) -> Held:
        """Return what is known of a checkpoint folder, or of the result at the root (name "")."""
        files = self.store.list(name)
        mark = self._json(_path(name, MARK)) if MARK in files else {}
        manifest = self._json(_path(name, MANIFEST)) if MANIFEST in files else {}
        run = _text(manifest, "run") or _text(mark, "run")
        # A mark stands beside half a manifest where a process was killed while it wrote it.
        is_written = MANIFEST in files and (bool(manifest) or MARK not in files)
        return Held(name, run, is_written, MARK in files, not files, _text(mark, "settings"))

    def manifest(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Return the manifest of a checkpoint, its form and its names checked, and its bytes.

        Raises:
            DamagedError: it is missing, or not one.
        """
        try:
            data = self.store.read(_path(name, MANIFEST))
        except FileNotFoundError as error:
            raise DamagedError(f"{MANIFEST}: missing") from error
        try:
            manifest = check_manifest(json.loads(data))
        except (ValueError, RecursionError, RuntimeError) as error:
            raise DamagedError(f"{MANIFEST}: {str(error).removeprefix(f'{MANIFEST}: ')}") from error
        for file in manifest["files"]:
            above = {str(parent) for parent in PurePosixPath(file).parents}
            is_plain = str(PurePosixPath(file)) == file and file not in (MANIFEST, MARK, ".")
            if not is_plain or above & manifest["files"].keys():
                raise DamagedError(f"{MANIFEST}: {file!r} can't be a file of a checkpoint")
        if name and manifest.get("step") != step_of(name):
            raise DamagedError(f"{MANIFEST}: written for step {manifest.get('step')!r}")
        return manifest, data

    def begin(self, name: str, run: str | None, settings: str | None = None) -> None:
        """Mark a checkpoint folder as unfinished; from here on it does not count.

        Args:
            name: of the folder, there or not.
            run: id of the run that writes or deletes it.
            settings: digest of its settings.
        """
        self.store.write(_path(name, MARK), json.dumps({"run": run, "settings": settings}).encode())
        self._remove_manifest(name)

    def upload(self, folder: Path, name: str, manifest: dict[str, Any]) -> None:
        """Put the files of a manifest into a folder, the manifest last, and read all of it again.

        Args:
            folder: local.
            name: of the folder there; "" for the root.
            manifest: what to put there.

        Raises:
            DamagedError: what is read again is not what the manifest says.
        """
        self._remove_manifest(name)
        for file in manifest["files"]:
            self.store.put(folder / file, _path(name, file))
        data = (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode()
        self.store.write(_path(name, MANIFEST), data)
        if self.store.read(_path(name, MANIFEST)) != data:
            raise DamagedError(f"{MANIFEST}: other bytes than were written")
        self.verify(name, manifest)

    def verify(self, name: str, manifest: dict[str, Any]) -> None:
        """Read every file again.

        Raises:
            DamagedError: names the first that differs from the manifest.
        """
        for file, entry in manifest["files"].items():
            for _ in self._checked_chunks(name, file, entry):
                pass

    def settle(self, name: str) -> None:
        """Take the mark away: the folder is as it should be."""
        self.store.remove(_path(name, MARK))

    def delete(self, name: str, run: str | None) -> None:
        """Delete a checkpoint folder, its manifest first and its mark last.

        Args:
            name: of the folder.
            run: id of the run that deletes it.
        """
        if DELETES_AT_ONCE not in self.store.schemes:
            self.begin(name, run)
            for path in self.store.find(name):
                if path != _path(name, MARK):
                    self.store.remove(path)
            self.settle(name)
        self.store.remove_folder(name)

    def delete_result(self) -> None:
        """Delete the files of the result at the root, the manifest first."""
        try:
            files = self.manifest("")[0]["files"]
        except DamagedError:
            files = {}
        self._remove_manifest("")
        for file in files:
            if self.store.has(file):
                self.store.remove(file)

    def download(self, name: str, target: Path) -> None:
        """Bring a checkpoint into a local folder, durably, its manifest last.

        Args:
            name: of the folder there.
            target: is made.

        Raises:
            DamagedError: it is not what its manifest says.
        """
        manifest, data = self.manifest(name)
        target.mkdir(parents=True)
        for file, entry in manifest["files"].items():
            path = require_inside(file, target, f"a file in {MANIFEST}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as out:
                for chunk in self._checked_chunks(name, file, entry):
                    out.write(chunk)
            sync(path)
        (target / MANIFEST).write_bytes(data)
        sync(target / MANIFEST)
        for folder in (*(path for path in target.rglob("*") if path.is_dir()), target):
            sync(folder)

    def _checked_chunks(self, name: str, file: str, entry: dict[str, Any]) -> Iterator[bytes]:
        digest, size = hashlib.sha256(), 0
        try:
            for chunk in self.store.chunks(_path(name, file)):
                digest.update(chunk)
                size += len(chunk)
                # A file may grow without end.
                if size > entry["size"]:
                    break
                yield chunk
        except FileNotFoundError as error:
            raise DamagedError(f"{file}: missing") from error
        if size != entry["size"]:
            found = "more" if size > entry["size"] else size
            raise DamagedError(f"{file}: {found} bytes where {entry['size']} were written")
        if digest.hexdigest() != entry["sha256"]:
            raise DamagedError(f"{file}: other bytes than were written (sha256 differs)")

    def _remove_manifest(self, name: str) -> None:
        if self.store.has(_path(name, MANIFEST)):
            self.store.remove(_path(name, MANIFEST))

    def _json(self, path: str) -> dict[str, Any]:
        """Return the mapping in a file; nothing where there is none or only a part of one."""
        try:
            about = json.loads(self.store.read(path))
        except (ValueError, RecursionError, FileNotFoundError):
            return {}
        return about if isinstance(about, dict) else {}


def _text(about: dict[str, Any], name: str) -> str | None:
    value = about.get(name)
    return value if isinstance(value, str) else None


def _path(name: str, file: str) -> str:
    return f"{name}/{file}" if name else file
