"""The stage `onetrunk judge`: rows with the preferences of people -> how well judges agree with them.

Each judge is asked about every pair in both orders, and several also count as an ensemble, whose answers are made of
theirs. Answers are kept in a ledger, so a stopped run buys nothing twice.

A row has completions that people call better and others. The judge sees each better one with each of the others. P is
the judge's probability that the completion people call better is the better one, the mean over orders and principles.
A row is right if P is above 1/2 for all of its pairs; k pairs at exactly 1/2 and none below count 1 / (k + 1), so that
the best of four scores as in RewardBench 2. Computed in float64; a mean of nothing is NaN.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onetrunk.checkpoints.folders import require_no_training
from onetrunk.data.pairs import ALL, Group, how_read, labelled_groups, shape_of
from onetrunk.data.rows import refuse_variables
from onetrunk.feedback.asking import Asker, check_judges
from onetrunk.feedback.costs import CostConfig, Costs
from onetrunk.judges.constitution import GENERAL, Constitution, load_constitution
from onetrunk.judges.judge import Judge, Pair
from onetrunk.judges.judge_config import RUBRIC, EnsembleJudge, JudgeConfig, load_judge, specs_by_judge
from onetrunk.judges.labels import TIE, JudgeStatistics, PairLabel, judge_warnings, wilson_interval
from onetrunk.report.runs import PAIRS
from onetrunk.reward_models.metrics import expected_calibration_error, preference_loss, reliability
from onetrunk.stages.arguments import AskingArguments, parse, require_set
from onetrunk.stages.results import plot_reliability, show_columns, write_values
from onetrunk.stages.rows import load_dataset_rows
from onetrunk.stages.run_context import Terminated, say, say_how
from onetrunk.utils.bars import WorkBar
from onetrunk.utils.files import atomic_write_text, held_folder, require_output_dir, unique_names
from onetrunk.utils.ledger import Ledger
from onetrunk.utils.redaction import printable, redact

LEDGER = "ledger/verdicts.db"
NAN = float("nan")
# Limits of the findings: a calibration error, and how far a preference may be from people's.
MOST_CALIBRATION_ERROR, MOST_PREFERENCE_GAP = 0.1, 0.1
# Below, a finding would be noise.
FEWEST_ROWS = 20
# A probability of 0 or 1 counts as one this far away, which has a finite logit.
LEAST_PROBABILITY = 1e-6
# Of all rows, in the terminal.
SHOWN = ("rows", "decided", "accuracy", "accuracy_interval", "consistent_accuracy")
SHOWN += ("calibration_error", "loss", "abstained", "unjudged")


@dataclass(frozen=True)
class Judged:
    """A row with the judge's labels of its pairs, in the order of `Group.pairs`."""

    group: Group
    labels: tuple[PairLabel, ...]

    @property
    def is_decided(self) -> bool:
        """Whether every pair has a label."""
        return all(label.probability is not None for label in self.labels)

    @cached_property
    def score(self) -> float:
        """1 for a row that is right, 0 for one that is wrong, between them with ties."""
        if any(label.probability < TIE for label in self.labels):
            return 0.0
        return 1 / (1 + sum(label.probability == TIE for label in self.labels))

    @property
    def is_consistently_right(self) -> bool:
        """Whether every pair is right in both orders."""
        return all(label.consistent and label.probability > TIE for label in self.labels)


