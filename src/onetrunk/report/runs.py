"""Read what a run has left in its folder: its record, its log, its metrics and its samples.

It reads any run: finished, running or killed, with a record (`_report/log.jsonl`) or, for a trainer used from Python,
with the log in its last checkpoint alone.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onetrunk.checkpoints.folders import FINISHED, MANIFEST, checkpoint_folders
from onetrunk.utils.beats import read_beat
from onetrunk.utils.files import parse_json, read_json
from onetrunk.verbs import VERBS

# Trainer pushes no path that begins with an underscore to the Hub.
FOLDER = "_report"
LOG_FILE, RUN_FILE = "log.jsonl", "run.json"
SAMPLES = {"before": "completions-before.jsonl", "after": "completions-after.jsonl"}
# The event of a run that a signal has stopped.
STOP = "stop"
METRICS, STATISTICS, PIPELINE = "metrics.json", "statistics.json", "pipeline.json"
# What `onetrunk eval` and `onetrunk judge` say of each pair.
PAIRS = "pairs.jsonl"
# What `onetrunk sft` leaves; transformers names it.
RESULTS = "all_results.json"
TRAINER_STATE = "trainer_state.json"
# A run whose heartbeat is older counts as killed, or whose process is gone.
ALIVE_S = 120.0


@dataclass(frozen=True)
class Alarm:
    """An alarm of a run; `rollouts` is the number of logs in which it lasted."""

    name: str
    step: int
    text: str
    rollouts: int
    ended_run: bool


@dataclass
class Run:
    """What is known of a run."""

    folder: Path
    verb: str
    status: str
    about: dict[str, Any] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    before: list[dict[str, Any]] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    images: list[Path] = field(default_factory=list)
    ended: str | None = None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a metric was logged as a finite number, and its values."""
        points = {e["step"]: e[metric] for e in self.log if "step" in e and _is_number(e.get(metric))}
        steps = sorted(points)
        return steps, [points[step] for step in steps]

    def alarms(self) -> list[Alarm]:
        """Return the alarms, the worst first: those that ended the run, then those that lasted longest."""
        alarms = []
        for event in self.events:
            if event.get("event") == "alarm":
                name, step = str(event.get("name")), int(event.get("step", 0))
                _, values = self.series(f"alarm/{name}")
                ended = f"alarm {name} at step" if name != "monitor" else "monitor"
                is_end = bool(self.ended and ended in self.ended)
                lasted = max(1, sum(value > 0 for value in values))
                alarms.append(Alarm(name, step, str(event.get("text", "")), lasted, is_end))
        return sorted(alarms, key=lambda alarm: (not alarm.ended_run, -alarm.rollouts, alarm.step))

    def hours(self, with_gpus: bool = False) -> float | None:
        """Return the hours of all processes that worked on the run, or its GPU-hours; None without a record."""
        total, begun, last, gpus = 0.0, None, None, 0
        for entry in [*self._timed(), {"event": "begin", "time": 0.0}]:
            if entry.get("event") == "begin":
                if begun is not None:
                    total += (last - begun) / 3600 * (gpus if with_gpus else 1)
                begun, gpus = entry["time"], entry.get("num_gpus", 0)
            last = entry["time"]
        return total if self._timed() else None

    def _timed(self) -> list[dict[str, Any]]:
        entries = [entry for entry in (*self.events, *self.log) if _is_number(entry.get("time"))]
        return sorted(entries, key=lambda entry: entry["time"])


