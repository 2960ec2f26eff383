"""Plots of preference figures: reliability, accuracy by margin, student against teacher. matplotlib draws them.

Knows figures by their names; measures nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onetrunk.utils.files import atomic_path

logger = logging.getLogger(__name__)

SIZE = (4.5, 4.0)


def new_figure() -> Any:
    """Return an empty figure with one pair of axes, or None where matplotlib is not installed, which is said once."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning(
            "no plots: matplotlib is not installed; pip install matplotlib. The figures are in metrics.json"
        )
        return None
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    figure.add_subplot()
    return figure


def save_figure(figure: Any, path: Path) -> Path:
    """Write a PNG: whole, or not at all."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path


def plot_reliability(folder: Path, curves: dict[str, Sequence[dict[str, float]]]) -> Path | None:
    """Draw reliability.png: how sure against how often right, a line per name; None without matplotlib."""
    figure = new_figure()
    if figure is None:
        return None
    axes = figure.axes[0]
    axes.plot([0.5, 1], [0.5, 1], color="grey", linestyle="--", linewidth=1, label="calibrated")
    for name, bins in curves.items():
        filled = [b for b in bins if b["count"]]
        axes.plot([b["predicted"] for b in filled], [b["observed"] for b in filled], marker="o", label=name)
    axes.set(xlabel="probability given to the preferred completion", ylabel="share in which it is the better one")
    axes.set(xlim=(0.48, 1.02), ylim=(0, 1.02))
    axes.legend()
    return save_figure(figure, folder / "reliability.png")


def plot_by_margin(folder: Path, bins: Sequence[dict[str, float]]) -> Path | None:
    """Draw accuracy_by_margin.png: a bar per share of the pairs, the closest first; None without matplotlib."""
    figure = new_figure()
    if figure is None:
        return None
    axes = figure.axes[0]
    names = [f"{b['low']:.2g}-{b['high']:.2g}" for b in bins]
    axes.bar(range(len(bins)), [b["observed"] for b in bins])
    axes.axhline(0.5, color="grey", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(bins)), names, rotation=30, ha="right")
    axes.set(xlabel="|lead| of the scores, equal shares of the pairs", ylabel="accuracy", ylim=(0, 1))
    return save_figure(figure, folder / "accuracy_by_margin.png")


def plot_scores(folder: Path, teacher: Sequence[float], student: Sequence[float]) -> Path | None:
    """Draw scores.png: a point per completion, the teacher's score against the student's; None without matplotlib."""
    figure = new_figure()
    if figure is None:
        return None
    axes = figure.axes[0]
    axes.scatter(teacher, student, s=6, alpha=0.4)
    ends = [min(*teacher, *student), max(*teacher, *student)]
    axes.plot(ends, ends, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="teacher's score", ylabel="student's score")
    return save_figure(figure, folder / "scores.png")
