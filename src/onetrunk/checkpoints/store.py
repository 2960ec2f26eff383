"""Checkpoints in a folder or an object store: file operations over fsspec, and whole checkpoints made of them.

A checkpoint counts once its manifest is there, which is written last and deleted first. While files are written or
deleted, a mark (`.unfinished.json`) is next to them, so that what a killed process left behind is recognised.
When and how often checkpoints are uploaded is decided in `mirror.py`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from onetrunk.checkpoints.folders import step_of
from onetrunk.checkpoints.manifest import MANIFEST, check_manifest
from onetrunk.utils.files import require_inside, sync
from onetrunk.utils.redaction import redact

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CHUNK = 1 << 20
# A manifest or a mark is never larger.
MOST_BYTES = 16 << 20
# The schemes of object stores, and the package that each needs. They have no folders: to create a folder there would
# create a bucket, even one with a misspelt name.
OBJECT_STORES = {
    **{"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"},
    **{"az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"},
}
# No others: fsspec also has file systems that are built of others, or that run code.
ALLOWED = {"file", "memory", *OBJECT_STORES}
MARK = ".unfinished.json"


class UnreachableError(Exception):
    """A store could not be read or listed, so nothing is known about what it holds."""


class DamagedError(Exception):
    """A checkpoint differs from its manifest; the message is a phrase."""


class Store:
    """The files below `url`, by their relative paths ("checkpoint-8/optimizer.pt"); "" is the folder itself.

    Methods that read raise UnreachableError. Methods that write raise what the file system raises.

    Args:
        url: a path, or a URL with one of the ALLOWED schemes. Credentials come from the environment, not from the URL.
    """

    def __init__(self, url: str):
        self.url = url

    @property
    def shown(self) -> str:
        """The URL without secrets."""
        return redact(self.url)

    @property
    def schemes(self) -> set[str]:
        """The names of the file system."""
        protocol = self._file_system.protocol
        return {protocol} if isinstance(protocol, str) else set(protocol)

    @property
    def local_path(self) -> Path | None:
        """The folder on a local disk; None for any other store."""
        return Path(self._root or "/") if "file" in self.schemes else None

    def probe(self) -> None:
        """Write a small file, read it and delete it.

        Raises:
            RuntimeError: the URL is not supported, or one of the three operations fails; the message says which.
        """
        _ = self._file_system
        path, data, operation = f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16), "written to"
        try:
            self.write(path, data)
            operation = "read from"
            same = self.read(path) == data and path in self.list("")
            operation = "deleted from"
            self.remove(path)
        except Exception as error:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} can't be {operation} ({reason(error)}); check that the bucket or"
                " folder exists and that the credentials allow to list, read, write and delete"
            ) from error
        if not same:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} does not return immediately what was written; use another store"
            )

    def list(self, folder: str) -> set[str]:
        """Return the names of the files and folders in a folder; an empty set if the folder does not exist."""
        full = self._full(folder)
        try:
            with self._fresh_read():
                entries = [entry.rstrip("/") for entry in self._file_system.ls(full or "/", detail=False)]
        except FileNotFoundError:
            return set()
        return {entry.rsplit("/", 1)[-1] for entry in entries if entry.strip("/") != full.strip("/")}

    def has(self, path: str) -> bool:
        """Return whether a file or folder exists. (fsspec's `exists` is False where a store does not answer.)"""
        folder, _, name = path.rpartition("/")
        return name in self.list(folder)

    def find(self, folder: str) -> list[str]:
        """Return the paths of all files in a folder and its subfolders."""
        self._file_system.invalidate_cache()
        files = self._file_system.find(self._full(folder))
        return [file.removeprefix(self._root).lstrip("/") for file in files]

    def read(self, path: str) -> bytes:
        """Return the content of a small file, at most its first MOST_BYTES bytes."""
        with self._fresh_read(), self._file_system.open(self._full(path), "rb") as file:
            return file.read(MOST_BYTES)

    def chunks(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file in parts of at most CHUNK bytes.

        Raises:
            FileNotFoundError: the file does not exist.
            UnreachableError: the file cannot be read.
        """
        with self._fresh_read(), self._file_system.open(self._full(path), "rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, synced to disk in a local store."""
        with self._target(path) as full:
            self._file_system.pipe_file(full, data)

    def put(self, source: Path, path: str) -> None:
        """Copy a local file into the store, synced to disk in a local store."""
        with self._target(path) as full:
            self._file_system.put_file(str(source), full)

    def remove(self, path: str) -> None:
        """Delete a file, synced to disk in a local store."""
        full = self._full(path)
        self._file_system.rm_file(full)
        if self.local_path:
            sync(Path(full).parent)

    def remove_folder(self, path: str) -> None:
        """Delete a folder with its contents, if it exists."""
        self._file_system.invalidate_cache()
        if self._file_system.exists(self._full(path)):
            self._file_system.rm(self._full(path), recursive=True)

    @property
    def _file_system(self) -> AbstractFileSystem:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    @functools.cached_property
    def _opened(self) -> tuple[AbstractFileSystem, str]:
        scheme, separator, address = self.url.partition("://")
        scheme = scheme if separator else "file"
        # "::" chains file systems.
        if scheme not in ALLOWED or "::" in self.url:
            why = "read-only" if scheme in ("http", "https") else "not supported"
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} uses {scheme}, which is {why}; give a path, s3://,"
                " gs://, az:// or hf://"
            )
        if "@" in address.split("/")[0]:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} holds a user name or password before '@'; set credentials in the"
                " environment"
            )
        if any(character in self.url for character in "*?[\0\n"):
            raise RuntimeError(f"the checkpoint mirror {self.shown!r} holds one of * ? [; give a plain path or URL")
        # Imported here because most runs have no mirror.
        from fsspec.core import url_to_fs

        try:
            file_system, root = url_to_fs(self.url)
        except ImportError as error:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} needs a package that is missing; pip install"
                f" '{OBJECT_STORES[scheme]}'"
            ) from error
        except Exception as error:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} can't be opened ({reason(error)}); give a path, s3://, gs:// or"
                " hf://"
            ) from error
        return file_system, root.rstrip("/")

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextlib.contextmanager
    def _fresh_read(self) -> Iterator[None]:
        """Read the store itself, not fsspec's cache; turn errors into UnreachableError."""
        self._file_system.invalidate_cache()
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise UnreachableError(reason(error)) from error

    @contextlib.contextmanager
    def _target(self, path: str) -> Iterator[str]:
        """Yield the full path of a file to write, in a folder that exists; sync it after the block."""
        full = self._full(path)
        if not OBJECT_STORES.keys() & self.schemes:
            self._file_system.makedirs(full.rsplit("/", 1)[0] or "/", exist_ok=True)
        yield full
        if self.local_path:
            sync(full)
            sync(Path(full).parent)


