"""r = beta * log P(y > y_ref) by hand, with judges that are right, biased, undecided or down; ratings as rewards."""

import math

import pytest

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Pair, Principle
from onetrunk.rewards import RewardSet
from onetrunk.rewards.judge_reward import JudgeReward, PairwiseReward, prompt_key
from onetrunk.types import SampledText
from tests.judges.fakes import ToldJudge

ONE = Constitution("one", (Principle("Which is longer?", tags=("long",)),))
TWO = Constitution(
    "two", (Principle("Which is longer?", 3.0, ("long",)), Principle("Which is warmer?", 1.0, ("warm",)))
)


def word_judge(slot_bias=0.0, undecided=(), down=()):
    """Return a judge with P(first) = words of first / words of both + slot_bias, and words / 10 as the rating.

    It abstains on the texts `undecided`, and fails on those `down`. By a principle of warmth all ratings are 1.
    """

    def answer(item, principle):
        texts = {item.first, item.second} if isinstance(item, Pair) else {item.text}
        if texts & set(down):
            return "down"
        if texts & set(undecided):
            return None
        if not isinstance(item, Pair):
            return 1.0 if "warm" in principle.tags else len(item.text.split()) / 10
        first, second = len(item.first.split()), len(item.second.split())
        return min(1.0, max(0.0, first / (first + second) + slot_bias))

    return ToldJudge(answer, "words", slot_bias)


def rewards_of(reward, completions, references, **columns):
    prompts = [f"prompt {i}" for i in range(len(completions))]
    return reward(prompts=prompts, completions=completions, reference_completion=references, **columns)


def test_the_reward_is_beta_times_the_log_probability_by_hand():
    reward = PairwiseReward(word_judge(), ONE, beta=2.0)
    # 3 words against 1: P = 3/4; 1 against 1 of another text: 1/2.
    found = rewards_of(reward, ["a b c", "d"], ["x", "y"])
    assert found == pytest.approx([2 * math.log(3 / 4), 2 * math.log(1 / 2)])


def test_a_completion_equal_to_its_reference_is_as_good_and_nobody_is_asked():
    judge = word_judge()
    assert rewards_of(PairwiseReward(judge, ONE), ["a b"], ["a b"]) == [math.log(1 / 2)]
    assert judge.asked == []


def test_rows_that_are_not_decided_have_no_reward():
    judge = word_judge(undecided=["what"], down=["fails"])
    found = rewards_of(PairwiseReward(judge, ONE), ["what", "fails", "a b"], ["x", "x", "x"])
    assert found[:2] == [None, None] and found[2] == pytest.approx(math.log(2 / 3))
    scores = RewardSet([PairwiseReward(judge, ONE)]).score(
        ["p", "q"], ["what", "a b"], [[1], [2]], {"reference_completion": ["x", "x"]}
    )
    assert scores.total.isnan().tolist() == [True, False] and list(scores.by_function) == ["pairwise"]


def test_references_come_from_the_column_or_from_what_was_sampled():
    references = {prompt_key("prompt 0"): SampledText("x")}
    reward = PairwiseReward(word_judge(), ONE, references=references)
    assert rewards_of(reward, ["a b c"], ["x y z"]) == [math.log(1 / 2)]
    assert reward(prompts=["prompt 0"], completions=["a b c"]) == pytest.approx([math.log(3 / 4)])
    with pytest.raises(
        RuntimeError, match="no reference completion of the prompt 'unknown'; add a column reference_c"
    ):
        reward(prompts=["unknown"], completions=["a"])


def test_what_is_logged_says_how_often_the_reference_is_beaten_and_whether_the_judge_agrees_with_itself():
    logged = {}
    reward = PairwiseReward(word_judge(slot_bias=0.5), ONE)
    rewards_of(reward, ["a b c", "d"], ["x", "d"], log_metric=logged.__setitem__)
    # Shown first, "a b c" has 1; shown second 1 - (1/4 + 1/2): the mean is 5/8. The other row is a half.
    assert logged["score/pairwise_probability"] == pytest.approx((5 / 8 + 1 / 2) / 2)
    assert logged["score/pairwise_consistency"] == 0.0


def test_the_rating_is_the_weighted_mean_of_the_principles_by_hand():
    # 3 words of 10 count three times, 1.0 once: (3 * .3 + 1) / 4.
    reward = JudgeReward(word_judge(undecided=["what"], down=["fails"]), TWO)
    found = reward(prompts=["p", "q", "r"], completions=["a b c", "what", "fails"])
    assert found == [pytest.approx(0.475), None, None]
    assert reward(prompts=[], completions=[]) == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"beta": 0.0}, "beta of a pairwise reward is 0.0"),
        ({"beta": math.inf}, "beta of a pairwise reward is inf"),
        ({"floor": 0.0}, "floor of a pairwise reward is 0.0"),
        ({"floor": 0.5}, "floor of a pairwise reward is 0.5"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        PairwiseReward(word_judge(), ONE, **settings)
