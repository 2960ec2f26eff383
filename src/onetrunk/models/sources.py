"""What a model's name means, and how a model is recognised again.

A name leads to a base model or to an adapter, whose config names its base. `base_marks` are a few numbers of each
weight that an adapter keeps in base_model.json: the same base in another precision or quantised has the same numbers
up to rounding, another fine-tuning does not. A fingerprint is one exact line for run settings and caches.
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
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file, has_file

from onetrunk.models.adapters import require_lora
from onetrunk.models.loading import check_source, is_packed, read_adapter_config, read_config, source_file
from onetrunk.utils.files import atomic_write_json

BASE_FILE = "base_model.json"
MARKS_PER_WEIGHT = 4
# A few numbers may be damaged by quantisation tools, or be outside the range of float16.
LEAST_EQUAL = 0.95
# Heads belong to an adapter, or to another kind of model on the same decoder.
HEADS = ("lm_head", "score", "value_head", "modules_to_save", "original_module", "lora_")
MARKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

FINGERPRINT_SAMPLES = 64
# Fields of a config that describe a load or padding, not the function that the model computes.
PASSING = frozenset(
    "_name_or_path name_or_path transformers_version architectures dtype torch_dtype use_cache quantization_config"
    " pad_token_id bos_token_id eos_token_id _attn_implementation attn_implementation return_dict".split()
)


# --- names ---


def pinned_source(revision: str | None, trust_remote_code: bool | None) -> dict[str, Any]:
    """Return the keywords of `from_pretrained` that say which code and weights to load.

    They always include `trust_remote_code`: without it transformers asks at the terminal, and a "y" would run code
    that nobody has read.

    Raises:
        ValueError: remote code without a full commit hash as the revision.
    """
    if not trust_remote_code:
        return {"revision": revision or "main", "trust_remote_code": False}
    if not re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        raise ValueError(
            f"trust_remote_code runs the repository's code, and revision is {revision!r}; set revision (on the command"
            " line model_revision) to the full 40-digit commit hash that you have read"
        )
    # Code that a config borrows from another repository is pinned too: it does not exist there at this commit.
    return {"revision": revision, "code_revision": revision, "trust_remote_code": True}


def is_same_source(one: str, other: str) -> bool:
    """Return whether two names lead to the same model: the same text, or paths of the same folder."""
    if one and other and Path(one).is_dir() and Path(other).is_dir():
        return Path(one).resolve() == Path(other).resolve()
    return bool(one) and one == other


def is_adapter(name: str, revision: str | None = None) -> bool:
    """Return whether `name` leads to an adapter rather than a model; RuntimeError for a path that leads to neither."""
    check_source(name)
    return find_adapter_config_file(name, revision=revision) is not None


def adapter_base(name: str, revision: str | None = None) -> str | None:
    """Return the name of the base model of the adapter at `name`; None if `name` is a model.

    Raises:
        RuntimeError: `name`, or the base that its config names, leads nowhere.
        ValueError: its config names no base, its weights are pickled, or it is not a LoRA adapter.
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
    """Reject an adapter whose weights are pickled (`adapter_model.bin`): PEFT would pass them to `torch.load`.

    Every adapter is checked here before it is loaded. `folder` is the subfolder that holds it, if any.

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
    """Add to errors of the block that the base model's name comes from an adapter's config."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"the adapter {adapter!r} names its base model in adapter_config.json (base_model_name_or_path; a path"
            f" there is relative to the working folder): {error}"
        ) from error


def load_config(name: str, revision: str | None = None, trust_remote_code: bool | None = None) -> PreTrainedConfig:
    """Return the text config of the model at `name`, or of the base of the adapter at `name`."""
    base = adapter_base(name, revision)
    if base is None:
        return read_config("model", name, **pinned_source(revision, trust_remote_code)).get_text_config()
    with base_of(name):
        return read_config("model", base, **pinned_source(None, None)).get_text_config()


# --- base marks ---


KEPT_IDENTITY = "onetrunk_identity"


def keep_identity(base: PreTrainedModel) -> None:
    """Compute the marks and the fingerprint of a base now; once it is sharded no process has all of its weights."""
    vars(base)[KEPT_IDENTITY] = (base_marks(base), base_fingerprint(base))


