"""The record of a pipeline's stages, and the plan of each stage: done, run, or resume.

A stage depends on its config, its options, and every file and folder that these name, compared by the sha256 of their
contents. It is done if none of them has changed since it ended and its output is there. Free settings (`Stage.free`)
may change. The imports of a Python file are not followed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import glob
from pathlib import Path
from typing import Any

from onetrunk.data.names import BUILDERS
from onetrunk.stages.run.pipeline import Pipeline, Stage
from onetrunk.stages.run_context import last_finished_checkpoint
from onetrunk.stages.tables import as_json, shortened
from onetrunk.utils.files import atomic_write_json, read_json
from onetrunk.utils.redaction import redact, redact_all

STATE_FILE = "pipeline.json"
# Files of a run that no later stage reads.
IGNORED = ("checkpoint-*", "runs", "__pycache__", ".*", "events.out.tfevents.*", "_report")
# Prefixes of a path in a setting, such as "reward:folder".
PREFIXES = ("reward:",)
UNCHANGED = "nothing has changed"
# The length of a training. If it grows, the training resumes.
LENGTHS = ("num_rollouts", "max_steps", "num_train_epochs")


@dataclass(frozen=True)
class Plan:
    """What a stage has to do."""

    stage: Stage
    action: str  # "done" (nothing), "run" (for the first time, or again because something changed), or "resume".
    reason: str
    inputs: dict[str, str | None]  # Path -> digest; None while an earlier stage has yet to write it.
    deletes: tuple[str, ...] = ()  # Names in its output folder that it would delete, for which it needs `--overwrite`.


class PipelineState:
    """The record of a pipeline's stages, in `pipeline.json` of its output folder.

    Raises:
        RuntimeError: the record is damaged.
    """

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.path = pipeline.output_dir / STATE_FILE
        record = read_json(self.path) if self.path.exists() else {}
        if not isinstance(record, dict) or not all(isinstance(record.get(k, {}), dict) for k in ("stages", "digests")):
            raise RuntimeError(
                f"{self.path} is not the record of a pipeline; delete it, and every stage runs again (with --overwrite"
                " if it has left a run)"
            )
        self.stages: dict[str, dict[str, Any]] = record.get("stages", {})
        # Path -> size, time of the last change, and digest.
        self._digests: dict[str, list[Any]] = record.get("digests", {})

    def plan(self, stage: Stage, waits_for: Iterable[Stage] = (), is_forced: bool = False) -> Plan:
        """Return what a stage has to do.

        `waits_for` are earlier stages that have yet to run; `is_forced` starts a stage over even if it is done.
        """
        inputs, left = self._inputs(stage, waits_for), tuple(stage.left())
        record = self.stages.get(stage.name)
        if is_forced or record is None:
            return Plan(stage, "run", "forced" if is_forced else "never ran", inputs, left)
        settings = _changed_settings(stage, record)
        changed = [change for name, change in settings.items() if name not in stage.free]
        changed += _changed_inputs(inputs, record)
        pending = [name for name in inputs if inputs[name] is None]
        lengths = [settings[name] for name in LENGTHS if name in settings and name in stage.free]
        if changed:
            reason, may_resume = f"changed: {'; '.join(changed)}", False
            if stage.settings.get("allow_config_change") is True and self.resumable(stage):
                reason, may_resume = f"{reason} (allow_config_change is set)", True
        elif pending:
            return Plan(stage, "run", f"waits for {', '.join(pending)}", inputs)
        elif record.get("status") != "done":
            reason, may_resume = f"was {record.get('status')}", True
        elif not (is_complete := stage.is_complete()) or lengths:
            reason = f"another length: {', '.join(lengths)}" if is_complete else "its output is incomplete or damaged"
            may_resume = self.resumable(stage) or not stage.trains
        else:
            why = f"only free settings have changed: {', '.join(settings)}" if settings else UNCHANGED
            return Plan(stage, "done", why, inputs)
        return Plan(stage, "resume", reason, inputs) if may_resume else Plan(stage, "run", reason, inputs, left)

    def resumable(self, stage: Stage) -> bool:
        """Return whether a stage that trains has left a checkpoint since it last started over.

        Earlier checkpoints are of another run, with other inputs.
        """
        checkpoint = last_finished_checkpoint(stage.output) if stage.trains else None
        return checkpoint is not None and checkpoint.stat().st_mtime >= self._started(stage)

    def note(self, plan: Plan, status: str, **more: Any) -> None:
        """Record the status of a stage: "running", "failed", "interrupted", "terminated" or "done"."""
        stage = plan.stage
        starts_over = status == "running" and plan.action == "run"
        self.stages[stage.name] = {
            "status": status,
            "command": redact(stage.shown()),
            "inputs": plan.inputs,
            "settings": _compared(stage),
            "started": time.time() if starts_over else self._started(stage),
            **more,
        }
        self._digests = {name: entry for name, entry in self._digests.items() if Path(name).exists()}
        record = {"pipeline": str(self.pipeline.path), "stages": self.stages, "digests": self._digests}
        atomic_write_json(self.path, record)

    def _started(self, stage: Stage) -> float:
        return self.stages.get(stage.name, {}).get("started", 0.0)

    def _inputs(self, stage: Stage, waits_for: Iterable[Stage]) -> dict[str, str | None]:
        pending = [output for other in waits_for for output in other.outputs]
        inputs = {str(stage.path): self._digest(stage.path)} if stage.verb is None else {}
        for path in paths_in({name: value for name, value in stage.settings.items() if name not in stage.free}):
            if any(_is_within(path, output) for output in stage.outputs):
                continue
            if any(_is_within(path, output) or _is_within(output, path) for output in pending):
                inputs[str(path)] = None
            elif path.exists():
                inputs[str(path)] = self._digest(path)
        return dict(sorted(inputs.items()))

    def _digest(self, path: Path) -> str:
        if path.is_file():
            return self._file_digest(path)
        names = [f"{file.relative_to(path).as_posix()} {self._file_digest(file)}\n" for file in files_of(path)]
        return hashlib.sha256("".join(names).encode()).hexdigest()

    def _file_digest(self, path: Path) -> str:
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns]
        entry = self._digests.get(str(path))
        if entry is None or entry[:2] != stamp:
            with path.open("rb") as file:
                entry = [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
            self._digests[str(path)] = entry
        return entry[2]


def _changed_inputs(inputs: dict[str, str | None], record: dict[str, Any]) -> list[str]:
    """Return which files and folders differ, without those that an earlier stage has yet to write."""
    before = record.get("inputs", {})
    gone = before.keys() - inputs.keys()
    other = {name for name, digest in inputs.items() if digest is not None and digest != before.get(name)}
    return sorted(gone | other)


def _changed_settings(stage: Stage, record: dict[str, Any]) -> dict[str, str]:
    then, now = record.get("settings", {}), _compared(stage)
    names = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    return {name: f"{name}: {_shown(then.get(name))} -> {_shown(now.get(name))}" for name in names}


def _compared(stage: Stage) -> dict[str, Any]:
    about = {"verb": stage.verb} if stage.verb else {"outputs": [str(output) for output in stage.outputs]}
    return json.loads(json.dumps(redact_all({**about, **stage.settings}), default=str))


def _shown(value: Any) -> str:
    return "not set" if value is None else shortened(value, 80) if isinstance(value, str) else as_json(value)


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from texts_in(entry)


def paths_in(settings: dict[str, Any]) -> Iterator[Path]:
    """Yield each text in some settings that may be a path, or a path followed by a colon and a name."""
    for text in texts_in(settings):
        for prefix in PREFIXES:
            text = text.removeprefix(prefix)
        before, colon, _ = text.rpartition(":")
        for candidate in (text, before) if colon else (text,):
            if not candidate or len(candidate) >= 1000 or "\n" in candidate or "://" in candidate:
                continue
            yield Path(candidate).expanduser()
            if "*" in candidate and Path(candidate).suffix in BUILDERS:  # Rows that are streamed.
                yield from map(Path, sorted(glob(str(Path(candidate).expanduser()), recursive=True)))


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that a later stage may read, sorted; links to folders are not followed."""

    def is_read(file: Path) -> bool:
        parts = file.relative_to(folder).parts
        return file.is_file() and not any(fnmatch(part, pattern) for part in parts for pattern in IGNORED)

    return sorted(filter(is_read, folder.rglob("*")))


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
