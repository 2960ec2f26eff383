"""Tests of `onetrunk.rewards.combine`: how reward functions are called, and what becomes of their numbers."""

import asyncio
import functools
import math

import numpy as np
import pytest
import torch

from onetrunk.rewards import RewardSet

PROMPTS = ["the cat", "a dog"]
COMPLETIONS = ["runs", "sleeps well"]
IDS = [[5], [6, 7]]


def giving(*scores, name="given"):
    """A reward function that returns these scores, whatever it is asked."""

    def function(**kwargs):
        return list(scores)

    function.__name__ = name
    return function


def score(functions, weights=None, columns=None, **extras):
    return RewardSet(functions, weights).score(PROMPTS, COMPLETIONS, IDS, columns or {}, **extras)


def test_the_total_is_the_weighted_sum_over_the_functions_that_apply():
    scores = score([giving(1, None, name="a"), giving(10.0, 20.0, name="b")], weights=[2.0, 0.5])
    assert scores.total.dtype == torch.float32 and scores.total.tolist() == [2 * 1 + 0.5 * 10, 0.5 * 20]
    assert scores.by_function["a"][0] == 1 and scores.by_function["a"][1].isnan()
    assert scores.by_function["b"].tolist() == [10.0, 20.0]
    assert score(giving(1, 2)).total.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_a_non_finite_score_leaves_the_row_out_although_another_function_applies(value):
    scores = score([giving(value, 1, name="a"), giving(1, 1, name="b")], weights=[0.0, 1.0])
    assert scores.total[0].isnan() == (value != 1e39)  # 1e39 fits float64, and has no weight here
    assert scores.total[1] == 1
    assert not scores.by_function["a"][0].isfinite()
    assert score([giving(value, 1)]).total[0].isnan()


def test_scores_may_be_numbers_of_any_kind():
    zero_d = [torch.tensor(1.5), np.float32(2.5)]
    for result in ([1.5, 2.5], (1.5, 2.5), np.array([1.5, 2.5]), torch.tensor([1.5, 2.5]), zero_d):
        assert score(lambda result=result, **kwargs: result).total.tolist() == [1.5, 2.5]
    assert score(giving(True, np.int64(2))).total.tolist() == [1.0, 2.0]
    assert score(lambda **kwargs: (value for value in (1, 2))).total.tolist() == [1.0, 2.0]


def test_a_function_receives_what_grpo_passes():
    seen = {}

    def curious(**kwargs):
        seen.update(kwargs)
        kwargs["log_metric"]("share", 0.5)
        return [0, 0]

    columns = {"solution": ["x", "y"], "prompt": PROMPTS, "prompt_ids": IDS, "completion": ["", ""]}
    score(curious, columns=columns)
    assert set(seen) == {
        "prompts", "completions", "completion_ids", "completion_stopped", "turn_ids", "solution", "trainer_state",
        "log_extra", "log_metric",
    }  # fmt: skip
    assert (seen["prompts"], seen["completions"], seen["completion_ids"]) == (PROMPTS, COMPLETIONS, IDS)
    assert seen["solution"] == ["x", "y"] and seen["trainer_state"] is None

    logged = []
    score(curious, trainer_state="state", log_metric=lambda name, value: logged.append((name, value)))
    assert seen["trainer_state"] == "state" and logged == [("share", 0.5)]


def test_a_function_is_told_which_completions_were_cut_off():
    def ended(completion_stopped, **kwargs):
        return completion_stopped

    async def ended_later(completion_stopped, **kwargs):
        return completion_stopped

    assert score([ended, ended_later], completion_stopped=[True, False]).total.tolist() == [2.0, 0.0]
    assert score(ended).total.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="completion_stopped has 1 entries for 2 prompts"):
        score(ended, completion_stopped=[True])


def test_a_function_that_raises_is_named_and_its_error_is_the_cause():
    def failing(**kwargs):
        raise KeyError("solution")

    async def failing_later(**kwargs):
        raise ZeroDivisionError("none left")

    for function, error in ((failing, KeyError), (failing_later, ZeroDivisionError)):
        with pytest.raises(RuntimeError, match=f"'{function.__name__}' raised {error.__name__}") as caught:
            score([giving(1, 1), function])
        assert type(caught.value.__cause__) is error


@pytest.mark.parametrize(
    ("result", "error", "reason"),
    [
        ([1.0], ValueError, "'bad' returned 1 scores, expected 2"),
        (torch.tensor(1.0), TypeError, "'bad' returned float; expected a list of 2"),
        (None, TypeError, "'bad' returned NoneType; expected a list of 2 numbers"),
        ({0: 1.0, 1: 2.0}, TypeError, "'bad' returned dict; expected"),
        ([1.0, "2.0"], TypeError, "'bad' returned '2.0' at index 1"),
        ([1.0, torch.ones(2)], ValueError, "something that is not one number"),
    ],
)
def test_a_result_that_is_not_one_number_per_row_is_refused(result, error, reason):
    async def bad(**kwargs):
        return result

    def bad_now(**kwargs):
        return result

    bad_now.__name__ = "bad"
    for function in (bad, bad_now):
        with pytest.raises(error, match=reason):
            score([giving(1, 1), function])


def test_a_signature_that_does_not_fit_is_refused_before_anything_is_called():
    def closed(prompts, completions):
        raise AssertionError("was called")

    def needy(completions, solution, **kwargs):
        return [float(text == answer) for text, answer in zip(completions, solution, strict=True)]

    def positional(completions, /, **kwargs):
        raise AssertionError("was called")

    with pytest.raises(TypeError, match=r"'closed' does not take completion_ids, trainer_state.*add \*\*kwargs"):
        score(closed)
    with pytest.raises(TypeError, match="'needy' needs solution"):
        score(needy, columns={"answer": ["a", "b"]})
    with pytest.raises(TypeError, match="'positional' needs completions"):
        score(positional)
    assert score(needy, columns={"solution": ["runs", ""]}).total.tolist() == [1.0, 0.0]
    assert score(functools.partial(needy, solution=["", ""])).total.tolist() == [0.0, 0.0]
    RewardSet(needy).check_columns(["prompt", "solution"])
    with pytest.raises(TypeError, match="'needy' needs solution"):
        RewardSet(needy).check_columns(["prompt"])


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match=r"1 reward weights for 2 reward functions \(given, given_2\)"):
        RewardSet([giving(1), giving(2)], weights=[1.0])
    with pytest.raises(ValueError, match="must be finite"):
        RewardSet([giving(1)], weights=[math.nan])
    with pytest.raises(ValueError, match="no reward function"):
        RewardSet([])
    with pytest.raises(ValueError, match="solution has 1 entries for 2 prompts"):
        score(giving(1, 2), columns={"solution": ["a"]})


def test_async_functions_wait_for_each_other():
    """Each sets its own event and waits for the other's: one after the other they would never end."""
    events = {}

    def meeting(own, other):
        async def function(**kwargs):
            events.setdefault(own, asyncio.Event()).set()
            await asyncio.wait_for(events.setdefault(other, asyncio.Event()).wait(), timeout=10)
            return [1, 1]

        return function

    assert score([meeting("a", "b"), meeting("b", "a"), giving(1, 1)]).total.tolist() == [3.0, 3.0]


def test_async_functions_work_inside_a_running_loop_and_keep_their_loop():
    loops = []

    async def later(**kwargs):
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return [1, 2]

    async def notebook():
        return score(later)

    assert asyncio.run(notebook()).total.tolist() == [1.0, 2.0]
    assert score(later).total.tolist() == [1.0, 2.0]
    assert loops[0] is loops[1]
