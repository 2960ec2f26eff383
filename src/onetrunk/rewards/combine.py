"""Call several reward functions, and add up their scores: a weighted sum over those that apply.

Dense rewards (`PerTurn`, `PerToken`) count with their sum over the completion. Synchronous functions are called one
after the other, asynchronous ones together in a background thread's event loop.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onetrunk.data.rows import TEMPLATE_COLUMNS
from onetrunk.rewards.reward import (
    BuiltInReward,
    Completion,
    DenseReward,
    PerTurn,
    RewardFunction,
    Scores,
    checked_callable,
    columns_read,
    content_of,
    is_async,
    parameters_of,
    reward_name,
)
from onetrunk.rewards.specs import read_spec
from onetrunk.types import Prompt
from onetrunk.utils.files import unique_names
from onetrunk.utils.import_path import checked_scores

# Columns of the dataset that functions receive under another name, or not at all.
OWN_COLUMNS = ("prompt", "prompt_ids", "completion", "completion_ids")
EXTRAS = ("trainer_state", "log_extra", "log_metric")
# Not TRL's keywords: a function without **kwargs that does not list one is called without it.
OPTIONAL = ("completion_stopped", "turn_ids")


class RewardSet:
    """The reward functions of a run, their names and their weights.

    Args:
        functions: one or several callables, or texts for `resolve_reward`.
        weights: one number per function; None: 1 each.
        has_environment: whether an environment gives rewards too, so that the set may be empty.

    Raises:
        ValueError: no function, or not one finite weight per function.
    """

    def __init__(
        self,
        functions: str | RewardFunction | Sequence[str | RewardFunction],
        weights: Sequence[float] | None = None,
        has_environment: bool = False,
    ) -> None:
        as_list = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if not as_list and not has_environment:
            raise ValueError("no reward function was given; give at least one")
        self.functions = [resolve_reward(function) for function in as_list]
        self.names = public_names([reward_name(function) for function in self.functions])
        self.weights = [1.0] * len(as_list) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(as_list):
            raise ValueError(
                f"{len(self.weights)} reward weights for {len(as_list)} reward functions ({', '.join(self.names)}); "
                "give one weight per function"
            )
        if not all(math.isfinite(weight) for weight in self.weights):
            raise ValueError(f"reward weights must be finite, got {self.weights}")
        on_trunk = [f for f in self.functions if isinstance(f, BuiltInReward) and f.is_on_trunk]
        if len(on_trunk) > 1:
            raise ValueError(
                f"{len(on_trunk)} reward adapters for one trunk ({', '.join(f.adapter.name for f in on_trunk)}); one"
                " can be a branch of it: merge the others into their base model and give those folders"
            )
        self.trunk_reward = on_trunk[0] if on_trunk else None
        # Computed here, right after the files were read: they may be edited while the run is in progress.
        self.contents = {n: content_of(f) for n, f in zip(self.names, self.functions, strict=True)}

    def columns_read(self, columns: Iterable[str]) -> list[str]:
        """Return the dataset's columns that any of the functions reads, or may read."""
        names = [name for name in columns if name not in OWN_COLUMNS]
        read = {name for function in self.functions for name in columns_read(function, names)}
        return [name for name in names if name in read]

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check that every function can be called with these dataset columns.

        Raises:
            TypeError: a function needs a keyword that is missing, or rejects one.
        """
        others = [name for name in columns if name not in OWN_COLUMNS]
        keywords = dict.fromkeys(["prompts", "completions", "completion_ids", *EXTRAS, *others, *OPTIONAL])
        for name, function in zip(self.names, self.functions, strict=True):
            _check_signature(name, function, _keywords_for(function, keywords))

    def score(
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
        trunk_scores: Callable[[], list[float]] | None = None,
        completion_stopped: Sequence[bool] | None = None,
        turn_ids: Sequence[list[int]] | None = None,
        turn_rewards: Sequence[list[float] | None] | None = None,
        environment_name: str = "environment",
        **extras: Any,
    ) -> Scores:
        """Score n completions with every function.

        Args:
            prompts: n texts or conversations.
            completions: n texts, or lists of one message.
            completion_ids: n lists of token ids.
            columns: the dataset's columns, n entries each.
            trunk_scores: returns the n scores of the reward adapter on the trunk; called when all others are done.
            completion_stopped: n booleans, False for a completion that was cut off; None: no completion was cut off.
            turn_ids: n lists, the number of the turn of each token, -1 at observations; None: one turn each.
            turn_rewards: n lists, what an environment gave for each turn (None: nothing for this row), which counts
                under `environment_name` with weight 1; None: no environment gives rewards.
            extras: `trainer_state`, `log_extra`, `log_metric`, and other keywords for the functions.

        Raises:
            RuntimeError: a function raised an error, which is the cause.
            TypeError: a function's signature does not fit, or it returned something that is not a number.
            ValueError: a list has the wrong length, from the caller or from a function.
        """
        stopped = [True] * len(prompts) if completion_stopped is None else list(completion_stopped)
        turns = [[0] * len(ids) for ids in completion_ids] if turn_ids is None else [list(ids) for ids in turn_ids]
        rows = {"completions": completions, "completion_ids": completion_ids}
        rows |= dict(zip(OPTIONAL, (stopped, turns), strict=True))
        for name, entries in {**rows, **columns}.items():
            if len(entries) != len(prompts):
                raise ValueError(f"{name} has {len(entries)} entries for {len(prompts)} prompts; give one each")
        self.check_columns([*columns, *extras])
        others = {name: entries for name, entries in columns.items() if name not in OWN_COLUMNS}
        ignored = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
        keywords = {**others, **ignored, **extras, "prompts": prompts, **rows}
        results = [_as_list(result) for result in self._call_all(keywords, trunk_scores)]
        names, weights = [f"reward function {name!r}" for name in self.names], self.weights
        public = self.names
        if turn_rewards is not None:
            results.append([None if rewards is None else PerTurn(rewards) for rewards in turn_rewards])
            names, weights = [*names, f"environment {environment_name!r}"], [*weights, 1.0]
            public = public_names([*public, environment_name])
        scores = [checked_scores(n, result, len(prompts)) for n, result in zip(names, results, strict=True)]
        dense = [dense_entries(n, result, turns) for n, result in zip(names, results, strict=True)]
        return weighted_scores(public, scores, weights, dense, turns)

    def _call_all(self, keywords: dict[str, Any], trunk_scores: Callable[[], list[float]] | None) -> list[Any]:
        if not keywords["prompts"]:  # All episodes of this process failed.
            return [[] for _ in self.functions]
        arguments = [{name: keywords[name] for name in _keywords_for(f, keywords)} for f in self.functions]
        results: list[Any] = [None] * len(self.functions)
        for index, (name, function) in enumerate(zip(self.names, self.functions, strict=True)):
            if function is not self.trunk_reward and not is_async(function):
                try:
                    results[index] = function(**arguments[index])
                except Exception as error:
                    raise _failure(name, error) from error
        calls = {index: f(**arguments[index]) for index, f in enumerate(self.functions) if is_async(f)}
        for index, result in _awaited(calls).items():
            if isinstance(result, BaseException):
                raise _failure(self.names[index], result) from result
            results[index] = result
        if self.trunk_reward is not None:
            # Errors of the trunk are not reported as errors of a reward function.
            results[self.functions.index(self.trunk_reward)] = (trunk_scores or self.trunk_reward)()
        return results


def resolve_reward(spec: str | RewardFunction) -> RewardFunction:
    """Return the reward function that `spec` names.

    Args:
        spec: a callable, which is returned unchanged; "package.module.name"; "path/to/file.py:name"; a name of
            TRL_REWARDS; or the URL of a reward server, which is called once to check that it works.

    Raises:
        ValueError: the text has another form or names a model, or the module, file or name does not exist.
        RuntimeError: importing the module failed, or the server does not answer as it should.
        TypeError: the object is not callable, or is a class where an instance is needed.
    """
    return read_spec(spec).load() if isinstance(spec, str) else checked_callable(spec, spec)


def dense_entries(name: str, result: Any, turn_ids: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    """Return the rewards at each token, float64 [len(completion)], of the rows for which `result` of `name` is dense.

    Raises:
        ValueError: an entry has another length than its row has turns, or sampled tokens.
    """
    entries = enumerate(zip(result, turn_ids, strict=True)) if isinstance(result, (list, tuple)) else ()
    return {
        row: _at_tokens(f"{name} returned", row, entry, turns)
        for row, (entry, turns) in entries
        if isinstance(entry, DenseReward)
    }


def _at_tokens(returned: str, row: int, entry: DenseReward, turns: Sequence[int]) -> Tensor:
    sampled = [place for place, turn in enumerate(turns) if turn >= 0]
    # Of each turn the last token stays.
    is_per_turn = isinstance(entry, PerTurn)
    places = list({turns[place]: place for place in sampled}.values()) if is_per_turn else sampled
    if len(entry.rewards) != len(places):
        what = "turn" if is_per_turn else "sampled token"
        raise ValueError(
            f"{returned} {type(entry).__name__} with {len(entry.rewards)} numbers for row {row}, which has"
            f" {len(places)} {what}{'s' * (len(places) != 1)}; give one number per {what}"
        )
    rewards = torch.zeros(len(turns), dtype=torch.float64)
    rewards[places] = torch.tensor([float(number) for number in entry.rewards], dtype=torch.float64)
    return rewards


def public_names(names: Sequence[str]) -> list[str]:
    """Return different names for metrics, `score/<name>`; `score/mean` and `score/std` are those of the total."""
    return unique_names(["mean", "std", *names])[2:]


def weighted_scores(
    names: Sequence[str],
    rows: Sequence[Sequence[float | None]],
    weights: Sequence[float],
    dense: Sequence[dict[int, Tensor]],
    turn_ids: Sequence[Sequence[int]],
) -> Scores:
    """Return the weighted sum over sources, of which each has a name, n numbers or None, and its `dense_entries`."""
    applies = torch.tensor([[value is not None for value in row] for row in rows], dtype=torch.bool)
    scores = torch.tensor(
        [[math.nan if value is None else value for value in row] for row in rows], dtype=torch.float64
    )
    weighted = scores * torch.tensor(weights, dtype=torch.float64)[:, None]
    # One after the other, so that the sum does not depend on the kernel.
    total = sum(torch.where(applies, weighted, 0.0)).float()
    # A row that only functions of weight 0 score has no reward: these are logged.
    counts = torch.tensor([weight != 0 or not any(weights) for weight in weights])
    total[~applies[counts].any(dim=0) | ~total.isfinite()] = math.nan
    by_function = dict(zip(names, scores.float(), strict=True))
    if not any(dense):
        return Scores(total, by_function)
    by_token = [torch.zeros(len(turns), dtype=torch.float64) for turns in turn_ids]
    for weight, entries in zip(weights, dense, strict=True):
        for row, rewards in entries.items():
            if total[row].isfinite():
                by_token[row] += weight * rewards
    return Scores(total, by_function, [rewards.float() for rewards in by_token])


def _as_list(result: Any) -> Any:
    """Return a result that can be read twice."""
    return result.tolist() if hasattr(result, "tolist") else list(result) if isinstance(result, Iterator) else result


def _ignore(*_args: Any, **_kwargs: Any) -> None:
    """Replace `log_extra` and `log_metric` if the caller gives none."""


def _failure(name: str, error: BaseException) -> RuntimeError:
    return RuntimeError(f"reward function {name!r} raised {type(error).__name__}: {error}")


def _awaited(calls: dict[int, Coroutine[Any, Any, Any]]) -> dict[int, Any]:
    """Return the results of all calls, errors among them, so that no call is running when the trainer stops."""
    if not calls:
        return {}

    async def all_results() -> list[Any]:
        return await asyncio.gather(*calls.values(), return_exceptions=True)

    future = asyncio.run_coroutine_threadsafe(all_results(), _background_loop())
    try:
        return dict(zip(calls, future.result(), strict=True))
    except BaseException:
        future.cancel()
        raise


@functools.cache
def _background_loop() -> asyncio.AbstractEventLoop:
    """Return one event loop in a daemon thread, kept so that clients bound to it stay valid.

    It also works inside a running loop (a notebook's).
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="onetrunk-rewards", daemon=True).start()
    return loop


