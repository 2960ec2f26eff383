"""The tables and curves of the study of learning, from the JSON lines that its runs left.

    python scripts/bench/learning_plot.py

It prints a Markdown table per task and writes <task>.png next to the runs; the curves need matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from learning_study import RESULTS, TUNING_SEED
from learning_tasks import make_task

SMOOTHED = 5
MEASURED = 10
COLORS = {
    "turn-rewards": "tab:blue",
    "sum": "tab:cyan",
    "turn-gae": "tab:green",
    "sum-turn-gae": "tab:orange",
    "shared": "tab:blue",
    "linear": "tab:cyan",
    "adapter": "tab:green",
    "top-1": "tab:red",
    "lam-1": "tab:orange",
    "40-fits": "tab:cyan",
    "grpo": "tab:purple",
    "agilerl": "tab:pink",
    "agilerl-kl-reward": "tab:brown",
    "agilerl-turns": "tab:pink",
    "agilerl-turn-means": "tab:red",
    "agilerl-tokens": "tab:brown",
    "agilerl-tokens-sum": "tab:olive",
    "trl-lora": "tab:gray",
    "trl-full": "black",
}


@dataclass
class ArmRuns:
    """The runs of one arm, a row per seed; where the optimum is known, its score, KL and J are the units.

    Args:
        name: of the arm.
        runs: as they were recorded, one per seed.
        optima: what the best policy attains with each of these seeds; empty where it is not known.
    """

    name: str
    runs: list[dict[str, Any]]
    optima: list[dict[str, float]]

    def curve(self, key: str) -> np.ndarray:
        """Return the curve of every seed, [seeds, rollouts]: "score", "kl", "objective" or "cpu_s"."""
        if key == "objective":
            beta = self.runs[0]["beta"]
            raw = np.array([np.array(run["score"]) - beta * np.array(run["kl"]) for run in self.runs])
        else:
            raw = np.array([run[key] for run in self.runs])
        units = [best.get(key, 1.0) for best in self.optima] or [1.0] * len(raw)
        return raw / np.array(units)[:, None]

    def smooth(self, key: str) -> np.ndarray:
        """Return running means over SMOOTHED rollouts, [seeds, rollouts - SMOOTHED + 1]."""
        curves = self.curve(key)
        width = min(SMOOTHED, curves.shape[1])
        return np.array([np.convolve(values, np.ones(width) / width, "valid") for values in curves])

    def last(self, key: str) -> np.ndarray:
        """Return the mean over the last rollouts of every seed."""
        return self.curve(key)[:, -MEASURED:].mean(1)

    def cpu_s(self) -> np.ndarray:
        """Return CPU seconds so far, the median over seeds, [rollouts]."""
        return np.median(self.curve("cpu_s"), 0)

    def at(self, key: str, cpu_s: float) -> np.ndarray:
        """Return a smoothed curve of every seed where a budget was spent (its end where less was needed)."""
        smooth = self.smooth(key)
        spent = self.cpu_s()[-smooth.shape[1] :]
        return smooth[:, max(0, int(np.searchsorted(spent, cpu_s, "right")) - 1)]

    def rollouts_to(self, share: float) -> str:
        """Return for each seed after how many rollouts the smoothed J first is that share of J*; `-`: never."""
        reached = [np.flatnonzero(values >= share) for values in self.smooth("objective")]
        return " / ".join(str(places[0] + SMOOTHED) if len(places) else "-" for places in reached)


def read_arms(path: Path) -> list[ArmRuns]:
    """Return the arms of a file, those of COLORS first, each with the rates that were best on TUNING_SEED."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    finals, tried = [], {}
    for run in runs:
        (tried.setdefault(run["arm"], []) if run["seed"] == TUNING_SEED else finals).append(run)
    # The longest runs chose the rates.
    longest = {arm: max(run["rollouts"] for run in own) for arm, own in tried.items()}
    tried = {arm: [run for run in own if run["rollouts"] == longest[arm]] for arm, own in tried.items()}
    best = {arm: max(own, key=lambda run: run["last"]["objective"])["rates"] for arm, own in tried.items()}
    finals = [run for run in finals if run["rates"] == best.get(run["arm"], run["rates"])]
    finals.sort(key=lambda run: run["seed"])
    task, arms = make_task(path.stem, path.parent), []
    optima = {seed: task.known(seed) for seed in {run["seed"] for run in finals}}
    # What most runs have is the study's number of rollouts; others say theirs.
    usual = Counter(run["rollouts"] for run in finals).most_common(1)[0][0]
    names = dict.fromkeys([*COLORS, *(run["arm"] for run in finals)])
    for name, rollouts in product(names, sorted({run["rollouts"] for run in finals}, key=lambda n: (n != usual, n))):
        own = [run for run in finals if run["arm"] == name and run["rollouts"] == rollouts]
        known = [optima[run["seed"]] for run in own]
        label = name if rollouts == usual else f"{name}, {rollouts} rollouts"
        arms += [ArmRuns(label, own, known if all(known) else [])] if own else []
    return arms


