"""Checkpoints in a folder or an object store, over fsspec.

A checkpoint counts once its manifest is there, which is written last and deleted first. While files are written or
deleted, a mark (`.unfinished.json`) is next to them, so that what a killed process left behind is recognised.
When and how often checkpoints are uploaded is decided in `mirror.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onetrunk.checkpoints.folders import step_of
from onetrunk.checkpoints.manifest import MANIFEST, check_manifest
from onetrunk.utils.files import atomic_write_json, sync
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


def reason(error: BaseException) -> str:
    """Return the type and the first line of an error's message, without secrets."""
    if isinstance(error, UnreachableError):
        return str(error)
    lines = str(error).strip().splitlines()
    return redact(": ".join([type(error).__name__, *lines[:1]]))


@dataclass(frozen=True)
class RemoteFolder:
    """What the store says about a checkpoint folder, without reading its files.

    `run` is the id of the run that wrote it, if known.
    """

    name: str
    run: str | None
    # The digest of that run's settings, if it was still writing.
    settings: str | None
    # The complete manifest is there.
    has_manifest: bool
    # It is being written or deleted, or was when a process was killed.
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


class Store:
    """The checkpoint folders below `url`, by their names; "" is the root, which holds the result.

    What cannot be read or listed raises UnreachableError. Methods that write raise what the file system raises.

    Args:
        url: a path, or a URL with one of the ALLOWED schemes. Credentials come from the environment, not from the URL.

    Raises:
        RuntimeError: the URL is not supported, or its file system cannot be opened.
    """

    def __init__(self, url: str):
        self.shown = redact(url)
        self._files, self._root = _opened(url, self.shown)
        protocol = self._files.protocol
        schemes = {protocol} if isinstance(protocol, str) else set(protocol)
        self._has_folders = schemes.isdisjoint(OBJECT_STORES)
        self._is_hub = "hf" in schemes
        # The folder on a local disk, where writes are synced; None for any other store.
        self.local_path = Path(self._root or "/") if "file" in schemes else None

    def probe(self) -> None:
        """Write a small file, read it and delete it.

        Raises:
            RuntimeError: one of the three operations fails; the message says which.
        """
        path, data, operation = f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16), "written to"
        try:
            self._write(path, data)
            operation = "read from"
            same = self._read(path) == data and path in self._list("")
            operation = "deleted from"
            self._remove(path)
        except Exception as error:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} can't be {operation} ({reason(error)}); check that the bucket or"
                " folder exists and that the credentials allow to list, read, write and delete"
            ) from error
        if not same:
            raise RuntimeError(
                f"the checkpoint mirror {self.shown} does not return immediately what was written; use another store"
            )

    # --- whole checkpoints ------------------------------------------------------------------------------------------

    def folders(self, without: Collection[str] = ()) -> dict[str, RemoteFolder]:
        """Return the result's folder ("") and the checkpoint folders in the order of their steps, damaged ones too."""
        names = sorted((name for name in self._list("") if step_of(name) is not None), key=step_of)
        return {name: self._folder(name) for name in ("", *names) if name not in without}

    def _folder(self, name: str) -> RemoteFolder:
        files = self._list(name)
        mark = self._json_dict(_join(name, MARK)) if MARK in files else {}
        manifest = self._json_dict(_join(name, MANIFEST)) if MANIFEST in files else {}
        # If a process was killed while it wrote the manifest, half of a manifest is next to a mark.
        is_complete = MANIFEST in files and (bool(manifest) or MARK not in files)
        run = _text(manifest, "run") or _text(mark, "run")
        return RemoteFolder(name, run, _text(mark, "settings"), is_complete, MARK in files, not files)

    def upload(self, folder: Path, name: str, manifest: dict[str, Any], settings: str | None) -> None:
        """Upload the files of a manifest from a local folder, then the manifest, and read everything again.

        The mark that a checkpoint has meanwhile holds `settings`, a digest of the run's settings.

        Raises:
            DamagedError: what was read differs from the manifest.
        """
        self._begin(name, manifest.get("run"), settings)
        for file in manifest["files"]:
            with self._target(_join(name, file)) as target:
                self._files.put_file(str(folder / file), target)
        data = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        self._write(_join(name, MANIFEST), data.encode())
        self.verify(name, manifest)
        self._settle(name)

    def verify(self, name: str, manifest: dict[str, Any]) -> None:
        """Read a checkpoint's manifest, which must be equal to `manifest`, and every file.

        Raises:
            DamagedError: names the first file that differs.
        """
        if self._manifest(name) != manifest:
            raise DamagedError(f"{MANIFEST}: other bytes than were written")
        for file, entry in manifest["files"].items():
            for _ in self._checked_chunks(_join(name, file), file, entry):
                pass

    def download(self, name: str, target: Path) -> None:
        """Download a checkpoint into a new local folder, synced to disk, its manifest last.

        Raises:
            DamagedError: it differs from its manifest.
        """
        manifest = self._manifest(name)
        target.mkdir(parents=True)
        for file, entry in manifest["files"].items():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            with open(target / file, "xb") as out:
                out.writelines(self._checked_chunks(_join(name, file), file, entry))
        for path in (*target.rglob("*"), target):
            sync(path)
        atomic_write_json(target / MANIFEST, manifest)

    def delete(self, name: str, run: str | None) -> None:
        """Delete a checkpoint folder, its manifest first and its mark last. `run` is the id of this run."""
        if not self._is_hub:  # There one commit deletes the whole folder.
            self._begin(name, run, None)
            for file in self._files.find(self._full(name)):
                if not file.endswith(f"/{MARK}"):
                    self._remove(file.removeprefix(self._root).lstrip("/"))
            self._settle(name)
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._full(name), recursive=True)

    def delete_result(self) -> None:
        """Delete the files of the result at the root, the manifest first."""
        try:
            files = self._manifest("")["files"]
        except DamagedError:
            files = {}
        for file in (MANIFEST, *files):
            self._remove_existing(file)

    def _begin(self, name: str, run: str | None, settings: str | None) -> None:
        """Make a folder, new or not, unfinished, so that it does not count from now on. The result has no mark."""
        if name:
            self._write(_join(name, MARK), json.dumps({"run": run, "settings": settings}).encode())
        self._remove_existing(_join(name, MANIFEST))

    def _settle(self, name: str) -> None:
        if name:
            self._remove(_join(name, MARK))

    def _manifest(self, name: str) -> dict[str, Any]:
        try:
            return check_manifest(json.loads(self._read(_join(name, MANIFEST))), step_of(name))
        except FileNotFoundError as error:
            raise DamagedError(f"{MANIFEST}: missing") from error
        except (ValueError, RecursionError, RuntimeError) as error:
            raise DamagedError(f"{MANIFEST}: {str(error).removeprefix(f'{MANIFEST}: ')}") from error

    def _checked_chunks(self, path: str, file: str, entry: dict[str, Any]) -> Iterator[bytes]:
        """Yield the content of a file; raise DamagedError if it is not what its entry in the manifest says."""
        digest, size = hashlib.sha256(), 0
        try:
            with self._reading(path) as stream:
                # A damaged file may be endless.
                while chunk := stream.read(min(CHUNK, entry["size"] + 1 - size)):
                    digest.update(chunk)
                    size += len(chunk)
                    yield chunk
        except FileNotFoundError as error:
            raise DamagedError(f"{file}: missing") from error
        if size != entry["size"]:
            actual = "more" if size > entry["size"] else size
            raise DamagedError(f"{file}: {actual} bytes where {entry['size']} were written")
        if digest.hexdigest() != entry["sha256"]:
            raise DamagedError(f"{file}: other bytes than were written (sha256 differs)")

    # --- files, by their paths relative to the root -----------------------------------------------------------------

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _list(self, folder: str) -> set[str]:
        """Return the names of the files and folders in a folder; an empty set if the folder does not exist."""
        full = self._full(folder)
        try:
            with self._answering():
                entries = [entry.rstrip("/") for entry in self._files.ls(full or "/", detail=False)]
        except FileNotFoundError:
            return set()
        return {entry.rsplit("/", 1)[-1] for entry in entries if entry.strip("/") != full.strip("/")}

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[Any]:
        with self._answering(), self._files.open(self._full(path), "rb") as stream:
            yield stream

    def _read(self, path: str) -> bytes:
        with self._reading(path) as stream:
            return stream.read(MOST_BYTES)

    def _json_dict(self, path: str) -> dict[str, Any]:
        """Return the dict in a JSON file; an empty one if the file is missing or incomplete."""
        try:
            content = json.loads(self._read(path))
        except (ValueError, RecursionError, FileNotFoundError):
            return {}
        return content if isinstance(content, dict) else {}

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Read the store itself, not fsspec's cache; turn errors into UnreachableError."""
        self._files.invalidate_cache()
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise UnreachableError(reason(error)) from error

    def _write(self, path: str, data: bytes) -> None:
        with self._target(path) as full:
            self._files.pipe_file(full, data)

    @contextlib.contextmanager
    def _target(self, path: str) -> Iterator[str]:
        """Yield the full path of a file to write, in a folder that exists; sync it after the block."""
        full = self._full(path)
        if self._has_folders:
            self._files.makedirs(full.rsplit("/", 1)[0] or "/", exist_ok=True)
        yield full
        if self.local_path:
            sync(full)
            sync(Path(full).parent)

    def _remove(self, path: str) -> None:
        full = self._full(path)
        self._files.rm_file(full)
        if self.local_path:
            sync(Path(full).parent)

    def _remove_existing(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        # Not `exists` of fsspec, which is False where a store does not answer.
        if name in self._list(folder):
            self._remove(path)


def _opened(url: str, shown: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL and the root folder in it."""
    scheme, separator, address = url.partition("://")
    scheme = scheme if separator else "file"
    fault = None
    if scheme not in ALLOWED or "::" in url:  # "::" chains file systems.
        why = "read-only" if scheme in ("http", "https") else "not supported"
        fault = f"uses {scheme}, which is {why}; give a path, s3://, gs://, az:// or hf://"
    elif "@" in address.split("/")[0]:
        fault = "holds a user name or password before '@'; set credentials in the environment"
    elif set("*?[\0\n") & set(url):
        fault = "holds one of * ? [; give a plain path or URL"
    if fault is not None:
        raise RuntimeError(f"the checkpoint mirror {shown} {fault}")
    # Imported here because most runs have no mirror.
    from fsspec.core import url_to_fs

    try:
        file_system, root = url_to_fs(url)
    except ImportError as error:
        raise RuntimeError(
            f"the checkpoint mirror {shown} needs a package that is missing; pip install '{OBJECT_STORES[scheme]}'"
        ) from error
    except Exception as error:
        raise RuntimeError(
            f"the checkpoint mirror {shown} can't be opened ({reason(error)}); give a path, s3://, gs:// or hf://"
        ) from error
    return file_system, root.rstrip("/")


def _text(content: dict[str, Any], name: str) -> str | None:
    value = content.get(name)
    return value if isinstance(value, str) else None


def _join(folder: str, path: str) -> str:
    return f"{folder}/{path}" if folder else path
