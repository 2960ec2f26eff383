"""The signature of a reward function, and the scores of a set of them.

The signature is that of TRL's GRPO and RLOO trainers, so functions written for TRL work unchanged. `resolve.py` finds
a reward function by its name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from onetrunk.types import Completion, Prompt


class RewardFunction(Protocol):
    """A function, async function or callable object that gives one raw number per completion.

    It is called with keywords only: the three below and those that `onetrunk.rewards` lists, in `**columns`.

    Args:
        prompts: n texts or n conversations.
        completions: n texts, or n lists with one assistant message if the prompts are conversations.
        completion_ids: n lists of token ids, including the stop token if there is one.

    Returns:
        n numbers; None for rows to which the function does not apply.
    """

    def __call__(
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **columns: Any,
    ) -> list[float | None] | Awaitable[list[float | None]]: ...


@dataclass(frozen=True)
class Scores:
    """The scores that a set of reward functions gives n completions.

    Args:
        total: [n] float32, the weighted sum; NaN if no function applies or one gave a non-finite score.
        by_function: name of the function -> [n] float32, before weighting; NaN for None, non-finite scores unchanged.
    """

    total: Tensor
    by_function: dict[str, Tensor]


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
