"""How well a judge agrees with people: accuracy, calibration, position, length and format, and agreement of judges.

A row has completions that people call better and others. The judge sees each better one with each of the others, in
both orders. P is the judge's probability that the completion people call better is the better one, the mean over
orders and principles. A row is right if P is above 1/2 for all of its pairs; k pairs at exactly 1/2 and none below
count 1 / (k + 1), so that the best of four scores as in RewardBench 2. Computed in float64; a mean of nothing is NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onetrunk.data.groups import Group
from onetrunk.judges.labels import TIE, JudgeStatistics, PairLabel, judge_warnings
from onetrunk.judges.win_rate import CONFIDENCE, fit_logistic, resampled
from onetrunk.reward_models.metrics import expected_calibration_error, pearson, preference_loss, reliability
from onetrunk.utils.files import digest

NAN = float("nan")
# Resamples of the regression on length and format.
RESAMPLES = 400
# Limits of the findings: a calibration error, and how far a preference may be from that of people.
MOST_CALIBRATION_ERROR, MOST_PREFERENCE_GAP = 0.1, 0.1
# Below, a finding would be noise.
FEWEST_ROWS = 20
# Marks of Markdown: headings, list items, bold text, code, links and rows of tables.
MARKDOWN = re.compile(
    r"^#{1,6} |^\s*(?:[-*+]|\d{1,3}[.)]) |\*\*[^*\n]+\*\*|^```|`[^`\n]+`|\[[^\]\n]+\]\([^)\n]+\)|^\|.*\|\s*$",
    re.MULTILINE,
)
# Below this share of the other, a probability of 0 or 1 has a finite logit.
LEAST_PROBABILITY = 1e-6


@dataclass(frozen=True)
class Judged:
    """A row with the judge's labels of its pairs, in the order of `Group.pairs`."""

    group: Group
    labels: tuple[PairLabel, ...]

    @property
    def is_decided(self) -> bool:
        """Whether every pair has a label."""
        return all(not label.errors and label.probability is not None for label in self.labels)

    @cached_property
    def score(self) -> float:
        """1 for a row that is right, 0 for one that is wrong, between them with ties."""
        if any(label.probability < TIE for label in self.labels):
            return 0.0
        return 1 / (1 + sum(label.probability == TIE for label in self.labels))

    @property
    def is_consistently_right(self) -> bool:
        """Whether every pair is right in both orders."""
        return all(label.consistent and label.probability > TIE for label in self.labels)


