"""The mirror: copies of a run's checkpoints and result in a second folder or an object store, made by a thread.

A copy counts once its manifest is there, which is written last and deleted first. Files are checked against it when
they are pulled. During training every failure is a warning; the file systems of fsspec repeat a failed request.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from onetrunk.checkpoints.folders import (
    MANIFEST,
    STAGING,
    begin_staging,
    check_manifest,
    checkpoint_problems,
    first_whole,
    publish,
    read_manifest,
    step_of,
    surplus,
    writing,
)
from onetrunk.utils.files import atomic_write_json, parse_json
from onetrunk.utils.redaction import redact

RESULT = "the result"
# Seconds to wait for its upload, at the end of a run.
RESULT_WAIT_S = 600.0
# A manifest under this name does not count: its checkpoint is of a part of the run that was given up.
ASIDE = f"{MANIFEST}.aside"
# No other schemes: fsspec also has file systems that are built of others, or that run code.
SCHEMES = {"file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf"}


class Upload(Future[bool]):
    """An upload, with the arguments of `Mirror.push`; its result says whether the copy is whole."""

    def __init__(self, folder: Path, name: str, kept: Collection[str]):
        super().__init__()
        self.folder, self.name, self.kept = folder, name, kept


class Mirror:
    """The copies of one run's checkpoints and result at `url`.

    `check`, `require_free` and `pull_last` are called before training and raise RuntimeError; the others only warn.

    Args:
        url: a path, or a URL with one of SCHEMES; credentials come from the environment.
        keep: how many checkpoints to keep there, at least LEAST_KEPT; None or 0 keeps all.
        warn: receives a message for each failure, also from the thread.
    """

    def __init__(self, url: str, keep: int | None, warn: Callable[[str], None]):
        self._place = f"the checkpoint mirror {redact(url)}"
        self._keep, self._warn = keep, warn
        scheme = url.split("://")[0] if "://" in url else "file"
        # A store has no parent folders: what is written under `..` is not what is listed.
        if scheme not in SCHEMES or ("://" in url and ".." in url.split("/")):
            raise RuntimeError(
                f"{self._place} is not supported; give a path, s3://, gs://, az:// or hf://, without .."
            )
        with self._in_store("cannot be opened"):  # Often an ImportError, which names the package to install.
            # Folders are made on a local disk only: in a store that would make a bucket, even a misspelt one.
            self._files, root = url_to_fs(url, **({"auto_mkdir": True} if scheme == "file" else {}))
        self._root = root.rstrip("/")
        self._one_at_a_time = threading.Lock()
        # The newest checkpoint (True) and the newest result (False), and all that have not ended.
        self._latest: dict[bool, Upload] = {}
        self._uploads: list[Upload] = []
        # Size and time of change of every file that was copied: a result is pushed again with what was measured of it.
        self._copied: dict[str, tuple[int, int]] = {}

    def check(self) -> None:
        """Raise RuntimeError if a file in the mirror cannot be written, read and deleted."""
        path = self._path(f".probe-{os.getpid()}")
        with self._in_store("cannot be used"):
            self._files.pipe_file(path, b"probe")
            self._files.cat_file(path)
            self._files.rm_file(path)

    def require_free(self, overwrite: bool) -> None:
        """Raise RuntimeError if the mirror holds checkpoints or a result, unless `overwrite` deletes them.

        A new run calls this, because its checkpoints would mix with another run's.
        """
        with self._in_store():
            whole = [] if self._manifest("") is None else [""]
            whole += self._complete()
            for name in whole if overwrite else ():
                self._delete(name)
        if whole and not overwrite:
            raise RuntimeError(
                f"{self._place} holds {whole[-1] or RESULT} of another run; use a separate mirror for this run,"
                " resume that run, or set overwrite_output_dir to true"
            )

    def pull_last(self, output_dir: str | os.PathLike[str]) -> Path | None:
        """Download the last checkpoint that matches its manifest, and return its folder; None if there is none.

        The run's `output_dir` receives the whole folder or nothing.
        """
        with self._in_store():
            manifests = self._checkpoints()
        names = [name for name in reversed(manifests) if manifests[name] is not None]
        pull = partial(self._pull, Path(output_dir), manifests)
        name = first_whole(names, pull, self._place, self._warn)
        return None if name is None else Path(output_dir) / name

    def _pull(self, output_dir: Path, manifests: dict[str, Any], name: str) -> list[str]:
        """Return how a checkpoint differs from its manifest; if it does not, it is in `output_dir` now."""
        try:
            files = check_manifest(manifests[name], step_of(name))["files"]
        except RuntimeError as error:
            return [str(error)]
        try:
            with writing(output_dir):
                staged = begin_staging(output_dir) / name
                for file in files:
                    with self._in_store(), contextlib.suppress(FileNotFoundError):  # The check of the folder finds it.
                        (staged / file).parent.mkdir(parents=True, exist_ok=True)
                        self._files.get_file(self._path(name, file), str(staged / file))
                atomic_write_json(staged / MANIFEST, manifests[name])
                problems = checkpoint_problems(staged)
                if not problems:
                    publish(staged, output_dir / name)
                return problems
        finally:
            shutil.rmtree(output_dir / STAGING, ignore_errors=True)

    def push(self, folder: str | os.PathLike[str], name: str, kept: Collection[str] = ()) -> None:
        """Start the upload of a folder with a manifest. It replaces one whose upload has not begun.

        Args:
            folder: must not be deleted as long as `busy` returns it.
            name: of the folder in the mirror; "" is the root, for the result: the files of its manifest, and all other
                files next to that.
            kept: names of checkpoints to keep in the mirror whatever their age (the best one).
        """
        upload, earlier = Upload(Path(folder), name, kept), self._latest.get(bool(name))
        if earlier is not None:
            earlier.cancel()
        self._latest[bool(name)] = upload
        self._uploads = [*(other for other in self._uploads if not other.done()), upload]
        # A daemon, because a store that does not answer must not keep the process alive.
        threading.Thread(target=self._work, args=(upload,), name="checkpoint-mirror", daemon=True).start()

    def set_aside_later(self, step: int) -> None:
        """Rename the manifests of checkpoints after a step from which a run is resumed: they no longer count.

        The reason is that of `folders.set_aside_later`. A failure is a warning, as in `push`.
        """
        moved = []
        try:
            with self._one_at_a_time, self._in_store():
                later = [name for name in self._complete() if step_of(name) > step]
                for name in later:
                    self._files.pipe_file(self._path(name, ASIDE), self._files.cat_file(self._path(name, MANIFEST)))
                    self._delete_manifest(name)
                    moved.append(name)
        except RuntimeError as error:
            self._warn(
                f"the mirror's checkpoints after step {step} still count as newest, and training continues: {error};"
                " or delete them by hand"
            )
        if moved:
            self._warn(
                f"in {self._place}, {', '.join(moved)} are set aside: each has its manifest as {ASIDE} until this run"
                " replaces or deletes it"
            )

    def busy(self) -> set[Path]:
        """Return the local checkpoint folders that are being uploaded or wait for it, and must not be deleted."""
        return {upload.folder for upload in self._uploads if upload.name and not upload.done()}

    def push_result(self, output_dir: str | os.PathLike[str]) -> None:
        """Copy the result of a run, and all files next to it, and wait for that; what is there stays."""
        self.push(output_dir, "")
        self.wait(RESULT_WAIT_S)

    def wait(self, timeout_s: float) -> list[str]:
        """Wait at most `timeout_s` seconds; warn of uploads that failed or are not done, and return their names."""
        uploads = self._latest.values()
        wait(uploads, timeout_s)
        missing = [upload.name or RESULT for upload in uploads if not (upload.done() and upload.result())]
        if missing:
            self._warn(f"{self._place} lacks {', '.join(missing)}; copy it from output_dir")
        return missing

    def _work(self, upload: Upload) -> None:
        is_whole = False
        with self._one_at_a_time:
            if not upload.set_running_or_notify_cancel():
                return
            try:
                with self._in_store():
                    self._upload(upload)
                    is_whole = True
                    self._rotate(upload)
            except RuntimeError as error:
                what = "is uploaded, but older ones were not deleted" if is_whole else "was not uploaded"
                self._warn(f"{upload.name or RESULT} {what}, and training continues: {error}")
            upload.set_result(is_whole)

    def _upload(self, upload: Upload) -> None:
        names = set(read_manifest(upload.folder)["files"])
        if not upload.name:
            paths = (path for path in upload.folder.iterdir() if path.is_file() and not path.is_symlink())
            # Other processes delete their heartbeats at any time.
            no_result = (".", "_heartbeat-")
            names |= {p.name for p in paths if not p.name.startswith(no_result) and p.suffix != ".lock"}
        self._delete_manifest(upload.name)
        for name in (*sorted(names - {MANIFEST}), MANIFEST):
            file, target = upload.folder / name, self._path(upload.name, name)
            stamp = (file.stat().st_size, file.stat().st_mtime_ns)
            if name == MANIFEST or self._copied.get(target) != stamp:
                self._files.put_file(str(file), target)
                self._copied[target] = stamp

    def _rotate(self, upload: Upload) -> None:
        """Delete what killed uploads left behind, and the oldest checkpoints beyond `keep`."""
        if not upload.name or not self._keep:
            return
        manifests = self._checkpoints()
        whole = [name for name, manifest in manifests.items() if manifest is not None]
        begun = [name for name in manifests if name not in whole and step_of(name) < step_of(upload.name)]
        for name in begun + surplus(whole, self._keep, {upload.name, *upload.kept}):
            self._delete(name)

    @contextlib.contextmanager
    def _in_store(self, fault: str = "fails") -> Iterator[None]:
        """Turn what a file system raises into a RuntimeError that names the mirror, without secrets."""
        try:
            yield
        except Exception as error:
            reason = redact(f"{type(error).__name__}: {error}".strip().splitlines()[0])
            raise RuntimeError(
                f"{self._place} {fault} ({reason}); check that the bucket or folder exists and that the credentials"
                " allow listing, reading, writing and deleting, or leave checkpoint_mirror out"
            ) from error

    def _path(self, *names: str) -> str:
        return "/".join([self._root, *(name for name in names if name)])

    def _manifest(self, name: str) -> Any:
        """Return what a manifest holds, unchecked; None if it is missing or was not written to its end."""
        try:
            return parse_json(self._files.cat_file(self._path(name, MANIFEST)))
        except (FileNotFoundError, ValueError):
            return None

    def _checkpoints(self) -> dict[str, Any]:
        """Return the `_manifest` of each checkpoint folder, by its name and in the order of their steps."""
        # Not `exists` or `find` of fsspec, which find nothing where a store does not answer.
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._path() or "/", detail=False)
        except FileNotFoundError:
            return {}
        names = {path.rstrip("/").rsplit("/", 1)[-1] for path in paths}
        names = sorted((name for name in names if step_of(name) is not None), key=step_of)
        return {name: self._manifest(name) for name in names}

    def _complete(self) -> list[str]:
        """Return the names of the checkpoints that have a manifest, in the order of their steps."""
        return [name for name, manifest in self._checkpoints().items() if manifest is not None]

    def _delete_manifest(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name, MANIFEST))

    def _delete(self, name: str) -> None:
        """Delete a checkpoint folder, its manifest first; of a result only the manifest, by which it counts."""
        self._delete_manifest(name)
        with contextlib.suppress(FileNotFoundError):  # A store has no folder without files.
            if name:
                self._files.rm(self._path(name), recursive=True)
