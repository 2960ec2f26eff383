"""Rollouts: which prompts come when, what samples and scores them, and before which update (RolloutSource)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from onetrunk.data.prompts import decode_completion
from onetrunk.data.sharded import BlockOrder, ShardedRows
from onetrunk.ops.masking import on_cpu, turn_starts
from onetrunk.ops.packing import deal_rows
from onetrunk.parallel.groups import RowGroups, once_per_group
from onetrunk.ppo.packs import RolloutPack
from onetrunk.rewards.combine import RewardSet
from onetrunk.rewards.reward import Arrival, Scores, arrivals
from onetrunk.rollouts.base import KeptStates, RolloutBackend, SampledRole, SamplingParams, VersionedBackend
from onetrunk.rollouts.episodes.rows import play_in_waves, play_row_by_row
from onetrunk.types import Completion, Message, Prompt, Rollout, RowKey
from onetrunk.utils.randomness import DEAL_STREAM, MINIBATCH_STREAM, PROMPTS_STREAM, derived_seed, generator_of

if TYPE_CHECKING:
    from onetrunk.ppo.config import PPOConfig
    from onetrunk.rollouts.episodes.environments import Episodes


@dataclass(frozen=True)
class PromptOrder:
    """Which prompts a rollout takes, and how its completions are dealt to processes and minibatches.

    Everything derives from a seed and the number of the rollout, so a resumed run needs no history.

    Args:
        num_prompts: rows of the dataset, at least 1.
        rollout_batch_size, num_generations, num_minibatches: the settings with these names in PPOConfig.
        order_seed: seed of the permutations of the prompts.
        seed: seed of the completions and minibatches.
        shuffle: False keeps the order of the dataset in every pass.
        blocks: the order of sharded rows, of which no permutation of all rows is in memory.
    """

    num_prompts: int
    rollout_batch_size: int
    num_generations: int
    order_seed: int
    seed: int
    shuffle: bool = True
    num_minibatches: int = 1
    blocks: BlockOrder | None = None

    @classmethod
    def from_config(cls, config: PPOConfig, dataset: Dataset | ShardedRows) -> PromptOrder:
        return cls(
            len(dataset),
            config.rollout_batch_size,
            config.num_generations,
            order_seed=config.seed if config.data_seed is None else config.data_seed,
            seed=config.seed,
            shuffle=config.shuffle_dataset,
            num_minibatches=config.num_minibatches,
            blocks=dataset.order if isinstance(dataset, ShardedRows) else None,
        )

    @property
    def rollouts_per_pass(self) -> int:
        return math.ceil(self.num_prompts / self.rollout_batch_size)

    def prompts(self, iteration: int) -> np.ndarray:
        """Return the dataset rows [rollout_batch_size] of a rollout."""
        number, place = divmod(iteration, self.rollouts_per_pass)
        first = place * self.rollout_batch_size
        places = np.arange(first, first + self.rollout_batch_size) % self.num_prompts
        if not self.shuffle:
            return places
        if self.blocks is None:
            return generator_of((self.order_seed, PROMPTS_STREAM, number)).permutation(self.num_prompts)[places]
        # The last rollout of a pass is filled up from its start, perhaps more than once.
        size = min(self.rollout_batch_size, self.num_prompts - first)
        last = self.blocks.rows(self.order_seed, number, first, first + size)
        more = self.blocks.rows(self.order_seed, number, 0, min(self.rollout_batch_size - size, self.num_prompts))
        return np.concatenate([last, np.resize(more, self.rollout_batch_size - size)])

    def rows(self, iteration: int, completions: Sequence[int]) -> tuple[list[int], list[RowKey]]:
        """Return the dataset row and the key of some completions of a rollout.

        Completions are counted over all processes, so that one does not depend on the number of processes. Those of
        one prompt have consecutive numbers.
        """
        prompts = self.prompts(iteration)
        rows = [int(prompts[i // self.num_generations]) for i in completions]
        return rows, [(self.seed, iteration, i) for i in completions]

    def deal(self, iteration: int, process: int, num_processes: int) -> tuple[list[int], list[list[int]]]:
        """Return the completions of a process in a rollout, and for each minibatch their positions in that list."""
        num_rows = self.rollout_batch_size * self.num_generations
        generator = self._generator(DEAL_STREAM, iteration)
        return deal_rows(num_rows, self.num_minibatches, generator, process, num_processes)

    def minibatch(self, iteration: int, slot: int) -> int:
        """Return which minibatch the optimizer step `slot` of a rollout trains on; every epoch has its own order."""
        epoch, place = divmod(slot, self.num_minibatches)
        generator = self._generator(MINIBATCH_STREAM, iteration, epoch)
        return int(torch.randperm(self.num_minibatches, generator=generator)[place])

    def _generator(self, *words: int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.seed, *words))


@dataclass(frozen=True)
class PromptBatch:
    """Prompts for the sampler, one entry per completion, and the dataset's other columns for the reward functions."""

    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    columns: dict[str, list[Any]]
    keys: list[RowKey]

    def only(self, keys: Sequence[RowKey]) -> PromptBatch:
        """Return the rows with these keys."""
        place_of = {key: place for place, key in enumerate(self.keys)}
        places = [place_of[key] for key in keys]
        columns = {name: [column[i] for i in places] for name, column in self.columns.items()}
        return PromptBatch(
            [self.prompts[i] for i in places], [self.prompt_ids[i] for i in places], columns, list(keys)
        )


