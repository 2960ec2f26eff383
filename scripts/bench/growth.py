"""How seconds and memory grow with completion length, rollout size, vocabulary and depth; curves as a PNG.

Knows options of the processes and matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.processes import BASELINE, OURS

Timed = Callable[[Path, Path, tuple[str, ...]], dict[str, Any]]

BASE = {"prompt": 32, "completion": 32, "rollout": 8, "layers": 8, "vocab_size": 16_000}
AXES = {
    "completion": (32, 64, 128, 256),
    "rollout": (8, 16, 32, 64),
    "vocab_size": (8_000, 16_000, 32_000, 64_000, 152_000),
    "layers": (4, 8, 16, 32),
}
QUICK_BASE = {"prompt": 4, "completion": 4, "rollout": 4, "layers": 4, "vocab_size": 64}
QUICK_AXES = {"completion": (4, 8), "rollout": (4, 8), "vocab_size": (64, 128), "layers": (4, 8)}
AXIS_LABELS = {
    "completion": "longest completion, tokens",
    "rollout": "completions of a rollout",
    "vocab_size": "vocabulary",
    "layers": "layers",
}


def grow(axes: Sequence[str], baseline: Path | None, is_quick: bool, timed: Timed) -> dict[str, Any]:
    """Return the points of every axis: seconds and memory of TRL, ours on all layers, ours on the top quarter."""
    base, known = (QUICK_BASE, QUICK_AXES) if is_quick else (BASE, AXES)
    fixed = ("--mixed", "--iterations", "2", "--shape", "tiny" if is_quick else "base")
    kinds = {"ours, all layers": None, "ours, top quarter": 4}
    if baseline is not None:
        kinds = {"TRL 1.12": 0, **kinds}
    processes, points = [], {axis: [] for axis in axes}
    for axis in axes:
        for value in known[axis]:
            sizes = {**base, axis: value}
            shared = (*fixed, *(part for name, size in sizes.items() for part in (f"--{name}", str(size))))
            figures = {}
            for kind, divisor in kinds.items():
                if divisor == 0:
                    result = timed(baseline, BASELINE, shared)
                else:
                    top = "all" if divisor is None else f"top-{sizes['layers'] // divisor}"
                    result = timed(Path(sys.executable), OURS, (*shared, "--adapter_layers", top))
                processes.append(result)
                figures[kind] = {"seconds": result["seconds"]["total"], "peak_mb": result["peak_mb"]}
            cells = [f"{f['seconds']:.2f} s, {f['peak_mb']} MB" for f in figures.values()]
            points[axis].append({"value": value, "figures": figures, "cells": cells})
    sizes = " ".join(f"--{name} {size}" for name, size in base.items())
    return {"axes": points, "columns": list(kinds), "base": sizes, "processes": processes}


def draw(growth: dict[str, Any], path: Path) -> None:
    """Write the curves of all axes into one PNG.

    Raises:
        RuntimeError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("the curves need matplotlib: pip install 'onetrunk[dev]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    axes = growth["axes"]
    figure, grid = plt.subplots(2, len(axes), figsize=(4 * len(axes), 6.5), squeeze=False)
    for column, (axis, points) in enumerate(axes.items()):
        sizes = [point["value"] for point in points]
        for line, (name, label) in enumerate((("seconds", "seconds of an iteration"), ("peak_mb", "peak memory, MB"))):
            plot = grid[line][column]
            for kind in growth["columns"]:
                plot.plot(sizes, [point["figures"][kind][name] for point in points], marker="o", label=kind)
            plot.set(xscale="log", yscale="log", xlabel=AXIS_LABELS[axis], ylabel=label, xticks=sizes)
            plot.set_xticklabels([f"{size:,}" for size in sizes], rotation=30)
            plot.minorticks_off()
            plot.grid(alpha=0.3)
    grid[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
