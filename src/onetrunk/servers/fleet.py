"""Many calls to servers of one model: they share the load, failed calls are retried, a server that is down rests.

A call goes to the server that is well and has the fewest calls in flight. `Fleet` lives for one run of calls, so a
server that was left out gets calls again in the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from onetrunk.servers.errors import OVERLOADED, CallError, EndOfCalls, ServerUnavailable

if TYPE_CHECKING:  # Checks of users run by `run_async` too, and need no HTTP.
    from onetrunk.servers.client import Connection, Server

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Called with the index of an item, and its answer or last error.
Done = Callable[[int, Any], None]
# Not the global generator, whose state belongs to the run.
_jitter = random.Random()


@dataclass(frozen=True)
class RetryPolicy:
    """When to repeat a call, and when to stop.

    Args:
        max_calls: calls for one question, the first included.
        first_delay_s: wait after the first failure; it doubles with each further one.
        max_delay_s: longest such wait. A wait that the server asks for may be longer.
        call_timeout_s: deadline of one call, from its start to the last byte of the answer.
        patience_s: the servers are given up when every call has failed for this long. Waits that they ask for do not
            count; a server that asks for a longer one gets no more calls.
        max_timeouts: calls of one question that may reach `call_timeout_s`.
    """

    max_calls: int = 8
    first_delay_s: float = 1.0
    max_delay_s: float = 60.0
    call_timeout_s: float = 60.0
    patience_s: float = 180.0
    max_timeouts: int = 2

    def delay_s(self, failures: int) -> float:
        """Return the seconds to wait after this many failures: half to all of the doubled wait."""
        doubled = self.first_delay_s * 2.0 ** min(failures - 1, 60)
        return min(self.max_delay_s, doubled) * _jitter.uniform(0.5, 1.0)


@dataclass(eq=False)
class _Member:
    """A server of a fleet; `failures` in a row, and why it gets no more calls, if so."""

    connection: Connection
    in_flight: int = 0
    failures: int = 0
    rests_until: float = -math.inf
    gone: str | None = None


class Fleet:
    """The servers of one model for one run of calls: `async with Fleet(...) as fleet`.

    Args:
        max_concurrency: most calls in flight to each.
    """

    def __init__(self, servers: Sequence[Server], policy: RetryPolicy, max_concurrency: int = 1):
        self.servers, self.policy, self.max_concurrency = list(servers), policy, max_concurrency
        self._members: list[_Member] = []
        self._num_answers = self._num_active = 0
        self._failing_since: float | None = None
        self._is_ended = False

    def __str__(self) -> str:
        return ", ".join(map(str, self.servers))

    async def __aenter__(self) -> Fleet:
        self._stack, self._call_ended = contextlib.AsyncExitStack(), asyncio.Event()
        for server in self.servers:
            connection = await self._stack.enter_async_context(server.connect(self.max_concurrency))
            self._members.append(_Member(connection))
        return self

    async def __aexit__(self, *_error: Any) -> None:
        await self._stack.aclose()

    async def call(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Return what `work` returns for one of the servers; a call that fails is retried, there or on another.

        Raises:
            CallError: "refused" if the server rejects this question or never answers it but answers others; "stop" if
                the servers are given up.
        """
        failures = timeouts = 0
        answers_before, failed_at = self._num_answers, set()
        while True:
            member = await self._free_member(failed_at)
            member.in_flight += 1
            try:
                answer = await within(self.policy.call_timeout_s, work(member.connection))
            except CallError as error:
                failed = error
                failed.server = str(member.connection.server)
            else:
                self._note_answer(member)
                return answer
            finally:
                member.in_flight -= 1
            self._note_end_of_call()
            if failed.kind in ("refused", "unread"):
                self._note_answer(member)
                raise failed
            self._note_failure(member, failed)
            failed_at.add(member)
            if failed.kind == "stop":
                continue  # The other servers may answer it.
            # Where another server may be up, one that is down is not the fault of the question.
            failures += not (failed.is_unreachable and len(self._members) > 1)
            timeouts += failed.timed_out
            if failures >= self.policy.max_calls or timeouts >= self.policy.max_timeouts:
                raise self._last(failed, failures, answers_before)
            if member.rests_until <= _now():
                await asyncio.sleep(self.policy.delay_s(failures))

    async def answer_all(self, num_items: int, work: Callable[[Connection, int], Awaitable[Any]], done: Done) -> None:
        """Call `work` for every index below `num_items`, and `done` once with each answer or CallError.

        When the servers are given up, no further call begins, but calls in flight end, because their answers may be
        paid for. `done` is not called for the items left.

        Raises:
            ServerUnavailable: the servers were given up.
            EndOfCalls: raised by `done`, or by a call while no other was in flight.
        """
        remaining, ends, num_answered = iter(range(num_items)), [], 0

        async def ask_next() -> None:
            nonlocal num_answered
            for index in remaining:
                try:
                    outcome = await self._outcome(lambda to, index=index: work(to, index))
                    if isinstance(outcome, CallError) and outcome.kind == "stop":
                        raise ServerUnavailable(
                            f"{self}: {outcome}; {num_answered} of {num_items} calls were answered. Run the same"
                            " command again, a training with --resume auto, for the others"
                        )
                    num_answered += not isinstance(outcome, CallError)
                    done(index, outcome)
                except (EndOfCalls, ServerUnavailable) as end:
                    ends.append(end)
                    self._is_ended = True
                    self._note_end_of_call()
                    return

        await gathered(ask_next() for _ in range(min(num_items, self.max_concurrency * len(self.servers))))
        if ends:
            raise ends[0]

    async def _outcome(self, work: Callable[[Connection], Awaitable[T]]) -> T | CallError:
        """Return what `call` returns or raises; if the budget has no room for it, wait until another one has ended."""
        while not self._is_ended:
            call_ended = self._call_ended
            self._num_active += 1
            try:
                outcome = await self.call(work)
            except CallError as error:
                outcome = error
            except EndOfCalls:
                if self._is_ended or self._num_active == 1:
                    raise
                outcome = None
            finally:
                self._num_active -= 1
            if outcome is not None:
                self._note_end_of_call()
                return outcome
            await call_ended.wait()
        raise EndOfCalls("the run has ended")

    def _note_end_of_call(self) -> None:
        self._call_ended.set()
        self._call_ended = asyncio.Event()

    async def _free_member(self, failed_at: set[_Member]) -> _Member:
        """Return the server to call next, when it may be called: one that has not failed this question, if any."""
        while True:
            if self._is_ended:
                raise EndOfCalls("the run has ended")
            alive = [member for member in self._members if member.gone is None]
            if not alive:
                raise CallError("; ".join(sorted({str(member.gone) for member in self._members})), "stop")
            now, call_ended = _now(), self._call_ended
            others = [one for one in alive if one not in failed_at] or alive
            ready = [one for one in others if one.rests_until <= now and one.in_flight < self.max_concurrency]
            if ready:
                return min(ready, key=lambda one: one.in_flight)
            rests = [one.rests_until - now for one in others if one.rests_until > now]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(call_ended.wait(), min(rests, default=None))

    def _note_answer(self, member: _Member) -> None:
        self._num_answers += 1
        self._failing_since, member.failures = None, 0

    def _note_failure(self, member: _Member, error: CallError) -> None:
        """Let the server rest, or leave it out; raises the error as "stop" when the servers are given up."""
        now, policy = _now(), self.policy
        member.failures += 1
        if member.failures == 1 and len(self._members) > 1:
            logger.warning("%s fails (%s); the others take its calls", member.connection.server, error)
        if (error.retry_after_s or 0.0) > policy.patience_s:
            error = CallError(f"it asks to wait {error.retry_after_s:.0f} s (Retry-After; {error})", "stop")
        if error.kind == "stop":
            member.gone = str(error)
            if all(one.gone is not None for one in self._members):
                raise error
            return
        since = now if self._failing_since is None else self._failing_since
        if error.retry_after_s is not None:
            member.rests_until = max(member.rests_until, now + error.retry_after_s)
            since = max(since, member.rests_until)
        elif error.is_unreachable or len(self._members) > 1:
            member.rests_until = now + policy.delay_s(member.failures)
        self._failing_since = since
        if now - since >= policy.patience_s:
            raise CallError(f"no call was answered for {now - since:.0f} s (the last: {error})", "stop")

    def _last(self, error: CallError, failures: int, answers_before: int) -> CallError:
        """Return the error of a question that is out of calls."""
        if self._num_answers == answers_before or error.status in OVERLOADED:
            return error
        # The server answers others, so the question is at fault.
        times = f"{failures} times, " if failures > 1 else ""
        refused = CallError(f"{error} ({times}while other calls were answered)", "refused", timed_out=error.timed_out)
        refused.server = error.server
        return refused


async def within(seconds: float, call: Awaitable[T]) -> T:
    """Return the answer of a call; raises a CallError if it takes more than this many seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError as error:
        raise CallError(f"no answer within {seconds:g} s", timed_out=True) from error


async def gathered(calls: Any) -> list[Any]:
    """Await all calls and return their results; when one raises an error, end the others and raise it."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_async(coroutine: Coroutine[Any, Any, T], poll: Callable[[], None] | None = None) -> T:
    """Run a coroutine from ordinary code and return its result; in a thread if a loop is running (a notebook's).

    `poll` is called twice a second meanwhile; it may raise to give the work up.
    """
    work = coroutine if poll is None else _polled(coroutine, poll)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "onetrunk-calls") as pool:
        return pool.submit(asyncio.run, work).result()


async def _polled(work: Awaitable[T], poll: Callable[[], None]) -> T:
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=0.5))[0]:
            poll()
        return task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _now() -> float:
    return asyncio.get_running_loop().time()
