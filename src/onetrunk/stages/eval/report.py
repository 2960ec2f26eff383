"""What `onetrunk eval` leaves and shows: metrics.json, report.md, pairs.jsonl and plots.

Knows figures, pairs and verdicts; measures nothing.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from onetrunk.feedback.preferences import plain
from onetrunk.judges.base import Pair
from onetrunk.judges.verdicts import judge_warnings
from onetrunk.ppo.evaluation import sample_table
from onetrunk.ppo.sampling import ScoredRollout
from onetrunk.stages.eval.judge import Contest
from onetrunk.stages.plots import new_figure, save_figure
from onetrunk.stages.report import figures_table, finite, show, show_figures, write_metrics
from onetrunk.utils.files import atomic_write_text
from onetrunk.utils.redaction import redact

NUM_POINTS = 101


def draw(folder: Path, contest: Contest) -> list[Path]:
    """Draw all plots of a contest and return their paths; none without matplotlib, which is said once."""
    first = plot_estimates(folder, contest)
    second = plot_by_length(folder, contest) if first is not None else None
    return [path for path in (first, second) if path is not None]


def plot_estimates(folder: Path, contest: Contest) -> Path | None:
    """Draw win_rate.png: each kind of win rate with its interval; None without matplotlib."""
    figure = new_figure()
    if figure is None:
        return None
    axes, rates = figure.axes[0], contest.rates
    kinds = {
        "mean probability": rates.win_rate,
        "at equal length": rates.length_controlled_win_rate,
        "wins and half the ties": rates.discrete_win_rate,
    }
    for place, estimate in enumerate(kinds.values()):
        # NaN, where a figure does not exist, is not drawn.
        axes.plot([estimate.low, estimate.high], [place, place], color="C0", linewidth=2)
        axes.plot(estimate.value, place, marker="o", color="C0")
    axes.axvline(0.5, color="grey", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set(xlim=(0, 1), ylim=(len(kinds) - 0.5, -0.5), xlabel="share won, 95% interval over prompts")
    axes.set_title(f"{rates.wins} wins, {rates.ties} ties, {rates.losses} losses", fontsize="medium")
    return save_figure(figure, folder / "win_rate.png")


def plot_by_length(folder: Path, contest: Contest) -> Path | None:
    """Draw win_rate_by_length.png: a point per pair, and the fit that the figure at equal length is read off."""
    figure = new_figure() if contest.rates.length_fit.scale > 0 else None
    if figure is None:
        return None
    axes, fit = figure.axes[0], contest.rates.length_fit
    kept = [i for i, outcome in enumerate(contest.outcomes) if outcome is not None]
    lengths = [len(contest.pairs[i].first) - len(contest.pairs[i].second) for i in kept]
    axes.scatter(lengths, [contest.labels[i].probability for i in kept], s=8, alpha=0.4)
    low, high = min(lengths), max(lengths)
    grid = [low + (high - low) * step / (NUM_POINTS - 1) for step in range(NUM_POINTS)]
    axes.plot(grid, [fit.probability(x) for x in grid], color="C1", label="logistic fit")
    axes.axvline(0, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="characters that the policy's completion is longer", ylabel="probability that it is better")
    axes.set(ylim=(-0.02, 1.02))
    axes.legend()
    return save_figure(figure, folder / "win_rate_by_length.png")


REPORT, PAIRS = "report.md", "pairs.jsonl"
NUM_SAMPLES, NUM_LOSSES = 6, 3
LONGEST_CELL = 400
# From which difference on the win rate at equal length is another finding than the plain one.
NOTABLE_LENGTH_EFFECT = 0.1
OUTCOMES = {1.0: "win", 0.5: "tie", 0.0: "loss", None: "no verdict"}


@dataclass(frozen=True)
class Evaluation:
    """Everything that was found.

    Args:
        model: its name.
        opponent: "reference", a model's name, or None where the model is alone.
        figures: by role ("policy", "reference", "opponent").
        pairs: the policy's completion first; none where it is alone.
        contest: None without a judge.
        checks: role -> check -> share that passes.
        about: what else belongs into metrics.json.
    """

    model: str
    opponent: str | None
    figures: dict[str, dict[str, float]]
    pairs: list[Pair]
    contest: Contest | None
    checks: dict[str, dict[str, float]]
    about: dict[str, Any]


def write_evaluation(folder: Path, evaluation: Evaluation) -> Path:
    """Write metrics.json, report.md and, where two sides were compared, pairs.jsonl and plots; return the first."""
    others: dict[str, Any] = {"model": evaluation.model, **evaluation.about}
    if evaluation.checks:
        others["checks"] = evaluation.checks
    if "opponent" in evaluation.figures:
        others |= {"opponent_model": evaluation.opponent, "opponent": evaluation.figures["opponent"]}
    if evaluation.contest is not None:
        others["win_rate"] = {"opponent": evaluation.opponent, **evaluation.contest.figures}
    plots: list[Path] = []
    if evaluation.pairs:
        atomic_write_text(folder / PAIRS, "".join(f"{line}\n" for line in pair_lines(evaluation)))
    if evaluation.contest is not None:
        plots = draw(folder, evaluation.contest)
    atomic_write_text(folder / REPORT, redact(report_text(evaluation, [plot.name for plot in plots])))
    # Last: whoever finds it finds the others too.
    figures = evaluation.figures
    return write_metrics(folder, figures["policy"], figures.get("reference"), **finite(others))


def pair_lines(evaluation: Evaluation) -> list[str]:
    """Return one JSON text per prompt: both completions, and what the judge said."""
    lines = []
    for i, pair in enumerate(evaluation.pairs):
        row: dict[str, Any] = {"prompt": pair.prompt, "policy": pair.first, "opponent": pair.second}
        if evaluation.contest is not None:
            label = evaluation.contest.labels[i]
            row |= {"outcome": OUTCOMES[evaluation.contest.outcomes[i]], **asdict(label)}
        lines.append(json.dumps(row, ensure_ascii=False))
    return lines


def show_evaluation(evaluation: Evaluation, samples: ScoredRollout, num_rows: int) -> None:
    """Print figures, win rate and checks as tables, the samples, and what a reader should not overlook."""
    figures, contest = evaluation.figures, evaluation.contest
    if "opponent" in figures:
        show_figures(evaluation.model, figures)
    else:
        show(figures_table(evaluation.model, figures["policy"], figures.get("reference")))
    if contest is not None:
        position = {f"position/{name}": value for name, value in contest.figures["position"].items()}
        # What is true or false, rather than a number, is said in a sentence.
        numbers = {name: v for name, v in (contest.figures | position).items() if not isinstance(v, bool)}
        show_figures(f"{evaluation.model} against {evaluation.opponent}", {"value": numbers})
    if evaluation.checks:
        show_figures("share that passes", evaluation.checks)
    if num_rows > 0:
        show(side_by_side(evaluation, num_rows) if evaluation.pairs and contest else sample_rows(samples, num_rows))
    for sentence in sentences(evaluation):
        print(f"eval: {sentence}")


def sample_rows(samples: ScoredRollout, num_rows: int) -> Table:
    """Return the model's own samples."""
    return sample_table(samples, "samples", num_rows)


