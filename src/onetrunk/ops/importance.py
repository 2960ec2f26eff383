"""Importance weights of tokens that another distribution than the trainer's sampled: a server, or older weights.

The policy loss of a token is multiplied by exp(old_logprobs - sampler_logprobs), so that its mean over the sampler's
tokens is the mean over those of the policy at rollout time. Truncated, because a product with a rare large ratio has
a large variance. From AReaL (2505.24298), decoupled PPO; truncation: Ionides 2008.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onetrunk.ops.losses import LOG_RATIO_LIMIT
from onetrunk.ops.masking import at_least_float32, widest_dtype
from onetrunk.utils.options import IMPORTANCE_MODES


class ImportanceWeights(NamedTuple):
    """Weights [R, C] of the tokens of a pack, and which of them a bound changed (bool [R, C]); 0 outside the mask."""

    weights: Tensor
    is_clipped: Tensor


def importance_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    mode: str = "token_truncate",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> ImportanceWeights:
    """Return the ratio of the policy's probability to the sampler's for each token, within bounds.

    Args:
        old_logprobs: [R, C] of the policy at rollout time, from the training forward.
        sampler_logprobs: [R, C] as sampled.
        mask: [R, C] bool; the other tokens get weight 0.
        mode: what happens to a ratio outside the bounds: "token_truncate" moves it to the bound, "token_mask" makes it
            0, so that the token does not train.
        clip_min, clip_max: the bounds; None: none.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in IMPORTANCE_MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(IMPORTANCE_MODES)}")
    difference = at_least_float32(old_logprobs) - at_least_float32(sampler_logprobs)
    ratio = torch.where(mask, difference, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    is_clipped = torch.zeros_like(mask)
    if clip_max is not None:
        is_clipped |= ratio > clip_max
    if clip_min is not None:
        is_clipped |= ratio < clip_min
    is_clipped &= mask
    if mode == "token_mask":
        ratio = ratio.masked_fill(is_clipped, 0.0)
    elif clip_min is not None or clip_max is not None:
        ratio = ratio.clamp(clip_min, clip_max)
    return ImportanceWeights(torch.where(mask, ratio, 0.0), is_clipped)


def importance_sums(importance: ImportanceWeights, mask: Tensor) -> Tensor:
    """Return [4, R] in float64: of each row the sum of weights, of their squares, of clipped tokens, and of tokens.

    They add over rows, packs and processes; `effective_share` reads the totals.
    """
    weights = torch.where(mask, importance.weights, 0.0).to(widest_dtype(mask.device))
    columns = (weights, weights.square(), importance.is_clipped & mask, mask)
    return torch.stack([column.to(weights.dtype).sum(1) for column in columns])


def effective_share(weight_sum: Tensor, square_sum: Tensor, num_tokens: Tensor) -> Tensor:
    """Return Kish's effective sample size as a share of the tokens: 1 for equal weights, 1/n if one token has all.

    0 if no token has a weight.

    Source: Kish 1965, (sum of w)^2 / (n * sum of w^2).
    """
    denominator = num_tokens * square_sum
    return torch.where(denominator > 0, weight_sum.square() / torch.where(denominator > 0, denominator, 1.0), 0.0)