def read_run(folder: str | Path) -> Run:
    """Return what is known of the run in a folder."""
    folder = Path(folder)
    about = _json_if_there(folder / FOLDER / RUN_FILE)
    entries = read_lines(folder / FOLDER / LOG_FILE) or _log_of_checkpoints(folder)
    pipeline = _json_if_there(folder / PIPELINE)
    finished = _json_if_there(folder / FINISHED)
    # A training that is continued has the metrics of its earlier end until it has a result again.
    has_begun = any(entry.get("event") == "begin" for entry in entries)
    has_result = bool(finished) or (folder / MANIFEST).is_file() or not has_begun
    names = (METRICS, STATISTICS, RESULTS) if has_result else ()
    results = next((found for n in names if (found := _json_if_there(folder / n))), {})
    if not (about or entries or results or pipeline or finished):
        raise ValueError(
            f"{folder} holds no run: there is no {FOLDER}/{LOG_FILE}, checkpoint, {METRICS}, {STATISTICS} or"
            f" {PIPELINE} in it; give the output_dir of a stage or of a pipeline"
        )
    verb = about.get("verb") or _verb(folder, results)
    run = Run(folder, verb, _status(folder, finished, entries, verb, pipeline), about)
    run.log = [entry for entry in entries if "event" not in entry]
    run.events = [entry for entry in entries if "event" in entry]
    run.results, run.ended = pipeline or results, finished.get("ended")
    run.before, run.after = (read_lines(folder / FOLDER / name) for name in SAMPLES.values())
    if verb == "eval":
        before, run.after = (read_lines(folder / f"samples-{role}.jsonl") for role in ("opponent", "policy"))
        run.before = before or read_lines(folder / "samples-reference.jsonl")
    run.images = sorted(path for path in folder.glob("*.png") if path.is_file())
    return run


def stage_runs(pipeline: Run) -> dict[str, Run]:
    """Return the runs of a pipeline's stages that have written something, by the names of the stages."""
    runs = {}
    for name, record in pipeline.results.get("stages", {}).items():
        folder = record["settings"].get("output_dir")
        with contextlib.suppress(ValueError):
            runs |= {name: read_run(folder)} if folder is not None and Path(folder).is_dir() else {}
    return runs


def read_lines(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Return the first mappings in a file of JSON lines, none without the file; a line that a kill cut is left out."""
    values = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:most] if path.is_file() else ():
        with contextlib.suppress(ValueError):
            values.append(parse_json(line))
    return [value for value in values if isinstance(value, dict)]


def pairs_of(run: Run) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the completions of the same prompts before and after training."""
    return [(a, b) for a, b in zip(run.before, run.after, strict=False) if a["prompt"] == b["prompt"]]


def gain(pair: tuple[dict[str, Any], dict[str, Any]]) -> float | None:
    """Return how much the score of a prompt's completion rose; None if one of them has no score."""
    scores = [row.get("score") for row in pair]
    return scores[1] - scores[0] if all(map(_is_number, scores)) else None


def _json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _log_of_checkpoints(folder: Path) -> list[dict[str, Any]]:
    for checkpoint in reversed(checkpoint_folders(folder)):
        if (checkpoint / TRAINER_STATE).is_file():
            return read_json(checkpoint / TRAINER_STATE)["log_history"]
    return []


def _verb(folder: Path, results: dict[str, Any]) -> str:
    signs = {verb.name: verb.known_by for verb in VERBS.values() if verb.known_by}
    verbs = [verb for verb, sign in signs.items() if sign in results or (folder / sign).is_file()]
    # A later one leaves what an earlier one leaves, and more.
    return verbs[-1] if verbs else "training"


def _status(
    folder: Path, finished: dict[str, Any], entries: Sequence[dict[str, Any]], verb: str, pipeline: dict[str, Any]
) -> str:
    if pipeline:
        states = [stage["status"] for stage in pipeline["stages"].values()]
        left = [state for state in states if state != "done"]
        return ", ".join(left) if left else f"all {len(states)} stages that ran are done"
    if finished:
        ended = f", ended by {finished['ended']}" if finished.get("ended") else ""
        return f"finished at step {finished.get('step')}{ended}"
    beat, last = read_beat(folder, 0), entries[-1] if entries else {}
    log = [entry for entry in entries if "event" not in entry]
    step = max((entry.get("step", 0) for entry in log), default=0)
    if last.get("event") == STOP:  # Whatever its process still does.
        return f"stopped at step {last.get('step')} ({last.get('signal')}); --resume auto continues it"
    if beat is not None and time.time() - beat.time < ALIVE_S and beat.may_be_alive:
        return f"running, {beat.place}"
    ends = [entry for entry in entries if entry.get("event") in ("begin", "end")]
    if ends and ends[-1]["event"] == "end" and (folder / MANIFEST).is_file():  # From Python, without FINISHED.
        return f"finished at step {ends[-1].get('step')}"
    if log or last.get("event"):
        return f"trained up to step {step}; not running now, and without a finished result"
    return f"{verb} is done"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
