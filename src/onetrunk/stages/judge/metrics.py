"""How well a judge agrees with people: accuracy, calibration, position, length and format, and agreement of judges.

A row has completions that people call better and others. The judge sees each better one with each of the others, in
both orders. P is the judge's probability that the completion people call better is the better one, the mean over
orders and principles. A row is right if P is above 1/2 for all of its pairs; k pairs at exactly 1/2 and none below
count 1 / (k + 1), so that the best of four scores as in RewardBench 2. Computed in float64; a mean of nothing is NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import NormalDist, fmean
from typing import Any

import torch
from torch import Tensor

from onetrunk.data.groups import Group
from onetrunk.judges.base import digest
from onetrunk.judges.verdicts import TIE, JudgeStatistics, PairLabel, judge_warnings
from onetrunk.judges.win_rate import CONFIDENCE, fit_logistic
from onetrunk.reward_models.metrics import expected_calibration_error, pearson, preference_loss, reliability
from onetrunk.types import Prompt

NAN = float("nan")
ALL = "all"
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


@dataclass(frozen=True)
class Decided:
    """A pair with a label.

    Args:
        probability: the judge's, that the better completion is the better one.
        label: the people's, above 1/2 up to 1.
        length: characters of the better completion minus those of the other.
        marks: the same of marks of Markdown.
    """

    probability: float
    label: float
    length: int
    marks: int


def decided_pairs(judged: Sequence[Judged]) -> list[Decided]:
    """Return the pairs of the rows that have all their labels and that people do not call equal."""
    pairs = []
    for row in judged:
        texts = row.group.texts
        lengths, marks = [len(text) for text in texts], [len(MARKDOWN.findall(text)) for text in texts]
        for (better, other), label in zip(row.group.pairs(), row.labels, strict=True):
            differences = lengths[better] - lengths[other], marks[better] - marks[other]
            pairs.append(Decided(label.probability, row.group.probability, *differences))
    return pairs


def judge_metrics(judged: Sequence[Judged], weights: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Return the metrics of a judge on some rows.

    Args:
        judged: the rows, each with its labels.
        weights: of the principles, in the order of the votes.
        seed: of the resamples.
    """
    counted = [row for row in judged if row.group.probability != TIE]
    decided = [row for row in counted if row.is_decided]
    pairs, num_right = decided_pairs(decided), sum(row.score for row in decided)
    consistent = sum(row.is_consistently_right for row in decided)
    statistics = JudgeStatistics()
    for row in judged:
        for label in row.labels:
            statistics.add(label)
    bins = reliability(*_leads_and_labels(pairs))
    unjudged = sum(any(label.errors for label in row.labels) for row in counted)
    metrics = {
        "rows": len(judged),
        "equal_for_people": len(judged) - len(counted),
        "decided": len(decided),
        "unjudged": unjudged,
        "abstained": len(counted) - len(decided) - unjudged,
        "accuracy": _ratio(num_right, len(decided)),
        "accuracy_interval": list(wilson_interval(num_right, len(decided))),
        "consistent_accuracy": _ratio(consistent, len(decided)),
        "consistent_accuracy_interval": list(wilson_interval(consistent, len(decided))),
        "one_order_accuracy": one_order_accuracy(decided, weights),
        "ties": sum(pair.probability == TIE for pair in pairs),
        "pairs": len(pairs),
        "loss": preference_loss(*_leads_and_labels(pairs)),
        "calibration_error": expected_calibration_error(bins),
        "reliability": [asdict(b) for b in bins],
        "position": statistics.as_dict(),
    }
    metrics["length"] = bias_metrics(pairs, [pair.length for pair in pairs])
    metrics["format"] = bias_metrics(pairs, [pair.marks for pair in pairs])
    for name, (slope, interval) in zip(("length", "format"), slopes(pairs, seed), strict=True):
        metrics[name] |= {"log_odds": slope, "log_odds_interval": interval}
    return metrics


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
    for row in judged:
        for label in row.labels:
            for order in range(2):
                asked = [(orders[order], w) for (_, orders), w in zip(label.votes, weights, strict=True)]
                known = [(p, weight) for p, weight in asked if p is not None]
                if known:
                    mean = sum(p * weight for p, weight in known) / sum(weight for _, weight in known)
                    right.append(TIE if mean == TIE else float(mean > TIE))
    return fmean(right) if right else NAN


def bias_metrics(pairs: Sequence[Decided], differences: Sequence[int]) -> dict[str, Any]:
    """Return how a judge treats pairs whose completions differ in something (length, marks of Markdown).

    Args:
        pairs: with a label.
        differences: of the better completion minus the other, in that thing.

    Returns:
        `preferred`: share of the pairs that differ in which the judge prefers the completion that has more;
        `preferred_by_people`: the same of the people; `accuracy_more` and `accuracy_less`: accuracy on the pairs whose
        better completion has more, or less, with their intervals; `correlation` of P with the difference.
    """
    differing = [(p, d) for p, d in zip(pairs, differences, strict=True) if d]
    more = [pair for pair, d in differing if d > 0]
    less = [pair for pair, d in differing if d < 0]
    preferred = sum(map(_right, more)) + len(less) - sum(map(_right, less))
    values: dict[str, Any] = {
        "pairs_that_differ": len(differing),
        "preferred": _ratio(preferred, len(differing)),
        "preferred_interval": list(wilson_interval(preferred, len(differing))),
        "preferred_by_people": _ratio(len(more), len(differing)),
    }
    for name, part in (("more", more), ("less", less)):
        right = sum(map(_right, part))
        values[f"accuracy_{name}"] = _ratio(right, len(part))
        values[f"accuracy_{name}_interval"] = list(wilson_interval(right, len(part)))
    probabilities = torch.tensor([pair.probability for pair in pairs], dtype=torch.float64)
    values["correlation"] = pearson(probabilities, torch.tensor(differences)) if len(pairs) > 1 else NAN
    return values


