"""Check everything that only a GPU can show, in one command of at most 9 minutes, with nothing downloaded.

    python scripts/check_gpu.py                                   # or: make check-gpu
    python scripts/check_gpu.py --parts kernels tests             # some parts
    python scripts/check_gpu.py --dry_run --output_dir out/check  # every part on a CPU, with tiny shapes

Each part is a process of its own: the Triton kernels against their twins, the tests marked gpu, PPO iterations of 0.5B
and 7B models with random weights (bf16 and NF4), TRL 1.12 and AgileRL where they are installed, several GPUs where
there are several. A part that fails or hangs does not end the others. Results go into --output_dir as check.json, and
into its README.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_parts import QUIET, Machine, Part, all_parts, run_parts
from bench.gpu_report import measurements, verdict
from bench.processes import BASELINES, CONSOLE, HERE, ROOT, commit, find_baseline, last_line, machine, say
from bench.report import write_readme

DEFAULT_OUTPUT = HERE / "results" / "gpu"
FILE = "check.json"
MINUTES, MINUTES_WITH_SEVERAL_GPUS = 9.0, 29.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    description, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", metavar="PART", help="the parts that run; all by default")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"when the last part is ended (default {MINUTES:.0f}, with several GPUs {MINUTES_WITH_SEVERAL_GPUS:.0f})",
    )
    parser.add_argument("--dry_run", action="store_true", help="run every part on a CPU, with tiny shapes")
    for baseline in BASELINES.values():
        about = f"interpreter of an environment with {baseline.name}"
        parser.add_argument(f"--{baseline.kind}_python", type=Path, help=about)
    parser.add_argument("--output_dir", type=Path, help="default scripts/bench/results/gpu; a dry run: a new folder")
    args = parser.parse_args(arguments)
    if args.minutes is not None and not 0 < args.minutes <= 24 * 60:
        parser.error(f"--minutes is {args.minutes}; set it to a number above 0, at most {24 * 60}")
    return args


def probe(args: argparse.Namespace) -> Machine:
    """Return what this machine has.

    Raises:
        RuntimeError: it has no GPU and this is not a dry run, or a given interpreter lacks its baseline.
    """
    done = subprocess.run(
        [sys.executable, str(HERE / "gpu_probe.py")], capture_output=True, text=True, env={**os.environ, **QUIET}
    )
    if done.returncode:
        raise RuntimeError(f"torch does not run here ({last_line(done.stderr)}); run make setup")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if not found["gpus"] and not args.dry_run:
        cuda = found["cuda"]
        advice = f"CUDA {cuda}; install a driver for it, or a build of torch for your driver"
        raise RuntimeError(
            f"torch sees no GPU: it is built for {advice if cuda else 'CPUs only; install a build for your driver'}."
            " --dry_run runs every part on a CPU, with tiny shapes"
        )
    gpus = [] if args.dry_run else found["gpus"]
    pythons = {kind: baseline_of(args, kind) for kind in BASELINES if args.parts is None or kind in args.parts}
    baselines = {kind: python for kind, python in pythons.items() if python}
    return Machine(gpus, found["versions"], found["cuda"], baselines, args.dry_run)


def baseline_of(args: argparse.Namespace, kind: str) -> Path | None:
    """Return the interpreter of a baseline, or None; one that nobody gave may be broken."""
    given = getattr(args, f"{kind}_python")
    try:
        return find_baseline(given, False, say, BASELINES[kind])
    except RuntimeError as error:
        if given:
            raise
        say(f"{kind}: {error}")
        return None


def choose(parts: list[Part], names: list[str] | None) -> list[Part]:
    """Return the parts of these names, in their own order; None: all.

    Raises:
        ValueError: there is no part with one of these names.
    """
    known = {part.name: part for part in parts}
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise ValueError(f"there is no part {', '.join(unknown)}; the parts are {', '.join(known)}")
    return [part for part in parts if names is None or part.name in names]


def command(args: argparse.Namespace) -> str:
    """Return the command that measures this again."""
    options = ["--dry_run"] if args.dry_run else []
    options += ["--parts", *args.parts] if args.parts else []
    options += ["--minutes", f"{args.minutes:g}"] if args.minutes else []
    return " ".join(["python scripts/check_gpu.py", *options])


def check(args: argparse.Namespace, here: Machine, parts: list[Part], folder: Path) -> dict[str, Any]:
    """Run the parts, write after each what was found so far, and return it."""
    start, load = time.monotonic(), f"{os.getloadavg()[0]:.1f}"
    minutes = args.minutes or (MINUTES_WITH_SEVERAL_GPUS if len(here.gpus) > 1 else MINUTES)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as logs:
        for found in run_parts(parts, 60 * minutes, Path(logs), here.is_dry, say):
            results = summary(args, here, found, time.monotonic() - start) | {"load": load}
            (folder / FILE).write_text(json.dumps(results, indent=1))
            write_readme(folder)
    return results


def summary(args: argparse.Namespace, here: Machine, found: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return everything that is written down of the parts that ran."""
    code, line = verdict(found)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "versions": here.versions,
        "gpus": here.gpus,
        "cuda": here.cuda,
        "is_dry": here.is_dry,
        "command": command(args),
        "seconds": round(seconds, 1),
        "exit_code": code,
        "verdict": line,
        "measurements": measurements(found),
        "parts": found,
    }


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        here = probe(args)
        parts = choose(all_parts(here), args.parts)
        folder = args.output_dir or (Path(tempfile.mkdtemp()) if args.dry_run else DEFAULT_OUTPUT)
        folder.mkdir(parents=True, exist_ok=True)
        results = check(args, here, parts, folder)
    except (RuntimeError, ValueError) as error:
        CONSOLE.print(f"check_gpu: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    say(f"{results['verdict']}; results are in {shown}")
    return results["exit_code"]


if __name__ == "__main__":
    sys.exit(main())
