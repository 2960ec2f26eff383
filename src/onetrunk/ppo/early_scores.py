"""Scores of completions that were sampled ahead, computed as they arrive: while others decode, and during the update.

One thread calls the reward functions that may see some rows of a rollout only (`onetrunk.rewards.row_wise`), with all
rows of the earliest rollout that have arrived meanwhile. The other functions get whole rollouts in the main thread.
Scores are saved in checkpoints, because a remote reward may cost money; judges keep their answers themselves.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onetrunk.ppo.sampling import PromptBatch, Sampler
from onetrunk.rewards.base import RowScore
from onetrunk.rollouts.producer import POLL_S, Closed, Producer, StartedRow
from onetrunk.types import RowKey

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrived:
    """Rows of one rollout that were sampled and are not scored yet."""

    iteration: int
    batch: PromptBatch
    rows: list[StartedRow]


class EarlyScores:
    """Scores rows of rollouts that are sampled ahead, in a thread that runs while there are any.

    A function that raises an error gets whole rollouts from then on, in the main thread: the error is then that of the
    run, or the function cannot work in a thread.

    Args:
        sampler: with at least one row-wise reward function.
        producer: starts the thread, which ends with it.
        basis: everything that a score is computed from besides the row, as JSON values; scores of a checkpoint with
            another basis are not used.
    """

    def __init__(self, sampler: Sampler, producer: Producer, basis: Mapping[str, Any]):
        self.sampler = sampler
        self.producer = producer
        self.basis = dict(basis)
        self._changed = threading.Condition()
        self._names = list(sampler.rewards.row_wise)
        self._arrived: list[Arrived] = []
        # The scores of each function that does not keep its answers itself, for rows that every function has scored.
        self._scores: dict[RowKey, dict[str, RowScore]] = {}
        self._is_working = False

    def add(self, iteration: int, batch: PromptBatch, rows: Sequence[StartedRow]) -> None:
        """Begin to score sampled rows of a rollout; called in any thread."""
        with self._changed:
            places = [place for place, key in enumerate(batch.keys) if key not in self._scores]
            if not places or not self._names:
                return
            self._arrived.append(Arrived(iteration, batch.select(places), [rows[place] for place in places]))
            if not self._is_working:
                self._is_working = True
                self.producer.start_thread(self._work, "early scores")

    def take(self, keys: Sequence[RowKey], poll: Callable[[], None]) -> dict[str, list[RowScore]]:
        """Wait until the rows of a rollout are scored; return {function: scores of the rows} for those that are.

        Args:
            keys: of rows that were added, or will be.
            poll: called while waiting; may raise to give up.
        """

        def is_done() -> bool:
            return not self._names or all(key in self._scores for key in keys)

        while not self._wait_for(is_done):
            poll()
        with self._changed:
            kept = [name for name in self._names if not self.sampler.rewards.keeps_answers(name)]
            return {name: [self._scores[key][name] for key in keys] for name in kept}

    def _wait_for(self, is_done: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(is_done, POLL_S)

    def forget(self, iteration: int) -> None:
        """Forget a rollout that is used, and those before it."""
        with self._changed:
            self._scores = {key: scores for key, scores in self._scores.items() if key[1] > iteration}
            self._arrived = [arrived for arrived in self._arrived if arrived.iteration > iteration]

    # --- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                arrived = self._next()
                if not arrived:
                    self._is_working = False
                    return
                names = list(self._names)
            batch = PromptBatch.joined([item.batch for item in arrived])
            try:
                scores = self.sampler.score_rows(names, batch, [row for item in arrived for row in item.rows])
            except BaseException as error:
                scores = dict.fromkeys(names, error)
            with self._changed:
                self._keep(batch.keys, scores)
                self._changed.notify_all()

    def _next(self) -> list[Arrived]:
        """Return what has arrived of the earliest rollout, and nothing once the run is over."""
        try:
            self.producer.require_open()
        except Closed:
            return []
        first = min((item.iteration for item in self._arrived), default=0)
        arrived = [item for item in self._arrived if item.iteration == first] if self._names else []
        self._arrived = [item for item in self._arrived if item.iteration != first]
        return arrived

    def _keep(self, keys: Sequence[RowKey], scores: Mapping[str, Sequence[RowScore] | BaseException]) -> None:
        for name, outcome in scores.items():
            if isinstance(outcome, BaseException):
                self._names.remove(name)
                logger.warning(
                    f"reward function {name!r} raised {type(outcome).__name__} when it scored {len(keys)} rows early"
                    f" ({outcome}); from now on it is called with whole rollouts, in the main thread"
                )
        kept = {
            n: rows for n, rows in scores.items() if n in self._names and not self.sampler.rewards.keeps_answers(n)
        }
        self._scores |= {key: {name: rows[i] for name, rows in kept.items()} for i, key in enumerate(keys)}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return the scores as JSON values, None if there are none."""
        with self._changed:
            scores = dict(self._scores)
        rows = [
            [list(key), {name: [row.score, row.metrics, row.columns] for name, row in by_name.items()}]
            for key, by_name in scores.items()
            if by_name
        ]
        # What a function logs may be any object; in a table of samples it is a text.
        return json.loads(json.dumps({"basis": self.basis, "rows": rows}, default=str)) if rows else None

    def load(self, state: Mapping[str, Any], keys: Iterable[RowKey]) -> None:
        """Use the scores that `state` returned, for the rows whose completions are kept too."""
        if state["basis"] != json.loads(json.dumps(self.basis, default=str)):
            return
        wanted = set(keys)
        needed = {name for name in self._names if not self.sampler.rewards.keeps_answers(name)}
        for key, by_name in ((tuple(key), by_name) for key, by_name in state["rows"]):
            if key in wanted and needed <= by_name.keys():
                self._scores[key] = {name: RowScore(*by_name[name]) for name in needed}
