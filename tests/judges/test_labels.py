"""Labels are means over orders and principles; a biased judge is found and its bias cancelled."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Pair, Principle, Rating, Verdict
from onetrunk.judges.judge_config import EnsembleJudge
from onetrunk.judges.labels import (
    JudgeStatistics,
    PairLabel,
    answer_key,
    judge_pairs,
    judge_warnings,
    keep_answer,
    kept_answer,
)
from onetrunk.utils.files import digest
from onetrunk.utils.ledger import Ledger
from tests.judges.fakes import ToldJudge

ONE = Constitution("one", (Principle("Which is longer?"),))
TWO = Constitution("two", (Principle("Which is longer?", 3.0), Principle("Which is earlier?")))


def slot_judge(bias=0.0):
    """Return a judge that prefers the longer completion, and by `bias` logits the one in the first slot."""

    def answer(pair, principle):
        return 1 / (1 + math.exp(-(len(pair.first) - len(pair.second) + bias)))

    return ToldJudge(answer, "slot", bias)


class Book(dict):
    """A memory of answers."""

    def put(self, key, value):
        self[key] = value


PAIR = Pair("p", "a", "b")


def told_label(constitution, verdicts):
    """Return the label of PAIR from probabilities by (principle, flipped); every question has its answer."""
    judge, book = slot_judge(), Book()
    for (number, flipped), probability in verdicts.items():
        key = answer_key(judge, constitution.principles[number], PAIR.flipped() if flipped else PAIR)
        keep_answer(book, key, Verdict(probability))
    (label,) = judge_pairs(judge, [PAIR], constitution, memory=book)
    assert judge.asked == []
    return label


def test_a_label_by_hand():
    # The first principle: .8 as given; flipped .4 for `second`, so .6 for `first`. Mean .7, weight 3.
    # The second: .5 and 1 - .3 = .7. Mean .6, weight 1.
    label = told_label(TWO, {(0, False): 0.8, (0, True): 0.4, (1, False): 0.5, (1, True): 0.3})
    assert label.probability == pytest.approx((3 * 0.7 + 0.6) / 4)
    assert label.consistent and not label.errors and not label.abstentions
    assert [list(orders) for _, orders in label.votes] == [pytest.approx([0.8, 0.6]), pytest.approx([0.5, 0.7])]


SEVEN = Constitution("seven", (Principle("Which is longer?", 3.0), *(Principle(f"Idle {i}?") for i in range(6))))


def test_a_principle_that_ties_does_not_count():
    told = {(0, False): 0.8, (0, True): 0.4}
    # The second sees no difference in either order, the others neither.
    idle = {(number, flipped): 0.5 for number in range(1, 7) for flipped in (False, True)}
    label = told_label(SEVEN, told | idle)
    # .7 as without them; with six halves of weight 1 it would be (3 * .7 + 6 * .5) / 9 = .567.
    assert label.probability == pytest.approx((0.8 + 0.6) / 2) and label.consistent
    assert len(label.votes) == 7

    # Orders that contradict each other saw a difference: (3 * .7 + 1 * .5) / 4.
    torn = {(1, False): 0.9, (1, True): 0.9}
    label = told_label(SEVEN, told | idle | torn)
    assert label.probability == pytest.approx((3 * 0.7 + 0.5) / 4)

    # Where all tie the label is a tie, and no abstention.
    nothing = {(0, False): 0.5, (0, True): 0.5}
    label = told_label(SEVEN, nothing | idle)
    assert (label.probability, label.consistent, label.abstentions) == (0.5, True, ())


def test_an_order_without_answer_leaves_its_principle_out():
    # Of the pairs as they are flipped.
    silent = {"b": Verdict(None, "cannot say"), "c": Verdict(None, error="server down")}
    judge = ToldJudge(lambda pair, principle: silent.get(pair.first, 0.5))
    abstained, failed = judge_pairs(judge, [Pair("p", "a", "b"), Pair("p", "a", "c")], ONE)
    assert (abstained.probability, abstained.abstentions, abstained.errors) == (None, ("cannot say",), ())
    assert (failed.probability, failed.abstentions, failed.errors) == (None, (), ("server",))
    assert not failed.consistent and failed.votes[0][1] == (0.5, None)


def test_a_member_of_an_ensemble_that_answers_in_one_order_alone_does_not_count():
    def slot_bound(pair, principle):
        return 0.9 if pair == PAIR else None

    fair = ToldJudge(lambda pair, principle: 0.6 if pair.first == "a" else 0.4, "fair")
    (label,) = judge_pairs(EnsembleJudge([ToldJudge(slot_bound, "slot"), fair]), [PAIR], ONE)
    assert label.probability == pytest.approx(0.6) and label.votes[0][1] == pytest.approx((0.6, 0.6))
    silent = ToldJudge(lambda pair, principle: None if pair == PAIR else 0.7, "silent")
    (label,) = judge_pairs(EnsembleJudge([ToldJudge(slot_bound, "slot"), silent]), [PAIR], ONE)
    assert label.probability is None and label.votes[0][1] == (None, None)


@pytest.mark.parametrize("bias", [0.0, 0.7, -3.0, 9.0])
def test_the_bias_of_a_judge_is_found_and_cancelled(bias):
    equal = [Pair(f"p{i}", "same", "size") for i in range(20)]
    statistics = JudgeStatistics()
    for label in judge_pairs(slot_judge(bias), equal, ONE):
        statistics.add(label)
        assert label.probability == pytest.approx(0.5)
    figures = statistics.as_dict()
    expected = 1 / (1 + math.exp(-bias))
    assert figures["first_slot_probability"] == pytest.approx(expected)
    assert figures["first_slot_rate"] == (0.5 if bias == 0 else float(bias > 0))
    assert figures["position_consistency"] == (1.0 if bias == 0 else 0.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6)), max_size=6), st.floats(-3, 3))
def test_the_label_of_a_flipped_pair_is_the_rest_to_one(texts, bias):
    pairs = [Pair("p", first, second) for first, second in texts]
    labels = judge_pairs(slot_judge(bias), pairs, TWO)
    flipped = judge_pairs(slot_judge(bias), [pair.flipped() for pair in pairs], TWO)
    for one, other in zip(labels, flipped, strict=True):
        assert one.probability == pytest.approx(1 - other.probability)
        assert one.consistent == other.consistent


def test_what_is_known_is_not_asked_and_what_is_new_is_told_at_once():
    pairs, judge, told = [Pair("p", "aa", "b"), Pair("p", "c", "dd")], slot_judge(), []
    book = Book()
    whole = judge_pairs(judge, pairs, TWO, memory=book, on_answer=lambda pair, _verdict: told.append(pair))
    assert len(judge.asked) == len(book) == 8 and told == [pair for _, pair in judge.asked]
    assert set(told) == {shown for pair in pairs for shown in (pair, pair.flipped())}
    known = Book({key: value for key, value in book.items() if int(key, 16) % 2})
    again, num_known = slot_judge(), len(known)
    told.clear()
    assert judge_pairs(again, pairs, TWO, memory=known, on_answer=lambda pair, _verdict: told.append(pair)) == whole
    assert 0 < len(again.asked) == len(told) == 8 - num_known < 8 and known == book


def test_a_verdict_is_kept_under_all_that_it_depends_on_and_a_new_weight_buys_nothing_anew():
    judge, principle = slot_judge(), TWO.principles[0]
    key = answer_key(judge, principle, PAIR)
    assert key == answer_key(slot_judge(), replace(principle, weight=9.0), Pair("p", "a", "b"))
    others = [(judge, principle, PAIR.flipped()), (judge, TWO.principles[1], PAIR), (slot_judge(1.0), principle, PAIR)]
    others.append((judge, replace(principle, tags=("kind",)), PAIR))
    assert len({key, *(answer_key(*other) for other in others)}) == 5


def counted(*votes, abstentions=()):
    statistics = JudgeStatistics()
    for vote in votes:
        statistics.add(PairLabel(None, False, (("p", vote),), abstentions=abstentions))
    return judge_warnings(statistics.as_dict())


def test_warnings_say_when_a_judge_abstains_contradicts_itself_or_likes_a_slot():
    assert counted(*[(0.9, 0.8), (0.2, 0.4)] * 10) == []
    assert counted() == []
    # Half of the pairs contradict themselves: not fewer than half agree.
    assert counted(*[(0.6, 0.4), (0.6, 0.6), (0.4, 0.6), (0.4, 0.4)] * 5) == []
    (slot, first) = counted(*[(0.9, 0.2)] * 10)
    assert "contradicts itself in 100%" in slot and "in 100% of its answers, with a mean probability of 0.85" in first
    assert "asking in both orders cancels this" in first
    assert "prefers the completion shown first in 0% of its answers" in counted(*[(0.4, 0.6)] * 10)[1]
    # Few answers say nothing about a slot.
    assert len(counted(*[(0.9, 0.2)] * 9)) == 1
    (abstained,) = counted(*[(None, None)] * 4, abstentions=("no\nlabel", "no mass"))
    assert "abstains from 100% of its questions, for instance because: no label; use" in abstained


KEY = "ab" * 32


@pytest.mark.parametrize("answer", [Verdict(0.75, "So it is.", details={"method": "votes"}), Rating(None, "silent")])
def test_the_first_answer_is_kept_and_an_error_is_not(tmp_path, answer):
    with Ledger(tmp_path / "ledger.db") as ledger:
        keep_answer(ledger, KEY, type(answer)(None, error="down"))
        assert kept_answer(ledger, KEY, type(answer)) is None
        keep_answer(ledger, KEY, answer)
        keep_answer(ledger, KEY, type(answer)(0.25))
        assert kept_answer(ledger, KEY, type(answer)) == answer


def test_a_digest_does_not_depend_on_the_order_of_keys_and_what_is_no_json_value_has_none():
    assert digest({"a": 1, "b": [2, "\u00e9"]}) == digest({"b": [2, "\u00e9"], "a": 1})
    assert digest({"a": 1}) != digest({"a": "1"})
    with pytest.raises(ValueError):
        digest({"a": float("nan")})