@dataclass(frozen=True)
class Sampled:
    """Prompts and their completions, n rows of this process; the rollout says which policy version sampled each."""

    batch: PromptBatch
    rollout: Rollout

    @property
    def stopped(self) -> Tensor:
        """[n] bool, False if a completion was cut off at max_completion_length."""
        return torch.tensor(self.rollout.stopped)


# Stands for a turn's number where a compacted context begins.
CONTEXT = -2


@dataclass(frozen=True)
class ScoredRollout(Sampled):
    """Completions as text, and their scores.

    Args:
        parts: of each episode, (turn, text) of its turns, its observations (turn -1) and the contexts that compaction
            gave (turn CONTEXT); None: no episodes.
        turn_values: of each episode, the value at the first token of every turn; None: not known.
    """

    completions: list[str | list[Message]]
    scores: Scores
    parts: list[list[tuple[int, str]]] | None = None
    turn_values: list[list[float]] | None = None

    @property
    def lengths(self) -> Tensor:
        """[n] tokens that the policy sampled."""
        marks = self.rollout.turn_ids or self.rollout.completion_ids  # -1 marks an observation; no token is -1.
        return torch.tensor([len(row) - row.count(-1) for row in marks])

    def arrivals(self, row: int) -> list[Arrival]:
        """Return where the reward of a row fell."""
        turn_ids = self.rollout.turn_ids
        turns = [0] * len(self.rollout.completion_ids[row]) if turn_ids is None else turn_ids[row]
        return arrivals(self.scores, row, turns)


def with_turn_values(scored: ScoredRollout, packs: Sequence[RolloutPack]) -> ScoredRollout:
    """Return a rollout with the values of its turns, from the outputs of its packs, if it has episodes."""
    if scored.parts is None:
        return scored
    starts = [turn_starts(item.pack.completion_mask, item.pack.turns) for item in packs]
    values = [torch.where(at, item.output.values, torch.nan) for item, at in zip(packs, starts, strict=True)]
    found = {}
    for item, of_pack in zip(packs, on_cpu(values), strict=True):
        found |= {row: own[~own.isnan()].tolist() for row, own in zip(item.rows, of_pack, strict=True)}
    return replace(scored, turn_values=[found[row] for row in range(len(scored.rollout))])


def longest_prompt_of(dataset: Dataset | ShardedRows, config: PPOConfig) -> int:
    """Return the tokens of the longest prompt; of sharded rows max_prompt_length, which they must not exceed."""
    if isinstance(dataset, ShardedRows):
        return config.max_prompt_length
    return max(map(len, dataset["prompt_ids"]))