@torch.no_grad()
def base_marks(base: PreTrainedModel) -> dict[str, Any]:
    """Return the name of a base model and samples of its weights, as JSON data; adapters in its layers are ignored."""
    if KEPT_IDENTITY in vars(base):
        return vars(base)[KEPT_IDENTITY][0]
    names, parts = [], []
    for name, parameter in base.named_parameters():
        if parameter.dtype not in MARKED_DTYPES or is_packed(parameter) or any(head in name for head in HEADS):
            continue
        flat = parameter.data.reshape(-1)
        # Spread, because the first numbers of all rows may be equal.
        places = [(2 * i + 1) * flat.numel() // (2 * MARKS_PER_WEIGHT) for i in range(MARKS_PER_WEIGHT)]
        names.append(name.replace(".base_layer.", "."))
        parts.append(flat[places].to(torch.bfloat16))
    # One transfer for all weights.
    rows = torch.stack(parts).view(torch.int16).cpu().tolist() if parts else []
    is_half = any(p.dtype == torch.float16 for p in base.parameters())
    weights = dict(zip(names, rows, strict=True))
    return {"name": base.config.name_or_path, "is_float16": is_half, "weights": weights}


def write_base_marks(base: PreTrainedModel, folder: str | Path) -> None:
    """Write the `base_marks` of a base into the folder of an adapter that was trained on it."""
    atomic_write_json(Path(folder) / BASE_FILE, base_marks(base))


def check_base_marks(base: PreTrainedModel, source: str, revision: str | None = None) -> None:
    """Reject an adapter on a base that it was not trained on; an adapter without marks passes.

    Args:
        base: the model that will carry the adapter, with or without adapters.
        source: folder or Hub name of the adapter.

    Raises:
        ValueError: the weights differ (names both bases), or the file of marks is damaged.
    """
    path = source_file(source, BASE_FILE, revision)
    if path is None:
        return
    current = base_marks(base)
    try:
        saved = json.loads(path.read_bytes())
        name, weights = saved["name"], saved["weights"]
        shared = weights.keys() & current["weights"].keys()
        pairs = [pair for key in shared for pair in zip(weights[key], current["weights"][key], strict=True)]
        # A number from float16 may be the neighbour of the one that float32 rounds to.
        most = int(bool(saved.get("is_float16")) != current["is_float16"])
        equal = sum(abs(a - b) <= most for a, b in pairs)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{source}/{BASE_FILE} is damaged ({error}); restore it, or delete it") from error
    if pairs and equal < LEAST_EQUAL * len(pairs):
        raise ValueError(
            f"the adapter {source} was trained on {name or 'another base model'}, and this base,"
            f" {current['name'] or 'made in memory'}, has other weights ({len(pairs) - equal} of {len(pairs)} samples"
            " differ); load it on the base that it was trained on"
        )


# --- fingerprints ---


def base_fingerprint(base: PreTrainedModel) -> str:
    """Return one line that identifies a base model; adapters in its layers are ignored."""
    if KEPT_IDENTITY in vars(base):
        return vars(base)[KEPT_IDENTITY][1]
    return _fingerprint(base, without=".lora_")


def scorer_fingerprint(model: PreTrainedModel) -> str:
    """Return one line that identifies a reward model with its adapters; a head that an adapter replaces is ignored."""
    return _fingerprint(model, without=".original_module.")


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of named tensors."""
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
        # PEFT moves a layer that it adapts to `base_layer`.
        digest.update(f"{name.replace('.base_layer.', '.')} {parameter.dtype} {list(parameter.shape)}".encode())
        flat = parameter.data.reshape(-1)
        # A copy: a view would keep the whole weight where it is cast when it is read (late_cast.py).
        parts.append(flat[:: max(1, -(-flat.numel() // FINGERPRINT_SAMPLES))].clone())
    for dtype in sorted({part.dtype for part in parts}, key=str):
        # One transfer per dtype: one per weight would wait for the GPU each time.
        joined = torch.cat([part for part in parts if part.dtype == dtype]).cpu().contiguous()
        digest.update(joined.view(torch.uint8).numpy().tobytes())
    return f"{base.config.model_type}, sha256 {digest.hexdigest()[:16]}"
