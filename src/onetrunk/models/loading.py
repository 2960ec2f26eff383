"""Load models, tokenizers and adapters that others wrote, and recognise a model again.

Every `from_pretrained` of onetrunk is called here. Weights are safetensors, code of a repository runs only at a pinned
commit, and what a library raises becomes one LoadError that names the file to blame. An expression or a template
without an end is rejected; a crafted file may still exhaust the memory, as it does in plain transformers.

In every signature `kind` is for the message: "model", "reward model", "adapter", or it begins with "tokenizer". `name`
is a folder or a name on the Hub, `revision` a branch, tag or commit there, `source` what `pinned_source` returns.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id
from peft import PeftConfig, PeftModel, load_peft_weights
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, find_adapter_config_file, has_file

from onetrunk.models.adapters import REVISION, match_modules, require_lora
from onetrunk.utils.files import atomic_write_json, parse_json
from onetrunk.utils.startup import peft_calls, time_limit

CONFIGS = CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
# What a folder must hold, by the first word of `kind`; anything else is a model.
NEEDED = {
    "tokenizer": "tokenizer.json",
    "adapter": f"{ADAPTER_CONFIG} and {SAFETENSORS_WEIGHTS_NAME}",
    "model": f"{CONFIG} and *.safetensors",
}
# Files that can be to blame for an error.
CHECKED_FILES = (*CONFIGS, TOKENIZER_SETTINGS, "tokenizer.json", "*.index.json", "*.safetensors", "*.jinja")
LONGEST_REASON = 300
CHECKED_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

BASE_FILE = "base_model.json"
MARKS_PER_WEIGHT = 4
# A few numbers may be damaged by quantisation tools, or be outside the range of float16.
LEAST_EQUAL = 0.95
# Heads belong to an adapter, or to another kind of model on the same decoder.
HEADS = ("lm_head", "score", "value_head", "modules_to_save", "original_module", "lora_")
MARKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEPT_IDENTITY = "onetrunk_identity"
FINGERPRINT_SAMPLES = 64
# Fields of a config that describe a load or padding, not the function that the model computes.
PASSING = frozenset(
    "_name_or_path name_or_path transformers_version architectures dtype torch_dtype use_cache quantization_config"
    " pad_token_id bos_token_id eos_token_id _attn_implementation attn_implementation return_dict".split()
)


# --- errors ---


class LoadError(RuntimeError):
    """A name that leads nowhere, or a file that cannot be used; the message names it and says what to do."""


@contextlib.contextmanager
def reading(kind: str, name: str, revision: str | None = None) -> Iterator[None]:
    """Translate what a library raises inside the block into a LoadError, which names a file that cannot be opened."""
    try:
        yield
    except (LoadError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        folder = _folder(name, revision)
        for pattern in CHECKED_FILES if folder else ():
            for path in sorted(folder.glob(pattern)):
                check_file(kind, name, path)
        reason = _reason_of(error)
        if isinstance(error, OSError) and not Path(name).exists():
            reason = f"there is no folder {name} in {Path.cwd()}, and the Hub says: {reason}"
        raise not_loadable(kind, name, reason) from error


def check_file(kind: str, name: str, path: Path) -> None:
    """Raise a LoadError if a file cannot be opened as what its name says it is."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
        elif path.name == "tokenizer.json":
            Tokenizer.from_file(str(path))
        elif path.suffix == ".jinja":
            path.read_text(encoding="utf-8")
        elif not isinstance(parse_json(path.read_bytes()), dict):
            raise ValueError("it holds no JSON object")
    except Exception as error:
        raise damaged(kind, name, path, f"cannot be used ({_reason_of(error)})") from error


def not_loadable(kind: str, name: str, reason: str) -> LoadError:
    """Return the error for a name that leads to no `kind`; `reason` is a clause."""
    return LoadError(
        f"the {kind} {name!r} cannot be loaded: {reason}. Give a folder that holds"
        f" {NEEDED.get(kind.split()[0], NEEDED['model'])}, or a name on the Hub; for a private one set HF_TOKEN, and"
        " without a network load it once beforehand"
    )


def damaged(kind: str, name: str, path: str | Path, reason: str) -> LoadError:
    """Return the error for one unusable file; `reason` continues the file's name."""
    return LoadError(
        f"the {kind} {name!r} cannot be loaded: {path} {reason}. Download or copy the file again, or repair it"
    )


def _reason_of(error: Exception) -> str:
    text = " ".join(str(error).split())[:LONGEST_REASON].rstrip(".")
    return text if " " in text else f"{type(error).__name__}: {text}"


def _folder(name: str, revision: str | None) -> Path | None:
    """Return the folder with the files of `name`, in the Hub's cache if need be; None if nothing has been loaded."""
    paths = (source_file(name, file, revision) for file in (*CONFIGS, TOKENIZER_SETTINGS))
    return Path(name) if Path(name).is_dir() else next((path.parent for path in paths if path), None)


# --- names ---


