"""Load models, tokenizers and adapters that others wrote.

Every `from_pretrained` of onetrunk is called here. A file that is damaged, or that asks for more memory than its
weights explain, becomes one error message that names the file. transformers, PEFT and safetensors still do the
reading: this module looks at file headers and JSON before they do, and translates what they raise.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import PeftConfig, PeftModel, PeftType, load_peft_weights
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from onetrunk.models.trials import check_chat_template, check_patterns
from onetrunk.utils.files import require_relative
from onetrunk.utils.quiet import peft_calls

MODEL_FILES = "config.json and *.safetensors"
TOKENIZER_FILES = "tokenizer.json"
ADAPTER_FILES = "adapter_config.json and adapter_model.safetensors"
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_CONFIGS = ("config.json", "adapter_config.json")
# Files that the loading of a tokenizer reads, in the order in which they are blamed.
_TOKENIZER_JSON = "config.json tokenizer_config.json tokenizer.json special_tokens_map.json added_tokens.json".split()
_LONGEST_REASON = 300
_JSON_TYPES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}

# Far above any model: a config beyond these is damaged or hostile.
MOST_CONFIG_BYTES = 64 * 2**20
MOST_LAYERS = 10_000
MOST_LABELS = 1_000_000
_LAYER_COUNT = re.compile(r"(num|n|encoder|decoder)_(\w+_)?(layers?|blocks)|depth")
# A model may have this many times the numbers in its weight files, and so many more: heads and buffers are made new.
MOST_TIMES, MOST_NEW = 2, 2**27
CHECKED_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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


def can_be_on_hub(name: str) -> bool:
    """Say whether a repository on the Hub could have this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def damaged(kind: str, name: str, path: str | Path, reason: str | BaseException) -> RuntimeError:
    """Return the error for a model, tokenizer or adapter of which one file cannot be used.

    Args:
        kind: "model", "reward model", "tokenizer" or "adapter".
        name: folder or Hub name of it.
        path: the file.
        reason: a clause that continues the file's name, or the loader's error.
    """
    if isinstance(reason, BaseException):
        reason = f"cannot be used ({_reason(reason)})"
    return RuntimeError(
        f"the {kind} {name!r} cannot be loaded: {path} {reason}. Download or copy the file again, or repair it"
    )


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
    is_sentence = isinstance(error, (ValueError, RuntimeError, HFValidationError)) or " " in text
    return text.rstrip(".") if is_sentence and text else f"{type(error).__name__}: {text}".rstrip(".: ")


@contextlib.contextmanager
def reading(kind: str, name: str, files: str, path: str | Path) -> Iterator[None]:
    """Translate what a library raises inside the block, which holds calls of libraries alone.

    Args:
        kind, name: as in `damaged`.
        files: what a folder must hold, for a name at which there is nothing.
        path: the file to blame for an error that does not come from the file system or the network.

    Raises:
        RuntimeError: names the file.
    """
    try:
        yield
    except OSError as error:
        raise not_loadable(kind, name, files, error) from error
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise damaged(kind, name, path, error) from error
    except BaseException as error:
        # What a Rust library raises where it would crash; it is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise damaged(kind, name, path, error) from error


