"""What answers the turns of episodes while they are played.

Failures are observations or failed episodes; the call ends if too many calls hang.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from onetrunk.rollouts.base import POLL_S, SamplingParams
from onetrunk.rollouts.episodes.chat_turns import ChatTurns, with_observation
from onetrunk.rollouts.episodes.compaction import Compaction
from onetrunk.rollouts.episodes.kinds import EpisodeLimits, LiveEpisode, PlayedTurn
from onetrunk.rollouts.episodes.rows import EpisodeOutcome, NewContext, in_thread
from onetrunk.rollouts.episodes.tool_calls import (
    TimedCalls,
    TimedOut,
    TooManyHang,
    argument_fault,
    error_text,
    shortened,
)
from onetrunk.servers.openenv import LostSession
from onetrunk.types import Message, Rollout
from onetrunk.utils.randomness import ENVIRONMENT_STREAM, derived_seed
from onetrunk.utils.redaction import encodable

logger = logging.getLogger(__name__)

# Gymnasium's environments take seeds of 31 bits.
SEEDS = 2**31
# Calls of tools that one turn may begin at the same time.
CALLS_AT_ONCE = 16
# What `reset` says is not cut, because it is the task. Longer than any model reads.
MOST_CHARACTERS = 2**20


class StepFault(Exception):
    """What `step` returned is not what an environment returns."""


class EpisodePlayer:
    """The `Answers` of one call of the sampler: plays its episodes, each in an environment of its own."""

    def __init__(
        self,
        turns: ChatTurns,
        calls: TimedCalls,
        limits: EpisodeLimits,
        rows: Sequence[LiveEpisode],
        params: SamplingParams,
        poll: Callable[[], None],
    ):
        self.turns, self.calls, self.limits, self.rows, self.poll = turns, calls, limits, rows, poll
        self.max_length, self.stop_ids = params.max_completion_length, params.stop_token_ids
        self.max_turn_length = params.max_turn_length
        compacts = limits.compaction.max_context_length is not None
        self.compaction = Compaction(limits.compaction, turns, params.max_turn_length) if compacts else None
        # What ends the run; raised at the end of the call.
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._num_playing, self._num_waiting = len(rows), 0
        self._all_wait_since, self._waited_s = 0.0, 0.0

    def reset(self) -> None:
        """Reset every environment, all at once."""
        self._for_each_row("reset", self._reset)

    def _reset(self, row: LiveEpisode) -> None:
        row.environment, row.shown = self.calls.call(row.kind.take), row.prompt
        if row.environment is not None:
            self._observe_reset(row, self._call_reset(row))
        row.context = list(row.prompt_ids)

    def _call_reset(self, row: LiveEpisode) -> Any:
        columns = {"prompt": row.prompt, **row.columns}
        if row.kind.steps or row.kind.offers:
            seed = derived_seed(*row.key, ENVIRONMENT_STREAM) % SEEDS
            result = self.calls.call(row.environment.reset, seed=seed, options=columns)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError("it must return (observation, info)")
            return result[0]
        return self.calls.call(row.environment.reset, **columns)

    def _observe_reset(self, row: LiveEpisode, observation: Any) -> None:
        if observation is None or observation == "":
            return
        if not isinstance(observation, str):
            raise TypeError(f"the observation is a {type(observation).__name__}; give a text")
        if len(observation) > MOST_CHARACTERS:
            raise ValueError(f"the observation has {len(observation)} characters, more than {MOST_CHARACTERS}")
        observation = encodable(observation)
        if row.is_chat:
            prompt = with_observation(row.prompt, observation)
            row.shown = with_observation(row.prompt, self.turns.foreign(observation))
            ids = self.turns.prompt_ids(row.shown, row.tools)
        else:
            prompt, ids = row.prompt + observation, [*row.prompt_ids, *self.turns.text_ids(observation)]
        longest = self.limits.longest_prompt
        if longest is not None and len(ids) > longest:
            raise ValueError(f"the prompt with the observation has {len(ids)} tokens, more than {longest}")
        row.prompt, row.prompt_ids = prompt, ids

    def begin(self, row: int, token_ids: list[int], stopped: bool) -> Future[list[int] | None]:
        """Answer a turn in another thread."""
        self._wait(1)
        return in_thread(self._answer, self.rows[row], token_ids, stopped)

    def _answer(self, row: LiveEpisode, token_ids: list[int], stopped: bool) -> list[int] | None:
        start, before = time.perf_counter(), row.context
        observation = None
        try:
            row.context, row.length = [*before, *token_ids], row.length + len(token_ids)
            row.count(turns=1, turns_cut=int(not stopped and len(token_ids) == self.max_turn_length))
            row.rewards.append(0.0)
            if row.failure is None and self._error is None:
                answer = self._step if row.kind.steps else self._call_tools
                answer = self._take_summary if row.asks_summary else answer
                observation = answer(row, token_ids, stopped, before)
        except TooManyHang as error:
            self._error = self._error or error
        except Exception as error:  # Such as a template's that rejects what a tool said.
            row.failure = f"the answer to a turn raised {type(error).__name__}: {encodable(error)}"
        row.context = [*(() if isinstance(observation, NewContext) else row.context), *(observation or ())]
        row.length += len(observation or ())
        row.count(tool_seconds=time.perf_counter() - start)
        is_full = self.compaction is not None and len(row.context) >= self.limits.compaction.max_context_length
        self._wait(-1, is_over=observation is None or is_full or row.length >= self.max_length)
        return observation

    def _is_last(self, row: LiveEpisode) -> bool:
        """Return whether a row that would continue has all turns, and count it unless the length ends it anyway."""
        row.is_cut = row.counts.turns - row.counts.summaries == self.limits.max_turns
        has_room = row.length < self.max_length
        row.count(turns_at_limit=int(row.is_cut and has_room))
        return row.is_cut

    def _step(self, row: LiveEpisode, token_ids: list[int], stopped: bool, _before: list[int]) -> list[int] | None:
        """Let a Gymnasium environment answer."""
        action, is_over = self.turns.text_of(token_ids, stopped), False
        row.messages.append({"role": "assistant", "content": action})
        row.count(tool_calls=1)
        try:
            text, reward, terminated, truncated, _ = self._checked(self.calls.call(row.environment.step, action))
            row.rewards[-1], is_over = float(reward), bool(terminated or truncated)
            row.is_terminated, row.is_cut = bool(terminated), bool(truncated and not terminated)
            row.count(truncated=int(row.is_cut))
        except TooManyHang:
            raise
        except (TimedOut, StepFault, LostSession) as error:
            # Nobody knows in which state the environment is.
            row.count(tool_errors=1)
            row.failure = f"step: {encodable(error)}"
            return None
        except BaseException as error:
            row.count(tool_errors=1)
            text = error_text(error)
        if is_over or self._is_last(row):
            return None
        text = shortened(text, self.limits.observation_characters)
        row.messages.append({"role": "user", "content": text})
        answer = row.messages[-1:]
        ids = self.turns.ids_of(answer, self.stop_ids, stopped) if row.is_chat else self.turns.text_ids(text)
        return self._fitted(row, token_ids, stopped, ids, row.messages[-2:])

    @staticmethod
    def _checked(result: Any) -> tuple[Any, ...]:
        if not isinstance(result, tuple) or len(result) != 5:
            raise StepFault("it must return (observation, reward, terminated, truncated, info)")
        if not isinstance(result[0], str) and not (result[2] or result[3]):
            raise StepFault(f"the observation is a {type(result[0]).__name__}; it must be a text")
        try:
            is_number = math.isfinite(float(result[1]))
        except (TypeError, ValueError):
            is_number = False
        if not is_number:
            raise StepFault(f"the reward is {result[1]!r}; it must be a finite number")
        return result

    def _call_tools(
        self, row: LiveEpisode, token_ids: list[int], stopped: bool, before: list[int]
    ) -> list[int] | None:
        """Call the tools that a turn asks for; None if it asks for none, and the episode is over."""
        message = self.turns.message_of(token_ids, stopped, before, row.tools)
        row.messages.append(message)
        calls = message.get("tool_calls") or []
        # A call in a turn that was cut off may be cut off too.
        if not calls or not row.kind.schemas or not stopped or self._is_last(row):
            return None
        for first in range(0, len(calls), CALLS_AT_ONCE):
            # Of an environment that is not async, one call at a time; all others at the same time.
            tools = [self._tool_of(row, call.get("function") or call) for call in calls[first : first + CALLS_AT_ONCE]]
            begun = [(name, self.calls.begin(tool) if is_free else tool) for name, tool, is_free in tools]
            row.messages += [self._result(row, *call) for call in begun]
        is_over = row.failure is not None
        if row.kind.offers:
            row.rewards[-1], row.environment.reward = row.environment.reward, 0.0
            is_over |= row.environment.is_over
        if is_over:
            return None
        ids = self.turns.ids_of(row.messages[-len(calls) :], self.stop_ids)
        return self._fitted(row, token_ids, stopped, ids, row.messages[-len(calls) - 1 :])

    def _fitted(
        self, row: LiveEpisode, token_ids: list[int], stopped: bool, answer_ids: list[int], messages: list[Message]
    ) -> list[int]:
        """Return the ids that answer a turn; if the context grows too long, those that ask for a summary of it.

        With a rule of the user, a new context. In both cases the answer comes with the new context.

        Args:
            messages: the turn and what answers it, the last ones of the row.
        """
        compaction, done = self.compaction, row.counts.compactions
        if compaction is None:
            return answer_ids
        row.played.append(PlayedTurn(token_ids, messages, answer_ids))
        request = compaction.request(row.is_chat, self.stop_ids, stopped)
        if not compaction.is_due(len(row.context) + len(answer_ids), done, len(request)):
            return answer_ids
        if self.limits.compaction.compact is not None:
            row.count(compactions=1)
            return compaction.by_rule(row)
        row.asks_summary = True
        row.messages[1 - len(messages) :] = [compaction.message]
        return request

    def _take_summary(
        self, row: LiveEpisode, token_ids: list[int], stopped: bool, _before: list[int]
    ) -> list[int] | None:
        """Return the context that begins with a summary, and with the answer that waited for it."""
        compaction, summary = self.compaction, self.turns.text_of(token_ids, stopped)
        is_cut = not stopped and len(token_ids) == self.max_turn_length
        row.asks_summary = False
        row.count(compactions=1, summaries=1, summary_tokens=len(token_ids), summaries_cut=int(is_cut))
        row.messages += [{"role": "assistant", "content": summary}, *row.played[-1].messages[1:]]
        request = len(compaction.request(row.is_chat, self.stop_ids, stopped=True))
        context = compaction.with_summary(row, summary, token_ids, request)
        row.is_cut = context is None
        return context

    def _tool_of(self, row: LiveEpisode, call: dict[str, Any]) -> tuple[str, Callable[[], Any] | str, bool]:
        """Return the name of a tool, what calls it (or what is wrong), and whether it may run next to others."""
        name, arguments = str(call.get("name")), call.get("arguments")
        schema = row.kind.schemas.get(name)
        unknown = f"there is no tool {name[:100]!r}; tools: {', '.join(row.kind.schemas)}"
        fault = unknown if schema is None else argument_fault(arguments, schema)
        if fault is not None:
            return name, fault, False
        if name in row.kind.functions:
            return name, partial(row.kind.functions[name], **arguments), True
        if row.kind.offers:
            return name, partial(self.calls.call, row.environment.call_tool, name, arguments), False
        tool = partial(getattr(row.environment, name), **arguments)
        is_free = inspect.iscoroutinefunction(tool)
        return name, tool if is_free else partial(self.calls.call, tool), is_free

    def _result(self, row: LiveEpisode, name: str, call: Callable[[], Any] | str) -> Message:
        fault: BaseException | str | None = call if isinstance(call, str) else None
        try:
            content = "" if isinstance(call, str) else str(call())
        except TooManyHang:
            raise
        except BaseException as error:
            fault, row.hangs = error, row.hangs or isinstance(error, TimedOut)
            row.failure = f"{name}: {encodable(error)}" if isinstance(error, LostSession) else row.failure
        row.count(tool_calls=1, tool_errors=int(fault is not None))
        content = content if fault is None else error_text(fault)
        return {"role": "tool", "name": name, "content": shortened(content, self.limits.observation_characters)}

    def finish(self, rollout: Rollout) -> Rollout:
        """Read the rewards, and return the rollout with what is known of its episodes."""
        self._raise()
        self._for_each_row("get_reward", self._read_reward)
        columns = rollout.completion_ids, rollout.sampler_logprobs, rollout.turn_ids, rollout.stopped
        completions, logprobs, turns, stopped = map(list, columns)
        restarts = None if rollout.restarts is None else list(rollout.restarts)
        for i, row in enumerate(self.rows):
            row.count(episodes=1, failed_episodes=int(row.failure is not None), observation_tokens=turns[i].count(-1))
            row.count(waited_seconds=self._waited_s / len(self.rows))
            stopped[i] = (stopped[i] or row.is_terminated) and not row.is_cut
            if row.failure is not None:  # A failed episode has no score: one token stands for it.
                stopped[i] = stopped[i] and len(completions[i]) == 1
                completions[i], logprobs[i], turns[i] = completions[i][:1], logprobs[i][:1], turns[i][:1]
                row.rewards = [math.nan]
                if restarts is not None:
                    restarts[i] = []
        rewards = [row.rewards or None if row.kind.has_reward or row.failure else None for row in self.rows]
        return replace(
            rollout,
            completion_ids=completions,
            sampler_logprobs=logprobs,
            turn_ids=turns,
            stopped=stopped,
            turn_rewards=rewards,
            restarts=restarts,
            episodes=[self._played(row) for row in self.rows],
        )

    def _played(self, row: LiveEpisode) -> EpisodeOutcome:
        # An observation that did not fit was not seen.
        while row.messages and row.messages[-1]["role"] != "assistant":
            row.messages.pop()
        messages = row.messages if row.is_chat else None
        may_return = row.environment is not None and row.failure is None and not row.hangs
        leave = row.kind.free.append if may_return else partial(row.kind.close, self.calls)
        return EpisodeOutcome(row.prompt, messages, row.environment, row.counts, row.failure, row.tools, leave)

    def _read_reward(self, row: LiveEpisode) -> None:
        """Ask a TRL environment for the score of its episode, which arrives with the last turn."""
        if row.kind.steps or row.kind.offers or not row.kind.has_reward or row.failure is not None:
            return
        score = self.calls.call(row.environment.get_reward)
        if score is None:  # It does not apply: the scores of functions count alone.
            row.rewards = []
        else:
            row.rewards[-1] = float(score)

    def _wait(self, change: int, is_over: bool = False) -> None:
        """Keep time while all rows that are not over wait for answers."""
        with self._lock:
            now = time.perf_counter()
            if self._num_waiting == self._num_playing:
                self._waited_s += now - self._all_wait_since
            self._num_waiting += change
            self._num_playing -= is_over
            self._all_wait_since = now

    def _for_each_row(self, name: str, function: Callable[[LiveEpisode], None]) -> None:
        def guarded(row: LiveEpisode) -> None:
            try:
                function(row)
            except TooManyHang as error:
                self._error = error
            except BaseException as error:
                row.failure = f"{name} raised {type(error).__name__}: {encodable(error)}"

        left = [in_thread(guarded, row) for row in self.rows]
        while left:
            self.poll()
            left = wait(left, POLL_S).not_done
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
