"""A judge of plain Python: functions that score completions, each for the principles that carry its tag.

It is deterministic, and no text can persuade it. Checks have the signature of reward functions (`rewards/reward.py`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Principle, Rating, ScoringJudge, Single, Verdict, logistic
from onetrunk.servers.fleet import run_async
from onetrunk.utils.import_path import source_identity

Check = Callable[..., Any]
# A difference of one temperature makes odds of e to 1; one of a whole score, .993.
TEMPERATURE = 0.2


class RubricJudge(ScoringJudge):
    """Compares completions by the scores of checks (see `Judge`).

    P(first better) = logistic((score of first - score of second) / temperature): exactly 1/2 for equal scores. A
    principle with several checks uses the mean of their scores. A check that returns None for one of the completions
    is left out; if none is left, the judge abstains.

    Args:
        checks: tag -> function, plain or async, with the keywords prompts, completions and completion_ids (None here),
            and `**columns`; it returns one number per completion, None if it does not apply.
        temperature: of the logistic, in units of a score; above 0.

    Raises:
        ValueError: no check, or a check that is not callable.
    """

    name = "rubric"

    def __init__(self, checks: Mapping[str, Check], temperature: float = TEMPERATURE):
        if not checks or not all(map(callable, checks.values())):
            raise ValueError(
                f"the rubric has the checks {checks}; expected a function for each tag, such as"
                " {concise: path/to/file.py:function}"
            )
        self.checks = dict(checks)
        self.temperature = float(temperature)
        self.identity: dict[str, Any] = {
            "kind": "rubric",
            "checks": {tag: source_identity(check) for tag, check in sorted(self.checks.items())},
            "temperature": self.temperature,
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
        return Verdict(logistic(lead / self.temperature), details={"scores": both})

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
        prompts, completions = [row.prompt for row in rows], [row.completion for row in rows]
        try:
            result = self.checks[tag](prompts=prompts, completions=completions, completion_ids=None)
            if inspect.iscoroutine(result):
                result = run_async(result)
        except Exception as error:
            raise RuntimeError(
                f"the check for the tag {tag!r} failed with {type(error).__name__}: {error}; it is called with"
                " prompts, completions and completion_ids=None, without the columns of a dataset"
            ) from error
        values = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(values, (list, tuple)) or len(values) != len(completions):
            raise ValueError(
                f"the check for the tag {tag!r} returned {values!r:.60}; expected a list of {len(completions)}"
                " numbers, one per completion, None if it does not apply"
            )
        try:
            scores = [None if value is None else float(value) for value in values]
        except (TypeError, ValueError) as error:
            raise ValueError(f"the check for the tag {tag!r} returned {values!r:.60}: {error}") from error
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
