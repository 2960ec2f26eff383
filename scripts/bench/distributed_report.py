"""Medians, efficiencies and the README chapter of `scripts/bench_distributed.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

PHASES = ("generate", "score", "update", "total")
SCALED = ("two alone", "ddp", "fsdp2")
# Efficiency that is required of DDP.
FLOOR = 0.85
# A process that has less of its core than this shares it with other work, and its seconds mean little.
LEAST_SHARE = 0.95
MIB = 2**20
LABELS = {
    "one": "one process",
    "two alone": "two runs at once that do not communicate",
    "ddp": "two processes, ddp",
    "fsdp2": "two processes, fsdp2",
}


# --- scaling ---


def with_total(row: dict[str, float]) -> dict[str, float]:
    return {**row, "total": sum(row.values())}


def medians(ranks: Sequence[dict[str, Any]], clock: str) -> dict[str, float]:
    """Return the median seconds of each phase over the iterations of some processes; `clock` is wall or cpu."""
    rows = [with_total(row) for rank in ranks for row in rank["result"][clock]]
    return {phase: statistics.median(row[phase] for row in rows) for phase in PHASES}


def scaling(rounds: Sequence[dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """Return seconds and efficiencies.

    The efficiency is the seconds of one process over those of each of two with as many rows (weak scaling). It is
    computed in every round, so that a machine that gets slower between two rounds does not change it.

    Args:
        rounds: {"one", "two alone", "ddp", "fsdp2"} to the results of the processes.
    """
    seconds = {name: {clock: _over_rounds(rounds, name, clock) for clock in ("wall", "cpu")} for name in rounds[0]}
    efficiency = {name: _efficiency(rounds, name) for name in SCALED}
    share = seconds["one"]["cpu"]["total"] / max(1e-9, seconds["one"]["wall"]["total"])
    return {
        "seconds": seconds,
        "efficiency": efficiency,
        "share_of_core": round(share, 3),
        "is_busy": share < LEAST_SHARE,
        "floor": FLOOR,
        "meets_floor": efficiency["ddp"]["total"] >= FLOOR,
    }


def _over_rounds(rounds: Sequence[dict[str, Any]], name: str, clock: str) -> dict[str, float]:
    found = [medians(one_round[name], clock) for one_round in rounds]
    return {phase: round(statistics.median(row[phase] for row in found), 3) for phase in PHASES}


def _efficiency(rounds: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    def ratios(clock: str, phase: str) -> list[float]:
        pairs = [(medians(r["one"], clock)[phase], medians(r[name], clock)[phase]) for r in rounds]
        return [round(one / max(1e-9, two), 3) for one, two in pairs]

    totals = ratios("wall", "total")
    return {
        **{phase: statistics.median(ratios("wall", phase)) for phase in PHASES},
        "cpu": statistics.median(ratios("cpu", "total")),
        "fastest": round(_fastest(rounds, "one") / max(1e-9, _fastest(rounds, name)), 3),
        "range": [min(totals), max(totals)],
    }


def _fastest(rounds: Sequence[dict[str, Any]], name: str) -> float:
    return min(sum(row.values()) for r in rounds for rank in r[name] for row in rank["result"]["wall"])


def busy_line(results: dict[str, Any]) -> str:
    """Return a warning about a machine that other work used, or an empty text."""
    if not results["is_busy"]:
        return ""
    return (
        f"One process had {results['share_of_core']:.0%} of its core: other work used the machine, so run it again on"
        " a quiet one before you trust the efficiency."
    )


def scaling_lines(results: dict[str, Any], labels: dict[str, str] | None = None) -> list[tuple[str, ...]]:
    """Return the lines of the table of scaling; `labels` replace the short names."""
    lines: list[tuple[str, ...]] = []
    for name, seconds in results["seconds"].items():
        cells = [f"{seconds['wall']['total']:.2f}", f"{seconds['cpu']['total']:.2f}", "", "", "", ""]
        if name in results["efficiency"]:
            found = results["efficiency"][name]
            low, high = found["range"]
            phases = ", ".join(f"{found[phase]:.0%}" for phase in PHASES[:3])
            cells[2:] = [f"{found['total']:.0%}", f"{low:.0%} to {high:.0%}", phases, f"{found['cpu']:.0%}"]
        lines.append(((labels or {}).get(name, name), *cells))
    return lines


# --- memory and collective operations ---


def mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.1f}" if num_bytes >= MIB / 10 else f"{num_bytes / MIB:.3f}"


def memory_lines(launches: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the lines of the table of memory, each with the most of any process."""
    lines = []
    for name, launch in launches.items():
        for number, choice in enumerate(launch["ranks"][0]["result"]):
            ranks = [rank["result"][number] for rank in launch["ranks"]]

            def most(key: str, ranks: Sequence[dict[str, Any]] = ranks) -> float:
                return max(rank[key] for rank in ranks)

            def against(key: str, most: Callable[[str], float] = most) -> str:
                return f"{mib(most(key))} ({mib(most(f'{key}_formula'))})"

            process = ", ".join(
                f"{max(rank['anonymous_mib'][moment] for rank in ranks):,.0f}"
                for moment in ("rest", "generate", "score", "update")
            )
            trained = f"{mib(most('trained'))} + {mib(most('optimizer'))}"
            weights = (against("frozen"), against("frozen_in_rollout"), trained)
            lines.append((name, choice["adapter_layers"], *weights, process))
    return lines


