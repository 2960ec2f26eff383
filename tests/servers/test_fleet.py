"""Calls to servers that share the load: what is repeated, what is given up, and when; in simulated time."""

import asyncio
import contextlib
import os
import selectors

import pytest

from onetrunk.servers.errors import CallError, EndOfCalls, ServerUnavailable
from onetrunk.servers.fleet import Fleet, RetryPolicy, run_async

POLICY = RetryPolicy(max_calls=4, first_delay_s=1.0, max_delay_s=8.0, call_timeout_s=60.0, patience_s=100.0)


class _JumpingSelector(selectors.SelectSelector):
    """A selector that adds the time it should wait to a clock."""

    now = 0.0

    def select(self, timeout=None):
        if timeout:
            self.now += timeout
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves on at once, from 0 seconds on: hours of waits take milliseconds."""

    def __init__(self):
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self):
        return self._jumping.now


class FakeServer:
    """A server whose calls are `answer(index)`, a coroutine; it counts the calls in flight."""

    def __init__(self, answer, name="server"):
        self.answer, self.name, self.asked, self.open, self.most_open = answer, name, [], 0, 0

    def __str__(self):
        return self.name

    @contextlib.asynccontextmanager
    async def connect(self, max_connections):
        yield self

    @property
    def server(self):
        return self

    async def ask(self, index):
        self.asked.append(index)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self.answer(index)
        finally:
            self.open -= 1


def answers_in(seconds=1.0):
    async def answer(index):
        await asyncio.sleep(seconds)
        return index

    return answer


def fails(*errors):
    """Fail with each error in turn, and then answer."""
    left = list(errors)

    async def answer(index):
        if left:
            raise left.pop(0)
        return await answers_in()(index)

    return answer


async def down(index):
    raise CallError("the connection failed", is_unreachable=True, may_be_paid=False)


def ask_all(num_items, *servers, policy=POLICY, concurrency=4, done=lambda index, outcome: None):
    """Return the outcomes by index, the error that ended the run, and the simulated seconds."""
    told = {}

    def keep(index, outcome):
        assert index not in told
        told[index] = outcome
        done(index, outcome)

    async def work():
        async with Fleet(servers, policy, concurrency) as fleet:
            try:
                await fleet.answer_all(num_items, lambda to, index: to.ask(index), keep)
            except (EndOfCalls, ServerUnavailable) as end:
                return end

    with contextlib.closing(SimulatedLoop()) as loop:
        end = loop.run_until_complete(work())
        return told, end, loop.time()


def test_every_item_is_answered_once_with_at_most_so_many_calls_in_flight():
    server = FakeServer(answers_in())
    told, end, seconds = ask_all(10, server)
    assert told == {i: i for i in range(10)} and end is None and server.most_open == 4 and seconds == 3.0


def test_a_failed_call_is_made_again_with_growing_waits():
    server = FakeServer(fails(*[CallError("not yet")] * 3))
    told, _, seconds = ask_all(1, server)
    # Half to all of 1, 2 and 4 seconds, and one for the answer.
    assert told == {0: 0} and len(server.asked) == 4 and 4.5 <= seconds <= 8.0


def test_a_wait_that_the_server_asks_for_holds_for_every_call():
    server = FakeServer(fails(CallError("slow down", retry_after_s=30.0)))
    told, _, seconds = ask_all(8, server)
    # Three calls were in flight with the first; the others wait.
    assert len(told) == 8 and 31.0 <= seconds <= 34.0


def test_a_longer_wait_than_the_patience_ends_the_run_at_once():
    told, end, seconds = ask_all(3, FakeServer(fails(CallError("quota", retry_after_s=86400.0))), concurrency=1)
    assert not told and seconds == 0 and "server: it asks to wait 86400 s (Retry-After; quota)" in str(end)
    assert "0 of 3 calls were answered. Run the same command again" in str(end)


def test_a_server_that_answers_nothing_is_given_up_after_the_patience():
    policy = RetryPolicy(max_calls=1000, first_delay_s=1.0, max_delay_s=8.0, patience_s=100.0)
    told, end, seconds = ask_all(20, FakeServer(down), policy=policy)
    assert not told and isinstance(end, ServerUnavailable) and 100 <= seconds < 110
    assert "no call was answered for 1" in str(end) and "(the last: the connection failed)" in str(end)


def test_a_key_that_is_rejected_ends_the_run_and_calls_in_flight_end_well():
    async def answer(index):
        await asyncio.sleep(5.0)
        if index == 1:
            raise CallError("HTTP 401", "stop")
        return index

    told, end, _ = ask_all(20, FakeServer(answer))
    assert {0, 2, 3} <= told.keys() <= {0, 2, 3, 4, 5, 6} and "HTTP 401" in str(end)


@pytest.mark.parametrize(("hangs_s", "calls"), [(2.0, 4), (3600.0, 2)], ids=["500", "hangs"])
def test_a_question_that_the_server_never_answers_is_refused_and_the_others_are_answered(hangs_s, calls):
    async def answer(index):
        if index == 0:
            await asyncio.sleep(hangs_s)
            raise CallError("HTTP 500")
        return await answers_in()(index)

    server = FakeServer(answer)
    told, end, _ = ask_all(20, server)
    assert end is None and all(told[i] == i for i in range(1, 20)) and server.asked.count(0) == calls
    assert told[0].kind == "refused" and f"({calls} times, while other calls were answered)" in str(told[0])


def test_a_question_that_fails_alone_is_the_servers_fault_and_a_refused_one_is_not_repeated():
    told, _, _ = ask_all(1, FakeServer(fails(*[CallError("HTTP 500")] * 4)))
    assert (told[0].kind, told[0].error_kind) == ("again", "server")
    server = FakeServer(fails(CallError("too long", "refused")))
    told, _, _ = ask_all(1, server)
    assert told[0].error_kind == "refused" and server.asked == [0]


def test_servers_share_the_load_and_one_that_is_down_loses_nothing(caplog):
    one, other = FakeServer(answers_in(), "one"), FakeServer(answers_in(), "other")
    told, _, seconds = ask_all(80, one, other)
    assert len(told) == 80 and seconds == 10.0 and len(one.asked) == len(other.asked) == 40
    one.answer, one.asked = down, []
    told, end, seconds = ask_all(80, one, other)
    assert told == {i: i for i in range(80)} and end is None
    # It is asked again after growing rests, and each call that it fails is answered by the other.
    assert 4 <= len(one.asked) <= 40 and "one fails (the connection failed); the others take its calls" in caplog.text
    assert other.most_open == 4  # The calls of the other wait their turn, outside their deadline.


@pytest.mark.parametrize("failure", [{"status": 500}, {"status": 429}, {"retry_after_s": 86400.0}], ids=str)
def test_one_of_several_servers_that_fails_at_once_does_not_attract_the_calls(failure):
    async def answer(index):
        raise CallError("not now", **failure)

    bad, good = FakeServer(answer), FakeServer(answers_in())
    told, end, _ = ask_all(200, bad, good)
    assert told == {i: i for i in range(200)} and end is None and len(bad.asked) <= 40


def test_servers_that_are_all_unreachable_for_less_than_the_patience_lose_no_question():
    async def restarts(index):
        return await (down(index) if asyncio.get_running_loop().time() < 50.0 else answers_in()(index))

    told, end, _ = ask_all(20, FakeServer(restarts), FakeServer(restarts))
    assert told == {i: i for i in range(20)} and end is None


class Budget:
    """Room for so many calls at once, and in all."""

    def __init__(self, at_once, total):
        self.at_once, self.left = at_once, total

    async def answer(self, index):
        if not self.left or not self.at_once:
            raise EndOfCalls("no room")
        self.at_once, self.left = self.at_once - 1, self.left - 1
        try:
            return await answers_in()(index)
        finally:
            self.at_once += 1


def test_a_call_without_room_in_the_budget_waits_for_the_others_and_ends_the_run_if_there_are_none():
    told, end, seconds = ask_all(10, FakeServer(Budget(2, 100).answer))
    assert len(told) == 10 and end is None and seconds == 5.0
    told, end, _ = ask_all(10, FakeServer(Budget(2, 5).answer))
    assert len(told) == 5 and str(end) == "no room"
    rejects = FakeServer(fails(*[CallError("HTTP 401", "stop")] * 8))
    told, end, _ = ask_all(10, FakeServer(Budget(4, 5).answer), rejects)
    assert len(told) == 5 and str(end) == "no room"


def test_a_coroutine_runs_inside_a_running_loop_too_and_poll_can_end_it():
    async def pid():
        return os.getpid()

    async def notebook():
        return run_async(pid())

    assert run_async(notebook()) == os.getpid()

    def poll():
        raise InterruptedError("stop")

    with pytest.raises(InterruptedError):
        run_async(asyncio.sleep(3600), poll)
