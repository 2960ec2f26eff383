"""The table of options: name, default, help text and types of every field of a verb's settings classes.

The classes inherit from transformers' and TRL's settings, whose import takes seconds. So the table is read from the
source code of the classes, where a field is `name: annotation = option(default, help)` or `field(...)` with metadata.
Nothing is generated, so nothing can be out of date; a test compares the table with the imported classes.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onetrunk.ppo.foreign_names import RENAMED
from onetrunk.ppo.settings import FIXED, INHERITED_WITHOUT_MEANING
from onetrunk.stages.options.verbs import SETTINGS_MODULES

# Fields of TRL's ModelConfig that a stage rejects, and why.
WITHOUT_MEANING = {
    "lora_modules_to_save": "the base stays frozen, and the value head is saved next to the adapter",
    "lora_target_parameters": "adapters stand on linear layers; use lora_target_modules",
    "lora_task_type": "it is always CAUSAL_LM",
    "bnb_4bit_quant_storage": "it is for sharded training, which is not supported yet",
}
# The libraries' classes that ours inherit from; their packages are not imported to find them.
LIBRARY_CLASSES = {
    "TrainingArguments": "transformers.training_args",
    "_BaseConfig": "trl.trainer.base_config",
    "SFTConfig": "trl.trainer.sft_config",
    "RewardConfig": "trl.trainer.reward_config",
    "ModelConfig": "trl.trainer.model_config",
}
# TrainingArguments accepts its class or None; a launch's accelerate config decides instead.
NOT_WRITTEN = {"parallelism_config": "the accelerate config of the launch decides"}
# Options of a model or a training that mean nothing in PPO.
NOT_IN_PPO = {
    "use_peft": "ppo always trains a LoRA adapter",
    "lora_dropout": "dropout makes the first PPO ratio differ from 1",
    "hub_token": "a secret is not a setting: set HF_TOKEN, or run hf auth login",
}


@dataclass(frozen=True)
class Option:
    """One option, which is one field of a settings class and one key of the YAML file.

    Args:
        name: of the field.
        default: a JSON value.
        help: text for people.
        kinds: names of the types that a value may have; "str" also stands for enumerations.
        entries: the name of the type of a list's entries.
        choices: the words that are allowed; None: any value.
        rejected: why no value but the default is accepted, or None. Such options are not shown.
    """

    name: str
    default: Any
    help: str
    kinds: frozenset[str]
    entries: str = "str"
    choices: tuple[str, ...] | None = None
    rejected: str | None = None

    @property
    def is_mapping(self) -> bool:
        """Whether a value can only be a mapping. A text in fsdp_config or deepspeed may be a path."""
        return "dict" in self.kinds and ("str" not in self.kinds or self.name.endswith("_kwargs"))


@functools.cache
def load_options(verb: str) -> dict[str, Option]:
    """Return the options of a verb by name."""
    module = SETTINGS_MODULES[verb]
    options = {}
    for name in _settings_classes(module):
        options |= _fields_of(module, name)
    has_ppo = "rollout_batch_size" in options
    return {name: Option(**{**vars(option), "rejected": _rejected(name, has_ppo)}) for name, option in options.items()}


def shown_options(verb: str) -> list[Option]:
    """Return the options of a verb that can be set."""
    return [option for option in load_options(verb).values() if option.rejected is None]


def _rejected(name: str, has_ppo: bool) -> str | None:
    """Return why a field takes no other value than its default, or None."""
    if name in RENAMED:
        return f"an old name of {RENAMED[name]}, which is read as that"
    if has_ppo and name in FIXED:
        return FIXED[name][1]
    if has_ppo and name == "gradient_accumulation_steps":
        return "an optimizer step is a minibatch, cut into forwards by microbatch_tokens"
    reasons = (WITHOUT_MEANING | NOT_WRITTEN) | (INHERITED_WITHOUT_MEANING | NOT_IN_PPO if has_ppo else {})
    return reasons.get(name)


@functools.cache
def _source(module: str) -> ast.Module:
    package, *parts = module.split(".")
    path = Path(find_spec(package).submodule_search_locations[0]).joinpath(*parts)
    path = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return ast.parse(path.read_text(encoding="utf-8"))


def _settings_classes(module: str) -> list[str]:
    """Return the names in the tuple `dataclass_types` of a stage's module."""
    keywords = (node for node in ast.walk(_source(module)) if isinstance(node, ast.keyword))
    classes = next(node.value for node in keywords if node.arg == "dataclass_types")
    return [name.id for name in classes.elts]


