"""Which prompts make up rollout number i: a pure function of the settings, so that a resumed run needs no history.

Each pass over the prompts is one permutation; the last rollout of a pass is filled up with prompts from its start, so
that every rollout has the same size and every prompt comes at least once a pass. Knows row numbers; no dataset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def rows(self, iteration: int, completions: Sequence[int]) -> tuple[list[int], list[RowKey]]:
        """Return the dataset row and the key of some completions of a rollout.

        Args:
            iteration: number of the rollout.
            completions: their numbers, counted over all processes: a completion does not depend on how many there
                are. Those of one prompt follow one another.
        """
        prompts = self.prompts(iteration)
        rows = [int(prompts[i // self.num_generations]) for i in completions]
        return rows, [(self.seed, iteration, i) for i in completions]
