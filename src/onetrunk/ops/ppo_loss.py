"""The whole PPO loss of a pack in one call: policy, value, entropy bonus, KL to the reference, and their stats.

On a GPU it is one pass over the tokens (loss_kernel.py); elsewhere the sum of the functions of losses.py, which is its
naive twin. Knows tensors and numbers; no model and no config.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onetrunk.ops.advantages import kl_estimate
from onetrunk.ops.kernels import runs_kernels
from onetrunk.ops.losses import LOG_RATIO_LIMIT, Stats, policy_loss_reference, ratio_bounds, value_loss_reference
from onetrunk.ops.masking import at_least_float32, masked_mean


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
    from onetrunk.ops.loss_kernel import LossSettings, fused_loss

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
