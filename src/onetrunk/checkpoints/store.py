"""Checkpoints in a store: put there whole and read again, known for what they are when a process was killed, deleted.

A checkpoint counts once its manifest is there, which is written last and deleted first. A mark stands beside the files
while they are written or deleted. Knows files and manifests; when and how often is `mirror`'s.
"""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from onetrunk.checkpoints.folders import step_of
from onetrunk.checkpoints.manifest import MANIFEST, check_manifest, sync
from onetrunk.utils.files import require_inside
from onetrunk.utils.redaction import redact

CHUNK = 1 << 20
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
READ_ONLY = ("http", "https")
ALLOWED = {"file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf"}
# Making a folder there makes the bucket, and a misspelt name would become one.
WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf"}


class UnreachableError(Exception):
    """What lies in a store could not be read or listed, which says nothing of what it is."""


class Store:
    """The files below `url`, by their paths in it ("checkpoint-8/optimizer.pt"); "" is the folder itself.

    A method that writes may raise whatever the file system raises; one that reads, UnreachableError.

    Args:
        url: a path, or a URL of a scheme that fsspec knows. Credentials come from the environment, not from the URL.
    """

    def __init__(self, url: str):
        self.url = url

    @property
    def shown(self) -> str:
        """The URL without secrets."""
        return redact(self.url)

    def probe(self) -> None:
        """Write a small file, read it back and delete it.

        Raises:
            RuntimeError: there is no such file system, or one of the three fails; the sentence says which.
        """
        _ = self._opened
        path, data, doing = f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16), "written to"
        try:
            self.write(path, data)
            doing = "read from"
            same = self.read(path) == data and path in self.list("")
            doing = "deleted from"
            self.remove(path)
        except Exception as error:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} can't be {doing} ({reason(error)}); check that the bucket or"
                " folder exists and that the credentials allow to list, read, write and delete"
            ) from error
        if not same:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} does not return at once what was written; name another place"
            )

    @property
    def schemes(self) -> tuple[str, ...]:
        """The names of the file system; "file" is a local one."""
        protocol = self._opened[0].protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    @property
    def local_path(self) -> Path | None:
        """The folder where it is a local one, else None."""
        return Path(self._opened[1] or "/") if "file" in self.schemes else None

    def list(self, path: str) -> set[str]:
        """Return the names of the files and folders in a folder; none where there is no folder."""
        file_system, _ = self._opened
        full = self._full(path)
        file_system.invalidate_cache()
        try:
            entries = [entry.rstrip("/") for entry in file_system.ls(full or "/", detail=False)]
        except FileNotFoundError:
            return set()
        except Exception as error:
            raise UnreachableError(reason(error)) from error
        return {entry.rsplit("/", 1)[-1] for entry in entries if entry.strip("/") != full.strip("/")}

    def has(self, path: str) -> bool:
        """Return whether there is such a file or folder."""
        folder, _, name = path.rpartition("/")
        return name in self.list(folder)

    def find(self, path: str) -> list[str]:
        """Return the paths of all files below a folder."""
        file_system, root = self._opened
        file_system.invalidate_cache()
        return [found.removeprefix(root).lstrip("/") for found in file_system.find(self._full(path))]

    def read(self, path: str, most: int = 16 << 20) -> bytes:
        """Return a small file, no more than its first `most` bytes."""
        data = b""
        for chunk in self.chunks(path):
            data += chunk
            if len(data) >= most:
                break
        return data[:most]

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of a file, at most CHUNK at a time.

        Raises:
            FileNotFoundError: there is none.
            UnreachableError: it can't be read.
        """
        file_system, _ = self._opened
        file_system.invalidate_cache()
        try:
            with file_system.open(self._full(path), "rb") as source:
                while chunk := source.read(CHUNK):
                    yield chunk
        except FileNotFoundError:
            raise
        except Exception as error:
            raise UnreachableError(reason(error)) from error

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, durably where the place is local."""
        full = self._make_folder_of(path)
        self._opened[0].pipe_file(full, data)
        self._make_durable(full)

    def put(self, source: Path, path: str) -> None:
        """Write a local file there, durably where the place is local."""
        full = self._make_folder_of(path)
        self._opened[0].put_file(str(source), full)
        self._make_durable(full)

    def remove(self, path: str) -> None:
        """Delete a file, durably where the place is local."""
        full = self._full(path)
        self._opened[0].rm_file(full)
        if self.local_path:
            sync(Path(full).parent)

    def remove_folder(self, path: str) -> None:
        """Delete what is left of a folder."""
        file_system, _ = self._opened
        file_system.invalidate_cache()
        if file_system.exists(self._full(path)):
            file_system.rm(self._full(path), recursive=True)

    @functools.cached_property
    def _opened(self) -> tuple[Any, str]:
        scheme = self.url.split("://")[0] if "://" in self.url else "file"
        if scheme in READ_ONLY:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} is read-only ({scheme}); give a path, s3://, gs:// or hf://"
            )
        # What a recipe names must be a store, and no file system that fsspec builds of others or of code.
        if scheme not in ALLOWED or "::" in self.url:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} is of no kind that is taken ({scheme}); give a path, s3://, gs://,"
                " az:// or hf://"
            )
        if "://" in self.url and "@" in self.url.split("://")[1].split("/")[0]:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} holds a user name or password before '@'; credentials come from"
                " the environment"
            )
        if any(character in self.url for character in "*?[\0\n"):
            raise RuntimeError(f"the checkpoint mirror {self.shown!r} holds one of * ? [; give a plain path or URL")
        # Late: not every run has a mirror.
        from fsspec.core import url_to_fs

        try:
            file_system, root = url_to_fs(self.url)
        except ImportError as error:
            package = PACKAGES.get(scheme)
            remedy = f"pip install '{package}'" if package else reason(error)
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} needs a package that is missing; {remedy}"
            ) from error
        except Exception as error:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} can't be opened ({reason(error)}); give a path, s3://, gs:// or"
                " hf://"
            ) from error
        return file_system, root.rstrip("/")

    def _full(self, path: str) -> str:
        return f"{self._opened[1]}/{path}" if path else self._opened[1]

    def _make_folder_of(self, path: str) -> str:
        full = self._full(path)
        if not WITHOUT_FOLDERS & set(self.schemes):
            self._opened[0].makedirs(full.rsplit("/", 1)[0] or "/", exist_ok=True)
        return full

    def _make_durable(self, full: str) -> None:
        if self.local_path:
            sync(full)
            sync(Path(full).parent)


def reason(error: BaseException) -> str:
    """Return what an error says, in one line without secrets."""
    if isinstance(error, UnreachableError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return redact(f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__)


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
