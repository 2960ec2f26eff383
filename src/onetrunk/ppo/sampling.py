"""Prompts -> completions -> scores: what training and evaluation do alike.

Knows prompts, a rollout backend and reward functions; no policy gradient and no optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from onetrunk.data.prompts import decode_completion
from onetrunk.models.trunk import PackOutput
from onetrunk.ops.packing import make_pack, plan_packs
from onetrunk.rewards.base import Scores
from onetrunk.rewards.combine import RewardSet
from onetrunk.rewards.ensemble import EnsembleReward
from onetrunk.rewards.model import ModelReward, TrunkReward
from onetrunk.rollouts.base import RolloutBackend, SamplingParams
from onetrunk.types import Message, Pack, Prompt, Rollout, RowKey, to_device
from onetrunk.utils.randomness import PROMPTS_STREAM, generator_of


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


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that go to the sampler, one entry per completion wanted; n rows.

    Args:
        prompts: as the dataset has them.
        prompt_ids: their token ids.
        columns: the dataset's other columns, n values each.
        keys: what the randomness of each row derives from.
    """

    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    columns: dict[str, list[Any]]
    keys: list[RowKey]


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with the text of its completions and their scores; n rows."""

    batch: PromptBatch
    rollout: Rollout
    completions: list[str | list[Message]]
    scores: Scores

    @property
    def lengths(self) -> Tensor:
        """[n] completion lengths, tokens."""
        return torch.tensor([len(ids) for ids in self.rollout.completion_ids])


def prompt_batch(dataset: Dataset, rows: Sequence[int], keys: Sequence[RowKey]) -> PromptBatch:
    """Return the rows of a dataset (with `prompt` and `prompt_ids`) as a PromptBatch."""
    columns = dataset[list(rows)]
    return PromptBatch(columns.pop("prompt"), columns.pop("prompt_ids"), columns, list(keys))


def rollout_packs(
    rollout: Rollout,
    minibatches: Sequence[Sequence[int]],
    rows_per_pack: int,
    max_tokens: int | None,
    pad_id: int,
    device: torch.device,
) -> tuple[list[Pack], list[list[int]]]:
    """Return the packs of a rollout on `device`, and the rows of the rollout that each one holds.

    Args:
        rollout: n rows.
        minibatches: the rows of each minibatch; a pack holds rows of one minibatch only.
        rows_per_pack: most rows of a pack.
        max_tokens: most padded tokens of a pack; None: no bound.
        pad_id: fills the padding.
        device: where the packs go.
    """
    prompts, completions = rollout.prompt_ids, rollout.completion_ids
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    packs, pack_rows = [], []
    for number, own in enumerate(minibatches):
        for places in plan_packs([lengths[i] for i in own], rows_per_pack, max_tokens):
            rows = [own[place] for place in places]
            pack = make_pack([prompts[i] for i in rows], [completions[i] for i in rows], pad_id, minibatch=number)
            packs.append(to_device(pack, device))
            pack_rows.append(rows)
    return packs, pack_rows


def pack_states(rollout: Rollout, packs: Sequence[Pack], rows: Sequence[Sequence[int]]) -> list[Tensor] | None:
    """Return the captured states [R, T, H] of each pack; None where the sampler captured none.

    Args:
        rollout: n rows.
        packs: of that rollout.
        rows: rows of the rollout that each pack holds.
    """
    if rollout.states is None:
        return None
    states = rollout.states
    return [
        states[torch.tensor(r, device=states.device), : pack.input_ids.shape[1]].contiguous()
        for pack, r in zip(packs, rows, strict=True)
    ]


def row_scores(outputs: Sequence[PackOutput], pack_rows: Sequence[Sequence[int]]) -> list[float]:
    """Return the scores that the reward adapter gives the rows of a rollout, out of those of its packs."""
    scores = torch.cat([output.scores for output in outputs]).tolist()
    places = [row for rows in pack_rows for row in rows]
    return [score for _, score in sorted(zip(places, scores, strict=True))]


class Sampler:
    """Samples completions and has them scored.

    Args:
        backend: where completions come from.
        rewards: the reward functions and their weights.
        tokenizer: turns completions into text.
        params: length, temperature and stop tokens.
        captures_states: True where the backend is a LocalBackend that hands out the states at the cut.
        captures_last: True where that of a row's last token is wanted too.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        rewards: RewardSet,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        captures_states: bool = False,
        captures_last: bool = False,
    ):
        self.backend = backend
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.params = params
        self.captures_states = captures_states
        self.captures_last = captures_last

    @property
    def may_wait(self) -> bool:
        """True where a reward function may wait for a server; a model of ours would compete for the device."""
        return not all(
            isinstance(function, (ModelReward, EnsembleReward, TrunkReward)) for function in self.rewards.functions
        )

    def roles(self, *names: str) -> tuple[str, ...]:
        """Return what the trunk is asked for: these roles, and "reward" where an adapter of it scores."""
        return names if self.rewards.trunk_reward is None else (*names, "reward")

    def generate(self, batch: PromptBatch, *, trains: bool = False) -> Rollout:
        """Return one completion per row, with states at the cut where they are captured and the rollout trains.

        Raises:
            RuntimeError: the backend broke its contract (number of rows, empty completions, number of logprobs).
        """
        states = {}
        if trains and self.captures_states:
            states = {"keeps_states": True, "keeps_last_state": self.captures_last}
        rollout = self.backend.generate(batch.prompt_ids, self.params, batch.keys, **states)
        if len(rollout) != len(batch.prompt_ids) or not all(rollout.completion_ids):
            raise RuntimeError(
                f"{type(self.backend).__name__}.generate returned {len(rollout)} completions for"
                f" {len(batch.prompt_ids)} prompts, {sum(not ids for ids in rollout.completion_ids)} of them empty;"
                " it must return one completion of at least one token per prompt"
            )
        if [len(x) for x in rollout.sampler_logprobs] != [len(ids) for ids in rollout.completion_ids]:
            raise RuntimeError(
                f"{type(self.backend).__name__}.generate returned sampler_logprobs of other lengths than its"
                " completions; it must return one logprob per completion token"
            )
        return rollout

    def score(
        self,
        batch: PromptBatch,
        rollout: Rollout,
        outputs: Callable[[], Sequence[PackOutput]] = tuple,
        pack_rows: Sequence[Sequence[int]] = (),
        **extras: Any,
    ) -> ScoredRollout:
        """Return the rollout with its text and raw scores.

        Args:
            batch: the prompts.
            rollout: their completions.
            outputs: returns what the trunk says of the packs, with `scores` where `roles` has "reward"; called last.
            pack_rows: rows of the rollout that each pack holds.
            extras: keywords for the reward functions.
        """
        completions = [
            decode_completion(self.tokenizer, ids, stopped, prompt)
            for ids, stopped, prompt in zip(rollout.completion_ids, rollout.stopped, batch.prompts, strict=True)
        ]
        scores = self.rewards.score(
            batch.prompts,
            completions,
            list(rollout.completion_ids),
            columns=batch.columns,
            trunk_scores=lambda: row_scores(outputs(), pack_rows),
            completion_stopped=rollout.stopped,
            **extras,
        )
        return ScoredRollout(batch, rollout, completions, scores)
