"""YAML of recipes, pipelines and constitutions: no key is given twice, and an error names the file and the line."""

import pytest

from onetrunk.utils.yaml_files import read_yaml


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"a: {b: 1, c: 2}\na: 3\n", "line 2: a is already given in line 1"),
        (b"a:\n  b: 1\n  c: 2\n  b: 3\n", "line 4: b is already given in line 2"),
        (b"a: [1\n", "line 2 is not YAML"),
        (b"a: {}\nb: {c: 1, c: 2}\n", "line 2: c is already given in line 2"),
        (b"a: 1\nno: 2\n", "line 2: the key 'no' is no text for YAML (bool)"),
        (b"a: " + b"9" * 5000 + b"\n", "holds a value that cannot be read"),
        (b"[" * 5000, "holds a value that cannot be read"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_yaml_that_is_ambiguous_or_damaged_is_rejected_with_its_line(tmp_path, text, sentence):
    (tmp_path / "x.yaml").write_bytes(text)
    with pytest.raises(ValueError) as raised:
        read_yaml(tmp_path / "x.yaml")
    assert f"{tmp_path / 'x.yaml'} {sentence}" in str(raised.value)


def test_aliases_and_nested_merge_keys_are_read(tmp_path):
    (tmp_path / "x.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: *a\n")
    assert read_yaml(tmp_path / "x.yaml") == (
        {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1}},
        {"a": 1, "b": 2, "c": 3},
    )
