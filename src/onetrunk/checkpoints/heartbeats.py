"""Heartbeats: each process of a training writes where it is, for supervisors and for naming a process that is lost.

`_heartbeat-RANK.json` in the output folder is replaced when the phase changes (at most once per second), and every few
seconds while work makes progress. Only progress renews it, so a process that hangs is recognised by the age of its
file. If the connection to another process breaks, the files say which process is lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from onetrunk.models.pipeline import StageLost, is_broken_link
from onetrunk.utils.files import atomic_path, delete_temporaries, parse_json
from onetrunk.utils.redaction import redact

logger = logging.getLogger(__name__)

# Least seconds between two writes while the phase stays the same, and if it has changed: steps may be short, and the
# folder may be on a network.
INTERVAL_S, CHANGE_S = 5.0, 1.0
# How long a process whose connection broke waits for signs of the others, before it names those that gave none.
GRACE_S = 10.0
NO_BEAT = "without a heartbeat: it has ended, or does not share output_dir"
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


def heartbeat_file(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's heartbeat file."""
    return Path(folder) / f"_heartbeat-{rank}.json"


def read_beat(folder: str | os.PathLike[str], rank: int) -> Beat | None:
    """Return a rank's heartbeat, or None if there is none."""
    try:
        return Beat(**parse_json(heartbeat_file(folder, rank).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


class Heartbeat:
    """The heartbeat of this process. It is written between `running` and its end only; otherwise calls do nothing.

    A file that cannot be written never ends a run: a warning says so, and the run continues without a heartbeat.

    Args:
        folder: the output folder of the run.
        rank: of this process.
    """

    _by_path: ClassVar[dict[Path, Heartbeat]] = {}

    def __init__(self, folder: str | os.PathLike[str], rank: int):
        self.path = heartbeat_file(folder, rank)
        self.rank = rank
        self.phase = START
        self.step: int | None = None
        self.rollout: int | None = None
        self._depth = 0
        self._written = 0.0
        self._progress = time.monotonic()
        self._written_phase = ""
        self._is_writable = True
        self._lock = threading.Lock()

    @classmethod
    def of(cls, folder: str | os.PathLike[str], rank: int) -> Heartbeat:
        """Return the heartbeat of an output folder: a stage and its trainer share one."""
        path = heartbeat_file(Path(folder).absolute(), rank)
        return cls._by_path.setdefault(path, cls(path.parent, rank))

    # --- writing ----------------------------------------------------------------------------------------------------

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
        now = time.monotonic()
        self._progress = now
        interval = INTERVAL_S if self.phase == self._written_phase else CHANGE_S
        if self._depth and (is_due or now - self._written >= interval):
            self._write()

    def catch_up(self) -> None:
        """Write progress that was recorded since the last write, for a thread that calls it now and then."""
        if self._depth and self._progress > self._written:
            self._write()

    @property
    def silence_s(self) -> float:
        """Seconds since this process last recorded progress."""
        return time.monotonic() - self._progress

    def _write(self, error: str | None = None) -> None:
        if not self._is_writable or not self.path.parent.is_dir():
            return
        beat = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid()}
        beat |= {
            "time": time.time() - self.silence_s,
            "phase": self.phase,
            "step": self.step,
            "rollout": self.rollout,
            "error": error,
        }
        with self._lock:  # Scoring makes progress in a thread of its own.
            self._written, self._written_phase = time.monotonic(), self.phase
            try:
                with atomic_path(self.path, is_durable=False) as temporary:
                    temporary.write_text(json.dumps(beat) + "\n", encoding="utf-8")
            except OSError as failure:
                self._is_writable = False
                logger.warning(f"{self.path} cannot be written ({failure}); the run continues without heartbeats")

    # --- the life of a run ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, world_size: int, creates_folder: bool = False) -> Iterator[None]:
        """Write heartbeats inside the block; the outermost one deletes the file if it ends without an error.

        Raises:
            LostRanks: instead of an error of the connection to another process.
        """
        if creates_folder:
            with contextlib.suppress(OSError):
                os.makedirs(self.path.parent, exist_ok=True)
        self._depth += 1
        if self._depth == 1:
            self._is_writable, self.step, self.rollout = True, None, None
            self.enter(START, is_due=True)
            if self.rank == 0:
                self._delete_from(world_size)
        try:
            yield
        except Exception as error:
            self.explain(error, world_size)
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

    def _delete_from(self, world_size: int) -> None:
        """Delete what ranks left behind that this launch does not have."""
        for path in self.path.parent.glob("_heartbeat-*.json"):
            number = path.stem.removeprefix("_heartbeat-")
            if number.isdecimal() and int(number) >= world_size:
                with contextlib.suppress(OSError):
                    path.unlink()

    def explain(self, error: Exception, world_size: int) -> None:
        """Record that this process failed.

        Raises:
            LostRanks: if the reason is that other processes are lost.
        """
        if world_size == 1 or self.phase == FAILED:
            return
        place = Beat(self.rank, "", 0, 0.0, self.phase, self.step, self.rollout).place
        is_broken = is_connection_error(error)
        self.phase = FAILED
        self._write(error="" if is_broken else redact(f"{type(error).__name__}: {error}")[:500])
        if is_broken:
            if isinstance(error, StageLost):
                place += f", where it waited for {error.peer} of the pipeline"
            lost = find_lost(self.path.parent, self.rank, world_size)
            raise LostRanks(lost_message(lost, self.rank, place, error)) from error


class HeartbeatCallback(TrainerCallback):
    """Renews the heartbeat with every step and evaluation of a trainer."""

    def __init__(self, heartbeat: Heartbeat):
        self.heartbeat = heartbeat

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.heartbeat.step = state.global_step
        self.heartbeat.enter(TRAIN, is_due=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.heartbeat.step = state.global_step
        self.heartbeat.beat()

    on_substep_end = on_step_end = on_prediction_step = on_step_begin


# --- which process is lost ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lost:
    """A process that ended, or that gave no sign. `fate` says which, in words; `beat` is its last heartbeat."""

    rank: int
    fate: str
    beat: Beat | None

    def __str__(self) -> str:
        if self.beat is None:
            return f"rank {self.rank} ({self.fate})"
        who = f"rank {self.rank} (process {self.beat.pid} on {self.beat.host})"
        if self.beat.phase == FAILED:
            return f"{who} {self.fate}"
        return f"{who} {self.fate} {self.beat.place}; its last sign was {time.time() - self.beat.time:.0f} s ago"


def is_connection_error(error: BaseException | None) -> bool:
    """Return whether an error says that the connection to another process broke, or that it gave no answer."""
    while error is not None and not isinstance(error, LostRanks):
        if is_broken_link(error):
            return True
        error = error.__cause__
    return False


def process_state(beat: Beat) -> str | None:
    """Return what became of a process on this machine: "gone", "stopped" or "alive"; None on another machine."""
    if beat.host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return None
    try:
        # The name before the state may contain anything, also parentheses.
        state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "alive")


def certainly_lost(folder: Path, rank: int, world_size: int) -> list[Lost]:
    """Return the other processes that are lost for certain: gone or stopped on this machine, or failed by themselves.

    A process that failed because it lost another one is not among them.
    """
    lost = []
    for other in range(world_size):
        beat = None if other == rank else read_beat(folder, other)
        if beat is None:
            continue
        if beat.phase == FAILED:
            if beat.error:
                lost.append(Lost(other, f"failed: {beat.error}", beat))
        elif process_state(beat) == "gone":
            lost.append(Lost(other, "was killed or crashed", beat))
        elif process_state(beat) == "stopped":
            lost.append(Lost(other, "is stopped (SIGSTOP or a debugger)", beat))
    return lost


def find_lost(folder: Path, rank: int, world_size: int, grace_s: float = GRACE_S) -> list[Lost]:
    """Return the processes that are lost; waits up to `grace_s` for signs of the others if none is lost for certain.

    Args:
        folder: with the heartbeats, shared by all processes.
        rank: of this process.
        world_size: number of processes.
        grace_s: seconds. A process that makes progress in this time, or loses a connection itself, is not lost.
    """
    others = [other for other in range(world_size) if other != rank]
    first = {other: read_beat(folder, other) for other in others}
    end = time.monotonic() + grace_s
    while True:
        lost = certainly_lost(folder, rank, world_size)
        now = {other: read_beat(folder, other) for other in others}
        silent = [other for other in others if now[other] == first[other] and not _has_failed(now[other])]
        if lost or not silent or time.monotonic() >= end:
            break
        time.sleep(0.2)
    if lost or not silent:
        return lost
    fates = [Lost(other, NO_BEAT if now[other] is None else "hangs", now[other]) for other in silent]
    # One that waits in vain is no culprit while another one is busy with work of its own.
    busy = [one for one in fates if one.beat is None or one.beat.phase not in WAITING]
    return sorted(busy or fates, key=lambda one: one.beat.time if one.beat else 0.0)


def _has_failed(beat: Beat | None) -> bool:
    return beat is not None and beat.phase == FAILED


def lost_message(lost: list[Lost], rank: int, place: str, error: object) -> str:
    """Return the message of LostRanks for a process `rank` that was at `place`."""
    who = "; ".join(map(str, lost)) or (
        f"no process is known to be lost, so look at the network between the machines ({str(error).splitlines()[0]})"
    )
    return (
        f"rank {rank} lost the connection to another process {place}: {who}. Look at the log of the rank that is named"
        " first, then run the same command with --resume auto to resume from the last checkpoint"
    )


class Watcher:
    """A thread that ends this process with a message if it waits in vain for another one.

    A wait for a process that hangs raises no error that Python could translate: NCCL's watchdog aborts the process
    with a stack trace of C++, and transformers does not pass `ddp_timeout` on to gloo. The thread acts shortly before
    `ddp_timeout`, or as soon as a process on this machine is gone.

    Args:
        heartbeat: of this process.
        world_size: number of processes.
        timeout_s: of the process group (`ddp_timeout`).
        end: ends the process with an exit code.
    """

    def __init__(self, heartbeat: Heartbeat, world_size: int, timeout_s: float, end: Callable[[int], None] = os._exit):
        self.heartbeat = heartbeat
        self.world_size = world_size
        self.limit_s = timeout_s - min(30.0, 0.1 * timeout_s)
        self.tick_s = min(INTERVAL_S, self.limit_s / 10)
        self.end = end
        self._stops = threading.Event()
        self._num_gone = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block."""
        thread = threading.Thread(target=self._run, daemon=True, name="heartbeats")
        thread.start()
        try:
            yield
        finally:
            self._stops.set()

    def _run(self) -> None:
        while not self._stops.wait(self.tick_s):
            self.heartbeat.catch_up()
            message = self.check()
            if message is not None:
                logger.error(message)
                self.end(1)
                return

    def check(self) -> str | None:
        """Return why this process must end, or None."""
        heartbeat, folder = self.heartbeat, self.heartbeat.path.parent
        silence = heartbeat.silence_s
        if heartbeat.phase not in WAITING or silence < self.tick_s:
            self._num_gone = 0
            return None
        lost = certainly_lost(folder, heartbeat.rank, self.world_size)
        # A stopped process may continue. Twice, because an error may be on its way through the main thread, which can
        # end the run better.
        is_over = any(process_state(one.beat) == "gone" or one.beat.error for one in lost)
        self._num_gone = self._num_gone + 1 if is_over else 0
        if silence < self.limit_s and self._num_gone < 2:
            return None
        lost = lost or find_lost(folder, heartbeat.rank, self.world_size, grace_s=0.0)
        place = Beat(heartbeat.rank, "", 0, 0.0, heartbeat.phase, heartbeat.step, heartbeat.rollout).place
        return lost_message(lost, heartbeat.rank, place, f"no answer for {silence:.0f} s")
