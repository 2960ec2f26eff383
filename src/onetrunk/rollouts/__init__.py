"""Rollouts: prompts in, token ids and sampler logprobs out."""

from onetrunk.rollouts.base import RolloutBackend, SamplingParams, VersionedBackend
from onetrunk.rollouts.load import load_backend
from onetrunk.rollouts.local import LocalBackend

__all__ = ["LocalBackend", "RolloutBackend", "SamplingParams", "VersionedBackend", "load_backend"]
