"""Ask about a few prompts only: the questions as the judge reads them, its verdicts, an estimate for all prompts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from onetrunk.feedback.asking import Asker, chunked
from onetrunk.feedback.costs import Costs
from onetrunk.feedback.sampling import PromptItem
from onetrunk.judges.judge import Done, Items, Judge, Pair, Principle, Rating, Single, Usage, Verdict
from onetrunk.judges.labels import Memory
from onetrunk.judges.template import nonce_of, question_messages
from onetrunk.stages.prefs.arguments import PrefsArguments
from onetrunk.stages.tables import shortened, show, show_columns, text_table
from onetrunk.types import Message
from onetrunk.utils.escaping import printable

# Characters of a question, and questions that are shown.
LONGEST_QUESTION, SHOWN_QUESTIONS = 1500, 4


class Previewed(Protocol):
    """The flow of a run whose completions are judged."""

    args: PrefsArguments
    asker: Asker

    def produced(self, chunks: Any) -> Any: ...

    def label(self, items: list[PromptItem], product: Any) -> list[dict[str, Any]]: ...


class PreviewSource(Protocol):
    """The prompts of a run; `total` is their number, None if it is not known."""

    total: int | None

    def __iter__(self) -> Any: ...


def preview(flow: Previewed, source: PreviewSource) -> None:
    """Ask about the first `args.preview` prompts, and print questions, verdicts and an estimate.

    Raises:
        RuntimeError: too many questions have no answer.
    """
    args, asker, costs = flow.args, flow.asker, flow.asker.costs
    asker.judge = judge = HeardJudge(asker.judge)
    asker.ledger = memory = NotedMemory(asker.ledger)
    before, usd_before = (Usage(), None) if costs is None else (costs.total(), costs.usd)
    began, num_prompts = time.perf_counter(), 0
    rows: list[dict[str, Any]] = []
    for items, product in flow.produced(chunked(islice(iter(source), args.preview), args.prompts_per_chunk)):
        rows += flow.label(items, product)
        num_prompts += len(items)
    for item, principle, answer in judge.heard[:SHOWN_QUESTIONS]:
        print(printable(f"\n--- a question, and the answer {said(answer)}"))
        print(printable(shortened(question_text(item, principle), LONGEST_QUESTION)))
        if answer.reason:
            print(printable(f"--- the judge's reason: {shortened(answer.reason)}"))
    answered = [(principle.text, said(answer)) for _, principle, answer in judge.heard]
    show(text_table(("principle", "verdict"), answered[: args.preview]))
    seconds = time.perf_counter() - began
    usage = Usage() if costs is None else costs.total().minus(before)
    usd = None if usd_before is None else costs.usd - usd_before
    asked = Asked(num_prompts, len(memory.keys), len(judge.heard), usage, usd, seconds)
    show_columns("preview", {"value": estimate(asked, source.total, costs)})
    print(
        f"prefs: {len(rows)} rows would be made of {num_prompts} prompts; nothing was written but the answers, which"
        " the run itself will not buy again: leave preview out to start it"
    )


class HeardJudge(Judge):
    """A judge that notes every answer with its question: `heard`. It has the name and identity of another one."""

    def __init__(self, judge: Judge):
        self.judge, self.name, self.identity = judge, judge.name, judge.identity
        self.heard: list[tuple[Pair | Single, Principle, Verdict | Rating]] = []

    def _answer(self, items: Items, principle: Principle, keep: Done) -> None:
        for index, answer in enumerate(self.judge.answer_each([(items, principle)])[0]):
            self.heard.append((items[index], principle, answer))
            keep(index, answer)


class NotedMemory:
    """A memory that notes which answers were looked for: `keys`. Equal questions have one key."""

    def __init__(self, memory: Memory):
        self.memory, self.keys = memory, set[str]()

    def get(self, key: str) -> Any:
        self.keys.add(key)
        return self.memory.get(key)

    def put(self, key: str, value: Any) -> Any:
        return self.memory.put(key, value)


@dataclass(frozen=True)
class Asked:
    """What a preview has asked: its prompts, their questions, how many of them were new, and what those have used.

    `usd` is None without a price.
    """

    num_prompts: int
    num_questions: int
    num_new: int
    usage: Usage
    usd: float | None
    seconds: float


def question_text(item: Pair | Single, principle: Principle) -> str:
    """Return a question as a judge that reads gets it."""
    messages: Iterable[Message] = question_messages(item, principle, nonce_of(item, principle))
    return "\n".join(message["content"] for message in messages)


def said(answer: Verdict | Rating) -> str:
    """Return an answer in a few words."""
    if answer.error is not None:
        return f"error: {shortened(answer.error)}"
    return "no opinion" if answer.number is None else f"{answer.number:.3f}"


def estimate(asked: Asked, total: int | None, costs: Costs | None) -> dict[str, float | int | None]:
    """Return what the preview has used, and what all prompts will take if they are alike.

    A question is taken to cost what the new ones did on average; if all answers were kept, what all in the folder did.
    Then the time is the judge's alone, and else includes sampling.
    """
    used = asked.usage
    values: dict[str, float | int | None] = {
        "prompts previewed": asked.num_prompts,
        "prompts in all": total,
        "questions": asked.num_questions,
        "questions answered before": asked.num_questions - asked.num_new,
        "calls": used.calls,
        "tokens": used.prompt_tokens + used.completion_tokens,
        "seconds": asked.seconds,
    }
    answered, seconds, usd = asked.num_new, asked.seconds, asked.usd
    if not answered and costs is not None:
        used, usd, by_judge = costs.total(), costs.usd, costs.as_dict().values()
        # Each member of an ensemble answers every question, at the same time.
        answered = max((counters["questions"] for counters in by_judge), default=0)
        seconds = max((counters["seconds"] for counters in by_judge), default=0.0)
    if total is None or not asked.num_prompts or not answered:
        return values
    num_questions = asked.num_questions * total / asked.num_prompts
    share = num_questions / answered
    values |= {
        "all: questions": round(num_questions),
        "all: calls": round(used.calls * share),
        "all: tokens": round((used.prompt_tokens + used.completion_tokens) * share),
        "all: hours": seconds * share / 3600,
    }
    return values if usd is None else values | {"all: USD": usd * share}
