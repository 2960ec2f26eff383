"""The results of `onetrunk eval`, in files (metrics.json, report.md, pairs.jsonl, plots) and in the terminal."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onetrunk.feedback.preferences import plain
from onetrunk.judges.base import Pair
from onetrunk.judges.verdicts import judge_warnings
from onetrunk.ppo.evaluation import sample_table
from onetrunk.ppo.sampling import ScoredRollout
from onetrunk.stages.eval.judge import Contest
from onetrunk.stages.plots import plot_contest
from onetrunk.stages.tables import markdown_table, metrics_table, show, show_columns, text_table, write_metrics
from onetrunk.utils.escaping import markdown_text, printable
from onetrunk.utils.files import atomic_write_text
from onetrunk.utils.redaction import redact

REPORT, PAIRS = "report.md", "pairs.jsonl"
NUM_SAMPLES, NUM_LOSSES = 6, 3
# A win rate at equal length that differs by this much from the plain one is reported.
NOTABLE_LENGTH_EFFECT = 0.1
OUTCOMES = {1.0: "win", 0.5: "tie", 0.0: "loss", None: "no verdict"}


@dataclass(frozen=True)
class Evaluation:
    """All results of an evaluation."""

    model: str
    opponent: str | None  # "reference", a model's name, or None without an opponent.
    metrics: dict[str, dict[str, float]]  # By role: policy, reference, opponent.
    pairs: list[Pair]  # The policy's completion first; empty without an opponent.
    contest: Contest | None  # None without a judge.
    checks: dict[str, dict[str, float]]  # Role -> check -> share that passes.
    about: dict[str, Any]  # Further entries of metrics.json.


def write_evaluation(folder: Path, evaluation: Evaluation) -> Path:
    """Write metrics.json, report.md and, with an opponent, pairs.jsonl and plots; return the path of metrics.json."""
    metrics, contest = evaluation.metrics, evaluation.contest
    others: dict[str, Any] = {"model": evaluation.model, **evaluation.about}
    if evaluation.checks:
        others["checks"] = evaluation.checks
    if "opponent" in metrics:
        others |= {"opponent_model": evaluation.opponent, "opponent": metrics["opponent"]}
    if contest is not None:
        others["win_rate"] = {"opponent": evaluation.opponent, **contest.metrics}
    if evaluation.pairs:
        atomic_write_text(folder / PAIRS, redact("".join(f"{line}\n" for line in pair_lines(evaluation))))
    plots = plot_contest(folder, contest) if contest is not None else []
    atomic_write_text(folder / REPORT, redact(report_text(evaluation, plots)))
    # Last: when metrics.json exists, so do the other files.
    return write_metrics(folder, metrics["policy"], metrics.get("reference"), **others)


def pair_lines(evaluation: Evaluation) -> list[str]:
    """Return one JSON text per prompt: both completions, and the judge's verdict."""
    lines = []
    for i, pair in enumerate(evaluation.pairs):
        row: dict[str, Any] = {"prompt": pair.prompt, "policy": pair.first, "opponent": pair.second}
        if evaluation.contest is not None:
            label = evaluation.contest.labels[i]
            row |= {"outcome": OUTCOMES[evaluation.contest.outcomes[i]], **asdict(label)}
        lines.append(json.dumps(row, ensure_ascii=False))
    return lines


def show_evaluation(evaluation: Evaluation, samples: ScoredRollout, num_rows: int) -> None:
    """Print metrics, win rate and checks as tables, some samples, and the findings."""
    metrics, contest = evaluation.metrics, evaluation.contest
    if "opponent" in metrics:
        show_columns(evaluation.model, metrics)
    else:
        show(metrics_table(evaluation.model, metrics["policy"], metrics.get("reference")))
    if contest is not None:
        position = {f"position/{name}": value for name, value in contest.metrics["position"].items()}
        # Booleans are reported in the findings.
        numbers = {name: v for name, v in (contest.metrics | position).items() if not isinstance(v, bool)}
        show_columns(f"{evaluation.model} against {evaluation.opponent}", {"value": numbers})
    if evaluation.checks:
        show_columns("share that passes", evaluation.checks)
    if num_rows > 0 and evaluation.pairs and contest:
        pairs = enumerate(evaluation.pairs[:num_rows])
        rows = ((plain(pair.prompt), pair.first, pair.second, _verdict(evaluation, i)) for i, pair in pairs)
        show(text_table(("prompt", "policy", evaluation.opponent or "opponent", "outcome"), rows))
    elif num_rows > 0:
        show(sample_table(samples, "samples", num_rows))
    for finding in findings(evaluation):
        print(printable(f"eval: {finding}"))


