"""The options of every verb, from `options.json`, which `collect.py` makes of the settings classes.

The classes inherit from TRL's and transformers' settings, whose import takes seconds. The file names the versions that
it was made with; with others the options may differ, and only the complete parser (`stages/parsing.py`) knows them.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from onetrunk.utils.files import parse_json

FILE = Path(__file__).with_name("options.json")
# The packages that the settings classes inherit from.
LIBRARIES = ("transformers", "trl")
MAPPING_EXAMPLES = {
    "dataset_columns": '{"prompt": "question"}',
    "student_config": '{"model_type": "llama", "hidden_size": 64}',
    "rubric": '{"concise": "checks.py:concise"}',
    "judge_prices": '{"judge-model": [0.4, 1.6]}',
    "monitor_rubric": '{"concise": "checks.py:concise"}',
}
TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


class UsageError(ValueError):
    """A mistake on the command line or in the YAML file."""


@dataclass(frozen=True)
class Option:
    """One option, which is one field of a settings class and one key of the YAML file.

    Args:
        name: of the field.
        flags: as they are written on the command line.
        type: of a value on the command line: int, float, bool, mapping, or text.
        nargs, const: as in argparse.
        default: a JSON value.
        choices: the words that are allowed; None: any value.
        help: text for people.
        kinds: names of the types that a value in a YAML file may have.
        group: one of GROUPS.
        is_negated: whether --no_NAME sets it to false.
        rejected: why no value but the default is accepted, or None. Such options are not shown.
    """

    name: str
    flags: tuple[str, ...]
    type: str
    nargs: str | None
    const: Any
    default: Any
    choices: tuple[str, ...] | None
    help: str
    kinds: tuple[str, ...]
    group: str
    is_negated: bool = False
    rejected: str | None = None

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Option:
        return cls(
            **{key: tuple(value) if key in _TUPLES and value is not None else value for key, value in record.items()}
        )


_TUPLES = ("flags", "choices", "kinds")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError where argparse would print all options and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


@functools.cache
def _content() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def verbs() -> list[str]:
    """Return the verbs whose options are in the file."""
    return list(_content()["verbs"])


def load_options(verb: str) -> list[Option]:
    """Return the options of a verb."""
    content = _content()
    return [Option.from_json(content["options"][number]) for number in content["verbs"][verb]]


def is_current() -> bool:
    """Return whether the installed libraries are those that the file was made with."""
    return installed_versions() == _content()["versions"]


def installed_versions() -> dict[str, str]:
    """Return the versions of the libraries that the options depend on, without importing them."""
    return {name: metadata.version(name) for name in LIBRARIES}


def read_bool(text: str | bool) -> bool:
    """Return a boolean that is written as a word."""
    if isinstance(text, bool):
        return text
    if text.lower() in (*TRUE, *FALSE):
        return text.lower() in TRUE
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false; write one of them")


def mapping_reader(name: str) -> Callable[[str], dict[str, Any]]:
    """Return a function that reads the mapping `name`, written as JSON."""

    def read(text: str) -> dict[str, Any]:
        value, reason = None, ""
        try:
            value = parse_json(text)
        except ValueError as error:
            reason = f" ({error})"
        if not isinstance(value, dict):
            example = MAPPING_EXAMPLES.get(name, '{"enable_thinking": false}')
            raise argparse.ArgumentTypeError(
                f"{text!r:.200} is not a mapping{reason}; expected a mapping as JSON, such as '{example}'"
            )
        return value

    return read


def _reader(option: Option) -> Callable[[str], Any]:
    if option.type == "mapping":
        return mapping_reader(option.name)
    readers: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": read_bool, "text": str}
    reader = readers[option.type]
    if option.type not in ("int", "float") or "NoneType" not in option.kinds:
        return reader

    def read(text: str) -> Any:
        return None if text.lower() in ("none", "null") else reader(text)

    read.__name__ = reader.__name__  # argparse names it in its messages.
    return read


def make_parser(options: Sequence[Option]) -> Parser:
    """Return a parser that reads words as TrlParser does for the classes that the options come from."""
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=None)
    for option in options:
        extra = {"nargs": option.nargs} if option.nargs else {}
        if option.nargs == "?":
            extra["const"] = option.const
        parser.add_argument(
            *option.flags,
            dest=option.name,
            type=_reader(option),
            default=option.default,
            choices=option.choices,
            **extra,
        )
        if option.is_negated:
            flags = (f"--no_{option.name}", f"--no-{option.name.replace('_', '-')}")
            parser.add_argument(*dict.fromkeys(flags), dest=option.name, action="store_false", default=option.default)
    return parser
