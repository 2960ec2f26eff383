"""Which prompts make up rollout number i: a pure function of the settings, so that a resumed run needs no history.

Each pass over the prompts is one permutation; the last rollout of a pass is filled up with prompts from its start, so
that every rollout has the same size and every prompt comes at least once a pass. Knows row numbers; no dataset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from onetrunk.randomness import PROMPTS_STREAM, generator_of
from onetrunk.types import RowKey


@dataclass(frozen=True)
class PromptOrder:
    """The order of prompts over a run.

    Args:
        num_prompts: rows of the dataset, at least 1.
        rollout_batch_size: prompts per rollout, all processes together.
        num_generations: completions per prompt.
        order_seed: of the permutations.
        seed: of the completions.
        shuffle: False keeps the order of the dataset in every pass.
    """

    num_prompts: int
    rollout_batch_size: int
    num_generations: int
    order_seed: int
    seed: int
    shuffle: bool = True

    @property
    def rollouts_per_pass(self) -> int:
        return math.ceil(self.num_prompts / self.rollout_batch_size)

    def prompts(self, iteration: int) -> np.ndarray:
        """Return the dataset rows [rollout_batch_size] of a rollout."""
        number, place = divmod(iteration, self.rollouts_per_pass)
        order = np.arange(self.num_prompts)
        if self.shuffle:
            order = generator_of((self.order_seed, PROMPTS_STREAM, number)).permutation(self.num_prompts)
        first = place * self.rollout_batch_size
        return order[np.arange(first, first + self.rollout_batch_size) % self.num_prompts]

    def rows(self, iteration: int, rank: int, world_size: int) -> tuple[list[int], list[RowKey]]:
        """Return this process's dataset rows, one per completion, and the key of each.

        The key counts rows over all processes: a completion does not depend on how many there are.
        """
        share = self.rollout_batch_size // world_size
        prompts = self.prompts(iteration)[rank * share : (rank + 1) * share]
        first = rank * share * self.num_generations
        rows = [int(p) for p in prompts for _ in range(self.num_generations)]
        return rows, [(self.seed, iteration, first + i) for i in range(len(rows))]