def spread(values: np.ndarray, form: str = ".3f") -> str:
    """Return `mean (least to most)`."""
    return f"{values.mean():{form}} ({values.min():{form}} to {values.max():{form}})"


def row(arm: ArmRuns, default: ArmRuns, budget_s: float) -> dict[str, str]:
    """Return a line of the table, by column."""
    lead = arm.last("objective") - default.last("objective") if len(arm.runs) == len(default.runs) else np.zeros(1)
    cells = {
        "arm": f"`{arm.name}`",
        "rates": " / ".join(f"{rate:g}" for rate in arm.runs[0]["rates"].values()),
        "score": spread(arm.last("score")),
        "KL": spread(arm.last("kl"), ".2f"),
        "J": spread(arm.last("objective")),
        f"J less that of `{default.name}`": spread(lead, "+.3f"),
        "J, all rollouts": spread(arm.curve("objective").mean(1)),
        "CPU s per rollout": f"{arm.cpu_s()[-1] / len(arm.cpu_s()):.2f}",
        "CPU s": f"{arm.cpu_s()[-1]:.1f}",
        f"score at {budget_s:.1f} CPU s": spread(arm.at("score", budget_s)),
    }
    if arm.optima:
        cells["rollouts to 0.9 J*"] = arm.rollouts_to(0.9)
    if "held_out" in arm.runs[0]:
        cells["held out"] = spread(np.array([run["held_out"] for run in arm.runs]))
    return cells


def table(arms: list[ArmRuns]) -> str:
    """Return the table in Markdown; the equal budget is half of what the cheapest arm needs for its run."""
    budget_s = min(arm.cpu_s()[-1] for arm in arms) / 2
    lines = [row(arm, arms[0], budget_s) for arm in arms]
    shown = [list(lines[0]), ["---"] * len(lines[0]), *(list(line.values()) for line in lines)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in shown)


def draw(arms: list[ArmRuns], title: str, path: Path) -> None:
    """Write the curves: score against KL, and score and J against CPU seconds, bands from least to most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    for arm in arms:
        color, score, kl = COLORS.get(arm.runs[0]["arm"], "tab:gray"), arm.smooth("score"), arm.smooth("kl").mean(0)
        spent = arm.cpu_s()[-score.shape[1] :]
        for x, y, axis in ((kl, score, axes[0]), (spent, score, axes[1]), (spent, arm.smooth("objective"), axes[2])):
            axis.plot(x, y.mean(0), "--" if "," in arm.name else "-", color=color, label=arm.name, linewidth=1.4)
            order = np.argsort(x)
            axis.fill_between(x[order], y.min(0)[order], y.max(0)[order], color=color, alpha=0.12, linewidth=0)
    unit = " of the optimum's" if arms[0].optima else ""
    for axis, (x, y) in zip(axes, (("KL", "score"), ("CPU s", "score"), ("CPU s", "J")), strict=True):
        axis.set(xlabel=x + unit * (x == "KL"), ylabel=y + unit)
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
        units = ", score, KL and J as shares of the optimum's" if arms[0].optima else ""
        print(f"{path.stem}{units}\n\n{table(arms)}\n")
        if not given.no_curves:
            draw(arms, path.stem, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