def reason(error: BaseException) -> str:
    """Return the type and the first line of an error's message, without secrets."""
    if isinstance(error, UnreachableError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return redact(f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__)


@dataclass(frozen=True)
class RemoteFolder:
    """What the store says about a checkpoint folder, without reading its files.

    Args:
        name: of the folder; "" for the root, which holds the result.
        run: id of the run that wrote it; None if unknown.
        settings: digest of that run's settings, if it was still writing; None if unknown.
        has_manifest: whether its complete manifest is there.
        has_mark: whether it is being written or deleted, or was when a process was killed.
        is_empty: whether nothing is there.
    """

    name: str
    run: str | None
    settings: str | None
    has_manifest: bool
    has_mark: bool
    is_empty: bool

    @property
    def is_used(self) -> bool:
        """Whether it is a checkpoint folder with any content, or a root with a result."""
        return self.has_manifest or bool(self.name) and not self.is_empty

    @property
    def is_foreign(self) -> bool:
        """Whether it has content that nothing marks as written by this library."""
        return not (self.is_empty or self.has_manifest or self.has_mark)


class RemoteCheckpoints:
    """The checkpoints in a store. Every method may raise what the file system raises."""

    def __init__(self, store: Store):
        self.store = store

    def names(self) -> list[str]:
        """Return the names of the checkpoint folders in the order of their steps, damaged ones included."""
        return sorted((name for name in self.store.list("") if step_of(name) is not None), key=step_of)

    def folder(self, name: str) -> RemoteFolder:
        """Return what is known about a checkpoint folder, or about the result at the root (name "")."""
        files = self.store.list(name)
        mark = self._json_dict(_join(name, MARK)) if MARK in files else {}
        manifest = self._json_dict(_join(name, MANIFEST)) if MANIFEST in files else {}
        run = _text(manifest, "run") or _text(mark, "run")
        # If a process was killed while it wrote the manifest, half of a manifest is next to a mark.
        is_complete = MANIFEST in files and (bool(manifest) or MARK not in files)
        return RemoteFolder(name, run, _text(mark, "settings"), is_complete, MARK in files, not files)

    def manifest(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Return the manifest of a checkpoint, its format and file names checked, and its bytes.

        Raises:
            DamagedError: it is missing or not a valid manifest.
        """
        try:
            data = self.store.read(_join(name, MANIFEST))
        except FileNotFoundError as error:
            raise DamagedError(f"{MANIFEST}: missing") from error
        try:
            manifest = check_manifest(json.loads(data))
        except (ValueError, RecursionError, RuntimeError) as error:
            raise DamagedError(f"{MANIFEST}: {str(error).removeprefix(f'{MANIFEST}: ')}") from error
        for file in manifest["files"]:
            parents = {str(parent) for parent in PurePosixPath(file).parents}
            is_plain = str(PurePosixPath(file)) == file and file not in (MANIFEST, MARK, ".")
            if not is_plain or parents & manifest["files"].keys():
                raise DamagedError(f"{MANIFEST}: {file!r} can't be a file of a checkpoint")
        if name and manifest.get("step") != step_of(name):
            raise DamagedError(f"{MANIFEST}: written for step {manifest.get('step')!r}")
        return manifest, data

    def begin(self, name: str, run: str | None, settings: str | None = None) -> None:
        """Mark a checkpoint folder, new or not, as unfinished, so that it does not count from now on.

        The mark holds the id of the run that writes or deletes the folder, and a digest of its settings.
        """
        self.store.write(_join(name, MARK), json.dumps({"run": run, "settings": settings}).encode())
        self._remove_manifest(name)

    def upload(self, folder: Path, name: str, manifest: dict[str, Any]) -> None:
        """Upload the files of a manifest from a local folder, then the manifest, and read everything again.

        Raises:
            DamagedError: what was read differs from the manifest.
        """
        self._remove_manifest(name)
        for file in manifest["files"]:
            self.store.put(folder / file, _join(name, file))
        data = (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode()
        self.store.write(_join(name, MANIFEST), data)
        if self.store.read(_join(name, MANIFEST)) != data:
            raise DamagedError(f"{MANIFEST}: other bytes than were written")
        self.verify(name, manifest)

    def verify(self, name: str, manifest: dict[str, Any]) -> None:
        """Read every file of a manifest.

        Raises:
            DamagedError: names the first file that differs from the manifest.
        """
        for file, entry in manifest["files"].items():
            for _ in self._checked_chunks(name, file, entry):
                pass

    def settle(self, name: str) -> None:
        """Delete the mark of a folder that is complete and verified."""
        self.store.remove(_join(name, MARK))

    def delete(self, name: str, run: str | None) -> None:
        """Delete a checkpoint folder, its manifest first and its mark last. `run` is the id of this run."""
        if "hf" not in self.store.schemes:  # There one commit deletes the whole folder.
            self.begin(name, run)
            for path in self.store.find(name):
                if path != _join(name, MARK):
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
        """Download a checkpoint into a new local folder, synced to disk, its manifest last.

        Raises:
            DamagedError: it differs from its manifest.
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
            for chunk in self.store.chunks(_join(name, file)):
                digest.update(chunk)
                size += len(chunk)
                # A damaged file may be endless.
                if size > entry["size"]:
                    break
                yield chunk
        except FileNotFoundError as error:
            raise DamagedError(f"{file}: missing") from error
        if size != entry["size"]:
            actual = "more" if size > entry["size"] else size
            raise DamagedError(f"{file}: {actual} bytes where {entry['size']} were written")
        if digest.hexdigest() != entry["sha256"]:
            raise DamagedError(f"{file}: other bytes than were written (sha256 differs)")

    def _remove_manifest(self, name: str) -> None:
        if self.store.has(_join(name, MANIFEST)):
            self.store.remove(_join(name, MANIFEST))

    def _json_dict(self, path: str) -> dict[str, Any]:
        """Return the dict in a JSON file; an empty one if the file is missing or incomplete."""
        try:
            content = json.loads(self.store.read(path))
        except (ValueError, RecursionError, FileNotFoundError):
            return {}
        return content if isinstance(content, dict) else {}


def _text(content: dict[str, Any], name: str) -> str | None:
    value = content.get(name)
    return value if isinstance(value, str) else None


def _join(folder: str, path: str) -> str:
    return f"{folder}/{path}" if folder else path
