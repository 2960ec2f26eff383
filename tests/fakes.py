"""Real classes in place of slow or remote parts: a rollout backend whose completions are known in advance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from onetrunk.rollouts.base import SamplingParams
from onetrunk.types import Rollout, RowKey


class CannedBackend:
    """Returns given completions, one after the other, or each key with tokens drawn from that key alone.

    Args:
        completions: token ids; None: drawn, whatever the policy, with lengths that differ from row to row.
        vocab_size: drawn tokens are from 4 to vocab_size - 1, below 4 are special.
    """

    def __init__(self, completions: Sequence[list[int]] | None = None, vocab_size: int = 64):
        self.completions = completions
        self.vocab_size = vocab_size
        self.synced: list[int] = []

    def sync(self, model: nn.Module, version: int) -> None:
        self.synced.append(version)

    def generate(self, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> Rollout:
        if self.completions is None:
            rows = [self._drawn(key, params) for key in keys]
        else:
            rows = [list(self.completions[i % len(self.completions)]) for i in range(len(prompt_ids))]
        return Rollout(
            prompt_ids=prompt_ids,
            completion_ids=rows,
            sampler_logprobs=[torch.zeros(len(ids)) for ids in rows],
            stopped=[ids[-1] in params.stop_token_ids for ids in rows],
            policy_version=self.synced[-1] if self.synced else -1,
        )

    def _drawn(self, key: RowKey, params: SamplingParams) -> list[int]:
        draws = np.random.default_rng(key)
        length = int(draws.integers(1, params.max_completion_length + 1))
        ids = draws.integers(4, self.vocab_size, size=length).tolist()
        return ids if length == params.max_completion_length else [*ids[:-1], params.stop_token_ids[0]]
