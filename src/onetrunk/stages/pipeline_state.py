"""What a pipeline remembers of its stages, and how it sees that something they rest on has changed.

A stage rests on its config, its options, and every file and folder that these name. Each is known by the sha256 of
what is in it; a stage is done while all of them are as they were when it ended, and its outputs are there. What a
Python file imports in its turn is not followed. Knows files; starts nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.files import atomic_write_json, read_json
from onetrunk.redaction import redact
from onetrunk.stages.pipeline import Pipeline, Stage, texts_in

STATE_FILE = "pipeline.json"
CONFIG = "its config"
# What a run leaves beside its result, and nobody reads on.
BESIDE = ("checkpoint-*", "runs", "__pycache__", ".*", "events.out.tfevents.*")
# Specs that name a path behind a word, or before one: "reward:folder", "rewards.py:polite".
PREFIXES = ("reward:",)


@dataclass(frozen=True)
class Plan:
    """What is to be done with a stage.

    Args:
        stage: the stage.
        action: "done" (nothing), "run" (for the first time, or again since something changed), "resume".
        reason: in words.
        inputs: what it rests on -> digest; None while an earlier stage has yet to write it.
    """

    stage: Stage
    action: str
    reason: str
    inputs: dict[str, str | None]


class PipelineState:
    """The record of a pipeline's stages, in `pipeline.json` of its output folder.

    Args:
        pipeline: whose stages.

    Raises:
        RuntimeError: the record is damaged.
    """

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.path = pipeline.output_dir / STATE_FILE
        kept = read_json(self.path) if self.path.exists() else {}
        if not isinstance(kept, dict) or not all(isinstance(kept.get(k, {}), dict) for k in ("stages", "digests")):
            raise RuntimeError(f"{self.path} is not the record of a pipeline; delete it, and every stage runs again")
        self.stages: dict[str, dict[str, Any]] = kept.get("stages", {})
        self._digests: dict[str, list[Any]] = kept.get("digests", {})

    def plan(self, stage: Stage, waits_for: Iterable[Stage] = ()) -> Plan:
        """Return what is to be done with a stage.

        Args:
            stage: the stage.
            waits_for: earlier stages that are still to run.
        """
        inputs = self._inputs(stage, waits_for)
        record = self.stages.get(stage.name)
        if record is None:
            return Plan(stage, "run", "never ran", inputs)
        before = record.get("inputs", {})
        changed = sorted(name for name in inputs.keys() | before.keys() if inputs.get(name) != before.get(name))
        if changed:
            coming = [name for name in changed if name in inputs and inputs[name] is None]
            if coming:
                return Plan(stage, "run", f"waits for {', '.join(coming)}", inputs)
            return Plan(stage, "run", f"changed: {', '.join(changed)}", inputs)
        if record.get("status") != "done":
            return Plan(stage, "resume", f"was {record.get('status')}", inputs)
        missing = [str(output) for output in stage.outputs if not output.exists()]
        if missing:
            return Plan(stage, "run", f"{', '.join(missing)} is gone", inputs)
        return Plan(stage, "done", "nothing has changed", inputs)

    def note(self, plan: Plan, status: str, **more: Any) -> None:
        """Write down how a stage stands: "running", "failed", "interrupted" or "done"."""
        self.stages[plan.stage.name] = {
            "status": status,
            "command": redact(plan.stage.shown()),
            "inputs": plan.inputs,
            **more,
        }
        self._write()

    def _write(self) -> None:
        # Of files that are gone, digests are of no use.
        self._digests = {name: entry for name, entry in self._digests.items() if Path(name).exists()}
        record = {"pipeline": str(self.pipeline.path), "stages": self.stages, "digests": self._digests}
        atomic_write_json(self.path, record)

    def _inputs(self, stage: Stage, waits_for: Iterable[Stage]) -> dict[str, str | None]:
        coming = [(output.resolve(), other) for other in waits_for for output in other.outputs]
        inputs: dict[str, str | None] = {CONFIG: _settings_digest(stage)}
        if stage.verb is None:
            inputs[str(stage.path)] = self._digest(stage.path)
        for path in sorted(set(paths_in(stage.settings)), key=str):
            if any(_is_within(path, output) for output in stage.outputs):
                continue
            if any(_is_within(path, output) or _is_within(output, path) for output, _ in coming):
                inputs[str(path)] = None
            elif path.exists():
                inputs[str(path)] = self._digest(path)
        return inputs

    def _digest(self, path: Path) -> str:
        if path.is_file():
            return self._file_digest(path)
        names = hashlib.sha256()
        for file in files_of(path):
            names.update(f"{file.relative_to(path).as_posix()} {self._file_digest(file)}\n".encode())
        return names.hexdigest()

    def _file_digest(self, path: Path) -> str:
        about = path.stat()
        stamp = [about.st_size, about.st_mtime_ns]
        known = self._digests.get(str(path))
        if known is None or known[:2] != stamp:
            with path.open("rb") as file:
                known = [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
            self._digests[str(path)] = known
        return known[2]


def _settings_digest(stage: Stage) -> str:
    about = {"verb": stage.verb, "settings": stage.settings, "outputs": [str(o) for o in stage.outputs]}
    return hashlib.sha256(repr(_ordered(about)).encode()).hexdigest()


def _ordered(value: Any) -> Any:
    """Return a value whose text does not depend on the order of keys."""
    if isinstance(value, dict):
        return sorted((str(key), _ordered(entry)) for key, entry in value.items())
    return [_ordered(entry) for entry in value] if isinstance(value, list) else value


def paths_in(settings: dict[str, Any]) -> Iterator[Path]:
    """Yield what may be a path among the texts of some settings: whole, or before or behind a colon."""
    for text in texts_in(settings):
        for prefix in PREFIXES:
            text = text.removeprefix(prefix)
        before, colon, _ = text.rpartition(":")
        for candidate in (text, before) if colon else (text,):
            if candidate and len(candidate) < 1000 and "\n" not in candidate and "://" not in candidate:
                yield Path(candidate).expanduser()


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that a later stage may read, sorted; a link to a folder is not followed."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_beside(name)]
        found += [Path(root) / name for name in names if not _is_beside(name)]
    return sorted(file for file in found if file.is_file())


def _is_beside(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in BESIDE)


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
