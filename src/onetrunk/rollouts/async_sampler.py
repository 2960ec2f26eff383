"""Rollouts that are sampled ahead of the updates that use them, in threads, by a backend that samples by version.

The trainer offers rollouts in order, publishes a version before each update, and takes every rollout once. A rollout
is sampled in parts. A part starts with the latest version, in order, as soon as the staleness allows it (admission
control of AReaL, 2505.24298) and rows that run leave room for it. Which part gets which version may depend on time;
known versions repeat such a run exactly.

Nothing here communicates with other processes: each has a sampler of its own rows.
"""

from __future__ import annotations

import atexit
import itertools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from onetrunk.rollouts.base import POLL_S, mark_thread
from onetrunk.types import Rollout, RowKey

# Seconds that the end of the process waits for calls that still run. Python kills daemon threads; inside torch, that
# ends the process with exit code 134.
LONGEST_WAIT_S = 10.0

# (version, prompt_ids, keys) -> one completion per prompt, from that version.
Sample = Callable[[int, Sequence[list[int]], Sequence[RowKey]], Rollout]


@dataclass(frozen=True)
class StartedRow:
    """A row that was sampled, or is being sampled, from `version`; `completion_ids` are None while it runs.

    Args:
        episode: of an episode, its prompt_ids, turn_ids, turn_rewards, restarts and record, as in `Rollout`.
    """

    version: int
    completion_ids: list[int] | None = None
    logprobs: Tensor | None = None
    stopped: bool = False
    episode: tuple[list[int], list[int], list[float] | None, list[int] | None, Any] | None = None


@dataclass(eq=False)
class Part:
    """Rows of one rollout that are sampled in one call.

    Args:
        places: the positions of the rows in the rollout.
        prompt_ids, keys: one of each per row.
        version: None until it starts.
        rows: None until it ends.
    """

    iteration: int
    places: list[int]
    prompt_ids: list[list[int]]
    keys: list[RowKey]
    version: int | None = None
    rows: list[StartedRow] | None = None


