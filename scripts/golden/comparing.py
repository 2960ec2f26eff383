"""What a case wrote, as named numbers, tensors and texts, and how two of them differ."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

RESULTS = ("*.safetensors", "metrics.json", "score_scale.json", "statistics.json", "data/*.jsonl", "samples*.jsonl")
WALL_CLOCK = re.compile(
    r"(^|[./])(eval_)?(time/|throughput/|memory/|rank/|[a-z_]*runtime|[a-z_]*per_second|[a-z_]*seconds)"
)
SHOWN = 5


def results(folder: Path) -> dict[str, Any]:
    """Return everything that a case wrote and that the clock does not decide, by file and place in it."""
    found: dict[str, Any] = {}
    for path in sorted(path for pattern in RESULTS for path in (folder / "out").glob(pattern)):
        name = path.name
        if path.suffix == ".safetensors":
            found |= {f"{name}:{key}": tensor for key, tensor in load_file(path).items()}
        elif path.suffix == ".jsonl":
            found |= leaves([json.loads(line) for line in path.read_text().splitlines()], name)
        else:
            found |= leaves(json.loads(path.read_text()), name)
    # Whichever process scored a row, when, and how often.
    sampled = {line for path in folder.glob("completions-*.jsonl") for line in path.read_text().splitlines()}
    found |= leaves(sorted(sampled), "completions")
    states = sorted(folder.glob("out/checkpoint-*/trainer_state.json"), key=lambda p: int(p.parent.name[11:]))
    for state in states[-1:]:
        found |= leaves(json.loads(state.read_text())["log_history"], "log")
    for printed in sorted(folder.glob("stdout-*")):
        with suppress(ValueError):  # Only some commands print JSON.
            found |= leaves(json.loads(printed.read_text()), printed.name)
    return {name: value for name, value in found.items() if not WALL_CLOCK.search(name.partition(":")[0])}


def leaves(value: Any, name: str) -> dict[str, Any]:
    """Return the numbers and texts inside lists and mappings, by their place."""
    if not isinstance(value, (dict, list)):
        return {name: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {place: leaf for key, inner in pairs for place, leaf in leaves(inner, f"{name}.{key}").items()}


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of two values: relative above 1, infinite if they cannot be compared."""
    if not all(isinstance(value, (int, float, np.ndarray)) for value in (one, other)):
        return 0.0 if type(one) is type(other) and one == other else math.inf
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if a.shape != b.shape or getattr(one, "dtype", None) != getattr(other, "dtype", None):
        return math.inf
    with np.errstate(invalid="ignore"):
        gaps = np.abs(a - b) / np.maximum(1.0, np.maximum(np.abs(a), np.abs(b)))
    gaps = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, gaps)
    return float(np.nan_to_num(gaps, nan=math.inf).max(initial=0.0))


def compare(base: Path, new: Path) -> dict[str, float]:
    """Return how far each result of two folders is from the other; what only one has is infinitely far.

    Raises:
        ValueError: there are no results, so that nothing would be compared.
    """
    one, other = results(base), results(new)
    if not one:
        raise ValueError(f"{base} has no results to compare")
    return {name: difference(one.get(name), other.get(name)) for name in sorted(one.keys() | other.keys())}


def verdict(found: dict[str, float], tolerance: float) -> tuple[bool, str]:
    """Return whether all differences are within the tolerance, and what to say about them."""
    apart = {name: gap for name, gap in found.items() if gap > tolerance}
    if not apart:
        largest = max(found.values())
        return True, f"equal ({len(found)})" if not largest else f"max {largest:.1e} <= {tolerance:.0e} ({len(found)})"
    gaps = [gap for gap in apart.values() if gap < math.inf]
    facts = [f"{len(apart)} of {len(found)}", f"at most {max(gaps, default=0.0):.1e}"]
    facts += [f"{len(apart) - len(gaps)} missing or other texts"] if len(gaps) < len(apart) else []
    return False, "\n  ".join(
        [f"DIFFERS ({', '.join(facts)})", *(f"{n}: {apart[n]:.1e}" for n in list(apart)[:SHOWN])]
    )
