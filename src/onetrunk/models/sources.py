"""What the name of a model means: a base model or an adapter, and which base an adapter was trained on.

Loads no weights; what lies at a name is read by `loading.py`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from transformers.utils import find_adapter_config_file, has_file

from onetrunk.models.adapters import require_lora
from onetrunk.models.loading import check_source, read_adapter_config, read_config


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
        ValueError: its config names no base, its weights are pickled, or it is no LoRA adapter.
    """
    if not is_adapter(name, revision):
        return None
    require_safetensors(name, revision)
    config = read_adapter_config(name, revision)
    require_lora(config, f"the adapter {name}")
    base = config.base_model_name_or_path
    if not base:
        raise ValueError(
            f"the adapter {name!r} does not say what its base model is; set base_model_name_or_path in its"
            " adapter_config.json"
        )
    with base_of(name):
        if is_adapter(base):
            raise RuntimeError(f"{base!r} is an adapter itself; name the model that it was trained on")
    return base


def require_safetensors(name: str, revision: str | None = None, folder: str = "") -> None:
    """Refuse an adapter whose weights are pickled (`adapter_model.bin`): PEFT would hand them to `torch.load`.

    Args:
        name: a folder or a repository with an adapter; every adapter passes here before it is loaded.
        revision: branch, tag or commit on the Hub.
        folder: of the adapter in there, where it has one of its own.

    Raises:
        ValueError: it has no adapter_model.safetensors.
    """
    files = [f"{folder}/{file}" if folder else file for file in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)]
    if has_file(name, files[0], revision=revision):
        return
    pickled = f"its weights are pickled ({files[1]}), and " if has_file(name, files[1], revision=revision) else ""
    raise ValueError(
        f"the adapter {name!r} has no {files[0]}: {pickled}onetrunk reads no other format; load the adapter with PEFT"
        " where you trust it, and save it again (save_pretrained)"
    )


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
    return read_config("model", name, **pinned_source(revision, trust_remote_code)).get_text_config()
