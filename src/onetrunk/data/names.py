"""What the name of a dataset means: a path, or a name on the Hub. Imports no library."""

from __future__ import annotations

from pathlib import Path

# Suffix of a file -> the builder of `datasets` that reads it.
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def looks_like_path(name: str) -> bool:
    """Return whether a name that does not exist here was meant as a path, not as a dataset on the Hub."""
    if name.startswith((".", "/", "~")) or "\\" in name or Path(name).suffix in BUILDERS:
        return True
    # A dataset on the Hub is named "owner/name", so one separator does not make a path.
    return name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def missing_path(name: str) -> FileNotFoundError:
    """Return the error for a path without rows."""
    is_remote = "*" in Path(name).name or "://" in name
    remedy = "set streaming to true to read files there" if is_remote else "give an existing path"
    return FileNotFoundError(f"{name} does not exist (working folder {Path.cwd()}); {remedy}")
