"""Metrics at the end of a stage: as a table in the terminal, and in metrics.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from onetrunk.utils.files import atomic_write_json
from onetrunk.utils.redaction import markdown_text, redact_all, table_console

METRICS_FILE = "metrics.json"
# Characters of a sampled text in a table.
LONGEST_CELL = 400
Metrics = dict[str, float]


def without_prefix(metrics: Metrics, prefix: str = "eval_") -> Metrics:
    """Return the metrics of an evaluation under their plain names (`score/mean`), without run times."""
    return {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix) and "/" in k}


def write_metrics(folder: str | Path, policy: Metrics, reference: Metrics | None, **about: object) -> Path:
    """Write metrics.json with what was evaluated and the metrics of policy and reference; return its path."""
    sides = {"reference": reference, "policy": policy} if reference is not None else {"policy": policy}
    return write_values(folder, {**about, **sides})


def write_values(folder: str | Path, values: dict[str, Any]) -> Path:
    """Write metrics.json, without secrets, and with null for a value that is not finite; return its path."""
    path = Path(folder) / METRICS_FILE
    atomic_write_json(path, redact_all(finite(values)))
    return path


def finite(value: Any) -> Any:
    """Return nested values with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def metrics_table(title: str, policy: Metrics, reference: Metrics | None = None) -> Table:
    """Return the metrics as a table; with a reference, in columns before, after and change."""
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


def show_columns(title: str, columns: dict[str, dict[str, Any]]) -> None:
    """Print metrics as a table with one column per name; lists of bins are left out."""
    table = Table(title=title)
    table.add_column("metric")
    for name in columns:
        table.add_column(name, justify="right")
    for name in dict.fromkeys(name for metrics in columns.values() for name in metrics):
        cells = [_as_text(metrics.get(name)) for metrics in columns.values()]
        if any(cells):
            table.add_row(name, *cells)
    show(table)


def show(table: Table) -> None:
    table_console().print(table)


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title="samples", show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(shortened, row))
    return table


def markdown_table(columns: dict[str, dict[str, Any]]) -> str:
    lines = [f"| | {' | '.join(map(markdown_text, columns))} |", "|---" * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(name for values in columns.values() for name in values):
        cells = [name, *(values.get(name) for values in columns.values())]
        lines.append(f"| {' | '.join(map(_markdown, cells))} |")
    return "\n".join(lines)


def _markdown(value: Any) -> str:
    if is_interval(value):
        return " to ".join(map(_markdown, value))
    text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return markdown_text(text)


def as_json(value: Any) -> str:
    """Return a setting as JSON for a message, cut off if it is long."""
    return shortened(json.dumps(value, ensure_ascii=False), 120)


def shortened(text: str, longest: int = LONGEST_CELL) -> str:
    return text if len(text) <= longest else text[:longest] + " ..."


def is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, float) for v in value)


def _as_text(value: Any) -> str:
    """Return a metric, or an interval of two numbers, as a cell; "" for anything else."""
    if is_interval(value):
        return f"{value[0]:.3f} to {value[1]:.3f}"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else ""
