"""YAML of recipes, pipelines and constitutions: strict about keys, and bounded however many aliases it holds."""

import pytest

from onetrunk.judges.constitution import load_constitution
from onetrunk.stages.options.parser import UsageError
from onetrunk.stages.run.pipeline import load_pipeline
from onetrunk.stages.sft import parse_sft
from onetrunk.utils.yaml_files import MOST_BYTES, read_yaml

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
MERGED_LAUGHS = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12)
)


def fault(tmp_path, text):
    (tmp_path / "x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as raised:
        read_yaml(tmp_path / "x.yaml")
    assert str(tmp_path / "x.yaml") in str(raised.value) and "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LAUGHS, "line 5 holds more than 100000 values once its aliases (*name) are followed"),
        (MERGED_LAUGHS, "values once its aliases"),
        ("a: &a [1, *a]\n", "line 1: a value holds an alias of itself"),
        ("a: &a\n  b: {c: *a}\n", "a value holds an alias of itself"),
        ("[" * 5000, "is nested too deeply"),
        ("a: {b: 1, c: 2, b: 3}\n", "line 1: b is already given in line 1"),
        ("a: {null: 1}\n", "line 1: a key is null"),
        ("a: " + "9" * 5000 + "\n", "holds a value that cannot be read"),
        (b"a: 1 #" + b"x" * MOST_BYTES, "bytes, expected 1048576 at most"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_yaml_that_is_hostile_or_ambiguous_is_refused_with_its_line(tmp_path, text, sentence):
    assert sentence in fault(tmp_path, text)


def test_aliases_and_nested_merge_keys_are_read(tmp_path):
    (tmp_path / "x.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: *a\n")
    assert read_yaml(tmp_path / "x.yaml") == (
        {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1}},
        {"a": 1, "b": 2, "c": 3},
    )


def test_every_kind_of_file_is_read_in_this_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(LAUGHS)
    for load in (lambda: parse_sft(["--config", "x.yaml"]), lambda: load_pipeline("x.yaml")):
        with pytest.raises(UsageError, match="aliases"):
            load()
    with pytest.raises(ValueError, match="the constitution x.yaml line 5 holds more than"):
        load_constitution("x.yaml")
