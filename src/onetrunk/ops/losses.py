"""The PPO loss and its terms, importance weights, and the Bradley-Terry loss.

Tensors are [R, C] as in types.py, or any equal shapes. A loss is the sum over the counted tokens divided by
`num_tokens`, the token count of the whole optimizer step, so the losses of its packs add up to the loss of the step.
So do the stats, except `ratio_max`, which is a maximum. Math in float32 at least. From Schulman et al. 2017 (PPO,
1707.06347).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onetrunk.ops.advantages import kl_estimate
from onetrunk.ops.masking import at_least_float32, masked_mean, sum_over_turns, widest_dtype
from onetrunk.types import Experience, LossCoefficients, PackOutput
from onetrunk.utils.options import IMPORTANCE_MODES

LOG_RATIO_LIMIT = 20.0

Stats = dict[str, Tensor]


def ppo_loss(
    experience: Experience,
    output: PackOutput,
    coefficients: LossCoefficients,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Stats]]:
    """Return policy loss - entropy_coef * entropy + kl_weight * KL, and the stats of each.

    The value has no term: its head is fitted after each rollout. The entropy is left out where `output` lacks it, the
    KL where kl_weight is 0 or there are no ref_logprobs.

    Args:
        experience: the pack; its `loss_mask` says which tokens count.
        output: logprobs, with or without entropy, of the current model; the gradient flows here.
        coefficients: the settings of the loss.
        num_tokens: denominator of every term and stat; the counted tokens, at least 1, where None.

    Returns:
        The loss, a scalar, and detached scalars in groups: "policy" as in `policy_loss`, with `entropy`; "kl" with
        `loss`, the KL as in `kl_loss`.

    Raises:
        ValueError: there are no logprobs.
    """
    c, mask, stats = coefficients, experience.loss_mask, {}
    if output.logprobs is None:
        raise ValueError("the PPO loss got no logprobs; run the model with the role policy")
    probabilities = (output.logprobs, experience.old_logprobs, experience.advantages, mask)
    if c.policy_objective == "dis":
        loss, stats["policy"] = direct_policy_loss(*probabilities, c.dis_epsilon_low, c.dis_epsilon_high, num_tokens)
    else:
        loss, stats["policy"] = policy_loss(
            *probabilities, c.epsilon, c.epsilon_high, c.dual_clip, experience.weights, num_tokens,
            experience.pack.turns if c.ratio_unit == "turn" else None,
        )  # fmt: skip
    if output.entropy is not None:
        entropy = masked_mean(at_least_float32(output.entropy), mask, num_tokens=num_tokens)
        stats["policy"]["entropy"] = entropy.detach()
        loss = loss - c.entropy_coef * entropy if c.entropy_coef else loss
    if experience.ref_logprobs is not None and c.kl_weight:
        kl = kl_loss(
            output.logprobs, experience.old_logprobs, experience.ref_logprobs, mask,
            c.kl_estimator, experience.weights, num_tokens,
        )  # fmt: skip
        stats["kl"] = {"loss": kl.detach()}
        loss = loss + c.kl_weight * kl
    return loss, stats


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    epsilon: float,
    epsilon_high: float | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    turn_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Return the clipped surrogate loss of PPO and its stats.

    Per token max(-A * r, -A * clip(r, 1 - epsilon, 1 + epsilon_high)) with r = exp(logprobs - old_logprobs), the log
    ratio clamped to +-20. With `turn_ids` r is that of the turn: the geometric mean of the ratios of its tokens. Not
    their product, which leaves any clip range once a turn is long; and the mean has the gradient of token ratios at 1.

    Args:
        logprobs: [R, C] of the current policy; the gradient flows here.
        old_logprobs: [R, C] of the policy at rollout time.
        advantages: [R, C].
        mask: [R, C] bool.
        epsilon: clip range of the ratio below 1.
        epsilon_high: clip range of the ratio above 1; epsilon where None.
        dual_clip: where the advantage is negative, the loss is at most -A * dual_clip (above 1); off where None.
        weights: [R, C] off-policy weights, constants that multiply the loss of a token; 1 where None.
        num_tokens: denominator of the loss and of the stats; the counted tokens, at least 1, where None.
        turn_ids: [R, C] int64, number of the turn of each counted token; None: every token has its own ratio.

    Returns:
        The loss, a scalar, and detached scalars: `loss`, `clip_fraction` (tokens whose clipped branch is active: no
        gradient), `ratio_max`, `approx_kl` (k3 of the old policy against the new, of single tokens).

    Source: Schulman et al. 2017, equation 7; dual clip: 1912.09729; turns: ST-PPO 2511.20718, GSPO 2507.18071.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; set a number above 1, such as 3, or leave it out")
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, mask), _kept(mask, advantages)
    ratio = torch.exp(log_ratio if turn_ids is None else _mean_over_turns(log_ratio, mask, turn_ids))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    losses, is_clipped = torch.maximum(unclipped, clipped), clipped > unclipped
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        is_above = (advantages < 0) & (losses > ceiling)
        losses, is_clipped = torch.where(is_above, ceiling, losses), is_clipped | is_above
    if weights is not None:
        losses = losses * _kept(mask, weights).detach()

    loss = masked_mean(losses, mask, num_tokens=num_tokens)
    return loss, _policy_stats(loss, is_clipped, ratio, log_ratio, mask, num_tokens)


def direct_policy_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    epsilon_low: float,
    epsilon_high: float,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Return the loss of direct double-sided importance sampling (DIS) and its stats.

    Per token -A * r with r = exp(logprobs - sampler_logprobs), whose gradient is that of -A * stopgrad(r) * logprob.
    A token with r outside (1 - epsilon_low, 1 + epsilon_high) has no gradient, whatever the sign of A, and stays in
    the denominator. There is no snapshot of the policy: r corrects for the whole way from the sampler to the policy.

    Args:
        logprobs, advantages, mask, num_tokens: as in `policy_loss`; the gradient flows into logprobs.
        sampler_logprobs: [R, C] of the policy that drew the tokens, of whatever version.
        epsilon_low, epsilon_high: how far below and above 1 a ratio trains.

    Returns:
        The loss, a scalar, and the stats of `policy_loss`, with `masked_below` and `masked_above`: the tokens without
        gradient on each side; `clip_fraction` is their sum, and `approx_kl` that of the sampler against the policy.

    Source: SAO 2607.07508.
    """
    log_ratio, advantages = _log_ratio(logprobs, sampler_logprobs, mask), _kept(mask, advantages)
    ratio = torch.exp(log_ratio)
    below, above = outside_dis_bounds(ratio, epsilon_low, epsilon_high)
    loss = masked_mean(torch.where(below | above, 0.0, -advantages * ratio), mask, num_tokens=num_tokens)
    stats = _policy_stats(loss, below | above, ratio, log_ratio, mask, num_tokens)
    for name, side in {"masked_below": below, "masked_above": above}.items():
        stats[name] = masked_mean(side.to(ratio.dtype), mask, num_tokens=num_tokens).detach()
    return loss, stats


