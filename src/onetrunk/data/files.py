"""Reads datasets from a file, a folder or the Hub, and renames their columns to ours.

Missing, empty and damaged files and unknown splits become errors that name the file and what to change. What is in a
row is checked by `rows.py`.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict

from onetrunk.utils.files import looks_like_path

logger = logging.getLogger(__name__)

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# Columns that hold messages; in others a `from` is the user's own.
CONVERSATIONS = ("conversations", "messages", "prompt", "completion", "chosen", "rejected")
# Suffix of a file -> the builder of `datasets` that reads it.
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_rows(
    name_or_path: str | Path,
    *,
    split: str = "train",
    config_name: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Dataset:
    """Read a dataset from a file, a folder, or the Hub.

    Args:
        name_or_path: a .jsonl, .json, .parquet or .csv file, or a pattern of them (`rows/*.jsonl`, `s3://...`); a
            folder of such files or one written by `save_to_disk`; else a name on the Hub. A name that starts with
            `.`, `/` or `~`, has several separators or one of these suffixes, or begins with an existing folder, is a
            path and never looked up on the Hub.
        split: name of the split, optionally with a slice ("train[:100]"); a single file has the split "train".
        config_name: configuration of a dataset that has several.
        columns: our name -> the dataset's name: {"prompt": "question"} renames the column `question` to `prompt`.

    Raises:
        FileNotFoundError: the path or name does not exist.
        ValueError: the data is empty or damaged, or the suffix, split or column is unknown.
        RuntimeError: the Hub does not answer.
    """
    name, path = str(name_or_path), Path(os.path.expanduser(name_or_path))
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        rows = _load_saved(path, split)
    else:
        builder = dataset_builder(name, config_name)
        with row_errors(name, split):
            builder.download_and_prepare()
            rows = builder.as_dataset(split)
            rows.data.validate(full=True)  # The JSON reader accepts bytes that are not UTF-8.
    if len(rows) == 0:
        raise ValueError(f"{name_or_path} (split {split!r}) holds no rows; give a dataset with at least one")
    return _from_sharegpt(_rename_columns(rows, columns or {}))


def _from_sharegpt(rows: Dataset) -> Dataset:
    """Return rows with ShareGPT's messages ({from, value}) as {role, content}, and `conversations` as `messages`."""
    first = {name: (rows[0][name] or [None])[0] for name in CONVERSATIONS if isinstance(rows[0].get(name), list)}
    names = [name for name, m in first.items() if isinstance(m, dict) and {"from", "value"} <= m.keys()]
    if not names:
        return rows

    def message(theirs: dict[str, str]) -> dict[str, str]:
        return {"role": SHAREGPT_ROLES.get(theirs["from"], theirs["from"]), "content": theirs["value"]}

    # A row without a conversation is left as it is: what reads the rows says which one it is.
    rows = rows.map(lambda row: {n: row[n] and [message(m) for m in row[n]] for n in names}, desc="ShareGPT")
    if "conversations" in names and "messages" not in rows.column_names:
        rows = rows.rename_column("conversations", "messages")
    logger.warning("%d rows in ShareGPT's form (%s): from and value are role and content", len(rows), ", ".join(names))
    return rows