def pinned_source(revision: str | None, trust_remote_code: bool | None) -> dict[str, Any]:
    """Return the keywords of `from_pretrained` that say which code and weights to load.

    They always include `trust_remote_code`: without it transformers asks at the terminal, and a "y" would run code
    that nobody has read.
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


def expand(name: str | Path) -> str:
    """Return a folder's path with `~` expanded; any other name unchanged."""
    folder = Path(os.path.expanduser(name))
    return str(folder if folder.exists() else name)


def can_be_on_hub(name: str) -> bool:
    """Return whether a repository on the Hub could have this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_same_source(one: str, other: str) -> bool:
    """Return whether two names lead to the same model: the same text, or paths of the same folder."""
    if one and other and Path(one).is_dir() and Path(other).is_dir():
        return Path(one).resolve() == Path(other).resolve()
    return bool(one) and one == other


def check_source(name: str, kind: str = "model") -> None:
    """Reject a name that cannot lead to a model or tokenizer, before the Hub is asked."""
    path = Path(name)
    if path.is_file():
        raise not_loadable(kind, name, "it is a file")
    if not path.is_dir() and not can_be_on_hub(name):
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise not_loadable(kind, name, f"there is no such folder{where}")
    if path.is_dir() and not kind.startswith("tokenizer") and not any((path / config).is_file() for config in CONFIGS):
        inside = sorted(config.parent.name for pattern in CONFIGS for config in path.glob(f"*/{pattern}"))
        hint = f", but its folder {inside[-1]} does: name that" if inside else ""
        raise not_loadable(kind, name, f"the folder holds neither {' nor '.join(CONFIGS)}{hint}")
    if not path.is_dir() and not (Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")).is_dir():
        # Without a network the loaders would ask for each file six times, within two minutes.
        try:
            get_hf_file_metadata(hf_hub_url(name, CONFIG))
        except httpx2.TransportError as error:
            reason = f"there is no folder {name} in {Path.cwd()}, and the Hub cannot be reached ({error})"
            raise not_loadable(kind, name, reason) from error
        except OSError:
            pass  # What the Hub says of the name, the loader reports.


def source_file(name: str, file: str, revision: str | None = None) -> Path | None:
    """Return the local path of a file; None if it is missing, or its repository cannot be read."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        path = cached_file(name, file, revision=revision, **quiet)
    except OSError:
        return None
    return None if path is None else Path(path)


def is_adapter(name: str, revision: str | None = None) -> bool:
    """Return whether `name` leads to an adapter rather than a model; RuntimeError for a path that leads to neither."""
    check_source(name)
    return find_adapter_config_file(name, revision=revision) is not None


def adapter_base(name: str, revision: str | None = None) -> str | None:
    """Return the name of the base model of the adapter at `name`; None if `name` is a model."""
    if not is_adapter(name, revision):
        return None
    require_safetensors(name, revision)
    config = read_adapter_config(name, revision)
    require_lora(config, f"the adapter {name}")
    base = config.base_model_name_or_path
    if not base or not isinstance(base, str):
        raise ValueError(
            f"the adapter {name!r} does not say what its base model is; set base_model_name_or_path in its"
            " adapter_config.json"
        )
    with base_of(name):
        if is_adapter(base):
            raise RuntimeError(f"{base!r} is an adapter itself; name the model that it was trained on")
    return base


def base_revision(name: str, revision: str | None = None) -> str | None:
    """Return the revision of the base model of the adapter at `name`; None: main."""
    return read_adapter_config(name, revision).revision


def require_safetensors(name: str, revision: str | None = None, folder: str = "") -> None:
    """Reject an adapter whose weights are pickled (`adapter_model.bin`): PEFT would pass them to `torch.load`.

    Every adapter is checked here before it is loaded. `folder` is the subfolder that holds it, if any.
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


# --- models and tokenizers ---


def read_config(kind: str, name: str, **source: Any) -> PreTrainedConfig:
    """Return the config of a model, as AutoConfig makes it."""
    source = {"trust_remote_code": False, **source}
    check_source(name, kind)
    with reading(kind, name, source.get("revision")):
        return AutoConfig.from_pretrained(name, **source)


def load_config(name: str, revision: str | None = None, trust_remote_code: bool | None = None) -> PreTrainedConfig:
    """Return the text config of the model at `name`, or of the base of the adapter at `name`."""
    base = adapter_base(name, revision)
    if base is None:
        return read_config("model", name, **pinned_source(revision, trust_remote_code)).get_text_config()
    with base_of(name):
        source = pinned_source(base_revision(name, revision), None)
        return read_config("model", base, **source).get_text_config()


def load_weights(
    auto_class: Any, kind: str, name: str, *, trust_remote_code: bool, **kwargs: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model with transformers' loading report; every weight is finite."""
    revision = kwargs.get("revision")
    kwargs |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with reading(kind, name, revision):
        model, report = auto_class.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)
    mismatched = report["mismatched_keys"]
    if mismatched:
        tensor, stored, expected = min(mismatched, key=lambda entry: str(entry[0]))
        reason = f"does not belong to the weights next to it: {len(mismatched)} tensors have another shape"
        example = f"the first is {tensor}, {list(stored)} in the file and {list(expected)} by the config"
        raise damaged(kind, name, source_file(name, CONFIG, revision) or CONFIG, f"{reason}, {example}")
    check_finite(model, kind, name)
    vars(model)[REVISION] = revision
    return model, report


