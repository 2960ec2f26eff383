"""A discrete-event simulation of a plan: replicas that decode rows of drawn lengths, a queue, a trainer, versions.

The search adds up means; this draws every length, lets each replica run dry on its own, and lets rollouts overlap as
the schedule allows. It is what the formulas are checked against, and it draws a Gantt chart of the best plan:

    python -m scripts.plan.simulate plan.svg --model Qwen/Qwen2.5-7B --hardware 8xH100-80GB
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from onetrunk.plan.evaluate import ASYNC_STALENESS, Plan
from onetrunk.plan.job import Job, Lengths
from onetrunk.plan.search import search
from onetrunk.plan.timing import SERVER, most_rows_of, period_of, step_parts
from onetrunk.stages.plan import parse_plan, request_of
from onetrunk.utils.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Lanes of samplers in a chart; more replicas do the same as these.
MOST_LANES = 8
COLORS = {"generate": "#2f81f7", "score": "#e3742b", "update": "#2da44e", "publish": "#8a8f98"}
STALENESS = {"sync": 0, "one_step": 1, "async": ASYNC_STALENESS}


@dataclass(frozen=True)
class Bar:
    """Work in a chart: who does it, what it is, of which rollout, from when to when (seconds)."""

    lane: str
    name: str
    rollout: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated run: its bars, and the mean seconds of an iteration after the first."""

    bars: tuple[Bar, ...]
    iteration_s: float

    def idle(self, lane: str) -> float:
        """Return the share of the time in which a lane waits, from the end of the first iteration on."""
        updates = [bar.end for bar in self.bars if bar.name == "update"]
        begin, end = updates[0], updates[-1]
        busy = sum(
            max(0.0, min(bar.end, end) - max(bar.start, begin))
            for bar in self.bars
            if bar.lane == lane and bar.name != "publish"
        )
        return max(0.0, 1 - busy / (end - begin))


@dataclass
class _Replica:
    """A sampler: rows that decode (tokens left, rollout), rows that wait, and the time up to which it has worked."""

    active: list[tuple[float, int]] = field(default_factory=list)
    waiting: list[tuple[float, int]] = field(default_factory=list)
    now: float = 0.0
    token: int = 0
    began: dict[int, float] = field(default_factory=dict)


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
        self.bars: list[Bar] = []
        self.version = self.admitted = self.scored = self.order = 0
        self.trainer_free = 0.0
        self.done_at: dict[int, float] = {}
        mine = math.ceil(job.rows / plan.sample.replicas)
        self.prompt_s = plan.phases["generate"].parts.get("prompts", 0.0) / mine
        self.most = max(1, most_rows_of(job, plan.sample))

    def run(self) -> Timeline:
        """Return the whole run."""
        self._admit(0.0)
        while self.events:
            now, _, number, token = heapq.heappop(self.events)
            if number < 0:
                self.version += 1
                self._admit(now)
            elif token == self.replicas[number].token:
                self._advance(number, now)
        updates = [bar.end for bar in self.bars if bar.name == "update"]
        return Timeline(tuple(self.bars), (updates[-1] - updates[0]) / (len(updates) - 1))

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
        sample, lengths = self.plan.sample, self.job.lengths
        batches = sample.in_flight
        parts = step_parts(self.job, sample, rows / batches, lengths.prompt + lengths.completion / 2)
        return sum(parts.values()) * period_of(self.job, sample)

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
            self._row_done(number, rollout, now)
        joined = replica.waiting[: self.most - len(replica.active)]
        del replica.waiting[: len(joined)]
        for length, rollout in joined:
            replica.began.setdefault(rollout, now)
            replica.active.append((length, rollout))
        replica.now += len(joined) * self.prompt_s
        replica.token += 1
        if replica.active:
            soonest = min(left for left, _ in replica.active)
            self._push(replica.now + soonest * self._step(len(replica.active)), number, replica.token)

    def _row_done(self, number: int, rollout: int, now: float) -> None:
        replica = self.replicas[number]
        self.left[rollout] -= 1
        if all(r != rollout for _, r in (*replica.active, *replica.waiting)) and number < MOST_LANES:
            lane = "trainer" if self.plan.sample.engine != SERVER and number == 0 else f"sampler {number + 1}"
            self.bars.append(Bar(lane, "generate", rollout, replica.began[rollout], now))
        if self.left[rollout] == 0:
            self.done_at[rollout] = now
            self._train()
            self._admit(now)

    def _train(self) -> None:
        """Score and update on finished rollouts, in their order, and publish what they make."""
        while self.scored in self.done_at:
            rollout = self.scored
            self.scored += 1
            start = max(self.trainer_free, self.done_at[rollout])
            for name in ("score", "update"):
                end = start + self.plan.phases[name].seconds
                self.bars.append(Bar("trainer", name, rollout, start, end))
                start = end
            published = start + self.plan.publish_s
            self.bars.append(Bar("trainer", "publish", rollout, start, published))
            self.trainer_free = published
            self._push(published, -1, 0)


def simulate(job: Job, plan: Plan, rollouts: int = 8, seed: int = 0) -> Timeline:
    """Return the simulated iterations of a plan.

    Args:
        job: that is run.
        plan: how.
        rollouts: at least 2; the first is not counted in the mean.
        seed: of the drawn lengths.
    """
    return Simulation(job, plan, max(2, rollouts), seed).run()


def lanes_of(timeline: Timeline) -> Iterator[str]:
    """Yield the lanes of a chart, the trainer last."""
    names = dict.fromkeys(bar.lane for bar in timeline.bars)
    yield from sorted((name for name in names if name != "trainer"), key=lambda name: (len(name), name))
    yield "trainer"


def draw_gantt(timeline: Timeline, title: str) -> Figure:
    """Return the chart of a run: a line per sampler and one for the trainer."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = list(lanes_of(timeline))
    figure = Figure(figsize=(9.0, 1.4 + 0.4 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for bar in timeline.bars:
        place = lanes.index(bar.lane)
        axes.barh(place, bar.end - bar.start, left=bar.start, height=0.7, color=COLORS[bar.name],
                  edgecolor="white", linewidth=0.5)  # fmt: skip
        if bar.name in ("generate", "update") and bar.end > bar.start:
            axes.text((bar.start + bar.end) / 2, place, str(bar.rollout), ha="center", va="center", fontsize=7,
                      color="white")  # fmt: skip
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("seconds; the numbers are rollouts")
    axes.set_title(title, fontsize="medium")
    used = dict.fromkeys(bar.name for bar in timeline.bars)
    handles = [Patch(color=COLORS[name], label=name) for name in COLORS if name in used]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=4, frameon=False)
    return figure


def save_gantt(timeline: Timeline, title: str, path: Path) -> None:
    """Write the chart as PNG or SVG, by the ending of the path."""
    figure = draw_gantt(timeline, title)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=110)


if __name__ == "__main__":
    words, values = parse_plan(sys.argv[2:])
    request = request_of(words.own, values)
    best = search(request.job, request.pools, request.space, most=1)[0].plan
    save_gantt(simulate(request.job, best, 6), f"{best.schedule}, {best.iteration_s:.1f} s", Path(sys.argv[1]))
