"""The stage `onetrunk judge`: rows with the preferences of people -> how well judges agree with them.

Each judge is asked about every pair in both orders, and several also count as an ensemble, whose answers are made of
theirs. Answers are kept in a ledger, so a stopped run buys nothing twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from onetrunk.checkpoints.hub import push_folder, require_push
from onetrunk.data.groups import ALL, Group, labelled_groups
from onetrunk.feedback.asking import Asker
from onetrunk.feedback.costs import CostConfig, Costs
from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.constitution import GENERAL, Constitution, load_constitution
from onetrunk.judges.ensemble import EnsembleJudge
from onetrunk.judges.judge import Judge, Pair, Verdict, digest, unique_names
from onetrunk.judges.judge_config import RUBRIC, JudgeConfig, load_judge, specs_by_judge
from onetrunk.judges.labels import PairLabel, answer_key, kept_answer
from onetrunk.report.judges import PAIRS, card_of
from onetrunk.report.report import write_report_of
from onetrunk.report.runs import read_run
from onetrunk.rewards.resolve import resolve_reward
from onetrunk.stages.arguments import parse
from onetrunk.stages.judge.agreement import Judged, agreement, findings, judge_metrics
from onetrunk.stages.judge.judge_arguments import JudgeArguments, check_judge_is_named
from onetrunk.stages.judging import ShownLimit, check_judges
from onetrunk.stages.rows import load_dataset_rows
from onetrunk.stages.run_context import Terminated, run_stage, say, say_where
from onetrunk.stages.tables import show, show_columns, text_table, write_values
from onetrunk.types import as_text
from onetrunk.utils.files import atomic_write_text, require_output_dir
from onetrunk.utils.locks import held_folder
from onetrunk.utils.redaction import printable, redact

LEDGER, CARD = "ledger/verdicts.db", "README.md"
# Of all rows, in the terminal.
SHOWN = ("rows", "decided", "accuracy", "accuracy_interval", "consistent_accuracy", "one_order_accuracy")
SHOWN += ("calibration_error", "loss", "abstained", "unjudged")


@dataclass(frozen=True)
class Measured:
    """The labels of a judge, and what it is called in reports."""

    name: str
    identity: dict[str, Any]
    rows: list[Judged]
    thoughts: list[list[str]]  # Per pair: what the judge wrote before its verdicts.


def run(args: JudgeArguments, settings: JudgeConfig, prices: CostConfig) -> None:
    """Measure the judges; write metrics.json, pairs.jsonl and the report, and print a summary.

    Raises:
        ValueError: a launcher has started several processes, rows without preferences, or a judge that is not valid.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("judge runs in one process, and a launcher has started several; call onetrunk judge itself")
    require_push(args, "dataset")
    rows = load_dataset_rows(args)
    groups = labelled_groups(rows, rows.column_names, args.dataset_config or ALL)
    constitution = GENERAL if settings.constitution is None else load_constitution(settings.constitution)
    judges = []
    for specs in specs_by_judge(settings.judge or [], settings):
        rubric = settings.rubric if RUBRIC in specs else None
        judges.append(load_judge(replace(settings, judge=specs, rubric=rubric), resolve_reward))
    folder = require_output_dir(args.output_dir)
    try:
        with held_folder(folder), Ledger(folder / LEDGER) as ledger:
            costs = Costs(folder, judges if len(judges) == 1 else [EnsembleJudge(judges)], prices)
            try:
                check_judges(judges)
                measured = [measure(args, judge, constitution, groups, ledger, costs) for judge in judges]
                if len(judges) > 1:
                    # Under different names, as an ensemble calls its members.
                    names = unique_names([m.name for m in measured])
                    measured = [replace(m, name=name) for m, name in zip(measured, names, strict=True)]
                    # Made of the answers in the ledger.
                    measured.append(measure(args, EnsembleJudge(judges), constitution, groups, ledger, costs))
            finally:
                costs.close()
    except (KeyboardInterrupt, Terminated):
        say("all answers are kept; run the same command again to continue", after_bar=True)
        raise
    values = results(args, measured, constitution, costs)
    atomic_write_text(folder / PAIRS, redact("".join(f"{line}\n" for line in pair_lines(measured))))
    path = write_values(folder, values)
    show_results(args, measured, values)
    print(f"judge: {len(groups)} rows; metrics in {path}, all labels in {folder / PAIRS}")
    page = write_report_of(folder)
    atomic_write_text(folder / CARD, redact(card_of(read_run(folder).results)))
    say_where(page, "judge")
    if args.push_to_hub:
        where = push_folder(folder, args, "the metrics are", repo_type="dataset", patterns=[CARD, path.name, PAIRS])
        print(f"judge: pushed the metrics to {where}")


