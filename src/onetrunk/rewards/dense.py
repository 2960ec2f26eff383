"""Dense rewards: numbers that arrive inside a completion, at the end of a turn or at any token that was sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onetrunk.rewards.reward import Scores

TurnIds = Sequence[Sequence[int]]


class Arrival(NamedTuple):
    """A token at which a reward arrives, the number of its turn, and the reward."""

    token: int
    turn: int
    reward: float


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


def dense_entries(name: str, result: Any, turn_ids: TurnIds) -> dict[int, Tensor]:
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


def weighted_scores(
    names: Sequence[str],
    rows: Sequence[Sequence[float | None]],
    weights: Sequence[float],
    dense: Sequence[dict[int, Tensor]],
    turn_ids: TurnIds,
) -> Scores:
    """Return the weighted sum over sources, of which each has a name, n numbers or None, and its `dense_entries`."""
    applies = torch.tensor([[value is not None for value in row] for row in rows], dtype=torch.bool)
    scores = torch.tensor(
        [[math.nan if value is None else value for value in row] for row in rows], dtype=torch.float64
    )
    weighted = scores * torch.tensor(weights, dtype=torch.float64)[:, None]
    # One after the other, so that the sum does not depend on the kernel.
    total = sum(torch.where(applies, weighted, 0.0)).float()
    total[~applies.any(dim=0) | ~total.isfinite()] = math.nan
    by_function = dict(zip(names, scores.float(), strict=True))
    if not any(dense):
        return Scores(total, by_function)
    by_token = [torch.zeros(len(turns), dtype=torch.float64) for turns in turn_ids]
    for weight, entries in zip(weights, dense, strict=True):
        for row, rewards in entries.items():
            if total[row].isfinite():
                by_token[row] += weight * rewards
    return Scores(total, by_function, [rewards.float() for rewards in by_token])


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
