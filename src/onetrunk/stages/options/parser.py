"""A parser of option words, the readers of their values, and messages about mistakes in them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from onetrunk.stages.options.table import Option
from onetrunk.utils.escaping import printable
from onetrunk.utils.files import parse_json
from onetrunk.utils.redaction import add_stored_token, redact

MAPPING_EXAMPLES = {
    "dataset_columns": '{"prompt": "question"}',
    "student_config": '{"model_type": "llama", "hidden_size": 64}',
    "rubric": '{"concise": "checks.py:concise"}',
    "judge_prices": '{"judge-model": [0.4, 1.6]}',
    "alarm_limits": '{"kl": 50, "entropy": null}',
    "monitor_rubric": '{"concise": "checks.py:concise"}',
}
TRUE_OR_FALSE = ("true", "false")
TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


class UsageError(ValueError):
    """A mistake on the command line or in the YAML file."""


def shown(text: str) -> str:
    """Return a text without secrets and control characters."""
    return printable(redact(text))


def say(*lines: str, after_bar: bool = False) -> None:
    """Print lines to stderr, without secrets and control characters.

    `after_bar` first ends a line that may hold a progress bar.
    """
    add_stored_token()
    print(shown("\n".join(["", *lines] if after_bar else lines)), file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError where argparse would print all options and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


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
    if option.is_mapping:
        return mapping_reader(option.name)
    kinds = {option.entries} if "list" in option.kinds else option.kinds
    reader = next((read for read in (int, float) if read.__name__ in kinds and "str" not in kinds), str)
    reader = float if {"int", "float"} <= kinds else reader
    if kinds - {"NoneType"} == {"bool"}:
        return read_bool
    if reader is str or "NoneType" not in kinds:
        return reader

    def read(text: str) -> Any:
        return None if text.lower() in ("none", "null") else reader(text)

    read.__name__ = reader.__name__  # argparse names it in its messages.
    return read


def make_parser(options: Iterable[Option]) -> Parser:
    """Return a parser for the words of these options."""
    parser = Parser(add_help=False, allow_abbrev=False)
    for option in options:
        extra: dict[str, Any] = {}
        if "list" in option.kinds:
            extra["nargs"] = "+"
        elif "bool" in option.kinds:
            extra = {"nargs": "?", "const": True}
        flags = dict.fromkeys((f"--{option.name}", f"--{option.name.replace('_', '-')}"))
        parser.add_argument(
            *flags, dest=option.name, type=_reader(option), default=option.default, choices=option.choices, **extra
        )
        if option.default is True and "bool" in option.kinds:
            flags = dict.fromkeys((f"--no_{option.name}", f"--no-{option.name.replace('_', '-')}"))
            parser.add_argument(*flags, dest=option.name, action="store_false", default=True)
    return parser
