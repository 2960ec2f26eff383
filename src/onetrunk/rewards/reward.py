"""What a reward function is: its signature, its name, what it returns, and what its scores depend on.

TRL's GRPO and RLOO trainers use the same signature, so functions written for TRL work unchanged. A resumed run
compares the contents of its rewards (`content_of`), so that no reward changes unnoticed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, SupportsFloat

import torch
from torch import Tensor, nn

from onetrunk.rewards.specs import KINDS, Policy
from onetrunk.types import Completion, Prompt
from onetrunk.utils.files import digest
from onetrunk.utils.import_path import find_object, source_identity

# Names that TRL's command line takes too, and their arguments there; None: the function itself.
TRL_REWARDS: dict[str, dict[str, int] | None] = {
    **dict.fromkeys(("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")),
    "get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256},
}


class RewardFunction(Protocol):
    """A function, async function or callable object that gives one raw number per completion.

    It is called with keywords only: the three below and those that `onetrunk.rewards` lists, in `**columns`.

    Args:
        prompts: n texts or n conversations.
        completions: n texts, or n lists with one assistant message if the prompts are conversations.
        completion_ids: n lists of token ids, including the stop token if there is one.

    Returns:
        n numbers, or `PerTurn` or `PerToken` in place of one; None for rows to which the function does not apply.
    """

    def __call__(
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **columns: Any,
    ) -> Sequence[SupportsFloat | None] | Awaitable[Sequence[SupportsFloat | None]]: ...


class BuiltInReward:
    """A reward class of this package."""

    # The columns of the dataset on which its scores depend.
    reads: tuple[str, ...] = ()
    # Whether a model of this process scores, rather than a server that is waited for.
    runs_here = False
    # Whether it is a reward adapter, which the trunk scores.
    is_on_trunk = False

    def content(self) -> str:
        """Return what the scores depend on, as a short text."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise a RuntimeError before training if the reward cannot score. Only servers have something to check."""


@dataclass(frozen=True)
class DenseReward:
    """What a reward function may return for a completion in place of one number: a `PerTurn` or a `PerToken`."""

    rewards: Sequence[float]

    def __float__(self) -> float:
        return float(sum(map(float, self.rewards)))


class PerTurn(DenseReward):
    """The reward of each turn of a completion; it arrives at the last token that was sampled in the turn.

        def calls_first(completions, turn_ids, **kwargs):
            '''Return 1 for the first turn, which calls the calculator, and 0 for all others.'''
            return [PerTurn([1.0] + [0.0] * max(turns)) for turns in turn_ids]

    Args:
        rewards: one number per turn. A completion without tools or environment has one turn.
    """


class PerToken(DenseReward):
    """The reward of each token of a completion that the policy sampled, the stop token included.

        def no_sevens(completion_ids, **kwargs):
            '''Take 0.1 off at every token 7.'''
            return [PerToken([-0.1 * (token == 7) for token in ids]) for ids in completion_ids]

    Args:
        rewards: one number per sampled token; tokens of observations, whose `turn_ids` are -1, have none.
    """


@dataclass(frozen=True)
class Scores:
    """The scores that a set of reward functions gives n completions.

    Args:
        total: [n] float32, the weighted sum; NaN if no function applies or one gave a non-finite score.
        by_function: name of the function -> [n] float32, before weighting, of a dense reward the sum; NaN for None,
            non-finite scores unchanged.
        by_token: n float32 tensors [len(completion)], weighted: what arrives inside a completion. Their sums are part
            of `total`; what is left of it arrives at the last sampled token. None: everything arrives there.
    """

    total: Tensor
    by_function: dict[str, Tensor]
    by_token: Sequence[Tensor] | None = None

    def of_rows(self, rows: Sequence[int], lengths: Iterable[int]) -> Scores:
        """Return these scores as those of the `rows` of a rollout, whose completions have `lengths`; NaN at others."""
        lengths = list(lengths)
        if len(rows) == len(lengths):
            return self

        def spread(scores: Tensor) -> Tensor:
            return torch.full((len(lengths),), math.nan).index_copy(0, torch.tensor(rows, dtype=torch.int64), scores)

        by_token = None
        if self.by_token is not None:
            own = dict(zip(rows, self.by_token, strict=True))
            by_token = [own.get(row, torch.zeros(length)) for row, length in enumerate(lengths)]
        return Scores(spread(self.total), {n: spread(s) for n, s in self.by_function.items()}, by_token)


