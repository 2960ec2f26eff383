"""Many calls against one server, with retries, pacing and deadlines.

A call is a coroutine that returns the answer for an index or raises `CallError`. `CallRun` decides between calls which
one begins next, which one is retried and when, and when to give the server up. Calls to one server share their waits
and their pace, and a control call finds out whether the server or a single question is at fault; retry libraries
treat each call by itself.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

# Why a question has no answer yet. server: the judge itself failed. refused: the server rejects this question or never
# finishes it, but answers others. unread: it replied, and the reply is not a verdict.
ErrorKind = Literal["server", "refused", "unread"]


class CallError(RuntimeError):
    """A call without an answer.

    Args:
        reason: why, without a secret.
        kind: "again": the next call may succeed; "refused": this question never will; "stop": no question will;
            "unread": there are replies, but no verdict.
        overloaded: the server asks for, or needs, fewer calls at once.
        retry_after_s: wait that the server asks for.
        timed_out: a deadline passed before there was an answer.
        may_be_paid: False if the server certainly bills nothing: it was not reached, or it rejected the call.
    """

    def __init__(
        self,
        reason: str,
        kind: Literal["again", "refused", "stop", "unread"] = "again",
        *,
        overloaded: bool = False,
        retry_after_s: float | None = None,
        timed_out: bool = False,
        may_be_paid: bool = True,
    ):
        super().__init__(reason)
        self.kind, self.overloaded = kind, overloaded
        self.retry_after_s, self.timed_out, self.may_be_paid = retry_after_s, timed_out, may_be_paid

    @property
    def error_kind(self) -> ErrorKind:
        """The kind that a verdict records."""
        return self.kind if self.kind in ("refused", "unread") else "server"


class EndOfCalls(RuntimeError):
    """Ends a CallRun: no further call begins, calls in flight end, and then the run raises this.

    Raised by its `done`, or by a `call` that has sent nothing. While other calls are in flight, such a call does not
    end the run; it is made again when one of them has ended.
    """


class ServerUnavailable(RuntimeError):
    """The server was given up; the message says why, how much was answered, and that the run can be resumed."""


@dataclass(frozen=True)
class RetryPolicy:
    """When to retry, and when to stop.

    Args:
        max_calls: calls for one item, the first included.
        first_delay_s: wait after the first failure; it doubles with each further one.
        max_delay_s: longest such wait. A wait that the server asks for may be longer.
        call_timeout_s: deadline of one call, from its start to the last byte of the answer.
        item_timeout_s: deadline of one item, from its first call.
        patience_s: the run stops when every call has failed for this long, not counting waits that the server asked
            for; counting them, it stops after `item_timeout_s`.
        max_timeouts: calls of one item that may reach `call_timeout_s` while the server answers other calls.

    Raises:
        ValueError: a setting out of its range.
    """

    max_calls: int = 8
    first_delay_s: float = 1.0
    max_delay_s: float = 60.0
    call_timeout_s: float = 60.0
    item_timeout_s: float = 900.0
    patience_s: float = 180.0
    max_timeouts: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.startswith("max_") and not name.endswith("_s") and value < 1:
                raise ValueError(f"{name} is {value}; an item needs at least 1 call")
            if name.endswith("_s") and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; give a number of seconds above 0")

    def delay_s(self, index: int, failures: int, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait after `failures` failures of an item: half to all of the doubled wait, or the
        time that the server asked for and up to a tenth more.

        The jitter keeps callers from retrying all at once. It is derived from the index, and so repeatable.
        """
        share = random.Random(f"{index} {failures}").random()
        if retry_after_s is not None:
            return retry_after_s * (1 + 0.1 * share) + 0.1 * self.first_delay_s * share
        # Limited, because 2.0**1024 overflows.
        doubled = self.first_delay_s * 2.0 ** min(failures - 1, 1000)
        return min(self.max_delay_s, doubled) * (0.5 + 0.5 * share)


