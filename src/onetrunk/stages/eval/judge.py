"""What a judge says of two sides that answered the same prompts: verdicts, win rates; and what checks say of each.

Knows answers and judges; writes nothing but the ledger of verdicts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from onetrunk.feedback.asking import Asker, FailureLimit
from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.base import ErrorKind, Judge, Pair
from onetrunk.judges.constitution import Constitution, load_constitution
from onetrunk.judges.load import JudgeSettings, check_judge, load_judge
from onetrunk.judges.verdicts import JudgeStatistics, PairLabel
from onetrunk.judges.win_rate import WinRate, pair_outcomes, win_rate
from onetrunk.rewards.combine import RewardSet
from onetrunk.rewards.resolve import resolve_reward
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.eval.arguments import EvalArguments
from onetrunk.stages.eval.sides import Answers, named_opponent
from onetrunk.types import Prompt

LEDGER = "ledger/verdicts.jsonl"
# Equal texts: neither is better, and no judge need say so.
SAME = PairLabel(probability=0.5, consistent=True, votes=())


@dataclass(frozen=True)
class Contest:
    """What a judge said of n prompts.

    Args:
        pairs: the policy's completion first.
        labels: one per pair; of equal texts a half that nobody was asked for.
        rates: over the pairs that have a label.
        outcomes: n numbers: 1 where the policy wins, 0, 1/2 for a tie; None without a label.
        figures: all that goes into metrics.json.
    """

    pairs: list[Pair]
    labels: list[PairLabel]
    rates: WinRate
    outcomes: list[float | None]
    figures: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """What the sides are compared by.

    Args:
        opponent: "reference", the name of a model, or None where nobody else answers.
        checks: functions that completions should pass, None for none.
        judge, constitution: None without a judge, and on all processes but the first.
    """

    opponent: str | None
    checks: RewardSet | None
    judge: Judge | None = None
    constitution: Constitution | None = None


class ShownLimit(FailureLimit):
    """A limit of failures that moves a bar with every question that is through."""

    def __init__(self, max_failed_fraction: float, judge: str, bar: tqdm):
        super().__init__(max_failed_fraction, judge)
        self.bar = bar

    def note(self, error: str | None, kind: ErrorKind = "server", prompt: Prompt = "") -> None:
        """Count one question in, as FailureLimit does, and show it."""
        self.bar.update(1)
        super().note(error, kind, prompt)


def plan_comparison(
    args: EvalArguments, settings: JudgeSettings, model_args: ModelArguments, columns: Sequence[str], judges_here: bool
) -> Comparison:
    """Return what the sides are compared by; everything is checked, and the judge is loaded last.

    Args:
        settings: of the judge.
        columns: of the dataset.
        judges_here: False leaves judge and constitution out.

    Raises:
        ValueError, TypeError, RuntimeError: an opponent, a check, a constitution or a judge that is none.
    """
    opponent = named_opponent(args, model_args, has_judge=bool(settings.judge))
    checks = load_checks(args.checks, columns)
    if not settings.judge:
        return Comparison(opponent, checks)
    constitution = load_constitution(settings.constitution)
    if not judges_here:
        return Comparison(opponent, checks)
    judge = load_judge(settings, resolve_reward)
    check_judge(judge)
    return Comparison(opponent, checks, judge, constitution)


def hold_contest(args: EvalArguments, judge: Judge, constitution: Constitution, pairs: Sequence[Pair]) -> Contest:
    """Ask the judge about all pairs in both orders, and return the figures. What it answers is kept in `output_dir`.

    Raises:
        RuntimeError: the judge failed too often, decided no pair, or another process writes there.
    """
    labels, statistics = ask(args, judge, constitution, pairs)
    # A label over some of the questions would be another one once the rest is answered.
    kept = [i for i, label in enumerate(labels) if not label.errors and label.probability is not None]
    if not kept:
        raise RuntimeError(
            f"the judge {judge.name} decided none of {len(pairs)} pairs ({statistics.errors} questions without an"
            " answer, the others abstentions); look at the judge and its constitution"
        )
    probabilities = torch.tensor([labels[i].probability for i in kept], dtype=torch.float64)
    consistent = torch.tensor([labels[i].consistent for i in kept])
    outcomes = pair_outcomes(probabilities, consistent, args.tie_margin)
    prompts = [json.dumps(pairs[i].prompt, sort_keys=True) for i in kept]
    lengths = torch.tensor([len(pairs[i].first) - len(pairs[i].second) for i in kept])
    rates = win_rate(
        probabilities, prompts, lengths, consistent=consistent, tie_margin=args.tie_margin, seed=args.seed
    )
    by_place = dict(zip(kept, outcomes.tolist(), strict=True))
    unjudged = sum(label.errors > 0 for label in labels)
    rate_figures = rates.as_dict()
    figures = {
        "judge": judge.name,
        "constitution": f"{constitution.name} ({constitution.version[:12]})",
        # The figure of the name first, its interval beside it.
        "win_rate": rate_figures.pop("win_rate"),
        "interval": rate_figures.pop("win_rate_interval"),
        **rate_figures,
        "identical": sum(pair.first == pair.second for pair in pairs),
        "abstained": len(pairs) - len(kept) - unjudged,
        "unjudged": unjudged,
        "principles": by_principle(labels),
        "position": statistics.as_dict(),
    }
    return Contest(list(pairs), labels, rates, [by_place.get(i) for i in range(len(pairs))], figures)


def ask(
    args: EvalArguments, judge: Judge, constitution: Constitution, pairs: Sequence[Pair]
) -> tuple[list[PairLabel], JudgeStatistics]:
    """Return a label per pair and what they say of the judge; what the ledger holds is not asked again."""
    asked = [i for i, pair in enumerate(pairs) if pair.first != pair.second]
    total = 2 * len(asked) * len(constitution.principles)
    bar = tqdm(total=total, desc="judge", unit="question", dynamic_ncols=True, smoothing=0.05)
    with bar, Ledger(Path(args.output_dir) / LEDGER) as ledger:
        asker = Asker(judge, constitution, ledger, ShownLimit(args.max_failed_fraction, judge.name, bar))
        labels = dict(zip(asked, asker.labels([pairs[i] for i in asked]), strict=True))
        bar.update(total - bar.n)  # Those that the ledger knew.
    return [labels.get(i, SAME) for i in range(len(pairs))], asker.statistics


def by_principle(labels: Sequence[PairLabel]) -> dict[str, float]:
    """Return the mean probability of the policy's completion under each principle, where both orders were answered."""
    found: dict[str, list[float]] = {}
    for label in labels:
        for principle, orders in label.votes:
            if None not in orders:
                found.setdefault(principle, []).append(sum(orders) / len(orders))
    return {principle: sum(values) / len(values) for principle, values in found.items()}


