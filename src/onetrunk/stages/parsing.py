"""Parse the YAML file and the command line into dataclasses; a user's mistake becomes one message and exit code 2.

    onetrunk ppo --config recipes/tiny/ppo.yaml --learning_rate 1e-3

The YAML file sets values, and the command line overrides them. Relative paths in both start at the working folder, not
at the YAML file. TrlParser parses the options; this module reads the file and adds the checks around both.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from trl import TrlParser

from onetrunk.ppo.foreign_keys import explain_key
from onetrunk.stages.secrets import secret_in_setting, secret_in_words
from onetrunk.utils.files import require_name
from onetrunk.utils.shipped import find_config, missing_config_hint, with_shipped_files
from onetrunk.utils.yaml_files import read_yaml

AUTO = "auto"
RESUME = "resume_from_checkpoint"
# Text fields that are also read as booleans: resume_from_checkpoint true resumes from the last checkpoint.
TEXT_OR_BOOLEAN = (RESUME, "stop_on_alarm")
# Fields that become part of a path, here or in a tracker.
NAMES = ("run_name",)
MAPPING_EXAMPLES = {
    "dataset_columns": '{"prompt": "question"}',
    "student_config": '{"model_type": "llama", "hidden_size": 64}',
    "rubric": '{"concise": "checks.py:concise"}',
    "monitor_rubric": '{"concise": "checks.py:concise"}',
}


class UsageError(ValueError):
    """A mistake on the command line or in the YAML file."""


def parse(
    argv: Sequence[str],
    dataclass_types: Sequence[type],
    verb: str,
    description: str,
    *,
    knows_ppo: bool = False,
    check: Callable[..., None] | None = None,
) -> tuple[Any, ...]:
    """Return one instance of each dataclass, from the YAML file after --config and the options in `argv`.

    Args:
        argv: the words after the verb.
        dataclass_types: their fields are the options.
        verb, description: name of the stage and a sentence about it, for the help text.
        knows_ppo: True explains options of TRL's GRPO and PPO trainers.
        check: raises ValueError if the instances, its arguments, do not fit together.

    Raises:
        UsageError: names the file and line, or the option, and what to write instead; also for a secret in either.
        SystemExit: after --help.
    """
    reason = secret_in_words(argv)
    if reason:
        raise UsageError(reason)
    known = [f.name for dataclass_type in dataclass_types for f in fields(dataclass_type) if f.init]
    explain = partial(explain_key if knows_ppo else _nearest_key, known=known)
    path, words = _taken(argv, "--config", "a YAML file after it")
    resume, words = _taken(words, "--resume", "a value: auto, true, or a checkpoint folder")
    if resume is not None and RESUME in known:
        words += [f"--{RESUME}", resume]
    elif resume not in (None, AUTO):
        raise UsageError(
            f"--resume {resume}: this stage has no checkpoints and resumes by itself; leave the option out, or write"
            " --resume auto"
        )
    config = {} if path is None else _read_config(path, dataclass_types, known, explain)
    parser = StageParser(
        dataclass_types,
        prog=f"onetrunk {verb}",
        description=f"{description} Options in a YAML file: --config FILE.",
        allow_abbrev=False,
    )
    unknown = parser.parse_known_args(words)[1]
    if unknown:
        keys = [word[2:].split("=")[0].replace("-", "_") for word in unknown if word.startswith("--")]
        no_option = f"{unknown[0]!r} is not an option; options are written --name value"
        raise UsageError("; ".join(map(explain, keys)) or no_option)
    try:
        parser.set_defaults_with_config(**config)
        parsed = parser.parse_args_into_dataclasses(words)
        for arguments in parsed:
            _check_arguments(arguments)
        if check is not None:
            check(*parsed)
        return parsed
    except UsageError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(str(error)) from error


class StageParser(TrlParser):
    """TrlParser that reads mappings as JSON, and raises UsageError where argparse would print all options and exit."""

    def __init__(self, dataclass_types: Sequence[type], **kwargs: Any):
        super().__init__(dataclass_types, **kwargs)
        mappings = {name for name, hint in _hints(dataclass_types).items() if _is_mapping(name, hint)}
        for action in self._actions:
            if action.dest in mappings:
                action.type = _mapping_reader(action.dest)

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message)


def read_mapping(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping in a YAML file, and the line of each of its top-level keys.

    Raises:
        UsageError: the file is not a readable YAML mapping.
    """
    try:
        value, lines = read_yaml(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not isinstance(value, dict):
        content = "is empty" if value is None else f"holds a {type(value).__name__}"
        raise UsageError(f"{path} {content}; expected lines of the form 'key: value'")
    return value, lines


def _hints(dataclass_types: Sequence[type]) -> dict[str, Any]:
    return {name: hint for t in dataclass_types for name, hint in typing.get_type_hints(t).items()}


def _is_mapping(name: str, hint: Any) -> bool:
    """Return whether a field can only be a mapping. A text in fsdp_config or deepspeed may be a path."""
    allowed = _plain_types(hint)
    return dict in allowed and (str not in allowed or name.endswith("_kwargs"))


def _mapping_reader(name: str) -> Callable[[str], dict[str, Any]]:

    def read(text: str) -> dict[str, Any]:
        value, reason = None, ""
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            reason = f" ({error})"
        if not isinstance(value, dict):
            example = MAPPING_EXAMPLES.get(name, '{"enable_thinking": false}')
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a mapping{reason}; expected a mapping as JSON, such as '{example}'"
            )
        return value

    return read


