"""Masks built from lengths, and reductions over the entries that a mask keeps (True = counts).

In every reduction x has any shape, and mask is a bool tensor of that shape. Each selects before it adds, so entries
outside the mask (padding, NaN, inf) never touch a result or a gradient. Math in float32 at least, dtype in = dtype
out. Moments of parts merge by the pairwise update of Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise
algorithm for computing sample variances".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Moments = tuple[Tensor, Tensor, Tensor]


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where it is float64 already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64; float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one dtype on the CPU, in one copy from the device."""
    flat = torch.cat([x.flatten() for x in tensors]).cpu().split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(flat, tensors, strict=True)]


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Return the mask [R, width] that is True at the first lengths[i] entries of row i, for lengths [R] int64."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of the counted entries, over all dimensions or one; bool and integer tensors become float32."""
    kept = torch.where(mask, at_least_float32(x), 0.0)
    return _in_dtype_of(kept.sum() if dim is None else kept.sum(dim), x)


def masked_mean(x: Tensor, mask: Tensor, num_tokens: float | Tensor | None = None) -> Tensor:
    """Return the sum of the counted entries divided by their count, or by `num_tokens`.

    With num_tokens = the count of a whole optimizer step, the results of its packs add up to the mean over the step.
    Every loss and metric of this room is normalised in this way. The count is at least 1: an empty mask gives 0.
    """
    denominator = mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    return _in_dtype_of(masked_sum(at_least_float32(x), mask) / denominator, x)


def turn_starts(mask: Tensor, turn_ids: Tensor) -> Tensor:
    """Return [R, C] bool, True at the first counted token of every turn.

    Args:
        mask: [R, C] bool.
        turn_ids: [R, C] int64, number of the turn of each counted token; it never falls within a row.
    """
    turns = torch.where(mask, turn_ids, -1)
    if not turns.shape[1]:
        return mask
    return turns > F.pad(turns.cummax(dim=1).values[:, :-1], (1, 0), value=-1)


def sum_over_turns(x: Tensor, mask: Tensor, turn_ids: Tensor) -> Tensor:
    """Return [R, C]: at every counted token the sum over the counted tokens of its turn; 0 elsewhere."""
    # Column 0 takes what is before the first turn. In float64, because atomic sums have no certain order on a GPU.
    numbers = turn_starts(mask, turn_ids).cumsum(1)
    kept = torch.where(mask, x, 0.0).to(widest_dtype(x.device))
    sums = kept.new_zeros(len(x), x.shape[1] + 1).scatter_add(1, numbers, kept).gather(1, numbers)
    return torch.where(mask, sums, 0.0).to(x.dtype)


def masked_moments(x: Tensor, mask: Tensor) -> Moments:
    """Return the count, the mean and the sum m2 of squared deviations of the counted entries.

    They are scalars in float32 at least, and all 0 for an empty mask. The unbiased variance is m2 / (count - 1).
    Moments of parts (packs, ranks) merge with `merge_moments`.
    """
    x = at_least_float32(x)
    count = masked_sum(torch.ones_like(x), mask)
    mean = masked_mean(x, mask)
    # The second pass takes away the rounding of the first: equal entries then deviate by exactly 0.
    mean = mean + masked_mean(x - mean, mask)
    return count, mean, masked_sum((x - mean) ** 2, mask)


def merge_moments(moments: Sequence[Moments]) -> Moments:
    """Return the moments of the union of at least one part from the moments of the parts.

    Source: Chan, Golub and LeVeque 1979, for any number of parts; one of count 0 adds nothing.
    """
    counts, means, m2s = (torch.stack(column) for column in zip(*moments, strict=True))
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return count, mean, m2s.sum() + (counts * (means - mean) ** 2).sum()


def masked_whiten(
    x: Tensor, mask: Tensor, shift_mean: bool = True, moments: Moments | None = None, eps: float = 1e-8
) -> Tensor:
    """Return the counted entries divided by their standard deviation, around 0 or around their mean; 0 elsewhere.

    Args:
        shift_mean: True moves the mean to 0; False keeps it (rewards, whose sign has a meaning).
        moments: (count, mean, m2) of the GLOBAL batch that x is a part of; those of x itself where None.
        eps: added to the unbiased variance.

    Source: Huang et al. 2023, "The N Implementation Details of RLHF with PPO", reward and advantage whitening.
    """
    count, mean, m2 = masked_moments(x, mask) if moments is None else moments
    white = (at_least_float32(x) - mean) * torch.rsqrt(m2 / (count - 1).clamp(min=1) + eps)
    return _in_dtype_of(torch.where(mask, white if shift_mean else white + mean, 0.0), x)


def _in_dtype_of(result: Tensor, x: Tensor) -> Tensor:
    return result.to(x.dtype) if x.is_floating_point() else result
