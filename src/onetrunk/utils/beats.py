"""Heartbeat files: what each process of a run did last."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from onetrunk.utils.files import parse_json


@dataclass(frozen=True)
class Beat:
    """The content of a heartbeat file.

    Args:
        rank, host, pid: the process.
        time: when it last made progress, in seconds since 1970.
        phase: what it does.
        step, rollout: the optimizer step and the number of the rollout, None before the first one.
    """

    rank: int
    host: str
    pid: int
    time: float
    phase: str
    step: int | None = None
    rollout: int | None = None

    @property
    def place(self) -> str:
        """What the process was doing, in words."""
        words = [f"in phase {self.phase}"]
        words += [f"of rollout {self.rollout}"] if self.rollout is not None else []
        words += [f"at step {self.step}"] if self.step is not None else []
        return " ".join(words)

    @property
    def may_be_alive(self) -> bool:
        """Whether the process can exist still; of one on another host nobody knows."""
        return self.host != socket.gethostname() or psutil.pid_exists(self.pid)

    def __str__(self) -> str:
        age = time.time() - self.time
        return f"rank {self.rank} (process {self.pid} on {self.host}), last sign {age:.0f} s ago {self.place}"


def heartbeat_file(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's heartbeat file."""
    return Path(folder) / f"_heartbeat-{rank}.json"


def read_beat(folder: str | os.PathLike[str], rank: int) -> Beat | None:
    """Return a rank's heartbeat, or None if there is none."""
    try:
        return Beat(**parse_json(heartbeat_file(folder, rank).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
