"""Several judges as one: mean, disagreement, abstentions and errors."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.judges.base import Judge, Pair, Principle, Rating, Verdict
from onetrunk.judges.load import SLICE, EnsembleJudge
from onetrunk.judges.rubric import RubricJudge
from tests.judges.test_rubric import mild, short

PRINCIPLE = Principle("Which is shorter and milder?", tags=("short", "mild"))
PAIR = Pair("p", "a", "b")


class FixedJudge:
    """Says the same of everything."""

    def __init__(self, answer, name="fixed", reason=None, error=None):
        self.answer, self.name, self.reason, self.error = answer, name, reason, error
        self.identity, self.asked = {"fixed": [answer, name, reason, error]}, []

    def compare(self, pairs, principle, done=None):
        self.asked.append(len(pairs))
        return self._told([Verdict(self.answer, self.reason, self.error) for _ in pairs], done)

    def rate(self, prompts, completions, principle, done=None, stopped=None):
        return self._told([Rating(self.answer, self.reason, self.error) for _ in prompts], done)

    def _told(self, answers, done):
        for index, answer in enumerate(answers):
            if done is not None:
                done(index, answer)
        return answers


def test_the_mean_and_the_disagreement_by_hand():
    judge = EnsembleJudge([FixedJudge(0.2, "a"), FixedJudge(0.8, "b", "because")])
    (verdict,) = judge.compare([PAIR], PRINCIPLE)
    assert verdict.probability == pytest.approx(0.5) and verdict.reason == "b: because"
    # Both lie .3 from the mean.
    assert verdict.details == {"members": {"a": 0.2, "b": 0.8}, "disagreement": pytest.approx(0.3)}
    (rating,) = judge.rate(["p"], ["a"], PRINCIPLE)
    assert rating.score == pytest.approx(0.5) and rating.details == verdict.details
    assert isinstance(judge, Judge)


def test_who_abstains_is_left_out_and_where_all_abstain_so_does_the_ensemble():
    silent = FixedJudge(None, "silent", "cannot say")
    (verdict,) = EnsembleJudge([FixedJudge(0.9), silent]).compare([PAIR], PRINCIPLE)
    assert verdict.probability == 0.9 and verdict.details["disagreement"] == 0
    (verdict,) = EnsembleJudge([silent, FixedJudge(None, "mute")]).compare([PAIR], PRINCIPLE)
    assert (verdict.probability, verdict.error, verdict.reason) == (None, None, "silent: cannot say")


def test_a_members_error_is_an_error_and_never_a_label():
    (verdict,) = EnsembleJudge([FixedJudge(0.9), FixedJudge(None, "down", error="HTTP 503")]).compare(
        [PAIR], PRINCIPLE
    )
    assert verdict.probability is None and verdict.error == "down: HTTP 503"


def test_every_answer_is_told_once_in_order_and_members_are_asked_slice_by_slice():
    members = [FixedJudge(0.2, "a"), FixedJudge(0.8, "b")]
    told, pairs = [], [Pair("p", str(i), "x") for i in range(2 * SLICE + 3)]
    verdicts = EnsembleJudge(members).compare(pairs, PRINCIPLE, lambda i, v: told.append((i, v)))
    assert told == list(enumerate(verdicts)) and len(verdicts) == len(pairs)
    assert members[0].asked == members[1].asked == [SLICE, SLICE, 3]
    told.clear()
    ratings = EnsembleJudge(members).rate(["p"] * 70, ["c"] * 70, PRINCIPLE, lambda i, r: told.append((i, r)))
    assert told == list(enumerate(ratings)) and len(ratings) == 70
    assert EnsembleJudge(members).compare([], PRINCIPLE) == []


@settings(deadline=None)
@given(st.text(max_size=8), st.text(max_size=8))
def test_an_ensemble_of_judges_without_bias_has_none(first, second):
    judge = EnsembleJudge([RubricJudge({"short": short}), RubricJudge({"short": short, "mild": mild})])
    (one,), (other,) = (
        judge.compare([pair], PRINCIPLE) for pair in (Pair("p", first, second), Pair("p", second, first))
    )
    assert one.probability == pytest.approx(1 - other.probability, abs=1e-15)


def test_the_last_members_answers_are_told_one_by_one_until_it_breaks():
    class Breaking(FixedJudge):
        def compare(self, pairs, principle, done=None):
            self._told([Verdict(0.5)] * 3, done)
            raise RuntimeError("the server was given up")

    told = []
    with pytest.raises(RuntimeError, match="given up"):
        EnsembleJudge([FixedJudge(0.7), Breaking(0.5)]).compare(
            [PAIR] * 5, PRINCIPLE, lambda i, v: told.append((i, v))
        )
    assert [(i, v.probability) for i, v in told] == [(i, pytest.approx(0.6)) for i in range(3)]


def test_what_is_no_ensemble_is_refused():
    with pytest.raises(ValueError, match="the judge 'fixed' is twice in the ensemble"):
        EnsembleJudge([FixedJudge(0.5), FixedJudge(0.5)])


def test_members_of_one_name_are_told_apart_and_every_member_counts_in_the_identity():
    judge = EnsembleJudge([FixedJudge(0.5), FixedJudge(0.6), FixedJudge(0.7)])
    assert judge.names == ["fixed", "fixed_2", "fixed_3"]
    assert judge.identity != EnsembleJudge([FixedJudge(0.5), FixedJudge(0.6)]).identity


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [(("refused",), "refused"), (("unread", "server"), "server"), (("unread", "refused"), "unread")],
)
def test_the_error_of_an_ensemble_is_the_servers_if_one_of_its_members_failed(kinds, expected):
    class Failing(FixedJudge):
        def _told(self, answers, done):
            return super()._told([replace(answer, error_kind=self.name) for answer in answers], done)

    judge = EnsembleJudge([FixedJudge(0.5), *(Failing(None, kind, error="no") for kind in kinds)])
    assert judge.compare([PAIR], PRINCIPLE)[0].error_kind == expected
    assert judge.rate(["p"], ["a"], PRINCIPLE)[0].error_kind == expected