def side_by_side(evaluation: Evaluation, num_rows: int) -> Table:
    """Return the first pairs as a table for the terminal."""
    table = Table(title="samples", show_lines=True)
    for column in ("prompt", "policy", evaluation.opponent or "opponent", "outcome"):
        table.add_column(column, overflow="fold")
    for i, pair in enumerate(evaluation.pairs[:num_rows]):
        texts = [_short(plain(pair.prompt)), _short(pair.first), _short(pair.second), _verdict(evaluation, i)]
        table.add_row(*(text.replace("[", r"\[") for text in texts))
    return table


def sentences(evaluation: Evaluation) -> list[str]:
    """Return what was found in words: the win rate, and what casts doubt on it."""
    if evaluation.contest is None:
        return []
    figures, rates = evaluation.contest.figures, evaluation.contest.rates
    won, counted, level = rates.win_rate, rates.discrete_win_rate, rates.length_controlled_win_rate
    found = [
        f"win rate {won.value:.1%} ({won.low:.1%} to {won.high:.1%}) against {evaluation.opponent} on {rates.prompts}"
        f" prompts by the judge {figures['judge']}: its mean probability of being the better one; counted,"
        f" {counted.value:.1%} ({counted.low:.1%} to {counted.high:.1%}): {rates.wins} wins, {rates.ties} ties,"
        f" {rates.losses} losses"
    ]
    if math.isfinite(level.value):
        found.append(f"at equal length the win rate would be {level.value:.1%} ({level.low:.1%} to {level.high:.1%})")
        if abs(level.value - won.value) >= NOTABLE_LENGTH_EFFECT:
            more = rates.mean_length_difference
            found.append(
                f"length decides a part of it: the completions are {abs(more):.0f} characters"
                f" {'longer' if more > 0 else 'shorter'} on average, and the judge does not treat lengths alike"
            )
    if rates.is_extrapolated:
        found.append(
            "one side is the longer one in more than four of five pairs: the win rate at equal length is extrapolated,"
            " and mostly too high for the shorter side"
        )
    found += judge_warnings(figures["position"])
    if figures["unjudged"]:
        found.append(f"{figures['unjudged']} pairs have no verdict yet; the same command asks for them again")
    return found


