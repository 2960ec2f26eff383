"""Rollouts: prompts in, token ids and sampler logprobs out."""

from onetrunk.rollouts.base import RolloutBackend, SamplingParams
from onetrunk.rollouts.local import LocalBackend

__all__ = ["LocalBackend", "RolloutBackend", "SamplingParams"]
