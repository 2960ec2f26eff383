"""The report of `onetrunk judge`: how well judges agree with people, by subset, and what they are biased by."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onetrunk.report.blocks import Block, Facts, Figure, Folded, Heading, Plots, Sample, Text, Warned
from onetrunk.report.blocks import markdown as as_markdown
from onetrunk.report.parts import LONGEST_TEXT, blocks_of, flat, number
from onetrunk.report.plots import COLORS, SIZE, on_ink, png_of, svg_of
from onetrunk.report.runs import METRICS, Run, read_lines, read_run
from onetrunk.utils.files import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAIRS = "pairs.jsonl"
NUM_SAMPLES = 3
# Subsets in a plot; a table has all.
MOST_SUBSETS = 30
Judges = dict[str, dict[str, Any]]
# Rows of the first table: title, and where the value and its interval are.
FACTS = (
    ("accuracy", "accuracy", "accuracy_interval"),
    ("right in both orders", "consistent_accuracy", "consistent_accuracy_interval"),
    ("right if asked in one order alone", "one_order_accuracy", None),
    ("orders that do not contradict each other", "position/position_consistency", None),
    ("the completion shown first wins", "position/first_slot_rate", None),
    ("calibration error", "calibration_error", None),
    ("prefers the longer one", "length/preferred", "length/preferred_interval"),
    ("people prefer the longer one", "length/preferred_by_people", None),
    ("accuracy where the better one is longer", "length/accuracy_more", "length/accuracy_more_interval"),
    ("accuracy where it is shorter", "length/accuracy_less", "length/accuracy_less_interval"),
    ("prefers the one with more Markdown", "format/preferred", "format/preferred_interval"),
    ("people prefer that", "format/preferred_by_people", None),
)
COUNTS = ("rows", "equal_for_people", "decided", "ties", "abstained", "unjudged")


def judge_blocks(run: Run, target: Path) -> list[Block]:
    """Return the report of a measurement of judges; the plots are also written as PNG files."""
    results, metrics = run.results, run.folder / METRICS
    judges: Judges = results.get("judges", {})
    plots = Heading(2, "Plots")
    return blocks_of(
        [
            (metrics, lambda: _first_blocks(results)),
            (metrics, lambda: [plots, *_plots(judges, results.get("agreement", {}), target)]),
            (metrics, lambda: _table_blocks(results) + reliability_blocks(judges)),
            (run.folder / PAIRS, lambda: sample_blocks(run, judges)),
            (metrics, lambda: [_all_measured(judges)]),
        ]
    )


def _all_measured(judges: Judges) -> Folded:
    rows = [[name, number(v)] for name, v in flat(judges) if not isinstance(v, (list, dict))]
    return Folded("All that was measured", [Facts(["", "value"], rows)])


def card_of(results: dict[str, Any]) -> str:
    """Return the dataset card of a measurement: what was measured, without plots; `pairs.jsonl` are its rows."""
    from huggingface_hub import DatasetCardData  # Here: a page about other runs does not need it.

    files = [{"config_name": "default", "data_files": PAIRS}]
    metadata = DatasetCardData(tags=["onetrunk", "preference", "llm-as-a-judge"], configs=files)
    rows = (
        f"`{PAIRS}` has a row per pair: the completion that people call better, the other one, the subset, how sure"
        " people are, and what each judge says: its probability that they are right, and whether both orders agree."
    )
    blocks = [Heading(1, "How well judges agree with people"), *_first_blocks(results), Text(rows)]
    return f"---\n{metadata.to_yaml()}\n---\n\n{as_markdown([*blocks, *_table_blocks(results)])}"


def _first_blocks(results: dict[str, Any]) -> list[Block]:
    """Return what was measured, the metrics of all rows, and what should not be overlooked."""
    about = f"Pairs of {results.get('dataset')}, judged by the constitution {results.get('constitution')}."
    blocks: list[Block] = [Text(about), facts_of(results["judges"])]
    for name, entry in results["judges"].items():
        blocks += [Warned(name, f"{text[0].upper()}{text[1:]}.") for text in entry.get("findings", ())]
    return blocks


def _table_blocks(results: dict[str, Any]) -> list[Block]:
    agreement, costs = results.get("agreement", {}), results.get("costs", {})
    return subset_blocks(results["judges"]) + agreement_blocks(agreement) + cost_blocks(costs)


def facts_of(judges: Judges) -> Facts:
    """Return a table with one column per judge."""
    metrics = {name: dict(flat(entry["all"])) for name, entry in judges.items()}
    rows = [[count.replace("_", " "), *(str(m.get(count)) for m in metrics.values())] for count in COUNTS]
    for title, key, interval in FACTS:
        rows.append([title, *(_share(m.get(key), m.get(interval) if interval else None) for m in metrics.values())])
    return Facts(["all rows", *metrics], rows)


def subset_blocks(judges: Judges) -> list[Block]:
    """Return accuracy, consistency and calibration by subset, if the dataset has several."""
    names = list(dict.fromkeys(subset for entry in judges.values() for subset in entry["subsets"]))
    if not names:
        return []
    rows = []
    for subset in names:
        parts = [entry["subsets"].get(subset) for entry in judges.values()]
        known = next(part for part in parts if part)
        cells = [_share(p["accuracy"], p["accuracy_interval"]) if p else "" for p in parts]
        rows.append([subset, str(known["rows"]), *cells])
    means = [_mean([part["accuracy"] for part in entry["subsets"].values()]) for entry in judges.values()]
    rows.append(["mean of the subsets", "", *map(_share, means)])
    return [Heading(2, "Accuracy by subset"), Facts(["subset", "rows", *judges], rows)]


def agreement_blocks(agreement: dict[str, Any]) -> list[Block]:
    """Return Cohen's kappa of every two judges, and of each with the people."""
    rows = [
        [pair, str(value.get("pairs")), _share(value.get("agreement")), number(value.get("kappa"))]
        for pair, value in agreement.items()
    ]
    note = "Kappa is the agreement beyond chance: 0 is chance, 1 is perfect."
    return [Heading(2, "Agreement"), Text(note), Facts(["", "pairs", "same verdict", "kappa"], rows)] if rows else []


