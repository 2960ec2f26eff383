"""What is done to raw scores before PPO sees them: penalties, and normalisation by running moments."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from onetrunk.ops.masking import merge_moments
from onetrunk.utils.files import read_number

SMALLEST_STD = 1e-8


def missing_eos_penalty(scores: Tensor, stopped: Tensor, penalty: float) -> Tensor:
    """Subtract `penalty` from the score of every completion that was cut off before a stop token.

    Args:
        scores: [n] one raw number per completion.
        stopped: [n] bool, True where the completion ended at a stop token.
        penalty: what is subtracted, in units of the score; not negative.
    """
    return torch.where(stopped.bool(), scores, scores - penalty)


def length_penalty(scores: Tensor, lengths: Tensor, max_completion_length: int, penalty: float) -> Tensor:
    """Subtract `penalty * length / max_completion_length` from every score.

    Args:
        scores: [n] one raw number per completion.
        lengths: [n] tokens of the completion, including the stop token.
        max_completion_length: tokens of the longest possible completion.
        penalty: what is subtracted at the full length, in units of the score; not negative.
    """
    return scores - penalty * lengths.to(scores.dtype) / max_completion_length


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
        """Merge the moments of more scores; a count of 0 changes nothing."""
        if count:
            parts = torch.tensor([[self.count, self.mean, self.m2], [count, mean, m2]], dtype=torch.float64)
            self.count, self.mean, self.m2 = map(float, merge_moments([tuple(part) for part in parts]))

    @property
    def scale(self) -> float:
        """What `normalize` divides by: the standard deviation, or 1 while it is 0."""
        return self.std if self.std > SMALLEST_STD else 1.0

    def normalize(self, scores: Tensor) -> Tensor:
        """Return (`scores` - mean) / std; NaN stays NaN.

        Does not divide while there are fewer than two scores or all are equal.
        """
        return (scores - self.mean) / self.scale

    def state_dict(self) -> dict[str, float]:
        """Return count, mean and m2 as floats, which JSON stores exactly."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the moments of a `state_dict`."""
        self.count, self.mean, self.m2 = (read_number(state[name]) for name in ("count", "mean", "m2"))
