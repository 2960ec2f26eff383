"""YAML and command line become dataclasses; what a user can get wrong there becomes one sentence and exit code 2.

    onetrunk ppo --config recipes/tiny/ppo.yaml --learning_rate 1e-3

The YAML file gives values, the command line overrides them. Relative paths in both are seen from the working folder,
not from the file. Parsing is TrlParser's (with its `env` block); here stand the checks around it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

# Before trl is imported: its trainers send a ping unless this is set.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from trl import TrlParser  # noqa: E402

from onetrunk.ppo.foreign_keys import explain_key  # noqa: E402
from onetrunk.stages.secrets import refused_setting, refused_words  # noqa: E402
from onetrunk.utils.files import require_name  # noqa: E402
from onetrunk.utils.yaml_files import read_yaml  # noqa: E402

# What becomes a part of a path, here or in a tracker.
NAMES = ("run_name",)
# A text field that is also read as a boolean: True resumes from the last checkpoint.
AUTO = "auto"
RESUME = "resume_from_checkpoint"
TEXT_OR_BOOLEAN = (RESUME, "stop_on_alarm")


class UsageError(ValueError):
    """A mistake on the command line or in the YAML file."""


class StageParser(TrlParser):
    """TrlParser that reads mappings as JSON, and raises UsageError where argparse would print all options and exit."""

    def __init__(self, dataclass_types: Sequence[type], **kwargs: Any):
        super().__init__(dataclass_types, **kwargs)
        mappings = {name for name, hint in _hints(dataclass_types).items() if _is_mapping(name, hint)}
        for action in self._actions:
            if action.dest in mappings:
                action.type = _json_mapping

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message)


def _hints(dataclass_types: Sequence[type]) -> dict[str, Any]:
    return {name: hint for t in dataclass_types for name, hint in typing.get_type_hints(t).items()}


def _is_mapping(name: str, hint: Any) -> bool:
    """Say whether a field is a mapping and nothing else: a text in fsdp_config or deepspeed may be a path."""
    allowed = _plain_types(hint)
    return dict in allowed and (str not in allowed or name.endswith("_kwargs"))


def _json_mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        value, reason = None, f" ({error})"
    else:
        reason = ""
    if not isinstance(value, dict):
        example = '{"enable_thinking": false}'
        raise argparse.ArgumentTypeError(f"{text!r} is no mapping in JSON{reason}; write it such as '{example}'")
    return value


def parse(
    argv: Sequence[str], dataclass_types: Sequence[type], verb: str, description: str, *, knows_ppo: bool = False
) -> tuple[Any, ...]:
    """Return one instance of each dataclass, from the YAML file after --config and the options in `argv`.

    Args:
        argv: the words after the verb.
        dataclass_types: what to make; their fields are the options.
        verb: sft, ppo or eval, for the help text.
        description: one sentence on the verb.
        knows_ppo: True explains names that come from TRL's GRPO and PPO trainers.

    Raises:
        UsageError: says the file and line, or the option, and what to write instead; also for a secret in either.
        SystemExit: after --help.
    """
    refused = refused_words(argv)
    if refused:
        raise UsageError(refused)
    known = [f.name for dataclass_type in dataclass_types for f in fields(dataclass_type) if f.init]
    argv = _spelled_out_resume(_split_config_option(argv), has_checkpoints=RESUME in known)
    parser = StageParser(
        dataclass_types,
        prog=f"onetrunk {verb}",
        description=f"{description} Options in a YAML file: --config FILE.",
        allow_abbrev=False,
    )
    if "--config" in argv:
        index = argv.index("--config")
        _check_config(_config_path(argv, index), dataclass_types, known, knows_ppo)
    others = argv if "--config" not in argv else argv[:index] + argv[index + 2 :]
    unknown = [word for word in parser.parse_known_args(others)[1]]
    if unknown:
        raise UsageError(_explain_words(unknown, known, knows_ppo))
    try:
        parsed = parser.parse_args_and_config(argv)
        for arguments in parsed:
            _check_text(arguments)
        return parsed
    except (ValueError, TypeError, ImportError) as error:
        raise error if isinstance(error, UsageError) else UsageError(str(error)) from error


def _check_text(arguments: Any) -> None:
    """Refuse secrets in mappings of the command line, and names that could lead a path out of its folder."""
    for name, value in vars(arguments).items():
        refused = refused_setting(name, value) if isinstance(value, dict) else None
        if refused:
            raise UsageError(f"{name} {refused}")
        if name in NAMES and value is not None:
            require_name(value, name)


def _split_config_option(argv: Sequence[str]) -> list[str]:
    words: list[str] = []
    for word in argv:
        words += word.split("=", 1) if word.startswith("--config=") else [word]
    if words.count("--config") > 1:
        raise UsageError("--config is given twice; keep one")
    return words


def _spelled_out_resume(argv: list[str], has_checkpoints: bool) -> list[str]:
    """Return the words with `--resume` in full; a stage without checkpoints always goes on where it stopped."""
    words: list[str] = []
    for word in argv:
        words += word.split("=", 1) if word.startswith("--resume=") else [word]
    if "--resume" not in words:
        return words
    index = words.index("--resume")
    value = words[index + 1] if index + 1 < len(words) else None
    if value is None or value.startswith("--"):
        raise UsageError("--resume needs a word behind it: auto, true, or a checkpoint folder")
    if has_checkpoints:
        return [*words[:index], f"--{RESUME}", *words[index + 1 :]]
    if value != AUTO:
        raise UsageError(f"--resume {value}: this stage has no checkpoints; it goes on by itself, which auto says too")
    return [*words[:index], *words[index + 2 :]]


def _config_path(argv: list[str], index: int) -> Path:
    if index + 1 == len(argv):
        raise UsageError("--config needs a YAML file after it")
    path = Path(argv[index + 1])
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"the config file {path} {what} (working folder {Path.cwd()}); give an existing YAML file")
    return path


def _check_config(path: Path, dataclass_types: Sequence[type], known: list[str], knows_ppo: bool) -> None:
    lines, config = _read_yaml(path)
    hints = _hints(dataclass_types)
    choices = {f.name: f.metadata["choices"] for t in dataclass_types for f in fields(t) if "choices" in f.metadata}
    for key, value in config.items():
        place = f"{path} line {lines[key]}"
        refused = refused_setting(key, value)
        if refused:
            raise UsageError(f"{place}: {key} {refused}")
        if key == "env":
            _set_environment(value, place)
        elif key not in known:
            raise UsageError(f"{place}: {_explain(key, known, knows_ppo)}")
        else:
            fault = _value_fault(key, value, hints[key])
            # argparse checks the choices of what is typed, not of what a file makes the default.
            if fault is None and value is not None and value not in choices.get(key, [value]):
                fault = f"is {value!r}; expected one of {', '.join(choices[key])}"
            if fault:
                raise UsageError(f"{place}: {key} {fault}")


def _read_yaml(path: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the line of every top-level key, and the mapping itself."""
    try:
        config, lines = read_yaml(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not isinstance(config, dict):
        found = "is empty" if config is None else f"holds a {type(config).__name__}"
        raise UsageError(f"{path} {found}; expected lines of the form 'key: value'")
    return lines, config


def _set_environment(value: Any, place: str) -> None:
    if not isinstance(value, dict):
        raise UsageError(f"{place}: env must map names to values, such as 'env: {{HF_HUB_OFFLINE: 1}}'")
    # Now, not when TrlParser does it again: torch and huggingface_hub read their variables once.
    os.environ.update({str(name): str(setting) for name, setting in value.items()})


def _value_fault(key: str, value: Any, hint: Any) -> str | None:
    """Say what is wrong with a YAML value for a field of that type; None if nothing is, or argparse will tell."""
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


def _explain(key: str, known: list[str], knows_ppo: bool) -> str:
    if knows_ppo:
        return explain_key(key, known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else "")


def _explain_words(words: list[str], known: list[str], knows_ppo: bool) -> str:
    keys = [word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    if keys:
        return "; ".join(_explain(key, known, knows_ppo) for key in keys)
    return f"{words[0]!r} is not an option; options are written --name value"