def run(args: AskingArguments, settings: JudgeConfig, prices: CostConfig) -> None:
    """Measure the judges; write metrics.json, pairs.jsonl and the report, and print a summary."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("judge runs in one process, and a launcher has started several; call onetrunk judge itself")
    require_no_training(args.output_dir)
    rows = load_dataset_rows(args)
    refuse_variables(rows, "judge")
    groups = labelled_groups(rows, rows.column_names, args.dataset_config or ALL)
    if shape_of(rows.column_names, rows[0]) == "pairs" and (line := how_read(rows)) is not None:
        print(line)
    constitution = GENERAL if settings.constitution is None else load_constitution(settings.constitution)
    judges = []
    for specs in specs_by_judge(settings.judge or [], settings):
        rubric = settings.rubric if RUBRIC in specs else None
        judges.append(load_judge(replace(settings, judge=specs, rubric=rubric)))
    folder = require_output_dir(args.output_dir)
    try:
        with held_folder(folder), Ledger(folder / LEDGER) as ledger:
            costs = Costs(folder, judges if len(judges) == 1 else [EnsembleJudge(judges)], prices)
            try:
                check_judges(judges)
                measured = [measure(args, judge, constitution, groups, ledger, costs) for judge in judges]
                # Under different names, as an ensemble calls its members.
                named = dict(zip(unique_names([judge.name for judge in judges]), measured, strict=True))
                if len(judges) > 1:
                    ensemble = EnsembleJudge(judges)
                    # Made of the answers in the ledger.
                    named[ensemble.name] = measure(args, ensemble, constitution, groups, ledger, costs)
            finally:
                costs.close()
    except (KeyboardInterrupt, Terminated):
        say("all answers are kept; run the same command again to continue", after_bar=True)
        raise
    values = results(args, named, constitution, costs)
    atomic_write_text(folder / PAIRS, redact("".join(f"{line}\n" for line in pair_lines(named))))
    path = write_values(folder, values)
    plot_reliability(folder, {name: entry["all"]["reliability"] for name, entry in values["judges"].items()})
    show_results(values)
    print(f"judge: {len(groups)} rows; metrics in {path}, all labels in {folder / PAIRS}")
    say_how(folder, "judge")


def measure(
    args: AskingArguments,
    judge: Judge,
    constitution: Constitution,
    groups: Sequence[Group],
    ledger: Ledger,
    costs: Costs,
) -> list[Judged]:
    """Ask a judge about all pairs, the better completion first; answers in the ledger are not asked again."""
    pairs = [
        Pair(g.prompt, g.texts[better], g.texts[other], g.is_whole(better), g.is_whole(other), g.reference)
        for g in groups
        for better, other in g.pairs()
    ]
    total = 2 * len(pairs) * len(constitution.principles)
    bar = WorkBar(total=total, desc=f"judge {judge.name}", unit="question")
    with bar:
        labels = Asker(judge, constitution, ledger, args.max_failed_fraction, costs, bar).labels(pairs)
        bar.update(total - bar.n)  # Answers from the ledger.
    rest = iter(labels)
    return [Judged(group, tuple(next(rest) for _ in group.pairs())) for group in groups]


def results(
    args: AskingArguments, measured: dict[str, list[Judged]], constitution: Constitution, costs: Costs
) -> dict[str, Any]:
    """Return the entries of metrics.json; `measured` has the rows of each judge by its name."""
    judges = {}
    for name, rows in measured.items():
        subsets: dict[str, list[Judged]] = {}
        for row in rows:
            subsets.setdefault(row.group.subset, []).append(row)
        metrics = judge_metrics(rows)
        by_subset = {subset: judge_metrics(part) for subset, part in sorted(subsets.items())}
        judges[name] = {
            "all": metrics,
            "subsets": by_subset if len(subsets) > 1 else {},
            "findings": findings(metrics),
        }
    return {
        "dataset": Path(args.dataset_name).name,
        "constitution": constitution.name,
        "constitution_version": constitution.version,
        "judges": judges,
        "agreement": agreement(measured),
        "costs": costs.as_dict(),
    }


def pair_lines(measured: dict[str, list[Judged]]) -> list[str]:
    """Return one JSON text per pair: prompt, completions, and what each judge says of them."""
    lines = []
    for rows in zip(*measured.values(), strict=True):
        group = rows[0].group
        for index, (better, other) in enumerate(group.pairs()):
            said = {}
            for name, row in zip(measured, rows, strict=True):
                label = row.labels[index]
                said[name] = {"probability": label.probability, "consistent": label.consistent}
            texts = {"prompt": group.prompt, "better": group.texts[better], "other": group.texts[other]}
            about = {"subset": group.subset, "people": group.probability, "judges": said}
            lines.append(json.dumps(texts | about, ensure_ascii=False))
    return lines


def show_results(values: dict[str, Any]) -> None:
    """Print the metrics of all rows, and the findings."""
    columns = {}
    for name, entry in values["judges"].items():
        metrics = entry["all"]
        position = metrics["position"]
        columns[name] = {key: metrics[key] for key in SHOWN} | {
            "position_consistency": position["position_consistency"],
            "first_slot_rate": position["first_slot_rate"],
            "longer is preferred": metrics["length"]["preferred"],
            "longer is preferred by people": metrics["length"]["preferred_by_people"],
        }
    show_columns(f"agreement with people on {values['dataset']}", columns)
    for name, entry in values["judges"].items():
        for finding in entry["findings"]:
            print(printable(f"judge: {name}: {finding}"))


def judge_metrics(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return the metrics of a judge on some rows."""
    counted = [row for row in judged if row.group.probability != TIE]
    decided = [row for row in counted if row.is_decided]
    unjudged = sum(any(label.errors for label in row.labels) for row in counted)
    statistics = JudgeStatistics()
    for label in (label for row in judged for label in row.labels):
        statistics.add(label)
    probabilities, people, length = decided_pairs(decided)
    num_prompts = len({json.dumps(row.group.prompt, sort_keys=True) for row in decided})
    leads = torch.logit(probabilities, eps=LEAST_PROBABILITY)
    bins = reliability(leads, people)
    return {
        "rows": len(judged),
        "equal_for_people": len(judged) - len(counted),
        "decided": len(decided),
        "unjudged": unjudged,
        "abstained": len(counted) - len(decided) - unjudged,
        **_share("accuracy", sum(row.score for row in decided), len(decided), num_prompts),
        **_share("consistent_accuracy", sum(row.is_consistently_right for row in decided), len(decided), num_prompts),
        "ties": int((probabilities == TIE).sum()),
        "pairs": len(probabilities),
        "loss": preference_loss(leads, people),
        "calibration_error": expected_calibration_error(bins),
        "reliability": [asdict(b) for b in bins],
        "position": statistics.as_dict(),
        "length": length_bias(probabilities, length, num_prompts),
    }


