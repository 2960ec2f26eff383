"""A constitution: the principles by which a judge compares, read from a YAML file and validated; and `RubricJudge`.

name: helpful-and-harmless
principles:
  - text: Which completion does more of what the prompt asks for?
    weight: 2.0
    tags: [helpful]

`RubricJudge` judges by Python functions that score completions, each for the principles that carry its tag. It is
deterministic, and no text can persuade it. Its checks have the signature of reward functions (`rewards/reward.py`).
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.judges.judge import Principle, Rating, ScoringJudge, Single, Verdict, logistic
from onetrunk.servers.fleet import run_async
from onetrunk.types import as_completion
from onetrunk.utils.files import digest, read_yaml
from onetrunk.utils.import_path import checked_scores, source_identity

KEYS = ("name", "principles")
PRINCIPLE_KEYS = ("text", "weight", "tags")
Check = Callable[..., Any]
# A difference of one temperature makes odds of e to 1; one of a whole score, .993.
TEMPERATURE = 0.2


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
    path = Path(os.path.expanduser(path))
    if not path.is_file():
        raise ValueError(f"the constitution {path} does not exist (working folder {Path.cwd()}); give a YAML file")
    content, _ = read_yaml(path, f"the constitution {path}")
    return parse_constitution(content, f"the constitution {path}")


def require_both(judge: Sequence[str] | None, constitution: str | None) -> None:
    """Raise ValueError if only one of judge and constitution is set."""
    if judge and not constitution:
        raise ValueError("judge is set and constitution is not; a judge compares by one: name a YAML file")
    if constitution and not judge:
        raise ValueError("constitution is set and judge is not; name a judge, such as rubric, or leave both out")


def parse_constitution(content: Any, place: str = "the constitution") -> Constitution:
    """Return the constitution that a mapping describes; errors (ValueError) begin with `place`."""
    _check_keys(content, KEYS, place)
    name, entries = content.get("name"), content.get("principles")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{place} has name {name!r}; give it one, such as 'helpful-and-harmless'")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{place} has no principles; list at least one, each with a text")
    principles = tuple(_principle(entry, f"{place}: principle {number}") for number, entry in enumerate(entries, 1))
    texts = [principle.text.casefold() for principle in principles]
    for number, first in enumerate(map(texts.index, texts)):
        if first != number:
            raise ValueError(
                f"{place}: principles {first + 1} and {number + 1} have the same text; keep one, with its weight"
            )
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
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight <= 0:
        raise ValueError(f"{place} has weight {weight!r}; expected a number above 0")
    if not isinstance(tags, list) or not all(isinstance(tag, str) and tag for tag in tags):
        raise ValueError(f"{place} has tags {tags!r}; expected a list of names")
    return Principle(text.strip(), float(weight), tuple(tags))


class RubricJudge(ScoringJudge):
    """Compares completions by the scores of checks (see `Judge`).

    P(first better) = logistic((score of first - score of second) / TEMPERATURE): exactly 1/2 for equal scores. A
    principle with several checks uses the mean of their scores. A check that returns None for one of the completions
    is left out; if none is left, the judge abstains.

    Args:
        checks: tag -> function, plain or async, with the keywords prompts, completions and completion_ids (None here),
            and `**columns`; it returns one number per completion, None if it does not apply.

    Raises:
        ValueError: no check, or a check that is not callable.
    """

    name = "rubric"

    def __init__(self, checks: Mapping[str, Check]):
        if not checks or not all(map(callable, checks.values())):
            raise ValueError(
                f"the rubric has the checks {checks}; expected a function for each tag, such as"
                " {concise: path/to/file.py:function}"
            )
        self.checks = dict(checks)
        self.identity: dict[str, Any] = {
            "kind": "rubric",
            "checks": {tag: source_identity(check) for tag, check in sorted(self.checks.items())},
        }

    def require(self, constitution: Constitution) -> None:
        """Raise ValueError if a principle has no check."""
        for principle in constitution.principles:
            self._tags(principle)

    def _verdict(self, first: dict[str, float | None], second: dict[str, float | None]) -> Verdict:
        both = {tag: [score, second[tag]] for tag, score in first.items() if None not in (score, second[tag])}
        if not both:
            return Verdict(None, _not_applied(first))
        lead = sum(one - other for one, other in both.values()) / len(both)
        return Verdict(logistic(lead / TEMPERATURE), details={"scores": both})

    def _rating(self, by_tag: dict[str, float | None]) -> Rating:
        scores = {tag: score for tag, score in by_tag.items() if score is not None}
        for tag, score in scores.items():
            if not 0 <= score <= 1:
                raise ValueError(
                    f"the check for the tag {tag!r} scores {score:g}; a rating must be from 0 to 1: scale the check,"
                    " or compare in pairs, which works with any scale"
                )
        mean = sum(scores.values()) / len(scores) if scores else None
        return Rating(mean, None if scores else _not_applied(by_tag), details={"scores": scores})

    def _scores(self, rows: Sequence[Single], principle: Principle) -> list[dict[str, float | None]]:
        """Return the score of each row by each tag of the principle that has a check; None if that does not apply."""
        tags = self._tags(principle)
        columns = [self._call(tag, rows) for tag in tags]
        return [dict(zip(tags, scores, strict=True)) for scores in zip(*columns, strict=True)]

    def _call(self, tag: str, rows: Sequence[Single]) -> list[float | None]:
        prompts, completions = [row.prompt for row in rows], [as_completion(row.prompt, row.text) for row in rows]
        try:
            result = self.checks[tag](prompts=prompts, completions=completions, completion_ids=None)
            if inspect.iscoroutine(result):
                result = run_async(result)
        except Exception as error:
            raise RuntimeError(
                f"the check for the tag {tag!r} failed with {type(error).__name__}: {error}; it is called with"
                " prompts, completions and completion_ids=None, without the columns of a dataset"
            ) from error
        scores = checked_scores(f"the check for the tag {tag!r}", result, len(rows))
        # A number that is not finite is neither better nor worse than another: the check does not apply.
        return [score if score is not None and math.isfinite(score) else None for score in scores]

    def _tags(self, principle: Principle) -> list[str]:
        tags = [tag for tag in principle.tags if tag in self.checks]
        if not tags:
            has = f"has the tags {', '.join(principle.tags)}" if principle.tags else "has no tags"
            raise ValueError(
                f"the rubric has no check for the principle {principle.text!r}, which {has}; the rubric's tags are"
                f" {', '.join(self.checks)}: give the principle one of them, or add a check"
            )
        return tags


def _not_applied(by_tag: Mapping[str, Any]) -> str:
    return f"no check applies ({', '.join(by_tag)})"
