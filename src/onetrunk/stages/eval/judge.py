"""Compare two sides that answered the same prompts: a judge's verdicts and win rates, and checks of each side."""

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
from onetrunk.judges.load import JudgeConfig, check_judge, load_judge
from onetrunk.judges.verdicts import JudgeStatistics, PairLabel
from onetrunk.judges.win_rate import WinRate, pair_outcomes, win_rate
from onetrunk.rewards.combine import RewardSet
from onetrunk.rewards.resolve import resolve_reward
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.eval.arguments import EvalArguments
from onetrunk.stages.eval.sides import Answers, named_opponent
from onetrunk.types import Prompt

LEDGER = "ledger/verdicts.jsonl"
# For equal texts, about which the judge is not asked.
SAME = PairLabel(probability=0.5, consistent=True, votes=())


@dataclass(frozen=True)
class Contest:
    """A judge's verdicts on n prompts.

    Args:
        pairs: the policy's completion first.
        labels: one per pair; 1/2 for equal texts, about which the judge is not asked.
        rates: over the pairs that have a label.
        outcomes: n numbers: 1 where the policy wins, 0 where it loses, 1/2 for a tie; None without a label.
        metrics: the entries of metrics.json.
    """

    pairs: list[Pair]
    labels: list[PairLabel]
    rates: WinRate
    outcomes: list[float | None]
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """How the sides are compared.

    Args:
        opponent: "reference", the name of a model, or None without an opponent.
        checks: functions that completions should pass; None for none.
        judge, constitution: None without a judge, and on all processes but the first.
    """

    opponent: str | None
    checks: RewardSet | None
    judge: Judge | None = None
    constitution: Constitution | None = None


class ShownLimit(FailureLimit):
    """A limit of failures that advances a progress bar with every answered question."""

    def __init__(self, max_failed_fraction: float, judge: str, bar: tqdm):
        super().__init__(max_failed_fraction, judge)
        self.bar = bar

    def note(self, error: str | None, kind: ErrorKind = "server", prompt: Prompt = "") -> None:
        """Count one question as FailureLimit does, and advance the bar."""
        self.bar.update(1)
        super().note(error, kind, prompt)


def plan_comparison(
    args: EvalArguments, settings: JudgeConfig, model_args: ModelArguments, columns: Sequence[str], is_first: bool
) -> Comparison:
    """Check the opponent, the checks and the constitution, and load the judge last.

    Args:
        args: opponent and checks.
        settings: of the judge.
        model_args: the model that is evaluated.
        columns: of the dataset.
        is_first: False on the processes that do not ask the judge.

    Raises:
        ValueError, TypeError, RuntimeError: an opponent, a check, a constitution or a judge is not valid.
    """
    opponent = named_opponent(args, model_args, has_judge=bool(settings.judge))
    checks = load_checks(args.checks, columns)
    if not settings.judge:
        return Comparison(opponent, checks)
    constitution = load_constitution(settings.constitution)
    if not is_first:
        return Comparison(opponent, checks)
    judge = load_judge(settings, resolve_reward)
    check_judge(judge)
    return Comparison(opponent, checks, judge, constitution)


def hold_contest(args: EvalArguments, judge: Judge, constitution: Constitution, pairs: Sequence[Pair]) -> Contest:
    """Ask the judge about all pairs in both orders. Its answers are kept in a ledger in `output_dir`.

    Raises:
        RuntimeError: the judge failed too often, decided no pair, or another process writes to the ledger.
    """
    labels, statistics = ask(args, judge, constitution, pairs)
    # A label from some of the questions could change when the others are answered.
    decided = [i for i, label in enumerate(labels) if not label.errors and label.probability is not None]
    if not decided:
        raise RuntimeError(
            f"the judge {judge.name} decided none of {len(pairs)} pairs ({statistics.errors} questions without an"
            " answer, the others abstentions); look at the judge and its constitution"
        )
    probabilities = torch.tensor([labels[i].probability for i in decided], dtype=torch.float64)
    consistent = torch.tensor([labels[i].consistent for i in decided])
    outcomes = pair_outcomes(probabilities, consistent, args.tie_margin)
    prompts = [json.dumps(pairs[i].prompt, sort_keys=True) for i in decided]
    lengths = torch.tensor([len(pairs[i].first) - len(pairs[i].second) for i in decided])
    rates = win_rate(
        probabilities, prompts, lengths, consistent=consistent, tie_margin=args.tie_margin, seed=args.seed
    )
    by_place = dict(zip(decided, outcomes.tolist(), strict=True))
    unjudged = sum(label.errors > 0 for label in labels)
    rate_metrics = rates.as_dict()
    metrics = {
        "judge": judge.name,
        "constitution": f"{constitution.name} ({constitution.version[:12]})",
        "win_rate": rate_metrics.pop("win_rate"),
        "interval": rate_metrics.pop("win_rate_interval"),
        **rate_metrics,
        "identical": sum(pair.first == pair.second for pair in pairs),
        "abstained": len(pairs) - len(decided) - unjudged,
        "unjudged": unjudged,
        "principles": by_principle(labels),
        "position": statistics.as_dict(),
    }
    return Contest(list(pairs), labels, rates, [by_place.get(i) for i in range(len(pairs))], metrics)


def ask(
    args: EvalArguments, judge: Judge, constitution: Constitution, pairs: Sequence[Pair]
) -> tuple[list[PairLabel], JudgeStatistics]:
    """Return one label per pair, and the judge's statistics. Questions that the ledger answers are not asked again."""
    different = [i for i, pair in enumerate(pairs) if pair.first != pair.second]
    total = 2 * len(different) * len(constitution.principles)
    bar = tqdm(total=total, desc="judge", unit="question", dynamic_ncols=True, smoothing=0.05)
    with bar, Ledger(Path(args.output_dir) / LEDGER) as ledger:
        asker = Asker(judge, constitution, ledger, ShownLimit(args.max_failed_fraction, judge.name, bar))
        labels = dict(zip(different, asker.labels([pairs[i] for i in different]), strict=True))
        bar.update(total - bar.n)  # Answers from the ledger.
    return [labels.get(i, SAME) for i in range(len(pairs))], asker.statistics


def by_principle(labels: Sequence[PairLabel]) -> dict[str, float]:
    """Return the mean probability of the policy's completion under each principle, where both orders were answered."""
    probabilities: dict[str, list[float]] = {}
    for label in labels:
        for principle, orders in label.votes:
            if None not in orders:
                probabilities.setdefault(principle, []).append(sum(orders) / len(orders))
    return {principle: sum(values) / len(values) for principle, values in probabilities.items()}


def load_checks(specs: Sequence[str] | None, columns: Sequence[str]) -> RewardSet | None:
    """Return the check functions, None without any.

    Raises:
        ValueError, TypeError, RuntimeError: a spec names no function, or a function needs a column that is not there.
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
    """Return for each check the share of completions that pass, of those to which it applies; NaN if there are none.

    Raises:
        ValueError: a check returned something other than True, False or None.
    """
    rows = (answers.prompts, answers.completions, answers.completion_ids, answers.columns)
    scores = checks.score(*rows, completion_stopped=answers.stopped)
    shares = {}
    for name, values in scores.by_function.items():
        verdicts = values[~values.isnan()]
        wrong = verdicts[(verdicts != 0) & (verdicts != 1)]
        if len(wrong):
            raise ValueError(
                f"check {name!r} returned {float(wrong[0]):g}; expected True or False, or None where it does not apply"
                " (a function that returns a score belongs in reward_funcs)"
            )
        shares[name] = float(verdicts.double().mean()) if len(verdicts) else float("nan")
    return shares