def findings(evaluation: Evaluation) -> list[str]:
    """Return the win rate in words, and reasons to doubt it."""
    if evaluation.contest is None:
        return []
    metrics, rates = evaluation.contest.metrics, evaluation.contest.rates
    won, counted, level = rates.win_rate, rates.discrete_win_rate, rates.length_controlled_win_rate
    lines = [
        f"win rate {won.value:.1%} ({won.low:.1%} to {won.high:.1%}) against {evaluation.opponent} on {rates.prompts}"
        f" prompts by the judge {metrics['judge']}: its mean probability of being the better one; counted,"
        f" {counted.value:.1%} ({counted.low:.1%} to {counted.high:.1%}): {rates.wins} wins, {rates.ties} ties,"
        f" {rates.losses} losses"
    ]
    if math.isfinite(level.value):
        lines.append(f"at equal length the win rate would be {level.value:.1%} ({level.low:.1%} to {level.high:.1%})")
        if abs(level.value - won.value) >= NOTABLE_LENGTH_EFFECT:
            difference = rates.mean_length_difference
            lines.append(
                f"length decides a part of it: the completions are {abs(difference):.0f} characters"
                f" {'longer' if difference > 0 else 'shorter'} on average, and the judge does not treat lengths alike"
            )
    if rates.is_extrapolated:
        lines.append(
            "one side is the longer one in more than four of five pairs: the win rate at equal length is extrapolated,"
            " and mostly too high for the shorter side"
        )
    lines += judge_warnings(metrics["position"])
    if metrics["unjudged"]:
        lines.append(f"{metrics['unjudged']} pairs have no verdict yet; the same command asks for them again")
    return lines


def report_text(evaluation: Evaluation, plots: list[str]) -> str:
    """Return report.md, with the plots (names of files in its folder)."""
    title = evaluation.model if evaluation.opponent is None else f"{evaluation.model} against {evaluation.opponent}"
    facts = [f"{name}: {value}" for name, value in evaluation.about.items()]
    lines = [f"- {markdown_text(finding)}" for finding in findings(evaluation)]
    parts = [f"# {markdown_text(title)}", markdown_text("; ".join(facts)), *lines]
    if evaluation.contest is not None:
        metrics = dict(evaluation.contest.metrics)
        principles, position = metrics.pop("principles"), metrics.pop("position")
        metrics |= {f"length_fit/{name}": value for name, value in metrics.pop("length_fit").items()}
        parts += ["## Win rate", markdown_table({"value": metrics}), *(f"![{name}]({name})" for name in plots)]
        parts += ["### By principle: mean probability that the policy's completion is the better one"]
        parts += [markdown_table({"probability": principles}), "### The judge", markdown_table({"value": position})]
    if evaluation.checks:
        parts += ["## Checks: share that passes", markdown_table(evaluation.checks)]
    parts += ["## Metrics", markdown_table(evaluation.metrics)]
    if evaluation.pairs:
        parts += ["## Side by side", *(_sample(evaluation, i) for i in range(min(NUM_SAMPLES, len(evaluation.pairs))))]
    if evaluation.contest is not None and 0.0 in evaluation.contest.outcomes:
        labels, outcomes = evaluation.contest.labels, evaluation.contest.outcomes
        losses = [i for i, outcome in enumerate(outcomes) if outcome == 0.0]
        clearest = sorted(losses, key=lambda i: labels[i].probability)[:NUM_LOSSES]
        parts += ["## The clearest losses", *(_sample(evaluation, i) for i in clearest)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(evaluation: Evaluation, index: int) -> str:
    if evaluation.contest is None:
        return ""
    label = evaluation.contest.labels[index]
    probability = "" if label.probability is None else f" ({label.probability:.2f})"
    return OUTCOMES[evaluation.contest.outcomes[index]] + probability


def _sample(evaluation: Evaluation, index: int) -> str:
    pair = evaluation.pairs[index]
    sides = (("prompt", plain(pair.prompt)), ("policy", pair.first), (evaluation.opponent, pair.second))
    blocks = "\n\n".join(f"{markdown_text(name)}:\n\n{_fenced(text)}" for name, text in sides)
    verdict = _verdict(evaluation, index)
    return f"### Prompt {index + 1}{verdict and f': {verdict}'}\n\n{blocks}"


def _fenced(text: str) -> str:
    # A fence longer than any in the text: a completion cannot become part of the report.
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
