"""A frozen language-model head, and a running softmax over its tiles: what the loops and the kernels share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """A frozen language-model head and the transformations of its logits; fields as in `logprobs.token_logprobs`."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; logprobs need a temperature above 0")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; set a number above 0, or None for no soft-capping")

    @property
    def factor(self) -> float:
        """Product of the factors on every logit, before and after soft-capping."""
        return self.logit_scale / self.temperature

    def damping(self, logits: Tensor) -> Tensor | None:
        """Return the factor by which soft-capping lowers the slope of the logits, or None without soft-capping."""
        if self.softcap is None:
            return None
        # d tanh(u) / du = 1 - tanh(u)^2, and tanh(u) = logits * temperature / softcap
        return 1 - (logits * (self.temperature / self.softcap)) ** 2


@dataclass
class RunningSums:
    """Sums of n tokens over the tiles so far; all [n], v runs over the columns seen except the target's.

    Attributes:
        highest: the largest logit seen, the target's included.
        others: sum of exp(z_v - highest).
        spread: sum of exp(z_v - highest) * (z_v - highest).
        target: z_y; NaN until its column has been seen.
    """

    highest: Tensor
    others: Tensor
    spread: Tensor
    target: Tensor

    @classmethod
    def empty(cls, num_tokens: int, dtype: torch.dtype, device: torch.device) -> RunningSums:
        """Return the sums over no columns."""
        # The lowest finite number: -inf would make NaN of a tile in which every logit is -inf.
        highest = torch.full((num_tokens,), torch.finfo(dtype).min, dtype=dtype, device=device)
        return cls(highest, torch.zeros_like(highest), torch.zeros_like(highest), torch.full_like(highest, torch.nan))

    def logprobs_and_entropy(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logprobs, the entropies, and the sums of exp(z_v - highest) over ALL v; each [n]."""
        gap = self.target - self.highest
        total = self.others + gap.exp()
        entropy = total.log() - (self.spread + gap.exp() * gap) / total
        return gap - total.log(), entropy, total
