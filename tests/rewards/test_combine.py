"""How reward functions are called, what becomes of their numbers, and of rewards inside a completion."""

import asyncio
import functools
import math

import numpy as np
import pytest
import torch

from onetrunk.rewards import PerToken, PerTurn, RewardSet
from onetrunk.rewards.reward import arrivals, turn_sums

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


def test_a_row_that_only_functions_of_weight_0_score_has_no_reward():
    scores = score([giving(None, 1, name="a"), giving(5, 5, name="b")], weights=[1, 0])
    assert scores.total[0].isnan() and scores.total[1] == 1 and scores.by_function["b"].tolist() == [5, 5]
    assert score([giving(1, 2)], weights=[0]).total.tolist() == [0, 0]


def test_no_function_has_the_name_of_a_metric_of_the_total():
    assert RewardSet([giving(1, name="mean"), giving(1, name="std"), giving(1)]).names == ["mean_2", "std_2", "given"]


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


# Row 0 has three turns with observations between them, row 1 one turn.
TURNS = [[0, 0, -1, 1, -1, -1, 2, 2], [0, 0, 0]]
SAMPLED = [[5, 6, 7, 8, 9, 10, 11, 1], [5, 6, 1]]


def dense(*functions, weights=None, **given):
    """Return the scores of the two rows, and what arrives at each token."""
    reward_set = RewardSet(list(functions), weights, has_environment=True)
    scores = reward_set.score(["p", "q"], ["x", "y"], SAMPLED, {}, turn_ids=TURNS, **given)
    return scores, scores.by_token and [row.tolist() for row in scores.by_token]


def test_a_turns_reward_arrives_at_its_last_sampled_token_and_token_rewards_skip_observations():
    scores, by_token = dense(giving(PerTurn([1, 2, 4]), PerTurn([3.0])), weights=[0.5])
    assert by_token == [[0, 0.5, 0, 1, 0, 0, 0, 2], [0, 0, 1.5]] and scores.by_token[0].dtype == torch.float32
    # The sum over the episode before weighting, and the weighted total.
    assert scores.by_function["given"].tolist() == [7, 3] and scores.total.tolist() == [3.5, 1.5]
    scores, by_token = dense(giving(PerToken(range(1, 6)), PerToken(torch.tensor([0.5, 0.0, 0.25]))))
    assert by_token == [[1, 2, 0, 3, 0, 0, 4, 5], [0.5, 0, 0.25]] and scores.total.tolist() == [15, 0.75]


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda rows: np.array(rows, dtype=object)])
def test_one_list_may_hold_numbers_none_and_dense_rewards(kind):
    scores, by_token = dense(lambda **kwargs: kind([None, PerTurn([3])]), giving(2.0, 1.0, name="number"))
    # A number is no part of by_token: it arrives at the last token, with what is left of the score.
    assert by_token == [[0.0] * 8, [0, 0, 3]] and scores.total.tolist() == [2, 4]
    assert scores.by_function["lambda"][0].isnan() and scores.by_function["lambda"][1] == 3
    assert dense(giving(1, 2))[1] is None


def test_several_dense_functions_add_up_with_their_weights():
    functions = giving(PerTurn([1, 0, 1]), None, name="a"), giving(PerToken([1, 1, 1, 1, 1]), 5, name="b")
    scores, by_token = dense(*functions, weights=[2.0, -1.0])
    assert by_token == [[-1, 1, 0, -1, 0, 0, -1, 1], [0, 0, 0]] and scores.total.tolist() == [-1, -5]


def test_an_environment_is_a_source_under_its_name_with_weight_one():
    given = {"turn_rewards": [[1, 0, 2], None], "environment_name": "Maze"}
    scores, by_token = dense(giving(1, 1), weights=[10.0], **given)
    assert by_token == [[0, 1, 0, 0, 0, 0, 0, 2], [0, 0, 0]]
    assert scores.total.tolist() == [13, 10] and list(scores.by_function) == ["given", "Maze"]
    assert list(dense(giving(1, 1, name="Maze"), **given)[0].by_function) == ["Maze", "Maze_2"]
    assert dense(turn_rewards=[[1, 0, 2], [4]])[0].total.tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"environment 'Maze' returned PerTurn with 2 numbers for row 0, which has 3"):
        dense(turn_rewards=[[1, 2], [1]], environment_name="Maze")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_dense_number_that_is_not_finite_leaves_the_row_without_a_score(number):
    scores, by_token = dense(giving(PerTurn([1, number, 1]), PerTurn([2])), giving(1, 1, name="fine"))
    assert scores.total[0].isnan() and scores.total[1] == 3 and by_token == [[0] * 8, [0, 0, 2]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([PerTurn([1, 2]), 0], "function 'given' returned PerTurn with 2 numbers for row 0, which has 3 turns;"),
        ([0, PerTurn([])], "returned PerTurn with 0 numbers for row 1, which has 1 turn; give one number per turn"),
        ([PerToken([0] * 8), 0], "PerToken with 8 numbers for row 0, which has 5 sampled tokens; give one number per"),
        ([PerTurn(["a", 1, 2]), 0], "something that is not one number"),
        ([PerTurn(3.0), 0], "something that is not one number"),
    ],
)
def test_rewards_of_another_length_are_refused_with_function_and_row(result, message):
    with pytest.raises(ValueError, match=message):
        dense(giving(*result))


def test_functions_that_ask_for_turn_ids_receive_them():
    def asks(completions, turn_ids, **kwargs):
        return [PerTurn([1.0] + [0.0] * max(turns)) for turns in turn_ids]

    def does_not(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):
        return [0, 0]

    assert dense(asks, does_not)[1] == [[0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 1]]
    # Without turns a completion is one.
    assert RewardSet(asks).score(["p"], ["x"], [[5, 6]], {}).by_token[0].tolist() == [0, 1]


def test_where_the_reward_fell_adds_up_to_the_score():
    scores, _ = dense(giving(PerToken([0, 0.5, 0, 2, 0]), 3.0), giving(4, 1, name="number"))
    # Token 1 ends turn 0, token 6 is inside turn 2, and the number arrives at its end.
    assert arrivals(scores, 0, TURNS[0]) == [(1, 0, 0.5), (6, 2, 2.0), (7, 2, 4.0)]
    assert turn_sums(arrivals(scores, 0, TURNS[0])) == [0.5, 0.0, 6.0]
    assert arrivals(scores, 1, TURNS[1]) == [(2, 0, 4.0)]
