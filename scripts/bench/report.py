"""From what the processes printed to medians, ratios, a table and a README.

Knows figures; starts nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.processes import BASELINE, OURS, shown
from bench.rows import MEMORY_FLOOR, MEMORY_TARGET, Row

PHASES = ("generate", "score", "update", "total")
COLUMNS = ("row", "", *(f"{phase} s" for phase in PHASES), "peak MB")
NOTES = """\
Seconds are CPU seconds of the process for one iteration, at one thread; on CUDA wall seconds. Medians over the
iterations of all rounds, the first iteration of each process left out. Ours and TRL run in turn, in processes and
environments of their own, on the same weights, prompts and forced completion lengths, with the same LoRA rank, epochs
and budget of padded tokens per forward. `generate` ends with the last token, `score` is everything up to the first
optimizer step (reward model, old and reference logprobs, values, advantages), `update` the rest. TRL trains a full
value model beside its LoRA policy; ours has a value head on the policy's last hidden state: most of the ratio with
adapters on all layers is that. With mixed lengths TRL computes padding. In the row with a distilled reward model TRL
keeps the full one. Peaks are resident memory with all imports, without the optional packages bitsandbytes, scipy and
triton, which TRL's environment has not either. Differences under 10% mean nothing.
"""


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over all iterations of some processes, and of their peaks."""
    iterations = [row for result in results for row in result["iterations"]]
    seconds = {phase: round(statistics.median(row[phase] for row in iterations), 3) for phase in PHASES}
    return {"seconds": seconds, "peak_mb": round(statistics.median(result["peak_mb"] for result in results))}


def compare(row: Row, ours: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row's medians, ratios and whether what is required is met."""
    own = summary(ours)
    figures: dict[str, Any] = {"label": row.label, "ours": own, "floor": row.floor, "target": row.target}
    figures["roofline"] = {
        name: round(statistics.median(result["roofline"][name] for result in ours), 3)
        for name in ours[0].get("roofline", {})
    }
    if not baseline:
        return figures
    other = summary(baseline)
    ratio = {phase: round(other["seconds"][phase] / max(own["seconds"][phase], 1e-3), 2) for phase in PHASES}
    memory = round(own["peak_mb"] / other["peak_mb"], 3)
    meets = None if row.floor is None else ratio["total"] >= row.floor
    if row.limits_memory:
        meets = bool(meets) and memory <= MEMORY_FLOOR
    reaches = row.target is not None and ratio["total"] >= row.target
    reaches = reaches and (not row.limits_memory or memory <= MEMORY_TARGET)
    verdict = {"meets_floor": meets, "reaches_target": reaches}
    return {**figures, "baseline": other, "ratio": ratio, "memory_share": memory, **verdict}


def lines_of(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the lines of the table that a row makes: TRL, ours, ratios."""

    def line(label: str, who: str, part: dict[str, Any]) -> tuple[str, ...]:
        return (label, who, *(f"{part['seconds'][phase]:.2f}" for phase in PHASES), f"{part['peak_mb']}")

    if "baseline" not in figures:
        return [line(figures["label"], "ours", figures["ours"])]
    required = "" if figures["floor"] is None else f"floor {figures['floor']}x, aim {figures['target']}x"
    ratios = (*(f"{figures['ratio'][phase]:.2f}x" for phase in PHASES), f"{figures['memory_share']:.0%}")
    return [
        line(figures["label"], "TRL 1.12", figures["baseline"]),
        line(required, "ours", figures["ours"]),
        ("", "ratio", *ratios),
    ]


def table(rows: dict[str, dict[str, Any]], title: str) -> Table:
    """Return the table for a terminal, where rows go by their short names."""
    drawn = Table(*COLUMNS, title=title)
    for name, figures in rows.items():
        for line in lines_of({**figures, "label": name}):
            drawn.add_row(*line)
        drawn.add_section()
    return drawn


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def commands(row: Row) -> list[str]:
    """Return the commands of a row, ours first."""
    ours = shown(OURS, (*row.shared, *row.own))
    return [ours, shown(BASELINE, row.shared)] if row.has_baseline else [ours]


def write_readme(folder: Path) -> None:
    """Write the README of a folder of results from the JSON files in it."""
    parts = ["# Results\n", "Written by `scripts/bench.py`; the figures are in the JSON files beside.\n"]
    for name, chapter in (("results.json", _results_chapter), ("growth.json", _growth_chapter)):
        if (folder / name).exists():
            parts.append(chapter(json.loads((folder / name).read_text())))
    (folder / "README.md").write_text("\n".join(parts))


def _results_chapter(results: dict[str, Any]) -> str:
    lines = [line for figures in results["rows"].values() for line in lines_of(figures)]
    fractions = [
        (figures["label"], *(f"{figures['roofline'][phase]:.0%}" for phase in PHASES[:3]))
        for figures in results["rows"].values()
        if figures["roofline"]
    ]
    runs = "\n".join(dict.fromkeys(command for row in results["commands"].values() for command in row))
    return "\n".join(
        [
            f"## One iteration\n\n{_machine_line(results)}\n\n{NOTES}",
            markdown(COLUMNS, lines),
            "Share of the roofline (least seconds by arithmetic, at the matrix products and copies measured on the"
            " machine, over the measured ones), ours:\n",
            markdown(("row", *PHASES[:3]), fractions),
            f"`{results['command']}` starts these, in turn:\n\n```\n{runs}\n```\n",
        ]
    )


def _growth_chapter(results: dict[str, Any]) -> str:
    lines = [
        (axis, str(point["value"]), *point["cells"]) for axis, points in results["axes"].items() for point in points
    ]
    return "\n".join(
        [
            f"## Growth\n\n{_machine_line(results)} One process each, `{results['command']}`:"
            f" mixed lengths, `{results['base']}`.\n",
            "![CPU seconds and memory over size](growth.png)\n",
            markdown(("axis", "size", *results["columns"]), lines),
        ]
    )


def _machine_line(results: dict[str, Any]) -> str:
    m = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items(), reverse=True))
    rounds = f", rounds: {results['rounds']}" if "rounds" in results else ""
    commit = f" (commit {results['commit']})" if results.get("commit") else ""
    return (
        f"{m['processor']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['system']}, Python {m['python']};"
        f" {versions}{commit}; {results['date']}{rounds}; load at the start {results['load']}."
    )
