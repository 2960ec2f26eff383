"""A strict YAML reader for recipes, pipelines and constitutions: PyYAML silently keeps the last of two equal keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

TEXT_TAG = "tag:yaml.org,2002:str"


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that rejects a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            if str(key.value) in first_lines:
                problem = f"{key.value} is already given in line {first_lines[key.value]}; keep one of the two"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            first_lines[str(key.value)] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, place: str | None = None) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML file and the line number of each top-level key.

    Args:
        path: an existing file.
        place: the name of the file in error messages; None for its path.

    Raises:
        ValueError: the file is not YAML or not UTF-8; a key is given twice; a top-level key is not text. The message
            names the file and the line.
    """
    place = str(path) if place is None else place
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, yaml.SafeLoader)
        content = yaml.load(text, _StrictLoader)  # noqa: S506  a SafeLoader
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 text ({error.reason}); give a YAML file") from error
    except OSError as error:
        raise ValueError(f"{place} cannot be read ({error.strerror}); give an existing YAML file") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f" line {mark.line + 1}" if mark else ""
        fault = "" if isinstance(error, yaml.constructor.ConstructorError) else " is not YAML"
        raise ValueError(f"{place}{where}{fault}: {problem or error}") from error
    # A number of thousands of digits, a date that does not exist, or lists inside lists without end.
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{place} holds a value that cannot be read: {error}; put it in quotes") from error
    lines = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        lines[key.value] = key.start_mark.line + 1
        if key.tag != TEXT_TAG:
            raise ValueError(
                f"{place} line {lines[key.value]}: the key {key.value!r:.100} is no text for YAML"
                f" ({key.tag.rpartition(':')[2]}); write a name, in quotes where YAML reads it otherwise"
            )
    return content, lines
