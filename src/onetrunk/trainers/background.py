"""A function in a thread beside the main one, whose result is waited for where it is needed. Knows nothing else."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

LONGEST_WAIT_S = 60.0


class Background(Generic[T]):
    """Runs `function` beside the main thread, which goes on with what only it may do (user code, signals).

    An error in the main thread is told at once; the process then ends with the thread, or LONGEST_WAIT_S later.

    Args:
        function: takes nothing. Grad mode and autocast are a thread's own: it sets what it needs.
        device: the accelerator it works on, which is a thread's own too.
        starts_now: False to run it in the main thread, at `result`.
    """

    def __init__(self, function: Callable[[], T], device: torch.device, starts_now: bool = True):
        self._function = function
        self._device = device
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if starts_now:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
            # Python tears a daemon thread down inside torch, which aborts: exit code 134, whatever the run's was.
            atexit.register(self._thread.join, LONGEST_WAIT_S)

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._values.append(self._function())
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """Return what the function returned, or raise what it raised; it has run once, however often this is asked."""
        if self._thread is None and not self._values:
            self._values.append(self._function())
        elif self._thread is not None:
            self._thread.join()
            atexit.unregister(self._thread.join)
        if self._error is not None:
            raise self._error
        return self._values[0]
