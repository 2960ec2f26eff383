"""How seconds and memory grow with completion length, rollout size, vocabulary, depth and PPO epochs, as curves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.processes import OURS, TRL

Timed = Callable[[Path, Path, tuple[str, ...]], dict[str, Any]]

BASE = {"prompt": 32, "completion": 32, "rollout": 8, "layers": 8, "vocab_size": 16_000}
AXES = {
    "completion": (32, 64, 128),
    "rollout": (8, 16, 32),
    "vocab_size": (8_000, 32_000, 128_000),
    "layers": (4, 8, 16),
    "epochs": (1, 2, 4, 8),
}
QUICK_BASE = {"prompt": 4, "completion": 4, "rollout": 4, "layers": 4, "vocab_size": 64}
QUICK_AXES = {"completion": (4, 8), "rollout": (4, 8), "vocab_size": (64, 128), "layers": (4, 8), "epochs": (1, 2)}
AXIS_LABELS = {
    "completion": "longest completion, tokens",
    "rollout": "completions of a rollout",
    "vocab_size": "vocabulary",
    "layers": "layers",
    "epochs": "PPO epochs",
}


def kinds(has_baseline: bool) -> dict[str, int]:
    """Return what is run at every size: how many times fewer layers than all are adapted; 0: TRL."""
    ours = {"ours, all layers": 1, "ours, top quarter": 4}
    return {"TRL 1.12": 0, **ours} if has_baseline else ours


def base_options(is_quick: bool) -> str:
    """Return the sizes that stay while one grows, as options."""
    return " ".join(f"--{name} {size}" for name, size in (QUICK_BASE if is_quick else BASE).items())


def grow(axis: str, baseline: Path | None, is_quick: bool, timed: Timed) -> tuple[list[dict], list[dict]]:
    """Return the points of an axis, with seconds and memory of every kind, and what all its processes printed."""
    base, known = (QUICK_BASE, QUICK_AXES) if is_quick else (BASE, AXES)
    fixed = ("--mixed", "--iterations", "2", "--shape", "tiny" if is_quick else "base")
    points, printed = [], []
    for value in known[axis]:
        sizes = {**base, axis: value}
        shared = (*fixed, *(part for name, size in sizes.items() for part in (f"--{name}", str(size))))
        values = {}
        for kind, divisor in kinds(baseline is not None).items():
            if divisor:
                top = "all" if divisor == 1 else f"top-{sizes['layers'] // divisor}"
                result = timed(Path(sys.executable), OURS, (*shared, "--adapter_layers", top))
            else:
                result = timed(baseline, TRL.script, shared)
            printed.append(result)
            values[kind] = {"seconds": result["seconds"]["total"], "peak_mb": result["peak_mb"]}
        points.append({"value": value, "values": values})
    return points, printed


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
                plot.plot(sizes, [point["values"][kind][name] for point in points], marker="o", label=kind)
            plot.set(xscale="log", xlabel=AXIS_LABELS[axis], ylabel=label, xticks=sizes)
            plot.set_ylim(bottom=0)
            plot.set_xticklabels([f"{size:,}" for size in sizes], rotation=30)
            plot.minorticks_off()
            plot.grid(alpha=0.3)
    grid[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
