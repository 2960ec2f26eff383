"""Heartbeats: each process of a training writes where it is, for supervisors and for naming a process that is lost.

`_heartbeat-RANK.json` in the output folder is replaced when work makes progress, at most once per second. Only
progress renews it, so a process that hangs is recognised by the age of its file. If the connection to another process
breaks, the files say which process is lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import TrainerCallback, TrainerControl, TrainerState

from onetrunk.parallel.stages import is_broken_link
from onetrunk.utils.files import atomic_path, delete_temporaries, parse_json
from onetrunk.utils.redaction import redact

logger = logging.getLogger(__name__)

# Least seconds between two writes: steps may be short, and the folder may be on a network.
INTERVAL_S = 1.0
# How long a process whose connection broke waits for a sign of who is lost.
GRACE_S = 10.0
START, TRAIN, GATHER, UPDATE, SAVE, FAILED = "start", "train", "gather", "update", "save", "failed"
# In these phases a process may be waiting for the others.
WAITING = (TRAIN, GATHER, UPDATE, SAVE)


class LostRanks(RuntimeError):
    """Other processes of the run ended or gave no answer; the message names them."""


@dataclass(frozen=True)
class Beat:
    """The content of a heartbeat file.

    Args:
        rank, host, pid: of the process.
        time: when it last made progress, in seconds since 1970.
        phase: what it does; `failed` after an error.
        step, rollout: the optimizer step and the number of the rollout, None before there is one.
        error: of a failed process: its message, or "" if the process only lost the connection to another one.
    """

    rank: int
    host: str
    pid: int
    time: float
    phase: str
    step: int | None = None
    rollout: int | None = None
    error: str | None = None

    @property
    def place(self) -> str:
        """What the process was doing, in words."""
        words = [f"in phase {self.phase}"]
        words += [f"of rollout {self.rollout}"] if self.rollout is not None else []
        words += [f"at step {self.step}"] if self.step is not None else []
        return " ".join(words)

    @property
    def fate(self) -> str | None:
        """What became of the process, in words, if that is certain: it failed, or has ended on this machine.

        A process that failed because it lost another one has none.
        """
        if self.phase == FAILED:
            return f"failed: {self.error}" if self.error else None
        if self.host != socket.gethostname() or not Path("/proc/self/stat").exists():
            return None
        try:
            # The name before the state may contain anything, also parentheses.
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        return "was killed or crashed" if state in "ZX" else None

    def __str__(self) -> str:
        who = f"rank {self.rank} (process {self.pid} on {self.host})"
        if self.phase == FAILED:
            return f"{who} {self.fate}"
        age = time.time() - self.time
        return f"{who} {self.fate or 'is silent'} {self.place}; its last sign was {age:.0f} s ago"


def heartbeat_file(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's heartbeat file."""
    return Path(folder) / f"_heartbeat-{rank}.json"


