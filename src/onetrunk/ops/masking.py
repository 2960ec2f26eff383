"""Masks built from lengths, and reductions over the entries that a mask keeps (True = counts).

Every reduction selects with the mask before it adds, so entries outside the mask (padding, NaN, inf) never touch a
result or a gradient. Math in float32 at least, dtype in = dtype out. Moments of parts merge by the pairwise update of
Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Moments = tuple[Tensor, Tensor, Tensor]


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where it is float64 already."""
    return x if x.dtype == torch.float64 else x.float()


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64; float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Return the mask that is True at the first lengths[i] entries of row i.

    Args:
        lengths: [R] int64, entries that count.
        width: entries of a row; a length above it counts the whole row.

    Returns:
        [R, width] bool.
    """
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of the counted entries.

    Args:
        x: any shape; bool and integer tensors are summed in float32.
        mask: bool, the shape of x.
        dim: the dimension to sum over; all where None.
    """
    kept = torch.where(mask, at_least_float32(x), 0.0)
    return _in_dtype_of(kept.sum() if dim is None else kept.sum(dim), x)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None, num_tokens: float | Tensor | None = None) -> Tensor:
    """Return the sum of the counted entries divided by their count, or by `num_tokens`.

    With num_tokens = the count of a whole optimizer step, the results of its packs add up to the mean over the step.
    Every loss and metric of this room is normalised in this way.

    Args:
        x: any shape.
        mask: bool, the shape of x.
        dim: the dimension to reduce; all where None.
        num_tokens: denominator; where None, the counted entries, at least 1, so that an empty mask gives 0.
    """
    if num_tokens is None:
        num_tokens = (mask.sum() if dim is None else mask.sum(dim)).clamp(min=1)
    return _in_dtype_of(masked_sum(at_least_float32(x), mask, dim) / num_tokens, x)


def masked_moments(x: Tensor, mask: Tensor) -> Moments:
    """Return the count, the mean and the sum of squared deviations of the counted entries.

    Args:
        x: any shape.
        mask: bool, the shape of x.

    Returns:
        (count, mean, m2): scalars in float32 at least; all 0 for an empty mask. The unbiased variance is
        m2 / (count - 1). Moments of parts (packs, ranks) merge with `merge_moments`.
    """
    x = at_least_float32(x)
    count = masked_sum(torch.ones_like(x), mask)
    mean = masked_mean(x, mask)
    # The second pass takes away the rounding of the first: equal entries then deviate by exactly 0.
    mean = mean + masked_mean(x - mean, mask)
    return count, mean, masked_sum((x - mean) ** 2, mask)


def merge_moments(moments: Sequence[Moments]) -> Moments:
    """Return the moments of the union of parts from the moments of the parts.

    Args:
        moments: (count, mean, m2) of every part; a part of count 0 adds nothing.

    Returns:
        (count, mean, m2) of all parts together.

    Raises:
        ValueError: there is no part.

    Source: Chan, Golub and LeVeque 1979, for any number of parts.
    """
    if not moments:
        raise ValueError("merge_moments got no moments; pass those of at least one part (a pack or a rank)")
    counts, means, m2s = (torch.stack(column) for column in zip(*moments, strict=True))
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return count, mean, m2s.sum() + (counts * (means - mean) ** 2).sum()


def masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    """Return the unbiased variance of the counted entries; 0 where fewer than two count.

    Args:
        x: any shape.
        mask: bool, the shape of x.
    """
    return _in_dtype_of(_variance(masked_moments(x, mask)), x)


def masked_whiten(
    x: Tensor, mask: Tensor, shift_mean: bool = True, moments: Moments | None = None, eps: float = 1e-8
) -> Tensor:
    """Return the counted entries divided by their standard deviation, around 0 or around their mean.

    Args:
        x: any shape.
        mask: bool, the shape of x.
        shift_mean: True moves the mean to 0; False keeps it (rewards, whose sign has a meaning).
        moments: (count, mean, m2) of the GLOBAL batch that x is a part of; those of x itself where None.
        eps: added to the unbiased variance.

    Returns:
        The shape of x; 0 outside the mask.

    Source: Huang et al. 2023, "The N Implementation Details of RLHF with PPO", reward and advantage whitening.
    """
    moments = masked_moments(x, mask) if moments is None else moments
    mean = moments[1]
    white = (at_least_float32(x) - mean) * torch.rsqrt(_variance(moments) + eps)
    return _in_dtype_of(torch.where(mask, white if shift_mean else white + mean, 0.0), x)


def _variance(moments: Moments) -> Tensor:
    count, _, m2 = moments
    return m2 / (count - 1).clamp(min=1)


def _in_dtype_of(result: Tensor, x: Tensor) -> Tensor:
    return result.to(x.dtype) if x.is_floating_point() else result
