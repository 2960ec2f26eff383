"""Files anywhere that fsspec reaches: a path, s3://, gs://, hf://; read, written, listed and deleted one by one.

What a listing says is asked anew each time. Knows paths and bytes; nothing of checkpoints.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onetrunk.checkpoints.manifest import sync
from onetrunk.redaction import redact

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
