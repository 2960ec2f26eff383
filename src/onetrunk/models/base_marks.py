"""What an adapter remembers of the base that it was trained on, and the check where it is put on a base again.

A few numbers of each weight that is not quantised, as bfloat16: the same base in float32, bfloat16 or float16, or
quantised, has the same numbers, with rounding in a few; another fine-tuning of it has not. Knows parameters by their
names, and one small file beside an adapter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import cached_file

from onetrunk.files import atomic_write_json

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
