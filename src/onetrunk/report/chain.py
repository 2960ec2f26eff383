"""The report of a pipeline: the chain as a picture with what every stage reached, and the stages in a table."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onetrunk.report.blocks import PAGE, Block
from onetrunk.report.parts import alarm_blocks, blocks_of, sample_blocks, share, win_rates
from onetrunk.report.plots import COLORS, INK, figures_block
from onetrunk.report.runs import FOLDER, PIPELINE, Run, read_run
from onetrunk.utils.redaction import address_of

# Inches of a stage in the picture.
ROW = 0.62
STATUS_COLORS = {"done": COLORS[2], "running": COLORS[1]}
FAILED = "#d1242f"


@dataclass(frozen=True)
class Link:
    """A stage of the chain."""

    name: str
    verb: str
    status: str
    seconds: float | None
    result: str
    folder: Path | None
    run: Run | None  # What is in the folder, if there is a run.


def links_of(pipeline: Run) -> list[Link]:
    """Return the stages of a pipeline in their order, with what each reached."""
    links = []
    for name, record in pipeline.results.get("stages", {}).items():
        settings = record.get("settings", {})
        folder = Path(settings["output_dir"]) if settings.get("output_dir") else None
        verb, result, run = str(settings.get("verb", "script")), "", None
        if folder is not None and folder.is_dir():
            with contextlib.suppress(ValueError):
                run = read_run(folder)
        if run is not None:
            with contextlib.suppress(Exception):  # Its files may hold anything; its own report says what is wrong.
                result = headline(run)
        links.append(Link(name, verb, str(record.get("status")), record.get("seconds"), result, folder, run))
    return links


def headline(run: Run) -> str:
    """Return what a stage reached, in a few words."""
    match run.results:
        case {"win_rate": {"discrete_win_rate": rate, **rest}}:
            low, high = (share(end) or "?" for end in rest.get("discrete_win_rate_interval") or (None, None))
            return f"wins {share(rate) or '?'} of the pairs ({low} to {high})"
        case {"judges": dict(judges)} if run.verb == "judge":
            shares = [f"{name} {share(entry['all'].get('accuracy')) or '?'}" for name, entry in judges.items()]
            return f"agrees with people: {', '.join(shares)}"
        case {"reference": dict(before), "policy": {"score/mean": score, **rest}}:
            kl = f", KL {rest['kl/ref']:.1f} nats" if rest.get("kl/ref") is not None else ""
            return f"score {_score(before.get('score/mean'))} to {_score(score)}{kl}"
        case {"fidelity": dict(fidelity)}:
            return f"agrees with its teacher on {share(fidelity.get('agreement')) or '?'}"
        case {"held_out": dict(held_out)}:
            return f"orders {share(held_out.get('accuracy')) or '?'} of the held-out pairs as the judge"
        case {"counts": dict(counts)}:
            return ", ".join([f"{n:,} {name.replace('_', ' ')}" for name, n in counts.items() if n][:3])
    for metric, words in (("eval_loss", "held-out loss"), ("loss", "loss")):
        _, values = run.series(metric)
        if values:
            return f"{words} {values[-1]:.3f}"
    return ""


def _score(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "?"


def chain_blocks(pipeline: Run, target: Path) -> list[Block]:
    """Return the report of a pipeline; the picture is also written as chain.png."""
    return blocks_of([(pipeline.folder / PIPELINE, lambda: _chain_blocks(pipeline, target))])


def _chain_blocks(pipeline: Run, target: Path) -> list[Block]:
    links = links_of(pipeline)
    total = sum(link.seconds or 0 for link in links)
    drawing = ("chain", "The chain", "", partial(draw_chain, links))
    blocks = [
        Block(text=f"{pipeline.status}; {total / 60:.1f} minutes in all stages."),
        figures_block("", target, [drawing]),
    ]
    rows, addresses = [], {}
    for link in links:
        seconds = "" if link.seconds is None else f"{link.seconds:.0f}"
        rows.append([link.name, link.verb, link.status, seconds, link.result, str(link.folder or "")])
        report = link.folder and link.folder / FOLDER / PAGE
        if report and report.is_file():
            addresses[link.name] = address_of(report, target)
    columns = ["stage", "verb", "status", "seconds", "result", "output"]
    table = Block("Stages", columns=columns, rows=rows, links=addresses)
    stages = blocks_of((link.folder, partial(stage_blocks, link, link.run)) for link in links if link.run is not None)
    return [*blocks, table, *stages]


def stage_blocks(link: Link, run: Run) -> list[Block]:
    """Return win rate, alarms and samples of a stage that has them."""
    rate: Any = run.results.get("win_rate")
    blocks = [win_rates(rate, f"Win rate ({link.name})")] if isinstance(rate, dict) else []
    blocks += alarm_blocks(run, f"Alarms of {link.name}")
    return blocks + sample_blocks(run) if link.verb == "eval" else blocks


def draw_chain(links: Sequence[Link]) -> Any:
    """Return a figure with one box per stage, from top to bottom."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(6.0, ROW * len(links) + 0.1))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10), ylim=(len(links), 0))
    axes.axis("off")
    for row, link in enumerate(links):
        color = STATUS_COLORS.get(link.status, FAILED)
        box = {"boxstyle": "round,pad=0.5", "facecolor": "none", "edgecolor": color, "linewidth": 1.5}
        axes.text(0.3, row + 0.5, link.name, color=INK, va="center", fontweight="bold", fontsize=10, bbox=box)
        seconds = "" if link.seconds is None else f" ({link.seconds:.0f} s)"
        axes.text(2.6, row + 0.5, f"{link.result or link.status}{seconds}", color=INK, va="center", fontsize=9)
        if row + 1 < len(links):
            style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1}
            axes.annotate("", (0.5, row + 1.14), (0.5, row + 0.86), arrowprops=style)
    return figure
