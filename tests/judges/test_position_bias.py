"""The bias of a judge is found by its statistics and cancelled by both orders; the README says what was measured."""

from pathlib import Path

import pytest

import onetrunk.judges as judges
from onetrunk.judges.judge import Pair
from onetrunk.judges.labels import judge_pairs
from onetrunk.judges.rubric import RubricJudge, logistic
from tests.judges.position_bias import BIASES, CONSTITUTION, SlotBiased, measure, some_pairs, worth

README = (Path(judges.__file__).parent / "README.md").read_text(encoding="utf-8")
FAIR = RubricJudge({"worth": worth}, temperature=1.0)


def test_the_readme_quotes_what_its_command_measures():
    one_order, both_orders = measure(1.0, some_pairs())["win_rate"]
    assert "python -m tests.judges.position_bias" in README
    assert f"win {one_order:.1%} if one order is asked, and {both_orders:.1%} with both" in " ".join(README.split())


@pytest.mark.parametrize("bias", BIASES)
def test_both_orders_give_the_labels_that_the_judge_would_give_without_its_bias(bias):
    pairs = some_pairs()[:500]
    found, fair = measure(bias, pairs), measure(0.0, pairs)
    # The sign of a label depends on the sum of two logits in which the bias stands once with each sign.
    assert found["wrong"][1] == fair["wrong"][1] and found["win_rate"][1] == fair["win_rate"][1]
    if bias:
        assert (found["first_slot_rate"] > 0.6) == (bias > 0) and (found["first_slot_rate"] < 0.4) == (bias < 0)
        assert found["wrong"][0] > fair["wrong"][0] and found["position_consistency"] < fair["position_consistency"]
    else:
        assert found["first_slot_rate"] == pytest.approx(0.5, abs=0.02)


def test_what_is_left_of_a_bias_is_a_label_nearer_to_one_half():
    pair, bias = Pair("p", "1.5", "0.5"), 2.0
    (label,) = judge_pairs(SlotBiased(FAIR, bias), [pair], CONSTITUTION)
    # A lead of 1: (s(1 + 2) + 1 - s(-1 + 2)) / 2, between 1/2 and the truth s(1).
    assert label.probability == pytest.approx((logistic(3) + 1 - logistic(1)) / 2)
    assert 0.5 < label.probability < logistic(1) and not label.consistent
