"""Reads datasets from a file, a folder or the Hub, and renames their columns to ours.

Missing, empty and damaged files and unknown splits become errors that name the file and what to change. What is in a
row is checked by `prompts.py` and `preferences.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict

from onetrunk.data.names import BUILDERS, looks_like_path, missing_path
from onetrunk.utils.files import parse_json


def load_rows(
    name_or_path: str | Path,
    *,
    split: str = "train",
    config_name: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Dataset:
    """Read a dataset from a file, a folder, or the Hub.

    Args:
        name_or_path: a .jsonl, .json, .parquet or .csv file; a folder of such files or one written by `save_to_disk`;
            else a name on the Hub. A name that starts with `.`, `/` or `~`, has several separators or one of these
            suffixes, or begins with an existing folder, is a path and never looked up on the Hub.
        split: name of the split, optionally with a slice ("train[:100]"); a single file has the split "train".
        config_name: configuration of a dataset that has several.
        columns: our name -> the dataset's name: {"prompt": "question"} renames the column `question` to `prompt`.

    Raises:
        FileNotFoundError: the path or name does not exist.
        ValueError: the data is empty or damaged, or the suffix, split or column is unknown.
        RuntimeError: the Hub does not answer.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        rows = _load_local(path, split, config_name)
    elif looks_like_path(str(name_or_path)):
        raise missing_path(str(name_or_path))
    else:
        rows = _load_hub(str(name_or_path), split, config_name)
    if len(rows) == 0:
        raise ValueError(f"{name_or_path} (split {split!r}) holds no rows; give a dataset with at least one")
    return _rename_columns(rows, columns or {})


def _load_local(path: Path, split: str, config_name: str | None) -> Dataset:
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return _load_saved(path, split)
        check_folder(path)
        files = sorted(file for suffix in BUILDERS for file in path.rglob(f"*{suffix}"))
        if not files:
            raise ValueError(f"folder {path} holds no {', '.join(BUILDERS)} file; give a folder that does")
        return _build(str(path), path, files, split, name=config_name)
    if path.suffix not in BUILDERS:
        raise ValueError(f"{path} has the suffix {path.suffix!r}; expected one of {', '.join(BUILDERS)}")
    if re.fullmatch(r"train(\[.*\])?", split) is None:
        raise ValueError(f"{path} is one file and has only the split 'train', got {split!r}; give that split's file")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; give a file with at least one row")
    return _build(BUILDERS[path.suffix], path, [path], split, data_files={"train": str(path)})


def _build(builder: str, path: Path, files: list[Path], split: str, **settings: Any) -> Dataset:
    with row_errors(str(path), files, split):
        rows = datasets.load_dataset(builder, split=split, **settings)
        rows.data.validate(full=True)  # The JSON reader accepts bytes that are not UTF-8.
        return rows


@contextlib.contextmanager
def row_errors(name: str, files: Sequence[Path], split: str) -> Iterator[None]:
    """Turn the loader's errors about rows of `name` into one that says where in its local `files` the fault is."""
    try:
        yield
    except ConnectionError as error:
        raise RuntimeError(f"{name} cannot be reached: {error}; try again or give a file") from error
    except (datasets.exceptions.DatasetsError, ValueError, TypeError, OSError) as error:
        _require_cache()
        faults = (_json_fault(file) for file in files if BUILDERS.get(file.suffix) == "json")
        cause = next(filter(None, faults), None) or str(error.__cause__ or error).strip()
        raise ValueError(
            f"{name} cannot be read as split {split!r}: {cause}; repair it or name another split"
        ) from error


def _require_cache() -> None:
    """Raise RuntimeError if the datasets cache cannot be written; the loader's error looks like one of the rows."""
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"0")
    except OSError as error:
        raise RuntimeError(
            f"{folder}, where rows are cached, cannot be written ({error.strerror}); make room there, or set"
            " HF_DATASETS_CACHE or HF_HOME to another folder"
        ) from error


def _load_saved(path: Path, split: str) -> Dataset:
    loaded = datasets.load_from_disk(str(path))
    splits = loaded if isinstance(loaded, DatasetDict) else {str(loaded.split or "train"): loaded, "train": loaded}
    if split not in splits:
        raise ValueError(f"{path} has the splits {', '.join(sorted(splits))}, got {split!r}; set split to one of them")
    return splits[split]


def require_files(paths: Sequence[str], root: str, is_file: Callable[[str], bool]) -> None:
    """Reject what `datasets` leaves out without a message: a link that leads nowhere, a pipe, a folder.

    Hidden names are left out on purpose, and a folder is no fault if the paths name files in it.

    Args:
        paths: where rows are expected.
        root: the folder in which names may be hidden.
        is_file: whether a path is a file, or a link to one.

    Raises:
        ValueError: names the path.
    """
    for path in paths:
        is_hidden = any(part.startswith((".", "__")) for part in path.removeprefix(root).split("/"))
        if not (is_hidden or is_file(path) or any(other.startswith(f"{path}/") for other in paths)):
            raise ValueError(
                f"{path} is not a file (but a folder, a pipe or a link that leads nowhere), and rows would be missing;"
                " restore or remove it, or name the files in the folder"
            )


def check_folder(folder: Path) -> None:
    """Reject a folder with rows that the loader leaves out: it does not follow links to folders, for example."""
    paths = (path for path in folder.rglob("*") if path.suffix in BUILDERS or path.is_symlink() and path.is_dir())
    require_files([str(path) for path in paths], str(folder), os.path.isfile)


def _json_fault(path: Path) -> str | None:
    """Return where a JSON file is damaged, with its line (the loader's own message counts rows of its buffer)."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        return f"{path.name} line {number}: the byte 0x{data[error.start]:02x} is not UTF-8"
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if path.suffix == ".json" and text.lstrip()[:1] == "[":
        lines = [(1, text)]
    for number, line in lines:
        try:
            value = parse_json(line)
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except json.JSONDecodeError as error:
            return f"{path.name} line {number - 1 + error.lineno}: {error.msg}"
        except UnicodeEncodeError:
            return f"{path.name} line {number}: half of a surrogate pair (\\ud800-\\udfff), which is not text"
        rows = value if isinstance(value, list) and number == len(lines) == 1 else [value]
        if not all(isinstance(row, dict) for row in rows):
            return f"{path.name} line {number}: expected an object with columns, got {line[:40]}"
    return None


def _load_hub(name: str, split: str, config_name: str | None) -> Dataset:
    with hub_errors(name, split, config_name):
        return datasets.load_dataset(name, config_name, split=split)


@contextlib.contextmanager
def hub_errors(name: str, split: str, config_name: str | None) -> Iterator[None]:
    """Turn the errors of a dataset on the Hub, or in a folder, into messages that say what to change."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name} is neither a local path nor a dataset that the Hub shows to you ({error}); check the name, or log"
            " in if it is private"
        ) from error
    except ConnectionError as error:
        raise RuntimeError(f"the Hub did not answer for dataset {name}: {error}; try again or give a file") from error
    except OSError:
        _require_cache()
        raise
    except (ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"dataset {name}, config {config_name!r}, split {split!r}: {error}") from error


def _rename_columns(rows: Dataset, columns: Mapping[str, str]) -> Dataset:
    check_renaming(rows.column_names, columns)
    return rows.rename_columns({theirs: ours for ours, theirs in columns.items()}) if columns else rows


def check_renaming(names: Sequence[str], columns: Mapping[str, str]) -> None:
    """Raise ValueError if columns cannot be renamed.

    Args:
        names: of the columns that there are.
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