def prompt_batch(dataset: Dataset | ShardedRows, rows: Sequence[int], keys: Sequence[RowKey]) -> PromptBatch:
    """Return the rows of a dataset (with `prompt` and `prompt_ids`) as a PromptBatch."""
    columns = dataset[list(rows)]
    return PromptBatch(columns.pop("prompt"), columns.pop("prompt_ids"), columns, list(keys))


@dataclass(frozen=True)
class RolloutMaker:
    """Samples completions and scores them.

    Args:
        backend, rewards, tokenizer, params: what samples, scores and decodes, and how long and when completions stop.
        keeps: the trunk states that a LocalBackend returns with training rollouts; None: none.
        episodes: the tools and environments that answer the turns of completions; None: each is one turn.
    """

    backend: RolloutBackend
    rewards: RewardSet
    tokenizer: PreTrainedTokenizerBase
    params: SamplingParams
    keeps: KeptStates | None = None
    episodes: Episodes | None = None

    @property
    def may_wait(self) -> bool:
        """Whether a reward function may wait for a server. A model of ours would compete for the device instead."""
        return not all(getattr(function, "runs_here", False) for function in self.rewards.functions)

    def roles(self, *names: str) -> tuple[str, ...]:
        """Return the roles that the trunk runs: `names`, and "reward" if one of its adapters scores."""
        return names if self.rewards.trunk_reward is None else (*names, "reward")

    @property
    def is_versioned(self) -> bool:
        """Whether the backend has weights of its own and samples from any version that it holds."""
        return isinstance(self.backend, VersionedBackend)

    @property
    def has_own_weights(self) -> bool:
        """Whether the backend samples from a copy of the weights, which another program may round differently."""
        return self.is_versioned or getattr(self.backend, "has_own_weights", False)

    def metrics(self) -> dict[str, float]:
        """Return what the backend measures of itself, by public names; {} for one that measures nothing."""
        report = getattr(self.backend, "metrics", None)
        return {} if report is None else report()

    def training_options(self, reads_last: bool) -> dict[str, KeptStates]:
        """Return the keywords with which the backend samples a rollout that trains.

        Args:
            reads_last: whether the state of a row's last token is needed, whatever `keeps` says.
        """
        return {} if self.keeps is None else {"keeps": "all" if reads_last else self.keeps}

    def generate(self, batch: PromptBatch, role: SampledRole = "policy", version: int = 0, **options: Any) -> Rollout:
        """Return one completion per row; RuntimeError if the backend breaks its contract.

        Args:
            role, version: what a versioned backend samples from; any other samples from what it was last synced with.
        """
        if self.episodes is not None:
            return self._play(batch, role, version, options)
        return self._sample(role, version, batch.prompt_ids, self.params, batch.keys, **options)

    def _sample(
        self,
        role: SampledRole,
        version: int,
        prompt_ids: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[RowKey],
        **options: Any,
    ) -> Rollout:
        """Return one completion, or one turn, per row; may run in any thread if the backend is versioned."""
        if not self.is_versioned:
            rollout = self.backend.generate(prompt_ids, params, keys, **options)
        else:
            rollout = self.backend.generate_as(role, version, prompt_ids, params, keys)
        self._require_contract(rollout, len(prompt_ids))
        if self.is_versioned and role == "policy":
            self._require_version(rollout, version)
        return rollout

    def _play(self, batch: PromptBatch, role: SampledRole, version: int, options: dict[str, Any]) -> Rollout:
        """Return one episode per row, played turn by turn."""
        episodes = self.episodes
        if hasattr(self.backend, "generate_turns"):
            of = {"role": role, "version": version} if self.is_versioned else options
            play = functools.partial(self.backend.generate_turns, **of)
        else:
            driver = play_row_by_row if self.is_versioned else play_in_waves
            play = functools.partial(driver, functools.partial(self._sample, role, version))
        rows = [
            episodes.row(prompt, ids, {name: column[i] for name, column in batch.columns.items()}, key)
            for i, (prompt, ids, key) in enumerate(zip(batch.prompts, batch.prompt_ids, batch.keys, strict=True))
        ]
        rollout = episodes.play(rows, self.params, play)
        self._require_contract(rollout, len(rows))
        return rollout

    def _require_version(self, rollout: Rollout, version: int) -> None:
        if rollout.policy_version != version:
            raise RuntimeError(
                f"{type(self.backend).__name__}.generate_as returned samples of policy version"
                f" {rollout.policy_version}, and version {version} was asked for; none of them is trained on"
            )

    def _require_contract(self, rollout: Rollout, num_prompts: int) -> None:
        name = f"{type(self.backend).__name__}.generate"
        if len(rollout) != num_prompts or not all(rollout.completion_ids):
            raise RuntimeError(
                f"{name} returned {len(rollout)} completions for"
                f" {num_prompts} prompts, {sum(not ids for ids in rollout.completion_ids)} of them empty;"
                " it must return one completion of at least one token per prompt"
            )
        if [len(x) for x in rollout.sampler_logprobs] != [len(ids) for ids in rollout.completion_ids]:
            raise RuntimeError(
                f"{name} returned sampler_logprobs whose lengths differ from"
                " its completions'; it must return one logprob per completion token"
            )
        if not torch.cat(list(rollout.sampler_logprobs)).isfinite().all():
            raise RuntimeError(
                f"{name} returned sampler_logprobs that are not finite; it must return the logprob of each token as"
                " it was sampled"
            )

    def score(
        self, sampled: Sampled, packs: Callable[[], Sequence[RolloutPack]] = tuple, **extras: Any
    ) -> ScoredRollout:
        """Return the rollout with its text and raw scores; `extras` are keywords for the reward functions.

        `packs` returns the packs with their outputs. It is called last, and only if an adapter of the trunk scores.
        """
        batch, rollout = sampled.batch, sampled.rollout
        played = list(range(len(rollout)))
        if self.episodes is not None:
            batch = replace(batch, prompts=[episode.prompt for episode in rollout.episodes])
            # A failed episode has no score, and no reward function sees it.
            played = [i for i in played if rollout.episodes[i].failure is None]
            if self.episodes.has_environment:
                extras["environments"] = [rollout.episodes[i].environment for i in played]

        def of_played(column: Sequence[Any] | None) -> list[Any] | None:
            return None if column is None else [column[i] for i in played]

        gives_rewards = self.episodes is None or self.episodes.gives_rewards

        def trunk_scores() -> list[float]:
            scored = packs()
            scores = torch.cat([pack.output.scores for pack in scored]).tolist()
            rows = [row for pack in scored for row in pack.rows]
            return of_played([score for _, score in sorted(zip(rows, scores, strict=True))])

        completions = self._decoded(batch, rollout)
        columns = {name: of_played(column) for name, column in batch.columns.items()}
        if self.episodes is not None and self.episodes.has_tools:  # For the templates of reward models.
            columns["tools"] = of_played([episode.tools for episode in rollout.episodes])
        score = functools.partial(
            self.rewards.score,
            of_played(batch.prompts),
            of_played(completions),
            [list(rollout.completion_ids[i]) for i in played],  # A function may change them.
            columns=columns,
            trunk_scores=trunk_scores,
            completion_stopped=of_played(rollout.stopped),
            turn_ids=of_played(rollout.turn_ids),
            turn_rewards=of_played(rollout.turn_rewards if gives_rewards else None),
            environment_name="environment" if self.episodes is None else self.episodes.name,
            **extras,
        )
        # Processes that hold the same rows get the same rewards.
        scores = once_per_group(score)
        if self.episodes is not None:
            self.episodes.release(rollout)
        scores = scores.of_rows(played, map(len, rollout.completion_ids))
        return ScoredRollout(batch, rollout, completions, scores, self._parts(rollout))

    def close(self) -> None:
        """Close the environments of episodes; later ones play in new environments."""
        if self.episodes is not None:
            self.episodes.close()

    def require_played(self, rollout: Rollout, metrics: Mapping[str, float]) -> None:
        """Raise RuntimeError on every process if, by the metrics of a rollout, too many of its episodes failed."""
        if self.episodes is not None:
            self.episodes.require_played(rollout, metrics["episode/failed"])

    def _decoded(self, batch: PromptBatch, rollout: Rollout) -> list[Completion]:
        given = [{i for context in rollout.contexts(row) for i in context} for row in range(len(rollout))]
        said = [
            [t for i, t in enumerate(ids) if i not in own] if own else ids
            for ids, own in zip(rollout.completion_ids, given, strict=True)
        ]
        rows = zip(said, rollout.stopped, batch.prompts, strict=True)
        # An environment may also end an episode in a turn that was cut off.
        ends = self.params.stop_token_ids if rollout.episodes else None
        texts = [
            decode_completion(self.tokenizer, ids, stopped and (ends is None or ids[-1] in ends), prompt)
            for ids, stopped, prompt in rows
        ]
        episodes = rollout.episodes or [None] * len(texts)
        return [
            text if e is None or e.messages is None else e.messages for text, e in zip(texts, episodes, strict=True)
        ]

    def _parts(self, rollout: Rollout) -> list[list[tuple[int, str]]] | None:
        if rollout.turn_ids is None:
            return None
        parts = []
        for row, (ids, turns) in enumerate(zip(rollout.completion_ids, rollout.turn_ids, strict=True)):
            given = {i for context in rollout.contexts(row) for i in context}
            turns = [CONTEXT if i in given else turn for i, turn in enumerate(turns)]
            cuts = [i for i in range(len(ids)) if i == 0 or turns[i] != turns[i - 1]]
            spans = zip(cuts, [*cuts[1:], len(ids)], strict=True)
            decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
            parts.append([(turns[start], decode(ids[start:end])) for start, end in spans])
        return parts


