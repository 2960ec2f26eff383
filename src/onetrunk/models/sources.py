"""What the name of a model means: a folder here or a repository on the Hub; one sentence for a name that is neither.

Knows names, folders, configs and PEFT's adapter_config.json; loads no weights.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import PeftConfig
from transformers import AutoConfig
from transformers.utils import find_adapter_config_file

from onetrunk.models.adapters import require_lora

MODEL_FILES = "config.json and *.safetensors"
_CONFIGS = ("config.json", "adapter_config.json")


def not_loadable(kind: str, name: str, files: str, reason: str | Exception) -> RuntimeError:
    """Return the error for a name at which there is no `kind`: model or tokenizer.

    Args:
        files: what a folder must hold.
        reason: a clause, or the loader's error, of which the first line is told.
    """
    if isinstance(reason, Exception):
        reason = (str(reason).strip().splitlines() or [type(reason).__name__])[0].rstrip(".")
        if not Path(name).exists():
            reason = f"there is no folder {name} in {Path.cwd()}, and the Hub says: {reason}"
    return RuntimeError(
        f"the {kind} {name!r} cannot be loaded: {reason}. Give a folder that holds {files}, or a name on the Hub; for"
        " a private one set HF_TOKEN, and without a network load it once beforehand"
    )


def check_source(name: str, kind: str = "model", files: str = MODEL_FILES) -> None:
    """Refuse a name at which nothing can lie, before the Hub is asked.

    Args:
        kind: "model", "reward model" or "tokenizer".
        files: what a folder must hold.

    Raises:
        RuntimeError: a path that leads nowhere, a file, or a folder without a model.
    """
    path = Path(name)
    if path.is_file():
        raise not_loadable(kind, name, files, "it is a file")
    if not path.is_dir():
        if not can_be_on_hub(name):
            where = "" if path.is_absolute() else f" in {Path.cwd()}"
            raise not_loadable(kind, name, files, f"there is no such folder{where}")
    elif kind != "tokenizer" and not any((path / config).is_file() for config in _CONFIGS):
        inside = sorted(config.parent.name for pattern in _CONFIGS for config in path.glob(f"*/{pattern}"))
        hint = f", but its folder {inside[-1]} does: name that" if inside else ""
        raise not_loadable(kind, name, files, f"the folder holds neither {' nor '.join(_CONFIGS)}{hint}")


def pinned_source(revision: str | None, trust_remote_code: bool | None) -> dict[str, Any]:
    """Return the keywords that say where code and weights of a model come from.

    Always with `trust_remote_code`: where it is left out, transformers asks at the terminal, and a "y" runs code that
    nobody has read.

    Args:
        revision: branch, tag or commit.
        trust_remote_code: run the repository's own code; the revision has to be a full commit hash then.

    Raises:
        ValueError: remote code without a pinned commit.
    """
    if not trust_remote_code:
        return {"revision": revision or "main", "trust_remote_code": False}
    if not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        raise ValueError(
            f"trust_remote_code runs the repository's code, and revision is {revision!r}; set revision (on the command"
            " line model_revision) to the full 40-digit commit hash that you have read"
        )
    # Code that a config borrows from another repository is pinned too: it is not found there at this commit.
    return {"revision": revision, "code_revision": revision, "trust_remote_code": True}


def can_be_on_hub(name: str) -> bool:
    """Say whether a repository on the Hub could have this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_same_source(one: str, other: str) -> bool:
    """Say whether two names lead to the same model: the same text, or ways to the same folder."""
    if one and other and Path(one).is_dir() and Path(other).is_dir():
        return Path(one).resolve() == Path(other).resolve()
    return bool(one) and one == other


def is_adapter(name: str, revision: str | None = None) -> bool:
    """Say whether an adapter lies at `name`, rather than a model.

    Raises:
        RuntimeError: a path at which neither lies.
    """
    check_source(name)
    return find_adapter_config_file(name, revision=revision) is not None


def adapter_base(name: str, revision: str | None = None) -> str | None:
    """Return the name of the base model of the adapter at `name`; None where there is a model and no adapter.

    Raises:
        RuntimeError: nothing lies at `name`, or its config names a base that is not there.
        ValueError: its config names no base, or it is no LoRA adapter.
    """
    if not is_adapter(name, revision):
        return None
    config = PeftConfig.from_pretrained(name, revision=revision)
    require_lora(config, f"the adapter {name}")
    base = config.base_model_name_or_path
    if not base:
        raise ValueError(
            f"the adapter {name!r} does not say what its base model is; set base_model_name_or_path in its"
            " adapter_config.json"
        )
    with base_of(name):
        check_source(base)
    return base


@contextlib.contextmanager
def base_of(adapter: str) -> Iterator[None]:
    """Say in errors of the block that the name which cannot be loaded stands in an adapter's config."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"the adapter {adapter!r} names its base model in adapter_config.json (base_model_name_or_path; a path"
            f" there is relative to the working folder): {error}"
        ) from error


def load_config(name: str, revision: str | None = None, trust_remote_code: bool | None = None) -> Any:
    """Return the text config of the model at `name`, of an adapter that of its base.

    Raises:
        RuntimeError: nothing loadable at `name`.
        ValueError: remote code without a pinned commit.
    """
    base = adapter_base(name, revision)
    if base is None:
        return _config(name, revision, trust_remote_code)
    with base_of(name):
        return _config(base)


def _config(name: str, revision: str | None = None, trust_remote_code: bool | None = None) -> Any:
    source = pinned_source(revision, trust_remote_code)
    try:
        return AutoConfig.from_pretrained(name, **source).get_text_config()
    except OSError as error:
        raise not_loadable("model", name, MODEL_FILES, error) from error