def traffic_lines(launches: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the lines of the table of collective operations, those of process 0."""
    lines = []
    for name, launch in launches.items():
        # Without sharding only gradients travel.
        if not launch["ranks"][0]["result"][0]["gathers_formula"]:
            continue
        for choice in launch["ranks"][0]["result"]:
            gathers = [
                f"{choice['gathers'][phase][0]}, {mib(choice['gathers'][phase][1])} ({formula[0]}, {mib(formula[1])})"
                for phase, formula in choice["gathers_formula"].items()
            ]
            calls, num_bytes = calls_of_gradients(choice)
            steps = choice["optimizer_steps"]
            gradients = f"{calls}, {mib(num_bytes)} ({steps}, {mib(steps * choice['trained'])})"
            lines.append((name, choice["adapter_layers"], *gathers, gradients))
    return lines


def calls_of_gradients(choice: dict[str, Any]) -> tuple[int, int]:
    """Return calls and bytes of the reductions of gradients in an iteration."""
    cells = [phase.get("gradients", [0, 0]) for phase in choice["collectives"].values()]
    return sum(cell[0] for cell in cells), sum(cell[1] for cell in cells)


def loading_lines(cases: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the lines of the table of loading, each with the most of any process."""
    lines = []
    for name, case in cases.items():
        ranks = [rank["result"]["memory"] for rank in case["ranks"]]
        cells = [
            " + ".join(
                f"{max(0.0, max(rank[moment][part] for rank in ranks)):,.0f}" for part in ("anonymous", "files")
            )
            for moment in ("peak: load", "loaded", "peak: shard", "sharded")
        ]
        lines.append((name, f"{case['file_mib']:,.0f}", *cells))
    return lines


# --- the chapter of the README ---

MEMORY_COLUMNS = (
    "launch",
    "adapters",
    "frozen base",
    "in a rollout",
    "trained + optimizer",
    "process: rest, generate, score, update",
)
TRAFFIC_COLUMNS = ("launch", "adapters", "weights: rollout", "scoring", "update", "gradients")
LOADING_COLUMNS = ("the base is loaded", "files", "peak of loading", "loaded", "peak of sharding", "sharded")
SCALING_COLUMNS = ("", "s", "CPU s", "efficiency", "rounds", "generate, score, update", "CPU efficiency")

NOTES = {
    "memory": """\
MiB on the process that has most; in brackets the formula (`held_bytes`), without norms and biases. In a rollout
a process holds the whole base next to its share. The last column is anonymous memory, imports included: at rest, and
the peak of each phase.
""",
    "traffic": """\
Calls and MiB of one iteration; in brackets the formula (`costs.gathers`; for gradients the optimizer steps and the
trained bytes).
""",
    "loading": """\
MiB of one of two processes beyond its imports, adapters included: anonymous memory plus its share of mapped files. In
the dtype of its files the base stays mapped until a layer is sharded; converted or quantised weights are copies.
""",
    "scaling": """\
Seconds of an iteration with as many rows on each process (weak scaling), each on a core of its own. The efficiency is
the time of one process over the time of two in the same round: the median and the range.
""",
}


def without_cpu(cells: Sequence[str]) -> tuple[str, ...]:
    """Return a line of the table of scaling without processor time, which the JSON file has."""
    return tuple(cell for column, cell in zip(SCALING_COLUMNS, cells, strict=True) if "CPU" not in column)


def chapter(
    results: dict[str, Any], markdown: Callable[..., str], machine_line: Callable[[dict[str, Any]], str]
) -> str:
    """Return the chapter of distributed.json: one section per part that has been measured."""
    parts = ["## Several processes\n"]

    def add(part: str, title: str, columns: Sequence[str], lines: Sequence[tuple[str, ...]], *more: str) -> None:
        about = results[part]
        heading = f"### {title}\n\n`{about['command']}`. {machine_line(about)}\n"
        parts.extend([heading, NOTES[part], markdown(columns, lines)])
        parts.extend(f"{line}\n" for line in more if line)

    if "memory" in results:
        launches = results["memory"]["launches"]
        most = max(len(launch["ranks"]) for launch in launches.values())
        shown = {name: launch for name, launch in launches.items() if len(launch["ranks"]) in (1, most)}
        add("memory", "Memory per process", MEMORY_COLUMNS, memory_lines(shown))
        parts.extend(
            ["### Collective operations\n", NOTES["traffic"], markdown(TRAFFIC_COLUMNS, traffic_lines(shown))]
        )
    if "loading" in results:
        add(
            "loading", "Loading and sharding a saved base", LOADING_COLUMNS, loading_lines(results["loading"]["cases"])
        )
    if "scaling" in results:
        found = results["scaling"]["results"]
        verdict = "meets" if found["meets_floor"] else "is below"
        floor = f"DDP {verdict} the required {found['floor']:.0%}."
        columns, lines = without_cpu(SCALING_COLUMNS), [without_cpu(line) for line in scaling_lines(found, LABELS)]
        add("scaling", "One process to two", columns, lines, floor, busy_line(found))
    return "\n".join(parts)
