"""What is done to raw scores before PPO sees them: penalties, and normalisation by running moments.

Source of the merge of moments: Chan, Golub, LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing
Sample Variances", equations 2.1.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

SMALLEST_STD = 1e-8


def missing_eos_penalty(scores: Tensor, stopped: Tensor, penalty: float) -> Tensor:
    """Subtract `penalty` from the score of every completion that was cut off before a stop token.

    Args:
        scores: [n] one raw number per completion.
        stopped: [n] bool, True where the completion ended at a stop token.
        penalty: in units of the score, not negative.
    """
    return torch.where(stopped.bool(), scores, scores - penalty)


def length_penalty(scores: Tensor, lengths: Tensor, max_completion_length: int, penalty: float) -> Tensor:
    """Subtract `penalty * length / max_completion_length` from every score.

    Args:
        scores: [n] one raw number per completion.
        lengths: [n] tokens of the completion, including the stop token.
        max_completion_length: tokens of the longest possible completion.
        penalty: in units of the score, at the full length; not negative.
    """
    return scores - penalty * lengths.to(scores.dtype) / max_completion_length


def score_moments(scores: Tensor) -> tuple[float, float, float]:
    """Return (count, mean, m2) of the finite entries of `scores` in float64; (0, 0, 0) if there are none."""
    finite = scores[torch.isfinite(scores)].double()
    if finite.numel() == 0:
        return 0.0, 0.0, 0.0
    mean = finite.mean()
    return float(finite.numel()), float(mean), float((finite - mean).square().sum())


@dataclass
class RunningMoments:
    """Moments of all scores so far, merged batch by batch and saved in the checkpoint.

    Args:
        count: number of scores.
        mean: their mean.
        m2: sum of squared differences from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 0 before the second score."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, count: float, mean: float, m2: float) -> None:
        """Merge the moments of more scores; a count of 0 changes nothing.

        Raises:
            ValueError: a value is non-finite, or count or m2 is negative.
        """
        _check_moments(count, mean, m2)
        if count == 0:
            return
        total = self.count + count
        difference = mean - self.mean
        self.m2 += m2 + difference * difference * (self.count * count / total)
        self.mean += difference * (count / total)
        self.count = total

    def normalize(self, scores: Tensor, shift_mean: bool = True, clip: float | None = None) -> Tensor:
        """Return (`scores` - mean) / std, then clipped; NaN stays NaN.

        Does not divide while there are fewer than two scores or all are equal.

        Args:
            scores: [n] raw scores.
            shift_mean: False only divides, so that scores keep their sign.
            clip: largest absolute value of the result; None: no limit.
        """
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be greater than 0 or None, got {clip}")
        shifted = scores - self.mean if shift_mean else scores
        scaled = shifted / self.std if self.std > SMALLEST_STD else shifted
        return scaled if clip is None else scaled.clamp(-clip, clip)

    def state_dict(self) -> dict[str, float]:
        """Return count, mean and m2 as floats, which JSON stores exactly."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the moments of a `state_dict`.

        Raises:
            ValueError: the keys differ, or the values are invalid as in `update`.
        """
        if set(state) != {"count", "mean", "m2"}:
            raise ValueError(f"the state of RunningMoments has the keys {sorted(state)}; expected count, m2, mean")
        _check_moments(**state)
        self.count, self.mean, self.m2 = float(state["count"]), float(state["mean"]), float(state["m2"])


def _check_moments(count: float, mean: float, m2: float) -> None:
    if not all(math.isfinite(value) for value in (count, mean, m2)) or count < 0 or m2 < 0:
        raise ValueError(
            f"moments must be finite with count and m2 at least 0, got count {count}, mean {mean}, m2 {m2}; "
            "leave non-finite scores out (score_moments does)"
        )
