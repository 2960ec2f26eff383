"""What a run of `onetrunk prefs` leaves in its folder: rows, statistics, a dataset card; and whose the folder is.

    README.md         the dataset card: how the rows were made, and what they are like
    statistics.json   the same figures for programs (statistics-00000-of-00004.json for a shard)
    settings.json     everything that decides the rows; a run with other settings is refused
    data/             the rows: one file, or one per shard
    ledger/           every completion, verdict and rating, kept as soon as it is there

Knows figures and rows; no judge and no model.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData
from rich.table import Table

from onetrunk.feedback.preferences import plain
from onetrunk.feedback.shards import Shard, read_rows
from onetrunk.judges.verdicts import judge_warnings
from onetrunk.utils.files import atomic_write_json, atomic_write_text, read_json
from onetrunk.utils.redaction import redact_all

SETTINGS, CARD = "settings.json", "README.md"
NAMES = {"pairs": "preferences", "revise": "revisions"}
LONGEST_CELL = 300
LENGTH_WARNING = 0.65
ABOUT = {
    "pairs": "Preferences of a judge between completions of the same prompts. `probability` is that of `chosen` being"
    " the better one: the mean over principles{orders}. `margin` is its logit, `votes` what each principle said,"
    " `consistent` whether both orders agree. `chosen_stopped` and `rejected_stopped` are false for a completion that"
    " was cut off at max_completion_length, which a reward model reads without an end token.",
    "revise": "Completions that a model has criticised by a principle and written anew, for supervised fine-tuning:"
    " `completion` is the last revision, `original` the completion before, `trail` the principles, critiques and"
    " revisions between them.",
}


def rows_path(folder: Path, mode: str, suffix: str, part: Shard) -> Path:
    """Return the file of a run's rows."""
    return folder / "data" / f"{NAMES[mode]}{part.suffix()}.{suffix}"


def statistics_path(folder: Path, part: Shard) -> Path:
    """Return the file of a run's statistics."""
    return folder / f"statistics{part.suffix()}.json"


def ledger_path(folder: Path, part: Shard) -> Path:
    """Return the file of what a run has bought and sampled."""
    return folder / "ledger" / f"ledger{part.suffix()}.jsonl"


def claim_folder(folder: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Make a folder the run's own, or find that it is.

    Args:
        settings: everything that decides the rows, as JSON values; what is not known yet may be missing, then the
            rest is compared and nothing is written.
        overwrite: take the folder over from other settings.

    Raises:
        ValueError: it belongs to other settings; the sentence says what differs.
    """
    path, settings = folder / SETTINGS, redact_all(settings)
    if path.is_file() and not overwrite:
        there = read_json(path)
        here = json.loads(json.dumps(settings))
        changed = [name for name in here if there.get(name) != here[name]]
        if changed:
            differences = "; ".join(f"{n}: {_short(there.get(n))} there, {_short(here[n])} here" for n in changed)
            raise ValueError(
                f"{folder} holds the rows of a run with other settings ({differences}); go on with those, set"
                " overwrite_output_dir to true to replace the rows, or name another output_dir"
            )
    elif not overwrite and ((folder / CARD).exists() or (folder / "data").exists()):
        raise ValueError(
            f"{folder} holds something else (a README.md or data, and no {SETTINGS}); name another output_dir, or set"
            " overwrite_output_dir to true to write there all the same"
        )
    if "model" in settings:
        if overwrite and path.is_file() and read_json(path) != json.loads(json.dumps(settings)):
            _delete_results(folder)
        atomic_write_json(path, settings)


def _delete_results(folder: Path) -> None:
    """Delete the rows and figures of other settings: files of another name would be read beside the new ones."""
    patterns = [f"data/{name}*" for name in NAMES.values()] + ["statistics*.json", CARD]
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        path.unlink()


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:120]}..."


def write_report(folder: Path, part: Shard, statistics: dict[str, Any], rows: Path, about: dict[str, Any]) -> None:
    """Write statistics.json and, of the whole or of a merge, the card.

    Args:
        statistics: figures, as JSON values.
        rows: the file, or one of the files, from which the card takes its examples.
        about: lines of the card, name -> value; with `mode` and `format`.
    """
    about = redact_all(about)
    atomic_write_json(statistics_path(folder, part), {**statistics, "about": about})
    if part.count == 1:
        atomic_write_text(folder / CARD, card(statistics, about, list(islice(read_rows(rows), 3))))


def card(statistics: dict[str, Any], about: dict[str, Any], examples: list[dict[str, Any]]) -> str:
    """Return the dataset card: metadata as YAML, then Markdown."""
    mode, suffix = about["mode"], about["format"]
    metadata = DatasetCardData(
        tags=["onetrunk", "trl", "preference" if mode == "pairs" else "sft", "synthetic"],
        configs=[{"config_name": "default", "data_files": f"data/{NAMES[mode]}*.{suffix}"}],
    )
    orders = " and both orders" if about.get("both_orders") else ""
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {NAMES[mode].capitalize()}",
        ABOUT[mode].format(orders=orders) + f" Made with onetrunk {sys.modules['onetrunk'].__version__}.",
        "## How",
        _markdown({name: value for name, value in about.items() if name not in ("mode", "format")}),
        "## What they are like",
        *warnings_of(statistics),
        _markdown(dict(flat(statistics))),
        "## Examples",
        *(_example(row) for row in examples),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def warnings_of(statistics: dict[str, Any]) -> list[str]:
    """Return sentences on what a reader of the figures should not overlook."""
    counts, found = statistics["counts"], []
    longer = statistics.get("rows", {}).get("length", {}).get("longer_is_chosen_fraction")
    if longer is not None and longer >= LENGTH_WARNING:
        found.append(f"The longer completion is chosen in {longer:.0%} of the pairs: a reward model may learn length.")
    if longer is not None and longer <= 1 - LENGTH_WARNING:
        found.append(f"The shorter completion is chosen in {1 - longer:.0%} of the pairs: so may brevity be learnt.")
    if "judge" in statistics:
        found += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in judge_warnings(statistics["judge"])]
    if counts.get("unjudged"):
        found.append(f"{counts['unjudged']} pairs have no verdict yet; the same command asks for them again.")
    return found


def flat(figures: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested figures as (path, value)."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def added(parts: list[dict[str, Any]]) -> Counter[str]:
    """Return the sums of the counts of several statistics."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part["counts"])
    return total


def sample_table(rows: list[dict[str, Any]]) -> Table:
    """Return rows as a table for the terminal."""
    columns = [c for c in ("prompt", "chosen", "rejected", "probability", "original", "completion") if c in rows[0]]
    table = Table(title="samples", show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[column]).replace("[", r"\[") for column in columns))
    return table


def _cell(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else plain(value)
    return text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + " ..."


def _markdown(facts: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        return text.replace("|", "\\|").replace("\n", " ")

    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {shown(value)} |" for name, value in facts.items())])


def _example(row: dict[str, Any]) -> str:
    # In a fence of its own a completion cannot become part of the card.
    text = json.dumps(row, indent=1, ensure_ascii=False).replace("`", "'")
    return f"```json\n{text if len(text) <= 2000 else text[:2000] + ' ...'}\n```"
