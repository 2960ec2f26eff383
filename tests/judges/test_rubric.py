"""Plain checks as a judge: by hand, in both orders, with checks that do not apply, fail, or are missing."""

import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.judges.constitution import parse_constitution
from onetrunk.judges.judge import Judge, Pair, Principle, logistic
from onetrunk.judges.labels import judge_pairs
from onetrunk.judges.rubric import RubricJudge

SHORT, MILD = Principle("Which is shorter?", tags=("short",)), Principle("Which is milder?", tags=("kind", "mild"))
TURNS = [{"role": "user", "content": "Say it."}]


def texts(completions):
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]


def short(completions, **columns):
    return [1 / (1 + len(text)) for text in texts(completions)]


def mild(completions, **columns):
    return [None if not text else float("!" not in text) for text in texts(completions)]


JUDGE = RubricJudge({"short": short, "mild": mild}, temperature=0.5)


def test_a_verdict_by_hand():
    # Lengths 1 and 3: scores 1/2 and 1/4; their difference over the temperature is .25 / .5.
    (verdict,) = JUDGE.compare([Pair("p", "a", "abc")], SHORT)
    assert verdict.probability == pytest.approx(1 / (1 + math.exp(-0.5)))
    assert verdict.details == {"scores": {"short": [0.5, 0.25]}} and verdict.error is None
    assert JUDGE.compare([Pair("p", "abc", "xyz")], SHORT)[0].probability == 0.5
    assert [r.score for r in JUDGE.rate(["p", "p"], ["a", "abc"], SHORT)] == [0.5, 0.25]
    assert isinstance(JUDGE, Judge)


def test_several_checks_of_a_principle_count_alike_and_one_that_does_not_apply_is_left_out():
    both = Principle("Which is shorter and milder?", tags=("short", "unknown", "mild"))
    # short .5 - .25, mild 0 - 1: the mean of the differences is -.375.
    (verdict,) = JUDGE.compare([Pair("p", "!", "abc")], both)
    assert verdict.probability == pytest.approx(1 / (1 + math.exp(0.375 / 0.5)))
    assert set(JUDGE.compare([Pair("p", "", "abc")], both)[0].details["scores"]) == {"short"}
    abstained = JUDGE.compare([Pair("p", "", "abc")], MILD)[0]
    assert abstained.probability is None and abstained.error is None and abstained.reason == "no check applies (mild)"
    assert JUDGE.rate(["p"], [""], MILD)[0].score is None


@pytest.mark.parametrize("prompt", ["Say it.", TURNS])
def test_checks_see_what_reward_functions_see(prompt):
    seen = {}

    def check(prompts, completions, completion_ids, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, columns=columns)
        return [0.0] * len(prompts)

    RubricJudge({"short": check}).rate([prompt], ["yes"], SHORT)
    said = "yes" if isinstance(prompt, str) else [{"role": "assistant", "content": "yes"}]
    assert seen == {"prompts": [prompt], "completions": [said], "ids": None, "columns": {}}


def test_an_async_check_is_waited_for():
    async def check(completions, **columns):
        return [0.25 for _ in completions]

    assert RubricJudge({"short": check}).rate(["p"], ["a"], SHORT)[0].score == 0.25


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=1, max_size=5))
def test_the_other_order_gives_the_complement_and_a_label_is_that_of_either_order(texts_of_pairs):
    pairs = [Pair("p", first, second) for first, second in texts_of_pairs]
    for pair, one, other in zip(
        pairs,
        JUDGE.compare(pairs, SHORT),
        JUDGE.compare([pair.flipped() for pair in pairs], SHORT),
        strict=True,
    ):
        assert one.probability == 1 - other.probability, pair
    constitution = parse_constitution({"name": "c", "principles": [{"text": SHORT.text, "tags": ["short"]}]})
    for label in judge_pairs(JUDGE, pairs, constitution):
        assert label.consistent and label.probability == label.votes[0][1][0]


@settings(deadline=None)
@given(st.floats(-1e6, 1e6))
def test_the_logistic_and_its_mirror_add_up_to_1_exactly(x):
    assert logistic(x) + logistic(-x) == 1 and 1 - logistic(-x) == logistic(x)


def raising(completions, **columns):
    return [columns["action"]]


@pytest.mark.parametrize(
    "check, error, message",
    [
        (lambda **c: [0.5], ValueError, "returned [0.5]; expected a list of 2 numbers"),
        (lambda **c: 0.5, ValueError, "returned 0.5; expected a list of 2 numbers"),
        (lambda **c: ["good", "bad"], ValueError, "returned ['good', 'bad']: could not convert"),
        (raising, RuntimeError, "failed with KeyError: 'action'; it is called with prompts, completions and"),
    ],
)
def test_a_check_that_is_no_check_is_one_error_message(check, error, message):
    with pytest.raises(error, match="the check for the tag 'short'") as caught:
        RubricJudge({"short": check}).compare([Pair("p", "a", "b")], SHORT)
    assert message in str(caught.value)


def test_a_score_that_is_no_number_is_no_verdict():
    judge = RubricJudge({"short": lambda completions, **c: [math.nan if t == "a" else math.inf for t in completions]})
    assert judge.compare([Pair("p", "a", "b")], SHORT)[0].probability is None


def test_a_rating_outside_0_to_1_is_refused_and_a_comparison_is_not():
    judge = RubricJudge({"short": lambda completions, **c: [float(len(t)) for t in completions]})
    with pytest.raises(ValueError, match="'short' scores 3; a rating must be from 0 to 1"):
        judge.rate(["p"], ["abc"], SHORT)
    assert judge.compare([Pair("p", "abc", "")], SHORT)[0].probability > 0.99


def test_what_cannot_be_a_rubric_is_refused():
    with pytest.raises(ValueError, match="the rubric has the checks \\{\\}; expected a function for each tag"):
        RubricJudge({})
    with pytest.raises(ValueError, match="{'short': 'checks.py:short'}; expected a function"):
        RubricJudge({"short": "checks.py:short"})


def test_a_principle_without_a_check_is_refused_before_anything_is_asked():
    constitution = parse_constitution({"name": "c", "principles": [{"text": "Kinder?", "tags": ["kind"]}]})
    with pytest.raises(
        ValueError, match="no check for the principle 'Kinder\\?', which has the tags kind; the rubric"
    ):
        JUDGE.require(constitution)
    with pytest.raises(ValueError, match="which has no tags; the rubric's tags are short, mild"):
        JUDGE.compare([Pair("p", "a", "b")], Principle("Kinder?"))


def test_another_check_another_setting_or_another_temperature_is_another_judge(tmp_path):
    def identity(source, temperature=0.2, **settings):
        (tmp_path / "checks.py").write_text(source)
        names = {}
        exec(compile(source, str(tmp_path / "checks.py"), "exec"), names)
        check = functools.partial(names["short"], **settings) if settings else names["short"]
        return RubricJudge({"short": check}, temperature).identity

    source = "MOST = 3\ndef short(completions, **columns):\n    return [len(c) < MOST for c in completions]\n"
    same = identity(source)
    assert identity(source) == same
    changed = [identity(source.replace("3", "4")), identity(source, 0.3), identity(source, most=4)]
    assert all(other != same for other in changed) and changed[2] != identity(source, most=5)
