"""Draws the two pictures of the top README, each for a light and a dark page.

    python scripts/figures/draw.py

`trunk*.svg` is a drawing. `results*.svg` plots committed measurements: the study of learning
(`scripts/bench/learning`) and the benchmark against TRL 1.12 (`scripts/bench/results/cpu`). It needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
BENCH = ROOT / "scripts" / "bench"


@dataclass(frozen=True)
class Theme:
    """Colours of a page; `suffix` ends the names of its files."""

    suffix: str
    text: str
    muted: str
    line: str
    trunk: str
    lower: str
    policy: str
    value: str
    reference: str
    reward: str


LIGHT = Theme("", "#1f2328", "#59636e", "#818b98", "#ddf4ff", "#b6e3ff", "#dafbe1", "#fff8c5", "#eaeef2", "#ffebe9")
DARK = Theme(
    "_dark", "#e6edf3", "#9198a1", "#6e7681", "#0c2d4d", "#113f6b", "#12361f", "#3d3000", "#2a313c", "#4b1715"
)

BRANCHES = (
    ("policy", "LoRA adapter “default”, trained", "logprobs, entropy"),
    ("value", "a small head, fitted after each rollout", "values"),
    ("reference", "the same model, adapter switched off", "reference logprobs"),
    ("reward", "adapter and score head (optional)", "scores"),
)


def trunk_svg(theme: Theme) -> str:
    """Return the drawing of the trunk and its branches as SVG."""

    def box(x: int, y: int, width: int, height: int, fill: str) -> str:
        place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="8"'
        return f'<rect {place} fill="{fill}" stroke="{theme.line}"/>'

    def text(x: int, y: int, words: str, fill: str = theme.text, weight: str = "normal", size: int = 14) -> str:
        style = f'font-size="{size}" font-weight="{weight}" fill="{fill}"'
        return f'<text x="{x}" y="{y}" text-anchor="middle" {style}>{words}</text>'

    def arrow(x1: int, y1: int, x2: int, y2: int) -> str:
        return f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{theme.line}" stroke-width="1.5" marker-end="url(#tip)"/>'

    parts = [
        box(10, 125, 130, 70, "none"),
        text(75, 155, "prompts and", size=13),
        text(75, 175, "completions", size=13),
        arrow(140, 160, 182, 160),
        box(190, 40, 190, 240, theme.trunk),
        text(285, 30, "trunk: one frozen base model", weight="bold"),
        text(285, 85, "upper layers"),
        text(285, 106, "here the branches differ", theme.muted, size=12),
        box(190, 160, 190, 120, theme.lower),
        text(285, 205, "lower layers"),
        text(285, 226, "with adapters on the top k layers", theme.muted, size=10),
        text(285, 242, "these run only once per rollout", theme.muted, size=10),
    ]
    for index, (name, what, output) in enumerate(BRANCHES):
        y = 18 + 72 * index
        parts += [
            arrow(380, 160, 422, y + 28),
            box(430, y, 250, 56, getattr(theme, name)),
            text(555, y + 23, name, weight="bold"),
            text(555, y + 43, what, theme.muted, size=12),
            arrow(680, y + 28, 702, y + 28),
            text(770, y + 33, output, size=12),
        ]
    marker = f'<path d="M0 0 L8 4 L0 8 z" fill="{theme.line}"/>'
    size = 'width="840" height="310" viewBox="0 0 840 310"'
    body = "\n  ".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">
  <title>One frozen trunk; policy, value, reference and reward are branches of it</title>
  <defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">{marker}</marker></defs>
  {body}
</svg>
"""


# Rollouts that a point of the learning curve averages.
BLOCK = 10
SHOWN_ARMS = {
    "shared": ("onetrunk, all layers (default)", "tab:blue"),
    "top-2": ("onetrunk, top half of the layers", "tab:orange"),
    "trl-lora": ("TRL 1.12, LoRA", "tab:gray"),
    "trl-full": ("TRL 1.12, full fine-tuning", "tab:pink"),
}
SHOWN_ROWS = {
    "mixed-all": "all layers",
    "mixed-top": "top quarter",
    "mixed-small-reward": "top quarter,\ndistilled reward",
}


def plot_learning(axes: Axes) -> None:
    """Plot the score against the KL on `sums`, means of three seeds."""
    sys.path[:0] = [str(ROOT), str(BENCH)]
    from learning_plot import read_arms

    for arm in read_arms(BENCH / "learning" / "sums.jsonl"):
        if arm.name in SHOWN_ARMS:
            label, color = SHOWN_ARMS[arm.name]
            kl, score = (arm.curve(key).mean(0).reshape(-1, BLOCK).mean(1) for key in ("kl", "score"))
            axes.plot(kl, score, marker="o", markersize=4, color=color, label=label, linewidth=1.6)
    title = f"Learning to add: score against KL\n50 rollouts of 128, 3 seeds, a point is the mean of {BLOCK} rollouts"
    axes.set(xlabel="KL to the reference, nats per completion", ylabel="share of right answers")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="lower right", framealpha=0)


def plot_costs(axes: Axes) -> None:
    """Plot CPU seconds and peak memory of one iteration at mixed lengths, as shares of TRL 1.12's."""
    rows = json.loads((BENCH / "results" / "cpu" / "results.json").read_text())["rows"]
    labels = ["TRL 1.12", *SHOWN_ROWS.values()]
    chosen = [rows[name] for name in SHOWN_ROWS]
    seconds = [100.0] + [100 * row["ours"]["seconds"]["total"] / row["baseline"]["seconds"]["total"] for row in chosen]
    memory = [100.0] + [100 * row["memory_share"] for row in chosen]
    places = range(len(labels))
    for offset, values, color, label in (
        (-0.2, seconds, "tab:blue", "CPU seconds"),
        (0.2, memory, "tab:green", "peak memory"),
    ):
        bars = axes.bar([place + offset for place in places], values, 0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.0f%%", fontsize=8, padding=2)
    axes.set_xticks(list(places), labels, fontsize=8)
    axes.set(ylabel="share of TRL 1.12", ylim=(0, 115))
    axes.set_title("Cost of one PPO iteration\n59M parameters, mixed lengths, 1 CPU thread", fontsize=10)
    axes.legend(fontsize=8, framealpha=0)


def draw_results(theme: Theme, path: Path) -> None:
    """Write both plots side by side, as SVG or PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    inks = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    # A fixed salt and no date: the same measurements give the same file.
    style = dict.fromkeys(inks, theme.text) | {"axes.edgecolor": theme.line, "svg.hashsalt": "onetrunk"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
        plot_learning(axes[0])
        plot_costs(axes[1])
        for one in axes:
            one.set_facecolor("none")
            one.grid(alpha=0.25, axis="y")
            one.set_axisbelow(True)
            one.spines[["top", "right"]].set_visible(False)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, metadata=metadata)
        pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output_dir", type=Path, default=FOLDER, help="folder of the SVG files")
    folder = parser.parse_args(arguments).output_dir
    folder.mkdir(parents=True, exist_ok=True)
    for theme in (LIGHT, DARK):
        (folder / f"trunk{theme.suffix}.svg").write_text(trunk_svg(theme), encoding="utf-8")
        draw_results(theme, folder / f"results{theme.suffix}.svg")


if __name__ == "__main__":
    main()