def decided_pairs(decided: Sequence[Judged]) -> Tensor:
    """Return [3, n]: of each pair P, the people's label, and how many characters more the better completion has.

    The rows have all their labels, and people do not call their completions equal.
    """
    pairs = []
    for row in decided:
        lengths = [len(text) for text in row.group.texts]
        for (better, other), label in zip(row.group.pairs(), row.labels, strict=True):
            pairs.append((label.probability, row.group.probability, lengths[better] - lengths[other]))
    return torch.tensor(pairs, dtype=torch.float64).reshape(-1, 3).T.contiguous()


def length_bias(probabilities: Tensor, differences: Tensor, num_prompts: int) -> dict[str, Any]:
    """Return how a judge treats pairs whose completions differ in length.

    Args:
        probabilities: [n], P of each pair.
        differences: [n], characters of the better completion minus those of the other.
        num_prompts: of the pairs.

    Returns:
        `preferred`: share of the pairs that differ in which the judge prefers the longer completion;
        `preferred_by_people`: in which people do; `accuracy_more` and `accuracy_less`: accuracy on the pairs whose
        better completion is longer, or shorter. Each share has its interval.
    """
    right = (torch.sign(probabilities - TIE) + 1) / 2
    more, less = right[differences > 0], right[differences < 0]
    number = len(more) + len(less)
    return {
        "pairs_that_differ": number,
        **_share("preferred", float(more.sum() + len(less) - less.sum()), number, num_prompts),
        "preferred_by_people": len(more) / number if number else NAN,
        **_share("accuracy_more", float(more.sum()), len(more), num_prompts),
        **_share("accuracy_less", float(less.sum()), len(less), num_prompts),
    }


