"""What a set of preferences is like: how much was labelled, how surely, and whether length decided it.

Counts are sums and figures of rows come from the rows alone, so that those of shards add up to those of the whole.
Knows rows, counts and a judge's statistics; no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from onetrunk.judges.verdicts import JudgeStatistics
from onetrunk.types import Message

BINS = 10
COUNTS = (
    "prompts",
    "repeated_prompts",
    "completions",
    "repeated_completions",
    "blank_completions",  # Or with a NUL character: what no training row may hold.
    "prompts_without_pair",
    "pairs",
    "labelled",
    "ties",
    "abstained",
    "unjudged",
)


class PreferenceFigures:
    """Figures of preference rows, one row after the other. Lengths are in characters."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.histogram = [0] * BINS
        self.sums: Counter[str] = Counter()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Count rows in."""
        for row in rows:
            chosen, rejected = len(plain(row["chosen"])), len(plain(row["rejected"]))
            self.num_rows += 1
            # Bins of 0.05 from 0.5 to 1, the last one closed.
            self.histogram[min(BINS - 1, int((row["probability"] - 0.5) * 2 * BINS + 1e-9))] += 1
            self.sums["probability"] += row["probability"]
            self.sums["consistent"] += bool(row["consistent"])
            self.sums["chosen"] += chosen
            self.sums["rejected"] += rejected
            self.sums["longer"] += chosen > rejected
            self.sums["of_unequal_length"] += chosen != rejected

    def as_dict(self) -> dict[str, Any]:
        """Return the figures; None where there is nothing to take a mean of."""
        edges = [round(0.5 + i / (2 * BINS), 2) for i in range(BINS + 1)]
        return {
            "rows": self.num_rows,
            "mean_probability": _ratio(self.sums["probability"], self.num_rows),
            "consistent_fraction": _ratio(self.sums["consistent"], self.num_rows),
            "label_histogram": {
                f"{low:.2f}-{high:.2f}": n for low, high, n in zip(edges[:-1], edges[1:], self.histogram, strict=True)
            },
            "length": {
                "mean_chosen_characters": _ratio(self.sums["chosen"], self.num_rows),
                "mean_rejected_characters": _ratio(self.sums["rejected"], self.num_rows),
                "longer_is_chosen_fraction": _ratio(self.sums["longer"], self.sums["of_unequal_length"]),
            },
        }


def counts_of(counter: Counter[str]) -> dict[str, int]:
    """Return all counts under their names, 0 included, in one order."""
    return {name: counter[name] for name in COUNTS}


def judge_sums(statistics: JudgeStatistics) -> dict[str, float]:
    """Return what the figures of a judge are made of: sums, which those of other shards can be added to."""
    return dict(vars(statistics))


def judge_figures(sums: Iterable[dict[str, float]]) -> dict[str, Any]:
    """Return the figures of a judge from the sums of one or several shards."""
    total: Counter[str] = Counter()
    for part in sums:
        total.update(part)
    statistics = JudgeStatistics()
    for name in vars(statistics):
        setattr(statistics, name, total[name])
    # Sums of floats differ in their last digits with the order of the shards.
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in statistics.as_dict().items()}


def plain(text: str | list[Message]) -> str:
    """Return a completion as text."""
    return text if isinstance(text, str) else "\n".join(message["content"] for message in text)


def _ratio(total: float, count: int) -> float | None:
    return round(total / count, 6) if count else None
