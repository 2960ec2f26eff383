"""Plots of a win rate: its estimates with their intervals, and labels against differences of length.

Knows figures; measures nothing. matplotlib draws them.
"""

from __future__ import annotations

from pathlib import Path

from onetrunk.stages.eval_judge import Contest
from onetrunk.stages.preference_plots import new_figure, save_figure

NUM_POINTS = 101


def draw(folder: Path, contest: Contest) -> list[Path]:
    """Draw all plots of a contest and return their paths; none without matplotlib, which is said once."""
    first = plot_estimates(folder, contest)
    second = plot_by_length(folder, contest) if first is not None else None
    return [path for path in (first, second) if path is not None]


def plot_estimates(folder: Path, contest: Contest) -> Path | None:
    """Draw win_rate.png: each kind of win rate with its interval; None without matplotlib."""
    figure = new_figure()
    if figure is None:
        return None
    axes, rates = figure.axes[0], contest.rates
    kinds = {
        "mean probability": rates.win_rate,
        "at equal length": rates.length_controlled_win_rate,
        "wins and half the ties": rates.discrete_win_rate,
    }
    for place, estimate in enumerate(kinds.values()):
        # NaN, where a figure does not exist, is not drawn.
        axes.plot([estimate.low, estimate.high], [place, place], color="C0", linewidth=2)
        axes.plot(estimate.value, place, marker="o", color="C0")
    axes.axvline(0.5, color="grey", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set(xlim=(0, 1), ylim=(len(kinds) - 0.5, -0.5), xlabel="share won, 95% interval over prompts")
    axes.set_title(f"{rates.wins} wins, {rates.ties} ties, {rates.losses} losses", fontsize="medium")
    return save_figure(figure, folder / "win_rate.png")


def plot_by_length(folder: Path, contest: Contest) -> Path | None:
    """Draw win_rate_by_length.png: a point per pair, and the fit that the figure at equal length is read off."""
    figure = new_figure() if contest.rates.length_fit.scale > 0 else None
    if figure is None:
        return None
    axes, fit = figure.axes[0], contest.rates.length_fit
    kept = [i for i, outcome in enumerate(contest.outcomes) if outcome is not None]
    lengths = [len(contest.pairs[i].first) - len(contest.pairs[i].second) for i in kept]
    axes.scatter(lengths, [contest.labels[i].probability for i in kept], s=8, alpha=0.4)
    low, high = min(lengths), max(lengths)
    grid = [low + (high - low) * step / (NUM_POINTS - 1) for step in range(NUM_POINTS)]
    axes.plot(grid, [fit.probability(x) for x in grid], color="C1", label="logistic fit")
    axes.axvline(0, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="characters that the policy's completion is longer", ylabel="probability that it is better")
    axes.set(ylim=(-0.02, 1.02))
    axes.legend()
    return save_figure(figure, folder / "win_rate_by_length.png")
