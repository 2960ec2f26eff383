"""Metrics of a reward model on preference rows, and of a student next to its teacher.

First the scores and labels of the rows, then the arithmetic: accuracy, calibration, intervals and correlations. A
lead is the score of `chosen` minus the score of `rejected`; a label is the probability that `chosen` is better.
"""

from __future__ import annotations

import json
import timeit
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor

from onetrunk.data.rows import SIDES, TEMPLATE_COLUMNS, stopped_column
from onetrunk.ops.win_rate import estimate, resampled
from onetrunk.parallel.sharding import whole_size
from onetrunk.reward_models.distill import Teacher
from onetrunk.rewards.model import ModelReward
from onetrunk.rewards.reward import Completion
from onetrunk.types import Prompt, message_text

# Rows of one timing, and the number of timings. The fastest counts, since other load can only slow one down.
TIMED_ROWS = 256
TIMINGS = 3
# Of an interval.
RESAMPLES = 1000
NAN = float("nan")


@dataclass(frozen=True)
class ScoredPairs:
    """The scores of a reward model on n preference rows."""

    chosen: Tensor  # [n] scores.
    rejected: Tensor  # [n] scores.
    labels: Tensor  # [n] probability that `chosen` is better.
    lengths: Tensor  # [2, n] tokens of `chosen` and of `rejected`.
    prompts: Sequence[str]  # n texts, equal for pairs of one prompt.

    @property
    def leads(self) -> Tensor:
        """Scores [n] of `chosen` minus scores of `rejected`."""
        return self.chosen - self.rejected

    @property
    def scores(self) -> Tensor:
        """Scores [2n], the chosen ones first."""
        return torch.cat([self.chosen, self.rejected])


@dataclass(frozen=True)
class Bin:
    """A group of pairs with similar confidence or margin, of which low is the least; means are NaN for no pairs."""

    low: float
    high: float
    count: int
    predicted: float  # Mean probability that the scores give to the completion they prefer.
    observed: float  # Mean label of that completion.


def labels_of(rows: Dataset, column: str = "probability") -> Tensor:
    """Return the labels [n] of preference rows: that column, or 1 if there is none."""
    if column in rows.column_names:
        return torch.tensor(rows[column], dtype=torch.float64)
    return torch.ones(len(rows), dtype=torch.float64)


def true_labels(rows: Dataset, has_teacher: bool) -> Tensor | None:
    """Return labels [n] that do not come from the teacher; None if there are none.

    These are the column `label` (probability that `chosen` is better, by people or by construction); without it, where
    the teacher is a reward model, the rows' own preference.
    """
    if "label" in rows.column_names:
        return labels_of(rows, "label")
    return labels_of(rows) if has_teacher else None


def score_pairs(reward: ModelReward, rows: Dataset, labels: Tensor) -> ScoredPairs:
    """Score both sides of preference rows; a completion that was cut off is read without an end token."""
    stopped = {name: stopped_column(rows, f"{name}_stopped") for name in SIDES}
    columns = {name: rows[name] for name in TEMPLATE_COLUMNS if name in rows.column_names}
    sides = [reward(rows["prompt"], rows[name], completion_stopped=stopped[name], **columns) for name in SIDES]
    return _scored_pairs(sides, labels, reward, rows)


def teacher_labels(teacher: Teacher | None, reward: ModelReward, rows: Dataset) -> tuple[Tensor, ScoredPairs | None]:
    """Return the teacher's probabilities [n] and scores. Without a reward model as the teacher: the rows' own
    probabilities, and None."""
    if teacher is None:
        return labels_of(rows), None
    labelled = teacher.label_pairs(rows)
    probabilities = labels_of(labelled)
    sides = [labelled[f"{name}_score"] for name in SIDES]
    return probabilities, _scored_pairs(sides, probabilities, reward, rows)


def _scored_pairs(sides: Sequence[list[float]], labels: Tensor, reward: ModelReward, rows: Dataset) -> ScoredPairs:
    """Return the scores of both sides with what the metrics need; the reward model's tokenizer counts the tokens."""
    lengths = []
    for name in SIDES:
        texts = [c if isinstance(c, str) else message_text(c[-1]) for c in rows[name]]
        lengths.append([len(ids) for ids in reward.tokenizer(texts, add_special_tokens=False)["input_ids"]])
    prompts = [json.dumps(prompt) for prompt in rows["prompt"]]
    return ScoredPairs(*map(torch.tensor, sides), labels, torch.tensor(lengths), prompts)


