"""Dense rewards: what a reward function or an environment gives inside a completion, and what becomes of it."""

import math

import numpy as np
import pytest
import torch

from onetrunk.rewards import PerToken, PerTurn, RewardSet
from onetrunk.rewards.reward import arrivals, turn_sums
from tests.rewards.test_combine import giving

# Row 0 has three turns with observations between them, row 1 one turn.
TURNS = [[0, 0, -1, 1, -1, -1, 2, 2], [0, 0, 0]]
IDS = [[5, 6, 7, 8, 9, 10, 11, 1], [5, 6, 1]]


def score(*functions, weights=None, **given):
    """Return the scores of the two rows, and what arrives at each token."""
    reward_set = RewardSet(list(functions), weights, has_environment=True)
    scores = reward_set.score(["p", "q"], ["x", "y"], IDS, {}, turn_ids=TURNS, **given)
    return scores, scores.by_token and [row.tolist() for row in scores.by_token]


def test_a_turns_reward_arrives_at_its_last_sampled_token_and_token_rewards_skip_observations():
    scores, by_token = score(giving(PerTurn([1, 2, 4]), PerTurn([3.0])), weights=[0.5])
    assert by_token == [[0, 0.5, 0, 1, 0, 0, 0, 2], [0, 0, 1.5]] and scores.by_token[0].dtype == torch.float32
    # The sum over the episode before weighting, and the weighted total.
    assert scores.by_function["given"].tolist() == [7, 3] and scores.total.tolist() == [3.5, 1.5]
    scores, by_token = score(giving(PerToken(range(1, 6)), PerToken(torch.tensor([0.5, 0.0, 0.25]))))
    assert by_token == [[1, 2, 0, 3, 0, 0, 4, 5], [0.5, 0, 0.25]] and scores.total.tolist() == [15, 0.75]


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda rows: np.array(rows, dtype=object)])
def test_one_list_may_hold_numbers_none_and_dense_rewards(kind):
    scores, by_token = score(lambda **kwargs: kind([None, PerTurn([3])]), giving(2.0, 1.0, name="number"))
    # A number is no part of by_token: it arrives at the last token, with what is left of the score.
    assert by_token == [[0.0] * 8, [0, 0, 3]] and scores.total.tolist() == [2, 4]
    assert scores.by_function["lambda"][0].isnan() and scores.by_function["lambda"][1] == 3
    assert score(giving(1, 2))[1] is None


def test_several_dense_functions_add_up_with_their_weights():
    functions = giving(PerTurn([1, 0, 1]), None, name="a"), giving(PerToken([1, 1, 1, 1, 1]), 5, name="b")
    scores, by_token = score(*functions, weights=[2.0, -1.0])
    assert by_token == [[-1, 1, 0, -1, 0, 0, -1, 1], [0, 0, 0]] and scores.total.tolist() == [-1, -5]


def test_an_environment_is_a_source_under_its_name_with_weight_one():
    given = {"turn_rewards": [[1, 0, 2], None], "environment_name": "Maze"}
    scores, by_token = score(giving(1, 1), weights=[10.0], **given)
    assert by_token == [[0, 1, 0, 0, 0, 0, 0, 2], [0, 0, 0]]
    assert scores.total.tolist() == [13, 10] and list(scores.by_function) == ["given", "Maze"]
    assert list(score(giving(1, 1, name="Maze"), **given)[0].by_function) == ["Maze", "Maze_2"]
    assert score(turn_rewards=[[1, 0, 2], [4]])[0].total.tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"environment 'Maze' returned PerTurn with 2 numbers for row 0, which has 3"):
        score(turn_rewards=[[1, 2], [1]], environment_name="Maze")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_dense_number_that_is_not_finite_leaves_the_row_without_a_score(number):
    scores, by_token = score(giving(PerTurn([1, number, 1]), PerTurn([2])), giving(1, 1, name="fine"))
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
        score(giving(*result))


def test_functions_that_ask_for_turn_ids_receive_them():
    def asks(completions, turn_ids, **kwargs):
        return [PerTurn([1.0] + [0.0] * max(turns)) for turns in turn_ids]

    def does_not(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):
        return [0, 0]

    assert score(asks, does_not)[1] == [[0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 1]]
    # Without turns a completion is one.
    assert RewardSet(asks).score(["p"], ["x"], [[5, 6]], {}).by_token[0].tolist() == [0, 1]


def test_where_the_reward_fell_adds_up_to_the_score():
    scores, _ = score(giving(PerToken([0, 0.5, 0, 2, 0]), 3.0), giving(4, 1, name="number"))
    # Token 1 ends turn 0, token 6 is inside turn 2, and the number arrives at its end.
    assert arrivals(scores, 0, TURNS[0]) == [(1, 0, 0.5), (6, 2, 2.0), (7, 2, 4.0)]
    assert turn_sums(arrivals(scores, 0, TURNS[0])) == [0.5, 0.0, 6.0]
    assert arrivals(scores, 1, TURNS[1]) == [(2, 0, 4.0)]
