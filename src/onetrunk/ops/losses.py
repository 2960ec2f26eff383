"""Clipped policy loss, clipped value loss, Bradley-Terry loss, explained variance.

Logprobs, values and advantages are [R, C] as in types.py, or any equal shapes. A loss is the sum over the counted
tokens divided by `num_tokens`, the count of the whole optimizer step, so that the losses of its packs add up to the
loss of the step however it was cut. The stats follow the same rule: every one is a sum over counted tokens divided by
`num_tokens` (packs and ranks ADD), but for `ratio_max`, a maximum. Math in float32 at least. On a GPU a PPO loss is
one kernel (loss_kernel.py), elsewhere its reference. Knows no model and no config. From Schulman et al. 2017 (PPO,
1707.06347).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onetrunk.ops.advantages import kl_estimate
from onetrunk.ops.kernels import runs_kernels
from onetrunk.ops.masking import at_least_float32, masked_mean, masked_variance, widest_dtype

LOG_RATIO_LIMIT = 20.0

Stats = dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Return the clipped surrogate loss of PPO and its stats.

    Per token max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - old_logprobs), the log
    ratio clamped to +-20.

    Args:
        logprobs: [R, C] of the current policy; the gradient flows here.
        old_logprobs: [R, C] of the policy at rollout time.
        advantages: [R, C].
        mask: [R, C] bool.
        clip_low: how far below 1 the ratio counts.
        clip_high: how far above 1 the ratio counts (clip-higher, DAPO 2503.14476); clip_low where None.
        dual_clip: where the advantage is negative, the loss is at most -A * dual_clip (above 1); off where None.
        weights: [R, C] off-policy weights, constants that multiply the loss of a token; 1 where None.
        num_tokens: denominator of the loss and of the stats; the counted tokens, at least 1, where None.

    Returns:
        The loss, a scalar, and detached scalars. Sums over counted tokens divided by num_tokens: `loss`,
        `clip_fraction` (tokens at which a clipped branch is the active one, so that they give no gradient),
        `ratio_mean`, `approx_kl` (exp(d) - 1 - d with d the log ratio: k3 of the old policy against the new).
        A maximum over counted tokens, 0 where none counts: `ratio_max`.

    Raises:
        ValueError: dual_clip is not above 1.

    Source: Schulman et al. 2017, equation 7; dual clip: Ye et al. 2020 (1912.09729).
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; set a number above 1, such as 3, or leave it out")
    if not runs_kernels(logprobs):
        given = (logprobs, old_logprobs, advantages, mask)
        return policy_loss_reference(*given, clip_low, clip_high, dual_clip, weights, num_tokens)
    from onetrunk.ops.kernels.loss import LossSettings, fused_loss

    tensors = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages, "weights": weights}
    settings = LossSettings(ratio_bounds(clip_low, clip_high), LOG_RATIO_LIMIT, dual_clip)
    loss, stats = fused_loss(tensors, mask, num_tokens, settings)
    return loss, stats["policy"]


def policy_loss_reference(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Return what `policy_loss` returns, operation by operation: the naive twin of the kernel."""
    log_ratio = _kept(mask, at_least_float32(logprobs) - at_least_float32(old_logprobs))
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = torch.exp(log_ratio)
    bounds = ratio_bounds(clip_low, clip_high)
    losses, is_clipped = _clipped_surrogate(ratio, _kept(mask, advantages), bounds, dual_clip)
    if weights is not None:
        losses = losses * _kept(mask, weights).detach()

    loss = masked_mean(losses, mask, num_tokens=num_tokens)
    with torch.no_grad():
        stats = {
            "loss": loss.detach(),
            "clip_fraction": masked_mean(is_clipped.to(losses.dtype), mask, num_tokens=num_tokens),
            "ratio_mean": masked_mean(ratio, mask, num_tokens=num_tokens),
            "ratio_max": torch.cat([_kept(mask, ratio).flatten(), ratio.new_zeros(1)]).max(),
            "approx_kl": masked_mean(torch.expm1(log_ratio) - log_ratio, mask, num_tokens=num_tokens),
        }
    return loss, stats


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor,
    clip: float | None = None,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Return half the squared error of the values, clipped around the old values, and its stats.

    Per token 1/2 * max((V - R)^2, (clip(V, V_old +- clip) - R)^2).

    Args:
        values: [R, C] of the current head; the gradient flows here.
        old_values: [R, C] at rollout time; may be None where clip is None.
        returns: [R, C] targets.
        mask: [R, C] bool.
        clip: how far a value may move from the old one and still be taken as it is; no clipping where None.
        num_tokens: denominator of the loss and of the stats; the counted tokens, at least 1, where None.

    Returns:
        The loss, a scalar, and detached scalars, all of them sums over counted tokens divided by num_tokens: `loss`,
        `clip_fraction` (tokens at which the clipped branch is the active one), and `return_mean`,
        `return_square_mean`, `error_mean`, `error_square_mean` (error = R - V), of which
        `explained_variance_from_stats` makes the explained variance once all packs are added up.

    Raises:
        ValueError: clip is given without old_values.

    Source: Schulman et al.'s baselines, ppo2; Huang et al. 2023, "value function loss clipping".
    """
    if clip is not None and old_values is None:
        raise ValueError(f"value_clip is {clip} but old_values is None; pass the values at rollout time")
    if not runs_kernels(values):
        return value_loss_reference(values, old_values, returns, mask, clip, num_tokens)
    from onetrunk.ops.kernels.loss import LossSettings, fused_loss

    tensors = {"values": values, "old_values": old_values, "returns": returns}
    loss, stats = fused_loss(tensors, mask, num_tokens, LossSettings(value_clip=clip))
    return loss, stats["value"]


def value_loss_reference(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor,
    clip: float | None = None,
    num_tokens: float | Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Return what `value_loss` returns, operation by operation: the naive twin of the kernel."""
    values, returns = _kept(mask, values), _kept(mask, returns)
    losses = (values - returns) ** 2
    is_clipped = torch.zeros_like(mask)
    if clip is not None:
        old_values = _kept(mask, old_values)
        # Not V_old + clip(V - V_old), which is not quite V where nothing is clipped.
        clipped = (values.clamp(old_values - clip, old_values + clip) - returns) ** 2
        losses, is_clipped = torch.maximum(losses, clipped), clipped > losses

    loss = masked_mean(losses / 2, mask, num_tokens=num_tokens)
    clip_fraction = masked_mean(is_clipped.to(losses.dtype), mask, num_tokens=num_tokens)
    stats = {"loss": loss.detach(), "clip_fraction": clip_fraction}
    return loss, stats | value_moments(values, returns, mask, num_tokens)


