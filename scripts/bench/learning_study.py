"""Which runs the study of learning is made of, and where their curves are kept.

A run is one JSON line: its arm, settings and seed, and per rollout mean score, mean KL (k1, nats per completion) and
CPU seconds of this process since training began. Runs that a file already holds are not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from learning_tasks import TASKS, FourTokens, make_task

MEASURED_ROLLOUTS = 10
TUNING_SEED = 100
RESULTS = Path(__file__).parent / "learning"


FOUR_RATES = (5e-4, 1e-3, 2e-3, 4e-3)


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Args:
        name: its name in the results.
        settings: what differs from the default.
        grid: per task the settings of which the best on TUNING_SEED is taken.
    """

    name: str
    settings: dict[str, Any]
    grid: dict[str, list[dict[str, float]]]


class Rule:
    """A task's reward as a function with TRL's signature; keeps the true scores, without noise.

    Args:
        task: the task.
        tokenizer: of its prompts.
    """

    def __init__(self, task: Any, tokenizer: Any):
        self.task, self.tokenizer = task, tokenizer
        self.scores: list[float] = []

    def function(self, paid: Callable[[list[int], list[int]], Any] | None = None) -> Callable[..., list[Any]]:
        """Return the reward function.

        Args:
            paid: returns what training sees, from the ids of prompt and completion; None: the task's reward.
        """
        paid = paid or self.task.reward

        def rule(prompts: list[Any], completions: Any, completion_ids: list[list[int]], **_: Any) -> list[Any]:
            pairs = list(zip(map(self._ids, prompts), completion_ids, strict=True))
            self.scores += [self.task.score(*pair) for pair in pairs]
            return [paid(*pair) for pair in pairs]

        return rule

    def _ids(self, prompt: str | list[dict[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        return self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]

    def taken(self) -> float:
        """Return the mean score since the last call."""
        mean = sum(self.scores) / len(self.scores)
        self.scores.clear()
        return mean


@dataclass
class Curve:
    """What a run records after every rollout."""

    score: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, score: float, kl: float, cpu_s: float) -> None:
        """Record a rollout."""
        self.score.append(round(score, 5))
        self.kl.append(round(kl, 5))
        self.cpu_s.append(round(cpu_s, 3))

    def last(self, beta: float) -> dict[str, float]:
        """Return means over the last rollouts: score, KL and objective."""
        score = sum(self.score[-MEASURED_ROLLOUTS:]) / len(self.score[-MEASURED_ROLLOUTS:])
        kl = sum(self.kl[-MEASURED_ROLLOUTS:]) / len(self.kl[-MEASURED_ROLLOUTS:])
        return {"score": score, "kl": kl, "objective": score - beta * kl}


# A run: takes task, settings of the arm, seed and number of rollouts; returns its curve and further values.
Run = Callable[[Any, dict[str, Any], int, int], tuple[Curve, dict[str, Any]]]


@dataclass
class Results:
    """The runs in a file of JSON lines."""

    path: Path

    def __post_init__(self) -> None:
        self.runs = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def find(self, **wanted: Any) -> dict[str, Any] | None:
        """Return the run with these entries, None where there is none."""
        return next((run for run in self.runs if all(run[key] == value for key, value in wanted.items())), None)

    def add(self, run: dict[str, Any]) -> None:
        """Append a run to the file."""
        self.runs.append(run)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(run) + "\n")


def parse(description: str, arms: list[Arm], arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of both implementations' processes."""
    names = [arm.name for arm in arms]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--task", choices=TASKS, default=FourTokens.name)
    parser.add_argument("--arms", nargs="+", choices=names, default=names)
    parser.add_argument("--rollouts", type=int, default=80)
    parser.add_argument("--tuning_rollouts", type=int, default=40, help="rollouts of the runs that choose the rates")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of <task>.jsonl")
    parser.add_argument("--work", type=Path, default=Path("runs/learning"), help="folder of the taught model")
    return parser.parse_args(arguments)


def study(given: argparse.Namespace, arms: list[Arm], run: Run) -> None:
    """Tune every arm on the preliminary seed, then run all arms of a seed one after another."""
    torch.set_num_threads(1)
    task, results = make_task(given.task, given.work), Results(given.out / f"{given.task}.jsonl")
    try:
        task.tokenizer()
    except FileNotFoundError as error:
        raise SystemExit(f"error: {error}") from None
    arms = [arm for arm in arms if arm.name in given.arms and task.name in arm.grid]
    for arm in arms:
        for rates in arm.grid[task.name] if len(arm.grid[task.name]) > 1 else ():
            _run_once(task, arm, rates, TUNING_SEED, given.tuning_rollouts, results, run)
    for seed in given.seeds:
        for arm in arms:
            rates = best_rates(results, arm, task.name, given.tuning_rollouts)
            _run_once(task, arm, rates, seed, given.rollouts, results, run)


def best_rates(results: Results, arm: Arm, task: str, rollouts: int) -> dict[str, float]:
    """Return the entry of the grid with the highest objective after `rollouts` rollouts on the preliminary seed."""

    def objective(rates: dict[str, float]) -> float:
        tried = results.find(arm=arm.name, seed=TUNING_SEED, rates=rates, rollouts=rollouts)
        if tried is None:
            raise RuntimeError(f"{results.path} has no run of arm {arm.name} with {rates} on seed {TUNING_SEED}")
        return tried["last"]["objective"]

    grid = arm.grid[task]
    return max(grid, key=objective) if len(grid) > 1 else grid[0]


def _run_once(
    task: Any, arm: Arm, rates: dict[str, float], seed: int, rollouts: int, results: Results, run: Run
) -> None:
    which = {"arm": arm.name, "seed": seed, "rates": rates, "rollouts": rollouts}
    if results.find(**which):
        return
    curve, values = run(task, {**arm.settings, **rates}, seed, rollouts)
    if len(curve.score) != rollouts:
        raise RuntimeError(f"{len(curve.score)} rollouts were logged, expected {rollouts}")
    last = {name: round(value, 5) for name, value in curve.last(task.beta).items()}
    print(f"{task.name} {which} {last} {curve.cpu_s[-1]:.0f} CPU s {values}", flush=True)
    results.add({"task": task.name, **which, "beta": task.beta, "last": last, **values, **vars(curve)})
