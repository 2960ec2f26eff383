"""Read a YAML file and the words of a command line: secrets, unknown keys and wrong types become one message.

The command line calls this before it imports torch; `stages/arguments.py` then makes the dataclasses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onetrunk.ppo.foreign_names import RENAMED, explain_key
from onetrunk.stages.options.parser import UsageError, make_parser
from onetrunk.stages.options.table import Option, load_options
from onetrunk.stages.options.verbs import SETTINGS_MODULES
from onetrunk.utils.files import require_name
from onetrunk.utils.redaction import SECRET_KEYWORDS, is_secret_name
from onetrunk.utils.shipped import find_config, missing_config_hint, with_shipped_files
from onetrunk.utils.yaml_files import read_yaml

AUTO = "auto"
RESUME = "resume_from_checkpoint"
HELP_WORDS = ("-h", "--help")
# Of ppo; not an option, because a YAML file cannot have it.
DRY_RUN = ("--dry_run", "--dry-run")
# Text fields that are also read as booleans: resume_from_checkpoint true resumes from the last checkpoint.
TEXT_OR_BOOLEAN = (RESUME,)
# Verbs whose first word may be the value of an option -> that option.
FIRST_WORDS = {"serve": "model", "merge": "adapter"}
# Fields that become part of a path, here or in a tracker.
NAMES = ("run_name",)


@dataclass(frozen=True)
class Reading:
    """What a user wrote: the values of the YAML file, and the words of the command line without --config."""

    values: dict[str, Any]
    words: list[str]


def read(verb: str, argv: Sequence[str]) -> Reading:
    """Return what a user wrote, with old names replaced; set the variables of the file's env block.

    Args:
        verb: one of SETTINGS_MODULES.
        argv: the words after it.

    Raises:
        UsageError: names the file and line, or the option, and what to write instead. All unknown keys are named.
    """
    reason = secret_in_words(argv)
    if reason:
        raise UsageError(reason)
    options = load_options(verb)
    path, words = _taken(_with_first_word(verb, argv), "--config", "a YAML file after it")
    resume, words = _taken(words, "--resume", "a value: auto, true, or a checkpoint folder")
    words = _renamed_words(words)
    if resume is not None and RESUME in options:
        words += [f"--{RESUME}", resume]
    elif resume not in (None, AUTO):
        raise UsageError(
            f"--resume {resume}: this stage has no checkpoints and resumes by itself; leave the option out, or write"
            " --resume auto"
        )
    explain = partial(_explained, verb=verb)
    values, faults = ({}, []) if path is None else _read_file(path, options, explain)
    faults += _unknown_words(words, options, explain)
    if faults:
        raise UsageError("; ".join(faults))
    return Reading(values, words)


def parsed_values(verb: str, reading: Reading) -> dict[str, Any]:
    """Return the value of every option, without the dataclasses; raises UsageError for a word that cannot be one."""
    parser = make_parser(load_options(verb).values())
    parser.set_defaults(**reading.values)
    values = vars(parser.parse_args(reading.words))
    check_values(values)
    return values


def check_values(values: dict[str, Any]) -> None:
    """Reject secrets in mappings, and names that could lead a path out of its folder."""
    for name, value in values.items():
        reason = secret_in_setting(name, value) if isinstance(value, dict) else None
        if reason:
            raise UsageError(f"{name} {reason}")
        if name in NAMES and value is not None:
            try:
                require_name(value, name)
            except ValueError as error:
                raise UsageError(str(error)) from error


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


def _explained(key: str, verb: str) -> str:
    known = [name for name in load_options(verb) if name not in RENAMED]
    return explain_key(key, known, [other for other in SETTINGS_MODULES if key in load_options(other)])


def _with_first_word(verb: str, argv: Sequence[str]) -> list[str]:
    """Return the words after a verb with the first one as an option, where it may stand alone (`FIRST_WORDS`)."""
    words, name = list(argv), FIRST_WORDS.get(verb)
    if name and words and not words[0].startswith("-"):
        if f"--{name}" in words:
            raise UsageError(f"the {name} is named twice, {words[0]!r} and by --{name}; write it once")
        words = [f"--{name}", *words]
    return words


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


def _renamed_words(words: Sequence[str]) -> list[str]:
    renamed = []
    for word in words:
        name, equals, value = word.partition("=")
        new = RENAMED.get(name.removeprefix("--").replace("-", "_")) if name.startswith("--") else None
        renamed.append(f"--{new}{equals}{value}" if new else word)
    return renamed


def _unknown_words(words: Sequence[str], options: Mapping[str, Option], explain: Callable[[str], str]) -> list[str]:
    unknown = make_parser(options.values()).parse_known_args(list(words))[1]
    # `-lr 3` and `lr=3` are written too; a negative number is a value.
    written = [word for word in unknown if re.match(r"--|-[A-Za-z]|[A-Za-z_]+=", word)]
    names = [word.lstrip("-").split("=")[0].replace("-", "_") for word in written]
    wrong = [(word, name) for word, name in zip(written, names, strict=True) if name in options]
    if wrong:
        return [f"{word!r} is not an option; write --{name} VALUE" for word, name in wrong]
    if names or not unknown:
        return [explain(key) for key in dict.fromkeys(names)]
    hint = f"; for a recipe write --config {unknown[0]}" if unknown[0].endswith((".yaml", ".yml")) else ""
    return [f"{unknown[0]!r} is not an option; options are written --name value{hint}"]


def _read_file(
    name: str, options: Mapping[str, Option], explain: Callable[[str], str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings in a YAML file and all that is wrong with them; set the variables of its env block."""
    path = find_config(name)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(
            f"the config file {path} {what} (working folder {Path.cwd()}); {missing_config_hint(name)}give an existing"
            " YAML file"
        )
    written, lines = read_mapping(path)
    written = with_shipped_files(written)
    values: dict[str, Any] = {}
    faults = []
    for key, value in written.items():
        place = f"{path} line {lines[key]}"
        reason = secret_in_setting(key, value)
        if reason:
            raise UsageError(f"{place}: {key} {reason}")
        ours = RENAMED.get(key, key)
        if key == "env" and isinstance(value, dict):
            os.environ.update({str(variable): str(setting) for variable, setting in value.items()})
            continue
        if key == "env":
            fault = "env must map names to values, such as 'env: {HF_HUB_OFFLINE: 1}'"
        elif ours not in options:
            fault = explain(key)
        elif ours != key and ours in written:
            fault = f"{key} and {ours} are the same setting; keep {ours}"
        else:
            fault = value_fault(options[ours], value)
            fault = fault and f"{key} {fault}"
        if fault:
            faults.append(f"{place}: {fault}")
        values[ours] = value
    return values, faults