class Pace:
    """How many calls may be in flight: at first `max_concurrency`, less when the server is overloaded, then raised
    slowly with its answers. It outlives a run, so that the next run begins at the pace of the last one.

    A cut halves the calls until the server answers at least half of those in flight; they then rise quickly (SEARCH
    for each answer) to the number that is too much. From there a cut is CUT, because the right number is near; close
    to it the pace rises PATIENCE times as slowly. While answers take QUEUED times as long as the fastest, it does not
    rise: they wait in a queue of the server.
    """

    CUT, PATIENCE, QUEUED, SEARCH = 0.85, 40, 3.0, 0.25

    def __init__(self, max_concurrency: int):
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency is {max_concurrency}; at least 1 call must be in flight")
        self.max_concurrency = max_concurrency
        self.limit = float(max_concurrency)
        self._slowed_at = -math.inf
        # The number of calls that was too much, and answers since it was.
        self._too_many: float | None = None
        self._answers = 0
        self._fastest_s, self._usual_s = math.inf, 0.0

    def speed_up(self, latency_s: float | None = None) -> None:
        """Count an answer, which took so long: as many answers as there are calls in flight allow one call more."""
        self._answers += 1
        if latency_s is not None:
            self._fastest_s = min(self._fastest_s, latency_s)
            self._usual_s += (latency_s - self._usual_s) * (0.1 if self._usual_s else 1.0)
            if self._usual_s > self.QUEUED * self._fastest_s:
                return
        too_many = self._too_many
        is_near = too_many is not None and abs(self.limit - too_many) <= max(1.0, 0.1 * too_many)
        step = self.SEARCH if too_many is None else 1 / self.limit / (self.PATIENCE if is_near else 1)
        self.limit = min(float(self.max_concurrency), self.limit + step)

    def slow_down(self, started: float, now: float) -> None:
        """Cut the calls in flight, once for all calls in flight together; the overloaded one began at `started`."""
        if started < self._slowed_at:
            return
        is_found = self._answers >= self.limit / 2
        self._too_many = self.limit if is_found else None
        self.limit = max(1.0, self.limit * (self.CUT if is_found else 0.5))
        self._slowed_at, self._answers = now, 0

    def recover(self) -> None:
        """Go back to the first pace."""
        self.limit, self._too_many = float(self.max_concurrency), None


T = TypeVar("T")


@dataclass(order=True)
class _Item:
    """An item and its failed calls, ordered by the time of its next call.

    Args:
        answers_before: how many calls the server had answered when the item last failed, or began.
        timeouts: calls that reached their deadline while the server answered others.
    """

    not_before: float
    index: int
    started: float
    answers_before: int
    failures: int = 0
    timeouts: int = 0


