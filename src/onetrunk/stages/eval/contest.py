"""Compare two sides that answered the same prompts: a judge's verdicts and win rates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from onetrunk.feedback.asking import Asker
from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Judge, Pair
from onetrunk.judges.labels import PairLabel
from onetrunk.judges.win_rate import WinRate, pair_outcomes, win_rate
from onetrunk.stages.eval.eval_arguments import EvalArguments
from onetrunk.stages.judging import ShownLimit
from onetrunk.stages.run_context import Terminated, say

LEDGER = "ledger/verdicts.db"
OUTCOMES = {1.0: "win", 0.5: "tie", 0.0: "loss", None: "no verdict"}


@dataclass(frozen=True)
class Contest:
    """A judge's verdicts on n prompts."""

    pairs: list[Pair]  # The policy's completion first.
    labels: list[PairLabel]  # 1/2 for equal texts, about which the judge is not asked.
    rates: WinRate  # Over the pairs that have a label.
    outcomes: list[float | None]  # 1 where the policy wins, 0 where it loses, 1/2 for a tie; None without a label.
    metrics: dict[str, Any]  # The entry `win_rate` of metrics.json.

    @property
    def words(self) -> list[str]:
        """Each outcome as one of OUTCOMES."""
        return [OUTCOMES[outcome] for outcome in self.outcomes]

    def verdict(self, index: int) -> str:
        """Return the verdict on a pair in words, with the probability that the policy's completion is better."""
        probability = self.labels[index].probability
        return self.words[index] + ("" if probability is None else f" ({probability:.2f})")


def hold_contest(
    args: EvalArguments, judge: Judge, constitution: Constitution, pairs: Sequence[Pair], opponent: str
) -> Contest:
    """Ask the judge about all pairs in both orders. Its answers are kept in a ledger in `output_dir`.

    Raises:
        RuntimeError: the judge failed too often, decided no pair, or the ledger cannot be used.
    """
    different = [i for i, pair in enumerate(pairs) if pair.first != pair.second]
    total = 2 * len(different) * len(constitution.principles)
    bar = tqdm(total=total, desc="judge", unit="question", dynamic_ncols=True, smoothing=0.05)
    with bar, Ledger(Path(args.output_dir) / LEDGER) as ledger:
        asker = Asker(judge, constitution, ledger, ShownLimit(args.max_failed_fraction, judge.name, bar))
        try:
            asked = dict(zip(different, asker.labels([pairs[i] for i in different]), strict=True))
        except (KeyboardInterrupt, Terminated):
            say("the verdicts so far are saved; the same command continues from them", after_bar=True)
            raise
        bar.update(total - bar.n)  # Answers from the ledger.
    same = PairLabel(probability=0.5, consistent=True, votes=())
    labels = [asked.get(i, same) for i in range(len(pairs))]
    # A label from some of the questions could change when the others are answered.
    decided = [i for i, label in enumerate(labels) if not label.errors and label.probability is not None]
    if not decided:
        raise RuntimeError(
            f"the judge {judge.name} decided none of {len(pairs)} pairs ({asker.statistics.errors} questions without"
            " an answer, the others abstentions); look at the judge and its constitution"
        )
    probabilities = torch.tensor([labels[i].probability for i in decided], dtype=torch.float64)
    how = {"consistent": torch.tensor([labels[i].consistent for i in decided]), "tie_margin": args.tie_margin}
    prompts = [json.dumps(pairs[i].prompt, sort_keys=True) for i in decided]
    lengths = torch.tensor([len(pairs[i].first) - len(pairs[i].second) for i in decided])
    rates = win_rate(probabilities, prompts, lengths, **how, seed=args.seed)
    outcomes = dict(zip(decided, pair_outcomes(probabilities, **how).tolist(), strict=True))
    unjudged = sum(label.errors > 0 for label in labels)
    rate_metrics = rates.as_dict()
    metrics = {
        "opponent": opponent,
        "judge": judge.name,
        "constitution": f"{constitution.name} ({constitution.version[:12]})",
        "win_rate": rate_metrics.pop("win_rate"),
        "interval": rate_metrics.pop("win_rate_interval"),
        **rate_metrics,
        "identical": sum(pair.first == pair.second for pair in pairs),
        "abstained": len(pairs) - len(decided) - unjudged,
        "unjudged": unjudged,
        "principles": by_principle(labels),
        "position": asker.statistics.as_dict(),
    }
    return Contest(list(pairs), labels, rates, [outcomes.get(i) for i in range(len(pairs))], metrics)


def by_principle(labels: Sequence[PairLabel]) -> dict[str, float]:
    """Return the mean probability of the policy's completion under each principle, where both orders were answered."""
    probabilities: dict[str, list[float]] = {}
    for principle, orders in (vote for label in labels for vote in label.votes):
        if None not in orders:
            probabilities.setdefault(principle, []).append(sum(orders) / len(orders))
    return {principle: sum(values) / len(values) for principle, values in probabilities.items()}
