"""Plots of the reward, distill and eval stages. matplotlib is optional: without it a warning takes their place."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onetrunk.utils.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from onetrunk.stages.eval.judge import Contest

logger = logging.getLogger(__name__)

SIZE = (4.5, 4.0)
# Points at which a fitted curve is drawn.
NUM_POINTS = 101


def plot_reliability(folder: Path, curves: dict[str, Sequence[dict[str, float]]]) -> None:
    """Draw reliability.png: confidence against the share that is right, one line per name."""
    figure = _new_figure()
    if figure is None:
        return
    axes = figure.axes[0]
    axes.plot([0.5, 1], [0.5, 1], color="grey", linestyle="--", linewidth=1, label="calibrated")
    for name, bins in curves.items():
        filled = [b for b in bins if b["count"]]
        axes.plot([b["predicted"] for b in filled], [b["observed"] for b in filled], marker="o", label=name)
    axes.set(xlabel="probability given to the preferred completion", ylabel="share in which it is the better one")
    axes.set(xlim=(0.48, 1.02), ylim=(0, 1.02))
    axes.legend()
    _save(figure, folder / "reliability.png")


def plot_by_margin(folder: Path, bins: Sequence[dict[str, float]]) -> None:
    """Draw accuracy_by_margin.png: one bar per equal share of the pairs, the smallest margin first."""
    figure = _new_figure()
    if figure is None:
        return
    axes = figure.axes[0]
    names = [f"{b['low']:.2g}-{b['high']:.2g}" for b in bins]
    axes.bar(range(len(bins)), [b["observed"] for b in bins])
    axes.axhline(0.5, color="grey", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(bins)), names, rotation=30, ha="right")
    axes.set(xlabel="|lead| of the scores, equal shares of the pairs", ylabel="accuracy", ylim=(0, 1))
    _save(figure, folder / "accuracy_by_margin.png")


def plot_scores(folder: Path, teacher: Sequence[float], student: Sequence[float]) -> None:
    """Draw scores.png: one point per completion, the teacher's score against the student's."""
    figure = _new_figure()
    if figure is None:
        return
    axes = figure.axes[0]
    axes.scatter(teacher, student, s=6, alpha=0.4)
    ends = [min(*teacher, *student), max(*teacher, *student)]
    axes.plot(ends, ends, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="teacher's score", ylabel="student's score")
    _save(figure, folder / "scores.png")


def plot_contest(folder: Path, contest: Contest) -> list[str]:
    """Draw win_rate.png and, where the pairs differ in length, win_rate_by_length.png; return the names drawn."""
    figure = _new_figure()
    if figure is None:
        return []
    _draw_estimates(figure, contest)
    names = [_save(figure, folder / "win_rate.png")]
    if contest.rates.length_fit.scale > 0:
        figure = _new_figure()
        _draw_length_fit(figure, contest)
        names.append(_save(figure, folder / "win_rate_by_length.png"))
    return names


def _draw_estimates(figure: Figure, contest: Contest) -> None:
    """Draw each kind of win rate with its interval."""
    axes, rates = figure.axes[0], contest.rates
    kinds = {
        "mean probability": rates.win_rate,
        "at equal length": rates.length_controlled_win_rate,
        "wins and half the ties": rates.discrete_win_rate,
    }
    for place, estimate in enumerate(kinds.values()):
        # An estimate that is NaN is not drawn.
        axes.plot([estimate.low, estimate.high], [place, place], color="C0", linewidth=2)
        axes.plot(estimate.value, place, marker="o", color="C0")
    axes.axvline(0.5, color="grey", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set(xlim=(0, 1), ylim=(len(kinds) - 0.5, -0.5), xlabel="share won, 95% interval over prompts")
    axes.set_title(f"{rates.wins} wins, {rates.ties} ties, {rates.losses} losses", fontsize="medium")


def _draw_length_fit(figure: Figure, contest: Contest) -> None:
    """Draw one point per pair, and the fit from which the win rate at equal length is read."""
    axes, fit = figure.axes[0], contest.rates.length_fit
    judged = [i for i, outcome in enumerate(contest.outcomes) if outcome is not None]
    lengths = [len(contest.pairs[i].first) - len(contest.pairs[i].second) for i in judged]
    axes.scatter(lengths, [contest.labels[i].probability for i in judged], s=8, alpha=0.4)
    low, high = min(lengths), max(lengths)
    grid = [low + (high - low) * step / (NUM_POINTS - 1) for step in range(NUM_POINTS)]
    axes.plot(grid, [fit.probability(x) for x in grid], color="C1", label="logistic fit")
    axes.axvline(0, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="characters that the policy's completion is longer", ylabel="probability that it is better")
    axes.set(ylim=(-0.02, 1.02))
    axes.legend()


def _new_figure() -> Figure | None:
    """Return an empty figure with one pair of axes; None, with a warning, without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning(
            "no plots: matplotlib is not installed; pip install matplotlib. The metrics are in metrics.json"
        )
        return None
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    figure.add_subplot()
    return figure


def _save(figure: Figure, path: Path) -> str:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path.name