@torch.no_grad()
def value_moments(values: Tensor, returns: Tensor, mask: Tensor, num_tokens: float | Tensor | None = None) -> Stats:
    """Return the means and mean squares of returns and errors, of which `value_loss` speaks, in float64.

    Their differences are variances: of returns around 1000 float32 would leave no digit of them.

    Args: as of `value_loss`.
    """
    # In one order, however the tensors lie in memory: sums then have the same bits.
    values, returns = (torch.where(mask, x, 0.0).contiguous().to(widest_dtype(x.device)) for x in (values, returns))
    mask, error = mask.contiguous(), returns - values
    moments = {"return": returns, "error": error}
    means = {f"{name}_mean": masked_mean(x, mask, num_tokens=num_tokens) for name, x in moments.items()}
    return means | {
        f"{name}_square_mean": masked_mean(x**2, mask, num_tokens=num_tokens) for name, x in moments.items()
    }


def ratio_bounds(clip_low: float, clip_high: float | None) -> tuple[float, float]:
    """Return the lowest and the highest ratio that count; see `policy_loss`."""
    return 1 - clip_low, 1 + (clip_low if clip_high is None else clip_high)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return 1 - Var(R - V) / Var(R) over the counted tokens; 0 where the returns do not vary.

    Args:
        values: [R, C].
        returns: [R, C].
        mask: [R, C] bool.

    Returns:
        Scalar: 1 for perfect values, 0 for values no better than a constant, below 0 for worse.
    """
    values, returns = _kept(mask, values), _kept(mask, returns)
    return _explained(masked_variance(returns - values, mask), masked_variance(returns, mask))


def explained_variance_from_stats(stats: Stats) -> Tensor:
    """Return the explained variance of an optimizer step from the stats of `value_loss` added over its packs.

    Args:
        stats: the added stats; they must have been divided by the step's true token count.

    Returns:
        Scalar, as `explained_variance` of all the packs together gives it.
    """
    error = stats["error_square_mean"] - stats["error_mean"] ** 2
    spread = stats["return_square_mean"] - stats["return_mean"] ** 2
    return _explained(error, spread)


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

    Returns:
        Scalar.

    Source: Bradley and Terry 1952; margin: Llama 2 (2307.09288), equation 2; soft labels: RLAIF (2309.00267).
    """
    lead = at_least_float32(chosen) - at_least_float32(rejected)
    margin = torch.zeros_like(lead) if margin is None else margin.to(lead.dtype)
    won = -F.logsigmoid(lead - margin)
    if probability is None:
        return won.mean()
    probability = probability.to(lead.dtype)
    return (probability * won - (1 - probability) * F.logsigmoid(-lead - margin)).mean()


