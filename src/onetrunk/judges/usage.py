"""What a judge has used: questions, calls, tokens, seconds, and what they cost.

Counters belong to a judge and to this process. `feedback/costs.py` adds up the runs of a folder, and holds the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

PER_MILLION = 1e6


@dataclass
class Usage:
    """Counters of a judge.

    Args:
        unsettled_calls, unsettled_prompt_tokens, unsettled_completion_tokens: calls under a budget whose cost is not
            known (in flight, without an answer, or of a killed process), and the most tokens that they may have used.
        questions: answered by the judge, abstentions included; answers from a ledger are not counted.
        calls: to a server, failed ones included.
        failed_calls: those without an answer of the expected form; most were made again.
        estimated_calls: answered calls to a server that did not report their tokens, which are estimates.
        prompt_tokens, completion_tokens: read and written; of a server as it reports them.
        seconds: during which questions were being answered.
    """

    # First: a copy made while a call ends may count it twice, but never leaves it out.
    unsettled_calls: int = 0
    unsettled_prompt_tokens: int = 0
    unsettled_completion_tokens: int = 0
    questions: int = 0
    calls: int = 0
    failed_calls: int = 0
    estimated_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    # Called with the most tokens of a call before it is sent, and without any before a question; it raises EndOfCalls
    # if the budget has no room for them. No counter, so without an annotation, which would make it a field.
    budget = None

    def hold(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a call as unsettled, with the most tokens that it may use."""
        self.unsettled_calls += 1
        self.unsettled_prompt_tokens += prompt_tokens
        self.unsettled_completion_tokens += completion_tokens

    def release(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Take `hold` back: the tokens of the call are counted, or it costs nothing."""
        self.unsettled_calls -= 1
        self.unsettled_prompt_tokens -= prompt_tokens
        self.unsettled_completion_tokens -= completion_tokens

    def add(self, other: Usage | Mapping[str, Any]) -> Usage:
        """Add other counters to these; return these."""
        values = asdict(other) if isinstance(other, Usage) else other
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + values.get(field.name, 0))
        return self

    def minus(self, earlier: Usage) -> Usage:
        """Return what was used since `earlier`, a copy of these counters."""
        return Usage(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def copy(self) -> Usage:
        """Return a copy that later use does not change."""
        return Usage(**asdict(self))

    def cost_usd(self, price: Sequence[float]) -> float:
        """Return the price in USD of the tokens, unsettled ones included.

        `price`: USD per million tokens read, and written.
        """
        read = self.prompt_tokens + self.unsettled_prompt_tokens
        written = self.completion_tokens + self.unsettled_completion_tokens
        return (read * price[0] + written * price[1]) / PER_MILLION

    def as_dict(self, usd: float | None = None) -> dict[str, Any]:
        """Return the counters, and per question what a label costs; in USD too if `usd`, the whole cost, is known."""
        values: dict[str, Any] = asdict(self) | {"seconds": round(self.seconds, 3)}
        questions = max(1, self.questions)
        values["calls_per_question"] = round(self.calls / questions, 4)
        values["tokens_per_question"] = round((self.prompt_tokens + self.completion_tokens) / questions, 2)
        values["seconds_per_question"] = round(self.seconds / questions, 5)
        if usd is not None:
            values["usd"] = round(usd, 6)
            values["usd_per_1000_questions"] = round(1000 * usd / questions, 6)
        return values


def sum_of(usages: Iterable[Usage]) -> Usage:
    """Return the counters of several judges together."""
    total = Usage()
    for usage in usages:
        total.add(usage)
    return total


def usages_of(judge: Any) -> dict[str, Usage]:
    """Return the counters of a judge by its name, of an ensemble those of its members."""
    members = getattr(judge, "judges", None)
    if members is not None:
        return dict(zip(judge.names, (usage_of(member) for member in members), strict=True))
    return {judge.name: usage_of(judge)}


def usage_of(judge: Any) -> Usage:
    """Return a judge's counters; new ones for a judge that counts nothing."""
    usage = getattr(judge, "usage", None)
    return usage if isinstance(usage, Usage) else Usage()
