"""Real classes in place of slow or remote parts: a rollout backend whose completions are known in advance."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from onetrunk.models.adapters import POLICY, adapter_parameters
from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.local import LocalBackend
from onetrunk.types import Rollout, RowKey


class CannedBackend:
    """Returns given completions, one after the other, or (None) for each key tokens drawn from that key alone."""

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
        draws = np.random.default_rng(key)  # Ids below 4 are special.
        length = int(draws.integers(1, params.max_completion_length + 1))
        ids = draws.integers(4, self.vocab_size, size=length).tolist()
        return ids if length == params.max_completion_length else [*ids[:-1], params.stop_token_ids[0]]


class CopyBackend:
    """A versioned backend, as a server is one: it samples from a trunk of its own, whose adapter `sync` replaces.

    Calls run one after the other, whatever thread they come from. A key's completion depends on the version alone.

    Args:
        trunk: built like the trainer's, not a copy of it: a deep copy would keep the hooks of the original.
        keeps: versions that it holds; None: all.
    """

    def __init__(self, trunk: TrunkModel, keeps: int | None = None):
        self.trunk = trunk
        self.keeps = keeps
        self.versions: dict[int, dict[str, Tensor]] = {}
        self.synced: list[int] = []
        # (role, version, keys) of every call, in the order in which they began.
        self.calls: list[tuple[str, int, list[RowKey]]] = []
        self._lock = threading.Lock()

    def sync(self, model: nn.Module, version: int) -> None:
        weights = {name: p.detach().clone() for name, p in adapter_parameters(model, POLICY).items()}
        with self._lock:
            self.versions[version] = weights
            self.synced.append(version)
            for old in sorted(self.versions)[: -self.keeps] if self.keeps else ():
                del self.versions[old]

    def generate(self, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> Rollout:
        return self.generate_as("policy", self.synced[-1], prompt_ids, params, keys)

    @torch.no_grad()
    def generate_as(
        self, role: str, version: int, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]
    ) -> Rollout:
        with self._lock:
            self.calls.append((role, version, list(keys)))
            if version not in self.versions:
                raise RuntimeError(f"version {version} is none of {sorted(self.versions)}")
            own = adapter_parameters(self.trunk, POLICY)
            for name, tensor in self.versions[version].items():
                own[name].copy_(tensor)
            with self.trunk.as_role(role):
                rollout = LocalBackend(self.trunk).generate(prompt_ids, params, keys)
        return replace(rollout, policy_version=version)
