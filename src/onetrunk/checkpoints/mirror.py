"""The mirror: copies of a run's checkpoints and result in a second folder or an object store, made by a thread.

A checkpoint that was verified here is uploaded and read again there, and only then an older one is deleted there.
During training every failure is a warning.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from onetrunk.checkpoints.folders import STAGING, begin_staging, publish, step_of, surplus
from onetrunk.checkpoints.manifest import FORMAT, MANIFEST, digest, read_manifest
from onetrunk.checkpoints.store import DamagedError, RemoteFolder, Store, UnreachableError, reason

T = TypeVar("T")

# Seconds to wait before each retry of an upload or a read.
WAITS_S = (2.0, 10.0, 30.0)
RESULT = "the result"


class RejectedError(RuntimeError):
    """An upload is not possible, and a retry would not help."""


@dataclass(frozen=True)
class Upload:
    """A local folder with a manifest that goes to the folder `name` in the mirror; "" is the root, for the result."""

    folder: Path
    name: str
    # Names of checkpoints to keep in the mirror whatever their age.
    kept: frozenset[str] = frozenset()


class Mirror:
    """The copies of one run's checkpoints and result at `url`.

    `check`, `pull_last` and `claim` are called before training and raise; the other methods never raise.

    Args:
        url: a path, or a URL that `Store` supports; credentials come from the environment.
        keep: how many checkpoints to keep there, at least LEAST_KEPT; None or 0 keeps all.
        warn: receives a message for each failure, also from the thread.
        waits_s: seconds to wait before each retry of an upload or a read.

    Raises:
        RuntimeError: the URL is not supported.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        keep: int | None,
        warn: Callable[[str], None],
        waits_s: Sequence[float] = WAITS_S,
    ):
        self._store = Store(os.fspath(url))
        self._place = f"the checkpoint mirror {self._store.shown}"
        self._keep = keep
        self._warn = warn
        self._waits_s = tuple(waits_s)
        self._run: str | None = None
        self._settings: str | None = None
        # Folders of other runs or of killed uploads, to be deleted once a checkpoint of this run is there.
        self._abandoned: set[str] = set()
        # Folders that this process has verified.
        self._verified: set[str] = set()
        # At most one checkpoint and one result wait for the thread, which changes the following.
        self._changed = threading.Condition()
        self._queue: list[Upload] = []
        self._current: Upload | None = None
        self._thread: threading.Thread | None = None
        # Why each name is not in the mirror.
        self._failures: dict[str, str] = {}

    # --- before training --------------------------------------------------------------------------------------------

    def check(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write, read and delete a small file in the mirror, which must not be the run's `output_dir`.

        Raises:
            RuntimeError: one of the operations failed; the message says why and what to do.
        """
        self._store.probe()
        local = self._store.local_path
        if output_dir is not None and local is not None and local.resolve() == Path(output_dir).resolve():
            raise RuntimeError(f"{self._place} is output_dir itself; name another folder")

    def claim(
        self, run: str | None, overwrite: bool = False, settings: str | None = None, is_resuming: bool = False
    ) -> None:
        """Reject a mirror that holds checkpoints or a result of another run.

        A run that was killed during its first upload and has also lost its disk gets a new id when it starts again, so
        it recognizes that upload by its settings. It does so only when it is told to resume, because another run with
        the same settings may otherwise be uploading at this moment.

        Args:
            run: id of the run that is resumed ("run" in its manifests); None for a new one.
            overwrite: accept such a mirror; its content is deleted once the first checkpoint of this run is there.
            settings: digest of all settings that decide what the run computes; None if unknown.
            is_resuming: treat unfinished uploads of a run with the same settings as this run's own.

        Raises:
            RuntimeError: names what is there; or the mirror cannot be read.
        """

        def is_own(folder: RemoteFolder) -> bool:
            is_partial = folder.has_mark and not folder.has_manifest
            return is_resuming and is_partial and settings is not None and folder.settings == settings

        folders = self._retried(self._store.folders).values()
        others = [folder for folder in folders if folder.is_used and (run is None or folder.run not in (run, None))]
        if not overwrite:
            self._require_none(folder for folder in others if not is_own(folder))
        self._run, self._settings = run, settings
        self._abandoned = {folder.name for folder in others}

    def pull_last(self, output_dir: str | os.PathLike[str]) -> Path | None:
        """Download the last checkpoint that matches its manifest, and return its folder; None if there is none.

        The run's `output_dir` receives the whole folder or nothing.

        Raises:
            RuntimeError: all checkpoints are damaged; the mirror cannot be read; `output_dir` cannot be written.
        """
        folders = self._retried(lambda: self._store.folders(without={""}))
        damage: list[str] = []
        for name, folder in reversed(folders.items()):
            where = f"{name} in {self._store.shown}"
            if not folder.has_manifest:
                self._warn(f"{where} was not uploaded to its end and is passed over")
                continue
            try:
                return self._pull(name, Path(output_dir))
            except DamagedError as error:
                damage.append(f"{name}: {error}")
                self._warn(f"{where} is damaged and passed over ({error})")
        if damage:
            raise RuntimeError(
                f"none of the {len(damage)} checkpoints in {self._store.shown} is whole ({damage[0]}); restore one"
                " from a copy, or start a new run with another mirror"
            )
        return None

    def _pull(self, name: str, output_dir: Path) -> Path:
        def download() -> Path:
            staged = begin_staging(output_dir) / name
            self._store.download(name, staged)
            publish(staged, output_dir / name)
            return output_dir / name

        try:
            return self._retried(download)
        except OSError as error:
            raise RuntimeError(
                f"{output_dir} can't take {name} of the mirror ({reason(error)}); make room, or choose another"
                " output_dir"
            ) from error
        finally:
            shutil.rmtree(output_dir / STAGING, ignore_errors=True)

    def _retried(self, read: Callable[[], T]) -> T:
        for attempt in itertools.count(1):
            try:
                return read()
            except UnreachableError as error:
                if attempt > len(self._waits_s):
                    raise RuntimeError(
                        f"{self._place} can't be read ({error}; attempts: {attempt}); try again later, or leave"
                        " checkpoint_mirror out"
                    ) from error
            time.sleep(self._waits_s[attempt - 1])

    # --- during training --------------------------------------------------------------------------------------------

    def push(self, folder: str | os.PathLike[str], kept: Collection[str] = ()) -> None:
        """Start the upload of a checkpoint. It replaces one whose upload has not begun.

        Args:
            folder: a verified checkpoint. It must not be deleted as long as `busy` returns it.
            kept: names of checkpoints to keep in the mirror whatever their age (the best one).
        """
        self._add(Upload(Path(folder), Path(folder).name, frozenset(kept)))

    def push_result(self, output_dir: str | os.PathLike[str]) -> None:
        """Start the upload of a run's result to the root of the mirror.

        The files named in the manifest are uploaded, and all other files directly in `output_dir`.
        """
        self._add(Upload(Path(output_dir), ""))

    def busy(self) -> set[Path]:
        """Return the local checkpoint folders that are being uploaded or wait for it, and must not be deleted."""
        with self._changed:
            return {upload.folder for upload in self._pending() if upload.name}

    def wait(self, timeout_s: float) -> list[str]:
        """Wait for the uploads, at most `timeout_s` seconds, and warn of what the mirror lacks.

        Returns:
            The names of the missing checkpoints, without those that a later one replaces, and "the result".
        """
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, timeout_s)
            whys = self._failures | {upload.name: "not uploaded yet" for upload in self._pending()}
        missing = {name or RESULT: why for name, why in whys.items()}
        if missing:
            names = "; ".join(f"{name} ({why})" for name, why in missing.items())
            self._warn(f"{self._place} lacks {names}; copy it from output_dir")
        return list(missing)

    def _pending(self) -> list[Upload]:
        return [upload for upload in (self._current, *self._queue) if upload is not None]

    def _add(self, upload: Upload) -> None:
        with self._changed:
            # Only the newest checkpoint and the newest result wait; the result comes last.
            others = [waiting for waiting in self._queue if bool(waiting.name) != bool(upload.name)]
            self._queue = sorted([*others, upload], key=lambda waiting: not waiting.name)
            if self._thread is None:
                # A daemon, because a store that does not answer must not keep the process alive.
                self._thread = threading.Thread(target=self._work, name="checkpoint-mirror", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # No more threads, or no memory for one.
                    self._thread = None
                    self._warn(f"{self._place} waits for the next checkpoint ({reason(error)})")
            self._changed.notify_all()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (upload := self._next()) is not None:
            failure = self._try(upload)
            with self._changed:
                self._current = None
                self._failures.pop(upload.name, None)
                if failure is not None:
                    self._failures[upload.name] = failure
                elif upload.name:  # It replaces the checkpoints that failed before it.
                    self._failures = {name: why for name, why in self._failures.items() if not name}

    def _next(self) -> Upload | None:
        with self._changed:
            if self._queue:
                self._current = self._queue.pop(0)
                return self._current
            self._thread = None
            self._changed.notify_all()
            return None

    def _try(self, upload: Upload) -> str | None:
        """Upload with retries; return why the last attempt failed, or None."""
        for attempt in itertools.count(1):
            try:
                self._upload(upload)
                return None
            except Exception as error:
                failure = reason(error)
                is_last = attempt > len(self._waits_s) or isinstance(error, RejectedError)
            if is_last or self._newer_within(self._waits_s[attempt - 1]):
                break
        self._warn(
            f"{self._place} did not take {upload.name or RESULT} ({failure}; attempts: {attempt}); training continues,"
            " and the next checkpoint is uploaded as usual"
        )
        return failure

    def _newer_within(self, wait_s: float) -> bool:
        # A newer checkpoint is worth more than another attempt.
        with self._changed:
            return self._changed.wait_for(lambda: any(upload.name for upload in self._queue), wait_s)

    def _upload(self, upload: Upload) -> None:
        manifest = self._manifest(upload)
        run = manifest.get("run")
        self._verified.discard(upload.name)
        folders = self._store.folders(without=self._verified)
        others = (folder for folder in folders.values() if folder.run not in (run, None))
        self._require_none(folder for folder in others if folder.name not in self._abandoned)
        present = folders.get(upload.name)
        if upload.name and present and present.is_foreign and upload.name not in self._abandoned:
            raise RejectedError(f"there is a folder {upload.name} which this library has not written")
        if not (present and self._is_uploaded(present, manifest)):
            self._store.upload(upload.folder, upload.name, manifest, self._settings)
        self._abandoned.discard(upload.name)
        if not upload.name:
            return
        self._run = run
        self._verified.add(upload.name)
        try:
            self._rotate(upload, run, folders)
        except Exception as error:
            self._warn(
                f"{self._place} has {upload.name}, but older ones could not be deleted ({reason(error)}); this is"
                " retried after the next checkpoint"
            )

    def _manifest(self, upload: Upload) -> dict[str, Any]:
        try:
            manifest = read_manifest(upload.folder)
        except RuntimeError as error:
            raise RejectedError(f"{upload.folder} is not whole: {error}") from error
        if upload.name:
            return manifest
        paths = (path for path in upload.folder.iterdir() if path.is_file() and not path.is_symlink())
        names = {path.name for path in paths if not path.name.startswith(".") and path.suffix != ".lock"}
        files = {
            name: {"size": (upload.folder / name).stat().st_size, "sha256": digest(upload.folder / name)}
            for name in sorted({*manifest["files"], *names} - {MANIFEST})
        }
        return {**manifest, "format": FORMAT, "run": manifest.get("run") or self._run, "files": files}

    def _is_uploaded(self, folder: RemoteFolder, manifest: dict[str, Any]) -> bool:
        if folder.has_mark or not folder.has_manifest:
            return False
        try:
            self._store.verify(folder.name, manifest)
        except DamagedError:
            return False
        return True

    def _rotate(self, upload: Upload, run: str | None, folders: dict[str, RemoteFolder]) -> None:
        """Delete what killed uploads left behind, what was abandoned, and the oldest checkpoints beyond `keep`."""
        older = {name: folder for name, folder in folders.items() if name and name != upload.name}
        # A mark without a run was cut off while it was written, before any other file.
        partial = {name for name, folder in older.items() if folder.has_mark and folder.run in (run, None)}
        doomed = sorted((self._abandoned - {""}) | partial, key=step_of)
        complete = {name for name, folder in older.items() if folder.has_manifest and folder.run == run}
        by_step = sorted((self._verified | complete) - set(doomed), key=step_of)
        doomed += surplus(by_step, self._keep, {upload.name, *upload.kept})
        if "" in self._abandoned:
            self._store.delete_result()
            self._abandoned.discard("")
        for name in doomed:
            self._store.delete(name, run)
            self._verified.discard(name)
            self._abandoned.discard(name)

    def _require_none(self, others: Iterable[RemoteFolder]) -> None:
        names = [folder.name or "a result" for folder in others]
        if names:
            raise RejectedError(
                f"{self._place} holds {', '.join(names[:3])} of another run; use a separate mirror for this run,"
                " resume that run, or set overwrite_output_dir to true"
            )
