"""Ask a judge, and keep every answer in a ledger as soon as it arrives. What the ledger holds is not asked again.

A question without an answer (the server is down) is not kept; the next run asks it again. Sampling and judging overlap
(`overlapped`): a thread samples a bounded number of chunks ahead of the judge. In a `Contest` a judge compares the
completions of two sides.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm

from onetrunk.feedback.costs import BudgetReached, Costs
from onetrunk.judges.constitution import Constitution, load_constitution
from onetrunk.judges.judge import ErrorKind, Judge, Pair, Rating, Single, Verdict
from onetrunk.judges.judge_config import JudgeConfig, load_judge, with_memory
from onetrunk.judges.labels import (
    JudgeStatistics,
    PairLabel,
    answers_by_principle,
    for_instance,
    judge_pairs,
    weighted_rating,
)
from onetrunk.ops.win_rate import pair_outcomes, win_rate
from onetrunk.types import Completion, Prompt, SampledText, as_text
from onetrunk.utils.files import digest
from onetrunk.utils.ledger import Ledger

# The failed fraction is taken of this number of questions at least.
FEWEST = 50
# Refused and unread questions stop a run only if they are about this number of prompts or more.
FEWEST_PROMPTS = 5
# Pairs that are asked about together: questions and answers take much more memory than labels.
PAIRS_PER_PART = 4096
# How long an ending run waits for a producer that does not check its flag.
JOIN_S = 5.0
T = TypeVar("T")


class Asker:
    """Asks a judge about pairs and single completions under every principle of a constitution.

    Args:
        judge, constitution, ledger: who is asked by what, and what keeps the answers.
        max_failed_fraction: as in `FailureLimit`, which stops the run.
        costs: checks the budget after each answer; None: no budget.
        bar: advances with every new answer, and shows the costs.
    """

    def __init__(
        self,
        judge: Judge,
        constitution: Constitution,
        ledger: Ledger,
        max_failed_fraction: float,
        costs: Costs | None = None,
        bar: tqdm | None = None,
    ):
        self.judge, self.constitution, self.ledger = with_memory(judge, ledger), constitution, ledger
        self.limit, self.costs, self.bar = FailureLimit(max_failed_fraction, judge.name), costs, bar
        self.statistics = JudgeStatistics()

    def labels(self, pairs: Sequence[Pair]) -> list[PairLabel]:
        """Return a label per pair; its `errors` count the questions without an answer."""
        how = {"memory": self.ledger, "on_answer": self._note}
        parts = chunked(pairs, PAIRS_PER_PART)
        labels = [label for part in parts for label in judge_pairs(self.judge, part, self.constitution, **how)]
        for label in labels:
            self.statistics.add(label)
        return labels

    def ratings(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[SampledText]],
        references: Sequence[str | None] | None = None,
    ) -> list[tuple[list[float | None], bool]]:
        """Return, per prompt, the rating of each completion, and whether a question about one has no answer.

        A rating is the weighted mean over the principles that the judge scored; None: it abstained from all.
        """
        rows = [
            Single(prompt, sampled.text, sampled.stopped, reference)
            for prompt, texts, reference in zip(prompts, completions, references or [None] * len(prompts), strict=True)
            for sampled in texts
        ]
        by_principle = answers_by_principle(self.judge, rows, self.constitution, self.ledger, self._note)
        for column in by_principle:
            # The same text twice is one question, and one object.
            for rating in {id(rating): rating for rating in column}.values():
                self.statistics.add_rating(rating)
        by_row = iter(zip(*by_principle, strict=True))
        of_prompts = [list(islice(by_row, len(texts))) for texts in completions]
        return [
            (
                [weighted_rating(ratings, self.constitution) for ratings in rows],
                any(rating.error is not None for ratings in rows for rating in ratings),
            )
            for rows in of_prompts
        ]

    def _note(self, item: Pair | Single, answer: Verdict | Rating) -> None:
        if self.bar is not None:
            self.bar.set_postfix({} if self.costs is None else self.costs.shown(), refresh=False)
            self.bar.update(1)
        self.limit.note(answer.error, answer.error_kind, item.prompt)
        if self.costs is not None:
            self.costs.check()


class FailureLimit:
    """Counts the questions of this run, and stops the run if too many have no answer.

    Args:
        max_failed_fraction: largest fraction of the questions so far (of FEWEST at least) that may fail; 1: never
            stop. The same fraction may be refused or unread, if these are about FEWEST_PROMPTS prompts or more.
            FEWEST failures in a row also stop a run: the judge is down.
    """

    def __init__(self, max_failed_fraction: float, judge: str):
        self.max_failed_fraction = max_failed_fraction
        self.judge = judge
        self.asked = self.failed = self.refused = self.unread = self._in_a_row = 0
        self._prompts: set[str] = set()

    def note(self, error: str | None, kind: ErrorKind = "server", prompt: Prompt = "") -> None:
        """Count one question about `prompt`, with its error or None."""
        self.asked += 1
        if error is None:
            self._in_a_row = 0
            return
        allowed = self.max_failed_fraction * max(self.asked, FEWEST)
        repair = "repair the judge"
        if kind == "server":
            self.failed += 1
            self._in_a_row += 1
            is_passed = self.failed > allowed or self._in_a_row >= FEWEST
            what = f"left {self.failed} of {self.asked} questions without an answer"
        else:
            # The judge is running: it has replied, or it answers other questions.
            self._in_a_row = 0
            self.refused += kind == "refused"
            self.unread += kind == "unread"
            if len(self._prompts) < FEWEST_PROMPTS:
                self._prompts.add(digest(prompt))
            is_passed = self.refused + self.unread > allowed and len(self._prompts) >= FEWEST_PROMPTS
            what = (
                f"refused {self.refused} of {self.asked} questions, and gave {self.unread} of them a reply"
                " without a verdict"
            )
            repair += ", or raise max_failed_fraction to leave these questions out,"
        if is_passed and self.max_failed_fraction < 1:
            raise RuntimeError(
                f"the judge {self.judge} {what}, past max_failed_fraction {self.max_failed_fraction:g} (the last:"
                f" {error}); all answers are kept: {repair} and run the same command again"
            )


class Stopped(Exception):
    """Raised in the producer's thread by `StopFlag.check` once its products are no longer wanted."""


