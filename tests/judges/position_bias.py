"""What a judge that favours the slot it reads first does to labels, with one order and with both: measured.

    python -m tests.judges.position_bias

The judge knows the truth, a rubric's probability, and adds a bias for the completion shown first, and noise of its own
for every question, both in logits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from onetrunk.judges.constitution import Constitution, parse_constitution
from onetrunk.judges.judge import Judge, Pair, Principle, Verdict
from onetrunk.judges.labels import JudgeStatistics, judge_pairs
from onetrunk.judges.rubric import RubricJudge, logistic

CONSTITUTION: Constitution = parse_constitution(
    {"name": "worth", "principles": [{"text": "Which completion is worth more?", "tags": ["worth"]}]}
)
BIASES = (0.0, 0.5, 1.0, 2.0, 4.0, -2.0)
NOISE = 0.5
NUM_PAIRS, SEED = 2000, 7
HEAD = (
    "bias in logits",
    "`first_slot_rate`",
    "`position_consistency`",
    "wrong labels, one order",
    "both",
    "mean label error, one order",
    "both",
    "win rate of equals, one order",
    "both",
)


def worth(completions, **columns):
    """The number that a completion is."""
    return [float(text) for text in completions]


class SlotBiased(Judge):
    """A judge with a bias for a slot, and with noise that the question decides.

    Args:
        judge: whose probabilities it distorts; none of them 0 or 1.
        bias: in logits, for the completion shown first.
        noise: its standard deviation, in logits.
    """

    name = "biased"

    def __init__(self, judge: Judge, bias: float, noise: float = 0.0):
        self.judge, self.bias, self.noise = judge, bias, noise
        self.identity = {"biased": [bias, noise], "judge": judge.identity}

    def _answer(self, items: Sequence[Pair], principle: Principle, keep) -> None:
        for index, (pair, fair) in enumerate(zip(items, self.judge.compare(items, principle), strict=True)):
            noise = random.Random(repr((pair.prompt, pair.first, pair.second))).gauss(0, self.noise)
            logit = math.log(fair.probability / (1 - fair.probability))
            keep(index, Verdict(logistic(logit + self.bias + noise)))


def some_pairs() -> list[Pair]:
    """Return pairs of two writers who are equally good, the first writer's completion always the first."""
    draw = random.Random(SEED)
    return [Pair(f"p{i}", f"{draw.gauss(0, 1):.4f}", f"{draw.gauss(0, 1):.4f}") for i in range(NUM_PAIRS)]


def measure(bias: float, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the figures of JudgeStatistics and, for (one order, both), those of the labels."""
    fair = RubricJudge({"worth": worth}, temperature=1.0)
    truth = [verdict.probability for verdict in fair.compare(pairs, CONSTITUTION.principles[0])]
    statistics, found = JudgeStatistics(), {"wrong": [], "error": [], "win_rate": []}
    for both_orders in (False, True):
        labels = judge_pairs(SlotBiased(fair, bias, NOISE), pairs, CONSTITUTION, both_orders=both_orders)
        said = [label.probability for label in labels]
        found["wrong"].append(fmean((p > 0.5) != (t > 0.5) for p, t in zip(said, truth, strict=True)))
        found["error"].append(fmean(abs(p - t) for p, t in zip(said, truth, strict=True)))
        found["win_rate"].append(fmean(p > 0.5 for p in said))
    for label in labels:
        statistics.add(label)
    return statistics.as_dict() | found


def table() -> list[str]:
    """Return the lines of a Markdown table."""
    pairs = some_pairs()
    rows = []
    for bias in BIASES:
        f = measure(bias, pairs)
        shares = [f["position_consistency"], *f["wrong"]]
        cells = [f"{bias:g}", f"{f['first_slot_rate']:.3f}", *(f"{share:.1%}" for share in shares)]
        rows.append(cells + [f"{e:.3f}" for e in f["error"]] + [f"{rate:.1%}" for rate in f["win_rate"]])
    return [f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *rows)]


if __name__ == "__main__":
    print("\n".join(table()))
