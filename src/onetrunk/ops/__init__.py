"""The arithmetic of PPO as pure functions of tensors; knows no model, no tokenizer and no Hugging Face package."""

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
    policy_loss_reference,
    value_loss,
    value_loss_reference,
)
from onetrunk.ops.masking import (
    Moments,
    at_least_float32,
    first_stop,
    length_mask,
    masked_mean,
    masked_moments,
    masked_sum,
    masked_variance,
    masked_whiten,
    merge_moments,
)
from onetrunk.ops.packing import deal_rows, make_pack, pad_rows, plan_packs
from onetrunk.ops.ppo_loss import PPOCoefs, PPOTensors, ppo_loss, ppo_loss_reference

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "Moments",
    "PPOCoefs",
    "PPOTensors",
    "at_least_float32",
    "bradley_terry_loss",
    "deal_rows",
    "explained_variance",
    "explained_variance_from_stats",
    "first_stop",
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
    "policy_loss_reference",
    "ppo_loss",
    "ppo_loss_reference",
    "token_logprobs",
    "token_rewards",
    "value_loss",
    "value_loss_reference",
]