class Arrival(NamedTuple):
    """A token at which a reward arrives, the number of its turn, and the reward."""

    token: int
    turn: int
    reward: float


def arrivals(scores: Scores, row: int, turns: Sequence[int]) -> list[Arrival]:
    """Return every sampled token of a row at which a reward arrives, and the last one.

    The rewards add up to the row's score, of which the last token gets what did not arrive before; NaN without one.
    """
    *sampled, last = [token for token, turn in enumerate(turns) if turn >= 0]
    rewards = [] if scores.by_token is None else scores.by_token[row].tolist()
    found = [Arrival(token, turns[token], rewards[token]) for token in sampled if rewards and rewards[token]]
    rest = scores.total[row].item() - sum(arrival.reward for arrival in found)
    return [*found, Arrival(last, turns[last], rest)]


def turn_sums(found: Sequence[Arrival]) -> list[float]:
    """Return the reward of each turn of a row."""
    sums = [0.0] * (found[-1].turn + 1)
    for arrival in found:
        sums[arrival.turn] += arrival.reward
    return sums


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling `function` gives a coroutine; partials and async `__call__` methods count too."""
    function = without_partials(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def reward_name(function: Callable[..., Any]) -> str:
    """Return the name for metrics: `__name__`, else the object's `name`, else the name of its class."""
    function = without_partials(function)
    for attribute in ("__name__", "name"):
        name = getattr(function, attribute, None)
        if isinstance(name, str) and name:
            return "lambda" if name == "<lambda>" else name
    return type(function).__name__


def without_partials(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside `functools.partial` objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def named_function(spec: str, policy: Policy | None = None) -> RewardFunction:
    """Return the function at "package.module.name" or "path/to/file.py:name", or one of TRL_REWARDS."""
    if spec in TRL_REWARDS:
        function, arguments = find_object(f"trl.rewards.{spec}", "reward function"), TRL_REWARDS[spec]
        return function if arguments is None else function(**arguments)
    others = "".join(f", nor a {kind.name}: {kind.form}" for kind in KINDS if kind.form)
    return checked_callable(find_object(spec, "reward function", others), spec)


def checked_callable(function: object, spec: object) -> RewardFunction:
    """Return a reward function; raises TypeError for what cannot be one, with the `spec` that led to it."""
    if not callable(function):
        raise TypeError(f"reward function {spec!r} is of type {type(function).__name__}; expected something to call")
    if isinstance(function, nn.Module):
        raise TypeError(
            f"a reward function is a torch module ({type(function).__name__}); give a function that calls it, or a"
            " sequence-classification model with one label"
        )
    if inspect.isclass(function):
        raise TypeError(f"reward function {spec!r} is a class; give an instance of it, or a function")
    return function


def content_of(reward: Callable[..., Any]) -> str:
    """Return what a reward is computed from: the same text in every process, until something changes.

    A function is known by its name and the sha256 of its source file. Imports and values in closures are not followed.
    """
    is_ours = isinstance(reward, BuiltInReward)
    if is_ours and type(reward).__module__.partition(".")[0] == "onetrunk":
        return reward.content()
    about = source_identity(reward)
    inner = inspect.unwrap(without_partials(reward))
    sources = [about["source"], source_identity(inner)["source"]]
    if inspect.isfunction(inner) and inner.__module__ == "__main__":
        with contextlib.suppress(OSError):  # Typed into a console.
            sources = [digest(inspect.getsource(inner))[:16]]  # The script also holds the settings of the run.
    # As a digest, because some settings are secrets.
    own = f"{about['name']}, sha256 {digest([sources, about['settings']])[:16]}"
    return f"{reward.content()}, {own}" if is_ours else own


def columns_read(reward: Callable[..., Any], columns: Sequence[str]) -> list[str]:
    """Return the columns of the dataset that a reward function reads: those it names; with `**kwargs`, all of them."""
    if isinstance(reward, BuiltInReward):
        return [name for name in columns if name in reward.reads]
    parameters = parameters_of(reward)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(columns)
    return [name for name in columns if name in {p.name for p in parameters}]


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a function; None for one that is written in C and has no signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