class RolloutSource(Protocol):
    """Where the rollouts of a run come from; hides what samples them, and whether before their update or earlier."""

    def next(self, iteration: int) -> Sampled:
        """Return this process's share of rollout `iteration`. Rollouts come in order; one may be asked for again.

        Raises:
            StopAsked: the run is to stop; nothing is lost.
        """
        ...

    def start(self) -> None:
        """Resume the samples that were in flight when the checkpoint was saved. The weights are loaded by now."""
        ...

    def save(self, folder: str | Path, first: int) -> None:
        """Write what is under way into a checkpoint; `first` is the first rollout that is not in use."""
        ...

    def load(self, folder: str | Path, first: int) -> None:
        """Restore what `save` wrote, perhaps of another kind of source."""
        ...

    def close(self) -> None:
        """Sample nothing more."""
        ...


class SamplingStream(Protocol):
    """What a RolloutSource reads from the ExperienceStream that it samples for."""

    config: PPOConfig
    sampler: RolloutMaker
    data_parallel: RowGroups
    # The policy.
    model: nn.Module
    # Of the whole run: no rollout beyond them is sampled.
    num_rollouts: int
    # Whether the states of last tokens are needed.
    reads_next_values: bool

    def prompts(self, iteration: int) -> PromptBatch:
        """Return this process's prompts of a rollout."""
        ...

    def sampling(self, is_collective: bool) -> AbstractContextManager[None]:
        """Return a block in which this process samples, and the run may be stopped."""
        ...

    def poll(self) -> None:
        """Renew the heartbeat, and give up the work in progress if the run is to stop."""
        ...


class SyncSource:
    """A RolloutSource that samples each rollout when it is asked for, from the weights that the last update left."""

    def __init__(self, stream: SamplingStream):
        self.stream = stream

    def next(self, iteration: int) -> Sampled:
        """Sample rollout `iteration`."""
        stream, sampler = self.stream, self.stream.sampler
        batch, version = stream.prompts(iteration), iteration * stream.config.steps_per_rollout
        sampler.backend.sync(stream.model, version)
        # No process can give up sampling alone where others work on the same rows.
        is_collective = stream.data_parallel.shares_rows or getattr(sampler.backend, "is_collective", False)
        options = sampler.training_options(stream.reads_next_values)
        with stream.sampling(is_collective):
            return Sampled(batch, sampler.generate(batch, version=version, **options))

    def start(self) -> None:
        """Do nothing: no rollout is under way at a checkpoint."""

    def save(self, folder: str | Path, first: int) -> None:
        """Write nothing."""

    def load(self, folder: str | Path, first: int) -> None:
        """Read nothing."""

    def close(self) -> None:
        """Do nothing."""