def outside_dis_bounds(ratio: Tensor, epsilon_low: float, epsilon_high: float) -> tuple[Tensor, Tensor]:
    """Return where a ratio is too small and where it is too large to train (`direct_policy_loss`)."""
    return ratio <= 1 - epsilon_low, ratio >= 1 + epsilon_high


@torch.no_grad()
def _policy_stats(
    loss: Tensor, is_clipped: Tensor, ratio: Tensor, log_ratio: Tensor, mask: Tensor, num_tokens: float | Tensor | None
) -> Stats:
    return {
        "loss": loss.detach(),
        "clip_fraction": masked_mean(is_clipped.to(ratio.dtype), mask, num_tokens=num_tokens),
        "ratio_max": torch.cat([_kept(mask, ratio).flatten(), ratio.new_zeros(1)]).max(),
        "approx_kl": masked_mean(torch.expm1(log_ratio) - log_ratio, mask, num_tokens=num_tokens),
    }


def kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: str,
    weights: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
) -> Tensor:
    """Return the KL to the reference as a term of the loss.

    Per token r * weight * `kl_estimate`, with r = exp(logprobs - old_logprobs) as a constant, clamped as in
    `policy_loss`. The tokens were drawn from the sampler, and r * weight is the probability of a token under the
    current policy relative to the sampler's. So the mean is that over tokens of the current policy: the gradient of k2
    is on average that of KL(policy || reference), and the gradient of k3 that of KL(reference || policy). Both
    factors are 1 on the first pass over samples of the policy itself. r is not clipped to 1 +- epsilon: a token that
    has moved far needs the reference most.

    Args:
        logprobs, old_logprobs, mask, weights, num_tokens: as in `policy_loss`; the gradient flows into logprobs.
        ref_logprobs: [R, C] of the reference.
        estimator: k2 or k3; k1 has the gradient 0 on average.

    Source: the correction of DeepSeek-V3.2 (2512.02556), which also differentiates r.
    """
    # Selected first: the gradient of a square is NaN where NaN is squared, also where nothing counts.
    kl = kl_estimate(_kept(mask, logprobs), _kept(mask, ref_logprobs), estimator)
    kl = kl * _log_ratio(logprobs, old_logprobs, mask).exp().detach()
    if weights is not None:
        kl = kl * _kept(mask, weights).detach()
    return masked_mean(kl, mask, num_tokens=num_tokens)


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, probability: Tensor | None = None, margin: Tensor | None = None
) -> Tensor:
    """Return the cross-entropy of a preference under the Bradley-Terry model, averaged over pairs.

    -(p * log sigmoid(c - r - m) + (1 - p) * log sigmoid(r - c - m)): the loss of Llama 2 in the expectation over who
    won, which for p = 1 and m = 0 is -log sigmoid(c - r).

    Args:
        chosen: [B] scores of the first completion of each pair.
        rejected: [B] scores of the second.
        probability: [B] probability that the first is the better one (a judge's soft label); 1 where None.
        margin: [B] score by which the winner should lead; 0 where None.

    Source: Bradley and Terry 1952; margin: Llama 2 (2307.09288), equation 2; soft labels: RLAIF (2309.00267).
    """
    lead = at_least_float32(chosen) - at_least_float32(rejected)
    margin = torch.zeros_like(lead) if margin is None else margin.to(lead.dtype)
    won = -F.logsigmoid(lead - margin)
    if probability is None:
        return won.mean()
    probability = probability.to(lead.dtype)
    return (probability * won - (1 - probability) * F.logsigmoid(-lead - margin)).mean()


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    log_ratio = _kept(mask, at_least_float32(logprobs) - at_least_float32(old_logprobs))
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _mean_over_turns(x: Tensor, mask: Tensor, turn_ids: Tensor) -> Tensor:
    counts = sum_over_turns(torch.ones_like(x), mask, turn_ids)
    return sum_over_turns(x, mask, turn_ids) / counts.clamp(min=1)


def _kept(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, at_least_float32(x), 0.0)


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

    The sampler is another program or has older weights. The policy loss of a token is multiplied by its ratio, so that
    the mean over the sampler's tokens is the mean over those of the policy at rollout time. Truncated, because a
    product with a rare large ratio has a large variance.

    Args:
        old_logprobs: [R, C] of the policy at rollout time, from the training forward.
        sampler_logprobs: [R, C] as sampled.
        mask: [R, C] bool; the other tokens get weight 0.
        mode: what happens to a ratio outside the bounds: "token_truncate" moves it to the bound, "token_mask" makes it
            0, so that the token does not train.
        clip_min, clip_max: the bounds; None: none.

    Raises:
        ValueError: an unknown mode.

    Source: AReaL, 2505.24298, decoupled PPO; truncation: Ionides 2008.
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
