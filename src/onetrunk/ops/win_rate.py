"""Win rates of one side against another, named as in AlpacaEval 2, with confidence intervals.

A label is the probability that a pair's first completion is the better one, the mean over both orders of a judge.
`win_rate` is the mean label, `discrete_win_rate` counts wins and half of the ties, and `length_controlled_win_rate` is
the prediction of a logistic regression of the labels on the difference of lengths, at equal length. Pairs of one
prompt are a cluster and are resampled together. Computed in float64; an empty reduction gives NaN, never 0.

Source: AlpacaEval 2 (github.com/tatsu-lab/alpaca_eval, `metrics/`); the length-controlled win rate follows Dubois et
al. 2024 (2404.04475, equation 2) without what exists only for AlpacaEval's prompts and baseline (difficulties and
rewritten answers). On 57 models of the leaderboard the other metrics equal the leaderboard's, and this one is within
0.7 points if each side is the longer one in about 40% of the pairs or more. If one side is longer in fewer than 20%,
it is up to 24 points off, mostly too high for the shorter side; `is_extrapolated` reports that.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")
KINDS = ("win_rate", "discrete_win_rate", "length_controlled_win_rate")
TIE = 0.5
CONFIDENCE = 0.95
# Per unit of weight, on each coefficient: keeps the fit finite if every label is 1, and moves it by 1e-4 otherwise.
RIDGE = 1e-4
# Most entries [resamples, pairs] in memory at once.
CHUNK = 2**21
MAX_NEWTON_STEPS, MAX_HALVINGS = 200, 60
LEAST_RARER_SHARE = 0.2


@dataclass(frozen=True)
class Estimate:
    """A metric and its confidence interval; the bounds are NaN with fewer than two prompts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class WinRate:
    """Win rates of one side against another.

    Args:
        wins, ties, losses: numbers of pairs, seen from the first side; a pair whose two orders contradict each other
            is a tie.
        win_rate: mean label.
        standard_error: the standard error of `win_rate`; pairs of one prompt count as one observation.
        discrete_win_rate: (wins + ties / 2) / pairs.
        length_controlled_win_rate: the win rate at equal length; NaN if the differences are all equal and not 0,
            because length and quality cannot be separated then.
        mean_length_difference: first minus second.
        is_extrapolated: True if fewer than LEAST_RARER_SHARE of the pairs have a difference of at most 0, or of at
            least 0, so that there is little data near equal length.
    """

    pairs: int
    prompts: int
    wins: int
    ties: int
    losses: int
    win_rate: Estimate
    standard_error: float
    discrete_win_rate: Estimate
    length_controlled_win_rate: Estimate
    mean_length_difference: float
    is_extrapolated: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics by name, each interval as a list of two next to its metric."""
        metrics = {name: value for name, value in vars(self).items() if not isinstance(value, Estimate)}
        for name in KINDS:
            estimate = getattr(self, name)
            metrics |= {name: estimate.value, f"{name}_interval": [estimate.low, estimate.high]}
        return metrics


def pair_outcomes(labels: Tensor, consistent: Tensor | None = None, tie_margin: float = 0.0) -> Tensor:
    """Return [n] float64: 1 where the first completion wins, 0 where it loses, 1/2 for a tie.

    Args:
        labels: [n] in [0, 1].
        consistent: [n] bool, False if the two orders of a judge contradict each other: a tie, whatever their mean.
        tie_margin: labels at most this far from 1/2 are ties; below 1/2.

    Raises:
        ValueError: labels outside [0, 1].
    """
    labels = labels.double()
    if not bool(((labels >= 0) & (labels <= 1)).all()):
        raise ValueError("labels must be probabilities from 0 to 1; leave pairs without a label out")
    lead = labels - TIE
    outcomes = torch.where(lead.abs() <= tie_margin, TIE, (lead > 0).double())
    return outcomes if consistent is None else torch.where(consistent, outcomes, TIE)


def win_rate(
    labels: Tensor,
    prompts: Sequence[Hashable],
    length_differences: Tensor,
    *,
    consistent: Tensor | None = None,
    tie_margin: float = 0.0,
    num_resamples: int = 2000,
    seed: int = 0,
) -> WinRate:
    """Return the win rates of the first side, with percentile intervals over resampled prompts.

    All three metrics use the same resamples. The scale of the length term is that of the whole sample.

    Args:
        labels: [n] in [0, 1].
        prompts: n keys; pairs of one key are drawn together.
        length_differences: [n] first minus second, in any unit; characters in AlpacaEval.
        consistent, tie_margin: as in `pair_outcomes`.
        num_resamples: how often the prompts are resampled, with replacement.
        seed: decides the resamples.

    Raises:
        ValueError: labels outside [0, 1].
    """
    labels, differences = labels.double(), length_differences.double()
    outcomes = pair_outcomes(labels, consistent, tie_margin)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(prompts))}
    clusters = torch.tensor([numbers[key] for key in prompts])
    features = _length_features(differences)

    def at_equal_length(weights: Tensor) -> Tensor:
        if features is None:
            return torch.full((len(weights),), NAN, dtype=torch.float64)
        return torch.sigmoid(fit_logistic(features, labels, weights)[:, 0])

    resamples = [
        [weights @ labels / weights.sum(1), weights @ outcomes / weights.sum(1), at_equal_length(weights)]
        for weights in resampled(clusters, num_resamples, seed)
    ]
    values = (float(labels.mean()), float(outcomes.mean()), float(at_equal_length(torch.ones(1, len(labels)))))
    # Of the labels, or the outcomes: 0 or 1 if they all agree.
    means = (values[0], values[1], values[0])
    columns = zip(values, zip(*resamples, strict=True), means, strict=True)
    estimates = [estimate(*column, len(numbers)) for column in columns]
    return WinRate(
        pairs=len(labels),
        prompts=len(numbers),
        wins=int((outcomes == 1).sum()),
        ties=int((outcomes == TIE).sum()),
        losses=int((outcomes == 0).sum()),
        **dict(zip(KINDS, estimates, strict=True)),
        standard_error=_standard_error(labels, clusters),
        mean_length_difference=float(differences.mean()),
        is_extrapolated=min(float((sign * differences >= 0).double().mean()) for sign in (1, -1)) < LEAST_RARER_SHARE,
    )


def fit_logistic(features: Tensor, labels: Tensor, weights: Tensor, ridge: float = RIDGE) -> Tensor:
    """Return the coefficients [b, k] of b weighted logistic regressions of the same rows, by Newton's method.

    Each maximises sum_i w_i (y_i log p_i + (1 - y_i) log(1 - p_i)) - ridge / 2 * sum_i w_i * |coefficients|^2, which
    has one maximum. A step that would not raise it is halved.

    Args:
        features: [n, k], a column of ones among them for an intercept.
        labels: [n] in [0, 1].
        weights: [b, n], 0 or more, with no row of zeros.
        ridge: above 0.

    Raises:
        RuntimeError: no maximum was found, because a number is not finite.
    """
    features, labels, weights = features.double(), labels.double(), weights.double()
    weights = weights / weights.sum(1, keepdim=True)
    identity = torch.eye(features.shape[1], dtype=torch.float64)
    coefs = torch.zeros(len(weights), features.shape[1], dtype=torch.float64)

    def loss(at: Tensor) -> Tensor:
        logits = at @ features.T
        # Not softplus, which torch makes a straight line above 20.
        losses = torch.logaddexp(logits, torch.zeros_like(logits)) - labels * logits
        return (weights * losses).sum(1) + ridge / 2 * at.square().sum(1)

    value = loss(coefs)
    for _ in range(MAX_NEWTON_STEPS):
        probs = torch.sigmoid(coefs @ features.T)
        gradient = (weights * (probs - labels)) @ features + ridge * coefs
        curvature = torch.einsum("bn,nk,nl->bkl", weights * probs * (1 - probs), features, features)
        step = torch.linalg.solve(curvature + ridge * identity, gradient)
        # The gain of a full step, in nats; with the ridge, 1e-18 is an error of at most 1e-7 in a coefficient.
        if bool(((gradient * step).sum(1) < 1e-18).all()):
            return coefs
        size = torch.ones(len(coefs), 1, dtype=torch.float64)
        for _ in range(MAX_HALVINGS):
            # A rounding error does not count as worse.
            is_worse = loss(coefs - size * step) > value + 1e-14 * value.abs()
            if not is_worse.any():
                break
            size = torch.where(is_worse[:, None], size / 2, size)
        coefs = torch.where(is_worse[:, None], coefs, coefs - size * step)
        value = loss(coefs)
    raise RuntimeError(f"the length regression found no maximum in {MAX_NEWTON_STEPS} steps; are all labels finite?")


def _length_features(differences: Tensor) -> Tensor | None:
    """Return the features [n, 2] of P = sigmoid(intercept + slope * tanh(difference / standard deviation)).

    None if all differences are one number, not 0.
    """
    scale = float(differences.std()) if len(differences) > 1 else 0.0
    # All differences are one number, up to rounding.
    is_constant = scale <= 1e-12 * max(1.0, float(differences.abs().max()))
    if is_constant and bool((differences != 0).any()):
        return None
    term = torch.zeros_like(differences) if is_constant else torch.tanh(differences / scale)
    return torch.stack([torch.ones_like(differences), term], dim=1)


def resampled(clusters: Tensor, num_resamples: int, seed: int) -> Iterator[Tensor]:
    """Yield weights [b, n]: how often the cluster of each pair was drawn, for b of the resamples at a time."""
    count = int(clusters.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    size = max(1, CHUNK // max(count, len(clusters)))
    for start in range(0, num_resamples, size):
        number = min(size, num_resamples - start)
        resamples = torch.randint(count, (number, count), generator=generator)
        times = torch.zeros(number, count, dtype=torch.float64)
        times.scatter_add_(1, resamples, torch.ones_like(times))
        yield times[:, clusters]


def estimate(value: float, resamples: Sequence[Tensor], mean: float, num_prompts: int) -> Estimate:
    """Return a metric with its interval: the percentiles of its resamples.

    Args:
        value: the metric.
        resamples: its values over resampled prompts, in parts.
        mean: share of right or won pairs; at 0 and 1 the resamples would say that nothing is uncertain.
        num_prompts: different ones; below 2 the interval is NaN.
    """
    if num_prompts < 2 or math.isnan(value):
        return Estimate(value, NAN, NAN)
    tail = (1 - CONFIDENCE) / 2
    # Where all resamples agree, another sample might not: Clopper and Pearson's bound for no failure in n. No other
    # sample of n says more.
    bound = tail ** (1 / num_prompts)
    if mean in (0.0, 1.0):
        return Estimate(value, bound, 1.0) if mean else Estimate(value, 0.0, 1 - bound)
    low, high = torch.cat(list(resamples)).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Estimate(value, min(low, bound), max(high, 1 - bound))


def _standard_error(labels: Tensor, clusters: Tensor) -> float:
    """Return the standard error of the mean label over clusters; with one pair each, the usual s / sqrt(n)."""
    count = int(clusters.max()) + 1
    if count < 2:
        return NAN
    sums = torch.zeros(count, dtype=torch.float64).scatter_add_(0, clusters, labels - labels.mean())
    return float((sums.square().sum() * count / (count - 1)).sqrt() / len(labels))