def slopes(pairs: Sequence[Decided], seed: int = 0) -> list[tuple[float, list[float]]]:
    """Return the effect of length, and of format, on the judge at equal length and format otherwise.

    The logistic regression P = sigmoid(a + b tanh(length / s) + c tanh(marks / t)) has the pairs in the order that
    people prefer, so `a` is the judge's agreement with them, and b and c what it adds for a completion that is longer
    or has more marks; s and t are standard deviations of the differences. Intervals are 95% over resampled pairs.

    Returns:
        b and c, in log odds, each with its interval; NaN where no pair differs.
    """
    columns, found = [torch.ones(len(pairs), dtype=torch.float64)], []
    for name in ("length", "marks"):
        differences = torch.tensor([float(getattr(pair, name)) for pair in pairs], dtype=torch.float64)
        scale = float(differences.std()) if len(pairs) > 1 else 0.0
        found.append(scale > 0)
        columns += [torch.tanh(differences / scale)] if scale > 0 else []
    features = torch.stack(columns, dim=1)
    if len(pairs) < 2 or not any(found):
        return [(NAN, [NAN, NAN])] * 2
    labels = torch.tensor([pair.probability for pair in pairs], dtype=torch.float64)
    whole = fit_logistic(features, labels, torch.ones(1, len(pairs), dtype=torch.float64))[0, 1:]
    drawn = torch.cat([fit_logistic(features, labels, w)[:, 1:] for w in _resampled(len(pairs), seed)])
    tails = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=torch.float64)
    low, high = torch.quantile(drawn, tails, dim=0)
    known = iter(zip(whole.tolist(), low.tolist(), high.tolist(), strict=True))
    entries = [next(known) if is_found else (NAN, NAN, NAN) for is_found in found]
    return [(slope, [lowest, highest]) for slope, lowest, highest in entries]


def orientation(prompt: Prompt, first: str, second: str) -> bool:
    """Return whether a pair is turned around before judges are compared; derived from its contents.

    In the order that people prefer, all judges would mostly say "first", and agreement by chance would be high.
    """
    return int(digest([prompt, first, second])[:8], 16) % 2 == 1


def cohens_kappa(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the agreement of two judges beyond chance; NaN where agreement by chance is certain.

    Args:
        one, other: [n] probabilities of the same pairs, in an order that does not depend on who is right. Each counts
            as first (above 1/2), second or tie.

    Source: Cohen 1960, "A coefficient of agreement for nominal scales", equation 1.
    """
    named = [[(p > TIE) - (p < TIE) for p in probabilities] for probabilities in (one, other)]
    if not named[0]:
        return NAN
    observed = fmean(float(a == b) for a, b in zip(*named, strict=True))
    shares = [[names.count(value) / len(names) for value in (-1, 0, 1)] for names in named]
    expected = sum(a * b for a, b in zip(*shares, strict=True))
    return (observed - expected) / (1 - expected) if expected < 1 else NAN


def agreement(judged: dict[str, Sequence[Judged]]) -> dict[str, dict[str, Any]]:
    """Return kappa and plain agreement of every two judges, and of each with the people, by "one / other".

    Args:
        judged: by the judge's name, the same rows for all.
    """
    opinions: dict[str, list[float | None]] = {name: [] for name in judged}
    people: list[float | None] = []
    for rows in zip(*judged.values(), strict=True):
        group = rows[0].group
        for index, (better, other) in enumerate(group.pairs()):
            is_turned = orientation(group.prompt, group.texts[better], group.texts[other])
            people.append(_turned(group.probability, is_turned))
            for name, row in zip(judged, rows, strict=True):
                label = row.labels[index]
                opinions[name].append(None if label.errors else _turned(label.probability, is_turned))
    named = {**opinions, "people": people}
    result = {}
    for first, one in enumerate(named):
        for other in list(named)[first + 1 :]:
            both = [(a, b) for a, b in zip(named[one], named[other], strict=True) if None not in (a, b)]
            firsts, seconds = [a for a, _ in both], [b for _, b in both]
            same = sum((a > TIE) - (a < TIE) == (b > TIE) - (b < TIE) for a, b in both)
            kappa = cohens_kappa(firsts, seconds)
            result[f"{one} / {other}"] = {"pairs": len(both), "kappa": kappa, "agreement": _ratio(same, len(both))}
    return result


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


def _resampled(number: int, seed: int) -> Iterator[Tensor]:
    """Yield weights [b, number]: how often each pair was drawn, in parts that fit in memory."""
    generator = torch.Generator().manual_seed(seed)
    size = max(1, 2**21 // number)
    for start in range(0, RESAMPLES, size):
        count = min(size, RESAMPLES - start)
        drawn = torch.randint(number, (count, number), generator=generator)
        weights = torch.zeros(count, number, dtype=torch.float64)
        yield weights.scatter_add_(1, drawn, torch.ones_like(weights))


def _leads_and_labels(pairs: Sequence[Decided]) -> tuple[Tensor, Tensor]:
    probabilities = torch.tensor([pair.probability for pair in pairs], dtype=torch.float64)
    leads = torch.logit(probabilities, eps=LEAST_PROBABILITY)
    return leads, torch.tensor([pair.label for pair in pairs], dtype=torch.float64)


def _right(pair: Decided) -> float:
    return TIE if pair.probability == TIE else float(pair.probability > TIE)


def _turned(probability: float | None, is_turned: bool) -> float | None:
    return probability if probability is None or not is_turned else 1 - probability


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else NAN