# A forked process has no threads and starts a loop of its own.
os.register_at_fork(after_in_child=_background_loop.cache_clear)


def _keywords_for(function: Callable[..., Any], keywords: Iterable[str]) -> list[str]:
    """Return the keywords that a function is called with: OPTIONAL and a template's variables if it takes them."""
    named = {p.name for p in parameters_of(function) or () if p.kind is not p.POSITIONAL_ONLY}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters_of(function) or ())
    rest = (*OPTIONAL, *TEMPLATE_COLUMNS)
    return [keyword for keyword in keywords if keyword not in rest or takes_all or keyword in named]


def _check_signature(name: str, function: Callable[..., Any], keywords: Sequence[str]) -> None:
    parameters = parameters_of(function)
    if parameters is None:
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    rejected = [keyword for keyword in keywords if keyword not in {p.name for p in named}]
    if rejected and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise TypeError(
            f"reward function {name!r} does not take {', '.join(rejected)}, which it is called with; "
            "add **kwargs to its parameters"
        )
    missing = [p.name for p in named if p.default is p.empty and p.name not in keywords]
    missing += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if missing:
        raise TypeError(
            f"reward function {name!r} needs {', '.join(missing)}, which is not among the keywords it is called with "
            f"({', '.join(keywords)}); add that column to the dataset, or give the parameter a default"
        )
