"""Episodes: a prompt, then turns that the policy samples and observations that it is given, in alternation.

Token in, token out: the context of a turn is the exact ids so far and the ids of the observation; nothing that was
sampled is decoded and encoded again. `Answers` says what follows a turn. `play_in_waves` and `play_row_by_row` sample
turn after turn: backends that play episodes in a way of their own have `generate_turns`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from onetrunk.rollouts.base import POLL_S, SamplingParams, marker
from onetrunk.types import Message, Prompt, Rollout, RowKey

# Seconds for which a wave waits for rows that were just sampled.
GATHER_S = 0.05
T = TypeVar("T")

# (prompt_ids, params, keys) -> one completion per prompt.
Generate = Callable[..., Rollout]
# (done_rows, total_rows, done_tokens), told whenever rows are over.
Progress = Callable[[int, int, int], None]


class NewContext(list[int]):
    """The ids of a context that takes the place of all that a row has so far: its contexts are compacted."""


class Answers(Protocol):
    """What answers the turns of one call: environments or tools."""

    def begin(self, row: int, token_ids: list[int], stopped: bool) -> Future[list[int] | None]:
        """Begin to answer a turn; called once for every turn, also for one that the length limit cut off.

        Args:
            row: index of the row in the call.
            token_ids: the tokens of the turn, its stop token included.
            stopped: whether the turn ended at a stop token.

        Returns:
            A future with the ids of the observation that the row continues from, or a NewContext that replaces the
            whole context, or None if its episode is over. It never raises; other threads work on it.
        """
        ...

    def poll(self) -> None:
        """Called now and then by the drivers of this file while rows are played; may raise to give up."""
        ...


@dataclass(frozen=True)
class EpisodeCounts:
    """What happened in the episodes of one or more calls.

    Args:
        episodes, failed_episodes: rows, and those of them whose environment could not be reset or broke.
        turns: turns that were sampled.
        turns_at_limit: episodes that ended because they had `max_turns` turns, with room for more tokens.
        tool_calls, tool_errors: calls of tools and steps of environments, and those that gave an error.
        observation_tokens: tokens that were given after the prompts.
        tool_seconds: seconds from a turn's end to its answer, summed over rows.
        waited_seconds: seconds in which every row that was not over waited for an answer.
        turns_cut: turns that `max_turn_length` cut off.
        truncated: episodes that a limit of their environment ended.
        compactions: contexts that took the place of longer ones.
        summaries, summary_tokens, summaries_cut: turns that wrote a summary, their tokens, and those at their limit.
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
    turns_cut: int = 0
    truncated: int = 0
    compactions: int = 0
    summaries: int = 0
    summary_tokens: int = 0
    summaries_cut: int = 0

    def __add__(self, other: EpisodeCounts) -> EpisodeCounts:
        return EpisodeCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class EpisodeOutcome:
    """What is known of an episode besides its tokens.

    Args:
        prompt: with the observation of `reset`.
        messages: of a conversation, everything after the prompt; None for a text.
        environment: what the row was played in; None if tools alone answer.
        counts: what happened in it.
        failure: why it could not be played; None if it was. It has no score.
        tools: the schemas that the prompt shows.
        leave: takes `environment` once the episode is scored: for later ones, or, if something broke, to close it.
    """

    prompt: Prompt
    messages: list[Message] | None
    environment: Any
    counts: EpisodeCounts
    failure: str | None = None
    tools: Sequence[dict[str, Any]] = ()
    leave: Callable[[Any], Any] = lambda environment: None


@dataclass
class EpisodeTokens:
    """The tokens of one episode while it is played.

    Args:
        prompt_ids, key: of the row; turn 0 draws by `key`, turn k by (*key, k).
        max_length: most tokens after the prompt, observations and new contexts included.
        max_turn_length: most tokens of a turn; None: no other bound.
        max_context_length: most tokens of a context, if contexts are compacted.
        token_ids, turn_ids: the tokens after the prompt so far, and their turns, -1 at observations.
        logprobs: of each turn and each observation (0), float32.
        num_turns: turns so far.
        stopped: whether the last turn ended at a stop token, and no observation was too long.
        restarts: places in token_ids at which a new context begins.
        begins_anew: whether the next turn is the first one of a new context.
    """

    prompt_ids: list[int]
    key: RowKey
    max_length: int
    max_turn_length: int | None = None
    max_context_length: int | None = None
    token_ids: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    num_turns: int = 0
    stopped: bool = False
    restarts: list[int] = field(default_factory=list)
    begins_anew: bool = False

    @property
    def context(self) -> list[int]:
        """The ids that the next turn continues from."""
        return self.token_ids[self.restarts[-1] :] if self.restarts else [*self.prompt_ids, *self.token_ids]

    @property
    def room(self) -> int:
        """Tokens that are left of the episode."""
        return self.max_length - len(self.token_ids)

    @property
    def context_room(self) -> int:
        """Tokens that are left of the context, and of the episode."""
        if self.max_context_length is None:
            return self.room
        start = self.restarts[-1] if self.restarts else -len(self.prompt_ids)
        return min(self.room, self.max_context_length - (len(self.token_ids) - start))

    @property
    def turn_room(self) -> int:
        """Most tokens of the next turn."""
        room = self.context_room
        return room if self.max_turn_length is None else min(room, self.max_turn_length)

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
        self.stopped, self.begins_anew = stopped, False

    def add_answer(self, token_ids: Sequence[int] | None) -> bool:
        """Add the observation that answers the last turn; return whether the episode continues.

        It is over if there is no observation, or no room for it and one more token.
        """
        if token_ids is None:
            return False
        self.begins_anew = isinstance(token_ids, NewContext)
        if len(token_ids) >= (min(self.room, self.max_context_length) if self.begins_anew else self.context_room):
            self.stopped = False
            return False
        if self.begins_anew:
            self.restarts.append(len(self.token_ids))
        self.token_ids += token_ids
        self.turn_ids += [-1] * len(token_ids)
        self.logprobs.append(torch.zeros(len(token_ids)))
        return True


