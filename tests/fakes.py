"""Real classes that stand in for slow or distant parts: a rollout backend whose completions are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from onetrunk.rollouts.base import SamplingParams
from onetrunk.types import Rollout, RowKey


class CannedBackend:
    """Answers each key with tokens drawn from that key alone, whatever the policy; lengths differ from row to row.

    Args:
        vocab_size: tokens are drawn from 4 to vocab_size - 1, below 4 are special.
    """

    def __init__(self, vocab_size: int = 64):
        self.vocab_size = vocab_size
        self.version = -1

    def sync(self, model: nn.Module, version: int) -> None:
        self.version = version

    def generate(self, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> Rollout:
        completions = []
        for key in keys:
            draws = np.random.default_rng(key)
            length = int(draws.integers(1, params.max_completion_length + 1))
            completions.append(draws.integers(4, self.vocab_size, size=length).tolist())
        stopped = [len(ids) < params.max_completion_length for ids in completions]
        for ids, has_stopped in zip(completions, stopped, strict=True):
            if has_stopped:
                ids[-1] = params.stop_token_ids[0]
        sampler_logprobs = [torch.zeros(len(ids)) for ids in completions]
        return Rollout(prompt_ids, completions, sampler_logprobs, stopped, self.version)
