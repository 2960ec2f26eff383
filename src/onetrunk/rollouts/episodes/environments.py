"""What answers the turns of episodes: Gymnasium's text environments, TRL's environments, and tools.

An environment with `step` is Gymnasium's: `reset(seed=, options=row)` and `step(text)` give texts and rewards. Any
other is TRL's: `reset(**row)`, its public methods are tools, and `get_reward()` scores the episode. A failure is an
observation or a failed episode; only too many of them end the run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from onetrunk.data.rows import Rows
from onetrunk.data.sharded import ShardedRows
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.episodes.chat_turns import ChatTurns
from onetrunk.rollouts.episodes.compaction import Compaction
from onetrunk.rollouts.episodes.kinds import IN_BOTH, EpisodeKind, EpisodeLimits, Factory, LiveEpisode, require_takes
from onetrunk.rollouts.episodes.playing import EpisodePlayer
from onetrunk.rollouts.episodes.tool_calls import TimedCalls
from onetrunk.types import Prompt, Rollout, RowKey

logger = logging.getLogger(__name__)

# Seconds that the environments of a run have to close.
CLOSE_S = 10.0


class Episodes:
    """The tools and environments of a run.

    Args:
        tools: functions, sync or async, with type hints and docstrings.
        factory: makes environments; or a mapping from the names in the column `environment` to such functions.
        tokenizer: the policy's; it gets the parser of tool calls that TRL knows for its template.
        limits: bounds of an episode.
        template_kwargs: variables for the chat template.
        poll: called while rows wait; may raise to stop.

    Raises:
        ValueError: a tool, an environment or the template does not serve; it says what to change.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | None,
        factory: Factory | Mapping[str, Factory] | None,
        tokenizer: PreTrainedTokenizerBase,
        limits: EpisodeLimits,
        template_kwargs: dict[str, Any] | None = None,
        poll: Callable[[], None] = lambda: None,
    ):
        self.limits, self.poll = limits, poll
        tools = [tools] if callable(tools) else tools or ()
        self.routes = isinstance(factory, Mapping)
        factories = dict(factory) if self.routes else {None: factory}
        if not factories:
            raise ValueError(f"{IN_BOTH} is an empty mapping; name at least one environment")
        self.kinds = {name: EpisodeKind.of(make, tools, name) for name, make in factories.items()}
        self.turns = ChatTurns(tokenizer, dict(template_kwargs or {}), limits.control_tokens)
        self.calls = TimedCalls(limits.tool_timeout)
        # Whether prompts are conversations; known once they are checked.
        self.is_chat = False
        self.has_tools = any(kind.schemas for kind in self.kinds.values())
        if self.has_tools:
            self.turns.prepare(has_tools=True)
        for kind in self.kinds.values():
            schemas = json.dumps(kind.schemas, ensure_ascii=False) if kind.offers else ""
            if self.turns.foreign(schemas) != schemas:
                raise ValueError(
                    f"the tools of {kind.class_name} are described with control tokens of the tokenizer; correct the"
                    " server, or set observation_control_tokens if you trust it"
                )

    def __str__(self) -> str:
        kinds = self.kinds.values()
        return ", ".join(kind.class_name + f" ({', '.join(kind.schemas)})" * bool(kind.schemas) for kind in kinds)

    @property
    def has_environment(self) -> bool:
        """Whether there are environments and not tools alone."""
        return any(kind.factory is not None for kind in self.kinds.values())

    @property
    def gives_rewards(self) -> bool:
        """Whether any environment gives rewards."""
        return any(kind.has_reward for kind in self.kinds.values())

    @property
    def name(self) -> str:
        """The name of the environment, for metrics; of several kinds just the word."""
        names = {kind.class_name for kind in self.kinds.values() if kind.has_reward}
        return names.pop() if len(names) == 1 else "environment"

    @property
    def sources(self) -> dict[str, Callable[..., Any]]:
        """What episodes depend on: the tools, of each environment its `reset`, and the user's rule of compaction."""
        sources = {f"tools.{name}": tool for kind in self.kinds.values() for name, tool in kind.functions.items()}
        resets = {f"environment.{k.class_name}": type(k.example).reset for k in self.kinds.values() if k.factory}
        compact = self.limits.compaction.compact
        return sources | resets | ({} if compact is None else {"compact": compact})

    def kind_of(self, row: Mapping[str, Any]) -> EpisodeKind:
        """Return the kind of a row of the dataset; ValueError if its column `environment` names none."""
        name = row.get("environment") if self.routes else None
        if name not in self.kinds:
            raise ValueError(f"the column environment has {name!r}, and {IN_BOTH} has {', '.join(self.kinds)}")
        return self.kinds[name]

    def check_prompts(self, columns: Sequence[str], conversational: bool) -> None:
        """Raise ValueError for a dataset whose prompts or columns do not serve these episodes."""
        if self.routes and "environment" not in columns:
            raise ValueError(
                f"{IN_BOTH} names several environments, and the dataset has no column 'environment' that"
                f" chooses one ({', '.join(self.kinds)}); add it, or give a single environment"
            )
        self.is_chat = conversational
        if self.has_tools and not conversational:
            raise ValueError(
                "tools are called in conversations, and the prompts of a dataset (training or evaluation) are text;"
                ' give prompts as lists of messages, [{"role": "user", "content": TEXT}], or an environment with step,'
                " which answers text"
            )
        given = dict.fromkeys(["prompt", *(name for name in columns if not (self.routes and name == "environment"))])
        for kind in self.kinds.values():
            if kind.factory is not None and not (kind.steps or kind.offers):  # TRL's
                require_takes(kind.example.reset, f"reset(self, **row); the row has {', '.join(given)}", **given)
        if conversational and not self.has_tools and any(kind.steps for kind in self.kinds.values()):
            self.turns.prepare(has_tools=False)

    def check_contexts(self, longest_prompt: int, turn_length: int) -> None:
        """Raise ValueError if a compacted context has no room for what it begins with and the next turns."""
        Compaction(self.limits.compaction, self.turns, turn_length).require_room(longest_prompt, self.is_chat)

    def prompt_room(self, turn_length: int) -> int:
        """Return the most tokens of a prompt in a compacted context."""
        return Compaction(self.limits.compaction, self.turns, turn_length).prompt_room(self.is_chat)

    def with_prompts(self, rows: Rows | None, count: int) -> Rows:
        """Return rows (None: `count` of them) with a column `prompt`; where there is none, `reset` says the prompt."""
        if rows is not None and "prompt" in rows.column_names:
            return rows
        tokenizer, blank = self.turns.tokenizer, [{"role": "user", "content": ""}]
        if not tokenizer.chat_template:  # A text must begin with a token.
            blank = tokenizer.bos_token or tokenizer.eos_token
        if isinstance(rows, ShardedRows):
            return rows.then(lambda row: {**row, "prompt": blank}, added=["prompt"])
        if rows is None:
            return Dataset.from_dict({"prompt": [blank] * count})
        return rows.add_column("prompt", [blank] * len(rows))

    def template_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables with which the template renders a row's prompt."""
        return self.turns.tools_of(list(self.kind_of(row).schemas.values()))

    def play(self, rows: Sequence[LiveEpisode], params: SamplingParams, play: Callable[..., Rollout]) -> Rollout:
        """Play the episodes of `rows`; `play` is a driver, called with prompt_ids, params, keys and answers."""
        answers = EpisodePlayer(self.turns, self.calls, self.limits, rows, params, self.poll)
        answers.reset()
        rollout = play([row.prompt_ids for row in rows], params, [row.key for row in rows], answers)
        return answers.finish(rollout)

    def row(self, prompt: Prompt, prompt_ids: list[int], columns: dict[str, Any], key: RowKey) -> LiveEpisode:
        """Return an episode that has not begun."""
        own = {name: value for name, value in columns.items() if not (self.routes and name == "environment")}
        return LiveEpisode(self.kind_of(columns), prompt, list(prompt_ids), own, key)

    def release(self, rollout: Rollout) -> None:
        """Let later episodes play in the environments of a rollout that is scored; close those that broke."""
        for episode in rollout.episodes or ():
            episode.leave(episode.environment)

    def close(self) -> None:
        """Close every environment that is left, each once. Later episodes play in new ones."""
        closing = []
        for kind in self.kinds.values():
            kind.free.clear()
            closing += [closed for made in list(kind.made.values()) for closed in kind.close(self.calls, made)]
        if wait(closing, CLOSE_S).not_done:
            logger.warning("environments did not close within %g seconds and are left as they are", CLOSE_S)

    def require_played(self, rollout: Rollout, share: float) -> None:
        """Raise RuntimeError if the `share` of failed episodes, over all processes, is too large; all of them call."""
        if share > self.limits.failed_fraction:
            failures = gather_object([episode.failure for episode in rollout.episodes if episode.failure is not None])
            raise RuntimeError(
                f"{share:.0%} of the episodes of a rollout failed, more than max_failed_episodes_fraction"
                f" {self.limits.failed_fraction:.0%}; the first: {failures[0]}. Correct the environment, or raise the"
                " limit"
            )
