"""Plots of the judge, reward and distill stages. Where matplotlib cannot be imported, a warning takes their place."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onetrunk.utils.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)

SIZE = (4.5, 4.0)


def plot(name: str) -> Callable[[Callable[..., None]], Callable[..., list[str]]]:
    """Make a function that draws on axes one that writes the file `name` into the folder that takes their place.

    It returns the names of the files that it wrote: none, with a warning, without matplotlib.
    """

    def decorate(draw: Callable[..., None]) -> Callable[..., list[str]]:
        @functools.wraps(draw)
        def write(folder: Path, *values: object) -> list[str]:
            try:
                from matplotlib.figure import Figure
            except ImportError:
                logger.warning(
                    "no plots: matplotlib is not installed; pip install matplotlib. The metrics are in metrics.json"
                )
                return []
            figure = Figure(figsize=SIZE, layout="constrained")
            draw(figure.add_subplot(), *values)
            with atomic_path(folder / name) as temporary:
                figure.savefig(temporary, format="png", dpi=120)
            return [name]

        return write

    return decorate


@plot("reliability.png")
def plot_reliability(axes: Axes, curves: dict[str, Sequence[dict[str, float]]]) -> None:
    """Draw confidence against the share that is right, one line per name."""
    axes.plot([0.5, 1], [0.5, 1], color="grey", linestyle="--", linewidth=1, label="calibrated")
    for name, bins in curves.items():
        filled = [b for b in bins if b["count"]]
        axes.plot([b["predicted"] for b in filled], [b["observed"] for b in filled], marker="o", label=name)
    axes.set(xlabel="probability given to the preferred completion", ylabel="share in which it is the better one")
    axes.set(xlim=(0.48, 1.02), ylim=(0, 1.02))
    axes.legend()


@plot("accuracy_by_margin.png")
def plot_by_margin(axes: Axes, bins: Sequence[dict[str, float]]) -> None:
    """Draw one bar per equal share of the pairs, the smallest margin first."""
    names = [f"{b['low']:.2g}-{b['high']:.2g}" for b in bins]
    axes.bar(range(len(bins)), [b["observed"] for b in bins])
    axes.axhline(0.5, color="grey", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(bins)), names, rotation=30, ha="right")
    axes.set(xlabel="|lead| of the scores, equal shares of the pairs", ylabel="accuracy", ylim=(0, 1))


@plot("scores.png")
def plot_scores(axes: Axes, teacher: Sequence[float], student: Sequence[float]) -> None:
    """Draw one point per completion, the teacher's score against the student's."""
    axes.scatter(teacher, student, s=6, alpha=0.4)
    ends = [min(*teacher, *student), max(*teacher, *student)]
    axes.plot(ends, ends, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="teacher's score", ylabel="student's score")
