"""Reward functions that TRL ships for its own trainers work here unchanged; the numbers are their documentation's."""

import pytest

pytest.importorskip("trl.rewards")

from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

from onetrunk.rewards import RewardSet


def answered(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def asked(number):
    return [[{"role": "user", "content": "how old is the cat ?"}]] * number


def test_formats_and_lengths_are_scored_together():
    functions = [think_format_reward, get_soft_overlong_punishment(100, 20), get_repetition_penalty_reward(2, -1.0)]
    rewards = RewardSet(functions, weights=[1.0, 2.0, 1.0])
    assert rewards.names == ["think_format_reward", "soft_overlong_punishment_reward", "repetition_penalty_reward"]
    completions = answered("<think>\nold\n</think>\ntwo", "<think>\ntwo")
    scores = rewards.score(asked(2), completions, [list(range(90)), [5, 5, 5, 5, 5]], {})
    assert scores.by_function["think_format_reward"].tolist() == [1.0, 0.0]
    assert scores.by_function["soft_overlong_punishment_reward"].tolist() == [-0.5, 0.0]
    assert scores.by_function["repetition_penalty_reward"].tolist() == [0.0, -0.75]
    assert scores.total.tolist() == [1.0 - 2 * 0.5, -0.75]