def _check_arguments(arguments: Any) -> None:
    """Reject secrets in mappings, and names that could lead a path out of its folder."""
    for name, value in vars(arguments).items():
        reason = secret_in_setting(name, value) if isinstance(value, dict) else None
        if reason:
            raise UsageError(f"{name} {reason}")
        if name in NAMES and value is not None:
            require_name(value, name)


def _taken(words: Sequence[str], option: str, what: str) -> tuple[str | None, list[str]]:
    """Return the value of an option (None if it is not given), and the other words."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith(f"{option}=") else [word])]
    if option not in words:
        return None, words
    if words.count(option) > 1:
        raise UsageError(f"{option} is given twice; keep one")
    index = words.index(option)
    if index + 1 == len(words) or words[index + 1].startswith("--"):
        raise UsageError(f"{option} needs {what}")
    return words[index + 1], words[:index] + words[index + 2 :]


def _read_config(
    name: str, dataclass_types: Sequence[type], known: list[str], explain: Callable[[str], str]
) -> dict[str, Any]:
    """Return the settings in a YAML file, each of them checked, and set the variables of its env block."""
    path = find_config(name)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        hint = missing_config_hint(name)
        raise UsageError(
            f"the config file {path} {what} (working folder {Path.cwd()}); {hint}give an existing YAML file"
        )
    config, lines = read_mapping(path)
    config = with_shipped_files(config)
    hints = _hints(dataclass_types)
    choices = {f.name: f.metadata["choices"] for t in dataclass_types for f in fields(t) if "choices" in f.metadata}
    for key, value in config.items():
        place = f"{path} line {lines[key]}"
        reason = secret_in_setting(key, value)
        if reason:
            raise UsageError(f"{place}: {key} {reason}")
        if key == "env":
            if not isinstance(value, dict):
                raise UsageError(f"{place}: env must map names to values, such as 'env: {{HF_HUB_OFFLINE: 1}}'")
            os.environ.update({str(name): str(setting) for name, setting in value.items()})
        elif key not in known:
            raise UsageError(f"{place}: {explain(key)}")
        else:
            fault = _value_fault(key, value, hints[key])
            # argparse checks the choices of options, not of defaults, which the values of a file become.
            if fault is None and value is not None and value not in choices.get(key, [value]):
                fault = f"is {value!r}; expected one of {', '.join(choices[key])}"
            if fault:
                raise UsageError(f"{place}: {key} {fault}")
    config.pop("env", None)
    return config


def _value_fault(key: str, value: Any, hint: Any) -> str | None:
    """Return what is wrong with a YAML value for a field of this type; None for nothing, or what argparse checks."""
    allowed = _plain_types(hint)
    if isinstance(value, str) or typing.Any in allowed:
        return None
    if value is None:
        return None if type(None) in allowed else "is empty; give a value or remove the line"
    if isinstance(value, bool):
        fits = bool in allowed or key in TEXT_OR_BOOLEAN
        if not fits and str in allowed:
            return f"is read as {value} by YAML; write the word in quotes"
    elif isinstance(value, int):
        fits = bool({int, float} & allowed)
    else:
        fits = type(value) in allowed
    names = sorted(t.__name__ for t in allowed if t is not type(None))
    return None if fits else f"is {value!r} ({type(value).__name__}); expected {' or '.join(names)}"


def _plain_types(hint: Any) -> set[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*(_plain_types(part) for part in typing.get_args(hint)))
    plain = typing.get_origin(hint) or hint
    return {plain} if plain in (bool, int, float, list, dict, type(None), typing.Any) else {str}


def _nearest_key(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else "")
