"""YAML files become plain values: one reader for recipes, pipelines and constitutions, bounded and strict.

PyYAML keeps the last of two equal keys without a word, and a few lines of aliases can stand for billions of values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 2**20
# Values after aliases are followed; a large recipe has some hundreds.
MOST_VALUES = 100_000
NULL_TAG, TEXT_TAG = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"


def read_yaml(path: Path, place: str | None = None) -> tuple[Any, dict[str, int]]:
    """Return what a YAML file holds, and the line of each of its top-level keys.

    Args:
        path: an existing file.
        place: how errors name it; None: by its path.

    Raises:
        ValueError: no YAML or no UTF-8; a key that is null or given twice; too large, with its aliases followed; at
            the top level, a merge key or one that YAML does not read as text. The message names the file and the line.
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
        node = yaml.compose(text, yaml.SafeLoader)
        if node is not None:
            _expanded_size(node, {}, place)
        lines = _top_level(node, place) if isinstance(node, yaml.MappingNode) else {}
        return _constructed(text, place), lines
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ValueError(f"{place}{where} is not YAML: {problem or error}") from error
    except RecursionError as error:
        raise ValueError(f"{place} is nested too deeply; write it flatter") from error


def check_aliases(text: str, place: str) -> None:
    """Refuse YAML whose aliases stand for too many values, before another library reads it; other faults are its own.

    Raises:
        ValueError: names the place.
    """
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is not None:
            _expanded_size(node, {}, place)
    except yaml.YAMLError:
        return
    except RecursionError as error:
        raise ValueError(f"{place} is nested too deeply; write it flatter") from error


def _constructed(text: str, place: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (ValueError, OverflowError) as error:  # A number of thousands of digits, or a day that there is not.
        raise ValueError(f"{place} holds a value that cannot be read: {error}; put it in quotes") from error


def _expanded_size(node: yaml.Node, sizes: dict[yaml.Node, int | None], place: str) -> int:
    """Return how many values a node stands for. Refuses too many, keys given twice and keys that are null."""
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
            if isinstance(key, yaml.ScalarNode) and key.value in first_lines:
                raise ValueError(
                    f"{place} line {_line(key)}: {key.value} stands there again after line {first_lines[key.value]};"
                    " keep one"
                )
            if isinstance(key, yaml.ScalarNode):
                first_lines[key.value] = _line(key)
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
