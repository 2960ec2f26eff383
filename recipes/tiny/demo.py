"""What `make demo` runs: the whole pipeline of this recipe, then what it reached, in one table.

Exit code: 0 if the policy wins clearly over the fine-tuned model, no part of the rubric fell beyond its noise and the
student agrees with its teacher, 1 if not or where a stage failed.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from onetrunk.report.verdict import Change

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path("runs/tiny")
PIPELINE = "recipes/tiny/pipeline.yaml"
# The lower end of the interval of the win rate, the student's agreement with its teacher, and the KL in nats.
LEAST_WIN_RATE, LEAST_AGREEMENT, MOST_KL = 0.5, 0.9, 15.0
NUM_SAMPLES = 4
RUBRIC = ("on_task", "polite", "concise", "finished")


def read_metrics(stage: str) -> dict:
    """Return what a stage measured."""
    return json.loads((RUNS / stage / "metrics.json").read_text(encoding="utf-8"))


def read_samples(role: str) -> list[dict]:
    """Return what a role said, with its scores."""
    lines = (RUNS / "eval" / f"samples-{role}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def show_samples() -> None:
    """Print some held-out requests with the replies before and after."""
    table = Table(title="the same requests before and after PPO", show_lines=True)
    for column in ("request", "before", "score", "after", "score"):
        table.add_column(column, overflow="fold")
    pairs = list(zip(read_samples("reference"), read_samples("policy"), strict=True))
    for before, after in pairs[:NUM_SAMPLES]:
        cells = [before["prompt"][-1]["content"]]
        for row in (before, after):
            cells += [row["completion"][-1]["content"], f"{row['score']:.2f}"]
        table.add_row(*cells)
    Console().print(table)


def rubric_changes() -> dict[str, Change]:
    """Return how each part of the rubric changed, on the same requests."""
    before, after = read_samples("reference"), read_samples("policy")
    return {part: Change.of(*([row[f"score/{part}"] for row in rows] for rows in (before, after))) for part in RUBRIC}


def text(change: Change) -> str:
    """Return a change with its interval as a cell."""
    return f"{change.before:.3f} -> {change.after:.3f}, {change.low:+.3f} to {change.high:+.3f}"


def results() -> tuple[Table, list[str]]:
    """Return what every stage reached, and what falls short."""
    reward, distill, evaluation = (read_metrics(stage) for stage in ("reward", "student", "eval"))
    fidelity, changes = distill["fidelity"], rubric_changes()
    policy, reference = evaluation["policy"], evaluation["reference"]
    wins = evaluation["win_rate"]
    low, high = wins["discrete_win_rate_interval"]
    won = f"{wins['discrete_win_rate']:.1%}, {low:.1%} to {high:.1%}"
    rows = [
        ("reward model", "held-out pairs ordered as the judge does", f"{reward['held_out']['accuracy']:.1%}"),
        ("student", "held-out pairs ordered as its teacher does", f"{fidelity['agreement']:.1%}"),
        ("policy", "rubric score before -> after", f"{reference['score/mean']:.3f} -> {policy['score/mean']:.3f}"),
        *(("policy", f"{part} before -> after, 95% interval of the change", text(c)) for part, c in changes.items()),
        ("policy", "KL to the fine-tuned model, nats per reply", f"{policy['kl/ref']:.1f}"),
        ("policy", "pairs won against it by the judge, 95% interval", won),
        ("policy", "win rate: mean probability of being better", f"{wins['win_rate']:.1%}"),
        ("policy", "win rate at equal length", f"{wins['length_controlled_win_rate']:.1%}"),
    ]
    table = Table(title="what the chain reached, on requests that nothing was trained on")
    for column in ("model", "metric", "value"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    short = [f"{part} {change}" for part, change in changes.items() if change.sign < 0]
    if low <= LEAST_WIN_RATE:
        short.append(f"the interval of the share of pairs won begins at {low:.1%}, not above {LEAST_WIN_RATE:.0%}")
    if fidelity["agreement"] < LEAST_AGREEMENT:
        short.append(f"the student agrees with its teacher on {fidelity['agreement']:.1%}, not {LEAST_AGREEMENT:.0%}")
    if policy["kl/ref"] > MOST_KL:
        short.append(f"the KL is {policy['kl/ref']:.1f} nats, above {MOST_KL:.0f}")
    return table, short


def main() -> int:
    """Run everything; return the exit code."""
    os.chdir(ROOT)
    start = time.perf_counter()
    print(f"$ onetrunk run {PIPELINE}", flush=True)
    code = subprocess.run([sys.executable, "-m", "onetrunk.cli", "run", PIPELINE]).returncode
    if code:
        return code
    show_samples()
    table, short = results()
    Console().print(table)
    print(f"demo: report: {RUNS / 'pipeline' / '_report' / 'report.html'}")
    print(f"demo: took {time.perf_counter() - start:.0f} s; a second `make demo` skips what is done")
    for shortfall in short:
        print(f"demo: FAILED, {shortfall}", file=sys.stderr)
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
