"""Runs that go wrong on purpose, and what the last lines of each say: the table in README.md.

    make demo && python scripts/figures/verdicts.py

trains the demo's policy a dozen times for a few rollouts (about 4 CPU minutes) and prints the table as Markdown.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from onetrunk.report.runs import read_run
from onetrunk.report.verdict import verdict_of

ROOT = Path(__file__).resolve().parents[2]
# Prompts whose last message is the answer, made of rows for fine-tuning.
ANSWERED = "runs/tiny/answered.jsonl"
REWARDS = "scripts/figures/verdicts.py"
PPO = "ppo --config recipes/tiny/ppo.yaml --report_to none --write_report false --eval_steps 32 --save_strategy no"
SHORT = f"{PPO} --num_rollouts 16 --rollout_batch_size 64"
EVAL = "eval --model_name_or_path runs/tiny/ppo --dataset_name runs/tiny/held_out.jsonl --max_completion_length 32"
EVAL += " --constitution recipes/tiny/constitution.yaml --use_cpu true"

# Of each run: what was done, and the words of its command after `onetrunk`.
RUNS = {
    "good": PPO,
    "reward hacked": f"{SHORT} --reward_funcs {REWARDS}:buckets --learning_rate 1e-3 --monitor_every 1",
    "collapsed": f"{SHORT} --learning_rate 0.02 --beta 0 --num_rollouts 24",
    "nothing learned": f"{SHORT} --learning_rate 1e-9",
    "equal scores": f"{SHORT} --reward_funcs {REWARDS}:never",
    "all cut off": f"{SHORT} --max_completion_length 4 --learning_rate 1e-4",
    "killed": f"{SHORT} --save_strategy steps --save_steps 4",
    "diverged": f"{SHORT} --learning_rate 30 --max_grad_norm 1e9 --beta 0",
    "judge down": f"{EVAL} --judge http://127.0.0.1:9/v1 --judge_model tiny",
    "KL too high": f"{SHORT} --beta 0 --learning_rate 0.01 --num_ppo_epochs 8 --alarm_limits " + '{"kl":5}',
    "length explosion": f"{SHORT} --reward_funcs {REWARDS}:words --beta 0",
    "answered prompts": f"{SHORT} --dataset_name {ANSWERED}",
    "useless values": f"{SHORT} --reward_funcs {REWARDS}:noise --num_rollouts 40",
}


def buckets(completions, **columns):
    """How often a reply says "bucket"; nothing else counts."""
    return [float(text.count("bucket")) for text in _texts(completions)]


def words(completions, **columns):
    """The number of words."""
    return [float(len(text.split())) for text in _texts(completions)]


def never(completions, **columns):
    """1 for what no reply says."""
    return [float("quod erat demonstrandum" in text) for text in _texts(completions)]


def noise(completions, **columns):
    """A random number."""
    return [random.random() for _ in completions]


def _texts(completions):
    return [messages[-1]["content"] for messages in completions]


def last_words(name: str, folder: Path) -> str:
    """Make a run; return its verdict, or where it did not begin what the command said."""
    words = [*RUNS[name].split(), "--output_dir", str(folder)]
    with (folder.parent / "log.txt").open("w+") as log:
        process = subprocess.Popen([sys.executable, "-m", "onetrunk", *words], cwd=ROOT, stdout=log, stderr=log)
        if name == "killed":
            while process.poll() is None and not list(folder.glob("checkpoint-*")):
                time.sleep(0.2)
            process.send_signal(signal.SIGKILL)
        process.wait()
        log.seek(0)
        errors = [line.strip() for line in log if "error: " in line]
    verdict = None if errors else verdict_of(read_run(folder))
    return (
        f"exit code {process.returncode}; {' '.join(errors)}" if verdict is None else f"**{verdict.level}**: {verdict}"
    )


def main() -> None:
    """Make the runs named on the command line, or all; print the table."""
    os.chdir(ROOT)
    rows = [json.loads(line) for line in Path("runs/tiny/sft.jsonl").read_text().splitlines()]
    prompts = [{"prompt": row["prompt"] + row["completion"]} for row in rows]
    Path(ANSWERED).write_text("".join(json.dumps(row) + "\n" for row in prompts))
    print("| run | what it says |\n|---|---|", flush=True)
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            said = last_words(name, Path(folder) / "run").replace(folder, "runs").replace("|", "/")
        print(f"| {name} | {said} |", flush=True)


if __name__ == "__main__":
    main()
