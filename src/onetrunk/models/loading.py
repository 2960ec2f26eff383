"""Load models, tokenizers and adapters that others wrote.

Every `from_pretrained` of onetrunk is called here. A file that is damaged, or that asks for more memory than its
weights explain, becomes one LoadError that names the file. transformers, PEFT and safetensors still do the reading:
this module checks file headers and JSON before they do, and translates what they raise.

In every signature `kind` is for the message: "model", "reward model", "adapter", or it begins with "tokenizer". `name`
is a folder or a name on the Hub, `revision` a branch, tag or commit there, `source` what `pinned_source` returns.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable, Iterator
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

# What a folder must hold, by the first word of `kind`; anything else is a model.
FILES = {"tokenizer": "tokenizer.json", "adapter": "adapter_config.json and adapter_model.safetensors"}
MODEL_FILES = "config.json and *.safetensors"
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
TEMPLATE_FILE = "chat_template.jinja"
CONFIGS = ("config.json", "adapter_config.json")
# The JSON files that a tokenizer reads, in the order in which they are blamed.
TOKENIZER_JSON = "config.json tokenizer_config.json tokenizer.json special_tokens_map.json added_tokens.json".split()
LONGEST_REASON = 300
JSON_TYPES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}

# Far above any model: a config beyond these is damaged or hostile.
MOST_LAYERS = 10_000
MOST_LABELS = 1_000_000
MOST_ADAPTER_CONFIG_BYTES = 10_000_000
LAYER_COUNT = re.compile(r"(num|n|encoder|decoder)_(\w+_)?(layers?|blocks)|depth")
# A model may hold this many times the numbers of its weight files, plus this many: heads and buffers are new.
MOST_TIMES, MOST_NEW = 2, 2**27
CHECKED_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# --- errors ---


class LoadError(RuntimeError):
    """A name that leads nowhere, or a file that cannot be used; the message names it and says what to do."""


def not_loadable(kind: str, name: str, reason: str | Exception) -> LoadError:
    """Return the error for a name that leads to no `kind`; `reason` is a clause, or the loader's error."""
    if isinstance(reason, Exception):
        reason = (str(reason).strip().splitlines() or [type(reason).__name__])[0].rstrip(".")
        if not Path(name).exists():
            reason = f"there is no folder {name} in {Path.cwd()}, and the Hub says: {reason}"
    files = FILES.get(kind.split()[0], MODEL_FILES)
    return LoadError(
        f"the {kind} {name!r} cannot be loaded: {reason}. Give a folder that holds {files}, or a name on the Hub; for"
        " a private one set HF_TOKEN, and without a network load it once beforehand"
    )


def damaged(kind: str, name: str, path: str | Path, reason: str | BaseException) -> LoadError:
    """Return the error for one unusable file; `reason` continues the file's name, or is the loader's error."""
    if isinstance(reason, BaseException):
        reason = f"cannot be used ({_reason(reason)})"
    return LoadError(
        f"the {kind} {name!r} cannot be loaded: {path} {reason}. Download or copy the file again, or repair it"
    )


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."
    is_readable = isinstance(error, (ValueError, RuntimeError, HFValidationError)) or " " in text
    return text.rstrip(".") if is_readable and text else f"{type(error).__name__}: {text}".rstrip(".: ")