def _agreement_metrics(name: str, leads: Tensor, labels: Tensor, prompts: Sequence[str]) -> dict[str, Any]:
    """Return how well leads agree with labels; `name` is the accuracy's name."""
    bins = reliability(leads, labels)
    return {
        "pairs": len(leads),
        name: accuracy(leads, labels),
        f"{name}_interval": list(accuracy_interval(leads, labels, prompts)),
        "loss": preference_loss(leads, labels),
        "calibration_error": expected_calibration_error(bins),
        "reliability": [asdict(b) for b in bins],
    }


def preference_metrics(pairs: ScoredPairs) -> dict[str, Any]:
    """Return accuracy with its interval, accuracy by margin, calibration, and the influence of length.

    `length/score_correlation` is Pearson's, over all completions; `length/lead_correlation` correlates the lead
    with the difference in tokens, which does not depend on the prompt.
    """
    leads, labels = pairs.leads, pairs.labels
    differences = (pairs.lengths[0] - pairs.lengths[1]).double()
    return _agreement_metrics("accuracy", leads, labels, pairs.prompts) | {
        "score_mean": float(pairs.scores.double().mean()),
        "score_std": float(pairs.scores.double().std()),
        "length/score_correlation": pearson(pairs.scores, torch.cat(list(pairs.lengths))),
        "length/lead_correlation": pearson(leads, differences),
        "accuracy_by_margin": [asdict(b) for b in by_margin(leads, labels)],
    }


def fidelity_metrics(student: ScoredPairs, probabilities: Tensor, teacher: ScoredPairs | None) -> dict[str, Any]:
    """Return how well a student reproduces its teacher on the same rows.

    Args:
        probabilities: [n] that the teacher gives to `chosen`.
        teacher: its scores; None for a judge, which has none.

    Returns:
        `agreement` (pairs in the same order), `calibration_error` and `loss` against the teacher's probabilities. For
        a teacher with scores also `spearman` and `pearson` over all completions.
    """
    metrics = _agreement_metrics("agreement", student.leads, probabilities.double(), student.prompts)
    if teacher is not None:
        metrics |= {
            "agreement": agreement(student.leads, teacher.leads),
            "agreement_interval": list(accuracy_interval(student.leads, order_of(teacher.leads), student.prompts)),
            "spearman": spearman(student.scores, teacher.scores),
            "pearson": pearson(student.scores, teacher.scores),
        }
    return metrics


def cost_metrics(
    rewards: Sequence[ModelReward], prompts: list[Prompt], completions: list[Completion]
) -> dict[str, float]:
    """Measure the cost of scoring: seconds per 1,000 completions, and weights in MiB.

    Args:
        rewards: one model, or the members of an ensemble, which run one after the other: seconds and weights add up.
        prompts, completions: the rows to score; at most TIMED_ROWS of them are used.
    """
    prompts, completions = prompts[:TIMED_ROWS], completions[:TIMED_ROWS]

    def score() -> None:
        for reward in rewards:
            reward(prompts=prompts, completions=completions)

    sizes = [whole_size(reward.model) for reward in rewards]
    return {
        "parameters": sum(number for number, _ in sizes),
        "weights_mib": sum(num_bytes for _, num_bytes in sizes) / 2**20,
        "seconds_per_1000": 1000 * min(timeit.repeat(score, number=1, repeat=TIMINGS)) / len(prompts),
    }


def compared_costs(
    student: Sequence[ModelReward],
    teacher: Sequence[ModelReward],
    prompts: list[Prompt],
    completions: list[Completion],
) -> dict[str, dict[str, float]]:
    """Return the costs of student and teacher, and the teacher's as multiples of the student's."""
    own, other = (cost_metrics(side, prompts, completions) for side in (student, teacher))
    names = {"speed": "seconds_per_1000", "memory": "weights_mib", "size": "parameters"}
    ratios = {name: other[key] / own[key] for name, key in names.items()}
    return {"student": own, "teacher": other, "teacher_over_student": ratios}


def accuracy(leads: Tensor, labels: Tensor) -> float:
    """Return the share of pairs in which the completion preferred by the label has the higher score.

    Args:
        leads: [n]; a lead of 0 counts half.
        labels: [n] in [0, 1]; pairs with the label 1/2 are left out.

    Returns:
        In [0, 1]; NaN if no pair is left.
    """
    return _mean(_is_right(leads, labels)[labels != 0.5])


def agreement(leads: Tensor, other_leads: Tensor) -> float:
    """Return the share of pairs that two scorers put in the same order; ties in `other_leads` are left out."""
    return accuracy(leads, order_of(other_leads))


