"""Asked to stop by a signal, a run writes a checkpoint where it stands and ends; all its processes at the same step.

SIGTERM, SIGINT (Ctrl-C), SIGUSR1 (what SLURM sends before a time limit) and SIGHUP (the terminal, or the reader of the
output, is gone) set a flag. It is read between optimizer
steps, and while a rollout is sampled and scored: the rollout is given up, for the resumed run makes the same one.
Knows signals and processes; no model and no file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator

from onetrunk.utils.output import lasting_output

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Both may come twice: from the system and from a shell, or a scheduler.
REPEATED = (signal.SIGUSR1, signal.SIGHUP)


class StopAsked(Exception):
    """Work was given up because the run is to stop; training takes it for no error."""


class Stopped(SystemExit):
    """The run has stopped because it was asked to, and goes on from `checkpoint`; a script ends with exit code 0.

    Args:
        checkpoint: the folder that holds everything.
        signal_name: what asked.
    """

    def __init__(self, checkpoint: str, signal_name: str):
        super().__init__(0)
        self.checkpoint = checkpoint
        self.signal_name = signal_name

    def __str__(self) -> str:
        return (
            f"stopped ({self.signal_name}); all is kept in {self.checkpoint}: the same command with --resume auto"
            " goes on from there"
        )


class StopSignals:
    """Whether the run is to stop, and since which signal."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}
        self._gives_up = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals in the block; a second one does what it did before. Only the main thread can.

        Output whose reader is gone is a SIGHUP.
        """
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Under nohup, or in the background of a shell, some are to be ignored.
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in heard}
        try:
            with lasting_output():
                yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is None:
            self.received = name
            note = f"\n{name}: stopping after this step with a checkpoint; a second signal stops at once\n"
            # A handler may interrupt whoever writes through Python's streams. The terminal may be gone.
            with contextlib.suppress(OSError):
                os.write(2, note.encode())
        elif number not in REPEATED:
            before = self._before.get(number)
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def giving_up(self, accelerator: Accelerator, alone: bool = False) -> Iterator[None]:
        """Let `poll` end the block early, and raise StopAsked behind it if any process is to stop; all enter it.

        Args:
            accelerator: of the run.
            alone: the processes talk to each other in the block, so that only a process alone may leave it early.
        """
        self._gives_up = not alone or accelerator.num_processes == 1
        try:
            yield
        except StopAsked:
            pass
        finally:
            self._gives_up = False
        if self.agreed(accelerator):
            raise StopAsked

    def poll(self) -> None:
        """Give up the work at hand, if the run is to stop and the work is of a kind that is made anew.

        Raises:
            StopAsked: caught by `giving_up`.
        """
        if self._gives_up and self.received is not None:
            raise StopAsked

    def agreed(self, accelerator: Accelerator) -> bool:
        """Return whether any process is to stop; every process asks at the same place."""
        if accelerator.num_processes == 1:
            return self.received is not None
        own = torch.tensor([float(self.received is not None)], device=accelerator.device)
        if not accelerator.gather(own).max().item():
            return False
        self.received = self.received or "a signal to another process"
        return True
