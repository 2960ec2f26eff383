"""Episodes: a prompt, then turns that the policy samples and observations that it is given, in alternation.

Token in, token out: the context of a turn is the exact ids so far and the ids of the observation; nothing that was
sampled is decoded and encoded again. `Answers` says what follows a turn. A backend that keeps the cache of a row over
its turns has `generate_turns`; for any other backend `play_turns` samples one turn after the other by `generate`, or
by `generate_as` if it has versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from onetrunk.rollouts.base import SamplingParams
from onetrunk.types import Rollout, RowKey

# (prompt_ids, params, keys) -> one completion per prompt.
Generate = Callable[[Sequence[list[int]], SamplingParams, Sequence[RowKey]], Rollout]


class Answers(Protocol):
    """What answers the turns of one call: environments or tools."""

    def begin(self, row: int, token_ids: list[int], stopped: bool) -> Future[list[int] | None]:
        """Begin to answer a turn; called once for every turn, also for one that the length limit cut off.

        Args:
            row: index of the row in the call.
            token_ids: the tokens of the turn, its stop token included.
            stopped: whether the turn ended at a stop token.

        Returns:
            A future with the ids of the observation that the row goes on from, or None if its episode is over. It never
            raises; other threads work on it.
        """
        ...


@dataclass(frozen=True)
class EpisodeCounts:
    """What happened in the episodes of one or more calls.

    Args:
        episodes, failed_episodes: rows, and those of them whose environment could not be reset or broke.
        turns: turns that were sampled.
        turns_at_limit: episodes that ended because they had `max_turns` turns.
        tool_calls, tool_errors: calls of tools and steps of environments, and those that gave an error.
        observation_tokens: tokens that were given after the prompts.
        tool_seconds: seconds from a turn's end to its answer, summed over rows.
        waited_seconds: seconds in which every row that was not over waited for an answer.
    """

    episodes: int = 0
    failed_episodes: int = 0
    turns: int = 0
    turns_at_limit: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    observation_tokens: int = 0
    tool_seconds: float = 0.0
    waited_seconds: float = 0.0

    def __add__(self, other: EpisodeCounts) -> EpisodeCounts:
        return EpisodeCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass
class EpisodeRow:
    """The state of one episode while it is played.

    Args:
        prompt_ids, key: of the row; turn 0 draws by `key`, turn k by (*key, k).
        max_length: most tokens after the prompt, observations included.
        token_ids, turn_ids: the tokens after the prompt so far, and their turns, -1 at observations.
        logprobs: of each turn and each observation (0), float32.
        num_turns: turns so far.
        stopped: whether the last turn ended at a stop token, and no observation was too long.
    """

    prompt_ids: list[int]
    key: RowKey
    max_length: int
    token_ids: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    num_turns: int = 0
    stopped: bool = False

    @property
    def context(self) -> list[int]:
        """The ids that the next turn goes on from."""
        return [*self.prompt_ids, *self.token_ids]

    @property
    def room(self) -> int:
        """Tokens that are left for the next turn."""
        return self.max_length - len(self.token_ids)

    @property
    def turn_key(self) -> RowKey:
        """The key of the next turn."""
        return (*self.key, self.num_turns) if self.num_turns else self.key

    def add_turn(self, token_ids: Sequence[int], logprobs: Tensor, stopped: bool) -> None:
        """Add a turn that was sampled."""
        self.token_ids += token_ids
        self.turn_ids += [self.num_turns] * len(token_ids)
        self.logprobs.append(logprobs)
        self.num_turns += 1
        self.stopped = stopped

    def add_answer(self, token_ids: Sequence[int] | None) -> bool:
        """Add the observation that answers the last turn; return whether the episode goes on.

        It is over if there is no observation, or no room for it and one more token.
        """
        if token_ids is None:
            return False
        if len(token_ids) >= self.room:
            self.stopped = False
            return False
        self.token_ids += token_ids
        self.turn_ids += [-1] * len(token_ids)
        self.logprobs.append(torch.zeros(len(token_ids)))
        return True


def rollout_of_episodes(rows: Sequence[EpisodeRow], version: int) -> Rollout:
    """Return finished episodes as a rollout of a policy version."""
    return Rollout(
        prompt_ids=[list(row.prompt_ids) for row in rows],
        completion_ids=[row.token_ids for row in rows],
        sampler_logprobs=[torch.cat(row.logprobs) for row in rows],
        stopped=[row.stopped for row in rows],
        policy_version=version,
        turn_ids=[row.turn_ids for row in rows],
    )


def play_turns(
    generate: Generate,
    prompt_ids: Sequence[list[int]],
    params: SamplingParams,
    keys: Sequence[RowKey],
    answers: Answers,
) -> Rollout:
    """Play the episodes of `prompt_ids` in waves: the rows whose turn may begin are sampled together.

    A row that waits for an answer leaves the wave, and delays nobody.
    """
    raise NotImplementedError
