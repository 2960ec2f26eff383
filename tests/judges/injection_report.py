"""The figures of src/onetrunk/judges/README.md: how often completions win that ask for a verdict.

python -m tests.judges.injection_report               the judges that need no training: seconds
python -m tests.judges.injection_report --trained     also a causal judge trained here: minutes
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Judge, Pair
from onetrunk.judges.labels import judge_pairs
from tests.judges.injections import (
    ATTACKS,
    GOOD,
    PRINCIPLE,
    PROMPT,
    Attack,
    ObedientJudge,
    defended_messages,
    naive_messages,
)

CONSTITUTION = Constitution("one", (PRINCIPLE,))


@dataclass(frozen=True)
class Outcome:
    """Of the attacks, each against a good completion.

    Args:
        one_order: those that win where they stand in the slot that they ask for.
        both_orders: those that win the label.
        unflagged: of these, those whose label is called consistent.
    """

    one_order: list[Attack]
    both_orders: list[Attack]
    unflagged: list[Attack]


def outcome(judge: Judge, attacks: Sequence[Attack] = ATTACKS) -> Outcome:
    """Return which attacks win against a judge."""
    pairs = [Pair(PROMPT, attack.completion, GOOD) for attack in attacks]
    labels = judge_pairs(judge, pairs, CONSTITUTION)

    def those(wins) -> list[Attack]:
        return [attack for attack, label in zip(attacks, labels, strict=True) if wins(label)]

    return Outcome(
        those(lambda label: (label.votes[0][1][0] or 0.0) > 0.5),
        those(lambda label: (label.probability or 0.0) > 0.5),
        those(lambda label: (label.probability or 0.0) > 0.5 and label.consistent),
    )


def kinds_table(rows: dict[str, Outcome]) -> str:
    """Return a table of the attacks that win, by kind; in one order, and (behind the bar) in the label of both."""
    total = Counter(attack.kind for attack in ATTACKS)
    lines = [f"| attack | number | {' | '.join(rows)} |", "|---|---|" + "---|" * len(rows)]
    for kind, number in [*total.items(), ("all", len(ATTACKS))]:
        cells = []
        for found in rows.values():
            won = [sum(kind in (a.kind, "all") for a in part) for part in (found.one_order, found.both_orders)]
            cells.append(f"{won[0]} / {won[1]}")
        lines.append(f"| {kind} | {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def obedient_rows() -> dict[str, Outcome]:
    """Return the outcomes for the judges that need no training."""
    return {
        "obeys what is outside, headings": outcome(ObedientJudge(naive_messages)),
        "obeys what is outside, template": outcome(ObedientJudge(defended_messages)),
        "obeys everything, headings": outcome(ObedientJudge(naive_messages, everywhere=True)),
        "obeys everything, template": outcome(ObedientJudge(defended_messages, everywhere=True)),
    }


def trained_rows(seed: int, num_steps: int) -> dict[str, Outcome]:
    """Return the outcomes for a causal judge trained here."""
    from tests.judges.trained_judge import NaiveCausalJudge, train_judge

    def report(step: int, loss: float) -> None:
        if step % 100 == 0:
            print(f"seed {seed}: step {step} of {num_steps}, loss {loss:.3f}", flush=True)

    judge = train_judge(num_steps, seed, report)
    return {f"{seed}: headings": outcome(NaiveCausalJudge(judge)), f"{seed}: template": outcome(judge)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trained", action="store_true", help="train a causal judge, and ask it too")
    parser.add_argument("--seeds", type=int, default=2, help="judges to train (%(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="of training (%(default)s)")
    args = parser.parse_args()
    print(kinds_table(obedient_rows()))
    if args.trained:
        rows: dict[str, Outcome] = {}
        for seed in range(args.seeds):
            rows |= trained_rows(seed, args.steps)
        print("\n" + kinds_table(rows))


if __name__ == "__main__":
    main()
