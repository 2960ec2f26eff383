"""Medians, ratios, tables and the README of what the processes of a benchmark printed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import distributed_report, gpu_report
from bench.processes import AGILERL, OURS, TRL, Baseline, shown
from bench.rows import MEMORY_FLOOR, MEMORY_TARGET, Row

PHASES = ("generate", "score", "update", "total")
COLUMNS = ("row", "", *(f"{phase} s" for phase in PHASES), "peak MB")
README_COLUMNS = ("row", "TRL 1.12", "ours", "ratio (generate, score, update)", "memory", "roofline")
AGILERL_COLUMNS = ("row", AGILERL.name, "ours", "ratio (score, update)", "memory")
NOTES = """\
Median CPU seconds of one iteration with one thread, and peak resident MB. Ratio: TRL's over
ours; memory: ours over TRL's; roofline: the fewest seconds that this machine's arithmetic allows, over ours, by phase.
Differences under 10% are noise. Both have the same weights, prompts, completion lengths, LoRA rank, epochs and padded
tokens per forward. TRL also trains a full value model, scores with the full reward model, and computes padding.
"""
AGILERL_NOTES = """\
`learn` of AgileRL's PPO for language models against our scoring and update, without sampling and without a reward
model: median CPU seconds with one thread, and the peak of the whole process, in which ours has sampled too. Both run
on the same weights, lengths, LoRA rank, epochs and limit on padded tokens per forward, without gradient checkpointing.
AgileRL (with transformers 5.14.1) has adapters for actor, critic and reference on one base, and computes padding.
Fitting our value head counts as scoring.

AgileRL's update runs two adapters, of actor and critic, forward and backward, and ours one: so 2 is what equal lengths
on all layers allow.
"""


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over all iterations of some processes, and of their peaks."""
    iterations = [row for result in results for row in result["iterations"]]
    seconds = {phase: round(statistics.median(row[phase] for row in iterations), 3) for phase in PHASES}
    return {"seconds": seconds, "peak_mb": round(statistics.median(result["peak_mb"] for result in results))}