def dataset_builder(name: str, config_name: str | None, **settings: Any) -> datasets.DatasetBuilder:
    """Return what reads a dataset; its files are known and not read yet.

    Args:
        name: see `load_rows`.
        **settings: arguments of `datasets.load_dataset_builder`.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as `load_rows`.
    """
    path = Path(os.path.expanduser(name))
    names_files = not path.is_dir() and (path.is_file() or path.suffix in BUILDERS or "*" in name or "://" in name)
    if names_files and path.suffix not in BUILDERS:
        raise ValueError(f"{name} does not end in one of {', '.join(BUILDERS)}; give such a file, or *.jsonl")
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; give a file with at least one row")
    is_path = names_files or path.is_dir() or looks_like_path(name, BUILDERS)
    try:
        if names_files:
            files = {"train": name if "://" in name else glob.escape(str(path)) if path.is_file() else str(path)}
            builder = datasets.load_dataset_builder(BUILDERS[path.suffix], data_files=files, **settings)
            if not builder.config.data_files["train"]:
                raise FileNotFoundError
            return builder
        if is_path and not path.is_dir():
            raise FileNotFoundError
        # A whole path: a folder named text or json is not the builder of that name.
        source = os.path.abspath(path) if is_path else name
        builder = datasets.load_dataset_builder(source, config_name, **settings)
        files = [str(file) for part in (builder.config.data_files or {}).values() for file in part] if is_path else []
        outside = [file for file in files if not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(path))]
        if outside:
            raise ValueError(f"its README.md names {outside[0]}, which is not in that folder; name the file itself")
        return builder
    except FileNotFoundError as error:
        fault = f"{name} does not exist (working folder {Path.cwd()}), or holds no {', '.join(BUILDERS)} file"
        if not is_path:
            fault = f"{name} is not a local path, nor a dataset on the Hub that you may read (try `hf auth login`)"
        raise FileNotFoundError(f"{fault}; check the name") from error
    except (OSError, ImportError) as error:
        raise RuntimeError(
            f"{name} cannot be reached ({' '.join(str(error).split())}); try again or give a file"
        ) from error
    except (ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"dataset {name}, config {config_name!r}: {error}") from error


@contextlib.contextmanager
def row_errors(name: str, split: str) -> Iterator[None]:
    """Turn the loader's errors about the rows of `name` into a ValueError that names it."""
    try:
        yield
    except ConnectionError as error:
        raise RuntimeError(f"{name} cannot be reached: {error}; try again or give a file") from error
    except (datasets.exceptions.DatasetsError, ValueError, TypeError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):  # For example a full disk, which is not a fault of the rows.
            raise cause from None
        raise ValueError(
            f"{name} cannot be read as split {split!r}: {str(cause).strip()}; repair it or name another split"
        ) from error


def _load_saved(path: Path, split: str) -> Dataset:
    loaded = datasets.load_from_disk(str(path))
    splits = loaded if isinstance(loaded, DatasetDict) else {str(loaded.split or "train"): loaded, "train": loaded}
    if split in splits:
        return splits[split]
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(splits[name]) for name in splits})
    except ValueError as error:
        raise ValueError(
            f"{path} has the splits {', '.join(sorted(splits))}, got {split!r}; set split to one of them"
        ) from error
    return datasets.concatenate_datasets([splits[p.splitname].select(range(p.from_, p.to)) for p in parts])


def _rename_columns(rows: Dataset, columns: Mapping[str, str]) -> Dataset:
    check_renaming(rows.column_names, columns)
    return rows.rename_columns({theirs: ours for ours, theirs in columns.items()}) if columns else rows


def check_renaming(names: Sequence[str], columns: Mapping[str, str]) -> None:
    """Raise ValueError if columns cannot be renamed.

    Args:
        columns: our name -> the dataset's name.
    """
    theirs = list(columns.values())
    if not set(theirs) <= set(names) or len(set(theirs)) < len(theirs):
        raise ValueError(
            f"dataset_columns {dict(columns)} must name distinct columns of the dataset, which has "
            f"{', '.join(names)}; write ours first: {{prompt: question}}"
        )
    taken = [ours for ours in columns if ours in names and ours not in theirs]
    if taken:
        raise ValueError(
            f"the dataset already has {', '.join(taken)}; rename or remove it before renaming another to it"
        )


def missing_columns(names: Sequence[str], expected: str) -> ValueError:
    """Return the error for a dataset without the columns that `expected` describes."""
    remedy = "map yours: dataset_columns {prompt: yours} in a recipe, rename_column in Python"
    if {"completion", "label"} <= set(names):
        remedy = (
            "each of these rows labels one completion (KTO); pair one labelled true with one labelled false of the"
            " same prompt"
        )
    columns = ", ".join(sorted(names)) or "none"
    return ValueError(f"the dataset has the columns {columns}; expected {expected}: {remedy}")