def cost_blocks(costs: dict[str, Any]) -> list[Block]:
    """Return what the judges have used, over all runs in the folder."""
    if not costs:
        return []
    names = list(dict.fromkeys(key for values in costs.values() for key in values))
    rows = [[key.replace("_", " "), *(number(values.get(key)) for values in costs.values())] for key in names]
    return [Heading(2, "Costs"), Facts(["all runs in this folder", *costs], rows)]


def reliability_blocks(judges: Judges) -> list[Block]:
    """Return the reliability tables, folded."""
    tables: list[Block] = []
    for name, entry in judges.items():
        rows = [
            [f"{b['low']:.2f} to {b['high']:.2f}", str(b["count"]), number(b["predicted"]), number(b["observed"])]
            for b in entry["all"]["reliability"]
        ]
        tables += [Heading(3, name), Facts(["probability", "pairs", "mean probability", "share that is right"], rows)]
    return [Folded("Reliability: how often a judge is right when it is so sure", tables)]


def sample_blocks(run: Run, judges: Judges) -> list[Block]:
    """Return the pairs on which each judge is most wrong."""
    blocks: list[Block] = []
    rows = read_lines(run.folder / PAIRS)
    for name in judges:
        said = [(row["judges"].get(name, {}).get("probability"), row) for row in rows]
        wrong = sorted(((p, i) for i, (p, _) in enumerate(said) if p is not None and p < 0.5))[:NUM_SAMPLES]
        if wrong:
            blocks += [Heading(3, f"Where {name} is most wrong"), *(_sample(rows[i], p, name) for p, i in wrong)]
    return [Heading(2, "Samples"), *blocks] if blocks else []


def _sample(row: dict[str, Any], probability: float, name: str) -> Sample:
    thoughts = row["judges"][name].get("thoughts") or []
    sides = [(f"better for people, probability {probability:.3f}", row["better"]), ("the other one", row["other"])]
    sides += [("what the judge thought", "\n\n".join(thoughts))] if thoughts else []
    return Sample(_plain(row["prompt"]), [(title, _plain(text)) for title, text in sides])