def load_checks(specs: Sequence[str] | None, columns: Sequence[str]) -> RewardSet | None:
    """Return the check functions, None where there are none.

    Args:
        columns: of the dataset.

    Raises:
        ValueError, TypeError, RuntimeError: a spec that leads to no function.
    """
    if not specs:
        return None
    try:
        checks = RewardSet(list(specs))
        checks.check_columns(columns)
    except (ValueError, TypeError, RuntimeError) as error:
        raise type(error)(f"checks: {error}") from error
    return checks


def passed_shares(checks: RewardSet, answers: Answers) -> dict[str, float]:
    """Return, per check, the share of the completions to which it applies that pass it; NaN where it applies to none.

    Raises:
        ValueError: a check said something else than True, False or None.
    """
    rows = (answers.prompts, answers.completions, answers.completion_ids, answers.columns)
    scores = checks.score(*rows, completion_stopped=answers.stopped)
    shares = {}
    for name, values in scores.by_function.items():
        said = values[~values.isnan()]
        wrong = said[(said != 0) & (said != 1)]
        if len(wrong):
            raise ValueError(
                f"check {name!r} returned {float(wrong[0]):g}; a check says True or False, or None where it does not"
                " apply (what gives degrees belongs into reward_funcs)"
            )
        shares[name] = float(said.double().mean()) if len(said) else float("nan")
    return shares
