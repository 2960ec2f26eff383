"""The options of the verbs, read from the source code of the settings classes.

The classes inherit from transformers' and TRL's settings, whose import takes seconds, and `--help` and mistakes are
answered before it. So the table reads the source code, where a field is `name: annotation = option(default, help)` or
`field(...)` with metadata. Nothing is generated; a test compares the table with the imported classes.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onetrunk.ppo.settings import FIXED, INHERITED_WITHOUT_MEANING, WITHOUT_EFFECT
from onetrunk.utils.versions import RENAMED
from onetrunk.verbs import VERBS

# Fields of TRL's ModelConfig that a stage rejects, and why.
WITHOUT_MEANING = {
    "lora_modules_to_save": "the base stays frozen, and the value head is saved next to the adapter",
    "lora_target_parameters": "commands adapt linear layers (lora_target_modules); PPOTrainer takes it in peft_config",
    "lora_task_type": "it is always CAUSAL_LM",
    "bnb_4bit_quant_storage": "it is for sharded training, which is not supported yet",
}
# TrainingArguments accepts its class or None; a launch's accelerate config decides instead.
NOT_WRITTEN = {"parallelism_config": "the accelerate config of the launch decides"}
# Options of a model or a training that mean nothing in PPO.
NOT_IN_PPO = {
    "use_peft": "ppo always trains a LoRA adapter",
    "lora_dropout": "dropout makes the first PPO ratio differ from 1",
    "hub_token": "a secret is not a setting: set HF_TOKEN, or run hf auth login",
}
# The libraries' classes that ours inherit from; their packages are not imported to find them.
LIBRARY_CLASSES = {
    "TrainingArguments": "transformers.training_args",
    "_BaseConfig": "trl.trainer.base_config",
    "SFTConfig": "trl.trainer.sft_config",
    "RewardConfig": "trl.trainer.reward_config",
    "ModelConfig": "trl.trainer.model_config",
    "GRPOConfig": "trl.trainer.grpo_config",
}
PLAIN_TYPES = ("int", "float", "bool", "list", "dict", "Any")


@dataclass(frozen=True)
class Option:
    """One option, which is one field of a settings class and one key of the YAML file.

    Args:
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
    module = VERBS[verb].module
    keywords = (node for node in ast.walk(_source(module)) if isinstance(node, ast.keyword))
    classes = next(node.value for node in keywords if node.arg == "dataclass_types")
    options: dict[str, Option] = {}
    for settings_class in classes.elts:
        options |= _fields_of(module, settings_class.id)
    reasons = {**WITHOUT_MEANING, **NOT_WRITTEN} | {
        old: f"an old name of {new}, which is read as that" for old, new in RENAMED.items()
    }
    if "rollout_batch_size" in options:
        fixed = {name: reason for name, (_, reason) in FIXED.items()}
        theirs = _fields_of(module, "GRPOConfig")
        foreign = {name: theirs[name] for name in theirs if name not in options}
        for name, option in foreign.items():
            kinds = option.kinds | {"NoneType"}
            options[name] = replace(option, default=None, help="", kinds=kinds, choices=None)
        reasons |= INHERITED_WITHOUT_MEANING | WITHOUT_EFFECT | NOT_IN_PPO | fixed
        reasons |= dict.fromkeys(foreign, "a name of TRL's, read as it means here")
    return {name: replace(option, rejected=reasons.get(name)) for name, option in options.items()}


def shown_options(verb: str) -> list[Option]:
    """Return the options of a verb that can be set."""
    return [option for option in load_options(verb).values() if option.rejected is None]


@functools.cache
def _source(module: str) -> ast.Module:
    package, *parts = module.split(".")
    path = Path(find_spec(package).submodule_search_locations[0]).joinpath(*parts)
    path = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _fields_of(module: str, name: str) -> dict[str, Option]:
    """Return the fields of a dataclass that a module defines or imports, with the fields of its bases."""
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
    """The plain values that statements assign to names; a name that a module of ours imports is looked up there."""

    def __init__(self, body: list[ast.stmt], tree: ast.Module):
        super().__init__()
        self.tree = tree
        statements = [statement for statement in body if isinstance(statement, ast.Assign | ast.If)]
        for node in (node for statement in statements for node in ast.walk(statement)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self[node.targets[0].id] = _value(node.value, self)

    def __missing__(self, name: str) -> Any:
        home = next(_importing_module(self.tree, name), "")
        return _Constants(_source(home).body, _source(home))[name] if home.startswith("onetrunk") else None


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
    annotation = ast.unparse(node.annotation).strip("'\"")
    entries_of_list = re.search(r"\blist\[(\w+)", annotation)
    words = re.findall(r"'([^']*)'", " ".join(re.findall(r"\bLiteral\[(.*?)\]", annotation)))
    kinds = _kinds(annotation)
    value = _value(default, constants)
    return Option(
        name=node.target.id,
        # An empty text that stands for an empty list (debug) is no value of the list's type.
        default=[] if value == "" and "list" in kinds else value,
        help=" ".join(str(_value(text, constants) or "").replace("%%", "%").split()),
        kinds=kinds,
        entries=entries_of_list[1] if entries_of_list else "str",
        choices=tuple(choices or words) or None,
    )


def _kinds(annotation: str) -> frozenset[str]:
    """Return the names of the plain types of an annotation such as `dict[str, int] | None`; "str" for any other."""
    while "[" in annotation:
        annotation = re.sub(r"\[[^\[\]]*\]", "", annotation)
    names = ["NoneType" if name.strip() == "None" else name.strip() for name in annotation.split("|")]
    return frozenset(name if name in (*PLAIN_TYPES, "NoneType") else "str" for name in names)


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
