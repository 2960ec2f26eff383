"""The arithmetic of PPO as pure functions of tensors."""

from onetrunk.ops.advantages import (
    AdaptiveKLController,
    FixedKLController,
    gae,
    gae_reference,
    kl_estimate,
    length_adaptive_lam,
    token_rewards,
)
from onetrunk.ops.logprobs import fused_token_logprobs, token_logprobs
from onetrunk.ops.losses import (
    bradley_terry_loss,
    explained_variance,
    explained_variance_from_stats,
    policy_loss,
    ppo_loss,
    value_loss,
)
from onetrunk.ops.masking import (
    length_mask,
    masked_mean,
    masked_moments,
    masked_sum,
    masked_variance,
    masked_whiten,
    merge_moments,
)
from onetrunk.ops.packing import deal_rows, make_pack, pad_rows, plan_packs

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "bradley_terry_loss",
    "deal_rows",
    "explained_variance",
    "explained_variance_from_stats",
    "fused_token_logprobs",
    "gae",
    "gae_reference",
    "kl_estimate",
    "length_adaptive_lam",
    "length_mask",
    "make_pack",
    "masked_mean",
    "masked_moments",
    "masked_sum",
    "masked_variance",
    "masked_whiten",
    "merge_moments",
    "pad_rows",
    "plan_packs",
    "policy_loss",
    "ppo_loss",
    "token_logprobs",
    "token_rewards",
    "value_loss",
]
