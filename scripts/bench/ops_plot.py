"""Curves of seconds and memory against tokens, width and vocabulary. Needs matplotlib (the dev extra)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save_growth(rows: list[dict[str, Any]], folder: Path, title: str) -> list[Path]:
    """Write growth.json and, where matplotlib is installed, growth.png; return what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "growth.json"
    table.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    try:
        import matplotlib
    except ImportError:
        return [table]
    matplotlib.use("Agg")
    return [table, _draw(rows, folder / "growth.png", title)]


def _draw(rows: list[dict[str, Any]], path: Path, title: str) -> Path:
    from matplotlib import pyplot

    axes_names = list(dict.fromkeys(row["axis"] for row in rows))
    figure, panels = pyplot.subplots(2, len(axes_names), figsize=(4 * len(axes_names), 6), squeeze=False)
    for column, axis in enumerate(axes_names):
        for line, (measure, label) in enumerate({"seconds": "seconds", "extra_mb": "MiB beyond the inputs"}.items()):
            panel = panels[line][column]
            for variant in ("naive", "fused"):
                points = [
                    (row[axis], row[measure]) for row in rows if (row["axis"], row["variant"]) == (axis, variant)
                ]
                panel.plot(*zip(*points, strict=True), marker="o", label=variant)
            panel.set(xlabel=axis, ylabel=label, ylim=(0, None))
            panel.xaxis.set_major_locator(pyplot.MaxNLocator(4))
            panel.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    return path