def _kept(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, at_least_float32(x), 0.0)


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, bounds: tuple[float, float], dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(*bounds)
    losses, is_clipped = torch.maximum(unclipped, clipped), clipped > unclipped
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        is_above = (advantages < 0) & (losses > ceiling)
        losses, is_clipped = torch.where(is_above, ceiling, losses), is_clipped | is_above
    return losses, is_clipped


def _explained(error_variance: Tensor, return_variance: Tensor) -> Tensor:
    varies = return_variance > 0
    return torch.where(varies, 1 - error_variance / torch.where(varies, return_variance, 1.0), 0.0)


@dataclass(frozen=True)
class PPOTensors:
    """What a pack brings to the loss, all [R, C]; the terms of what is None are left out.

    Attributes:
        mask: bool, the tokens that count.
        values: of the current head; the gradient flows here.
        returns: targets of the values.
        old_values: at rollout time; may be None where values are not clipped.
        logprobs: of the current policy; the gradient flows here.
        old_logprobs: of the policy at rollout time.
        advantages: of the sampled tokens.
        weights: off-policy weights, constants; 1 where None.
        ref_logprobs: of the reference; no KL term where None.
        entropy: of the current policy; the gradient flows here.
    """

    mask: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None
    logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True)
class PPOCoefs:
    """The numbers of the loss.

    Attributes:
        clip_low: how far below 1 the ratio counts.
        clip_high: how far above 1 it does; clip_low where None.
        dual_clip: see `losses.policy_loss`.
        value_clip: see `losses.value_loss`.
        value_coef: weight of the value loss.
        entropy_coef: weight of the entropy bonus.
        kl_coef: weight of the KL to the reference.
        kl_estimator: see `advantages.kl_estimate`.
    """

    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    value_clip: float | None = None
    value_coef: float = 1.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k1"