def read_beat(folder: str | os.PathLike[str], rank: int) -> Beat | None:
    """Return a rank's heartbeat, or None if there is none."""
    try:
        return Beat(**parse_json(heartbeat_file(folder, rank).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


class Heartbeat(TrainerCallback):
    """The heartbeat of this process. It is written between `running` and its end only; otherwise calls do nothing.

    As a callback it is renewed with every step and evaluation of a trainer. A file that cannot be written never ends a
    run: a warning says so, and the run continues without a heartbeat.

    Args:
        folder: the output folder of the run.
        rank: of this process.
    """

    _by_path: ClassVar[dict[Path, Heartbeat]] = {}

    def __init__(self, folder: str | os.PathLike[str], rank: int):
        self.path = heartbeat_file(folder, rank)
        self.rank = rank
        self.world_size = 1
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
        self._error: str | None = None
        self._is_writable, self._written = True, 0.0

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
        if is_due or time.monotonic() - self._written >= INTERVAL_S:
            self._write()

    @property
    def now(self) -> Beat:
        """What the file says if it is written now."""
        place = (self.phase, self.step, self.rollout)
        return Beat(self.rank, socket.gethostname(), os.getpid(), time.time(), *place, self._error)

    def _write(self) -> None:
        if not self._depth or not self._is_writable or not self.path.parent.is_dir():
            return
        with self._lock:  # Scoring makes progress in a thread of its own.
            self._written = time.monotonic()
            try:
                with atomic_path(self.path, is_durable=False) as temporary:
                    temporary.write_text(json.dumps(asdict(self.now)) + "\n", encoding="utf-8")
            except OSError as failure:
                self._is_writable = False
                logger.warning(f"{self.path} cannot be written ({failure}); the run continues without heartbeats")

    @contextlib.contextmanager
    def running(self, world_size: int) -> Iterator[None]:
        """Write heartbeats inside the block; the outermost one deletes the file if it ends without an error.

        Args:
            world_size: number of processes.

        Raises:
            LostRanks: instead of an error of the connection to another process.
        """
        self._depth += 1
        if self._depth == 1:
            self.world_size = world_size
            self._begin()
            self.beat(is_due=True)
            if self.rank == 0:
                self._delete_others()
        try:
            yield
        except Exception as error:
            self._explain(error)
            raise
        finally:
            self._depth -= 1
            if self._depth == 0 and self.phase != FAILED:
                self.delete()

    def delete(self) -> None:
        """Delete the files of this process, or of a killed one with its rank."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            delete_temporaries(self.path.parent, self.path.name)

    def _delete_others(self) -> None:
        """Delete what ranks left behind that this launch does not have."""
        with contextlib.suppress(OSError):
            for path in self.path.parent.glob("_heartbeat-*.json"):
                number = path.stem.removeprefix("_heartbeat-")
                if number.isdecimal() and int(number) >= self.world_size:
                    path.unlink()

    def _explain(self, error: Exception) -> None:
        """Record that this process failed; raise LostRanks if the reason is that other processes are lost."""
        if self.world_size == 1 or self.phase == FAILED:
            return
        place, is_broken = self.now.place, is_connection_error(error)
        self.phase, self._error = FAILED, "" if is_broken else redact(f"{type(error).__name__}: {error}")[:500]
        self._write()
        if is_broken:
            lost = describe_lost(self.path.parent, self.rank, self.world_size)
            raise LostRanks(
                f"rank {self.rank} lost the connection to another process {place}: {lost}. Look at the log of the rank"
                " that is named first, then run the same command with --resume auto to resume from the last checkpoint"
            ) from error

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.step = state.global_step
        self.enter(TRAIN, is_due=True)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.step = state.global_step
        self.beat()

    on_substep_end = on_step_end = on_prediction_step = on_step_begin


def is_connection_error(error: BaseException | None) -> bool:
    """Return whether an error says that the connection to another process broke, or that it gave no answer."""
    while error is not None and not is_broken_link(error):
        error = error.__cause__
    return error is not None


def describe_lost(folder: Path, rank: int, world_size: int, grace_s: float = GRACE_S) -> str:
    """Return who is lost, in words: all whose fate is certain, else the one process that most likely is.

    Args:
        folder: with the heartbeats, shared by all processes.
        rank: of this process.
        world_size: number of processes.
        grace_s: seconds to wait for a certain sign. A process that lost a connection itself is not lost.
    """
    end, others = time.monotonic() + grace_s, [other for other in range(world_size) if other != rank]
    while True:
        beats = {other: read_beat(folder, other) for other in others}
        certain = [str(beat) for beat in beats.values() if beat is not None and beat.fate is not None]
        if certain:
            return "; ".join(certain)
        if time.monotonic() >= end:
            break
        time.sleep(0.2)
    for other, beat in beats.items():
        if beat is None:
            return f"rank {other} (without a heartbeat: it has ended, or does not share output_dir)"
    # One that waits in vain is no culprit while another one is busy with work of its own.
    silent = [beat for beat in beats.values() if beat.phase != FAILED]
    silent.sort(key=lambda beat: (beat.phase in WAITING, beat.time))
    return str(silent[0]) if silent else "no process is known to be lost, so look at the network between the machines"
