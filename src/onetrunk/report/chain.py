"""The report of a pipeline: the chain as a picture with what every stage reached, and the stages in a table."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onetrunk.report.blocks import Block, Facts, Figure, Heading, Plots, Text
from onetrunk.report.parts import alarm_blocks, blocks_of, sample_blocks, win_rates
from onetrunk.report.plots import COLORS, INK, on_ink, png_of, svg_of
from onetrunk.report.runs import FOLDER, PIPELINE, Run, read_run
from onetrunk.utils.escaping import address_of
from onetrunk.utils.files import atomic_write_bytes

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
    results = run.results
    if isinstance(results.get("win_rate"), dict):
        rate = results["win_rate"]
        low, high = map(_share, rate.get("discrete_win_rate_interval") or (None, None))
        return f"wins {_share(rate.get('discrete_win_rate'))} of the pairs ({low} to {high})"
    if run.verb == "judge":
        shares = [f"{name} {_share(entry['all'].get('accuracy'))}" for name, entry in results["judges"].items()]
        return f"agrees with people: {', '.join(shares)}"
    before, after = results.get("reference"), results.get("policy")
    if isinstance(before, dict) and isinstance(after, dict) and "score/mean" in after:
        kl = f", KL {_number(after['kl/ref'], '.1f')} nats" if after.get("kl/ref") is not None else ""
        return f"score {_number(before.get('score/mean'))} to {_number(after['score/mean'])}{kl}"
    if isinstance(results.get("fidelity"), dict):
        return f"agrees with its teacher on {_share(results['fidelity'].get('agreement'))}"
    if isinstance(results.get("held_out"), dict):
        return f"orders {_share(results['held_out'].get('accuracy'))} of the held-out pairs as the judge"
    if isinstance(results.get("counts"), dict):
        counts = [f"{value:,} {name.replace('_', ' ')}" for name, value in results["counts"].items() if value]
        return ", ".join(counts[:3])
    for metric, words in (("eval_loss", "held-out loss"), ("loss", "loss")):
        _, values = run.series(metric)
        if values:
            return f"{words} {values[-1]:.3f}"
    return ""


def _number(value: Any, form: str = ".3f") -> str:
    return format(value, form) if isinstance(value, (int, float)) else "?"


def _share(value: Any) -> str:
    return _number(value, ".1%")


def chain_blocks(pipeline: Run, target: Path) -> list[Block]:
    """Return the report of a pipeline; the picture is also written as chain.png."""
    return blocks_of([(pipeline.folder / PIPELINE, lambda: _chain_blocks(pipeline, target))])


def _chain_blocks(pipeline: Run, target: Path) -> list[Block]:
    links = links_of(pipeline)
    total = sum(link.seconds or 0 for link in links)
    blocks: list[Block] = [Text(f"{pipeline.status}; {total / 60:.1f} minutes in all stages.")]
    try:
        figure = on_ink(lambda: draw_chain(links))
        atomic_write_bytes(target / "chain.png", png_of(figure))
        blocks.append(Plots([Figure("chain", "The chain", "", svg_of(figure, "chain", "The chain"))]))
    except ImportError:
        blocks.append(Text("No picture: matplotlib cannot be imported; pip install matplotlib."))
    rows, addresses = [], []
    for link in links:
        seconds = "" if link.seconds is None else f"{link.seconds:.0f}"
        rows.append([link.name, link.verb, link.status, seconds, link.result, str(link.folder or "")])
        report = link.folder and link.folder / FOLDER / "report.html"
        if report and report.is_file():
            addresses.append((link.name, address_of(report, target)))
    table = Facts(["stage", "verb", "status", "seconds", "result", "output"], rows, tuple(addresses))
    stages = blocks_of((link.folder, partial(stage_blocks, link, link.run)) for link in links if link.run is not None)
    return [*blocks, Heading(2, "Stages"), table, *stages]


def stage_blocks(link: Link, run: Run) -> list[Block]:
    """Return win rate, alarms and samples of a stage that has them."""
    blocks: list[Block] = []
    rate: Any = run.results.get("win_rate")
    if isinstance(rate, dict):
        blocks += [Heading(2, f"Win rate ({link.name})"), win_rates(rate)]
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
        axes.add_patch(_box(0.1, row + 0.14, color))
        axes.text(0.3, row + 0.5, link.name, color=INK, va="center", fontweight="bold", fontsize=10)
        seconds = "" if link.seconds is None else f" ({link.seconds:.0f} s)"
        axes.text(2.6, row + 0.5, f"{link.result or link.status}{seconds}", color=INK, va="center", fontsize=9)
        if row + 1 < len(links):
            style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1}
            axes.annotate("", (1.2, row + 1.14), (1.2, row + 0.86), arrowprops=style)
    return figure


def _box(x: float, y: float, color: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(
        (x, y), 2.2, 0.72, boxstyle="round,pad=0,rounding_size=0.12", facecolor="none", edgecolor=color, linewidth=1.5,
        mutation_aspect=0.5,
    )  # fmt: skip
