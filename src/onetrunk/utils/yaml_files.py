"""A strict YAML reader with limits, for recipes, pipelines and constitutions.

PyYAML silently keeps the last of two equal keys, and a few lines of aliases can expand to billions of values.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 2**20
# With aliases expanded; a large recipe has some hundreds of values.
MOST_VALUES = 100_000
NULL_TAG, TEXT_TAG = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"


def read_yaml(path: Path, place: str | None = None) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML file and the line number of each top-level key.

    Args:
        path: an existing file.
        place: the name of the file in error messages; None for its path.

    Raises:
        ValueError: the file is not YAML or not UTF-8; a key is null or given twice; it is too large, with aliases
            expanded; a top-level key is a merge key or not text. The message names the file and the line.
    """
    place = str(path) if place is None else place
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{place} has {path.stat().st_size} bytes, expected {MOST_BYTES} at most; check the file")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 text ({error.reason}); give a YAML file") from error
    except OSError as error:
        raise ValueError(f"{place} cannot be read ({error.strerror}); give an existing YAML file") from error
    try:
        node = _composed(text, place)
        lines = _top_level(node, place) if isinstance(node, yaml.MappingNode) else {}
        try:
            return (None if node is None else yaml.SafeLoader("").construct_document(node)), lines
        # A number of thousands of digits, or a date that does not exist.
        except (ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{place} holds a value that cannot be read: {error}; put it in quotes") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ValueError(f"{place}{where} is not YAML: {problem or error}") from error


def check_aliases(text: str, place: str) -> None:
    """Raise ValueError, before another library reads YAML, if its aliases expand to too many values.

    A syntax error is left to the other library.
    """
    with contextlib.suppress(yaml.YAMLError):
        _composed(text, place)


def _composed(text: str, place: str) -> yaml.Node | None:
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is not None:
            _expanded_size(node, {}, place)
        return node
    except RecursionError as error:
        raise ValueError(f"{place} is nested too deeply; write it flatter") from error


def _expanded_size(node: yaml.Node, sizes: dict[yaml.Node, int | None], place: str) -> int:
    """Return the number of values in a node. Rejects too many values, repeated keys and keys that are null."""
    if node in sizes:
        size = sizes[node]
        if size is None:
            raise ValueError(f"{place} line {_line(node)}: a value holds an alias of itself; write it without")
        return size
    sizes[node] = None
    size, first_lines = 1, {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag == NULL_TAG:
                raise ValueError(f"{place} line {_line(key)}: a key is null; write a name, in quotes if it is null")
            if isinstance(key, yaml.ScalarNode):
                first = first_lines.setdefault(key.value, key)
                if first is not key:
                    raise ValueError(
                        f"{place} line {_line(key)}: {key.value} is already given in line {_line(first)}; keep one of"
                        " the two"
                    )
            size += _expanded_size(key, sizes, place) + _expanded_size(value, sizes, place)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_expanded_size(value, sizes, place) for value in node.value)
    if size > MOST_VALUES:
        raise ValueError(
            f"{place} line {_line(node)} holds more than {MOST_VALUES} values once its aliases (*name) are followed;"
            " write out what you need"
        )
    sizes[node] = size
    return size


def _top_level(node: yaml.MappingNode, place: str) -> dict[str, int]:
    for key, _ in node.value:
        if key.value == "<<":
            raise ValueError(f"{place} line {_line(key)}: a merge key (<<) is not supported here; write the keys out")
        if key.tag != TEXT_TAG:
            raise ValueError(
                f"{place} line {_line(key)}: the key {key.value!r:.100} is no text for YAML"
                f" ({key.tag.rpartition(':')[2]}); write a name, in quotes where YAML reads it otherwise"
            )
    return {key.value: _line(key) for key, _ in node.value}


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1
