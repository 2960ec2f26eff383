"""The record of a pipeline's stages, and the plan of each stage: done, run, or resume.

A stage depends on its config, its options, and every file and folder that these name, compared by the sha256 of their
contents. It is done if none of them has changed since it ended and its outputs are complete. Free settings
(`Stage.free`) may change. The imports of a Python file are not followed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import glob
from pathlib import Path
from typing import Any

from onetrunk.checkpoints.folders import described, left_by_a_run
from onetrunk.data.names import BUILDERS
from onetrunk.models.reward_model import SCALE_FILE
from onetrunk.stages.resuming import last_finished_checkpoint, result_problems
from onetrunk.stages.run.pipeline import Pipeline, Stage, texts_in
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
# Where `prefs` writes its rows, which it replaces if the settings that decide them change.
ROWS = "data"
# Where `prefs` and `eval` keep judges' answers. The outputs are complete without them.
LEDGERS = "ledger/"


@dataclass(frozen=True)
class Plan:
    """What a stage has to do."""

    stage: Stage
    action: str  # "done" (nothing), "run" (for the first time, or again because something changed), or "resume".
    reason: str
    inputs: dict[str, str | None]  # Path -> digest; None while an earlier stage has yet to write it.
    deletes: Sequence[str] = ()  # Names in its output folder that it would delete, for which it needs `--overwrite`.


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
        self._digests: dict[str, list[Any]] = record.get("digests", {})

    def plan(self, stage: Stage, waits_for: Iterable[Stage] = (), is_forced: bool = False) -> Plan:
        """Return what a stage has to do.

        `waits_for` are earlier stages that have yet to run; `is_forced` starts a stage over even if it is done.
        """
        inputs = self._inputs(stage, waits_for)
        left = _deleted_when_started_over(stage)
        record = self.stages.get(stage.name)
        if is_forced or record is None:
            return Plan(stage, "run", "forced" if is_forced else "never ran", inputs, left)
        is_resumable = self.resumable(stage)
        settings = _changed_settings(stage, record)
        bound = [change for name, change in settings.items() if name not in stage.free]
        changed = bound + _changed_inputs(stage, inputs, record)
        pending = [name for name in inputs if inputs[name] is None]
        if changed:
            reason = f"changed: {'; '.join(changed)}"
            if stage.settings.get("allow_config_change") is True and is_resumable:
                return Plan(stage, "resume", f"{reason} (allow_config_change is set)", inputs)
            return Plan(stage, "run", reason, inputs, left)
        if pending:
            return Plan(stage, "run", f"waits for {', '.join(pending)}", inputs)
        if record.get("status") != "done":
            return Plan(stage, "resume", f"was {record.get('status')}", inputs)
        reason = _damage(stage, record)
        lengths = [settings[name] for name in LENGTHS if name in settings and name in stage.free]
        if reason is None and lengths:
            reason = f"another length: {', '.join(lengths)}"
        if reason is None:
            why = f"only free settings have changed: {', '.join(settings)}" if settings else UNCHANGED
            return Plan(stage, "done", why, inputs)
        if is_resumable:
            return Plan(stage, "resume", reason, inputs)
        # `prefs` can rebuild its rows from its ledger.
        return Plan(stage, "run", reason, inputs, left if stage.trains else ())

    def resumable(self, stage: Stage) -> bool:
        """Return whether a stage that trains has left a checkpoint since it last started over."""
        checkpoint = last_finished_checkpoint(stage.output) if stage.trains else None
        # Checkpoints from before the run began are of another run, with other inputs.
        stale = self.stages.get(stage.name, {}).get("stale", {})
        return checkpoint is not None and stale.get(checkpoint.name) != checkpoint.stat().st_mtime_ns

    def note(self, plan: Plan, status: str, **more: Any) -> None:
        """Record the status of a stage: "running", "failed", "interrupted", "terminated" or "done"."""
        stage = plan.stage
        self.stages[stage.name] = {
            "status": status,
            "command": redact(stage.shown()),
            "inputs": plan.inputs,
            "settings": _compared(stage),
            **({"files": _files_left(stage)} if status == "done" else {}),
            **more,
        }
        self._write()

    def _write(self) -> None:
        self._digests = {name: entry for name, entry in self._digests.items() if Path(name).exists()}
        record = {"pipeline": str(self.pipeline.path), "stages": self.stages, "digests": self._digests}
        atomic_write_json(self.path, record)

    def _inputs(self, stage: Stage, waits_for: Iterable[Stage]) -> dict[str, str | None]:
        pending = [output.resolve() for other in waits_for for output in other.outputs]
        inputs: dict[str, str | None] = {}
        if stage.verb is None:
            inputs[str(stage.path)] = self._digest(stage.path)
        bound_settings = {name: value for name, value in stage.settings.items() if name not in stage.free}
        for path in sorted(set(paths_in(bound_settings)), key=str):
            if any(_is_within(path, output) for output in stage.outputs):
                continue
            if any(_is_within(path, output) or _is_within(output, path) for output in pending):
                inputs[str(path)] = None
            elif path.exists():
                inputs[str(path)] = self._digest(path)
        return inputs

    def _digest(self, path: Path) -> str:
        if path.is_file():
            return self._file_digest(path)
        names = hashlib.sha256()
        for file in files_of(path):
            names.update(f"{_relative(file, path)} {self._file_digest(file)}\n".encode())
        return names.hexdigest()

    def _file_digest(self, path: Path) -> str:
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns]
        entry = self._digests.get(str(path))
        if entry is None or entry[:2] != stamp:
            with path.open("rb") as file:
                entry = [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
            self._digests[str(path)] = entry
        return entry[2]


def _changed_inputs(stage: Stage, inputs: dict[str, str | None], record: dict[str, Any]) -> list[str]:
    """Return which files and folders differ, without those that an earlier stage has yet to write."""
    before = record.get("inputs", {})
    free_paths = {str(path) for path in paths_in({name: stage.settings.get(name) for name in stage.free})}
    gone = before.keys() - inputs.keys() - free_paths
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


def _deleted_when_started_over(stage: Stage) -> list[str]:
    if stage.trains:
        return left_by_a_run(stage.output)
    has_rows = stage.verb == "prefs" and any((stage.output / ROWS).glob("*"))
    return [ROWS] if has_rows else []


def _damage(stage: Stage, record: dict[str, Any]) -> str | None:
    """Return what is wrong with the outputs of a finished stage; None if they are complete.

    A result with a manifest must be as it was written. Other outputs may be edited by hand: only missing files count.
    """
    missing = stage.missing()
    if missing:
        return f"{', '.join(missing)} is gone"
    if stage.trains:
        problems = result_problems(stage.output)
        if stage.verb in ("reward", "distill") and not (stage.output / SCALE_FILE).is_file():
            problems.append(f"{SCALE_FILE}: missing")
        return f"{stage.output} is damaged ({described(problems)})" if problems else None
    gone = [
        str(Path(output) / name)
        for output, names in record.get("files", {}).items()
        for name in names
        if not (Path(output) / name).is_file()
    ]
    return f"{described(gone)} is gone" if gone else None


def _files_left(stage: Stage) -> dict[str, list[str]]:
    """Return the files in the output folders of a stage; those of a training are in its manifest."""
    if stage.trains:
        return {}
    return {
        str(output): [name for file in files_of(output) if not (name := _relative(file, output)).startswith(LEDGERS)]
        for output in stage.outputs
        if output.is_dir()
    }


def _relative(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


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

    def is_ignored(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in IGNORED)

    files = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_ignored(name)]
        files += [Path(root) / name for name in names if not is_ignored(name)]
    return sorted(file for file in files if file.is_file())


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
