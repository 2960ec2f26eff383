"""The report of `onetrunk judge`: how well judges agree with people, by subset, and what they are biased by."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from onetrunk.report.blocks import MARKDOWN, Block, rendered
from onetrunk.report.parts import all_measured, blocks_of, flat, number, plain, share
from onetrunk.report.plots import COLORS, SIZE, figures_block
from onetrunk.report.runs import METRICS, PAIRS, Run, read_lines, read_run

NUM_SAMPLES = 3
# Rows in a plot; the tables have all.
MOST_ROWS = 35
Judges = dict[str, dict[str, Any]]
# Rows of the first table: title, and where the value is.
FACTS = (
    ("accuracy", "accuracy"),
    ("right in both orders", "consistent_accuracy"),
    ("right if asked in one order alone", "one_order_accuracy"),
    ("orders that do not contradict each other", "position/position_consistency"),
    ("the completion shown first wins", "position/first_slot_rate"),
    ("calibration error", "calibration_error"),
    ("prefers the longer one", "length/preferred"),
    ("people prefer the longer one", "length/preferred_by_people"),
    ("accuracy where the better one is longer", "length/accuracy_more"),
    ("accuracy where it is shorter", "length/accuracy_less"),
    ("prefers the one with more Markdown", "format/preferred"),
    ("people prefer that", "format/preferred_by_people"),
)
COUNTS = ("rows", "equal_for_people", "decided", "ties", "abstained", "unjudged")
# Rows of the plot of accuracy, before the subsets.
CASES = (
    ("all rows", "accuracy"),
    ("where longer is better", "length/accuracy_more"),
    ("where shorter is better", "length/accuracy_less"),
    ("where more Markdown is better", "format/accuracy_more"),
    ("where less Markdown is better", "format/accuracy_less"),
)


def judge_blocks(run: Run, target: Path) -> list[Block]:
    """Return the report of a measurement of judges; the plots are also written as PNG files."""
    results, metrics = run.results, run.folder / METRICS
    judges: Judges = results.get("judges", {})
    drawings = [
        ("accuracy", "Accuracy", "With 95% intervals; the dashed line is chance for pairs. A judge without bias is as"
         " often right where the better completion is longer as where it is shorter.", partial(draw_accuracy, judges)),
        ("reliability", "Reliability", "On the line, a probability means what it says.",
         partial(draw_reliability, judges)),
    ]  # fmt: skip
    return blocks_of(
        [
            (metrics, lambda: [first_block(results)]),
            (metrics, lambda: [figures_block("Plots", target, drawings)]),
            (metrics, lambda: [*table_blocks(results), reliability_block(judges)]),
            (run.folder / PAIRS, lambda: sample_blocks(run, judges)),
            (metrics, lambda: [all_measured(judges, "All that was measured")]),
        ]
    )


def card_of(results: dict[str, Any]) -> str:
    """Return the dataset card of a measurement: what was measured, without plots; `pairs.jsonl` are its rows."""
    from huggingface_hub import DatasetCardData  # Here: a page about other runs does not need it.

    files = [{"config_name": "default", "data_files": PAIRS}]
    metadata = DatasetCardData(tags=["onetrunk", "preference", "llm-as-a-judge"], configs=files)
    rows = (
        f"`{PAIRS}` has a row per pair: the completion that people call better, the other one, the subset, how sure"
        " people are, and what each judge says: its probability that they are right, and whether both orders agree."
    )
    blocks = [first_block(results), Block(text=rows), *table_blocks(results)]
    return f"---\n{metadata.to_yaml()}\n---\n\n{rendered(MARKDOWN, 'How well judges agree with people', blocks)}"


def first_block(results: dict[str, Any]) -> Block:
    """Return what was measured, the metrics of all rows, and what should not be overlooked."""
    judges: Judges = results["judges"]
    metrics = {name: dict(flat(entry["all"])) for name, entry in judges.items()}
    rows = [[count.replace("_", " "), *(str(m.get(count)) for m in metrics.values())] for count in COUNTS]
    for title, key in FACTS:
        rows.append([title, *(share(m.get(key), m.get(f"{key}_interval")) for m in metrics.values())])
    found = [(name, text) for name, entry in judges.items() for text in entry.get("findings", ())]
    return Block(
        text=f"Pairs of {results.get('dataset')}, judged by the constitution {results.get('constitution')}.",
        columns=["all rows", *metrics],
        rows=rows,
        alarms=[(name, f"{text[0].upper()}{text[1:]}.") for name, text in found],
    )


def table_blocks(results: dict[str, Any]) -> list[Block]:
    """Return accuracy by subset, how much judges agree, and costs."""
    agreement, costs = results.get("agreement", {}), results.get("costs", {})
    rows = [
        [pair, str(value.get("pairs")), share(value.get("agreement")), number(value.get("kappa"))]
        for pair, value in agreement.items()
    ]
    note = "Kappa is the agreement beyond chance: 0 is chance, 1 is perfect."
    agreed = Block("Agreement", note, columns=["", "pairs", "same verdict", "kappa"], rows=rows)
    return [*subset_blocks(results["judges"]), *([agreed] if rows else []), *cost_blocks(costs)]


def subset_blocks(judges: Judges) -> list[Block]:
    """Return the accuracy by subset, if the dataset has several."""
    names = list(dict.fromkeys(subset for entry in judges.values() for subset in entry["subsets"]))
    rows = []
    for subset in names:
        parts = [entry["subsets"].get(subset) for entry in judges.values()]
        known = next(part for part in parts if part)
        cells = [share(part["accuracy"], part["accuracy_interval"]) if part else "" for part in parts]
        rows.append([subset, str(known["rows"]), *cells])
    known = [[p["accuracy"] for p in e["subsets"].values() if p["accuracy"] is not None] for e in judges.values()]
    rows.append(["mean of the subsets", "", *(share(fmean(values)) if values else "" for values in known)])
    return [Block("Accuracy by subset", columns=["subset", "rows", *judges], rows=rows)] if names else []


def cost_blocks(costs: dict[str, Any]) -> list[Block]:
    """Return what the judges have used, over all runs in the folder."""
    names = list(dict.fromkeys(key for values in costs.values() for key in values))
    rows = [[key.replace("_", " "), *(number(values.get(key)) for values in costs.values())] for key in names]
    return [Block("Costs", columns=["all runs in this folder", *costs], rows=rows)] if costs else []


def reliability_block(judges: Judges) -> Block:
    """Return the reliability tables, folded."""
    columns = ["probability", "pairs", "mean probability", "share that is right"]
    tables = []
    for name, entry in judges.items():
        rows = [
            [f"{b['low']:.2f} to {b['high']:.2f}", str(b["count"]), number(b["predicted"]), number(b["observed"])]
            for b in entry["all"]["reliability"]
        ]
        tables.append(Block(name, columns=columns, rows=rows))
    return Block("Reliability: how often a judge is right when it is so sure", blocks=tables, is_folded=True)


def sample_blocks(run: Run, judges: Judges) -> list[Block]:
    """Return the pairs on which each judge is most wrong."""
    blocks = []
    rows = read_lines(run.folder / PAIRS)
    for name in judges:
        said = [(row["judges"].get(name, {}).get("probability"), row) for row in rows]
        wrong = sorted(((p, i) for i, (p, _) in enumerate(said) if p is not None and p < 0.5))[:NUM_SAMPLES]
        samples = [(plain(rows[i]["prompt"]), _sides(rows[i], p, name)) for p, i in wrong]
        blocks += [Block(f"Where {name} is most wrong", samples=samples)] if samples else []
    return [Block("Samples", blocks=blocks)] if blocks else []


def _sides(row: dict[str, Any], probability: float, name: str) -> list[tuple[str, str]]:
    thoughts = row["judges"][name].get("thoughts") or []
    sides = [(f"better for people, probability {probability:.3f}", row["better"]), ("the other one", row["other"])]
    sides += [("what the judge thought", "\n\n".join(thoughts))] if thoughts else []
    return [(title, plain(text)) for title, text in sides]


def draw_accuracy(judges: Judges) -> Any:
    """Return a figure of the accuracy of each judge, with its interval: of all rows, in cases of bias, by subset."""
    tables = {judge: _accuracies(entry) for judge, entry in judges.items()}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))[:MOST_ROWS]
    axes = _axes(max(SIZE[1], 0.28 * len(names) + 1))
    for index, (judge, table) in enumerate(tables.items()):
        shift, color = 0.7 * ((index + 0.5) / len(judges) - 0.5), COLORS[index % len(COLORS)]
        axes.plot([], [], "o", color=color, markersize=4, label=judge)
        for row, name in enumerate(names):
            if name in table:
                value, interval = table[name]
                axes.plot(interval, [row + shift] * 2, color=color, linewidth=1.4)
                axes.plot(value, row + shift, "o", color=color, markersize=4)
    axes.axvline(0.5, linestyle="--", linewidth=1, color=COLORS[-1])
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, 1.02), ylim=(len(names) - 0.5, -0.5), xlabel="accuracy")
    if len(judges) > 1:
        axes.legend(frameon=False)
    return axes.figure


def _accuracies(entry: dict[str, Any]) -> dict[str, tuple[float, list[float]]]:
    values = dict(flat(entry["all"]))
    found = {title: (values.get(key), values.get(f"{key}_interval")) for title, key in CASES}
    found |= {name: (part["accuracy"], part["accuracy_interval"]) for name, part in entry["subsets"].items()}
    return {name: (value, interval) for name, (value, interval) in found.items() if value is not None}


def draw_reliability(judges: Judges) -> Any:
    """Return a figure of probability against the share that is right, one line per judge."""
    axes = _axes(SIZE[1])
    axes.plot([0.5, 1], [0.5, 1], linestyle="--", linewidth=1, color=COLORS[-1])
    for index, (judge, entry) in enumerate(judges.items()):
        bins = [b for b in entry["all"]["reliability"] if b["count"]]
        color = COLORS[index % len(COLORS)]
        axes.plot([b["predicted"] for b in bins], [b["observed"] for b in bins], marker="o", color=color, label=judge)
    axes.set(xlim=(0.48, 1.02), ylim=(-0.02, 1.05))
    axes.set(xlabel="probability of the preferred completion", ylabel="share in which people agree")
    axes.legend(frameon=False)
    return axes.figure


def _axes(height: float) -> Any:
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(SIZE[0], height), layout="constrained").add_subplot()


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
            f"agrees with people on {share(metrics['accuracy'], metrics['accuracy_interval'])} of"
            f" {metrics['decided']} rows of {run.results['dataset']}, calibration error"
            f" {number(metrics['calibration_error'])}, orders that do not contradict each other"
            f" {share(metrics['position']['position_consistency'])}"
        )
        quotes.append(Quote(name, entry["identity"], run.results["constitution"], text))
    return quotes
