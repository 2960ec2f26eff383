"""Several judges as one: the mean of their probabilities, and how far they are apart. Knows judges alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from onetrunk.judges.base import ErrorKind, Judge, Pair, Principle, Rating, Verdict, stopped_keyword
from onetrunk.types import Prompt

# Questions that go through all members before the next ones do: what a kill can lose of all members but the last.
SLICE = 64
Told = Callable[[int, Any], None]


class EnsembleJudge:
    """The mean of its members' answers; see `judges/base.py` for what it may be asked.

    A member that abstains is left out of the mean; where all abstain, so does the ensemble. A member's error is the
    ensemble's: a mean without it would be another number once the member is back. `details` hold each member's answer
    and their disagreement, the standard deviation (that of a population).

    Args:
        judges: two or more, in the order in which they are asked; one that costs money had better be the last, whose
            answers are told one by one.

    Raises:
        ValueError: fewer than two, or one of them twice.
    """

    name = "ensemble"

    def __init__(self, judges: Sequence[Judge]):
        if len(judges) < 2:
            raise ValueError(f"an ensemble of {len(judges)} judges has no mean to take; give two or more")
        identities = [judge.identity for judge in judges]
        twice = next((j.name for i, j in enumerate(judges) if j.identity in identities[:i]), None)
        if twice is not None:
            raise ValueError(f"the judge {twice!r} is twice in the ensemble and would count double; name it once")
        self.judges = list(judges)
        self.names = _unique([judge.name for judge in judges])
        self.identity: dict[str, Any] = {"kind": "ensemble", "members": identities}

    def compare(
        self, pairs: Sequence[Pair], principle: Principle, done: Callable[[int, Verdict], None] | None = None
    ) -> list[Verdict]:
        """Return a verdict per pair (see `Judge`); raises what its members raise."""

        def ask(judge: Judge, part: Sequence[Pair], told: Told | None) -> list[Verdict]:
            return judge.compare(part, principle, told)

        def joined(answers: Sequence[Verdict]) -> Verdict:
            return Verdict(*self._joined([(a.probability, a.reason, a.error) for a in answers]), _worst_kind(answers))

        return self._ask(pairs, ask, joined, done)

    def rate(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        principle: Principle,
        done: Callable[[int, Rating], None] | None = None,
        stopped: Sequence[bool] | None = None,
    ) -> list[Rating]:
        """Return a rating per completion; raises what its members raise."""

        def ask(judge: Judge, part: Sequence[tuple[Prompt, str, bool]], told: Told | None) -> list[Rating]:
            prompts, texts, has_stopped = (list(column) for column in zip(*part, strict=True))
            return judge.rate(prompts, texts, principle, told, **stopped_keyword(has_stopped))

        def joined(answers: Sequence[Rating]) -> Rating:
            return Rating(*self._joined([(a.score, a.reason, a.error) for a in answers]), _worst_kind(answers))

        rows = list(zip(prompts, completions, stopped or [True] * len(prompts), strict=True))
        return self._ask(rows, ask, joined, done)

    def _ask(
        self, items: Sequence[Any], ask: Callable[..., list[Any]], joined: Callable[..., Any], done: Told | None
    ) -> list[Any]:
        """Return an answer per item; `done` is told of it when the last member has given its own."""
        found: dict[int, Any] = {}
        for start in range(0, len(items), SLICE):
            part = items[start : start + SLICE]
            earlier = [ask(judge, part, None) for judge in self.judges[:-1]]

            def finish(i: int, answer: Any, start: int = start, earlier: list[list[Any]] = earlier) -> None:
                found[start + i] = joined([*(answers[i] for answers in earlier), answer])
                if done is not None:
                    done(start + i, found[start + i])

            ask(self.judges[-1], part, finish)
        return [found[index] for index in range(len(items))]

    def _joined(
        self, answers: Sequence[tuple[float | None, str | None, str | None]]
    ) -> tuple[float | None, str | None, str | None, dict[str, Any]]:
        """Return mean, reason, error and details of the members' (number, reason, error)."""
        members = {name: number for name, (number, _, _) in zip(self.names, answers, strict=True)}
        errors = [f"{name}: {error}" for name, (_, _, error) in zip(self.names, answers, strict=True) if error]
        if errors:
            return None, None, "; ".join(errors), {"members": members}
        given = [number for number in members.values() if number is not None]
        reasons = [f"{name}: {reason}" for name, (_, reason, _) in zip(self.names, answers, strict=True) if reason]
        details = {"members": members, "disagreement": pstdev(given) if given else None}
        return (fmean(given) if given else None), "\n".join(reasons) or None, None, details


def _worst_kind(answers: Sequence[Verdict | Rating]) -> ErrorKind:
    """Return the kind of the members' errors: "server" if one of them is, since all else is the question's own."""
    kinds = [answer.error_kind for answer in answers if answer.error is not None]
    return "server" if "server" in kinds else next(iter(kinds), "server")


def _unique(names: Sequence[str]) -> list[str]:
    """Return names of which no two are the same: the second of a name becomes name_2."""
    found: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in found:
            number += 1
            candidate = f"{name}_{number}"
        found.append(candidate)
    return found
