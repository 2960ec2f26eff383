"""Reward functions that TRL ships for its own trainers work here unchanged; the numbers are their documentation's."""

import importlib.util

import pytest

pytest.importorskip("trl.rewards")

from trl.rewards import (
    accuracy_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

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


def test_the_column_that_one_needs_is_asked_for():
    for function in (accuracy_reward, reasoning_accuracy_reward):
        with pytest.raises(TypeError, match=f"'{function.__name__}' needs solution"):
            RewardSet(function).check_columns(["prompt"])
        RewardSet(function).check_columns(["prompt", "solution"])


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="accuracy_reward needs math_verify")
def test_answers_are_verified_and_unreadable_solutions_are_left_out():
    completions = answered(r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}", "two")
    solutions = {"solution": [r"$\frac{1}{3}$", r"$\frac{1}{3}$", ""]}
    scores = RewardSet(accuracy_reward).score(asked(3), completions, [[1]] * 3, solutions)
    assert scores.total[:2].tolist() == [1.0, 0.0]
    assert scores.total.isfinite().tolist() == [True, True, False]
