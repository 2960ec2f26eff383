"""`option`: a field of a settings class with its help text. Every room with settings uses it.

`stages/options/table.py` reads the arguments of `option` from the source code: write literals or constants.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T", bound=type)

SEED_LIMIT = 2**32
# The words that settings accept, where two rooms know them.
TRUNK_CACHES = ("auto", "off", "device", "cpu")
IMPORTANCE_MODES = ("token_truncate", "token_mask")
# The values that training in pipeline stages accepts of a setting, why it rejects others, and what to set instead.
IN_STAGES = {
    "fp16": ((False, None), "scales gradients", "set bf16, or neither"),
    "activation_offloading": ((False, None), "wraps a whole forward", "set activation_checkpointing"),
    "capture_trunk_states": ((False, None), "keeps states for the layers above the cut", "leave it out"),
    "trunk_cache": (("auto", "off"), "keeps the output of layers that other processes have", "set it to auto or off"),
}
# The ranks of LoRA that vLLM reserves memory for.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# What None means where neither the type nor the default says it.
_OFF = {"beta": 0.0, "max_grad_norm": 0.0, "report_to": "none"}


def option(default: Any, text: str, choices: Sequence[str] | None = None) -> Any:
    """Return a dataclass field that TrlParser shows with a help text, and checks against `choices`."""
    metadata: dict[str, Any] = {"help": text}
    return field(default=default, metadata=metadata | ({"choices": list(choices)} if choices else {}))


def defaults_of(settings: Any) -> dict[str, Any]:
    """Return the default of every field of a settings object that has one."""
    by_field = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(settings)}
    return {name: default for name, default in by_field.items() if default is not MISSING}


def replace_none(settings: Any, defaults: dict[str, Any] | None = None) -> None:
    """Set each setting that is None, and has another default and no meaning for None, to off or to its default."""
    defaults = defaults_of(settings) if defaults is None else defaults
    unset = [name for name, default in defaults.items() if getattr(settings, name) is None and default is not None]
    # The annotations of the class: transformers' parser rewrites the types of fields.
    types = get_type_hints(type(settings)) if unset else {}
    for name in unset:
        if name in _OFF or type(None) not in get_args(types.get(name)):
            setattr(settings, name, _OFF.get(name, defaults[name]))


def require_seed(name: str, value: int | None) -> None:
    """Raise ValueError if the setting `name` is neither None nor a whole number from 0 to 2**32 - 1."""
    if value is not None and not (is_whole(value) and 0 <= value < SEED_LIMIT):
        raise ValueError(f"{name} is {value!r}; set a whole number from 0 to {SEED_LIMIT - 1}")


def require_truncation(top_p: float | None, top_k: int | None, prefix: str = "") -> None:
    """Raise ValueError if one of the two is neither None nor in its range; `prefix` stands before their names."""
    is_share = isinstance(top_p, (int, float)) and not isinstance(top_p, bool) and 0 < top_p <= 1
    if top_p is not None and not is_share:
        raise ValueError(f"{prefix}top_p is {top_p!r}; set it above 0 and at most 1, where 1 leaves all tokens in")
    if top_k is not None and not (is_whole(top_k) and top_k >= 0):
        raise ValueError(f"{prefix}top_k is {top_k!r}; set a whole number of tokens, where 0 leaves all of them in")


def reject_deepspeed() -> None:
    """Raise ValueError if the accelerate config of the launch asks for DeepSpeed, whether it is installed or not."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
        raise ValueError(
            f"DeepSpeed ZeRO{'-' + stage if stage.isdigit() else ''} is not supported: it takes an optimizer step for"
            " every forward of a step, and cannot save adapters of a sharded base. Launch with"
            " accelerate_configs/fsdp2.yaml, which shards the frozen base, or with ddp.yaml"
        )


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number; a boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def stage_obstacles(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the settings with which PPO cannot train in pipeline stages: name, why, and what to set instead."""
    for name, (accepted, why, remedy) in IN_STAGES.items():
        if values[name] not in accepted:
            yield name, why, remedy


def parse_adapter_layers(text: str, num_layers: int | None = None) -> int:
    """Return the first adapted layer of a model: 0 for "all", num_layers - k for "top-k"; ValueError for all else.

    Without num_layers only the form is checked.
    """
    if text == "all":
        return 0
    match = re.fullmatch(r"top-([1-9]\d*)", str(text))
    if not match or (num_layers and int(match[1]) > num_layers):
        which = f" with k from 1 to the model's {num_layers} layers" if num_layers else " for the last k layers"
        example = max(1, (num_layers or 16) // 4)
        raise ValueError(f"adapter_layers is {text!r}; it must be 'all', or 'top-k'{which}, such as top-{example}")
    return num_layers - int(match[1]) if num_layers else 0


def documented(settings: T) -> T:
    """Decorate a dataclass of settings: its signature lists the fields, and its docstring explains each of them.

    Where a class has a `__new__`, Python would show its signature. The texts are the help texts of the command line;
    fields of a parent class without one are left out of the docstring.
    """
    parameters = list(inspect.signature(settings.__init__).parameters.values())[1:]
    settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    entries = []
    for f in fields(settings):
        text = re.sub(r"\s+", " ", f.metadata.get("help", "")).replace("%%", "%").strip()
        if f.init and text:
            wrapped = textwrap.wrap(f"{f.name}: {text}", 111, break_long_words=False, break_on_hyphens=False)
            entries.append(textwrap.indent("\n".join([wrapped[0], *(f"    {line}" for line in wrapped[1:])]), " " * 8))
    before, raises, after = (settings.__doc__ or "").partition("    Raises:")
    settings.__doc__ = (
        f"{before.rstrip()}\n\n    Args:\n" + "\n".join(entries) + "\n\n" + (raises + after if raises else "    ")
    )
    return settings