def compare(row: Row, ours: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row's medians and ratios, and whether they meet the floor and the target."""
    own = summary(ours)
    values: dict[str, Any] = {"label": row.label, "ours": own, "floor": row.floor, "target": row.target}
    values["roofline"] = {
        name: round(statistics.median(result["roofline"][name] for result in ours), 3)
        for name in ours[0].get("roofline", {})
    }
    if not baseline:
        return values
    other = summary(baseline)
    ratio = {phase: round(other["seconds"][phase] / max(own["seconds"][phase], 1e-3), 2) for phase in PHASES}
    memory = round(own["peak_mb"] / other["peak_mb"], 3)
    meets = None if row.floor is None else ratio["total"] >= row.floor
    if row.limits_memory:
        meets = bool(meets) and memory <= MEMORY_FLOOR
    reaches = row.target is not None and ratio["total"] >= row.target
    reaches = reaches and (not row.limits_memory or memory <= MEMORY_TARGET)
    verdict = {"meets_floor": meets, "reaches_target": reaches}
    return {**values, "baseline": other, "ratio": ratio, "memory_share": memory, **verdict}


def lines_of(values: dict[str, Any], name: str = TRL.name) -> list[tuple[str, ...]]:
    """Return the lines of a row in the table: the baseline of this name, ours, ratios."""

    def line(label: str, who: str, part: dict[str, Any]) -> tuple[str, ...]:
        return (label, who, *(f"{part['seconds'][phase]:.2f}" for phase in PHASES), f"{part['peak_mb']}")

    if "baseline" not in values:
        return [line(values["label"], "ours", values["ours"])]
    required = "" if values["floor"] is None else f"floor {values['floor']}x, aim {values['target']}x"
    ratios = (*(f"{values['ratio'][phase]:.2f}x" for phase in PHASES), f"{values['memory_share']:.0%}")
    return [
        line(values["label"], name, values["baseline"]),
        line(required, "ours", values["ours"]),
        ("", "ratio", *ratios),
    ]


def table(rows: dict[str, dict[str, Any]], title: str, baseline: str = TRL.name) -> Table:
    """Return the table for a terminal, with the short names of the rows."""
    drawn = Table(*COLUMNS, title=title)
    for name, values in rows.items():
        for line in lines_of({**values, "label": name}, baseline):
            drawn.add_row(*line)
        drawn.add_section()
    return drawn


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    first, *others = ("| " + " | ".join(row) + " |" for row in [header, *lines])
    return "\n".join([first, "|---" * len(header) + "|", *others]) + "\n"


def commands(row: Row, baseline: Baseline = TRL) -> list[str]:
    """Return the commands of a row, ours first."""
    return [shown(OURS, (*row.shared, *row.own)), shown(baseline.script, row.shared)]


def write_readme(folder: Path) -> None:
    """Write the README of a folder of results from the JSON files in it."""
    writers = "`scripts/bench.py`, `scripts/bench_distributed.py` and `scripts/check_gpu.py`"
    parts = ["# Results\n", f"Written by {writers}; the JSON files hold all values, commands and machines.\n"]
    chapters = {
        "results.json": _results_chapter,
        "agilerl.json": _agilerl_chapter,
        "growth.json": _growth_chapter,
        "distributed.json": _several_processes_chapter,
        "check.json": _gpu_chapter,
    }
    machine_line = _MachineLine()
    for name, chapter in chapters.items():
        if (folder / name).exists():
            parts.append(chapter(json.loads((folder / name).read_text()), machine_line))
    (folder / "README.md").write_text("\n".join(parts))


class _MachineLine:
    """Describes when and where a part was measured; names machine and versions only where they change."""

    def __init__(self) -> None:
        self.machine = ""

    def __call__(self, results: dict[str, Any]) -> str:
        m = results["machine"]
        versions = (f"{name} {version}" for name, version in sorted(results["versions"].items()) if name != "onetrunk")
        machine = f"{m['processor']}, {m['cores']} cores, {m['memory_gib']} GiB; {', '.join(versions)}"
        parts = [] if machine == self.machine else [machine]
        self.machine = machine
        if results.get("commit"):
            parts.append(f"commit {results['commit']}")
        rounds = f", rounds: {results['rounds']}" if "rounds" in results else ""
        line = "; ".join([*parts, f"{results['date']}{rounds}", f"load {results['load']}"])
        return f"{line[0].upper()}{line[1:]}."


def _results_chapter(results: dict[str, Any], machine_line: _MachineLine) -> str:
    return "\n".join(
        [
            f"## One iteration\n\n{machine_line(results)}\n\n{NOTES}",
            markdown(README_COLUMNS, [_readme_line(values) for values in results["rows"].values()]),
            f"`{results['command']}`; results.json has the command of each row.\n",
        ]
    )


def _readme_line(values: dict[str, Any], phases: Sequence[str] = PHASES[:3]) -> tuple[str, ...]:
    def cell(part: dict[str, Any]) -> str:
        return f"{part['seconds']['total']:.2f} s, {part['peak_mb']} MB"

    roofline = ", ".join(f"{share:.0%}" for phase, share in values["roofline"].items() if phase in PHASES[:3])
    if "baseline" not in values:
        return (values["label"], "", cell(values["ours"]), "", "", roofline)
    ratios = ", ".join(f"{values['ratio'][phase]:.1f}x" for phase in phases)
    return (
        values["label"],
        cell(values["baseline"]),
        cell(values["ours"]),
        f"{values['ratio']['total']:.2f}x ({ratios})",
        f"{values['memory_share']:.0%}",
        roofline,
    )


def _agilerl_chapter(results: dict[str, Any], machine_line: _MachineLine) -> str:
    lines = [_readme_line(values, phases=PHASES[1:3])[:-1] for values in results["rows"].values()]
    return "\n".join(
        [
            f"## Scoring and update of AgileRL\n\n{machine_line(results)}\n\n{AGILERL_NOTES}",
            markdown(AGILERL_COLUMNS, lines),
            f"`{results['command']}`; agilerl.json has the command of each row.\n",
        ]
    )


def _growth_chapter(results: dict[str, Any], machine_line: _MachineLine) -> str:
    return (
        f"## Growth\n\n{machine_line(results)} `{results['command']}`: one process each, mixed lengths,"
        f" `{results['base']}`.\n\n![CPU seconds and memory over size](growth.png)\n"
    )


def _several_processes_chapter(results: dict[str, Any], machine_line: _MachineLine) -> str:
    return distributed_report.chapter(results, markdown, machine_line)


def _gpu_chapter(results: dict[str, Any], machine_line: _MachineLine) -> str:
    return gpu_report.chapter(results, markdown, machine_line)
