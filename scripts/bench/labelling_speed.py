"""Labels per second and calls per label over the number of calls in flight, in simulated time, and the ideal.

    python scripts/bench/labelling_speed.py --draw scripts/bench/labelling/speed.png

A judge's server takes 64 calls at once and answers after half a second. Of further calls one server lets them wait,
another one rejects them with HTTP 429. The calls go through the same code as those of `prefs`; only the clock is
simulated, so every run prints the same numbers whatever else the machine does. A label takes two calls, one per order.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from onetrunk.utils.calls import CallRun, RetryPolicy
from onetrunk.utils.replicas import Replicas
from tests.simulated import Slots, simulate

SLOTS, LATENCY_S, CALLS_PER_LABEL = 64, 0.5, 2
POLICY = RetryPolicy(max_calls=1000, item_timeout_s=36000.0, patience_s=600.0)
COLUMNS = ("judge_concurrency", "the ideal", "waits: labels/s", "429: labels/s", "429: calls per label")


@dataclass(frozen=True)
class Speed:
    """Labels per second, and calls per label with those that were rejected."""

    labels_per_s: float
    calls_per_label: float


def measure(concurrency: int, queues: bool, num_labels: int) -> Speed:
    """Answer the questions of some labels with at most `concurrency` calls in flight."""
    server = Slots(SLOTS, LATENCY_S, queues)

    async def work() -> None:
        async def probe(_number: int) -> None:
            pass

        replicas = Replicas(["server"], concurrency, POLICY, probe)

        async def call(index: int) -> int:
            return await replicas.call(lambda _number: server.call(index))

        run = CallRun("server", POLICY, replicas, call, lambda _index, _answer: None)
        await asyncio.gather(run.answer_all(CALLS_PER_LABEL * num_labels))

    _, seconds = simulate(work())
    return Speed(num_labels / seconds, (len(server.answered) + server.rejected) / num_labels)


def ideal(concurrency: int) -> float:
    """Return the labels per second of a server that is never idle and never asked in vain."""
    return min(concurrency, SLOTS) / LATENCY_S / CALLS_PER_LABEL


def draw(path: Path, found: dict[int, tuple[Speed, Speed]]) -> None:
    """Write the curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2))
    numbers = list(found)
    axes.plot(numbers, [ideal(number) for number in numbers], "k--", label="ideal")
    for place, name in enumerate(("further calls wait", "further calls get HTTP 429")):
        axes.plot(numbers, [found[number][place].labels_per_s for number in numbers], marker="o", label=name)
    axes.set(xscale="log", xlabel="judge_concurrency", ylabel="labels per second", xticks=numbers)
    axes.set_xticklabels(numbers)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256], help="calls in flight"
    )
    parser.add_argument("--labels", type=int, default=5000, help="labels to make")
    parser.add_argument("--draw", type=Path, help="write the curves into this PNG")
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    found = {}
    for number in args.concurrency:
        waits, rejects = found[number] = tuple(measure(number, queues, args.labels) for queues in (True, False))
        cells = (f"{ideal(number):.1f}", f"{waits.labels_per_s:.1f}", f"{rejects.labels_per_s:.1f}")
        print(f"| {number} | {' | '.join(cells)} | {rejects.calls_per_label:.3f} |", flush=True)
    if args.draw:
        draw(args.draw, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
