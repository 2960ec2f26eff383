"""What a case wrote, as named numbers, tensors and texts, and how two of them differ."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

RESULTS = ("out/*.safetensors", "out/*.json", "out/data/*.jsonl", "out/samples*.jsonl", "completions-*.jsonl")
# What says how or where a run went, not what came of it.
ASIDE = re.compile(r"manifest|_config|base_model|tokenizer|settings\.json|/_")
WALL_CLOCK = re.compile(
    r"(^|[./])(eval_)?(time/|throughput/|memory/|rank/|train_|[a-z_]*runtime|[a-z_]*per_second|[a-z_]*seconds)"
)


def results(folder: Path) -> dict[str, Any]:
    """Return everything that a case wrote and that the clock does not decide, by file and place in it."""
    found: dict[str, Any] = {}
    for path in sorted(path for pattern in RESULTS for path in folder.glob(pattern)):
        name = path.relative_to(folder).as_posix()
        if ASIDE.search(name):
            continue
        if path.suffix == ".safetensors":
            found |= {f"{name}:{key}": tensor for key, tensor in load_file(path).items()}
        elif name.startswith("completions"):
            # Processes may share the rows otherwise, and a schedule may ask for them in another order.
            found[name] = [json.loads(line) for line in path.read_text().splitlines()]
        elif path.suffix == ".jsonl":
            found |= leaves([json.loads(line) for line in path.read_text().splitlines()], name)
        else:
            found |= leaves(json.loads(path.read_text()), name)
    rows = [json.dumps(row) for name in list(found) if name.startswith("completions") for row in found.pop(name)]
    found |= {f"completions.{number}": row for number, row in enumerate(sorted(rows))}
    states = sorted(folder.glob("out/checkpoint-*/trainer_state.json"), key=lambda p: int(p.parent.name[11:]))
    for state in states[-1:]:
        found |= leaves(json.loads(state.read_text())["log_history"], "log")
    for printed in sorted(folder.glob("stdout-*")):
        text = printed.read_text()
        found |= leaves(json.loads(text), printed.name) if text.startswith("{") else {}
    return {name: value for name, value in found.items() if not WALL_CLOCK.search(name.partition(":")[0])}


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]] | dict[str, Any]:
    """Return the numbers and texts inside lists and mappings, by their place."""
    if not isinstance(value, (dict, list)):
        return {name: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {place: leaf for key, inner in pairs for place, leaf in leaves(inner, f"{name}.{key}").items()}


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of two values: relative above 1, infinite if they cannot be compared."""
    if isinstance(one, (str, bool, type(None))) or isinstance(other, (str, bool, type(None))):
        return 0.0 if one == other and type(one) is type(other) else math.inf
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if a.shape != b.shape:
        return math.inf
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    with np.errstate(invalid="ignore"):
        gaps = np.abs(a - b) / np.maximum(1.0, np.maximum(np.abs(a), np.abs(b)))
    gaps[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    return float(np.nan_to_num(gaps, nan=math.inf, posinf=math.inf).max())


def compare(base: Path, new: Path) -> dict[str, float]:
    """Return how far each result of two folders is from the other; what only one has is infinitely far.

    Raises:
        ValueError: there are no results, so that nothing would be compared.
    """
    one, other = results(base), results(new)
    if not one:
        raise ValueError(f"{base} has no results to compare")
    return {name: difference(one.get(name), other.get(name)) for name in sorted(one.keys() | other.keys())}
