"""Several judges as one: mean, disagreement, abstentions and errors."""

import pytest

from onetrunk.judges.judge import Pair, Principle, Rating, Single, Verdict
from onetrunk.judges.judge_config import EnsembleJudge
from tests.judges.fakes import ToldJudge

PRINCIPLE = Principle("Which is shorter and milder?", tags=("short", "mild"))
PAIR = Pair("p", "a", "b")


def fixed(number, name="fixed", **fields):
    """Return a judge that says the same of everything."""

    def answer(item, principle):
        return (Verdict if isinstance(item, Pair) else Rating)(number, **fields)

    return ToldJudge(answer, name, [number, name, fields])


def test_the_mean_and_the_disagreement_by_hand():
    judge = EnsembleJudge([fixed(0.2, "a"), fixed(0.8, "b", reason="because")])
    (verdict,) = judge.compare([PAIR], PRINCIPLE)
    assert verdict.probability == pytest.approx(0.5) and verdict.reason == "b: because"
    # Both lie .3 from the mean.
    assert verdict.details == {"members": {"a": 0.2, "b": 0.8}, "disagreement": pytest.approx(0.3)}
    (rating,) = judge.rate([Single("p", "a")], PRINCIPLE)
    assert rating.score == pytest.approx(0.5) and rating.details == verdict.details


def test_who_abstains_is_left_out_and_where_all_abstain_so_does_the_ensemble():
    silent = fixed(None, "silent", reason="cannot say")
    (verdict,) = EnsembleJudge([fixed(0.9), silent]).compare([PAIR], PRINCIPLE)
    assert verdict.probability == 0.9 and verdict.details["disagreement"] == 0
    (verdict,) = EnsembleJudge([silent, fixed(None, "mute")]).compare([PAIR], PRINCIPLE)
    assert (verdict.probability, verdict.error, verdict.reason) == (None, None, "silent: cannot say")


def test_every_answer_is_told_once_until_a_member_breaks():
    members = [ToldJudge(lambda item, principle: 0.2, "a"), fixed(0.8, "b")]
    told, pairs = [], [Pair("p", str(i), "x") for i in range(70)]
    verdicts = EnsembleJudge(members).compare(pairs, PRINCIPLE, lambda i, v: told.append((i, v)))
    assert told == list(enumerate(verdicts)) and len(verdicts) == 70
    assert all(len(member.asked) == 70 for member in members)
    assert EnsembleJudge(members).compare([], PRINCIPLE) == []

    def breaking(item, principle):
        if item.first == "3":
            raise RuntimeError("the server was given up")
        return 0.5

    told.clear()
    judge = EnsembleJudge([fixed(0.7), ToldJudge(breaking, "breaking")])
    with pytest.raises(RuntimeError, match="given up"):
        judge.compare(pairs, PRINCIPLE, lambda i, v: told.append((i, v)))
    assert [i for i, _ in told] == [0, 1, 2] and all(v.probability == pytest.approx(0.6) for _, v in told)


def test_what_is_no_ensemble_is_refused():
    with pytest.raises(ValueError, match="the judge 'fixed' is twice in the ensemble"):
        EnsembleJudge([fixed(0.5), fixed(0.5)])


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [(("refused",), "refused"), (("unread", "server"), "server"), (("unread", "refused"), "unread")],
)
def test_a_members_error_is_an_error_and_the_servers_if_one_of_them_is(kinds, expected):
    failing = [fixed(None, kind, error="no", error_kind=kind) for kind in kinds]
    judge = EnsembleJudge([fixed(0.5), *failing])
    (verdict,) = judge.compare([PAIR], PRINCIPLE)
    assert verdict.probability is None and verdict.error_kind == expected and f"{kinds[0]}: no" in verdict.error
    assert judge.rate([Single("p", "a")], PRINCIPLE)[0].error_kind == expected
