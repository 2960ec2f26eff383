"""Folders of runs, written by hand: what the reports of the tests are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ALARM = "alarm kl at step 6: the KL to the reference is 120, above the limit 100. What helps: raise beta"
MACHINE = {"num_processes": 2, "num_gpus": 2, "device": "H100"}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ppo_log(num_steps: int = 8, shift: float = 0.0) -> list[dict[str, Any]]:
    """Return a log with an evaluation at step 0 and, every other step, a rollout's metrics."""
    log: list[dict[str, Any]] = [{"step": 0, "eval_score/mean": 0.1 + shift, "eval_kl/ref": 0.0, "time": 0.0}]
    for step in range(1, num_steps + 1):
        entry = {"step": step, "policy/entropy": 2 - step / 10, "policy/clip_fraction": 0.1, "time": 10.0 * step}
        entry |= {"value/explained_variance": step / 10, "memory/peak_gib": 1.5}
        if step % 2:
            entry |= {"score/mean": step / 10 + shift, "kl/ref": step * 1.0, "completion/length": 20.0 - step}
            entry |= {"score/std": 0.1, "score/a": 0.5, "score/b": step / 20, "time/generate_s": 2.0}
            entry |= {"throughput/completion_tokens_per_s": 100.0, "judge/gap": 0.1, "judge/score": 0.3}
        log.append({**entry, "alarm/kl": float(step >= 6)} if step % 2 == 0 else entry)
    return [*log, {"step": num_steps, "eval_score/mean": 0.9 + shift, "eval_kl/ref": 7.0, "time": 10.0 * num_steps}]


def write_ppo_run(folder: Path, finished: bool = True, shift: float = 0.0) -> Path:
    """Write the record of a PPO run of 8 steps that took 80 seconds on 2 GPUs, and raised an alarm."""
    begin = {"event": "begin", "step": 0, "time": 0.0, **MACHINE}
    alarm = {"event": "alarm", "name": "kl", "text": ALARM, "step": 6, "time": 60.0}
    write_lines(folder / "_report" / "log.jsonl", [begin, *ppo_log(shift=shift), alarm])
    about = {"verb": "ppo", "base": "base", "planned_steps": 8, "settings": {"beta": 0.1, "lr": 1, "gamma": 1.0}}
    about |= {"changed": ["beta"], "digests": {"prompts": "8 rows, sha256 abc"}, "versions": {"torch": "2.13"}}
    (folder / "_report" / "run.json").write_text(json.dumps(about))
    prompts = [f"prompt {i}" for i in range(20)]
    before = [{"prompt": p, "completion": f"first {i}", "score": 1.0} for i, p in enumerate(prompts)]
    after = [{"prompt": p, "completion": f"second {i}", "score": 1.0 + i - 3} for i, p in enumerate(prompts)]
    after[19]["completion"] = "</pre><script>alert(1)</script> ``` | <b>"
    write_lines(folder / "_report" / "completions-before.jsonl", before)
    write_lines(folder / "_report" / "completions-after.jsonl", after)
    if finished:
        (folder / "_finished.json").write_text(json.dumps({"step": 8, "epoch": 1.0, "ended": None, "files": []}))
        metrics = {"reference": {"score/mean": 0.1}, "policy": {"score/mean": 0.9, "kl/ref": 7.0}}
        (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def write_pipeline(folder: Path) -> Path:
    """Write a pipeline of a script, a PPO run and an evaluation, which failed to win."""
    write_ppo_run(folder / "ppo")
    rate = {"win_rate": 0.4, "interval": [0.3, 0.5], "opponent": "reference", "wins": 4, "ties": 0, "losses": 6}
    rate |= {"discrete_win_rate": 0.4, "discrete_win_rate_interval": [0.25, 0.55]}
    samples = [{"prompt": "p", "completion": "c", "score": 1.0}]
    for role in ("reference", "policy"):
        write_lines(folder / "eval" / f"samples-{role}.jsonl", samples)
    (folder / "eval" / "metrics.json").write_text(json.dumps({"win_rate": rate}))
    stages = {
        "data": {"status": "done", "seconds": 3.0, "settings": {}},
        "ppo": {"status": "done", "seconds": 60.0, "settings": {"verb": "ppo", "output_dir": str(folder / "ppo")}},
        "eval": {"status": "failed", "seconds": 9.0, "settings": {"verb": "eval", "output_dir": str(folder / "eval")}},
    }
    (folder / "chain").mkdir()
    (folder / "chain" / "pipeline.json").write_text(json.dumps({"pipeline": "p.yaml", "stages": stages}))
    return folder / "chain"


def write_judge_run(folder: Path) -> Path:
    """Write what a measurement of one judge on pairs of two subsets leaves."""
    metrics = {"rows": 4, "decided": 4, "accuracy": 0.75, "accuracy_interval": [0.3, 0.95], "position": {}}
    entry = {"all": metrics, "subsets": {"a": metrics, "b": metrics}, "findings": ["it prefers the longer one"]}
    agreement = {"one and two": {"pairs": 4, "agreement": 0.5}}
    results = {"judges": {"one": entry}, "agreement": agreement, "costs": {"one": {"calls": 4, "usd": 0.1}}}
    rows = [{"prompt": f"p{i}", "better": "b", "other": "o"} for i in range(4)]
    write_lines(folder / "pairs.jsonl", [row | {"judges": {"one": {"probability": 0.4}}} for row in rows])
    (folder / "metrics.json").write_text(json.dumps(results | {"dataset": "d", "constitution": "c"}))
    return folder


def write_preferences(folder: Path) -> Path:
    """Write preference rows of five pairs, of which the judge labelled four."""
    counts, bins = {"pairs": 5, "labelled": 4, "ties": 1}, {"0.50-0.55": 1, "0.95-1.00": 3}
    rows = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": "r", "probability": i / 10} for i in range(5, 10)]
    write_lines(folder / "data" / "preferences.jsonl", rows)
    (folder / "statistics.json").write_text(json.dumps({"counts": counts, "rows": {"label_histogram": bins}}))
    return folder
