"""What a judge is: what it is asked, and what it may answer. Knows no model, no server and no label.

A judge answers for the ORDER in which it was shown two completions; that both orders are asked, and what becomes of
the answers, is decided in `judges/verdicts.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from onetrunk.types import Prompt

# Why a question has no answer yet. server: whatever judges has failed. refused: the server refuses this question or
# never finishes it, and answers others. unread: it replied, and the reply is no verdict.
ErrorKind = Literal["server", "refused", "unread"]


@dataclass(frozen=True)
class Principle:
    """One sentence by which completions are judged.

    Args:
        text: what is better, as a question or a command.
        weight: its share in a label, above 0.
        tags: short names; a rubric finds its check by them.
    """

    text: str
    weight: float = 1.0
    tags: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What a ledger keys on: a change of weight buys nothing anew."""
        return digest({"text": self.text, "tags": list(self.tags)})


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt, in the order in which a judge is shown them.

    Args:
        prompt: of both.
        first, second: the texts.
        first_stopped, second_stopped: False for a completion that was cut off at a length limit.
    """

    prompt: Prompt
    first: str
    second: str
    first_stopped: bool = True
    second_stopped: bool = True

    def flipped(self) -> Pair:
        """Return the pair in the other order."""
        return Pair(self.prompt, self.second, self.first, self.second_stopped, self.first_stopped)


@dataclass(frozen=True)
class Verdict:
    """What a judge says of one pair in one order, under one principle.

    Args:
        probability: that the completion shown first is the better one, in [0, 1]; None: it abstains, or failed.
        reason: the reasoning, or why it abstained.
        error: why there is no answer yet (a server that is down, a deadline): to be asked again, never a label.
        details: votes, tokens, label mass and whatever else belongs into a report; JSON.
        error_kind: what has gone wrong; says nothing where there is no error.
    """

    probability: float | None
    reason: str | None = None
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    error_kind: ErrorKind = "server"


@dataclass(frozen=True)
class Rating:
    """What a judge says of one completion alone: a score in [0, 1]; the other fields as in Verdict."""

    score: float | None
    reason: str | None = None
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    error_kind: ErrorKind = "server"


@runtime_checkable
class Judge(Protocol):
    """Compares completions two by two, and rates them one by one.

    Args:
        name: for reports and metrics, [A-Za-z0-9._-].
        identity: everything that an answer depends on beside the question (model and its revision or fingerprint,
            template, sampling), as JSON values: a ledger keys on it.
    """

    name: str
    identity: dict[str, Any]

    def compare(
        self,
        pairs: Sequence[Pair],
        principle: Principle,
        done: Callable[[int, Verdict], None] | None = None,
    ) -> list[Verdict]:
        """Return a verdict per pair; `done(index, verdict)` is called as each one is there, in any order."""
        ...

    def rate(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        principle: Principle,
        done: Callable[[int, Rating], None] | None = None,
        stopped: Sequence[bool] | None = None,
    ) -> list[Rating]:
        """Return a rating per completion; `done` as in `compare`.

        `stopped` is passed only where a completion was cut off at a length limit, which is False there. It is for
        judges that read an end token (reward models); judges that read text may ignore it.
        """
        ...


def stopped_keyword(stopped: Sequence[bool]) -> dict[str, list[bool]]:
    """Return the keyword `stopped` of `Judge.rate`; empty where no completion was cut off."""
    return {} if all(stopped) else {"stopped": list(stopped)}


def digest(value: Any) -> str:
    """Return the sha256 of a JSON value, the same for equal values."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
