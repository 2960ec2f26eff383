"""Stopping a run on a signal: it writes a checkpoint at the current step and ends, all processes at the same step.

SIGTERM, SIGINT (Ctrl-C), SIGUSR1 (which SLURM sends before a time limit) and SIGHUP (the terminal or the reader of the
output is gone) set a flag. The flag is read between optimizer steps, and while a rollout is sampled and scored: that
work is given up, because the resumed run makes the same rollout again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather

from onetrunk.utils.output import lasting_output

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# These may arrive twice without a second request: from the system and from a shell or a scheduler.
REPEATED = (signal.SIGUSR1, signal.SIGHUP)
# Some schedulers signal the launcher and the training processes, and the launcher passes its signal on: a SIGTERM that
# comes within so many seconds of the first signal is no second request.
REPEAT_S = 30.0


class StopAsked(Exception):
    """Work was given up because the run is to stop. Training catches it; it is not an error."""


class Stopped(SystemExit):
    """The run was stopped by a signal and can be resumed from the folder `checkpoint`.

    The exit code is 0, which schedulers read as a clean end; after Ctrl-C it is 130, so that a shell stops
    `onetrunk ppo ... && onetrunk eval ...` too.
    """

    def __init__(self, checkpoint: str, signal_name: str):
        super().__init__(128 + signal.SIGINT if signal_name == "SIGINT" else 0)
        self.checkpoint = checkpoint
        self.signal_name = signal_name

    def __str__(self) -> str:
        return (
            f"stopped ({self.signal_name}); everything is saved in {self.checkpoint}: run the same command with"
            " --resume auto to resume from there"
        )


class StopSignals:
    """Whether the run is to stop, and the signal that asked for it."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._received_at = 0.0
        self._previous_handlers: dict[int, Any] = {}
        self._gives_up = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block; a second signal does what it did before. Needs the main thread.

        A second Ctrl-C always counts, a second SIGTERM only REPEAT_S after the first signal, and SIGUSR1 and SIGHUP
        never.

        If the reader of the output is gone, the process gets a SIGHUP.
        """
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Under nohup, or in the background of a shell, some signals must stay ignored.
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous_handlers = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            with lasting_output():
                yield
        finally:
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is None:
            self.received, self._received_at = name, time.monotonic()
            note = f"\n{name}: stopping after this step with a checkpoint; Ctrl-C stops at once\n"
            # Not through Python's streams, whose writer this handler may have interrupted. The terminal may be gone.
            with contextlib.suppress(OSError):
                os.write(2, note.encode())
        elif number not in REPEATED and not self._repeats(number):
            previous = self._previous_handlers.get(number)
            if callable(previous):
                previous(number, frame)
            raise KeyboardInterrupt

    def _repeats(self, number: int) -> bool:
        return number == signal.SIGTERM and time.monotonic() - self._received_at < REPEAT_S

    @contextlib.contextmanager
    def giving_up(self, accelerator: Accelerator, alone: bool = False) -> Iterator[None]:
        """Let `poll` end the block early. All processes enter it, and if any is to stop, all raise StopAsked after it.

        With `alone`, for a block in which processes communicate, `poll` ends it only in a run with one process.
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
        """Raise StopAsked, which `giving_up` catches, if the run is to stop and this is inside such a block."""
        if self._gives_up and self.received is not None:
            raise StopAsked

    def agreed(self, accelerator: Accelerator) -> bool:
        """Return whether any process is to stop. Every process must call it at the same point."""
        # Of all processes, also where the trainer counts a group of tensor parallelism as one.
        if accelerator.state.num_processes == 1:
            return self.received is not None
        is_stopping = torch.tensor([float(self.received is not None)], device=accelerator.device)
        if not gather(is_stopping).max().item():
            return False
        self.received = self.received or "a signal to another process"
        return True
