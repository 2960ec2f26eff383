"""Make `options.json` and the options page of the settings classes.

    python -m onetrunk.stages.options.collect

`tests/stages/test_options.py` checks that both are current.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, asdict, fields
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from trl import TrlParser

from onetrunk.ppo.foreign_keys import RENAMED
from onetrunk.ppo.settings import FIXED, INHERITED_WITHOUT_MEANING, PPOSettings
from onetrunk.stages.options.groups import group_of
from onetrunk.stages.options.page import page
from onetrunk.stages.options.schema import (
    FILE,
    Option,
    Parser,
    installed_versions,
    load_options,
    mapping_reader,
    verbs,
)
from onetrunk.stages.plain_arguments import WITHOUT_MEANING, MergeArguments, ServeArguments

PAGE = Path(__file__).with_name("README.md")
# Of the verbs whose options are settings classes; each module has `parse_VERB`, a partial of `parse`.
MODULES = {
    "sft": "onetrunk.stages.sft",
    "judge": "onetrunk.stages.judge.stage",
    "prefs": "onetrunk.stages.prefs.stage",
    "reward": "onetrunk.stages.reward",
    "distill": "onetrunk.stages.distill",
    "ppo": "onetrunk.stages.ppo",
    "eval": "onetrunk.stages.eval.stage",
}
# Verbs whose first word need not be written as an option.
PLAIN = {"serve": ServeArguments, "merge": MergeArguments}
_TYPES = {"int": "int", "float": "float", "bool": "bool", "string_to_bool": "bool"}
# TrainingArguments accept their class or None; a launch's accelerate config decides instead.
_NOT_WRITTEN = {"parallelism_config": "the accelerate config of the launch decides"}


class StageParser(TrlParser, Parser):
    """TrlParser that reads mappings as JSON, and raises UsageError where argparse would print all options and exit."""

    error = Parser.error

    def __init__(self, dataclass_types: Sequence[type], **kwargs: Any):
        super().__init__(dataclass_types, **kwargs)
        mappings = {name for name, hint in hints_of(dataclass_types).items() if is_mapping(name, hint)}
        for action in self._actions:
            if action.dest in mappings:
                action.type = mapping_reader(action.dest)


def hints_of(dataclass_types: Sequence[type]) -> dict[str, Any]:
    return {name: hint for t in dataclass_types for name, hint in typing.get_type_hints(t).items()}


def is_mapping(name: str, hint: Any) -> bool:
    """Return whether a field can only be a mapping. A text in fsdp_config or deepspeed may be a path."""
    allowed = plain_types(hint)
    return dict in allowed and (str not in allowed or name.endswith("_kwargs"))


def plain_types(hint: Any) -> set[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*(plain_types(part) for part in typing.get_args(hint)))
    plain = typing.get_origin(hint) or hint
    return {plain} if plain in (bool, int, float, list, dict, type(None), typing.Any) else {str}


def options_of(dataclass_types: Sequence[type]) -> list[Option]:
    """Return the options that the fields of settings classes are."""
    parser, hints, options = StageParser(dataclass_types), hints_of(dataclass_types), []
    actions = {action.dest: action for action in reversed(parser._actions)}
    negated = {action.dest for action in parser._actions if action.const is False}
    owners = {f.name: (t, f) for t in dataclass_types for f in fields(t) if f.init}
    has_ppo = any(issubclass(t, PPOSettings) for t in dataclass_types)
    for name, (owner, field) in owners.items():
        action = actions[name]
        default = _default_of(field)
        old = next((old for old, new in RENAMED.items() if new == name and default is None and old in owners), None)
        # TRL's trainers set the old name by default.
        default = default if old is None else _default_of(owners[old][1])
        # An empty text that stands for an empty list (debug) is no value of the list's type.
        default = [] if default == "" and action.nargs == "+" else default
        kind = "mapping" if is_mapping(name, hints[name]) else _type_name(action.type)
        options.append(
            Option(
                name=name,
                flags=tuple(action.option_strings),
                type=kind,
                nargs=action.nargs,
                const=action.const if action.nargs == "?" else None,
                default=default.value if isinstance(default, Enum) else default,
                choices=None if action.choices is None else tuple(str(getattr(c, "value", c)) for c in action.choices),
                help=" ".join((action.help or "").replace("%%", "%").split()),
                kinds=tuple(sorted(_kind_name(kind) for kind in plain_types(hints[name]))),
                group=group_of(name, _definer(owner, name)) or "",
                is_negated=name in negated,
                rejected=_rejected(name, has_ppo),
            )
        )
    return options


def _default_of(field: Field[Any]) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()


def _kind_name(kind: Any) -> str:
    return "Any" if kind is typing.Any else kind.__name__


def _type_name(reader: Any) -> str:
    # TRL wraps the types of fields that may be None in functions of their names.
    return _TYPES.get(getattr(reader, "__name__", ""), "text")


def _definer(owner: type, name: str) -> str:
    """Return the name of the class that defines a field, for its group: the last in the order of bases."""
    definers = [base.__name__ for base in owner.__mro__ if name in base.__dict__.get("__annotations__", {})]
    return definers[-1]


def _rejected(name: str, has_ppo: bool) -> str | None:
    """Return why a field takes no other value than its default, or None."""
    if name in RENAMED:
        return f"an old name of {RENAMED[name]}, which is read as that"
    if has_ppo and name in FIXED:
        return FIXED[name][1]
    if has_ppo and name in INHERITED_WITHOUT_MEANING:
        return INHERITED_WITHOUT_MEANING[name]
    if has_ppo and name == "gradient_accumulation_steps":
        return "an optimizer step is a minibatch, cut into forwards by microbatch_tokens"
    return WITHOUT_MEANING.get(name) or _NOT_WRITTEN.get(name)


def classes_of(verb: str) -> Sequence[type]:
    """Return the settings classes of a verb."""
    if verb in PLAIN:
        return (PLAIN[verb],)
    parse: Callable[..., Any] = getattr(import_module(MODULES[verb]), f"parse_{verb}")
    return parse.keywords["dataclass_types"]


def content() -> str:
    """Return what `options.json` must hold."""
    records: list[str] = []
    verbs: dict[str, list[int]] = {}
    for verb in (*MODULES, *PLAIN):
        numbers = verbs.setdefault(verb, [])
        for option in options_of(classes_of(verb)):
            record = json.dumps(asdict(option))
            if record not in records:
                records.append(record)
            numbers.append(records.index(record))
    head = f'{{"versions": {json.dumps(installed_versions())},\n"verbs": {json.dumps(verbs)},\n"options": [\n'
    return head + ",\n".join(records) + "\n]}\n"


def main() -> None:
    FILE.write_text(content(), encoding="utf-8")
    PAGE.write_text(page({verb: load_options(verb) for verb in verbs()}), encoding="utf-8")


if __name__ == "__main__":
    main()
