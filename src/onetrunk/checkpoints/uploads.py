"""Uploads one after another in a thread, the newest first; what fails is tried again, then told, and never raised.

Knows an order and a clock; what an upload does is its caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from onetrunk.checkpoints.folders import step_of
from onetrunk.checkpoints.store import reason

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
