"""The report of a run, of several runs or of a pipeline: report.html, which needs no other file, and report.md."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from statistics import fmean
from typing import Any

from onetrunk.feedback.costs import read_costs
from onetrunk.report.blocks import (
    MARKDOWN,
    PAGE,
    Block,
    alarm_blocks,
    all_measured,
    flat,
    lost_blocks,
    number,
    plain,
    rendered,
    result_blocks,
    sample_blocks,
    share,
)
from onetrunk.report.plots import draw, draw_bins, figures_block, plots_of
from onetrunk.report.runs import FOLDER, PAIRS, PIPELINE, SAMPLES, Run, read_lines, read_run, stage_runs
from onetrunk.report.verdict import verdict_of
from onetrunk.utils.files import atomic_write_text, read_json
from onetrunk.utils.redaction import address_of, redact
from onetrunk.verbs import VERBS

logger = logging.getLogger(__name__)


def write_report(folders: Sequence[str | Path], target: str | Path | None = None) -> Path:
    """Write report.html, report.md and PNGs for one run or several; return the path of the page.

    Args:
        folders: output folders of stages or pipelines.
        target: folder to write to; None: `_report` in the run's folder, of several runs in the folder around them.
    """
    runs = [read_run(folder) for folder in folders]
    # Each run has its own page in its folder, which a comparison must not replace.
    place = Path(folders[0]) if len(runs) == 1 else Path(os.path.commonpath([run.folder.resolve() for run in runs]))
    target = Path(target) if target is not None else place / FOLDER
    title = " and ".join(run.name for run in runs)
    if len(runs) > 1:
        blocks = comparison_blocks(runs, target)
    else:
        page = VERBS[runs[0].verb].page if runs[0].verb in VERBS else ""
        blocks = (resolve_name(page) if page else run_blocks)(runs[0], target)
    for name in (MARKDOWN, PAGE):
        atomic_write_text(target / name, redact(rendered(name, title, blocks)))
    return target / PAGE


def write_report_checked(folders: Sequence[str | Path], target: str | Path | None = None) -> Path:
    """Return what `write_report` does; RuntimeError if a file of a run holds something else than a run writes."""
    try:
        return write_report(folders, target)
    except (ArithmeticError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise RuntimeError(
            f"no report of {', '.join(map(str, folders))} can be made: a file there is damaged"
            f" ({type(error).__name__}: {error!s:.200}); restore it, or set ONETRUNK_TRACEBACK=1 to see where"
        ) from error


def write_report_of(folder: str | Path) -> Path | None:
    """Write the report of a run that has just ended; return its page, or None with a warning if that fails."""
    try:
        return write_report([folder])
    except Exception as error:  # Whatever is wrong with a picture or a file: the run itself has succeeded.
        logger.warning("%s: no report was written (%s: %s)", folder, type(error).__name__, error)
        return None


def run_blocks(run: Run, target: Path) -> list[Block]:
    """Return the page of one run: the verdict and samples first."""
    return [
        *verdict_blocks(run),
        *sample_blocks(run),
        facts_of([run], related_files(run), target),
        *alarm_blocks(run),
        *result_blocks(run),
        *cost_blocks(read_costs(run.folder)),
        *plot_blocks([run], target),
        *lost_blocks(run),
        *setting_blocks([run]),
    ]


def verdict_blocks(run: Run) -> list[Block]:
    """Return the verdict on a run or a pipeline as the head of its page."""
    verdict = verdict_of(run)
    return [] if verdict is None else [Block(text=str(verdict), level=verdict.level)]


def comparison_blocks(runs: Sequence[Run], target: Path) -> list[Block]:
    """Return several runs side by side."""
    names = [run.name for run in runs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"two of the runs are named {twice[0]}; their curves could not be told apart: rename a folder"
        )
    alarms = [block for run in runs for block in alarm_blocks(run, f"Alarms of {run.name}")]
    plots = plot_blocks(runs, target)
    return [facts_of(runs), final_values(runs), *alarms, *plots, *setting_blocks(runs)]


def pipeline_blocks(pipeline: Run, target: Path) -> list[Block]:
    """Return what every stage of a pipeline reached, and the win rates, alarms and samples of its stages."""
    rows, links, alarms, samples, runs, total = [], {}, [], [], stage_runs(pipeline), 0.0
    for name, record in pipeline.results.get("stages", {}).items():
        verb = record["settings"].get("verb", "script")
        run = runs.get(name)
        seconds = record.get("seconds")
        total += seconds or 0
        result = "" if run is None else headline(run)
        rows.append([name, verb, record["status"], "" if seconds is None else f"{seconds:.0f}", result])
        if run is None:
            continue
        page = run.folder / FOLDER / PAGE
        if page.is_file():
            links[name] = address_of(page, target)
        alarms += alarm_blocks(run, f"Alarms of {name}")
        samples = sample_blocks(run) if verb == "eval" else samples
    columns = ["stage", "verb", "status", "seconds", "result"]
    summary = f"{pipeline.status}; {total / 60:.1f} minutes in all stages."
    table = Block("Stages", text=summary, columns=columns, rows=rows, links=links)
    return [*verdict_blocks(pipeline), *samples, table, *alarms]


def preference_blocks(run: Run, target: Path) -> list[Block]:
    """Return the page of preference rows: the verdict, pairs, how sure the judge is, and what it cost."""
    counts, judge = run.results.get("counts", {}), run.results.get("judge", {})
    facts = [[name.replace("_", " "), f"{count:,}"] for name, count in counts.items() if count]
    orders = (("position_consistency", "orders that agree"), ("first_slot_rate", "the one shown first wins"))
    facts += [[title, share(judge.get(key))] for key, title in orders if judge.get(key) is not None]
    bins = run.results.get("rows", {}).get("label_histogram", {})
    drawings = [("labels", "How sure the judge is", LABELS_NOTE, partial(draw_bins, bins))] if bins else []
    return [
        *verdict_blocks(run),
        *pair_blocks(run),
        facts_of([run], related_files(run), target),
        Block("Rows", columns=["", run.name], rows=facts),
        *([figures_block("Labels", target, drawings)] if drawings else []),
        *cost_blocks(read_costs(run.folder)),
        all_measured(run.results, "All that the stage measured"),
    ]


def pair_blocks(run: Run) -> list[Block]:
    """Return some preference rows: the surest of the first ones, and the least sure."""
    rows = [row for path in sorted((run.folder / "data").glob("*.jsonl")) for row in read_lines(path, NUM_ROWS)]
    rows = sorted((row for row in rows if "probability" in row), key=lambda row: row["probability"])
    kinds = (("The judge is sure", rows[::-1][:NUM_SAMPLES]), ("The judge is not sure", rows[:NUM_SAMPLES]))
    blocks = []
    for title, chosen in kinds:
        samples = [
            (
                plain(row["prompt"]),
                [(f"chosen, {row['probability']:.0%}", plain(row["chosen"])), ("rejected", plain(row["rejected"]))],
            )
            for row in chosen
        ]
        blocks += [Block(title, samples=samples)] if samples else []
    return [Block("Pairs", blocks=blocks)] if blocks else []


def headline(run: Run) -> str:
    """Return what a stage reached, in a few words."""
    if run.verb == "judge":
        shares = [f"{name} {share(entry['all']['accuracy'])}" for name, entry in run.results["judges"].items()]
        return f"agrees with people: {', '.join(shares)}"
    verdict = verdict_of(run)
    return "" if verdict is None else verdict.findings[0]


def facts_of(runs: Sequence[Run], links: Mapping[str, Path] | None = None, target: Path = Path()) -> Block:
    """Return a table with one column per run: status, time, hardware; and files to read next, by what they are."""
    rows: dict[str, list[str]] = {}
    for run in runs:
        begin = next((event for event in reversed(run.events) if event.get("event") == "begin"), {})
        hours, gpu_hours = run.hours(), run.hours(with_gpus=True)
        peak = max(run.series("memory/peak_gib")[1], default=0)
        last = max((entry.get("step", 0) for entry in run.log), default=0)
        planned = run.about.get("planned_steps")
        facts = {
            "stage": run.verb,
            "status": run.status,
            "steps": f"{last:,} of {planned:,}" if planned else f"{last:,}" if last else "",
            "model": str(run.results.get("model") or "") if run.verb == "eval" else "",
            "base model": base_of(run),
            "machine": f"{begin.get('num_processes', '')} process(es), {begin.get('device', '')}" if begin else "",
            "hours": f"{hours:.2f}" if hours is not None else "",
            "GPU-hours": f"{gpu_hours:.2f}" if gpu_hours else "0 (no GPU)" if gpu_hours is not None else "",
            "peak memory, GiB": f"{peak:.2f}" if peak > 0 else "",
        }
        for name, value in facts.items():
            rows.setdefault(name, []).append(value)
    cells = [[name, *values] for name, values in rows.items() if any(values)]
    cells += [[name, str(path.parent)] for name, path in (links or {}).items()]
    addresses = {name: address_of(path, target) for name, path in (links or {}).items()}
    return Block(columns=["", *(run.name for run in runs)], rows=cells, links=addresses)


def related_files(run: Run) -> dict[str, Path]:
    """Return the page of the pipeline that a run is a stage of, and the file of all its samples, where they exist."""
    place, chains = run.folder.resolve(), []
    for file in sorted(run.folder.parent.glob(f"*/{PIPELINE}")):
        folders = [stage["settings"].get("output_dir") for stage in read_json(file)["stages"].values()]
        if place in [Path(folder).resolve() for folder in folders if folder]:
            chains.append(file.parent / FOLDER / PAGE)
    samples = [run.folder / FOLDER / SAMPLES["after"], run.folder / "samples-policy.jsonl"]
    found = {"pipeline": chains[:1], "all samples": [path for path in samples if path.is_file()][:1]}
    return {name: paths[0] for name, paths in found.items() if paths}


def base_of(run: Run) -> str:
    """Return the name of the base model: of an evaluated adapter, that which its config names."""
    model = str(run.results.get("model") or "")
    config = Path(model) / "adapter_config.json"
    if run.verb == "eval":
        return str(read_json(config).get("base_model_name_or_path")) if config.is_file() else ""
    return str(run.about.get("base") or model)


def final_values(runs: Sequence[Run]) -> Block:
    """Return the last value of every plotted metric, one column per run."""
    metrics = dict.fromkeys(metric for plot in plots_of(runs) for metric in plot.curves)
    last = [[f"{ys[-1]:.4g}" if (ys := run.series(metric)[1]) else "" for run in runs] for metric in metrics]
    rows = [[metric, *values] for metric, values in zip(metrics, last, strict=True) if any(values)]
    return Block(columns=["last value", *(run.name for run in runs)], rows=rows)


def plot_blocks(runs: Sequence[Run], target: Path) -> list[Block]:
    """Return the plots, and of one run also the pictures that its stage has drawn."""
    drawings = [(plot.name, plot.title, plot.note, partial(draw, plot, runs)) for plot in plots_of(runs)]
    pictures = runs[0].images if len(runs) == 1 else []
    return [figures_block("Curves", target, drawings, pictures)] if drawings or pictures else []


def setting_blocks(runs: Sequence[Run]) -> list[Block]:
    """Return the settings that differ from the defaults, and folded all settings, digests and versions."""
    if not any(run.about for run in runs):
        return []
    changed = sorted({name for run in runs for name in run.about.get("changed", ())})
    titles = ["", *(run.name for run in runs)]

    def table(title: str, part: str, wanted: Sequence[str] | None = None) -> Block:
        parts = [run.about.get(part, {}) for run in runs]
        names = sorted({name for p in parts for name in p}) if wanted is None else wanted
        rows = [[name, *(_setting(p.get(name)) for p in parts)] for name in names]
        return Block(title, columns=titles, rows=rows, is_folded=wanted is None)

    return [
        table("Settings that differ from the defaults", "settings", changed),
        table("All settings", "settings"),
        table("Digests of data and weights", "digests"),
        table("Versions", "versions"),
    ]


def _setting(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 200 else text[:200] + " ..."


# Samples of each kind, and how many preference rows they are taken from.
NUM_SAMPLES, NUM_ROWS = 3, 500
LABELS_NOTE = "The probability that the chosen completion is the better one. A reward model learns little from 0.5."
Judges = dict[str, dict[str, Any]]
# Rows of the first table: title, and where the value is.
FACTS = (
    ("accuracy", "accuracy"),
    ("right in both orders", "consistent_accuracy"),
    ("orders that do not contradict each other", "position/position_consistency"),
    ("the completion shown first wins", "position/first_slot_rate"),
    ("calibration error", "calibration_error"),
    ("prefers the longer one", "length/preferred"),
    ("people prefer the longer one", "length/preferred_by_people"),
    ("accuracy where the better one is longer", "length/accuracy_more"),
    ("accuracy where it is shorter", "length/accuracy_less"),
)
COUNTS = ("rows", "equal_for_people", "decided", "ties", "abstained", "unjudged")


def judge_blocks(run: Run, target: Path) -> list[Block]:
    """Return the report of a measurement of judges, with the pictures that the stage has drawn."""
    judges: Judges = run.results["judges"]
    return [
        first_block(run.results),
        figures_block("Plots", target, (), run.images),
        *table_blocks(run.results),
        *wrong_blocks(run, judges),
        all_measured(judges, "All that was measured"),
    ]


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


def wrong_blocks(run: Run, judges: Judges) -> list[Block]:
    """Return the pairs on which each judge is most wrong."""
    blocks = []
    rows = read_lines(run.folder / PAIRS)
    for name in judges:
        said = [(row["judges"].get(name, {}).get("probability"), row) for row in rows]
        wrong = sorted(((p, i) for i, (p, _) in enumerate(said) if p is not None and p < 0.5))[:NUM_SAMPLES]
        samples = []
        for probability, index in wrong:
            row = rows[index]
            better = f"preferred by people, probability {probability:.3f}"
            samples.append((plain(row["prompt"]), [(better, plain(row["better"])), ("other", plain(row["other"]))]))
        blocks += [Block(f"Where {name} is most wrong", samples=samples)] if samples else []
    return [Block("Samples", blocks=blocks)] if blocks else []