def rollout_of_episodes(rows: Sequence[EpisodeTokens], version: int) -> Rollout:
    """Return finished episodes as a rollout of a policy version."""
    return Rollout(
        prompt_ids=[list(row.prompt_ids) for row in rows],
        completion_ids=[row.token_ids for row in rows],
        sampler_logprobs=[torch.cat(row.logprobs) for row in rows],
        stopped=[row.stopped for row in rows],
        policy_version=version,
        turn_ids=[row.turn_ids for row in rows],
        restarts=[row.restarts for row in rows] if any(row.max_context_length for row in rows) else None,
    )


def play_in_waves(
    generate: Generate,
    prompt_ids: Sequence[list[int]],
    params: SamplingParams,
    keys: Sequence[RowKey],
    answers: Answers,
    progress: Progress | None = None,
    has_row_limits: bool = False,
) -> Rollout:
    """Play episodes by a backend that samples many rows in one call: the rows whose turn may begin go together.

    A row that waits for an answer leaves the wave, and delays nobody. Rows with different room are sampled in calls of
    their own, because a call has one limit and a row may not go beyond its positions.

    Args:
        has_row_limits: whether `generate` takes `limits`, one per row, so that a wave is one call.
    """
    rows, over = rows_of(prompt_ids, params, keys), []
    ready, waiting, version = list(range(len(rows))), {}, 0
    while ready or waiting:
        by_room: dict[int, list[int]] = {}
        for index in ready:
            by_room.setdefault(0 if has_row_limits else rows[index].turn_room, []).append(index)
        for group in by_room.values():
            wave = [rows[index] for index in group]
            limits = {"limits": [row.turn_room for row in wave]} if has_row_limits else {}
            most = replace(params, max_completion_length=max(row.turn_room for row in wave))
            sampled = generate([row.context for row in wave], most, [row.turn_key for row in wave], **limits)
            version = sampled.policy_version
            columns = sampled.completion_ids, sampled.sampler_logprobs, sampled.stopped
            for index, *turn in zip(group, *columns, strict=True):
                rows[index].add_turn(*turn)
                waiting[answers.begin(index, list(turn[0]), turn[2])] = index
        # Most answers come at once, and their rows belong into one wave.
        wait(waiting, GATHER_S)
        while waiting and not (done := wait(waiting, POLL_S, FIRST_COMPLETED).done):
            answers.poll()
        answered = sorted((waiting.pop(future), future.result()) for future in (done if waiting else ()))
        ready = [index for index, token_ids in answered if rows[index].add_answer(token_ids)]
        over += [rows[index] for index, _ in answered if index not in ready]
        if len(ready) < len(answered):
            tell(progress, over, len(rows))
    return rollout_of_episodes(rows, version)


def play_row_by_row(
    generate: Generate,
    prompt_ids: Sequence[list[int]],
    params: SamplingParams,
    keys: Sequence[RowKey],
    answers: Answers,
    progress: Progress | None = None,
) -> Rollout:
    """Play each episode in a thread of its own, by a backend that may be called in several threads at once.

    If `answers.poll` gives up, they stop at their next turn.
    """
    rows, mark, is_over = rows_of(prompt_ids, params, keys), marker(), threading.Event()

    def play(index: int) -> int:
        mark()
        row = rows[index]
        while not is_over.is_set():
            limits = replace(params, max_completion_length=row.turn_room)
            sampled = generate([row.context], limits, [row.turn_key])
            token_ids, stopped = sampled.completion_ids[0], sampled.stopped[0]
            row.add_turn(token_ids, sampled.sampler_logprobs[0], stopped)
            if not row.add_answer(answers.begin(index, list(token_ids), stopped).result()):
                return sampled.policy_version
        return -1

    playing = [in_thread(play, index) for index in range(len(rows))]
    try:
        left = playing
        while left:
            answers.poll()
            done, left = wait(left, POLL_S, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if done:
                over = [row for row, future in zip(rows, playing, strict=True) if future not in left]
                tell(progress, over, len(rows))
    finally:
        is_over.set()
    return rollout_of_episodes(rows, min(future.result() for future in playing) if playing else 0)


def rows_of(prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> list[EpisodeTokens]:
    """Return the rows of a call before their first turns."""
    limits = params.max_completion_length, params.max_turn_length, params.max_context_length
    return [EpisodeTokens(list(ids), key, *limits) for ids, key in zip(prompt_ids, keys, strict=True)]


def tell(progress: Progress | None, over: Sequence[EpisodeTokens], total: int) -> None:
    """Tell how many rows of `total` are over."""
    if progress is not None:
        progress(len(over), total, sum(len(row.token_ids) for row in over))


def in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
    """Run a function in a daemon thread of its own, which a hanging call cannot take from others."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=getattr(function, "__name__", "episode")).start()
    return future