def measure(
    args: JudgeArguments,
    judge: Judge,
    constitution: Constitution,
    groups: Sequence[Group],
    ledger: Ledger,
    costs: Costs,
) -> Measured:
    """Ask a judge about all pairs; answers that the ledger holds are not asked again.

    Raises:
        RuntimeError: the judge failed too often, or the budget is spent.
    """
    pairs = pairs_of(groups)
    num_texts = sum(len(group.texts) for group in groups)
    total = (2 * len(pairs) if args.judge_by == "pairs" else num_texts) * len(constitution.principles)
    bar = tqdm(total=total, desc=f"judge {judge.name}", unit="question", dynamic_ncols=True, smoothing=0.05)
    with bar:
        limit = ShownLimit(args.max_failed_fraction, judge.name, bar, costs)
        labels = Asker(judge, constitution, ledger, limit, costs=costs, judge_by=args.judge_by).labels(pairs)
        bar.update(total - bar.n)  # Answers from the ledger.
    thoughts = [thoughts_about(judge, pair, constitution, ledger) for pair in pairs]
    return Measured(judge.name, judge.identity, judged_rows(groups, labels), thoughts)


def thoughts_about(judge: Judge, pair: Pair, constitution: Constitution, ledger: Ledger) -> list[str]:
    """Return what a judge wrote before its verdicts about a pair, in both orders and under each principle."""
    written = []
    for principle in constitution.principles:
        for shown in (pair, pair.flipped()):
            answer = kept_answer(ledger, answer_key(judge, principle, shown), Verdict)
            if answer is not None and answer.reason:
                written += [answer.reason, *answer.details.get("thoughts", ())]
    return written


def pairs_of(groups: Sequence[Group]) -> list[Pair]:
    """Return the pairs of the groups, the better completion first; the judge sees both orders."""
    return [
        Pair(g.prompt, g.texts[better], g.texts[other], g.is_whole(better), g.is_whole(other), g.reference)
        for g in groups
        for better, other in g.pairs()
    ]


def judged_rows(groups: Sequence[Group], labels: Sequence[PairLabel]) -> list[Judged]:
    rest = iter(labels)
    return [Judged(group, tuple(next(rest) for _ in group.pairs())) for group in groups]


def results(
    args: JudgeArguments, measured: Sequence[Measured], constitution: Constitution, costs: Costs
) -> dict[str, Any]:
    """Return the entries of metrics.json."""
    weights = [principle.weight for principle in constitution.principles]
    judges = {}
    for m in measured:
        subsets: dict[str, list[Judged]] = {}
        for row in m.rows:
            subsets.setdefault(row.group.subset, []).append(row)
        parts = {name: rows for name, rows in sorted(subsets.items()) if len(rows) >= args.fewest_rows}
        metrics = judge_metrics(m.rows, weights, args.seed)
        by_subset = {name: judge_metrics(rows, weights, args.seed) for name, rows in parts.items()}
        judges[m.name] = {
            "all": metrics,
            "subsets": by_subset if len(subsets) > 1 else {},
            "findings": findings(metrics),
            "identity": digest(m.identity),
        }
    return {
        "dataset": Path(args.dataset_name).name,
        "constitution": constitution.name,
        "constitution_version": constitution.version,
        "judges": judges,
        "agreement": agreement({m.name: m.rows for m in measured}),
        "costs": costs.as_dict(),
    }


def pair_lines(measured: Sequence[Measured]) -> list[str]:
    """Return one JSON text per pair: prompt, completions, and what each judge says of them."""
    lines = []
    for rows in zip(*(m.rows for m in measured), strict=True):
        group = rows[0].group
        for index, (better, other) in enumerate(group.pairs()):
            said = {}
            for m, row in zip(measured, rows, strict=True):
                label, thoughts = row.labels[index], m.thoughts[len(lines)]
                said[m.name] = {"probability": label.probability, "consistent": label.consistent}
                said[m.name] |= {"thoughts": thoughts} if thoughts else {}
            texts = {"prompt": group.prompt, "better": group.texts[better], "other": group.texts[other]}
            about = {"subset": group.subset, "people": group.probability, "judges": said}
            lines.append(json.dumps(texts | about, ensure_ascii=False))
    return lines


def show_results(args: JudgeArguments, measured: Sequence[Measured], values: dict[str, Any]) -> None:
    """Print the metrics of all rows, the findings, and the pairs on which the last judge is most wrong."""
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
    wrong = worst_pairs(measured[-1].rows, args.num_samples_to_print)
    if wrong:
        show(text_table(("prompt", "better for people", "other", "probability"), wrong))


def worst_pairs(rows: Sequence[Judged], number: int) -> list[tuple[str, str, str, str]]:
    """Return the pairs on which a judge is most wrong: prompt, better completion, other one, its probability."""
    wrong = []
    for row in rows:
        for (better, other), label in zip(row.group.pairs(), row.labels, strict=True):
            if label.probability is not None and not label.errors and label.probability < 0.5:
                texts = row.group.texts
                wrong.append((label.probability, as_text(row.group.prompt), texts[better], texts[other]))
    return [(*texts, f"{p:.3f}") for p, *texts in sorted(wrong)[:number]]


parse_judge = partial(
    parse,
    verb="judge",
    dataclass_types=(JudgeArguments, JudgeConfig, CostConfig),
    check=lambda args, settings, prices: check_judge_is_named(settings),
)
main = partial(run_stage, "judge", parse_judge, run)
