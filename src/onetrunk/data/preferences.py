"""Preference rows: two completions of a prompt, and which is better, how surely; checked and split by prompt.

Knows the shape of such rows. Knows no tokenizer, no model and no judge; files and the Hub are `dataset_files.py`.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from datasets import Dataset

from onetrunk.data.rows import completion_fault, conversation_fault, prompt_fault, raise_faults, text_fault

PAIR = ("prompt", "chosen", "rejected")
# Optional columns: False for a completion that was cut off at a length limit.
STOPPED = ("chosen_stopped", "rejected_stopped")


def validate_preferences(dataset: Dataset) -> bool:
    """Check every row of a dataset of preferences.

    Columns: `prompt`, `chosen`, `rejected` (texts, or conversations: the prompt a list of messages, the others lists
    that end with an assistant message); optional `chosen_stopped` and `rejected_stopped`, False for a completion that
    was cut off at a length limit and is read without an end token; optional `probability` that `chosen` is the
    better one, in [0, 1]; optional `margin`, a finite number.

    Returns:
        True where the rows are conversations.

    Raises:
        ValueError: a column is missing, there are no rows, or bad rows: how many, and index and reason of the first
            20.
    """
    missing = [name for name in PAIR if name not in dataset.column_names]
    if missing:
        raise ValueError(
            f"the dataset has the columns {', '.join(sorted(dataset.column_names)) or 'none'}; expected prompt, chosen"
            f" and rejected, and {', '.join(missing)} is missing: say which yours are: dataset_columns {{prompt:"
            " yours} in a recipe, rename_column in Python"
        )
    if len(dataset) == 0:
        raise ValueError("the dataset holds no rows; give at least one")
    conversational = isinstance(dataset[0]["prompt"], list)
    faults = [(index, _pair_fault(row, conversational)) for index, row in enumerate(dataset)]
    raise_faults([(index, fault) for index, fault in faults if fault], len(dataset))
    return conversational


def stopped_column(dataset: Dataset, name: str) -> list[bool]:
    """Return the column `name`, False for completions that were cut off; all True where there is no such column."""
    return list(dataset[name]) if name in dataset.column_names else [True] * len(dataset)


def validate_sides(dataset: Dataset) -> None:
    """Check `chosen` and `rejected` of rows that have no `prompt` yet: both sides are to share their beginning.

    Raises:
        ValueError: bad rows: how many, and index and reason of the first 20.
    """
    conversational = len(dataset) > 0 and isinstance(dataset[0]["chosen"], list)
    check = conversation_fault if conversational else text_fault
    faults = [
        (index, f"{name} {fault}")
        for index, row in enumerate(dataset)
        if (name := next((name for name in PAIR[1:] if check(row[name])), None)) and (fault := check(row[name]))
    ]
    raise_faults(faults, len(dataset))


def _pair_fault(row: dict[str, Any], conversational: bool) -> str | None:
    fault = prompt_fault(row["prompt"], conversational)
    if fault:
        return f"prompt {fault}"
    for name in ("chosen", "rejected"):
        fault = completion_fault(row[name], conversational)
        if fault:
            return f"{name} {fault}"
    if row["chosen"] == row["rejected"]:
        return "chosen and rejected are identical: there is nothing to prefer"
    for name in STOPPED:
        if name in row and not isinstance(row[name], bool):
            return f"{name} is {row[name]!r}, expected true or false"
    for name in ("probability", "margin"):
        fault = _number_fault(row[name]) if name in row else None
        if fault:
            return f"{name} {fault}"
    if "probability" in row and not 0 <= row["probability"] <= 1:
        return f"probability is {row['probability']}, expected a number from 0 to 1"
    return None


def _number_fault(value: object) -> str | None:
    if value is None:
        return "is missing (null)"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"is of type {type(value).__name__}, expected a number"
    return None if math.isfinite(value) else f"is {value}, expected a finite number"


def split_by_prompt(dataset: Dataset, eval_size: int | float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a dataset at random so that all rows of a prompt stand on one side; both parts keep the order of the rows.

    Args:
        eval_size: prompts to hold out as an int, or a share of the prompts between 0 and 1 as a float.
        seed: the same seed splits the same way.

    Returns:
        The training part and the evaluation part, neither empty.

    Raises:
        ValueError: one part would be empty.
    """
    keys = [json.dumps(prompt, sort_keys=True) for prompt in dataset["prompt"]]
    prompts = list(dict.fromkeys(keys))
    num_eval = max(1, round(eval_size * len(prompts))) if isinstance(eval_size, float) else eval_size
    if (isinstance(eval_size, float) and not 0 < eval_size < 1) or not 0 < num_eval < len(prompts):
        raise ValueError(
            f"eval_size {eval_size} of {len(prompts)} different prompts leaves one part empty; set a number of prompts"
            f" from 1 to {max(1, len(prompts) - 1)}, or a share between 0 and 1"
        )
    drawn = np.random.default_rng(seed).permutation(len(prompts))[:num_eval]
    held_out = {prompts[index] for index in drawn}
    train = [index for index, key in enumerate(keys) if key not in held_out]
    return dataset.select(train), dataset.select([index for index, key in enumerate(keys) if key in held_out])
