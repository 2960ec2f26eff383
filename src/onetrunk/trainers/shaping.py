"""Token rewards and whitened advantages over the packs of a rollout, with moments of all processes.

Knows packs, scores and the settings; no model and no stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from onetrunk.models.pack_output import PackOutput
from onetrunk.ops.advantages import token_rewards
from onetrunk.ops.masking import masked_whiten
from onetrunk.trainers.ppo_config import PPOConfig
from onetrunk.trainers.rollout_figures import global_moments
from onetrunk.types import Pack


def shaped_rewards(
    packs: Sequence[Pack],
    outputs: Sequence[PackOutput],
    scores: Sequence[Tensor],
    masks: Sequence[Tensor],
    beta: float,
    config: PPOConfig,
    accelerator: Accelerator,
) -> list[Tensor]:
    """Return the token rewards [R, C] of every pack: the score at the last token, less beta times the KL of each.

    Args:
        packs: the rows.
        outputs: logprobs under policy and reference.
        scores: [R] of every pack, no NaN.
        masks: [R, C] bool of every pack, the tokens that count in the moments.
        beta: KL coefficient; 0 where the KL is in the loss, or not used.
        config: kl_estimator and whiten_rewards.
        accelerator: gathers the moments.
    """
    rewards = [
        token_rewards(s, o.logprobs, o.ref_logprobs, p.completion_mask, beta, config.kl_estimator)
        for p, o, s in zip(packs, outputs, scores, strict=True)
    ]
    if not config.whiten_rewards:
        return rewards
    moments = global_moments(list(zip(rewards, masks, strict=True)), accelerator)
    return [
        masked_whiten(r, p.completion_mask, shift_mean=False, moments=moments)
        for r, p in zip(rewards, packs, strict=True)
    ]


def require_finite(shaped: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Tensor], iteration: int) -> None:
    """Refuse advantages and returns of which variance or loss would not be finite; no weight has changed then.

    Args:
        shaped: advantages and returns of each pack, [R, C].
        masks: [R, C] bool, the tokens that train.
        iteration: number of the rollout.

    Raises:
        RuntimeError: says what to set.
    """
    pairs = [(figure, mask) for pair, mask in zip(shaped, masks, strict=True) for figure in pair]
    if not torch.stack([figure.masked_fill(~mask, 0).square().isfinite().all() for figure, mask in pairs]).all():
        raise RuntimeError(
            f"advantages or returns of rollout {iteration} are not finite, or too large for float32; look at scores,"
            " KL and values: set score_clip or normalize_scores, or mend the reward functions. The weights are those"
            " before it"
        )


def require_scored(unscored: float, config: PPOConfig, iteration: int, names: Sequence[str]) -> None:
    """Refuse a rollout of which too few rows have a score.

    Args:
        unscored: share of the rows without a finite one.
        config: max_unscored_fraction.
        iteration: number of the rollout.
        names: of the reward functions.

    Raises:
        RuntimeError: says what to look at.
    """
    if unscored > config.max_unscored_fraction:
        raise RuntimeError(
            f"{unscored:.0%} of the rows of rollout {iteration} have no finite score, more than max_unscored_fraction"
            f" {config.max_unscored_fraction:.0%}; look at the reward functions ({', '.join(names)}) or raise the"
            " limit"
        )


def whitened(advantages: Sequence[Tensor], masks: Sequence[Tensor], accelerator: Accelerator) -> list[Tensor]:
    """Return the advantages [R, C] of every pack with zero mean and unit variance over the tokens of all processes."""
    moments = global_moments(list(zip(advantages, masks, strict=True)), accelerator)
    return [masked_whiten(a, m, moments=moments) for a, m in zip(advantages, masks, strict=True)]
