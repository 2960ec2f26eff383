"""Checks of texts, conversations, prompts and completions, and one error that lists all bad rows of a dataset.

Each `*_fault` function returns what is wrong as a phrase that follows the column's name, or None.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from datasets import Dataset

if TYPE_CHECKING:
    from onetrunk.data.sharded import ShardedRows

LISTED_FAULTS = 20
ANSWERABLE_ROLES = ("user", "tool", "assistant")
# A chat template drops an unknown role or writes it as it is, so the model would learn a mistyped one.
ROLES = (
    *("system", "developer", "user", "assistant", "tool", "tool_response", "function", "ipython", "observation"),
    *("documents", "control", "thinking"),
)


def missing_columns(dataset: Dataset | ShardedRows, expected: str) -> ValueError:
    """Return the error for a dataset without the columns that `expected` describes."""
    return ValueError(
        f"the dataset has the columns {', '.join(sorted(dataset.column_names)) or 'none'}; expected {expected}: say"
        " which yours are: dataset_columns {prompt: yours} in a recipe, rename_column in Python"
    )


def require_rows(dataset: Dataset | ShardedRows) -> None:
    """Raise ValueError if a dataset is empty."""
    if len(dataset) == 0:
        raise ValueError("the dataset holds no rows; give at least one")


def raise_faults(faults: Iterable[str | None]) -> None:
    """Raise one ValueError if any row has a fault: how many rows, and the index and reason of the first 20.

    Args:
        faults: one per row of the dataset; read one after the other, and not held.
    """
    lines: list[str] = []
    count, index = 0, -1
    for index, fault in enumerate(faults):
        count += bool(fault)
        if fault and count <= LISTED_FAULTS:
            lines.append(f"  row {index}: {fault}")
    if not lines:
        return
    if count > LISTED_FAULTS:
        lines.append(f"  and {count - LISTED_FAULTS} more")
    raise ValueError("\n".join([f"{count} of {index + 1} rows cannot be used; repair or remove them:", *lines]))


def type_fault(value: object, types: tuple[type, ...], expected: str) -> str | None:
    """Check the type of a value; a bool is not a number."""
    if value is None:
        return "is missing (null)"
    if isinstance(value, bool) or not isinstance(value, types):
        return f"is of type {type(value).__name__}, expected {expected}"
    return None


def text_fault(text: object) -> str | None:
    """Check a text, which must be a string that is not blank."""
    if fault := type_fault(text, (str,), "text"):
        return fault
    if "\0" in text:
        return f"holds a NUL character at position {text.index(chr(0))}"
    return None if text.strip() else "is empty or white space only"


def conversation_fault(messages: object) -> str | None:
    """Check a conversation, which must be a list of messages, each with a known role and a text as content."""
    if fault := type_fault(messages, (list,), "a list"):
        return fault
    if not messages:
        return "is a conversation without messages"
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"has a message {index} that is not a {{'role', 'content'}} dict with a text as role"
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            return f"has a message {index} with the unknown role {role!r}, expected one of {', '.join(ROLES)}"
        may_be_empty = role != "user" and index < len(messages) - 1
        if (fault := text_fault(content)) and not (content == "" and may_be_empty):
            return f"has a message {index} ({role}) whose content {fault}"
    return None


def prompt_fault(prompt: object, conversational: bool) -> str | None:
    """Check a prompt.

    Args:
        prompt: a text or a conversation.
        conversational: whether the first prompt of the dataset is a conversation; all must be alike.
    """
    if isinstance(prompt, str if conversational else list):
        forms = ("text", "a conversation") if conversational else ("a conversation", "text")
        return f"is {forms[0]} where the first row is {forms[1]}"
    if not conversational:
        return text_fault(prompt)
    fault = conversation_fault(prompt)
    if fault is None and prompt[-1]["role"] not in ANSWERABLE_ROLES:
        fault = f"ends with a {prompt[-1]['role']} message, expected one of {', '.join(ANSWERABLE_ROLES)}"
    return fault


def completion_fault(completion: object, conversational: bool) -> str | None:
    """Check a completion: a text, or after a conversation a list of messages that ends with the assistant's."""
    if not conversational:
        return text_fault(completion)
    fault = conversation_fault(completion)
    if fault is None and completion[-1]["role"] != "assistant":
        fault = f"ends with a {completion[-1]['role']} message, expected the assistant's"
    return fault


def num_held_out(eval_size: int | float, count: int, unit: str) -> int:
    """Return how many of `count` items to hold out for evaluation.

    Args:
        eval_size: a number of items as an int, or a share between 0 and 1 as a float (at least one item).
        count: items in all.
        unit: what an item is, for the error message.

    Raises:
        ValueError: the training part or the evaluation part would be empty.
    """
    is_share = isinstance(eval_size, float)
    number = max(1, round(eval_size * count)) if is_share else eval_size
    if (is_share and not 0 < eval_size < 1) or not 0 < number < count:
        raise ValueError(
            f"eval_size {eval_size} of {count} {unit} leaves one part empty; set a number from 1 to"
            f" {max(1, count - 1)}, or a share between 0 and 1"
        )
    return number
