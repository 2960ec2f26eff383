"""One episode while it is played: its kind, its row, and what answers its turns.

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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from onetrunk.rollouts.async_sampler import POLL_S
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.chat_turns import ChatTurns
from onetrunk.rollouts.episodes import EpisodeCounts, PlayedEpisode, in_thread
from onetrunk.rollouts.tool_calls import (
    TimedCalls,
    TimedOut,
    TooManyHang,
    argument_fault,
    error_text,
    schema_of,
    shortened,
)
from onetrunk.servers.openenv import LostSession
from onetrunk.types import Message, Prompt, Rollout, RowKey
from onetrunk.utils.randomness import ENVIRONMENT_STREAM, derived_seed
from onetrunk.utils.redaction import encodable

logger = logging.getLogger(__name__)

Factory = Callable[[], Any]
# Gymnasium's environments take seeds of 31 bits.
SEEDS = 2**31
# The argument of PPOTrainer, and its key in YAML.
IN_BOTH = "environment_factory (environment in YAML)"
# Calls of tools that one turn may begin at the same time.
CALLS_AT_ONCE = 16
# What `reset` says is not cut, because it is the task. Longer than any model reads.
MOST_CHARACTERS = 2**20
NOT_TOOLS = ("reset", "get_reward", "close")


@dataclass(frozen=True)
class EpisodeLimits:
    """The settings of PPOConfig that bound an episode.

    Args:
        max_turns: None: no bound but max_completion_length.
        tool_timeout: seconds.
        observation_characters: most characters of an observation; the rest is cut off.
        failed_fraction: of the rows of a rollout; with more failed episodes the run ends.
        longest_prompt: most tokens of a prompt with the observation of `reset`; None: no bound.
        control_tokens: whether those in an observation are read as such, and not as characters.
    """

    max_turns: int | None = None
    tool_timeout: float = 60.0
    observation_characters: int = 2000
    failed_fraction: float = 0.1
    longest_prompt: int | None = None
    control_tokens: bool = False


@dataclass(frozen=True)
class Kind:
    """One kind of episode: the environments of a factory (or none), and the tools that its prompts show.

    Args:
        factory: None: tools alone answer.
        class_name: of the environments.
        functions: the tools that belong to no environment.
        schemas: of all tools, by their names.
        steps: whether the environments are Gymnasium's; offers: whether they are an OpenEnv server's, with tools.
        has_reward: whether they give rewards.
        example: one of them; `free`: those in which nobody plays; `made`: all that are not closed.
    """

    factory: Factory | None
    class_name: str
    functions: dict[str, Callable[..., Any]]
    schemas: dict[str, dict[str, Any]]
    steps: bool = False
    offers: bool = False
    has_reward: bool = False
    example: Any = None
    free: list[Any] = field(default_factory=list)
    made: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, factory: Factory | None, tools: Sequence[Callable[..., Any]], name: str | None) -> Kind:
        """Make one environment and look at it; ValueError says what it lacks. It is used again."""
        for tool in tools:
            if inspect.isclass(tool) or not callable(tool) or not hasattr(tool, "__name__"):
                raise ValueError(f"tools holds {tool!r}; a tool is a function with a name, type hints and a docstring")
        functions = {tool.__name__: tool for tool in tools}
        if len(functions) < len(tools):
            raise ValueError(f"two tools have the same name ({', '.join(t.__name__ for t in tools)}); rename one")
        schemas = {tool: schema_of(function) for tool, function in functions.items()}
        if factory is None:
            return cls(None, "tools", functions, schemas)
        where = IN_BOTH if name is None else f"environment {name!r}"
        if not callable(factory):
            raise ValueError(f"{where} is a {type(factory).__name__}; give a class or a function that makes one")
        try:
            environment = factory()
        except Exception as error:
            hint = "; it is called without arguments" if isinstance(error, TypeError) else ""
            reason = f"{type(error).__name__}: {encodable(error)}{hint}"
            raise RuntimeError(f"{where} could not make an environment: {reason}") from error
        class_name = type(environment).__name__
        made = {"example": environment, "free": [environment], "made": {id(environment): environment}}
        if not callable(getattr(environment, "reset", None)):
            raise ValueError(
                f"{where} makes a {class_name}, which has no reset; an environment has reset and, as in TRL, methods"
                " that are tools, or, as in Gymnasium, step"
            )
        if callable(getattr(environment, "step", None)):
            if tools:
                raise ValueError(f"{where} makes a {class_name}, which answers by step, so no tools go with it")
            require_takes(environment.reset, "reset(self, *, seed=None, options=None)", seed=0, options={})
            require_takes(environment.step, "step(self, action)", "")
            return cls(factory, class_name, {}, {}, steps=True, has_reward=True, **made)
        offers = hasattr(environment, "tool_schemas")  # An OpenEnv server's tools.
        methods = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
        public = [name for name in methods if not name.startswith("_") and name not in NOT_TOOLS]
        own = environment.tool_schemas if offers else {tool: schema_of(getattr(environment, tool)) for tool in public}
        if not schemas.keys().isdisjoint(own):
            raise ValueError(f"{class_name} has {', '.join(own)}, and so has tools; rename one")
        schemas |= own
        if not schemas:  # It says prompts, as in TRL, or scores answers.
            logger.warning("%s has no public methods (tools) and no step: its episodes have one turn", class_name)
        has_reward = offers or callable(getattr(environment, "get_reward", None))
        return cls(factory, class_name, functions, schemas, offers=offers, has_reward=has_reward, **made)

    def take(self) -> Any:
        """Return an environment that nobody plays in; None for tools alone."""
        if self.factory is None:
            return None
        try:
            return self.free.pop()
        except IndexError:
            pass
        try:
            environment = self.factory()
        except Exception as error:
            raise RuntimeError(
                f"{self.class_name} could not be made once more beside {len(self.made)} others"
                f" ({type(error).__name__}: {encodable(error)}); each completion of a rollout plays in its own"
                " environment, all at once: let the factory make rollout_batch_size x num_generations of them (per"
                " process, and those of an evaluation), or lower these settings"
            ) from error
        return self.made.setdefault(id(environment), environment)

    def close(self, calls: TimedCalls, environment: Any) -> list[Future[None]]:
        """Begin to close an environment in a thread, if it has `close` and was not closed before."""
        known = self.made.pop(id(environment), None)

        def close() -> None:
            try:
                calls.call(environment.close)
            except BaseException as error:
                logger.warning("close of %s failed: %s: %s", self.class_name, type(error).__name__, encodable(error))

        return [in_thread(close)] if callable(getattr(known, "close", None)) else []


@dataclass(eq=False)
class Row:
    """One episode while it is played."""

    kind: Kind
    prompt: Prompt
    prompt_ids: list[int]
    columns: dict[str, Any]
    key: RowKey
    environment: Any = None
    # The ids so far, and the messages after the prompt.
    context: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    counts: EpisodeCounts = field(default_factory=EpisodeCounts)
    failure: str | None = None
    hangs: bool = False
    is_cut: bool = False  # By a limit of turns or by the environment's own, in no terminal state.
    is_terminated: bool = False  # By the environment, also in a turn that a limit cut off.

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    def count(self, **more: float) -> None:
        self.counts += EpisodeCounts(**more)


def require_takes(method: Callable[..., Any], expected: str, *args: Any, **kwargs: Any) -> None:
    """Raise ValueError if a method of an environment cannot be called so; `expected` is what it should be."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # Code in C has none.
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(method, "__qualname__", method)
        raise ValueError(f"{name}{signature} cannot be called: {error}; write it as {expected}") from error


