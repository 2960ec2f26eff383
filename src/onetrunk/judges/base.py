"""The interface of a judge: the questions it is asked and the answers it may give.

A judge answers for the ORDER in which it is shown two completions. `judges/verdicts.py` asks in both orders and turns
the answers into labels.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from onetrunk.types import Prompt

# Why a question has no answer yet. server: the judge itself failed. refused: the server rejects this question or never
# finishes it, but answers others. unread: it replied, and the reply is not a verdict.
ErrorKind = Literal["server", "refused", "unread"]


@dataclass(frozen=True)
class Principle:
    """One criterion by which completions are judged.

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
        """Hash for ledger keys. It leaves out the weight, so that a new weight does not pay for new answers."""
        return digest({"text": self.text, "tags": list(self.tags)})


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt, in the order in which a judge is shown them.

    `first_stopped` and `second_stopped` are False for a completion that was cut off at a length limit.
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
    """A judge's answer about one pair in one order, under one principle.

    Args:
        probability: that the completion shown first is the better one, in [0, 1]; None if the judge abstains or fails.
        reason: the judge's reasoning, or why it abstained.
        error: why there is no answer yet (server down, deadline). The question is asked again; never a label.
        details: votes, tokens, label mass and other values for a report, as JSON values.
        error_kind: the cause of `error`; has no meaning without one.
    """

    probability: float | None
    reason: str | None = None
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    error_kind: ErrorKind = "server"


@dataclass(frozen=True)
class Rating:
    """A judge's answer about one completion alone: a score in [0, 1]; the other fields as in Verdict."""

    score: float | None
    reason: str | None = None
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    error_kind: ErrorKind = "server"


Answer = TypeVar("Answer", Verdict, Rating)


@runtime_checkable
class Judge(Protocol):
    """Compares pairs of completions, and rates single completions.

    Args:
        name: for reports and metrics, [A-Za-z0-9._-].
        identity: everything that an answer depends on besides the question (model and its revision or fingerprint,
            template, sampling), as JSON values. Ledgers use it in their keys.
    """

    name: str
    identity: dict[str, Any]

    def compare(
        self, pairs: Sequence[Pair], principle: Principle, done: Callable[[int, Verdict], None] | None = None
    ) -> list[Verdict]:
        """Return a verdict per pair and call `done(index, verdict)` for each as soon as it is known, in any order."""

    def rate(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        principle: Principle,
        done: Callable[[int, Rating], None] | None = None,
        stopped: Sequence[bool] | None = None,
    ) -> list[Rating]:
        """Return a rating per completion; `done` as in `compare`.

        `stopped` is passed only if a completion was cut off at a length limit (False there). It is for judges that
        read an end token (reward models); judges that read text may ignore it.
        """


def stopped_keyword(stopped: Sequence[bool]) -> dict[str, list[bool]]:
    """Return the keyword `stopped` of `Judge.rate`; empty if no completion was cut off."""
    return {} if all(stopped) else {"stopped": list(stopped)}


def collect(answers: Iterable[tuple[int, Answer]], done: Callable[[int, Answer], None] | None) -> list[Answer]:
    """Return answers in the order of their indices, and report each to `done` as it arrives."""
    by_index: dict[int, Answer] = {}
    for index, answer in answers:
        by_index[index] = answer
        if done is not None:
            done(index, answer)
    return [by_index[index] for index in range(len(by_index))]


def model_name(source: str) -> str:
    """Return the last part of a path or a Hub name, with only the characters that `Judge.name` may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", source.rstrip("/").rpartition("/")[2])[:96]


def digest(value: Any) -> str:
    """Return the sha256 of a JSON value, the same for equal values."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def prompt_key(prompt: Prompt) -> str:
    """Return the sha256 of a prompt's content."""
    return digest({"prompt": prompt})
