"""The output folder of `onetrunk prefs`: its files, its dataset card, and the check that it belongs to the run.

README.md         the dataset card: how the rows were made, and their statistics
statistics.json   the same statistics for programs (statistics-00000-of-00004.json for a shard)
settings.json     everything that decides the rows; a run with other settings is rejected
data/             the rows: one file, or one per shard
ledger/           every completion, verdict and rating, kept as soon as it arrives, and what they cost
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData

from onetrunk.feedback.shards import Shard, read_rows
from onetrunk.judges.labels import statistics_warnings
from onetrunk.report.blocks import flat
from onetrunk.stages.results import as_json, markdown_table, shortened
from onetrunk.utils.files import atomic_write_json, atomic_write_text, read_json
from onetrunk.utils.redaction import redact, redact_all

SETTINGS, CARD = "settings.json", "README.md"
NAMES = {"pairs": "preferences", "revise": "revisions"}
ABOUT = {
    "pairs": "Preferences of a judge between completions of the same prompts. `probability` is that of `chosen` being"
    " the better one: the mean over principles and both orders. `votes` is what each principle said,"
    " `consistent` whether both orders agree. `chosen_stopped` and `rejected_stopped` are false for a completion that"
    " was cut off at max_completion_length, which a reward model reads without an end token.",
    "revise": "Completions that a model has criticised by a principle and rewritten, for supervised fine-tuning:"
    " `completion` is the last revision, `original` the completion before, `trail` the principles, critiques and"
    " revisions between them.",
}
TAGS = {"pairs": "preference", "revise": "sft"}


def rows_path(folder: Path, kind: str, part: Shard) -> Path:
    return folder / "data" / f"{NAMES[kind]}{part.suffix()}.jsonl"


def pushed_files(kind: str) -> tuple[str, ...]:
    """Return the patterns of the files that are uploaded: rows, statistics and card, without ledgers."""
    return CARD, f"data/{NAMES[kind]}*", "statistics.json"


def statistics_path(folder: Path, part: Shard) -> Path:
    return folder / f"statistics{part.suffix()}.json"


def ledger_path(folder: Path, part: Shard) -> Path:
    return folder / "ledger" / f"ledger{part.suffix()}.db"


def claim_folder(folder: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Check that a folder is new or belongs to a run with these settings, and write the settings into it.

    Args:
        settings: everything that decides the rows, as JSON values. Without the key "model", which is known only after
            the model is loaded, the others are compared and nothing is written.
        overwrite: replace the results of other settings.
    """
    path, settings = folder / SETTINGS, json.loads(json.dumps(redact_all(settings)))
    there = read_json(path) if path.is_file() else {}
    changed = [name for name in settings if there.get(name) != settings[name]]
    if there and changed and not overwrite:
        pairs = [(name, as_json(there.get(name)), as_json(settings[name])) for name in changed]
        differences = "; ".join(f"{name}: {old} there, {new} here" for name, old, new in pairs)
        raise ValueError(
            f"{folder} holds the rows of a run with other settings ({differences}); use those settings, set"
            " overwrite_output_dir to true to replace the rows, or name another output_dir"
        )
    if not there and not overwrite and ((folder / CARD).exists() or (folder / "data").exists()):
        raise ValueError(
            f"{folder} holds something else (a README.md or data, and no {SETTINGS}); name another output_dir, or set"
            " overwrite_output_dir to true to write there anyway"
        )
    if "model" not in settings:
        return
    if there and there != settings:
        # A file of the old settings under another name would be read together with the new ones.
        patterns = [f"data/{name}*" for name in NAMES.values()] + ["statistics*.json", CARD]
        for old in [old for pattern in patterns for old in folder.glob(pattern)]:
            old.unlink()
    atomic_write_json(path, settings)


def write_report(folder: Path, part: Shard, statistics: dict[str, Any], rows: Path, about: dict[str, Any]) -> Path:
    """Write statistics.json and, unless `part` is one of several shards, the card; return the path of the former.

    The card takes its examples from the file `rows`; `about` are its facts, including `mode`.
    """
    about = redact_all(about)
    path = statistics_path(folder, part)
    atomic_write_json(path, {**statistics, "about": about})
    if part.count == 1:
        atomic_write_text(folder / CARD, redact(card(statistics, about, list(islice(read_rows(rows), 3)))))
    return path


def card(statistics: dict[str, Any], about: dict[str, Any], examples: list[dict[str, Any]]) -> str:
    mode = about["mode"]
    metadata = DatasetCardData(
        tags=["onetrunk", "trl", TAGS[mode], "synthetic"],
        configs=[{"config_name": "default", "data_files": f"data/{NAMES[mode]}*.jsonl"}],
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {NAMES[mode].capitalize()}",
        ABOUT[mode] + f" Made with onetrunk {sys.modules['onetrunk'].__version__}.",
        "## How",
        markdown_table({"": {name: value for name, value in about.items() if name != "mode"}}),
        "## What they are like",
        *(f"{text[0].upper()}{text[1:]}." for text in statistics_warnings(statistics)),
        markdown_table({"": dict(flat(statistics))}),
        "## Examples",
        *(_example(row) for row in examples),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _example(row: dict[str, Any]) -> str:
    # Inside a code fence a completion cannot become part of the card's Markdown.
    text = json.dumps(row, indent=1, ensure_ascii=False).replace("`", "'")
    return f"```json\n{shortened(text, 2000)}\n```"
