"""One PPO iteration of ours against TRL 1.12's, on the same work: seconds per phase, peak memory, ratios.

    python scripts/bench.py --make_baseline            # all rows, 3 rounds: about two hours, 17 GB
    python scripts/bench.py --rows mixed-top equal-top --rounds 1
    python scripts/bench.py growth                     # curves over size, as PNG
    python scripts/bench.py --baseline agilerl         # scoring and update of AgileRL 2.58 instead

Every process is timed alone, ours and TRL's in turn; TRL has an environment of its own. Without one, ours is timed
alone. Results go into --output_dir as JSON and a README.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.growth import AXES, base_options, draw, grow, kinds
from bench.processes import BASELINES, CONSOLE, OURS, TRL, commit, find_baseline, machine, run_process, say, shown
from bench.report import commands, compare, table, write_readme
from bench.rows import Row, choose_rows

DEFAULT_OUTPUT = Path(__file__).parent / "bench" / "results" / "cpu"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    summary, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("compare", "growth"), default="compare")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="rows of the comparison; all by default")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES), help="growth: axes; all by default")
    parser.add_argument("--rounds", type=int, default=3, help="how often each process runs (default 3)")
    parser.add_argument("--quick", action="store_true", help="a tiny shape: shows that it runs, means nothing")
    parser.add_argument("--baseline", choices=BASELINES, default=TRL.kind, help="what ours is compared with")
    parser.add_argument("--baseline_python", type=Path, help="interpreter of an environment with the baseline")
    parser.add_argument("--make_baseline", action="store_true", help="make that environment in the cache folder")
    parser.add_argument("--output_dir", type=Path, help="default scripts/bench/results/cpu")
    parser.add_argument("--timeout_s", type=float, default=3600, help="longest time of one process (default 3600)")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if args.baseline != TRL.kind and args.what != "compare":
        parser.error(f"--baseline {args.baseline} has only the comparison")
    return args


def timed(python: Path, script: Path, options: tuple[str, ...], timeout_s: float) -> dict[str, Any]:
    """Return the metrics of one process, and print them."""
    result = run_process(python, script, options, timeout_s)
    seconds = "  ".join(f"{phase} {s:.2f}" for phase, s in result["seconds"].items())
    say(f"    {shown(script, options)}\n        {seconds} s, peak {result['peak_mb']} MB")
    return result


def run_rounds(
    rows: dict[str, Row], baseline: Path | None, args: argparse.Namespace
) -> Iterator[dict[str, dict[str, list]]]:
    """Yield what all processes have printed, after every round; rows of one workload share the baseline's process."""
    printed: dict[str, dict[str, list]] = {name: {"ours": [], "baseline": []} for name in rows}
    for number in range(1, args.rounds + 1):
        say(f"round {number} of {args.rounds}")
        shared: dict[tuple[str, ...], dict[str, Any]] = {}
        for name, row in rows.items():
            if baseline is not None:
                if row.shared not in shared:
                    script = BASELINES[args.baseline].script
                    shared[row.shared] = timed(baseline, script, row.shared, args.timeout_s)
                printed[name]["baseline"].append(shared[row.shared])
            options = (*row.shared, *row.own)
            printed[name]["ours"].append(timed(Path(sys.executable), OURS, options, args.timeout_s))
        yield printed


def about(args: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return when and on what the metrics were measured."""
    versions = {result["implementation"].split()[0]: result["implementation"].split()[1] for result in results}
    versions |= {name: results[0][name] for name in ("torch", "transformers")}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "versions": versions,
        "load": args.load,
    }


def run_comparison(args: argparse.Namespace, baseline: Path | None, folder: Path) -> None:
    """Run the comparison, print its table and rewrite its JSON after every round."""
    rows = choose_rows(args.rows, args.quick, args.baseline)
    for number, printed in enumerate(run_rounds(rows, baseline, args), 1):
        metrics = write_results(rows, printed, number, args, folder)
    title = f"CPU seconds of an iteration, one thread; rounds: {args.rounds}"
    CONSOLE.print(table(metrics, title, BASELINES[args.baseline].name))
    short = [name for name, row in metrics.items() if row.get("meets_floor") is False]
    if short:
        say(f"below the floor: {', '.join(short)}")


def write_results(
    rows: dict[str, Row], printed: dict[str, dict[str, list]], rounds: int, args: argparse.Namespace, folder: Path
) -> dict[str, dict[str, Any]]:
    """Write the JSON of the rounds that are through; return each row's metrics."""
    metrics = {name: compare(row, **printed[name]) for name, row in rows.items()}
    everything = [result for row in printed.values() for kind in row.values() for result in kind]
    results = {
        **about(args, everything),
        "rounds": rounds,
        "command": " ".join(["python scripts/bench.py", *_options(args)]),
        "rows": metrics,
        "commands": {name: commands(row, BASELINES[args.baseline]) for name, row in rows.items()},
        "processes": printed,
    }
    name = "results" if args.baseline == TRL.kind else args.baseline
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))
    return metrics


def run_growth(args: argparse.Namespace, baseline: Path | None, folder: Path) -> None:
    """Run the growth curves; write growth.json and growth.png after every axis."""
    growth: dict[str, Any] = {"axes": {}, "columns": list(kinds(baseline is not None))}
    growth |= {"base": base_options(args.quick), "command": " ".join(["python scripts/bench.py", *_options(args)])}
    for number, axis in enumerate(args.axes, 1):
        say(f"axis {number} of {len(args.axes)}: {axis}")
        points, printed = grow(axis, baseline, args.quick, lambda *process: timed(*process, args.timeout_s))
        growth["axes"][axis] = points
        growth |= about(args, printed)
        (folder / "growth.json").write_text(json.dumps(growth, indent=1))
        draw(growth, folder / "growth.png")
        write_readme(folder)


def _options(args: argparse.Namespace) -> list[str]:
    quick = ["--quick"] if args.quick else []
    if args.what == "growth":
        return ["growth", *quick, *(["--axes", *args.axes] if len(args.axes) < len(AXES) else [])]
    options = ["--rounds", str(args.rounds), *quick]
    options += [] if args.baseline == TRL.kind else ["--baseline", args.baseline]
    return options + (["--rows", *args.rows] if args.rows else [])


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    args.load = f"{os.getloadavg()[0]:.1f}"
    folder = args.output_dir or DEFAULT_OUTPUT
    try:
        choose_rows(args.rows, args.quick, args.baseline)
        chosen = BASELINES[args.baseline]
        baseline = find_baseline(args.baseline_python, args.make_baseline, say, chosen)
        if baseline is None:
            say(f"no environment with {chosen.name}: ours is timed alone (--make_baseline makes one)")
        folder.mkdir(parents=True, exist_ok=True)
        if args.what == "growth":
            run_growth(args, baseline, folder)
        else:
            run_comparison(args, baseline, folder)
        write_readme(folder)
    except (RuntimeError, ValueError) as error:
        CONSOLE.print(f"bench: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    say(f"results are in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