def report_text(evaluation: Evaluation, plots: list[str]) -> str:
    """Return report.md.

    Args:
        plots: names of files beside it.
    """
    title = evaluation.model if evaluation.opponent is None else f"{evaluation.model} against {evaluation.opponent}"
    facts = [f"{name}: {value}" for name, value in evaluation.about.items()]
    parts = [f"# {title}", "; ".join(facts), *(f"- {s}" for s in sentences(evaluation))]
    if evaluation.contest is not None:
        figures = dict(evaluation.contest.figures)
        principles, position = figures.pop("principles"), figures.pop("position")
        figures |= {f"length_fit/{name}": value for name, value in figures.pop("length_fit").items()}
        parts += ["## Win rate", _table({"value": figures}), *(f"![{name}]({name})" for name in plots)]
        parts += ["### By principle: mean probability that the policy's completion is the better one"]
        parts += [_table({"probability": principles}), "### The judge", _table({"value": position})]
    if evaluation.checks:
        parts += ["## Checks: share that passes", _table(evaluation.checks)]
    parts += ["## Figures", _table(evaluation.figures)]
    if evaluation.pairs:
        parts += ["## Side by side", *(_sample(evaluation, i) for i in range(min(NUM_SAMPLES, len(evaluation.pairs))))]
    losses = clearest_losses(evaluation)
    if losses:
        parts += ["## The clearest losses", *(_sample(evaluation, i) for i in losses)]
    return "\n\n".join(part for part in parts if part) + "\n"


def clearest_losses(evaluation: Evaluation) -> list[int]:
    """Return the pairs that the policy lost most clearly, the worst first."""
    if evaluation.contest is None:
        return []
    labels, outcomes = evaluation.contest.labels, evaluation.contest.outcomes
    lost = [i for i, outcome in enumerate(outcomes) if outcome == 0.0]
    return sorted(lost, key=lambda i: labels[i].probability)[:NUM_LOSSES]


def _verdict(evaluation: Evaluation, index: int) -> str:
    if evaluation.contest is None:
        return ""
    label = evaluation.contest.labels[index]
    given = "" if label.probability is None else f" ({label.probability:.2f})"
    return OUTCOMES[evaluation.contest.outcomes[index]] + given


def _sample(evaluation: Evaluation, index: int) -> str:
    pair = evaluation.pairs[index]
    sides = (("prompt", plain(pair.prompt)), ("policy", pair.first), (evaluation.opponent, pair.second))
    blocks = "\n\n".join(f"{name}:\n\n{_fenced(text)}" for name, text in sides)
    verdict = _verdict(evaluation, index)
    return f"### Prompt {index + 1}{verdict and f': {verdict}'}\n\n{blocks}"


def _fenced(text: str) -> str:
    # A fence longer than any in the text: a completion cannot become part of the report.
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _table(columns: dict[str, dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for figures in columns.values() for name in figures))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {_cell(name)} | {' | '.join(_cell(c.get(name)) for c in columns.values())} |" for name in names]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(_cell(entry) for entry in value)
    text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + " ..."
