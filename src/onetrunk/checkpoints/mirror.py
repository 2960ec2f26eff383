"""The mirror: copies of a run's checkpoints and result in a second folder or an object store, made by a thread.

A copy counts once its manifest is there, which is written last and deleted first. Files are checked against it when
they are pulled. During training every failure is a warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from onetrunk.checkpoints.folders import (
    STAGING,
    begin_staging,
    checkpoint_problems,
    described,
    publish,
    step_of,
    surplus,
)
from onetrunk.checkpoints.manifest import MANIFEST, check_manifest, read_manifest
from onetrunk.checkpoints.writing import writing
from onetrunk.utils.files import atomic_write_json, sync
from onetrunk.utils.redaction import redact

T = TypeVar("T")

# Seconds to wait before each retry.
WAITS_S = (2.0, 10.0)
RESULT = "the result"
# No other schemes: fsspec also has file systems that are built of others, or that run code.
SCHEMES = {"file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf"}


@dataclass(frozen=True)
class Upload:
    """A local folder with a manifest that goes to the folder `name` in the mirror; "" is the root, for the result."""

    folder: Path
    name: str
    # Names of checkpoints to keep in the mirror whatever their age.
    kept: Collection[str] = ()


class Mirror:
    """The copies of one run's checkpoints and result at `url`.

    `check`, `pull_last` and `claim` are called before training and raise RuntimeError; the other methods only warn.

    Args:
        url: a path, or a URL with one of SCHEMES; credentials come from the environment.
        keep: how many checkpoints to keep there, at least LEAST_KEPT; None or 0 keeps all.
        warn: receives a message for each failure, also from the thread.
        waits_s: seconds to wait before each retry.
    """

    def __init__(self, url: str, keep: int | None, warn: Callable[[str], None], waits_s: Sequence[float] = WAITS_S):
        self._place = f"the checkpoint mirror {redact(url)}"
        self._files, self._root = _opened(url, self._place)
        self._keep = keep
        self._warn = warn
        self._waits_s = tuple(waits_s)
        # The thread changes the following. At most one checkpoint and one result (key "") wait.
        self._changed = threading.Condition()
        self._waiting: dict[str, Upload] = {}
        self._current: list[Upload] = []
        self._thread: threading.Thread | None = None
        # The last checkpoint and the last result, if their uploads failed.
        self._failed: dict[str, Upload] = {}

    def check(self, output_dir: str | os.PathLike[str]) -> None:
        """Raise RuntimeError if the mirror is `output_dir`, or a file there cannot be written, read and deleted."""
        if "file" in self._files.protocol and Path(self._root or "/").resolve() == Path(output_dir).resolve():
            raise RuntimeError(f"{self._place} is output_dir itself; name another folder")
        path, data, operation = self._path(f".probe-{secrets.token_hex(8)}"), secrets.token_bytes(16), "written to"
        try:
            self._files.pipe_file(path, data)
            operation = "read from"
            if self._files.cat_file(path) != data or not self._list(""):
                raise OSError("what was written is not there")
            operation = "deleted from"
            self._files.rm_file(path)
        except Exception as error:
            raise RuntimeError(
                f"{self._place} can't be {operation} ({_reason(error)}); check that the bucket or folder exists and"
                " that the credentials allow to list, read, write and delete"
            ) from error

    def pull_last(self, output_dir: str | os.PathLike[str]) -> Path | None:
        """Download the last checkpoint that matches its manifest, and return its folder; None if there is none.

        The run's `output_dir` receives the whole folder or nothing.

        Raises:
            RuntimeError: all checkpoints are damaged; the mirror does not answer; `output_dir` cannot be written.
        """
        damage: list[str] = []
        for name in reversed(self._retried(self._checkpoints)):
            manifest = self._retried(self._manifest, name)
            if manifest is None:
                self._warn(f"{name} in {self._place} was not uploaded to its end and is passed over")
                continue
            problems = described(self._pull(name, manifest, Path(output_dir)))
            if not problems:
                return Path(output_dir) / name
            damage.append(f"{name}: {problems}")
            self._warn(f"{name} in {self._place} is damaged and passed over ({problems})")
        if damage:
            raise RuntimeError(
                f"none of the {len(damage)} checkpoints in {self._place} is whole ({damage[0]}); restore one from a"
                " copy, or start a new run with another mirror"
            )
        return None

    def _pull(self, name: str, manifest: dict[str, Any], output_dir: Path) -> list[str]:
        """Return how a checkpoint differs from its manifest; if it does not, it is in `output_dir` now."""
        try:
            check_manifest(manifest, step_of(name))
        except RuntimeError as error:
            return [str(error)]
        try:
            with writing(output_dir):
                staged = begin_staging(output_dir) / name
                for file in manifest["files"]:
                    (staged / file).parent.mkdir(parents=True, exist_ok=True)
                    self._retried(self._download, self._path(name, file), staged / file)
                for path in (*staged.rglob("*"), staged):
                    sync(path)
                atomic_write_json(staged / MANIFEST, manifest)
                problems = checkpoint_problems(staged)
                if not problems:
                    publish(staged, output_dir / name)
                return problems
        finally:
            shutil.rmtree(output_dir / STAGING, ignore_errors=True)

    def claim(self, run: str, is_resuming: bool, overwrite: bool) -> None:
        """Raise RuntimeError if the mirror holds checkpoints or a result of another run; if `overwrite`, delete them.

        `run` is the entry of this run's manifests. For a run that resumes, uploads without a manifest are its own.
        """
        others = []
        for name in ("", *self._retried(self._checkpoints)):
            manifest = self._retried(self._manifest, name)
            is_own = (is_resuming or not name) if manifest is None else manifest.get("run") == run
            others += [] if is_own else [name]
        if others and not overwrite:
            raise RuntimeError(
                f"{self._place} holds {others[-1] or RESULT} of another run; use a separate mirror for this run,"
                " resume that run, or set overwrite_output_dir to true"
            )
        for name in others:
            self._retried(self._delete, name)

    def push(self, folder: str | os.PathLike[str], kept: Collection[str] = ()) -> None:
        """Start the upload of a verified checkpoint. It replaces one whose upload has not begun.

        It must not be deleted here as long as `busy` returns it. `kept` are names of checkpoints to keep in the mirror
        whatever their age (the best one).
        """
        self._add("checkpoint", Upload(Path(folder), Path(folder).name, kept))

    def push_result(self, output_dir: str | os.PathLike[str]) -> None:
        """Start the upload of a result to the root: the files of its manifest, and all other files next to that."""
        self._add("", Upload(Path(output_dir), ""))

    def busy(self) -> set[Path]:
        """Return the local checkpoint folders that are being uploaded or wait for it, and must not be deleted."""
        with self._changed:
            return {upload.folder for upload in (*self._current, *self._waiting.values()) if upload.name}

    def wait(self, timeout_s: float) -> list[str]:
        """Wait at most `timeout_s` seconds; warn of uploads that failed or are not done, and return their names."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, timeout_s)
            uploads = (*self._failed.values(), *self._current, *self._waiting.values())
            missing = [upload.name or RESULT for upload in uploads]
        if missing:
            self._warn(f"{self._place} lacks {', '.join(missing)}; copy it from output_dir")
        return missing

    def _add(self, kind: str, upload: Upload) -> None:
        with self._changed:
            self._waiting[kind] = upload
            if self._thread is None:
                # A daemon, because a store that does not answer must not keep the process alive.
                self._thread = threading.Thread(target=self._work, name="checkpoint-mirror", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._current, self._thread = [], None
                    self._changed.notify_all()
                    return
                kind = next(iter(self._waiting))
                upload = self._waiting.pop(kind)
                self._current = [upload]
                self._failed.pop(kind, None)
            try:
                self._retried(self._upload, upload, read_manifest(upload.folder))
            except Exception as error:
                self._warn(f"{upload.name or RESULT} was not uploaded, and training continues: {_reason(error)}")
                with self._changed:
                    self._failed[kind], self._current = upload, []
                continue
            try:
                self._rotate(upload)
            except Exception as error:
                self._warn(f"older checkpoints could not be deleted, which the next upload repeats: {_reason(error)}")

    def _upload(self, upload: Upload, manifest: dict[str, Any]) -> None:
        names = set(manifest["files"])
        if not upload.name:
            paths = (path for path in upload.folder.iterdir() if path.is_file() and not path.is_symlink())
            names |= {path.name for path in paths if path.name[0] != "." and path.suffix != ".lock"}
        if MANIFEST in self._list(upload.name):
            self._files.rm_file(self._path(upload.name, MANIFEST))
        for name in (*sorted(names - {MANIFEST}), MANIFEST):
            self._files.put_file(str(upload.folder / name), self._path(upload.name, name))

    def _rotate(self, upload: Upload) -> None:
        """Delete what killed uploads left behind, and the oldest checkpoints beyond `keep`."""
        if not upload.name or not self._keep:
            return
        names = self._retried(self._checkpoints)
        whole = [name for name in names if MANIFEST in self._retried(self._list, name)]
        partial = [name for name in names if name not in whole and step_of(name) < step_of(upload.name)]
        for name in partial + surplus(whole, self._keep, {upload.name, *upload.kept}):
            self._retried(self._delete, name)

    def _retried(self, action: Callable[..., T], *args: Any) -> T:
        for wait_s in self._waits_s:
            with contextlib.suppress(Exception):
                return action(*args)
            time.sleep(wait_s)
        try:
            return action(*args)
        except Exception as error:
            raise RuntimeError(
                f"{self._place} fails ({_reason(error)}; attempts: {len(self._waits_s) + 1}); look at the store, or"
                " leave checkpoint_mirror out"
            ) from error

    def _path(self, *names: str) -> str:
        return "/".join([self._root, *(name for name in names if name)])

    def _list(self, name: str) -> set[str]:
        """Return the names in a folder; an empty set if the folder does not exist."""
        # Not `exists` or `find` of fsspec, which find nothing where a store does not answer.
        folder = self._path(name)
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(folder or "/", detail=False)
        except FileNotFoundError:
            return set()
        return {path.rstrip("/").rsplit("/", 1)[-1] for path in paths if path.strip("/") != folder.strip("/")}

    def _checkpoints(self) -> list[str]:
        """Return the names of the checkpoint folders in the order of their steps."""
        return sorted((name for name in self._list("") if step_of(name) is not None), key=step_of)

    def _manifest(self, name: str) -> dict[str, Any] | None:
        """Return what a manifest holds, unchecked; None if it is missing or was not written to its end."""
        try:
            content = json.loads(self._files.cat_file(self._path(name, MANIFEST)))
        except (FileNotFoundError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def _download(self, path: str, target: Path) -> None:
        with contextlib.suppress(FileNotFoundError):  # The comparison with the manifest finds it.
            self._files.get_file(path, str(target))

    def _delete(self, name: str) -> None:
        """Delete a checkpoint folder, its manifest first; of a result only the manifest, by which it counts."""
        if MANIFEST in self._list(name):
            self._files.rm_file(self._path(name, MANIFEST))
        if name and self._list(name):
            self._files.rm(self._path(name), recursive=True)


def _reason(error: BaseException) -> str:
    """Return the first line of an error's message, without secrets, after its type unless the message is our own."""
    lines = str(error).strip().splitlines()[:1]
    return redact(": ".join(lines if isinstance(error, RuntimeError) and lines else [type(error).__name__, *lines]))


def _opened(url: str, place: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL and the root folder in it."""
    scheme, separator, address = url.partition("://")
    scheme = scheme if separator else "file"
    if scheme not in SCHEMES or "::" in url:  # "::" chains file systems.
        raise RuntimeError(f"{place} is not supported; give a path, s3://, gs://, az:// or hf://")
    if "@" in address.split("/")[0] or set("*?[\0\n") & set(url):
        raise RuntimeError(
            f"{place} holds a user name or one of * ? [; give a plain path or URL, and credentials in the environment"
        )
    try:
        # Folders are made on a local disk only: in a store that would make a bucket, even one with a misspelt name.
        file_system, root = url_to_fs(url, **({"auto_mkdir": True} if scheme == "file" else {}))
    except Exception as error:  # Often an ImportError, which names the package to install.
        raise RuntimeError(f"{place} can't be opened ({_reason(error)}); give a path, s3:// or hf://") from error
    return file_system, root.rstrip("/")
