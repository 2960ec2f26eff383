"""What a stage tells in the end: figures before and after in one table, and in a JSON file.

Knows figures by their public names; measures nothing.
"""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from onetrunk.files import atomic_write_json
from onetrunk.redaction import redact_all

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
