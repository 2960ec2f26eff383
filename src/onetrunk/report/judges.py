"""The report of `onetrunk judge`: how well judges agree with people, by subset, and what they are biased by."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from onetrunk.report.blocks import MARKDOWN, Block, all_measured, flat, number, plain, rendered, share
from onetrunk.report.plots import figures_block
from onetrunk.report.runs import PAIRS, Run, read_lines

NUM_SAMPLES = 3
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


def judge_blocks(run: Run, target: Path) -> list[Block]:
    """Return the report of a measurement of judges, with the pictures that the stage has drawn."""
    judges: Judges = run.results["judges"]
    return [
        first_block(run.results),
        figures_block("Plots", target, (), run.images),
        *table_blocks(run.results),
        reliability_block(judges),
        *sample_blocks(run, judges),
        all_measured(judges, "All that was measured"),
    ]


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
    rows = [[pair, str(value["pairs"]), share(value["agreement"])] for pair, value in agreement.items()]
    agreed = Block("Agreement", columns=["", "pairs", "same verdict"], rows=rows)
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
        samples = []
        for probability, index in wrong:
            row = rows[index]
            better = f"better for people, probability {probability:.3f}"
            samples.append((plain(row["prompt"]), [(better, plain(row["better"])), ("other", plain(row["other"]))]))
        blocks += [Block(f"Where {name} is most wrong", samples=samples)] if samples else []
    return [Block("Samples", blocks=blocks)] if blocks else []
