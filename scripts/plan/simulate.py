"""A discrete-event simulation of a plan: replicas that decode rows of drawn lengths, a queue, a trainer, versions.

The search adds up means; this draws every length, lets each replica run dry on its own, and lets rollouts overlap as
the schedule allows. Tests check the formulas against it.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

from onetrunk.plan.costs import slowest_stage
from onetrunk.plan.job import Job, Lengths
from onetrunk.plan.memory import ASYNC_STALENESS
from onetrunk.plan.search import Plan
from onetrunk.plan.timing import most_rows_of, split_of, step_parts

STALENESS = {"sync": 0, "one_step": 1, "async": ASYNC_STALENESS}


@dataclass
class _Replica:
    """A sampler: rows that decode (tokens left, rollout), rows that wait, and the time up to which it has worked."""

    active: list[tuple[float, int]] = field(default_factory=list)
    waiting: list[tuple[float, int]] = field(default_factory=list)
    now: float = 0.0
    token: int = 0


def drawn_lengths(lengths: Lengths, count: int, source: random.Random) -> list[float]:
    """Return completion lengths, drawn from the distribution that the plan assumes."""
    return [max(1.0, lengths.quantile(source.uniform(1e-9, 1 - 1e-9))) for _ in range(count)]


class Simulation:
    """The events of a plan's iterations.

    Args:
        job: that is run.
        plan: how.
        rollouts: that are simulated.
        seed: of the drawn lengths.
    """

    def __init__(self, job: Job, plan: Plan, rollouts: int, seed: int):
        self.job, self.plan, self.rollouts = job, plan, rollouts
        self.source = random.Random(seed)
        self.replicas = [_Replica() for _ in range(plan.sample.replicas)]
        self.left = {r: job.rows for r in range(rollouts)}
        self.events: list[tuple[float, int, int, int]] = []
        self.updated_at: list[float] = []
        self.version = self.admitted = self.scored = self.order = 0
        self.trainer_free = 0.0
        self.done_at: dict[int, float] = {}
        mine = math.ceil(job.rows / plan.sample.replicas)
        self.prompt_s = plan.phases["generate"].parts.get("prompts", 0.0) / mine
        self.most = max(1, most_rows_of(job, plan.sample))

    def run(self) -> float:
        """Return the mean seconds between the ends of two updates."""
        self._admit(0.0)
        while self.events:
            now, _, number, token = heapq.heappop(self.events)
            if number < 0:
                self.version += 1
                self._admit(now)
            elif token == self.replicas[number].token:
                self._advance(number, now)
        return (self.updated_at[-1] - self.updated_at[0]) / (len(self.updated_at) - 1)

    def _push(self, time: float, number: int, token: int) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, number, token))

    def _admit(self, now: float) -> None:
        """Let samplers begin the rollouts that the staleness of the schedule allows."""
        while self.admitted < self.rollouts and self.admitted <= self.version + STALENESS[self.plan.schedule]:
            rollout = self.admitted
            if self.plan.schedule == "one_step" and rollout and self.left[rollout - 1] > 0:
                return  # One rollout after the other; only async mixes their rows.
            self.admitted += 1
            lengths = drawn_lengths(self.job.lengths, self.job.rows, self.source)
            for index, length in enumerate(lengths):
                self.replicas[index % len(self.replicas)].waiting.append((length, rollout))
            for number in range(len(self.replicas)):
                self._advance(number, now)

    def _step(self, rows: int) -> float:
        sample, lengths, shape = self.plan.sample, self.job.lengths, self.job.shape
        parts = step_parts(self.job, sample, rows / sample.stages, lengths.prompt + lengths.completion / 2)
        return sum(parts.values()) * slowest_stage(shape, split_of(sample, shape))

    def _advance(self, number: int, now: float) -> None:
        """Move a replica to `now`: rows that are done leave, waiting ones join, and the next end is an event."""
        replica = self.replicas[number]
        if replica.active:
            # Before `replica.now` it still runs the prompts of rows that have joined.
            tokens = max(0.0, now - replica.now) / self._step(len(replica.active))
            replica.active = [(left - tokens, rollout) for left, rollout in replica.active]
        replica.now = max(now, replica.now)
        for left, rollout in [row for row in replica.active if row[0] <= 1e-6]:
            replica.active.remove((left, rollout))
            self._row_done(rollout, now)
        joined = replica.waiting[: self.most - len(replica.active)]
        del replica.waiting[: len(joined)]
        replica.active += joined
        replica.now += len(joined) * self.prompt_s
        replica.token += 1
        if replica.active:
            soonest = min(left for left, _ in replica.active)
            self._push(replica.now + soonest * self._step(len(replica.active)), number, replica.token)

    def _row_done(self, rollout: int, now: float) -> None:
        self.left[rollout] -= 1
        if self.left[rollout] == 0:
            self.done_at[rollout] = now
            self._train()
            self._admit(now)

    def _train(self) -> None:
        """Score and update on finished rollouts, in their order, and publish what they make."""
        while self.scored in self.done_at:
            start = max(self.trainer_free, self.done_at[self.scored])
            self.scored += 1
            self.updated_at.append(start + self.plan.phases["score"].seconds + self.plan.phases["update"].seconds)
            self.trainer_free = self.updated_at[-1] + self.plan.publish_s
            self._push(self.trainer_free, -1, 0)


def simulate(job: Job, plan: Plan, rollouts: int = 8, seed: int = 0) -> float:
    """Return the mean seconds of an iteration after the first.

    Args:
        job: that is run.
        plan: how.
        rollouts: at least 2; the first is not counted in the mean.
        seed: of the drawn lengths.
    """
    return Simulation(job, plan, max(2, rollouts), seed).run()
