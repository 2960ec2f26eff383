"""Metrics at the end of a stage: in metrics.json, as a table in the terminal, and as a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from onetrunk.utils.files import atomic_path, atomic_write_json
from onetrunk.utils.redaction import markdown_text, redact_all, table_console

METRICS_FILE = "metrics.json"
# Characters of a sampled text in a table.
LONGEST_CELL = 400
Metrics = dict[str, float]


def without_prefix(metrics: Metrics, prefix: str = "eval_") -> Metrics:
    """Return the metrics of an evaluation under their plain names (`score/mean`), without run times."""
    return {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix) and "/" in k}


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


def compared(reference: Metrics, policy: Metrics) -> dict[str, Metrics]:
    """Return the columns before, after and change for `show_columns`."""
    numbers = {name: value for name, value in policy.items() if name in reference and not is_interval(value)}
    change = {name: value - reference[name] for name, value in numbers.items()}
    return {"before": reference, "after": policy, "change": change}


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
    table_console().print(table)


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


def plot_reliability(folder: Path, curves: dict[str, Sequence[dict[str, float]]]) -> None:
    """Draw confidence against the share that is right, one line per name, as reliability.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0.5, 1], [0.5, 1], color="grey", linestyle="--", linewidth=1, label="calibrated")
    for name, bins in curves.items():
        filled = [b for b in bins if b["count"]]
        axes.plot([b["predicted"] for b in filled], [b["observed"] for b in filled], marker="o", label=name)
    axes.set(xlabel="probability given to the preferred completion", ylabel="share in which it is the better one")
    axes.set(xlim=(0.48, 1.02), ylim=(0, 1.02))
    axes.legend()
    with atomic_path(folder / "reliability.png") as temporary:
        figure.savefig(temporary, format="png", dpi=120)
