"""The sampler alone: who may start when, each rollout once and in order, errors, the end, checkpoints."""

import threading
import time

import pytest
import torch

from onetrunk.rollouts.async_sampler import AsyncSampler, StartedRow
from onetrunk.rollouts.base import Closed, samples_ahead
from onetrunk.types import Rollout
from tests.processes import python

LONG_S = 60


class Bench:
    """A sampler whose calls wait for the `gate`; counts the rows that run and keeps what was asked for."""

    def __init__(self, is_open=True):
        self.gate = threading.Event()
        self.changed = threading.Condition()
        self.calls, self.running, self.most_running = [], 0, 0
        if is_open:
            self.gate.set()

    def __call__(self, version, prompt_ids, keys, arrived=None):
        with self.changed:
            self.calls.append((version, [key[1:] for key in keys]))
            self.running += len(keys)
            self.most_running = max(self.most_running, self.running)
            self.changed.notify_all()
        assert self.gate.wait(LONG_S)
        with self.changed:
            self.running -= len(keys)
        # The completion says where it comes from.
        rows = [[version, *key[1:]] for key in keys]
        logprobs = [torch.full((3,), -float(key[2])) for key in keys]
        return Rollout(prompt_ids, rows, logprobs, [key[2] % 2 == 0 for key in keys], version)

    def wait_for_calls(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.calls) >= number, LONG_S)


def keys(iteration, rows):
    return [(0, iteration, row) for row in range(rows)]


def offer(sampler, iteration, rows=4):
    sampler.offer(iteration, [[iteration, row] for row in range(rows)], keys(iteration, rows))


def published(sample, staleness=1, rows_per_part=4, offers=(), known=None, **settings):
    """Return a sampler of rollouts of four rows that has version 0, and to which rollouts are offered."""
    sampler = AsyncSampler(sample, 4, staleness, rows_per_part, **settings)
    sampler.remember(known or {})
    sampler.publish(0, 0)
    for iteration in offers:
        offer(sampler, iteration)
    return sampler


