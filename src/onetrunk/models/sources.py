"""What the name of a model means: a base model or an adapter, and which base an adapter was trained on.

Loads no weights; what lies at a name is read by `loading.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file, find_adapter_config_file, has_file

from onetrunk.models.adapters import require_lora
from onetrunk.models.loading import check_source, read_adapter_config, read_config
from onetrunk.utils.files import atomic_write_json


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


BASE_FILE = "base_model.json"
SAMPLES = 4
# Some numbers may be damaged by quantisation tools or lie beyond the range of float16.
LEAST_EQUAL = 0.95
# Heads are an adapter's own, or belong to another kind of model on the same decoder.
HEADS = ("lm_head", "score", "value_head", "modules_to_save", "original_module", "lora_")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def base_marks(base: PreTrainedModel) -> dict[str, Any]:
    """Return the name of a base model and samples of its weights, in terms of JSON.

    Args:
        base: with or without adapters in its layers, which do not count.
    """
    names, parts = [], []
    for name, parameter in base.named_parameters():
        if parameter.dtype not in FLOATS or any(head in name for head in HEADS):
            continue
        flat = parameter.data.reshape(-1)
        # The first number of a row may be alike in all; these are spread.
        places = [(2 * i + 1) * flat.numel() // (2 * SAMPLES) for i in range(SAMPLES)]
        names.append(name.replace(".base_layer.", "."))
        parts.append(flat[places].to(torch.bfloat16))
    # One transfer for all.
    rows = torch.stack(parts).view(torch.int16).cpu().tolist() if parts else []
    is_half = any(p.dtype == torch.float16 for p in base.parameters())
    about = {"name": base.config.name_or_path, "is_float16": is_half}
    return {**about, "weights": dict(zip(names, rows, strict=True))}


def write_base_marks(base: PreTrainedModel, folder: str | Path) -> None:
    """Write what `base_marks` says of a base into the folder of an adapter that was trained on it."""
    atomic_write_json(Path(folder) / BASE_FILE, base_marks(base))


def check_base_marks(base: PreTrainedModel, source: str, revision: str | None = None) -> None:
    """Refuse an adapter on a base that it was not trained on; one that remembers none is taken.

    Args:
        base: the model that the adapter is put on, with or without adapters.
        source: folder or Hub name of the adapter.
        revision: of it on the Hub.

    Raises:
        ValueError: the weights are others; names both bases.
    """
    written = _read(source, revision)
    if written is None:
        return
    own = base_marks(base)
    shared = [name for name in written["weights"] if name in own["weights"]]
    pairs = [(a, b) for n in shared for a, b in zip(written["weights"][n], own["weights"][n], strict=True)]
    # Out of float16 a number may come back as the neighbour of what float32 is rounded to.
    most = int(bool(written.get("is_float16")) != own["is_float16"])
    equal = sum(abs(a - b) <= most for a, b in pairs)
    if pairs and equal < LEAST_EQUAL * len(pairs):
        raise ValueError(
            f"the adapter {source} was trained on {written['name'] or 'another base model'}, and this base,"
            f" {own['name'] or 'made in memory'}, has other weights ({len(pairs) - equal} of {len(pairs)} samples"
            " differ); load it on the base that it was trained on"
        )


def _read(source: str, revision: str | None) -> dict[str, Any] | None:
    path = cached_file(
        source,
        BASE_FILE,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return None
    try:
        content = json.loads(Path(path).read_bytes())
        known = isinstance(content["weights"], dict) and isinstance(content["name"], str | None)
        if known and not all(map(_is_sample, content["weights"].values())):
            raise ValueError(f"expected {SAMPLES} numbers of each weight")
        return content if known else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{source}/{BASE_FILE} is damaged ({error}); restore it, or delete it") from error


def _is_sample(value: Any) -> bool:
    return isinstance(value, list) and len(value) == SAMPLES and all(type(number) is int for number in value)


SAMPLES = 64
# What a config says about a load or about padding rather than about the function that the model computes.
PASSING = frozenset(
    "_name_or_path name_or_path transformers_version architectures dtype torch_dtype use_cache quantization_config"
    " pad_token_id bos_token_id eos_token_id _attn_implementation attn_implementation return_dict".split()
)


def base_fingerprint(base: PreTrainedModel) -> str:
    """Return the line for a base model, with or without adapters in its layers, which do not count.

    Args:
        base: transformers' model; of each parameter at most SAMPLES numbers are read, evenly spread.
    """
    return _fingerprint(base, without=".lora_")


def scorer_fingerprint(model: PreTrainedModel) -> str:
    """Return the line for a reward model, adapters included; a head that the adapter's stands in for does not count.

    Args:
        model: as for `base_fingerprint`.
    """
    return _fingerprint(model, without=".original_module.")


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of all that is in some tensors, by their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def _fingerprint(base: PreTrainedModel, without: str) -> str:
    # Only what differs from the defaults of the class: a later version of transformers may add fields.
    config = {k: v for k, v in base.config.to_diff_dict().items() if k not in PASSING}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    parts: list[Tensor] = []
    for name, parameter in base.named_parameters():
        if without in name:
            continue
        # PEFT puts a layer that it adapts into `base_layer`.
        digest.update(f"{name.replace('.base_layer.', '.')} {parameter.dtype} {list(parameter.shape)}".encode())
        parts.append(_samples(parameter.data))
    for dtype in sorted({part.dtype for part in parts}, key=str):
        # One transfer per dtype: on a GPU each of its own would wait for the device.
        joined = torch.cat([part for part in parts if part.dtype == dtype]).cpu().contiguous()
        digest.update(joined.view(torch.uint8).numpy().tobytes())
    return f"{base.config.model_type}, sha256 {digest.hexdigest()[:16]}"


def _samples(weights: Tensor) -> Tensor:
    flat = weights.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLES))]
