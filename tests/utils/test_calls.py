"""Waits, pace and deadlines of calls, on an event loop without any network."""

import asyncio
import time
from dataclasses import replace

import pytest

from onetrunk.utils.calls import (
    CallError,
    CallRun,
    EndOfCalls,
    Pace,
    RetryPolicy,
    ServerUnavailable,
    ask_patiently,
    run_async,
)

QUICK = RetryPolicy(
    max_calls=4,
    first_delay_s=0.002,
    max_delay_s=0.01,
    # No busy machine reaches these; the tests of each set their own.
    call_timeout_s=120.0,
    item_timeout_s=240.0,
    patience_s=240.0,
)


def answers(call, num_items, policy=QUICK, pace=None, control=None):
    """Return what `done` was told, as index -> [outcomes], and the error that ended the run."""
    told = {}

    def done(index, outcome):
        told.setdefault(index, []).append(outcome)

    run = CallRun("server x", policy, pace or Pace(4), call, done, control=control)
    try:
        run_async(run.answer_all(num_items))
    except ServerUnavailable as error:
        return told, error
    return told, None


def test_waits_double_up_to_the_longest_with_jitter_that_is_derived():
    policy = RetryPolicy(first_delay_s=1.0, max_delay_s=60.0)
    for failures, longest in [(1, 1.0), (2, 2.0), (5, 16.0), (7, 60.0), (5000, 60.0)]:
        waits = [policy.delay_s(i, failures) for i in range(50)]
        assert longest / 2 <= min(waits) < max(waits) < longest
    assert policy.delay_s(1, 3) == policy.delay_s(1, 3) != policy.delay_s(2, 3)


