"""Heartbeats: each process of a training writes where it is, for supervisors and for finding a process that is lost.

`_heartbeat-RANK.json` in the output folder is replaced when work makes progress, at most once per second. Only
progress renews it, so a process that hangs is recognised by the age of its file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from onetrunk.utils.beats import Beat, heartbeat_file, read_beat
from onetrunk.utils.files import atomic_path, delete_temporaries

logger = logging.getLogger(__name__)

# Least seconds between two writes: steps may be short, and the folder may be on a network.
INTERVAL_S = 1.0
START, TRAIN, GATHER, UPDATE, SAVE = "start", "train", "gather", "update", "save"
# What gloo and torch.distributed say when the connection to another process breaks or its answer does not come.
BROKEN = re.compile(
    r"gloo|Connection (closed|reset) by peer|NCCL|ProcessGroup|Socket Timeout|Timed out (waiting|after)|Broken pipe"
)


class LostRanks(RuntimeError):
    """Another process of the run ended or gave no answer."""


class Heartbeat(TrainerCallback):
    """The heartbeat of this process. It is written between `running` and its end only; otherwise calls do nothing.

    As a callback it is renewed with every step and evaluation of a trainer. A file that cannot be written never ends a
    run: one warning says so, and the next heartbeat is tried again.
    """

    _by_path: ClassVar[dict[Path, Heartbeat]] = {}

    def __init__(self, folder: str | os.PathLike[str], rank: int):
        self.path = heartbeat_file(folder, rank)
        self.rank = rank
        self._depth = 0
        self._lock = threading.Lock()
        self._begin()

    @classmethod
    def of(cls, folder: str | os.PathLike[str], rank: int) -> Heartbeat:
        """Return the heartbeat of an output folder: a stage and its trainer share one."""
        path = heartbeat_file(Path(folder).absolute(), rank)
        return cls._by_path.setdefault(path, cls(path.parent, rank))

    def _begin(self) -> None:
        self.phase = START
        self.step: int | None = None
        self.rollout: int | None = None
        self._has_failed, self._written = False, 0.0

    def enter(self, phase: str, is_due: bool = False) -> None:
        """Record that a phase begins; the file is written at once if that `is_due`."""
        self.phase = phase
        self.beat(is_due)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record a phase for the block, and the phase from before it afterwards."""
        before = self.phase
        self.enter(phase, is_due=True)
        try:
            yield
        finally:
            self.enter(before, is_due=True)

    def beat(self, is_due: bool = False) -> None:
        """Record progress. Cheap enough for every token: the file is written now and then, or if it `is_due`."""
        if not self._depth or not self.path.parent.is_dir():
            return
        if not is_due and time.monotonic() - self._written < INTERVAL_S:
            return
        beat = Beat(self.rank, socket.gethostname(), os.getpid(), time.time(), self.phase, self.step, self.rollout)
        with self._lock:  # Scoring makes progress in a thread of its own.
            self._written = time.monotonic()
            try:
                with atomic_path(self.path, is_durable=False) as temporary:
                    temporary.write_text(json.dumps(asdict(beat)) + "\n", encoding="utf-8")
            except OSError as failure:
                if not self._has_failed:
                    logger.warning(f"{self.path} cannot be written ({failure}); the run continues and tries again")
                self._has_failed = True

    @contextlib.contextmanager
    def running(self, world_size: int) -> Iterator[None]:
        """Write heartbeats inside the block. The end of the outermost block deletes the file.

        Raises:
            LostRanks: instead of an error of the connection to another process; it lists their last signs.
        """
        self._depth += 1
        if self._depth == 1:
            self._begin()
            self.beat(is_due=True)
            if self.rank == 0:
                self._delete_beyond(world_size)
        try:
            yield
        except Exception as error:
            if not is_connection_error(error) or isinstance(error, LostRanks):
                raise
            others = [rank for rank in range(world_size) if rank != self.rank]
            signs = [str(read_beat(self.path.parent, rank) or f"rank {rank} has ended") for rank in others]
            raise LostRanks(
                f"rank {self.rank} lost the connection to another process in phase {self.phase}: {'; '.join(signs)}."
                " Look at the logs of these processes, then run the same command with --resume auto to resume from"
                " the last checkpoint"
            ) from error
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.delete()

    def delete(self) -> None:
        """Delete the files of this process, or of a killed one with its rank."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            delete_temporaries(self.path.parent, self.path.name)

    def _delete_beyond(self, world_size: int) -> None:
        """Delete the files of ranks that this launch does not have."""
        for path in self.path.parent.glob("_heartbeat-[0-9]*.json"):
            number = path.stem.removeprefix("_heartbeat-")
            if number.isdecimal() and int(number) >= world_size:
                path.unlink(missing_ok=True)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.step = state.global_step
        self.enter(TRAIN, is_due=True)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.step = state.global_step
        self.beat()

    on_substep_end = on_step_end = on_prediction_step = on_step_begin


def is_connection_error(error: BaseException | None) -> bool:
    """Return whether an error says that the connection to another process broke, or that it gave no answer."""
    while error is not None:
        is_broken = isinstance(error, RuntimeError) and BROKEN.search(str(error)) and dist.is_initialized()
        if is_broken or isinstance(error, dist.DistError):
            return True
        error = error.__cause__
    return False