def order_of(leads: Tensor) -> Tensor:
    """Return the labels [n] that say which completion leads: 1, 0, or 1/2 for a tie."""
    return torch.where(leads == 0, 0.5, (leads > 0).double())


def preference_loss(leads: Tensor, labels: Tensor) -> float:
    """Return the mean cross-entropy of the labels under sigmoid(lead), nats; log 2 for equal scores."""
    leads, labels = leads.double(), labels.double()
    return _mean(-(labels * F.logsigmoid(leads) + (1 - labels) * F.logsigmoid(-leads)))


def reliability(leads: Tensor, labels: Tensor, num_bins: int = 10) -> list[Bin]:
    """Return the reliability diagram of a scorer: its confidence against how often it is right.

    The confidence in a pair is sigmoid(|lead|), in bins of equal width between 1/2 and 1; observed is the label of the
    preferred completion.

    Source: Guo et al. 2017 (1706.04599), section 2.
    """
    confidences, observed = _preferred(leads, labels)
    edges = torch.linspace(0.5, 1, num_bins + 1, dtype=torch.float64)
    places = torch.bucketize(confidences, edges[1:-1], right=True)
    return [_bin(edges[i], edges[i + 1], confidences[places == i], observed[places == i]) for i in range(num_bins)]


def expected_calibration_error(bins: list[Bin]) -> float:
    """Return the mean gap |predicted - observed| of a reliability diagram, weighted by pairs; NaN without pairs.

    Source: Guo et al. 2017 (1706.04599), equation 3.
    """
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.predicted - b.observed) for b in bins if b.count) / total if total else NAN


def by_margin(leads: Tensor, labels: Tensor, num_bins: int = 5) -> list[Bin]:
    """Return the pairs in equal shares by |lead|, the smallest first: accuracy should rise with it."""
    sizes = leads.double().abs()
    confidences, observed = _preferred(leads, labels)
    shares = [share for share in torch.tensor_split(torch.argsort(sizes, stable=True), num_bins) if len(share)]
    return [_bin(sizes[s].min(), sizes[s].max(), confidences[s], observed[s]) for s in shares]


def accuracy_interval(leads: Tensor, labels: Tensor, groups: Sequence[Hashable]) -> tuple[float, float]:
    """Return the 95% interval of the accuracy, bootstrapped over groups: pairs of one prompt are not independent.

    Returns:
        The 2.5th and the 97.5th percentile; if every pair is right, or none, the bound of Clopper and Pearson for as
        many prompts. NaN with decided pairs of fewer than two prompts.

    Source: Efron 1979; over clusters: Cameron, Gelbach and Miller 2008.
    """
    decided = labels != 0.5
    if not decided.any():
        return NAN, NAN
    places = {name: index for index, name in enumerate(dict.fromkeys(groups))}
    clusters = torch.tensor([places[name] for name in groups])
    counts = torch.stack([_is_right(leads, labels) * decided, decided.double()], dim=1)
    totals = torch.cat([times @ counts for times in resampled(clusters, RESAMPLES, seed=0)])
    shares, value = (totals[:, 0] / totals[:, 1])[totals[:, 1] > 0], accuracy(leads, labels)
    found = estimate(value, [shares], value, len(clusters[decided].unique()))
    return found.low, found.high


def ranks(x: Tensor) -> Tensor:
    """Return the rank [n] of every entry, from 1; equal entries get the mean of their ranks."""
    _, places, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[places]


def pearson(x: Tensor, y: Tensor) -> float:
    """Return the correlation of two [n] tensors; NaN where one does not vary or n is below 2."""
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1]) if len(x) > 1 else NAN


def spearman(x: Tensor, y: Tensor) -> float:
    """Return the rank correlation of two [n] tensors, ties at their mean rank; NaN where one does not vary."""
    return pearson(ranks(x), ranks(y)) if len(x) > 1 else NAN


def _is_right(leads: Tensor, labels: Tensor) -> Tensor:
    """Return 1 where lead and label prefer the same completion, 0 where they differ, and 1/2 for a tie."""
    return (torch.sign(leads.double()) * torch.sign(labels.double() - 0.5) + 1) / 2


def _preferred(leads: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence in the completion that the scores prefer, and its label; both [n], 1/2 for a tie."""
    labels = torch.where(leads > 0, labels.double(), 1 - labels.double())
    return torch.sigmoid(leads.double().abs()), torch.where(leads == 0, 0.5, labels)


def _bin(low: Tensor, high: Tensor, predicted: Tensor, observed: Tensor) -> Bin:
    return Bin(float(low), float(high), len(observed), _mean(predicted), _mean(observed))


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if len(x) else NAN