def test_a_wait_that_the_server_asks_for_is_never_cut_short():
    policy = RetryPolicy(max_delay_s=5.0)
    assert all(120.0 <= policy.delay_s(i, 1, 120.0) <= 132.2 for i in range(20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_calls": 0}, "at least 1 call"),
        ({"call_timeout_s": 0.0}, "call_timeout_s is 0.0"),
        ({"patience_s": float("nan")}, "patience_s is nan"),
        ({"max_timeouts": 0}, "at least 1 call"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RetryPolicy(**settings)


def test_every_item_is_told_once_whatever_fails_in_between():
    calls = {}

    async def call(index):
        calls[index] = calls.get(index, 0) + 1
        await asyncio.sleep(0)
        if calls[index] <= index % 4:
            raise CallError("not yet")
        return index * 10

    told, error = answers(call, 40)
    assert error is None
    assert told == {i: [i * 10] for i in range(40)}
    assert calls == {i: i % 4 + 1 for i in range(40)}


def test_an_item_that_is_refused_is_not_asked_again_and_one_without_luck_so_often():
    calls = []

    async def call(index):
        calls.append(index)
        raise CallError("too long", "refused" if index == 0 else "again")

    told, error = answers(call, 2)
    assert error is None and calls.count(0) == 1 and calls.count(1) == QUICK.max_calls
    assert [str(told[i][0]) for i in (0, 1)] == ["too long", "too long"]


def test_no_more_calls_at_once_than_allowed_and_overload_halves_them():
    pace, open_calls, most = Pace(8), 0, []

    async def call(index):
        nonlocal open_calls
        open_calls += 1
        most.append((index, open_calls))
        await asyncio.sleep(0.002)
        open_calls -= 1
        if 8 <= index < 16 and not any(i == index for i, _ in most[:-1]):
            raise CallError("slow down", overloaded=True)
        return index

    told, error = answers(call, 64, pace=pace)
    assert error is None and len(told) == 64
    assert max(n for _, n in most) == 8
    # Eight calls that fail together count once, and answers bring the pace up again, step by step.
    pace = Pace(8)
    for _ in range(8):
        pace.slow_down(started=1.0, now=2.0)
    assert pace.limit == 4.0
    pace.slow_down(started=3.0, now=4.0)
    assert pace.limit == 2.0
    for _ in range(200):
        pace.slow_down(started=5.0, now=5.0)
    assert pace.limit == 1.0
    for _ in range(200):
        pace.speed_up()
    assert pace.limit == 8.0


def test_nothing_is_asked_while_the_server_wants_to_be_left_alone():
    began, start = [], time.monotonic()

    async def call(index):
        began.append(time.monotonic() - start)
        if len(began) == 1:
            raise CallError("wait", overloaded=True, retry_after_s=0.2)
        return index

    told, error = answers(call, 6, pace=Pace(1))
    assert error is None and len(told) == 6
    assert all(moment >= 0.2 for moment in began[1:])


def test_a_call_that_hangs_ends_at_its_deadline():
    async def call(index):
        if index == 0:
            await asyncio.sleep(3600)
        return index

    policy = RetryPolicy(max_calls=2, first_delay_s=0.01, call_timeout_s=0.5)
    start = time.monotonic()
    told, error = answers(call, 3, policy)
    assert error is None and told[1] == [1] and told[2] == [2]
    assert "no answer within 0.5 s" in str(told[0][0]) and time.monotonic() - start < 60


def test_an_item_has_a_deadline_over_all_its_calls():
    async def call(index):
        await asyncio.sleep(0.03)
        raise CallError("never")

    policy = RetryPolicy(max_calls=1000, first_delay_s=0.01, max_delay_s=0.02, item_timeout_s=0.2)
    start = time.monotonic()
    told, error = answers(call, 1, policy)
    assert error is None and str(told[0][0]) == "never" and time.monotonic() - start < 15


def test_a_server_that_answers_nothing_is_given_up_in_time_with_one_error_message():
    async def call(index):
        raise CallError("HTTP 500: broken")

    policy = RetryPolicy(max_calls=1000, first_delay_s=0.01, max_delay_s=0.02, patience_s=0.3)
    start = time.monotonic()
    told, error = answers(call, 1000, policy)
    assert told == {} and time.monotonic() - start < 60
    assert "server x has answered no call for" in str(error) and "HTTP 500: broken" in str(error)
    assert "0 of 1000 were answered" in str(error) and "\n" not in str(error)


def kinds(told):
    return {i: outcomes[0].kind for i, outcomes in told.items() if isinstance(outcomes[0], CallError)}


def test_items_that_fail_while_others_are_answered_are_at_fault_and_stop_no_run():
    async def call(index):
        if index < 60:
            raise CallError("HTTP 500: broken")
        return index

    async def control():
        return "here"

    told, error = answers(call, 100, replace(QUICK, patience_s=0.001), control=control)
    assert error is None and kinds(told) == dict.fromkeys(range(60), "refused")
    assert str(told[0][0]) == "HTTP 500: broken (4 times, while other calls were answered)"
    assert all(told[i] == [i] for i in range(60, 100))


def test_an_item_that_hangs_is_left_after_a_few_deadlines_and_holds_up_nobody_for_ever():
    calls, controls = [], []

    async def call(index):
        calls.append(index)
        await asyncio.sleep(0 if index >= 6 else 3600)
        return index

    async def control():
        controls.append(len(calls))

    policy = replace(QUICK, call_timeout_s=0.5, patience_s=0.01, max_calls=8)
    told, error = answers(call, 20, policy, Pace(4), control=control)
    assert error is None and kinds(told) == dict.fromkeys(range(6), "refused") and controls
    assert [calls.count(i) for i in range(6)] == [policy.max_timeouts] * 6
    assert "no answer within 0.5 s (2 times, while other calls were answered)" in str(told[0][0])


def test_a_server_that_fails_the_control_call_too_is_given_up():
    controls = []

    async def call(index):
        await asyncio.sleep(3600)

    async def control():
        controls.append(1)
        raise CallError("HTTP 500: broken")

    told, error = answers(call, 20, replace(QUICK, call_timeout_s=0.05, patience_s=0.2), control=control)
    assert told == {} and "has answered no call for" in str(error) and controls


def test_items_that_fail_with_the_control_call_are_failures_of_the_server():
    async def call(index):
        raise CallError("HTTP 500: broken")

    told, error = answers(call, 3, control=lambda: call(0))
    assert error is None and kinds(told) == dict.fromkeys(range(3), "again")
    # Without a control call nothing says that an item is at fault.
    assert answers(call, 3)[0].keys() == told.keys()


def test_an_answer_before_the_server_went_down_does_not_make_it_the_items_fault():
    calls = []

    async def call(index):
        calls.append(index)
        if index > 0:
            raise CallError("the connection failed")
        return index

    async def control():
        raise CallError("the connection failed")

    told, error = answers(call, 3, replace(QUICK, max_calls=5), Pace(1), control=control)
    assert error is None and kinds(told) == {1: "again", 2: "again"}


def test_items_that_are_refused_stop_no_run():
    async def call(index):
        if index % 3 == 0:
            raise CallError("too long", "refused")
        return index

    told, error = answers(call, 300)
    assert error is None and len(told) == 300


def test_what_holds_for_every_question_stops_at_once():
    asked = []

    async def call(index):
        asked.append(index)
        raise CallError("HTTP 401: no such key", "stop")

    _, error = answers(call, 100)
    assert len(asked) <= 4 and "HTTP 401: no such key" in str(error)


def test_a_server_that_wants_a_day_off_ends_the_run():
    async def call(index):
        raise CallError("HTTP 429: quota", overloaded=True, retry_after_s=86400.0)

    _, error = answers(call, 10)
    assert "asks to be left alone for 86400 s" in str(error)


def test_waits_that_the_server_asks_for_do_not_use_up_patience():
    calls = 0

    async def call(index):
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise CallError("wait", overloaded=True, retry_after_s=0.7)
        return index

    # Together the waits are longer; what else happens between the calls has all of it.
    policy = RetryPolicy(first_delay_s=0.01, patience_s=2.0)
    told, error = answers(call, 1, policy)
    assert error is None and told == {0: [0]}


def test_an_error_of_the_caller_ends_the_run_and_leaves_no_call_behind():
    ended = []

    async def call(index):
        try:
            await asyncio.sleep(60 if index else 0)
        finally:
            ended.append(index)
        return index

    def done(index, outcome):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        run_async(CallRun("server x", QUICK, Pace(3), call, done).answer_all(3))
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("left", [7, 100])
def test_a_call_without_room_waits_for_those_in_flight_and_ends_the_run_only_if_there_are_none(left):
    in_flight, sent, most = 0, [], 3

    async def call(index):
        nonlocal in_flight
        if in_flight == most or len(sent) == left:
            raise EndOfCalls("no room")
        in_flight += 1
        sent.append(index)
        await asyncio.sleep(0.001)
        in_flight -= 1
        return index

    told = {}
    run = CallRun("server x", QUICK, Pace(8), call, told.__setitem__)
    if left == 100:
        run_async(run.answer_all(20))
    else:
        with pytest.raises(EndOfCalls, match="no room"):
            run_async(run.answer_all(20))
    # Nothing was sent twice, and every answer was taken.
    assert sorted(sent) == sorted(told) and len(sent) == min(left, 20)


def test_it_works_inside_a_running_loop_as_in_a_notebook():
    async def call(index):
        return index

    async def notebook():
        return answers(call, 5)

    told, error = asyncio.run(notebook())
    assert error is None and len(told) == 5


def test_a_check_asks_a_few_times_and_not_for_ever():
    calls = []

    async def call():
        calls.append(1)
        if len(calls) < 3:
            raise CallError("HTTP 503: loading", overloaded=True)
        return "ready"

    assert run_async(ask_patiently(call, QUICK)) == "ready"

    async def never():
        calls.append(1)
        raise CallError("no", "stop")

    calls.clear()
    with pytest.raises(CallError, match="no"):
        run_async(ask_patiently(never, QUICK))
    assert len(calls) == 1
