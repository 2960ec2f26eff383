"""A judge of plain Python: functions that score completions, and stand for the principles that carry their tag.

Nothing is read and nothing believed, so there is nothing to inject; it answers the same for the same question. Checks
have the signature of reward functions (`rewards/base.py`), which are handed in from above: this room knows none.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onetrunk.judges.base import Pair, Principle, Rating, Verdict
from onetrunk.judges.calls import run_async
from onetrunk.judges.constitution import Constitution
from onetrunk.types import Prompt

Check = Callable[..., Any]
# A difference of one temperature makes odds of e to 1; one of a whole score, .993.
TEMPERATURE = 0.2


def logistic(x: float) -> float:
    """Return 1 / (1 + exp(-x)), so that logistic(x) and logistic(-x) add up to 1 exactly."""
    positive = 1 / (1 + math.exp(-abs(x)))
    return positive if x >= 0 else 1 - positive


class RubricJudge:
    """Compares completions by what checks score them; see `judges/base.py` for what it may be asked.

    P(first better) = logistic((score of first - score of second) / temperature): exactly 1/2 for equal scores. A
    principle with several checks has the mean of their scores; a check that says None for one of the completions is
    left out, and where none is left the judge abstains.

    Args:
        checks: tag -> function with the keywords prompts, completions and completion_ids (None here), and `**columns`;
            it returns one number per completion, None where it does not apply. Plain or async.
        temperature: of the logistic, in units of a score; above 0.

    Raises:
        ValueError: no check, something that cannot be called, or a temperature out of its range.
    """

    name = "rubric"

    def __init__(self, checks: Mapping[str, Check], temperature: float = TEMPERATURE):
        if not checks:
            raise ValueError(
                "the rubric has no checks; give one at least, such as {concise: path/to/file.py:function}"
            )
        wrong = [tag for tag, check in checks.items() if not callable(check)]
        if wrong:
            raise ValueError(
                f"the rubric's check for the tag {wrong[0]!r} is {checks[wrong[0]]!r}; expected a function"
            )
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"the temperature of the rubric is {temperature}; set a finite number above 0")
        self.checks = dict(checks)
        self.temperature = float(temperature)
        self.identity: dict[str, Any] = {
            "kind": "rubric",
            "checks": {tag: source_identity(check) for tag, check in sorted(self.checks.items())},
            "temperature": self.temperature,
        }

    def require(self, constitution: Constitution) -> None:
        """Refuse principles that no check stands for.

        Raises:
            ValueError: names the first of them and its tags.
        """
        for principle in constitution.principles:
            self._tags(principle)

    def compare(
        self, pairs: Sequence[Pair], principle: Principle, done: Callable[[int, Verdict], None] | None = None
    ) -> list[Verdict]:
        """Return a verdict per pair (see `Judge`).

        Raises:
            ValueError: no check for the principle, or one that does not return one score per completion.
            RuntimeError: a check raised an error, which is the cause.
        """
        prompts = [pair.prompt for pair in pairs]
        texts = [pair.first for pair in pairs] + [pair.second for pair in pairs]
        scores = self._scores([*prompts, *prompts], texts, principle)
        verdicts = []
        for index in range(len(pairs)):
            verdicts.append(self._verdict(scores, index, index + len(pairs)))
            if done is not None:
                done(index, verdicts[-1])
        return verdicts

    def rate(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        principle: Principle,
        done: Callable[[int, Rating], None] | None = None,
        stopped: Sequence[bool] | None = None,
    ) -> list[Rating]:
        """Return a rating per completion: its score.

        Raises:
            ValueError: a score outside [0, 1], and as in `compare`.
            RuntimeError: as in `compare`.
        """
        by_tag = self._scores(prompts, completions, principle)
        ratings = []
        for index in range(len(completions)):
            given = {tag: scores[index] for tag, scores in by_tag.items() if scores[index] is not None}
            for tag, score in given.items():
                if not 0 <= score <= 1:
                    raise ValueError(
                        f"the check for the tag {tag!r} scores {score:g}; a rating lies from 0 to 1: scale the check,"
                        " or compare in pairs, for which any scale will do"
                    )
            mean = sum(given.values()) / len(given) if given else None
            ratings.append(Rating(mean, None if given else _not_applied(by_tag), details={"scores": given}))
            if done is not None:
                done(index, ratings[-1])
        return ratings

    def _verdict(self, by_tag: Mapping[str, Sequence[float | None]], first: int, second: int) -> Verdict:
        both = {tag: (scores[first], scores[second]) for tag, scores in by_tag.items()}
        given = {tag: scores for tag, scores in both.items() if None not in scores}
        if not given:
            return Verdict(None, _not_applied(by_tag))
        lead = sum(one - other for one, other in given.values()) / len(given)
        details = {"scores": {tag: list(scores) for tag, scores in given.items()}}
        return Verdict(logistic(lead / self.temperature), details=details)

    def _scores(
        self, prompts: Sequence[Prompt], completions: Sequence[str], principle: Principle
    ) -> dict[str, list[float | None]]:
        """Return, per tag of a principle that has a check, the scores; None for those that are no finite number."""
        tags = self._tags(principle)
        if not completions:
            return {tag: [] for tag in tags}
        shown = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        return {tag: self._call(tag, list(prompts), shown) for tag in tags}

    def _call(self, tag: str, prompts: list[Prompt], completions: list[Any]) -> list[float | None]:
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
            found = f"{len(values)} scores" if isinstance(values, (list, tuple)) else type(values).__name__
            raise ValueError(
                f"the check for the tag {tag!r} returned {found}; expected a list of {len(completions)} numbers, one"
                " per completion, None where it does not apply"
            )
        return [_number(tag, value) for value in values]

    def _tags(self, principle: Principle) -> list[str]:
        found = [tag for tag in principle.tags if tag in self.checks]
        if not found:
            has = f"has the tags {', '.join(principle.tags)}" if principle.tags else "has no tags"
            raise ValueError(
                f"the rubric has no check for the principle {principle.text!r}, which {has}; the rubric's tags are"
                f" {', '.join(self.checks)}: give the principle one of them, or add a check"
            )
        return found


def _number(tag: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise ValueError(f"the check for the tag {tag!r} returned {value!r}; expected a number, or None")
    number = float(value)
    # Neither better nor worse than anything: the check does not apply.
    return number if math.isfinite(number) else None


def _not_applied(by_tag: Mapping[str, Any]) -> str:
    return f"no check applies ({', '.join(by_tag)})"


def source_identity(check: Check) -> dict[str, Any]:
    """Return what tells a check from others: its name, and a hash of the file that it is written in.

    So a ledger asks anew after a change of the check. What the file imports is not looked into; settings that an
    object or a partial carries count where they are plain values.
    """
    settings: dict[str, Any] = {}
    while isinstance(check, functools.partial):
        settings |= _plain(check.keywords) | _plain(dict(enumerate(check.args)))
        check = check.func
    if not inspect.isroutine(check):
        settings |= _plain(getattr(check, "__dict__", {}))
        check = type(check)
    try:
        source = hashlib.sha256(Path(inspect.getsourcefile(check)).read_bytes()).hexdigest()[:16]
    except (TypeError, OSError):
        source = None  # Built in, or typed into a session.
    return {"name": check.__qualname__, "source": source, "settings": settings}


def _plain(settings: Mapping[Any, Any]) -> dict[str, Any]:
    kinds = (str, int, bool, type(None))
    plain = {str(name): value for name, value in settings.items() if isinstance(value, kinds)}
    return plain | {str(name): repr(value) for name, value in settings.items() if isinstance(value, float)}