@functools.cache
def _fields_of(module: str, name: str) -> dict[str, Option]:
    """Return the fields of a dataclass that a module defines or imports, those of its bases included."""
    tree = _source(module)
    definition = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if definition is None:
        home = LIBRARY_CLASSES.get(name) or next(_importing_module(tree, name), None)
        return {} if home is None else _fields_of(home, name)
    options: dict[str, Option] = {}
    for base in reversed([base.id for base in definition.bases if isinstance(base, ast.Name)]):
        options |= _fields_of(module, base)
    constants = _Constants([*tree.body, *definition.body], tree)
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            option = _option(node, constants)
            if option is not None:
                options[option.name] = option
    return options


def _importing_module(tree: ast.Module, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            yield node.module or ""


class _Constants(dict[str, Any]):
    """The plain values that statements assign to names; those that a module of ours imports are looked up there."""

    def __init__(self, body: list[ast.stmt], tree: ast.Module):
        super().__init__()
        self.tree = tree
        for node in (node for statement in body for node in _with_branches(statement)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self[node.targets[0].id] = _value(node.value, self)

    def __missing__(self, name: str) -> Any:
        home = next(_importing_module(self.tree, name), "")
        return _module_constants(home)[name] if home.startswith("onetrunk") else None


def _with_branches(node: ast.stmt) -> Iterator[ast.stmt]:
    yield node
    for inner in node.body if isinstance(node, ast.If) else ():
        yield from _with_branches(inner)


@functools.cache
def _module_constants(module: str) -> _Constants:
    tree = _source(module)
    return _Constants(tree.body, tree)


def _option(node: ast.AnnAssign, constants: _Constants) -> Option | None:
    """Return the option that an annotated assignment defines; None for a field that `__init__` does not take."""
    default, text, choices = node.value, None, None
    if isinstance(node.value, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in node.value.keywords}
        positional = [*node.value.args, None, None, None]
        if "init" in keywords:
            return None
        metadata = keywords.get("metadata")
        entries = dict(zip(map(ast.literal_eval, metadata.keys), metadata.values, strict=True)) if metadata else {}
        default = positional[0] or keywords.get("default") or keywords.get("default_factory")
        text = positional[1] or entries.get("help")
        choices = _value(positional[2] or keywords.get("choices") or entries.get("choices"), constants)
    kinds, words = _kinds(node.annotation), _literal_words(node.annotation)
    value = _value(default, constants)
    return Option(
        name=node.target.id,
        # An empty text that stands for an empty list (debug) is no value of the list's type.
        default=[] if value == "" and "list" in kinds else value,
        help=" ".join(str(_value(text, constants) or "").replace("%%", "%").split()),
        kinds=frozenset(kinds),
        entries=_entries(node.annotation),
        choices=tuple(choices) if choices else words or None,
    )


def _value(node: ast.expr | None, constants: _Constants) -> Any:
    """Return the value of an expression made of literals and known constants; None for any other."""
    if isinstance(node, ast.Name):
        return {"list": [], "dict": {}}[node.id] if node.id in ("list", "dict") else constants[node.id]
    if isinstance(node, ast.Lambda):
        return _value(node.body, constants)
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.FormattedValue) else part for part in node.values)
        return "".join(str(_value(part, constants)) for part in parts)
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _literal_words(annotation: ast.expr) -> tuple[str, ...]:
    """Return the words of a `Literal[...]` in an annotation."""
    literals = (
        node.slice for node in ast.walk(annotation) if isinstance(node, ast.Subscript) and _name(node) == "Literal"
    )
    return tuple(str(word) for part in literals for word in _as_tuple(ast.literal_eval(part)))


def _entries(annotation: ast.expr) -> str:
    """Return the name of the type of the entries of a `list[...]` in an annotation; "str" without one."""
    lists = (node for node in ast.walk(annotation) if isinstance(node, ast.Subscript) and _name(node) == "list")
    return next((_name(node.slice) for node in lists), "str")


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _name(node: ast.expr) -> str:
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _kinds(node: ast.expr) -> set[str]:
    """Return the names of the plain types in an annotation; whatever is not plain is written as text."""
    if isinstance(node, ast.Constant):
        return {"NoneType"} if node.value is None else _kinds(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.BinOp):
        return _kinds(node.left) | _kinds(node.right)
    name = _name(node)
    if name in ("Optional", "Union"):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return set().union(*map(_kinds, parts)) | ({"NoneType"} if name == "Optional" else set())
    name = {"List": "list", "Dict": "dict"}.get(name, name)
    return {name} if name in ("int", "float", "bool", "list", "dict", "Any") else {"str"}
