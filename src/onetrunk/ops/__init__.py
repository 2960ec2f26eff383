"""The arithmetic of PPO as pure functions of tensors. Named here are those that other implementations also have."""

from onetrunk.ops.advantages import AdaptiveKLController, gae, kl_estimate, token_rewards
from onetrunk.ops.logprobs import fused_token_logprobs, token_logprobs
from onetrunk.ops.losses import bradley_terry_loss, policy_loss
from onetrunk.ops.masking import masked_whiten
from onetrunk.ops.running_softmax import Head

__all__ = [
    "AdaptiveKLController",
    "Head",
    "bradley_terry_loss",
    "fused_token_logprobs",
    "gae",
    "kl_estimate",
    "masked_whiten",
    "policy_loss",
    "token_logprobs",
    "token_rewards",
]
