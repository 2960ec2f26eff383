"""Rollouts: prompts in, token ids and sampler logprobs out."""

from onetrunk.rollouts.base import RolloutBackend, SamplingParams, VersionedBackend
from onetrunk.rollouts.colocate import ColocatedBackend
from onetrunk.rollouts.load import load_backend
from onetrunk.rollouts.local import LocalBackend
from onetrunk.rollouts.pipelined import PipelinedBackend
from onetrunk.rollouts.vllm import VLLMBackend

__all__ = [
    "ColocatedBackend",
    "LocalBackend",
    "PipelinedBackend",
    "RolloutBackend",
    "SamplingParams",
    "VLLMBackend",
    "VersionedBackend",
    "load_backend",
]
