"""Samples as text, for tables, logs and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Characters of a sum of rewards.
LONGEST_SUM = 80
# A dense score that arrives at more tokens is not shown as a sum.
MOST_ARRIVALS = 12


def transcript_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a `transcript` as lines of text."""
    lines = []
    for entry in entries:
        given = next((name for name in ("observation", "context") if name in entry), None)
        if given is not None:
            lines.append(f"[{given}] {entry[given]}")
            continue
        numbers = [f"{name} {entry[name]:.3g}" for name in ("reward", "value") if name in entry]
        title = ", ".join([f"turn {entry['turn']}", *numbers])
        lines.append(f"[{title}] {entry['text']}")
    return "\n".join(lines)


def score_text(score: str, columns: Mapping[str, Any]) -> str:
    """Return a score as text, with where the reward fell, by the columns of `where_rewarded`, if it is dense."""
    turns, tokens = columns.get("turn_rewards"), columns.get("token_rewards")
    if not turns:
        return score
    if len(tokens or ()) > MOST_ARRIVALS:
        return f"{score} at {len(tokens)} tokens"
    parts = " + ".join(f"{reward:.3g}" for reward in (turns if tokens is None else [r for _, r in tokens]))
    return f"{score} = {short_text(parts, LONGEST_SUM)} ({'by turn' if tokens is None else 'as it arrived'})"


def short_text(text: Any, longest: int) -> str:
    """Return a text or a conversation as at most `longest` characters."""
    plain = text if isinstance(text, str) else "\n".join(f"{m['role']}: {m['content']}" for m in text)
    return plain if len(plain) <= longest else plain[:longest] + " ..."
