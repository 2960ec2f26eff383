"""What differs between the versions of transformers that we support, in one place.

The code of a function goes when the lower bound in pyproject.toml reaches the version that it gives to `is_older`;
tests/test_versions.py fails then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any


def is_older(version: str) -> bool:
    """Return whether the installed transformers is older than a version, such as "5.23". Does not import it."""
    installed = metadata.version("transformers").split(".")[:2]
    return [int(number) for number in installed] < [int(number) for number in version.split(".")]


# Names that every stage reads as those of the installed transformers, which renamed two settings.
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
if is_older("5.23"):
    RENAMED = {new: old for old, new in RENAMED.items()}


def checkpointing_enabler(base: Any) -> Callable[..., None]:
    """Return the method of a model that turns on activation checkpointing; it was renamed."""
    return base.gradient_checkpointing_enable if is_older("5.23") else base.activation_checkpointing_enable


def empty_cache_layers() -> tuple[type, ...]:
    """Return the classes of cache layers that keep nothing; their places in a cache were filled otherwise."""
    from transformers import cache_utils

    return () if is_older("5.23") else (cache_utils.DummyLayer,)


def require_tensor_parallelism() -> None:
    """Raise ValueError if transformers has no plans that divide a loaded model."""
    if is_older("5.23"):
        raise ValueError(
            f"tensor parallelism needs transformers 5.23 or newer, and {metadata.version('transformers')} is"
            " installed; update it, or launch with accelerate_configs/fsdp2.yaml"
        )


def takes_key_value_cache(model: Any) -> bool:
    """Return whether the forward of a model takes a cache of keys and values.

    It was renamed to `cache`, and the older name is still taken. The states of Mamba and xLSTM, which have neither
    positions nor attention, have that name now too.
    """
    parameters = inspect.signature(type(model).forward).parameters
    if is_older("5.24") or "past_key_values" in parameters:
        return "past_key_values" in parameters
    has_attention = "position_ids" in parameters or hasattr(model.config.get_text_config(), "num_attention_heads")
    return "cache" in parameters and has_attention


def cache_keyword(model: Any) -> str:
    """Return the name under which the forward of a decoder takes its cache."""
    is_renamed = not is_older("5.24") and "cache" in inspect.signature(type(model).forward).parameters
    return "cache" if is_renamed else "past_key_values"
