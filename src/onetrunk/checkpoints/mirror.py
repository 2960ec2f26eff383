"""The mirror: copies of a run's checkpoints and result in a second folder or an object store, made by a thread.

A copy counts once its manifest is there, which is written last and deleted first. Files are checked against it when
they are pulled. During training every failure is a warning; the file systems of fsspec repeat a failed request.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from onetrunk.checkpoints.folders import (
    MANIFEST,
    STAGING,
    begin_staging,
    check_manifest,
    checkpoint_problems,
    described,
    publish,
    read_manifest,
    step_of,
    surplus,
    writing,
)
from onetrunk.utils.files import atomic_write_json
from onetrunk.utils.redaction import redact

RESULT = "the result"
# No other schemes: fsspec also has file systems that are built of others, or that run code.
SCHEMES = {"file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf"}


@dataclass(eq=False)
class Upload:
    """A local folder with a manifest that goes to the folder `name` in the mirror; "" is the root, for the result."""

    folder: Path
    name: str
    # Names of checkpoints to keep in the mirror whatever their age.
    kept: Collection[str] = ()
    is_done: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False
    is_whole: bool = False


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
        if scheme not in SCHEMES:
            raise RuntimeError(f"{self._place} is not supported; give a path, s3://, gs://, az:// or hf://")
        with self._in_store("cannot be opened"):  # Often an ImportError, which names the package to install.
            # Folders are made on a local disk only: in a store that would make a bucket, even a misspelt one.
            self._files, root = url_to_fs(url, **({"auto_mkdir": True} if scheme == "file" else {}))
        self._root = root.rstrip("/")
        self._one_at_a_time = threading.Lock()
        # The newest checkpoint (True) and the newest result (False).
        self._latest: dict[bool, Upload] = {}
        self._uploads: list[Upload] = []

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
            whole = [name for name in ("", *self._checkpoints()) if self._manifest(name) is not None]
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
        damage: list[str] = []
        with self._in_store():
            manifests = {name: self._manifest(name) for name in reversed(self._checkpoints())}
        for name, manifest in manifests.items():
            if manifest is None:
                self._warn(f"{name} in {self._place} was not uploaded to its end and is passed over")
                continue
            problems = self._pull(name, manifest, Path(output_dir))
            if not problems:
                return Path(output_dir) / name
            damage.append(f"{name}: {described(problems)}")
            self._warn(f"{name} in {self._place} is damaged and passed over ({described(problems)})")
        if damage:
            raise RuntimeError(
                f"none of the {len(damage)} checkpoints in {self._place} is whole ({damage[0]}); restore one from a"
                " copy, or start a new run with another mirror"
            )
        return None

    def _pull(self, name: str, manifest: Any, output_dir: Path) -> list[str]:
        """Return how a checkpoint differs from its manifest; if it does not, it is in `output_dir` now."""
        try:
            check_manifest(manifest, step_of(name))
        except RuntimeError as error:
            return [str(error)]
        with writing(output_dir):
            staged = begin_staging(output_dir) / name
        try:
            for file in manifest["files"]:
                with self._in_store(), contextlib.suppress(FileNotFoundError):  # The check of the folder finds it.
                    (staged / file).parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(self._path(name, file), str(staged / file))
            with writing(output_dir):
                atomic_write_json(staged / MANIFEST, manifest)
                problems = checkpoint_problems(staged)
                if not problems:
                    publish(staged, output_dir / name)
            return problems
        finally:
            shutil.rmtree(output_dir / STAGING, ignore_errors=True)

    def push(self, folder: str | os.PathLike[str], kept: Collection[str] = ()) -> None:
        """Start the upload of a verified checkpoint. It replaces one whose upload has not begun.

        It must not be deleted here as long as `busy` returns it. `kept` are names of checkpoints to keep in the mirror
        whatever their age (the best one).
        """
        self._start(Upload(Path(folder), Path(folder).name, kept))

    def push_result(self, output_dir: str | os.PathLike[str]) -> None:
        """Start the upload of a result to the root: the files of its manifest, and all other files next to that."""
        self._start(Upload(Path(output_dir), ""))

    def busy(self) -> set[Path]:
        """Return the local checkpoint folders that are being uploaded or wait for it, and must not be deleted."""
        return {u.folder for u in self._uploads if u.name and not u.is_done.is_set() and not self._is_replaced(u)}

    def wait(self, timeout_s: float) -> list[str]:
        """Wait at most `timeout_s` seconds; warn of uploads that failed or are not done, and return their names."""
        end = time.monotonic() + timeout_s
        for upload in self._latest.values():
            upload.is_done.wait(max(0.0, end - time.monotonic()))
        missing = [upload.name or RESULT for upload in self._latest.values() if not upload.is_whole]
        if missing:
            self._warn(f"{self._place} lacks {', '.join(missing)}; copy it from output_dir")
        return missing

    def _start(self, upload: Upload) -> None:
        self._latest[bool(upload.name)] = upload
        self._uploads = [*(other for other in self._uploads if not other.is_done.is_set()), upload]
        # A daemon, because a store that does not answer must not keep the process alive.
        threading.Thread(target=self._work, args=(upload,), name="checkpoint-mirror", daemon=True).start()

    def _is_replaced(self, upload: Upload) -> bool:
        return not upload.has_begun and self._latest[bool(upload.name)] is not upload

    def _work(self, upload: Upload) -> None:
        try:
            with self._one_at_a_time, self._in_store():
                if not self._is_replaced(upload):
                    upload.has_begun = True
                    self._upload(upload)
                    upload.is_whole = True
                    self._rotate(upload)
        except Exception as error:
            what = "is uploaded, but older ones were not deleted" if upload.is_whole else "was not uploaded"
            self._warn(f"{upload.name or RESULT} {what}, and training continues: {error}")
        finally:
            upload.is_done.set()

    def _upload(self, upload: Upload) -> None:
        names = set(read_manifest(upload.folder)["files"])
        if not upload.name:
            paths = (path for path in upload.folder.iterdir() if path.is_file() and not path.is_symlink())
            names |= {path.name for path in paths if path.name[0] != "." and path.suffix != ".lock"}
        self._delete_manifest(upload.name)
        for name in (*sorted(names - {MANIFEST}), MANIFEST):
            self._files.put_file(str(upload.folder / name), self._path(upload.name, name))

    def _rotate(self, upload: Upload) -> None:
        """Delete what killed uploads left behind, and the oldest checkpoints beyond `keep`."""
        if not upload.name or not self._keep:
            return
        names = self._checkpoints()
        whole = [name for name in names if self._manifest(name) is not None]
        partial = [name for name in names if name not in whole and step_of(name) < step_of(upload.name)]
        for name in partial + surplus(whole, self._keep, {upload.name, *upload.kept}):
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
                " allow to list, read, write and delete, or leave checkpoint_mirror out"
            ) from error

    def _path(self, *names: str) -> str:
        return "/".join([self._root, *(name for name in names if name)])

    def _manifest(self, name: str) -> Any:
        """Return what a manifest holds, unchecked; None if it is missing or was not written to its end."""
        try:
            return json.loads(self._files.cat_file(self._path(name, MANIFEST)))
        except (FileNotFoundError, ValueError):
            return None

    def _checkpoints(self) -> list[str]:
        """Return the names of the checkpoint folders in the order of their steps."""
        # Not `exists` or `find` of fsspec, which find nothing where a store does not answer.
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._path() or "/", detail=False)
        except FileNotFoundError:
            return []
        names = {path.rstrip("/").rsplit("/", 1)[-1] for path in paths}
        return sorted((name for name in names if step_of(name) is not None), key=step_of)

    def _delete_manifest(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name, MANIFEST))

    def _delete(self, name: str) -> None:
        """Delete a checkpoint folder, its manifest first; of a result only the manifest, by which it counts."""
        self._delete_manifest(name)
        with contextlib.suppress(FileNotFoundError):  # A store has no folder without files.
            if name:
                self._files.rm(self._path(name), recursive=True)
