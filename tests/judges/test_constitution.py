"""Constitutions are read, checked and known by their hash."""

from pathlib import Path

import pytest
import yaml

from onetrunk.judges.constitution import load_constitution, parse_constitution

GOOD = {
    "name": "test",
    "principles": [{"text": "Which is kinder?", "weight": 2, "tags": ["kind"]}, "Which is shorter?"],
}
SHIPPED = sorted((Path(__file__).parents[2] / "recipes").glob("*/constitution*.yaml"))


def test_a_file_is_read_with_weights_and_tags(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(GOOD))
    constitution = load_constitution(tmp_path / "c.yaml")
    assert [(p.text, p.weight, p.tags) for p in constitution.principles] == [
        ("Which is kinder?", 2.0, ("kind",)),
        ("Which is shorter?", 1.0, ()),
    ]


def test_the_version_is_the_hash_of_what_labels_depend_on():
    version = parse_constitution(GOOD).version
    assert parse_constitution({**GOOD, "name": "other"}).version == version
    for principles in (
        GOOD["principles"][:1],
        GOOD["principles"][::-1],
        [{"text": "Which is kinder?"}, "Which is shorter?"],
    ):
        assert parse_constitution({**GOOD, "principles": principles}).version != version


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_the_constitutions_of_the_recipes_are_read(path):
    assert len(load_constitution(path).principles) >= 3


def test_at_least_two_constitutions_ship_with_the_recipes():
    assert len(SHIPPED) >= 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is empty; expected a mapping with name, principles"),
        ("text", "is 'text'; expected a mapping"),
        ({"name": "x"}, "has no principles; list at least one"),
        ({"name": "x", "principles": []}, "has no principles; list at least one"),
        ({"name": "x", "principles": {"text": "y"}}, "has no principles"),
        ({"principles": ["y"]}, "has name None; give it one"),
        ({"name": "x", "principals": ["y"]}, "unknown key 'principals'; the keys are name, principles"),
        ({"name": "x", "principles": ["y", {"text": "z", "wieght": 1}]}, "principle 2: unknown key 'wieght'"),
        ({"name": "x", "principles": [{"text": " "}]}, "principle 1 has text ' '"),
        ({"name": "x", "principles": [3]}, "principle 1 is 3; expected a mapping"),
        ({"name": "x", "principles": [{"text": "y", "weight": 0}]}, "has weight 0; expected a number above 0"),
        ({"name": "x", "principles": [{"text": "y", "weight": float("nan")}]}, "has weight nan"),
        ({"name": "x", "principles": [{"text": "y", "weight": True}]}, "has weight True"),
        ({"name": "x", "principles": [{"text": "y", "tags": "kind"}]}, "has tags 'kind'; expected a list of names"),
        ({"name": "x", "principles": ["y" * 3000]}, "has 3000 characters"),
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
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not"):
        load_constitution(tmp_path / "b.yaml")
