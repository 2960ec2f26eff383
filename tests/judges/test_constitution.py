"""Constitutions are read, checked and known by their hash; plain Python checks judge by their principles."""

import functools
import math
from pathlib import Path

import pytest
import yaml

from onetrunk.judges.constitution import RubricJudge, load_constitution, parse_constitution
from onetrunk.judges.judge import Judge, Pair, Principle, Single

GOOD = {
    "name": "test",
    "principles": [{"text": "Which is kinder?", "weight": 2, "tags": ["kind"]}, "Which is shorter?"],
}
SHIPPED = sorted((Path(__file__).parents[2] / "recipes").glob("*/constitution*.yaml"))


def test_a_file_is_read_with_weights_and_tags(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(GOOD))
    constitution = load_constitution(tmp_path / "c.yaml")
    expected = (Principle("Which is kinder?", 2.0, ("kind",)), Principle("Which is shorter?", 1.0, ()))
    assert constitution.principles == expected


def test_the_version_is_the_hash_of_what_labels_depend_on():
    version = parse_constitution(GOOD).version
    assert parse_constitution({**GOOD, "name": "other"}).version == version
    first, second = GOOD["principles"]
    for principles in ([first], [second, first], [{"text": "Which is kinder?"}, second]):
        assert parse_constitution({**GOOD, "principles": principles}).version != version


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_the_constitutions_of_the_recipes_are_read(path):
    assert len(load_constitution(path).principles) >= 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is empty; expected a mapping with name, principles"),
        ({"name": "x"}, "has no principles; list at least one"),
        ({"principles": ["y"]}, "has name None; give it one"),
        ({"name": "x", "principals": ["y"]}, "unknown key 'principals'; the keys are name, principles"),
        ({"name": "x", "principles": ["y", {"text": "z", "wieght": 1}]}, "principle 2: unknown key 'wieght'"),
        ({"name": "x", "principles": [{"text": " "}]}, "principle 1 has text ' '"),
        ({"name": "x", "principles": [{"text": "y", "weight": 0}]}, "has weight 0; expected a number above 0"),
        ({"name": "x", "principles": [{"text": "y", "tags": "kind"}]}, "has tags 'kind'; expected a list of names"),
        ({"name": "x", "principles": ["y", "Y"]}, "principles 1 and 2 have the same text"),
    ],
)
def test_what_is_no_constitution_is_one_error_message(content, message):
    with pytest.raises(ValueError) as caught:
        parse_constitution(content)
    assert message in str(caught.value) and str(caught.value).startswith("the constitution")


def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path):
    with pytest.raises(ValueError, match="constitution is not set; a judge needs one"):
        load_constitution(None)
    with pytest.raises(ValueError, match="absent.yaml does not exist"):
        load_constitution(tmp_path / "absent.yaml")
    (tmp_path / "c.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="c.yaml line 1 is not YAML"):
        load_constitution(tmp_path / "c.yaml")


SHORT, MILD = Principle("Which is shorter?", tags=("short",)), Principle("Which is milder?", tags=("kind", "mild"))


def short(completions, **columns):
    return [1 / (1 + len(text)) for text in completions]


def mild(completions, **columns):
    return [None if not text else float("!" not in text) for text in completions]


JUDGE = RubricJudge({"short": short, "mild": mild})


def test_a_verdict_by_hand():
    # Lengths 1 and 3: scores 1/2 and 1/4; their difference over the temperature is .25 / .2.
    (verdict,) = JUDGE.compare([Pair("p", "a", "abc")], SHORT)
    assert verdict.probability == pytest.approx(1 / (1 + math.exp(-0.25 / 0.2)))
    assert verdict.details == {"scores": {"short": [0.5, 0.25]}} and verdict.error is None
    assert JUDGE.compare([Pair("p", "abc", "xyz")], SHORT)[0].probability == 0.5
    assert [r.score for r in JUDGE.rate([Single("p", "a"), Single("p", "abc")], SHORT)] == [0.5, 0.25]
    assert isinstance(JUDGE, Judge)


def test_several_checks_of_a_principle_count_alike_and_one_that_does_not_apply_is_left_out():
    both = Principle("Which is shorter and milder?", tags=("short", "unknown", "mild"))
    # short .5 - .25, mild 0 - 1: the mean of the differences is -.375.
    (verdict,) = JUDGE.compare([Pair("p", "!", "abc")], both)
    assert verdict.probability == pytest.approx(1 / (1 + math.exp(0.375 / 0.2)))
    assert set(JUDGE.compare([Pair("p", "", "abc")], both)[0].details["scores"]) == {"short"}
    abstained = JUDGE.compare([Pair("p", "", "abc")], MILD)[0]
    assert abstained.probability is None and abstained.error is None and abstained.reason == "no check applies (mild)"
    assert JUDGE.rate([Single("p", "")], MILD)[0].score is None


def raising(completions, **columns):
    return [columns["action"]]


@pytest.mark.parametrize(
    "check, error, message",
    [
        (lambda **c: [0.5], ValueError, "returned 1 scores, expected 2"),
        (raising, RuntimeError, "failed with KeyError: 'action'; it is called with prompts, completions and"),
    ],
)
def test_a_check_that_is_no_check_is_one_error_message(check, error, message):
    with pytest.raises(error, match="the check for the tag 'short'") as caught:
        RubricJudge({"short": check}).compare([Pair("p", "a", "b")], SHORT)
    assert message in str(caught.value)


def test_a_rating_outside_0_to_1_is_refused_and_a_comparison_is_not():
    judge = RubricJudge({"short": lambda completions, **c: [float(len(t)) for t in completions]})
    with pytest.raises(ValueError, match="'short' scores 3; a rating must be from 0 to 1"):
        judge.rate([Single("p", "abc")], SHORT)
    assert judge.compare([Pair("p", "abc", "")], SHORT)[0].probability > 0.99


def test_a_principle_without_a_check_is_refused_before_anything_is_asked():
    constitution = parse_constitution({"name": "c", "principles": [{"text": "Kinder?", "tags": ["kind"]}]})
    message = r"no check for the principle 'Kinder\?', which has the tags kind; the rubric"
    with pytest.raises(ValueError, match=message):
        JUDGE.require(constitution)
    with pytest.raises(ValueError, match="which has no tags; the rubric's tags are short, mild"):
        JUDGE.compare([Pair("p", "a", "b")], Principle("Kinder?"))


def test_another_check_or_another_setting_is_another_judge(tmp_path):
    def identity(source, **settings):
        (tmp_path / "checks.py").write_text(source)
        names = {}
        exec(compile(source, str(tmp_path / "checks.py"), "exec"), names)
        check = functools.partial(names["short"], **settings) if settings else names["short"]
        return RubricJudge({"short": check}).identity

    source = "MOST = 3\ndef short(completions, **columns):\n    return [len(c) < MOST for c in completions]\n"
    same = identity(source)
    assert identity(source) == same
    changed = [identity(source.replace("3", "4")), identity(source, most=4)]
    assert all(other != same for other in changed) and changed[1] != identity(source, most=5)
