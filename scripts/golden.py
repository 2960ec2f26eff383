"""Compare what this tree and a commit compute: the same small cases, on this machine, with this Python.

    python scripts/golden.py main                          # every case, about 5 minutes for each of the two
    python scripts/golden.py main --only ppo-ddp plan      # some cases
    python scripts/golden.py --list

Each case is a command as a user gives it. Weights, completions, rows and metrics are equal bit for bit for one
process, and to 1e-6 for two. The exit code is 1 if anything else is found or a case fails. Results of the commit are
kept. While the machine is busy, cases take longer and are as equal as before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from golden.cases import CASES
from golden.comparing import compare, verdict
from golden.running import ROOT, CaseFailed, inputs_in, place_of, run_case, worktree

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onetrunk-golden"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    summary, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", nargs="?", metavar="BASE_COMMIT", help="the commit to compare with")
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES, default=list(CASES), help="these cases")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument("--jobs", type=int, default=1, help="cases that run side by side (default %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of inputs and results (default %(default)s)")
    args = parser.parse_args(arguments)
    if not args.base and not args.list:
        parser.error("BASE_COMMIT is missing; give the commit to compare with, such as main")
    return args


def commit_of(name: str) -> str:
    """Return the full name of a commit.

    Raises:
        ValueError: git does not know it.
    """
    words = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{name} is not a commit of {ROOT}; give a branch, a tag or a hash")
    return done.stdout.strip()


def checked(name: str, base: Path, base_tree: Path | None, new: Path, inputs: Path) -> tuple[bool, str]:
    """Run a case at both commits and return whether it passes, with its row of the table."""
    try:
        if base_tree:
            run_case(CASES[name], base_tree, base, inputs)
        seconds = run_case(CASES[name], ROOT, new, inputs)
        is_equal, text = verdict(compare(base, new), CASES[name].tolerance)
    except (CaseFailed, ValueError) as error:
        return False, f"{name:18}{'':14}FAILS: {error}"
    before = json.loads((base / "seconds.json").read_text())
    return is_equal, f"{name:18}{before:6.1f}{seconds:7.1f} {text}"


def check(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """Yield the outcome of each case."""
    commit, inputs = commit_of(args.base), inputs_in(args.cache.resolve())
    places = {name: place_of(inputs.parent, commit, name, CASES[name], inputs) for name in args.only}
    new = inputs.parent / f"tree-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]}"
    with ExitStack() as stack:
        tree = None
        if not all(place.is_dir() for place in places.values()):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            tree = stack.enter_context(worktree(commit, Path(folder) / "base"))
        pool = ThreadPoolExecutor(args.jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        yield from pool.map(
            lambda name: checked(name, places[name], None if places[name].is_dir() else tree, new / name, inputs),
            args.only,
        )


def main() -> int:
    """Compare, and return the exit code."""
    args = parse()
    if args.list:
        print("\n".join(CASES))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Removes the worktree.
    passed = []
    print(f"{'case':18}{'base s':>6}{'here s':>7} result (values compared)", flush=True)
    try:
        for is_equal, row in check(args):
            passed.append(is_equal)
            print(row, flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{sum(passed)} of {len(passed)} cases are equal")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
