"""A frozen language-model head, and a running softmax over its tiles: what the loops and the kernels share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class VocabShard:
    """The rows of the head that this process holds.

    Args:
        first: vocabulary id of its first row.
        vocab_size: rows of all processes.
        group: the processes that hold the head together; None: all.
    """

    first: int
    vocab_size: int
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, eq=False)
class Head:
    """A language-model head: `softcap(logit_scale * (hidden @ weight.T + bias)) / temperature`.

    Args:
        weight: [V, H].
        bias: [V], or None.
        temperature: divides the logits, above 0.
        softcap: bound of soft-capping, c * tanh(logits / c), above 0; or None.
        logit_scale: multiplies the logits before soft-capping.
        shard: which rows the weight and the bias have, if the vocabulary is split over processes; None: all.

    Raises:
        ValueError: temperature or softcap is not above 0.
    """

    weight: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    shard: VocabShard | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; logprobs need a temperature above 0")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; set a number above 0, or None for no soft-capping")

    @property
    def vocab_size(self) -> int:
        return len(self.weight) if self.shard is None else self.shard.vocab_size

    @property
    def factor(self) -> float:
        """Product of the factors on every logit, before and after soft-capping."""
        return self.logit_scale / self.temperature

    def local(self) -> Head:
        """Return the head with the rows of this process, where tensor parallelism has divided the weight."""
        if not isinstance(self.weight, DTensor):
            return self
        mesh, rows = self.weight.device_mesh, len(self.weight)
        first = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
        bias = None if self.bias is None else self.bias.to_local()
        return replace(self, weight=self.weight.to_local(), bias=bias, shard=VocabShard(first, rows, mesh.get_group()))

    def transform(self, logits: Tensor) -> Tensor:
        """Return scaled, capped and cooled logits of the products hidden @ weight.T + bias."""
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature if self.temperature != 1 else logits

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
