"""Mistakes in files that settings name, answered before torch is imported: constitutions, and columns of rows.

Only what every reader of a stage would reject is an error here; the stage itself checks the rest.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onetrunk.judges.constitution import load_constitution
from onetrunk.utils.files import parse_json
from onetrunk.verbs import VERBS

# A larger file is left to the stage.
MOST_BYTES = 2**23


class FileFault(ValueError):
    """A mistake in a file that a setting names."""


def check_files(values: Mapping[str, Any], verb: str) -> None:
    """Raise FileFault for a mistake in a constitution, or for columns that the rows of a local file do not have."""
    try:
        for name in ("constitution", "monitor_constitution"):
            if values.get(name):
                load_constitution(values[name])
        path = Path(values.get("dataset_name") or "").expanduser()
        names = column_names(path) if path.is_file() and path.stat().st_size <= MOST_BYTES else None
        if names and not values.get("environment"):
            check_columns(names, values.get("dataset_columns") or {}, VERBS[verb].columns)
    except ValueError as error:
        raise FileFault(str(error)) from error


def check_columns(names: list[str], renamed: Mapping[str, str], needed: tuple[tuple[str, ...], ...]) -> None:
    """Raise ValueError if columns that are renamed (ours to theirs) or needed are missing."""
    if renamed:
        from onetrunk.data.files import check_renaming  # The import takes most of a second.

        check_renaming(names, renamed)
    ours = {name for name in names if name not in renamed.values()} | set(renamed)
    readable = ours | {"messages"} if "conversations" in ours else ours  # As ShareGPT calls them.
    if needed and not any(readable.issuperset(columns) for columns in needed):
        from onetrunk.data.files import missing_columns

        raise missing_columns(sorted(ours), ", or ".join(" and ".join(columns) for columns in needed))


def column_names(path: Path) -> list[str] | None:
    """Return the columns of a file of rows; None for one of another kind, or one that its reader will reject."""
    try:
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                return next(csv.reader(file), None)
        if path.suffix == ".jsonl":
            rows = [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            return list(dict.fromkeys(name for row in rows for name in row.keys()))
    except (OSError, ValueError, AttributeError, csv.Error):
        return None
    return None
