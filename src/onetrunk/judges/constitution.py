"""A constitution: the principles by which a judge compares, read from a YAML file and validated.

name: helpful-and-harmless
principles:
  - text: Which completion does more of what the prompt asks for?
    weight: 2.0
    tags: [helpful]
    marks: {1: It does not do it., 5: It does all of it.}  # optional: what a mark means where completions are rated
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.judges.judge import Principle
from onetrunk.utils.files import digest, read_yaml

KEYS = ("name", "principles")
PRINCIPLE_KEYS = ("text", "weight", "tags", "marks")
MARKS = ("1", "2", "3", "4", "5")
MAX_TEXT = 2000


@dataclass(frozen=True)
class Constitution:
    """Principles, at least one and no two with the same text, under a name for reports."""

    name: str
    principles: tuple[Principle, ...]

    @property
    def version(self) -> str:
        """Hash of everything a label depends on: the principles in their order, not the name."""
        return digest(list(map(vars, self.principles)))


# For judges that are measured without a constitution: what the preferences of people are mostly about.
GENERAL = Constitution(
    "general",
    (Principle("Which completion answers the prompt better: helpful, correct, and harmless?", tags=("general",)),),
)


def load_constitution(path: str | Path | None) -> Constitution:
    """Read and validate a constitution; raises ValueError for a missing file or a mistake in it."""
    if not path:
        raise ValueError("constitution is not set; a judge needs one: give a YAML file with name and principles")
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"the constitution {path} does not exist (working folder {Path.cwd()}); give a YAML file")
    content, _ = read_yaml(path, f"the constitution {path}")
    return parse_constitution(content, f"the constitution {path}")


def parse_constitution(content: Any, place: str = "the constitution") -> Constitution:
    """Return the constitution that a mapping describes; errors (ValueError) begin with `place`."""
    _check_keys(content, KEYS, place)
    name, entries = content.get("name"), content.get("principles")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{place} has name {name!r}; give it one, such as 'helpful-and-harmless'")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{place} has no principles; list at least one, each with a text")
    principles = tuple(_principle(entry, f"{place}: principle {number}") for number, entry in enumerate(entries, 1))
    first_numbers: dict[str, int] = {}
    for number, principle in enumerate(principles, 1):
        first = first_numbers.setdefault(principle.text.casefold(), number)
        if first != number:
            raise ValueError(f"{place}: principles {first} and {number} have the same text; keep one, with its weight")
    return Constitution(name.strip(), principles)


def _check_keys(entry: Any, known: tuple[str, ...], place: str) -> None:
    if not isinstance(entry, dict):
        state = "is empty" if entry is None else f"is {entry!r:.60}"
        raise ValueError(f"{place} {state}; expected a mapping with {', '.join(known)}")
    unknown = sorted(str(key) for key in entry if key not in known)
    if unknown:
        raise ValueError(f"{place}: unknown key {unknown[0]!r}; the keys are {', '.join(known)}")


def _principle(entry: Any, place: str) -> Principle:
    if isinstance(entry, str):
        entry = {"text": entry}
    _check_keys(entry, PRINCIPLE_KEYS, place)
    text, weight, tags = entry.get("text"), entry.get("weight", 1.0), entry.get("tags") or []
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place} has text {text!r}; say what is better, such as 'Which completion is clearer?'")
    if len(text) > MAX_TEXT:
        raise ValueError(f"{place} has {len(text)} characters; a principle is one sentence, at most {MAX_TEXT}")
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight <= 0:
        raise ValueError(f"{place} has weight {weight!r}; expected a number above 0")
    if not isinstance(tags, list) or not all(isinstance(tag, str) and tag for tag in tags):
        raise ValueError(f"{place} has tags {tags!r}; expected a list of names")
    return Principle(text.strip(), float(weight), tuple(tags), _marks(entry.get("marks"), place))


def _marks(marks: Any, place: str) -> tuple[tuple[str, str], ...]:
    if marks is None:
        return ()
    named = {str(mark): text for mark, text in marks.items()} if isinstance(marks, dict) else {}
    if not named or not set(named) <= set(MARKS) or not all(isinstance(t, str) and t.strip() for t in named.values()):
        raise ValueError(
            f"{place} has marks {marks!r}; expected what some of the marks 1 to 5 mean, such as {{1: It is wrong.,"
            " 5: It is right.}"
        )
    return tuple((mark, named[mark].strip()) for mark in MARKS if mark in named)