def _entry_fault(option: Option, entries: Sequence[Any]) -> str | None:
    """Return what is wrong with the entries of a list; a number may be written as a text, such as 1e-3."""
    kinds = {"int": (int, str), "float": (int, float, str)}.get(option.entries, (str,))
    wrong = [entry for entry in entries if type(entry) not in kinds]
    what = "text, in quotes where YAML reads it otherwise" if kinds == (str,) else "numbers"
    return f"holds {wrong[0]!r:.100} ({type(wrong[0]).__name__}); expected {what}" if wrong else None


def value_fault(option: Option, value: Any) -> str | None:
    """Return what is wrong with a YAML value for an option; None for nothing, or for what argparse checks."""
    if isinstance(value, str) or "Any" in option.kinds:
        fits = True
    elif value is None:
        return None if "NoneType" in option.kinds else "is empty; give a value or remove the line"
    elif isinstance(value, bool):
        fits = "bool" in option.kinds or option.name in TEXT_OR_BOOLEAN
        if not fits and "str" in option.kinds:
            return f"is read as {value} by YAML; write the word in quotes"
    elif isinstance(value, int):
        fits = bool({"int", "float"} & option.kinds)
    else:
        fits = type(value).__name__ in option.kinds
    if isinstance(value, list) and "list" in option.kinds:
        return _entry_fault(option, value)
    if not fits:
        names = sorted(name for name in option.kinds if name != "NoneType")
        return f"is {value!r} ({type(value).__name__}); expected {' or '.join(names)}"
    # argparse checks the choices of options, not of defaults, which the values of a file become.
    if option.choices and value not in option.choices:
        return f"is {value!r}; expected one of {', '.join(option.choices)}"
    return None


def secret_in_words(words: Sequence[str]) -> str | None:
    """Return why a command line is rejected: it holds a secret. None if it does not."""
    for word in words:
        name, _, value = word.partition("=")
        if is_secret_name(name) and name.isidentifier() and value:
            return (
                f"{name}=... is rejected: a command line is visible to all users of the machine; export {name} before"
            )
        name = name.removeprefix("--").replace("-", "_")
        if word.startswith("--") and (name in SECRET_KEYWORDS or name.endswith(("_api_key", "_password", "_secret"))):
            return f"--{name} is rejected: a command line is visible to all users of the machine; {_alternative(name)}"
    return None


def secret_in_setting(key: str, value: Any) -> str | None:
    """Return why a YAML entry or a JSON option is rejected, to be printed after its key; None if it is not."""
    if key == "env" and isinstance(value, Mapping):
        name = next((name for name, text in value.items() if is_secret_name(str(name)) and text), None)
        return name and f"sets {name}: recipes are shared; export {name} in the shell instead"
    if key in SECRET_KEYWORDS and isinstance(value, str) and value:
        return f"holds a secret, and recipes are shared; remove it and {_alternative(key)}"
    name = next(_secret_keywords(value), None) if key.endswith("_kwargs") else None
    return name and f"holds a secret in {name}; remove it and {_alternative(name)}"


def _alternative(name: str) -> str:
    if name.endswith("api_key"):
        return "put the key into an environment variable and name it in judge_api_key_env"
    return "set the environment variable HF_TOKEN, or run `hf auth login` once"


def _secret_keywords(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if key in SECRET_KEYWORDS and isinstance(entry, str) and entry:
                yield key
            yield from _secret_keywords(entry)