@contextlib.contextmanager
def reading(kind: str, name: str, path: str | Path) -> Iterator[None]:
    """Translate what a library or a check raises inside the block into a LoadError.

    It blames the file `path` for every error that comes neither from the file system nor from the network.
    """
    try:
        yield
    except OSError as error:
        raise not_loadable(kind, name, error) from error
    except (LoadError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        # A Rust library that panics raises a BaseException of this name.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise damaged(kind, name, path, error) from error


# --- files ---


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


def expand(name: str | Path) -> str:
    """Return a folder's path with `~` expanded; any other name unchanged."""
    folder = Path(name).expanduser()
    return str(folder if folder.exists() else name)


def can_be_on_hub(name: str) -> bool:
    """Return whether a repository on the Hub could have this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


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


def _shown(name: str, file: str) -> str:
    return str(Path(name) / file) if Path(name).is_dir() else f"{file} in {name}"


def read_object(
    kind: str, name: str, path: Path, check: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the JSON object in a file; raise a LoadError that names the file if it holds something else.

    Args:
        check: called with each object in the file, however deep, the inner ones first; returns it.
    """
    try:
        value = json.loads(path.read_bytes(), object_hook=check)
    except ValueError as error:
        raise damaged(kind, name, path, f"is not JSON ({_reason(error)})") from error
    except RecursionError as error:
        raise damaged(kind, name, path, "is nested too deeply") from error
    if not isinstance(value, dict):
        raise damaged(kind, name, path, f"holds a JSON {JSON_TYPES[type(value)]}, expected an object")
    return value


def read_shapes(kind: str, name: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a safetensors file, from its header."""
    try:
        with safe_open(path, "pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        reason = f"is damaged or only partly downloaded: it has {path.stat().st_size} bytes and is no whole"
        raise damaged(kind, name, path, f"{reason} safetensors file ({_reason(error)})") from error


# --- models ---


def read_config(kind: str, name: str, **source: Any) -> PreTrainedConfig:
    """Return the config of a model, as AutoConfig makes it."""
    source = {"trust_remote_code": False, **source}
    check_source(name, kind)
    check_config_file(kind, name, source.get("revision"))
    path = _shown(name, "config.json")
    with reading(kind, name, path):
        config = AutoConfig.from_pretrained(name, **source)
        text = config.get_text_config()
        if not isinstance(text, PreTrainedConfig):
            raise ValueError(f"text_config is {text!r}, expected an object")
        for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
            value = getattr(text, key, None)
            if value is not None and not (isinstance(value, int) and value > 0):
                raise ValueError(f"it says {key} {value!r}, expected a number above 0")
    return config


def check_config_file(kind: str, name: str, revision: str | None = None) -> dict[str, Any]:
    """Return the content of config.json, empty if there is none.

    transformers builds lists as long as the numbers of layers and labels, so these are bounded before it reads them.
    """
    path = source_file(name, "config.json", revision)

    def check(fields: dict[str, Any]) -> dict[str, Any]:
        for key, number in fields.items():
            most = MOST_LABELS if key == "num_labels" else MOST_LAYERS if LAYER_COUNT.fullmatch(key) else math.inf
            if isinstance(number, (int, float)) and number > most:
                raise damaged(kind, name, path, f"says {key} {number:.6g}, and at most {most} are supported")
        return fields

    return {} if path is None else read_object(kind, name, path, check)


def load_weights(
    auto_class: Any, kind: str, name: str, config: PreTrainedConfig, *, trust_remote_code: bool, **kwargs: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model with transformers' loading report; every weight is finite.

    Args:
        auto_class: of transformers, with `from_pretrained`.
        config: from `read_config`.
        **kwargs: for `from_pretrained`.
    """
    revision = kwargs.get("revision")
    shapes = check_weight_files(kind, name, revision)
    _check_generation_config(kind, name, revision)
    path = _shown(name, "config.json")
    if shapes and not trust_remote_code:
        _check_size(auto_class, kind, name, config, shapes)
    kwargs |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with reading(kind, name, path):
        model, report = auto_class.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)
    mismatched = report["mismatched_keys"]
    if mismatched:
        tensor, stored, expected = min(mismatched, key=lambda entry: str(entry[0]))
        reason = f"does not belong to the weights next to it: {len(mismatched)} tensors have another shape"
        example = f"the first is {tensor}, {list(stored)} in the file and {list(expected)} by the config"
        raise damaged(kind, name, path, f"{reason}, {example}")
    check_finite(model, kind, name)
    return model, report


def check_weight_files(kind: str, name: str, revision: str | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a model's safetensors files; empty if there are no such files."""
    single = source_file(name, WEIGHTS_FILE, revision)
    if single is not None:
        return read_shapes(kind, name, single)
    index = source_file(name, INDEX_FILE, revision)
    if index is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    with reading(kind, name, index):
        files = read_object(kind, name, index).get("weight_map")
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise ValueError("it has no weight_map from tensors to files")
        for file in sorted(set(files.values())):
            require_relative(file, name, "a file in its weight_map")
            path = source_file(name, file, revision)
            if path is None:
                raise ValueError(f"it names {file}, which is not there: the download is not complete")
            shapes |= read_shapes(kind, name, path)
    return shapes


def _check_generation_config(kind: str, name: str, revision: str | None) -> None:
    # transformers would silently use its own end tokens instead of those of a damaged file.
    path = source_file(name, "generation_config.json", revision)
    end = None if path is None else read_object(kind, name, path).get("eos_token_id")
    ids = end if isinstance(end, list) else [] if end is None else [end]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise damaged(kind, name, path, f"says eos_token_id {end!r}, expected a token id or a list of them")


def empty_model(auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel | None:
    """Return the model of a config without memory for weights; None if it cannot be made.

    `from_pretrained` makes the model in the same way, and its error is translated.
    """
    try:
        with torch.device("meta"), peft_calls():
            return auto_class.from_config(copy.deepcopy(config), trust_remote_code=False)
    except Exception:
        return None


def _check_size(
    auto_class: Any, kind: str, name: str, config: PreTrainedConfig, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Reject a config of a much larger model than its weights: the missing tensors would be made in memory."""
    path = _shown(name, "config.json")
    layers = getattr(config.get_text_config(), "num_hidden_layers", None) or 0
    if layers > len(shapes):
        raise damaged(kind, name, path, f"says {layers} layers, and the weights next to it are {len(shapes)} tensors")
    empty = empty_model(auto_class, config)
    if empty is None:
        return
    size = sum(tensor.numel() for tensor in (*empty.parameters(), *empty.buffers()))
    stored = sum(map(math.prod, shapes.values()))
    # One stored number of a quantised weight may hold several.
    per_number = 1 if getattr(config, "quantization_config", None) is None else 8
    if size > MOST_TIMES * per_number * stored + MOST_NEW:
        reason = f"describes a model of {size:.3g} numbers, and the weights next to it hold {stored:.3g}"
        raise damaged(kind, name, path, reason)


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


# --- tokenizers ---


def read_tokenizer(name: str, kind: str = "tokenizer", **source: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer at `name`, unchanged; its chat template, if it has one, has run once."""
    source = {"trust_remote_code": False, **source}
    revision = source.get("revision")
    check_source(name, kind)
    check_config_file(kind, name, revision)
    settings = _shown(name, "tokenizer_config.json")
    try:
        with reading(kind, name, settings):
            tokenizer = AutoTokenizer.from_pretrained(name, **source)
            tokenizer("a", verbose=False)
    except LoadError:
        _check_tokenizer_files(kind, name, revision)
        raise
    with reading(kind, name, source_file(name, TEMPLATE_FILE, revision) or settings):
        check_chat_template(tokenizer)
    return tokenizer


def _check_tokenizer_files(kind: str, name: str, revision: str | None) -> None:
    """Raise the error that names the damaged file of a tokenizer, if a single file is to blame."""
    paths = {file: source_file(name, file, revision) for file in (*TOKENIZER_JSON, TEMPLATE_FILE)}
    for file in TOKENIZER_JSON:
        if paths[file] is not None:
            read_object(kind, name, paths[file])
    if paths["config.json"] is not None:
        read_config("model", name, revision=revision)
    template, tokenizer = paths[TEMPLATE_FILE], paths["tokenizer.json"]
    if template is not None:
        try:
            template.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise damaged(kind, name, template, f"is not UTF-8 text ({error.reason})") from error
    if tokenizer is not None:
        with reading(kind, name, tokenizer):
            Tokenizer.from_file(str(tokenizer))
    elif Path(name).is_dir():
        raise not_loadable(kind, name, "the folder holds no tokenizer that transformers can read")


# --- adapters ---


def read_adapter_config(name: str, revision: str | None = None) -> PeftConfig:
    """Return the PEFT config of an adapter, once it has been compared with the shapes of the adapter's weights."""
    path = source_file(name, "adapter_config.json", revision)
    if path is None:
        raise not_loadable("adapter", name, "there is no adapter_config.json")
    weights = source_file(name, ADAPTER_WEIGHTS_FILE, revision)
    with reading("adapter", name, path):
        if (size := path.stat().st_size) > MOST_ADAPTER_CONFIG_BYTES:
            raise ValueError(f"it has {size} bytes, at most {MOST_ADAPTER_CONFIG_BYTES}")
        peft_type = read_object("adapter", name, path).get("peft_type")
        if peft_type not in [known.value for known in PeftType]:
            raise ValueError(f"it says peft_type {peft_type!r}, which PEFT does not know")
        config = PeftConfig.from_pretrained(name, revision=revision)
        _check_adapter_fields(config)
        if weights is not None:
            _check_ranks(config, read_shapes("adapter", name, weights))
    return config


def _check_adapter_fields(config: PeftConfig) -> None:
    base = config.base_model_name_or_path
    if base is not None and not isinstance(base, str):
        raise ValueError(f"it says base_model_name_or_path {base!r}, expected a name or path")
    copies = sum(len(range(*pair)) for pair in getattr(config, "layer_replication", None) or [])
    if copies > MOST_LAYERS:
        raise ValueError(f"it makes {copies} layers (layer_replication), at most {MOST_LAYERS}")
    scales = [getattr(config, "lora_alpha", 1), *(getattr(config, "alpha_pattern", None) or {}).values()]
    if not all(scale is None or math.isfinite(scale) for scale in scales):
        raise ValueError(f"it scales its update by {scales} (lora_alpha), expected finite numbers")


def _check_ranks(config: PeftConfig, shapes: dict[str, tuple[int, ...]]) -> None:
    """Reject a rank beyond the adapter's weights: PEFT makes its matrices in memory before it compares."""
    pattern = getattr(config, "rank_pattern", None) or {}
    if not isinstance(pattern, dict):
        raise ValueError(f"it says rank_pattern {pattern!r}, expected an object")
    ranks = {key: getattr(config, key, None) for key in ("r", "num_virtual_tokens")} | pattern
    rows = [shape[0] for key, shape in shapes.items() if re.search(r"lora_(embedding_)?A\b", key) and shape]
    # With a pattern, `r` may be the rank of no module.
    most = max(rows) if rows and not pattern else max((size for shape in shapes.values() for size in shape), default=0)
    for key, rank in ranks.items():
        if rank is not None and (type(rank) is not int or not 0 < rank <= max(most, 1)):
            raise ValueError(f"it says {key} {rank!r}, and the weights next to it are of rank {most} at most")


def read_adapter_weights(name: str, revision: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of an adapter on the CPU, under PEFT's names; all are finite.

    `read_adapter_config` comes first: it says whether the file is whole.
    """
    with reading("adapter", name, _shown(name, ADAPTER_WEIGHTS_FILE)):
        weights = load_peft_weights(name, device="cpu", revision=revision)
        bad = [key for key, tensor in weights.items() if not is_finite(tensor)]
        if bad:
            raise ValueError(f"it has NaN or infinity in {len(bad)} tensors, the first is {bad[0]}")
    return weights


def put_adapter_on(base: PreTrainedModel, name: str, revision: str | None = None, **kwargs: Any) -> PeftModel:
    """Return `base` with the adapter at `name` on it."""
    config = read_adapter_config(name, revision)
    read_adapter_weights(name, revision)
    with adding_adapter(config, base, name):
        return PeftModel.from_pretrained(base, name, revision=revision, **kwargs)


@contextlib.contextmanager
def adding_adapter(config: PeftConfig, base: nn.Module, name: str) -> Iterator[None]:
    """Put an adapter on `base` inside the block, once its patterns of module names have been tried."""
    with peft_calls(), reading("adapter", name, _shown(name, "adapter_config.json")):
        check_patterns(config, [key for key, _ in base.named_modules()])
        yield
