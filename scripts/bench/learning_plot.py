"""The tables and curves of the study of learning, from the JSON lines that its runs left.

    python scripts/bench/learning_plot.py

It prints a Markdown table per task and writes <task>.png beside the runs; the curves need matplotlib.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from learning_study import RESULTS, TUNING_SEED

SMOOTHED = 5
MEASURED = 10
COLUMNS = [
    "arm",
    "rates",
    "score",
    "KL",
    "J",
    "J / J*",
    "J, all rollouts",
    "held out",
    "CPU s per rollout",
    "score at equal CPU",
]
COLORS = {
    "shared": "tab:blue",
    "detached": "tab:cyan",
    "adapter": "tab:green",
    "top-2": "tab:orange",
    "top-1": "tab:red",
    "trl-lora": "tab:gray",
    "trl-full": "black",
}


@dataclass
class ArmRuns:
    """The runs of one arm, a row per seed.

    Args:
        name: of the arm.
        runs: as they were recorded.
    """

    name: str
    runs: list[dict[str, Any]]

    def curve(self, key: str) -> np.ndarray:
        """Return a curve of every seed, [seeds, rollouts]."""
        return np.array([run[key] for run in self.runs])

    def smooth(self, key: str) -> np.ndarray:
        """Return running means over SMOOTHED rollouts, [seeds, rollouts - SMOOTHED + 1]."""
        kernel = np.ones(SMOOTHED) / SMOOTHED
        return np.array([np.convolve(row, kernel, "valid") for row in self.curve(key)])

    def objective(self) -> np.ndarray:
        """Return J of every rollout, [seeds, rollouts]."""
        return self.curve("score") - self.runs[0]["beta"] * self.curve("kl")

    def cpu_s(self) -> np.ndarray:
        """Return CPU seconds so far, the median over seeds, [rollouts]."""
        return np.median(self.curve("cpu_s"), 0)

    def score_at(self, cpu_s: float) -> np.ndarray:
        """Return the smoothed score of every seed when a budget was spent (the last one where less was needed)."""
        spent = self.cpu_s()[SMOOTHED - 1 :]
        return self.smooth("score")[:, max(0, int(np.searchsorted(spent, cpu_s, "right")) - 1)]


def read_arms(path: Path) -> list[ArmRuns]:
    """Return the arms of a file in the order of COLORS, without the runs that only chose rates."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    runs = [run for run in runs if run["seed"] != TUNING_SEED]
    arms = [ArmRuns(name, [run for run in runs if run["arm"] == name]) for name in COLORS]
    return [arm for arm in arms if arm.runs]


def spread(values: np.ndarray, digits: int = 3) -> str:
    """Return `mean (least to most)`."""
    return f"{values.mean():.{digits}f} ({values.min():.{digits}f} to {values.max():.{digits}f})"


def row(arm: ArmRuns, budget_s: float) -> list[str]:
    """Return a line of the table; COLUMNS says of what."""
    first = arm.runs[0]
    last_objective = arm.objective()[:, -MEASURED:].mean(1)
    share = held_out = ""
    if "optimum" in first:
        share = spread(last_objective / np.array([run["optimum"] for run in arm.runs]))
    if "held_out" in first:
        held_out = spread(np.array([run["held_out"] for run in arm.runs]))
    return [
        f"`{arm.name}`",
        " / ".join(f"{rate:g}" for rate in first["rates"].values()),
        spread(arm.curve("score")[:, -MEASURED:].mean(1)),
        spread(arm.curve("kl")[:, -MEASURED:].mean(1), 2),
        spread(last_objective),
        share,
        spread(arm.objective().mean(1)),
        held_out,
        f"{arm.cpu_s()[-1] / len(arm.cpu_s()):.3f}",
        spread(arm.score_at(budget_s)),
    ]


def table(arms: list[ArmRuns]) -> str:
    """Return the table in Markdown; the equal budget is half of what the cheapest arm needs for its run."""
    budget_s = min(arm.cpu_s()[-1] for arm in arms) / 2
    lines = [row(arm, budget_s) for arm in arms]
    kept = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines)]
    header = [COLUMNS[i].replace("equal CPU", f"{budget_s:.1f} CPU s") for i in kept]
    shown = [header, ["---"] * len(kept), *([line[i] for i in kept] for line in lines)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in shown)


def draw(arms: list[ArmRuns], title: str, path: Path) -> None:
    """Write the curves: score against KL, and score and J against CPU seconds, bands from least to most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    for arm in arms:
        color, score, kl = COLORS[arm.name], arm.smooth("score"), arm.smooth("kl")
        objective = score - arm.runs[0]["beta"] * kl
        spent = arm.cpu_s()[SMOOTHED - 1 :]
        for x, y, axis in ((kl.mean(0), score, axes[0]), (spent, score, axes[1]), (spent, objective, axes[2])):
            order = np.argsort(x)
            axis.plot(x, y.mean(0), color=color, label=arm.name, linewidth=1.4)
            axis.fill_between(x[order], y.min(0)[order], y.max(0)[order], color=color, alpha=0.12, linewidth=0)
    for axis, (x, y) in zip(axes, (("KL, nats", "score"), ("CPU s", "score"), ("CPU s", "J")), strict=True):
        axis.set(xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
        if x == "CPU s":
            axis.set_xscale("log")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{title}: mean and range of {len(arms[0].runs)} seeds, running mean of {SMOOTHED} rollouts")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of <task>.jsonl")
    parser.add_argument("--no_curves", action="store_true", help="tables alone")
    given = parser.parse_args(arguments)
    files = sorted(given.results.glob("*.jsonl"))
    if not files:
        parser.error(f"--results {given.results} holds no <task>.jsonl; run learning.py first")
    for path in files:
        arms = read_arms(path)
        print(f"{path.stem}\n\n{table(arms)}\n")
        if not given.no_curves:
            draw(arms, path.stem, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