def ppo_loss(
    tensors: PPOTensors, coefs: PPOCoefs, num_tokens: float | Tensor | None = None
) -> tuple[Tensor, dict[str, Stats]]:
    """Return policy loss + value_coef * value loss - entropy_coef * entropy + kl_coef * KL, and the stats of each.

    Args:
        tensors: logprobs or values, or both, with what belongs to them.
        coefs: the numbers.
        num_tokens: denominator of every term and stat; the counted tokens, at least 1, where None.

    Returns:
        The loss, a scalar, and detached scalars in groups, of those terms that there are: "policy" as in
        `losses.policy_loss`, with `entropy`; "value" as in `losses.value_loss`; "kl" with `loss`, the KL.

    Raises:
        ValueError: there is nothing to train, a term lacks a tensor, or a number is out of its range.
    """
    _check(tensors, coefs)
    trained = tensors.values if tensors.logprobs is None else tensors.logprobs
    if not runs_kernels(trained):
        return ppo_loss_reference(tensors, coefs, num_tokens)
    from onetrunk.ops.kernels.loss import LossSettings, fused_loss

    settings = LossSettings(
        bounds=ratio_bounds(coefs.clip_low, coefs.clip_high),
        log_ratio_limit=LOG_RATIO_LIMIT,
        dual_clip=coefs.dual_clip,
        value_clip=coefs.value_clip,
        value_coef=coefs.value_coef,
        entropy_coef=coefs.entropy_coef,
        kl_coef=coefs.kl_coef,
        kl_estimator=coefs.kl_estimator,
    )
    named = {name: tensor for name, tensor in vars(tensors).items() if name != "mask"}
    return fused_loss(named, tensors.mask, num_tokens, settings)


def ppo_loss_reference(
    tensors: PPOTensors, coefs: PPOCoefs, num_tokens: float | Tensor | None = None
) -> tuple[Tensor, dict[str, Stats]]:
    """Return what `ppo_loss` returns, term by term: the naive twin of the kernel."""
    t, counted = tensors, {"mask": tensors.mask, "num_tokens": num_tokens}
    loss, stats = 0.0, {}
    if t.values is not None:
        value, stats["value"] = value_loss_reference(
            t.values, t.old_values, t.returns, clip=coefs.value_clip, **counted
        )
        loss = loss + coefs.value_coef * value
    if t.logprobs is not None:
        bounds = (coefs.clip_low, coefs.clip_high, coefs.dual_clip)
        policy, stats["policy"] = policy_loss_reference(
            t.logprobs, t.old_logprobs, t.advantages, t.mask, *bounds, t.weights, num_tokens
        )
        loss = loss + policy
    if t.entropy is not None:
        entropy = masked_mean(at_least_float32(t.entropy), **counted)
        stats["policy"]["entropy"] = entropy.detach()
        loss = loss - coefs.entropy_coef * entropy if coefs.entropy_coef else loss
    if t.ref_logprobs is not None:
        # Selected first: the gradient of a square is NaN where NaN is squared, also where nothing counts.
        both = (torch.where(t.mask, at_least_float32(x), 0.0) for x in (t.logprobs, t.ref_logprobs))
        kl = masked_mean(kl_estimate(*both, coefs.kl_estimator), **counted)
        stats["kl"] = {"loss": kl.detach()}
        loss = loss + coefs.kl_coef * kl
    return loss, stats


def _check(tensors: PPOTensors, coefs: PPOCoefs) -> None:
    if tensors.logprobs is None and tensors.values is None:
        raise ValueError("the PPO loss got neither logprobs nor values; pass at least one of them")
    needs = {
        "values": ("returns",) if coefs.value_clip is None else ("returns", "old_values"),
        "logprobs": ("old_logprobs", "advantages"),
        "entropy": ("logprobs",),
        "ref_logprobs": ("logprobs",),
    }
    for name, others in needs.items():
        lacking = [other for other in others if getattr(tensors, other) is None]
        if getattr(tensors, name) is not None and lacking:
            raise ValueError(f"the PPO loss got {name} without {' and '.join(lacking)}; pass them too")
    if coefs.kl_estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"kl_estimator is {coefs.kl_estimator!r}; expected k1, k2 or k3")
    if coefs.dual_clip is not None and not coefs.dual_clip > 1:
        raise ValueError(f"dual_clip is {coefs.dual_clip}; set a number above 1, such as 3, or leave it out")