def read_tokenizer(name: str, kind: str = "tokenizer", **source: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer at `name`, unchanged; its chat template has an end for a short message."""
    source = {"trust_remote_code": False, **source}
    check_source(name, kind)
    with reading(kind, name, source.get("revision")):
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
        tokenizer("a", verbose=False)
        if tokenizer.chat_template:
            # What else a template refuses here, it may accept in the rows.
            with time_limit("the chat template, for one short message,"), contextlib.suppress(Exception):
                tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    return tokenizer


@torch.no_grad()
def check_finite(model: nn.Module, kind: str = "model", name: str = "") -> None:
    """Reject weights that are NaN or infinite; quantised weights are not checked."""
    bad = {key: p for key, p in model.named_parameters() if not is_finite(p)}
    if bad:
        first, tensor = next(iter(bad.items()))
        more = f", and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
        raise RuntimeError(
            f"the {kind} {name or type(model).__name__!r} has weights that are NaN or infinite:"
            f" {int((~tensor.isfinite()).sum())} of {tensor.numel()} values of {first} ({tensor.dtype}){more}."
            " Download the weights again, or load them in another dtype"
        )


def is_packed(tensor: Tensor) -> bool:
    """Return whether a tensor holds 4-bit weights, whatever dtype they are stored in (`bnb_4bit_quant_storage`)."""
    return type(tensor).__name__ == "Params4bit"


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinity; True if it has no float values."""
    if tensor.is_meta or tensor.numel() == 0 or tensor.dtype not in CHECKED_FLOATS or is_packed(tensor):
        return True
    # One pass and no copy of the tensor; `isfinite` would make one.
    low, high = torch.aminmax(tensor)
    return bool(low.isfinite() & high.isfinite())


# --- adapters ---


def read_adapter_config(name: str, revision: str | None = None) -> PeftConfig:
    """Return the PEFT config of an adapter."""
    if source_file(name, ADAPTER_CONFIG, revision) is None:
        raise not_loadable("adapter", name, f"there is no {ADAPTER_CONFIG}")
    with reading("adapter", name, revision):
        return PeftConfig.from_pretrained(name, revision=revision)


def read_adapter_weights(name: str, revision: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of an adapter on the CPU, under PEFT's names; all are finite."""
    with reading("adapter", name, revision):
        weights = load_peft_weights(name, device="cpu", revision=revision)
        bad = [key for key, tensor in weights.items() if not is_finite(tensor)]
        if bad:
            raise ValueError(f"it has NaN or infinity in {len(bad)} tensors, the first is {bad[0]}")
    return weights


def put_adapter_on(base: PreTrainedModel, name: str, revision: str | None = None, **kwargs: Any) -> PeftModel:
    """Return `base` with the adapter at `name` on it."""
    config = read_adapter_config(name, revision)
    read_adapter_weights(name, revision)
    check_base_marks(base, name, revision)
    with adding_adapter(name):
        match_modules(config, base)
        return PeftModel.from_pretrained(base, name, revision=revision, **kwargs)


@contextlib.contextmanager
def adding_adapter(name: str) -> Iterator[None]:
    """Put the adapter at `name` on a base inside the block."""
    with peft_calls(), reading("adapter", name):
        yield


# --- base marks ---


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
    """Reject an adapter on a base that it was not trained on; an adapter without marks passes."""
    path = source_file(source, BASE_FILE, revision)
    if path is None:
        return
    current = base_marks(base)
    try:
        saved = parse_json(path.read_bytes())
        name, weights = saved["name"], saved["weights"]
        shared = weights.keys() & current["weights"].keys()
        pairs = [pair for key in shared for pair in zip(weights[key], current["weights"][key], strict=True)]
        # A number from float16 may be the neighbour of the one that float32 rounds to.
        most = int(bool(saved.get("is_float16")) != current["is_float16"])
        equal = sum(abs(a - b) <= most for a, b in pairs)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
        # A copy: a view would keep the whole weight where it is cast when it is read (`LateCast`).
        parts.append(flat[:: max(1, -(-flat.numel() // FINGERPRINT_SAMPLES))].clone())
    for dtype in sorted({part.dtype for part in parts}, key=str):
        # One transfer per dtype: one per weight would wait for the GPU each time.
        joined = torch.cat([part for part in parts if part.dtype == dtype]).cpu().contiguous()
        digest.update(joined.view(torch.uint8).numpy().tobytes())
    return f"{base.config.model_type}, sha256 {digest.hexdigest()[:16]}"