def agreement(judged: dict[str, Sequence[Judged]]) -> dict[str, dict[str, Any]]:
    """Return how often every two judges, and each judge and the people, give the same verdict, by "one / other".

    `judged` has the same rows for each judge's name. Verdicts are first (above 1/2), second, and tie.
    """
    opinions: dict[str, list[float | None]] = {name: [] for name in [*judged, "people"]}
    for rows in zip(*judged.values(), strict=True):
        for labels in zip(*(row.labels for row in rows), strict=True):
            said = [label.probability for label in labels]
            for name, probability in zip(opinions, [*said, rows[0].group.probability], strict=True):
                opinions[name].append(probability)
    result = {}
    for one, other in combinations(opinions, 2):
        both = [pair for pair in zip(opinions[one], opinions[other], strict=True) if None not in pair]
        verdicts = torch.sign(torch.tensor(both, dtype=torch.float64).reshape(-1, 2) - TIE)
        same = float((verdicts[:, 0] == verdicts[:, 1]).double().mean())
        result[f"{one} / {other}"] = {"pairs": len(both), "agreement": same}
    return result


def findings(metrics: dict[str, Any]) -> list[str]:
    """Return what a reader of a judge's metrics should not overlook, as sentences without a full stop."""
    lines = [line for line in judge_warnings(metrics["position"]) if "contradicts itself" not in line]
    low, _ = metrics["accuracy_interval"]
    if metrics["decided"] and not low > TIE:
        lines.append("the judge is not shown to be better than chance: the interval of its accuracy reaches 50%")
    consistency = metrics["position"]["position_consistency"]
    if consistency is not None and consistency < 1 - MOST_PREFERENCE_GAP:
        lines.append(f"the judge contradicts itself in {1 - consistency:.0%} of the pairs when their order changes")
    if metrics["decided"] < FEWEST_ROWS:
        return lines
    bias = metrics["length"]
    people, (low, high) = bias["preferred_by_people"], bias["preferred_interval"]
    if abs(bias["preferred"] - people) >= MOST_PREFERENCE_GAP and not low <= people <= high:
        lines.append(
            f"the judge prefers the longer completion in {bias['preferred']:.0%} of the pairs, people in {people:.0%};"
            f" it is right in {bias['accuracy_more']:.0%} where the better one is longer, and in"
            f" {bias['accuracy_less']:.0%} where it is shorter"
        )
    # Of a judge that is calibrated, by chance: the mean |observed - predicted| of so few pairs in each bin.
    variances = [b["count"] * b["predicted"] * (1 - b["predicted"]) for b in metrics["reliability"] if b["count"]]
    chance = sum(math.sqrt(2 / math.pi * variance) for variance in variances) / metrics["pairs"]
    if metrics["calibration_error"] > MOST_CALIBRATION_ERROR + chance:
        lines.append(
            f"the judge's probabilities are {metrics['calibration_error']:.2f} off on average (calibration error);"
            " labels made of them are too sure, or not sure enough"
        )
    return lines


def _share(name: str, part: float, whole: int, num_prompts: int) -> dict[str, Any]:
    """Return a share with its interval, which has the width for as many rows as prompts: those of one depend."""
    share, number = part / whole if whole else NAN, min(whole, num_prompts)
    return {name: share, f"{name}_interval": list(wilson_interval(share * number, number))}


parse_judge = partial(
    parse,
    verb="judge",
    dataclass_types=(AskingArguments, JudgeConfig, CostConfig),
    check=lambda args, settings, prices: require_set(settings, "judge"),
)
