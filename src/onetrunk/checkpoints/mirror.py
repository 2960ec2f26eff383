"""The mirror: copies of a run's checkpoints and result in a second folder or an object store, made by a thread.

A checkpoint that was verified here is uploaded and read again there, and only then an older one is deleted there.
During training every failure is a warning. `Mirror` says what an upload does, `Uploads` runs them in its thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from onetrunk.checkpoints.folders import LEAST_KEPT, begin_staging, publish, step_of
from onetrunk.checkpoints.manifest import FORMAT, MANIFEST, digest, read_manifest
from onetrunk.checkpoints.store import DamagedError, RemoteCheckpoints, RemoteFolder, Store, UnreachableError, reason

T = TypeVar("T")

# Seconds to wait before each retry of an upload or a read.
WAITS_S = (2.0, 10.0, 30.0)
RESULT = "the result"


class Mirror:
    """The copies of one run's checkpoints and result at `url`.

    `check`, `pull_last` and `claim` are called before training and raise; the other methods never raise.

    Args:
        url: a path, or a URL that `Store` supports; credentials come from the environment.
        keep: how many checkpoints to keep there, at least LEAST_KEPT; None or 0 keeps all.
        warn: receives a message for each failure, also from the thread.
        waits_s: seconds to wait before each retry of an upload or a read.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        keep: int | None,
        warn: Callable[[str], None],
        waits_s: Sequence[float] = WAITS_S,
    ):
        self._store = Store(os.fspath(url))
        self._remote = RemoteCheckpoints(self._store)
        self._keep = keep if keep and keep > 0 else None
        self._warn = warn
        self._waits_s = tuple(waits_s)
        self._uploads = Uploads(self._upload, warn, waits_s, self._store.shown)
        self._run: str | None = None
        self._settings: str | None = None
        # Folders of other runs or of killed uploads, to be deleted once a checkpoint of this run is there.
        self._abandoned: set[str] = set()
        # Folders that this process has verified.
        self._verified: set[str] = set()

    # --- before training --------------------------------------------------------------------------------------------

    def check(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write, read and delete a small file in the mirror, which must not be the run's `output_dir`.

        Raises:
            RuntimeError: one of the operations failed; the message says why and what to do.
        """
        self._store.probe()
        place = self._store.local_path
        if output_dir is not None and place is not None and place.resolve() == Path(output_dir).resolve():
            raise RuntimeError(f"the checkpoint mirror {self._store.shown} is output_dir itself; name another folder")

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
        folders = self._retried(lambda: [self._remote.folder(name) for name in ("", *self._remote.names())])
        others = [folder for folder in folders if folder.is_used and (run is None or folder.run not in (run, None))]
        own = set()
        if is_resuming and settings is not None:
            partial = (folder for folder in others if folder.has_mark and not folder.has_manifest)
            own = {folder.name for folder in partial if folder.settings == settings}
        others = [folder for folder in others if folder.name not in own]
        if others and not overwrite:
            raise RuntimeError(self._other_run(others))
        self._run, self._settings = run, settings
        self._abandoned = own | {folder.name for folder in others}

    def pull_last(self, output_dir: str | os.PathLike[str]) -> Path | None:
        """Download the last checkpoint that matches its manifest, and return its folder; None if there is none.

        The run's `output_dir` receives the whole folder or nothing.

        Raises:
            RuntimeError: all checkpoints are damaged; the mirror cannot be read; `output_dir` cannot be written.
        """
        folders = self._retried(lambda: [self._remote.folder(name) for name in self._remote.names()])
        damage: list[str] = []
        for folder in reversed(folders):
            where = f"{folder.name} in {self._store.shown}"
            if not folder.has_manifest:
                self._warn(f"{where} was not uploaded to its end and is passed over")
                continue
            try:
                return self._pull(folder.name, Path(output_dir))
            except DamagedError as error:
                damage.append(f"{folder.name}: {error}")
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
            self._remote.download(name, staged)
            publish(staged, output_dir / name)
            return output_dir / name

        try:
            try:
                return self._retried(download)
            finally:
                begin_staging(output_dir).rmdir()
        except OSError as error:
            raise RuntimeError(
                f"{output_dir} can't take {name} of the mirror ({reason(error)}); make room, or choose another"
                " output_dir"
            ) from error

    def _retried(self, read: Callable[[], T]) -> T:
        for wait_s in (*self._waits_s, None):
            try:
                return read()
            except UnreachableError as error:
                if wait_s is None:
                    raise RuntimeError(
                        f"the checkpoint mirror {self._store.shown} can't be read ({error}; attempts:"
                        f" {len(self._waits_s) + 1}); try again later, or leave checkpoint_mirror out"
                    ) from error
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    # --- during training --------------------------------------------------------------------------------------------

    def push(self, folder: str | os.PathLike[str], kept: Collection[str] = ()) -> None:
        """Start the upload of a checkpoint. It replaces one whose upload has not begun.

        Args:
            folder: a verified checkpoint. It must not be deleted as long as `busy` returns it.
            kept: names of checkpoints to keep in the mirror whatever their age (the best one).
        """
        self._uploads.add(Upload(Path(folder), Path(folder).name, frozenset(kept)))

    def push_result(self, output_dir: str | os.PathLike[str]) -> None:
        """Start the upload of a run's result to the root of the mirror.

        The files named in the manifest are uploaded, and all other files directly in `output_dir`.
        """
        self._uploads.add(Upload(Path(output_dir), ""))

    def busy(self) -> set[Path]:
        """Return the local checkpoint folders that are being uploaded or wait for it, and must not be deleted."""
        return self._uploads.busy()

    def wait(self, timeout_s: float) -> list[str]:
        """Wait for the uploads, at most `timeout_s` seconds, and warn of what the mirror lacks.

        Returns:
            The names of the missing checkpoints, without those that a later one replaces, and "the result".
        """
        missing = self._uploads.wait(timeout_s)
        if missing:
            names = "; ".join(f"{name} ({why})" for name, why in missing.items())
            self._warn(f"the checkpoint mirror {self._store.shown} lacks {names}; copy it from output_dir")
        return list(missing)

    # --- one upload, in the thread ----------------------------------------------------------------------------------

    def _upload(self, upload: Upload) -> None:
        if not upload.folder.is_dir():
            raise RejectedError(f"{upload.folder} does not exist any more")
        if upload.name and step_of(upload.name) is None:
            raise RejectedError(f"{upload.folder} is not a checkpoint-<step> folder")
        manifest = self._manifest(upload)
        run = manifest.get("run")
        self._verified.discard(upload.name)
        folders = self._unverified_folders(run)
        if not upload.name:
            self._remote.upload(upload.folder, "", manifest)
            self._abandoned.discard("")
            return
        self._run = run
        present = folders.get(upload.name)
        if present and present.is_foreign and upload.name not in self._abandoned:
            raise RejectedError(f"there is a folder {upload.name} which this library has not written")
        if not (present and self._is_uploaded(present, manifest)):
            self._remote.begin(upload.name, run, self._settings)
            self._remote.upload(upload.folder, upload.name, manifest)
            self._remote.settle(upload.name)
        self._verified.add(upload.name)
        self._abandoned.discard(upload.name)
        try:
            self._rotate(upload, run, folders)
        except Exception as error:
            self._warn(
                f"the checkpoint mirror {self._store.shown} has {upload.name}, but older ones could not be deleted"
                f" ({reason(error)}); this is retried after the next checkpoint"
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
        try:
            if folder.has_mark or self._remote.manifest(folder.name)[0] != manifest:
                return False
            self._remote.verify(folder.name, manifest)
        except DamagedError:
            return False
        return True

    def _unverified_folders(self, run: str | None) -> dict[str, RemoteFolder]:
        """Return the folders in the mirror that this process has not verified; reject those of another run."""
        names = [name for name in ("", *self._remote.names()) if name not in self._verified]
        folders = {name: self._remote.folder(name) for name in names}
        others = [
            folder
            for folder in folders.values()
            if folder.run not in (run, None) and folder.name not in self._abandoned
        ]
        if others:
            raise RejectedError(self._other_run(others))
        return folders

    def _rotate(self, upload: Upload, run: str | None, folders: dict[str, RemoteFolder]) -> None:
        """Delete what killed uploads left behind, what was abandoned, and the oldest checkpoints beyond `keep`."""
        older = {name: folder for name, folder in folders.items() if name and name != upload.name}
        # A mark without a run was cut off while it was written, before any other file.
        partial = {name for name, folder in older.items() if folder.has_mark and folder.run in (run, None)}
        doomed = sorted((self._abandoned - {""}) | partial, key=step_of)
        if self._keep is not None:
            complete = {name for name, folder in older.items() if folder.has_manifest and folder.run == run}
            by_step = sorted((self._verified | complete) - set(doomed), key=step_of)
            newest = by_step[-max(self._keep, LEAST_KEPT) :]
            doomed += [name for name in by_step if name not in {upload.name, *upload.kept, *newest}]
        if "" in self._abandoned:
            self._remote.delete_result()
            self._abandoned.discard("")
        for name in doomed:
            self._remote.delete(name, run)
            self._verified.discard(name)
            self._abandoned.discard(name)

    def _other_run(self, others: list[RemoteFolder]) -> str:
        names = ", ".join(folder.name or "a result" for folder in others[:3])
        return (
            f"the checkpoint mirror {self._store.shown} holds {names} of another run; use a separate mirror for this"
            " run, resume that run, or set overwrite_output_dir to true"
        )


class RejectedError(RuntimeError):
    """An upload is not possible, and a retry would not help."""


@dataclass(frozen=True)
class Upload:
    """One folder to upload.

    Args:
        folder: local, with a manifest.
        name: of the checkpoint folder in the mirror; "" for the result, which goes to the root.
        kept: names of checkpoints to keep in the mirror whatever their age.
    """

    folder: Path
    name: str
    kept: frozenset[str] = frozenset()

    @property
    def shown(self) -> str:
        """The name for messages."""
        return self.name or RESULT


class Uploads:
    """A queue of at most one checkpoint and one result, and the thread that uploads them. No method raises.

    Args:
        upload: called in the thread; it raises RejectedError if a retry would not help.
        warn: receives a message for each upload that failed after all retries; called in the thread.
        waits_s: seconds to wait before each retry.
        where: the mirror's name for messages.
    """

    def __init__(
        self, upload: Callable[[Upload], None], warn: Callable[[str], None], waits_s: Sequence[float], where: str
    ):
        self._upload = upload
        self._warn = warn
        self._waits_s = tuple(waits_s)
        self._where = where
        self._changed = threading.Condition()
        self._checkpoint: Upload | None = None
        self._result: Upload | None = None
        self._current: Upload | None = None
        self._thread: threading.Thread | None = None
        # Why each name is not in the mirror.
        self._missing: dict[str, str] = {}

    def add(self, upload: Upload) -> None:
        """Queue an upload. A checkpoint replaces one that is still waiting."""
        with self._changed:
            if not upload.name:
                self._result = upload
            else:
                if self._checkpoint is not None:
                    self._missing.pop(self._checkpoint.name, None)
                self._checkpoint = upload
            self._missing[upload.shown] = "not uploaded yet"
            if self._thread is None:
                # A daemon, because a store that does not answer must not keep the process alive.
                self._thread = threading.Thread(target=self._run, name="checkpoint-mirror", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # No more threads, or no memory for one.
                    self._thread = None
                    self._warn(f"the checkpoint mirror {self._where} waits for the next checkpoint ({reason(error)})")
            self._changed.notify_all()

    def busy(self) -> set[Path]:
        """Return the local checkpoint folders that are queued or being uploaded."""
        with self._changed:
            uploads = (self._checkpoint, self._current)
            return {upload.folder for upload in uploads if upload is not None and upload.name}

    def wait(self, timeout_s: float) -> dict[str, str]:
        """Wait for the queue, at most `timeout_s` seconds; return what the mirror lacks, and why."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, timeout_s)
            return dict(self._missing)

    def _run(self) -> None:
        while (upload := self._next()) is not None:
            failure = self._try(upload)
            with self._changed:
                self._current = None
                self._note(upload, failure)

    def _next(self) -> Upload | None:
        with self._changed:
            if self._checkpoint is not None:
                self._current, self._checkpoint = self._checkpoint, None
            elif self._result is not None:
                self._current, self._result = self._result, None
            else:
                self._current = self._thread = None
                self._changed.notify_all()
            return self._current

    def _try(self, upload: Upload) -> str | None:
        """Upload with retries; return why the last attempt failed, or None."""
        attempts = 0
        for wait_s in (*self._waits_s, None):
            attempts += 1
            try:
                self._upload(upload)
                return None
            except Exception as error:
                failure = reason(error)
                if wait_s is None or isinstance(error, RejectedError) or self._newer_within(wait_s):
                    break
        self._warn(
            f"the checkpoint mirror {self._where} did not take {upload.shown} ({failure}; attempts: {attempts});"
            " training continues, and the next checkpoint is uploaded as usual"
        )
        return failure

    def _newer_within(self, wait_s: float) -> bool:
        # A newer checkpoint is worth more than another attempt.
        with self._changed:
            return self._changed.wait_for(lambda: self._checkpoint is not None, wait_s)

    def _note(self, upload: Upload, failure: str | None) -> None:
        if self._checkpoint is not None and self._checkpoint.name == upload.name:
            return
        if failure is not None:
            self._missing[upload.shown] = failure
            return
        self._missing.pop(upload.shown, None)
        if upload.name:
            # A later checkpoint replaces those that failed before it.
            waiting = self._checkpoint.name if self._checkpoint is not None else None
            for name in set(self._missing) - {RESULT, waiting}:
                if (step_of(name) or 0) <= (step_of(upload.name) or 0):
                    del self._missing[name]
