"""What `reward` and `distill` tell in the end: one table, and metrics.json.

Knows figures by their public names; measures nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.table import Table

from onetrunk.files import atomic_write_json
from onetrunk.redaction import redact_all
from onetrunk.stages.report import METRICS_FILE, show


def write_figures(folder: Path, figures: dict[str, Any]) -> Path:
    """Write metrics.json, in which a figure that does not exist is null; return its path."""
    path = folder / METRICS_FILE
    atomic_write_json(path, redact_all(finite(figures)))
    return path


def finite(value: Any) -> Any:
    """Return nested figures with null for what is not a finite number: JSON knows neither NaN nor infinity."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_figures(title: str, columns: dict[str, dict[str, Any]]) -> None:
    """Print plain figures (no lists of bins) as a table with a column per name."""
    table = Table(title=title)
    table.add_column("figure")
    for name in columns:
        table.add_column(name, justify="right")
    names = list(dict.fromkeys(name for figures in columns.values() for name in figures))
    for name in names:
        cells = [as_text(figures.get(name)) for figures in columns.values()]
        if any(cells):
            table.add_row(name, *cells)
    show(table)


def as_text(value: Any) -> str:
    """Return a figure, or an interval of two, as a cell; nothing for anything else."""
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, float) for v in value):
        return f"{value[0]:.3f} to {value[1]:.3f}"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else ""
