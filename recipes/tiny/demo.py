"""What `make demo` runs: data and a base from scratch, then SFT -> PPO -> eval, as a user would type them.

Shows what the policy learned on held-out requests. Exit code: 0 if the score rose clearly at a bounded KL, 1 if it did
not or a stage failed.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from make_data import OUTPUT_DIR, make_all
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("sft", "ppo", "eval")
LEAST_RISE = 0.1
MOST_KL = 10.0
NUM_SAMPLES = 4


def run_stage(verb: str) -> int:
    """Run one stage as a command of its own, its progress on this terminal; return its exit code."""
    config = f"recipes/tiny/{verb}.yaml"
    print(f"\n$ onetrunk {verb} --config {config}", flush=True)
    start = time.perf_counter()
    code = subprocess.run([sys.executable, "-m", "onetrunk.cli", verb, "--config", config]).returncode
    print(f"demo: {verb} {'took' if code == 0 else 'FAILED after'} {time.perf_counter() - start:.0f} s", flush=True)
    return code


def read_samples(role: str) -> list[dict]:
    """Return what a role said, with its scores."""
    lines = (Path(OUTPUT_DIR) / "eval" / f"samples-{role}.jsonl").read_text(encoding="utf-8").splitlines()
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


def verdict(seconds: float) -> int:
    """Print what was reached; return the exit code."""
    metrics = json.loads((Path(OUTPUT_DIR) / "eval" / "metrics.json").read_text(encoding="utf-8"))
    before, after = metrics["reference"]["score/mean"], metrics["policy"]["score/mean"]
    kl = metrics["policy"]["kl/ref"]
    print(f"demo: held-out score {before:.3f} -> {after:.3f} at KL {kl:.1f} nats per reply, in {seconds:.0f} s")
    if after - before >= LEAST_RISE and kl <= MOST_KL:
        return 0
    print(f"demo: FAILED, expected a rise of {LEAST_RISE} or more at KL {MOST_KL} or less", file=sys.stderr)
    return 1


def main() -> int:
    """Run everything; return the exit code."""
    os.chdir(ROOT)
    start = time.perf_counter()
    try:
        print(f"demo: writing a base model and data to {make_all()}", flush=True)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for verb in STAGES:
        code = run_stage(verb)
        if code:
            return code
    show_samples()
    return verdict(time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
