"""What a stage tells in the end: figures before and after in one table, and in a JSON file.

Knows figures by their public names; measures nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onetrunk.utils.files import atomic_write_json
from onetrunk.utils.redaction import redact_all

METRICS_FILE = "metrics.json"
Figures = dict[str, float]


def without_prefix(metrics: Figures, prefix: str = "eval_") -> Figures:
    """Return the figures of an evaluation under their plain names (`score/mean`), without run times."""
    return {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix) and "/" in k}


def write_metrics(folder: str | Path, policy: Figures, reference: Figures | None, **about: object) -> Path:
    """Write metrics.json: what was evaluated, and the figures of policy and reference; return its path."""
    sides = {"reference": reference, "policy": policy} if reference is not None else {"policy": policy}
    path = Path(folder) / METRICS_FILE
    # JSON knows no NaN: a figure that does not exist is null.
    finite = {s: {k: v if math.isfinite(v) else None for k, v in f.items()} for s, f in sides.items()}
    atomic_write_json(path, redact_all({**about, **finite}))
    return path


def figures_table(title: str, policy: Figures, reference: Figures | None = None) -> Table:
    """Return the figures as a table; with a reference, before and after beside each other."""
    table = Table(title=title)
    table.add_column("held-out prompts")
    for column in ("before", "after", "change") if reference is not None else ("value",):
        table.add_column(column, justify="right")
    for name, value in policy.items():
        if reference is None:
            table.add_row(name, f"{value:.3f}")
        elif name in reference:
            table.add_row(name, f"{reference[name]:.3f}", f"{value:.3f}", f"{value - reference[name]:+.3f}")
        else:
            table.add_row(name, "-", f"{value:.3f}", "")
    return table


def show(table: Table) -> None:
    """Print a table."""
    Console().print(table)


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