def judge_metrics(judged: Sequence[Judged], weights: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Return the metrics of a judge on some rows; `weights` are those of the principles, in the order of the votes."""
    counted = [row for row in judged if row.group.probability != TIE]
    decided = [row for row in counted if row.is_decided]
    unjudged = sum(any(label.errors for label in row.labels) for row in counted)
    statistics = JudgeStatistics()
    for label in (label for row in judged for label in row.labels):
        statistics.add(label)
    probabilities, people, length, marks = decided_pairs(decided)
    leads = torch.logit(probabilities, eps=LEAST_PROBABILITY)
    bins = reliability(leads, people)
    by_length, by_marks = slopes(probabilities, (length, marks), seed)
    return {
        "rows": len(judged),
        "equal_for_people": len(judged) - len(counted),
        "decided": len(decided),
        "unjudged": unjudged,
        "abstained": len(counted) - len(decided) - unjudged,
        **_share("accuracy", sum(row.score for row in decided), len(decided)),
        **_share("consistent_accuracy", sum(row.is_consistently_right for row in decided), len(decided)),
        "one_order_accuracy": one_order_accuracy(decided, weights),
        "ties": int((probabilities == TIE).sum()),
        "pairs": len(probabilities),
        "loss": preference_loss(leads, people),
        "calibration_error": expected_calibration_error(bins),
        "reliability": [asdict(b) for b in bins],
        "position": statistics.as_dict(),
        "length": bias_metrics(probabilities, length) | by_length,
        "format": bias_metrics(probabilities, marks) | by_marks,
    }


def decided_pairs(decided: Sequence[Judged]) -> Tensor:
    """Return [4, n]: of each pair P, the people's label, and by how much more characters and marks the better one has.

    The rows have all their labels, and people do not call their completions equal.
    """
    pairs = []
    for row in decided:
        counts = [(len(text), len(MARKDOWN.findall(text))) for text in row.group.texts]
        for (better, other), label in zip(row.group.pairs(), row.labels, strict=True):
            more = (b - o for b, o in zip(counts[better], counts[other], strict=True))
            pairs.append((label.probability, row.group.probability, *more))
    return torch.tensor(pairs, dtype=torch.float64).reshape(-1, 4).T.contiguous()


def wilson_interval(successes: float, number: int) -> tuple[float, float]:
    """Return the 95% interval of a share; NaN of nothing.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference", equation 4.
    """
    if not number:
        return NAN, NAN
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, square = successes / number, z * z / number
    center = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / number + square / (4 * number))
    return max(0.0, center - half), min(1.0, center + half)


def one_order_accuracy(judged: Sequence[Judged], weights: Sequence[float]) -> float:
    """Return the share of answers in one order alone that are right: the accuracy of a judge that is asked once."""
    right = []
    for label in (label for row in judged for label in row.labels):
        for order in range(2):
            asked = [(orders[order], w) for (_, orders), w in zip(label.votes, weights, strict=True)]
            known = [(p, weight) for p, weight in asked if p is not None]
            if known:
                mean = sum(p * weight for p, weight in known) / sum(weight for _, weight in known)
                right.append(TIE if mean == TIE else float(mean > TIE))
    return fmean(right) if right else NAN


def bias_metrics(probabilities: Tensor, differences: Tensor) -> dict[str, Any]:
    """Return how a judge treats pairs whose completions differ in something (length, marks of Markdown).

    Args:
        probabilities: [n], P of each pair.
        differences: [n], of the better completion minus the other, in that thing.

    Returns:
        `preferred`: share of the pairs that differ in which the judge prefers the completion that has more;
        `preferred_by_people`: the same of the people; `accuracy_more` and `accuracy_less`: accuracy on the pairs whose
        better completion has more, or less, with their intervals; `correlation` of P with the difference.
    """
    right = (torch.sign(probabilities - TIE) + 1) / 2
    more, less = right[differences > 0], right[differences < 0]
    number = len(more) + len(less)
    return {
        "pairs_that_differ": number,
        **_share("preferred", float(more.sum() + len(less) - less.sum()), number),
        "preferred_by_people": len(more) / number if number else NAN,
        **_share("accuracy_more", float(more.sum()), len(more)),
        **_share("accuracy_less", float(less.sum()), len(less)),
        "correlation": pearson(probabilities, differences) if len(probabilities) > 1 else NAN,
    }


def slopes(probabilities: Tensor, differences: Sequence[Tensor], seed: int = 0) -> list[dict[str, Any]]:
    """Return the effect of each difference (length, format) on the judge, where the others are equal.

    The logistic regression P = sigmoid(a + b tanh(length / s) + c tanh(marks / t)) has the pairs in the order that
    people prefer, so `a` is the judge's agreement with them, and b and c what it adds for a completion that is longer
    or has more marks; s and t are standard deviations of the differences. Returns b and c, in log odds, each with its
    95% interval over resampled pairs; NaN where no pair differs.
    """
    number = len(probabilities)
    scales = [float(column.std()) if number > 1 else 0.0 for column in differences]
    varied = [index for index, scale in enumerate(scales) if scale > 0]
    found = torch.full((3, len(scales)), NAN, dtype=torch.float64)
    if varied:
        columns = [torch.ones_like(probabilities), *(torch.tanh(differences[i] / scales[i]) for i in varied)]
        features = torch.stack(columns, dim=1)
        whole = fit_logistic(features, probabilities, torch.ones(1, number, dtype=torch.float64))[:, 1:]
        draws = resampled(torch.arange(number), RESAMPLES, seed)
        drawn = torch.cat([fit_logistic(features, probabilities, weights)[:, 1:] for weights in draws])
        tails = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=torch.float64)
        found[:, varied] = torch.cat([whole, torch.quantile(drawn, tails, dim=0)])
    return [{"log_odds": slope, "log_odds_interval": interval} for slope, *interval in found.T.tolist()]


def agreement(judged: dict[str, Sequence[Judged]]) -> dict[str, dict[str, Any]]:
    """Return kappa and plain agreement of every two judges, and of each with the people, by "one / other".

    `judged` has the same rows for each judge's name. A half of the pairs, derived from their contents, is turned
    around: in the order that people prefer, judges would mostly say "first", and agreement by chance would be high.
    """
    opinions: dict[str, list[float | None]] = {name: [] for name in [*judged, "people"]}
    for rows in zip(*judged.values(), strict=True):
        group = rows[0].group
        for index, (better, other) in enumerate(group.pairs()):
            is_turned = int(digest([group.prompt, group.texts[better], group.texts[other]])[:8], 16) % 2 == 1
            labels = [row.labels[index] for row in rows]
            said = [*(None if label.errors else label.probability for label in labels), group.probability]
            for name, p in zip(opinions, said, strict=True):
                opinions[name].append(1 - p if is_turned and p is not None else p)
    result = {}
    for one, other in combinations(opinions, 2):
        both = [pair for pair in zip(opinions[one], opinions[other], strict=True) if None not in pair]
        # First (above 1/2), second, or tie.
        named = np.sign(np.array(both, dtype=float).reshape(-1, 2) - TIE)
        same = float((named[:, 0] == named[:, 1]).mean()) if both else NAN
        result[f"{one} / {other}"] = {"pairs": len(both), "kappa": cohens_kappa(*named.T), "agreement": same}
    return result


def cohens_kappa(one: np.ndarray, other: np.ndarray) -> float:
    """Return the agreement of two lists of opinions [n] beyond chance; NaN where agreement by chance is certain.

    Source: Cohen 1960, "A coefficient of agreement for nominal scales", equation 1.
    """
    if not len(one):
        return NAN
    observed = np.mean(one == other)
    expected = sum(np.mean(one == value) * np.mean(other == value) for value in np.unique(one))
    return float((observed - expected) / (1 - expected)) if expected < 1 else NAN


def findings(metrics: dict[str, Any]) -> list[str]:
    """Return what a reader of a judge's metrics should not overlook, as sentences without a full stop."""
    lines = [line for line in judge_warnings(metrics["position"]) if "contradicts itself" not in line]
    low, _ = metrics["accuracy_interval"]
    if metrics["decided"] and not low > TIE:
        lines.append("the judge is not shown to be better than chance: the interval of its accuracy reaches 50%")
    consistency = metrics["position"]["position_consistency"]
    if consistency is not None and consistency < 1 - MOST_PREFERENCE_GAP:
        asked_once = metrics["one_order_accuracy"]
        lines.append(
            f"the judge contradicts itself in {1 - consistency:.0%} of the pairs when their order changes; asked in"
            f" one order alone it would be right in {asked_once:.1%}"
        )
    if metrics["decided"] < FEWEST_ROWS:
        return lines
    for name, word in (("length", "longer"), ("format", "more formatted")):
        bias = metrics[name]
        gap = bias["preferred"] - bias["preferred_by_people"]
        low, high = bias["log_odds_interval"]
        if abs(gap) >= MOST_PREFERENCE_GAP and (low > 0 or high < 0) and (gap > 0) == (low > 0):
            lines.append(
                f"the judge prefers the {word} completion in {bias['preferred']:.0%} of the pairs, people in"
                f" {bias['preferred_by_people']:.0%}; it is right in {bias['accuracy_more']:.0%} where the better one"
                f" is {word}, and in {bias['accuracy_less']:.0%} where it is not"
            )
    if metrics["calibration_error"] > MOST_CALIBRATION_ERROR:
        lines.append(
            f"the judge's probabilities are {metrics['calibration_error']:.2f} off on average (calibration error);"
            " labels made of them are too sure, or not sure enough"
        )
    return lines


def _share(name: str, part: float, whole: int) -> dict[str, Any]:
    return {name: part / whole if whole else NAN, f"{name}_interval": list(wilson_interval(part, whole))}