class StopFlag(threading.Event):
    """Tells a producer, between two of its steps, that its work is no longer wanted."""

    def check(self) -> None:
        """Raise Stopped if the flag is set."""
        if self.is_set():
            raise Stopped


def overlapped(
    products: Iterable[T], consume: Callable[[T], None], *, max_waiting: int = 2, stop: StopFlag | None = None
) -> None:
    """Call `consume` for every product, in order, while the next ones are produced.

    Args:
        products: iterated in a thread; usually a generator that does the work.
        consume: called in this thread: judges run an event loop, and checks of users may set signal handlers.
        max_waiting: products that may wait for the consumer; at least 1.
        stop: set when this thread ends early (an error, Ctrl-C), so that a long step of the producer can end too.

    Raises:
        Exception: the first error of either stage, unchanged. Products from before an error are consumed first.
    """
    waiting: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
    room = threading.Semaphore(max_waiting)
    stop = stop or StopFlag()

    def produce() -> None:
        try:
            for product in products:
                waiting.put((product,))
                room.acquire()
                stop.check()
            waiting.put(None)
        except BaseException as error:
            waiting.put(error)

    # A daemon: an executor of `concurrent.futures` would make an interrupted run wait for it.
    thread = threading.Thread(target=produce, name="feedback", daemon=True)
    thread.start()
    try:
        while (entry := waiting.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            room.release()
            consume(*entry)
    finally:
        stop.set()
        room.release()
        thread.join(JOIN_S)


def chunked(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items, the last one shorter; reads no further than it yields."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def load_judge_parts(settings: JudgeConfig, asks: bool = True) -> tuple[Judge | None, Constitution]:
    """Return the judge, its servers checked, and its constitution; without `asks` None in place of the judge."""
    constitution = load_constitution(settings.constitution)
    if not asks:
        return None, constitution
    judge = load_judge(settings)
    check_judges([judge])
    return judge, constitution


def check_judges(judges: Sequence[Judge]) -> None:
    """Check the servers among judges before anything is asked (`ServerJudge.check`).

    With a spent budget, answers that are kept still count.
    """
    for member in (member for judge in judges for member in judge.members.values()):
        if member.identity.get("kind") == "server":
            with contextlib.suppress(BudgetReached):
                member.check()


# A prompt, its completion, and whether that ended by itself.
Completed = tuple[Prompt, Completion, bool]
OUTCOMES = {1.0: "win", 0.5: "tie", 0.0: "loss", None: "no verdict"}


@dataclass(frozen=True)
class Contest:
    """A judge's verdicts on n prompts."""

    labels: list[PairLabel]  # 1/2 for equal texts, about which the judge is not asked.
    outcomes: list[str]  # For the policy; entries of OUTCOMES.
    metrics: dict[str, Any]  # The entry `win_rate` of metrics.json.


def pairs_of(policy: Sequence[Completed], opponent: Sequence[Completed]) -> list[Pair]:
    """Return the two completions of every prompt, the policy's first; raises ValueError for different prompts."""
    if [prompt for prompt, *_ in policy] != [prompt for prompt, *_ in opponent]:
        raise ValueError(
            f"the opponent answered {len(opponent)} prompts and the model {len(policy)}, not all the same: with"
            " one of their chat templates some are too long; raise max_prompt_length, or set overlong_prompts to error"
        )
    return [
        Pair(prompt, as_text(first), as_text(second), first_stopped, second_stopped)
        for (prompt, first, first_stopped), (_, second, second_stopped) in zip(policy, opponent, strict=True)
    ]


def labels_of(asker: Asker, pairs: Sequence[Pair]) -> list[PairLabel]:
    """Return the judge's label of each pair; it is not asked about equal texts."""
    different = [i for i, pair in enumerate(pairs) if pair.first != pair.second]
    asked = dict(zip(different, asker.labels([pairs[i] for i in different]), strict=True))
    same = PairLabel(probability=0.5, consistent=True, votes=())
    return [asked.get(i, same) for i in range(len(pairs))]


def contest_of(
    asker: Asker, pairs: Sequence[Pair], labels: list[PairLabel], opponent: str, tie_margin: float, seed: int
) -> Contest:
    """Return the win rates that follow from the labels of pairs; RuntimeError if the judge decided none of them."""
    judge, constitution = asker.judge, asker.constitution
    decided = [i for i, label in enumerate(labels) if label.probability is not None]
    if not decided:
        unanswered, example = asker.statistics.sums["errors"], for_instance(asker.statistics.abstention)
        raise RuntimeError(
            f"the judge {judge.name} decided none of {len(pairs)} pairs ({unanswered} questions without an answer,"
            f" the others abstentions{example}); look at the judge and its constitution"
        )
    probabilities = torch.tensor([labels[i].probability for i in decided], dtype=torch.float64)
    how = {"consistent": torch.tensor([labels[i].consistent for i in decided]), "tie_margin": tie_margin}
    prompts = [json.dumps(pairs[i].prompt, sort_keys=True) for i in decided]
    lengths = torch.tensor([len(pairs[i].first) - len(pairs[i].second) for i in decided])
    rates = win_rate(probabilities, prompts, lengths, **how, seed=seed).as_dict()
    outcomes = dict(zip(decided, pair_outcomes(probabilities, **how).tolist(), strict=True))
    unjudged = sum(bool(label.errors) for label in labels)
    metrics = {
        "opponent": opponent,
        "judge": judge.name,
        "constitution": f"{constitution.name} ({constitution.version[:12]})",
        "win_rate": rates.pop("win_rate"),
        "interval": rates.pop("win_rate_interval"),
        **rates,
        "identical": sum(pair.first == pair.second for pair in pairs),
        "abstained": len(pairs) - len(decided) - unjudged,
        "unjudged": unjudged,
        "principles": by_principle(labels),
        "position": asker.statistics.as_dict(),
    }
    return Contest(labels, [OUTCOMES[outcomes.get(i)] for i in range(len(pairs))], metrics)


def by_principle(labels: Sequence[PairLabel]) -> dict[str, float]:
    """Return the mean probability of the policy's completion under each principle, where both orders were answered."""
    probabilities: dict[str, list[float]] = {}
    for principle, orders in (vote for label in labels for vote in label.votes):
        if None not in orders:
            probabilities.setdefault(principle, []).append(sum(orders) / len(orders))
    return {principle: sum(values) / len(values) for principle, values in probabilities.items()}
