"""Processor time, lines and options of the command line's first answers; fails above the limit.

python scripts/bench/cli.py --limit 1.0
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/tiny/ppo.yaml")
COMMANDS = {
    "help of all verbs": ["--help"],
    "help of ppo": ["ppo", "--help"],
    "every option of ppo": ["ppo", "--help", "all"],
    "help of sft": ["sft", "--help"],
    "YAML of every option": ["config", "ppo"],
    "unknown option": ["ppo", "--config", RECIPE, "--learning_rat", "1"],
    "missing config": ["ppo", "--config", "absent.yaml"],
}


def measured(words: list[str]) -> tuple[float, str]:
    """Return the processor seconds of `onetrunk WORDS...` and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "onetrunk", *words]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, process.stdout + process.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--limit", type=float, default=1.0, help="largest processor time of an answer, seconds")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each command; the fastest counts")
    args = parser.parse_args()
    print("| command | processor time, s | lines | options explained |\n|---|---|---|---|")
    slow = []
    for name, words in COMMANDS.items():
        runs = [measured(words) for _ in range(args.repeats)]
        seconds, text = min(runs)
        options = len(re.findall(r"^  --[a-z]", text, re.MULTILINE))
        print(f"| {name} | {seconds:.2f} | {len(text.splitlines())} | {options or ''} |")
        slow += [name] if seconds > args.limit else []
    if slow:
        print(f"slower than {args.limit:g} s: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