def _plain(text: Any) -> str:
    if isinstance(text, list):
        text = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in text)
    text = str(text)
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " ..."


def _plots(judges: Judges, agreement: dict[str, Any], target: Path) -> list[Block]:
    drawn: list[tuple[str, str, str, Callable[[Axes], None]]] = [
        ("reliability", "Reliability", "On the line, a probability means what it says.",
         lambda axes: draw_reliability(axes, judges)),
        ("biases", "Accuracy by what the better completion is",
         "A judge without bias has bars of equal height within each pair.", lambda axes: draw_biases(axes, judges)),
        ("position", "Position", "Without bias: 50% for the first, and no contradictions.",
         lambda axes: draw_position(axes, judges)),
    ]  # fmt: skip
    if any(entry["subsets"] for entry in judges.values()):
        drawn.insert(0, ("subsets", "Accuracy by subset", "With 95% intervals; the dashed line is chance for pairs.",
                         lambda axes: draw_subsets(axes, judges)))  # fmt: skip
    if len(judges) > 1:
        drawn.append(("kappa", "Agreement (Cohen's kappa)", "", lambda axes: draw_kappa(axes, judges, agreement)))
    figures = []
    try:
        for name, title, note, draw in drawn:
            figure = on_ink(lambda draw=draw, name=name: _drawn(draw, name, judges))
            atomic_write_bytes(target / f"{name}.png", png_of(figure))
            figures.append(Figure(name, title, note, svg_of(figure, name, title)))
    except ImportError:
        return [Text("No plots: matplotlib cannot be imported; pip install matplotlib.")]
    return [Plots(figures)]


def _drawn(draw: Callable[[Axes], None], name: str, judges: Judges) -> Any:
    from matplotlib.figure import Figure as Canvas

    width, height = SIZE
    if name == "subsets":
        height = max(height, 0.28 * len(_subset_names(judges)) + 1)
    figure = Canvas(figsize=(width, height), layout="constrained")
    draw(figure.add_subplot())
    return figure


def draw_subsets(axes: Axes, judges: Judges) -> None:
    """Draw the accuracy of each judge on each subset, with its interval."""
    names = _subset_names(judges)
    for index, (judge, entry) in enumerate(judges.items()):
        shift = 0.7 * ((index + 0.5) / len(judges) - 0.5)
        for row, subset in enumerate(names):
            part = entry["subsets"].get(subset)
            if part is None or part["accuracy"] is None:
                continue
            low, high = part["accuracy_interval"]
            color = COLORS[index % len(COLORS)]
            axes.plot([low, high], [row + shift] * 2, color=color, linewidth=1.4)
            axes.plot(part["accuracy"], row + shift, "o", color=color, markersize=4, label=judge if not row else None)
    axes.axvline(0.5, linestyle="--", linewidth=1, color=COLORS[-1])
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, 1.02), ylim=(len(names) - 0.5, -0.5), xlabel="accuracy")
    if len(judges) > 1:
        axes.legend(frameon=False)


def draw_reliability(axes: Axes, judges: Judges) -> None:
    """Draw probability against the share that is right, one line per judge."""
    axes.plot([0.5, 1], [0.5, 1], linestyle="--", linewidth=1, color=COLORS[-1])
    for index, (judge, entry) in enumerate(judges.items()):
        bins = [b for b in entry["all"]["reliability"] if b["count"]]
        color = COLORS[index % len(COLORS)]
        axes.plot([b["predicted"] for b in bins], [b["observed"] for b in bins], marker="o", color=color, label=judge)
    axes.set(xlim=(0.48, 1.02), ylim=(-0.02, 1.05))
    axes.set(xlabel="probability of the preferred completion", ylabel="share in which people agree")
    axes.legend(frameon=False)


