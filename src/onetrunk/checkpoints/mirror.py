"""A second home for checkpoints: copies in a folder or an object store, made beside training, never in its way.

A checkpoint that is verified here is uploaded by a thread, read again there, and only then an older one goes. Whatever
fails there is a warning here. Knows checkpoint folders and stores; nothing of training.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.checkpoints.folders import LEAST_KEPT, begin_staging, publish, step_of
from onetrunk.checkpoints.manifest import FORMAT, MANIFEST, digest, read_manifest
from onetrunk.checkpoints.store import DamagedError, Held, RemoteCheckpoints, Store, UnreachableError, reason

# Pauses before an upload that failed is tried again.
WAITS_S = (2.0, 10.0, 30.0)


class Mirror:
    """Checkpoints and the result of one run, a second time, at `url`.

    `check`, `pull_last` and `claim` speak up before training; `push`, `push_result`, `busy` and `wait` never raise.

    Args:
        url: a path, or s3://, gs://, hf:// and whatever else fsspec knows; credentials come from the environment.
        keep: how many checkpoints stay there, at least LEAST_KEPT of them; None or 0: all.
        warn: receives a sentence for each thing that went wrong; called from a thread too.
        waits_s: pauses in seconds before each further attempt of an upload or of a read.
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
        # What other runs, or killed uploads, have left, which goes once there is something in its place.
        self._given_up: set[str] = set()
        # What this process has proven.
        self._proven: set[str] = set()

    # --- before training --------------------------------------------------------------------------------------------

    def check(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write, read and delete a small file there.

        Args:
            output_dir: of the run; the mirror has to be another folder.

        Raises:
            RuntimeError: one of them is not possible; the sentence says why, and what to do.
        """
        self._store.probe()
        place = self._store.local_path
        if output_dir is not None and place is not None and place.resolve() == Path(output_dir).resolve():
            raise RuntimeError(f"the checkpoint mirror {self._store.shown} is output_dir itself; name another folder")

    def claim(
        self, run: str | None, overwrite: bool = False, settings: str | None = None, is_resuming: bool = False
    ) -> None:
        """Refuse a mirror that holds checkpoints or a result of another run.

        A run that was killed during its first upload and has also lost its disk gets a new id when it starts again, so
        it recognizes that upload by its settings. It does so only when it is told to resume, because another run with
        the same settings may otherwise be uploading at this moment.

        Args:
            run: id of the run that goes on ("run" in its manifests); None for a new one.
            overwrite: do not refuse; what is there is deleted once the first checkpoint of this run is proven.
            settings: digest of all that decides what the run computes; None: not known.
            is_resuming: treat unfinished uploads of a run with the same settings as this run's own.

        Raises:
            RuntimeError: names what is there; or the mirror can't be read.
        """
        found = self._reading(lambda: [self._remote.held(name) for name in ("", *self._remote.names())])
        others = [one for one in found if one.is_something and (run is None or one.run not in (run, None))]
        knows_own = is_resuming and settings is not None
        own = {one.name for one in others if knows_own and one.is_begun and one.settings == settings}
        others = [one for one in others if one.name not in own]
        self._run, self._settings, self._given_up = run, settings, own
        if overwrite:
            self._given_up |= {one.name for one in others}
        elif others:
            raise RuntimeError(self._refusal(others))

    def pull_last(self, output_dir: str | os.PathLike[str]) -> Path | None:
        """Bring the newest checkpoint that is as it was written; None where there is none.

        Args:
            output_dir: of the run; it gets the folder, whole or not at all.

        Returns:
            The folder in `output_dir`.

        Raises:
            RuntimeError: there are checkpoints, and none is whole; the mirror can't be read; `output_dir` can't be
                written.
        """
        found = self._reading(lambda: [self._remote.held(name) for name in self._remote.names()])
        damage: list[str] = []
        for held in reversed(found):
            where = f"{held.name} in {self._store.shown}"
            if not held.has_manifest:
                self._warn(f"{where} was not uploaded to its end and is passed over")
                continue
            try:
                return self._pull(held.name, Path(output_dir))
            except DamagedError as error:
                damage.append(f"{held.name}: {error}")
                self._warn(f"{where} is damaged and passed over ({error})")
        if damage:
            raise RuntimeError(
                f"none of the {len(damage)} checkpoints in {self._store.shown} is whole ({damage[0]}); restore one"
                " from a copy, or start anew with another mirror"
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
                return self._reading(download)
            finally:
                begin_staging(output_dir).rmdir()
        except OSError as error:
            raise RuntimeError(
                f"{output_dir} can't take {name} of the mirror ({reason(error)}); make room, or name another"
                " output_dir"
            ) from error

    def _reading(self, read: Callable[[], Any]) -> Any:
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

    # --- beside training --------------------------------------------------------------------------------------------

    def push(self, folder: str | os.PathLike[str], kept: Collection[str] = ()) -> None:
        """Let a whole checkpoint be uploaded; one that still waits gives way to it.

        Args:
            folder: a checkpoint, verified. As long as `busy` names it, it has to stay.
            kept: names of checkpoints that stay there whatever their age (the best one).
        """
        self._uploads.add(Upload(Path(folder), Path(folder).name, frozenset(kept)))

    def push_result(self, output_dir: str | os.PathLike[str]) -> None:
        """Let the result of a run, which its manifest names, be uploaded to the root of the mirror.

        Args:
            output_dir: of the run; files beside the manifest go too, checkpoints and other folders do not.
        """
        self._uploads.add(Upload(Path(output_dir), ""))

    def busy(self) -> set[Path]:
        """Return the local checkpoint folders that have to stay until they are uploaded."""
        return self._uploads.busy()

    def wait(self, timeout_s: float) -> list[str]:
        """Wait for what is under way, at most so many seconds; return what the mirror lacks, and warn of it.

        Args:
            timeout_s: in seconds.

        Returns:
            Names of checkpoints (only such as no later one stands for) and "the result".
        """
        missing = self._uploads.wait(timeout_s)
        if missing:
            told = "; ".join(f"{name} ({why})" for name, why in missing.items())
            self._warn(f"the checkpoint mirror {self._store.shown} lacks {told}; copy it from output_dir")
        return list(missing)

    # --- one upload, in the thread ----------------------------------------------------------------------------------

    def _upload(self, upload: Upload) -> None:
        if not upload.folder.is_dir():
            raise RefusedError(f"{upload.folder} is gone")
        if upload.name and step_of(upload.name) is None:
            raise RefusedError(f"{upload.folder} is no checkpoint-<step> folder")
        manifest = self._manifest(upload)
        run = manifest.get("run")
        self._proven.discard(upload.name)
        held = self._others(run)
        if not upload.name:
            self._remote.upload(upload.folder, "", manifest)
            self._given_up.discard("")
            return
        self._run = run
        there = held.get(upload.name)
        if there and there.is_foreign and upload.name not in self._given_up:
            raise RefusedError(f"there is a folder {upload.name} which this library has not written")
        if not (there and there.is_settled and self._is_there(upload.name, manifest)):
            self._remote.begin(upload.name, run, self._settings)
            self._remote.upload(upload.folder, upload.name, manifest)
            self._remote.settle(upload.name)
        self._proven.add(upload.name)
        self._given_up.discard(upload.name)
        try:
            self._rotate(upload, run, held)
        except Exception as error:
            self._warn(
                f"the checkpoint mirror {self._store.shown} has {upload.name}, but older ones could not be deleted"
                f" ({reason(error)}); the next checkpoint tries again"
            )

    def _manifest(self, upload: Upload) -> dict[str, Any]:
        try:
            manifest = read_manifest(upload.folder)
        except RuntimeError as error:
            raise RefusedError(f"{upload.folder} is not whole: {error}") from error
        if upload.name:
            return manifest
        beside = (path for path in upload.folder.iterdir() if path.is_file() and not path.is_symlink())
        names = {path.name for path in beside if not path.name.startswith(".") and path.suffix != ".lock"}
        files = {
            name: {"size": (upload.folder / name).stat().st_size, "sha256": digest(upload.folder / name)}
            for name in sorted({*manifest["files"], *names} - {MANIFEST})
        }
        return {**manifest, "format": FORMAT, "run": manifest.get("run") or self._run, "files": files}

    def _is_there(self, name: str, manifest: dict[str, Any]) -> bool:
        try:
            if self._remote.manifest(name)[0] != manifest:
                return False
            self._remote.verify(name, manifest)
        except DamagedError:
            return False
        return True

    def _others(self, run: str | None) -> dict[str, Held]:
        """Return what is there but for what is proven, by name; refuse what another run has put there."""
        names = [name for name in ("", *self._remote.names()) if name not in self._proven]
        held = {name: self._remote.held(name) for name in names}
        others = [one for name, one in held.items() if one.run not in (run, None) and name not in self._given_up]
        if others:
            raise RefusedError(self._refusal(others))
        return held

    def _rotate(self, upload: Upload, run: str | None, held: dict[str, Held]) -> None:
        """Delete what is left of killed uploads, what was given up, and the oldest beyond `keep`."""
        older = {name: one for name, one in held.items() if name and name != upload.name}
        # A mark that says nothing was cut off itself, before anything else was written.
        left = {name for name, one in older.items() if one.has_mark and one.run in (run, None)}
        doomed = sorted((self._given_up - {""}) | left, key=step_of)
        if self._keep is not None:
            settled = self._proven | {name for name, one in older.items() if one.is_settled and one.run == run}
            by_step = sorted(settled - set(doomed), key=step_of)
            spared = {upload.name, *upload.kept, *by_step[-max(self._keep, LEAST_KEPT) :]}
            doomed += [name for name in by_step if name not in spared]
        if "" in self._given_up:
            self._remote.delete_result()
            self._given_up.discard("")
        for name in doomed:
            self._remote.delete(name, run)
            self._proven.discard(name)
            self._given_up.discard(name)

    def _refusal(self, others: list[Held]) -> str:
        names = ", ".join(one.name or "a result" for one in others[:3])
        return (
            f"the checkpoint mirror {self._store.shown} holds {names} of another run; name a mirror of its own for"
            " this one, resume that run, or set overwrite_output_dir to true"
        )


RESULT = "the result"


class RefusedError(RuntimeError):
    """Another attempt would be refused too."""


@dataclass(frozen=True)
class Upload:
    """One folder to be uploaded.

    Args:
        folder: local, with a manifest.
        name: of the checkpoint folder there; "" for the result, at the root.
        kept: names of checkpoints that stay there whatever their age.
    """

    folder: Path
    name: str
    kept: frozenset[str] = frozenset()

    @property
    def shown(self) -> str:
        """What it is, for a message."""
        return self.name or RESULT


class Uploads:
    """The queue and its thread. No method raises; none blocks but `wait`.

    Args:
        upload: uploads, or raises; RefusedError where another attempt is of no use. Called in the thread.
        warn: receives a sentence for each upload that failed at last. Called in the thread.
        waits_s: pauses in seconds before each further attempt.
        where: the place, for messages.
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
        self._missing: dict[str, str] = {}

    def add(self, upload: Upload) -> None:
        """Let something be uploaded; a checkpoint that still waits gives way to a newer one."""
        with self._changed:
            if not upload.name:
                self._result = upload
            else:
                if self._checkpoint is not None:
                    self._missing.pop(self._checkpoint.name, None)
                self._checkpoint = upload
            self._missing[upload.shown] = "not uploaded yet"
            if self._thread is None:
                # A daemon: a store that does not answer must not keep the process alive.
                self._thread = threading.Thread(target=self._run, name="checkpoint-mirror", daemon=True)
                self._start()
            self._changed.notify_all()

    def busy(self) -> set[Path]:
        """Return the local checkpoint folders that are not uploaded yet, and will be."""
        with self._changed:
            return {
                upload.folder for upload in (self._checkpoint, self._current) if upload is not None and upload.name
            }

    def wait(self, timeout_s: float) -> dict[str, str]:
        """Return what lacks there, and why, after at most so many seconds.

        Args:
            timeout_s: how long to wait for what is under way.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, timeout_s)
            return dict(self._missing)

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            # No more threads, or no memory for one.
            self._thread = None
            self._warn(f"the checkpoint mirror {self._where} waits for the next checkpoint ({reason(error)})")

    def _run(self) -> None:
        while (upload := self._next()) is not None:
            failure = self._try(upload)
            with self._changed:
                self._current = None
                self._note(upload, failure)

    def _next(self) -> Upload | None:
        with self._changed:
            self._current = self._checkpoint or self._result
            if self._checkpoint is not None:
                self._checkpoint = None
            elif self._result is not None:
                self._result = None
            else:
                self._thread = None
                self._changed.notify_all()
            return self._current

    def _try(self, upload: Upload) -> str | None:
        """Upload, again after each pause; return what failed at last."""
        attempts = 0
        for wait_s in (*self._waits_s, None):
            attempts += 1
            try:
                self._upload(upload)
                return None
            except Exception as error:
                failure = reason(error)
                if wait_s is None or isinstance(error, RefusedError) or self._newer_within(wait_s):
                    break
        self._warn(
            f"the checkpoint mirror {self._where} did not take {upload.shown} ({failure}; attempts: {attempts});"
            " training goes on, and the next checkpoint is tried again"
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
        waiting = self._checkpoint.name if self._checkpoint is not None else None
        for name in [name for name in self._missing if upload.name and name not in (RESULT, waiting)]:
            # A later checkpoint stands for one that failed.
            if (step_of(name) or 0) <= (step_of(upload.name) or 0):
                del self._missing[name]
