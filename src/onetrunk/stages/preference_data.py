"""The preference rows of a run, read as the dataset arguments say; the split keeps every prompt on one side.

Knows files and rows; no model.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl import extract_prompt

from onetrunk.data import load_rows, validate_completions
from onetrunk.preference_rows import split_by_prompt, validate_preferences, validate_sides
from onetrunk.stages.rows import load_training_rows


def load_preference_rows(data: Any, seed: int) -> tuple[Dataset, Dataset | None]:
    """Return training rows and held-out rows, every one checked; rows without a prompt get what their sides share.

    Args:
        data: TrainingDataArguments.
        seed: of the split, where `eval_size` makes one.

    Raises:
        ValueError: bad rows, of which part is said.
    """
    return load_training_rows(data, seed, preference_rows, split_by_prompt)


def preference_rows(rows: Dataset) -> Dataset:
    """Return preference rows with a column `prompt`, every one checked.

    Where there is no prompt, TRL takes it from what both sides share.

    Raises:
        ValueError: bad rows.
    """
    if "prompt" not in rows.column_names and {"chosen", "rejected"} <= set(rows.column_names):
        validate_sides(rows)
        rows = rows.map(extract_prompt, desc="prompts")
    validate_preferences(rows)
    return rows


def load_unlabelled_rows(name: str | None, split: str) -> Dataset | None:
    """Return rows with `prompt` and `completion` (and `completion_stopped`, if there is one), every one checked.

    None where no dataset is named.

    Raises:
        ValueError: bad rows, or other columns.
    """
    if name is None:
        return None
    rows = load_rows(name, split=split)
    if validate_completions(rows) != "prompt":
        raise ValueError(
            f"unlabelled_dataset_name {name} has no columns prompt and completion, which the teacher scores; give rows"
            " that have them"
        )
    optional = [name for name in ("completion_stopped",) if name in rows.column_names]
    return rows.select_columns(["prompt", "completion", *optional])
