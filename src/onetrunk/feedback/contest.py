"""Contest: a judge compares the completions of two sides, in both orders, and the win rate of the first side follows.

Who sampled the completions, and where the answers are kept, is the caller's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onetrunk.feedback.asking import Asker
from onetrunk.judges.judge import Pair
from onetrunk.judges.labels import PairLabel
from onetrunk.ops.win_rate import pair_outcomes, win_rate
from onetrunk.types import Completion, Prompt, as_text

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
            f"the opponent answered {len(opponent)} prompts and the model {len(policy)}, not all the same: their chat"
            " templates make some of them overlong for one alone; raise max_prompt_length, or set overlong_prompts to"
            " error"
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
        unanswered = asker.statistics.sums["errors"]
        raise RuntimeError(
            f"the judge {judge.name} decided none of {len(pairs)} pairs ({unanswered} questions without an answer,"
            " the others abstentions); look at the judge and its constitution"
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
