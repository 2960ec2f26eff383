"""Servers of one model in simulated time: load, a dead one, waits, and how close the pace comes to the best one."""

import asyncio
import random
import statistics

import pytest

from onetrunk.stages.prefs.stage import GIVEN_CHUNK
from onetrunk.utils.calls import CallError, CallRun, Pace, RetryPolicy
from onetrunk.utils.replicas import Replicas
from tests.simulated import Slots, simulate

POLICY = RetryPolicy(max_calls=1000, item_timeout_s=36000.0, patience_s=600.0)


async def run(servers, number, concurrency, during=None):
    """Call servers `number` times; return what was answered, and the replicas."""

    async def probe(n):
        if servers[n].is_down:
            raise CallError("the connection failed")

    replicas = Replicas([f"server {n}" for n in range(len(servers))], concurrency, POLICY, probe)
    told = {}

    async def call(index):
        return await replicas.call(lambda n: servers[n].call(index))

    def done(index, answer):
        told[index] = answer

    work = CallRun("servers", POLICY, replicas, call, done).answer_all(number)
    await asyncio.gather(work, *([during] if during is not None else []))
    return told, replicas


def test_servers_share_the_load_by_what_they_take():
    servers = [Slots(8), Slots(8), Slots(8)]
    (told, _), seconds = simulate(run(servers, 2400, 8))
    assert sorted(told) == sorted(told.values()) == list(range(2400))
    assert [len(s.answered) for s in servers] == [800, 800, 800]
    assert seconds == pytest.approx(2400 / 24 * 0.5, rel=0.02)


def test_a_slow_server_gets_as_many_as_it_answers():
    servers = [Slots(8, latency_s=0.25), Slots(8, latency_s=1.0)]
    (told, _), seconds = simulate(run(servers, 2000, 8))
    assert len(told) == 2000
    fast, slow = (len(s.answered) for s in servers)
    assert fast / slow == pytest.approx(4, rel=0.1)
    assert seconds == pytest.approx(2000 / (8 / 0.25 + 8 / 1.0), rel=0.1)


def test_a_server_that_dies_costs_its_calls_in_flight_and_nothing_else():
    servers = [Slots(8), Slots(8)]

    async def kill():
        await asyncio.sleep(20.0)
        servers[0].is_down = True

    (told, replicas), seconds = simulate(run(servers, 1600, 8, kill()))
    answered = servers[0].answered + servers[1].answered
    assert len(told) == 1600 and len(answered) == len(set(answered))  # None lost, none bought twice.
    assert replicas.members[0].failures > 0
    # 20 s with both, and the rest with one: 16 calls in 0.5 s, then 8.
    left = 1600 - 20 / 0.5 * 16
    assert seconds == pytest.approx(20 + left / 8 * 0.5, rel=0.1)


def test_a_server_that_comes_back_takes_its_share_again():
    servers = [Slots(8), Slots(8)]

    async def restart():
        servers[0].is_down = True
        await asyncio.sleep(100.0)
        servers[0].is_down = False

    (told, replicas), _ = simulate(run(servers, 6400, 8, restart()))
    assert len(told) == 6400 and replicas.members[0].failures == 0
    assert len(servers[0].answered) > 1000


def test_a_wait_that_one_server_asks_for_is_not_kept_by_the_others():
    servers = [Slots(2, retry_after_s=30.0), Slots(8)]
    (told, _), seconds = simulate(run(servers, 800, 8))
    assert len(told) == 800
    # The other one alone takes 50 s; if it kept the waits too, each would add 30.
    assert seconds <= 60 and servers[0].rejected < 40


def test_a_question_that_is_rejected_is_rejected_once():
    asked = []

    async def call(n):
        asked.append(n)
        raise CallError("too long", "refused")

    async def work():
        async def probe(_n):
            pass

        return await Replicas(["a", "b"], 4, POLICY, probe).call(call)

    with pytest.raises(CallError, match="too long"):
        simulate(work())
    assert len(asked) == 1


def test_a_server_without_the_model_is_left_out_and_the_last_one_is_an_error():
    async def work(number_gone):
        async def probe(_n):
            pass

        async def call(n):
            if n < number_gone:
                raise CallError("HTTP 404", "stop")
            return n

        replicas = Replicas(["a", "b"], 4, POLICY, probe)
        answers = [await replicas.call(call) for _ in range(3)]
        return answers, [member.gone for member in replicas.members]

    (answers, gone), _ = simulate(work(1))
    assert answers == [1, 1, 1] and gone == ["HTTP 404", None]
    with pytest.raises(CallError) as raised:
        simulate(work(2))
    assert raised.value.kind == "stop"


# --- the pace -------------------------------------------------------------------------------------------------------


def seconds_of(make, number, concurrency):
    """Return the simulated seconds of so many calls to a server with this highest concurrency."""
    server, told = make(), []
    pace = Pace(concurrency)
    work = CallRun("server", POLICY, pace, server.call, lambda index, _answer: told.append(index)).answer_all(number)
    _, seconds = simulate(work)
    assert sorted(told) == list(range(number))
    return seconds


SERVERS = {
    "rejects": lambda: Slots(16),
    "rejects, asks for a second": lambda: Slots(16, retry_after_s=1.0),
    "rejects, slow": lambda: Slots(6, latency_s=4.0),
    "rejects, many": lambda: Slots(100, latency_s=0.2),
    "queues": lambda: Slots(16, queues=True),
}


@pytest.mark.parametrize("name", SERVERS)
def test_the_pace_comes_within_a_fifth_of_the_best_fixed_one(name):
    make = SERVERS[name]
    number = 6000
    # The best: as many in flight as the server answers at once.
    best = seconds_of(make, number, make().number)
    found = seconds_of(make, number, 256)
    assert found <= 1.2 * best, f"{name}: {found:.0f} s, at best {best:.0f} s"


@pytest.mark.slow
def test_the_questions_of_given_completions_at_256_in_flight_take_at_most_half_longer_than_the_ideal():
    # Two orders under one principle, chunk after chunk; some answers take ten times as long as most.
    drawn = random.Random(0)
    latencies = [drawn.lognormvariate(-0.7, 0.6) for _ in range(3 * 2 * GIVEN_CHUNK)]
    told = []

    async def all_chunks():
        pace = Pace(256)
        for start in range(0, len(latencies), 2 * GIVEN_CHUNK):

            async def call(index, start=start):
                await asyncio.sleep(latencies[start + index])
                return start + index

            run = CallRun("server", POLICY, pace, call, lambda _index, answer: told.append(answer))
            await run.answer_all(2 * GIVEN_CHUNK)

    _, seconds = simulate(all_chunks())
    assert sorted(told) == list(range(len(latencies))) and max(latencies) > 8 * statistics.median(latencies)
    assert seconds <= 1.5 * sum(latencies) / 256