def test_rows_come_in_order_with_the_version_that_they_were_started_with():
    sampler = published(Bench(), rows_per_part=3, offers=(0, 1))
    first = sampler.take(0)
    assert first.completion_ids == [[0, 0, row] for row in range(4)]
    assert first.prompt_ids == [[0, row] for row in range(4)]
    assert [x.tolist() for x in first.sampler_logprobs] == [[-float(row)] * 3 for row in range(4)]
    assert first.stopped == [True, False, True, False]
    assert (first.policy_version, first.policy_versions) == (0, [0] * 4)
    sampler.finish(0)
    sampler.publish(1, 8)
    offer(sampler, 2)
    second = sampler.take(1)
    sampler.finish(1)
    assert second.policy_versions == [0] * 4  # Rollout 1 was admitted with the first version.
    assert sampler.take(2).policy_versions == [8] * 4


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_row_starts_before_the_staleness_allows_it(staleness):
    """running + accepted <= (staleness + updates + 1) * rows, whatever is offered and however fast rows end."""
    bench, rows = Bench(), 4
    sampler = published(bench, staleness, rows_per_part=1, offers=range(8))
    for updates in range(8 - staleness):
        sampler.publish(updates, 10 * updates)
        allowed = (staleness + updates + 1) * rows
        sampler.take(updates)
        bench.wait_for_calls(allowed)
        # A later start would be seen after the wait for the last allowed row, which ends when all threads have.
        for thread in (t for t in threading.enumerate() if t.name.startswith("rollout ")):
            thread.join(LONG_S)
        assert len(bench.calls) == allowed
        assert all(iteration - version // 10 <= staleness for version, [(iteration, _)] in bench.calls)
        sampler.finish(updates)


def test_at_most_so_many_rows_run_at_once_and_later_ones_get_the_newer_version():
    bench = Bench(is_open=False)
    sampler = published(bench, 2, rows_per_part=2, offers=range(3), max_rows=4)
    bench.wait_for_calls(2)
    assert len(bench.calls) == 2  # Started in `offer`, in this thread: the room was full there.
    sampler.publish(1, 5)
    bench.gate.set()
    versions = [sampler.take(0).policy_versions]
    sampler.finish(0)
    versions += [sampler.take(1).policy_versions]
    assert versions == [[0] * 4, [5] * 4] and bench.most_running == 4


def test_each_rollout_is_taken_once_and_in_order():
    sampler = published(Bench(), offers=(0, 1))
    with pytest.raises(RuntimeError, match="rollout 1 was asked for, and the next one is rollout 0"):
        sampler.take(1)
    assert sampler.take(0).completion_ids == sampler.take(0).completion_ids  # Until it is finished.
    sampler.finish(0)
    for call in (sampler.take, sampler.finish):
        with pytest.raises(RuntimeError, match="and the next one is rollout 1"):
            call(0)
    with pytest.raises(RuntimeError, match="rollout 1 was offered after rollout 1; each comes once"):
        offer(sampler, 1)


class Fault(Exception):
    pass


def test_an_error_in_a_thread_is_raised_to_who_waits_and_nothing_starts_after_it():
    calls = []

    def sample(version, prompt_ids, given):
        calls.append(given)
        if given[0][1] == 1:
            raise Fault("the server is gone")
        return Bench()(version, prompt_ids, given)

    sampler = published(sample, 2, offers=range(3), max_rows=4)
    assert len(sampler.take(0)) == 4  # What was sampled before is still there.
    sampler.finish(0)
    with pytest.raises(Fault, match="the server is gone"):
        sampler.take(1)
    sampler.publish(1, 1)
    assert len(calls) == 2


def test_a_wait_is_given_up_when_poll_raises_and_can_be_repeated():
    bench = Bench(is_open=False)
    sampler = published(bench, 0, offers=(0,))

    def poll():
        raise Fault

    with pytest.raises(Fault):
        sampler.take(0, poll)
    bench.gate.set()
    assert len(sampler.take(0)) == 4


def test_after_the_end_nothing_starts_and_calls_that_run_can_see_it():
    seen = threading.Event()

    def sample(version, prompt_ids, given):
        assert samples_ahead()
        with pytest.raises(Closed):
            for _ in range(LONG_S * 100):
                samples_ahead()
                time.sleep(0.01)
        seen.set()
        samples_ahead()

    assert not samples_ahead()
    sampler = published(sample, offers=(0, 1), max_rows=4)
    sampler.close()
    assert seen.wait(LONG_S)
    with pytest.raises((Closed, RuntimeError)):
        sampler.take(0)


ABANDONED = """
import threading, time
from onetrunk.rollouts import async_sampler as room
room.LONGEST_WAIT_S = 0.5
started = threading.Event()
def sample(*args):
    started.set()
    time.sleep(3600)  # Longer than the limit of the test.
sampler = room.AsyncSampler(sample, 1, 0, 1)
sampler.publish(0, 0)
sampler.offer(0, [[1]], [(0, 0, 0)])
started.wait()
raise SystemExit(3)
"""


@pytest.mark.slow
def test_a_process_ends_although_a_call_never_does():
    python("-c", ABANDONED, code=3)


def test_a_checkpoint_has_what_was_sampled_and_the_versions_of_what_runs():
    bench = Bench()
    sampler = published(bench, rows_per_part=2, offers=(0,))
    sampler.take(0)
    bench.gate.clear()
    offer(sampler, 1)
    bench.wait_for_calls(4)
    rows = sampler.started()
    assert list(rows) == keys(0, 4) + keys(1, 4)
    assert all(rows[key].completion_ids == [0, *key[1:]] for key in keys(0, 4))
    assert all(rows[key] == StartedRow(0) for key in keys(1, 4))
    bench.gate.set()
    sampler.take(0)
    sampler.finish(0)
    sampler.take(1)
    assert list(sampler.started()) == keys(1, 4)  # What is used is not sampled or saved again.


def test_a_resumed_sampler_keeps_completions_and_starts_the_rest_with_their_version():
    done = {key: StartedRow(3, [9, *key[1:]], torch.zeros(3), True) for key in keys(2, 4)[:3]}
    running = {key: StartedRow(6) for key in [*keys(2, 4)[3:], *keys(3, 4)[:2]]}
    bench = Bench(is_open=False)
    sampler = AsyncSampler(bench, 4, 2, rows_per_part=2)
    sampler.remember({**done, **running})
    assert sampler.started() == {**done, **running}  # Also before they are offered.
    for updates, version in ((1, 3), (2, 6), (3, 9)):
        sampler.publish(updates, version)
    offer(sampler, 2)
    offer(sampler, 3)
    bench.wait_for_calls(3)
    # The row that was running, then those of the next rollout; the last two had not started.
    assert sorted(bench.calls) == [(6, [(2, 3)]), (6, [(3, 0), (3, 1)]), (9, [(3, 2), (3, 3)])]
    bench.gate.set()
    rollout = sampler.take(2)
    assert rollout.completion_ids == [[9, 2, 0], [9, 2, 1], [9, 2, 2], [6, 2, 3]]
    assert rollout.policy_versions == [3, 3, 3, 6] and rollout.policy_version == 3
    sampler.finish(2)
    assert sampler.take(3).policy_versions == [6, 6, 9, 9]


def test_rows_of_other_processes_are_forgotten_when_their_rollout_begins():
    known = {key: StartedRow(0, [9], torch.zeros(1), True) for key in [*keys(0, 8), *keys(1, 8)]}
    sampler = published(Bench(), 0, offers=(0,), known=known)
    sampler.take(0)
    sampler.finish(0)
    assert list(sampler.started()) == keys(1, 8)


def test_known_versions_repeat_a_run_whatever_the_order_of_its_threads():
    bench, known = Bench(), {key: StartedRow(5) for key in keys(1, 4)[2:]}
    sampler = published(bench, 2, rows_per_part=2, offers=range(3), known=known)
    sampler.take(0)
    bench.wait_for_calls(3)
    # The second part of rollout 1 waits for version 5, and what follows waits for it.
    assert len(bench.calls) == 3
    sampler.finish(0)
    sampler.publish(1, 5)
    assert sampler.take(1).policy_versions == [0, 0, 5, 5]
    sampler.finish(1)
    assert sampler.take(2).policy_versions == [5] * 4