def draw_biases(axes: Axes, judges: Judges) -> None:
    """Draw accuracy where the better completion is longer, shorter, more and less formatted."""
    kinds = [("length", "accuracy_more", "longer"), ("length", "accuracy_less", "shorter")]
    kinds += [("format", "accuracy_more", "more Markdown"), ("format", "accuracy_less", "less Markdown")]
    width = 0.8 / len(judges)
    for index, (judge, entry) in enumerate(judges.items()):
        values = [entry["all"][kind].get(key) for kind, key, _ in kinds]
        places = [place + width * (index + 0.5) - 0.4 for place in range(len(kinds))]
        heights = [value if value is not None else 0 for value in values]
        axes.bar(places, heights, width * 0.9, color=COLORS[index % len(COLORS)], label=judge)
    axes.axhline(0.5, linestyle="--", linewidth=1, color=COLORS[-1])
    axes.set_xticks(range(len(kinds)), [title for *_, title in kinds])
    axes.set(ylim=(0, 1.02), ylabel="accuracy")
    if len(judges) > 1:
        axes.legend(frameon=False)


def draw_position(axes: Axes, judges: Judges) -> None:
    """Draw the first-slot rate and the share of pairs whose orders contradict each other."""
    for index, (judge, entry) in enumerate(judges.items()):
        position = entry["all"]["position"]
        consistency = position["position_consistency"]
        values = [position["first_slot_rate"], None if consistency is None else 1 - consistency]
        width = 0.8 / len(judges)
        places = [place + width * (index + 0.5) - 0.4 for place in range(2)]
        heights = [value if value is not None else 0 for value in values]
        axes.bar(places, heights, width * 0.9, color=COLORS[index % len(COLORS)], label=judge)
    axes.axhline(0.5, linestyle="--", linewidth=1, color=COLORS[-1])
    axes.set_xticks(range(2), ["first one wins", "orders contradict"])
    axes.set(ylim=(0, 1.02), ylabel="share")
    if len(judges) > 1:
        axes.legend(frameon=False)


def draw_kappa(axes: Axes, judges: Judges, agreement: dict[str, Any]) -> None:
    """Draw kappa of every two judges, and of each with the people."""
    names = [*judges, "people"]
    grid = [[1.0] * len(names) for _ in names]
    for row, one in enumerate(names):
        for column, other in enumerate(names):
            value = agreement.get(f"{one} / {other}") or agreement.get(f"{other} / {one}")
            kappa = None if value is None else value.get("kappa")
            grid[row][column] = 1.0 if row == column else float("nan") if kappa is None else kappa
            text = f"{grid[row][column]:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
    axes.imshow(grid, vmin=-1, vmax=1, cmap="RdBu", alpha=0.5)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.grid(False)


@dataclass(frozen=True)
class Quote:
    """What a card says about a measured judge; `identity` is the digest of the judge's."""

    name: str
    identity: str
    constitution: str
    text: str


def quotes_of(folder: str | os.PathLike[str]) -> list[Quote]:
    """Return what a card says about each judge that was measured in a folder.

    Raises:
        ValueError: the folder holds no measurement of judges.
    """
    try:
        run = read_run(folder)
    except ValueError as error:
        raise ValueError(f"{folder} holds no measurement; give the output_dir of onetrunk judge") from error
    if run.verb != "judge":
        raise ValueError(f"{folder} holds a run of {run.verb}; give the output_dir of onetrunk judge")
    quotes = []
    for name, entry in run.results["judges"].items():
        metrics = entry["all"]
        text = (
            f"agrees with people on {_share(metrics['accuracy'], metrics['accuracy_interval'])} of"
            f" {metrics['decided']} rows of {run.results['dataset']}, calibration error"
            f" {number(metrics['calibration_error'])}, orders that do not contradict each other"
            f" {_share(metrics['position']['position_consistency'])}"
        )
        quotes.append(Quote(name, entry["identity"], run.results["constitution"], text))
    return quotes


def _subset_names(judges: Judges) -> list[str]:
    names = dict.fromkeys(subset for entry in judges.values() for subset in entry["subsets"])
    return list(names)[:MOST_SUBSETS]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _share(value: Any, interval: Any = None) -> str:
    if not isinstance(value, (int, float)):
        return ""
    low, high = interval if interval and None not in interval else (None, None)
    return f"{value:.1%}" + (f" ({low:.1%} to {high:.1%})" if low is not None else "")
