"""The rules for calling a server: how long to wait, how often again, how many calls at once, and when to give up.

Knows neither HTTP nor an event loop; `calls.py` follows these rules. Calls in flight follow additive increase and
multiplicative decrease, as TCP's congestion window does (Chiu and Jain 1989).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from typing import Literal

from onetrunk.judges.base import ErrorKind


class CallError(RuntimeError):
    """One call gave no answer.

    Args:
        reason: why, without a secret.
        kind: "again": the next call may succeed; "refused": this question never will; "stop": no question will;
            "unread": there are replies, and they are no verdict.
        overloaded: the server asks for, or needs, fewer calls at once.
        retry_after_s: how long the server asks to be left alone.
        timed_out: a deadline was reached before there was an answer.
    """

    def __init__(
        self,
        reason: str,
        kind: Literal["again", "refused", "stop", "unread"] = "again",
        *,
        overloaded: bool = False,
        retry_after_s: float | None = None,
        timed_out: bool = False,
    ):
        super().__init__(reason)
        self.kind = kind
        self.overloaded = overloaded
        self.retry_after_s = retry_after_s
        self.timed_out = timed_out

    @property
    def error_kind(self) -> ErrorKind:
        """What a verdict says of the error."""
        return self.kind if self.kind in ("refused", "unread") else "server"


class ServerUnavailable(RuntimeError):
    """The server was given up; one sentence says why, what was answered, and that the run can be resumed."""


@dataclass(frozen=True)
class RetryPolicy:
    """When to call again, and when to stop.

    Args:
        max_calls: calls for one item, the first included.
        first_delay_s: wait after the first failure; it doubles with each further one.
        max_delay_s: longest such wait. A wait that the server asks for may be longer.
        call_timeout_s: deadline of one call, however slowly bytes trickle in.
        item_timeout_s: deadline of one item, from its first call.
        patience_s: the run stops when every call has failed for so long, waits that the server asked for left out;
            with them it stops after `item_timeout_s`.
        max_timeouts: calls of one item that may reach `call_timeout_s` while the server answers other calls.

    Raises:
        ValueError: a setting that is out of its range.
    """

    max_calls: int = 8
    first_delay_s: float = 1.0
    max_delay_s: float = 60.0
    call_timeout_s: float = 60.0
    item_timeout_s: float = 900.0
    patience_s: float = 180.0
    max_timeouts: int = 2

    def __post_init__(self) -> None:
        for name in ("max_calls", "max_timeouts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; an item needs at least 1 call")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} is {value}; give a number of seconds above 0")

    def delay_s(self, key: str, failures: int, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait after the given number of failures.

        Jitter keeps callers from coming back all at once. It is derived from the key and not drawn: half to all of
        the doubled wait, or the time that the server asked for and up to a tenth more.
        """
        number = hashlib.sha256(f"{key} {failures}".encode()).digest()[:8]
        share = int.from_bytes(number, "big") / 2**64
        if retry_after_s is not None:
            return retry_after_s * (1 + 0.1 * share) + 0.1 * self.first_delay_s * share
        # 2**1000 overflows nothing, and is far beyond any longest wait.
        doubled = self.first_delay_s * 2.0 ** min(failures - 1, 1000)
        return min(self.max_delay_s, doubled) * (0.5 + 0.5 * share)


class Pace:
    """How many calls may be in flight; outlives a run, so that the next one knows.

    Args:
        max_concurrency: calls at once, at most; the pace begins there.

    Raises:
        ValueError: fewer than one call at once.
    """

    def __init__(self, max_concurrency: int):
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency is {max_concurrency}; at least 1 call must be in flight")
        self.max_concurrency = max_concurrency
        self.limit = float(max_concurrency)
        self._slowed_at = -math.inf

    def speed_up(self) -> None:
        """Take note of an answer: one more call at once after as many answers as there are calls in flight."""
        self.limit = min(float(self.max_concurrency), self.limit + 1 / self.limit)

    def slow_down(self, started: float, now: float) -> None:
        """Halve the calls in flight, once for all the calls that were in flight together.

        Args:
            started: when the call began that found the server overloaded.
            now: on the same clock.
        """
        if started >= self._slowed_at:
            self.limit = max(1.0, self.limit / 2)
            self._slowed_at = now

    def recover(self) -> None:
        """Allow as many calls at once as in the beginning."""
        self.limit = float(self.max_concurrency)
