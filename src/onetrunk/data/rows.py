"""What is wrong with a text, a conversation, a prompt or a completion, in words; and one error for all bad rows.

Knows the shape of rows. Knows no tokenizer and no dataset.
"""

from __future__ import annotations

LISTED_FAULTS = 20
ANSWERABLE_ROLES = ("user", "tool", "assistant")
# A template leaves out, or writes as it stands, what it does not know: a mistyped role would be learnt.
ROLES = (
    *("system", "developer", "user", "assistant", "tool", "tool_response", "function", "ipython", "observation"),
    *("documents", "control", "thinking"),
)


def text_fault(text: object) -> str | None:
    """Say what is wrong with a text, or None: it must be a string with something else than white space in it."""
    if text is None:
        return "is missing (null)"
    if not isinstance(text, str):
        return f"is of type {type(text).__name__}, expected text"
    if "\0" in text:
        return f"holds a NUL character at position {text.index(chr(0))}"
    return None if text.strip() else "is empty or white space only"


def conversation_fault(messages: object) -> str | None:
    """Say what is wrong with a conversation, or None: a list of messages, each with a role and a text as content."""
    if not isinstance(messages, list):
        return text_fault(messages) if messages is None else f"is of type {type(messages).__name__}, expected a list"
    if not messages:
        return "is a conversation without messages"
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"has a message {index} that is not a {{'role', 'content'}} dict with a text as role"
        if message["role"] not in ROLES:
            return (
                f"has a message {index} with the unknown role {message['role']!r}, expected one of {', '.join(ROLES)}"
            )
        fault = text_fault(message.get("content"))
        blank_is_fine = message["role"] != "user" and index < len(messages) - 1
        if fault and not (message.get("content") == "" and blank_is_fine):
            return f"has a message {index} ({message['role']}) whose content {fault}"
    return None


def prompt_fault(prompt: object, conversational: bool) -> str | None:
    """Say what is wrong with a prompt, or None. `conversational`: what the other prompts of the dataset are."""
    if isinstance(prompt, str if conversational else list):
        kinds = ("text", "a conversation") if conversational else ("a conversation", "text")
        return f"is {kinds[0]} where the first row is {kinds[1]}"
    if not conversational:
        return text_fault(prompt)
    fault = conversation_fault(prompt)
    if fault is None and prompt[-1]["role"] not in ANSWERABLE_ROLES:
        fault = f"ends with a {prompt[-1]['role']} message, expected one of {', '.join(ANSWERABLE_ROLES)}"
    return fault


def completion_fault(completion: object, conversational: bool) -> str | None:
    """Say what is wrong with a completion, or None: a text, after a conversation messages that the assistant ends."""
    if not conversational:
        return text_fault(completion)
    fault = conversation_fault(completion)
    if fault is None and completion[-1]["role"] != "assistant":
        fault = f"ends with a {completion[-1]['role']} message, expected the assistant's"
    return fault


def raise_faults(faults: list[tuple[int, str]], num_rows: int) -> None:
    """Raise one ValueError for all bad rows, if there are any: how many, and index and reason of the first 20."""
    if not faults:
        return
    lines = [f"  row {index}: {reason}" for index, reason in faults[:LISTED_FAULTS]]
    if len(faults) > LISTED_FAULTS:
        lines.append(f"  and {len(faults) - LISTED_FAULTS} more")
    raise ValueError("\n".join([f"{len(faults)} of {num_rows} rows cannot be used; repair or remove them:", *lines]))