def source_file(name: str, file: str, revision: str | None = None) -> Path | None:
    """Return where a file of a folder or a Hub repository lies on this machine; None where there is none.

    None also for a repository that is not there or may not be read: the loaders say so.
    """
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        found = cached_file(
            name,
            file,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:
        return None
    return None if found is None else Path(found)


def read_object(kind: str, name: str, path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model, tokenizer or adapter.

    Raises:
        RuntimeError: the file holds something else; names it.
    """
    try:
        size = path.stat().st_size
        value = json.loads(path.read_bytes()) if size <= MOST_CONFIG_BYTES else None
    except ValueError as error:
        raise damaged(kind, name, path, f"is not JSON ({_reason(error)})") from error
    except RecursionError as error:
        raise damaged(kind, name, path, "is nested too deeply") from error
    if size > MOST_CONFIG_BYTES:
        raise damaged(kind, name, path, f"has {size} bytes, and at most {MOST_CONFIG_BYTES} are read")
    if not isinstance(value, dict):
        raise damaged(kind, name, path, f"holds a JSON {_JSON_TYPES[type(value)]}, expected an object")
    return value


# --- models ---


def check_config_file(kind: str, name: str, revision: str | None = None) -> dict[str, Any]:
    """Return the content of config.json, empty where there is none, once it is known to be harmless.

    transformers makes lists as long as the numbers of layers and labels, so these are bounded before it reads them.

    Raises:
        RuntimeError: it holds no JSON object, or such a number is beyond any model.
    """
    path = source_file(name, "config.json", revision)
    if path is None:
        return {}
    content = read_object(kind, name, path)
    for key, value in _numbers(content):
        most = MOST_LABELS if key == "num_labels" else MOST_LAYERS if _LAYER_COUNT.fullmatch(key) else math.inf
        if value > most:
            raise damaged(kind, name, path, f"says {key} {value:.6g}, and at most {most} are supported")
    return content


def _numbers(content: Any) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers of nested objects with their keys."""
    waiting = [content]
    while waiting:  # No recursion: the file decides how deep it is.
        value = waiting.pop()
        if isinstance(value, dict):
            for key, entry in value.items():
                if isinstance(entry, (int, float)) and not isinstance(entry, bool):
                    yield key, entry
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def read_config(kind: str, name: str, **source: Any) -> Any:
    """Return the config of the model at `name`, as AutoConfig makes it.

    Args:
        kind: "model" or "reward model".
        name: folder or Hub name.
        **source: `pinned_source`, or the revision.

    Raises:
        RuntimeError: nothing loadable at `name`, or a config that makes no model; names the file.
    """
    source = {"trust_remote_code": False, **source}
    check_source(name, kind)
    check_config_file(kind, name, source.get("revision"))
    path = _shown(name, "config.json")
    with reading(kind, name, MODEL_FILES, path):
        config = AutoConfig.from_pretrained(name, **source)
        text = config.get_text_config()
        if not isinstance(text, PreTrainedConfig):
            raise ValueError(f"text_config is {text!r}, expected an object")
        sizes = {key: getattr(text, key, None) for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
    for key, value in sizes.items():
        if value is not None and not (isinstance(value, int) and value > 0):
            raise damaged(kind, name, path, f"says {key} {value!r}, expected a number above 0")
    return config


def load_weights(
    auto_class: Any, kind: str, name: str, config: Any, *, trust_remote_code: bool, **kwargs: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model at `name` with transformers' loading report; every weight is finite.

    Args:
        auto_class: of transformers, with `from_pretrained`.
        kind, name: as in `damaged`.
        config: `read_config` of it.
        trust_remote_code: as `pinned_source` says it.
        **kwargs: for `from_pretrained`.

    Raises:
        RuntimeError: a damaged file, a config that does not belong to the weights, or a weight that is NaN or
            infinite.
    """
    revision = kwargs.get("revision")
    shapes = check_weight_files(kind, name, revision)
    _check_generation_config(kind, name, revision)
    path = _shown(name, "config.json")
    if shapes and not trust_remote_code:
        _check_size(auto_class, kind, name, config, shapes)
    with reading(kind, name, MODEL_FILES, path):
        model, report = auto_class.from_pretrained(
            name,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **kwargs,
        )
    if report["mismatched_keys"]:
        tensor, written, expected = min(report["mismatched_keys"], key=lambda entry: str(entry[0]))
        raise damaged(
            kind,
            name,
            path,
            f"does not belong to the weights beside it: {len(report['mismatched_keys'])} tensors have another shape,"
            f" the first is {tensor}, {list(written)} in the file and {list(expected)} by the config",
        )
    check_finite(model, kind, name)
    return model, report


def _check_generation_config(kind: str, name: str, revision: str | None) -> None:
    """Refuse a damaged generation_config.json: without a word transformers would take its own end tokens instead."""
    path = source_file(name, "generation_config.json", revision)
    if path is None:
        return
    end = read_object(kind, name, path).get("eos_token_id")
    ids = end if isinstance(end, list) else [] if end is None else [end]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise damaged(kind, name, path, f"says eos_token_id {end!r}, expected a token id or a list of them")


def check_weight_files(kind: str, name: str, revision: str | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the safetensors files of a model, read off their headers.

    Empty where there are no such files, which `from_pretrained` says.

    Raises:
        RuntimeError: a file that is damaged or cut off, or an index that names files which are not there.
    """
    single = source_file(name, WEIGHTS_FILE, revision)
    if single is not None:
        return read_shapes(kind, name, single)
    index = source_file(name, INDEX_FILE, revision)
    if index is None:
        return {}
    files = read_object(kind, name, index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise damaged(kind, name, index, "has no weight_map from tensors to files")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(files.values())):
        try:
            require_relative(file, name, "a file in its weight_map")
        except ValueError as error:
            raise damaged(kind, name, index, error) from error
        path = source_file(name, file, revision)
        if path is None:
            raise damaged(kind, name, index, f"names {file}, which is not there: the download is not complete")
        shapes |= read_shapes(kind, name, path)
    return shapes


def read_shapes(kind: str, name: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a safetensors file; only its header is read.

    Raises:
        RuntimeError: the file is damaged or cut off.
    """
    try:
        with safe_open(path, "pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size
        raise damaged(
            kind,
            name,
            path,
            f"is damaged or only partly downloaded: it has {size} bytes and is no whole safetensors file"
            f" ({_reason(error)})",
        ) from error


def _check_size(auto_class: Any, kind: str, name: str, config: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a config that describes a much larger model than its weights: what is missing would be made in memory."""
    path = _shown(name, "config.json")
    layers = getattr(config.get_text_config(), "num_hidden_layers", None) or 0
    if layers > len(shapes):
        raise damaged(kind, name, path, f"says {layers} layers, and the weights beside it are {len(shapes)} tensors")
    most = sum(map(math.prod, shapes.values()))
    if getattr(config, "quantization_config", None) is not None:
        most *= 8  # One stored number may hold several.
    most = MOST_TIMES * most + MOST_NEW
    try:
        with torch.device("meta"), peft_calls():
            empty = auto_class.from_config(copy.deepcopy(config), trust_remote_code=False)
    except Exception:
        return  # `from_pretrained` makes the model in the same way, and its error is translated.
    size = sum(tensor.numel() for tensor in (*empty.parameters(), *empty.buffers()))
    if size > most:
        stored = sum(map(math.prod, shapes.values()))
        raise damaged(
            kind, name, path, f"describes a model of {size:.3g} numbers, and the weights beside it hold {stored:.3g}"
        )


@torch.no_grad()
def check_finite(model: nn.Module, kind: str = "model", name: str = "") -> None:
    """Refuse weights that are NaN or infinite. Quantised weights are not looked at.

    Raises:
        RuntimeError: names the first tensor and how many there are.
    """
    bad = {key: p for key, p in model.named_parameters() if not is_finite(p)}
    if bad:
        first, tensor = next(iter(bad.items()))
        more = f", and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
        raise RuntimeError(
            f"the {kind} {name or type(model).__name__!r} has weights that are NaN or infinite:"
            f" {int((~tensor.isfinite()).sum())} of {tensor.numel()} values of {first} ({tensor.dtype}){more}."
            " Download the weights again, or load them in another dtype"
        )


def is_finite(tensor: Tensor) -> bool:
    """Say whether a tensor has no NaN and no infinity; True for one without values of its own, or not of floats."""
    if tensor.is_meta or tensor.numel() == 0 or tensor.dtype not in CHECKED_FLOATS:
        return True
    # One pass, and no copy of the tensor, as `isfinite` would make.
    low, high = torch.aminmax(tensor)
    return bool(low.isfinite() & high.isfinite())


def _shown(name: str, file: str) -> str:
    return str(Path(name) / file) if Path(name).is_dir() else f"{file} in {name}"


# --- tokenizers ---


def read_tokenizer(name: str, kind: str = "tokenizer", **source: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer at `name` as it is; its chat template, if there is one, has run once.

    Args:
        name: folder or Hub name.
        kind: for errors: "tokenizer", or whose.
        **source: `pinned_source`, or the revision.

    Raises:
        RuntimeError: nothing loadable at `name`, a damaged file, or a chat template that cannot run.
        ValueError: nothing can lie at this name.
    """
    source = {"trust_remote_code": False, **source}
    check_source(name, "tokenizer", TOKENIZER_FILES)
    revision = source.get("revision")
    check_config_file(kind, name, revision)
    try:
        with reading(kind, name, TOKENIZER_FILES, _shown(name, "tokenizer_config.json")):
            tokenizer = AutoTokenizer.from_pretrained(name, **source)
            tokenizer("a", verbose=False)
    except RuntimeError as error:
        raise _tokenizer_fault(kind, name, revision) or error from error.__cause__
    try:
        check_chat_template(tokenizer)
    except ValueError as error:
        template = source_file(name, "chat_template.jinja", revision) or _shown(name, "tokenizer_config.json")
        raise damaged(kind, name, template, f"has a chat template that {error}") from error
    return tokenizer


def _tokenizer_fault(kind: str, name: str, revision: str | None) -> RuntimeError | None:
    """Return the error that names the damaged file of a tokenizer, None where no file alone is to blame."""
    paths = {file: source_file(name, file, revision) for file in _TOKENIZER_JSON}
    try:
        for path in paths.values():
            if path is not None:
                read_object(kind, name, path)
        if paths["config.json"] is not None:
            read_config("model", name, revision=revision)
    except RuntimeError as error:
        return error
    template = source_file(name, "chat_template.jinja", revision)
    try:
        if template is not None:
            template.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return damaged(kind, name, template, f"is not UTF-8 text ({error.reason})")
    path = paths["tokenizer.json"]
    if path is None:
        known = Path(name).is_dir()
        reason = "the folder holds no tokenizer that transformers can read"
        return not_loadable(kind, name, TOKENIZER_FILES, reason) if known else None
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:
        return damaged(kind, name, path, error)
    return None


# --- adapters ---


def read_adapter_config(name: str, revision: str | None = None) -> PeftConfig:
    """Return the PEFT config of the adapter at `name`.

    Raises:
        RuntimeError: it is no JSON object, of an unknown kind, or its rank is not that of the weights beside it.
    """
    path = source_file(name, "adapter_config.json", revision)
    if path is None:
        raise not_loadable("adapter", name, ADAPTER_FILES, "there is no adapter_config.json")
    content = read_object("adapter", name, path)
    kinds = [kind.value for kind in PeftType]
    if content.get("peft_type") not in kinds:
        raise damaged("adapter", name, path, f"says peft_type {content.get('peft_type')!r}, which PEFT does not know")
    with reading("adapter", name, ADAPTER_FILES, path):
        config = PeftConfig.from_pretrained(name, revision=revision)
    base = config.base_model_name_or_path
    if base is not None and not isinstance(base, str):
        raise damaged("adapter", name, path, f"says base_model_name_or_path {base!r}, expected a name or path")
    _check_copies(name, path, config)
    _check_ranks(name, path, config, revision)
    return config


def _check_copies(name: str, path: Path, config: PeftConfig) -> None:
    """Refuse an adapter that would copy the layers of its base without a bound, or scale its update by infinity."""
    ranges = getattr(config, "layer_replication", None) or []
    try:
        copies = sum(len(range(start, end)) for start, end in ranges)
        scales = [getattr(config, "lora_alpha", 1), *(getattr(config, "alpha_pattern", None) or {}).values()]
        is_finite_scale = all(scale is None or math.isfinite(scale) for scale in scales)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise damaged("adapter", name, path, error) from error
    if copies > MOST_LAYERS:
        raise damaged("adapter", name, path, f"makes {copies} layers (layer_replication), at most {MOST_LAYERS}")
    if not is_finite_scale:
        raise damaged("adapter", name, path, f"scales its update by {scales} (lora_alpha), expected finite numbers")


def _check_ranks(name: str, path: Path, config: PeftConfig, revision: str | None) -> None:
    """Refuse ranks beyond the adapter's own weights: PEFT makes its matrices in memory before it compares."""
    weights = source_file(name, ADAPTER_WEIGHTS_FILE, revision)
    pattern = getattr(config, "rank_pattern", None) or {}
    if not isinstance(pattern, dict):
        raise damaged("adapter", name, path, f"says rank_pattern {pattern!r}, expected an object")
    ranks = {"r": getattr(config, "r", None), "num_virtual_tokens": getattr(config, "num_virtual_tokens", None)}
    ranks = {key: rank for key, rank in {**ranks, **pattern}.items() if rank is not None}
    if weights is None:
        return
    shapes = read_shapes("adapter", name, weights)
    rows = [shape[0] for key, shape in shapes.items() if re.search(r"lora_(embedding_)?A\b", key) and shape]
    # With a pattern, `r` may be the rank of no module.
    most = max(rows) if rows and not pattern else max((size for shape in shapes.values() for size in shape), default=0)
    for key, rank in ranks.items():
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank <= max(most, 1):
            raise damaged(
                "adapter", name, path, f"says {key} {rank!r}, and the weights beside it are of rank {most} at most"
            )


def read_adapter_weights(name: str, revision: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of the adapter at `name` on the CPU, under PEFT's names; all are finite.

    Raises:
        RuntimeError: there are none, their file is damaged, or a value is NaN or infinite.
    """
    path = source_file(name, ADAPTER_WEIGHTS_FILE, revision)
    if path is not None:
        read_shapes("adapter", name, path)
    shown = path or _shown(name, ADAPTER_WEIGHTS_FILE)
    with reading("adapter", name, ADAPTER_FILES, shown):
        weights = load_peft_weights(name, device="cpu", revision=revision)
    bad = [key for key, tensor in weights.items() if not is_finite(tensor)]
    if bad:
        raise damaged("adapter", name, shown, f"has NaN or infinity in {len(bad)} tensors, the first is {bad[0]}")
    return weights


def put_adapter_on(base: PreTrainedModel, name: str, revision: str | None = None, **kwargs: Any) -> PeftModel:
    """Return `base` with the adapter at `name` on it, in PEFT's model.

    Args:
        base: loaded model.
        name: folder or Hub name of the adapter.
        **kwargs: for PeftModel.from_pretrained.

    Raises:
        RuntimeError: a damaged file, or patterns of module names that take too long to match; names the file.
    """
    config = read_adapter_config(name, revision)
    read_adapter_weights(name, revision)
    path = _shown(name, "adapter_config.json")
    try:
        check_patterns(config, [key for key, _ in base.named_modules()])
    except ValueError as error:
        raise damaged("adapter", name, path, str(error)) from error
    with peft_calls(), reading("adapter", name, ADAPTER_FILES, path):
        return PeftModel.from_pretrained(base, name, revision=revision, **kwargs)
