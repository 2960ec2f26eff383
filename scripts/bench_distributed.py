"""Several processes on this machine: memory of each, what they exchange, and how one process scales to two.

    python scripts/bench_distributed.py                        # all parts, 3 rounds: about 8 minutes on 2 quiet cores
    python scripts/bench_distributed.py --parts scaling        # the parts that are measured again
    python scripts/bench_distributed.py --quick --rounds 1     # a tiny shape: shows that it runs, means nothing

Every launch goes through accelerate_configs/ddp.yaml and fsdp2.yaml, on CPUs with gloo. `memory` includes the
collective operations. Results go into --output_dir as distributed.json, and into its README.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.distributed_report import (
    SCALING_COLUMNS,
    busy_line,
    loading_lines,
    memory_lines,
    scaling,
    scaling_lines,
    traffic_lines,
)
from bench.distributed_runs import Launch, fact_launches, load_and_shard, run_together, scaling_launches, usable_cores
from bench.processes import CONSOLE, commit, machine, say
from bench.report import write_readme
from rich.table import Table

DEFAULT_OUTPUT = Path(__file__).parent / "bench" / "results" / "cpu"
PARTS = ("memory", "loading", "scaling")
FILE = "distributed.json"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    summary, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all by default")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4], help="memory: numbers of processes")
    parser.add_argument("--rounds", type=int, default=3, help="scaling: how often each launch runs (default 3)")
    parser.add_argument("--quick", action="store_true", help="a tiny shape: shows that it runs, means nothing")
    parser.add_argument("--output_dir", type=Path, default=DEFAULT_OUTPUT, help="default scripts/bench/results/cpu")
    parser.add_argument("--timeout_s", type=float, default=1800, help="longest time of one launch (default 1800)")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or min(args.processes) < 1:
        parser.error("--rounds and --processes must be 1 or more")
    return args


def run_memory(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the facts of all launches, and their commands."""
    launches = fact_launches(args.processes, args.quick)
    found: dict[str, Any] = {}
    for name, launch in launches.items():
        say(f"    {launch.shown()}")
        found[name] = {"ranks": run_together([launch], args.timeout_s)[0]}
    for line in (*memory_lines(found), *traffic_lines(found)):
        say("        " + " | ".join(line))
    commands = [launch.shown() for launch in launches.values()]
    return {"launches": found, "commands": commands}, [rank for launch in found.values() for rank in launch["ranks"]]


def run_loading(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the memory of processes that load and shard a base, and their commands."""
    cases = load_and_shard(args.quick, args.timeout_s, say)
    for line in loading_lines(cases):
        say("        " + " | ".join(line))
    commands = [case.pop("command") for case in cases.values()]
    return {"cases": cases, "commands": commands}, [rank for case in cases.values() for rank in case["ranks"]]


def run_scaling(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return seconds and efficiencies, and their commands; all launches run in turn, in every round."""
    launches: dict[str, list[Launch]] = scaling_launches(args.quick)
    rounds = []
    for number in range(1, args.rounds + 1):
        say(f"  round {number} of {args.rounds}")
        rounds.append({})
        for name, together in launches.items():
            say(f"    {name}: {together[0].shown()}")
            ranks = run_together(together, args.timeout_s)
            rounds[-1][name] = [rank for launch in ranks for rank in launch]
    results = scaling(rounds)
    table = Table(*SCALING_COLUMNS, title="Seconds of an iteration, one core per process")
    for line in scaling_lines(results):
        table.add_row(*line)
    CONSOLE.print(table)
    if not results["meets_floor"]:
        say(f"below the floor: ddp, {results['efficiency']['ddp']['total']:.0%} of {results['floor']:.0%}")
    say(busy_line(results))
    commands = [launch.shown() for together in launches.values() for launch in together]
    kept = {"results": results, "commands": commands, "rounds": args.rounds, "processes": rounds}
    return kept, [rank for found in rounds for ranks in found.values() for rank in ranks]


RUNS = {"memory": run_memory, "loading": run_loading, "scaling": run_scaling}


def command(args: argparse.Namespace, part: str) -> str:
    """Return the command that measures a part again."""
    options = ["--parts", part, *(["--quick"] if args.quick else [])]
    if part == "scaling":
        options += ["--rounds", str(args.rounds)]
    if part == "memory":
        options += ["--processes", *map(str, args.processes)]
    return " ".join(["python scripts/bench_distributed.py", *options])


def measure(args: argparse.Namespace, part: str) -> None:
    """Measure a part, and write it into the results; the other parts stay as they are."""
    load = f"{os.getloadavg()[0]:.1f}"
    say(f"{part}")
    found, ranks = RUNS[part](args)
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "versions": ranks[0]["versions"],
        "load": load,
        "command": command(args, part),
    }
    path = args.output_dir / FILE
    results = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**results, part: {**about, **found}}, indent=1))
    write_readme(args.output_dir)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        if "scaling" in args.parts:
            usable_cores()
        args.output_dir.mkdir(parents=True, exist_ok=True)
        for part in args.parts:
            measure(args, part)
    except RuntimeError as error:
        CONSOLE.print(f"bench_distributed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    say(f"results are in {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
