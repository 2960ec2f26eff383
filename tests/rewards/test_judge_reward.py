"""The ratings of a judge as rewards, by hand: rows that the judge does not decide have none."""

import pytest

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Principle
from onetrunk.rewards.judge import JudgeReward
from tests.judges.fakes import ToldJudge

TWO = Constitution(
    "two", (Principle("Which is longer?", 3.0, ("long",)), Principle("Which is warmer?", 1.0, ("warm",)))
)


def rate(item, principle):
    """Rate a tenth of the number of words, 1 by warmth; abstain on "what", fail on "fails"."""
    if item.text in ("what", "fails"):
        return None if item.text == "what" else "down"
    return 1.0 if "warm" in principle.tags else len(item.text.split()) / 10


def test_the_rating_is_the_weighted_mean_of_the_principles_by_hand():
    # 3 words of 10 count three times, 1.0 once: (3 * .3 + 1) / 4.
    reward = JudgeReward(ToldJudge(rate, "words"), TWO)
    found = reward(prompts=["p", "q", "r"], completions=["a b c", "what", "fails"])
    assert found == [pytest.approx(0.475), None, None]
    assert reward(prompts=[], completions=[]) == []
