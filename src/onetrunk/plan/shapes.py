"""The shape of a model from its config.json, read as JSON; or from `models.yaml`, for public models by name."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from onetrunk.costs import ModelShape
from onetrunk.plan.ranges import SHAPES, require_ranges
from onetrunk.utils.files import read_json, read_yaml

FILE = Path(__file__).with_name("models.yaml")
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
# Endings of names that do not change a shape.
TUNED = ("-instruct", "-chat", "-base", "-it", "-hf", "-chat-hf")
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
ITEMSIZES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0}


@dataclass(frozen=True)
class ModelFacts:
    """What a plan knows of a model.

    Args:
        name: as it was given.
        shape: of its decoder.
        itemsize: bytes of a weight in the checkpoint.
        source: where the shape comes from, for people.
    """

    name: str
    shape: ModelShape
    itemsize: float
    source: str


def read_model(name: str) -> ModelFacts:
    """Return the facts of a model: a folder, a config.json, a name in the Hub's cache, or one of models.yaml.

    Raises:
        ValueError: there is no config, or it is not one of a decoder; the message says what to give instead.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _facts(name, _json(path), str(path))
    if path.is_dir():
        return _of_folder(name, path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(
            f"the model {name!r} does not exist (working folder {Path.cwd()}); make it first, or give --model a folder"
            " with a config.json, the path of a config.json, or a name such as Qwen/Qwen2.5-7B"
        )
    cached = _in_cache(name)
    if cached is not None:
        return _facts(name, _json(cached), str(cached))
    shapes = known_shapes()
    found = next((full for full in shapes if _plain(full) == _plain(name)), None)
    if found is None:
        found = next((full for full in shapes if _plain(full).partition("/")[2] == _plain(name)), None)
    if found is not None:
        return ModelFacts(name, shapes[found], 2.0, f"the table of plan/models.yaml ({found})")
    near = difflib.get_close_matches(_plain(name), {_plain(full): full for full in shapes}, n=3, cutoff=0.5)
    names = [full for full in shapes if _plain(full) in near]
    hint = f"models of nearly this name: {', '.join(names)}; " if names else ""
    raise ValueError(
        f"no config.json of the model {name!r} is on this machine, and nothing is downloaded: {hint}give --model a"
        " folder with a config.json or the path of one; `hf download NAME config.json` fetches it"
    )


@functools.cache
def known_shapes() -> Mapping[str, ModelShape]:
    """Return the shapes of models.yaml by name."""
    content, _ = read_yaml(FILE)
    shapes = {}
    for name, entry in content.items():
        vocab, hidden, layers, width, heads, kv_heads, head_dim = entry["dims"]
        experts, of_token, shared, size, dense = entry.get("experts", (0, 0, 0, 0, 0))
        shapes[name] = ModelShape(
            vocab, hidden, layers, width, heads, kv_heads, head_dim, entry.get("gated", True), entry["tied"],
            experts, of_token, shared, size, dense,
        )  # fmt: skip
    return shapes


def shape_of_config(config: Mapping[str, Any], place: str) -> ModelShape:
    """Return the shape in the content of a config.json; of a multimodal model, that of its text model.

    Raises:
        ValueError: it is not the config of a decoder.
    """
    text = config.get("text_config")
    values = {**config, **text} if isinstance(text, dict) else dict(config)
    # Names of GPT-2 and its relatives.
    for old, new in (("n_embd", "hidden_size"), ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads")):
        if old in values:
            values.setdefault(new, values[old])
    wrong = [key for key in NEEDED if not isinstance(values.get(key), int) or values[key] < 1]
    if wrong:
        raise ValueError(
            f"{place} is no config of a language model: {', '.join(wrong)} is missing or no number above 0"
        )
    values.setdefault("model_type", "")
    try:
        shape = ModelShape.from_config(SimpleNamespace(**values))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{place} has a text or a list where a number belongs ({error}); mend it") from error
    numbers = {key: getattr(shape, name) for name, (key, _, _) in SHAPES.items()}
    require_ranges(numbers, {key: (least, most) for key, least, most in SHAPES.values()}, f"{place}: ")
    for part, whole in (("num_kv_heads", "num_heads"), ("experts_per_token", "num_experts"),
                        ("num_dense_layers", "num_layers")):  # fmt: skip
        if getattr(shape, part) > getattr(shape, whole):
            raise ValueError(f"{place}: {SHAPES[part][0]} is larger than {SHAPES[whole][0]}; mend one of them")
    return shape


def _facts(name: str, config: Any, place: str) -> ModelFacts:
    if not isinstance(config, dict):
        raise ValueError(f"{place} holds no mapping; give the config.json of a model")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return ModelFacts(name, shape_of_config(config, place), ITEMSIZES.get(dtype, 2.0), place)


def _of_folder(name: str, folder: Path) -> ModelFacts:
    if (folder / CONFIG).is_file():
        return _facts(name, _json(folder / CONFIG), str(folder / CONFIG))
    if (folder / ADAPTER_CONFIG).is_file():
        base = _json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if isinstance(base, str) and base != name:
            return read_model(base)
    raise ValueError(f"{folder} has no {CONFIG}, so its size is unknown; give --model a folder that has one")


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _in_cache(name: str) -> Path | None:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folder = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    return next(iter(sorted(folder.glob(f"*/{CONFIG}"))), None)


def _plain(name: str) -> str:
    plain = name.lower()
    for _ in range(2):
        for ending in TUNED:
            plain = plain.removesuffix(ending)
    return plain
