"""What a memory keeps of a judge's answers, and which of those that earlier versions kept are asked for again."""

import pytest

from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.base import Rating, Verdict
from onetrunk.judges.verdicts import keep_answer, kept_answer

KEY = "ab" * 32
VOTES = {"method": "votes", "votes": {"A": 1, "B": 0, "unread": 4}}
UNREAD = {"probability": None, "reason": "4 of 5 replies are no label", "error": None, "details": VOTES}


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        yield ledger


@pytest.mark.parametrize(
    "value",
    [
        {"probability": 0.25, "reason": None, "error": None, "details": {"method": "logprobs", "label_mass": 0.9}},
        {"probability": 1.0, "reason": "So it is.", "error": None, "details": VOTES},
        # Measured: an abstention.
        {
            "probability": None,
            "reason": "the labels have 20% of the probability",
            "error": None,
            "details": {"method": "logprobs", "label_mass": 0.2},
        },
        {"probability": None, "reason": "no check applies", "error": None, "details": {}},
        {"probability": None, "reason": "a: silent", "error": None, "details": {"members": {"a": None}}},
        {"probability": 0.5, "reason": "a: 1 of 5 replies are no label", "error": None, "details": {"members": {}}},
    ],
)
def test_what_an_earlier_version_kept_counts(ledger, value):
    ledger.put(KEY, value)
    assert kept_answer(ledger, KEY, Verdict) == Verdict(**value)


@pytest.mark.parametrize(
    "value",
    [
        UNREAD,
        UNREAD
        | {"reason": "rubric: fine\njudge-1: 5 of 5 replies are no label", "probability": 0.7}
        | {"details": {"members": {"rubric": 0.7, "judge-1": None}, "disagreement": 0.0}},
    ],
)
def test_replies_that_an_earlier_version_could_not_read_are_asked_for_again_and_replaced(ledger, value):
    ledger.put(KEY, value)
    assert kept_answer(ledger, KEY, Verdict) is None
    keep_answer(ledger, KEY, Verdict(None, error="still down"))
    assert ledger.get(KEY) == value
    answer = Verdict(0.75, details={"method": "logprobs", "label_mass": 0.9})
    keep_answer(ledger, KEY, answer)
    assert kept_answer(ledger, KEY, Verdict) == answer
    # What is replaced is kept like any other answer.
    keep_answer(ledger, KEY, Verdict(0.25))
    assert kept_answer(ledger, KEY, Verdict) == answer


def test_ratings_are_kept_in_the_same_way(ledger):
    ledger.put(KEY, {"score": None, "reason": "4 of 5 replies are no label", "error": None, "details": VOTES})
    assert kept_answer(ledger, KEY, Rating) is None
    keep_answer(ledger, KEY, Rating(0.5, error_kind="server"))
    assert ledger.get(KEY) == {"score": 0.5, "reason": None, "error": None, "details": {}}