class CallRun(Generic[T]):
    """Calls for n items, each repeated until it is answered, rejected, or out of calls or time.

    An item that runs out of calls or hangs while others are answered ends with a "refused" error, like one that the
    server rejects. If there is no other call to compare with, the control call is made; the server is given up only
    after that fails too.

    When the server is given up, no further call begins, but calls in flight end, because their answers may be paid
    for. `done` is not called for the items left.

    Args:
        server: its name in messages, such as "judge server http://host/v1".
        policy: when to retry and when to stop.
        pace: how many calls at once; shared by the runs against one server.
        call: returns the answer for an index, or raises CallError.
        done: called once per item when it ends, with the answer or the last error.
        control: a call that the server is known to answer. None: every failure is the server's.
    """

    def __init__(
        self,
        server: str,
        policy: RetryPolicy,
        pace: Pace,
        call: Callable[[int], Awaitable[T]],
        done: Callable[[int, T | CallError], None],
        control: Callable[[], Awaitable[Any]] | None = None,
    ):
        self.server, self.policy, self.pace = server, policy, pace
        self.num_answered = 0
        self._call, self._done, self._control = call, done, control
        self._num_begun = self._num_answers = 0
        self._waiting: list[_Item] = []
        # Items that wait for the result of the control call, each with its last error.
        self._unclear: list[tuple[_Item, CallError]] = []
        self._not_before = self._held_s = 0.0
        self._failing_since: float | None = None
        self._given_up: str | None = None
        self._ended: EndOfCalls | None = None
        # Most calls in flight, since one had no room beside the others.
        self._room: float = math.inf

    async def answer_all(self, num_items: int) -> None:
        """Call for every index below `num_items`; raises ServerUnavailable when the server is given up."""
        in_flight: dict[asyncio.Task[T], tuple[_Item, float]] = {}
        try:
            while True:
                if self._unclear and self._given_up is None:
                    await self._ask_control()
                while len(in_flight) < self._limit and (item := self._next_item(num_items)):
                    call = within(self.policy.call_timeout_s, partial(self._call, item.index))
                    in_flight[asyncio.create_task(call)] = (item, _now())
                has_more = self._given_up is None and (self._waiting or self._num_begun < num_items)
                if not in_flight and not has_more:
                    break
                for task in await self._wait(in_flight, num_items):
                    try:
                        self._take(task, *in_flight.pop(task), num_others=len(in_flight))
                    except EndOfCalls as end:
                        self._ended = self._ended or end
                        self._give_up(str(end))
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)
        if self._ended is not None:
            raise self._ended
        if self._given_up is not None:
            raise ServerUnavailable(
                f"{self.server} {self._given_up}; {self.num_answered} of {num_items} were answered. Run the same"
                " command again to ask the missing ones"
            )

    @property
    def _limit(self) -> int:
        return int(min(self.pace.limit, self._room))

    def _next_item(self, num_items: int) -> _Item | None:
        now = _now()
        if self._given_up is not None or now < self._not_before:
            return None
        if self._waiting and self._waiting[0].not_before <= now:
            return heapq.heappop(self._waiting)
        if not self._begins_new(num_items):
            return None
        self._num_begun += 1
        return _Item(now, self._num_begun - 1, started=now, answers_before=self._num_answers)

    def _begins_new(self, num_items: int) -> bool:
        # A server in trouble gets no new questions while many old ones wait for a retry.
        return self._num_begun < num_items and len(self._waiting) < 4 * self.pace.max_concurrency

    async def _wait(self, in_flight: dict[asyncio.Task[T], Any], num_items: int) -> set[asyncio.Task[T]]:
        """Wait until a call ends or another may begin; return the calls that have ended."""
        may_begin = self._given_up is None and len(in_flight) < self._limit
        seconds = None
        if may_begin and (self._waiting or self._num_begun < num_items):
            next_one = 0.0 if self._begins_new(num_items) else self._waiting[0].not_before
            seconds = max(0.0, max(next_one, self._not_before) - _now())
        if not in_flight:
            await asyncio.sleep(seconds or 0.0)
            return set()
        return (await asyncio.wait(in_flight, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]

    async def _ask_control(self) -> None:
        """Find out whether the server answers at all, then decide about the unclear items."""
        unclear, self._unclear = self._unclear, []
        began = _now()
        try:
            await within(self.policy.call_timeout_s, self._control)
        except (CallError, EndOfCalls):
            pass
        else:
            self._note_answer()
            if _now() - began < self.policy.call_timeout_s / 4:
                # Calls that hang have lowered the pace, but the server is not overloaded.
                self.pace.recover()
        for item, error in unclear:
            self._decide(item, error, is_checked=True)

    def _note_answer(self) -> None:
        self._num_answers += 1
        self._failing_since = None

    def _take(self, task: asyncio.Task[T], item: _Item, began: float, num_others: int) -> None:
        try:
            answer = task.result()
        except EndOfCalls:
            if not num_others:
                raise
            self._room = num_others
            heapq.heappush(self._waiting, item)
            return
        except CallError as error:
            if error.overloaded:
                self.pace.slow_down(began, _now())
            if error.kind == "refused":
                # The server answers, so the item is at fault.
                self._note_answer()
                self._done(item.index, error)
            else:
                self._take_failure(item, error)
            return
        self._note_answer()
        self._held_s = 0.0
        self.num_answered += 1
        self.pace.speed_up(_now() - began)
        self._done(item.index, answer)

    def _take_failure(self, item: _Item, error: CallError) -> None:
        now, policy, wait_s = _now(), self.policy, error.retry_after_s
        item.failures += 1
        if self._failing_since is None:
            self._failing_since = now
        item.not_before = now + policy.delay_s(item.index, item.failures, wait_s)
        if error.kind == "stop":
            self._give_up(str(error))
        elif wait_s is not None and wait_s > policy.item_timeout_s:
            self._give_up(f"asks to be left alone for {wait_s:.0f} s ({error})")
        else:
            self._decide(item, error)
        if wait_s is not None and self._given_up is None:
            until = now + wait_s
            self._held_s += max(0.0, until - max(now, self._not_before))
            self._not_before = max(self._not_before, until)

    def _decide(self, item: _Item, error: CallError, is_checked: bool = False) -> None:
        """Retry an item, end it, or give the server up; `is_checked`: the control call was made after the error."""
        policy = self.policy
        failing_s = 0.0 if self._failing_since is None else _now() - self._failing_since
        is_out_of_patience = failing_s - self._held_s >= policy.patience_s or failing_s >= policy.item_timeout_s
        is_spent = item.failures >= policy.max_calls or item.not_before > item.started + policy.item_timeout_s
        # An overloaded server rejects some calls and answers others; that is no fault of the item.
        may_be_alone = self._control is not None and (error.timed_out or not error.overloaded)
        # Another call was answered since the item's last failure, or since it began.
        is_alone = may_be_alone and self._num_answers > item.answers_before
        is_unclear = is_out_of_patience or (may_be_alone and not is_alone and (is_spent or error.timed_out))
        if is_unclear and self._control is not None and not is_checked:
            self._unclear.append((item, error))
            return
        item.timeouts += is_alone and error.timed_out
        if is_out_of_patience:
            self._give_up(f"has answered no call for {failing_s:.0f} s (the last: {error})")
        elif is_alone and (is_spent or item.timeouts >= policy.max_timeouts):
            times = f"{item.failures} times, " if item.failures > 1 else ""
            self._done(item.index, CallError(f"{error} ({times}while other calls were answered)", "refused"))
        elif is_spent:
            self._done(item.index, error)
        else:
            item.answers_before = self._num_answers
            heapq.heappush(self._waiting, item)

    def _give_up(self, reason: str) -> None:
        self._given_up = self._given_up or reason


async def ask_patiently(call: Callable[[], Awaitable[T]], policy: RetryPolicy, max_calls: int = 3) -> T:
    """Return the answer of one call, retried a few times (for a check at startup), or raise the last CallError."""
    for failures in range(1, max_calls + 1):
        try:
            return await within(policy.call_timeout_s, call)
        except CallError as raised:
            error = raised
        wait_s = error.retry_after_s
        if failures == max_calls or error.kind != "again" or (wait_s or 0.0) > policy.patience_s:
            break
        await asyncio.sleep(policy.delay_s(0, failures, wait_s))
    raise error


async def within(seconds: float, call: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of a call; raises a CallError if there is none after so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await call()
    except TimeoutError as error:
        raise CallError(f"no answer within {seconds:g} s", overloaded=True, timed_out=True) from error


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from ordinary code and return its result; in a thread if a loop is running (a notebook's)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(asyncio.run(coroutine))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="onetrunk-calls", daemon=True).start()
    return result.result()


def _now() -> float:
    return asyncio.get_running_loop().time()
