"""The study of learning in one command: every task, every implementation, each in its own environment.

    python scripts/bench/study.py                                     # tiny tasks, ours and GRPO: hours on 1 core
    python scripts/bench/study.py --tasks replies rules dialogue      # on a pretrained model: learning_pretrained.py
    python scripts/bench/study.py --tasks sums --trainers ours grpo
    python scripts/bench/study.py --make_baselines                    # AgileRL and TRL 1.12 too

Runs that the files in learning/ already hold are not run again. At the end it prints the tables and draws the curves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.processes import AGILERL, HERE, ROOT, TRL, find_baseline, say

# Rollouts of a run, and of the runs that choose the rates.
SIZES = {
    "one_token": (80, 40),
    "four_tokens": (80, 40),
    "noisy": (80, 40),
    "chain-1": (80, 30),
    "chain": (80, 30),
    "chain-16": (80, 30),
    "early": (40, 20),
    "sums": (50, 20),
    "sparse": (80, 40),
    "replies": (20, 20),
    "rules": (20, 6),
    "dialogue": (20, 6),
}
PRETRAINED = ("replies", "rules", "dialogue")
SEEDS = ("0", "1", "2", "3", "4")
SCRIPTS = {
    "ours": "learning.py",
    "grpo": "learning_grpo.py",
    "agilerl": "learning_agilerl.py",
    "trl": "learning_trl.py",
}
BASELINES = {"agilerl": AGILERL, "trl": TRL}
# What TRL 1.12 has rates for.
TASKS_OF_TRL = ("four_tokens", "sums")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    summary, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tiny = [task for task in SIZES if task not in PRETRAINED]
    parser.add_argument("--tasks", nargs="+", choices=SIZES, default=tiny, help="default: all tiny tasks")
    parser.add_argument("--trainers", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--make_baselines", action="store_true", help="make missing environments in the cache folder")
    parser.add_argument("--agilerl_python", type=Path, help="interpreter of an environment with AgileRL 2.58")
    parser.add_argument("--trl_python", type=Path, help="interpreter of an environment with TRL 1.12")
    parser.add_argument("--rollouts", type=int, help="of every run; default: as in the README")
    parser.add_argument("--seeds", nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=HERE / "learning", help="folder of <task>.jsonl")
    parser.add_argument("--work", type=Path, default=Path("runs/learning"), help="folder of the taught models")
    return parser.parse_args(arguments)


def interpreters(given: argparse.Namespace) -> dict[str, Path]:
    """Return the interpreter of each trainer that can run; the others are named and left out."""
    found = {"ours": Path(sys.executable), "grpo": Path(sys.executable)}
    for kind, baseline in BASELINES.items():
        if kind in given.trainers:
            python = find_baseline(getattr(given, f"{kind}_python"), given.make_baselines, say, baseline)
            found |= {kind: python} if python else {}
    for kind in given.trainers:
        if kind not in found:
            say(f"{kind}: no environment with {BASELINES[kind].name}; --make_baselines makes one")
    return {kind: found[kind] for kind in given.trainers if kind in found}


def commands(given: argparse.Namespace, pythons: dict[str, Path]) -> list[list[str]]:
    """Return the commands of the study, task by task."""
    listed = []
    for task in given.tasks:
        rollouts, tuning = (given.rollouts, given.rollouts) if given.rollouts else SIZES[task]
        for kind, python in pythons.items():
            if kind == "trl" and task not in TASKS_OF_TRL:
                continue
            numbers = ["--rollouts", str(rollouts), "--tuning_rollouts", str(tuning), "--seeds", *given.seeds]
            folders = ["--out", str(given.out), "--work", str(given.work)]
            listed.append([str(python), str(HERE / SCRIPTS[kind]), "--task", task, *numbers, *folders])
    return listed


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    try:
        pythons = interpreters(given)
    except RuntimeError as error:
        say(f"study: {error}")
        return 1
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    plots = [sys.executable, str(HERE / "learning_plot.py"), "--results", str(given.out)]
    for command in [*commands(given, pythons), plots]:
        say(" ".join(["python", *(word.replace(f"{ROOT}/", "") for word in command[1:])]))
        code = subprocess.run(command, env=environment).returncode
        if code:
            say(f"study: it failed with code {code}; finished runs are kept, and the same command makes the others")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
