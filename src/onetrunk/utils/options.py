"""`option`: a field of a settings class with its help text. Every room with settings uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any


def option(default: Any, text: str, choices: Sequence[str] | None = None) -> Any:
    """Return a dataclass field that TrlParser shows with a help text, and checks against `choices`."""
    metadata: dict[str, Any] = {"help": text}
    return field(default=default, metadata=metadata | ({"choices": list(choices)} if choices else {}))