def with_observation(prompt: list[Message], observation: str) -> list[Message]:
    """Return a conversation with the observation of `reset` behind what the user said last."""
    place = max(i for i, message in enumerate(prompt) if message["role"] == "user")
    message = {**prompt[place], "content": prompt[place]["content"] + observation}
    return [*prompt[:place], message, *prompt[place + 1 :]]


class StepFault(Exception):
    """What `step` returned is not what an environment returns."""


class Playing:
    """The `Answers` of one call: its episodes, each in an environment of its own."""

    def __init__(
        self,
        turns: ChatTurns,
        calls: TimedCalls,
        limits: EpisodeLimits,
        rows: Sequence[Row],
        params: SamplingParams,
        poll: Callable[[], None],
    ):
        self.turns, self.calls, self.limits, self.rows, self.poll = turns, calls, limits, rows, poll
        self.max_length, self.stop_ids = params.max_completion_length, params.stop_token_ids
        self.max_turn_length = params.max_turn_length
        # What ends the run; raised at the end of the call.
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._num_playing, self._num_waiting = len(rows), 0
        self._all_wait_since, self._waited_s = 0.0, 0.0

    def reset(self) -> None:
        """Reset every environment, all at once."""
        self._for_each_row("reset", self._reset)

    def _reset(self, row: Row) -> None:
        row.environment = self.calls.call(row.kind.take)
        if row.environment is not None:
            self._observe_reset(row, self._call_reset(row))
        row.context = list(row.prompt_ids)

    def _call_reset(self, row: Row) -> Any:
        columns = {"prompt": row.prompt, **row.columns}
        if row.kind.steps or row.kind.offers:
            seed = derived_seed(*row.key, ENVIRONMENT_STREAM) % SEEDS
            result = self.calls.call(row.environment.reset, seed=seed, options=columns)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError("it must return (observation, info)")
            return result[0]
        return self.calls.call(row.environment.reset, **columns)

    def _observe_reset(self, row: Row, observation: Any) -> None:
        if observation is None or observation == "":
            return
        if not isinstance(observation, str):
            raise TypeError(f"the observation is a {type(observation).__name__}; give a text")
        if len(observation) > MOST_CHARACTERS:
            raise ValueError(f"the observation has {len(observation)} characters, more than {MOST_CHARACTERS}")
        observation = encodable(observation)
        if row.is_chat:
            prompt = with_observation(row.prompt, observation)
            shown = with_observation(row.prompt, self.turns.foreign(observation))
            ids = self.turns.prompt_ids(shown, list(row.kind.schemas.values()))
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

    def _answer(self, row: Row, token_ids: list[int], stopped: bool) -> list[int] | None:
        start, before = time.perf_counter(), row.context
        observation = None
        try:
            row.context = [*before, *token_ids]
            row.count(turns=1, turns_cut=int(not stopped and len(token_ids) == self.max_turn_length))
            row.rewards.append(0.0)
            if row.failure is None and self._error is None:
                answer = self._step if row.kind.steps else self._call_tools
                observation = answer(row, token_ids, stopped, before)
        except TooManyHang as error:
            self._error = self._error or error
        except Exception as error:  # Such as a template's that rejects what a tool said.
            row.failure = f"the answer to a turn raised {type(error).__name__}: {encodable(error)}"
        row.context = [*row.context, *(observation or ())]
        row.count(tool_seconds=time.perf_counter() - start)
        length = len(row.context) - len(row.prompt_ids)
        self._wait(-1, is_over=observation is None or length >= self.max_length)
        return observation

    def _is_last(self, row: Row) -> bool:
        """Return whether a row that would go on has all its turns, and count it unless the length ends it anyway."""
        row.is_cut = row.counts.turns == self.limits.max_turns
        has_room = len(row.context) - len(row.prompt_ids) < self.max_length
        row.count(turns_at_limit=int(row.is_cut and has_room))
        return row.is_cut

    def _step(self, row: Row, token_ids: list[int], stopped: bool, _before: list[int]) -> list[int] | None:
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
        if row.is_chat:
            return self.turns.ids_of(row.messages[-1:], self.stop_ids, stopped)
        return self.turns.text_ids(text)

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

    def _call_tools(self, row: Row, token_ids: list[int], stopped: bool, before: list[int]) -> list[int] | None:
        """Call the tools that a turn asks for; None if it asks for none, and the episode is over."""
        message = self.turns.message_of(token_ids, stopped, before, list(row.kind.schemas.values()))
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
        return None if is_over else self.turns.ids_of(row.messages[-len(calls) :], self.stop_ids)

    def _tool_of(self, row: Row, call: dict[str, Any]) -> tuple[str, Callable[[], Any] | str, bool]:
        """Return the name of a tool, what calls it (or what is wrong), and whether it may run beside others."""
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

    def _result(self, row: Row, name: str, call: Callable[[], Any] | str) -> Message:
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
        for i, row in enumerate(self.rows):
            row.count(episodes=1, failed_episodes=int(row.failure is not None), observation_tokens=turns[i].count(-1))
            row.count(waited_seconds=self._waited_s / len(self.rows))
            stopped[i] = (stopped[i] or row.is_terminated) and not row.is_cut
            if row.failure is not None:  # A failed episode has no score: one token stands for it.
                stopped[i] = stopped[i] and len(completions[i]) == 1
                completions[i], logprobs[i], turns[i] = completions[i][:1], logprobs[i][:1], turns[i][:1]
                row.rewards = [math.nan]
        rewards = [row.rewards or None if row.kind.has_reward or row.failure else None for row in self.rows]
        return replace(
            rollout,
            completion_ids=completions,
            sampler_logprobs=logprobs,
            turn_ids=turns,
            stopped=stopped,
            turn_rewards=rewards,
            episodes=[self._played(row) for row in self.rows],
        )

    def _played(self, row: Row) -> PlayedEpisode:
        # An observation that did not fit was not seen.
        while row.messages and row.messages[-1]["role"] != "assistant":
            row.messages.pop()
        messages = row.messages if row.is_chat else None
        may_return = row.environment is not None and row.failure is None and not row.hangs
        leave = row.kind.free.append if may_return else partial(row.kind.close, self.calls)
        tools = list(row.kind.schemas.values())
        return PlayedEpisode(row.prompt, messages, row.environment, row.counts, row.failure, tools, leave)

    def _read_reward(self, row: Row) -> None:
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

    def _for_each_row(self, name: str, function: Callable[[Row], None]) -> None:
        def guarded(row: Row) -> None:
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
