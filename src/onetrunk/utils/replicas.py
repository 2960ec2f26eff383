"""Several servers of one model as one: they share the load, and one that is down costs nothing.

A call goes to the server with the fewest calls in flight for what it takes. If that fails, another server is tried at
once; only a call that fails on all of them fails. Each server has its own pace, its own waits that it asked for, and
after a failure a growing rest, at whose end it is asked whether it is up before it gets a question.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from onetrunk.utils.calls import CallError, Pace, RetryPolicy, within

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Longest wait for the answer whether a server is up, seconds.
PROBE_S = 10.0


@dataclass
class Replica:
    """One of the servers.

    Args:
        name: for messages.
        pace: how many calls it takes at once.
        in_flight: calls that it is answering.
        answered: calls that it has answered.
        failures: in a row.
        rests_until: time before which it gets no call, after a failure or because it asked for a wait.
        gone: why it gets no call any more; None: it may.
    """

    name: str
    pace: Pace
    in_flight: int = 0
    answered: int = 0
    failures: int = 0
    rests_until: float = -math.inf
    gone: str | None = None

    @property
    def load(self) -> float:
        """Calls in flight for each that it takes."""
        return self.in_flight / self.pace.limit


class Replicas:
    """The servers of one model, for the `pace` and the calls of a CallRun. They outlive a run.

    Args:
        names: of the servers.
        max_concurrency: most calls in flight to each.
        policy: deadlines of a call, and rests after failures.
        probe: asks the server of a number whether it is up; raises CallError if not.
    """

    def __init__(
        self,
        names: Sequence[str],
        max_concurrency: int,
        policy: RetryPolicy,
        probe: Callable[[int], Awaitable[Any]],
    ):
        self.members = [Replica(name, Pace(max_concurrency)) for name in names]
        self.policy, self.probe = policy, probe
        self.max_concurrency = max_concurrency * len(names)

    # --- the pace of a CallRun ---------------------------------------------------------------------------------------

    @property
    def limit(self) -> float:
        """How many calls may be in flight to all servers that are up; at least 1."""
        return float(max(1, sum(int(member.pace.limit) for member in self._usable(_now()))))

    def speed_up(self, latency_s: float | None = None) -> None:
        """Do nothing: `call` counts each answer for its server."""

    def slow_down(self, started: float, now: float) -> None:
        """Do nothing: `call` slows down the server that asked for it."""

    def recover(self) -> None:
        """Go back to the first pace on every server."""
        for member in self.members:
            member.pace.recover()

    # --- calls -------------------------------------------------------------------------------------------------------

    async def call(self, work: Callable[[int], Awaitable[T]]) -> T:
        """Return the answer of the first server that gives one; `work` calls the server of a number.

        Raises:
            CallError: the question was rejected, or no server answered; of the last server tried. If they ask for
                waits, the shortest of them.
        """
        tried: set[int] = set()
        while True:
            number = self._pick(tried)
            member = self.members[number]
            tried.add(number)
            member.in_flight += 1
            began = _now()
            try:
                if member.failures:
                    await within(min(PROBE_S, self.policy.call_timeout_s), partial(self.probe, number))
                answer = await within(self.policy.call_timeout_s, partial(work, number))
            except CallError as error:
                if error.kind in ("refused", "unread"):
                    member.failures = 0
                    raise
                self._rest(number, error, began)
                if not self._others(tried):
                    raise self._last(error) from error
            else:
                member.failures, member.answered = 0, member.answered + 1
                member.pace.speed_up(_now() - began)
                return answer
            finally:
                member.in_flight -= 1

    def _pick(self, tried: set[int]) -> int:
        """Return the number of the server with the least load; of those that rest, the one that is up first."""
        now = _now()
        left = [n for n, member in enumerate(self.members) if member.gone is None and n not in tried]
        if not left:
            # A call begins only while a server is left; all are gone since.
            raise CallError("; ".join(sorted({str(member.gone) for member in self.members})), "stop")
        usable = [n for n in left if self.members[n].rests_until <= now]
        if not usable:
            return min(left, key=lambda n: self.members[n].rests_until)
        return min(usable, key=lambda n: (self.members[n].load, self.members[n].answered, n))

    def _usable(self, now: float) -> list[Replica]:
        return [member for member in self.members if member.gone is None and member.rests_until <= now]

    def _others(self, tried: set[int]) -> bool:
        now = _now()
        others = [member for n, member in enumerate(self.members) if n not in tried and member.gone is None]
        return any(member.rests_until <= now for member in others)

    def _rest(self, number: int, error: CallError, began: float) -> None:
        """Note the failure of a call: the server rests, or gets no call any more."""
        member, now = self.members[number], _now()
        if error.kind == "stop":
            member.gone = str(error)
            if any(other.gone is None for other in self.members):
                logger.warning("%s is left out: %s; the others take its calls", member.name, error)
            return
        if error.overloaded and not error.timed_out:
            member.pace.slow_down(began, now)
        if error.retry_after_s is not None:
            member.rests_until = max(member.rests_until, now + error.retry_after_s)
        elif not error.overloaded or error.timed_out:
            if not member.failures:
                logger.warning("%s does not answer (%s); the others take its calls until it does", member.name, error)
            member.failures += 1
            member.rests_until = now + self.policy.delay_s(number, member.failures)

    def _last(self, error: CallError) -> CallError:
        """Return the error of a call that no server has answered."""
        alive = [member for member in self.members if member.gone is None]
        if not alive:
            return CallError(str(error), "stop")
        if error.kind != "stop" and error.retry_after_s is None:
            return error
        wait_s = min(member.rests_until for member in alive) - _now()
        return CallError(
            str(error),
            overloaded=error.overloaded,
            retry_after_s=max(0.0, wait_s) if error.retry_after_s is not None else None,
            timed_out=error.timed_out,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
