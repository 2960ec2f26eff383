"""What an episode is: its limits, the kind of environment or tools that it has, and its row."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from onetrunk.rollouts.episodes.rows import EpisodeCounts, in_thread
from onetrunk.rollouts.episodes.tool_calls import TimedCalls, schema_of
from onetrunk.types import Message, Prompt, RowKey
from onetrunk.utils.redaction import encodable

logger = logging.getLogger(__name__)

Factory = Callable[[], Any]
# The argument of PPOTrainer, and its key in YAML.
IN_BOTH = "environment_factory (environment in YAML)"
NOT_TOOLS = ("reset", "get_reward", "close")
# (messages of the episode) -> messages of the new context.
Compact = Callable[[list[Message]], list[Message]]


@dataclass(frozen=True)
class CompactionLimits:
    """The settings of PPOConfig with these names, and the user's function.

    Args:
        max_context_length: most tokens that a turn and what it reads have together; None: contexts are not compacted.
        compact: says the new context in place of a summary.
    """

    max_context_length: int | None = None
    max_compactions: int | None = None
    kept_turns: int = 2
    compaction_prompt: str = ""
    compact: Compact | None = None


@dataclass
class PlayedTurn:
    """A turn and what answered it, as ids and as messages."""

    token_ids: list[int]
    messages: list[Message] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)


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
        compaction: when and how contexts are compacted.
    """

    max_turns: int | None = None
    tool_timeout: float = 60.0
    observation_characters: int = 2000
    failed_fraction: float = 0.1
    longest_prompt: int | None = None
    control_tokens: bool = False
    compaction: CompactionLimits = CompactionLimits()


@dataclass(frozen=True)
class EpisodeKind:
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
    def of(cls, factory: Factory | None, tools: Sequence[Callable[..., Any]], name: str | None) -> EpisodeKind:
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
                raise ValueError(f"{where} makes a {class_name}, which answers by step and cannot have tools")
            require_takes(environment.reset, "reset(self, *, seed=None, options=None)", seed=0, options={})
            require_takes(environment.step, "step(self, action)", "")
            return cls(factory, class_name, {}, {}, steps=True, has_reward=True, **made)
        offers = hasattr(environment, "tool_schemas")  # An OpenEnv server's tools.
        methods = [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
        public = [name for name in methods if not name.startswith("_") and name not in NOT_TOOLS]
        own = environment.tool_schemas if offers else {tool: schema_of(getattr(environment, tool)) for tool in public}
        if not schemas.keys().isdisjoint(own):
            raise ValueError(f"{class_name} and tools both have one of {', '.join(own)}; rename it")
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
                f"{self.class_name} could not be made again: {len(self.made)} others exist"
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
class LiveEpisode:
    """One episode while it is played: its conversation, environment and counts; `EpisodeTokens` has its tokens."""

    kind: EpisodeKind
    prompt: Prompt
    prompt_ids: list[int]
    columns: dict[str, Any]
    key: RowKey
    environment: Any = None
    # The prompt as it was rendered, the ids that the next turn reads, and how many came after the prompt.
    shown: Prompt = ""
    context: list[int] = field(default_factory=list)
    length: int = 0
    # Everything after the prompt; and the turns without the summaries.
    messages: list[Message] = field(default_factory=list)
    played: list[PlayedTurn] = field(default_factory=list)
    asks_summary: bool = False
    rewards: list[float] = field(default_factory=list)
    counts: EpisodeCounts = field(default_factory=EpisodeCounts)
    failure: str | None = None
    hangs: bool = False
    is_cut: bool = False  # By a limit of turns or by the environment's own, in no terminal state.
    is_terminated: bool = False  # By the environment, also in a turn that a limit cut off.

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas that the prompt shows."""
        return list(self.kind.schemas.values())

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