class AsyncSampler:
    """Samples offered rollouts in threads, at most `max_staleness` rollouts ahead of the version that it samples from.

    A part starts only while running + accepted rows <= (max_staleness + updates + 1) * rows_per_rollout, where
    `updates` counts the rollouts that the published version was trained on.

    Args:
        max_staleness: rollouts, 0 or more.
        max_rows: rows that run at once; a single part always may. None: no bound.
    """

    def __init__(
        self,
        sample: Sample,
        rows_per_rollout: int,
        max_staleness: int,
        rows_per_part: int,
        max_rows: int | None = None,
    ):
        self.sample = sample
        self.rows_per_rollout = rows_per_rollout
        self.max_staleness = max_staleness
        self.rows_per_part = rows_per_part
        self.max_rows = max_rows
        self._changed = threading.Condition()
        self._known: dict[RowKey, StartedRow] = {}
        self._parts: list[Part] = []
        self._versions: set[int] = set()
        self._version: int | None = None
        self._num_updates = 0
        # Rows that run, or were accepted, since the first rollout of the run; of them, those that run.
        self._num_started: int | None = None
        self._num_running = 0
        self._first, self._last = 0, -1
        self._error: BaseException | None = None
        self.is_closed = False
        self._threads: set[threading.Thread] = set()
        _samplers.add(self)

    def remember(self, rows: Mapping[RowKey, StartedRow]) -> None:
        """Use completions of a checkpoint, and start rows that have none with the version that they had started with.

        Call it before the rollouts are offered. With versions alone it repeats an earlier run.
        """
        with self._changed:
            self._known |= rows

    def publish(self, num_updates: int, version: int) -> None:
        """Let parts start with `version`, which was trained on `num_updates` rollouts, from now on."""
        with self._changed:
            self._num_updates, self._version = num_updates, version
            self._versions.add(version)
            self._dispatch()

    def offer(self, iteration: int, prompt_ids: Sequence[list[int]], keys: Sequence[RowKey]) -> None:
        """Add the rows of the next rollout. Its parts start when they may."""
        with self._changed:
            if self._num_started is None:
                self._first, self._num_started = iteration, iteration * self.rows_per_rollout
            elif iteration != self._last + 1:
                raise RuntimeError(f"rollout {iteration} was offered after rollout {self._last}; each comes once")
            self._last = iteration
            parts = self._split(iteration, prompt_ids, keys)
            self._parts += parts
            self._num_started += sum(len(part.rows) for part in parts if part.rows is not None)
            self._dispatch()

    def take(self, iteration: int, poll: Callable[[], None] = lambda: None) -> Rollout:
        """Wait for a rollout and return it; it stays here until `finish`.

        Args:
            iteration: the first one that is not finished.
            poll: called while waiting; may raise to give up.

        Raises:
            RuntimeError: another rollout than the next one, or the sampler was closed.
            BaseException: what `sample` raised for one of its rows, or for rows before them.
        """
        if iteration != self._first or iteration > self._last:
            raise RuntimeError(f"rollout {iteration} was asked for, and the next one is rollout {self._first}")

        def is_over() -> bool:
            return self._error is not None or self.is_closed or self._has_all(iteration)

        is_ready = False
        while not is_ready:
            poll()
            with self._changed:
                is_ready = self._changed.wait_for(is_over, POLL_S)
        with self._changed:
            if not self._has_all(iteration):
                raise self._error or RuntimeError(f"rollout {iteration} was asked for after the end of the run")
            parts = [part for part in self._parts if part.iteration == iteration]
        columns = (zip(part.places, part.prompt_ids, part.rows, strict=True) for part in parts)
        in_order = sorted(itertools.chain.from_iterable(columns), key=operator.itemgetter(0))
        rows = [row for _, _, row in in_order]
        rollout = Rollout(
            prompt_ids=[ids for _, ids, _ in in_order],
            completion_ids=[row.completion_ids for row in rows],
            sampler_logprobs=[row.logprobs for row in rows],
            stopped=[row.stopped for row in rows],
            policy_version=min(row.version for row in rows),
            policy_versions=[row.version for row in rows],
        )
        if rows[0].episode is None:
            return rollout
        prompts, turns, rewards, restarts, records = zip(*(row.episode for row in rows), strict=True)
        restarts = None if restarts[0] is None else restarts
        return replace(
            rollout, prompt_ids=prompts, turn_ids=turns, turn_rewards=rewards, restarts=restarts, episodes=records
        )

    def finish(self, iteration: int) -> None:
        """Forget a rollout that was taken and is used."""
        with self._changed:
            if iteration != self._first:
                raise RuntimeError(f"rollout {iteration} was finished, and the next one is rollout {self._first}")
            self._parts = [part for part in self._parts if part.iteration != iteration]
            self._first += 1

    def started(self) -> dict[RowKey, StartedRow]:
        """Return the rows that have started and are not finished, for a checkpoint."""
        with self._changed:
            rows: dict[RowKey, StartedRow] = {}
            for part in self._parts:
                if part.version is not None:
                    sampled = part.rows or [StartedRow(part.version)] * len(part.keys)
                    rows |= zip(part.keys, sampled, strict=True)
            # Rows of a checkpoint that were not offered again yet.
            return {key: row for key, row in self._known.items() if key not in rows} | rows

    def close(self) -> None:
        """Start no more parts. Calls that run are not waited for; they see it in `samples_ahead`."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def _split(self, iteration: int, prompt_ids: Sequence[list[int]], keys: Sequence[RowKey]) -> list[Part]:
        """Return the parts of a rollout in the order of their first rows; known rows of one state stay together."""
        known = [self._known.pop(key, None) for key in keys]
        # A checkpoint holds the rows of every process; those of others are theirs.
        self._known = {key: row for key, row in self._known.items() if key[1] != iteration}

        def kind(row: int) -> tuple[int, bool, int | None]:
            state = known[row]
            is_sampled = state is not None and state.completion_ids is not None
            # A completion's version does not divide parts; a row that starts needs the version that it had.
            return row // self.rows_per_part, is_sampled, None if state is None or is_sampled else state.version

        groups: dict[tuple[int, bool, int | None], list[int]] = {}
        for row in range(len(keys)):
            groups.setdefault(kind(row), []).append(row)
        parts = []
        for (_, is_sampled, version), rows in groups.items():
            part = Part(iteration, rows, [list(prompt_ids[i]) for i in rows], [keys[i] for i in rows])
            if is_sampled:
                part.rows = [known[i] for i in rows]
                part.version = min(row.version for row in part.rows)
            elif version is not None:
                self._known |= dict.fromkeys(part.keys, StartedRow(version))
            parts.append(part)
        return parts

    def _dispatch(self) -> None:
        """Start the parts that may start, in order. The caller holds the lock."""
        while self._error is None and not self.is_closed:
            part = next((part for part in self._parts if part.version is None), None)
            if part is None:
                return
            size, known = len(part.keys), self._known.get(part.keys[0])
            version = self._version if known is None else known.version
            limit = (self.max_staleness + self._num_updates + 1) * self.rows_per_rollout
            is_admitted = self._num_started + size <= limit
            has_room = self.max_rows is None or not self._num_running or self._num_running + size <= self.max_rows
            if version not in self._versions or not is_admitted or not has_room:
                return
            for key in part.keys:
                self._known.pop(key, None)
            part.version = version
            self._num_started += size
            self._num_running += size
            thread = threading.Thread(target=self._run, args=[part], daemon=True, name=f"rollout {part.iteration}")
            self._threads.add(thread)
            thread.start()

    def _run(self, part: Part) -> None:
        mark_thread(self)
        error, rows = None, []
        try:
            rollout = self.sample(part.version, part.prompt_ids, part.keys)
            columns = rollout.completion_ids, rollout.sampler_logprobs, rollout.stopped, episodes_of(rollout)
            rows = [StartedRow(part.version, *row) for row in zip(*columns, strict=True)]
        except BaseException as raised:
            error = raised
        with self._changed:
            self._num_running -= len(part.keys)
            if error is None:
                part.rows = rows
            elif self._error is None:
                self._error = error
            self._dispatch()
            self._threads.discard(threading.current_thread())
            self._changed.notify_all()

    def _has_all(self, iteration: int) -> bool:
        return all(part.rows is not None for part in self._parts if part.iteration == iteration)


def episodes_of(rollout: Rollout) -> list[tuple[Any, ...] | None]:
    """Return `StartedRow.episode` of each row of a rollout."""
    nothing = [None] * len(rollout)
    if rollout.episodes is None:
        return nothing
    given = rollout.turn_rewards or nothing, rollout.restarts or nothing
    columns = rollout.prompt_ids, rollout.turn_ids, *given, rollout.episodes
    return list(zip(*columns, strict=True))


_samplers: weakref.WeakSet[AsyncSampler] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Close every sampler, and wait for calls that run."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    samplers = list(_samplers)
    for sampler in samplers:
        sampler.close()
    for thread in [thread for sampler in samplers for thread in list(sampler._threads)]:
        thread.join(max(0.0, deadline - time.monotonic()))
